"""Stale records: found, limited to those that matter, measured again."""

from __future__ import annotations

from dataclasses import replace

import sample_records as make

from flashgen.spec.record import Measurement, Record, Status
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.store.revalidate import find_stale, revalidate


def today(record: Record) -> str | None:
    return None if record.config["block_m"] == 16 else "today"


def remeasured(record: Record) -> Record:
    slower = Measurement(Status.OK, record.median_us + 1)
    if record.config["num_stages"] == 4:
        slower = Measurement(Status.WRONG, reason="differs by 1.0")
    return replace(record, measurement=slower, kernel_hash="today", created_at="2027-01-01T00:00:00Z")


def test_the_fastest_stale_records_of_each_workload_and_class() -> None:
    stale = [make.record(10.0 + n, conf=make.config(stages=n), hash="old") for n in (4, 3, 2, 1)]
    tma = make.record(99.0, conf=make.config(loads="tma"), hash="old")
    elsewhere = make.record(50.0, work=make.workload(512), hash="old")
    gone = make.record(5.0, conf=make.config(16), hash="old")
    with TuningDB("sqlite://", current_hash=today) as database:
        database.add_many([*stale, tma, elsewhere, gone])
        found = find_stale(database, today, fastest=2)
    assert found.gone == (gone,)
    assert found.renewable == (stale[3], stale[2], tma, elsewhere)


def test_what_today_has_measured_is_not_asked_for_again() -> None:
    old, new = make.record(10.0, hash="old"), make.record(11.0, hash="today")
    modelled = make.record(3.0, hash="old", source="model", conf=make.config(stages=1))
    failed = make.record(status=Status.WRONG, hash="old", conf=make.config(stages=3))
    with TuningDB("sqlite://", current_hash=today) as database:
        database.add_many([old, new, modelled, failed])
        assert find_stale(database, today).renewable == ()


def test_only_the_named_gpu() -> None:
    a100 = make.record(1.0, hash="old", target=find_target("nvidia-a100"))
    with TuningDB("sqlite://", current_hash=today) as database:
        database.add_many([a100, make.record(2.0, hash="old")])
        assert find_stale(database, today, make.H200).renewable == (make.record(2.0, hash="old"),)
        assert len(find_stale(database, today).renewable) == 2


def test_results_are_stored_at_once_and_replace_the_hints() -> None:
    records = [make.record(10.0 + n, conf=make.config(stages=n), hash="old") for n in (1, 2, 4)]
    with TuningDB("sqlite://", current_hash=today) as database:
        database.add_many(records)
        done = revalidate(database, find_stale(database, today).renewable, remeasured)
        old, new = next(done)
        assert (old, new.median_us) == (records[0], 12.0)
        assert len(list(database.records())) == 4
        assert [new.measurement.status for _, new in done] == [Status.OK, Status.WRONG]
        found = database.ranked(make.workload(), make.H200)
        assert [(r.median_us, database.stale(r)) for r in found] == [
            (12.0, False),
            (13.0, False),
        ]
        assert find_stale(database, today).renewable == (records[2],)
