"""The fused form of attention_bwd in Triton's interpreter, against float64 autograd of the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
import torch
from gradients import check, errors, exact, given, judge, run
from kernels import STRIDED
from test_attention_fwd import COMBINED, DIMS, TABLE_MASKS, random_mask, workload
from test_varlen import packed

from flashgen.build.inputs import make_inputs
from flashgen.spec import masks, score_mods
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod

SMALL = "m32n32w4s1"


@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
@pytest.mark.parametrize("lengths", [(64, 64), (40, 70), (70, 40), (1, 33), (33, 1)], ids=str)
def test_causal_and_full(mask: Mask, lengths: tuple[int, int], loads: str) -> None:
    q_len, k_len = lengths
    work = workload(mask=mask, batch=2, kv_heads=2, q_len=q_len, k_len=k_len)
    check(work, f"{SMALL}_{loads}_heads_fused", with_lse=loads == "tma")


@pytest.mark.parametrize("lengths", [(40, 70), (70, 40)], ids=str)
@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, lengths: tuple[int, int]) -> None:
    q_len, k_len = lengths
    check(workload(mask=mask, batch=2, q_len=q_len, k_len=k_len), f"{SMALL}_pointer_heads_fused")


@pytest.mark.parametrize("seed", range(8))
def test_random_combinations(seed: int) -> None:
    random = Random(seed)
    mask = random_mask(random)
    q_len, k_len = random.choice(((40, 170), (130, 70), (65, 65), (140, 3)))
    check(workload(mask=mask, batch=2, heads=1, q_len=q_len, k_len=k_len), f"{SMALL}_pointer_heads_fused")


RULES = [mod for entry in SCORE_MODS.values() for mod in entry.examples()]
RULES += [score_mods.compose([score_mods.softcap(3.0), score_mods.alibi(), score_mods.scale(0.5)])]


@pytest.mark.parametrize("mask", [masks.full(), masks.sliding_window(9, 3)], ids=lambda m: m.describe())
@pytest.mark.parametrize("mod", RULES, ids=lambda m: m.describe())
def test_score_rules(mod: ScoreMod, mask: Mask) -> None:
    check(workload(mask=mask, score_mod=mod, q_len=33, k_len=50), f"{SMALL}_tma_rows_fused")


@pytest.mark.parametrize("dims,loads", list(zip(DIMS, cycle(("tma", "pointer")))), ids=str)
def test_head_dims(dims: tuple[int, int], loads: str) -> None:
    check(workload(*dims, heads=1, q_len=40, k_len=36), f"{SMALL}_{loads}_heads_fused")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("tile", ["m16n16", "m32n64", "m64n32", "m128n64"])
def test_dtypes_and_tiles(dtype: str, tile: str) -> None:
    check(workload(64, dtype=dtype, q_len=131, k_len=70), f"{tile}w4s1_tma_rows_fused", with_lse=True)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (6, 2), (5, 1)])
@pytest.mark.parametrize("order", ["heads", "rows"])
def test_head_groups(heads: int, kv_heads: int, order: str) -> None:
    work = workload(batch=2, heads=heads, kv_heads=kv_heads, q_len=35, k_len=35)
    check(work, f"{SMALL}_tma_{order}_fused")


def test_layouts_and_strides() -> None:
    work = workload(24, 40, batch=2, heads=4, kv_heads=2, q_len=33)
    check(work, f"{SMALL}_pointer_heads_fused", STRIDED, layout="bshd", with_lse=True)
    check(work, f"{SMALL}_tma_heads_fused", layout="bshd")


def test_dk_and_dv_are_those_of_the_split_form() -> None:
    """To the last bit: they are summed by the same products in the same order."""
    work = workload(32, mask=masks.causal(), batch=2, heads=4, kv_heads=2, q_len=70, k_len=50)
    inputs = make_inputs(work, "cpu")
    for loads in ("tma", "pointer"):
        _, *split = run(inputs, work.spec, f"{SMALL}_{loads}_heads")
        _, *fused = run(inputs, work.spec, f"{SMALL}_{loads}_heads_fused")
        assert all(torch.equal(a, b) for a, b in zip(fused, split, strict=True))


ONE_DOCUMENT = masks.document(torch.zeros(2, 70, dtype=torch.int32))
"""Lists: each block is seen as a whole."""


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), ONE_DOCUMENT], ids=lambda m: m.describe())
def test_keys_that_do_not_exist_add_nothing(mask: Mask, loads: str) -> None:
    """Of rows with scores under -88, whose LSE makes the weight of a score of 0 infinite."""
    work = workload(64, dtype="fp16", mask=mask, heads=1, q_len=64, k_len=70)
    inputs = replace(make_inputs(work, "cpu"), mask=mask)
    inputs = replace(inputs, q=inputs.q.abs() + 2, k=-inputs.k.abs() - 2, scale=1.0)
    judge(inputs, work.spec, f"{SMALL}_{loads}_heads_fused")


def test_what_lies_behind_the_ends_changes_no_bit() -> None:
    work = workload(24, dtype="fp16", batch=2, heads=2, kv_heads=2, q_len=33, k_len=45)
    inputs = make_inputs(work, "cpu")

    def surrounded(tensor: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, dims = tensor.shape
        room = torch.full((batch, heads, rows + 64, dims + 16), math.nan, dtype=tensor.dtype)
        room[:, :, :rows, :dims] = tensor
        return room[:, :, :rows, :dims]

    dout, _ = given(inputs)
    apart = replace(inputs, q=surrounded(inputs.q), k=surrounded(inputs.k), v=surrounded(inputs.v))
    for loads in ("tma", "pointer"):
        wanted = run(inputs, work.spec, f"{SMALL}_{loads}_heads_fused", dout=dout)
        found = run(apart, work.spec, f"{SMALL}_{loads}_heads_fused", dout=surrounded(dout))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_sinks_and_their_gradients() -> None:
    work = workload(mask=masks.sliding_window(9, 0), batch=2, heads=4, kv_heads=2, q_len=70, k_len=40)
    spec = replace(work.spec, sinks="fp32").backward(sinks=True)
    inputs = replace(make_inputs(work, "cpu"), sinks=torch.tensor([3.0, -2.0, 0.5, 1.0]))
    dout, _ = given(inputs)
    *wanted, wanted_sinks = exact(inputs, dout)
    dsinks = torch.full((4,), math.nan)
    found = run(inputs, spec, f"{SMALL}_tma_heads_fused", dout=dout, dsinks=dsinks)
    assert max(errors(found, wanted)) < 1e-5
    torch.testing.assert_close(dsinks.double(), wanted_sinks, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [-0.3, 0.0], ids=str)
def test_scales_that_are_not_positive(scale: float) -> None:
    work = workload(q_len=40, k_len=70)
    inputs = replace(make_inputs(work, "cpu"), scale=scale)
    dout, _ = given(inputs)
    found, wanted = run(inputs, work.spec, f"{SMALL}_tma_heads_fused", dout=dout), exact(inputs, dout)
    assert max(errors(found, wanted)) < 1e-5


# Packed sequences


@pytest.mark.parametrize("mask,loads", list(zip(TABLE_MASKS + COMBINED, cycle(("tma", "pointer")))), ids=str)
def test_masks_of_packed_sequences(mask: Mask, loads: str) -> None:
    judge(*packed(mask=mask), f"{SMALL}_{loads}_heads_fused")


@pytest.mark.parametrize("mod", [entry.examples()[0] for entry in SCORE_MODS.values()], ids=str)
def test_score_rules_of_packed_sequences(mod: ScoreMod) -> None:
    judge(*packed(mask=masks.sliding_window(9, 3), score_mod=mod), f"{SMALL}_tma_rows_fused")


@pytest.mark.parametrize("order", ["heads", "rows"])
@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_head_groups_and_dims_of_packed_sequences(loads: str, order: str) -> None:
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 72, "head_dim_v": 40}
    judge(*packed((20, 3, 0), (36, 70, 5), **sizes), f"m16n32w4s1_{loads}_{order}_fused", with_lse=True)
