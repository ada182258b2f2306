"""Measuring on a real GPU: right kernels, wrong ones, and whether times can be believed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.build.compile import toolchain
from flashgen.build.device import live_target
from flashgen.build.inputs import contiguous_facts, make_inputs
from flashgen.codegen.families import FAMILIES
from flashgen.measure import roofline
from flashgen.measure.bench import GRAPH_BELOW_US, CudaClock, compare, time_kernel
from flashgen.measure.check import Expected
from flashgen.measure.compile_pool import CompilePool
from flashgen.measure.worker import Trial, Worker
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.masks import Mask, causal, full, key_padding
from flashgen.spec.record import Status
from flashgen.store.db import TuningDB
from flashgen.tune.plan import Plan
from flashgen.tune.suites import make_workload
from flashgen.tune.tuner import tune

FAMILY = FAMILIES["attention_fwd"]


def workload(mask: Mask | None = None, seq: int = 1024, batch: int = 4, dtype: str = "bf16") -> Workload:
    return make_workload(
        head_dim=64,
        heads=8,
        kv_heads=2,
        q_len=seq,
        k_len=seq,
        mask=mask or causal(),
        dtype=dtype,
        batch=batch,
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(live_target(), toolchain()) as made:
        yield made


def trial(pool: CompilePool, of: Workload, config: Config) -> Trial:
    answer = pool.submit(pool.source(of.spec, config), contiguous_facts(of)).result()
    assert answer.failure is None, answer.failure
    return Trial(of, config, answer.artifact)


def default(of: Workload) -> Config:
    return FAMILY.default(of.spec, live_target(), contiguous_facts(of))


def test_c28_c29_each_fault_costs_its_own_trial(pool: CompilePool) -> None:
    of = workload()
    right = default(of)
    loops, far, hungry = [c for c in FAMILY.space(of.spec, live_target()) if c != right][:3]
    kernels = {loops.name: "loops", far.name: "out_of_bounds", hungry.name: "hungry"}
    options = {"device": 0, "kernels": kernels}
    with Worker(entry="bad_cuda:executor", options=options, trial_timeout_s=5.0) as worker:
        good = worker.measure(trial(pool, of, right))
        assert good.status is Status.OK, good.reason
        assert (found := worker.measure(Trial(of, far, None))).status is Status.CRASH
        assert "illegal memory access" in found.reason.lower() or "ILLEGAL_ADDRESS" in found.reason
        assert worker.measure(Trial(of, hungry, None)).status is Status.OUT_OF_MEMORY
        start = time.monotonic()
        assert worker.measure(Trial(of, loops, None)).status is Status.TIMEOUT
        assert time.monotonic() - start < 30
        again = worker.measure(trial(pool, of, right))
        assert again.status is Status.OK and again.median_us and good.median_us
        assert again.median_us == pytest.approx(good.median_us, rel=0.3)
    assert torch.zeros(4, device="cuda").sum().item() == 0, "this process's context is clean"


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.05), ("fp16", 0.01), ("fp32", 2e-5)])
def test_a_right_kernel_is_measured_with_its_error_and_facts(
    pool: CompilePool, dtype: str, most: float
) -> None:
    of = workload(seq=500, dtype=dtype)
    with_lse = replace(of, spec=replace(of.spec, return_lse=True))
    with Worker() as worker:
        for each in (of, with_lse):
            found = worker.measure(trial(pool, each, default(each)))
            assert found.status is Status.OK, found.reason
            assert found.max_error is not None and 0 < found.max_error < most
            assert found.registers and found.shared_bytes and found.passes >= 5
            how = "graph" if dtype != "fp32" else "events"  # this one takes more than 100 us
            assert found.reason == f"cold L2, {how}"


@pytest.mark.parametrize("mask", [full(), causal(), key_padding()], ids=str)
def test_some_heads_are_judged_as_all_are(pool: CompilePool, mask: Mask) -> None:
    from flashgen.build.arguments import flatten
    from flashgen.build.launch import Kernel

    of = workload(mask, seq=300)
    artifact = trial(pool, of, default(of)).artifact
    assert artifact is not None
    inputs = make_inputs(of, "cuda")
    out = torch.full_like(inputs.q, float("nan"))
    env = flatten(inputs.q, inputs.k, inputs.v, out, None, inputs.scale, (), inputs.mask.tensors)
    Kernel(artifact).launch(env, torch.cuda.current_stream().cuda_stream)
    for all_scores in (2**33, 300 * 300 * 6):
        verdict = Expected(inputs, of.spec, all_scores).judge(out)
        assert verdict.ok, verdict.reason


def test_times_of_a_copy_and_of_a_product_are_what_the_card_can_do() -> None:
    clock = CudaClock(0, live_target().l2_mib)
    source = torch.randint(0, 100, (1 << 28,), dtype=torch.int8, device="cuda")
    copied = torch.empty_like(source)
    copy = time_kernel(lambda: copied.copy_(source), clock)
    bandwidth = 2 * (1 << 28) / copy.median_us * 1e6
    assert 0.5 * roofline.bytes_per_s(live_target()) < bandwidth < 1.02 * roofline.bytes_per_s(live_target())
    assert copy.median_us < 1.5 * copy.min_us
    refused = time_kernel(lambda: copied.copy_(source), clock, floor_us=2 * copy.median_us)
    assert refused.status is Status.WRONG


def test_replay_and_events_agree_where_both_can_be_trusted() -> None:
    clock = CudaClock(0, live_target().l2_mib)
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def launch() -> None:
        torch.matmul(a, a, out=out)

    clock.warm(launch, 3)
    events, replayed = sorted(clock.each(launch, 21))[10], sorted(clock.replayed(launch, 9))[4]
    assert 0 < replayed < events + 1
    assert events - replayed < 12, "what events cost of their own"


def test_c32_a_short_kernel_is_timed_with_a_cold_cache_by_replay() -> None:
    clock = CudaClock(0, live_target().l2_mib)
    data = torch.randint(0, 100, (16 << 20,), dtype=torch.int8, device="cuda")  # fits in L2 several times
    out = torch.empty_like(data)
    cold = time_kernel(lambda: out.copy_(data), clock)
    assert cold.method == "graph" and cold.median_us < GRAPH_BELOW_US
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a busy host would not launch them fast enough
        for _ in range(200):
            out.copy_(data)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    warm_us = 1e3 * start.elapsed_time(end) / 200
    assert cold.median_us > 1.1 * warm_us, f"cold {cold.median_us:.1f} us, warm {warm_us:.1f} us"


def test_a_kernel_compared_with_itself_ties() -> None:
    clock = CudaClock(0, live_target().l2_mib)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def launch() -> None:
        torch.matmul(a, a, out=out)

    timings = compare({"one": launch, "other": launch}, clock, passes=7)
    one, other = timings["one"], timings["other"]
    spread = max(each.max_us - each.min_us for each in (one, other))
    assert abs(one.median_us - other.median_us) <= spread


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus_share_the_workloads(tmp_path: Path) -> None:
    works = [workload(seq=seq) for seq in (512, 1024, 2048, 4096)]
    plan = Plan(trials=6, finalists=2, passes=3)
    result = flashgen.tune(works, device=(0, 1), plan=plan, db=str(tmp_path / "tuning.db"))
    assert result.problem == "" and [gpu.lost for gpu in result.gpus] == ["", ""]
    assert [summary.trials for summary in result.summaries] == [6] * 4
    assert sum(gpu.workloads for gpu in result.gpus) == 4
    assert all(gpu.before_us and gpu.after_us for gpu in result.gpus)
    print(*(f"\n{gpu}" for gpu in result.gpus), *result.warnings)


def test_tuning_beats_or_ties_the_default(pool: CompilePool, tmp_path: Path) -> None:
    from flashgen.spec.record import Versions

    with TuningDB(tmp_path / "tuning.db") as store, Worker() as worker:
        machine = worker.machine()
        (summary,) = tune(
            [workload(seq=2048)],
            store=store,
            target=machine.target,
            measurers={"GPU 0": worker},
            compiler=pool,
            versions=Versions("0", toolchain().triton, machine.torch, machine.driver),
            plan=Plan(trials=24),
        ).summaries
        assert machine.target == live_target()
    assert not summary.problem
    assert summary.winner is not None and summary.winner.measurement.passes == Plan().passes
    assert summary.gain is not None and summary.gain > 0.99
    assert summary.tflops is not None and 20 < summary.tflops < 1000
    print(f"\n{summary.trials} trials in {summary.seconds:.1f} s: {summary.outcomes}")
