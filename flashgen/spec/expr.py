"""Expressions over queries, keys and scores: what masks and score rules are made of.

An expression is parsed once, from text in which only known names pass, and then has several readers: the
kernel (`to_text` with a `Style`), the torch reference (`evaluate` on tensors), the tile classifier (`bounds`)
and the derivative. Everything they need to know about an operator or function is one row of `OPERATIONS`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from types import MappingProxyType
from typing import Any, TypeAlias

from flashgen.errors import InvalidArgument
from flashgen.spec import interval
from flashgen.spec.interval import Interval

Number: TypeAlias = int | float

MAX_TEXT = 20_000
"""Longest text `parse` reads, in characters."""
MAX_DEPTH = 80
"""Deepest tree allowed: text nested deeper cannot be parsed back by Python."""
TOO_DEEP = f"a rule nested deeper than {MAX_DEPTH} levels; combine fewer rules"
MAX_INT = 2**63 - 1


# The tree


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A literal, not negative (a negative number is `neg` of one) and not NaN; 1, 1.0 and True differ."""

    value: int | float | bool

    def __post_init__(self) -> None:
        value = self.value
        exact = not isinstance(value, float)
        if value > MAX_INT if exact else math.isnan(value) or math.copysign(1, value) < 0:
            raise InvalidArgument(
                f"Const({value!r}) must not be NaN, and an integer at most 2**63 - 1; negate with neg"
            )
        if value < 0:
            raise InvalidArgument(f"Const({value!r}) must not be negative; write number({value!r})")

    def __eq__(self, other: object) -> bool:
        return type(other) is Const and type(other.value) is type(self.value) and other.value == self.value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@dataclass(frozen=True, slots=True)
class Symbol:
    """A position, size or index that every kernel knows: a row of `SYMBOLS` or `TILE_SYMBOLS`."""

    name: str


@dataclass(frozen=True, slots=True)
class Param:
    """A number given at each call, such as a window."""

    name: str


