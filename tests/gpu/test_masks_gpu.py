"""Named masks and score rules, and sinks, at sizes that are used, in both families and by the dispatcher."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checked import DEVICE, check, skip_unless_served, workload

import flashgen
from flashgen.build.inputs import make_inputs
from flashgen.build.reference import attention_reference
from flashgen.errors import CompileFailed, DoesNotFit
from flashgen.spec import masks, score_mods
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import ScoreMod

SIZES = (2, 8, 2, 2100, 2100)
NAMED = [
    masks.document("ordered"),
    masks.causal() & masks.document("ordered"),
    masks.sliding_window(200, 30) & masks.document("ordered"),
    ~masks.document("ordered"),
    masks.prefix_lm(),
    masks.prefix_lm("i64") & masks.sliding_window(512, None),
    masks.dilated(300, 3),
    masks.causal() & masks.dilated(1024, 4),
    masks.sliding_window(128, 128) | masks.global_tokens(5),
    masks.neighborhood(257),
    masks.neighborhood((35, 60), (7, 13)),
    masks.neighborhood((50, 42), (9, 9)) | masks.global_tokens(2),
    masks.block_sparse(),
    masks.causal() & masks.block_sparse("batch_heads", 64),
    ~masks.block_sparse("heads", (32, 128)),
]
RULES = [
    score_mods.alibi(),
    score_mods.bias("bhqk", "bf16"),
    score_mods.bias("qk", "fp32"),
    score_mods.bias("bk", "fp16"),
    score_mods.bias("hq"),
    score_mods.relative("fp32", 128),
    score_mods.compose([score_mods.scale(0.5), score_mods.softcap(20.0), score_mods.bias("hqk")]),
]
FAMILIES = ("attention_fwd", "attention_fwd_sm90")
PACKED = "c2x1n64s2g4p4_late_lazy_tree_lane_dynamic"
SPLIT = {
    "attention_fwd": "m64n64w4s2k8_tma_heads",
    "attention_fwd_sm90": "c1x1n64s2g4p4k8_late_lazy_tree_lane_dynamic",
}


def check_or_skip(*args: object, **kwargs: object) -> None:
    """A default that the compiler refuses is another family's to serve, which is told."""
    try:
        check(*args, **kwargs)  # type: ignore[arg-type]
    except (DoesNotFit, CompileFailed) as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", NAMED, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_masks(family: str, mask: Mask, dim: int) -> None:
    skip_unless_served(family)
    check_or_skip(workload(dim, mask=mask, sizes=SIZES), family=family)


@pytest.mark.parametrize("lengths", [(300, 2100), (2100, 300), (1, 4096)], ids=str)
@pytest.mark.parametrize("mask", NAMED, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_more_keys_or_more_queries(family: str, mask: Mask, lengths: tuple[int, int]) -> None:
    skip_unless_served(family)
    check_or_skip(workload(64, mask=mask, sizes=(2, 4, 2, *lengths)), family=family)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [masks.causal(), masks.full(), masks.block_sparse()], ids=str)
@pytest.mark.parametrize("mod", RULES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_score_rules(family: str, mod: ScoreMod, mask: Mask, dim: int) -> None:
    skip_unless_served(family)
    check_or_skip(workload(dim, mask=mask, score_mod=mod, sizes=(2, 4, 2, 1100, 1300)), family=family)


@pytest.mark.parametrize("sinks", ["bf16", "fp32"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(127, 0)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_sinks(family: str, mask: Mask, sinks: str) -> None:
    skip_unless_served(family)
    work = workload(64, mask=mask, sizes=SIZES)
    work = replace(work, spec=replace(work.spec, sinks=sinks))
    for config in ("", SPLIT[family], *([PACKED] if "sm90" in family else [])):
        check(work, config, family=family)


def test_a_bias_of_minus_infinity_is_no_weight() -> None:
    table = torch.randn(1, 4, 700, 900, device=DEVICE)
    table[0, :, 100:130] = table[0, 1] = -math.inf
    table[table > 1.0] = -math.inf
    mod = score_mods.bias(table)
    q, k, v = (torch.randn(2, h, n, 64, device=DEVICE).bfloat16() for h, n in ((4, 700), (2, 900), (2, 900)))
    out, lse = flashgen.attention(q, k, v, score_mod=mod, return_lse=True)
    exact, exact_lse = attention_reference(q, k, v, score_mod=mod)
    assert (out[:, :, 100:130] == 0).all() and (lse[:, 1] == -math.inf).all()
    torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sinks_by_the_dispatcher(dtype: torch.dtype, layout: str) -> None:
    work = workload(64, mask=masks.sliding_window(127, 0), sizes=(2, 8, 2, 900, 900))
    made = make_inputs(work, DEVICE)
    q, k, v = (each.to(dtype) for each in (made.q, made.k, made.v))
    for sinks in (torch.randn(8, device=DEVICE) + 4, torch.randn(8, device=DEVICE).bfloat16(), None):
        given = [each if layout == "bhsd" else each.transpose(1, 2).contiguous() for each in (q, k, v)]
        out, lse = flashgen.attention(*given, mask=made.mask, sinks=sinks, layout=layout, return_lse=True)
        exact, exact_lse = attention_reference(q, k, v, mask=made.mask, sinks=sinks)
        out = out if layout == "bhsd" else out.transpose(1, 2)
        torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-3)


def test_documents_of_a_packed_row_do_not_wait_for_the_gpu() -> None:
    edges = torch.tensor([0, 700, 700, 1900, 4096], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(1, 4, 4096, 64, device=DEVICE).bfloat16() for _ in range(3))
    flashgen.attention(q, k, v, mask=masks.causal() & masks.document(cu_seqlens=edges, length=4096))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = masks.causal() & masks.document(cu_seqlens=edges, length=4096)
        out = flashgen.attention(q, k, v, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for start, stop in ((0, 700), (700, 1900), (1900, 4096)):
        part = (each[:, :, start:stop] for each in (q, k, v))
        exact, _ = attention_reference(*part, mask=masks.causal())
        torch.testing.assert_close(out[:, :, start:stop].float(), exact, atol=2e-2, rtol=2e-2)
