"""`flashgen doctor`: is everything in order on this machine?"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.options import db_option
from flashgen.cli.output import FAILED, Table, emit, json_option
from flashgen.settings import SETTINGS, VERSION, data_folder, unwritable

if TYPE_CHECKING:
    from rich.console import Console

    from flashgen.spec.record import Record

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
COLOURS = {OK: "green", NOTE: "dim", WARNING: "yellow", ERROR: "red"}

PACKAGES = ("torch", "triton", "jinja2", "optuna", "sqlalchemy", "alembic", "transformers", "numpy")
OPTIONAL = ("transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    section: str
    name: str
    value: str
    state: str = OK
    advice: str = ""
    """What to do, where something is not in order."""

    def to_json(self) -> dict[str, str]:
        """All fields."""
        return {name: getattr(self, name) for name in self.__slots__}


@click.command()
@db_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, url: str | None, as_json: bool) -> None:
    """Looks for what is not in order on this machine.

    Versions, GPU, compiler, database, stale records, caches and settings are looked at, and nothing is
    changed. Exit code 1 if something is broken; warnings do not count.

    \b
    Examples:
      flashgen doctor
      flashgen doctor --json
    """
    checks = (_versions, _gpu, _compiler, lambda: _database(url), _shipped, _folders, _settings)
    findings = [finding for check in checks for finding in check()]
    broken = [finding for finding in findings if finding.state == ERROR]

    def show(out: Console) -> None:
        rows = Table("", "", "", "", "")
        last = ""
        for f in findings:
            rows.add_row(f.section if f.section != last else "", f.name, f.state, f.value)
            if f.advice:
                rows.add_row("", "", "", f.advice)
            last = f.section
        rows.print(out, COLOURS)
        out.print(f"{len(broken)} broken" if broken else "nothing is broken")

    emit({"ok": not broken, "findings": [finding.to_json() for finding in findings]}, as_json, show)
    if broken:
        ctx.exit(FAILED)


def _versions() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    yield Finding("versions", "flashgen", VERSION)
    yield Finding("versions", "python", platform.python_version())
    for name in PACKAGES:
        try:
            yield Finding("versions", name, version(name))
        except PackageNotFoundError:
            state = NOTE if name in OPTIONAL else ERROR
            advice = "" if name in OPTIONAL else f"pip install {name}"
            yield Finding("versions", name, "not installed", state, advice)


def _gpu() -> Iterator[Finding]:
    from flashgen.build.device import current_target, device_count, live_target
    from flashgen.build.driver import driver
    from flashgen.errors import FlashGenError

    count = device_count()
    if not count:
        yield Finding("gpu", "devices", "none", NOTE, "offline work: --target NAME or FLASHGEN_TARGET")
    else:
        yield Finding("gpu", "driver", f"CUDA {driver().version()}")
    for index in range(count):
        try:
            yield Finding("gpu", f"gpu {index}", live_target(index).describe())
        except FlashGenError as error:
            yield Finding("gpu", f"gpu {index}", str(error), ERROR)
    if SETTINGS.target:
        try:
            yield Finding("gpu", "pretended", current_target().describe(), NOTE, "FLASHGEN_TARGET is set")
        except FlashGenError as error:
            yield Finding("gpu", "pretended", str(error), ERROR, "correct FLASHGEN_TARGET or unset it")


def _compiler() -> Iterator[Finding]:
    try:
        from triton import knobs
    except ImportError as error:
        yield Finding("compiler", "triton", str(error), ERROR, "only kernels of a bundle run without it")
        return
    for name in ("ptxas", "cuobjdump", "nvdisasm"):
        try:
            tool = getattr(knobs.nvidia, name)
            yield Finding("compiler", name, f"{tool.version} at {tool.path}")
        except (RuntimeError, OSError, AttributeError) as error:
            state = ERROR if name != "nvdisasm" else WARNING
            yield Finding("compiler", name, f"not found: {error}", state, "reinstall triton, which brings it")


def _database(url: str | None) -> Iterator[Finding]:
    from flashgen.errors import FlashGenError
    from flashgen.store.db import TuningDB
    from flashgen.store.today import current_hash

    try:
        with TuningDB(SETTINGS.db_url(url), readonly=True, current_hash=current_hash) as db:
            yield Finding("database", "where", db.where)
            if not db.persistent and not db.notice:
                yield Finding("database", "opened", "not there yet: the first tuning makes it", NOTE)
                return
            if db.notice:
                yield Finding("database", "opened", db.notice, WARNING if db.persistent else ERROR)
            if not db.persistent:
                return
            problems = db.problems()
            health = "healthy" if not problems else "; ".join(problems[:5])
            which = "" if url is None else " " + shlex.join(["--db", url])
            says = f"flashgen db check{which} says more; flashgen db export{which} saves what can be read"
            advice = says if problems else ""
            yield Finding("database", "health", health, ERROR if problems else OK, advice)
            records = list(db.records())
            yield from _records("database", records, sum(map(db.stale, records)))
    except FlashGenError as error:
        yield Finding("database", "open", str(error), ERROR)


def _shipped() -> Iterator[Finding]:
    from flashgen.store.shipped import ShippedRecords
    from flashgen.store.today import current_hash

    shipped = ShippedRecords(current_hash=current_hash)
    records = list(shipped.records())
    yield from _records("shipped", records, sum(map(shipped.stale, records)))


def _records(section: str, records: list[Record], stale: int) -> Iterator[Finding]:
    gpus = sorted({record.target.name or record.target.key for record in records})
    yield Finding(section, "records", f"{len(records)}" + (f" for {', '.join(gpus)}" if gpus else ""))
    if stale:
        advice = "they serve as hints; `flashgen db revalidate` measures them again on their GPU"
        yield Finding(section, "stale", f"{stale}, of kernels that render otherwise today", WARNING, advice)


def _folders() -> Iterator[Finding]:
    cache = SETTINGS.cache_dir()
    if why := unwritable(cache):
        advice = "every process compiles again; set FLASHGEN_CACHE to a folder that can be written"
        yield Finding("folders", "cache", f"{cache}: {why}", WARNING, advice)
    else:
        at = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
        free = shutil.disk_usage(at).free
        state = WARNING if free < 1 << 30 else OK
        yield Finding("folders", "cache", f"{cache}, {_size(cache)}, {free / 1e9:.0f} GB free", state)
    for name in ("templates", "tuning_db"):
        folder = data_folder(name)
        found = folder.is_dir()
        advice = "" if found else "the installation is damaged: install flashgen again"
        yield Finding("folders", name, str(folder), OK if found else ERROR, advice)


def _size(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB"


def _settings() -> Iterator[Finding]:
    problems = SETTINGS.problems()
    for variable, text in SETTINGS.variables():
        value = os.environ.get(variable, "")
        if variable in problems:
            yield Finding("settings", variable, problems[variable], ERROR, f"correct {variable} or unset it")
            continue
        yield Finding("settings", variable, f"{value or 'not set'}  ({text})", OK if value else NOTE)
