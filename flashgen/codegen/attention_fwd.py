"""The portable forward family: Triton, for sm_80 and newer and for the interpreter."""

from __future__ import annotations

from flashgen.codegen import splits
from flashgen.codegen.abi import Part, Scratch
from flashgen.codegen.family import Family, Shared, Tiling
from flashgen.spec.attention import AttentionSpec, head_dim_chunks
from flashgen.spec.config import Config, Value
from flashgen.spec.target import KIB, Target


def _tiling(config: Config) -> Tiling:
    return Tiling(
        block_m=config.number("block_m"),
        block_n=config.number("block_n"),
        num_warps=config.number("num_warps"),
        num_stages=config.number("num_stages"),
        descriptors=config["loads"] == "tma",
        splits=config.number("splits"),
    )


def _shared_bytes(config: Config, spec: AttentionSpec, target: Target) -> Shared:
    """Bounds that hold over 480 recorded compiles (tests/data/compiled_configs.jsonl).

    A loop of one stage holds a chunk of K or V at a time. A pipelined one holds `stages - 1` of K and V, and
    with Hopper's asynchronous products (16-bit or TF32, tiles of 64 rows), which read all operands from
    shared memory, `stages` of both and Q. What comes on top at most: Q, all stages, and P changing layout.
    """
    stages, block_m, block_n = (config.number(n) for n in ("num_stages", "block_m", "block_n"))
    qk, v = head_dim_chunks(spec.head_dim), head_dim_chunks(spec.head_dim_v)
    tile_q, tile_kv = block_m * sum(qk) * spec.itemsize, block_n * (sum(qk) + sum(v)) * spec.itemsize
    most = tile_q + stages * tile_kv + block_m * block_n * spec.itemsize + KIB
    if stages == 1:
        return Shared(block_n * max(*qk, *v) * spec.itemsize, most)
    if target.arch == 90 and block_m >= 64 and spec.dtype_label != "fp32":
        return Shared(tile_q + stages * tile_kv, most)
    return Shared((stages - 1) * tile_kv, most)


# (largest head dim, block_m, block_n, num_warps, num_stages), best first: 16-bit and TF32 as measured on one
# H200 (benchmarks/nvidia-h200), and where less shared memory is, smaller tiles. fp32 multiplies on plain
# FMA units, fully unrolled: larger tiles than these spill kilobytes and take a minute to compile.
_DEFAULT_TILES = (
    (64, 64, 128, 4, 2),
    (128, 128, 64, 4, 2),
    (256, 128, 64, 8, 2),
    (256, 64, 64, 4, 2),
    (256, 64, 32, 4, 2),
    (256, 32, 32, 4, 1),
    (256, 16, 32, 4, 1),
)
_DEFAULT_TILES_FP32 = ((128, 32, 64, 8, 2), (256, 16, 32, 8, 2), (256, 16, 32, 8, 1))


def _defaults(spec: AttentionSpec) -> tuple[tuple[Value, ...], ...]:
    fp32 = spec.dtype_label == "fp32"
    head_dim = max(spec.head_dim, spec.head_dim_v)
    return tuple(
        (*tile, loads, "heads")
        for limit, *tile in (_DEFAULT_TILES_FP32 if fp32 else _DEFAULT_TILES)
        for loads in (("pointer",) if fp32 else ("tma", "pointer"))
        # Random numbers take registers: at head_dim 128 the loop of 128 rows and 4 warps spills 114 times.
        if head_dim <= limit and not (spec.dropout and tile[0] == 128 and tile[2] == 4)
    )


def _parts(config: Config, spec: AttentionSpec) -> tuple[Part, ...]:
    from flashgen.codegen import lists  # see `family.listed`

    return (*lists.parts(spec, _tiling(config)), *splits.parts(config, spec))


def _scratch(config: Config, spec: AttentionSpec) -> tuple[Scratch, ...]:
    from flashgen.codegen import lists

    return (*lists.scratch(spec, _tiling(config)), *splits.scratch(config, spec))


ATTENTION_FWD = Family(
    name="attention_fwd",
    op="fwd",
    template="attention_fwd.py.jinja",
    tunables=(
        ("block_m", (16, 32, 64, 128)),
        ("block_n", (32, 64, 128)),
        ("num_warps", (4, 8)),
        ("num_stages", (1, 2, 3, 4)),
        ("loads", ("tma", "pointer")),
        ("order", ("heads", "rows")),
    ),
    archs=(80, 999),
    dtypes=("fp16", "bf16", "fp32"),
    tiling=_tiling,
    limits=lambda config, spec, target: "",
    shared_bytes=_shared_bytes,
    defaults=_defaults,
    options=splits.OPTIONS,
    split_with=(("order", ("heads",)),),
    parts=_parts,
    scratch=_scratch,
)
