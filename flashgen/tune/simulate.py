"""Tuning replayed from recorded measurements, to compare samplers and stopping rules without a GPU.

The records of a workload's whole space answer in place of the GPU, and the tuner's own loop runs over them,
once for each random seed and each time from an empty store.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashgen.build.inputs import contiguous_facts
from flashgen.codegen.families import serving
from flashgen.codegen.source import Toolchain
from flashgen.errors import InvalidArgument
from flashgen.measure.compile_pool import AHEAD
from flashgen.measure.replay import NoCompiler, Replay
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.form import check_whole
from flashgen.spec.record import Record, Status, rank, rank_hints
from flashgen.spec.target import Target
from flashgen.tune.plan import DEFAULT_SHARE, Plan
from flashgen.tune.search import SAMPLERS, check_sampler
from flashgen.tune.tuner import tune

LEAST_COVERED = 0.9
"""Of a workload's feasible configs, that must be recorded: the best of fewer may not be the best there is."""
SEEDS = 20
"""Runs of each sampler on each workload where nothing is said."""


@dataclass(frozen=True, slots=True)
class Landscape:
    """The recorded space of one workload."""

    workload: Workload
    space: int
    """Feasible configs of the families that are recorded."""
    best: Config
    """The fastest right one."""
    best_us: float
    defaults: tuple[Config, ...]
    """The default of each such family, which every run tries first."""
    records: tuple[Record, ...] = field(repr=False)
    """Of feasible configs, one each."""

    @property
    def covered(self) -> float:
        """The part of the feasible configs that is recorded."""
        return len(self.records) / self.space

    @property
    def default_slower(self) -> float:
        """`slower` of the fastest default."""
        return min(map(self.slower, self.defaults))

    def slower(self, config: Config | None) -> float:
        """How much more time than the best a config took: 0.02 is 2 % more; infinite for one that failed."""
        times = (record.median_us for record in self.records if record.config == config)
        return next(times, math.inf) / self.best_us - 1

    def to_json(self) -> dict[str, Any]:
        """As `flashgen simulate --json` prints it."""
        return {
            "workload": self.workload.to_json(),
            "name": self.workload.name,
            "space": self.space,
            "recorded": len(self.records),
            "best": self.best.name,
            "best_us": self.best_us,
            "default_slower": self.default_slower,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated tuning."""

    seed: int
    winner: Config | None
    slower: float
    """As recorded, without noise: the winner's time over the best, less one. Infinite without a winner."""
    trials: int
    share: float
    """The part of the feasible space that was tried."""

    def to_json(self) -> dict[str, Any]:
        """As `flashgen simulate --json` prints it."""
        return {
            "seed": self.seed,
            "winner": None if self.winner is None else self.winner.name,
            "slower": self.slower,
            "trials": self.trials,
            "share": self.share,
        }


@dataclass(frozen=True, slots=True)
class Score:
    """What a sampler reached, on one workload or over all."""

    sampler: str
    workload: Workload | None
    """None: the runs on all workloads."""
    runs: tuple[Run, ...]

    @property
    def median(self) -> float:
        """Of `Run.slower`."""
        return statistics.median(run.slower for run in self.runs)

    @property
    def p95(self) -> float:
        """The least `Run.slower` that 95 % of the runs keep within."""
        ordered = sorted(run.slower for run in self.runs)
        return ordered[math.ceil(0.95 * len(ordered)) - 1]

    @property
    def worst(self) -> float:
        """The largest `Run.slower`."""
        return max(run.slower for run in self.runs)

    @property
    def found(self) -> int:
        """How many runs ended with the best config, or with one as fast."""
        return sum(run.slower <= 0 for run in self.runs)

    @property
    def trials(self) -> float:
        """Median over the runs."""
        return statistics.median(run.trials for run in self.runs)

    @property
    def share(self) -> float:
        """Median over the runs of the part of the feasible space that was tried."""
        return statistics.median(run.share for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """As `flashgen simulate --json` prints it; the runs only where they are of one workload."""
        figures = ("median", "p95", "worst", "found", "trials", "share")
        runs = [] if self.workload is None else [run.to_json() for run in self.runs]
        return {
            "sampler": self.sampler,
            "workload": None if self.workload is None else self.workload.to_json(),
            **{name: getattr(self, name) for name in figures},
            "of": len(self.runs),
            "runs": runs,
        }


@dataclass(frozen=True, slots=True)
class Simulation:
    """What samplers reached over recorded measurements."""

    target: Target
    landscapes: tuple[Landscape, ...]
    scores: tuple[Score, ...]
    """For each sampler that of each workload, then that over all."""
    left_out: tuple[tuple[str, str], ...]
    """(sampler, reason) of those that cannot run here."""
    seeds: int
    noise: float
    ahead: int

    def to_json(self) -> dict[str, Any]:
        """As `flashgen simulate --json` prints it."""
        return {
            "target": self.target.to_json(),
            "seeds": self.seeds,
            "noise": self.noise,
            "ahead": self.ahead,
            "workloads": [each.to_json() for each in self.landscapes],
            "scores": [score.to_json() for score in self.scores],
            "left_out": dict(self.left_out),
        }


def simulate(
    records: Iterable[Record],
    samplers: Sequence[str] = (),
    *,
    trials: int | None = None,
    share: float | None = None,
    seeds: int = SEEDS,
    noise: float = 0.0,
    ahead: int = AHEAD,
    plan: Plan | None = None,
    progress: Callable[[int, int, Score], None] | None = None,
) -> Simulation:
    """Tunes each recorded workload with each sampler, `seeds` times, each time from an empty store.

    Args:
        records: of any number of workloads on one GPU; of several for one config the last counts, and those
            of a model do not count.
        samplers: rows of `search.SAMPLERS`; none: all but the exhaustive ones, and what cannot run here is
            left out with its reason.
        trials: at most so many in each study.
        share: in place of `trials`, that part of the feasible space; `DEFAULT_SHARE` if neither is given.
        noise: relative standard deviation of each quick timing, as a GPU's vary.
        ahead: candidates that are asked for before the first of them is measured.
        plan: the rest of what a run is told; its sampler, trials and seed are replaced.
        progress: called after each sampler and workload: how many are done, of how many, and the last one.

    Raises:
        UnknownName: no such sampler.
        InvalidArgument: the records are of several GPUs, of none, or leave out more than a tenth of a
            workload's feasible configs; a number is out of range; a named sampler cannot run here.
    """
    names, left_out = _samplers(samplers)
    _check(trials, share, seeds, noise, ahead)
    target, landscapes = _landscapes(records)
    scores: list[Score] = []
    done = 0
    for name in names:
        together: list[Run] = []
        for landscape in landscapes:
            limit = trials or _limit(landscape, DEFAULT_SHARE if share is None else share)
            plans = [replace(plan or Plan(), sampler=name, trials=limit, seed=seed) for seed in range(seeds)]
            runs = [_run(landscape, target, each, noise, ahead) for each in plans]
            scores.append(Score(name, landscape.workload, tuple(runs)))
            together += runs
            done += 1
            if progress is not None:
                progress(done, len(names) * len(landscapes), scores[-1])
        scores.append(Score(name, None, tuple(together)))
    return Simulation(target, landscapes, tuple(scores), left_out, seeds, noise, ahead)


def _samplers(named: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The samplers to run; and of those that nobody named, which cannot run here, and why."""
    for name in named:
        check_sampler(name)
    if named:
        return tuple(dict.fromkeys(named)), ()
    names, left_out = [], []
    for name, row in SAMPLERS.items():
        if row.exhaustive:
            continue
        try:
            check_sampler(name)
        except InvalidArgument as error:
            left_out.append((name, str(error)))
        else:
            names.append(name)
    return tuple(names), tuple(left_out)


def _check(trials: int | None, share: float | None, seeds: int, noise: float, ahead: int) -> None:
    if trials is not None and share is not None:
        raise InvalidArgument(f"{trials=} and {share=} both limit the trials: leave out one of them")
    for name, value in (("trials", trials), ("seeds", seeds), ("ahead", ahead)):
        if value is not None:
            check_whole(name, value, 1)
    if share is not None and not 0 < share <= 1:
        raise InvalidArgument(f"{share=} must be more than 0 and at most 1: a part of the feasible space")
    if not 0 <= noise < 1:
        raise InvalidArgument(f"{noise=} must be at least 0 and less than 1: 0.01 is 1 % of a time")


def _limit(landscape: Landscape, share: float) -> int:
    """Trials of one study, so that all families' together are a share of the space."""
    return max(1, int(share * landscape.space / len(landscape.defaults)))


# The recorded spaces


def _landscapes(records: Iterable[Record]) -> tuple[Target, tuple[Landscape, ...]]:
    """The GPU and the workloads of the records, each with its whole space or nearly so."""
    measured = [record for record in records if record.measurement.source != "model"]
    if not measured:
        raise InvalidArgument(
            "there is no measured record to replay: give files of records of a whole space, as "
            "`flashgen tune --gpu --sampler grid` and then `flashgen db export` write them"
        )
    targets = {record.target: None for record in measured}
    if len(targets) > 1:
        listed = ", ".join(each.describe() for each in targets)
        raise InvalidArgument(f"the records are of {len(targets)} GPUs, replay those of one: {listed}")
    by_workload: dict[Workload, dict[Config, Record]] = {}
    for record in measured:
        by_workload.setdefault(record.workload, {})[record.config] = record
    target = next(iter(targets))
    return target, tuple(_landscape(work, target, found) for work, found in by_workload.items())


def _landscape(workload: Workload, target: Target, found: dict[Config, Record]) -> Landscape:
    spec, facts, group = workload.spec, contiguous_facts(workload), workload.heads_per_kv
    held = {config.family for config in found}
    serve = serving(spec, target, facts, group)
    families = [family for family in serve if family.name in held] or serve
    space = [
        config for family in families for config in family.feasible(spec, target, facts, group, workload)
    ]
    recorded = tuple(found[config] for config in space if config in found)
    told = f"{workload.name} of [{spec.key}]"
    if len(recorded) < LEAST_COVERED * len(space):
        raise InvalidArgument(
            f"{len(recorded)} of {len(space)} feasible configs of {told} are recorded, "
            f"{len(recorded) / len(space):.1%}: at least {LEAST_COVERED:.0%} must be, or the best of them "
            "may be far from the best there is; `flashgen tune --gpu --sampler grid` measures the rest"
        )
    best = min(recorded, key=lambda record: record.median_us)
    if best.measurement.status is not Status.OK:
        raise InvalidArgument(f"no recorded config of {told} is right, so there is no best to compare with")
    defaults = tuple(family.default(spec, target, facts, group, workload) for family in families)
    return Landscape(workload, len(space), best.config, best.median_us, defaults, recorded)


# One run


def _run(landscape: Landscape, target: Target, plan: Plan, noise: float, ahead: int) -> Run:
    """Tunes one workload from nothing."""
    records, workload = landscape.records, landscape.workload
    versions = records[-1].versions
    hashes = {(workload.spec, record.config): record.kernel_hash for record in records}
    result = tune(
        [workload],
        store=_Memory(),
        target=target,
        measurers={"the replay": Replay(records, noise, plan.seed)},
        compiler=NoCompiler(Toolchain(versions.triton), ahead, hashes),
        versions=versions,
        plan=replace(plan, families=tuple(config.family for config in landscape.defaults)),
    )
    if result.interrupted:
        raise KeyboardInterrupt
    (summary,) = result.summaries
    if problem := result.problem or summary.problem:
        raise InvalidArgument(f"the records of {workload.name} cannot be replayed: {problem}")
    config = None if summary.winner is None else summary.winner.config
    share = summary.trials / landscape.space
    return Run(plan.seed, config, landscape.slower(config), summary.trials, share)


class _Memory:
    """A store of one run; see `TuneStore`."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def add(self, record: Record) -> bool:
        self._records.append(record)
        return True

    def records(
        self,
        target: Target | None = None,
        spec_key: str | None = None,
        family: str | None = None,
        status: Status | None = None,
        source: str | None = None,
    ) -> Iterator[Record]:
        wanted = (target, spec_key, family, status, source)
        for record in self._records:
            measured = record.measurement
            held = (
                record.target,
                record.workload.spec.key,
                record.config.family,
                measured.status,
                measured.source,
            )
            if all(value is None or value == has for value, has in zip(wanted, held, strict=True)):
                yield record

    def ranked(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        return rank(self.records(target, workload.spec.key), workload)

    def hints(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        return rank_hints(self.records(spec_key=workload.spec.key), workload, target)
