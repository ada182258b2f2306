"""What every command shares: one JSON document or a page for people, and errors without a traceback."""

from __future__ import annotations

import codecs
import io
import json
import math
import shutil
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashgen.errors import FlashGenError, InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from flashgen.spec.attention import Workload

F = TypeVar("F", bound=Callable[..., Any])

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes beside 0: the work failed; the command line asks for what does not exist; Ctrl-C."""

_JSON = "flashgen.json"

_ANY_NAME = "flashgen.any_name"


def _any_name(error: UnicodeError) -> tuple[str | bytes, int]:
    """Bytes of a file's name that are no text as they are, and what a terminal cannot show by its number."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(_ANY_NAME, _any_name)


class Commands(click.Group):
    """A group that reports what goes wrong as one message, and as JSON where `--json` was given."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order they were added, which is that of the work."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Before anything is parsed: what cannot be parsed is reported as JSON, too.
        ctx.meta[_JSON] = ctx.meta.get(_JSON, False) or "--json" in args
        with _reporting(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors=_ANY_NAME)
        with _reporting(ctx), _whole_imports(), _plain_warnings():
            return super().invoke(ctx)


@contextmanager
def _reporting(ctx: click.Context) -> Iterator[None]:
    """Turns expected errors into click's, and prints them as JSON where `--json` was given."""
    try:
        try:
            yield
        except KeyboardInterrupt:
            _as_json(ctx, "KeyboardInterrupt", "interrupted")
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            raise  # click ends quietly: the reader of our output has gone
        except (FlashGenError, OSError) as error:
            raise _Reported(error) from error
    except click.ClickException as error:
        kind = error.kind if isinstance(error, _Reported) else type(error).__name__
        _as_json(ctx, kind, error.format_message())
        raise


def _as_json(ctx: click.Context, kind: str, message: str) -> None:
    if ctx.parent is None and ctx.meta.get(_JSON):  # the outermost group prints it, once
        click.echo(json.dumps({"error": {"kind": kind, "message": message}}, indent=2))


AGAIN_S = 0.05
"""How long Ctrl-C waits before it looks again whether an import is over."""


@contextmanager
def _whole_imports() -> Iterator[None]:
    """Lets Ctrl-C wait for the end of an import, a second or two for torch.

    What is imported may pass over it, so that the command goes on as if nothing was: torch runs callbacks,
    which raise nothing. Or it breaks half made, and the command ends with an ImportError.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not Commands.invoke.__code__:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                signal.signal(signal.SIGALRM, interrupt)
                signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    # Not where Ctrl-C is somebody else's business: of the shell for a job in the background, of a program
    # that calls this, or of the outer group.
    mine = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    alarm = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGALRM) is interrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)


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

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__
        self.code = USAGE if isinstance(error, InvalidArgument) else FAILED

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """Click ends the process with it."""
        return self.code

    def show(self, file: Any = None) -> None:
        """On a terminal with lines broken between words; elsewhere as it is, to be searched."""
        told = f"Error: {self.message}"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            told = "\n".join(
                textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
                for line in told.splitlines()
            )
        click.echo(told, file=file, err=True)


def json_option(function: F) -> F:
    """Adds `--json`, which the command receives as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(
        function
    )


def emit(data: Any, as_json: bool, show: Callable[[Console], None]) -> None:
    """Prints `data` as JSON, or lets `show` print for people."""
    if as_json:
        click.echo(json.dumps(_finite(data), indent=2, allow_nan=False))
    else:
        show(console())


def console(stderr: bool = False) -> Console:
    """A terminal that neither cuts nor folds lines, so that names and paths can be copied."""
    from rich.console import Console

    # Without markup: `mask[q_pos >= k_idx]` would lose what looks like a tag.
    made = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 200  # progress in a log
    return made


class Table:
    """Rows under a title, each cell whole.

    A column whose name begins with `>` is aligned to the right. One with `?` before that is left out, the
    last first, where a terminal is too narrow. Without any names there is no header.
    """

    GAP = "   "

    def __init__(self, title: str, *columns: str) -> None:
        self.title = title
        self._optional = [name.startswith("?") for name in columns]
        names = [name.removeprefix("?") for name in columns]
        self._right = [name.startswith(">") for name in names]
        self.names = [name.removeprefix(">") for name in names]
        self.rows: list[Sequence[str]] = []

    def add_row(self, *cells: str) -> None:
        """Adds one cell for each column."""
        self.rows.append(cells)

    def print(self, out: Console, styles: Mapping[str, str] | None = None) -> None:
        """Prints it, without spaces at the ends of lines; `styles` colours cells by their text."""
        from rich.text import Text

        shown = self._fitting(out.width if out.is_terminal else math.inf)
        widths = [self._width(column) for column in shown]
        if self.title:
            out.print(self.title)
        header = [self.names] if any(self.names) else []
        for number, row in enumerate([*header, *self.rows]):
            line = Text(" ")
            for column, width in zip(shown, widths, strict=True):
                cell = row[column]
                line.append(
                    cell.rjust(width) if self._right[column] else cell.ljust(width), (styles or {}).get(cell)
                )
                line.append(self.GAP)
            line.rstrip()
            out.print(line)
            if header and not number:
                out.print(" " + self.GAP.join("─" * width for width in widths))
        if missing := [name for column, name in enumerate(self.names) if column not in shown]:
            out.print(f" (too narrow for: {'; '.join(missing)})")

    def _width(self, column: int) -> int:
        return max(len(row[column]) for row in [self.names, *self.rows])

    def _fitting(self, room: float) -> list[int]:
        """The columns that are shown."""
        shown = list(range(len(self.names)))
        optional = [column for column in shown if self._optional[column]]
        while (
            optional and 1 + sum(self._width(each) + len(self.GAP) for each in shown) - len(self.GAP) > room
        ):
            shown.remove(optional.pop())
        return shown


def short_name(workload: Workload) -> str:
    """`d128 causal bf16 b4h32kv8q4096k4096`."""
    spec = workload.spec
    dims = f"d{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"d{spec.head_dim}v{spec.head_dim_v}"
    rules = [rule.name for rule in (spec.mask, spec.score_mod) if rule is not None]
    return " ".join([dims, *rules, spec.dtype_label, workload.name])


def count(number: int, noun: str) -> str:
    """`1 problem`, `2 problems`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
