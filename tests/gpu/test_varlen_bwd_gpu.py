"""Gradients of packed sequences on a GPU: each as if it were alone, with no wait for the GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from checked import CAUSAL, COMBINED, DEVICE, TABLE
from test_attention_bwd_gpu import close, judge
from test_varlen_gpu import RAGGED, arguments, packed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flashgen
from flashgen.build.device import current_target
from flashgen.build.inputs import Inputs, starts
from flashgen.build.reference import packed_reference
from flashgen.measure.peers import Packed
from flashgen.spec import masks, score_mods
from flashgen.spec.masks import Mask

CONFIGS = ("m64n64w4s2_tma_heads", "m64n64w4s2_pointer_rows", "m32n64w4s1_tma_rows")
CONFIGS += ("m64n64w8s2_tma_heads_fused", "m64n64w8s2_pointer_rows_fused")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, config: str) -> None:
    if "tma" in config and not current_target().has_tma:
        pytest.skip("descriptors need sm_90")
    judge(*packed(mask=mask), config)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_default_serves_head_dims(dtype: str, dims: tuple[int, int]) -> None:
    for mask in (masks.full(), CAUSAL):
        judge(*packed(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, mask=mask))


def test_fp32() -> None:
    judge(*packed(dtype="fp32"))


def test_score_rules() -> None:
    judge(*packed(mask=masks.sliding_window(100, 0), score_mod=score_mods.softcap(20.0)))


def test_many_sequences() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(0, 40, (1500,), generator=draw).tolist())
    judge(*packed((lengths, lengths)))


# The call a user makes


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x[0].detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def exact(
    tensors: list[Tensor], inputs: Inputs, dout: Tensor, dlse: Tensor, sinks: Tensor | None
) -> list[Tensor]:
    own = [
        each.detach().double().requires_grad_() for each in (*tensors, *([] if sinks is None else [sinks]))
    ]
    cu_q, cu_k = (each.tolist() for each in inputs.packed or ())
    out, lse = packed_reference(
        *own[:3],
        cu_q,
        cu_k,
        mask=inputs.mask,
        score_mod=inputs.score_mod,
        sinks=own[3] if sinks is not None else None,
        dtype=torch.float64,
    )
    return list(torch.autograd.grad([out, lse], own, [dout.double(), dlse.double()]))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mask", [masks.full(), CAUSAL & masks.sliding_window(99, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_training_step_waits_for_nothing(head_dim: int, mask: Mask, with_sinks: bool) -> None:
    inputs, _ = packed(mask=mask, head_dim=head_dim)
    sinks = torch.linspace(-2.0, 5.0, 8, device=DEVICE, requires_grad=True) if with_sinks else None
    tensors, rest = leaves(inputs), arguments(inputs)[3:]
    needing = [*tensors, *([] if sinks is None else [sinks])]
    dout = torch.randn(tensors[0].shape, device=DEVICE).bfloat16()
    dlse = torch.randn(8, tensors[0].shape[0], device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        out, lse = flashgen.attention_varlen(*tensors, *rest, mask=mask, sinks=sinks, return_lse=True)
        return torch.autograd.grad([out, lse], needing, [dout, dlse])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(found, exact(tensors, inputs, dout, dlse, sinks))
    assert all(torch.equal(a, b) for a, b in zip(found, step(), strict=True))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("with_slopes", [False, True], ids=["", "slopes"])
def test_c35_a_compiled_training_step_is_two_graphs_for_any_lengths(
    with_sinks: bool, with_slopes: bool
) -> None:
    """It waits for nothing but where a rule learns, whose gradient is torch's."""
    torch._dynamo.reset()
    sinks = torch.linspace(-2.0, 5.0, 8, device=DEVICE, requires_grad=True) if with_sinks else None
    slopes = torch.rand(8, device=DEVICE, requires_grad=True) if with_slopes else None
    mod = None if slopes is None else score_mods.alibi(slopes)
    counter = CompileCounterWithBackend("inductor")

    def call(*given: Any) -> tuple[Tensor, Tensor]:
        rules: Any = {"mask": CAUSAL, "score_mod": mod, "sinks": sinks}
        out, lse = flashgen.attention_varlen(*given, **rules, return_lse=True)
        return out, lse

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for lengths in (RAGGED, ((700, 33, 9), (710, 33, 80)), ((5, 0, 0, 0, 64), (5, 1, 0, 0, 640))):
        inputs, _ = packed(lengths)
        tensors, rest = leaves(inputs), arguments(inputs)[3:]
        needing = [*tensors, *(each for each in (sinks, slopes) if each is not None)]
        dout, dlse = torch.randn_like(tensors[0]), torch.randn(8, tensors[0].shape[0], device=DEVICE)

        def step(function: Any) -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(*tensors, *rest), needing, [dout, dlse])  # noqa: B023

        found, wanted = step(compiled), step(call)
        close(found, [each.double() for each in wanted])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if with_slopes else "error")
        try:
            step(compiled)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert counter.frame_count <= 2


