"""attention_fwd_sm90 on a stand-in for Gluon, against the reference in higher precision."""

from __future__ import annotations

import math
from dataclasses import replace

import gluon
import pytest
import torch
from test_attention_fwd import COMBINED, TABLE_MASKS, workload
from test_varlen import packed

from flashgen.build.compile import toolchain
from flashgen.build.inputs import TORCH, Inputs, make_inputs
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import KernelSource, render
from flashgen.measure.check import Expected
from flashgen.spec import masks, score_mods, tiles
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod

FAMILY = FAMILIES["attention_fwd_sm90"]
PLAIN = "c2x1n64s2g4p1_late_lazy_tree_lane_plain"
DYNAMIC = "c2x1n64s2g4p1_late_lazy_tree_lane_dynamic"
SPLIT = "c1x2n64s2g4p1k3_late_lazy_tree_lane_dynamic"
OPTIMISTIC = "c1x2n64s2g4p1_late_lazy_optimistic_lane_dynamic"
FULL, CAUSAL, WINDOW = masks.full(), masks.causal(), masks.sliding_window(70, 9)


def run(inputs: Inputs, source: KernelSource) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as (batch, heads, q_len, ...), from NaN-filled buffers; out has q's layout."""
    q, v = inputs.bhsd(inputs.q), inputs.bhsd(inputs.v)
    out = torch.full((*inputs.q.shape[:3], v.shape[3]), math.nan, dtype=TORCH[source.spec.result_dtype])
    lse = torch.full(q.shape[:3], math.nan)
    gluon.run(source, CallFacts(), inputs.environment(out, lse, pointers=False))
    return inputs.bhsd(out), lse


def judge(inputs: Inputs, spec: AttentionSpec, config: str) -> None:
    """In the text that triton 3.6 is given."""
    judged = Expected(inputs, spec).judge(*run(inputs, render(spec, FAMILY.find(config), toolchain())))
    assert judged.ok, judged.reason


def check(work: Workload, config: str, layout: str = "bhsd") -> None:
    judge(make_inputs(work, "cpu", layout), work.spec, config)


LENGTHS = ((70, 200), (200, 70), (1, 1), (129, 65))


@pytest.mark.parametrize("config", [PLAIN, DYNAMIC, SPLIT, OPTIMISTIC])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=lambda m: m.describe())
def test_causal_and_full(mask: Mask, lengths: tuple[int, int], config: str) -> None:
    q_len, k_len = lengths
    check(workload(64, dtype="bf16", mask=mask, q_len=q_len, k_len=k_len), config)


CONFIGS = (
    "c1x3n64s2g16p4_early_always_chain_row_plain",
    "c3x1n64s4g16p1_early_lazy_chain_lane_plain",
    "c1x2n128s2g4p4_pinned_lazy_tree_row_dynamic",
    "c3x1n64s3g16p4_pinned_always_tree_lane_dynamic",
    "c2x1n64s3g4p4k4_late_lazy_optimistic_lane_plain",
    "c2x1n128s3g4p1_early_lazy_optimistic_lane_dynamic",
)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=lambda m: m.describe())
def test_tunables(mask: Mask, config: str) -> None:
    check(workload(16, dtype="fp16", mask=mask, batch=2, heads=4, q_len=140, k_len=400), config)


DIMS = ((32, 64), (72, 40), (96, 96), (128, 128), (192, 128))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    for config in (PLAIN, DYNAMIC, SPLIT, OPTIMISTIC):
        check(workload(*dims, dtype="bf16", heads=1, q_len=70, k_len=140), config)


