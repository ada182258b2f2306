"""Default kernels of gradients, compiled offline: on tensor cores, and what their loops spill."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashgen.build.compile import SPILLS_LEFT_TO_THE_CLOCK, compile_kernel, sass, spills_in_loops, toolchain
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.masks import parse_mask
from flashgen.spec.score_mods import parse_score_mod
from flashgen.spec.target import find_target

FAMILY = FAMILIES["attention_bwd"]


@pytest.mark.parametrize("addressing", ["dense", "varlen"])
@pytest.mark.parametrize("mask", ["full", "causal", "causal & document"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("target_name", "product"), [("nvidia-a100", "HMMA"), ("nvidia-h200", "HGMMA")])
def test_loops_of_the_defaults_keep_their_registers(
    target_name: str, product: str, head_dim: int, mask: str, addressing: str, tmp_path: Path
) -> None:
    """What is spilled between the loops, once for each head, is a few instructions of thousands."""
    rule = parse_mask(mask).rule
    spec = AttentionSpec(head_dim, head_dim, "bf16", rule, addressing=addressing).backward()
    target, facts = find_target(target_name), CallFacts()
    config = FAMILY.default(spec, target, facts)
    artifact = compile_kernel(render(spec, config, toolchain()), facts, target, tmp_path)
    *others, of_keys = artifact.before
    assert not any(each.spill_bytes for each in others)
    for each in (of_keys, artifact):
        text = sass(each.cubin)
        assert product in text
        limit = 0 if (head_dim, addressing) == (64, "dense") else SPILLS_LEFT_TO_THE_CLOCK
        assert spills_in_loops(text) <= limit, f"{config.name}: {each.name}"


@pytest.mark.parametrize("addressing", ["dense", "varlen"])
@pytest.mark.parametrize(("mask", "loops"), [("full", 2), ("causal", 3), ("causal & document", 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("target_name", "loads", "product", "width"),
    [("nvidia-a100", "pointer", "HMMA", 1), ("nvidia-h200", "tma", "HGMMA", 4)],
)
def test_one_kernel_of_all_gradients(
    target_name: str,
    loads: str,
    product: str,
    width: int,
    head_dim: int,
    mask: str,
    loops: int,
    addressing: str,
    tmp_path: Path,
) -> None:
    """What it adds to dq in each loop takes as many instructions as elements, or on sm_90 a fourth."""
    rule = parse_mask(mask).rule
    spec = AttentionSpec(head_dim, head_dim, "bf16", rule, addressing=addressing).backward()
    target, config = find_target(target_name), FAMILY.find(f"m64n64w8s2_{loads}_heads_fused")
    artifact = compile_kernel(render(spec, config, toolchain()), CallFacts(), target, tmp_path)
    assert [each.name for each in artifact.after] == ["leave_dq"]
    assert not any(each.spill_bytes for each in (*artifact.before, *artifact.after))
    text = sass(artifact.cubin)
    assert product in text
    if (mask, addressing) == ("causal & document", "varlen"):
        loops = 1  # every block is asked of each pair
    added = len(re.findall(r"\bREDG?\.[A-Z.]*ADD\.F32", text))
    assert added == loops * 64 * head_dim // (32 * 8 * width)
    assert spills_in_loops(text) <= SPILLS_LEFT_TO_THE_CLOCK
    assert artifact.shared_bytes <= FAMILY.shared_bytes(config, spec, target).most


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("text", "most"),
    [("alibi", 0), ('bias("bhqk")', 0), ('bias("hqk", "bf16")', 32), ('relative("fp32", 128)', 4)],
)
def test_what_a_rule_learns_keeps_the_registers_of_the_loop(
    text: str, most: int, head_dim: int, tmp_path: Path
) -> None:
    """Pairs add one by one, 16 of a thread in both loops; of a block's diagonals a thread adds one or two."""
    rule, target, facts = parse_score_mod(text).rule, find_target("nvidia-h200"), CallFacts()
    spec = AttentionSpec(head_dim, head_dim, "bf16", parse_mask("causal").rule, rule)
    learning = spec.backward(learned=tuple(operand.name for operand in rule.operands))
    config = FAMILY.default(learning, target, facts)
    artifact = compile_kernel(render(learning, config, toolchain()), facts, target, tmp_path)
    text = sass(artifact.cubin)
    assert "HGMMA" in text and spills_in_loops(text) == 0
    assert len(re.findall(r"\bRED[A-Z.]*ADD\.F32", text)) == most
    assert artifact.shared_bytes <= FAMILY.shared_bytes(config, learning, target).most
    frozen = render(spec.backward(), config, toolchain())
    assert "d_score" not in frozen.text and "add_by_diagonals" not in frozen.text
