"""The tuner: for each workload a study of each family, then a final among the best; every outcome is stored.

The parent process alone searches and writes the database; compiles and measurements run in other processes
(`measure.compile_pool`, `measure.worker`), whose deaths are outcomes like any other. Which GPU tunes which
workload is the business of `tune.fleet`; here one GPU tunes one workload.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from flashgen.build.inputs import contiguous_facts
from flashgen.codegen.family import Family
from flashgen.codegen.source import KernelSource
from flashgen.errors import FlashGenError, StoreError, Unsupported
from flashgen.measure.compile_pool import Compiled, Compiler
from flashgen.measure.worker import Measurer, MeasuringFailed, Trial
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.spec.target import Target
from flashgen.tune.fleet import Control, Fleet, Task
from flashgen.tune.plan import Plan
from flashgen.tune.prior import TuneStore, families_for, first_tried, knowledge, known_records, learnt_us
from flashgen.tune.result import Progress, Summary, TuneResult
from flashgen.tune.search import SAMPLERS, Knowledge, Search

FINAL_ROUNDS = 6
FINAL_SHARE, FINAL_S = 0.1, 3.0
"""Of a workload's share of the budget, kept back for the final: a part, and at most so many seconds. As much
of a run's budget is kept back for the second control where several GPUs are compared."""
FIRST_S = 10.0
"""What a family's first kernel that is right may take of what others have: one is far better than none, and
those of the family that is tried first take longest to compile, 5 to 8 s where 16 compile at once."""
GRACE_S = 5.0
"""What readying a workload, or compiling the last winners for good, may take beyond the budget."""


