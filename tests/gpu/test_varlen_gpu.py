"""Packed sequences on a GPU, in both families: each as if it were alone, whatever lies beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checked import CAUSAL, COMBINED, DEVICE, TABLE, Call, skip_unless_served, workload
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flashgen
from flashgen import api
from flashgen.build.device import current_target
from flashgen.build.inputs import Inputs, make_inputs, starts
from flashgen.build.reference import packed_reference
from flashgen.codegen.families import find_family
from flashgen.errors import InvalidArgument
from flashgen.measure.check import Poisoned, Rig
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import ScoreMod

CONFIGS = {
    "attention_fwd": (
        "m128n64w4s2_tma_heads",
        "m64n128w4s3_pointer_rows",
        "m16n32w4s1_tma_rows",
    ),
    "attention_fwd_sm90": (
        "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic",
        "c3x1n64s2g16p1_early_always_chain_row_plain",
        "c1x2n64s3g4p4_pinned_lazy_tree_lane_dynamic",
        "c2x1n64s2g4p4_late_lazy_tree_lane_plain",
        "c1x3n64s2g4p1_late_lazy_tree_lane_dynamic",
    ),
}
ALL = [(family, config) for family, configs in CONFIGS.items() for config in configs]
RAGGED = ((300, 0, 1, 128, 0, 77, 1000), (300, 500, 64, 128, 0, 900, 33))
"""Empty on either side and on both, single rows, whole tiles, more keys than queries and fewer."""


def packed(
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = RAGGED,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
    mask: Mask = CAUSAL,
    score_mod: ScoreMod | None = None,
    heads: int = 8,
    kv_heads: int = 2,
) -> tuple[Inputs, AttentionSpec]:
    """A call of sequences with these lengths."""
    q_lengths, k_lengths = lengths
    sizes = (len(q_lengths), heads, kv_heads, max(q_lengths), max(k_lengths))
    dense = workload(head_dim, head_dim_v, dtype, mask, score_mod, sizes)
    spec = replace(dense.spec, addressing="varlen")
    work = Workload(spec, *sizes, dense.params, sum(q_lengths), sum(k_lengths))
    cu_q, cu_k = (starts(torch.tensor(each)).to(DEVICE) for each in lengths)
    return replace(make_inputs(work, DEVICE), packed=(cu_q, cu_k)), spec


def check(inputs: Inputs, spec: AttentionSpec, family: str, config: str = "") -> None:
    verdict, same = Rig(inputs, spec).examine(lambda out, lse: Call(inputs, spec, out, lse, config, family)())
    assert verdict.ok, verdict.reason
    assert same, "two runs differ"


def skip_unless_it_fits(family: str, config: str, spec: AttentionSpec) -> None:
    found = find_family(family)
    if reason := found.fits(found.find(config), spec, current_target()):
        pytest.skip(reason)


@pytest.mark.parametrize("family,config", ALL)
@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, family: str, config: str) -> None:
    skip_unless_served(family)
    inputs, spec = packed(mask=mask)
    skip_unless_it_fits(family, config, spec)
    check(inputs, spec, family, config)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_default_serves_head_dims(family: str, dtype: str, dims: tuple[int, int]) -> None:
    skip_unless_served(family)
    for mask in (masks.full(), CAUSAL):
        check(*packed(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, mask=mask), family)


def test_fp32() -> None:
    check(*packed(dtype="fp32"), "attention_fwd")


@pytest.mark.parametrize("family,config", ALL)
def test_score_rules(family: str, config: str) -> None:
    skip_unless_served(family)
    inputs, spec = packed(mask=masks.sliding_window(100, 0), score_mod=score_mods.softcap(20.0))
    skip_unless_it_fits(family, config, spec)
    check(inputs, spec, family, config)


@pytest.mark.parametrize("family,config", ALL)
@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL & masks.sliding_window(99, 0)], ids=str)
def test_sinks(mask: Mask, family: str, config: str) -> None:
    skip_unless_served(family)
    inputs, spec = packed(mask=mask)
    logits = torch.linspace(-2.0, 5.0, 8, device=DEVICE, dtype=torch.bfloat16)
    inputs, spec = replace(inputs, sinks=logits), replace(spec, sinks="bf16")
    skip_unless_it_fits(family, config, spec)
    check(inputs, spec, family, config)


def test_a_call_with_sinks() -> None:
    inputs, spec = packed()
    logits = torch.linspace(-2.0, 5.0, 8, device=DEVICE)
    out, lse = flashgen.attention_varlen(*arguments(inputs), mask=CAUSAL, sinks=logits, return_lse=True)
    expected = Rig(replace(inputs, sinks=logits), replace(spec, sinks="fp32")).expected
    verdict = expected.judge(inputs.bhsd(out[None]), lse[None])
    assert verdict.ok, verdict.reason


def neighbours_of_nan(inputs: Inputs, poison: float) -> tuple[Inputs, Tensor]:
    """With every second sequence of one value; and which rows are the others'."""
    assert inputs.packed is not None
    cu_q, cu_k = (each.tolist() for each in inputs.packed)
    q, k, v = (x.clone() for x in (inputs.q, inputs.k, inputs.v))
    own = torch.ones(q.shape[1], dtype=torch.bool, device=DEVICE)
    for s in range(1, len(cu_q) - 1, 2):
        q[:, cu_q[s] : cu_q[s + 1]] = poison
        k[:, cu_k[s] : cu_k[s + 1]] = poison
        v[:, cu_k[s] : cu_k[s + 1]] = poison
        own[cu_q[s] : cu_q[s + 1]] = False
    return replace(inputs, q=q, k=k, v=v), own


