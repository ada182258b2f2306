"""`flashgen.sdpa` beside torch.nn.functional.scaled_dot_product_attention, over a table of arguments."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import flashgen
from flashgen.errors import InvalidArgument
from flashgen.runtime.sdpa import translate
from flashgen.spec import masks


def draw(
    *, batch: int = 2, heads: int = 4, kv_heads: int = 4, q_len: int = 6, k_len: int = 9, head_dim: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len))
    q, k, v = (torch.randn(batch, *shape, head_dim, generator=generator) for shape in shapes)
    return q, k, v


def keep(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6


NONE = torch.zeros(2, 1, 1, 9, dtype=torch.bool)

SERVED: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "nothing": ({}, {}, "full"),
    "causal, more keys": ({}, {"is_causal": True}, 'causal(align="top_left")'),
    "causal, more queries": ({"q_len": 9, "k_len": 4}, {"is_causal": True}, 'causal(align="top_left")'),
    "causal, square": ({"q_len": 9}, {"is_causal": True}, "causal"),
    "causal, one query": ({"q_len": 1}, {"is_causal": True}, 'causal(align="top_left")'),
    "scale": ({}, {"scale": 0.3}, "full"),
    "negative scale": ({}, {"scale": -0.3}, "full"),
    "scale 0": ({}, {"scale": 0.0}, "full"),
    "scale below float32": ({}, {"scale": 1e-50}, "full"),
    "grouped heads": ({"kv_heads": 2}, {"enable_gqa": True, "is_causal": True}, 'causal(align="top_left")'),
    "gqa of equal heads": ({}, {"enable_gqa": True}, "full"),
    "key padding": ({}, {"attn_mask": keep(2, 1, 1, 9)}, 'key_padding("keep")'),
    "one key padding for all": ({}, {"attn_mask": keep(1, 1, 1, 9)}, 'key_padding("keep")'),
    "key padding of fewer dimensions": ({}, {"attn_mask": keep(1, 9)}, 'key_padding("keep")'),
    "one query": ({"q_len": 1}, {"attn_mask": keep(2, 1, 1, 9)}, 'key_padding("keep")'),
    "one flag for all keys": ({}, {"attn_mask": torch.ones(2, 1, 1, 1).bool()}, 'key_padding("keep")'),
    "no key at all": ({}, {"attn_mask": NONE}, 'key_padding("keep")'),
    "dropout of 0": ({}, {"dropout_p": 0.0}, "full"),
}

LEFT_TO_TORCH: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "a float mask": ({}, {"attn_mask": torch.randn(6, 9)}, "additive bias"),
    "a mask of queries and keys": ({}, {"attn_mask": keep(6, 9)}, "differs between heads or queries"),
    "a mask of heads": ({}, {"attn_mask": keep(2, 4, 1, 9)}, "differs between heads or queries"),
    "a mask of everything": ({}, {"attn_mask": keep(2, 4, 6, 9)}, "differs between heads or queries"),
    "two masks": ({}, {"attn_mask": keep(6, 9), "is_causal": True}, "both attn_mask and is_causal"),
    "a head dim that is not served": ({"head_dim": 12}, {}, "head dim 12"),
    "a scale that is True": ({}, {"scale": True, "enable_gqa": True}, "no plain number"),
    "a scale in a tensor": ({}, {"scale": torch.tensor(0.5), "enable_gqa": True}, "no plain number"),
    "a large head dim": ({"head_dim": 320}, {}, "head dim 320"),
}


@pytest.mark.parametrize("dim", [12, 264])
def test_a_head_dim_of_v_that_is_not_served_is_left_to_torch(dim: int) -> None:
    q, k, v = draw()
    v = torch.randn(*v.shape[:3], dim)
    told = translate(q, k, v, None, 0.0, False, None, False)
    assert isinstance(told, str) and str(dim) in told
    torch.testing.assert_close(flashgen.sdpa(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("case", SERVED)
def test_what_is_served_means_what_torch_means(case: str) -> None:
    sizes, options, mask = SERVED[case]
    q, k, v = draw(**sizes)
    translated = translate(q, k, v, *_in_order(options))
    assert not isinstance(translated, str), translated
    assert translated.describe() == mask
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(flashgen.sdpa(q, k, v, **options), expected, atol=1e-5, rtol=1e-5)
    assert flashgen.explain(q, k, v, **options).runs == "the reference in float32"


@pytest.mark.parametrize("case", LEFT_TO_TORCH)
def test_what_no_kernel_takes_is_left_to_torch_and_explain_says_why(case: str) -> None:
    sizes, options, reason = LEFT_TO_TORCH[case]
    q, k, v = draw(**sizes)
    assert reason in str(translate(q, k, v, *_in_order(options)))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(flashgen.sdpa(q, k, v, **options), expected)
    if options:
        told = flashgen.explain(q, k, v, **options)
        assert told.runs == "scaled_dot_product_attention" and reason in told.steps[0].reason


def _in_order(options: dict[str, Any]) -> list[Any]:
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    return list((defaults | options).values())


@pytest.mark.parametrize(
    "change", [{"key": None}, {"query": "q"}, {"value": [1.0]}, {"attn_mask": [True]}, {"scale": "0.5"}]
)
def test_what_is_no_tensor_gets_torchs_own_error(change: dict[str, Any]) -> None:
    given = dict(zip(("query", "key", "value"), draw(), strict=True)) | change
    with pytest.raises(TypeError) as theirs:
        F.scaled_dot_product_attention(**given)
    with pytest.raises(TypeError) as ours:
        flashgen.sdpa(**given)
    assert re.sub(r" \(position \d\)", "", str(ours.value)) == str(theirs.value)
    if "query" in change:
        with pytest.raises(InvalidArgument, match="q must be a tensor"):
            flashgen.explain(*list(given.values())[:3], is_causal=True)


def test_dropout_is_that_of_attention_and_what_is_no_probability_is_torchs() -> None:
    q, k, v = draw()
    torch.manual_seed(5)
    expected = flashgen.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(flashgen.sdpa(q, k, v, dropout_p=0.5), expected)
    assert not flashgen.sdpa(q, k, v, dropout_p=1).any()
    with pytest.raises(RuntimeError, match="dropout probability"):
        flashgen.sdpa(q, k, v, dropout_p=1.5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": keep(2, 1, 1, 9)}])
def test_gradients_are_those_of_torchs(options: dict[str, Any]) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in draw())
    ours = torch.autograd.grad(flashgen.sdpa(q, k, v, **options).square().sum(), (q, k, v))
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, **options).square().sum(), (q, k, v))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert "a gradient is needed: kernels run on CUDA" in str(flashgen.explain(q, k, v, is_causal=True))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": keep(2, 1, 1, 9)}])
def test_forward_mode_and_transforms_are_torchs(options: dict[str, Any]) -> None:
    q, k, v = draw()

    def result(function: Any) -> Any:
        def call(q: Tensor) -> Tensor:
            return function(q, k, v, **options)

        try:
            return torch.func.jvp(call, (q,), (q,))
        except NotImplementedError as error:  # torch's backend on the CPU
            return str(error)

    ours, theirs = result(flashgen.sdpa), result(F.scaled_dot_product_attention)
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        assert all(map(torch.equal, ours, theirs))
    stacked = torch.stack([q, 2 * q])
    mapped = torch.func.vmap(lambda q: flashgen.sdpa(q, k, v, **options))(stacked)
    expected = [F.scaled_dot_product_attention(each, k, v, **options) for each in stacked]
    torch.testing.assert_close(mapped, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"kv_heads": 2}, {}),  # fewer key heads without enable_gqa
        ({"kv_heads": 3}, {"enable_gqa": True}),
        ({}, {"attn_mask": keep(9)}),
        ({}, {"attn_mask": keep(1, 5)}),
        ({}, {"attn_mask": keep(3, 1, 1, 9)}),
    ],
)
def test_what_torch_refuses_is_refused_by_torch(sizes: dict[str, int], options: dict[str, Any]) -> None:
    q, k, v = draw(**sizes)
    with pytest.raises((RuntimeError, ValueError, IndexError)) as theirs:
        F.scaled_dot_product_attention(q, k, v, **options)
    with pytest.raises(type(theirs.value)) as ours:
        flashgen.sdpa(q, k, v, **options)
    assert str(ours.value) == str(theirs.value)


ODD = [0, 1, "", "False", "yes", None, [], [1], (), 0.0, 2, torch.tensor(True)]


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa", "dropout_p", "scale", "attn_mask"])
@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_values_that_torch_refuses_are_refused_by_torch(name: str, value: Any, kv_heads: int) -> None:
    q, k, v = draw(kv_heads=kv_heads)
    options = {"enable_gqa": kv_heads == 2} | {name: value}
    try:
        theirs = F.scaled_dot_product_attention(q, k, v, **options)
    except (TypeError, RuntimeError, ValueError, IndexError) as refused:
        with pytest.raises(type(refused)):
            flashgen.sdpa(q, k, v, **options)
        return
    if name != "dropout_p" or value == 0:
        torch.testing.assert_close(flashgen.sdpa(q, k, v, **options), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
@pytest.mark.parametrize("value", [0, 1, "False", "", None, []], ids=repr)
def test_explain_says_what_is_no_flag(name: str, value: Any) -> None:
    explained = flashgen.explain(*draw(), **{name: value})
    assert explained.steps[0].reason == f"{name} is neither True nor False"


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"attn_mask": keep(2, 1, 1, 9)}]
)
@pytest.mark.parametrize("heads", [(0, 0), (4, 0)])
def test_no_heads_are_torchs(heads: tuple[int, int], options: dict[str, Any]) -> None:
    q, k, v = draw()
    q, k, v = q[:, : heads[0]], k[:, : heads[1]], v[:, : heads[1]]
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(flashgen.sdpa(q, k, v, **options), expected)


def test_a_flag_may_depend_on_sizes_that_vary() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: flashgen.sdpa(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1]),
        fullgraph=True,
        backend="eager",
        dynamic=True,
    )
    for q_len in (5, 1):
        q, k, v = draw(q_len=q_len)
        torch.testing.assert_close(compiled(q, k, v), flashgen.sdpa(q, k, v, is_causal=q_len > 1))


def test_other_ranks_and_broadcast_batches_are_torchs() -> None:
    q, k, v = draw()
    assert torch.equal(flashgen.sdpa(q[0], k[0], v[0]), F.scaled_dot_product_attention(q[0], k[0], v[0]))
    expected = F.scaled_dot_product_attention(q, k[:1], v[:1])
    assert torch.equal(flashgen.sdpa(q, k[:1], v[:1]), expected)


def test_the_signature_is_torchs() -> None:
    names = list(inspect.signature(flashgen.sdpa).parameters)
    assert names == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip


def test_explain_refuses_to_mix_the_arguments_of_both_calls() -> None:
    with pytest.raises(InvalidArgument, match="give one kind"):
        flashgen.explain(*draw(), mask=masks.causal(), is_causal=True)
