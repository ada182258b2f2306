"""Shipped records: read-only text, tolerant of bad lines, and all of those in the repository good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import sample_records as make

from flashgen.settings import data_folder
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.target import find_target
from flashgen.store import jsonl
from flashgen.store.notices import StoreWarning
from flashgen.store.shipped import ShippedRecords, shipped_folder
from flashgen.store.transfer import export_tree, ordered, target_label

ROOT = Path(__file__).resolve().parents[2]


def test_the_folder_is_found_beside_the_package() -> None:
    assert shipped_folder() == data_folder("tuning_db") / "records"
    assert ShippedRecords().folder == shipped_folder()


def test_every_shipped_line_is_a_record_in_order_and_in_its_place() -> None:
    for path in sorted(shipped_folder().glob("*/*.jsonl")):
        lines = list(jsonl.read(path))
        assert [(line.number, line.problem) for line in lines if line.record is None] == [], path
        records = [line.record for line in lines if line.record]
        assert path.read_text() == "".join(f"{jsonl.format_line(record)}\n" for record in ordered(records)), (
            path
        )
        for record in records:
            assert path.parent.name == target_label(record.target), path
            assert path.stem == record.workload.spec.op, path


def test_no_folder_holds_no_records(tmp_path: Path) -> None:
    shipped = ShippedRecords(tmp_path / "missing")
    assert shipped.ranked(make.workload(), make.H200) == ()
    assert list(shipped.records()) == []


def test_only_the_files_of_the_gpu_and_op_asked_for_are_read(tmp_path: Path) -> None:
    export_tree([make.record(1.0), make.record(2.0, target=find_target("nvidia-a100"))], tmp_path)
    (tmp_path / "nvidia-h200" / "bwd.jsonl").write_text("this file is never read\n")
    with (tmp_path / "nvidia-a100" / "fwd.jsonl").open("a") as file:
        file.write("nor is this line\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ShippedRecords(tmp_path).ranked(make.workload(), make.H200)
    assert [record.median_us for record in found] == [1.0]


def test_a_bad_line_is_passed_over_with_one_warning_that_names_it(tmp_path: Path) -> None:
    export_tree([make.record(1.0), make.record(2.0, conf=make.config(16))], tmp_path)
    path = tmp_path / "nvidia-h200" / "fwd.jsonl"
    alien = jsonl.format_line(make.record(3.0, target=find_target("nvidia-a100")))
    path.write_text(f"{{}}\n{path.read_text()}{alien}\n")
    with pytest.warns(StoreWarning) as caught:
        for _ in range(2):
            found = ShippedRecords(tmp_path).ranked(make.workload(), make.H200)
            assert [record.median_us for record in found] == [1.0, 2.0]
    assert [str(each.message) for each in caught] == [
        f"{path}:1 is passed over: record.admission is missing",
        f"{path}:4 is passed over: a record of nvidia-a100 (cuda-sm80-108sm-163k-l2.40m-bw44)",
    ]


def test_a_record_is_checked_when_its_spec_is_asked_for(tmp_path: Path) -> None:
    other = make.workload(spec=AttentionSpec(64, 64, "bf16"))
    export_tree([make.record(1.0), make.record(2.0, work=other)], tmp_path)
    path = tmp_path / "nvidia-h200" / "fwd.jsonl"
    path.write_text(path.read_text().replace('"median_us": 2.0', '"median_us": "fast"'))
    shipped = ShippedRecords(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [record.median_us for record in shipped.ranked(make.workload(), make.H200)] == [1.0]
    with pytest.warns(StoreWarning, match="is passed over: record.measurement.median_us must not be 'fast'"):
        assert shipped.ranked(other, make.H200) == ()
    assert [record.median_us for record in shipped.records()] == [1.0]


def test_records_of_other_gpus_are_hints(tmp_path: Path) -> None:
    names = ("nvidia-a100", "nvidia-h100", "nvidia-h200")
    export_tree(
        [make.record(float(1 + i), target=find_target(name)) for i, name in enumerate(names)], tmp_path
    )
    hints = ShippedRecords(tmp_path).hints(make.workload(), make.H200)
    assert [record.target.name for record in hints] == ["nvidia-h100", "nvidia-a100"]
    found = [record.target.name for record in ShippedRecords(tmp_path).records()]
    assert found == ["nvidia-a100", "nvidia-h100", "nvidia-h200"]


def test_looking_up_needs_no_database_and_no_compiler(tmp_path: Path) -> None:
    export_tree([make.record()], tmp_path)
    code = (
        "import sys, json, sample_records as make\n"
        "from pathlib import Path\n"
        "from flashgen.store.shipped import ShippedRecords\n"
        "found = ShippedRecords(Path(sys.argv[1])).ranked(make.workload(), make.H200)\n"
        "heavy = {'torch', 'triton', 'optuna', 'jinja2', 'alembic', 'sqlalchemy', 'platformdirs'}\n"
        "print(json.dumps([len(found), sorted(heavy & set(sys.modules))]))"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=60,
    )
    assert json.loads(done.stdout) == [1, []]