@pytest.mark.parametrize("family,config", ALL)
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("mask", [masks.full(), CAUSAL, masks.sliding_window(70, 20)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [RAGGED, ((63, 65, 64, 190, 1, 129, 5), (63, 65, 64, 190, 1, 129, 5)), ((5,) * 40, (3,) * 40)],
    ids=["ragged", "around tiles", "short"],
)
def test_c05_a_neighbours_nan_changes_no_bit(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], mask: Mask, poison: float, family: str, config: str
) -> None:
    """What a tile loads past its sequence's end never meets a weight, and no output is written there."""
    skip_unless_served(family)
    inputs, spec = packed(lengths, mask=mask, head_dim=96)
    skip_unless_it_fits(family, config, spec)
    ruined, own = neighbours_of_nan(inputs, poison)
    results = []
    for each in (inputs, ruined):
        out = Poisoned((*inputs.q.shape[:3], 96), torch.bfloat16, inputs.q.device)
        lse = Poisoned((1, 8, inputs.q.shape[1]), torch.float32, inputs.q.device)
        out.poison()
        lse.poison()
        Call(each, spec, out.tensor, lse.tensor, config, family)()
        torch.cuda.synchronize()
        assert not out.overrun() and not lse.overrun()
        results.append((out.bits[:, own], lse.bits[:, :, own]))
    assert own.any() and not own.all()
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("family,config", ALL)
def test_many_sequences(family: str, config: str) -> None:
    """More than are looked for at once, and far more tiles than a persistent grid has programs."""
    skip_unless_served(family)
    draw = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(0, 40, (1500,), generator=draw).tolist())
    inputs, spec = packed((lengths, lengths), head_dim=64)
    skip_unless_it_fits(family, config, spec)
    check(inputs, spec, family, config)


