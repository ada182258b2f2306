"""A kernel of a family on a call's tensors, checked against the reference: what the GPU tests share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashgen.build.arguments import FACTS, facts_code
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.device import current_target
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.launch import load_kernel
from flashgen.codegen.families import find_family
from flashgen.codegen.source import render
from flashgen.measure.check import Rig
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.masks import MASKS, Mask
from flashgen.spec.rule import values_and_tensors
from flashgen.spec.score_mods import ScoreMod

CAUSAL = masks.causal()
DEVICE = "cuda"
TABLE = [mask for entry in MASKS.values() for mask in entry.examples()]
COMBINED = [
    CAUSAL & masks.key_padding(),
    CAUSAL & masks.document(),
    ~CAUSAL,
    masks.sliding_window(64, 0) | ~masks.sliding_window(300, 300),
]
"""Every entry of the table of masks, and combinations of several ranges or none."""


def skip_unless_served(family: str, spec: AttentionSpec | None = None) -> None:
    """Leaves out what this GPU is not for: a Hopper kernel elsewhere."""
    if reason := find_family(family).supports(spec or workload().spec, current_target()):
        pytest.skip(reason)


def workload(
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
    mask: Mask = CAUSAL,
    score_mod: ScoreMod | None = None,
    sizes: tuple[int, int, int, int, int] = (2, 8, 2, 1000, 1000),
) -> Workload:
    rules = [rule for rule in (mask, score_mod) if rule is not None]
    params = tuple(p for r in rules for p in zip((n for n, _ in r.rule.params), r.values, strict=True))
    score = None if score_mod is None else score_mod.rule
    spec = AttentionSpec(head_dim, head_dim_v or head_dim, dtype, mask.rule, score, return_lse=True)
    return Workload(spec, *sizes, params)


class Call:
    """A kernel bound to a call's tensors."""

    def __init__(self, inputs: Inputs, spec: AttentionSpec, out: torch.Tensor, lse: torch.Tensor | None,
                 config: str = "", family: str = "attention_fwd") -> None:  # fmt: skip
        _, tensors = values_and_tensors(inputs.mask, inputs.score_mod)
        self.env = inputs.environment(out, lse)
        self.facts = FACTS[facts_code(self.env, spec.itemsize, tensors)]
        target, found = current_target(), find_family(family)
        heads, kv_heads = (inputs.bhsd(each).shape[1] for each in (inputs.q, inputs.k))
        chosen = found.find(config) if config else found.default(spec, target, self.facts)
        refusal = found.refuses(chosen, spec, target, self.facts, heads // kv_heads)
        assert not refusal, refusal
        self.kernel = load_kernel(compile_kernel(render(spec, chosen, toolchain()), self.facts, target))

    def __call__(self) -> None:
        self.kernel.launch(self.env, torch.cuda.current_stream().cuda_stream)


def check(
    work: Workload,
    config: str = "",
    layout: str = "bhsd",
    family: str = "attention_fwd",
    **tensors: torch.Tensor,
) -> None:
    """Twice the same bits, and right; `tensors` take the place of the random q, k and v."""
    inputs = replace(make_inputs(work, DEVICE, layout), **tensors)  # type: ignore[arg-type]
    bench = Rig(inputs, work.spec)
    verdict, same = bench.examine(lambda out, lse: Call(inputs, work.spec, out, lse, config, family)())
    assert verdict.ok, verdict.reason
    assert same, "two runs differ"


def among_nan(inputs: Inputs) -> dict[str, torch.Tensor]:
    """q, k and v as views with NaN before, between and behind all sequences and head dims."""
    padded = {}
    for name in ("q", "k", "v"):
        tensor = getattr(inputs, name)
        b, h, s, d = tensor.shape
        whole = torch.full(
            (b + 2, h + 2, s + 300, d + 24), math.nan, device=tensor.device, dtype=tensor.dtype
        )
        padded[name] = whole[1:-1, 1:-1, 150:-150, :d]
        padded[name].copy_(tensor)
    return padded
