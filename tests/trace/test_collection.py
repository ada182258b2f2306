"""FlexAttention's masks and score rules, traced, against torch's own flex_attention and by brute force."""

from __future__ import annotations

import pytest
import torch
from flex_collection import BATCH, HEADS, NAMES, causal, document, draw, sample, window
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import flashgen
from flashgen import masks
from flashgen.build.reference import attention_reference, evaluate_rule, symbols
from flashgen.spec import tiles
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule

LENGTH = 64
BLOCK = 8
SPARE = {"positions_in_document": 28}
"""Tiles of 8 by 8 that are visited without need, of 128."""


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own is computed at once: every call of it would be compiled else, for seconds."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def kept(mask_mod: object) -> torch.Tensor:
    """What torch says a mask_mod keeps, (batch, heads, rows, keys)."""
    return torchs.create_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_values_and_lse_are_those_of_torch(name: str) -> None:
    given, (q, k, v) = sample(name, LENGTH), draw(LENGTH)
    mask = None
    if given.mask_mod is not None:
        mask = create_block_mask(given.mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    call = {"score_mod": given.score_mod, "block_mask": mask, "enable_gqa": True}
    call["return_aux"] = AuxRequest(lse=True)
    wanted, aux = torchs.flex_attention(q, k, v, **call)
    ours, ours_aux = flashgen.flex_attention(q, k, v, **call)
    torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(ours_aux.lse, aux.lse, atol=2e-6, rtol=2e-6)
    assert ours_aux.max_scores is None
    out = flashgen.attention(q, k, v, mask=given.mask_mod, score_mod=given.score_mod)
    assert torch.equal(out, ours)


@pytest.mark.parametrize("name", [name for name in NAMES if sample(name, LENGTH).mask_mod is not None])
def test_tiles_that_are_visited_hold_all_that_is_kept(name: str) -> None:
    mask = flashgen.trace.mask_mod(sample(name, LENGTH).mask_mod)
    keep = kept(sample(name, LENGTH).mask_mod)
    env = dict(zip((each for each, _ in mask.rule.params), mask.values, strict=True))
    env |= {each.name: tensor.tolist() for each, tensor in zip(mask.rule.operands, mask.tensors, strict=True)}
    lists, found = tiles.lists(mask.rule), tiles.ranges(mask.rule, "k")
    visited = needed = 0
    for batch in range(BATCH):
        for first in range(0, LENGTH, BLOCK):
            rows = (first, first + BLOCK - 1)
            here = {**env, "batch": batch, "head": 0, "kv_head": 0, "q_len": LENGTH, "k_len": LENGTH}
            if lists is not None:
                partial, full = lists.of_tile(here, rows, BLOCK, LENGTH)
            else:
                ends = {**here, "first": rows[0], "last": rows[1]}
                partial, full = [], []
                for lo, full_lo, full_hi, hi in tiles.resolve(found, ends, BLOCK, LENGTH):
                    blocks = range(lo // BLOCK, hi // BLOCK)
                    full += [block for block in blocks if full_lo <= block * BLOCK < full_hi]
                    partial += [block for block in blocks if not full_lo <= block * BLOCK < full_hi]
            for block in range(LENGTH // BLOCK):
                tile = keep[batch, :, first : first + BLOCK, block * BLOCK : (block + 1) * BLOCK]
                assert block in full + partial or not tile.any()
                assert block not in full or tile.all()
                needed += bool(tile.any())
            visited += len(partial) + len(full)
    # A tile that holds parts of two documents, or remainders, is known from the ends of its sides alone.
    spare = SPARE.get(name, 0)
    assert needed <= visited <= needed + spare


def test_ranges_are_those_of_named_masks() -> None:
    traced = flashgen.trace.mask_mod(causal)
    assert traced.rule == masks.causal("top_left").rule
    assert tiles.ranges(traced.rule, "k") == tiles.ranges(masks.causal("top_left").rule, "k")
    ours, named = flashgen.trace.mask_mod(window(9)), masks.causal() & masks.sliding_window(9, None)
    text = named.rule.text.replace("q_pos", "q_idx")
    assert ours.rule == Rule.parse("mask", text) and ours.values == named.values
    for axis in "qk":
        found = [tiles.ranges(each.rule, axis) for each in (ours, named)]
        for first in range(0, LENGTH, BLOCK):
            env = {"first": first, "last": first + BLOCK - 1, "q_len": LENGTH, "k_len": LENGTH, "left": 9}
            assert len({tiles.resolve(each, env, BLOCK, LENGTH) for each in found}) == 1
    assert tiles.lists(ours.rule) is None
    ids = torch.arange(LENGTH) // 10
    assert tiles.lists(flashgen.trace.mask_mod(document(ids)).rule) is not None


def test_distances_to_both_sides_are_ranges() -> None:
    def near(b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) <= 4

    def far(b, h, q_idx, kv_idx):
        return (kv_idx - q_idx).abs() > 4

    for function, count in ((near, 1), (far, 2)):
        rule = flashgen.trace.mask_mod(function).rule
        assert tiles.lists(rule) is None and len(tiles.ranges(rule, "k")) == count
        assert all(each.has_full for each in tiles.ranges(rule, "k"))


def visible(mask: Mask) -> torch.Tensor:
    rows = slice(0, LENGTH)
    env = symbols(rows, rows, batch=BATCH, heads=HEADS, kv_heads=2, q_len=LENGTH, k_len=LENGTH,
                  device=torch.device("cpu"))  # fmt: skip
    return evaluate_rule(mask, env).expand(BATCH, HEADS, LENGTH, LENGTH)


def test_traced_masks_join_with_named_ones() -> None:
    joined = flashgen.trace.mask_mod(causal) & ~masks.sliding_window(5, 5)
    assert torch.equal(visible(joined), visible(masks.causal()) & ~visible(masks.sliding_window(5, 5)))
    wanted = kept(torchs.or_masks(torchs.and_masks(causal, window(5)), document(torch.arange(LENGTH) // 9)))
    both = torchs.or_masks(torchs.and_masks(causal, window(5)), document(torch.arange(LENGTH) // 9))
    assert torch.equal(visible(flashgen.trace.mask_mod(both)), wanted)


def test_positions_count_from_0_where_queries_are_fewer() -> None:
    q, k, v = draw(LENGTH)
    few = q[:, :, :20]
    out, lse = flashgen.attention(few, k, v, mask=causal, return_lse=True)
    wanted, wanted_lse = attention_reference(few, k, v, mask=masks.causal("top_left"))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    theirs = torchs.flex_attention(few, k, v, block_mask=create_block_mask(
        causal, None, None, 20, LENGTH, device="cpu"), enable_gqa=True)  # fmt: skip
    torch.testing.assert_close(out, theirs, atol=2e-6, rtol=2e-6)


def test_score_rules_apply_in_order_with_named_ones() -> None:
    q, k, v = draw(LENGTH)

    def doubled(score, b, h, q_idx, kv_idx):
        return score * 2

    cap = flashgen.score_mods.softcap(1.5)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * q.shape[3] ** -0.5
    for mods, wanted in (
        ([doubled, cap], 1.5 * torch.tanh(scores * 2 / 1.5)),
        ([cap, doubled], 2 * 1.5 * torch.tanh(scores / 1.5)),
    ):
        out = flashgen.attention(q, k, v, score_mod=mods)
        torch.testing.assert_close(out, wanted.softmax(-1) @ v.repeat_interleave(2, 1))
