"""Two families that serve one workload: each has its study, and the finalists of both meet."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import landscape
import pytest

from flashgen.build.inputs import contiguous_facts
from flashgen.codegen.families import FAMILIES, serving
from flashgen.errors import InvalidArgument, Unsupported
from flashgen.measure.replay import NoCompiler, Replay
from flashgen.spec.config import Config
from flashgen.spec.record import Record
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.tune.dry_run import dry_run
from flashgen.tune.plan import Plan
from flashgen.tune.prior import families_for
from flashgen.tune.simulate import simulate
from flashgen.tune.suites import SUITES, suite_workloads
from flashgen.tune.tuner import tune

SM90 = FAMILIES["attention_fwd_sm90"]
WORK = landscape.workload()
DEFAULTS = tuple(
    family.default(WORK.spec, landscape.TARGET, contiguous_facts(WORK), WORK.heads_per_kv)
    for family in (SM90, landscape.FAMILY)
)


@pytest.fixture(autouse=True)
def _one_family() -> None:
    """Both families stay in the table here."""


def newer_space() -> tuple[Config, ...]:
    return SM90.feasible(WORK.spec, landscape.TARGET, contiguous_facts(WORK), WORK.heads_per_kv)


def newer(least_us: float) -> list[Record]:
    """Made-up records of the Hopper family, none faster than `least_us`."""
    # All with the kernel of one: rendering thousands takes a minute, and a replay does not ask.
    like = landscape.record(WORK, newer_space()[0], least_us)
    slower = {config: hashlib.sha256(config.name.encode()).digest()[0] / 255 for config in newer_space()}
    return [
        replace(
            like,
            config=config,
            measurement=replace(like.measurement, median_us=least_us * (1 + share)),
            admission=SM90.admission(config),
        )
        for config, share in slower.items()
    ]


@pytest.mark.parametrize("winning", ["attention_fwd", "attention_fwd_sm90"])
def test_each_family_is_studied_and_the_fastest_of_all_wins(winning: str, tmp_path: Path) -> None:
    least_us = landscape.best_us() * (0.5 if winning == SM90.name else 3.0)
    records = [*landscape.records(), *newer(least_us)]
    with TuningDB(tmp_path / "tuning.db") as store:
        (summary,) = tune(
            [WORK],
            store=store,
            target=landscape.TARGET,
            measurers={"the replay": Replay(records, 0.0, 0)},
            compiler=NoCompiler(landscape.TOOLCHAIN),
            versions=landscape.VERSIONS,
            plan=Plan(trials=12),
        ).summaries
        stored = list(store.records())
    assert summary.problem == "" and summary.winner is not None
    assert summary.winner.config.family == winning
    assert summary.space == len(landscape.space()) + len(newer_space())
    tried = {record.config for record in stored}
    assert Counter(config.family for config in tried) == {"attention_fwd": 12, "attention_fwd_sm90": 12}
    assert set(DEFAULTS) <= tried


def test_a_plan_may_name_the_families() -> None:
    served = families_for(WORK, landscape.TARGET, Plan())
    assert [family.name for family in served] == ["attention_fwd_sm90", "attention_fwd"]
    plan = Plan(families=("attention_fwd",))
    assert families_for(WORK, landscape.TARGET, plan) == (landscape.FAMILY,)
    with pytest.raises(Unsupported, match="of the families attention_fwd_sm90 none serves this"):
        families_for(WORK, find_target("nvidia-a100"), Plan(families=("attention_fwd_sm90",)))


def test_a_dry_run_tells_of_each_study(tmp_path: Path) -> None:
    with TuningDB(tmp_path / "tuning.db") as store:
        found = dry_run(
            [WORK],
            store=store,
            target=landscape.TARGET,
            source="measured",
            compiler=NoCompiler(landscape.TOOLCHAIN),
            versions=landscape.VERSIONS,
            jobs=1,
            plan=Plan(trials=12),
        )
    assert [(study.family, study.trials, study.first) for study in found.studies] == [
        (config.family, 12, (config,)) for config in DEFAULTS
    ]
    assert found.problems == () and found.trials == 24


def test_a_simulation_searches_the_families_that_are_recorded() -> None:
    portable, both = (
        simulate(records, ["random"], seeds=1, trials=6)
        for records in (landscape.records(), [*landscape.records(), *newer(400.0)])
    )
    ((alone,), (together,)) = portable.landscapes, both.landscapes
    assert (alone.space, alone.defaults) == (len(landscape.space()), DEFAULTS[1:])
    assert (together.space, together.defaults) == (alone.space + len(newer_space()), DEFAULTS)
    assert [each.scores[0].runs[0].trials for each in (portable, both)] == [6, 12]
    (run,) = portable.scores[0].runs
    assert run.winner is not None and run.winner.family == "attention_fwd"


def test_a_part_of_a_family_counts_as_a_part_of_the_space() -> None:
    records = [*landscape.records(), newer(400.0)[0]]
    with pytest.raises(InvalidArgument, match=f"369 of {368 + len(newer_space())} feasible configs"):
        simulate(records, ["random"], seeds=1)


def test_8_bit_suites_are_the_hopper_familys_alone() -> None:
    names = [name for name in SUITES if suite_workloads(name)[0].spec.dtype == "e4m3"]
    assert names and all(SUITES[name].help for name in names)
    for workload in (workload for name in names for workload in SUITES[name].workloads()):
        assert serving(workload.spec, find_target("nvidia-h200")) == (SM90,)
        with pytest.raises(Unsupported, match=r"attention_fwd_sm90 needs sm_90.* not e4m3"):
            serving(workload.spec, find_target("nvidia-a100"))
