"""Alembic's environment and the versions of the schema.

To add one: copy the newest file of `versions/` under the next number, change what it does, then `VERSION` and
the tables in `store/schema.py`; the tests say what is left.
"""
