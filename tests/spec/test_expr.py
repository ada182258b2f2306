"""Expressions: text, types, values, bounds and derivatives agree with each other."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec import interval
from flashgen.spec.expr import Apply, Const, Load, Param, Style, Symbol, parse, to_text
from flashgen.spec.interval import Interval
from flashgen.spec.rule import Rule

PARAMS = {"left": "int", "cap": "float"}
OPERANDS = {"lengths": 1, "keep": 2}
TYPES = {**PARAMS, "lengths": "int", "keep": "bool"}


def read(text: str) -> ex.Expr:
    return parse(text, params=PARAMS, operands=OPERANDS)


def _of_signature(row: ex.Operation, numbers: st.SearchStrategy, truths: st.SearchStrategy):
    """Applications of one operation to arguments of the types it takes."""
    by_type = {"number": numbers, "bool": truths}
    shared = [numbers, truths] if "any" in row.takes else [numbers]
    arguments = [st.tuples(*(by_type.get(take, each) for take in row.takes)) for each in shared]
    return st.one_of(arguments).map(lambda args: Apply(row.key, args))


def _extended(pair: tuple[st.SearchStrategy, st.SearchStrategy]):
    numbers, truths = pair
    rows = ex.OPERATIONS.values()
    truth_rows = [row for row in rows if row.gives == "bool"]
    number_rows = [row for row in rows if row.gives in ("number", "float")]
    where = ex.OPERATIONS["where"]
    more_numbers = [_of_signature(row, numbers, truths) for row in number_rows]
    more_numbers.append(st.tuples(truths, numbers, numbers).map(lambda args: Apply(where.key, args)))
    more_truths = [_of_signature(row, numbers, truths) for row in truth_rows]
    more_truths.append(st.tuples(truths, truths, truths).map(lambda args: Apply(where.key, args)))
    return st.one_of(numbers, *more_numbers), st.one_of(truths, *more_truths)


LEAVES = (
    st.one_of(
        st.sampled_from([Symbol(name) for name in ex.SYMBOLS]),
        st.sampled_from([Param("left"), Param("cap"), Load("lengths", (Symbol("batch"),))]),
        st.integers(0, 9).map(Const),
        st.sampled_from([0.0, 0.5, 2.5e-7, 3.0]).map(Const),
    ),
    st.one_of(
        st.booleans().map(Const),
        st.just(Load("keep", (Symbol("batch"), Apply("+", (Symbol("k_idx"), Const(1)))))),
    ),
)
NUMBERS, TRUTHS = _extended(_extended(_extended(LEAVES)))
EXPRESSIONS = st.one_of(NUMBERS, TRUTHS)


def environment(draw_number) -> dict:
    """Values for every name, the numbers drawn by a function of (low, high)."""
    env = {name: draw_number(0, 6) for name in ex.SYMBOLS if name not in ("q_pos", "score")}
    return env | {
        "score": draw_number(-3, 3) / 2,
        "left": draw_number(0, 5),
        "cap": draw_number(1, 6) / 4,
        "lengths": list(range(7)),
        "keep": [[(i + j) % 3 > 0 for j in range(8)] for i in range(7)],
    }


@settings(deadline=None, max_examples=300)
@given(EXPRESSIONS)
def test_text_is_read_back_to_the_same_tree(expr):
    assert read(to_text(expr)) == expr
    assert ex.result_type(expr, TYPES) in ("bool", "int", "float")


@settings(deadline=None, max_examples=300)
@given(EXPRESSIONS, st.data())
def test_simplified_expressions_have_the_same_value(expr, data):
    env = environment(lambda low, high: data.draw(st.integers(low, high)))
    try:
        value = ex.evaluate(expr, env)
        simpler = ex.evaluate(ex.simplify(expr), env)
    except ArithmeticError:
        assume(False)
    assume(math.isfinite(value))
    assert simpler == pytest.approx(value, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=300)
@given(EXPRESSIONS, st.data())
def test_bounds_hold_every_value(expr, data):
    inside = environment(lambda low, high: data.draw(st.integers(low, high)))
    around = {
        name: Interval(value - data.draw(st.integers(0, 3)), value + data.draw(st.integers(0, 3)))
        if isinstance(value, int | float)
        else value
        for name, value in inside.items()
    }
    around.pop(data.draw(st.sampled_from(sorted(around))))  # nothing is known of one of them
    try:
        value = ex.evaluate(expr, inside)
    except ArithmeticError:
        assume(False)
    found = ex.bounds(expr, around)
    assert value != value or found.lo <= value <= found.hi


@settings(deadline=None, max_examples=300)
@given(NUMBERS, st.integers(-20, 20), st.data())
def test_derivative_is_the_slope(expr, at, data):
    env = environment(lambda low, high: data.draw(st.integers(low, high)))
    slope = ex.derivative(expr)
    step = 1e-5

    def value(score: float, tree=expr) -> float:
        return ex.evaluate(tree, {**env, "score": score})

    x = at / 7 + 0.0123  # away from the kinks, which are at simple fractions
    try:
        before, after = value(x - step), value(x + step)
        closer = (value(x + 0.7 * step) - value(x - 0.7 * step)) / (1.4 * step)
        told, nearby = value(x, slope), (value(x - step, slope), value(x + step, slope))
    except ArithmeticError:
        assume(False)
    assume(all(math.isfinite(n) and abs(n) < 1e3 for n in (before, after, told, *nearby)))
    assume(max(abs(n - told) for n in nearby) < 1e-2)  # no kink or pole within the step
    assume(abs(after - before) < 0.1)
    assume(abs(closer - (after - before) / (2 * step)) < 1e-2)  # no jumps within it, as a small period has
    assert told == pytest.approx((after - before) / (2 * step), rel=2e-2, abs=2e-2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cap * tanh(score / cap)", "1 - tanh(score / cap) * tanh(score / cap)"),
        ("score + cap", "1"),
        ("3 * score - score", "2"),
        ("where(q_idx < k_idx, score * score, 4.0)", "where(q_idx < k_idx, score + score, 0)"),
        ("max(score, 0)", "where(score >= 0, 1, 0)"),
        ("exp2(score)", "exp2(score) * 0.6931471805599453"),
        ("q_idx * cap", "0"),
        ("floor(score)", "0"),
    ],
)
def test_derivatives_are_simple(text, expected):
    assert to_text(ex.derivative(read(text))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score + t[head]", "1"),
        ("score * t[head] + t[head] * t[head]", "score + (t[head] + t[head])"),
        ("score - t[head] * abs(q_pos - k_idx)", "-abs(q_pos - k_idx)"),
        ("where(q_idx < k_idx, t[head], score)", "where(q_idx < k_idx, 1, 0)"),
        ("score + t[k_idx]", "0"),
        ("floor(t[head])", "0"),
        ("t[t[head]]", "0"),  # an index has no slope
    ],
)
def test_a_derivative_by_what_is_read(text, expected):
    expr = parse(text, operands={"t": 1})
    assert to_text(ex.derivative(expr, Load("t", (Symbol("head"),)))) == expected


@settings(deadline=None, max_examples=100)
@given(NUMBERS)
def test_a_read_in_the_place_of_the_score_has_its_derivative(expr):
    read = Load("t", (Symbol("head"),))
    swapped = ex.substitute(expr, {ex.SCORE: read})
    assert ex.derivative(swapped, read) == ex.substitute(ex.derivative(expr), {ex.SCORE: read})


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("(((q_pos)>=k_idx))", "q_pos >= k_idx"),
        ("((q_pos-k_idx)<=left)&(k_idx<=(q_pos))", "(q_pos - k_idx <= left) & (k_idx <= q_pos)"),
        ("q_idx-(k_idx-3)", "q_idx - (k_idx - 3)"),
        ("(q_idx*2)//3%4", "q_idx * 2 // 3 % 4"),
        ("q_idx*(2//3)", "q_idx * (2 // 3)"),
        ("-(q_idx+1)*-2", "-(q_idx + 1) * -2"),
        ("~(q_idx<3)|~keep[batch,k_idx]", "~(q_idx < 3) | ~keep[batch, k_idx]"),
        ("(q_idx<3)==(k_idx<3)", "(q_idx < 3) == (k_idx < 3)"),
        ("max(1,2,q_idx)", "max(max(1, 2), q_idx)"),
        ("((q_idx<1)|(k_idx<1))&(q_idx<2)", "((q_idx < 1) | (k_idx < 1)) & (q_idx < 2)"),
    ],
)
def test_canonical_text(text, canonical):
    assert to_text(read(text)) == canonical


def test_literals_of_different_types_differ():
    assert len({Const(1), Const(1.0), Const(True)}) == 3
    assert to_text(ex.number(-2)) == "-2" and ex.constant(ex.number(-2.5)) == -2.5
    assert ex.number(-0.0) == Const(0.0)
    for value in (-1, math.nan, -math.inf, 2**63):
        with pytest.raises(InvalidArgument):
            Const(value)


def test_infinity_is_a_literal():
    text = "where(q_idx >= k_idx, score, -inf)"
    expr = parse(text)
    assert to_text(expr) == text and expr.args[2] == ex.number(-math.inf)
    assert ex.simplify(expr) == expr and ex.constant(expr.args[2]) == -math.inf
    assert ex.evaluate(expr, {"q_idx": 1, "k_idx": 2, "score": 3.0}) == -math.inf
    assert to_text(ex.derivative(expr)) == "where(q_idx >= k_idx, 1, 0)"
    # As an end of a range, infinity is no limit: nothing is known where the number itself is compared.
    assert ex.bounds(parse("q_idx * 0.5 < inf"), {"q_idx": Interval(0, 9)}) == interval.UNKNOWN
    with pytest.raises(InvalidArgument, match="cannot be declared"):
        Rule.parse("mask", "k_idx < inf[batch] where inf: i32")


@pytest.mark.parametrize(
    ("text", "piece", "hint"),
    [
        ("q_idx.real > 0", "q_idx.real", "allowed"),
        ("a < 3", "'a'", "known: q_idx, k_idx"),
        ("print(3) < 3", "print(3)", "known: min, max"),
        ("0 < q_idx < 3", "0 < q_idx < 3", "(a <= b) & (b < c)"),
        ("q_idx > 0 and k_idx > 0", "and", "&, |, ~"),
        ("not q_idx > 0", "not q_idx > 0", "&, |, ~"),
        ("q_idx if 1 else 2", "if", "where(condition, x, y)"),
        ("'text' == 'text'", "'text'", "allowed"),
        ("(lambda: 3)() < 3", "lambda: 3", "allowed"),
        ("[i for i in keep]", "for", "allowed"),
        ("q_idx ** 2 > 0", "q_idx ** 2", "allowed"),
        ("lengths < 3", "lengths", "lengths[batch]"),
        ("lengths[batch, head] < 3", "lengths[batch, head]", "1 dimensions"),
        ("q_idx[batch] < 3", "q_idx[batch]", "operands: lengths, keep"),
        ("tanh < 3", "tanh", "parentheses"),
        ("tanh(1, 2) < 3", "tanh(1, 2)", "takes 1 arguments, not 2"),
        ("max(a=3) < 3", "max(a=3)", "named"),
        ("max(*keep) < 3", "*keep", "allowed"),
        ("1e999 < 3", "1e999", "too large"),
        ("99999999999999999999 < 3", "99999999999999999999", "too large"),
        ("q_idx < ", "q_idx < ", "not an expression"),
        ("", "''", "not an expression"),
        ("q_idx; k_idx", "q_idx; k_idx", "not an expression"),
        ("q_idx\x00", "x00", "not an expression"),
        ("q\u0131dx < 3", "dx", "ASCII"),
        (" " * 30_000 + "1", "characters", "at most"),
    ],
)
def test_refusals_name_the_piece_and_the_way_out(text, piece, hint):
    with pytest.raises(InvalidArgument) as refusal:
        read(text)
    assert piece in str(refusal.value) and hint in str(refusal.value)
    assert len(str(refusal.value)) < 1000


def test_an_operand_is_not_read_without_an_index():
    with pytest.raises(InvalidArgument, match=r"'table\[\(\)\]' .*by index, as in table\[batch\]"):
        parse("table[()] > 1", operands={"table": None})


@pytest.mark.parametrize(
    "text",
    [
        "-" * 90 + "1",
        *("1" + "+1" * n for n in range(300, 1001, 20)),
        "1" + "+1" * 3000,
        "-" * 9000 + "1",
        "(" * 3000 + "1",
    ],
)
def test_deep_nesting_is_refused_whoever_notices_it(text):
    with pytest.raises(InvalidArgument) as refusal:
        read(text)
    assert len(str(refusal.value)) < 1000


def test_symbols_can_be_restricted():
    with pytest.raises(InvalidArgument, match="score rules only"):
        parse("score < 3", symbols={"q_idx"})


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("q_idx + 1", "int"),
        ("q_idx + 1.0", "float"),
        ("q_idx / 2", "float"),
        ("q_idx // 2", "int"),
        ("min(left, cap)", "float"),
        ("where(keep[batch, 0], 1, score)", "float"),
        ("where(keep[batch, 0], q_idx < 2, True)", "bool"),
        ("(q_idx < 2) == keep[batch, 0]", "bool"),
    ],
)
def test_types(text, type_):
    assert ex.result_type(read(text), TYPES) == type_


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("keep[batch, 0] + 1", "keep[batch, 0]"),
        ("(q_idx < 2) & k_idx", "k_idx"),
        ("~q_idx", "q_idx"),
        ("where(q_idx, 1, 2)", "q_idx"),
        ("where(True, 1, False)", "bool with a number"),
        ("lengths[score]", "score"),
        ("(q_idx < 2) < 3", "q_idx < 2"),
    ],
)
def test_type_errors_name_the_piece(text, piece):
    with pytest.raises(InvalidArgument) as refusal:
        ex.result_type(read(text), TYPES)
    assert piece in str(refusal.value)


def test_a_style_spells_names_calls_loads_and_literals():
    style = Style(
        names={"q_idx": "rows", "left": "left_size"},
        calls={"max": "tl.maximum", "//": "floor_div", "~": "invert"},
        load=lambda load, indices: f"tl.load({load.operand}_ptr + {indices[0]})",
        literal=lambda value: f"{value}f" if isinstance(value, float) else str(value),
    )
    text = to_text(read("~(max(q_idx - left, 0) // 2 + lengths[batch + 1] < 1.5)"), style)
    quotient = "floor_div(tl.maximum(rows - left_size, 0), 2)"
    assert text == f"invert({quotient} + tl.load(lengths_ptr + batch + 1) < 1.5f)"


def test_queries():
    expr = read("(q_pos - k_idx <= left) & (k_idx < lengths[batch]) & (k_idx < lengths[batch] + left)")
    assert ex.free_symbols(expr) == {"q_pos", "k_idx", "batch"}
    assert ex.params(expr) == ("left",)
    assert ex.loads(expr) == (Load("lengths", (Symbol("batch"),)),)
    renamed = ex.rename(expr, {"left": "left_1", "lengths": "sizes"})
    assert ex.params(renamed) == ("left_1",) and ex.loads(renamed)[0].operand == "sizes"
    assert to_text(ex.substitute(read("k_idx + 1"), {Symbol("k_idx"): read("k_idx * 2")})) == "k_idx * 2 + 1"


def test_q_pos_follows_from_the_lengths():
    env = {"q_idx": 2, "q_len": 3, "k_len": 10}
    assert ex.evaluate(Symbol("q_pos"), env) == 9
    assert ex.bounds(Symbol("q_pos"), {**env, "q_idx": Interval(0, 2)}) == (7, 9)


def test_three_valued_logic():
    values = (interval.FALSE, interval.UNKNOWN, interval.TRUE)
    for a in values:
        for b in values:
            # Which booleans are possible decides, by trying all of them.
            for operation, python in ((interval.logical_and, min), (interval.logical_or, max)):
                possible = {python(x, y) for x in {*a} for y in {*b}}
                assert {*operation(a, b)} == possible
        assert {*interval.logical_not(a)} == {1 - x for x in a}


def test_nothing_is_certain_of_what_may_be_nan():
    assert ex.bounds(read("log(score) <= 9.0"), {"score": Interval(-1, 1)}) == interval.UNKNOWN
    assert ex.bounds(read("q_idx / k_idx == 1"), {"q_idx": 1, "k_idx": Interval(0, 1)}) == interval.UNKNOWN
    assert ex.bounds(read("cap <= score"), {"score": 1}) == interval.UNKNOWN
