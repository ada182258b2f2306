"""Search: which config to try next. Lives in the tuner's process; knows no GPU and no kernel."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec.config import Config, Value, tunables_of

PENALTY_FACTOR = 2.0
"""A config that failed or cannot exist counts as this many times the slowest one measured so far."""
UNKNOWN_WORST_US = 1e6
PAYS = 0.003
"""Where the best config left promises less than this share of the best time, more trials do not pay."""
FEWEST = 12
"""Trials of a study before that is believed."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of a space before anything was measured; both may be empty."""

    expected_us: Mapping[Config, float] = field(default_factory=dict)
    """What the cost model expects of each config; infinite where it sees no chance."""
    nearby: Mapping[Config, float] = field(default_factory=dict)
    """log(measured / expected) at the nearest workload of the same spec."""
    error: float = 0.30
    """How far off the expectations usually are, of the logarithm of time."""
    bar_us: float = math.inf
    """The best time that configs outside the space reached: what a trial has to improve on."""


class Strategy(Protocol):
    """Proposes configs of a finite space. It may propose any; `Search` keeps the books."""

    def propose(self, unseen: dict[Config, None], penalty_us: float) -> Config | None:
        """The next config, one of `unseen`, which is not empty and in the order of the space.

        `penalty_us` is what a config counts as that cannot exist. None: no more trial is expected to pay, as
        far as what was told goes.
        """

    def adopt(self, config: Config) -> None:
        """`config` will be tried next though it was not proposed."""

    def tell(self, config: Config, time_us: float | None, penalty_us: float) -> None:
        """The time of a config that was proposed, adopted, or is known from an earlier run; None: it failed,
        which may count as `penalty_us`."""


class Search:
    """The search of one study: every config of the space at most once, seeds first.

    Args:
        space: the feasible configs, enumerated; all are of one family.
        sampler: a row of `SAMPLERS`.
        seeds: configs to try first; those outside the space are dropped.
        seed: of every random choice; two searches told the same outcomes ask for the same configs.
        knowledge: for samplers that use it.
    """

    def __init__(
        self,
        space: Sequence[Config],
        sampler: str = "guided",
        seeds: Sequence[Config] = (),
        seed: int = 0,
        knowledge: Knowledge | None = None,
    ) -> None:
        check_sampler(sampler)
        self._unseen = dict.fromkeys(space)
        self._strategy = SAMPLERS[sampler].make(tuple(self._unseen), seed, knowledge or Knowledge())
        self._seeds = [config for config in dict.fromkeys(seeds) if config in self._unseen]
        self._worst_us = 0.0

    @property
    def left(self) -> int:
        """How many feasible configs were not asked yet."""
        return len(self._unseen)

    def ask(self) -> Config | None:
        """A config that was neither asked nor learnt before; None when none is left, or none that would pay:
        then asking again after the next `tell` may give one."""
        if not self._unseen:
            return None
        config = next((seed for seed in self._seeds if seed in self._unseen), None)
        if config is not None:
            self._strategy.adopt(config)
        else:
            config = self._strategy.propose(self._unseen, self._penalty_us)
            if config is None:
                return None
        del self._unseen[config]
        return config

    def tell(self, config: Config, time_us: float | None) -> None:
        """The time of a config that was asked; None for a failure, which counts as a penalty."""
        if time_us is not None:
            self._worst_us = max(self._worst_us, time_us)
        self._strategy.tell(config, time_us, self._penalty_us)

    @property
    def _penalty_us(self) -> float:
        return PENALTY_FACTOR * (self._worst_us or UNKNOWN_WORST_US)

    def learn(self, config: Config, time_us: float | None) -> None:
        """An outcome of an earlier run: told like any, and the config is not asked again."""
        if config in self._unseen:
            del self._unseen[config]
            self.tell(config, time_us)


# Strategies


class _InOrder:
    """The space from first to last, shuffled or not; learns nothing."""

    def __init__(self, space: Sequence[Config], shuffle: random.Random | None = None) -> None:
        self._order = list(space)
        if shuffle is not None:
            shuffle.shuffle(self._order)

    def propose(self, unseen: dict[Config, None], penalty_us: float) -> Config:
        return next(config for config in self._order if config in unseen)

    def adopt(self, config: Config) -> None:
        pass

    def tell(self, config: Config, time_us: float | None, penalty_us: float) -> None:
        pass


class _Guided:
    """Where the surrogate expects the most, until that is too little.

    It starts from the cost model's ranking, corrects it by what is measured, and asks for the config with the
    largest expected improvement. What failed is not asked again and teaches nothing. On the recorded spaces
    (`flashgen simulate`) it ends at the best, or within 0.6 %, after 20 to 38 trials of 368; with as many TPE
    misses one of four by 13 %.
    """

    def __init__(self, space: Sequence[Config], seed: int, knowledge: Knowledge) -> None:
        from flashgen.tune.surrogate import Surrogate

        expected = [knowledge.expected_us.get(config, 1.0) for config in space]
        self._surrogate = Surrogate(space, expected, knowledge.nearby, knowledge.error)
        chance = random.Random(seed)
        self._ties = {config: chance.random() for config in space}
        self._bar_us = knowledge.bar_us
        self._space, self._pending, self._told = space, dict[Config, None](), 0

    def propose(self, unseen: dict[Config, None], penalty_us: float) -> Config | None:
        gains = dict(
            zip(self._space, self._surrogate.improvement(list(self._pending), self._bar_us), strict=True)
        )
        config = max(unseen, key=lambda each: (round(float(gains[each]), 6), self._ties[each]))
        if gains[config] < PAYS and self._told + len(self._pending) >= FEWEST:
            return None
        self.adopt(config)
        return config

    def adopt(self, config: Config) -> None:
        self._pending[config] = None

    def tell(self, config: Config, time_us: float | None, penalty_us: float) -> None:
        self._pending.pop(config, None)
        self._told += 1
        if time_us is not None:
            self._surrogate.tell(config, time_us)


