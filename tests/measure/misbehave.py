"""Executors for tests without a GPU: real processes that really misbehave.

A worker's child imports this module by name. What a trial does is chosen by its config's name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashgen.build.inputs import make_inputs
from flashgen.build.reference import attention_reference
from flashgen.measure.check import Rig, Run
from flashgen.measure.worker import Executor, Machine, Trial
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.config import Config
from flashgen.spec.masks import Mask, causal
from flashgen.spec.target import find_target

TARGET = find_target("nvidia-h200")


def workload(
    mask: Mask | None = None, q_len: int = 24, k_len: int = 40, dtype: str = "fp32", lse: bool = True
) -> Workload:
    """A small causal workload; other sizes make others."""
    mask = mask or causal()
    params = tuple((name, value) for (name, _), value in zip(mask.rule.params, mask.values, strict=True))
    spec = AttentionSpec(16, 16, dtype, mask.rule, return_lse=lse)
    return Workload(spec, batch=2, heads=4, kv_heads=2, q_len=q_len, k_len=k_len, params=params)


# Kernels: each gets the rig and returns what a launch does.


def right(rig: Rig) -> Run:
    """Computes attention."""
    inputs = rig.inputs
    q, k, v = (inputs.bhsd(each) for each in (inputs.q, inputs.k, inputs.v))

    def run(out: Any, lse: Any) -> None:
        result, logs = attention_reference(
            q,
            k,
            v,
            mask=inputs.mask,
            score_mod=inputs.score_mod,
            scale=inputs.scale,
            round_p_to=inputs.q.dtype,
        )
        inputs.bhsd(out).copy_(result)
        if lse is not None:
            lse.copy_(logs)

    return run


def _after(rig: Rig, change: Callable[[Any, Any], None]) -> Run:
    run = right(rig)

    def changed(out: Any, lse: Any) -> None:
        run(out, lse)
        change(out, lse)

    return changed


def wrong(rig: Rig) -> Run:
    """Forgets the last keys: the last query row is off."""
    return _after(rig, lambda out, lse: rig.inputs.bhsd(out)[:, :, -1].mul_(1.05))


def wrong_lse(rig: Rig) -> Run:
    """A right output with another logarithm."""
    return _after(rig, lambda out, lse: lse.mul_(1.01))


def half(rig: Rig) -> Run:
    """Writes the first half of the output and leaves the rest as it was."""
    run = right(rig)

    def halfway(out: Any, lse: Any) -> None:
        full = torch.empty_like(out)
        run(full, lse)
        flat = out.view(-1)
        flat[: flat.numel() // 2] = full.view(-1)[: flat.numel() // 2]

    return halfway


def accumulates(rig: Rig) -> Run:
    """Adds to the output, as atomics do, as if it had been cleared."""
    run = right(rig)

    def add(out: Any, lse: Any) -> None:
        full = torch.empty_like(out)
        run(full, lse)
        out += full

    return add


def nan(rig: Rig) -> Run:
    """Gives NaN for one element."""
    return _after(rig, lambda out, lse: out.view(-1)[5:6].fill_(float("nan")))


def varies(rig: Rig) -> Run:
    """Differs in the last bit from run to run."""
    count = iter(range(10**9))
    return _after(rig, lambda out, lse: out.view(-1)[0].mul_(1 + 1e-6 * (next(count) % 2)))


def beside(rig: Rig) -> Run:
    """Writes 64 bytes past the end of its output."""

    def store(out: Any, lse: Any) -> None:
        ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 0, 64)

    return _after(rig, store)


def damages(rig: Rig) -> Run:
    """Overwrites its own inputs."""
    return _after(rig, lambda out, lse: rig.inputs.k.view(-1)[7].add_(1))


def slow(rig: Rig) -> Run:
    """Right, after a while."""
    return _after(rig, lambda out, lse: time.sleep(0.02))


def loops(rig: Rig) -> Run:
    """Never ends, and neither does a process it started."""

    def forever(out: Any, lse: Any) -> None:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["FLASHGEN_TEST_FOLDER"], "grandchild").write_text(str(process.pid))
        while True:
            time.sleep(1)

    return forever


def crashes(rig: Rig) -> Run:
    """A segmentation fault after some last words."""

    def fault(out: Any, lse: Any) -> None:
        print("about to touch address zero", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

    return fault


def killed(rig: Rig) -> Run:
    """What the system does to a process when the machine's memory runs out."""
    return lambda out, lse: os.kill(os.getpid(), signal.SIGKILL)


def full_disk(rig: Rig) -> Run:
    """The machine fails, not the kernel."""

    def fail(out: Any, lse: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return fail


def out_of_memory(rig: Rig) -> Run:
    """As torch reports it."""

    def fail(out: Any, lse: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 GiB.")

    return fail


def illegal(rig: Rig) -> Run:
    """As torch reports a store out of bounds: every later CUDA call of the process fails too."""

    def fail(out: Any, lse: Any) -> None:
        raise RuntimeError(
            "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"
        )

    return fail


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        right,
        wrong,
        wrong_lse,
        half,
        accumulates,
        nan,
        varies,
        beside,
        damages,
        slow,
        loops,
        crashes,
        killed,
        full_disk,
        out_of_memory,
        illegal,
    )
}


class HostClock:
    """Times what runs on the host."""

    def warm(self, launch: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            launch()

    def each(self, launch: Callable[[], Any], count: int) -> list[float]:
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            launch()
            samples.append(1e6 * (time.perf_counter() - start))
        return samples

    def replayed(self, launch: Callable[[], Any], count: int) -> list[float]:
        return self.each(launch, count)


class Cpu:
    """A device whose kernels are the functions above."""

    def __init__(self, kernels: dict[str, str]) -> None:
        self._kernels = kernels
        self._loaded: set[Config] = set()
        self.clock = HostClock()
        self.machine = Machine(TARGET, torch.__version__, "")

    def rig(self, workload: Workload) -> Rig:
        if workload.q_len == 999:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 400.00 GiB.")
        if workload.q_len == 998:
            time.sleep(600)
        return Rig(make_inputs(workload, "cpu"), workload.spec)

    def load(self, trial: Trial, rig: Rig) -> tuple[Run, Callable[[], None]]:
        kernel = self._kernels.get(trial.config.name, "right")
        if kernel == "crashes_later":  # right in its trial, not in a final
            kernel = "crashes" if trial.config in self._loaded else "right"
        self._loaded.add(trial.config)
        return KERNELS[kernel](rig), lambda: None

    def synchronize(self) -> None:
        pass


def cpu_executor(kernels: dict[str, str]) -> Executor:
    """Factory: `kernels` names a function above by config name; others are right."""
    torch.set_num_threads(1)
    return Executor(Cpu(kernels))


def no_executor() -> Any:
    """Factory of a machine whose GPU is lost."""
    raise RuntimeError("CUDA error: no CUDA-capable device is detected")
