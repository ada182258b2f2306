"""Measures how good the search is: on four named shapes, the whole feasible space against a tenth of it.

    python scripts/exhaustive.py --out DIR          (on a GPU; four minutes on one H200)

For each shape every feasible config is measured into one database, and the tuner searches as it does by
default into another, which starts empty. The two winners are then timed against each other, interleaved.
Writes DIR/search.json (header and one row a shape) and DIR/<shape>.jsonl (every record of the whole space).
Records that DIR holds are not measured again: a second run repeats the search and the comparison in a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashgen import api
from flashgen.build.compile import toolchain
from flashgen.build.inputs import contiguous_facts
from flashgen.measure.compile_pool import CompilePool
from flashgen.measure.worker import Trial, Worker
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.store.db import TuningDB
from flashgen.store.transfer import export_file, import_records
from flashgen.tune.plan import Plan
from flashgen.tune.result import Summary
from flashgen.tune.suites import workloads_from_args

SHAPES: dict[str, dict[str, Any]] = {
    "d128_causal_4096": {"head_dim": 128, "mask": "causal", "seq": 4096, "batch": 4},
    "d128_full_1024": {"head_dim": 128, "mask": "full", "seq": 1024, "batch": 16},
    "d64_causal_1024": {"head_dim": 64, "mask": "causal", "seq": 1024, "batch": 16},
    "d64_full_4096": {"head_dim": 64, "mask": "full", "seq": 4096, "batch": 4},
}


def tuned(works: Sequence[Workload], plan: Plan, db: Path) -> tuple[Summary, ...]:
    """One tuning run into a database of its own; ends the script if a shape has no winner."""
    result = api.tune(works, plan=plan, db=str(db))
    for summary in result.summaries:
        if summary.winner is None or result.problem:
            sys.exit(f"{summary.workload.name}: {result.problem or summary.problem or 'no config was right'}")
    return result.summaries


def winner(summary: Summary) -> Config:
    """The config that a run found."""
    assert summary.winner is not None
    return summary.winner.config


def main() -> None:
    """Runs the shapes and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument("--passes", type=int, default=15, help="interleaved passes over the two winners")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    works = [workloads_from_args(heads=32, kv_heads=8, dtype="bf16", **shape)[0] for shape in SHAPES.values()]
    with tempfile.TemporaryDirectory() as scratch:
        with TuningDB(Path(scratch, "whole.db")) as db:
            for held in sorted(args.out.glob("*.jsonl")):
                import_records(db, held)
        whole = tuned(works, Plan(sampler="grid"), Path(scratch, "whole.db"))
        with TuningDB(Path(scratch, "whole.db"), readonly=True) as db:
            for name, work in zip(SHAPES, works, strict=True):
                export_file((r for r in db.records() if r.workload == work), args.out / f"{name}.jsonl")
        part: list[Summary] = []
        for at, work in enumerate(works):  # each from nothing: one shape's records help the next
            part += tuned([work], Plan(), Path(scratch, f"part{at}.db"))
    rows = []
    with Worker(0) as worker:
        machine = worker.machine()
        with CompilePool(machine.target, toolchain()) as pool:
            for name, work, best, found in zip(SHAPES, works, whole, part, strict=True):
                worker.prepare(work)
                facts = contiguous_facts(work)
                compiled = [
                    pool.submit(pool.source(work.spec, winner(s)), facts).result() for s in (best, found)
                ]
                trials = [
                    Trial(work, winner(summary), answer.artifact)
                    for summary, answer in zip((best, found), compiled, strict=True)
                ]
                times = worker.compare(trials, args.passes)
                rows.append(
                    {
                        "shape": name,
                        "workload": work.name,
                        "space": best.space,
                        "exhaustive_winner": winner(best).name,
                        "exhaustive_us": times[0].median_us,
                        "tuner_trials": found.trials,
                        "tuner_seconds": round(found.seconds, 1),
                        "tuner_winner": winner(found).name,
                        "tuner_us": times[1].median_us,
                        "tuner_over_exhaustive": (times[1].median_us or 0) / (times[0].median_us or 1),
                        "passes": args.passes,
                    }
                )
                print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    header = {
        "gpu": machine.target.name,
        "driver": machine.driver,
        "versions": {"torch": machine.torch, "triton": toolchain().triton},
        "command": " ".join(sys.argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    (args.out / "search.json").write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
