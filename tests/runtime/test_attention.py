"""`flashgen.attention` without a GPU: the reference, and torch's operations where a gradient is needed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import flashgen
from flashgen import masks, score_mods
from flashgen.api import attention
from flashgen.build.reference import attention_reference, evaluate_rule
from flashgen.runtime import torch_path
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import ScoreMod


def draw(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 9,
    k_len: int = 13,
    head_dim: int = 32,
    head_dim_v: int = 32,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, q_len, head_dim), (kv_heads, k_len, head_dim), (kv_heads, k_len, head_dim_v))
    q, k, v = (torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


DOCUMENTS = torch.arange(26).view(2, 13) % 3
IN_ORDER = [masks.document(cu_seqlens=torch.tensor(ends), length=13) for ends in ([0, 5, 5, 11], [0, 13])]
ORDERED = IN_ORDER[0].bind(torch.cat([each.tensors[0] for each in IN_ORDER]))
KEEP = torch.tensor([[True] * 5 + [False] * 8, [False] * 13])
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": "causal"},
    "top left": {"mask": masks.causal("top_left")},
    "window": {"mask": masks.sliding_window(3, 1)},
    "padding": {"mask": masks.key_padding(torch.tensor([13, 4]))},
    "no key at all in one sequence": {"mask": masks.key_padding(KEEP)},
    "causal and padding": {"mask": masks.causal() & masks.key_padding(KEEP)},
    "documents": {"mask": masks.document(DOCUMENTS)},
    "causal and documents": {"mask": masks.causal() & masks.document(DOCUMENTS.int())},
    "causal and documents in order": {"mask": masks.causal() & ORDERED},
    "not causal": {"mask": ~masks.causal()},
    "text": {"mask": "causal & sliding_window(4, 0) | full"},
    "softcap": {"score_mod": score_mods.softcap(1.5), "mask": "causal"},
    "two rules": {"score_mod": [score_mods.softcap(1.5), score_mods.softcap(0.7)]},
    "scale": {"scale": 0.7, "mask": "causal"},
    "negative scale": {"scale": -0.7, "mask": "causal"},
    "scale 0": {"scale": 0, "mask": "causal"},
}


def exact(q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> tuple[Tensor, Tensor]:
    """Plain softmax attention in float64, written for this test: differentiable, safe for empty rows."""
    mask = flashgen.runtime.checks.as_mask(rules.get("mask"))
    score_mod = flashgen.runtime.checks.as_score_mod(rules.get("score_mod"))
    scale = rules.get("scale", q.shape[3] ** -0.5)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    head = torch.arange(q.shape[1]).view(-1, 1, 1)
    env = {
        "q_idx": torch.arange(q.shape[2]).view(-1, 1),
        "k_idx": torch.arange(k.shape[2]),
        "q_len": q.shape[2],
        "k_len": k.shape[2],
        "batch": torch.arange(q.shape[0]).view(-1, 1, 1, 1),
        "head": head,
        "kv_head": head // group,
    }
    if score_mod is not None:
        scores = evaluate_rule(score_mod, env | {"score": scores})
    seen = torch.as_tensor(evaluate_rule(mask, env)).expand(scores.shape)
    some = seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen & some, -math.inf), -1)
    out = torch.einsum("bhqk,bhkd->bhqd", weights, v) * some
    lse = torch.logsumexp(scores.masked_fill(~seen & some, -math.inf), -1)
    return out, lse.masked_fill(~some[..., 0], -math.inf)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpu_tensors_get_the_reference_in_their_dtype(rules: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = draw(dtype=dtype)
    out, lse = attention(q, k, v, **rules, return_lse=True)
    expected, expected_lse = exact(q.double(), k.double(), v.double(), **rules)
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.grad_fn is None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, atol=max(4 * eps, 3e-6), rtol=eps)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    assert torch.equal(attention(q, k, v, **rules), out)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_gradients_are_those_of_plain_attention(rules: dict[str, Any], return_lse: bool) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in draw(head_dim_v=16))
    result = attention(q, k, v, **rules, return_lse=return_lse)
    exact_q, exact_k, exact_v = (tensor.detach().double().requires_grad_() for tensor in (q, k, v))
    expected = exact(exact_q, exact_k, exact_v, **rules)
    weight = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(3))
    out = result[0] if return_lse else result
    torch.testing.assert_close(out.double(), expected[0], atol=2e-6, rtol=1e-5)
    loss, exact_loss = (out * weight).sum(), (expected[0] * weight.double()).sum()
    if return_lse:
        torch.testing.assert_close(result[1].double(), expected[1], atol=1e-5, rtol=1e-5)
        loss = loss + result[1].masked_fill(result[1] == -math.inf, 0).sum()
        exact_loss = exact_loss + expected[1].masked_fill(expected[1] == -math.inf, 0).sum()
    loss.backward()
    exact_loss.backward()
    for ours, theirs in ((q, exact_q), (k, exact_k), (v, exact_v)):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_an_output_has_a_grad_fn_whichever_input_needs_one(which: str) -> None:
    given = dict(zip("qkv", draw(), strict=True))
    given[which].requires_grad_()
    assert attention(**given).grad_fn is not None
    with torch.no_grad():
        assert attention(**given).grad_fn is None
    with torch.inference_mode():
        assert not attention(**given).requires_grad


def test_scores_written_out_in_slices_give_the_same_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> list[Tensor]:
        q, k, v = (tensor.requires_grad_() for tensor in draw())
        mask = masks.causal() & masks.key_padding(KEEP)
        out, lse = attention(q, k, v, mask=mask, score_mod=score_mods.softcap(2.0), return_lse=True)
        grads = torch.autograd.grad(out.square().sum() + lse[0].sum(), (q, k, v))
        return [out.detach(), lse.detach(), *grads]

    whole = run()
    monkeypatch.setattr(torch_path, "CHUNK_SCORES", 2 * 4 * 13 * 2)  # two rows at a time, of nine
    for one, other in zip(whole, run(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_c01_a_row_that_sees_nothing_is_zero_and_poisons_no_gradient() -> None:
    q, k, v = (torch.randn(1, 1, 4, 16).requires_grad_() for _ in range(3))
    nothing = masks.key_padding(torch.zeros(1, 4, dtype=torch.bool))
    for return_lse in (False, True):
        result = attention(q, k, v, mask=~masks.causal(), return_lse=return_lse)  # the last row sees nothing
        out = result[0] if return_lse else result
        assert torch.equal(out[0, 0, 3], torch.zeros(16))
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.isfinite(grad).all() for grad in grads)
        assert torch.equal(grads[0][0, 0, 3], torch.zeros(16))
    out, lse = attention(q, k, v, mask=nothing, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()
    for grad in torch.autograd.grad(out.sum() + lse.masked_fill(lse == -math.inf, 0).sum(), (q, k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize(("q_len", "k_len"), [(5, 2), (2, 5)])
@pytest.mark.parametrize("gradient", [False, True])
def test_c02_causal_lines_up_the_last_query_with_the_last_key(q_len: int, k_len: int, gradient: bool) -> None:
    q, k, v = draw(1, 1, 1, q_len, k_len, 16, 16)
    q.requires_grad_(gradient)
    out, lse = attention(q, k, v, mask="causal", return_lse=True)
    plain = attention(q, k, v, mask="causal")
    for row in range(q_len):
        visible = row + k_len - q_len + 1
        if visible <= 0:
            assert torch.equal(out[0, 0, row], torch.zeros(16)) and lse[0, 0, row] == -math.inf
        else:
            expected = attention_reference(q[:, :, row : row + 1], k[:, :, :visible], v[:, :, :visible])
            torch.testing.assert_close(out[0, 0, row], expected[0][0, 0, 0], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(lse[0, 0, row], expected[1][0, 0, 0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(plain, out, atol=1e-6, rtol=1e-5)
    if gradient:
        grad = torch.autograd.grad(plain.sum(), q)[0]
        hidden = max(q_len - k_len, 0)
        assert torch.equal(grad[0, 0, :hidden], torch.zeros(hidden, 16))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c03_scores_of_minus_ten_million_are_scores(gradient: bool, dtype: torch.dtype) -> None:
    q = torch.full((1, 1, 4, 128), 300.0, dtype=dtype, requires_grad=gradient)
    k = torch.full((1, 1, 8, 128), -300.0, dtype=dtype)
    v = torch.randn(1, 1, 8, 128).to(dtype)
    out = attention(q, k, v, mask=masks.sliding_window(None, 4), scale=1.0)
    _, lse = attention(q, k, v, mask=masks.sliding_window(None, 4), scale=1.0, return_lse=True)
    torch.testing.assert_close(out[0, 0, 3], v[0, 0].float().mean(0).to(dtype), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[0, 0, 3].item(), -1.152e7 + math.log(8), rtol=1e-6, atol=1.0)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_scores_that_are_nan_or_infinite_are_told(mask: str | None, bad: float, gradient: bool) -> None:
    q, k, v = (tensor.abs() + 10 for tensor in draw())
    q[1, 2, 4] = bad
    q.requires_grad_(gradient)
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    assert out[1, 2, 4].isnan().all() and lse[1, 2, 4].isnan()
    assert out.isnan().sum() == 32 and lse.isnan().sum() == 1 and not lse.isinf().any()
    torch.testing.assert_close(attention(q, k, v, mask=mask), out, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("mask", [None, "causal", masks.document(torch.zeros(2, 0, dtype=torch.int32))])
def test_c04_no_keys_and_no_queries(mask: Mask | str | None, gradient: bool) -> None:
    q, k, v = draw(q_len=8, k_len=0, head_dim=64, head_dim_v=16)
    for tensor in (q, k, v):
        tensor.requires_grad_(gradient)
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 4, 8, 16)) and torch.equal(lse, torch.full((2, 4, 8), -math.inf))
    assert torch.equal(attention(q, k, v, mask=mask), out)
    if gradient:
        grads = torch.autograd.grad(attention(q, k, v, mask=mask).sum(), (q, k, v))
        assert torch.equal(grads[0], torch.zeros_like(q)) and grads[1].shape == k.shape
    out, lse = attention(q[:, :, :0], torch.ones(2, 2, 5, 64), torch.ones(2, 2, 5, 16), return_lse=True)
    assert out.shape == (2, 4, 0, 16) and lse.shape == (2, 4, 0)
    assert attention(q[:0], k[:0], v[:0]).shape == (0, 4, 8, 16)


@pytest.mark.parametrize("gradient", [False, True])
def test_c12_views_of_one_fused_tensor_give_what_copies_give(gradient: bool) -> None:
    fused = torch.randn(2, 12, 3, 4, 32)  # (batch, seq, qkv, heads, dim)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    odd = torch.randn(2, 4, 32, 12).transpose(2, 3)  # the innermost axis is not the head dim
    for query in (q, odd, q[:, :1].expand(-1, 4, -1, -1)):
        copies = [tensor.contiguous().requires_grad_(gradient) for tensor in (query, k, v)]
        views = [tensor.detach().requires_grad_(gradient) for tensor in (query, k, v)]
        torch.testing.assert_close(attention(*views, mask="causal"), attention(*copies, mask="causal"))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("head_dim_v", [32, 16, 64])
def test_c41_out_strides_follow_q(head_dim_v: int, gradient: bool) -> None:
    q, k, v = draw(head_dim_v=head_dim_v)
    q = q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(gradient)
    for options in ({}, {"mask": "causal"}, {"score_mod": score_mods.softcap(3.0)}):
        out = attention(q, k, v, **options)
        assert out.transpose(1, 2).is_contiguous(), options
    q = q.detach().contiguous().requires_grad_(gradient)
    assert attention(q, k, v, mask="causal").is_contiguous()


@pytest.mark.parametrize("gradient", [False, True])
def test_bshd_is_the_same_in_another_order_of_axes(gradient: bool) -> None:
    q, k, v = draw(head_dim_v=16)
    q.requires_grad_(gradient)
    out, lse = attention(q, k, v, mask="causal", return_lse=True)
    other = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    out2, lse2 = attention(*other, mask="causal", layout="bshd", return_lse=True)
    assert out2.shape == (2, 9, 4, 16) and out2.is_contiguous()
    torch.testing.assert_close(out2.transpose(1, 2), out)
    torch.testing.assert_close(lse2, lse)


def test_parameters_are_tensors_too() -> None:
    q, k, v = (torch.nn.Parameter(tensor) for tensor in draw())
    assert attention(q, k, v).grad_fn is not None
    with torch.no_grad():
        torch.testing.assert_close(attention(q, k, v), attention(q.data, k.data, v.data))


# Forward-mode derivatives and the transforms of torch.func, none of which shows on the tensors


def jvp_in_a_dual_level(function: Any, primals: list[Tensor], tangents: list[Tensor]) -> Any:
    with forward_ad.dual_level():
        out = function(*(forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)))
        return forward_ad.unpack_dual(out)


def jvp_by_transform(function: Any, primals: list[Tensor], tangents: list[Tensor]) -> Any:
    return torch.func.jvp(function, tuple(primals), tuple(tangents))


def jvp_compiled(function: Any, primals: list[Tensor], tangents: list[Tensor]) -> Any:
    compiled = torch.compile(lambda p, t: torch.func.jvp(function, p, t), backend="aot_eager", fullgraph=True)
    return compiled(tuple(primals), tuple(tangents))


@pytest.mark.parametrize("way", [jvp_in_a_dual_level, jvp_by_transform])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_forward_mode_derivatives_are_those_of_plain_attention(rules: dict[str, Any], way: Any) -> None:
    inputs = list(draw(head_dim_v=16))
    tangents = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(inputs)
    ]
    out, tangent = way(lambda q, k, v: attention(q, k, v, **rules), inputs, tangents)
    expected, expected_tangent = torch.func.jvp(
        lambda q, k, v: exact(q, k, v, **rules)[0],
        tuple(t.double() for t in inputs),
        tuple(t.double() for t in tangents),
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(tangent.double(), expected_tangent, atol=1e-5, rtol=1e-4)


def test_a_compiled_forward_mode_derivative_is_none_of_the_operators() -> None:
    inputs = [draw()[0] for _ in range(3)]
    function = lambda q, k, v: attention(q, k, v, mask="causal")  # noqa: E731
    for one, other in zip(
        jvp_compiled(function, inputs, inputs), jvp_by_transform(function, inputs, inputs), strict=True
    ):
        torch.testing.assert_close(one, other)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    compiled(*inputs)  # compiled without a tangent, it is not used with one
    _, tangent = jvp_in_a_dual_level(compiled, inputs, inputs)
    torch.testing.assert_close(tangent, jvp_by_transform(function, inputs, inputs)[1])


def test_transforms_compose_and_slices_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    q = draw(1, 2, 2, 5, 5, 16, 16)[0]
    loss = lambda q: attention(q, q, q, mask="causal").square().sum()  # noqa: E731
    plain = lambda q: exact(q, q, q, mask="causal")[0].square().sum()  # noqa: E731
    for chunk in (torch_path.CHUNK_SCORES, 2 * 2 * 5):
        monkeypatch.setattr(torch_path, "CHUNK_SCORES", chunk)
        torch.testing.assert_close(
            torch.func.hessian(loss)(q), torch.func.hessian(plain)(q), atol=1e-4, rtol=1e-4
        )
        stacked = torch.stack([q, 2 * q])
        found = torch.func.vmap(torch.func.grad(loss))(stacked)
        torch.testing.assert_close(
            found, torch.func.vmap(torch.func.grad(plain))(stacked), atol=1e-4, rtol=1e-4
        )
        scores = lambda q: attention(q, q, q, score_mod=score_mods.softcap(2.0))  # noqa: E731
        torch.testing.assert_close(torch.func.vmap(scores)(stacked), torch.stack([scores(q), scores(2 * q)]))


def test_explain_says_that_torch_differentiates_forward() -> None:
    q, k, v = draw()
    with forward_ad.dual_level():
        told = flashgen.explain(q, k, v)
    assert told.runs == "torch, scores written out" and "forward-mode AD" in told.steps[0].reason


@pytest.mark.parametrize("gradient", [False, True])
def test_explain_of_cpu_tensors_says_how_to_ask_of_a_gpu(gradient: bool) -> None:
    q, k, v = draw()
    (step,) = flashgen.explain(q.requires_grad_(gradient), k, v).steps
    assert "kernels run on CUDA, the tensors are on cpu; what a GPU runs say " in step.reason
    assert "`flashgen explain --target NAME`" in step.reason and "explain_workload(workload, " in step.reason


def test_cpu_tensors_have_the_second_derivative_that_torch_has() -> None:
    """As the README says."""
    q, k, v = (torch.randn(1, 2, 5, 16, dtype=torch.float32) for _ in range(3))
    found = []
    for attend in (flashgen.attention, F.scaled_dot_product_attention):
        leaf = q.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            (dq,) = torch.autograd.grad(attend(leaf, k, v).square().sum(), leaf, create_graph=True)
            found += torch.autograd.grad(dq.square().sum(), leaf)
    assert found[0].any()
    torch.testing.assert_close(*found)


# Its memory


@pytest.mark.parametrize("shape", [(2, 4, 9, 72), (1, 4, 1, 72), (2, 1, 9, 24), (1, 1, 1, 16)])
@pytest.mark.parametrize("head_dim_v", [72, 24, 128])
@pytest.mark.parametrize("swapped", [False, True])
def test_c41_an_output_that_torch_padded_has_the_strides_of_a_kernels(
    shape: tuple[int, ...], head_dim_v: int, swapped: bool
) -> None:
    q = torch.randn(shape)
    if swapped:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = torch_path.empty_output(q, "bhsd", head_dim_v)
    padded = torch.randn(*shape[:3], head_dim_v + 8)[..., :head_dim_v].requires_grad_()
    out = torch_path.like_q(padded, q, "bhsd")
    assert torch.equal(out, padded)
    pairs = zip(out.shape, out.stride(), wanted.stride(), strict=True)
    assert all(ours == theirs for extent, ours, theirs in pairs if extent > 1)
    assert torch.equal(torch.autograd.grad(out.sum(), padded)[0], torch.ones_like(padded))


def test_c41_what_torchs_attention_pads_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def padding(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.pad(sdpa(q, k, v, **options), (0, 8))[..., : v.shape[3]]

    sdpa = F.scaled_dot_product_attention
    q, k, v = (tensor.requires_grad_() for tensor in draw(kv_heads=4, head_dim=72, head_dim_v=72))
    expected = attention(q, k, v, mask="causal")
    monkeypatch.setattr(F, "scaled_dot_product_attention", padding)
    out = attention(q, k, v, mask="causal")
    assert torch.equal(out, expected) and out.is_contiguous()


class NoCopiesFromTheHost(TorchFunctionMode):
    """Refuses what no capture of a CUDA graph allows: a number of the host as a tensor on the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.tensor, torch.as_tensor, torch.scalar_tensor), function
        return function(*args, **(kwargs or {}))


CONSTANTS: dict[str, dict[str, Any]] = {
    "nothing is seen": {"mask": ~masks.full()},
    "everything is seen": {"mask": masks.full(), "return_lse": True},
    "a constant score": {"score_mod": ScoreMod(Rule.parse("score", "score * 0 + 2"))},
    "numbers in functions": {
        "score_mod": ScoreMod(Rule.parse("score", "max(score, where(q_idx < 2, 1, 0.5))"))
    },
}


@pytest.mark.parametrize("given", CONSTANTS)
def test_c21_constants_of_rules_are_filled_on_the_device(given: str) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in draw())
    with NoCopiesFromTheHost():
        attention(q, k, v, **CONSTANTS[given])
