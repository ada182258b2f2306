"""Gradients as training code asks for them: compiled, captured, transformed, recomputed, in threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flashgen.api  # which registers the operators
from flashgen import api, masks, score_mods
from flashgen.build.reference import attention_reference
from flashgen.integrations import torch as registry
from flashgen.runtime.dispatcher import Dispatcher

DEVICE = "cuda"
WINDOW = masks.sliding_window(99, 0)


@pytest.fixture
def fresh() -> Dispatcher:
    """The process's dispatcher, made anew."""
    api._dispatcher.cache_clear()
    return api._dispatcher()


def leaves(length: int = 300, heads: int = 8, kv_heads: int = 2, device: str = DEVICE) -> list[Tensor]:
    options: Any = {"device": device, "dtype": torch.bfloat16}
    shapes = ((2, heads, length, 64), *(2 * ((2, kv_heads, length, 64),)))
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def exact(tensors: list[Tensor], dout: Tensor, **rules: Any) -> list[Tensor]:
    own = [each.detach().double().requires_grad_() for each in tensors]
    out, _ = attention_reference(*own, **({"mask": masks.causal()} | rules), dtype=torch.float64)
    return list(torch.autograd.grad(out, own, dout.double()))


def close(found: Any, wanted: Any, limit: float = 1e-2) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - theirs.double()).norm() <= limit * theirs.double().norm()


def causal(*tensors: Tensor) -> Tensor:
    out: Tensor = flashgen.attention(*tensors, mask="causal")
    return out


# Operators and graphs


@pytest.mark.parametrize("lse", [False, True])
def test_the_operators_are_what_their_fakes_say(lse: bool) -> None:
    q, k, v = leaves(40)
    cap = score_mods.softcap(20.0).rule
    told: Any = ([], WINDOW.rule.text, "window", cap.text, cap.name, [99.0, 0.0, 20.0], 0.2, "bhsd")
    torch.library.opcheck(torch.ops.flashgen.attention_fwd.default, (q, k, v, *told, True))
    with torch.no_grad():
        out, of_rows = torch.ops.flashgen.attention_fwd(q, k, v, *told, True)
        dlse = torch.rand_like(of_rows) if lse else None
        given = [each.detach() for each in (q, k, v)]
        call = (torch.randn_like(out), dlse, *given, out, of_rows, "bhsd", *told[:-1])
        torch.library.opcheck(torch.ops.flashgen.attention_bwd.default, call)


def step(block: torch.nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = block(x).float().square().mean()
    return loss


class Block(torch.nn.Module):
    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.rules = torch.nn.Linear(256, 768), torch.nn.Linear(256, 256), rules

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).unbind(2)
        out: Tensor = self.out(flashgen.attention(q, k, v, layout="bshd", **self.rules).flatten(2))
        return out


RULES: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "window and softcap": {"mask": WINDOW, "score_mod": score_mods.softcap(20.0)},
}


