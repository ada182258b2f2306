"""The operator in traced graphs: no graph break, shapes that vary, and what a graph does not change."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported as NotTraced
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flashgen.api  # which registers the operators
from flashgen import masks, score_mods, trace
from flashgen.build.reference import attention_reference
from flashgen.errors import InvalidArgument, UnknownName, Unsupported
from flashgen.runtime import torch_path
from flashgen.runtime.checks import Call, as_mask, as_score_mod
from flashgen.spec.rule import Rule

Function = Callable[[Tensor, Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def draw(
    q_len: int, k_len: int | None = None, gradient: bool = False, head_dim_v: int = 32, heads: int = 4
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len)
    k_len = q_len if k_len is None else k_len
    shapes = ((heads, q_len, 32), (heads // 2, k_len, 32), (heads // 2, k_len, head_dim_v))
    return [torch.randn(2, *shape, generator=generator).requires_grad_(gradient) for shape in shapes]


WINDOW = masks.sliding_window(3, 0)
SOFTCAP = score_mods.softcap(3.0)
BIAS = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)
LENGTHS = torch.tensor([5, 3])
PADDING = masks.causal() & masks.key_padding(LENGTHS)
UNPADDED = ~masks.key_padding(LENGTHS)

CALLS: dict[str, Function] = {
    "plain": lambda q, k, v: flashgen.attention(q, k, v),
    "by name": lambda q, k, v: flashgen.attention(q, k, v, mask="causal"),
    "causal made inside": lambda q, k, v: flashgen.attention(q, k, v, mask=masks.causal()),
    "window": lambda q, k, v: flashgen.attention(q, k, v, mask=WINDOW),
    "window made inside": lambda q, k, v: flashgen.attention(q, k, v, mask=masks.sliding_window(3, 0)),
    "text": lambda q, k, v: flashgen.attention(
        q, k, v, mask="causal & sliding_window(3, 0) | ~full", score_mod="softcap(2.0), softcap(1.0)"
    ),
    "joined inside": lambda q, k, v: flashgen.attention(
        q, k, v, mask=masks.causal() & masks.sliding_window(3, 0) | masks.sliding_window(0, 0)
    ),
    "scores joined inside": lambda q, k, v: flashgen.attention(
        q, k, v, score_mod=[score_mods.softcap(2.0), score_mods.softcap(1.0)]
    ),
    "padding": lambda q, k, v: flashgen.attention(q, k, v, mask=PADDING),
    "negated outside": lambda q, k, v: flashgen.attention(q, k, v, mask=UNPADDED | masks.causal()),
    "padding joined inside": lambda q, k, v: flashgen.attention(
        q, k, v, mask=masks.causal() & masks.key_padding(torch.full((2,), 5))
    ),
    "padding made inside": lambda q, k, v: flashgen.attention(
        q, k, v, mask=masks.key_padding(torch.ones(2, k.shape[2], dtype=torch.bool))
    ),
    "everything": lambda q, k, v: flashgen.attention(
        q, k, v, mask=WINDOW, score_mod=score_mods.softcap(2.0), scale=-0.3, return_lse=True
    ),
    "bshd": lambda q, k, v: flashgen.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask="causal", layout="bshd"
    ),
    "sdpa": lambda q, k, v: flashgen.sdpa(q, k, v, is_causal=True, enable_gqa=True),
    "sdpa with padding": lambda q, k, v: flashgen.sdpa(
        q, k, v, torch.ones(2, 1, 1, k.shape[2], dtype=torch.bool), enable_gqa=True
    ),
}


def pairs(one: Any, other: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(one, other, strict=True)) if isinstance(one, tuple) else [(one, other)]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_traced_without_a_graph_break(name: str, gradient: bool) -> None:
    function = CALLS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for q_len in (8, 12):
        inputs = draw(q_len, gradient=gradient)
        ours, eager = compiled(*inputs), function(*inputs)
        for one, other in pairs(ours, eager):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
            assert one.stride() == other.stride() or gradient
        if gradient:
            losses = [
                sum(t.exp().sum() for t in (r if isinstance(r, tuple) else (r,))) for r in (ours, eager)
            ]
            grads = [torch.autograd.grad(loss, inputs) for loss in losses]
            for one, other in zip(*grads, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def causal_choice(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(q_idx >= kv_idx, score, -math.inf)


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"mask": "causal & sliding_window(3, 0)", "score_mod": "softcap(3.0)"},
        lambda: {"mask": WINDOW, "score_mod": causal_choice},
        lambda: {"mask": masks.causal() & WINDOW, "score_mod": (SOFTCAP, score_mods.scale(2))},
        lambda: {"mask": masks.neighborhood((4, 2), (3, 1)), "score_mod": score_mods.bias(BIAS)},
        lambda: {"mask": masks.block_sparse(torch.ones(1, 1, 2, 2, dtype=torch.bool), 4)},
    ],
    ids=["texts", "choice", "joined", "grid and bias", "blocks"],
)
def test_a_rule_in_a_trace_warns_of_nothing(
    options: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    q = draw(8)[0]

    def call(q: Tensor) -> Tensor:
        return flashgen.attention(q, q, q, **options())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = torch.compile(call, fullgraph=True, backend="eager")(q)
    torch.testing.assert_close(ours, call(q))


@pytest.mark.parametrize("scale", [True, "0.5", math.inf, 1e39])
def test_a_bad_scale_is_refused_in_a_trace_too(scale: Any) -> None:
    compiled = torch.compile(
        lambda q, k, v: flashgen.attention(q, k, v, scale=scale), fullgraph=True, backend="eager"
    )
    with pytest.raises(NotTraced, match="InvalidArgument"):
        compiled(*draw(8))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"mask": "diagonal"}, UnknownName, "unknown mask 'diagonal'; known: block_sparse"),
        ({"mask": "causal &"}, InvalidArgument, "'causal &' is not a mask"),
        ({"mask": "sliding_window(-1, 0)"}, InvalidArgument, "left=-1 must be"),
        ({"score_mod": "cap(3)"}, UnknownName, "unknown score rule 'cap'; known: alibi"),
        ({"score_mod": "softcap(-1)"}, InvalidArgument, "cap=-1 must be"),
    ],
)
def test_a_bad_rule_is_the_plain_error_in_a_trace_too(
    options: dict[str, str], kind: type[Exception], told: str, gradient: bool
) -> None:
    function = lambda q, k, v: flashgen.attention(q, k, v, **options)  # noqa: E731
    with pytest.raises(kind, match=told) as error:
        torch.compile(function, backend="eager")(*draw(8, gradient=gradient))
    assert type(error.value) is kind
    torch._dynamo.reset()
    with pytest.raises(NotTraced, match="InvalidArgument"):  # torch's word for an error in one graph
        torch.compile(function, fullgraph=True, backend="eager")(*draw(8, gradient=gradient))


def test_a_scale_may_vary_within_a_graph() -> None:
    compiled = torch.compile(
        lambda q, k, v, scale: flashgen.attention(q, k, v, scale=scale),
        fullgraph=True,
        backend="eager",
        dynamic=True,
    )
    for scale in (0.3, 0.7, -0.2):
        out = compiled(*draw(8), scale)
        torch.testing.assert_close(out, flashgen.attention(*draw(8), scale=scale))


@pytest.mark.parametrize("gradient", [False, True])
def test_autocast_in_a_trace(gradient: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out, lse = flashgen.attention(q, k, v, mask="causal", return_lse=True)
            return flashgen.sdpa(q, k, v, enable_gqa=True) + out, lse

    inputs = draw(8, gradient=gradient)
    ours, eager = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs)
    assert [each.dtype for each in ours] == [torch.bfloat16, torch.float32]
    # With gradients eager CPU tensors are torch's, whose bf16 is rounded elsewhere on the way.
    near = {"atol": 1e-2, "rtol": 1.6e-2} if gradient else {}
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, **near)
        assert (one.grad_fn is not None) == gradient


@pytest.mark.parametrize("gradient", [False, True])
def test_c35_lengths_may_vary_within_two_graphs(gradient: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS["by name"], fullgraph=True, backend=counter, dynamic=True)
    for length in (100, 4096 if not gradient else 512, 77, 1):
        inputs = draw(length, gradient=gradient, heads=2)
        out = compiled(*inputs)
        torch.testing.assert_close(out, CALLS["by name"](*inputs), atol=1e-6, rtol=1e-5)
        if gradient:
            assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), inputs))
    assert counter.frame_count <= 2


class Block(torch.nn.Module):
    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.rules = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64), rules

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).unbind(2)
        return self.out(flashgen.attention(q, k, v, layout="bshd", **self.rules).flatten(2))


def test_a_model_compiles_around_it() -> None:
    block, x = Block(mask="causal"), torch.randn(2, 10, 64)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(compiled(x), block(x), atol=1e-6, rtol=1e-5)
    assert compiled(x).grad_fn is not None


def graphs() -> tuple[list[Any], list[Any], Any]:
    """Of both passes, filled as the backend that follows is given them."""
    forward: list[Any] = []
    backward: list[Any] = []

    def keep(graphs: list[Any]) -> Callable[..., Any]:
        return lambda module, _: graphs.append(module) or make_boxed_func(module.forward)

    return forward, backward, aot_autograd(fw_compiler=keep(forward), bw_compiler=keep(backward))


def operators_of(graph: Any) -> list[str]:
    """The names of FlashGen's; of torch's there is none that would hold the scores."""
    assert "softmax" not in graph.code and "scaled_dot_product" not in graph.code
    targets = [str(node.target) for node in graph.graph.nodes]
    return [each.split(".")[1] for each in targets if each.startswith("flashgen.")]


TRAINED: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "window, cap and sinks": {
        "mask": WINDOW,
        "score_mod": SOFTCAP,
        "sinks": torch.linspace(-1, 1, 4),
    },
    "alibi": {"mask": "causal", "score_mod": score_mods.alibi(torch.rand(4))},
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("rules", TRAINED.values(), ids=TRAINED)
def test_c35_a_training_step_is_at_most_two_graphs_for_all_lengths(
    rules: dict[str, Any], dynamic: bool | None
) -> None:
    """Both passes hold operators, and nothing of theirs has the size of the scores."""
    forward, backward, backend = graphs()
    block = Block(**rules)
    step = torch.compile(lambda x: block(x).square().mean(), fullgraph=True, backend=backend, dynamic=dynamic)
    for length in (24, 32, 17, 40, 5):
        x = torch.randn(2, length, 64)
        found = torch.autograd.grad(step(x), list(block.parameters()))
        wanted = torch.autograd.grad(block(x).square().mean(), list(block.parameters()))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert 1 <= len(forward) == len(backward) <= 2
    assert all(operators_of(graph) == ["attention_fwd"] for graph in forward)
    assert all(operators_of(graph) == ["attention_bwd"] for graph in backward)


@pytest.mark.parametrize("mode", [False, True], ids=["torch says no", "torch says yes"])
@pytest.mark.parametrize("given", [None, False, True], ids=str)
def test_a_graph_says_whether_gradients_are_deterministic(
    given: bool | None, mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    def gradients(call: Call, *rest: Any) -> Any:
        told.append(call.deterministic)
        return computed(call, *rest)

    computed = torch_path.gradients
    monkeypatch.setattr(torch_path, "gradients", gradients)
    q = draw(8, gradient=True)[0]
    torch.use_deterministic_algorithms(mode)
    try:
        step = torch.compile(
            lambda q: flashgen.attention(q, q, q, deterministic=given), fullgraph=True, backend="aot_eager"
        )
        step(q).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [mode if given is None else given]


TABLE = torch.linspace(-1, 1, 4 * 9).view(4, 9)
SHARPNESS = torch.tensor([0.5, 0.25, -0.5, 1.0])


def sharper(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * torch.exp(SHARPNESS[h]) + TABLE[h, (q_idx - kv_idx).clamp(-4, 4) + 4]


def bias(q_len: int) -> Tensor:
    return torch.linspace(-2, 2, 4 * q_len * (q_len + 3)).cos().view(1, 4, q_len, q_len + 3)


# What is learned, by the number of queries, of which there are three less than keys; the call that reads it.
LEARNED: dict[str, tuple[Callable[[int], list[Tensor]], Callable[..., dict[str, Any]]]] = {
    "sinks": (lambda _: [torch.linspace(-1, 1, 4)], lambda sinks: {"mask": WINDOW, "sinks": sinks}),
    "bias": (lambda q_len: [bias(q_len)], lambda bias: {"score_mod": score_mods.bias(bias)}),
    "slopes": (
        lambda _: [torch.rand(4)],
        lambda slopes: {"mask": "causal", "score_mod": score_mods.alibi(slopes)},
    ),
    "relative table": (lambda _: [TABLE], lambda table: {"score_mod": score_mods.relative(table)}),
    "all of them": (
        lambda q_len: [torch.linspace(-1, 1, 4), bias(q_len), torch.rand(4), TABLE],
        lambda sinks, bias, slopes, table: {
            "mask": masks.causal() & masks.key_padding(LENGTHS),
            "sinks": sinks,
            "score_mod": [
                score_mods.bias(bias), SOFTCAP, score_mods.alibi(slopes), score_mods.relative(table)
            ],
        },
    ),
    "what a callable captures": (lambda _: [SHARPNESS, TABLE], lambda *_: {"score_mod": sharper}),
}  # fmt: skip


def exact_gradients(
    given: list[Tensor], learned: list[Tensor], rules: dict[str, Any], weight: Tensor
) -> list[Tensor]:
    """By autograd of the definition in float64."""
    mask, score_mod = rules.get("mask"), rules.get("score_mod")
    if callable(score_mod):
        score_mod = trace.score_mod(score_mod)
    own = [each.detach().double().requires_grad_() for each in given]
    told = {"mask": as_mask(mask), "score_mod": as_score_mod(score_mod), "sinks": rules.get("sinks")}
    out, lse = attention_reference(*own, **told, dtype=torch.float64)
    loss = (out * weight).sum() + lse.sigmoid().sum()
    return list(torch.autograd.grad(loss, [*own, *learned]))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", LEARNED)
def test_what_a_call_learns_has_gradients_in_two_graphs_for_all_lengths(
    kind: str, dynamic: bool | None
) -> None:
    """Sinks and what score rules read are the operators' as q, k and v are."""
    made, rules = LEARNED[kind]
    torch.manual_seed(0)

    def loss(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *learned: Tensor) -> Tensor:
        out, lse = flashgen.attention(q, k, v, **rules(*learned), return_lse=True)
        return (out * weight).sum() + lse.sigmoid().sum()

    forward, backward, backend = graphs()
    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=dynamic)
    for q_len in (8, 12, 5, 17):
        given = draw(q_len, q_len + 3, gradient=True)
        learned = [each.requires_grad_() for each in made(q_len)]
        weight = torch.randn(given[0].shape)
        ours, eager = (each(*given, weight, *learned) for each in (compiled, loss))
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-5)
        found, plain = (torch.autograd.grad(each, [*given, *learned]) for each in (ours, eager))
        wanted = exact_gradients(given, learned, rules(*learned), weight)
        for one, same, other in zip(found, plain, wanted, strict=True):
            assert other.any()
            torch.testing.assert_close(one, same, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-4)
    for each in (SHARPNESS, TABLE):
        each.requires_grad_(False)
    assert 1 <= len(forward) == len(backward) <= 2
    assert all(operators_of(graph) == ["attention_fwd"] for graph in forward)
    assert all(operators_of(graph) == ["attention_bwd"] for graph in backward)


