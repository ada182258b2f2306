"""What a tuning run would try and how long it may take, found out without compiling or measuring anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from flashgen.build.inputs import contiguous_facts, density
from flashgen.codegen.family import Family
from flashgen.errors import Unsupported
from flashgen.measure.compile_pool import Compiler
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Record, Versions
from flashgen.spec.target import Target
from flashgen.tune.plan import Plan
from flashgen.tune.prior import TuneStore, families_for, first_tried, known_records
from flashgen.tune.search import SAMPLERS

COMPILE_S = 1.5
"""One compile on one core takes 1 to 2 s."""
MEASURE_S = 0.2
"""One trial on a GPU, check, heat and timing: 0.17 s on average of 680 on an H200."""
PAUSE_S = 30.0
"""Two records of one workload that are further apart are of two runs."""
ENOUGH = 8
"""Records of one workload that say how long a trial takes."""


@dataclass(frozen=True, slots=True)
class Study:
    """What tuning one workload with one family would be."""

    workload: Workload
    family: str
    configs: int
    """That exist."""
    feasible: int
    """That fit the GPU and admit the workload's calls."""
    refused: dict[str, int]
    """How many configs are refused for each reason; texts that differ in numbers only are one."""
    first: tuple[Config, ...]
    """What would be tried first: the default, then winners of other runs; without those that are known."""
    known: int
    """Feasible configs that earlier runs measured, which need no repetition."""
    trials: int
    """At most so many would be measured."""

    def to_json(self) -> dict[str, Any]:
        """As `flashgen tune --dry-run --json` prints it."""
        return {
            "workload": self.workload.to_json(),
            "family": self.family,
            "configs": self.configs,
            "feasible": self.feasible,
            "share": self.feasible / self.configs,
            "refused": self.refused,
            "first": [config.name for config in self.first],
            "known": self.known,
            "trials": self.trials,
        }


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a trial takes."""

    seconds: float
    rests_on: str
    """What was gone by, in words."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a run would do; nothing was compiled, measured or written."""

    target: Target
    studies: tuple[Study, ...]
    problems: tuple[tuple[Workload, str], ...]
    """Workloads that cannot be tuned, and why."""
    pace: Pace
    plan: Plan

    @property
    def trials(self) -> int:
        """Of all studies, at most."""
        return sum(study.trials for study in self.studies)

    @property
    def in_time(self) -> int:
        """As many of these trials as the budget has time for at that pace; without one all."""
        if self.plan.budget_s is None:
            return self.trials
        return min(self.trials, int(self.plan.budget_s / self.pace.seconds))

    @property
    def typical(self) -> tuple[int, int] | None:
        """From how many to how many trials the strategy usually stops by itself; None where it does not, or
        where trials and budget end it before."""
        if (stops := SAMPLERS[self.plan.sampler].typical) is None:
            return None
        most: dict[Workload, int] = {}
        for study in self.studies:
            most[study.workload] = most.get(study.workload, 0) + study.trials
        least, usual = (min(sum(min(each, of) for of in most.values()), self.in_time) for each in stops)
        return (least, usual) if least < self.in_time else None

    @property
    def seconds(self) -> float:
        """What the trials should take, or the budget where that is less."""
        needed = self.trials * self.pace.seconds
        return needed if self.plan.budget_s is None else min(needed, self.plan.budget_s)

    def to_json(self) -> dict[str, Any]:
        """As `flashgen tune --dry-run --json` prints it."""
        return {
            "target": self.target.to_json(),
            "studies": [
                study.to_json() | {"seconds": study.trials * self.pace.seconds} for study in self.studies
            ],
            "problems": [
                {"workload": workload.to_json(), "problem": problem} for workload, problem in self.problems
            ],
            "trials": self.trials,
            "trials_in_time": self.in_time,
            "typical_trials": None if self.typical is None else list(self.typical),
            "seconds": self.seconds,
            "seconds_a_trial": self.pace.seconds,
            "rests_on": self.pace.rests_on,
            "budget_s": self.plan.budget_s,
        }


