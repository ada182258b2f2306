"""The records that come with FlashGen: text files, read when first needed, without a database."""

from __future__ import annotations

import itertools
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
    is passed over with a warning that names file and line. A missing folder holds no records. A file's lines
    stay text until their spec is asked for: checking one takes 0.2 ms.
    """

    def __init__(self, folder: Path | None = None, current_hash: KernelHash | None = None) -> None:
        """`folder`: by default the one that comes with FlashGen. `current_hash` finds stale records."""
        self.folder = shipped_folder() if folder is None else folder
        self.stale = Staleness(current_hash)
        self._targets: dict[Path, Target | None] = {}
        self._lines: dict[Path, dict[str, list[tuple[int, str]]]] = {}
        self._known: dict[tuple[Path, str], list[Record]] = {}

    def ranked(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """See `RecordStore.ranked`."""
        spec = workload.spec
        folders = (folder for folder in self._folders() if self._target(folder) == target)
        records = [r for folder in folders for r in self._records(folder / f"{spec.op}.jsonl", spec.key)]
        return rank(records, workload, self.stale)

    def hints(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """Records of other GPUs, the most similar first; for seeding a search, never for serving a call."""
        spec = workload.spec
        files = [folder / f"{spec.op}.jsonl" for folder in self._folders()]
        records = [record for file in files for record in self._records(file, spec.key)]
        return rank_hints(records, workload, target, self.stale)

    def records(self, target: Target | None = None) -> Iterator[Record]:
        """All records, or those of one GPU, in the order of the files."""
        for folder in self._folders():
            if target is None or self._target(folder) == target:
                for path in sorted(folder.glob("*.jsonl")):
                    for spec_key in self._by_spec(path):
                        yield from self._records(path, spec_key)

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.is_dir())
        except OSError:
            return []

    def _target(self, folder: Path) -> Target | None:
        """The GPU of a folder: that of the first record in it; one line is read for it."""
        if folder not in self._targets:
            texts = (text for path in sorted(folder.glob("*.jsonl")) for text in _texts(path))
            lines = itertools.starmap(jsonl.parsed, texts)
            self._targets[folder] = next((line.record.target for line in lines if line.record), None)
        return self._targets[folder]

    def _records(self, path: Path, spec_key: str) -> list[Record]:
        """The records of a file and spec."""
        if (path, spec_key) not in self._known:
            target, found = self._target(path.parent), list[Record]()
            for line in itertools.starmap(jsonl.parsed, self._by_spec(path).get(spec_key, ())):
                if line.record is None or line.record.target != target:
                    problem = line.problem or f"a record of {line.record and line.record.target.describe()}"
                    warn_once(f"{path}:{line.number} is passed over: {problem}")
                else:
                    found.append(line.record)
            self._known[path, spec_key] = found
        return self._known[path, spec_key]

    def _by_spec(self, path: Path) -> dict[str, list[tuple[int, str]]]:
        """The lines of a file by the key of their spec; what has none is no record, and told of at once."""
        if path not in self._lines:
            found = dict[str, list[tuple[int, str]]]()
            for number, text in _texts(path):
                found.setdefault(jsonl.spec_key(text), []).append((number, text))
            self._lines[path] = found
            self._records(path, "")
        return self._lines[path]


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    try:
        yield from jsonl.texts(path)
    except FileNotFoundError:
        return
    except OSError as error:
        warn_once(f"{path} cannot be read and is passed over: {error}")
