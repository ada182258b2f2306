"""An element mask as few comparisons: one for each value of the keys that it bounds, not one for each bound.

A select is made of each score for every condition that `&` joins (LLVM splits `select (a & b)` for NVIDIA's
targets): a window that reads `(q_pos - k_idx <= left) & (k_idx - q_pos <= right) & (k_idx < k_len)` costs a
score three comparisons and three selects. What of it is of the row alone is worked out once for the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from flashgen.spec import expr as ex
from flashgen.spec.spans import side_of
from flashgen.spec.tiles import Linear, summed, tighter

K_IDX, K_LEN = ex.Symbol("k_idx"), ex.Symbol("k_len")
_ORDERED = ("<", "<=", ">", ">=")


@dataclass(frozen=True, slots=True)
class Interval:
    """lo <= value < hi of integers, as a condition; None is no bound on that side."""

    value: ex.Expr
    """Of the keys alone: k_idx, or what divides it."""
    lo: ex.Expr | None = None
    hi: ex.Expr | None = None
    """Of rows, heads, parameters: of all but the keys."""

    @property
    def expr(self) -> ex.Expr:
        """The same as an expression."""
        sides = [] if self.lo is None else [ex.make(">=", self.value, self.lo)]
        sides += [] if self.hi is None else [ex.make("<", self.value, self.hi)]
        return _joined(sides)


def joined(expr: ex.Expr, types: Mapping[str, str]) -> tuple[Interval | ex.Expr, ...]:
    """Conditions that together say what a mask and `k_idx < k_len` say, the interval of k_idx first.

    Args:
        types: of parameters and operands, as `expr.result_type` takes them.
    """
    found = _conditions(expr, types)
    of_rows = [each for each in found if isinstance(each, ex.Expr) and not _of_keys(each)]
    keys = next(
        (each for each in found if isinstance(each, Interval) and each.value == K_IDX), Interval(K_IDX)
    )
    rest = [each for each in found if each not in of_rows and each != keys]
    lo = None if keys.lo is None else ex.make("max", keys.lo, ex.ZERO)
    hi = K_LEN if keys.hi is None else ex.make("min", keys.hi, K_LEN)
    if of_rows:
        hi = ex.make("where", _joined(of_rows), hi, ex.ZERO)
    return (Interval(K_IDX, lo, hi), *rest)


def period(found: Sequence[Interval | ex.Expr]) -> int:
    """After how many keys conditions are the same again for every row; 0 where that is not known, or there is
    none: each has to bound the remainder of k_idx by a literal.
    """
    divisors = [
        int(each.value.args[1].value)
        for each in found
        if isinstance(each, Interval)
        and isinstance(each.value, ex.Apply)
        and each.value.op == "%"
        and each.value.args[0] == K_IDX
        and isinstance(each.value.args[1], ex.Const)
    ]
    return math.lcm(*divisors) if divisors and len(divisors) == len(found) else 0


def _conditions(expr: ex.Expr, types: Mapping[str, str]) -> list[Interval | ex.Expr]:
    """Conditions of which all must hold; no two are intervals of one value."""
    if not isinstance(expr, ex.Apply):
        return [expr]
    if expr.op == "&":
        found: list[Interval | ex.Expr] = []
        for each in (condition for arg in expr.args for condition in _conditions(arg, types)):
            at = next((i for i, other in enumerate(found) if _alike(each, other)), None)
            if at is None:
                found.append(each)
            else:
                found[at] = _both(found[at], each)
        return found
    if expr.op == "|":
        left, right = (_conditions(arg, types) for arg in expr.args)
        either = _either(left[0], right[0]) if len(left) == len(right) == 1 else None
        return [expr if either is None else either]
    return [_solved(expr, types) or expr]


def _alike(a: Interval | ex.Expr, b: Interval | ex.Expr) -> bool:
    return isinstance(a, Interval) and isinstance(b, Interval) and a.value == b.value


def _both(a: Interval | ex.Expr, b: Interval | ex.Expr) -> Interval:
    assert isinstance(a, Interval) and isinstance(b, Interval)
    return Interval(a.value, tighter("max", (a.lo, b.lo)), tighter("min", (a.hi, b.hi)))


def _either(a: Interval | ex.Expr, b: Interval | ex.Expr) -> Interval | None:
    """The interval that holds where one of two does; None unless both are open on the same side."""
    if not (isinstance(a, Interval) and isinstance(b, Interval) and a.value == b.value):
        return None
    if a.lo is None and b.lo is None and a.hi is not None and b.hi is not None:
        return replace(a, hi=ex.make("max", a.hi, b.hi))
    if a.hi is None and b.hi is None and a.lo is not None and b.lo is not None:
        return replace(a, lo=ex.make("min", a.lo, b.lo))
    return None


def _solved(atom: ex.Apply, types: Mapping[str, str]) -> Interval | None:
    """A comparison solved for the one value of the keys in it."""
    if atom.op not in _ORDERED or any(ex.result_type(arg, types) != "int" for arg in atom.args):
        return None
    left, right = map(_terms, atom.args)
    if left is None or right is None:
        return None
    terms = summed(left, right, -1)
    values = [term for term in terms if _of_keys(term)]
    if len(values) != 1 or abs(factor := terms.pop(values[0])) != 1:
        return None
    # value + rest op 0, so value op -rest.
    op = atom.op if factor > 0 else ex.MIRRORED[atom.op]
    bound = _text(summed({}, terms, -factor), shift=op in ("<=", ">"))
    return Interval(values[0], hi=bound) if op in ("<", "<=") else Interval(values[0], lo=bound)


def _terms(expr: ex.Expr) -> Linear | None:
    """An integer expression as a sum of terms, each of the keys alone or without them; None if it is none."""
    if isinstance(expr, ex.Const):
        return {ex.ONE: int(expr.value)}
    if not _of_keys(expr):
        return {expr: 1}
    if isinstance(expr, ex.Apply) and expr.op in ("+", "-", "neg"):
        left = _terms(expr.args[0]) if len(expr.args) == 2 else {}
        right = _terms(expr.args[-1])
        if left is None or right is None:
            return None
        return summed(left, right, 1 if expr.op == "+" else -1)
    return {expr: 1} if side_of(expr) == "k" else None


def _text(terms: Linear, shift: int) -> ex.Expr:
    """The sum plus `shift` as an expression, what is subtracted behind what is added, the constant last."""
    terms = summed(terms, {ex.ONE: 1}, shift)
    ordered = sorted(terms.items(), key=lambda item: (item[0] == ex.ONE, item[1] < 0))
    total: ex.Expr = ex.ZERO
    for term, factor in ordered:
        total = ex.make("+" if factor > 0 else "-", total, ex.make("*", ex.number(abs(factor)), term))
    return total


def _joined(exprs: Iterable[ex.Expr]) -> ex.Expr:
    return reduce(lambda a, b: ex.make("&", a, b), exprs)


def _of_keys(expr: ex.Expr) -> bool:
    return "k_idx" in ex.free_symbols(expr)
