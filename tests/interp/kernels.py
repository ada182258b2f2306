"""Runs a spec's kernel in the interpreter and judges it against the reference."""

from __future__ import annotations

import math
from typing import Final

import torch

from flashgen.build.compile import toolchain
from flashgen.build.inputs import Inputs
from flashgen.build.interpret import interpret
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.measure.check import Expected, Verdict
from flashgen.spec.attention import AttentionSpec, CallFacts

FAMILY = FAMILIES["attention_fwd"]
ALIGNED: Final = CallFacts()
STRIDED: Final = CallFacts("strided", tma=False)


def run(
    inputs: Inputs, spec: AttentionSpec, config: str, facts: CallFacts = ALIGNED
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as (batch, heads, q_len, ...), from NaN-filled buffers; out has q's layout."""
    q, v = inputs.bhsd(inputs.q), inputs.bhsd(inputs.v)
    out = torch.full((*inputs.q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], math.nan)
    env = inputs.environment(out, lse, pointers=False)
    interpret(render(spec, FAMILY.find(config), toolchain(interpret=True)), facts, env)
    return inputs.bhsd(out), lse


def verdict(inputs: Inputs, spec: AttentionSpec, config: str, facts: CallFacts = ALIGNED) -> Verdict:
    """The judgement on one run."""
    return Expected(inputs, spec).judge(*run(inputs, spec, config, facts))
