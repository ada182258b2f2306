"""Calls of tensors that are shared out among devices: `torch.distributed.tensor.DTensor`, by batch or heads.

No row of attention needs another head or sequence, so each device computes its own part and nothing is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.runtime.checks import Given, as_mask, as_score_mod
from flashgen.spec import expr as ex
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import ScoreMod

_READ_BY = {"batch": ("batch",), "heads": ("head", "kv_head")}
"""The symbols by which a rule tells one part from another."""


def is_sharded(*tensors: Any) -> bool:
    """Whether any is a `DTensor`; without importing what they need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(each, module.DTensor) for each in tensors)


def attention(
    local: Callable[..., Any],
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    score_mod: Any,
    layout: str,
    given: Given | None,
) -> Any:
    """Each device's part, and what all of them make.

    Args:
        local: (q, k, v, mask, score_mod) -> output, or output and LSE, of plain tensors.
        q, k, v: `DTensor`s of one mesh, alike shared out: replicated, or in equal parts by batch or heads.

    Returns:
        What `local` gives, shared out as q.

    Raises:
        InvalidArgument: they are shared out in another way, or a rule tells the parts apart.
    """
    from torch.distributed.tensor import DTensor, Shard

    if given is not None and given.dropout is not None:
        raise InvalidArgument(
            "dropout_p of DTensors is not served: each device draws by a generator of its own, parts may "
            "drop alike and copies not; call flashgen.attention with q.to_local(), under a seed that differs "
            "between parts alone"
        )
    mask, score_mod = as_mask(mask), as_score_mod(score_mod)
    if not all(isinstance(each, DTensor) for each in (q, k, v)) or not (
        q.device_mesh == k.device_mesh == v.device_mesh and q.placements == k.placements == v.placements
    ):
        told = ", ".join(str(getattr(each, "placements", type(each).__name__)) for each in (q, k, v))
        raise InvalidArgument(
            f"q, k and v are {told}; they must be DTensors of one mesh, alike shared out: redistribute them"
        )
    heads = 1 if layout == "bhsd" else 2
    of_lse = list(q.placements)
    for axis, placement in enumerate(q.placements):
        if placement.is_replicate():
            continue
        what = {Shard(0): "batch", Shard(heads): "heads"}.get(placement)
        if what is None:
            raise InvalidArgument(
                f"q, k and v are shared out as {q.placements}; allowed are Replicate(), Shard(0) (the batch) "
                f"and Shard({heads}) (the heads): redistribute them"
            )
        parts, counts = q.device_mesh.size(axis), [each.shape[placement.dim] for each in (q, k)]
        if any(count % parts for count in counts):
            raise InvalidArgument(
                f"{what} of {counts[0]} (q) and {counts[1]} (k, v) are shared out in {parts} parts, which "
                "must be equal; replicate them"
            )
        sinks = given is not None and given.sinks is not None and what == "heads"
        if sinks or any(_reads(bound, _READ_BY[what]) for bound in (mask, score_mod)):
            raise InvalidArgument(
                f"{what} are shared out, and {'sinks differ' if sinks else 'a rule differs'} between them; "
                "call flashgen.attention with q.to_local() and this device's part of what it reads"
            )
        of_lse[axis] = Shard(0 if what == "batch" else 1)
    result = local(*(each.to_local() for each in (q, k, v)), mask, score_mod)

    def of_all(part: Tensor, placements: Any) -> Any:
        return DTensor.from_local(part, q.device_mesh, placements, run_check=False)

    if isinstance(result, tuple):
        return of_all(result[0], q.placements), of_all(result[1], of_lse)
    return of_all(result, q.placements)


def _reads(bound: Mask | ScoreMod | None, symbols: tuple[str, ...]) -> bool:
    nodes = () if bound is None else ex.walk(bound.rule.expr)
    return any(isinstance(each, ex.Symbol) and each.name in symbols for each in nodes)
