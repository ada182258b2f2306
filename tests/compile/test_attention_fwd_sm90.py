"""The Hopper family's machine code: what it is made of, what ptxas gives up on, and what is known before."""

from __future__ import annotations

import json
import os
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.build import compile as compiler
from flashgen.build.artifact import Artifact
from flashgen.build.compile import compile_kernel, sass, spills_in_loops, toolchain
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.errors import CompileFailed, DoesNotFit
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.rule import Rule
from flashgen.spec.target import TARGETS

FAMILY = FAMILIES["attention_fwd_sm90"]
ALIGNED = CallFacts()
H200 = TARGETS["nvidia-h200"]
CAUSAL, FULL = masks.causal().rule, masks.full().rule
DOCUMENT = masks.document().rule
CAUSAL_DOCUMENT = (masks.causal() & masks.document("i64")).rule
ORDERED, CAUSAL_ORDERED = masks.document("ordered").rule, (masks.causal() & masks.document("ordered")).rule
NEAR_BY_HEAD = Rule.parse("mask", "abs(q_idx // 50 - k_idx // 50) <= reach[head] where reach: i32")
WINDOW, SOFTCAP = masks.sliding_window(511, 0).rule, score_mods.softcap(30.0).rule


def build(spec: AttentionSpec, config: str, cache: Path) -> Artifact:
    return compile_kernel(render(spec, FAMILY.find(config), toolchain()), ALIGNED, H200, cache)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (
            AttentionSpec(64, 64, "bf16", FULL, return_lse=True),
            "c2x1n128s2g4p1_pinned_lazy_tree_lane_dynamic",
        ),
        (AttentionSpec(64, 64, "fp16", CAUSAL), "c1x1n64s4g16p8_early_always_chain_row_plain"),
        (AttentionSpec(128, 128, "bf16", CAUSAL), "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic"),
        (AttentionSpec(128, 128, "fp16", WINDOW, SOFTCAP), "c2x1n64s2g16p4_late_always_tree_row_plain"),
        (AttentionSpec(256, 256, "bf16", CAUSAL, return_lse=True), "c2x1n64s2g4p1_late_lazy_tree_lane_plain"),
        (AttentionSpec(256, 256, "bf16", FULL), "c1x1n64s2g4p1_late_always_chain_row_plain"),
        (AttentionSpec(64, 64, "fp16", CAUSAL), "c1x3n64s2g4p1_late_lazy_optimistic_lane_dynamic"),
        (
            AttentionSpec(128, 128, "bf16", CAUSAL, return_lse=True),
            "c3x1n64s4g4p1_early_lazy_optimistic_lane_dynamic",
        ),
        (AttentionSpec(64, 64, "bf16", FULL), "c1x2n128s2g4p1_pinned_lazy_optimistic_lane_plain"),
        (AttentionSpec(64, 64, "fp16", DOCUMENT, SOFTCAP), "c1x2n64s4g4p4_early_lazy_tree_lane_plain"),
        (AttentionSpec(64, 64, "bf16", NEAR_BY_HEAD), "c3x1n64s2g4p1_late_lazy_tree_lane_dynamic"),
        (AttentionSpec(128, 128, "bf16", CAUSAL_DOCUMENT), "c2x1n64s4g4p1_late_lazy_tree_lane_dynamic"),
        (
            AttentionSpec(64, 64, "bf16", ORDERED, return_lse=True),
            "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic",
        ),
        (AttentionSpec(128, 128, "bf16", ORDERED), "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic"),
        (AttentionSpec(128, 128, "bf16", CAUSAL_ORDERED), "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic"),
        (AttentionSpec(128, 128, "bf16", CAUSAL_DOCUMENT), "c2x1n64s2g4p1_pinned_always_chain_row_plain"),
    ],
    ids=lambda each: each if isinstance(each, str) else f"{each.dims_label}_{each.mask.name}",
)
def test_products_and_copies_are_asynchronous_and_registers_are_given_out(
    spec: AttentionSpec, config: str, tmp_path: Path
) -> None:
    artifact = build(spec, config, tmp_path)
    code = sass(artifact.cubin)
    for instruction in ("HGMMA.64x", "USETMAXREG", "UTMALDG.4D", "UTMASTG.4D", "SYNCS"):
        assert instruction in code, instruction
    assert "LDL" not in code and "STL" not in code and artifact.spill_bytes == 0
    consumers = FAMILY.find(config).number("consumers")
    assert (artifact.num_warps, artifact.abi.num_warps) == (4 * (consumers + 1), 4)
    assert len(artifact.descriptors) == 4 and {each.swizzle for each in artifact.descriptors} == {3}
    assert ("ATOMG" in code) == ("dynamic" in config), "tiles come from a counter"
    assert not any(part.spill_bytes for part in artifact.parts)


