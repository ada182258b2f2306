"""Runs a spec's kernels of gradients in the interpreter and judges them against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from kernels import ALIGNED

from flashgen.build.compile import toolchain
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.interpret import interpret
from flashgen.build.learned import Learned
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.measure.check import FACTOR, reference
from flashgen.measure.check_gradients import gradients_of
from flashgen.spec import score_mods
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
    dsinks: torch.Tensor | None = None,
    learned: Learned | None = None,
) -> Gradients:
    """(dq, dk, dv) as (batch, heads, rows, dims), from NaN-filled buffers; out and LSE of the reference. The
    gradient of the sinks goes into `dsinks`, if that is given."""
    result, lse = reference(inputs.true(), inputs, torch.float32)
    out = inputs.bhsd(result.to(inputs.q.dtype)).contiguous()
    dout = given(inputs)[0] if dout is None else dout
    made = [torch.full(each.shape, math.nan, dtype=each.dtype) for each in (inputs.q, inputs.k, inputs.v)]
    names = () if learned is None else tuple(learned.accumulators)
    spec = spec.backward(lse=dlse is not None, sinks=dsinks is not None, learned=names)
    env = inputs.gradient_environment(
        out, lse.contiguous(), (dout, *made), dlse, pointers=False, dsinks=dsinks
    )
    env += () if learned is None else learned.entries(pointers=False)
    interpret(render(spec, FAMILY.find(config), toolchain(interpret=True)), facts, env)
    dq, dk, dv = (inputs.bhsd(each) for each in made)
    return dq, dk, dv


HALVED_AND_BIASED = score_mods.compose([score_mods.scale(0.5), score_mods.bias("hqk", "fp32")])
"""A bias, after a rule whose slope is not 1."""


def with_minus_infinity(inputs: Inputs) -> Inputs:
    """Of a call with that rule: a bias that is -inf in a single pair, a row and a column."""
    mod = inputs.score_mod
    bias = torch.randn(mod.tensors[0].shape, generator=torch.Generator().manual_seed(1))
    bias[..., 3, 5] = bias[..., 11, :] = bias[..., :, 20] = -math.inf
    return replace(inputs, score_mod=replace(mod, tensors=(bias,)))


def assert_no_weight_at_minus_infinity(found: Gradients) -> None:
    """Neither that row nor that key has gradients."""
    dq, dk, dv = found
    assert not dq[:, :, 11].any() and not dk[:, :, 20].any() and not dv[:, :, 20].any()


def learned_by(inputs: Inputs, work: Workload) -> Learned:
    """Buffers for the gradients of all floats that the score rule reads."""
    mod = inputs.score_mod
    assert mod is not None
    places = [i for i, each in enumerate(mod.tensors) if each.is_floating_point()]
    sizes = {name: getattr(work, name) for name in ("batch", "heads", "kv_heads", "q_len", "k_len")}
    return Learned(mod, places, **sizes)


def exact_of_rule(inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor]:
    """Those of all floats that the score rule reads, as `exact`."""
    mod = inputs.score_mod
    tensors = [each.double() if each.is_floating_point() else each for each in mod.tensors]
    leaves = [each.requires_grad_() for each in tensors if each.is_floating_point()]
    learning = replace(inputs, score_mod=replace(mod, tensors=tuple(tensors)))
    q, k, v = (each.double() for each in inputs.true())
    results = reference((q, k, v), learning, torch.float64)
    return list(torch.autograd.grad(results, leaves, [inputs.bhsd(dout).double(), dlse.double()]))


def exact(inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """By torch's autograd, of the definition in float64: of q, k, v and the sinks, if there are any."""
    given = [*inputs.true(), *([] if inputs.sinks is None else [inputs.sinks])]
    q, k, v, *sinks = leaves = [each.double().requires_grad_() for each in given]
    if sinks:
        inputs = replace(inputs, sinks=sinks[0])
    out, lse = reference((q, k, v), inputs, torch.float64)
    results, weights = [out], [inputs.bhsd(dout).double()]
    if dlse is not None:
        results, weights = [out, lse], [*weights, dlse.double()]
    return torch.autograd.grad(results, leaves, weights)


def errors(found: Gradients, wanted: tuple[torch.Tensor, ...]) -> list[float]:
    """Of each gradient, the norm of the difference over that of the gradient, or of elements of 0.05: where
    rows see one key, dq is 0 exactly, and as a difference of numbers near 1 it is noise."""
    return [
        float((f.double() - w).norm() / w.norm().clamp_min(0.05 * w.numel() ** 0.5))
        for f, w in zip(found, wanted, strict=False)
    ]


def check(
    work: Workload, config: str, facts: CallFacts = ALIGNED, layout: str = "bhsd", with_lse: bool = False
) -> None:
    """The kernels err at most twice as much as the definition that rounds where they round."""
    judge(make_inputs(work, "cpu", layout), work.spec, config, facts, with_lse)


def judge(
    inputs: Inputs, spec: AttentionSpec, config: str, facts: CallFacts = ALIGNED, with_lse: bool = False
) -> None:
    """`check` of given inputs."""
    dout, dlse = given(inputs, with_lse)
    found, wanted = run(inputs, spec, config, facts, dout, dlse), exact(inputs, dout, dlse)
    both = (
        errors(found, wanted),
        errors(gradients_of(inputs, inputs.bhsd(dout), dlse, round_to=inputs.q.dtype), wanted),
    )
    for name, error, allowed in zip(("dq", "dk", "dv"), *both, strict=True):
        limit = FACTOR * allowed + FLOOR[spec.dtype]
        assert error <= limit, f"{name}: relative error {error:.3g} is over {limit:.3g}"
