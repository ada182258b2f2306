"""Writing a bundle: a folder that is complete or absent."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from flashgen.build.artifact import Artifact
from flashgen.bundle.manifest import (
    FOLDERS,
    MANIFEST,
    BundledKernel,
    FileEntry,
    KernelEntry,
    Manifest,
    serves_any,
)
from flashgen.codegen.families import serving
from flashgen.errors import BundleError, FlashGenError, InvalidArgument, Unsupported
from flashgen.settings import unwritable
from flashgen.spec.attention import OUT_DTYPES, AttentionSpec, CallFacts
from flashgen.spec.config import Config
from flashgen.spec.record import Record, Status, Versions
from flashgen.spec.target import Target

ALIGNED = CallFacts("aligned", tma=True, wide=False)
ANY_CALL = CallFacts("strided", tma=False, wide=True)
"""A kernel compiled for these facts assumes nothing, and so runs every call of its spec."""


_TEMPORARY = ".flashgen-"
"""How the names of unfinished bundles begin."""


def wanted(spec: AttentionSpec, admission: str) -> tuple[tuple[AttentionSpec, CallFacts], ...]:
    """What to compile of one config for a bundle: with and without the LSE, for each dtype of the output that
    there may be, for aligned calls and, if the config can serve any call, for any call.

    Args:
        admission: of the config, as in its record: `tma`, `tma_pack4`, `any`, `any_unordered`.
    """
    kinds = (ALIGNED, ANY_CALL) if admission.startswith("any") else (ALIGNED,)
    return tuple(
        (replace(spec, return_lse=lse, out_dtype=out), facts)
        for out in OUT_DTYPES[spec.dtype]
        for lse in (False, True)
        for facts in kinds
    )


def fallback(spec: AttentionSpec, target: Target, heads_per_kv: int = 1) -> Config | None:
    """The untuned config that serves whatever call of a spec; None where no family has one (8-bit inputs)."""
    try:
        family = serving(spec, target, ANY_CALL, heads_per_kv)[0]
    except Unsupported:
        return None
    return family.default(spec, target, ANY_CALL, heads_per_kv)


def write_bundle(
    records: Sequence[Record],
    kernels: Iterable[BundledKernel],
    out: Path,
    target: Target,
    versions: Versions,
    stale: Sequence[Record] = (),
) -> Path:
    """Writes tuned kernels as a bundle in the folder `out` and returns its path.

    Args:
        records: winners on `target`; each must have a kernel of its spec and config among `kernels`.
        kernels: compiled for `target`. One without a record is a fallback.
        out: a new or empty folder, or an older bundle, which is replaced once the new one is complete.
        versions: what rendered and compiled the kernels.
        stale: those of `records` that measured another kernel than is given here; they are marked.

    Raises:
        InvalidArgument: nothing to write, a record that is not OK or of another target, a kernel for
            another GPU, a record without a kernel, a spec without a kernel that serves every call though
            there is one, or `out` is something else.
        BundleError: the folder cannot be written; nothing of it is left behind.
    """
    out = Path(out)
    manifest, contents = _collect(tuple(records), tuple(kernels), target, versions, tuple(stale))
    folder: Path | None = None
    try:
        check_place(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=_TEMPORARY))
        folder.chmod(0o755)  # mkdtemp's 0700 would keep others from reading the bundle
        for name in FOLDERS:
            (folder / name).mkdir()
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        (folder / MANIFEST).write_text(manifest.dumps(), encoding="utf-8")
        _put_in_place(folder, out)
    except FlashGenError:
        raise
    except (OSError, ValueError) as error:  # the second: a name with NUL
        raise BundleError(
            f"cannot write the bundle {str(out)!r}: {error}. Nothing was left behind"
        ) from error
    finally:
        if folder is not None and folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
    return out


def _collect(
    records: tuple[Record, ...],
    kernels: tuple[BundledKernel, ...],
    target: Target,
    versions: Versions,
    stale: tuple[Record, ...],
) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the contents of every file, checked."""
    if not kernels:
        raise InvalidArgument("a bundle needs at least one kernel; tune the shapes first: flashgen tune")
    for record in records:
        if record.target != target:
            raise InvalidArgument(
                f"the record of {record.workload.name} is of {record.target.describe()}, "
                f"the bundle is for {target.describe()}"
            )
        if record.measurement.status is not Status.OK:
            raise InvalidArgument(
                f"the record of {record.workload.name} with {record.config.name} is "
                f"{record.measurement.status.value}: {record.measurement.reason}; only OK ones are exported"
            )
    contents: dict[str, bytes] = {}
    entries: dict[tuple[object, ...], KernelEntry] = {}
    for kernel in kernels:
        if kernel.artifact.arch != target.arch:
            raise InvalidArgument(
                f"{kernel.artifact.name} was compiled for sm_{kernel.artifact.arch}, "
                f"the bundle is for {target.describe()}"
            )
        text = kernel.text.encode()
        source = f"kernels/{_stem(kernel)}-{hashlib.sha256(text).hexdigest()[:12]}.py"
        cubin = f"cubins/{_stem(kernel)}-{_kind(kernel.facts)}-{kernel.artifact.cubin_sha256[:12]}.cubin"
        parts = {part.name: _part_file(kernel, part) for part in kernel.artifact.parts}
        contents[source], contents[cubin] = text, kernel.artifact.cubin
        contents |= {parts[part.name]: part.cubin for part in kernel.artifact.parts}
        entry = KernelEntry(
            kernel.spec, kernel.config, kernel.facts, source, cubin, kernel.artifact.to_json(), parts
        )
        entries.setdefault((kernel.spec, kernel.config, kernel.facts), entry)
    manifest = Manifest(
        target=target,
        versions=versions,
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        records=records,
        kernels=tuple(entries.values()),
        files={
            name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in contents.items()
        },
        stale=stale,
    )
    for record in records:
        if not manifest.kernels_of(record):
            raise InvalidArgument(f"no kernel was given for {record.workload.name} with {record.config.name}")
    for spec in dict.fromkeys(entry.spec for entry in manifest.kernels):
        served = any(serves_any(entry) for entry in manifest.kernels if entry.spec == spec)
        if not served and fallback(spec, target) is not None:
            raise InvalidArgument(
                f"no kernel of {spec.key!r} (return_lse={spec.return_lse}) serves unaligned calls; "
                "add one that loads by pointer, compiled for ANY_CALL"
            )
    return manifest, contents


