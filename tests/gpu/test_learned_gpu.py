"""Gradients of what score rules read, on a GPU: kernels through autograd, against float64 autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from checked import CAUSAL, DEVICE
from torch import Tensor

import flashgen
from flashgen import masks, score_mods
from flashgen.build.reference import attention_reference
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import ScoreMod

HEADS, KV_HEADS, Q_LEN, K_LEN = 4, 2, 500, 700


def leaves(q_len: int = Q_LEN, k_len: int = K_LEN, head_dim: int = 64, batch: int = 2) -> list[Tensor]:
    shapes = ((batch, HEADS, q_len, head_dim), *(2 * ((batch, KV_HEADS, k_len, head_dim),)))
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def exact(tensors: list[Tensor], mod: ScoreMod, douts: tuple[Tensor, Tensor], mask: Mask) -> list[Tensor]:
    """Gradients of q, k, v and of the rule's tensors, in float64."""
    own = [each.detach().double().requires_grad_() for each in (*tensors, *mod.tensors)]
    rules: dict[str, Any] = {"mask": mask, "score_mod": replace(mod, tensors=tuple(own[3:]))}
    results = attention_reference(*own[:3], **rules, dtype=torch.float64)
    return list(torch.autograd.grad(results, own, [each.double() for each in douts]))


def close(found: Any, wanted: Any, limit: float = 1e-2) -> None:
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.isfinite().all(), place
        error = float((ours.double() - theirs).norm() / theirs.norm())
        assert error <= limit, f"{place}: {error:.3g}"


MODS = {
    "alibi": lambda: [score_mods.alibi(torch.rand(HEADS, device=DEVICE).requires_grad_())],
    "bias of pairs": lambda: [score_mods.bias(drawn(2, HEADS, Q_LEN, K_LEN, dtype=torch.bfloat16))],
    "bias of heads": lambda: [score_mods.bias(drawn(1, HEADS, Q_LEN, K_LEN))],
    "bias of all": lambda: [score_mods.bias(drawn(1, 1, Q_LEN, K_LEN, dtype=torch.float16))],
    "bias of keys": lambda: [score_mods.bias(drawn(2, 1, 1, K_LEN))],
    "bias of rows": lambda: [score_mods.bias(drawn(1, HEADS, Q_LEN, 1)), score_mods.softcap(5.0)],
    "distances": lambda: [score_mods.relative(drawn(HEADS, 2 * 100 + 1))],
    "distances in 16 bits": lambda: [score_mods.relative(drawn(HEADS, 9, dtype=torch.bfloat16))],
    "several": lambda: [
        score_mods.relative(drawn(HEADS, 2 * 100 + 1)),
        score_mods.softcap(5.0),
        score_mods.alibi(torch.rand(HEADS, device=DEVICE).requires_grad_()),
        score_mods.bias(drawn(1, HEADS, Q_LEN, K_LEN)),
        score_mods.scale(0.5),
    ],
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [40, 64, 128, 192])
@pytest.mark.parametrize("mask", [CAUSAL, masks.sliding_window(99, 30)], ids=lambda m: m.describe())
@pytest.mark.parametrize("mod", MODS.values(), ids=MODS.keys())
def test_rules_of_the_table(mod: Any, mask: Mask, head_dim: int) -> None:
    composed = score_mods.compose(mod())
    assert composed is not None
    tensors = leaves(head_dim=head_dim)
    told = flashgen.explain(*tensors, mask=mask, score_mod=composed)
    assert told.gradients == "attention_bwd", str(told)
    results = flashgen.attention(*tensors, mask=mask, score_mod=composed, return_lse=True)
    douts = tuple(map(torch.randn_like, results))
    found = torch.autograd.grad(results, [*tensors, *composed.tensors], douts)
    # A bias of a row moves no weight: what its gradient is, the LSE's is.
    close(found, exact(tensors, composed, douts, mask), limit=2e-2)


