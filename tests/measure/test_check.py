"""Right or wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from misbehave import right, varies, workload, wrong

from flashgen.build.inputs import TORCH, make_inputs
from flashgen.build.reference import attention_reference
from flashgen.measure.check import TOLERANCES, Expected, Poisoned, Rig
from flashgen.spec.attention import DTYPES, OUT_DTYPES, AttentionSpec, Workload
from flashgen.spec.masks import Mask, causal, full, key_padding, sliding_window

MASKS = [full(), causal(), sliding_window(16, 0), key_padding() & causal()]


def made(mask: Mask, dtype: str, **changes: Any) -> tuple[Workload, Any]:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 70, "k_len": 90} | changes
    params = tuple((n, v) for (n, _), v in zip(mask.rule.params, mask.values, strict=True))
    workload = Workload(AttentionSpec(32, 32, dtype, mask.rule, return_lse=True), **sizes, params=params)
    return workload, make_inputs(workload, "cpu")


def answer(inputs: Any, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    result = TORCH[OUT_DTYPES[dtype][0]]
    out, lse = attention_reference(
        *inputs.true(), mask=inputs.mask, round_p_to=TORCH[dtype], round_out_to=result
    )
    return out.to(result), lse


def test_every_dtype_has_a_tolerance() -> None:
    assert set(TOLERANCES) == {*DTYPES, "tf32"}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("all_scores", [2**33, 70 * 90 * 5], ids=["all heads", "some heads"])
def test_a_kernels_own_rounding_passes(mask: Mask, dtype: str, all_scores: int) -> None:
    workload, inputs = made(mask, dtype)
    expected = Expected(inputs, workload.spec, all_scores)
    assert (expected.pairs is None) == (all_scores == 2**33)
    out, lse = answer(inputs, dtype)
    verdict = expected.judge(out, lse)
    assert verdict.ok, verdict.reason
    assert verdict.max_error <= expected.max_limit


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_one_forgotten_tile_of_a_long_row_is_found(dtype: str) -> None:
    """16 of 2048 keys: in bf16 no element is off by more than a short row's may be; the row as a whole is.
    Among weights of 8 bits a block of 64 keys, the least of a kernel for them.
    """
    forgotten = 64 if dtype == "e4m3" else 16
    workload, inputs = made(causal(), dtype, batch=1, heads=1, kv_heads=1, q_len=2048, k_len=2048)
    expected = Expected(inputs, workload.spec)
    out, lse = answer(inputs, dtype)
    assert expected.judge(out, lse).ok
    q, k, v = inputs.true()
    q, k, v = q[:, :, -1:], k[:, :, forgotten:], v[:, :, forgotten:]
    out[:, :, -1:] = attention_reference(q, k, v)[0].to(out.dtype)
    verdict = expected.judge(out, lse)
    assert verdict.reason.endswith("row 2047")
    if dtype == "bf16":
        assert verdict.reason.startswith("relative error ")
        assert verdict.max_error < expected.max_limit, "the absolute error alone would have let it pass"


def test_tf32_products_are_too_coarse_for_fp32_and_right_for_tf32() -> None:
    workload, inputs = made(causal(), "fp32")
    q, k, v = (
        x.view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32) for x in (inputs.q, inputs.k, inputs.v)
    )
    out, lse = attention_reference(q, k, v, mask=inputs.mask)
    assert "error" in Expected(inputs, workload.spec).judge(out, lse).reason
    coarse = AttentionSpec(32, 32, "fp32", causal().rule, return_lse=True, fp32_precision="tf32")
    assert Expected(inputs, coarse).judge(out, lse).ok


def test_a_wrong_head_mapping_is_found_among_some_heads() -> None:
    workload, inputs = made(full(), "fp32", heads=8)
    expected = Expected(inputs, workload.spec, all_scores=70 * 90 * 4)
    swapped = inputs.k.flip(1), inputs.v.flip(1)
    out, lse = attention_reference(inputs.q, *swapped)
    assert len(expected.pairs or ()) == 4
    assert not expected.judge(out, lse).ok
    interleaved = attention_reference(inputs.q, inputs.k.repeat(1, 4, 1, 1), inputs.v.repeat(1, 4, 1, 1))
    assert not expected.judge(*interleaved).ok


def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity() -> None:
    workload, inputs = made(causal(), "fp32", q_len=90, k_len=70)
    expected = Expected(inputs, workload.spec)
    out, lse = answer(inputs, "fp32")
    assert bool((lse[..., :20] == -math.inf).all()) and bool((out[:, :, :20] == 0).all())
    assert expected.judge(out, lse).ok
    out[:, :, 3] = 0.1
    assert "row 3" in expected.judge(out, lse).reason
    out[:, :, 3] = 0.0
    lse[0, 1, 5] = 0.0
    assert expected.judge(out, lse).reason == "the LSE is -inf in other rows than those that see no key"
    lse[0, 1, 5] = math.inf
    assert expected.judge(out, lse).reason == "1 of 720 elements of lse are NaN or infinite"


def test_what_is_outside_the_compared_heads_must_still_be_written() -> None:
    workload, inputs = made(full(), "fp32", batch=4)
    expected = Expected(inputs, workload.spec, all_scores=1)
    out, lse = answer(inputs, "fp32")
    assert (1, 2) not in (expected.pairs or ())
    out[1, 2, 3, 4] = math.nan
    assert "NaN" in expected.judge(out, lse).reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_poison_is_nan_and_shows_where_nothing_was_written(dtype: torch.dtype) -> None:
    buffer = Poisoned((4, 8), dtype, torch.device("cpu"))
    buffer.poison()
    assert bool(buffer.tensor.isnan().all())
    assert buffer.tensor.data_ptr() % 16 == 0
    buffer.tensor.zero_()
    assert not buffer.overrun()
    zone = torch.as_strided(buffer.tensor, (1,), (1,), buffer.tensor.storage_offset() + 32)
    zone.zero_()
    assert buffer.overrun()


def test_of_two_runs_that_differ_both_are_judged() -> None:
    work = workload()
    rig = Rig(make_inputs(work, "cpu"), work.spec)
    assert rig.examine(right(rig)) == (rig.judge(), True) and rig.judge().ok
    verdict, same = rig.examine(varies(rig))
    assert verdict.ok and not same
    for first, second in ((right, wrong), (wrong, right)):
        kernels = iter((first(rig), second(rig)))
        verdict, same = rig.examine(lambda *buffers, kernels=kernels: next(kernels)(*buffers))
        assert not verdict.ok and not same


def test_an_empty_output_is_right() -> None:
    workload, inputs = made(full(), "bf16", q_len=0)
    out, lse = answer(inputs, "bf16")
    assert Expected(inputs, workload.spec).judge(out, lse).ok
