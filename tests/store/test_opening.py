"""Opening a database: made, upgraded, set aside, read-only, in memory; never lost, never guessed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import sample_records as make

from flashgen.errors import InvalidArgument, StoreError
from flashgen.settings import Settings
from flashgen.store import faults, opening, schema, upgrade
from flashgen.store.db import TuningDB
from flashgen.store.notices import StoreWarning

ROOT = Path(__file__).resolve().parents[2]
SCHEMA_2 = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade():
    op.add_column("targets", sa.Column("note", sa.Text))
"""


@pytest.fixture(autouse=True)
def no_unexpected_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one record."""
    with TuningDB(tmp_path / "tuning.db") as database:
        database.add(make.record())
    return tmp_path / "tuning.db"


def later(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str = SCHEMA_2) -> None:
    """Lets the code be of a later version, with one more migration."""
    copy = folder / "migrations"
    shutil.copytree(upgrade.MIGRATIONS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "versions" / "v0002_second.py").write_text(script)
    monkeypatch.setattr(upgrade, "MIGRATIONS", copy)
    for module in (schema, upgrade, opening):
        monkeypatch.setattr(module, "VERSION", "0002")


def columns(path: Path) -> list[str]:
    with sqlite3.connect(path) as client:
        return [row[1] for row in client.execute("PRAGMA table_info(targets)")]


# Made


@pytest.mark.parametrize(
    "name", ["plain.db", "with space.db", "50%.db", "a?b#c.db", "ünïcode.db", "deep/er/x.db"]
)
@pytest.mark.parametrize("form", ["path", "text", "url"])
def test_a_database_is_made_where_asked(tmp_path: Path, name: str, form: str) -> None:
    at = tmp_path / name
    if form == "url" and "?" in name:
        pytest.skip("a question mark begins a URL's query")
    with TuningDB({"path": at, "text": str(at), "url": f"sqlite:///{at}"}[form]) as database:
        assert database.add(make.record())
        assert (database.path, database.where, database.notice) == (at, str(at), "")
        assert database.persistent
    with TuningDB(at, readonly=True) as database:
        assert list(database.records()) == [make.record()]


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("raw", [b"\xff.db", b"f\xe4lle/\xfc.db"])
def test_a_name_need_not_be_utf8(tmp_path: Path, raw: bytes, readonly: bool) -> None:
    at = tmp_path / os.fsdecode(raw)
    try:
        at.parent.mkdir(exist_ok=True)
        at.touch()
    except OSError:
        pytest.skip("names must be UTF-8 here")
    at.unlink()
    with TuningDB(at) as database:
        assert database.add(make.record())
        assert database.path == at
    with TuningDB(str(at), readonly=readonly) as database:
        assert list(database.records()) == [make.record()]
    at.write_bytes(DAMAGED)
    told = "left as it is" if readonly else "was damaged; it is kept as"
    with pytest.warns(StoreWarning, match=told):
        TuningDB(at, readonly=readonly).close()


@pytest.mark.parametrize("name", ["tuning.db", "q?x.db", "p%41.db", "a#b.db", "sqlite:x.db"])
def test_the_setting_and_the_option_name_one_file(tmp_path: Path, name: str) -> None:
    asked = str(tmp_path / name)
    assert Settings(db=asked).db_url() == Settings(db="other.db").db_url(asked) == asked
    with TuningDB(Settings(db=asked).db_url()) as database:
        assert database.path == tmp_path / name
    url = "postgresql://user@host/name"
    assert Settings(db=url).db_url() == url
    for nothing in ("", " "):
        with pytest.raises(InvalidArgument, match=f"db='{nothing}' names no database; give a path or a URL"):
            Settings(db=asked).db_url(nothing)


def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    (tmp_path / "tuning.db").touch()
    with TuningDB(tmp_path / "tuning.db") as database:
        assert database.add(make.record())


def test_reading_makes_nothing(tmp_path: Path) -> None:
    with TuningDB(tmp_path / "none" / "tuning.db", readonly=True) as database:
        assert list(database.records()) == []
        assert database.ranked(make.workload(), make.H200) == ()
        assert not database.persistent
        with pytest.raises(StoreError, match="is open read-only, nothing can be added: it was opened so"):
            database.add(make.record())
    assert list(tmp_path.iterdir()) == []


def test_reading_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    with TuningDB(path, readonly=True) as database:
        assert list(database.records()) == [make.record()]
        with pytest.raises(StoreError, match="read-only"):
            database.add(make.record(5.0))
    assert path.read_bytes() == before


def test_one_database_is_open_for_reading_and_writing(path: Path) -> None:
    with TuningDB(path) as writer, TuningDB(path, readonly=True) as reader:
        writer.add(make.record(5.0))
        assert [record.median_us for record in reader.records()] == [100.0, 5.0]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://user:secret@host/name", "databases of 'mysql' are not served; write a path or sqlite:///"),
        ("sqlite+aiosqlite:///x.db", "databases of 'sqlite+aiosqlite' are not served"),
        ("postgresql://user@host:port/name", "is no database URL"),
        ("sqlite:////tmp/q?x.db", "'sqlite:////tmp/q?x.db' has a query, which no SQLite file has"),
        ("~nobody-of-that-name/x.db", "'~nobody-of-that-name/x.db' is no path"),
        ("a\0b.db", r"'a\x00b.db' is no path: no name has NUL"),
        ("folder\0/b.db", r"'folder\x00/b.db' is no path"),
        ("sqlite:///a\0b.db", r"'a\x00b.db' is no path"),
        ("\ud800.db", r"'\ud800.db' is no path"),
    ],
)
def test_an_odd_url_is_refused(url: str, reason: str) -> None:
    with pytest.raises(StoreError) as error:
        TuningDB(url)
    assert reason in str(error.value)
    assert "postgresql://user@host/name" in str(error.value)
    assert "secret" not in str(error.value)


def test_a_server_that_does_not_answer_is_an_error_without_the_password() -> None:
    with pytest.raises(StoreError) as error:
        TuningDB("postgresql://user:secret@127.0.0.1:9/name")
    if importlib.util.find_spec("psycopg"):
        assert "cannot open the record database postgresql+psycopg://user:***@127.0.0.1:9/name" in str(
            error.value
        )
    else:
        assert "install it: pip install 'psycopg[binary]'" in str(error.value)
    assert "secret" not in str(error.value)


# Older and newer


def test_an_older_database_is_upgraded_and_a_copy_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, tmp_path)
    with TuningDB(path) as database:
        assert database.version() == "0002"
        assert list(database.records()) == [make.record()]
        assert database.add(make.record(5.0))
    assert "note" in columns(path)
    (copy,) = tmp_path.glob("tuning.db.schema-0001-*Z")
    assert "note" not in columns(copy)
    monkeypatch.undo()
    with TuningDB(copy) as database:
        assert list(database.records()) == [make.record()]


def test_a_failed_upgrade_changes_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, tmp_path, SCHEMA_2 + '    op.execute("SELECT * FROM missing")\n')
    with pytest.raises(StoreError, match=r"cannot open the record database .*no such table: missing"):
        TuningDB(path)
    assert "note" not in columns(path)
    monkeypatch.undo()
    with TuningDB(path) as database:
        assert (database.version(), list(database.records())) == ("0001", [make.record()])


def test_no_upgrade_without_a_copy(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch, tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(opening, "_copy", full)
    with pytest.raises(StoreError, match=r"was left as it is: no copy could be made before its upgrade"):
        TuningDB(path)
    assert "note" not in columns(path)


def test_an_older_database_on_a_full_disk_is_read_from_a_copy(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, tmp_path)
    usual = opening._connect

    def full(at: Path | None, mode: str) -> sqlite3.Connection:
        connection = usual(at, mode)
        if at is not None and ".schema-" in at.name:
            connection.execute("PRAGMA max_page_count = 3")
        return connection

    monkeypatch.setattr(opening, "_connect", full)
    with pytest.warns(
        StoreWarning, match=r"cannot be written \(database or disk is full\); its records are read"
    ):
        database = TuningDB(path)
    assert (database.version(), database.readonly) == ("0002", True)
    assert list(database.records()) == [make.record()]
    assert [each.name for each in tmp_path.glob("*.schema-*")] == []
    assert "note" not in columns(path)


def test_an_older_database_is_read_without_changing_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, tmp_path)
    before = path.read_bytes()
    with (
        pytest.warns(StoreWarning, match="has an older schema; its records are read from a copy in memory"),
        TuningDB(path, readonly=True) as database,
    ):
        assert database.version() == "0002"
        assert list(database.records()) == [make.record()]
        with pytest.raises(StoreError, match="read-only"):
            database.add(make.record(5.0))
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
def test_a_newer_database_is_refused_naming_both_versions(path: Path, readonly: bool) -> None:
    with sqlite3.connect(path) as client:
        client.execute("UPDATE flashgen_schema SET version_num = '0042'")
    client.close()
    with pytest.raises(StoreError) as error:
        TuningDB(path, readonly=readonly)
    assert str(error.value) == (
        f"{path} has schema version 0042, of a newer FlashGen: this one knows versions up to 0001. "
        "It was left as it is. Upgrade FlashGen (pip install --upgrade flashgen), or choose another database "
        "with FLASHGEN_DB or --db"
    )
    with sqlite3.connect(path) as client:
        assert client.execute("SELECT count(*) FROM measurements").fetchone() == (1,)
    client.close()


@pytest.mark.parametrize("readonly", [False, True])
def test_a_database_of_something_else_is_left_alone(tmp_path: Path, readonly: bool) -> None:
    other = tmp_path / "notes.db"
    with sqlite3.connect(other) as client:
        client.execute("CREATE TABLE notes (text TEXT)")
        client.execute("INSERT INTO notes VALUES ('buy milk')")
    client.close()
    with pytest.raises(StoreError, match=r"is a database of something else \(it holds notes\)"):
        TuningDB(other, readonly=readonly)
    with sqlite3.connect(other) as client:
        assert client.execute("SELECT name FROM sqlite_master").fetchall() == [("notes",)]
    client.close()


@pytest.mark.parametrize("readonly", [False, True])
def test_nothing_of_it_is_changed(tmp_path: Path, readonly: bool) -> None:
    other = tmp_path / "notes.db"
    with sqlite3.connect(other) as client:
        client.execute("CREATE TABLE notes (text TEXT)")
    client.close()
    before = other.read_bytes()
    with pytest.raises(StoreError, match="is a database of something else"):
        TuningDB(other, readonly=readonly)
    assert other.read_bytes() == before, "not even its journal mode"


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("log", [None, b"", b"a log of my own"])
@pytest.mark.parametrize(
    "content", [b"x", b"buy milk", b"\0" * 4096, b"notes" * 2000, b"SQLite format 2\0" * 99]
)
def test_a_file_that_was_never_a_database_is_left_alone(
    tmp_path: Path, content: bytes, log: bytes | None, readonly: bool
) -> None:
    notes, link = tmp_path / "notes.txt", tmp_path / "link"
    files = {"notes.txt": content} | ({} if log is None else {"notes.txt-wal": log})
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    link.symlink_to(notes)
    for path in (notes, link):
        with pytest.raises(
            StoreError, match=r"notes.txt is no database: .* It was left as it is. Choose another"
        ):
            TuningDB(path, readonly=readonly)
    link.unlink()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == files


# Damaged. What could never have been a database is none that was damaged: a file begins as SQLite's do, or
# has the log of one beside it, as a process that died while it wrote leaves it.

DAMAGED = b"SQLite format 3\0" + b"\xff" * 5000
LOG = b"\x37\x7f\x06\x82" + b"\0" * 28


@pytest.mark.parametrize("content", [b"not a database at all" * 100, DAMAGED])
def test_a_damaged_file_is_set_aside_and_a_new_one_started(tmp_path: Path, content: bytes) -> None:
    at = tmp_path / "tuning.db"
    at.write_bytes(content)
    at.with_name("tuning.db-wal").write_bytes(LOG)
    with pytest.warns(StoreWarning, match="was damaged; it is kept as") as caught:
        database = TuningDB(at)
    assert len(caught) == 1
    assert database.add(make.record())
    database.close()
    kept = {each.name.partition("Z")[2]: each.read_bytes() for each in tmp_path.glob("tuning.db.damaged-*")}
    assert kept[""] == content
    assert set(kept) <= {"", "-wal", "-shm"}
    (aside,) = tmp_path.glob("tuning.db.damaged-*Z")
    assert f"sqlite3 '{aside}' .recover" in database.notice


def test_damage_twice_in_one_second_keeps_both(tmp_path: Path) -> None:
    at = tmp_path / "tuning.db"
    for content in (b"first", b"secon"):
        at.write_bytes(DAMAGED + content)
        with pytest.warns(StoreWarning, match="was damaged"):
            TuningDB(at).close()
        at.unlink()
    assert {each.read_bytes()[-5:] for each in tmp_path.glob("*damaged*")} == {b"first", b"secon"}


def test_a_damaged_file_opened_for_reading_stays(tmp_path: Path) -> None:
    at = tmp_path / "tuning.db"
    at.write_bytes(DAMAGED)
    with (
        pytest.warns(StoreWarning, match=r"is damaged and was left as it is"),
        TuningDB(at, readonly=True) as database,
    ):
        assert database.ranked(make.workload(), make.H200) == ()
    assert [each.name for each in tmp_path.iterdir()] == ["tuning.db"]


def test_a_file_another_process_set_aside_already_is_not_touched_again(path: Path) -> None:
    assert opening.set_aside(path) is None  # healthy
    held = opening.identity(path)
    path.rename(path.with_name("moved"))
    path.write_bytes(b"another file" * 100)
    assert opening.set_aside(path, held) is None
    assert path.exists()
    aside = opening.set_aside(path)
    assert aside is not None
    assert aside.read_bytes() == b"another file" * 100


def test_a_damaged_file_behind_a_link_is_set_aside_itself(tmp_path: Path) -> None:
    real, link = tmp_path / "data" / "real.db", tmp_path / "link.db"
    real.parent.mkdir()
    real.write_bytes(DAMAGED)
    link.symlink_to(real)
    with pytest.warns(StoreWarning, match="was damaged; it is kept as"), TuningDB(link) as database:
        assert database.add(make.record())
        assert (database.where, database.path) == (str(link), real)
    assert link.readlink() == real
    (aside,) = real.parent.glob("real.db.damaged-*Z")
    assert aside.read_bytes() == DAMAGED
    with TuningDB(real, readonly=True) as database:
        assert list(database.records()) == [make.record()]


# Not to be written


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("device", ["/dev/full", "/dev/null", "a link to itself"])
def test_what_is_no_file_keeps_nothing(tmp_path: Path, device: str, readonly: bool) -> None:
    if device == "a link to itself":
        device = str(tmp_path / "loop.db")
        Path(device).symlink_to(device)
    told = rf"{device} (is no regular file; give the path of a file|cannot be reached)"
    with pytest.warns(StoreWarning, match=told):
        database = TuningDB(device, readonly=readonly)
    assert (database.persistent, database.where) == (False, device)


def test_a_reader_that_fails_before_another_reads_leaves_no_notice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room_for_locks(_: Path) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(opening, "_reader", no_room_for_locks)
    with TuningDB(path, readonly=True) as database:
        assert (database.notice, list(database.records())) == ("", [make.record()])


def test_a_full_disk_is_named_whatever_sqlite_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    assert "it cannot be opened here" in str(faults.explained(error, "write to", str(path)))
    full = shutil.disk_usage(path)._replace(free=8192)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert "the disk is full; free some space" in str(faults.explained(error, "write to", str(path)))


def test_c34_a_folder_that_cannot_be_made_leaves_records_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(
        StoreWarning, match=r"cannot be made .*; records are kept in memory until this process ends"
    ) as caught:
        database = TuningDB(tmp_path / "file" / "folder" / "tuning.db")
        assert database.add(make.record())
        assert database.ranked(make.workload(), make.H200) == (make.record(),)
        TuningDB(tmp_path / "file" / "folder" / "tuning.db").close()
    assert len(caught) == 1
    assert not database.persistent
    assert not database.readonly


def test_c34_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    told = "is a folder; give the path of a file; records are kept in memory until this process ends"
    with pytest.warns(StoreWarning, match=told):
        database = TuningDB(tmp_path)
    assert database.add(make.record())


def test_c34_a_file_that_cannot_be_written_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = opening._connect

    def only_read(at: Path | None, mode: str) -> sqlite3.Connection:
        return usual(at, "mode=ro" if mode == "mode=rwc" else mode)

    monkeypatch.setattr(opening, "_connect", only_read)
    with pytest.warns(StoreWarning, match=r"cannot be written .*; it is opened read-only") as caught:
        database = TuningDB(path)
        assert list(database.records()) == [make.record()]
        assert database.ranked(make.workload(), make.H200) == (make.record(),)
        TuningDB(path).close()
    assert len(caught) == 1
    assert database.readonly
    with pytest.raises(StoreError, match=r"nothing can be added: the record database .* cannot be written"):
        database.add(make.record(5.0))


# The same with real permissions and mounts, which need root to set up.

as_root = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root to drop rights")
NOBODY = 65534
USE = """
import os, sys, sample_records as make
from flashgen.settings import SETTINGS
from flashgen.store import upgrade
from flashgen.store.db import TuningDB
url, user = SETTINGS.db_url(), int(sys.argv[1])
if user:
    TuningDB("sqlite://").close()  # loads all code: the interpreter itself may be root's alone
    os.setgroups([]); os.setgid(user); os.setuid(user)
    if not os.access(upgrade.MIGRATIONS, os.R_OK | os.X_OK):
        sys.exit(77)
