"""attention_fwd_sm90 on a Hopper GPU: every kind of spec, call, size and config against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checked import CAUSAL, COMBINED, DEVICE, TABLE, Call, among_nan, check, skip_unless_served, workload

from flashgen.build.inputs import make_inputs
from flashgen.build.reference import attention_reference
from flashgen.codegen.families import find_family
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.masks import Mask

FAMILY = find_family("attention_fwd_sm90")


@pytest.fixture(autouse=True)
def hopper() -> None:
    skip_unless_served(FAMILY.name)


def right(work: Workload, config: str = "", layout: str = "bhsd", **tensors: torch.Tensor) -> None:
    check(work, config, layout, FAMILY.name, **tensors)


@pytest.mark.parametrize("lengths", [(1000, 1000), (77, 900), (900, 77), (1, 513)], ids=str)
@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, lengths: tuple[int, int]) -> None:
    config = "c2x1n64s2g4p1_late_lazy_tree_lane_dynamic"
    right(workload(mask=mask, sizes=(2, 8, 2, *lengths)), config)


DIMS = ((16, 16), (64, 64), (72, 40), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims_and_dtypes(dims: tuple[int, int], dtype: str) -> None:
    for schedule in ("dynamic", "plain"):
        config = f"c1x1n64s2g4p1_late_lazy_tree_lane_{schedule}"
        right(workload(*dims, dtype=dtype, sizes=(1, 4, 2, 300, 400)), config)


BASE = FAMILY.find("c2x1n64s2g4p1_late_lazy_tree_lane_dynamic")


def variations() -> list[Config]:
    """The base config with each tunable's other values, one at a time, and a few far from it."""
    elsewhere = {("pack", 8), ("pack", 16), ("programs", 2), ("programs", 3)}
    found = [
        FAMILY.config(**{**BASE.to_json(), name: value})
        for name, values in (*FAMILY.tunables, *FAMILY.options)
        for value in values
        if (name, value) not in elsewhere
    ]
    names = (
        "c1x3n64s2g16p4_early_always_chain_row_plain",
        "c3x1n64s4g16p1_early_lazy_chain_lane_plain",
        "c1x2n128s2g4p4_pinned_lazy_tree_row_dynamic",
        "c3x1n64s3g16p4_pinned_always_tree_lane_dynamic",
    )
    return [*dict.fromkeys(found), *map(FAMILY.find, names)]


WINDOW = masks.sliding_window(100, 30)
WALKS = [
    (config, mask)
    for config in variations()
    for mask in (CAUSAL, masks.full(), WINDOW)
    # With a window's two edges and 128 keys a consumer's registers do not suffice: refused when compiled.
    if (mask, config["block_n"]) != (WINDOW, 128)
]


@pytest.mark.parametrize(
    "config,mask", WALKS, ids=lambda each: getattr(each, "name", None) or each.describe()
)
def test_every_tunable(config: Config, mask: Mask) -> None:
    for lengths in ((517, 517), (130, 700)):
        right(workload(mask=mask, sizes=(2, 8, 2, *lengths)), config.name)


@pytest.mark.parametrize("heads,kv_heads,pack", [(16, 2, 8), (32, 2, 16), (8, 2, 4), (16, 1, 16), (6, 2, 1)])
def test_packed_groups(heads: int, kv_heads: int, pack: int) -> None:
    for schedule in ("dynamic", "plain"):
        for q_len in (1, 7, 300):
            config = f"c2x1n64s2g4p{pack}_late_lazy_tree_lane_{schedule}"
            right(workload(128, sizes=(2, heads, kv_heads, q_len, 400)), config)


def test_softcap_and_a_negative_scale() -> None:
    right(workload(128, score_mod=score_mods.softcap(5.0), sizes=(2, 8, 2, 257, 300)))
    work = workload(64, sizes=(2, 8, 2, 257, 300))
    work = replace(work, spec=replace(work.spec, positive_scale=False))
    inputs = replace(make_inputs(work, DEVICE), scale=-0.2)
    out, lse = torch.empty_like(inputs.q), torch.empty(2, 8, 257, device=DEVICE)
    Call(inputs, work.spec, out, lse, family=FAMILY.name)()
    exact, exact_lse = attention_reference(inputs.q, inputs.k, inputs.v, mask=CAUSAL, scale=-0.2)
    torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts(layout: str) -> None:
    right(workload(128), layout=layout)


