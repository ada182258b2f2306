"""Families: what fits, what is admitted, and defaults that always fit."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen.abi import Scratch
from flashgen.codegen.families import FAMILIES, find_family, serving
from flashgen.codegen.family import Family
from flashgen.errors import DoesNotFit, InvalidArgument, UnknownName, Unsupported
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload, head_dim_chunks
from flashgen.spec.config import Config, Value
from flashgen.spec.rule import Rule
from flashgen.spec.target import TARGETS

FAMILY, SM90 = FAMILIES["attention_fwd"], FAMILIES["attention_fwd_sm90"]
H200 = TARGETS["nvidia-h200"]
SPEC = AttentionSpec(128, 128, "bf16", masks.causal().rule)
COMPILED = Path(__file__).parent.parent / "data" / "compiled_configs.jsonl"


def every_spec() -> list[AttentionSpec]:
    dims = range(16, 257, 8)
    return [AttentionSpec(d, d, t) for d in dims for t in ("bf16", "fp16", "fp32")]


def test_space_is_large_enough_and_all_of_it_fits() -> None:
    for head_dim in (64, 128):
        space = FAMILY.space(AttentionSpec(head_dim, head_dim, "bf16"), H200)
        assert len(space) >= 200
        assert len({c.name for c in space}) == len(space)


def test_names_find_their_configs() -> None:
    assert all(FAMILY.find(c.name) == c for c in FAMILY.all_configs())
    with pytest.raises(InvalidArgument, match="a name reads like"):
        FAMILY.find("m128")


def test_config_round_trip_and_checks() -> None:
    config = FAMILY.find("m128n64w4s2_tma_heads")
    assert Config.from_json("attention_fwd", config.to_json()) == config
    assert config.number("block_m") == 128 and config["loads"] == "tma"
    with pytest.raises(InvalidArgument, match="block_m=48"):
        FAMILY.config(block_m=48, block_n=64, num_warps=4, num_stages=2, loads="tma", order="heads")
    with pytest.raises(InvalidArgument, match="power of two"):
        Config("attention_fwd", (("block_m", 48),))


def test_a_config_is_owned_with_every_tunable_at_a_value_of_its_table() -> None:
    assert not any(FAMILY.owns(config) for config in FAMILY.all_configs())
    values = FAMILY.all_configs()[0].values
    for odd in (
        (),
        values[:-1],
        values[::-1],
        (*values[:3], ("num_stages", "x"), *values[4:]),
        (("block_m", 2048), *values[1:]),
    ):
        assert "attention_fwd" in FAMILY.owns(Config("attention_fwd", odd))
    assert "a config of other" in FAMILY.owns(Config("other", values))


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_c15_a_default_fits_every_spec_on_every_target(target) -> None:  # type: ignore[no-untyped-def]
    """Also on cards with 99 KB a block, in fp32 at head_dim 256, for calls that admit no descriptor."""
    for spec in every_spec():
        for facts in (CallFacts(), CallFacts("strided", tma=False, wide=True)):
            config = FAMILY.default(spec, target, facts)
            assert not FAMILY.fits(config, spec, target) and not FAMILY.admits(config, facts)


def test_c15_refusal_lists_what_was_tried() -> None:
    tiny = replace(H200, shared_per_block=4 * 1024)
    with pytest.raises(DoesNotFit, match=r"tried:\n.*m128n64w4s2_tma_heads: needs at least 96 KB"):
        FAMILY.default(SPEC, tiny, CallFacts())


def test_fits_says_why_not() -> None:
    config = FAMILY.find("m128n128w8s4_tma_heads")
    assert "288 KB of shared memory" in FAMILY.fits(config, SPEC, H200)
    assert "sm_90" in FAMILY.fits(FAMILY.find("m64n32w4s1_tma_heads"), SPEC, TARGETS["nvidia-a100"])


def test_admits_by_call_facts() -> None:
    tma, pointer = FAMILY.find("m64n32w4s1_tma_heads"), FAMILY.find("m64n32w4s1_pointer_heads")
    assert FAMILY.admits(tma, CallFacts()) == "" == FAMILY.admits(pointer, CallFacts("strided", tma=False))
    assert "descriptor" in FAMILY.admits(tma, CallFacts("unit", tma=False))
    assert (FAMILY.admission(tma), FAMILY.admission(pointer)) == ("tma", "any")


def test_feasible_is_what_fits_and_admits() -> None:
    strided = CallFacts("strided", tma=False)
    assert FAMILY.feasible(SPEC, H200, CallFacts()) == FAMILY.space(SPEC, H200)
    pointers = tuple(c for c in FAMILY.space(SPEC, H200) if c["loads"] == "pointer")
    assert FAMILY.feasible(SPEC, H200, strided) == pointers
    tma, large = FAMILY.find("m64n32w4s1_tma_heads"), FAMILY.find("m128n128w8s4_pointer_heads")
    assert "descriptor" in FAMILY.refuses(tma, SPEC, H200, strided)
    assert "shared memory" in FAMILY.refuses(large, SPEC, H200, strided)


def test_a_reason_leaves_the_configs_name_to_whoever_tells_it() -> None:
    a100, unaligned = TARGETS["nvidia-a100"], CallFacts("unit", tma=False)
    for config in FAMILY.all_configs():
        for reason in (FAMILY.fits(config, SPEC, a100), FAMILY.admits(config, unaligned)):
            assert config.name not in reason


def test_serving_gives_reasons() -> None:
    assert serving(SPEC, H200) == (SM90, FAMILY)
    assert serving(SPEC, TARGETS["nvidia-a100"]) == serving(SPEC, TARGETS["nvidia-b200"]) == (FAMILY,)
    assert serving(AttentionSpec(128, 128, "fp32"), H200) == (FAMILY,)
    with pytest.raises(Unsupported, match="needs sm_80 or newer"):
        serving(SPEC, replace(H200, arch=75))
    with pytest.raises(UnknownName, match="known: attention_bwd, attention_bwd_sm90, attention_fwd, "):
        find_family("attention")


def test_serving_asks_for_a_default_where_the_kind_of_call_is_given() -> None:
    strided = CallFacts("strided", tma=False)
    assert serving(SPEC, H200, CallFacts()) == (SM90, FAMILY)
    assert serving(SPEC, H200, strided) == (FAMILY,)
    tiny = replace(H200, shared_per_block=4 * 1024)
    reasons = r"(?s)sm90 fits.*needs at least 192 KB.*attention_fwd fits.*needs at least 96 KB"
    with pytest.raises(Unsupported, match=reasons):
        serving(SPEC, tiny, strided)


# The Hopper family


@pytest.mark.parametrize("name", ["nvidia-h100", "nvidia-h200"])
def test_a_hopper_default_fits_every_spec_and_group(name: str) -> None:
    target, facts = TARGETS[name], CallFacts()
    for first in range(16, 257, 16):
        for second in (16, 64, 96, 128, 256, first):
            for lse in (False, True):
                spec = AttentionSpec(first, second, "bf16", return_lse=lse)
                config = SM90.default(spec, target, facts, 3)
                assert not SM90.refuses(config, spec, target, facts, 3)
                assert SM90.shared_bytes(config, spec, target).most <= target.shared_per_block


def test_hopper_configs_are_refused_with_what_they_hold() -> None:
    def fits(config: str, spec: AttentionSpec = SPEC) -> str:
        return SM90.fits(SM90.find(config), spec, H200)

    rest = "late_lazy_tree_lane_dynamic"
    assert fits(f"c3x1n64s2g4p1_{rest}") == fits(f"c2x1n128s2g4p1_{rest}") == ""
    assert "needs at least 288 KB of shared memory" in fits(f"c2x1n128s4g4p1_{rest}")
    by_head = replace(SPEC, mask=Rule.parse("mask", "q_pos - k_idx <= sizes[head] where sizes: i32"))
    assert fits(f"c2x1n64s2g4p1_{rest}", by_head) == ""
    assert fits(f"c2x1n64s2g4p4_{rest}", by_head).endswith("asks for the head; take pack=1")
    assert fits("c3x1n64s2g4p1_late_lazy_optimistic_lane_plain") == ""


NARROW = AttentionSpec(64, 64, "bf16", masks.full().rule)
DROPS = replace(SPEC, score_mod=score_mods.SCORE_MODS["bias"].examples()[0].rule)
LISTED = replace(SPEC, mask=masks.MASKS["document"].examples()[0].rule)
REFUSALS: dict[str, tuple[AttentionSpec, list[str]]] = {
    "c2x2n64s2g4p1_late_lazy_tree_lane_plain": (
        SPEC,
        ["2 programs of 2 consumers", "allowed: 1 of 1, 1 of 2, 1 of 3, 2 of 1, 3 of 1"],
    ),
    "c3x1n128s2g4p1_late_lazy_tree_lane_plain": (SPEC, ["holds 192 registers", "has 160", "smaller block_n"]),
    "c1x3n64s2g4p1_late_lazy_tree_lane_plain": (
        SPEC,
        ["sums take 64 registers and 30 beside them, of 80", "3 programs", "fewer programs"],
    ),
    "c1x2n128s4g4p1_late_lazy_tree_lane_plain": (
        NARROW,
        ["2 programs need 276 KB", "has 228 KB", "num_stages"],
    ),
    "c3x1n64s2g4p1_late_always_optimistic_lane_plain": (
        SPEC,
        ["row_max optimistic needs row_sum lane and rescale lazy"],
    ),
    "c3x1n64s2g4p1_late_lazy_optimistic_row_plain": (
        SPEC,
        ["row_max optimistic needs row_sum lane and rescale lazy"],
    ),
    "c2x1n64s2g4p1_late_lazy_optimistic_lane_plain": (DROPS, ["may give -inf", "take tree or chain"]),
    "c2x1n64s2g4p1k2_late_lazy_tree_lane_plain": (LISTED, ["this mask lists them", "splits=1"]),
    "c2x1n64s2g4p1k3_late_lazy_tree_lane_plain": (
        replace(SPEC, addressing="varlen"),
        ["these are packed", "splits=1"],
    ),
}
"""What of a refusal says what was given, what is allowed, and what to take instead."""


@pytest.mark.parametrize("config", REFUSALS)
def test_a_refusal_says_what_was_given_and_what_is_allowed(config: str) -> None:
    spec, told = REFUSALS[config]
    reason = SM90.fits(SM90.find(config), spec, H200)
    assert all(each in reason for each in told), reason


def test_a_tile_packs_heads_of_one_key_head() -> None:
    one, four, eight = (SM90.find(f"c2x1n64s2g4p{n}_late_lazy_tree_lane_plain") for n in (1, 4, 8))
    assert [SM90.admission(each) for each in (one, four, eight)] == ["tma", "tma_pack4", "tma_pack8"]
    assert [SM90.tiling(each).block_m for each in (one, four, eight)] == [128, 32, 16]
    assert {SM90.tiling(each).rows for each in (one, four, eight)} == {128}
    assert SM90.admits(one, CallFacts(), 5) == SM90.admits(four, CallFacts(), 8) == ""
    told = "packs 4 heads of a key head into a tile, of which there are 6; pack must divide these"
    assert SM90.admits(four, CallFacts(), 6) == told == SM90.refuses(four, SPEC, H200, CallFacts(), 6)
    assert "descriptor" in SM90.admits(one, CallFacts("unit", tma=False), 4)


@pytest.mark.parametrize(
    ("heads_per_kv", "packs"), [(1, {1}), (3, {1}), (4, {1, 4}), (8, {1, 8}), (12, {1, 4}), (48, {1, 16})]
)
def test_a_search_packs_no_heads_or_as_many_as_it_can(heads_per_kv: int, packs: set[int]) -> None:
    found = SM90.feasible(SPEC, H200, CallFacts(), heads_per_kv)
    assert {SM90.tiling(config).pack for config in found} == packs
    assert set(found) <= set(SM90.space(SPEC, H200)) and len(found) == len(set(found))
    assert FAMILY.feasible(SPEC, H200, CallFacts(), heads_per_kv) == FAMILY.space(SPEC, H200)


def test_the_output_leaves_through_the_queries_memory_where_its_own_has_no_room() -> None:
    """Bytes of Q, the ring of K and V, and the output if it has its own."""

    def least(config: str, spec: AttentionSpec = SPEC) -> int:
        return SM90.shared_bytes(SM90.find(config), spec, H200).least

    q, ring = 128 * 128 * 2, 2 * 128 * 256 * 2
    assert least("c2x1n128s2g4p1_late_lazy_tree_lane_plain") == q + ring
    assert least("c2x1n128s2g4p1_late_lazy_tree_lane_dynamic") == q + ring + q
    assert least("c2x1n128s3g4p1_late_lazy_tree_lane_dynamic") == q + 3 * 128 * 256 * 2
    narrow = AttentionSpec(128, 64, "bf16", masks.causal().rule)
    tile, narrow_ring = 128 * 128 * 2, 2 * 128 * 192 * 2
    assert least("c2x1n128s2g4p1_late_lazy_tree_lane_plain", narrow) == tile + narrow_ring + 128 * 64 * 2


@pytest.mark.parametrize(
    "head_dim,expected", [(128, (128,)), (96, (64, 32)), (72, (64, 16)), (248, (128, 64, 32, 16, 16))]
)
def test_head_dim_chunks(head_dim: int, expected: tuple[int, ...]) -> None:
    assert head_dim_chunks(head_dim) == expected


def test_shared_memory_bounds_hold_over_recorded_compiles() -> None:
    """`fits` refuses nothing that ptxas accepted, and what a default promises to keep within is enough."""
    rows = [json.loads(line) for line in COMPILED.read_text().splitlines()]
    assert len(rows) >= 400
    for row in rows:
        spec = AttentionSpec(row["head_dim"], row["head_dim_v"], row["dtype"], masks.causal().rule)
        bound = FAMILY.shared_bytes(FAMILY.find(row["config"]), spec, TARGETS[row["target"]])
        assert bound.least <= row["shared_bytes"] <= bound.most, row


def test_bounds_of_gradients_hold_over_recorded_compiles() -> None:
    """Of all kernels of a file that are recorded; and what `fits` refuses for its registers spills where it
    hurts."""
    rows = [
        json.loads(line) for line in (COMPILED.parent / "compiled_gradients.jsonl").read_text().splitlines()
    ]
    assert len(rows) >= 25 and {row["family"] for row in rows} == {"attention_bwd", "attention_bwd_sm90"}
    for row in rows:
        family = FAMILIES[row["family"]]
        spec = AttentionSpec(row["head_dim"], row["head_dim_v"], row["dtype"], masks.causal().rule).backward()
        config, target = family.find(row["config"]), TARGETS[row["target"]]
        bound = family.shared_bytes(config, spec, target)
        assert all(bound.least <= each <= bound.most for each in row["shared_bytes"]), row
        if "registers" in family.fits(config, spec, target):
            assert max(row["spills_in_loops"]) > 0, row


def test_defaults_of_gradients_fit_everywhere() -> None:
    family = FAMILIES["attention_bwd"]
    for spec in every_spec():
        for target in TARGETS.values():
            for facts in (CallFacts(), CallFacts("strided", tma=False)):
                if not family.supports(spec.backward(), target):
                    assert family.default(spec.backward(), target, facts)


def test_the_hopper_family_of_gradients_says_what_it_leaves_to_the_portable_one() -> None:
    family, target = FAMILIES["attention_bwd_sm90"], TARGETS["nvidia-h200"]
    config = family.find("s2g4_shared")
    chunks = AttentionSpec(96, 96, "bf16").backward()
    assert not family.fits(config, chunks, target)
    assert "holds 224 registers" in family.fits(family.find("s2g4_registers"), chunks, target)
    values = AttentionSpec(128, 256, "bf16").backward()
    assert "holds 272 registers" in family.fits(config, values, target)
    assert "holds 272 registers" in family.fits(
        family.find("s2g4_registers"), AttentionSpec(128, 128, "bf16").backward(), target
    )
    exchanged, wide = family.find("s2g4_exchanged"), AttentionSpec(256, 256, "bf16").backward()
    assert "up to 128 beside dk and dv, not 256" in family.fits(config, wide, target)
    assert not family.fits(exchanged, wide, target) and not family.fits(exchanged, values, target)
    assert "what each consumer can compute alone" in family.fits(exchanged, chunks, target)
    assert "KB of shared memory" in family.fits(family.find("s3g4_exchanged"), wide, target)
    third = family.find("s2g4_shared_third")
    assert not family.fits(third, chunks, target)
    assert "holds 208 registers" in family.fits(third, AttentionSpec(128, 128, "bf16").backward(), target)
    assert "take dq_by=consumers" in family.fits(family.find("s2g4_exchanged_third"), wide, target)
    assert "fp32" in family.supports(AttentionSpec(64, 64, "fp32").backward(), target)
    assert "needs sm_90" in family.supports(SPEC.backward(), TARGETS["nvidia-b200"])
    assert "descriptor" in family.admits(config, CallFacts("strided", tma=False))
    tiling = family.tiling(config)
    work = Workload(SPEC.backward(), 2, 8, 2, 4096, 300)
    assert tiling.tiles(work) == 2 * 2 * 3 == tiling.grid.blocks(2, 2, 300, multiprocessors=132)
    assert family.tiling(exchanged).tiles(work) == 2 * 2 * 5
    packed = replace(SPEC, addressing="varlen").backward()
    assert tiling.grid_of(packed).rule == "packed_key_tiles"
    assert tiling.tiles(Workload(packed, 2, 8, 2, 4096, 300, (), 5000, 500)) == 2 * (500 // 128 + 2)
    (stats, sums) = family.scratch(config, packed)
    assert stats.extents[2].of(5000, 7) == 5000 // 64 + 7 and stats.extents[3].of(1, 7) == 128
    assert sums.extents[2].of(5000, 7) == (5000 // 64 + 7) * 64 * packed.head_dim // 256
    assert Scratch.from_json(sums.to_json()) == sums and sums.to_json()["extents"][2]["packed"]


def test_a_default_of_the_hopper_family_of_gradients_fits_all_head_dims() -> None:
    family = FAMILIES["attention_bwd_sm90"]
    for head_dim, head_dim_v in itertools.product(range(16, 257, 8), repeat=2):
        spec = AttentionSpec(head_dim, head_dim_v, "bf16").backward()
        assert family.default(spec, H200, CallFacts()) in family.space(spec, H200)


BIASED = replace(SPEC, score_mod=score_mods.bias("bhqk", "bf16").rule)
LEFT_TO_THE_PORTABLE_FAMILY = [
    (BIASED.backward(learned=("bias",)), "those of what the score rule reads (bias) are asked for, too"),
    (replace(SPEC, dropout=True).backward(), "draws no random numbers, which dropout needs"),
    (AttentionSpec(64, 64, "fp32").backward(), "serves fp16, bf16, not fp32"),
]


@pytest.mark.parametrize(("spec", "reason"), LEFT_TO_THE_PORTABLE_FAMILY, ids=lambda each: str(each)[:40])
def test_what_the_hopper_family_of_gradients_leaves_the_portable_one_serves(
    spec: AttentionSpec, reason: str
) -> None:
    family = FAMILIES["attention_bwd_sm90"]
    told = {family.supports(spec, H200) or family.fits(each, spec, H200) for each in family.all_configs()}
    assert all(told) and any(reason in each for each in told)
    assert [each.name for each in serving(spec, H200, CallFacts())] == ["attention_bwd"]


def test_beside_these_both_families_of_gradients_serve() -> None:
    for spec in (
        SPEC.backward(),
        SPEC.backward(lse=True),
        replace(SPEC, sinks="bf16").backward(),
        replace(SPEC, sinks="bf16").backward(sinks=True),
        replace(SPEC, mask=masks.document().rule).backward(),
        replace(SPEC, addressing="varlen").backward(),
        BIASED.backward(),
    ):
        assert [each.name for each in serving(spec, H200, CallFacts())] == [
            "attention_bwd",
            "attention_bwd_sm90",
        ]


# One kernel of all gradients, a form of the portable family

BWD = FAMILIES["attention_bwd"]
SPLIT, FUSED = (BWD.find(f"m64n32w4s2_tma_heads{form}") for form in ("", "_fused"))


def test_the_split_form_is_named_and_written_as_ever() -> None:
    assert SPLIT["form"] == "split" and "form" not in SPLIT.to_json() and SPLIT.name == "m64n32w4s2_tma_heads"
    assert BWD.config(**SPLIT.to_json(), form="split") == SPLIT
    named = "a config of attention_bwd in another form"
    assert re.match(named, BWD.owns(Config(BWD.name, (*SPLIT.values, ("form", "split")))))
    with pytest.raises(InvalidArgument, match=r"heads_split.: it is written m64n32w4s2_tma_heads"):
        BWD.find("m64n32w4s2_tma_heads_split")
    with pytest.raises(InvalidArgument, match=r"attention_bwd: form='joined'; allowed: split, fused"):
        BWD.find("m64n32w4s2_tma_heads_joined")


def test_the_fused_form_is_found_and_owned_by_its_name() -> None:
    assert FUSED.name == "m64n32w4s2_tma_heads_fused" and FUSED.to_json().popitem() == ("form", "fused")
    assert BWD.owns(Config.from_json(BWD.name, FUSED.to_json())) == ""
    spec = replace(SPEC, sinks="bf16").backward(sinks=True)
    names = [(part.name, part.before) for part in BWD.parts(FUSED, spec)]
    assert names == [("prepare_rows", True), ("gradients_of_sinks", True), ("leave_dq", False)]
    sums = BWD.scratch(FUSED, replace(spec, head_dim=72))[-1]
    assert sums.name == "dq_sums" and sums.extents[-1].of(1) == 80, "64 + 16 columns"


@pytest.mark.parametrize("target", ["nvidia-h200", "nvidia-a100"])
def test_a_search_of_gradients_tries_both_forms_and_starts_with_the_split_one(target: str) -> None:
    spec, facts = SPEC.backward(), CallFacts()
    found = BWD.feasible(spec, TARGETS[target], facts)
    forms = [config["form"] for config in found]
    assert set(forms) == {"split", "fused"} and len(found) == len(set(found))
    assert forms == sorted(forms, reverse=True), "as ever, then the others"
    assert BWD.default(spec, TARGETS[target], facts)["form"] == "split"


def test_a_tile_of_the_fused_form_is_of_keys() -> None:
    work = Workload(SPEC.backward(), 2, 8, 2, 4096, 300)
    tiling = BWD.tiling(FUSED)
    assert (tiling.block_m, tiling.block_n, tiling.by_keys) == (32, 64, True)
    assert tiling.tiles(work) == 2 * 2 * 5 == tiling.grid_of(work.spec).blocks(2, 2, 300, 132)
    packed = replace(work, spec=replace(work.spec, addressing="varlen"), total_q=5000, total_k=500)
    assert tiling.tiles(packed) == 2 * (500 // 64 + 2)
    assert tiling.grid_of(packed.spec).rule == "packed_key_tiles"


def test_sums_without_an_order_serve_no_deterministic_call() -> None:
    told = "adds to a gradient in any order, and deterministic gradients are asked for"
    hopper = FAMILIES["attention_bwd_sm90"]
    pointers = BWD.find("m64n32w4s2_pointer_heads_fused")
    for family, config, admission in (
        (BWD, FUSED, "tma_unordered"),
        (BWD, pointers, "any_unordered"),
        (hopper, hopper.find("s2g4_shared"), "tma_unordered"),
    ):
        assert family.admission(config) == admission and not family.tiling(config).repeats
        assert family.admits(config, CallFacts()) == ""
        assert family.admits(config, CallFacts(), deterministic=True) == told
    assert BWD.admission(SPLIT) == "tma" and BWD.admits(SPLIT, CallFacts(), deterministic=True) == ""


def test_what_the_fused_form_leaves_to_the_split_one() -> None:
    learning = BIASED.backward(learned=("bias",))
    assert "no tiles of rows, which sum what a score rule learns; take form=split" in BWD.fits(
        FUSED, learning, H200
    )
    assert BWD.fits(SPLIT, learning, H200) == BWD.fits(FUSED, BIASED.backward(), H200) == ""
    wide = AttentionSpec(256, 64, "bf16").backward()
    tall = "m16n128w4s1_pointer_heads"
    assert BWD.fits(BWD.find(tall), wide, H200) == ""
    assert BWD.fits(BWD.find(f"{tall}_fused"), wide, H200).startswith("holds 296 registers a thread")


# Split keys

SHORT = Workload(SPEC, 1, 32, 8, 16, 8192)
"""16 queries of 8 key heads, whose 4 query heads a tile may hold: 8 tiles on 132 multiprocessors."""
PACKED = "c1x1n64s2g4p4{}_late_lazy_tree_lane_plain"


def test_a_config_without_splits_is_named_and_written_as_ever() -> None:
    for family, name in ((FAMILY, "m128n64w4s2_tma_heads"), (SM90, PACKED.format(""))):
        config = family.find(name)
        assert config["splits"] == 1 and "splits" not in config.to_json() and config.name == name
        assert family.config(**config.to_json(), splits=1) == config
        assert family.parts(config, SPEC) == family.scratch(config, SPEC) == ()
        named = "a config of attention_fwd.* in another form"
        assert re.match(named, family.owns(Config(family.name, (*config.values, ("splits", 1)))))


def test_a_config_with_splits_is_found_and_owned_by_its_name() -> None:
    for family, name in ((FAMILY, "m128n64w4s2k16_tma_heads"), (SM90, PACKED.format("k64"))):
        config = family.find(name)
        assert config.name == name and family.tiling(config).splits == config["splits"] > 1
        assert config.to_json().popitem() == ("splits", config["splits"])
        assert family.owns(Config.from_json(family.name, config.to_json())) == ""
        assert [part.name for part in family.parts(config, SPEC)] == ["combine_splits"]
        assert (
            len({config, family.find(re.sub(r"k\d+", "", name)), family.find(re.sub(r"k\d+", "k2", name))})
            == 3
        )
    with pytest.raises(InvalidArgument, match=r"no config .*: attention_fwd: splits=5; allowed: 1, 2, 3, 4"):
        FAMILY.find("m128n64w4s2k5_tma_heads")
    with pytest.raises(InvalidArgument, match=r"k1_tma_heads.: it is written m128n64w4s2_tma_heads"):
        FAMILY.find("m128n64w4s2k1_tma_heads")


def splits_of(family: Family, workload: Workload) -> dict[str, set[Value]]:
    """The splits that a search tries, by the rest of the config's name."""
    found: dict[str, set[Value]] = {}
    for config in family.feasible(SPEC, H200, CallFacts(), workload.heads_per_kv, workload):
        found.setdefault(re.sub(r"k\d+_", "_", config.name), set()).add(config["splits"])
    return found


