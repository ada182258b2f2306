"""Memory errors: under CUDA's own checkers where the machine lets them run, and without torch's caching."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).with_name("sample_calls.py")
ROOT = SAMPLE.parents[2]
CHECKER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sample(*before: str, only: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the sample, with all families or only some.

    Each tensor is an allocation of its own, so that no neighbour hides a stray access.
    """
    return subprocess.run(
        [*before, sys.executable, str(SAMPLE), *only],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def test_c38_calls_are_right_without_a_caching_allocator() -> None:
    done = sample()
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr[-3000:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool,only", [("memcheck", ()), ("racecheck", ("attention_fwd",))], ids=str)
def test_c38_the_checkers_find_nothing(tool: str, only: tuple[str, ...]) -> None:
    """Of a kernel with several partitions racecheck reports what mbarriers and Triton's own dispatch of the
    partitions keep in order: it follows no barrier at which only a part of a block arrives."""
    if CHECKER is None:
        pytest.skip("compute-sanitizer is not installed")
    assert sample(only=only).returncode == 0  # compiles, which need not be watched
    # A kernel's parameters are counted by asking for one more, which the checker would report too.
    done = sample(CHECKER, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", only=only)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this machine's device")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "right" in done.stdout
