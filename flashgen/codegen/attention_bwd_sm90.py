"""The Hopper backward family: warp-specialised Gluon for sm_90a."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flashgen.codegen.abi import Arg, Extent, Part, Scratch
from flashgen.codegen.attention_bwd import gradient_values, leave_part, prepare_part, sink_parts
from flashgen.codegen.attention_fwd_sm90 import reads_pairs
from flashgen.codegen.chunks import chunks, described
from flashgen.codegen.family import Family, Shared, Tiling, listed
from flashgen.spec import expr as ex
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import Config, Value
from flashgen.spec.target import KIB, TARGETS, Target

NAME = "attention_bwd_sm90"
CONSUMERS = 2
"""Warpgroups that sum dk and dv."""
KEYS = 64
"""Of a consumer warpgroup: the rows of one wgmma."""
ROWS = 64
"""Of a block."""
EXCHANGED = "exchanged"
"""`operands` where one consumer sums dv, the other dk, of the same keys, and a third warpgroup computes dq:
what one of them computes for the others passes through shared memory."""
THIRD = "third"
"""`dq_by` where a warpgroup of its own computes what a block adds to dq, as one does where consumers
exchange."""
TILE_REGISTERS = 216
"""Of a consumer's thread, which setmaxnreg gives 240 where producer and adder have 24: with 208 of tiles
nothing spills in a loop, with 224 it does."""
BESIDE_THIRD = 176
"""The same where a third warpgroup leaves consumers 208: under a causal mask 176 of tiles spill one in a
loop, 192 spill 39."""
MOST_HEAD_DIM = 128
"""Of which a consumer computes what its keys add to dq, beside its sums of dk and dv."""
MOST_SUMS = 128
"""Columns of one product: of 16 warps a thread has 128 registers at the launch, and ptxas compiles no product
whose sums alone take them."""
DQ_COLUMNS = 64
"""In which dq leaves the third warpgroup, whose threads have 64 registers: 32 of sums."""
_SHARED = min(target.shared_per_block for target in TARGETS.values() if target.arch == 90)
_LANES = 128  # threads of a warpgroup
_BOX = 256  # elements of a row of the boxes in which dq leaves: the most that TMA has
_BARRIER_BYTES = 3 * KIB // 2  # and alignment, and what partitions are given, at most: 1,368 of ten chunks


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns of a chunk of a head dim that one product sums."""

    name: str
    """Variable that holds the sums: `dk_128`."""
    suffix: str
    """Of the chunk."""
    first: int
    """Of its columns in the chunk."""
    size: int
    whole: bool
    """Whether it is the chunk."""


def pieces(spec: AttentionSpec, tensor: str, most: int) -> tuple[Piece, ...]:
    """The chunks of a tensor, in pieces of at most so many columns."""
    return tuple(
        Piece(
            each.name if each.size <= most else f"{tensor.lower()}_{each.offset + first}",
            each.suffix,
            first,
            min(each.size, most),
            each.size <= most,
        )
        for each in chunks(spec, tensor)
        for first in range(0, each.size, most)
    )


def _exchanged(config: Config) -> bool:
    return config["operands"] == EXCHANGED


def _has_third(config: Config) -> bool:
    """Whether a warpgroup that sums nothing computes what a block adds to dq."""
    return _exchanged(config) or config["dq_by"] == THIRD


def _tiling(config: Config) -> Tiling:
    return Tiling(
        block_m=ROWS,
        block_n=KEYS if _exchanged(config) else CONSUMERS * KEYS,
        num_warps=4,
        num_stages=config.number("num_stages"),
        descriptors=True,
        warps=4 * (CONSUMERS + (2 if _has_third(config) else 1)),
        by_keys=True,
        repeats=False,
    )


def _walks(config: Config) -> Tiling:
    """As lists count: a tile, here of keys, and the blocks that it walks."""
    tiling = _tiling(config)
    return replace(tiling, block_m=tiling.block_n, block_n=ROWS)


def halves(config: Config, spec: AttentionSpec) -> bool:
    """Whether each consumer computes half of the head dim of what a block adds to dq, or they take turns.

    At head_dim 128 a thread has no registers for the whole beside its sums of dk and dv.
    """
    return spec.qk_chunks == (128,) and not _has_third(config)