def tune(
    workloads: Sequence[Workload],
    *,
    store: TuneStore,
    target: Target,
    measurers: Mapping[str, Measurer],
    compiler: Compiler,
    versions: Versions,
    plan: Plan | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TuneResult:
    """Tunes workloads in order, each on one GPU and starting from what those before it found.

    Args:
        store: every outcome is added as soon as it is known; records of earlier runs are not measured again.
        target: what is tuned for; what all GPUs of `measurers` are, if they have any.
        measurers: at least one, by the name that messages give it: `GPU 0`. A GPU that is free takes the next
            workload.
        versions: of what renders, compiles and runs; written into the records.
        progress: called after each trial, one call at a time; in this thread where there is one measurer.

    Ctrl-C, a failing database and the loss of the last GPU end the run early with what was measured.
    """
    tuned = [replace(workload, spec=workload.spec.tuned_as()) for workload in workloads]
    plan, progress = plan or Plan(), progress or (lambda _: None)
    run = _Run(store, target, compiler, versions, plan, progress, Fleet(measurers, tuned), len(tuned))
    if run.fleet.several:
        run.control = _control(run, tuned)
    interrupted, problem = False, ""
    try:
        run.fleet.run({name: _Gpu(run, measurer) for name, measurer in measurers.items()})
        run.settle()
    except KeyboardInterrupt:
        interrupted = True
    except (MeasuringFailed, StoreError) as error:
        problem = str(error)
    summaries = tuple(summary for _, summary in sorted(run.summaries.items()))
    return TuneResult(target, summaries, run.elapsed_s, interrupted, problem, run.fleet.reports())


def _control(run: _Run, workloads: Sequence[Workload]) -> Control | None:
    """The default config of the first workload that a family serves."""
    for workload in workloads:
        try:
            family = families_for(workload, run.target, run.plan)[0]
        except Unsupported:
            continue
        facts = contiguous_facts(workload)
        config = family.default(workload.spec, run.target, facts, workload.heads_per_kv, workload)
        compiled = run.compiler.submit(run.compiler.source(workload.spec, config), facts)
        return Control(workload, config, compiled, run.plan.passes)
    return None


@dataclass
class _Run:
    """What the GPUs of one run of `tune` share: resources, clock and results."""

    store: TuneStore
    target: Target
    compiler: Compiler
    versions: Versions
    plan: Plan
    progress: Callable[[Progress], None]
    fleet: Fleet
    total: int
    """Workloads."""
    control: Control | None = None
    winners: list[Config] = field(default_factory=list)
    summaries: dict[int, Summary] = field(default_factory=dict)
    """By the index of the workload."""
    kept: list[Future[Compiled]] = field(default_factory=list)
    """Winners that are being compiled for good."""
    telling: threading.Lock = field(default_factory=threading.Lock)
    """Held while `progress` is called."""
    started: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        return self.started + (self.plan.budget_s or math.inf)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def settle(self) -> None:
        """Waits for the winners' kernels, so that the first call finds them compiled."""
        left = max(self.deadline - time.monotonic(), 0.0) + GRACE_S
        wait(self.kept, timeout=left if math.isfinite(left) else None)


@dataclass
class _Job:
    """The workload at hand and what is known of it."""

    workload: Workload
    index: int
    total: int
    turns: int
    """As in its `Task`."""
    facts: CallFacts
    density: str
    deadline: float
    started: float
    found: dict[Config, Record] = field(default_factory=dict)
    """The latest record of each config tried, of this run or an earlier one."""
    finals: dict[Config, Record] = field(default_factory=dict)
    defaults: list[Config] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    space: int = 0
    refused: int = 0
    problem: str = ""

    @property
    def best(self) -> Record | None:
        """The fastest that is right."""
        good = [record for record in self.found.values() if record.measurement.status is Status.OK]
        return min(good, key=lambda record: record.median_us, default=None)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A candidate that is being compiled."""

    config: Config
    source: KernelSource
    compiled: Future[Compiled]


class _Gpu:
    """One GPU's part of a run; see `fleet.Part`."""

    def __init__(self, run: _Run, measurer: Measurer) -> None:
        self._run, self._measurer = run, run.fleet.guarded(measurer)
        self._store, self._target, self._compiler = run.store, run.target, run.compiler
        self._versions, self._plan = run.versions, run.plan
        self._winners = run.winners
        self._deadline = run.deadline
        if run.fleet.several and run.plan.budget_s is not None:
            self._deadline -= min(FINAL_SHARE * run.plan.budget_s, FINAL_S)

    @property
    def deadline(self) -> float:
        """See `fleet.Part`."""
        return self._deadline

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() >= self._deadline

    def control(self) -> float | None:
        """See `fleet.Part`."""
        control = self._run.control
        return (
            None if control is None else control.time_us(self._measurer, self._run.fleet, self._run.deadline)
        )

    def abandon(self) -> None:
        """See `fleet.Part`."""
        self._measurer.close()

    # The loop

    def tune(self, task: Task) -> None:
        """Tunes one workload; its summary is kept whatever happens."""
        now, workload = time.monotonic(), task.workload
        share = (self._deadline - now) / task.turns
        deadline = now + share - min(FINAL_SHARE * share, FINAL_S)
        facts = contiguous_facts(workload)
        job = _Job(workload, task.index, self._run.total, task.turns, facts, "", deadline, now)
        try:
            job.density = self._ready(workload)
            families = families_for(workload, self._target, self._plan)
            for position, family in enumerate(families):
                self._study(job, family, len(families) - position)
            self._final(job)
        except Unsupported as error:
            job.problem = str(error)
        except MeasuringFailed as error:
            late = error.status is Status.TIMEOUT and self.time_is_up
            job.problem = "the budget ended before the workload was ready" if late else str(error)
            if not late and error.status is not Status.OUT_OF_MEMORY:
                raise
        finally:
            self._run.summaries[job.index] = self._summary(job)

    def _ready(self, workload: Workload) -> str:
        """Readies a workload, again after a crash; a GPU that cannot be readied ends the run."""
        left = max(self._deadline - time.monotonic(), 0.0)
        return self._measurer.prepare(workload, left + GRACE_S)

    def _study(self, job: _Job, family: Family, families_left: int) -> None:
        """Searches one family's space."""
        space, search = self._begin(job, family)
        now = time.monotonic()
        until = now + (job.deadline - now) / families_left
        known = len(space) - search.left
        limit = self._plan.trial_limit(len(space))
        self._report(job, family, known, limit, None)
        flying: deque[_Flight] = deque()
        while True:
            while known + len(flying) < limit and len(flying) < self._compiler.ahead:
                config = search.ask()
                if config is None:
                    break
                flying.append(self._submitted(job, config))
            served = any(
                config.family == family.name and record.measurement.status is Status.OK
                for config, record in job.found.items()
            )
            first = min(now + FIRST_S, self._deadline)
            flight = self._first_compiled(flying, until if served else max(until, first))
            if flight is None:
                break
            measurement = self._measured(job, flight.config, flight.compiled.result())
            record = self._record(job, family, flight, measurement)
            search.tell(flight.config, learnt_us(measurement))
            known += 1
            self._report(job, family, known, limit, record)
        for flight in flying:  # the time was up: what nobody waits for need not be compiled
            flight.compiled.cancel()

    def _submitted(self, job: _Job, config: Config) -> _Flight:
        source = self._compiler.source(job.workload.spec, config)
        return _Flight(config, source, self._compiler.submit(source, job.facts))

    def _measured(self, job: _Job, config: Config, compiled: Compiled) -> Measurement:
        if compiled.failure is not None:
            return compiled.failure
        self._ready(job.workload)
        best_us = job.best.median_us if job.best else math.inf
        return self._measurer.measure(Trial(job.workload, config, compiled.artifact, best_us))

    def _begin(self, job: _Job, family: Family) -> tuple[tuple[Config, ...], Search]:
        """The feasible space of a family and a search that knows what earlier runs measured."""
        spec, group = job.workload.spec, job.workload.heads_per_kv
        space = family.feasible(spec, self._target, job.facts, group, job.workload)
        job.space += len(space)
        job.refused += len({*family.all_configs(), *space}) - len(space)
        default = family.default(spec, self._target, job.facts, group, job.workload)
        job.defaults.append(default)
        stored = tuple(self._store.records(self._target, spec.key, family.name, source=self._measurer.source))
        seeds = first_tried(self._store, job.workload, self._target, default, self._winners)
        informed = SAMPLERS[self._plan.sampler].informed
        before = knowledge(job.workload, space, self._target, stored) if informed else Knowledge()
        if job.best is not None:  # of the families studied before
            before = replace(before, bar_us=job.best.median_us)
        search = Search(space, self._plan.sampler, seeds, self._plan.seed, before)
        known = known_records(stored, job.workload, space, job.density, self._versions, self._compiler)
        for record in known:
            job.resumed += record.config not in job.found
            job.found[record.config] = record
        for config, record in job.found.items():
            if config.family == family.name:
                search.learn(config, learnt_us(record.measurement))
        return space, search

    def _final(self, job: _Job) -> None:
        """Measures the best again, interleaved, until no config outside looks faster than the winner.

        A quick timing that was lucky would otherwise win for ever against a careful one. When the time is up,
        or a comparison fails, the best so far stays.
        """
        if self._measurer.source == "model":
            return  # it would only say the same again
        for _ in range(FINAL_ROUNDS):
            bar = min((record.median_us for record in job.finals.values()), default=math.inf)
            good = sorted(
                (r for r in job.found.values() if r.measurement.status is Status.OK and r.median_us < bar),
                key=lambda record: record.median_us,
            )
            entrants = [record.config for record in good if record.config not in job.finals]
            entrants = entrants[: self._plan.finalists]
            if not entrants or self.time_is_up:
                return
            held = min(job.finals.values(), key=lambda record: record.median_us, default=None)
            if held is None:
                entrants += [c for c in job.defaults if c in job.found and c not in entrants]
            else:
                entrants.append(held.config)
            rivals = [c for c in entrants if job.found[c].measurement.status is Status.OK]
            flights = self._landed([self._submitted(job, config) for config in rivals])
            if not flights or self.time_is_up:
                return
            self._ready(job.workload)
            try:
                self._compare(job, flights)
            except MeasuringFailed as error:  # a finalist that fails now and then; the GPU is not lost
                job.problem = f"{error}; the best so far stays, tune again for a whole final"
                return

    def _landed(self, flights: Sequence[_Flight]) -> list[_Flight]:
        """Those of some candidates that have a kernel, all of them unless the time is up first."""
        flying, landed = deque(flights), []
        while flight := self._first_compiled(flying, self._deadline):
            if flight.compiled.result().failure is None:
                landed.append(flight)
        for flight in flying:
            flight.compiled.cancel()
        return landed

    def _first_compiled(self, flying: deque[_Flight], until: float) -> _Flight | None:
        """Takes the first flight that has landed, waiting for one; None if none is left or the time is up."""
        if not flying or not self._run.fleet.wait([flight.compiled for flight in flying], until):
            return None
        flight = next(flight for flight in flying if flight.compiled.done())
        flying.remove(flight)
        return flight

    def _compare(self, job: _Job, flights: Sequence[_Flight]) -> None:
        """One interleaved comparison; its times replace the quick ones."""
        trials = [Trial(job.workload, each.config, each.compiled.result().artifact) for each in flights]
        timings = self._measurer.compare(trials, self._plan.passes)
        for flight, measurement in zip(flights, timings, strict=True):
            quick = job.found[flight.config]
            record = self._stored(
                job, flight.source, _with_error(measurement, quick.measurement), quick.admission
            )
            job.finals[flight.config] = record

    def _keep(self, job: _Job, winners: Iterable[Config]) -> None:
        """Begins to compile winners into the user's own cache, where the first call finds them."""
        for config in winners:
            if config in job.found:  # and not what another run put into the database, of another kernel
                source = self._compiler.source(job.workload.spec, config)
                self._run.kept.append(self._compiler.keep(source, job.facts))

    # Records and reports

    def _record(self, job: _Job, family: Family, flight: _Flight, measurement: Measurement) -> Record:
        job.outcomes[measurement.status.value] += 1
        return self._stored(job, flight.source, measurement, family.admission(flight.config))

    def _stored(self, job: _Job, source: KernelSource, measurement: Measurement, admission: str) -> Record:
        record = Record(
            target=self._target,
            workload=job.workload,
            config=source.config,
            measurement=measurement,
            kernel_hash=source.hash,
            versions=self._versions,
            admission=admission,
            density=job.density,
            created_at=datetime.now(timezone.utc).isoformat(),
        )
        self._store.add(record)
        job.found[source.config] = record
        return record

    def _report(self, job: _Job, family: Family, trial: int, limit: int, last: Record | None) -> None:
        now = time.monotonic()
        left = self._deadline - now if math.isfinite(self._deadline) else None
        if left is None:
            done = sum(job.outcomes.values())
            studies = job.turns - 1
            left = (now - job.started) / done * (limit - trial + studies * limit) if done else None
        progress = Progress(
            workload=job.workload,
            index=job.index,
            total=job.total,
            family=family.name,
            trial=trial,
            limit=limit,
            best=job.best,
            last=last,
            elapsed_s=now - self._run.started,
            left_s=None if left is None else max(left, 0.0),
        )
        with self._run.telling:
            self._run.progress(progress)

    def _summary(self, job: _Job) -> Summary:
        winner = job.best
        try:
            # What a dispatcher would take, so that two tuners of one database name the same winner.
            ranked = self._store.ranked(job.workload, self._target)
            first = next((r for r in ranked if r.measurement.source == self._measurer.source), None)
            winner = first if first is not None and first.workload == job.workload else winner
        except FlashGenError:
            pass
        fastest: dict[str, Config] = {}  # of each admission class: an unaligned call wants a winner too
        for record in sorted(job.found.values(), key=lambda record: record.median_us):
            if record.measurement.status is Status.OK:
                fastest.setdefault(record.admission, record.config)
        self._winners += reversed(fastest.values())
        self._keep(job, {*fastest.values(), *([] if winner is None else [winner.config])})
        times = [job.found[config].median_us for config in job.defaults if config in job.found]
        default_us = min((each for each in times if math.isfinite(each)), default=None)
        return Summary(
            workload=job.workload,
            winner=winner,
            default_us=default_us,
            trials=sum(job.outcomes.values()),
            resumed=job.resumed,
            space=job.space,
            refused=job.refused,
            outcomes=dict(job.outcomes),
            seconds=time.monotonic() - job.started,
            problem=job.problem,
        )


def _with_error(final: Measurement, quick: Measurement) -> Measurement:
    """A timing of the final with the error that was found when the kernel was checked."""
    return replace(final, max_error=quick.max_error)
