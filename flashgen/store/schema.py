"""The tables of the record database, as the newest migration leaves them.

`migrations/versions/` is what makes a database; this page is what the code queries. A test holds the two and
`tuning_db/schema.sql` together.
"""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

VERSION = "0001"
"""The newest migration. Kept here too, so that opening a database of today's version imports no Alembic."""

VERSION_TABLE = "flashgen_schema"
"""Alembic's version table under a name of our own, which also marks a database as FlashGen's."""

metadata = MetaData()


class Real(TypeDecorator[float]):
    """A float that may be NaN, as the error of a wrong kernel is.

    SQLite stores NaN as NULL, which would read as "not measured", so it is stored as text there.
    """

    impl = Double
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Any:
        # Not process_bind_param, after which Double would turn the text into a number again.
        return _nan_as_text if dialect.name == "sqlite" else super().bind_processor(dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        try:
            return None if value is None else float(value)
        except ValueError:
            return value  # type: ignore[no-any-return]  # SQLite holds anything; whoever reads the row says so


def _nan_as_text(value: float | None) -> float | str | None:
    return "nan" if value is not None and math.isnan(value) else value


# The integer SQLite counts rows by has this very type name; elsewhere 64 bits must be asked for.
RowId = BigInteger().with_variant(Integer(), "sqlite")

targets = Table(
    "targets",
    metadata,
    # Facts only, so one card is one row whatever it was called; see measurements.target_name.
    Column("key", Text, primary_key=True),
    Column("vendor", Text, nullable=False),
    Column("arch", BigInteger, nullable=False),
    Column("sm_count", BigInteger, nullable=False),
    Column("shared_per_block", BigInteger, nullable=False),
    Column("l2_mib", BigInteger, nullable=False),
    Column("bandwidth", BigInteger, nullable=False),
)

kernels = Table(
    "kernels",
    metadata,
    Column("id", Text, primary_key=True),  # digest of the other columns
    Column("hash", Text, nullable=False),  # of the rendered source's syntax tree
    Column("family", Text, nullable=False),
    Column("op", Text, nullable=False),
    Column("spec", Text, nullable=False),  # AttentionSpec.key
    Column("config", Text, nullable=False),  # Config.name
    Column("admission", Text, nullable=False),
    Column("spec_json", Text, nullable=False),
    Column("config_json", Text, nullable=False),
    Index("kernels_by_spec", "spec"),
)

measurements = Table(
    "measurements",
    metadata,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("digest", Text, nullable=False),  # of all a record says but when, and how the card was called
    Column("target", Text, ForeignKey("targets.key"), nullable=False),
    Column("target_name", Text, nullable=False),
    Column("kernel", Text, ForeignKey("kernels.id"), nullable=False),
    Column("bucket", Text, nullable=False),
    Column("batch_code", Integer, nullable=False),
    Column("q_code", Integer, nullable=False),
    Column("k_code", Integer, nullable=False),
    Column("batch", BigInteger, nullable=False),
    Column("heads", BigInteger, nullable=False),
    Column("kv_heads", BigInteger, nullable=False),
    Column("q_len", BigInteger, nullable=False),
    Column("k_len", BigInteger, nullable=False),
    Column("params_json", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("median_us", Real),
    Column("min_us", Real),
    Column("max_us", Real),
    Column("passes", BigInteger, nullable=False),
    Column("max_error", Real),
    Column("registers", BigInteger),
    Column("spill_bytes", BigInteger),
    Column("shared_bytes", BigInteger),
    Column("density", Text, nullable=False),
    Column("flashgen", Text, nullable=False),
    Column("triton", Text, nullable=False),
    Column("torch", Text, nullable=False),
    Column("driver", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    UniqueConstraint("digest", name="measurements_once"),
    Index("measurements_by_kernel", "kernel", "target"),
)
