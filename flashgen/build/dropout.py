"""Weights dropped at random: what a call says of it, and which are kept, in torch as kernels draw it.

For each pair of query and key a number is drawn by Philox 4x32 of seven rounds (Salmon et al. 2011, Parallel
Random Numbers: As Easy as 1, 2, 3), whose key is the call's seed and whose counter is the pair's place. So it
is a function of the seed and of (sequence, head, query, key) alone: a backward kernel of other tiles draws
the same again, and nothing of q_len x k_len is kept between the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUNDS = 7
"""The fewest that pass all of BigCrush (Salmon et al. 2011, table 2): 28 multiplications for four numbers."""

_WORD, _HALF = 2**32, 2**31
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_APART = 8
"""Rows, and keys, of one counter's words."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """What one call drops: each weight with a probability, and what is left grows so that the mean stays."""

    probability: float
    """From 0 to 1."""
    seed: Tensor
    """One int64 on the call's device, where kernels read it: a CUDA graph that draws it anew drops anew."""

    head: int = 0
    heads: int = 0
    """Of a reference that computes a single head: which one it is, and of how many."""

    @property
    def factor(self) -> float:
        """On kept weights; 0 with a probability of 1, with which one of 2^32 is kept all the same."""
        return 0.0 if self.probability == 1 else 1 / (1 - self.probability)

    @property
    def threshold(self) -> int:
        """The least drawn int32 of a weight that is kept: of 2^32 numbers, probability * 2^32 are less."""
        return min(round(self.probability * _WORD), _WORD - 1) - _HALF

    def entries(self, pointers: bool = True) -> tuple[Any, ...]:
        """What it adds to the call environment, see `abi.DROPOUT`.

        Args:
            pointers: with False the seed itself stands where its address would.
        """
        return (self.seed.data_ptr() if pointers else self.seed, self.threshold, self.factor)

    def kept(self, rows: slice, keys: slice, *, batch: int, heads: int, sequence: int = 0) -> Tensor:
        """Which weights are kept: bool (batch, heads, rows, keys), on the seed's device and without a wait.

        Args:
            rows, keys: from where to where, counted within their sequence.
            batch, heads: of what is computed; of query heads.
            sequence: what the first one of the batch counts as.
        """
        device = self.seed.device
        # Whole groups of 16 rows and of 16 keys, whose halves are drawn together.
        (first_row, last_row), (first_key, last_key) = (
            (each.start // 16 * 16, -(-each.stop // 16) * 16) for each in (rows, keys)
        )
        of_rows = torch.arange(first_row // 2, last_row // 2, device=device)
        of_keys = torch.arange(first_key // 2, last_key // 2, device=device)
        sequences = torch.arange(sequence, sequence + batch, device=device)
        of_heads = sequences[:, None] * (self.heads or heads) + self.head + torch.arange(heads, device=device)
        counter = (of_keys, of_rows[:, None], of_heads.flatten()[:, None, None], torch.zeros_like(self.seed))
        words = philox(counter, self.seed)
        groups = (len(of_rows) // _APART, _APART, len(of_keys) // _APART, _APART, 2, 2)
        drawn = torch.stack(words, -1).reshape(batch, heads, *groups).permute(0, 1, 2, 6, 3, 4, 7, 5)
        drawn = drawn.reshape(batch, heads, last_row - first_row, last_key - first_key)
        drawn = drawn[:, :, rows.start - first_row :, keys.start - first_key :]
        drawn = drawn[:, :, : rows.stop - rows.start, : keys.stop - keys.start]
        # Kernels compare the int32 of the same bits, whose sign is the word's first bit.
        return (drawn ^ _HALF) - _HALF >= self.threshold

    def applied(self, weights: Tensor, rows: slice, sequence: int = 0) -> Tensor:
        """Weights (batch, heads, rows, keys) of some rows and all keys after dropout, or their gradients."""
        batch, heads, _, k_len = weights.shape
        kept = self.kept(rows, slice(0, k_len), batch=batch, heads=heads, sequence=sequence)
        return weights.masked_fill(~kept, 0.0) * self.factor


def draw_seed(device: torch.device) -> Tensor:
    """One int64 of torch's generator of a device, drawn there: `torch.manual_seed` repeats it, and a CUDA
    graph draws another at each replay.
    """
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def philox(counter: Sequence[Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter: Philox 4x32 of `ROUNDS` rounds, as int64 from 0 to 2^32 - 1.

    Args:
        counter: four words that broadcast, each from 0 to 2^32 - 1.
        seed: one int64, whose halves are the key.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & (_WORD - 1), (seed >> 32) & (_WORD - 1)
    for _ in range(ROUNDS):
        # A product of two words fills 64 bits: the sign is one of them, and the mask takes off its copies.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(second) ^ c1 ^ k0, _high(first) ^ c3 ^ k1
        c1, c3 = second & (_WORD - 1), first & (_WORD - 1)
        k0, k1 = (k0 + _KEY_STEPS[0]) & (_WORD - 1), (k1 + _KEY_STEPS[1]) & (_WORD - 1)
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & (_WORD - 1)
