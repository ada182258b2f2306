"""What a mask says about whole tiles of queries × keys.

`classify` answers for one tile of any mask, by interval arithmetic: EMPTY, PARTIAL or FULL.

`ranges` solves a mask once, symbolically: for a tile of queries, the few ranges of keys that can hold kept
pairs, each with the part in which every pair is kept; or the same for a tile of keys. The kernel visits only
these. What it cannot solve, such as ids of documents, makes a range wider and its full part empty,
never wrong.

`lists` says, of masks that no ranges express, how all tiles within the ranges are classified: the same
interval arithmetic as `classify`, in symbols. A kernel walks the lists that are made with it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, TypeAlias

from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec import interval
from flashgen.spec.expr import Apply, Const, Expr, Load, Symbol, make
from flashgen.spec.interval import Interval
from flashgen.spec.rule import Rule
from flashgen.spec.spans import Gather, Spans, side_of

MAX_RANGES = 3
"""Most ranges of a mask. With more alternatives they become one range around all, with no full part, and the
mask is one for lists."""
MAX_CLAUSES = 64
"""Most alternatives a mask is expanded to before it counts as unsolvable."""


class TileClass(enum.Enum):
    """Which pairs of a tile a mask keeps: none, some (or unknown), all."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


def classify(expr: Expr, q: tuple[int, int], k: tuple[int, int], env: Mapping[str, Any]) -> TileClass:
    """What a mask keeps of one tile.

    EMPTY and FULL are certain; PARTIAL also means that interval arithmetic cannot tell.

    Args:
        q: first and last `q_idx`, both included.
        k: first and last `k_idx`, both included.
        env: numbers or intervals for the other symbols and the parameters, tables for operands, as
            `expr.bounds` takes them; q_len and k_len are needed for anything in `q_pos`.
    """
    tile = {**env, "q_idx": Interval(*q), "k_idx": Interval(*k)}
    tile.pop("q_pos", None)
    verdict = interval.truth(ex.bounds(expr, tile))
    if verdict == interval.UNKNOWN:
        return TileClass.PARTIAL
    return TileClass.FULL if verdict == interval.TRUE else TileClass.EMPTY


@dataclass(frozen=True, slots=True)
class Range:
    """Half-open range of keys for a tile of queries (or of queries for a tile of keys), as expressions.

    Rows of the tile run from the symbol `first` to `last`, included. Outside [lo, hi) every row drops every
    key; inside [full_lo, full_hi) every row keeps every key. None is no limit on that side. Ranges may reach
    beyond the sequence, be empty (lo >= hi) and overlap each other: `resolve` shows what to do about it.
    A `last` past the last real row is allowed where bounds read nothing there; it makes ranges wider and full
    parts narrower.
    """

    lo: Expr | None = None
    hi: Expr | None = None
    full_lo: Expr | None = None
    full_hi: Expr | None = None
    has_full: bool = True
    """False if nothing is known to be kept throughout; then full_lo and full_hi mean nothing."""

    def __str__(self) -> str:
        def text(lo: Expr | None, hi: Expr | None) -> str:
            shown = ["" if side is None else ex.to_text(side) for side in (lo, hi)]
            return f"[{shown[0]} : {shown[1]})"

        full = text(self.full_lo, self.full_hi) if self.has_full else "none"
        return f"{text(self.lo, self.hi)} full {full}"


EVERYTHING = Range(has_full=False)


@lru_cache(maxsize=1024)
def ranges(rule: Rule, axis: str) -> tuple[Range, ...]:
    """At most `MAX_RANGES` ranges that hold every pair a mask can keep; none if it keeps nothing.

    The mask is brought into disjunctive normal form, one range for each alternative, and alternatives that
    share a side are joined. An atom is solved if it is an integer comparison, linear in q_idx and k_idx with
    a coefficient of 1 or -1 for the one on `axis`, or free of the one on `axis`. Everything in the bounds is
    the same for the whole tile: `first`, `last`, q_len, k_len, batch, head, kv_head, parameters, and operands
    read by those. What rows read of an operand that is declared ascending is solved by what the first and the
    last of them read.

    Args:
        rule: a mask.
        axis: `k` for ranges of keys, with a tile of queries from `first` to `last` in units of q_idx;
            `q` for ranges of queries, with a tile of keys.
    """
    if axis not in ("q", "k"):
        raise InvalidArgument(f"{axis=} must be 'q' or 'k'")
    found = _alternatives(rule, axis)
    if found is None:
        return (EVERYTHING,)
    if len(found) > MAX_RANGES:
        return (_hull(found),)
    return tuple(sorted(found, key=lambda each: each.lo is not None))