NAMED_MASKS = (
    masks.prefix_lm(),
    masks.causal() & masks.dilated(512, 4),
    masks.sliding_window(256, 256) | masks.global_tokens(4),
    masks.neighborhood(255),
    masks.neighborhood((64, 64), (13, 13)),
    masks.causal() & masks.block_sparse("batch_heads", 128),
)
NAMED_RULES = (
    score_mods.alibi(),
    score_mods.softcap(30.0),
    score_mods.softcap(30.0).then(score_mods.alibi()),
    score_mods.softcap(30.0).then(score_mods.bias("bhqk", "bf16")),
    score_mods.bias("bk"),
    score_mods.relative("fp32", 128),
    score_mods.scale(2.0),
)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rule", [*NAMED_MASKS, *NAMED_RULES], ids=str)
def test_the_default_has_registers_for_every_named_rule(rule: masks.Mask, dim: int, tmp_path: Path) -> None:
    """With the LSE; what is spilled is outside of the loop over keys, or the compile would be refused."""
    mask, score = (rule.rule, None) if isinstance(rule, masks.Mask) else (CAUSAL, rule.rule)
    spec = AttentionSpec(dim, dim, "bf16", mask, score, return_lse=True)
    artifact = build(spec, FAMILY.default(spec, H200, ALIGNED).name, tmp_path)
    assert artifact.spill_bytes <= 96 and not any(part.spill_bytes for part in artifact.parts)


@pytest.mark.parametrize("dim", [64, 128])
def test_distances_cost_an_addition_a_score_and_a_product_a_column(dim: int, tmp_path: Path) -> None:
    """Of 3 x 64 scores of a thread, in 32 columns; 3.5 a score where every pair is asked for its distance."""

    def arithmetic(rule: Rule | None) -> float:
        spec = AttentionSpec(dim, dim, "bf16", CAUSAL, rule)
        config = FAMILY.default(spec, H200, ALIGNED)
        code = sass(build(spec, config.name, tmp_path).cubin)
        return len(re.findall(r"\b(?:FADD|FMUL|FFMA|I2FP)\b", code)) / config.number("consumers")

    assert 192 < arithmetic(score_mods.alibi().rule) - arithmetic(None) < 320


@pytest.mark.parametrize("dim", [64, 128])
def test_a_pair_of_a_grid_is_asked_for_one_bit(dim: int, tmp_path: Path) -> None:
    """Two blocks select each score once, by its bit; a comparison of each pair is made once a tile."""
    spec = AttentionSpec(dim, dim, "bf16", masks.neighborhood((64, 64), (13, 13)).rule)
    config = "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic"
    artifact = build(spec, config, tmp_path)
    code, scores = sass(artifact.cubin), 2 * 64  # of both consumers' threads
    assert len(re.findall(r"\bFSEL\b", code)) < 2.3 * scores
    assert len(re.findall(r"\bISETP\b", code)) < 2.0 * scores
    assert artifact.spill_bytes <= 32 and spills_in_loops(code) == 0


@pytest.mark.parametrize("dim", [64, 128])
def test_scores_near_zero_are_bent_without_special_functions(dim: int, tmp_path: Path) -> None:
    """A block has both ways: by five instructions a score, and by an exponential and a reciprocal beside."""

    def special(rule: Rule | None) -> dict[str, float]:
        spec = AttentionSpec(dim, dim, "bf16", FULL, rule)
        config = FAMILY.default(spec, H200, ALIGNED)
        code = sass(build(spec, config.name, tmp_path).cubin)
        scores = 2 * config.number("consumers") * config.number("block_n") // 2  # of two blocks
        return {name: len(re.findall(rf"\b{name}\b", code)) / scores for name in names}

    names = ("MUFU.EX2", "MUFU.RCP", "FFMA")
    bent, plain = special(SOFTCAP), special(None)
    assert [bent[name] - plain[name] for name in names] == pytest.approx([1, 1, 7], abs=0.2)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("config", ["", "c2x1n64s2g4p4_late_lazy_tree_lane_dynamic",
                                    "c1x1n64s2g4p4k8_late_lazy_tree_lane_dynamic"])  # fmt: skip
