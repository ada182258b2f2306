"""The migrations, the tables in code, `tuning_db/schema.sql` and both databases' dialects say the same."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
import sample_records as make
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, select
from sqlalchemy.dialects import postgresql, sqlite

from flashgen.settings import data_folder
from flashgen.spec.record import Status, rank
from flashgen.store import db, schema, upgrade
from flashgen.store.db import TuningDB


def words(text: str) -> list[str]:
    return text.split()


def test_schema_sql_is_what_the_migrations_add_up_to() -> None:
    shipped = (data_folder("tuning_db") / "schema.sql").read_text()
    assert words(shipped) == words(upgrade.schema_text()), (
        "python -m flashgen.store.upgrade > tuning_db/schema.sql"
    )


def test_the_tables_in_code_are_those_of_the_migrations() -> None:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        upgrade.upgrade(connection)
        options = {"version_table": schema.VERSION_TABLE, "compare_type": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata) == []


def test_version_is_the_newest_migration() -> None:
    assert upgrade.known_versions()[-1] == schema.VERSION
    assert list(upgrade.known_versions()) == sorted(upgrade.known_versions())


def test_postgresql_gets_the_same_tables_and_views() -> None:
    ddl = upgrade.as_sql("postgresql")
    for kind, names in (
        ("TABLE", {"flashgen_schema", "targets", "kernels", "measurements"}),
        ("VIEW", {"records", "verdicts", "best"}),
        ("INDEX", {"kernels_by_spec", "measurements_by_kernel"}),
    ):
        assert set(re.findall(rf"CREATE {kind} (\w+)", ddl)) == names
    assert "median_us DOUBLE PRECISION" in ddl
    assert "id BIGSERIAL NOT NULL" in ddl


def test_queries_compile_for_postgresql() -> None:
    query = db._where(make.H200, "spec", "family", Status.OK, "measured").order_by(schema.measurements.c.id)
    text = str(query.compile(dialect=postgresql.dialect()))
    assert "JOIN kernels ON kernels.id = measurements.kernel" in text
    for module in (sqlite, postgresql):
        insert = module.insert(schema.targets).on_conflict_do_nothing()
        assert str(insert.compile(dialect=module.dialect())).endswith("ON CONFLICT DO NOTHING")


def test_a_plain_client_can_read_the_database(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        database.add_many(
            [
                make.record(90.0),
                make.record(80.0, conf=make.config(stages=3)),
                make.record(status=Status.CRASH, conf=make.config(stages=4)),
            ]
        )
    client = sqlite3.connect(path)
    best = client.execute("SELECT target_name, spec, bucket, config, median_us FROM best").fetchall()
    assert best == [
        (
            "nvidia-h200",
            "fwd d128 bf16 dense mask[q_pos >= k_idx]",
            "b4 h32 kv8 q4096 k4096",
            "m128n64w4s3_pointer_heads",
            80.0,
        )
    ]
    failed = client.execute("SELECT config, status, reason FROM records WHERE status <> 'OK'").fetchall()
    assert failed == [("m128n64w4s4_pointer_heads", "CRASH", "CRASH for a test")]


def test_the_view_and_the_code_agree_on_the_best() -> None:
    work = [make.workload(512), make.workload(4096)]
    records = [
        make.record(50.0, conf=make.config(stages=1), work=work[0]),
        make.record(55.0, conf=make.config(stages=2), work=work[0]),
        make.record(99.0, conf=make.config(stages=1), work=work[0], created_at="2026-12-01T00:00:00Z"),
        make.record(20.0, conf=make.config(stages=3), work=work[0]),
        make.record(status=Status.WRONG, conf=make.config(stages=3), work=work[1]),
        make.record(70.0, conf=make.config(stages=4), work=work[1]),
        make.record(
            status=Status.CRASH, conf=make.config(stages=4), work=work[1], created_at="2026-12-01T00:00:00Z"
        ),
        make.record(80.0, conf=make.config(32), work=work[1]),
        make.record(10.0, conf=make.config(64), work=work[1], source="model"),
        make.record(85.0, conf=make.config(16, loads="tma"), work=work[1]),
        make.record(95.0, conf=make.config(32, loads="tma"), work=work[1]),
    ]
    with TuningDB("sqlite://") as database:
        database.add_many(records)
        best = list(database.best())
    assert [(r.workload.q_len, r.admission, r.median_us) for r in best] == [
        (512, "any", 55.0),
        (4096, "any", 80.0),
        (4096, "tma", 85.0),
    ]
    for record in best:
        alike = [r for r in records if r.admission == record.admission]
        assert rank(alike, record.workload)[0] == record


def test_a_best_query_uses_the_indexes(tmp_path: Path) -> None:
    with TuningDB(tmp_path / "tuning.db") as database:
        database.add_many(make.many(20, 10))
        query = "EXPLAIN QUERY PLAN SELECT * FROM best WHERE target = ? AND spec = ?"
        with database.engine.connect() as connection:
            plan = [row[3] for row in connection.exec_driver_sql(query, (make.H200.key, "x")).fetchall()]
    assert any("kernels_by_spec (spec=?)" in step for step in plan)
    assert any("measurements_by_kernel (kernel=? AND target=?)" in step for step in plan)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.1, 5, None])
def test_every_float_comes_back(value: float | None) -> None:
    engine = create_engine("sqlite://")
    schema.targets.create(engine)
    schema.kernels.create(engine)
    schema.measurements.create(engine)
    column = schema.measurements.c.max_error
    with engine.begin() as connection:
        row = {
            c.name: 0 if c.type.python_type is int else "" for c in schema.measurements.c if not c.nullable
        }
        connection.execute(schema.measurements.insert(), [{**row, "max_error": value}])
        found = connection.execute(select(column)).scalar()
    assert repr(found) == repr(None if value is None else float(value))
