"""What a mask that needs lists adds to a kernel, and that others add nothing."""

from __future__ import annotations

import pytest

from flashgen.codegen.abi import AXES, GRID_RULES, Abi
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import KernelSource, Toolchain, render
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.masks import parse_mask
from flashgen.spec.rule import Rule

CONFIGS = {
    "attention_fwd": "m128n64w4s2_tma_heads",
    "attention_fwd_sm90": "c3x1n64s2g4p4_late_lazy_tree_lane_dynamic",
}
TILES = {"attention_fwd": (128, 64), "attention_fwd_sm90": (48, 64)}
"""Query positions and keys of a tile; the second has four heads in its 192 rows."""


def source(family: str, rule: Rule) -> KernelSource:
    spec = AttentionSpec(64, 64, "bf16", rule)
    return render(spec, FAMILIES[family].find(CONFIGS[family]), Toolchain("3.6.0"))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "text", ["full", "causal & key_padding", "key_padding('keep')", "sliding_window(7, 0)"]
)
def test_masks_of_ranges_have_no_lists(family: str, text: str) -> None:
    made = source(family, parse_mask(text).rule)
    assert (made.parts, made.scratch) == ((), ())
    assert "LISTS" not in made.text and "classify" not in made.text


@pytest.mark.parametrize("by_head", [False, True])
def test_gradients_have_lists_along_either_side(by_head: bool) -> None:
    spec = AttentionSpec(64, 64, "bf16", BY_HEAD if by_head else parse_mask("causal & document").rule)
    made = render(
        spec.backward(), FAMILIES["attention_bwd"].find("m128n32w8s2_tma_heads"), Toolchain("3.6.0")
    )
    parts = {part.name: part for part in made.parts}
    assert list(parts) == ["prepare_rows", "classify_tiles", "classify_keys", "gradients_of_keys"]
    sizes = {"batch": 3, "heads": 8, "q_len": 1000, "k_len": 257, "": 1}
    of_rows, of_keys = (
        [extent.of(sizes[extent.size]) for extent in buffer.extents] for buffer in made.scratch[2:]
    )
    heads = 8 if by_head else 1
    assert of_rows == [3, heads, 8, 9 + 3] and of_keys == [3, heads, 3, 32 + 3]
    facts, blocks = CallFacts(), []
    for name, walks in (("classify_tiles", None), ("classify_keys", "gradients_of_keys")):
        abi, main = made.abi(facts, parts[name]), made.abi(facts, parts[walks] if walks else None)
        taken, walked = (
            {arg.source for arg in each.args if arg.source.startswith("scratch.lists")}
            for each in (abi, main)
        )
        assert taken == walked and len(taken) == 3 + by_head
        rows = sizes[GRID_RULES[abi.grid.rule][2]]
        blocks.append(abi.grid.blocks(3, 8, rows, 132))
    assert blocks == [3 * heads * 8, 3 * heads * 3]


BY_HEAD = Rule.parse("mask", "q_idx // 8 - k_idx // 8 < reach[kv_head] where reach: i32")


@pytest.mark.parametrize(("wide", "stride"), [(False, "i32"), (True, "i64")])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_lists_are_a_part_and_a_buffer(family: str, by_head: bool, wide: bool, stride: str) -> None:
    made = source(family, BY_HEAD if by_head else parse_mask("causal & document").rule)
    block_m, block_n = TILES[family]
    (part,), (buffer,) = made.parts, made.scratch
    sizes = {"batch": 3, "heads": 8, "q_len": 1000, "k_len": 257, "": 1}
    extents = [extent.of(sizes[extent.size]) for extent in buffer.extents]
    assert extents == [3, 8 if by_head else 1, -(-1000 // block_m), -(-257 // block_n) + 3]
    facts = CallFacts(wide=wide)
    main, classify = made.abi(facts), made.abi(facts, part)
    assert part.before and classify.num_warps == 8
    assert classify.grid.blocks(3, 8, 1000, 132) == extents[0] * extents[1] * extents[2]
    axes = [axis for axis in AXES[:3] if by_head or axis != "head"]
    for abi in (main, classify):
        taken = {arg.source: (arg.type, arg.divisor) for arg in abi.args if arg.source.startswith("scratch")}
        assert taken.pop("scratch.lists") == ("*i32", 16)
        assert taken == {f"scratch.lists.stride.{axis}": (stride, 1) for axis in axes}
        assert Abi.from_json(abi.to_json()) == abi
