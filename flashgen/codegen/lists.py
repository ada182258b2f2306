"""Lists of tiles: what a family adds for masks that no ranges express (`tiles.lists`).

A part of the rendered file, `classify_tiles`, runs before the main kernel and writes a list for each tile of
queries: how many blocks of keys its rows see in part, how many as a whole, then the numbers of the former
from the front and of the latter from the back. The main kernel walks that list. Nothing waits for the host.
Gradients of keys and values have lists of blocks of queries for each tile of keys, from `classify_keys`.

Packed sequences have none: a list for each tile of the longest sequence, times all sequences, would take many
times what their tokens need. There the mask's ranges say what is visited, and of each pair is asked whether
it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.abi import Arg, Extent, Grid, Part, Scratch
from flashgen.codegen.expressions import rule_arguments
from flashgen.codegen.family import Tiling, listed
from flashgen.spec import expr as ex
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.rule import Rule

NUM_WARPS = 8
"""Of a program that classifies: 8,192 keys at a time, 32 of each thread."""
_COUNTS = 2
"""Entries before the numbers of blocks."""
_SPARE = 1
"""Entries behind them: a walk asks for the next number while it computes with one, also with the last."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What lists along one axis are called."""

    part: str
    buffer: str
    grids: tuple[str, str]
    """The rule for a program of each tile of all heads together, and of each head."""
    tile_size: str
    """Of the call: what tiles divide, and what blocks do."""
    walked_size: str
    letter: str
    """Of the tile's axis, in the names of strides."""


_KINDS = {
    "k": _Kind("classify_tiles", "lists", ("row_tiles_of_a_sequence", "row_tiles"), "q_len", "k_len", "m"),
    "q": _Kind(
        "classify_keys",
        "lists_of_keys",
        ("key_tiles_of_a_sequence", "key_tiles_of_heads"),
        "k_len",
        "q_len",
        "n",
    ),
}
"""By what a list is of: blocks of keys for a tile of queries, or blocks of queries for a tile of keys."""


def used(spec: AttentionSpec, axis: str = "k") -> bool:
    """Whether kernels of a spec walk lists along an axis."""
    return not spec.packed and listed(spec.mask, axis)


def scratch(spec: AttentionSpec, tiling: Tiling, axis: str = "k") -> tuple[Scratch, ...]:
    """The buffer of the lists: int32 (batch, heads or 1, tiles, entries); none where ranges do.

    Args:
        tiling: its `block_m` is a tile's size, `block_n` a block's, along either axis.
    """
    if not used(spec, axis):
        return ()
    kind = _KINDS[axis]
    heads = Extent("heads") if by_head(spec.mask) else Extent()
    tiles = Extent(kind.tile_size, tiling.block_m)
    entries = Extent(kind.walked_size, tiling.block_n, plus=_COUNTS + _SPARE)
    return (Scratch(kind.buffer, "i32", (Extent("batch"), heads, tiles, entries)),)


def parts(spec: AttentionSpec, tiling: Tiling, axis: str = "k") -> tuple[Part, ...]:
    """The kernel that writes them: a program for each tile."""
    if not used(spec, axis):
        return ()
    sizes = ("heads", "heads_per_kv") if by_head(spec.mask) else ()
    groups = (
        arguments(spec, axis),
        tuple(Arg(name, name, "i32") for name in (*sizes, "q_len", "k_len")),
        *rule_arguments(spec.mask),
    )
    grid = Grid(_KINDS[axis].grids[by_head(spec.mask)], tiling.block_m)
    return (Part(_KINDS[axis].part, True, groups, grid, NUM_WARPS),)


def arguments(spec: AttentionSpec, axis: str = "k") -> tuple[Arg, ...]:
    """What a kernel that writes or walks the lists takes of them; nothing where there are none."""
    if not used(spec, axis):
        return ()
    source, letter = f"scratch.{_KINDS[axis].buffer}", _KINDS[axis].letter
    axes = {"b": "batch", **({"h": "head"} if by_head(spec.mask) else {}), letter: "row"}
    strides = (Arg(f"stride_l{short}", f"{source}.stride.{name}", "i32") for short, name in axes.items())
    return (Arg("LISTS", source, "*i32"), *strides)


def by_head(rule: Rule) -> bool:
    """Whether each query head has lists of its own."""
    return bool(ex.free_symbols(rule.expr) & {"head", "kv_head"})