def test_sinks_cost_no_registers_of_the_loop(config: str, dim: int, tmp_path: Path) -> None:
    """By default, with packed heads, and joined with the parts of split keys."""
    spec = AttentionSpec(dim, dim, "bf16", WINDOW, return_lse=True, sinks="bf16")
    artifact = build(spec, config or FAMILY.default(spec, H200, ALIGNED).name, tmp_path)
    assert artifact.spill_bytes <= 32
    kernels = (artifact, *artifact.parts)
    takers = [kernel for kernel in kernels if any(arg.source == "sinks" for arg in kernel.abi.args)]
    assert takers == (list(artifact.after) if "k8" in config else [artifact])


def test_a_bias_of_pairs_alone_is_left_to_the_portable_family_at_head_dim_128(tmp_path: Path) -> None:
    spec = AttentionSpec(128, 128, "bf16", CAUSAL, score_mods.bias("qk", "bf16").rule)
    with pytest.raises(DoesNotFit, match="spills registers in its loop over keys"):
        build(spec, FAMILY.default(spec, H200, ALIGNED).name, tmp_path)
    portable = FAMILIES["attention_fwd"]
    made = render(spec, portable.default(spec, H200, ALIGNED), toolchain())
    assert compile_kernel(made, ALIGNED, H200, tmp_path).registers <= 255


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (AttentionSpec(64, 64, "e4m3", FULL), "c3x1n128s4g4p1_pinned_lazy_tree_lane_dynamic"),
        (AttentionSpec(128, 128, "e4m3", CAUSAL), "c2x1n128s4g4p1_late_lazy_tree_lane_dynamic"),
        (AttentionSpec(128, 128, "e4m3", CAUSAL), "c3x1n64s4g4p4_early_lazy_tree_lane_dynamic"),
        (AttentionSpec(128, 128, "e4m3", CAUSAL), "c3x1n64s4g4p1_late_lazy_optimistic_lane_dynamic"),
        (
            AttentionSpec(96, 80, "e4m3", WINDOW, SOFTCAP, out_dtype="fp16"),
            "c1x2n64s2g4p8_late_always_chain_row_plain",
        ),
        (
            AttentionSpec(256, 256, "e4m3", CAUSAL, return_lse=True),
            "c2x1n128s2g4p1_late_lazy_tree_lane_plain",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else each.dims_label,
)
def test_8_bit_weights_stay_in_words_from_the_conversion_to_the_product(
    spec: AttentionSpec, config: str, tmp_path: Path
) -> None:
    """Taken apart into bytes they cost hundreds of PRMT; by memory, STS; from other threads, SHFL."""
    artifact = build(spec, config, tmp_path)
    code = sass(artifact.cubin)
    for instruction in ("QGMMA.64x", "E4M3.F32", "USETMAXREG", "UTMALDG.4D", "UTMASTG.4D"):
        assert instruction in code, instruction
    assert "HGMMA" not in code and "LDL" not in code and "STL" not in code and artifact.spill_bytes == 0
    assert code.count("PRMT") <= 16, "a few, for the producer's and the rules' own bytes"
    assert code.count("SHFL") <= 60, "for maxima and sums of rows, and what is uniform"
    (part,) = artifact.before
    assert part.name == "transpose_values" and artifact.scratch[0].dtype == "e4m3"
    copies = sass(part.cubin)
    assert "LDG.E.128" in copies and "STG.E.128" in copies and part.spill_bytes == 0
    described = [arg.source for arg in artifact.abi.args if arg.is_descriptor]
    sizes = [facts.elem_size for facts in artifact.descriptors]
    assert dict(zip(described, sizes, strict=True)) == {"q": 1, "k": 1, "scratch.values": 1, "out": 2}
    bound = FAMILY.shared_bytes(FAMILY.find(config), spec, H200)
    assert bound.least <= artifact.shared_bytes <= bound.most


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=lambda mask: mask.name)
def test_the_default_for_8_bit_inputs_compiles_with_the_lse(dim: int, mask: Rule, tmp_path: Path) -> None:
    spec = AttentionSpec(dim, dim, "e4m3", mask, return_lse=True)
    artifact = build(spec, FAMILY.default(spec, H200, ALIGNED).name, tmp_path)
    assert artifact.spill_bytes <= 128, "once a tile, outside the loop over keys"


