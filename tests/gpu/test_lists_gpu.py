"""Kernels that walk lists of tiles, on a GPU: all kinds of documents, and lists that change between calls."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import test_attention_bwd_gpu as gradients
import torch
from checked import CAUSAL, DEVICE, Call, check, skip_unless_served, workload

from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.reference import attention_reference
from flashgen.measure.check import Rig
from flashgen.spec import masks
from flashgen.spec.attention import Workload
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule

CONFIGS = {
    "attention_fwd": ("m128n64w4s2_tma_heads", "m64n128w4s3_pointer_rows"),
    "attention_fwd_sm90": (
        "c2x1n64s4g4p1_late_lazy_tree_lane_dynamic",
        "c3x1n64s2g4p1_early_always_chain_row_plain",
        "c1x2n128s2g4p4_late_lazy_tree_lane_dynamic",
        "c2x1n64s2g4p4_pinned_lazy_tree_lane_plain",
    ),
}
ALL = [(family, config) for family, configs in CONFIGS.items() for config in configs]


def documents(kind: str, batch: int, length: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """(batch, length), each sequence with documents of its own."""
    draw = torch.Generator().manual_seed(length)
    if kind == "one":
        ids = torch.full((batch, length), -3)
    elif kind == "each key its own":
        ids = torch.stack([torch.randperm(length, generator=draw) for _ in range(batch)])
    else:
        ids = torch.randint(0, max(2, length // 150), (batch, length), generator=draw)
        ids = ids.sort(1).values if kind == "sorted" else ids
    return (ids * (2**33 if dtype is torch.int64 else 1)).to(DEVICE, dtype)


def judge(work: Workload, mask: Mask, family: str, config: str) -> None:
    inputs = make_inputs(replace(work, spec=replace(work.spec, mask=CAUSAL.rule), params=()), DEVICE)
    rig = Rig(replace(inputs, mask=mask), work.spec)
    verdict, same = rig.examine(
        lambda out, lse: Call(replace(inputs, mask=mask), work.spec, out, lse, config, family)()
    )
    assert verdict.ok, verdict.reason
    assert same, "two runs differ"


@pytest.mark.parametrize("lengths", [(1000, 1000), (77, 900), (900, 77), (1, 513), (9000, 9000)], ids=str)
@pytest.mark.parametrize("kind", ["sorted", "interleaved", "one", "each key its own"])
@pytest.mark.parametrize("config", ["", "m64n32w4s2_pointer_rows"])
def test_gradients(config: str, kind: str, lengths: tuple[int, int]) -> None:
    """Lists of keys for rows, and of rows for keys; of 9,000 a program classifies in two steps."""
    mask = CAUSAL & masks.document(documents(kind, 2, lengths[1]))
    work = workload(mask=CAUSAL, sizes=(2, 4, 2, *lengths))
    inputs = replace(make_inputs(work, DEVICE), mask=mask)
    gradients.judge(inputs, replace(work.spec, mask=mask.rule), config)


@pytest.mark.parametrize("lengths", [(1000, 1000), (77, 900), (900, 77), (1, 513), (4097, 4097)], ids=str)
@pytest.mark.parametrize("kind", ["sorted", "interleaved", "one", "each key its own"])
@pytest.mark.parametrize("family,config", ALL)
def test_documents(family: str, config: str, kind: str, lengths: tuple[int, int]) -> None:
    skip_unless_served(family)
    dtype = torch.int64 if kind == "sorted" and "n64" in config else torch.int32
    document = masks.document(documents(kind, 2, lengths[1], dtype))
    for mask in (document, CAUSAL & document) if "n128" not in config else (document,):
        judge(workload(64, mask=mask, sizes=(2, 8, 2, *lengths)), mask, family, config)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_default_serves_documents(family: str, dim: int) -> None:
    skip_unless_served(family)
    window = masks.sliding_window(200, 0) & masks.document()
    # At head_dim 256 a consumer has no registers left for a window's two edges: the portable family serves.
    left_out = family == "attention_fwd_sm90" and dim == 256
    for mask in (CAUSAL & masks.document(), *(() if left_out else (window,))):
        check(workload(dim, mask=mask, sizes=(2, 8, 2, 3000, 3000)), family=family)


BLOCKS = Rule.parse("mask", "blocks[head, q_idx // 128, k_idx // 128] where blocks: i1")
NEAR = Rule.parse("mask", "abs(q_idx // 50 - k_idx // 50) <= reach[head] where reach: i32")


@pytest.mark.parametrize("family", CONFIGS)
def test_lists_of_each_head(family: str) -> None:
    skip_unless_served(family)
    draw = torch.Generator().manual_seed(0)
    blocks = torch.rand(8, 8, 8, generator=draw) < 0.4
    reach = torch.randint(-1, 6, (8,), generator=draw, dtype=torch.int32)
    for rule, tensor in ((BLOCKS, blocks), (NEAR, reach)):
        mask = Mask(rule, (), (tensor.to(DEVICE),))
        judge(workload(64, mask=mask, sizes=(2, 8, 2, 1000, 1000)), mask, family, CONFIGS[family][0])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_shared_row_of_documents_and_a_strided_one(family: str) -> None:
    skip_unless_served(family)
    shared = documents("sorted", 1, 700).expand(3, -1)
    strided = documents("sorted", 3, 1400)[:, ::2]
    for ids in (shared, strided):
        mask = CAUSAL & masks.document(ids)
        judge(workload(128, mask=mask, sizes=(3, 8, 2, 700, 700)), mask, family, CONFIGS[family][0])


@pytest.mark.parametrize("family", CONFIGS)
def test_captured_calls_read_the_documents_of_each_replay(family: str) -> None:
    """The lists are made by the graph itself; two graphs on two streams do not share them."""
    skip_unless_served(family)
    work = workload(64, mask=masks.document(), sizes=(2, 8, 2, 2000, 2000))
    made, graphs = [], []
    for seed in range(2):
        inputs = make_inputs(work, DEVICE, seed=seed)
        out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3], device=DEVICE)
        call = Call(inputs, work.spec, out, lse, CONFIGS[family][0], family)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        made.append((inputs, out))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for kind in ("interleaved", "sorted", "each key its own", "sorted"):
        for inputs, out in made:
            inputs.mask.tensors[0].copy_(documents(kind, 2, 2000))
            out.fill_(math.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for inputs, out in made:
            torch.testing.assert_close(out.float(), expected(inputs), atol=2e-2, rtol=2e-2)


def expected(inputs: Inputs) -> torch.Tensor:
    return attention_reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask, scale=inputs.scale)[0]
