"""Score rules as a GPU computes them: the same values, from cheaper operations."""

from __future__ import annotations

import pytest

from flashgen.codegen import arithmetic
from flashgen.codegen.families import find_family
from flashgen.spec import expr as ex
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import ScoreMod

FAMILY = find_family("attention_fwd")


def fast(text: str, unit: str = "natural") -> tuple[str, dict[str, str]]:
    """The text of a rule's expression afterwards, and of each factor by its name."""
    rule, factors = Rule.parse("score", text), arithmetic.Factors()
    expr = getattr(factors, unit)(arithmetic.floats_early(rule.expr, rule.types))
    return ex.to_text(expr), {name.name: ex.to_text(each) for each, name in factors.names.items()}


def test_what_a_tile_shares_is_divided_by_once() -> None:
    assert fast("cap * tanh(score / cap) where cap: f32") == (
        "cap * tanh(score * score__factor_0)",
        {"score__factor_0": "1.0 / cap"},
    )
    assert fast("score / (2 * a) + score / b where a: f32, b: f32") == (
        "score * score__factor_0 + score * score__factor_1",
        {"score__factor_0": "1.0 / (2 * a)", "score__factor_1": "1.0 / b"},
    )
    for as_it_is in ("a / score where a: f32", "score * (a / b) where a: f32, b: f32", "score / (1 + k_idx)"):
        assert fast(as_it_is)[1] == {}


@pytest.mark.parametrize(
    ("text", "expected", "factors"),
    [
        ("score + sinks[head] where sinks: fp32",
         "score * score__factor_0 + score__factor_1", ["scale * LOG2E", "sinks[head] * LOG2E"]),
        ("cap * tanh(score / cap) where cap: f32",
         "tanh(score * score__factor_0) * score__factor_1", ["scale * (1.0 / cap)", "LOG2E * cap"]),
        ("score - a * abs(q_pos - k_idx) where a: f32",
         "score * score__factor_0 - abs(q_pos__float - k_idx__float) * score__factor_1",
         ["scale * LOG2E", "LOG2E * a"]),
        # The difference is taken before it is multiplied: of products near in size little would be left.
        ("score + a * (q_pos - k_idx) where a: f32",
         "score * score__factor_0 + (q_pos__float - k_idx__float) * score__factor_1",
         ["scale * LOG2E", "LOG2E * a"]),
        ("where(k_idx < 4, 2 * score / 3, -1.5)",
         "where(k_idx < 4, score * score__factor_0, -(1.5 * LOG2E))", ["scale * (LOG2E / 3 * 2)"]),
    ],
)  # fmt: skip
def test_a_rule_takes_dot_products_and_gives_log2_units(text: str, expected: str, factors: list[str]) -> None:
    assert fast(text, "log2") == (expected, {f"score__factor_{i}": each for i, each in enumerate(factors)})


@pytest.mark.parametrize(
    ("text", "expected", "bent", "unit"),
    [
        ("cap * tanh(score / cap) where cap: f32", "score__tanh_0", ["score * score__factor_1"],
         "score__factor_0"),
        ("tanh(score)", "score__tanh_0 * LOG2E", ["score * score__factor_0"], None),
        ("1 - b * tanh(score) where b: f32", "1 * LOG2E - score__tanh_0 * score__factor_1",
         ["score * score__factor_0"], None),
        ("b * tanh(tanh(score) / 2) where b: f32", "score__tanh_1",
         ["score * score__factor_1", "score__tanh_0 * score__factor_2"], "score__factor_0"),
        # Not of scores: evaluated once a row or a key, by itself.
        ("score + tanh(q_idx)", "score * score__factor_0 + tanh(q_idx) * LOG2E", [], None),
    ],
)  # fmt: skip
def test_a_tanh_of_scores_is_one_function_of_a_thread(
    text: str, expected: str, bent: list[str], unit: str | None
) -> None:
    rule, factors = Rule.parse("score", text), arithmetic.Factors(bends=True)
    expr, found = factors.log2_folded(arithmetic.floats_early(rule.expr, rule.types))
    assert (ex.to_text(expr), found and ex.to_text(found)) == (expected, unit)
    assert list(map(ex.to_text, factors.bent.values())) == bent
    assert list(factors.bent) == [f"score__tanh_{i}" for i in range(len(bent))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score - 0.5 * abs(q_pos - k_idx)", "score - 0.5 * abs(q_pos__float - k_idx__float)"),
        ("score + min(k_idx - q_pos, 7)", "score + min(k_idx__float - q_pos__float, 7)"),
        ("score + (q_pos - k_idx) / 8", "score + (q_pos__float - k_idx__float) * score__factor_0"),
        ("score + (q_pos + k_idx)", "score + (q_pos + k_idx)"),  # may be twice as large as a position
        ("score + (q_pos - 3 * k_idx)", "score + (q_pos - 3 * k_idx)"),
        ("where(q_pos - k_idx > 3, score, 0.0)", "where(q_pos - k_idx > 3, score, 0.0)"),
        ("score + (q_pos - k_idx) // 2", "score + (q_pos - k_idx) // 2"),
    ],
)
def test_distances_that_become_floats_are_taken_between_floats(text: str, expected: str) -> None:
    assert (
        fast(text)[0] == ex.to_text(ex.parse(expected)) if "__" not in expected else fast(text)[0] == expected
    )


