"""The composition root: the only place where stores, kernels, dispatcher, tuner and bundles are wired.

The functions of the package that users call stand here. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from flashgen.build.arguments import LAYOUTS
from flashgen.build.precision import autocasted, autocasting
from flashgen.errors import FlashGenError, InvalidArgument, LaunchFailed, NoGPU, NotTuned, StoreError
from flashgen.runtime import explain as explanations
from flashgen.runtime import gradients, op, sharded, torch_path
from flashgen.runtime.checks import (
    IS_TRANSFORMED,
    Call,
    Given,
    as_dropout,
    as_mask,
    as_score_mod,
    check,
    check_deterministic,
    check_return_lse,
    transformed,
)
from flashgen.runtime.dispatcher import Dispatcher, as_result
from flashgen.runtime.explain import Explanation
from flashgen.runtime.packed import as_longest, check_packed
from flashgen.runtime.policy import Launchable, Policy, Request, Source
from flashgen.runtime.sdpa import translate
from flashgen.settings import SETTINGS, VERSION
from flashgen.spec import drops
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.masks import Mask
from flashgen.spec.record import Record, Versions
from flashgen.spec.score_mods import ScoreMod
from flashgen.spec.target import TARGETS, Target, find_target

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    from flashgen.bundle.load import Bundle
    from flashgen.codegen.source import KernelSource
    from flashgen.measure.compile_pool import Compiled, CompilePool
    from flashgen.measure.worker import Measurer
    from flashgen.store.db import TuningDB
    from flashgen.store.shipped import ShippedRecords
    from flashgen.tune.dry_run import DryRun
    from flashgen.tune.plan import Plan
    from flashgen.tune.result import Progress, TuneResult
    from flashgen.tune.simulate import Score, Simulation

SETTINGS.check()  # what a user calls first is found here

MAX_DATABASES = 4
"""Record databases that are open at a time."""

MaskLike = Mask | str | Callable[..., Any] | None
"""See `attention`."""
ScoreModLike = ScoreMod | str | Callable[..., Any] | Sequence[ScoreMod | Callable[..., Any]] | None
"""See `attention`."""

Workloads = str | os.PathLike[str] | Workload | Iterable[Workload]
"""A suite's name, the path of a model's config.json, or workloads."""

_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_trace: Callable[[], object] = torch._C._get_tracing_state


def _watched() -> bool:
    """Whether a mode of torch (fake tensors) or torch.jit.trace must see the operator: 0.1 us."""
    return _dispatch_modes() > 0 or _trace() is not None


def _stream_of() -> Callable[[int], int]:
    """Device index -> handle of torch's current stream there; the raw getter is 0.1 us, the object 1 us."""
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))


