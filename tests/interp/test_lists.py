"""Lists of tiles: what the parts that classify write against `Lists.of_tile`, and kernels that walk them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import gradients
import pytest
import torch
from kernels import ALIGNED, FAMILY, STRIDED, run, verdict

from flashgen.build import interpret as interpreter
from flashgen.build.inputs import Inputs
from flashgen.spec import masks, tiles
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.masks import Mask, parse_mask
from flashgen.spec.rule import Rule

PARTS = ("classify_tiles", "classify_keys")
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


def written(
    mask: Mask, q_len: int, k_len: int, config: str, monkeypatch: pytest.MonkeyPatch, of_gradients: bool
) -> dict[str, torch.Tensor]:
    """(batch, heads or 1, tiles, entries), as the parts left them, by the name of the buffer. Nothing else of
    the file runs, which would take most of the time."""
    kept = {}
    allocate, load = interpreter._allocated, interpreter.load_module

    def parts_alone(file: Path) -> SimpleNamespace:
        kernels = vars(load(file))
        nothing = defaultdict(lambda: lambda *arguments: None)  # launched as a kernel, on any grid
        return SimpleNamespace(**{name: kernels[name] if name in PARTS else nothing for name in kernels})

    monkeypatch.setattr(interpreter, "_allocated", lambda *args: kept.update(allocate(*args)) or kept)
    monkeypatch.setattr(interpreter, "load_module", parts_alone)
    made, spec = inputs(mask, q_len, k_len)
    (gradients.run if of_gradients else run)(made, spec, config)
    return {name: kept[f"scratch.{name}"] for name in ("lists", "lists_of_keys") if f"scratch.{name}" in kept}


def lists_of(
    mask: Mask, q_len: int, k_len: int, config: str, axis: str
) -> list[list[tuple[list[int], list[int]]]]:
    """For each sequence and head, and each tile, what `of_tile` says."""
    tiling = FAMILY.tiling(FAMILY.find(config))
    found = tiles.lists(mask.rule, axis)
    assert found is not None
    across, along = (q_len, k_len) if axis == "k" else (k_len, q_len)
    env = {"q_len": q_len, "k_len": k_len}
    env |= dict(zip((name for name, _ in mask.rule.params), mask.values, strict=True))
    for operand, tensor in zip(mask.rule.operands, mask.tensors, strict=True):
        env[operand.name] = tensor.tolist()
    ends = [(start, min(start + tiling.block_m, across) - 1) for start in range(0, across, tiling.block_m)]
    return [
        [found.of_tile({**env, **where}, each, tiling.block_n, along) for each in ends]
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


@pytest.mark.parametrize("of_gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("q_len", [1, 77, 290])
@pytest.mark.parametrize("name", MASKS)
def test_lists_are_those_of_the_definition(
    name: str, q_len: int, of_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, config = MASKS[name], "m32n32w4s1_pointer_heads"
    made = written(mask, q_len, 200, config, monkeypatch, of_gradients)
    assert list(made) == (["lists", "lists_of_keys"] if of_gradients else ["lists"])
    for axis, found in zip("kq", made.values(), strict=False):
        across, along = (q_len, 200) if axis == "k" else (200, q_len)
        by_head, blocks = found.shape[1] > 1, -(-along // 32)
        assert found.shape == (BATCH, HEADS if "heads" in name else 1, -(-across // 32), blocks + 3)
        for i, expected in enumerate(lists_of(mask, q_len, 200, config, axis)):
            for row, (partial, full) in zip(
                found[i // HEADS, i % HEADS if by_head else 0].tolist(), expected, strict=True
            ):
                assert row[:2] == [len(partial), len(full)]
                assert row[2 : 2 + len(partial)] == partial
                assert row[2 + blocks - len(full) : 2 + blocks][::-1] == full


@pytest.mark.parametrize(
    "config,facts", [("m32n32w4s1_tma_heads", ALIGNED), ("m64n64w4s1_pointer_rows", STRIDED)]
)
@pytest.mark.parametrize("name", MASKS)
def test_kernels_walk_them(name: str, config: str, facts: CallFacts) -> None:
    check(MASKS[name], 290 if facts is ALIGNED else 150, 200, config, facts)


@pytest.mark.parametrize(
    "config,facts",
    [
        ("m32n32w4s1_tma_heads", ALIGNED),
        ("m64n32w4s1_pointer_rows", STRIDED),
        ("m64n32w4s1_tma_heads_fused", ALIGNED),
    ],
)
@pytest.mark.parametrize("name", MASKS)
def test_kernels_of_gradients_walk_them(name: str, config: str, facts: CallFacts) -> None:
    made, spec = inputs(MASKS[name], 290 if facts is ALIGNED else 150, 200)
    gradients.judge(made, spec, config, facts)


def test_one_side_alone_may_need_them() -> None:
    """Solved for the keys of a row, and not for the rows of a key."""
    rule = Rule.parse("mask", "2 * q_idx >= k_idx")
    assert tiles.lists(rule, "k") is None and tiles.lists(rule, "q") is not None
    made, spec = inputs(Mask(rule), 150, 200)
    gradients.judge(made, spec, "m32n32w4s1_tma_heads")