def test_more_programs_than_registers_for_one_product_are_refused_before_ptxas_does(tmp_path: Path) -> None:
    name = "c1x3n128s2g4p1_late_lazy_tree_lane_dynamic"
    spec = AttentionSpec(32, 32, "e4m3", FULL)
    assert FAMILY.fits(FAMILY.find(name), spec, H200) == (
        "a product's sums take 64 registers and 30 beside them, of 80 that 3 programs begin with; fewer "
        "programs begin with more"
    )
    with pytest.raises(CompileFailed, match=r"C7602.*Insufficient registers \(80\)"):
        build(spec, name, tmp_path)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (AttentionSpec(128, 128, "bf16", CAUSAL), "c1x1n64s4g4p4k16_late_lazy_tree_lane_plain"),
        (
            AttentionSpec(128, 128, "bf16", FULL, return_lse=True),
            "c2x1n128s2g4p4k4_late_lazy_tree_lane_dynamic",
        ),
        (AttentionSpec(64, 64, "fp16", WINDOW, SOFTCAP), "c1x2n64s2g4p8k64_late_lazy_tree_lane_plain"),
        (AttentionSpec(256, 256, "bf16", CAUSAL), "c2x1n64s2g4p1k8_late_lazy_tree_lane_plain"),
        (AttentionSpec(128, 128, "e4m3", CAUSAL), "c2x1n128s4g4p4k16_late_lazy_tree_lane_plain"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.dims_label,
)
def test_split_keys_leave_from_the_registers_and_one_warp_merges_a_row(
    spec: AttentionSpec, config: str, tmp_path: Path
) -> None:
    artifact = build(spec, config, tmp_path)
    code = sass(artifact.cubin)
    assert "GMMA.64x" in code and "UTMALDG.4D" in code and artifact.spill_bytes == 0
    assert "UTMASTG" not in code and "STG.E.64" in code and len(artifact.descriptors) == 3
    bound = FAMILY.shared_bytes(FAMILY.find(config), spec, H200)
    assert bound.least <= artifact.shared_bytes <= bound.most
    (merging,) = artifact.after
    assert (merging.num_warps, merging.shared_bytes, merging.spill_bytes) == (1, 0, 0)
    assert "BAR" not in sass(merging.cubin), "nothing is exchanged between warps"


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_default_compiles_with_the_lse(dim: int, tmp_path: Path) -> None:
    """What a first call gets; without the LSE a kernel needs fewer registers."""
    spec = AttentionSpec(dim, dim, "bf16", FULL, return_lse=True)
    few_rows = Workload(spec, 1, 8, 8, 16, 65536)
    for config in (FAMILY.default(spec, H200, ALIGNED), FAMILY.default(spec, H200, ALIGNED, 1, few_rows)):
        artifact = build(spec, config.name, tmp_path)
        assert artifact.spill_bytes <= 128, "once a tile, outside the loop over keys"
    assert config["splits"] > 1


def test_a_kernel_whose_products_ptxas_puts_in_line_is_refused(tmp_path: Path) -> None:
    """Of head_dim 128 three warpgroups have no registers for blocks of 128 keys; triton would not tell."""
    name = "c3x1n128s2g4p1_late_lazy_tree_lane_plain"
    spec = AttentionSpec(128, 128, "bf16", FULL)
    assert "holds 192 registers" in FAMILY.fits(FAMILY.find(name), spec, H200)
    with pytest.raises(CompileFailed, match=r"ptxas C7512: .*wgmma"):
        build(spec, name, tmp_path)
    assert not list(tmp_path.glob("artifacts/*")), "a later run refuses it too"


