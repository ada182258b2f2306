"""Offline compiles with ptxas: every target, what the machine code is made of, the cache, refusals."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.build import compile as compiler
from flashgen.build.artifact import Artifact
from flashgen.build.compile import compile_kernel, load_module, sass, toolchain
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render, write
from flashgen.errors import CompileFailed, CompilerUnavailable, DoesNotFit
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.target import TARGETS

FAMILY = FAMILIES["attention_fwd"]
ALIGNED = CallFacts()
ANY = CallFacts("strided", tma=False, wide=True)
CAUSAL = AttentionSpec(64, 64, "bf16", masks.causal().rule, return_lse=True)
H200 = TARGETS["nvidia-h200"]
ONE_EACH_ARCH = {t.arch: t for t in TARGETS.values()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def build(spec: AttentionSpec, config: str, facts: CallFacts, target: Any, cache: Path) -> Artifact:
    return compile_kernel(render(spec, FAMILY.find(config), toolchain()), facts, target, cache)


@pytest.mark.parametrize("arch", sorted(ONE_EACH_ARCH))
def test_default_compiles_for_every_architecture(arch: int, cache: Path) -> None:
    target = ONE_EACH_ARCH[arch]
    config = FAMILY.default(CAUSAL, target, ALIGNED)
    artifact = build(CAUSAL, config.name, ALIGNED, target, cache)
    assert artifact.arch == arch and f"sm_{arch}" in artifact.ptx
    assert 0 < artifact.registers <= 255
    assert (
        FAMILY.shared_bytes(config, CAUSAL, target).least <= artifact.shared_bytes <= target.shared_per_block
    )
    assert len(artifact.descriptors) == (3 if target.has_tma else 0)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (256, 16)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_defaults_spill_little(dims: tuple[int, int], dtype: str, cache: Path) -> None:
    """What a first call gets without any record: fp32 unrolls its products, and large tiles of it spill
    kilobytes and compile for minutes."""
    spec = AttentionSpec(*dims, dtype, masks.causal().rule)
    artifact = build(spec, FAMILY.default(spec, H200, ALIGNED).name, ALIGNED, H200, cache)
    assert artifact.spill_bytes <= 256


def test_hopper_uses_asynchronous_products_and_descriptor_loads(cache: Path) -> None:
    code = sass(build(CAUSAL, "m64n64w4s2_tma_heads", ALIGNED, H200, cache).cubin)
    assert "HGMMA" in code and "UTMALDG.4D" in code


def test_aligned_pointer_loads_are_16_bytes_wide(cache: Path) -> None:
    """Without the ABI's divisibility each load would be of 2 bytes: another kernel than the one that runs."""
    aligned = build(CAUSAL, "m64n64w4s2_pointer_heads", ALIGNED, H200, cache).ptx
    unaligned = build(CAUSAL, "m64n64w4s2_pointer_heads", ANY, H200, cache).ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x10", aligned)
    assert "cp.async.cg" not in unaligned


def test_stride_types_follow_the_call(cache: Path) -> None:
    narrow = build(CAUSAL, "m64n64w4s2_pointer_heads", CallFacts("unit", tma=False), H200, cache)
    wide = build(CAUSAL, "m64n64w4s2_pointer_heads", ANY, H200, cache)
    count = [
        len(re.findall(r"\.param \.b64 \w+|\.param \.u64 \w+", a.ptx.split(")")[0])) for a in (narrow, wide)
    ]
    assert count[1] > count[0]


LENGTHS = masks.key_padding(torch.ones(2, dtype=torch.int64))
VARIED = (
    AttentionSpec(64, 64, "bf16", LENGTHS.rule),
    AttentionSpec(64, 64, "bf16", (masks.causal() & LENGTHS | masks.sliding_window(3, 3)).rule),
    AttentionSpec(96, 72, "fp16", masks.sliding_window(9, 3).rule, score_mods.softcap(5.0).rule),
    AttentionSpec(64, 64, "bf16", (masks.causal() & masks.key_padding("keep")).rule),
    AttentionSpec(64, 64, "bf16", (masks.sliding_window(9, 3) | ~masks.sliding_window(99, 99)).rule),
    AttentionSpec(64, 64, "fp32", masks.causal().rule, fp32_precision="tf32"),
    AttentionSpec(192, 128, "bf16", masks.causal().rule, positive_scale=False),
)


@pytest.mark.parametrize("spec", VARIED, ids=lambda s: s.key.replace(" ", "_")[:40])
def test_masks_rules_and_dims_compile(spec: AttentionSpec, cache: Path) -> None:
    artifact = build(spec, "m64n32w4s2_tma_heads", ALIGNED, H200, cache)
    assert artifact.shared_bytes <= H200.shared_per_block


