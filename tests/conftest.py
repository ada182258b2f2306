"""Which tests run in which process, and settings of their own for all of them.

- `tests/gpu` and everything marked `gpu` is deselected, with the reason, where there is no CUDA GPU.
- `tests/interp` is collected only in a process that was started with TRITON_INTERPRET=1 (Triton reads it
  when it is imported), and such a process collects nothing else: it cannot compile.
- `tests/compile` calls ptxas.

Database and caches of the tests lie in a temporary folder, never in the user's own.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
sys.path[:0] = [str(HERE), *(str(folder) for folder in sorted(HERE.iterdir()) if folder.is_dir())]
"""Shared modules beside the tests have names of their own; test modules need none (import-mode)."""

FOLDER_MARKS = {"gpu": "gpu", "interp": "interp", "compile": "compile"}
"""Folder under tests/ and the marker its tests get."""


def _own_settings() -> None:
    # Before anything imports flashgen.settings, which reads the environment once.
    folder = tempfile.mkdtemp(prefix="flashgen-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["FLASHGEN_DB"] = str(Path(folder, "tuning.db"))
    os.environ.setdefault("FLASHGEN_CACHE", str(Path(folder, "cache")))
    for name in ("FLASHGEN_ON_MISS", "FLASHGEN_TARGET"):
        os.environ.pop(name, None)


_own_settings()

with suppress(ImportError):  # the lane under another triton does without hypothesis
    from hypothesis import settings

    # The same examples in every run, so that a change alone can fail; FLASHGEN_EXPLORE=1 draws new ones.
    settings.register_profile("steady", derandomize=not os.environ.get("FLASHGEN_EXPLORE"))
    settings.load_profile("steady")


def no_gpu() -> str:
    """Why tests that need a GPU cannot run here; empty where they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no CUDA GPU"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keeps the interpreter's tests and all others out of each other's process."""
    try:
        top = collection_path.relative_to(HERE).parts[:1]
    except ValueError:
        return None
    if not top or (top[0].endswith(".py") and not top[0].startswith("test_")):
        return None
    return True if (top[0] == "interp") != INTERPRETS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests by their folder, and deselects those that need a GPU where there is none."""
    for item in items:
        top = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if top in FOLDER_MARKS:
            item.add_marker(FOLDER_MARKS[top])
    needing = [item for item in items if item.get_closest_marker("gpu")]
    reason = no_gpu() if needing else ""
    if reason:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.stash[_NO_GPU] = f"{len(needing)} tests marked gpu were left out: {reason}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: the garbage collector need not walk torch and the tests each time that
    700 objects were made, a sixth of the interpreter's time. On a GPU garbage would hold memory that counts.
    """
    if not any(item.get_closest_marker("gpu") for item in session.items):
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000)


_NO_GPU = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says why tests were deselected."""
    if _NO_GPU in config.stash:
        terminalreporter.write_line(config.stash[_NO_GPU])


@pytest.fixture(autouse=True)
def told_afresh() -> None:
    """A warning is given once in a process; in a test it counts whether an earlier one had it too."""
    if notices := sys.modules.get("flashgen.store.notices"):
        notices._told.clear()
