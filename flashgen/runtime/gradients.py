"""Attention that torch's autograd differentiates by kernels: eager calls that a family has gradients for.

Calls in graphs stand there as operators (`runtime/op`); both end in `Kernels.gradients`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flashgen.build.dropout import Dropout
from flashgen.errors import Unsupported
from flashgen.runtime.checks import IS_TRANSFORMED, Call, Given, differentiated_once, transformed
from flashgen.runtime.packed import PackedCall
from flashgen.spec.learned import shares
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule, values_and_tensors
from flashgen.spec.score_mods import ScoreMod

SECOND = (
    "a second derivative of attention is not served: its gradients come from kernels, which have none of "
    "their own; differentiate this part by torch, nested in torch.func.grad or by "
    "scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH), or leave out create_graph=True"
)
BATCHED = (
    "is_grads_batched=True is not served: kernels compute one gradient at a time; call torch.autograd.grad "
    "for each, or torch.func.jacrev, which does"
)
_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


class Kernels(Protocol):
    """Whoever launches kernels: the dispatcher."""

    def attention(self, *arguments: Any) -> Any:
        """The forward call; see `Dispatcher.attention`."""

    def attention_varlen(self, *arguments: Any) -> Any:
        """The same of packed sequences; see `Dispatcher.attention_varlen`."""

    def gradients(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        of_sinks: bool,
        learned: tuple[int, ...],
    ) -> tuple[Tensor | None, ...]:
        """The backward call; see `Dispatcher.gradients`."""


# Who differentiates


def refused(call: Call, without_kernel: Callable[[Call], str]) -> str:
    """Why torch's own operations have to differentiate an eager call; empty where kernels can.

    Args:
        without_kernel: why no family computes the gradients of a call on its GPU.
    """
    if transformed() and not differentiated_once():
        return IS_TRANSFORMED
    return left_to_torch(call, call.learned) or without_kernel(call)


def left_to_torch(call: Call, learned: tuple[int, ...]) -> str:
    """Why no kernel computes the gradients of a call, whatever families there are; empty where one may.
    Torch's own operations then differentiate an eager call, and give an operator's gradients within it.

    Args:
        learned: places of the score rule's tensors whose gradients are wanted.
    """
    if not call.q.is_cuda:
        return f"kernels run on CUDA, the tensors are on {call.q.device}"
    if call.quantized is not None:
        return "gradients of 8-bit tensors have no kernel"
    if learned and isinstance(call, PackedCall):
        return f"{call.score_mod} learns, and there are kernels for that of dense calls alone"
    if call.empty:
        return "there is no key or no output"
    if call.deterministic and (name := _added_in_any_order(call, learned)):
        return f"pairs add to the gradient of {name} in any order, and deterministic gradients are asked for"
    return ""


def _added_in_any_order(call: Call, learned: tuple[int, ...]) -> str:
    """A tensor of the score rule to whose gradient several programs would add, if there is one."""
    if call.score_mod is None:
        return ""
    rule, sizes = call.score_mod.rule, call.sizes
    wanted = shares(rule, tuple(rule.operands[place].name for place in learned))
    loose = (share for share in wanted if share.any_order(sizes.batch, sizes.heads))
    return next((share.operand for share in loose), "")


# By kernels


class _Tensors(NamedTuple):
    """What a call reads beside q, k and v. Torch is given them one by one, before the operands of its rules:
    it hands them on in other wrappings (under torch.func), and keeps those of the backward pass where it sees
    what becomes of them."""

    sinks: Tensor | None = None
    seed: Tensor | None = None
    """Of dropout."""
    cu_q: Tensor | None = None
    """Where packed sequences begin."""
    cu_k: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _How:
    """What a call is told beside tensors."""

    mask: Rule
    score_mod: Rule | None
    values: tuple[int | float, ...]
    scale: float
    layout: str
    dropout_p: float
    deterministic: bool
    longest: tuple[int, int]
    """Of packed sequences."""

    def call(self, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Tensor | None, ...]) -> Call:
        """The call, its LSE wanted.

        Args:
            rest: `_Tensors`, and then those of the rules.
        """
        others, operands = _Tensors(*rest[:_OTHERS]), rest[_OTHERS:]
        numbers, tensors = len(self.mask.params), len(self.mask.operands)
        mask = Mask(self.mask, self.values[:numbers], operands[:tensors])
        score_mod = None
        if self.score_mod is not None:
            score_mod = ScoreMod(self.score_mod, self.values[numbers:], operands[tensors:])
        dropout = None if others.seed is None else Dropout(self.dropout_p, others.seed)
        told: dict[str, Any] = {
            "sinks": others.sinks,
            "dropout": dropout,
            "deterministic": self.deterministic,
        }
        arguments = (q, k, v, mask, score_mod, self.scale, self.layout, True)
        if others.cu_q is None or others.cu_k is None:
            return Call(*arguments, **told)
        max_q, max_k = self.longest
        return PackedCall(*arguments, **told, cu_q=others.cu_q, cu_k=others.cu_k, max_q=max_q, max_k=max_k)


_OTHERS = len(_Tensors._fields)
_SINKS_AT = 3
"""Among the tensors of `_Attention`: behind q, k and v, first of the others."""
_FIRST_OPERAND = _SINKS_AT + _OTHERS


def attention(call: Call, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
    """The output and LSE of a call that is not `refused`, with gradients for q, k, v, the sinks and what the
    score rule reads.

    A second derivative is refused: `SECOND`.
    """
    values, operands = values_and_tensors(call.mask, call.score_mod)
    score_rule = None if call.score_mod is None else call.score_mod.rule
    seed, dropout_p = (None, 0.0) if call.dropout is None else (call.dropout.seed, call.dropout.probability)
    places: tuple[Tensor, ...] = ()
    longest = (0, 0)
    if isinstance(call, PackedCall):
        places, longest = (call.cu_q, call.cu_k), (call.max_q, call.max_k)
    others = _Tensors(call.sinks, seed, *places)
    told = (values, call.scale, call.layout, dropout_p, call.deterministic, longest)
    how = _How(call.mask.rule, score_rule, *told)
    out, lse = _Attention.apply(how, kernels, call.q, call.k, call.v, *others, *operands)  # type: ignore[no-untyped-call]
    return out, lse if call.return_lse else None


def laid_out(dout: Tensor, out: Tensor) -> Tensor:
    """The gradient in the output's order in memory, for which there is a kernel anyway: that of a sum is one
    element, expanded."""
    if dout.stride() == out.stride() and not dout.data_ptr() % 16 and not dout.is_neg():
        return dout
    return torch.empty_like(out).copy_(dout)


def _by_place(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a function that is given all by place.

    Of one with `setup_context`, torch asks for the signature at every call, to fill in defaults: half of what
    a call that needs a gradient costs the host beyond the same without one.
    """
    forward.__signature__ = _BY_PLACE  # type: ignore[attr-defined]
    return forward


