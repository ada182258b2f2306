"""8-bit inputs: what their stored values stand for, and how a call says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
"""4 bits of exponent, 3 of mantissa, no infinity; the largest number is 448."""

_LEAST = 2.0**-126  # a smaller number is no normal one in float32

Factor = Tensor | float
"""A number, or a float32 tensor of one, of one a head, or of one a sequence and head: (), (1), (heads,) or
(batch, heads), with any strides."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """How 8-bit q, k and v are read, true value = stored value * factor, and the output is written."""

    q: Factor = 1.0
    """Its heads are those of q or, as the other two's, the key heads, each for its group of query heads."""
    k: Factor = 1.0
    v: Factor = 1.0
    out_dtype: torch.dtype = torch.bfloat16

    @property
    def of_scores(self) -> float:
        """The numbers among the factors of q and k: they join the scale."""
        q = 1.0 if isinstance(self.q, Tensor) else self.q
        return q if isinstance(self.k, Tensor) else q * self.k

    def folded(self, scale: float) -> float:
        """The scale with what joins it; what float32 holds of it."""
        product = scale * self.of_scores
        return product if abs(product) >= _LEAST else 0.0

    def entries(self, kv_heads: int, heads_per_kv: int, pointers: bool = True) -> tuple[Any, ...]:
        """The end of a call's environment, see `codegen.abi.environment_names`; `pointers`: see `flatten`."""
        address = _pointer if pointers else _tensor
        v_factor = 1.0 if isinstance(self.v, Tensor) else self.v
        q, (batch, head, member) = address(self.q), _strides(self.q, kv_heads, heads_per_kv)
        k, k_strides = address(self.k), _strides(self.k, kv_heads, heads_per_kv)
        v, v_strides = address(self.v), _strides(self.v, kv_heads, heads_per_kv)
        return (v_factor, q, batch, head, member, k, *k_strides[:2], v, *v_strides[:2])

    def true(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, heads, rows, dims) as they are meant, in float32."""
        return _true(q, self.q), _true(k, self.k), _true(v, self.v)

    def arguments(self) -> dict[str, Any]:
        """As keywords of `flashgen.attention`."""
        return {
            "q_descale": self.q,
            "k_descale": self.k,
            "v_descale": self.v,
            "out_dtype": self.out_dtype,
        }


def _pointer(factor: Factor) -> int:
    return factor.data_ptr() if isinstance(factor, Tensor) else 0


def _tensor(factor: Factor) -> Tensor | None:
    return factor if isinstance(factor, Tensor) else None


def _strides(factor: Factor, kv_heads: int, heads_per_kv: int) -> tuple[int, int, int]:
    """Of a factor, along batch, key head, and the query heads of one key head."""
    if not isinstance(factor, Tensor) or factor.numel() == 1:
        return 0, 0, 0
    *batch, head = factor.stride()
    if factor.shape[-1] == kv_heads:
        return (batch[0] if batch else 0), head, 0
    return (batch[0] if batch else 0), head * heads_per_kv, head


def _true(stored: Tensor, factor: Factor) -> Tensor:
    values = stored.float()
    if isinstance(factor, Tensor) and factor.numel() != 1:
        heads = factor.shape[-1]
        if heads != stored.shape[1]:
            factor = factor.repeat_interleave(stored.shape[1] // heads, -1)
        factor = factor[..., None, None]
    return values * factor


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, heads, rows, dims) in e4m3, and factors (batch, heads) with which each head fills its range."""
    largest = values.float().abs().amax((2, 3))
    factor = torch.where(largest > 0, largest / torch.finfo(E4M3).max, 1.0)
    limit = torch.finfo(E4M3).max
    return (values.float() / factor[..., None, None]).clamp_(-limit, limit).to(E4M3), factor
