"""Calls that need a gradient as torch's machinery hands them to kernels, which stand-ins compute here."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashgen import masks, score_mods
from flashgen.build.dropout import Dropout
from flashgen.errors import Unsupported
from flashgen.runtime import gradients, torch_path
from flashgen.runtime.checks import Call, Given, check, differentiated_once, transformed
from flashgen.runtime.packed import check_packed
from flashgen.spec.rule import values_and_tensors


class Plain:
    """The reference in the place of kernels, which wants the memory of every tensor as they do."""

    def __init__(self) -> None:
        self.passes: list[str] = []
        self.wanted: tuple[bool, tuple[int, ...]] = (False, ())

    def attention(self, *arguments: Any) -> Any:
        call = check(*arguments)
        self._seen("forward", call)
        return torch_path.reference(call)

    def attention_varlen(self, *arguments: Any) -> Any:
        call = check_packed(*arguments)
        self._seen("forward", call, call.cu_q, call.cu_k)
        return torch_path.reference(call)

    def gradients(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        of_sinks: bool,
        learned: tuple[int, ...],
    ) -> Any:
        assert dout.stride() == out.stride() and (dlse is None or dlse.is_contiguous())
        self._seen("backward", call, out, lse, dout, *([] if dlse is None else [dlse]))
        self.wanted = (of_sinks, learned)
        return torch_path.gradients(call, dout, dlse, of_sinks, learned)

    def _seen(self, what: str, call: Call, *others: Tensor) -> None:
        _, operands = values_and_tensors(call.mask, call.score_mod)
        sinks = () if call.sinks is None else (call.sinks,)
        assert all(each.data_ptr() for each in (call.q, call.k, call.v, *operands, *sinks, *others))
        self.passes.append(what)


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 6, 16), (2, 2, 8, 16), (2, 2, 8, 24))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


LENGTHS = torch.tensor([8, 3])
SINKS = torch.tensor([0.5, 2.0, -1.0, 0.0])
RULES = (
    masks.causal() & masks.key_padding(LENGTHS),
    [score_mods.alibi(torch.rand(4)), score_mods.softcap(5.0)],
)


def attention(kernels: Plain, *tensors: Tensor) -> Tensor:
    """Output and LSE as one, each in a function of its own."""
    call = check(*tensors, *RULES, None, "bhsd", True, Given(sinks=SINKS))
    out, lse = gradients.attention(call, kernels)
    assert lse is not None
    return torch.cat([out.square(), lse.sigmoid()[..., None]], -1)


def exact(*tensors: Tensor) -> Tensor:
    """The same by torch's own operations."""
    call = check(*tensors, *RULES, None, "bhsd", True, Given(sinks=SINKS))
    out, lse = torch_path.attention(call)
    assert lse is not None
    return torch.cat([out.square(), lse.sigmoid()[..., None]], -1)


