"""The masks and score rules that people write for FlexAttention, from their published meaning.

Each entry makes its callables anew, with tensors on a device, as a user's function would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Mod = Callable[..., Tensor]

BATCH, HEADS, KV_HEADS = 2, 4, 2


@dataclass(frozen=True, slots=True)
class Sample:
    """What one attention is given; of `length` queries and keys."""

    mask_mod: Mod | None = None
    score_mod: Mod | None = None


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def window(left: int) -> Mod:
    def sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= left)

    return sliding_window


def prefix_lm(lengths: Tensor) -> Mod:
    """Keys of the prefix are seen by all, later ones causally."""

    def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < lengths[b]) | causal(b, h, q_idx, kv_idx)

    return prefix


def document(ids: Tensor) -> Mod:
    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return causal(b, h, q_idx, kv_idx) & (ids[q_idx] == ids[kv_idx])

    return same_document


def in_document(inner: Mod, offsets: Tensor, ids: Tensor) -> Mod:
    """A mask of positions that begin anew with every document."""

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = ids[q_idx] == ids[kv_idx]
        return same & inner(b, h, q_idx - offsets[ids[q_idx]], kv_idx - offsets[ids[kv_idx]])

    return within


def dilated(width: int, dilation: int) -> Mod:
    """Every `dilation`-th key to either side, `width` away at most."""

    def dilated_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance.abs() <= width) & (distance % dilation == 0)

    return dilated_window


def neighborhood(columns: int, rows: int, kernel: int) -> Mod:
    """Rows of an image one after another: a query sees a square around itself, moved inwards at borders."""
    half = kernel // 2

    def natten(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_row, q_column = q_idx // columns, q_idx % columns
        row = torch.clamp(q_row, min=half, max=rows - 1 - half)
        column = torch.clamp(q_column, min=half, max=columns - 1 - half)
        near_rows = (row - kv_idx // columns).abs() <= half
        return near_rows & ((column - kv_idx % columns).abs() <= half)

    return natten


def global_and_window(tokens: int, left: int) -> Mod:
    """The first tokens see and are seen by all."""

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = torch.logical_and(q_idx - kv_idx <= left, kv_idx - q_idx <= left)
        return near | (kv_idx < tokens) | (q_idx < tokens)

    return seen


def alibi(heads: int) -> Mod:
    def alibi_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        slope = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + slope * (kv_idx - q_idx)

    return alibi_bias


def softcap(cap: float) -> Mod:
    def tanh_cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return tanh_cap


def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + (q_idx - kv_idx) * 0.125


def relative_table(table: Tensor, reach: int) -> Mod:
    """A bias for each head and distance, equal from `reach` on."""

    def relative_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.clamp(q_idx - kv_idx, -reach, reach)
        return score + table[h, distance + reach]

    return relative_bias


def bias(table: Tensor) -> Mod:
    def additive(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[b][h][q_idx, kv_idx]

    return additive


def causal_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def _ids(length: int, device: str) -> tuple[Tensor, Tensor]:
    """Documents of 1, 2, 3, ... times 5 tokens, and where each begins."""
    lengths = torch.arange(1, 1 + length // 5) * 5
    ends = lengths.cumsum(0)
    ids = torch.searchsorted(ends, torch.arange(length), right=True)
    return ids.to(device), torch.cat([torch.zeros(1, dtype=torch.long), ends]).to(device)


def _sample(name: str, length: int, device: str) -> Sample:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device)

    ids, offsets = _ids(length, device)
    columns = 8
    lengths = torch.tensor([length // 3, length // 2], device=device)
    made = {
        "causal": lambda: Sample(causal),
        "window": lambda: Sample(window(length // 4)),
        "prefix_lm": lambda: Sample(prefix_lm(lengths)),
        "document": lambda: Sample(document(ids)),
        "positions_in_document": lambda: Sample(in_document(window(7), offsets, ids)),
        "dilated": lambda: Sample(dilated(length // 3, 3)),
        "neighborhood": lambda: Sample(neighborhood(columns, length // columns, 5)),
        "global_and_window": lambda: Sample(global_and_window(3, 6)),
        "alibi": lambda: Sample(causal, alibi(HEADS)),
        "softcap": lambda: Sample(None, softcap(2.0)),
        "softcap_and_window": lambda: Sample(window(length // 4), softcap(2.0)),
        "relative": lambda: Sample(None, relative),
        "relative_table": lambda: Sample(causal, relative_table(normal(HEADS, 21), 10)),
        "bias": lambda: Sample(None, bias(normal(BATCH, HEADS, length, length))),
        "causal_score": lambda: Sample(None, causal_score),
    }
    return made[name]()


NAMES = (
    "causal", "window", "prefix_lm", "document", "positions_in_document", "dilated", "neighborhood",
    "global_and_window", "alibi", "softcap", "softcap_and_window", "relative", "relative_table", "bias",
    "causal_score",
)  # fmt: skip


def sample(name: str, length: int, device: str = "cpu") -> Sample:
    """The entry of that name, for as many queries and keys; `length` is a multiple of 8."""
    return _sample(name, length, device)


def draw(length: int, head_dim: int = 32, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v, on `device` in `dtype`."""
    made = torch.Generator().manual_seed(1)
    shapes = ((HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, head_dim))
    q, k, v = (torch.randn(BATCH, heads, length, dim, generator=made).to(**options) for heads, dim in shapes)
    return q, k, v
