"""`flashgen tune --dry-run`: the plan is printed, and nothing is touched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import landscape
import pytest
from click.testing import CliRunner, Result

from flashgen.build.device import device_count
from flashgen.build.versions import triton_version
from flashgen.cli.main import main
from flashgen.cli.output import FAILED, USAGE
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import Toolchain, render
from flashgen.measure.compile_pool import CompilePool, default_jobs
from flashgen.spec.attention import CallFacts
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.store.db import TuningDB

SHAPE = ["--head-dim", "128", "--kv-heads", "8", "--seq", "4096", "--mask", "causal"]
SPACE = landscape.space()
SM90 = FAMILIES["attention_fwd_sm90"]


@pytest.fixture(autouse=True)
def no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a dry run makes no compile pool")

    monkeypatch.setattr(CompilePool, "__init__", refused)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["tune", "--dry-run", *words], prog_name="flashgen")


def modelled(index: int) -> Record:
    work, config = landscape.workload(), SPACE[index]
    version = triton_version()
    return Record(
        target=landscape.TARGET,
        workload=work,
        config=config,
        measurement=Measurement(Status.OK, median_us=500.0 + index, source="model"),
        kernel_hash=render(work.spec, config, Toolchain(version)).hash,
        versions=Versions("0.1.0", version),
        admission=landscape.FAMILY.admission(config),
        created_at=f"2026-01-01T00:00:{index:02d}+00:00",
    )


def filled(path: Path, indices: Sequence[int]) -> Path:
    with TuningDB(path) as database:
        database.add_many([modelled(index) for index in indices])
    return path


def as_json(*words: str) -> Any:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_without_a_database_none_is_made(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tuning.db"
    words = ["--target", "nvidia-h200", *SHAPE, "--trials", "30", "--jobs", "1", "--db", str(path)]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert list(tmp_path.iterdir()) == []
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("nvidia-h200 (")
    name = "d128 causal bf16 b4h32kv8q4096k4096"
    assert f"{name} attention_fwd 384 368 (96%) 0 30 45s m128n64w4s2_tma_heads" in lines
    asked = (landscape.workload().spec, landscape.TARGET, CallFacts(), landscape.workload().heads_per_kv)
    configs, feasible = len(SM90.all_configs()), len(SM90.feasible(*asked))
    fitting = f"{configs} {feasible} ({feasible / configs:.0%})"
    assert f"{name} attention_fwd_sm90 {fitting} 0 30 45s {SM90.default(*asked).name}" in lines
    reason = "needs at least 272 to 288 KB of shared memory a block, nvidia-h200 has 227 KB"
    assert f"16 configs of attention_fwd refused: {reason}" in lines
    assert lines[-4:] == [
        "at most 60 trials in about 1m30s",
        "typically 24 to 60 in 36s to 1m30s: guided stops by itself, mostly after 24 to 60 a workload",
        "1.5 s a trial: no earlier run to go by: 1.5 s a compile in 1 at a time",
        "nothing was compiled, measured or written",
    ]


def test_what_is_known_is_not_planned_and_its_winners_come_first(tmp_path: Path) -> None:
    path = filled(tmp_path / "tuning.db", range(20))
    before = path.read_bytes()
    words = ["--target", "nvidia-h200", "--trials", "30", "--db", str(path)]
    same, longer = ("--seq", "4096"), ("--seq", "8192")
    shape = [word for word in SHAPE if word not in same]
    data = as_json(*words, *shape, *same, *longer)
    studies = [study for study in data["studies"] if study["family"] == "attention_fwd"]
    here, there = studies
    newer = [study for study in data["studies"] if study not in studies]
    assert [(study["family"], study["known"], study["trials"]) for study in newer] == [(SM90.name, 0, 30)] * 2
    assert (here["known"], here["trials"], here["feasible"]) == (20, 10, 368)
    assert (there["known"], there["trials"]) == (0, 30)
    assert here["first"] == ["m128n64w4s2_tma_heads"], "its own winners are known"
    assert there["first"][0] == "m128n64w4s2_tma_heads" and SPACE[0].name in there["first"][1:]
    assert (data["seconds_a_trial"], data["seconds"], data["trials"]) == (1.0, 100.0, 100)
    assert data["rests_on"].startswith("the mean of 19 trials")
    page = run(*words, *shape, *same, *longer).stdout
    told = f"winners of other runs, tried first: {', '.join(there['first'][1:])} (d128 causal bf16 b2h32"
    assert told in page and " and 3 winners" in page
    assert path.read_bytes() == before


def test_processes_without_a_core_or_without_work_make_it_no_faster() -> None:
    words = ["--target", "nvidia-a100", *SHAPE, "--jobs"]
    assert as_json(*words, str(10**9))["rests_on"].endswith(f" a compile in {default_jobs()} at a time")


def test_a_budget_is_named() -> None:
    words = ["--target", "nvidia-a100", *SHAPE, "--jobs", "1", "--budget", "1m"]
    assert as_json(*words)["seconds"] == 60.0
    done = run(*words)
    (told,) = [line for line in done.stdout.splitlines() if "at most" in line]
    trials = as_json(*words)["trials"]
    assert told == f"at most {trials} trials; the budget of 1m00s has time for about 40 of them"
    assert "typically 24 to 40 in 36s to 1m00s: guided stops by itself" in done.stdout
    ample = run(*words[:-1], "1h", "--trials", "12").stdout
    assert "at most 12 trials in about 18s, within the budget of 1h00m\n" in ample
    assert "typically" not in ample and "typically" not in run(*words, "--sampler", "tpe").stdout
    assert "192 configs refused: loads by descriptor, which needs sm_90 or newer, not sm_80" in done.stdout


def test_a_wrong_command_line_is_one_here_too() -> None:
    assert run("--target", "nvidia-h200").exit_code == USAGE
    assert "'luck'" in run("--target", "nvidia-h200", *SHAPE, "--sampler", "luck").stderr


@pytest.mark.skipif(device_count() > 0, reason="this machine has a GPU")
def test_without_a_gpu_a_target_must_be_named() -> None:
    done = run(*SHAPE)
    assert done.exit_code == FAILED and "--target NAME" in done.stderr
