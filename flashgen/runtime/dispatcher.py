"""The dispatcher: a plain key, a dictionary, a launch; everything else happens once for each kind of call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashgen.build.arguments import (
    FACTS,
    facts_code,
    flatten,
    flatten_gradients,
    flatten_packed,
    gradients_code,
)
from flashgen.build.dropout import Dropout
from flashgen.build.learned import Learned
from flashgen.build.quantized import E4M3
from flashgen.codegen.families import serving
from flashgen.errors import FlashGenError, InvalidArgument, LaunchFailed, NoTunedKernel, Unsupported
from flashgen.runtime import torch_path
from flashgen.runtime.checks import (
    DTYPE_NAMES,
    MAX_SCALE,
    MIN_SCALE,
    SIZES_AT,
    Call,
    Given,
    OperandAxes,
    Reached,
    as_mask,
    as_quantized,
    as_scale,
    as_score_mod,
    as_sinks,
    check,
    fp32_precision,
    operand_axes,
)
from flashgen.runtime.explain import Explanation, describe_call, describe_workload, explained
from flashgen.runtime.misses import MissLog
from flashgen.runtime.packed import PackedCall, check_packed, packed_sinks
from flashgen.runtime.policy import (
    Decision,
    Launchable,
    Loader,
    Policy,
    Request,
    Source,
)
from flashgen.settings import MISS_POLICIES
from flashgen.spec.attention import (
    MAX_INDEX,
    CallFacts,
    Workload,
    length_code,
    number_code,
)
from flashgen.spec.config import Config
from flashgen.spec.masks import Mask, check_grids, check_packed_grids
from flashgen.spec.rule import values_and_tensors
from flashgen.spec.target import Target

log = logging.getLogger("flashgen")

MAX_PLANS = 4096
"""Kinds of calls remembered; when full, all are forgotten and found again at once (kernels stay loaded)."""
MAX_NUMBERS = 4096

_FLOAT32 = torch.float32
_STRIDED = frozenset(code for code, facts in enumerate(FACTS) if facts.access == "strided")
"""Only such a call has a tensor negated lazily, the imaginary part of a conjugate: its elements lie apart."""
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Result = Tensor | tuple[Tensor, Tensor]
Launch = Callable[[tuple[Any, ...], int], None]


_KERNEL_CANNOT_RUN = frozenset({200, 209, 218, 222, 300, 303, 400, 500, 701})
"""CUresults of a launch that will fail every time: not an image for this GPU (200 to 303), its module is gone
(400, 500), out of resources (701). Any other is of one call or one moment, as a geometry that no descriptor
expresses, or memory that is short, and costs that call its kernel."""

_CONTEXT_IS_DEAD = frozenset({4, 214, 220, 700, 702, 709, 710, *range(714, 720), 999})
"""CUresults that every call on a GPU gives once any kernel has failed there (700: illegal address; time-out,
assertion, illegal instruction), or the memory or the link has."""


class Plan:
    """What a kind of call does: launches a kernel, or (without one) runs a function of torch's."""

    __slots__ = ("kernel", "launch", "otherwise")

    def __init__(
        self,
        kernel: Launchable | None,
        otherwise: Callable[[Call], tuple[Tensor, Tensor | None]] = torch_path.attention,
    ) -> None:
        self.kernel = kernel
        self.launch: Launch | None = None if kernel is None else kernel.launch
        self.otherwise = otherwise


