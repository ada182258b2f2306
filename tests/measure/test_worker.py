"""Trials in a process that may die: each fault costs its own trial and says why. All of it on the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import misbehave
import pytest
from processes import is_gone

from flashgen.codegen.families import FAMILIES
from flashgen.measure.check import some_pairs
from flashgen.measure.child import Child, Failure
from flashgen.measure.worker import MeasuringFailed, Trial, Worker
from flashgen.spec.config import Config
from flashgen.spec.masks import key_padding
from flashgen.spec.record import Measurement, Status

CONFIGS = FAMILIES["attention_fwd"].all_configs()
FAULTS = [name for name in misbehave.KERNELS if name != "right"]
BY_FAULT = dict(zip(FAULTS, CONFIGS[1:], strict=False))
RIGHT = CONFIGS[0]


def worker(**options: float) -> Worker:
    kernels = {config.name: fault for fault, config in BY_FAULT.items()}
    return Worker(entry="misbehave:cpu_executor", options={"kernels": kernels}, **options)


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    """One worker for the tests that leave it as they found it, which is part of what they test."""
    with worker() as made:
        yield made


def measure(worker: Worker, config: Config) -> Measurement:
    return worker.measure(Trial(misbehave.workload(), config, None))


def test_a_right_kernel_is_timed(shared: Worker) -> None:
    found = measure(shared, RIGHT)
    assert found.status is Status.OK
    assert found.median_us and found.min_us and found.max_us
    assert 0 < found.min_us <= found.median_us <= found.max_us
    assert found.passes >= 5
    assert found.max_error is not None and found.max_error < 2e-5


def test_c32_the_regime_stays_with_the_time(shared: Worker) -> None:
    assert measure(shared, RIGHT).reason.startswith("cold L2, ")


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("half", Status.WRONG, "1536 of 3072 elements of out were never written"),
        ("accumulates", Status.WRONG, "3072 of 3072 elements of out were never written, or only added to"),
        ("beside", Status.WRONG, "wrote outside its output: a guard zone changed"),
        ("wrong", Status.WRONG, "head "),
        ("wrong_lse", Status.WRONG, "LSE error"),
        ("nan", Status.WRONG, "1 of 3072 elements of out are NaN or infinite"),
        ("varies", Status.UNSTABLE, "two runs on the same inputs gave different bits"),
    ],
)
def test_c28_a_wrong_output_is_refused_with_its_reason(
    shared: Worker, fault: str, status: Status, reason: str
) -> None:
    measure(shared, RIGHT)  # a right result in the buffers must not help the next kernel
    starts = shared.child.starts
    found = measure(shared, BY_FAULT[fault])
    assert (found.status, found.median_us) == (status, None)
    assert reason in found.reason
    assert shared.child.starts == starts, "the process did nothing wrong and goes on"


def test_a_config_whose_sums_have_no_order_may_vary() -> None:
    """Both of two runs are judged instead; the same family's other form may not."""
    split, fused = (FAMILIES["attention_bwd"].find(f"m64n64w4s2_tma_heads{form}") for form in ("", "_fused"))
    kernels = {split.name: "varies", fused.name: "varies"}
    with Worker(entry="misbehave:cpu_executor", options={"kernels": kernels}) as made:
        assert [measure(made, each).status for each in (fused, split)] == [Status.OK, Status.UNSTABLE]


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("crashes", Status.CRASH, "died of SIGSEGV: about to touch address zero"),
        ("illegal", Status.CRASH, "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("out_of_memory", Status.OUT_OF_MEMORY, "Tried to allocate 96.00 GiB"),
        ("killed", Status.OUT_OF_MEMORY, "the process died of SIGKILL"),
        ("damages", Status.WRONG, "wrote outside its output: the inputs changed"),
    ],
)
def test_c29_a_crash_ends_its_trial_and_no_other(
    shared: Worker, fault: str, status: Status, reason: str
) -> None:
    shared.prepare(misbehave.workload())
    before = shared.child.pid
    found = measure(shared, BY_FAULT[fault])
    assert found.status is status
    assert reason in found.reason
    assert shared.child.pid is None
    assert measure(shared, RIGHT).status is Status.OK
    assert shared.child.pid != before


def test_c29_the_parent_never_imports_torch_to_measure(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sys, misbehave_free as w\n"
        "from flashgen.measure.worker import Worker\n"
        "from flashgen.measure.compile_pool import CompilePool\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules, 'imported too much'\n"
    )
    Path(tmp_path, "misbehave_free.py").write_text("")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_endless_kernel_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_TEST_FOLDER", str(tmp_path))
    with worker(trial_timeout_s=1.0) as impatient:
        impatient.prepare(misbehave.workload())
        start = time.monotonic()
        found = measure(impatient, BY_FAULT["loops"])
        assert time.monotonic() - start < 5
        assert found.status is Status.TIMEOUT
        assert found.reason == "no answer within 1 s; the process was killed"
        grandchild = int(Path(tmp_path, "grandchild").read_text())
        assert is_gone(grandchild)
        assert measure(impatient, RIGHT).status is Status.OK


def test_a_clearly_slower_kernel_is_stopped_early(shared: Worker) -> None:
    best = measure(shared, RIGHT).median_us
    assert best is not None
    found = shared.measure(Trial(misbehave.workload(), BY_FAULT["slow"], None, best_us=best))
    assert found.status is Status.SLOW
    assert found.passes == 3
    assert "times the best" in found.reason


