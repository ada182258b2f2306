"""The README's Python examples run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(
    r"<!-- run: tests/test_readme.py -->\n```python\n(.*?)```", README.read_text(), re.DOTALL
)


@pytest.mark.parametrize("code", EXAMPLES, ids=[f"example{i}" for i in range(len(EXAMPLES))])
def test_example_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=README.parent)
    assert done.returncode == 0, done.stderr[-2000:]


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "DESIGN.md"):
        text = (README.parent / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (README.parent / target).exists(), f"{name} links to {target}"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2