_BY_PLACE = inspect.Signature([inspect.Parameter("given", inspect.Parameter.VAR_POSITIONAL)])


class _Attention(torch.autograd.Function):
    """Between the two passes it keeps inputs, output and LSE, and of dropout the seed: nothing grows with
    q_len x k_len."""

    @staticmethod
    @_by_place
    def forward(
        how: _How, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        call = how.call(q, k, v, rest)
        rules = (call.mask, call.score_mod, call.scale)
        if isinstance(call, PackedCall):
            places = (call.cu_q, call.cu_k, call.max_q, call.max_k)
            out, lse = kernels.attention_varlen(q, k, v, *places, *rules, True, call.sinks, call.dropout)
            return out, lse
        given = None
        if call.sinks is not None or call.dropout is not None:
            given = Given(sinks=call.sinks, dropout=call.dropout)
        out, lse = kernels.attention(q, k, v, *rules, call.layout, True, given)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.how, ctx.kernels, q, k, v, *rest = inputs
        # What else is read is saved as well, for torch to tell where it was changed in between.
        ctx.save_for_backward(q, k, v, *output, *rest)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        of_how, needed = (None, None), ctx.needs_input_grad[2:]
        found: list[Tensor | None] = [None] * len(needed)
        if dout is None and dlse is None:
            return *of_how, *found
        first = _FIRST_OPERAND + len(ctx.how.mask.operands)  # of the score rule
        wanted = _Wanted(needed[_SINKS_AT], tuple(i for i, each in enumerate(needed[first:]) if each))
        # An ordinary pass has no use for what a function of torch's brings, which doubles the host time.
        compute: Any = _Gradients.apply if torch.is_grad_enabled() or transformed() else _Gradients.forward
        made = compute(dout, dlse, ctx.how, wanted, ctx.kernels, *ctx.saved_tensors)
        of_sinks = (_SINKS_AT,) if wanted.sinks else ()
        places = (0, 1, 2, *of_sinks, *(first + each for each in wanted.learned))
        for place, gradient in zip(places, made, strict=True):
            found[place] = gradient
        return *of_how, *found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which gradients beside those of q, k and v a backward pass computes."""

    sinks: bool
    learned: tuple[int, ...]
    """Places among the tensors of the score rule."""


class _Gradients(torch.autograd.Function):
    """The backward call: a function of its own, whose tensors torch.func unwraps as it does the forward's,
    and which has a derivative only to refuse it."""

    @staticmethod
    def forward(
        dout: Tensor | None,
        dlse: Tensor | None,
        how: _How,
        wanted: _Wanted,
        kernels: Kernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *rest: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if any(each is not None and _is_batched(each) for each in (dout, dlse)):
            raise Unsupported(BATCHED)
        dout = torch.zeros_like(out) if dout is None else laid_out(dout, out)
        dlse = None if dlse is None else dlse.contiguous()
        call = how.call(q, k, v, rest)
        found = kernels.gradients(call, out, lse, dout, dlse, wanted.sinks, wanted.learned)
        return tuple(each for each in found if each is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise Unsupported(SECOND)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *given: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Several gradients of one output (`torch.func.jacrev`), one after the other."""
        found = [
            _Gradients.apply(  # type: ignore[no-untyped-call]
                *(
                    each if axis is None else each.select(axis, i)
                    for each, axis in zip(given, in_dims, strict=True)
                )
            )
            for i in range(info.batch_size)
        ]
        stacked = tuple(map(torch.stack, zip(*found, strict=True)))
        return stacked, (0,) * len(stacked)
