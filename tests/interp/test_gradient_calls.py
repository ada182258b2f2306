"""Calls that need a gradient, from autograd through the dispatcher to kernels that the interpreter runs."""

from __future__ import annotations

import ctypes
import math
import re
import threading
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen import masks, score_mods
from flashgen.build.compile import toolchain
from flashgen.build.dropout import Dropout
from flashgen.build.interpret import interpret
from flashgen.build.reference import attention_reference, packed_reference
from flashgen.codegen.abi import AXES, GRADIENTS, TENSORS, environment_names
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render
from flashgen.errors import DoesNotFit, LaunchFailed
from flashgen.runtime import gradients, torch_path
from flashgen.runtime.checks import Call, Given, check
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.runtime.packed import check_packed
from flashgen.runtime.policy import Policy, Request
from flashgen.spec.attention import CallFacts
from flashgen.spec.config import Config
from flashgen.spec.learned import shares
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import ScoreMod
from flashgen.spec.target import find_target
from flashgen.trace import rules

ONE_AT_A_TIME = threading.Lock()
"""The interpreter has one grid."""
AMPERE = find_target("nvidia-a100")  # both of whose families have kernels in Triton


@dataclass
class Interpreted:
    """A kernel that finds a launch's tensors at their addresses."""

    request: Request
    config: Config
    reads: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each operand, which no launch is told."""

    def launch(self, env: tuple[Any, ...], stream: int) -> None:
        spec = self.request.workload.spec
        values = dict(zip(environment_names(spec), env, strict=True))
        sizes = [values[name] for name in ("batch", "heads", "kv_heads", "q_len", "k_len")]
        batch, heads, kv_heads, q_len, k_len = sizes
        dtype = {"fp16": torch.float16, "fp32": torch.float32}[spec.dtype]
        of_q, of_k = (batch, heads, q_len), (batch, kv_heads, k_len)
        shapes = dict(zip(TENSORS, (of_q, of_k, of_k, of_q), strict=True))
        shapes |= dict(zip(GRADIENTS, (of_q, of_q, of_k, of_k), strict=True))
        for name in (*TENSORS, *GRADIENTS):
            if name in values:
                dims = spec.head_dim_v if name in ("v", "out", "dout", "dv") else spec.head_dim
                strides = [values[f"{name}.stride.{axis}"] for axis in AXES]
                values[name] = at(values[name], (*shapes[name], dims), strides, dtype)
        for name in ("lse", "dlse"):
            if values.get(name):
                values[name] = at(values[name], of_q, [heads * q_len, q_len, 1], torch.float32)
        for name in ("cu_q", "cu_k"):
            if name in values:
                values[name] = at(values[name], (values["sequences"] + 1,), [1], torch.int32)
        if "dsinks" in values:
            values["dsinks"] = at(values["dsinks"], (heads,), [1], torch.float32)
        if "sinks" in values:
            values["sinks"] = at(values["sinks"], (heads,), [values["sinks.stride.head"]], torch.float32)
        operands = [o for rule in (spec.mask, spec.score_mod) if rule is not None for o in rule.operands]
        for operand in operands:
            name, (shape, kind) = f"operand.{operand.name}", self.reads[operand.name]
            strides = [values[f"{name}.stride.{axis}"] for axis in range(operand.rank)]
            values[name] = at(values[name], shape, strides, kind)
        counts = {"rows": q_len, "keys": k_len, "diagonals": q_len + k_len - 1}
        for share in shares(spec.score_mod, spec.learned):
            name = f"gradient.{share.name}"
            if share.side == "pair":
                shape, _ = self.reads[share.operand]
            else:
                shape = (batch, heads, counts[re.split("__|_[0-9]", share.name)[1]])
            if isinstance(values[name], int):
                values[name] = at(values[name], shape, contiguous(shape), torch.float32)
        if "dropout.seed" in values:
            values["dropout.seed"] = at(values["dropout.seed"], (1,), [1], torch.int64)
        source = render(spec, self.config, toolchain(interpret=True))
        with ONE_AT_A_TIME:
            interpret(source, self.request.facts, tuple(values.values()))


def at(address: int, shape: tuple[int, ...], strides: list[int], dtype: torch.dtype) -> Tensor:
    assert all(shape), shape
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def contiguous(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


class Loads:
    """Loads kernels, unless told to fail, and counts them by what they compute.

    Args:
        reads: the tensors that the rules read, by name.
    """

    def __init__(self, failing: str = "", **reads: Tensor) -> None:
        self.failing = failing
        self.reads = {name: (tuple(each.shape), each.dtype) for name, each in reads.items()}
        self.ops: list[str] = []
        self.learned: tuple[str, ...] = ()
        self.sinks: list[str] = []

    def __call__(self, request: Request, config: Config) -> Interpreted:
        self.ops.append(request.workload.spec.op)
        self.sinks.append(request.workload.spec.sinks)
        if request.workload.spec.op == self.failing:
            raise LaunchFailed("no such kernel")
        self.learned = request.workload.spec.learned
        return Interpreted(request, config, self.reads)


def dispatcher(loads: Loads) -> Dispatcher:
    return Dispatcher(Policy(load=loads), lambda _: AMPERE, lambda _: 0, capturing=lambda: False)


def leaves(layout: str = "bhsd", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 24))
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    if layout == "bshd":
        made = [each.transpose(1, 2).contiguous() for each in made]
    return [each.to(dtype).requires_grad_() for each in made]


def exact(call: Call) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Leaves of q, k, v and, if there are any, the sinks; output and LSE of them."""
    given = [call.bhsd(each) for each in (call.q, call.k, call.v)] + [call.sinks] * (call.sinks is not None)
    own = [each.detach().double().requires_grad_() for each in given]
    rules = {"mask": call.mask, "score_mod": call.score_mod, "scale": call.scale, "dropout": call.dropout}
    sinks = own[3] if len(own) > 3 else None
    return own, attention_reference(*own[:3], **rules, sinks=sinks, dtype=torch.float64)