def test_a_search_splits_the_keys_of_few_rows_into_as_many_parts_as_fill_the_gpu() -> None:
    """A quarter of 132 multiprocessors at least, and four times as many programs at most."""
    found = splits_of(SM90, SHORT)
    assert found[PACKED.format("")] == {1, 6, 8, 12, 16, 32, 64}
    assert found[PACKED.format("").replace("p4", "p1")] == {1, 2, 3, 4, 6, 8, 12, 16}
    assert found[PACKED.format("").replace("lazy", "always")] == {1}, "what splits are searched with"
    assert found[PACKED.format("").replace("tree", "optimistic")] == found[PACKED.format("")]
    few_keys = replace(SHORT, k_len=1000)  # 16 blocks of 64
    assert splits_of(SM90, few_keys)[PACKED.format("")] == {1, 6, 8, 12, 16}
    assert splits_of(FAMILY, SHORT)["m16n64w4s2_tma_heads"] == {1, 2, 3, 4, 6, 8, 12, 16}
    assert splits_of(FAMILY, SHORT)["m16n64w4s2_tma_rows"] == {1}


def test_a_search_of_many_rows_is_what_it_was() -> None:
    for family in (FAMILY, SM90):
        before = family.feasible(SPEC, H200, CallFacts(), 4)
        assert family.feasible(SPEC, H200, CallFacts(), 4, Workload(SPEC, 4, 32, 8, 4096, 4096)) == before
        assert len(family.feasible(SPEC, H200, CallFacts(), 4, SHORT)) < 5 * len(before)