with TuningDB(url) as db, TuningDB(url) as again:
    print(db.persistent, db.readonly, len(list(db.records())), len(again.ranked(make.workload(), make.H200)))
    if not db.readonly:
        print(db.add(make.record(5.0)), len(db.ranked(make.workload(), make.H200)))
"""


@pytest.fixture
def public(path: Path) -> Iterator[Path]:
    """The database in a folder that everybody can enter; pytest's own folders are private."""
    folder = Path(tempfile.mkdtemp(prefix="flashgen-"))
    folder.chmod(0o755)
    shutil.copy(path, folder / "tuning.db")
    yield folder / "tuning.db"
    folder.chmod(0o755)
    shutil.rmtree(folder)


def use(*before: str, user: int = 0, **environment: str) -> tuple[list[str], list[str]]:
    """Opens the database in a process of its own; lines of its output, and its warnings."""
    ours = ("XDG", "FLASHGEN", "HOME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [*before, sys.executable, "-B", "-c", USE, str(user)],
        capture_output=True,
        text=True,
        env={**kept, "PYTHONPATH": paths, **environment},
        cwd="/",
        timeout=60,
    )
    if done.returncode == 77:
        pytest.skip("other users cannot read this checkout")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), [line for line in done.stderr.splitlines() if "StoreWarning" in line]


