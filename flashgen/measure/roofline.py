"""What a workload costs at least: floating-point operations, bytes, and the time no kernel can beat.

The figures of GPUs are upper bounds from the vendors' data sheets (dense, boost clocks): good enough to
refuse an impossible timing and to rank configs without a GPU, and never a promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flashgen.spec.attention import Workload
from flashgen.spec.target import Target

SLACK = 1.05
"""A timing may beat the floor by this factor before it counts as impossible."""

_SAMPLED_PAIRS = 2**22
_SAMPLED_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Unit:
    """One generation's multiprocessor: operations a clock, and its clock in GHz."""

    tensor_flops: int
    """fp16 and bf16 with float32 accumulation, dense; a multiply and an add are two."""
    cuda_flops: int
    """float32 on the CUDA cores."""
    exp2: int
    """exp2 and other special functions."""
    warps: int
    """Resident at once."""
    ghz: float


UNITS = {
    80: Unit(2048, 128, 16, 64, 1.41),
    86: Unit(1024, 256, 16, 48, 1.86),
    89: Unit(1024, 256, 16, 48, 2.60),
    90: Unit(4096, 256, 16, 64, 1.98),
    100: Unit(8192, 256, 16, 64, 2.00),
    120: Unit(1024, 256, 16, 48, 2.70),
}


def unit(target: Target) -> Unit:
    """The row of a target's generation: the newest that is not newer, the oldest for older ones."""
    known = [arch for arch in UNITS if arch <= target.arch]
    return UNITS[max(known, default=min(UNITS))]


@dataclass(frozen=True, slots=True)
class Visible:
    """What of a workload its mask leaves."""

    pairs: float
    """Share of all (query, key) pairs."""
    keys: float
    """Share of the keys that some query sees; at most this, from below."""


@lru_cache(maxsize=512)
def visible(workload: Workload) -> Visible:
    """Shares of a workload that its mask leaves, from evenly spaced query rows (all of them if few)."""
    import torch

    from flashgen.build.inputs import make_rules
    from flashgen.build.reference import evaluate_rule

    if not workload.q_len or not workload.k_len:
        return Visible(0.0, 0.0)
    mask, _ = make_rules(workload)
    width = workload.k_len * (workload.batch if mask.rule.operands else 1)
    count = min(workload.q_len, _SAMPLED_ROWS, max(16, _SAMPLED_PAIRS // width))
    rows = ((torch.arange(count, dtype=torch.float64) + 0.5) * (workload.q_len / count)).to(torch.int64)
    head = torch.arange(workload.heads).view(-1, 1, 1)
    env = {
        "q_idx": rows.view(-1, 1),
        "k_idx": torch.arange(workload.k_len),
        "q_len": workload.q_len,
        "k_len": workload.k_len,
        "batch": torch.arange(workload.batch).view(-1, 1, 1, 1),
        "head": head,
        "kv_head": head // (workload.heads // workload.kv_heads),
    }
    keep = torch.as_tensor(evaluate_rule(mask, env))
    keep = keep.expand(*keep.shape[:-2], count, workload.k_len)
    return Visible(float(keep.float().mean(dtype=torch.float64)), float(keep.any(-2).float().mean()))


def flops(workload: Workload) -> float:
    """Floating-point operations of the two products over the pairs that the mask leaves."""
    spec = workload.spec
    pairs = visible(workload).pairs * workload.q_len * workload.k_len * workload.batch * workload.heads
    return 2.0 * pairs * (spec.head_dim + spec.head_dim_v)


def input_bytes(workload: Workload) -> float:
    """Bytes of q, k and v that must be read; keys that no query sees need not be."""
    spec = workload.spec
    q = workload.heads * workload.q_len * spec.head_dim
    kv = workload.kv_heads * workload.k_len * (spec.head_dim + spec.head_dim_v) * visible(workload).keys
    return float(workload.batch * spec.itemsize * (q + kv))


def peak_flops(workload: Workload, target: Target) -> float:
    """Operations per second that the target's best unit for the dtype can do."""
    row, label = unit(target), workload.spec.dtype_label
    per_clock = {"fp32": row.cuda_flops, "tf32": row.tensor_flops // 2}.get(label, row.tensor_flops)
    return per_clock * target.sm_count * row.ghz * 1e9


def bytes_per_s(target: Target) -> float:
    """Memory bandwidth: the upper end of the target's class."""
    return float(2.0 ** ((target.bandwidth + 0.5) / 4) * 1e9)


def floor_us(workload: Workload, target: Target) -> float:
    """Microseconds below which a timing is refused: the roofline, less the slack.

    The output is left out: when the kernel ends it may still be in the cache.
    """
    arithmetic = flops(workload) / peak_flops(workload, target)
    memory = input_bytes(workload) / bytes_per_s(target)
    return 1e6 * max(arithmetic, memory) / SLACK
