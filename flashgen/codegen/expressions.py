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


def _uniform_name(load: ex.Load) -> str:
    indices = "_".join("".join(c if c.isalnum() else "_" for c in ex.to_text(i)) for i in load.indices)
    return f"{load.operand}_at_{indices}"


def _address(load: ex.Load, indices: tuple[str, ...]) -> str:
    """Pointer of one element (or a tile of them); the index is widened, since operands may be large."""
    terms = [
        f"({text}).to(tl.int64) * {load.operand}_stride_{axis}"
        if not text.isidentifier()
        else f"{text}.to(tl.int64) * {load.operand}_stride_{axis}"
        for axis, text in enumerate(indices)
    ]
    return " + ".join([load.operand, *terms])


def _print_load(load: ex.Load, indices: tuple[str, ...]) -> str:
    if all(is_uniform(index) for index in load.indices):
        return _uniform_name(load)
    symbols = {s for index in load.indices for s in ex.free_symbols(index)}
    sides = frozenset(s[0] for s in symbols & {"q_idx", "q_pos", "k_idx"})
    return f"tl.load({_address(load, indices)}, mask={_IN_BOUNDS[sides]}, other=0)"


STYLE = ex.Style(calls=_CALLS, load=_print_load)


def to_triton(expr: ex.Expr) -> str:
    """The expression as Triton text, over the names the templates define."""
    return ex.to_text(expr, STYLE)


def _helpers(*exprs: ex.Expr | None) -> tuple[str, ...]:
    """Helper functions the printed text calls."""
    used = {node.op for e in exprs if e is not None for node in ex.walk(e) if isinstance(node, ex.Apply)}
    return tuple(sorted(_CALLS[op] for op in used if _CALLS.get(op) in HELPERS))


def _uniform_loads(exprs: list[ex.Expr]) -> tuple[str, ...]:
    """One line for each operand element that a whole tile shares, loaded before the loops."""
    found = {load: None for e in exprs for load in ex.loads(e) if all(is_uniform(i) for i in load.indices)}
    return tuple(
        f"{_uniform_name(load)} = tl.load({_address(load, tuple(to_triton(i) for i in load.indices))})"
        for load in found
    )


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
    helpers: tuple[str, ...]


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


def _optional(expr: ex.Expr | None) -> str | None:
    return None if expr is None else to_triton(expr)


def render_mask(rule: Rule) -> RenderedMask:
    """Element mask and key ranges of a rule."""
    found = tiles.ranges(rule, "k")
    bounds = [b for r in found for b in (r.lo, r.hi, r.full_lo, r.full_hi) if b is not None]
    wide = {operand.name for operand in rule.operands if operand.dtype == "i64"}
    always = ex.constant(rule.expr) is True
    keep = "k_idx < k_len" if always else f"({to_triton(rule.expr)}) & (k_idx < k_len)"
    return RenderedMask(
        keep=tuple(textwrap.wrap(keep, 88, break_long_words=False, break_on_hyphens=False)),
        ranges=tuple(
            RenderedRange(
                suffix=f"_{i}" if len(found) > 1 else "",
                lo=_optional(r.lo),
                hi=_optional(r.hi),
                full_lo=_optional(r.full_lo),
                full_hi=_optional(r.full_hi),
                has_full=r.has_full,
            )
            for i, r in enumerate(found)
        ),
        wide_bounds=bool({load.operand for b in bounds for load in ex.loads(b)} & wide),
        uniform_loads=_uniform_loads([rule.expr, *bounds]),
        symbols=frozenset().union(*(ex.free_symbols(e) for e in (rule.expr, *bounds))),
        helpers=_helpers(rule.expr, *bounds),
    )


def render_score(spec: AttentionSpec) -> RenderedScore:
    """The score rule of a spec, or how the scale is applied without one."""
    rule = spec.score_mod
    if rule is None:
        return RenderedScore("", spec.positive_scale, (), frozenset(), ())
    return RenderedScore(
        to_triton(rule.expr),
        False,
        _uniform_loads([rule.expr]),
        ex.free_symbols(rule.expr),
        _helpers(rule.expr),
    )