# Calls


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike = None,
    score_mod: ScoreModLike = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0,  # no float, which a trace would take for a number that varies
    layout: str = "bhsd",
    return_lse: bool = False,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool | None = None,
) -> Any:
    """Exact softmax attention by the fastest kernel known for the call.

    Args:
        q: (batch, heads, q_len, head_dim), any strides; float16, bfloat16, float32 or float8_e4m3fn. Head
            dims are multiples of 8 from 16 to 256.
        k: (batch, kv_heads, k_len, head_dim), where kv_heads divides heads.
        v: (batch, kv_heads, k_len, head_dim_v).
        mask: which keys a query sees: a `Mask` of `flashgen.masks`, its name, or None for all. `causal` lines
            up the last query with the last key. Or FlexAttention's callable (b, h, q_idx, kv_idx) -> bool.
        score_mod: rules from `flashgen.score_mods`, applied in order to the scaled scores, before the mask.
            Any of them may be FlexAttention's callable (score, b, h, q_idx, kv_idx) -> score.
        sinks: (heads,) logits, float32, float16 or bfloat16: each is one more score of its head's rows, which
            takes weight and has no value. The LSE includes it; score rules and mask do not see it.
        scale: factor on the scores, of any sign; 1 / sqrt(head_dim) if None.
        dropout_p: the probability, from 0 to 1, that a weight is left out of the output; the others are
            multiplied by 1 / (1 - dropout_p). Which ones is drawn anew at each call, by torch's generator of
            q's device: `torch.manual_seed` repeats it. The LSE is that of all weights.
        layout: `bhsd` as above, or `bshd`: (batch, seq, heads, head_dim) for all three and the output.
        return_lse: also return the logarithm of the sum of exponentials.
        q_descale, k_descale, v_descale: of float8_e4m3fn tensors, true value = stored value * descale: a
            number, or float32 on the tensors' device of shape (), (1), (heads,) or (batch, heads), where k, v
            and, if it likes, q count key heads. Not negative; 1 if None. No value is read on the host.
        out_dtype: of the output for float8_e4m3fn tensors: bfloat16 (if None) or float16.
        deterministic: True for gradients that have the same bits in every run; None is what
            `torch.use_deterministic_algorithms` says. Outputs always have.

    Returns:
        The output (batch, heads, q_len, head_dim_v) in q's dtype (`out_dtype` for float8_e4m3fn), layout and
        order of axes in memory; with `return_lse` a pair with the natural LSE (batch, heads, q_len) in
        float32. A query that sees no key has output 0 and LSE -inf, or its head's sink.

    Raises:
        InvalidArgument: an argument is outside this; nothing was launched.

    CPU tensors are computed by the reference. Gradients of q, k, v, the sinks and what `score_mod` reads are
    computed by kernels, also under torch.func.grad and torch.compile; of CPU and 8-bit tensors by torch's own
    operations. Kernels' gradients are deterministic but for those of tensors of `score_mod` of which several
    sequences, heads or pairs of positions read one element, and that of q by a kernel that was tuned and sums
    it in any order: with `deterministic` calls of the former kind are torch's, and such a kernel serves none.
    A second derivative of what kernels computed is refused.
    Under autocast q, k and v are rounded to its dtype, as for torch's own attention.
    """
    given = None
    if not (
        q_descale is None and k_descale is None and v_descale is None and out_dtype is None and sinks is None
    ):
        given = Given(q_descale, k_descale, v_descale, out_dtype, sinks)
    if dropout_p != 0:
        given = (given or Given())._replace(dropout=as_dropout(dropout_p, q))
    if deterministic is not None:
        check_deterministic(deterministic)
    if autocasting():
        q, k, v = autocasted(q, k, v)
    if _to_be_made(mask, score_mod):
        mask, score_mod = _traced(mask, score_mod, _sizes(q, k, layout))
    if torch.compiler.is_compiling():
        if _differentiated(q, k, v, given, mask, score_mod):
            return _differentiable_in_a_trace(
                deterministic, q, k, v, mask, score_mod, scale, layout, return_lse, given
            )
        return op.traced(_OPERATOR, q, k, v, mask, score_mod, scale, layout, return_lse, given)
    if type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and not _watched():
        if _differentiated(q, k, v, given, mask, score_mod):
            call = check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
            return _differentiable(call, deterministic)
        return _serve(q, k, v, mask, score_mod, scale, layout, return_lse, given)
    return _unusual(q, k, v, mask, score_mod, scale, layout, return_lse, given, deterministic)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    mask: MaskLike = None,
    score_mod: ScoreModLike = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0,
    return_lse: bool = False,
) -> Any:
    """Exact softmax attention of sequences that are packed one behind the other, each within itself alone.

    The host asks the GPU for nothing: one kernel serves any lengths, and sequences may be empty on either
    side.

    Args:
        q: (q tokens, heads, head_dim), any strides; float16, bfloat16 or float32; head dims as `attention`.
        k: (k tokens, kv_heads, head_dim), where kv_heads divides heads.
        v: (k tokens, kv_heads, head_dim_v).
        cu_seqlens_q: where each sequence begins among the queries, and where the last one ends: 0 first, the
            number of q tokens last, never less than the entry before. int32 of shape (sequences + 1,) on q's
            device; int64 is converted at each call.
        cu_seqlens_k: the same among the keys, of the same shape.
        max_seqlen_q: the length of the longest sequence, or more; a kernel is chosen by it, and any serves.
        max_seqlen_k: the same of keys.
        mask: as for `attention`; positions count within their sequence, and `batch` is the sequence. What a
            mask reads by position has room for the longest: `document` takes ids (sequences, max_seqlen_k).
            Documents that are sequences of their own are faster: within a sequence their tiles are not
            skipped, nor those that `block_sparse` drops.
        score_mod: as for `attention`, likewise.
        sinks: as for `attention`: (heads,) logits, of every sequence.
        scale: as for `attention`.
        dropout_p: as for `attention`.
        return_lse: also return the logarithm of the sum of exponentials.

    Returns:
        The output (q tokens, heads, head_dim_v) in q's dtype and order of axes in memory; with `return_lse` a
        pair with the natural LSE in float32, (heads, q tokens) as FlashAttention has it. A query that sees no
        key has output 0 and LSE -inf, or its head's sink.

    Raises:
        InvalidArgument: an argument is outside this; nothing was launched. Entries of cu_seqlens are looked
            at where they are on the CPU or torch's operations need them, and at every call on a GPU with the
            setting FLASHGEN_CHECK=1, which waits for it.
        LaunchFailed: a CUDA graph is being captured, and no kernel serves the call.

    CPU tensors are computed by the reference. Gradients of q, k, v and the sinks are computed by kernels as
    well, without a wait; what no kernel computes (`explain` says why) is left to torch's own operations, one
    sequence after the other, which wait for the GPU once. Under autocast as `attention`. torch.compile sees
    one operator, and one more for the gradients, in a graph for any lengths.
    """
    if autocasting():
        q, k, v = autocasted(q, k, v)
    if _to_be_made(mask, score_mod):
        sizes = _packed_sizes(q, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
        mask, score_mod = _traced(mask, score_mod, sizes)
    places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    dropout = as_dropout(dropout_p, q)
    arguments = (q, k, v, *places, mask, score_mod, scale, return_lse, sinks, dropout)
    if torch.compiler.is_compiling():
        return _packed_in_a_trace(*arguments)
    if type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and not _watched():
        return _packed(*arguments)
    return _unusual_packed(*arguments)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: the same arguments and meaning.

    `is_causal` is aligned top-left, True in a bool mask means attend. What FlashGen has no kernel for (float
    masks, masks that are more than key padding) runs in torch; `explain` says why. Which weights are dropped
    is drawn otherwise than in torch.
    """
    if autocasting():
        query, key, value = autocasted(query, key, value)
    mask = translate(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(mask, str):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    out: Tensor = attention(query, key, value, mask=mask, scale=scale, dropout_p=dropout_p)
    return out


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreModLike = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`: the same arguments and meaning.

    The mask is what `block_mask.mask_mod` says; tiles to visit are derived from it, and the blocks of
    `block_mask` are not read. The tensors that `score_mod` captures get gradients too, as of `attention`.

    Args:
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, k_len, ...); kv_heads is heads, or divides it with `enable_gqa`. The
            batch may be 1 where a block mask is given.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, or what `attention` takes.
        block_mask: from torch's `create_block_mask`, of the tensors' own lengths.
        scale: see `attention`.
        return_lse: return (output, LSE).
        kernel_options: None, or empty.
        return_aux: torch's `AuxRequest`; return (output, `AuxOutput`). `max_scores` is not served.

    Raises:
        InvalidArgument: an argument is outside this, or a callable cannot be traced; nothing was launched.
    """
    from flashgen.trace import flex

    with_lse = flex.check_options(enable_gqa, return_lse, kernel_options, return_aux)
    key, value = flex.spread(query, key, value, enable_gqa, block_mask)
    mask = flex.mask_of(block_mask, query, key)
    result = attention(query, key, value, mask=mask, score_mod=score_mod, scale=scale, return_lse=with_lse)
    if return_aux is None:
        return result
    from torch.nn.attention.flex_attention import AuxOutput

    return (result[0], AuxOutput(lse=result[1])) if with_lse else (result, AuxOutput())


def _to_be_made(mask: Any, score_mod: Any) -> bool:
    """Whether rules may have to be traced, composed or taken apart: a list may hold callables."""
    listed = type(score_mod) in (list, tuple)
    return listed or callable(mask) or callable(score_mod) or drops.may_choose(score_mod)


def _sizes(q: Any, k: Any, layout: Any) -> dict[str, int] | None:
    """How far each position of a call goes; None for tensors that are refused later."""
    if not (
        isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4 and layout in LAYOUTS
    ):
        return None
    rows, heads = (2, 1) if layout == "bhsd" else (1, 2)
    return {"batch": q.shape[0], "head": q.shape[heads], "q_idx": q.shape[rows], "k_idx": k.shape[rows]}


def _packed_sizes(q: Any, cu_seqlens_q: Any, max_q: Any, max_k: Any) -> dict[str, int] | None:
    """The same of packed sequences."""
    if not (isinstance(q, Tensor) and isinstance(cu_seqlens_q, Tensor) and q.dim() == 3):
        return None
    try:
        max_q, max_k = (as_longest(each) for each in (max_q, max_k))
    except InvalidArgument:
        return None
    if cu_seqlens_q.dim() != 1:
        return None
    return {"batch": cu_seqlens_q.shape[0] - 1, "head": q.shape[1], "q_idx": max_q, "k_idx": max_k}


def _traced(mask: Any, score_mod: Any, sizes: dict[str, int] | None) -> tuple[Any, Any]:
    """A call's rules with what its callables mean in their place."""
    from flashgen.trace import compiled, rules

    traced = compiled.traced if torch.compiler.is_compiling() else rules.traced
    if callable(mask):
        mask = traced("mask", mask, sizes)
    if callable(score_mod):
        score_mod = (score_mod,)
    if type(score_mod) in (list, tuple):
        if len(score_mod) > 1 and any(map(callable, score_mod)) and torch.compiler.is_compiling():
            raise InvalidArgument(compiled.NOT_COMPOSED)
        mods = [traced("score", each, sizes) if callable(each) else each for each in score_mod]
        score_mod = as_score_mod([each for each in mods if not rules.is_identity(each)])
    if drops.may_choose(score_mod):
        mask, score_mod = drops.as_mask(as_mask(mask), score_mod)
    return mask, score_mod


def _serve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    score_mod: Any,
    scale: Any,
    layout: str,
    return_lse: bool,
    given: Given | None,
) -> Any:
    """A call that needs no gradient: what eager calls and the operator both end in."""
    if q.is_cuda:
        try:
            return _dispatcher().attention(q, k, v, mask, score_mod, scale, layout, return_lse, given)
        except RuntimeError:  # which a tensor without strides also gives, when it is asked for them
            check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
            raise
    call = check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
    out, lse = torch_path.empty_result(call) if call.empty else torch_path.reference(call)
    return (out, lse) if return_lse else out


