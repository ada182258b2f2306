"""The table that `flashgen tune` prints, from results that were made up."""

from __future__ import annotations

import io
from dataclasses import replace

import landscape
import pytest
from click.testing import CliRunner
from rich.console import Console

from flashgen.cli.options import Device
from flashgen.cli.output import console
from flashgen.cli.tune import _Page, _show, tune
from flashgen.spec.masks import causal, sliding_window
from flashgen.tune.fleet import GpuReport
from flashgen.tune.result import Progress, Summary, TuneResult

WORKLOADS = [landscape.workload(q_len) for q_len in (4096, 2048, 1024)]
RECORDS = landscape.records(WORKLOADS[0])
FOUND = Summary(
    workload=WORKLOADS[0],
    winner=RECORDS[0],
    default_us=2 * RECORDS[0].median_us,
    trials=3,
    resumed=14,
    space=384,
    refused=5,
    outcomes={"OK": 2, "CRASH": 1},
    seconds=61.0,
)
UNTRIED = replace(
    FOUND, workload=WORKLOADS[1], winner=None, default_us=None, trials=0, resumed=0, outcomes={}
)


def printed(capsys: pytest.CaptureFixture[str], *summaries: Summary, **ended: object) -> list[str]:
    result = TuneResult(landscape.TARGET, summaries, 70.0, **ended)  # type: ignore[arg-type]
    _show(console(), result, WORKLOADS, False, [])
    return capsys.readouterr().out.splitlines()


def test_what_was_measured_has_times_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    header, _, row = printed(capsys, FOUND)[1:4]
    for name in ("winner", "time, us", "vs default", "TFLOP/s"):
        assert name in header
    assert RECORDS[0].config.name in row and f" {RECORDS[0].median_us:.1f} " in row
    assert "2.00x" in row and "3+14 of 384" in row and "5 refused, 1 crash" in row and "1m01s" in row


@pytest.mark.parametrize(
    ("ended", "said", "last"),
    [
        ({}, "not reached (budget)", "the time was up before 2 of 3 workloads: give more --budget"),
        ({"interrupted": True}, "not reached (interrupted)", "interrupted: all that was measured is stored"),
        ({"problem": "the GPU is lost"}, "not reached (ended early)", "ended early: the GPU is lost"),
    ],
)
def test_what_was_not_tried_is_not_called_wrong(
    ended: dict[str, object], said: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, FOUND, UNTRIED, **ended)
    assert [said in line for line in lines[3:6]] == [False, True, True]
    assert lines[-1].startswith(last) and "none is right" not in "".join(lines)


def test_several_gpus_show_their_controls_and_what_became_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus = (
        GpuReport("GPU 0", 2, 100.0, 101.0),
        GpuReport("GPU 1", 1, 110.0, 112.0),
        GpuReport("GPU 2", 0, 100.5, None, "the process died of SIGKILL"),
    )
    lines = printed(capsys, FOUND, gpus=gpus)
    at = lines.index("control, us: the same kernel on each GPU, at its start and at its end")
    assert lines[at + 1 : at + 6] == [
        "  GPU 0: 100.0, 101.0 (2 workloads)",
        "  GPU 1: 110.0, 112.0 (1 workload)",
        "  GPU 2: 100.5, - (0 workloads)",
        "  GPU 2 was lost: the process died of SIGKILL",
        "warning: GPU 1: its control took 112 us, 11% more than the median of all GPUs (101 us); "
        "tune again without it, its times are not comparable",
    ]


def test_one_gpu_has_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("control" in line for line in printed(capsys, FOUND))


def test_what_was_not_reached_is_found_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    """Several GPUs do not finish in order."""
    rows = printed(capsys, replace(FOUND, workload=WORKLOADS[2]))[3:6]
    assert ["not reached (budget)" in row for row in rows] == [False, True, True]
    assert [WORKLOADS[index].name in row for index, row in zip((2, 0, 1), rows, strict=True)] == [True] * 3


@pytest.mark.parametrize(("gpus", "said"), [((0,), "measured on GPU 0"), ((0, 2), "measured on GPUs 0, 2")])
def test_the_page_names_its_gpus(
    gpus: tuple[int, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _Page(Device(landscape.TARGET, gpus), 3)
    assert said in capsys.readouterr().err


def test_what_was_tried_and_wrong_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "none is right" in printed(capsys, replace(UNTRIED, trials=4, outcomes={"WRONG": 4}))[3]


def test_a_narrow_terminal_keeps_count_and_time_left() -> None:
    """And a run that knows more trials than it may take counts no further than all of them."""
    long = landscape.workload(4096, causal() & sliding_window(4095, 0))
    terminal = Console(width=80, force_terminal=True, file=io.StringIO(), color_system=None)
    page = _Page(Device(landscape.TARGET, (0,)), 10, terminal)
    best = replace(RECORDS[0], measurement=replace(RECORDS[0].measurement, median_us=1171.3))
    page.update(Progress(long, 1, 10, "attention_fwd", 4, 2, best, best, 3.0, 78.0))
    page.update(Progress(WORKLOADS[0], 2, 10, "attention_fwd", 12, 36, best, best, 3.0, 78.0))
    with terminal.capture() as shown:
        terminal.print(page._bars.get_renderable())
    first, second = shown.get().splitlines()
    assert "4/4" in first and "2/10 d128" in first and "… fwd " in first
    assert (
        "12/36" in second
        and "… fwd " in second
        and "1m18s left" in second
        and RECORDS[0].config.name in second
    )


@pytest.mark.parametrize(
    ("width", "told"), [(80, ("fwd_sm90", "fwd")), (160, ("attention_fwd_sm90", "attention_fwd"))]
)
def test_each_line_of_a_workload_names_its_family(width: int, told: tuple[str, str]) -> None:
    terminal = Console(width=width, force_terminal=True, file=io.StringIO(), color_system=None)
    page = _Page(Device(landscape.TARGET, (0,)), 1, terminal)
    for family in ("attention_fwd_sm90", "attention_fwd"):
        page.update(Progress(WORKLOADS[0], 0, 1, family, 4, 36, RECORDS[0], RECORDS[0], 3.0, 78.0))
    with terminal.capture() as shown:
        terminal.print(page._bars.get_renderable())
    lines = shown.get().splitlines()
    assert len(lines) == 2 and all(line.startswith("1/1 d128") for line in lines)
    assert [f" {family} " in line for family, line in zip(told, lines, strict=True)] == [True, True]


def test_the_limit_of_trials_says_what_it_limits() -> None:
    shown = " ".join(CliRunner().invoke(tune, ["--help"], terminal_width=200).output.split())
    assert "--trials INTEGER At most so many for each workload and kernel family" in shown
