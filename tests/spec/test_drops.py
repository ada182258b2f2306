"""What a score rule drops by itself, taken out of it as a mask, against the rule as it was."""

import itertools
import math
import random
import re

import pytest

from flashgen.spec import drops
from flashgen.spec import expr as ex
from flashgen.spec.masks import Mask, causal, full, sliding_window
from flashgen.spec.rule import Rule, apart
from flashgen.spec.score_mods import ScoreMod, compose, softcap

CONDITIONS = ["q_idx >= k_idx", "k_idx < 3", "x < 0.5", "(q_idx == 2) | (h != k_idx)", "~(x < 0.25)"]
SCORES = ["score", "score * 2", "-inf", "score + x"]
TYPES = {"x": "f32", "h": "i32"}


def rule_of(text: str) -> ScoreMod:
    params = [name for name in TYPES if re.search(rf"\b{name}\b", text)]
    declared = f" where {', '.join(f'{name}: {TYPES[name]}' for name in params)}" if params else ""
    return ScoreMod(Rule.parse("score", text + declared), tuple({"x": 0.3, "h": 1}[name] for name in params))


def values(bound: Mask | ScoreMod) -> dict[str, float]:
    return dict(zip((name for name, _ in bound.rule.params), bound.values, strict=True))


def seen(mask: Mask, score_mod: ScoreMod | None, env: dict[str, float]) -> float:
    """The score that the softmax sees."""
    if not ex.evaluate(mask.rule.expr, {**env, **values(mask)}):
        return -math.inf
    if score_mod is None:
        return env["score"]
    return ex.evaluate(score_mod.rule.expr, {**env, **values(score_mod)})


@pytest.mark.parametrize(
    ("text", "kept", "left"),
    [
        ("where(q_idx >= k_idx, score, -inf)", "q_idx >= k_idx", None),
        ("where(q_idx < k_idx, -inf, score)", "q_idx >= k_idx", None),
        ("where(~(k_idx < 3), -inf, 2 * score)", "k_idx < 3", "2 * score"),
        ("where(k_idx < 3 / x, -inf, score)", "~(k_idx < 3 / x) where x: f32", None),
        (
            "where(q_idx >= k_idx, where(q_idx - k_idx < h, score, -inf), -inf)",
            "(q_idx >= k_idx) & (q_idx - k_idx < h) where h: i32",
            None,
        ),
        (
            "where(k_idx < 3, score * x, where(q_idx >= k_idx, score, -inf))",
            "(k_idx < 3) | (q_idx >= k_idx)",
            "where(k_idx < 3, score * x, score) where x: f32",
        ),
        (
            "where(q_idx >= k_idx, where(score > x, score, -inf), -inf)",
            "q_idx >= k_idx",
            "where(score > x, score, -inf) where x: f32",
        ),
    ],
)
def test_a_choice_of_nothing_is_a_mask(text: str, kept: str, left: str | None) -> None:
    mask, score_mod = drops.as_mask(full(), rule_of(text))
    assert mask.rule.text == kept
    assert (score_mod and score_mod.rule.text) == left


@pytest.mark.parametrize(
    "text",
    [
        "score * 2",
        "where(q_idx >= k_idx, score, score * 2)",
        "where(score > 0, score, -inf)",
        "where(score > 0, where(q_idx >= k_idx, score, -inf), -inf)",
        "where(q_idx >= k_idx, score, -inf) * 2",
        "score + where(q_idx >= k_idx, 0, -inf)",  # NaN where the score is infinite
        "where(q_idx >= k_idx, x, -inf)",
        "where(q_idx >= k_idx, -inf, -inf)",
    ],
)
def test_what_no_mask_says_stays_as_it_is(text: str) -> None:
    whole = rule_of(text)
    assert drops.as_mask(causal(), whole) == (causal(), whole)


def test_random_choices_give_the_scores_of_the_whole() -> None:
    draw = random.Random(0)

    def choice(depth: int) -> str:
        if not depth or draw.random() < 0.3:
            return draw.choice(SCORES)
        return f"where({draw.choice(CONDITIONS)}, {choice(depth - 1)}, {choice(depth - 1)})"

    split = 0
    for _ in range(300):
        whole = rule_of(choice(4))
        given = draw.choice([full(), sliding_window(2, 1)])
        mask, score_mod = drops.as_mask(given, whole)
        split += mask != given
        for q_idx, k_idx in itertools.product(range(5), repeat=2):
            env = {"q_idx": q_idx, "k_idx": k_idx, "q_len": 5, "k_len": 5, "q_pos": q_idx, "score": 0.75}
            assert seen(mask, score_mod, env) == seen(given, whole, env), whole.rule.text
        assert score_mod is None or mask == given or not score_mod.rule.may_drop
    assert split > 100


def test_numbers_and_tensors_go_where_they_are_read() -> None:
    choice = "where(q_idx - k_idx < near, score + far * slopes[head], -inf)"
    text = f"{choice} where near: i32, far: f32, slopes: fp32"
    slopes, ids = object(), object()
    whole = ScoreMod(Rule.parse("score", text), (7, 0.5), (slopes,))
    mask, score_mod = drops.as_mask(full(), whole)
    assert (mask.values, mask.tensors) == ((7,), ())
    assert score_mod is not None and (score_mod.values, score_mod.tensors) == ((0.5,), (slopes,))
    text = "where(ids[q_idx] == ids[k_idx], cap * score, -inf) where cap: f32, ids: i64"
    mask, score_mod = drops.as_mask(causal(), ScoreMod(Rule.parse("score", text), (2.0,), (ids,)))
    assert mask.rule.text == "(q_pos >= k_idx) & (ids[q_idx] == ids[k_idx]) where ids: i64"
    assert mask.tensors == (ids,) and score_mod is not None and score_mod.tensors == ()


def test_rules_before_the_choice_stay() -> None:
    choice = rule_of("where(q_idx >= k_idx, score, -inf)")
    mask, score_mod = drops.as_mask(full(), compose([softcap(5.0), choice]))
    assert (mask.rule.text, score_mod) == ("q_idx >= k_idx", softcap(5.0))
    whole = compose([choice, softcap(5.0)])  # -inf is bent to -5 there: no pair is dropped
    assert whole is not None and drops.as_mask(full(), whole) == (full(), whole)


def test_more_than_one_mask_may_say_stays_as_it_is() -> None:
    many = " & ".join(f"(k_idx != p{i})" for i in range(30))
    declared = ", ".join(f"p{i}: i32" for i in range(30))
    mask = Mask(Rule.parse("mask", f"{many} where {declared}"), tuple(range(30)))
    parts = " & ".join(f"(q_idx != r{i})" for i in range(5))
    text = f"where({parts}, score, -inf) where {', '.join(f'r{i}: i32' for i in range(5))}"
    whole = ScoreMod(Rule.parse("score", text), tuple(range(5)))
    assert drops.as_mask(mask, whole) == (mask, whole)


def test_rules_of_one_kernel_have_names_of_their_own() -> None:
    window = Rule.parse("mask", "(q_idx - k_idx < near) & ids[k_idx] where near: i32, ids: i1")
    score = Rule.parse("score", "score * near + near_1 + ids[k_idx] where near: f32, near_1: f32, ids: fp32")
    found = apart(window, score)
    assert found.text == "score * near_2 + near_1 + ids_1[k_idx] where near_2: f32, near_1: f32, ids_1: fp32"
    assert found.name == score.name or score.name.startswith("rule_")
    assert apart(causal().rule, score) is score
