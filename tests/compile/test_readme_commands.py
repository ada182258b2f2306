"""The README's shell commands that need no GPU run as they stand there, in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CODE = re.split(r"^```.*$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1::2]
LINES = [line.split(" #")[0].strip() for block in CODE for line in block.splitlines()]
NO_GPU = ("--target nvidia-h200", "flashgen show", "flashgen verify", "flashgen db", "flashgen doctor")
COMMANDS = [line for line in LINES if line.startswith("flashgen ") and any(part in line for part in NO_GPU)]
pytestmark = pytest.mark.xdist_group("readme")  # one process runs them: each builds on those before it
RUN = "import sys; from flashgen.cli.main import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(line: str, folder: Path) -> None:
    words = shlex.split(line)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLASHGEN_DB": str(folder / "tuning.db"),
        "FLASHGEN_CACHE": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip()


def test_each_use_is_there() -> None:
    verbs = {shlex.split(line)[1] for line in COMMANDS}
    assert verbs == {"tune", "explain", "show", "export", "verify", "db", "doctor"}
