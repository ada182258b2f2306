"""The wheel holds all that is needed: built, and installed alone, it renders what the checkout renders."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flashgen.settings import VERSION

ROOT = Path(__file__).parent.parent

RENDER = """
import sys
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import Toolchain, render
from flashgen.settings import data_folder
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.masks import causal
from flashgen.spec.target import find_target

spec = AttentionSpec(head_dim=96, head_dim_v=96, dtype="bf16", mask=causal().rule)
family, target = FAMILIES["attention_fwd"], find_target("nvidia-h200")
source = render(spec, family.default(spec, target, CallFacts()), Toolchain("3.6.0"))
print(data_folder("templates"), data_folder("tuning_db").is_dir(), sep="\\n")
print(source.text)
"""


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="building needs hatchling, of the dev extra")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    (made,) = out.glob("flashgen-*.whl")
    return made


def test_the_version_stands_in_one_number(wheel: Path) -> None:
    assert wheel.name.startswith(f"flashgen-{VERSION}-")


def test_templates_and_records_are_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {"templates": "_templates", "tuning_db": "_tuning_db"}
    for folder, inside in shipped.items():
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files, f"{folder} is empty"
        for path in files:
            assert f"flashgen/{inside}/{path.relative_to(ROOT / folder).as_posix()}" in names
    for path in ROOT.joinpath("flashgen").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "flashgen = flashgen.cli.main:main" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_an_installed_wheel_renders_what_the_checkout_renders(wheel: Path, tmp_path: Path) -> None:
    # An environment with nothing but jinja2 in it, borrowed from this one so that no registry is needed.
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for package in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        (site / package).symlink_to(Path(spec.origin).parent)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        wheel,
    )

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    templates, has_records, *text = run(python, "-c", RENDER, cwd=tmp_path, env=environment).splitlines()
    assert Path(templates) == site / "flashgen" / "_templates"
    assert has_records == "True"

    _, _, *expected = run(sys.executable, "-c", RENDER, cwd=ROOT).splitlines()
    assert text == expected
    assert any(line.startswith("def attention_fwd_d96_causal_bf16_") for line in text)
