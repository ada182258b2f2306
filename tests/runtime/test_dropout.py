"""dropout_p of calls: values and gradients against float64 with the same draws, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen import masks, score_mods
from flashgen.build.dropout import Dropout, draw_seed
from flashgen.build.quantized import quantize
from flashgen.build.reference import attention_reference, packed_reference
from flashgen.errors import InvalidArgument
from flashgen.runtime import torch_path

P = 0.3
CU = (0, 30, 30, 70)


def draw(gradient: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 40, 32), (2, 2, 50, 32), (2, 2, 50, 24))
    return [torch.randn(shape, generator=generator).requires_grad_(gradient) for shape in shapes]


def next_dropout() -> Dropout:
    """What the next call drops: the generator is left as it was."""
    state = torch.get_rng_state()
    seed = draw_seed(torch.device("cpu"))
    torch.set_rng_state(state)
    return Dropout(P, seed)


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.causal()},
    "softcap and sinks": {"score_mod": score_mods.softcap(2.0), "sinks": torch.tensor([0.0, 1.0, 2.0, 3.0])},
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_values_and_gradients(
    options: dict[str, Any], gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where scores are written out a few rows at a time, and again for the gradient."""
    monkeypatch.setattr(torch_path, "CHUNK_SCORES", 2 * 4 * 50 * 17)
    inputs, drops = draw(gradient), next_dropout()
    own = [each.detach().double().requires_grad_() for each in inputs]
    exact, exact_lse = attention_reference(*own, **options, dropout=drops, dtype=torch.float64)
    out, lse = flashgen.attention(*inputs, **options, dropout_p=P, return_lse=True)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    if gradient:
        found = torch.autograd.grad(out.square().sum(), inputs)
        for ours, theirs in zip(found, torch.autograd.grad(exact.square().sum(), own), strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gradient", [False, True])
def test_packed_sequences(gradient: bool) -> None:
    generator, drops = torch.Generator().manual_seed(1), next_dropout()
    q, k, v = (torch.randn(70, 4, 32, generator=generator).requires_grad_(gradient) for _ in range(3))
    cu = torch.tensor(CU, dtype=torch.int32)
    out = flashgen.attention_varlen(q, k, v, cu, cu, 40, 40, mask="causal", dropout_p=P)
    tensors = (each.double() for each in (q, k, v))
    options: dict[str, Any] = {"mask": masks.causal(), "dropout": drops, "dtype": torch.float64}
    exact, _ = packed_reference(*tensors, CU, CU, **options)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    assert out.requires_grad == gradient


def test_8_bit_tensors() -> None:
    stored, factors = zip(*(quantize(each) for each in draw()), strict=True)
    names = ("q_descale", "k_descale", "v_descale")
    given = dict(zip(names, factors, strict=True))
    drops = next_dropout()
    out = flashgen.attention(*stored, **given, dropout_p=P, out_dtype=torch.float16)
    true = (s.double() * f.double()[..., None, None] for s, f in zip(stored, factors, strict=True))
    exact, _ = attention_reference(*true, dropout=drops, dtype=torch.float64)
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=1e-3)


def test_manual_seed_repeats_and_every_call_drops_others() -> None:
    q, k, v = draw()
    torch.manual_seed(5)
    one, two = (flashgen.attention(q, k, v, dropout_p=P) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(flashgen.attention(q, k, v, dropout_p=P), one)
    assert torch.equal(flashgen.attention(q, k, v, dropout_p=P), two) and not torch.equal(one, two)


def test_checkpointing_drops_the_same_again() -> None:
    found = []
    for kept in (True, False):
        inputs = draw(gradient=True)
        torch.manual_seed(5)
        call = lambda q, k, v: flashgen.attention(q, k, v, mask="causal", dropout_p=P)  # noqa: E731
        out = call(*inputs) if kept else torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_no_probability_draws_nothing_and_all_of_it_leaves_nothing() -> None:
    q, k, v = draw()
    before = torch.get_rng_state()
    for none in (0, 0.0, -0.0):
        assert torch.equal(flashgen.attention(q, k, v, dropout_p=none), flashgen.attention(q, k, v))
    flashgen.explain(q, k, v, dropout_p=P)
    assert torch.equal(torch.get_rng_state(), before)
    inputs = draw(gradient=True)
    out, lse = flashgen.attention(*inputs, dropout_p=1, return_lse=True)
    assert not out.any() and torch.equal(lse, flashgen.attention(*inputs, return_lse=True)[1])
    assert not any(each.any() for each in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("gradient", [False, True])
def test_compiled_calls_drop_the_same(gradient: bool, options: dict[str, Any]) -> None:
    """In both passes: a graph that torch does not fuse draws the seed as an eager call does."""
    inputs = draw(gradient)
    call = lambda q, k, v: flashgen.attention(q, k, v, **options, dropout_p=P)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    ours, other = compiled(*inputs), compiled(*inputs)
    torch.manual_seed(3)
    eager = call(*inputs)
    torch.testing.assert_close(ours, eager, atol=1e-6, rtol=1e-5)
    assert not torch.equal(ours, other)
    if gradient:
        pairs = zip(
            *(torch.autograd.grad(each.square().sum(), inputs) for each in (ours, eager)), strict=True
        )
        for one, two in pairs:
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("given", [-0.1, 1.5, float("nan"), True, None, "0.1", torch.tensor(0.5)], ids=str)
def test_what_is_no_probability_is_refused(given: Any) -> None:
    q, k, v = draw()
    cu = torch.tensor([0, 40], dtype=torch.int32)
    packed = (q[0].transpose(0, 1), k[0, :, :40].transpose(0, 1), v[0, :, :40].transpose(0, 1))
    for call in (
        lambda: flashgen.attention(q, k, v, dropout_p=given),
        lambda: flashgen.attention_varlen(*packed, cu, cu, 40, 40, dropout_p=given),
        lambda: flashgen.explain(q, k, v, dropout_p=given),
    ):
        with pytest.raises(InvalidArgument, match=r"dropout_p=.* must be a number from 0 to 1"):
            call()


def test_explain_says_it() -> None:
    assert "mask full, dropout" in str(flashgen.explain(*draw(), dropout_p=P))
