"""8-bit tensors: what they stand for, and what a launch is told of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashgen.build.arguments import flatten
from flashgen.build.inputs import make_inputs
from flashgen.build.quantized import E4M3, Quantized, quantize
from flashgen.build.reference import E4M3_LIFT, attention_reference
from flashgen.codegen.abi import environment_names
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec, Workload


def test_quantised_values_fill_the_range_and_are_off_by_half_a_step() -> None:
    values = torch.randn(2, 3, 50, 16) * torch.tensor([1e-3, 1.0, 1e4]).view(3, 1, 1)
    values[1, 1] = 0.0
    stored, factor = quantize(values)
    assert stored.dtype == E4M3 and factor.shape == (2, 3) and bool((factor > 0).all())
    largest = stored.float().abs().amax((2, 3))
    assert largest[1, 1] == 0 and set(largest.flatten().tolist()) == {0.0, 448.0}
    true = Quantized(factor).true(stored, stored, stored)[0]
    off = (true - values).abs() / values.abs().clamp_min(factor[..., None, None] * 2.0**-6)
    assert float(off.max()) <= 2.0**-4 * 1.001


@pytest.mark.parametrize("shape", [(), (1,), (2,), (6,), (2, 2), (2, 6)], ids=str)
def test_a_factor_is_of_the_tensor_of_heads_or_of_sequences(shape: tuple[int, ...]) -> None:
    """Of queries by their own heads or by those of keys; the strides say the same as the values."""
    stored = torch.randn(2, 6, 5, 16).to(E4M3)
    factor = torch.rand(shape) + 0.5
    k = torch.randn(2, 2, 5, 16).to(E4M3)
    got = Quantized(factor).true(stored, k, k)[0]
    batch, kv_head, member = Quantized(factor).entries(2, 3)[2:5]
    flat = factor.flatten()
    for b in range(2):
        for h in range(6):
            at = b * batch + h // 3 * kv_head + h % 3 * member
            assert torch.equal(got[b, h], stored[b, h].float() * flat[at])


def test_numbers_join_the_scale_and_what_is_no_tensor_has_no_address() -> None:
    factor, one = torch.ones(3, 2), torch.ones(1)
    quantized = Quantized(2.0, 0.25, factor)
    assert quantized.folded(3.0) == 1.5 and quantized.folded(1e-38) == 0.0
    assert quantized.entries(2, 4) == (1.0, 0, 0, 0, 0, 0, 0, 0, factor.data_ptr(), 2, 1)
    turned = torch.ones(2, 3).T  # (3, 2) with the strides (1, 3)
    assert Quantized(one, turned, 0.5).entries(2, 4) == (
        *(0.5, one.data_ptr(), 0, 0, 0),
        *(turned.data_ptr(), 1, 3, 0, 0, 0),
    )
    assert Quantized(one, 3.0).of_scores == 3.0 and Quantized(3.0, one).of_scores == 3.0


def workload(**changes: Any) -> Workload:
    spec = AttentionSpec(32, 48, "e4m3", masks.causal().rule, return_lse=True, **changes)
    return Workload(spec, 2, 6, 2, 40, 50)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_inputs_are_quantised_normal_numbers_with_factors_of_heads(layout: str) -> None:
    inputs = make_inputs(workload(out_dtype="fp16"), "cpu", layout)
    assert {each.dtype for each in (inputs.q, inputs.k, inputs.v)} == {E4M3}
    assert inputs.quantized is not None and inputs.quantized.out_dtype == torch.float16
    factors = [inputs.quantized.q, inputs.quantized.k, inputs.quantized.v]
    assert [tuple(each.shape) for each in factors] == [(2, 6), (2, 2), (2, 2)]
    plain = make_inputs(
        Workload(AttentionSpec(32, 48, "fp32", masks.causal().rule), 2, 6, 2, 40, 50), "cpu", layout
    )
    for true, normal in zip(inputs.true(), plain.true(), strict=True):
        assert true.is_contiguous() == (layout == "bhsd")
        torch.testing.assert_close(true, normal, atol=0.15, rtol=2.0**-4)


def test_the_environment_ends_with_what_8_bit_inputs_stand_for() -> None:
    inputs = make_inputs(workload(), "cpu")
    out = torch.empty(2, 6, 40, 48, dtype=torch.bfloat16)
    env = inputs.environment(out, None)
    names = environment_names(workload().spec)
    assert len(env) == len(names) == len(flatten(inputs.q, inputs.k, inputs.v, out, None, 1.0)) + 11
    told = dict(zip(names, env, strict=True))
    assert inputs.quantized is not None
    assert told["descale.k"] == inputs.quantized.k.data_ptr() and told["v_factor"] == 1.0
    assert [told[f"descale.q.stride.{axis}"] for axis in ("batch", "kv_head", "member")] == [6, 3, 1]
    assert "v_factor" not in environment_names(AttentionSpec(32, 48, "bf16"))


def test_the_reference_rounds_weights_of_8_bits_where_they_keep_digits() -> None:
    """A weight of 2^-10 is a third of the least step of e4m3 as it is, and exact when it is lifted."""
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [-10 * math.log(2)]]]])
    v = torch.tensor([[[[0.0], [1024.0]]]])
    out, lse = attention_reference(
        q, k, v, scale=1.0, round_p_to=E4M3, round_out_to=torch.float32, lift=E4M3_LIFT
    )
    exact, exact_lse = attention_reference(q, k, v, scale=1.0)
    torch.testing.assert_close(out, exact)
    assert torch.equal(lse, exact_lse) and 2.0**-10 * E4M3_LIFT >= 2.0**-6


def test_the_output_is_rounded_to_its_own_dtype() -> None:
    q, k, v = torch.randn(3, 1, 1, 8, 16)
    out, _ = attention_reference(q, k, v, round_p_to=E4M3, round_out_to=torch.bfloat16, lift=E4M3_LIFT)
    assert torch.equal(out, out.to(torch.bfloat16).float()) and not torch.equal(out, out.to(E4M3).float())