def test_a_graph_computes_the_gradients_that_are_asked_for() -> None:
    """None of q, k and v needs one; nor does the bias, and its gradient is not made."""
    sinks, bias = torch.zeros(4, requires_grad=True), torch.randn(1, 4, 8, 8)
    _, backward, backend = graphs()
    compiled = torch.compile(
        lambda q: flashgen.attention(q, q, q, score_mod=score_mods.bias(bias), sinks=sinks),
        fullgraph=True,
        backend=backend,
    )
    (found,) = torch.autograd.grad(compiled(draw(8)[0]).square().sum(), sinks)
    again = flashgen.attention(*3 * [draw(8)[0]], score_mod=score_mods.bias(bias), sinks=sinks)
    torch.testing.assert_close(found, torch.autograd.grad(again.square().sum(), sinks)[0])
    (node,) = [node for node in backward[0].graph.nodes if "flashgen" in str(node.target)]
    assert len(node.meta["val"]) == 4


@pytest.mark.parametrize("saved", [False, True], ids=["recomputed", "saved"])
def test_selective_checkpointing_knows_the_operator(saved: bool) -> None:
    """Its policy is asked about the operator in eager calls too, and may have its results saved."""
    seen: list[str] = []

    def policy(context: Any, operator: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        seen.append(str(operator))
        keep = saved and operator is torch.ops.flashgen.attention_fwd.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    block, x = Block(mask="causal"), torch.randn(2, 10, 64)
    calls = 0
    serve = torch_path.reference

    def counted(call: Any) -> Any:
        nonlocal calls
        calls += 1
        return serve(call)

    contexts = partial(create_selective_checkpoint_contexts, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_path, "reference", counted)
        out = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(out.square().sum(), list(block.parameters()))
    assert "flashgen.attention_fwd.default" in seen and calls == (1 if saved else 2)
    wanted = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_compiles(reentrant: bool) -> None:
    block, x = Block(mask="causal"), torch.randn(2, 10, 64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=reentrant).square().sum()

    compiled = torch.compile(step, fullgraph=not reentrant, backend="aot_eager")
    compiled(x).backward()
    found = [each.grad for each in (x, *block.parameters())]
    wanted = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def operator_arguments() -> list[tuple[Any, ...]]:
    q, k, v = draw(8, 10, head_dim_v=16)
    rule, cap, alibi = PADDING.rule, score_mods.softcap(2.0).rule, score_mods.alibi().rule
    slim = draw(8)
    return [
        (q, k, v, [LENGTHS], rule.text, rule.name, "", "", [], 0.2, "bhsd", False),
        (q, k, v, [LENGTHS], rule.text, rule.name, cap.text, cap.name, [2.0], 0.2, "bhsd", True),
        (*(t.transpose(1, 2) for t in slim), [], "True", "full", "", "", [], 0.2, "bshd", True),
        (*slim, [], WINDOW.rule.text, "w", "", "", [3.0, 0.0], 0.2, "bhsd", False),
        (q[:, :, :0], k, v, [], "True", "full", "", "", [], 0.2, "bhsd", True),
        (q[:, :1].expand(-1, 4, -1, -1), k, v, [], "True", "full", "", "", [], 0.2, "bhsd", True),
        (q, k, v, [LENGTHS, torch.rand(4)], rule.text, rule.name, alibi.text, "alibi", [], 0.2, "bhsd", True),
    ]


@pytest.mark.parametrize("arguments", operator_arguments())
def test_the_operators_fake_says_what_the_real_one_gives(arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(torch.ops.flashgen.attention_fwd.default, arguments)


def with_gradients(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of all that may have one."""
    q, k, v, operands, *told, _ = arguments
    q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
    operands = [each.detach().requires_grad_(each.is_floating_point()) for each in operands]
    return (q, k, v, operands, *told, True)


@pytest.mark.parametrize("arguments", operator_arguments())
def test_the_operators_gradients_are_what_their_fakes_say(arguments: tuple[Any, ...]) -> None:
    """With sinks, whose gradient and that of the score rule's tensors are wanted with that of the LSE."""
    arguments = with_gradients(arguments)
    sinks = torch.linspace(-1, 1, 8)[::2].requires_grad_()
    torch.library.opcheck(torch.ops.flashgen.attention_fwd.default, arguments, {"sinks": sinks})
    q, k, v, operands, *rules, scale, layout, _ = arguments
    with torch.no_grad():
        out, lse = torch.ops.flashgen.attention_fwd.default(*arguments, sinks=sinks)
        operands, learned = [each.detach() for each in operands], [0] if operands[1:] else None
        given = (
            q.detach(),
            k.detach(),
            v.detach(),
            out,
            lse,
            layout,
            operands,
            *rules,
            scale,
            sinks.detach(),
        )
        dout, dlse = torch.rand_like(out), torch.rand_like(lse)
        for of_lse, wanted in ((None, {}), (dlse, {"of_sinks": True, "learned": learned})):
            torch.library.opcheck(torch.ops.flashgen.attention_bwd.default, (dout, of_lse, *given), wanted)


def test_the_operators_take_dropout() -> None:
    q, k, v = draw(8, gradient=True)
    told, dropout = ([], "True", "full", "", "", [], 0.2), {"seed": torch.tensor([5]), "dropout_p": 0.3}
    torch.library.opcheck(torch.ops.flashgen.attention_fwd.default, (q, k, v, *told, "bhsd", True), dropout)
    with torch.no_grad():
        out, lse = torch.ops.flashgen.attention_fwd.default(q, k, v, *told, "bhsd", True, **dropout)
        call = (torch.rand_like(out), None, q.detach(), k.detach(), v.detach(), out, lse, "bhsd", *told)
        torch.library.opcheck(torch.ops.flashgen.attention_bwd.default, call, dropout)


@pytest.mark.parametrize("arguments", operator_arguments())
def test_the_operators_gradients_are_those_of_the_definition(arguments: tuple[Any, ...]) -> None:
    """Of output and LSE, of either alone."""
    q, k, v, operands, mask, _, score, _, values, scale, layout, _ = given = with_gradients(arguments)
    reads = len(Rule.parse("mask", mask).operands)
    learned = operands[reads:]
    score_mod = None
    if score:
        score_mod = score_mods.ScoreMod(Rule.parse("score", score), tuple(values), tuple(learned))
    numbers = () if score else tuple(map(int, values))
    of_mask = masks.Mask(Rule.parse("mask", mask), numbers, tuple(operands[:reads]))
    rules = {"mask": of_mask, "score_mod": score_mod}

    def bhsd(tensor: Tensor) -> Tensor:
        return tensor if layout == "bhsd" else tensor.transpose(1, 2)

    own = [bhsd(each.detach()).double().requires_grad_() for each in (q, k, v)]
    out, lse = torch.ops.flashgen.attention_fwd.default(*given)
    exact = attention_reference(*own, **rules, scale=scale, dtype=torch.float64)
    weight = torch.randn(out.shape)
    for of_out, of_lse in ((1, 0), (0, 1), (1, 1)):
        losses = [
            ([(out_ * weight.to(out_)).sum()] if of_out else []) + ([lse_.sigmoid().sum()] if of_lse else [])
            for out_, lse_ in ((out, lse), (bhsd(exact[0]), exact[1]))
        ]
        found = torch.autograd.grad(losses[0], (q, k, v, *learned), retain_graph=True)
        wanted = torch.autograd.grad(losses[1], [*own, *learned], retain_graph=True, materialize_grads=True)
        found = (*map(bhsd, found[:3]), *found[3:])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-4)


def test_the_operator_can_stand_in_an_exported_program() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flashgen.attention(q, k, v, mask=masks.sliding_window(3, 0))

    inputs = tuple(draw(8))
    program = torch.export.export(Layer(), inputs)
    assert "flashgen.attention_fwd" in program.graph_module.code
    torch.testing.assert_close(program.module()(*inputs), Layer()(*inputs))


def test_fake_tensors_outside_a_trace_are_understood() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 8, 32, device="cuda").transpose(1, 2) for _ in range(3))
        out, lse = flashgen.attention(q, k, v, layout="bhsd", return_lse=True)
    assert out.shape == (2, 8, 4, 32) and out.stride() == q.stride() and lse.shape == (2, 8, 4)
    assert out.device.type == "cuda"


