"""A model of a kernel's time: it orders the first candidates of a search, and ranks without a GPU.

It knows what the compiler reported (registers, spills, shared memory), or what it is expected to report, the
target's data sheet and the shape of the loop, and adds up tensor-core, exp2 and memory time per tile, times
waves of blocks over the multiprocessors. It knows nothing of instruction scheduling, bank conflicts or power
limits, so it ranks configs and is no prediction: its records say `source=model`, and any measured record
beats them. Its few coefficients come from kernels measured on one H200: 160 of the portable family, and 1,600
timings of the warp-specialised one, whose times it meets to 6 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.build.artifact import Artifact
from flashgen.build.inputs import density
from flashgen.codegen.attention_fwd_sm90 import ROWS
from flashgen.codegen.families import find_family
from flashgen.codegen.family import Tiling
from flashgen.measure import roofline
from flashgen.measure.worker import Trial
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Status
from flashgen.spec.target import KIB, REGISTERS, Target

RESERVED_SHARED = KIB
"""What every block takes of a multiprocessor's shared memory beside its own."""
LATENCY = 700.0
"""Clocks of one iteration that nothing hides when a single warp group runs alone: loads, barriers, and the
chain from scores over maximum and exp2 to the second product."""
SPILLS_THAT_DOUBLE = 768
"""Bytes of spilled registers of a thread at which a tile takes twice as long."""
POINTER_LOADS = 1.25
"""Addresses of pointer loads take registers and instructions that descriptors do not."""
OPS_PER_SCORE = 6.0
"""Float32 instructions for each score besides exp2: scale, maximum, subtract, sum, convert."""


MOST_REGISTERS = 255
"""Of a thread, as the machine code can name them."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a block of a kernel takes of a multiprocessor."""

    num_warps: int
    registers: int
    """Of each thread."""
    spill_bytes: int
    """Of each thread."""
    shared_bytes: int

    @classmethod
    def of(cls, artifact: Artifact) -> Footprint:
        """As the compiler reported it."""
        return cls(artifact.num_warps, artifact.registers, artifact.spill_bytes, artifact.shared_bytes)

    @classmethod
    def expected(cls, config: Config, spec: AttentionSpec, target: Target) -> Footprint:
        """Before it is compiled: registers for accumulator, scores and probabilities, and the shared memory
        that the family says it needs at most.

        A fit to recorded kernels (tests/data/exhaustive): where every four warps have 64 rows, the registers
        are off by 15 on average; smaller tiles, which never win a prefill, take 61 more than it says.
        """
        family = find_family(config.family)
        tiling = family.tiling(config)
        if (
            tiling.warps
        ):  # warp-specialised: the multiprocessor's registers are dealt out, and one block has all
            registers = tiling.max_registers or REGISTERS // (32 * tiling.warps) // 8 * 8
            return cls(tiling.warps, registers, 0, family.shared_bytes(config, spec, target).most)
        warps = tiling.num_warps
        tile, block = _walk(tiling)
        accumulators = tile * spec.head_dim_v / (32 * warps)
        scores = tile * block / (32 * warps)
        if spec.op == "bwd":  # of the kernel of dk and dv; and weights beside their gradients
            accumulators += tile * spec.head_dim / (32 * warps)
            scores *= 2
        if tiling.by_keys:  # and what a block adds to dq
            accumulators += block * spec.head_dim / (32 * warps)
        wanted = 12 + 1.33 * accumulators + 1.78 * scores
        shared = family.shared_bytes(config, spec, target).most
        return cls(
            num_warps=warps,
            registers=int(min(wanted, MOST_REGISTERS)),
            spill_bytes=int(4 * max(wanted - MOST_REGISTERS - 15, 0)),
            shared_bytes=min(shared, target.shared_per_block),
        )


