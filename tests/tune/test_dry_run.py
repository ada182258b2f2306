"""What a dry run foretells is what the run does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import landscape
import pytest

from flashgen.codegen.source import Toolchain
from flashgen.measure.replay import NoCompiler, Replay
from flashgen.measure.worker import Trial
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.masks import full
from flashgen.spec.record import Measurement, Record, Status
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.store.today import current_hash
from flashgen.tune.dry_run import (
    COMPILE_S,
    ENOUGH,
    MEASURE_S,
    PAUSE_S,
    DryRun,
    Pace,
    dry_run,
    expected_pace,
    grouped,
    pace_of,
)
from flashgen.tune.plan import Plan
from flashgen.tune.result import Summary
from flashgen.tune.search import SAMPLERS
from flashgen.tune.tuner import tune

SPACE = landscape.space()
DEFAULT = landscape.FAMILY.find("m128n64w4s2_tma_heads")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TuningDB]:
    with TuningDB(tmp_path / "tuning.db", current_hash=current_hash) as opened:
        yield opened


def asked(store: TuningDB, *workloads: Workload, **options: Any) -> DryRun:
    plan = {key: options.pop(key) for key in tuple(options) if key in Plan.__slots__}
    given: dict[str, Any] = {
        "store": store,
        "target": landscape.TARGET,
        "source": "measured",
        "compiler": NoCompiler(landscape.TOOLCHAIN),
        "versions": landscape.VERSIONS,
        "jobs": 2,
        "plan": Plan(**plan),
    }
    return dry_run(workloads or (landscape.workload(),), **given | options)


class Noted(Replay):
    """A replay that notes what it was asked."""

    def __init__(self, records: Sequence[Record]) -> None:
        super().__init__(records)
        self.asked: list[Config] = []

    def measure(self, trial: Trial) -> Measurement:
        self.asked.append(trial.config)
        return super().measure(trial)


def tuned(store: TuningDB, **plan: Any) -> tuple[Summary, list[Config]]:
    measurer = Noted(landscape.records())
    result = tune(
        [landscape.workload()],
        store=store,
        target=landscape.TARGET,
        measurers={"GPU 0": measurer},
        compiler=NoCompiler(landscape.TOOLCHAIN),
        versions=landscape.VERSIONS,
        plan=Plan(sampler="random", **plan),
    )
    return result.summaries[0], measurer.asked


def test_an_empty_database(store: TuningDB) -> None:
    found = asked(store, trials=40)
    (study,) = found.studies
    everything = len(landscape.FAMILY.all_configs())
    assert (study.family, study.configs, study.feasible) == ("attention_fwd", everything, len(SPACE))
    assert study.refused == {
        "needs at least 272 to 288 KB of shared memory a block, nvidia-h200 has 227 KB": everything
        - len(SPACE)
    }
    assert (study.first, study.known, study.trials) == ((DEFAULT,), 0, 40)
    assert found.pace == expected_pace("measured", 2)
    assert (found.trials, found.seconds) == (40, pytest.approx(40 * COMPILE_S / 2))


def test_it_foretells_what_the_run_then_does(store: TuningDB) -> None:
    tuned(store, trials=12, seed=1)
    for config, time in ((SPACE[40], 900.0), (SPACE[41], 950.0)):
        elsewhere = landscape.record(landscape.workload(), config, time)
        store.add(replace(elsewhere, target=find_target("nvidia-h100-pcie")))
    (study,) = asked(store, sampler="random", trials=30, seed=2).studies
    summary, measured = tuned(store, trials=30, seed=2)
    assert (study.known, study.trials, study.feasible) == (12, 18, len(SPACE))
    assert (summary.resumed, summary.trials, summary.space) == (12, 18, len(SPACE))
    assert sum(study.refused.values()) == summary.refused
    assert study.first == (SPACE[40], SPACE[41]), "the default is known, as are this GPU's winners"
    assert tuple(measured[:2]) == study.first


def test_when_all_is_known_nothing_is_left(store: TuningDB) -> None:
    for record in landscape.records():
        store.add(record)
    found = asked(store, sampler="grid")
    (study,) = found.studies
    assert (study.known, study.trials, study.first) == (len(SPACE), 0, ())
    assert (found.trials, found.seconds) == (0, 0)


def test_records_of_another_source_or_kernel_are_not_known(store: TuningDB) -> None:
    for config in SPACE[:6]:
        store.add(landscape.record(landscape.workload(), config, 500.0))
    assert [study.known for study in asked(store).studies] == [6]
    assert [study.known for study in asked(store, source="model").studies] == [0]
    other = NoCompiler(Toolchain("3.6.0", interpret=True))
    known = {study.known for study in asked(store, compiler=other).studies}
    assert known == {0}, "the interpreter's kernels are other ones"


def test_each_workload_has_a_study_and_a_limit_holds_for_each(store: TuningDB) -> None:
    works = [landscape.workload(), landscape.workload(mask=full()), landscape.workload(1024)]
    found = asked(store, *works, sampler="grid")
    assert [study.workload for study in found.studies] == works
    assert [study.trials for study in found.studies] == [len(SPACE)] * 3
    assert found.trials == 3 * len(SPACE)


def test_a_budget_ends_it_earlier(store: TuningDB) -> None:
    found = asked(store, sampler="grid", budget_s=60.0)
    assert found.trials * found.pace.seconds > 60
    assert (found.seconds, found.to_json()["budget_s"]) == (60.0, 60.0)
    assert (found.in_time, found.typical) == (int(60 / found.pace.seconds), None), "a grid stops nowhere"
    assert asked(store, trials=4, budget_s=60.0).seconds == pytest.approx(4 * found.pace.seconds)


def test_a_strategy_that_stops_by_itself_usually_takes_less(store: TuningDB) -> None:
    works = [landscape.workload(), landscape.workload(1024)]
    least, most = SAMPLERS["guided"].typical or (0, 0)
    found = asked(store, *works, trials=100)
    assert (found.trials, found.in_time, found.typical) == (200, 200, (2 * least, 2 * most))
    assert asked(store, *works, trials=least + 6).typical == (2 * least, 2 * least + 12)
    assert asked(store, *works, trials=least).typical is None
    short = asked(store, *works, budget_s=(2 * least + 2.5) * found.pace.seconds)
    assert (short.in_time, short.typical) == (2 * least + 2, (2 * least, 2 * least + 2))
    data = short.to_json()
    assert (data["trials_in_time"], data["typical_trials"]) == (2 * least + 2, [2 * least, 2 * least + 2])
    assert asked(store, *works, trials=100, sampler="tpe").to_json()["typical_trials"] is None


def test_what_no_family_serves_is_told(store: TuningDB) -> None:
    found = asked(store, target=replace(landscape.TARGET, vendor="hip"))
    ((workload, problem),) = found.problems
    assert workload == landscape.workload() and "no kernel family serves this" in problem
    assert (found.studies, found.trials) == ((), 0)


def test_reasons_of_an_older_gpu(store: TuningDB) -> None:
    (study,) = asked(store, target=find_target("nvidia-a10")).studies
    half = len(landscape.FAMILY.all_configs()) // 2
    assert next(iter(study.refused)) == "loads by descriptor, which needs sm_90 or newer, not sm_86"
    assert study.refused.pop("loads by descriptor, which needs sm_90 or newer, not sm_86") == half
    ((reason, times),) = study.refused.items()
    assert reason.startswith("needs at least ") and reason.endswith(", nvidia-a10 has 99 KB")
    assert times == half - study.feasible


def test_texts_that_differ_in_numbers_are_one() -> None:
    texts = ["10 KB of 99", "no", "8.5 KB of 99", "9 KB of 99", "sm_80"]
    assert grouped(texts) == {"8.5 to 10 KB of 99": 3, "no": 1, "sm_80": 1}
    assert next(iter(grouped(texts))) == "8.5 to 10 KB of 99"


# The time


def made(seconds: Sequence[float], workload: Workload | None = None, **changes: Any) -> list[Record]:
    """Records of one workload, made at these seconds of a day."""
    day = datetime(2026, 1, 1, tzinfo=timezone.utc)
    work = workload or landscape.workload()
    return [
        replace(
            landscape.record(work, config, 500.0),
            created_at=(day + timedelta(seconds=at)).isoformat(),
            **changes,
        )
        for config, at in zip(SPACE, seconds, strict=False)
    ]


def test_the_pace_is_that_of_earlier_runs(store: TuningDB) -> None:
    times = [0.0, 0.5, 1.0, 2.0, 2.5, 3.5, 4.0, 5.0, 5.0 + 2 * PAUSE_S, 5.5 + 2 * PAUSE_S]
    for record in made(times):
        store.add(record)
    found = asked(store, trials=30)
    assert found.pace.seconds == pytest.approx(5.5 / 8), "the pause between two runs is no trial"
    assert found.pace.rests_on == "the mean of 8 trials that the database has of such a GPU"
    assert found.seconds == pytest.approx(20 * 5.5 / 8)
    assert asked(store, source="model").pace == expected_pace("model", 2)


def test_records_of_other_workloads_are_not_neighbours() -> None:
    mixed = made([float(i) for i in range(0, 20, 2)]) + made(
        [float(i) for i in range(1, 21, 2)], landscape.workload(1024)
    )
    pace = pace_of(mixed)
    assert pace is not None and pace.seconds == 2.0
    winners = [record for i in range(20) for record in made([i], landscape.workload(64 << (i % 7)))]
    assert pace_of(winners[: 2 * (ENOUGH - 1)]) is None, "a database of winners alone tells no pace"


@pytest.mark.parametrize("created_at", ["", "yesterday", "2026-01-01T00:00:00Z"])
def test_records_without_a_time_tell_no_pace(created_at: str) -> None:
    assert pace_of(replace(r, created_at=created_at) for r in made(range(20))) is None


def test_a_time_without_a_zone_is_utc() -> None:
    naive = [replace(r, created_at=r.created_at.replace("+00:00", "")) for r in made(range(10))]
    assert pace_of([*naive[:5], *made(range(10))[5:]]) == Pace(
        1.0, "the mean of 9 trials that the database has of such a GPU"
    )


def test_the_pace_without_any_record() -> None:
    assert expected_pace("measured", 2).seconds == COMPILE_S / 2
    assert expected_pace("measured", 16).seconds == MEASURE_S, "the GPU is what is waited for"
    assert expected_pace("model", 16).seconds == COMPILE_S / 16
    assert "0.2 s a measurement" in expected_pace("measured", 4).rests_on
    assert "measurement" not in expected_pace("model", 4).rests_on
    assert "1.5 s a compile in 4 at a time" in expected_pace("model", 4).rests_on


def test_json(store: TuningDB) -> None:
    store.add(replace(landscape.record(landscape.workload(), SPACE[0], 500.0)))
    wrong = Measurement(Status.WRONG, reason="max error 0.3")
    store.add(replace(landscape.record(landscape.workload(), SPACE[1], 500.0), measurement=wrong))
    data = asked(store, trials=10).to_json()
    (study,) = data["studies"]
    assert (study["known"], study["trials"], study["first"]) == (2, 8, [DEFAULT.name])
    assert study["share"] == len(SPACE) / study["configs"]
    assert study["seconds"] == data["seconds"] == pytest.approx(8 * data["seconds_a_trial"])
