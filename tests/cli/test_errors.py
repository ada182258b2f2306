"""What a wrong command line gets: one message that says what is allowed, an exit code, no traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flashgen.build.device import device_count
from flashgen.cli.main import main
from flashgen.cli.output import FAILED, USAGE

ROOT = Path(__file__).resolve().parents[2]
H200 = ["--target", "nvidia-h200"]

WRONG = [
    (["explain", *H200, "--suite", "nope"], USAGE, ["unknown suite 'nope'", "llama3-8b"]),
    (["explain", *H200, "--mask", "nope"], USAGE, ["unknown mask 'nope'", "causal", "sliding_window"]),
    (["explain", *H200, "--mask", "sliding_window(1)"], USAGE, ["sliding_window(left, right)"]),
    (["explain", *H200, "--score", "softcap(-1)"], USAGE, ["cap=-1", "must be a number"]),
    (["explain", *H200, "--head-dim", "20"], USAGE, ["head_dim=20", "multiples of 8", "16", "256"]),
    (["explain", *H200, "--heads", "6", "--kv-heads", "4"], USAGE, ["heads=6", "kv_heads=4"]),
    (["explain", *H200, "--dtype", "int8"], USAGE, ["int8", "bf16"]),
    (["explain", *H200], USAGE, ["no workload was named", "--suite", "--head-dim 128"]),
    (["explain", *H200, "--suite", "ci", "--head-dim", "64"], USAGE, ["leave out --head-dim"]),
    (["explain", *H200, "--seq", "8", "--q-len", "8"], USAGE, ["--seq", "--q-len", "leave out one"]),
    (["explain", "--target", "h200", "--seq", "8"], USAGE, ["unknown target 'h200'", "nvidia-h200"]),
    (["explain", "--gpu", "0", *H200, "--seq", "8"], USAGE, ["--gpu", "--target", "leave out one"]),
    (["tune", *H200], USAGE, ["no workload was named"]),
    (["tune", *H200, "--suite", "ci", "--budget", "soon"], USAGE, ["'soon'", "10m"]),
    (["tune", *H200, "--suite", "ci", "--trials", "0"], USAGE, ["trials=0", "at least 1"]),
    (["tune", *H200, "--suite", "ci", "--sampler", "luck"], USAGE, ["unknown sampler 'luck'", "tpe"]),
    (["tune", "--gpu", "first", "--suite", "ci"], USAGE, ["'first' names no GPU", "0,2", "all"]),
    (["tune", *H200, "--misses", "--suite", "ci"], USAGE, ["--misses", "leave out"]),
    (["tune", *H200, "--misses"], USAGE, ["no missed shape", "FLASHGEN_ON_MISS=record"]),
    (["show", *H200, "--config", "fast"], USAGE, ["no config 'fast'", "m16n32w4s1_tma_heads"]),
    (
        ["show", *H200, "--config", "m128n128w8s9_tma_heads"],
        USAGE,
        ["no config 'm128n128w8s9_tma_heads'", "num_stages=9", "allowed: 1, 2, 3, 4"],
    ),
    (["show", *H200, "--config", "m128n128w8s2_tma_both"], USAGE, ["order='both'", "allowed: heads, rows"]),
    (["show", *H200, "--ptx", "--sass"], USAGE, ["--ptx, --sass", "all but one"]),
    (
        ["show", *H200, "--config", "best", "--diff", "best", "default"],
        USAGE,
        ["--diff names both configs", "--config"],
    ),
    (["show", "--target", "nvidia-a100", "--config", "m128n64w4s2_tma_heads"], USAGE, ["sm_90", "sm_80"]),
    (["show", "--arch", "70"], USAGE, ["unknown arch 70", "80", "120"]),
    (["show", "--arch", "80", *H200], USAGE, ["--arch", "leave"]),
    (["show", *H200, "--family", "magic"], USAGE, ["unknown family 'magic'", "attention_fwd"]),
    (
        ["show", *H200, "--config", "s3g4_shared", "--head-dim", "128"],
        USAGE,
        ["s3g4_shared is a config of attention_bwd_sm90, which computes bwd, not fwd: add --backward"],
    ),
    (
        ["show", *H200, "--backward", "--head-dim", "128", "--config", "m128n64w4s2k4_tma_heads"],
        USAGE,
        ["is a config of attention_fwd, which computes fwd, not bwd: leave out --backward"],
    ),
    (
        [
            "show",
            *H200,
            "--backward",
            "--head-dim",
            "128",
            "--family",
            "attention_bwd",
            "--config",
            "s3g4_shared",
        ],
        USAGE,
        ["is a config of attention_bwd_sm90, which is not the family asked for: leave out --family, or "],
    ),
    (
        ["show", "--arch", "80", "--backward", "--head-dim", "128", "--config", "s3g4_shared"],
        USAGE,
        ["is a config of attention_bwd_sm90, which does not serve this: attention_bwd_sm90 needs sm_90"],
    ),
    *(
        (
            ["show", *H200, *words, "--head-dim", "128", "--family", family, "--config", "fused"],
            USAGE,
            [f"{family} has no config 'fused'; a name reads like ", f", and may have {options}"],
        )
        for words, family, options in (
            (["--backward"], "attention_bwd", "_fused at its end"),
            (["--backward"], "attention_bwd_sm90", "_third at its end"),
            ([], "attention_fwd", "k2 to k"),
            ([], "attention_fwd_sm90", "k2 to k"),
        )
    ),
    (["show", *H200, "--config", ""], USAGE, ["no config ''", "a name reads like"]),
    *(
        (
            ["show", *words, "--family", "attention_fwd_sm90"],
            USAGE,
            ["attention_fwd_sm90", why, "choose of: " + other],
        )
        for words, why, other in (
            ([*H200, "--dtype", "fp32"], "serves fp16, bf16, e4m3, not fp32", "attention_fwd"),
            ([*H200, "--backward"], "computes fwd, not bwd", "attention_bwd"),
            ([*H200, "--access", "unit"], "cannot express the call's unit tensors", "attention_fwd"),
            (["--arch", "100"], "needs sm_90, not cuda 100", "attention_fwd"),
        )
    ),
    (["export", *H200, "--suite", "ci", "--out", "X"], USAGE, ["no tuned record", "flashgen tune"]),
    (["export", *H200, "--suite", "ci"], USAGE, ["--out"]),
    (["verify", "/nowhere/at/all"], USAGE, ["/nowhere/at/all", "does not exist"]),
    (["bench", "--suite", "ci", "--impls", "flashgen,magic"], USAGE, ["'magic'", "cudnn", "fa4"]),
    (["bench", "--suite", "ci", "--merge"], USAGE, ["--merge", "--out"]),
    (["bench", "--suite", "ci", "--out", f"{__file__}/X"], USAGE, ["--out", "test_errors.py is no folder"]),
    (["bench", "--suite", "ci", "--impls", ","], USAGE, ["--impls ','", "nothing", "cudnn"]),
    (["db", "export", "--target", ""], USAGE, ["unknown target ''", "nvidia-h200"]),
    # A size is named as it was given, whatever else it sets.
    (["explain", *H200, "--k-len", "-0"], USAGE, ["Error: --k-len 0 must be at least 1"]),
    (["explain", *H200, "--q-len", "-3"], USAGE, ["Error: --q-len -3 must be at least 1"]),
    (["explain", *H200, "--seq", "8", "--k-len", "0"], USAGE, ["Error: --k-len 0 must be at least 1"]),
    (["explain", *H200, "--k-len", str(2**31)], USAGE, [f"--k-len {2**31}", f"at most {2**31 - 1}"]),
    (["show", "--batch", "0"], USAGE, ["Error: --batch 0 must be at least 1"]),
]

PATHS: list[tuple[str, str, list[str]]] = [
    ("bench", "--out", ["--suite", "ci"]),
    ("bench", "--model", []),
    ("db export", "--out", []),
    ("db export", "--tree", []),
    ("db import", "", []),
    ("explain", "--model", []),
    ("export", "--model", ["--out", "X"]),
    ("export", "--out", ["--suite", "ci"]),
    ("show", "--draw", []),
    ("show", "--model", []),
    ("simulate", "", []),
    ("tune", "--model", []),
    ("verify", "", []),
]
"""Command, option (none: an argument) and what else it needs, for every path that a command line has."""


@pytest.fixture(autouse=True)
def no_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    WRONG,
    ids=lambda each: " ".join(map(str, each))[:60] if isinstance(each, list) else "",
)
def test_a_wrong_command_line(words: list[str], code: int, said: list[str]) -> None:
    done = CliRunner().invoke(main, words, prog_name="flashgen")
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    for text in said:
        assert text in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(("command", "option", "words"), PATHS)
def test_an_empty_path_names_nothing(command: str, option: str, words: list[str]) -> None:
    """It is what a shell makes of a variable that is not set, and not what leaving an option out means."""
    given = [*command.split(), *words, *([option] if option else []), ""]
    done = CliRunner().invoke(main, given, prog_name="flashgen")
    assert done.exit_code == USAGE, done.output
    assert "an empty text names no file and no folder" in done.output


def test_those_are_all_paths() -> None:
    def found(group: click.Group, name: str = "") -> set[tuple[str, str]]:
        paths: set[tuple[str, str]] = set()
        for word, command in group.commands.items():
            if isinstance(command, click.Group):
                paths |= found(command, f"{name}{word} ")
            for param in command.params:
                if isinstance(param.type, click.Path | click.File):
                    paths.add((name + word, param.opts[0] if isinstance(param, click.Option) else ""))
        return paths

    assert found(main) == {(command, option) for command, option, _ in PATHS}


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_a_name_that_is_no_text_is_printed(tmp_path: Path, encoding: str) -> None:
    at = tmp_path / os.fsdecode(b"\xff.db")
    try:
        at.touch()
    except OSError:
        pytest.skip("names must be UTF-8 here")
    script = "from flashgen.cli.main import main; main()"
    for command in ("upgrade", "check"):
        done = subprocess.run(
            [sys.executable, "-c", script, "db", command, "--db", at],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        assert os.fsencode(at) in done.stdout


def test_an_error_is_json_where_json_was_asked_for() -> None:
    done = CliRunner().invoke(main, ["explain", *H200, "--suite", "nope", "--json"], prog_name="flashgen")
    assert done.exit_code == USAGE
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "UnknownName"
    assert error["message"].startswith("unknown suite 'nope'; known: ci, ")
    assert error["message"] in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "nope"],
        ["verify"],
        ["db", "import", "missing"],
        ["db", "export", "--status", "GOOD"],
        ["db", "nope"],
        ["explain", "--suit", "ci"],
        ["explain", "--dtype", "int8"],
        ["nope"],
        ["--nope"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_parsed_is_one_json_error_too(words: list[str]) -> None:
    done = CliRunner().invoke(main, [*words, "--json"], prog_name="flashgen")
    assert done.exit_code == USAGE
    error = json.loads(done.stdout)["error"]
    assert error["kind"] and error["message"] in done.stderr
    assert CliRunner().invoke(main, words, prog_name="flashgen").stdout == ""


@pytest.mark.skipif(device_count() > 0, reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["tune", "--suite", "ci"], "rank candidates by a model, for a GPU that is elsewhere: --target NAME"),
        (["tune", "--gpu", "--suite", "ci"], "--target NAME in place of --gpu"),
        (["explain", "--gpu", "--suite", "ci"], "--target NAME in place of --gpu"),
        (
            ["export", "--suite", "ci", "--out", "X"],
            "pack kernels for a GPU that is elsewhere: --target NAME",
        ),
        (["bench", "--suite", "ci"], "bench measures: run it on a machine with the GPU"),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, list) else "",
)
def test_without_a_gpu_the_message_names_this_commands_way_out(words: list[str], advice: str) -> None:
    done = CliRunner().invoke(main, words, prog_name="flashgen")
    assert done.exit_code == FAILED
    first, second, *more = done.stderr.splitlines()
    assert first.startswith("Error: no GPU here: ") and "launching" not in done.output
    assert advice in second
    assert ("--target" in second) == (more != []) == ("nvidia-h200" in "".join(more))


@pytest.mark.skipif(device_count() > 0, reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["show", "explain"])
def test_commands_that_only_look_take_a_gpu_and_say_which(command: str) -> None:
    done = CliRunner().invoke(main, [command, "--suite", "ci", "--json"], prog_name="flashgen")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["target"]["name"] == "nvidia-h200"
    assert "no GPU here: this is for nvidia-h200; --target NAME chooses another" in done.stderr


def test_an_architecture_is_one_of_its_gpus_and_says_which() -> None:
    done = CliRunner().invoke(main, ["show", "--arch", "90", "--suite", "ci"], prog_name="flashgen")
    assert done.stderr.splitlines()[0] == (
        "this is for nvidia-h100-pcie; --target chooses another of sm_90: nvidia-h100, nvidia-h200"
    )


def test_show_says_what_it_shows() -> None:
    def told(*words: str) -> list[str]:
        done = CliRunner().invoke(main, ["show", *H200, *words], prog_name="flashgen")
        assert done.exit_code == 0 and done.stdout.startswith('"""Attention forward')
        return done.stderr.splitlines()

    best, tunables, which = told("--suite", "llama3-8b")
    assert re.fullmatch(
        r"showing c\dx\d\w+, best record, exact bucket: measured [\d.]+ us at b\d+h32kv8q\d+k\d+, 2026-11-..",
        best,
    )
    near, *_ = told("--head-dim", "128", "--mask", "causal", "--batch", "3", "--heads", "5")
    assert re.search(r", best record, nearest bucket, [\d.]+ octaves away: measured [\d.]+ us at b\d", near)
    assert re.fullmatch(r"  consumers \d, programs \d, block_n \d+, .*, schedule [a-z]+", tunables)
    assert re.fullmatch(r"for b\d+h32kv8q\d+k\d+ of \[fwd d128 bf16 .*\], 1 of 12 workloads", which)
    sizes = ["--head-dim", "40", "--seq", "64"]
    untuned = told(*sizes)
    assert untuned[0].endswith(", default config: no tuned record serves this")
    assert untuned[2].startswith("for b256h32kv32q64k64 of [") and untuned[2].endswith("]")
    assert told(*sizes, "--config", "default")[0].endswith(", default config")
    name = "m64n64w4s2_pointer_heads"
    asked, spelt, _ = told(*sizes, "--config", name)
    assert asked == f"showing {name}, as asked"
    assert spelt == "  block_m 64, block_n 64, num_warps 4, num_stages 2, loads pointer, order heads"


