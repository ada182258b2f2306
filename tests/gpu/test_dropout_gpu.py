"""dropout_p on a GPU: kernels with what `Dropout.kept` says, and calls of users, in CUDA graphs too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from checked import CAUSAL, COMBINED, DEVICE, check, workload
from test_attention_bwd_gpu import check as check_gradients
from test_attention_bwd_gpu import close, exact, leaves
from torch import Tensor

import flashgen
from flashgen import masks, score_mods
from flashgen.build.dropout import Dropout, draw_seed
from flashgen.build.reference import attention_reference, packed_reference
from flashgen.spec.attention import Workload
from flashgen.spec.masks import Mask

P = 0.2
DIMS = ((16, 16), (64, 64), (96, 72), (128, 128), (256, 256))


def dropping(*dims: int, **options: Any) -> Workload:
    work = workload(*dims, **options)
    return replace(work, spec=replace(work.spec, dropout=True))


def next_dropout() -> Dropout:
    """What the next call drops: the generator is left as it was."""
    state = torch.cuda.get_rng_state()
    seed = draw_seed(torch.device(DEVICE))
    torch.cuda.set_rng_state(state)
    return Dropout(P, seed)


# Kernels


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], dtype: str) -> None:
    sizes = (2, 4, 2, 300, 300)
    check(dropping(*dims, dtype=dtype, sizes=sizes))
    if dtype != "fp32" or max(dims) <= 128:
        check_gradients(dropping(*dims, dtype=dtype, sizes=sizes))


@pytest.mark.parametrize("mask", [masks.full(), masks.sliding_window(99, 3), *COMBINED], ids=str)
def test_masks(mask: Mask) -> None:
    check(dropping(mask=mask, sizes=(2, 4, 2, 500, 700)))
    check_gradients(dropping(mask=mask, sizes=(2, 4, 2, 500, 700)))


@pytest.mark.parametrize("tile", ["m64n64w4s1", "m128n64w8s2", "m64n128w8s2", "m32n32w4s2"])
@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_tiles_draw_the_same(tile: str, loads: str) -> None:
    work = dropping(score_mod=score_mods.softcap(20.0))
    check(work, f"{tile}_{loads}_heads")
    check_gradients(work, f"{tile}_{loads}_heads")


def test_split_keys() -> None:
    check(dropping(sizes=(1, 8, 2, 16, 5000)), "m16n64w4s2k16_tma_heads")


# Calls of users


def test_both_passes_by_kernels() -> None:
    tensors, drops = leaves(), next_dropout()
    told = flashgen.explain(*tensors, mask="causal", dropout_p=P)
    assert (told.family, told.gradients) == ("attention_fwd", "attention_bwd")
    assert torch.equal(next_dropout().seed, drops.seed), "explain draws nothing"
    out, lse = flashgen.attention(*tensors, mask="causal", dropout_p=P, return_lse=True)
    rules = {"mask": CAUSAL, "dropout": drops}
    close([out], [attention_reference(*(each.double() for each in tensors), **rules, dtype=torch.float64)[0]])
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    close(torch.autograd.grad([out, lse], tensors, [dout, dlse]), exact(tensors, dout, dlse, **rules))


def test_packed_sequences() -> None:
    """Values and gradients, both by kernels."""
    cu = (0, 700, 700, 1000)
    q, k, v = tensors = [
        torch.randn(1000, 4, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    starts, drops = torch.tensor(cu, dtype=torch.int32, device=DEVICE), next_dropout()
    own = [each.detach().double().requires_grad_() for each in tensors]
    wanted, _ = packed_reference(*own, cu, cu, mask=CAUSAL, dropout=drops, dtype=torch.float64)
    with torch.no_grad():
        places = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 700, "max_seqlen_k": 700}
        assert flashgen.explain(q, k, v, **places, dropout_p=P).family == "attention_fwd"
        state = torch.cuda.get_rng_state()
        out = flashgen.attention_varlen(q, k, v, **places, mask="causal", dropout_p=P)
        close([out], [wanted])
        torch.cuda.set_rng_state(state)
    assert flashgen.explain(q, k, v, **places, dropout_p=P).gradients == "attention_bwd"
    out = flashgen.attention_varlen(q, k, v, **places, mask="causal", dropout_p=P)
    close([out], [wanted])
    dout = torch.randn_like(out)
    close(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(wanted, own, dout.double()))


def test_sinks_and_what_a_rule_reads_learn() -> None:
    """Of the weights that were not dropped."""
    q, k, v = leaves()
    slopes = torch.rand(q.shape[1], device=DEVICE).requires_grad_()
    sinks = torch.randn(q.shape[1], device=DEVICE).requires_grad_()
    given, drops = (q, k, v, slopes, sinks), next_dropout()
    mod, own = score_mods.alibi(slopes), [each.detach().double().requires_grad_() for each in given]
    told = flashgen.explain(q, k, v, mask="causal", score_mod=mod, sinks=sinks, dropout_p=P)
    assert told.gradients == "attention_bwd"
    out = flashgen.attention(q, k, v, mask="causal", score_mod=mod, sinks=sinks, dropout_p=P)
    rules = {"mask": CAUSAL, "score_mod": replace(mod, tensors=(own[3],)), "sinks": own[4], "dropout": drops}
    wanted, _ = attention_reference(*own[:3], **rules, dtype=torch.float64)
    close([out], [wanted])
    dout = torch.randn_like(out)
    close(torch.autograd.grad(out, given, dout), torch.autograd.grad(wanted, own, dout.double()), limit=2e-2)


def test_manual_seed_repeats_and_sdpa_is_the_same() -> None:
    q, k, v = (each.detach() for each in leaves(heads=4, kv_heads=4))
    torch.manual_seed(5)
    one, two = (flashgen.attention(q, k, v, mask="causal", dropout_p=P) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(flashgen.sdpa(q, k, v, is_causal=True, dropout_p=P), one)
    assert torch.equal(flashgen.attention(q, k, v, mask="causal", dropout_p=P), two)
    assert not torch.equal(one, two)


def seen(out: Tensor) -> Tensor:
    """Which weights reached an output whose values are the unit matrix."""
    return out.detach() != 0


def test_as_many_are_dropped_as_the_probability_says() -> None:
    q, k = (torch.randn(8, 8, n, 64, device=DEVICE, dtype=torch.float16) for n in (512, 64))
    v = torch.eye(64, device=DEVICE, dtype=torch.float16).expand(8, 8, 64, 64)
    kept = seen(flashgen.attention(q, k, v, dropout_p=P, scale=0.01)).double().mean()
    assert abs(float(kept) - (1 - P)) <= 5 * math.sqrt(P * (1 - P) / (8 * 8 * 512 * 64))


def test_a_graph_drops_anew_at_each_replay_and_alike_in_both_passes() -> None:
    """With the unit matrix as values the output is the weights, so dv is its transpose times dout."""
    q, k = (torch.randn(2, 4, 64, 64, device=DEVICE, dtype=torch.float16).requires_grad_() for _ in range(2))
    v = torch.eye(64, device=DEVICE, dtype=torch.float16).expand(2, 4, 64, 64).contiguous().requires_grad_()
    dout = torch.randn_like(q)

    def step() -> tuple[Tensor, Tensor]:
        out = flashgen.attention(q, k, v, dropout_p=P)
        return out, torch.autograd.grad(out, v, dout)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()

    def replay() -> Tensor:
        graph.replay()
        torch.testing.assert_close(
            dv, (out.detach().mT.double() @ dout.double()).half(), atol=1e-2, rtol=1e-2
        )
        return out.detach().clone()

    torch.manual_seed(9)
    one, two, three = (replay() for _ in range(3))
    assert all(0.7 < float(seen(each).double().mean()) < 0.9 for each in (one, two, three))
    assert not torch.equal(one, two) and not torch.equal(two, three)
    torch.manual_seed(9)
    assert torch.equal(replay(), one) and torch.equal(replay(), two)


def test_nothing_of_the_square_of_the_length_is_kept() -> None:
    """65,536 tokens: what is kept of each pair would take 4 GB as bytes, for one head."""
    tensors = [
        torch.randn(1, 1, 2**16, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    flashgen.attention(*(each[:, :, :1024] for each in tensors), mask="causal", dropout_p=P).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flashgen.attention(*tensors, mask="causal", dropout_p=P).sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 8 * tensors[0].numel() * 2
    assert all(each.grad is not None and each.grad.isfinite().all() for each in tensors)


@pytest.mark.parametrize("gradient", [False, True])
def test_compiled_calls_drop_too(gradient: bool) -> None:
    q, k, v = (each.requires_grad_(gradient) for each in leaves(heads=4, kv_heads=4))
    compiled = torch.compile(
        lambda q, k, v: flashgen.attention(q, k, v, mask="causal", dropout_p=P), fullgraph=True
    )
    torch.manual_seed(5)
    one, two = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(compiled(q, k, v), one) and not torch.equal(one, two)
    whole = flashgen.attention(q, k, v, mask="causal")
    assert float((one - whole).norm()) > 0.05 * float(whole.norm())
