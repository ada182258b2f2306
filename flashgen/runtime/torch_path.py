"""Attention by torch's own operations: for CPU tensors, for gradients, and where no kernel serves a call.

Rules are evaluated from the same expressions the kernels are rendered from. Whatever FlashGen means by a row
without a visible key (output 0, LSE -inf, zero gradients) holds here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flashgen.build.precision import without_autocast
from flashgen.build.reference import (
    attention_reference,
    evaluate_rule,
    finished,
    on_device,
    row_maximum,
    ruled,
    symbols,
    with_sink,
)
from flashgen.runtime.checks import FULL, Call, transformed
from flashgen.runtime.packed import PackedCall
from flashgen.spec import masks

CHUNK_SCORES = 2**26
"""Scores held at a time where they are written out: 256 MB in float32."""

_FULL = FULL.rule.text
_CAUSAL = masks.causal().rule.text
_CAUSAL_TOP_LEFT = masks.causal("top_left").rule.text


def empty_result(call: Call) -> tuple[Tensor, Tensor | None]:
    """The result of a call without keys, or without any output element."""
    sizes = call.sizes
    out = empty_output(call.q, call.layout, sizes.head_dim_v, call.out_dtype).zero_()
    lse = None
    if call.return_lse:
        rows = (sizes.heads, *call.totals[:1]) if call.totals else (sizes.batch, sizes.heads, sizes.q_len)
        lse = call.q.new_full(rows, -math.inf, dtype=torch.float32)
        if call.sinks is not None:
            lse.copy_(call.sinks[:, None])
    return out, lse


def empty_output(q: Tensor, layout: str, head_dim_v: int, dtype: torch.dtype | None = None) -> Tensor:
    """An output of q's layout and order of axes in memory, so that what follows needs no copy; of q's dtype
    unless another is named.
    """
    if q.shape[-1] == head_dim_v:
        return torch.empty_like(q, dtype=dtype)  # keeps the strides, or their order if q has gaps
    if head_dim_v < q.shape[-1]:
        return torch.empty_like(q[..., :head_dim_v], dtype=dtype)
    shape = (*q.shape[:-1], head_dim_v)
    order = _memory_order(q)
    return q.new_empty([shape[axis] for axis in order], dtype=dtype).permute(_inverse(order))


def like_q(out: Tensor, q: Tensor, layout: str) -> Tensor:
    """`out` with the strides of `empty_output`; itself if it has those already.

    The order of the axes is not enough: where torch pads head dims, its output has gaps.
    """
    wanted = empty_output(q, layout, out.shape[-1])
    if _strides_that_count(out) == _strides_that_count(wanted):
        return out
    order = _memory_order(wanted)
    return out.permute(order).contiguous().permute(_inverse(order))


def _strides_that_count(tensor: Tensor) -> list[int]:
    """Those of axes of more than one element; nothing depends on the others."""
    return [stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1]


def _memory_order(tensor: Tensor) -> list[int]:
    """The axes from the outermost to the innermost in memory; axes of equal stride stay in order."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def reference(call: Call) -> tuple[Tensor, Tensor | None]:
    """The reference in float32, rounded once: what CPU tensors get. No gradient flows."""
    if isinstance(call, PackedCall):
        return _each_sequence(call, reference, empty_result)
    q, k, v = (call.bhsd(tensor.detach()) for tensor in (call.q, call.k, call.v))
    if call.quantized is not None:
        q, k, v = (each.detach() for each in call.quantized.true(q, k, v))
    sinks = None if call.sinks is None else call.sinks.detach()
    exact, lse = attention_reference(
        q,
        k,
        v,
        mask=call.mask,
        score_mod=call.score_mod,
        scale=call.scale,
        sinks=sinks,
        sequence=call.sequence,
        dropout=call.dropout,
    )
    out = empty_output(call.q, call.layout, v.shape[3], call.out_dtype)
    call.bhsd(out).copy_(exact)
    return out, lse if call.return_lse else None


