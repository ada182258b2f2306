"""attention_bwd in Triton's interpreter against float64 autograd of the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from gradients import (
    HALVED_AND_BIASED,
    assert_no_weight_at_minus_infinity,
    check,
    errors,
    exact,
    given,
    judge,
    run,
    with_minus_infinity,
)
from test_attention_fwd import COMBINED, DIMS, TABLE_MASKS, random_mask, workload

from flashgen.build.inputs import make_inputs
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import CallFacts
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod

SMALL = "m32n32w4s1"


@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
@pytest.mark.parametrize("lengths", [(64, 64), (40, 70), (70, 40), (1, 33), (33, 1)], ids=str)
def test_causal_and_full(mask: Mask, lengths: tuple[int, int], loads: str) -> None:
    q_len, k_len = lengths
    work = workload(mask=mask, batch=2, kv_heads=2, q_len=q_len, k_len=k_len)
    check(work, f"{SMALL}_{loads}_heads")


LENGTHS = ((40, 70), (70, 40), (1, 33))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, lengths: tuple[int, int]) -> None:
    q_len, k_len = lengths
    check(workload(mask=mask, batch=2, q_len=q_len, k_len=k_len), f"{SMALL}_pointer_heads")


@pytest.mark.parametrize("seed", range(20))
def test_random_combinations(seed: int) -> None:
    """Unions whose ranges of rows overlap, touch, are empty or out of order at run time."""
    random = Random(seed)
    mask = random_mask(random)
    q_len, k_len = random.choice(((40, 170), (130, 70), (65, 65), (140, 3)))
    check(workload(mask=mask, batch=2, heads=1, q_len=q_len, k_len=k_len), f"{SMALL}_pointer_heads")


RULES = [mod for entry in SCORE_MODS.values() for mod in entry.examples()]
RULES += [
    score_mods.compose([score_mods.softcap(3.0), score_mods.alibi(), score_mods.scale(0.5)]),
    score_mods.compose([score_mods.bias("bhqk"), score_mods.softcap(2.0), score_mods.softcap(1.0)]),
]


@pytest.mark.parametrize(
    "mask", [masks.full(), masks.causal(), masks.sliding_window(9, 3)], ids=lambda m: m.describe()
)
@pytest.mark.parametrize("mod", RULES, ids=lambda m: m.describe())
def test_score_rules(mod: ScoreMod, mask: Mask) -> None:
    check(workload(mask=mask, score_mod=mod, q_len=33, k_len=50), f"{SMALL}_tma_rows")


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], loads: str) -> None:
    check(workload(*dims, heads=1, q_len=40, k_len=36), f"{SMALL}_{loads}_heads")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("tile", ["m16n16", "m32n64", "m64n32", "m128n64"])
def test_dtypes_and_tiles(dtype: str, tile: str) -> None:
    check(workload(64, dtype=dtype, q_len=131, k_len=70), f"{tile}w4s1_tma_rows", with_lse=True)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (6, 6), (6, 2), (5, 1)])
@pytest.mark.parametrize("order", ["heads", "rows"])
def test_head_groups(heads: int, kv_heads: int, order: str) -> None:
    work = workload(batch=2, heads=heads, kv_heads=kv_heads, q_len=35, k_len=35)
    check(work, f"{SMALL}_tma_{order}")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_layouts(layout: str, loads: str) -> None:
    check(
        workload(batch=2, heads=4, kv_heads=2, q_len=33),
        f"{SMALL}_{loads}_heads",
        layout=layout,
        with_lse=True,
    )


def test_wide_strides_give_the_same_bits() -> None:
    work = workload(24, 40, mask=masks.sliding_window(9, 3), q_len=33, k_len=70)
    inputs = make_inputs(work, "cpu")
    narrow = run(inputs, work.spec, f"{SMALL}_pointer_heads")
    wide = run(inputs, work.spec, f"{SMALL}_pointer_heads", CallFacts("strided", tma=False, wide=True))
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


def test_rows_without_a_key_have_and_give_no_gradient() -> None:
    """Whatever the gradients of their outputs and LSE are, which is -inf."""
    work = workload(mask=masks.causal() & masks.key_padding("keep"), batch=2, q_len=40, k_len=40)
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[0, :] = False
    keep[1, :7] = False
    inputs = replace(make_inputs(work, "cpu"), mask=masks.causal() & masks.key_padding(keep))
    dout, dlse = given(inputs, with_lse=True)
    dlse[0], dlse[1, :, :7] = math.inf, math.nan
    dq, dk, dv = run(inputs, work.spec, f"{SMALL}_tma_heads", dout=dout, dlse=dlse)
    assert not dq[0].any() and not dk[0].any() and not dv[0].any()
    assert not dq[1, :, :7].any() and not dk[1, :, :7].any() and not dv[1, :, :7].any()
    assert all(each.isfinite().all() and each[1, :, 7:].any() for each in (dq, dk, dv))


def test_a_bias_of_minus_infinity_is_no_weight() -> None:
    work = workload(mask=masks.full(), score_mod=HALVED_AND_BIASED, q_len=40, k_len=70)
    inputs = with_minus_infinity(make_inputs(work, "cpu"))
    dout, dlse = given(inputs, with_lse=True)
    found = run(inputs, work.spec, f"{SMALL}_pointer_heads", dout=dout, dlse=dlse)
    assert max(errors(found, exact(inputs, dout, dlse))) < 1e-5
    assert_no_weight_at_minus_infinity(found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c03_gradients_of_scores_far_below_any_sentinel(dtype: torch.dtype) -> None:
    """All weights of a row are equal, and its gradient of dv is their sum's: what float32 holds of an LSE of
    1.15e7, half of 1, and of the same in log2 units, twice, is all that they may be off by.
    """
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    work = workload(128, dtype=name, mask=masks.causal(), heads=1, q_len=33, k_len=33)
    inputs = make_inputs(work, "cpu")
    q, k = torch.full((1, 1, 33, 128), 300.0, dtype=dtype), torch.full((1, 1, 33, 128), -300.0, dtype=dtype)
    inputs = replace(inputs, q=q, k=k, scale=1.0)
    for row in (0, 7, 32):
        dout = torch.zeros(1, 1, 33, 128, dtype=dtype)
        dout[:, :, row] = 1.0
        dq, dk, dv = run(inputs, work.spec, f"{SMALL}_tma_heads", dout=dout)
        assert all(each.isfinite().all() for each in (dq, dk, dv))
        # Where 0 is right the interpreter leaves denormal numbers of bf16.
        assert (dv[:, :, row + 1 :].abs() <= 1e-30).all() and (dq[:, :, row + 1 :].abs() <= 1e-30).all()
        weights = dv[0, 0, : row + 1, 0].float()
        assert torch.equal(weights, weights[:1].expand_as(weights))
        assert abs(math.log(float(weights[0]) * (row + 1))) <= 0.5 + 2 * 0.5 * math.log(2)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_gradients_of_large_scores(dtype: str) -> None:
    """Of 300 and more, on either side of 0, which is as large as a trained model's become."""
    work = workload(64, dtype=dtype, mask=masks.causal(), heads=1, q_len=70, k_len=70)
    inputs = make_inputs(work, "cpu")
    judge(replace(inputs, q=inputs.q * 100), work.spec, f"{SMALL}_tma_heads")