@pytest.mark.parametrize(
    ("text", "mask", "expected"),
    [
        ("score - 0.5 * abs(q_pos - k_idx)", "q_pos >= k_idx",
         ("score * score__factor_0 + score__keys", "k_idx__here * score__factor_1",
          "q_pos__here * score__factor_1")),
        ("score - 0.5 * abs(q_pos - k_idx)", "q_pos <= k_idx",
         ("score * score__factor_0 + score__keys", "k_idx__here * -score__factor_1",
          "q_pos__here * -score__factor_1")),
        ("(k_idx - q_idx) / 8 + tanh(score)", "True",
         ("tanh(score * scale) * LOG2E + score__keys", "k_idx__here * score__factor_0",
          "q_idx__here * score__factor_0")),
        ("score - (-a * abs(k_idx - q_pos) - (q_idx - k_idx)) where a: f32", "q_pos > k_idx",
         ("score * score__factor_0 + score__keys",
          "k_idx__here * score__factor_1 + k_idx__here * -LOG2E",
          "q_pos__here * score__factor_1 + q_idx__here * -LOG2E")),
        # A distance's size where keys lie on both sides, or where nothing is known of another row's symbol.
        ("score - 0.5 * abs(q_pos - k_idx)", "True", None),
        ("score - 0.5 * abs(q_pos - k_idx)", "q_idx >= k_idx", None),
        ("score - 0.5 * abs(q_pos - k_idx)", "(k_idx < 4) | (q_pos >= k_idx)", None),
        # What is no term of its own, no plain distance, or has a factor that is not the tile's.
        ("tanh(score - 0.5 * abs(q_pos - k_idx))", "q_pos >= k_idx", None),
        ("score - 0.5 * min(q_pos - k_idx, 9)", "q_pos >= k_idx", None),
        ("score - (q_pos - k_idx) * slopes[q_idx] where slopes: fp32", "q_pos >= k_idx", None),
        ("score * (q_pos - k_idx)", "q_pos >= k_idx", None),
        ("score + (q_pos - q_idx)", "q_pos >= k_idx", None),
        ("where(k_idx > 4, score - 0.5 * (q_pos - k_idx), -inf)", "True", None),
    ],
)  # fmt: skip
def test_distances_are_taken_apart_where_they_are_terms(
    text: str, mask: str, expected: tuple[str, ...] | None
) -> None:
    rule, factors = Rule.parse("score", text), arithmetic.Factors()
    found = arithmetic.taken_apart(
        factors.log2(arithmetic.floats_early(rule.expr, rule.types)), Rule.parse("mask", mask)
    )
    told = found and tuple(map(ex.to_text, (found.rest, found.keys, found.rows)))
    assert told == expected


def test_calls_too_long_for_float_distances_have_no_kernel() -> None:
    def told(mod: ScoreMod | None, length: int) -> str:
        spec = AttentionSpec(64, 64, "bf16", masks.causal().rule, mod.rule if mod else None)
        return FAMILY.outgrows(Workload(spec, 1, 1, 1, 1, length))

    alibi, most = score_mods.alibi(), arithmetic.MOST_FLOAT
    assert told(alibi, most) == told(None, most + 1) == told(score_mods.softcap(50.0), most + 1) == ""
    assert told(alibi, most + 1).startswith("takes distances between 16777217 positions in float32")
