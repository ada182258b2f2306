"""TuningDB: what is stored, and that nothing of it is lost whoever writes, dies or fills the disk."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime, timezone
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import sample_records as make
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from flashgen.errors import InvalidArgument, StoreError
from flashgen.spec import form
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.spec.rule import Rule
from flashgen.spec.target import find_target
from flashgen.store import jsonl
from flashgen.store.db import TuningDB
from flashgen.store.notices import StoreWarning
from flashgen.store.transfer import export_records

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def database(tmp_path: Path) -> TuningDB:
    return TuningDB(tmp_path / "folder" / "tuning.db")


# What is stored


def test_records_come_back_as_they_were(database: TuningDB) -> None:
    records = [make.full(), make.record(), make.record(status=Status.TIMEOUT, conf=make.config(16))]
    assert database.add_many(records) == 3
    found = list(database.records())
    assert found == records
    assert [record.to_json() for record in found] == [record.to_json() for record in records]


printable = st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])
numbers = st.none() | st.floats(allow_nan=False) | st.integers(0, 2**40)
counts = st.none() | st.integers(0, 2**62 - 1)
moments = st.datetimes(min_value=datetime(1000, 1, 1), timezones=st.just(timezone.utc)).map(
    datetime.isoformat
)


@settings(deadline=None, max_examples=60)
@given(
    status=st.sampled_from(list(Status)),
    median=st.floats(0.1, 1e12),
    error=numbers,
    limits=st.tuples(numbers, numbers),
    counts=st.tuples(counts, counts, counts),
    reason=st.text(printable | st.sampled_from("\n\t"), min_size=1),
    lengths=st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)),
    params=st.tuples(st.integers(0, 2**31), st.integers(0, 2**31), st.floats(0.1, 1e6)),
    name=st.text(printable, max_size=256),
    moment=moments,
)
def test_any_record_comes_back(
    status, median, error, limits, counts, reason, lengths, params, name, moment
) -> None:
    work = make.workload(*lengths, batch=3, spec=make.WINDOW_AND_CAP, params=params)
    if status is Status.OK:  # of which no number is negative or infinite
        error, *limits = (each if each is None or 0 <= each < math.inf else None for each in (error, *limits))
    measurement = Measurement(status, median, *limits, 5, error, *counts, "model", reason)
    record = replace(make.record(work=work), measurement=measurement, density=name, created_at=moment)
    record = replace(record, target=replace(record.target, name=name))
    with TuningDB("sqlite://") as database:
        assert database.add(record)
        assert not database.add(record)
        (found,) = database.records()
    assert found == record
    assert (found.created_at, found.target.name) == (moment, name)
    assert jsonl.parse_line(jsonl.format_line(found)) == found


def all_of(pieces: list[str]) -> str:
    """The pieces joined by `&`, in a tree as flat as can be."""
    if len(pieces) == 1:
        return f"({pieces[0]})"
    half = len(pieces) // 2
    return f"({all_of(pieces[:half])} & {all_of(pieces[half:])})"


any_text = st.text(max_size=300) | st.sampled_from(["", "x" * 257, "\x1b", "yesterday"])


@settings(deadline=None, max_examples=40)
@given(
    numbers=st.tuples(*[st.sampled_from([0, 1, 2**31, 2**62, -1, 1.5, float("inf")])] * 4),
    texts=st.tuples(*[any_text] * 5),
    moment=any_text | moments | st.sampled_from(["2026-11-29", "2026-13-29T00:00:00Z"]),
    reason=st.integers(0, 2**17).map('"\n'.__mul__) | st.text(),
    names=st.integers(0, 40),
    terms=st.integers(1, 1500),
)
def test_what_a_store_takes_an_import_takes(numbers, texts, moment, reason, names, terms) -> None:
    try:
        declared = [f"p{number}" for number in range(names)]
        pieces = ["k_idx > q_idx", *[f"k_idx > {name}" for name in declared], *["~(q_idx == 12)"] * terms]
        where = f" where {', '.join(f'{name}: i32' for name in declared)}" if declared else ""
        spec = replace(make.CAUSAL, mask=Rule.parse("mask", all_of(pieces) + where))
        measurement = Measurement(
            Status.CRASH, numbers[0], passes=numbers[1], registers=numbers[2], reason=reason or "none"
        )
        record = replace(
            make.record(work=make.workload(spec=spec, params=(numbers[3],) * names)),
            measurement=measurement,
            kernel_hash=texts[0],
            density=texts[1],
            versions=Versions(*texts[2:4]),
            target=replace(make.H200, name=texts[4]),
            created_at=moment,
        )
        with TuningDB("sqlite://") as database:
            database.add(record)
            (found,) = database.records()
    except InvalidArgument:
        return
    with StringIO() as file:
        assert export_records([found], file) == 1
        file.seek(0)
        (line,) = jsonl.read(file)
    assert (line.record, line.problem) == (found, "")


def test_the_largest_record_fits_a_line() -> None:
    rule = Rule.parse("mask", all_of(["k_idx > q_idx"] * 900))
    assert len(rule.text) > 0.8 * form.MAX_EXPRESSION
    spec = replace(make.CAUSAL, mask=rule)
    crash = Measurement(Status.CRASH, reason='"' * 300_000)
    with TuningDB("sqlite://") as database:
        database.add(replace(make.record(work=make.workload(spec=spec)), measurement=crash))
        (found,) = database.records()
    assert len(found.measurement.reason) == form.MAX_REASON
    assert jsonl.parse_line(jsonl.format_line(found)) == found


def test_an_error_that_is_no_number_comes_back(database: TuningDB) -> None:
    wrong = Measurement(Status.WRONG, max_error=float("nan"), reason="output left unwritten")
    database.add(replace(make.record(), measurement=wrong))
    (found,) = database.records()
    assert str(found.measurement.max_error) == "nan"


def test_a_reason_with_bytes_of_a_tool_is_stored(database: TuningDB) -> None:
    crash = Measurement(Status.CRASH, reason="tool said \udcff\0 and died")
    assert database.add(replace(make.record(), measurement=crash))
    (found,) = database.records()
    assert found.measurement.reason == "tool said ?? and died"


def test_a_record_is_added_once(database: TuningDB) -> None:
    assert database.add(make.record(100.0)) is True
    assert database.add(make.record(100.0)) is False
    assert database.add(make.record(100)) is False  # 100 and 100.0 are one time
    assert database.add(make.record(100.0, created_at="2027-01-01T00:00:00Z")) is False
    assert database.add(make.record(100.5)) is True
    assert database.add_many([make.record(100.5), make.record(101.0), make.record(101.0)]) == 1
    assert [record.median_us for record in database.records()] == [100.0, 100.5, 101.0]


def test_a_record_that_could_not_be_found_again_is_refused(database: TuningDB) -> None:
    work = replace(make.workload(spec=make.WINDOW_AND_CAP, params=(1, 2, 3.0)), params=())
    with pytest.raises(InvalidArgument, match=r"has parameters \[\], its spec \['left', 'right', 'cap'\]"):
        database.add_many([make.record(), make.record(work=work)])
    assert list(database.records()) == []


def test_records_are_filtered(database: TuningDB) -> None:
    h100 = find_target("nvidia-h100")
    records = [
        make.record(1.0),
        make.record(2.0, target=h100),
        make.record(work=make.full().workload, median_us=3.0),
        make.record(status=Status.CRASH),
        make.record(5.0, source="model", conf=replace(make.config(), family="attention_fwd_ws")),
    ]
    database.add_many(records)
    spec = make.CAUSAL.key
    assert list(database.records(target=h100)) == [records[1]]
    assert list(database.records(spec_key=spec)) == [records[0], records[1], records[3], records[4]]
    assert list(database.records(family="attention_fwd_ws")) == [records[4]]
    assert list(database.records(status=Status.CRASH)) == [records[3]]
    assert list(database.records(source="model")) == [records[4]]
    assert list(database.records(make.H200, spec, "attention_fwd", Status.OK)) == [records[0]]
    key = make.H200.key
    assert database.counts() == [
        (h100.key, spec, "OK", 1),
        (key, spec, "CRASH", 1),
        (key, spec, "OK", 2),
        (key, records[2].workload.spec.key, "OK", 1),
    ]


def test_many_records_are_read_in_pages(database: TuningDB) -> None:
    records = make.many(50, 50)
    assert database.add_many(records) == 2500
    found = database.records()
    first = next(found)
    database.add(make.record(12345.0))  # a reader half way through does not stop a writer
    assert [first, *found] == [*records, make.record(12345.0)]


def test_threads_share_a_database(database: TuningDB) -> None:
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for trial in range(10):
                database.add(make.record(1.0 + number + trial / 16))
                database.ranked(make.workload(), make.H200)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(list(database.records())) == 80


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_opens_connections_of_its_own(database: TuningDB) -> None:
    database.add(make.record(1.0))
    code = (
        "import os, sys, sample_records as make\n"
        "from flashgen.store.db import TuningDB\n"
        "db = TuningDB(sys.argv[1]); db.add(make.record(2.0))\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    db.add(make.record(3.0)); os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "db.add(make.record(4.0)); print(len(list(db.records())))\n"
    )
    done = run_python(code, str(database.path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


# Other GPUs


def test_c25_records_of_other_gpus_are_hints_the_same_architecture_first(database: TuningDB) -> None:
    names = ("nvidia-a100", "nvidia-b200", "nvidia-h100-pcie", "nvidia-h100", "nvidia-h200")
    database.add_many([make.record(100.0 + i, target=find_target(name)) for i, name in enumerate(names)])
    hints = database.hints(make.workload(), make.H200)
    assert [record.target.name for record in hints] == [
        "nvidia-h100",
        "nvidia-h100-pcie",
        "nvidia-b200",
        "nvidia-a100",
    ]
    assert [record.median_us for record in database.ranked(make.workload(), make.H200)] == [104.0]


def test_c25_the_gpu_of_a_record_is_its_facts(database: TuningDB) -> None:
    relabelled = replace(make.H200, name="NVIDIA H200 NVL")
    smaller = replace(make.H200, sm_count=114)
    database.add_many(
        [make.record(1.0), make.record(2.0, target=relabelled), make.record(3.0, target=smaller)]
    )
    assert [r.median_us for r in database.ranked(make.workload(), relabelled)] == [
        2.0
    ]  # the newest of one kernel
    assert [r.target.name for r in database.records(target=make.H200)] == ["nvidia-h200", "NVIDIA H200 NVL"]
    assert "H200" not in make.H200.key


# Staleness


def test_c27_staleness_is_by_content_not_by_time_or_place(tmp_path: Path) -> None:
    from flashgen.store.today import current_hash

    todays = current_hash(make.record())
    assert todays is not None
    records = [
        make.record(60.0, hash=todays, created_at="2001-01-01T00:00:00Z"),
        make.record(50.0, hash="0" * 16, conf=make.config(stages=3)),
    ]
    with TuningDB(tmp_path / "a.db") as database:
        database.add_many(records)
    moved = (tmp_path / "a.db").rename(tmp_path / "b.db")
    os.utime(moved, (0, 0))
    with TuningDB(moved, current_hash=current_hash) as database:
        found = database.ranked(make.workload(), make.H200)
        assert [(r.median_us, database.stale(r)) for r in found] == [(60.0, False), (50.0, True)]


def test_c27_a_copied_installation_renders_the_same_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from flashgen.store.today import current_hash

    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))  # of the copy: it must render itself
    for name in ("flashgen", "templates", "tuning_db"):
        shutil.copytree(ROOT / name, tmp_path / name)
    code = (
        "import sample_records as make\n"
        "from flashgen.store import today\n"
        "print(today.__file__, today.current_hash(make.record()))"
    )
    done = run_python(code, root=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "flashgen/store/today.py"), current_hash(make.record())]


def test_a_config_that_no_longer_exists_is_stale() -> None:
    from flashgen.store.today import current_hash

    assert current_hash(make.record()) is not None
    assert current_hash(make.record(conf=make.config(block_m=1024))) is None
    assert current_hash(make.record(conf=replace(make.config(), family="attention_old"))) is None
    partial = replace(make.config(), values=(("block_m", 128),))
    assert current_hash(replace(make.record(), config=partial)) is None


# Rows that are no records: damaged, or of a newer FlashGen

ODD_ROWS: dict[str, tuple[str, str, object, str]] = {
    "no json": ("kernels", "spec_json", "{", "not a record: Expecting property name"),
    "a spec of another kind": ("kernels", "spec_json", "[]", "spec must be an object"),
    "a newer field": ("kernels", "spec_json", '{"op": "fwd", "sinks": 4}', "spec.addressing is missing"),
    "a list of tunables": ("kernels", "config_json", "[1]", "config must be an object"),
    "a newer tunable": ("kernels", "config_json", '{"clusters": 2}', "'clusters' is no tunable"),
    "a tunable that is a list": ("kernels", "config_json", '{"block_m": [64]}', "config.block_m must not be"),
    "parameters without names": ("measurements", "params_json", "[5]", "params must be an object"),
    "a parameter that is a text": ("measurements", "params_json", '{"left": "x"}', "params.left must not be"),
    "a parameter too many": ("measurements", "params_json", '{"left": 1}', "has parameters ['left']"),
    "a newer status": ("measurements", "status", "FLAKY", "unknown status 'FLAKY'; known: CRASH, "),
    "a newer source": ("measurements", "source", "simulated", "must be one of measured, model"),
    "a time that is a text": ("measurements", "median_us", "soon", "median_us='soon' must be float"),
    "no time": ("measurements", "median_us", None, "an OK measurement needs a time of at least 0.1 us"),
    "a size that is a text": ("measurements", "heads", "many", "heads='many' must be int"),
    "a text that is none": ("measurements", "triton", b"3.\x82", r"triton=b'3.\x82' must be str"),
    "no heads": ("measurements", "kv_heads", 0, "kv_heads=0 must be at least 1"),
    "a name a terminal obeys": ("measurements", "density", "\x1b[31m", "density must not be '\\x1b[31m'"),
    "a gpu of such a name": ("targets", "vendor", "\x1b[31m", "target.vendor must not be '\\x1b[31m'"),
    "a gpu without processors": ("targets", "sm_count", 0, "target.sm_count must not be 0"),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("odd", ODD_ROWS)
def test_a_row_that_is_no_record_is_passed_over_and_listed(tmp_path: Path, odd: str, many: bool) -> None:
    table, column, value, problem = ODD_ROWS[odd]
    alone = replace(make.H200, sm_count=100) if table == "targets" else make.H200
    bad = make.record(1.0, conf=make.config(stages=1), target=alone)
    good = [make.record(2.0 + n, work=make.workload(512 << n % 7)) for n in range(300 if many else 2)]
    with TuningDB(tmp_path / "tuning.db") as database:
        database.add_many([bad, *good])
    with sqlite3.connect(tmp_path / "tuning.db") as connection:
        which = "key LIKE '%100sm%'" if table == "targets" else "rowid = 1"
        new = "CAST(? AS TEXT)" if isinstance(value, bytes) else "?"
        connection.execute(f"UPDATE {table} SET {column} = {new} WHERE {which}", (value,))
    connection.close()
    with TuningDB(tmp_path / "tuning.db", readonly=True) as database:
        with pytest.warns(StoreWarning) as caught:
            assert list(database.records()) == good
            found = database.ranked(make.workload(512), make.H200)
            hints = database.hints(make.workload(512), find_target("nvidia-h100"))
        assert [record.median_us for record in found[:1]] == [hints[0].median_us]
        assert len(caught) == 1, "each kind of problem is told once"
        assert problem in str(caught[0].message) and "`flashgen db check`" in str(caught[0].message)
        (told,) = database.problems()
        assert told.startswith("row 1 of measurements cannot be read: ") and problem in told


def test_rows_with_one_problem_are_one_line(database: TuningDB) -> None:
    database.add_many([make.record(1.0 + n) for n in range(3)])
    assert database.problems() == []
    with sqlite3.connect(str(database.path)) as connection:
        connection.execute("UPDATE measurements SET status = 'FLAKY' WHERE id > 1")
    connection.close()
    (told,) = database.problems()
    assert told.startswith("row 2 of measurements, and 1 more, cannot be read: unknown status 'FLAKY'")


# Many writers, and a sudden end

WRITER = """
import sys, sample_records as make
from flashgen.store.db import TuningDB
path, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with TuningDB(path) as db:
    for trial in range(count):
        db.add(make.record(1 + number + trial / 1024, conf=make.config(stages=1 + trial % 4)))
        print(trial, flush=True)
