"""The parts of `flashgen bench` that need no GPU: what is counted, the file, the table, the check."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.build.inputs import Inputs
from flashgen.cli import bench
from flashgen.cli.options import Selection
from flashgen.cli.output import console
from flashgen.errors import InvalidArgument
from flashgen.measure import child
from flashgen.measure.child import Failure
from flashgen.runtime.explain import Explanation
from flashgen.spec.attention import FULL, Workload
from flashgen.spec.record import Status

RESULTS = Path(__file__).parent.parent.parent / "benchmarks"
SMALL = Selection(head_dim=64, heads=4, kv_heads=2, batch=2, seq=(128,), mask=("causal",)).workloads()[0]


def row(impl: str, run: str = "r1", ms: float = 1.0, **shape: Any) -> dict[str, Any]:
    measured = {
        "ms_median": ms,
        "ms_min": ms,
        "ms_max": ms,
        "passes": 3,
        "tflops": 2.0 / ms,
        "max_error": 0.0,
    }
    return bench.shape_of(SMALL) | shape | {"impl": impl, "family": "", "run": run} | measured


def test_causal_flops_are_of_the_visible_pairs() -> None:
    pairs = 2 * 4 * 128 * 129 / 2
    assert bench.rate(SMALL, 10.0)["tflops"] == pytest.approx(pairs * 4 * 64 / 10.0 / 1e6, rel=1e-6)


def test_one_query_is_rated_by_the_keys_and_values_it_reads() -> None:
    options = Selection(head_dim=128, heads=32, kv_heads=8, batch=4, q_len=1, k_len=8192, mask=("causal",))
    assert bench.rate(options.workloads()[0], 100.0) == {
        "tbps": pytest.approx(4 * 8 * 8192 * (128 + 128) * 2 / 100.0 / 1e6)
    }


def test_a_row_says_what_was_computed() -> None:
    options = Selection(
        head_dim=96, head_dim_v=64, seq=(256,), mask=("sliding_window(7, 0)",), score="softcap(5.0)"
    )
    (workload,) = options.workloads()
    assert bench.shape_of(workload) == {
        "op": "fwd",
        "dtype": "bf16",
        "head_dim": 96,
        "head_dim_v": 64,
        "mask": "sliding_window(7, 0)",
        "score": "softcap(5.0)",
        "addressing": "dense",
        "batch": 64,
        "heads": 32,
        "kv_heads": 32,
        "q_len": 256,
        "k_len": 256,
    }
    assert tuple(bench.shape_of(workload)) == bench.SHAPE


def test_implementations_are_checked_before_they_are_timed() -> None:
    """On CPU tensors: torch's flash backend and FlashGen run, the rest says why not."""
    launches, families, errors, left_out, _ = bench.ready(SMALL, "cpu", ["flashgen", "fa2", "cudnn", "fa4"])
    assert list(launches) == ["flashgen", "fa2"]
    assert families["fa2"] == "" and families["flashgen"] == "torch"
    assert launches["fa2"]().shape == (2, 4, 128, 64)
    assert 0 < errors["fa2"] < 0.02 and 0 < errors["flashgen"] < 0.02
    assert set(left_out) == {"cudnn", "fa4"}
    assert "not installed" in left_out["fa4"]


def test_backward_passes_are_compared() -> None:
    """Each of its own forward pass; what is computed, counted and judged are dq, dk and dv."""
    gradients = replace(SMALL, spec=SMALL.spec.backward())
    assert Selection(head_dim=64, heads=4, kv_heads=2, batch=2, seq=(128,), mask=("causal",), backward=True)
    assert bench.shape_of(gradients)["op"] == "bwd"
    assert bench.rate(gradients, 1.0)["tflops"] == pytest.approx(2.5 * bench.rate(SMALL, 1.0)["tflops"])
    launches, families, errors, left_out, _ = bench.ready(gradients, "cpu", ["flashgen", "fa2", "cudnn"])
    assert list(launches) == ["flashgen", "fa2"] and set(left_out) == {"cudnn"}
    assert families == {"flashgen": "torch", "fa2": ""}
    assert [each.shape for each in launches["fa2"]()] == [(2, 4, 128, 64), (2, 2, 128, 64), (2, 2, 128, 64)]
    assert all(0 < error < 0.05 for error in errors.values())


def test_backward_names_the_gradients_of_what_is_named() -> None:
    named = {"head_dim": 64, "seq": (128,), "mask": ("causal",)}
    forward, backward = Selection(**named), Selection(**named, backward=True)
    assert [w.spec for w in backward.workloads()] == [w.spec.backward() for w in forward.workloads()]
    assert backward.words == f"{forward.words} --backward"
    assert {w.spec.op for w in Selection(suite=("llama3-8b",), backward=True).workloads()} == {"bwd"}
    assert not Selection(backward=True)
    (packed,) = Selection(**named, varlen=1000, backward=True).workloads()
    assert packed.spec.op == "bwd" and packed.spec.packed


