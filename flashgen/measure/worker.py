"""The measuring side of the tuner: trials run in a process that may die.

`Worker` lives in the tuner's process, which never touches CUDA; `Executor` lives in the child. A wrong,
crashing or hanging kernel costs its own trial and, at worst, a new child.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.build.artifact import Artifact
from flashgen.errors import FlashGenError
from flashgen.measure.child import Child, Failure
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Status
from flashgen.spec.target import Target

if TYPE_CHECKING:
    from flashgen.measure.bench import Clock, Timing
    from flashgen.measure.check import AnyRig, Run

PREPARE_TIMEOUT_S = 300.0
"""Importing torch, a CUDA context, inputs and the reference of a workload."""
TRIAL_TIMEOUT_S = 30.0
"""A trial takes a fraction of a second; a kernel that needs half a minute never ends."""


class MeasuringFailed(FlashGenError):
    """A workload cannot be measured at all, whatever the config; `status` says in which way."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate to check and time."""

    workload: Workload
    config: Config
    artifact: Artifact | None
    """None where nothing is run: the model and the replay."""
    best_us: float = math.inf
    """The best time of this workload so far; a candidate clearly behind it may be stopped early."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker runs on, as records keep it."""

    target: Target
    torch: str
    driver: str


class Measurer(Protocol):
    """Where the tuner's measurements come from: `Worker`, `tune.model.ModelMeasurer`, `replay.Replay`."""

    source: str
    """`measured` or `model`, as in `Measurement.source`."""

    def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
        """Readies a workload and returns the density for its records, at once if it is ready already.

        `MeasuringFailed` if it cannot be, with `TIMEOUT` also if it takes longer than `within_s`.
        """
        ...

    def measure(self, trial: Trial) -> Measurement:
        """The outcome of one trial, whatever it is; `MeasuringFailed` only as `prepare`."""
        ...

    def compare(self, trials: Sequence[Trial], passes: int) -> tuple[Measurement, ...]:
        """Trials of one workload, all known to be right, timed against each other; one each, in order.

        `MeasuringFailed` if one of them fails, or as `prepare`.
        """
        ...

    def close(self) -> None:
        """Ends what it measures with, and may be called in any thread: a call that is waiting fails."""
        ...


# In the tuner's process


class Worker:
    """Measures on a GPU through a child process; use as a context manager.

    Args:
        device: index of the GPU.
        entry, options: factory of the child's executor, as for `Child`; by default the GPU's.
    """

    source = "measured"

    def __init__(
        self,
        device: int = 0,
        *,
        entry: str = "flashgen.measure.worker:cuda_executor",
        options: Mapping[str, Any] | None = None,
        trial_timeout_s: float = TRIAL_TIMEOUT_S,
        prepare_timeout_s: float = PREPARE_TIMEOUT_S,
    ) -> None:
        self.child = Child(entry, {"device": device} if options is None else options)
        self._trial_timeout_s, self._prepare_timeout_s = trial_timeout_s, prepare_timeout_s
        self._ready: Workload | None = None
        self._density = ""

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child."""
        self.child.close()

    def machine(self) -> Machine:
        """The GPU and the versions, asked in the child so that this process needs no CUDA context."""
        machine = self._first_call(Describe())
        assert isinstance(machine, Machine)
        return machine

    def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
        """See `Measurer`. Tried twice, the second time in a new process."""
        if self._ready != workload:
            self._ready = None
            self._density = str(self._first_call(Prepare(workload), within_s))
            self._ready = workload
        return self._density

    def measure(self, trial: Trial) -> Measurement:
        """See `Measurer`."""
        self.prepare(trial.workload)
        answer = self.child.call(trial, self._trial_timeout_s)
        if isinstance(answer, Failure):
            self._ready = None
            if answer.blameless:
                raise _lost(answer)
            answer = Measurement(answer.status, reason=answer.reason)
        return _with_compile_facts(answer, trial.artifact)

    def compare(self, trials: Sequence[Trial], passes: int) -> tuple[Measurement, ...]:
        """See `Measurer`."""
        if not trials:
            return ()
        self.prepare(trials[0].workload)
        answer = self.child.call(Compare(tuple(trials), passes), self._trial_timeout_s + len(trials) * passes)
        if isinstance(answer, Failure):
            self._ready = None
            raise MeasuringFailed(answer.status, f"comparing the finalists failed: {answer.reason}")
        return tuple(_with_compile_facts(m, t.artifact) for m, t in zip(answer, trials, strict=True))

    def _first_call(self, job: Any, within_s: float = math.inf) -> Any:
        """A call whose failure is no candidate's fault; made again if it fails while there is time."""
        until = time.monotonic() + within_s

        def attempt() -> Any:
            failure = self.child.start(until - time.monotonic())
            left = until - time.monotonic()
            return failure or self.child.call(job, min(self._prepare_timeout_s, left))

        answer = attempt()
        if isinstance(answer, Failure) and time.monotonic() < until:
            answer = attempt()
        if isinstance(answer, Failure):
            raise _lost(answer)
        return answer


def _lost(failure: Failure) -> MeasuringFailed:
    """The error for a failure that is no candidate's fault."""
    if failure.status is Status.OUT_OF_MEMORY:
        message = f"the workload does not fit in memory ({failure.reason}); tune a smaller batch or length"
    else:
        message = (
            f"the GPU cannot be measured on ({failure.reason}); look at `flashgen doctor` and `nvidia-smi`"
        )
    return MeasuringFailed(failure.status, message)


def _with_compile_facts(measurement: Measurement, artifact: Artifact | None) -> Measurement:
    if artifact is None:
        return measurement
    return dataclasses.replace(
        measurement,
        registers=artifact.registers,
        spill_bytes=artifact.spill_bytes,
        shared_bytes=artifact.shared_bytes,
    )


