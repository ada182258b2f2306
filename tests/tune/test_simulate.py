"""Simulated tuning over recorded spaces: its figures are those of the records and of the tuner itself."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen.source import Toolchain
from flashgen.errors import InvalidArgument, UnknownName
from flashgen.measure.compile_pool import AHEAD
from flashgen.measure.replay import NoCompiler, Replay
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Record, Status
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.store.transfer import read_records
from flashgen.tune import simulate as module
from flashgen.tune.plan import Plan
from flashgen.tune.search import SAMPLERS, Sampler
from flashgen.tune.simulate import Run, Score, simulate
from flashgen.tune.tuner import tune

DATA = Path(__file__).parent.parent / "data" / "exhaustive"


@lru_cache
def recorded(name: str = "d64_causal_1024") -> tuple[Record, ...]:
    return tuple(read_records([DATA / f"{name}.jsonl"]))


def times(name: str = "d64_causal_1024") -> dict[str, float]:
    """Microseconds of the configs that are right, read without FlashGen's own reader."""
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    good = [row for row in rows if row["measurement"]["status"] == "OK"]
    names = [Config.from_json(row["family"], row["config"]).name for row in good]
    return dict(zip(names, (row["measurement"]["median_us"] for row in good), strict=True))


def changed(records: Sequence[Record], status: Status) -> list[Record]:
    return [replace(r, measurement=Measurement(status, reason="made so")) for r in records]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_run_is_one_of_the_tuner_itself(sampler: str) -> None:
    records = recorded()
    (alone, _) = simulate(records, [sampler], trials=20, seeds=2).scores
    for run in alone.runs:
        with TuningDB("sqlite://") as store:
            (summary,) = tune(
                [records[0].workload],
                store=store,
                target=records[0].target,
                measurers={"the replay": Replay(records)},
                compiler=NoCompiler(Toolchain("3.6.0"), AHEAD),
                versions=records[0].versions,
                plan=Plan(sampler=sampler, trials=20, seed=run.seed),
            ).summaries
        assert summary.winner is not None
        assert (run.winner, run.trials) == (summary.winner.config, summary.trials)
    assert [run.seed for run in alone.runs] == [0, 1]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_winner_is_judged_by_its_recorded_time(noise: float) -> None:
    names = ("d64_causal_1024", "d128_full_1024")
    found = simulate([*recorded(names[0]), *recorded(names[1])], ["random"], seeds=4, noise=noise)
    *each, together = found.scores
    assert [score.workload for score in each] == [recorded(name)[0].workload for name in names]
    for name, score, landscape in zip(names, each, found.landscapes, strict=True):
        known = times(name)
        for run in score.runs:
            assert run.winner is not None
            assert run.slower == pytest.approx(known[run.winner.name] / min(known.values()) - 1, abs=1e-12)
            assert run.trials == int(0.1 * landscape.space)
            assert run.share == run.trials / landscape.space
        assert landscape.best_us == min(known.values()) == known[landscape.best.name]
        assert landscape.covered == 1
        assert {run.winner for run in score.runs} != {landscape.best}, "a tenth of a space at random"
    assert together.workload is None and together.runs == each[0].runs + each[1].runs


def test_noise_changes_what_wins() -> None:
    quiet, noisy = (simulate(recorded(), ["random"], seeds=6, noise=noise) for noise in (0.0, 0.2))
    assert [run.winner for run in quiet.scores[0].runs] != [run.winner for run in noisy.scores[0].runs]
    assert noisy.scores[0].worst > quiet.scores[0].worst
    whole = simulate(recorded(), ["grid"], share=1, seeds=4, noise=0.2).scores[0]
    assert len({run.winner for run in whole.runs}) > 1, "each run has noise of its own"


