"""The records that come with FlashGen: text files, read when first needed, without a database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flashgen.settings import data_folder
from flashgen.spec.attention import Workload
from flashgen.spec.record import Record, rank, rank_hints
from flashgen.spec.target import Target
from flashgen.store import jsonl
from flashgen.store.notices import warn_once
from flashgen.store.today import KernelHash, Staleness


def shipped_folder() -> Path:
    """Where the shipped records lie: `<target>/<op>.jsonl` below it."""
    return data_folder("tuning_db") / "records"


class ShippedRecords:
    """Records of a folder `<target>/<op>.jsonl`; implements `RecordStore`.

    A folder's name is for people: the facts in the records decide which GPU they are for, and one folder
    is for one GPU. Reading is tolerant: a line that is no record, or of another GPU than its folder's first,
    is passed over with a warning that names file and line. A missing folder holds no records.
    """

    def __init__(self, folder: Path | None = None, current_hash: KernelHash | None = None) -> None:
        """`folder`: by default the one that comes with FlashGen. `current_hash` finds stale records."""
        self.folder = shipped_folder() if folder is None else folder
        self.stale = Staleness(current_hash)
        self._targets: dict[Path, Target | None] = {}
        self._files: dict[Path, dict[str, list[Record]]] = {}

    def ranked(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """See `RecordStore.ranked`."""
        spec = workload.spec
        folders = (folder for folder in self._folders() if self._target(folder) == target)
        records = [r for folder in folders for r in self._file(folder / f"{spec.op}.jsonl").get(spec.key, ())]
        return rank(records, workload, self.stale)

    def hints(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """Records of other GPUs, the most similar first; for seeding a search, never for serving a call."""
        spec = workload.spec
        files = [self._file(folder / f"{spec.op}.jsonl") for folder in self._folders()]
        records = [record for file in files for record in file.get(spec.key, ())]
        return rank_hints(records, workload, target, self.stale)

    def records(self, target: Target | None = None) -> Iterator[Record]:
        """All records, or those of one GPU, in the order of the files."""
        for folder in self._folders():
            if target is None or self._target(folder) == target:
                for path in sorted(folder.glob("*.jsonl")):
                    yield from (record for records in self._file(path).values() for record in records)

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.is_dir())
        except OSError:
            return []

    def _target(self, folder: Path) -> Target | None:
        """The GPU of a folder: that of the first record in it; one line is read for it."""
        if folder not in self._targets:
            lines = (line for path in sorted(folder.glob("*.jsonl")) for line in _read(path))
            self._targets[folder] = next((line.record.target for line in lines if line.record), None)
        return self._targets[folder]

    def _file(self, path: Path) -> dict[str, list[Record]]:
        """The records of a file by the key of their spec."""
        if path not in self._files:
            target, found = self._target(path.parent), dict[str, list[Record]]()
            for line in _read(path):
                if line.record is None or line.record.target != target:
                    problem = line.problem or f"a record of {line.record and line.record.target.describe()}"
                    warn_once(f"{path}:{line.number} is passed over: {problem}")
                else:
                    found.setdefault(line.record.workload.spec.key, []).append(line.record)
            self._files[path] = found
        return self._files[path]


def _read(path: Path) -> Iterator[jsonl.Line]:
    try:
        yield from jsonl.read(path)
    except FileNotFoundError:
        return
    except OSError as error:
        warn_once(f"{path} cannot be read and is passed over: {error}")