RULES: dict[str, tuple[Any, Any]] = {
    "causal": ("causal", None),
    "window and softcap": (masks.sliding_window(9, 0), [score_mods.softcap(2.0)]),
}


@pytest.mark.parametrize("failing", ["", "fwd", "bwd"], ids=["kernels", "no forward", "no backward"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_gradients_of_both_results(rules: tuple[Any, Any], layout: str, failing: str) -> None:
    """Of output and LSE, of either alone, whether or not a kernel serves; also of a gradient expanded."""
    q, k, v = leaves(layout)
    call, loads = check(q, k, v, *rules, None, layout, True), Loads(failing)
    kernels = dispatcher(loads)
    own, (exact_out, exact_lse) = exact(call)
    weight = torch.randn(exact_out.shape, generator=torch.Generator().manual_seed(1)).double()
    for of_out, of_lse in ((1, 0), (0, 1), (1, 1)):
        out, lse = gradients.attention(call, kernels)
        assert out.grad_fn is not None and lse is not None and call.bhsd(out).shape == exact_out.shape
        loss = of_out * ((call.bhsd(out) * weight).sum() + out.sum()) if of_out else 0
        wanted = of_out * ((exact_out * weight).sum() + exact_out.sum()) if of_out else 0
        if of_lse:
            loss, wanted = loss + lse.square().sum(), wanted + exact_lse.square().sum()
        found = torch.autograd.grad(loss, (q, k, v))
        for ours, theirs in zip(
            found, torch.autograd.grad(wanted, own, retain_graph=True, materialize_grads=True), strict=True
        ):
            torch.testing.assert_close(call.bhsd(ours).double(), theirs, rtol=1e-4, atol=1e-4)
    assert {"fwd", "bwd"} <= set(loads.ops)


@pytest.mark.parametrize("failing", ["", "bwd"], ids=["kernels", "no backward"])
@pytest.mark.parametrize("learned", [False, True], ids=["constant sinks", "learned sinks"])
def test_sinks_take_part_and_expanded_keys_have_gradients_of_their_own(learned: bool, failing: str) -> None:
    q, _, _ = leaves()
    k, v = (torch.randn(1, 2, 50, 16).expand(2, 2, 50, 16).detach().requires_grad_() for _ in range(2))
    sinks = torch.tensor([0.5, 2.0, -1.0, 0.0], requires_grad=learned)
    call = check(q, k, v, "causal", None, 0.2, "bhsd", True, Given(sinks=sinks))
    own, (exact_out, exact_lse) = exact(call)
    loads = Loads(failing)
    out, lse = gradients.attention(call, dispatcher(loads))
    assert lse is not None
    leaf_tensors = (q, k, v, sinks) if learned else (q, k, v)
    found = torch.autograd.grad(out.square().sum() + lse.square().sum(), leaf_tensors)
    wanted = torch.autograd.grad(exact_out.square().sum() + exact_lse.square().sum(), own[: len(found)])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert loads.sinks[1] == ("fp32" if learned else "")  # of the backward call


def held(call: Call, kernels: Dispatcher) -> tuple[list[Tensor], Tensor]:
    """Gradients of q, k and v, right to float64, and the output."""
    own, (exact_out, _) = exact(call)
    out, _ = gradients.attention(call, kernels)
    found = torch.autograd.grad(out.square().sum(), (call.q, call.k, call.v))
    wanted = torch.autograd.grad(exact_out.square().sum(), own)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(call.bhsd(ours).double(), theirs, rtol=1e-4, atol=1e-4)
    return list(found), out


def test_c13_gradients_of_a_broadcast_batch_and_of_a_real_one() -> None:
    """In either order, by one dispatcher: strides of 0 are no part of a kernel."""
    one = [each.detach()[:1] for each in leaves()]
    kernels = dispatcher(Loads())
    for copied in (False, True, False):
        tensors = [each.expand(2, -1, -1, -1) for each in one]
        tensors = [(each.contiguous() if copied else each).requires_grad_() for each in tensors]
        held(check(*tensors, "causal", None, None, "bhsd", True), kernels)
    tensors = [each.detach().requires_grad_() for each in one]
    held(check(*tensors, "causal", None, None, "bhsd", True), kernels)


def test_c17_another_cap_is_another_number_of_the_same_kernels() -> None:
    """Scores are bent as c * tanh(s / c), in both passes; the third call has no cap."""
    loads = Loads()
    kernels = dispatcher(loads)
    results = []
    for rule in ([score_mods.softcap(15.0)], [score_mods.softcap(30.0)], None):
        q, k, v = leaves()
        q = (q.detach() * 5).requires_grad_()
        found, out = held(check(q, k, v, "causal", rule, None, "bhsd", True), kernels)
        results.append([out.detach(), *found])
    assert loads.ops == ["fwd", "bwd"] * 2, "the two caps share kernels"
    for one, other in combinations(results, 2):
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(one, other, strict=True))


def test_c39_optional_arguments_of_a_call_that_needs_gradients_may_be_none() -> None:
    kernels = dispatcher(Loads())
    for score_mod, given in product((None, []), (None, Given())):
        held(check(*leaves(), None, score_mod, None, "bhsd", False, given), kernels)
    assert kernels.resolves == 2


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_c41_gradients_have_the_order_of_what_they_are_of(layout: str) -> None:
    turned = [each.detach().transpose(1, 2).contiguous().transpose(1, 2) for each in leaves(layout)]
    call = check(*(each.requires_grad_() for each in turned), "causal", None, None, layout, True)
    found, out = held(call, dispatcher(Loads()))
    assert out.transpose(1, 2).is_contiguous()
    for ours, own in zip(found, (call.q, call.k, call.v), strict=True):
        assert ours.stride() == own.stride()


@pytest.mark.parametrize("failing", ["", "fwd", "bwd"], ids=["kernels", "no forward", "no backward"])
@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, 2.0, -1.0, 0.0])], ids=["", "sinks"])
def test_packed_sequences(sinks: Tensor | None, dropping: bool, failing: str) -> None:
    """Of both results, of which the LSE is (heads, tokens); one sequence has no queries and one no keys. Both
    passes drop the same weights, each by a kernel of its own tiles or by torch's operations."""
    q, k, v = (each[0].transpose(0, 1).detach().contiguous().requires_grad_() for each in leaves())
    cu_q, cu_k = torch.tensor([0, 33, 33, 38, 40], dtype=torch.int32), torch.tensor([0, 33, 40, 40, 50])
    mask, dropout = masks.sliding_window(9, 0), Dropout(0.3, torch.tensor([77])) if dropping else None
    sinks = None if sinks is None else sinks.clone().requires_grad_()
    call = check_packed(q, k, v, cu_q, cu_k, 33, 40, mask, None, None, True, sinks, dropout)
    loads = Loads(failing)
    out, lse = gradients.attention(call, dispatcher(loads))
    assert out.grad_fn is not None and lse is not None and lse.shape == (4, 40)
    given = [q, k, v] if sinks is None else [q, k, v, sinks]
    dout, dlse = torch.randn(out.shape), torch.randn(lse.shape)
    found = torch.autograd.grad([out, lse], given, [dout, dlse])
    own = [each.detach().double().requires_grad_() for each in given]
    rules = {"mask": mask, "sinks": own[3] if own[3:] else None, "dropout": dropout}
    exact_out, exact_lse = packed_reference(
        *own[:3], cu_q.tolist(), cu_k.tolist(), **rules, dtype=torch.float64
    )
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-4, atol=1e-4)
    wanted = torch.autograd.grad([exact_out, exact_lse], own, [dout.double(), dlse.double()])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert {"fwd", "bwd"} <= set(loads.ops)