def test_a_compiled_training_step_is_captured() -> None:
    torch._dynamo.reset()
    inputs, _ = packed()
    tensors, rest = leaves(inputs), arguments(inputs)[3:]
    compiled = torch.compile(flashgen.attention_varlen, fullgraph=True, mode="reduce-overhead")
    wanted = torch.autograd.grad(
        flashgen.attention_varlen(*tensors, *rest, mask=CAUSAL).float().square().mean(), tensors
    )
    for _ in range(4):  # the third replays what the second recorded
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(compiled(*tensors, *rest, mask=CAUSAL).float().square().mean(), tensors)
        close([each.clone() for each in found], [each.double() for each in wanted])


def test_the_operators_are_what_their_fakes_say() -> None:
    inputs, _ = packed()
    q, k, v, *places = arguments(inputs)
    sinks, told = (
        torch.linspace(-2.0, 5.0, 8, device=DEVICE),
        ([], CAUSAL.rule.text, "causal", "", "", [], 0.2),
    )
    operators = torch.ops.flashgen
    own = [each.detach().clone().requires_grad_() for each in (q, k, v, sinks)]
    torch.library.opcheck(operators.attention_varlen_fwd.default, (*own[:3], *places, *told, True, own[3]))
    out, lse = operators.attention_varlen_fwd(q, k, v, *places, *told, True, sinks)
    given = (torch.randn_like(out), torch.rand_like(lse), q, k, v, out, lse, *places, *told, sinks)
    torch.library.opcheck(operators.attention_varlen_bwd.default, given, {"of_sinks": True})


def test_it_is_explained() -> None:
    inputs, _ = packed()
    places = Packed.of(inputs.packed).arguments()  # type: ignore[arg-type]
    told = flashgen.explain(*leaves(inputs), mask=CAUSAL, **places)
    assert told.gradients == "attention_bwd" and "gradients: family default" in str(told)


@pytest.mark.parametrize("mask", [masks.full(), CAUSAL, masks.sliding_window(70, 20)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [RAGGED, ((63, 65, 64, 190, 1, 129, 5), (63, 65, 64, 190, 1, 129, 5)), ((5,) * 40, (3,) * 40)],
    ids=["ragged", "around tiles", "short"],
)
def test_c05_a_neighbours_nan_changes_no_bit(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], mask: Mask
) -> None:
    inputs, _ = packed(lengths, mask=mask, head_dim=96)
    tensors, rest = leaves(inputs), arguments(inputs)[3:]
    dout = torch.randn(tensors[0].shape, device=DEVICE).bfloat16()
    cu_q, cu_k = (each.tolist() for each in inputs.packed or ())
    ruined, bad_dout = [each.detach().clone() for each in tensors], dout.clone()
    own = [torch.ones(len(each), dtype=torch.bool, device=DEVICE) for each in tensors]
    for s in range(1, len(cu_q) - 1, 2):
        of_q, of_k = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        for each, kept, rows in zip(ruined, own, (of_q, of_k, of_k), strict=True):
            each[rows], kept[rows] = math.nan, False
        bad_dout[of_q] = math.nan
    results = []
    for given, gradient in ((tensors, dout), ([each.requires_grad_() for each in ruined], bad_dout)):
        out = flashgen.attention_varlen(*given, *rest, mask=mask)
        results.append(torch.autograd.grad(out, given, gradient))
    for clean, found, kept in zip(*results, own, strict=True):
        assert kept.any() and not kept.all()
        assert torch.equal(clean[kept], found[kept])


def test_a_captured_step_reads_the_places_of_each_replay() -> None:
    inputs, _ = packed(((500, 100), (500, 100)))
    tensors, (cu_q, cu_k, *_) = leaves(inputs), arguments(inputs)[3:]
    dout = torch.randn(tensors[0].shape, device=DEVICE).bfloat16()

    def step() -> tuple[Tensor, ...]:
        out = flashgen.attention_varlen(*tensors, cu_q, cu_k, 600, 600, mask=CAUSAL)
        return torch.autograd.grad(out, tensors, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    dlse = torch.zeros(8, 600, device=DEVICE)
    for lengths in ((500, 100), (1, 599), (600, 0)):
        cu = starts(torch.tensor(lengths))
        cu_q.copy_(cu)
        cu_k.copy_(cu)
        graph.replay()
        torch.cuda.synchronize()
        close(found, exact(tensors, replace(inputs, packed=(cu, cu)), dout, dlse, None))
