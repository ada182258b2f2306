"""Masks and score rules as lines of Triton: the same trees that the reference evaluates, printed."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashgen.codegen import arithmetic, conjuncts
from flashgen.codegen.abi import Arg, share_names
from flashgen.spec import expr as ex
from flashgen.spec import tiles
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.learned import Share, shares
from flashgen.spec.rule import Rule
from flashgen.spec.spans import side_of

# Functions that partials/helpers.jinja defines: libdevice's tanh does not exist in the interpreter, and
# Triton's integer division truncates where an expression's floors.
HELPERS = ("tanh", "floor_div", "floor_mod")

_CALLS = {
    "min": "tl.minimum",
    "max": "tl.maximum",
    "abs": "tl.abs",
    "where": "tl.where",
    "exp": "tl.exp",
    "exp2": "tl.exp2",
    "log": "tl.log",
    "log2": "tl.log2",
    "sqrt": "tl.sqrt",
    "floor": "tl.floor",
    "tanh": "tanh",
    "//": "floor_div",
    "%": "floor_mod",
}

BENDS = "tanh_of_quarter"
"""The tanh of a quarter of each score of a thread, which partials/warpgroup.jinja defines."""
_COSTLY = frozenset({"exp", "exp2", "log", "log2", "sqrt", "tanh"})
"""Functions that are evaluated once where a score rule and its derivative share them."""

_ROUNDS_DOWN = ("//", "%")
"""Operators that Triton rounds towards zero, which is the same where nothing is negative."""
_NOT_NEGATIVE = frozenset(ex.SYMBOLS) - {"q_pos", "score"} | {"q_first", "q_last", "k_first", "k_last"}

_PER_ELEMENT = {"q_idx", "k_idx", "q_pos", "score"}
_PER_BLOCK = {"q": {"k_first", "k_last"}, "k": {"q_first", "q_last"}}
"""Of what a tile of queries, or one of keys, walks."""
_ENDS = frozenset({"first", "last"})
"""Of a tile, or of a part of it that has bounds of its own: what is read there is read with them."""
_PARAM_TYPES = {"i32": "i32", "f32": "fp32"}
_OPERAND_TYPES = {
    "i1": "*i1",
    "u8": "*u8",
    "i8": "*i8",
    "i16": "*i16",
    "fp16": "*fp16",
    "bf16": "*bf16",
    "fp32": "*fp32",
    "i32": "*i32",
    "i64": "*i64",
}
_IN_BOUNDS = {
    frozenset({"q"}): "q_idx < q_len",
    frozenset({"k"}): "k_idx < k_len",
    frozenset({"q", "k"}): "(q_idx < q_len) & (k_idx < k_len)",
}


def _literal(value: int | float | bool) -> str:
    return 'float("inf")' if value == math.inf else repr(value)


def _by_end(load: ex.Load) -> str:
    """`first` or `last`, where a bound reads at an end of its tile."""
    return next(iter(ex.free_symbols(load) & _ENDS), "")


def is_uniform(expr: ex.Expr, tile: str = "q") -> bool:
    """Whether an expression has one value for a whole tile, and for all that it walks.

    Args:
        tile: what there is a tile of: `q`, or `k` where a tile of keys walks queries.
    """
    return not ex.free_symbols(expr) & (_PER_ELEMENT | _PER_BLOCK[tile])


def _not_negative(expr: ex.Expr) -> bool:
    """Whether an expression is known to be 0 or more wherever a kernel evaluates it."""
    if isinstance(expr, ex.Const | ex.Symbol):
        return isinstance(expr, ex.Const) or expr.name in _NOT_NEGATIVE
    if not isinstance(expr, ex.Apply) or expr.op not in ("+", "*", "//", "%", "min", "max"):
        return False
    return (any if expr.op == "max" else all)(map(_not_negative, expr.args))


def _truncates(node: ex.Apply) -> bool:
    """Whether a division may be Triton's own: of what is not negative, by a positive number."""
    return node.op in _ROUNDS_DOWN and _not_negative(node.args[0]) and (ex.constant(node.args[1]) or 0) > 0


def argument_name(kind: str, declared: str) -> str:
    """How the kernel calls a parameter or operand of a rule: `mask_left`, `score_cap`.

    Templates use no name with these beginnings, so a declared name can hide none of theirs. Names made from
    it have two underscores in a row, which no declared name has.
    """
    return f"{kind}_{declared}"


