"""Several GPUs in one run, over recorded measurements; where processes matter, real ones."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import landscape
import misbehave
import pytest

from flashgen.codegen.source import KernelSource
from flashgen.errors import StoreError
from flashgen.measure.compile_pool import Compiled, CompilingFailed
from flashgen.measure.replay import NoCompiler, Replay
from flashgen.measure.worker import MeasuringFailed, Trial, Worker
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Record, Status
from flashgen.store.db import TuningDB
from flashgen.store.today import current_hash
from flashgen.tune import fleet
from flashgen.tune.fleet import GpuReport, warnings
from flashgen.tune.plan import Plan
from flashgen.tune.result import Progress, TuneResult
from flashgen.tune.tuner import tune

WORKLOADS = [landscape.workload(seq) for seq in (4096, 2048, 1024, 512)]
RECORDS = landscape.records(*WORKLOADS)
DEFAULT = landscape.FAMILY.find("m128n64w4s2_tma_heads")
LOST = "the GPU cannot be measured on"


class Gpu(Replay):
    """A replay that notes what it was asked, is slower by a factor, and may be lost."""

    def __init__(
        self,
        factor: float = 1.0,
        lost_after: float = math.inf,
        before: Callable[[Trial], object] = lambda trial: None,
    ) -> None:
        super().__init__(
            [
                replace(
                    record,
                    measurement=replace(
                        record.measurement,
                        **{
                            name: (us := getattr(record.measurement, name)) and us * factor
                            for name in ("median_us", "min_us", "max_us")
                        },
                    ),
                )
                for record in RECORDS
            ]
        )
        self.asked: list[tuple[Workload, Config]] = []
        self.controls: list[Config] = []
        self._lost_after, self._before = lost_after, before

    @property
    def workloads_asked(self) -> list[Workload]:
        return list(dict.fromkeys(workload for workload, _ in self.asked))

    def measure(self, trial: Trial) -> Measurement:
        self._before(trial)
        if len(self.asked) >= self._lost_after:
            raise MeasuringFailed(Status.CRASH, LOST)
        self.asked.append((trial.workload, trial.config))
        return super().measure(trial)

    def compare(self, trials: Sequence[Trial], passes: int) -> tuple[Measurement, ...]:
        if len(trials) == 1:
            self.controls.append(trials[0].config)
        return super().compare(trials, passes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TuningDB]:
    with TuningDB(tmp_path / "tuning.db", current_hash=current_hash) as opened:
        yield opened


def run(store: Any, *gpus: Any, workloads: Sequence[Workload] = WORKLOADS, **options: Any) -> TuneResult:
    plan = {key: options.pop(key) for key in tuple(options) if key in Plan.__slots__}
    given: dict[str, Any] = {
        "store": store,
        "target": landscape.TARGET,
        "measurers": {f"GPU {index}": gpu for index, gpu in enumerate(gpus)},
        "compiler": NoCompiler(landscape.TOOLCHAIN),
        "versions": landscape.VERSIONS,
        "plan": Plan(**{"trials": 6, **plan}),
    }
    return tune(workloads, **given | options)


def names(result: TuneResult) -> list[Workload]:
    return [summary.workload for summary in result.summaries]


def test_each_workload_is_tuned_wholly_on_one_gpu(store: TuningDB) -> None:
    both = threading.Barrier(2, timeout=30)
    begun: set[Workload] = set()

    def meet(trial: Trial) -> None:
        if trial.workload in WORKLOADS[:2] and trial.workload not in begun:
            begun.add(trial.workload)
            both.wait()  # the first two are in hand at once

    gpus = Gpu(before=meet), Gpu(before=meet)
    result = run(store, *gpus)
    assert names(result) == WORKLOADS
    assert [summary.trials for summary in result.summaries] == [6] * 4
    taken = [gpu.workloads_asked for gpu in gpus]
    assert sorted(taken[0] + taken[1], key=WORKLOADS.index) == WORKLOADS
    assert all(len(part) >= 1 for part in taken)
    assert [len(part) for part in taken] == [gpu.workloads for gpu in result.gpus]
    assert len(list(store.records())) >= 24
    assert not result.problem and not result.interrupted and not result.warnings
    (again,) = run(store, Gpu(), workloads=WORKLOADS[:1]).summaries
    assert (again.trials, again.resumed) == (0, 6), "a later run, also on one GPU, goes on from there"


def test_one_gpu_has_no_control_and_runs_in_the_callers_thread(store: TuningDB) -> None:
    threads: set[threading.Thread] = set()
    gpu = Gpu(before=lambda trial: threads.add(threading.current_thread()))
    result = run(store, gpu, finalists=2)
    assert threads == {threading.current_thread()}
    assert (gpu.controls, result.gpus, result.to_json()["gpus"]) == ([], (), [])


def test_an_idle_gpu_takes_the_next_workload_and_starts_from_the_winners(store: TuningDB) -> None:
    done = threading.Event()
    slow = Gpu(before=lambda trial: done.wait(30))
    quick = Gpu()

    def tell(progress: Progress) -> None:
        if progress.workload == WORKLOADS[3] and progress.trial == progress.limit:
            done.set()

    result = run(store, slow, quick, trials=40, sampler="tpe", progress=tell)
    taken = [gpu.workloads_asked for gpu in (slow, quick)]
    assert sorted(map(len, taken)) == [1, 3], "one was held up by its first"
    first, second = [workload for workload in WORKLOADS if workload in max(taken, key=len)][:2]
    winner = result.summaries[WORKLOADS.index(first)].winner
    assert winner is not None and winner.config != DEFAULT
    asked = [config for workload, config in quick.asked if workload == second]
    assert asked[0] == DEFAULT and winner.config in asked[1:3]


def test_the_same_workload_twice_is_measured_once(store: TuningDB) -> None:
    plain = WORKLOADS[0]
    with_lse = replace(plain, spec=replace(plain.spec, return_lse=True))
    gpus = Gpu(before=lambda trial: time.sleep(0.01)), Gpu()
    result = run(store, *gpus, workloads=[plain, with_lse])
    assert [(s.trials, s.resumed) for s in result.summaries] == [(6, 0), (0, 6)]


def test_each_gpu_times_the_same_control_at_its_start_and_its_end(store: TuningDB) -> None:
    gpus = Gpu(), Gpu(1.02), Gpu(1.01)
    result = run(store, *gpus)
    true_us = landscape.time_us(DEFAULT)
    assert true_us is not None
    for gpu, report, factor in zip(gpus, result.gpus, (1.0, 1.02, 1.01), strict=True):
        assert gpu.controls[0] == gpu.controls[-1] == DEFAULT and len(gpu.controls) >= 2
        assert report.before_us == report.after_us == pytest.approx(factor * true_us)
    assert result.warnings == ()
    told = result.to_json()
    assert [gpu["name"] for gpu in told["gpus"]] == ["GPU 0", "GPU 1", "GPU 2"]
    assert sum(gpu["workloads"] for gpu in told["gpus"]) == 4
    json.dumps(told)


def test_a_gpu_whose_control_is_off_is_named(store: TuningDB) -> None:
    result = run(store, Gpu(), Gpu(1.12), Gpu(1.03))
    (warning,) = result.warnings
    assert warning.startswith("GPU 1: its control took ") and "12% more than the median" not in warning
    assert "9% more than the median of all GPUs" in warning
    assert warning.endswith("tune again without it, its times are not comparable")
    assert result.to_json()["warnings"] == [warning]


@pytest.mark.parametrize(
    ("times", "named"),
    [
        ([(100.0, 104.0), (103.0, 100.0)], []),
        ([(100.0, 100.0), (108.0, 109.0)], ["1"]),
        ([(100.0, 100.0), (100.0, 120.0), (101.0, 99.0)], ["1"]),
        ([(100.0, 100.0), (90.0, 100.0), (101.0, 99.0)], ["1"]),
        ([(100.0, None), (None, None), (120.0, None)], ["2"]),
        ([(None, None), (None, None)], []),
    ],
)
def test_which_controls_are_off(times: list[tuple[float | None, float | None]], named: list[str]) -> None:
    reports = [GpuReport(str(n), 1, before, after) for n, (before, after) in enumerate(times)]
    assert [told.split(":")[0] for told in warnings(reports)] == named


def test_a_control_that_does_not_compile_is_left_out(store: TuningDB) -> None:
    class Refusing(NoCompiler):
        def submit(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
            if source.config != DEFAULT:
                return super().submit(source, facts)
            future: Future[Compiled] = Future()
            future.set_result(Compiled(None, Measurement(Status.NO_COMPILE, reason="too complex")))
            return future

    result = run(store, Gpu(), Gpu(), compiler=Refusing(landscape.TOOLCHAIN))
    assert [(gpu.before_us, gpu.after_us) for gpu in result.gpus] == [(None, None)] * 2
    assert [summary.trials for summary in result.summaries] == [6] * 4
    assert not result.problem and not result.warnings


def test_a_gpu_that_is_lost_ends_its_own_part_alone(store: TuningDB) -> None:
    begun = threading.Event()
    whole = Gpu(before=lambda trial: begun.wait(30))
    dying = Gpu(lost_after=4, before=lambda trial: begun.set())
    result = run(store, whole, dying)
    assert names(result) == WORKLOADS and result.problem == ""
    assert [gpu.lost for gpu in result.gpus] == ["", LOST]
    assert [gpu.workloads for gpu in result.gpus] == [4, 0]
    assert result.gpus[1].before_us is not None and result.gpus[1].after_us is None
    (left,) = dying.workloads_asked
    assert left in whole.workloads_asked
    summary = result.summaries[WORKLOADS.index(left)]
    assert (summary.problem, summary.resumed, summary.trials) == ("", 4, 2)
    assert summary.winner is not None


def test_a_workload_that_two_gpus_were_lost_over_is_not_given_to_a_third(store: TuningDB) -> None:
    class Cursed(Gpu):
        def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
            if workload == WORKLOADS[1]:
                raise MeasuringFailed(Status.CRASH, LOST)
            return super().prepare(workload, within_s)

    gpus = [Cursed() for _ in range(4)]
    result = run(store, *gpus)
    assert [bool(gpu.lost) for gpu in result.gpus].count(True) == 2
    assert [summary.problem for summary in result.summaries] == ["", LOST, "", ""]
    assert result.problem == ""


def test_the_run_fails_when_no_gpu_is_left(store: TuningDB) -> None:
    result = run(store, Gpu(lost_after=3), Gpu(lost_after=3))
    assert result.problem == LOST
    assert [gpu.lost for gpu in result.gpus] == [LOST, LOST]
    assert 1 <= len(result.summaries) <= 2
    assert len(list(store.records())) == 6, "what was measured is kept"


def test_a_gpu_that_never_starts_is_lost_and_the_others_do_its_work(store: TuningDB) -> None:
    with Worker(entry="misbehave:no_executor", options={}) as absent:
        result = run(store, Gpu(), absent)
    assert "no CUDA-capable device" in result.gpus[1].lost
    assert [summary.trials for summary in result.summaries] == [6] * 4


def test_a_compiler_that_cannot_be_used_is_no_gpus_fault(store: TuningDB) -> None:
    class Broken(NoCompiler):
        def submit(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
            future: Future[Compiled] = Future()
            future.set_exception(CompilingFailed(Status.CRASH, "the compiler cannot be used"))
            return future

    result = run(store, Gpu(), Gpu(), compiler=Broken(landscape.TOOLCHAIN))
    assert result.problem == "the compiler cannot be used"
    assert [gpu.lost for gpu in result.gpus] == ["", ""]


def test_progress_is_told_one_call_at_a_time(store: TuningDB) -> None:
    inside, most, told = 0, 0, []

    def tell(progress: Progress) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        told.append((progress.index, progress.trial))
        inside -= 1

    run(store, Gpu(), Gpu(), Gpu(), progress=tell)
    assert most == 1
    assert sorted(told) == [(index, trial) for index in range(4) for trial in range(7)]


class Slowly(Gpu):
    """A trial takes a while."""

    def measure(self, trial: Trial) -> Measurement:
        time.sleep(0.05)
        return super().measure(trial)


def test_the_budget_is_shared_by_the_workloads_on_each_gpu(store: TuningDB) -> None:
    gpus = Slowly(), Slowly()
    result = run(store, *gpus, trials=None, budget_s=4.0, sampler="tpe")
    assert 3.0 < result.seconds < 5.0
    assert [len(gpu.workloads_asked) for gpu in gpus] == [2, 2]
    trials = [summary.trials for summary in result.summaries]
    assert min(trials) > 0.4 * max(trials) > 4
    assert all(gpu.after_us is not None for gpu in result.gpus), "there was time for the second control"


def test_a_failing_database_ends_the_run_on_all_gpus(store: TuningDB) -> None:
    class Full:
        """Full for one GPU's thread; the other's record is not lost."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def add(self, record: Record) -> bool:
            if threading.current_thread() is not threading.main_thread():
                raise StoreError("the disk is full")
            return store.add(record)

    result = run(Full(), Slowly(), Slowly(), trials=200)
    assert result.problem == "the disk is full"
    assert result.seconds < 10 and sum(summary.trials for summary in result.summaries) < 200


