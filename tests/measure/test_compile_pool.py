"""Compiling ahead, in processes that hang and crash."""

from __future__ import annotations

import time

import misbehave
import pytest

from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import Toolchain
from flashgen.measure.compile_pool import Compiled, CompilePool
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
            Status.NO_COMPILE,
            Status.NO_COMPILE,
            Status.NO_COMPILE,
            Status.TOO_LARGE,
        ]
        assert "died of SIGSEGV" in found[0].reason
        assert "CompileFailed: an error nobody expected" in found[1].reason
        assert found[2].reason == "ptxas: too complex"
        assert compiled(busy, 4) == Compiled(None)


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
    stopped = hanging.result(timeout=1).failure
    assert stopped is not None and stopped.status is Status.NO_COMPILE


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
def test_a_real_kernel_comes_back_with_its_facts(tmp_path: object) -> None:
    from flashgen.build.compile import toolchain

    config = FAMILY.default(misbehave.workload().spec, misbehave.TARGET, CallFacts())
    with CompilePool(misbehave.TARGET, toolchain(), 1, cache=tmp_path) as real:
        answer = compiled(real, CONFIGS.index(config))
    assert answer.failure is None and answer.artifact is not None
    assert answer.artifact.arch == 90
    assert answer.artifact.cubin[:4] == b"\x7fELF"
    assert 16 < answer.artifact.registers <= 255
