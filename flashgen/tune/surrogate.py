"""A surrogate of kernels' times over a space of configs: a Gaussian process around the cost model.

The process describes the logarithm of measured over expected time, for its errors are factors. Configs that
differ little are wrong by a like factor (Matern 3/2 over the tunables; Rasmussen and Williams 2006, sections
2.2 and 4.2), besides a part of its own for each. Its common offset is estimated with it, so the model's
absolute speed does not matter, only its ranking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flashgen.spec.config import Config, Value, tunables_of

Floats = NDArray[np.float64]

OWN_SHARE = 0.17
"""What two neighbours do not share of the model's error."""
NOISE = 0.02
NEARBY_NOISE = 0.10
"""How well another workload's errors foretell this one's."""
FARTHEST = 3.0
"""The model's expectations count up to this far above its best (a logarithm): beyond, all is hopeless."""

REACH = {"doubling": 1.5, "step": 2.0, "word": 3.0}
"""Over what distance two configs are alike, by the kind of a tunable."""


class Surrogate:
    """The belief over a finite space.

    Args:
        space: configs of one family.
        expected_us: of each, what the cost model says; infinite where it sees no chance.
        nearby: for some of the space, log(measured / expected) at another workload of the same spec.
        error: how far off the model usually is, of the logarithm of time. On the portable family's recorded
            spaces (tests/data/exhaustive) that is 0.36; told 0.30, a search takes half the trials for as good
            winners, told less it missed one by 13 % once in 40 times.
    """

    def __init__(
        self,
        space: Sequence[Config],
        expected_us: Sequence[float],
        nearby: Mapping[Config, float] | None = None,
        error: float = 0.30,
    ) -> None:
        self._at = {config: i for i, config in enumerate(space)}
        logs = np.log(np.array(expected_us, dtype=np.float64))
        self._expected = np.minimum(logs, logs.min() + FARTHEST)
        near = math.sqrt(3.0) * _distances(_coordinates(space))
        shared = error**2 * (1 + near) * np.exp(-near)
        self._covariance = shared + (OWN_SHARE * error) ** 2 * np.eye(len(near))
        self._seen: dict[int, float] = {}
        known = {self._at[config]: error for config, error in (nearby or {}).items() if config in self._at}
        self._nearby = list(known)
        errors = np.array(list(known.values()))
        offset = _offset(self._block(self._nearby, NEARBY_NOISE), errors) if known else 0.0
        self._nearby_errors = errors - offset

    def tell(self, config: Config, time_us: float) -> None:
        """A measured time; a later one of the same config replaces it."""
        at = self._at[config]
        self._seen[at] = math.log(time_us) - self._expected[at]

    def belief(self, pending: Sequence[Config] = ()) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each config's log time.

        `pending` configs count as measured at their mean (Ginsbourger et al. 2010, "kriging believer").
        """
        mean, deviation = self._posterior(self._seen)
        if pending:
            believed = {self._at[c]: float(mean[self._at[c]] - self._expected[self._at[c]]) for c in pending}
            _, deviation = self._posterior(self._seen | believed)
        return mean, deviation

    def improvement(self, pending: Sequence[Config] = (), bar_us: float = math.inf) -> Floats:
        """Expected improvement on the best time measured, as a share of it (Jones et al. 1998, section 4).

        `bar_us` is a time measured elsewhere, which counts as well once one was measured here.
        Before anything was measured: how far each lies below the worst, which ranks them alike.
        """
        mean, deviation = self.belief(pending)
        if not self._seen:
            lead: Floats = mean.max() - mean
            return lead
        best = min(math.log(bar_us), *(self._expected[at] + error for at, error in self._seen.items()))
        lead = best - mean
        z = lead / deviation
        below = 0.5 * (1.0 + np.array([math.erf(value) for value in z / math.sqrt(2.0)]))
        gain: Floats = lead * below + deviation * np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        return gain

    def _block(self, at: Sequence[int], noise: float) -> Floats:
        block: Floats = self._covariance[np.ix_(at, at)] + noise**2 * np.eye(len(at))
        return block

    def _posterior(self, seen: Mapping[int, float]) -> tuple[Floats, Floats]:
        own, errors = list(seen), np.array(list(seen.values()))
        offset = _offset(self._block(own, NOISE), errors) if own else 0.0
        at = own + self._nearby
        if not at:
            return self._expected, np.sqrt(np.diag(self._covariance))
        noise = np.array([NOISE] * len(own) + [NEARBY_NOISE] * len(self._nearby))
        block = self._covariance[np.ix_(at, at)] + np.diag(noise**2)
        across = self._covariance[:, at]
        weights = np.linalg.solve(block, across.T)
        mean = self._expected + offset + np.concatenate([errors - offset, self._nearby_errors]) @ weights
        variance = np.diag(self._covariance) - np.einsum("ij,ji->i", across, weights)
        return mean, np.sqrt(np.maximum(variance, 1e-12))


def _offset(block: Floats, errors: Floats) -> float:
    """The common part of errors with these covariances, by generalised least squares."""
    weights = np.linalg.solve(block, np.ones(len(errors)))
    return float(weights @ errors / weights.sum())


def _distances(points: Floats) -> Floats:
    """Between any two points; by one product, for a space has thousands."""
    squares = (points**2).sum(1)
    between = squares[:, None] + squares[None, :] - 2.0 * points @ points.T
    distances: Floats = np.sqrt(np.maximum(between, 0.0))
    return distances


def _coordinates(space: Sequence[Config]) -> Floats:
    """Configs as points; a distance of 1 is where two are alike no longer."""
    columns = [_column([config[name] for config in space]) for name in tunables_of(space)]
    return np.concatenate(columns, axis=1)


def _column(values: Sequence[Value]) -> Floats:
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) < len(values):  # words: any two are as far apart as any others
        words = sorted(set(map(str, values)))
        one_hot = np.array([[float(str(value) == word) for word in words] for value in values])
        return one_hot / (math.sqrt(2.0) * REACH["word"])
    doubling = all(number > 0 and number & (number - 1) == 0 for number in numbers) and max(numbers) > 4
    kind = "doubling" if doubling else "step"
    scale = np.log2(numbers) if doubling else np.array(numbers, dtype=np.float64)
    column: Floats = scale[:, None] / REACH[kind]
    return column
