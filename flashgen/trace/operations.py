"""What Python's operators and torch's functions mean as expressions: one row for each, found by name.

A row takes the arguments that torch's function of that name takes (first the tensor, then as torch names
them) and gives an expression. What has no row is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec.expr import ONE, ZERO, Expr, make, number

TORCH_TYPES: Mapping[str, torch.dtype] = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}
"""The dtype that a callable sees of each type of expression."""
_CASTS: Mapping[torch.dtype, str] = {
    torch.bool: "bool",
    torch.int32: "int",
    torch.int64: "int",
    torch.float32: "float",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A captured tensor, indexed along its first axes."""

    name: str
    rank: int
    indices: tuple[Expr, ...] = ()

    def size(self, axis: int) -> Expr:
        """Elements along one of the axes that are left."""
        return ex.Param(size_name(self.name, self.rank, len(self.indices) + axis))

    @property
    def dims(self) -> int:
        """Axes that are left."""
        return self.rank - len(self.indices)


def size_name(name: str, rank: int, axis: int) -> str:
    """The parameter that holds the length of an operand's axis."""
    return f"{name}_size" if rank == 1 else f"{name}_size_{axis}"


_EXPR = (ex.Const, ex.Symbol, ex.Param, ex.Load, ex.Apply)
Value = Any
"""An `Expr`, a `Table`, or whatever else Python code hands to a function: numbers, dtypes, tuples."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Applies the rows, given the types of parameters and operands."""

    types: Mapping[str, str]

    def type_of(self, expr: Expr) -> str:
        """`bool`, `int` or `float`."""
        return ex.result_type(expr, self.types)

    def expr(self, value: Value) -> Expr:
        """A value as an expression.

        Raises:
            InvalidArgument: it is none.
        """
        if isinstance(value, Table):
            if value.rank == 0:
                return ex.Load(value.name, (ZERO,))
            raise InvalidArgument(
                f"{value.name} is a tensor of which {value.dims} of {value.rank} axes are left; index it by "
                f"batch, head, q_idx, kv_idx or what is computed from them, or compute it before the call"
            )
        if isinstance(value, bool | int | float):
            if isinstance(value, float) and math.isnan(value):
                raise InvalidArgument("a constant is NaN; use a number, or -inf")
            return number(value)
        if not isinstance(value, _EXPR):
            raise InvalidArgument(f"{_told(value)} is no number, position or score")
        return value

    def number(self, value: Value) -> Expr:
        """As a number: a truth value counts 0 or 1."""
        expr = self.expr(value)
        return make("where", expr, ONE, ZERO) if self.type_of(expr) == "bool" else expr

    def truth(self, value: Value) -> Expr:
        """As a truth value."""
        expr = self.expr(value)
        if self.type_of(expr) != "bool":
            raise InvalidArgument(
                f"{ex.to_text(expr)} is no truth value: &, |, ~ and ^ join comparisons here, no bits, and "
                "bind tighter than they; write (a < b) & (c < d)"
            )
        return expr

    def alike(self, x: Value, y: Value) -> tuple[Expr, Expr]:
        """Both as truth values, or both as numbers."""
        exprs = self.expr(x), self.expr(y)
        if all(self.type_of(each) == "bool" for each in exprs):
            return exprs
        return self.number(x), self.number(y)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """As `tensor.to(dtype)`."""
        if isinstance(value, Table) and value.rank:
            raise InvalidArgument(
                f"{value.name} is converted while it has axes; index it first, or convert before the call"
            )
        expr = self.expr(value)
        given, wanted = self.type_of(expr), _CASTS.get(dtype)
        if wanted is None:
            allowed = ", ".join(map(str, _CASTS))
            raise InvalidArgument(f"{dtype} is no dtype to compute in; allowed: {allowed}")
        if given == wanted:
            return expr
        if wanted == "bool":
            return make("!=", expr, ZERO)
        if given == "bool":
            return make("where", expr, *map(number, (1.0, 0.0) if wanted == "float" else (1, 0)))
        if wanted == "int":
            raise InvalidArgument(
                f"{ex.to_text(expr)} is a float and becomes no integer; compute it with // and %, which stay "
                "integers"
            )
        return make("*", expr, number(1.0))

    def index(self, value: Value, index: Value) -> Value:
        """`value[index]`."""
        if not isinstance(value, Table):
            raise InvalidArgument(f"{_told(value)} has no axes to index")
        indices = list(index) if isinstance(index, tuple | list) else [index]
        while indices and (indices[-1] is Ellipsis or indices[-1] == slice(None)):
            indices.pop()
        if len(indices) > value.dims:
            raise InvalidArgument(f"{value.name} has {value.dims} axes left, not {len(indices)}")
        found = []
        for axis, each in enumerate(indices):
            if each is None or isinstance(each, slice) or each is Ellipsis:
                raise InvalidArgument(
                    f"{value.name} is indexed by {_told(each)}; every index is an integer expression"
                )
            place = self.expr(each)
            if self.type_of(place) != "int":
                raise InvalidArgument(
                    f"{value.name} is indexed by {ex.to_text(place)}, a {self.type_of(place)}; an index is "
                    "an integer"
                )
            constant = ex.constant(place)
            if constant is not None and constant < 0:
                place = make("-", value.size(axis), number(-constant))
            found.append(place)
        table = replace(value, indices=(*value.indices, *found))
        return table if table.dims else ex.Load(table.name, table.indices)