# The log of ptxas

SMALL = AttentionSpec(64, 64, "fp16", FULL), "c1x1n64s2g4p1_late_always_chain_row_plain"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The logs for which ptxas ran a second time; Triton's cache is empty, and this thread alone."""
    logs: list[str] = []
    ptxas_log = compiler._ptxas_log

    def noted(*arguments: Any) -> str:
        logs.append(ptxas_log(*arguments))
        return logs[-1]

    monkeypatch.setattr(compiler, "_ptxas_log", noted)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with compiler.scratch():
        yield logs


def test_one_run_of_ptxas_gives_kernel_and_log(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    monkeypatch.setattr(compiler, "_check_asynchronous", lambda name, said, *_: heard.append(said))
    before = dict(os.environ)
    build(*SMALL, tmp_path)
    assert not runs and capsys.readouterr().out == "" and dict(os.environ) == before
    build(*SMALL, tmp_path / "other")  # out of Triton's cache
    assert len(runs) == 1
    first, second = (re.sub("Compile time = .*", "", said).split() for said in heard)
    assert first == second and "registers," in first


def test_the_log_is_read_of_a_kernel_out_of_tritons_cache(runs: list[str], tmp_path: Path) -> None:
    spec = AttentionSpec(128, 128, "bf16", FULL)
    for cache, count in (("one", 0), ("other", 1)):
        with pytest.raises(CompileFailed, match="ptxas C7512"):
            build(spec, "c3x1n128s2g4p1_late_lazy_tree_lane_plain", tmp_path / cache)
        assert len(runs) == count


def test_what_other_threads_print_is_theirs(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    triton_compile = compiler.triton_compile

    def beside(*arguments: Any) -> Any:
        print("another thread's")
        return triton_compile(*arguments)

    monkeypatch.setattr(compiler, "triton_compile", beside)
    build(*SMALL, tmp_path)
    assert len(runs) == 1 and capsys.readouterr().out == "another thread's\n"


# Spills

SASS = """
        /*0000*/                   LDL R1, [R2] ;                      /* 0x0000000000017a02 */
        /*0010*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0020*/                   STL [R1], R4 ;
        /*0030*/              @!P0 LDL.64 R8, [R1+0x8] ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], !UPT, gsb0 ;
        /*0050*/              @P1  STL.128 [R1+0x10], R4 ;
        /*0060*/              @P2  BRA 0x20 ;
        /*0070*/                   STL [R1], R4 ;
        /*0080*/                   LDL R4, [R1] ;
        /*0090*/               @P3 BRA 0x80 ;
        /*00a0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00b0*/                   LDL R4, [R1] ;
        /*00c0*/              @!P4 BRA 0xa0 ;
        /*00d0*/                   LDS R4, [R1] ;
        /*00e0*/                   BRA 0x10 ;
        /*00f0*/                   LDL R4, [R1] ;
        /*0100*/                   BRA 0x100;
"""
"""Loops at 20-60, 80-90, a0-c0 in one at 10-e0; the second multiplies nothing."""


def test_spills_count_in_the_innermost_loops_that_multiply() -> None:
    assert spills_in_loops(SASS) == 3 + 1


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (
            ("@P2  BRA 0x20", "@P2  BRA 0x70"),
            1,
        ),  # forwards is no loop: what was in it belongs to the outer one
        (("@!P4 BRA 0xa0", "@!P4 BRA 0xb0"), 3),  # a loop without its product
        (("@!P4 BRA 0xa0", "     BRA 0xa0"), 3),  # the way back from code that was put behind all other
        (("HGMMA.64x64x16.F32.BF16", "HMMA.16816.F32.BF16"), 4),
        (("HGMMA.64x128x16.F32.BF16", "FFMA"), 1),
        (("STL.128", "STG.E.128"), 3),
        (("LDL.64", "LDS.64"), 3),
        (("BRA 0xa0", "BRA 0xb0"), 3),
    ],
    ids=lambda each: each[1].replace(" ", "_") if isinstance(each, tuple) else "",
)
def test_what_is_a_loop_and_what_is_a_spill(change: tuple[str, str], count: int) -> None:
    assert SASS.count(change[0]) == 1
    assert spills_in_loops(SASS.replace(*change)) == count


