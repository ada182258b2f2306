"""The commands from tuning to a bundle, for a GPU that is not here."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flashgen.build.compile import toolchain
from flashgen.cli.main import main
from flashgen.cli.output import FAILED, INTERRUPTED, USAGE
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.masks import causal
from flashgen.store.db import TuningDB

ROOT = Path(__file__).parent.parent.parent
FAMILY = FAMILIES["attention_fwd"]
FORWARD = sum(family.op == "fwd" for family in FAMILIES.values())
"""How many families a search of forward kernels has."""
H200 = ["--target", "nvidia-h200"]


def run(*words: str | Path, code: int = 0) -> Result:
    done = CliRunner().invoke(main, list(map(str, words)), prog_name="flashgen")
    assert done.exit_code == code, (words, done.output, done.exception)
    return done


def run_json(*words: str | Path, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code).stdout)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database after `flashgen tune`."""
    path = tmp_path_factory.mktemp("db") / "tuning.db"
    result = run_json("tune", *H200, "--suite", "ci", "--trials", "2", "--jobs", "2", "--db", path)
    assert result["target"]["name"] == "nvidia-h200"
    assert result["interrupted"] is False and result["problem"] == ""
    assert len(result["workloads"]) == 2
    for workload in result["workloads"]:
        assert workload["trials"] == 2 * FORWARD and workload["resumed"] == 0
        assert sum(workload["outcomes"].values()) == 2 * FORWARD
        assert workload["winner"]["measurement"]["source"] == "model"
        assert workload["median_us"] > 0 and workload["gain"] >= 1
    return path


def test_tuning_again_goes_on_from_there(db: Path) -> None:
    result = run_json("tune", *H200, "--suite", "ci", "--trials", "2", "--db", db)
    assert [(w["trials"], w["resumed"]) for w in result["workloads"]] == [(0, 2 * FORWARD)] * 2


def test_the_table_for_people(db: Path) -> None:
    done = run("tune", *H200, "--suite", "ci", "--trials", "2", "--db", db)
    assert "nvidia-h200 (cuda-sm90-132sm-" in done.stdout
    winner = r"(m\d+n\d+w\ds\d_\w+|c\dn\d+s\dg\d+p\d_\w+)"
    row = rf"d32 causal fp16 b2h4kv2q64k64 +{winner} +\d\.\d\d +0\+{2 * FORWARD} of \d+"
    assert re.search(row, done.stdout)
    assert "TFLOP/s" not in done.stdout and " us" not in done.output, "no measurement"
    assert "score: " in done.stdout and "trials: " in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())
    assert "tuning 2 workloads" in done.stderr and "tuning 2 workloads" not in done.stdout


def test_kernels_with_sinks_are_tuned_and_exported(tmp_path: Path) -> None:
    shape = ["--head-dim", "32", "--heads", "4", "--seq", "64", "--mask", "sliding_window(15, 0)"]
    sunk = [*H200, *shape, "--sinks", "bf16", "--db", tmp_path / "tuning.db"]
    run("tune", *sunk, "--trials", "1", "--jobs", "2")
    assert run_json("explain", *sunk)["workloads"][0]["subject"].endswith(", sinks")
    run("export", *sunk, "--out", tmp_path / "bundle")
    kernels = [each.name for each in (tmp_path / "bundle" / "cubins").iterdir()]
    assert kernels and all("_sinks_" in name for name in kernels)
    source = run("show", *sunk).stdout
    assert "SINKS" in source and "SINKS" not in run("show", *H200, *shape).stdout


def test_offline_tuning_names_what_was_measured(tmp_path: Path) -> None:
    named = ["--head-dim", "128", "--kv-heads", "8", "--seq", "4096", "--mask", "causal"]  # a shipped record
    words = ["tune", *H200, *named, "--trials", "1", "--jobs", "1", "--db", tmp_path / "tuning.db"]
    (found,) = run_json(*words)["workloads"]
    assert found["winner"]["measurement"]["source"] == "model" and found["tflops"] is None
    measured = found["measured"]
    assert measured["measurement"]["source"] == "measured"
    named = re.search(r"calls get what was measured: (\w+), \d+\.\d us\n", run(*words).stdout)
    assert named is not None and FAMILIES[measured["family"]].find(named[1]).to_json() == measured["config"]


