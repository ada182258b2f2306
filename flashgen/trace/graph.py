"""Runs a callable on stand-ins that record a torch.fx graph, each node with what it means as an expression.

torch.fx's own proxies, not make_fx: they see what the user wrote, one node for a function or operator as it
stands there, and a branch at its line. make_fx would want real or fake tensors, takes branches of real ones
silently, and turns names into aten operators first; its imports take a second.
"""

from __future__ import annotations

import linecache
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.fx.proxy import Proxy, TracerBase
from torch.overrides import TorchFunctionMode

from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec.expr import Expr
from flashgen.spec.form import brief
from flashgen.trace.operations import (
    FUNCTIONS,
    METHODS,
    ROWS,
    TORCH_TYPES,
    Operations,
    Table,
    Value,
    refusal,
    size_name,
)

_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _PACKAGES)
_UNKNOWN_DEVICE = torch.device("meta")


class Stand(Proxy):
    """Stands for a position, a score, a captured number or tensor, or what is computed of them."""

    __array_ufunc__ = None  # an operator of numpy's numbers leaves the result to ours

    @property
    def value(self) -> Value:
        """What it means."""
        return self.node.meta["value"]

    @property
    def dtype(self) -> torch.dtype:
        tracer, value = self.tracer, self.value
        assert isinstance(tracer, _Tracer)
        if isinstance(value, Table):
            return tracer.dtypes[value.name]
        return TORCH_TYPES[tracer.operations.type_of(value)]

    @property
    def device(self) -> torch.device:
        return _UNKNOWN_DEVICE

    @property
    def shape(self) -> tuple[Any, ...]:
        tracer, value = self.tracer, self.value
        assert isinstance(tracer, _Tracer)
        if not isinstance(value, Table):
            return torch.Size([])
        return tuple(tracer.placeholder("size", value.size(axis)) for axis in range(value.dims))

    @property
    def ndim(self) -> int:
        return self.value.dims if isinstance(self.value, Table) else 0

    def dim(self) -> int:
        return self.ndim

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # numpy asks whether it is an array, and would believe any answer
            raise AttributeError(name)
        return super().__getattr__(name)

    def _number(self) -> NoReturn:
        tracer = self.tracer
        assert isinstance(tracer, _Tracer)
        tracer.refuse(self, "is needed as a Python number, which differs from pair to pair; "
                            "use torch's functions and operators")  # fmt: skip

    __int__ = __float__ = __index__ = __complex__ = __round__ = __hash__ = _number

    def __len__(self) -> int:
        tracer = self.tracer
        assert isinstance(tracer, _Tracer)
        tracer.refuse(self, "has no length in Python; write tensor.shape[0]")

    def __setitem__(self, *_: Any) -> None:
        tracer = self.tracer
        assert isinstance(tracer, _Tracer)
        tracer.refuse(self, "is changed in place; compute a new value instead")


def _type(value: Any, *rest: Any) -> Any:
    return Tensor if isinstance(value, Stand) and not rest else type(value, *rest)


def _isinstance(value: Any, kinds: Any) -> bool:
    return issubclass(Tensor, kinds) if isinstance(value, Stand) else isinstance(value, kinds)


BUILTINS: Mapping[str, Any] = {"type": _type, "isinstance": _isinstance}
"""Of Python's, those that tell a stand-in from a tensor. A `__class__` would do for `isinstance`, but torch's
C code believes it and crashes."""


