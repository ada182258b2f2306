"""Kernels of FlexAttention's callables in the interpreter, against torch's own flex_attention."""

from __future__ import annotations

import math

import pytest
import torch
from flex_collection import BATCH, HEADS, NAMES, draw, sample
from kernels import run
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

import flashgen
from flashgen.build.inputs import Inputs
from flashgen.build.reference import attention_reference
from flashgen.spec import drops, masks
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.rule import apart

LENGTH = 72  # no multiple of a tile


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def kernel(mask_mod, score_mod) -> tuple[Tensor, Tensor]:
    """(out, lse) of the portable kernel."""
    q, k, v = draw(LENGTH, head_dim=16)
    mask = masks.full() if mask_mod is None else flashgen.trace.mask_mod(mask_mod)
    score = None if score_mod is None else flashgen.trace.score_mod(score_mod)
    rule = None if score is None else score.rule
    spec = AttentionSpec(16, 16, "fp32", mask.rule, rule, return_lse=True)
    return run(Inputs(q, k, v, mask, score, 0.25, "bhsd", ""), spec, "m16n32w4s2_pointer_heads")


def torch_says(mask_mod, score_mod) -> tuple[Tensor, Tensor]:
    q, k, v = draw(LENGTH, head_dim=16)
    block_mask = None
    if mask_mod is not None:
        block_mask = torchs.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    out, aux = torchs.flex_attention(
        q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=torchs.AuxRequest(lse=True)
    )
    return out, aux.lse


def assert_equal(mask_mod, score_mod) -> None:
    pairs = zip(kernel(mask_mod, score_mod), torch_says(mask_mod, score_mod), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_collection(name: str) -> None:
    given = sample(name, LENGTH)
    assert_equal(given.mask_mod, given.score_mod)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
     torch.float16, torch.bfloat16, torch.float32],
    ids=str,
)  # fmt: skip
def test_captured_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    table = (torch.arange(LENGTH) % 3).to(dtype)
    scalar = torch.tensor(2).to(dtype)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx] + table[q_idx] * scalar

    assert_equal(None, score_mod)


def test_every_function() -> None:
    number, numbers = 3, torch.linspace(-2, 2, LENGTH)

    def score_mod(score, b, h, q_idx, kv_idx):
        x = numbers[kv_idx]
        score = score + torch.exp(x) - x.exp2() + torch.log(x.abs() + 1) + torch.log2(x * x + 1)
        score = score + torch.sqrt(x.square()) + x.tanh() + torch.floor(x) + x.ceil() + x.sign()
        score = score + torch.sigmoid(x) + torch.rsqrt(x**2 + 1) + torch.reciprocal(x**2 + 1) + 2.0**x
        score = score - torch.maximum(x, q_idx * 0.1) + torch.minimum(x, -x) + torch.clamp(x, max=0.5)
        score = score + torch.clamp_min(x, -1).relu() + (q_idx // number) % 2 - (kv_idx - q_idx) % number
        score = score + torch.where((q_idx > kv_idx) ^ (h == 1), 1, 0) + (~(q_idx < 5)).float()
        score = torch.where(torch.logical_not(q_idx == kv_idx), score, score.masked_fill(h > 1, 0.0))
        score = score + torch.div(kv_idx - 20, 7, rounding_mode="floor") + (kv_idx - 20) / 7 - 1 / (b + 1)
        score = score + (q_idx != kv_idx).to(score.dtype) + q_idx.to(torch.int64) - kv_idx.float()
        return score.clamp(-20, 20) + torch.tensor(0.5) + score.new_ones(()) * torch.zeros_like(score)

    assert_equal(None, score_mod)


def test_c36_reads_stay_within_their_tensors() -> None:
    """What a table is indexed by reaches past both its ends, for pairs that the mask drops."""
    whole = torch.full((40,), math.nan)
    table = whole[10:30]
    table.copy_(torch.randn(20, generator=torch.Generator().manual_seed(2)))

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 20)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx]

    def within(score, b, h, q_idx, kv_idx):
        return score + table[torch.clamp(q_idx - kv_idx, 0, 19)]

    for one, other in zip(kernel(mask_mod, score_mod), torch_says(mask_mod, within), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_rows_that_a_score_rule_leaves_nothing() -> None:
    """-inf of all keys, of the first blocks, and of single ones: no weight, and no NaN."""

    def score_mod(score, b, h, q_idx, kv_idx):
        seen = (q_idx >= 20) & (kv_idx >= q_idx) & (kv_idx % 5 != 0)
        return torch.where(seen, score, -float("inf"))

    out, lse = kernel(None, score_mod)
    assert not out[:, :, :20].any() and (lse[:, :, :20] == -math.inf).all()
    assert not out.isnan().any() and not lse.isnan().any()
    assert_equal(None, score_mod)


TABLE = torch.linspace(-2, 2, LENGTH)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, q_idx, kv_idx: torch.zeros_like(score),
        lambda score, b, h, q_idx, kv_idx: 0.5 * h,
        lambda score, b, h, q_idx, kv_idx: q_idx * 1.0,
        lambda score, b, h, q_idx, kv_idx: TABLE[kv_idx],
    ],
    ids=["a number", "of heads", "of rows", "of keys"],
)
def test_score_rules_that_are_not_of_pairs(score_mod) -> None:
    assert_equal(None, score_mod)
    assert_equal(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, score_mod)


def test_blocks_that_a_score_rule_drops_are_not_read() -> None:
    """Values of NaN where no row sees a key: a weight of 0 times NaN would be NaN."""
    width = 25

    def score_mod(score, b, h, q_idx, kv_idx):
        near = torch.where(q_idx - kv_idx < width, score + width, -math.inf)
        return torch.where((q_idx >= kv_idx) & (kv_idx < 60), near, -math.inf)

    q, k, v = draw(LENGTH, head_dim=16)
    whole = flashgen.trace.score_mod(score_mod)
    mask, rest = drops.as_mask(masks.full(), whole)
    assert rest is not None and not rest.rule.may_drop
    wanted = attention_reference(q, k, v, score_mod=whole, scale=0.25)
    v[:, :, 64:] = math.nan  # a block of its own
    rule = apart(mask.rule, rest.rule)
    spec = AttentionSpec(16, 16, "fp32", mask.rule, rule, return_lse=True)
    found = run(Inputs(q, k, v, mask, rest, 0.25, "bhsd", ""), spec, "m16n32w4s2_pointer_heads")
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_rows_without_keys() -> None:
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= 40) & (kv_idx > q_idx - 3)

    out, lse = kernel(mask_mod, None)
    assert not out[:, :, :40].any() and (lse[:, :, :40] == -math.inf).all()
    assert_equal(mask_mod, None)
