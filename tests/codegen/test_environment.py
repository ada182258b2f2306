"""The Jinja environment."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from flashgen.codegen.environment import LINE_LENGTH, _Compiled, environment, tidy


def test_a_compiled_template_counts_for_one_text_only(tmp_path: Path) -> None:
    templates, cache = tmp_path / "templates", tmp_path / "cache"
    templates.mkdir()
    texts = []
    for text in ("one", "two"):
        (templates / "t").write_text(text)
        loader = jinja2.FileSystemLoader(templates)
        made = jinja2.Environment(loader=loader, bytecode_cache=_Compiled(cache))
        texts.append(made.get_template("t").render())
    assert texts == ["one", "two"] and len(list(cache.iterdir())) == 1


def test_compiled_templates_are_kept_and_a_bad_folder_or_entry_is_no_cache(tmp_path: Path) -> None:
    """Rendered by fresh processes: cold, warm, with damaged entries, and where the folder is a file."""
    script = (
        "import landscape\n"
        "from flashgen.codegen.source import render\n"
        "print(render(landscape.workload().spec, landscape.space()[0], landscape.TOOLCHAIN).hash)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "tune"), *filter(None, sys.path)])

    def rendered(cache: Path) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": paths, "FLASHGEN_CACHE": str(cache)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    cache = tmp_path / "cache"
    cold = rendered(cache)
    entries = list((cache / "templates").iterdir())
    assert len(entries) >= 7
    assert rendered(cache) == cold
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-9])
    assert rendered(cache) == cold
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert rendered(blocked) == cold


def test_a_macro_called_alone_on_its_line_gives_lines_of_that_indentation_or_none() -> None:
    template = """{% macro body(several) %}
a = 1
{% if several %}

b = 2
{% endif %}
{% endmacro %}
{% macro nothing() %}{% endmacro %}
def f():
    {{ body(False) }}
    {{ nothing() }}
    {{ body(True) }}
{{ nothing() }}
c = {{ 3 }}
"""
    expected = "def f():\n    a = 1\n    a = 1\n\n    b = 2\nc = 3\n"
    assert environment().from_string(template).render() == expected


@pytest.mark.parametrize(
    ("statement", "lines"),
    [
        ("f.g.h(A, B)", ["f.g.h(", "    A, B", ")"]),
        (
            "x.y[0].f(A, B, C, D, [E, F], k=1)",
            ["x.y[0].f(", "    A, B,", "    C, D,", "    [E, F],", "    k=1,", ")"],
        ),
        ("x = f(A, B)", ["x = f(", "    A, B", ")"]),
        ("for i in range(A, B):", ["for i in range(", "    A, B", "):"]),
        ("abcdefghij = A + B", ["abcdefghij = (", "    A + B", ")"]),
        ("x = f(A, B) // (C) * D", ["x = (", "    f(A, B)", "    // (C)", "    * D", ")"]),
        ("if A == B == C:", ["if A == B == C:"]),
        ("# f(A, B, C)", ["# f(A, B, C)"]),
        ("f(A, B)  # why", ["f(A, B)  # why"]),
        ("x = 'A, B, C", ["x = 'A, B, C"]),
    ],
)
def test_a_long_line_is_folded_into_lines_that_mean_the_same(statement: str, lines: list[str]) -> None:
    def long(text: str) -> str:
        """Each capital letter as a name of 47 letters: two of them, indented, make a line too long."""
        return "".join(each * 47 if each.isupper() else each for each in text)

    inside = "def outer():\n    if x:\n        pass\n"
    given, *wanted = (" " * 8 + long(each) for each in (statement, *lines))
    text = inside + given + ("\n            pass\n" if statement.endswith(":") else "\n")
    folded = tidy(text)
    assert len(given) > LINE_LENGTH
    assert folded.splitlines()[3 : 3 + len(wanted)] == wanted
    if "'" not in statement:
        assert ast.dump(ast.parse(folded)) == ast.dump(ast.parse(text))
