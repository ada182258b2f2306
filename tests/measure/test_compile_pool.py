"""Compiling ahead, in processes that hang and crash."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import misbehave
import pytest
from processes import is_gone

from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import Toolchain
from flashgen.measure.compile_pool import AHEAD, Compiled, CompilePool
from flashgen.measure.worker import MeasuringFailed
from flashgen.spec.attention import CallFacts
from flashgen.spec.record import Measurement, Status

FAMILY = FAMILIES["attention_fwd"]
CONFIGS = FAMILY.all_configs()
TOOLCHAIN = Toolchain("3.6.0")


def pool(jobs: int = 2, timeout_s: float = 60.0, **behaviours: str) -> CompilePool:
    named = {CONFIGS[int(index[1:])].name: behaviour for index, behaviour in behaviours.items()}
    return CompilePool(
        misbehave.TARGET,
        TOOLCHAIN,
        jobs,
        timeout_s=timeout_s,
        entry="bad_compilers:compiler",
        options={"behaviours": named},
    )


def compiled(pool: CompilePool, index: int) -> Compiled:
    source = pool.source(misbehave.workload().spec, CONFIGS[index])
    return pool.submit(source, CallFacts()).result(timeout=60)


def failure(pool: CompilePool, index: int) -> Measurement:
    answer = compiled(pool, index).failure
    assert answer is not None
    return answer


def test_c30_a_compile_that_hangs_is_killed_and_the_next_goes_on() -> None:
    with pool(jobs=1, timeout_s=0.5, c0="hangs") as busy:
        compiled(busy, 1)  # the child is up
        start = time.monotonic()
        found = failure(busy, 0)
        assert time.monotonic() - start < 3
        assert found.status is Status.TIMEOUT
        assert found.reason.startswith("compiling, after 0.5 s: no answer within 0.5 s")
        assert compiled(busy, 1) == Compiled(None)


def test_c30_a_compiler_that_crashes_means_no_kernel() -> None:
    with pool(c0="crashes", c1="raises", c2="refuses", c3="grows") as busy:
        found = [failure(busy, index) for index in range(4)]
        assert [each.status for each in found] == [
            Status.CRASH,
            Status.CRASH,
            Status.NO_COMPILE,
            Status.TOO_LARGE,
        ]
        assert "died of SIGSEGV" in found[0].reason
        assert "CompileFailed: an error nobody expected" in found[1].reason
        assert found[2].reason == "ptxas: too complex"
        assert compiled(busy, 4) == Compiled(None)


def test_a_machine_without_memory_is_not_the_kernels_fault() -> None:
    with pool(jobs=1, c0="killed", c1="memory") as busy:
        found = [failure(busy, index) for index in range(2)]
        assert [each.status for each in found] == [Status.OUT_OF_MEMORY] * 2
        assert "died of SIGKILL" in found[0].reason and "ptxas was killed" in found[1].reason
        assert compiled(busy, 2) == Compiled(None)


def test_a_compiler_that_cannot_be_used_is_not_the_kernels_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"the compiler cannot be used \(.*%s.*\); look at `flashgen doctor`"
    with pool(jobs=1, c0="disk") as full, pytest.raises(MeasuringFailed, match=told % "No space left"):
        compiled(full, 0)
    with pool(jobs=1) as absent, pytest.raises(MeasuringFailed, match=told % "unexpected keyword"):
        absent._options["no such option"] = 1
        compiled(absent, 0)
    with pool(jobs=1) as lost, pytest.raises(MeasuringFailed, match=told % "cannot be started"):
        monkeypatch.setattr("sys.executable", "/there/is/no/python")
        compiled(lost, 0)
    monkeypatch.setattr("tempfile.tempdir", "/there/is/no/folder")
    with pytest.raises(MeasuringFailed, match=told % "No such file"):
        pool(jobs=1)


def test_closing_does_not_wait_for_a_hanging_compile() -> None:
    busy = pool(jobs=1, c0="hangs")
    compiled(busy, 1)
    source = busy.source(misbehave.workload().spec, CONFIGS[0])
    hanging = busy.submit(source, CallFacts())
    queued = busy.submit(source, CallFacts())
    time.sleep(0.2)
    start = time.monotonic()
    busy.close()
    assert time.monotonic() - start < 3
    assert queued.cancelled()
    with pytest.raises(MeasuringFailed, match="the compile pool was closed"):
        hanging.result(timeout=1)


def test_ptxas_dies_with_the_tuner(tmp_path: Path) -> None:
    """The tuner is killed with SIGKILL while ptxas runs: neither the compiler nor ptxas is left."""
    script = """
import test_compile_pool as parts
from flashgen.spec.attention import CallFacts
busy = parts.pool(jobs=1, c0="ptxas")
parts.compiled(busy, 1)
print(busy._children[0].pid, flush=True)
parts.compiled(busy, 0)
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "FLASHGEN_TEST_FOLDER": str(tmp_path)}
    tuner = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert tuner.stdout is not None
    try:
        compiler = int(tuner.stdout.readline())
        until = time.monotonic() + 60
        while not (told := tmp_path / "ptxas").exists() or not told.read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        ptxas = int(told.read_text())
        os.kill(ptxas, 0)
    finally:
        tuner.kill()
        tuner.wait()
        tuner.stdout.close()
    assert is_gone(compiler) and is_gone(ptxas)


def test_several_studies_share_the_processes() -> None:
    for jobs, studies, ahead in (
        (64, 1, AHEAD),
        (16, 1, 16),
        (16, 2, 8),
        (16, 4, 4),
        (2, 1, 2),
        (2, 8, 2),
        (6, 4, 2),
    ):
        shared = CompilePool(misbehave.TARGET, TOOLCHAIN, jobs, studies=studies)
        assert (shared.jobs, shared.ahead) == (jobs, ahead)
        assert shared.ahead * studies >= min(jobs, AHEAD * studies), "together they keep all busy"
        shared.close()


def test_several_compile_at_once() -> None:
    with pool(jobs=2, timeout_s=2.0, c0="hangs", c1="hangs") as busy:
        for warm in [
            busy.submit(busy.source(misbehave.workload().spec, CONFIGS[i]), CallFacts()) for i in (2, 3)
        ]:
            warm.result(timeout=60)
        start = time.monotonic()
        futures = [
            busy.submit(busy.source(misbehave.workload().spec, CONFIGS[index]), CallFacts())
            for index in (0, 1)
        ]
        for future in futures:
            assert future.result(timeout=60).failure is not None
        assert time.monotonic() - start < 3.9, "one after the other they take 4 s"


@pytest.mark.compile
def test_a_real_kernel_comes_back_with_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.build.compile import toolchain

    config = FAMILY.default(misbehave.workload().spec, misbehave.TARGET, CallFacts())
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    with CompilePool(misbehave.TARGET, toolchain(), 1, cache=tmp_path / "cache") as real:
        assert compiled(real, CONFIGS.index(config)).failure is None
        assert not (tmp_path / "cache").exists(), "most candidates are never called"
        answer = real.keep(real.source(misbehave.workload().spec, config), CallFacts()).result(timeout=60)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "home").exists(), "Triton's own cache does not grow by every candidate"
    assert len(list((tmp_path / "cache/artifacts").iterdir())) == 3
    assert answer.failure is None and answer.artifact is not None
    assert answer.artifact.arch == 90
    assert answer.artifact.cubin[:4] == b"\x7fELF"
    assert 16 < answer.artifact.registers <= 255
