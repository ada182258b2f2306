"""How a record database is opened: what is made, upgraded, set aside, or done without.

The order for an SQLite file, each step taken when the one before cannot:

1. written to: the folder and the file are made, an older schema is upgraded;
2. a damaged file is renamed, with its log, and 1 is tried again on a fresh one;
3. read only: nothing can be added, lookups work;
4. in memory: nothing is kept.

Steps 2 to 4 warn once. A newer schema, a foreign database or file and a server that does not answer are
errors, because guessing would hide the user's records from him, or take away what is not FlashGen's.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool, StaticPool

from flashgen.errors import StoreError
from flashgen.store.faults import BUSY_SECONDS, DATABASE_ERRORS, Fault, explained, fault_at, fault_of
from flashgen.store.notices import warn_once
from flashgen.store.schema import VERSION, VERSION_TABLE
from flashgen.store.upgrade import upgrade, version_of

DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
"""URL schemes, and the SQLAlchemy driver of each."""

# SQLite's own settings, for a connection that writes.
PRAGMAS = (
    "PRAGMA foreign_keys = ON",
    # With a write-ahead log NORMAL is safe against crashes of the process, but a power cut may undo the last
    # commits. FULL adds one fsync (about 1 ms) to a record that took the GPU seconds to measure.
    "PRAGMA synchronous = FULL",
)

SQLITE, LOGS = b"SQLite format 3\0", (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
"""How an SQLite file begins, and its write-ahead log."""

UPGRADE_LOCK = 0x666C617368
"""PostgreSQL's advisory lock for making or upgrading the schema, which two processes must not do at once."""


@dataclass(frozen=True)
class Opened:
    """An open database, and what became of the one asked for."""

    engine: Engine
    where: str
    """The path or URL asked for, without password, for messages."""
    path: Path | None = None
    """The SQLite file in use; None in memory and on a server."""
    persistent: bool = True
    """Whether the records outlive this process: false in memory."""
    readonly: bool = False
    notice: str = ""
    """Why it is not simply the database asked for; empty if it is."""


def open_database(url: str | Path, readonly: bool = False) -> Opened:
    """Opens a database by path or URL, see the module's text.

    Args:
        url: a path, `sqlite:///path`, `sqlite://` (in memory) or `postgresql://user@host/name`.
        readonly: never make, upgrade or write anything.

    Raises:
        StoreError: the URL is no database's, the file is no database, the schema is newer or not FlashGen's,
            the server does not answer, or another process holds the file.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "postgresql":
        return _open_server(parsed, readonly)
    if not parsed.database or parsed.database == ":memory:":
        return _in_memory("memory", "", readonly)
    try:
        asked = Path(parsed.database).expanduser().absolute()
        os.fsencode(asked)
        if "\0" in parsed.database:
            raise ValueError("no name has NUL")
    except (RuntimeError, ValueError) as error:
        raise StoreError(f"{parsed.database!r} is no path: {error}; write {_ALLOWED}") from error
    return replace(_open_file(asked, readonly), where=str(asked))


def writing(engine: Engine) -> Connection:
    """A connection whose transactions take the write lock at their beginning.

    SQLite cannot wait for the lock once a transaction has read: it would fail with "database is locked".
    """
    return engine.connect().execution_options(flashgen_writes=True)


def set_aside(path: Path, opened: tuple[int, int] | None = None) -> Path | None:
    """Renames a damaged database, with its log files, and gives its new path.

    None if another process did it before: the file is then not the one that was `opened` (see `identity`),
    or no longer damaged.
    """
    if opened is not None and identity(path) != opened:
        return None
    try:
        with closing(_connect(path, "mode=ro")) as again:
            # The quick check passes over indexes, and reading by one that is damaged fails all the same.
            healthy = again.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    except sqlite3.Error as error:
        healthy = fault_of(error) is not Fault.DAMAGED
    if healthy:
        return None
    aside = _beside(path, f"damaged-{_now()}")
    # The log belongs to the file: under matching names `sqlite3 FILE .recover` still finds it.
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def identity(path: Path) -> tuple[int, int] | None:
    """Which file lies at a path, whatever it is called: device and inode."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _parse(url: str | Path) -> URL:
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(url))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise StoreError(f"{url!r} is no database URL: {error}; write a path or {_ALLOWED}") from error
    if parsed.drivername not in DRIVERS:
        raise StoreError(f"databases of {parsed.drivername!r} are not served; write a path or {_ALLOWED}")
    if DRIVERS[parsed.drivername] == "sqlite" and "?" in url:
        raise StoreError(f"{url!r} has a query, which no SQLite file has; write a plain path or {_ALLOWED}")
    return parsed.set(drivername=DRIVERS[parsed.drivername])


_ALLOWED = "sqlite:///folder/tuning.db or postgresql://user@host/name"


