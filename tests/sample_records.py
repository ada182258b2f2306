"""Records for tests: small, different from each other, and true to the types."""

from __future__ import annotations

from dataclasses import replace

from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.spec.target import Target, find_target

H200 = find_target("nvidia-h200")
CAUSAL = AttentionSpec(128, 128, "bf16", masks.causal().rule)


def config(
    block_m: int = 128, block_n: int = 64, warps: int = 4, stages: int = 2, loads: str = "pointer"
) -> Config:
    """A config of `attention_fwd`."""
    values = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
    return Config("attention_fwd", (*values.items(), ("loads", loads), ("order", "heads")))


def workload(
    q_len: int = 4096,
    k_len: int | None = None,
    batch: int = 4,
    heads: int = 32,
    kv_heads: int = 8,
    spec: AttentionSpec = CAUSAL,
    params: tuple[float, ...] = (),
) -> Workload:
    """A workload; `params` are the numbers of the spec's rules, in order."""
    rules = [rule for rule in (spec.mask, spec.score_mod) if rule is not None]
    names = [name for rule in rules for name, _ in rule.params]
    pairs = tuple(zip(names, params, strict=True))
    return Workload(spec, batch, heads, kv_heads, q_len, q_len if k_len is None else k_len, pairs)


def record(
    median_us: float | None = 100.0,
    *,
    status: Status = Status.OK,
    source: str = "measured",
    work: Workload | None = None,
    conf: Config | None = None,
    target: Target = H200,
    hash: str = "1111111111111111",
    triton: str = "3.6.0",
    created_at: str = "2026-11-29T12:00:00Z",
) -> Record:
    """One record; what is not `OK` gets a reason."""
    conf = conf or config()
    measurement = Measurement(
        status,
        median_us if status is Status.OK else None,
        passes=3,
        registers=128,
        spill_bytes=0,
        shared_bytes=65536,
        source=source,
        reason="" if status is Status.OK else f"{status.value} for a test",
    )
    admission = "tma" if conf["loads"] == "tma" else "any"
    versions = Versions("0.1.0", triton, "2.11.0", "580.65")
    return Record(
        target, work or workload(), conf, measurement, hash, versions, admission, created_at=created_at
    )


WINDOW_AND_CAP = AttentionSpec(
    96,
    64,
    "fp32",
    (masks.causal() & masks.sliding_window(1023, 0)).rule,
    score_mods.softcap(30.0).rule,
    fp32_precision="tf32",
    return_lse=True,
    positive_scale=False,
)


def full() -> Record:
    """A record in which no field has its default."""
    plain = record(
        work=workload(1, 131072, 3, 28, 4, WINDOW_AND_CAP, (1023, 0, 30.5)),
        conf=config(loads="tma"),
        triton="3.9.0",
    )
    measurement = Measurement(
        Status.OK,
        12.345678901234567,
        12.1,
        13.9,
        7,
        0.00390625,
        168,
        16,
        232448,
        "measured",
        "kept: ünïcode, \n and \\",
    )
    return replace(plain, measurement=measurement, density="lengths uniform in [k/2, k]")


def many(specs: int = 100, each: int = 50) -> list[Record]:
    """`specs` x `each` different records, as tuning many shapes leaves them."""
    found = []
    for number in range(specs):
        spec = AttentionSpec(16 + 8 * (number % 31), 16 + 8 * (number // 31), "bf16", masks.causal().rule)
        for trial in range(each):
            conf = config(
                stages=1 + trial % 4, warps=4 if trial % 8 < 4 else 8, loads=("pointer", "tma")[trial % 2]
            )
            length = 512 << (trial // 8) % 6
            found.append(
                record(
                    50.0 + number + trial / 7,
                    work=workload(length, spec=spec),
                    conf=conf,
                    hash=f"{number:08x}{trial % 8:08x}",
                )
            )
    return found
