"""What reads of a score rule's tensors have of their gradients, and where it is summed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.expr import evaluate, parse, to_text
from flashgen.spec.learned import Share, shares
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import alibi, bias, compose, relative, softcap


def only(text: str) -> Share:
    (share,) = shares(Rule.parse("score", f"score + {text}"), ("t",))
    return share


@pytest.mark.parametrize(
    ("index", "side"),
    [
        ("0", "q"),
        ("head", "q"),
        ("batch + kv_head", "q"),
        ("q_idx", "q"),
        ("max(q_pos, 0) // 2", "q"),
        ("k_idx % 3", "k"),
        ("ids[k_idx]", "k"),
        ("q_pos - k_idx + 7", "diagonal"),
        ("abs(k_idx - q_idx)", "diagonal"),
        ("min(max(k_idx - q_pos, -n), n) + n", "diagonal"),
        ("7 + k_idx - (q_idx + 2)", "diagonal"),
        ("(2 * q_idx - k_idx * 2 + n) // 4", "diagonal"),
        ("ids[q_len + k_idx - q_pos]", "diagonal"),
        ("q_idx + k_idx", "pair"),
        ("2 * q_idx - k_idx", "pair"),
        ("n * q_idx - n * k_idx", "pair"),  # nothing is known of a product with what is no number
        ("q_idx // 2 - k_idx // 2", "pair"),
        ("ids[k_idx] - q_idx", "pair"),
    ],
)
def test_where_a_read_is_summed(index: str, side: str) -> None:
    declared = [f"{name}: i32" for name in ("n", "ids") if re.search(rf"\b{name}\b", index)]
    found = only(f"t[{index}] where {', '.join([*declared, 't: fp32'])}")
    names = {"q": "t__rows", "k": "t__keys", "diagonal": "t__diagonals", "pair": "t"}
    assert (found.side, found.name) == (side, names[side])
    assert found.any_order(1, 1) == (side in ("diagonal", "pair"))


INDICES = st.recursive(
    st.sampled_from(["q_idx", "q_pos", "k_idx", "head", "n", "2", "3"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
        inner.map(lambda each: f"abs({each})"),
        inner.map(lambda each: f"({each}) // 2"),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(INDICES, st.integers(1, 5))
def test_what_follows_the_distance_stays_where_row_and_key_go_on(index: str, step: int) -> None:
    """And whatever is found to stay, of sums of multiples, is found to follow it."""
    expr = parse(index, params=("n",))
    found = only_side(index)
    places = [(q, k) for q in range(0, 24, 5) for k in range(0, 24, 7)]

    def at(q: int, k: int) -> int:
        return evaluate(expr, {"q_idx": q, "k_idx": k, "q_len": 40, "k_len": 47, "head": 2, "n": 3})

    stays = all(at(q, k) == at(q + step, k + step) for q, k in places)
    assert stays or found != "diagonal"
    plain = not any(word in index for word in ("min", "max", "abs", "//", "*"))
    varies = len({at(q, k) for q, k in places}) > 1
    assert not (plain and stays and varies) or found == "diagonal"


def only_side(index: str) -> str:
    return only(f"t[{index}] where {'n: i32, ' if 'n' in index.replace('min', '') else ''}t: fp32").side


@pytest.mark.parametrize(
    ("read", "shared_by"),
    [
        ("t[batch, head, q_idx, k_idx]", ()),
        ("t[k_idx, q_pos, batch, head]", ()),
        ("t[0, head, q_idx, k_idx]", ("batch",)),
        ("t[batch, kv_head, q_idx, k_idx]", ("head",)),
        ("t[0, 0, q_idx, k_idx]", ("batch", "head")),
        ("t[batch, head, q_idx // 2, k_idx]", ("pair",)),
        ("t[batch, head, q_idx, ids[k_idx]]", ("pair",)),
    ],
)
def test_which_pairs_read_one_element(read: str, shared_by: tuple[str, ...]) -> None:
    found = only(f"{read} where t: fp32" + (", ids: i32" if "ids" in read else ""))
    assert found.side == "pair" and found.shared_by == shared_by
    assert found.any_order(2, 2) == bool(shared_by)
    assert found.any_order(1, 2) == bool({"head", "pair"} & set(shared_by))
    assert found.any_order(2, 1) == bool({"batch", "pair"} & set(shared_by))
    assert found.any_order(1, 1) == ("pair" in shared_by)


def test_reads_of_one_tensor() -> None:
    text = "score + t[batch, head, q_idx, k_idx] * t[batch, head, k_idx, q_idx] where t: fp32"
    first, second = shares(Rule.parse("score", text), ("t",))
    assert first.name == second.name == "t" and first.shared_by == second.shared_by == ("pair",)
    rule = Rule.parse("score", "score * w[k_idx] + w[q_idx] + w[k_idx + 1] where w: fp16")
    found = shares(rule, ("w",))
    assert [(each.name, to_text(each.slope)) for each in found] == [
        ("w__keys_0", "score"),
        ("w__rows", "1"),
        ("w__keys_1", "1"),
    ]


def test_what_is_not_learned_has_no_share() -> None:
    rule = compose([softcap(20.0), alibi(), relative("fp32", 9), bias("hqk")]).rule
    slopes, table = shares(rule, ("table", "slopes"))
    assert (slopes.name, table.name) == ("slopes__rows", "table__diagonals")
    assert shares(rule, ()) == shares(None, ()) == ()
    stepped = Rule.parse("score", "score + floor(t[head]) + u[i[head]] where t: fp32, u: fp32, i: i32")
    assert [each.operand for each in shares(stepped, ("t", "u", "i"))] == ["u"]


def test_a_spec_says_what_is_learned() -> None:
    forward = AttentionSpec(64, 64, "bf16", score_mod=alibi().rule, return_lse=True)
    spec = forward.backward(lse=True, learned=("slopes",))
    assert AttentionSpec.from_json(spec.to_json()) == spec != forward.backward(lse=True)
    assert "learned" not in forward.backward().to_json()
    assert spec.key == forward.backward().key and spec.tuned_as() == forward.backward().tuned_as()
    for wrong in (replace(spec, learned=()), AttentionSpec(64, 64, "bf16", op="bwd")):
        with pytest.raises(InvalidArgument, match=r"learned='nothing' of op='bwd' has no gradient"):
            replace(wrong, learned=("nothing",))
    with pytest.raises(InvalidArgument, match=r"the floats that the score rule reads \(slopes\)"):
        replace(forward, learned=("slopes",))