def _stem(kernel: BundledKernel) -> str:
    """The kernel's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9_]", "_", kernel.artifact.name)[:150]


def _part_file(kernel: BundledKernel, part: Artifact) -> str:
    return f"cubins/{part.name}-{_kind(kernel.facts)}-{part.cubin_sha256[:12]}.cubin"


def _kind(facts: CallFacts) -> str:
    return "_".join([facts.access, *(["tma"] if facts.tma else []), *(["wide"] if facts.wide else [])])


def check_place(out: Path) -> None:
    """Whether a bundle can be written as `out`; asked before compiling for it, and at the end.

    Raises:
        InvalidArgument: it is something else than a new or empty folder or a bundle: a folder of somebody's
            is never replaced.
        BundleError: nothing can be made where it is to lie.
    """
    try:
        _check_replaceable(out)
        why = unwritable(out.absolute().parent)
    except FlashGenError:
        raise
    except (OSError, ValueError) as error:  # the second: a name with NUL
        why = str(error)
    if why:
        raise BundleError(f"cannot write the bundle {str(out)!r}: {why}; give another folder")


def _check_replaceable(out: Path) -> None:
    if out.name in ("", ".."):
        raise InvalidArgument(
            f"out={str(out)!r} has no name of its own; give a folder such as bundles/llama3-8b"
        )
    try:
        out.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if out.is_dir() and not out.is_symlink() and (not any(out.iterdir()) or _is_bundle(out)):
        return
    raise InvalidArgument(
        f"{out} exists and is not a FlashGen bundle; "
        "give a new or empty folder, or an older bundle to replace"
    )


def _is_bundle(folder: Path) -> bool:
    """Whether a folder has a manifest of any format and every file in it is one that its manifest names."""
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        named = {MANIFEST, *data["files"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
    found = {path: path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    known = all(name in (FOLDERS if path.is_dir() else named) for path, name in found.items())
    return known and "format" in data and "target_key" in data


def _put_in_place(folder: Path, out: Path) -> None:
    """Renames the finished folder to its name; an older bundle goes only when the new one stands there."""
    if not out.exists():
        folder.rename(out)
        return
    aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=_TEMPORARY))
    try:
        old = out.rename(aside / out.name)
        try:
            folder.rename(out)
        except OSError:
            old.rename(out)
            raise
    except OSError:
        with suppress(OSError):
            aside.rmdir()  # unless the older bundle could not be put back: then it stays here
        raise
    shutil.rmtree(aside, ignore_errors=True)
