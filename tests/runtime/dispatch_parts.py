"""A dispatcher on CPU tensors. All is real but the GPU: loaded kernels keep what they were launched with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sample_records import H200
from torch import Tensor

from flashgen.errors import LaunchFailed
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.runtime.misses import MissLog
from flashgen.runtime.policy import Policy, Request, Source
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Record, rank
from flashgen.spec.target import Target


@dataclass
class LoadedKernel:
    """Stands for a kernel on the GPU."""

    request: Request
    config: Config
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    failure: Exception | None = None

    def launch(self, env: tuple[Any, ...], stream: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.launches.append(env)


def refused(code: int, message: str) -> LaunchFailed:
    """What a launch raises that the driver refuses."""
    error = LaunchFailed(message)
    error.code = code
    return error


@dataclass(eq=False)  # as a function: one loader is not another
class Loads:
    """Loads kernels, or fails as told: config name -> error."""

    failing: dict[str, Exception] = field(default_factory=dict)
    refusing: dict[str, Exception] = field(default_factory=dict)
    """Configs whose launch fails."""
    kernels: list[LoadedKernel] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __call__(self, request: Request, config: Config) -> LoadedKernel:
        self.asked.append(config.name)
        if config.name in self.failing:
            raise self.failing[config.name]
        kernel = LoadedKernel(request, config, failure=self.refusing.get(config.name))
        self.kernels.append(kernel)
        return kernel

    @property
    def launched(self) -> list[str]:
        """Names of the configs that were launched, in order of loading."""
        return [kernel.config.name for kernel in self.kernels for _ in kernel.launches]


class Records:
    """A record store in memory."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.all = list(records)
        self.asked = 0

    def ranked(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        self.asked += 1
        key = workload.spec.key
        return rank([r for r in self.all if r.workload.spec.key == key and r.target == target], workload)


@dataclass
class Parts:
    """A dispatcher and what it was made of."""

    dispatcher: Dispatcher
    loads: Loads
    records: Records
    policy: Policy
    capturing: list[bool]

    def call(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **named: Any) -> Any:
        options = {"score_mod": None, "scale": None, "layout": "bhsd", "return_lse": False} | named
        return self.dispatcher.attention(q, k, v, mask, *options.values())


def make(
    records: Sequence[Record] = (),
    *,
    target: Target = H200,
    on_miss: str = "default",
    tune: Callable[[Workload, int], None] | None = None,
    misses: Path | None = None,
    loads: Loads | None = None,
) -> Parts:
    loads = loads or Loads()
    store = Records(records)
    policy = Policy(sources=[Source("database", lambda: store, loads)], load=loads)
    capturing = [False]
    dispatcher = Dispatcher(
        policy,
        lambda device: target,
        lambda device: 77,
        capturing=lambda: capturing[0],
        on_miss=on_miss,
        tune=tune,
        misses=MissLog(misses) if misses else None,
    )
    return Parts(dispatcher, loads, store, policy, capturing)


def tensors(
    batch: int = 4,
    heads: int = 32,
    kv_heads: int = 8,
    q_len: int = 64,
    k_len: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    k_len = q_len if k_len is None else k_len
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        if math.prod(shape) > 2**20:  # drawing takes seconds, and nobody looks at such large values
            return torch.zeros(shape, dtype=dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    return (
        normal(batch, heads, q_len, head_dim),
        normal(batch, kv_heads, k_len, head_dim),
        normal(batch, kv_heads, k_len, head_dim_v or head_dim),
    )