@pytest.mark.parametrize("family,config", ALL)
def test_one_kernel_serves_any_lengths(family: str, config: str) -> None:
    """The lengths change in place between launches of one kernel, and between replays of one graph."""
    skip_unless_served(family)
    inputs, spec = packed(((1000, 0, 200), (1000, 0, 200)))
    skip_unless_it_fits(family, config, spec)
    out = torch.empty(*inputs.q.shape[:3], 64, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(1, 8, 1200, device=DEVICE)
    call = Call(inputs, spec, out, lse, config, family)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    assert inputs.packed is not None
    q, k, v = (x[0] for x in (inputs.q, inputs.k, inputs.v))
    for lengths in ((1, 1198, 1), (400, 400, 400), (0, 0, 1200), (1200, 0, 0), (1000, 0, 200)):
        cu = starts(torch.tensor(lengths))
        for each in inputs.packed:
            each.copy_(cu)
        expected, expected_lse = packed_reference(
            q, k, v, cu.tolist(), cu.tolist(), mask=inputs.mask, scale=inputs.scale
        )
        for launch in (call, graph.replay):
            out.fill_(math.nan)
            lse.fill_(math.nan)
            launch()
            torch.cuda.synchronize()
            torch.testing.assert_close(out[0].float(), expected, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse[0], expected_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("family", CONFIGS)
def test_c12_views_of_fused_tensors(family: str) -> None:
    """q, k and v of one product: rows of 12 heads, of which each takes some."""
    skip_unless_served(family)
    lengths = (300, 0, 77, 128)
    inputs, spec = packed((lengths, lengths))
    fused = torch.randn(1, sum(lengths), 12, 64, device=DEVICE).bfloat16()
    views = {"q": fused[:, :, :8], "k": fused[:, :, 8:10], "v": fused[:, :, 10:]}
    check(replace(inputs, **views), spec, family)


# The call a user makes


def arguments(inputs: Inputs) -> list[object]:
    assert inputs.packed is not None
    return [*(x[0] for x in (inputs.q, inputs.k, inputs.v)), *inputs.packed, 1000, 900]


@pytest.fixture
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mask", [masks.full(), CAUSAL, CAUSAL & masks.sliding_window(99, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_call_waits_for_nothing(mask: Mask, head_dim: int, no_waits: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    inputs, spec = packed(mask=mask, head_dim=head_dim)
    given = arguments(inputs)
    flashgen.attention_varlen(*given, mask=mask)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    out, lse = flashgen.attention_varlen(*given, mask=mask, return_lse=True)
    torch.cuda.set_sync_debug_mode("default")
    assert lse.shape == (8, out.shape[0])
    verdict = Rig(inputs, spec).expected.judge(inputs.bhsd(out[None]), lse[None])
    assert verdict.ok, verdict.reason


def test_int64_places_and_gradients() -> None:
    inputs, _ = packed()
    q, k, v, cu_q, cu_k, *longest = arguments(inputs)
    expected = flashgen.attention_varlen(q, k, v, cu_q, cu_k, *longest, mask=CAUSAL)
    wide = (cu_q.long(), cu_k.long())
    got = flashgen.attention_varlen(q, k, v, *wide, *longest, mask=CAUSAL)
    assert torch.equal(got, expected)
    needing = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flashgen.attention_varlen(*needing, cu_q, cu_k, *longest, mask=CAUSAL)
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().sum(), needing))