def rule_arguments(rule: Rule) -> tuple[tuple[Arg, ...], ...]:
    """A kernel's arguments for the parameters and operands of a rule, grouped by line of the signature."""
    groups = []
    if rule.params:
        names = ((argument_name(rule.kind, name), f"param.{name}", kind) for name, kind in rule.params)
        groups.append(tuple(Arg(name, source, _PARAM_TYPES[kind]) for name, source, kind in names))
    for operand in rule.operands:
        name, source = argument_name(rule.kind, operand.name), f"operand.{operand.name}"
        loads = [load for load in ex.loads(rule.expr) if load.operand == operand.name]
        strides = (
            Arg(f"{name}__stride_{axis}", f"{source}.stride.{axis}", "i32")
            for axis in range(operand.rank)
            if any(load.indices[axis] != ex.ZERO for load in loads)
        )
        groups.append((Arg(name, source, _OPERAND_TYPES[operand.dtype]), *strides))
    return tuple(groups)


def learned_arguments(spec: AttentionSpec, sides: tuple[str, ...]) -> tuple[tuple[Arg, ...], ...]:
    """A kernel's arguments for what the score rule learns, a line of the signature for each tensor.

    Args:
        sides: which of `Share.side` a kernel sums.
    """
    groups: dict[str, tuple[Arg, ...]] = {}
    for share in _shares_of(spec, sides):
        pointer, (source, *strides) = _gradient_name(share), share_names(share)
        read = [other.load.indices for other in _shares_of(spec, sides) if other.name == share.name]
        groups[source] = (
            Arg(pointer, source, "*fp32"),
            *(
                Arg(f"{pointer}__stride_{axis}", stride, "i32")
                for axis, stride in enumerate(strides)
                if any(indices[axis] != ex.ZERO for indices in read)
            ),
        )
    return tuple(groups.values())


def _shares_of(spec: AttentionSpec, sides: tuple[str, ...]) -> tuple[Share, ...]:
    return tuple(share for share in shares(spec.score_mod, spec.learned) if share.side in sides)


def _gradient_name(share: Share) -> str:
    """`d_score_bias`: no name of a template, nor of what a rule declares, begins so."""
    return f"d_{argument_name('score', share.name)}"


def _address(pointer: str, indices: tuple[str, ...]) -> str:
    """Address of one element (or a tile of them); the index is widened, since operands may be large.

    The first of an axis is where the pointer points: operands of one element along an axis are read so.
    """

    def wide(index: str) -> str:
        if index.isdecimal():
            return index
        return f"{index if index.isidentifier() else f'({index})'}.to(tl.int64)"

    strides = ((index, f"{pointer}__stride_{axis}") for axis, index in enumerate(indices) if index != "0")
    steps = (stride if index == "1" else f"{wide(index)} * {stride}" for index, stride in strides)
    return " + ".join([pointer, *steps])


