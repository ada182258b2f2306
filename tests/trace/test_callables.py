"""What a callable captures, when it is traced again, and what is refused."""

from __future__ import annotations

import enum
import functools
import gc
import linecache
import random
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flex_collection import HEADS, causal, draw, window
from torch import nn
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask

import flashgen
from flashgen.build.reference import attention_reference, evaluate_rule
from flashgen.errors import InvalidArgument
from flashgen.runtime import torch_path
from flashgen.spec import masks, tiles
from flashgen.spec.rule import Rule
from flashgen.trace import mask_mod, rules, score_mod

LENGTH = 24
WINDOW = 5
TABLE = torch.arange(LENGTH) // 7


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_traced", {})
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []
    trace = rules._trace
    monkeypatch.setattr(rules, "_trace", lambda *args: made.append(args) or trace(*args))
    return made


# Captures


def test_captured_numbers_are_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_traces(monkeypatch)
    found = [mask_mod(window(left)) for left in (3, 4, 1000)]
    assert [each.values for each in found] == [(3,), (4,), (1000,)]
    assert {each.rule.text for each in found} == {
        "(q_idx >= k_idx) & (q_idx - k_idx <= left) where left: i32"
    }
    assert len(made) == 1

    def capped(cap):
        return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)

    assert [score_mod(capped(cap)).values for cap in (2.0, 2.5)] == [(2.0,), (2.5,)]
    assert score_mod(capped(2)).rule.text == "cap * tanh(score / cap) where cap: i32"
    assert len(made) == 3


def test_numbers_that_python_needs_are_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_traces(monkeypatch)

    def mask_of(left, steps=2):
        def function(b, h, q_idx, kv_idx):
            keep = q_idx >= kv_idx
            if left > 0:
                keep = keep & (q_idx - kv_idx <= left)
            for step in range(steps):
                keep = keep & (kv_idx != step)
            return keep

        return mask_mod(function)

    assert mask_of(3).rule.text == "(q_idx >= k_idx) & (q_idx - k_idx <= 3) & (k_idx != 0) & (k_idx != 1)"
    assert mask_of(0).rule.text == "(q_idx >= k_idx) & (k_idx != 0) & (k_idx != 1)"
    assert mask_of(0, 1).rule.text == "(q_idx >= k_idx) & (k_idx != 0)"
    assert mask_of(3).values == () and len(made) == 3
    huge, infinite = 2**40, float("-inf")
    assert mask_mod(lambda b, h, q, k: q * huge >= k).rule.text == f"q_idx * {huge} >= k_idx"
    rule = score_mod(lambda score, b, h, q, k: torch.where(q >= k, score, infinite)).rule
    assert rule.text == "where(q_idx >= k_idx, score, -inf)"

    def typed(left):
        return lambda b, h, q, k: q >= k if isinstance(left, int) else q < k

    assert mask_mod(typed(3)).rule.text == "q_idx >= k_idx"
    assert mask_mod(typed(3.0)).rule.text == "q_idx < k_idx"


class Masks(nn.Module):
    reach = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", TABLE.clone())
        self.config = SimpleNamespace(left=3)
        self.unrelated = nn.Linear(2, 2)

    @property
    def twice(self) -> int:
        return self.config.left * 2

    def near(self, q_idx, kv_idx):
        return q_idx - kv_idx <= self.twice + self.reach

    def mask(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) & self.near(q_idx, kv_idx)

    def forward(self, b, h, q_idx, kv_idx):
        return self.mask(b, h, q_idx, kv_idx)


class Called:
    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= self.left


def test_captures_of_every_kind_are_seen_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_traces(monkeypatch)
    module, called, listed = Masks(), Called(4), [7]
    for function in (module.mask, module, module.forward):
        found = mask_mod(function)
        assert found.rule.text == (
            "(ids[q_idx] == ids[k_idx]) & (q_idx - k_idx <= left * 2 + reach) "
            "where left: i32, reach: i32, ids: i64"
        )
        assert found.values == (3, 2) and found.tensors[0] is module.ids
    traces = len(made)
    module.config.left, module.ids, Masks.reach = 9, TABLE + 1, 6
    changed = mask_mod(module.mask)
    Masks.reach = 2
    assert changed.values == (9, 6) and changed.tensors[0] is module.ids

    assert mask_mod(called).values == (4,)
    called.left = 5
    assert mask_mod(called).values == (5,)

    partial = functools.partial(lambda b, h, q, k, *, gap: q - k >= gap, gap=2)
    assert (mask_mod(partial).values, partial.keywords["gap"]) == ((2,), 2)

    def of_global(b, h, q, k, shift=1):
        return (TABLE[q] == TABLE[k]) & (q - k <= WINDOW + shift + listed[0])

    assert mask_mod(of_global).values == (5, 1, 7)
    listed[0] = 8
    monkeypatch.setitem(globals(), "WINDOW", 6)
    other = TABLE * 2
    monkeypatch.setitem(globals(), "TABLE", other)
    assert mask_mod(of_global).values == (6, 1, 8) and mask_mod(of_global).tensors[0] is other
    assert len(made) == traces + 3

    joined = and_masks(causal, window(3), called)
    assert mask_mod(joined).values == (3, 5)


