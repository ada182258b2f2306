"""Score rules: text, order of application, checks."""

import itertools
import math

import pytest
import torch

from flashgen.build.reference import evaluate_rule
from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec.rule import Rule, operand_dtype
from flashgen.spec.score_mods import (
    SCORE_MODS,
    ScoreMod,
    alibi,
    alibi_slopes,
    bias,
    compose,
    parse_score_mod,
    relative,
    scale,
    softcap,
)

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


@pytest.mark.parametrize("cap", [0, -1.0, math.inf, math.nan, 1e-50, 1e39, 1e-30, 1e30, True, None, "30"])
def test_softcap_needs_a_positive_finite_cap(cap):
    with pytest.raises(InvalidArgument, match="cap="):
        softcap(cap)


def test_a_cap_below_float32_is_told_the_range_it_is_outside_of():
    with pytest.raises(InvalidArgument, match=r"cap=1e-300 must be .* 1\.26e-29 to 7\.92e\+28, .*float32"):
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


def value(mod, **env):
    """What a rule makes of scores, in float64."""
    return evaluate_rule(mod, {"score": torch.tensor([2.0], dtype=torch.float64), **env})


def test_alibi_takes_slope_times_distance_off():
    slopes = torch.tensor([0.5, 0.25])
    for q_pos, k_idx, head, expected in ((9, 5, 0, 0.0), (5, 9, 1, 1.0), (7, 7, 1, 2.0)):
        where = {"q_idx": q_pos, "k_idx": k_idx, "q_len": 10, "k_len": 10, "head": torch.tensor(head)}
        assert value(alibi(slopes), **where) == expected


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 20, 32])
def test_slopes_of_alibi(heads):
    slopes = alibi_slopes(heads)
    power = 2 ** int(math.log2(heads))
    assert len(slopes) == heads == len(set(slopes)) and slopes[power - 1] == 2**-8
    ratios = {round(b / a, 12) for a, b in itertools.pairwise(slopes[:power])}
    assert power == 1 or ratios == {round(slopes[0], 12)}, "a series that starts with its own ratio"
    assert set(slopes[power:]) <= set(alibi_slopes(2 * power)) - set(slopes[:power])
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(InvalidArgument, match="heads="):
            alibi_slopes(wrong)


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 1, 5), (1, 1, 4, 1), (1, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_bias_broadcasts_over_axes_of_one_element(shape, dtype):
    table = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    axes = {"batch": 2, "head": 3, "q_idx": 4, "k_idx": 5}
    grid = dict(zip(axes, torch.meshgrid(*map(torch.arange, axes.values()), indexing="ij"), strict=True))
    found = value(bias(table), **grid) + torch.zeros(2, 3, 4, 5)
    assert torch.equal(found, 2.0 + table.double().expand(2, 3, 4, 5))
    letters = "".join(letter for letter, extent in zip("bhqk", shape, strict=True) if extent > 1)
    assert bias(table).rule == bias(letters, operand_dtype(table)).rule


def test_a_table_of_distances_ends_where_it_is_read_no_further():
    table = torch.arange(14.0).reshape(2, 7)
    for q_pos, k_idx, entry in ((9, 9, 3), (9, 8, 2), (9, 11, 5), (9, 0, 0), (2, 9, 6)):
        where = {"q_idx": q_pos, "k_idx": k_idx, "q_len": 12, "k_len": 12, "head": torch.tensor(1)}
        assert value(relative(table), **where) == 2.0 + 7 + entry
    assert relative(table).values == (3,) and relative(table, 3) == relative(table)
    assert relative(12) == parse_score_mod("relative(12)") == parse_score_mod("relative(fp32, 12)")
    assert relative(12) == relative("fp32", 12)
    with pytest.raises(InvalidArgument, match="distance=4 is not that of a table of 7 entries, 3"):
        relative(table, 4)


def test_operands_of_another_kind_are_refused():
    four, two, one = torch.ones(1, 1, 2, 2), torch.ones(2, 3), torch.ones(2)
    for make, wrongs in (
        (alibi, (two, one.half(), one.double(), one.int(), [0.5], None)),
        (bias, (two, four.double(), four.int(), four.bool(), None)),
        (relative, (one, torch.ones(2, 4), two.double(), two.int(), None)),
    ):
        for wrong in wrongs:
            with pytest.raises(InvalidArgument, match=f"^{make.__name__} takes a float32.* not "):
                make(wrong)
    for wrong in (math.inf, math.nan, True, None, 1e39):
        with pytest.raises(InvalidArgument, match="factor="):
            scale(wrong)


def test_order_of_bias_and_cap():
    capped, biased = softcap(30.0), bias("k")
    assert compose([capped, biased]).rule.text == (
        "cap * tanh(score / cap) + bias[0, 0, 0, k_idx] where cap: f32, bias: fp32"
    )
    assert compose([biased, capped]).rule.text == (
        "cap * tanh((score + bias[0, 0, 0, k_idx]) / cap) where cap: f32, bias: fp32"
    )
    assert parse_score_mod("scale(2.0), scale(3.0)").rule.text == (
        "score * factor * factor_1 where factor: f32, factor_1: f32"
    )


def test_nothing_to_compose():
    assert compose([]) is None
    assert compose([DOUBLE]) is DOUBLE


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("softcup(3)", "known: " + ", ".join(sorted(SCORE_MODS))),
        ("alibi('fp16')", "slopes='fp16' must be 'fp32', or a tensor"),
        ("bias('kq')", "tensor='kq' must be some of the letters bhqk in this order"),
        ("bias('bhqk', 'fp64')", "dtype='fp64' must be 'fp32', 'fp16', 'bf16', or a tensor"),
        ("relative", "has no distance; it must be a whole number below 2**30, the largest distance that has"),
        ("relative", 'write relative(128) or relative("fp32", 128)'),
        ("relative('bf16')", 'write relative(128) or relative("bf16", 128)'),
        ("relative('fp32', -1)", "bound later has distance=-1; it must be a whole number"),
        ("relative(-1)", "bound later has distance=-1; it must be a whole number"),
        ("relative(True)", "relative takes a float32"),
        ("softcap", "softcap(cap), such as softcap(30.0)"),
        ("relative('i32', 4)", "table='i32' must be 'fp32', 'fp16', 'bf16', or a tensor"),
        ("scale('big')", "factor='big' must be a finite number"),
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
