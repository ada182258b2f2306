"""Compile: KernelSource -> Artifact, the same call with and without a GPU.

`triton.compile` gets the kernel's function, every argument's type and what may be assumed of it from
the ABI, so nothing is specialised again at the first launch, and a machine without a GPU builds the
very cubin that will run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flashgen.build.artifact import Artifact
from flashgen.codegen.abi import Abi, DescriptorFacts
from flashgen.codegen.source import KernelSource, Toolchain, write
from flashgen.errors import CompileFailed, DoesNotFit
from flashgen.settings import SETTINGS
from flashgen.spec.attention import CallFacts
from flashgen.spec.target import KIB, Target

# Triton's numbering of element types on the device differs from the driver's from 8 (fp64) on.
_DRIVER_ELEMENT_TYPE = {8: 10, 9: 8, 10: 9}
_FORMAT = 1  # of the cached artifacts


@lru_cache(maxsize=1)
def triton_version() -> str:
    """The installed triton's version, read without importing it."""
    from importlib.metadata import version

    return version("triton")


def toolchain(interpret: bool = False) -> Toolchain:
    """The installed compiler, or its interpreter."""
    return Toolchain(triton_version(), interpret)


def load_module(path: Path) -> ModuleType:
    """Imports a rendered file under its own name, so that tracebacks and profilers point into it."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_kernel(
    source: KernelSource, facts: CallFacts, target: Target, cache: Path | None = None
) -> Artifact:
    """Compiles one kernel for one kind of call, or takes it from the cache.

    Args:
        cache: folder of rendered sources and artifacts; the user's own by default. One that cannot be
            written to only costs the compile each time.

    Raises:
        CompileFailed: triton or ptxas refused it; the message is theirs.
        DoesNotFit: it needs more shared memory than a block of the target has.
    """
    cache = cache or SETTINGS.cache_dir()
    abi = source.abi(facts)
    key = artifact_key(source, abi, target)
    stored = _read(cache / "artifacts", key)
    if stored is None:
        stored = _compile(source, abi, target, cache)
        _write(cache / "artifacts", key, stored)
    if stored.shared_bytes > target.shared_per_block:
        raise DoesNotFit(
            f"{source.name} needs {stored.shared_bytes / KIB:.1f} KB of shared memory a block, "
            f"{target.name or target.key} has {target.shared_per_block / KIB:.0f} KB"
        )
    return stored


def artifact_key(source: KernelSource, abi: Abi, target: Target) -> str:
    """Content hash of everything the cubin depends on."""
    parts = [_FORMAT, source.text, json.dumps(abi.to_json()), target.arch, source.toolchain.triton]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _compile(source: KernelSource, abi: Abi, target: Target, cache: Path) -> Artifact:
    from triton.backends.compiler import GPUTarget

    with _folder(cache / "kernels") as folder:
        function = getattr(load_module(write(source, folder)), source.name)
        try:
            compiled = triton_compile(function, abi, GPUTarget("cuda", target.arch, 32))
        except Exception as error:  # triton raises many kinds; all mean that there is no kernel
            raise CompileFailed(f"{source.name} for sm_{target.arch}: {_in_short(error)}") from error
    metadata = compiled.metadata
    if getattr(metadata, "global_scratch_size", 0):
        raise CompileFailed(f"{source.name} wants {metadata.global_scratch_size} B of scratch memory")
    cubin = compiled.asm["cubin"]
    registers, spilled = resource_usage(cubin)
    return Artifact(
        name=metadata.name,
        cubin=cubin,
        abi=abi,
        shared_bytes=metadata.shared,
        registers=registers,
        spill_bytes=spilled,
        descriptors=_descriptors(metadata, abi),
        triton=source.toolchain.triton,
        arch=target.arch,
        ptx=compiled.asm["ptx"],
    )


def triton_compile(function: Any, abi: Abi, gpu: Any) -> Any:
    """`triton.compile` with the ABI's types, constants and divisibility."""
    import triton
    from triton.compiler import ASTSource

    constants = {arg.name: arg.constant for arg in abi.args if arg.constant is not None}
    return triton.compile(
        ASTSource(
            fn=function,
            signature={a.name: "constexpr" if a.name in constants else a.type for a in abi.args},
            constexprs=constants,
            attrs={
                (i,): [["tt.divisibility", arg.divisor]] for i, arg in enumerate(abi.args) if arg.divisor > 1
            },
        ),
        target=gpu,
        options={"num_warps": abi.num_warps, "num_stages": abi.num_stages},
    )


def _in_short(error: Exception) -> str:
    """The first and the last lines of a compiler's message: where it was, and why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    if len(lines) > 4:
        lines = [lines[0], "...", *lines[-3:]]
    return f"{type(error).__name__}: " + " | ".join(line[:300] for line in lines)


def _descriptors(metadata: Any, abi: Abi) -> tuple[DescriptorFacts, ...]:
    facts = getattr(metadata, "tensordesc_meta", None) or []
    return tuple(
        DescriptorFacts(
            swizzle=f["swizzle"],
            elem_size=f["elem_size"],
            elem_type=_DRIVER_ELEMENT_TYPE.get(f["elem_type"], f["elem_type"]),
            block=tuple(f["block_size"]),
        )
        for f in facts
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of local memory a thread), as the cubin itself says."""
    text = run_binary_tool("cuobjdump", cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise CompileFailed(f"cuobjdump gave no resource usage: {text[:200]!r}")
    return int(found[1]), int(found[2])


def sass(cubin: bytes) -> str:
    """The machine code as text."""
    return run_binary_tool("cuobjdump", cubin, "-sass")


def run_binary_tool(tool: str, cubin: bytes, *options: str) -> str:
    """Runs one of the binary tools that ship with triton on a cubin and returns what it prints."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


class _folder:  # noqa: N801 - reads as a statement
    """The wanted folder if it can be written to, else a temporary one that goes away."""

    def __init__(self, wanted: Path) -> None:
        self._wanted = wanted
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Path:
        try:
            self._wanted.mkdir(parents=True, exist_ok=True)
            if os.access(self._wanted, os.W_OK):
                return self._wanted
        except OSError:
            pass
        self._temporary = tempfile.TemporaryDirectory(prefix="flashgen-")
        return Path(self._temporary.name)

    def __exit__(self, *_: object) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def _read(folder: Path, key: str) -> Artifact | None:
    """A cached artifact, or None if it is absent or damaged (then it is compiled again)."""
    try:
        data = json.loads((folder / f"{key}.json").read_text())
        ptx = (folder / f"{key}.ptx").read_text()
        return Artifact.from_json(data, (folder / f"{key}.cubin").read_bytes(), ptx)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, key: str, artifact: Artifact) -> None:
    """Caches an artifact; the description comes last, so that a reader never sees half of one."""
    contents: list[tuple[str, Callable[[Path], Any]]] = [
        ("cubin", lambda path: path.write_bytes(artifact.cubin)),
        ("ptx", lambda path: path.write_text(artifact.ptx)),
        ("json", lambda path: path.write_text(json.dumps(artifact.to_json()))),
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, put in contents:
            temporary = folder / f"{key}.{os.getpid()}.{suffix}.tmp"
            put(temporary)
            temporary.replace(folder / f"{key}.{suffix}")
    except OSError:
        pass  # a full disk or a read-only folder costs a compile at the next start, nothing else
