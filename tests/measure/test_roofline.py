"""Operations, bytes and floors of workloads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flashgen.measure import roofline
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.masks import (
    Mask,
    block_sparse,
    causal,
    document,
    full,
    key_padding,
    neighborhood,
    prefix_lm,
    sliding_window,
)
from flashgen.spec.rule import Rule
from flashgen.spec.target import TARGETS, Target, find_target
from flashgen.tune.suites import make_workload, packed

H200 = find_target("nvidia-h200")


def sized(mask: Mask, q_len: int = 4096, k_len: int = 4096, dtype: str = "bf16") -> Workload:
    return make_workload(
        head_dim=128, heads=32, kv_heads=8, q_len=q_len, k_len=k_len, mask=mask, dtype=dtype, batch=4
    )


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (full(), 1.0),
        (causal(), (4096 + 1) / 2 / 4096),
        (sliding_window(0, 0), 1 / 4096),
        (sliding_window(1023, 0), (1024 * 1025 / 2 + (4096 - 1024) * 1024) / 4096**2),
    ],
)
def test_visible_share_of_pairs(mask: Mask, pairs: float) -> None:
    assert roofline.visible(sized(mask)).pairs == pytest.approx(pairs, rel=2e-3)


def test_visible_share_of_padding_is_that_of_the_lengths() -> None:
    from flashgen.build.inputs import make_rules

    workload = sized(key_padding())
    (lengths,) = make_rules(workload)[0].tensors
    share = float(lengths.float().mean()) / 4096
    assert 0.5 <= share <= 1.0
    assert roofline.visible(workload).pairs == pytest.approx(share, rel=1e-5)
    assert roofline.visible(workload).keys == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    ("mask", "documents"),
    [
        (causal(), 0),
        (sliding_window(40, 7), 0),
        (document(), 3),
        (causal() & document("i64"), 0),
        (document("ordered"), 3),
        (causal() & document("ordered"), 0),
        (prefix_lm(), 0),
        (neighborhood((16, 16), (5, 3)), 0),
        (block_sparse("batch_heads", 32), 0),
        (key_padding(), 0),
    ],
    ids=str,
)
def test_tiles_are_those_that_keep_a_pair(mask: Mask, documents: int, heads: int) -> None:
    from flashgen.build.inputs import make_rules
    from flashgen.build.reference import evaluate_rule

    length, block_m, block_n = 256, 32, 16
    workload = make_workload(
        head_dim=16, heads=heads, kv_heads=1, q_len=length, k_len=length, mask=mask, dtype="bf16", batch=2,
        documents=documents,
    )  # fmt: skip
    bound, _ = make_rules(workload)
    rows, keys = torch.arange(length).view(-1, 1), torch.arange(length)
    needed = 0
    for batch in range(2):
        for head in range(heads):
            env = {"q_idx": rows, "k_idx": keys, "q_len": length, "k_len": length, "batch": batch}
            keep = torch.as_tensor(evaluate_rule(bound, env | {"head": head, "kv_head": 0}))
            keep = keep.expand(length, length)
            needed += int(
                keep.view(length // block_m, block_m, length // block_n, block_n).any(3).any(1).sum()
            )
    mean = needed / (2 * heads * length // block_m)
    assert roofline.tiles(workload, block_m, block_n) == pytest.approx(mean)
    assert mean < length // block_n


class Largest(TorchFunctionMode):
    """Notes the bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (full(), 1.0),
        (causal(), 0.5),
        (sliding_window(2**28 - 1, 0), 15 / 128),
        (key_padding(), 0.75),
        (key_padding("keep"), 0.75),
        (Mask(Rule.parse("mask", "head < 2000")), 2000 / 8192),
    ],
)
@pytest.mark.parametrize("sizes", [(2**31 - 1, 2**13, 1), (4096, 2**8, 2**23 - 1), (1, 2**31 - 1, 1)])
def test_the_largest_workloads_take_little_memory(
    mask: Mask, pairs: float, sizes: tuple[int, int, int]
) -> None:
    length, heads, batch = sizes
    spec = replace(sized(mask).spec, head_dim=16, head_dim_v=16)
    workload = Workload(spec, batch, heads, 1, length, length, sized(mask).params)
    with Largest() as largest:
        found = roofline.visible(workload)
    assert largest.bytes <= 4 * 2**20
    if heads == 2**13:
        assert found.pairs == pytest.approx(pairs, rel=0.1)


def test_documents_in_order_are_counted_of_shorter_ones_as_by_ids() -> None:
    spec = replace(sized(document()).spec, head_dim=16, head_dim_v=16)
    by_ids = Workload(spec, 2, 2, 1, 2**22, 2**22, documents=9)
    ordered = replace(by_ids, spec=replace(spec, mask=document("ordered").rule))
    found, wanted = (roofline.visible(each).pairs for each in (ordered, by_ids))
    assert 0 < found == pytest.approx(wanted, rel=0.01)


