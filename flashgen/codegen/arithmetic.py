"""Score rules in operations that a GPU does fast. Values stay what they are, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

from flashgen.spec import expr as ex
from flashgen.spec import tiles
from flashgen.spec.rule import Rule

MOST_FLOAT = 2**24
"""Up to it every whole number is a float32."""
_POSITIONS = ("q_idx", "k_idx", "q_pos")
FLOATS = {f"{name}__float": f"{name}.to(tl.float32)" for name in _POSITIONS}
"""Symbols for positions as float32, and how each is printed."""
_COLUMNS = ex.Symbol("k_idx__here")
HERE = {
    _COLUMNS.name: "columns",
    "q_idx__here": "(rows - start_n).to(tl.float32)",
    "q_pos__here": "(rows + (k_len - q_len - start_n)).to(tl.float32)",
}
"""Symbols for positions from a block's first key on as float32, exact for any; and how each is printed."""
_QUARTERS = 4.0
KEYS = ex.Symbol("score__keys")
"""Stands for the keys' part of distances that are taken apart."""
_SCORE, _SCALE, _LOG2E = ex.Symbol("score"), ex.Symbol("scale"), ex.Symbol("LOG2E")
_PER_ELEMENT = {*_POSITIONS, *FLOATS, "score"}
_BENT = "score__tanh"


@dataclass(frozen=True, slots=True)
class Factors:
    """What a whole tile is multiplied by, reckoned before the loops; a division is eight instructions."""

    bends: bool = False
    """Whether a tanh of scores is one function of all that a thread has, of four times its argument."""
    names: dict[ex.Expr, ex.Symbol] = field(default_factory=dict)
    """A name for each, in the order in which they are needed."""
    bent: dict[str, ex.Expr] = field(default_factory=dict)
    """Of each symbol that stands for such a tanh, four times its argument."""

    def natural(self, expr: ex.Expr) -> ex.Expr:
        """The value of an expression of scores in natural units: by products, where it has quotients."""
        if not isinstance(expr, ex.Apply | ex.Load):
            return expr
        if _is_shared_quotient(expr):
            dividend, divisor = ex.children(expr)
            return _times(self.natural(dividend), self._name(_over(None, divisor)))
        return ex.rebuild(expr, tuple(map(self.natural, ex.children(expr))))

    def log2(self, expr: ex.Expr) -> ex.Expr:
        """The value in log2 units, of scores that are still dot products: all factors of a term are one.

        Sums take the unit in term by term, which rounds each as its own size would. A sum that a rule itself
        multiplies stays one, and so does a distance: its terms may cancel.
        """
        if isinstance(expr, ex.Apply) and expr.op in ("+", "-", "neg") and not _positions(expr):
            return ex.rebuild(expr, tuple(map(self.log2, expr.args)))
        if isinstance(expr, ex.Apply) and expr.op == "where":
            condition, *values = expr.args
            return ex.rebuild(expr, (self._of_products(condition), *map(self.log2, values)))
        return self._product(expr, _LOG2E)

    def log2_folded(self, expr: ex.Expr) -> tuple[ex.Expr, ex.Expr | None]:
        """As `log2`, but for what a tile multiplies a tanh by that is the whole rule: that is told apart, for
        the exponent to take in.

        It may be negative, and the tanh has its sign already; None where there is nothing to take in.
        """
        inner, factor = _peeled(expr, _LOG2E)
        if not self._is_bent(inner) or factor is None or factor == _LOG2E:
            return self.log2(expr), None
        unit = self._name(factor)
        signed = (ex.Apply("<", (unit, ex.ZERO)), ex.number(-_QUARTERS), ex.number(_QUARTERS))
        return self._tanh(inner, ex.Apply("where", signed)), unit

    def _is_bent(self, expr: ex.Expr) -> bool:
        is_tanh = isinstance(expr, ex.Apply) and expr.op == "tanh"
        return self.bends and is_tanh and "score" in ex.free_symbols(expr)

    def _tanh(self, expr: ex.Expr, times: ex.Expr) -> ex.Expr:
        """The symbol of a tanh of scores that is given as many times its argument."""
        (argument,) = (self._product(each, times) for each in ex.children(expr))
        name = f"{_BENT}_{len(self.bent)}"
        self.bent[name] = argument
        return ex.Symbol(name)

    def _product(self, expr: ex.Expr, factor: ex.Expr | None) -> ex.Expr:
        """`expr` times a factor that a tile shares; None is 1."""
        if isinstance(expr, ex.Const):
            return expr if factor is None or math.isinf(expr.value) else _times(expr, factor)
        if not _differs(expr):
            return expr if factor is None else self._name(_times(expr, factor))
        inner, factor = _peeled(expr, factor)
        if inner == _SCORE:
            return _times(inner, self._name(_times(_SCALE, factor)))
        if self._is_bent(inner):
            changed = self._tanh(inner, ex.number(_QUARTERS))
        else:
            changed = ex.rebuild(inner, tuple(map(self._of_products, ex.children(inner))))
        return changed if factor is None else _times(changed, self._name(factor))

    def _of_products(self, expr: ex.Expr) -> ex.Expr:
        return self._product(expr, None)

    def _name(self, factor: ex.Expr) -> ex.Expr:
        if isinstance(factor, ex.Symbol | ex.Const):
            return factor
        return self.names.setdefault(factor, ex.Symbol(f"score__factor_{len(self.names)}"))


