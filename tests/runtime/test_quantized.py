"""`flashgen.attention` of 8-bit tensors without a GPU: what they mean, in graphs too, and what is refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import flashgen
from flashgen import masks, score_mods
from flashgen.build.quantized import E4M3, Quantized, quantize
from flashgen.build.reference import attention_reference
from flashgen.errors import InvalidArgument
from flashgen.runtime.checks import Given, as_quantized


def draw(head_dim: int = 32) -> tuple[list[Tensor], list[Tensor]]:
    """q of 6 heads, k and v of 2, stored in 8 bits, and the factors of each sequence's heads."""
    generator = torch.Generator().manual_seed(0)
    made = [
        quantize(3 * torch.randn(2, heads, rows, head_dim, generator=generator))
        for heads, rows in ((6, 40), (2, 50), (2, 50))
    ]
    return [stored for stored, _ in made], [factor for _, factor in made]


def named(q: Any = None, k: Any = None, v: Any = None) -> dict[str, Any]:
    return {"q_descale": q, "k_descale": k, "v_descale": v}


RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": "causal"},
    "window": {"mask": masks.sliding_window(7, 2)},
    "softcap": {"mask": "causal", "score_mod": score_mods.softcap(2.0)},
    "scale": {"scale": -0.3},
}


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_it_is_the_attention_of_the_true_values(name: str, out_dtype: torch.dtype | None) -> None:
    (q, k, v), factors = draw()
    rules = RULES[name]
    out, lse = flashgen.attention(q, k, v, return_lse=True, out_dtype=out_dtype, **named(*factors), **rules)
    mask = masks.causal() if rules.get("mask") == "causal" else rules.get("mask")
    true = [s.float() * f[..., None, None] for s, f in zip((q, k, v), factors, strict=True)]
    exact, exact_lse = attention_reference(
        *true, mask=mask, **{k: v for k, v in rules.items() if k != "mask"}
    )
    assert out.dtype == (out_dtype or torch.bfloat16)
    torch.testing.assert_close(out, exact.to(out.dtype))
    torch.testing.assert_close(lse, exact_lse)


def test_factors_may_be_numbers_of_the_tensor_of_heads_or_left_out() -> None:
    (q, k, v), _ = draw()
    expected = flashgen.attention(q, k, v, **named(0.5, 0.01, 3.0))
    ways = [
        named(torch.tensor(0.5), torch.tensor([0.01]), torch.full((2,), 3.0)),
        named(torch.full((6,), 0.5), torch.full((2, 2), 0.01), torch.tensor(3)),
        named(torch.full((2, 2), 0.5), 0.01, 3),
    ]
    ways[1]["v_descale"] = 3.0
    for way in ways:
        assert torch.equal(flashgen.attention(q, k, v, **way), expected)
    ones = flashgen.attention(q, k, v, **named(1.0, 1.0, 1.0))
    assert torch.equal(flashgen.attention(q, k, v), ones) and not torch.equal(ones, expected)


def test_layouts_give_the_same() -> None:
    (q, k, v), factors = draw()
    turned = [each.transpose(1, 2).contiguous() for each in (q, k, v)]
    out = flashgen.attention(*turned, layout="bshd", **named(*factors))
    assert torch.equal(out.transpose(1, 2), flashgen.attention(q, k, v, **named(*factors)))


@pytest.mark.parametrize("factors", ["tensors", "numbers", "mixed"])
def test_a_graph_computes_the_same(factors: str) -> None:
    torch._dynamo.reset()
    (q, k, v), tensors = draw()
    given = {"tensors": tensors, "numbers": [0.02, 0.01, 2.0], "mixed": [tensors[0], None, 2.0]}[factors]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashgen.attention(
            q, k, v, mask="causal", return_lse=True, out_dtype=torch.float16, **named(*given)
        )

    for got, wanted in zip(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v), strict=True):
        assert got.dtype == wanted.dtype
        # Numbers of q and k are in the graph's scale, and q and k are then not multiplied.
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=2e-3)


def test_the_operators_fake_says_what_the_real_one_gives() -> None:
    (q, k, v), factors = draw()
    arguments = (q, k, v, [], "True", "full", "", "", [], 0.2, "bhsd", True)
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")  # test_schema adds up 8-bit numbers, and cannot
    operator = torch.ops.flashgen.attention_fwd.default
    torch.library.opcheck(operator, arguments, test_utils=tests)
    torch.library.opcheck(
        operator, (*arguments, factors[0], None, None, 2.0, torch.float16), test_utils=tests
    )


