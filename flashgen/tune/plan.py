"""How long tuning may take: budgets as people write them, and what to do within them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Real

from flashgen.errors import InvalidArgument
from flashgen.spec.form import check_whole, shown
from flashgen.tune.search import SAMPLERS, check_sampler

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")

DEFAULT_SHARE = 0.1
FEWEST_TRIALS = 24
"""Trials of a study (one workload, one family) when neither trials nor a budget is given: this share of the
feasible space, and at least so many."""

MAX_SEED = 2**32 - 1
"""Of numpy, which the samplers draw from."""
MAX_BUDGET_S = 365 * 24 * 3600
"""A year. Python cannot wait for longer than some hundred."""


def parse_budget(text: str) -> float:
    """Seconds in a duration: `90`, `90s`, `10m`, `1h`, `1h30m`.

    Raises:
        InvalidArgument: it is no duration, or not longer than nothing.
    """
    compact = re.sub(r"\s", "", text.lower())
    parts = _PART.findall(compact)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    whole = "".join(number + unit for number, unit in parts) == compact
    guessed = len(parts) > 1 and any(not unit for _, unit in parts)  # 1h30 could be seconds or minutes
    if not whole or guessed or not 0 < seconds < math.inf:
        raise InvalidArgument(f"budget {shown(text)} is no duration; write 90s, 10m, 1h or 1h30m")
    return seconds


def format_seconds(seconds: float) -> str:
    """A duration as `parse_budget` reads it: `42s`, `10m00s`, `1h05m`."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits and strategy of one tuning run."""

    trials: int | None = None
    """At most so many trials a study; None: a tenth of the space, or all of it with a budget or a grid."""
    budget_s: float | None = None
    """For the whole run, shared by the workloads that are left; held within one trial."""
    sampler: str = "guided"
    """A row of `search.SAMPLERS`; `grid` without a limit measures the whole feasible space."""
    finalists: int = 4
    """The best so many of all families are measured again, interleaved."""
    passes: int = 9
    """Interleaved passes over the finalists."""
    seed: int = 0
    """Of every random choice: 0 to `MAX_SEED`."""
    families: tuple[str, ...] = ()
    """Only these are searched; none: all that serve a workload."""

    def __post_init__(self) -> None:
        check_sampler(self.sampler)
        if self.trials is not None:
            check_whole("trials", self.trials, 1)
        check_whole("finalists", self.finalists, 0)
        check_whole("passes", self.passes, 1)
        check_whole("seed", self.seed, 0, MAX_SEED)
        budget = self.budget_s
        if budget is not None and not (isinstance(budget, Real) and 0 < budget <= MAX_BUDGET_S):
            raise InvalidArgument(
                f"budget_s={shown(budget)} must be more than 0 seconds and at most {MAX_BUDGET_S}, a year; "
                "None is no limit"
            )

    def trial_limit(self, space: int) -> int:
        """Trials of one study of so many feasible configs."""
        if self.trials is not None:
            return min(self.trials, space)
        if self.budget_s is not None or SAMPLERS[self.sampler].exhaustive:
            return space
        return min(max(int(DEFAULT_SHARE * space), FEWEST_TRIALS), space)