def test_splits_of_a_call_whose_rows_fill_the_gpu_are_refused() -> None:
    split = SM90.find(PACKED.format("k16"))
    assert SM90.crowds(split, SHORT, H200) == SM90.crowds(split, replace(SHORT, q_len=64), H200) == ""
    told = "splits each tile's keys among 16 programs, which makes 1024 of them: more than 4 for each of 132"
    assert SM90.crowds(split, replace(SHORT, q_len=128), H200).startswith(told)
    whole = SM90.find(PACKED.format(""))
    assert SM90.crowds(whole, replace(SHORT, q_len=100_000), H200) == ""


def test_what_leaves_three_quarters_of_the_gpu_idle_is_refused_where_the_default_splits() -> None:
    """A group of 7 query heads is packed by no config: 28 tiles."""
    whole = SM90.find("c2x1n128s2g4p1_late_lazy_tree_lane_dynamic")
    work = Workload(SPEC, 1, 28, 4, 16, 16384)

    def idles(config: Config = whole, **sizes: int) -> str:
        return SM90.idles(config, replace(work, **sizes), H200, CallFacts())

    told = "splits no keys, and has 28 tiles here for 132 programs; the default, c2x1n128s2g4p1k4_late"
    assert idles().startswith(told)
    assert idles(SM90.config(**whole.to_json(), splits=2)) == ""
    assert idles(batch=2) == "", "56 tiles"
    assert idles(k_len=2048) == "", "2 parts of 8 blocks"
    assert SM90.idles(whole, replace(work, spec=LISTED), H200, CallFacts()) == ""


