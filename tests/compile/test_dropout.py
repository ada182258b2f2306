"""Default kernels that drop weights, compiled offline: what they spill, and that they exchange nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.build.compile import SPILLS_LEFT_TO_THE_CLOCK, compile_kernel, sass, spills_in_loops, toolchain
from flashgen.codegen.families import FAMILIES, serving
from flashgen.codegen.source import render
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.target import find_target

CAUSAL = AttentionSpec(128, 128, "bf16", masks.causal().rule, dropout=True)
HOPPER, AMPERE = find_target("nvidia-h200"), find_target("nvidia-a100")


def kernels(spec: AttentionSpec, config: str, folder: Path) -> dict[str, str]:
    """SASS by kernel, for Hopper, of a config of the portable family; the default one if it is empty."""
    family, facts = FAMILIES[f"attention_{spec.op}"], CallFacts()
    chosen = family.find(config) if config else family.default(spec, HOPPER, facts)
    artifact = compile_kernel(render(spec, chosen, toolchain()), facts, HOPPER, folder)
    return {each.name: sass(each.cubin) for each in (*artifact.before, artifact)}


@pytest.mark.parametrize("spec", [CAUSAL, CAUSAL.backward()], ids=["fwd", "bwd"])
def test_loops_of_the_defaults_keep_their_registers(spec: AttentionSpec, tmp_path: Path) -> None:
    for name, text in kernels(spec, "", tmp_path).items():
        assert spills_in_loops(text) <= SPILLS_LEFT_TO_THE_CLOCK, name


def test_random_numbers_are_drawn_where_they_are_needed(tmp_path: Path) -> None:
    """No store to shared memory and no load from it more than without dropout."""
    config, plain = "m64n64w4s2_tma_heads", replace(CAUSAL, dropout=False)
    for dropping, without in ((CAUSAL, plain), (CAUSAL.backward(), plain.backward())):
        found = [list(kernels(spec, config, tmp_path).values()) for spec in (dropping, without)]
        for drawing, text in zip(*found, strict=True):
            for moved in ("STS", "LDS"):
                assert drawing.count(moved) == text.count(moved)


def test_the_hopper_family_refuses_and_the_portable_one_serves() -> None:
    assert "draws no random numbers" in FAMILIES["attention_fwd_sm90"].supports(CAUSAL, HOPPER)
    for target in (HOPPER, AMPERE):
        assert [family.name for family in serving(CAUSAL, target)] == ["attention_fwd"]
        assert [family.name for family in serving(CAUSAL.backward(), target)] == ["attention_bwd"]