@dataclass(frozen=True, slots=True)
class Printer:
    """Prints the expressions of one rule as Triton text, over the names the templates define."""

    rule: Rule
    exprs: tuple[ex.Expr, ...]
    """All that one kernel reads of it."""
    checked: bool = True
    """Whether rows and keys may lie past the ends of their sequences, where nothing must be read."""
    early: tuple[str, ...] = ("q",)
    """Sides of a tile, `q`, `k` or `pair`, whose reads are made by lines of their own (`side_lines`)."""
    tile: str = "q"
    """What there is a tile of, whose ends are called `first` and `last`; as for `is_uniform`."""
    bent: Mapping[str, ex.Expr] = field(default_factory=dict)
    """As `arithmetic.Factors.bent`."""

    @property
    def uniform(self) -> tuple[ex.Load, ...]:
        """Reads that a whole tile shares; they are made once, before the loops."""
        found = (load for e in self.exprs for load in ex.loads(e))
        return tuple(dict.fromkeys(load for load in found if self._is_shared(load) and not _by_end(load)))

    @property
    def symbols(self) -> frozenset[str]:
        """Names that what it prints uses; whether a row exists is asked of its index."""
        reads = (load for each in self.exprs for load in ex.loads(each))
        by_row = any(ex.free_symbols(load) & {"q_idx", "q_pos"} for load in reads)
        checks = {"q_idx"} if self.checked and by_row else set()
        return frozenset(checks).union(*map(ex.free_symbols, self.exprs))

    def __call__(self, expr: ex.Expr) -> str:
        """The text of an expression."""
        names = {name: argument_name(self.rule.kind, name) for name, _ in self.rule.params}
        names |= {f"{self.tile}_{end}": end for end in ("first", "last")}
        names |= arithmetic.FLOATS | arithmetic.HERE
        bent = ex.free_symbols(expr) & set(self.bent)
        names |= {name: f"{BENDS}({self(self.bent[name])})" for name in bent}
        style = ex.Style(names=names, calls=_CALLS, keeps=_truncates, load=self._load, literal=_literal)
        return ex.to_text(expr, style)

    def uniform_lines(self) -> tuple[str, ...]:
        """A line for each read that a whole tile shares."""
        lines = []
        for load in self.uniform:
            lines.append(f"{self._uniform_name(load)} = {self._load_of(load)}")
        return tuple(lines)

    def _load_of(self, load: ex.Load) -> str:
        """One element that exists."""
        address = _address(self._pointer(load), tuple(map(self, load.indices)))
        return f"tl.load({address}){self._widened(load)}"

    def bound_lines(self, bounds: Iterable[ex.Expr | None], known: Container[str] = ()) -> tuple[str, ...]:
        """A line for each read of a tile's bounds at its first row or its last, but for known ones."""
        found = (load for bound in bounds if bound is not None for load in ex.loads(bound) if _by_end(load))
        lines = (f"{self._bound_name(load)} = {self._load_of(load)}" for load in dict.fromkeys(found))
        return tuple(line for line in lines if line not in known)

    def _bound_name(self, load: ex.Load) -> str:
        """`mask_ends__first`, `mask_ends__last`, with a number where the rule reads it in several ways."""

        def of_row(each: ex.Load) -> ex.Expr:
            return ex.substitute(each, {ex.Symbol(end): ex.Symbol("q_idx") for end in _ENDS})

        found = (each for e in self.exprs for each in ex.loads(e))
        same = [of_row(each) for each in found if each.operand == load.operand and _by_end(each)]
        ways = list(dict.fromkeys(same))
        number = f"_{ways.index(of_row(load))}" if len(ways) > 1 else ""
        return f"{self._pointer(load)}__{_by_end(load)}{number}"

    def side_lines(self, side: str) -> tuple[str, ...]:
        """A line for each read along one side of a tile."""
        if side not in self.early:
            return ()
        lines = []
        for load in self._along(side):
            name, text, wider = self._side_name(load), self._element(load), self._widened(load)
            if side == "pair" and wider:  # an address of many terms is folded where nothing comes behind it
                lines += [f"{name} = {text.removesuffix(wider)}", f"{name} = {name}{wider}"]
            else:
                lines.append(f"{name} = {text}")
        return tuple(lines)

    def _along(self, side: str) -> tuple[ex.Load, ...]:
        """The reads along one side that no other read takes for its index."""
        found: dict[ex.Load, None] = {}
        rest = list(self.exprs)
        while rest:
            expr = rest.pop(0)
            if isinstance(expr, ex.Load) and self._side(expr) == side:
                found[expr] = None
            else:
                rest = [*ex.children(expr), *rest]
        return tuple(found)

    def _side(self, load: ex.Load) -> str:
        """`q`, `k`, `pair` for what both sides read together, or empty for what a whole tile shares."""
        return side_of(load) or ("" if self._is_shared(load) else "pair")

    def _is_shared(self, load: ex.Load) -> bool:
        return all(is_uniform(index, self.tile) for index in load.indices)

    def _side_name(self, load: ex.Load) -> str:
        side = self._side(load)
        same = [each for each in self._along(side) if each.operand == load.operand]
        return f"{self._pointer(load)}__{side}{f'_{same.index(load)}' if len(same) > 1 else ''}"

    def _pointer(self, load: ex.Load) -> str:
        return argument_name(self.rule.kind, load.operand)

    def _uniform_name(self, load: ex.Load) -> str:
        same = [each for each in self.uniform if each.operand == load.operand]
        return (
            f"{self._pointer(load)}__at_{same.index(load)}"
            if len(same) > 1
            else f"{self._pointer(load)}__here"
        )

    def _load(self, load: ex.Load, indices: tuple[str, ...]) -> str:
        if self._is_shared(load):
            return self._bound_name(load) if _by_end(load) else self._uniform_name(load)
        if (side := self._side(load)) in self.early and load in self._along(side):
            return self._side_name(load)
        return self._element(load, indices)

    def _element(self, load: ex.Load, indices: tuple[str, ...] = ()) -> str:
        """One element for each row, each key or each pair."""
        address = _address(self._pointer(load), indices or tuple(map(self, load.indices)))
        if not self.checked:
            return f"tl.load({address}){self._widened(load)}"
        symbols = {s for index in load.indices for s in ex.free_symbols(index)}
        sides = frozenset(s[0] for s in symbols & {"q_idx", "q_pos", "k_idx"})
        return f"tl.load({address}, mask={_IN_BOUNDS[sides]}, other=0){self._widened(load)}"

    def gradient_address(self, share: Share) -> str:
        """Of the elements of an operand's gradient that a read has a share in."""
        return _address(_gradient_name(share), tuple(map(self, share.load.indices)))

    def _widened(self, load: ex.Load) -> str:
        """Rules compute in float32: no 16-bit product is rounded, and the interpreter knows none of bf16."""
        dtype = next(operand.dtype for operand in self.rule.operands if operand.name == load.operand)
        return ".to(tl.float32)" if dtype in ("fp16", "bf16") else ""