@pytest.mark.parametrize(
    ("family", "sizes", "splits"),
    [
        (SM90, (1, 32, 8, 16, 8192), 4),  # 32 tiles of the default, which packs nothing
        (SM90, (1, 8, 8, 16, 8192), 8),  # 8 tiles, but each part keeps 8 blocks of 128
        (SM90, (1, 8, 8, 16, 65536), 16),
        (SM90, (2, 32, 8, 16, 65536), 2),
        (SM90, (4, 32, 8, 16, 65536), 1),  # 128 tiles fill 132 multiprocessors
        (SM90, (1, 8, 8, 16, 1024), 1),  # 8 blocks
        (SM90, (1, 8, 8, 16, 0), 1),
        (FAMILY, (1, 8, 8, 100, 65536), 16),
    ],
)
def test_a_default_splits_the_keys_of_a_call_that_would_leave_half_the_gpu_idle(
    family: Family, sizes: tuple[int, int, int, int, int], splits: int
) -> None:
    workload = Workload(SPEC, *sizes)
    config = family.default(SPEC, H200, CallFacts(), workload.heads_per_kv, workload)
    assert config["splits"] == splits
    assert not family.refuses(config, SPEC, H200, CallFacts(), workload.heads_per_kv)
    without = family.default(SPEC, H200, CallFacts(), workload.heads_per_kv)
    assert {**config.to_json(), "splits": 1} == {**without.to_json(), "splits": 1}