@as_root
def test_c34_home_at_the_root_of_the_file_system() -> None:
    out, told = use(user=NOBODY, HOME="/")
    assert out == ["False False 0 0", "True 1"]
    assert len(told) == 1
    assert "records are kept in memory until this process ends" in told[0]


@as_root
@pytest.mark.parametrize(("folder", "file"), [(0o555, 0o444), (0o555, 0o666), (0o755, 0o444)])
def test_c34_a_database_of_another_user(public: Path, folder: int, file: int) -> None:
    public.chmod(file)
    public.parent.chmod(folder)
    out, told = use(user=NOBODY, FLASHGEN_DB=str(public))
    assert out == ["True True 1 1"]
    assert len(told) == 1
    assert "cannot be written" in told[0]
    assert "it is opened read-only" in told[0]


@as_root
def test_c34_what_another_user_is_writing_can_be_read(public: Path) -> None:
    with TuningDB(public) as writer:
        writer.add(make.record(7.0, conf=make.config(16)))
        public.parent.chmod(0o555)
        assert public.with_name("tuning.db-wal").stat().st_size > 0
        out, told = use(user=NOBODY, FLASHGEN_DB=str(public))
        assert out == ["True True 2 2"]
        assert len(told) == 1


@as_root
@pytest.mark.parametrize("left", [("-wal",), ("-wal", "-shm")])
def test_c34_what_a_killed_process_left_in_the_log_can_be_read(public: Path, left: tuple[str, ...]) -> None:
    other = public.with_name("other.db")
    with TuningDB(public) as writer:
        writer.add(make.record(7.0, conf=make.config(16)))
        for suffix in ("", *left):
            shutil.copy(f"{public}{suffix}", f"{other}{suffix}")
    public.parent.chmod(0o555)
    out, told = use(user=NOBODY, FLASHGEN_DB=str(other))
    assert out == ["True True 2 2"]
    assert len(told) == 1