def test_finalists_are_compared_in_one_process(shared: Worker) -> None:
    trials = [Trial(misbehave.workload(), c, None) for c in (RIGHT, BY_FAULT["slow"])]
    first, second = shared.compare(trials, passes=3)
    assert (first.status, first.passes, second.passes) == (Status.OK, 3, 3)
    assert first.median_us and second.median_us and second.median_us > 20_000 > first.median_us
    assert shared.compare([], passes=3) == ()


def test_a_comparison_that_crashes_says_so(shared: Worker) -> None:
    trials = [Trial(misbehave.workload(), c, None) for c in (RIGHT, BY_FAULT["crashes"])]
    with pytest.raises(MeasuringFailed, match="comparing the finalists failed: the process died of SIGSEGV"):
        shared.compare(trials, passes=3)
    assert measure(shared, RIGHT).status is Status.OK


def test_a_workload_beyond_the_memory_is_no_candidates_fault(shared: Worker) -> None:
    with pytest.raises(MeasuringFailed, match=r"does not fit in memory .* tune a smaller") as caught:
        shared.prepare(misbehave.workload(q_len=999))
    assert caught.value.status is Status.OUT_OF_MEMORY


def test_a_lost_gpu_is_reported_after_a_second_try() -> None:
    with (
        Worker(entry="misbehave:no_executor", options={}) as lost,
        pytest.raises(
            MeasuringFailed, match=r"cannot be measured on .*no CUDA-capable device.*flashgen doctor"
        ),
    ):
        lost.machine()
    assert lost.child.starts == 2


def test_a_failing_machine_is_no_candidates_fault(shared: Worker) -> None:
    with pytest.raises(MeasuringFailed, match=r"cannot be measured on .*No space left on device.*doctor"):
        measure(shared, BY_FAULT["full_disk"])
    assert measure(shared, RIGHT).status is Status.OK


def test_preparing_ends_when_it_should(shared: Worker) -> None:
    shared.prepare(misbehave.workload())
    start, starts = time.monotonic(), shared.child.starts
    with pytest.raises(MeasuringFailed, match="no answer within 1 s") as caught:
        shared.prepare(misbehave.workload(q_len=998), within_s=1.0)
    assert time.monotonic() - start < 3
    assert caught.value.status is Status.TIMEOUT
    assert shared.child.starts == starts, "there was no time for a second try"
    assert shared.prepare(misbehave.workload()) == "full"


def test_c31_inputs_are_random_and_their_density_is_told(shared: Worker) -> None:
    assert shared.prepare(misbehave.workload()) == "full"
    assert shared.prepare(misbehave.workload(key_padding())) == "lengths uniform in [k/2, k]"


def test_the_machine_is_asked_in_the_child(shared: Worker) -> None:
    machine = shared.machine()
    assert machine.target == misbehave.TARGET
    assert machine.torch


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    """The tuner is killed with SIGKILL while a kernel hangs: nothing is left on the GPU."""
    import subprocess
    import sys

    script = f"""
import sys
from pathlib import Path
import misbehave
from flashgen.measure.worker import Trial, Worker
worker = Worker(entry="misbehave:cpu_executor", options={{"kernels": {{{RIGHT.name!r}: "loops"}}}})
worker.prepare(misbehave.workload())
Path({str(tmp_path)!r}, "child").write_text(str(worker.child.pid))
from flashgen.codegen.families import FAMILIES
worker.measure(Trial(misbehave.workload(), FAMILIES["attention_fwd"].all_configs()[0], None))
"""
    paths = os.pathsep.join([str(Path(misbehave.__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "FLASHGEN_TEST_FOLDER": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        for _ in range(600):
            if Path(tmp_path, "grandchild").exists():
                break
            time.sleep(0.1)
        child = int(Path(tmp_path, "child").read_text())
        grandchild = int(Path(tmp_path, "grandchild").read_text())
    finally:
        parent.kill()
        parent.wait()
    assert is_gone(child)
    assert is_gone(grandchild), "nor is anything that the child started"


def test_a_child_that_cannot_start_says_why() -> None:
    child = Child("misbehave:absent")
    answer = child.call("job", 10)
    assert isinstance(answer, Failure)
    assert (answer.status, answer.blameless) == (Status.CRASH, True)
    assert "AttributeError" in answer.reason and "absent" in answer.reason


def test_a_child_that_the_system_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/there/is/no/python")
    child = Child("misbehave:cpu_executor", {"kernels": {}})
    answer = child.call("job", 10)
    assert isinstance(answer, Failure)
    assert (answer.status, answer.blameless) == (Status.CRASH, True)
    assert answer.reason.startswith("the process cannot be started: [Errno 2] No such file")
    monkeypatch.undo()
    assert child.start() is None, "the next call tries again"
    child.close()


def test_checked_pairs_cover_both_ends_a_group_edge_and_every_key_head() -> None:
    pairs = some_pairs(batch=3, heads=32, kv_heads=8, most=100)
    assert pairs[:4] == ((0, 0), (2, 31), (0, 4), (2, 3))
    assert {head // 4 for _, head in pairs[:12]} == set(range(8))
    assert len(set(pairs)) == len(pairs) == 96
    assert len(some_pairs(3, 32, 8, 5)) == 5