def _peeled(expr: ex.Expr, factor: ex.Expr | None) -> tuple[ex.Expr, ex.Expr | None]:
    """A product with `factor` as what differs from pair to pair, and all else that is multiplied."""
    if isinstance(expr, ex.Apply) and expr.op in ("*", "/"):
        first, second = expr.args
        if not _differs(second):
            return _peeled(first, (_over if expr.op == "/" else _times)(factor, second))
        if expr.op == "*" and not _differs(first):
            return _peeled(second, _times(factor, first))
    return expr, factor


def _times(factor: ex.Expr | None, other: ex.Expr | None) -> ex.Expr:
    if factor is None or other is None:
        return factor or other or ex.ONE
    return ex.Apply("*", (factor, other))


def _over(factor: ex.Expr | None, divisor: ex.Expr) -> ex.Expr:
    return ex.Apply("/", (ex.Const(1.0) if factor is None else factor, divisor))


def _differs(expr: ex.Expr) -> bool:
    """Whether an expression is one of each pair, row or key, and not of a whole tile."""
    return any(name in _PER_ELEMENT or name.startswith(_BENT) for name in ex.free_symbols(expr))


def _is_shared_quotient(node: ex.Expr) -> bool:
    return (
        isinstance(node, ex.Apply)
        and node.op == "/"
        and _differs(node.args[0])
        and not _differs(node.args[1])
    )


def scores_in(expr: ex.Expr) -> int:
    """How often an expression takes the score."""
    return sum(node == _SCORE for node in ex.walk(expr))


def floats_early(expr: ex.Expr, types: Mapping[str, str]) -> ex.Expr:
    """Distances that become floats are taken between floats: rows and keys are converted, not each pair.

    Exact for positions up to `MOST_FLOAT`.

    Args:
        types: as for `expr.result_type`.
    """
    parts = [floats_early(each, types) for each in ex.children(expr)]
    if isinstance(expr, ex.Apply) and ex.result_type(expr, types) == "float":
        distances = {i for i, each in enumerate(expr.args) if _is_distance(each)}
        parts = [_of_floats(expr.args[i]) if i in distances else each for i, each in enumerate(parts)]
    return ex.rebuild(expr, tuple(parts))


def takes_float_distances(expr: ex.Expr, types: Mapping[str, str]) -> bool:
    """Whether `floats_early` changes an expression."""
    return floats_early(expr, types) != expr


def _is_distance(expr: ex.Expr) -> bool:
    """A difference of two positions, also its size or bounded by constants: at most as large as they are."""
    if not isinstance(expr, ex.Apply):
        return False
    if expr.op in ("abs", "neg"):
        return _is_distance(expr.args[0])
    if expr.op in ("min", "max"):
        return any(map(_is_distance, expr.args)) and all(
            _is_distance(each) or _is_small(each) for each in expr.args
        )
    return bool(_positions(expr))


