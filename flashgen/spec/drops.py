"""What a score rule drops by itself: `where(q_idx >= k_idx, score, -inf)` is the mask `q_idx >= k_idx`.

A pair whose score is -inf has no weight, as if a mask dropped it. Said by a mask, whole tiles are known to be
empty and are not visited, and no row has to be guarded against scores of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.errors import InvalidArgument
from flashgen.spec import catalog
from flashgen.spec import expr as ex
from flashgen.spec.expr import FALSE, TRUE, Apply, Expr, Symbol, make
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule, chained
from flashgen.spec.score_mods import ScoreMod

_SCORE = Symbol("score")


def may_choose(score_mod: object) -> bool:
    """Whether a score rule may be one that `as_mask` takes apart: 0.1 us, asked at every call."""
    return type(score_mod) is ScoreMod and score_mod.rule.text.startswith("where(")


def as_mask(mask: Mask, score_mod: ScoreMod) -> tuple[Mask, ScoreMod | None]:
    """The same call with what the score rule drops said by the mask, as far as no score takes part in it.

    Of the rule is left what it makes of the kept scores; None if that is nothing. Equal but for rows that see
    no key, which give 0 and an LSE of -inf. Only choices are taken apart: -inf that is added to a score is
    NaN where that is infinite.
    """
    found = _parted(score_mod.rule.text, score_mod.rule.name)
    if found is None:
        return mask, score_mod
    kept = Mask(found.mask.rule, *found.mask.picked(score_mod))
    try:
        mask = mask & kept
    except InvalidArgument:  # more than one mask may say
        return mask, score_mod
    rest = found.score
    return mask, None if rest is None else ScoreMod(rest.rule, *rest.picked(score_mod))


@dataclass(frozen=True, slots=True)
class _Part:
    """A rule made of a part of another."""

    rule: Rule
    values: tuple[int, ...]
    """For each of its parameters, the place among the whole's."""
    tensors: tuple[int, ...]
    """The same of operands."""

    @classmethod
    def of(cls, whole: Rule, kind: str, expr: Expr, name: str) -> _Part:
        params, operands = ex.params(expr), dict.fromkeys(load.operand for load in ex.loads(expr))
        values = tuple([name for name, _ in whole.params].index(each) for each in params)
        tensors = tuple([operand.name for operand in whole.operands].index(each) for each in operands)
        declared = (tuple(whole.params[at] for at in values), tuple(whole.operands[at] for at in tensors))
        return cls(Rule(kind, expr, *declared, name=name), values, tensors)

    def picked(self, whole: ScoreMod) -> tuple[tuple[int | float, ...], tuple[object, ...]]:
        """Of the whole's numbers and tensors, its own."""
        return tuple(whole.values[at] for at in self.values), tuple(whole.tensors[at] for at in self.tensors)


@dataclass(frozen=True, slots=True)
class _Parted:
    mask: _Part
    score: _Part | None


@catalog.remembered(maxsize=4096)
def _parted(text: str, name: str) -> _Parted | None:
    # Of texts, as the joining of masks.
    rule = Rule.parse("score", text, name=name)
    kept, score = _kept(rule.expr, rule.types)
    # Nothing is dropped, or all, which a mask says no better; or the kept score is a number of its own.
    if kept in (TRUE, FALSE) or _SCORE.name not in ex.free_symbols(score):
        return None
    try:
        mask = _Part.of(rule, "mask", kept, name)
        left = None if score == _SCORE else _Part.of(rule, "score", score, name)
    except InvalidArgument:  # a condition may be longer than a rule, where choices are many
        return None
    return _Parted(mask, left)


def _kept(expr: Expr, types: Mapping[str, str]) -> tuple[Expr, Expr]:
    """Where a score may be other than -inf, and the score there."""
    if ex.constant(expr) == -math.inf:
        return FALSE, expr
    if not (isinstance(expr, Apply) and expr.op == "where") or _SCORE.name in ex.free_symbols(expr.args[0]):
        return TRUE, expr
    condition, then, otherwise = expr.args
    (kept, score), (kept_else, score_else) = _kept(then, types), _kept(otherwise, types)
    if kept == kept_else == TRUE:
        return TRUE, expr
    if kept_else == FALSE:
        return chained("&", condition, kept), score
    opposite = _opposite(condition, types)
    if kept == FALSE:
        return chained("&", opposite, kept_else), score_else
    if kept == TRUE:
        keep = chained("|", condition, kept_else)
    elif kept_else == TRUE:
        keep = chained("|", opposite, kept)
    else:
        keep = make("|", chained("&", condition, kept), chained("&", opposite, kept_else))
    return keep, make("where", condition, score, score_else)


def _opposite(condition: Expr, types: Mapping[str, str]) -> Expr:
    """What holds where a condition does not; a comparison of integers as the other comparison."""
    match condition:
        case Apply("~", (inner,)):
            return inner
        case Apply(op, args) if op in ex.OPPOSITE and {ex.result_type(arg, types) for arg in args} == {"int"}:
            return make(ex.OPPOSITE[op], *args)
    return make("~", condition)