def test_gradients_flow_to_the_factors() -> None:
    (q, k, v), factors = draw()
    for factor in factors:
        factor.requires_grad_(True)
    out, _ = flashgen.attention(q, k, v, mask="causal", return_lse=True, **named(*factors))
    out.float().square().sum().backward()
    got = [factor.grad for factor in factors]
    fresh = [factor.detach().clone().requires_grad_(True) for factor in factors]
    exact, _ = attention_reference(*Quantized(*fresh).true(q, k, v), mask=masks.causal())
    exact.square().sum().backward()
    for one, other in zip(got, fresh, strict=True):
        torch.testing.assert_close(one, other.grad, rtol=2e-2, atol=1.0)


def test_autocast_leaves_8_bit_tensors_as_they_are() -> None:
    (q, k, v), factors = draw()
    expected = flashgen.attention(q, k, v, out_dtype=torch.float16, **named(*factors))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = flashgen.attention(q, k, v, out_dtype=torch.float16, **named(*factors))
    assert got.dtype == torch.float16 and torch.equal(got, expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (named(q=torch.ones(3)), r"q_descale has shape \(3,\); allowed: .*\(6,\), \(2, 6\), \(2,\), \(2, 2\)"),
    (named(k=torch.ones(6)), r"k_descale has shape \(6,\); allowed: \(\), \(1,\), \(2,\), \(2, 2\): of the"),
    (named(k=torch.ones(1, 2)), r"k_descale has shape \(1, 2\)"),
    (
        named(v=torch.ones(2, dtype=torch.float64)),
        "v_descale is torch.float64 on cpu; it must be torch.float32",
    ),
    (named(v=torch.ones(2, device="meta")), "v_descale is torch.float32 on meta; it must be .* on cpu"),
    (named(k=-1.0), "k_descale=-1.0 must be from 0"),
    (named(k=float("nan")), "k_descale=nan must be from 0"),
    (named(v="much"), "v_descale='much' must be None, a number or a float32 tensor"),
    (named(v=True), "v_descale=True must be None"),
    (named(v=10**400), "v_descale=inf must be from 0"),
    (named(v=numpy.ones(2)), r"v_descale=array\(.*\) must be None, a number or a float32 tensor"),
    (named(v=Decimal("sNaN")), "v_descale=Decimal.* must be None, a number or a float32 tensor"),
    (named(k=torch.ones(2).to_sparse()), "k_descale is torch.sparse_coo; only dense"),
    ({"out_dtype": torch.float32}, "out_dtype=torch.float32 of torch.float8_e4m3fn tensors is not served"),
    ({"out_dtype": "bf16"}, "out_dtype='bf16' of torch.float8_e4m3fn tensors is not served; allowed: torch"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_8_bit_tensors_cannot_have_is_refused(given: dict[str, Any], message: str) -> None:
    (q, k, v), _ = draw()
    with pytest.raises(InvalidArgument, match=message):
        flashgen.attention(q, k, v, **given)
    with pytest.raises(InvalidArgument, match=message):
        flashgen.explain(q, k, v, **given)


def test_a_kernel_gets_the_values_of_a_factor_negated_lazily() -> None:
    (q, k, _), (q_factor, _, _) = draw()
    lazy = torch.complex(q_factor, -q_factor).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, q_factor)
    held = as_quantized(Given(q_descale=lazy), q, k, "bhsd")
    assert held is not None and isinstance(held.q, Tensor)
    assert not held.q.is_neg() and torch.equal(held.q, q_factor)


def test_tensors_of_other_dtypes_have_no_factors_and_their_own_output() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    with pytest.raises(
        InvalidArgument, match=r"k_descale is given, but q is torch.float32: only 8-bit tensors"
    ):
        flashgen.attention(q, k, v, k_descale=1.0)
    with pytest.raises(
        InvalidArgument, match=r"out_dtype=torch.float16 of torch.float32 tensors is not served"
    ):
        flashgen.attention(q, k, v, out_dtype=torch.float16)
    assert torch.equal(flashgen.attention(q, k, v, out_dtype=torch.float32), flashgen.attention(q, k, v))
    with pytest.raises(
        InvalidArgument, match=r"k.dtype=torch.float32 must be that of q, torch.float8_e4m3fn"
    ):
        flashgen.attention(q.to(E4M3), k, v)


def test_it_is_explained_with_the_dtype_of_the_output() -> None:
    (q, k, v), _ = draw()
    assert "e4m3 to fp16" in flashgen.explain(q, k, v, out_dtype=torch.float16).subject
    with pytest.raises(InvalidArgument, match="those of 8-bit tensors"):
        flashgen.explain(q, k, v, is_causal=True, q_descale=1.0)


def test_without_keys_the_output_is_0_in_its_dtype() -> None:
    (q, k, v), _ = draw()
    out = flashgen.attention(q, k[:, :, :0], v[:, :, :0], out_dtype=torch.float16)
    assert out.dtype == torch.float16 and out.shape == q.shape and not out.any()
