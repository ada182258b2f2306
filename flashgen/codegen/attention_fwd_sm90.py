"""The Hopper forward family: warp-specialised Gluon for sm_90a."""

from __future__ import annotations

from functools import cache
from typing import Any

from flashgen.codegen import splits
from flashgen.codegen.abi import Arg, Extent, Grid, Part, Scratch
from flashgen.codegen.family import Family, Shared, Tiling, listed
from flashgen.spec import expr as ex
from flashgen.spec.attention import DTYPES, AttentionSpec
from flashgen.spec.config import Config, Value
from flashgen.spec.spans import side_of
from flashgen.spec.target import KIB, REGISTERS, Target

ROWS = 64
"""Of a consumer warpgroup: the rows of one wgmma."""
_WARPS = 4  # of a warpgroup; the producer is one warp, padded to as many

REGISTER_SPLIT = {
    (1, 1): (240, 24),
    (2, 1): (240, 24),
    (3, 1): (160, 32),
    (1, 2): (232, 24),
    (1, 3): (136, 24),
}
"""Of a thread of a consumer and of the producer, by the number of consumers and of programs that share a
multiprocessor: what setmaxnreg gives out of its 64 K."""
_ALLOWED = ", ".join(f"{programs} of {consumers}" for consumers, programs in REGISTER_SPLIT)
SHARED_BYTES = 227 * KIB
"""Of a block on every GPU of this compute capability."""
_BESIDE_SUMS = 30  # registers that ptxas wants for one product beside its sums, at most
_BARRIER_BYTES = KIB  # mbarriers, the tile counter's mailbox and alignment, at most


@cache  # each of 31,104 configs is asked five times for a workload: 0.2 s of enumeration, 0.75 without
def _tiling(config: Config) -> Tiling:
    consumers, pack, programs = (config.number(name) for name in ("consumers", "pack", "programs"))
    warps = _WARPS * (consumers + 1)
    return Tiling(
        block_m=consumers * ROWS // pack,
        block_n=config.number("block_n"),
        num_warps=_WARPS,
        num_stages=config.number("num_stages"),
        descriptors=True,
        pack=pack,
        persistent=config["schedule"] != "plain",
        warps=warps,
        programs=programs,
        max_registers=REGISTERS // (32 * warps * programs) // 8 * 8 if programs > 1 else 0,
        splits=config.number("splits"),
    )


def registers_needed(config: Config, spec: AttentionSpec) -> int:
    """Registers of a consumer's thread that hold tiles: output, scores, and the probabilities twice.

    With 8-bit inputs also its factors: three consumers of head_dim 128 and 128 keys do not compile with 160.
    """
    block_n = config.number("block_n")
    out = sum(spec.v_chunks) * ROWS // 128
    probabilities = block_n * ROWS * spec.itemsize // 512
    beside = (8 if spec.quantized else 0) + (8 if config["row_max"] == "optimistic" else 0)
    return out + block_n * ROWS // 128 + 2 * probabilities + beside


def _limits(config: Config, spec: AttentionSpec, target: Target) -> str:
    consumers, programs = config.number("consumers"), config.number("programs")
    if (consumers, programs) not in REGISTER_SPLIT:
        return (
            f"{programs} programs of {consumers} consumers would leave each thread too few registers; "
            f"allowed: {_ALLOWED}"
        )
    registers, _ = REGISTER_SPLIT[consumers, programs]
    if (needed := registers_needed(config, spec)) > registers:
        return (
            f"holds {needed} registers of tiles in each of a consumer's threads, which has {registers}; "
            "a smaller block_n takes fewer, and fewer consumers or programs leave it more"
        )
    launched, sums = (
        _tiling(config).max_registers,
        max(config.number("block_n"), *spec.v_chunks) * ROWS // 128,
    )
    if programs > 1 and sums + _BESIDE_SUMS > launched:
        return (
            f"a product's sums take {sums} registers and {_BESIDE_SUMS} beside them, of {launched} that "
            f"{programs} programs begin with; fewer programs begin with more"
        )
    together, most = (
        programs * (_shared_bytes(config, spec, target).most + KIB),
        target.shared_per_block + KIB,
    )
    if programs > 1 and together > most:
        return (
            f"{programs} programs need {together / KIB:.0f} KB of shared memory, a multiprocessor has "
            f"{most / KIB:.0f} KB; fewer programs or num_stages or a smaller block_n need less"
        )
    if config["row_max"] == "optimistic" and (config["rescale"], config["row_sum"]) != ("lazy", "lane"):
        return "row_max optimistic needs row_sum lane and rescale lazy: a lane moves its own maximum"
    if config["row_max"] == "optimistic" and spec.score_mod is not None and spec.score_mod.may_drop:
        return (
            "row_max optimistic needs rows that have seen a score, and this score rule may give -inf; "
            "take tree or chain"
        )
    rules = [rule.expr for rule in (spec.mask, spec.score_mod) if rule is not None]
    if config.number("pack") > 1 and any("head" in ex.free_symbols(expr) for expr in rules):
        return "packs several heads into a tile, and the mask or score rule asks for the head; take pack=1"
    return ""