def test_artifacts_are_cached_by_content(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(CAUSAL, "m64n32w4s2_tma_heads", ALIGNED, H200, cache)

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_compile", refuse)
    assert build(CAUSAL, "m64n32w4s2_tma_heads", ALIGNED, H200, cache) == first


def test_damaged_cache_entry_is_compiled_again(tmp_path: Path) -> None:
    first = build(CAUSAL, "m16n32w4s1_tma_heads", ALIGNED, H200, tmp_path)
    (cubin,) = (tmp_path / "artifacts").glob("*.cubin")
    cubin.write_bytes(cubin.read_bytes()[:100])
    assert build(CAUSAL, "m16n32w4s1_tma_heads", ALIGNED, H200, tmp_path).cubin == first.cubin


def test_c34_cache_that_cannot_be_written_costs_only_the_compile(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    artifact = build(CAUSAL, "m16n32w4s1_tma_heads", ALIGNED, H200, tmp_path / "file" / "cache")
    assert artifact.cubin


def test_c34_a_cache_on_a_full_disk_costs_only_the_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        if tmp_path in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr("flashgen.codegen.source.write_whole", full)
    monkeypatch.setattr(compiler, "write_whole", full)
    assert build(CAUSAL, "m16n32w4s1_tma_heads", ALIGNED, H200, tmp_path).cubin
    assert list(tmp_path.iterdir()) == []


NOBODY = 65534
UNPRIVILEGED = """
import os, sys
from test_compile import ALIGNED, CAUSAL, FAMILY, H200, NOBODY, compile_kernel, compiler, render, toolchain
source, large = (render(CAUSAL, FAMILY.find(f"m{m}n32w4s1_tma_heads"), toolchain()) for m in (16, 64))
with compiler.scratch() as folder:  # loads all code: the interpreter itself may be root's alone
    compile_kernel(source, ALIGNED, H200, folder)
os.setgroups([]); os.setgid(NOBODY); os.setuid(NOBODY)
from triton import knobs
if not os.access(knobs.nvidia.ptxas.path, os.X_OK):
    sys.exit(77)
before = dict(os.environ), knobs.cache.dir
assert before[1] == "/.triton/cache"
print(compile_kernel(large, ALIGNED, H200).registers)
assert before == (dict(os.environ), knobs.cache.dir)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root to drop rights")
def test_c34_home_at_the_root_of_the_file_system() -> None:
    ours = ("XDG", "FLASHGEN", "TRITON", "HOME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-B", "-c", UNPRIVILEGED],
        env={**kept, "PYTHONPATH": paths, "HOME": "/"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 77:
        pytest.skip("other users cannot run this checkout's ptxas")
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= 255


FAILING = {
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "ptxas is missing": RuntimeError("Cannot find ptxas"),
    "ptxas was killed": RuntimeError("PTXAS error: `ptxas` failed with error code -9\n`ptxas` stderr:\n"),
    "memory": MemoryError(),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_machine_is_not_the_kernels_fault(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise FAILING[name]

    monkeypatch.setattr(compiler, "triton_compile", fail)
    with pytest.raises(CompilerUnavailable, match=r"cannot be compiled on this machine \(.*TMPDIR") as caught:
        build(CAUSAL, "m16n32w4s1_tma_heads", ALIGNED, H200, tmp_path)
    assert (caught.value.errno == errno.ENOMEM) == (name in ("memory", "ptxas was killed"))


def test_a_failing_cuobjdump_is_not_the_kernels_fault(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = build(CAUSAL, "m16n32w4s1_tma_heads", ALIGNED, H200, cache).cubin
    with pytest.raises(OSError, match="cuobjdump ended with code 255: "):
        compiler.resource_usage(cubin[:1500])
    with pytest.raises(OSError, match=r"cuobjdump cannot be used: .* timed out"):
        monkeypatch.setattr(compiler, "_TOOL_TIMEOUT_S", 1e-6)
        compiler.resource_usage(cubin)


def test_c15_too_much_shared_memory_is_refused_with_numbers(cache: Path) -> None:
    spec = AttentionSpec(256, 256, "bf16")
    with pytest.raises(
        DoesNotFit, match=r"needs \d+\.\d KB of shared memory a block, nvidia-rtx4090 has 99 KB"
    ):
        build(spec, "m64n64w4s2_pointer_heads", ALIGNED, TARGETS["nvidia-rtx4090"], cache)


def test_compiler_errors_keep_their_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = render(CAUSAL, FAMILY.find("m16n32w4s1_tma_heads"), toolchain())
    broken = source.text.replace("row_max = new_max", "row_max = no_such_name")
    monkeypatch.setattr(compiler, "write", lambda _, folder: _written(broken, folder))
    with pytest.raises(CompileFailed, match="no_such_name"):
        compile_kernel(source, ALIGNED, H200, tmp_path)


def _written(text: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "broken.py"
    path.write_text(text)
    return path


class _OfflineDriver:
    """Enough of a driver for Triton's own JIT to specialise and compile for an H200."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def test_the_jit_would_build_the_same_code(cache: Path, tmp_path: Path) -> None:
    """One compile path: what we build offline is what `kernel[grid](...)` would have specialised to."""
    from triton.runtime import driver

    spec = AttentionSpec(64, 64, "bf16", masks.causal().rule)
    source = render(spec, FAMILY.find("m64n64w4s2_pointer_heads"), toolchain())
    ours = compile_kernel(source, ALIGNED, H200, cache)
    function = getattr(load_module(write(source, tmp_path)), source.name)
    q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16)
    values = {
        "q": q,
        "k": q,
        "v": q,
        "out": q,
        "heads": 4,
        "heads_per_kv": 4,
        "q_len": 127,
        "k_len": 127,
        "scale": 0.1,
    }
    strides = dict(zip(("batch", "head", "row", "dim"), q.stride(), strict=True))
    args = [values.get(a.source, strides.get(a.source.split(".")[-1])) for a in ours.abi.args]
    previous = driver._active
    driver.set_active(_OfflineDriver())
    try:
        options = {"num_warps": ours.abi.num_warps, "num_stages": ours.abi.num_stages}
        theirs = function.warmup(*args, grid=(1,), **options)
    finally:
        driver._active = previous
    assert _instructions(sass(theirs.asm["cubin"])) == _instructions(sass(ours.cubin))


def _instructions(text: str) -> list[str]:
    """The machine instructions, without addresses, encodings and headers."""
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?;)", text, re.MULTILINE)
