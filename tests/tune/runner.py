"""A tuning run in a process of its own, for tests that interrupt or kill it: replayed, a trial every 30 ms.

    python runner.py DATABASE TRIALS SEED [NOISE]

prints a line for each trial and the result as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import landscape

from flashgen.measure.replay import NoCompiler, Replay
from flashgen.measure.worker import Trial
from flashgen.spec.record import Measurement
from flashgen.store.db import TuningDB
from flashgen.tune.plan import Plan
from flashgen.tune.tuner import Progress, tune


class Slowly(Replay):
    """Answers after a while, as a GPU does."""

    def measure(self, trial: Trial) -> Measurement:
        time.sleep(0.03)
        return super().measure(trial)


def main(database: str, trials: str, seed: str, noise: str = "0") -> None:
    def tell(progress: Progress) -> None:
        if progress.last is not None:
            print(progress.last.config.name, flush=True)

    with TuningDB(database) as store:
        result = tune(
            [landscape.workload()],
            store=store,
            target=landscape.TARGET,
            measurer=Slowly(landscape.records(), float(noise), int(seed)),
            compiler=NoCompiler(landscape.TOOLCHAIN),
            versions=landscape.VERSIONS,
            plan=Plan(trials=int(trials), seed=int(seed)),
            progress=tell,
        )
    print(json.dumps(result.to_json()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
