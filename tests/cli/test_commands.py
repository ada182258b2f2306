"""Every command has help with examples and `--json`, and stands in the README."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import flashgen
from flashgen.cli.main import COMMANDS, main
from flashgen.cli.options import Selection
from flashgen.errors import InvalidArgument
from flashgen.spec.attention import Workload
from flashgen.tune.suites import SUITES, suite_workloads

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "triton", "sqlalchemy", "optuna", "jinja2", "rich")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


ALL = dict(commands(main))


def examples(text: str) -> list[str]:
    return re.findall(r"^ +(flashgen .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ALL)
def test_help_says_what_it_does_and_how(name: str) -> None:
    done = CliRunner().invoke(main, [*name.split(), "--help"], prog_name="flashgen")
    assert done.exit_code == 0
    assert "Examples:" in done.output
    shown = examples(done.output)
    assert shown, f"{name} has no example"
    assert all(f"flashgen {name}" in line for line in shown if "|" not in line)
    assert "--json" in done.output
    for parameter in ALL[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts[0]} has no help"


@pytest.mark.parametrize("name", ALL)
def test_examples_parse(name: str) -> None:
    """An example with a misspelt option would be worse than none."""
    help_text = CliRunner().invoke(main, [*name.split(), "--help"], prog_name="flashgen").output
    for line in examples(help_text):
        for part in line.split("|"):
            words = shlex.split(part.split(">")[0].split("  ")[0])
            if words[:1] != ["flashgen"]:
                continue
            group: click.Command = main
            rest = words[1:]
            while isinstance(group, click.Group):
                group, rest = group.commands[rest[0]], rest[1:]
            try:
                group.make_context(words[1], rest)
            except click.BadParameter as error:
                assert "does not exist" in str(error), line  # a file that only the reader has


@pytest.mark.parametrize("name", ["tune", "show", "explain", "export", "bench"])
def test_workloads_are_named_alike_everywhere(name: str) -> None:
    options = {option for parameter in ALL[name].params for option in parameter.opts}
    named = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(Selection)}
    assert named <= options and "--suite" in named and "--gpu" in options


@pytest.mark.parametrize(
    ("words", "index"), [(["--gpu", "--suite", "ci"], 0), (["--gpu", "1", "--suite", "ci"], 1), ([], None)]
)
def test_gpu_takes_an_index_or_none(words: list[str], index: int | None) -> None:
    assert ALL["explain"].make_context("explain", [*words]).params["gpu"] == index
    several = None if index is None else (index,)
    assert ALL["tune"].make_context("tune", [*words]).params["gpu"] == several


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ([], ""),
        (["--sinks"], "fp32"),
        (["--sinks", "--mask", "causal"], "fp32"),
        (["--sinks", "bf16"], "bf16"),
    ],
)
def test_sinks_have_a_dtype(words: list[str], dtype: str) -> None:
    given = ALL["tune"].make_context("tune", ["--seq", "512", *words]).params
    selection = Selection(**{field.name: given[field.name] for field in dataclasses.fields(Selection)})
    assert selection.workloads()[0].spec.sinks == dtype


def selected(*words: str) -> tuple[Workload, ...]:
    given = ALL["bench"].make_context("bench", list(words)).params
    return Selection(**{field.name: given[field.name] for field in dataclasses.fields(Selection)}).workloads()


def test_dropout_is_part_of_what_is_meant() -> None:
    for words, dropped in (((), False), (("--dropout",), True), (("--dropout", "--backward"), True)):
        assert selected("--seq", "512", *words)[0].spec.dropout is dropped


def test_several_suites_are_one_list_without_repetitions() -> None:
    words = ("--suite", "ci", "--suite", "gpt2", "--suite", "ci")
    assert selected(*words) == (*suite_workloads("ci"), *suite_workloads("gpt2"))


def test_documents_are_counted_on_the_command_line() -> None:
    (found,) = selected("--mask", "document", "--documents", "12", "--seq", "512")
    assert (found.documents, found.q_len) == (12, 512)
    with pytest.raises(InvalidArgument, match="documents=12 is for masks that read"):
        selected("--mask", "causal", "--documents", "12")


@pytest.mark.parametrize(("given", "gpus"), [("0,2", (0, 2)), ("all", "all"), ("3", (3,))])
def test_tuning_takes_several_gpus(given: str, gpus: object) -> None:
    assert ALL["tune"].make_context("tune", ["--gpu", given]).params["gpu"] == gpus


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_stands_in_the_readme(command: click.Command) -> None:
    text = ROOT.joinpath("README.md").read_text()
    assert re.search(rf"\bflashgen {command.name}\b", text), (
        f"README.md does not name `flashgen {command.name}`"
    )


def test_one_line_help_is_not_cut_off() -> None:
    done = CliRunner().invoke(main, ["--help"], prog_name="flashgen", terminal_width=80)
    assert done.exit_code == 0
    assert "..." not in done.output.partition("Commands:")[2]
    assert all(f"  {command.name} " in done.output for command in COMMANDS)
    of_db = CliRunner().invoke(main, ["db", "--help"], prog_name="flashgen", terminal_width=80)
    assert of_db.exit_code == 0 and "..." not in of_db.output.partition("Commands:")[2]


def test_version() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"flashgen {flashgen.__version__}\n")


def test_help_lists_the_suites() -> None:
    done = CliRunner().invoke(main, ["tune", "--help"], prog_name="flashgen", terminal_width=80)
    assert all(name in done.output for name in SUITES)


def test_a_misspelt_name_is_told_before_anything_heavy_is_loaded() -> None:
    """In one process for all commands: each that starts takes 2 s, and what one loads stays loaded."""
    calls = [
        [command, *(["--out", "X"] if command == "export" else []), "--target", "nvidia-h200", *wrong]
        for command in ("tune", "explain", "show", "export")
        for wrong in (["--suite", "nope"], ["--suite", "ci", "--target", "nope"])
    ]
    script = f"""
import contextlib, io, sys
from flashgen.cli.main import main
for words in {calls!r}:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told): main(words)
    except SystemExit:
        print(words[0], "'nope'" in told.getvalue(), *({{"torch", "triton"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.splitlines() == [f"{words[0]} True" for words in calls], done.stderr


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    script = "import sys; from flashgen.cli.main import main; main(['--help'], standalone_mode=False); "
    script += f"print(*(name for name in {HEAVY!r} if name in sys.modules))"
    times = []
    for _ in range(2):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
        )
        times.append(time.perf_counter() - started)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    assert min(times) < 2.0
