"""FlexAttention's callables as masks and score rules.

`flashgen.attention` and `flashgen.flex_attention` trace the callables they are given. To join a callable with
other masks, or to make it once outside of what torch.compile traces, make the rule here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import ScoreMod
from flashgen.trace.rules import traced

__all__ = ["mask_mod", "score_mod"]


def mask_mod(function: Callable[..., Any]) -> Mask:
    """The mask that `function(b, h, q_idx, kv_idx)` means, with the numbers and tensors it captures now.

    `q_idx` and `kv_idx` are counted from 0; the result is a truth value. Tensors must have the sizes of the
    call along axes that `b`, `h`, `q_idx` or `kv_idx` index.

    Raises:
        InvalidArgument: it cannot be traced; the message has the line, the node and the reason.
    """
    return traced("mask", function)


def score_mod(function: Callable[..., Any]) -> ScoreMod:
    """The score rule that `function(score, b, h, q_idx, kv_idx)` means; see `mask_mod`.

    `score` is query times key times scale, a float32 number.

    Raises:
        InvalidArgument: as of `mask_mod`.
    """
    return traced("score", function)
