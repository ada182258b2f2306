"""The Jinja environment: strict names, and macros that take the indentation of their call."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
import textwrap
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket
from jinja2.ext import Extension

from flashgen.settings import SETTINGS, data_folder

# A macro call that stands alone on its line.
_LONE_CALL = re.compile(r"^( *)\{\{ ((?:(?!\}\}).)+) \}\}\n", re.MULTILINE)
LINE_LENGTH = 110
"""Of rendered code, as of our own."""


class Reindent(Extension):
    """Lines of a macro that is called alone on a line are indented like the call; no lines leave no line."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Rewrites such calls when a template is loaded; the number of lines stays the same."""
        return _LONE_CALL.sub(lambda m: f"{{{{ ({m[2]}) | lines({len(m[1])})\n}}}}", source)


def _lines(text: object, indent: int) -> str:
    stripped = str(text).strip("\n")
    return textwrap.indent(stripped, " " * indent) + "\n" if stripped else ""


class _Compiled(jinja2.FileSystemBytecodeCache):
    """Templates compiled by earlier processes: 0.1 s of the first call of each.

    An entry counts for one text of its template and of this file; a folder that cannot be used is no cache.
    """

    def __init__(self, folder: Path) -> None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        super().__init__(str(folder))
        self._rules = Path(__file__).read_text(encoding="utf-8")

    def get_source_checksum(self, source: str) -> str:
        """Of all that the compiled form depends on, but for Jinja, whose entries name its version."""
        return hashlib.sha256((self._rules + source).encode()).hexdigest()

    def load_bytecode(self, bucket: Bucket) -> None:
        """Leaves the bucket empty where there is no entry that can be read."""
        with suppress(OSError):
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Does nothing where nothing can be written."""
        with suppress(OSError):
            super().dump_bytecode(bucket)


def in_gluon(text: str) -> str:
    """Lines of Triton as Gluon spells them: what the partials share means the same in both."""
    return re.sub(r"\btl\.", "gl.", text).replace("@triton.jit", "@gluon.jit")


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The one environment of the process; templates lie beside the package or inside the wheel."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_folder("templates")),
        bytecode_cache=_Compiled(SETTINGS.cache_dir() / "templates"),
        extensions=[Reindent],
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters["in_gluon"] = in_gluon
    made.filters["lines"] = _lines
    return made


def tidy(text: str) -> str:
    """Blank lines as a person leaves them: one in a function, two between top-level things; no long lines."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}(?=[ \t])", "\n\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    text = re.sub(rf"^.{{{LINE_LENGTH + 1},}}$", lambda m: _folded(m[0]), text, flags=re.MULTILINE)
    return text.strip("\n") + "\n"


def _folded(line: str) -> str:
    """A long statement over several lines that mean the same: what its call is given, or what it assigns.

    A comment behind it would have to move, and so keeps its line as it is.
    """
    code = line.lstrip()
    indent = " " * (len(line) - len(code))
    try:
        (statement,) = ast.parse(code + " pass" if code.endswith(":") else code).body
    except (SyntaxError, ValueError):
        return line
    value = getattr(statement, "iter", None) or getattr(statement, "value", None)
    if not isinstance(value, ast.expr) or value.end_col_offset != len(code.removesuffix(":")):
        return line
    room = LINE_LENGTH - len(indent) - 4
    if isinstance(value, ast.Call):
        given: list[ast.expr | ast.keyword] = [*value.args, *value.keywords]
        given.sort(key=lambda each: each.col_offset)
        first, last = given[0].col_offset, value.end_col_offset - 1
        inner = code[first:last]
        if len(inner) > room:
            pieces = (_unbroken(each, code, room) for each in given)
            inner = textwrap.fill(", ".join(pieces) + ",", room, break_long_words=False).replace("\0", " ")
    elif isinstance(statement, ast.Assign):
        first, last = value.col_offset, len(code)
        inner = "\n".join(_terms(value, code)) if last - first > room else code[first:last]
    else:
        return line
    opening, closing = ("", "") if isinstance(value, ast.Call) else ("(", ")")
    head, tail = code[:first] + opening, closing + code[last:]
    return textwrap.indent(f"{head}\n{textwrap.indent(inner, '    ')}\n{tail}", indent)


def _unbroken(given: ast.expr | ast.keyword, code: str, room: int) -> str:
    """What a call is given, with NUL for each space where no line may end; if it is too long, one may between
    its terms.
    """
    text = code[given.col_offset : given.end_col_offset]
    terms = _terms(given, code) if isinstance(given, ast.expr) and len(text) >= room else [text]
    return " ".join(term.replace(" ", "\0") for term in terms)


def _terms(value: ast.expr, code: str) -> list[str]:
    """An expression's text cut before each of its outermost operators."""
    cuts = [value.col_offset, value.end_col_offset or len(code)]
    while isinstance(value, ast.BinOp):
        end = value.left.end_col_offset or 0
        cuts.append(end + len(code[end:]) - len(code[end:].lstrip(" )")))
        value = value.left
    return [code[start:end].strip() for start, end in itertools.pairwise(sorted(cuts))]