def _serve_packed(*arguments: Any) -> Any:
    """The same of packed sequences."""
    if arguments[0].is_cuda:
        return _dispatcher().attention_varlen(*arguments)
    return as_result(torch_path.reference(check_packed(*arguments)))


def _serve_gradients(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    of_sinks: bool,
    learned: tuple[int, ...],
) -> tuple[Tensor | None, ...]:
    """Its gradients, dense or packed, as the operators have them; see `Dispatcher.gradients`."""
    if gradients.left_to_torch(call, learned):
        return torch_path.gradients(call, dout, dlse, of_sinks, learned)
    dlse = None if dlse is None else dlse.contiguous()
    return _dispatcher().gradients(call, out, lse, gradients.laid_out(dout, out), dlse, of_sinks, learned)


_OPERATOR = op.define(_serve, _serve_gradients)
_OPERATOR_PACKED = op.define_packed(_serve_packed, _serve_gradients)


def _differentiated(q: Tensor, k: Tensor, v: Tensor, given: Given | None = None, *rules: Any) -> bool:
    """Whether a call is part of a derivative, backward or forward, or of a transform of `torch.func`."""
    needed = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (given is not None and any(factor.requires_grad for factor in given.tensors))
        or any(_learned(rule) for rule in rules)
    )
    return needed or transformed()


def _learned(rule: Any) -> bool:
    """Whether a rule reads a tensor that needs a gradient."""
    return any(each is not None and each.requires_grad for each in getattr(rule, "tensors", ()))


def _differentiable(call: Call, deterministic: bool | None = None) -> Any:
    """A call that needs a gradient: by kernels, or by torch's own operations.

    Args:
        deterministic: see `attention`.
    """
    call = _ordered(call, deterministic)
    if not gradients.refused(call, _without_gradients):
        return as_result(gradients.attention(call, _dispatcher()))
    return as_result(torch_path.attention(call))


