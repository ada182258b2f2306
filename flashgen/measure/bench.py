"""The timing protocol: how long a kernel takes, for the tuner and for `flashgen bench` alike.

1. Warm up first: module load, first-launch set-up and the instruction cache stay out of the numbers. The
   quick timings that refuse a slow candidate are of a card that may have its boost still, which errs on the
   candidate's side; before the samples that count the card is brought to its steady clock.
2. Cold L2: before each launch a buffer of twice the L2 is read. Inside a model other layers run between
   two calls, so a kernel that finds its inputs in the cache is a kernel nobody has. Reading, not writing:
   dirty lines would be written back during the measured kernel and charged to it.
3. Device time only: events around each launch. The flush before it keeps the GPU busy while the host
   enqueues, so launch cost is not measured.
4. Short kernels are captured in a CUDA graph and its replay is timed, because events cost a few
   microseconds of their own: the time is that of (flush, kernel) x n less that of (flush) x n.
5. The median counts, and minimum and maximum are kept: clocks move, other processes interfere.
6. A time that the hardware cannot reach is refused: it means the kernel did not do the work.
7. Kernels are compared in one process, alternating, over several passes, on a card that is warm already
   (`compare`): a power-limited card takes back its boost within 0.1 s of load (10 % of an H200's speed), by
   an amount that differs from kernel to kernel, and drifts by several per cent within a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from flashgen.spec.record import Status

Launch = Callable[[], Any]

GRAPH_BELOW_US = 100.0
"""Kernels shorter than this are timed by graph replay."""
WARMUP = 2
QUICK = 3
"""Launches that decide whether a candidate is clearly behind."""
SLOW_FACTOR = 1.2
"""Clearly behind: the fastest of the quick timings takes this many times the best so far, and as much more as
they spread. A card that has its boost still is 10 % faster than one that has not."""
SAMPLE_US = 20_000.0
"""Device time a candidate's samples should take together."""
MIN_SAMPLES, MAX_SAMPLES = 5, 40
HEAT_US = 300_000.0
"""Device time of load before kernels are compared."""
TRIAL_HEAT_US = 100_000.0
"""The same before a candidate's samples: while candidates compile (0.3 s each on 16 cores) the card idles and
wins its boost back, and its times would be up to 10 % better than those of a comparison."""
MOST_HEAT = 2_000
"""Launches of one kernel that heat at most: short ones are bound by their launch."""
SETTLED = 0.10
"""Samples whose inner half spreads by less than this share of the median need no second set."""


class Clock(Protocol):
    """Runs launches and says how long each took. `CudaClock` is the real one."""

    def warm(self, launch: Launch, count: int) -> None:
        """Runs `launch` so often and waits for it."""

    def each(self, launch: Launch, count: int) -> list[float]:
        """Microseconds of each of `count` launches, each with a cold cache."""

    def replayed(self, launch: Launch, count: int) -> list[float]:
        """The same by graph replay: each value is the mean of some launches inside one replay."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What timing a kernel gave; times in microseconds. Only an OK timing may be ranked."""

    median_us: float
    min_us: float
    max_us: float
    passes: int
    """How many timings the median is of."""
    method: str
    """`events` or `graph`, always with a cold L2."""
    status: Status = Status.OK
    reason: str = ""

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (self.max_us - self.min_us) / self.median_us


def _timing(samples: list[float], method: str, floor_us: float = 0.0) -> Timing:
    middle = median(samples)
    status, reason = Status.OK, ""
    if not middle > 0 or not math.isfinite(middle):
        status, reason = Status.UNSTABLE, f"timed at {middle:.3g} us: the clock cannot be trusted"
    elif middle < floor_us:
        status = Status.WRONG
        reason = (
            f"timed at {middle:.4g} us, but the target needs at least {floor_us:.4g} us "
            "for the arithmetic and the bytes of this workload"
        )
    return Timing(middle, min(samples), max(samples), len(samples), method, status, reason)


def _method(
    launch_us: float, clock: Clock, graph_below_us: float = GRAPH_BELOW_US
) -> tuple[str, Callable[[Launch, int], list[float]]]:
    return ("graph", clock.replayed) if launch_us < graph_below_us else ("events", clock.each)


def _samples_for(launch_us: float, total_us: float, least: int, most: int) -> int:
    return max(least, min(most, math.ceil(total_us / max(0.1, launch_us))))