def test_the_same_again_is_the_same() -> None:
    runs = [simulate(recorded(), ["tpe"], seeds=2, trials=16, noise=0.03).scores for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_whole_space_holds_the_best() -> None:
    found = simulate(recorded(), ["grid"], share=1, seeds=1)
    (alone, _) = found.scores
    assert (alone.median, alone.worst, alone.found, alone.trials, alone.share) == (0, 0, 1, 384, 1)


def test_the_default_is_judged_too() -> None:
    (landscape,) = simulate(recorded("d128_full_1024"), ["random"], trials=1, seeds=1).landscapes
    known = times("d128_full_1024")
    assert landscape.defaults[0].name == "m128n64w4s2_tma_heads"
    assert landscape.default_slower == known["m128n64w4s2_tma_heads"] / min(known.values()) - 1


def test_figures_of_runs() -> None:
    slower = [0.01 * (i // 2) for i in range(20)]  # twice each of 0 to 9 %
    runs = tuple(Run(i, None, each, 30 + i, 0.1 + 0.01 * i) for i, each in enumerate(reversed(slower)))
    score = Score("mine", None, runs)
    assert (score.median, score.p95, score.worst) == pytest.approx((0.045, 0.09, 0.09))
    assert (score.found, score.trials, score.share) == (2, 39.5, pytest.approx(0.195))
    last = replace(score, runs=(*runs[1:], replace(runs[0], slower=math.inf)))
    assert (last.p95, last.worst) == (pytest.approx(0.09), math.inf), "one of twenty is beyond 95 %"
    assert Score("mine", None, runs[-1:]).p95 == runs[-1].slower


def test_no_right_config_among_the_tried_means_no_winner() -> None:
    best = min(recorded(), key=lambda record: record.median_us)
    data = [*changed(recorded(), Status.WRONG), best]
    (alone, _) = simulate(data, ["random"], trials=3, seeds=3).scores
    assert [(run.winner, run.slower) for run in alone.runs] == [(None, math.inf)] * 3
    assert (alone.found, alone.trials) == (0, 3)


def test_of_two_records_of_a_config_the_last_counts() -> None:
    first = recorded()[5]
    measurement = Measurement(Status.OK, median_us=1.5, passes=9)
    last = replace(first, measurement=measurement, created_at="2020-01-01T00:00:00+00:00")
    (landscape,) = simulate([*recorded(), last], ["random"], trials=1, seeds=1).landscapes
    assert (landscape.best, landscape.best_us) == (first.config, 1.5)
    (landscape,) = simulate([last, *recorded()], ["random"], trials=1, seeds=1).landscapes
    assert landscape.best_us == min(times().values())


def test_a_few_missing_configs_cannot_be_tried_with_success() -> None:
    held = sorted(recorded(), key=lambda record: record.median_us)[19:]
    found = simulate(held, ["random"], share=0.5, seeds=2)
    (landscape,) = found.landscapes
    assert (landscape.space, len(landscape.records)) == (384, 365)
    assert landscape.best_us == sorted(times().values())[19]
    assert all(run.winner in {record.config for record in held} for run in found.scores[0].runs)
    assert found.to_json()["workloads"][0]["recorded"] == 365


def modelled(records: Sequence[Record]) -> list[Record]:
    return [replace(r, measurement=replace(r.measurement, source="model")) for r in records]


def elsewhere(records: Sequence[Record]) -> list[Record]:
    return [*records[1:], replace(records[0], target=find_target("nvidia-a100"))]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda r: (), ["no measured record", "--sampler grid", "db export"]),
        (modelled, ["no measured record"]),
        (elsewhere, ["2 GPUs", "nvidia-h200 (", "nvidia-a100 ("]),
        (lambda r: r[:345], ["345 of 384", "89.8%", "at least 90%", "b16h32kv8q1024k1024", "--sampler grid"]),
        (lambda r: changed(r, Status.WRONG), ["no recorded config", "is right"]),
        (lambda r: changed(r, Status.SLOW), ["no recorded config", "is right"]),
    ],
    ids=["none", "of a model", "two GPUs", "too few", "all wrong", "all slow"],
)
def test_what_cannot_be_replayed_is_refused(make: Any, said: list[str]) -> None:
    with pytest.raises(InvalidArgument) as error:
        simulate(make(recorded()), ["random"])
    assert all(text in str(error.value) for text in said), error.value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"trials": math.nan}, "trials=nan must be a whole number, at least 1"),
        ({"seeds": 0}, "seeds=0 must be at least 1"),
        ({"seeds": 1.5}, "seeds=1.5 must be a whole number"),
        ({"ahead": 0}, "ahead=0 must be at least 1"),
        ({"share": 0.0}, "share=0.0 must be more than 0 and at most 1"),
        ({"share": 1.5}, "share=1.5 must be more than 0 and at most 1"),
        ({"share": math.nan}, "share=nan must be"),
        ({"noise": -0.1}, "noise=-0.1 must be at least 0"),
        ({"noise": math.nan}, "noise=nan must be"),
        ({"trials": 9, "share": 0.5}, "leave out one"),
    ],
    ids=str,
)
def test_numbers_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        simulate(recorded(), ["random"], **options)


