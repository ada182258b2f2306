"""FlexAttention's callables as masks and score rules: `mask_mod(b, h, q_idx, kv_idx)` and
`score_mod(score, b, h, q_idx, kv_idx)`, traced once for their code and read anew at every call.

Captured numbers become parameters of the rule, captured tensors its operands, so other values of the same
code need no other kernel. Where Python itself needs a number (a branch, `range`, `math.log2`), the callable
is traced again with all its numbers as constants.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Literal, TypeAlias, overload

from torch import Tensor, nn

from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec.expr import ONE, ZERO, Expr, Load, Symbol, make
from flashgen.spec.interval import Interval
from flashgen.spec.masks import Mask
from flashgen.spec.rule import MAX_NAME, OPERAND_DTYPES, TORCH_DTYPES, Operand, Rule
from flashgen.spec.score_mods import ScoreMod
from flashgen.trace.captures import Captures, Twins, captures
from flashgen.trace.graph import BUILTINS, Recording, place_of
from flashgen.trace.operations import size_name

POSITIONS = ("batch", "head", "q_idx", "k_idx")
SYMBOLS: Mapping[str, tuple[str, ...]] = {"mask": POSITIONS, "score": ("score", *POSITIONS)}
"""What a callable of each kind is given, in order."""
SIGNATURES: Mapping[str, str] = {
    "mask": "mask_mod(b, h, q_idx, kv_idx)",
    "score": "score_mod(score, b, h, q_idx, kv_idx)",
}
MAX_TRACED = 512
"""Callables remembered, by their code; when full, all are forgotten."""

_BOUND: Mapping[str, type[Mask] | type[ScoreMod]] = {"mask": Mask, "score": ScoreMod}
_PARAM_TYPES = {int: ("i32", "int"), float: ("f32", "float")}

Axes: TypeAlias = tuple[tuple[int, tuple[str, ...]], ...]
"""Axes of a tensor that positions alone index, each with these."""
Sizes: TypeAlias = Mapping[str, int]
"""How many batches, (query) heads, queries and keys a call has, by the names of `POSITIONS`."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A rule made of a callable, and where in `Captures` its numbers and tensors stand."""

    rule: Rule
    values: tuple[tuple[int, int | None], ...]
    """For each parameter the place of a number; or that of a tensor, and the axis it is the length of."""
    operands: tuple[tuple[int, Axes], ...]
    """For each operand the place of its tensor, and the axes that positions alone index, with these."""
    reads: tuple[tuple[int, int, Expr], ...]
    """(operand, axis, index) that is the same for a whole call and must lie within the tensor."""
    lasting: bool = True
    """Whether it holds for all callables of an equal key; else it is made anew at every call."""

    def bound(self, found: Captures, sizes: Sizes | None, checked: bool = False) -> Mask | ScoreMod:
        """The rule with the values that a callable captures now.

        Args:
            sizes: those of the call, by which tensors are cut that are longer than it needs; None keeps them.
            checked: whether the indices are known to lie within their tensors.

        Raises:
            InvalidArgument: a tensor is too short for an index that is the same for the whole call.
        """
        tensors = [_fitted(found.tensors[at], axes, sizes) for at, axes in self.operands]
        values = tuple(
            found.numbers[at] if axis is None else found.tensors[at].shape[axis] for at, axis in self.values
        )
        if self.reads and not checked:
            self._check(values, tensors)
        return _BOUND[self.rule.kind](self.rule, values, tuple(tensors))

    def _check(self, values: tuple[int | float, ...], tensors: list[Tensor]) -> None:
        numbers = {name: value for (name, _), value in zip(self.rule.params, values, strict=True)}
        for operand, axis, index in self.reads:
            place, length = ex.evaluate(index, numbers), tensors[operand].shape[axis]
            if not 0 <= place < length:
                name = self.rule.operands[operand].name
                raise InvalidArgument(
                    f"{name} of {self.rule.name} has shape {tuple(tensors[operand].shape)}, and is read at "
                    f"{ex.to_text(index)} = {place} along axis {axis}; a captured index counts from the "
                    f"start, up to {length - 1}"
                )


