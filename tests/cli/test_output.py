"""Tables on wide and narrow terminals and in pipes."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import flashgen
from flashgen.cli.output import INTERRUPTED, Table, count

ROOT = Path(__file__).resolve().parents[2]
WINNER = "m128n64w4s2_tma_heads"


def printed(table: Table, width: int, terminal: bool = True, **styles: str) -> list[str]:
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system=None, highlight=False, soft_wrap=True
    )
    table.print(console, styles)
    return file.getvalue().splitlines()


def tuned() -> Table:
    table = Table("an H200", "workload", "winner", ">us", "?>trials", "?failed")
    table.add_row("d128 causal", WINNER, "9.5", "12 of 300", "")
    table.add_row("d64 full", WINNER, "10.5", "2", "1 crash")
    return table


def test_every_cell_is_whole_and_no_line_ends_in_spaces() -> None:
    for width, terminal in ((120, True), (20, False)):
        assert printed(tuned(), width, terminal) == [
            "an H200",
            " workload      winner                    us      trials   failed",
            " ───────────   ─────────────────────   ────   ─────────   ───────",
            f" d128 causal   {WINNER}    9.5   12 of 300",
            f" d64 full      {WINNER}   10.5           2   1 crash",
        ]


@pytest.mark.parametrize(
    ("width", "left_out"), [(63, "failed"), (50, "trials; failed"), (20, "trials; failed")]
)
def test_a_narrow_terminal_loses_columns_and_never_the_winner(width: int, left_out: str) -> None:
    lines = printed(tuned(), width)
    assert lines[-1] == f" (too narrow for: {left_out})"
    assert all(WINNER in line for line in lines[3:5])
    assert all(len(line) <= max(width, 47) for line in lines)


def test_without_names_there_is_no_header() -> None:
    table = Table("", "", "")
    table.add_row("registers", "255")
    assert printed(table, 80) == [" registers   255"]


def test_one_is_singular() -> None:
    assert (count(1, "problem"), count(0, "problem"), count(2, "problem")) == (
        "1 problem",
        "0 problems",
        "2 problems",
    )


def test_the_package_shows_its_own_names_only() -> None:
    public = [name for name in dir(flashgen) if not name.startswith("__")]
    assert public == sorted(flashgen.__all__) and "__version__" in dir(flashgen)


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
    whole = True
except KeyboardInterrupt:  # as in a callback, which raises nothing
    whole = False
"""
IMPORTS = """
import time, click
from flashgen.cli.output import Commands

@click.group(cls=Commands)
def main():
    pass

@main.group(cls=Commands)
def inner():
    pass

@inner.command()
def work():
    import swallows
    print("whole" if swallows.whole else "half made", flush=True)
    time.sleep(20)
    print("went on")

main(["inner", "work"])
"""


def test_ctrl_c_during_an_import_comes_after_it(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n{IMPORTS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "whole\n", "interrupted\n")
