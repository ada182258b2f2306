"""Measuring again what a change of the templates made stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashgen.spec.record import Record, Status
from flashgen.spec.target import Target
from flashgen.store.db import TuningDB
from flashgen.store.today import KernelHash

Remeasure = Callable[[Record], Record]
"""Measures a record's config and workload with today's kernel, on the GPU; a failure is a record too."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The stale records of one database that matter."""

    renewable: tuple[Record, ...]
    """The fastest of each workload and admission class whose config still exists."""
    gone: tuple[Record, ...]
    """Records whose family or config no longer exists; they can only be looked at."""


def find_stale(
    database: TuningDB, current_hash: KernelHash, target: Target | None = None, fastest: int = 4
) -> Stale:
    """Stale records that today's kernel has no measurement for.

    Args:
        fastest: how many of each workload and admission class; the others could only win if an edit changed
            their order much, which a new tuning finds out better.
    """
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in database.records(target=target, status=Status.OK, source="measured"):
        groups.setdefault((record.target, record.workload, record.admission), []).append(record)
    renewable: list[Record] = []
    gone: list[Record] = []
    for members in groups.values():
        todays = {record.config for record in members if not database.stale(record)}
        best: dict[object, Record] = {}
        for record in sorted(members, key=lambda each: each.median_us):
            if record.config not in todays:
                best.setdefault(record.config, record)
        lost = [record for record in best.values() if current_hash(record) is None]
        gone += lost
        renewable += [record for record in best.values() if record not in lost][:fastest]
    return Stale(tuple(renewable), tuple(gone))


def revalidate(
    database: TuningDB, records: tuple[Record, ...], remeasure: Remeasure
) -> Iterator[tuple[Record, Record]]:
    """Measures each record again and stores the result at once; gives (old, new) as they come."""
    for old in records:
        new = remeasure(old)
        database.add(new)
        yield old, new