def test_flops_are_two_products_over_the_visible_pairs() -> None:
    assert roofline.flops(sized(full())) == 4 * 32 * 4 * 4096 * 4096 * 128
    assert roofline.flops(sized(causal())) == pytest.approx(roofline.flops(sized(full())) / 2, rel=1e-3)


def test_input_bytes_leave_out_keys_nobody_sees() -> None:
    q, kv = 4 * 32 * 4096 * 128 * 2, 4 * 8 * 4096 * 256 * 2
    assert roofline.input_bytes(sized(full())) == q + kv
    one_query = sized(sliding_window(511, 0), q_len=1)
    assert roofline.input_bytes(one_query) == pytest.approx(q / 4096 + kv / 8)


def test_prefill_is_bound_by_arithmetic_and_decoding_by_bytes() -> None:
    # 989 TFLOP/s and 4.8 TB/s by the data sheet; the floor is a little below what they give.
    prefill = roofline.floor_us(sized(full()), H200)
    assert 0.85 < prefill / (roofline.flops(sized(full())) / 989e12 * 1e6) < 1.0
    decode = roofline.floor_us(sized(full(), q_len=1), H200)
    assert 0.85 < decode / (roofline.input_bytes(sized(full(), q_len=1)) / 4.8e12 * 1e6) < 1.0


def test_float32_is_far_slower_than_tf32_and_bf16() -> None:
    spec = AttentionSpec(128, 128, "fp32", fp32_precision="tf32")
    tf32 = Workload(spec, 4, 32, 8, 4096, 4096)
    times = [roofline.floor_us(w, H200) for w in (sized(full()), tf32, sized(full(), dtype="fp32"))]
    assert times[1] == pytest.approx(2 * times[0])
    assert times[2] == pytest.approx(16 * times[0])


def test_8_bit_products_take_half_the_time_and_their_inputs_half_the_bytes() -> None:
    e4m3, bf16 = sized(full(), dtype="e4m3"), sized(full())
    assert roofline.peak_flops(e4m3, H200) == 2 * roofline.peak_flops(bf16, H200)
    assert roofline.floor_us(e4m3, H200) == pytest.approx(roofline.floor_us(bf16, H200) / 2)
    assert roofline.input_bytes(e4m3) == roofline.input_bytes(bf16) / 2


def test_an_empty_workload_costs_nothing() -> None:
    assert (
        roofline.floor_us(sized(full(), k_len=0), H200)
        == 4 * 32 * 4096 * 128 * 2 / roofline.bytes_per_s(H200) * 1e6 / 1.05
    )


def test_every_target_has_a_unit_and_unknown_ones_take_the_nearest_older() -> None:
    for target in TARGETS.values():
        assert roofline.unit(target) == roofline.UNITS[target.arch]
    future = Target(arch=103, sm_count=160, shared_per_block=232448, l2_mib=126, bandwidth=52)
    assert roofline.unit(future) == roofline.UNITS[100]
    assert roofline.unit(Target(75, 40, 65536, 4, 33)) == roofline.UNITS[80]


def test_measured_speeds_of_real_kernels_are_possible() -> None:
    """The fastest kernels known on an H200 (FlashAttention-4: 692 TFLOP/s) are above the floor."""
    assert roofline.flops(sized(full())) / 692e12 * 1e6 > roofline.floor_us(sized(full()), H200)


@pytest.mark.parametrize("mask", [full(), causal()], ids=str)
def test_packed_sequences_count_as_what_they_are(mask: Mask) -> None:
    from flashgen.build.inputs import packed_lengths

    work = packed(sized(mask), 9000)
    each = [
        replace(sized(mask, q_len=length, k_len=length), batch=1)
        for length in packed_lengths(work)[0].tolist()
    ]
    assert len(each) == 4 and roofline.visible(work).keys == pytest.approx(1, rel=1e-3)
    assert roofline.flops(work) == pytest.approx(sum(map(roofline.flops, each)), rel=2e-3)
    assert roofline.input_bytes(work) == pytest.approx(sum(map(roofline.input_bytes, each)), rel=1e-3)


def test_packed_windows_are_not_told_to_be_more_than_they_are() -> None:
    """A floor above the truth would refuse true timings."""
    from flashgen.build.inputs import packed_lengths

    work = packed(replace(sized(sliding_window(1023, 0)), batch=16), 20000)
    lengths = packed_lengths(work)[0].tolist()
    each = [replace(sized(sliding_window(1023, 0), n, n), batch=1) for n in lengths if n]
    exact = sum(map(roofline.flops, each))
    assert 0.6 * exact < roofline.flops(work) <= 1.01 * exact