def test_minus_infinity_and_rows_without_keys() -> None:
    tensors, bias = leaves(300, 200), torch.randn(1, HEADS, 300, 200, device=DEVICE)
    bias[..., 250, 3] = bias[..., 260, :] = bias[..., 40] = -math.inf
    mod = score_mods.bias(bias.requires_grad_())
    out, lse = flashgen.attention(*tensors, mask=CAUSAL, score_mod=mod, return_lse=True)
    douts = (torch.randn_like(out), torch.randn_like(lse))
    found = torch.autograd.grad((out, lse), [*tensors, bias], douts)
    assert all(each.isfinite().all() for each in found)
    d_bias = found[3]
    assert not d_bias[..., 250, 3].any() and not d_bias[..., 260, :].any() and not d_bias[..., 40].any()
    assert not d_bias[..., :100, :].any() and d_bias[..., 299, :40].all()


def test_what_a_flex_callable_captures() -> None:
    """T5: the bucket of a distance from a table of buckets, its weight learned."""
    tensors = leaves(600, 600)
    weights, sharpness = drawn(HEADS, 32), torch.rand(HEADS, device=DEVICE).requires_grad_()
    buckets = (torch.arange(2 * 600, device=DEVICE) // 38).int()

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * sharpness[h] + weights[h, buckets[q_idx - kv_idx + 599]]

    own = [each.detach().double().requires_grad_() for each in (*tensors, weights, sharpness)]
    distance = torch.arange(600, device=DEVICE)[:, None] - torch.arange(600, device=DEVICE)
    k, v = (each.repeat_interleave(2, 1) for each in own[1:3])
    scores = (
        own[0] @ k.transpose(2, 3) / 8 * own[4][:, None, None] + own[3][:, buckets.long()[distance + 599]]
    )
    wanted = (scores.softmax(-1) @ v).square().sum()
    out = flashgen.flex_attention(*tensors, score_mod=mod, enable_gqa=True)
    found = torch.autograd.grad(out.float().square().sum(), [*tensors, weights, sharpness])
    close(found, torch.autograd.grad(wanted, own), limit=3e-2)


FIXED = ("alibi", "bias of pairs", "bias of keys", "bias of rows")


@pytest.mark.parametrize("name", MODS)
def test_c19_deterministic_gradients_have_the_same_bits_in_fifty_runs(name: str) -> None:
    """What kernels would add in any order is torch's, as explain says."""
    tensors, mod = leaves(), score_mods.compose(MODS[name]())
    options: dict[str, Any] = {"mask": CAUSAL, "score_mod": mod, "deterministic": True}
    told = flashgen.explain(*tensors, **options)
    assert mod is not None and (told.gradients == "attention_bwd") == (name in FIXED)
    assert name in FIXED or "in any order, and deterministic gradients are asked for" in str(told)
    out = flashgen.attention(*tensors, **options)
    wanted, dout = [*tensors, *mod.tensors], torch.randn_like(out)
    first = torch.autograd.grad(out, wanted, dout, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(out, wanted, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_c19_of_one_sequence_a_bias_of_heads_is_added_to_once() -> None:
    tensors, bias = leaves(batch=1), drawn(1, HEADS, Q_LEN, K_LEN)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        told = flashgen.explain(*tensors, score_mod=score_mods.bias(bias))
        assert told.gradients == "attention_bwd"
        out = flashgen.attention(*tensors, score_mod=score_mods.bias(bias))
    finally:
        torch.use_deterministic_algorithms(False)
    first, again = (torch.autograd.grad(out, bias, out.detach(), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again) and first.any()


def test_c22_captured_in_a_cuda_graph() -> None:
    tensors = leaves()
    composed = score_mods.compose([*MODS["several"](), score_mods.bias(drawn(2, 1, 1, K_LEN))])
    assert composed is not None
    wanted, dout = [*tensors, *composed.tensors], torch.randn_like(tensors[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(flashgen.attention(*tensors, score_mod=composed), wanted, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(flashgen.attention(*tensors, score_mod=composed), wanted, dout)
    with torch.no_grad():
        for each in wanted:
            # Slopes as before, from 0 on: where far keys weigh most, what is lost of a row's delta counts as
            # often as they are far, and a slope's gradient is off by 5 to 100 % in eager calls too.
            each.copy_((torch.rand_like if each.shape == (HEADS,) else torch.randn_like)(each))
    graph.replay()
    lse_too = (dout, torch.zeros(2, HEADS, Q_LEN, device=DEVICE))
    close(found, exact(tensors, composed, lse_too, masks.full()), limit=2e-2)
    close(found, torch.autograd.grad(flashgen.attention(*tensors, score_mod=composed), wanted, dout), 1e-6)


def test_what_distances_learn_takes_no_quadratic_memory() -> None:
    """65,536 tokens: their scores would take 8.6 GB in 16 bits, for one head."""
    tensors = [
        torch.randn(1, 1, 2**16, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    table, slopes = drawn(1, 2 * 128 + 1), torch.rand(1, device=DEVICE).requires_grad_()
    mod = score_mods.compose([score_mods.relative(table), score_mods.alibi(slopes)])
    flashgen.attention(*tensors, mask=CAUSAL, score_mod=mod).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flashgen.attention(*tensors, mask=CAUSAL, score_mod=mod).sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 12 * tensors[0].numel() * 2
    assert table.grad is not None and table.grad.isfinite().all() and table.grad.any()


def test_a_frozen_tensor_costs_nothing() -> None:
    """A bias of 128 MB: its gradient would take twice as much again."""
    tensors, bias = leaves(4096, 4096), torch.randn(1, HEADS, 4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    bias.requires_grad_()
    peaks = []
    for frozen in (False, True, False, True):
        mod = score_mods.bias(bias.detach() if frozen else bias)
        out = flashgen.attention(*tensors, mask=CAUSAL, score_mod=mod).sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, tensors if frozen else [*tensors, bias])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[3] < bias.numel() * 2 < peaks[2]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mod", MODS.values(), ids=MODS.keys())
def test_compiled_calls_learn(mod: Any, deterministic: bool) -> None:
    """By two operators, whether a kernel or torch's own operations give the gradients within the second."""
    torch._dynamo.reset()
    composed = score_mods.compose(mod())
    assert composed is not None
    tensors, sinks = leaves(), torch.linspace(-2.0, 5.0, HEADS, device=DEVICE, requires_grad=True)

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        rules: Any = {"mask": CAUSAL, "score_mod": composed, "sinks": sinks, "deterministic": deterministic}
        out, lse = flashgen.attention(*given, **rules, return_lse=True)
        return out, lse

    compiled = torch.compile(call, fullgraph=True)
    needing = [*tensors, sinks, *composed.tensors]
    results = [function(*tensors) for function in (compiled, call)]
    douts = tuple(map(torch.randn_like, results[0]))
    found, wanted = (torch.autograd.grad(each, needing, douts) for each in results)
    close(found, [each.double() for each in wanted], limit=1e-2)


def test_the_operators_gradients_are_what_their_fakes_say() -> None:
    mod = score_mods.compose([score_mods.alibi(torch.rand(HEADS, device=DEVICE)), score_mods.softcap(5.0)])
    assert mod is not None
    q, k, v = (each.detach() for each in leaves(60, 80))
    slopes, sinks = mod.tensors[0], torch.linspace(-2.0, 5.0, HEADS, device=DEVICE)
    told: Any = ("True", "full", mod.rule.text, "rule", [5.0], 0.2)
    forward, backward = torch.ops.flashgen.attention_fwd.default, torch.ops.flashgen.attention_bwd.default
    own = [each.clone().requires_grad_() for each in (q, k, v, slopes, sinks)]
    torch.library.opcheck(forward, (*own[:3], [own[3]], *told, "bhsd", True), {"sinks": own[4]})
    out, lse = forward(q, k, v, [slopes], *told, "bhsd", True, sinks=sinks)
    given = (torch.randn_like(out), torch.rand_like(lse), q, k, v, out, lse, "bhsd", [slopes], *told, sinks)
    torch.library.opcheck(backward, given, {"of_sinks": True, "learned": [0]})
