"""`flashgen db`: each subcommand, for people and as JSON."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_records as make
from click.testing import CliRunner, Result

from flashgen.cli.db import db
from flashgen.spec.record import Measurement, Record, Status
from flashgen.spec.target import find_target
from flashgen.store import jsonl
from flashgen.store.db import TuningDB
from flashgen.store.today import current_hash

DAMAGED = b"SQLite format 3\0" + b"garbage" * 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database: one record of today, one stale, one failure, one of another GPU."""
    todays = current_hash(make.record())
    assert todays is not None
    with TuningDB(tmp_path / "tuning.db") as database:
        database.add_many(
            [
                make.record(60.0, hash=todays),
                make.record(50.0, conf=make.config(stages=3), hash="0" * 16),
                make.record(status=Status.CRASH, conf=make.config(stages=4), hash="0" * 16),
                make.record(70.0, target=find_target("nvidia-a100"), hash="0" * 16),
            ]
        )
    return tmp_path / "tuning.db"


def run(*arguments: object, input: str | None = None) -> Result:
    return CliRunner().invoke(db, [str(each) for each in arguments], input=input)


def as_json(*arguments: object, code: int = 0) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", list(db.commands))
def test_every_subcommand_has_help_examples_and_json(name: str) -> None:
    done = run(name, "--help")
    assert done.exit_code == 0
    assert "Examples:\n" in done.output
    assert f"  flashgen db {name}" in done.output
    assert "--json" in done.output
    assert "--db PATH|URL" in done.output


def test_export_to_the_output_is_lines_of_records(path: Path) -> None:
    done = run("export", "--db", path)
    records = [jsonl.parse_line(line) for line in done.stdout.splitlines()]
    assert sorted(record.median_us for record in records) == [50.0, 60.0, 70.0, float("inf")]


@pytest.mark.parametrize(
    ("options", "times"),
    [
        (("--target", "nvidia-a100"), [70.0]),
        (("--status", "OK"), [50.0, 60.0, 70.0]),
        (("--status", "CRASH"), [float("inf")]),
        (("--family", "attention_bwd"), []),
        (("--best",), [50.0, 70.0]),
        (("--best", "--target", "nvidia-h200"), [50.0]),
    ],
)
def test_export_is_filtered(path: Path, options: tuple[str, ...], times: list[float]) -> None:
    done = run("export", "--db", path, *options)
    assert sorted(jsonl.parse_line(line).median_us for line in done.stdout.splitlines()) == times


def test_export_to_a_file_and_to_a_tree(path: Path, tmp_path: Path) -> None:
    out, tree = tmp_path / "out.jsonl", tmp_path / "tree"
    assert as_json("export", "--db", path, "--out", out) == {"records": 4, "files": {str(out): 4}}
    assert as_json("export", "--db", path, "--tree", tree) == {
        "records": 4,
        "files": {str(tree / "nvidia-a100" / "fwd.jsonl"): 1, str(tree / "nvidia-h200" / "fwd.jsonl"): 3},
    }
    assert run("export", "--db", path, "--out", out).output == f"     4 records  {out}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "x", "--tree", "y"), "--out is a file and --tree a folder: leave out one of them"),
        (("--json",), "--json reports what was written: add --out FILE or --tree FOLDER"),
        (("--target", "nvidia-h300"), "unknown target 'nvidia-h300'; known: nvidia-a10"),
        (("--status", "FINE"), "'FINE' is not one of 'OK', 'SLOW'"),
    ],
)
def test_a_wrong_export_says_what_is_allowed(path: Path, options: tuple[str, ...], message: str) -> None:
    done = run("export", "--db", path, *options)
    assert done.exit_code == 2
    assert message in done.stderr


def test_exporting_what_does_not_exist_makes_no_empty_file(tmp_path: Path) -> None:
    done = run("export", "--db", tmp_path / "none.db", "--out", tmp_path / "out.jsonl")
    assert done.exit_code == 1
    assert f"there are no records to export: {tmp_path / 'none.db'} does not exist" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_import_reports_each_file(path: Path, tmp_path: Path) -> None:
    lines = run("export", "--db", path).stdout
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(lines)
    bad.write_text(lines.splitlines()[0] + "\nnonsense\n")
    new = tmp_path / "new.db"
    assert as_json("import", "--db", new, good) == {
        "database": str(new),
        "files": {str(good): {"added": 4, "skipped": 0, "bad": []}},
    }
    report = as_json("import", "--db", new, good, bad, code=1)["files"]
    assert report[str(good)] == {"added": 0, "skipped": 4, "bad": []}
    assert report[str(bad)]["skipped"] == 1
    assert report[str(bad)]["bad"][0]["line"] == 2
    done = run("import", "--db", new, bad)
    assert done.output.startswith(f"{bad}: 0 added, 1 were there already, 1 bad\n  line 2: not a record: ")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("sqlite://", "memory is no file"),
        (":memory:", "memory is no file"),
        ("/proc/x/y.db", "cannot be made"),
        ("/dev/full", "is no regular file"),
        ("{folder}", "is a folder"),
        ("{folder}/dangling", "cannot be written"),
    ],
)
def test_what_keeps_nothing_is_not_written_to(path: Path, tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "tuning.db")
    place = place.format(folder=tmp_path)
    (tmp_path / "records.jsonl").write_text(run("export", "--db", path).stdout)
    for words in (("import", tmp_path / "records.jsonl"), ("upgrade",)):
        done = run(*words, "--db", place)
        assert done.exit_code == 1, done.output
        assert "nothing would be kept: " in done.stderr
        assert why in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize("name", list(db.commands))
