"""Real kernels, compiled offline for an H200, as a bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.versions import triton_version
from flashgen.bundle.manifest import BundledKernel
from flashgen.bundle.write import wanted
from flashgen.codegen.families import find_family
from flashgen.codegen.source import render
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.spec.target import find_target

H200 = find_target("nvidia-h200")
FAMILY = find_family("attention_fwd")
SPEC = AttentionSpec(64, 64, "bf16", mask=masks.causal().rule)
VERSIONS = Versions("0.1.0", triton_version())


def config(loads: str) -> Config:
    return FAMILY.config(block_m=64, block_n=32, num_warps=4, num_stages=2, loads=loads, order="heads")


def record(loads: str, seq: int, median_us: float) -> Record:
    conf = config(loads)
    return Record(
        target=H200,
        workload=Workload(SPEC, 2, 8, 2, seq, seq),
        config=conf,
        measurement=Measurement(Status.OK, median_us, median_us, median_us, 5, 1e-3, 98, 0, 20_000),
        kernel_hash=render(SPEC, conf, toolchain()).hash,
        versions=VERSIONS,
        admission=FAMILY.admission(conf),
        created_at="2026-01-01T00:00:00+00:00",
    )


def records() -> tuple[Record, ...]:
    """Winners of two sizes: by descriptor and by pointer."""
    return tuple(
        record(loads, seq, us) for seq in (512, 4096) for loads, us in (("tma", 10.0), ("pointer", 12.0))
    )


def kernels(cache: Path) -> tuple[BundledKernel, ...]:
    """What both configs need: 6 compiles of about a second."""
    made = []
    for loads in ("tma", "pointer"):
        conf = config(loads)
        for spec, facts in wanted(SPEC, FAMILY.admission(conf)):
            source = render(spec, conf, toolchain())
            made.append(BundledKernel(spec, conf, source.text, compile_kernel(source, facts, H200, cache)))
    return tuple(made)


def with_lse(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, return_lse=True)
