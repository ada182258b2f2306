"""8-bit q, k and v on a Hopper GPU: the kernel with its part, and the public call, against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from checked import CAUSAL, COMBINED, DEVICE, TABLE, Call, check, skip_unless_served, workload

import flashgen
from flashgen import masks, score_mods
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.quantized import E4M3, Quantized, quantize
from flashgen.codegen.families import find_family
from flashgen.measure.check import Expected
from flashgen.spec.attention import Workload
from flashgen.spec.config import Config
from flashgen.spec.masks import Mask

pytestmark = pytest.mark.gpu
FAMILY = find_family("attention_fwd_sm90")
BASE = FAMILY.find("c2x1n64s2g4p1_late_lazy_tree_lane_dynamic")
WIDE = "c2x1n128s2g4p1_late_lazy_tree_lane_dynamic"


@pytest.fixture(autouse=True)
def hopper() -> None:
    skip_unless_served(FAMILY.name)


def e4m3(*args: Any, out_dtype: str = "", **named: Any) -> Workload:
    work = workload(*args, dtype="e4m3", **named)
    return replace(work, spec=replace(work.spec, out_dtype=out_dtype))


def right(work: Workload, config: str = "", layout: str = "bhsd", **tensors: Any) -> None:
    check(work, config, layout, FAMILY.name, **tensors)


# First what is simplest, so that a failure says which half is wrong.


@pytest.mark.parametrize("keys", [16, 64, 100, 128, 256])
def test_one_key_seen_by_each_query_gives_its_value(keys: int) -> None:
    """Each row's whole weight is on one key, whose value is its index in two digits: any wrong order of the
    keys, in V or in the weights, gives another key's."""
    q = torch.zeros(1, 1, keys, 64)
    k = torch.zeros(1, 1, keys, 64)
    digits = torch.arange(keys)
    for bit in range(8):
        sign = ((digits >> bit) & 1) * 2.0 - 1
        q[0, 0, :, bit] = k[0, 0, :, bit] = sign
    v = torch.zeros(1, 1, keys, 64)
    v[0, 0, :, 0], v[0, 0, :, 1], v[0, 0, :, 63] = digits % 16, digits // 16, 1.0
    stored = [each.to(DEVICE).to(E4M3) for each in (q, k, v)]
    out = flashgen.attention(*stored, scale=30.0)
    assert torch.equal(out[0, 0, :, 63].cpu().float(), torch.ones(keys))
    found = out[0, 0, :, 0].float() + 16 * out[0, 0, :, 1].float()
    torch.testing.assert_close(
        found.cpu(), digits.float(), rtol=0, atol=1e-9
    )  # other keys: exp(-90) and less


@pytest.mark.parametrize("config", [BASE.name, WIDE])
def test_equal_weights_average_the_values(config: str) -> None:
    """Scores of 0: the output is the mean of V, which tells a wrong sum or factor from a wrong order."""
    work = e4m3(64, mask=masks.full(), sizes=(1, 2, 1, 70, 250))
    inputs = make_inputs(work, DEVICE)
    right(work, config, q=torch.zeros_like(inputs.q))


@pytest.mark.parametrize("lengths", [(1000, 1000), (77, 900), (900, 77), (1, 513)], ids=str)
@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, lengths: tuple[int, int]) -> None:
    right(e4m3(mask=mask, sizes=(2, 8, 2, *lengths)), BASE.name)


DIMS = ((16, 16), (32, 32), (64, 64), (80, 48), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256))


