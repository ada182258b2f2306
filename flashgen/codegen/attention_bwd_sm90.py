"""The Hopper backward family: warp-specialised Gluon for sm_90a."""

from __future__ import annotations

from typing import Any

from flashgen.codegen.abi import Arg, Extent, Grid, Part, Scratch, tensor_arguments
from flashgen.codegen.attention_bwd import gradient_values, prepare_part
from flashgen.codegen.attention_fwd_sm90 import reads_pairs
from flashgen.codegen.chunks import chunks, described
from flashgen.codegen.family import Family, Shared, Tiling, listed
from flashgen.spec import expr as ex
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import Config, Value
from flashgen.spec.target import KIB, Target

CONSUMERS = 2
KEYS = 64
"""Of a consumer warpgroup: the rows of one wgmma."""
ROWS = 64
"""Of a block."""
TILE_REGISTERS = 216
"""Of a consumer's thread, which setmaxnreg gives 240 where producer and adder have 24: with 208 of tiles
nothing spills in a loop, with 224 it does."""
MOST_HEAD_DIM = 128
_LANES = 128  # threads of a warpgroup
_BOX = 256  # elements of a row of the boxes in which dq leaves: the most that TMA has
_BARRIER_BYTES = KIB  # mbarriers and alignment, at most


def _tiling(config: Config) -> Tiling:
    return Tiling(
        block_m=ROWS,
        block_n=CONSUMERS * KEYS,
        num_warps=4,
        num_stages=config.number("num_stages"),
        descriptors=True,
        warps=4 * (CONSUMERS + 1),
        by_keys=True,
    )


def halves(spec: AttentionSpec) -> bool:
    """Whether each consumer computes half of the head dim of what a block adds to dq, or they take turns.

    At head_dim 128 a thread has no registers for the whole beside its sums of dk and dv.
    """
    return spec.qk_chunks == (128,)


