"""Lists of tiles: what a family adds for masks that no ranges express (`tiles.lists`).

A part of the rendered file, `classify_tiles`, runs before the main kernel and writes a list for each tile of
queries: how many blocks of keys its rows see in part, how many as a whole, then the numbers of the former
from the front and of the latter from the back. The main kernel walks that list. Nothing waits for the host.

Packed sequences have none: a list for each tile of the longest sequence, times all sequences, would take many
times what their tokens need. There the mask's ranges say what is visited, and of each pair is asked whether
it is kept; so do gradients for now, whose tiles of keys would need lists of queries.
"""

from __future__ import annotations

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


def used(spec: AttentionSpec) -> bool:
    """Whether kernels of a spec walk lists."""
    return spec.op == "fwd" and not spec.packed and listed(spec.mask)


def scratch(spec: AttentionSpec, tiling: Tiling) -> tuple[Scratch, ...]:
    """The buffer of the lists: int32 (batch, heads or 1, tiles of queries, entries); none where ranges do."""
    if not used(spec):
        return ()
    heads = Extent("heads") if _by_head(spec.mask) else Extent()
    entries = Extent("k_len", tiling.block_n, plus=_COUNTS + _SPARE)
    return (Scratch("lists", "i32", (Extent("batch"), heads, Extent("q_len", tiling.block_m), entries)),)


def parts(spec: AttentionSpec, tiling: Tiling) -> tuple[Part, ...]:
    """The kernel that writes them: a program for each tile of queries."""
    if not used(spec):
        return ()
    sizes = ("heads", "heads_per_kv") if _by_head(spec.mask) else ()
    groups = (
        arguments(spec),
        tuple(Arg(name, name, "i32") for name in (*sizes, "q_len", "k_len")),
        *rule_arguments(spec.mask),
    )
    grid = Grid("row_tiles" if _by_head(spec.mask) else "row_tiles_of_a_sequence", tiling.block_m)
    return (Part("classify_tiles", True, groups, grid, NUM_WARPS),)


def arguments(spec: AttentionSpec) -> tuple[Arg, ...]:
    """What a kernel that writes or walks the lists takes of them; nothing where there are none."""
    if not used(spec):
        return ()
    axes = {"b": "batch", "h": "head", "m": "row"} if _by_head(spec.mask) else {"b": "batch", "m": "row"}
    strides = (
        Arg(f"stride_l{letter}", f"scratch.lists.stride.{axis}", "i32") for letter, axis in axes.items()
    )
    return (Arg("LISTS", "scratch.lists", "*i32"), *strides)


def _by_head(rule: Rule) -> bool:
    """Whether each query head has lists of its own."""
    return bool(ex.free_symbols(rule.expr) & {"head", "kv_head"})
