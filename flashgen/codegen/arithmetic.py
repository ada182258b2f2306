"""Score rules in operations that a GPU does fast. Values stay what they are, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashgen.spec import expr as ex

MOST_FLOAT = 2**24
"""Up to it every whole number is a float32."""
_POSITIONS = ("q_idx", "k_idx", "q_pos")
FLOATS = {f"{name}__float": f"{name}.to(tl.float32)" for name in _POSITIONS}
"""Symbols for positions as float32, and how each is printed."""
_SCORE, _SCALE, _LOG2E = ex.Symbol("score"), ex.Symbol("scale"), ex.Symbol("LOG2E")
_PER_ELEMENT = {*_POSITIONS, *FLOATS, "score"}


@dataclass(frozen=True, slots=True)
class Factors:
    """What a whole tile is multiplied by, reckoned before the loops; a division is eight instructions."""

    names: dict[ex.Expr, ex.Symbol] = field(default_factory=dict)
    """A name for each, in the order in which they are needed."""

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
        multiplies stays one: its terms may cancel.
        """
        if isinstance(expr, ex.Apply) and expr.op in ("+", "-", "neg"):
            return ex.rebuild(expr, tuple(map(self.log2, expr.args)))
        if isinstance(expr, ex.Apply) and expr.op == "where":
            condition, *values = expr.args
            return ex.rebuild(expr, (self._of_products(condition), *map(self.log2, values)))
        return self._product(expr, _LOG2E)

    def _product(self, expr: ex.Expr, factor: ex.Expr | None) -> ex.Expr:
        """`expr` times a factor that a tile shares; None is 1."""
        if isinstance(expr, ex.Const):
            return expr if factor is None or math.isinf(expr.value) else _times(expr, factor)
        if not _differs(expr):
            return expr if factor is None else self._name(_times(expr, factor))
        if isinstance(expr, ex.Apply) and expr.op in ("*", "/"):
            first, second = expr.args
            if not _differs(second):
                return self._product(first, (_over if expr.op == "/" else _times)(factor, second))
            if expr.op == "*" and not _differs(first):
                return self._product(second, _times(factor, first))
        if expr == _SCORE:
            return _times(expr, self._name(_times(_SCALE, factor)))
        changed = ex.rebuild(expr, tuple(map(self._of_products, ex.children(expr))))
        return changed if factor is None else _times(changed, self._name(factor))

    def _of_products(self, expr: ex.Expr) -> ex.Expr:
        return self._product(expr, None)

    def _name(self, factor: ex.Expr) -> ex.Expr:
        if isinstance(factor, ex.Symbol | ex.Const):
            return factor
        return self.names.setdefault(factor, ex.Symbol(f"score__factor_{len(self.names)}"))


def _times(factor: ex.Expr | None, other: ex.Expr | None) -> ex.Expr:
    if factor is None or other is None:
        return factor or other or ex.ONE
    return ex.Apply("*", (factor, other))


def _over(factor: ex.Expr | None, divisor: ex.Expr) -> ex.Expr:
    return ex.Apply("/", (ex.Const(1.0) if factor is None else factor, divisor))


def _differs(expr: ex.Expr) -> bool:
    """Whether an expression is one of each pair, row or key, and not of a whole tile."""
    return bool(ex.free_symbols(expr) & _PER_ELEMENT)


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
    return expr.op == "-" and all(
        isinstance(each, ex.Symbol) and each.name in _POSITIONS for each in expr.args
    )


def _is_small(expr: ex.Expr) -> bool:
    value = ex.constant(expr)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST_FLOAT


def _of_floats(expr: ex.Expr) -> ex.Expr:
    return ex.substitute(expr, {ex.Symbol(name): ex.Symbol(f"{name}__float") for name in _POSITIONS})
