"""The Hopper family's kernels of gradients, compiled offline: what they are made of, and what loops spill."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.build.artifact import Artifact
from flashgen.build.compile import SPILLS_LEFT_TO_THE_CLOCK, compile_kernel, sass, spills_in_loops, toolchain
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.family import listed
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
DOCUMENTS = (masks.causal() & masks.document()).rule
ORDERED = (masks.causal() & masks.document("ordered")).rule
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
        (AttentionSpec(64, 64, "bf16", CAUSAL), "s3g4_registers_third"),
        (AttentionSpec(64, 64, "bf16", FULL), "s3g4_registers"),
        (AttentionSpec(96, 96, "bf16", CAUSAL), "s2g4_shared_third"),
        (AttentionSpec(64, 64, "fp16", CAUSAL), "s3g16_shared"),
        (AttentionSpec(64, 64, "bf16", WINDOW, SOFTCAP), ""),
        (AttentionSpec(64, 64, "bf16", UNION), ""),
        (AttentionSpec(64, 64, "bf16", PREFIX), ""),
        (AttentionSpec(80, 80, "bf16", CAUSAL, addressing="varlen"), ""),
        (AttentionSpec(96, 96, "bf16", UNION), ""),
        (AttentionSpec(112, 112, "bf16", CAUSAL), ""),
        (AttentionSpec(64, 64, "bf16", DOCUMENTS), ""),
        (AttentionSpec(64, 64, "bf16", CAUSAL, addressing="varlen"), ""),
        (AttentionSpec(96, 80, "bf16", WINDOW, addressing="varlen"), ""),
        (AttentionSpec(128, 128, "bf16", masks.block_sparse("heads", 128).rule), ""),
        (AttentionSpec(128, 128, "bf16", masks.document("ordered").rule), ""),
        (AttentionSpec(96, 80, "bf16", CAUSAL), ""),
        (AttentionSpec(16, 16, "bf16", CAUSAL), ""),
        (AttentionSpec(256, 256, "bf16", CAUSAL), ""),
        (AttentionSpec(256, 256, "fp16", FULL), "s2g1_exchanged"),
        (AttentionSpec(256, 256, "bf16", WINDOW, SOFTCAP), ""),
        (AttentionSpec(256, 256, "bf16", CAUSAL, score_mods.alibi().rule), ""),
        (AttentionSpec(256, 256, "bf16", UNION), ""),
        (AttentionSpec(192, 128, "bf16", CAUSAL), "s3g4_exchanged"),
        (AttentionSpec(160, 160, "bf16", PREFIX), ""),
        (AttentionSpec(248, 248, "bf16", CAUSAL), ""),
        (AttentionSpec(128, 256, "fp16", CAUSAL), ""),
        (AttentionSpec(256, 256, "bf16", DOCUMENTS), ""),
        (AttentionSpec(256, 256, "bf16", CAUSAL, addressing="varlen"), ""),
        (AttentionSpec(192, 128, "bf16", WINDOW, addressing="varlen"), ""),
        (AttentionSpec(192, 128, "bf16", masks.block_sparse("heads", 64).rule), ""),
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
    name = config or FAMILY.default(spec.backward(), H200, ALIGNED).name
    # Beside a third warpgroup consumers have 32 registers less: one more address comes from memory.
    spilled = "third" in name or (64 < spec.head_dim <= 128) or (spec.head_dim > 128 and spec.score_mod)
    assert spills_in_loops(code) <= (SPILLS_LEFT_TO_THE_CLOCK if spilled else 0)
    assert artifact.spill_bytes <= 128
    tiling = FAMILY.tiling(FAMILY.find(name))
    assert (artifact.num_warps, artifact.abi.num_warps) == (tiling.warps, 4)
    assert tiling.warps == (16 if "exchanged" in name or "third" in name else 12)
    bound = FAMILY.shared_bytes(FAMILY.find(name), spec.backward(), H200)
    assert bound.least <= artifact.shared_bytes <= bound.most
    (prepare, *classify), (leave,) = artifact.before, artifact.after
    assert (prepare.name, leave.name) == ("prepare_rows", "leave_dq")
    assert [each.name for each in classify] == ["classify_keys"] * listed(spec.mask, "q")
    assert not any(each.spill_bytes for each in artifact.parts)
    plain = {
        arg.source: facts.swizzle
        for arg, facts in zip(
            (arg for arg in artifact.abi.args if arg.is_descriptor), artifact.descriptors, strict=True
        )
        if arg.source.startswith("scratch.")
    }
    assert set(plain.values()) == {0}, "a thread adds rows of float32 from one address"


def test_registers_are_dealt_out_to_the_last(tmp_path: Path) -> None:
    """By setmaxnreg: 16 warps have 128 each at the launch, so four warpgroups 512 together, and a kernel that
    asks for more waits for ever."""
    ptx = build(AttentionSpec(256, 256, "bf16", CAUSAL), "s2g4_exchanged", tmp_path).ptx
    dealt = re.findall(r"setmaxnreg.(?:inc|dec).sync.aligned.u32\s+(\d+);", ptx)
    first, *others = 216, 208, 64, 24
    assert {str(each) for each in (first, *others)} <= set(dealt)
    assert first + sum(others) == 4 * 128


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_gradient_of_sinks_is_another_part(dim: int, tmp_path: Path) -> None:
    spec = replace(AttentionSpec(dim, dim, "bf16", CAUSAL), sinks="bf16").backward(sinks=True)
    config = FAMILY.default(spec, H200, ALIGNED)
    artifact = compile_kernel(render(spec, config, toolchain()), ALIGNED, H200, tmp_path)
    assert [part.name for part in artifact.before] == ["prepare_rows", "gradients_of_sinks"]
    assert artifact.before[1].spill_bytes == 0
    spilled = dim == 128 or "third" in config.name
    assert spills_in_loops(sass(artifact.cubin)) <= (SPILLS_LEFT_TO_THE_CLOCK if spilled else 0)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(128, 128, "fp16", CAUSAL, addressing="varlen"),
        AttentionSpec(128, 128, "bf16", FULL, addressing="varlen"),
        AttentionSpec(128, 128, "bf16", ORDERED, addressing="varlen"),
        AttentionSpec(128, 128, "bf16", WINDOW, score_mods.bias("bhqk").rule, addressing="varlen"),
        AttentionSpec(128, 128, "bf16", DOCUMENTS),
        AttentionSpec(128, 128, "bf16", ORDERED),
        AttentionSpec(128, 128, "bf16", CAUSAL, score_mods.bias("bhqk").rule),
        AttentionSpec(112, 112, "bf16", CAUSAL, addressing="varlen"),
    ],
    ids=str,
)
def test_where_registers_are_few_no_descriptor_of_keys_or_values_is_held(
    spec: AttentionSpec, tmp_path: Path
) -> None:
    """With them 9 to 97 instructions of the loop spill."""
    source = render(spec.backward(), FAMILY.default(spec.backward(), H200, ALIGNED), toolchain())
    assert "only = step >> 31" in source.text
    artifact = compile_kernel(source, ALIGNED, H200, tmp_path)
    assert spills_in_loops(sass(artifact.cubin)) == 0
    held = replace(source, text=source.text.replace("only = step >> 31", "only = 0"))
    with pytest.raises(DoesNotFit, match="spills registers in its loop over keys"):
        compile_kernel(held, ALIGNED, H200, tmp_path)


def test_a_rule_that_takes_too_many_registers_is_left_to_the_portable_family(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="spills registers in its loop over keys"):
        build(AttentionSpec(128, 128, "bf16", CAUSAL, SOFTCAP), "", tmp_path)