def test_the_end_of_a_run_interrupts_what_other_gpus_wait_for(
    store: TuningDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while the second GPU runs a kernel that never ends: no outcome of that kernel's."""
    monkeypatch.setenv("FLASHGEN_TEST_FOLDER", str(tmp_path))
    works = [misbehave.workload(q_len=q_len, lse=False) for q_len in (24, 16)]
    space = landscape.FAMILY.space(works[0].spec, landscape.TARGET)
    first, second = [landscape.FAMILY.default(works[0].spec, landscape.TARGET, _facts(works[0])), *space][:2]
    assert first != second

    class Interrupted:
        source = "measured"

        def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
            return "full"

        def measure(self, trial: Trial) -> Measurement:
            while not (tmp_path / "grandchild").exists():
                time.sleep(0.02)
            raise KeyboardInterrupt

        def compare(self, trials: Sequence[Trial], passes: int) -> tuple[Measurement, ...]:
            return tuple(Measurement(Status.OK, median_us=100.0) for _ in trials)

        def close(self) -> None:
            pass

    with Worker(
        entry="misbehave:cpu_executor", options={"kernels": {second.name: "loops"}}, trial_timeout_s=300.0
    ) as worker:
        result = run(store, Interrupted(), worker, workloads=works, sampler="grid")
        assert worker.child.pid is None
    assert result.interrupted and result.problem == ""
    assert result.seconds < 100
    assert [(r.config, r.measurement.status) for r in store.records()] == [(first, Status.OK)]
    assert sorted(summary.trials for summary in result.summaries) == [0, 1]


def _facts(workload: Workload) -> CallFacts:
    from flashgen.build.inputs import contiguous_facts

    return contiguous_facts(workload)


def test_the_end_of_a_run_does_not_wait_for_a_compile(store: TuningDB) -> None:
    class Never(NoCompiler):
        def submit(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
            if threading.current_thread() is threading.main_thread():
                return super().submit(source, facts)
            return Future()

    class Interrupting(Gpu):
        def measure(self, trial: Trial) -> Measurement:
            time.sleep(0.2)
            raise KeyboardInterrupt

    start = time.monotonic()
    result = run(store, Interrupting(), Gpu(), compiler=Never(landscape.TOOLCHAIN))
    assert result.interrupted and time.monotonic() - start < 20 * fleet.POLL_S


def test_ctrl_c_stops_all_gpus_and_the_next_run_goes_on(tmp_path: Path) -> None:
    database = tmp_path / "tuning.db"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", str(database), "60", "0", "0", "2"],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told = [process.stdout.readline().split() for _ in range(16)]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    *more, printed = rest.splitlines()
    told += [line.split() for line in more]
    result = json.loads(printed)
    assert (process.returncode, result["interrupted"], result["problem"]) == (0, True, "")
    assert len({workload for workload, _ in told}) == 2, "both were at work"
    with TuningDB(database) as store:
        assert store.problems() == []
        stored = {(str(r.workload.q_len), r.config.name) for r in store.records()}
        pairs = {(workload, config) for workload, config in told}
        # What is stored is told at once, unless Ctrl-C, which is the main thread's, comes between the two.
        assert pairs <= stored and len(stored - pairs) <= 1
        gpus = Gpu(), Gpu()
        summaries = run(store, *gpus, workloads=WORKLOADS[:2], trials=60).summaries
    assert sum(summary.resumed for summary in summaries) == len(stored)
    assert not stored & {(str(w.q_len), c.name) for gpu in gpus for w, c in gpu.asked}