@pytest.mark.parametrize("out_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims_and_dtypes_of_the_output(dims: tuple[int, int], out_dtype: str) -> None:
    for schedule in ("dynamic", "plain"):
        config = f"c1x1n64s2g4p1_late_lazy_tree_lane_{schedule}"
        right(e4m3(*dims, out_dtype=out_dtype, sizes=(1, 4, 2, 300, 400)), config)


def variations() -> list[Config]:
    """The base config with each tunable's other values, one at a time, and a few far from it."""
    elsewhere = {("pack", 8), ("pack", 16), ("programs", 2), ("programs", 3)}
    found = [
        FAMILY.config(**{**BASE.to_json(), name: value})
        for name, values in FAMILY.tunables
        for value in values
        if (name, value) not in elsewhere
    ]
    names = (
        "c1x3n64s2g16p4_early_always_chain_row_plain",
        "c3x1n128s4g16p1_early_lazy_chain_lane_plain",
        "c1x2n128s2g4p4_pinned_lazy_tree_row_dynamic",
        "c3x1n64s3g16p4_pinned_always_tree_lane_dynamic",
    )
    return [*dict.fromkeys(found), *map(FAMILY.find, names)]


@pytest.mark.parametrize(
    "mask", [CAUSAL, masks.full(), masks.sliding_window(100, 30)], ids=lambda m: m.describe()
)
@pytest.mark.parametrize("config", variations(), ids=lambda config: config.name)
def test_every_tunable(config: Config, mask: Mask) -> None:
    for lengths in ((517, 517), (130, 700)):
        right(e4m3(mask=mask, sizes=(2, 8, 2, *lengths)), config.name)


@pytest.mark.parametrize("heads,kv_heads,pack", [(16, 2, 8), (8, 2, 4), (16, 1, 16)])
def test_packed_groups(heads: int, kv_heads: int, pack: int) -> None:
    """Whose rows have the factors of several heads of q."""
    for score_mod in (None, score_mods.softcap(5.0)):
        for q_len in (1, 7, 300):
            config = f"c2x1n64s2g4p{pack}_late_lazy_tree_lane_dynamic"
            right(e4m3(128, score_mod=score_mod, sizes=(2, heads, kv_heads, q_len, 400)), config)


def test_softcap_is_of_natural_units() -> None:
    right(e4m3(128, score_mod=score_mods.softcap(2.0), sizes=(2, 8, 2, 257, 300)), WIDE)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts(layout: str) -> None:
    right(e4m3(128, sizes=(2, 8, 2, 1000, 1000)), layout=layout)


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("schedule", ["dynamic", "plain"])
def test_memory_around_the_tensors_is_not_read_into_a_result(schedule: str, pack: int) -> None:
    """NaN before, between and behind all sequences and head dims changes nothing."""
    work = e4m3(80, sizes=(2, 8, 2, 130, 131), mask=masks.full())
    inputs, padded = make_inputs(work, DEVICE), {}
    for name in ("q", "k", "v"):
        tensor = getattr(inputs, name)
        b, h, s, d = tensor.shape
        whole = torch.full((b + 2, h + 2, s + 300, d + 32), 0x7F, device=DEVICE, dtype=torch.uint8)
        padded[name] = whole.view(E4M3)[1:-1, 1:-1, 150:-150, :d]
        padded[name].copy_(tensor)
    right(work, f"c2x1n64s2g4p{pack}_late_lazy_tree_lane_{schedule}", **padded)


def test_nan_in_v_reaches_the_rows_that_see_it_alone() -> None:
    work = e4m3(64, mask=masks.full(), sizes=(1, 2, 2, 100, 200))
    inputs = make_inputs(work, DEVICE)
    inputs.v.view(torch.uint8)[0, 1, 150, 7] = 0x7F
    out = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(1, 2, 100, device=DEVICE)
    Call(inputs, work.spec, out, lse, BASE.name, FAMILY.name)()
    assert bool(out[0, 1, :, 7].isnan().all()) and int(out.isnan().sum()) == 100
    assert bool(lse.isfinite().all())


def test_a_maximum_that_keeps_rising() -> None:
    """Each block of keys holds larger scores than all before, in either order of the walk: no weight may pass
    what 8 bits hold."""
    work = e4m3(64, mask=masks.full(), sizes=(1, 4, 4, 200, 1500))
    inputs = make_inputs(work, DEVICE)
    assert inputs.quantized is not None
    for first, last in ((0.1, 8.0), (8.0, 0.1)):
        ramp = torch.linspace(first, last, 1500, device=DEVICE)
        true_q = inputs.true()[0]
        k, factor = quantize(true_q.mean(2, keepdim=True) * 20 * ramp[None, None, :, None])
        quantized = replace(inputs.quantized, k=factor)
        for rescale in ("lazy", "always"):
            right(work, f"c2x1n64s2g4p1_late_{rescale}_tree_lane_dynamic", k=k, quantized=quantized)


# `flashgen.attention`


def expected(inputs: Inputs, work: Workload) -> Expected:
    return Expected(inputs, work.spec)


def called(inputs: Inputs, **named: Any) -> Any:
    given = {} if inputs.quantized is None else inputs.quantized.arguments()
    return flashgen.attention(
        inputs.q, inputs.k, inputs.v, mask=inputs.mask, score_mod=inputs.score_mod, scale=inputs.scale,
        layout=inputs.layout, **(given | named),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["numbers", "tensor", "heads", "groups", "sequences", "mixed"])
def test_every_form_of_the_factors(kind: str) -> None:
    work = e4m3(128, sizes=(2, 8, 2, 300, 400))
    inputs = make_inputs(work, DEVICE)

    def some(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, device=DEVICE) + 0.5) / 100

    quantized = {
        "numbers": Quantized(0.01, 0.008, 0.02),
        "tensor": Quantized(some(), some(1), some()),
        "heads": Quantized(some(8), some(2), some(2)),
        "groups": Quantized(some(2), some(2), some(2)),
        "sequences": Quantized(some(2, 8), some(2, 2), some(2, 2)),
        "mixed": Quantized(some(8, 2).T, 0.01, some(4)[::2]),
    }[kind]
    inputs = replace(inputs, quantized=replace(quantized, out_dtype=torch.float16))
    work = replace(work, spec=replace(work.spec, out_dtype="fp16"))
    out, lse = called(inputs, return_lse=True)
    assert out.dtype == torch.float16
    verdict = expected(inputs, work).judge(out, lse)
    assert verdict.ok, verdict.reason
    assert flashgen.explain(inputs.q, inputs.k, inputs.v, mask=inputs.mask).family == FAMILY.name


