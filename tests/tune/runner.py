"""A tuning run in a process of its own, for tests that interrupt or kill it: replayed, a trial every 30 ms.

    python runner.py DATABASE TRIALS SEED [NOISE [GPUS]]

prints a line for each trial and the result as JSON. With several GPUs there are as many workloads, and each
line begins with its workload's length.
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
from flashgen.tune.result import Progress
from flashgen.tune.tuner import tune


class Slowly(Replay):
    """Answers after a while, as a GPU does."""

    def measure(self, trial: Trial) -> Measurement:
        time.sleep(0.03)
        return super().measure(trial)


def main(database: str, trials: str, seed: str, noise: str = "0", gpus: str = "1") -> None:
    workloads = [landscape.workload(4096 >> index) for index in range(int(gpus))]
    records = landscape.records(*workloads)

    def tell(progress: Progress) -> None:
        if progress.last is not None:
            prefix = f"{progress.workload.q_len} " if len(workloads) > 1 else ""
            print(prefix + progress.last.config.name, flush=True)

    with TuningDB(database) as store:
        result = tune(
            workloads,
            store=store,
            target=landscape.TARGET,
            measurers={
                f"GPU {index}": Slowly(records, float(noise), int(seed)) for index in range(len(workloads))
            },
            compiler=NoCompiler(landscape.TOOLCHAIN),
            versions=landscape.VERSIONS,
            plan=Plan(trials=int(trials), seed=int(seed), families=(landscape.FAMILY.name,)),
            progress=tell,
        )
    print(json.dumps(result.to_json()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