def time_kernel(launch: Launch, clock: Clock, *, best_us: float = math.inf, floor_us: float = 0.0) -> Timing:
    """Times one kernel by the protocol above.

    Args:
        launch: enqueues the kernel once, without waiting.
        best_us: the best median so far; a candidate clearly behind it stops early with status `SLOW`.
        floor_us: no launch can be faster (`roofline.floor_us`); a faster median is refused as `WRONG`.
    """
    clock.warm(launch, WARMUP)
    quick = clock.each(launch, QUICK)
    fastest = min(quick)
    if fastest > (SLOW_FACTOR + (max(quick) - fastest) / max(fastest, 0.1)) * best_us:
        reason = f"its fastest quick timing, {fastest:.4g} us, is {fastest / best_us:.2f} times the best"
        return Timing(median(quick), fastest, max(quick), len(quick), "events", Status.SLOW, reason)
    method, sample = _method(fastest, clock)
    count = _samples_for(fastest, SAMPLE_US, MIN_SAMPLES, MAX_SAMPLES)
    clock.warm(launch, _samples_for(fastest, TRIAL_HEAT_US, 1, MOST_HEAT))
    samples = sorted(sample(launch, count))
    if samples[(3 * count) // 4] - samples[count // 4] > SETTLED * samples[count // 2]:
        samples = sorted(samples + sample(launch, 2 * count))  # a noisy moment: the median needs more
    return _timing(samples, method, floor_us)


def compare(
    launches: Mapping[str, Launch],
    clock: Clock,
    *,
    passes: int = 5,
    floor_us: float = 0.0,
    graph_below_us: float = GRAPH_BELOW_US,
) -> dict[str, Timing]:
    """Times several kernels against each other: in every pass each of them once, in rotating order.

    A pass is the median of a few launches; the result's median, min and max are over the passes. All are
    timed by one method, so that none gains from events or replay: by replay where the fastest takes less than
    `graph_below_us`.
    """
    names = list(launches)
    quick = {}
    for name in names:
        clock.warm(launches[name], WARMUP)
        quick[name] = min(clock.each(launches[name], QUICK))
    for name in names:
        clock.warm(launches[name], _samples_for(quick[name], HEAT_US / len(names), 1, MOST_HEAT))
    method, sample = _method(min(quick.values()), clock, graph_below_us)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(passes):
        for position in range(len(names)):
            name = names[(turn + position) % len(names)]
            clock.warm(launches[name], 1)
            count = _samples_for(quick[name], SAMPLE_US, 3, 15)
            taken[name].append(median(sample(launches[name], count)))
    return {name: _timing(values, method, floor_us) for name, values in taken.items()}


class CudaClock:
    """Times launches on the current stream of one CUDA device.

    Args:
        device: index of the device.
        l2_mib: its L2 in MiB; twice as much device memory is taken for the flush.
    """

    _IN_GRAPH = 10

    def __init__(self, device: int, l2_mib: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", device)
        words = 2 * max(l2_mib, 8) * 2**20 // 4
        self._flushed = torch.zeros(words // 1024, 1024, dtype=torch.int32, device=self._device)
        self._row_max = torch.empty(words // 1024, dtype=torch.int32, device=self._device)
        self._flush_us: list[float] = []

    def _flush(self) -> None:
        self._torch.amax(self._flushed, dim=1, out=self._row_max)

    def warm(self, launch: Launch, count: int) -> None:
        """See `Clock`."""
        for _ in range(count):
            launch()
        self._torch.cuda.synchronize(self._device)

    def each(self, launch: Launch, count: int) -> list[float]:
        """See `Clock`."""
        return self._timed(launch, count, before=self._flush)

    def replayed(self, launch: Launch, count: int) -> list[float]:
        """See `Clock`; each value is the mean over 10 launches of one replay."""
        if not self._flush_us:
            self._flush_us = self._replay(lambda: None, 20)
        flush = median(self._flush_us)
        return [(total - flush) / self._IN_GRAPH for total in self._replay(launch, count)]

    def _replay(self, launch: Launch, count: int) -> list[float]:
        """Microseconds of each of `count` replays of (flush, launch) x 10."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for _ in range(self._IN_GRAPH):
                self._flush()
                launch()
        graph.replay()
        return self._timed(graph.replay, count)

    def _timed(self, launch: Launch, count: int, before: Launch = lambda: None) -> list[float]:
        """Microseconds of each of `count` launches, by events around them."""
        event: Callable[..., Any] = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
        for start, end in pairs:
            before()
            start.record()
            launch()
            end.record()
        self._torch.cuda.synchronize(self._device)
        return [1e3 * start.elapsed_time(end) for start, end in pairs]