@dataclass(frozen=True, slots=True)
class Load:
    """One element of an operand tensor: `key_lengths[batch]`."""

    operand: str
    indices: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator or function, by its key in `OPERATIONS`, and its arguments."""

    op: str
    args: tuple[Expr, ...]


Expr: TypeAlias = Const | Symbol | Param | Load | Apply

SYMBOLS: Mapping[str, str] = {
    "q_idx": "row of the query, counted from 0",
    "k_idx": "row of the key, counted from 0",
    "q_pos": "position of the query in the key sequence: q_idx + k_len - q_len",
    "q_len": "number of queries of the sequence",
    "k_len": "number of keys of the sequence",
    "batch": "index of the sequence",
    "head": "query head",
    "kv_head": "key and value head",
    "score": "query times key in natural units, after the scale",
}
"""Symbols of rules and what they mean. All are integers but `score`."""

TILE_SYMBOLS: Mapping[str, str] = {
    "first": "first row of the tile at hand",
    "last": "last row of the tile at hand, included",
    "q_first": "first query of a tile of queries and keys",
    "q_last": "last query of it, included",
    "k_first": "first key of it",
    "k_last": "last key of it, included",
}
"""Further symbols, in what `tiles` derives: the bounds of ranges, and the classes of tiles."""

Q_POS: Expr = Apply("-", (Apply("+", (Symbol("q_idx"), Symbol("k_len"))), Symbol("q_len")))
"""What `q_pos` stands for."""


# The table of operators and functions


def _exp2(x: Number) -> float:
    try:
        return float(2.0**x)
    except OverflowError:
        return math.inf


def _exp(x: Number) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _on_positive(function: Callable[[Number], float], at_zero: float) -> Callable[[Number], float]:
    return lambda x: function(x) if x > 0 else at_zero if x == 0 else math.nan


def _floor(x: Number) -> Number:
    return x if isinstance(x, int) or not math.isfinite(x) else float(math.floor(x))


def _gather(table: Any, *indices: Any) -> Any:
    return reduce(lambda rows, index: rows[index], indices, table)


_log = _on_positive(math.log, -math.inf)
_log2 = _on_positive(math.log2, -math.inf)
_sqrt = _on_positive(math.sqrt, 0.0)


def number(value: int | float | bool) -> Expr:
    """The expression for a number of either sign, not NaN."""
    magnitude = Const(value if isinstance(value, bool) else abs(value))
    return Apply("neg", (magnitude,)) if value < 0 else magnitude


ZERO, ONE, TRUE, FALSE = Const(0), Const(1), Const(True), Const(False)
INFINITY = "inf"
"""How a text writes infinity, as a literal has no sign: `where(q_idx >= k_idx, score, -inf)`."""


def _negated(x: Expr) -> Expr | None:
    """y where `x` is -y."""
    return x.args[0] if isinstance(x, Apply) and x.op == "neg" else None


# Rewrites return a simpler expression of the same value, or None. Only integer zeros and ones are neutral:
# dropping 0.0 from x + 0.0 could turn a float into an integer. 0 * x is 0 although x may be infinite, and
# x * (y / x) is y although x may be 0.


def _rewrite_add(x: Expr, y: Expr) -> Expr | None:
    if x == ZERO:
        return y
    if y == ZERO:
        return x
    minus_y = _negated(y)
    return None if minus_y is None else make("-", x, minus_y)


def _rewrite_subtract(x: Expr, y: Expr) -> Expr | None:
    if y == ZERO:
        return x
    if x == ZERO:
        return make("neg", y)
    if x == y:
        return ZERO
    minus_y = _negated(y)
    return None if minus_y is None else make("+", x, minus_y)


def _rewrite_multiply(x: Expr, y: Expr) -> Expr | None:
    if ZERO in (x, y):
        return ZERO
    if x == ONE:
        return y
    if y == ONE:
        return x
    for one, other in ((x, y), (y, x)):
        if one == Apply("neg", (ONE,)):
            return make("neg", other)
        if isinstance(one, Apply) and one.op == "/":
            if one.args[1] == other:
                return one.args[0]
            if one.args[0] == ONE:
                return make("/", other, one.args[1])
    return None


def _rewrite_divide(x: Expr, y: Expr) -> Expr | None:
    return ZERO if x == ZERO else None


def _inverted(x: Expr) -> Expr | None:
    """y where `x` is ~y."""
    return x.args[0] if isinstance(x, Apply) and x.op == "~" else None


def _rewrite_and(x: Expr, y: Expr) -> Expr | None:
    if FALSE in (x, y):
        return FALSE
    return y if x in (TRUE, y) else x if y == TRUE else None


def _rewrite_or(x: Expr, y: Expr) -> Expr | None:
    if TRUE in (x, y):
        return TRUE
    return y if x in (FALSE, y) else x if y == FALSE else None


def _rewrite_where(condition: Expr, x: Expr, y: Expr) -> Expr | None:
    if condition == TRUE or x == y:
        return x
    return y if condition == FALSE else None


def _rewrite_same(x: Expr, y: Expr) -> Expr | None:
    return x if x == y else None


def _quotient_rule(node: Apply, dx: Expr, dy: Expr) -> Expr:
    # (dx - x / y * dy) / y
    return make("/", make("-", dx, make("*", node, dy)), node.args[1])


def _product_rule(node: Apply, dx: Expr, dy: Expr) -> Expr:
    x, y = node.args
    return make("+", make("*", dx, y), make("*", x, dy))


def _modulo_rule(node: Apply, dx: Expr, dy: Expr) -> Expr:
    # x % y is x - x // y * y, and x // y is flat but at its steps
    return make("-", dx, make("*", make("//", *node.args), dy))


def _choice(comparison: str) -> Callable[..., Expr]:
    """min and max follow the argument they return; at a tie that is the first."""
    return lambda node, dx, dy: make("where", make(comparison, *node.args), dx, dy)


def _flat(node: Apply, *_: Expr) -> Expr:
    return ZERO


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator or function: its spelling and what each reader of an expression needs to know of it."""

    key: str
    notation: str
    """`infix`, `prefix` or `call`."""
    text: str
    precedence: int
    """How tightly it binds, as in Python; higher binds tighter, operators of one level group to the left."""
    node: type[ast.AST] | None
    """Python's syntax node, for operators."""
    signature: str
    """Types taken and given. `number` is int or float, and as result float if any number taken is;
    `any` is a type that the arguments marked so share."""
    evaluate: Callable[..., Any]
    """On Python numbers; `evaluate` can replace it for tensors."""
    interval: Callable[..., Interval]
    derivative: Callable[..., Expr] = _flat
    """(the node, the derivative of each argument) -> its derivative."""
    rewrite: Callable[..., Expr | None] = lambda *_: None
    """A simpler equal expression for the arguments, or None."""
    takes: tuple[str, ...] = field(init=False)
    gives: str = field(init=False)

    def __post_init__(self) -> None:
        takes, gives = self.signature.split(" -> ")
        object.__setattr__(self, "takes", tuple(takes.split(", ")))
        object.__setattr__(self, "gives", gives)