def _differentiable_in_a_trace(deterministic: bool | None, *arguments: Any) -> Any:
    """The same as the operator, which has gradients of its own, whatever serves it on its device."""
    call = check(*arguments)
    if transformed() or call.quantized is not None:
        return as_result(torch_path.attention(_ordered(call, deterministic)))
    q, k, v, mask, score_mod, scale, layout, return_lse, given = arguments
    told = (mask, score_mod, scale, layout, True, given, _is_ordered(deterministic))
    out, lse = op.traced(_OPERATOR, q, k, v, *told)
    return (out, lse) if return_lse else out


def _ordered(call: Call, deterministic: bool | None) -> Call:
    """A call that says whether its gradients have to have the same bits in every run."""
    return replace(call, deterministic=True) if _is_ordered(deterministic) else call


def _is_ordered(deterministic: bool | None) -> bool:
    """What a call is told of it, or else torch."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def _without_gradients(call: Call) -> str:
    return _dispatcher().without_gradients(call)


def _unusual(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    score_mod: Any,
    scale: Any,
    layout: str,
    return_lse: bool,
    given: Given | None,
    deterministic: bool | None,
) -> Any:
    """A call whose tensors are not plain ones, or that a mode of torch (fake tensors) or a trace watches."""
    arguments = (q, k, v, mask, score_mod, scale, layout, return_lse, given)
    tensors = (q, k, v)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        check(*arguments)
    if sharded.is_sharded(*tensors):

        def local(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod | None) -> Any:
            return _unusual(q, k, v, mask, score_mod, scale, layout, return_lse, given, deterministic)

        return sharded.attention(local, q, k, v, mask, score_mod, layout, given)
    plain = all(type(each) in (Tensor, torch.nn.Parameter) for each in tensors)
    with _naming_classes(*tensors):
        if _differentiated(*tensors, given, mask, score_mod):
            if _watched():
                return _differentiable_in_a_trace(deterministic, *arguments)
            call = check(*arguments)
            if plain:
                return _differentiable(call, deterministic)
            return as_result(torch_path.attention(_ordered(call, deterministic)))
        return _serve(*arguments) if plain and not _watched() else op.traced(_OPERATOR, *arguments)


def _packed(*arguments: Any) -> Any:
    """A call of packed sequences."""
    if _packed_differentiated(*arguments):
        return _differentiable(check_packed(*arguments))
    return _serve_packed(*arguments)


def _unusual_packed(*arguments: Any) -> Any:
    """As `_unusual`."""
    tensors = arguments[:3]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        check_packed(*arguments)
    with _naming_classes(*tensors):
        if all(type(each) in (Tensor, torch.nn.Parameter) for each in tensors) and not _watched():
            return _packed(*arguments)
        return _packed_in_a_trace(*arguments)


def _packed_differentiated(q: Tensor, k: Tensor, v: Tensor, *sizes_and_rules: Any) -> bool:
    *_, mask, score_mod, _, _, sinks, _ = sizes_and_rules
    return _differentiated(q, k, v, None if sinks is None else Given(sinks=sinks), mask, score_mod)


def _packed_in_a_trace(*arguments: Any) -> Any:
    """A call as an operator, which alone lets a trace vary where sequences begin."""
    if not _packed_differentiated(*arguments):
        return op.traced_packed(_OPERATOR_PACKED, *arguments)
    if transformed():
        raise InvalidArgument(
            "an attention_varlen under forward-mode AD or a transform of torch.func is in no graph, for "
            "torch's operations ask where sequences begin; call it outside of the trace, or compile without "
            "fullgraph=True, which goes on without a graph here"
        )
    *told, return_lse, sinks, dropout = arguments
    check_return_lse(return_lse)
    given = (*told, True, sinks, dropout, _is_ordered(None))
    out, lse = op.traced_packed(_OPERATOR_PACKED, *given)
    return (out, lse) if return_lse else out


@contextmanager
def _naming_classes(*tensors: Tensor) -> Iterator[None]:
    """Says of which class tensors are where that class lacks an operator."""
    odd = [type(each).__name__ for each in tensors if type(each) not in (Tensor, torch.nn.Parameter)]
    try:
        yield
    except (TypeError, NotImplementedError) as error:  # what a class of tensors says to an operator it lacks
        if not odd or isinstance(error, FlashGenError):
            raise
        raise InvalidArgument(
            f"tensors of class {odd[0]} do not let this be computed ({str(error).splitlines()[0]}); "
            "give plain tensors"
        ) from error


# The dispatcher and what it is made of


@lru_cache(maxsize=1)
def _dispatcher() -> Dispatcher:
    """The process's dispatcher, made at the first call on a GPU."""
    from flashgen.build.device import current_target

    return Dispatcher(
        _policy(),
        current_target,
        _stream_of(),
        on_miss=SETTINGS.on_miss,
        tune=_tune_one,
        check_values=SETTINGS.check_values == "1",
    )


def _policy(db: str | None = None) -> Policy:
    """The database, then the shipped records, then defaults; bundles are added as they are loaded."""
    stores: tuple[tuple[str, Callable[[], TuningDB | ShippedRecords]], ...] = (
        ("database", lambda: _database(SETTINGS.db_url(db))),
        ("shipped records", _shipped),
    )
    return Policy(
        sources=[
            Source(label, open, _compile_and_load, marks=_marks(open, _versions_here))
            for label, open in stores
        ],
        load=_compile_and_load,
    )