def test_backward_passes_of_packed_sequences_are_compared() -> None:
    (work,) = Selection(head_dim=32, heads=2, kv_heads=1, seq=(64,), varlen=150, backward=True).workloads()
    launches, families, errors, left_out, _ = bench.ready(work, "cpu", ["flashgen", "fa2"])
    assert list(launches) == ["flashgen"] and families == {"flashgen": "torch"} and set(left_out) == {"fa2"}
    assert [each.shape for each in launches["flashgen"]()] == [
        (1, 2, 150, 32),
        (1, 1, 150, 32),
        (1, 1, 150, 32),
    ]
    assert 0 < errors["flashgen"] < 0.05


def test_8_bit_inputs_are_compared_with_their_values_in_16_bits() -> None:
    narrow = replace(SMALL, spec=replace(SMALL.spec, dtype="e4m3"))
    launches, families, _, left_out, _ = bench.ready(narrow, "cpu", ["flashgen", bench.WIDENED, "fa2"])
    assert list(launches) == ["flashgen", bench.WIDENED, "fa2"] and not left_out
    assert families == {"flashgen": "torch", bench.WIDENED: "torch", "fa2": ""}
    _, _, _, left_out, _ = bench.ready(SMALL, "cpu", [bench.WIDENED])
    assert "is for 8-bit inputs" in left_out[bench.WIDENED]


def test_packed_sequences_have_rows_of_their_own() -> None:
    """Their tokens are part of what was computed, and rows from before packed sequences are still read."""
    few, many = (
        replace(SMALL, spec=replace(SMALL.spec, addressing="varlen"), batch=3, total_q=total, total_k=total)
        for total in (150, 300)
    )
    assert tuple(bench.shape_of(few)) == (*bench.SHAPE, *bench.TOTALS)
    assert bench.identity(bench.shape_of(few)) != bench.identity(bench.shape_of(many))
    assert set(bench.identity(bench.shape_of(SMALL))[len(bench.SHAPE) :]) == {None}
    launches, families, errors, left_out, _ = bench.ready(few, "cpu", ["flashgen", "cudnn", "fa4"])
    assert list(launches) == ["flashgen"] and families == {"flashgen": "torch"}
    assert launches["flashgen"]().shape == (1, 4, 150, 64) and 0 < errors["flashgen"] < 0.02
    assert "takes no packed sequences" in left_out["cudnn"] and "not installed" in left_out["fa4"]


def test_ours_takes_the_sinks_and_peers_without_any_say_so() -> None:
    sunk = replace(SMALL, spec=replace(SMALL.spec, sinks="bf16"))
    launches, _, errors, left_out, _ = bench.ready(sunk, "cpu", ["flashgen", "fa2"])
    assert list(launches) == ["flashgen"] and 0 < errors["flashgen"] < 0.02
    assert left_out == {"fa2": "FlashAttention-2 in torch has no sinks"}


def test_a_row_says_which_sinks_and_how_tensors_were_drawn() -> None:
    (plain,) = Selection(head_dim=64, seq=(128,), mask=("causal & document",)).workloads()
    assert bench.shape_of(plain)["density"] == "documents of lengths uniform in [k/16, k/4]"
    few, many = (replace(plain, documents=count, spec=replace(plain.spec, sinks="bf16")) for count in (4, 32))
    row = bench.shape_of(few)
    assert tuple(row) == (*bench.SHAPE, *bench.OTHERS) and row["mask"] == "causal & document"
    assert (row["sinks"], row["density"]) == ("bf16", "4 documents, cut at places drawn evenly")
    assert len({bench.identity(bench.shape_of(each)) for each in (plain, few, many)}) == 3


HOPPER = Explanation("", "", "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic", (), "attention_fwd_sm90")
"""Tiles of 128 x 128."""
WINDOWED = Selection(
    head_dim=64, heads=4, batch=1, seq=(1024,), mask=("sliding_window(255, 0)",), score="softcap(9.0)"
).workloads()[0]
COLUMNS = [1, 2, 3, 3, 3, 3, 3, 3]
"""Blocks of 128 keys that 128 queries of a window of 256 visit."""


def test_the_tiles_of_a_kernel_are_counted() -> None:
    visits = bench._visits(WINDOWED, HOPPER)
    assert visits == bench.Visits(WINDOWED, 128, 128, sum(COLUMNS) / 8)
    assert visits.columns() == {"tile": "128x128", "tiles": 2.625} and visits.keys == 2.625 * 128
    assert bench._visits(WINDOWED, replace(HOPPER, family="torch")) is None


