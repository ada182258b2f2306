"""What a database error means for the user, and what to do about it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import suppress
from enum import Enum
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from flashgen.errors import StoreError

BUSY_SECONDS = 60
"""How long a writer waits for others. A write takes milliseconds; only a process that hangs holds a
lock longer."""

ROOM = 64 * 1024
"""Bytes of disk without which SQLite cannot even open a database for writing."""

DATABASE_ERRORS = (DBAPIError, sqlite3.Error)
"""What the database layer raises; errors of a new connection's first statements come as sqlite3's own."""


class Fault(Enum):
    """Kinds of database errors; the value is the advice."""

    FULL = (
        "the disk is full; free some space there and run the same again. "
        "Everything stored before is kept, only this write is missing"
    )
    DAMAGED = (
        "the file is damaged; `sqlite3 FILE .recover` prints what can be saved of it; the next tuning keeps "
        "it under another name and starts a new one"
    )
    READONLY = (
        "it cannot be written here; make the file and its folder writable, "
        "or choose another database with FLASHGEN_DB or --db"
    )
    UNOPENABLE = (
        "it cannot be opened here; check the path, the folder's permissions and the disk, "
        "or choose another database with FLASHGEN_DB or --db"
    )
    BUSY = f"another process has held it for {BUSY_SECONDS} s; end that process, or wait and try again"
    OTHER = "see the database's own message above; `flashgen db check` examines the file"


# Pieces of the messages, which SQLite has kept unchanged for decades; error codes on sqlite3's exceptions
# exist from Python 3.11 only. The last two are PostgreSQL's.
MESSAGES = {
    "database or disk is full": Fault.FULL,
    "file is not a database": Fault.DAMAGED,
    "database disk image is malformed": Fault.DAMAGED,
    "malformed database schema": Fault.DAMAGED,
    "attempt to write a readonly database": Fault.READONLY,
    "unable to open database file": Fault.UNOPENABLE,
    "disk i/o error": Fault.UNOPENABLE,
    "database is locked": Fault.BUSY,
    "database table is locked": Fault.BUSY,
    "no space left on device": Fault.FULL,
    "in a read-only transaction": Fault.READONLY,
}


def fault_of(error: BaseException) -> Fault:
    """The kind of a database error, by its message."""
    text = str(error).lower()
    return next((fault for piece, fault in MESSAGES.items() if piece in text), Fault.OTHER)


def fault_at(error: BaseException, where: str | Path) -> Fault:
    """As `fault_of`, for a database in a file: SQLite gives a full disk the name of a broken one.

    It needs room for its shared memory (32 KB) and says "disk I/O error" where there is none.
    """
    fault = fault_of(error)
    if fault is Fault.UNOPENABLE:
        with suppress(OSError):
            if shutil.disk_usage(Path(where).parent).free < ROOM:
                return Fault.FULL
    return fault


def explained(error: BaseException, action: str, where: str) -> StoreError:
    """The error for the user: what was tried, where, what the database said, and what to do."""
    original = getattr(error, "orig", None) or error
    return StoreError(
        f"cannot {action} the record database {where}: {original}: {fault_at(error, where).value}"
    )
