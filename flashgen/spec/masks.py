"""Masks: which keys a query may attend to."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from flashgen.errors import InvalidArgument
from flashgen.spec import catalog
from flashgen.spec import rule as rules
from flashgen.spec.catalog import Entry
from flashgen.spec.form import shown
from flashgen.spec.rule import Bound, Combined, Rule

UNLIMITED = 2**30
"""A window of at least this many keys reaches past every sequence, and is taken as None."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mask(Bound):
    """A mask rule with its numbers and tensors; `&`, `|` and `~` combine masks.

    torch.compile traces `&` and `|`, but `~` of no object: make such a mask outside, or write "~causal".
    """

    KIND: ClassVar[str] = "mask"

    def __and__(self, other: Mask) -> Mask:
        return self._join("&", other)

    def __or__(self, other: Mask) -> Mask:
        return self._join("|", other)

    __rand__, __ror__ = __and__, __or__  # no mask stands there: these give the reason

    def __invert__(self) -> Mask:
        return Mask(_inverted(*_identity(self.rule)), self.values, self.tensors)

    def _join(self, op: str, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            if callable(other):
                raise InvalidArgument(
                    f"a mask is joined with {shown(other)}; make it a mask first: "
                    "flashgen.trace.mask_mod(function)"
                )
            return NotImplemented
        joined = _joined(op, *_identity(self.rule), *_identity(other.rule))
        return rules.combine(joined, self, other)


def _identity(rule: Rule) -> tuple[str, str, str]:
    return rule.text, rule.name, rule.form


# Of texts, which torch.compile holds as constants; a rule it would have to take apart.


@lru_cache(maxsize=4096)
@catalog.constant_in_traces
def _joined(op: str, *identities: str) -> Combined:
    return rules.join(op, _rule(*identities[:3]), _rule(*identities[3:]))


@lru_cache(maxsize=4096)
@catalog.constant_in_traces
def _inverted(text: str, name: str, form: str) -> Rule:
    return rules.invert(_rule(text, name, form))


def _rule(text: str, name: str, form: str) -> Rule:
    return Rule.parse("mask", text, name=name, form=form)


_FULL = Mask(_rule("True", "full", "full"))
_CAUSAL = {
    "bottom_right": Mask(_rule("q_pos >= k_idx", "causal", "causal")),
    "top_left": Mask(_rule("q_idx >= k_idx", "causal_top_left", 'causal(align="top_left")')),
}
_LEFT, _RIGHT = "q_pos - k_idx <= left", "k_idx - q_pos <= right"
_WINDOW_BOTH = _rule(
    f"({_LEFT}) & ({_RIGHT}) where left: i32, right: i32", "sliding_window", "sliding_window({}, {})"
)
_WINDOW_LEFT = _rule(f"{_LEFT} where left: i32", "sliding_window_left", "sliding_window({}, None)")
_WINDOW_RIGHT = _rule(f"{_RIGHT} where right: i32", "sliding_window_right", "sliding_window(None, {})")
_KEY_PADDING = {
    dtype: _rule(f"k_idx < key_lengths[batch] where key_lengths: {dtype}", "key_padding", "key_padding")
    for dtype in ("i32", "i64")
}
_KEY_PADDING["i1"] = _rule("key_keep[batch, k_idx] where key_keep: i1", "key_keep", 'key_padding("keep")')
_DOCUMENT = {
    dtype: _rule(
        f"(q_pos >= 0) & (doc_ids[batch, max(q_pos, 0)] == doc_ids[batch, k_idx]) where doc_ids: {dtype}",
        "document",
        "document",
    )
    for dtype in ("i32", "i64")
}
_KEY_PADDING_RANK = {"i32": 1, "i64": 1, "i1": 2}
_KEY_PADDING_WORDS = {"lengths": "i32", "keep": "i1"}


def full() -> Mask:
    """Every query sees every key."""
    return _FULL


def causal(align: str = "bottom_right") -> Mask:
    """A query sees the keys up to its own position.

    Args:
        align: `bottom_right` lines up the last query with the last key, as decoding with a cache needs;
            `top_left` the first query with the first key. They differ when q_len != k_len.
    """
    mask = _CAUSAL.get(align) if isinstance(align, str) else None
    if mask is None:
        raise InvalidArgument(f"align={shown(align)} must be 'bottom_right' or 'top_left'")
    return mask


def sliding_window(left: int | None, right: int | None) -> Mask:
    """A query sees `left` keys before its position, that position, and `right` keys after it.

    None is unlimited. Hugging Face's window W, which counts the query itself, is `left = W - 1`.
    """
    left = None if left is None else _window("left", left)
    right = None if right is None else _window("right", right)
    if left is None:
        return _FULL if right is None else Mask(_WINDOW_RIGHT, (right,))
    return Mask(_WINDOW_LEFT, (left,)) if right is None else Mask(_WINDOW_BOTH, (left, right))


def _window(side: str, given: Any) -> int | None:
    size = given if type(given) is int else None
    if size is None and not isinstance(given, bool):
        try:
            size = operator.index(given)
        except TypeError:
            size = None
    if size is None or size < 0:
        raise InvalidArgument(
            f"{side}={shown(given)} must be a number of keys, 0 or more, or None for no limit"
        )
    return size if size < UNLIMITED else None


def key_padding(keys: Any = "lengths") -> Mask:
    """Each sequence of the batch has keys that no query sees.

    Args:
        keys: an int32 or int64 tensor (batch,) with the number of keys of each sequence, or a bool tensor
            (batch, k_len) that is True for the keys to keep. The words `lengths` and `keep` stand for a
            tensor that is bound later.
    """
    if isinstance(keys, str):
        if keys not in _KEY_PADDING_WORDS:
            raise InvalidArgument(f"keys={shown(keys)} must be 'lengths' or 'keep', or a tensor")
        return Mask(_KEY_PADDING[_KEY_PADDING_WORDS[keys]], (), (None,))
    dtype = rules.operand_dtype(keys)
    rule = _KEY_PADDING.get(dtype)
    if rule is None or len(keys.shape) != _KEY_PADDING_RANK[dtype]:
        raise InvalidArgument(
            f"key_padding takes an int32 or int64 tensor (batch,) of key lengths or a bool tensor "
            f"(batch, k_len), True for keys to keep; not {rules.told_operand(keys)}"
        )
    return Mask(rule, (), (keys,))


def document(ids: Any = "i32") -> Mask:
    """A query sees the keys of its own document, wherever they stand.

    Args:
        ids: an int32 or int64 tensor (batch, k_len) with the document of each key; `ids.expand(batch, -1)` of
            one row for all sequences. A query has the document of the key at its position; where queries
            are more than keys, the first ones have none and see nothing. The words `i32` and `i64` stand for
            a tensor that is bound later.
    """
    if isinstance(ids, str):
        if ids not in _DOCUMENT:
            raise InvalidArgument(f"ids={shown(ids)} must be 'i32' or 'i64', or a tensor")
        return Mask(_DOCUMENT[ids], (), (None,))
    rule = _DOCUMENT.get(rules.operand_dtype(ids))
    if rule is None or len(ids.shape) != 2:
        raise InvalidArgument(
            f"document takes an int32 or int64 tensor (batch, k_len) with the document of each key; "
            f"not {rules.told_operand(ids)}"
        )
    return Mask(rule, (), (ids,))


MASKS: Mapping[str, Entry[Mask]] = {
    "full": Entry(full, "every query sees every key"),
    "causal": Entry(causal, "keys up to the query's own position", ((), ("top_left",))),
    "sliding_window": Entry(
        sliding_window,
        "keys at most `left` before and `right` after the query's position, None for no limit",
        ((1023, 0), (5, 3), (0, 0), (7, None), (None, 7)),
    ),
    "key_padding": Entry(
        key_padding, "keys within each sequence's length, or those a bool tensor keeps", ((), ("keep",))
    ),
    "document": Entry(document, "keys of the query's own document", ((), ("i64",))),
}
"""The masks that have a name."""


@catalog.constant_in_traces
def parse_mask(text: str) -> Mask:
    """Reads a mask as a command line writes it: `causal & sliding_window(1023, 0)`, `~causal`.

    Raises:
        InvalidArgument: an unknown name (the known ones are listed) or argument.
    """
    return catalog.read(text, "mask", _EXAMPLE, _read)


_EXAMPLE = "causal & sliding_window(1023, 0)"


def _read(node: ast.expr) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return _read(node.left) & _read(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _read(node.left) | _read(node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_read(node.operand)
    return catalog.read_entry(node, MASKS, "mask", _EXAMPLE)