def close(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_torch_func_grad_gives_kernels_plain_tensors() -> None:
    kernels = Plain()

    def loss(*tensors: Tensor) -> Tensor:
        assert transformed() and differentiated_once()
        return attention(kernels, *tensors).sum()

    tensors = leaves()
    plain = [each.detach() for each in tensors]
    found, value = torch.func.grad_and_value(loss, argnums=(0, 1, 2))(*plain)
    assert kernels.passes == ["forward", "backward"]
    close([value, *found], [wanted := exact(*tensors).sum(), *torch.autograd.grad(wanted, tensors)])
    _, pull = torch.func.vjp(lambda q: attention(kernels, q, *plain[1:]), plain[0])
    weight = torch.randn(2, 4, 6, 25)
    close(pull(weight), torch.autograd.grad(exact(*tensors), tensors[0], weight))


def test_what_is_more_than_one_derivative_is_not_for_kernels() -> None:
    x = torch.randn(3)
    seen: list[tuple[bool, bool]] = []

    def note(x: Tensor) -> Tensor:
        seen.append((transformed(), differentiated_once()))
        return x.square().sum()

    torch.func.grad(note)(x)
    torch.func.grad(lambda x: torch.func.grad(note)(x).sum())(x)
    torch.func.vmap(torch.func.grad(note))(x[:, None])
    torch.func.jvp(note, (x,), (x,))
    note(x)
    assert seen == [(True, True), (True, False), (True, False), (True, False), (False, False)]


def test_a_jacobian_takes_one_gradient_after_the_other() -> None:
    kernels, tensors = Plain(), leaves()
    q, k, v = (each.detach() for each in tensors)
    found = torch.func.jacrev(lambda k: attention(kernels, q, k, v)[0, 1, 2:4])(k)
    assert kernels.passes == ["forward"] + ["backward"] * 50
    close([found], [torch.autograd.functional.jacobian(lambda k: exact(q, k, v)[0, 1, 2:4], k)])


@pytest.mark.parametrize("wanted", ["sinks", "slopes", "sinks slopes"])
def test_a_jacobian_of_what_else_a_call_reads(wanted: str) -> None:
    """As many gradients as are asked for come back, each in its place."""
    kernels, (q, k, v) = Plain(), (each.detach() for each in leaves())
    names, read = wanted.split(), {"sinks": SINKS, "slopes": torch.rand(4)}

    def of(attend: Callable[[Call], Any]) -> Callable[..., Tensor]:
        def output(*tensors: Tensor) -> Tensor:
            given = {**read, **dict(zip(names, tensors, strict=True))}
            mod, told = score_mods.alibi(given["slopes"]), Given(sinks=given["sinks"])
            out, _ = attend(check(q, k, v, "causal", mod, None, "bhsd", True, told))
            return out[0, :, 3, :2]

        return output

    tensors = tuple(read[name] for name in names)
    found = torch.func.jacrev(of(lambda call: gradients.attention(call, kernels)), tuple(range(len(names))))(
        *tensors
    )
    assert kernels.passes == ["forward"] + ["backward"] * 8
    assert kernels.wanted == ("sinks" in names, (0,) if "slopes" in names else ())
    close(found, torch.autograd.functional.jacobian(of(torch_path.attention), tensors))
    assert all(each.any() for each in found)


def test_torch_func_grad_of_packed_sequences() -> None:
    """Where they begin goes to kernels as plain tensors too."""
    kernels, cu = Plain(), torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    tensors = [torch.randn(8, heads, 16) for heads in (4, 2, 2)]
    dropout = Dropout(0.4, torch.tensor([11]))

    def of(attend: Callable[[Call], Any], *tensors: Tensor) -> Tensor:
        *qkv, sinks = tensors
        call = check_packed(*qkv, cu, cu, 5, 5, "causal", "softcap(3.0)", None, True, sinks, dropout)
        out, lse = attend(call)
        return out.square().sum() + lse.sum()

    by_kernels = partial(of, lambda call: gradients.attention(call, kernels))
    found = torch.func.grad(by_kernels, (0, 1, 2, 3))(*tensors, SINKS)
    own = [each.clone().requires_grad_() for each in (*tensors, SINKS)]
    close(found, torch.autograd.grad(of(torch_path.attention, *own), own))
    assert kernels.passes == ["forward", "backward"] and all(each.any() for each in found)


def test_batched_gradients_of_a_graph_are_refused() -> None:
    out = attention(Plain(), *(tensors := leaves()))[0, 0, 0]
    with pytest.raises(Unsupported, match=r"is_grads_batched=True .* torch\.func\.jacrev"):
        torch.autograd.grad(out, tensors, torch.eye(25), is_grads_batched=True)


def test_a_second_derivative_is_refused_where_it_is_taken() -> None:
    q, k, v = leaves()
    (dq,) = torch.autograd.grad(attention(Plain(), q, k, v).sum(), q, create_graph=True)
    assert dq.requires_grad  # so far nothing is wrong: optimisers may ask for a graph that nobody uses
    with pytest.raises(Unsupported, match="second derivative of attention is not served"):
        torch.autograd.grad(dq.sum(), v)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_the_forward_pass_twice(reentrant: bool) -> None:
    kernels, tensors = Plain(), leaves()
    checkpoint(lambda *given: attention(kernels, *given), *tensors, use_reentrant=reentrant).sum().backward()
    assert kernels.passes == ["forward", "forward", "backward"]
    close([each.grad for each in tensors], torch.autograd.grad(exact(*tensors).sum(), tensors))


def test_saved_tensors_may_live_elsewhere() -> None:
    """Offloaded, say: all that is kept between the passes goes through torch's hooks."""
    kernels, tensors = Plain(), leaves()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index].clone()):
        loss = attention(kernels, *tensors).sum()
    close(torch.autograd.grad(loss, tensors), torch.autograd.grad(exact(*tensors).sum(), tensors))
    assert {id(LENGTHS), id(SINKS)} <= set(map(id, packed))


def test_only_what_is_asked_for() -> None:
    """Gradients of one input alone, of a result that nobody uses, and twice from one graph."""
    kernels, (q, k, v) = Plain(), leaves()
    out = attention(kernels, q.detach(), k, v.detach())
    for _ in range(2):
        close(
            torch.autograd.grad(out.sum(), k, retain_graph=True), torch.autograd.grad(exact(q, k, v).sum(), k)
        )
    assert kernels.passes == ["forward", "backward", "backward"]
    with torch.no_grad():
        assert attention(kernels, q, k, v).grad_fn is None


def test_torch_need_not_find_out_how_it_is_called() -> None:
    """What it asks for at every call of a function with `setup_context` takes long, unless it is there."""
    forward = gradients._Attention.forward
    given = inspect.signature(forward)
    assert given is inspect.signature(forward), "not made anew"
    assert given.bind(1, None, 2).args == (1, None, 2)


def test_threads_have_their_own_gradients() -> None:
    kernels, wanted = Plain(), torch.autograd.grad(exact(*(tensors := leaves())).sum(), tensors)
    found: dict[int, list[Tensor | None]] = {}

    def work(index: int) -> None:
        own = leaves()
        for _ in range(5):
            for each in own:
                each.grad = None
            attention(kernels, *own).sum().backward()
        found[index] = [each.grad for each in own]

    for_each(8, work)
    assert len(found) == 8
    for each in found.values():
        close(each, wanted)


def for_each(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
