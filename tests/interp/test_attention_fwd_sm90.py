"""attention_fwd_sm90 on a stand-in for Gluon, against the reference in higher precision."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product

import gluon
import pytest
import torch
from test_attention_fwd import COMBINED, TABLE_MASKS, workload
from test_varlen import packed

from flashgen.build.compile import toolchain
from flashgen.build.inputs import TORCH, Inputs, make_inputs
from flashgen.build.reference import attention_reference
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


@pytest.mark.parametrize("config", [PLAIN, DYNAMIC, OPTIMISTIC])
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
    check(workload(16, dtype="fp16", mask=mask, heads=4, q_len=70, k_len=300), config)


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


@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask) -> None:
    check(workload(16, dtype="bf16", mask=mask, batch=2, q_len=150, k_len=200), DYNAMIC)


def _mask(text: str, *values: float) -> Mask:
    return Mask(Rule.parse("mask", text), values)


PERIODS = (
    (masks.neighborhood((25, 8), (7, 3)), 8),
    (masks.neighborhood((4, 64), (3, 13)) & CAUSAL, 64),
    (masks.neighborhood((2, 128), (2, 5)), 128),
    (masks.neighborhood((5, 40), (3, 5)), 40),
    (_mask("(k_idx % 4 >= 1) & (k_idx % 16 < 11) & (q_pos - k_idx < 90)"), 16),
    (_mask("(k_idx % 8 != 1) & (k_idx % 8 < c) & (q_pos >= k_idx) where c: i32", 6), 0),
    (_mask("(k_idx % 32 - q_pos % 5 > 3) & (k_idx >= 7)"), 32),
    (_mask("(k_idx % 4 < 3) & (k_idx % 4 > 0)"), 4),
)


@pytest.mark.parametrize(
    "config", [DYNAMIC, SPLIT, OPTIMISTIC, "c1x2n128s2g4p4_early_always_chain_row_plain"]
)
@pytest.mark.parametrize("mask,period", PERIODS, ids=str)
def test_what_a_mask_repeats_with_the_blocks_is_bits(mask: Mask, period: int, config: str) -> None:
    if config == SPLIT and tiles.lists(mask.rule):
        return  # keys of listed blocks are not split
    works = [
        workload(16, dtype="bf16", mask=mask, heads=4, q_len=q_len, k_len=k_len)
        for q_len, k_len in ((150, 200), (200, 150))
    ]
    text = render(works[0].spec, FAMILY.find(config), toolchain()).text
    assert ("in_bits" in text) == (period > 0 and FAMILY.find(config).number("block_n") % period == 0)
    for work in works:
        check(work, config)


BY_RANGES = [mask for mask in TABLE_MASKS + COMBINED if tiles.lists(mask.rule) is None]


@pytest.mark.parametrize("mask", BY_RANGES, ids=lambda m: m.describe())
def test_split_keys(mask: Mask) -> None:
    check(workload(16, dtype="bf16", mask=mask, batch=2, heads=1, q_len=9, k_len=300), SPLIT)


RULES = [mod for entry in SCORE_MODS.values() for mod in entry.examples()]


@pytest.mark.parametrize("config", [DYNAMIC, OPTIMISTIC])
@pytest.mark.parametrize("mod", RULES, ids=lambda m: m.describe())
def test_score_rules(mod: ScoreMod, config: str) -> None:
    if config == OPTIMISTIC and mod.rule.may_drop:
        return  # an optimistic maximum is of rows that have seen a score
    check(workload(16, dtype="bf16", mask=WINDOW, score_mod=mod, q_len=70, k_len=200), config)


BOTH_WAYS = "score - a * abs(k_idx - q_pos) + (q_idx - k_idx) / 16 where a: f32"
DISTANCES = (
    (score_mods.alibi(), WINDOW),  # keys ahead as well: a distance's size is not the distance
    (score_mods.alibi(), CAUSAL),
    (score_mods.alibi(), CAUSAL & masks.sliding_window(70, None)),
    (score_mods.softcap(2.0).then(score_mods.alibi()), ~CAUSAL),
    (score_mods.bias("bk").then(score_mods.alibi()), CAUSAL),
    (ScoreMod(Rule.parse("score", "score + 0.125 * (k_idx - q_idx)")), FULL),
    (ScoreMod(Rule.parse("score", "score + 0.125 * abs(q_pos - k_idx)")), CAUSAL),  # maxima keep rising
    (ScoreMod(Rule.parse("score", "-(k_idx - q_pos) * 0.125 + score")), WINDOW | masks.global_tokens(3)),
    (ScoreMod(Rule.parse("score", BOTH_WAYS), (0.3,)), CAUSAL & masks.document()),
    (ScoreMod(Rule.parse("score", BOTH_WAYS), (0.3,)), CAUSAL),
)
ROUNDS = "c1x2n128s2g4p1_early_always_chain_row_plain"


@pytest.mark.parametrize("config", [DYNAMIC, SPLIT, OPTIMISTIC, ROUNDS])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("mod,mask", DISTANCES, ids=lambda each: each.describe()[:40])
def test_distances_taken_apart(mod: ScoreMod, mask: Mask, dtype: str, config: str) -> None:
    if (config == OPTIMISTIC and mod.rule.may_drop) or (config == SPLIT and tiles.lists(mask.rule)):
        return  # no such kernel
    check(workload(32, dtype=dtype, mask=mask, score_mod=mod, q_len=150, k_len=400), config)


@pytest.mark.parametrize("far", [False, True])
def test_distances_of_long_sequences_are_as_exact_as_their_product(far: bool) -> None:
    """Against float64, of 65,536 keys. Far: scores grow with the distance by as much as ALiBi takes off, and
    all keys have weight; the product of a distance of 2^16 with a slope of 0.7 has 2^-8 for its last digit,
    with one of 2^-8 2^-16.
    """
    slopes, length = torch.tensor([2.0**-8, 0.7]), 2**16
    work = workload(16, dtype="bf16", score_mod=score_mods.alibi(), kv_heads=2, q_len=64, k_len=length)
    drawn = replace(make_inputs(work, "cpu"), score_mod=score_mods.alibi(slopes))
    distances = torch.arange(length).flip(0)
    if far:
        drawn.q[..., 0] = 4.0
        drawn.k[..., 0] = slopes[:, None] * distances / (4.0 * drawn.scale)
    q, k, v = (drawn.bhsd(each).double() for each in (drawn.q, drawn.k, drawn.v))
    behind = distances + torch.arange(64)[:, None] - 63
    scores = q @ k.mT * drawn.scale - slopes.double()[:, None, None] * behind
    scores = scores.masked_fill(behind < 0, -math.inf)
    out, lse = run(drawn, render(work.spec, FAMILY.find(DYNAMIC.replace("n64", "n128")), toolchain()))
    off = (lse - scores.logsumexp(-1)).abs().amax((0, 2))
    assert off[0] < 1e-5 and off[1] < (4e-3 if far else 1e-5), off
    assert (out - scores.softmax(-1) @ v).abs().max() < 0.01


@pytest.mark.parametrize("config", [DYNAMIC, SPLIT, OPTIMISTIC])
@pytest.mark.parametrize("sinks", ["fp32", "bf16"])
def test_sinks(sinks: str, config: str) -> None:
    work = workload(16, dtype="bf16", heads=4, kv_heads=2, q_len=30, k_len=200)
    check(replace(work, spec=replace(work.spec, sinks=sinks)), config)


BATCH, HEADS, Q_LEN, K_LEN = 2, 2, 290, 300
DRAW = torch.Generator().manual_seed(1)
DOCUMENTS = masks.document(torch.randint(0, 4, (BATCH, 300), generator=DRAW).sort(1).values.int())
BLOCKS = Rule.parse("mask", "blocks[head, q_idx // 32, k_idx // 64] where blocks: i1")
LISTED = {
    "documents": DOCUMENTS,
    "causal": CAUSAL & DOCUMENTS,
    "two": masks.document((torch.arange(300) >= 200).int().expand(BATCH, -1)),
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


@pytest.mark.parametrize("name,config", [*product(LISTED, (PLAIN, DYNAMIC)), ("two", OPTIMISTIC)])
def test_lists(name: str, config: str) -> None:
    judge(*listed(name), config)


def ordered(*edges: list[int]) -> Mask:
    """Of each sequence its own documents, of 300 keys."""
    made = [masks.document(cu_seqlens=torch.tensor(each), length=300) for each in edges]
    return made[0].bind(torch.cat([each.tensors[0] for each in made]))


ORDERED = ordered([0, 3, 3, 140, 290], [0, 64, 192, 300])
RANGES = {
    "documents": ORDERED,
    "causal": CAUSAL & ORDERED,
    "window": WINDOW & ORDERED,
    "others": ~ORDERED,
    "union": masks.sliding_window(20, 0) | ORDERED,
    "one": CAUSAL & ordered([0, 300], [0, 0, 300]),
    "each its own": ordered(list(range(301)), [0, 1, 300]),
}


@pytest.mark.parametrize("q_len", [290, 420, 70])
@pytest.mark.parametrize(
    "name,config", [*product(RANGES, (PLAIN, DYNAMIC)), ("documents", SPLIT), ("others", SPLIT)]
)
def test_documents_that_follow_one_another(name: str, config: str, q_len: int) -> None:
    """Rows before the first key, a last tile that leaves a consumer no row, blocks kept whole and in part."""
    work = workload(16, dtype="bf16", mask=RANGES[name], batch=2, q_len=q_len, k_len=300)
    assert tiles.lists(work.spec.mask) is None
    judge(replace(make_inputs(work, "cpu"), mask=RANGES[name]), work.spec, config)


@pytest.mark.parametrize("config", [DYNAMIC, OPTIMISTIC, DYNAMIC.replace("p1", "p4")])
def test_packs_and_guesses_over_documents_that_follow_one_another(config: str) -> None:
    mask = CAUSAL & ORDERED if "optimistic" not in config else ordered([0, 290], [0, 280])
    work = workload(16, dtype="bf16", mask=mask, batch=2, heads=4, q_len=150, k_len=300)
    judge(replace(make_inputs(work, "cpu"), mask=mask), work.spec, config)


@pytest.mark.parametrize("config", [DYNAMIC, OPTIMISTIC])
def test_distances_in_lists_with_blocks_kept_whole(config: str) -> None:
    inputs, spec = listed("two")
    rule = Rule.parse("score", "score + 0.125 * (k_idx - q_pos)")
    judge(replace(inputs, score_mod=ScoreMod(rule)), replace(spec, score_mod=rule), config)


@pytest.mark.parametrize("config", [PLAIN, DYNAMIC, OPTIMISTIC])
@pytest.mark.parametrize(
    "mask", [FULL, CAUSAL, WINDOW, masks.document("ordered")], ids=lambda m: m.describe()
)
def test_packed_sequences(mask: Mask, config: str) -> None:
    lengths = (130, 0, 5, 64, 1), (130, 9, 0, 200, 40)
    judge(*packed(*lengths, mask=mask, dtype="bf16", heads=1), config)


@pytest.mark.parametrize("config", [PLAIN, DYNAMIC.replace("p1", "p4"), OPTIMISTIC])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=lambda m: m.describe())
def test_8_bit_inputs(mask: Mask, config: str) -> None:
    check(workload(32, dtype="e4m3", mask=mask, heads=4, q_len=40, k_len=200), config)


def ramped(work: Workload, first: float, last: float) -> Inputs:
    """Scores grow along the keys from `first` to `last` times their size."""
    inputs = make_inputs(work, "cpu")
    most = max(first, last)
    ramp = torch.linspace(first / most, last / most, work.k_len)[:, None]
    return replace(inputs, k=(inputs.k.float() * ramp).to(inputs.k.dtype), scale=inputs.scale * most)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("config", [DYNAMIC, OPTIMISTIC])
@pytest.mark.parametrize("first,last", [(0.1, 8.0), (8.0, 0.1)])
def test_maxima_that_keep_rising_or_stay(first: float, last: float, config: str, dtype: str) -> None:
    """Keys are walked from the last to the first, so they rise where the first scores are the largest."""
    work = workload(32, dtype=dtype, mask=FULL, heads=1, q_len=70, k_len=300)
    judge(ramped(work, first, last), work.spec, config)


def _capped(text: str, *values: float) -> ScoreMod:
    return ScoreMod(Rule.parse("score", text), values)


CAPS = (
    *map(score_mods.softcap, (1e-3, 1.0, 4.0, 50.0, 1e4, 1e8)),
    score_mods.softcap(3.0).then(score_mods.softcap(0.5)),
    _capped("c * tanh(score / c) where c: f32", -2.0),  # as with 2: tanh is odd
    _capped("c * tanh(score) where c: f32", -2.0),
    _capped("c * tanh(score) where c: f32", 0.0),  # no -inf of a dropped key is multiplied by 0
    _capped("tanh(score)"),
    _capped("2 - 3 * tanh(score / c) where c: f32", 4.0),
    _capped("c * tanh((score + 0.1 * (k_idx - q_idx)) / c) + tanh(c) where c: f32", 5.0),
    _capped("where(k_idx % 3 == 0, c * tanh(score / c), 0.5) where c: f32", 1.5),
)


@pytest.mark.parametrize("config", [DYNAMIC, OPTIMISTIC, SPLIT])
@pytest.mark.parametrize("mod", CAPS, ids=lambda m: m.describe()[:40] + str(m.values))
def test_scores_are_bent_exactly(mod: ScoreMod, config: str) -> None:
    """Near 0, far from it and both in a warp; a large cap is nearly the identity."""
    work = workload(32, dtype="fp16", mask=CAUSAL, score_mod=mod, heads=1, q_len=150, k_len=200)
    inputs = ramped(work, 0.1, 3.0)
    out, lse = run(inputs, render(work.spec, FAMILY.find(config), toolchain()))
    expected, expected_lse = attention_reference(
        inputs.q, inputs.k, inputs.v, mask=inputs.mask, score_mod=mod, scale=inputs.scale, dtype=torch.float64
    )
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=2e-6, rtol=2e-6)


def test_tanh_of_a_thread_is_as_exact_as_exp_of_float32() -> None:
    """All digits of the small, and 4e-7 of the others, whichever way their warp goes."""
    work = workload(32, dtype="fp16", score_mod=score_mods.softcap(2.0))
    kernel = gluon.loaded(render(work.spec, FAMILY.find(DYNAMIC), toolchain()).text)
    for most in (1e-30, 0.4999, 0.51, 40.0, math.inf):
        at = torch.cat([torch.linspace(-min(most, 80.0), min(most, 80.0), 4095), torch.tensor([most])])
        found = kernel["tanh_of_quarter"](gluon.value(4 * at[torch.randperm(4096)].reshape(64, 64)))
        found = found.flatten().sort().values
        expected = at.sort().values.double().tanh()
        torch.testing.assert_close(found.double(), expected, atol=0.0, rtol=8e-7)
        assert (found - expected).abs().max() < 4e-7
    lost = torch.zeros(64, 64)
    lost[3, 5] = math.nan
    assert kernel["tanh_of_quarter"](gluon.value(lost)).isnan().sum() == 1


@pytest.mark.parametrize("scale", [0.25, 1.0, 100.0])
@pytest.mark.parametrize("cap", [score_mods.MIN_CAP, score_mods.MAX_CAP])
def test_no_cap_makes_scores_of_0_infinite(cap: float, scale: float) -> None:
    mod = score_mods.softcap(cap)
    inputs = make_inputs(workload(16, dtype="fp16", mask=FULL, score_mod=mod, heads=1, q_len=9), "cpu")
    inputs = replace(inputs, scale=scale)
    inputs.q[..., :4, :] = 0.0
    spec = workload(16, dtype="fp16", mask=FULL, score_mod=mod).spec
    out, lse = run(inputs, render(spec, FAMILY.find(DYNAMIC), toolchain()))
    expected, expected_lse = attention_reference(
        inputs.q, inputs.k, inputs.v, score_mod=mod, scale=scale, dtype=torch.float64
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("config", [PLAIN, DYNAMIC, SPLIT, OPTIMISTIC])
def test_rows_without_any_key(config: str) -> None:
    work = workload(16, dtype="bf16", q_len=70, k_len=30)
    out, lse = run(make_inputs(work, "cpu"), render(work.spec, FAMILY.find(config), toolchain()))
    assert (out[:, :, :40] == 0).all() and (lse[:, :, :40] == -math.inf).all()
    assert lse[:, :, 40:].isfinite().all() and out[:, :, 40:].any(-1).all()


MISTAKES = {
    "values are given back before they are multiplied": (
        DYNAMIC,
        r"(\n +acc, p, next_p = warp[^\n]+)(\n +mbarrier.arrive\(v_empty[^\n]+)",
        r"\2\1",
        "arrive",
    ),
    "values are multiplied before they are there": (
        DYNAMIC,
        r" +mbarrier.wait\(v_full.index\(v_stage\)[^\n]+\n",
        "",
        "",
    ),
    "scores are used before they are waited for": (
        PLAIN,
        r"warpgroup_mma_wait\(1, deps=\[score",
        "warpgroup_mma_wait(2, deps=[score",
        "",
    ),
    "the producer waits for the wrong phase of the keys": (
        PLAIN,
        r"(wait\(k_empty.index\(stage\), phase) \^ 1",
        r"\1",
        "",
    ),
    "the consumers wait for the wrong phase of the queries": (
        DYNAMIC,
        r"q_full, turn & 1",
        "q_full, turn & 1 ^ 1",
        "",
    ),
    "values come from the stage of the scores": (
        PLAIN,
        r"v_smem.index\(v_stage\)",
        "v_smem.index(stage)",
        "",
    ),
    "a consumer that sees less frees no stage of the rest": (
        DYNAMIC,
        r"(for start_n in range\(tile_hi - BLOCK_N, )hi( - BLOCK_N)",
        r"\1tile_hi\2",
        "",
    ),
    "queries are overwritten by those of the next tile": (
        DYNAMIC,
        r" +mbarrier.wait\(q_empty[^\n]+\n",
        "",
        "wait",
    ),
    "a ticket is that of the other slot": (DYNAMIC, r"slot \+ 2\).load", "(1 - slot) + 2).load", ""),
    "a ticket's slot is read before it is written": (
        DYNAMIC,
        r" +mbarrier.wait\(ticket_full[^\n]+\n",
        "",
        "wait",
    ),
    "an output is overwritten before it has left": (
        DYNAMIC,
        r" +tma.store_wait\(0\)  # the last[^\n]+\n",
        "",
        "",
    ),
    "nobody leaves the counters zeroed": (DYNAMIC, r"gl.store\(WORKSPACE, 0\)", "pass", ""),
    "sums keep the old maximum's size": (
        DYNAMIC,
        r"(factor = gl.exp2\()row_max - ",
        r"\1row_max - row_max + 0 * ",
        "",
    ),
    "a thread's rows are taken for each other": (DYNAMIC, r"a2 \* s2, a3 \* s3", "a2 * s0, a3 * s1", ""),
    "weights that are too large are not taken again": (
        OPTIMISTIC,
        r"if any_of_warp\(.+\) != 0:",
        "if False:",
        "",
    ),
    "a row's maximum is that of two of its four threads": (
        OPTIMISTIC,
        r"(bfly.b32 other, \$1, )2",
        r"\g<1>1",
        "",
    ),
}
"""In which config, what to replace by what in the rendered text, and what is slow where that is a race."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_stand_in_sees_mistakes(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, pattern, wrong, slow = MISTAKES[mistake]
    work = workload(32, dtype="fp16", mask=CAUSAL, heads=3, q_len=300, k_len=300)
    assert seen(ramped(work, 8.0, 0.1), work.spec, config, (pattern, wrong), slow, monkeypatch)


