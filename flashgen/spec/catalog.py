"""Tables of named rules, and how a command line writes one: `sliding_window(1023, 0)`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Generic, TypeVar

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec.form import brief, shown

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

MAX_TEXT = 4096
"""Characters of a mask or score rule that a person writes; more would only meet Python's own limits."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One named mask or score rule."""

    build: Callable[..., T]
    doc: str
    """One line for people."""
    samples: tuple[tuple[Any, ...], ...] = ((),)
    """Arguments that show each of its forms; tests run over them."""

    def examples(self) -> tuple[T, ...]:
        """What `build` makes of each sample."""
        return tuple(self.build(*sample) for sample in self.samples)


def constant_in_traces(function: F) -> F:
    """Marks a function of texts that torch.compile calls as it traces, instead of tracing it.

    It does what torch.compiler.assume_constant_result does, which would import torch's compiler first.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def remembered(maxsize: int) -> Callable[[F], F]:
    """Decorates a function of texts: `lru_cache` and `constant_in_traces` in one, for 0.1 us a call more.

    torch.compile looks through an `lru_cache` that it meets, and warns its user that results may be wrong.
    """

    def decorate(function: F) -> F:
        cached = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args: Any) -> Any:
            return cached(*args)

        return constant_in_traces(call)  # type: ignore[return-value]

    return decorate


def read(text: str, what: str, example: str, build: Callable[[ast.expr], T]) -> T:
    """What `build` makes of the syntax tree of what a user wrote.

    Raises:
        InvalidArgument: it is not even an expression, or too large a one; and what `build` raises.
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"{shown(text)} is not a {what}, which is a text; write one like {example}")
    if len(text) > MAX_TEXT:
        raise InvalidArgument(
            f"a {what} of {len(text)} characters; at most {MAX_TEXT} are read, write one like {example}"
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidArgument(f"{shown(text)} is not a {what}; write one like {example}") from None
    try:
        return build(tree)
    except RecursionError:
        raise InvalidArgument(
            f"{shown(text)} is nested too deeply for a {what}; write one like {example}"
        ) from None


def read_entry(node: ast.expr, table: Mapping[str, Entry[T]], what: str, example: str) -> T:
    """Builds the entry that a name, or a name called with literals, asks for.

    Raises:
        InvalidArgument: unknown name, or arguments the entry does not take.
    """
    called = node.func if isinstance(node, ast.Call) else node
    if not isinstance(called, ast.Name):
        raise InvalidArgument(f"{shown(ast.unparse(node))} is not a {what}; write one like {example}")
    if called.id not in table:
        raise UnknownName(what, called.id, table)
    build = table[called.id].build
    args: list[Any] = []
    named: dict[str | None, Any] = {}
    if isinstance(node, ast.Call):
        args = [_literal(arg) for arg in node.args]
        named = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    signature = inspect.signature(build)
    try:
        bound = signature.bind(*args, **named)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgument(
            f"{shown(ast.unparse(node))}: {brief(str(error), 120)}; "
            f"it is called as {called.id}{_parameters(signature)}{_such_as(called.id, table[called.id])}"
        ) from None
    return build(*bound.args, **bound.kwargs)


def _such_as(name: str, entry: Entry[Any]) -> str:
    """A call of it to write, where one needs arguments."""
    sample = ", ".join(map(repr, entry.samples[0]))
    return f", such as {name}({sample})" if sample else ""


def _parameters(signature: inspect.Signature) -> str:
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return f"({', '.join(map(str, bare))})"


def _literal(node: ast.expr) -> int | float | str | bool | tuple[int, ...] | None:
    value: Any
    if isinstance(node, ast.Name):  # a word, as a shell leaves it of one in quotes
        return node.id
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = node
    if isinstance(value, tuple) and all(type(each) is int for each in value):
        return value
    if value is None or isinstance(value, int | float | str):
        return value
    raise InvalidArgument(
        f"{shown(ast.unparse(node))} is no argument; write a number, (numbers), None or a word"
    )