def _open_server(url: URL, readonly: bool) -> Opened:
    where = url.render_as_string(hide_password=True)
    try:
        # Pre-ping: a server's restart between two tunings must not cost a record.
        engine = create_engine(url, pool_pre_ping=True)
    except ImportError as error:
        raise StoreError(
            f"{where} needs the PostgreSQL driver ({error}); install it: "
            "pip install 'psycopg[binary]'; in a checkout of FlashGen pip install '.[postgres]' does the same"
        ) from error
    try:
        with engine.connect() as connection:
            version = version_of(connection, where)
        if version != VERSION:
            if readonly:
                raise StoreError(
                    f"{where} has schema version {version or 'none'}, not {VERSION}; upgrade it with: "
                    f"flashgen db upgrade --db {where}"
                )
            with engine.begin() as connection:
                connection.execute(text(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})"))
                if version_of(connection, where) != VERSION:
                    upgrade(connection)
    except DATABASE_ERRORS as error:
        raise explained(error, "open", where) from error
    return Opened(engine, where, readonly=readonly)


def _open_file(path: Path, readonly: bool) -> Opened:
    try:
        if not readonly:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _in_memory(str(path), f"the folder of the record database {path} cannot be made ({error})")
    # SQLite follows links too: a log, and what is set aside, lie beside the file itself.
    path = Path(os.path.realpath(path))
    if notice := _obstacle(path):
        return _in_memory(str(path), notice, readonly)
    # Before SQLite looks at it: a file of one byte it would take for an empty one, and write over it.
    if _foreign(path):
        raise StoreError(
            f"{path} is no database: it does not begin as SQLite's files do. It was left as it is. Choose "
            "another with FLASHGEN_DB or --db; if it was FlashGen's and is damaged, move it away"
        )
    if readonly:
        there = identity(path) is not None
        return _open_for_reading(path, "", asked=True) if there else _in_memory(str(path), "", True)
    for _ in range(3):  # a second process may damage or set aside the file again, but not for ever
        held = identity(path)
        engine = _file_engine(path, "mode=rwc")
        try:
            _make_current(engine, path)
            return _told(Opened(engine, str(path), path, notice=notice))
        except DATABASE_ERRORS as error:
            engine.dispose()
            fault = fault_of(error)
            if fault is Fault.DAMAGED:
                try:
                    aside = set_aside(path, held)
                except OSError as refused:
                    notice = f"the record database {path} is damaged, and cannot be renamed ({refused})"
                    return _in_memory(str(path), notice)
                if aside:
                    notice = damage_notice(path, aside)
                continue
            if fault in (Fault.BUSY, Fault.OTHER):
                raise explained(error, "open", str(path)) from error
            full = fault is not fault_at(error, path)
            reason = "the disk is full" if full else _said(error)
            return _open_for_reading(path, f"the record database {path} cannot be written ({reason})")
        except OSError as error:
            engine.dispose()
            raise StoreError(
                f"the record database {path} was left as it is: no copy could be made before its upgrade "
                f"({error}); free some space in its folder, or choose another with FLASHGEN_DB or --db"
            ) from error
    raise StoreError(f"the record database {path} is damaged again and again; check the disk it lies on")


def _obstacle(path: Path) -> str:
    """Why there cannot be a database at a path; empty where a file is, or nothing yet."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"the record database {path} cannot be reached ({error})"
    kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
    return "" if stat.S_ISREG(mode) else f"the record database {path} is {kind}; give the path of a file"


def _foreign(path: Path) -> bool:
    """Whether a file was never a database of FlashGen, so that a mistyped path takes away nobody's notes.

    One that begins otherwise than SQLite's files is ours only where the log of a process that was writing
    lies beside it: then its beginning was damaged, and the log may have what it was.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(len(SQLITE))
    except OSError:  # not there, or not to be read: SQLite says which
        return False
    if begins in (b"", SQLITE):
        return False
    try:
        with path.with_name(f"{path.name}-wal").open("rb") as log:
            return log.read(4) not in LOGS
    except OSError:
        return True


def damage_notice(path: Path, aside: Path) -> str:
    """What the user is told after `set_aside`."""
    return (
        f"the record database {path} was damaged; it is kept as {aside}, and a new one was started. "
        f"What can be saved of it: sqlite3 '{aside}' .recover"
    )


def _make_current(engine: Engine, path: Path) -> None:
    """Makes the schema, or upgrades an older one, or finds out that the file cannot be written."""
    with engine.connect() as connection:
        version_of(
            connection, str(path)
        )  # before anything is changed: it may be a database of something else
    _use_log(engine)
    with writing(engine) as connection, connection.begin() as transaction:
        version = version_of(connection, str(path))
        if version == VERSION:
            # Writes the same value and takes it back: only a write tells whether writing is possible.
            connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = version_num"))
            transaction.rollback()
            return
        if version:
            _copy(path, _beside(path, f"schema-{version}-{_now()}"))
        upgrade(connection)


