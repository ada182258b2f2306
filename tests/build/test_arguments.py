"""Call environments and call facts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from flashgen.build.arguments import FACTS, call_facts, facts_code, flatten, flatten_packed
from flashgen.codegen.abi import PACKED, environment_names
from flashgen.errors import InvalidArgument
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts

ALIGNED = CallFacts("aligned", tma=True, wide=False)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make(
    batch: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    q_len: int = 32,
    k_len: int = 48,
    dim: int = 64,
    dim_v: int = 64,
) -> Tensors:
    """q, k, v, out in bf16, (batch, heads, seq, dim), contiguous."""
    shapes = ((heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, dim_v), (heads, q_len, dim_v))
    q, k, v, out = (torch.empty(batch, *shape, dtype=torch.bfloat16) for shape in shapes)
    return q, k, v, out


def named(spec: AttentionSpec, env: tuple[object, ...]) -> dict[str, object]:
    return dict(zip(environment_names(spec), env, strict=True))


def test_the_environment_is_in_the_order_of_its_names() -> None:
    lengths, padding = torch.tensor([3, 4], dtype=torch.int32), torch.ones(2, 48, dtype=torch.bool)
    mask = masks.sliding_window(5, 7) & masks.key_padding(lengths) & masks.key_padding(padding)
    cap = score_mods.softcap(30.0)
    spec = AttentionSpec(64, 32, "bf16", mask=mask.rule, score_mod=cap.rule, return_lse=True)
    q, k, v, out = make(dim_v=32)
    lse = torch.empty(2, 8, 32)
    env = flatten(q, k, v, out, lse, 0.5, (*mask.values, *cap.values), (*mask.tensors, *cap.tensors))
    values = named(spec, env)
    for name, tensor in {"q": q, "k": k, "v": v, "out": out}.items():
        assert values[name] == tensor.data_ptr()
        strides = tuple(values[f"{name}.stride.{axis}"] for axis in ("batch", "head", "row", "dim"))
        assert strides == tensor.stride()
    assert values["lse"] == lse.data_ptr()
    sizes = (
        "batch",
        "heads",
        "kv_heads",
        "heads_per_kv",
        "q_len",
        "k_len",
        "head_dim",
        "head_dim_v",
        "scale",
    )
    assert tuple(values[name] for name in sizes) == (2, 8, 2, 4, 32, 48, 64, 32, 0.5)
    params = {name: value for name, value in values.items() if name.startswith("param.")}
    assert sorted(params.values()) == [5, 7, 30.0]
    addresses = [v for n, v in values.items() if n.startswith("operand.") and ".stride." not in n]
    assert sorted(addresses) == sorted([lengths.data_ptr(), padding.data_ptr()])
    strides = [v for n, v in values.items() if n.startswith("operand.") and ".stride." in n]
    assert sorted(strides) == [1, 1, 48]


def test_layouts_describe_the_same_memory() -> None:
    bshd = [torch.empty(2, 32, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2, 8)]
    bhsd = [tensor.transpose(1, 2) for tensor in bshd]
    assert flatten(*bshd, None, 1.0, layout="bshd") == flatten(*bhsd, None, 1.0)
    with pytest.raises(InvalidArgument, match="layout='sbhd' must be one of bhsd, bshd"):
        call_facts(*bshd, layout="sbhd")


def test_tensors_stay_where_addresses_are_not_wanted() -> None:
    q, k, v, out = make()
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    env = flatten(q, k, v, out, None, 1.0, (), (lengths,), pointers=False)
    assert [env[i] is t for i, t in enumerate((q, k, v, out))] == [True] * 4
    assert env[4] == 0
    assert env[-2] is lengths


def test_every_kind_of_call_has_one_code() -> None:
    assert FACTS[0] == ALIGNED
    assert len(set(FACTS)) == len(FACTS) == 8


def test_c14_addresses_and_strides_decide_alignment() -> None:
    q, k, v, out = make()
    assert call_facts(q, k, v, out) == ALIGNED
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    assert call_facts(shifted, k, v, out) == CallFacts("unit", tma=False)
    padded = torch.empty(2, 2, 48, 72, dtype=q.dtype)[..., :64]  # rows of 144 bytes
    assert call_facts(q, padded, v, out) == ALIGNED
    odd = torch.empty(2, 2, 48, 68, dtype=q.dtype)[..., :64]  # rows of 136 bytes
    assert call_facts(q, k, odd, out) == CallFacts("unit", tma=False)
    spread = torch.empty(2, 2, 48, 128, dtype=q.dtype)[..., ::2]
    assert call_facts(q, spread, v, out) == CallFacts("strided", tma=False)
    heads_apart = torch.empty(2 * 2 * 48 * 64 + 8, dtype=q.dtype).as_strided(k.shape, (6148, 3076, 64, 1))
    assert call_facts(q, heads_apart, v, out) == CallFacts("unit", tma=False)


def test_c12_views_keep_their_strides_and_facts() -> None:
    qkv = torch.empty(2, 32, 3, 8, 64, dtype=torch.bfloat16)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    out = torch.empty_like(q)
    assert call_facts(q, k, v, out) == ALIGNED
    assert flatten(q, k, v, out, None, 1.0)[5:9] == (32 * 3 * 8 * 64, 64, 3 * 8 * 64, 1)


def test_c13_broadcast_axes_are_a_kind_of_their_own() -> None:
    q, k, v, out = make()
    shared = k[:1].expand(2, -1, -1, -1)
    assert call_facts(q, shared, v, out) == CallFacts("aligned", tma=False)
    one_head = k[:, :1].expand(-1, 2, -1, -1)
    assert call_facts(q, one_head, v, out) == CallFacts("aligned", tma=False)
    same_row = k[:, :, :1].expand(-1, -1, 48, -1)
    assert call_facts(q, same_row, v, out) == CallFacts("aligned", tma=False)
    q1, k1, v1, out1 = make(batch=1, kv_heads=1)
    never_used = k1.as_strided(k1.shape, (0, 7, 64, 1))  # strides of axes of extent 1
    assert call_facts(q1, never_used, v1, out1) == ALIGNED


def test_empty_tensors_have_no_descriptor() -> None:
    assert not call_facts(*make(k_len=0)).tma
    assert not call_facts(*make(q_len=0)).tma


def env_of(
    strides: dict[str, tuple[int, int, int, int]], q_len: int = 32, k_len: int = 48
) -> tuple[int, ...]:
    """An environment of huge tensors that need not exist."""
    usual = (1 << 20, 1 << 16, 64, 1)
    rows = [strides.get(name, usual) for name in ("q", "k", "v", "out")]
    return (4096, 4096, 4096, 4096, 0, *(s for row in rows for s in row), 2, 8, 2, 4, q_len, k_len, 64, 64)


@pytest.mark.parametrize("tensor", ["q", "k", "v", "out"])
def test_c9_products_beyond_31_bits_are_wide(tensor: str) -> None:
    fused = 3 * 56 * 128  # the row stride of a fused QKV of 56 heads
    kinds = {
        (1 << 40, 128, fused, 1): 99_866,  # rows alone: 99,866 x 21,504 passes 2^31
        (1 << 31, 128, 64, 1): 48,
        (1 << 20, 1 << 31, 64, 1): 48,
        (1 << 20, 128, 1, 1 << 24): 48,  # (head_dim + tile) x stride
    }
    for strides, rows in kinds.items():
        env = env_of({tensor: strides}, rows, rows)
        assert FACTS[facts_code(env, 2)].wide, strides
    assert not FACTS[facts_code(env_of({tensor: (1 << 30, 128, fused, 1)}, 99_000, 99_000), 2)].wide


@pytest.mark.parametrize("tensor", ["q", "k", "v", "out"])
def test_c9_rows_that_reach_past_31_bits_are_wide_though_no_stride_is_large(tensor: str) -> None:
    # (batch, seq, heads, dim) with 1,024 heads: 20,000 rows of 131,072 elements
    strides = {tensor: (128, 1 << 10, 1 << 17, 1)}
    assert FACTS[facts_code(env_of(strides, 20_000, 20_000), 2)] == CallFacts("aligned", tma=True, wide=True)
    assert facts_code(env_of(strides, 10_000, 10_000), 2) == 0


def test_c9_a_large_operand_is_wide() -> None:
    q, k, v, out = make()
    env = flatten(q, k, v, out, None, 1.0)
    small = torch.empty(2, 48, dtype=torch.bool)
    huge = torch.empty(1, dtype=torch.bool).expand(70_000, 40_000).as_strided((70_000, 40_000), (0, 0))
    assert facts_code(env, 2, (small,)) == 0
    assert facts_code(env, 2, (huge,)) == 0, "a broadcast operand reaches nowhere"
    meta = torch.empty(70_000, 40_000, dtype=torch.bool, device="meta")
    assert FACTS[facts_code(env, 2, (meta,))] == CallFacts("aligned", tma=True, wide=True)


def test_the_fast_answer_is_never_more_than_the_exact_one() -> None:
    from flashgen.build.arguments import _exact_code

    choices = [(1 << 20, 1 << 16, 64, 1), (0, 1 << 16, 64, 1), (1 << 20, 1 << 16, 68, 1), (1 << 31, 8, 64, 1)]
    choices += [(1 << 20, 1 << 16, 64, 2), (1 << 20, 64, 1 << 26, 1), (1 << 20, 1 << 16, 0, 1)]
    for q, k, v, out in product(choices, repeat=4):
        env = env_of({"q": q, "k": k, "v": v, "out": out})
        assert facts_code(env, 2) == _exact_code(env, 2, ())


def test_packed_sequences_are_one_sequence_of_all_tokens() -> None:
    spec = AttentionSpec(64, 32, "bf16", masks.sliding_window(5, 7).rule, return_lse=True)
    q, k, v, out = (x[0].transpose(0, 1) for x in make(1, dim_v=32))
    lse, cu_q, cu_k = torch.empty(8, 32), torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    env = flatten_packed(q, k, v, out, lse, cu_q, cu_k, 0.5, (5, 7))
    dense = flatten(*(x[None] for x in (q, k, v, out)), lse, 0.5, (5, 7), layout="bshd")
    values, same = named(replace(spec, addressing="varlen"), env), named(spec, dense)
    unused = {f"{tensor}.stride.batch" for tensor in ("q", "k", "v", "out")}  # of an axis of one
    assert {name: values[name] for name in same.keys() - unused} == {
        name: same[name] for name in same.keys() - unused
    }
    assert [values[name] for name in PACKED] == [cu_q.data_ptr(), cu_k.data_ptr(), 3]
    assert facts_code(env, 2) == facts_code(dense, 2) == 0
