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


def rule(text: str) -> Rule:
    return Rule.parse("score", text)


def fast(text: str) -> tuple[str, dict[str, str]]:
    """The text of a rule's expression afterwards, and of each divisor by the name of its inverse."""
    given = rule(text)
    inverses = arithmetic.Reciprocals.of(given.expr)
    expr = inverses.used(arithmetic.floats_early(given.expr, given.types))
    return ex.to_text(expr), {name.name: ex.to_text(each) for each, name in inverses.names.items()}


def test_what_a_tile_shares_is_divided_by_once() -> None:
    assert fast("cap * tanh(score / cap) where cap: f32") == (
        "cap * tanh(score * score__inverse)",
        {"score__inverse": "cap"},
    )
    assert fast("score / (2 * a) + score / b where a: f32, b: f32") == (
        "score * score__inverse_0 + score * score__inverse_1",
        {"score__inverse_0": "2 * a", "score__inverse_1": "b"},
    )
    for as_it_is in ("a / score where a: f32", "score * (a / b) where a: f32, b: f32", "score / (1 + k_idx)"):
        assert fast(as_it_is)[1] == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score - 0.5 * abs(q_pos - k_idx)", "score - 0.5 * abs(q_pos__float - k_idx__float)"),
        ("score + min(k_idx - q_pos, 7)", "score + min(k_idx__float - q_pos__float, 7)"),
        ("score + (q_pos - k_idx) / 8", "score + (q_pos__float - k_idx__float) * score__inverse"),
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


def test_calls_too_long_for_float_distances_have_no_kernel() -> None:
    def told(mod: ScoreMod | None, length: int) -> str:
        spec = AttentionSpec(64, 64, "bf16", masks.causal().rule, mod.rule if mod else None)
        return FAMILY.outgrows(Workload(spec, 1, 1, 1, 1, length))

    alibi, most = score_mods.alibi(), arithmetic.MOST_FLOAT
    assert told(alibi, most) == told(None, most + 1) == told(score_mods.softcap(50.0), most + 1) == ""
    assert told(alibi, most + 1).startswith("takes distances between 16777217 positions in float32")
