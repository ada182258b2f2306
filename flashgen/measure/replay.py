"""Recorded measurements in place of a GPU and a compiler: the same search again, anywhere, in no time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from flashgen.codegen.source import KernelSource, Toolchain, kernel_name, render
from flashgen.measure.compile_pool import Compiled
from flashgen.measure.worker import MeasuringFailed, Trial
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Record, Status


class Replay:
    """Answers trials from records; see `Measurer`.

    Args:
        records: of any number of workloads; of several for one config the last counts.
        noise: relative standard deviation of a fresh factor on each answer, as a GPU's timings vary.
        seed: of the noise.
    """

    source = "measured"

    def __init__(self, records: Iterable[Record], noise: float = 0.0, seed: int = 0) -> None:
        self._answers: dict[Workload, dict[Config, Measurement]] = {}
        self._density: dict[Workload, str] = {}
        for record in records:
            self._answers.setdefault(record.workload, {})[record.config] = record.measurement
            self._density[record.workload] = record.density
        self._noise, self._random = noise, random.Random(seed)

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """What was recorded."""
        return tuple(self._answers)

    def best_us(self, workload: Workload) -> float:
        """The fastest recorded time of a workload, without noise; infinite if none is OK."""
        answers = self._answers[workload].values()
        return min((m.median_us or math.inf for m in answers if m.status is Status.OK), default=math.inf)

    def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
        """The recorded density."""
        if workload not in self._answers:
            known = ", ".join(each.name for each in self._answers)
            raise MeasuringFailed(Status.CRASH, f"no records of {workload.name}; there are some of: {known}")
        return self._density[workload]

    def measure(self, trial: Trial) -> Measurement:
        """The recorded outcome; a config that was not recorded has no kernel here."""
        answer = self._answers[trial.workload].get(trial.config)
        if answer is None:
            return Measurement(Status.NO_COMPILE, reason="not among the recorded configs")
        return self._noisy(answer)

    def compare(self, trials: Sequence[Trial], passes: int) -> tuple[Measurement, ...]:
        """The recorded outcomes, with the noise that is left after so many passes."""
        return tuple(self._noisy(self._answers[t.workload][t.config], passes) for t in trials)

    def close(self) -> None:
        """Nothing to end."""

    def _noisy(self, measurement: Measurement, passes: int = 1) -> Measurement:
        if not self._noise or measurement.median_us is None:
            return measurement
        factor = math.exp(self._random.gauss(0.0, self._noise / math.sqrt(passes)))
        return replace(measurement, median_us=measurement.median_us * factor, passes=passes)


class NoCompiler:
    """Renders, for the hashes, and compiles nothing; see `Compiler`.

    Args:
        hashes: of kernels that need no rendering, which takes milliseconds each: their source
            has no text.
    """

    def __init__(
        self,
        toolchain: Toolchain,
        ahead: int = 1,
        hashes: Mapping[tuple[AttentionSpec, Config], str] | None = None,
    ) -> None:
        self.toolchain, self.ahead = toolchain, ahead
        self._hashes = hashes or {}

    def source(self, spec: AttentionSpec, config: Config) -> KernelSource:
        """The rendered kernel, or only its name and known hash."""
        known = self._hashes.get((spec, config))
        if known is None:
            return render(spec, config, self.toolchain)
        return KernelSource(spec, config, self.toolchain, kernel_name(spec, config), "", known, ())

    def submit(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
        """Done at once, without an artifact."""
        future: Future[Compiled] = Future()
        future.set_result(Compiled(None))
        return future

    def keep(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
        """Nothing to keep."""
        return self.submit(source, facts)
