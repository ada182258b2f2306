"""Interval arithmetic in symbols: what an expression can be over a tile, as expressions of the tile's ends.

`interval` computes with the numbers of one tile; here the ends stay expressions, so that a kernel can be
made of them: `q_pos >= k_idx` holds throughout a tile where `q_first + k_len - q_len >= k_last` does. Of
integers and truth values alone: the ends of a float would have to be opened by the rounding of the kernel's
own arithmetic, and so nothing is known of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import product

from flashgen.spec import expr as ex
from flashgen.spec.expr import FALSE, ONE, TRUE, ZERO, Apply, Expr, Load, Symbol, make

SIDES: Mapping[str, frozenset[str]] = {"q": frozenset({"q_idx", "q_pos"}), "k": frozenset({"k_idx"})}
"""The symbols that differ within a tile, by the side that they run along."""
_VARYING = frozenset().union(*SIDES.values())


@dataclass(frozen=True, slots=True)
class Span:
    """All values of an integer lie from `lo` to `hi`.

    Of a truth value `lo` says that it holds for every pair, and `hi` that it may hold for some.
    """

    lo: Expr
    hi: Expr
    known: Expr = TRUE
    """Where this is false, the ends mean nothing; a truth value's always mean something."""


UNKNOWN = Span(ZERO, ZERO, FALSE)


@dataclass(frozen=True, slots=True)
class Gather:
    """What one side of a tile reads of an operand: its least and its greatest stand for all of it."""

    load: Load
    side: str
    """`q` or `k`."""
    name: str
    """`ids__k`: two underscores, which no declared name has."""

    @property
    def least(self) -> Symbol:
        """Stands for the least value read; of truth values, for whether all are true."""
        return Symbol(f"{self.name}_least")

    @property
    def most(self) -> Symbol:
        """Stands for the greatest value read; of truth values, for whether any is true."""
        return Symbol(f"{self.name}_most")


def side_of(expr: Expr) -> str:
    """`q` or `k` for what differs along one side of a tile alone; empty for any other."""
    varying = ex.free_symbols(expr) & _VARYING
    return next((side for side, symbols in SIDES.items() if varying and varying <= symbols), "")


@dataclass(slots=True)
class Spans:
    """Reads the spans of a rule's expressions, and notes what has to be gathered for them."""

    types: Mapping[str, str]
    """Of parameters and operands, as `expr.result_type` takes them."""
    gathers: dict[Load, Gather] = field(default_factory=dict)

    def of(self, expr: Expr) -> Span:
        """The span of an expression over a tile from q_first to q_last and from k_first to k_last."""
        type_ = ex.result_type(expr, self.types)
        if type_ == "float":
            return UNKNOWN
        if not ex.free_symbols(expr) & _VARYING:
            return Span(expr, expr)
        span = self._varying(expr)
        return _truth(span) if type_ == "bool" else span

    def _varying(self, expr: Expr) -> Span:
        if isinstance(expr, Symbol):
            return self.of(ex.Q_POS) if expr.name == "q_pos" else _POSITIONS[expr.name]
        if isinstance(expr, Load):
            return self._load(expr)
        assert isinstance(expr, Apply)
        args = tuple(self.of(arg) for arg in expr.args)
        rule = SPANS[expr.op]
        if isinstance(rule, tuple):
            of_numbers, of_truths = rule
            rule = of_truths if ex.result_type(expr.args[-1], self.types) == "bool" else of_numbers
        return rule(*args)

    def _load(self, load: Load) -> Span:
        """Of what one side reads, its ends; of what both read together, the one element if it is one, and of
        truth values the four corners where there is nothing between them."""
        if side := side_of(load):
            if load not in self.gathers:
                stem = f"{load.operand}__{side}"
                count = sum(each.name.startswith(stem) for each in self.gathers.values())
                self.gathers[load] = Gather(load, side, f"{stem}{count}" if count else stem)
            gather = self.gathers[load]
            return Span(gather.least, gather.most)
        indices = tuple(map(self.of, load.indices))
        if self.types[load.operand] == "bool":
            near = (make("<=", make("-", each.hi, each.lo), ONE) for each in indices if each.lo != each.hi)
            ends = (dict.fromkeys((each.lo, each.hi)) for each in indices)
            corners = [Load(load.operand, where) for where in product(*ends)]
            return Span(_all(*corners), _any(*corners), _all(*(each.known for each in indices), *near))
        single = [make("==", each.lo, each.hi) for each in indices if each.lo != each.hi]
        element = Load(load.operand, tuple(each.lo for each in indices))
        return Span(element, element, _all(*(each.known for each in indices), *single))


def _joined(op: str) -> Callable[..., Expr]:
    """An operation on any number of arguments, each of them once."""
    return lambda *args: reduce(partial(make, op), dict.fromkeys(args))


_all, _any, _least, _most = map(_joined, ("&", "|", "min", "max"))
_POSITIONS = {f"{side}_idx": Span(Symbol(f"{side}_first"), Symbol(f"{side}_last")) for side in SIDES}


def _truth(a: Span) -> Span:
    """A truth value of which nothing may be known, with ends that mean something."""
    return Span(_all(a.known, a.lo), _any(make("~", a.known), a.hi))


def _negative(a: Span) -> Span:
    return Span(make("neg", a.hi), make("neg", a.lo), a.known)


def _add(a: Span, b: Span) -> Span:
    return Span(make("+", a.lo, b.lo), make("+", a.hi, b.hi), _all(a.known, b.known))