@dataclass(frozen=True, slots=True)
class Options:
    left: int
    right: int


OPTIONS = Options(4, 0)


def to_the_right(q_idx, kv_idx):
    return kv_idx - q_idx <= OPTIONS.right


def test_one_object_read_by_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_traces(monkeypatch)

    def function(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= OPTIONS.left) & to_the_right(q_idx, kv_idx)

    assert mask_mod(function).values == (4, 0)
    monkeypatch.setitem(globals(), "OPTIONS", Options(5, 1))
    assert mask_mod(function).values == (5, 1) and len(made) == 1

    class Node:
        def __init__(self, size: int, parent: Node | None = None) -> None:
            self.size, self.parent, self.child = size, parent, None

        def mask(self, b, h, q_idx, kv_idx):
            return q_idx - kv_idx <= self.child.parent.child.size

    parent = Node(1)
    parent.child = Node(np.int64(7), parent)
    assert mask_mod(parent.mask).values == (7,)
    parent.child.size = 8
    assert mask_mod(parent.mask).values == (8,)


def test_another_function_in_the_same_cell_is_another_mask() -> None:
    def not_(inner):
        return lambda b, h, q, k: ~inner(b, h, q, k)

    assert mask_mod(not_(causal)).rule.text == "~(q_idx >= k_idx)"
    assert mask_mod(not_(window(2))).rule.text.startswith("~((q_idx >= k_idx) & (q_idx - k_idx <= left))")
    assert mask_mod(not_(not_(causal))).rule.text == "q_idx >= k_idx"


def test_functions_that_refer_to_themselves() -> None:
    def outer(b, h, q, k):
        return q >= k if outer is not None else q < k

    assert mask_mod(outer).rule.text == "q_idx >= k_idx"


def test_names_that_a_rule_cannot_declare() -> None:
    head, batch_, Left, __x, inf = 3, 4, 5, 6, 7

    def function(b, h, q, k):
        return q + head + batch_ >= k + Left + __x + inf

    found = mask_mod(function)
    assert found.values == (3, 4, 5, 6, 7) and Rule.parse("mask", found.rule.text) == found.rule


def test_what_is_remembered_holds_no_tensor_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_traces(monkeypatch)

    def fresh(left, bias):
        return (lambda b, h, q, k: q - k <= left), (lambda score, b, h, q, k: score + bias[h])

    for left in range(300):  # C40
        bias = torch.randn(HEADS)
        mask, score = fresh(left, bias)
        assert mask_mod(mask).values == (left,) and score_mod(score).tensors[0] is bias
    assert len(made) == 2 and len(rules._traced) == 2
    last = weakref.ref(bias)
    del bias, mask, score
    gc.collect()
    assert last() is None
    monkeypatch.setattr(rules, "MAX_TRACED", 4)
    for number in range(20):
        mask_mod(eval(f"lambda b, h, q, k: q >= k + {number}"))
    assert len(rules._traced) <= 4


def test_a_changed_tensor_changes_the_result() -> None:
    q, k, v = draw(LENGTH)
    bias = torch.randn(HEADS, LENGTH)

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h, kv_idx]

    for _ in range(3):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * q.shape[3] ** -0.5
        wanted = (scores + bias[:, None]).softmax(-1) @ v.repeat_interleave(2, 1)
        torch.testing.assert_close(flashgen.attention(q, k, v, score_mod=biased), wanted)
        bias.mul_(-2)


def test_tensors_longer_than_the_call_are_cut() -> None:
    q, k, v = draw(LENGTH)
    ids, lengths = torch.arange(3 * LENGTH) // 5, torch.tensor([LENGTH, 10, 3, 3])

    def function(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (kv_idx < lengths[b])

    ours = flashgen.attention(q, k, v, mask=function)
    cut = flashgen.masks.document(ids[:LENGTH].expand(2, -1)) & flashgen.masks.key_padding(lengths[:2])
    torch.testing.assert_close(ours, flashgen.attention(q, k, v, mask=cut))
    ids = ids[: LENGTH - 1]
    with pytest.raises(InvalidArgument, match=r"ids of .* has shape \(23,\); axis 0 counts"):
        flashgen.attention(q, k, v, mask=function)


def test_gradients_reach_captured_tensors() -> None:
    q, k, v = draw(LENGTH)
    bias = torch.randn(HEADS, LENGTH, LENGTH, requires_grad=True)

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx, kv_idx]

    block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    out = flashgen.flex_attention(q, k, v, biased, block_mask, enable_gqa=True)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * q.shape[3] ** -0.5 + bias
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    wanted = scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, wanted)
    found, exact = (torch.autograd.grad(each.square().sum(), bias)[0] for each in (out, wanted))
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    assert found.any()
    assert "a gradient is needed" in str(flashgen.explain(q, k, v, score_mod=biased))
    with torch.no_grad():
        assert "a gradient is needed" not in str(flashgen.explain(q, k, v, score_mod=biased))


