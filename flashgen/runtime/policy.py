"""Which kernel serves a call: the candidates in order, each accepted or rejected with a reason.

Runs on a miss only, so it may read files and a database and compile. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashgen.codegen.families import FAMILIES, computing, foreign
from flashgen.errors import DoesNotFit
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Record, RecordStore
from flashgen.spec.target import Target

MAX_TRIED = 16
"""Records of one look-up that are tried before the default: the ones behind are far slower or far away."""

DEFAULT, TORCH = "family default", "torch"


class Launchable(Protocol):
    """A loaded kernel: `build.launch.Kernel`."""

    def launch(self, env: tuple[Any, ...], stream: int) -> None:
        """Enqueues it; see `Kernel.launch`."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be served."""

    workload: Workload
    facts: CallFacts
    target: Target
    device: int = 0
    """Index of the GPU; takes no part in the decision."""
    deterministic: bool = False
    """Whether the result has to have the same bits in every run."""

    def kernel_key(self, config: Config) -> tuple[Any, ...]:
        """What identifies a loaded kernel: spec, config, facts, device."""
        return (self.workload.spec, config, self.facts, self.device)

    def refuses(self, config: Config) -> str:
        """Why a config's kernel cannot serve calls of this kind, whatever their spec."""
        if reason := foreign(config):
            return reason
        family, group = FAMILIES[config.family], self.workload.heads_per_kv
        return family.admits(config, self.facts, group, self.deterministic)


Loader = Callable[[Request, Config], Launchable]
"""(request, config) -> a loaded kernel.

Raises with the reason where there is none; then the next candidate is tried.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where tuned records come from, and how a kernel of theirs is loaded."""

    label: str
    """As `explain` shows it: `bundle llama.fgb`, `database`."""
    open: Callable[[], RecordStore]
    """The store; called at every miss, so it should remember."""
    load: Loader
    fallback: Callable[[Request], Config | None] | None = None
    """The config of any kernel in a bundle that serves a request untuned: where nothing can be compiled."""
    place: str = ""
    """The folder of a bundle."""
    marks: Callable[[Record], Sequence[str]] = lambda record: ()
    """What of a record is not as its kernel would run now: it is stale, triton or the driver was another."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that could have served the call."""

    source: str
    choice: str
    """A config's name, or what else would run."""
    verdict: str
    """`accepted`, `rejected` or `not reached`."""
    reason: str

    def to_json(self) -> dict[str, str]:
        """All fields."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, and every step on the way."""

    steps: tuple[Step, ...]
    config: Config | None = None
    """None means torch."""
    kernel: Launchable | None = None
    """The loaded kernel; None for torch, and when nothing was to be loaded."""
    record: Record | None = None
    """The tuned record that the config is from; None for a default and for torch."""
    exact: bool = False
    """Whether the record is a measured one of the call's own bucket."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    source: str
    load: Loader
    config: Config
    record: Record | None = None
    note: str = ""
    exact: bool = False
    near: bool = False
    """Whether it was tuned for other sizes, and a default can be compiled in its place."""


@dataclass(frozen=True)
class Policy:
    """The order of things: bundles, records, each family's default config, a bundle's fallback, torch.

    Bundles were loaded on purpose and come first, the latest one foremost. The records of all other
    sources are tried together: the exact bucket before the nearest ones of the same spec, and within a
    bucket measured ones before modelled ones, earlier sources before later ones.
    """

    bundles: list[Source] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    load: Loader | None = None
    """Compiles and loads a family's default config; None where nothing is ever loaded."""

    def decide(self, request: Request, *, loading: bool = True) -> Decision:
        """Walks the candidates until one is accepted; torch's own attention always is.

        Args:
            loading: with False candidates are judged by `fits` and `admits` alone, as without a GPU.
        """
        steps: list[Step] = []
        for candidate in self._candidates(request, steps):
            kernel, reason = self._try(candidate, request, loading)
            verdict = "rejected" if reason else "accepted"
            steps.append(Step(candidate.source, candidate.config.name, verdict, reason or candidate.note))
            if not reason:
                steps += self._not_reached({step.source for step in steps})
                return Decision(tuple(steps), candidate.config, kernel, candidate.record, candidate.exact)
        steps.append(Step(TORCH, "torch's own attention", "accepted", "no kernel serves this call"))
        return Decision(tuple(steps))

    def _candidates(self, request: Request, steps: list[Step]) -> Iterator[_Candidate]:
        for source in self.bundles:
            yield from _of(request, [source], steps)
        yield from _of(request, self.sources, steps)
        workload, target, facts = request.workload, request.target, request.facts
        spec = workload.spec
        for family in computing(spec):
            reason = family.supports(spec, target)
            if not reason:
                try:
                    config = family.default(spec, target, facts, workload.heads_per_kv, workload)
                except DoesNotFit as error:
                    reason = str(error)
                else:
                    load = self.load or _nothing_to_load
                    yield _Candidate(DEFAULT, load, config, note="not tuned")
            if reason:
                steps.append(Step(DEFAULT, family.name, "rejected", reason))
        for source in self.bundles:
            if source.fallback is not None and (found := source.fallback(request)) is not None:
                yield _Candidate(source.label, source.load, found, note="what else the bundle has; not tuned")

    def _try(self, candidate: _Candidate, request: Request, loading: bool) -> tuple[Launchable | None, str]:
        """The loaded kernel, or why there is none."""
        workload, config = request.workload, candidate.config
        spec = workload.spec
        try:
            if reason := foreign(config):
                return None, reason
            family = FAMILIES[config.family]
            reason = (
                family.supports(spec, request.target)
                or family.fits(config, spec, request.target)
                or request.refuses(config)
                or family.crowds(config, workload, request.target)
                or (family.idles(config, workload, request.target, request.facts) if candidate.near else "")
                or family.outgrows(workload)
            )
            if reason or not loading:
                return None, reason
            return candidate.load(request, config), ""
        except Exception as error:  # whatever is wrong with one candidate, the others can serve
            return None, f"{type(error).__name__}: {error}"

    def _not_reached(self, reached: set[str]) -> list[Step]:
        later = [source.label for source in (*self.bundles, *self.sources)] + [DEFAULT, TORCH]
        return [
            Step(label, "", "not reached", "an earlier step was accepted")
            for label in later
            if label not in reached
        ]


