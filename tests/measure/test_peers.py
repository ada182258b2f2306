"""The opponents of benchmarks compute what FlashGen means, or say why they cannot."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.build.inputs import Inputs, make_inputs, starts
from flashgen.build.reference import attention_reference, evaluate_rule, packed_reference
from flashgen.errors import Unsupported
from flashgen.measure.peers import (
    DOCUMENTS,
    MASK_MODS,
    PEERS,
    WINDOWS,
    Packed,
    Problem,
    build_peer,
    mask_mod,
    packed_mask_mod,
)
from flashgen.spec import masks
from flashgen.tune.suites import packed, workloads_from_args

MASKS = [
    masks.full(),
    masks.causal(),
    masks.sliding_window(3, 2),
    masks.sliding_window(3, None),
    masks.sliding_window(None, 2),
    masks.causal() & masks.sliding_window(3, 2),
    masks.causal() & masks.sliding_window(3, None),
]


def test_every_window_is_tested() -> None:
    assert {mask.rule for mask in MASKS} == set(WINDOWS)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.describe())
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 9), (5, 9), (9, 9), (4, 4)])
def test_windows_are_the_masks(mask: masks.Mask, q_len: int, k_len: int) -> None:
    (workload,) = workloads_from_args(head_dim=16, heads=1, seq=q_len, k_len=k_len, mask=mask, batch=1)
    left, right = Problem.of(make_inputs(workload, "cpu")).window
    q_idx, k_idx = torch.arange(q_len).view(-1, 1), torch.arange(k_len)
    env = {"q_idx": q_idx, "k_idx": k_idx, "q_len": q_len, "k_len": k_len}
    keep = torch.as_tensor(evaluate_rule(mask, env)).expand(q_len, k_len)
    distance = q_idx + k_len - q_len - k_idx
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if left is not None:
        seen &= distance <= left
    if right is not None:
        seen &= -distance <= right
    assert torch.equal(keep, seen)


@pytest.mark.parametrize(
    ("mask", "q_len", "k_len"), [("full", 64, 64), ("causal", 64, 64), ("causal", 48, 80), ("causal", 1, 80)]
)
def test_torchs_flash_attention_gives_the_reference(mask: str, q_len: int, k_len: int) -> None:
    (workload,) = workloads_from_args(
        head_dim=32, heads=4, kv_heads=2, seq=q_len, k_len=k_len, mask=mask, batch=2
    )
    inputs = make_inputs(workload, "cpu")
    out = build_peer("fa2", inputs)()
    wanted, _ = attention_reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask, scale=inputs.scale)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_peer_takes_8_bit_values_in_16_bits(layout: str) -> None:
    (workload,) = workloads_from_args(head_dim=32, heads=4, kv_heads=2, seq=70, dtype="e4m3", batch=2)
    inputs = make_inputs(workload, "cpu", layout)
    widened = inputs.widened()
    assert widened.quantized is None and widened.q.dtype == torch.bfloat16
    assert widened.q.shape == inputs.q.shape and widened.widened() is widened
    q, k, v = inputs.true()
    wanted, _ = attention_reference(q, k, v, mask=inputs.mask, scale=inputs.scale)
    torch.testing.assert_close(build_peer("fa2", inputs)().float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("fa2", {"mask": "sliding_window(3, 0)"}, "no sliding window"),
        ("cudnn", {"score_mod": "softcap(30.0)"}, "no softcap"),
        ("cudnn", {"mask": "causal", "k_len": 128}, "no bottom-right causal mask"),
        ("flex", {"mask": "key_padding"}, "not compared on key_padding; known: full, causal, windows, docu"),
        ("flex", {"mask": "neighborhood(7)"}, r"not compared on neighborhood\(7\)"),
        ("flex", {"mask": "document", "k_len": 80}, "compared on document with as many queries as keys"),
        ("flex", {"score_mod": "scale(2.0)"}, r"not compared with scale\(2.0\); known: softcap, alibi"),
        ("fa2", {"mask": "prefix_lm"}, "only FlexAttention is compared on prefix_lm"),
        ("fa2", {"mask": "document", "batch": 2}, "documents are packed sequences where they are one row"),
        ("fa2", {"mask": "document", "k_len": 80}, "documents are packed sequences where they are one row"),
        ("fa2", {"score_mod": "alibi"}, "has no alibi"),
        ("cudnn", {"mask": "document"}, "takes no packed sequences"),
        ("cudnn", {"sinks": "fp32"}, "cuDNN through torch's SDPA has no sinks"),
        ("fa4", {}, "is not installed"),
        ("cudnn", {}, "cuDNN through torch's SDPA failed with"),
    ],
)
def test_a_peer_says_why_it_has_no_row(name: str, options: dict[str, object], reason: str) -> None:
    sizes: dict[str, object] = {"head_dim": 32, "heads": 2, "seq": 64, "batch": 1}
    (workload,) = workloads_from_args(**(sizes | options))  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=reason):
        build_peer(name, make_inputs(workload, "cpu"))


# Masks that are no windows


OTHERS = [
    masks.document(),
    masks.causal() & masks.document("i64"),
    masks.document("ordered"),
    masks.causal() & masks.document("ordered"),
    masks.prefix_lm(),
    masks.neighborhood((6, 8), (3, 5)),
    masks.neighborhood((8, 6), (4, 2)),
]


def small(mask: masks.Mask, score_mod: str | None = None, sinks: str = "", batch: int = 2) -> Inputs:
    (workload,) = workloads_from_args(
        head_dim=16, heads=4, kv_heads=2, seq=48, mask=mask, score_mod=score_mod, sinks=sinks, dtype="fp32",
        batch=batch,
    )  # fmt: skip
    documents = 5 if mask.rule in DOCUMENTS else 0
    return make_inputs(replace(workload, documents=documents), "cpu")


def dense_reference(inputs: Inputs) -> torch.Tensor:
    out, _ = attention_reference(
        inputs.q,
        inputs.k,
        inputs.v,
        mask=inputs.mask,
        score_mod=inputs.score_mod,
        scale=inputs.scale,
        sinks=inputs.sinks,
    )
    return out


def test_every_other_mask_is_tested() -> None:
    rules = {mask.rule for mask in OTHERS} | {masks.document("i64").rule, masks.prefix_lm("i64").rule}
    assert set(MASK_MODS) <= rules | {(masks.causal() & masks.document()).rule}
    assert set(DOCUMENTS) <= set(MASK_MODS)


@pytest.mark.parametrize("mask", OTHERS, ids=str)
def test_the_masks_written_for_flex_attention_are_ours(mask: masks.Mask) -> None:
    inputs = small(mask)
    keep = mask_mod(Problem.of(inputs))
    assert keep is not None
    rows, keys = torch.arange(48).view(-1, 1), torch.arange(48)
    for batch in range(2):
        env = {"q_idx": rows, "k_idx": keys, "q_len": 48, "k_len": 48, "batch": batch}
        wanted = torch.as_tensor(evaluate_rule(inputs.mask, env)).expand(48, 48)
        seen = keep(torch.tensor(batch), torch.tensor(0), rows, keys)
        assert torch.equal(seen.expand(48, 48), wanted) and 0 < int(wanted.sum()) < 48 * 48


@pytest.mark.parametrize("score_mod", [None, "alibi", "softcap(0.5)"])
@pytest.mark.parametrize("mask", [masks.causal(), *OTHERS], ids=str)
def test_flex_attention_gives_the_reference(
    mask: masks.Mask, score_mod: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # its operations without a kernel
    inputs = small(mask, score_mod)
    torch.testing.assert_close(build_peer("flex", inputs)(), dense_reference(inputs))


def test_flex_attention_with_alibi_counts_from_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    (workload,) = workloads_from_args(
        head_dim=16, heads=4, seq=20, k_len=48, mask="causal", score_mod="alibi", dtype="fp32", batch=1
    )
    inputs = make_inputs(workload, "cpu")
    torch.testing.assert_close(build_peer("flex", inputs)(), dense_reference(inputs))


@pytest.mark.parametrize("sinks", ["fp32", "bf16"])
def test_flex_attention_takes_sinks_by_the_lse(sinks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    inputs = small(masks.sliding_window(7, 0), None, sinks)
    out = build_peer("flex", inputs)()
    torch.testing.assert_close(out, dense_reference(inputs))
    without = dense_reference(replace(inputs, sinks=None))
    assert float((out - without).abs().amax()) > 0.1, "sinks of these inputs matter"


# Packed sequences


LENGTHS = torch.tensor([6, 1, 0, 9, 3]), torch.tensor([9, 4, 3, 9, 0])


def packed_inputs(mask: masks.Mask, score_mod: str | None = None, dtype: str = "fp32") -> Inputs:
    """Of these lengths, more keys than queries, fewer, and none."""
    (one,) = workloads_from_args(
        head_dim=16, heads=4, kv_heads=2, seq=9, mask=mask, score_mod=score_mod, dtype=dtype, batch=5
    )
    workload = replace(packed(one, 19), total_k=25)
    made = make_inputs(workload, "cpu")
    return replace(made, packed=tuple(map(starts, LENGTHS)))  # type: ignore[arg-type]  # a pair


def reference(inputs: Inputs) -> torch.Tensor:
    """(1, heads, tokens, head_dim)."""
    assert inputs.packed is not None
    out, _ = packed_reference(
        *(each[0] for each in (inputs.q, inputs.k, inputs.v)),
        *(each.tolist() for each in inputs.packed),
        mask=inputs.mask,
        score_mod=inputs.score_mod,
        scale=inputs.scale,
        sinks=inputs.sinks,
    )
    return out.transpose(0, 1)[None]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.describe())
def test_the_document_mask_of_packed_sequences_is_ours(mask: masks.Mask) -> None:
    keep = packed_mask_mod(Problem.of(packed_inputs(mask)))
    zero = torch.tensor(0)
    seen = keep(zero, zero, torch.arange(19).view(-1, 1), torch.arange(25))
    wanted = torch.zeros(19, 25, dtype=torch.bool)
    row = key = 0
    for q_len, k_len in zip(*(each.tolist() for each in LENGTHS), strict=True):
        env = {"q_idx": torch.arange(q_len).view(-1, 1), "k_idx": torch.arange(k_len)}
        kept = torch.as_tensor(evaluate_rule(mask, env | {"q_len": q_len, "k_len": k_len}))
        wanted[row : row + q_len, key : key + k_len] = kept
        row, key = row + q_len, key + k_len
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize("score_mod", [None, "softcap(1.0)"], ids=str)
@pytest.mark.parametrize("mask", [masks.full(), masks.causal() & masks.sliding_window(3, 2)], ids=str)
def test_flex_attention_gives_the_reference_of_packed_sequences(
    mask: masks.Mask, score_mod: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # its operations without a kernel
    inputs = packed_inputs(mask, score_mod)
    torch.testing.assert_close(build_peer("flex", inputs)(), reference(inputs))
    inputs = replace(inputs, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0]))
    torch.testing.assert_close(build_peer("flex", inputs)(), reference(inputs))


def by_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest: tuple[int, int],
    window: tuple[int | None, int | None],
    scale: float,
) -> torch.Tensor:
    """What FlashAttention's functions of packed tensors document, on the CPU."""
    assert longest == (9, 9) and cu_q.dtype == cu_k.dtype == torch.int32
    outs = []
    for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        rows = torch.arange(b - a).view(-1, 1) + (d - c) - (b - a)
        keys = torch.arange(d - c)
        left, right = (10**6 if side is None else side for side in window)
        seen = (rows - keys <= left) & (keys - rows <= right)
        own = q[a:b], k[c:d].repeat_interleave(2, 1), v[c:d].repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", own[0], own[1]) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        outs.append(torch.einsum("hqk,khd->qhd", weights, own[2]))
    return torch.cat(outs)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.describe())