def _terms(rule: Rule) -> dict[ex.Expr, ex.Symbol]:
    """What divides the positions of one side alone, and a name for each: evaluated once for the rows, and
    once for a block of keys, where a pair would divide again. What occurs more often is named before what it
    is a part of."""

    def divides(expr: ex.Expr) -> bool:
        operations = {node.op for node in ex.walk(expr) if isinstance(node, ex.Apply)}
        one_side = side_of(expr) and ex.result_type(expr, rule.types) == "int" and not ex.loads(expr)
        return bool(one_side and operations.intersection(_ROUNDS_DOWN))

    often = Counter(filter(divides, ex.walk(rule.expr)))
    found: dict[ex.Expr, None] = {}
    rest = [rule.expr]
    while rest:
        expr = rest.pop(0)
        if often[expr] and all(often[part] <= often[expr] for part in ex.walk(expr)):
            found[expr] = None
        elif not isinstance(expr, ex.Load):
            rest = [*ex.children(expr), *rest]
    names: dict[ex.Expr, ex.Symbol] = {}
    for side, word in (("q", "rows"), ("k", "keys")):
        alike = [each for each in found if side_of(each) == side]
        for i, each in enumerate(alike):
            names[each] = ex.Symbol(f"{rule.kind}__{word}{f'_{i}' if len(alike) > 1 else ''}")
    return names


def _term(text: Printer, expr: ex.Expr) -> str:
    """The text of such a term; the compiler does not know that a position has no sign."""
    if isinstance(expr, ex.Apply) and expr.op == "%" and _truncates(expr):
        divisor = ex.constant(expr.args[1])
        if isinstance(divisor, int) and divisor & (divisor - 1) == 0:
            inner = text(expr.args[0])
            return f"{inner if inner.isidentifier() else f'({inner})'} & {divisor - 1}"
    return text(expr)


def _bounds(each: tiles.Range) -> tuple[ex.Expr, ...]:
    return tuple(bound for bound in (each.lo, each.hi, each.full_lo, each.full_hi) if bound is not None)


def _helpers(*exprs: ex.Expr | None) -> tuple[str, ...]:
    """Helper functions the printed text calls."""
    nodes = (node for e in exprs if e is not None for node in ex.walk(e))
    used = {node.op for node in nodes if isinstance(node, ex.Apply) and not _truncates(node)}
    return tuple(sorted(_CALLS[op] for op in used if _CALLS.get(op) in HELPERS))


@dataclass(frozen=True, slots=True)
class RenderedRange:
    """A key range's bounds as text; None where the sequence itself is the bound."""

    suffix: str
    lo: str | None
    hi: str | None
    full_lo: str | None
    full_hi: str | None
    has_full: bool
    loads: tuple[str, ...]
    """Lines for what lo and hi read at the tile's first row and its last."""
    full_loads: tuple[str, ...]
    """The same of full_lo and full_hi, where these are asked for."""


@dataclass(frozen=True, slots=True)
class RenderedGather:
    """What one side of a tile reads, of which the least and the greatest are told."""

    name: str
    side: str
    """`q` or `k`."""
    text: str
    truth: bool
    """Whether it is of truth values."""


@dataclass(frozen=True, slots=True)
class RenderedLists:
    """How the blocks that a tile walks are classified, as the templates use it; see `tiles.Lists`."""

    within: RenderedRange
    some: tuple[str, ...]
    every: tuple[str, ...]
    gathers: tuple[RenderedGather, ...]
    uniform_loads: tuple[str, ...]
    pair_loads: tuple[str, ...]
    """Of what rows and keys read together, at the ends of tiles."""
    symbols: frozenset[str]
    helpers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RenderedBits:
    """An element mask of a range of keys, and of what is the same for every `period` keys, for templates that
    give each key a bit.
    """

    period: int
    """Blocks of a multiple of it are alike."""
    keep: tuple[str, ...]
    """As that of the mask, of all but the range."""
    key_terms: tuple[str, ...]
    row_loads: tuple[str, ...]
    begin: str
    """The name of the range's first key, of each row or of all; empty where that is 0."""
    end: str
    """The name of the key behind its last."""


