"""Rendered kernels: goldens, names, hashes and ABIs."""

from __future__ import annotations

import ast
import errno
import math
import os
import re
from pathlib import Path

import pytest

from flashgen.build.reference import E4M3_LIFT
from flashgen.codegen.abi import WORKSPACE, Abi, environment_names
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.family import Family
from flashgen.codegen.source import KernelSource, Toolchain, kernel_hash, render, write
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import parse_score_mod
from flashgen.spec.target import TARGETS, find_target

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILY, SM90 = FAMILIES["attention_fwd"], FAMILIES["attention_fwd_sm90"]
BWD, BWD_SM90 = FAMILIES["attention_bwd"], FAMILIES["attention_bwd_sm90"]
TOOLCHAIN = Toolchain("3.6.0")


def source(
    spec: AttentionSpec, config: str, toolchain: Toolchain = TOOLCHAIN, family: Family = FAMILY
) -> KernelSource:
    return render(spec, family.find(config), toolchain)


def sm90(spec: AttentionSpec, config: str) -> KernelSource:
    return source(spec, config, family=SM90)


def bwd(
    spec: AttentionSpec,
    config: str,
    lse: bool = False,
    toolchain: Toolchain = TOOLCHAIN,
    learned: tuple[str, ...] = (),
) -> KernelSource:
    return source(spec.backward(lse, bool(spec.sinks), learned), config, toolchain, BWD)


def bwd_sm90(spec: AttentionSpec, config: str) -> KernelSource:
    return source(spec.backward(sinks=bool(spec.sinks)), config, family=BWD_SM90)


