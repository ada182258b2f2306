"""Which version of the schema a database has, and how it comes to today's. Alembic is imported late."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, inspect, text

from flashgen.errors import StoreError
from flashgen.store.schema import VERSION, VERSION_TABLE

MIGRATIONS = Path(__file__).resolve().parent / "migrations"


def version_of(connection: Connection, where: str) -> str:
    """The schema's version, or empty text for a database without any table.

    Raises:
        StoreError: the tables are not FlashGen's, or of a newer FlashGen.
    """
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        if tables:
            raise StoreError(
                f"{where} is a database of something else (it holds {', '.join(sorted(tables)[:5])}); it was "
                "left as it is. Choose another with FLASHGEN_DB or --db"
            )
        return ""
    version = str(connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar() or "")
    if version and version != VERSION and version not in known_versions():
        raise StoreError(
            f"{where} has schema version {version}, of a newer FlashGen: this one knows versions up to "
            f"{VERSION}. It was left as it is. Upgrade FlashGen (pip install --upgrade flashgen), or choose "
            "another database with FLASHGEN_DB or --db"
        )
    return version


def upgrade(connection: Connection, to: str = "head") -> None:
    """Brings the schema to a version, inside the connection's open transaction."""
    from alembic import command

    command.upgrade(_config(connection=connection), to)


def known_versions() -> tuple[str, ...]:
    """All versions of the schema, oldest first."""
    from alembic.script import ScriptDirectory

    revisions = ScriptDirectory.from_config(_config()).walk_revisions()
    return tuple(reversed([revision.revision for revision in revisions]))


def as_sql(dialect: str) -> str:
    """The statements that make an empty database of today's version, for `sqlite` or `postgresql`."""
    from alembic import command

    out = io.StringIO()
    command.upgrade(_config(out, dialect=dialect), "head", sql=True)
    return out.getvalue()


def schema_text() -> str:
    """Tables, indexes and views of today's version as SQLite keeps them: `tuning_db/schema.sql`."""
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        upgrade(connection)
        made = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type = 'view', rowid"
        statements = [str(row[0]) for row in connection.execute(text(made))]
    head = (
        f"-- The record database, schema version {VERSION}: the sum of the migrations in flashgen/store.\n"
        "-- Made by: python -m flashgen.store.upgrade > tuning_db/schema.sql\n\n"
    )
    lines = "\n\n".join(f"{statement};" for statement in statements).splitlines()
    return head + "\n".join(line.rstrip() for line in lines) + "\n"


def _config(output: io.StringIO | None = None, **attributes: Any) -> Any:
    from alembic.config import Config

    config = Config(output_buffer=output, attributes=attributes)
    # A percent sign would start an interpolation.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    return config


if __name__ == "__main__":
    print(schema_text(), end="")
