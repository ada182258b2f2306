"""Score rules: what happens to a score between the scale and the softmax.

A rule sees scores in natural units (query times key times scale). Masks come after all score rules.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from flashgen.errors import InvalidArgument
from flashgen.spec import catalog
from flashgen.spec import rule as rules
from flashgen.spec.catalog import Entry
from flashgen.spec.form import shown
from flashgen.spec.rule import Bound, Combined, Rule

MIN_CAP, MAX_CAP = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The normal numbers of float32, which the kernel receives."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScoreMod(Bound):
    """A score rule with its numbers and tensors."""

    KIND: ClassVar[str] = "score"

    def then(self, other: ScoreMod) -> ScoreMod:
        """The rule that applies this one and then `other` to its result."""
        if not isinstance(other, ScoreMod):
            told = f"{shown(other)} must be a ScoreMod from flashgen.score_mods, to follow {self}"
            raise InvalidArgument(told)
        one, two = self.rule, other.rule
        composed = _composed(one.text, one.name, one.form, two.text, two.name, two.form)
        return rules.combine(composed, self, other)


@lru_cache(maxsize=4096)
@catalog.constant_in_traces
def _composed(*identities: str) -> Combined:
    # Of texts, as the joining of masks.
    return rules.compose(_rule(*identities[:3]), _rule(*identities[3:]))


def _rule(text: str, name: str, form: str) -> Rule:
    return Rule.parse("score", text, name=name, form=form)


_SOFTCAP = _rule("cap * tanh(score / cap) where cap: f32", "softcap", "softcap({})")


def softcap(cap: float) -> ScoreMod:
    """Bends scores smoothly into the range from -cap to cap."""
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not MIN_CAP <= cap <= MAX_CAP:
        raise InvalidArgument(
            f"cap={shown(cap)} must be a number from {MIN_CAP:.3g} to {MAX_CAP:.3g}, the normal numbers of "
            "float32; for no cap, leave the rule out"
        )
    return ScoreMod(_SOFTCAP, (float(cap),))


def compose(mods: Sequence[ScoreMod]) -> ScoreMod | None:
    """One rule that applies all of them, first to last; None if there are none."""
    composed: ScoreMod | None = None
    for mod in mods:
        if not isinstance(mod, ScoreMod):
            raise InvalidArgument(f"{shown(mod)} must be a ScoreMod from flashgen.score_mods")
        composed = mod if composed is None else composed.then(mod)
    return composed


SCORE_MODS: Mapping[str, Entry[ScoreMod]] = {
    "softcap": Entry(softcap, "bends scores smoothly into -cap to cap", ((30.0,), (0.5,))),
}
"""The score rules that have a name."""

_EXAMPLE = "softcap(30.0)"


@catalog.constant_in_traces
def parse_score_mod(text: str) -> ScoreMod:
    """Reads score rules in the order they apply: `softcap(50.0), softcap(30.0)`.

    Raises:
        InvalidArgument: an unknown name (the known ones are listed) or argument.
    """
    composed = catalog.read(text, "score rule", _EXAMPLE, _read)
    if composed is None:
        raise InvalidArgument(f"{shown(text)} names no score rule; write one like {_EXAMPLE}")
    return composed


def _read(node: ast.expr) -> ScoreMod | None:
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    return compose([catalog.read_entry(each, SCORE_MODS, "score rule", _EXAMPLE) for each in nodes])
