"""Packed sequences in Triton's interpreter: every sequence as if it were alone, whatever lies beside it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
import torch
from kernels import ALIGNED, STRIDED, run, verdict
from test_attention_fwd import COMBINED, TABLE_MASKS, random_mask, workload

from flashgen.build.inputs import Inputs, make_inputs, starts
from flashgen.build.reference import packed_reference
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod

SMALL = "m32n32w4s1"
Q_LENGTHS, K_LENGTHS = (33, 0, 5, 64, 0, 1, 40), (33, 9, 0, 70, 0, 40, 7)
"""Empty on either side and on both, of one row, whole tiles, more queries than keys and fewer."""


def packed(
    q_lengths: tuple[int, ...] = Q_LENGTHS, k_lengths: tuple[int, ...] = K_LENGTHS, **options: object
) -> tuple[Inputs, AttentionSpec]:
    """A call of sequences with these lengths."""
    dense = workload(**options)  # type: ignore[arg-type]
    spec = replace(dense.spec, addressing="varlen")
    sizes = (len(q_lengths), dense.heads, dense.kv_heads, max(q_lengths), max(k_lengths))
    work = Workload(spec, *sizes, dense.params, sum(q_lengths), sum(k_lengths))
    cu = tuple(starts(torch.tensor(each)) for each in (q_lengths, k_lengths))
    return replace(make_inputs(work, "cpu"), packed=cu), spec


def check(inputs: Inputs, spec: AttentionSpec, config: str, facts: CallFacts = ALIGNED) -> None:
    judged = verdict(inputs, spec, config, facts)
    assert judged.ok, judged.reason


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, loads: str) -> None:
    check(*packed(mask=mask), f"{SMALL}_{loads}_heads")


@pytest.mark.parametrize("seed", range(12))
def test_random_masks_and_lengths(seed: int) -> None:
    random = Random(seed)
    lengths = [(20, *random.choices((0, 1, 31, 32, 33, 50, 100), k=6)) for _ in range(2)]
    config = f"{SMALL}_{random.choice(('tma', 'pointer'))}_{random.choice(('heads', 'rows'))}"
    check(*packed(*lengths, mask=random_mask(random)), config)


@pytest.mark.parametrize("mask", [masks.full(), masks.sliding_window(9, 3)], ids=lambda m: m.describe())
@pytest.mark.parametrize(
    "mod", [m for e in SCORE_MODS.values() for m in e.examples()], ids=lambda m: m.describe()
)
def test_score_rules(mod: ScoreMod, mask: Mask) -> None:
    check(*packed(mask=mask, score_mod=mod), f"{SMALL}_tma_rows")


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("dims", [(24, 40), (72, 40), (96, 96), (192, 128), (248, 16)], ids=str)
def test_head_dims(dims: tuple[int, int], loads: str) -> None:
    head_dim, head_dim_v = dims
    check(*packed((20, 3), (36, 70), head_dim=head_dim, head_dim_v=head_dim_v), f"m16n32w4s1_{loads}_heads")


@pytest.mark.parametrize("order", ["heads", "rows"])
@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (6, 2), (5, 1)])
def test_head_groups(heads: int, kv_heads: int, order: str) -> None:
    check(*packed(heads=heads, kv_heads=kv_heads), f"{SMALL}_tma_{order}")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "config", ["m16n64w4s1_tma_rows", "m64n32w4s1_pointer_heads", "m128n128w4s1_tma_heads"]
)
def test_dtypes_and_tiles(dtype: str, config: str) -> None:
    check(*packed(head_dim=64, dtype=dtype), config)


def test_more_sequences_than_are_looked_for_at_once() -> None:
    random = Random(0)
    lengths = tuple(random.choice((0, 0, 1, 2, 17)) for _ in range(600))
    check(*packed(lengths, lengths, heads=1), "m16n32w4s1_tma_heads")


def test_strided_tensors_and_wide_offsets() -> None:
    inputs, spec = packed(heads=2, kv_heads=2, head_dim=16)
    fused = torch.randn(1, sum(Q_LENGTHS), 5, 32)
    q = fused[:, :, 1:3, ::2]
    k, v = (torch.randn(1, sum(K_LENGTHS), 16, 2).transpose(2, 3) for _ in range(2))
    inputs = replace(inputs, q=q, k=k, v=v)
    check(inputs, spec, f"{SMALL}_pointer_heads", STRIDED)
    check(inputs, spec, f"{SMALL}_pointer_rows", CallFacts("strided", tma=False, wide=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which tells
@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(9, 3)], ids=str)
def test_c05_a_neighbours_nan_changes_no_bit(mask: Mask, poison: float, loads: str) -> None:
    """Every second sequence is made of NaN; the others come out as if it were of numbers."""
    inputs, spec = packed(mask=mask, head_dim=24, head_dim_v=40)
    clean = run(inputs, spec, f"{SMALL}_{loads}_heads")
    ruined = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    cu_q, cu_k = (each.tolist() for each in inputs.packed or ())
    own = torch.ones(sum(Q_LENGTHS), dtype=torch.bool)
    for s in range(1, len(Q_LENGTHS), 2):
        ruined["q"][:, cu_q[s] : cu_q[s + 1]] = poison
        own[cu_q[s] : cu_q[s + 1]] = False
        for name in ("k", "v"):
            ruined[name][:, cu_k[s] : cu_k[s + 1]] = poison
    out, lse = run(replace(inputs, **ruined), spec, f"{SMALL}_{loads}_heads")
    assert own.any() and not own.all()
    assert torch.equal(out[:, :, own], clean[0][:, :, own]) and torch.equal(
        lse[:, :, own], clean[1][:, :, own]
    )


def test_c05_empty_sides_give_zero_and_minus_infinity() -> None:
    inputs, spec = packed(mask=masks.full())
    out, lse = run(inputs, spec, f"{SMALL}_tma_heads")
    begin, end = (inputs.packed or ())[0].tolist()[2:4]  # five queries, no keys
    assert (out[:, :, begin:end] == 0).all() and (lse[:, :, begin:end] == -math.inf).all()
    assert (lse[:, :, :begin].isfinite()).all()


def test_one_kernel_serves_any_lengths() -> None:
    """The rendered kernel knows no length: only where sequences begin differs between the calls."""
    inputs, spec = packed(mask=masks.causal())
    orders = set(itertools.islice(itertools.permutations((60, 1, 0, 82)), 0, None, 5))
    for order in orders:
        cu = starts(torch.tensor(order))
        again = replace(inputs, k=inputs.k[:, :143], v=inputs.v[:, :143], packed=(cu, cu))
        out, lse = run(again, spec, f"{SMALL}_tma_heads")
        expected, expected_lse = packed_reference(
            *(each[0] for each in (again.q, again.k, again.v)), cu.tolist(), cu.tolist(), mask=inputs.mask
        )
        torch.testing.assert_close(out[0].transpose(0, 1), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[0], expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal() & masks.sliding_window(9, 0)], ids=str)
@pytest.mark.parametrize("sinks", ["fp32", "bf16"])
def test_sinks(sinks: str, mask: Mask, loads: str) -> None:
    """A sequence's rows without a key have their head's sink as LSE."""
    without, spec = packed(mask=mask, heads=4, kv_heads=2)
    logits = torch.tensor([3.0, -2.0, 0.5, -math.inf])
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[sinks]
    inputs, spec = replace(without, sinks=logits.to(dtype)), replace(spec, sinks=sinks)
    config = f"{SMALL}_{loads}_heads"
    check(inputs, spec, config)
    out, lse = run(inputs, spec, config)
    begin, end = (inputs.packed or ())[0].tolist()[2:4]  # five queries, no keys
    assert (out[:, :, begin:end] == 0).all()
    torch.testing.assert_close(lse[0, :, begin:end], logits[:, None].expand(-1, 5))
    assert (lse[0, 0] > run(without, replace(spec, sinks=""), config)[1][0, 0]).all()


def test_softcap_comes_before_the_mask() -> None:
    inputs, spec = packed(mask=masks.causal(), score_mod=score_mods.softcap(1.0))
    before, _ = run(inputs, spec, f"{SMALL}_tma_heads")
    v = inputs.v.clone()
    v[:, K_LENGTHS[0] - 1] = 1e4  # only the first sequence's last row sees its last key
    after, _ = run(replace(inputs, v=v), spec, f"{SMALL}_tma_heads")
    changed = (before != after).any(-1).any(1)[0].nonzero().flatten().tolist()
    assert changed == [Q_LENGTHS[0] - 1]
