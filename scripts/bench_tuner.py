"""What tuning costs, and what it leaves for the process that serves calls.

    python scripts/bench_tuner.py [STEP ...] [--out FILE] [--merge]

    replay    the samplers over the recorded spaces, 20 seeds each (tests/data/exhaustive)
    store     5,000 records of 100 specs: the query for the best, and the way to a process's first decision
    import    `import flashgen` beyond `import torch`
    suite     a GPU: the suite llama3-8b from an empty database, which is kept if FLASHGEN_DB names it
    serial    a GPU: the same trials compiled ahead by all cores, and one after another

Without a step: all that this machine can run. Writes {"header": ..., "rows": [...]}.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashgen import api
from flashgen.build.compile import toolchain
from flashgen.build.device import device_count, live_target
from flashgen.build.versions import driver_version
from flashgen.codegen.families import find_family
from flashgen.measure.compile_pool import CompilePool, cores
from flashgen.measure.peers import versions
from flashgen.measure.worker import Worker
from flashgen.settings import VERSION
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.store.today import current_hash
from flashgen.tune.plan import Plan
from flashgen.tune.result import TuneResult
from flashgen.tune.suites import make_workload
from flashgen.tune.tuner import tune

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
RECORDED = sorted(ROOT.glob("tests/data/exhaustive/*.jsonl"))
NOISE = 0.02
"""Of one timing on an H200: repeated ones differ by so much (benchmarks/NOTES.md)."""


def replay() -> Iterator[Row]:
    """Each sampler on each recorded space; median, p95, worst: the winner's time over the best's, less 1."""
    for score in api.simulate(RECORDED, noise=NOISE).to_json()["scores"]:
        of = score.pop("workload")
        del score["runs"]
        where = (
            "all" if of is None else f"d{of['spec']['head_dim']} {of['spec']['mask']['name']} {of['q_len']}"
        )
        yield {"step": "replay", "noise": NOISE, "workload": where, **score}


# The store


def filled(path: Path) -> Workload:
    """A database of 5,000 records of 100 specs, each of today's kernel; one of its workloads."""
    target, family = find_target("nvidia-h200"), find_family("attention_fwd")
    rules = [masks.full(), masks.causal(), masks.sliding_window(63, 0), masks.causal("top_left")]
    specs = [
        (AttentionSpec(head_dim, head_dim, dtype, mask.rule), mask)
        for head_dim in (32, 48, 64, 72, 80, 88, 96, 112, 120, 128, 192, 224, 256)
        for dtype in ("bf16", "fp16")
        for mask in rules
    ][:100]
    records = []
    for spec, mask in specs:
        space = family.space(spec, target)[::8][:10]
        for at, config in enumerate(space * 5):
            seq = 512 << at // 10
            work = make_workload(
                head_dim=spec.head_dim,
                heads=32,
                kv_heads=8,
                q_len=seq,
                k_len=seq,
                mask=mask,
                dtype=spec.dtype,
                batch=16384 // seq,
            )
            work = replace(work, spec=spec)
            record = Record(
                target=target,
                workload=work,
                config=config,
                measurement=Measurement(Status.OK, 100.0 + at, 99.0, 200.0, 9),
                kernel_hash="",
                versions=Versions(VERSION, toolchain().triton),
                admission=family.admission(config),
                created_at=datetime.now(timezone.utc).isoformat(),
            )
            records.append(replace(record, kernel_hash=current_hash(record) or ""))
    with TuningDB(path) as db:
        db.add_many(records)
        assert len({record.workload.spec for record in records}) == 100 and len(records) == 5000
    return records[1234].workload


def store() -> Iterator[Row]:
    """The query for the best record, in one process; the way to a first decision, in fresh ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tuning.db")
        work, target = filled(path), find_target("nvidia-h200")
        with TuningDB(path, current_hash=current_hash, readonly=True) as db:
            assert db.ranked(work, target)
            times = _timed(lambda: db.ranked(work, target), 50)
        yield _ms("store", "best query", times, records=5000, specs=100)
        script = (
            "import sys, time, torch, triton\n"
            "start = time.perf_counter()\n"
            "from flashgen import api\n"
            "workload = api.Workload.from_json(__import__('json').loads(sys.argv[2]))\n"
            "record = api.best_record(workload, 'nvidia-h200', db=sys.argv[1])\n"
            "assert record is not None and record.workload == workload\n"
            "print(time.perf_counter() - start)\n"
        )
        argument = json.dumps(work.to_json())
        for what, variables in (
            ("import, open, first decision", {}),
            ("the same where nothing can be cached", {"FLASHGEN_CACHE": os.devnull}),
        ):
            yield _ms("store", what, _fresh(script, str(path), argument, **variables), records=5000)


def imports() -> Iterator[Row]:
    """`import flashgen` once torch is imported, in fresh processes."""
    script = (
        "import sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import flashgen\n"
        "print(time.perf_counter() - start)\n"
        "unwanted = {'triton', 'jinja2', 'sqlalchemy', 'optuna'} & set(sys.modules)\n"
        "assert not unwanted, unwanted\n"
    )
    yield _ms("import", "import flashgen, beyond import torch", _fresh(script))


def _timed(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _fresh(script: str, *arguments: str, count: int = 7, **variables: str) -> list[float]:
    """Seconds that fresh processes print; the first, which fills the disk's caches, is left out.

    It also compiles the modules of a checkout, which an installed package has compiled: the variable that
    forbids this is not passed on.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(count + 1):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**kept, **variables},
            check=False,
        )
        if done.returncode:
            sys.exit(done.stderr)
        times.append(float(done.stdout))
    return times[1:]


