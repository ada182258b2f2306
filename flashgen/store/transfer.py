"""Records out of a database and into it, as lines of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from flashgen.errors import InvalidArgument, StoreError
from flashgen.spec.record import Record
from flashgen.spec.target import TARGETS, Target
from flashgen.store import jsonl
from flashgen.store.db import TuningDB
from flashgen.store.files import write_file


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the lines of a file."""

    added: int
    skipped: int
    """Records that were there already, or stand in the file twice."""
    bad: tuple[tuple[int, str], ...]
    """(line number, why it is no record); these were passed over."""

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        bad = [{"line": line, "problem": problem} for line, problem in self.bad]
        return {"added": self.added, "skipped": self.skipped, "bad": bad}


def import_records(database: TuningDB, source: Path | TextIO) -> Imported:
    """Adds the records of a file, all in one transaction; doing it twice adds nothing.

    Raises:
        StoreError: the file cannot be read, or the database not be written; then nothing was added.
    """
    try:
        lines = list(jsonl.read(source))
    except OSError as error:
        raise StoreError(f"cannot read {source}: {error}") from error
    records = [line.record for line in lines if line.record is not None]
    added = database.add_many(records)
    bad = tuple((line.number, line.problem) for line in lines if line.record is None)
    return Imported(added, len(records) - added, bad)


def read_records(paths: Iterable[Path]) -> list[Record]:
    """The records of some files, in their order; where nothing may be passed over.

    Raises:
        InvalidArgument: a file holds no record, or a line that is none; the message names the first one.
        StoreError: a file cannot be read.
    """
    records: list[Record] = []
    for path in paths:
        try:
            lines = list(jsonl.read(path))
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        bad = [line for line in lines if line.record is None]
        if bad:
            others = f" ({len(bad) - 1} more lines are none)" if len(bad) > 1 else ""
            raise InvalidArgument(
                f"line {bad[0].number} of {path} is no record{others}: {bad[0].problem}; "
                "`flashgen db export --out FILE` writes such files"
            )
        if not lines:
            raise InvalidArgument(f"{path} holds no records; `flashgen db export --out FILE` writes them")
        records += [line.record for line in lines if line.record is not None]
    return records


def ordered(records: Iterable[Record]) -> list[Record]:
    """In the order of files: the same records give the same bytes, however they came into the database."""
    return sorted(records, key=_order)


def export_records(records: Iterable[Record], out: TextIO) -> int:
    """Writes the records, `ordered`, one a line; returns how many."""
    lines = [jsonl.format_line(record) for record in ordered(records)]
    out.writelines(f"{line}\n" for line in lines)
    return len(lines)


def export_file(records: Iterable[Record], path: Path) -> int:
    """As `export_records`, into a file that is either the old one or complete, see `write_file`.

    Raises:
        StoreError: the file cannot be written.
    """
    lines = StringIO()
    count = export_records(records, lines)
    try:
        write_file(path, lines.getvalue())
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}; choose another file or folder") from error
    return count


def export_tree(records: Iterable[Record], folder: Path) -> dict[Path, int]:
    """Writes `<target>/<op>.jsonl` below a folder, the form of shipped records; returns the lines of each.

    A file that has new records is replaced as a whole.
    """

    def place(record: Record) -> Path:
        return folder / target_label(record.target) / f"{record.workload.spec.op}.jsonl"

    found = sorted(ordered(records), key=place)
    return {path: export_file(members, path) for path, members in groupby(found, key=place)}


def target_label(target: Target) -> str:
    """A GPU's name for a folder: that of the table, else the one it reports, else its facts."""
    known = next((name for name, each in TARGETS.items() if each == target), "")
    return known or re.sub(r"[^a-z0-9.]+", "-", target.name.lower()).strip("-.") or target.key


def _order(record: Record) -> tuple[Any, ...]:
    work = record.workload
    return (
        record.target.key,
        work.spec.key,
        (work.batch, work.heads, work.kv_heads, work.q_len, work.k_len, work.params),
        (work.total_q, work.total_k, work.documents),
        (record.admission, record.config.family, record.config.name),
        (record.kernel_hash, record.created_at),
        jsonl.format_line(record),
    )