@dataclass(frozen=True, slots=True)
class RenderedMask:
    """A mask as the templates use it: for a tile of rows that walks keys, or one of keys that walks rows. For
    the latter, rows and keys change places in what is said here.
    """

    keep: tuple[str, ...]
    """Element mask over q_idx (or q_pos) and k_idx, in lines of readable length."""
    ranges: tuple[RenderedRange, ...]
    wide_bounds: bool
    """Whether a bound reads an int64 operand."""
    uniform_loads: tuple[str, ...]
    row_loads: tuple[str, ...]
    """Of the rows alone, before the loops."""
    key_loads: tuple[str, ...]
    """Of a block's keys, and of its pairs, before its products: masks that are listed read nearly always."""
    key_terms: tuple[str, ...]
    """What the element mask asks of a block's keys alone and is worth a line."""
    symbols: frozenset[str]
    """Names the element mask, the reads before it and the bounds use: q_idx, q_pos, first, last, ..."""
    bound_symbols: frozenset[str]
    """Those of the bounds alone."""
    visit_symbols: frozenset[str]
    """Those of the bounds of what is visited, the full parts aside."""
    helpers: tuple[str, ...]
    lists: RenderedLists | None
    """In the place of ranges, where the mask needs them."""
    bits: RenderedBits | None = None
    """The element mask another way, where it is of that kind."""

    @property
    def differs_by_row(self) -> bool:
        """Whether which keys a row sees depends on the row."""
        return bool(self.bound_symbols & {"first", "last"})

    @property
    def reads_at_ends(self) -> bool:
        """Whether bounds read at the first row and the last one of their rows, so that both have to exist."""
        return any(each.loads or each.full_loads for each in self.ranges)

    @property
    def last_is_longest(self) -> bool:
        """Whether later rows see more keys, as under a causal mask."""
        return len(self.ranges) == 1 and self.ranges[0].lo is None and "last" in (self.ranges[0].hi or "")


@dataclass(frozen=True, slots=True)
class RenderedScore:
    """The score rule as the templates use it; rows and keys change places as in a `RenderedMask`."""

    text: str
    """The score that the rule gives, from `score`; empty when there is no rule."""
    folded: bool
    """What all scores are multiplied by goes into the exponent: the scale, where there is no rule and it is
    positive, or what `factors` says last."""
    uniform_loads: tuple[str, ...]
    row_loads: tuple[str, ...]
    symbols: frozenset[str]
    helpers: tuple[str, ...]
    pair_loads: tuple[str, ...] = ()
    """Of the pairs of a block of keys."""
    may_drop: bool = False
    """Whether it may give -inf, so that a row may have seen no key though no mask drops any: what floats a
    rule reads may be -inf, and its parameters are finite."""
    slope: str = ""
    """Its derivative by the score; empty where that is 1, or not wanted."""
    shared: tuple[str, ...] = ()
    """Lines for what rule and derivatives share."""
    factors: tuple[str, ...] = ()
    """Lines for what a whole tile is multiplied by, behind the uniform loads; they may take `scale`."""
    bends: bool = False
    """Whether `text` calls `BENDS`."""
    in_log2: bool = False
    """Whether `text` takes dot products and gives log2 units; otherwise it takes and gives natural units."""
    keys: str = ""
    """What distances, taken apart at a block's first key, have of each of its columns: a part of `text`, the
    same in all blocks. Empty where none is taken apart."""
    rows: str = ""
    """What they have of each row, (ROWS,): scores are what `text` gives less this."""
    learned: tuple[RenderedShare, ...] = ()
    """Of the operands whose gradients this tile sums: a tile of rows all that is not one of keys alone."""

    @property
    def by_diagonals(self) -> tuple[RenderedShare, ...]:
        """What is summed along the diagonals of blocks."""
        return tuple(share for share in self.learned if share.side == "diagonal")

    @property
    def by_tile(self) -> tuple[RenderedShare, ...]:
        """What a tile sums over all that it walks."""
        return tuple(share for share in self.learned if share.side in ("q", "k"))


@dataclass(frozen=True, slots=True)
class RenderedShare:
    """What a read of an operand has of its gradient, as the templates use it; see `learned.Share`."""

    pointer: str
    side: str
    """As `Share.side`."""
    address: str
    """Where pairs add; empty of sums."""
    slope: str
    """Of the rule by the read; empty where that is 1."""
    added: bool
    """Whether elements are shared, so that pairs have to add and not to store."""