def test_an_export_without_records_says_how_to_tune_just_that() -> None:
    mask, other = "causal & sliding_window(5, 0)", "~causal"
    named = ["--head-dim", "40", "--seq", "128", "--seq", "64", "--mask", mask, "--mask", other]
    words = ["export", *H200, *named, "--db", "my records.db", "--out", "X"]
    done = CliRunner().invoke(main, words, prog_name="flashgen")
    (advice,) = [line for line in done.stderr.splitlines() if line.startswith("tune first: ")]
    program, command, *rest = shlex.split(advice.removeprefix("tune first: "))
    assert (program, command) == ("flashgen", "tune")
    given = main.commands["tune"].make_context("tune", rest).params
    assert given["target"] == "nvidia-h200" and given["url"] == "my records.db"
    assert (given["head_dim"], given["seq"], given["mask"]) == (40, (128, 64), (mask, other))
    assert done.exit_code == USAGE


def in_a_process(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=60,
    )


def test_a_setting_that_is_not_allowed_is_one_line_and_a_finding() -> None:
    told = "FLASHGEN_ON_MISS='x' is not a miss policy; allowed: default, tune, record, error. "
    command = "from flashgen.cli.main import main; main({}, prog_name='flashgen')"

    done = in_a_process(command.format(["explain", *H200, "--suite", "ci"]), FLASHGEN_ON_MISS="x")
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert done.stderr.startswith(f"Error: {told}") and len(done.stderr.splitlines()) == 1

    done = in_a_process(command.format(["doctor", "--json"]), FLASHGEN_ON_MISS="x")
    assert (done.returncode, done.stderr) == (FAILED, "")
    found = [each for each in json.loads(done.stdout)["findings"] if each["state"] == "error"]
    assert [(each["name"], each["advice"]) for each in found] == [
        ("FLASHGEN_ON_MISS", "correct FLASHGEN_ON_MISS or unset it")
    ]

    done = in_a_process("import flashgen; flashgen.attention", FLASHGEN_ON_MISS="x")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"flashgen.errors.InvalidArgument: {told}")


def test_the_setting_that_checks_values_is_0_or_1() -> None:
    done = in_a_process("import flashgen; flashgen.attention", FLASHGEN_CHECK="yes")
    assert "FLASHGEN_CHECK='yes' must be 0 or 1. Correct it or unset it" in done.stderr
    assert not in_a_process("import flashgen; flashgen.attention", FLASHGEN_CHECK="1").stderr


def test_a_file_that_cannot_be_written_is_no_traceback(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    words = ["tune", *H200, "--suite", "ci", "--trials", "1", "--db", str(blocked / "tuning.db")]
    done = CliRunner().invoke(main, words, prog_name="flashgen")
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit), done.exception
    assert str(blocked) in done.output
