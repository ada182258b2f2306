"""A bundle on a real GPU, in a process without triton, jinja2, sqlalchemy, optuna and a C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.device import live_target
from flashgen.bundle.load import load_bundle
from flashgen.bundle.manifest import BundledKernel
from flashgen.bundle.write import wanted, write_bundle
from flashgen.codegen.families import find_family
from flashgen.codegen.source import render
from flashgen.errors import BundleError
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.spec.target import Target

CREATED = "2026-11-29T12:00:00+00:00"
ROOT = Path(__file__).parents[2]
SCRIPT = '''
"""Loads the bundle and compares calls of every kind with the reference."""
import sys
sys.path.insert(0, sys.argv[2])
from blocked import block, loaded
block()
import torch
import flashgen
from flashgen.build.reference import attention_reference
from flashgen import masks

bundle = flashgen.load_bundle(sys.argv[1])
name = f"bundle {sys.argv[1].rpartition('/')[2]}"
torch.manual_seed(0)
device = "cuda:0"
def normal(*shape):
    return torch.randn(shape, device=device, dtype=torch.bfloat16)
def calls():
    q, k, v = normal(2, 8, 512, 64), normal(2, 2, 512, 64), normal(2, 2, 512, 64)
    yield "aligned", q, k, v
    yield "other sizes", normal(3, 8, 77, 64), normal(3, 2, 901, 64), normal(3, 2, 901, 64)
    yield "misaligned", normal(2 * 8 * 512 * 64 + 1)[1:].view(q.shape), k, v
    yield "strided", q, normal(2, 2, 512, 128)[..., ::2], v
    yield "broadcast", q, k[:1].expand(2, -1, -1, -1), v
for what, q, k, v in calls():
    for layout in ("bhsd", "bshd"):
        given = (q, k, v) if layout == "bhsd" else tuple(t.transpose(1, 2) for t in (q, k, v))
        out, lse = flashgen.attention(*given, mask="causal", layout=layout, return_lse=True)
        alone = flashgen.attention(*given, mask="causal", layout=layout)
        assert torch.equal(out, alone), what
        exact, exact_lse = attention_reference(q, k, v, mask=masks.causal())
        torch.testing.assert_close(
            (out if layout == "bhsd" else out.transpose(1, 2)).float(), exact.float(), atol=2e-2, rtol=2e-2
        )
        torch.testing.assert_close(lse, exact_lse.float(), atol=1e-3, rtol=1e-3)
    steps = flashgen.explain(q, k, v, mask="causal").steps
    accepted = [step.source for step in steps if step.verdict == "accepted"]
    assert accepted == [name], (what, accepted)
print("right", "imported:", loaded())
'''


def made(target: Target, cache: Path, out: Path, splits: int = 1) -> Path:
    """A bundle for `target` of one spec, by descriptor (where the GPU has it) and by pointer."""
    family, versions = find_family("attention_fwd"), Versions("0.1.0", toolchain().triton)
    spec = AttentionSpec(64, 64, "bf16", mask=masks.causal().rule)
    records, kernels = [], []
    for loads in ("tma", "pointer") if target.has_tma else ("pointer",):
        tile = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
        config = family.config(**tile, loads=loads, order="heads", splits=splits)
        admission = family.admission(config)
        measurement = Measurement(Status.OK, 10.0, 10.0, 10.0, 5)
        workload = Workload(spec, 2, 8, 2, 512, 512)
        hash_ = render(spec, config, toolchain()).hash
        records.append(
            Record(target, workload, config, measurement, hash_, versions, admission, created_at=CREATED)
        )
        for variant, facts in wanted(spec, admission):
            source = render(variant, config, toolchain())
            artifact = compile_kernel(source, facts, target, cache)
            kernels.append(BundledKernel(variant, config, source.text, artifact))
    return write_bundle(records, kernels, out, target, versions)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_bundle_computes_without_the_compiler_side(splits: int, tmp_path: Path) -> None:
    bundle = made(live_target(0), tmp_path / "cache", tmp_path / "test.bundle", splits)
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    kept = {n: v for n, v in os.environ.items() if n not in ("PATH", "CC", "CXX", "CUDA_HOME", "PYTHONPATH")}
    site = os.environ.get("PYTHONPATH", "")
    result = subprocess.run(
        [sys.executable, str(script), str(bundle), str(ROOT / "tests" / "bundle")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={
            **kept,
            "PATH": "",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *site.split(os.pathsep)]),
            "FLASHGEN_DB": str(tmp_path / "none.db"),
            "FLASHGEN_CACHE": str(tmp_path / "no-cache"),
        },
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.strip() == "right imported: []"


def test_c37_a_bundle_for_another_gpu_is_refused_with_both_named(tmp_path: Path) -> None:
    live = live_target(0)
    other = replace(live, sm_count=live.sm_count - 1, name="other")
    bundle = made(other, tmp_path / "cache", tmp_path / "test.bundle")
    with pytest.raises(BundleError) as refused:
        load_bundle(bundle)
    assert live.describe() in str(refused.value)
    assert other.describe() in str(refused.value)
