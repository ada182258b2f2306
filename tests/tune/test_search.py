"""Which config is tried next."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys

import landscape
import pytest

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec.config import Config
from flashgen.tune.model import expected_us
from flashgen.tune.search import (
    FEWEST,
    PENALTY_FACTOR,
    SAMPLERS,
    UNKNOWN_WORST_US,
    Knowledge,
    Sampler,
    Search,
    _distance,
    _Optuna,
    _tpe,
)

SPACE = landscape.space()
KNOWLEDGE = Knowledge({c: expected_us(landscape.workload(), c, landscape.TARGET) for c in SPACE})


def run(search: Search, trials: int, ahead: int = 1) -> list[Config]:
    """Asks and tells the landscape's times, with some asks in flight; returns the configs in order."""
    flying: list[Config] = []
    asked: list[Config] = []
    while len(asked) < trials or flying:
        while len(flying) < ahead and len(asked) < trials and (config := search.ask()) is not None:
            flying.append(config)
            asked.append(config)
        if not flying:
            break
        config = flying.pop(0)
        search.tell(config, landscape.time_us(config))
    return asked


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "guided"])
@pytest.mark.parametrize("ahead", [1, 8])
def test_a_whole_space_is_asked_once_and_then_nothing(sampler: str, ahead: int) -> None:
    space = SPACE[:: 20 if sampler == "gp" else 3]  # a Gaussian process by scipy takes 0.1 s a trial
    search = Search(space, sampler)
    asked = run(search, 10**6, ahead)
    assert len(asked) == len(set(asked)) == len(space)
    assert set(asked) == set(space)
    assert search.ask() is None and search.left == 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_space_where_some_configs_leave_a_tunable_out(sampler: str) -> None:
    """Splits are written only where there are any; a sampler sees one in each config all the same."""
    whole = SPACE[::40]
    space = [
        landscape.FAMILY.config(**config.to_json(), splits=splits)
        for config in whole
        for splits in (1, 2, 16)
    ]
    times = {config: 100.0 / config.number("splits") + i % 7 for i, config in enumerate(space)}
    search = Search(space, sampler, knowledge=Knowledge(dict.fromkeys(space, 50.0)))
    asked = []
    while (config := search.ask()) is not None:
        search.tell(config, times[config])
        asked.append(config)
    assert len(asked) == len(set(asked)) and min(asked, key=times.__getitem__)["splits"] == 16
    assert set(asked) == set(space) or sampler == "guided"


@pytest.mark.parametrize("ahead", [1, 8])
def test_a_guided_search_stops_when_more_would_not_pay(ahead: int) -> None:
    search = Search(SPACE, "guided", knowledge=KNOWLEDGE)
    asked = run(search, 10**6, ahead)
    assert len(asked) == len(set(asked)) and FEWEST <= len(asked) < len(SPACE) // 4
    assert search.ask() is None and search.left == len(SPACE) - len(asked)
    best = min(time for config in asked if (time := landscape.time_us(config)))
    assert best < 1.01 * landscape.best_us()


def test_failures_teach_a_guided_search_nothing_but_to_go_elsewhere() -> None:
    search = Search(SPACE, "guided", knowledge=KNOWLEDGE)
    failed = [config for _ in range(30) if (config := search.ask()) is not None]
    for config in failed:
        search.tell(config, None)
    assert len(failed) == 30
    asked = run(search, 10**6)
    assert asked and not set(asked) & set(failed)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_seeds_come_first_in_order_and_once(sampler: str) -> None:
    seeds = [SPACE[17], SPACE[5], SPACE[17], SPACE[200]]
    outside = Config("attention_fwd", tuple((n, 512 if n == "block_m" else v) for n, v in SPACE[0].values))
    asked = run(Search(SPACE, sampler, [outside, *seeds]), 14)
    assert asked[:3] == [SPACE[17], SPACE[5], SPACE[200]]
    assert len(set(asked)) == 14


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_known_is_not_asked_again(sampler: str) -> None:
    search = Search(SPACE, sampler, seeds=SPACE[:4])
    for config in SPACE[:100]:
        search.learn(config, landscape.time_us(config))
    assert search.left == len(SPACE) - 100
    assert not set(run(search, 20)) & set(SPACE[:100])


def test_tpe_learns_from_what_earlier_runs_measured() -> None:
    def after(known: int, seed: int) -> float:
        search = Search(SPACE, "tpe", seed=seed)
        for config in random.Random(seed).sample(SPACE, known):
            search.learn(config, landscape.time_us(config))
        times = [landscape.time_us(config) for config in run(search, 10)]
        return statistics.median(time for time in times if time)

    fresh = statistics.median(after(0, seed) for seed in range(5))
    informed = statistics.median(after(60, seed) for seed in range(5))
    assert informed < 0.7 * fresh