_OTHER = {"k": "q", "q": "k"}


def render_mask(
    rule: Rule, may_list: bool = True, along: str = "k", apart: bool = False, both_ends: bool = False
) -> RenderedMask:
    """Element mask of a rule, and its key ranges or, where it may have them and needs them, its lists.

    Args:
        along: what a tile walks: `k`, or `q` for ranges or lists of queries.
        apart: whether what is read of each block has lines of its own even where nothing is listed.
        both_ends: whether what lies past the tile's own end is dropped, too, with `along` `q`.
    """
    lists = tiles.lists(rule, along) if may_list else None
    found = tiles.ranges(rule, along) if lists is None else ()
    bounds = [bound for each in found for bound in _bounds(each)]
    across = _OTHER[along]
    apart = apart or lists is not None
    early = ("q", "k", "pair") if apart else (across,)
    text, terms = Printer(rule, (rule.expr, *bounds), early=early), _terms(rule)
    ends = frozenset({"q", "k"}) if both_ends else frozenset({along})
    keep, limits, bits = _kept(rule, along, ends, text, terms)

    def lines_of(side: str) -> tuple[str, ...]:
        return tuple(
            f"{name.name} = {_term(text, each)}" for each, name in terms.items() if side_of(each) == side
        )

    before = text.side_lines(across) + lines_of(across)
    return RenderedMask(
        keep=_lines(keep),
        ranges=tuple(
            _rendered_range(text, each, f"_{i}" if len(found) > 1 else "") for i, each in enumerate(found)
        ),
        wide_bounds=_is_wide(rule, bounds if lists is None else _bounds(lists.within)),
        uniform_loads=text.uniform_lines(),
        row_loads=before + limits,
        key_loads=text.side_lines(along) + text.side_lines("pair") if apart else (),
        key_terms=lines_of(along),
        symbols=text.symbols,
        bound_symbols=frozenset().union(*map(ex.free_symbols, bounds)),
        visit_symbols=frozenset().union(
            *(ex.free_symbols(bound) for each in found for bound in (each.lo, each.hi) if bound is not None)
        ),
        helpers=_helpers(rule.expr, *bounds),
        lists=None if lists is None else _render_lists(rule, lists),
        bits=bits and replace(bits, row_loads=before + bits.row_loads, key_terms=lines_of(along)),
    )


def _kept(
    rule: Rule, along: str, ends: frozenset[str], text: Printer, terms: Mapping[ex.Expr, ex.Symbol]
) -> tuple[str, tuple[str, ...], RenderedBits | None]:
    """A mask's condition on a pair, that of some sides' ends included, the lines before it that say of each
    row which keys it sees, and the same for bits.

    A mask of one comparison is left as it reads.
    """
    there = _IN_BOUNDS[ends]
    if ex.constant(rule.expr) is True:
        return there, (), None
    plain = f"({text(ex.substitute(rule.expr, terms))}) & ({there})"
    if along != "k" or not isinstance(rule.expr, ex.Apply) or rule.expr.op not in ("&", "|"):
        return plain, (), None
    found = conjuncts.joined(rule.expr, rule.types)
    if found == (conjuncts.Interval(conjuncts.K_IDX, None, conjuncts.K_LEN), rule.expr):
        return plain, (), None
    wide = {operand.name for operand in rule.operands if operand.dtype == "i64"}

    def printed(expr: ex.Expr) -> str:
        reads_wide = any(load.operand in wide for load in ex.loads(expr))
        return text(ex.substitute(expr, terms)) + (".to(tl.int32)" if reads_wide else "")

    lines: dict[str, str] = {}
    kept = []
    intervals = [each for each in found if isinstance(each, conjuncts.Interval)]
    for each in found:
        if not isinstance(each, conjuncts.Interval):
            kept.append(text(ex.substitute(each, terms)))
            continue
        number = f"_{intervals.index(each)}" if len(intervals) > 1 else ""
        value = text(ex.substitute(each.value, terms))
        begin, end, count = (f"{rule.kind}__{word}{number}" for word in ("from", "end", "count"))
        if each.lo is not None:
            lines[begin] = printed(each.lo)
        if each.hi is not None:
            lines[end] = printed(each.hi)
        if each.hi is None:
            kept.append(f"{value} >= {begin}")
        elif each.lo is None:
            kept.append(f"{value} < {end}")
        else:  # as numbers without a sign, what lies before the first is far behind the last
            lines[count] = f"tl.maximum({end} - {begin}, 0).to(tl.uint32)"
            kept.append(f"({value} - {begin}).to(tl.uint32) < {count}")
    bits = None
    if period := conjuncts.period(found[1:]):
        begin, end, count = (f"{rule.kind}__{word}_0" for word in ("from", "end", "count"))
        bits = RenderedBits(
            period=period,
            keep=_lines(_all_of(kept[1:])),
            key_terms=(),
            row_loads=tuple(f"{name} = {each}" for name, each in lines.items() if name != count),
            begin=begin if begin in lines else "",
            end=end,
        )
    return _all_of(kept), tuple(f"{name} = {each}" for name, each in lines.items()), bits