def attention(call: Call) -> tuple[Tensor, Tensor | None]:
    """Differentiable attention.

    `scaled_dot_product_attention` where it can say the same, for its memory and speed; otherwise the scores
    are written out, a slice of query rows at a time, and computed again for the gradient.

    8-bit tensors are computed as bfloat16 ones where torch takes these, else in float32. Packed sequences are
    computed one after the other, which waits for the GPU once.
    """
    if isinstance(call, PackedCall):
        return _each_sequence(call, attention, _zeros_with_gradients)
    if call.quantized is not None:
        out, lse = attention(_dequantized(call))
        return out.to(call.out_dtype), lse
    q, k, v = (call.bhsd(tensor) for tensor in (call.q, call.k, call.v))
    lse = None
    with without_autocast(q.device.type):
        if k.shape[2] == 0:
            out, lse = _without_keys(q, k, v, call.sinks)
        elif _says_the_same(call):
            out = _by_sdpa(call, q, k, v)
        else:
            out, lse = _written_out(call, q, k, v)
    out = call.bhsd(out)
    if not torch.compiler.is_compiling():
        out = like_q(out, call.q, call.layout)
    return out, lse if call.return_lse else None


def gradients(
    call: Call, dout: Tensor, dlse: Tensor | None, of_sinks: bool = False, learned: Sequence[int] = ()
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k and v, and of the sinks if they are wanted, from those of the output and, if it has
    one, the LSE: by `attention`, which is computed once more. Of q, k and v each lies in memory as
    `empty_output` of its tensor, the others without gaps.

    Args:
        of_sinks: whether that of the sinks is wanted, which is None otherwise.
        learned: places of the score rule's tensors whose gradients follow these.
    """
    wanted = {"q": call.q, "k": call.k, "v": call.v, **({"sinks": call.sinks} if of_sinks else {})}
    leaves = {name: each.detach().requires_grad_() for name, each in wanted.items() if each is not None}
    score_mod, of_rule = call.score_mod, []
    if learned and score_mod is not None:
        tensors = [each.detach() for each in score_mod.tensors]
        of_rule = [tensors[place].requires_grad_() for place in learned]
        score_mod = score_mod.bind(*tensors)
    with _differentiable(), torch.enable_grad():
        again: Any = {**leaves, "score_mod": score_mod, "return_lse": dlse is not None}
        out, lse = attention(replace(call, **again))
        results = [(out, dout)] if lse is None or dlse is None else [(out, dout), (lse, dlse)]
        outputs, given = zip(*results, strict=True)
        inputs = [*leaves.values(), *of_rule]
        found = torch.autograd.grad(outputs, inputs, given, materialize_grads=True)
    made = [like_q(one, each, call.layout) for one, each in zip(found, inputs[:3], strict=False)]
    # Copied: the gradient of a sink alone in its row may be that of the LSE, which an operator must not give.
    others = [each.clone(memory_format=torch.contiguous_format) for each in found[3:]]
    return *made, *(() if of_sinks else (None,)), *others


_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")


def _differentiable() -> AbstractContextManager[object]:
    """Where torch records operations, also within an operator of our own, in which it would not."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    guard: Any = torch._C._ForceDispatchKeyGuard
    kept: AbstractContextManager[object] = guard(torch._C._dispatch_tls_local_include_set(), excluded)
    return kept


def _without_keys(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeros, and an LSE of -inf or of the sinks alone; the output's gradients are zero too. A rule could not
    even read its operands.
    """
    first = q[..., :1]
    zero = first.masked_fill(torch.ones_like(first, dtype=torch.bool), 0.0) + k.sum() + v.sum()
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float32, device=q.device)
    if sinks is not None:
        lse = sinks.float()[:, None].expand(q.shape[:-1])
    return zero.expand(*q.shape[:-1], v.shape[-1]), lse


def _zeros_with_gradients(call: Call) -> tuple[Tensor, Tensor | None]:
    """As `empty_result`, with gradients: those of all tensors are zero."""
    q, k, v = (call.bhsd(tensor) for tensor in (call.q, call.k, call.v))
    out, lse = _without_keys(q, k, v, call.sinks)
    if isinstance(call, PackedCall):
        out, lse = out[0].transpose(0, 1), lse[0]
    else:
        out = call.bhsd(out)
    return like_q(out, call.q, call.layout), lse if call.return_lse else None


def _each_sequence(
    call: PackedCall,
    compute: Callable[[Call], tuple[Tensor, Tensor | None]],
    empty: Callable[[Call], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    if call.empty:
        return empty(call)
    outputs, lses = [], []
    for part in call.parts():
        out, lse = empty(part) if part.empty else compute(part)
        outputs.append(out[0])
        lses += [] if lse is None else [lse[0]]
    return like_q(torch.cat(outputs), call.q, call.layout), torch.cat(lses, 1) if lses else None


def _dequantized(call: Call) -> Call:
    dtype = torch.bfloat16 if _says_the_same(call) else torch.float32
    assert call.quantized is not None
    tensors = call.quantized.true(*(call.bhsd(each) for each in (call.q, call.k, call.v)))
    q, k, v = (call.bhsd(each.to(dtype)) for each in tensors)
    return replace(call, q=q, k=k, v=v, quantized=None)


def describe(call: Call) -> str:
    """Which of torch's ways `attention` takes."""
    if isinstance(call, PackedCall):
        return "torch, one sequence after the other"
    if _says_the_same(call):
        return "torch.nn.functional.scaled_dot_product_attention"
    return "torch, scores written out"


def _says_the_same(call: Call) -> bool:
    """Whether `scaled_dot_product_attention` serves a call. Its backends know no forward-mode AD, and their
    gradients have one order of additions in torch's deterministic mode alone.
    """
    if call.deterministic and not torch.are_deterministic_algorithms_enabled():
        return False
    plain = call.score_mod is None and not call.return_lse and call.scale > 0 and not call.empty
    # It draws what it drops by itself, and a kernel of the other pass would draw something else. A trace has
    # no kernel in either, and would hold all scores at once.
    plain &= call.dropout is None or torch.compiler.is_compiling()
    return plain and call.sinks is None and not transformed()


def _by_sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q_len, k_len, rule = q.shape[2], k.shape[2], call.mask.rule.text
    # Torch's flash attention of CPUs says 0 of a row of NaN scores, but where its mask is a tensor.
    in_words = q.device.type != "cpu" or torch.compiler.is_compiling()
    # Written so that comparisons of traced sizes decide branches and never become arguments.
    is_causal = False
    if in_words and rule in (_CAUSAL, _CAUSAL_TOP_LEFT) and q_len == k_len:
        is_causal = True
    keep = seen = None
    if rule == _FULL or (rule == _CAUSAL and q_len == 1):
        keep = None if in_words else q.new_ones((1, 1), dtype=torch.bool).expand(q_len, k_len)
    elif not is_causal:
        keep = visible(call, slice(0, q_len))
        # What torch does with a row that sees nothing differs between its backends: show it all keys, and
        # drop the result, which drops the gradient too.
        seen = keep.any(-1, keepdim=True)
        keep = keep | ~seen
    # On CUDA only the flash backend takes fewer key heads than heads; the others would write out all scores.
    grouped = keep is None and q.dtype != torch.float32 and q.shape[3] == v.shape[3] and not _flash_is_ours()
    enable_gqa = False
    if q.shape[1] != k.shape[1]:
        if grouped:
            enable_gqa = True
        else:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    dropout_p = 0.0 if call.dropout is None else call.dropout.probability
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": call.scale}
    with _backends(q):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=enable_gqa, **options)
    return out if seen is None else out.masked_fill(~seen, 0.0)


def _backends(q: Tensor) -> AbstractContextManager[object]:
    """Which of torch's kernels may serve a call that ours do not.

    Not cuDNN's while a CUDA graph is captured: it allocates on the first call of a shape, which ends the
    capture. And not flash attention where that is FlashGen (`integrations/torch`), which would ask itself.
    """
    if not q.is_cuda or torch.compiler.is_compiling():
        return nullcontext()
    capturing, ours = torch.cuda.is_current_stream_capturing(), _flash_is_ours()
    if not capturing and not ours:
        return nullcontext()
    settings: Any = torch.backends.cuda
    enabled = {
        SDPBackend.CUDNN_ATTENTION: settings.cudnn_sdp_enabled() and not capturing,
        SDPBackend.FLASH_ATTENTION: settings.flash_sdp_enabled() and not ours,
        SDPBackend.EFFICIENT_ATTENTION: settings.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: settings.math_sdp_enabled(),
    }
    kept: AbstractContextManager[object] = sdpa_kernel([each for each, is_on in enabled.items() if is_on])
    return kept


_flash_implementation: Callable[[], str | None] = getattr(
    torch.nn.attention, "current_flash_attention_impl", lambda: None
)


def _flash_is_ours() -> bool:
    return not torch.compiler.is_compiling() and _flash_implementation() == "flashgen"


def visible(call: Call, rows: slice) -> Tensor:
    """What the mask keeps: a bool tensor (batch or 1, heads or 1, rows, k_len)."""
    env = _symbols(call, rows)
    with without_autocast(call.q.device.type):
        keep = on_device(evaluate_rule(call.mask, env), call.q.device)
    keep = keep[(None,) * (4 - keep.dim())]
    return keep.expand(-1, -1, rows.stop - rows.start, call.sizes.k_len)


def _symbols(call: Call, rows: slice) -> dict[str, Tensor | int]:
    """The symbols of rules for some rows and all keys."""
    sizes = call.sizes
    return symbols(
        rows,
        slice(0, sizes.k_len),
        batch=sizes.batch,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        q_len=sizes.q_len,
        k_len=sizes.k_len,
        device=call.q.device,
        sequence=call.sequence,
    )


def _written_out(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, q_len = q.shape[:3]
    k, v = k.float(), v.float()
    mask = None if call.mask.rule.text == _FULL else call.mask

    def some_rows(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rows: slice
    ) -> tuple[Tensor, Tensor]:
        q = q[:, :, rows].float()
        grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], q.shape[2], q.shape[3])
        scores = (grouped @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) * call.scale
        scores = with_sink(ruled(scores, mask, call.score_mod, _symbols(call, rows)), sinks)
        maximum = row_maximum(scores)
        weights = torch.exp(scores - maximum)
        weights, normaliser = weights[..., : k.shape[2]], weights.sum(-1, keepdim=True)
        if call.dropout is not None:
            weights = call.dropout.applied(weights, rows, call.sequence)
        by_group = weights.reshape(*grouped.shape[:4], k.shape[2])
        products = (by_group @ v[:, :, None]).flatten(1, 2)
        return finished(maximum, normaliser, products)

    step = max(1, CHUNK_SCORES // max(1, batch * heads * k.shape[2]))
    if torch.compiler.is_compiling() or step >= q_len:
        out, lse = some_rows(q, k, v, call.sinks, slice(0, q_len))
    else:
        again = torch.is_grad_enabled() and not transformed()  # a transform allows no saved-tensor hooks
        parts = [
            checkpoint(some_rows, q, k, v, call.sinks, rows, use_reentrant=False)
            if again
            else some_rows(q, k, v, call.sinks, rows)
            for rows in (slice(start, min(start + step, q_len)) for start in range(0, q_len, step))
        ]
        out, lse = (torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
    return out.to(call.q.dtype), lse
