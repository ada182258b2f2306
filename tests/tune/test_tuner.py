"""The whole tuner over recorded measurements and a real database; no GPU, no compiler."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import landscape
import misbehave
import pytest

from flashgen.codegen.source import KernelSource
from flashgen.errors import StoreError
from flashgen.measure.compile_pool import Compiled, CompilePool
from flashgen.measure.replay import NoCompiler, Replay
from flashgen.measure.worker import MeasuringFailed, Trial, Worker
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.masks import key_padding
from flashgen.spec.record import Measurement, Record, Status
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.store.today import current_hash
from flashgen.tune import tuner
from flashgen.tune.plan import Plan
from flashgen.tune.result import Progress, TuneResult
from flashgen.tune.tuner import tune

SPACE = landscape.space()
DEFAULT = landscape.FAMILY.find("m128n64w4s2_tma_heads")


class Noted(Replay):
    """A replay that notes what it was asked."""

    def __init__(self, records: Sequence[Record], noise: float = 0.0, seed: int = 0) -> None:
        super().__init__(records, noise, seed)
        self.asked: list[Config] = []
        self.compared: list[list[Config]] = []

    def measure(self, trial: Trial) -> Measurement:
        self.asked.append(trial.config)
        return super().measure(trial)

    def compare(self, trials: Sequence[Trial], passes: int) -> tuple[Measurement, ...]:
        self.compared.append([trial.config for trial in trials])
        return super().compare(trials, passes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TuningDB]:
    with TuningDB(tmp_path / "tuning.db", current_hash=current_hash) as opened:
        yield opened


def run(store: Any, measurer: Any = None, *workloads: Workload, **options: Any) -> TuneResult:
    plan = {key: options.pop(key) for key in tuple(options) if key in Plan.__slots__}
    given: dict[str, Any] = {
        "store": store,
        "target": landscape.TARGET,
        "measurers": {"GPU 0": measurer or Replay(landscape.records())},
        "compiler": NoCompiler(landscape.TOOLCHAIN),
        "versions": landscape.VERSIONS,
        "plan": Plan(**{"sampler": "tpe"} | plan),  # which takes all the trials it may
    }
    return tune(workloads or (landscape.workload(),), **given | options)


def test_a_quarter_of_the_space_is_enough(store: TuningDB) -> None:
    (summary,) = run(store, trials=len(SPACE) // 4).summaries
    assert summary.winner is not None
    assert summary.winner.median_us < 1.02 * landscape.best_us()
    assert summary.trials == len(SPACE) // 4
    assert summary.space == len(SPACE)
    assert summary.refused == len(landscape.FAMILY.all_configs()) - len(SPACE)
    assert summary.default_us == pytest.approx(landscape.time_us(DEFAULT))
    assert summary.gain == pytest.approx(landscape.time_us(DEFAULT) / summary.winner.median_us)
    flops = 2 * 4 * 32 * 4096**2 * 256 * (4097 / 8192)
    assert summary.tflops == pytest.approx(flops / summary.winner.median_us / 1e6, rel=1e-3)


def test_a_result_shows_itself_in_a_line(store: TuningDB) -> None:
    result = run(store, trials=3)
    winner = result.summaries[0].winner
    assert winner is not None
    told = f"<Summary b4h32kv8q4096k4096: {winner.config.name}, {winner.median_us:.1f} us>"
    assert repr(result.summaries[0]) == told and told in repr(result)
    assert re.match(r"<TuneResult nvidia-h200, \d+ s: ", repr(result)) and len(repr(result)) < 200
    nothing = replace(result.summaries[0], winner=None, problem="it does not fit")
    assert repr(nothing) == "<Summary b4h32kv8q4096k4096: it does not fit>"


def test_every_outcome_is_stored_with_its_reason(store: TuningDB) -> None:
    measurer = Noted(landscape.records())
    (summary,) = run(store, measurer, trials=60).summaries
    stored = list(store.records())
    by_config = {record.config for record in stored}
    assert by_config == set(measurer.asked) and len(by_config) == 60
    wrong = [record for record in stored if record.measurement.status is Status.WRONG]
    assert summary.outcomes == {"OK": 60 - len(wrong), "WRONG": len(wrong)}
    assert wrong and all("max error 0.3" in record.measurement.reason for record in wrong)
    for record in stored:
        assert record.admission == landscape.FAMILY.admission(record.config)
        assert record.kernel_hash == current_hash(record)
        assert record.versions == landscape.VERSIONS
        assert record.created_at.endswith("+00:00")


def test_grid_measures_the_whole_space_and_finds_the_best(store: TuningDB) -> None:
    measurer = Noted(landscape.records())
    (summary,) = run(store, measurer, sampler="grid").summaries
    assert measurer.asked[0] == DEFAULT
    assert len(measurer.asked) == len(set(measurer.asked)) == len(SPACE)
    assert summary.winner is not None
    assert summary.winner.median_us == landscape.best_us()


def test_the_default_is_tried_first_then_the_neighbours_winners(store: TuningDB) -> None:
    near, far, other_gpu = SPACE[40], SPACE[41], SPACE[42]
    store.add(landscape.record(landscape.workload(8192), near, 900.0))
    store.add(landscape.record(landscape.workload(512), far, 90.0))
    elsewhere = landscape.record(landscape.workload(), other_gpu, 1500.0)
    store.add(replace(elsewhere, target=find_target("nvidia-h100-pcie")))
    measurer = Noted(landscape.records())
    run(store, measurer, trials=8)
    assert measurer.asked[:4] == [DEFAULT, near, far, other_gpu]


def test_a_suite_hands_its_winners_on(store: TuningDB) -> None:
    """Also to another mask, whose records the store does not rank."""
    from flashgen.spec.masks import full

    first, second = landscape.workload(), landscape.workload(mask=full())
    measurer = Noted(landscape.records(first, second))
    result = run(store, measurer, first, second, trials=40)
    winner = result.summaries[0].winner
    assert winner is not None and winner.config != DEFAULT
    assert measurer.asked[40:42] == [DEFAULT, winner.config]


def test_the_next_run_measures_nothing_again(store: TuningDB) -> None:
    first, second = Noted(landscape.records()), Noted(landscape.records())
    run(store, first, trials=30)
    (summary,) = run(store, second, trials=50).summaries
    assert (summary.resumed, summary.trials) == (30, 20)
    assert not set(first.asked) & set(second.asked)
    third = Noted(landscape.records())
    (again,) = run(store, third, trials=50).summaries
    assert third.asked == [] and again.resumed == 50
    assert again.winner == summary.winner or again.winner.median_us == summary.winner.median_us  # type: ignore[union-attr]


MOMENTS = {
    "memory": Measurement(Status.OUT_OF_MEMORY, registers=64, reason="another process held it"),
    "slow compile": Measurement(Status.TIMEOUT, reason="compiling, after 60 s: no answer"),
    "killed compile": Measurement(Status.CRASH, reason="compiling, after 2 s: died of SIGBUS"),
}


@pytest.mark.parametrize("status", [Status.TIMEOUT, Status.CRASH, Status.NO_COMPILE])
def test_what_a_kernel_did_or_the_compiler_said_is_not_asked_again(store: TuningDB, status: Status) -> None:
    ran = None if status is Status.NO_COMPILE else 64
    outcome = Measurement(status, registers=ran, reason="for ever")
    for config in SPACE[:20]:
        known = landscape.record(landscape.workload(), config, 500.0)
        store.add(replace(known, measurement=outcome))
    (summary,) = run(store, sampler="grid", trials=25).summaries
    assert (summary.resumed, summary.trials) == (20, 5)


@pytest.mark.parametrize("change", ["kernel", "triton", "sizes", "model", "density", *MOMENTS])
def test_records_of_something_else_do_not_count(store: TuningDB, change: str) -> None:
    for config in SPACE[:20]:
        known = landscape.record(landscape.workload(), config, 500.0)
        store.add(
            {
                "kernel": lambda r: replace(r, kernel_hash="0" * 16),
                "triton": lambda r: replace(r, versions=replace(r.versions, triton="3.5.0")),
                "sizes": lambda r: replace(r, workload=replace(r.workload, q_len=4000, k_len=4000)),
                "model": lambda r: replace(r, measurement=replace(r.measurement, source="model")),
                "density": lambda r: replace(r, density="real"),
                **{
                    name: lambda r, outcome=outcome: replace(r, measurement=outcome)
                    for name, outcome in MOMENTS.items()
                },
            }[change](known)
        )
    measurer = Noted(landscape.records())
    (summary,) = run(store, measurer, sampler="grid", trials=25).summaries
    assert (summary.resumed, summary.trials) == (0, 25)


def test_finalists_of_a_noisy_clock_are_measured_again_interleaved(store: TuningDB) -> None:
    measurer = Noted(landscape.records(), noise=0.03, seed=5)
    (summary,) = run(store, measurer, trials=92, finalists=4, passes=7).summaries
    assert measurer.compared, "there was a final"
    assert len(measurer.compared[0]) in (4, 5) and DEFAULT in measurer.compared[0]
    winner = summary.winner
    assert winner is not None and winner.measurement.passes == 7, "a lucky quick timing does not win"
    held = {record.config: record for record in store.records() if record.measurement.passes == 7}
    assert winner == min(held.values(), key=lambda record: record.median_us) or len(measurer.compared) == 3
    assert winner.measurement.max_error == 1e-3
    true_us = landscape.time_us(winner.config)
    assert true_us is not None and true_us < 1.04 * landscape.best_us()


def test_the_early_stop_gets_the_best_so_far(store: TuningDB) -> None:
    bests: list[float] = []

    class Noting(Replay):
        def measure(self, trial: Trial) -> Measurement:
            bests.append(trial.best_us)
            return super().measure(trial)

    run(store, Noting(landscape.records()), trials=20)
    assert bests[0] == float("inf")
    assert bests[1] == landscape.time_us(DEFAULT)
    assert bests == sorted(bests, reverse=True)


def test_slow_is_learnt_from_but_never_best(store: TuningDB) -> None:
    data = landscape.records()
    fastest = min((r for r in data if r.measurement.status is Status.OK), key=lambda r: r.median_us)
    slow = Measurement(Status.SLOW, median_us=fastest.median_us, reason="clearly behind")
    data = [replace(r, measurement=slow) if r is fastest else r for r in data]
    (summary,) = run(store, Replay(data), sampler="grid").summaries
    assert summary.outcomes["SLOW"] == 1
    assert summary.winner is not None and summary.winner.config != fastest.config


def test_progress_is_told_after_each_trial(store: TuningDB) -> None:
    seen: list[Progress] = []
    run(store, trials=12, budget_s=60.0, progress=seen.append)
    assert [p.trial for p in seen] == list(range(13))
    assert {p.limit for p in seen} == {12}
    assert seen[0].last is None and seen[0].best is None
    assert all(p.last is not None and p.left_s is not None and 0 < p.left_s <= 60 for p in seen[1:])
    bests = [p.best.median_us for p in seen if p.best is not None]
    assert bests == sorted(bests, reverse=True)
    assert (seen[-1].index, seen[-1].total, seen[-1].family) == (0, 1, "attention_fwd")


def test_c30_the_budget_holds_within_one_trial_though_compiles_hang(
    store: TuningDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "measure"))
    hanging = {config.name: "hangs" for config in SPACE[1::4]}
    measurer = Replay(landscape.records())
    with CompilePool(
        landscape.TARGET,
        landscape.TOOLCHAIN,
        jobs=1,
        timeout_s=1.0,
        entry="bad_compilers:compiler",
        options={"behaviours": hanging},
    ) as pool:
        pool.submit(pool.source(landscape.workload().spec, SPACE[0]), _facts()).result()  # the child is up
        start = time.monotonic()
        (summary,) = run(store, measurer, compiler=pool, budget_s=4.0, sampler="grid").summaries
        spent = time.monotonic() - start
    assert 3.0 < spent < 4.0 + 1.0 + 0.5, f"{spent=}"
    assert summary.outcomes["TIMEOUT"] >= 1
    assert summary.outcomes["OK"] >= 3, "the others were still compiled"
    reasons = [r.measurement.reason for r in store.records(status=Status.TIMEOUT)]
    assert all("no answer within 1 s" in reason for reason in reasons)


def _facts() -> Any:
    from flashgen.build.inputs import contiguous_facts

    return contiguous_facts(landscape.workload())


def test_every_workload_gets_a_trial_though_its_share_is_short(store: TuningDB) -> None:
    class Late(NoCompiler):
        """The first compile takes longer than a workload's share of the budget."""

        late_s = 1.5

        def submit(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
            future: Future[Compiled] = Future()
            threading.Timer(self.late_s, future.set_result, (Compiled(None),)).start()
            self.late_s = 0.0
            return future

    workloads = [landscape.workload(q_len) for q_len in (4096, 2048, 1024)]
    measurer, compiler = Replay(landscape.records(*workloads)), Late(landscape.TOOLCHAIN)
    result = run(store, measurer, *workloads, budget_s=3.6, trials=2, compiler=compiler)
    assert [summary.trials for summary in result.summaries] == [1, 2, 2]
    assert result.summaries[0].seconds > 1.2, "more than its share"


def test_a_family_gets_a_kernel_that_is_right_though_others_fail_sooner(store: TuningDB) -> None:
    """The default compiles last, and what neighbours won with does not fit here."""

    class Spilling(NoCompiler):
        def submit(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
            future: Future[Compiled] = Future()
            if source.config == DEFAULT:
                threading.Timer(1.0, lambda: future.cancelled() or future.set_result(Compiled(None))).start()
            else:
                future.set_result(Compiled(None, Measurement(Status.TOO_LARGE, reason="it spills")))
            return future

    workloads = [landscape.workload(q_len) for q_len in (4096, 2048)]
    compiler = Spilling(landscape.TOOLCHAIN, ahead=4)
    result = run(store, Replay(landscape.records(*workloads)), *workloads, budget_s=1.5, compiler=compiler)
    first = result.summaries[0]
    assert first.winner is not None and first.winner.config == DEFAULT
    assert first.outcomes["TOO_LARGE"] > 0 and first.seconds > 0.8, "more than its share"


def test_the_budget_is_shared_by_the_workloads(store: TuningDB) -> None:
    class Slowly(Replay):
        def measure(self, trial: Trial) -> Measurement:
            time.sleep(0.02)
            return super().measure(trial)

    workloads = [landscape.workload(seq) for seq in (4096, 2048, 1024)]
    result = run(store, Slowly(landscape.records(*workloads)), *workloads, budget_s=3.0)
    trials = [summary.trials for summary in result.summaries]
    assert len(trials) == 3 and min(trials) > 0.5 * max(trials) > 5
    assert 2.0 < result.seconds < 3.3


def test_c32_the_regime_is_in_the_record(store: TuningDB) -> None:
    data = [
        replace(r, measurement=replace(r.measurement, reason="cold L2, graph"))
        if r.measurement.status is Status.OK
        else r
        for r in landscape.records()
    ]
    (summary,) = run(store, Replay(data), trials=5).summaries
    assert summary.winner is not None and summary.winner.measurement.reason == "cold L2, graph"


def test_c31_the_density_is_in_the_record(store: TuningDB) -> None:
    padded = landscape.workload(mask=key_padding())
    run(store, Replay(landscape.records(padded)), padded, trials=4)
    assert {record.density for record in store.records()} == {"lengths uniform in [k/2, k]"}


def test_lse_and_plain_calls_share_one_tuning(store: TuningDB) -> None:
    plain = landscape.workload()
    with_lse = replace(plain, spec=replace(plain.spec, return_lse=True))
    (summary,) = run(store, None, with_lse, trials=4).summaries
    assert summary.workload == plain


def test_a_workload_that_cannot_be_measured_does_not_stop_the_others(store: TuningDB) -> None:
    class Small(Replay):
        def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
            if workload.q_len > 4096:
                raise MeasuringFailed(Status.OUT_OF_MEMORY, "the workload does not fit in memory")
            return super().prepare(workload)

    workloads = [landscape.workload(8192), landscape.workload(4096)]
    result = run(store, Small(landscape.records(*workloads)), *workloads, trials=4)
    first, second = result.summaries
    assert (first.winner, first.problem) == (None, "the workload does not fit in memory")
    assert second.winner is not None and not result.problem


def test_a_lost_gpu_ends_the_run_with_what_was_measured(store: TuningDB) -> None:
    class Dying(Noted):
        def measure(self, trial: Trial) -> Measurement:
            if len(self.asked) == 5:
                raise MeasuringFailed(Status.CRASH, "the GPU cannot be measured on")
            return super().measure(trial)

    workloads = [landscape.workload(4096), landscape.workload(2048)]
    result = run(store, Dying(landscape.records(*workloads)), *workloads, trials=20)
    assert result.problem == "the GPU cannot be measured on"
    assert len(result.summaries) == 1 and result.summaries[0].winner is not None
    assert len(list(store.records())) == 5


def worker() -> Worker:
    """Really measures, on the CPU; every kernel crashes when it is compared with others."""
    kernels = {config.name: "crashes_later" for config in landscape.FAMILY.all_configs()}
    return Worker(entry="misbehave:cpu_executor", options={"kernels": kernels})


def test_c29_a_crash_in_a_final_costs_that_final_and_no_other_workload(store: TuningDB) -> None:
    workloads = [misbehave.workload(q_len=q_len, lse=False) for q_len in (999, 24, 16)]
    with worker() as measurer:
        result = run(store, measurer, *workloads, trials=2)
    large, *others = result.summaries
    assert (result.problem, len(others)) == ("", 2)
    assert "does not fit in memory" in large.problem
    for summary in others:
        assert summary.trials == 2
        assert summary.winner is not None and summary.winner.measurement.passes >= 5
        assert summary.problem.startswith("comparing the finalists failed: the process died of SIGSEGV")
        assert summary.problem.endswith("the best so far stays, tune again for a whole final")


def test_every_fault_costs_its_own_trial_and_no_other(
    store: TuningDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that do harm and compilers that fail, in real processes, in one run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "measure"))
    monkeypatch.setenv("FLASHGEN_TEST_FOLDER", str(tmp_path))
    of = misbehave.workload(lse=False)
    configs = iter(landscape.FAMILY.space(of.spec, landscape.TARGET)[:40])
    default = landscape.FAMILY.default(of.spec, landscape.TARGET, _facts())
    kernels = {
        "wrong": Status.WRONG,
        "half": Status.WRONG,
        "beside": Status.WRONG,
        "varies": Status.UNSTABLE,
        "out_of_memory": Status.OUT_OF_MEMORY,
        "crashes": Status.CRASH,
        "loops": Status.TIMEOUT,
    }
    compilers = {"hangs": Status.TIMEOUT, "crashes": Status.CRASH, "refuses": Status.NO_COMPILE}
    bad = [config for config in configs if config != default]
    by_kernel = dict(zip(kernels, bad, strict=False))
    by_compiler = dict(zip(compilers, bad[len(kernels) :], strict=False))
    faulty = len(kernels) + len(compilers)
    with (
        Worker(
            entry="misbehave:cpu_executor",
            options={"kernels": {config.name: fault for fault, config in by_kernel.items()}},
            trial_timeout_s=2.0,
        ) as measurer,
        CompilePool(
            landscape.TARGET,
            landscape.TOOLCHAIN,
            jobs=1,
            timeout_s=2.0,
            entry="bad_compilers:compiler",
            options={"behaviours": {config.name: fault for fault, config in by_compiler.items()}},
        ) as pool,
    ):
        result = run(store, measurer, of, compiler=pool, sampler="grid", trials=faulty + 3, finalists=0)
    (summary,) = result.summaries
    assert (result.problem, summary.problem) == ("", "")
    found = {record.config: record.measurement.status for record in store.records()}
    assert {fault: found[config] for fault, config in by_kernel.items()} == kernels
    assert {fault: found[config] for fault, config in by_compiler.items()} == compilers
    assert summary.trials == faulty + 3
    right, slow = summary.outcomes["OK"], summary.outcomes.get("SLOW", 0)
    assert right + slow == 3 and right, "which of the right ones count as slow, a busy machine decides"
    assert summary.winner is not None
    assert summary.winner.config not in {*by_kernel.values(), *by_compiler.values()}


class Keeping(NoCompiler):
    """Notes what is kept, and takes a while for it."""

    def __init__(self, takes_s: float = 0.0) -> None:
        super().__init__(landscape.TOOLCHAIN)
        self.kept: list[Config] = []
        self.done: list[Future[Compiled]] = []
        self._takes_s = takes_s

    def keep(self, source: KernelSource, facts: CallFacts) -> Future[Compiled]:
        self.kept.append(source.config)
        future: Future[Compiled] = Future()
        self.done.append(future)
        threading.Timer(self._takes_s, future.set_result, (Compiled(None),)).start()
        return future


def test_only_the_fastest_of_each_class_are_kept_and_the_run_waits_for_them(store: TuningDB) -> None:
    compiler = Keeping(takes_s=0.5)
    (summary,) = run(store, compiler=compiler, trials=40).summaries
    fastest: dict[str, Record] = {}
    for record in sorted(store.records(), key=lambda record: record.median_us):
        if record.measurement.status is Status.OK:
            fastest.setdefault(record.admission, record)
    assert set(fastest) == {"tma", "any"}
    assert sorted(config.name for config in compiler.kept) == sorted(r.config.name for r in fastest.values())
    assert summary.winner is not None and summary.winner.config in compiler.kept
    assert all(future.done() for future in compiler.done)


def test_a_run_without_a_right_kernel_keeps_none(store: TuningDB) -> None:
    wrong = [replace(r, measurement=Measurement(Status.WRONG, reason="wrong")) for r in landscape.records()]
    compiler = Keeping()
    run(store, Replay(wrong), compiler=compiler, trials=4)
    assert compiler.kept == []


def test_what_is_kept_late_does_not_hold_up_a_budget(
    store: TuningDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "GRACE_S", 0.3)
    compiler = Keeping(takes_s=5.0)
    result = run(store, compiler=compiler, trials=4, budget_s=0.5)
    assert result.seconds < 3.0 and result.problem == "" and compiler.kept


def test_a_gpu_that_is_lost_before_a_final_ends_the_run(store: TuningDB) -> None:
    class Dying(Noted):
        def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
            if len(self.asked) == 4:
                raise MeasuringFailed(Status.CRASH, "the GPU cannot be measured on")
            return super().prepare(workload)

    workloads = [landscape.workload(4096), landscape.workload(2048)]
    result = run(store, Dying(landscape.records(*workloads)), *workloads, trials=4)
    assert result.problem == "the GPU cannot be measured on"
    assert [summary.trials for summary in result.summaries] == [4]


@pytest.mark.parametrize("fault", ["a child that cannot start", "a full disk"])
def test_a_compiler_that_cannot_be_used_ends_the_run_and_is_nobodys_record(
    store: TuningDB, fault: str
) -> None:
    behaviours = {config.name: "disk" for config in SPACE}
    with CompilePool(
        landscape.TARGET,
        landscape.TOOLCHAIN,
        jobs=1,
        entry="bad_compilers:compiler",
        options={"behaviours": behaviours} if fault == "a full disk" else {},
    ) as pool:
        result = run(store, None, landscape.workload(4096), landscape.workload(2048), compiler=pool)
    assert result.problem.startswith("the compiler cannot be used (")
    assert result.summaries[0].problem == result.problem
    assert len(result.summaries) == 1 and list(store.records()) == []


def test_the_budget_holds_though_a_workload_takes_long_to_prepare(
    store: TuningDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "GRACE_S", 0.5)
    with worker() as measurer:
        measurer.machine()  # the child is up
        workloads = [misbehave.workload(q_len=q_len) for q_len in (998, 24)]
        result = run(store, measurer, *workloads, budget_s=1.0)
    assert 1.5 <= result.seconds < 2.5
    assert result.problem == ""
    assert [summary.problem for summary in result.summaries] == [
        "the budget ended before the workload was ready"
    ]


def test_no_final_when_the_time_is_up_and_no_preparing_beyond_it(store: TuningDB) -> None:
    trial_s = 1.0  # the rest must fit into six tenths of it

    class Slow(Noted):
        within: list[float] = []  # noqa: RUF012

        def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
            self.within.append(within_s - tuner.GRACE_S)
            return super().prepare(workload)

        def measure(self, trial: Trial) -> Measurement:
            time.sleep(trial_s)
            return super().measure(trial)

    measurer = Slow(landscape.records())
    result = run(store, measurer, budget_s=1.6 * trial_s)
    assert measurer.compared == [] and len(measurer.asked) == 2
    assert result.summaries[0].winner is not None
    assert result.seconds < 2.6 * trial_s
    first, again, last = measurer.within
    assert 0.6 * trial_s < again <= first <= 1.6 * trial_s, "before the first trial"
    assert 0 <= last <= 0.6 * trial_s


def test_a_full_disk_ends_the_run_with_an_explanation(store: TuningDB) -> None:
    class Full:
        """The database, until the disk is full."""

        def __init__(self) -> None:
            self.added = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def add(self, record: Record) -> bool:
            self.added += 1
            if self.added > 6:
                raise StoreError("the disk is full; free some space")
            return store.add(record)

    result = run(Full(), trials=20)
    assert result.problem == "the disk is full; free some space"
    assert result.summaries[0].winner is not None
    assert len(list(store.records())) == 6


def test_nothing_right_means_no_winner(store: TuningDB) -> None:
    data = [
        replace(r, measurement=Measurement(Status.WRONG, reason="all wrong")) for r in landscape.records()
    ]
    (summary,) = run(store, Replay(data), trials=5).summaries
    assert (summary.winner, summary.gain, summary.tflops) == (None, None, None)
    assert summary.outcomes == {"WRONG": 5}


def test_a_spec_no_family_serves_is_told(store: TuningDB) -> None:
    amd = replace(landscape.TARGET, vendor="hip")
    (summary,) = run(store, target=amd).summaries
    assert summary.winner is None
    assert "no kernel family serves this" in summary.problem


# Processes that end


def start(database: Path, *arguments: object) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-m", "runner", str(database), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(tmp_path: Path) -> None:
    database = tmp_path / "tuning.db"
    process = start(database, 60, 0)
    told = lines(process, 10)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    *more, printed = rest.splitlines()
    result = json.loads(printed)
    told += more
    assert process.returncode == 0
    assert result["interrupted"] is True
    assert result["workloads"][0]["trials"] == len(told) < 60
    assert result["workloads"][0]["winner"] is not None
    with TuningDB(database) as store:
        assert {record.config.name for record in store.records()} == set(told)
        measurer = Noted(landscape.records())
        (summary,) = run(store, measurer, trials=60).summaries
    assert (summary.resumed, summary.trials) == (len(told), 60 - len(told))
    assert not {config.name for config in measurer.asked} & set(told)


def test_a_killed_run_loses_nothing_that_it_had_stored(tmp_path: Path) -> None:
    database = tmp_path / "tuning.db"
    process = start(database, 60, 0)
    told = lines(process, 12)
    process.kill()
    process.communicate(timeout=60)
    with TuningDB(database, current_hash=current_hash) as store:
        assert store.problems() == []
        stored = [record.config.name for record in store.records()]
        assert stored[:12] == told and len(stored) <= 14
        measurer = Noted(landscape.records())
        (summary,) = run(store, measurer, trials=40).summaries
    assert summary.resumed == len(stored)
    assert not {config.name for config in measurer.asked} & set(stored)


def test_c33_two_tuners_of_one_database_pick_the_same_winner(tmp_path: Path) -> None:
    """Each has its own noisy clock and its own search; what a dispatcher then takes is one and the same."""
    database = tmp_path / "tuning.db"
    processes = [start(database, 40, seed, 0.02) for seed in (1, 2)]
    results = []
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        results.append(json.loads(out.splitlines()[-1]))
    assert [result["problem"] for result in results] == ["", ""]
    picks = []
    for _ in range(2):
        with TuningDB(database, readonly=True, current_hash=current_hash) as store:
            picks.append(store.ranked(landscape.workload(), landscape.TARGET)[0])
    assert picks[0] == picks[1]
    with TuningDB(database, current_hash=current_hash) as store:
        tuned = [run(store, Noted(landscape.records()), trials=1).summaries[0].winner for _ in range(2)]
    assert tuned[0] is not None and tuned[1] is not None and tuned[0].config == tuned[1].config


def test_c40_many_studies_leave_no_memory_behind(tmp_path: Path) -> None:
    """Searches and look-ups are not kept: no cache holds a config, a record or a study of a finished run."""
    with TuningDB(tmp_path / "tuning.db", current_hash=current_hash) as store:
        run(store, trials=4)

        def many(count: int) -> int:
            for _ in range(count):
                run(store, trials=4, finalists=0)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        before = many(60)
        after = many(120)
    assert after - before < 8 * 1024, f"{after - before} KB more after 120 further runs"
