"""The reference against torch, and the online recurrence against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.build import reference
from flashgen.build.reference import (
    OnlineState,
    attention_reference,
    gradients_reference,
    online_attention,
    packed_gradients_reference,
    packed_reference,
)
from flashgen.errors import InvalidArgument
from flashgen.spec.masks import Mask, causal, document, key_padding, parse_mask, sliding_window
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import ScoreMod, compose, softcap


def inputs(q_len=7, k_len=11, heads=4, kv_heads=2, dim=8, dim_v=5, batch=2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, k_len, dim), (batch, kv_heads, k_len, dim_v)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def by_torch(q, k, v, keep=None, scale=None):
    """torch's own attention; rows that see nothing become 0."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=keep, scale=scale, enable_gqa=True
    )
    return out if keep is None else torch.where(keep.any(-1, keepdim=True), out, 0.0)


def test_it_is_torchs_attention():
    q, k, v = inputs()
    for scale in (None, 0.3, -1.0):
        out, lse = attention_reference(q, k, v, scale=scale, dtype=torch.float64)
        torch.testing.assert_close(out, by_torch(q, k, v, scale=scale))
        scores = q @ k.repeat_interleave(2, 1).mT * (scale if scale else 8**-0.5)
        torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize(("q_len", "k_len"), [(7, 11), (11, 7), (1, 9), (9, 1)])
