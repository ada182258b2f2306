"""An executor for a GPU whose kernels misbehave on the device itself; chosen by config name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from flashgen.measure.check import Rig, Run
from flashgen.measure.worker import CudaDevice, Executor, Trial


@triton.jit
def _endless(flag):  # pragma: no cover - runs on the GPU
    while tl.atomic_add(flag, 0) == 0:
        pass


@triton.jit
def _far_store(out, distance: tl.int64):  # pragma: no cover - runs on the GPU
    tl.store(out + distance, 1.0)


def _loops(out: Any, lse: Any) -> None:
    _endless[(1,)](torch.zeros(1, dtype=torch.int32, device=out.device))


def _out_of_bounds(out: Any, lse: Any) -> None:
    _far_store[(1,)](out, 1 << 40)


def _hungry(out: Any, lse: Any) -> None:
    torch.empty(1 << 44, dtype=torch.uint8, device=out.device)


BAD: dict[str, Run] = {"loops": _loops, "out_of_bounds": _out_of_bounds, "hungry": _hungry}


class Bad(CudaDevice):
    """The GPU, with some kernels replaced."""

    def __init__(self, index: int, kernels: dict[str, str]) -> None:
        super().__init__(index)
        self._kernels = kernels

    def load(self, trial: Trial, rig: Rig) -> tuple[Run, Callable[[], None]]:
        bad = self._kernels.get(trial.config.name)
        return super().load(trial, rig) if bad is None else (BAD[bad], lambda: None)


def executor(device: int, kernels: dict[str, str]) -> Executor:
    """Factory for a worker's child."""
    return Executor(Bad(device, kernels))