def _marks(
    store: Callable[[], TuningDB | ShippedRecords | Bundle], here: Callable[[], Versions]
) -> Callable[[Record], tuple[str, ...]]:
    """See `Source.marks`; `here`: what the store's kernels are compiled and run with."""

    def marks(record: Record) -> tuple[str, ...]:
        stale = ("stale, another kernel was measured (flashgen db revalidate)",)
        return (stale if store().stale(record) else ()) + record.versions.unlike(here())

    return marks


@lru_cache(maxsize=1)
def _versions_here() -> Versions:
    """This process's; what is not installed is empty."""
    from flashgen.build.versions import driver_version

    found = {"triton": "", "driver": ""}
    with suppress(ImportError):
        found["triton"] = _versions().triton
    with suppress(LaunchFailed):
        found["driver"] = driver_version()
    return Versions(VERSION, torch=str(torch.__version__), **found)


_databases: dict[str, TuningDB] = {}
_opening = threading.Lock()


def _database(url: str) -> TuningDB:
    """The record database as dispatching reads it: nothing is made or upgraded. Open until `_forget`.

    One that cannot be opened is told once, for calls are answered without it.
    """
    from flashgen.store.db import TuningDB
    from flashgen.store.notices import warn_once
    from flashgen.store.today import current_hash

    with _opening:
        if url not in _databases:
            if len(_databases) >= MAX_DATABASES:
                _databases.pop(next(iter(_databases))).close()
            try:
                _databases[url] = TuningDB(url, readonly=True, current_hash=current_hash)
            except StoreError as error:
                warn_once(f"{error}. Its records are not used")
                raise
        return _databases[url]


@lru_cache(maxsize=1)
def _shipped() -> ShippedRecords:
    from flashgen.store.shipped import ShippedRecords
    from flashgen.store.today import current_hash

    return ShippedRecords(current_hash=current_hash)


def _compile_and_load(request: Request, config: Config) -> Launchable:
    from flashgen.build.compile import compile_kernel, toolchain
    from flashgen.build.launch import load_kernel
    from flashgen.codegen.source import render

    source = render(request.workload.spec, config, toolchain())
    return load_kernel(compile_kernel(source, request.facts, request.target), request.device)


def set_policy(on_miss: str) -> None:
    """Sets what a call on a GPU does that no measured record of its own bucket serves.

    Args:
        on_miss: `default`: the nearest record, or the family's default config; `tune`: tune first, which
            takes minutes; `record`: as `default`, and note the shape for `flashgen tune --misses`; `error`:
            raise `NoTunedKernel` where no record serves at all.

    Raises:
        InvalidArgument: no such policy.
    """
    _dispatcher().set_on_miss(on_miss)