def test_what_lies_behind_the_ends_changes_no_bit() -> None:
    """NaN in the rows that a tile reaches past its sequence, of every tensor."""
    work = workload(32, dtype="fp16", batch=2, heads=2, kv_heads=2, q_len=33, k_len=45)
    inputs = make_inputs(work, "cpu")

    def surrounded(tensor: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, dims = tensor.shape
        room = torch.full((batch, heads, rows + 64, dims + 16), math.nan, dtype=tensor.dtype)
        room[:, :, :rows, :dims] = tensor
        return room[:, :, :rows, :dims]

    dout, _ = given(inputs)
    apart = replace(inputs, q=surrounded(inputs.q), k=surrounded(inputs.k), v=surrounded(inputs.v))
    for loads in ("tma", "pointer"):
        wanted = run(inputs, work.spec, f"{SMALL}_{loads}_heads", dout=dout)
        found = run(apart, work.spec, f"{SMALL}_{loads}_heads", dout=surrounded(dout))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mask", [masks.sliding_window(9, 0), masks.causal()], ids=lambda m: m.describe())
def test_sinks_are_in_the_lse(mask: Mask) -> None:
    work = workload(mask=mask, q_len=70, k_len=40)
    work = replace(work, spec=replace(work.spec, sinks="fp32"))
    check(work, f"{SMALL}_pointer_heads", with_lse=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("mask", [masks.sliding_window(9, 0), masks.causal()], ids=lambda m: m.describe())
def test_gradients_of_sinks(mask: Mask, with_lse: bool, dtype: str) -> None:
    """Rows without a key have the sink as LSE; a sink of -inf takes no weight and gets no gradient."""
    work = workload(mask=mask, batch=2, heads=4, kv_heads=2, q_len=70, k_len=40)
    spec = replace(work.spec, sinks=dtype).backward(lse=with_lse, sinks=True)
    inputs = make_inputs(work, "cpu")
    logits = torch.tensor([3.0, -2.0, 0.5, -math.inf])
    logits = logits.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    inputs = replace(inputs, sinks=torch.stack([logits, logits], 1)[:, 1])  # of a stride
    dout, dlse = given(inputs, with_lse)
    if dlse is not None:
        dlse[:, 3, :30] = 0.0  # the LSE of those is -inf, and has no gradient

    *wanted, wanted_sinks = exact(inputs, dout, dlse)
    dsinks = torch.full((4,), math.nan)
    found = run(inputs, spec, f"{SMALL}_tma_heads", dout=dout, dlse=dlse, dsinks=dsinks)
    assert max(errors(found, wanted)) < 1e-5
    assert wanted_sinks[:3].abs().min() > 0.01
    torch.testing.assert_close(dsinks[:3].double(), wanted_sinks[:3], rtol=1e-5, atol=1e-5)
    assert dsinks[3] == 0


@pytest.mark.parametrize("scale", [-0.3, 0.0], ids=str)
def test_scales_that_are_not_positive(scale: float) -> None:
    work = workload(q_len=40, k_len=70)
    inputs = replace(make_inputs(work, "cpu"), scale=scale)
    dout, _ = given(inputs)
    found, wanted = run(inputs, work.spec, f"{SMALL}_tma_heads", dout=dout), exact(inputs, dout)
    assert max(errors(found, wanted)) < 1e-5
