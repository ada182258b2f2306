"""FlexAttention's callables on a GPU, against torch's compiled flex_attention and the reference."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from checked import Call, skip_unless_served
from flex_collection import BATCH, HEADS, NAMES, Sample, causal, draw, sample, window
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import flashgen
from flashgen import api, masks
from flashgen.build.inputs import Inputs
from flashgen.build.reference import attention_reference
from flashgen.errors import InvalidArgument
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.spec.attention import AttentionSpec

DEVICE = "cuda"
DTYPE = torch.bfloat16
LENGTH = 1000  # no multiple of a tile
ONE_STAGE = {"num_stages": 1}
"""Of torch's kernels: with a bias, torch 2.11's default asks for more shared memory than an H200 has."""


@pytest.fixture
def fresh() -> Dispatcher:
    """The process's dispatcher, made anew."""
    api._dispatcher.cache_clear()
    return api._dispatcher()


def bound(given: Sample) -> dict[str, Any]:
    """The rules of a sample, made of its callables."""
    mask, score = given.mask_mod, given.score_mod
    return {
        "mask": None if mask is None else flashgen.trace.mask_mod(mask),
        "score_mod": None if score is None else flashgen.trace.score_mod(score),
    }


def exact(q: Tensor, k: Tensor, v: Tensor, given: Sample) -> tuple[Tensor, Tensor]:
    return attention_reference(q.float(), k.float(), v.float(), **bound(given))


