"""Tables of named rules, and how a command line writes one: `sliding_window(1023, 0)`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flashgen.errors import InvalidArgument, UnknownName

T = TypeVar("T")


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


def read(text: str, what: str, example: str) -> ast.expr:
    """The syntax tree of what a user wrote.

    Raises:
        InvalidArgument: it is not even an expression.
    """
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidArgument(f"{text!r} is not a {what}; write one like {example}") from None


def read_entry(node: ast.expr, table: Mapping[str, Entry[T]], what: str, example: str) -> T:
    """Builds the entry that a name, or a name called with literals, asks for.

    Raises:
        InvalidArgument: unknown name, or arguments the entry does not take.
    """
    called = node.func if isinstance(node, ast.Call) else node
    if not isinstance(called, ast.Name):
        raise InvalidArgument(f"{ast.unparse(node)!r} is not a {what}; write one like {example}")
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
            f"{ast.unparse(node)!r}: {error}; it is called as {called.id}{_parameters(signature)}"
        ) from None
    return build(*bound.args, **bound.kwargs)


def _parameters(signature: inspect.Signature) -> str:
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return f"({', '.join(map(str, bare))})"


def _literal(node: ast.expr) -> int | float | str | bool | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = node
    if value is not None and not isinstance(value, int | float | str):
        shown = ast.unparse(node)
        raise InvalidArgument(f"{shown!r} is no argument; write a number, None or a word in quotes")
    return value
