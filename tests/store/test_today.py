"""Hashes of today's kernels, and what fresh processes remember of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASK = """
import sys
import sample_records as make
from flashgen.store.today import current_hash
print(*(current_hash(make.record(conf=make.config(stages=n))) for n in (2, 3)), "jinja2" in sys.modules)
"""


def asked(cache: Path, root: Path = ROOT) -> tuple[list[str], bool]:
    """Two hashes by a fresh process, and whether it rendered for them."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), str(ROOT / "tests")]),
            "FLASHGEN_CACHE": str(cache),
        },
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *hashes, rendered = done.stdout.split()
    return hashes, rendered == "True"


def test_what_was_rendered_once_is_read_afterwards(tmp_path: Path) -> None:
    hashes, rendered = asked(tmp_path)
    assert rendered and len(set(hashes)) == 2 and all(len(each) == 16 for each in hashes)
    assert asked(tmp_path) == (hashes, False)


def test_a_damaged_line_is_rendered_again_and_a_bad_folder_is_no_memory(tmp_path: Path) -> None:
    hashes, _ = asked(tmp_path)
    (file,) = (tmp_path / "hashes").iterdir()
    first, second = file.read_bytes().splitlines()
    for damaged in (b"", b"\xff\xfe\n" + second + b"\n", first + b"\n" + second[:-3]):
        file.write_bytes(damaged)
        assert asked(tmp_path) == (hashes, True)
    shutil.rmtree(tmp_path / "hashes")
    (tmp_path / "hashes").write_text("no folder")
    for _ in range(2):
        assert asked(tmp_path) == (hashes, True)


def test_a_changed_template_or_module_remembers_nothing_of_before(tmp_path: Path) -> None:
    cache, copy = tmp_path / "cache", tmp_path / "copy"
    for name in ("flashgen", "templates"):
        shutil.copytree(ROOT / name, copy / name)
    hashes, rendered = asked(cache, copy)
    assert rendered and asked(cache) == (hashes, False)  # of equal content, wherever it lies
    module = copy / "flashgen/codegen/expressions.py"
    module.write_text(module.read_text() + "\n# A line more.\n")
    assert asked(cache, copy) == (hashes, True)
    template = copy / "templates/attention_fwd.py.jinja"
    template.write_text(template.read_text().rstrip("\n") + "\n    tl.static_print('another kernel')\n")
    changed, rendered = asked(cache, copy)
    assert rendered and not set(changed) & set(hashes)
