"""Masks and score rules as lines of Triton: the same trees that the reference evaluates, printed."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from flashgen.spec import expr as ex
from flashgen.spec import tiles
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.rule import Rule

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

_PER_ELEMENT = {"q_idx", "k_idx", "q_pos", "score"}
_IN_BOUNDS = {
    frozenset({"q"}): "q_idx < q_len",
    frozenset({"k"}): "k_idx < k_len",
    frozenset({"q", "k"}): "(q_idx < q_len) & (k_idx < k_len)",
}


def is_uniform(expr: ex.Expr) -> bool:
    """Whether an expression has one value for a whole tile."""
    return not ex.free_symbols(expr) & _PER_ELEMENT


def argument_name(kind: str, declared: str) -> str:
    """How the kernel calls a parameter or operand of a rule: `mask_left`, `score_cap`.

    Templates use no name with these beginnings, so a declared name can hide none of theirs. Names made from
    it have two underscores in a row, which no declared name has.
    """
    return f"{kind}_{declared}"


def _address(pointer: str, indices: tuple[str, ...]) -> str:
    """Address of one element (or a tile of them); the index is widened, since operands may be large."""
    wide = (f"{text if text.isidentifier() else f'({text})'}.to(tl.int64)" for text in indices)
    return " + ".join([pointer, *(f"{index} * {pointer}__stride_{axis}" for axis, index in enumerate(wide))])


@dataclass(frozen=True, slots=True)
class Printer:
    """Prints the expressions of one rule as Triton text, over the names the templates define."""

    rule: Rule

    @property
    def uniform(self) -> tuple[ex.Load, ...]:
        """Reads that a whole tile shares; they are made once, before the loops."""
        bounds = (bound for r in ranges_of(self.rule) for bound in _bounds(r))
        found = (load for e in (self.rule.expr, *bounds) for load in ex.loads(e))
        return tuple(dict.fromkeys(load for load in found if all(map(is_uniform, load.indices))))

    def __call__(self, expr: ex.Expr) -> str:
        """The text of an expression."""
        names = {name: argument_name(self.rule.kind, name) for name, _ in self.rule.params}
        return ex.to_text(expr, ex.Style(names=names, calls=_CALLS, load=self._load))

    def uniform_lines(self) -> tuple[str, ...]:
        """A line for each read that a whole tile shares."""
        addresses = {
            load: _address(self._pointer(load), tuple(map(self, load.indices))) for load in self.uniform
        }
        return tuple(f"{self._uniform_name(load)} = tl.load({at})" for load, at in addresses.items())

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
        if all(map(is_uniform, load.indices)):
            return self._uniform_name(load)
        symbols = {s for index in load.indices for s in ex.free_symbols(index)}
        sides = frozenset(s[0] for s in symbols & {"q_idx", "q_pos", "k_idx"})
        return f"tl.load({_address(self._pointer(load), indices)}, mask={_IN_BOUNDS[sides]}, other=0)"


def ranges_of(rule: Rule) -> tuple[tiles.Range, ...]:
    """The key ranges of a mask; a score rule has none."""
    return tiles.ranges(rule, "k") if rule.kind == "mask" else ()


def _bounds(each: tiles.Range) -> tuple[ex.Expr, ...]:
    return tuple(bound for bound in (each.lo, each.hi, each.full_lo, each.full_hi) if bound is not None)


def _helpers(*exprs: ex.Expr | None) -> tuple[str, ...]:
    """Helper functions the printed text calls."""
    used = {node.op for e in exprs if e is not None for node in ex.walk(e) if isinstance(node, ex.Apply)}
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


@dataclass(frozen=True, slots=True)
class RenderedMask:
    """A mask as the templates use it."""

    keep: tuple[str, ...]
    """Element mask over q_idx (or q_pos) and k_idx, in lines of readable length."""
    ranges: tuple[RenderedRange, ...]
    wide_bounds: bool
    """Whether a bound reads an int64 operand."""
    uniform_loads: tuple[str, ...]
    symbols: frozenset[str]
    """Names the element mask and the bounds read: q_idx, q_pos, first, last, ..."""
    bound_symbols: frozenset[str]
    """Those of the bounds alone."""
    visit_symbols: frozenset[str]
    """Those of the bounds of what is visited, the full parts aside."""
    helpers: tuple[str, ...]

    @property
    def differs_by_row(self) -> bool:
        """Whether which keys a row sees depends on the row."""
        return bool(self.bound_symbols & {"first", "last"})

    @property
    def last_is_longest(self) -> bool:
        """Whether later rows see more keys, as under a causal mask."""
        return len(self.ranges) == 1 and self.ranges[0].lo is None and "last" in (self.ranges[0].hi or "")


@dataclass(frozen=True, slots=True)
class RenderedScore:
    """The score rule as the templates use it."""

    text: str
    """Natural-unit score from `score`; empty when there is no rule."""
    folded: bool
    """No rule and a positive scale: the scale goes into the exponent."""
    uniform_loads: tuple[str, ...]
    symbols: frozenset[str]
    helpers: tuple[str, ...]


def render_mask(rule: Rule) -> RenderedMask:
    """Element mask and key ranges of a rule."""
    found, text = ranges_of(rule), Printer(rule)
    bounds = [bound for each in found for bound in _bounds(each)]
    wide = {operand.name for operand in rule.operands if operand.dtype == "i64"}
    always = ex.constant(rule.expr) is True
    keep = "k_idx < k_len" if always else f"({text(rule.expr)}) & (k_idx < k_len)"

    def optional(expr: ex.Expr | None) -> str | None:
        return None if expr is None else text(expr)

    return RenderedMask(
        keep=tuple(textwrap.wrap(keep, 88, break_long_words=False, break_on_hyphens=False)),
        ranges=tuple(
            RenderedRange(
                suffix=f"_{i}" if len(found) > 1 else "",
                lo=optional(each.lo),
                hi=optional(each.hi),
                full_lo=optional(each.full_lo),
                full_hi=optional(each.full_hi),
                has_full=each.has_full,
            )
            for i, each in enumerate(found)
        ),
        wide_bounds=bool({load.operand for bound in bounds for load in ex.loads(bound)} & wide),
        uniform_loads=text.uniform_lines(),
        symbols=frozenset().union(*(ex.free_symbols(e) for e in (rule.expr, *bounds))),
        bound_symbols=frozenset().union(*map(ex.free_symbols, bounds)),
        visit_symbols=frozenset().union(
            *(ex.free_symbols(bound) for each in found for bound in (each.lo, each.hi) if bound is not None)
        ),
        helpers=_helpers(rule.expr, *bounds),
    )


def render_score(spec: AttentionSpec) -> RenderedScore:
    """The score rule of a spec, or how the scale is applied without one."""
    rule = spec.score_mod
    if rule is None:
        return RenderedScore("", spec.positive_scale, (), frozenset(), ())
    text = Printer(rule)
    return RenderedScore(
        text=text(rule.expr),
        folded=False,
        uniform_loads=text.uniform_lines(),
        symbols=ex.free_symbols(rule.expr),
        helpers=_helpers(rule.expr),
    )