def assert_right(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1], wanted[1], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_compiled_flex_attention(name: str, head_dim: int) -> None:
    given, (q, k, v) = (
        sample(name, LENGTH, DEVICE),
        draw(LENGTH, head_dim, device=torch.device(DEVICE), dtype=DTYPE),
    )
    block_mask = None
    if given.mask_mod is not None:
        block_mask = create_block_mask(given.mask_mod, BATCH, HEADS, LENGTH, LENGTH, device=DEVICE)
    call: dict[str, Any] = {"score_mod": given.score_mod, "block_mask": block_mask, "enable_gqa": True}
    ours, aux = flashgen.flex_attention(q, k, v, **call, return_aux=AuxRequest(lse=True))
    wanted = exact(q, k, v, given)
    assert_right((ours, aux.lse), wanted)
    torch._dynamo.reset()  # each sample is another graph of one function, and there are more than its limit
    theirs, their_aux = torch.compile(flex_attention)(
        q, k, v, **call, return_aux=AuxRequest(lse=True), kernel_options=ONE_STAGE
    )
    torch.testing.assert_close(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(aux.lse, their_aux.lse, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(
        flashgen.attention(q, k, v, mask=given.mask_mod, score_mod=given.score_mod), ours, atol=0, rtol=0
    )


@pytest.mark.parametrize("family", ["attention_fwd", "attention_fwd_sm90"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "bias"])
def test_each_family(name: str, family: str) -> None:
    """Without `bias`, for which the Hopper family's default spills: calls of it go to the portable one."""
    q, k, v = draw(LENGTH, 64, device=torch.device(DEVICE), dtype=DTYPE)
    given = sample(name, LENGTH, DEVICE)
    rules = bound(given)
    mask, score = rules["mask"] or masks.full(), rules["score_mod"]
    rule = None if score is None else score.rule
    spec = AttentionSpec(64, 64, "bf16", mask.rule, rule, return_lse=True)
    skip_unless_served(family, spec)
    out = torch.full_like(q, math.nan)
    lse = q.new_full(q.shape[:3], math.nan, dtype=torch.float32)
    Call(Inputs(q, k, v, mask, score, 0.125, "bhsd", ""), spec, out, lse, family=family)()
    assert_right((out, lse), exact(q, k, v, given))


def test_a_score_rule_that_drops_pairs_spares_their_tiles(fresh: Dispatcher) -> None:
    """It reads what the mask reads too, by the same name: each has its own in the kernel."""
    q, k, v = draw(LENGTH, 64, device=torch.device(DEVICE), dtype=DTYPE)
    documents, width = torch.arange(LENGTH, device=DEVICE) // 300, 200

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < width

    def same(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kept = (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx])
        return torch.where(kept, score * width / 100, -math.inf)

    wanted = exact(q, k, v, Sample(near, same))
    v[:, :, :64] = math.nan
    seen = slice(512, LENGTH)  # no row of a tile with any of these sees a key of the first block
    out, lse = flashgen.attention(q, k, v, mask=near, score_mod=same, return_lse=True)
    assert_right((out[:, :, seen], lse[:, :, seen]), (wanted[0][:, :, seen], wanted[1][:, :, seen]))
    told = flashgen.explain(q, k, v, mask=near, score_mod=same, return_lse=True)
    assert told.family.startswith("attention_fwd") and fresh.resolves == 1


def test_another_number_needs_no_other_kernel(fresh: Dispatcher) -> None:
    q, k, v = draw(LENGTH, 64, device=torch.device(DEVICE), dtype=DTYPE)
    outs = []
    for left in (100, 120, 127):
        outs.append(flashgen.attention(q, k, v, mask=window(left), return_lse=True))
        assert_right(outs[-1], exact(q, k, v, Sample(window(left))))
    assert fresh.resolves == 1
    kernels = len(fresh._kernels)
    assert_right(
        flashgen.attention(q, k, v, mask=window(3), return_lse=True), exact(q, k, v, Sample(window(3)))
    )
    assert fresh.resolves == 2 and len(fresh._kernels) == kernels
    assert not torch.equal(outs[0][0], outs[1][0])


def test_changed_tensors_are_seen_also_by_a_graph() -> None:
    q, k, v = draw(LENGTH, 64, device=torch.device(DEVICE), dtype=DTYPE)
    bias = torch.randn(HEADS, LENGTH, device=DEVICE)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, kv_idx]

    given = Sample(None, biased)
    for _ in range(2):
        assert_right(flashgen.attention(q, k, v, score_mod=biased, return_lse=True), exact(q, k, v, given))
        bias.mul_(-1.5)
    bias = torch.randn(HEADS, LENGTH, device=DEVICE)
    assert_right(flashgen.attention(q, k, v, score_mod=biased, return_lse=True), exact(q, k, v, given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashgen.attention(q, k, v, score_mod=biased, return_lse=True)
    for _ in range(2):
        bias.mul_(-0.5)
        graph.replay()
        assert_right(captured, exact(q, k, v, given))


def test_c36_reads_stay_within_their_tensors() -> None:
    q, k, v = draw(LENGTH, 64, device=torch.device(DEVICE), dtype=DTYPE)
    whole = torch.full((10_000,), math.nan, device=DEVICE)
    table = whole[5000:5200]
    table.normal_(generator=torch.Generator(DEVICE).manual_seed(0))

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 200)

    def outside(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[q_idx - kv_idx]

    def inside(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[torch.clamp(q_idx - kv_idx, 0, 199)]

    found = flashgen.attention(q, k, v, mask=near, score_mod=outside, return_lse=True)
    assert_right(found, exact(q, k, v, Sample(near, inside)))


SMALL = (torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_captured_tensors_of_small_dtypes(dtype: torch.dtype) -> None:
    q, k, v = draw(LENGTH, 64, device=torch.device(DEVICE), dtype=DTYPE)
    table = (torch.arange(LENGTH, device=DEVICE) % 3).to(dtype)
    factor = torch.tensor(2, device=DEVICE).to(dtype)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[kv_idx] - table[q_idx] * factor

    found = flashgen.attention(q, k, v, score_mod=score_mod, return_lse=True)
    assert_right(found, exact(q, k, v, Sample(None, score_mod)))


def test_fewer_queries_than_keys_and_a_head_dim_of_two_chunks() -> None:
    q, k, v = draw(LENGTH, 96, device=torch.device(DEVICE), dtype=DTYPE)
    few = q[:, :, :333]
    block_mask = create_block_mask(causal, None, None, 333, LENGTH, device=DEVICE)
    ours = flashgen.flex_attention(few, k, v, None, block_mask, enable_gqa=True, return_lse=True)
    assert_right(ours, attention_reference(few.float(), k.float(), v.float(), mask=masks.causal("top_left")))


def test_gradients_are_those_of_compiled_flex_attention() -> None:
    inputs = [each.requires_grad_() for each in draw(256, 64, device=torch.device(DEVICE), dtype=DTYPE)]
    bias = torch.randn(HEADS, 256, 256, device=DEVICE, requires_grad=True)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, q_idx, kv_idx]

    block_mask = create_block_mask(causal, None, None, 256, 256, device=DEVICE)
    found = []
    compiled = partial(torch.compile(flex_attention), kernel_options=ONE_STAGE)
    for function in (flashgen.flex_attention, compiled):
        out = function(*inputs, score_mod=biased, block_mask=block_mask, enable_gqa=True)
        found.append(torch.autograd.grad(out.float().square().sum(), [*inputs, bias]))
    for ours, theirs in zip(*found, strict=True):
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert error < 2e-2


def test_a_captured_tensor_alone_gets_its_gradient() -> None:
    q, k, v = draw(256, 64, device=torch.device(DEVICE), dtype=DTYPE)
    bias = torch.randn(HEADS, 256, device=DEVICE, requires_grad=True)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, kv_idx]

    out, wanted = flashgen.attention(q, k, v, score_mod=biased), exact(q, k, v, Sample(None, biased))[0]
    found, right = (torch.autograd.grad(each.float().square().sum(), bias)[0] for each in (out, wanted))
    assert (found - right).abs().max() < 2e-2 * right.abs().max()


def test_tensors_of_another_device_are_refused() -> None:
    q, k, v = draw(LENGTH, 64, device=torch.device(DEVICE), dtype=DTYPE)
    ids = torch.arange(LENGTH)

    def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[q_idx] == ids[kv_idx]

    with pytest.raises(InvalidArgument, match=r"ids of .* is on cpu, q on cuda:0; move one"):
        flashgen.attention(q, k, v, mask=document)


def test_compiled_code_takes_callables_in_one_graph() -> None:
    q, k, v = draw(LENGTH, 64, device=torch.device(DEVICE), dtype=DTYPE)
    bias = torch.randn(HEADS, device=DEVICE)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h] * (kv_idx - q_idx)

    block_mask = create_block_mask(window(100), None, None, LENGTH, LENGTH, device=DEVICE)

    def call(q: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flashgen.flex_attention(q, k, v, biased, block_mask, None, True, True)
        return out * 2, lse

    compiled = torch.compile(call, fullgraph=True)
    for _ in range(2):
        for ours, eager in zip(compiled(q), call(q), strict=True):
            torch.testing.assert_close(ours, eager)
        bias.mul_(-0.5)