def load_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Verifies a bundle and serves calls from it before anything else.

    Loading a folder again replaces what was loaded from it.

    Raises:
        BundleError: it is damaged, of another format, or for another GPU; nothing of it is used.
    """
    from flashgen.bundle.load import load_bundle as load

    bundle = load(path)

    def kernel(request: Request, config: Config) -> Launchable:
        return bundle.kernel(request.workload.spec, config, request.facts, request.device)

    def fallback(request: Request) -> Config | None:
        if request.target != bundle.target:
            return None
        return bundle.fallback(request.workload.spec, request.facts, request.refuses)

    def here() -> Versions:
        return replace(_versions_here(), triton=bundle.manifest.versions.triton)

    place = Path(path).resolve()
    marks = _marks(lambda: bundle, here)
    _dispatcher().add_bundle(
        Source(f"bundle {place.name}", lambda: bundle, kernel, fallback, str(place), marks)
    )
    return bundle


# Looking ahead


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike = None,
    score_mod: ScoreModLike = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    dropout_p: float = 0.0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool | None = None,
) -> Explanation:
    """What a call would run, and why every other step was passed over; print it.

    Takes the arguments of `attention`, or those of `sdpa` (attn_mask, is_causal, enable_gqa), or
    those of `attention_varlen` (cu_seqlens_q and what goes with it).
    A kernel that would have to be compiled is compiled; nothing is launched.

    Raises:
        InvalidArgument: as the call itself, or arguments of both were mixed.
    """
    if deterministic is not None:
        check_deterministic(deterministic)
    q, k, v = autocasted(q, k, v)
    given = Given(q_descale, k_descale, v_descale, out_dtype, sinks)
    if attn_mask is not None or is_causal is not False or enable_gqa is not False:
        if mask is not None or score_mod is not None or layout != "bhsd" or return_lse or given != Given():
            raise InvalidArgument(
                "explain got arguments of attention (mask, score_mod, sinks, layout, return_lse, those "
                "of 8-bit tensors) and of sdpa (attn_mask, is_causal, enable_gqa); give one kind"
            )
        translated = translate(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if isinstance(translated, str) and isinstance(q, Tensor):
            return Explanation.of_torch(
                "sdpa", str(q.device), F.scaled_dot_product_attention.__name__, translated
            )
        mask = translated
    dropout = as_dropout(dropout_p, q, draw=False)
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    dense = all(each is None for each in packed)
    if _to_be_made(mask, score_mod):
        sizes = _sizes(q, k, layout) if dense else _packed_sizes(q, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
        mask, score_mod = _traced(mask, score_mod, sizes)
    call: Call
    if dense:
        given = given._replace(dropout=dropout)
        call = check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
    elif layout != "bhsd" or given != Given(sinks=sinks):
        raise InvalidArgument(
            "explain got arguments of attention_varlen (cu_seqlens_q, ...), which takes no layout and no "
            "8-bit tensors; a call has only one kind"
        )
    else:
        call = check_packed(q, k, v, *packed, mask, score_mod, scale, return_lse, sinks, dropout)
    if transformed():
        return explanations.explain_without_kernel(call, IS_TRANSFORMED)
    needed = _differentiated(q, k, v, given, call.mask, call.score_mod)
    call = _ordered(call, deterministic)
    if needed and (reason := gradients.refused(call, _without_gradients)):
        return explanations.explain_without_kernel(call, f"a gradient is needed: {reason}")
    if call.empty:
        return Explanation.of_nothing(explanations.describe_call(call), str(q.device))
    if not q.is_cuda:
        return explanations.explain_without_kernel(
            call, f"kernels run on CUDA, the tensors are on {q.device}", "the reference in float32"
        )
    return _dispatcher().explain(call, q.get_device(), gradients=needed)


def explain_workload(
    workload: Workload,
    target: Target | str | None = None,
    *,
    facts: CallFacts | None = None,
    db: str | None = None,
) -> Explanation:
    """What calls of a workload would run on a GPU, judged without one: nothing is compiled or loaded.

    Args:
        target: a row of `spec.target.TARGETS` or its name; by default this machine's GPU.
        facts: the kind of call; by default one on freshly allocated tensors.
        db: the record database, by default the user's.

    Raises:
        UnknownName: no such target.
        NoGPU: no target was given, and this machine has none.
    """
    return explanations.explain_workload(
        _policy(db), workload, _target(target), facts or _usual_facts(workload)
    )


def best_record(
    workload: Workload,
    target: Target | str | None = None,
    facts: CallFacts | None = None,
    *,
    db: str | None = None,
) -> Record | None:
    """The tuned record whose config serves a workload; None if a default config would."""
    request = Request(workload, facts or _usual_facts(workload), _target(target))
    return _policy(db).decide(request, loading=False).record


def warmup(what: Workloads, *, device: int = 0) -> tuple[Explanation, ...]:
    """Compiles and loads, ahead of the first call, what calls of these workloads run on a GPU.

    Args:
        what: a suite's name, the path of a model's config.json, or workloads.
        device: index of the GPU.

    Raises:
        InvalidArgument: an unknown suite, or a file that is no model's config.
        NoGPU: this machine has none.
    """
    workloads = workloads_of(what)
    with _naming_targets(
        "warmup loads kernels into a GPU of this machine: run it where the calls run; "
        "explain_workload(workload, target=NAME) says what that is, tune and export take target=NAME too"
    ):
        return tuple(_dispatcher().warm(workload, _usual_facts(workload), device) for workload in workloads)


def workloads_of(what: Workloads) -> tuple[Workload, ...]:
    """The workloads that a suite's name, a model's config.json, or workloads stand for.

    Raises:
        UnknownName: no such suite; the known ones are listed.
        InvalidArgument: a file that is no model's config, or something else.
    """
    if isinstance(what, Workload):
        return (what,)
    if isinstance(what, str | os.PathLike):
        from flashgen.tune.suites import suite_workloads, workloads_from_hf_config

        path = Path(what)
        if not isinstance(what, str) or path.suffix == ".json" or (what and path.exists()):
            return workloads_from_hf_config(path)
        return suite_workloads(what)
    found = tuple(what) if isinstance(what, Iterable) else (what,)
    for each in found:
        if not isinstance(each, Workload):
            raise InvalidArgument(
                f"{each!r} is no workload; "
                "give a suite's name, the path of a model's config.json, or workloads"
            )
    return found


def _usual_facts(workload: Workload) -> CallFacts:
    from flashgen.build.inputs import contiguous_facts

    return contiguous_facts(workload)


def _target(target: Target | str | None, device: int = 0) -> Target:
    if isinstance(target, Target):
        return target
    if target is not None:
        return find_target(target)
    from flashgen.build.device import current_target

    with _naming_targets():
        return current_target(device)


@contextmanager
def _naming_targets(otherwise: str = "target=NAME works without one") -> Iterator[None]:
    """Adds to the error of a machine without a GPU what to do instead, for another machine's."""
    try:
        yield
    except NoGPU as error:
        raise NoGPU(f"{error}\n{otherwise}; known: {', '.join(TARGETS)}") from error


# Tuning and export


class _Bench(NamedTuple):
    """What candidates are compiled and measured with."""

    measurers: dict[str, Measurer]
    """By the name of what they measure on."""
    compiler: CompilePool
    target: Target
    versions: Versions


@contextmanager
def _bench(target: Target | None, devices: Sequence[int], jobs: int | None) -> Iterator[_Bench]:
    """Of live GPUs of one kind, or offline for a target, where a model stands for the measurements."""
    from flashgen.build.compile import toolchain
    from flashgen.measure.compile_pool import CompilePool

    with ExitStack() as stack:
        if target is not None:
            from flashgen.tune.model import ModelMeasurer

            compiler = stack.enter_context(CompilePool(target, toolchain(), jobs))
            yield _Bench({"the model": ModelMeasurer(target)}, compiler, target, _versions())
        else:
            from flashgen.measure.worker import Worker

            workers = [stack.enter_context(Worker(device)) for device in devices]
            machine = workers[0].machine()  # the others start when their own threads first ask them
            compiler = stack.enter_context(
                CompilePool(machine.target, toolchain(), jobs, studies=len(workers))
            )
            named: dict[str, Measurer] = {f"GPU {d}": w for d, w in zip(devices, workers, strict=True)}
            yield _Bench(named, compiler, machine.target, _versions(machine.torch, machine.driver))


