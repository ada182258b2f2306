"""The manifest of a bundle: what it was made for, what it holds, and the hash of every file.

    manifest.json   this
    kernels/*.py    rendered sources, to read; never imported
    cubins/*.cubin  compiled kernels

A manifest comes from outside. Reading one checks everything it says before anything else looks at it,
and nothing in it is ever executed: expressions are parsed, file names must match a narrow pattern.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from flashgen.build.artifact import Artifact
from flashgen.codegen.abi import environment_names
from flashgen.errors import BundleError
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.config import Config
from flashgen.spec.record import Record, Versions
from flashgen.spec.target import Target

FORMAT = 1
"""Of the manifest. A reader refuses any other."""

MANIFEST = "manifest.json"
FOLDERS = ("kernels", "cubins")
MAX_MANIFEST_BYTES = 64 << 20
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 100_000

_NAME = re.compile(
    r"(kernels/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.py|cubins/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.cubin)"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class BundledKernel:
    """A compiled kernel as it goes into a bundle: for one spec, one config and one kind of call."""

    spec: AttentionSpec
    config: Config
    text: str
    """The rendered source."""
    artifact: Artifact

    @property
    def facts(self) -> CallFacts:
        """The kind of call it was compiled for."""
        return self.artifact.abi.facts


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the bundle as it must be."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A kernel of the manifest; its cubin is not read yet."""

    spec: AttentionSpec
    config: Config
    facts: CallFacts
    source: str
    cubin: str
    artifact: dict[str, Any]
    """As `Artifact.to_json` gave it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest, checked."""

    target: Target
    versions: Versions
    created_at: str
    """UTC, ISO 8601."""
    records: tuple[Record, ...]
    kernels: tuple[KernelEntry, ...]
    files: dict[str, FileEntry]

    def kernels_of(self, record: Record) -> tuple[KernelEntry, ...]:
        """The kernels that were compiled for a record's spec (whatever its outputs) and config."""
        key = record.workload.spec.key
        return tuple(k for k in self.kernels if k.config == record.config and k.spec.key == key)

    def dumps(self) -> str:
        """The text of `manifest.json`."""
        entries = [
            {
                "spec": record.workload.spec.key,
                "bucket": record.workload.bucket().text,
                "record": record.to_json(),
                "kernels": [kernel.cubin for kernel in self.kernels_of(record)],
            }
            for record in self.records
        ]
        kernels = [
            {
                "spec": kernel.spec.to_json(),
                "family": kernel.config.family,
                "config": kernel.config.to_json(),
                "source": kernel.source,
                "cubin": kernel.cubin,
                "artifact": kernel.artifact,
            }
            for kernel in self.kernels
        ]
        body = {
            "target": self.target.to_json(),
            "target_key": self.target.key,
            "versions": self.versions.to_json(),
            "created_at": self.created_at,
            "entries": entries,
            "kernels": kernels,
            "files": {name: {"sha256": f.sha256, "bytes": f.size} for name, f in sorted(self.files.items())},
        }
        return json.dumps({"format": FORMAT, "sha256": _digest(body), **body}, indent=1) + "\n"


def _digest(body: dict[str, Any]) -> str:
    """Of the manifest without its first two fields, however it is spaced."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse(text: str) -> Manifest:
    """Reads and checks the text of a manifest.

    Raises:
        BundleError: another format, damage, or contents this FlashGen does not understand.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{MANIFEST} is damaged: not JSON ({error}). Export the bundle again") from None
    if not isinstance(data, dict) or "format" not in data:
        raise BundleError(f"{MANIFEST} names no format: this is not a FlashGen bundle")
    if data["format"] != FORMAT:
        raise BundleError(
            f"{MANIFEST} has format {data['format']!r}; this FlashGen reads format {FORMAT}. "
            "Use the FlashGen that wrote it, or export again with this one"
        )
    body = {name: value for name, value in data.items() if name not in ("format", "sha256")}
    if data.get("sha256") != _digest(body):
        raise BundleError(
            f"{MANIFEST} is damaged: its contents do not match its sha256. Export the bundle again"
        )
    try:
        return _read(body)
    except BundleError:
        raise
    except Exception as error:  # each constructor refuses in its own way
        raise BundleError(
            f"{MANIFEST} has contents this FlashGen does not understand ({type(error).__name__}: {error}); "
            f"it was written by FlashGen {_writer(body)}. Export the bundle again with this one"
        ) from error


def _read(body: dict[str, Any]) -> Manifest:
    files = {name: FileEntry(entry["sha256"], entry["bytes"]) for name, entry in body["files"].items()}
    for name, file in files.items():
        if not _NAME.fullmatch(name):
            raise BundleError(
                f"{MANIFEST} names the file {name!r}; allowed are kernels/*.py and cubins/*.cubin"
            )
        if not _SHA256.fullmatch(file.sha256) or not 0 < file.size <= MAX_FILE_BYTES:
            raise BundleError(
                f"{MANIFEST} describes {name} wrongly: sha256 {file.sha256!r}, {file.size!r} bytes"
            )
    if len(files) > MAX_FILES:
        raise BundleError(f"{MANIFEST} names {len(files)} files; at most {MAX_FILES} are read")
    kernels = tuple(_read_kernel(entry) for entry in body["kernels"])
    named = {name for kernel in kernels for name in (kernel.source, kernel.cubin)}
    if different := named ^ files.keys():
        raise BundleError(f"{MANIFEST} contradicts itself about {', '.join(sorted(different))}")
    return Manifest(
        target=Target.from_json(body["target"]),
        versions=Versions(**body["versions"]),
        created_at=body["created_at"],
        records=tuple(Record.from_json(entry["record"]) for entry in body["entries"]),
        kernels=kernels,
        files=files,
    )


def _read_kernel(entry: dict[str, Any]) -> KernelEntry:
    spec = AttentionSpec.from_json(entry["spec"])
    artifact = entry["artifact"]
    if tuple(artifact["abi"]["environment"]) != environment_names(spec):
        raise BundleError(
            f"{entry['cubin']} expects its call's values in another order than this FlashGen gives them; "
            "export the bundle again with this FlashGen"
        )
    return KernelEntry(
        spec=spec,
        config=Config.from_json(entry["family"], entry["config"]),
        facts=CallFacts(**artifact["abi"]["facts"]),
        source=entry["source"],
        cubin=entry["cubin"],
        artifact=artifact,
    )


def _writer(body: dict[str, Any]) -> str:
    versions = body.get("versions")
    return str(versions.get("flashgen", "?")) if isinstance(versions, dict) else "?"


_ACCESS = ("strided", "unit", "aligned")  # weakest promise first


def serves(entry: KernelEntry, facts: CallFacts) -> bool:
    """Whether a kernel may run a call: it assumes nothing that the call does not keep.

    A kernel for strided, wide calls assumes nothing at all.
    """
    has_descriptors = bool(entry.artifact["descriptors"])
    return (
        _ACCESS.index(entry.facts.access) <= _ACCESS.index(facts.access)
        and entry.facts.wide >= facts.wide
        and (facts.tma or not has_descriptors)
    )


def strictness(entry: KernelEntry) -> tuple[int, int, int]:
    """Sort key, the kernel that assumes the most first: it is the fastest of those that serve."""
    return (-_ACCESS.index(entry.facts.access), entry.facts.wide, -len(entry.artifact["descriptors"]))


def serves_any(entry: KernelEntry) -> bool:
    """Whether a kernel may run every call of its spec."""
    return serves(entry, CallFacts("strided", tma=False, wide=True))
