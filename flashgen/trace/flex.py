"""What `torch.nn.attention.flex_attention.flex_attention` takes, in terms of our own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashgen.errors import InvalidArgument

_NO_BLOCKS = 2**30
"""Block size of the mask that torch makes where none is given: one block around everything."""


def check_options(enable_gqa: Any, return_lse: Any, kernel_options: Any, return_aux: Any) -> bool:
    """Whether the LSE is wanted.

    Raises:
        InvalidArgument: an option that means nothing here.
    """
    for name, given in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if not isinstance(given, bool):
            raise InvalidArgument(f"{name}={given!r} must be True or False")
    if kernel_options:
        raise InvalidArgument(
            f"kernel_options={kernel_options!r} are of torch's kernels and would do nothing here; leave them "
            "out, tiles are chosen by tuning (flashgen tune)"
        )
    if return_aux is None:
        return bool(return_lse)
    if return_lse:
        raise InvalidArgument(
            "return_lse and return_aux are both given; write return_aux=AuxRequest(lse=True)"
        )
    if not hasattr(return_aux, "lse") or not hasattr(return_aux, "max_scores"):
        raise InvalidArgument(f"return_aux={return_aux!r} must be torch's AuxRequest, or None")
    if return_aux.max_scores:
        raise InvalidArgument(
            "return_aux asks for max_scores, which no kernel here writes; ask for AuxRequest(lse=True)"
        )
    return bool(return_aux.lse)


def _are_dense(*tensors: Any) -> bool:
    """Whether tensors have the axes that they must have; `attention` refuses others."""
    return all(isinstance(each, Tensor) and each.dim() == 4 for each in tensors)


def spread(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, block_mask: Any
) -> tuple[Tensor, Tensor]:
    """Keys and values for each sequence of the queries: one for all may be given, where a block mask is.

    Raises:
        InvalidArgument: fewer key heads than heads without `enable_gqa`.
    """
    if not _are_dense(query, key, value):
        return key, value
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InvalidArgument(
            f"query has {query.shape[1]} heads, key {key.shape[1]}; for groups of heads give enable_gqa=True"
        )
    if block_mask is None or key.shape[0] != 1 or value.shape[0] != 1 or query.shape[0] == 1:
        return key, value
    batch = query.shape[0]
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def mask_of(block_mask: Any, query: Tensor, key: Tensor) -> Callable[..., Any] | None:
    """The callable of a BlockMask; None for one that drops nothing. Its blocks are not read.

    Raises:
        InvalidArgument: it is of other sizes than the tensors, was sliced, or is defined by its blocks alone.
    """
    if block_mask is None:
        return None
    if not all(hasattr(block_mask, name) for name in ("mask_mod", "seq_lengths", "BLOCK_SIZE", "shape")):
        raise InvalidArgument(
            f"block_mask={type(block_mask).__name__} must be torch's BlockMask, or None; a callable goes to "
            "flashgen.attention(mask=...)"
        )
    if min(block_mask.BLOCK_SIZE) >= _NO_BLOCKS:
        return None
    if not _are_dense(query, key):
        return None
    given = tuple(block_mask.shape)
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    fits = len(given) == 4 and given[2:] == wanted[2:]
    if not fits or any(size not in (1, of) for size, of in zip(given[:2], wanted[:2], strict=True)):
        raise InvalidArgument(
            f"block_mask has shape {given}; it must be {wanted} (batch, heads, q_len, k_len), where batch "
            "and heads may be 1; make one for these lengths with create_block_mask"
        )
    mask_mod: Callable[..., Any] = block_mask.mask_mod
    name = getattr(mask_mod, "__name__", "")
    if name == "_sliced_mask_mod_error":
        raise InvalidArgument(
            "block_mask was sliced, which drops its mask_mod; set it, with the offset added"
        )
    if name == "noop_mask" and mask_mod.__module__.startswith("torch."):
        raise InvalidArgument(
            "block_mask has no mask_mod of its own: its blocks are the mask, and they are not read; give "
            "flashgen.attention a mask (mask=...), or leave block_mask out if nothing is to be masked"
        )
    return mask_mod
