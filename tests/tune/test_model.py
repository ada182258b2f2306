"""The model that ranks configs without a GPU, against what an H200 measured."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import landscape
import pytest

from flashgen.build.artifact import Artifact
from flashgen.codegen.abi import DescriptorFacts
from flashgen.codegen.attention_bwd import ATTENTION_BWD
from flashgen.codegen.attention_bwd_sm90 import ATTENTION_BWD_SM90
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.family import Family
from flashgen.codegen.source import render
from flashgen.measure import roofline
from flashgen.measure.worker import Trial
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.masks import Mask, causal, full
from flashgen.spec.record import Status
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.store.transfer import read_records
from flashgen.tune.model import Footprint, ModelMeasurer, estimate_us, expected_us, occupancy
from flashgen.tune.plan import Plan
from flashgen.tune.suites import suite_workloads
from flashgen.tune.tuner import tune

H200 = landscape.TARGET
# (config, microseconds, registers, spilled bytes, shared bytes): head_dim 128, bf16, one H200, cold L2.
FULL_16K = [
    ("m64n128w4s1_tma_heads", 7710, 166, 0, 50176),
    ("m128n64w4s2_tma_heads", 8052, 255, 96, 98336),
    ("m64n64w4s1_tma_heads", 8162, 127, 0, 32776),
    ("m64n64w4s3_tma_heads", 8898, 146, 0, 115712),
    ("m128n64w4s4_tma_heads", 9508, 255, 120, 164864),
    ("m128n32w8s3_tma_heads", 10038, 114, 0, 81976),
    ("m16n128w4s1_tma_rows", 30519, 123, 0, 36864),
    ("m16n32w4s3_pointer_heads", 39111, 87, 0, 37888),
    ("m32n32w4s1_pointer_rows", 39269, 124, 0, 18432),
    ("m32n64w8s2_tma_heads", 42250, 158, 0, 36888),
    ("m32n32w8s3_pointer_rows", 52481, 99, 0, 43008),
]
CAUSAL_512 = [
    ("m64n64w4s1_tma_heads", 215, 127, 0, 32776),
    ("m64n32w4s2_tma_heads", 229, 115, 0, 49184),
    ("m64n64w4s3_tma_heads", 241, 141, 0, 115712),
    ("m128n64w4s2_tma_heads", 247, 255, 128, 98336),
    ("m64n128w4s1_tma_heads", 262, 183, 0, 50176),
    ("m16n32w4s3_pointer_heads", 826, 87, 0, 37888),
    ("m32n128w4s4_pointer_heads", 1000, 184, 0, 212992),
    ("m32n32w8s3_pointer_rows", 1030, 128, 0, 43008),
    ("m16n64w8s1_tma_heads", 1305, 100, 0, 18432),
]


def sized(mask: Mask, seq: int) -> Workload:
    return landscape.workload(seq, mask)


def artifact(of: Workload, name: str, registers: int, spilled: int, shared: int) -> Artifact:
    source = render(of.spec, landscape.FAMILY.find(name), landscape.TOOLCHAIN)
    abi = source.abi(CallFacts())
    described = DescriptorFacts(swizzle=3, elem_size=2, elem_type=9, block=(1, 1, 64, 64))
    return Artifact(
        name=source.name,
        cubin=b"not run",
        abi=abi,
        shared_bytes=shared,
        num_warps=abi.num_warps,
        registers=registers,
        spill_bytes=spilled,
        descriptors=(described,) * sum(arg.is_descriptor for arg in abi.args),
        triton="3.6.0",
        arch=90,
    )


def footprint(of: Workload, name: str, registers: int, spilled: int, shared: int) -> Footprint:
    return Footprint.of(artifact(of, name, registers, spilled, shared))


@pytest.mark.parametrize(
    ("mask", "seq", "measured"),
    [(full(), 16384, FULL_16K), (causal(), 512, CAUSAL_512)],
    ids=["full 16k", "causal 512"],
)
def test_it_ranks_measured_kernels_mostly_right(
    mask: Mask, seq: int, measured: list[tuple[str, int, int, int, int]]
) -> None:
    of = sized(mask, seq)
    pairs = []
    for name, time_us, *facts in measured:
        config = landscape.FAMILY.find(name)
        pairs.append((time_us, estimate_us(of, config, footprint(of, name, *facts), H200)))
    right = [a[1] < b[1] for a, b in itertools.combinations(sorted(pairs), 2)]
    assert sum(right) / len(right) > 0.75
    chosen = min(pairs, key=lambda pair: pair[1])[0]
    assert chosen < 1.25 * min(pairs)[0], "its first choice is a good one"


def test_what_a_kernel_will_take_is_known_well_enough_before_it_is_compiled() -> None:
    """Of tiles that the asynchronous products take whole; and every one that spills much is seen to."""
    files = sorted((Path(__file__).parents[1] / "data" / "exhaustive").glob("*.jsonl"))
    off, spilled = [], 0
    for record in read_records(files):
        found, measured = Footprint.expected(record.config, record.workload.spec, H200), record.measurement
        assert measured.registers is not None and measured.spill_bytes is not None
        if found.num_warps * 16 <= record.config.number("block_m"):
            off.append(abs(found.registers - measured.registers))
        if measured.spill_bytes > 64:
            spilled += 1
            assert found.spill_bytes > 0 and found.registers == 255, record.config.name
    assert len(off) == 552 and sum(off) / len(off) < 16 and spilled == 63


def test_occupancy_is_the_tightest_of_four_limits() -> None:
    of = sized(full(), 4096)

    def held(name: str, registers: int, shared: int) -> int:
        return occupancy(footprint(of, name, registers, 0, shared), H200)

    assert held("m64n64w4s1_tma_heads", 64, 100_000) == 2  # shared memory: 228 KB a multiprocessor
    assert held("m64n64w4s1_tma_heads", 168, 10_000) == 3  # registers: 64 K
    assert held("m64n64w4s1_tma_heads", 16, 0) == 16  # warps: 64
    assert held("m128n64w8s1_tma_heads", 255, 0) == 1
    assert held("m64n64w4s1_tma_heads", 64, 240_000) == 0


def test_an_estimate_is_never_below_the_roofline() -> None:
    for mask, seq in itertools.product((full(), causal()), (512, 4096)):
        of = sized(mask, seq)
        for name, _, *facts in FULL_16K:
            config = landscape.FAMILY.find(name)
            assert estimate_us(of, config, footprint(of, name, *facts), H200) > roofline.floor_us(of, H200)


def test_spills_and_a_smaller_gpu_cost_time() -> None:
    of, config = sized(full(), 4096), landscape.FAMILY.find("m64n64w4s1_tma_heads")
    few, many = (footprint(of, config.name, 168, spilled, 32776) for spilled in (0, 512))
    assert estimate_us(of, config, many, H200) > 1.2 * estimate_us(of, config, few, H200)
    half = replace(H200, sm_count=66)
    assert estimate_us(of, config, few, half) == pytest.approx(
        2 * estimate_us(of, config, few, H200), rel=0.1
    )


SPLITTING = [family for family in FAMILIES.values() if "splits" in dict(family.options)]


@pytest.mark.parametrize("family", SPLITTING, ids=lambda family: family.name)
def test_few_rows_are_expected_to_gain_by_splits_until_the_gpu_is_full(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family.name, family)
    few = replace(sized(full(), 4096), batch=1, heads=8, kv_heads=8, q_len=16, k_len=32768)
    default = family.default(few.spec, H200, CallFacts(), 1)

    def expected(of: Workload, splits: int) -> float:
        return expected_us(of, family.config(**default.to_json(), splits=splits), H200)

    times = [expected(few, splits) for splits in (1, 2, 4, 8, 16)]
    assert all(later < 0.8 * earlier for earlier, later in itertools.pairwise(times[:4]))
    assert times[4] < times[3] < times[0] / 4 and expected(few, 64) > times[4] / 2
    assert times[4] > roofline.floor_us(few, H200)
    many, short = replace(few, q_len=16384), replace(few, k_len=256)
    assert expected(many, 2) > expected(many, 1) and expected(short, 2) > expected(short, 1)


def test_one_kernel_of_gradients_is_expected_to_spare_products_and_pays_for_its_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many pairs, whichever side a tile is of; five products of seven; float32 sums cleared, and read."""
    spec = sized(full(), 4096).spec.backward()
    of = replace(sized(full(), 4096), spec=replace(spec, head_dim=64, head_dim_v=64))
    found = Footprint(num_warps=4, registers=168, spill_bytes=0, shared_bytes=66560)
    family = ATTENTION_BWD
    monkeypatch.setitem(FAMILIES, family.name, family)

    def estimated(name: str, work: Workload) -> float:
        return estimate_us(work, family.find(name), found, H200)

    def ratio(work: Workload) -> float:
        split, fused = (estimated(f"m64n64w4s2_tma_heads{form}", work) for form in ("", "_fused"))
        return fused / split

    assert 5 / 7 < ratio(of) < 0.9 < ratio(replace(of, k_len=128))
    grouped = replace(of, kv_heads=of.heads // 4)
    assert estimated("m64n64w4s2_tma_heads_fused", grouped) == pytest.approx(
        estimated("m64n64w4s2_tma_heads_fused", of), rel=0.05
    )
    packed = replace(of, spec=replace(of.spec, addressing="varlen"), total_q=of.batch * of.q_len)
    packed = replace(packed, total_k=of.batch * of.k_len)
    assert estimated("m64n64w4s2_tma_heads_fused", packed) == pytest.approx(
        estimated("m64n64w4s2_tma_heads_fused", of), rel=0.1
    )
    names = [family.find(f"m64n64w4s2_tma_heads{form}") for form in ("", "_fused")]
    split, fused = (Footprint.expected(config, of.spec, H200) for config in names)
    assert fused.registers > split.registers, "a block's part of dq is held beside dk and dv"


def test_a_kernel_that_cannot_run_is_refused_with_the_reason() -> None:
    of, config = sized(full(), 4096), landscape.FAMILY.find("m64n64w4s1_tma_heads")
    small = find_target("nvidia-l40s")
    found = ModelMeasurer(small).measure(Trial(of, config, artifact(of, config.name, 128, 0, 120_000)))
    assert (found.status, found.source, found.median_us) == (Status.TOO_LARGE, "model", None)
    assert "120000 B of shared memory do not fit on a multiprocessor of nvidia-l40s" in found.reason
    good = ModelMeasurer(H200).measure(Trial(of, config, artifact(of, config.name, 128, 8, 32776)))
    assert (good.status, good.source, good.registers, good.spill_bytes) == (Status.OK, "model", 128, 8)
    assert good.median_us is not None and math.isfinite(good.median_us)


@pytest.mark.compile
def test_offline_tuning_compiles_ranks_and_stores_as_a_model(tmp_path: Path) -> None:
    from flashgen.build.compile import toolchain
    from flashgen.measure.compile_pool import CompilePool
    from flashgen.store.today import current_hash

    with (
        TuningDB(tmp_path / "tuning.db", current_hash=current_hash) as store,
        CompilePool(H200, toolchain(), 2, cache=tmp_path / "cache") as pool,
    ):
        (summary,) = tune(
            suite_workloads("ci")[:1],
            store=store,
            target=H200,
            measurers={"the model": ModelMeasurer(H200)},
            compiler=pool,
            versions=replace(landscape.VERSIONS, triton=toolchain().triton),
            plan=Plan(trials=5),
        ).summaries
        stored = list(store.records())
    assert summary.trials == len(stored) == 5, "no final: a model has no noise"
    assert summary.winner is not None
    assert summary.winner.median_us == min(record.median_us for record in stored)
    assert {record.measurement.source for record in stored} == {"model"}
    assert all(record.measurement.registers for record in stored)


@pytest.mark.parametrize(
    ("head_dim", "mask", "teraflops"),
    [(64, full(), 478), (64, causal(), 425), (128, full(), 552), (128, causal(), 494)],
    ids=str,
)
def test_gradients_by_tiles_of_keys_are_expected_as_a_prototype_was_measured(
    head_dim: int, mask: Mask, teraflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 sequences of 4,096 tokens, model width 2,048."""
    family, heads = ATTENTION_BWD_SM90, 2048 // head_dim
    monkeypatch.setitem(FAMILIES, family.name, family)
    spec = replace(landscape.workload(4096, mask).spec, head_dim=head_dim, head_dim_v=head_dim).backward()
    work = Workload(spec, 4, heads, heads, 4096, 4096)
    flops = 10.0 * 4 * heads * 4096**2 * head_dim * roofline.visible(work).pairs
    found = flops / expected_us(work, family.default(spec, H200, CallFacts()), H200) / 1e6
    assert found == pytest.approx(teraflops, rel=0.1)
