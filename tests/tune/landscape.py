"""A constructed data set: what every config of the real family would take, shaped as real ones are."""

from __future__ import annotations

import hashlib
import math

from flashgen.build.inputs import density
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import Toolchain, render
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.masks import Mask, causal
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.spec.target import find_target
from flashgen.tune.suites import make_workload

TARGET = find_target("nvidia-h200")
TOOLCHAIN = Toolchain("3.6.0")
VERSIONS = Versions("0.1.0", "3.6.0", "2.13.0", "12.8")
FAMILY = FAMILIES["attention_fwd"]


def workload(seq: int = 4096, mask: Mask | None = None) -> Workload:
    return make_workload(
        head_dim=128,
        heads=32,
        kv_heads=8,
        q_len=seq,
        k_len=seq,
        mask=mask or causal(),
        dtype="bf16",
        batch=16384 // seq,
    )


def space(of: Workload | None = None) -> tuple[Config, ...]:
    return FAMILY.space((of or workload()).spec, TARGET)


def time_us(config: Config, seq: int = 4096) -> float | None:
    """Microseconds; None where the kernel fails. Interacting tunables, 1 % ruggedness, some failures."""
    m, n, warps, stages = (config.number(name) for name in ("block_m", "block_n", "num_warps", "num_stages"))
    if m == 128 and n == 128 and stages >= 3:
        return None
    time = 1000.0 * (1 + 0.45 * abs(math.log2(m / 128)) ** 1.2) * (1 + 0.15 * abs(math.log2(n / 64)))
    time *= {1: 1.25, 2: 1.0, 3: 1.06}.get(stages, 1.1)
    time *= 1.0 if warps == 4 else 1.12 if m * n < 128 * 128 else 0.97
    time *= 2.5 if m * n / warps > 4096 else 1.0
    time *= (1.0 if config["loads"] == "tma" else 1.08) * (1.02 if config["order"] == "heads" else 1.0)
    digest = hashlib.sha256(f"{config.name} {seq}".encode()).digest()
    return time * seq / 4096 * (1 + 0.01 * digest[0] / 255)


def record(
    of: Workload, config: Config, time: float | None, created_at: str = "2026-01-01T00:00:00Z"
) -> Record:
    return Record(
        target=TARGET,
        workload=of,
        config=config,
        measurement=Measurement(
            Status.OK, median_us=time, min_us=time, max_us=time, passes=20, max_error=1e-3
        )
        if time
        else Measurement(Status.WRONG, reason="max error 0.3 is over 0.01, at batch 0, head 0, row 7"),
        kernel_hash=render(of.spec, config, TOOLCHAIN).hash,
        versions=VERSIONS,
        admission=FAMILIES[config.family].admission(config),
        density=density(of),
        created_at=created_at,
    )


def records(*of: Workload) -> list[Record]:
    """An exhaustive data set of some workloads."""
    return [record(each, c, time_us(c, each.q_len)) for each in of or (workload(),) for c in space(each)]


def best_us(of: Workload | None = None) -> float:
    of = of or workload()
    return min(time for config in space(of) if (time := time_us(config, of.q_len)) is not None)
