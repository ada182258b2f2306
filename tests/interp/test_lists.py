"""Lists of tiles: what `classify_tiles` writes against `Lists.of_tile`, and kernels that walk them."""

from __future__ import annotations

import pytest
import torch
from kernels import ALIGNED, FAMILY, STRIDED, run, verdict

from flashgen.build import interpret as interpreter
from flashgen.build.inputs import Inputs
from flashgen.spec import masks, tiles
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.masks import Mask, parse_mask
from flashgen.spec.rule import Rule

CAUSAL = masks.causal()
BATCH, HEADS = 2, 2


def documents(kind: str, length: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """(batch, length), each sequence with documents of its own."""
    draw = torch.Generator().manual_seed(length)
    if kind == "one":
        return torch.full((BATCH, length), 7, dtype=dtype)
    if kind == "each key its own":
        return torch.stack([torch.randperm(length, generator=draw) for _ in range(BATCH)]).to(dtype)
    ids = torch.randint(-2, 3, (BATCH, length), generator=draw)
    if kind == "huge":
        ids = ids * 2**40 + 2**50
    return (ids if kind == "interleaved" else ids.sort(1).values).to(dtype)


def inputs(mask: Mask, q_len: int, k_len: int, head_dim: int = 16) -> tuple[Inputs, AttentionSpec]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(BATCH, heads, rows, head_dim, generator=draw)
        for heads, rows in ((HEADS, q_len), (1, k_len), (1, k_len))
    )
    spec = AttentionSpec(head_dim, head_dim, "fp32", mask.rule, return_lse=True)
    return Inputs(q, k, v, mask, None, head_dim**-0.5, "bhsd", ""), spec


def check(mask: Mask, q_len: int, k_len: int, config: str, facts: CallFacts = ALIGNED) -> None:
    made, spec = inputs(mask, q_len, k_len)
    judged = verdict(made, spec, config, facts)
    assert judged.ok, judged.reason


def written(mask: Mask, q_len: int, k_len: int, config: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """(batch, heads or 1, tiles of queries, entries), as the part left them."""
    kept = []
    allocate = interpreter._allocated
    monkeypatch.setattr(interpreter, "_allocated", lambda *args: kept.append(allocate(*args)) or kept[-1])
    made, spec = inputs(mask, q_len, k_len)
    run(made, spec, config)
    (buffer,) = kept
    return buffer["scratch.lists"]


def lists_of(mask: Mask, q_len: int, k_len: int, config: str) -> list[list[tuple[list[int], list[int]]]]:
    """For each sequence and head, and each tile of queries, what `of_tile` says."""
    tiling = FAMILY.tiling(FAMILY.find(config))
    found = tiles.lists(mask.rule)
    assert found is not None
    env = {"q_len": q_len, "k_len": k_len}
    env |= dict(zip((name for name, _ in mask.rule.params), mask.values, strict=True))
    for operand, tensor in zip(mask.rule.operands, mask.tensors, strict=True):
        env[operand.name] = tensor.tolist()
    starts = range(0, q_len, tiling.block_m)
    rows = [(start, min(start + tiling.block_m, q_len) - 1) for start in starts]
    return [
        [found.of_tile({**env, **where}, each, tiling.block_n, k_len) for each in rows]
        for where in (
            {"batch": batch, "head": head, "kv_head": 0} for batch in range(BATCH) for head in range(HEADS)
        )
    ]


BLOCKS = Rule.parse("mask", "blocks[head, q_idx // 32, k_idx // 64] where blocks: i1")
SIZES = Rule.parse("mask", "abs(q_idx // 8 - k_idx // 8) <= sizes[head] where sizes: i32")
TREE = Rule.parse("mask", "k_idx == parents[q_idx] where parents: i64")
RANDOM = torch.Generator().manual_seed(1)
MASKS = {
    "sorted": masks.document(documents("sorted", 200)),
    "interleaved": masks.document(documents("interleaved", 200)),
    "causal": CAUSAL & masks.document(documents("sorted", 200)),
    "causal i64": CAUSAL & masks.document(documents("huge", 200, torch.int64)),
    "one": masks.document(documents("one", 200)),
    "each its own": masks.document(documents("each key its own", 200)),
    "others": ~masks.document(documents("sorted", 200)),
    "window": masks.sliding_window(70, 9) & masks.document(documents("sorted", 200)),
    "union": masks.sliding_window(20, 0) | masks.document(documents("sorted", 200)),
    "padded": masks.document(documents("sorted", 200)) & masks.key_padding(torch.tensor([150, 0])),
    "kept keys": masks.document(documents("one", 200))
    & masks.key_padding(torch.rand(BATCH, 200, generator=RANDOM) < 0.99),
    "blocks of heads": Mask(BLOCKS, (), (torch.rand(HEADS, 10, 10, generator=RANDOM) < 0.4,)),
    "neighbours of heads": Mask(SIZES, (), (torch.tensor([1, 5], dtype=torch.int32),)),
    "one key": Mask(TREE, (), (torch.randint(0, 200, (300,), generator=RANDOM),)),
    "four windows": masks.sliding_window(9, 0) & CAUSAL
    | parse_mask("~sliding_window(60, 60)") & parse_mask("sliding_window(90, 80)")
    | parse_mask("~sliding_window(150, 150)"),
}
"""Over 200 keys."""


@pytest.mark.parametrize("q_len", [1, 77, 290])
@pytest.mark.parametrize("name", MASKS)
def test_lists_are_those_of_the_definition(name: str, q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, config = MASKS[name], "m32n32w4s1_pointer_heads"
    found = written(mask, q_len, 200, config, monkeypatch)
    by_head = found.shape[1] > 1
    assert found.shape == (BATCH, HEADS if "heads" in name else 1, -(-q_len // 32), 7 + 3)
    for i, expected in enumerate(lists_of(mask, q_len, 200, config)):
        for row, (partial, full) in zip(
            found[i // HEADS, i % HEADS if by_head else 0].tolist(), expected, strict=True
        ):
            assert row[:2] == [len(partial), len(full)]
            assert row[2 : 2 + len(partial)] == partial
            assert row[9 - len(full) : 9][::-1] == full[: len(full)]


@pytest.mark.parametrize(
    "config,facts", [("m32n32w4s1_tma_heads", ALIGNED), ("m64n64w4s1_pointer_rows", STRIDED)]
)
@pytest.mark.parametrize("name", MASKS)
def test_kernels_walk_them(name: str, config: str, facts: CallFacts) -> None:
    check(MASKS[name], 290 if facts is ALIGNED else 150, 200, config, facts)
