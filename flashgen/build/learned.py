"""Where kernels leave what a score rule learns, and from there the gradients of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.build.reference import add_where_read, symbols
from flashgen.spec.learned import Share, shares
from flashgen.spec.score_mods import ScoreMod


class Learned:
    """The buffers of one call, and what they come to.

    Each tensor has an accumulator of its shape in float32, zeroed, to which pairs add; what kernels sum for
    each row, key or distance of a head is then added to the elements that these read, by torch, in one order.

    Args:
        score_mod: the rule of the call, with its tensors.
        places: which of its tensors have a gradient; all are floats.
        batch, heads, kv_heads, q_len, k_len: the sizes of the call.
    """

    def __init__(
        self,
        score_mod: ScoreMod,
        places: Sequence[int],
        *,
        batch: int,
        heads: int,
        kv_heads: int,
        q_len: int,
        k_len: int,
    ) -> None:
        operands, self._score_mod = score_mod.rule.operands, score_mod
        self._sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "k_len": k_len}
        self._tensors = {operands[place].name: score_mod.tensors[place] for place in places}
        self._shares = shares(score_mod.rule, tuple(self._tensors))
        counts = {"q": q_len, "k": k_len, "diagonal": q_len + k_len - 1}
        self._sums = {
            share.name: (torch.zeros if share.side == "diagonal" else torch.empty)(
                (batch, heads, counts[share.side]),
                dtype=torch.float32,
                device=self._tensors[share.operand].device,
            )
            for share in self._shares
            if share.side != "pair"
        }
        self.accumulators = {
            name: torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            for name, tensor in self._tensors.items()
        }
        """By the tensor's name; contiguous."""

    def entries(self, pointers: bool = True) -> tuple[Any, ...]:
        """What the environment of `bwd` has behind `arguments.flatten_gradients`.

        Args:
            pointers: as for `arguments.flatten`.
        """
        given: dict[str, tuple[Any, ...]] = {}
        for share in self._shares:
            summed = share.side != "pair"
            tensor = self._sums[share.name] if summed else self.accumulators[share.operand]
            address = tensor.data_ptr() if pointers else tensor
            given[share.name] = (address,) if summed else (address, *tensor.stride())
        return tuple(entry for each in given.values() for entry in each)

    def gradients(self) -> tuple[Tensor, ...]:
        """The tensors' gradients, in their dtypes, once the kernels have run; asked for once."""
        for share in self._shares:
            if share.side != "pair":
                self._spread(share)
        return tuple(self.accumulators[name].to(tensor.dtype) for name, tensor in self._tensors.items())

    def _spread(self, share: Share) -> None:
        """Adds sums to the elements that their rows, keys or distances read."""
        sums, q_len = self._sums[share.name], self._sizes["q_len"]
        sums = sums[:, :, :, None] if share.side == "q" else sums[:, :, None, :]
        rows, keys = slice(0, q_len), slice(0, self._sizes["k_len"])
        env = symbols(rows, keys, **self._sizes, device=sums.device)
        if share.side == "diagonal":  # any pair of a distance, from the last row and the first key on
            distances = torch.arange(1 - q_len, keys.stop, device=sums.device)
            env |= {"q_idx": (-distances).clamp_min(0), "k_idx": distances.clamp_min(0)}
        add_where_read(self.accumulators[share.operand], self._score_mod, share.load, env, sums)
