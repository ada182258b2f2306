"""attention_fwd on a real GPU: every kind of spec, call and size against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checked import COMBINED, DEVICE, TABLE, Call, among_nan, check, workload

from flashgen.build.inputs import Inputs, make_inputs
from flashgen.spec import masks, score_mods
from flashgen.spec.masks import Mask


@pytest.mark.parametrize("lengths", [(1000, 1000), (77, 900), (900, 77), (1, 513)], ids=str)
@pytest.mark.parametrize("mask", TABLE + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, lengths: tuple[int, int]) -> None:
    check(workload(mask=mask, sizes=(2, 8, 2, *lengths)))


DIMS = ((16, 16), (64, 64), (72, 40), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims_and_dtypes(dims: tuple[int, int], dtype: str) -> None:
    for loads in ("tma", "pointer"):
        config = f"m64n32w4s{1 if dtype == 'fp32' else 2}_{loads}_heads"
        check(workload(*dims, dtype=dtype, sizes=(1, 4, 2, 300, 400)), config)


def test_tf32_is_within_its_own_tolerance() -> None:
    work = workload(dtype="fp32")
    check(replace(work, spec=replace(work.spec, fp32_precision="tf32")))


@pytest.mark.parametrize("heads,kv_heads", [(8, 8), (6, 2), (5, 1), (32, 8)])
def test_head_groups_and_softcap(heads: int, kv_heads: int) -> None:
    work = workload(128, score_mod=score_mods.softcap(5.0), sizes=(2, heads, kv_heads, 257, 300))
    for order in ("heads", "rows"):
        check(work, f"m128n64w4s2_tma_{order}")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts(layout: str) -> None:
    check(workload(128), layout=layout)


def test_c12_slices_of_a_fused_projection() -> None:
    fused = torch.randn(2, 513, 3, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    check(workload(sizes=(2, 8, 8, 513, 513)), q=q, k=k, v=v)


def test_c12_inner_stride_is_not_one() -> None:
    q, k, v = (
        torch.randn(2, 8, 64, 513, device=DEVICE, dtype=torch.bfloat16).transpose(2, 3) for _ in range(3)
    )
    check(workload(sizes=(2, 8, 8, 513, 513)), q=q, k=k, v=v)


def test_c13_broadcast_batch() -> None:
    k, v = (
        torch.randn(1, 2, 513, 64, device=DEVICE, dtype=torch.bfloat16).expand(3, 2, 513, 64)
        for _ in range(2)
    )
    check(workload(sizes=(3, 8, 2, 100, 513)), k=k, v=v)


def test_c14_misaligned_base_and_row_stride() -> None:
    buffer = torch.randn(2 * 8 * 513 * 64 + 1, device=DEVICE, dtype=torch.bfloat16)
    odd = buffer[1:].view(2, 8, 513, 64)
    check(workload(sizes=(2, 8, 8, 513, 513)), q=odd, k=odd, v=odd)
    rows = torch.randn(2, 8, 513, 66, device=DEVICE, dtype=torch.bfloat16)[..., :64]
    check(workload(sizes=(2, 8, 8, 513, 513)), q=rows, k=rows, v=rows)


@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_memory_around_the_tensors_is_not_read_into_a_result(loads: str) -> None:
    """NaN before, between and behind all sequences and head dims changes nothing."""
    work = workload(72, sizes=(2, 4, 4, 130, 131), mask=masks.full())
    padded = among_nan(make_inputs(work, DEVICE))
    check(work, f"m64n64w4s2_{loads}_heads", **padded)


def test_c09_row_offsets_beyond_32_bits() -> None:
    """99,866 rows of a fused projection with 56 heads: a row offset passes 2^31 elements."""
    rows, heads, dim = 99_866, 56, 128
    fused = torch.randn(1, rows, 3 * heads, dim, device=DEVICE, dtype=torch.float16)
    q, k, v = (fused[:, :, i * heads : (i + 1) * heads].transpose(1, 2)[:, :2] for i in range(3))
    assert rows * q.stride(2) > 2**31
    out, dense = (torch.empty(1, 2, rows, dim, device=DEVICE, dtype=torch.float16) for _ in range(2))
    work = workload(dim, dtype="fp16", mask=masks.sliding_window(1000, 0), sizes=(1, 2, 2, rows, rows))
    spec = replace(work.spec, return_lse=False)
    inputs = Inputs(q, k, v, masks.sliding_window(1000, 0), None, dim**-0.5, "bhsd", "full")
    call = Call(inputs, spec, out, None, "m64n64w4s2_pointer_heads")
    assert call.facts.wide
    call()
    compact = replace(inputs, q=q.contiguous(), k=k.contiguous(), v=v.contiguous())
    Call(compact, spec, dense, None, "m64n64w4s2_pointer_heads")()
    assert torch.equal(out[:, :, -3000:], dense[:, :, -3000:])
    assert torch.equal(out, dense)


@pytest.mark.parametrize(
    "sizes", [(65_538, 1, 1, 1, 1), (1, 65_538, 65_538, 3, 5), (70_000, 2, 1, 1, 33)], ids=str
)
def test_c11_more_heads_than_a_grid_axis_holds(sizes: tuple[int, int, int, int, int]) -> None:
    check(workload(16, sizes=sizes))


def test_c38_a_hundred_runs_give_the_same_bits() -> None:
    work = workload(128, sizes=(2, 8, 2, 777, 777))
    inputs = make_inputs(work, DEVICE)
    out = torch.empty_like(inputs.q)
    lse = torch.empty(out.shape[:3], device=DEVICE)
    call = Call(inputs, work.spec, out, lse)
    call()
    first = out.clone(), lse.clone()
    for _ in range(100):
        out.fill_(math.nan)
        call()
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


def test_kernel_facts_of_driver_and_compiler_agree() -> None:
    work = workload(64)
    inputs = make_inputs(work, DEVICE)
    kernel = Call(
        inputs, work.spec, torch.empty_like(inputs.q), torch.empty(2, 8, 1000, device=DEVICE)
    ).kernel
    assert kernel.registers == kernel.artifact.registers