def test_masks_mean_what_they_say(q_len, k_len):
    q, k, v = inputs(q_len, k_len)
    q_idx, k_idx = torch.arange(q_len)[:, None], torch.arange(k_len)
    q_pos = q_idx + k_len - q_len
    lengths = torch.tensor([k_len // 2, 0])
    keys = torch.rand(2, k_len) < 0.6
    ids = torch.randint(0, 3, (2, k_len))
    row_ids = torch.where(q_pos >= 0, ids[:, q_pos.clamp(min=0).squeeze(1)].unsqueeze(2), -1)
    by_hand = {
        document(ids): (row_ids == ids[:, None])[:, None],
        document(ids.int()) & causal(): ((row_ids == ids[:, None]) & (q_pos >= k_idx))[:, None],
        causal(): q_pos >= k_idx,
        causal("top_left"): q_idx >= k_idx,
        sliding_window(3, 1): (k_idx >= q_pos - 3) & (k_idx <= q_pos + 1),
        key_padding(lengths): (k_idx < lengths[:, None])[:, None, None],
        causal() & key_padding(keys): (q_pos >= k_idx) & keys[:, None, None],
        ~causal() | sliding_window(0, 0): k_idx >= q_pos,
    }
    for mask, keep in by_hand.items():
        keep = keep.expand(2, 1, q_len, k_len)
        out, lse = attention_reference(q, k, v, mask=mask, dtype=torch.float64)
        torch.testing.assert_close(out, by_torch(q, k, v, keep))
        assert ((lse == -math.inf) == ~keep.any(-1)).all()
        assert not (out.isnan().any() or lse.isnan().any())


def test_every_symbol_reaches_a_rule():
    q, k, v = inputs()
    text = "score + batch - 2.0 * head + kv_head * bias[head, q_idx] - (q_pos - k_idx) / 3 where bias: fp32"
    bias = torch.randn(4, 7)
    mod = ScoreMod(Rule.parse("score", text), (), (bias,))
    head = torch.arange(4)[:, None, None]
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    scores = scores + torch.arange(2)[:, None, None, None] - 2.0 * head + (head // 2) * bias[:, :, None]
    scores = scores - (torch.arange(7)[:, None] + 4 - torch.arange(11)) / 3
    out, lse = attention_reference(q, k, v, score_mod=mod, dtype=torch.float64)
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_score_rules_come_in_order_and_before_the_mask():
    q, k, v = inputs()
    mod = compose([softcap(0.5), ScoreMod(Rule.parse("score", "where(score > 0, 1.0, max(score, -0.1))"))])
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    scores = 0.5 * torch.tanh(scores / 0.5)
    scores = torch.where(scores > 0, 1.0, scores.clamp(min=-0.1))
    keep = torch.arange(7)[:, None] >= torch.arange(11)
    out, _ = attention_reference(q, k, v, score_mod=mod, mask=causal("top_left"), dtype=torch.float64)
    expected = scores.masked_fill(~keep, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected)


def test_chunks_of_rows_change_nothing(monkeypatch):
    q, k, v = inputs(batch=1)
    whole = attention_reference(q, k, v, mask=causal(), score_mod=softcap(2.0))
    for scores in (1, 100, 130):
        monkeypatch.setattr(reference, "CHUNK_SCORES", scores)
        chunked = attention_reference(q, k, v, mask=causal(), score_mod=softcap(2.0))
        for a, b in zip(chunked, whole, strict=True):
            torch.testing.assert_close(a, b)


def test_empty_sequences():
    q, k, v = inputs()
    out, lse = attention_reference(q, k[:, :, :0], v[:, :, :0])
    assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = attention_reference(q[:, :, :0], k, v)
    assert out.shape == (2, 4, 0, 5) and lse.shape == (2, 4, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("mask", [None, causal(), sliding_window(2, 0)], ids=str)
def test_scores_that_are_nan_or_infinite_are_told(bad, mask):
    """By output and LSE: -inf is the LSE of a row that sees no key, and of no other."""
    q, k, v = torch.rand(1, 2, 6, 8) + 1, torch.rand(1, 2, 6, 8) + 10, torch.randn(1, 2, 6, 8)
    q[0, 1, 4] = bad
    for out, lse in (
        attention_reference(q, k, v, mask=mask),
        online_attention(q, k, v, [2, 4], mask=mask, dtype=torch.float32),
    ):
        assert out[0, 1, 4].isnan().all() and lse[0, 1, 4].isnan()
        assert out.isnan().sum() == 8 and lse.isnan().sum() == 1 and not lse.isinf().any()
    out, lse = attention_reference(q, k, v, mask=~causal() if mask is None else mask & ~causal())
    assert out[0, 1, 5].eq(0).all() and lse[0, 1, 5] == -math.inf, "the last row sees nothing"


def test_rounding_like_a_kernel():
    q, k, v = inputs(64, 256, dtype=torch.bfloat16)
    exact, _ = attention_reference(q, k, v, dtype=torch.float64)
    plain, plain_lse = attention_reference(q, k, v)
    rounded, rounded_lse = attention_reference(q, k, v, round_p_to=torch.bfloat16)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert torch.equal(plain_lse, rounded_lse)
    assert (plain - exact).abs().max() < 1e-6 < (rounded - exact).abs().max() < 1e-2
    # The weights are rounded too, not the output alone.
    assert not torch.equal(rounded, plain.bfloat16().float())


def test_gradients_are_those_of_torch_and_zero_for_rows_that_see_nothing():
    q, k, v = (each.requires_grad_() for each in inputs(5, 3))
    out, _ = attention_reference(q, k, v, mask=causal(), dtype=torch.float64)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad((out * upstream).sum(), (q, k, v))
    keep = torch.arange(5)[:, None] - 2 >= torch.arange(3)
    seen = by_torch(q[:, :, 2:], k, v, keep[2:].expand(2, 1, 3, 3))
    expected = torch.autograd.grad((seen * upstream[:, :, 2:]).sum(), (q, k, v))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert (ours[0][:, :, :2] == 0).all()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, 2.0, -1.0, 0.0], dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("lengths", [(9, 20), (20, 9)], ids=str)
def test_gradients_written_out_are_those_of_autograd(lengths, sinks, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_SCORES", 4 * 9 * 5)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, lengths[0], 16), (1, 2, lengths[1], 16), (1, 2, lengths[1], 24))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    rules = {
        "mask": causal(),
        "score_mod": compose([softcap(2.0), ScoreMod(Rule.parse("score", "score * 3"))]),
    }
    out, lse = attention_reference(q, k, v, **rules, sinks=sinks, dtype=torch.float64)
    dout, dlse = (torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in (out, lse))
    wanted = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])
    given = [each.detach() for each in (q, k, v)]
    for left in (None, out.detach()):
        found = gradients_reference(*given, dout, dlse, out=left, **rules, sinks=sinks, dtype=torch.float64)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_products_ignore_the_process_wide_precision():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        q, k, v = inputs(dtype=torch.float32)
        out, _ = attention_reference(q, k, v)
        exact, _ = attention_reference(q, k, v, dtype=torch.float64)
        assert (out - exact).abs().max() < 1e-6
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda q, k, v: (q[0], k, v), "batch, heads, rows, head_dim"),
        (lambda q, k, v: (q[..., :4], k, v), "share batch and head_dim"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), "share batch, heads and rows"),
        (lambda q, k, v: (q[:, :3], k, v), "must divide"),
    ],
)
def test_shapes_are_checked(change, hint):
    with pytest.raises(InvalidArgument, match=hint):
        attention_reference(*change(*inputs()))


def test_missing_operands_and_odd_dtypes_are_refused():
    q, k, v = inputs()
    with pytest.raises(InvalidArgument, match="key_lengths"):
        attention_reference(q, k, v, mask=parse_mask("key_padding"))
    with pytest.raises(InvalidArgument, match="float32 or torch"):
        attention_reference(q, k, v, dtype=torch.bfloat16)


# The online recurrence

MASKS = st.sampled_from(
    [
        None,
        causal(),
        ~causal(),
        sliding_window(2, 1),
        Mask(Rule.parse("mask", "k_idx >= 4")),  # whole first blocks without a key
        Mask(Rule.parse("mask", "(k_idx >= 5) & (q_idx != 1)")),
    ]
)
SPLITS = st.lists(st.integers(0, 9), max_size=6).map(sorted)