def test_an_empty_database_is_no_database(path: Path, name: str) -> None:
    done = run(name, *([path] if name == "import" else []), "--db", "")
    assert done.exit_code == 2
    assert "db='' names no database" in done.stderr


def test_check_does_not_call_a_damaged_database_absent(tmp_path: Path) -> None:
    (tmp_path / "tuning.db").write_bytes(DAMAGED)
    done = run("check", "--db", tmp_path / "tuning.db")
    assert done.exit_code == 1
    assert "no database here" not in done.output
    assert f"{tmp_path / 'tuning.db'}: schema unreadable" in done.output
    assert "is damaged and was left as it is" in done.output
    assert as_json("check", "--db", tmp_path, code=1)["exists"]


def test_import_takes_only_times_it_can_compare(path: Path, tmp_path: Path) -> None:
    (line, *_) = run("export", "--db", path).stdout.splitlines()
    data = json.loads(line)
    for time in ("yesterday", "", "2026-13-01T00:00:00Z", "2026-11-29T12:00:00+09:00", "2026-11-29"):
        (tmp_path / "odd.jsonl").write_text(json.dumps(data | {"created_at": time}))
        (bad,) = as_json("import", "--db", path, tmp_path / "odd.jsonl", code=1)["files"].values()
        assert "created_at must not be" in bad["bad"][0]["problem"]
        assert "allowed: a time in UTC by ISO 8601" in bad["bad"][0]["problem"]


def test_import_from_the_input(path: Path, tmp_path: Path) -> None:
    lines = run("export", "--db", path).stdout
    done = CliRunner().invoke(db, ["import", "--db", str(tmp_path / "new.db"), "-"], input=lines)
    assert done.output.splitlines()[0] == "-: 4 added, 0 were there already, 0 bad"


def test_check_counts_by_gpu_spec_and_status(path: Path) -> None:
    data = as_json("check", "--db", path)
    spec = make.CAUSAL.key
    h200, a100 = make.H200.key, find_target("nvidia-a100").key
    assert data["counts"] == [
        {"gpu": gpu, "target": target, "spec": spec, "status": status, "records": records, "stale": 1}
        for gpu, target, status, records in (
            ("nvidia-a100", a100, "OK", 1),
            (make.H200.name, h200, "CRASH", 1),
            (make.H200.name, h200, "OK", 2),
        )
    ]
    assert f" nvidia-a100   {spec}   OK " in run("check", "--db", path).stdout
    assert (data["database"], data["exists"], data["schema"], data["problems"]) == (
        str(path),
        True,
        "0001",
        [],
    )
    assert (data["records"], data["stale"]) == (4, 3)
    assert set(data["shipped"]) == {"records", "stale"}
    text = run("check", "--db", path).output
    assert f"{path}: schema 0001" in text
    assert "4 records, 3 stale" in text
    assert text.endswith("healthy\n")


@pytest.mark.parametrize("place", ["none.db", "nope/none.db"])
def test_check_of_no_database_makes_none(tmp_path: Path, place: str) -> None:
    data = as_json("check", "--db", tmp_path / place, code=1)
    assert (data["exists"], data["records"], data["problems"]) == (False, 0, [])
    text = run("check", "--db", tmp_path / place).output
    assert f"{tmp_path / place}: no database here; the first tuning makes it\n" in text
    assert "healthy" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["none.db", "nope/none.db"])