CAUSAL = AttentionSpec(128, 128, "bf16", masks.causal().rule, return_lse=True)
SAMPLES = {
    "causal": source(CAUSAL, "m128n64w4s2_tma_heads"),
    "full_pointer": source(AttentionSpec(64, 64, "fp16"), "m64n64w4s3_pointer_rows"),
    "window_softcap_chunks": source(
        AttentionSpec(96, 72, "fp32", masks.sliding_window(1023, 0).rule, score_mods.softcap(30.0).rule),
        "m64n32w4s2_pointer_heads",
    ),
    "causal_key_padding": source(
        AttentionSpec(64, 64, "bf16", (masks.causal() & masks.key_padding()).rule), "m128n64w4s2_tma_rows"
    ),
    "union_of_ranges": source(
        AttentionSpec(64, 64, "bf16", (masks.sliding_window(64, 0) | ~masks.sliding_window(512, 512)).rule),
        "m64n64w4s2_tma_heads",
    ),
    "documents": source(
        AttentionSpec(64, 64, "bf16", (masks.causal() & masks.document()).rule), "m64n64w4s2_tma_heads"
    ),
    "prefix_bias": source(
        AttentionSpec(64, 64, "bf16", masks.prefix_lm().rule, score_mods.bias("hqk", "fp16").rule),
        "m64n64w4s2_tma_heads",
    ),
    "grid_neighborhood": source(
        AttentionSpec(64, 64, "bf16", masks.neighborhood((32, 48), (7, 7)).rule), "m64n64w4s2_tma_heads"
    ),
    "interpreter": source(
        AttentionSpec(16, 16, "bf16", positive_scale=False), "m16n32w4s1_tma_heads", Toolchain("3.6.0", True)
    ),
    "split_keys": source(AttentionSpec(64, 64, "bf16", masks.causal().rule), "m16n64w4s2k16_tma_heads"),
    "varlen": source(
        AttentionSpec(128, 128, "bf16", masks.causal().rule, addressing="varlen", return_lse=True),
        "m128n64w4s2_tma_heads",
    ),
    "varlen_pointer": source(
        AttentionSpec(64, 64, "fp16", masks.document().rule, addressing="varlen"), "m64n64w4s3_pointer_rows"
    ),
    "sm90_varlen": sm90(
        AttentionSpec(128, 128, "bf16", masks.causal().rule, addressing="varlen", return_lse=True),
        "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic",
    ),
    "sm90_varlen_plain": sm90(
        AttentionSpec(96, 96, "bf16", addressing="varlen", return_lse=True),
        "c1x1n64s2g4p4_late_always_tree_row_plain",
    ),
    "sm90_causal": sm90(
        AttentionSpec(128, 128, "bf16", masks.causal().rule), "c3x1n64s2g4p1_late_lazy_tree_lane_dynamic"
    ),
    "sm90_full_plain_pinned": sm90(
        AttentionSpec(128, 128, "bf16", return_lse=True), "c2x1n128s2g16p1_pinned_always_chain_row_plain"
    ),
    "sm90_union_of_ranges": sm90(
        AttentionSpec(64, 64, "bf16", (masks.sliding_window(64, 0) | ~masks.sliding_window(512, 512)).rule),
        "c3x1n128s2g4p1_early_lazy_tree_lane_dynamic",
    ),
    "sm90_window_softcap": sm90(
        AttentionSpec(192, 128, "bf16", masks.sliding_window(1023, 0).rule, score_mods.softcap(30.0).rule),
        "c2x1n64s3g4p1_pinned_lazy_tree_lane_dynamic",
    ),
    "sm90_documents": sm90(
        AttentionSpec(128, 128, "bf16", (masks.causal() & masks.document()).rule),
        "c2x1n64s4g4p1_late_always_tree_lane_dynamic",
    ),
    "sm90_documents_in_order": sm90(
        AttentionSpec(128, 128, "bf16", (masks.causal() & masks.document("ordered")).rule),
        "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic",
    ),
    "sm90_blocks": sm90(
        AttentionSpec(64, 64, "bf16", (masks.causal() & masks.block_sparse("heads", 128)).rule),
        "c1x2n64s4g4p1_late_lazy_tree_lane_dynamic",
    ),
    "sm90_dilated_alibi": sm90(
        AttentionSpec(64, 64, "bf16", (masks.causal() & masks.dilated(512, 4)).rule, score_mods.alibi().rule),
        "c1x2n64s4g4p1_late_lazy_tree_lane_plain",
    ),
    "window_sinks": source(
        AttentionSpec(64, 64, "bf16", masks.sliding_window(127, 0).rule, return_lse=True, sinks="bf16"),
        "m64n64w4s2_tma_heads",
    ),
    "split_sinks": source(
        AttentionSpec(64, 64, "bf16", masks.causal().rule, sinks="fp32"), "m16n64w4s2k16_tma_heads"
    ),
    "dropout_sinks": source(
        AttentionSpec(128, 128, "bf16", masks.causal().rule, return_lse=True, sinks="bf16", dropout=True),
        "m128n64w8s2_tma_heads",
    ),
    "split_dropout": source(AttentionSpec(64, 64, "bf16", dropout=True), "m16n64w4s2k16_tma_heads"),
    "sm90_window_sinks": sm90(
        AttentionSpec(64, 64, "bf16", masks.sliding_window(127, 0).rule, return_lse=True, sinks="bf16"),
        "c1x2n64s4g4p8_late_lazy_tree_lane_dynamic",
    ),
    "sm90_e4m3": sm90(
        AttentionSpec(128, 128, "e4m3", masks.causal().rule, return_lse=True),
        "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic",
    ),
    "sm90_e4m3_packed_chunks": sm90(
        AttentionSpec(80, 96, "e4m3", masks.full().rule, score_mods.softcap(30.0).rule, out_dtype="fp16"),
        "c1x1n64s2g4p4_early_always_chain_row_plain",
    ),
    "sm90_packed_chunks": sm90(
        AttentionSpec(96, 96, "fp16", masks.key_padding().rule, return_lse=True),
        "c1x1n64s2g4p4_late_always_tree_row_plain",
    ),
    "sm90_optimistic": sm90(
        AttentionSpec(128, 128, "bf16", masks.causal().rule, return_lse=True),
        "c3x1n64s3g4p1_late_lazy_optimistic_lane_dynamic",
    ),
    "sm90_optimistic_e4m3": sm90(
        AttentionSpec(128, 128, "e4m3", masks.full().rule), "c2x1n128s2g4p4_late_lazy_optimistic_lane_plain"
    ),
    "bwd_causal": bwd(CAUSAL, "m64n64w4s2_tma_heads"),
    "bwd_window_softcap_chunks": bwd(
        AttentionSpec(96, 72, "fp32", masks.sliding_window(1023, 0).rule, score_mods.softcap(30.0).rule),
        "m32n32w4s1_pointer_rows",
        lse=True,
    ),
    "bwd_documents_bias": bwd(
        AttentionSpec(
            64, 64, "bf16", (masks.causal() & masks.document()).rule, score_mods.bias("hqk", "fp16").rule
        ),
        "m64n64w4s2_tma_heads",
    ),
    "bwd_documents_in_order": bwd(
        AttentionSpec(64, 64, "bf16", masks.document("ordered").rule), "m64n64w4s2_tma_heads"
    ),
    "bwd_learned_alibi_bias": bwd(
        AttentionSpec(
            64, 64, "bf16", masks.causal().rule, parse_score_mod('alibi, bias("hqk", "bf16")').rule
        ),
        "m64n64w8s2_tma_heads",
        learned=("slopes", "bias"),
    ),
    "bwd_learned_distances": bwd(
        AttentionSpec(
            64,
            64,
            "fp16",
            score_mod=Rule.parse(
                "score", "w[k_idx] * score + t[head, abs(q_pos - k_idx)] where w: fp32, t: fp32", name="near"
            ),
        ),
        "m64n64w8s2_tma_heads",
        learned=("w", "t"),
    ),
    "bwd_varlen_sinks": bwd(
        AttentionSpec(64, 64, "bf16", masks.causal().rule, addressing="varlen", sinks="bf16"),
        "m64n64w4s2_tma_heads",
    ),
    "bwd_varlen_pointer": bwd(
        AttentionSpec(64, 64, "fp16", masks.document().rule, addressing="varlen"),
        "m64n32w4s2_pointer_rows",
    ),
    "bwd_interpreter": bwd(
        AttentionSpec(16, 16, "bf16"), "m32n32w4s1_tma_heads", toolchain=Toolchain("3.6.0", True)
    ),
    "bwd_dropout": bwd(
        AttentionSpec(128, 128, "bf16", masks.causal().rule, dropout=True), "m64n64w8s2_tma_heads"
    ),
    "bwd_fused_causal": bwd(CAUSAL, "m64n64w8s2_tma_heads_fused"),
    "bwd_fused_documents_chunks": bwd(
        AttentionSpec(
            96, 72, "bf16", (masks.causal() & masks.document()).rule, score_mods.softcap(30.0).rule
        ),
        "m64n64w8s2_pointer_rows_fused",
        lse=True,
    ),
    "bwd_sm90_causal": bwd_sm90(CAUSAL, "s2g4_shared"),
    "bwd_sm90_window_softcap": bwd_sm90(
        AttentionSpec(64, 64, "fp16", masks.sliding_window(1023, 0).rule, score_mods.softcap(30.0).rule),
        "s3g4_shared",
    ),
    "bwd_sm90_exchanged": bwd_sm90(
        AttentionSpec(256, 256, "bf16", masks.causal().rule, return_lse=True), "s2g4_exchanged"
    ),
    "bwd_sm90_exchanged_chunks_softcap": bwd_sm90(
        AttentionSpec(160, 144, "bf16", masks.sliding_window(1023, 0).rule, score_mods.softcap(30.0).rule),
        "s2g1_exchanged",
    ),
    "bwd_sm90_registers": bwd_sm90(AttentionSpec(64, 64, "bf16", masks.full().rule), "s2g4_registers"),
    "bwd_sm90_third": bwd_sm90(AttentionSpec(64, 64, "bf16", masks.causal().rule), "s3g4_registers_third"),
    "bwd_sm90_sinks": bwd_sm90(
        AttentionSpec(64, 64, "bf16", masks.causal().rule, sinks="bf16"), "s2g4_registers"
    ),
    "bwd_sm90_exchanged_sinks": bwd_sm90(
        AttentionSpec(192, 128, "bf16", masks.causal().rule, sinks="bf16"), "s2g4_exchanged"
    ),
    "bwd_sm90_documents": bwd_sm90(
        AttentionSpec(64, 64, "bf16", (masks.causal() & masks.document()).rule), "s2g4_registers"
    ),
    "bwd_sm90_exchanged_documents": bwd_sm90(
        AttentionSpec(192, 128, "bf16", (masks.causal() & masks.document()).rule), "s2g4_exchanged"
    ),
    "bwd_sm90_varlen_sinks": bwd_sm90(
        AttentionSpec(64, 64, "bf16", masks.causal().rule, addressing="varlen", sinks="bf16"),
        "s2g4_registers",
    ),
    "bwd_sm90_varlen_d128": bwd_sm90(
        AttentionSpec(128, 128, "bf16", masks.causal().rule, addressing="varlen"), "s2g4_shared"
    ),
    "bwd_sm90_exchanged_varlen_sinks": bwd_sm90(
        AttentionSpec(192, 128, "bf16", masks.causal().rule, addressing="varlen", sinks="bf16"),
        "s2g4_exchanged",
    ),
    "bwd_sm90_chunks_union_alibi": bwd_sm90(
        AttentionSpec(
            96,
            72,
            "bf16",
            (masks.sliding_window(64, 0) | ~masks.sliding_window(512, 512)).rule,
            score_mods.alibi().rule,
        ),
        "s2g1_shared",
    ),
    "sm90_grid_neighborhood": sm90(
        AttentionSpec(64, 64, "bf16", masks.neighborhood((64, 64), (13, 13)).rule),
        "c1x2n128s2g4p1_late_lazy_tree_lane_dynamic",
    ),
    "sm90_split_keys": sm90(
        AttentionSpec(128, 128, "bf16", masks.causal().rule, return_lse=True),
        "c2x1n64s4g4p4k16_late_lazy_tree_lane_dynamic",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_golden(name: str) -> None:
    """The rendered text is what was reviewed; FLASHGEN_UPDATE_GOLDEN=1 writes it anew."""
    path = GOLDEN / f"{name}.py"
    if os.environ.get("FLASHGEN_UPDATE_GOLDEN"):
        path.write_text(SAMPLES[name].text)
    assert path.exists(), f"no golden {path.name}; make it with FLASHGEN_UPDATE_GOLDEN=1 and review it"
    assert SAMPLES[name].text == path.read_text()


@pytest.mark.parametrize("name", SAMPLES)
def test_text_is_clean_python(name: str) -> None:
    text = SAMPLES[name].text
    ast.parse(text)
    assert "{{" not in text and "{%" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert [line for line in text.splitlines() if len(line) > 110 and not line.startswith("def ")] == []
    assert "\n\n\n\n" not in text


def test_name_says_what_the_kernel_is() -> None:
    assert SAMPLES["causal"].name == "attention_fwd_d128_causal_bf16_lse_m128n64w4s2_tma_heads"
    assert SAMPLES["causal"].name.isidentifier()


def test_numbers_change_header_lines_only() -> None:
    """Two configs of one structure differ in a few constants and the name."""
    other = source(CAUSAL, "m64n64w8s3_tma_heads")
    pairs = zip(SAMPLES["causal"].text.splitlines(), other.text.splitlines(), strict=True)
    changed = [a for a, b in pairs if a != b]
    assert len(changed) == 3  # BLOCK_M, LAUNCH, the function's name


def test_comments_are_true_of_the_kernel_they_stand_in() -> None:
    def comments(mask: str) -> str:
        spec = AttentionSpec(64, 64, "bf16", masks.parse_mask(mask).rule)
        text = source(spec, "m64n64w4s2_tma_heads").text
        return "\n".join(line.strip() for line in text.splitlines() if line.strip().startswith("#"))

    growing, whole, single = "they see the most keys", "kept by every row", "is asked of each"
    for mask, first, second in (
        ("full", "", whole),
        ("causal", growing, whole),
        ("sliding_window(5, 0)", "", whole),
        ("key_padding", "", whole),
        ('key_padding("keep")', "", single),
        ("~full", "", "No row keeps any key"),
    ):
        told = comments(mask)
        assert (growing in told) == bool(first), mask
        assert second in told and ("full_lo" in told) == (second == whole), mask
        assert "causal" not in told


def test_hash_ignores_comments_docstrings_and_the_name() -> None:
    text = SAMPLES["causal"].text
    edited = text.replace('"""Attention forward', '"""Something else').replace("# Keys to visit", "# Visited")
    edited = edited.replace(SAMPLES["causal"].name, "other_name")
    assert kernel_hash(edited) == SAMPLES["causal"].hash
    assert (
        kernel_hash(text.replace("row_sum = row_sum * rescale", "row_sum = row_sum"))
        != SAMPLES["causal"].hash
    )


def test_c27_the_hash_is_the_same_on_every_python() -> None:
    """A literal: another version of Python, or of FlashGen's hashing, must not make every record stale."""
    helper = "def helper(a):\n    return -a[1:]"
    kernel = "def kernel(q, k=1):\n    return q if k else helper(q)"
    text = f"import x\n\n{helper}\n\n{kernel}\n"
    assert kernel_hash(text) == "3bf90e3b7ca3f091"


def test_hash_separates_what_is_compiled() -> None:
    hashes = {s.hash for s in SAMPLES.values()} | {source(CAUSAL, "m64n64w4s2_tma_heads").hash}
    assert len(hashes) == len(SAMPLES) + 1


def test_signature_and_abi_agree() -> None:
    for sample in SAMPLES.values():
        function = ast.parse(sample.text).body[-1]
        assert isinstance(function, ast.FunctionDef)
        abi = sample.abi(CallFacts())
        assert [a.arg for a in function.args.args] == [a.name for a in abi.args]
        workspace = {WORKSPACE} if sample.config.to_json().get("schedule") == "dynamic" else set()
        known = environment_names(sample.spec, sample.scratch)
        assert {a.source for a in abi.args} - set(known) == workspace
        assert Abi.from_json(abi.to_json()) == abi


def test_parts_of_split_keys_are_merged_by_a_second_kernel_that_alone_has_the_output() -> None:
    for name, splits, lse in (("split_keys", 16, False), ("sm90_split_keys", 16, True)):
        sample = SAMPLES[name]
        (part,) = sample.parts
        functions = {
            node.name: node for node in ast.parse(sample.text).body if isinstance(node, ast.FunctionDef)
        }
        assert list(functions)[-1] == sample.name, "the hash takes the last one's name for the kernel's"
        abi = sample.abi(CallFacts(), part)
        assert [a.arg for a in functions[part.name].args.args] == [a.name for a in abi.args]
        assert not part.before and abi.grid.blocks(2, 8, 100, 132) == 2 * 8 * 100
        main, second = ({arg.source for arg in each.args} for each in (sample.abi(CallFacts()), abi))
        assert {"out", "lse"} & main == set() and {"out", "lse"} & second == {
            "out",
            *(["lse"] if lse else []),
        }
        buffers = {"scratch.partial", "scratch.partial_max", "scratch.partial_sum"}
        assert buffers <= main & second and all(buffer.dtype == "fp32" for buffer in sample.scratch)
        assert [each.of(3) for each in sample.scratch[0].extents] == [3 * splits, 3, 3, 3]


def test_splitting_keys_multiplies_the_programs() -> None:
    sizes = 2, 32, 16, 132
    split, whole = (SM90.find(f"c1x1n64s4g4p4{k}_late_lazy_tree_lane_plain") for k in ("k16", ""))
    assert SM90.tiling(split).grid.blocks(*sizes) == 16 * SM90.tiling(whole).grid.blocks(*sizes) == 16 * 16
    assert SAMPLES["sm90_split_keys"].abi(CallFacts()).grid.blocks(*sizes) == 132, (
        "those of a persistent grid"
    )


def test_abi_promises_what_the_call_has() -> None:
    sample = SAMPLES["full_pointer"]

    def args(facts: CallFacts) -> dict[str, tuple[str, int, int | None]]:
        return {a.name: (a.type, a.divisor, a.constant) for a in sample.abi(facts).args}

    aligned, unit, strided = (args(CallFacts(a, tma=False)) for a in ("aligned", "unit", "strided"))
    assert aligned["Q"] == ("*fp16", 16, None) and unit["Q"] == strided["Q"] == ("*fp16", 1, None)
    assert aligned["stride_kn"] == ("i32", 8, None) and unit["stride_kn"] == ("i32", 1, None)
    assert aligned["stride_vd"][2] == unit["stride_vd"][2] == 1 and strided["stride_vd"][2] is None
    wide = args(CallFacts("unit", tma=False, wide=True))
    assert wide["stride_qm"][0] == "i64" and wide["heads"][0] == "i32"


def test_the_parts_signature_and_abi_agree() -> None:
    sample = SAMPLES["sm90_e4m3"]
    (part,) = sample.parts
    functions = {f.name: f for f in ast.parse(sample.text).body if isinstance(f, ast.FunctionDef)}
    abi = sample.abi(CallFacts(), part)
    assert [a.arg for a in functions[part.name].args.args] == [a.name for a in abi.args]
    assert (part.before, abi.grid.rule, abi.environment) == (
        True,
        "key_tiles",
        sample.abi(CallFacts()).environment,
    )
    kinds = {a.name: (a.type, a.divisor) for a in abi.args}
    assert kinds["V"] == kinds["VALUES"] == ("*e4m3", 16) and kinds["padded_len"] == ("i32", 16)
    wide = {a.name: a.type for a in sample.abi(CallFacts(wide=True), part).args}
    assert wide["stride_vb"] == "i64" and wide["padded_len"] == "i32"


def test_a_kernel_of_8_bit_inputs_reads_v_from_the_buffer_and_factors_by_pointer() -> None:
    sample = SAMPLES["sm90_e4m3"]
    args = {a.name: a for a in sample.abi(CallFacts()).args}
    assert (args["V"].source, args["V"].type) == ("scratch.values", "tensordesc<e4m3[1,1,128,128]>")
    assert args["OUT"].type == "tensordesc<bf16[1,1,64,128]>"
    assert (args["Q_SCALE"].type, args["Q_SCALE"].divisor) == ("*fp32", 1), "nobody promises where it lies"
    assert {a.divisor for a in args.values() if a.name.startswith("stride_")} == {1}
    half = SAMPLES["sm90_e4m3_packed_chunks"]
    assert {a.type for a in half.abi(CallFacts()).args if a.name.startswith("OUT")} == {
        "tensordesc<fp16[1,4,16,64]>",
        "tensordesc<fp16[1,4,16,32]>",
    }
    assert "_e4m3_to_fp16_" in half.name


def test_the_weights_of_8_bits_stay_below_what_e4m3_holds() -> None:
    for name in ("sm90_e4m3", "sm90_e4m3_packed_chunks"):
        numbers = re.findall(r"^(LIFT|SLACK) = gl.constexpr\(([\d.]+)\)", SAMPLES[name].text, re.MULTILINE)
        assert {name for name, _ in numbers} >= {"LIFT"}
        assert 2.0 ** math.fsum(float(value) for _, value in numbers) <= 448
        assert 2.0 ** float(dict(numbers)["LIFT"]) >= E4M3_LIFT


def test_c17_the_cap_is_a_runtime_argument() -> None:
    """Another cap is another argument, not another kernel, so no stale kernel can serve it."""
    specs = [AttentionSpec(64, 64, "bf16", score_mod=score_mods.softcap(cap).rule) for cap in (15.0, 30.0)]
    assert specs[0] == specs[1]
    assert "score_cap" in [a.name for a in source(specs[0], "m64n64w4s2_tma_heads").abi(CallFacts()).args]


def test_c34_a_full_disk_leaves_nothing_beside_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: object, *_: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    for method in ("write_bytes", "replace"):
        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
            patched.setattr(Path, method, full)
            write(SAMPLES["causal"], tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_c27_the_hash_is_of_content_not_of_place(tmp_path: Path) -> None:
    first, second = write(SAMPLES["causal"], tmp_path / "a"), write(SAMPLES["causal"], tmp_path / "b")
    assert first.name == second.name and first.read_text() == second.read_text()
    before = first.stat().st_mtime_ns
    assert write(SAMPLES["causal"], tmp_path / "a").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("triton", "load", "store"),
    [
        ("3.6.0", "async_copy_global_to_shared", "async_copy_shared_to_global"),
        ("3.7.1", "async_copy_global_to_shared", "async_copy_shared_to_global"),
        ("3.8.0", "async_load", "async_store"),
        ("3.10.0+git", "async_load", "async_store"),
        ("built here", "async_copy_global_to_shared", "async_copy_shared_to_global"),
    ],
)
def test_copies_by_tma_have_the_names_of_the_toolchain(triton: str, load: str, store: str) -> None:
    """A record may name any version; whatever it names renders."""
    config = "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic"
    text = source(CAUSAL, config, Toolchain(triton), SM90).text
    assert set(re.findall(r"tma\.(async_\w+)", text)) == {load, store}


@pytest.mark.parametrize("config", ["m16n64w4s2k16_tma_heads", "m128n64w4s2_tma_heads"])
def test_packed_sequences_have_no_lists_and_no_splits(config: str) -> None:
    spec = AttentionSpec(64, 64, "bf16", (masks.causal() & masks.document()).rule, addressing="varlen")
    found = FAMILY.find(config)
    made = source(spec, "m64n64w4s2_tma_heads")
    assert not made.parts and not made.scratch and "classify_tiles" not in made.text
    reason = FAMILY.fits(found, spec, find_target("nvidia-h200"))
    assert bool(reason) == ("k16" in config) and ("these are packed" in reason or not reason)


def test_8_bit_inputs_are_not_served_packed() -> None:
    spec = AttentionSpec(64, 64, "e4m3", addressing="varlen")
    assert "one length of all sequences" in SM90.supports(spec, find_target("nvidia-h200"))


def test_a_dense_kernel_knows_nothing_of_packed_sequences() -> None:
    for name, sample in SAMPLES.items():
        assert ("CU_Q" in sample.text) == ("varlen" in name) == ("varlen" in sample.name)
        assert sample.abi(CallFacts()).grid.rule.startswith("packed") == ("varlen" in name)


def test_an_optimistic_maximum_is_refused_where_a_bias_may_leave_a_row_without_any_score() -> None:
    config, h200 = SM90.find("c2x1n64s2g4p1_late_lazy_optimistic_lane_dynamic"), TARGETS["nvidia-h200"]
    assert not SM90.fits(config, AttentionSpec(64, 64, "bf16"), h200)
    biased = AttentionSpec(64, 64, "bf16", score_mod=score_mods.bias().rule)
    assert "may give -inf" in SM90.fits(config, biased, h200)


def test_a_score_rule_that_writes_an_infinity_guards_its_rows() -> None:
    rule = Rule.parse("score", "where(q_idx >= k_idx, score, -inf)")
    assert rule.may_drop and not score_mods.softcap(5.0).rule.may_drop
    config, h200 = SM90.find("c2x1n64s2g4p1_late_lazy_optimistic_lane_dynamic"), TARGETS["nvidia-h200"]
    assert "may give -inf" in SM90.fits(config, AttentionSpec(64, 64, "bf16", score_mod=rule), h200)
    guarded = 'shift = tl.where(new_max == float("-inf"), 0.0, new_max)'
    assert guarded in source(AttentionSpec(64, 64, "bf16", score_mod=rule), "m64n64w4s2_tma_heads").text
