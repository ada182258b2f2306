"""Reading a bundle: verify, then serve its records and kernels.

Imports neither triton nor jinja2, sqlalchemy or optuna, and needs no C compiler.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build.artifact import Artifact
from flashgen.build.device import device_count, live_target
from flashgen.build.launch import Chain, Kernel, load_kernel
from flashgen.bundle.manifest import (
    FOLDERS,
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    KernelEntry,
    Manifest,
    parse,
    serves,
    strictness,
)
from flashgen.errors import BundleError, Unsupported
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Record, rank
from flashgen.spec.target import Target


@dataclass(frozen=True, slots=True)
class BundleReport:
    """What `verify_bundle` found; a bundle with a problem is not loaded."""

    path: str
    problems: tuple[str, ...]
    """Each names the file it is about; empty when the bundle is whole."""
    target: str = ""
    """Name and facts of the GPU it is for; empty when the manifest cannot be read."""
    records: int = 0
    stale: int = 0
    """How many of the records measured another kernel than the bundle has."""
    kernels: int = 0
    files: int = 0
    bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the bundle is whole."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """All fields and `ok`."""
        return {"ok": self.ok, **{name: getattr(self, name) for name in self.__slots__}}


def verify_bundle(path: str | os.PathLike[str]) -> BundleReport:
    """Compares every file of a bundle with its manifest; loads nothing and never raises for a bad bundle."""
    report, _, _ = _verify(Path(path))
    return report


def _verify(path: Path) -> tuple[BundleReport, Manifest | None, dict[str, Artifact]]:
    """The report, the manifest, and the kernels as they were when their hashes were compared, by cubin."""
    problems: list[str] = []
    try:
        manifest = parse(_read(path / MANIFEST, MAX_MANIFEST_BYTES).decode("utf-8"))
    except UnicodeDecodeError as error:
        return BundleReport(str(path), (f"{MANIFEST} is damaged: not UTF-8 ({error.reason})",)), None, {}
    except BundleError as error:
        return BundleReport(str(path), (str(error),)), None, {}
    try:
        present = _present(path, problems)
        extra = sorted(present - manifest.files.keys())
        problems += [f"{_shown(name)} is not in {MANIFEST}" for name in extra]
    except OSError as error:
        problems.append(f"the folder cannot be listed: {error}")
    contents: dict[str, bytes] = {}
    for name, file in manifest.files.items():
        try:
            contents[name] = _read(path / name, file.size)
        except BundleError as error:
            problems.append(str(error))
            continue
        if problem := _difference(name, contents[name], file):
            problems.append(problem)
            del contents[name]
    artifacts: dict[str, Artifact] = {}
    for entry in manifest.kernels:
        if all(name in contents for name in entry.cubins):
            artifact = _artifact(entry, contents, manifest.target, problems)
            if artifact is not None:
                artifacts[entry.cubin] = artifact
    report = BundleReport(
        path=str(path),
        problems=tuple(problems),
        target=manifest.target.describe(),
        records=len(manifest.records),
        stale=len(manifest.stale),
        kernels=len(manifest.kernels),
        files=len(manifest.files),
        bytes=sum(file.size for file in manifest.files.values()),
    )
    return report, manifest, artifacts


def _artifact(
    entry: KernelEntry, contents: Mapping[str, bytes], target: Target, problems: list[str]
) -> Artifact | None:
    try:
        parts = {name: contents[file] for name, file in entry.parts.items()}
        artifact = Artifact.from_json(entry.artifact, contents[entry.cubin], parts=parts)
    except Exception as error:  # each constructor refuses in its own way
        problems.append(f"{entry.cubin} is described wrongly: {type(error).__name__}: {error}")
        return None
    for each in (artifact, *artifact.parts):
        name = entry.parts.get(each.name, entry.cubin)
        if each.arch != target.arch:
            problems.append(f"{name} is for sm_{each.arch}, the bundle for {target.describe()}")
        if each.shared_bytes > target.shared_per_block:
            problems.append(
                f"{name} needs {each.shared_bytes} B of shared memory a block, "
                f"{target.describe()} has {target.shared_per_block} B"
            )
    return artifact


def _shown(name: str) -> str:
    """A file's name, which may hold anything, for a message."""
    return name if name.isprintable() else repr(name)


