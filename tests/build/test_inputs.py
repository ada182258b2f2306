"""Inputs for checking and timing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashgen.build.inputs import contiguous_facts, density, make_inputs, make_rules, packed_lengths
from flashgen.errors import InvalidArgument
from flashgen.measure import roofline
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.masks import (
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
from flashgen.spec.score_mods import alibi, bias, relative, softcap
from flashgen.tune.suites import make_workload, packed

SIZES = {"head_dim": 64, "heads": 4, "kv_heads": 2, "q_len": 96, "k_len": 160, "batch": 3}


def test_c31_inputs_are_random_normal_not_zero() -> None:
    inputs = make_inputs(make_workload(mask=causal(), dtype="bf16", **SIZES), "cpu")
    for tensor in (inputs.q, inputs.k, inputs.v):
        values = tensor.float()
        assert tensor.dtype is torch.bfloat16
        assert abs(float(values.mean())) < 0.05
        assert abs(float(values.std()) - 1) < 0.05
        assert int((values == 0).sum()) < 10
    assert inputs.density == "full"
    assert inputs.scale == 64**-0.5


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_shapes_and_layouts(dtype: str) -> None:
    workload = make_workload(mask=full(), dtype=dtype, head_dim_v=32, **SIZES)
    for layout, q, v in (
        ("bhsd", (3, 4, 96, 64), (3, 2, 160, 32)),
        ("bshd", (3, 96, 4, 64), (3, 160, 2, 32)),
    ):
        inputs = make_inputs(workload, "cpu", layout)
        assert (tuple(inputs.q.shape), tuple(inputs.v.shape)) == (q, v)
        assert inputs.bhsd(inputs.q).shape == (3, 4, 96, 64)
        assert inputs.q.is_contiguous()


def test_the_same_seed_gives_the_same_inputs() -> None:
    workload = make_workload(mask=key_padding(), dtype="fp32", **SIZES)
    first, again, other = (make_inputs(workload, "cpu", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.q, again.q) and torch.equal(first.mask.tensors[0], again.mask.tensors[0])
    assert not torch.equal(first.q, other.q)


def test_lengths_and_padding_are_drawn_in_the_upper_half() -> None:
    lengths = make_inputs(
        make_workload(mask=key_padding(), dtype="fp32", **SIZES | {"batch": 200}), "cpu"
    ).mask
    drawn = lengths.tensors[0]
    assert drawn.dtype is torch.int32
    assert int(drawn.min()) >= 80 and int(drawn.max()) <= 160
    assert len(drawn.unique()) > 40
    keep = make_rules(make_workload(mask=key_padding("keep"), dtype="fp32", **SIZES))[0].tensors[0]
    assert keep.shape == (3, 160) and keep.dtype is torch.bool
    assert bool(keep[:, :80].all())
    assert not bool((keep[:, 1:] & ~keep[:, :-1]).any()), "padding is on the right"


@pytest.mark.parametrize("k_len", [1, 15, 17, 160])
def test_documents_follow_each_other_and_fill_the_sequence(k_len: int) -> None:
    sizes = SIZES | {"batch": 50, "k_len": k_len}
    for word, dtype in (("i32", torch.int32), ("i64", torch.int64)):
        (ids,) = make_rules(make_workload(mask=document(word), dtype="fp32", **sizes))[0].tensors
        assert ids.shape == (50, k_len) and ids.dtype is dtype
        assert bool((ids[:, 0] == 0).all()) and set(ids.diff().unique().tolist()) <= {0, 1}
        for row in ids:
            *inner, _ = row.unique(return_counts=True)[1].tolist()
            assert all(-(-k_len // 16) <= length <= max(k_len // 4, 1 + k_len // 16) for length in inner)
    assert len({tuple(row.tolist()) for row in ids}) > 1 or k_len == 1, "each sequence has its own"


@pytest.mark.parametrize("count", [0, 1, 7])
def test_documents_in_order_are_those_drawn_by_ids(count: int) -> None:
    workload = replace(make_workload(mask=causal() & document(), dtype="fp32", **SIZES), documents=count)
    (ids,) = make_rules(workload)[0].tensors
    ordered = replace(workload, spec=replace(workload.spec, mask=(causal() & document("ordered")).rule))
    (ends,) = make_rules(ordered)[0].tensors
    assert ends.shape == (SIZES["batch"], 2, SIZES["k_len"] + 1) and ends.dtype is torch.int32
    assert density(ordered) == density(workload) and not ends[:, :, 0].any()
    for row, (begin, end) in zip(ids, ends[:, :, 1:], strict=True):
        lengths = row.unique(return_counts=True)[1]
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        (made,) = document(cu_seqlens=cu_seqlens, length=SIZES["k_len"]).tensors
        assert torch.equal(made[0, :, 1:], torch.stack((begin, end)))
    assert roofline.visible(ordered) == roofline.visible(workload)


@pytest.mark.parametrize("count", [1, 2, 32])
def test_as_many_documents_as_the_workload_says(count: int) -> None:
    sizes = SIZES | {"batch": 3, "q_len": 16384, "k_len": 16384}
    workload = replace(make_workload(mask=causal() & document(), dtype="fp32", **sizes), documents=count)
    (ids,) = make_rules(workload)[0].tensors
    assert [len(row.unique()) for row in ids] == [count] * 3, "no two cuts of this seed fall together"
    assert bool((ids.diff() >= 0).all()) and density(workload) == (
        f"{count} documents, cut at places drawn evenly"
    )
    lengths = [tuple(row.unique(return_counts=True)[1].tolist()) for row in ids]
    assert len(set(lengths)) == (1 if count == 1 else 3), "each sequence has its own"
    (again,) = make_rules(workload)[0].tensors
    assert torch.equal(ids, again)
    if count > 1:
        pairs = sum(sum(length * (length + 1) / 2 for length in each) for each in lengths) / 3 / 16384**2
        assert roofline.visible(workload).pairs == pytest.approx(pairs, rel=0.05)


def test_density_says_how_operands_were_drawn() -> None:
    for mask, told in (
        (full(), "full"),
        (causal(), "full"),
        (key_padding() & causal(), "lengths uniform in [k/2, k]"),
        (key_padding("keep"), "right padding, lengths uniform in [k/2, k]"),
        (causal() & document("i64"), "documents of lengths uniform in [k/16, k/4]"),
        (causal() & document("ordered"), "documents of lengths uniform in [k/16, k/4]"),
        (prefix_lm("i64"), "lengths uniform in [k/2, k]"),
        (block_sparse("heads", 32), "a quarter of the blocks and the diagonal"),
        (neighborhood((8, 20), (3, 5)), "full"),
    ):
        assert density(make_workload(mask=mask, dtype="fp32", **SIZES)) == told


def test_operands_of_score_rules_are_as_large_as_they_are_read() -> None:
    for mod, shape, told in (
        (bias("bhqk", "bf16"), (3, 4, 96, 160), "normal numbers"),
        (bias("k"), (1, 1, 1, 160), "normal numbers"),
        (relative("fp16", 17), (4, 35), "normal numbers"),
        (alibi(), (4,), "slopes of ALiBi"),
    ):
        workload = make_workload(mask=causal(), score_mod=mod, dtype="fp32", **SIZES)
        (tensor,) = make_rules(workload)[1].tensors
        assert tuple(tensor.shape) == shape and density(workload) == told
        assert mod.bind(tensor).rule == mod.rule, "of the rule's dtype"
        assert told != "normal numbers" or 0.7 < float(tensor.float().std()) < 1.3
    (table,) = make_rules(make_workload(mask=block_sparse("batch", (32, 64)), dtype="fp32", **SIZES))[
        0
    ].tensors
    assert table.shape == (3, 1, 3, 3) and bool(table.diagonal(dim1=2, dim2=3).all())


def test_c39_no_operands_no_score_rule_and_no_lse_are_fine() -> None:
    mask, score_mod = make_rules(make_workload(mask=full(), dtype="fp32", **SIZES))
    assert (mask, mask.tensors, score_mod) == (full(), (), None)


def test_parameters_go_to_mask_and_score_rule_in_order() -> None:
    workload = make_workload(mask=sliding_window(31, 2), score_mod=softcap(20.0), dtype="fp32", **SIZES)
    assert workload.params == (("left", 31), ("right", 2), ("cap", 20.0))
    mask, score_mod = make_rules(workload)
    assert mask == sliding_window(31, 2)
    assert score_mod == softcap(20.0)


def test_a_missing_parameter_is_named() -> None:
    spec = AttentionSpec(64, 64, "fp32", sliding_window(31, 2).rule)
    with pytest.raises(InvalidArgument, match="must give a number for each of: left, right"):
        make_rules(Workload(spec, 1, 1, 1, 8, 8))


def test_an_operand_nobody_can_invent_is_refused() -> None:
    spec = AttentionSpec(64, 64, "fp32", Rule.parse("mask", "q_doc[q_idx] == 1 where q_doc: i32"))
    with pytest.raises(InvalidArgument, match=r"no values can be invented for operand q_doc \(i32\)"):
        make_rules(Workload(spec, 1, 1, 1, 8, 8))
    with pytest.raises(InvalidArgument, match="must be one of bhsd, bshd"):
        make_inputs(make_workload(mask=full(), dtype="fp32", **SIZES), "cpu", layout="sbhd")


def test_facts_of_fresh_tensors_need_no_memory() -> None:
    workload = make_workload(mask=full(), dtype="bf16", **SIZES)
    assert contiguous_facts(workload) == CallFacts("aligned", tma=True)
    huge = make_workload(mask=full(), dtype="bf16", **SIZES | {"k_len": 2**23, "heads": 64, "kv_heads": 64})
    assert contiguous_facts(huge) == CallFacts("aligned", tma=True, wide=True)


@pytest.mark.parametrize(
    "sizes", [(1, 70, 70), (16, 4096, 16384), (16, 4096, 5000), (16, 4096, 65536), (9, 5, 3), (700, 8, 1000)]
)
def test_packed_lengths_are_those_of_the_workload(sizes: tuple[int, int, int]) -> None:
    count, longest, total = sizes
    dense = make_workload(
        mask=full(), dtype="bf16", **SIZES | {"batch": count, "q_len": longest, "k_len": longest}
    )
    work = packed(dense, total)
    q_lengths, k_lengths = packed_lengths(work)
    assert torch.equal(q_lengths, k_lengths), "of one size"
    assert len(q_lengths) == count and int(q_lengths.sum()) == total
    assert int(q_lengths.min()) >= 0 and int(q_lengths.max()) == min(longest, total)
    assert all(map(torch.equal, packed_lengths(work), packed_lengths(work)))
    if (longest, total) == (4096, 16384):
        assert len(q_lengths.unique()) > 10, "they differ"


def test_packed_inputs() -> None:
    dense = make_workload(mask=key_padding(), dtype="fp32", **SIZES)
    work = packed(dense, 200)
    assert (work.total_q, work.total_k) == (200, 334)
    inputs = make_inputs(work, "cpu", "bhsd")
    assert inputs.packed is not None and inputs.layout == "bshd"
    assert (inputs.q.shape, inputs.k.shape) == ((1, 200, 4, 64), (1, 334, 2, 64))
    for cu, lengths, total in zip(inputs.packed, packed_lengths(work), (200, 334), strict=True):
        assert cu.dtype is torch.int32 and torch.equal(cu.diff(), lengths)
        assert (int(cu[0]), int(cu[-1])) == (0, total)
    q_lengths, k_lengths = packed_lengths(work)
    assert torch.equal(q_lengths.argsort(), k_lengths.argsort()), "more queries, more keys"
    assert inputs.mask.tensors[0].shape == (3,)
    assert "packed lengths" in inputs.density and "[k/2, k]" in inputs.density
    assert contiguous_facts(work) == CallFacts()
