"""The scripts parse, and their set-up works on a machine with CUDA's torch and without a package registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
BASH = [path for path in sorted(SCRIPTS.iterdir()) if path.suffix in ("", ".sh")]


def bash(
    script: str, cwd: Path = ROOT, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("path", BASH, ids=lambda path: path.name)
def test_scripts_parse_and_say_what_they_do(path: Path) -> None:
    bash(f"bash -n {path}")
    assert path.read_text().splitlines()[1 if path.suffix == "" else 0].startswith("# ")
    assert os.access(path, os.X_OK) == (path.suffix == "")


def test_ci_runs_the_tests() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "scripts/test" in (ROOT / ".ci" / "run").read_text()


def test_unknown_steps_are_refused_before_anything_is_installed() -> None:
    assert "known: lint format types" in bash("scripts/test nonsense", code=2).stderr
    assert "usage: scripts/gpu" in bash("scripts/gpu", code=2).stdout


def wheel(folder: Path, name: str, needs: str = "") -> None:
    """A wheel with one empty module."""
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    files = {
        f"{name}.py": "",
        f"{name}-1.0.dist-info/METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{name}-1.0.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture(scope="module")
def cuda_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python in an environment of its own, with all packages, whose torch says it is built for CUDA."""
    base = tmp_path_factory.mktemp("base") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True, timeout=100)
    python = base / "bin" / "python3"
    asked = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
    )
    site = Path(asked.stdout.strip())
    site.joinpath("all.pth").write_text(sysconfig.get_path("purelib") + "\n")
    site.joinpath("torch").mkdir()
    site.joinpath("torch", "__init__.py").write_text(
        "from types import SimpleNamespace\nversion = SimpleNamespace(cuda='13.0')\n"
    )
    return python


def test_setup_beside_cuda_takes_missing_packages_from_wheels(cuda_python: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    project = (ROOT / "pyproject.toml").read_text()
    needing = project.replace("dependencies = [\n", 'dependencies = [\n  "needed>=1",\n', 1)
    assert needing != project
    (tmp_path / "pyproject.toml").write_text(needing)
    wheel(tmp_path / ".whl", "needed", needs="needed_too")
    wheel(tmp_path / ".whl", "needed_too")
    script = 'set -euo pipefail; . scripts/setup.sh; setup_venv; "$venv_python" -c '
    script += "'import torch, needed, needed_too; print(torch.version.cuda, torch.__file__)'"
    offline = {"PYTHON": str(cuda_python), "PIP_NO_INDEX": "1"}

    first = bash(script, cwd=tmp_path, **offline)
    cuda, where = first.stdout.split()
    assert cuda == "13.0" and Path(where).is_relative_to(cuda_python.parent.parent)
    assert "using the torch and triton of" in first.stderr
    assert os.access(tmp_path / ".venv" / "bin" / "flashgen", os.X_OK)

    again = bash(script, cwd=tmp_path, **offline)
    assert again.stdout == first.stdout and again.stderr == ""

    (tmp_path / "pyproject.toml").write_text(needing.replace('"needed>=1"', '"absent>=1"'))
    told = bash(script, cwd=tmp_path, **offline).stderr
    assert "not installed, .whl has no wheel: absent>=1" in told


def environment_of_ours(folder: Path) -> None:
    """An environment as `setup_make` makes it, that need not be good."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=100)


@pytest.mark.parametrize("name", [".venv", ".venv-triton39"])
def test_an_activated_environment_changes_nothing(tmp_path: Path, name: str) -> None:
    """Neither what the environment depends on (its stamp) nor the Python that a new one is made with."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment_of_ours(tmp_path / name)
    script = '. scripts/setup.sh; setup_base; command -v "$setup_python"; setup_stamp dev'
    apart = bash(script, cwd=tmp_path, VIRTUAL_ENV="").stdout
    assert str(tmp_path) not in apart.splitlines()[0]
    assert bash(f". {name}/bin/activate; {script}", cwd=tmp_path).stdout == apart
    for inside in (tmp_path / name / "bin" / "python", Path(name, "bin", "python3")):
        assert str(tmp_path) not in bash(script, cwd=tmp_path, PYTHON=str(inside)).stdout.splitlines()[0]


def test_setup_beside_cuda_from_an_activated_environment_finds_the_hosts_torch(
    cuda_python: Path, tmp_path: Path
) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".whl").mkdir()
    environment_of_ours(tmp_path / ".venv")
    script = 'set -euo pipefail; . .venv/bin/activate; . scripts/setup.sh; setup_venv; "$venv_python" -c '
    script += "'import torch; print(torch.version.cuda, torch.__file__)'"
    path = f"{cuda_python.parent}:{os.environ['PATH']}"
    done = bash(script, cwd=tmp_path, PATH=path, PIP_NO_INDEX="1")
    cuda, where = done.stdout.split()
    assert cuda == "13.0" and Path(where).is_relative_to(cuda_python.parent.parent)
    assert bash(script, cwd=tmp_path, PATH=path, PIP_NO_INDEX="1").stderr == ""


def test_a_step_of_the_demo_by_hand_says_what_must_come_first(tmp_path: Path) -> None:
    step = f"{sys.executable} scripts/demo.py interpret"
    assert "TRITON_INTERPRET=1 python scripts/demo.py interpret" in bash(step, code=1).stderr
    told = bash(step, code=1, TRITON_INTERPRET="1", FLASHGEN_DB=str(tmp_path / "none.db")).stderr
    assert "run ./scripts/demo first" in told and "Traceback" not in told


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.8.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    told = bash(". scripts/setup.sh; setup_venv", code=1, PYTHON=str(old)).stderr
    assert "Python 3.8.1; FlashGen needs Python 3.10 or newer" in told
    assert (
        "no /nowhere on the PATH" in bash(". scripts/setup.sh; setup_venv", code=1, PYTHON="/nowhere").stderr
    )


def test_the_steps_leave_no_test_out() -> None:
    """Together the steps select all that needs no GPU, in whatever folder it lies."""
    text = (ROOT / "scripts" / "test").read_text()
    assert '-m "not gpu and not compile"' in text and '-m "compile and not gpu"' in text
    assert "--ignore" not in text and "--deselect" not in text
    assert "TRITON_INTERPRET=1" in text and "pytest tests/interp" in text