# In the child


@dataclass(frozen=True, slots=True)
class Describe:
    """Job: answers with the `Machine`."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Job: makes inputs and the expected output of a workload, and answers with the density."""

    workload: Workload


@dataclass(frozen=True, slots=True)
class Compare:
    """Job: times trials of the prepared workload against each other."""

    trials: tuple[Trial, ...]
    passes: int


class Device(Protocol):
    """What an executor runs kernels on."""

    clock: Clock
    machine: Machine

    def rig(self, workload: Workload) -> AnyRig:
        """Inputs, expected output and buffers of a workload, on this device."""
        ...

    def load(self, trial: Trial, rig: AnyRig) -> tuple[Run, Callable[[], None]]:
        """A function that enqueues the trial's kernel, and one that unloads it."""
        ...

    def synchronize(self) -> None:
        """Waits for all that was enqueued; raises if it failed."""
        ...


class Executor:
    """Answers a worker's jobs. It raises for whatever leaves the process in doubt; the child then ends."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rig: AnyRig | None = None
        self._floor_us = 0.0
        self._answers: Mapping[type, Callable[[Any], Any]] = {
            Describe: lambda _: device.machine,
            Prepare: self._prepare,
            Trial: self._measure,
            Compare: self._compare,
        }

    def __call__(self, job: Any) -> Any:
        return self._answers[type(job)](job)

    def _prepare(self, job: Prepare) -> str:
        from flashgen.measure import roofline

        self._rig = None  # the former one's memory is free before the next one is made
        self._rig = self._device.rig(job.workload)
        self._floor_us = roofline.floor_us(job.workload, self._device.machine.target)
        self._device.synchronize()
        return self._rig.inputs.density

    def _measure(self, trial: Trial) -> Measurement:
        assert self._rig is not None, "a trial before its workload was prepared"
        run, unload = self._device.load(trial, self._rig)
        outcome = self._outcome(run, self._rig, trial)
        unload()
        return outcome

    def _outcome(self, run: Run, rig: AnyRig, trial: Trial) -> Measurement:
        from flashgen.codegen.families import find_family
        from flashgen.measure.bench import time_kernel

        def synchronous(*buffers: Any) -> None:
            run(*buffers)
            self._device.synchronize()  # a fault belongs to the launch that caused it

        verdict, same = rig.examine(synchronous)
        error = None if math.isnan(verdict.max_error) else verdict.max_error
        if not verdict.ok:
            return Measurement(Status.WRONG, max_error=error, reason=verdict.reason)
        if not same and find_family(trial.config.family).tiling(trial.config).repeats:
            reason = "two runs on the same inputs gave different bits"
            return Measurement(Status.UNSTABLE, max_error=error, reason=reason)
        buffers = rig.buffers()
        timing = time_kernel(
            lambda: run(*buffers), self._device.clock, best_us=trial.best_us, floor_us=self._floor_us
        )
        return dataclasses.replace(_measurement(timing), max_error=error)

    def _compare(self, job: Compare) -> tuple[Measurement, ...]:
        from flashgen.measure.bench import compare

        rig = self._rig
        assert rig is not None, "a comparison before its workload was prepared"
        buffers = rig.buffers()
        loaded = {str(i): self._device.load(trial, rig) for i, trial in enumerate(job.trials)}

        def launch_of(run: Run) -> Callable[[], None]:
            return lambda: run(*buffers)

        launches = {name: launch_of(run) for name, (run, _) in loaded.items()}
        timings = compare(launches, self._device.clock, passes=job.passes, floor_us=self._floor_us)
        for _, unload in loaded.values():
            unload()
        return tuple(_measurement(timing) for timing in timings.values())


def _measurement(timing: Timing) -> Measurement:
    # The regime stays with the number: a kernel tuned for a cold cache may not be the best in a warm one.
    regime = f"cold L2, {timing.method}"
    return Measurement(
        timing.status,
        median_us=timing.median_us,
        min_us=timing.min_us,
        max_us=timing.max_us,
        passes=timing.passes,
        reason=f"{timing.reason} ({regime})" if timing.reason else regime,
    )


class CudaDevice:
    """One GPU: kernels by the driver, timed with CUDA events."""

    def __init__(self, index: int) -> None:
        import torch

        from flashgen.build.device import live_target
        from flashgen.build.versions import driver_version
        from flashgen.measure.bench import CudaClock

        self._torch, self._index = torch, index
        torch.cuda.set_device(index)
        target = live_target(index)
        self.clock: Clock = CudaClock(index, target.l2_mib)
        self.machine = Machine(target, str(torch.__version__), driver_version())

    def rig(self, workload: Workload) -> AnyRig:
        """See `Device`."""
        from flashgen.build.inputs import make_inputs
        from flashgen.measure.check_gradients import rig_of

        self._torch.cuda.empty_cache()
        return rig_of(make_inputs(workload, f"cuda:{self._index}"), workload.spec)

    def load(self, trial: Trial, rig: AnyRig) -> tuple[Run, Callable[[], None]]:
        """See `Device`."""
        from flashgen.build.launch import load_kernel

        assert trial.artifact is not None, "only a compiled kernel can run"
        kernel, torch = load_kernel(trial.artifact, self._index), self._torch

        def run(*buffers: Any) -> None:
            env = rig.environment(*buffers)
            kernel.launch(env, torch.cuda.current_stream(self._index).cuda_stream)

        return run, kernel.unload

    def synchronize(self) -> None:
        """See `Device`."""
        self._torch.cuda.synchronize(self._index)


def cuda_executor(device: int = 0) -> Executor:
    """The child's executor on a GPU."""
    return Executor(CudaDevice(device))
