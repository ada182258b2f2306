"""Imports point one way, and what is light stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "triton", "jinja2", "sqlalchemy", "alembic", "optuna", "rich", "transformers")


def test_the_layers_of_pyproject_hold() -> None:
    # In a process of its own: the tool switches off all loggers that exist.
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_imports_the_root_package() -> None:
    """The root re-exports; importing it from inside would tie every module to all others."""
    offenders = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(ROOT.joinpath("flashgen").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip() == "import flashgen" or line.strip().startswith("import flashgen as")
    ]
    assert offenders == []


def loaded_by(code: str) -> set[str]:
    """Which of `HEAVY` a fresh process has imported after running some code."""
    script = f"{code}\nimport sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import flashgen.spec.attention, flashgen.spec.tiles, flashgen.spec.record", set()),
        ("import flashgen.codegen.source", {"jinja2"}),
        ("import flashgen.codegen.abi, flashgen.codegen.families", set()),
        ("import flashgen.cli.main", set()),
        ("import flashgen", set()),
    ],
)
def test_imports_stay_light(code: str, allowed: set[str]) -> None:
    assert loaded_by(code) <= allowed