LISTED_MISTAKES = {
    "the words of a ticket are swapped": (
        r"\(ticket.index\(8 \* slot \+ 3\).load",
        "(ticket.index(8 * slot + 4).load",
    ),
    "the first block is another": (r"(first_block = gl.where\()partial > 0", r"\1partial == 0"),
    "whole blocks are read from the front": (r"end \+ partial - ahead", "2 + ahead"),
    "consumers walk the list otherwise than the producer": (r"partial, 2 \+ block", "partial, 1 + block"),
    "a slot is half as long": (r"ticket.index\(8 \* slot \+ 5\).store", "ticket.index(8 * slot + 4).store"),
}


@pytest.mark.parametrize("mistake", LISTED_MISTAKES)
def test_the_stand_in_sees_mistakes_in_lists(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(*listed("two"), DYNAMIC, LISTED_MISTAKES[mistake], "", monkeypatch)


def seen(
    inputs: Inputs,
    spec: AttentionSpec,
    config: str,
    change: tuple[str, str],
    slow: str,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What the stand-in says of a rendered text with something in it replaced."""
    monkeypatch.setattr(gluon, "PATIENCE_S", 1.0)
    monkeypatch.setattr(gluon, "SLOW", {slow: 0.02})
    source = render(spec, FAMILY.find(config), toolchain())
    text, changes = re.subn(*change, source.text)
    assert changes
    try:
        return Expected(inputs, spec).judge(*run(inputs, replace(source, text=text))).reason
    except Exception as error:
        return repr(error)
