"""Every family compiles on every GPU generation; also run under another triton, without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.build.compile import compile_kernel, toolchain
from flashgen.codegen.families import FAMILIES, serving
from flashgen.codegen.source import render
from flashgen.errors import DoesNotFit
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.masks import parse_mask
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import parse_score_mod
from flashgen.spec.target import find_target

pytestmark = pytest.mark.lane

ALIGNED = CallFacts()
STRIDED = CallFacts("strided", tma=False, wide=True)
SOFTCAP = parse_score_mod("softcap(30.0)").rule
LEARNED = parse_score_mod('alibi, bias("hqk", "bf16"), bias("bk"), relative("fp16", 64)').rule

MEASURED = (3, 6)
"""The triton that the defaults were measured with; under another one may spill, and then this must not."""
SMALLER = {
    "attention_fwd_sm90": "c2x1n64s2g4p1_late_always_tree_row_plain",
    "attention_bwd_sm90": "s2g4_shared",
}

PACKED = AttentionSpec(
    96, 64, "bf16", parse_mask("causal & document").rule, addressing="varlen", sinks="fp32"
)
CASES = [
    ("nvidia-a100", ALIGNED, AttentionSpec(64, 64, "fp16", parse_mask("causal").rule)),
    ("nvidia-a10", STRIDED, AttentionSpec(192, 128, "bf16", parse_mask("causal").rule)),
    ("nvidia-h200", ALIGNED, AttentionSpec(128, 128, "bf16", parse_mask("causal").rule, return_lse=True)),
    ("nvidia-h200", STRIDED, AttentionSpec(96, 64, "bf16", parse_mask("sliding_window(7, 3)").rule, SOFTCAP)),
    (
        "nvidia-h100",
        ALIGNED,
        AttentionSpec(96, 64, "fp16", parse_mask("~causal | sliding_window(7, 0)").rule, SOFTCAP),
    ),
    ("nvidia-rtx4090", ALIGNED, AttentionSpec(64, 64, "fp32")),
    (
        "nvidia-b200",
        ALIGNED,
        AttentionSpec(128, 128, "fp16", parse_mask("~causal | sliding_window(7, 0)").rule),
    ),
    ("nvidia-a100", STRIDED, AttentionSpec(128, 128, "fp16", parse_mask("causal & document").rule)),
    (
        "nvidia-h200",
        ALIGNED,
        AttentionSpec(64, 64, "bf16", parse_mask("sliding_window(7, 3) & ~document").rule, return_lse=True),
    ),
    *(
        ("nvidia-h200", ALIGNED, AttentionSpec(64, 64, "bf16", score_mod=Rule.parse("score", text)))
        for text in ("0", "q_idx / 2", "table[k_idx] where table: fp32")  # none has a value for each pair
    ),
    ("nvidia-rtx5090", ALIGNED, AttentionSpec(256, 256, "bf16", parse_mask("causal & key_padding").rule)),
    ("nvidia-h200", ALIGNED, AttentionSpec(128, 128, "bf16", parse_mask("causal").rule).backward()),
    (
        "nvidia-a100",
        ALIGNED,
        AttentionSpec(64, 64, "fp16", parse_mask("full").rule, SOFTCAP).backward(lse=True),
    ),
    (
        "nvidia-h200",
        STRIDED,
        AttentionSpec(96, 64, "bf16", parse_mask("~causal | sliding_window(7, 0)").rule).backward(),
    ),
    (
        "nvidia-h100",
        ALIGNED,
        AttentionSpec(64, 64, "fp16", parse_mask("sliding_window(7, 0)").rule, SOFTCAP).backward(lse=True),
    ),
    (
        "nvidia-b200",
        ALIGNED,
        AttentionSpec(256, 256, "bf16", parse_mask("causal & document").rule).backward(),
    ),
    ("nvidia-rtx4090", ALIGNED, AttentionSpec(64, 64, "fp32", parse_mask("causal").rule).backward()),
    *(
        (
            name,
            ALIGNED,
            AttentionSpec(64, 64, "bf16", parse_mask("sliding_window(7, 3)").rule, sinks="bf16").backward(
                lse=True, sinks=True
            ),
        )
        for name in ("nvidia-a100", "nvidia-h200")
    ),
    *(
        (
            name,
            facts,
            PACKED.backward(lse=True, sinks=True),
        )
        for name, facts in (("nvidia-a100", ALIGNED), ("nvidia-h200", ALIGNED), ("nvidia-h200", STRIDED))
    ),
    *(
        (
            target,
            facts,
            AttentionSpec(128, 64, "bf16", parse_mask("causal").rule, LEARNED).backward(
                learned=tuple(operand.name for operand in LEARNED.operands)
            ),
        )
        for target, facts in (("nvidia-a100", STRIDED), ("nvidia-b200", ALIGNED))
    ),
    *(
        (
            "nvidia-h200",
            facts,
            replace(spec, dropout=True).backward(True, bool(spec.sinks), learned),
        )
        for facts in (ALIGNED, STRIDED)
        for spec, learned in (
            (PACKED, ()),
            (
                AttentionSpec(64, 64, "bf16", parse_mask("causal & document").rule, LEARNED, sinks="fp32"),
                tuple(operand.name for operand in LEARNED.operands),
            ),
        )
    ),
]


def test_every_family_has_a_case_of_its_own() -> None:
    """Each compiles at least twice, else one that is left out everywhere would go unnoticed."""
    for family in FAMILIES.values():
        cases = [(spec, find_target(name), facts) for name, facts, spec in CASES]
        served = [case for case in cases if not family.supports(*case[:2]) and family in serving(*case)]
        assert len(served) >= 2, family.name


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("target_name", "facts", "spec"), CASES, ids=[f"{each[0]}-{each[2].mask.name}" for each in CASES]
)
def test_the_default_config_compiles(
    family: object, target_name: str, facts: CallFacts, spec: AttentionSpec, tmp_path: Path
) -> None:
    family = FAMILIES[family.name]  # type: ignore[attr-defined]
    target = find_target(target_name)
    if reason := family.supports(spec, target):
        pytest.skip(reason)
    try:
        config = family.default(spec, target, facts)
    except DoesNotFit as error:
        # Only a family that loads by descriptor alone may leave calls to others.
        assert not facts.tma and "cannot express" in str(error)
        assert family in serving(spec, target) and family not in serving(spec, target, facts)
        pytest.skip("serves no such calls")
    try:
        artifact = compile_kernel(render(spec, config, toolchain()), facts, target, cache=tmp_path)
    except DoesNotFit as error:
        assert toolchain().minor != MEASURED and "spills registers in its loop over keys" in str(error)
        config = family.find(SMALLER[family.name])
        artifact = compile_kernel(render(spec, config, toolchain()), facts, target, cache=tmp_path)
    assert artifact.cubin.startswith(b"\x7fELF")
    assert artifact.arch == target.arch
    assert 0 < artifact.registers <= 255
    assert artifact.shared_bytes <= target.shared_per_block
    loads_by_descriptor = family.tiling(config).descriptors
    assert loads_by_descriptor == (facts.tma and target.has_tma)
    assert bool(artifact.descriptors) == loads_by_descriptor