def _fitted(tensor: Tensor, axes: Axes, sizes: Sizes | None) -> Tensor:
    """A captured tensor as an operand: with an axis at least, and none longer than the call."""
    if tensor.dim() == 0:
        return tensor.reshape(1)
    if sizes is not None:
        for axis, symbols in axes:
            needed = max([sizes[symbol] for symbol in symbols])
            if tensor.shape[axis] > needed:
                tensor = tensor.narrow(axis, 0, needed)
    return tensor


_CONSTANTS = "constants"
"""In the place of a rule: there is one for each set of numbers, which stand in its key."""
_traced: dict[Any, Any] = {}


@overload
def traced(kind: Literal["mask"], function: Callable[..., Any], sizes: Sizes | None = None) -> Mask: ...
@overload
def traced(kind: Literal["score"], function: Callable[..., Any], sizes: Sizes | None = None) -> ScoreMod: ...
def traced(kind: Any, function: Callable[..., Any], sizes: Sizes | None = None) -> Mask | ScoreMod:
    """The rule that a callable means, with what it captures now: 4 to 9 us once its code is known.

    Args:
        kind: `mask` or `score`.
        function: see `SIGNATURES`; a function, method, partial or object to call.
        sizes: see `Traced.bound`.

    Raises:
        InvalidArgument: it cannot be traced; the message has the line, the node and the reason.
    """
    if isinstance(function, nn.Module):
        function = function.forward
    found = captures(function)
    return _known(kind, function, found).bound(found, sizes)


def rule_of(kind: str, function: Callable[..., Any]) -> Traced:
    """What `traced` remembers of a callable.

    Raises:
        InvalidArgument: it cannot be traced.
    """
    return _known(kind, function, captures(function))


def _known(kind: str, function: Callable[..., Any], found: Captures) -> Traced:
    shape = (kind, *found.key)
    known = _traced.get(shape)
    if known is _CONSTANTS:
        known = _traced.get((shape, *found.numbers))
    return known or _trace(kind, function, found, shape)


def _trace(kind: str, function: Callable[..., Any], found: Captures, shape: tuple[Any, ...]) -> Traced:
    if len(_traced) >= MAX_TRACED:
        _traced.clear()
    if not found.tests_types and _traced.get(shape) is not _CONSTANTS:
        try:
            result = _read_twice(kind, function, found, False)
            if result.lasting:
                _traced[shape] = result
            return result
        except InvalidArgument:
            if not found.numbers:
                raise
    result = _read_twice(kind, function, found, True)
    if result.lasting:
        _traced[shape] = _CONSTANTS
        key = (shape, *found.numbers)
        _traced[key] = result
    return result


def _read_twice(kind: str, function: Callable[..., Any], found: Captures, constants: bool) -> Traced:
    try:
        inspect.signature(function).bind(*SYMBOLS[kind])
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            _refusal(kind, function, "", f"it is called as {SIGNATURES[kind]} ({error})")
        ) from None
    first, second = (_read(kind, function, found, constants) for _ in range(2))
    if first.rule.text != second.rule.text:
        raise InvalidArgument(
            f"{_told(kind, function)} means {ex.to_text(first.rule.expr)} once and "
            f"{ex.to_text(second.rule.expr)} when it is called again; compute what changes (a random number, "
            "a clock) before the call, as a tensor"
        )
    return first


def _told(kind: str, function: Callable[..., Any]) -> str:
    return f"the {kind}_mod {_name_of(function) or 'given'}"


def _read(kind: str, function: Callable[..., Any], found: Captures, constants: bool) -> Traced:
    """Traces a callable.

    Args:
        constants: whether captured numbers are compiled in.
    """
    recording = Recording()
    numbers: list[str] = []
    tensors: list[str] = []

    def named(hint: str, there: list[str]) -> str:
        name = _declarable(hint, recording.types)
        there.append(name)
        return name

    def number(hint: str, value: int | float) -> Any:
        return value if constants else recording.number(named(hint, numbers), _PARAM_TYPES[type(value)][1])

    def tensor(hint: str, value: Tensor) -> Any:
        dtype = TORCH_DTYPES.get(str(value.dtype), "")
        return recording.tensor(named(hint, tensors), value, OPERAND_DTYPES.get(dtype, "float"))

    twins = Twins(number, tensor, BUILTINS)
    try:
        expr = recording.run(twins.of(function), SYMBOLS[kind])
    except Exception as error:
        told = str(error) if isinstance(error, InvalidArgument) else f"{type(error).__name__}: {error}"
        raise InvalidArgument(_refusal(kind, function, place_of(error), told)) from error
    try:
        made = _made(kind, function, expr, found, numbers, tensors, recording.types)
        return replace(made, lasting=found.whole and twins.whole)
    except (InvalidArgument, RecursionError) as error:
        told = ex.TOO_DEEP if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument(_refusal(kind, function, "", told)) from None