def _has_out_buffer(config: Config, spec: AttentionSpec) -> bool:
    """Whether the output leaves through memory of its own, or through that of the queries.

    With its own the next tile's queries can be loaded meanwhile, if there is a next tile and there is room.
    A part of split keys leaves from the registers: 32 bytes of each row at a time, which is a whole sector.
    """
    if config.number("splits") > 1:
        return False
    if spec.qk_chunks[: len(spec.v_chunks)] != spec.v_chunks or spec.result_dtype != spec.dtype:
        return True
    room = SHARED_BYTES // config.number("programs") - 2 * KIB
    return config["schedule"] == "dynamic" and _bytes(config, spec, own=True) <= room


def _bytes(config: Config, spec: AttentionSpec, own: bool) -> int:
    """Of all tiles in shared memory."""
    qk, v = sum(spec.qk_chunks), sum(spec.v_chunks)
    rows = config.number("consumers") * ROWS
    ring = config.number("num_stages") * config.number("block_n") * (qk + v)
    return (rows * qk + ring) * spec.itemsize + (rows * v * DTYPES[spec.result_dtype] if own else 0)


def _shared_bytes(config: Config, spec: AttentionSpec, target: Target) -> Shared:
    """The compiler adds nothing to the rings, the queries and the output but barriers."""
    tiles = _bytes(config, spec, _has_out_buffer(config, spec))
    return Shared(tiles, tiles + _BARRIER_BYTES)


def _derived(config: Config, spec: AttentionSpec) -> dict[str, Any]:
    consumer, producer = REGISTER_SPLIT[config.number("consumers"), config.number("programs")]
    return {
        "registers": {"consumer": consumer, "producer": producer},
        "out_buffer": _has_out_buffer(config, spec),
        "key_tile": _KEYS,
        "product_k": 32 // spec.itemsize,  # elements that one wgmma multiplies along each sum: 32 bytes
        "rescale_pack": min(spec.v_chunks) * ROWS // 128,
    }


def _defaults(spec: AttentionSpec) -> tuple[tuple[Value, ...], ...]:
    head_dim = max(sum(spec.qk_chunks), sum(spec.v_chunks))
    lists = listed(spec.mask)
    reads = (lists or _asks_of_each_key(spec)) and not _repeats(spec)
    table = _DEFAULT_TILES_OF_READS if reads else _DEFAULT_TILES
    tile = next(tile for limit, *tile in table if head_dim <= limit)
    # With the LSE, or a list, a thread of a large head dim has no register left for the next tile's place;
    # nor has one of any head dim that holds the addresses of what is read of pairs.
    short = head_dim > 192 and (spec.return_lse or lists)
    pairs = reads_pairs(spec)
    schedule = "plain" if short or pairs else "dynamic"
    # Pinned, ptxas keeps few scores in flight between a rule's functions and the weights: head_dim 128 with a
    # softcap and a bias spills 18 times in its loop otherwise.
    rest = (4, 1, "pinned" if pairs else "late", "lazy", "tree", "lane")
    return ((*tile, *rest, schedule), (1, 1, 64, 2, *rest, "plain"))


def _repeats(spec: AttentionSpec) -> bool:
    """Whether the mask is made of bits in blocks of 128 keys, with registers that no score rule takes."""
    from flashgen.codegen import conjuncts  # see `family.listed`

    period = conjuncts.period(conjuncts.joined(spec.mask.expr, spec.mask.types)[1:])
    return spec.score_mod is None and period > 0 and 128 % period == 0