def mounted(script: str) -> tuple[str, ...]:
    """A command that runs another in a mount namespace of its own, after `script`."""
    return ("unshare", "--mount", "sh", "-ec", f'{script}\nexec "$@"', "sh")


def may_mount() -> bool:
    probe = mounted("mount -t tmpfs none /mnt")
    return (
        bool(shutil.which("unshare"))
        and subprocess.run([*probe, "true"], capture_output=True).returncode == 0
    )


@pytest.fixture
def mounts() -> None:
    if not may_mount():
        pytest.skip("mounts are not allowed here")


@as_root
@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize("log", ["", "touch {f}-wal {f}-shm"])
def test_c34_a_read_only_mount(public: Path, log: str) -> None:
    prepare = f"""
    {log.format(f=public)}
    mount --bind {public.parent} {public.parent}
    mount -o remount,ro,bind {public.parent}
    """
    out, told = use(*mounted(prepare), FLASHGEN_DB=str(public))
    assert out == ["True True 1 1"]
    assert len(told) == 1


@as_root
@pytest.mark.usefixtures("mounts")
def test_a_database_on_a_full_disk_is_still_read(public: Path) -> None:
    prepare = f"""
    mount -t tmpfs -o size=1m none /mnt
    cp {public} /mnt/tuning.db
    dd if=/dev/zero of=/mnt/filler bs=4k 2>/dev/null || true
    """
    out, told = use(*mounted(prepare), FLASHGEN_DB="/mnt/tuning.db")
    assert out == ["True True 1 1"]
    assert len(told) == 1
    assert "cannot be written (the disk is full)" in told[0]


@as_root
@pytest.mark.usefixtures("mounts")
def test_a_new_database_on_a_full_disk_is_kept_in_memory() -> None:
    prepare = """
    mount -t tmpfs -o size=1m none /mnt
    dd if=/dev/zero of=/mnt/filler bs=4k 2>/dev/null || true
    """
    out, told = use(*mounted(prepare), FLASHGEN_DB="/mnt/tuning.db")
    assert out == ["False False 0 0", "True 1"]
    assert len(told) == 1