def _told(value: Value) -> str:
    if isinstance(value, Table):
        return f"the tensor {value.name}"
    if isinstance(value, slice):
        return "a slice"
    text = ex.to_text(value) if isinstance(value, _EXPR) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Rows

Row = Callable[..., Value]


def _arithmetic(op: str, of_truths: str = "") -> Row:
    """`of_truths` is what torch makes of two truth values: their sum is one of them, no number."""

    def row(t: Operations, input: Value, other: Value) -> Value:
        if of_truths and all(t.type_of(t.expr(each)) == "bool" for each in (input, other)):
            return make(of_truths, t.expr(input), t.expr(other))
        return make(op, t.number(input), t.number(other))

    return row


def _reflected(row: Row) -> Row:
    return lambda t, input, other: row(t, other, input)


def _logic(op: str) -> Row:
    return lambda t, input, other: make(op, t.truth(input), t.truth(other))


def _same_kind(op: str) -> Row:
    return lambda t, input, other: make(op, *t.alike(input, other))


def _unary(op: str) -> Row:
    return lambda t, input: make(op, t.number(input))


def _divide(t: Operations, input: Value, other: Value, rounding_mode: str | None = None) -> Value:
    if rounding_mode not in (None, "floor"):
        raise InvalidArgument(f"{rounding_mode=} is not served; allowed: None, 'floor'")
    return make("//" if rounding_mode else "/", t.number(input), t.number(other))


def _power(t: Operations, input: Value, exponent: Value) -> Value:
    base, power = t.number(input), t.number(exponent)
    by, of = ex.constant(power), ex.constant(base)
    if by is not None and 1 <= by <= 8 and by == int(by):
        result = reduce(partial(make, "*"), [base] * int(by))
        return t.cast(result, torch.float32) if isinstance(by, float) else result
    if by == 0.5:
        return make("sqrt", base)
    if by == -1 and t.type_of(base) == "float":
        return make("/", ONE, base)
    if of is not None and of > 0 and t.type_of(power) == "float":
        return make("exp2", power if of == 2 else make("*", power, number(math.log2(of))))
    raise InvalidArgument(
        f"{ex.to_text(base)} ** {ex.to_text(power)} is not served: a power is by a whole number from 1 to 8, "
        "by 0.5 or -1, or of a positive constant by a float; use exp2 and log2"
    )


def _where(t: Operations, condition: Value, input: Value, other: Value) -> Value:
    return make("where", t.truth(condition), *t.alike(input, other))


def _clamp(t: Operations, input: Value, min: Value = None, max: Value = None) -> Value:
    result = t.number(input)
    if min is not None:
        result = make("max", result, t.number(min))
    return result if max is None else make("min", result, t.number(max))