def test_what_the_budget_did_not_reach_is_not_called_wrong(tmp_path: Path) -> None:
    words = ["tune", *H200, "--suite", "ci", "--budget", "0.01s", "--db", tmp_path / "tuning.db"]
    done = run(*words, code=FAILED)
    assert "none is right" not in done.stdout
    assert done.stdout.count("not reached (budget)") == 2
    assert "the time was up before 2 of 2 workloads" in done.stdout


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    script = "from flashgen.cli.main import main; main(prog_name='flashgen')"
    words = ["tune", *H200, "--suite", "gpt2", "--jobs", "1", "--db", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    until = time.monotonic() + 60
    while not (path.exists() and list(TuningDB(path, readonly=True).records())) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    printed, told = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, told
    assert "interrupted: all that was ranked is stored" in printed
    assert "Traceback" not in told
    assert list(TuningDB(path, readonly=True).records())


def test_explain_names_the_record(db: Path) -> None:
    (causal_one, _) = run_json("explain", *H200, "--suite", "ci", "--db", db)["workloads"]
    accepted = [step for step in causal_one["steps"] if step["verdict"] == "accepted"]
    assert [step["source"] for step in accepted] == ["database"]
    assert accepted[0]["choice"] == causal_one["runs"]
    nowhere = ("--head-dim", "40", "--seq", "64")  # no shipped record either
    untuned = run_json("explain", *H200, *nowhere, "--db", db)["workloads"][0]
    assert [s["source"] for s in untuned["steps"] if s["verdict"] == "accepted"] == ["family default"]


def test_show_takes_the_best_record_or_the_default(db: Path) -> None:
    winner = run_json("explain", *H200, "--suite", "ci", "--db", db)["workloads"][0]["runs"]
    shown = run_json("show", *H200, "--suite", "ci", "--db", db)
    assert shown["config"] == winner and shown["chosen"].startswith("best record")
    shown = run_json("show", *H200, "--suite", "ci", "--db", db, "--config", "default")
    assert shown["chosen"] == "default config"


@pytest.mark.parametrize(
    ("words", "family"),
    [
        ([*H200], "attention_fwd_sm90"),
        ([*H200, "--access", "strided"], "attention_fwd"),
        ([*H200, "--dtype", "fp32"], "attention_fwd"),
        (["--arch", "80"], "attention_fwd"),
        ([*H200, "--family", "attention_fwd"], "attention_fwd"),
    ],
    ids=" ".join,
)
def test_the_default_shown_is_that_of_the_first_family_that_serves(
    words: list[str], family: str, tmp_path: Path
) -> None:
    asked = ["show", "--head-dim", "40", "--seq", "64", *words, "--db", tmp_path / "none.db"]
    for config in ("best", "default"):
        shown = run_json(*asked, "--config", config)
        assert (shown["family"], shown["chosen"].startswith("default config")) == (family, True)


def test_show_prints_the_source_that_is_compiled() -> None:
    spec = AttentionSpec(64, 64, "bf16", causal().rule)
    config = FAMILY.find("m64n64w4s2_pointer_heads")
    text = render(spec, config, toolchain()).text
    done = run("show", *H200, "--head-dim", "64", "--mask", "causal", "--config", config.name)
    assert done.stdout == text


@pytest.mark.parametrize(
    ("view", "wanted"),
    [("--ptx", r"\.target sm_80"), ("--sass", r"Function : attention_fwd_d64_causal_bf16_")],
)
def test_show_compiled_code(view: str, wanted: str) -> None:
    assert re.search(wanted, run("show", "--arch", "80", "--head-dim", "64", "--mask", "causal", view).stdout)


def test_show_usage() -> None:
    usage = run_json("show", "--arch", "80", "--head-dim", "64", "--mask", "causal", "--usage")["usage"]
    assert 0 < usage["registers"] <= 255 and usage["threads"] % 32 == 0
    assert 0 < usage["shared_bytes"] <= usage["shared_available"]
    assert usage["arguments"][0] == "Q"


def test_show_diff_is_a_few_header_lines() -> None:
    words = ["show", *H200, "--diff", "m64n64w4s2_pointer_heads", "m128n64w8s3_pointer_heads"]
    changed = [line for line in run(*words).stdout.splitlines() if re.match(r"[+-][^+-]", line)]
    assert "-BLOCK_M = tl.constexpr(64)" in changed and "+BLOCK_M = tl.constexpr(128)" in changed
    assert len(changed) <= 8
    assert run_json(*words)["configs"] == ["m64n64w4s2_pointer_heads", "m128n64w8s3_pointer_heads"]


def test_export_verify_and_a_damaged_file(db: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "ci.bundle"
    made = run_json("export", *H200, "--suite", "ci", "--db", db, "--out", bundle)
    assert made["ok"] and made["records"] >= 2 and made["kernels"] >= 4
    assert "nvidia-h200" in made["target"]
    assert run_json("verify", bundle) == made
    kernels = json.loads((bundle / "manifest.json").read_text())["kernels"]
    facts = [kernel["artifact"]["abi"]["facts"] for kernel in kernels]
    strided = {kernel["family"] for kernel, each in zip(kernels, facts, strict=True) if not each["tma"]}
    assert strided == {"attention_fwd"}, "whatever may be called is served, also without descriptors"
    told = run("export", *H200, "--suite", "ci", "--db", db, "--out", bundle).stderr.splitlines()
    assert [line.split()[1] for line in told] == [f"{n}/{len(told)}" for n in range(1, len(told) + 1)]
    assert len({line.split(maxsplit=2)[2] for line in told}) == len(told), "a kernel's line is its own"
    cubin = next((bundle / "cubins").iterdir())
    content = bytearray(cubin.read_bytes())
    content[100] ^= 1
    cubin.write_bytes(content)
    report = run_json("verify", bundle, code=FAILED)
    assert not report["ok"]
    assert [cubin.name in problem for problem in report["problems"]] == [True]
    printed = run("verify", bundle, code=FAILED).stdout
    assert "damaged" in printed and "1 problem:" in printed


def test_a_folder_that_is_no_bundle_is_refused_before_anything_is_compiled(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(*_: object) -> None:
        pytest.fail("something was compiled")

    monkeypatch.setattr("flashgen.measure.compile_pool.CompilePool", compiles)
    (tmp_path / "thesis.txt").write_text("mine")
    options = ["export", *H200, "--suite", "ci", "--db", str(db), "--out"]
    assert "exists and is not a FlashGen bundle" in run(*options, tmp_path, code=USAGE).stderr
    told = run(*options, tmp_path / "thesis.txt" / "out", code=FAILED).stderr
    assert "thesis.txt is no folder; give another folder" in told
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_doctor_finds_a_healthy_database(db: Path) -> None:
    report = run_json("doctor", "--db", db)
    found = {(f["section"], f["name"]): f for f in report["findings"]}
    assert report["ok"] is True
    assert found["database", "health"]["value"] == "healthy"
    assert found["database", "records"]["value"].endswith("for nvidia-h200")
    assert ("database", "stale") not in found
    assert found["compiler", "ptxas"]["state"] == "ok"
    assert found["settings", "FLASHGEN_TARGET"]["value"].startswith("not set")
    assert "nothing is broken" in run("doctor", "--db", db).stdout


def test_packed_sequences_from_tuning_to_a_bundle(tmp_path: Path) -> None:
    """One spec, one kernel, whatever the lengths: `--varlen` goes all the way."""
    packed = ["--varlen", "4096", "--seq", "1024", "--head-dim", "64", "--heads", "4", "--mask", "causal"]
    where = [*H200, *packed, "--db", tmp_path / "tuning.db"]
    (tuned,) = run_json("tune", *where, "--trials", "2")["workloads"]
    winner = tuned["winner"]
    assert winner["workload"]["spec"]["addressing"] == "varlen"
    assert (winner["workload"]["batch"], winner["workload"]["total_q"]) == (8, 4096)
    assert "packed lengths" in winner["density"]
    explained = run("explain", *where).output
    assert "packed sequences 8" in explained and "q_len 1024 at most, 4096 together" in explained
    assert "exact bucket" in explained
    run("export", *where, "--out", tmp_path / "bundle")
    assert "every hash is right" in run("verify", tmp_path / "bundle").output
    shown = run("show", *where, "--config", "default").stdout
    assert "CU_Q, CU_K" in shown and "def sequence_at" in shown


def test_packed_sequences_that_cannot_be_named() -> None:
    told = run("tune", *H200, "--varlen", "9000", "--seq", "1024", "--batch", "8", code=USAGE).output
    assert "total_q=9000 must be from 0 to 8192" in told
    assert "--varlen 0 must be at least 1" in run("tune", *H200, "--varlen", "0", code=USAGE).output
    assert "leave out --varlen" in run("tune", *H200, "--suite", "ci", "--varlen", "4096", code=USAGE).output
