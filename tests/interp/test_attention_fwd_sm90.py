"""attention_fwd_sm90 on a stand-in for Gluon, against the float64 reference."""

from __future__ import annotations

import math

import gluon
import pytest
import torch
from test_attention_fwd import workload

from flashgen.build.compile import toolchain
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import KernelSource, render
from flashgen.measure.check import Expected
from flashgen.spec import masks
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.masks import Mask

FAMILY = FAMILIES["attention_fwd_sm90"]
PLAIN = "c2x1n64s2g4p1_late_lazy_tree_lane_plain"


def run(inputs: Inputs, source: KernelSource) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as (batch, heads, q_len, ...), from NaN-filled buffers; out has q's layout."""
    q, v = inputs.bhsd(inputs.q), inputs.bhsd(inputs.v)
    out = torch.full((*inputs.q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], math.nan)
    gluon.run(source, CallFacts(), inputs.environment(out, lse, pointers=False))
    return inputs.bhsd(out), lse


def check(work: Workload, config: str = PLAIN, layout: str = "bhsd") -> None:
    inputs = make_inputs(work, "cpu", layout)
    source = render(work.spec, FAMILY.find(config), toolchain())
    judged = Expected(inputs, work.spec).judge(*run(inputs, source))
    assert judged.ok, judged.reason


LENGTHS = ((70, 200), (200, 70), (1, 1), (129, 65))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
def test_causal_and_full(mask: Mask, lengths: tuple[int, int]) -> None:
    q_len, k_len = lengths
    check(workload(64, dtype="bf16", mask=mask, q_len=q_len, k_len=k_len))
