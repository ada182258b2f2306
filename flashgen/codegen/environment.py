"""The Jinja environment: strict names, and macros that take the indentation of their call."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket
from jinja2.ext import Extension

from flashgen.settings import SETTINGS, data_folder

# A macro call that stands alone on its line.
_LONE_CALL = re.compile(r"^( +)\{\{ (.+) \}\}$", re.MULTILINE)


class Reindent(Extension):
    """Indents every line a macro returns by the indentation of the call that stands alone on its line."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Rewrites such calls when a template is loaded; the number of lines stays the same."""
        return _LONE_CALL.sub(
            lambda m: f"{{{{ ({m[2]}) | trim('\\n') | indent({len(m[1])}, first=True) }}}}", source
        )


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
    return made


def tidy(text: str) -> str:
    """Blank lines as a person leaves them: one inside a function, two between top-level things."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}(?=[ \t])", "\n\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return text.strip("\n") + "\n"