def _refusal(kind: str, function: Callable[..., Any], place: str, why: str) -> str:
    code = getattr(getattr(function, "func", function), "__code__", None)
    if not place and code is not None:
        place = f"{code.co_filename}, line {code.co_firstlineno}"
    return f"{_told(kind, function)} cannot be traced{f' ({place})' if place else ''}: {why}"


def _made(
    kind: str,
    function: Callable[..., Any],
    expr: Expr,
    found: Captures,
    numbers: list[str],
    tensors: list[str],
    types: Mapping[str, str],
) -> Traced:
    expr = _chained(_unfolded(ex.simplify(expr), types))
    ranks = {name: each.dim() for name, each in zip(tensors, found.tensors, strict=True)}
    guard = _Guard(expr, ranks)
    expr = guard.of(expr)
    read = {load.operand: len(load.indices) for load in ex.loads(expr)}
    operands = []
    for name, rank in read.items():
        given = found.tensors[tensors.index(name)].dtype
        dtype = TORCH_DTYPES.get(str(given))
        if dtype is None:
            raise InvalidArgument(f"{name} is {given}; a rule reads {', '.join(TORCH_DTYPES)}: convert it")
        operands.append(Operand(name, dtype, rank))
    sizes = {
        size_name(name, rank, axis): (at, axis)
        for at, (name, rank) in enumerate(ranks.items())
        for axis in range(rank)
    }
    places = sizes | {name: (at, None) for at, name in enumerate(numbers)}
    params = ex.params(expr)
    rule = Rule(
        kind,
        expr,
        tuple((name, "f32" if types[name] == "float" else "i32") for name in params),
        tuple(operands),
        name=_name_of(function),
    )
    return Traced(
        rule,
        tuple(places[name] for name in params),
        tuple((tensors.index(each.name), guard.plain_axes(each.name)) for each in operands),
        tuple((list(read).index(name), axis, index) for name, axis, index in guard.reads if name in read),
    )


_LINEAR = frozenset({"+", "-", "*", "neg"})
_BOTH_SIDES = {"<": "&", "<=": "&", ">": "|", ">=": "|"}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _unfolded(expr: Expr, types: Mapping[str, str]) -> Expr:
    """`abs(x) <= y` as `(x <= y) & (-x <= y)` where x is a linear integer: these give ranges of keys."""
    expr = ex.rebuild(expr, tuple(_unfolded(part, types) for part in ex.children(expr)))
    if not isinstance(expr, ex.Apply) or expr.op not in _BOTH_SIDES:
        return expr
    for op, (one, other) in ((expr.op, expr.args), (_MIRRORED[expr.op], expr.args[::-1])):
        if isinstance(one, ex.Apply) and one.op == "abs" and _is_linear(one.args[0], types):
            (x,) = one.args
            return make(_BOTH_SIDES[op], make(op, x, other), make(op, make("neg", x), other))
    return expr


def _is_linear(expr: Expr, types: Mapping[str, str]) -> bool:
    nodes = list(ex.walk(expr))
    plain = all(each.op in _LINEAR for each in nodes if isinstance(each, ex.Apply))
    return plain and not ex.loads(expr) and ex.result_type(expr, types) == "int"


def _chained(expr: Expr) -> Expr:
    """`&` and `|` grouped to the left, each term once: equal masks get equal text, as when masks join."""
    parts = tuple(map(_chained, ex.children(expr)))
    if not isinstance(expr, ex.Apply) or expr.op not in ("&", "|"):
        return ex.rebuild(expr, parts)
    terms = dict.fromkeys(term for part in parts for term in _terms(expr.op, part))
    return reduce(partial(make, expr.op), terms)