def test_places_that_changed_between_the_passes_are_told() -> None:
    q, k, v = (torch.randn(40, heads, 16).requires_grad_() for heads in (4, 2, 2))
    cu = torch.tensor([0, 30, 40], dtype=torch.int32)
    out, _ = gradients.attention(
        check_packed(q, k, v, cu, cu, 30, 30, None, None, None, False), dispatcher(Loads())
    )
    cu[1] -= 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("failing", ["", "fwd", "bwd"], ids=["kernels", "no forward", "no backward"])
def test_both_passes_drop_the_same(failing: str) -> None:
    """Each by a kernel of its own tiles, or by torch's operations."""
    q, k, v = leaves()
    given = Given(sinks=torch.tensor([0.5, 2.0, -1.0, 0.0]), dropout=Dropout(0.3, torch.tensor([77])))
    call, loads = check(q, k, v, "causal", None, 0.2, "bhsd", True, given), Loads(failing)
    own, (exact_out, exact_lse) = exact(call)
    out, lse = gradients.attention(call, dispatcher(loads))
    assert lse is not None
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    wanted = torch.autograd.grad(exact_out.square().sum() + exact_lse.sum(), own[:3])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert set(loads.ops) == {"fwd", "bwd"}


def test_what_changed_between_the_passes_is_told() -> None:
    q, k, v = leaves()
    sinks = torch.zeros(4)
    call = check(q, k, v, "causal", None, None, "bhsd", False, Given(sinks=sinks))
    out, _ = gradients.attention(call, dispatcher(Loads()))
    sinks += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    q, k, v = leaves()
    out, _ = gradients.attention(check(q, k, v, None, None, None, "bhsd", False), dispatcher(Loads()))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative of attention is not served"):
        dq.sum().backward()