def _present(path: Path, problems: list[str]) -> set[str]:
    """Names of all files in the bundle's folders; what cannot be a part of a bundle is a problem."""
    names = set()
    for entry in os.scandir(path):
        if entry.name == MANIFEST:
            continue
        if entry.name not in FOLDERS or not entry.is_dir(follow_symlinks=False):
            problems.append(
                f"{_shown(entry.name)} is no part of a bundle" + (" (a link)" if entry.is_symlink() else "")
            )
            continue
        names |= {f"{entry.name}/{file.name}" for file in os.scandir(entry.path)}
    return names


def _read(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; a link is refused, not followed."""
    name = path.name if path.name == MANIFEST else f"{path.parent.name}/{path.name}"
    try:
        if not stat.S_ISDIR(os.lstat(path.parent).st_mode) and path.name != MANIFEST:
            raise BundleError(f"{path.parent.name} is not a folder of its own: links are refused")
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"{name} is not a regular file")
            if status.st_size > most:
                raise BundleError(f"{name} has {status.st_size} bytes, at most {most} were expected")
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read(most + 1)
        finally:
            os.close(handle)
    except FileNotFoundError:
        missing = (
            "the folder has none: this is not a FlashGen bundle" if name == MANIFEST else "it is missing"
        )
        raise BundleError(f"{name} cannot be read: {missing}") from None
    except (OSError, ValueError) as error:  # the second: a path with NUL
        linked = isinstance(error, OSError) and error.errno == errno.ELOOP
        raise BundleError(f"{name} cannot be read: {'links are refused' if linked else error}") from None


def _difference(name: str, content: bytes, file: FileEntry) -> str:
    if len(content) != file.size:
        return f"{name} is damaged: {len(content)} bytes instead of {file.size}"
    found = hashlib.sha256(content).hexdigest()
    return "" if found == file.sha256 else f"{name} is damaged: sha256 {found} instead of {file.sha256}"


class Bundle:
    """A verified bundle in memory: a `RecordStore`, and the kernels of its records.

    The cubins were read when their hashes were compared, so a later change of the files changes nothing.
    A kernel is loaded on a GPU at its first use there; safe to use from several threads.
    """

    def __init__(self, path: Path, manifest: Manifest, artifacts: dict[str, Artifact]) -> None:
        self.path = path
        self.manifest = manifest
        self._artifacts = artifacts
        self._of_spec: dict[AttentionSpec, list[KernelEntry]] = {}
        for entry in sorted(manifest.kernels, key=strictness):
            self._of_spec.setdefault(entry.spec, []).append(entry)
        self._loaded: dict[tuple[str, int], Kernel | Chain] = {}
        self._checked: set[int] = set()
        self._lock = threading.Lock()

    @property
    def target(self) -> Target:
        """The GPU the bundle is for."""
        return self.manifest.target

    def __repr__(self) -> str:
        return f"<Bundle {self.path}: {len(self.manifest.kernels)} kernels for {self.target.describe()}>"

    def ranked(self, workload: Workload, target: Target) -> tuple[Record, ...]:
        """See `RecordStore.ranked`; empty for a target that is not the bundle's."""
        if target != self.target:
            return ()
        key = workload.spec.key
        return rank([r for r in self.manifest.records if r.workload.spec.key == key], workload, self.stale)

    def stale(self, record: Record) -> bool:
        """Whether a record measured another kernel than the bundle has: its time is a hint only."""
        return record in self.manifest.stale

    def find(self, spec: AttentionSpec, config: Config, facts: CallFacts) -> KernelEntry | None:
        """The kernel of a spec and config that serves a call best; None if there is none.

        Args:
            spec: exactly what the call computes, its outputs included.
        """
        return next((each for each in self._serving(spec, facts) if each.config == config), None)

    def _serving(self, spec: AttentionSpec, facts: CallFacts) -> Iterator[KernelEntry]:
        return (entry for entry in self._of_spec.get(spec, ()) if serves(entry, facts))

    def kernel(
        self, spec: AttentionSpec, config: Config, facts: CallFacts, device_index: int = 0
    ) -> Kernel | Chain:
        """A kernel of the bundle, ready to launch on a GPU; loaded at the first use there, then kept.

        Args:
            spec: exactly what the call computes, its outputs included: a record of `ranked` serves calls with
                and without the LSE.
            config: of the record, or of `fallback`.
            facts: the kind of call it will run.

        Raises:
            Unsupported: the bundle has no such kernel; the message says which it has.
            BundleError: the GPU is not the one the bundle is for.
            LaunchFailed: the driver refused the kernel.
        """
        entry = self.find(spec, config, facts)
        if entry is None:
            has = [f"{e.config.name} for {e.facts.access} calls" for e in self._of_spec.get(spec, ())]
            raise Unsupported(
                f"the bundle {self.path} has no kernel {config.name} for {facts.access} calls of "
                f"{spec.key!r} (return_lse={spec.return_lse}); "
                f"it has: {', '.join(has) or 'nothing of that spec'}"
            )
        return self._load(entry, device_index)

    def fallback(
        self, spec: AttentionSpec, facts: CallFacts, refuses: Callable[[Config], str] = lambda config: ""
    ) -> Config | None:
        """The config of a kernel that serves a call whatever its sizes; None if there is none here.

        Args:
            refuses: why a config is not to serve it, or empty text.
        """
        return next((each.config for each in self._serving(spec, facts) if not refuses(each.config)), None)

    def _load(self, entry: KernelEntry, device_index: int) -> Kernel | Chain:
        with self._lock:
            kernel = self._loaded.get((entry.cubin, device_index))
            if kernel is None:
                if device_index not in self._checked:
                    check_target(self, device_index)
                    self._checked.add(device_index)
                kernel = load_kernel(self._artifacts[entry.cubin], device_index)
                self._loaded[entry.cubin, device_index] = kernel
            return kernel


def check_target(bundle: Bundle, device_index: int) -> None:
    """Raises `BundleError`, naming both, unless a GPU is the one the bundle is for."""
    live = live_target(device_index)
    if live != bundle.target:
        raise BundleError(
            f"the bundle {bundle.path} is for {bundle.target.describe()}, GPU {device_index} is "
            f"{live.describe()}. Export one for this GPU: flashgen export --target {live.name or live.key}"
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def load_bundle(path: str | os.PathLike[str], device_index: int | None = None) -> Bundle:
    """Verifies a bundle and opens it.

    Args:
        path: the folder.
        device_index: the GPU that will run it, checked now. With None, on a machine that has GPUs, one of
            them must be the bundle's; without a GPU only the manifest can be used. Each GPU is checked
            again when a kernel is first loaded on it.

    Raises:
        BundleError: damaged, of another format, or for another GPU; the message lists every problem, and
            nothing of the bundle was loaded.
        LaunchFailed: `device_index` was given and there is no GPU.
    """
    path = Path(path)
    if not _is_folder(path):
        raise BundleError(
            f"{_shown(str(path))} is not a folder; a bundle is the folder that `flashgen export` wrote"
        )
    report, manifest, artifacts = _verify(path)
    if manifest is None or not report.ok:
        listed = "\n  ".join(report.problems[:20])
        more = f"\n  and {len(report.problems) - 20} more" if len(report.problems) > 20 else ""
        raise BundleError(f"the bundle {path} is not loaded (format {FORMAT} is read):\n  {listed}{more}")
    bundle = Bundle(path, manifest, artifacts)
    if device_index is not None:
        check_target(bundle, device_index)
    elif count := device_count():
        targets = [live_target(index) for index in range(count)]
        if bundle.target not in targets:
            check_target(bundle, 0)
    return bundle
