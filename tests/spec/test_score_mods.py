"""Score rules: text, order of application, checks."""

import math

import pytest

from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod, compose, parse_score_mod, softcap

DOUBLE = ScoreMod(Rule.parse("score", "2 * score", name="double"))
SHIFT = ScoreMod(Rule.parse("score", "score + cap where cap: f32", name="shift"), (3.0,))


@pytest.mark.parametrize("name", SCORE_MODS)
def test_entries_are_read_back(name):
    for mod in SCORE_MODS[name].examples():
        assert parse_score_mod(mod.describe()) == mod
        assert Rule.parse("score", mod.rule.text) == mod.rule


def test_softcap():
    mod = softcap(30)
    assert mod.rule.text == "cap * tanh(score / cap) where cap: f32"
    assert mod.values == (30.0,) and isinstance(mod.values[0], float)
    assert softcap(30.0) == mod != softcap(31.0)
    value = ex.evaluate(mod.rule.expr, {"score": 12.0, "cap": 30.0})
    assert value == pytest.approx(30 * math.tanh(12 / 30))


@pytest.mark.parametrize("cap", [0, -1.0, math.inf, math.nan, 1e-50, 1e39, True, None, "30"])
def test_softcap_needs_a_positive_finite_cap(cap):
    with pytest.raises(InvalidArgument, match="cap="):
        softcap(cap)


def test_a_cap_below_float32_is_told_the_range_it_is_outside_of():
    with pytest.raises(InvalidArgument, match=r"cap=1e-300 must be .* 1\.18e-38 to 3\.4e\+38, .*float32"):
        softcap(1e-300)


def test_rules_apply_in_the_order_given():
    shifted_then_doubled, doubled_then_shifted = compose([SHIFT, DOUBLE]), compose([DOUBLE, SHIFT])
    assert shifted_then_doubled.rule.text == "2 * (score + cap) where cap: f32"
    assert doubled_then_shifted.rule.text == "2 * score + cap where cap: f32"
    assert shifted_then_doubled.rule.name == "shift_then_double"


def test_clashing_parameters_are_renamed():
    mod = parse_score_mod("softcap(50.0), softcap(30.0)")
    text = "cap_1 * tanh(cap * tanh(score / cap) / cap_1) where cap: f32, cap_1: f32"
    assert mod.rule.text == text and mod.values == (50.0, 30.0)
    assert mod.describe() == "softcap(50.0), softcap(30.0)"


def test_a_rule_that_ignores_the_score_drops_what_came_before():
    constant = ScoreMod(Rule.parse("score", "0.0", name="flat"))
    assert compose([SHIFT, constant]) == constant


def test_nothing_to_compose():
    assert compose([]) is None
    assert compose([DOUBLE]) is DOUBLE


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("softcup(3)", "known: softcap"),
        ("softcap()", "softcap(cap)"),
        ("()", "softcap(30.0)"),
        ("3", "softcap(30.0)"),
        ("softcap(3), " * 400, "4800 characters; at most 4096"),
        ("softcap" + ".x" * 1500, "nested too deeply"),
    ],
)
def test_refused_text_says_what_is_allowed(text, hint):
    with pytest.raises(InvalidArgument) as refusal:
        parse_score_mod(text)
    assert hint in str(refusal.value)


@pytest.mark.parametrize("odd", [None, "softcap", [], softcap, 1.0], ids=lambda each: type(each).__name__)
def test_only_score_rules_compose(odd):
    for compose_it in (lambda: DOUBLE.then(odd), lambda: compose([odd]), lambda: compose([DOUBLE, odd])):
        with pytest.raises(InvalidArgument, match="must be a ScoreMod from"):
            compose_it()