def _use_log(engine: Engine) -> None:
    """Turns on the write-ahead log, which lets readers work beside the writer. The file remembers it.

    Where it cannot be (some network file systems) SQLite keeps its rollback journal: slower, as safe.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    with closing(engine.raw_connection()) as connection:
        cursor = connection.cursor()
        while cursor.execute("PRAGMA journal_mode").fetchone() == ("delete",):
            try:
                cursor.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                # This one statement does not wait for other processes by itself.
                if fault_of(error) is not Fault.BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def _open_for_reading(path: Path, notice: str, asked: bool = False) -> Opened:
    """Opens a file that must not (`asked`) or, for the reason in `notice`, cannot be written."""
    trouble = ""  # of one reader, which matters only where the other fails too
    for reader in (_reader, _lone_reader):
        engine = None
        try:
            engine = reader(path)
            with engine.connect() as connection:
                version = version_of(connection, str(path))
        except (*DATABASE_ERRORS, OSError) as error:
            if engine is not None:
                engine.dispose()
            if fault_of(error) is Fault.DAMAGED:
                trouble = f"the record database {path} is damaged and was left as it is ({_said(error)})"
                break
            trouble = trouble or f"the record database {path} cannot be read ({_said(error)})"
            continue
        if version == VERSION:
            told = notice and f"{notice}; it is opened read-only, and nothing is added to it"
            return _told(Opened(engine, str(path), path, readonly=True, notice=told))
        if version:
            copy = _copied_to_memory(engine)
            engine.dispose()
            with writing(copy) as connection, connection.begin():
                upgrade(connection)
            notice = notice or f"the record database {path} has an older schema"
            told = f"{notice}; its records are read from a copy in memory"
            return _told(Opened(copy, str(path), path, readonly=True, notice=told))
        engine.dispose()
        break
    return _in_memory(str(path), "; ".join(filter(None, (notice, trouble))), readonly=asked)


def _reader(path: Path) -> Engine:
    return _file_engine(path, "mode=ro")


def _lone_reader(path: Path) -> Engine:
    """For a folder where SQLite can neither place its locks nor replay a log that a dead process left there.

    Nobody writes in such a folder, so without a log the file may be read as it is; with one, it is a copy
    that the log is replayed into.
    """
    log = path.with_name(f"{path.name}-wal")
    if not log.exists() or not log.stat().st_size:
        return _file_engine(path, "mode=ro&immutable=1")
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        copy = Path(folder, path.name)
        shutil.copyfile(path, copy)
        shutil.copyfile(log, copy.with_name(log.name))
        engine = _file_engine(copy, "mode=rwc")
        try:
            return _copied_to_memory(engine)
        finally:
            engine.dispose()


def _copied_to_memory(source: Engine) -> Engine:
    engine = _memory_engine()
    with closing(engine.raw_connection()) as new, closing(source.raw_connection()) as old:
        assert isinstance(new.driver_connection, sqlite3.Connection)
        assert isinstance(old.driver_connection, sqlite3.Connection)
        old.driver_connection.backup(new.driver_connection)
    return engine


def _in_memory(where: str, notice: str, readonly: bool = False) -> Opened:
    engine = _memory_engine()
    with writing(engine) as connection, connection.begin():
        upgrade(connection)
    fate = "none of its records is used" if readonly else "records are kept in memory until this process ends"
    told = notice and f"{notice}; {fate}"
    return _told(Opened(engine, where, persistent=False, readonly=readonly, notice=told))


def _told(opened: Opened) -> Opened:
    if opened.notice:
        warn_once(opened.notice)
    return opened


def _file_engine(path: Path, mode: str) -> Engine:
    engine = create_engine("sqlite://", creator=lambda: _connect(path, mode), poolclass=QueuePool)
    if mode == "mode=rwc":
        event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin)
    return engine


def _memory_engine() -> Engine:
    engine = create_engine("sqlite://", creator=lambda: _connect(None, "mode=memory"), poolclass=StaticPool)
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin)
    return engine


def _set_pragmas(connection: Any, _: Any) -> None:
    for pragma in PRAGMAS:
        connection.execute(pragma)


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("flashgen_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _copy(source: Path, copy: Path) -> None:
    """Copies a database as of its last commit, whatever others do meanwhile."""
    try:
        with closing(_connect(source, "mode=ro")) as old, closing(_connect(copy, "mode=rwc")) as new:
            old.backup(new)
    except BaseException:
        copy.unlink(missing_ok=True)  # half a copy would only mislead
        raise


def _connect(path: Path | None, mode: str) -> sqlite3.Connection:
    # isolation_level=None: transactions begin where SQLAlchemy says, not where sqlite3 guesses.
    # As bytes: a name need not be UTF-8.
    uri = f"file:{quote(os.fsencode(path or ''))}?{mode}"
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None
    )
    connection.text_factory = _text
    return connection


def _text(raw: bytes) -> str | bytes:
    """A text as SQLite has it. One that is damaged stays bytes: its row is no record, the others are."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _beside(path: Path, ending: str) -> Path:
    """A path beside another that is not taken."""
    names = (f"{path.name}.{ending}{again}" for again in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(each for each in map(path.with_name, names) if not each.exists())


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def _said(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error)
