"""What tuning tells: its progress, the summary of a workload, and the result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.measure import roofline
from flashgen.spec.attention import Workload
from flashgen.spec.record import Record
from flashgen.spec.target import Target
from flashgen.tune.fleet import GpuReport, warnings


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, after each trial."""

    workload: Workload
    index: int
    """Of the workload, from 0."""
    total: int
    """Workloads of the run."""
    family: str
    trial: int
    """Trials of this study so far, those of earlier runs included."""
    limit: int
    """Trials this study can reach at most."""
    best: Record | None
    """The fastest right kernel of this workload so far."""
    last: Record | None
    """What was just measured; None when a study begins from records of earlier runs."""
    elapsed_s: float
    left_s: float | None
    """Until the run's budget ends, or what the trials left should take; None while nobody can know."""


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """What tuning one workload gave."""

    workload: Workload
    winner: Record | None
    """As the store ranks this run's kind of records when the workload is done; None if no config is right."""
    default_us: float | None
    """Time of the family's default config, measured with the finalists."""
    trials: int
    """Measured in this run."""
    resumed: int
    """Known from earlier runs, or from a GPU that was lost in this one."""
    space: int
    """Feasible configs of all families."""
    refused: int
    """Configs that were refused before any compile."""
    outcomes: dict[str, int]
    """How many trials ended with each status."""
    seconds: float
    problem: str = ""
    """Why the workload could not be tuned, or not to the end."""

    def __repr__(self) -> str:
        """What a session shows: a line, not the syntax trees of masks."""
        if self.winner is None:
            return f"<Summary {self.workload.name}: {self.problem or 'no winner'}>"
        return f"<Summary {self.workload.name}: {self.winner.config.name}, {self.winner.median_us:.1f} us>"

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of a measured winner, counting the pairs that the mask leaves."""
        if self.winner is None or self.winner.measurement.source == "model":
            return None
        return roofline.flops(self.workload) / self.winner.median_us / 1e6

    @property
    def gain(self) -> float | None:
        """How many times faster than the default config the winner is."""
        if self.winner is None or self.default_us is None:
            return None
        return self.default_us / self.winner.median_us

    def to_json(self) -> dict[str, Any]:
        """As `flashgen tune --json` prints it."""
        return {
            "workload": self.workload.to_json(),
            "winner": None if self.winner is None else self.winner.to_json(),
            "median_us": None if self.winner is None else self.winner.median_us,
            "tflops": self.tflops,
            "default_us": self.default_us,
            "gain": self.gain,
            "trials": self.trials,
            "resumed": self.resumed,
            "space": self.space,
            "refused": self.refused,
            "outcomes": self.outcomes,
            "seconds": self.seconds,
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True, repr=False)
class TuneResult:
    """What a run gave; also when it was interrupted, for all that was measured is stored."""

    target: Target
    summaries: tuple[Summary, ...]
    seconds: float
    interrupted: bool = False
    problem: str = ""
    """What ended the run early: the database, the GPU."""
    gpus: tuple[GpuReport, ...] = ()
    """What each GPU did, where there are several."""

    def __repr__(self) -> str:
        """What a session shows."""
        of = ", ".join(map(repr, self.summaries))
        return f"<TuneResult {self.target.name or self.target.key}, {self.seconds:.0f} s: {of or 'nothing'}>"

    @property
    def warnings(self) -> tuple[str, ...]:
        """One for each GPU whose times are not comparable with the others'."""
        return warnings(self.gpus)

    def to_json(self) -> dict[str, Any]:
        """As `flashgen tune --json` prints it."""
        return {
            "target": self.target.to_json(),
            "workloads": [summary.to_json() for summary in self.summaries],
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "problem": self.problem,
            "gpus": [gpu.to_json() for gpu in self.gpus],
            "warnings": list(self.warnings),
        }
