"""attention_bwd_sm90 on a GPU: its kernels against the reference, and against each other's runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from checked import COMBINED, DEVICE, TABLE, among_nan, skip_unless_served, workload
from test_attention_bwd_gpu import check, judge
from test_varlen_gpu import packed

from flashgen import masks
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.device import current_target
from flashgen.build.inputs import make_inputs
from flashgen.build.launch import load_kernel
from flashgen.build.reference import attention_reference
from flashgen.codegen.families import find_family
from flashgen.codegen.source import render
from flashgen.measure.check_gradients import GradientRig
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod
from flashgen.spec.target import TARGETS

FAMILY = find_family("attention_bwd_sm90")


@pytest.fixture(autouse=True)
def _hopper() -> None:
    skip_unless_served(FAMILY.name, workload().spec.backward())


def right(work: Workload, config: str = "", **named: Any) -> None:
    check(work, config, family=FAMILY, **named)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
@pytest.mark.parametrize("length", [64, 128, 1000, 4096])
def test_causal_and_full(length: int, mask: Mask, head_dim: int) -> None:
    right(workload(head_dim, mask=mask, sizes=(1, 2, 2, length, length)))


@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
@pytest.mark.parametrize("dims", [(64, 64), (16, 16), (72, 40), (96, 96), (40, 112)], ids=str)
@pytest.mark.parametrize("by", ["", "_third"])
def test_a_third_warpgroup_computes_dq(by: str, dims: tuple[int, int], mask: Mask) -> None:
    operands = "registers" if sum(dims) <= 128 else "shared"
    right(workload(*dims, mask=mask), f"s3g4_{operands}{by}")


DIMS = ((16, 16), (64, 64), (72, 40), (96, 96), (128, 128), (128, 64), (64, 128))
DIMS += ((256, 256), (192, 128), (160, 160), (248, 200), (256, 40), (128, 256))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], dtype: str) -> None:
    right(workload(*dims, dtype=dtype))


@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
@pytest.mark.parametrize("head_dim", [64, 256])
def test_masks(mask: Mask, head_dim: int) -> None:
    right(workload(head_dim, mask=mask, sizes=(2, 4, 2, 500, 700)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lists_of_each_head(head_dim: int) -> None:
    right(workload(head_dim, mask=masks.block_sparse("batch_heads", 64), sizes=(2, 4, 2, 1000, 1000)))


RULES = [mod for entry in SCORE_MODS.values() for mod in entry.examples()]
PAIRED = ("bias", "relative")
"""Rules that read for each pair: at head_dim 256 they spill in the loop, and the compile refuses them."""


@pytest.mark.parametrize(
    ("head_dim", "mod"),
    [(dim, mod) for dim in (64, 256) for mod in RULES if dim == 64 or not mod.describe().startswith(PAIRED)],
    ids=lambda each: each.describe() if isinstance(each, ScoreMod) else str(each),
)
def test_score_rules(head_dim: int, mod: ScoreMod) -> None:
    right(workload(head_dim, score_mod=mod, sizes=(2, 4, 2, 500, 700)))


SERVED_AT_128 = [mod for mod in RULES if not mod.describe().startswith(("softcap", "relative"))]


@pytest.mark.parametrize("mod", SERVED_AT_128, ids=lambda m: m.describe())
def test_score_rules_at_head_dim_128(mod: ScoreMod) -> None:
    """The gradients of weights come later there; what spills all the same, the compile refuses."""
    right(workload(128, score_mod=mod, sizes=(2, 4, 2, 500, 700)))


CONFIGS = [
    (head_dim, config.name)
    for head_dim in (64, 128, 160)
    for config in FAMILY.space(workload(head_dim).spec.backward(), TARGETS["nvidia-h200"])
]


@pytest.mark.parametrize(("head_dim", "config"), CONFIGS, ids=str)
def test_configs(head_dim: int, config: str) -> None:
    right(workload(head_dim), config)


SIZES = ((1, 1, 1, 1, 1), (3, 6, 2, 65, 1000), (2, 4, 4, 1000, 65), (1, 8, 1, 4096, 4096))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: tuple[int, int, int, int, int], head_dim: int, layout: str) -> None:
    right(workload(head_dim, sizes=sizes), layout=layout)


SPILLING = {
    (128, 128): ("dilated", "sliding_window(64"),
    (256, 256): ('document("ordered")', 'block_sparse("heads"'),
}
"""Of packed sequences, masks that spill in the loop, and the compile refuses them."""
PACKED = [
    (dims, mask)
    for dims in ((64, 64), (40, 24), (96, 80), (112, 112), (128, 128), (192, 128), (256, 256))
    for mask in TABLE + COMBINED
    if not mask.describe().startswith(SPILLING.get(dims, ("no mask",)))
]


@pytest.mark.parametrize(
    ("dims", "mask"), PACKED, ids=lambda each: each.describe() if isinstance(each, Mask) else str(each)
)
def test_packed_sequences(dims: tuple[int, int], mask: Mask) -> None:
    judge(*packed(mask=mask, head_dim=dims[0], head_dim_v=dims[1]), family=FAMILY)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_packed_sequences(head_dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(0, 40, (1500,), generator=draw).tolist())
    judge(*packed((lengths, lengths), head_dim=head_dim), family=FAMILY)


@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(70, 20)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_c05_a_packed_neighbours_nan_reaches_nobody(mask: Mask, head_dim: int) -> None:
    """Bits of dk and dv; dq's sums have no order."""
    inputs, forward = packed(mask=mask, head_dim=head_dim)
    spec, target = forward.backward(), current_target()
    rig, chosen = GradientRig(inputs, spec), FAMILY.default(spec, target, CallFacts())
    kernel = load_kernel(compile_kernel(render(spec, chosen, toolchain()), CallFacts(), target))
    own = [torch.ones(each.shape[1], dtype=torch.bool, device=DEVICE) for each in (inputs.q, inputs.k)]

    def run() -> list[torch.Tensor]:
        buffers = [torch.full_like(each, torch.nan) for each in (inputs.q, inputs.k, inputs.v)]
        kernel.launch(rig.environment(*buffers), torch.cuda.current_stream().cuda_stream)
        return buffers

    clean = run()
    cu_q, cu_k = (each.tolist() for each in inputs.packed or ())
    for s in range(1, len(cu_q) - 1, 2):
        of_q, of_k = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        for each in (inputs.q, rig.dout):
            each[:, of_q] = torch.nan
        for each in (inputs.k, inputs.v):
            each[:, of_k] = torch.nan
        own[0][of_q] = own[1][of_k] = False
    dq, dk, dv = run()
    assert torch.equal(dk[:, own[1]], clean[1][:, own[1]]) and torch.equal(dv[:, own[1]], clean[2][:, own[1]])
    torch.testing.assert_close(dq[:, own[0]], clean[0][:, own[0]], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_sinks(head_dim: int) -> None:
    """Over more rows than one step of a sink's program has, which are no whole blocks."""
    work = workload(head_dim, sizes=(2, 4, 2, 4500, 300))
    logits = torch.tensor([3.0, -2.0, 0.5, 0.0], device=DEVICE)
    inputs = replace(make_inputs(work, DEVICE), sinks=logits)
    spec, target = replace(work.spec, sinks="fp32").backward(sinks=True), current_target()
    config = FAMILY.default(spec, target, CallFacts())
    kernel = load_kernel(compile_kernel(render(spec, config, toolchain()), CallFacts(), target))
    rig, dsinks = GradientRig(inputs, spec), torch.full_like(logits, torch.nan)

    def run(*buffers: torch.Tensor) -> None:
        env = inputs.gradient_environment(rig.out, rig.lse, (rig.dout, *buffers), rig.dlse, dsinks=dsinks)
        kernel.launch(env, torch.cuda.current_stream().cuda_stream)

    verdict, _ = rig.examine(run)
    assert verdict.ok, verdict.reason
    own = [each.double().requires_grad_() for each in (*inputs.true(), logits)]
    out, _ = attention_reference(*own[:3], mask=inputs.mask, sinks=own[3], dtype=torch.float64)
    (wanted,) = torch.autograd.grad(out, own[3:], inputs.bhsd(rig.dout).double())
    torch.testing.assert_close(dsinks.double(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_neighbours_in_memory_are_not_read(head_dim: int) -> None:
    work = workload(head_dim, dtype="fp16", sizes=(2, 4, 2, 333, 222))
    right(work, **among_nan(make_inputs(work, DEVICE)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
def test_many_runs_agree(mask: Mask, head_dim: int) -> None:
    """dk and dv to the bit, for their sums have one order; dq as closely as float32 sums of any order, once
    rounded. With more tiles than multiprocessors, and of different lengths."""
    work = workload(head_dim, mask=mask, sizes=(2, 8, 4, 2000, 2000))
    spec, target = work.spec.backward(), current_target()
    rig = GradientRig(make_inputs(work, DEVICE), spec)
    chosen = FAMILY.default(spec, target, CallFacts())
    kernel = load_kernel(compile_kernel(render(spec, chosen, toolchain()), CallFacts(), target))

    def run(*buffers: Any) -> tuple[torch.Tensor, ...]:
        kernel.launch(rig.environment(*buffers), torch.cuda.current_stream().cuda_stream)
        return tuple(each.clone() for each in buffers)

    verdict, _ = rig.examine(run)
    assert verdict.ok, verdict.reason
    first = run(*rig.buffers())
    for _ in range(50):
        dq, dk, dv = run(*rig.buffers())
        assert torch.equal(dk, first[1]) and torch.equal(dv, first[2])
        assert (dq.float() - first[0].float()).norm() <= 1e-4 * first[0].float().norm()
