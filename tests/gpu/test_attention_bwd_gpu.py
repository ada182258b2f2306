"""attention_bwd on a GPU: its kernels against the reference, and calls of users through autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from checked import CAUSAL, COMBINED, DEVICE, TABLE, among_nan, workload
from torch import Tensor

import flashgen
from flashgen import masks, score_mods
from flashgen.build.arguments import FACTS, facts_code
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.device import current_target
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.launch import load_kernel
from flashgen.build.reference import attention_reference
from flashgen.codegen.families import find_family
from flashgen.codegen.family import Family
from flashgen.codegen.source import render
from flashgen.measure.check_gradients import GradientRig
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.rule import values_and_tensors
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod

FAMILY = find_family("attention_bwd")


def check(
    work: Workload, config: str = "", layout: str = "bhsd", family: Family = FAMILY, **tensors: Tensor
) -> None:
    """As `judge`; `tensors` take the place of the random q, k and v."""
    inputs = replace(make_inputs(work, DEVICE, layout), **tensors)  # type: ignore[arg-type]
    judge(inputs, work.spec, config, family)


def judge(inputs: Inputs, spec: AttentionSpec, config: str = "", family: Family = FAMILY) -> None:
    """Gradients of given inputs, and of the spec of their forward call, are right, and have the same bits
    twice if the config gives them."""
    spec, target = spec.backward(), current_target()
    rig = GradientRig(inputs, spec)
    env = rig.environment(*rig.buffers())
    _, operands = values_and_tensors(inputs.mask, inputs.score_mod)
    facts = FACTS[facts_code(env[:29], spec.itemsize, operands)]
    chosen = family.find(config) if config else family.default(spec, target, facts)
    kernel = load_kernel(compile_kernel(render(spec, chosen, toolchain()), facts, target))

    def run(*buffers: Tensor) -> None:
        kernel.launch(rig.environment(*buffers), torch.cuda.current_stream().cuda_stream)

    verdict, same = rig.examine(run)
    assert verdict.ok, f"{chosen.name}: {verdict.reason}"
    assert same or not family.tiling(chosen).repeats, "two runs differ"


DIMS = ((16, 16), (64, 64), (72, 40), (96, 96), (128, 128), (192, 128), (256, 256))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], dtype: str) -> None:
    check(workload(*dims, dtype=dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32(head_dim: int) -> None:
    check(workload(head_dim, dtype="fp32", sizes=(1, 2, 1, 300, 300)))


@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask) -> None:
    check(workload(mask=mask, sizes=(2, 4, 2, 500, 700)))


@pytest.mark.parametrize(
    "mod", [m for e in SCORE_MODS.values() for m in e.examples()], ids=lambda m: m.describe()
)
def test_score_rules(mod: ScoreMod) -> None:
    check(workload(score_mod=mod, sizes=(2, 4, 2, 500, 700)))


CONFIGS = ("m64n64w4s1", "m64n64w4s3", "m128n64w8s2", "m64n128w8s2", "m32n32w4s2")


@pytest.mark.parametrize("loads", ["tma_heads", "pointer_rows"])
@pytest.mark.parametrize("tile", CONFIGS)
def test_configs(tile: str, loads: str) -> None:
    if loads.startswith("tma") and not current_target().has_tma:
        pytest.skip("descriptors need sm_90")
    check(workload(), f"{tile}_{loads}")


SIZES = ((1, 1, 1, 1, 1), (3, 6, 2, 65, 1000), (2, 4, 4, 1000, 65), (1, 8, 1, 4096, 4096))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: tuple[int, int, int, int, int], layout: str) -> None:
    check(workload(sizes=sizes), layout=layout)


def test_neighbours_in_memory_are_not_read() -> None:
    work = workload(dtype="fp16", sizes=(2, 4, 2, 333, 222))
    check(work, **among_nan(make_inputs(work, DEVICE)))


# One kernel of all gradients


def fused(tile: str = "m64n64w8s2") -> str:
    """The config of this tile that loads by descriptors where there are any."""
    return f"{tile}_{'tma' if current_target().has_tma else 'pointer'}_heads_fused"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_fused_head_dims(dims: tuple[int, int], dtype: str) -> None:
    check(workload(*dims, dtype=dtype), fused("m32n32w8s1" if max(dims) > 128 else "m64n64w8s2"))


def test_fused_float32() -> None:
    check(workload(64, dtype="fp32", sizes=(1, 2, 1, 300, 300)), "m32n32w8s1_pointer_heads_fused")


@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
def test_fused_masks(mask: Mask) -> None:
    check(workload(mask=mask, sizes=(2, 4, 2, 500, 700)), fused())


@pytest.mark.parametrize(
    "mod", [m for e in SCORE_MODS.values() for m in e.examples()], ids=lambda m: m.describe()
)
def test_fused_score_rules(mod: ScoreMod) -> None:
    check(workload(score_mod=mod, sizes=(2, 4, 2, 500, 700)), fused())


@pytest.mark.parametrize("loads", ["tma_heads", "pointer_rows"])
@pytest.mark.parametrize("tile", CONFIGS)
def test_fused_configs(tile: str, loads: str) -> None:
    if loads.startswith("tma") and not current_target().has_tma:
        pytest.skip("descriptors need sm_90")
    check(workload(), f"{tile}_{loads}_fused")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fused_sizes(sizes: tuple[int, int, int, int, int], layout: str) -> None:
    check(workload(sizes=sizes), fused(), layout)


@pytest.mark.parametrize("mask", [masks.full(), CAUSAL], ids=lambda m: m.describe())
def test_fused_keys_that_do_not_exist_add_nothing(mask: Mask) -> None:
    """Of rows whose scores are under -88 the weight of a score of 0 is infinite."""
    work = workload(64, mask=mask, sizes=(1, 2, 2, 512, 700))
    inputs = make_inputs(work, DEVICE)
    check(work, fused(), q=inputs.q.abs() * 4 + 4, k=-inputs.k.abs() * 4 - 4)


def test_fused_neighbours_in_memory_are_not_read() -> None:
    work = workload(dtype="fp16", sizes=(2, 4, 2, 333, 222))
    check(work, fused(), **among_nan(make_inputs(work, DEVICE)))


# Calls of users


def leaves(
    q_len: int = 500, k_len: int = 500, heads: int = 8, kv_heads: int = 2, head_dim: int = 64, **named: Any
) -> list[Tensor]:
    shapes = ((2, heads, q_len, head_dim), *(2 * ((2, kv_heads, k_len, head_dim),)))
    options = {"device": DEVICE, "dtype": torch.bfloat16} | named
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def exact(tensors: list[Tensor], dout: Tensor, dlse: Tensor | None = None, **rules: Any) -> list[Tensor]:
    own = [each.detach().double().requires_grad_() for each in tensors]
    out, lse = attention_reference(*own, **rules, dtype=torch.float64)
    results = [(out, dout.double())] + ([] if dlse is None else [(lse, dlse.double())])
    return list(torch.autograd.grad([r for r, _ in results], own, [g for _, g in results]))


def close(found: Any, wanted: Any, limit: float = 1e-2) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - theirs).norm() <= limit * theirs.norm()


RULES: dict[str, dict[str, Any]] = {
    "causal": {"mask": CAUSAL},
    "window and softcap": {"mask": masks.sliding_window(99, 0), "score_mod": score_mods.softcap(20.0)},
    "alibi": {"mask": CAUSAL, "score_mod": score_mods.alibi(torch.rand(8))},
}
PORTABLE: dict[str, Any] = {"deterministic": True}
"""What makes the portable family serve also where a record names the Hopper one."""


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_a_loss_of_output_and_lse(rules: dict[str, Any]) -> None:
    if rules.get("score_mod") is not None and rules["score_mod"].tensors:
        mod = rules["score_mod"]
        rules = rules | {"score_mod": ScoreMod(mod.rule, mod.values, tuple(t.cuda() for t in mod.tensors))}
    tensors = leaves()
    told = flashgen.explain(*tensors, **rules, **PORTABLE)
    assert told.gradients == "attention_bwd" and "gradients: family default" in str(told)
    out, lse = flashgen.attention(*tensors, return_lse=True, **rules, **PORTABLE)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    close(torch.autograd.grad([out, lse], tensors, [dout, dlse]), exact(tensors, dout, dlse, **rules))


@pytest.mark.parametrize("learned", [False, True], ids=["constant", "learned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_and_a_row_that_sees_nothing(dtype: torch.dtype, learned: bool) -> None:
    """Over more rows than one step of a sink's program has."""
    tensors = leaves(q_len=4500, k_len=4400)
    sinks = torch.randn(8, device=DEVICE).to(dtype).requires_grad_(learned)
    rules: dict[str, Any] = {"mask": "causal", "sinks": sinks} | ({} if learned else PORTABLE)
    told = flashgen.explain(*tensors, **rules)
    assert told.gradients == "attention_bwd"
    out, lse = flashgen.attention(*tensors, return_lse=True, **rules)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    inputs = (*tensors, sinks) if learned else tensors
    found = torch.autograd.grad([out, lse], inputs, [dout, dlse], retain_graph=True)
    own = [each.detach().double().requires_grad_() for each in (*tensors, sinks)]
    exact_out, exact_lse = attention_reference(*own[:3], mask=CAUSAL, sinks=own[3], dtype=torch.float64)
    wanted = torch.autograd.grad([exact_out, exact_lse], own, [dout.double(), dlse.double()])
    close(found, wanted[: len(found)])
    assert not found[0][:, :, :100].any()  # above the first key
    again = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_fused_views_and_an_expanded_gradient() -> None:
    fused = torch.randn(2, 500, 3, 8, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    q, k, v = (fused[:, :, i] for i in range(3))
    flashgen.attention(q, k, v, mask="causal", layout="bshd").sum().backward()
    apart = [each.transpose(1, 2).detach() for each in (q, k, v)]
    wanted = exact(apart, torch.ones_like(apart[0]), mask=CAUSAL)
    close([fused.grad[:, :, i].transpose(1, 2) for i in range(3)], wanted)


def test_c19_fifty_runs_give_the_same_bits() -> None:
    """Of 8 query heads on 2 key heads, whose gradients are sums over a group."""
    tensors = leaves(q_len=1000, k_len=1000)
    out = flashgen.attention(*tensors, mask="causal", deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(out, tensors, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_c22_captured_in_a_cuda_graph() -> None:
    tensors = leaves()
    dout = torch.randn_like(tensors[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(flashgen.attention(*tensors, mask="causal"), tensors, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(flashgen.attention(*tensors, mask="causal"), tensors, dout)
    with torch.no_grad():
        for each in tensors:
            each.copy_(torch.randn_like(each))
    graph.replay()
    close(found, exact(tensors, dout, mask=CAUSAL))


@pytest.mark.parametrize("options", [{}, PORTABLE], ids=["", "deterministic"])
def test_nothing_grows_with_the_square_of_the_length(options: dict[str, Any]) -> None:
    """131,072 tokens: their scores would take 34 GB in 16 bits, for one head."""
    tensors = [
        torch.randn(1, 1, 2**17, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    options = options | {"mask": "causal"}
    flashgen.attention(*(each[:, :, :1024] for each in tensors), **options).sum().backward()
    for each in tensors:
        each.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sums = 2 if flashgen.explain(*tensors, **options).gradients == "attention_bwd_sm90" else 0
    flashgen.attention(*tensors, **options).sum().backward()
    one = tensors[0].numel() * 2
    # Output, its gradient (expanded, then laid out), three gradients; LSE and two numbers for each row; the
    # Hopper family's sums of dq in float32, too.
    assert torch.cuda.max_memory_allocated() - before <= (6.5 + sums) * one
    assert all(each.grad is not None and each.grad.isfinite().all() for each in tensors)


def test_a_second_derivative_is_refused() -> None:
    tensors = leaves(q_len=64, k_len=64)
    (dq,) = torch.autograd.grad(
        flashgen.attention(*tensors).float().square().sum(), tensors[0], create_graph=True
    )
    with pytest.raises(RuntimeError, match="second derivative of attention is not served"):
        dq.float().sum().backward()


def test_c01_loss_of_a_batch_whose_keys_are_all_padding() -> None:
    tensors = leaves(q_len=64, k_len=64)
    keep = torch.ones(2, 64, dtype=torch.bool, device=DEVICE)
    keep[1] = False
    out = flashgen.attention(*tensors, mask=masks.key_padding(keep))
    for each in torch.autograd.grad(out.sum(), tensors):
        assert each.isfinite().all() and not each[1].any() and each[0].any()
    assert math.isfinite(float(out.detach().float().sum()))
