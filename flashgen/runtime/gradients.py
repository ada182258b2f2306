"""Attention that torch's autograd differentiates by kernels: eager calls that a family has gradients for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashgen.runtime.checks import IS_TRANSFORMED, Call, Given, transformed
from flashgen.runtime.packed import PackedCall
from flashgen.spec.rule import values_and_tensors


class Kernels(Protocol):
    """Whoever launches kernels: the dispatcher."""

    def attention(self, *arguments: Any) -> Any:
        """The forward call; see `Dispatcher.attention`."""

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The backward call; see `Dispatcher.gradients`."""


def refused(call: Call, without_kernel: Callable[[Call], str]) -> str:
    """Why torch's own operations have to differentiate a call; empty where kernels can.

    Args:
        without_kernel: why no family computes the gradients of a call on its GPU.
    """
    if transformed():
        return IS_TRANSFORMED
    if not call.q.is_cuda:
        return f"kernels run on CUDA, the tensors are on {call.q.device}"
    if isinstance(call, PackedCall):
        return "gradients of packed sequences have no kernel yet"
    if call.quantized is not None:
        return "gradients of 8-bit tensors have no kernel"
    if call.empty:
        return "there is no key or no output"
    _, tensors = values_and_tensors(call.mask, call.score_mod)
    if any(each is not None and each.requires_grad for each in tensors):
        return "a rule reads a tensor that needs a gradient, which no kernel gives yet"
    if call.sinks is not None and call.sinks.requires_grad:
        return "the sinks need a gradient, which no kernel gives yet"
    return without_kernel(call)


def attention(call: Call, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
    """The output and LSE of a call that is not `refused`, with gradients for q, k and v.

    A second derivative is refused by torch: the gradients are `once_differentiable`.
    """
    _, operands = values_and_tensors(call.mask, call.score_mod)
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        call.q,
        call.k,
        call.v,
        call.mask,
        call.score_mod,
        call.scale,
        call.layout,
        call.sinks,
        kernels,
        *operands,
    )
    return out, lse if call.return_lse else None


class _Attention(torch.autograd.Function):
    """Between the two passes it keeps inputs, output and LSE: nothing grows with q_len x k_len."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        score_mod: Any,
        scale: float,
        layout: str,
        sinks: Tensor | None,
        kernels: Kernels,
        *operands: Tensor,
    ) -> tuple[Tensor, Tensor]:
        given = None if sinks is None else Given(sinks=sinks)
        out, lse = kernels.attention(q, k, v, mask, score_mod, scale, layout, True, given)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *rest = inputs
        *ctx.rest, ctx.kernels = rest[:6]
        # Sinks and operands are saved as well, for torch to tell where they were changed in between.
        ctx.save_for_backward(q, k, v, *output, ctx.rest[-1], *rest[6:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        mask, score_mod, scale, layout, sinks = ctx.rest
        others = (None,) * (len(ctx.needs_input_grad) - 3)
        if dout is None and dlse is None:
            return None, None, None, *others
        call = Call(q, k, v, mask, score_mod, scale, layout, True, None, sinks)
        dout = torch.zeros_like(out) if dout is None else _laid_out(dout, out)
        dlse = None if dlse is None else dlse.contiguous()
        return *ctx.kernels.gradients(call, out, lse, dout, dlse), *others


def _laid_out(dout: Tensor, out: Tensor) -> Tensor:
    """The gradient in the output's order in memory, for which there is a kernel anyway: that of a sum is one
    element, expanded."""
    if dout.stride() == out.stride() and not dout.data_ptr() % 16 and not dout.is_neg():
        return dout
    return torch.empty_like(out).copy_(dout)
