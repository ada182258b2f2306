"""Default kernels of gradients, compiled offline: on tensor cores, and what their loops spill."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.build.compile import SPILLS_LEFT_TO_THE_CLOCK, compile_kernel, sass, spills_in_loops, toolchain
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.masks import parse_mask
from flashgen.spec.target import find_target

FAMILY = FAMILIES["attention_bwd"]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("target_name", "product"), [("nvidia-a100", "HMMA"), ("nvidia-h200", "HGMMA")])
def test_loops_of_the_defaults_keep_their_registers(
    target_name: str, product: str, head_dim: int, mask: str, tmp_path: Path
) -> None:
    """What is spilled between the loops, once for each head, is a few instructions of thousands."""
    spec = AttentionSpec(head_dim, head_dim, "bf16", parse_mask(mask).rule).backward()
    target, facts = find_target(target_name), CallFacts()
    config = FAMILY.default(spec, target, facts)
    artifact = compile_kernel(render(spec, config, toolchain()), facts, target, tmp_path)
    prepare, of_keys = artifact.before
    assert prepare.spill_bytes == 0
    for each in (of_keys, artifact):
        text = sass(each.cubin)
        assert product in text
        limit = 0 if head_dim == 64 else SPILLS_LEFT_TO_THE_CLOCK
        assert spills_in_loops(text) <= limit, f"{config.name}: {each.name}"
