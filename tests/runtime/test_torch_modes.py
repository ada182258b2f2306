"""Modes of torch at the boundary of the API: autocast, float32 precision, traces, vmap, lazy negation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import flashgen
from flashgen import masks, score_mods
from flashgen.build.reference import attention_reference

SHAPE = (2, 2, 6, 32)
LOW = [torch.bfloat16, torch.float16]


def draw(gradient: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).to(dtype).requires_grad_(gradient) for _ in range(3)]


# Autocast


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("low", LOW)
def test_autocast_rounds_what_it_rounds_for_torchs_attention(low: torch.dtype, gradient: bool) -> None:
    q, k, v = draw(gradient)
    mixed = (q, k.detach().to(low).requires_grad_(gradient), v)
    for given in ((q, k, v), mixed):
        with torch.autocast("cpu", low):
            ours, served = flashgen.attention(*given), flashgen.sdpa(*given)
            theirs = F.scaled_dot_product_attention(*given)
            padded = flashgen.sdpa(*given, torch.ones(2, 1, 1, 6, dtype=torch.bool))
            told = flashgen.explain(*given)
        for out in (ours, served, padded):
            assert out.dtype == theirs.dtype == low and (out.grad_fn is not None) == gradient
            torch.testing.assert_close(out, theirs, atol=2e-2, rtol=2e-2)
        assert "reference" in str(told) or gradient
        if gradient:
            grads = torch.autograd.grad(ours.float().sum(), given)
            assert [grad.dtype for grad in grads] == [tensor.dtype for tensor in given]


def test_autocast_leaves_what_torch_leaves() -> None:
    q, k, v = draw()
    with torch.autocast("cpu", torch.bfloat16):
        double = [tensor.double() for tensor in (q, k, v)]
        assert flashgen.sdpa(*double).dtype == torch.float64
        meta = [tensor.to("meta") for tensor in (q, k, v)]
        assert flashgen.attention(*meta).dtype == torch.float32  # no device type that autocast knows
        with torch.autocast("cpu", enabled=False):
            assert flashgen.attention(q, k, v).dtype == flashgen.sdpa(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("score_mod", [None, score_mods.softcap(30.0)])
def test_our_own_arithmetic_does_not_run_under_autocast(
    score_mod: Any, low: torch.dtype, gradient: bool
) -> None:
    def run() -> list[Tensor]:
        out, lse = flashgen.attention(*inputs, mask="causal", score_mod=score_mod, return_lse=True)
        assert out.dtype == low and lse.dtype == torch.float32
        return [out.detach(), lse.detach()]

    inputs = [tensor * 3 for tensor in draw(gradient, low)]
    plain = run()
    with torch.autocast("cpu", low):
        for one, other in zip(run(), plain, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("gradient", [False, True])
def test_c03_large_scores_under_autocast(gradient: bool) -> None:
    q = torch.full((1, 1, 4, 128), 300.0, requires_grad=gradient)
    k, v = torch.full((1, 1, 4, 128), -300.0), torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 128)
    with torch.autocast("cpu", torch.float16):
        out, lse = flashgen.attention(q, k, v, mask="causal", scale=1.0, return_lse=True)
    torch.testing.assert_close(out[0, 0, :, 0].float(), torch.tensor([0.0, 0.5, 1.0, 1.5]))
    torch.testing.assert_close(lse, torch.full((1, 1, 4), -1.152e7), rtol=1e-6, atol=0.0)


# float32 precision


@pytest.fixture
def restored_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("setting", ["high", "medium"])
def test_threads_leave_the_float32_setting_alone(setting: str) -> None:
    def settings() -> list[str]:
        backends: Any = torch.backends
        return [backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision]

    def work() -> None:
        for _ in range(30):
            flashgen.attention(q, k, v)
            seen.update([tuple(settings())])

    torch.set_float32_matmul_precision(setting)
    (q, k, v), before = draw(), settings()
    seen: set[tuple[str, ...]] = set()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {tuple(before)} and settings() == before


@pytest.mark.usefixtures("restored_precision")
def test_the_reference_is_exact_whatever_the_setting() -> None:
    q, k, v = draw()
    exact = attention_reference(q, k, v, dtype=torch.float64)
    for setting in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(setting)
        for ours, theirs in zip(attention_reference(q, k, v, mask=masks.full()), exact, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6)


# Traces and transforms


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_jit_trace_holds_the_operator_and_not_one_calls_numbers() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        mask = masks.causal() & masks.key_padding(lengths)
        result: tuple[Tensor, Tensor] = flashgen.attention(
            q, k, v, mask=mask, score_mod="softcap(2.0)", return_lse=True
        )
        return result

    traced = torch.jit.trace(call, (*draw(), torch.tensor([6, 2])))
    assert "flashgen::attention_fwd" in str(traced.graph)
    longer = [tensor.repeat(1, 1, 2, 1) * 2 for tensor in draw()]
    lengths = torch.tensor([3, 11])
    for one, other in zip(traced(*longer, lengths), call(*longer, lengths), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("over", ["q", "k", "v", "lengths"])
def test_vmap_is_a_loop(over: str) -> None:
    def call(**changed: Tensor) -> tuple[Tensor, Tensor]:
        given = plain | changed
        mask = masks.causal() & masks.key_padding(given.pop("lengths"))
        result: tuple[Tensor, Tensor] = flashgen.attention(
            **given, mask=mask, score_mod=score_mods.softcap(2.0), return_lse=True
        )
        return result

    plain = dict(zip("qkv", draw(), strict=True)) | {"lengths": torch.tensor([6, 2])}
    several = torch.stack([plain[over], plain[over] // 2, plain[over] - 1])
    batched = torch.vmap(lambda each: call(**{over: each}))(several)
    looped = [call(**{over: each}) for each in several]
    for ours, wanted in zip(batched, zip(*looped, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(wanted), atol=1e-6, rtol=1e-5)


def test_lazily_negated_tensors_mean_what_they_say() -> None:
    q, k, v = draw()
    lazy = [torch.complex(tensor, -tensor).conj().imag for tensor in (q, k, v)]
    assert all(tensor.is_neg() for tensor in lazy)
    torch.testing.assert_close(
        flashgen.attention(*lazy, mask="causal"), flashgen.attention(q, k, v, mask="causal")
    )
