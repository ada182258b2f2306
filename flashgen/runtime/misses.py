"""The shapes a running model missed: noted as lines of JSON for `flashgen tune --misses`."""

from __future__ import annotations

import json
from pathlib import Path

from flashgen.errors import InvalidArgument
from flashgen.settings import SETTINGS
from flashgen.spec.attention import Workload

MAX_NOTED = 10_000
"""Workloads one process notes at most."""


def misses_path() -> Path:
    """The file of this user's misses."""
    return SETTINGS.cache_dir() / "misses.jsonl"


class MissLog:
    """Notes each kind of call (spec and bucket) once in a process.

    A file that cannot be written to is told once, by the returned text, and then left alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = misses_path() if path is None else path
        self._noted: set[tuple[str, str]] = set()
        self._writable = True

    def note(self, workload: Workload) -> str:
        """Adds a workload; the answer is a problem to tell, or empty."""
        key = (workload.spec.key, workload.bucket().text)
        if not self._writable or key in self._noted or len(self._noted) >= MAX_NOTED:
            return ""
        self._noted.add(key)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(workload.to_json()) + "\n")
        except OSError as error:
            self._writable = False
            return (
                f"missed shapes are not noted: {error}; set FLASHGEN_CACHE to a folder that can be written to"
            )
        return ""


def read_misses(path: Path | None = None) -> tuple[Workload, ...]:
    """The noted workloads, each kind once, oldest first; none if there is no file.

    Raises:
        InvalidArgument: a line is no workload; the message names file and line.
    """
    path = misses_path() if path is None else path
    found: dict[tuple[str, str], Workload] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return ()
    for number, line in enumerate(lines, 1):
        try:
            workload = Workload.from_json(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"{path}:{number} is no workload ({error}); delete the line") from error
        found.setdefault((workload.spec.key, workload.bucket().text), workload)
    return tuple(found.values())