def test_bad_arguments_of_the_operator_are_named() -> None:
    q, k, v = draw(8)
    arguments = ([], "k_idx <", "x", "", "", [], 0.2, "bhsd", False)
    with pytest.raises(InvalidArgument, match="not an expression"):
        torch.ops.flashgen.attention_fwd(q, k, v, *arguments)
    with pytest.raises(InvalidArgument, match="k has batch 1"):
        torch.ops.flashgen.attention_fwd(q, k[:1], v, [], "True", "full", "", "", [], 0.2, "bhsd", False)


TWO = f"{WINDOW.rule.text}", "sliding_window"
CAP = score_mods.softcap(2.0).rule.text, "softcap"
NO_VALUES: list[tuple[list[float], tuple[str, str], tuple[str, str], str]] = [
    ([], TWO, ("", ""), r"values has 0 entries, the rules take 2 \(left, right\)"),
    ([3.0], TWO, ("", ""), "values has 1 entries, the rules take 2"),
    ([3.0, 0.0, 1.0], TWO, ("", ""), "values has 3 entries, the rules take 2"),
    ([1.0], ("True", "full"), ("", ""), r"values has 1 entries, the rules take 0 \(none\)"),
    ([3.0, 0.0], TWO, CAP, r"values has 2 entries, the rules take 3 \(left, right, cap\)"),
    (
        [math.nan, 0.0],
        TWO,
        ("", ""),
        "values: left=nan must be a whole number from -2147483648 to 2147483647",
    ),
    ([3.0, math.inf], TWO, ("", ""), "values: right=inf must be a whole number"),
    ([3.0, 2.0**31], TWO, ("", ""), "values: right=2147483648.0 must be a whole number"),
    ([2.5, 0.0], TWO, ("", ""), "values: left=2.5 must be a whole number"),
    ([3.0, 0.0, math.nan], TWO, CAP, "values: cap=nan must be a number from"),
    ([3.0, 0.0, 1e39], TWO, CAP, r"values: cap=1e\+39 must be a number from"),
]