@pytest.mark.parametrize("command", ["export", "revalidate"])
@pytest.mark.parametrize("gpus", [0, 1])
def test_what_reads_no_database_says_so(
    tmp_path: Path, command: str, place: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.build.device.device_count", lambda: gpus)
    monkeypatch.setattr("flashgen.build.device.live_target", lambda index: make.H200)
    done = run(command, "--db", tmp_path / place)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"{tmp_path / place} does not exist; the first tuning makes the database" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_check_of_a_damaged_database_says_so_and_leaves_it(path: Path) -> None:
    path.write_bytes(DAMAGED)
    data = as_json("check", "--db", path, code=1)
    assert data["problems"] == [
        f"the record database {path} is damaged and was left as it is (file is not a database); none of its "
        "records is used"
    ]
    done = run("check", "--db", path)
    assert done.exit_code == 1
    assert path.read_bytes() == DAMAGED


@pytest.mark.parametrize("command", ["check", "export", "import -", "revalidate", "upgrade"])
def test_a_file_that_is_no_database_is_refused_and_left(tmp_path: Path, command: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    done = run(*command.split(), "--db", tmp_path / "notes.txt", input="")
    assert done.exit_code == 1
    assert f"{tmp_path / 'notes.txt'} is no database" in str(done.exception) + done.stderr
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("notes.txt", "x")]


def test_check_names_rows_that_are_no_records(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE measurements SET status = 'FLAKY' WHERE id = 2")
    connection.close()
    data = as_json("check", "--db", path, code=1)
    assert data["records"] == 3
    (told,) = data["problems"]
    assert told.startswith("row 2 of measurements cannot be read: unknown status 'FLAKY'; known: CRASH")


def test_check_of_a_newer_database_names_both_versions(path: Path) -> None:
    with TuningDB(path) as database, database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE flashgen_schema SET version_num = '0042'")
    done = run("check", "--db", path)
    assert done.exit_code == 1
    assert "has schema version 0042, of a newer FlashGen: this one knows versions up to 0001" in done.stderr


def test_upgrade_makes_the_database(tmp_path: Path) -> None:
    at = tmp_path / "new" / "tuning.db"
    assert as_json("upgrade", "--db", at) == {"database": str(at), "schema": "0001", "notice": ""}
    assert at.exists()


def test_warnings_are_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "tuning.db").write_bytes(DAMAGED)
    done = run("upgrade", "--db", tmp_path / "tuning.db")
    assert done.exit_code == 0
    assert done.stderr.startswith(
        f"warning: the record database {tmp_path / 'tuning.db'} was damaged; it is kept"
    )


def test_revalidate_without_a_gpu_lists_what_is_stale(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.build.device.device_count", lambda: 0)
    done = run("revalidate", "--db", path)
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0].startswith("no GPU here: nothing was measured; run this on a machine with the GPU")
    spec = make.CAUSAL.key
    assert lines[1:] == [
        f"stale   {spec} b4h32kv8q4096k4096 m128n64w4s3_pointer_heads 50.0 us  on {make.H200.describe()}",
        f"stale   {spec} b4h32kv8q4096k4096 m128n64w4s2_pointer_heads 70.0 us  "
        f"on {find_target('nvidia-a100').describe()}",
        "0 measured again, 2 stale, 0 gone",
    ]
    data = as_json("revalidate", "--db", path, code=1)
    assert (data["gpu"], data["renewed"], len(data["left"])) == (None, [], 2)


def test_revalidate_measures_the_records_of_this_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remeasure(record: Record) -> Record:
        return replace(
            record, measurement=Measurement(Status.OK, 55.5), kernel_hash=current_hash(record) or ""
        )

    @contextmanager
    def remeasurer(index: int, records: tuple[Record, ...]) -> Iterator[Any]:
        assert index == 0 and [record.target for record in records] == [make.H200]
        yield remeasure

    monkeypatch.setattr("flashgen.build.device.device_count", lambda: 1)
    monkeypatch.setattr("flashgen.build.device.live_target", lambda index: make.H200)
    monkeypatch.setattr("flashgen.api.remeasurer", remeasurer, raising=False)
    done = run("revalidate", "--db", path)
    assert done.exit_code == 0
    assert "m128n64w4s3_pointer_heads 50.0 us -> 55.5 us" in done.output
    assert done.output.endswith("1 measured again, 1 stale, 0 gone\n")
    with TuningDB(path, current_hash=current_hash) as database:
        found = database.ranked(make.workload(), make.H200)
        assert [(r.median_us, database.stale(r)) for r in found] == [(55.5, False), (60.0, False)]
    assert as_json("revalidate", "--db", path, code=1)["renewed"] == []


def test_check_of_a_database_damaged_inside_says_so_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningDB(path) as database:
        database.add_many(make.many(20, 10))
    content = path.read_bytes()
    spoilt = content[:8192] + b"\xa5" * (len(content) - 8192)
    path.write_bytes(spoilt)
    data = as_json("check", "--db", path, code=1)
    assert data["exists"]
    assert data["problems"]
    assert (data["records"], data["schema"]) == (0, "")
    assert run("check", "--db", path).exit_code == 1
    assert path.read_bytes() == spoilt