def _asks_of_each_key(spec: AttentionSpec) -> bool:
    """Whether a score rule reads of each key, or bends scores and asks for positions beside, which then live
    across a branch, or the mask divides each key's position.
    """
    operations = (node for node in ex.walk(spec.mask.expr) if isinstance(node, ex.Apply))
    divided = (node for node in operations if node.op in ("//", "%"))
    read = ex.loads(spec.score_mod.expr) if spec.score_mod else ()
    asked: tuple[ex.Expr, ...] = (*divided, *read)
    rule = ex.ZERO if spec.score_mod is None else spec.score_mod.expr
    if any(isinstance(node, ex.Apply) and node.op == "tanh" for node in ex.walk(rule)):
        asked += (rule,)
    return any("k_idx" in ex.free_symbols(each) for each in asked)


def reads_pairs(spec: AttentionSpec) -> bool:
    """Whether a score rule reads of each pair of query and key."""
    read = ex.loads(spec.score_mod.expr) if spec.score_mod else ()
    return any(not side_of(load) and "k_idx" in ex.free_symbols(load) for load in read)


# (largest head dim, consumers, programs, block_n, num_stages), as measured on one H200.
_DEFAULT_TILES = ((64, 1, 2, 128, 2), (128, 2, 1, 128, 2), (256, 2, 1, 64, 2))
# What a rule reads of 128 keys leaves a consumer too few registers; not measured yet.
_DEFAULT_TILES_OF_READS = ((64, 1, 2, 64, 4), (128, 2, 1, 64, 4), (256, 2, 1, 64, 2))

TRANSPOSED = "values"
"""The buffer with V as products of 8-bit numbers need it: (batch, kv_heads, head_dim_v, keys)."""
_KEYS = 128  # of a program that transposes; keys are padded to a multiple of it, and of every block_n


def _scratch(config: Config, spec: AttentionSpec) -> tuple[Scratch, ...]:
    from flashgen.codegen import lists  # see `family.listed`

    shared = (*lists.scratch(spec, _tiling(config)), *splits.scratch(config, spec))
    if not spec.quantized:
        return shared
    extents = (Extent("batch"), Extent("kv_heads"), Extent("head_dim_v"), Extent("k_len", _KEYS, _KEYS))
    return (*shared, Scratch(TRANSPOSED, spec.dtype, extents))


def _parts(config: Config, spec: AttentionSpec) -> tuple[Part, ...]:
    from flashgen.codegen import lists

    listing, merging = lists.parts(spec, _tiling(config)), splits.parts(config, spec)
    if not spec.quantized:
        return (*listing, *merging)
    axes = {"b": "batch", "h": "head", "n": "row", "d": "dim"}
    strides = (Arg(f"stride_v{short}", f"v.stride.{axis}", "i32") for short, axis in axes.items())
    padded = Arg("padded_len", f"scratch.{TRANSPOSED}.extent.dim", "i32", divisor=16)
    return (
        *listing,
        Part(
            name="transpose_values",
            before=True,
            arguments=(
                (Arg("V", "v", f"*{spec.dtype}"), *strides),
                (Arg("VALUES", f"scratch.{TRANSPOSED}", f"*{spec.dtype}"), padded),
                (Arg("kv_heads", "kv_heads", "i32"), Arg("k_len", "k_len", "i32")),
            ),
            grid=Grid("key_tiles", _KEYS),
        ),
        *merging,
    )


ATTENTION_FWD_SM90 = Family(
    name="attention_fwd_sm90",
    op="fwd",
    template="attention_fwd_sm90.py.jinja",
    language="gluon",
    tunables=(
        ("consumers", (1, 2, 3)),
        ("programs", (1, 2, 3)),
        ("block_n", (64, 128)),
        ("num_stages", (2, 3, 4)),
        ("group", (4, 16)),
        ("pack", (1, 4, 8, 16)),
        ("order", ("late", "early", "pinned")),
        ("rescale", ("lazy", "always")),
        ("row_max", ("tree", "chain", "optimistic")),
        ("row_sum", ("lane", "row")),
        ("schedule", ("dynamic", "plain")),
    ),
    archs=(90, 90),
    dtypes=("fp16", "bf16", "e4m3"),
    dropout=False,
    tiling=_tiling,
    limits=_limits,
    shared_bytes=_shared_bytes,
    defaults=_defaults,
    derived=_derived,
    parts=_parts,
    scratch=_scratch,
    options=splits.OPTIONS,
    split_with=(
        ("group", (4,)),
        ("order", ("late",)),
        ("rescale", ("lazy",)),
        ("row_max", ("tree", "optimistic")),
        ("row_sum", ("lane",)),
    ),
)