def registers_needed(config: Config, spec: AttentionSpec) -> int:
    """Registers of a consumer's thread that hold tiles: sums of dk and dv, scores, gradients of weights and
    weights as an operand; with K and V as operands, too."""
    dims = sum(spec.qk_chunks) + sum(spec.v_chunks)
    held = dims * KEYS // _LANES + 2 * KEYS * ROWS // _LANES + KEYS * ROWS // (2 * _LANES)
    return held + (dims * KEYS // (2 * _LANES) if config["operands"] == "registers" else 0)


def _leaves(spec: AttentionSpec) -> str:
    reasons = {
        "computes gradients of dense calls, and these sequences are packed": spec.packed,
        "computes gradients of q, k and v, and those of sinks are asked for, too": spec.sinks,
        "computes gradients of q, k and v, and those of what the score rule reads "
        f"({', '.join(spec.learned)}) are asked for, too": spec.learned,
        "walks ranges of rows, and this mask lists blocks of them": listed(spec.mask, "q"),
        f"computes dq of head_dim up to {MOST_HEAD_DIM}, not {spec.head_dim}": spec.head_dim > MOST_HEAD_DIM,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _limits(config: Config, spec: AttentionSpec, target: Target) -> str:
    if (needed := registers_needed(config, spec)) > TILE_REGISTERS:
        return (
            f"holds {needed} registers of tiles in each of a consumer's threads, which has {TILE_REGISTERS} "
            "for them"
        )
    return ""


def _shared_bytes(config: Config, spec: AttentionSpec, target: Target) -> Shared:
    """Keys and values, the rings of rows, gradients of scores twice, and what each consumer adds to dq."""
    qk, v = sum(spec.qk_chunks), sum(spec.v_chunks)
    keys, stages = CONSUMERS * KEYS, config.number("num_stages")
    tiles = (keys + stages * ROWS) * (qk + v) * spec.itemsize + stages * 2 * ROWS * 4
    tiles += 2 * keys * ROWS * spec.itemsize
    tiles += CONSUMERS * ROWS * (qk // 2 if halves(spec) else qk) * 4
    return Shared(tiles, tiles + _BARRIER_BYTES)


def _defaults(spec: AttentionSpec) -> tuple[tuple[Value, ...], ...]:
    held = max(spec.head_dim, spec.head_dim_v) <= 64 and not _takes_registers(spec)
    return ((2, 4, "registers" if held else "shared"), (2, 4, "shared"))


def _takes_registers(spec: AttentionSpec) -> bool:
    """Whether a score rule takes those that keys and values would have: for its slope, or what it reads of
    pairs of rows and keys."""
    rule = spec.score_mod
    return rule is not None and (reads_pairs(spec) or ex.derivative(rule.expr) != ex.ONE)


def _sums(spec: AttentionSpec) -> dict[str, int]:
    """The buffers of dq's sums, one for each chunk, and how many rows of boxes a block takes there."""
    return {f"dq_sums{each.suffix}": ROWS * each.size // _BOX for each in chunks(spec, "DQ")}


def _signature(config: Config, spec: AttentionSpec) -> tuple[tuple[Arg, ...], ...]:
    from flashgen.codegen.expressions import rule_arguments  # see `family.listed`

    of_rows, of_keys = f"1,{ROWS}", f"1,{CONSUMERS * KEYS}"
    inputs = [
        described(spec, tensor, spec.dtype, copied)
        for tensor, copied in (("Q", of_rows), ("K", of_keys), ("V", of_keys), ("DOUT", of_rows))
    ]
    outputs = [described(spec, tensor, spec.dtype, of_keys) for tensor in ("DK", "DV")]
    stats = Arg("ROW_STATS", "scratch.row_stats", f"tensordesc<fp32[1,1,1,{2 * ROWS}]>")
    sums = tuple(
        Arg(
            name.upper(),
            f"scratch.{name}",
            f"tensordesc<fp32[1,1,{rows // 2 if halves(spec) else rows},{_BOX}]>",
        )
        for name, rows in _sums(spec).items()
    )
    sizes = ("heads", "heads_per_kv", "q_len", "k_len")
    rules = [rule for rule in (spec.mask, spec.score_mod) if rule is not None]
    return (
        *inputs,
        (stats,),
        sums,
        *outputs,
        (
            Arg("batches", "batch", "i32"),
            *(Arg(name, name, "i32") for name in sizes),
            Arg("scale", "scale", "fp32"),
        ),
        *(group for rule in rules for group in rule_arguments(rule)),
    )


def _parts(config: Config, spec: AttentionSpec) -> tuple[Part, ...]:
    """What is prepared of the rows, before; and after, dq from its sums."""
    sums = tuple(Arg(name.upper(), f"scratch.{name}", "*fp32") for name in _sums(spec))
    stats = Arg("ROW_STATS", "scratch.row_stats", "*fp32")
    leave = (
        sums,
        tensor_arguments("DQ", spec.dtype),
        (Arg("heads", "heads", "i32"), Arg("q_len", "q_len", "i32"), Arg("scale", "scale", "fp32")),
    )
    return (
        prepare_part(spec, (stats, *sums), ROWS),
        Part("leave_dq", False, leave, Grid("row_tiles", ROWS)),
    )


def _scratch(config: Config, spec: AttentionSpec) -> tuple[Scratch, ...]:
    """(batch, head, block of rows, 128): its LSEs, then its deltas. (batch, head, some for each block, 256):
    sums of dq, in the order in which threads add to them. All float32."""
    of_heads = (Extent("batch"), Extent("heads"))
    stats = Scratch("row_stats", "fp32", (*of_heads, Extent("q_len", ROWS), Extent(times=2 * ROWS)))
    sums = (
        Scratch(name, "fp32", (*of_heads, Extent("q_len", ROWS, rows), Extent(times=_BOX)))
        for name, rows in _sums(spec).items()
    )
    return (stats, *sums)


def _derived(config: Config, spec: AttentionSpec) -> dict[str, Any]:
    return gradient_values(spec) | {"halves": halves(spec)}


ATTENTION_BWD_SM90 = Family(
    name="attention_bwd_sm90",
    op="bwd",
    template="attention_bwd_sm90.py.jinja",
    language="gluon",
    tunables=(
        ("num_stages", (2, 3)),
        ("group", (1, 4, 16)),
        ("operands", ("shared", "registers")),
    ),
    archs=(90, 90),
    dtypes=("fp16", "bf16"),
    tiling=_tiling,
    limits=_limits,
    shared_bytes=_shared_bytes,
    defaults=_defaults,
    dropout=False,
    leaves=_leaves,
    derived=_derived,
    signature=_signature,
    parts=_parts,
    scratch=_scratch,
    repeats=False,
)