@pytest.mark.parametrize(("values", "mask", "score", "told"), NO_VALUES)
def test_bad_values_of_the_operator_are_named(
    values: list[float], mask: tuple[str, str], score: tuple[str, str], told: str
) -> None:
    q, k, v = draw(8)
    for function in (
        torch.ops.flashgen.attention_fwd.default,
        lambda *given: torch.ops.flashgen.attention_fwd.default(
            *(each.to("meta") if isinstance(each, Tensor) else each for each in given)
        ),
    ):
        with pytest.raises(InvalidArgument, match=told):
            function(q, k, v, [], *mask, *score, values, 0.2, "bhsd", False)


def test_bad_operands_of_the_operator_are_named() -> None:
    q, k, v = draw(8)
    for operands, mask in (([LENGTHS], WINDOW), ([], PADDING), ([LENGTHS, LENGTHS], PADDING)):
        values = [float(value) for value in mask.values]
        given = (q, k, v, operands, mask.rule.text, mask.rule.name, "", "", values, 0.2, "bhsd", False)
        with pytest.raises(InvalidArgument, match=rf"operands has {len(operands)} entries, the rules take "):
            torch.ops.flashgen.attention_fwd.default(*given)


@pytest.mark.parametrize(
    ("dtype", "return_lse", "told"),
    [
        (torch.float32, False, "without its LSE, .* return_lse=True, or call flashgen.attention"),
        (torch.float8_e4m3fn, True, "no gradients of 8-bit tensors; call flashgen.attention, .* torch's own"),
    ],
    ids=str,
)
def test_the_operator_has_no_gradient_to_lose(dtype: torch.dtype, return_lse: bool, told: str) -> None:
    """Called by hand for a gradient that it has not, it says so at once."""
    q, k, v = (each.to(dtype).requires_grad_() for each in draw(8))
    with pytest.raises(InvalidArgument, match=told):
        torch.ops.flashgen.attention_fwd(q, k, v, [], "True", "full", "", "", [], 0.2, "bhsd", return_lse)