def test_speed_per_tile_is_beside_full_attention_with_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = bench._ours

    def on_hopper(workload: Workload, inputs: Inputs) -> Any:
        launch, _, _ = ours(workload, inputs)
        return launch, HOPPER.family, bench._visits(workload, HOPPER)

    monkeypatch.setattr(bench, "_ours", on_hopper)
    opposed = bench.ready(WINDOWED, "cpu", ["flashgen", bench.WHOLE])
    whole = opposed.visits[bench.WHOLE].workload
    assert (whole.k_len, whole.q_len, whole.params) == (3 * 128, 1024, ())
    assert whole.spec == replace(WINDOWED.spec, mask=FULL, score_mod=None)
    assert opposed.launches[bench.WHOLE]().shape == (1, 4, 1024, 64) and not opposed.left_out
    rows, _ = bench.compared(WINDOWED, opposed, Paced({"flashgen": 50.0, bench.WHOLE: 40.0}, opposed), 3, 0.0)
    mine, beside = rows
    assert mine["tiles"] == 2.625 and beside["tiles"] == 3.0 and beside["tile"] == "128x128"
    assert mine["speed_per_tile"] == pytest.approx((40.0 / 3.0) / (50.0 / 2.625))
    assert "speed_per_tile" not in beside
    assert beside["tflops"] == pytest.approx(4 * 1024 * 384 * 4 * 64 / 40.0 / 1e6)


def test_full_attention_is_not_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    plain = replace(SMALL, spec=replace(SMALL.spec, mask=FULL))
    *_, left_out, _ = bench.ready(plain, "cpu", [bench.WHOLE])
    assert left_out[bench.WHOLE].endswith("here it would be flashgen again")
    *_, left_out, _ = bench.ready(SMALL, "cpu", [bench.WHOLE])
    assert left_out[bench.WHOLE].endswith("here torch answers")
    rows = [row("flashgen") | {"speed_per_tile": 0.914}, row(bench.WHOLE)]
    bench._show(console(), [bench.Result(SMALL, rows, {})], ["flashgen", bench.WHOLE])
    printed = capsys.readouterr().out
    assert "per tile" in printed and "0.91" in printed and f"vs {bench.WHOLE}" not in printed


class Paced:
    """Says that each launch takes as long as its name has."""

    def __init__(self, times: dict[str, float], opposed: bench.Ready) -> None:
        self.times = {id(launch): times[name] for name, launch in opposed.launches.items()}

    def warm(self, launch: Callable[[], Any], count: int) -> None:
        pass

    def each(self, launch: Callable[[], Any], count: int) -> list[float]:
        return [self.times[id(launch)]] * count

    replayed = each