def _all_of(conditions: Sequence[str]) -> str:
    return " & ".join(f"({each})" for each in conditions) if len(conditions) > 1 else conditions[0]


def _lines(text: str) -> tuple[str, ...]:
    """A long expression in lines of readable length."""
    return tuple(textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False))


def _rendered_range(text: Printer, found: tiles.Range, suffix: str) -> RenderedRange:
    lo, hi, full_lo, full_hi = (
        None if bound is None else text(bound) for bound in (found.lo, found.hi, found.full_lo, found.full_hi)
    )
    loads = text.bound_lines((found.lo, found.hi))
    full_loads = text.bound_lines((found.full_lo, found.full_hi), known=loads)
    return RenderedRange(suffix, lo, hi, full_lo, full_hi, found.has_full, loads, full_loads)


def _is_wide(rule: Rule, bounds: Sequence[ex.Expr]) -> bool:
    """Whether a bound reads an int64 operand."""
    wide = {operand.name for operand in rule.operands if operand.dtype == "i64"}
    return bool({load.operand for bound in bounds for load in ex.loads(bound)} & wide)


def _render_lists(rule: Rule, lists: tiles.Lists) -> RenderedLists:
    """The classification of a mask's tiles, over rows and keys that all exist."""
    bounds, loads = _bounds(lists.within), [gather.load for gather in lists.gathers]
    exprs = (lists.some, lists.every, *bounds, *loads)
    text = Printer(rule, exprs, checked=False, early=("pair",), tile=lists.across)
    return RenderedLists(
        within=_rendered_range(text, lists.within, ""),
        some=_lines(text(lists.some)),
        every=_lines(text(lists.every)),
        gathers=tuple(
            RenderedGather(each.name, each.side, text(each.load), rule.types[each.load.operand] == "bool")
            for each in lists.gathers
        ),
        uniform_loads=text.uniform_lines(),
        pair_loads=text.side_lines("pair"),
        symbols=text.symbols,
        helpers=_helpers(*exprs),
    )


def _is_of_pairs(expr: ex.Expr) -> bool:
    """Whether a score rule has a value for each pair of a tile: one of rows, of keys or of heads alone is no
    tile that a row's maximum can be taken of.
    """
    symbols = ex.free_symbols(expr)
    return "score" in symbols or ("k_idx" in symbols and not symbols.isdisjoint(("q_idx", "q_pos")))


SUMMED_BY = {"k": ("q", "diagonal", "pair"), "q": ("k",)}
"""Which of `Share.side` a tile sums that walks keys, and one that walks rows."""


