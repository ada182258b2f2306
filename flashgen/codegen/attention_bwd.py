"""The portable backward family: Triton, for sm_80 and newer and for the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashgen.codegen.abi import (
    Arg,
    Extent,
    Grid,
    Part,
    Scratch,
    dropout_arguments,
    sink_arguments,
    tensor_arguments,
)
from flashgen.codegen.chunks import chunks, described
from flashgen.codegen.family import Family, Shared, Tiling
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import Config, Value
from flashgen.spec.target import KIB, Target

ROWS_AT_ONCE = 32
"""Of a program that prepares rows: at head_dim 128 each of its threads reads 4 x 16 bytes of both tensors."""

ROWS_OF_A_SINK = 4096
"""Of each step of the program that has a head's sink: each of its threads reads 16 of both buffers."""

_OF_ROWS = ("row_lse", "delta")
_ROW_BUFFERS = tuple(Arg(name.upper(), f"scratch.{name}", "*fp32") for name in _OF_ROWS)
"""What is prepared of each row: its LSE in log2 units, and the mean of the gradients of its scores."""

FUSED = "fused"
"""`form` where one kernel computes all gradients: tiles of keys add to sums of dq, which have no order."""
_DQ_SUMS = Arg("DQ_SUMS", "scratch.dq_sums", "*fp32")


def is_fused(config: Config) -> bool:
    """Whether dq is summed by the kernel of dk and dv."""
    return config["form"] == FUSED


def _tiling(config: Config) -> Tiling:
    walked = _walked(config)
    if not is_fused(config):
        return walked
    return replace(walked, block_m=walked.block_n, block_n=walked.block_m, by_keys=True, repeats=False)


def _walked(config: Config) -> Tiling:
    """A tile of block_m positions that walks blocks of block_n, whichever of them are rows."""
    return Tiling(
        block_m=config.number("block_m"),
        block_n=config.number("block_n"),
        num_warps=config.number("num_warps"),
        num_stages=config.number("num_stages"),
        descriptors=config["loads"] == "tma",
    )


def _shared_bytes(config: Config, spec: AttentionSpec, target: Target) -> Shared:
    """Bounds that hold over recorded compiles (tests/data/compiled_gradients.jsonl).

    Of what is walked as many blocks as there are stages, but for one that may come late; at most with the
    tile's own tensors, where tensor cores read these from there, and weights and gradients of scores, which
    change layout there: once each, twice where the products' sums lie in the tensor cores' memory (sm_100).
    """
    stages, tile, block = (config.number(n) for n in ("num_stages", "block_m", "block_n"))
    dims = sum(spec.qk_chunks) + sum(spec.v_chunks)
    held, walked = (count * dims * spec.itemsize for count in (tile, block))
    layouts = (4 if 100 <= target.arch < 120 else 2) * tile * block * spec.itemsize
    layouts += tile * block * spec.itemsize if is_fused(config) else 0  # gradients of scores, turned for dq
    layouts += tile * max(*spec.qk_chunks, *spec.v_chunks) * spec.itemsize  # a gradient on its way out
    layouts += 4 * tile * block if spec.learned else 0  # a block that is turned to be summed along diagonals
    return Shared((stages - 1) * walked, held + stages * walked + layouts + KIB)


