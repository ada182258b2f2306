"""Score rules: what happens to a score between the scale and the softmax.

A rule sees scores in natural units (query times key times scale). Masks come after all score rules.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flashgen.errors import InvalidArgument
from flashgen.spec import catalog
from flashgen.spec import rule as rules
from flashgen.spec.catalog import Entry
from flashgen.spec.form import shown
from flashgen.spec.rule import Bound, Combined, Rule

MIN_CAP, MAX_CAP = 2.0**-96, 2.0**96
"""What a kernel multiplies of a cap, its inverse and the scale then stays a normal number of float32: an
infinite one times a tanh of 0 is NaN."""
MAX_FACTOR = (2 - 2.0**-23) * 2.0**127
"""The greatest number of float32."""


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


@catalog.remembered(maxsize=4096)
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
            f"cap={shown(cap)} must be a number from {MIN_CAP:.3g} to {MAX_CAP:.3g}, whose products with the "
            "scale float32 holds; for no cap, leave the rule out"
        )
    return ScoreMod(_SOFTCAP, (float(cap),))


_ALIBI = _rule("score - slopes[head] * abs(q_pos - k_idx) where slopes: fp32", "alibi", "alibi")
_SCALE = _rule("score * factor where factor: f32", "scale", "scale({})")
_FLOATS = ("fp32", "fp16", "bf16")
_AXES = {"b": "batch", "h": "head", "q": "q_idx", "k": "k_idx"}
"""The axes of a bias, and what indexes each where it has more than one element."""
_RELATIVE = {
    dtype: _rule(
        "score + table[head, min(max(k_idx - q_pos, -distance), distance) + distance] "
        f"where distance: i32, table: {dtype}",
        "relative",
        f'relative("{dtype}", {{}})',
    )
    for dtype in _FLOATS
}


def alibi(slopes: Any = "fp32") -> ScoreMod:
    """Takes slope * distance of query and key off the score, whichever comes first: ALiBi (Press et al. 2022,
    Train Short, Test Long, section 3). With bottom-right positions: the last query is at the last key.

    Args:
        slopes: a float32 tensor (heads,); `alibi_slopes(heads)` are the paper's. The word `fp32` stands for a
            tensor that is bound later.
    """
    if isinstance(slopes, str):
        _check_word("slopes", slopes, ("fp32",))
        return ScoreMod(_ALIBI, (), (None,))
    if rules.operand_dtype(slopes) != "fp32" or len(slopes.shape) != 1:
        raise InvalidArgument(
            "alibi takes a float32 tensor (heads,) of slopes, such as torch.tensor(alibi_slopes(heads)); "
            f"not {rules.told_operand(slopes)}"
        )
    return ScoreMod(_ALIBI, (), (slopes,))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi's paper for so many heads: of a power of two a geometric series that ends at 2^-8;
    of another number that of the power below, then every other one of the power above.
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise InvalidArgument(f"heads={shown(heads)} must be a whole number, at least 1")
    power = 1 << (heads.bit_length() - 1)
    between = (2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power))
    return (*(2.0 ** (-8.0 * (i + 1) / power) for i in range(power)), *between)


def bias(tensor: Any = "bhqk", dtype: str = "fp32") -> ScoreMod:
    """Adds a tensor to the scores. -inf is no weight at all: like a mask, and a row of nothing else gives 0.

    Args:
        tensor: float32, float16 or bfloat16 (batch or 1, heads or 1, q_len or 1, k_len or 1). A word stands
            for one that is bound later, by the letters of its axes that are not 1: `bhqk`, `hqk`, `bk`.
        dtype: of one that is bound later: `fp32`, `fp16` or `bf16`.
    """
    if isinstance(tensor, str):
        if tensor != "".join(axis for axis in _AXES if axis in tensor):
            raise InvalidArgument(
                f"tensor={shown(tensor)} must be some of the letters bhqk in this order, for the axes that "
                "are not 1, or a tensor"
            )
        _check_word("dtype", dtype, _FLOATS)
        return ScoreMod(_bias(tensor, dtype), (), (None,))
    given = rules.operand_dtype(tensor)
    if given not in _FLOATS or len(tensor.shape) != len(_AXES):
        raise InvalidArgument(
            "bias takes a float32, float16 or bfloat16 tensor (batch or 1, heads or 1, q_len or 1, k_len or "
            f"1); not {rules.told_operand(tensor)}"
        )
    axes = "".join(axis for axis, extent in zip(_AXES, tensor.shape, strict=True) if extent != 1)
    return ScoreMod(_bias(axes, given), (), (tensor,))


@catalog.remembered(maxsize=256)
def _bias(axes: str, dtype: str) -> Rule:
    indices = ", ".join(symbol if axis in axes else "0" for axis, symbol in _AXES.items())
    form = f'bias("{axes}", "{dtype}")'
    return _rule(f"score + bias[{indices}] where bias: {dtype}", f"bias_{axes}".rstrip("_"), form)


def relative(table: Any = "fp32", distance: Any = None) -> ScoreMod:
    """Adds to a score what a table has for its head and for how far the key is behind the query, as T5's
    relative position bias does (Raffel et al. 2020, section 2.1) where each distance has a bucket of its own.

    Args:
        table: float32, float16 or bfloat16 (heads, 2 * distance + 1): first of keys `distance` or more before
            the query, in the middle of the one at its position, last of those as far behind it. The words
            `fp32`, `fp16` and `bf16` stand for a table that is bound later, a number for a float32 one of
            that distance: `relative(128)`. Buckets of several distances are
            made such a table by reading the bucket of each: `weights[:, buckets]`.
        distance: of a table that is bound later; a table tells its own.
    """
    if type(table) is int and distance is None:
        table, distance = "fp32", table
    if isinstance(table, str):
        _check_word("table", table, _FLOATS)
        if isinstance(distance, bool) or not isinstance(distance, int) or not 0 <= distance < 2**30:
            given = "no distance" if distance is None else f"distance={shown(distance)}"
            raise InvalidArgument(
                f"relative of a table that is bound later has {given}; it must be a whole number below "
                "2**30, the largest distance that has an entry of its own: write relative(128) or "
                f'relative("{table}", 128)'
            )
        return ScoreMod(_RELATIVE[table], (distance,), (None,))
    given = rules.operand_dtype(table)
    if given not in _FLOATS or len(table.shape) != 2 or table.shape[1] % 2 == 0:
        raise InvalidArgument(
            "relative takes a float32, float16 or bfloat16 tensor (heads, 2 * distance + 1), an odd number "
            f"of entries for each head; not {rules.told_operand(table)}"
        )
    reached = table.shape[1] // 2
    if distance not in (None, reached):
        raise InvalidArgument(
            f"distance={shown(distance)} is not that of a table of {table.shape[1]} entries, {reached}; "
            "leave it out"
        )
    return ScoreMod(_RELATIVE[given], (reached,), (table,))


def scale(factor: float) -> ScoreMod:
    """Multiplies scores by a number, of either sign: a scale that may stand between two other rules."""
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not abs(factor) <= MAX_FACTOR:
        raise InvalidArgument(f"factor={shown(factor)} must be a finite number that float32 holds")
    return ScoreMod(_SCALE, (float(factor),))


def _check_word(name: str, given: Any, known: Sequence[str]) -> None:
    if given not in known:
        words = ", ".join(map(repr, known))
        raise InvalidArgument(f"{name}={shown(given)} must be {words}, or a tensor")


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
    "alibi": Entry(alibi, "takes slope * distance off, each head with a slope of its own"),
    "bias": Entry(
        bias,
        "adds a tensor that broadcasts over batch, heads, queries and keys",
        ((), ("hqk", "bf16"), ("qk", "fp16"), ("bk",), ("bq",), ("h", "bf16"), ("",)),
    ),
    "relative": Entry(
        relative, "adds a table's entry for head and distance", (("fp32", 12), ("bf16", 0), ("fp16", 70))
    ),
    "scale": Entry(scale, "multiplies scores", ((0.5,), (-2.0,))),
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