def render_score(spec: AttentionSpec, along: str = "k", apart: bool = False) -> RenderedScore:
    """The score rule of a spec, or how the scale is applied without one; for `bwd` with its derivative.

    Args:
        along: what a tile walks, as for `render_mask`.
        apart: whether distances may be taken apart, for a template that knows `keys` and `rows`.
    """
    rule = spec.score_mod
    if rule is None:
        return RenderedScore("", spec.positive_scale, (), (), frozenset(), ())
    learned = _shares_of(spec, SUMMED_BY[along])
    exprs: tuple[ex.Expr, ...] = (rule.expr,) if spec.op == "fwd" else (rule.expr, ex.derivative(rule.expr))
    slope_at = len(exprs) - 1
    exprs += tuple(share.slope for share in learned)
    exprs += tuple(share.load for share in learned if share.side == "pair")  # whose address is evaluated
    text = Printer(rule, exprs, early=(_OTHER[along], "pair"))
    in_log2 = spec.op == "fwd" and arithmetic.scores_in(rule.expr) == 1
    # What is read of pairs would live across a branch: a softcap with a bias spills 56 times at head_dim 128.
    factors = arithmetic.Factors(bends=in_log2 and apart and not text.side_lines("pair"))
    early = tuple(arithmetic.floats_early(each, rule.types) for each in exprs)
    if in_log2 and apart and not spec.quantized:
        folded, unit = factors.log2_folded(early[0])
        fast: tuple[ex.Expr, ...] = (folded,)
    else:
        unit = None
        fast = tuple(map(factors.log2 if in_log2 else factors.natural, early))
    if in_log2 and apart and (parts := arithmetic.taken_apart(fast[0], spec.mask)):
        return _render_apart(rule, parts, factors)
    names = _shared(fast)
    text = replace(text, bent=factors.bent)
    slopes = [
        "" if exprs[i] == ex.ONE else text(ex.substitute(fast[i], names))
        for i in range(slope_at, slope_at + 1 + len(learned))
    ]
    changed = text(ex.substitute(fast[0], names))
    return RenderedScore(
        text=changed if _is_of_pairs(rule.expr) else f"tl.zeros_like(score) + {changed}",
        folded=unit is not None,
        uniform_loads=text.uniform_lines(),
        row_loads=text.side_lines(_OTHER[along]),
        symbols=text.symbols,
        helpers=_bent_helpers(fast[0], factors) or _helpers(*exprs),
        pair_loads=text.side_lines("pair"),
        may_drop=rule.may_drop,
        bends=bool(factors.bent),
        slope=slopes[0] if spec.op == "bwd" else "",
        shared=tuple(f"{name.name} = {text(_inside(each, names))}" for each, name in names.items()),
        factors=_factor_lines(text, factors, unit),
        in_log2=in_log2,
        learned=tuple(
            RenderedShare(
                pointer=_gradient_name(share),
                side=share.side,
                address=text.gradient_address(share) if share.side == "pair" else "",
                slope=slope,
                added=bool(share.shared_by),
            )
            for share, slope in zip(learned, slopes[1:], strict=True)
        ),
    )


def _render_apart(rule: Rule, parts: arithmetic.Apart, factors: arithmetic.Factors) -> RenderedScore:
    """A rule whose distances are taken apart: for them no pair, row or key is asked for its position."""
    rest, bent = arithmetic.of_positions(parts.rest), tuple(factors.bent.values())
    exprs = (rest, *map(arithmetic.of_positions, bent), *factors.names)
    text = Printer(rule, exprs, early=("q", "pair"), bent=factors.bent)
    return RenderedScore(
        text=text(parts.rest),
        folded=False,
        uniform_loads=text.uniform_lines(),
        row_loads=text.side_lines("q"),
        symbols=text.symbols,
        helpers=_bent_helpers(parts.rest, factors) or _helpers(parts.rest),
        pair_loads=text.side_lines("pair"),
        may_drop=rule.may_drop,
        bends=bool(factors.bent),
        factors=_factor_lines(text, factors),
        in_log2=True,
        keys=text(parts.keys),
        rows=text(parts.rows),
    )


def _factor_lines(text: Printer, factors: arithmetic.Factors, unit: ex.Expr | None = None) -> tuple[str, ...]:
    lines = tuple(f"{name.name} = {text(each)}" for each, name in factors.names.items())
    if unit is None:
        return lines
    size = f"tl.maximum(tl.abs({text(unit)}), 2.0**-126)"
    return (*lines, f"scale_log2 = {size}  # 0 times a masked score would be NaN")


def _bent_helpers(expr: ex.Expr, factors: arithmetic.Factors) -> tuple[str, ...]:
    """Helper functions, where scores are bent."""
    exprs = (expr, *factors.bent.values(), *factors.names)
    return ("reciprocal", *_helpers(*exprs)) if factors.bent else ()


def _shared(exprs: tuple[ex.Expr, ...]) -> dict[ex.Expr, ex.Symbol]:
    """A name for each costly function that several expressions evaluate, what stands in another first."""
    if len(exprs) == 1:
        return {}
    often = Counter(
        node for each in exprs for node in ex.walk(each) if isinstance(node, ex.Apply) and node.op in _COSTLY
    )
    found = sorted((each for each, times in often.items() if times > 1), key=ex.depth)
    ops = [each.op for each in found]
    return {
        each: ex.Symbol(f"score__{each.op}{f'_{ops[:i].count(each.op)}' if ops.count(each.op) > 1 else ''}")
        for i, each in enumerate(found)
    }


def _inside(expr: ex.Expr, names: dict[ex.Expr, ex.Symbol]) -> ex.Expr:
    """The expression with what stands in it under its names."""
    return ex.rebuild(expr, tuple(ex.substitute(part, names) for part in ex.children(expr)))