def test_gradients_of_one_kind_are_resolved_once() -> None:
    loads = Loads()
    kernels = dispatcher(loads)
    for _ in range(3):
        q, k, v = leaves()
        out, _ = gradients.attention(check(q, k, v, "causal", None, None, "bhsd", False), kernels)
        out.sum().backward()
    assert loads.ops == ["fwd", "bwd"] and kernels.resolves == 2


# What score rules read


def rule_tensors() -> dict[str, Tensor]:
    """Of `mod_of`, all needing a gradient, the table a view of what does."""
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(2, 4, 40, 50, generator=generator).requires_grad_()
    weights = torch.randn(4, 5, generator=generator).half().requires_grad_()
    slopes = torch.rand(4, generator=generator).requires_grad_()
    return {"slopes": slopes, "bias": bias, "weights": weights}


BUCKETS = (torch.arange(-9, 10).abs() // 2).clamp_max(4)
"""T5's way: several distances share a bucket of the weights."""


def mod_of(slopes: Tensor, bias: Tensor, weights: Tensor) -> ScoreMod:
    relative = score_mods.relative(weights[:, BUCKETS])
    composed = score_mods.compose([score_mods.alibi(slopes), score_mods.bias(bias), relative])
    assert composed is not None
    return composed


@pytest.mark.parametrize("failing", ["", "bwd"], ids=["kernels", "no backward"])
@pytest.mark.parametrize("wanted", ["slopes", "bias", "weights", "slopes bias weights", "q bias"])
def test_tensors_of_a_score_rule_learn(wanted: str, failing: str) -> None:
    """Together or alone, whether or not q, k and v do; a kernel computes what is wanted and no more."""
    names, given = wanted.split(), rule_tensors()
    q, k, v = (each.detach() for each in leaves())
    leaf = {"q": q, **given}
    for name, each in leaf.items():
        each.requires_grad_(name in names)
    mod = mod_of(**given)
    call = check(q, k, v, masks.sliding_window(20, 3), mod, None, "bhsd", True)
    read = dict(zip(("slopes", "bias", "table"), mod.tensors, strict=True))
    loads = Loads(failing, **read)
    out, lse = gradients.attention(call, dispatcher(loads))
    found = torch.autograd.grad(out.square().sum() + lse.sum(), [leaf[name] for name in names])

    own = {name: each.detach().double().requires_grad_() for name, each in leaf.items()}
    exact_mod = replace(mod, tensors=(own["slopes"], own["bias"], own["weights"][:, BUCKETS]))
    exact_out, exact_lse = attention_reference(
        own["q"], k.double(), v.double(), mask=call.mask, score_mod=exact_mod, dtype=torch.float64
    )
    loss = exact_out.square().sum() + exact_lse.sum()
    exact_found = torch.autograd.grad(loss, [own[name] for name in names])
    for name, ours, theirs in zip(names, found, exact_found, strict=True):
        assert ours.dtype == leaf[name].dtype and ours.shape == leaf[name].shape
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-3, atol=2e-3 if name == "weights" else 1e-4)
    if not failing:
        assert loads.learned == tuple({"weights": "table"}.get(n, n) for n in names if n != "q")


