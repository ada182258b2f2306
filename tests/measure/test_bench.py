"""The timing protocol, on a clock whose times the test sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flashgen.measure.bench import GRAPH_BELOW_US, MOST_HEAT, QUICK, WARMUP, compare, time_kernel
from flashgen.spec.record import Status


class SetClock:
    """Each launch is an iterator of microseconds; what was asked for is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def warm(self, launch: Callable[[], Any], count: int) -> None:
        self.asked.append(("warm", count))

    def each(self, launch: Callable[[], Any], count: int) -> list[float]:
        self.asked.append(("each", count))
        return [launch() for _ in range(count)]

    def replayed(self, launch: Callable[[], Any], count: int) -> list[float]:
        self.asked.append(("replayed", count))
        return [launch() for _ in range(count)]


def kernel(*times: float) -> Callable[[], float]:
    endless: Iterator[float] = itertools.cycle(times)
    return lambda: next(endless)


def test_median_minimum_and_maximum_are_kept() -> None:
    clock = SetClock()
    timing = time_kernel(kernel(1000.0, 1010.0, 990.0), clock)
    assert (timing.median_us, timing.min_us, timing.max_us) == (1000.0, 990.0, 1010.0)
    assert timing.passes == 21  # 20 ms of 990 us each
    assert (timing.status, timing.method, timing.reason) == (Status.OK, "events", "")
    assert timing.spread == pytest.approx(0.02)


@pytest.mark.parametrize(("us", "heat"), [(1000.0, 100), (300_000.0, 1), (1.0, MOST_HEAT)])
def test_it_warms_up_and_heats_the_card_before_anything_counts(us: float, heat: int) -> None:
    """0.1 s of load; a kernel bound by its launch gets no endless number of launches."""
    clock = SetClock()
    time_kernel(kernel(us), clock, best_us=us)
    assert clock.asked[:3] == [("warm", WARMUP), ("each", QUICK), ("warm", heat)]
    assert [how for how, _ in clock.asked[3:]] == ["replayed" if us < GRAPH_BELOW_US else "each"]


def test_a_candidate_is_timed_without_the_boost_of_a_cool_card() -> None:
    """10 % faster until it has run for 0.1 s: fast enough to be timed in full, which then says what it is."""

    class CoolClock(SetClock):
        def each(self, launch: Callable[[], Any], count: int) -> list[float]:
            hot = sum(count for how, count in self.asked if how == "warm") > 50
            return [us if hot else us / 1.1 for us in super().each(launch, count)]

    timing = time_kernel(kernel(1250.0), CoolClock(), best_us=1000.0)
    assert (timing.status, timing.median_us) == (Status.OK, 1250.0)


def test_short_kernels_are_timed_by_replay() -> None:
    for us, method in ((GRAPH_BELOW_US - 1, "graph"), (GRAPH_BELOW_US + 1, "events")):
        assert time_kernel(kernel(us), SetClock()).method == method


def test_one_outlier_does_not_move_the_median() -> None:
    clock = SetClock()
    timing = time_kernel(kernel(*[1000.0] * 9, 9000.0), clock)
    assert timing.median_us == 1000.0
    assert timing.max_us == 9000.0
    assert timing.passes == 20


def test_a_noisy_clock_gets_more_samples() -> None:
    clock = SetClock()
    timing = time_kernel(kernel(1000.0, 1500.0, 1200.0, 800.0), clock)
    assert timing.passes == 60  # 20 of 1000 us in 20 ms, then twice as many again
    assert timing.status is Status.OK
    assert timing.spread > 0.5


def test_a_clearly_slower_kernel_stops_after_three_launches() -> None:
    """And heats nothing."""
    clock = SetClock()
    timing = time_kernel(kernel(200.0), clock, best_us=100.0)
    assert (timing.status, timing.passes) == (Status.SLOW, 3)
    assert timing.reason == "its fastest quick timing, 200 us, is 2.00 times the best"
    assert clock.asked == [("warm", 2), ("each", 3)]


@pytest.mark.parametrize("quick", [(119.0, 119.0, 119.0), (140.0, 300.0, 300.0), (125.0, 126.0, 132.0)])
def test_a_kernel_that_may_still_win_is_timed_in_full(quick: tuple[float, ...]) -> None:
    """The more the quick timings spread, the less they say."""
    assert time_kernel(kernel(*quick), SetClock(), best_us=100.0).status is Status.OK


@pytest.mark.parametrize("quick", [(121.0, 121.0, 121.0), (125.0, 126.0, 127.0)])
def test_a_kernel_a_fifth_behind_is_not(quick: tuple[float, ...]) -> None:
    assert time_kernel(kernel(*quick), SetClock(), best_us=100.0).status is Status.SLOW


def test_an_impossible_time_is_refused() -> None:
    timing = time_kernel(kernel(3.0), SetClock(), floor_us=36.1)
    assert timing.status is Status.WRONG
    assert timing.reason.startswith("timed at 3 us, but the target needs at least 36.1 us")


@pytest.mark.parametrize("us", [0.0, -4.0, math.nan])
def test_a_clock_that_gives_nonsense_is_not_believed(us: float) -> None:
    timing = time_kernel(kernel(us), SetClock())
    assert timing.status is Status.UNSTABLE
    assert "cannot be trusted" in timing.reason


def test_a_comparison_alternates_and_takes_medians_of_passes() -> None:
    order: list[str] = []

    def noted(name: str, *times: float) -> Callable[[], float]:
        run = kernel(*times)

        def launch() -> float:
            order.append(name)
            return run()

        return launch

    timings = compare(
        {"a": noted("a", 1000.0), "b": noted("b", 2000.0), "c": noted("c", 500.0)}, SetClock(), passes=4
    )
    turns = [name for name, _ in itertools.groupby(order)]
    assert turns == ["a", "b", "c", "a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]
    assert {name: t.median_us for name, t in timings.items()} == {"a": 1000.0, "b": 2000.0, "c": 500.0}
    assert {t.passes for t in timings.values()} == {4}
    assert {t.method for t in timings.values()} == {"events"}


def test_a_comparison_begins_on_a_warm_card() -> None:
    """0.3 s of load, shared alike; kernels bound by their launch get no endless number of launches."""
    clock = SetClock()
    compare({"a": kernel(1000.0), "b": kernel(3000.0), "c": kernel(1.0)}, clock, passes=1)
    ready = [("warm", WARMUP), ("each", QUICK)]
    assert clock.asked[:6] == 3 * ready
    assert clock.asked[6:9] == [("warm", 100), ("warm", 34), ("warm", MOST_HEAT)]


def test_a_drifting_card_hurts_all_that_are_compared_alike() -> None:
    """The clock slows by 1 % with each launch: measured one after the other, the later kernel would lose."""
    launched = itertools.count()

    def launch() -> float:
        return 1000.0 * 1.01 ** next(launched)

    timings = compare({"first": launch, "second": launch}, SetClock(), passes=20)
    assert timings["second"].median_us / timings["first"].median_us == pytest.approx(1.0, abs=0.08)


def test_a_comparison_uses_one_method_for_all() -> None:
    timings = compare(
        {"short": kernel(GRAPH_BELOW_US - 1), "long": kernel(GRAPH_BELOW_US * 2)}, SetClock(), passes=2
    )
    assert {t.method for t in timings.values()} == {"graph"}
