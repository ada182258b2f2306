"""The Jinja environment: strict names, and macros that take the indentation of their call."""

from __future__ import annotations

import re
from functools import lru_cache

import jinja2
from jinja2.ext import Extension

from flashgen.settings import data_folder

# A macro call that stands alone on its line.
_LONE_CALL = re.compile(r"^( +)\{\{ (.+) \}\}$", re.MULTILINE)


class Reindent(Extension):
    """Indents every line a macro returns by the indentation of the call that stands alone on its line."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Rewrites such calls when a template is loaded; the number of lines stays the same."""
        return _LONE_CALL.sub(
            lambda m: f"{{{{ ({m[2]}) | trim('\\n') | indent({len(m[1])}, first=True) }}}}", source
        )


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The one environment of the process; templates lie beside the package or inside the wheel."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_folder("templates")),
        extensions=[Reindent],
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def tidy(text: str) -> str:
    """Blank lines as a person leaves them: one inside a function, two between top-level things."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}(?=[ \t])", "\n\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return text.strip("\n") + "\n"