def tune(
    what: Workloads,
    *,
    target: Target | str | None = None,
    device: int | Sequence[int] | str | None = None,
    plan: Plan | None = None,
    progress: Callable[[Progress], None] | None = None,
    db: str | None = None,
    jobs: int | None = None,
) -> TuneResult:
    """Finds the fastest correct kernel of each workload and stores everything measured.

    Args:
        what: a suite's name, the path of a model's config.json, or workloads.
        target: work offline for this GPU: candidates are compiled and ranked by a model, nothing is
            measured.
        device: index of the GPU to measure on, or indices, or `all`: several GPUs of one kind share the
            workloads. Where neither is given, the setting FLASHGEN_TARGET says the target; without it, this
            machine's first GPU is measured on.
        plan: trials, budget and strategy.
        progress: called after each trial, one call at a time; with several GPUs in threads of their own.
        db: the record database, by default the user's.
        jobs: processes that compile, by default one for each core.

    Raises:
        InvalidArgument: an unknown suite or target, both a target and a device, GPUs that differ, or no
            number of processes.
        NoGPU: nothing to measure on.
        StoreError: the database cannot be opened.
    """
    from flashgen.build.device import alike_gpus
    from flashgen.measure.compile_pool import check_jobs
    from flashgen.store.db import TuningDB
    from flashgen.store.today import current_hash
    from flashgen.tune.tuner import tune as run

    check_jobs(jobs)
    workloads = workloads_of(what)
    offline = _offline(target, device)
    try:
        with TuningDB(SETTINGS.db_url(db), current_hash=current_hash) as store, ExitStack() as stack:
            with _naming_targets():
                devices = () if offline is not None else tuple(alike_gpus(0 if device is None else device))
                bench = stack.enter_context(_bench(offline, devices, jobs))
            return run(workloads, store=store, plan=plan, progress=progress, **bench._asdict())
    finally:
        _forget()


def _offline(target: Target | str | None, device: int | Sequence[int] | str | None) -> Target | None:
    """What to tune offline for; None for measuring on this machine's GPU."""
    if target is not None and device is not None:
        raise InvalidArgument(f"{target=} is offline work, {device=} a GPU of this machine: leave out one")
    if target is None and device is None:
        target = SETTINGS.target or None
    return None if target is None else _target(target)


def dry_run(
    what: Workloads,
    *,
    target: Target | str | None = None,
    device: int | None = None,
    plan: Plan | None = None,
    db: str | None = None,
    jobs: int | None = None,
) -> DryRun:
    """What `tune` with these arguments would try, and how long it may take; writes and compiles nothing.

    Raises:
        InvalidArgument: an unknown suite or target, both a target and a device, or no number of processes.
        NoGPU: no target was given, and this machine has no such GPU.
        StoreError: the database cannot be opened.
    """
    from flashgen.build.compile import toolchain
    from flashgen.measure.compile_pool import check_jobs, default_jobs
    from flashgen.measure.replay import NoCompiler
    from flashgen.store.db import TuningDB
    from flashgen.store.today import current_hash
    from flashgen.tune.dry_run import dry_run as run

    check_jobs(jobs)
    workloads, offline = workloads_of(what), _offline(target, device)
    most = default_jobs()  # more processes share the cores, or wait for something to compile
    with TuningDB(SETTINGS.db_url(db), readonly=True, current_hash=current_hash) as store:
        return run(
            workloads,
            store=store,
            target=offline or _target(None, device or 0),
            source="measured" if offline is None else "model",
            compiler=NoCompiler(toolchain()),
            versions=_versions(),
            jobs=most if jobs is None else min(jobs, most),
            plan=plan,
        )


def simulate(
    files: Iterable[str | os.PathLike[str]],
    samplers: Sequence[str] = (),
    *,
    trials: int | None = None,
    share: float | None = None,
    seeds: int | None = None,
    noise: float = 0.0,
    plan: Plan | None = None,
    progress: Callable[[int, int, Score], None] | None = None,
) -> Simulation:
    """Replays recorded measurements of whole spaces through the tuner, to compare samplers; needs no GPU.

    Args:
        files: of records, one a line, as `flashgen db export` writes them.
        samplers: rows of the table of samplers; by default all that run here but the exhaustive ones.
        trials: at most so many for each workload and kernel family.
        share: in place of `trials`, that part of the feasible space; by default a tenth.
        seeds: runs of each sampler on each workload, by default 20.
        noise: relative standard deviation of a fresh factor on each quick timing.
        plan: the rest of what a run is told; its sampler, trials and seed are replaced.
        progress: called after each sampler and workload: how many are done, of how many, and the last one.

    Raises:
        InvalidArgument: an unknown sampler, a number out of range, a line that is no record, records of
            several GPUs, or a workload of which more than a tenth of the feasible configs is not recorded.
        StoreError: a file cannot be read.
    """
    from flashgen.store.transfer import read_records
    from flashgen.tune.simulate import SEEDS
    from flashgen.tune.simulate import simulate as run

    return run(
        read_records(map(Path, files)),
        samplers,
        trials=trials,
        share=share,
        seeds=SEEDS if seeds is None else seeds,
        noise=noise,
        plan=plan,
        progress=progress,
    )