def block_of(**rules: Any) -> Block:
    torch.manual_seed(0)
    return Block(**rules).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_c35_a_training_step_is_at_most_two_graphs(rules: dict[str, Any], fresh: Dispatcher) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = block_of(**rules)
    compiled = torch.compile(block, fullgraph=True)
    for length in (100, 1024, 77, 513, 5):
        x = torch.randn(2, length, 256, device=DEVICE, dtype=torch.bfloat16)
        found = torch.autograd.grad(step(compiled, x), list(block.parameters()))
        close(found, torch.autograd.grad(step(block, x), list(block.parameters())), 2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert fresh.resolves > 0


def test_c22_a_training_step_with_mode_reduce_overhead(fresh: Dispatcher) -> None:
    torch._dynamo.reset()
    block = block_of(mask="causal")
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for _ in range(2):
        for length in (256, 100):
            for _ in range(3):
                x = torch.randn(2, length, 256, device=DEVICE, dtype=torch.bfloat16)
                torch.compiler.cudagraph_mark_step_begin()
                found = torch.autograd.grad(step(compiled, x), list(block.parameters()))
                found = [each.clone() for each in found]
                close(found, torch.autograd.grad(step(block, x), list(block.parameters())), 2e-2)


def test_c21_a_first_training_step_inside_a_capture(
    fresh: Dispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is tuned, compiled or loaded; one line for each of the two passes says what was captured."""
    tensors = leaves()
    dout = torch.randn_like(tensors[0])
    torch.autograd.grad((tensors[0] * 1.0).sum(), tensors[0])  # the engine's threads are there
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with caplog.at_level(logging.WARNING, "flashgen"), torch.cuda.graph(graph):
        found = torch.autograd.grad(causal(*tensors), tensors, dout)
    assert fresh.resolves == 0
    lines = [each.message for each in caplog.records if "CUDA graph is being captured" in each.message]
    assert len(lines) == 2
    with torch.no_grad():
        for each in tensors:
            each.copy_(torch.randn_like(each))
    graph.replay()
    torch.cuda.synchronize()
    close(found, exact(tensors, dout))
    close(torch.autograd.grad(causal(*tensors), tensors, dout), found, 2e-2)
    assert fresh.resolves == 2, "outside, kernels are found as ever"


def test_a_captured_step_of_another_length_takes_loaded_kernels(
    fresh: Dispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    short, tensors = leaves(100), leaves(700)
    torch.autograd.grad(causal(*short).sum(), short)
    resolved, dout = fresh.resolves, torch.randn_like(tensors[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with caplog.at_level(logging.WARNING, "flashgen"), torch.cuda.graph(graph):
        found = torch.autograd.grad(causal(*tensors), tensors, dout)
    graph.replay()
    torch.cuda.synchronize()
    close(found, exact(tensors, dout))
    assert fresh.resolves == resolved and "torch's attention is captured" not in caplog.text


# Transforms and what is recomputed


def test_torch_func_grad_runs_kernels(fresh: Dispatcher) -> None:
    tensors = leaves(64)
    plain = [each.detach() for each in tensors]
    dout = torch.randn_like(plain[0])
    found = torch.func.grad(lambda *given: (causal(*given) * dout).float().sum(), argnums=(0, 1, 2))(*plain)
    assert fresh.resolves == 2
    close(found, exact(tensors, dout))
    jacobian = torch.func.jacrev(lambda k: causal(plain[0], k, plain[2])[0, 0, 5:7, 0])(plain[1])
    for row, ours in zip((5, 6), jacobian, strict=True):
        only = torch.zeros_like(dout)
        only[0, 0, row, 0] = 1
        close([ours], [exact(tensors, only)[1]], 5e-2)


def test_per_sample_gradients_are_torchs() -> None:
    q, k, v = (each.detach() for each in leaves(32))
    one = lambda q, k, v: causal(q[None], k[None], v[None]).float().square().sum()  # noqa: E731
    found = torch.func.vmap(torch.func.grad(one, argnums=(0, 1, 2)))(q, k, v)
    own = [each.requires_grad_() for each in (q, k, v)]
    close(found, torch.autograd.grad(causal(*own).float().square().sum(), own), 2e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    tensors = leaves()
    out = checkpoint(causal, *tensors, use_reentrant=reentrant)
    dout = torch.randn_like(out)
    out.backward(dout)
    found = [each.grad for each in tensors]
    wanted = torch.autograd.grad(causal(*tensors), tensors, dout)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtypes_of_sdpa(low: torch.dtype) -> None:
    q, k, v = (each.detach().float().requires_grad_() for each in leaves(kv_heads=8))
    found = []
    for function in (flashgen.sdpa, F.scaled_dot_product_attention):
        with torch.autocast("cuda", low):
            out = function(q, k, v, is_causal=True)
        assert out.dtype == low
        found.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
        assert all(each.dtype == torch.float32 for each in found[-1])
    close(*found, 2e-2)


# Streams, threads, devices


def test_several_threads_on_streams_of_their_own(fresh: Dispatcher) -> None:
    tensors = leaves(1000)
    dout = torch.randn_like(tensors[0])
    wanted = torch.autograd.grad(causal(*tensors), tensors, dout)
    fresh.forget()
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                own = [(each.detach() * 1.0).requires_grad_() for each in tensors]
                found = torch.autograd.grad(causal(*own), own, dout * 1.0)
                if not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)):
                    wrong.append(index)

    run_all([lambda index=index: work(index) for index in range(4)])
    assert not wrong


def run_all(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", [False, True])
def test_c23_gradients_on_a_gpu_that_is_not_the_current_one(compiled: bool) -> None:
    assert torch.cuda.current_device() == 0
    tensors = leaves(device="cuda:1")
    dout = torch.randn_like(tensors[0])
    function = torch.compile(causal, fullgraph=True) if compiled else causal
    found = torch.autograd.grad(function(*tensors), tensors, dout)
    assert all(each.device.index == 1 for each in found)
    close(found, exact(tensors, dout))


# In the place of torch's attention


@pytest.fixture
def flash_is_ours() -> Iterator[None]:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no registry")
    registry.register()
    torch.nn.attention.activate_flash_attention_impl("flashgen")
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.usefixtures("flash_is_ours")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_torchs_flash_attention_is_flashgens(is_causal: bool, compiled: bool, fresh: Dispatcher) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    torch._dynamo.reset()
    tensors = leaves()
    dout = torch.randn_like(tensors[0])
    found = torch.autograd.grad((torch.compile(call) if compiled else call)(*tensors), tensors, dout)
    assert fresh.resolves == 2
    close(found, exact(tensors, dout, mask=masks.causal() if is_causal else masks.full()))


@pytest.mark.usefixtures("flash_is_ours")
def test_what_has_no_kernel_does_not_come_back_as_torchs_flash_attention(fresh: Dispatcher) -> None:
    """A capture finds no kernel loaded, and torch's attention is what would call FlashGen again."""
    tensors = leaves(kv_heads=8)
    dout = torch.randn_like(tensors[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(causal(*tensors), tensors, dout)
    graph.replay()
    torch.cuda.synchronize()
    close(found, exact(tensors, dout))


def test_a_plain_loop_with_sdpa_replaced() -> None:
    """The loss of 50 steps beside that with torch's own."""
    curves = []
    for function in (flashgen.sdpa, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        embed, head = torch.nn.Embedding(32, 128).to(DEVICE), torch.nn.Linear(128, 32).to(DEVICE)
        qkv = torch.nn.Linear(128, 384).to(DEVICE)
        parameters = [*embed.parameters(), *head.parameters(), *qkv.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=3e-3)
        found = []
        for _ in range(50):
            ids = torch.randint(32, (8, 64), device=DEVICE)
            with torch.autocast("cuda", torch.bfloat16):
                x = embed(ids)
                q, k, v = qkv(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
                x = x + function(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
                # The token of two places before.
                loss = F.cross_entropy(head(x)[:, 2:].flatten(0, 1).float(), ids[:, :-2].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        curves.append(torch.stack(found).cpu())
    torch.testing.assert_close(*curves, atol=2e-2, rtol=0.0)
