"""Which records are stale: today's template renders another kernel for their config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from flashgen.codegen.families import foreign
from flashgen.settings import SETTINGS, VERSION, data_folder
from flashgen.spec.record import Record

KernelHash = Callable[[Record], str | None]
"""Gives the hash of the kernel that a record's config renders to now, or None if none is rendered."""


def current_hash(record: Record) -> str | None:
    """The `KernelHash` of this installation; None where the family, or the config in it, no longer exists.

    Renders for the triton version of the record, so that only a change of a template counts: another
    triton version makes a record no hint.
    """
    if foreign(record.config):
        return None
    remembered = _remembered()
    spec, config, triton = record.workload.spec, record.config, record.versions.triton
    asked = json.dumps([spec.to_json(), config.family, config.to_json(), triton])
    key = hashlib.sha256(asked.encode()).hexdigest()[:32]
    if key not in remembered.hashes:
        from flashgen.codegen.source import Toolchain, render

        try:
            remembered.add(key, render(spec, config, Toolchain(triton)).hash)
        except Exception:  # a rule or a version that the templates do not know
            return None
    return remembered.hashes[key]


class _Remembered:
    """The hashes that earlier processes rendered: lines `key hash` of a file in the cache folder.

    A process's first look-up renders up to four kernels: 50 ms, most of it for Jinja, where reading the file
    takes 1 ms. A file that cannot be read or written is no memory, and a damaged line is no entry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.hashes: dict[str, str] = {}
        with suppress(OSError):
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
            self.hashes = {line[:32]: line[33:] for line in lines if len(line) == 49}

    def add(self, key: str, found: str) -> None:
        """Remembers a hash; processes that add to one file at a time each append whole lines."""
        self.hashes[key] = found
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="ascii") as file:
                file.write(f"{key} {found}\n")


@lru_cache(maxsize=1)
def _remembered() -> _Remembered:
    return _Remembered(SETTINGS.cache_dir() / "hashes" / f"{_renderer()}.txt")


def _renderer() -> str:
    """Digest of all that a kernel's text depends on but its spec and config: templates, our code, Jinja."""
    package = Path(__file__).resolve().parent.parent
    templates = data_folder("templates").rglob("*.jinja")
    digest = hashlib.sha256(f"{VERSION} {version('jinja2')}".encode())
    for path in sorted([*templates, *package.glob("codegen/*.py"), *package.glob("spec/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


class Staleness:
    """Remembers the answer for each kernel: rendering one takes 1 ms, and many records share one."""

    def __init__(self, kernel_hash: KernelHash | None) -> None:
        """Without a function nothing is stale."""
        self._kernel_hash = kernel_hash
        self._known: dict[tuple[object, ...], str | None] = {}

    def __call__(self, record: Record) -> bool:
        if self._kernel_hash is None:
            return False
        key = (record.workload.spec, record.config, record.versions.triton)
        if key not in self._known:
            self._known[key] = self._kernel_hash(record)
        return self._known[key] != record.kernel_hash