def _relu(t: Operations, input: Value, inplace: bool = False) -> Value:
    if inplace:
        raise InvalidArgument(refusal("relu_"))
    return _clamp(t, input, 0)


def _pair(op: str) -> Row:
    def row(t: Operations, input: Value, other: Value = None) -> Value:
        if other is None:
            raise InvalidArgument(f"{op} is of two values here, element by element")
        return make(op, t.number(input), t.number(other))

    return row


def _to(t: Operations, input: Value, *args: Value, dtype: Value = None, **named: Value) -> Value:
    for each in (dtype, *args):
        if isinstance(each, torch.dtype):
            return t.cast(input, each)
        if isinstance(each, _EXPR):
            return t.cast(input, TORCH_TYPES[t.type_of(each)])
    return input


def _cast(dtype: torch.dtype) -> Row:
    return lambda t, input: t.cast(input, dtype)


def _sign(t: Operations, input: Value) -> Value:
    x = t.number(input)
    return make("where", make(">", x, ZERO), ONE, make("where", make("<", x, ZERO), number(-1), ZERO))


def _constant(t: Operations, value: Value, dtype: Value = None, **_: Value) -> Value:
    expr = t.expr(value)
    return expr if dtype is None else t.cast(expr, dtype)


def _filled(value: float | None, like: bool) -> Row:
    """`new_ones`, `zeros_like` and their kind, of one element; the value of `full` comes with the call."""

    def row(
        t: Operations, *args: Value, size: Value = (), fill_value: Value = value, dtype: Value = None,
        **_: Value,
    ) -> Value:  # fmt: skip
        rest = list(args[1:] if like else args)
        if rest and isinstance(rest[0], tuple | list):
            size = rest.pop(0)
        elif value is not None:
            size = rest or size
        if tuple(size):
            raise InvalidArgument(f"a tensor of shape {tuple(size)} is made; make it before the call, once")
        expr = t.expr(rest[0] if rest and value is None else fill_value)
        if dtype is None and like and isinstance(args[0], _EXPR):
            dtype = TORCH_TYPES[t.type_of(args[0])]
        return expr if dtype is None else t.cast(expr, dtype)

    return row


def _size(t: Operations, input: Value, dim: Value = None) -> Value:
    if not isinstance(input, Table) or type(dim) is not int or not -input.dims <= dim < input.dims:
        raise InvalidArgument("size() is of an axis of a captured tensor: tensor.size(0)")
    return input.size(dim % input.dims)


def _itself(t: Operations, input: Value, *_: Value, **__: Value) -> Value:
    return input


def _inverse(t: Operations, input: Value) -> Value:
    return make("/", ONE, t.number(input))


def _names(row: Row, names: str) -> dict[str, Row]:
    return dict.fromkeys(names.split(), row)


