"""Runs a spec's kernels of gradients in the interpreter and judges them against float64."""

from __future__ import annotations

import math

import torch
from kernels import ALIGNED

from flashgen.build.compile import toolchain
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.interpret import interpret
from flashgen.build.reference import attention_reference, gradients_reference
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.measure.check import FACTOR
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload

FAMILY = FAMILIES["attention_bwd"]
FLOOR = {"bf16": 2e-3, "fp16": 3e-4, "fp32": 2e-5}
"""Of the norm of a gradient: what other orders of summation and of rounding may differ by."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def given(inputs: Inputs, with_lse: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the output, in the inputs' layout, and of the LSE."""
    generator = torch.Generator().manual_seed(1)
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    dout = torch.randn(shape, generator=generator).to(inputs.q.dtype)
    rows = inputs.bhsd(inputs.q).shape[:3]
    return dout, torch.randn(rows, generator=generator) if with_lse else None


def run(
    inputs: Inputs,
    spec: AttentionSpec,
    config: str,
    facts: CallFacts = ALIGNED,
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """(dq, dk, dv) as (batch, heads, rows, dims), from NaN-filled buffers; out and LSE of the reference."""
    q, k, v = inputs.true()
    exact, lse = attention_reference(
        q, k, v, mask=inputs.mask, score_mod=inputs.score_mod, scale=inputs.scale, sinks=inputs.sinks
    )
    out = inputs.bhsd(exact.to(q.dtype)).contiguous()
    dout = given(inputs)[0] if dout is None else dout
    made = [torch.full(each.shape, math.nan, dtype=each.dtype) for each in (inputs.q, inputs.k, inputs.v)]
    spec = spec.backward(lse=dlse is not None)
    env = inputs.gradient_environment(out, lse, (dout, *made), dlse, pointers=False)
    interpret(render(spec, FAMILY.find(config), toolchain(interpret=True)), facts, env)
    dq, dk, dv = (inputs.bhsd(each) for each in made)
    return dq, dk, dv


def exact(inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None = None) -> Gradients:
    """By torch's autograd, of the definition in float64."""
    leaves = [each.double().requires_grad_() for each in inputs.true()]
    rules = {"mask": inputs.mask, "score_mod": inputs.score_mod}
    out, lse = attention_reference(
        *leaves, **rules, scale=inputs.scale, sinks=inputs.sinks, dtype=torch.float64
    )
    results, weights = [out], [inputs.bhsd(dout).double()]
    if dlse is not None:
        results, weights = [out, lse], [*weights, dlse.double()]
    dq, dk, dv = torch.autograd.grad(results, leaves, weights)
    return dq, dk, dv


def errors(found: Gradients, wanted: Gradients) -> list[float]:
    """Of each gradient, the norm of the difference over that of the gradient, or of elements of 0.05: where
    rows see one key, dq is 0 exactly, and as a difference of numbers near 1 it is noise."""
    return [
        float((f.double() - w).norm() / w.norm().clamp_min(0.05 * w.numel() ** 0.5))
        for f, w in zip(found, wanted, strict=True)
    ]


def check(
    work: Workload, config: str, facts: CallFacts = ALIGNED, layout: str = "bhsd", with_lse: bool = False
) -> None:
    """The kernels err at most twice as much as the definition that rounds where they round."""
    inputs = make_inputs(work, "cpu", layout)
    dout, dlse = given(inputs, with_lse)
    found, wanted = run(inputs, work.spec, config, facts, dout, dlse), exact(inputs, dout, dlse)
    rounded = gradients_reference(
        *inputs.true(),
        inputs.bhsd(dout),
        dlse,
        mask=inputs.mask,
        score_mod=inputs.score_mod,
        scale=inputs.scale,
        sinks=inputs.sinks,
        round_to=inputs.q.dtype,
    )
    both = errors(found, wanted), errors(rounded, wanted)
    for name, error, allowed in zip(("dq", "dk", "dv"), *both, strict=True):
        limit = FACTOR * allowed + FLOOR[work.spec.dtype]
        assert error <= limit, f"{name}: relative error {error:.3g} is over {limit:.3g}"