def test_a_captured_call_reads_the_places_of_each_replay() -> None:
    inputs, _ = packed(((500, 100), (500, 100)))
    q, k, v, cu_q, cu_k, *_ = arguments(inputs)
    flashgen.attention_varlen(q, k, v, cu_q, cu_k, 600, 600, mask=CAUSAL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention_varlen(q, k, v, cu_q, cu_k, 600, 600, mask=CAUSAL)
    for lengths in ((500, 100), (1, 599), (600, 0)):
        cu = starts(torch.tensor(lengths))
        cu_q.copy_(cu)
        cu_k.copy_(cu)
        graph.replay()
        torch.cuda.synchronize()
        expected, _ = packed_reference(q, k, v, cu.tolist(), cu.tolist(), mask=CAUSAL)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def test_wrong_arguments_are_refused_before_a_launch() -> None:
    inputs, _ = packed()
    given = arguments(inputs)
    with pytest.raises(InvalidArgument, match=r"cu_seqlens_q.device=cpu must be that of q"):
        flashgen.attention_varlen(*given[:3], given[3].cpu(), *given[4:])
    with pytest.raises(InvalidArgument, match="reading it waits for the GPU; give an int"):
        longest = torch.tensor(1000, device=DEVICE)
        flashgen.attention_varlen(*given[:5], longest, 900)
    with pytest.raises(InvalidArgument, match=r"max_seqlen_k=10 is too small"):
        flashgen.attention_varlen(*given[:6], 10)


def test_wrong_places_are_told_where_the_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = packed()
    given = arguments(inputs)
    expected = flashgen.attention_varlen(*given, mask=CAUSAL)
    monkeypatch.setattr(api._dispatcher(), "_check_values", True)
    assert torch.equal(flashgen.attention_varlen(*given, mask=CAUSAL), expected)
    cu = given[3]
    for message, wrong in (
        ("begins with 3; the first sequence begins at 0", torch.cat([cu[:1] + 3, cu[1:]])),
        ("decreases from 429 to 300 at sequence 4", torch.cat([cu[:5], cu[1:2], cu[6:]])),
        ("ends with 1507, and q has 1506 tokens", torch.cat([cu[:-1], cu[-1:] + 1])),
    ):
        with pytest.raises(InvalidArgument, match=message):
            flashgen.attention_varlen(*given[:3], wrong, *given[4:], mask=CAUSAL)


def test_wrong_places_are_told_where_a_gradient_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = packed()
    q, k, v, cu_q, *rest = arguments(inputs)
    needing = q.detach().requires_grad_()
    monkeypatch.setattr(api._dispatcher(), "_check_values", True)
    with pytest.raises(InvalidArgument, match="cu_seqlens_q begins with 1"):
        flashgen.attention_varlen(needing, k, v, torch.cat([cu_q[:1] + 1, cu_q[1:]]), *rest)


def test_compiled_code_has_one_graph_for_any_lengths(no_waits: None) -> None:
    """Also in a CUDA graph, where a wait would end the capture."""
    torch.cuda.set_sync_debug_mode("default")
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(flashgen.attention_varlen, fullgraph=True, dynamic=True, backend=counter)
    for lengths in (RAGGED, ((700, 33, 9), (710, 33, 80)), ((5, 0, 0, 0, 64), (1, 1, 0, 0, 640))):
        inputs, _ = packed(lengths)
        given = arguments(inputs)
        out, lse = compiled(*given, mask=CAUSAL, return_lse=True)
        eager, eager_lse = flashgen.attention_varlen(*given, mask=CAUSAL, return_lse=True)
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse)
        torch.cuda.set_sync_debug_mode("error")
        assert compiled(*given, mask=CAUSAL, return_lse=True)[0].shape == out.shape
        torch.cuda.set_sync_debug_mode("default")
    assert counter.frame_count <= 2
    replayed = torch.compile(flashgen.attention_varlen, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # the third replays what the second recorded
        torch.testing.assert_close(replayed(*given, mask=CAUSAL), eager, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("family", CONFIGS)
def test_c09_offsets_beyond_32_bits(family: str) -> None:
    """Views whose rows are 65,536 elements apart: the last sequence begins past element 2^31."""
    skip_unless_served(family)
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of memory")
    tokens = 33_000 + 300
    lengths = (33_000, 300)
    inputs, spec = packed((lengths, lengths), heads=2, kv_heads=2, mask=masks.sliding_window(200, 0))
    views = {}
    for name in ("q", "k", "v"):
        whole = torch.empty(1, tokens, 65_536, dtype=torch.bfloat16, device=DEVICE)
        views[name] = whole[:, :, :128].unflatten(2, (2, 64))
        views[name].copy_(getattr(inputs, name))
        del whole
    check(replace(inputs, **views), spec, family)
