"""Export and import: the same bytes for the same records, nothing twice, all or nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import sample_records as make

from flashgen.errors import InvalidArgument, StoreError
from flashgen.spec.record import Status
from flashgen.spec.target import find_target
from flashgen.store import jsonl, transfer
from flashgen.store.db import TuningDB


def text_of(database: TuningDB) -> str:
    out = StringIO()
    transfer.export_records(database.records(), out)
    return out.getvalue()


def test_the_order_of_a_file_depends_on_its_records_alone() -> None:
    records = [*make.many(6, 20), make.full(), make.record(status=Status.WRONG)]
    texts = set()
    for seed in range(3):
        shuffled = random.Random(seed).sample(records, len(records))
        with TuningDB("sqlite://") as database:
            database.add_many(shuffled)
            texts.add(text_of(database))
    (text,) = texts
    assert text.count("\n") == len(records)
    assert text == "".join(f"{jsonl.format_line(record)}\n" for record in transfer.ordered(records))


def test_export_and_import_bring_back_every_record(tmp_path: Path) -> None:
    records = [*make.many(3, 20), make.full(), make.record(status=Status.CRASH)]
    with TuningDB("sqlite://") as first, TuningDB("sqlite://") as second:
        first.add_many(records)
        assert transfer.export_file(first.records(), tmp_path / "deep" / "records.jsonl") == 62
        report = transfer.import_records(second, tmp_path / "deep" / "records.jsonl")
        assert (report.added, report.skipped, report.bad) == (62, 0, ())
        assert text_of(second) == text_of(first)
        again = transfer.import_records(second, tmp_path / "deep" / "records.jsonl")
        assert again.to_json() == {"added": 0, "skipped": 62, "bad": []}
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["records.jsonl"]


def test_bad_lines_are_reported_by_number_and_good_ones_added() -> None:
    lines = [jsonl.format_line(make.record(1.0)), "", "{}", jsonl.format_line(make.record(1.0)), "[1"]
    with TuningDB("sqlite://") as database:
        report = transfer.import_records(database, StringIO("\n".join(lines)))
        assert (report.added, report.skipped) == (1, 1)
        assert [line for line, _ in report.bad] == [3, 5]
        assert report.bad[0][1] == "record.admission is missing"


def test_an_import_that_fails_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    transfer.export_file(make.many(40, 50), path)
    with TuningDB(tmp_path / "tuning.db") as database:
        with database.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 20}")
        with pytest.raises(StoreError, match="the disk is full"):
            transfer.import_records(database, path)
        assert list(database.records()) == []


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with TuningDB("sqlite://") as database:
        with pytest.raises(StoreError, match=r"cannot read .*missing\.jsonl"):
            transfer.import_records(database, tmp_path / "missing.jsonl")
        with pytest.raises(StoreError, match=r"cannot write .*; choose another file or folder"):
            transfer.export_file([make.record()], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_records_of_files_are_all_there_or_refused(tmp_path: Path) -> None:
    records = [make.record(float(time)) for time in range(50, 53)]
    one, two, bad = (tmp_path / name for name in ("one", "two", "bad"))
    transfer.export_file(records[1:], one)
    transfer.export_file(records[:1], two)
    assert transfer.read_records([two, one]) == records
    bad.write_text(f"{one.read_text()}{{}}\nnonsense\n")
    with pytest.raises(InvalidArgument, match=r"line 3 of .*bad is no record \(1 more lines are none\): "):
        transfer.read_records([one, bad])
    bad.write_text("\n")
    with pytest.raises(InvalidArgument, match=r"bad holds no records; `flashgen db export"):
        transfer.read_records([one, bad])
    with pytest.raises(StoreError, match=r"cannot read .*missing"):
        transfer.read_records([tmp_path / "missing"])


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    transfer.export_file([make.record()], path)
    before = path.read_text()

    def broken():
        yield make.record(5.0)
        raise StoreError("the database went away")

    with pytest.raises(StoreError, match="went away"):
        transfer.export_file(broken(), path)
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_tree_has_a_folder_for_each_gpu(tmp_path: Path) -> None:
    oem = replace(make.H200, sm_count=100, name="NVIDIA H200/NVL (OEM)")
    renamed = replace(make.H200, name="some other label")
    records = [
        make.record(1.0),
        make.record(2.0, target=find_target("nvidia-a100")),
        make.record(3.0, target=oem),
        make.record(4.0, target=renamed),
        make.record(5.0, target=replace(oem, sm_count=90, name="../..")),
    ]
    written = transfer.export_tree(records, tmp_path)
    assert {str(path.relative_to(tmp_path)): lines for path, lines in written.items()} == {
        "nvidia-a100/fwd.jsonl": 1,
        "nvidia-h200/fwd.jsonl": 2,
        "nvidia-h200-nvl-oem/fwd.jsonl": 1,
        "cuda-sm90-90sm-227k-l2.60m-bw49/fwd.jsonl": 1,
    }
