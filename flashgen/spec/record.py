"""Measurement, Record and the RecordStore protocol: what tuning leaves and dispatch reads."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.form import shown
from flashgen.spec.target import Target


class Status(str, Enum):
    """How a trial ended. Every status but OK carries a reason."""

    OK = "OK"
    SLOW = "SLOW"  # stopped early: censored, never best
    WRONG = "WRONG"  # differs from the reference by more than the tolerance, or left output unwritten
    UNSTABLE = "UNSTABLE"  # two runs on one input differ
    NO_COMPILE = "NO_COMPILE"
    TOO_LARGE = "TOO_LARGE"  # shared memory or registers beyond the target
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMEOUT = "TIMEOUT"
    CRASH = "CRASH"

    @classmethod
    def _missing_(cls, value: object) -> Status:
        raise UnknownName("status", value, [each.value for each in cls])


SOURCES = ("measured", "model")
SHORTEST_US = 0.1
"""No kernel is faster: a launch alone takes ten times as long."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The outcome of one trial: times in microseconds, error against the reference, compile facts."""

    status: Status
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    passes: int = 0
    """How many timings the median is of."""
    max_error: float | None = None
    """Largest absolute difference from the float32 reference."""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    source: str = "measured"
    """`measured` on a GPU, or `model`: ranked offline; a measured record always beats it."""
    reason: str = ""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise InvalidArgument(f"source={shown(self.source)} must be one of {', '.join(SOURCES)}")
        if self.status is Status.OK and not SHORTEST_US <= (self.median_us or 0) < math.inf:
            raise InvalidArgument(
                f"an OK measurement needs a time of at least {SHORTEST_US} us, got median_us={self.median_us}"
            )
        if self.status is Status.OK:
            for name in ("min_us", "max_us", "max_error"):
                value = getattr(self, name)
                if value is not None and not 0 <= value < math.inf:
                    raise InvalidArgument(
                        f"{name}={value} of an OK measurement must be 0 or more, and finite"
                    )
        if self.status is not Status.OK and not self.reason:
            raise InvalidArgument(f"a measurement with status {self.status.value} needs a reason")

    def to_json(self) -> dict[str, Any]:
        """All fields; the status by its name."""
        return {name: getattr(self, name) for name in self.__slots__} | {"status": self.status.value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        """The inverse of `to_json`."""
        return cls(**(data | {"status": Status(data["status"])}))


@dataclass(frozen=True, slots=True)
class Versions:
    """What the kernel was rendered, compiled and run with; empty text where there was none."""

    flashgen: str
    triton: str
    torch: str = ""
    driver: str = ""

    def unlike(self, here: Versions) -> tuple[str, ...]:
        """What may run a kernel at another speed, in words: triton and the driver, where both are known."""
        pairs = ((name, getattr(self, name), getattr(here, name)) for name in ("triton", "driver"))
        return tuple(
            f"made with {name} {was}, here it is {now}"
            for name, was, now in pairs
            if was and now and was != now
        )

    def to_json(self) -> dict[str, str]:
        """All fields."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Record:
    """One measured (or modelled) config of one workload on one target, good or bad."""

    target: Target
    workload: Workload
    config: Config
    measurement: Measurement
    kernel_hash: str
    """Hash of the rendered kernel's syntax tree: a later template renders another hash, and this
    record is then a hint only."""
    versions: Versions
    admission: str = "any"
    """Which calls the config can serve: `tma` (aligned tensors only) or `any`; `any_unordered` all but those
    that have to be deterministic."""
    density: str = "full"
    """Where the mask's operands came from: `full`, `real`, or how synthetic ones were drawn."""
    created_at: str = field(default="", compare=False)
    """UTC, ISO 8601."""

    @property
    def median_us(self) -> float:
        """The time the record is ranked by; infinite when the trial was not OK."""
        time = self.measurement.median_us if self.measurement.status is Status.OK else None
        return float("inf") if time is None else time

    def to_json(self) -> dict[str, Any]:
        """One line of a JSONL file."""
        return {
            "target": self.target.to_json(),
            "workload": self.workload.to_json(),
            "family": self.config.family,
            "config": self.config.to_json(),
            "measurement": self.measurement.to_json(),
            "kernel_hash": self.kernel_hash,
            "versions": self.versions.to_json(),
            "admission": self.admission,
            "density": self.density,
            "created_at": self.created_at,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """The inverse of `to_json`."""
        return cls(
            target=Target.from_json(data["target"]),
            workload=Workload.from_json(data["workload"]),
            config=Config.from_json(data["family"], data["config"]),
            measurement=Measurement.from_json(data["measurement"]),
            kernel_hash=data["kernel_hash"],
            versions=Versions(**data["versions"]),
            admission=data["admission"],
            density=data["density"],
            created_at=data["created_at"],
        )


class RecordStore(Protocol):
    """Where the dispatcher finds winners. The database and a bundle both implement it.

    `ranked` may read a file or a database; it is called on a miss only, never on the hot path. It
    raises nothing for a workload it does not know: the answer is an empty sequence.
    """

    def ranked(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """Candidates for a workload on exactly this target, best first, in the order of `rank`."""
        ...


# A kernel that computed something wrong at one size is not trusted at another one; a crash or a
# time-out says nothing about other sizes.
DISTRUSTED = (Status.WRONG, Status.UNSTABLE)


CANDIDATES = 4
"""How many records `rank` gives: knowing whether one is stale takes a rendering, about 1 ms."""


def _never(record: Record) -> bool:
    return False


def rank(
    records: Iterable[Record],
    workload: Workload,
    stale: Callable[[Record], bool] = _never,
    limit: int = CANDIDATES,
) -> tuple[Record, ...]:
    """The order of `RecordStore.ranked`: what may serve `workload`, best first.

    Args:
        records: those of one target and of the workload's spec, good and bad, oldest first.
        workload: what is asked for.
        stale: whether today's template renders another kernel for the record's config.
        limit: how many to give; the best of each admission class is always among them.

    Order: the exact bucket before others (nearest first); measured before modelled; today's kernels
    before stale ones; then the workload closest in size; only within one workload by time, because
    times of different sizes do not compare. The best record of each admission class comes before the
    second best of any, so that a call which the winner does not admit still finds a tuned kernel.

    A kernel is the rendered source (config and hash) under one triton version. Of several records of
    one kernel and workload the newest measured one counts, so a lucky first timing does not outlive
    its repetition, and a failure refuses that kernel there; a `DISTRUSTED` one refuses it everywhere.
    A stale record is refused too where today's kernel of its config failed, for that is what would run.
    A config stands in the answer once.
    """
    records = list(records)
    workloads = {id(record.workload): record.workload for record in records}  # shared: each is read once
    all_sizes = {key: _sizes(each) for key, each in workloads.items()}

    def sizes_of(record: Record) -> tuple[float, ...]:
        return all_sizes[id(record.workload)]

    verdicts: dict[tuple[object, ...], Record] = {}
    for record in records:
        key = (sizes_of(record), _kernel(record))
        held = verdicts.get(key)
        if held is None or _weight(held) <= _weight(record):
            verdicts[key] = record
    failed: dict[Config, list[Record]] = {}
    for record in verdicts.values():
        if record.measurement.status not in (Status.OK, Status.SLOW):
            failed.setdefault(record.config, []).append(record)

    def failed_today(record: Record) -> bool:
        return any(
            (each.measurement.status in DISTRUSTED or sizes_of(each) == sizes_of(record)) and not stale(each)
            for each in failed.get(record.config, ())
        )

    refused = {_kernel(r) for r in verdicts.values() if r.measurement.status in DISTRUSTED}
    usable = [r for r in verdicts.values() if r.measurement.status is Status.OK and _kernel(r) not in refused]
    usable = [r for r in usable if len(r.workload.params) == len(workload.params)]

    bucket, wanted = workload.bucket(), _sizes(workload)
    near: dict[tuple[float, ...], tuple[float, float]] = {}
    for record in usable:
        sizes = sizes_of(record)
        if sizes not in near:
            near[sizes] = (bucket.distance(record.workload.bucket()), _size_distance(wanted, sizes))

    def group(record: Record) -> tuple[float, bool]:
        return near[sizes_of(record)][0], record.measurement.source == "model"

    def order(record: Record) -> tuple[object, ...]:
        sizes, config = sizes_of(record), record.config
        measured = (sizes, record.median_us, config.family, config.values)
        return (*group(record), near[sizes][1], *measured)

    chosen: dict[Config, Record] = {}
    winners: dict[str, Record] = {}
    for _, members in itertools.groupby(sorted(usable, key=order), key=group):
        old: list[Record] = []
        for record in _promising(list(members), limit):
            if len(chosen) >= limit and record.admission in winners:
                continue
            if not stale(record):
                winners.setdefault(record.admission, record)
                chosen.setdefault(record.config, record)
            elif not failed_today(record):
                old.append(record)
        for record in old:
            winners.setdefault(record.admission, record)
            chosen.setdefault(record.config, record)
    rest = [record for record in chosen.values() if record is not winners[record.admission]]
    return (*winners.values(), *rest)[: max(limit, len(winners))]


def _promising(records: list[Record], limit: int) -> list[Record]:
    """Those whose staleness is worth knowing: the fastest, the newest, and the best of each admission class.

    After a template changed all records are stale until the next tuning, whose records are the newest; so
    looking at these finds today's kernels without rendering hundreds.
    """
    newest = heapq.nlargest(limit, range(len(records)), key=lambda i: records[i].created_at)
    classes = {record.admission: i for i, record in reversed(list(enumerate(records)))}
    keep = {*range(2 * limit), *newest, *classes.values()}
    return [record for i, record in enumerate(records) if i in keep]


def rank_hints(
    records: Iterable[Record],
    workload: Workload,
    target: Target,
    stale: Callable[[Record], bool] = _never,
) -> tuple[Record, ...]:
    """Records of other targets that may guide a search, the most similar GPU's first, each in `rank` order.

    They are never an answer of `ranked`: what is fast, or even fits, on another GPU is only a guess here.
    """
    others: dict[Target, list[Record]] = {}
    for record in records:
        if record.target != target:
            others.setdefault(record.target, []).append(record)

    def unlike(other: Target) -> tuple[object, ...]:
        kind = (other.vendor != target.vendor, other.arch != target.arch)
        size = abs(math.log2(other.sm_count / target.sm_count))
        return (*kind, size, abs(other.bandwidth - target.bandwidth), other.key)

    return tuple(r for other in sorted(others, key=unlike) for r in rank(others[other], workload, stale))


def _sizes(workload: Workload) -> tuple[float, ...]:
    params = (value for _, value in workload.params)
    totals = (workload.total_q, workload.total_k)
    return (
        workload.batch,
        workload.heads,
        workload.kv_heads,
        workload.q_len,
        workload.k_len,
        *totals,
        workload.documents,
        *params,
    )


def _size_distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    pairs = zip(a, b, strict=True)
    return sum(abs(math.log2(max(abs(x), 1)) - math.log2(max(abs(y), 1))) for x, y in pairs)


def _kernel(record: Record) -> tuple[object, ...]:
    return (record.config, record.kernel_hash, record.versions.triton)


def _weight(record: Record) -> tuple[bool, str]:
    return (record.measurement.source == "measured", record.created_at)
