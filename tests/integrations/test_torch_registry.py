"""FlashGen as torch's flash attention: the registry, and what its operators give in place of torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from flashgen.errors import InvalidArgument
from flashgen.integrations import torch as integration

has_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no registry"
)


@has_registry
def test_nothing_changes_until_it_is_activated() -> None:
    attention = torch.nn.attention
    for _ in range(2):
        integration.register()
    assert "flashgen" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("flashgen")
    try:
        assert attention.current_flash_attention_impl() == "flashgen"
        q, k, v = torch.randn(3, 1, 2, 5, 16)
        F.scaled_dot_product_attention(q, k, v)  # CPU tensors have operators of their own
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_a_torch_without_a_registry_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(ImportError, match=r"has no torch.nn.attention.register_.* call flashgen.sdpa"):
        integration.register()


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("is_causal", "kv_heads"), [(False, 4), (True, 4), (False, 2)])
def test_both_operators_mean_what_torchs_do(is_causal: bool, kv_heads: int, scale: float | None) -> None:
    q, k, v = (torch.randn(2, heads, 9, 16).requires_grad_() for heads in (4, kv_heads, kv_heads))
    wanted = F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=kv_heads < 4
    )
    out, lse, no_q, no_k, max_q, max_k, seed, offset, dropped = integration.forward(
        q, k, v, 0.0, is_causal, scale=scale
    )
    assert out.grad_fn is None and (no_q, no_k, max_q, max_k) == (None, None, 9, 9)
    assert out.stride() == q.stride() and lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5)
    dout = torch.randn_like(out)
    with torch.no_grad():
        found = integration.backward(
            dout, q, k, v, out, lse, None, None, 9, 9, 0.0, is_causal, seed, offset, scale=scale
        )
    for ours, theirs in zip(found, torch.autograd.grad(wanted, (q, k, v), dout), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert not dropped.numel()


def test_dropout_is_refused_with_what_to_do() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    with pytest.raises(InvalidArgument, match=r"dropout_p=0.5, .*restore_flash_attention_impl\(\)"):
        integration.forward(q, k, v, 0.5)
