"""The Jinja environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jinja2

from flashgen.codegen.environment import _Compiled


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