def test_tensors_of_other_dtypes_and_ranks_are_other_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_traces(monkeypatch)

    def reads(table):
        return lambda score, b, h, q, k: score + table[k] if table.ndim == 1 else score + table[h, k]

    for table, read in (
        (torch.zeros(LENGTH), "table[k_idx] where table: fp32"),
        (torch.zeros(LENGTH, dtype=torch.int32), "table[k_idx] where table: i32"),
        (torch.zeros(HEADS, LENGTH), "table[head, k_idx] where table: fp32"),
    ):
        for _ in range(2):
            assert score_mod(reads(table)).rule.text == f"score + {read}"
    assert len(made) == 3


def test_c36_computed_indices_stay_within_their_tensors() -> None:
    """torch raises where an index is outside, for pairs that the mask drops too."""
    q, k, v = draw(LENGTH)
    table = torch.randn(5, generator=torch.Generator().manual_seed(0))

    def near(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 5)

    def outside(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx]

    def inside(score, b, h, q_idx, kv_idx):
        return score + table[torch.clamp(q_idx - kv_idx, 0, 4)]

    given = [flashgen.attention(q, k, v, mask=near, score_mod=mod) for mod in (outside, inside)]
    assert torch.equal(*given)


# Meaning


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda s, b, h, q, k: s + (q >= k), "score + where(q_idx >= k_idx, 1, 0)"),
        (lambda s, b, h, q, k: s * (q - k).float(), "score * ((q_idx - k_idx) * 1.0)"),
        (lambda s, b, h, q, k: s + (q > 2).to(torch.float32), "score + where(q_idx > 2, 1.0, 0.0)"),
        (lambda s, b, h, q, k: 3 - s, "3 - score"),
        (lambda s, b, h, q, k: 2 / s, "2 / score"),
        (lambda s, b, h, q, k: s + 9 // (k + 1), "score + 9 // (k_idx + 1)"),
        (lambda s, b, h, q, k: s + 9 % (k + 1), "score + 9 % (k_idx + 1)"),
        (lambda s, b, h, q, k: s**2, "score * score"),
        (lambda s, b, h, q, k: s + 2 ** (-1.0 * h), "score + exp2(-1.0 * head)"),
        (lambda s, b, h, q, k: torch.sub(s, 1), "score - 1"),
        (lambda s, b, h, q, k: s.add(1).mul(2), "(score + 1) * 2"),
        (lambda s, b, h, q, k: torch.clamp(s, -3, 3), "min(max(score, -3), 3)"),
        (lambda s, b, h, q, k: s + TABLE[-1], "score + table[table_size - 1]"),
        (lambda s, b, h, q, k: s + TABLE.shape[0], "score + table_size"),
        (lambda s, b, h, q, k: s + TABLE.size(-1) + TABLE.ndim, "score + table_size + 1"),
        (
            lambda s, b, h, q, k: torch.where(q >= k, s, torch.tensor(0.0)),
            "where(q_idx >= k_idx, score, 0.0)",
        ),
        (lambda s, b, h, q, k: s.masked_fill(q < k, -float("inf")), "where(q_idx < k_idx, -inf, score)"),
        # A method takes the condition second: of truth values the other order would pass unseen.
        (lambda s, b, h, q, k: s.where(q < k, 0.0), "where(q_idx < k_idx, score, 0.0)"),
        (lambda s, b, h, q, k: s.where(other=0.0, condition=q < k), "where(q_idx < k_idx, score, 0.0)"),
        (
            lambda s, b, h, q, k: s + (q < 3).where(q < k, h > 1),
            "score + where(where(q_idx < k_idx, q_idx < 3, head > 1), 1, 0)",
        ),
        (lambda s, b, h, q, k: s + TABLE[k + q], "score + table[min(k_idx + q_idx, table_size - 1)]"),
        (lambda s, b, h, q, k: s + torch.full_like(s, 2), "score + 2.0"),
    ],
)
def test_meaning(function, text: str) -> None:
    assert score_mod(function).rule.text.split(" where ")[0] == text


def test_a_score_rule_that_changes_nothing_is_none() -> None:
    q, k, v = draw(LENGTH)

    def same(score, b, h, q_idx, kv_idx):
        return score

    assert "score rule" not in str(flashgen.explain(q, k, v, score_mod=same))
    assert torch.equal(flashgen.attention(q, k, v, score_mod=[same]), flashgen.attention(q, k, v))


# Refusals


def branches(b, h, q_idx, kv_idx):
    if q_idx > 3:
        return kv_idx < 3
    return q_idx >= kv_idx


def assigns(b, h, q_idx, kv_idx):
    TABLE[q_idx] = 3
    return q_idx >= kv_idx


def loops(b, h, q_idx, kv_idx):
    return all(each > 3 for each in kv_idx)


