"""Callables in code that torch.compile traces, without a break of its graph.

The rule of a callable is found while the graph is made, as of a constant. Its numbers and tensors are read by
operations that torch sees, so that they become inputs of the graph or guards; all else that it captures is
guarded.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec.catalog import constant_in_traces
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import ScoreMod
from flashgen.trace import rules
from flashgen.trace.captures import Captures, Path, captures, paths

_NOT_HERE = (
    "torch.compile does not see what this callable captures, for it is a method, an object, reads one or a "
    "class, has defaults, or is made within the code that is compiled; make the rule outside, by "
    "flashgen.trace.mask_mod(function) or flashgen.trace.score_mod(function), and give that instead"
)


NOT_COMPOSED = (
    "torch.compile does not compose a callable with other score rules; make its rule outside of what is "
    "compiled, by flashgen.trace.score_mod(function)"
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the graph has to read of a callable."""

    refusal: str = ""
    traced: rules.Traced | None = None
    numbers: tuple[Path, ...] = ()
    tensors: tuple[Path, ...] = ()
    functions: tuple[Path, ...] = ()
    constants: tuple[tuple[Path, Any], ...] = ()
    """What is compiled in, and its values."""


@constant_in_traces
def _plan(kind: str, function: Callable[..., Any]) -> _Plan:
    try:
        captured = captures(function)
        traced = rules.rule_of(kind, function)
        traced.bound(captured, None)
        found = paths(function)
    except InvalidArgument as error:
        return _Plan(str(error))
    if found is None or not traced.lasting:
        return _Plan(_NOT_HERE)
    constants = found.constants
    if all(axis is not None for _, axis in traced.values):
        constants += tuple(zip(found.numbers, captured.numbers, strict=True))
    return _Plan("", traced, found.numbers, found.tensors, found.functions, constants)


@constant_in_traces
def _guard(function: Any) -> None:
    """Has torch compile anew where a function is of other code: arguments of this must be constants."""


def _is_seen(function: Any) -> bool:
    """Whether torch sees the cells of a function: not of one that is made while it traces."""
    try:
        cells = function.__closure__
    except AttributeError:
        return False
    return isinstance(function, types.FunctionType) and (cells is None or len(cells) > 0)


def _read(function: Any, path: Path) -> Any:
    for step, at in path:
        if step == "cell":
            function = function.__closure__[at].cell_contents
        elif step == "global":
            function = function.__globals__[at]
        elif step == "attribute":
            function = getattr(function, at)
        else:
            function = function[at]
    return function


def traced(kind: str, function: Any, sizes: rules.Sizes | None) -> Mask | ScoreMod:
    """As `rules.traced`, called in code that torch.compile traces.

    Raises:
        InvalidArgument: it cannot be traced, or torch does not see what it captures. Code that need not be
            one graph goes on without a graph here.
    """
    if not _is_seen(function):
        raise InvalidArgument(_NOT_HERE)
    plan = _plan(kind, function)
    if plan.refusal:
        raise InvalidArgument(plan.refusal)
    for path in plan.functions:
        _guard(_read(function, path))
    for path, value in plan.constants:
        if _read(function, path) != value:
            raise InvalidArgument(_NOT_HERE)  # never: the comparison makes torch guard the value
    found = Captures()
    found.numbers += [_read(function, path) for path in plan.numbers]
    found.tensors += [_read(function, path) for path in plan.tensors]
    return plan.traced.bound(found, sizes, checked=True)  # type: ignore[union-attr]
