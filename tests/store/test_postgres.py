"""TuningDB on a PostgreSQL server, where FLASHGEN_TEST_POSTGRES is the URL of an empty database.

FLASHGEN_TEST_POSTGRES=postgresql://user@127.0.0.1:5432/scratch python -m pytest tests/store/test_postgres.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sample_records as make
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from flashgen.errors import StoreError
from flashgen.spec.record import Measurement, Status, rank
from flashgen.store import schema
from flashgen.store.db import TuningDB
from flashgen.store.notices import StoreWarning

URL = os.environ.get("FLASHGEN_TEST_POSTGRES", "")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not URL, reason="FLASHGEN_TEST_POSTGRES is not set")

WRITER = """
import sys, sample_records as make
from flashgen.store.db import TuningDB
with TuningDB(sys.argv[1]) as db:
    for trial in range(20):
        db.add(make.record(1 + int(sys.argv[2]) + trial / 1024))
        db.add(make.record(0.5 + trial))
"""


@pytest.fixture
def url() -> Iterator[str]:
    """The database, empty again after the test."""
    yield URL
    from sqlalchemy import create_engine

    engine = create_engine(URL.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()


def test_records_come_back_as_they_were(url: str) -> None:
    wrong = replace(
        make.record(), measurement=Measurement(Status.WRONG, max_error=float("inf"), reason="ünïcode \\ '")
    )
    records = [make.full(), make.record(), wrong, *make.many(10, 20)]
    with TuningDB(url) as database:
        assert database.add_many(records) == 203
        assert database.add_many(records) == 0
        assert list(database.records()) == records
        assert database.version() == schema.VERSION
        assert database.problems() == []
        assert database.where.startswith("postgresql+psycopg://")
    with TuningDB(url, readonly=True) as database:
        work = records[100].workload
        alike = [each for each in records if each.workload.spec == work.spec]
        assert database.ranked(work, make.H200) == rank(alike, work)
        best = {(each.workload, each.admission): each for each in database.best()}
        assert best[work, "any"] == next(each for each in rank(alike, work) if each.admission == "any")
        with pytest.raises(StoreError, match="read-only"):
            database.add(make.record(3.0))


def test_an_error_that_is_no_number_comes_back(url: str) -> None:
    wrong = Measurement(Status.WRONG, max_error=float("nan"), reason="output left unwritten")
    with TuningDB(url) as database:
        database.add(replace(make.record(), measurement=wrong))
        (found,) = database.records()
        assert str(found.measurement.max_error) == "nan"


def test_the_tables_are_those_in_code(url: str) -> None:
    with TuningDB(url) as database, database.engine.connect() as connection:
        options = {"version_table": schema.VERSION_TABLE, "compare_type": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata) == []


def test_c24_writers_start_together_and_lose_nothing(url: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, url, str(number)],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for process in writers:
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 0
    with TuningDB(url) as database:
        assert len(list(database.records())) == 4 * 20 + 20


def test_a_newer_database_is_refused(url: str) -> None:
    with TuningDB(url) as database, database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE flashgen_schema SET version_num = '0042'")
    with pytest.raises(StoreError, match="has schema version 0042, of a newer FlashGen"):
        TuningDB(url)


def test_reading_an_empty_database_says_how_to_make_it(url: str) -> None:
    with pytest.raises(
        StoreError, match="has schema version none, not 0001; upgrade it with: flashgen db upgrade"
    ):
        TuningDB(url, readonly=True)


def test_a_lost_server_is_an_explained_error_and_calls_are_answered(url: str) -> None:
    with TuningDB(url) as database:
        database.add(make.record())
        with database.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE measurements RENAME TO gone")
        with pytest.raises(StoreError, match="cannot write to the record database"):
            database.add(make.record(5.0))
        with pytest.warns(StoreWarning, match="its records are not used"):
            assert database.ranked(make.workload(), make.H200) == ()