def test_code_without_loops_or_spills_has_none() -> None:
    assert spills_in_loops("") == spills_in_loops(SASS.replace("LDL", "LDG").replace("STL", "STG")) == 0
    assert spills_in_loops(SASS.replace("HGMMA", "FFMA")) == 0


# What is known before a compile

RECORDED = Path(__file__).parent.parent / "data" / "compiled_sm90.jsonl"
DIMS = ((64, 64), (128, 128), (256, 256), (96, 96), (192, 128))


def row_key(row: dict[str, Any]) -> tuple[AttentionSpec, str]:
    mask = masks.parse_mask(row["mask"]).rule
    return AttentionSpec(row["head_dim"], row["head_dim_v"], "bf16", mask), row["config"]


def compiles() -> Iterator[dict[str, Any]]:
    """Eight configs for each head dim, two of which do not fit, where there are any."""
    draw = random.Random(0)
    for head_dim, head_dim_v in DIMS:
        spec = AttentionSpec(head_dim, head_dim_v, "bf16", CAUSAL)
        fitting = FAMILY.space(spec, H200)
        refused = [each for each in FAMILY.all_configs() if each not in set(fitting)]
        chosen = draw.sample(refused, min(2, len(refused)))
        for index, config in enumerate([*chosen, *draw.sample(fitting, 8 - len(chosen))]):
            yield {
                "head_dim": head_dim,
                "head_dim_v": head_dim_v,
                "mask": ("causal", "full")[index % 2],
                "config": config.name,
            }


def outcome(row: dict[str, Any], cache: Path) -> dict[str, Any]:
    try:
        artifact = build(*row_key(row), cache)
    except (CompileFailed, DoesNotFit) as error:
        found = re.search(r"C75\d\d|needs [\d.]+ KB|spills registers", str(error))
        return {"refused": found[0] if found else str(error)}
    return {name: getattr(artifact, name) for name in ("shared_bytes", "registers", "spill_bytes")}


def test_nothing_that_compiled_is_refused_and_shared_memory_keeps_within_its_bounds(tmp_path: Path) -> None:
    """Over recorded compiles; FLASHGEN_UPDATE_COMPILED=1 compiles and records them anew (5 minutes)."""
    if os.environ.get("FLASHGEN_UPDATE_COMPILED"):
        lines = (json.dumps({**row, **outcome(row, tmp_path)}) + "\n" for row in compiles())
        RECORDED.write_text("".join(lines))
    rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len(rows) == 8 * len(DIMS)
    good = [row for row in rows if "refused" not in row]
    fitting = [row for row in rows if not FAMILY.fits(FAMILY.find(row["config"]), row_key(row)[0], H200)]
    assert len([row for row in fitting if "refused" in row]) <= 4, "ptxas decides the rest, which is little"
    assert {(row["head_dim"], row["head_dim_v"]) for row in good} == set(DIMS) and len(good) >= 20
    for row in good:
        spec, name = row_key(row)
        config = FAMILY.find(name)
        assert not FAMILY.fits(config, spec, H200), row
        bound = FAMILY.shared_bytes(config, spec, H200)
        assert bound.least <= row["shared_bytes"] <= bound.most <= H200.shared_per_block, row
        assert row["registers"] <= 65536 // (32 * FAMILY.tiling(config).warps), row


@pytest.mark.parametrize(
    "config", ["c2x1n128s2g4p1_late_lazy_tree_lane_dynamic", "c2x1n64s2g4p4_late_lazy_tree_lane_plain"]
)
@pytest.mark.parametrize("rule", [FULL, CAUSAL], ids=str)
def test_packed_sequences_cost_no_register(rule: Rule, config: str, tmp_path: Path) -> None:
    """What a kernel reads of each tile's sequence stays out of its loop; all its tiles come and go by TMA."""
    dense = AttentionSpec(128, 128, "bf16", rule, return_lse=True)
    packed = build(replace(dense, addressing="varlen"), config, tmp_path)
    assert packed.registers == build(dense, config, tmp_path).registers
    code = sass(packed.cubin)
    assert not spills_in_loops(code)
    assert len(re.findall(r"UTMALDG", code)) >= 3 and "UTMASTG" in code