def test_a_bias_that_is_expanded_and_named_as_what_the_mask_reads() -> None:
    """Each of its elements has a gradient of its own, and the mask's tensor of that name has none."""
    q, k, v = leaves()
    kept, bias = torch.rand(50) < 0.7, torch.randn(1, 4, 40, 1).requires_grad_()
    mask = Mask(Rule.parse("mask", "t[k_idx] where t: i1"), (), (kept,))
    text = "score + t[batch, head, q_idx, k_idx] * score where t: fp32"
    mod = ScoreMod(Rule.parse("score", text), (), (bias.expand(2, 4, 40, 50),))
    call, loads = check(q, k, v, mask, mod, None, "bhsd", False), Loads(t=kept, t_1=mod.tensors[0])
    out, _ = gradients.attention(call, dispatcher(loads))
    found = torch.autograd.grad(out.square().sum(), (q, bias), retain_graph=True)
    wanted = torch.autograd.grad(torch_path.attention(call)[0].square().sum(), (q, bias))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert loads.learned == ("t_1",)


def test_what_a_callable_captures_learns() -> None:
    q, k, v = leaves()
    sharpness, near = torch.rand(4).requires_grad_(), torch.randn(4, 89).requires_grad_()

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * sharpness[h] + torch.tanh(near[h, q_idx - kv_idx + 49])

    traced = rules.traced("score", mod, {"batch": 2, "head": 4, "q_idx": 40, "k_idx": 50})
    names = [operand.name for operand in traced.rule.operands]
    call = check(q, k, v, "causal", traced, None, "bhsd", False)
    loads = Loads(**dict(zip(names, traced.tensors, strict=True)))
    assert not gradients.refused(replace(call, q=on_cuda(q)), lambda _: "")
    found = torch.autograd.grad(
        gradients.attention(call, dispatcher(loads))[0].square().sum(), (sharpness, near)
    )
    wanted = torch.autograd.grad(torch_path.attention(call)[0].square().sum(), (sharpness, near))
    assert set(loads.learned) == set(names)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def on_cuda(tensor: Tensor) -> Any:
    """What `refused` asks of a tensor on a GPU."""
    return SimpleNamespace(is_cuda=True, shape=tensor.shape, dtype=tensor.dtype)


@pytest.mark.parametrize(
    ("shape", "served"),
    [((2, 4, 40, 50), True), ((1, 4, 40, 50), False), ((2, 4, 1, 50), True), ((1, 1, 40, 1), True)],
    ids=str,
)
def test_deterministic_gradients_are_kernels_where_nothing_is_added_in_any_order(
    shape: tuple[int, ...], served: bool
) -> None:
    q, k, v = leaves()
    call = check(q, k, v, None, score_mods.bias(torch.randn(shape).requires_grad_()), None, "bhsd", False)
    call = replace(call, q=on_cuda(q))
    told = "pairs add to the gradient of bias in any order, and deterministic gradients are asked for"
    assert gradients.refused(call, lambda _: "") == ""
    assert gradients.refused(replace(call, deterministic=True), lambda _: "") == ("" if served else told)
    frozen = replace(call, score_mod=score_mods.bias(torch.randn(shape)), deterministic=True)
    assert gradients.refused(frozen, lambda _: "") == ""


def test_what_rules_of_packed_sequences_learn_is_torchs() -> None:
    q, k = torch.randn(30, 4, 16), torch.randn(30, 2, 16)
    cu, slopes = torch.tensor([0, 12, 30], dtype=torch.int32), torch.rand(4).requires_grad_()
    call = check_packed(q, k, k, cu, cu, 18, 18, None, score_mods.alibi(slopes), None, False)
    told = gradients.refused(replace(call, q=on_cuda(q)), lambda _: "")
    assert told == "alibi learns, and there are kernels for that of dense calls alone"
    with pytest.raises(DoesNotFit, match="sums what a score rule learns in dense calls alone"):
        FAMILIES["attention_bwd"].default(
            call.gradients_workload(False, False, (0,)).spec, AMPERE, CallFacts()
        )