def _infix(text: str, precedence: int, node: type[ast.AST], signature: str, *readers: Any) -> Operation:
    return Operation(text, "infix", text, precedence, node, signature, *readers)


def _prefix(key: str, text: str, node: type[ast.AST], signature: str, *readers: Any) -> Operation:
    return Operation(key, "prefix", text, SIGN, node, signature, *readers)


def _call(name: str, signature: str, *readers: Any) -> Operation:
    return Operation(name, "call", name, ATOM, None, signature, *readers)


COMPARISON, OR, AND, SUM, PRODUCT, SIGN, ATOM = range(1, 8)
LN2 = Const(math.log(2))
_ARITHMETIC, _COMPARE, _LOGIC = "number, number -> number", "number, number -> bool", "bool, bool -> bool"

# fmt: off
OPERATIONS: Mapping[str, Operation] = {
    row.key: row
    for row in (
        _infix("==", COMPARISON, ast.Eq, "any, any -> bool", operator.eq, interval.equal),
        _infix("!=", COMPARISON, ast.NotEq, "any, any -> bool", operator.ne, interval.not_equal),
        _infix("<", COMPARISON, ast.Lt, _COMPARE, operator.lt, interval.less),
        _infix("<=", COMPARISON, ast.LtE, _COMPARE, operator.le, interval.less_equal),
        _infix(">", COMPARISON, ast.Gt, _COMPARE, operator.gt, interval.greater),
        _infix(">=", COMPARISON, ast.GtE, _COMPARE, operator.ge, interval.greater_equal),
        _infix("|", OR, ast.BitOr, _LOGIC, operator.or_, interval.logical_or, _flat, _rewrite_or),
        _infix("&", AND, ast.BitAnd, _LOGIC, operator.and_, interval.logical_and, _flat, _rewrite_and),
        _infix("+", SUM, ast.Add, _ARITHMETIC, operator.add, interval.add,
               lambda node, dx, dy: make("+", dx, dy), _rewrite_add),
        _infix("-", SUM, ast.Sub, _ARITHMETIC, operator.sub, interval.subtract,
               lambda node, dx, dy: make("-", dx, dy), _rewrite_subtract),
        _infix("*", PRODUCT, ast.Mult, _ARITHMETIC, operator.mul, interval.multiply,
               _product_rule, _rewrite_multiply),
        _infix("/", PRODUCT, ast.Div, "number, number -> float", operator.truediv, interval.divide,
               _quotient_rule, _rewrite_divide),
        _infix("//", PRODUCT, ast.FloorDiv, _ARITHMETIC, operator.floordiv, interval.floor_divide),
        _infix("%", PRODUCT, ast.Mod, _ARITHMETIC, operator.mod, interval.modulo, _modulo_rule),
        _prefix("neg", "-", ast.USub, "number -> number", operator.neg, interval.negative,
                lambda node, dx: make("neg", dx), _negated),
        _prefix("~", "~", ast.Invert, "bool -> bool", operator.not_, interval.logical_not,
                _flat, _inverted),
        _call("min", _ARITHMETIC, min, interval.minimum, _choice("<="), _rewrite_same),
        _call("max", _ARITHMETIC, max, interval.maximum, _choice(">="), _rewrite_same),
        _call("abs", "number -> number", abs, interval.absolute,
              lambda node, dx: make("where", make(">=", node.args[0], ZERO), dx, make("neg", dx))),
        _call("where", "bool, any, any -> any", lambda condition, x, y: x if condition else y, interval.where,
              lambda node, _, dx, dy: make("where", node.args[0], dx, dy), _rewrite_where),
        _call("exp", "number -> float", _exp, interval.rising(_exp),
              lambda node, dx: make("*", node, dx)),
        _call("exp2", "number -> float", _exp2, interval.rising(_exp2),
              lambda node, dx: make("*", make("*", node, LN2), dx)),
        _call("log", "number -> float", _log, interval.rising(_log),
              lambda node, dx: make("/", dx, node.args[0])),
        _call("log2", "number -> float", _log2, interval.rising(_log2),
              lambda node, dx: make("/", dx, make("*", node.args[0], LN2))),
        _call("sqrt", "number -> float", _sqrt, interval.rising(_sqrt),
              lambda node, dx: make("/", dx, make("*", Const(2), node))),
        _call("tanh", "number -> float", math.tanh, interval.rising(math.tanh),
              lambda node, dx: make("*", make("-", ONE, make("*", node, node)), dx)),
        _call("floor", "number -> number", _floor, interval.rising(_floor), _flat),
    )
}
# fmt: on
"""Every operator and function there is; adding one is adding its row."""

