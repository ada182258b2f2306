"""Gradients of packed sequences in Triton's interpreter: every sequence as if it were alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
import torch
from gradients import errors, exact, given, judge, run
from kernels import STRIDED
from test_attention_fwd import COMBINED, TABLE_MASKS, random_mask
from test_varlen import K_LENGTHS, Q_LENGTHS, SMALL, packed

from flashgen.build.inputs import starts
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import CallFacts
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod


@pytest.mark.parametrize("mask,loads", zip(TABLE_MASKS + COMBINED, cycle(("tma", "pointer"))), ids=str)
def test_masks(mask: Mask, loads: str) -> None:
    """With every second one by pointers; `test_c05` has the plain ones with both."""
    judge(*packed(mask=mask), f"{SMALL}_{loads}_heads")


@pytest.mark.parametrize("seed", range(8))
def test_random_masks_and_lengths(seed: int) -> None:
    random = Random(seed)
    lengths = [(20, *random.choices((0, 1, 31, 32, 33, 50, 100), k=6)) for _ in range(2)]
    config = f"{SMALL}_{random.choice(('tma', 'pointer'))}_{random.choice(('heads', 'rows'))}"
    judge(*packed(*lengths, mask=random_mask(random)), config, with_lse=bool(seed % 2))


@pytest.mark.parametrize(
    "mod", [m for e in SCORE_MODS.values() for m in e.examples()], ids=lambda m: m.describe()
)
def test_score_rules(mod: ScoreMod) -> None:
    judge(*packed(mask=masks.sliding_window(9, 3), score_mod=mod), f"{SMALL}_tma_rows")


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("dims", [(24, 40), (72, 40), (192, 128)], ids=str)
def test_head_dims(dims: tuple[int, int], loads: str) -> None:
    head_dim, head_dim_v = dims
    judge(*packed((20, 3), (36, 70), head_dim=head_dim, head_dim_v=head_dim_v), f"m16n32w4s1_{loads}_heads")


@pytest.mark.parametrize("order", ["heads", "rows"])
@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (6, 2), (5, 1)])
def test_head_groups(heads: int, kv_heads: int, order: str) -> None:
    judge(*packed(heads=heads, kv_heads=kv_heads), f"{SMALL}_tma_{order}", with_lse=True)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "config", ["m16n64w4s1_tma_rows", "m64n32w4s1_pointer_heads", "m128n64w4s1_tma_heads"]
)
def test_dtypes_and_tiles(dtype: str, config: str) -> None:
    judge(*packed(head_dim=64, dtype=dtype), config)


def test_more_sequences_than_are_looked_for_at_once() -> None:
    random = Random(0)
    lengths = tuple(random.choice((0, 0, 1, 2, 17)) for _ in range(300))
    judge(*packed(lengths, lengths, heads=1), "m16n32w4s1_tma_heads")


def test_strided_tensors_and_wide_offsets() -> None:
    inputs, spec = packed(heads=2, kv_heads=2, head_dim=16)
    q = torch.randn(1, sum(Q_LENGTHS), 5, 32)[:, :, 1:3, ::2]
    k, v = (torch.randn(1, sum(K_LENGTHS), 16, 2).transpose(2, 3) for _ in range(2))
    inputs = replace(inputs, q=q, k=k, v=v)
    judge(inputs, spec, f"{SMALL}_pointer_heads", STRIDED)
    judge(inputs, spec, f"{SMALL}_pointer_rows", CallFacts("strided", tma=False, wide=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which tells
@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(9, 3)], ids=str)
def test_c05_a_neighbours_nan_changes_no_bit(mask: Mask, loads: str) -> None:
    """Every second sequence is made of NaN, and its gradient; the others come out as if of numbers."""
    inputs, spec = packed(mask=mask, head_dim=24, head_dim_v=40)
    dout, dlse = given(inputs, with_lse=True)
    assert dlse is not None
    clean = run(inputs, spec, f"{SMALL}_{loads}_heads", dout=dout, dlse=dlse)
    ruined = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    dout, dlse = dout.clone(), dlse.clone()
    own = {
        "q": torch.ones(sum(Q_LENGTHS), dtype=torch.bool),
        "k": torch.ones(sum(K_LENGTHS), dtype=torch.bool),
    }
    cu_q, cu_k = (each.tolist() for each in inputs.packed or ())
    for s in range(1, len(Q_LENGTHS), 2):
        of_q, of_k = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        ruined["q"][:, of_q] = dout[:, of_q] = math.nan
        dlse[:, :, of_q] = math.nan
        ruined["k"][:, of_k] = ruined["v"][:, of_k] = math.nan
        own["q"][of_q] = own["k"][of_k] = False
    found = run(replace(inputs, **ruined), spec, f"{SMALL}_{loads}_heads", dout=dout, dlse=dlse)
    for ours, theirs, name in zip(found, clean, "qkk", strict=True):
        assert own[name].any() and not own[name].all()
        assert torch.equal(ours[:, :, own[name]], theirs[:, :, own[name]])


@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_a_sequence_without_the_other_side_has_gradients_of_zero(loads: str) -> None:
    inputs, spec = packed(mask=masks.full())
    dq, dk, dv = run(inputs, spec, f"{SMALL}_{loads}_heads")
    cu_q, cu_k = (each.tolist() for each in inputs.packed or ())
    without_keys, without_rows = slice(cu_q[2], cu_q[3]), slice(cu_k[1], cu_k[2])
    assert (dq[:, :, without_keys] == 0).all() and (dq != 0).any()
    assert (dk[:, :, without_rows] == 0).all() and (dv[:, :, without_rows] == 0).all()


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_of_sinks(dtype: str, loads: str) -> None:
    inputs, spec = packed(mask=masks.causal() & masks.sliding_window(9, 0), heads=4, kv_heads=2)
    logits = torch.tensor([3.0, -2.0, 0.5, 0.0])
    inputs = replace(inputs, sinks=logits.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]))
    dout, dlse = given(inputs, with_lse=True)
    dsinks = torch.full((4,), math.nan)
    spec = replace(spec, sinks=dtype)
    found = run(inputs, spec, f"{SMALL}_{loads}_heads", dout=dout, dlse=dlse, dsinks=dsinks)
    *wanted, wanted_sinks = exact(inputs, dout, dlse)
    assert max(errors(found, tuple(wanted))) < 1e-5
    torch.testing.assert_close(dsinks.double(), wanted_sinks, rtol=1e-5, atol=1e-5)


def test_one_kernel_serves_any_lengths() -> None:
    inputs, spec = packed(mask=masks.causal(), score_mod=score_mods.softcap(2.0))
    for order in ((60, 1, 0, 82), (82, 60, 1, 0), (0, 0, 143, 0)):
        cu = starts(torch.tensor(order))
        again = replace(inputs, k=inputs.k[:, :143], v=inputs.v[:, :143], packed=(cu, cu))
        judge(again, spec, f"{SMALL}_tma_heads")
