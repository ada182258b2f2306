"""Score rules in operations that a GPU does fast. Values stay what they are, up to rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.spec import expr as ex

MOST_FLOAT = 2**24
"""Up to it every whole number is a float32."""
_POSITIONS = ("q_idx", "k_idx", "q_pos")
FLOATS = {f"{name}__float": f"{name}.to(tl.float32)" for name in _POSITIONS}
"""Symbols for positions as float32, and how each is printed."""
_PER_ELEMENT = {*_POSITIONS, *FLOATS, "score"}


@dataclass(frozen=True, slots=True)
class Reciprocals:
    """Divisors that a whole tile shares: divided by once, before the loops, and multiplied by since."""

    names: Mapping[ex.Expr, ex.Symbol]

    @classmethod
    def of(cls, *exprs: ex.Expr) -> Reciprocals:
        """Those of some expressions of one rule."""
        quotients = (node for each in exprs for node in ex.walk(each) if _is_shared_quotient(node))
        divisors = list(dict.fromkeys(ex.children(node)[1] for node in quotients))
        return cls(
            {
                each: ex.Symbol(f"score__inverse{f'_{i}' if len(divisors) > 1 else ''}")
                for i, each in enumerate(divisors)
            }
        )

    def used(self, expr: ex.Expr) -> ex.Expr:
        """The expression with products for quotients. A division of float32 takes eight instructions."""
        parts = tuple(map(self.used, ex.children(expr)))
        if not _is_shared_quotient(expr):
            return ex.rebuild(expr, parts)
        return ex.Apply("*", (parts[0], self.names[ex.children(expr)[1]]))


def _is_shared_quotient(node: ex.Expr) -> bool:
    if not isinstance(node, ex.Apply) or node.op != "/":
        return False
    dividend, divisor = (bool(ex.free_symbols(each) & _PER_ELEMENT) for each in node.args)
    return dividend and not divisor


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