FUNCTIONS: tuple[str, ...] = tuple(row.text for row in OPERATIONS.values() if row.notation == "call")
OPPOSITE: Mapping[str, str] = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
"""Of each comparison the one that holds where it does not; of floats only where neither side is NaN."""
MIRRORED: Mapping[str, str] = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
"""Of each comparison the one that says the same of its sides exchanged."""
_INFIX = {row.node: row for row in OPERATIONS.values() if row.notation == "infix"}
_PREFIX = {row.node: row for row in OPERATIONS.values() if row.notation == "prefix"}


# Building and walking


def children(expr: Expr) -> tuple[Expr, ...]:
    """The expressions directly below."""
    return expr.args if isinstance(expr, Apply) else expr.indices if isinstance(expr, Load) else ()


def rebuild(expr: Expr, parts: tuple[Expr, ...]) -> Expr:
    """`expr` with other expressions directly below; the very same object if they are the same."""
    if parts == children(expr):
        return expr
    if isinstance(expr, Load):
        return Load(expr.operand, parts)
    return Apply(expr.op, parts) if isinstance(expr, Apply) else expr


def walk(expr: Expr) -> Iterator[Expr]:
    """Every node, parents first, left to right."""
    yield expr
    for part in children(expr):
        yield from walk(part)


def depth(expr: Expr) -> int:
    """Levels of the tree; a leaf has one."""
    return 1 + max((depth(part) for part in children(expr)), default=0)


def free_symbols(expr: Expr) -> frozenset[str]:
    """Names of the symbols in it; `q_pos` counts as itself."""
    return frozenset(node.name for node in walk(expr) if isinstance(node, Symbol))


def params(expr: Expr) -> tuple[str, ...]:
    """Names of its parameters, each once, in reading order."""
    return tuple(dict.fromkeys(node.name for node in walk(expr) if isinstance(node, Param)))


def loads(expr: Expr) -> tuple[Load, ...]:
    """Its different loads in reading order."""
    return tuple(dict.fromkeys(node for node in walk(expr) if isinstance(node, Load)))


def substitute(expr: Expr, replacements: Mapping[Expr, Expr]) -> Expr:
    """`expr` with each node that is a key replaced; what was put in is not searched again."""
    if expr in replacements:
        return replacements[expr]
    return rebuild(expr, tuple(substitute(part, replacements) for part in children(expr)))


def rename(expr: Expr, names: Mapping[str, str]) -> Expr:
    """`expr` with parameters and operands renamed."""
    parts = tuple(rename(part, names) for part in children(expr))
    if isinstance(expr, Param):
        return Param(names.get(expr.name, expr.name))
    if isinstance(expr, Load):
        return Load(names.get(expr.operand, expr.operand), parts)
    return rebuild(expr, parts)


def make(op: str, *args: Expr) -> Expr:
    """An operation on simplified arguments, itself simplified."""
    row = OPERATIONS[op]
    values = [constant(arg) for arg in args]
    if None not in values:
        try:
            value = row.evaluate(*values)
        except (ArithmeticError, ValueError):
            value = math.nan
        if math.isfinite(value) and (isinstance(value, float) or abs(value) <= MAX_INT):
            return number(value)
    simpler = row.rewrite(*args)
    return Apply(op, args) if simpler is None else simpler


def constant(expr: Expr) -> int | float | bool | None:
    """The number that `expr` is, if it is a literal of either sign."""
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Apply) and expr.op == "neg" and isinstance(expr.args[0], Const):
        return -expr.args[0].value
    return None


def simplify(expr: Expr) -> Expr:
    """An expression of the same value with constants folded and neutral elements gone."""
    parts = tuple(simplify(part) for part in children(expr))
    return make(expr.op, *parts) if isinstance(expr, Apply) else rebuild(expr, parts)


