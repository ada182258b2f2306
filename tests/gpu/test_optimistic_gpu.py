"""Weights relative to the maximum so far, taken again where it was too low, in every way it can be so."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checked import CAUSAL, COMBINED, DEVICE, TABLE, Call, check, skip_unless_served, workload

from flashgen.build.inputs import TORCH, Inputs, make_inputs
from flashgen.build.reference import attention_reference
from flashgen.measure.check import Rig
from flashgen.spec import masks, score_mods, tiles
from flashgen.spec.attention import Workload
from flashgen.spec.expr import free_symbols
from flashgen.spec.masks import Mask

FAMILY = "attention_fwd_sm90"
CONFIGS = (
    "c3x1n64s3g4p1_late_lazy_optimistic_lane_dynamic",
    "c1x2n128s2g4p1_early_lazy_optimistic_lane_plain",
    "c2x1n64s2g4p4_pinned_lazy_optimistic_lane_dynamic",
    "c2x1n64s2g4p4k4_late_lazy_optimistic_lane_plain",
)
WHOLE = CONFIGS[:3]
"""Those that keep a tile's keys together."""
FULL = masks.full()


@pytest.fixture(autouse=True)
def hopper() -> None:
    skip_unless_served(FAMILY)


def judge(inputs: Inputs, work: Workload, config: str) -> None:
    rig = Rig(inputs, work.spec)
    verdict, same = rig.examine(lambda out, lse: Call(inputs, work.spec, out, lse, config, FAMILY)())
    assert verdict.ok, verdict.reason
    assert same, "two runs differ"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, config: str) -> None:
    if "k4" in config and tiles.lists(mask.rule) is not None:
        return  # the keys of lists are not split
    if "n128" in config and mask not in (FULL, CAUSAL):
        config = CONFIGS[0]  # 128 keys and two edges do not compile
    if "head" in free_symbols(mask.rule.expr):
        config = config.replace("g4p4", "g4p1")  # a tile of several heads has no head to ask for
    for lengths in ((1000, 1000), (77, 900), (900, 77), (1, 513)):
        check(workload(mask=mask, sizes=(2, 8, 2, *lengths)), config, family=FAMILY)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dims", [(16, 16), (72, 40), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims_and_dtypes(dims: tuple[int, int], config: str) -> None:
    if ("c3" in config and max(dims) > 128) or ("n128" in config and max(dims) > 64):
        config = CONFIGS[2]  # a consumer has no registers for such tiles
    for dtype in ("bf16", "fp16"):
        check(workload(*dims, dtype=dtype, sizes=(1, 8, 2, 300, 900)), config, family=FAMILY)
    if all(dim % 16 == 0 for dim in dims):
        check(workload(*dims, dtype="e4m3", sizes=(1, 8, 2, 300, 900)), config, family=FAMILY)


def ramped(work: Workload, first: float, last: float) -> Inputs:
    """Inputs whose scores grow along the keys from `first` to `last` times their size."""
    inputs = make_inputs(work, DEVICE)
    ramp = torch.linspace(first, last, work.k_len, device=DEVICE)[:, None]
    if inputs.quantized is None:
        return replace(inputs, k=(inputs.k.float() * ramp).to(inputs.k.dtype))
    most = max(first, last, 1.0)  # 8 bits would not hold it
    return replace(inputs, k=(inputs.k.float() * ramp / most).to(inputs.k.dtype), scale=inputs.scale * most)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("first,last", [(0.1, 8.0), (8.0, 0.1), (0.0, 0.0)])
def test_maxima_that_rise_or_fall(first: float, last: float, config: str, dtype: str) -> None:
    """Block by block, in either order of the walk, and scores that are all equal."""
    for mask in (FULL, CAUSAL):
        work = workload(128 if "n64" in config else 64, dtype=dtype, mask=mask, sizes=(1, 8, 2, 200, 1500))
        judge(ramped(work, first, last), work, config)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("first,last", [(0.1, 8.0), (8.0, 0.1), (1e-3, 3e3), (3e3, 1e-3), (0.0, 0.0)])
def test_the_same_as_with_each_blocks_maximum(first: float, last: float, config: str, dtype: str) -> None:
    """Also where scores of 1e4 leave the products themselves few digits, and a block's weights overflow."""
    apart = {"bf16": 8e-3, "fp16": 1e-3, "e4m3": 6e-2}[dtype]  # weights are rounded at other powers of 2
    for mask in (FULL, CAUSAL):
        work = workload(128 if "n64" in config else 64, dtype=dtype, mask=mask, sizes=(1, 8, 2, 200, 1500))
        inputs = ramped(work, first, last)
        found = []
        for each in (config, config.replace("optimistic", "tree")):
            out = torch.empty(
                1, 8, 200, work.spec.head_dim_v, device=DEVICE, dtype=TORCH[work.spec.result_dtype]
            )
            lse = torch.empty(1, 8, 200, device=DEVICE)
            Call(inputs, work.spec, out, lse, each, FAMILY)()
            found.append((out.float(), lse))
        (out, lse), (wanted, wanted_lse) = found
        assert (out - wanted).norm() <= apart * wanted.norm()
        torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=2.0**-21)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_nan_or_infinite(bad: float, config: str) -> None:
    work = workload(64, mask=FULL, sizes=(1, 8, 2, 33, 1500))
    inputs = make_inputs(work, DEVICE)
    q, k = inputs.q.abs() + 1, inputs.k.abs() + 1
    k[:, :, 700] = bad
    q[:, :, :7] = 0.5
    inputs = replace(inputs, q=q, k=k)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=DEVICE)
    Call(inputs, work.spec, out, lse, config, FAMILY)()
    exact, exact_lse = attention_reference(q, k, inputs.v, mask=FULL)
    torch.testing.assert_close(out.float(), exact.float(), equal_nan=True, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, exact_lse.float(), equal_nan=True, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("config", CONFIGS)
def test_one_row_of_a_warp_rises(config: str) -> None:
    """Its neighbours take their weights again too, relative to the maxima they had."""
    work = workload(64, mask=FULL, sizes=(1, 8, 2, 256, 1500))
    inputs = make_inputs(work, DEVICE)
    q = inputs.q.clone()
    q[:, :, 37::64] *= 60.0
    judge(replace(inputs, q=q), work, config)


@pytest.mark.parametrize("config", WHOLE)
def test_softcap_and_a_negative_scale(config: str) -> None:
    check(workload(64, score_mod=score_mods.softcap(5.0), sizes=(2, 8, 2, 257, 700)), config, family=FAMILY)
    work = workload(64, sizes=(2, 8, 2, 257, 700))
    work = replace(work, spec=replace(work.spec, positive_scale=False))
    judge(replace(make_inputs(work, DEVICE), scale=-0.2), work, config)
