"""A bundle runs in a process that has no compiler side at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import build, compiler
from made import H200, VERSIONS, kernels, records

from flashgen.bundle.write import write_bundle

pytestmark = pytest.mark.compile
HERE = Path(__file__).parent
SITE = """
import ctypes
H200 = {16: 132, 36: 3201000, 37: 6144, 38: 60 << 20, 75: 9, 76: 0, 97: 227 << 10}
lib = ctypes.CDLL("libcuda.so.1")
values = (ctypes.c_int * 128).in_dll(lib, "fake_attribute")
for attribute, value in H200.items():
    values[attribute] = value
sizes = (ctypes.c_size_t * 128).in_dll(lib, "fake_param_size")
given = [int(size) for size in __import__("os").environ["FAKE_SIZES"].split(",")]
sizes[: len(given)] = given
ctypes.c_int.in_dll(lib, "fake_param_count").value = len(given)
"""


@pytest.mark.skipif(compiler() is None, reason="no C compiler to build the stand-in with")
def test_a_bundle_runs_without_triton_jinja_sqlalchemy_optuna_or_a_compiler(tmp_path: Path) -> None:
    from flashgen.build.launch import parameter_sizes

    compiled = kernels(tmp_path / "cache")
    bundle = write_bundle(records(), compiled, tmp_path / "b", H200, VERSIONS)
    library = build(tmp_path)
    library.rename(tmp_path / "libcuda.so.1")
    (tmp_path / "sitecustomize.py").write_text(SITE)
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, str(HERE / "blocked.py"), str(bundle)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **{
                name: os.environ[name]
                for name in ("HOME", "FLASHGEN_DB", "FLASHGEN_CACHE")
                if name in os.environ
            },
            "LD_LIBRARY_PATH": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]),
            "FAKE_SIZES": ",".join(map(str, parameter_sizes(compiled[0].artifact))),
        },
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"launched {compiled[0].artifact.name} forbidden: []"
