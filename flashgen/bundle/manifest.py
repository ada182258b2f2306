"""The manifest of a bundle: what it was made for, what it holds, and the hash of every file.

    manifest.json   this
    kernels/*.py    rendered sources, to read; never imported
    cubins/*.cubin  compiled kernels

A manifest comes from outside. Reading one checks everything it says before anything else looks at it,
and nothing in it is ever executed: expressions are parsed, file names must match a narrow pattern.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flashgen.build.artifact import Artifact
from flashgen.codegen.abi import AXES, Abi, Part, Scratch, environment_names
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.family import Tiling
from flashgen.errors import BundleError, InvalidArgument
from flashgen.spec import form
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.config import Config
from flashgen.spec.form import Absent, Each, Flag, ListOf, Maybe, Number, Text
from flashgen.spec.record import Record, Status, Versions
from flashgen.spec.target import KIB, Target
from flashgen.store.jsonl import foreign_record

T = TypeVar("T")

FORMAT = 1
"""Of the manifest. A reader refuses any other."""

MANIFEST = "manifest.json"
FOLDERS = ("kernels", "cubins")
MAX_MANIFEST_BYTES = 64 << 20
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 100_000
MAX_PARTS = 8

_NAME = re.compile(
    r"(kernels/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.py|cubins/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.cubin)"
)
_COUNT = Number()
_ABI = {
    "environment": ListOf(Text(), MAX_FILES),
    "args": ListOf(
        {
            "name": Text(),
            "source": Text(),
            "type": Text(),
            "divisor": _COUNT,
            "constant": Maybe(_COUNT),
            "offset": _COUNT,
        },
        MAX_FILES,
    ),
    "grid": {"rule": Text(), "block_m": _COUNT, "pack": _COUNT, "programs": _COUNT, "splits": _COUNT},
    "num_warps": _COUNT,
    "num_stages": _COUNT,
    "max_registers": _COUNT,
    "facts": {"access": Text(), "tma": Flag(), "wide": Flag()},
}
_KERNEL = {
    "name": Text(),
    "cubin_sha256": Text(),
    "abi": _ABI,
    "num_warps": Number(least=1, most=32),
    "shared_bytes": _COUNT,
    "registers": Number(most=255),
    "spill_bytes": Number(most=512 * KIB),  # local memory of a thread
    "descriptors": ListOf(
        {"swizzle": _COUNT, "elem_size": _COUNT, "elem_type": _COUNT, "block": ListOf(_COUNT)}
    ),
    "triton": Text(),
    "arch": _COUNT,
}
_EXTENT = {"size": Text(), "divisor": _COUNT, "times": _COUNT, "plus": _COUNT, "packed": Absent(Flag())}
_ARTIFACT = {
    **_KERNEL,
    "before": Absent(ListOf(_KERNEL, MAX_PARTS)),
    "after": Absent(ListOf(_KERNEL, MAX_PARTS)),
    "scratch": Absent(
        ListOf({"name": Text(), "dtype": Text(), "extents": ListOf(_EXTENT, len(AXES))}, MAX_PARTS)
    ),
}
_BODY = {
    "target": form.TARGET,
    "target_key": Text(),
    "versions": form.VERSIONS,
    "created_at": Text(),
    "entries": ListOf(
        {
            "spec": Text(3 * form.MAX_EXPRESSION),
            "bucket": Text(),
            "record": form.RECORD,
            "stale": Absent(Flag()),
            "kernels": ListOf(Text(), MAX_FILES),
        },
        MAX_FILES,
    ),
    "kernels": ListOf(
        {
            "spec": form.SPEC,
            "family": Text(),
            "config": form.CONFIG,
            "source": Text(),
            "cubin": Text(),
            "parts": Absent(Each(Text(), MAX_PARTS)),
            "artifact": _ARTIFACT,
        },
        MAX_FILES,
    ),
    "files": Each({"sha256": Text(), "bytes": Number(least=1, most=MAX_FILE_BYTES)}, MAX_FILES),
}
"""The form of a manifest without its first two fields."""


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
    parts: dict[str, str] = field(default_factory=dict)
    """The cubins of the kernels that run before and after it, by their names."""

    @property
    def cubins(self) -> tuple[str, ...]:
        """All of its cubins, its own first."""
        return (self.cubin, *self.parts.values())


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
    stale: tuple[Record, ...] = ()
    """Those of `records` that measured another kernel than the bundle has: the templates have changed."""

    def kernels_of(self, record: Record) -> tuple[KernelEntry, ...]:
        """The kernels that were compiled for a record's spec (whatever its outputs) and config."""
        key = record.workload.spec.key
        return tuple(k for k in self.kernels if k.config == record.config and k.spec.key == key)

    def shown(self, record: Record) -> dict[str, Any]:
        """What an entry says besides its record, for people and other programs."""
        return {
            "spec": record.workload.spec.key,
            "bucket": record.workload.bucket().text,
            "kernels": [kernel.cubin for kernel in self.kernels_of(record)],
        }

    def dumps(self) -> str:
        """The text of `manifest.json`."""
        entries = [
            {
                **self.shown(record),
                "record": record.to_json(),
                "stale": record in self.stale,
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
                **({"parts": kernel.parts} if kernel.parts else {}),
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
    if type(data["format"]) is not int or data["format"] != FORMAT:
        raise BundleError(
            f"{MANIFEST} has format {form.shown(data['format'])}; this FlashGen reads format {FORMAT}. "
            "Use the FlashGen that wrote it, or export again with this one"
        )
    body = {name: value for name, value in data.items() if name not in ("format", "sha256")}
    try:
        if data.get("sha256") != _digest(body):
            raise BundleError(
                f"{MANIFEST} is damaged: its contents do not match its sha256. Export the bundle again"
            )
        return _read(form.checked(body, _BODY, "manifest"))
    except BundleError:
        raise
    except Exception as error:  # each constructor refuses in its own way
        told = form.plain(form.brief(str(error)))
        raise BundleError(
            f"{MANIFEST} has contents this FlashGen does not understand ({type(error).__name__}: {told}); "
            f"it was written by FlashGen {_writer(body)}. Export the bundle again with this one"
        ) from error


def _read(body: dict[str, Any]) -> Manifest:
    """The manifest of a body that has the form."""
    files = {name: FileEntry(entry["sha256"], entry["bytes"]) for name, entry in body["files"].items()}
    for name in files:
        if not _NAME.fullmatch(name):
            raise BundleError(
                f"{MANIFEST} names the file {name!r}; allowed are kernels/*.py and cubins/*.cubin"
            )
    target = Target.from_json(body["target"])
    kernels = _each("kernels", body["kernels"], _read_kernel)
    named = {name for kernel in kernels for name in (kernel.source, *kernel.cubins)}
    if different := named ^ files.keys():
        raise BundleError(f"{MANIFEST} contradicts itself about {form.brief(', '.join(sorted(different)))}")
    records = _each("entries", body["entries"], lambda entry: _read_record(entry, target))
    manifest = Manifest(
        target=target,
        versions=Versions(**body["versions"]),
        created_at=body["created_at"],
        records=records,
        kernels=kernels,
        files=files,
        stale=tuple(itertools.compress(records, (entry.get("stale") for entry in body["entries"]))),
    )
    _agree("target_key", body["target_key"], target.key)
    for number, (entry, record) in enumerate(zip(body["entries"], records, strict=True)):
        for name, value in manifest.shown(record).items():
            _agree(f"entries[{number}].{name}", entry[name], value)
    return manifest


def _each(name: str, entries: list[Any], read: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    """All entries of a list, read; an error says which it is about."""
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(read(entry))
        except Exception as error:
            raise InvalidArgument(f"manifest.{name}[{number}]: {error}") from error
    return tuple(found)


def _agree(name: str, told: Any, known: Any) -> None:
    if told != known:
        rest = form.shown(known)
        raise InvalidArgument(f"manifest.{name}={form.shown(told)} contradicts the rest, which says {rest}")


def _read_record(entry: dict[str, Any], target: Target) -> Record:
    record = foreign_record(entry["record"])
    if record.target != target:
        raise InvalidArgument(
            f"record.target is {record.target.describe()}, the bundle is for {target.describe()}"
        )
    if record.measurement.status is not Status.OK:
        raise InvalidArgument(
            f"record.measurement.status={record.measurement.status.value!r}; a bundle has OK records only"
        )
    return record


def _read_kernel(entry: dict[str, Any]) -> KernelEntry:
    spec = AttentionSpec.from_json(entry["spec"])
    config = Config.from_json(entry["family"], entry["config"])
    family = FAMILIES.get(config.family)
    if family is not None and (reason := family.owns(config)):
        raise InvalidArgument(f"config: {reason}")
    artifact = entry["artifact"]
    abi = Abi.from_json(artifact["abi"])
    parts = [*artifact.get("before", ()), *artifact.get("after", ())]
    scratch = tuple(Scratch.from_json(each) for each in artifact.get("scratch", ()))
    abis = (abi, *(Abi.from_json(part["abi"]) for part in parts))
    for each in abis:
        if each.environment != environment_names(spec, scratch) or each.facts != abi.facts:
            raise InvalidArgument(
                f"{entry['cubin']} expects its call's values in another order than this FlashGen gives them"
            )
    if {part["name"] for part in parts} != entry.get("parts", {}).keys():
        raise InvalidArgument(f"the parts of {entry['cubin']} are not those that its artifact has")
    if spec.return_lse != any(arg.source == "lse" for each in abis for arg in each.args):
        raise InvalidArgument(f"its arguments do not have what return_lse={spec.return_lse} says")
    if family is not None:
        _agrees_with(config, family.tiling(config), spec, abi, artifact["num_warps"])
        _parts_agree(config, family.parts(config, spec), artifact)
        if scratch != family.scratch(config, spec):
            raise InvalidArgument(f"artifact.scratch contradicts the config {config.name}")
    return KernelEntry(
        spec=spec,
        config=config,
        facts=abi.facts,
        source=entry["source"],
        cubin=entry["cubin"],
        artifact=artifact,
        parts=entry.get("parts", {}),
    )


_GRID = ("rule", "block_m", "pack", "programs", "splits")


def _agrees_with(config: Config, tiling: Tiling, spec: AttentionSpec, abi: Abi, warps: int) -> None:
    """A kernel runs as its config says."""
    grid = tiling.grid_of(spec)
    told = {f"abi.grid.{each}": (getattr(abi.grid, each), getattr(grid, each)) for each in _GRID}
    told |= {
        "abi.num_warps": (abi.num_warps, tiling.num_warps),
        "abi.num_stages": (abi.num_stages, tiling.num_stages),
        "abi.max_registers": (abi.max_registers, tiling.max_registers),
        "num_warps": (warps, tiling.warps or tiling.num_warps),
    }
    for name, (value, known) in told.items():
        if value != known:
            raise InvalidArgument(f"artifact.{name}={value} contradicts the config {config.name}")


def _parts_agree(config: Config, parts: tuple[Part, ...], artifact: dict[str, Any]) -> None:
    """The kernels before and after the main one are those of its config."""
    for when in ("before", "after"):
        told = [(each["name"], Abi.from_json(each["abi"]).grid) for each in artifact.get(when, ())]
        known = [(part.name, part.grid) for part in parts if part.before == (when == "before")]
        if told != known:
            raise InvalidArgument(f"artifact.{when} contradicts the config {config.name}")


def _writer(body: dict[str, Any]) -> str:
    versions = body.get("versions")
    told = versions.get("flashgen", "?") if isinstance(versions, dict) else "?"
    return form.brief(form.plain(str(told)), form.MAX_NAME)


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