# Types


def result_type(expr: Expr, types: Mapping[str, str]) -> str:
    """`bool`, `int` or `float`.

    Args:
        types: the type of each parameter and of each operand's elements, in the same three words.

    Raises:
        InvalidArgument: an operation is applied to something it does not take.
    """
    if isinstance(expr, Const):
        return type(expr.value).__name__
    if isinstance(expr, Symbol):
        return "float" if expr.name == "score" else "int"
    if isinstance(expr, Param):
        return types[expr.name]
    given = tuple(result_type(part, types) for part in children(expr))
    if isinstance(expr, Load):
        for index, type_ in zip(expr.indices, given, strict=True):
            if type_ != "int":
                raise InvalidArgument(
                    f"index {_shortened(to_text(index))!r} of {_shortened(to_text(expr))!r} is {type_}; "
                    "an index is an integer expression"
                )
        return types[expr.operand]
    row = OPERATIONS[expr.op]
    shared = {type_ == "bool" for take, type_ in zip(row.takes, given, strict=True) if take == "any"}
    for take, type_, arg in zip(row.takes, given, expr.args, strict=True):
        if (take == "bool") != (type_ == "bool") and take != "any":
            hint = "choose numbers with where(x, 1, 0)"
            if take == "bool":
                hint = "write comparisons in parentheses, as in (x != 0): & and | bind tighter than they do"
            raise InvalidArgument(
                f"{row.text!r} in {_shortened(to_text(expr))!r} takes a {take}, but "
                f"{_shortened(to_text(arg))!r} is {type_}; {hint}"
            )
    if len(shared) > 1:
        raise InvalidArgument(
            f"{row.text!r} in {_shortened(to_text(expr))!r} mixes a bool with a number; make both one kind, "
            "for example where(x, 1, 0)"
        )
    if row.gives in ("bool", "float"):
        return row.gives
    results = [type_ for take, type_ in zip(row.takes, given, strict=True) if take == row.gives]
    return "float" if "float" in results else results[0]


# Text


@dataclass(frozen=True, slots=True)
class Style:
    """How `to_text` spells things; the default is the canonical text that `parse` reads."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Other names for symbols and parameters."""
    calls: Mapping[str, str] = field(default_factory=dict)
    """Functions to print instead, by key in `OPERATIONS`; an operator listed here is printed as a call."""
    keeps: Callable[[Apply], bool] = lambda _: False
    """Whether an operator that is listed there is printed as itself all the same."""
    load: Callable[[Load, tuple[str, ...]], str] | None = None
    """Prints a load, given it and the text of its indices."""
    literal: Callable[[int | float | bool], str] = repr
    """Prints a number that is not negative, or a truth value."""


PLAIN = Style()


def to_text(expr: Expr, style: Style = PLAIN) -> str:
    """`expr` with as few parentheses as Python's precedence allows; `parse` gives the same tree back."""
    return _print(expr, style)[0]


def _print(expr: Expr, style: Style) -> tuple[str, int]:
    """Text, and how tightly its outermost operator binds."""
    if isinstance(expr, Const):
        return style.literal(expr.value), ATOM
    if isinstance(expr, Symbol | Param):
        return style.names.get(expr.name, expr.name), ATOM
    if isinstance(expr, Load):
        indices = tuple(to_text(index, style) for index in expr.indices)
        return (style.load(expr, indices) if style.load else f"{expr.operand}[{', '.join(indices)}]"), ATOM
    row = OPERATIONS[expr.op]
    parts = [_print(arg, style) for arg in expr.args]
    if row.notation == "call" or (row.key in style.calls and not style.keeps(expr)):
        return f"{style.calls.get(row.key, row.text)}({', '.join(text for text, _ in parts)})", ATOM
    # Left operands may bind as tightly as the operator, right ones must bind tighter. Comparisons do not
    # group at all (Python reads a < b < c as a chain), so both of theirs must bind tighter.
    least = row.precedence + (row.precedence == COMPARISON)
    texts = [
        text if binds >= limit else f"({text})"
        for (text, binds), limit in zip(parts, (least, row.precedence + 1), strict=False)
    ]
    if row.notation == "prefix":
        text, binds = parts[0]
        return row.text + (text if binds >= row.precedence else f"({text})"), row.precedence
    return f"{texts[0]} {row.text} {texts[1]}", row.precedence