class WallClock:
    """Times calls on the CPU."""

    def warm(self, launch: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            launch()

    def each(self, launch: Callable[[], Any], count: int) -> list[float]:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            launch()
            times.append(1e6 * (time.perf_counter() - started))
        return times

    replayed = each


def test_rows_of_a_real_comparison() -> None:
    rows, left_out = bench.compared(
        SMALL, bench.ready(SMALL, "cpu", ["flashgen", "fa2", "cudnn"]), WallClock(), 3, 0.0
    )
    assert [row["impl"] for row in rows] == ["flashgen", "fa2"] and set(left_out) == {"cudnn"}
    for row in rows:
        assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        assert row["passes"] == 3
        assert row["tflops"] == pytest.approx(bench.rate(SMALL, 1e3 * row["ms_median"])["tflops"])
        assert 0 < row["max_error"] < 0.02


def test_an_impossible_time_is_no_row() -> None:
    rows, left_out = bench.compared(SMALL, bench.ready(SMALL, "cpu", ["fa2"]), WallClock(), 3, floor_us=1e9)
    assert rows == []
    assert left_out["fa2"].startswith("WRONG: timed at ")


def test_merging_keeps_what_a_new_run_does_not_repeat() -> None:
    other = {"q_len": 256, "k_len": 256}
    before = [row("flashgen"), row("fa4"), row("flashgen", **other)]
    half = bench._merged(before, [row("flashgen", "r2")])
    assert [(r["impl"], r["run"], r["q_len"]) for r in half] == [
        ("flashgen", "r1", 128),
        ("fa4", "r1", 128),
        ("flashgen", "r1", 256),
        ("flashgen", "r2", 128),
    ]
    whole = bench._merged(half, [row("flashgen", "r3"), row("fa4", "r3")])
    assert [(r["impl"], r["run"], r["q_len"]) for r in whole] == [
        ("flashgen", "r1", 256),
        ("flashgen", "r3", 128),
        ("fa4", "r3", 128),
    ]


def test_the_file_is_read_back_and_guarded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "slice.json"
    header = {"gpu": "NVIDIA H200", "driver": "580", "versions": {"torch": "2"}, "command": "c", "date": "d"}
    rows = [row("flashgen"), row("fa2")]
    bench._write(path, {"header": header, "rows": rows})
    assert json.loads(path.read_text()) == {"header": header, "rows": rows}
    assert len([line for line in path.read_text().splitlines() if '"impl"' in line]) == 2
    assert bench._read(path, header) == (rows, [{name: header[name] for name in bench._OF_A_RUN}])
    with pytest.raises(InvalidArgument, match="measured on NVIDIA H200, this is NVIDIA A100"):
        bench._read(path, header | {"gpu": "NVIDIA A100"})
    path.write_text('{"rows": [{"impl": "flashgen"}]}')
    with pytest.raises(InvalidArgument, match="no benchmark file"):
        bench._read(path, header)


def test_a_merged_file_says_how_each_of_its_runs_was_made(tmp_path: Path) -> None:
    path, shape = tmp_path / "slice.json", {"q_len": 256, "k_len": 256}

    def run(date: str, *rows: dict[str, Any]) -> dict[str, Any]:
        """What a run at some time makes of the file."""
        header = {
            "gpu": "H200",
            "driver": f"of {date}",
            "versions": {},
            "command": f"at {date}",
            "date": date,
        }
        before, earlier = bench._read(path, header) if path.exists() else ([], [])
        merged = bench._merged(before, list(rows))
        made = bench._merged_header(header, earlier, merged)
        bench._write(path, {"header": made, "rows": merged})
        return made

    assert "runs" not in run("d1", row("flashgen", "d1/1"), row("flashgen", "d1/2", **shape))
    both = run("d2", row("flashgen", "d2/1"))
    assert both["command"] == "at d1; at d2" and both["date"] == "d2"
    assert [each["date"] for each in both["runs"]] == ["d1", "d2"]
    assert both["runs"][0] == {"date": "d1", "command": "at d1", "driver": "of d1", "versions": {}}
    three = run("d3", row("fa2", "d3/1"))
    assert three["command"] == "at d1; at d2; at d3"
    last = run("d4", row("flashgen", "d4/1", **shape))
    assert [each["date"] for each in last["runs"]] == ["d2", "d3", "d4"], "no row of d1 is left"


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("slice*.json")), ids=lambda path: path.name)
def test_every_row_that_is_kept_in_git_has_the_command_of_its_run(path: Path) -> None:
    data = json.loads(path.read_text())
    header = data["header"]
    runs = {run["date"]: run for run in header.get("runs", [header])}
    assert {bench._date(row) for row in data["rows"]} == set(runs)
    assert header["command"] == "; ".join(run["command"] for run in runs.values())
    assert all(run.keys() == set(bench._OF_A_RUN) for run in header.get("runs", []))


def test_the_table_has_rates_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench.Result(SMALL, [row("flashgen", ms=2.0), row("fa2", ms=3.0)], {"cudnn": "it is not here"})
    bench._show(console(), [result], ["flashgen", "cudnn", "fa2"])
    printed = capsys.readouterr().out
    assert "vs fa2" in printed and "vs cudnn" not in printed
    assert "1.50" in printed
    assert "mask[q_pos >= k_idx]" in printed  # not taken for markup
    assert "cudnn has no row for 1 of 1 shape: it is not here" in printed


def test_shapes_are_made_ready_together_and_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    crashed = Failure(Status.CRASH, "gone")

    class Noted:
        def __init__(self, entry: str, options: dict[str, Any], environment: dict[str, str]) -> None:
            assert entry == "flashgen.cli.bench:opponents" and options == {"passes": 3}
            self.length = 0

        def call(self, job: Workload | None, timeout: float) -> object:
            self.length = job.q_len if job else self.length
            asked.append(f"{'ready' if job else 'timed'} {self.length}")
            return crashed if self.length == 2 else None if job else ([{"ms": self.length}], {})

        def close(self) -> None:
            asked.append(f"closed {self.length}")

    monkeypatch.setattr(child, "Child", Noted)
    shapes = [replace(SMALL, q_len=length) for length in (1, 2, 3)]
    answers = list(bench._timed(shapes, {"passes": 3}, 2, 9.0))
    assert answers == [([{"ms": 1}], {}), crashed, ([{"ms": 3}], {})]
    assert sorted(asked[:2]) == ["ready 1", "ready 2"]
    assert asked[2:5] == ["timed 1", "closed 1", "closed 2"] and asked.index("ready 3") > 4
    assert {f"closed {length}" for length in (1, 2, 3)} <= set(asked)
