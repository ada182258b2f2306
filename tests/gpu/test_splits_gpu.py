"""Keys split among programs, on a GPU: both families against the reference, in graphs and by dispatch."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from checked import CAUSAL, COMBINED, DEVICE, TABLE, Call, among_nan, check, skip_unless_served, workload

import flashgen
from flashgen.build.inputs import make_inputs
from flashgen.build.reference import attention_reference
from flashgen.spec import masks, score_mods, tiles
from flashgen.spec.attention import Workload
from flashgen.spec.masks import Mask

pytestmark = pytest.mark.gpu
SM90, PORTABLE = "attention_fwd_sm90", "attention_fwd"
CONFIGS = {
    SM90: ("c1x1n64s4g4p4k16_late_lazy_tree_lane_plain", "c2x1n64s2g4p1k4_late_lazy_tree_lane_dynamic"),
    PORTABLE: ("m16n64w4s3k16_tma_heads", "m64n32w4s2k2_pointer_rows"),
}
"""Of each family one with many parts and one with few."""
BY_RANGES = [mask for mask in TABLE + COMBINED if tiles.lists(mask.rule) is None]
"""The keys of lists are not split."""
EACH = [(family, config) for family, configs in CONFIGS.items() for config in configs]


def right(work: Workload, family: str, config: str, layout: str = "bhsd", **tensors: torch.Tensor) -> None:
    skip_unless_served(family, work.spec)
    check(work, config, layout, family, **tensors)


@pytest.mark.parametrize(("family", "config"), EACH)
@pytest.mark.parametrize("mask", BY_RANGES, ids=lambda m: m.describe())
def test_masks(mask: Mask, family: str, config: str) -> None:
    """Many keys for each program, few, and fewer blocks than programs."""
    for lengths in ((16, 5000), (77, 900), (130, 70), (1, 1)):
        right(workload(mask=mask, sizes=(2, 8, 2, *lengths)), family, config)


@pytest.mark.parametrize(("family", "config"), EACH)
@pytest.mark.parametrize("dims", [(16, 16), (72, 40), (96, 96), (128, 128), (192, 128)], ids=str)
def test_head_dims(dims: tuple[int, int], family: str, config: str) -> None:
    for dtype in ("bf16", "fp16"):
        right(workload(*dims, dtype=dtype, sizes=(1, 8, 2, 33, 1500)), family, config)


@pytest.mark.parametrize("splits", [2, 3, 6, 8, 12, 64])
@pytest.mark.parametrize("schedule", ["plain", "dynamic"])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_every_number_of_parts(consumers: int, schedule: str, splits: int) -> None:
    name = f"c{consumers}x1n64s2g4p4k{splits}_late_lazy_tree_lane_{schedule}"
    for q_len, k_len in ((16, 8192), (130, 1000)):
        right(workload(128, sizes=(2, 8, 2, q_len, k_len)), SM90, name)
    if consumers == 1 and schedule == "plain":
        right(workload(128, sizes=(2, 8, 2, 16, 8192)), PORTABLE, f"m32n64w4s2k{splits}_tma_heads")


@pytest.mark.parametrize(("heads", "kv_heads", "pack"), [(32, 8, 4), (32, 1, 16), (16, 2, 8)])
@pytest.mark.parametrize("k_len", [1, 64, 8192, 65536])
def test_packed_groups(heads: int, kv_heads: int, pack: int, k_len: int) -> None:
    """The shapes of the suite gqa-short, and their neighbours in a bucket."""
    for q_len in (1, 16, 60):
        for name in (f"c1x2n64s2g4p{pack}k32", f"c2x1n128s2g4p{pack}k8"):
            work = workload(128, sizes=(1, heads, kv_heads, q_len, k_len))
            right(work, SM90, f"{name}_late_lazy_tree_lane_plain")


@pytest.mark.parametrize("config", CONFIGS[SM90])
def test_8_bit_inputs(config: str) -> None:
    """Three kernels: V is transposed before, the parts are merged after."""
    for mask in (CAUSAL, masks.full()):
        right(workload(128, dtype="e4m3", mask=mask, sizes=(2, 8, 2, 16, 5000)), SM90, config)
        right(workload(80, 48, dtype="e4m3", mask=mask, sizes=(1, 8, 2, 77, 130)), SM90, config)


@pytest.mark.parametrize(("family", "config"), EACH)
def test_layouts_softcap_and_memory_around_the_tensors(family: str, config: str) -> None:
    right(workload(128, sizes=(2, 8, 2, 33, 1500)), family, config, layout="bshd")
    right(workload(128, score_mod=score_mods.softcap(5.0), sizes=(2, 8, 2, 33, 1500)), family, config)
    if config == CONFIGS[PORTABLE][1]:
        return  # its pointers may touch what they do not use
    work = workload(72, sizes=(2, 8, 2, 33, 131), mask=masks.full())
    right(work, family, config, **among_nan(make_inputs(work, DEVICE)))


@pytest.mark.parametrize(("family", "config"), EACH)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_nan_or_infinite(bad: float, family: str, config: str) -> None:
    work = workload(64, sizes=(1, 8, 2, 33, 1500))
    skip_unless_served(family, work.spec)
    inputs = make_inputs(work, DEVICE)
    q, k = inputs.q.abs() + 1, inputs.k.abs() + 1
    k[:, :, 1480] = bad
    inputs = replace(inputs, q=q, k=k)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=DEVICE)
    Call(inputs, work.spec, out, lse, config, family)()
    exact, exact_lse = attention_reference(q, k, inputs.v, mask=CAUSAL)
    assert exact_lse.isnan().any() and not exact_lse.isnan().all()
    torch.testing.assert_close(out.float(), exact.float(), equal_nan=True, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, exact_lse.float(), equal_nan=True, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("family", "config"), EACH)
def test_a_captured_graph_has_buffers_of_its_own(family: str, config: str) -> None:
    work = workload(128, sizes=(1, 8, 2, 16, 5000))
    skip_unless_served(family, work.spec)
    inputs = make_inputs(work, DEVICE)
    out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3], device=DEVICE)
    call = Call(inputs, work.spec, out, lse, config, family)
    call()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        call()  # between replays, on the same stream
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-4)])
def test_a_call_of_few_rows_that_nobody_tuned_is_served_by_split_keys(
    dtype: torch.dtype, most: float
) -> None:
    """In float32 by the portable family, in 16 bits on Hopper by its own: their defaults split keys."""
    q = torch.randn(1, 8, 16, 64, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(1, 8, 30000, 64, device=DEVICE, dtype=dtype) for _ in range(2))
    steps = flashgen.explain(q, k, v, mask="causal").steps
    (served,) = (step for step in steps if step.verdict == "accepted")
    assert re.search(r"k\d+_", served.choice), served
    out, lse = flashgen.attention(q, k, v, mask="causal", return_lse=True)
    exact, exact_lse = attention_reference(q, k, v, mask=CAUSAL)
    torch.testing.assert_close(out.float(), exact.float(), atol=most, rtol=1e-4)
    torch.testing.assert_close(lse, exact_lse.float(), atol=1e-3, rtol=1e-3)
