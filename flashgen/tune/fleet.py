"""The GPUs of a run at work on one queue: who tunes what, what ends the run, and whether their times agree.

Each GPU is driven by a thread; the first by the caller's own, so that with one GPU there is no other. A
workload is tuned wholly on one GPU, hence no ranking mixes cards. What they cannot share is the same speed:
each times one and the same kernel, the control, at its start and when it has nothing left to do.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Protocol, TypeVar

from flashgen.measure.compile_pool import Compiled, CompilingFailed
from flashgen.measure.worker import Measurer, MeasuringFailed, Trial
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Status

T = TypeVar("T")

CONTROL_OFF = 0.05
"""A GPU whose control is further than this share from the median of all is named."""
POLL_S = 0.5
"""How long after the end of a run a thread may notice it."""


class Stopped(Exception):
    """Raised in the thread of a GPU once the run has ended elsewhere."""


@dataclass(frozen=True, slots=True)
class Task:
    """A workload that a GPU has taken, or can take."""

    index: int
    """Of the workload in the run, from 0."""
    workload: Workload
    turns: int = 1
    """How many of the workloads that are left this GPU can expect to tune, this one included: it may take one
    of so many parts of the time left."""
    again: bool = False
    """Whether a GPU was lost over it before."""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """What one of several GPUs did."""

    name: str
    workloads: int
    """Tuned on it."""
    before_us: float | None
    """Time of the control at its start, in microseconds; None if it could not be timed."""
    after_us: float | None
    """The same when it had nothing left to do; None also if it was lost or the time was up."""
    lost: str = ""
    """Why it was lost; empty if it was not."""

    def to_json(self) -> dict[str, Any]:
        """As `flashgen tune --json` prints it."""
        return {
            "name": self.name,
            "workloads": self.workloads,
            "control_before_us": self.before_us,
            "control_after_us": self.after_us,
            "lost": self.lost,
        }


def warnings(reports: Sequence[GpuReport]) -> tuple[str, ...]:
    """One sentence for each GPU whose control is more than `CONTROL_OFF` from the median of all.

    Of an even number of times the lower one in the middle counts: what a GPU suffers from makes it slower.
    """
    times = {each.name: [us for us in (each.before_us, each.after_us) if us is not None] for each in reports}
    every = [us for each in times.values() for us in each]
    if not every:
        return ()
    middle = median_low(every)
    told = []
    for name, measured in times.items():
        worst = max(measured, key=lambda us: abs(us - middle), default=middle)
        if abs(worst - middle) > CONTROL_OFF * middle:
            told.append(
                f"{name}: its control took {worst:.4g} us, {abs(worst / middle - 1):.0%} "
                f"{'more' if worst > middle else 'less'} than the median of all GPUs ({middle:.4g} us); "
                "tune again without it, its times are not comparable"
            )
    return tuple(told)


@dataclass(frozen=True, slots=True)
class Control:
    """The kernel that each of several GPUs times."""

    workload: Workload
    config: Config
    compiled: Future[Compiled]
    passes: int

    def time_us(self, measurer: Measurer, fleet: Fleet, until: float) -> float | None:
        """Its median in microseconds; None if it cannot be compiled or timed, or not `until` then.

        Raises:
            MeasuringFailed: the GPU is lost.
        """
        if not fleet.wait([self.compiled], until):
            return None
        answer = self.compiled.result()
        if answer.failure is not None:
            return None
        try:
            measurer.prepare(self.workload, until - time.monotonic())
        except MeasuringFailed as error:
            if error.status is Status.OUT_OF_MEMORY or time.monotonic() >= until:
                return None
            raise
        try:
            (found,) = measurer.compare([Trial(self.workload, self.config, answer.artifact)], self.passes)
        except MeasuringFailed:
            return None  # of the kernel; a GPU that is lost says so at its next workload
        return found.median_us if found.status is Status.OK else None


class Part(Protocol):
    """What one GPU does in a run; called in its own thread, except `abandon`."""

    @property
    def deadline(self) -> float:
        """On the monotonic clock: it takes no workload afterwards."""

    def tune(self, task: Task) -> None:
        """Tunes a workload and keeps its summary, whatever happens; `MeasuringFailed` if the GPU is lost."""

    def control(self) -> float | None:
        """Times the control; raises as `tune`."""

    def abandon(self) -> None:
        """Makes what the GPU's thread waits for fail; comes from any thread."""


