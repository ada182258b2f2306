"""What a workload costs at least: floating-point operations, bytes, and the time no kernel can beat.

The figures of GPUs are upper bounds from the vendors' data sheets (dense, boost clocks): good enough to
refuse an impossible timing and to rank configs without a GPU, and never a promise.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.spec import expr as ex
from flashgen.spec.attention import Workload, length_code
from flashgen.spec.masks import Mask
from flashgen.spec.target import Target
from flashgen.spec.tiles import visited

if TYPE_CHECKING:
    from torch import Tensor

SLACK = 1.05
"""A timing may beat the floor by this factor before it counts as impossible."""

_PAIRS, _PAIRS_AT_ONCE = 2**22, 2**17
"""What a mask is evaluated on where a workload has more, and at once: 1 MB for each intermediate result."""
_ROWS, _HEADS, _BATCH = 1024, 32, 256
_COUNTED = 4
"""Sequences, and heads of each, whose tiles are counted: lists of 16,384 tokens take up to 5 s each."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One generation's multiprocessor: operations a clock, and its clock in GHz."""

    tensor_flops: int
    """fp16 and bf16 with float32 accumulation, dense; a multiply and an add are two. e4m3, where the hardware
    has it, twice, and TF32 half as many."""
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
    """Shares of a workload that its mask leaves, from some rows, keys and sequences (all of them if few)."""
    import torch

    from flashgen.build.reference import evaluate_rule

    if workload.empty:
        return Visible(0.0, 0.0)
    if workload.spec.packed:
        return _visible_of_packed(workload)
    varies = ex.free_symbols(workload.spec.mask.expr)
    batch = _spread(workload.batch if "batch" in varies else 1, _BATCH)
    heads = _spread(workload.heads if varies & {"head", "kv_head"} else 1, _HEADS)
    keys = _spread(workload.k_len, _PAIRS_AT_ONCE)
    rows = _spread(workload.q_len, min(_ROWS, max(8, _PAIRS // (len(batch) * len(heads) * len(keys)))))
    mask = _drawn(workload, len(batch), len(keys))
    rows_at_once = max(1, _PAIRS_AT_ONCE // len(keys))
    batch_at_once = max(1, rows_at_once // len(rows))
    env: dict[str, Any] = {"k_idx": keys, "q_len": workload.q_len, "k_len": workload.k_len}
    pairs = seen = 0
    for head, some in itertools.product(heads.tolist(), torch.split(batch, batch_at_once)):
        env |= {"head": head, "kv_head": head // (workload.heads // workload.kv_heads)}
        env["batch"] = some.view(-1, 1, 1)
        kept = torch.zeros(len(some), len(keys), dtype=torch.bool)
        for each in torch.split(rows, rows_at_once):
            keep = torch.as_tensor(evaluate_rule(mask, env | {"q_idx": each.view(-1, 1)}))
            keep = keep.expand(len(some), len(each), len(keys))
            pairs += int(keep.sum())
            kept |= keep.any(1)
        seen += int(kept.sum())
    total = len(batch) * len(heads) * len(keys)
    return Visible(pairs / (total * len(rows)), seen / total)


def _visible_of_packed(workload: Workload) -> Visible:
    """Of packed sequences: pairs as a share of all queries times the longest keys, keys of all of them.

    Sequences whose lengths are of one power of 2 count as the longest of them: of a window's pairs so rather
    fewer are said than more.
    """
    from flashgen.build.inputs import packed_lengths

    classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for q_len, k_len in zip(*(each.tolist() for each in packed_lengths(workload)), strict=True):
        classes.setdefault((length_code(q_len), length_code(k_len)), []).append((q_len, k_len))
    spec = replace(workload.spec, addressing="dense")
    pairs = keys = 0.0
    for members in classes.values():
        (q_len, k_len), count = max(members), len(members)
        alike = replace(workload, spec=spec, batch=count, q_len=q_len, k_len=k_len, total_q=0, total_k=0)
        share = visible(alike)
        pairs += share.pairs * sum(q * k for q, k in members)
        keys += share.keys * sum(k for _, k in members)
    return Visible(pairs / (workload.total_q * workload.k_len), keys / workload.total_k)


def _spread(size: int, most: int) -> Tensor:
    """All indices below `size` or, of more than `most`, one drawn from each of as many equal parts.

    Drawn, because a window and rows at even distances would hit or miss even keys together.
    """
    import torch

    count = min(size, most)
    if count == size:
        return torch.arange(size)
    place = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return ((torch.arange(count) + place) * (size / count)).to(torch.int64).clamp_(max=size - 1)


def _drawn(workload: Workload, batch: int, keys: int) -> Mask:
    """The mask with the operands it is measured with; where they are large, with shorter ones like them."""
    from flashgen.build.inputs import make_rules

    rule = workload.spec.mask
    spec = replace(workload.spec, score_mod=None)
    alone = replace(workload, spec=spec, params=workload.params[: len(rule.params)])
    ranks = [operand.rank for operand in rule.operands]
    if workload.batch * (workload.k_len if max(ranks, default=0) > 1 else 1) <= _PAIRS:
        return make_rules(alone)[0]
    mask, _ = make_rules(replace(alone, batch=batch, k_len=keys))
    tables = tuple(
        # Of one dimension they are lengths of keys; what ascends are places among them.
        _Table(each, workload.batch, workload.k_len, keys, operand.rank == 1 or operand.ascending)
        for operand, each in zip(rule.operands, mask.tensors, strict=True)
    )
    return Mask(rule, mask.values, tables)


class _Table:
    """An operand as `inputs` invents them, drawn for fewer sequences and keys than it is read for: the first
    axis counts sequences, the last one keys, unless there is but one.
    """

    def __init__(self, table: Tensor, batch: int, k_len: int, keys: int, of_keys: bool) -> None:
        self._batch, self._k_len, self._keys = batch, k_len, keys
        self._table = table.long() * k_len // keys if of_keys else table

    def __getitem__(self, indices: tuple[Any, ...]) -> Tensor:
        where = [indices[0] * self._table.shape[0] // self._batch, *indices[1:]]
        if len(where) > 1:
            where[-1] = where[-1] * self._keys // self._k_len
        return self._table[tuple(where)]


@lru_cache(maxsize=512)
def tiles(workload: Workload, block_m: int, block_n: int) -> float:
    """Blocks of keys that a kernel visits for a block of queries, on average: see `spec.tiles.visited`.

    Of sequences and heads that the mask tells apart, some.

    Args:
        workload: of sequences that are not packed; its mask has the operands that `inputs` draws.
        block_m: queries of a block.
        block_n: keys of a block.
    """
    from flashgen.build.inputs import make_rules

    mask, _ = make_rules(workload)
    rule = mask.rule
    varies = ex.free_symbols(rule.expr)
    batch = _spread(workload.batch if "batch" in varies else 1, _COUNTED).tolist()
    heads = _spread(workload.heads if varies & {"head", "kv_head"} else 1, _COUNTED).tolist()
    env: dict[str, Any] = {"q_len": workload.q_len, "k_len": workload.k_len}
    env |= {name: value for (name, _), value in zip(rule.params, mask.values, strict=True)}
    env |= {each.name: table.tolist() for each, table in zip(rule.operands, mask.tensors, strict=True)}
    blocks = [
        len(partial) + len(full)
        for sequence, head in itertools.product(batch, heads)
        for partial, full in visited(
            rule,
            env | {"batch": sequence, "head": head, "kv_head": head // workload.heads_per_kv},
            block_m,
            block_n,
        )
    ]
    return sum(blocks) / len(blocks)


def flops(workload: Workload) -> float:
    """Floating-point operations of the products over the pairs that the mask leaves: two, and for gradients
    five, of which three are along the head dim of keys (scores once more, dk and dq) and two along that of
    values (the gradients of weights, and dv)."""
    spec = workload.spec
    pairs = visible(workload).pairs * workload.q_tokens * workload.k_len * workload.heads
    of_keys, of_values = {"fwd": (1, 1), "bwd": (3, 2)}[spec.op]
    return 2.0 * pairs * (of_keys * spec.head_dim + of_values * spec.head_dim_v)


def input_bytes(workload: Workload) -> float:
    """Bytes of q, k and v that must be read, and for gradients of the output and its gradient; keys that no
    query sees need not be."""
    spec = workload.spec
    of_rows = spec.head_dim + (2 * spec.head_dim_v if spec.op == "bwd" else 0)
    q = workload.heads * workload.q_tokens * of_rows
    kv = workload.kv_heads * workload.k_tokens * (spec.head_dim + spec.head_dim_v) * visible(workload).keys
    return float(spec.itemsize * (q + kv))


def peak_flops(workload: Workload, target: Target) -> float:
    """Operations per second that the target's best unit for the dtype can do."""
    row, label = unit(target), workload.spec.dtype_label
    others = {"fp32": row.cuda_flops, "tf32": row.tensor_flops // 2, "e4m3": row.tensor_flops * 2}
    per_clock = others.get(label, row.tensor_flops)
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