# fmt: off
ROWS: Mapping[str, Row] = {
    **_names(_arithmetic("+", "|"), "add __add__ __radd__"),
    **_names(_arithmetic("-"), "sub subtract __sub__"),
    **_names(_reflected(_arithmetic("-")), "rsub __rsub__"),
    **_names(_arithmetic("*", "&"), "mul multiply __mul__ __rmul__"),
    **_names(_divide, "div divide true_divide truediv __truediv__"),
    **_names(_reflected(_divide), "__rtruediv__"),
    **_names(_arithmetic("//"), "floor_divide floordiv __floordiv__"),
    **_names(_reflected(_arithmetic("//")), "__rfloordiv__"),
    **_names(_arithmetic("%"), "remainder mod __mod__"),
    **_names(_reflected(_arithmetic("%")), "__rmod__"),
    **_names(_power, "pow __pow__"),
    **_names(_reflected(_power), "__rpow__"),
    **_names(lambda t, input: _power(t, input, 2), "square"),
    **_names(_unary("neg"), "neg negative __neg__"),
    **_names(lambda t, input: t.number(input), "pos positive __pos__"),
    **_names(_unary("abs"), "abs absolute __abs__"),
    **_names(_same_kind("=="), "eq __eq__"), **_names(_same_kind("!="), "ne not_equal __ne__"),
    **_names(_arithmetic("<"), "lt less __lt__"), **_names(_arithmetic("<="), "le less_equal __le__"),
    **_names(_arithmetic(">"), "gt greater __gt__"), **_names(_arithmetic(">="), "ge greater_equal __ge__"),
    **_names(_logic("&"), "logical_and bitwise_and and_ __and__ __rand__"),
    **_names(_logic("|"), "logical_or bitwise_or or_ __or__ __ror__"),
    **_names(_logic("!="), "logical_xor bitwise_xor xor __xor__ __rxor__"),
    **_names(lambda t, input: make("~", t.truth(input)),
             "logical_not bitwise_not invert inv __invert__"),
    **_names(_where, "where"),
    **_names(lambda t, input, mask, value: _where(t, mask, value, input), "masked_fill"),
    **_names(_pair("min"), "minimum min"), **_names(_pair("max"), "maximum max"),
    **_names(_clamp, "clamp clip"),
    **_names(lambda t, input, min: _clamp(t, input, min), "clamp_min"),
    **_names(lambda t, input, max: _clamp(t, input, None, max), "clamp_max"),
    **_names(_relu, "relu"),
    **{name: _unary(name) for name in ("exp", "exp2", "log", "log2", "sqrt", "tanh", "floor")},
    **_names(lambda t, input: make("neg", make("floor", make("neg", t.number(input)))), "ceil"),
    **_names(lambda t, input: _inverse(t, make("sqrt", t.number(input))), "rsqrt"),
    **_names(_inverse, "reciprocal"),
    **_names(lambda t, input: _inverse(t, make("+", ONE, make("exp", make("neg", t.number(input))))),
             "sigmoid expit"),
    **_names(_sign, "sign sgn"),
    **_names(lambda t, input, other: t.index(input, other), "getitem __getitem__"),
    **_names(_size, "size"),
    **_names(_to, "to type type_as"), **_names(_itself, "clone contiguous cuda cpu"),
    **_names(_cast(torch.float32), "float"), **_names(_cast(torch.int32), "int"),
    **_names(_cast(torch.int64), "long"), **_names(_cast(torch.bool), "bool"),
    **_names(_constant, "tensor scalar_tensor as_tensor asarray"),
    **_names(_filled(None, like=False), "full"), **_names(_filled(None, like=True), "full_like new_full"),
    **_names(_filled(1, like=False), "ones"), **_names(_filled(1, like=True), "ones_like new_ones"),
    **_names(_filled(0, like=False), "zeros"), **_names(_filled(0, like=True), "zeros_like new_zeros"),
}
# fmt: on
"""By the name of the function, method or operator."""
METHODS: Mapping[str, Row] = {
    **ROWS,
    "where": lambda t, input, condition, other: _where(t, condition, input, other),
}
"""The same of methods: `x.where(condition, y)` takes the condition second, `torch.where` first."""

_NAMESPACES = (operator, torch, torch.Tensor, torch.special, F)
FUNCTIONS: Mapping[Any, str] = {
    getattr(space, name): name
    for space in _NAMESPACES
    for name in ROWS
    if hasattr(space, name) and (space is not torch.Tensor or METHODS[name] is ROWS[name])
}
"""The functions that have these names; another one of the same name may mean something else."""

# fmt: off
_RANDOM = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "dropout",
    "normal", "multinomial",
})
# fmt: on
_HOST = frozenset({"item", "tolist", "numpy"})


def refusal(name: str) -> str:
    """Why a function without a row is refused."""
    if name in _RANDOM:
        return f"{name} draws random numbers, and a rule gives the same score every time"
    if name in _HOST:
        return f"{name}() asks for a value that differs from pair to pair, and there is none while tracing"
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in ("__setitem__", "__delitem__") or f"__{name[3:]}" in ROWS:
        return f"{name} changes a tensor in place; compute a new value instead"
    first = {row: each for each, row in reversed(list(ROWS.items()))}.values()
    known = ", ".join(sorted(each for each in first if not each.startswith("__")))
    return f"{name} has no meaning in a kernel; known: {known}"
