"""Calls that need a gradient, from autograd through the dispatcher to kernels that the interpreter runs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen import masks, score_mods
from flashgen.build.compile import toolchain
from flashgen.build.interpret import interpret
from flashgen.build.reference import attention_reference
from flashgen.codegen.abi import AXES, GRADIENTS, TENSORS, environment_names
from flashgen.codegen.source import render
from flashgen.errors import LaunchFailed
from flashgen.runtime import gradients
from flashgen.runtime.checks import Call, Given, check
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.runtime.policy import Policy, Request
from flashgen.spec.config import Config
from flashgen.spec.target import find_target

AMPERE = find_target("nvidia-a100")  # both of whose families have kernels in Triton


@dataclass
class Interpreted:
    """A kernel that finds a launch's tensors at their addresses."""

    request: Request
    config: Config

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
        if "sinks" in values:
            values["sinks"] = at(values["sinks"], (heads,), [values["sinks.stride.head"]], torch.float32)
        source = render(spec, self.config, toolchain(interpret=True))
        interpret(source, self.request.facts, tuple(values.values()))


def at(address: int, shape: tuple[int, ...], strides: list[int], dtype: torch.dtype) -> Tensor:
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class Loads:
    """Loads kernels, unless told to fail, and counts them by what they compute."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.ops: list[str] = []

    def __call__(self, request: Request, config: Config) -> Interpreted:
        self.ops.append(request.workload.spec.op)
        if request.workload.spec.op == self.failing:
            raise LaunchFailed("no such kernel")
        return Interpreted(request, config)


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
    own = [call.bhsd(each).detach().double().requires_grad_() for each in (call.q, call.k, call.v)]
    rules = {"mask": call.mask, "score_mod": call.score_mod, "scale": call.scale, "sinks": call.sinks}
    return own, attention_reference(*own, **rules, dtype=torch.float64)


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


def test_sinks_take_part_and_expanded_keys_have_gradients_of_their_own() -> None:
    q, _, _ = leaves()
    k, v = (torch.randn(1, 2, 50, 16).expand(2, 2, 50, 16).detach().requires_grad_() for _ in range(2))
    given = Given(sinks=torch.tensor([0.5, 2.0, -1.0, 0.0]))
    call = check(q, k, v, "causal", None, 0.2, "bhsd", False, given)
    own, (exact_out, _) = exact(call)
    out, lse = gradients.attention(call, dispatcher(Loads()))
    assert lse is None
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    for ours, theirs in zip(found, torch.autograd.grad(exact_out.square().sum(), own), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


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
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_gradients_of_one_kind_are_resolved_once() -> None:
    loads = Loads()
    kernels = dispatcher(loads)
    for _ in range(3):
        q, k, v = leaves()
        out, _ = gradients.attention(check(q, k, v, "causal", None, None, "bhsd", False), kernels)
        out.sum().backward()
    assert loads.ops == ["fwd", "bwd"] and kernels.resolves == 2