def test_what_needs_no_gradient_costs_none() -> None:
    q, k, v = draw(8, gradient=True)
    rules = ([], "True", "full", "", "", [], 0.2, "bhsd")
    with torch.no_grad():
        assert torch.ops.flashgen.attention_fwd(q, k, v, *rules, False)[0].grad_fn is None
    out, _ = torch.ops.flashgen.attention_fwd(q.detach(), k, v.detach(), *rules, True)
    assert torch.autograd.grad(out.sum(), k)[0].any()


def test_the_operator_has_no_second_derivative_to_lose() -> None:
    q, k, v = draw(8, gradient=True)
    out, _ = torch.ops.flashgen.attention_fwd(q, k, v, [], "True", "full", "", "", [], 0.2, "bhsd", True)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match=r"second derivative of attention is not served.*torch\.func\.grad"):
        dq.sum().backward()


def test_the_operator_has_no_forward_mode_derivative_to_lose() -> None:
    q, k, v = draw(8)
    call = lambda q: torch.ops.flashgen.attention_fwd(  # noqa: E731
        q, k, v, [], "True", "full", "", "", [], 0.2, "bhsd", False
    )
    with pytest.raises(InvalidArgument, match=r"no forward-mode derivative .* call flashgen.attention"):
        torch.func.jvp(lambda q: call(q)[0], (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(InvalidArgument, match="no forward-mode derivative"):
        call(forward_ad.make_dual(q, q))
