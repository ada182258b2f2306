"""What a study starts from: configs to try first, records that need no repeating, what a model expects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from flashgen.build.inputs import contiguous_facts
from flashgen.codegen.families import serving
from flashgen.codegen.family import Family
from flashgen.errors import Unsupported
from flashgen.measure.compile_pool import Compiler
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Record, RecordStore, Status, Versions
from flashgen.spec.target import Target
from flashgen.tune.model import expected_error, expected_us
from flashgen.tune.plan import Plan
from flashgen.tune.search import Knowledge

MAX_SEEDS = 6
"""Configs of earlier winners that a study tries first, besides the family's default."""
RETRIED = (Status.OUT_OF_MEMORY,)
"""Outcomes that say more about the moment than about the config: measured again by the next run."""
RETRIED_COMPILES = (Status.TIMEOUT, Status.CRASH)
"""The same of compiles, where a machine that is busy or fails looks like a kernel that cannot be compiled."""


def families_for(workload: Workload, target: Target, plan: Plan) -> tuple[Family, ...]:
    """The families to search for a workload, each of which serves calls of freshly allocated tensors.

    Raises:
        Unsupported: none does, or none of those that the plan names.
    """
    facts, group = contiguous_facts(workload), workload.heads_per_kv
    found = serving(workload.spec, target, facts, group)
    chosen = tuple(family for family in found if not plan.families or family.name in plan.families)
    if not chosen:
        raise Unsupported(f"of the families {', '.join(plan.families)} none serves this")
    return chosen


class TuneStore(RecordStore, Protocol):
    """What the tuner needs of the record database; `store.db.TuningDB` has it."""

    def add(self, record: Record) -> bool:
        """Stores a record; it is safe when this returns."""
        ...

    def records(
        self,
        target: Target | None = None,
        spec_key: str | None = None,
        family: str | None = None,
        status: Status | None = None,
        source: str | None = None,
    ) -> Iterator[Record]:
        """Stored records, oldest first."""
        ...

    def hints(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """Records of other GPUs."""
        ...


def first_tried(
    store: TuneStore, workload: Workload, target: Target, default: Config, winners: Sequence[Config] = ()
) -> list[Config]:
    """The default, then winners: of this and neighbouring workloads, of this run, of other GPUs.

    Args:
        default: of the family that is searched; winners of other families are left out.
        winners: of this run so far, the latest last.
    """
    ranked = store.ranked(workload, target)
    hints = store.hints(workload, target)
    near = [record.config for record in ranked[: MAX_SEEDS // 2]]
    far = [record.config for record in hints[: MAX_SEEDS // 2]]
    found = [*near, *reversed(winners), *far]
    return [default, *[config for config in found if config.family == default.family][:MAX_SEEDS]]


def known_records(
    stored: Iterable[Record],
    workload: Workload,
    space: Sequence[Config],
    density: str,
    versions: Versions,
    compiler: Compiler,
) -> Iterator[Record]:
    """Records of earlier runs that need no repetition: same sizes, same kernel, same compiler.

    Args:
        stored: of the workload's spec and target, and of the source that is worked with.
        space: the feasible configs.
        compiler: renders the kernels that records are compared with.
    """
    feasible = frozenset(space)
    for record in stored:
        if (
            record.workload == workload
            and record.config in feasible
            and not _of_the_moment(record.measurement)
            and record.density == density
            and record.versions.triton == versions.triton
            and record.kernel_hash == compiler.source(workload.spec, record.config).hash
        ):
            yield record


def knowledge(
    workload: Workload, space: Sequence[Config], target: Target, stored: Iterable[Record]
) -> Knowledge:
    """What the cost model expects, and how wrong it was at the nearest workload that was measured.

    Args:
        stored: of the workload's spec and target, and of the source that is worked with.
    """
    expected = {config: expected_us(workload, config, target) for config in space}
    error = max(map(expected_error, space), default=0.0)
    times: dict[Workload, dict[Config, float]] = {}
    for record in stored:
        learnt = learnt_us(record.measurement)
        if record.workload != workload and record.config in expected and learnt is not None:
            times.setdefault(record.workload, {})[record.config] = learnt
    bucket = workload.bucket()
    near = min(times, key=lambda other: (bucket.distance(other.bucket()), -len(times[other])), default=None)
    if near is None:
        return Knowledge(expected, error=error)
    there = {config: expected_us(near, config, target) for config in times[near]}
    errors = {
        config: math.log(time / there[config])
        for config, time in times[near].items()
        if math.isfinite(there[config])
    }
    return Knowledge(expected, errors, error)


def _of_the_moment(measurement: Measurement) -> bool:
    """Whether an outcome deserves another try by the next run; without registers there was no kernel yet."""
    uncompiled = measurement.registers is None
    return measurement.status in RETRIED or (uncompiled and measurement.status in RETRIED_COMPILES)


def learnt_us(measurement: Measurement) -> float | None:
    """What a search learns from an outcome: a time, or that it failed."""
    if measurement.status in (Status.OK, Status.SLOW):
        return measurement.median_us
    return None
