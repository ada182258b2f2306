"""What the tensors of a score rule learn: gradients of operands, from the derivative rows of expressions.

With ds the gradient of a changed score, what is read of an operand for that pair of row and key has the
gradient ds * (derivative of the rule by that read), and an element of the operand the sum of those of all
pairs that read it. Where the read's index goes along one side of the tiles alone, or along neither, a kernel
sums over the other side and leaves a number for each row, or for each key, of a head: of one order, and no
more than an LSE takes. Where it follows the distance of row and key alone, as a relative bias does, blocks of
pairs are summed along their diagonals, a number for each distance. Else pairs add to the operand's gradient
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flashgen.spec import expr as ex
from flashgen.spec.expr import Expr, Load, Symbol
from flashgen.spec.rule import Rule
from flashgen.spec.spans import SIDES, side_of

_SUMS = {"q": "rows", "k": "keys", "diagonal": "diagonals"}


_VARYING = frozenset().union(*SIDES.values())
_SIGNS = {"+": (1, 1), "-": (1, -1), "neg": (-1,)}


@dataclass(frozen=True, slots=True)
class Share:
    """What one read of an operand has of its gradient."""

    operand: str
    load: Load
    name: str
    """`bias` of what pairs add to an operand's gradient; `bias__rows`, `__keys` or `__diagonals` of sums."""
    side: str
    """`q`, `k` or `diagonal` of sums for each row, key or distance; `pair`. What a whole tile shares is
    summed for each row."""
    slope: Expr
    """The derivative of the rule by the read."""
    shared_by: tuple[str, ...] = ()
    """Of pairs: what one element serves several of, `batch` (sequences), `head` (heads) or `pair` (pairs of
    one head). Of none, nothing is added up."""

    def any_order(self, batch: int, heads: int) -> bool:
        """Whether several programs add to one element, in the order in which they come.

        Args:
            batch, heads: of a call.
        """
        several = {"batch": batch > 1, "head": heads > 1, "pair": True}
        return self.side == "diagonal" or any(several[each] for each in self.shared_by)


@lru_cache(maxsize=1024)
def shares(rule: Rule | None, operands: tuple[str, ...]) -> tuple[Share, ...]:
    """What the reads of some operands have of their gradients, in reading order; nothing of a read that the
    rule does not follow (`floor(table[head])`), and nothing of operands that are not floats.
    """
    if rule is None or not operands:
        return ()
    simple = ex.simplify(rule.expr)
    slopes = {
        load: ex.derivative(simple, load)
        for load in ex.loads(simple)
        if load.operand in operands and rule.types[load.operand] == "float"
    }
    reads = [(load, _side(load), slope) for load, slope in slopes.items() if slope != ex.ZERO]
    found = []
    for load, side, slope in reads:
        alike = [each for each, where, _ in reads if (each.operand, where) == (load.operand, side)]
        number = f"_{alike.index(load)}" if len(alike) > 1 else ""
        if side == "pair":
            shared_by = _shared_by(load) if len(alike) == 1 else ("pair",)
            found.append(Share(load.operand, load, load.operand, side, slope, shared_by))
        else:
            name = f"{load.operand}__{_SUMS[side]}{number}"
            found.append(Share(load.operand, load, name, side, slope))
    return tuple(found)


def _side(load: Load) -> str:
    if not ex.free_symbols(load) & _VARYING:
        return "q"
    return side_of(load) or ("diagonal" if _follows_distance(load) else "pair")


def _follows_distance(expr: Expr) -> bool:
    """Whether an expression stays the same where row and key both go on by as much."""
    steps = _steps(expr)
    if steps is not None:
        return sum(steps) == 0
    return all(map(_follows_distance, ex.children(expr)))


def _steps(expr: Expr) -> tuple[int, int] | None:
    """How far a sum goes with each row and with each key; None for what is no sum of multiples."""
    if not ex.free_symbols(expr) & _VARYING:
        return 0, 0
    if isinstance(expr, Symbol):
        return (0, 1) if expr.name in SIDES["k"] else (1, 0)
    if not isinstance(expr, ex.Apply):
        return None
    factors: tuple[Any, ...] = _SIGNS.get(expr.op, ())
    if expr.op == "*":
        one, other = map(ex.constant, expr.args)
        factors = (0, one) if isinstance(one, int) else (other, 0) if isinstance(other, int) else ()
    rows = keys = 0
    for factor, part in zip(factors, expr.args, strict=False):
        steps = _steps(part)
        if steps is None:
            return None
        rows, keys = rows + factor * steps[0], keys + factor * steps[1]
    return (rows, keys) if factors else None


def _shared_by(load: Load) -> tuple[str, ...]:
    """See `Share.shared_by`: what is an index itself tells elements apart."""
    missing = tuple(axis for axis in ("batch", "head") if Symbol(axis) not in load.indices)
    apart = all(any(Symbol(each) in load.indices for each in side) for side in SIDES.values())
    return missing if apart else (*missing, "pair")