@dataclass(frozen=True, slots=True)
class Apart:
    """A rule whose distances are taken apart at the first key s of a block: each score is `rest` less `rows`.

    (q - k) * f is (q - s) * f less (k - s) * f. The second has one value for each column, the same in all
    blocks, so that a score needs no more than one addition; the first is the row's alone, and so goes with
    its maximum. Both are rounded once, as the product of the distance is: k - s is less than a block, and
    q - s at most a block more than the distance. From position 0 on both would grow with the length, and
    2^-24 of either would be left of their difference: at 65,536 keys and a slope of 0.7 0.004 of a log2 unit
    for the nearest key, where this leaves 0.00001.
    """

    rest: ex.Expr
    """Over `KEYS`."""
    keys: ex.Expr
    rows: ex.Expr


def taken_apart(expr: ex.Expr, mask: Rule) -> Apart | None:
    """A score rule in log2 units with its distances taken apart; None where it adds none.

    A distance's size is the distance where the mask keeps no other: what it drops is -inf whatever it was.

    Args:
        expr: from `Factors.log2`.
    """
    found: list[tuple[ex.Expr, ex.Expr]] = []  # the row's position and its factor, of what is taken off

    def rest(term: ex.Expr, sign: int) -> ex.Expr:
        if not isinstance(term, ex.Apply):
            return term
        if term.op in ("+", "-", "neg"):
            signs = (sign, sign if term.op == "+" else -sign)[-len(term.args) :]
            return ex.make(term.op, *map(rest, term.args, signs))
        if term.op != "*" or _differs(term.args[1]):
            return term
        distance, factor = term.args
        row, ahead = _row_ahead(distance, mask)
        if not row:
            return term
        found.append((ex.Symbol(f"{row}__here"), factor if sign * ahead < 0 else ex.make("neg", factor)))
        return ex.ZERO

    left = rest(expr, 1)
    if not found:
        return None
    keys = _total([(_COLUMNS, factor) for _, factor in found])
    return Apart(ex.make("+", left, KEYS), keys, _total(found))


def _total(products: list[tuple[ex.Expr, ex.Expr]]) -> ex.Expr:
    """The sum of some products."""
    return reduce(lambda a, b: ex.Apply("+", (a, b)), (ex.Apply("*", each) for each in products))


def _row_ahead(expr: ex.Expr, mask: Rule) -> tuple[str, int]:
    """Of a distance of row and key the row's symbol, and 1 for row less key, -1 for key less row; else no
    symbol.
    """
    if not isinstance(expr, ex.Apply):
        return "", 0
    if expr.op == "neg":
        row, ahead = _row_ahead(expr.args[0], mask)
        return row, -ahead
    if expr.op == "abs":
        row, ahead = _row_ahead(expr.args[0], mask)
        apart = ex.Apply("-", (ex.Symbol(row), ex.Symbol("k_idx")))
        signs = {1: apart, -1: ex.Apply("neg", (apart,))}
        known = [sign for sign, each in signs.items() if row and tiles.never_negative(mask, each)]
        return (row, known[0]) if known else ("", 0)
    first, second = _positions(expr) or ("", "")
    if (first == "k_idx") == (second == "k_idx"):
        return "", 0
    return (first, 1) if second == "k_idx" else (second, -1)


def _positions(expr: ex.Expr) -> tuple[str, ...]:
    """The names of the two positions that an expression is the difference of, whether floats or not."""
    if not isinstance(expr, ex.Apply) or expr.op != "-":
        return ()
    names = tuple(each.name.removesuffix("__float") for each in expr.args if isinstance(each, ex.Symbol))
    return names if len(names) == 2 and set(names) <= set(_POSITIONS) else ()


def _is_small(expr: ex.Expr) -> bool:
    value = ex.constant(expr)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST_FLOAT


def of_positions(expr: ex.Expr) -> ex.Expr:
    """An expression with positions in the place of their floats."""
    return ex.substitute(expr, {ex.Symbol(f"{name}__float"): ex.Symbol(name) for name in _POSITIONS})


def _of_floats(expr: ex.Expr) -> ex.Expr:
    return ex.substitute(expr, {ex.Symbol(name): ex.Symbol(f"{name}__float") for name in _POSITIONS})