@pytest.mark.parametrize("zero", ["q", "k", "v"])
def test_a_factor_of_0_gives_no_nan(zero: str) -> None:
    work = e4m3(64, sizes=(1, 4, 2, 100, 100))
    inputs = make_inputs(work, DEVICE)
    assert inputs.quantized is not None
    nothing = torch.zeros((), device=DEVICE)
    inputs = replace(inputs, quantized=replace(inputs.quantized, **{zero: nothing}))
    out, lse = called(inputs, return_lse=True)
    verdict = expected(inputs, work).judge(out, lse)
    assert verdict.ok, verdict.reason


def test_a_negative_scale() -> None:
    work = e4m3(64, sizes=(1, 4, 2, 100, 100))
    inputs = replace(make_inputs(work, DEVICE), scale=-0.2)
    out, lse = called(inputs, return_lse=True)
    verdict = expected(inputs, work).judge(out, lse)
    assert verdict.ok, verdict.reason


def test_no_value_of_a_factor_is_read_on_the_host() -> None:
    inputs = make_inputs(e4m3(128, sizes=(1, 8, 2, 500, 500)), DEVICE)
    called(inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        called(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_reads_the_factors_of_its_replay() -> None:
    work = e4m3(128, sizes=(2, 8, 2, 500, 500))
    inputs = make_inputs(work, DEVICE)
    assert inputs.quantized is not None and isinstance(inputs.quantized.v, torch.Tensor)
    first = called(inputs).clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = called(inputs)
    inputs.quantized.v.mul_(2.0)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, 2 * first, atol=0, rtol=2.0**-7)


def test_what_descriptors_cannot_express_gets_torchs_attention() -> None:
    """Head dims whose rows are no multiples of 16 bytes."""
    work = e4m3(72, sizes=(2, 8, 2, 130, 131))
    inputs = make_inputs(work, DEVICE)
    out, lse = called(inputs, return_lse=True)
    assert flashgen.explain(inputs.q, inputs.k, inputs.v, mask=inputs.mask).family == "torch"
    verdict = expected(inputs, work).judge(out, lse)
    assert verdict.ok, verdict.reason


def test_a_compiled_model_calls_the_same_kernel() -> None:
    inputs = make_inputs(e4m3(128, sizes=(1, 8, 2, 500, 500)), DEVICE)
    assert inputs.quantized is not None
    factors = (inputs.quantized.q, inputs.quantized.k, inputs.quantized.v)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: Any, b: Any, c: Any) -> torch.Tensor:
        out: torch.Tensor = flashgen.attention(q, k, v, mask="causal", q_descale=a, k_descale=b, v_descale=c)
        return out

    given = (inputs.q, inputs.k, inputs.v, *factors)
    assert torch.equal(torch.compile(call, fullgraph=True)(*given), call(*given))


def test_c38_a_hundred_runs_give_the_same_bits() -> None:
    inputs = make_inputs(e4m3(128, sizes=(2, 8, 2, 777, 777)), DEVICE)
    first = called(inputs)
    for _ in range(100):
        assert torch.equal(called(inputs), first)


@pytest.mark.parametrize("seq,causal", [(8192, False), (8192, True), (16384, False)])
def test_long_sequences(seq: int, causal: bool) -> None:
    """The accumulation in 14 bits over many keys: a part of the heads is compared."""
    work = e4m3(128, mask=CAUSAL if causal else masks.full(), sizes=(1, 16, 16, seq, seq))
    inputs = make_inputs(work, DEVICE)
    out, lse = called(inputs, return_lse=True)
    verdict = Expected(inputs, work.spec, all_scores=2**31).judge(out, lse)
    assert verdict.ok, verdict.reason