def parse(
    text: str,
    *,
    symbols: Collection[str] = frozenset(SYMBOLS),
    params: Collection[str] = (),
    operands: Mapping[str, int | None] = MappingProxyType({}),
) -> Expr:
    """Reads an expression; safe for text from anywhere, since nothing but known names and operators passes.

    Args:
        text: Python syntax, such as `(q_pos - k_idx <= left) & (k_idx < key_lengths[batch])`.
        symbols: the symbols allowed.
        params: names of parameters.
        operands: number of indices of each operand, by name; None for any number.

    Raises:
        InvalidArgument: names the offending piece, and what is allowed instead.
    """
    if len(text) > MAX_TEXT:
        raise InvalidArgument(f"the expression has {len(text)} characters; at most {MAX_TEXT} are read")
    if not text.isascii():
        raise InvalidArgument(f"{_shortened(text)!r} is not plain ASCII; write names in plain letters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise InvalidArgument(
            f"{_shortened(text)!r} is not an expression ({reason}); write one like q_idx >= k_idx"
        ) from None
    reader = _Reader(text.strip(), symbols, params, operands)
    try:
        expr = reader.read(tree.body)
        too_deep = depth(expr) > MAX_DEPTH
    except RecursionError:
        too_deep = True
    if too_deep:
        raise InvalidArgument(f"the expression is nested deeper than {MAX_DEPTH} levels; split it")
    return expr


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns Python's syntax tree into an expression."""

    text: str
    symbols: Collection[str]
    params: Collection[str]
    operands: Mapping[str, int | None]

    def read(self, node: ast.expr) -> Expr:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            value: Any = node.value
            if value > MAX_INT if isinstance(value, int) else math.isinf(value):
                raise self._refusal(node, "the number is too large; integers end at 2**63 - 1")
            return Const(value)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Subscript):
            return self._load(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _INFIX:
            return Apply(_INFIX[type(node.op)].key, (self.read(node.left), self.read(node.right)))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _PREFIX:
            return Apply(_PREFIX[type(node.op)].key, (self.read(node.operand),))
        if isinstance(node, ast.Compare) and all(type(op) in _INFIX for op in node.ops):
            if len(node.ops) > 1:
                raise self._refusal(
                    node, "comparisons do not chain, and & and | bind tighter; write (a <= b) & (b < c)"
                )
            key = _INFIX[type(node.ops[0])].key
            return Apply(key, (self.read(node.left), self.read(node.comparators[0])))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(node, node.func.id)
        if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            raise self._refusal(node, "and, or, not do not work on tiles; write &, |, ~ with parentheses")
        if isinstance(node, ast.IfExp):
            raise self._refusal(node, "there is no if; write where(condition, x, y)")
        operators = " ".join(row.text for row in OPERATIONS.values() if row.notation == "infix")
        raise self._refusal(
            node,
            f"allowed: numbers, names, operand[index], the operators {operators} ~ and unary -, "
            f"and the functions {', '.join(FUNCTIONS)}",
        )

    def _name(self, node: ast.Name) -> Expr:
        if node.id == INFINITY:
            return Const(math.inf)
        if node.id in self.symbols:
            return Symbol(node.id)
        if node.id in self.params:
            return Param(node.id)
        if node.id in self.operands:
            raise self._refusal(node, f"an operand is read by index, as in {node.id}[batch]")
        if node.id in SYMBOLS:
            raise self._refusal(node, "this symbol does not exist here: score belongs to score rules only")
        if node.id in FUNCTIONS:
            raise self._refusal(node, "a function is called, with its arguments in parentheses")
        known = [name for name in SYMBOLS if name in self.symbols]
        known += [name for name in (*self.symbols, *self.params, *self.operands) if name not in SYMBOLS]
        raise self._refusal(node, f"unknown name; known: {', '.join(known)}")

    def _load(self, node: ast.Subscript) -> Expr:
        if not isinstance(node.value, ast.Name) or node.value.id not in self.operands:
            known = ", ".join(self.operands) or "none; declare it, as in ... where ids: i32"
            raise self._refusal(node, f"only an operand is read by index; operands: {known}")
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not indices:
            raise self._refusal(node, f"an operand is read by index, as in {node.value.id}[batch]")
        rank = self.operands[node.value.id]
        if rank is not None and len(indices) != rank:
            raise self._refusal(node, f"{node.value.id} has {rank} dimensions and takes as many indices")
        return Load(node.value.id, tuple(self.read(index) for index in indices))

    def _call(self, node: ast.Call, name: str) -> Expr:
        if name not in FUNCTIONS:
            raise self._refusal(node, f"unknown function {_shortened(name)!r}; known: {', '.join(FUNCTIONS)}")
        if node.keywords:
            raise self._refusal(node, "functions take no named arguments; give them in order")
        args = tuple(self.read(arg) for arg in node.args)
        arity = len(OPERATIONS[name].takes)
        if name in ("min", "max") and len(args) > arity:
            return reduce(lambda x, y: Apply(name, (x, y)), args)
        if len(args) != arity:
            raise self._refusal(node, f"{name} takes {arity} arguments, not {len(args)}")
        return Apply(name, args)

    def _refusal(self, node: ast.expr, why: str) -> InvalidArgument:
        piece = ast.get_source_segment(self.text, node) or ast.unparse(node)
        return InvalidArgument(
            f"{_shortened(piece)!r} is not allowed in the expression {_shortened(self.text)!r}: {why}"
        )


def _shortened(text: str, length: int = 200) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


# Values


def evaluate(
    expr: Expr,
    env: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Any:
    """The value of `expr`, on Python numbers or on tensors that broadcast.

    Args:
        env: a value for each symbol and parameter and a table for each operand. `q_pos` may be left out, it
            follows from q_idx, k_len and q_len.
        functions: replacements for the evaluators of `OPERATIONS` by key, and under `[]` for the gather
            `(table, *indices)`; tensors need those that Python's operators do not serve.
    """
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Symbol | Param):
        if expr.name == "q_pos" and "q_pos" not in env:
            return evaluate(Q_POS, env, functions)
        return env[expr.name]
    parts = [evaluate(part, env, functions) for part in children(expr)]
    evaluator: Callable[..., Any]
    if isinstance(expr, Load):
        evaluator = functions.get("[]", _gather)
        return evaluator(env[expr.operand], *parts)
    evaluator = functions.get(expr.op, OPERATIONS[expr.op].evaluate)
    return evaluator(*parts)


def bounds(expr: Expr, env: Mapping[str, Any]) -> Interval:
    """A range that holds every value of `expr` while symbols and parameters vary within `env`.

    Args:
        env: a number or an `Interval` for each symbol and parameter, and a table for each operand; what is
            missing is unknown. A load is anything that its table has between the bounds of its indices.
    """
    return interval.widened(_bounds(expr, env))


def _bounds(expr: Expr, env: Mapping[str, Any]) -> Interval:
    if isinstance(expr, Const):
        # An infinite end of a range is no limit, and 0 times it is 0: of the number itself nothing is known.
        return interval.EVERYTHING if expr.value == math.inf else Interval(expr.value, expr.value)
    if isinstance(expr, Symbol | Param):
        if expr.name == "q_pos" and "q_pos" not in env:
            return bounds(Q_POS, env)
        value = env.get(expr.name, interval.EVERYTHING)
        return value if isinstance(value, Interval) else Interval(value, value)
    parts = [bounds(part, env) for part in children(expr)]
    if isinstance(expr, Apply):
        return OPERATIONS[expr.op].interval(*parts)
    if expr.operand not in env or not all(isinstance(end, int) for part in parts for end in part):
        return interval.EVERYTHING
    places = product(*(range(int(part.lo), int(part.hi) + 1) for part in parts))
    try:
        values = [_gather(env[expr.operand], *place) for place in places]
    except IndexError:  # bounds that are wider than what is read
        return interval.EVERYTHING
    return Interval(min(values), max(values))


SCORE = Symbol("score")


def derivative(expr: Expr, wrt: Symbol | Load = SCORE) -> Expr:
    """The simplified derivative of `expr` by a symbol or by what a load reads; at a kink or a step, that of
    one side.
    """
    return _derivative(simplify(expr), simplify(wrt))


def _derivative(expr: Expr, wrt: Expr) -> Expr:
    if expr == wrt:
        return ONE
    if not isinstance(expr, Apply) or wrt not in walk(expr):
        return ZERO
    return OPERATIONS[expr.op].derivative(expr, *(_derivative(arg, wrt) for arg in expr.args))
