"""Compiles candidates ahead of the GPU, in processes that may hang or crash."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from flashgen.build.artifact import Artifact
from flashgen.codegen.source import KernelSource, Toolchain, render
from flashgen.errors import CompileFailed, DoesNotFit
from flashgen.measure.child import Child, Failure
from flashgen.measure.worker import MeasuringFailed
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.config import Config
from flashgen.spec.form import check_whole
from flashgen.spec.record import Measurement, Status
from flashgen.spec.target import Target

COMPILE_TIMEOUT_S = 60.0
"""A compile takes 1 to 2 s on one core; one that needs a minute is not worth its kernel."""
AHEAD = 16
"""Candidates asked for before the first of them is measured, at most: enough to hide compiles of 1 s behind
trials of 0.2 s, few enough that the search still learns from most of what it has tried."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """An artifact, or the measurement that says why there is none."""

    artifact: Artifact | None
    failure: Measurement | None = None


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel to compile for one kind of call."""

    source: KernelSource
    facts: CallFacts
    target: Target
    kept: bool = False
    """Whether the artifact stays when the pool is gone."""


class CompilingFailed(MeasuringFailed):
    """Nothing can be compiled on this machine, whatever the kernel and the GPU."""


class Compiler(Protocol):
    """Where the tuner's artifacts come from: `CompilePool`, or nothing at all in a replay."""

    ahead: int
    """How many candidates to ask for in advance."""
    toolchain: Toolchain

    def source(self, spec: AttentionSpec, config: Config) -> KernelSource:
        """The rendered kernel."""
        ...

    def submit(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
        """Begins a compile; the future raises only `CompilingFailed`."""
        ...

    def keep(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
        """As `submit`, of a kernel that will be called: a later `compile_kernel` finds it compiled."""
        ...


class CompilePool:
    """N child processes that compile; use as a context manager. Failures are values, with a reason.

    Args:
        target: compiled for.
        toolchain: rendered for; the installed one.
        jobs: processes; `default_jobs(studies)` if None.
        studies: that ask at the same time; each may be `ahead` so far that together they keep all busy.
        cache: folder of the artifacts that `keep` makes, the user's own by default. All others lie in a
            folder that goes with the pool: most candidates are never called.
        entry, options: factory of the children's compiler, as for `Child`.
    """

    def __init__(
        self,
        target: Target,
        toolchain: Toolchain,
        jobs: int | None = None,
        *,
        studies: int = 1,
        cache: Path | None = None,
        timeout_s: float = COMPILE_TIMEOUT_S,
        entry: str = "flashgen.measure.compile_pool:compiler",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.target, self.toolchain = target, toolchain
        self.jobs = jobs or default_jobs(studies)
        self.ahead = min(AHEAD, max(2, -(-self.jobs // studies)))
        self._entry = entry
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(self.jobs, thread_name_prefix="flashgen-compile")
        self._local = threading.local()
        self._children: list[Child] = []
        self._closed = False
        try:
            # What compilers leave behind, killed ones too, goes with the pool.
            self._scratch = tempfile.TemporaryDirectory(prefix="flashgen-", ignore_cleanup_errors=True)
        except OSError as error:
            raise _cannot_compile(str(error)) from error
        folders = {"passing": Path(self._scratch.name, "cache"), "kept": cache}
        self._options = folders if options is None else dict(options)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drops what is queued and ends the children, busy or not."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in list(self._children):
            child.close()
        self._threads.shutdown(wait=True)
        for child in self._children:
            child.close()
        self._scratch.cleanup()

    def source(self, spec: AttentionSpec, config: Config) -> KernelSource:
        """The rendered kernel."""
        return render(spec, config, self.toolchain)

    def submit(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
        """Queues a compile; see `Compiler`."""
        return self._threads.submit(self._compile, CompileJob(source, facts, self.target))

    def keep(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
        """Queues a compile into `cache`; see `Compiler`.

        It is a new one and no copy of the candidate's: a cubin names its source file, which profilers show.
        """
        return self._threads.submit(self._compile, CompileJob(source, facts, self.target, kept=True))

    def _compile(self, job: CompileJob) -> Compiled:
        started = time.monotonic()
        answer = None if self._closed else self._child().call(job, self._timeout_s)
        if self._closed:
            raise CompilingFailed(Status.CRASH, "the compile pool was closed")
        if isinstance(answer, Failure):
            if answer.blameless:
                raise _cannot_compile(answer.reason)
            reason = f"compiling, after {time.monotonic() - started:.1f} s: {answer.reason}"
            return Compiled(None, Measurement(answer.status, reason=reason))
        assert isinstance(answer, Compiled)
        return answer

    def _child(self) -> Child:
        """The calling thread's own."""
        child: Child | None = getattr(self._local, "child", None)
        if child is None:
            child = self._local.child = Child(self._entry, self._options, {"TMPDIR": self._scratch.name})
            self._children.append(child)
        return child


def _cannot_compile(reason: str) -> CompilingFailed:
    return CompilingFailed(
        Status.CRASH,
        f"the compiler cannot be used ({reason}); look at `flashgen doctor`, and at what is free of this "
        "machine's memory and of its temporary folder (TMPDIR)",
    )


def compiler(passing: Path, kept: Path | None = None) -> Any:
    """Factory of the children's function: compiles into `passing`, or, if the job says so, into `kept`.

    What it keeps is the artifact: Triton's own cache would grow by every candidate.
    """
    import triton  # noqa: F401 - if it cannot be imported, no candidate is to blame

    from flashgen.build.compile import compile_kernel, scratch

    def run(job: CompileJob) -> Compiled:
        try:
            with scratch():
                cache = kept if job.kept else passing
                return Compiled(compile_kernel(job.source, job.facts, job.target, cache))
        except DoesNotFit as error:
            return Compiled(None, Measurement(Status.TOO_LARGE, reason=str(error)))
        except CompileFailed as error:
            return Compiled(None, Measurement(Status.NO_COMPILE, reason=str(error)))

    return run


def default_jobs(studies: int = 1) -> int:
    """Processes that compile where nothing is said: one for each core this process may use, at most 16 for
    each study."""
    return min(AHEAD * studies, cores())


def check_jobs(jobs: int | None) -> None:
    """Raises `InvalidArgument` unless it is a number of processes, or None for `default_jobs`."""
    if jobs is not None:
        check_whole("jobs", jobs, 1)


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
