"""The README's Python examples run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashgen.build.reference import evaluate_rule
from flashgen.errors import InvalidArgument
from flashgen.spec import masks

README = Path(__file__).parent.parent / "README.md"
MARKED = re.compile(r"<!-- run: tests/test_readme.py -->\n```python\n(.*?)```", re.DOTALL)
EXAMPLES = MARKED.findall(README.read_text())


@pytest.mark.parametrize("code", EXAMPLES, ids=[f"example{i}" for i in range(len(EXAMPLES))])
def test_example_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=README.parent)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_mask_that_contributing_adds_is_one() -> None:
    text = README.with_name("CONTRIBUTING.md").read_text()
    (code,) = MARKED.findall(text)
    (row,) = re.findall(r"^    (\"chunked\": Entry\(.*\)),$", text, re.MULTILINE)
    there = dict(vars(masks))
    exec(code, there)
    entry = eval(f"{{{row}}}", there)["chunked"]
    for mask, (size,) in zip(entry.examples(), entry.samples, strict=True):
        assert mask.describe() == f"chunked({size})"
        rows, keys = torch.arange(70).view(-1, 1), torch.arange(70)
        symbols = {"q_idx": rows, "k_idx": keys, "q_len": 70, "k_len": 70}
        assert torch.equal(evaluate_rule(mask, symbols), rows // size == keys // size)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(InvalidArgument, match="size="):
            entry.build(wrong)


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "DESIGN.md"):
        text = (README.parent / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (README.parent / target).exists(), f"{name} links to {target}"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 5