def _subtract(a: Span, b: Span) -> Span:
    return Span(make("-", a.lo, b.hi), make("-", a.hi, b.lo), _all(a.known, b.known))


def _multiply(a: Span, b: Span) -> Span:
    known = _all(a.known, b.known)
    for one, other in ((a, b), (b, a)):
        factor = ex.constant(one.lo) if one.lo == one.hi else None
        if factor is not None:
            ends = (make("*", one.lo, other.lo), make("*", one.lo, other.hi))
            return Span(*(ends if factor >= 0 else ends[::-1]), known)
    corners = [make("*", x, y) for x in dict.fromkeys((a.lo, a.hi)) for y in dict.fromkeys((b.lo, b.hi))]
    return Span(_least(*corners), _most(*corners), known)


def _divisor(a: Span, b: Span) -> tuple[Span, Expr]:
    """The divisor as a positive number, and whether it is one: of another nothing is known."""
    known = _all(a.known, b.known, make(">", b.lo, ZERO))
    return Span(make("max", b.lo, ONE), make("max", b.hi, ONE)), known


def _floor_divide(a: Span, b: Span) -> Span:
    by, known = _divisor(a, b)
    lo = _least(make("//", a.lo, by.lo), make("//", a.lo, by.hi))
    return Span(lo, _most(make("//", a.hi, by.lo), make("//", a.hi, by.hi)), known)


def _modulo(a: Span, b: Span) -> Span:
    by, known = _divisor(a, b)
    unbroken = make("==", make("//", a.lo, by.lo), make("//", a.hi, by.lo))
    if by.lo != by.hi:
        unbroken = make("&", make("==", by.lo, by.hi), unbroken)
    lo, hi = (make("%", end, by.lo) for end in (a.lo, a.hi))
    return Span(make("where", unbroken, lo, ZERO), make("where", unbroken, hi, by.hi), known)


def _minimum(a: Span, b: Span) -> Span:
    return Span(_least(a.lo, b.lo), _least(a.hi, b.hi), _all(a.known, b.known))


def _maximum(a: Span, b: Span) -> Span:
    return Span(_most(a.lo, b.lo), _most(a.hi, b.hi), _all(a.known, b.known))


def _absolute(a: Span) -> Span:
    return Span(_most(a.lo, make("neg", a.hi), ZERO), _most(make("neg", a.lo), a.hi), a.known)


def _not(a: Span) -> Span:
    return Span(make("~", a.hi), make("~", a.lo))


def _and(a: Span, b: Span) -> Span:
    return Span(_all(a.lo, b.lo), _all(a.hi, b.hi))


def _or(a: Span, b: Span) -> Span:
    return Span(_any(a.lo, b.lo), _any(a.hi, b.hi))


def _ordered(op: str, mirrored: bool) -> Callable[[Span, Span], Span]:
    """`<` and `<=`, and mirrored `>` and `>=`: certain at the ends that oppose, possible at the others."""

    def compared(a: Span, b: Span) -> Span:
        ends = ((a.lo, b.hi), (a.hi, b.lo)) if mirrored else ((a.hi, b.lo), (a.lo, b.hi))
        surely, maybe = (make(op, *pair) for pair in ends)
        return Span(surely, maybe, _all(a.known, b.known))

    return compared


def _equal(a: Span, b: Span) -> Span:
    surely = _all(make("==", a.lo, b.hi), make("==", a.hi, b.lo))
    return Span(surely, _all(make("<=", a.lo, b.hi), make("<=", b.lo, a.hi)), _all(a.known, b.known))


def _same(a: Span, b: Span) -> Span:
    """Equality of truth values."""
    return _or(_and(a, b), _and(_not(a), _not(b)))


def _where(condition: Span, a: Span, b: Span) -> Span:
    """Of numbers: the chosen one's ends, or both's."""

    def end(x: Expr, y: Expr, of_both: Expr) -> Expr:
        return make("where", condition.lo, x, make("where", condition.hi, of_both, y))

    known = _all(_any(make("~", condition.hi), a.known), _any(condition.lo, b.known))
    return Span(end(a.lo, b.lo, _least(a.lo, b.lo)), end(a.hi, b.hi, _most(a.hi, b.hi)), known)


def _where_of_truths(condition: Span, a: Span, b: Span) -> Span:
    """The chosen one; where neither is certain to be, what both say."""
    chosen = _or(_and(condition, a), _and(_not(condition), b))
    return Span(_any(chosen.lo, _all(a.lo, b.lo)), chosen.hi)


Rule = Callable[..., Span]
# fmt: off
SPANS: Mapping[str, Rule | tuple[Rule, Rule]] = {
    "==": (_equal, _same), "!=": (lambda a, b: _not(_truth(_equal(a, b))), lambda a, b: _not(_same(a, b))),
    "<": _ordered("<", False), "<=": _ordered("<=", False),
    ">": _ordered(">", True), ">=": _ordered(">=", True),
    "|": _or, "&": _and, "~": _not,
    "+": _add, "-": _subtract, "*": _multiply, "//": _floor_divide, "%": _modulo, "neg": _negative,
    "min": _minimum, "max": _maximum, "abs": _absolute, "where": (_where, _where_of_truths),
    "floor": lambda a: a,  # of an integer
}
# fmt: on
"""Of each operation that gives an integer or a truth value; two where it takes either, numbers first."""
