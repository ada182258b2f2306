"""Keys split among programs, in Triton's interpreter against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernels import ALIGNED, STRIDED, run
from test_attention_fwd import COMBINED, TABLE_MASKS, check, with_tensors, workload

from flashgen.build.inputs import make_inputs
from flashgen.build.reference import attention_reference
from flashgen.spec import masks, score_mods, tiles
from flashgen.spec.masks import Mask

FEW, MANY = "m16n32w4s1k2_pointer_heads", "m16n32w4s1k8_tma_rows"
"""170 keys are 6 blocks of 32: three each for two programs, and one or none for eight."""

BY_RANGES = [mask for mask in TABLE_MASKS + COMBINED if tiles.lists(mask.rule) is None]
"""The keys of lists are not split."""


@pytest.mark.parametrize("config", [FEW, MANY])
@pytest.mark.parametrize("mask", BY_RANGES, ids=lambda m: m.describe())
def test_masks(mask: Mask, config: str) -> None:
    check(workload(mask=mask, batch=2, q_len=9, k_len=170), config)


@pytest.mark.parametrize("lengths", [(1, 33), (1, 1), (40, 31), (33, 12), (5, 288)], ids=str)
def test_lengths(lengths: tuple[int, int]) -> None:
    """More queries than keys, one of each, and blocks that divide evenly or not."""
    for splits in (2, 3, 6, 8):
        work = workload(batch=2, q_len=lengths[0], k_len=lengths[1])
        check(work, f"m16n32w4s1k{splits}_pointer_heads")


@pytest.mark.parametrize("heads,kv_heads", [(6, 6), (6, 2), (5, 1)])
@pytest.mark.parametrize("order", ["heads", "rows"])
def test_head_groups(heads: int, kv_heads: int, order: str) -> None:
    check(workload(batch=3, heads=heads, kv_heads=kv_heads, q_len=19, k_len=150), f"m16n32w4s1k4_tma_{order}")


@pytest.mark.parametrize("dims", [(16, 16), (24, 40), (96, 72), (64, 128), (248, 16)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    check(workload(*dims, heads=1, q_len=20, k_len=100), "m16n32w4s1k4_tma_heads")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_dtypes_and_layouts(dtype: str, layout: str) -> None:
    work = workload(64, dtype=dtype, batch=2, q_len=17, k_len=131)
    check(work, "m16n32w4s1k4_pointer_heads", layout=layout)


def test_a_score_rule_and_an_inner_stride_that_is_not_one() -> None:
    check(workload(score_mod=score_mods.softcap(2.0), q_len=20, k_len=131), MANY)
    check(workload(q_len=20, k_len=131), FEW, STRIDED)


def test_a_call_that_wants_no_lse_gets_the_same_output() -> None:
    work = workload(q_len=20, k_len=131)
    inputs = make_inputs(work, "cpu")
    out, _ = run(inputs, work.spec, FEW)
    alone, untouched = run(inputs, replace(work.spec, return_lse=False), FEW)
    assert torch.equal(out, alone) and untouched.isnan().all()


def test_rows_without_any_key() -> None:
    """Of eight the first five see no key, in any part; the others only in the first part."""
    work = workload(q_len=8, k_len=3)
    for config in (FEW, MANY):
        out, lse = run(make_inputs(work, "cpu"), work.spec, config)
        assert (out[:, :, :5] == 0).all() and (lse[:, :, :5] == -math.inf).all()
        assert torch.isfinite(lse[:, :, 5:]).all() and (out[:, :, 5:] != 0).any()


def test_a_part_that_a_row_sees_nothing_of_brings_nothing_into_it() -> None:
    """The last key is alone in its block, and of two rows the second alone sees it: NaN stays there."""
    work = workload(q_len=2, k_len=193)
    inputs = make_inputs(work, "cpu")
    v = inputs.v.clone()
    v[:, :, 192] = math.nan
    out, _ = run(replace(inputs, v=v), work.spec, MANY)
    expected, _ = run(inputs, work.spec, MANY)
    assert torch.equal(out[:, :, 0], expected[:, :, 0]) and out[:, :, 1].isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which tells
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(90, 3)], ids=str)
def test_scores_that_are_nan_or_infinite_come_out_as_in_the_reference(bad: float, mask: Mask) -> None:
    work = workload(mask=mask, heads=1, q_len=20, k_len=170)
    inputs = make_inputs(work, "cpu")
    q, k = inputs.q.abs() + 10, inputs.k.abs() + 10
    k[0, 0, 150] = bad
    expected, expected_lse = attention_reference(q, k, inputs.v, mask=mask)
    assert expected_lse.isnan().any()
    for config in (FEW, MANY):
        out, lse = run(replace(inputs, q=q, k=k), work.spec, config, ALIGNED)
        torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse, expected_lse, equal_nan=True, atol=1e-4, rtol=1e-4)


def test_parts_of_very_different_weight() -> None:
    """The first keys outweigh all others by far more than float32 holds, or the last ones do."""
    work = workload(64, mask=masks.full(), heads=1, q_len=3, k_len=256)
    plain = make_inputs(work, "cpu")
    for first in (True, False):
        k = plain.k.clone()
        k[:, :, slice(0, 64) if first else slice(192, 256)] *= 40
        inputs = with_tensors(work, q=plain.q * 10, k=k, v=plain.v)
        out, lse = run(inputs, work.spec, MANY)
        expected, expected_lse = attention_reference(inputs.q, k, inputs.v, dtype=torch.float64)
        torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("config", [FEW, MANY])
def test_c03_parts_of_scores_far_below_any_sentinel(config: str) -> None:
    """At logits of -1.15e7 a float32 LSE has no bit left for the number of keys, and parts have 24 to 96."""
    work = workload(128, mask=masks.full(), heads=1, q_len=3, k_len=120)
    plain = make_inputs(work, "cpu")
    q, k = torch.full_like(plain.q, 300.0), torch.full_like(plain.k, -300.0)
    out, lse = run(replace(plain, q=q, k=k, scale=1.0), work.spec, config)
    means = plain.v.float().mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.float(), means, atol=1e-4, rtol=1e-3)
    assert torch.isfinite(lse).all() and (lse < -1.1e7).all()