class Fleet:
    """Hands workloads to the GPUs of a run until none is left, or something ends the run.

    A GPU that is lost ends its own part: its workload goes to the next GPU that is free, once, and the run
    ends only when no GPU is left. All else that is raised in one thread ends the run in all of them.
    """

    def __init__(self, names: Collection[str], workloads: Sequence[Workload]) -> None:
        self._names = tuple(names)
        self._waiting = deque(Task(index, workload) for index, workload in enumerate(workloads))
        self._busy: dict[str, Task] = {}
        self._serving = set(names)
        self._tuned: Counter[str] = Counter()
        self._controls: dict[str, list[float | None]] = {name: [] for name in names}
        self._lost: dict[str, str] = {}
        self._ended: BaseException | None = None
        self._changed = threading.Condition()
        """Of all above."""

    @property
    def several(self) -> bool:
        """Whether there is more than one GPU, and so something to compare."""
        return len(self._names) > 1

    def run(self, parts: Mapping[str, Part]) -> None:
        """Works until all is done; raises what ended the run early, in whatever thread it was."""
        first, *others = parts
        threads = {
            name: threading.Thread(target=self._in_thread, args=(name, parts), daemon=True) for name in others
        }
        try:
            for thread in threads.values():
                thread.start()
            self._serve(first, parts[first])
            for thread in threads.values():
                thread.join()
        except BaseException as error:
            self._serving -= {name for name, thread in threads.items() if thread.ident is None}
            self._end(error, parts)
        if self._ended is not None:
            raise self._ended

    def reports(self) -> tuple[GpuReport, ...]:
        """What each of several GPUs did; of one there is nothing to compare and nothing told."""
        if not self.several:
            return ()
        found = []
        for name in self._names:
            before, after = [*self._controls[name], None, None][:2]
            found.append(GpuReport(name, self._tuned[name], before, after, self._lost.get(name, "")))
        return tuple(found)

    def check(self) -> None:
        """`Stopped` once the run has ended."""
        if self._ended is not None:
            raise Stopped

    def wait(self, futures: Collection[Future[Any]], until: float) -> bool:
        """Waits for the first of some futures; false when the time is up before. `Stopped` as `check`."""
        while True:
            self.check()
            left = until - time.monotonic()
            if left <= 0:
                return False
            if wait_for(futures, timeout=min(left, POLL_S), return_when=FIRST_COMPLETED).done:
                return True

    def guarded(self, measurer: Measurer) -> Measurer:
        """The measurer, whose calls raise `Stopped` once the run has ended: that may be why they failed."""
        return _Guarded(measurer, self)

    # One GPU

    def _in_thread(self, name: str, parts: Mapping[str, Part]) -> None:
        try:
            self._serve(name, parts[name])
        except BaseException as error:
            self._end(error, parts)

    def _serve(self, name: str, part: Part) -> None:
        """The loop of one GPU."""
        try:
            self._time_control(name, part)
            while True:
                task = self._take(name, part, wait=False)
                if task is None:
                    self._time_control(name, part)
                    task = self._take(name, part, wait=True)  # what a GPU that is lost leaves
                if task is None:
                    break
                part.tune(task)
                with self._changed:
                    del self._busy[name]
                    self._tuned[name] += 1
                    self._changed.notify_all()
        except CompilingFailed:
            raise  # no GPU's fault
        except MeasuringFailed as error:
            self._lose(name, error)
        finally:
            with self._changed:
                self._serving.discard(name)
                self._changed.notify_all()

    def _time_control(self, name: str, part: Part) -> None:
        """At the start, and again when there is nothing to do; the last one counts."""
        if self.several:
            self._controls[name] = [*self._controls[name][:1], part.control()]

    def _take(self, name: str, part: Part, wait: bool) -> Task | None:
        """The next workload; None when there is none, or, if it waits, when there can be none any more."""
        with self._changed:
            while True:
                self.check()
                left = part.deadline - time.monotonic()
                if left <= 0:
                    return None
                # The same workload twice in a run: the second time all is known, but only afterwards.
                in_hand = {task.workload for task in self._busy.values()}
                task = next((each for each in self._waiting if each.workload not in in_hand), None)
                if task is not None:
                    turns = -(-len(self._waiting) // len(self._serving))
                    self._waiting.remove(task)
                    self._busy[name] = task = replace(task, turns=turns)
                    return task
                if not wait or not self._busy:
                    return None
                self._changed.wait(left if math.isfinite(left) else None)

    def _lose(self, name: str, error: MeasuringFailed) -> None:
        """Ends a GPU's part, and the run if it was the last; another GPU takes its workload."""
        with self._changed:
            self._lost[name] = str(error)
            task = self._busy.pop(name, None)
            if len(self._lost) == len(self._names):
                raise error
            if task is not None and not task.again:
                self._waiting.appendleft(replace(task, again=True))
            self._changed.notify_all()

    def _end(self, error: BaseException, parts: Mapping[str, Part]) -> None:
        """Ends the run, the first reason counts; returns when no GPU is at work any more."""
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()
            while self._serving:
                for name in self._serving:
                    parts[name].abandon()  # again and again: it may just have started another process
                self._changed.wait(POLL_S)


class _Guarded:
    """See `Fleet.guarded`."""

    def __init__(self, measurer: Measurer, fleet: Fleet) -> None:
        self.source = measurer.source
        self._measurer, self._fleet = measurer, fleet

    def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
        """See `Measurer`."""
        return self._call(lambda: self._measurer.prepare(workload, within_s))

    def measure(self, trial: Trial) -> Measurement:
        """See `Measurer`."""
        return self._call(lambda: self._measurer.measure(trial))

    def compare(self, trials: Sequence[Trial], passes: int) -> tuple[Measurement, ...]:
        """See `Measurer`."""
        return self._call(lambda: self._measurer.compare(trials, passes))

    def close(self) -> None:
        """See `Measurer`."""
        self._measurer.close()

    def _call(self, work: Callable[[], T]) -> T:
        self._fleet.check()
        try:
            return work()
        finally:
            self._fleet.check()