def test_c12_slices_of_a_fused_projection() -> None:
    fused = torch.randn(2, 513, 3, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    right(workload(sizes=(2, 8, 8, 513, 513)), q=q, k=k, v=v)


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("schedule", ["dynamic", "plain"])
def test_memory_around_the_tensors_is_not_read_into_a_result(schedule: str, pack: int) -> None:
    """NaN before, between and behind all sequences and head dims changes nothing."""
    work = workload(72, sizes=(2, 8, 2, 130, 131), mask=masks.full())
    padded = among_nan(make_inputs(work, DEVICE))
    right(work, f"c2x1n64s2g4p{pack}_late_lazy_tree_lane_{schedule}", **padded)


@pytest.mark.parametrize(
    "sizes", [(65_538, 1, 1, 1, 1), (1, 65_538, 65_538, 3, 5), (70_000, 2, 1, 1, 33)], ids=str
)
def test_c11_more_heads_than_a_grid_axis_holds(sizes: tuple[int, int, int, int, int]) -> None:
    right(workload(16, sizes=sizes))


def test_a_maximum_that_keeps_rising() -> None:
    """Each block of keys holds larger scores than all before, in either order of the walk."""
    work = workload(64, mask=masks.full(), sizes=(1, 4, 4, 200, 1500))
    inputs = make_inputs(work, DEVICE)
    for first, last in ((0.1, 8.0), (8.0, 0.1)):
        ramp = torch.linspace(first, last, 1500, device=DEVICE)
        k = (inputs.q.mean(2, keepdim=True) * 20 * ramp[None, None, :, None]).to(torch.bfloat16)
        for rescale in ("lazy", "always"):
            right(work, f"c2x1n64s2g4p1_late_{rescale}_tree_lane_dynamic", k=k)


def test_c38_a_hundred_runs_give_the_same_bits() -> None:
    work = workload(128, sizes=(2, 8, 2, 777, 777))
    inputs = make_inputs(work, DEVICE)
    out = torch.empty_like(inputs.q)
    lse = torch.empty(out.shape[:3], device=DEVICE)
    call = Call(inputs, work.spec, out, lse, family=FAMILY.name)
    call()
    first = out.clone(), lse.clone()
    for _ in range(100):
        out.fill_(math.nan)
        call()
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


def test_graphs_of_one_stream_replayed_beside_each_other() -> None:
    """Each graph has a tile counter of its own: captured on one stream, replayed at once on two."""
    work = workload(64, sizes=(4, 16, 16, 1024, 1024))
    calls, expected, kept = [], [], []
    for seed in range(2):
        kept.append(inputs := make_inputs(work, DEVICE, seed=seed))
        out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3], device=DEVICE)
        kept.append(lse)
        call = Call(inputs, work.spec, out, lse, BASE.name, FAMILY.name)
        call()
        expected.append(out.clone())
        calls.append((call, out))
    graphs = []
    for call, _ in calls:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for _, out in calls:
            out.fill_(math.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, exact) for (_, out), exact in zip(calls, expected, strict=True))


def test_launches_on_several_streams_at_once() -> None:
    work = workload(64, sizes=(4, 16, 16, 1024, 1024))
    inputs = make_inputs(work, DEVICE)
    outs = [torch.empty_like(inputs.q) for _ in range(4)]
    lse = torch.empty(inputs.q.shape[:3], device=DEVICE)
    calls = [Call(inputs, work.spec, out, lse, BASE.name, FAMILY.name) for out in outs]
    streams = [torch.cuda.Stream() for _ in outs]
    calls[0]()
    torch.cuda.synchronize()
    exact = outs[0].clone()
    for _ in range(20):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                call()
    torch.cuda.synchronize()
    assert all(torch.equal(out, exact) for out in outs)


def test_the_machine_code_is_what_was_compiled() -> None:
    work = workload(128)
    inputs = make_inputs(work, DEVICE)
    out, lse = torch.empty_like(inputs.q), torch.empty(2, 8, 1000, device=DEVICE)
    kernel = Call(inputs, work.spec, out, lse, BASE.name, FAMILY.name).kernel
    assert kernel.registers == kernel.artifact.registers and kernel.local_bytes == 0
    assert kernel.artifact.num_warps == FAMILY.tiling(BASE).warps