def _terms(op: str, expr: Expr) -> tuple[Expr, ...]:
    if isinstance(expr, ex.Apply) and expr.op == op:
        return tuple(term for arg in expr.args for term in _terms(op, arg))
    return (expr,)


# Reads stay within their tensors


_ROWS = Interval(0, 2**31 - 1)


class _Guard:
    """Keeps indices within their axes.

    torch counts negative indices from the end, and refuses an index outside; a kernel would read a
    neighbour's memory, or none, also for pairs that the mask drops, so an index that is computed
    (`table[q_idx - kv_idx]`) is counted as torch does and then kept to its axis. Positions are
    compared with the shape at every call, and what is the same for a whole call is checked on the host.
    """

    def __init__(self, expr: Expr, ranks: Mapping[str, int]) -> None:
        self.ranks = ranks
        self.reads: dict[tuple[str, int, Expr], None] = {}
        self.indices: dict[tuple[str, int], dict[Expr, None]] = {}
        for load in ex.loads(expr):
            for axis, index in enumerate(load.indices):
                self.indices.setdefault((load.operand, axis), {})[index] = None

    def plain_axes(self, operand: str) -> Axes:
        """The axes that positions alone index, and which positions."""
        found = []
        for (name, axis), indices in self.indices.items():
            if name == operand and self._is_plain(name, axis):
                symbols = (index.name for index in indices if isinstance(index, Symbol))
                found.append((axis, tuple(symbols)))
        return tuple(found)

    def of(self, expr: Expr) -> Expr:
        """An expression with all its reads within their tensors."""
        parts = tuple(map(self.of, ex.children(expr)))
        if isinstance(expr, Load):
            parts = tuple(
                self._index(expr.operand, axis, *pair)
                for axis, pair in enumerate(zip(expr.indices, parts, strict=True))
            )
        return ex.rebuild(expr, parts)

    def _is_plain(self, operand: str, axis: int) -> bool:
        return all(
            isinstance(each, Symbol) and each.name in POSITIONS for each in self.indices[operand, axis]
        )

    def _index(self, operand: str, axis: int, index: Expr, guarded: Expr) -> Expr:
        if self._is_plain(operand, axis):
            return guarded
        if not ex.free_symbols(index) and not ex.loads(index):
            self.reads[operand, axis, index] = None
            return guarded
        self.reads[operand, axis, ZERO] = None  # an axis without elements has nothing to keep to
        size = ex.Param(size_name(operand, self.ranks[operand], axis))
        if ex.bounds(index, dict.fromkeys(POSITIONS, _ROWS)).lo < 0:  # torch counts it from the end
            guarded = make("where", make("<", guarded, ZERO), make("+", guarded, size), guarded)
            guarded = make("max", guarded, ZERO)
        return make("min", guarded, make("-", size, ONE))


# Names


def _name_of(function: Any) -> str:
    """A rule's name, from the callable's own; empty for one without."""
    function = getattr(function, "func", function)
    given = getattr(function, "__name__", type(function).__name__)
    name = re.sub(r"[^a-z0-9]+", "_", given.lower()).lstrip("_0123456789").rstrip("_")
    return "" if name == "lambda" else name[:MAX_NAME]


def _declarable(hint: str, taken: Mapping[str, str]) -> str:
    """A name that a rule may declare, like what the callable calls it, and not taken."""
    base = re.sub(r"[^a-z0-9]+", "_", hint.lower()).strip("_")[: MAX_NAME // 2]
    if not base or not base[0].isalpha():
        base = f"value_{base}".strip("_")
    if base in _RESERVED or keyword.iskeyword(base):
        base = f"{base}_0"
    name, count = base, 0
    while name in taken or any(each.startswith(f"{name}_size") for each in taken):
        count += 1
        name = f"{base}_{count}"
    return name


_RESERVED = frozenset({*ex.SYMBOLS, *ex.TILE_SYMBOLS, *ex.FUNCTIONS, "inf"})


def is_identity(mod: object) -> bool:
    """Whether a score rule returns the score as it is."""
    # By its text: torch.compile would guard the class of an expression that it cannot reach by a name.
    return isinstance(mod, ScoreMod) and mod.rule.text == "score"