@dataclass(frozen=True, slots=True)
class Lists:
    """How the tiles of a mask are classified where they are listed."""

    within: Range
    """What holds every needed tile; nothing is known of its full part."""
    some: Expr
    """Whether any pair of a tile may be kept: else it is EMPTY. Over q_first, q_last, k_first and k_last, and
    what is gathered."""
    every: Expr
    """Whether all its pairs are kept: it is FULL."""
    gathers: tuple[Gather, ...]
    """What of the operands has to be read for these two."""
    axis: str = "k"
    """What a list is of: blocks of keys for a tile of queries, or with `q` the other way round."""

    @property
    def across(self) -> str:
        """The side of the tile that has a list."""
        return "q" if self.axis == "k" else "k"

    def of_tile(
        self,
        env: Mapping[str, Any],
        ends: tuple[int, int],
        block: int,
        length: int,
        read: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> tuple[list[int], list[int]]:
        """The blocks along `axis` that hold PARTIAL and FULL tiles of some queries (of some keys); generated
        kernels do the same.

        A block that reaches past the end is not full, and where no block is needed the first one counts as
        partial: the walk has no case without blocks.

        Args:
            env: numbers for the other symbols and the parameters, tables for operands.
            ends: first and last index of the tile, both included.
            block: size of a block.
            length: of the sequence along `axis`.
            read: `of_blocks` of the same, where many tiles are asked for.
        """
        first, last = ends
        read = self.of_blocks(env, block, length) if read is None else read
        tile = {**env, "first": first, "last": last}
        tile |= {f"{self.across}_first": first, f"{self.across}_last": last}
        ((lo, _, _, hi),) = resolve((self.within,), tile, block, length)
        tile |= self._gathered(self.across, first, last, env)
        partial, full = [], []
        for start in range(lo, hi, block):
            end = min(start + block, length) - 1
            found = {**tile, f"{self.axis}_first": start, f"{self.axis}_last": end, **read[start]}
            if start + block <= length and ex.evaluate(self.every, found):
                full.append(start // block)
            elif ex.evaluate(self.some, found):
                partial.append(start // block)
        return partial if partial or full else [0], full

    def of_blocks(self, env: Mapping[str, Any], block: int, length: int) -> dict[int, dict[str, Any]]:
        """What is gathered of each block along `axis`, by its first index."""
        starts = range(0, length, block)
        return {
            start: self._gathered(self.axis, start, min(start + block, length) - 1, env) for start in starts
        }

    def _gathered(self, side: str, first: int, last: int, env: Mapping[str, Any]) -> dict[str, Any]:
        ends: dict[str, Any] = {}
        for gather in self.gathers:
            if gather.side == side:
                index = f"{side}_idx"
                values = [ex.evaluate(gather.load, {**env, index: i}) for i in range(first, last + 1)]
                ends |= {gather.least.name: min(values), gather.most.name: max(values)}
        return ends


@lru_cache(maxsize=1024)
def lists(rule: Rule, axis: str = "k") -> Lists | None:
    """How a mask's tiles are listed; None where ranges say all that can be said of tiles.

    A mask needs lists if it has too many alternatives for ranges, or asks what ranges cannot solve and
    interval arithmetic can: it compares integers, such as what it reads of the query with what it reads of
    the key, or reads a truth value of blocks of both. A remainder is no reason: a tile holds all remainders
    of what varies within it, and would be listed whole. Neither is a truth value that is read of each key.

    Args:
        axis: as for `ranges`; what is solved along one may be none along the other (`2 * q_idx >= k_idx`).
    """
    found = _alternatives(rule, axis)
    solver = _Solver(rule, axis)
    text = ex.substitute(rule.expr, {Symbol("q_pos"): ex.Q_POS})
    many = found is None or len(found) > MAX_RANGES
    if found == [] or not (many or any(map(solver.only_lists_tell, ex.walk(text)))):
        return None
    spans = Spans(rule.types)
    span = spans.of(rule.expr)
    within = EVERYTHING if found is None else _hull(found)
    return Lists(within, span.hi, span.lo, tuple(spans.gathers.values()), axis)


@lru_cache(maxsize=1024)
def never_negative(rule: Rule, distance: Expr) -> bool:
    """Whether an integer of positions is known to be 0 or more at every pair a mask keeps: `q_pos - k_idx`
    under a causal mask, alone or joined with any other by `&`.

    Args:
        rule: a mask; nothing is known of its parameters, so that a window of 0 keys ahead does not tell.
        distance: linear in q_idx, q_pos and k_idx, else nothing is known of it.
    """
    solver = _Solver(rule, "k")
    expr, wanted = (ex.substitute(each, {Symbol("q_pos"): ex.Q_POS}) for each in (rule.expr, distance))
    linear, clauses = solver.linear(wanted), solver.clauses(expr, True)
    if linear is None or clauses is None:
        return False
    return all(any(solver.tells(atom, linear) for atom in clause) for clause in clauses)


def _alternatives(rule: Rule, axis: str) -> list[Range] | None:
    """A range for each alternative of the mask, joined where that is exact; None if there are too many."""
    solver = _Solver(rule, axis)
    clauses = solver.clauses(ex.substitute(rule.expr, {Symbol("q_pos"): ex.Q_POS}), True)
    if clauses is None:
        return None
    return _merged([reduce(_intersection, map(solver.atom, clause), Range()) for clause in clauses])


def _hull(found: Sequence[Range]) -> Range:
    """One range around all."""
    lo, hi = _outer("min", [each.lo for each in found]), _outer("max", [each.hi for each in found])
    return Range(lo, hi, has_full=False)


def resolve(
    ranges: Sequence[Range], env: Mapping[str, Any], block: int, length: int
) -> tuple[tuple[int, int, int, int], ...]:
    """The ranges of one tile as numbers; generated kernels do this same arithmetic.

    Returns (lo, full_lo, full_hi, hi) for each range, lo <= full_lo <= full_hi <= hi, all multiples of
    `block`, none overlapping. The kernel masks elements in [lo, full_lo) and [full_hi, hi), and none in
    between. `hi` may be past `length` by less than a block; the tile that reaches past it is never full.

    1. Clamp all four to [0, length], which also spares dividing negative numbers.
    2. Align lo down and hi up, full_lo up and full_hi down to whole tiles; where hi <= lo before that, the
       range is empty and hi becomes the aligned lo.
    3. Order by lo: the first range of `ranges` already is first if its lo is None.
    4. Start each range no earlier than the furthest end before it, and bring full_lo and full_hi between lo
       and hi. What is skipped has been visited: the range that ends there starts at or before this one.

    Args:
        ranges: from `ranges`.
        env: numbers for first, last, q_len, k_len and whatever else the bounds read.
        block: tile size along the axis.
        length: length of the sequence along the axis.
    """

    def clamped(bound: Expr | None, default: int) -> int:
        return default if bound is None else max(0, min(ex.evaluate(bound, env), length))

    tiles = []
    for each in ranges:
        lo, hi = clamped(each.lo, 0), clamped(each.hi, length)
        empty = hi <= lo
        lo = lo // block * block
        hi = lo if empty else -(-hi // block) * block
        full_lo = full_hi = lo
        if each.has_full:
            full_lo = -(-clamped(each.full_lo, 0) // block) * block
            full_hi = clamped(each.full_hi, length) // block * block
        tiles.append((lo, full_lo, full_hi, hi))
    tiles.sort(key=lambda tile: tile[0])

    disjoint = []
    end = 0
    for lo, full_lo, full_hi, hi in tiles:
        lo = max(lo, end)
        hi = end = max(hi, lo)
        full_lo = min(max(full_lo, lo), hi)
        full_hi = min(max(full_hi, full_lo), hi)
        disjoint.append((lo, full_lo, full_hi, hi))
    return tuple(disjoint)


def visited(
    rule: Rule, env: Mapping[str, Any], block_m: int, block_n: int
) -> Iterator[tuple[list[int], list[int]]]:
    """The blocks of keys that a kernel visits for each block of queries: the numbers of those to which it
    applies the element mask, and of those kept whole, both ascending.

    Args:
        rule: a mask.
        env: numbers for q_len, k_len, batch, head, kv_head and the parameters, tables for operands.
        block_m: queries of a block, the last one may have fewer.
        block_n: keys of a block.
    """
    q_len, k_len = env["q_len"], env["k_len"]
    listed, solved = lists(rule), ranges(rule, "k")
    read = {} if listed is None else listed.of_blocks(env, block_n, k_len)
    for first in range(0, q_len, block_m):
        last = min(first + block_m, q_len) - 1
        if listed is not None:
            yield listed.of_tile(env, (first, last), block_n, k_len, read)
            continue
        partial: list[int] = []
        full: list[int] = []
        for parts in resolve(solved, {**env, "first": first, "last": last}, block_n, k_len):
            lo, full_lo, full_hi, hi = (each // block_n for each in parts)
            partial += [*range(lo, full_lo), *range(full_hi, hi)]
            full += range(full_lo, full_hi)
        yield partial, full


# Solving

Clause: TypeAlias = tuple[Expr, ...]
"""Atoms that must all hold; no atom is & or |."""
Linear: TypeAlias = dict[Expr, int]
"""A sum of terms with integer factors; the constant is the factor of `ex.ONE`."""

FIRST, LAST = Symbol("first"), Symbol("last")
_RISES = {"+": (), "-": (1,), "min": (), "max": (), "//": (1,)}
"""Operations that never fall where their arguments never do, and which of these must not differ by row."""


@dataclass(frozen=True, slots=True)
class _Solver:
    rule: Rule
    axis: str

    @property
    def along(self) -> Symbol:
        """The index that the ranges are of."""
        return Symbol(f"{self.axis}_idx")

    @property
    def across(self) -> Symbol:
        """The index that runs from first to last."""
        return Symbol("k_idx" if self.axis == "q" else "q_idx")

    def clauses(self, expr: Expr, wanted: bool) -> list[Clause] | None:
        """Alternatives of which one holds exactly where `expr` is `wanted`; None if there are too many."""
        if isinstance(expr, Const):
            return [()] if expr.value is wanted else []
        if isinstance(expr, Apply):
            if expr.op == "~":
                return self.clauses(expr.args[0], not wanted)
            if expr.op in ("&", "|"):
                left, right = (self.clauses(arg, wanted) for arg in expr.args)
                return _both(left, right) if (expr.op == "&") == wanted else _either(left, right)
            if expr.op == "where":
                condition, then, otherwise = expr.args
                return _either(
                    _both(self.clauses(condition, True), self.clauses(then, wanted)),
                    _both(self.clauses(condition, False), self.clauses(otherwise, wanted)),
                )
            linear = self.compared(expr)
            if linear is not None:
                op = expr.op if wanted else ex.OPPOSITE[expr.op]
                if op == "!=" and self.along in linear:
                    return [(Apply("<", expr.args),), (Apply(">", expr.args),)]
                return [(Apply(op, expr.args),)]
        return [(expr if wanted else make("~", expr),)]

    def compared(self, atom: Expr) -> Linear | None:
        """For a comparison of linear integer expressions, its left side minus its right side."""
        if not isinstance(atom, Apply) or atom.op not in ex.OPPOSITE:
            return None
        left, right = (self.linear(arg) for arg in atom.args)
        return None if left is None or right is None else summed(left, right, -1)

    def linear(self, expr: Expr) -> Linear | None:
        """`expr` as a sum; its terms are q_idx, k_idx and integer expressions without them."""
        if ex.result_type(expr, self.rule.types) != "int":
            return None
        if isinstance(expr, Const):
            return {ex.ONE: int(expr.value)} if expr.value else {}
        if expr in (self.along, self.across):
            return {expr: 1}
        if isinstance(expr, Apply) and expr.op in ("+", "-", "*", "neg"):
            left = self.linear(expr.args[0]) if len(expr.args) == 2 else {}
            right = self.linear(expr.args[-1])
            if left is not None and right is not None:
                if expr.op != "*":
                    return summed(left, right, 1 if expr.op == "+" else -1)
                for number, other in ((left, right), (right, left)):
                    if number.keys() <= {ex.ONE}:
                        return summed({}, other, number.get(ex.ONE, 0))
        return {expr: 1} if self.is_uniform(expr) or self.is_ascending_read(expr) else None

    def is_ascending_read(self, expr: Expr) -> bool:
        """Whether `expr` reads what never falls from one row of the tile to the next."""
        declared = {operand.name for operand in self.rule.operands if operand.ascending}
        if not isinstance(expr, Load) or expr.operand not in declared:
            return False
        *others, last = expr.indices
        return all(map(self.is_uniform, others)) and self.never_falls(last)

    def never_falls(self, index: Expr) -> bool:
        """Whether an integer is known not to fall from one row of the tile to the next."""
        if self.is_uniform(index) or index == self.across or self.is_ascending_read(index):
            return True
        if not isinstance(index, Apply) or index.op not in _RISES:
            return False
        fixed = _RISES[index.op]
        if index.op == "//" and (ex.constant(index.args[1]) or 0) <= 0:
            return False
        return all(
            self.is_uniform(arg) if i in fixed else self.never_falls(arg) for i, arg in enumerate(index.args)
        )

    def is_uniform(self, expr: Expr) -> bool:
        """Whether `expr` is the same for all pairs of a tile."""
        return not ex.free_symbols(expr) & {"q_idx", "k_idx"}

    def atom(self, atom: Expr) -> Range:
        """The range in which one atom holds for some row of the tile, and for all."""
        linear = self.compared(atom)
        if linear is None:
            return self.switched(atom, atom) if self.is_uniform(atom) else EVERYTHING
        assert isinstance(atom, Apply)
        factor = linear.pop(self.along, 0)
        if factor == 0:
            return self.condition(atom.op, linear)
        if abs(factor) != 1:
            return EVERYTHING
        # along + rest op 0, so along op -rest; of -rest, the smallest and the largest over the tile's rows.
        op = atom.op if factor > 0 else ex.MIRRORED[atom.op]
        least, most = self.extremes(summed({}, linear, -factor))
        if op in (">", ">="):
            shift = op == ">"
            return Range(lo=_text(least, shift), full_lo=_text(most, shift))
        if op in ("<", "<="):
            shift = op == "<="
            return Range(hi=_text(most, shift), full_hi=_text(least, shift))
        return Range(_text(least), _text(most, 1), _text(most), _text(least, 1))

    def tells(self, atom: Expr, linear: Linear) -> bool:
        """Whether a sum is 0 or more wherever an atom holds, for both differ by a number alone."""
        compared = self.compared(atom)
        if compared is None:
            return False
        assert isinstance(atom, Apply)
        for op, side in ((atom.op, compared), (ex.MIRRORED[atom.op], summed({}, compared, -1))):
            beyond = summed(side, linear, -1)  # side = linear + beyond
            if op in (">", ">=", "==") and beyond.keys() <= {ex.ONE}:
                return beyond.get(ex.ONE, 0) <= (op == ">")
        return False

    def only_lists_tell(self, expr: Expr) -> bool:
        """Whether an expression is not solved, but may be told of a tile from the ends of its sides."""
        if self.is_uniform(expr):
            return False
        if isinstance(expr, Load) and not side_of(expr):
            return any(isinstance(node, Apply) and node.op == "//" for node in ex.walk(expr))
        if not isinstance(expr, Apply) or expr.op not in ex.OPPOSITE:
            return False
        if any(ex.result_type(arg, self.rule.types) != "int" for arg in expr.args):
            return False
        linear = self.compared(expr)
        if linear is not None and abs(linear.get(self.along, 0)) <= 1:
            return False
        return not any(isinstance(node, Apply) and node.op == "%" for node in ex.walk(expr))

    def extremes(self, linear: Linear) -> tuple[Linear, Linear]:
        """The smallest and the largest value of a sum without `along`, over the rows of the tile; bounds of
        these where several terms differ by row.
        """
        least, most = (
            {self.at(low if number > 0 else high, term): number for term, number in linear.items()}
            for low, high in ((FIRST, LAST), (LAST, FIRST))
        )
        return least, most

    def at(self, row: Symbol, term: Expr) -> Expr:
        """A term of one row of the tile."""
        return ex.substitute(term, {self.across: row})

    def condition(self, op: str, linear: Linear) -> Range:
        """The range of an atom without `along`: all or nothing, as `linear op 0` holds for a row or not."""
        least, most = self.extremes(linear)
        if op in ("<", "<="):
            return self.switched(_against_zero(op, least), _against_zero(op, most))
        if op in (">", ">="):
            return self.switched(_against_zero(op, most), _against_zero(op, least))
        inside = make("&", _against_zero("<=", least), _against_zero(">=", most))
        pinned = make("&", _against_zero(">=", least), _against_zero("<=", most))
        if op == "==":
            return self.switched(inside, pinned)
        return self.switched(make("~", pinned), make("~", inside))

    def switched(self, some: Expr, all_: Expr) -> Range:
        """Everything if the condition `some` holds, full if `all_` does: a start of 0, or else of the end."""
        end = Symbol(f"{self.axis}_len")

        def start(condition: Expr) -> Expr | None:
            return None if condition == ex.TRUE else make("where", condition, ex.ZERO, end)

        return Range(lo=start(some), full_lo=start(all_))


def _either(left: list[Clause] | None, right: list[Clause] | None) -> list[Clause] | None:
    return None if left is None or right is None else _absorbed([*left, *right])


def _both(left: list[Clause] | None, right: list[Clause] | None) -> list[Clause] | None:
    if left == [] or right == []:
        return []
    if left is None or right is None:
        return None
    return _absorbed([tuple(dict.fromkeys((*a, *b))) for a in left for b in right])


def _absorbed(clauses: list[Clause]) -> list[Clause] | None:
    """`clauses` without those that ask for more than another one does."""
    kept: list[Clause] = []
    for clause in sorted(dict.fromkeys(clauses), key=len):
        if not any(set(other) <= set(clause) for other in kept):
            kept.append(clause)
    kept.sort(key=clauses.index)
    return kept if len(kept) <= MAX_CLAUSES else None


def summed(left: Linear, right: Linear, factor: int) -> Linear:
    """left + factor * right, without terms of factor 0."""
    total = dict(left)
    for term, number in right.items():
        total[term] = total.get(term, 0) + factor * number
    return {term: number for term, number in total.items() if number}


def _text(linear: Linear, shift: int = 0) -> Expr:
    """The sum plus `shift` as an expression: the tile's row, then lengths, the rest, and the constant."""

    def place(item: tuple[Expr, int]) -> tuple[bool, ...]:
        term, factor = item
        return (term == ex.ONE, term not in (FIRST, LAST), not isinstance(term, Symbol), factor < 0)

    total: Expr = ex.ZERO
    for term, factor in sorted(summed(linear, {ex.ONE: 1}, shift).items(), key=place):
        total = make("+" if factor > 0 else "-", total, make("*", ex.number(abs(factor)), term))
    return total


def _against_zero(op: str, linear: Linear) -> Expr:
    """`linear op 0`, with what is subtracted brought to the other side."""
    return make(
        op,
        _text({term: number for term, number in linear.items() if number > 0}),
        _text({term: -number for term, number in linear.items() if number < 0}),
    )


def tighter(op: str, bounds: Sequence[Expr | None]) -> Expr | None:
    """The tighter of some bounds, by `max` for lower and `min` for upper ones; None is no bound."""
    some = [bound for bound in dict.fromkeys(bounds) if bound is not None]
    return reduce(lambda a, b: make(op, a, b), some) if some else None


def _outer(op: str, bounds: Sequence[Expr | None]) -> Expr | None:
    """The wider of some bounds, by `min` for lower and `max` for upper ones; None is no bound."""
    return None if None in bounds else tighter(op, bounds)


def _intersection(a: Range, b: Range) -> Range:
    lo, hi = tighter("max", (a.lo, b.lo)), tighter("min", (a.hi, b.hi))
    if not (a.has_full and b.has_full):
        return Range(lo, hi, has_full=False)
    return Range(lo, hi, tighter("max", (a.full_lo, b.full_lo)), tighter("min", (a.full_hi, b.full_hi)))


def _union(a: Range, b: Range) -> Range | None:
    """Both ranges as one, where that is exact: they start or end alike, and so do their full parts."""
    comparable = a.has_full and b.has_full
    if a.lo == b.lo and (not comparable or a.full_lo == b.full_lo):
        lo, hi = a.lo, _outer("max", (a.hi, b.hi))
    elif a.hi == b.hi and (not comparable or a.full_hi == b.full_hi):
        lo, hi = _outer("min", (a.lo, b.lo)), a.hi
    else:
        return None
    if not comparable:
        full = a if a.has_full else b
        return Range(lo, hi, full.full_lo, full.full_hi, full.has_full)
    if a.lo == b.lo and a.full_lo == b.full_lo:
        return Range(lo, hi, a.full_lo, _outer("max", (a.full_hi, b.full_hi)))
    return Range(lo, hi, _outer("min", (a.full_lo, b.full_lo)), a.full_hi)


def _merged(found: list[Range]) -> list[Range]:
    """The ranges with all pairs joined that `_union` can join."""
    for i, a in enumerate(found):
        for j in range(i + 1, len(found)):
            joined = _union(a, found[j])
            if joined is not None:
                return _merged([*found[:i], joined, *found[i + 1 : j], *found[j + 1 :]])
    return found