def dry_run(
    workloads: Sequence[Workload],
    *,
    store: TuneStore,
    target: Target,
    source: str,
    compiler: Compiler,
    versions: Versions,
    jobs: int,
    plan: Plan | None = None,
) -> DryRun:
    """Says what `tuner.tune` would do with the same arguments.

    Args:
        store: only read.
        source: of the records that the run would make: `measured` or `model`.
        compiler: renders, for comparison with kernels of earlier runs; nothing is submitted to it.
        jobs: processes that would compile.

    A run also tries the winners of its own earlier workloads first, which nobody knows yet.
    """
    plan = plan or Plan()
    studies: list[Study] = []
    problems: list[tuple[Workload, str]] = []
    for given in workloads:
        workload = replace(given, spec=given.spec.tuned_as())
        try:
            for family in families_for(workload, target, plan):
                studies.append(_study(workload, family, store, target, source, compiler, versions, plan))
        except Unsupported as error:
            problems.append((workload, str(error)))
    measured = pace_of(store.records(target, source=source)) or expected_pace(source, jobs)
    return DryRun(target, tuple(studies), tuple(problems), measured, plan)


def _study(
    workload: Workload,
    family: Family,
    store: TuneStore,
    target: Target,
    source: str,
    compiler: Compiler,
    versions: Versions,
    plan: Plan,
) -> Study:
    spec, facts = workload.spec, contiguous_facts(workload)
    group = workload.heads_per_kv
    space = family.feasible(spec, target, facts, group, workload)
    configs = tuple(dict.fromkeys((*family.all_configs(), *space)))
    default = family.default(spec, target, facts, group, workload)
    stored = store.records(target, spec.key, family.name, source=source)
    records = known_records(stored, workload, space, density(workload), versions, compiler)
    known = {record.config for record in records}
    unseen = frozenset(space) - known
    wanted = dict.fromkeys(first_tried(store, workload, target, default))
    reasons = (family.refuses(config, spec, target, facts, group) for config in configs)
    return Study(
        workload=workload,
        family=family.name,
        configs=len(configs),
        feasible=len(space),
        refused=grouped(filter(None, reasons)),
        first=tuple(config for config in wanted if config in unseen),
        known=len(known),
        trials=max(plan.trial_limit(len(space)) - len(known), 0),
    )


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def grouped(reasons: Iterable[str]) -> dict[str, int]:
    """How often each text occurs, the most frequent first.

    Texts that differ in numbers only are one, which has the least and the greatest: `needs 240 to 480 KB`.
    """
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for reason in reasons:
        groups.setdefault(tuple(_NUMBER.split(reason)), []).append(_NUMBER.findall(reason))
    counts = {}
    for (first, *words), numbers in groups.items():
        spans = [_span(column) for column in zip(*numbers, strict=True)]
        text = first + "".join(span + word for span, word in zip(spans, words, strict=True))
        counts[text] = len(numbers)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _span(numbers: Sequence[str]) -> str:
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if float(low) == float(high) else f"{low} to {high}"


# The time


def pace_of(records: Iterable[Record]) -> Pace | None:
    """The mean time between records of one workload that followed each other; None if there are too few.

    It holds all that a trial costs, waiting for the compiler too, on the machine that made the records.
    """
    made: dict[Workload, list[float]] = {}
    for record in records:
        if (at := _timestamp(record.created_at)) is not None:
            made.setdefault(record.workload, []).append(at)
    gaps = [
        later - earlier
        for times in made.values()
        if len(times) >= ENOUGH
        for earlier, later in pairwise(sorted(times))
        if 0 < later - earlier <= PAUSE_S
    ]
    if len(gaps) < ENOUGH - 1:
        return None
    told = f"the mean of {len(gaps)} trials that the database has of such a GPU"
    return Pace(sum(gaps) / len(gaps), told)


def _timestamp(created_at: str) -> float | None:
    """Seconds since the epoch; None if the text is no time."""
    try:
        made = datetime.fromisoformat(created_at.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (made if made.tzinfo else made.replace(tzinfo=timezone.utc)).timestamp()


def expected_pace(source: str, jobs: int) -> Pace:
    """What a trial should take where no record tells: compiles and measurements overlap."""
    compiling = f"no earlier run to go by: {COMPILE_S:g} s a compile in {jobs} at a time"
    if source == "model":
        return Pace(COMPILE_S / jobs, compiling)
    return Pace(max(COMPILE_S / jobs, MEASURE_S), f"{compiling}, {MEASURE_S:g} s a measurement beside them")