def _of(request: Request, sources: Sequence[Source], steps: list[Step]) -> Iterator[_Candidate]:
    """The records of some sources as candidates, best first.

    A source without any leaves a step, before those of the sources behind it.
    """
    bucket = request.workload.bucket()
    found: list[tuple[tuple[float, bool], int, _Candidate]] = []
    without: dict[int, Step] = {}
    for place, source in enumerate(sources):
        try:
            records = source.open().ranked(request.workload, request.target)
        except Exception as error:  # whatever is wrong with one source, the others can serve
            without[place] = Step(source.label, "", "rejected", f"{type(error).__name__}: {error}")
            continue
        if not records:
            without[place] = Step(source.label, "", "rejected", "no record of this spec on this GPU")
        for record in records:
            distance = bucket.distance(record.workload.bucket())
            modelled = record.measurement.source == "model"
            exact = not distance and not modelled
            note = "; ".join([whence(record, request.workload), *source.marks(record)])
            near = bool(distance) and not source.place
            candidate = _Candidate(source.label, source.load, record.config, record, note, exact, near)
            found.append(((distance, modelled), place, candidate))
    found.sort(key=lambda each: each[0])  # stable: the order of the sources, and of each one's own ranking
    for _, place, candidate in found[:MAX_TRIED]:
        steps += [without.pop(each) for each in range(place) if each in without]
        yield candidate
    steps += without.values()


def whence(record: Record, workload: Workload) -> str:
    """How near to a workload a record was made, how and where."""
    distance = workload.bucket().distance(record.workload.bucket())
    where = "exact bucket" if not distance else f"nearest bucket, {distance:.3g} octaves away"
    modelled = record.measurement.source == "model"
    how = "ranked by a model" if modelled else f"measured {record.median_us:.1f} us"
    return f"{where}: {how} at {record.workload.name}"


def _nothing_to_load(*_: object) -> Launchable:
    raise DoesNotFit("this dispatcher has no loader")
