"""Element masks joined into fewer conditions, against every single pair."""

import random

import pytest
import torch
from spec.test_tiles import Case, random_mask

from flashgen.build.reference import TORCH_FUNCTIONS
from flashgen.codegen.conjuncts import Interval, joined, period
from flashgen.spec import expr as ex
from flashgen.spec.masks import parse_mask
from flashgen.spec.rule import Rule

FEWER = {
    "sliding_window(5, 2)": 1,
    "causal & sliding_window(5, 2)": 1,
    "causal & key_padding": 1,
    "prefix_lm": 1,
    "document": 2,
    "causal & document": 2,
    "document('ordered')": 1,
    "causal & sliding_window(5, 0) & document('ordered')": 1,
    "causal & sliding_window(5, 0) & document": 2,
    "neighborhood(5)": 1,
    "neighborhood((4, 8), (3, 3))": 2,
    "causal & ~sliding_window(3, 0)": 2,
}
"""How many conditions are left of each, the end of the sequence included."""


def conditions(case: Case) -> list[ex.Expr]:
    found = joined(case.mask.rule.expr, case.mask.rule.types)
    return [each.expr if isinstance(each, Interval) else each for each in found]


def kept(case: Case) -> torch.Tensor:
    """What the joined conditions say of all pairs, and of as many keys behind the last."""
    env = {n: torch.tensor(v) if isinstance(v, list) else v for n, v in case.env.items()}
    env |= {"q_idx": torch.arange(case.q_len)[:, None], "k_idx": torch.arange(case.k_len)}
    keep = torch.ones(case.q_len, case.k_len, dtype=torch.bool)
    for each in conditions(case):
        keep = keep & torch.as_tensor(ex.evaluate(each, env, TORCH_FUNCTIONS))
    return keep


@pytest.mark.parametrize("text", FEWER)
def test_intervals_of_one_value_become_one(text):
    case = Case(parse_mask(text), random.Random(text))
    assert len(conditions(case)) == FEWER[text]
    intervals = [c for c in joined(case.mask.rule.expr, case.mask.rule.types) if isinstance(c, Interval)]
    assert len({each.value for each in intervals}) == len(intervals)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("k_idx % 8 < 3", 8),
        ("(k_idx % 4 < 3) & (k_idx % 6 > q_idx % 2) & (k_idx < 9)", 12),
        ("(k_idx % 8 < 3) & (k_idx // 8 < 3)", 0),
        ("(k_idx % 8 < 3) & (q_idx % 4 == k_idx % 4)", 0),
        ("((k_idx + 1) % 8 < 3) & (k_idx % 4 < 2)", 0),
        ("q_pos >= k_idx", 0),
    ],
)
def test_conditions_on_remainders_repeat_with_the_keys(text, keys):
    rule = Rule.parse("mask", text)
    assert period(joined(rule.expr, rule.types)[1:]) == keys


@pytest.mark.parametrize("seed", range(400))
def test_what_is_joined_keeps_the_same_pairs(seed):
    rng = random.Random(seed)
    case = Case(random_mask(rng, 3), rng)
    assert torch.equal(kept(case), case.keep), str(case)


@pytest.mark.parametrize("text", FEWER)
def test_no_key_behind_the_last_is_kept(text):
    case = Case(parse_mask(text), random.Random(text))
    first, *_ = joined(case.mask.rule.expr, case.mask.rule.types)
    env = {n: torch.tensor(v) if isinstance(v, list) else v for n, v in case.env.items()}
    env |= {"q_idx": torch.arange(case.q_len)[:, None], "k_idx": case.k_len + torch.arange(8)}
    assert not torch.as_tensor(ex.evaluate(first.expr, env, TORCH_FUNCTIONS)).any()
