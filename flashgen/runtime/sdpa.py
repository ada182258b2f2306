"""What of `torch.nn.functional.scaled_dot_product_attention` FlashGen has a kernel for."""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.build.quantized import E4M3
from flashgen.runtime.checks import (
    DTYPE_NAMES,
    FULL,
    IS_TRANSFORMED,
    MAX_SCALE,
    transformed,
)
from flashgen.spec import masks
from flashgen.spec.attention import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from flashgen.spec.masks import Mask

_CAUSAL, _CAUSAL_TOP_LEFT = masks.causal(), masks.causal("top_left")

_FLAGS = (bool, torch.SymBool)
"""What may be True or False: `q.shape[2] > 1` is the second in a trace of sizes that vary."""

# torch's call has no place for the factors of 8-bit tensors.
_DTYPES = [dtype for dtype in DTYPE_NAMES if dtype is not E4M3]
_HEAD_DIMS = frozenset(range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP))


def translate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Mask | str:
    """The mask that means the same to `attention`, or why the call is left to torch.

    A call that torch refuses is left to torch, which has the message for it.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return "not all of query, key and value are tensors"
    if reason := _not_served(query, key, value, dropout_p, scale, enable_gqa):
        return reason
    if is_causal is not False and not (is_causal is True or isinstance(is_causal, _FLAGS)):
        return "is_causal is neither True nor False"
    if is_causal:
        if attn_mask is not None:
            return "both attn_mask and is_causal are given, which is no mask that a kernel has"
        return _CAUSAL if query.shape[2] == key.shape[2] else _CAUSAL_TOP_LEFT
    if attn_mask is None:
        return FULL
    if not isinstance(attn_mask, Tensor):
        return "attn_mask is no tensor"
    if attn_mask.dtype != torch.bool:
        return f"attn_mask of {attn_mask.dtype} is an additive bias, which no kernel takes yet"
    if not 2 <= attn_mask.dim() <= 4 or attn_mask.device != query.device:
        return "attn_mask does not broadcast to (batch, heads, q_len, k_len) on the tensors' device"
    batch, k_len = query.shape[0], key.shape[2]
    full = attn_mask[(None,) * (4 - attn_mask.dim())]
    if full.shape[1] != 1 or full.shape[2] != 1:
        return (
            f"attn_mask of shape {tuple(attn_mask.shape)} differs between heads or queries; only masks "
            "(batch or 1, 1, 1, k_len), the same for all, are key padding"
        )
    if full.shape[0] not in (1, batch) or full.shape[3] not in (1, k_len):
        return "attn_mask does not broadcast to (batch, heads, q_len, k_len)"
    return masks.key_padding(full[:, 0, 0].expand(batch, k_len))


def _not_served(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None, enable_gqa: bool
) -> str:
    """Why, whatever the mask, the call is left to torch; empty if it is not.

    On every call's path, so written out and each property read once: with generators over the three tensors
    it took 6 us, not 1.6.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        return "the tensors are nested"
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4:
        return "the tensors are not (batch, heads, length, head_dim)"
    dtype, device = query.dtype, query.device
    if dtype not in _DTYPES or key.dtype is not dtype or value.dtype is not dtype:
        return f"the tensors are not all of one of {', '.join(map(str, _DTYPES))}"
    if key.device != device or value.device != device:
        return "the tensors are on different devices"
    if transformed():
        return IS_TRANSFORMED
    if type(dropout_p) not in (float, int) or not 0 <= dropout_p <= 1:
        return f"dropout_p={dropout_p} is no probability"
    if enable_gqa is not False and not (enable_gqa is True or isinstance(enable_gqa, _FLAGS)):
        return "enable_gqa is neither True nor False"
    if scale is not None and (type(scale) not in (float, int) or not abs(scale) <= MAX_SCALE):
        return "scale is no plain number, or none that float32 holds"
    head_dim, kv_heads = q[3], k[1]
    if q[0] != k[0] or head_dim != k[3] or (k != v and k[:3] != v[:3]):
        return "batch, heads, lengths or head dims of the tensors differ and may broadcast"
    if not kv_heads:
        return "there are no heads"
    if q[1] != kv_heads and not (enable_gqa and q[1] % kv_heads == 0):
        return "fewer key heads than heads, and enable_gqa is not set or they do not divide"
    if head_dim not in _HEAD_DIMS or v[3] not in _HEAD_DIMS:
        return (
            f"head dim {head_dim}, or {v[3]} of v, is not a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} "
            f"to {MAX_HEAD_DIM}"
        )
    return ""
