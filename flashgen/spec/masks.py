"""Masks: which keys a query may attend to."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


@catalog.remembered(maxsize=4096)
def _joined(op: str, *identities: str) -> Combined:
    return rules.join(op, _rule(*identities[:3]), _rule(*identities[3:]))


@catalog.remembered(maxsize=4096)
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
# Of documents that follow one another: where the query's own begins and where it ends, which no key is asked.
# A query before the first key reads the entry before all others, of a document without keys.
_BEGIN, _END = (f"doc_ends[batch, {side}, max(q_pos + 1, 0)]" for side in (0, 1))
_DOCUMENT["ordered"] = _rule(
    f"(k_idx >= {_BEGIN}) & (k_idx < {_END}) where doc_ends: i32 ascending",
    "document_ordered",
    'document("ordered")',
)
_KEY_PADDING_RANK = {"i32": 1, "i64": 1, "i1": 2}
_KEY_PADDING_WORDS = {"lengths": "i32", "keep": "i1"}
_PREFIX_LM = {
    dtype: _rule(
        f"(k_idx < prefix_lens[batch]) | (q_pos >= k_idx) where prefix_lens: {dtype}",
        "prefix_lm",
        f'prefix_lm("{dtype}")',
    )
    for dtype in ("i32", "i64")
}
# Remainders of each side: one division for each row and each key, where that of the difference is one a pair.
_DILATED = _rule(
    "(q_pos - k_idx <= window) & (k_idx - q_pos <= window) & (q_pos % dilation == k_idx % dilation) "
    "where window: i32, dilation: i32",
    "dilated",
    "dilated({}, {})",
)
_GLOBAL_TOKENS = _rule(
    "(k_idx < tokens) | (q_pos < tokens) where tokens: i32", "global_tokens", "global_tokens({})"
)
# k_idx lies from clamp(q_pos - window // 2, 0, k_len - window) on, for `window` keys. Without the clamp's
# minimum and maximum it is four comparisons that the tile ranges are solved from.
_NEIGHBORHOOD = _rule(
    "((q_pos - k_idx <= window // 2) | (k_idx >= k_len - window)) & "
    "((k_idx - q_pos < window - window // 2) | (k_idx < window)) where window: i32",
    "neighborhood",
    "neighborhood({})",
)
_BLOCK_WORDS = {"": "shared", "b": "batch", "h": "heads", "bh": "batch_heads"}
"""What the blocks of `block_sparse` may differ by, and the word for it."""


def full() -> Mask:
    """Every query sees every key."""
    return _FULL


def causal(align: str = "bottom_right") -> Mask:
    """A query sees the keys up to its own position. On a command line `causal` or `causal(top_left)`.

    Args:
        align: `bottom_right` lines up the last query with the last key, as decoding with a cache needs;
            `top_left` the first query with the first key. They differ when q_len != k_len.
    """
    mask = _CAUSAL.get(align) if isinstance(align, str) else None
    if mask is None:
        raise InvalidArgument(
            f"align={shown(align)} must be 'bottom_right' or 'top_left': write causal() or causal('top_left')"
        )
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
    size = _whole(given)
    if size is None or size < 0:
        raise InvalidArgument(
            f"{side}={shown(given)} must be a number of keys, 0 or more, or None for no limit"
        )
    return size if size < UNLIMITED else None


def _whole(given: Any) -> int | None:
    """The number, if it is a whole one of any type that counts."""
    if type(given) is int:
        return given
    if isinstance(given, bool):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def _count(name: str, given: Any, least: int) -> int:
    """A number that the kernel is given, below `UNLIMITED`."""
    size = _whole(given)
    if size is None or not least <= size < UNLIMITED:
        raise InvalidArgument(f"{name}={shown(given)} must be a whole number from {least} to {UNLIMITED - 1}")
    return size


def _pair(name: str, given: Any) -> tuple[int, int]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InvalidArgument(f"{name}={shown(given)} must be a pair of whole numbers, such as (64, 64)")
    first, second = (_count(f"{name}[{i}]", each, 1) for i, each in enumerate(given))
    return first, second


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


def prefix_lm(prefix_lens: Any = "i32") -> Mask:
    """A query sees the keys of its sequence's prefix, and the keys up to its own position.

    Args:
        prefix_lens: an int32 or int64 tensor (batch,) with the number of keys of each prefix. The words `i32`
            and `i64` stand for a tensor that is bound later.
    """
    if isinstance(prefix_lens, str):
        return _bound_later("prefix_lens", prefix_lens, _PREFIX_LM)
    rule = _PREFIX_LM.get(rules.operand_dtype(prefix_lens))
    if rule is None or len(prefix_lens.shape) != 1:
        raise InvalidArgument(
            "prefix_lm takes an int32 or int64 tensor (batch,) with the length of each sequence's prefix; "
            f"not {rules.told_operand(prefix_lens)}"
        )
    return Mask(rule, (), (prefix_lens,))


def _bound_later(name: str, word: str, known: Mapping[str, Rule]) -> Mask:
    if word not in known:
        words = " or ".join(map(repr, known))
        raise InvalidArgument(f"{name}={shown(word)} must be {words}, or a tensor")
    return Mask(known[word], (), (None,))


def document(ids: Any = "i32", *, cu_seqlens: Any = None, length: Any = None) -> Mask:
    """A query sees the keys of its own document, wherever they stand.

    Args:
        ids: an int32 or int64 tensor (batch, k_len) with the document of each key; `ids.expand(batch, -1)` of
            one row for all sequences. A query has the document of the key at its position; where queries
            are more than keys, the first ones have none and see nothing. The words `i32` and `i64` stand for
            a tensor that is bound later, and `ordered` for what `cu_seqlens` makes: int32
            (batch, 2, 1 + k_len) with where the document of each key begins and where it ends, behind a first
            entry of 0 and 0; none of them is below the one before it.
        cu_seqlens: in its place, of a single row (batch 1) that documents are packed into: an int32 or int64
            tensor (documents + 1,) with where each begins and, last, where the last one ends. Documents may
            be empty. Keys behind the end are one more.
        length: keys of that row. The host knows it, and never reads a tensor of a GPU.

    Give `cu_seqlens` where you have them: of documents that are known to follow one another a kernel visits
    ranges of keys, where for ids it needs lists of tiles and reads the ids of every block. What it reads is
    made on the device of `cu_seqlens`, by some small kernels and without waiting: make the mask once and give
    it to every layer.
    """
    if cu_seqlens is not None:
        if not isinstance(ids, str):
            raise InvalidArgument("document takes ids or cu_seqlens, not both; leave out one")
        return Mask(_DOCUMENT["ordered"], (), (_ends_of(cu_seqlens, length),))
    if length is not None:
        raise InvalidArgument(f"length={shown(length)} goes with cu_seqlens alone; leave it out")
    if isinstance(ids, str):
        return _bound_later("ids", ids, _DOCUMENT)
    rule = _DOCUMENT.get(rules.operand_dtype(ids))
    if rule is None or len(ids.shape) != 2:
        raise InvalidArgument(
            f"document takes an int32 or int64 tensor (batch, k_len) with the document of each key; "
            f"not {rules.told_operand(ids)}"
        )
    return Mask(rule, (), (ids,))


def _ends_of(cu_seqlens: Any, length: Any) -> Any:
    """Where the document of each key of a packed row begins and where it ends, int32 (1, 2, 1 + length);
    before the first key stands an entry of a document without any.
    """
    told = rules.told_operand(cu_seqlens)
    integral = rules.operand_dtype(cu_seqlens) in ("i32", "i64")
    if not integral or len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 2:
        raise InvalidArgument(
            "cu_seqlens of document is an int32 or int64 tensor (documents + 1,) with where each document "
            f"begins, and where the last one ends; not {told}"
        )
    if str(cu_seqlens.layout) != "torch.strided":
        raise InvalidArgument(
            f"cu_seqlens of document is {cu_seqlens.layout}; only dense (strided) tensors are served: "
            "make it one"
        )
    if length is None:
        raise InvalidArgument(
            "document(cu_seqlens=...) needs length, the keys of the packed row: length=k.shape[2]"
        )
    keys = _count("length", length, 1)
    if cu_seqlens.device.type == "cpu":
        _check_edges(cu_seqlens.tolist(), keys)
    # Clamped, for an index past the end is a failure of the whole GPU there; and never falling, whatever the
    # GPU holds, for kernels rely on it.
    ends = cu_seqlens[1:].long().clamp(0, keys).cummax(0).values
    # 0 and 0, then of each document where it ends, and of what lies behind the last one.
    borders = ends.new_full((ends.shape[0] + 3,), keys)
    borders[:2] = 0
    borders[2:-1] = ends
    # Between which two of them a key is: one on, and one more for each document that has ended there.
    steps = ends.new_zeros(keys + 2).index_add(0, ends + 1, (ends >= 0).long())
    steps[1] += 1
    return borders.unfold(0, 2, 1)[steps.cumsum(0)[: keys + 1]].T.int().contiguous()[None]


def _check_edges(edges: list[int], length: int) -> None:
    """Where the values are on the host."""
    fault = next((i for i, (a, b) in enumerate(pairwise(edges)) if b < a), None)
    if edges[0] != 0:
        why = f"begins with {edges[0]}, and must begin with 0"
    elif fault is not None:
        why = f"falls from {edges[fault]} to {edges[fault + 1]} at index {fault + 1}, and must never fall"
    elif edges[-1] > length:
        why = f"ends at {edges[-1]}, and must end within length={length}"
    else:
        return
    raise InvalidArgument(f"cu_seqlens of document {why}: it holds the sums of the documents' lengths so far")


def dilated(window: int, dilation: int) -> Mask:
    """A query sees the keys at most `window` from its position on either side, and of these every
    `dilation`-th, counted from itself. Causal with `& causal()`.

    Args:
        window: the largest distance, 0 or more.
        dilation: 1 or more; 1 is a sliding window.
    """
    return Mask(_DILATED, (_count("window", window, 0), _count("dilation", dilation, 1)))


def global_tokens(count: int) -> Mask:
    """All queries see the first `count` keys, and the queries at the first `count` positions see all keys.

    Joined with a window it is the pattern of Longformer (Beltagy et al. 2020, section 3.1):
    `sliding_window(256, 256) | global_tokens(4)`.
    """
    return Mask(_GLOBAL_TOKENS, (_count("count", count, 0),))


def neighborhood(window: Any, kernel: Any = None) -> Mask:
    """A query sees the keys nearest to it, of as large a neighbourhood at a border as in the middle: near an
    end it is shifted inward, not cut (Hassani et al. 2023, Neighborhood Attention Transformer, section 3.2).

    Args:
        window: with nothing else, the number of keys of a sequence's neighbourhood: `window // 2` before the
            query's position, itself, and the others behind. Of fewer keys all are seen. With `kernel`, the
            (height, width) of a grid whose positions stand row by row in the sequence: a call is refused
            unless k_len is their product, and q_len that or less, for the grid's last positions. Each packed
            sequence is such a grid, or has no keys.
        kernel: the (height, width) of a grid position's neighbourhood, each at most the grid's.

    The grid's width is compiled in: kernels divide by it, and a number known to the compiler divides in a
    few instructions.
    """
    if kernel is None:
        if isinstance(window, tuple | list):
            raise InvalidArgument(
                f"neighborhood({shown(tuple(window))}) of a grid needs its kernel, such as (7, 7)"
            )
        return Mask(_NEIGHBORHOOD, (_count("window", window, 1),))
    height, width = _pair("window", window)
    if height * width >= UNLIMITED:  # kernels count positions in int32
        raise InvalidArgument(
            f"window=({height}, {width}) has {height * width} positions, which stand in one sequence; "
            f"at most {UNLIMITED - 1}: give a smaller grid"
        )
    kernel_h, kernel_w = _pair("kernel", kernel)
    if kernel_h > height or kernel_w > width:
        raise InvalidArgument(
            f"kernel=({kernel_h}, {kernel_w}) must not be larger than the grid, ({height}, {width})"
        )
    return Mask(_grid(width), (height, kernel_h, kernel_w))


@catalog.remembered(maxsize=256)
def _grid(width: int) -> Rule:
    """Of both axes: from clamp(position - kernel // 2, 0, length - kernel) on, as many as `kernel`.

    Down the grid it is told of keys by the first key of a row, so that a pair costs two comparisons.
    """
    top = f"min(max(max(q_pos, 0) // {width} - kernel_h // 2, 0), height - kernel_h)"
    left = f"min(max(max(q_pos, 0) % {width} - kernel_w // 2, 0), {width} - kernel_w)"
    text = (
        f"(k_idx >= {top} * {width}) & (k_idx < ({top} + kernel_h) * {width}) & "
        f"(k_idx % {width} >= {left}) & (k_idx % {width} < {left} + kernel_w) "
        "where height: i32, kernel_h: i32, kernel_w: i32"
    )
    return _rule(text, f"neighborhood_w{width}", f"neighborhood(({{}}, {width}), ({{}}, {{}}))")


_ON_A_GRID = re.compile(
    r"k_idx >= min\(max\(max\(q_pos, 0\) // (\d+) - (\w+) // 2, 0\), (\w+) - \2\) \* \1(?!\w)"
)
"""Of `_grid`, in the text of any mask that it is part of: the width, and the name of the height."""


@catalog.remembered(maxsize=4096)
def _widths(text: str) -> tuple[tuple[str, int], ...]:
    """The name of the height and the width of each grid of a mask."""
    return tuple(dict.fromkeys((found[3], int(found[1])) for found in _ON_A_GRID.finditer(text)))


def grids(rule: Rule, values: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """The (height, width) of each grid that a mask has neighbourhoods on.

    Args:
        values: of the rule's numbers, in order; others may follow.
    """
    if len(values) < _NUMBERS_OF_A_GRID or not (widths := _widths(rule.text)):
        return ()  # the first of most masks, at every call
    numbers = {name: value for (name, _), value in zip(rule.params, values, strict=False)}
    return tuple((int(numbers[height]), width) for height, width in widths)


_NUMBERS_OF_A_GRID = len(_grid(1).params)


def check_grids(
    rule: Rule, values: Sequence[float], q_len: int, k_len: int, names: tuple[str, str] = ("q_len", "k_len")
) -> None:
    """The keys of a sequence are the positions of its mask's grid, and its queries the last of them.

    Args:
        values: as for `grids`.
        names: of both lengths, for messages.

    Raises:
        InvalidArgument: a length is another one; it says which the grid has.
    """
    for height, width in grids(rule, values):
        positions = height * width
        has = f"the grid ({height}, {width}) of neighborhood has {positions:,} positions"
        if k_len != positions:
            raise InvalidArgument(
                f"{has}, and {names[1]} is {k_len:,}: each key is one of them, row by row; pass "
                f"{positions:,} keys, or name the (height, width) whose product is {k_len:,}"
            )
        if q_len > positions:
            raise InvalidArgument(
                f"{has}, and {names[0]} is {q_len:,}: queries are the last of them; pass at most "
                f"{positions:,} queries"
            )


def check_packed_grids(
    rule: Rule, values: Sequence[float], sequences: int, longest: int, tokens: int
) -> None:
    """As `check_grids`, of packed sequences, by what is known of them without asking a GPU.

    Args:
        longest: keys of the longest sequence, or more.
        tokens: keys of all.

    Raises:
        InvalidArgument: no sequences that have all keys of a grid, or none, come to this.
    """
    for height, width in grids(rule, values):
        positions = height * width
        whole = 0 if tokens % positions else tokens // positions
        if tokens and not (0 < whole <= sequences and longest >= positions):
            raise InvalidArgument(
                f"the grid ({height}, {width}) of neighborhood has {positions:,} positions, and these "
                f"{sequences:,} packed sequences of at most {longest:,} keys have {tokens:,} together: each "
                f"key is one of its sequence's, row by row; pass {positions:,} keys of each sequence, or none"
            )


def block_sparse(block_mask: Any = "shared", block_size: Any = 128) -> Mask:
    """A query sees the keys of the blocks that a table keeps for its own block.

    Args:
        block_mask: a bool tensor (batch or 1, heads or 1, blocks of queries, blocks of keys), True for blocks
            to keep. The words `shared`, `batch`, `heads` and `batch_heads` stand for a tensor that is bound
            later, by what its blocks differ by.
        block_size: queries and keys of a block: a number, or one of each. The sequences' last blocks may be
            shorter. It is compiled in. Kernels skip what their own tiles can tell to be empty: those of at
            most as many rows and keys as a block.
    """
    sizes = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    q_size, k_size = _pair("block_size", sizes)
    if isinstance(block_mask, str):
        differs = next((by for by, word in _BLOCK_WORDS.items() if word == block_mask), None)
        if differs is None:
            words = ", ".join(map(repr, _BLOCK_WORDS.values()))
            raise InvalidArgument(f"block_mask={shown(block_mask)} must be one of {words}, or a tensor")
        return Mask(_blocks(differs, q_size, k_size), (), (None,))
    if type(block_mask) is int:
        raise InvalidArgument(
            f"block_mask={shown(block_mask)} must be a bool tensor, or a word for one that is bound later; a "
            f"block's size follows it: block_sparse('shared', {shown(block_mask)})"
        )
    if rules.operand_dtype(block_mask) != "i1" or len(block_mask.shape) != 4:
        raise InvalidArgument(
            "block_sparse takes a bool tensor (batch or 1, heads or 1, blocks of queries, blocks of keys), "
            f"True for blocks to keep; not {rules.told_operand(block_mask)}"
        )
    differs = "".join(by for by, extent in zip("bh", block_mask.shape, strict=False) if extent != 1)
    return Mask(_blocks(differs, q_size, k_size), (), (block_mask,))


@catalog.remembered(maxsize=256)
def _blocks(differs: str, q_size: int, k_size: int) -> Rule:
    where = [symbol if symbol[0] in differs else "0" for symbol in ("batch", "head")]
    text = f"kept[{', '.join(where)}, q_idx // {q_size}, k_idx // {k_size}] where kept: i1"
    size = f"{q_size}" if q_size == k_size else f"({q_size}, {k_size})"
    name = "_".join(["block_sparse", *([_BLOCK_WORDS[differs]] if differs else [])])
    return _rule(text, name, f'block_sparse("{_BLOCK_WORDS[differs]}", {size})')


GIVEN_AS: Mapping[str, str] = {
    "key_lengths": "keys",
    "key_keep": "keys",
    "doc_ids": "ids",
    "doc_ends": "cu_seqlens",
    "kept": "block_mask",
}
"""The argument that a tensor of a named mask came as, where it has another name than the rule's operand."""

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
    "document": Entry(
        document,
        'keys of the query\'s own document; "ordered": of documents that follow one another',
        ((), ("i64",), ("ordered",)),
    ),
    "prefix_lm": Entry(prefix_lm, "keys of the sequence's prefix, and up to the query", ((), ("i64",))),
    "dilated": Entry(
        dilated, "every `dilation`-th key at most `window` from the query", ((12, 3), (7, 1), (0, 2))
    ),
    "global_tokens": Entry(global_tokens, "the first keys, and all keys for the first queries", ((3,), (0,))),
    "neighborhood": Entry(
        neighborhood,
        "the `window` nearest keys, or those of a grid's (height, width) in a kernel (height, width)",
        ((7,), (4,), ((6, 5), (3, 3)), ((4, 8), (2, 5))),
    ),
    "block_sparse": Entry(
        block_sparse,
        "keys of the blocks that a bool tensor keeps for the query's block",
        ((), ("heads", 8), ("batch_heads", (4, 16))),
    ),
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
