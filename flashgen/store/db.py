"""TuningDB: every record in an SQL database."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Connection, Select, Table, Text, func, literal_column, select, text
from sqlalchemy.pool import StaticPool

from flashgen.errors import InvalidArgument, StoreError
from flashgen.spec import form
from flashgen.spec.attention import Bucket, Workload, length_code
from flashgen.spec.config import Config
from flashgen.spec.record import (
    CANDIDATES,
    DISTRUSTED,
    Measurement,
    Record,
    Status,
    Versions,
    rank,
    rank_hints,
)
from flashgen.spec.target import Target
from flashgen.store.faults import DATABASE_ERRORS, Fault, explained, fault_of
from flashgen.store.jsonl import NO_RECORD, check_record, in_todays_class, parse_spec, problem_of
from flashgen.store.notices import warn_once
from flashgen.store.opening import damage_notice, identity, open_database, set_aside, writing
from flashgen.store.schema import Real, kernels, measurements, targets
from flashgen.store.today import KernelHash, Staleness
from flashgen.store.upgrade import version_of

FEW = 256
"""Records of one target and spec that are simply all looked at."""

PAGE = 500
"""Rows read or written at a time: a long iteration holds neither the memory nor the database."""

T = TypeVar("T")

JOINED = measurements.join(kernels, kernels.c.id == measurements.c.kernel).join(
    targets, targets.c.key == measurements.c.target
)
SIZES = ("batch", "heads", "kv_heads", "q_len", "k_len")
OUTCOME = tuple(name for name in Measurement.__slots__ if name not in ("status", "reason"))
VERSIONS = tuple(Versions.__slots__)
FACTS = ("arch", "sm_count", "shared_per_block", "l2_mib", "bandwidth", "vendor")

RECORD = select(
    measurements.c.id,
    measurements.c.target_name,
    *(targets.c[name] for name in FACTS),
    kernels.c.spec_json,
    *(measurements.c[name] for name in SIZES),
    measurements.c.params_json,
    kernels.c.family,
    kernels.c.config_json,
    measurements.c.status,
    *(measurements.c[name] for name in OUTCOME),
    measurements.c.reason,
    kernels.c.hash,
    *(measurements.c[name] for name in VERSIONS),
    kernels.c.admission,
    measurements.c.density,
    measurements.c.created_at,
).select_from(JOINED)
"""All of a record; `_record` takes the columns in this order."""

TYPES = tuple(
    (
        column.name,
        str if isinstance(column.type, Text) else float if isinstance(column.type, Real) else int,
        bool(column.nullable),
    )
    for column in RECORD.selected_columns
)
"""(name, type, whether it may be NULL) of each column: SQLite stores anything anywhere."""


class TuningDB:
    """Records in SQLite (a path, or a `sqlite:///` URL) or PostgreSQL; implements `RecordStore`.

    Records are only ever added. One that is there already, alike in all but the time it was made and the
    name of its card, is not added again. Many processes may read and write one database; an `add` is in
    the database when it returns, and a process that dies loses at most the record it was adding.

    A call that needs an answer gets one: `ranked` and `hints` warn and answer with nothing if the database
    fails. All else raises `StoreError`. A row that is no record (damaged, or of a newer FlashGen) is passed
    over with a warning, and listed by `problems`. How a database that cannot be written is opened, see
    `opening`.
    """

    def __init__(
        self, url: str | Path, *, readonly: bool = False, current_hash: KernelHash | None = None
    ) -> None:
        """
        Args:
            url: a path, `sqlite:///path`, `sqlite://` (in memory) or `postgresql://user@host/name`.
            readonly: never make, upgrade or write anything; a file that is not there is empty.
            current_hash: finds stale records, see `today.current_hash`; without it none is.

        Raises:
            StoreError: a newer or a foreign database, an unknown URL, a server that does not answer.
        """
        self._url, self._asked_readonly = url, readonly
        self._lock = threading.RLock()
        self.stale = Staleness(current_hash)
        self._open()
        _open_databases.add(self)

    def _open(self) -> None:
        opened = open_database(self._url, self._asked_readonly)
        self.engine = opened.engine
        self.where = opened.where
        """The path or URL asked for, without password."""
        self.path = opened.path
        self.persistent = opened.persistent
        """Whether the records outlive this process: false in memory, as for a file that is not there."""
        self.readonly = opened.readonly
        self.notice = opened.notice
        """Why this is not simply the database asked for: set aside, read-only, in memory. Else empty."""
        self._file = identity(opened.path) if opened.path else None

    # Writing

    def add(self, record: Record) -> bool:
        """Stores a record, good or bad; false if it is there already.

        Raises:
            StoreError: read-only, full disk, or another fault of the database; nothing stored is lost.
            InvalidArgument: a record that could not be looked up.
        """
        return self.add_many((record,)) == 1

    def add_many(self, records: Iterable[Record]) -> int:
        """Stores all of the records or, on an error, none; returns how many are new. Raises as `add`."""
        if self.readonly:
            raise StoreError(
                f"the record database {self.where} is open read-only, nothing can be added: "
                f"{self.notice or 'it was opened so'}"
            )
        # One row for each digest: a record may be given twice.
        rows = list({row[2]["digest"]: row for row in map(_rows, records)}.values())

        def insert(connection: Connection) -> int:
            added = 0
            for start in range(0, len(rows), PAGE):
                page = rows[start : start + PAGE]
                digests = measurements.c.digest.in_([row[2]["digest"] for row in page])
                held = set(connection.scalars(select(measurements.c.digest).where(digests)))
                new = [row for row in page if row[2]["digest"] not in held]
                # In the order of their keys, so that two processes on a server cannot wait for each other.
                facts = {row[0]["key"]: row[0] for row in new}
                rendered = {row[1]["id"]: row[1] for row in new}
                _insert(connection, targets, [facts[key] for key in sorted(facts)])
                _insert(connection, kernels, [rendered[key] for key in sorted(rendered)])
                _insert(connection, measurements, [row[2] for row in new])
                added += len(new)
            return added

        return self._run(insert, "write to", writes=True) if rows else 0

    # Reading

    def records(
        self,
        target: Target | None = None,
        spec_key: str | None = None,
        family: str | None = None,
        status: Status | None = None,
        source: str | None = None,
    ) -> Iterator[Record]:
        """The records that have all that is given, oldest first."""
        query = _where(target, spec_key, family, status, source)
        number, last = measurements.c.id, 0
        while rows := self._rows(query.where(number > last).order_by(number).limit(PAGE)):
            yield from self._read(rows)
            last = rows[-1][0]

    def ranked(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """See `RecordStore.ranked`."""
        try:
            return self._ranked(workload, target)
        except StoreError as error:
            warn_once(f"{error}; its records are not used")
            return ()

    def hints(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """Records of other GPUs, the most similar first; for seeding a search, never for serving a call."""
        query = _where(None, workload.spec.key).where(measurements.c.target != target.key)
        try:
            rows = self._rows(query.order_by(measurements.c.id))
        except StoreError as error:
            warn_once(f"{error}; its records are not used")
            return ()
        return rank_hints(self._read(rows), workload, target, self.stale)

    def best(self, target: Target | None = None) -> Iterator[Record]:
        """The fastest of each workload and admission class, stale or not: the view `best`."""
        query = select(literal_column("id", BigInteger)).select_from(text("best"))
        if target is not None:
            query = query.where(literal_column("target", Text) == target.key)
        numbers = sorted(int(row[0]) for row in self._rows(query))
        for start in range(0, len(numbers), PAGE):
            page = measurements.c.id.in_(numbers[start : start + PAGE])
            yield from self._read(self._rows(RECORD.where(page).order_by(measurements.c.id)))

    def counts(self) -> list[tuple[str, str, str, int]]:
        """(target key, spec key, status, number of records), in this order."""
        columns = (measurements.c.target, kernels.c.spec, measurements.c.status)
        query: Select[Any] = select(*columns, func.count()).select_from(JOINED).group_by(*columns)
        rows = self._rows(query)
        return sorted((str(row[0]), str(row[1]), str(row[2]), int(row[3])) for row in rows)

    def version(self) -> str:
        """The schema's version."""
        return self._run(lambda connection: version_of(connection, self.where), "read")

    def problems(self) -> list[str]:
        """What a full examination finds wrong; an empty list for a healthy database. Changes nothing."""
        found: list[str] = []
        try:
            with self._lock, self.engine.connect() as connection:
                if self.engine.dialect.name == "sqlite":  # a server keeps its own files whole
                    found += [str(row[0]) for row in connection.execute(text("PRAGMA integrity_check"))]
                    loose = connection.execute(text("PRAGMA foreign_key_check"))
                    found += [
                        f"row {row[1]} of {row[0]} points to a missing row of {row[2]}" for row in loose
                    ]
                found += _unreadable(connection.execution_options(yield_per=PAGE).execute(RECORD))
        except DATABASE_ERRORS as error:
            found.append(str(getattr(error, "orig", None) or error))
        return [line for line in found if line != "ok"]

    def close(self) -> None:
        """Closes all connections; SQLite then folds its log into the file."""
        self.engine.dispose()

    def __enter__(self) -> TuningDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TuningDB({self.where!r}{', read-only' if self.readonly else ''})"

    def _ranked(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        query = _where(target, workload.spec.key).order_by(measurements.c.id)
        rows = self._rows(query.limit(FEW + 1))
        if len(rows) <= FEW:
            return rank(self._read(rows), workload, self.stale)
        # An exhaustively tuned spec has thousands of records at 20 us each: what is far away and has no say
        # stays in the database.
        buckets, classes = self._near(workload, target)
        nearby = measurements.c.bucket.in_(buckets) | measurements.c.status.in_([s.value for s in DISTRUSTED])
        found = rank(self._read(self._rows(query.where(nearby))), workload, self.stale)
        if {record.admission for record in found} == classes:
            return found
        return rank(self._read(self._rows(query)), workload, self.stale)

    def _near(self, workload: Workload, target: Target) -> tuple[list[str], set[str]]:
        """The nearest buckets that hold candidates enough, and all admission classes there are."""
        codes = [
            measurements.c[name] for name in ("bucket", "batch_code", "heads", "kv_heads", "q_code", "k_code")
        ]
        columns = (*codes, kernels.c.admission)
        query: Select[Any] = (
            select(*columns, func.max(measurements.c.params_json), func.count())
            .select_from(JOINED)
            .where(measurements.c.target == target.key, kernels.c.spec == workload.spec.key)
            .where(measurements.c.status == Status.OK.value)
            .group_by(*columns)
        )
        wanted, held = workload.bucket(), []
        for name, batch, heads, kv_heads, q_len, k_len, admission, params_json, count in self._rows(query):
            try:
                params, others = _numbers(params_json)
                codes_of_params = replace(workload, params=params).bucket().params
                codes_of_totals = tuple(length_code(others[own]) for own in _TOTALS if own in others)
                sizes = (batch, heads, kv_heads, q_len, k_len)
                distance = wanted.distance(Bucket(*sizes, codes_of_params, codes_of_totals))
            except NO_RECORD:
                continue  # these rows are no records
            held.append((distance, str(name), str(admission), int(count)))
        buckets, classes, records = [], set[str](), 0
        everything = {admission for _, _, admission, _ in held}
        for _, members in groupby(sorted(held), key=itemgetter(0)):
            for _, name, admission, count in members:
                buckets.append(name)
                classes.add(admission)
                records += count
            if records >= 4 * CANDIDATES and classes == everything:
                break
        return buckets, everything

    # Faults

    def _read(self, rows: Iterable[Sequence[Any]]) -> Iterator[Record]:
        """The records of some rows; what is none costs one warning for each kind of problem."""
        for row in rows:
            try:
                record = _record(row)
            except NO_RECORD as error:
                told = f"{self.where}: records are passed over: {problem_of(error)}"
                warn_once(f"{told}; `flashgen db check` names them")
            else:
                yield record

    def _rows(self, query: Select[Any]) -> Sequence[Sequence[Any]]:
        return self._run(lambda connection: connection.execute(query).fetchall(), "read")

    def _run(self, work: Callable[[Connection], T], action: str, writes: bool = False) -> T:
        """Does something in one transaction. A damaged file is set aside, and the work done on a new one."""
        try:
            try:
                return self._attempt(work, writes)
            except DATABASE_ERRORS as error:
                if fault_of(error) is not Fault.DAMAGED or not self._start_afresh():
                    raise
            return self._attempt(work, writes)
        except DATABASE_ERRORS as error:
            raise explained(error, action, self.where) from error

    def _attempt(self, work: Callable[[Connection], T], writes: bool) -> T:
        with self._lock:
            if writes:
                self._follow()
            connect = writing(self.engine) if writes else self.engine.connect()
            with connect as connection, connection.begin():
                return work(connection)

    def _follow(self) -> None:
        """Opens the file at the path where the open one was moved or removed: what is added there is lost.

        Raises:
            StoreError: nothing would be kept there.
        """
        if self.path is None or self.readonly or identity(self.path) == self._file:
            return
        told = f"the record database {self.path} was moved or removed while it was open"
        self.engine.dispose()
        self._open()
        if self.readonly or not self.persistent:
            raise StoreError(f"{told}, and nothing can be added at its path: {self.notice}")
        warn_once(f"{told}; what is added from now on lies in the file that is there now")

    def _start_afresh(self) -> bool:
        """Sets the damaged file aside and opens a new one; false where that cannot be done."""
        with self._lock:
            if self.path is None or self.readonly:
                return False
            self.engine.dispose()
            path = self.path
            try:
                aside = set_aside(path, self._file)
            except OSError:
                return False
            self._open()
            if aside:
                self.notice = damage_notice(path, aside)
                warn_once(self.notice)
            return not self.readonly


def _where(
    target: Target | None = None,
    spec_key: str | None = None,
    family: str | None = None,
    status: Status | None = None,
    source: str | None = None,
) -> Select[Any]:
    wanted = (
        (measurements.c.target, target and target.key),
        (kernels.c.spec, spec_key),
        (kernels.c.family, family),
        (measurements.c.status, status and status.value),
        (measurements.c.source, source),
    )
    return RECORD.where(*(column == value for column, value in wanted if value is not None))


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Adds the rows whose key is not there."""
    if rows:
        # SQLAlchemy has this insert for each database of its own. Imported here, where something is written:
        # a process that reads starts 30 ms sooner.
        dialect = importlib.import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
        connection.execute(dialect.insert(table).on_conflict_do_nothing(), rows)


def _rows(record: Record) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A record as a row of targets, of kernels and of measurements; its reason is cut to what can be kept."""
    reason = form.brief(form.plain(record.measurement.reason), form.MAX_REASON)
    record = replace(record, measurement=replace(record.measurement, reason=reason))
    form.checked(record.to_json(), form.RECORD, "record")  # what an export holds, an import takes
    check_record(record)
    target, workload, measured = record.target, record.workload, record.measurement
    spec = workload.spec
    kernel = {
        "hash": record.kernel_hash,
        "family": record.config.family,
        "op": spec.op,
        "spec": spec.key,
        "config": record.config.name,
        "admission": record.admission,
        "spec_json": json.dumps(spec.to_json(), ensure_ascii=False),
        "config_json": json.dumps(record.config.to_json(), ensure_ascii=False),
    }
    kernel["id"] = _digest(list(kernel.values()))
    bucket = workload.bucket()
    row: dict[str, Any] = {
        "target": target.key,
        "kernel": kernel["id"],
        **{name: getattr(workload, name) for name in SIZES},
        "params_json": json.dumps({**dict(workload.params), **_others(workload)}),
        "status": measured.status.value,
        "reason": measured.reason,
        **{name: getattr(measured, name) for name in OUTCOME},
        "density": record.density,
        **{name: getattr(record.versions, name) for name in VERSIONS},
    }
    for column in measurements.c:
        # As it will be read back: 5 and 5.0 are one time, and must have one digest.
        if isinstance(column.type, Real) and row[column.name] is not None:
            row[column.name] = float(row[column.name])
    row |= {
        "digest": _digest(list(row.values())),
        "target_name": target.name,
        "created_at": record.created_at,
        "bucket": bucket.text,
        "batch_code": bucket.batch,
        "q_code": bucket.q_len,
        "k_code": bucket.k_len,
    }
    facts = {"key": target.key, **{name: getattr(target, name) for name in FACTS}}
    return facts, kernel, row


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _unreadable(rows: Iterable[Sequence[Any]]) -> list[str]:
    """Which rows are no records, a line for each kind of problem."""
    found: dict[str, list[int]] = {}
    for row in rows:
        try:
            _record(row)
        except NO_RECORD as error:
            found.setdefault(problem_of(error), []).append(row[0])
    return [
        f"row {first} of measurements{f', and {len(more)} more,' if more else ''} cannot be read: {problem}"
        for problem, (first, *more) in found.items()
    ]


def _record(row: Sequence[Any]) -> Record:
    """The inverse of `_rows`, from the columns of `RECORD`; raises one of `NO_RECORD` where it is none."""
    for value, (column, type_, nullable) in zip(row, TYPES, strict=True):
        if type(value) is not type_ and not (nullable and value is None):
            raise InvalidArgument(f"{column}={value!r} must be {type_.__name__}")
    _, name, arch, sm_count, shared, l2_mib, bandwidth, vendor, spec, *more = row
    batch, heads, kv_heads, q_len, k_len, params, family, config, status, *more = more
    median, low, high, passes, error, registers, spills, block, source, *more = more
    reason, kernel_hash, flashgen, triton, torch, driver, admission, density, created_at = more
    record = Record(
        _target(arch, sm_count, shared, l2_mib, bandwidth, vendor, name),
        _workload(spec, batch, heads, kv_heads, q_len, k_len, params),
        _config(family, config),
        Measurement(
            Status(status), median, low, high, passes, error, registers, spills, block, source, reason
        ),
        kernel_hash,
        _versions(flashgen, triton, torch, driver),
        admission,
        density,
        created_at,
    )
    check_record(record)
    return in_todays_class(record)


# Rows repeat themselves: thousands of records share a few hundred configs and a handful of the rest.


@lru_cache(maxsize=64)
def _target(*facts_and_name: Any) -> Target:
    target = Target(*facts_and_name)
    form.checked(target.to_json(), form.TARGET, "target")
    return target


@lru_cache(maxsize=4096)
def _config(family: str, config_json: str) -> Config:
    return Config.from_json(family, form.checked(json.loads(config_json), form.CONFIG, "config"))


@lru_cache(maxsize=4096)
def _workload(
    spec: str, batch: int, heads: int, kv_heads: int, q_len: int, k_len: int, params_json: str
) -> Workload:
    params, others = _numbers(params_json)
    return Workload(parse_spec(spec), batch, heads, kv_heads, q_len, k_len, params, **others)


# Totals of packed sequences, and how many documents there are, stand among the parameters, by names that no
# parameter has: columns of their own would cost every database a migration for the few rows that have any.
_TOTALS = ("total_q", "total_k")
_OTHERS = {"total.q": "total_q", "total.k": "total_k", "operand.documents": "documents"}


def _others(workload: Workload) -> dict[str, int]:
    found = {name: getattr(workload, own) for name, own in _OTHERS.items()}
    always = _TOTALS if workload.spec.packed else ()
    return {name: number for name, number in found.items() if number or _OTHERS[name] in always}


@lru_cache(maxsize=256)
def _numbers(params_json: str) -> tuple[tuple[tuple[str, float], ...], dict[str, int]]:
    """Parameters, and what stands among them by its name in a workload."""
    found = form.checked(json.loads(params_json), form.PARAMS, "params")
    others = {
        own: form.checked(found[name], form.Number(), name) for name, own in _OTHERS.items() if name in found
    }
    return tuple(pair for pair in found.items() if pair[0] not in _OTHERS), others


@lru_cache(maxsize=64)
def _versions(*versions: str) -> Versions:
    return Versions(*versions)


_open_databases: weakref.WeakSet[TuningDB] = weakref.WeakSet()


def _after_fork() -> None:
    """A child process must not use, or close, its parent's connections and locks."""
    for database in _open_databases:
        database._lock = threading.RLock()
        if not isinstance(database.engine.pool, StaticPool):  # what is in memory was copied with the process
            database.engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