def test_an_unknown_sampler() -> None:
    with pytest.raises(UnknownName, match="unknown sampler 'luck'"):
        simulate(recorded(), ["random", "luck"])


class Last:
    """A sampler that was added: from the last config to the first."""

    def propose(self, unseen: dict[Config, None], *_: Any) -> Config:
        return next(reversed(unseen))

    def adopt(self, config: Config) -> None:
        pass

    def tell(self, *_: Any) -> None:
        pass


def test_a_new_row_is_simulated_without_being_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"last": Sampler(lambda *_: Last(), "mine"), "whole": Sampler(lambda *_: Last(), "", True)}
    for name in tuple(SAMPLERS):
        monkeypatch.delitem(SAMPLERS, name)
    for name, row in rows.items():
        monkeypatch.setitem(SAMPLERS, name, row)
    found = simulate(recorded(), trials=4, seeds=1, plan=Plan(sampler="last"))
    assert [score.sampler for score in found.scores] == ["last", "last"]
    assert (found.scores[0].trials, found.left_out) == (4, ())


def test_a_sampler_that_cannot_run_here_is_left_out_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str) -> None:
        if name == "tpe":
            raise InvalidArgument("sampler tpe needs what is not installed")

    monkeypatch.setattr(module, "check_sampler", check)
    found = simulate(recorded(), trials=2, seeds=1)
    assert found.left_out == (("tpe", "sampler tpe needs what is not installed"),)
    assert "tpe" not in {score.sampler for score in found.scores}
    assert "random" in {score.sampler for score in found.scores}
    with pytest.raises(InvalidArgument, match="needs what is not installed"):
        simulate(recorded(), ["random", "tpe"], trials=2, seeds=1)


def test_progress_and_json() -> None:
    told: list[tuple[int, int, str]] = []
    found = simulate(
        recorded(),
        ["random", "tpe", "random"],
        trials=3,
        seeds=2,
        progress=lambda done, total, score: told.append((done, total, score.sampler)),
    )
    assert told == [(1, 2, "random"), (2, 2, "tpe")]
    data = json.loads(json.dumps(found.to_json()))
    assert [(score["sampler"], score["workload"] is None) for score in data["scores"]] == [
        ("random", False),
        ("random", True),
        ("tpe", False),
        ("tpe", True),
    ]
    first, together = data["scores"][:2]
    assert (first["of"], first["trials"], len(first["runs"]), together["runs"]) == (2, 3, 2, [])
    assert first["runs"][1]["seed"] == 1 and data["target"]["name"] == "nvidia-h200"


def test_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Measurement:
        raise KeyboardInterrupt

    monkeypatch.setattr(Replay, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(recorded(), ["random"], trials=2, seeds=1)


def test_the_guided_search_finds_the_best_with_a_tenth_of_the_space_on_noisy_timings() -> None:
    """scripts/bench_tuner.py measures 20 runs of each; these few are all within 3 %."""
    records = [record for file in sorted(DATA.glob("*.jsonl")) for record in read_records([file])]
    result = simulate(records, ["guided"], seeds=4, noise=0.02)
    assert len(result.landscapes) == 4
    for score in result.scores[:4]:
        assert all(run.share <= 0.1 for run in score.runs)
        assert max(run.slower for run in score.runs) < 0.03
    assert result.scores[-1].median < 0.01