@pytest.mark.parametrize("needs_word", [False, True])
def test_torchs_varlen_is_asked_for_the_same(
    mask: masks.Mask, needs_word: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.attention.varlen as varlen

    def same(
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        window = (None if side == -1 else side for side in window_size)
        return by_window(q, k, v, cu_q, cu_k, (max_q, max_k), tuple(window), scale)  # type: ignore[arg-type]

    def newer(*tensors: Any, scale: float, window_size: Any, enable_gqa: bool = False) -> torch.Tensor:
        assert enable_gqa
        return same(*tensors, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", newer if needs_word else same)
    inputs = packed_inputs(mask)
    torch.testing.assert_close(build_peer("fa2", inputs)(), reference(inputs))


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.describe())
def test_flash_attention_4_is_asked_for_the_same(mask: masks.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(
        q: Any,
        k: Any,
        v: Any,
        *,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool = False,
        window_size: Any = (None, None),
    ) -> tuple[torch.Tensor, None]:
        assert not (causal and window_size != (None, None))
        longest, window = (max_seqlen_q, max_seqlen_k), (None, 0) if causal else window_size
        return by_window(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, window, softmax_scale), None

    install_fa4(monkeypatch).flash_attn_varlen_func = varlen
    inputs = packed_inputs(mask)
    torch.testing.assert_close(build_peer("fa4", inputs)(), reference(inputs))


def install_fa4(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of its name, without functions."""
    for name in ("flash_attn", "flash_attn.cute"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["flash_attn"].cute = module  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("mask", OTHERS[:4], ids=str)
def test_documents_of_one_row_are_packed_sequences(mask: masks.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = small(mask, batch=1)

    def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
               max_seqlen_k: int, softmax_scale: float, causal: bool = False) -> torch.Tensor:  # fmt: skip
        longest = int(cu_seqlens_q.diff().max())
        assert (max_seqlen_q, max_seqlen_k) == (longest, longest) and len(cu_seqlens_q) == 6
        window = (None, 0) if causal else (None, None)
        return by_window(q, k, v, cu_seqlens_q, cu_seqlens_k, (9, 9), window, softmax_scale)

    install_fa4(monkeypatch).flash_attn_varlen_func = varlen
    torch.testing.assert_close(build_peer("fa4", inputs)(), dense_reference(inputs))
    (table,) = inputs.mask.tensors
    if table.dim() > 2:
        return  # documents that follow one another, whatever it holds
    apart = replace(inputs, mask=inputs.mask.bind(table.flip(1).contiguous()))
    with pytest.raises(Unsupported, match="and follow each other"):
        build_peer("fa4", apart)


def test_flash_attention_4_is_given_the_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = small(masks.sliding_window(7, 0), None, "bf16")

    def dense(q: Any, k: Any, v: Any, *, softmax_scale: float, window_size: Any, learnable_sink: Any) -> Any:
        assert window_size == (7, 0) and softmax_scale == 0.25 and learnable_sink is inputs.sinks
        return dense_reference(inputs).transpose(1, 2), None

    install_fa4(monkeypatch).flash_attn_func = dense
    torch.testing.assert_close(build_peer("fa4", inputs)(), dense_reference(inputs))


def test_a_single_query_of_each_sequence_has_no_causal_window() -> None:
    inputs = packed_inputs(masks.causal())
    one = starts(torch.ones(5, dtype=torch.int64)), starts(LENGTHS[1])
    decoding = replace(inputs, q=inputs.q[:, :5], packed=one)
    problem = Problem.of(decoding)
    assert problem.window == (None, None)
    assert problem.packed is not None and problem.packed == Packed(*one, 1, 9)


@pytest.mark.parametrize("name", ["fa2", "flex"])
def test_packed_sequences_under_other_masks_have_no_peer(name: str) -> None:
    with pytest.raises(
        Unsupported, match="packed sequences are compared on full, causal and window masks, n"
    ):
        build_peer(name, packed_inputs(masks.prefix_lm()))


@pytest.mark.parametrize(
    ("name", "score_mod", "reason"),
    [("cudnn", None, "takes no packed sequences"), ("fa2", "softcap(1.0)", "varlen_attn has no softcap")],
)
def test_a_peer_says_why_it_has_no_row_of_packed_sequences(
    name: str, score_mod: str | None, reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        build_peer(name, packed_inputs(masks.causal(), score_mod))


def test_the_table_has_a_title_for_each() -> None:
    assert set(PEERS) == {"cudnn", "fa2", "fa4", "flex"}
    assert len({peer.title for peer in PEERS.values()}) == 4
