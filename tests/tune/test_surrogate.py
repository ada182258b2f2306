"""The surrogate: what it believes of configs that were not measured."""

from __future__ import annotations

import math

import landscape
import numpy as np
import pytest

from flashgen.spec.config import Config
from flashgen.tune.surrogate import NOISE, OWN_SHARE, Surrogate, _coordinates

SPACE = landscape.space()
ERROR = 0.30
OWN_ERROR = OWN_SHARE * ERROR


def config(name: str) -> Config:
    return landscape.FAMILY.find(name)


A, NEAR, FAR = map(config, ("m128n64w4s2_tma_heads", "m128n64w4s2_tma_rows", "m16n128w8s4_pointer_rows"))


def belief(surrogate: Surrogate, of: Config) -> tuple[float, float]:
    mean, deviation = surrogate.belief()
    at = SPACE.index(of)
    return float(mean[at]), float(deviation[at])


def test_before_any_measurement_it_believes_the_model() -> None:
    expected = [100.0 + i for i in range(len(SPACE))]
    mean, deviation = Surrogate(SPACE, expected).belief()
    np.testing.assert_allclose(mean, np.log(expected))
    np.testing.assert_allclose(deviation, math.hypot(ERROR, OWN_ERROR))


def test_the_models_absolute_speed_does_not_matter() -> None:
    one, other = Surrogate(SPACE, [100.0] * len(SPACE)), Surrogate(SPACE, [7.0] * len(SPACE))
    for each in (one, other):
        each.tell(A, 500.0)
        each.tell(FAR, 900.0)
    np.testing.assert_allclose(one.belief()[0], other.belief()[0])


def test_what_is_measured_is_known_and_what_is_like_it_nearly() -> None:
    surrogate = Surrogate(SPACE, [100.0] * len(SPACE))
    surrogate.tell(A, 200.0)
    surrogate.tell(FAR, 400.0)
    mean, deviation = belief(surrogate, A)
    assert mean == pytest.approx(math.log(200), abs=0.02) and deviation < 1.1 * NOISE
    near, near_deviation = belief(surrogate, NEAR)
    assert math.log(200) < near < math.log(300) and deviation < near_deviation < ERROR
    surrogate.tell(A, 100.0)  # measured again
    assert belief(surrogate, A)[0] == pytest.approx(math.log(100), abs=0.02)


def test_the_posterior_is_that_of_a_gaussian_process() -> None:
    """Against the textbook's formula with an explicit inverse (Rasmussen and Williams 2006, 2.42)."""
    surrogate = Surrogate(SPACE, [100.0] * len(SPACE))
    seen = {A: 210.0, FAR: 380.0, SPACE[50]: 333.0}
    for each, time in seen.items():
        surrogate.tell(each, time)
    at = [SPACE.index(each) for each in seen]
    x = _coordinates(SPACE)
    r = math.sqrt(3) * np.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))
    k = ERROR**2 * (1 + r) * np.exp(-r) + OWN_ERROR**2 * np.eye(len(x))
    inverse = np.linalg.inv(k[np.ix_(at, at)] + NOISE**2 * np.eye(len(at)))
    y, ones = np.log(list(seen.values())), np.ones(len(at))
    offset = (ones @ inverse @ y) / (ones @ inverse @ ones)
    mean, deviation = surrogate.belief()
    np.testing.assert_allclose(mean, offset + k[:, at] @ inverse @ (y - offset))
    np.testing.assert_allclose(deviation**2, np.diag(k - k[:, at] @ inverse @ k[at]), atol=1e-9)


def test_expected_improvement_is_the_mean_of_the_gains() -> None:
    surrogate = Surrogate(SPACE, [100.0] * len(SPACE))
    surrogate.tell(A, 200.0)
    surrogate.tell(FAR, 210.0)
    at = SPACE.index(NEAR)
    mean, deviation = belief(surrogate, NEAR)
    draws = np.random.default_rng(0).normal(mean, deviation, 400_000)
    gained = np.maximum(math.log(200) - draws, 0).mean()
    assert surrogate.improvement()[at] == pytest.approx(gained, rel=0.02)


def test_what_is_in_flight_promises_little_more() -> None:
    surrogate = Surrogate(SPACE, [100.0] * len(SPACE))
    surrogate.tell(A, 200.0)
    at, beside = SPACE.index(NEAR), SPACE.index(FAR)
    alone, pending = surrogate.improvement(), surrogate.improvement([NEAR])
    assert pending[at] < 0.3 * alone[at] and pending[beside] == pytest.approx(alone[beside], rel=0.2)


def test_a_neighbouring_workload_tells_where_the_model_errs() -> None:
    """Its common factor does not matter: times of other sizes are other times."""
    errors = {each: 3.0 + (0.0 if each["loads"] == "tma" else 0.4) for each in SPACE[::5]}
    surrogate = Surrogate(SPACE, [100.0] * len(SPACE), errors)
    mean, deviation = surrogate.belief()
    tma = np.array([each["loads"] == "tma" for each in SPACE])
    assert 0.2 < mean[~tma].mean() - mean[tma].mean() < 0.45
    assert mean.mean() == pytest.approx(math.log(100), abs=0.1)
    assert deviation.max() < ERROR


def test_a_hopeless_expectation_stays_a_number() -> None:
    mean, _ = Surrogate(SPACE, [100.0, math.inf, *[100.0] * (len(SPACE) - 2)]).belief()
    assert np.isfinite(mean).all() and mean[1] > mean[0] + 2


def test_a_doubling_a_step_and_a_word_apart() -> None:
    x = _coordinates(SPACE)

    def apart(a: str, b: str) -> float:
        return float(np.linalg.norm(x[SPACE.index(config(a))] - x[SPACE.index(config(b))]))

    assert apart("m128n64w4s2_tma_heads", "m64n64w4s2_tma_heads") == pytest.approx(1 / 1.5)
    assert apart("m128n64w4s2_tma_heads", "m32n64w4s2_tma_heads") == pytest.approx(2 / 1.5)
    assert apart("m64n64w4s2_tma_heads", "m64n64w4s4_tma_heads") == pytest.approx(2 / 2.0)
    assert apart("m64n64w4s2_tma_heads", "m64n64w4s2_pointer_heads") == pytest.approx(1 / 3.0)