class Dispatcher:
    """Serves calls on CUDA tensors, and their gradients; `runtime.gradients` brings the two together.

    Args:
        policy: the candidates and their order.
        target_of: device index -> the facts of that GPU.
        stream_of: device index -> handle of the current stream; read at every call.
        capturing: whether a CUDA graph is being captured on the current stream; asked on a miss only.
        on_miss: `default`, `tune`, `record` or `error`, see `settings.MISS_POLICIES`.
        tune: tunes a workload on a GPU and stores the records; for `on_miss="tune"`.
        misses: where `on_miss="record"` notes shapes.
        check_values: whether places of packed sequences are looked at on the GPU, which waits for it.

    Thread-safe: a miss is resolved under a lock, though nothing is tuned under it. A hit takes only the lock
    of its kernel, whose launch parameters are in one place: 0.1 us, unless two threads launch it at once.
    """

    def __init__(
        self,
        policy: Policy,
        target_of: Callable[[int], Target],
        stream_of: Callable[[int], int],
        *,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        on_miss: str = "default",
        tune: Callable[[Workload, int], None] | None = None,
        misses: MissLog | None = None,
        check_values: bool = False,
    ) -> None:
        self._policy = policy
        self._check_values = check_values
        self._target_of = target_of
        self._stream_of = stream_of
        self._capturing = capturing
        self._tune = tune
        self._misses = misses or MissLog()
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._numbers: dict[tuple[float, ...], tuple[int, ...]] = {}
        self._kernels: dict[tuple[Any, ...], Launchable] = {}
        self._refused: dict[tuple[Any, ...], str] = {}
        self._tuned: set[tuple[Any, ...]] = set()  # being tuned, or done
        self._told: set[object] = set()
        self._without_gradients: dict[tuple[Any, ...], str] = {}
        self._lock = threading.RLock()
        self.resolves = 0
        """How many misses were resolved."""
        self.set_on_miss(on_miss)

    # The hot path. Host time: 17 us a call, of which environment and facts take 3 and the launch 6; torch's
    # own scaled_dot_product_attention takes 20 (benchmarks/NOTES.md, the first of two machines).

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        score_mod: Any,
        scale: Any,
        layout: str,
        return_lse: bool,
        given: Given | None = None,
    ) -> Result:
        """See `flashgen.attention`; the tensors are plain ones on a GPU.

        Raises:
            InvalidArgument: as `checks.check`, before anything is launched.
        """
        if type(mask) is not Mask:
            mask = as_mask(mask)
        rule, values, tensors, score_text = mask.rule, mask.values, mask.tensors, None
        if score_mod is not None:
            score_mod = as_score_mod(score_mod)
            if score_mod is not None:
                score_text = score_mod.rule.text
                values, tensors = values + score_mod.values, tensors + score_mod.tensors

        # The key holds rounded sizes, so what must agree exactly is compared here. An axis of another
        # layout has another meaning, but batch stays first, head dim last, and k and v alike between.
        q_shape, k_shape, v_shape, dtype, device = q.shape, k.shape, v.shape, q.dtype, q.get_device()
        same_dims = k_shape == v_shape and len(q_shape) == len(k_shape) == 4 and k_shape[3] == q_shape[3]
        if not (
            (same_dims or _agree(q_shape, k_shape, v_shape))
            and k_shape[0] == q_shape[0]
            and k.dtype is dtype
            and v.dtype is dtype
            and k.get_device() == device == v.get_device()
            and (layout == "bhsd" or layout == "bshd")
            and (return_lse is False or return_lse is True)
            and (not tensors or _given(tensors, device))
        ):
            check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
        if scale is None:
            scale = q_shape[3] ** -0.5 if q_shape[3] else 1.0
        elif type(scale) is not float or not MIN_SCALE <= scale <= MAX_SCALE:
            scale = as_scale(scale, q_shape[3])  # negative, 0, an int, or nothing that is allowed

        folded, sinks, dropout = scale, None, None
        if given is None and dtype is not E4M3:
            quantized = None
            out = torch.empty_like(q) if same_dims else torch_path.empty_output(q, layout, v_shape[3])
        else:
            quantized = as_quantized(given, q, k, layout)
            out_dtype = dtype if quantized is None else quantized.out_dtype
            out = torch_path.empty_output(q, layout, v_shape[3], out_dtype)
            folded = scale if quantized is None else quantized.folded(scale)
            if given is not None:
                sinks, dropout = as_sinks(given.sinks, q, layout), given.dropout
        lse = None
        if return_lse:
            lse = q.new_empty(q_shape[:3] if layout == "bhsd" else _rows(q_shape), dtype=torch.float32)
        try:
            env = flatten(q, k, v, out, lse, folded, values, tensors, layout)
        except ZeroDivisionError:  # no key heads at all
            check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
            raise
        batch, heads, kv_heads, heads_per_kv, q_len, k_len, head_dim, head_dim_v = env[
            SIZES_AT : SIZES_AT + 8
        ]
        if values:
            check_grids(rule, values, q_len, k_len)
        if tensors and not _fit(tensors, operand_axes(rule, score_mod), env):
            check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
        if quantized is not None:
            env += quantized.entries(kv_heads, heads_per_kv)
        if sinks is not None:
            env += (sinks.data_ptr(), *sinks.stride())
        if dropout is not None:
            env += dropout.entries()

        code = facts_code(env, q.itemsize, tensors)
        if code in _STRIDED and (q.is_neg() or k.is_neg() or v.is_neg()):
            q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()  # memory holds the values negated
            return self.attention(q, k, v, mask, score_mod, scale, layout, return_lse, given)
        key = (
            code,
            rule.text,
            score_text,
            dtype,
            device,
            heads,
            kv_heads,
            head_dim,
            head_dim_v,
            (batch - 1).bit_length() if batch else -1,  # as `length_code`, without the call
            (q_len - 1).bit_length() if q_len else -1,
            (k_len - 1).bit_length() if k_len else -1,
            (self._numbers.get(values) or self._number_codes(values)) if values else None,
            folded > 0.0,
            lse is None,
            fp32_precision() if dtype is _FLOAT32 else None if quantized is None else quantized.out_dtype,
            None if sinks is None else sinks.dtype,
            dropout is None,
        )
        plan = self._plans.get(key)
        if plan is None:
            call = check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
            plan = self._resolve(key, call, code, device)
        launch = plan.launch
        if launch is None:
            call = Call(q, k, v, mask, score_mod, scale, layout, return_lse, quantized, sinks, dropout)
            return as_result(plan.otherwise(call))
        try:
            launch(env, self._stream_of(device))
        except (LaunchFailed, InvalidArgument) as error:
            if self._refuse(plan, error):
                return self.attention(q, k, v, mask, score_mod, scale, layout, return_lse, given)
            call = Call(q, k, v, mask, score_mod, scale, layout, return_lse, quantized, sinks, dropout)
            return as_result(plan.otherwise(call))
        return out if lse is None else (out, lse)

    def attention_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: Any,
        max_k: Any,
        mask: Any,
        score_mod: Any,
        scale: Any,
        return_lse: bool,
        sinks: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> Result:
        """See `flashgen.attention_varlen`; the tensors are plain ones on a GPU. As `attention`, of packed
        sequences.

        Raises:
            InvalidArgument: as `packed.check_packed`, before anything is launched.
        """
        if type(mask) is not Mask:
            mask = as_mask(mask)
        rule, values, tensors, score_text = mask.rule, mask.values, mask.tensors, None
        if score_mod is not None:
            score_mod = as_score_mod(score_mod)
            if score_mod is not None:
                score_text = score_mod.rule.text
                values, tensors = values + score_mod.values, tensors + score_mod.tensors

        dtype, device = q.dtype, q.get_device()
        if self._check_values or not _packed_agree(q, k, v, cu_q, cu_k, max_q, max_k, return_lse):
            given = (q, k, v, cu_q, cu_k, max_q, max_k, mask, score_mod, scale, return_lse, sinks, dropout)
            call = check_packed(*given, values=self._check_values)
            cu_q, cu_k, max_q, max_k = call.cu_q, call.cu_k, call.max_q, call.max_k
        q_tokens, heads, head_dim = q.shape
        k_tokens, kv_heads, head_dim_v = v.shape
        sequences = cu_q.shape[0] - 1
        if scale is None:
            scale = head_dim**-0.5 if head_dim else 1.0
        elif type(scale) is not float or not MIN_SCALE <= scale <= MAX_SCALE:
            scale = as_scale(scale, head_dim)
        if sinks is not None:
            sinks = packed_sinks(sinks, q)
        arguments = (q, k, v, cu_q, cu_k, max_q, max_k, mask, score_mod, scale, return_lse, sinks, dropout)
        if values:
            check_packed_grids(rule, values, sequences, max_k, k_tokens)
        if tensors:
            sizes = (sequences, heads, kv_heads, heads // kv_heads, max_q, max_k, head_dim, head_dim_v)
            # As a dense call's environment has them.
            counted = (*((None,) * SIZES_AT), *sizes, scale, *values)
            if not (_given(tensors, device) and _fit(tensors, operand_axes(rule, score_mod), counted)):
                check_packed(*arguments)

        out = torch_path.empty_output(q, "bshd", head_dim_v)
        lse = q.new_empty((heads, q_tokens), dtype=_FLOAT32) if return_lse else None
        env = flatten_packed(q, k, v, out, lse, cu_q, cu_k, scale, values, tensors)
        if sinks is not None:
            env += (sinks.data_ptr(), *sinks.stride())
        if dropout is not None:
            env += dropout.entries()
        code = facts_code(env, q.itemsize, tensors)
        if code in _STRIDED and (q.is_neg() or k.is_neg() or v.is_neg()):
            q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()  # memory holds the values negated
            return self.attention_varlen(q, k, v, *arguments[3:])
        key = (
            code,
            rule.text,
            score_text,
            dtype,
            device,
            heads,
            kv_heads,
            head_dim,
            head_dim_v,
            (sequences - 1).bit_length() if sequences else -1,
            (max_q - 1).bit_length() if max_q else -1,
            (max_k - 1).bit_length() if max_k else -1,
            (self._numbers.get(values) or self._number_codes(values)) if values else None,
            scale > 0.0,
            lse is None,
            fp32_precision() if dtype is _FLOAT32 else None,
            (q_tokens - 1).bit_length() if q_tokens else -1,
            (k_tokens - 1).bit_length() if k_tokens else -1,
            None if sinks is None else sinks.dtype,
            dropout is None,
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._resolve(key, check_packed(*arguments), code, device)
        if plan.launch is None:
            return as_result(plan.otherwise(check_packed(*arguments)))
        try:
            plan.launch(env, self._stream_of(device))
        except (LaunchFailed, InvalidArgument) as error:
            if self._refuse(plan, error):
                return self.attention_varlen(*arguments)
            return as_result(plan.otherwise(check_packed(*arguments)))
        return out if lse is None else (out, lse)

    # Gradients

    def without_gradients(self, call: Call) -> str:
        """Why no family computes the gradients of a call's kind on its GPU; empty where one does."""
        q, score_mod = call.q, call.score_mod
        # What tells the specs of two calls apart: every call that needs a gradient asks, and to make its spec
        # takes ten times as long.
        kind = (
            call.mask.rule.text,
            None if score_mod is None else score_mod.rule.text,
            q.dtype,
            q.get_device(),
            q.shape[-1],
            call.v.shape[-1],
            isinstance(call, PackedCall),
            call.dropout is None,
            fp32_precision() if q.dtype is _FLOAT32 else None,
        )
        reason = self._without_gradients.get(kind)
        if reason is None:
            try:
                serving(call.workload().spec.backward(), self._target_of(q.get_device()))
                reason = ""
            except Unsupported as error:
                reason = str(error)
            if len(self._without_gradients) >= MAX_PLANS:
                self._without_gradients.clear()
            self._without_gradients[kind] = reason
        return reason

    def gradients(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        of_sinks: bool = False,
        learned: tuple[int, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v, in their dtypes and orders in memory, of the sinks, and of tensors of the
        score rule.

        Args:
            call: checked, not empty, not of 8-bit tensors.
            out, lse: what it gave; the LSE is (batch, heads, q_len), of packed sequences (heads, q tokens),
                contiguous.
            dout: the gradient of the output, on whose dtype and device it is.
            dlse: that of the LSE, contiguous, or None where it has none.
            of_sinks: whether that of the sinks is wanted, which is None otherwise.
            learned: places of the score rule's tensors whose gradients follow these.
        """
        q, k, v = (each.resolve_neg() for each in (call.q, call.k, call.v))
        layout, rule, score_mod = call.layout, call.mask.rule, call.score_mod
        values, tensors = values_and_tensors(call.mask, score_mod)
        made = [torch_path.empty_output(each, layout, each.shape[-1]) for each in (q, k, v)]
        if isinstance(call, PackedCall):
            starts = (call.cu_q, call.cu_k)
            env = flatten_packed(q, k, v, out, lse, *starts, call.scale, values, tensors)
        else:
            env = flatten(q, k, v, out, lse, call.scale, values, tensors, layout)
        entries = flatten_gradients(dout, made[0], made[1], made[2], dlse, layout)
        operands = None
        if learned and score_mod is not None:
            batch, heads, kv_heads, _, q_len, k_len = env[SIZES_AT : SIZES_AT + 6]
            counts = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "k_len": k_len}
            operands = Learned(score_mod, learned, **counts)
            tensors += tuple(operands.accumulators.values())
        code, device = gradients_code(env, entries, q.itemsize, tensors), q.get_device()
        sinks, dsinks = (call.sinks if of_sinks else None), None
        if sinks is not None:
            dsinks = sinks.new_empty(sinks.shape, dtype=_FLOAT32)
            env, entries = (*env, sinks.data_ptr(), *sinks.stride()), (*entries, dsinks.data_ptr())
        if call.dropout is not None:
            env += call.dropout.entries()
        sizes = call.sizes
        key = (
            "bwd",
            code,
            rule.text,
            None if score_mod is None else score_mod.rule.text,
            q.dtype,
            device,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.head_dim_v,
            *map(length_code, (sizes.batch, sizes.q_len, sizes.k_len, *call.totals)),
            (self._numbers.get(values) or self._number_codes(values)) if values else None,
            dlse is None,
            call.dropout is None,
            fp32_precision() if q.dtype is _FLOAT32 else None,
            None if sinks is None else sinks.dtype,
            learned,
            call.deterministic,
        )
        plan = self._plans.get(key)
        if plan is None:
            workload = call.gradients_workload(dlse is not None, sinks is not None, learned)
            target = self._target_of(device)
            plan = self._find(key, Request(workload, FACTS[code], target, device, call.deterministic))
        if plan.launch is not None:
            try:
                entries += () if operands is None else operands.entries()
                plan.launch((*env, *entries), self._stream_of(device))
                if sinks is not None and dsinks is not None:
                    dsinks = dsinks.to(sinks.dtype)
                return (*made, dsinks, *(() if operands is None else operands.gradients()))
            except (LaunchFailed, InvalidArgument) as error:
                if self._refuse(plan, error):
                    return self.gradients(call, out, lse, dout, dlse, of_sinks, learned)
        return torch_path.gradients(call, dout, dlse, of_sinks, learned)

    # A miss

    def _resolve(self, key: tuple[Any, ...], call: Call, code: int, device: int) -> Plan:
        if call.empty:
            return self._remember(key, Plan(None, torch_path.empty_result))
        return self._find(key, Request(call.workload(), FACTS[code], self._target_of(device), device))

    def _find(self, key: tuple[Any, ...], request: Request) -> Plan:
        if self._capturing():
            return self._during_capture(request)
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                return plan
            self.resolves += 1
            _, plan, tune = self._settle(key, request)
        if tune:
            self._tune_first(request)
            with self._lock:
                _, plan, _ = self._settle(key, request)
        return plan

    def _settle(self, key: tuple[Any, ...], request: Request) -> tuple[Decision, Plan, bool]:
        """Decides and remembers, under the lock; also whether the caller is to tune first, without it."""
        decision, tune = self._follow_policy(request)
        return decision, self._remember(key, self._plan(request, decision)), tune

    def _remember(self, key: tuple[Any, ...], plan: Plan) -> Plan:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _plan(self, request: Request, decision: Decision) -> Plan:
        if decision.kernel is None or decision.config is None:
            reasons = "; ".join(f"{step.source}: {step.reason}" for step in decision.steps[:-1])
            self._tell(
                f"no kernel serves {request.workload.spec.key}, torch's attention runs instead: {reasons}"
            )
            return Plan(None)
        return Plan(decision.kernel)

    def _follow_policy(self, request: Request) -> tuple[Decision, bool]:
        """What is decided now, and whether tuning is to follow: true for the first call of a kind alone.

        Other threads get what is decided now for as long as the first one tunes.
        """
        decision = self._decide(request)
        if decision.exact or self.on_miss == "default":
            return decision, False
        workload = request.workload
        if self.on_miss == "error":
            if decision.record is None:
                tried = "\n  ".join(f"{step.source}: {step.reason}" for step in decision.steps)
                raise NoTunedKernel(
                    f"no tuned record serves {workload.name} of [{workload.spec.key}], and the miss policy "
                    f"is 'error'; tune it, or call flashgen.set_policy('default'):\n  {tried}"
                )
        elif self.on_miss == "record":
            self._tell(self._misses.note(workload))
        elif (kind := (workload.spec.key, workload.bucket(), request.target)) not in self._tuned:
            self._tuned.add(kind)  # once, whatever comes of it
            return decision, True
        return decision, False

    def _tune_first(self, request: Request) -> None:
        """Tunes a call's workload, for minutes; then calls seen meanwhile are resolved anew."""
        try:
            assert self._tune is not None
            self._tune(request.workload, request.device)
        except (FlashGenError, ImportError, OSError) as error:
            self._tell(f"tuning {request.workload.name} failed: {error}")
        self.forget()

    def _decide(self, request: Request, loading: bool = True) -> Decision:
        policy = self._policy
        return Policy(
            [replace(source, load=self._loader(source.load)) for source in policy.bundles],
            [replace(source, load=self._loader(source.load)) for source in policy.sources],
            self._loader(policy.load) if policy.load else None,
        ).decide(request, loading=loading)

    def _loader(self, load: Loader) -> Loader:
        """`load` with a memory, of kernels as well as of failures: neither is tried twice.

        A kernel is remembered by what it is for and by the loader itself: two bundles, or one that was made
        again, may have different kernels of one config.
        """

        def remembering(request: Request, config: Config) -> Launchable:
            known = (*request.kernel_key(config), load)
            if refusal := self._refused.get(known):
                raise LaunchFailed(refusal)
            kernel = self._kernels.get(known)
            if kernel is None:
                try:
                    kernel = load(request, config)
                except OSError:
                    raise  # the machine failed (disk, memory), which says nothing of the kernel
                except (FlashGenError, ImportError) as error:
                    self._refused[known] = f"{type(error).__name__}: {error}"
                    raise
                self._kernels[known] = kernel
            return kernel

        return remembering

    def _during_capture(self, request: Request) -> Plan:
        """A kernel that is loaded already, else torch: nothing is compiled, loaded or remembered."""
        spec = request.workload.spec
        for known, kernel in list(self._kernels.items()):
            _, config, *_ = known
            served = known[:-1] == request.kernel_key(config) and known not in self._refused
            if served and not request.refuses(config):
                self._tell(
                    f"a CUDA graph is being captured and {request.workload.name} of [{spec.key}] is new: it "
                    f"gets {config.name}, which is loaded; call flashgen.warmup or run the model once before"
                )
                return Plan(kernel)
        self._tell(
            f"a CUDA graph is being captured and no kernel is loaded for [{spec.key}]: torch's attention is "
            "captured instead; call flashgen.warmup or run the model once before"
        )
        return Plan(None)

    def _refuse(self, plan: Plan, error: LaunchFailed | InvalidArgument) -> bool:
        """After a launch that failed: true if the next candidate is to be tried, false if torch is.

        A kernel that cannot run at all is never tried again.

        Raises:
            LaunchFailed: nothing can run on the GPU any more.
        """
        code = error.code if isinstance(error, LaunchFailed) else 0
        if code in _CONTEXT_IS_DEAD:
            raise LaunchFailed(
                f"{error}. A kernel that ran before, not necessarily FlashGen's, has failed, and this "
                "process cannot use the GPU any more: start it again; CUDA_LAUNCH_BLOCKING=1 shows which"
            ) from error
        if code not in _KERNEL_CANNOT_RUN:
            told = f"a kernel could not be launched for a call, torch's attention runs instead: {error}"
            self._tell(told, about=(id(plan.kernel), code))  # the message has addresses in it
            return False
        with self._lock:
            for known, kernel in self._kernels.items():
                if kernel is plan.kernel:
                    self._refused[known] = str(error)
            self._plans = {key: each for key, each in self._plans.items() if each.kernel is not plan.kernel}
        self._tell(f"a kernel cannot be launched, the next candidate is tried: {error}")
        return True

    def _tell(self, message: str, about: object = None) -> None:
        """Logs a message once, or one message about something."""
        about = message if about is None else about
        if message and about not in self._told:
            if len(self._told) >= MAX_PLANS:
                self._told.clear()
            self._told.add(about)
            log.warning(message)

    def _number_codes(self, values: tuple[float, ...]) -> tuple[int, ...]:
        """The values' buckets, remembered: a model uses the same few windows and caps."""
        if len(self._numbers) >= MAX_NUMBERS:
            self._numbers.clear()
        codes = self._numbers[values] = tuple(number_code(value) for value in values)
        return codes

    # Around it

    def set_on_miss(self, on_miss: str) -> None:
        """Changes the miss policy; calls seen before keep their kernels.

        Raises:
            InvalidArgument: no such policy, or `tune` where this dispatcher cannot tune.
        """
        if on_miss not in MISS_POLICIES:
            raise InvalidArgument(f"{on_miss=} is no miss policy; allowed: {', '.join(MISS_POLICIES)}")
        if on_miss == "tune" and self._tune is None:
            raise InvalidArgument(
                "on_miss='tune' needs a dispatcher that can tune; this one was made without"
            )
        self.on_miss = on_miss
        if on_miss != "default":
            self.forget()

    def add_bundle(self, source: Source) -> None:
        """Puts a bundle before all other sources, in the place of an earlier one from the same folder."""
        with self._lock:
            bundles = self._policy.bundles
            gone = {each.load for each in bundles if source.place and each.place == source.place}
            bundles[:] = [source, *(each for each in bundles if each.load not in gone)]
            self._kernels = {known: each for known, each in self._kernels.items() if known[-1] not in gone}
            self._refused = {known: each for known, each in self._refused.items() if known[-1] not in gone}
            self.forget()

    def forget(self) -> None:
        """Resolves every call anew; kernels stay loaded."""
        with self._lock:
            self._plans = {}

    def warm(self, workload: Workload, facts: CallFacts, device: int) -> Explanation:
        """Loads and remembers what serves a workload's calls of one kind, without a call."""
        request = Request(workload, facts, self._target_of(device), device)
        key = self._key_of(request)
        if workload.empty:
            self._remember(key, Plan(None, torch_path.empty_result))
            return Explanation.of_nothing(describe_workload(workload), request.target.describe())
        with self._lock:
            decision, _, tune = self._settle(key, request)
        if tune:
            self._tune_first(request)
            with self._lock:
                decision, _, _ = self._settle(key, request)
        return explained(request, decision)

    def _key_of(self, request: Request) -> tuple[Any, ...]:
        """The key that calls of a workload have; the same as in `attention`, which a test holds."""
        workload, spec = request.workload, request.workload.spec
        values = tuple(value for _, value in workload.params)
        return (
            FACTS.index(request.facts),
            spec.mask.text,
            None if spec.score_mod is None else spec.score_mod.text,
            _TORCH_DTYPES[spec.dtype],
            request.device,
            workload.heads,
            workload.kv_heads,
            spec.head_dim,
            spec.head_dim_v,
            *(length_code(size) - 1 for size in (workload.batch, workload.q_len, workload.k_len)),
            self._number_codes(values) if values else None,
            spec.positive_scale,
            not spec.return_lse,
            spec.fp32_precision
            if spec.dtype == "fp32"
            else _TORCH_DTYPES[spec.result_dtype]
            if spec.quantized
            else None,
            *(
                (length_code(total) - 1 for total in (workload.total_q, workload.total_k))
                if spec.packed
                else ()
            ),
            _TORCH_DTYPES[spec.sinks] if spec.sinks else None,
            not spec.dropout,
        )

    def explain(self, call: Call, device: int, gradients: bool = False) -> Explanation:
        """What a call would run and why: loads what it would load, launches nothing, tunes nothing.

        Args:
            gradients: whether it is followed by a backward call, whose gradients lie as its tensors do.
        """
        if call.empty:
            return Explanation.of_nothing(describe_call(call), str(call.q.device))
        # An output's strides follow q's, so its place in memory is all that differs from a real call's.
        out = torch_path.empty_output(call.q, call.layout, call.sizes.head_dim_v, call.out_dtype)
        values, tensors = values_and_tensors(call.mask, call.score_mod)
        if isinstance(call, PackedCall):
            starts = (call.cu_q, call.cu_k)
            env = flatten_packed(call.q, call.k, call.v, out, None, *starts, call.scale, values, tensors)
        else:
            env = flatten(call.q, call.k, call.v, out, None, call.scale, values, tensors, call.layout)
        facts = FACTS[facts_code(env, call.q.itemsize, tensors)]
        target = self._target_of(device)
        workload = replace(call, return_lse=call.return_lse or gradients).workload()
        request = Request(workload, facts, target, device)
        with self._lock:
            decision = self._decide(request)
        told = explained(request, decision, describe_call(call), torch_path.describe(call))
        if not gradients:
            return told
        of_sinks = call.sinks is not None and call.sinks.requires_grad
        workload = call.gradients_workload(False, of_sinks, call.learned)
        request = replace(request, workload=workload, deterministic=call.deterministic)
        with self._lock:
            decision = self._decide(request)
        return told.with_gradients(explained(request, decision, otherwise=torch_path.describe(call)))


def _agree(q: torch.Size, k: torch.Size, v: torch.Size) -> bool:
    """As compared on the hot path, for values of another head dim."""
    return len(q) == len(k) == len(v) == 4 and k[:3] == v[:3] and k[3] == q[3]


def _packed_agree(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, return_lse: Any
) -> bool:
    """Whether a call of packed sequences is of the usual kind, in which nothing has to be converted or
    refused.

    `check_packed` looks at all that this does, and takes five times as long.
    """
    if not type(cu_q) is type(cu_k) is Tensor or not q.dim() == k.dim() == v.dim() == 3:
        return False
    q_shape, k_shape, v_shape, cu_shape = q.shape, k.shape, v.shape, cu_q.shape
    dtype, device, sequences = q.dtype, q.get_device(), cu_shape[0] - 1 if len(cu_shape) == 1 else -1
    return (
        k_shape[:2] == v_shape[:2]
        and k_shape[2] == q_shape[2]
        and k.dtype is dtype is v.dtype
        and dtype is not E4M3
        and k_shape[1] > 0
        and not q_shape[1] % k_shape[1]
        and k.get_device() == device == v.get_device() == cu_q.get_device() == cu_k.get_device()
        and cu_q.dtype is torch.int32 is cu_k.dtype
        and cu_k.shape == cu_shape
        and sequences >= 0
        and cu_q.is_contiguous()
        and cu_k.is_contiguous()
        and type(max_q) is int is type(max_k)
        and q_shape[0] <= max_q * sequences <= MAX_INDEX * sequences
        and k_shape[0] <= max_k * sequences <= MAX_INDEX * sequences
        and (return_lse is False or return_lse is True)
    )


def _given(tensors: tuple[Any, ...], device: int) -> bool:
    """Whether every operand is there, on the call's GPU, and holds its values as they are."""
    return all(
        tensor is not None and tensor.get_device() == device and not tensor.is_neg() for tensor in tensors
    )


def _fit(tensors: tuple[Tensor, ...], wanted: tuple[OperandAxes, ...], env: tuple[Any, ...]) -> bool:
    """Whether every operand has the dtype and the sizes that its rule reads; 1 us for key_padding."""
    for tensor, (_, dtype, counts) in zip(tensors, wanted, strict=True):
        shape = tensor.shape
        if tensor.dtype is not dtype or len(shape) != len(counts):
            return False
        for extent, entries in zip(shape, counts, strict=True):
            if isinstance(entries, Reached):
                if extent < entries.least(env):
                    return False
                continue
            for entry in entries:
                if env[entry] > extent:
                    return False
            if entries and extent not in [env[entry] for entry in entries]:
                return False
    return True


def _rows(shape: torch.Size) -> tuple[int, int, int]:
    batch, q_len, heads, _ = shape
    return batch, heads, q_len


def as_result(pair: tuple[Tensor, Tensor | None]) -> Result:
    """What a call returns of an output and its LSE: the output alone where none was asked for."""
    out, lse = pair
    return out if lse is None else (out, lse)
