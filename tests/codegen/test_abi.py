"""The ABI: grids, what an argument may be, and the way through JSON."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from flashgen.codegen.abi import WORKSPACE, Abi, Arg, Grid
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import Toolchain, render
from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec, CallFacts

SMS = 132
SM90 = FAMILIES["attention_fwd_sm90"]
CAUSAL = AttentionSpec(128, 128, "bf16", masks.causal().rule)


def abi(config: str, facts: CallFacts | None = None) -> Abi:
    return render(CAUSAL, SM90.find(config), Toolchain("3.6.0")).abi(facts or CallFacts())


PACKED = abi("c2x1n128s2g4p4_late_lazy_tree_lane_dynamic")


@pytest.mark.parametrize(
    ("grid", "sizes", "blocks"),
    [
        (Grid("row_tiles", 128), (2, 8, 300), 3 * 8 * 2),
        (Grid("row_tiles", 128), (2, 8, 0), 0),
        (Grid("row_tiles", 16, 4), (2, 8, 300), 19 * 2 * 2),
        (Grid("row_tiles", 4, 16), (1, 32, 1), 2),
        (Grid("row_tiles_of_a_sequence", 128), (2, 8, 300), 3 * 2),
        (Grid("row_tiles_of_a_sequence", 192), (3, 128, 193), 2 * 3),
        (Grid("key_tiles_of_a_sequence", 128), (2, 8, 300), 3 * 2),
        (Grid("key_tiles_of_heads", 128), (2, 8, 300), 3 * 2 * 8),
        (Grid("packed_key_tiles", 64), (5, 2, 300), (4 + 5) * 2),
        (Grid("heads", 1), (2, 8, 300), 8),
        (Grid("persistent", 128), (2, 8, 300), 48),
        (Grid("persistent", 128), (2, 8, 1057), SMS),
        (Grid("persistent", 128), (1, 33, 512), SMS),
        (Grid("persistent", 128, 8), (1, 32, 2049), 17 * 4),
        (Grid("persistent", 128), (2, 8, 0), 0),
        (Grid("persistent", 128), (2**16, 128, 2**31 - 1), SMS),
    ],
    ids=str,
)
def test_blocks_of_a_grid(grid: Grid, sizes: tuple[int, int, int], blocks: int) -> None:
    """sizes: batch, heads, q_len."""
    assert grid.blocks(*sizes, SMS) == blocks


def test_the_grid_is_that_of_the_config() -> None:
    assert PACKED.grid == Grid("persistent", 32, 4)
    assert abi("c3x1n64s2g4p1_late_lazy_tree_lane_plain").grid == Grid("row_tiles", 192, 1)
    assert abi("c1x1n64s2g4p16_late_lazy_tree_lane_plain").grid == Grid("row_tiles", 4, 16)


@pytest.mark.parametrize("facts", [CallFacts(), CallFacts(wide=True)], ids=["narrow", "wide"])
def test_an_abi_comes_back_from_json(facts: CallFacts) -> None:
    for config in ("c2x1n128s2g4p4_late_lazy_tree_lane_dynamic", "c1x1n64s4g4p1_late_lazy_tree_lane_plain"):
        made = abi(config, facts)
        assert Abi.from_json(made.to_json()) == made
    assert PACKED.to_json()["grid"] == {
        "rule": "persistent",
        "block_m": 32,
        "pack": 4,
        "programs": 1,
        "splits": 1,
    }
    assert WORKSPACE in {arg["source"] for arg in PACKED.to_json()["args"]}


def test_a_workspace_is_int32_and_aligned_whatever_the_call_is() -> None:
    (found,) = (arg for arg in PACKED.args if arg.source == WORKSPACE)
    assert found == Arg("WORKSPACE", WORKSPACE, "*i32", divisor=16)
    others = tuple(arg for arg in PACKED.args if arg != found)
    with pytest.raises(InvalidArgument, match=r"type='\*i64' cannot take workspace; allowed: \\\*i32"):
        replace(PACKED, args=(*others, replace(found, type="*i64")))
    with pytest.raises(InvalidArgument, match=r"workspaces.*is no entry of the environment"):
        replace(PACKED, args=(*others, replace(found, source="workspaces")))


def test_a_grid_that_no_family_has_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"grid.pack=0 must be a whole number from 1 to 64"):
        replace(PACKED, grid=Grid("persistent", 32, 0))
    with pytest.raises(InvalidArgument, match=r"grid.pack=65 "):
        replace(PACKED, grid=Grid("persistent", 32, 65))
    with pytest.raises(
        UnknownName,
        match="known: heads, key_tiles, key_tiles_of_a_sequence, key_tiles_of_heads, packed_key_tiles, pack",
    ):
        replace(PACKED, grid=Grid("tiles", 32, 4))


@pytest.mark.parametrize("block_m", [1, 16, 48, 128])
def test_tiles_of_packed_sequences_are_enough_and_one_too_many_at_most(block_m: int) -> None:
    """Every place of the grid is of one sequence, found by where sequences begin; see `Grid`."""
    random = Random(block_m)
    for _ in range(200):
        lengths = [
            random.choice((0, 1, 15, 16, 17, 47, 48, 128, 129, 1000)) for _ in range(random.randint(1, 9))
        ]
        begins = [sum(lengths[:n]) for n in range(len(lengths))]
        places = Grid("packed_row_tiles", block_m).blocks(len(lengths), 1, sum(lengths), SMS)
        found = [
            sum(begin // block_m + s <= place for s, begin in enumerate(begins)) - 1
            for place in range(places)
        ]
        for s, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            needed = -(-length // block_m)
            assert needed <= found.count(s) <= needed + 1
            rows = [
                needed - 1 - (place - begin // block_m - s) for place in range(places) if found[place] == s
            ]
            assert sorted(row for row in rows if row >= 0) == list(range(needed)), "each tile once"
    assert Grid("packed_persistent", block_m, 4, 2).blocks(3, 8, 10**6, SMS) == 2 * SMS
    assert Grid("packed_row_tiles", 128, 4).blocks(3, 8, 1000, SMS) == (7 + 3) * 2