@contextmanager
def remeasurer(device: int = 0, records: Sequence[Record] = ()) -> Iterator[Callable[[Record], Record]]:
    """Within it, a function that measures a record's config and workload again with today's kernel.

    Args:
        records: what will be measured: their kernels are compiled ahead, one on each core.

    Raises:
        LaunchFailed: there is no such GPU.
    """
    from flashgen.build.device import alike_gpus
    from flashgen.build.inputs import contiguous_facts
    from flashgen.measure.worker import Trial

    with _bench(None, tuple(alike_gpus(device)), None) as bench:
        (measurer,) = bench.measurers.values()

        def submit(old: Record) -> tuple[KernelSource, Future[Compiled]]:
            source = bench.compiler.source(old.workload.spec, old.config)
            return source, bench.compiler.submit(source, contiguous_facts(old.workload))

        ahead = {id(old): submit(old) for old in records}

        def again(old: Record) -> Record:
            source, compiling = ahead.pop(id(old)) if id(old) in ahead else submit(old)
            compiled = compiling.result()
            density = measurer.prepare(old.workload)
            trial = Trial(old.workload, old.config, compiled.artifact)
            return replace(
                old,
                target=bench.target,
                measurement=compiled.failure or measurer.measure(trial),
                kernel_hash=source.hash,
                versions=bench.versions,
                density=density,
                created_at=datetime.now(timezone.utc).isoformat(),
            )

        yield again


def _tune_one(workload: Workload, device: int) -> None:
    """Tunes what a call missed, in a minute or two."""
    from flashgen.tune.plan import Plan

    # For the GPU that calls are dispatched for, which is not the one they run on where a setting pretends.
    pretended = SETTINGS.target or None
    plan = Plan(trials=32, budget_s=120.0)
    result = tune(workload, target=pretended, device=None if pretended else device, plan=plan)
    if result.problem:
        raise LaunchFailed(result.problem)


def export(
    what: Workloads,
    out: str | os.PathLike[str],
    *,
    target: Target | str | None = None,
    db: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Path:
    """Packs the tuned kernels of workloads into a bundle, which runs without compiler and database.

    For each workload the best record for aligned calls and the best for any call, compiled with and without
    the LSE, and for each spec one untuned kernel that serves whatever else may be called. The kernels
    are today's: a stale record is exported too, and marked in the manifest, by `verify` and by `explain`.

    Args:
        what: a suite's name, the path of a model's config.json, or workloads.
        out: a new or empty folder, or an older bundle, which is replaced.
        target: the GPU to pack for; by default this machine's.
        db: the record database, by default the user's.
        progress: called after each kernel: how many are compiled, of how many, and what it is.

    Raises:
        InvalidArgument: an unknown suite or target, or `out` is something else; nothing was compiled.
        NotTuned: a workload has no record on the target; all such are named.
        NoGPU: no target was given, and this machine has none.
        CompileFailed: a recorded kernel does not compile any more.
        BundleError: the folder cannot be written.
    """
    from flashgen.build.compile import toolchain
    from flashgen.bundle.manifest import BundledKernel
    from flashgen.bundle.write import ANY_CALL, check_place, fallback, wanted, write_bundle
    from flashgen.codegen.source import render
    from flashgen.errors import CompileFailed
    from flashgen.measure.compile_pool import CompilePool
    from flashgen.store.today import Staleness, current_hash

    check_place(Path(out))  # before minutes of compiling
    to, workloads = _target(target), workloads_of(what)
    records: dict[Record, None] = {}
    kinds: dict[tuple[Any, ...], None] = {}
    missing = []
    for workload in workloads:
        winners = _winners(workload, to, db)
        if not winners:
            missing.append(f"{workload.name} of [{workload.spec.key}]")
        records |= dict.fromkeys(winners)
        for record in winners:
            for spec, facts in wanted(workload.spec, record.admission):
                kinds[spec, record.config, facts] = None
        for spec, facts in wanted(workload.spec, "any"):
            config = fallback(spec, to, workload.heads_per_kv)
            if facts == ANY_CALL and config is not None:
                kinds[spec, config, facts] = None
    if missing:
        listed = "\n  ".join(missing)
        raise NotTuned(f"no tuned record on {to.describe()} for:\n  {listed}\ntune first")
    with CompilePool(to, toolchain()) as pool:
        sources = [(render(spec, config, toolchain()), facts) for spec, config, facts in kinds]
        compiled = [(source, facts, pool.keep(source, facts)) for source, facts in sources]
        kernels = []
        for number, (source, facts, future) in enumerate(compiled, 1):
            answer = future.result()
            if answer.artifact is None:
                assert answer.failure is not None
                raise CompileFailed(f"{source.name}: {answer.failure.reason}")
            if progress is not None:
                progress(number, len(compiled), f"{source.name}, {explanations.describe_facts(facts, to)}")
            kernels.append(BundledKernel(source.spec, source.config, source.text, answer.artifact))
    stale = list(filter(Staleness(current_hash), records))
    return write_bundle(tuple(records), kernels, Path(out), to, _versions(), stale)


def _winners(workload: Workload, target: Target, db: str | None) -> list[Record]:
    """The best record of a workload's own bucket for each admission class; measured before modelled."""
    from flashgen.codegen.families import foreign

    found: dict[str, Record] = {}
    stores = [source.open() for source in _policy(db).sources]
    bucket = workload.bucket()
    exact = [
        record
        for store in stores
        for record in store.ranked(workload, target)
        if record.workload.bucket() == bucket and not foreign(record.config)
    ]
    for record in sorted(exact, key=lambda record: record.measurement.source == "model"):
        found.setdefault(record.admission, record)
    return list(found.values())


def _versions(torch_version: str = "", driver: str = "") -> Versions:
    """What records and bundles say they were made with."""
    from flashgen.build.versions import triton_version

    return Versions(VERSION, triton_version(), torch_version, driver)


def _forget() -> None:
    """Lets the next calls see new records."""
    with _opening:
        while _databases:
            _databases.popitem()[1].close()
    if _dispatcher.cache_info().currsize:
        _dispatcher().forget()