def occupancy(footprint: Footprint, target: Target) -> int:
    """Blocks of this kernel that a multiprocessor holds at once; 0 if not even one."""
    warps = footprint.num_warps
    by_shared = (target.shared_per_block + RESERVED_SHARED) // (footprint.shared_bytes + RESERVED_SHARED)
    by_registers = REGISTERS // max(32 * warps * -(-footprint.registers // 8) * 8, 1)
    return min(by_shared, by_registers, roofline.unit(target).warps // warps, 32)


def expected_us(workload: Workload, config: Config, target: Target) -> float:
    """`estimate_us` of a config that is not compiled yet."""
    return estimate_us(workload, config, Footprint.expected(config, workload.spec, target), target)


def estimate_us(workload: Workload, config: Config, footprint: Footprint, target: Target) -> float:
    """Microseconds the kernel may take; infinite if not one block fits on a multiprocessor."""
    blocks_per_sm = occupancy(footprint, target)
    if not blocks_per_sm:
        return math.inf
    spec, unit = workload.spec, roofline.unit(target)
    tiling = find_family(config.family).tiling(config)
    if tiling.warps and tiling.by_keys:
        return _by_keys_us(workload, tiling, target)
    if tiling.warps:
        return _specialised_us(workload, config, tiling, target)
    tile, block = _walk(tiling)
    walked, heads = (workload.q_len, workload.heads_per_kv) if tiling.by_keys else (workload.k_len, 1)
    blocks = tiling.tiles(workload) * tiling.splits
    blocks_per_sm = min(blocks_per_sm, -(-blocks // target.sm_count))

    # Tiles at the mask's edge are computed whole: about one more for each row of tiles.
    visible = roofline.visible(workload).pairs
    edge = 0.5 * (tile + block) / block if visible < 1 else 0.0
    tiles = heads * min(visible * walked / block + edge, -(-walked // block))
    tiles = _of_a_part(tiles, tiling)

    clock = unit.ghz * 1e3  # clocks per microsecond
    per_clock = roofline.peak_flops(workload, target) / (target.sm_count * clock * 1e6)
    scores = tile * block
    work = _WORK["fused" if tiling.by_keys else spec.op]
    products: float = work.of_keys * spec.head_dim + work.of_values * spec.head_dim_v
    products /= _tensor_core_share(tile, footprint.num_warps, target)
    products += work.of_blocks * spec.head_dim / _tensor_core_share(block, footprint.num_warps, target)
    products *= 2.0 * scores / (0.8 * per_clock)
    # Each tile also rescales the accumulator: a small block_n pays for that more often.
    softmax = scores / unit.exp2 + (OPS_PER_SCORE * scores + tile * spec.head_dim_v) / 128
    softmax *= work.passes
    loads: float = work.passes * block * (spec.head_dim + spec.head_dim_v) * spec.itemsize
    loads += work.of_blocks * ATOMICS * 4 * block * spec.head_dim
    traffic = loads / (roofline.bytes_per_s(target) * 4 / (target.sm_count * clock * 1e6))  # mostly from L2
    # Blocks on one multiprocessor hide each other's latency, and one's softmax the other's products.
    overlap = min(1.0, 0.5 * (blocks_per_sm - 1) + 0.1 * (tiling.num_stages - 1))
    both = max(products, softmax, traffic)
    alone = products + softmax + LATENCY / tiling.num_stages
    tile_clocks = blocks_per_sm * both + (1 - overlap) * max(alone - both, 0.0)
    tile_clocks *= 1 + footprint.spill_bytes / SPILLS_THAT_DOUBLE
    if target.has_tma and not tiling.descriptors:
        tile_clocks *= POINTER_LOADS

    waves = math.ceil(blocks / (target.sm_count * blocks_per_sm))
    # Under a causal mask tiles differ in length and later ones fill the gaps, so waves are not whole.
    waves_used = waves if visible == 1 else max(blocks / (target.sm_count * blocks_per_sm), 1.0)
    compute = waves_used * (tiles * tile_clocks + 2 * LATENCY) / clock
    others = _merging_us(workload, tiling, target) + _adding_us(workload, tiling, target)
    return max(compute, _loading_us(workload, blocks, target)) + others + 2.0


def _walk(tiling: Tiling) -> tuple[int, int]:
    """Positions of a tile, and of a block that it walks."""
    tile, block = tiling.rows, tiling.block_n
    return (block, tile) if tiling.by_keys else (tile, block)


@dataclass(frozen=True, slots=True)
class _Work:
    """What is computed of a tile with a block."""

    of_keys: int
    """Products along, or to, the head dim of keys, with as many rows as the tile has positions."""
    of_values: int
    passes: int = 1
    """How often its weights are computed, and the block is read."""
    of_blocks: int = 0
    """Products with as many rows as the block has, whose sums leave by atomics."""


_WORK = {"fwd": _Work(1, 1), "bwd": _Work(4, 3, passes=2), "fused": _Work(2, 2, of_blocks=1)}
"""Gradients take two kernels, each with scores and gradients of weights and with sums of its own; their tiles
have one shape, and count as one here. Fused they take one."""
ATOMICS = 2.0
"""Times what a load moves: the L2 cache reads a sum and writes it. Expected, not measured."""

SPLIT_US = 3.0
"""Of the kernel that merges the parts of split keys, beside its traffic: a launch and two trips to memory."""
LOADERS = 0.5
"""Of the multiprocessors: so many draw the memory's whole bandwidth."""


def _of_a_part(blocks: float, tiling: Tiling) -> float:
    """Blocks of keys that the program with the most of a tile's visits."""
    return math.ceil(blocks / tiling.splits) if tiling.splits > 1 else blocks


def _loading_us(workload: Workload, programs: int, target: Target) -> float:
    """Reading the inputs once from memory, by as many multiprocessors as have work."""
    loading = min(programs / (LOADERS * target.sm_count), 1.0)
    return roofline.input_bytes(workload) / (roofline.bytes_per_s(target) * max(loading, 1e-3)) * 1e6


def _merging_us(workload: Workload, tiling: Tiling, target: Target) -> float:
    """Writing and reading the parts of split keys, and the launch between the two."""
    if tiling.splits == 1:
        return 0.0
    rows = workload.batch * workload.heads * workload.q_len * tiling.splits
    return SPLIT_US + 2 * 4.0 * rows * (workload.spec.head_dim_v + 1) / roofline.bytes_per_s(target) * 1e6


def _adding_us(workload: Workload, tiling: Tiling, target: Target) -> float:
    """Clearing the float32 sums of dq, and reading them."""
    if not tiling.by_keys:
        return 0.0
    rows = workload.total_q if workload.spec.packed else workload.batch * workload.q_len
    sums = rows * workload.heads * workload.spec.head_dim
    return 2 * 4.0 * sums / roofline.bytes_per_s(target) * 1e6


SPECIALISED_OPS = 7.6
"""Instructions for each score of a warp-specialised kernel besides exp2."""
HIDDEN = 0.55
"""Of the shorter of products and softmax: what a lone warpgroup overlaps with the longer."""
STEP_CLOCKS = 265.0
"""Of a block of keys, for barriers and the chain through the row maximum, shared by the warpgroups."""
TILE_CLOCKS = 3750.0
"""Of a tile: its first product and its last, and the way of the output."""
SHARED_TILE_CLOCKS = 0.81
"""The part of it that programs on one multiprocessor do not hide from each other."""
HANDICAPS = {"early": 1.01, "pinned": 1.03, "always": 1.03, "plain": 1.09, "optimistic": 0.93}
"""How much longer a kernel takes with a value of a tunable than with the best one, on average."""


def _specialised_us(workload: Workload, config: Config, tiling: Tiling, target: Target) -> float:
    """As `estimate_us`, where a producer loads and warpgroups of 64 rows run free of each other."""
    spec, unit = workload.spec, roofline.unit(target)
    block_n, clock = tiling.block_n, unit.ghz * 1e3
    groups = tiling.programs * tiling.rows // ROWS
    per_clock = roofline.peak_flops(workload, target) / (target.sm_count * clock * 1e6)
    scores = ROWS * block_n
    products = groups * 2.0 * scores * (spec.head_dim + spec.head_dim_v) / per_clock
    softmax = scores / unit.exp2 + (SPECIALISED_OPS * scores + 1.4 * ROWS * spec.head_dim_v) / 128
    softmax *= groups
    step = max(products, softmax) + ((1 - HIDDEN) * min(products, softmax) + STEP_CLOCKS) / groups

    visible = roofline.visible(workload).pairs
    edge = 0.5 * (tiling.block_m + block_n) / block_n if visible < 1 else 0.0
    blocks = max(min(visible * workload.k_len / block_n + edge, -(-workload.k_len // block_n)), 1.0)
    blocks = _of_a_part(blocks, tiling)
    overhead = TILE_CLOCKS * (1.0 if tiling.programs == 1 else SHARED_TILE_CLOCKS)
    tiles = tiling.tiles(workload) * tiling.splits
    waves = max(tiles / (target.sm_count * tiling.programs), 1.0)
    compute = waves * (blocks * step + overhead) / clock
    slower = math.prod(HANDICAPS.get(str(value), 1.0) for _, value in config.values)
    loading = _loading_us(workload, tiles, target)
    others = _before_us(workload, target) + _merging_us(workload, tiling, target)
    return slower * max(compute, loading) + others + 2.0


BLOCK_CLOCKS, DIM_CLOCKS = 700.0, 15.7
"""Of 64 rows and 128 keys whose gradients two warpgroups compute: so many, and so many more for each element
of both head dims, at the data sheet's clock. A prototype took 2,440 at head_dim 64 and 3,900 at 128, where
shared memory is the busiest, at the 1.75 GHz that the power limit left of 1.98."""
HALF_A_TILE = 0.7
"""Of that, a block takes with tiles of 64 keys: half of the products, but as much to read of rows and to add
to their sums. Expected from what the L2 cache and shared memory move, not measured."""


def _by_keys_us(workload: Workload, tiling: Tiling, target: Target) -> float:
    """As `estimate_us`, where tiles of keys walk blocks of rows, and add to sums that other kernels prepare
    and round: these read output and its gradient, write and read float32, and write dq."""
    spec, unit = workload.spec, roofline.unit(target)
    dims = spec.head_dim + spec.head_dim_v
    visible = roofline.visible(workload).pairs
    edge = 0.5 * (tiling.block_m + tiling.block_n) / tiling.block_m if visible < 1 else 0.0
    most = -(-workload.q_len // tiling.block_m)
    blocks = min(visible * workload.q_len / tiling.block_m + edge, most)
    blocks *= workload.heads / workload.kv_heads
    waves = max(tiling.tiles(workload) / target.sm_count, 1.0)
    clocks = BLOCK_CLOCKS + DIM_CLOCKS * dims * (1.0 if tiling.block_n == 128 else HALF_A_TILE)
    clocks = blocks * clocks + TILE_CLOCKS
    compute = waves * clocks / (unit.ghz * 1e3)
    of_a_row = (2 * 4 + spec.itemsize) * spec.head_dim + 2 * spec.itemsize * spec.head_dim_v
    rows = workload.heads * workload.q_tokens
    return compute + rows * of_a_row / roofline.bytes_per_s(target) * 1e6 + 3 * 2.0


def _before_us(workload: Workload, target: Target) -> float:
    """8-bit values are read, transposed and written before."""
    spec = workload.spec
    if not spec.quantized:
        return 0.0
    values = workload.batch * workload.kv_heads * workload.k_len * spec.head_dim_v * spec.itemsize
    return 2.0 + 2 * values / roofline.bytes_per_s(target) * 1e6


def expected_error(config: Config) -> float:
    """How far off the model usually is for configs like this one: of the logarithm of time.

    Nothing of split keys was measured when it was made, so a search of them trusts it less.
    """
    tiling = find_family(config.family).tiling(config)
    return 0.06 if tiling.warps and tiling.splits == 1 else 0.30


def _tensor_core_share(block_m: int, num_warps: int, target: Target) -> float:
    """Part of the tensor cores' rate that the rows of a tile can use."""
    if target.arch in (90, 100):
        # Four warps together issue products of 64 rows; smaller tiles fall back to the older instructions.
        return 1.0 if block_m * 4 >= 64 * num_warps else 0.2
    return min(1.0, block_m / (16 * num_warps))


class ModelMeasurer:
    """Answers trials by the model; see `Measurer`."""

    source = "model"

    def __init__(self, target: Target) -> None:
        self._target = target

    def prepare(self, workload: Workload, within_s: float = math.inf) -> str:
        """Nothing to prepare; the density of the inputs a GPU would be given."""
        return density(workload)

    def measure(self, trial: Trial) -> Measurement:
        """The estimate, or `TOO_LARGE` when the compiled kernel cannot run on the target."""
        artifact = trial.artifact
        assert artifact is not None, "the model needs what the compiler reported"
        time_us = estimate_us(trial.workload, trial.config, Footprint.of(artifact), self._target)
        fits = math.isfinite(time_us)
        return Measurement(
            Status.OK if fits else Status.TOO_LARGE,
            median_us=round(time_us, 3) if fits else None,
            registers=artifact.registers,
            spill_bytes=artifact.spill_bytes,
            shared_bytes=artifact.shared_bytes,
            source="model",
            reason="" if fits else _too_large(artifact, self._target),
        )

    def compare(self, trials: Sequence[Trial], passes: int) -> tuple[Measurement, ...]:
        """The same estimates again: a model has no noise to average."""
        return tuple(self.measure(trial) for trial in trials)

    def close(self) -> None:
        """Nothing to end."""


def _too_large(artifact: Artifact, target: Target) -> str:
    return (
        f"{artifact.registers} registers for each of {32 * artifact.num_warps} threads and "
        f"{artifact.shared_bytes} B of shared memory do not fit on a multiprocessor of {target.describe()}"
    )
