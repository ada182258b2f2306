"""The README's shell commands that need no GPU run as they stand there, in order."""

from __future__ import annotations

import importlib.util
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
if importlib.util.find_spec("matplotlib") is None:  # an extra
    COMMANDS = [line for line in COMMANDS if "--draw" not in line]
RUN = "import sys; from flashgen.cli.main import main; main(sys.argv[1:])"


@pytest.mark.timeout(900)  # the export compiles the winners of a whole suite: 160 s on two cores
def test_the_commands_run_in_order(tmp_path: Path) -> None:
    """In one folder, for each builds on those before it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "FLASHGEN_DB": str(tmp_path / "tuning.db"),
        "FLASHGEN_CACHE": str(tmp_path / "cache"),
    }
    assert COMMANDS
    for line in COMMANDS:
        words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, "-c", RUN, *words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert done.stdout.strip(), line


def test_each_use_is_there() -> None:
    verbs = {shlex.split(line)[1] for line in COMMANDS}
    assert verbs == {"tune", "explain", "show", "export", "verify", "db", "doctor"}
