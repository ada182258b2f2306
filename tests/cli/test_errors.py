"""What a wrong command line gets: one message that says what is allowed, an exit code, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashgen.build.device import device_count
from flashgen.cli.main import main
from flashgen.cli.output import FAILED, USAGE

H200 = ["--target", "nvidia-h200"]

WRONG = [
    (["explain", *H200, "--suite", "nope"], USAGE, ["unknown suite 'nope'", "llama3-8b"]),
    (["explain", *H200, "--mask", "nope"], USAGE, ["unknown mask 'nope'", "causal", "sliding_window"]),
    (["explain", *H200, "--mask", "sliding_window(1)"], USAGE, ["sliding_window(left, right)"]),
    (["explain", *H200, "--score", "softcap(-1)"], USAGE, ["cap=-1", "above 0"]),
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
    (["tune", *H200, "--misses", "--suite", "ci"], USAGE, ["--misses", "leave out"]),
    (["tune", *H200, "--misses"], USAGE, ["no missed shape", "FLASHGEN_ON_MISS=record"]),
    (["show", *H200, "--config", "fast"], USAGE, ["no config 'fast'", "m16n32w4s1_tma_heads"]),
    (["show", "--target", "nvidia-a100", "--config", "m128n64w4s2_tma_heads"], USAGE, ["sm_90", "sm_80"]),
    (["show", "--arch", "70"], USAGE, ["unknown arch 70", "80", "120"]),
    (["show", "--arch", "80", *H200], USAGE, ["--arch", "leave"]),
    (["show", *H200, "--family", "magic"], USAGE, ["unknown family 'magic'", "attention_fwd"]),
    (["export", *H200, "--suite", "ci", "--out", "X"], USAGE, ["no tuned record", "flashgen tune"]),
    (["export", *H200, "--suite", "ci"], USAGE, ["--out"]),
    (["verify", "/nowhere/at/all"], USAGE, ["/nowhere/at/all", "does not exist"]),
    (["bench", "--suite", "ci", "--impls", "flashgen,magic"], USAGE, ["'magic'", "cudnn", "fa4"]),
    (["bench", "--suite", "ci", "--merge"], USAGE, ["--merge", "--out"]),
]


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


def test_an_error_is_json_where_json_was_asked_for() -> None:
    done = CliRunner().invoke(main, ["explain", *H200, "--suite", "nope", "--json"], prog_name="flashgen")
    assert done.exit_code == USAGE
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "UnknownName"
    assert error["message"].startswith("unknown suite 'nope'; known: ci, ")
    assert error["message"] in done.stderr


@pytest.mark.skipif(device_count() > 0, reason="this machine has a GPU")
@pytest.mark.parametrize(
    "words",
    [["tune", "--gpu", "--suite", "ci"], ["explain", "--suite", "ci"], ["bench", "--suite", "ci"]],
    ids=lambda words: str(words[0]),
)
def test_without_a_gpu_the_message_names_the_way_out(words: list[str]) -> None:
    done = CliRunner().invoke(main, words, prog_name="flashgen")
    assert done.exit_code == FAILED
    assert "no GPU here" in done.output and "--target NAME" in done.output and "nvidia-h200" in done.output


def test_a_file_that_cannot_be_written_is_no_traceback(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    words = ["tune", *H200, "--suite", "ci", "--trials", "1", "--db", str(blocked / "tuning.db")]
    done = CliRunner().invoke(main, words, prog_name="flashgen")
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit), done.exception
    assert str(blocked) in done.output