# Transforms, captures and threads


def loss(kernels: Dispatcher, *tensors: Tensor) -> Tensor:
    out, lse = gradients.attention(check(*tensors, "causal", None, None, "bhsd", True), kernels)
    assert lse is not None
    return out.square().sum() + lse.sum()


def test_torch_func_grad_is_served_by_kernels() -> None:
    tensors, loads = leaves(), Loads()
    found = torch.func.grad(partial(loss, dispatcher(loads)), argnums=(0, 1, 2))(
        *(each.detach() for each in tensors)
    )
    assert loads.ops == ["fwd", "bwd"]
    wanted = torch.autograd.grad(loss(dispatcher(loads), *tensors), tensors)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("failing", ["", "bwd"], ids=["kernels", "no backward"])
def test_torch_func_grad_of_sinks_and_of_what_a_rule_reads(failing: str) -> None:
    q, k, v = (each.detach() for each in leaves())
    slopes, sinks = torch.rand(4), torch.tensor([0.5, 2.0, -1.0, 0.0])

    def of(loads: Loads, slopes: Tensor, sinks: Tensor) -> Tensor:
        call = check(q, k, v, "causal", score_mods.alibi(slopes), None, "bhsd", True, Given(sinks=sinks))
        out, lse = gradients.attention(call, dispatcher(loads))
        assert lse is not None
        return out.square().sum() + lse.sum()

    loads = Loads(failing, slopes=slopes)
    found = torch.func.grad(partial(of, loads), argnums=(0, 1))(slopes, sinks)
    own = [each.double().requires_grad_() for each in (slopes, sinks)]
    exact_out, exact_lse = attention_reference(
        *(each.double() for each in (q, k, v)),
        mask=masks.causal(),
        score_mod=replace(score_mods.alibi(slopes), tensors=(own[0],)),
        sinks=own[1],
        dtype=torch.float64,
    )
    wanted = torch.autograd.grad(exact_out.square().sum() + exact_lse.sum(), own)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert loads.learned == (() if failing else ("slopes",)) and loads.sinks[1] == "fp32"


def test_a_captured_first_call_loads_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    loads, tensors = Loads(), leaves()
    kernels = Dispatcher(
        Policy(load=loads),
        lambda _: AMPERE,
        lambda _: 0,
        capturing=lambda: True,
        on_miss="tune",
        tune=pytest.fail,
    )
    call = check(*tensors, "causal", None, None, "bhsd", False)
    own, (exact_out, _) = exact(call)
    for _ in range(2):
        out, _ = gradients.attention(call, kernels)
        found = torch.autograd.grad(out.square().sum(), tensors)
    for ours, theirs in zip(found, torch.autograd.grad(exact_out.square().sum(), own), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert not loads.ops and not kernels.resolves
    told = [record.message for record in caplog.records]
    assert len(told) == 2 and all("torch's attention is captured instead" in each for each in told)


def test_a_capture_takes_kernels_that_are_loaded() -> None:
    captured = [False]
    loads, tensors = Loads(), leaves()
    kernels = Dispatcher(Policy(load=loads), lambda _: AMPERE, lambda _: 0, capturing=lambda: captured[0])
    loss(kernels, *tensors).backward()
    captured[0] = True
    longer = [
        each.detach().repeat(1, 1, 2, 1).requires_grad_() for each in tensors
    ]  # of a bucket not seen yet
    own, (exact_out, exact_lse) = exact(check(*longer, "causal", None, None, "bhsd", True))
    found = torch.autograd.grad(loss(kernels, *longer), longer)
    wanted = torch.autograd.grad(exact_out.square().sum() + exact_lse.sum(), own)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert loads.ops == ["fwd", "bwd"]


def test_threads_have_their_own_gradients() -> None:
    """A first call and its backward pass, from several at once."""
    kernels, found = dispatcher(Loads()), {}
    wanted = torch.autograd.grad(loss(kernels, *(tensors := leaves())), tensors)
    kernels = dispatcher(Loads())

    def work(index: int) -> None:
        own = leaves()
        loss(kernels, *own).backward()
        found[index] = [each.grad for each in own]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and kernels.resolves == 2
    for each in found.values():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(each, wanted, strict=True))