def registers_needed(config: Config, spec: AttentionSpec) -> int:
    """Registers of a consumer's thread that hold tiles: sums of dk and dv, scores, gradients of weights and
    weights as an operand; with K and V as operands, too. Where consumers exchange these, the larger of both
    sums, scores, weights as an operand and the LSEs of a block, which is never too much."""
    sums = [sum(each) * KEYS // _LANES for each in (spec.qk_chunks, spec.v_chunks)]
    scores, operand = KEYS * ROWS // _LANES, KEYS * ROWS // (2 * _LANES)
    if _exchanged(config):
        return max(sums) + scores + operand + ROWS // 4
    return sum(sums) + 2 * scores + operand + (sum(sums) // 2 if config["operands"] == "registers" else 0)


def _leaves(spec: AttentionSpec) -> str:
    reasons = {
        "computes gradients of q, k, v and sinks, and those of what the score rule reads "
        f"({', '.join(spec.learned)}) are asked for, too": spec.learned,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _limits(config: Config, spec: AttentionSpec, target: Target) -> str:
    if _exchanged(config) and config["dq_by"] == THIRD:
        return "exchanges, for which a third warpgroup computes dq as it is; take dq_by=consumers"
    if _exchanged(config) and _serves_alone(spec, target):
        return "exchanges what each consumer can compute alone, of tiles of half as many keys"
    return _too_much(config, spec)


def _serves_alone(spec: AttentionSpec, target: Target) -> bool:
    """Whether consumers need not exchange anything: that reads rows, and adds to dq, half as often."""
    least = Config(NAME, (("num_stages", 2), ("group", 4), ("operands", "shared")))
    return not _too_much(least, spec) and _shared_bytes(least, spec, target).most <= target.shared_per_block


def _too_much(config: Config, spec: AttentionSpec) -> str:
    """For the registers of a consumer's thread."""
    if spec.head_dim > MOST_HEAD_DIM and not _exchanged(config):
        return f"computes dq of head_dim up to {MOST_HEAD_DIM} beside dk and dv, not {spec.head_dim}"
    there = BESIDE_THIRD if config["dq_by"] == THIRD else TILE_REGISTERS
    if (needed := registers_needed(config, spec)) > there:
        return (
            f"holds {needed} registers of tiles in each of a consumer's threads, which has {there} for them"
        )
    return ""


def _tiles_bytes(config: Config, spec: AttentionSpec) -> int:
    """Of shared memory: keys and values, the rings of rows, and gradients of scores twice, or once and the
    weights."""
    dims = sum(spec.qk_chunks) + sum(spec.v_chunks)
    keys, stages = _tiling(config).block_n, config.number("num_stages")
    rows = stages * ROWS * (dims * spec.itemsize + 2 * 4)
    return keys * dims * spec.itemsize + rows + 2 * keys * ROWS * spec.itemsize


def _dq_columns(config: Config, spec: AttentionSpec) -> dict[str, int]:
    """Columns of dq that leave at once, of each chunk, by its suffix."""
    most = DQ_COLUMNS if _has_third(config) or halves(config, spec) else MOST_HEAD_DIM
    return {each.suffix: min(each.size, most) for each in chunks(spec, "DQ")}


def dq_slots(config: Config, spec: AttentionSpec) -> int:
    """How many parts of dq may be on their way out: of each consumer one, or of a third warpgroup two, if
    there is room."""
    if not _has_third(config):
        return CONSUMERS
    two = 2 * _dq_bytes(config, spec) + _tiles_bytes(config, spec) + _BARRIER_BYTES
    return 2 if two <= _SHARED else 1


def _dq_bytes(config: Config, spec: AttentionSpec) -> int:
    """Of such a part: all chunks of a third warpgroup's in turn take one place, else each its own."""
    columns = _dq_columns(config, spec).values()
    return ROWS * (max(columns) if _has_third(config) else sum(columns)) * 4


def _shared_bytes(config: Config, spec: AttentionSpec, target: Target) -> Shared:
    tiles = _tiles_bytes(config, spec) + dq_slots(config, spec) * _dq_bytes(config, spec)
    return Shared(tiles, tiles + _BARRIER_BYTES)


def _defaults(spec: AttentionSpec) -> tuple[tuple[Value, ...], ...]:
    most = max(spec.head_dim, spec.head_dim_v)
    others = ((2, 4, "shared"), (2, 4, EXCHANGED))
    if most > 96 or _takes_registers(spec):
        return others
    held = (2, 4, "registers" if most <= 64 else "shared")
    return (held if listed(spec.mask, "q") else (*held, THIRD), *others)  # and lists by ids at 64


def _takes_registers(spec: AttentionSpec) -> bool:
    """Whether a score rule takes those that keys and values would have: for its slope, or what it reads of
    pairs of rows and keys."""
    rule = spec.score_mod
    return rule is not None and (reads_pairs(spec) or ex.derivative(rule.expr) != ex.ONE)


def _sums(spec: AttentionSpec) -> dict[str, int]:
    """The buffers of dq's sums, one for each chunk, and how many rows of boxes a block takes there."""
    return {f"dq_sums{each.suffix}": ROWS * each.size // _BOX for each in chunks(spec, "DQ")}


def _signature(config: Config, spec: AttentionSpec) -> tuple[tuple[Arg, ...], ...]:
    from flashgen.codegen import lists  # see `family.listed`
    from flashgen.codegen.expressions import rule_arguments

    of_rows, of_keys = f"1,{ROWS}", f"1,{_tiling(config).block_n}"
    inputs = [
        described(spec, tensor, spec.dtype, copied)
        for tensor, copied in (("Q", of_rows), ("K", of_keys), ("V", of_keys), ("DOUT", of_rows))
    ]
    outputs = [described(spec, tensor, spec.dtype, of_keys) for tensor in ("DK", "DV")]
    stats = Arg("ROW_STATS", "scratch.row_stats", f"tensordesc<fp32[1,1,1,{2 * ROWS}]>")
    sums = tuple(
        Arg(
            f"DQ_SUMS{suffix}",
            f"scratch.dq_sums{suffix}",
            f"tensordesc<fp32[1,1,{ROWS * columns // _BOX},{_BOX}]>",
        )
        for suffix, columns in _dq_columns(config, spec).items()
    )
    if spec.packed:
        places = [(Arg("CU_Q", "cu_q", "*i32"), Arg("CU_K", "cu_k", "*i32"))]
        sizes = {
            "sequences": "sequences",
            "heads": "heads",
            "heads_per_kv": "heads_per_kv",
            "k_tokens": "k_len",
        }
    else:
        places = []
        sizes = {"batches": "batch"} | {each: each for each in ("heads", "heads_per_kv", "q_len", "k_len")}
    rules = [rule for rule in (spec.mask, spec.score_mod) if rule is not None]
    return (
        *inputs,
        (stats,),
        sums,
        *outputs,
        *places,
        (*(Arg(name, source, "i32") for name, source in sizes.items()), Arg("scale", "scale", "fp32")),
        *([of_lists] if (of_lists := lists.arguments(spec, "q")) else []),
        *(group for rule in rules for group in rule_arguments(rule)),
    )


def _parts(config: Config, spec: AttentionSpec) -> tuple[Part, ...]:
    """What is prepared of the rows, the gradient of sinks from it and the lists of a mask that needs them,
    before; and after, dq from its sums."""
    from flashgen.codegen import lists  # see `family.listed`

    sums = tuple(Arg(name.upper(), f"scratch.{name}", "*fp32") for name in _sums(spec))
    stats = Arg("ROW_STATS", "scratch.row_stats", "*fp32")
    return (
        prepare_part(spec, (stats, *sums), ROWS, in_blocks=True),
        *sink_parts(spec, (stats,), in_blocks=True),
        *lists.parts(spec, _walks(config), "q"),
        leave_part(spec, sums, ROWS, in_blocks=True),
    )


def _scratch(config: Config, spec: AttentionSpec) -> tuple[Scratch, ...]:
    """(batch, head, block of rows, 128): its LSEs, then its deltas. (batch, head, some for each block, 256):
    sums of dq, in the order in which threads add to them. All float32. Packed sequences have blocks of their
    own, as many as `Grid` says. And the lists of a mask that needs them."""
    from flashgen.codegen import lists

    of_heads = (Extent("batch"), Extent("heads"))
    stats = Scratch(
        "row_stats", "fp32", (*of_heads, Extent("q_len", ROWS, packed=spec.packed), Extent(times=2 * ROWS))
    )
    sums = (
        Scratch(
            name, "fp32", (*of_heads, Extent("q_len", ROWS, rows, packed=spec.packed), Extent(times=_BOX))
        )
        for name, rows in _sums(spec).items()
    )
    return (stats, *sums, *lists.scratch(spec, _walks(config), "q"))


def _derived(config: Config, spec: AttentionSpec) -> dict[str, Any]:
    from flashgen.codegen import lists

    return gradient_values(spec) | {
        "halves": halves(config, spec),
        "dk_pieces": pieces(spec, "DK", MOST_SUMS),
        "dv_pieces": pieces(spec, "DV", MOST_SUMS),
        "dq_columns": _dq_columns(config, spec),
        "dq_slots": dq_slots(config, spec),
        "lists_of_rows": ", ".join(arg.name for arg in lists.arguments(spec, "q")),
    }


ATTENTION_BWD_SM90 = Family(
    name=NAME,
    op="bwd",
    template="attention_bwd_sm90.py.jinja",
    language="gluon",
    tunables=(
        ("num_stages", (2, 3)),
        ("group", (1, 4, 16)),
        ("operands", ("shared", "registers", EXCHANGED)),
    ),
    options=(("dq_by", ("consumers", THIRD)),),
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
)