class Told:
    """A strategy that proposes in order and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[float | None, float]] = []
        self.penalties: list[float] = []

    def propose(self, unseen: dict[Config, None], penalty_us: float) -> Config | None:
        self.penalties.append(penalty_us)
        return next(iter(unseen))

    def adopt(self, config: Config) -> None:
        pass

    def tell(self, config: Config, time_us: float | None, penalty_us: float) -> None:
        self.told.append((time_us, penalty_us))


def test_a_failure_is_told_as_a_penalty_beyond_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = Told()
    monkeypatch.setitem(SAMPLERS, "told", Sampler(lambda space, seed, knowledge: strategy, "for this test"))
    search = Search(SPACE, "told")
    for time in (None, 800.0, 500.0, None):
        config = search.ask()
        assert config is not None
        search.tell(config, time)
    unknown = PENALTY_FACTOR * UNKNOWN_WORST_US  # nothing is known yet: worse than anything real
    worse = PENALTY_FACTOR * 800.0
    assert strategy.told == [(None, unknown), (800.0, worse), (500.0, worse), (None, worse)]
    assert strategy.penalties == [unknown, unknown, worse, worse]


def test_a_search_that_stopped_may_go_on_after_the_next_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Told):
        def propose(self, unseen: dict[Config, None], penalty_us: float) -> Config | None:
            return next(iter(unseen)) if len(self.told) != 1 else None

    monkeypatch.setitem(SAMPLERS, "waits", Sampler(lambda space, seed, knowledge: Waits(), "for this test"))
    search = Search(SPACE, "waits")
    first, second = search.ask(), search.ask()
    assert first is not None and second is not None
    search.tell(first, 5.0)
    assert search.ask() is None and search.left == len(SPACE) - 2
    search.tell(second, 6.0)
    assert search.ask() == SPACE[2]


def test_infeasible_proposals_are_told_a_penalty_and_the_nearest_config_is_tried() -> None:
    """A quarter of the rectangle is feasible; an Optuna that hears of it soon proposes little else."""
    space = [c for c in SPACE if c.number("block_m") >= 64 and c["loads"] == "tma"]
    space += [SPACE[1], SPACE[2]]  # so that the rectangle still spans everything
    assert {c["loads"] for c in space} == {"tma", "pointer"}
    strategy = _Optuna(space, _tpe, seed=0)
    unseen = dict.fromkeys(space)
    for _ in range(60):
        config = strategy.propose(unseen, 6000.0)
        del unseen[config]
        strategy.tell(config, landscape.time_us(config), 5000.0)
    trials = strategy._study.trials
    infeasible = [t for t in trials if t.value == 6000.0]
    assert len(unseen) == len(space) - 60
    assert all(t.state.name == "COMPLETE" for t in infeasible), "failed trials would teach TPE nothing"
    early, late = (
        sum(t.number < 40 for t in infeasible),
        sum(t.number >= len(trials) - 40 for t in infeasible),
    )
    assert late < early / 2, f"{early} of the first 40 asks were infeasible, {late} of the last"


def test_the_nearest_config_stands_in_for_a_repetition() -> None:
    a = landscape.FAMILY.find("m128n64w4s2_tma_heads").values
    for name, distance in (
        ("m128n64w4s2_tma_heads", 0),
        ("m64n64w4s2_tma_heads", 1),
        ("m16n64w4s2_tma_heads", 3),
        ("m128n64w4s2_pointer_heads", 1),
        ("m128n64w8s4_tma_rows", 3),
    ):
        assert _distance(a, landscape.FAMILY.find(name).values) == distance


def test_tpe_finds_the_best_with_a_quarter_of_the_space_and_random_does_not() -> None:
    best = landscape.best_us()

    def loss(sampler: str, seed: int) -> float:
        asked = run(Search(SPACE, sampler, seed=seed), len(SPACE) // 4, ahead=8)
        times = [landscape.time_us(config) for config in asked]
        return min(time for time in times if time) / best - 1

    losses = sorted(loss("tpe", seed) for seed in range(8))
    assert statistics.median(losses) < 0.01
    assert losses[-1] < 0.02
    assert statistics.median(loss("random", seed) for seed in range(8)) > statistics.median(losses)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_asks_for_the_same(sampler: str) -> None:
    first, again, other = (run(Search(SPACE, sampler, seed=seed), 14) for seed in (3, 3, 4))
    assert first == again
    assert (first == other) == (sampler == "grid")


def test_an_unknown_sampler_lists_the_known() -> None:
    with pytest.raises(
        UnknownName, match="unknown sampler 'anneal'; known: gp, grid, guided, random, tpe"
    ) as caught:
        Search(SPACE, "anneal")
    assert isinstance(caught.value, InvalidArgument)


def test_grid_and_random_need_no_optuna_and_nothing_logs() -> None:
    script = (
        "import sys, landscape\n"
        "from flashgen.tune.search import Search\n"
        "s = Search(landscape.space(), 'random'); s.tell(s.ask(), 5.0)\n"
        "assert 'optuna' not in sys.modules\n"
        "s = Search(landscape.space(), 'tpe')\n"
        "for _ in range(15): s.tell(s.ask(), None)\n"
    )
    import os

    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
