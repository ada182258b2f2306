"""The Hopper family's kernels of gradients, compiled offline: what they are made of, and what loops spill."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.build.artifact import Artifact
from flashgen.build.compile import SPILLS_LEFT_TO_THE_CLOCK, compile_kernel, sass, spills_in_loops, toolchain
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.errors import DoesNotFit
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.target import TARGETS

FAMILY = FAMILIES["attention_bwd_sm90"]
ALIGNED, H200 = CallFacts(), TARGETS["nvidia-h200"]
CAUSAL, FULL = masks.causal().rule, masks.full().rule
WINDOW, SOFTCAP = masks.sliding_window(511, 0).rule, score_mods.softcap(30.0).rule
UNION = (masks.sliding_window(256, 256) | masks.global_tokens(4)).rule
PREFIX = masks.prefix_lm("i64").rule


def build(spec: AttentionSpec, config: str, cache: Path) -> Artifact:
    name = config or FAMILY.default(spec.backward(), H200, ALIGNED).name
    return compile_kernel(render(spec.backward(), FAMILY.find(name), toolchain()), ALIGNED, H200, cache)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (AttentionSpec(128, 128, "bf16", FULL), ""),
        (AttentionSpec(128, 128, "bf16", CAUSAL), ""),
        (AttentionSpec(128, 128, "fp16", WINDOW), "s2g1_shared"),
        (AttentionSpec(128, 128, "bf16", CAUSAL, score_mods.alibi().rule), ""),
        (AttentionSpec(64, 64, "bf16", FULL), ""),
        (AttentionSpec(64, 64, "fp16", CAUSAL), "s3g16_shared"),
        (AttentionSpec(64, 64, "bf16", WINDOW, SOFTCAP), ""),
        (AttentionSpec(64, 64, "bf16", UNION), ""),
        (AttentionSpec(64, 64, "bf16", PREFIX), ""),
        (AttentionSpec(96, 80, "bf16", CAUSAL), ""),
        (AttentionSpec(16, 16, "bf16", CAUSAL), ""),
    ],
    ids=str,
)
def test_products_and_copies_are_asynchronous_and_loops_keep_their_registers(
    spec: AttentionSpec, config: str, tmp_path: Path
) -> None:
    """What is spilled between the loops, once for each head or tile, costs nothing."""
    artifact = build(spec, config, tmp_path)
    code = sass(artifact.cubin)
    for instruction in ("HGMMA.64x", "USETMAXREG", "UTMALDG.4D", "UTMASTG.4D", "UTMAREDG.4D.ADD", "SYNCS"):
        assert instruction in code, instruction
    assert spills_in_loops(code) <= (0 if spec.head_dim <= 64 else SPILLS_LEFT_TO_THE_CLOCK)
    assert artifact.spill_bytes <= 96
    assert (artifact.num_warps, artifact.abi.num_warps) == (12, 4)
    config = config or FAMILY.default(spec.backward(), H200, ALIGNED).name
    bound = FAMILY.shared_bytes(FAMILY.find(config), spec.backward(), H200)
    assert bound.least <= artifact.shared_bytes <= bound.most
    (prepare,), (leave,) = artifact.before, artifact.after
    assert (prepare.name, leave.name) == ("prepare_rows", "leave_dq")
    assert prepare.spill_bytes == leave.spill_bytes == 0
    plain = {
        arg.source: facts.swizzle
        for arg, facts in zip(
            (arg for arg in artifact.abi.args if arg.is_descriptor), artifact.descriptors, strict=True
        )
        if arg.source.startswith("scratch.")
    }
    assert set(plain.values()) == {0}, "a thread adds rows of float32 from one address"


def test_a_rule_that_takes_too_many_registers_is_left_to_the_portable_family(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="spills registers in its loop over keys"):
        build(AttentionSpec(128, 128, "bf16", CAUSAL, SOFTCAP), "", tmp_path)
