"""What every command shares: one JSON document or a page for people, and errors without a traceback."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashgen.errors import FlashGenError, InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes beside 0: the work failed; the command line asks for what does not exist; Ctrl-C."""

_JSON = "flashgen.json"


class Commands(click.Group):
    """A group that reports a `FlashGenError` as one message, and as JSON where `--json` was given."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order they were added, which is that of the work."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _plain_warnings():
                return super().invoke(ctx)
        except FlashGenError as error:
            raise _Reported(error, ctx.meta.get(_JSON, False)) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            raise  # click ends quietly: the reader of our output has gone
        except OSError as error:
            raise _Reported(error, ctx.meta.get(_JSON, False)) from error


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """FlashGen's own warnings as one line of text, without the place in the code."""
    usual = warnings.showwarning

    def tell(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category.__module__.startswith("flashgen."):
            click.echo(f"warning: {message}", err=True)
        else:
            usual(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.showwarning = tell
        yield


class _Reported(click.ClickException):
    """An expected error on its way out."""

    def __init__(self, error: Exception, as_json: bool) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__
        self.as_json = as_json
        self.code = USAGE if isinstance(error, InvalidArgument) else FAILED

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """Click ends the process with it."""
        return self.code

    def show(self, file: Any = None) -> None:
        if self.as_json:
            click.echo(json.dumps({"error": {"kind": self.kind, "message": self.message}}, indent=2))
        super().show(file)


def json_option(function: F) -> F:
    """Adds `--json`, which the command receives as `as_json`."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[_JSON] = value
        return value

    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,  # before options that may fail
        callback=remember,
        help="Print one JSON document instead of text.",
    )(function)


def emit(data: Any, as_json: bool, show: Callable[[Console], None]) -> None:
    """Prints `data` as JSON, or lets `show` print for people."""
    if as_json:
        click.echo(json.dumps(_finite(data), indent=2, allow_nan=False))
    else:
        show(console())


def console(stderr: bool = False) -> Console:
    """A terminal for tables. Where the output is a file or a pipe, lines are as long as they need to be."""
    from rich.console import Console

    # Without markup: `mask[q_pos >= k_idx]` would lose what looks like a tag.
    made = Console(stderr=stderr, highlight=False, markup=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=200)


def table(title: str, *columns: str) -> Table:
    """An empty table. Columns whose name begins with `>` are aligned to the right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return made


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
