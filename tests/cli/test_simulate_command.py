"""`flashgen simulate` for people and as JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashgen.cli.main import main
from flashgen.cli.output import USAGE
from flashgen.store import jsonl

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data" / "exhaustive"
FILES = [str(DATA / "d128_full_1024.jsonl"), str(DATA / "d64_causal_1024.jsonl")]


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *words], prog_name="flashgen")


def test_a_table_of_samplers_and_workloads() -> None:
    done = run(*FILES, "--sampler", "random", "--sampler", "tpe", "--seeds", "3", "--trials", "12")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("recorded on nvidia-h200 (")
    best = "d128 full bf16 b16h32kv8q1024k1024 368 368 m64n128w4s1_tma_heads 480.5 13.52%"
    assert best in lines
    (title,) = [line for line in lines if line.startswith("winner slower")]
    assert "of 3 runs)" in title and "without noise" in title
    rows = [line for line in lines if line.startswith(("random ", "tpe "))]
    assert [row.split("%")[0].rsplit(" ", 1)[0] for row in rows] == [
        f"{sampler} {workload}"
        for sampler in ("random", "tpe")
        for workload in (
            "d128 full bf16 b16h32kv8q1024k1024",
            "d64 causal bf16 b16h32kv8q1024k1024",
            "all",
        )
    ]
    assert all(row.count("%") == 4 and " of 3 12 " in row for row in rows if " all " not in row)
    assert all(" of 6 12 " in row for row in rows if " all " in row)
    assert "simulated 4/4  tpe  d64 causal bf16 b16h32kv8q1024k1024" in done.stderr


def test_json_and_the_defaults() -> None:
    done = run(FILES[1], "--sampler", "random", "--noise", "0.01", "--json")
    data = json.loads(done.stdout)
    alone, together = data["scores"]
    assert (data["seeds"], data["noise"], data["left_out"]) == (20, 0.01, {})
    assert (alone["of"], alone["trials"], alone["share"]) == (20, 38, 38 / 384)
    assert alone["workload"]["q_len"] == 1024 and together["workload"] is None
    assert alone["worst"] >= alone["p95"] >= alone["median"] >= 0


def test_a_winnerless_run_is_null_in_json_and_said_in_the_table(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Path(FILES[1]).read_text().splitlines()]
    best = min(rows, key=lambda row: row["measurement"]["median_us"])
    for row in rows:
        if row is not best:
            row["measurement"] |= {"status": "WRONG", "reason": "made so"}
    path = tmp_path / "wrong.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(path), "--sampler", "random", "--seeds", "1", "--trials", "2"]
    assert json.loads(run(*words, "--json").stdout)["scores"][0]["worst"] is None
    assert run(*words).stdout.count("no winner") == 7, "median, 95th, worst, twice; and the default"


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = Path(FILES[0]).read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "{}\n", "\n", "nonsense\n", *lines[3:]]))
    done = run(str(path))
    assert done.exit_code == USAGE
    assert f"line 4 of {path} is no record (1 more lines are none): " in done.stderr
    assert "flashgen db export" in done.stderr and "Traceback" not in done.output


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_records_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    done = run(FILES[0], str(path))
    assert done.exit_code == USAGE
    assert f"{path} holds no records" in done.stderr and "flashgen db export" in done.stderr


def test_part_of_a_space_is_refused_with_its_share(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    records = [line.record for line in jsonl.read(Path(FILES[1]))][:96]
    path.write_text("".join(f"{jsonl.format_line(record)}\n" for record in records if record))
    done = run(str(path), "--json")
    assert done.exit_code == USAGE
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "InvalidArgument" and error["message"].startswith("96 of 384 feasible configs")
    assert "25.0%" in error["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sampler", "luck"], "unknown sampler 'luck'"),
        (["--trials", "0"], "trials=0 must be at least 1"),
        (["--trials", "9", "--share", "0.5"], "leave out one"),
        (["--share", "2"], "share=2.0 must be"),
        (["--seeds", "0"], "seeds=0 must be at least 1"),
        (["--noise", "1"], "noise=1.0 must be"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_wrong_command_line(words: list[str], said: str) -> None:
    done = run(FILES[0], *words)
    assert done.exit_code == USAGE and said in done.stderr, done.output
    assert run(*words).exit_code == USAGE and run("nowhere.jsonl").exit_code == USAGE


def test_a_misspelt_sampler_is_told_before_anything_heavy_is_loaded() -> None:
    script = "import sys; from flashgen.cli.main import main\n"
    script += f"try: main(['simulate', {FILES[0]!r}, '--sampler', 'nope'])\n"
    script += "except SystemExit: print(*(name for name in ('torch', 'optuna') if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert "'nope'" in done.stderr and done.stdout == "\n"