class _Tracer(TracerBase):
    def __init__(self, types: Mapping[str, str]) -> None:
        self.graph = fx.Graph()
        self.scope = fx.proxy.Scope("", None)
        self.module_stack = OrderedDict()
        self.node_name_to_scope = {}
        self.operations = Operations(types)
        self.dtypes: dict[str, torch.dtype] = {}

    def proxy(self, node: fx.Node) -> Proxy:
        return Stand(node, self)

    def placeholder(self, name: str, value: Value) -> Proxy:
        node = self.create_node("placeholder", name, (), {})
        node.meta["value"] = value
        return self.proxy(node)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Proxy:
        node = self.create_node(kind, target, self.create_arg(args), self.create_arg(kwargs))
        is_method = kind == "call_method"
        name, rows = (target, METHODS) if is_method else (FUNCTIONS.get(target, ""), ROWS)
        if name not in rows or (is_method and not hasattr(Tensor, name)):
            called = target if is_method else getattr(target, "__name__", str(target))
            if target is getattr:
                raise InvalidArgument(f"node {node}: the attribute {node.args[1]} has no meaning in a kernel")
            raise InvalidArgument(f"node {node}: {refusal(called)}")
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["value"])
        try:
            node.meta["value"] = rows[name](self.operations, *args, **kwargs)
        except (InvalidArgument, TypeError, RecursionError) as error:
            told = ex.TOO_DEEP if isinstance(error, RecursionError) else str(error)
            told = told.replace("<lambda>()", f"{name}()").replace("row()", f"{name}()")
            raise InvalidArgument(f"node {node}: {told}") from None
        return self.proxy(node)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            raise InvalidArgument(
                f"a tensor {tuple(a.shape)} is used that the callable does not capture by a name of its own, "
                "or makes itself; make it outside, and read it as a variable or attribute"
            )
        if type(a).__module__ == "numpy" and getattr(a, "ndim", None) == 0:
            a = a.item()
        try:
            return super().create_arg(a)
        except NotImplementedError:
            raise InvalidArgument(
                f"{a!r} is no argument of a rule's functions; use numbers and torch tensors "
                "(torch.from_numpy of an array, before the call)"
            ) from None

    def to_bool(self, obj: Proxy) -> bool:
        self.refuse(obj, "decides a branch of Python (if, and, or, not, assert, a chain like a < b < c), but "
                         "differs from pair to pair; write torch.where(condition, x, y), or join comparisons "
                         "by &, | and ~")  # fmt: skip

    def iter(self, obj: Proxy) -> Iterator[Any]:
        self.refuse(obj, "is looped over; index it")

    def keys(self, obj: Proxy) -> Any:
        self.refuse(obj, "has no keys")

    def refuse(self, obj: Proxy, why: str) -> NoReturn:
        value = obj.node.meta.get("value")
        told = value.name if isinstance(value, Table) else ex.to_text(value) if value is not None else ""
        raise InvalidArgument(f"node {obj.node}: {told} {why}".replace("  ", " "))


class _Watch(TorchFunctionMode):
    """Hands every function of torch that the callable calls to the tracer, also those without stand-ins."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.create_proxy("call_function", func, args, kwargs or {})


class Recording:
    """One run of a callable: give it the captures, then run it."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        """Of parameters and operands, as `expr.result_type` takes them."""
        self._tracer = _Tracer(self.types)

    def number(self, name: str, type_: str) -> Proxy:
        """The stand-in for a captured number; `type_` is `int` or `float`."""
        self.types[name] = type_
        return self._tracer.placeholder(name, ex.Param(name))

    def tensor(self, name: str, tensor: Tensor, type_: str) -> Proxy:
        """The stand-in for a captured tensor, of elements of a type."""
        rank = tensor.dim()
        self.types[name] = type_
        self.types |= {size_name(name, rank, axis): "int" for axis in range(rank)}
        self._tracer.dtypes[name] = tensor.dtype
        return self._tracer.placeholder(name, Table(name, rank))

    def run(self, function: Callable[..., Any], symbols: tuple[str, ...]) -> Expr:
        """The expression that a callable of stand-ins computes.

        Args:
            symbols: of `expr.SYMBOLS`, those that it is given, in order.

        Raises:
            InvalidArgument: it does what no expression can say.
            Exception: what the callable raises by itself.
        """
        tracer = self._tracer
        given = [tracer.placeholder(symbol, ex.Symbol(symbol)) for symbol in symbols]
        with _Watch(tracer):
            result = function(*given)
        if isinstance(result, Tensor):
            tracer.create_arg(result)
        if isinstance(result, Proxy) and not isinstance(result, Stand):
            raise InvalidArgument("the result is an attribute, which has no meaning in a kernel")
        return tracer.operations.expr(result.value if isinstance(result, Stand) else result)


def place_of(error: BaseException) -> str:
    """Where in the user's code an error came up: file, line and the line's text."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):  # the innermost frame of the user's
            line = brief(linecache.getline(code.co_filename, trace.tb_lineno).strip(), 110)
            place = f"{code.co_filename}, line {trace.tb_lineno}" + (f", `{line}`" if line else "")
        trace = trace.tb_next
    return place
