"""The README's Python examples run as they stand there, and tables of documents are true."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashgen.build.reference import evaluate_rule
from flashgen.codegen.families import FAMILIES
from flashgen.errors import InvalidArgument
from flashgen.spec import masks
from flashgen.spec.config import SHORT_NAMES

README = Path(__file__).parent.parent / "README.md"
MARKED = re.compile(r"<!-- run: tests/test_readme.py -->\n```python\n(.*?)```", re.DOTALL)
EXAMPLES = MARKED.findall(README.read_text())
PEERS = ("fa4", "cudnn", "flex", "fa2")  # in the order of the README's columns


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


def test_the_speeds_are_those_of_the_recorded_rows() -> None:
    """Each cell of the table, and the sentence under it, computed anew from benchmarks/."""
    text = README.read_text()
    recorded = json.loads((README.parent / "benchmarks/nvidia-h200/forward.json").read_text())["rows"]
    speeds: dict[tuple[str, ...], dict[str, float]] = {}
    for row in recorded:
        own_keys = row["heads"] == row["kv_heads"] == 2048 // row["head_dim"]
        if row["dtype"] == "bf16" and own_keys and row["batch"] * row["q_len"] == 16384:
            shape = (str(row["head_dim"]), row["mask"], f"{row['q_len']:,}")
            speeds.setdefault(shape, {})[row["impl"]] = row["tflops"]
    table = re.findall(
        r"^\| (\d+) \| (causal|full) \| ([\d,]+) \| \*\*(\d+)\*\* \| (.*) \|$", text, re.MULTILINE
    )
    assert len(table) == 18 and len(speeds) == 36
    for *shape, ours, peers in table:
        found = speeds[tuple(shape)]
        told = [f"{found[peer]:.0f} ({found['flashgen'] / found[peer]:.2f}x)" for peer in PEERS]
        assert (ours, peers.split(" | ")) == (f"{found['flashgen']:.0f}", told), shape
    ratios = [found.pop("flashgen") / max(found.values()) for found in speeds.values()]
    mean = statistics.geometric_mean(ratios)
    assert (
        f"Over all 36 shapes {mean:.2f} times the best peer of each (geometric mean; "
        f"least {min(ratios):.2f}, most {max(ratios):.2f};"
    ) in text


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "DESIGN.md"):
        text = (README.parent / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (README.parent / target).exists(), f"{name} links to {target}"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 6


def test_the_tunables_are_those_of_the_families() -> None:
    """Every family's, once, with its values in their order; what a value is that is a word, too."""
    text = README.with_name("DESIGN.md").read_text().partition("## Tunables\n")[2].partition("\n## ")[0]
    told: dict[tuple[str, str], list[str]] = {}
    for row in text.splitlines():
        if not row.startswith("| `"):
            continue
        families, tunable, short, values, meaning = (each.strip() for each in row.strip("|").split("|"))
        name, listed = tunable.strip("`"), values.replace("`", "").split(", ")
        assert short.strip("`") == SHORT_NAMES[name], row
        for word in listed:
            assert word.isdigit() or f"`{word}`" in meaning, row
        for family in families.replace("`", "").split(", "):
            assert (family, name) not in told, row
            told[family, name] = listed
    assert told == {
        (family.name, name): [*map(str, values)]
        for family in FAMILIES.values()
        for name, values in (*family.tunables, *family.options)
    }