@pytest.mark.parametrize("heads,kv_heads,pack", [(6, 6, 1), (6, 2, 1), (8, 2, 4), (16, 1, 16)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_head_groups(heads: int, kv_heads: int, pack: int, layout: str) -> None:
    for schedule in ("dynamic", "plain"):
        work = workload(16, dtype="bf16", batch=2, heads=heads, kv_heads=kv_heads, q_len=9, k_len=80)
        check(work, f"c1x1n64s2g4p{pack}_late_lazy_tree_lane_{schedule}", layout)


@pytest.mark.parametrize("config", [DYNAMIC, OPTIMISTIC])
@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, config: str) -> None:
    check(workload(16, dtype="bf16", mask=mask, batch=2, q_len=150, k_len=200), config)


BY_RANGES = [mask for mask in TABLE_MASKS + COMBINED if tiles.lists(mask.rule) is None]


@pytest.mark.parametrize("mask", BY_RANGES, ids=lambda m: m.describe())
def test_split_keys(mask: Mask) -> None:
    check(workload(16, dtype="bf16", mask=mask, batch=2, q_len=70, k_len=300), SPLIT)


RULES = [mod for entry in SCORE_MODS.values() for mod in entry.examples()]


@pytest.mark.parametrize("config", [DYNAMIC, OPTIMISTIC])
@pytest.mark.parametrize("mod", RULES, ids=lambda m: m.describe())
def test_score_rules(mod: ScoreMod, config: str) -> None:
    check(workload(16, dtype="bf16", mask=WINDOW, score_mod=mod, q_len=133, k_len=250), config)


@pytest.mark.parametrize("config", [DYNAMIC, SPLIT, OPTIMISTIC])
@pytest.mark.parametrize("sinks", ["fp32", "bf16"])
def test_sinks(sinks: str, config: str) -> None:
    work = workload(16, dtype="bf16", batch=2, heads=4, kv_heads=2, q_len=90, k_len=200)
    check(replace(work, spec=replace(work.spec, sinks=sinks)), config)


BATCH, HEADS, Q_LEN, K_LEN = 2, 2, 290, 260
DRAW = torch.Generator().manual_seed(1)
DOCUMENTS = masks.document(torch.randint(0, 4, (BATCH, 300), generator=DRAW).sort(1).values.int())
BLOCKS = Rule.parse("mask", "blocks[head, q_idx // 32, k_idx // 64] where blocks: i1")
LISTED = {
    "documents": DOCUMENTS,
    "causal": CAUSAL & DOCUMENTS,
    "padded": DOCUMENTS & masks.key_padding(torch.tensor([190, 0])),
    "one": masks.document(torch.full((BATCH, 300), 7)),
    "each its own": masks.document(torch.stack([torch.randperm(300, generator=DRAW) for _ in range(BATCH)])),
    "union": masks.sliding_window(20, 0) | DOCUMENTS,
    "blocks of heads": Mask(BLOCKS, (), (torch.rand(HEADS, 10, 5, generator=DRAW) < 0.4,)),
}


def listed(name: str) -> tuple[Inputs, AttentionSpec]:
    """Tiles with blocks that are kept in part or as a whole, with both, and with none."""
    sizes = {"batch": BATCH, "heads": HEADS, "q_len": Q_LEN, "k_len": K_LEN}
    drawn = make_inputs(workload(16, dtype="bf16", mask=FULL, **sizes), "cpu")
    spec = workload(16, dtype="bf16", mask=LISTED[name]).spec
    return replace(drawn, mask=LISTED[name]), spec


@pytest.mark.parametrize("config", [PLAIN, DYNAMIC, OPTIMISTIC])
@pytest.mark.parametrize("name", LISTED)
def test_lists(name: str, config: str) -> None:
    judge(*listed(name), config)


@pytest.mark.parametrize("config", [PLAIN, DYNAMIC, OPTIMISTIC])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=lambda m: m.describe())
def test_packed_sequences(mask: Mask, config: str) -> None:
    lengths = (130, 0, 5, 64, 1), (130, 9, 0, 200, 40)
    judge(*packed(*lengths, mask=mask, dtype="bf16"), config)


@pytest.mark.parametrize("config", [PLAIN, DYNAMIC, OPTIMISTIC])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=lambda m: m.describe())
def test_8_bit_inputs(mask: Mask, config: str) -> None:
    check(workload(32, dtype="e4m3", mask=mask, batch=2, q_len=90, k_len=200), config)
