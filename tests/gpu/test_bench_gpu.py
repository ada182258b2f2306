"""`flashgen bench` on a GPU: every peer that is installed gets a row, and all rows are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashgen.cli.bench import SHAPE, TOTALS
from flashgen.cli.main import main

TILES = ("tile", "tiles")
MEASURED = ("impl", "family", "run", "ms_median", "ms_min", "ms_max", "passes", "tflops", "max_error")


def test_rows_of_one_shape(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = [
        "bench",
        "--head-dim",
        "64",
        "--heads",
        "8",
        "--kv-heads",
        "2",
        "--seq",
        "1024",
        "--mask",
        "causal",
    ]
    done = CliRunner().invoke(main, [*words, "--out", str(out), "--json"], prog_name="flashgen")
    assert done.exit_code == 0, done.output
    data = json.loads(out.read_text())
    assert set(data) == {"header", "rows"}
    assert set(data["header"]) == {"gpu", "driver", "versions", "command", "date"}
    rows = {row["impl"]: row for row in data["rows"]}
    assert {"flashgen", "fa2", "flex"} <= set(rows), json.loads(done.stdout)["left_out"]
    assert rows["flashgen"]["family"] == "attention_fwd"
    assert len({row["run"] for row in data["rows"]}) == 1
    for row in data["rows"]:
        assert set(row) == {*SHAPE, *MEASURED, *(TILES if row["impl"] == "flashgen" else ())}
        assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        assert row["passes"] == 3 and row["tflops"] > 1 and row["max_error"] < 0.02


def test_rows_of_packed_sequences(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    sizes = ["--head-dim", "64", "--heads", "8", "--kv-heads", "2", "--seq", "1024", "--varlen", "5000"]
    words = ["bench", *sizes, "--mask", "causal", "--mask", "sliding_window(200, 0)", "--mask", "full"]
    done = CliRunner().invoke(main, [*words, "--out", str(out), "--json"], prog_name="flashgen")
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    left_out = json.loads(done.stdout)["left_out"]
    for mask in ("causal", "sliding_window(200, 0)", "full"):
        impls = {row["impl"]: row for row in rows if row["mask"] == mask}
        assert {"flashgen", "fa2", "flex"} <= set(impls), left_out
        assert impls["flashgen"]["family"].startswith("attention_fwd")
    for row in rows:
        assert set(row) == {*SHAPE, *TOTALS, *MEASURED}
        assert row["total_q"] == row["total_k"] == 5000 and row["batch"] == 10
        assert row["tflops"] > 1 and row["max_error"] < 0.02
    assert all("takes no packed sequences" in each["cudnn"] for each in left_out)


@pytest.mark.timeout(400)  # FlexAttention compiles once for each row
def test_rows_of_masks_and_score_rules(tmp_path: Path) -> None:
    """What no window says, beside FlexAttention and beside full attention with as many tiles."""
    out = tmp_path / "bench.json"
    kinds = {
        "document": ["--documents", "5"],
        "causal & document": ["--documents", "5"],
        'causal & document("ordered")': ["--documents", "5"],
        "prefix_lm": [],
        "neighborhood((32, 32), (7, 7))": [],
        "causal": ["--score", "alibi"],
        "sliding_window(255, 0)": ["--score", "softcap(50.0)"],
        "sliding_window(127, 0)": ["--sinks", "bf16"],
    }
    for mask, more in kinds.items():
        sizes = ["--head-dim", "64", "--heads", "8", "--kv-heads", "2", "--seq", "1024", "--batch", "1"]
        words = ["bench", *sizes, "--mask", mask, *more, "--impls", "flashgen,flashgen-full,fa2,flex"]
        done = CliRunner().invoke(main, [*words, "--out", str(out), "--json"], prog_name="flashgen")
        assert done.exit_code == 0, done.output
        data = json.loads(out.read_text())
        rows, left_out = {row["impl"]: row for row in data["rows"]}, json.loads(done.stdout)["left_out"]
        assert {"flashgen", "flashgen-full", "flex"} <= set(rows), left_out
        assert ("fa2" in rows) == ("document" in mask), left_out
        ours, whole = rows["flashgen"], rows["flashgen-full"]
        assert ours["family"].startswith("attention_fwd") and 0.1 < ours["speed_per_tile"] < 3
        assert 0 < ours["tiles"] <= 1024 / int(ours["tile"].split("x")[1]) and whole["tiles"] >= 1
        assert all(row["max_error"] < 0.02 for row in rows.values())
        assert ours.get("sinks", "") == ("bf16" if "--sinks" in more else "")
        assert "documents" not in " ".join(more) or ours["density"].startswith("5 documents")


def test_a_shape_that_does_not_fit_costs_only_its_rows(tmp_path: Path) -> None:
    words = ["bench", "--head-dim", "64", "--heads", "8", "--batch", "1000000", "--seq", "4096"]
    done = CliRunner().invoke(main, [*words, "--impls", "flashgen,fa2", "--json"], prog_name="flashgen")
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert data["rows"] == []
    assert "OUT_OF_MEMORY" in data["left_out"][0]["flashgen"]
