"""Right or wrong, of gradients; see `check`.

A kernel may err at most twice as much as the definition that rounds where a kernel rounds, given the same
rounded output of the forward: delta, the sum of its products with dout, has most of the error of rows that
see few keys, where it cancels. The errors are the
largest absolute difference, and the largest of any row, relative to that row and to a row of its head on
average: rows whose gradient is exactly 0 (one key seen) have only noise of their own. What two equal float32
numbers leave where they cancel is allowed in every row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashgen.build.inputs import Inputs
from flashgen.build.reference import gradients_reference, packed_gradients_reference
from flashgen.measure.check import FACTOR, TOLERANCES, AnyRig, Rig, Verdict, flaw, reference
from flashgen.spec.attention import AttentionSpec

NAMES = ("dq", "dk", "dv")
ROUNDING = 2.0**-22  # of a float32 product; 1.1e-6 was found where this allows 8e-6


def rig_of(inputs: Inputs, spec: AttentionSpec) -> AnyRig:
    """What the trials of a workload share, whatever it computes."""
    return Rig(inputs, spec) if spec.op == "fwd" else GradientRig(inputs, spec)


def gradients_of(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None = None, out: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradients_reference` of inputs, each packed sequence by itself.

    Args:
        dout: (batch, heads, q_len, head_dim_v); that of the LSE has the first three axes.
        out: the output that the forward left, of the shape of dout.
        options: its further arguments.
    """
    tensors = (*inputs.true(), dout)
    options |= {
        "mask": inputs.mask,
        "score_mod": inputs.score_mod,
        "scale": inputs.scale,
        "sinks": inputs.sinks,
        "dropout": inputs.dropout,
    }
    if inputs.packed is None:
        dq, dk, dv, *_ = gradients_reference(*tensors, dlse, out=out, **options)
        return dq, dk, dv
    q, k, v, dout = (each[0].transpose(0, 1) for each in tensors)
    cu_q, cu_k = (each.tolist() for each in inputs.packed)
    of_lse = None if dlse is None else dlse[0]
    out = None if out is None else out[0].transpose(0, 1)
    found = packed_gradients_reference(q, k, v, dout, of_lse, cu_q, cu_k, out=out, **options)
    dq, dk, dv = (each.transpose(0, 1)[None] for each in found)
    return dq, dk, dv


class ExpectedGradients:
    """What kernels should give for some inputs, and the limits that follow.

    Args:
        inputs: the call.
        dout: the gradient of its output, (batch, heads, q_len, head_dim_v).
        spec: for the dtype and how it is multiplied.
        out: that output, of the same shape, in the inputs' dtype, where the kernels are given it; by default
            the rounding reference has one that erred as a forward kernel's does.
    """

    def __init__(self, inputs: Inputs, dout: Tensor, spec: AttentionSpec, out: Tensor | None = None) -> None:
        q, k, v = inputs.true()
        exact_in = torch.float64 if spec.dtype == "fp32" else torch.float32
        self.exact = gradients_of(inputs, dout, dtype=exact_in)
        rounded_in = q.dtype if spec.dtype_label != "tf32" else torch.bfloat16  # the coarser of the two
        rounded = gradients_of(inputs, dout, out=out, round_to=rounded_in)
        floor = TOLERANCES[spec.dtype_label]
        largest_q, largest_k, largest_v, largest_dout = (_longest_row(each) for each in (q, k, v, dout))
        cancelling = ROUNDING * largest_dout * largest_v * inputs.scale
        self.noise = (cancelling * largest_k, cancelling * largest_q * q.shape[2] ** 0.5, 0.0)
        self.limits = [
            (FACTOR * absolute + floor.absolute, FACTOR * relative + floor.relative)
            for absolute, relative in map(_errors, rounded, self.exact, self.noise)
        ]

    def judge(self, gradients: tuple[Tensor, ...], slack: float = 1.0) -> Verdict:
        """Compares dq, dk and dv, each (batch, heads, rows, dims).

        Args:
            slack: how many times the limits are allowed.
        """
        largest = 0.0
        for name, found, exact, noise, limits in zip(
            NAMES, gradients, self.exact, self.noise, self.limits, strict=True
        ):
            if found_flaw := flaw(name, found):
                return Verdict(math.nan, found_flaw)
            absolute, relative = _errors(found, exact, noise)
            largest = max(largest, absolute)
            at_most, of_a_row = (slack * limit for limit in limits)
            if absolute > at_most:
                return Verdict(absolute, f"max error {absolute:.3g} of {name} is over {at_most:.3g}")
            if relative > of_a_row:
                reason = f"relative error {relative:.3g} of a row of {name} is over {of_a_row:.3g}"
                return Verdict(absolute, reason)
        return Verdict(largest)


def _longest_row(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float(), dim=-1).amax()) if tensor.numel() else 0.0


def _errors(found: Tensor, exact: Tensor, noise: float) -> tuple[float, float]:
    """(largest absolute difference, largest relative one of a row, over a difference of `noise`)."""
    if found.numel() == 0:
        return 0.0, 0.0
    difference = (found.to(exact.dtype) - exact).abs_()
    row = (torch.linalg.vector_norm(difference, dim=-1) - noise).clamp_min_(0)
    norm = torch.linalg.vector_norm(exact, dim=-1)
    scale = norm + norm.mean(-1, keepdim=True)
    return float(difference.amax()), float((row / torch.where(scale > 0, scale, 1.0)).amax())


class GradientRig(AnyRig):
    """Of `bwd`: the buffers are dq, dk and dv, in the inputs' layout.

    Args:
        own_forward: whether what is judged has an output of a forward pass of its own, not that of the rig.
    """

    def __init__(self, inputs: Inputs, spec: AttentionSpec, own_forward: bool = False) -> None:
        generator = torch.Generator(inputs.q.device).manual_seed(1)
        shape = (*inputs.q.shape[:3], inputs.v.shape[3])
        self.dout = torch.randn(shape, generator=generator, device=inputs.q.device).to(inputs.q.dtype)
        out, lse = reference(inputs.true(), inputs, torch.float32)
        self.lse = lse.contiguous()
        self.out = inputs.bhsd(out.to(inputs.q.dtype)).contiguous()
        given = None if own_forward else inputs.bhsd(self.out)
        self.expected = ExpectedGradients(inputs, inputs.bhsd(self.dout), spec, given)
        self.dlse = torch.zeros_like(self.lse) if spec.return_lse else None
        sources = (inputs.q, inputs.k, inputs.v, self.out, self.lse, self.dout)
        super().__init__(inputs, sources, [(each.shape, each.dtype) for each in sources[:3]])

    def environment(self, *buffers: Tensor | None) -> tuple[Any, ...]:
        """See `AnyRig`."""
        dq, dk, dv = buffers
        assert dq is not None and dk is not None and dv is not None
        given = (self.dout, dq, dk, dv)
        return self.inputs.gradient_environment(self.out, self.lse, given, self.dlse)

    def judge(self, side: int = 0) -> Verdict:
        """See `AnyRig`."""
        return self.expected.judge(
            tuple(self.inputs.bhsd(each) for each in self.buffers(side) if each is not None)
        )