@settings(deadline=None, max_examples=150)
@given(SPLITS, MASKS, st.integers(0, 2**16), st.sampled_from([0.0, 1e4, -1e4]), st.integers(0, 8))
def test_any_blocks_give_the_plain_result(splits, mask, seed, spike, where):
    q, k, v = inputs(4, 9, 2, 1, 4, 3, 1, seed)
    # One key's score towers over (or lies far under) all others, so a later block resets what came before.
    mod = ScoreMod(
        Rule.parse("score", "where(k_idx == where_, score + spike, score) where where_: i32, spike: f32"),
        (where, spike),
    )
    plain = attention_reference(q, k, v, mask=mask, score_mod=mod, dtype=torch.float64)
    online = online_attention(q, k, v, splits, mask=mask, score_mod=mod)
    for a, b in zip(online, plain, strict=True):
        assert not a.isnan().any()
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def _accumulator_only(state: OnlineState, maximum: torch.Tensor) -> OnlineState:
    return OnlineState(maximum, state.normaliser, _both(state, maximum).accumulator)


def _normaliser_only(state: OnlineState, maximum: torch.Tensor) -> OnlineState:
    return OnlineState(maximum, _both(state, maximum).normaliser, state.accumulator)


_both = reference.rescaled


@pytest.mark.parametrize("wrong", [_accumulator_only, _normaliser_only])
def test_rescaling_only_one_of_the_sums_does_not_go_unnoticed(monkeypatch, wrong):
    q, k, v = inputs(4, 9, 2, 1, 4, 3, 1)
    plain, _ = attention_reference(q, k, v, dtype=torch.float64)
    monkeypatch.setattr(reference, "rescaled", wrong)
    out, _ = online_attention(q, k, v, [3, 6])
    assert (out - plain).abs().max() > 1e-3


def test_blocks_must_rise():
    q, k, v = inputs()
    for splits in ([3, 2], [12], [-1]):
        with pytest.raises(InvalidArgument, match="splits="):
            online_attention(q, k, v, splits)


def test_packed_sequences_are_blocks_of_a_diagonal() -> None:
    q_lengths, k_lengths = (4, 0, 3, 7), (5, 2, 0, 6)
    q, k, v = (torch.randn(n, h, 16) for n, h in ((14, 4), (13, 2), (13, 2)))
    cu_q, cu_k = ([sum(each[:n]) for n in range(5)] for each in (q_lengths, k_lengths))
    mask = sliding_window(2, 1)
    out, lse = packed_reference(q, k, v, cu_q, cu_k, mask=mask, dtype=torch.float64)
    of_q, of_k = (torch.repeat_interleave(torch.arange(4), torch.tensor(n)) for n in (q_lengths, k_lengths))
    at_q = (
        torch.arange(14)
        - torch.tensor(cu_q)[of_q]
        + (torch.tensor(k_lengths) - torch.tensor(q_lengths))[of_q]
    )
    at_k = torch.arange(13) - torch.tensor(cu_k)[of_k]
    apart = at_q[:, None] - at_k
    keep = (of_q[:, None] == of_k) & (apart <= 2) & (-apart <= 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) / 4
    scores = scores.masked_fill(~keep, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    expected = torch.einsum("hqk,khd->qhd", weights, v.double().repeat_interleave(2, 1))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


def test_gradients_of_packed_sequences_are_autograds() -> None:
    q_lengths, k_lengths = (4, 0, 3, 7), (5, 2, 0, 6)
    q, k, v, dout = (
        torch.randn(n, h, 16, dtype=torch.float64) for n, h in ((14, 4), (13, 2), (13, 2), (14, 4))
    )
    dlse = torch.randn(4, 14, dtype=torch.float64)
    cu = [[sum(each[:n]) for n in range(5)] for each in (q_lengths, k_lengths)]
    lengths = torch.tensor([3, 2, 0, 6], dtype=torch.int32)
    rules = {"mask": causal() & key_padding(lengths), "score_mod": softcap(2.0), "dtype": torch.float64}
    leaves = [each.requires_grad_() for each in (q, k, v)]
    out, lse = packed_reference(*leaves, *cu, **rules)
    wanted = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    with torch.no_grad():
        found = packed_gradients_reference(q, k, v, dout, dlse, *cu, **rules)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_rules_know_which_packed_sequence_they_are_asked_for() -> None:
    q, k, v = (torch.randn(6, 2, 16) for _ in range(3))
    lengths = torch.tensor([1, 3], dtype=torch.int32)
    out, _ = packed_reference(q, k, v, [0, 3, 6], [0, 3, 6], mask=key_padding(lengths))
    torch.testing.assert_close(out[:3], v[:1].expand(3, -1, -1))
    alone, _ = attention_reference(*(x[3:].transpose(0, 1)[None] for x in (q, k, v)))
    torch.testing.assert_close(out[3:], alone[0].transpose(0, 1))