"""

READER = """
import sys, time, sample_records as make
from flashgen.store.db import TuningDB
with TuningDB(sys.argv[1]) as db:
    seen = [0]
    while seen[-1] < int(sys.argv[2]):
        seen.append(len(list(db.records())))
        db.ranked(make.workload(), make.H200)
        time.sleep(0.02)
print(len(seen), *seen)
"""

DIES = """
import os, signal, sys, sample_records as make
from sqlalchemy import event
from flashgen.store.db import TuningDB
db = TuningDB(sys.argv[1])
db.add(make.record(7777.0))
print("stored", flush=True)
# Spill to the log in the middle of a transaction, so that there is something to roll back.
@event.listens_for(db.engine, "connect")
def small(connection, _):
    connection.execute("PRAGMA cache_size = 5")
db.engine.dispose()
@event.listens_for(db.engine, "after_cursor_execute")
def die(connection, cursor, statement, *_):
    if statement.startswith("INSERT INTO measurements"):
        os.kill(os.getpid(), signal.SIGKILL)
db.add_many([make.record(8000.0 + n) for n in range(900)])
"""


def python(*arguments: str, root: Path = ROOT) -> list[str]:
    return [sys.executable, "-W", "error", "-c", *arguments]


def environment(root: Path = ROOT) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT / "tests")])}


def run_python(code: str, *arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, where a warning is an error."""
    return subprocess.run(
        python(code, *arguments), capture_output=True, text=True, env=environment(root), cwd=root, timeout=120
    )


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        python(code, *map(str, arguments)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_c24_eight_writers_and_a_reader_lose_nothing(tmp_path: Path) -> None:
    path, count = tmp_path / "new" / "tuning.db", 25
    writers = [start(WRITER, path, number, count) for number in range(8)]
    reader = start(READER, path, 8 * count)
    for process in writers:
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
        assert len(out.split()) == count
    out, errors = reader.communicate(timeout=120)
    assert (reader.returncode, errors) == (0, "")
    seen = [int(word) for word in out.split()[1:]]
    assert all(before <= after for before, after in pairwise(seen))
    with TuningDB(path) as database:
        found = sorted(record.median_us for record in database.records())
        assert found == sorted(1 + n + t / 1024 for n in range(8) for t in range(count))
        assert database.problems() == []


def test_c24_a_writer_killed_in_a_transaction_takes_only_its_own_record(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        database.add(make.record(1.0))
        dying = start(DIES, path)
        out, errors = dying.communicate(timeout=120)
        assert (dying.returncode, out, errors) == (-signal.SIGKILL, "stored\n", "")
        assert database.add(make.record(2.0))
        assert [record.median_us for record in database.records()] == [1.0, 7777.0, 2.0]
        assert database.problems() == []
    with TuningDB(path) as database:
        assert len(list(database.records())) == 3


def test_c24_a_writer_killed_between_records_loses_none_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    writer = start(WRITER, path, 0, 100_000)
    assert writer.stdout is not None
    for line in writer.stdout:
        if line == "20\n":
            writer.send_signal(signal.SIGKILL)
            break
    acknowledged = [int(line) for line in writer.stdout] or [20]
    writer.wait()
    assert writer.stderr is not None
    assert writer.stderr.read() == ""
    with TuningDB(path) as database:
        found = {record.median_us for record in database.records()}
        assert {1 + trial / 1024 for trial in range(acknowledged[-1] + 1)} <= found
        assert database.problems() == []


def test_c24_a_writer_waits_for_another(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, lambda: other.execute("COMMIT"))
        timer.start()
        assert database.ranked(make.workload(), make.H200) == ()  # a reader does not wait
        assert database.add(make.record())
        timer.join()


def test_a_database_held_too_long_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:

        @event.listens_for(database.engine, "checkout")
        def impatient(connection: sqlite3.Connection, *_: object) -> None:
            connection.execute("PRAGMA busy_timeout = 50")

        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            StoreError, match=r"cannot write to .*tuning\.db: database is locked: another process"
        ):
            database.add(make.record())
        other.execute("ROLLBACK")
        assert database.add(make.record())


# A full disk


def test_a_full_disk_loses_nothing_stored(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        kept = [make.record(1.0 + n) for n in range(20)]
        database.add_many(kept)
        with database.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()

        @event.listens_for(database.engine, "checkout")
        def full(connection: sqlite3.Connection, *_: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {pages}")

        with pytest.raises(StoreError) as error:
            database.add_many([make.record(100.0 + n) for n in range(2000)])
        assert str(error.value) == (
            f"cannot write to the record database {path}: database or disk is full: the disk is full; free "
            "some space there and run the same again. Everything stored before is kept, only this write is "
            "missing"
        )
        assert list(database.records()) == kept
        assert len(database.ranked(make.workload(), make.H200)) == 1
    with TuningDB(path) as database:
        assert list(database.records()) == kept
        assert database.problems() == []
        assert database.add(make.record(99.0))


# A damaged file


def spoil(path: Path, where: int, size: int = 4096) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        file.write(os.urandom(size))


def test_damage_found_while_reading_is_set_aside_and_the_call_answered(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        database.add_many(make.many(40, 10))
    content = path.read_bytes()
    database = TuningDB(path)
    for page in range(2, len(content) // 4096):
        spoil(path, page * 4096)
    damaged = path.read_bytes()
    with pytest.warns(StoreWarning, match="was damaged; it is kept as") as caught:
        assert database.ranked(make.many(1, 1)[0].workload, make.H200) == ()
    assert len(caught) == 1
    (aside,) = tmp_path.glob("tuning.db.damaged-*Z")
    assert aside.read_bytes() == damaged
    assert str(aside) in database.notice
    assert database.add(make.record())
    assert list(database.records()) == [make.record()]


def test_damage_found_while_writing_does_not_lose_the_new_record(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        database.add_many(make.many(40, 10))
    pages = path.stat().st_size // 4096
    database = TuningDB(path)
    for page in range(2, pages):
        spoil(path, page * 4096)
    with pytest.warns(StoreWarning, match="was damaged"):
        assert database.add(make.record(5.0))
    assert list(database.records()) == [make.record(5.0)]


def test_damage_of_an_index_is_damage_too(tmp_path: Path) -> None:
    path, records = tmp_path / "tuning.db", make.many(40, 10)
    index = "sqlite_schema WHERE name = 'kernels_by_spec'"
    with TuningDB(path) as database:
        database.add_many(records)
    # Hidden while the rows go, the index afterwards leads to rows that are not there.
    kept: list[tuple[object, ...]] = []
    for change in (f"DELETE FROM {index}", "DELETE FROM kernels"):
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.executemany("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", kept)
            kept += connection.execute(f"SELECT * FROM {index}")
            connection.execute(change)
        connection.close()
    with TuningDB(path) as database, pytest.warns(StoreWarning, match="was damaged; it is kept as"):
        assert list(database.records(make.H200, records[0].workload.spec.key)) == []
        assert database.add(make.record())


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_was_moved_while_it_was_open_is_not_written_to(tmp_path: Path, again: bool) -> None:
    path, moved = tmp_path / "tuning.db", tmp_path / "moved.db"
    with TuningDB(path) as database:
        database.add(make.record(1.0))
        for suffix in ("-wal", "-shm", ""):
            path.with_name(path.name + suffix).rename(moved.with_name(moved.name + suffix))
        if again:  # as where another process set it aside
            TuningDB(path).close()
        with pytest.warns(StoreWarning, match="was moved or removed while it was open; what is added from"):
            assert database.add(make.record(2.0))
        assert database.add(make.record(3.0))
    with TuningDB(path, readonly=True) as there, TuningDB(moved, readonly=True) as here:
        assert [record.median_us for record in there.records()] == [2.0, 3.0]
        assert [record.median_us for record in here.records()] == [1.0]


def test_a_file_that_was_removed_and_cannot_be_made_again_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        database.add(make.record(1.0))
        path.unlink()
        path.mkdir()
        told = r"was moved or removed while it was open, and nothing can be added at its path: .* is a folder"
        with pytest.warns(StoreWarning), pytest.raises(StoreError, match=told):
            database.add(make.record(2.0))


def test_damage_in_a_database_opened_for_reading_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        database.add_many(make.many(40, 10))
    database = TuningDB(path, readonly=True)
    for page in range(2, path.stat().st_size // 4096):
        spoil(path, page * 4096)
    damaged = path.read_bytes()
    with pytest.warns(StoreWarning, match="its records are not used"):
        assert database.ranked(make.many(1, 1)[0].workload, make.H200) == ()
    assert database.problems() != []
    assert path.read_bytes() == damaged
    assert [each.name for each in tmp_path.glob("*damaged*")] == []


def test_importing_the_store_brings_no_gpu_stack_and_shipped_records_no_sql() -> None:
    code = (
        "import sys, json\n"
        "import flashgen.store.{name}\n"
        "print(json.dumps(sorted(set(sys.modules) & "
        "{{'torch', 'triton', 'optuna', 'jinja2', 'alembic', 'sqlalchemy'}})))"
    )
    for name, brings in (("shipped", []), ("jsonl", []), ("today", []), ("db", ["sqlalchemy"])):
        done = run_python(code.format(name=name))
        assert json.loads(done.stdout) == brings, name


def test_a_record_is_stored_when_add_returns(tmp_path: Path) -> None:
    with TuningDB(tmp_path / "tuning.db") as database:
        database.add(make.record())
        other = sqlite3.connect(tmp_path / "tuning.db")
        assert other.execute("SELECT median_us FROM best").fetchall() == [(100.0,)]
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_stale_records_are_asked_for_once(database: TuningDB) -> None:
    asked: list[Record] = []

    def today(record: Record) -> str:
        asked.append(record)
        return "other"

    with TuningDB("sqlite://", current_hash=today) as counted:
        counted.add_many([make.record(1.0 + n, work=make.workload(512 << n)) for n in range(5)])
        for _ in range(3):
            counted.ranked(make.workload(), make.H200)
    assert len(asked) == 1
