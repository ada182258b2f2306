"""Sinks of a call: on the CPU, with gradients, traced, refused, and in the dispatcher's key."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.build.reference import attention_reference
from flashgen.errors import InvalidArgument
from flashgen.runtime import torch_path
from flashgen.runtime.checks import Given, check
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.form import SPEC, checked


def tensors(dtype: torch.dtype = torch.float32, k_len: int = 9) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 6, 32), (2, 2, k_len, 32), (2, 2, k_len, 32), (4,))
    return tuple(torch.randn(shape, generator=draw).to(dtype) for shape in shapes)


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over the keys and one more, whose score is the sink and whose value is 0."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(32)
    keep = torch.arange(6)[:, None] + k.shape[2] - 6 >= torch.arange(k.shape[2])
    scores = torch.cat([scores.masked_fill(~keep, -math.inf), sinks.view(1, 4, 1, 1).expand(2, 4, 6, 1)], 3)
    values = torch.cat([v, torch.zeros(2, 4, 1, 32, dtype=v.dtype)], 2)
    return scores.softmax(3) @ values, scores.logsumexp(3)


@pytest.mark.parametrize("k_len", [9, 4])
def test_a_sink_is_one_more_score_without_a_value(k_len: int) -> None:
    q, k, v, sinks = tensors(k_len=k_len)
    out, lse = flashgen.attention(q, k, v, mask="causal", sinks=sinks, return_lse=True)
    expected, expected_lse = by_hand(*(each.double() for each in (q, k, v, sinks)))
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-6, rtol=1e-5)
    written_out, _ = torch_path.attention(
        check(q, k, v, "causal", None, None, "bhsd", True, Given(sinks=sinks))
    )
    torch.testing.assert_close(written_out, out, atol=1e-6, rtol=1e-5)
    bshd = (each.transpose(1, 2) for each in (q, k, v))
    again = flashgen.attention(*bshd, mask="causal", sinks=sinks, layout="bshd")
    torch.testing.assert_close(again.transpose(1, 2), out)


def test_gradients_reach_the_sinks() -> None:
    given = [each.double().float().requires_grad_() for each in tensors()]
    exact = [each.detach().double().requires_grad_() for each in given]
    weight = torch.randn(2, 4, 6, 32, generator=torch.Generator().manual_seed(8))
    out, lse = flashgen.attention(*given[:3], mask="causal", sinks=given[3], return_lse=True)
    ((out * weight).sum() + lse.sum()).backward()
    expected, expected_lse = by_hand(*exact)
    ((expected * weight).sum() + expected_lse.sum()).backward()
    for ours, theirs in zip(given, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-4)
    q, k, v, sinks = (each.detach() for each in given)
    alone = sinks.requires_grad_()
    flashgen.attention(q, k, v, sinks=alone).sum().backward()
    assert alone.grad is not None and (alone.grad != 0).all(), "though q, k and v need none"


def test_rows_and_calls_without_a_key_have_the_sink_as_lse() -> None:
    q, k, v, sinks = tensors(k_len=2)
    out, lse = flashgen.attention(q, k, v, mask="causal", sinks=sinks, return_lse=True)
    assert (out[:, :, :4] == 0).all()
    torch.testing.assert_close(lse[:, :, :4], sinks[:, None].expand(2, 4, 4))
    nothing = k[:, :, :0]
    out, lse = flashgen.attention(q, nothing, nothing, sinks=sinks.half(), return_lse=True)
    assert (out == 0).all() and torch.equal(lse, sinks.half().float()[:, None].expand(2, 4, 6))


def test_a_traced_call_is_the_same() -> None:
    q, k, v, sinks = tensors()
    torch._dynamo.reset()
    traced = torch.compile(flashgen.attention, backend="eager", fullgraph=True)
    for each in (sinks, None):
        ours = traced(q, k, v, mask="causal", sinks=each)
        torch.testing.assert_close(ours, flashgen.attention(q, k, v, mask="causal", sinks=each))


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"sinks has shape \(3,\); q has 4 heads, so \(4,\)"),
        (torch.zeros(2), r"q has 4 heads"),
        (torch.zeros(1, 4), r"sinks has shape \(1, 4\)"),
        (
            torch.zeros(4, dtype=torch.float64),
            r"must be None or a float32, float16 or bfloat16 tensor \(heads,\)",
        ),
        (torch.zeros(4, dtype=torch.int32), "convert it"),
        ([0.0] * 4, r"sinks=\[0.0, 0.0, 0.0, 0.0\] must be None or"),
        (torch.zeros(4, device="meta"), "sinks is on meta, q on cpu; move one"),
        (torch.zeros(4).to_sparse(), "sinks is torch.sparse_coo; only dense"),
    ],
)
def test_other_sinks_are_refused(sinks: Any, message: str) -> None:
    q, k, v, _ = tensors()
    for call in (flashgen.attention, flashgen.explain):
        with pytest.raises(InvalidArgument, match=message):
            call(q, k, v, sinks=sinks)


def test_they_are_told_and_part_of_the_spec_alone() -> None:
    q, k, v, sinks = tensors()
    assert "sinks" in str(flashgen.explain(q, k, v, sinks=sinks))
    assert "sinks" not in str(flashgen.explain(q, k, v))
    spec = check(q, k, v, None, None, None, "bhsd", False, Given(sinks=sinks.bfloat16())).workload().spec
    assert spec.sinks == "bf16" and AttentionSpec.from_json(checked(spec.to_json(), SPEC, "spec")) == spec
    plain = replace(spec, sinks="")
    assert spec.tuned_as() == plain.tuned_as() and spec.key == plain.key and "sinks" not in plain.to_json()
    with pytest.raises(InvalidArgument, match="sinks='i32' are not served"):
        replace(spec, sinks="i32")
    assert Workload(spec, 1, 2, 2, 4, 4).bucket() == Workload(plain, 1, 2, 2, 4, 4).bucket()


def test_8_bit_tensors_have_sinks_too() -> None:
    q, k, v, sinks = tensors()
    small = [(each * 8).to(torch.float8_e4m3fn) for each in (q, k, v)]
    factors = {"q_descale": 0.125, "k_descale": 0.125, "v_descale": 0.125}
    out, lse = flashgen.attention(*small, **factors, sinks=sinks, return_lse=True)
    expected, expected_lse = attention_reference(*(each.float() / 8 for each in small), sinks=sinks)
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
