"""Run by Alembic; `store/upgrade.py` passes a connection in a transaction, or for SQL text a dialect."""

from alembic import context

from flashgen.store.schema import VERSION_TABLE, metadata

given = context.config.attributes
if "connection" in given:
    context.configure(given["connection"], target_metadata=metadata, version_table=VERSION_TABLE)
else:
    context.configure(dialect_name=given["dialect"], version_table=VERSION_TABLE)

with context.begin_transaction():
    context.run_migrations()