def _limits(config: Config, spec: AttentionSpec, target: Target) -> str:
    """What a thread holds all along: both sums of a tile of keys, and a block's weights and their gradients.

    Before Hopper, and on consumer GPUs since, also the tile's own tensors, as left operands of products: 16
    positions of a warp, and again for warps that share them.
    """
    if spec.packed and spec.learned:
        return "sums what a score rule learns in dense calls alone, and these sequences are packed"
    if spec.learned and is_fused(config):
        return "has no tiles of rows, which sum what a score rule learns; take form=split"
    tile, block, warps = (config.number(n) for n in ("block_m", "block_n", "num_warps"))
    if 100 <= target.arch < 120 or spec.dtype == "fp32":
        return ""  # sums are not in registers there; nothing is known of how FMA units are fed
    dims = sum(spec.qk_chunks) + sum(spec.v_chunks)
    of_a_block = 2 * tile * block
    if is_fused(config):  # weights are spent when the block's part of dq is computed
        of_a_block = max(of_a_block, block * max(spec.qk_chunks))
    needed = (tile * dims + of_a_block) / (32 * warps)
    if target.arch != 90:
        needed += tile * dims * spec.itemsize / 4 / (32 * min(warps, tile // 16))
    if needed <= MOST_REGISTERS:
        return ""
    return f"holds {needed:.0f} registers a thread all along, of which there are {MOST_REGISTERS}"


MOST_REGISTERS = 255
"""Of a thread."""

# (largest head dim, block_m, block_n, num_warps, num_stages), best first: 64 x 64 tiles of 4 warps were the
# fastest on one H200 at head_dim 64 and 128; what spills in its loops with these has more warps.
_DEFAULT_TILES = (
    (128, 64, 64, 4, 2),
    (128, 64, 64, 8, 2),
    (256, 64, 32, 8, 2),
    (256, 32, 32, 8, 1),
)
_DEFAULT_TILES_FP32 = ((256, 32, 32, 8, 1), (256, 16, 16, 4, 1))


def _defaults(spec: AttentionSpec) -> tuple[tuple[Value, ...], ...]:
    fp32 = spec.dtype_label == "fp32"
    head_dim = max(spec.head_dim, spec.head_dim_v)
    # A score rule, the numbers of a window and random ones take registers too, and so do several chunks, and
    # where a sequence begins and ends. What a rule learns spills in the loops of 4 warps even at head_dim 64:
    # of a relative table 13 registers, and with 8 warps none.
    simple = spec.score_mod is None and not spec.mask.params and len(spec.qk_chunks) == 1
    simple &= not spec.packed and not spec.dropout
    return tuple(
        (*tile, loads, "heads")
        for limit, *tile in (_DEFAULT_TILES_FP32 if fp32 else _DEFAULT_TILES)
        for loads in (("pointer",) if fp32 else ("tma", "pointer"))
        if head_dim <= limit and (fp32 or simple or tile[2] > 4 or (head_dim <= 64 and not spec.learned))
    )


def _inputs(config: Config, spec: AttentionSpec, of_rows: int, of_keys: int) -> list[tuple[Arg, ...]]:
    """What both kernels of gradients read: q, k, v, the output's gradient, and what is prepared of rows.

    Args:
        of_rows, of_keys: how many of them a copy holds.
    """
    copied = {"Q": of_rows, "K": of_keys, "V": of_keys, "DOUT": of_rows}
    if config["loads"] == "tma":
        tensors = [described(spec, each, spec.dtype, f"1,{count}") for each, count in copied.items()]
    else:
        tensors = [tensor_arguments(each, spec.dtype, spec.packed) for each in copied]
    return [*tensors, _ROW_BUFFERS]


def _rest(config: Config, spec: AttentionSpec, axis: str) -> list[tuple[Arg, ...]]:
    """Where packed sequences begin, sizes, scale, what dropout takes, lists of what is walked along an axis,
    what rules take, and where what they learn is summed."""
    from flashgen.codegen import lists  # see `family.listed`
    from flashgen.codegen.expressions import SUMMED_BY, learned_arguments, rule_arguments

    sizes = [Arg(name, name, "i32") for name in ("heads", "heads_per_kv")]
    if spec.packed:
        sizes = [Arg("sequences", "sequences", "i32"), *sizes, Arg("q_tokens", "q_len", "i32")]
        sizes += [Arg("k_tokens", "k_len", "i32")] if axis == "q" and config["order"] == "heads" else []
    else:
        sizes += [Arg(name, name, "i32") for name in ("q_len", "k_len")]
    rules = [rule for rule in (spec.mask, spec.score_mod) if rule is not None]
    return [
        *([(Arg("CU_Q", "cu_q", "*i32"), Arg("CU_K", "cu_k", "*i32"))] if spec.packed else []),
        (*sizes, Arg("scale", "scale", "fp32")),
        *dropout_arguments(spec),
        *([listed] if (listed := lists.arguments(spec, axis)) else []),
        *(group for rule in rules for group in rule_arguments(rule)),
        *learned_arguments(spec, SUMMED_BY[axis]),
    ]


def _of_keys(config: Config, spec: AttentionSpec) -> tuple[tuple[Arg, ...], ...]:
    """Arguments of the kernel of the gradients of k and v, and where it is fused that of q."""
    tile, block = config.number("block_m"), config.number("block_n")
    return (
        *_inputs(config, spec, block, tile),
        *([(_DQ_SUMS,)] if is_fused(config) else []),
        *(tensor_arguments(each, spec.dtype, spec.packed) for each in ("DK", "DV")),
        *_rest(config, spec, "q"),
    )


def _signature(config: Config, spec: AttentionSpec) -> tuple[tuple[Arg, ...], ...]:
    """Of the kernel of q's gradient, or of all."""
    if is_fused(config):
        return _of_keys(config, spec)
    tile, block = config.number("block_m"), config.number("block_n")
    dq = tensor_arguments("DQ", spec.dtype, spec.packed)
    return (*_inputs(config, spec, tile, block), dq, *_rest(config, spec, "k"))


def sizes_of_rows(spec: AttentionSpec, in_blocks: bool) -> tuple[tuple[Arg, ...], ...]:
    """What says of a part which rows its programs have: packed sequences are one of all tokens, or each has
    blocks of its own."""
    heads, rows = Arg("heads", "heads", "i32"), "q_len"
    if not (spec.packed and in_blocks):
        return ((heads, Arg(rows, rows, "i32")),)
    sequences = Arg("sequences", "sequences", "i32")
    return ((Arg("CU_Q", "cu_q", "*i32"),), (sequences, heads, Arg("q_tokens", rows, "i32")))


def grid_of_rows(spec: AttentionSpec, rows: int, in_blocks: bool) -> Grid:
    """A program for so many of them."""
    return Grid("packed_row_tiles" if spec.packed and in_blocks else "row_tiles", rows)


def prepare_part(spec: AttentionSpec, buffers: tuple[Arg, ...], rows: int, in_blocks: bool = False) -> Part:
    """What is prepared of the rows, so many at once, into these buffers.

    Args:
        in_blocks: whether each packed sequence has blocks of its own there.
    """
    lse = (Arg("LSE", "lse", "*fp32"), *((Arg("DLSE", "dlse", "*fp32"),) if spec.return_lse else ()))
    arguments = (
        tensor_arguments("OUT", spec.dtype, spec.packed and in_blocks),
        tensor_arguments("DOUT", spec.dtype, spec.packed and in_blocks),
        lse,
        buffers,
        *sizes_of_rows(spec, in_blocks),
    )
    return Part("prepare_rows", True, arguments, grid_of_rows(spec, rows, in_blocks))


def sink_parts(spec: AttentionSpec, buffers: tuple[Arg, ...], in_blocks: bool = False) -> tuple[Part, ...]:
    """The kernel of the sinks' gradient, from what is prepared of the rows in these buffers; or none.

    Args:
        in_blocks: as for `prepare_part`.
    """
    if not spec.sinks:
        return ()
    *_, sizes = sizes_of_rows(spec, in_blocks)
    arguments = (
        buffers,
        *sink_arguments(spec.sinks),
        (Arg("DSINKS", "dsinks", "*fp32"),),
        (Arg("batches", "batch", "i32"), *sizes),
    )
    return (Part("gradients_of_sinks", True, arguments, Grid("heads", 1), num_warps=8),)


def leave_part(spec: AttentionSpec, sums: tuple[Arg, ...], rows: int, in_blocks: bool = False) -> Part:
    """What makes q's gradient of these sums, of so many rows at once.

    Args:
        in_blocks: as for `prepare_part`.
    """
    *places, sizes = sizes_of_rows(spec, in_blocks)
    arguments = (
        sums,
        tensor_arguments("DQ", spec.dtype, spec.packed and in_blocks),
        *places,
        (*sizes, Arg("scale", "scale", "fp32")),
    )
    return Part("leave_dq", False, arguments, grid_of_rows(spec, rows, in_blocks))


def _parts(config: Config, spec: AttentionSpec) -> tuple[Part, ...]:
    """What is prepared of the rows, then the gradients of k and v, and of sinks; the main kernel computes
    that of q. Fused, it computes all but those of sinks, and q's leaves its sums last."""
    from flashgen.codegen import lists

    walked, fused = _walked(config), is_fused(config)
    before = (
        prepare_part(spec, (*_ROW_BUFFERS, *([_DQ_SUMS] if fused else [])), ROWS_AT_ONCE),
        *sink_parts(spec, _ROW_BUFFERS),
    )
    if fused:
        return (*before, *lists.parts(spec, walked, "q"), leave_part(spec, (_DQ_SUMS,), ROWS_AT_ONCE))
    return (
        *before,
        *lists.parts(spec, walked, "k"),
        *lists.parts(spec, walked, "q"),
        Part(
            "gradients_of_keys",
            True,
            _of_keys(config, spec),
            Grid("packed_key_tiles" if spec.packed else "key_tiles", walked.block_m),
            walked.num_warps,
            walked.num_stages,
        ),
    )


def _scratch(config: Config, spec: AttentionSpec) -> tuple[Scratch, ...]:
    """What is prepared of rows, (batch, head, row, 1) in float32, the sums of dq, (batch, head, row, dims of
    all chunks), and the lists of a mask that needs them."""
    from flashgen.codegen import lists

    of_rows = (Extent("batch"), Extent("heads"), Extent("q_len"))
    sums = Scratch("dq_sums", "fp32", (*of_rows, Extent(times=sum(spec.qk_chunks))))
    walked, fused = _walked(config), is_fused(config)
    return (
        *(Scratch(name, "fp32", (*of_rows, Extent())) for name in _OF_ROWS),
        *((sums,) if fused else lists.scratch(spec, walked, "k")),
        *lists.scratch(spec, walked, "q"),
    )


def gradient_values(spec: AttentionSpec, both_ends: bool = False) -> dict[str, Any]:
    """What templates of gradients read beside what all do: rules along rows, chunks of gradients, and the
    rows of a step of a sink's program.

    Args:
        both_ends: whether the mask along rows drops keys that do not exist, too.
    """
    from flashgen.codegen import lists
    from flashgen.codegen.expressions import render_mask, render_score

    return {
        "mask_by_keys": render_mask(
            spec.mask, may_list=lists.used(spec, "q"), along="q", apart=True, both_ends=both_ends
        ),
        "score_by_keys": render_score(spec, along="q"),
        "out_read_chunks": [
            replace(each, name=f"out{each.suffix}") for each in chunks(spec, "OUT")
        ],  # not sums, as elsewhere
        "dout_chunks": chunks(spec, "DOUT"),
        "dq_chunks": chunks(spec, "DQ"),
        "dk_chunks": chunks(spec, "DK"),
        "dv_chunks": chunks(spec, "DV"),
        "rows_of_a_sink": ROWS_OF_A_SINK,
    }


def _derived(config: Config, spec: AttentionSpec) -> dict[str, Any]:
    return gradient_values(spec, both_ends=is_fused(config)) | {
        "fused": is_fused(config),
        "rows_at_once": ROWS_AT_ONCE,
    }


ATTENTION_BWD = Family(
    name="attention_bwd",
    op="bwd",
    template="attention_bwd.py.jinja",
    tunables=(
        ("block_m", (16, 32, 64, 128)),
        ("block_n", (16, 32, 64, 128)),
        ("num_warps", (4, 8)),
        ("num_stages", (1, 2, 3)),
        ("loads", ("tma", "pointer")),
        ("order", ("heads", "rows")),
    ),
    options=(("form", ("split", FUSED)),),
    archs=(80, 999),
    dtypes=("fp16", "bf16", "fp32"),
    tiling=_tiling,
    limits=_limits,
    shared_bytes=_shared_bytes,
    defaults=_defaults,
    derived=_derived,
    signature=_signature,
    parts=_parts,
    scratch=_scratch,
)
