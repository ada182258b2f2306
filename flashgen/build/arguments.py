"""A call's tensors as the flat tuple of values that every launch takes, and what the call allows.

Both run at every call, on the host, before anything is enqueued: 2 us and 1 us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.errors import InvalidArgument
from flashgen.spec.attention import CallFacts

LAYOUTS = ("bhsd", "bshd")
"""Order of the axes of q, k, v and out: batch, heads, sequence, head dim; or sequence before heads."""

FACTS = tuple(
    CallFacts(access, tma, wide)
    for wide in (False, True)
    for access, tma in (("aligned", True), ("aligned", False), ("unit", False), ("strided", False))
)
"""Every kind of call; `facts_code` answers with an index. 0 is the usual one."""

_ALIGNMENT = 16  # bytes: a vector load, and what a descriptor needs
_INT32 = 2**31
_TILE = 256  # a tile may reach so many rows or dims past the end of its axis (masked, but computed)
_MAX_TMA_STRIDE = 2**40  # bytes
_INFINITE = _MAX_TMA_STRIDE  # stands for a stride of 0 along a real axis, which no descriptor can have


def flatten(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    values: Sequence[float] = (),
    tensors: Sequence[torch.Tensor] = (),
    layout: str = "bhsd",
    pointers: bool = True,
) -> tuple[Any, ...]:
    """The call environment, in the order of `codegen.abi.environment_names`.

    Args:
        q, out: (batch, heads, q_len, head_dim) and (..., head_dim_v), axes as `layout` orders them.
        k, v: (batch, kv_heads, k_len, head_dim) and (..., head_dim_v).
        lse: (batch, heads, q_len), float32, contiguous; None becomes a null pointer.
        values: the numeric parameters of the mask, then of the score rule.
        tensors: their operands, in the same order.
        pointers: with False the tensors themselves stand where their addresses would (the interpreter).

    Shapes are not checked here: the caller has validated the call.
    """
    q_strides, k_strides, v_strides, out_strides = q.stride(), k.stride(), v.stride(), out.stride()
    if layout == "bhsd":
        batch, heads, q_len, head_dim = q.shape
        _, kv_heads, k_len, head_dim_v = v.shape
    else:
        batch, q_len, heads, head_dim = q.shape
        _, k_len, kv_heads, head_dim_v = v.shape
        b, r, h, d = q_strides
        q_strides = (b, h, r, d)
        b, r, h, d = k_strides
        k_strides = (b, h, r, d)
        b, r, h, d = v_strides
        v_strides = (b, h, r, d)
        b, r, h, d = out_strides
        out_strides = (b, h, r, d)
    address: Callable[[torch.Tensor], Any] = _address if pointers else _itself
    operands: list[Any] = []
    for tensor in tensors:
        operands += (address(tensor), *tensor.stride())
    return (
        address(q),
        address(k),
        address(v),
        address(out),
        0 if lse is None else address(lse),
        *q_strides,
        *k_strides,
        *v_strides,
        *out_strides,
        batch,
        heads,
        kv_heads,
        heads // kv_heads,
        q_len,
        k_len,
        head_dim,
        head_dim_v,
        scale,
        *values,
        *operands,
    )


def flatten_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    values: Sequence[float] = (),
    tensors: Sequence[torch.Tensor] = (),
    pointers: bool = True,
) -> tuple[Any, ...]:
    """The same for packed sequences: a call of one sequence, of all tokens, and where each of them begins.

    Args:
        q, out: (q tokens, heads, head_dim) and (..., head_dim_v).
        k, v: (k tokens, kv_heads, head_dim) and (..., head_dim_v).
        lse: (heads, q tokens), float32, contiguous; None becomes a null pointer.
        cu_q, cu_k: (sequences + 1), int32, contiguous.
        values, tensors, pointers: as for `flatten`.
    """
    q_rows, q_heads, q_dims = q.stride()
    k_rows, k_heads, k_dims = k.stride()
    v_rows, v_heads, v_dims = v.stride()
    out_rows, out_heads, out_dims = out.stride()
    q_tokens, heads, head_dim = q.shape
    k_tokens, kv_heads, head_dim_v = v.shape
    address: Callable[[torch.Tensor], Any] = _address if pointers else _itself
    operands: list[Any] = []
    for tensor in tensors:
        operands += (address(tensor), *tensor.stride())
    # The stride of the batch, of which there is one, is never used: a row's promises what any other would.
    # fmt: off
    return (
        address(q), address(k), address(v), address(out), 0 if lse is None else address(lse),
        q_rows, q_heads, q_rows, q_dims,
        k_rows, k_heads, k_rows, k_dims,
        v_rows, v_heads, v_rows, v_dims,
        out_rows, out_heads, out_rows, out_dims,
        1, heads, kv_heads, heads // kv_heads, q_tokens, k_tokens, head_dim, head_dim_v, scale,
        *values, *operands,
        address(cu_q), address(cu_k), cu_q.shape[0] - 1,
    )
    # fmt: on


def flatten_gradients(
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dlse: torch.Tensor | None,
    layout: str = "bhsd",
    pointers: bool = True,
) -> tuple[Any, ...]:
    """What the environment of `bwd` has behind that of `fwd`, but for the gradient of sinks.

    Args:
        dout: the gradient of the output, of its shape.
        dq, dk, dv: what is computed, of the shapes of q, k and v.
        dlse: the gradient of the LSE, as the LSE is for `flatten`.
        layout, pointers: as for `flatten`; tensors of packed sequences have three axes, and no layout.
    """
    address: Callable[[torch.Tensor], Any] = _address if pointers else _itself
    tensors = (dout, dq, dk, dv)
    strides = [each.stride() for each in tensors]
    if dout.dim() == 3:  # packed sequences
        strides = [(r, h, r, d) for r, h, d in strides]
    elif layout == "bshd":
        strides = [(b, h, r, d) for b, r, h, d in strides]
    return (
        *map(address, tensors),
        0 if dlse is None else address(dlse),
        *(stride for each in strides for stride in each),
    )


_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def facts_code(env: tuple[Any, ...], itemsize: int, tensors: Sequence[torch.Tensor] = ()) -> int:
    """Which of `FACTS` a call is, from its environment: part of the dispatcher's key.

    Args:
        env: as `flatten` made it, with addresses.
        itemsize: bytes of an element of q, k, v and out.
        tensors: the operands of mask and score rule; they only matter for `wide`.

    One pass over the usual call, in which everything is aligned and small, decides for 0; only other
    calls are looked at axis by axis.
    """
    # fmt: off
    (q, k, v, out, lse,
     qb, qh, qr, qd, kb, kh, kr, kd, vb, vh, vr, vd, ob, oh, orow, od,
     _, _, _, _, q_len, k_len, _, _, *_) = env
    strides = qb | qh | qr | kb | kh | kr | vb | vh | vr | ob | oh | orow
    if (
        not (q | k | v | out | lse | strides * itemsize) & 15
        and qd == kd == vd == od == 1
        and qb and qh and qr and kb and kh and kr and vb and vh and vr and ob and oh and orow
        # `a | b` is at least the larger of the two
        and strides < 1 << 31
        and (qr | kr | vr | orow) * ((q_len | k_len) + _TILE) + _TILE < 1 << 31
        and q_len and k_len
        and not (tensors and any(map(_reaches_far, tensors)))
    ):
        return 0
    # fmt: on
    return _exact_code(env, itemsize, tensors)


def gradients_code(
    env: tuple[Any, ...], entries: tuple[Any, ...], itemsize: int, tensors: Sequence[torch.Tensor] = ()
) -> int:
    """Which of `FACTS` a call of `bwd` is: the least that q, k, v and the output allow, and their gradients.

    Args:
        env, itemsize, tensors: as for `facts_code`.
        entries: as `flatten_gradients` made them, with addresses.
    """
    dout, dq, dk, dv, dlse, *strides = entries
    # Their place in the environment is that of what they are gradients of.
    alike = (dq, dk, dv, dout, dlse, *strides[4:], *strides[:4], *env[21:])
    codes = [facts_code(each, itemsize, tensors) for each in (env, alike)]
    return max(code % 4 for code in codes) + 4 * max(code // 4 for code in codes)


def _exact_code(env: tuple[Any, ...], itemsize: int, tensors: Sequence[torch.Tensor]) -> int:
    """The definition of the facts, axis by axis; see `CallFacts`. 5 us."""
    batch, heads, kv_heads, _, q_len, k_len, head_dim, head_dim_v = env[21:29]
    q, k, v, out, lse = env[:5]
    unit, tma = True, q_len > 0 and k_len > 0
    wide = any(map(_reaches_far, tensors))
    misaligned = q | k | v | out | lse
    for n_heads, rows, dims, (batch_stride, head_stride, row_stride, dim_stride) in (
        (heads, q_len, head_dim, env[5:9]),
        (kv_heads, k_len, head_dim, env[9:13]),
        (kv_heads, k_len, head_dim_v, env[13:17]),
        (heads, q_len, head_dim_v, env[17:21]),
    ):
        # The batch or head index of an axis of extent 1 is always 0, and its stride may be anything. Rows
        # past the end are computed though masked, so a row's stride always counts.
        misaligned |= row_stride * itemsize
        longest = (row_stride or _INFINITE) if rows > 1 else 1
        if batch > 1:
            misaligned |= batch_stride * itemsize
            longest = max(longest, batch_stride) if batch_stride else _INFINITE
        if n_heads > 1:
            misaligned |= head_stride * itemsize
            longest = max(longest, head_stride) if head_stride else _INFINITE
        if longest * itemsize >= _MAX_TMA_STRIDE:
            tma = False
        if dim_stride != 1:
            unit = False
        reach = (rows + _TILE) * row_stride + (dims + _TILE) * dim_stride
        if max(batch_stride, head_stride, reach) >= _INT32:
            wide = True
    aligned = unit and not misaligned & (_ALIGNMENT - 1)
    kind = (0 if tma else 1) if aligned else 2 if unit else 3
    return kind + 4 * wide  # the order of `FACTS`


def _reaches_far(tensor: torch.Tensor) -> bool:
    """Whether an element's offset can pass 2^31."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum(extent * stride for extent, stride in pairs) >= _INT32


def call_facts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: str = "bhsd"
) -> CallFacts:
    """What a call allows its kernel to assume; the tensors as for `flatten`.

    Raises:
        InvalidArgument: the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise InvalidArgument(f"{layout=} must be one of {', '.join(LAYOUTS)}")
    return FACTS[facts_code(flatten(q, k, v, out, None, 1.0, layout=layout), q.element_size())]
