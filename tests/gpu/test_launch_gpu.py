"""The launch path on a real GPU: parameters, descriptors, contexts, threads and graphs."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.build.arguments import FACTS, call_facts, facts_code, flatten
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.device import live_target
from flashgen.build.driver import driver
from flashgen.build.launch import Kernel
from flashgen.build.reference import attention_reference
from flashgen.codegen.families import find_family
from flashgen.codegen.source import render
from flashgen.errors import LaunchFailed
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec, CallFacts

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
CAUSAL = masks.causal()
SPEC = AttentionSpec(64, 64, "bf16", mask=CAUSAL.rule, return_lse=True)


def load(spec: AttentionSpec, facts: CallFacts, device: int = 0) -> Kernel:
    """A small kernel of the kind a call admits."""
    target = live_target(device)
    loads = "tma" if facts.tma and target.has_tma else "pointer"
    config = find_family("attention_fwd").config(
        block_m=64, block_n=32, num_warps=4, num_stages=2, loads=loads, order="heads"
    )
    return Kernel(compile_kernel(render(spec, config, toolchain()), facts, target), device)


def inputs(
    q_len: int = 100, k_len: int = 130, dim: int = 64, dim_v: int = 64, device: str = "cuda:0"
) -> Tensors:
    """q, k, v of (2, 8 or 2, length, dim)."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    return normal(2, 8, q_len, dim), normal(2, 2, k_len, dim), normal(2, 2, k_len, dim_v)


def call(kernel: Kernel, q: Any, k: Any, v: Any, layout: str = "bhsd") -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of one launch on the current stream, both poisoned before."""
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device=q.device)
    batch, heads, rows = q.shape[:3] if layout == "bhsd" else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full((batch, heads, rows), float("nan"), device=q.device)
    assert call_facts(q, k, v, out, layout).access == kernel.artifact.abi.facts.access
    env = flatten(q, k, v, out, lse, q.shape[3] ** -0.5, layout=layout)
    kernel.launch(env, torch.cuda.current_stream(q.device).cuda_stream)
    return out, lse


def check(result: tuple[torch.Tensor, torch.Tensor], q: Any, k: Any, v: Any) -> None:
    """All of (batch, heads, seq, dim)."""
    out, lse = result
    exact, exact_lse = attention_reference(q, k, v, mask=CAUSAL)
    torch.testing.assert_close(out.float(), exact.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, exact_lse.float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("facts", [FACTS[0], FACTS[1], FACTS[2], FACTS[3], FACTS[4], FACTS[7]])
def test_every_kind_of_kernel_is_right(facts: CallFacts) -> None:
    q, k, v = inputs()
    kernel = load(SPEC, facts)
    assert kernel.registers > 0
    assert kernel.local_bytes >= 0
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    kernel.launch(flatten(q, k, v, out, lse, 0.125), torch.cuda.current_stream().cuda_stream)
    check((out, lse), q, k, v)


def test_the_driver_confirms_the_parameter_list() -> None:
    if not driver().has("cuFuncGetParamInfo"):
        pytest.skip("this driver does not tell")
    artifact = load(SPEC, FACTS[0]).artifact
    args = artifact.abi.args
    with pytest.raises(LaunchFailed, match="but its ABI describes"):
        Kernel(replace(artifact, abi=replace(artifact.abi, args=(*args, args[-1]))))
    with pytest.raises(LaunchFailed, match="but its ABI describes"):
        Kernel(replace(artifact, abi=replace(artifact.abi, args=args[:-1])))


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize(("dim", "dim_v"), [(72, 96), (96, 40), (256, 16)])
def test_head_dims_in_chunks(loads: str, dim: int, dim_v: int) -> None:
    spec = replace(SPEC, head_dim=dim, head_dim_v=dim_v)
    q, k, v = inputs(dim=dim, dim_v=dim_v)
    check(call(load(spec, FACTS[0 if loads == "tma" else 1]), q, k, v), q, k, v)


@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_one_kernel_serves_views_sizes_and_addresses_in_turn(loads: str) -> None:
    kernel = load(SPEC, FACTS[0 if loads == "tma" else 1])
    fused = torch.randn(2, 100, 12, 64, device="cuda", dtype=torch.bfloat16)
    views = fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:]
    sizes = [
        inputs(),
        inputs(),
        inputs(1, 130),
        inputs(100, 1),
        inputs(5, 2),
        inputs(2, 5),
        inputs(1000, 513),
    ]
    for q, k, v in [*sizes, *sizes, tuple(view.transpose(1, 2) for view in views)]:
        check(call(kernel, q, k, v), q, k, v)
    out, lse = call(kernel, *views, layout="bshd")
    check((out.transpose(1, 2), lse), *(view.transpose(1, 2) for view in views))
    single = [t[:1, :1].contiguous().as_strided((1, 1, t.shape[2], 64), (7, 0, 64, 1)) for t in sizes[0]]
    check(call(kernel, *single), *single)


def test_c13_a_broadcast_batch_and_then_another() -> None:
    q, k, v = inputs()
    shared = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    facts = call_facts(q, *shared, q)
    assert facts == CallFacts("aligned", tma=False)
    kernel = load(SPEC, facts)
    check(call(kernel, q, *shared), q, *shared)
    check(call(kernel, q, k, v), q, k, v)


def test_c14_misaligned_and_odd_strides_go_by_pointer_and_the_guard_band_stays() -> None:
    q, k, v = inputs()
    shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    padded = torch.empty(2, 2, 130, 68, device="cuda", dtype=q.dtype)[..., :64].copy_(k)
    band = torch.full((2, 8, 100, 72), 7.0, device="cuda", dtype=q.dtype)
    out, lse = band[..., :64], torch.empty(2, 8, 100, device="cuda")
    env = flatten(shifted, padded, v, out, lse, 0.125)
    facts = FACTS[facts_code(env, 2)]
    assert facts == CallFacts("unit", tma=False)
    load(SPEC, facts).launch(env, torch.cuda.current_stream().cuda_stream)
    check((out, lse), q, k, v)
    assert bool((band[..., 64:] == 7.0).all())
    with pytest.raises(LaunchFailed, match=r"describing Q at 0x\w+2, .*must be multiples of 16 B"):
        load(SPEC, FACTS[0]).launch(env, 0)


def test_a_new_thread_may_launch() -> None:
    q, k, v = inputs()
    kernel, results = load(SPEC, FACTS[0]), []
    thread = threading.Thread(target=lambda: results.append(call(kernel, q, k, v)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    check(results[0], q, k, v)


def test_a_graph_replays_the_launch() -> None:
    q, k, v = inputs()
    kernel = load(SPEC, FACTS[0])
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(flatten(q, k, v, out, lse, 0.125), torch.cuda.current_stream().cuda_stream)
    other = inputs(k_len=77)
    check(call(kernel, *other), *other)
    q.neg_()
    graph.replay()
    check((out, lse), q, k, v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_c23_tensors_of_another_gpu_than_the_current_one() -> None:
    q, k, v = inputs(device="cuda:1")
    for facts in FACTS[:2]:
        first, second = load(SPEC, facts, 0), load(SPEC, facts, 1)
        with torch.cuda.device(0):
            check(call(second, q, k, v), q, k, v)
            here = tuple(t.to("cuda:0") for t in (q, k, v))
            check(call(first, *here), *here)
            assert torch.cuda.current_device() == 0
            out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda:1")
            second.launch(flatten(q, k, v, out, lse, 0.125), 0)  # the default stream of GPU 1, not of GPU 0
            torch.cuda.synchronize(1)
            check((out, lse), q, k, v)