DRAWS = random.Random(0)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (branches, "`if q_idx > 3:`\\): node gt: q_idx > 3 decides a branch of Python"),
        (lambda b, h, q, k: q >= k and k > 2, "node ge: q_idx >= k_idx decides a branch"),
        (lambda b, h, q, k: not q >= k, "node ge: q_idx >= k_idx decides a branch"),
        (lambda b, h, q, k: 1 < q < 5, "node gt: q_idx > 1 decides a branch .* by &, | and ~"),
        (loops, "node k_idx: k_idx is looped over"),
        (assigns, "`TABLE\\[q_idx\\] = 3`\\): node table: table is changed in place"),
        (lambda b, h, q, k: TABLE.add_(1)[q] > 0, "node add_: add_ changes a tensor in place"),
        (lambda b, h, q, k: torch.sin(q) > k, "node sin: sin has no meaning in a kernel; known: abs, add"),
        (lambda b, h, q, k: torch.nn.functional.softplus(q) > k, "softplus has no meaning"),
        (lambda b, h, q, k: q.cumsum(0) > k, "node cumsum: cumsum has no meaning"),
        (lambda b, h, q, k: torch.rand(()) > 0.5, "node rand: rand draws random numbers"),
        (lambda b, h, q, k: torch.rand_like(q) > 0.5, "rand_like draws random numbers"),
        (lambda b, h, q, k: q > DRAWS.randint(0, 10**9), "q_idx > [0-9]+ once and q_idx > [0-9]+ when"),
        (lambda b, h, q, k: q.item() > k, "item\\(\\) asks for a value"),
        (lambda b, h, q, k: int(q) > k, "node q_idx: q_idx is needed as a Python number"),
        (lambda b, h, q, k: [1, 2][q] > k, "node q_idx: q_idx is needed as a Python number"),
        (lambda b, h, q, k: torch.arange(4)[q] > k, "node arange: arange has no meaning"),
        (lambda b, h, q, k: torch.tensor([1, 2])[q] > k, "node tensor: .* is no number"),
        (lambda b, h, q, k: torch.zeros(4)[q] > k, "a tensor of shape \\(4,\\) is made"),
        (lambda b, h, q, k: k < TABLE, "table is a tensor of which 1 of 1 axes are left"),
        (lambda b, h, q, k: TABLE[q, k] > k, "table has 1 axes left, not 2"),
        (lambda b, h, q, k: TABLE[q > k] > k, "table is indexed by q_idx > k_idx, a bool"),
        (lambda b, h, q, k: TABLE[q * 0.5] > k, "table is indexed by q_idx \\* 0.5, a float"),
        (lambda b, h, q, k: TABLE[q:k] > k, "table is indexed by a slice"),
        (lambda b, h, q, k: len(TABLE) > k, "write tensor.shape\\[0\\]"),
        (lambda b, h, q, k: torch.sum(TABLE) > k, "node sum_1: sum has no meaning"),
        (lambda b, h, q, k: q[0] > k, "q_idx has no axes to index"),
        (lambda b, h, q, k: (q & 3) > 0, "node and_: q_idx is no truth value: &, |, ~ and \\^ join"),
        (lambda b, h, q, k: (q * 0.5).int() > k, "is a float and becomes no integer"),
        (lambda b, h, q, k: q.half() > k, "node half: half has no meaning"),
        (lambda b, h, q, k: q.to(torch.bfloat16) > k, "torch.bfloat16 is no dtype to compute in"),
        (lambda b, h, q, k: q.real > k, "the attribute real has no meaning"),
        (lambda b, h, q, k: torch.add(q, k, alpha=2) > 1, "unexpected keyword argument 'alpha'"),
        (lambda b, h, q, k: q ** k > 1, "q_idx \\*\\* k_idx is not served"),
        (lambda b, h, q, k: None, "None is no number"),
        (lambda b, h, q, k: q - k, "a mask rule gives a bool"),
        (lambda b, h, q: q > 1, "it is called as mask_mod\\(b, h, q_idx, kv_idx\\)"),
        (lambda b, h, q, k: q < 1 // 0, "ZeroDivisionError"),
        (lambda b, h, q, k: q > float("nan"), "a constant is NaN"),
        (max, "cannot be traced"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_refusals_of_masks(function, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        mask_mod(function)
    q, k, v = draw(LENGTH)
    with pytest.raises(InvalidArgument, match=told):
        flashgen.attention(q, k, v, mask=function)


def test_a_refusal_has_the_line() -> None:
    with pytest.raises(InvalidArgument) as error:
        mask_mod(branches)
    line = branches.__code__.co_firstlineno + 1
    place = f"{__file__}, line {line}, `if q_idx > 3:`"
    assert str(error.value).startswith(f"the mask_mod branches cannot be traced ({place}): node gt:")


def test_a_long_line_hides_no_reason() -> None:
    made: dict[str, object] = {}
    text = f"mask = lambda b, h, q, k: (q & 3) > 0 {'and True ' * 500}"
    exec(compile(text, "long.py", "exec"), made)
    linecache.cache["long.py"] = len(text), None, [text], "long.py"
    with pytest.raises(InvalidArgument, match=r"\.\.\.`\): node and_: q_idx is no truth value") as error:
        mask_mod(made["mask"])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("levels", [90, 380, 430, 800])
def test_rules_that_nest_too_deeply_are_refused_whoever_notices_it(levels: int) -> None:
    def steps(b, h, q_idx, kv_idx):
        for _ in range(levels):
            kv_idx = torch.maximum(kv_idx, q_idx) * 2
        return q_idx >= kv_idx

    with pytest.raises(InvalidArgument, match=r"steps cannot be traced .*nested deeper than 80 levels"):
        mask_mod(steps)


def test_a_captured_0_divides_nothing() -> None:
    def strided(step):
        return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % step == 0

    mask_mod(strided(3))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"step=0 divides whole numbers in .*; give another number"):
            mask_mod(strided(0))
    with pytest.raises(InvalidArgument, match="divides a whole number by 0"):
        mask_mod(lambda b, h, q_idx, kv_idx: kv_idx // 0 == q_idx)


def test_captured_tensors_that_are_refused() -> None:
    q, k, v = draw(LENGTH)
    doubles, short, nothing = torch.zeros(LENGTH, dtype=torch.float64), torch.zeros(3), torch.zeros(0)
    far = torch.zeros(LENGTH, device="meta")
    hidden = {0: {(1,): torch.zeros(LENGTH)}}
    for function, told in (
        (lambda s, b, h, q, k: s + doubles[k], "doubles is torch.float64; a rule reads .* convert it"),
        (lambda s, b, h, q, k: s + far[k], "far of .* is on meta, q on cpu"),
        (lambda s, b, h, q, k: s + short[3], "is read at 3 = 3 along axis 0; .* up to 2"),
        (lambda s, b, h, q, k: s + short[-4], "is read at short_size - 4 = -1"),
        (lambda s, b, h, q, k: s + nothing[k + 1], "nothing of .* has shape \\(0,\\), and is read at 0"),
        (lambda s, b, h, q, k: s + hidden[0][1,][k], "not capture by a name of its own"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            flashgen.attention(q, k, v, score_mod=function)


def test_flex_attention_refuses() -> None:
    q, k, v = draw(LENGTH)
    block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    longer = create_block_mask(causal, None, None, LENGTH + 8, LENGTH, device="cpu", BLOCK_SIZE=8)
    batches = create_block_mask(causal, 3, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    blocks = BlockMask.from_kv_blocks(
        block_mask.kv_num_blocks, block_mask.kv_indices, BLOCK_SIZE=8, seq_lengths=(LENGTH, LENGTH)
    )
    for options, told in (
        ({"enable_gqa": False}, "query has 4 heads, key 2; .* enable_gqa=True"),
        ({"block_mask": causal}, "block_mask=function must be torch's BlockMask"),
        ({"block_mask": longer}, "block_mask has shape \\(1, 1, 32, 24\\); it must be \\(2, 4, 24, 24\\)"),
        ({"block_mask": batches}, "block_mask has shape \\(3, 1, 24, 24\\)"),
        ({"block_mask": block_mask[:, :, :1]}, "block_mask"),
        ({"block_mask": blocks}, "its blocks are the mask, and they are not read"),
        ({"kernel_options": {"BLOCK_M": 64}}, "kernel_options=.* tiles are chosen by tuning"),
        ({"return_lse": 1}, "return_lse=1 must be True or False"),
        ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, "both given"),
        ({"return_aux": AuxRequest(max_scores=True)}, "max_scores, which no kernel here writes"),
        ({"return_aux": True}, "return_aux=True must be torch's AuxRequest"),
        ({"score_mod": 3}, "score_mod=3 must be"),
        ({"scale": "1"}, "scale='1' must be"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            flashgen.flex_attention(q, k, v, **{"enable_gqa": True, **options})
    with pytest.raises(InvalidArgument, match="q must be a tensor"):
        flashgen.flex_attention(3, k, v, block_mask=None)


def test_flex_attention_takes_what_torchs_takes() -> None:
    q, k, v = draw(LENGTH)
    exact, lse = attention_reference(q, k, v, mask=flashgen.masks.causal(), scale=0.3)
    block_mask = create_block_mask(causal, 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    out, found = flashgen.flex_attention(q, k, v, None, block_mask, 0.3, True, True)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(found, lse)
    out, aux = flashgen.flex_attention(
        q, k, v, block_mask=block_mask, scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=False)
    )
    torch.testing.assert_close(out, exact)
    assert aux.lse is None
    everything = torchs._create_empty_block_mask(q, k)
    out = flashgen.flex_attention(q, k, v, block_mask=everything, enable_gqa=True)
    assert torch.equal(out, flashgen.attention(q, k, v))
    # One sequence of keys for all queries, as torch allows where there is a block mask.
    one = flashgen.flex_attention(q, k[:1], v[:1], block_mask=block_mask, enable_gqa=True)
    theirs = torchs.flex_attention(q, k[:1], v[:1], block_mask=block_mask, enable_gqa=True)
    torch.testing.assert_close(one, theirs, atol=2e-6, rtol=2e-6)


# torch.compile


def compiled_and_eager(function, *given) -> None:
    """One graph without a break gives what the function gives."""
    torch._dynamo.reset()  # which has a limit of graphs for one function
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for arguments in given:
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


NOTHING = -float("inf")


def same_table(score, b, h, q_idx, kv_idx):
    near = torch.where(q_idx - kv_idx < WINDOW, score * WINDOW, NOTHING)
    return torch.where((q_idx >= kv_idx) & (TABLE[q_idx] == TABLE[kv_idx]), near, NOTHING)


def padded(score, b, h, q_idx, kv_idx):
    return score.masked_fill((q_idx < kv_idx) | (kv_idx % 2 == h % 2), NOTHING)


def plain_causal(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, NOTHING)


@pytest.mark.parametrize("score", [same_table, padded, plain_causal], ids=lambda each: each.__name__)
@pytest.mark.parametrize("mask", [None, "causal", window(8)], ids=["no mask", "causal", "window"])
def test_a_score_rule_that_drops_pairs_spares_their_tiles(
    mask, score, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(LENGTH)
    calls = []
    reference = torch_path.reference
    monkeypatch.setattr(torch_path, "reference", lambda call: calls.append(call) or reference(call))
    given = mask_mod(mask) if callable(mask) else masks.causal() if mask else masks.full()
    wanted = attention_reference(q, k, v, mask=given, score_mod=score_mod(score), scale=0.3)
    forms = (score, [score], score_mod(score))
    for each in forms:
        found = flashgen.attention(q, k, v, mask=mask, score_mod=each, scale=0.3, return_lse=True)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    assert len(calls) == len(forms)
    positions = {"q_idx": torch.arange(LENGTH)[:, None], "k_idx": torch.arange(LENGTH), "batch": 0, "head": 0}
    positions |= {"q_len": LENGTH, "k_len": LENGTH, "score": torch.ones(LENGTH, LENGTH)}
    seen = evaluate_rule(given, positions) & (evaluate_rule(score_mod(score), positions) > NOTHING)
    needed = seen.reshape(LENGTH // TILE, TILE, LENGTH // TILE, TILE).any(3).any(1).sum()
    for call in calls:
        spec = call.workload().spec  # where both rules read a thing, each has a name of its own for it
        assert spec.score_mod is None or not spec.score_mod.may_drop
        assert visited(call.mask) == needed < (LENGTH // TILE) ** 2


TILE = 4


def visited(mask: masks.Mask) -> int:
    """Tiles that a kernel visits of the first head."""
    env = {"q_len": LENGTH, "k_len": LENGTH, "batch": 0, "head": 0}
    env |= dict(zip((name for name, _ in mask.rule.params), mask.values, strict=True))
    operands = (operand.name for operand in mask.rule.operands)
    env |= dict(zip(operands, (tensor.tolist() for tensor in mask.tensors), strict=True))
    return sum(len(partial) + len(full) for partial, full in tiles.visited(mask.rule, env, TILE, TILE))


def test_compiled_code_spares_the_tiles_too() -> None:
    q, k, v = draw(LENGTH)
    made = score_mod(same_table)
    compiled_and_eager(lambda q: flashgen.attention(q, k, v, score_mod=plain_causal), (q,))
    compiled_and_eager(lambda q: flashgen.attention(q, k, v, mask="causal", score_mod=same_table), (q,))
    compiled_and_eager(lambda q: flashgen.attention(q, k, v, score_mod=made), (q,))


def test_compiled_code_takes_functions_in_one_graph() -> None:
    q, k, v = draw(LENGTH)
    bias = torch.randn(HEADS)

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h] * kv_idx

    def not_(inner):
        return lambda b, h, q, k: ~inner(b, h, q, k)

    def first(steps):
        return lambda b, h, q, k: (q >= k) & (k < sum(range(steps)))

    def call(q, mask):
        return flashgen.attention(q, k, v, mask=mask, score_mod=biased)

    for several in (
        [window(5), window(6), window(7), causal],
        [not_(causal), not_(window(3)), not_(window(4)), first(4), first(5)],
        [and_masks(causal, window(3)), and_masks(window(3), not_(window(1)))],
    ):
        compiled_and_eager(call, *((q, mask) for mask in several))

    def sees(q):
        return flashgen.attention(q, k, v, mask=causal, score_mod=biased)

    compiled = torch.compile(sees, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(q), sees(q))
        bias.mul_(-3)
    bias = torch.randn(HEADS)
    torch.testing.assert_close(compiled(q), sees(q))

    ids = [torch.arange(LENGTH) // size for size in (3, 5)]
    block_masks = [
        create_block_mask(
            lambda b, h, q, k, ids=each: ids[q] == ids[k], None, None, LENGTH, LENGTH, device="cpu"
        )
        for each in ids
    ]
    with pytest.raises(Exception, match="made within the code that is compiled"):  # defaults are not seen
        compiled_and_eager(lambda q: flashgen.flex_attention(q, k, v, None, block_masks[0], None, True), (q,))
    block_mask = create_block_mask(window(4), None, None, LENGTH, LENGTH, device="cpu")
    compiled_and_eager(lambda q: flashgen.flex_attention(q, k, v, biased, block_mask, None, True), (q,))


def test_compiled_code_takes_rules_made_outside() -> None:
    q, k, v = draw(LENGTH)
    mask, module = mask_mod(window(5)), Masks()
    compiled_and_eager(lambda q: flashgen.attention(q, k, v, mask=mask), (q,))
    of_module = mask_mod(module.mask)
    compiled_and_eager(lambda q: flashgen.attention(q, k, v, mask=of_module), (q,))


def test_compiled_code_breaks_where_torch_does_not_see() -> None:
    q, k, v = draw(LENGTH)
    module = Masks()

    def made_within(q, ids):
        def same(b, h, q_idx, kv_idx):
            return ids[q_idx] == ids[kv_idx]

        return flashgen.attention(q, k, v, mask=same)

    def of_method(q, ids):
        return flashgen.attention(q, k, v, mask=module.mask)

    def of_several(q, ids):
        mods = [lambda score, b, h, q, k: score * 2, flashgen.score_mods.softcap(3.0)]
        return flashgen.attention(q, k, v, score_mod=mods)

    for function in (made_within, of_method, of_several):
        with pytest.raises(Exception, match=r"flashgen\.trace\."):
            torch.compile(function, backend="eager", fullgraph=True)(q, TABLE)
        torch.testing.assert_close(torch.compile(function, backend="eager")(q, TABLE), function(q, TABLE))
    with pytest.raises(Exception, match="decides a branch of Python"):
        torch.compile(lambda q: flashgen.attention(q, k, v, mask=branches), backend="eager", fullgraph=True)(
            q
        )
    with pytest.raises(InvalidArgument, match="decides a branch of Python"):
        torch.compile(lambda q: flashgen.attention(q, k, v, mask=branches), backend="eager")(q)


def test_modes_of_torch_do_not_reach_the_trace() -> None:
    q, k, v = draw(LENGTH)
    mask = window(4)
    wanted = flashgen.attention(q, k, v, mask=mask)
    rules._traced.clear()
    with torch.device("meta"):
        assert torch.equal(flashgen.attention(q, k, v, mask=mask), wanted)
    rules._traced.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert flashgen.attention(q, k, v, mask=mask).dtype == torch.bfloat16
    grown = torch.vmap(lambda each: flashgen.attention(each, k, v, mask=mask))(torch.stack([q, q * 2]))
    torch.testing.assert_close(grown[0], wanted)


def test_evaluated_like_the_callable() -> None:
    """The same numbers, computed by the callable itself on plain tensors."""
    table = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))

    def function(score, b, h, q, k):
        score = torch.where((q - k) % 3 == 1, score * 2, score.clamp(max=1.0))
        return score + table[torch.clamp(k - 2, min=0)] * (h + 1) - (q // 4 == k // 4).float()

    score = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
    rows, keys = torch.arange(LENGTH).view(-1, 1), torch.arange(LENGTH)
    env = {"score": score, "batch": 0, "head": 2, "q_idx": rows, "k_idx": keys}
    found = evaluate_rule(score_mod(function), env)
    torch.testing.assert_close(found.float(), function(score, 0, 2, rows, keys))


class Setting:
    left = 3

    @classmethod
    def reach(cls) -> int:
        return cls.left


class Lookup:
    def __getitem__(self, at: int) -> int:
        return NEAR["left"]


NEAR = {"left": 3}


def left_of(setting) -> int:
    return setting.left


def shadowing(left: int) -> Setting:
    made = Setting()
    made.left = left
    return made


class Lefts(list):
    pass


CHANGING = {
    "a class": (Setting, lambda made: lambda: made.left, lambda made: setattr(made, "left", 1)),
    "its method": (Setting(), lambda made: lambda: made.reach(), lambda _: setattr(Setting, "left", 1)),
    "handed on": (Setting(), lambda made: lambda: left_of(made), lambda _: setattr(Setting, "left", 1)),
    "shadowing": (shadowing(3), lambda made: lambda: left_of(made), lambda made: setattr(made, "left", 1)),
    "getattr": (
        SimpleNamespace(left=3),
        lambda made: lambda: getattr(made, "left", 9),
        lambda made: setattr(made, "left", 1),
    ),
    "hasattr": (
        SimpleNamespace(left=3),
        lambda made: lambda: made.left if hasattr(made, "left") else 1,
        lambda made: delattr(made, "left"),
    ),
    "vars": (
        SimpleNamespace(left=3),
        lambda made: lambda: vars(made).get("left", 9),
        lambda made: setattr(made, "left", 1),
    ),
    "operator": (Lookup(), lambda made: lambda: made[0], lambda _: NEAR.update(left=1)),
    "deque": (deque([3]), lambda made: lambda: made[0], lambda made: made.insert(0, 1)),
    "set": ({3}, lambda made: lambda: min(made), lambda made: made.add(1)),
    "keys of pairs": ({(0, 1): 3}, lambda made: lambda: made[0, 1], lambda made: made.update({(0, 1): 1})),
    "ordered": (OrderedDict(left=3), lambda made: lambda: made["left"], lambda made: made.update(left=1)),
    "list class": (Lefts([3]), lambda made: lambda: made[0], lambda made: made.insert(0, 1)),
    "bound": ({"left": 3}, lambda made: read_by(made.get), lambda made: made.update(left=1)),
    "array": (np.array([3]), lambda made: lambda: made[0], lambda made: made.put(0, 1)),
}


def read_by(get):
    return lambda: get("left")


@pytest.mark.parametrize("kind", CHANGING)
def test_what_no_key_tells_is_read_anew_at_every_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "left", 3)
    monkeypatch.setitem(NEAR, "left", 3)
    made, reader, change = CHANGING[kind]
    left = reader(made)

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= left()

    def kept() -> list[bool]:
        env = {"q_idx": torch.arange(6)[:, None], "k_idx": torch.arange(6)}
        return evaluate_rule(mask_mod(mask), env)[:, 0].tolist()

    assert kept() == [True] * 4 + [False] * 2
    change(made)
    assert kept() == [True] * 2 + [False] * 4


@dataclass(frozen=True)
class Reach:
    left: int
    right: int = 0


def test_settings_of_a_dataclass_are_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_traces(monkeypatch)
    for left in (3, 4):
        reach = Reach(left)
        assert mask_mod(lambda b, h, q, k: (q - k <= reach.left) & (k - q <= reach.right)).values == (left, 0)  # noqa: B023
    assert len(made) == 1


class Sub(float):
    pass


def test_numbers_of_classes_of_their_own() -> None:
    level = enum.IntEnum("Level", {"NEAR": 3}).NEAR
    assert mask_mod(lambda b, h, q, k: q - k <= level).rule.text == "q_idx - k_idx <= 3"
    half = Sub(0.5)
    assert score_mod(lambda score, b, h, q, k: score * half).rule.text == "score * 0.5"
    pairs = np.array([2.0, 3.0], np.float32)
    assert score_mod(lambda score, b, h, q, k: pairs[0] * score).rule.text in ("2.0 * score", "score * 2.0")


def test_stand_ins_are_tensors_to_those_who_ask() -> None:
    def function(score, b, h, q_idx, kv_idx):
        return score * 2 if isinstance(score, torch.Tensor) and type(TABLE) is torch.Tensor else score * 3

    assert score_mod(function).rule.text == "score * 2"


def test_copies_do_not_enter_registries() -> None:
    known = []

    class Registered:
        def __init_subclass__(cls) -> None:
            known.append(cls)

        def left(self) -> int:
            return 3

    made = Registered()
    assert mask_mod(lambda b, h, q, k: q - k <= made.left()).rule.text == "q_idx - k_idx <= 3"
    assert known == []


def test_two_truth_values_add_to_one() -> None:
    rule = score_mod(lambda score, b, h, q, k: score + ((q > k) + (k > 3)) * 2.0)
    q, k = torch.arange(6)[:, None], torch.arange(6)
    score = torch.zeros(6, 6)
    found = evaluate_rule(rule, {"score": score, "q_idx": q, "k_idx": k})
    assert torch.equal(found, score + ((q > k) + (k > 3)) * 2.0)
    assert mask_mod(lambda b, h, q, k: (q > k) * (k > 3)).rule.text == "(q_idx > k_idx) & (k_idx > 3)"


def test_negative_indices_count_from_the_end() -> None:
    q, k, v = (torch.randn(1, 1, LENGTH, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    table = torch.randn(LENGTH, generator=torch.Generator().manual_seed(3))

    def function(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx]

    found = flashgen.attention(q, k, v, score_mod=function)
    at = torch.arange(LENGTH)
    expected = ((q @ k.mT) / 4 + table[at[:, None] - at]).softmax(-1) @ v
    torch.testing.assert_close(found, expected)


def test_a_mask_is_joined_with_a_callable() -> None:
    for join in (lambda: flashgen.masks.causal() & causal, lambda: causal | flashgen.masks.causal()):
        with pytest.raises(InvalidArgument, match=r"make it a mask first: flashgen\.trace\.mask_mod"):
            join()


def test_a_block_mask_does_not_hide_what_is_wrong_with_the_tensors() -> None:
    q = torch.randn(1, 1, LENGTH, 16)
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    for wrong, told in ((None, "must be a tensor"), (q[0], "has 3 dimensions")):
        with pytest.raises(InvalidArgument, match=told):
            flashgen.flex_attention(wrong, q, q, block_mask=mask)


BIAS = torch.randn(LENGTH, generator=torch.Generator().manual_seed(5)).requires_grad_()


def biased(score, b, h, q_idx, kv_idx):
    return score + BIAS[kv_idx]


def test_compiled_code_gives_gradients_of_captured_tensors() -> None:
    q, k, v = draw(LENGTH)

    def loss(q):
        return (flashgen.attention(q, k, v, score_mod=biased) * q).sum()

    torch.compiler.reset()
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(q), BIAS)
    torch.testing.assert_close(found, torch.autograd.grad(loss(q), BIAS))