def _ms(step: str, what: str, times: list[float], **more: Any) -> Row:
    figures = {"ms_median": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    return {
        "step": step,
        "what": what,
        **more,
        **{k: 1e3 * v for k, v in figures.items()},
        "passes": len(times),
    }


# On a GPU


@contextmanager
def _database() -> Iterator[str]:
    """Of nothing: a file that goes away, or the one that is to be kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(os.environ.get("FLASHGEN_DB", Path(folder, "tuning.db")))
        assert not path.exists(), f"{path} is not empty"
        yield str(path)


def _told(result: TuneResult) -> Row:
    summaries = result.summaries
    return {
        "seconds": round(result.seconds, 1),
        "workloads": len(summaries),
        "trials": [summary.trials for summary in summaries],
        "space": [summary.space for summary in summaries],
        "winners": [summary.winner and summary.winner.config.name for summary in summaries],
        "problem": result.problem,
    }


def suite() -> Iterator[Row]:
    """The whole suite with the plan that a user gets, from an empty database."""
    with _database() as db:
        yield {"step": "suite", "suite": "llama3-8b", **_told(api.tune("llama3-8b", device=0, db=db))}


def serial() -> Iterator[Row]:
    """24 random configs of each family: compiled ahead by all cores, and one after another by one."""
    work = make_workload(
        head_dim=128,
        heads=32,
        kv_heads=8,
        q_len=4096,
        k_len=4096,
        mask=masks.full(),
        dtype="bf16",
        batch=4,
    )
    plan = Plan(sampler="random", trials=24)
    for ahead in (None, 1):
        with (
            Worker(0) as worker,
            tempfile.TemporaryDirectory() as cache,
            TuningDB(Path(cache, "tuning.db"), current_hash=current_hash) as db,
        ):
            machine = worker.machine()
            with CompilePool(machine.target, toolchain(), ahead, cache=Path(cache, "artifacts")) as pool:
                pool.ahead = ahead or pool.ahead
                made = Versions(VERSION, toolchain().triton, machine.torch, machine.driver)
                result = tune(
                    (work,),
                    store=db,
                    target=machine.target,
                    measurers={"GPU 0": worker},
                    compiler=pool,
                    versions=made,
                    plan=plan,
                )
                yield {"step": "serial", "jobs": pool.jobs, "ahead": pool.ahead, **_told(result)}


STEPS: dict[str, tuple[Callable[[], Iterator[Row]], bool]] = {
    "replay": (replay, False),
    "store": (store, False),
    "import": (imports, False),
    "suite": (suite, True),
    "serial": (serial, True),
}
"""What runs a step, and whether it needs a GPU."""


def main() -> None:
    """Runs the steps and writes their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the rows go as JSON")
    parser.add_argument("--merge", action="store_true", help="keep the rows of other steps in FILE")
    args = parser.parse_args()
    if unknown := [step for step in args.steps if step not in STEPS]:
        parser.error(f"no step {', '.join(unknown)}; known: {', '.join(STEPS)}")
    gpus = device_count()
    header = {
        "gpu": live_target().name if gpus else "none",
        "driver": driver_version() if gpus else "",
        "versions": versions(),
        "command": shlex.join(["scripts/bench_tuner.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    rows: list[Row] = []
    for step in args.steps or [name for name, (_, needs) in STEPS.items() if gpus or not needs]:
        for row in STEPS[step][0]():
            # Files of several commands are merged: each row says when and on what it was measured.
            rows.append({**row, "run": header["date"], "gpu": header["gpu"], "cores": cores()})
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                _write(args.out, header, rows, args.merge)


def _write(path: Path, header: Row, rows: list[Row], merge: bool) -> None:
    kept: list[Row] = []
    if merge and path.exists():
        done = {row["step"] for row in rows}
        kept = [row for row in json.loads(path.read_text())["rows"] if row["step"] not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"header": header, "rows": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