class _Optuna:
    """Optuna under ask and tell, in memory.

    Its samplers know nothing of the feasible set and repeat themselves. A proposal outside the set is told a
    penalty (they learn nothing from failed trials), a repetition is told as failed; in their place goes the
    nearest config that was not tried, which is what the sampler was after. Random ones instead, after eight
    asks in vain, lost 2 % at the 95th percentile of 30 searches of a quarter of a space of 368; these lost 0.
    """

    def __init__(self, space: Sequence[Config], make_sampler: Callable[[int], Any], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        names = self._names = tunables_of(space)
        values: dict[str, dict[Value, None]] = {}
        for config in space:
            for name in names:
                values.setdefault(name, {})[config[name]] = None
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(list(seen)) for name, seen in values.items()
        }
        self._space = {self._point(config): config for config in space}
        self._study = optuna.create_study(sampler=make_sampler(seed))
        self._asked: dict[Config, Any] = {}
        self._random = random.Random(seed)

    def propose(self, unseen: dict[Config, None], penalty_us: float) -> Config:
        trial = self._study.ask(self._distributions)
        wanted = tuple((name, trial.params[name]) for name in self._names)
        config = self._space.get(wanted)
        if config is not None and config in unseen:
            self._asked[config] = trial
            return config
        if config is None:
            self._study.tell(trial, penalty_us)
        else:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        distances = {each: _distance(self._point(each), wanted) for each in unseen}
        nearest = min(distances.values())
        config = self._random.choice([each for each, far in distances.items() if far == nearest])
        self.adopt(config)
        return config

    def adopt(self, config: Config) -> None:
        self._study.enqueue_trial(dict(self._point(config)))
        self._asked[config] = self._study.ask(self._distributions)

    def tell(self, config: Config, time_us: float | None, penalty_us: float) -> None:
        value = penalty_us if time_us is None else time_us
        trial = self._asked.pop(config, None)
        if trial is not None:
            self._study.tell(trial, value)
        else:
            known = self._optuna.trial.create_trial(
                params=dict(self._point(config)), distributions=self._distributions, value=value
            )
            self._study.add_trial(known)

    def _point(self, config: Config) -> tuple[tuple[str, Value], ...]:
        """A config with the value of every tunable of the space, written out or not."""
        return tuple((name, config[name]) for name in self._names)


def _distance(a: Sequence[tuple[str, Value]], b: Sequence[tuple[str, Value]]) -> float:
    """How far two points are apart: a doubling of a number counts as much as another word."""
    pairs = [(x, y) for (_, x), (_, y) in zip(a, b, strict=True)]
    return sum(
        abs(math.log2(x) - math.log2(y)) if isinstance(x, int) and isinstance(y, int) else float(x != y)
        for x, y in pairs
    )


def _tpe(seed: int) -> Any:
    import warnings

    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            n_startup_trials=10,
            multivariate=True,  # block sizes, warps and stages matter together
            constant_liar=False,  # as good as with it when 8 candidates are in flight, and it is quicker
            seed=seed,
        )


def _gp(seed: int) -> Any:
    import warnings

    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.GPSampler(n_startup_trials=10, seed=seed)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A search strategy by name."""

    make: Callable[[Sequence[Config], int, Knowledge], Strategy]
    """Made for a space, a random seed, and what is known before."""
    help: str
    exhaustive: bool = False
    """Whether it means the whole space when no limit is given."""
    informed: bool = False
    """Whether it uses `Knowledge`."""
    typical: tuple[int, int] | None = None
    """After how many trials of a workload, in all families together, it usually stops by itself: least and
    most of the tunings in benchmarks/NOTES.md; None where it goes on to its limit."""
    needs: str = ""
    """A package that it needs beside the project's own."""


SAMPLERS = {
    "guided": Sampler(
        _Guided,
        "by the cost model, corrected as it goes; stops when more would not pay",
        informed=True,
        typical=(24, 60),
    ),
    "tpe": Sampler(lambda space, seed, _: _Optuna(space, _tpe, seed), "Optuna's Parzen estimator"),
    "gp": Sampler(
        lambda space, seed, _: _Optuna(space, _gp, seed), "Optuna's Gaussian process", needs="scipy"
    ),
    "random": Sampler(lambda space, seed, _: _InOrder(space, random.Random(seed)), "uniform"),
    "grid": Sampler(lambda space, seed, _: _InOrder(space), "the whole space in order", exhaustive=True),
}


def check_sampler(name: str) -> None:
    """Raises unless a sampler can be used.

    Raises:
        UnknownName: it is no row of `SAMPLERS`.
        InvalidArgument: what it needs is not installed.
    """
    if not isinstance(name, str) or name not in SAMPLERS:
        raise UnknownName("sampler", name, SAMPLERS)
    needs = SAMPLERS[name].needs
    if needs and importlib.util.find_spec(needs) is None:
        raise InvalidArgument(f"sampler {name} needs {needs}, which is not installed: pip install {needs}")
