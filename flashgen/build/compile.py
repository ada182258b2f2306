"""Compile: KernelSource -> Artifact, the same call with and without a GPU.

`triton.compile` gets the kernel's function, every argument's type and what may be assumed of it from
the ABI, so nothing is specialised again at the first launch, and a machine without a GPU builds the
very cubin that will run.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from flashgen.build.artifact import Artifact
from flashgen.build.versions import triton_version
from flashgen.codegen.abi import Abi, Arg, DescriptorFacts, Part
from flashgen.codegen.source import KernelSource, Toolchain, write, write_whole
from flashgen.errors import CompileFailed, CompilerUnavailable, DoesNotFit
from flashgen.settings import SETTINGS
from flashgen.spec.attention import CallFacts
from flashgen.spec.target import KIB, Target

# Triton's numbering of element types on the device differs from the driver's from 8 (fp64) on.
_DRIVER_ELEMENT_TYPE = {8: 10, 9: 8, 10: 9}
_FORMAT = 3  # of the cached artifacts
# What a compiler's message says when the machine failed it and the kernel is not to blame.
_MACHINE_SAYS = {
    "No space left on device": errno.ENOSPC,
    "Cannot find ptxas": errno.ENOENT,
    "Memory allocation failure": errno.ENOMEM,
    "failed with error code -9": errno.ENOMEM,  # killed, as the system does when memory runs out
}
_TOOL_TIMEOUT_S = 60.0
SPILLS_LEFT_TO_THE_CLOCK = 8
"""Instructions of a loop that spill: so few are no reason to refuse an asynchronous kernel before it is
timed, and where the LSE takes the last register (head_dim 256: one) a call gets the kernel that was tuned."""
_GLUON_TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "e4m3": "float8e4nv"}
_TRITON_NAMES = {"e4m3": "fp8e4nv"}  # of element types, where they differ from ours


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
            written to, as Triton's own (`~/.triton`), only costs the compile each time.

    Raises:
        CompileFailed: triton or ptxas refused it; the message is theirs. Or ptxas gave up the asynchrony of a
            kernel that lives by it.
        CompilerUnavailable: the machine failed the compiler; says nothing of the kernel.
        DoesNotFit: it needs more shared memory than a block of the target has, or more registers than its
            loop over keys has.
    """
    cache = cache or SETTINGS.cache_dir()
    key = artifact_key(source, facts, target)
    stored = _read(cache / "artifacts", key)
    if stored is None:
        stored = _compile_somewhere(source, facts, target, cache / "kernels")
        _write(cache / "artifacts", key, stored)
    needed = max(each.shared_bytes for each in (stored, *stored.parts))
    if needed > target.shared_per_block:
        raise DoesNotFit(
            f"{source.name} needs {needed / KIB:.1f} KB of shared memory a block, "
            f"{target.name or target.key} has {target.shared_per_block / KIB:.0f} KB"
        )
    return stored


def artifact_key(source: KernelSource, facts: CallFacts, target: Target) -> str:
    """Content hash of everything the cubins depend on."""
    abis = [source.abi(facts, part).to_json() for part in (None, *source.parts)]
    parts = [_FORMAT, source.text, json.dumps(abis), target.arch, source.toolchain.triton]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes away, with Triton's cache in it: meanwhile all of this process compiles there."""
    from triton import knobs

    with (
        tempfile.TemporaryDirectory(prefix="flashgen-", ignore_cleanup_errors=True) as folder,
        knobs.cache.scope(),
    ):
        knobs.cache.dir = folder
        yield Path(folder)


def _compile_somewhere(source: KernelSource, facts: CallFacts, target: Target, wanted: Path) -> Artifact:
    """In the wanted folder; in one that goes away if that or Triton's own is full or not for us to write."""
    try:
        try:
            return _compile(source, facts, target, wanted)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise  # no folder has more of it
        with scratch() as folder:
            return _compile(source, facts, target, folder)
    except OSError as error:
        raise CompilerUnavailable(
            error.errno or errno.EIO,
            f"{source.name} cannot be compiled on this machine ({error}); look at `flashgen doctor`, and at "
            "what is free of its memory and of its temporary folder (TMPDIR)",
        ) from error


def _compile(source: KernelSource, facts: CallFacts, target: Target, folder: Path) -> Artifact:
    """All kernels of a file."""
    module = load_module(write(source, folder))

    def compiled(name: str, part: Part | None) -> Artifact:
        return _compile_one(source, getattr(module, name), source.abi(facts, part), target)

    return replace(
        compiled(source.name, None),
        before=tuple(compiled(part.name, part) for part in source.parts if part.before),
        after=tuple(compiled(part.name, part) for part in source.parts if not part.before),
        scratch=source.scratch,
    )


def _compile_one(source: KernelSource, function: Any, abi: Abi, target: Target) -> Artifact:
    from triton.backends.compiler import GPUTarget

    gluon = function.is_gluon()
    try:
        with _listening_to_ptxas(gluon) as heard:
            compiled = triton_compile(function, abi, GPUTarget("cuda", target.arch, 32))
    except OSError:
        raise
    except Exception as error:  # triton raises many kinds; nearly all mean that there is no kernel
        raise _failure(error, f"{source.name} for sm_{target.arch}: {_in_short(error)}") from error
    metadata = compiled.metadata
    if getattr(metadata, "global_scratch_size", 0):
        raise CompileFailed(f"{source.name} wants {metadata.global_scratch_size} B of scratch memory")
    cubin = compiled.asm["cubin"]
    registers, spilled = resource_usage(cubin)
    if gluon:
        said = heard.getvalue()
        if f"'{metadata.name}'" not in said:
            said = _ptxas_log(compiled.asm["ptx"], target)
        _check_asynchronous(source.name, said, cubin, spilled)
    return Artifact(
        name=metadata.name,
        cubin=cubin,
        abi=abi,
        shared_bytes=metadata.shared,
        num_warps=metadata.num_warps,
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
    from triton.experimental.gluon._runtime import GluonASTSource

    gluon = function.is_gluon()
    registers = {"maxnreg": abi.max_registers} if abi.max_registers else {}
    constants = {arg.name: arg.constant for arg in abi.args if arg.constant is not None}
    return triton.compile(
        (GluonASTSource if gluon else ASTSource)(
            fn=function,
            signature={a.name: "constexpr" if a.name in constants else _type(a, gluon) for a in abi.args},
            constexprs=constants,
            attrs={
                (i,): [["tt.divisibility", arg.divisor]] for i, arg in enumerate(abi.args) if arg.divisor > 1
            },
        ),
        target=gpu,
        options={"num_warps": abi.num_warps, "num_stages": abi.num_stages, **registers},
    )


@contextmanager
def _listening_to_ptxas(wanted: bool) -> Iterator[io.StringIO]:
    """Has Triton print what its ptxas says, and hears that instead of the terminal.

    Nothing is heard of a kernel that comes out of Triton's own cache. Knob and standard output are the whole
    process's: where other threads might print or compile, or the user wants the log, they are left alone.
    """
    from triton import knobs

    heard = io.StringIO()
    if not wanted or threading.active_count() > 1 or knobs.nvidia.dump_ptxas_log:
        yield heard
        return
    with knobs.nvidia.scope(), redirect_stdout(heard):
        knobs.nvidia.dump_ptxas_log = True
        yield heard


def _type(arg: Arg, gluon: bool) -> str:
    """An argument's type as the compiler reads it: Gluon's descriptors name their layout in shared memory.

    That of float32 is row by row: products read none of it, and a swizzle takes a register for each address.
    """
    named = re.sub(r"[a-z]\w+$|(?<=<)\w+", lambda m: _TRITON_NAMES.get(m[0], m[0]), arg.type)
    if not (gluon and arg.is_descriptor):
        return named
    from triton.experimental.gluon import language as gl

    element = getattr(gl, _GLUON_TYPES[arg.type.partition("<")[2].partition("[")[0]])
    layout = gl.NVMMASharedLayout.get_default_for(list(arg.box), element)
    if element == gl.float32:
        layout = gl.NVMMASharedLayout(0, 32, rank=len(arg.box))
    return f"{named[:-1].replace(',', ', ')},{layout!r}>"


def _failure(error: Exception, message: str) -> Exception:
    """Whether the compiler refused a kernel, or the machine failed the compiler."""
    said = next((number for saying, number in _MACHINE_SAYS.items() if saying in str(error)), None)
    number = errno.ENOMEM if isinstance(error, MemoryError) else said
    return CompileFailed(message) if number is None else OSError(number, message)


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


def _check_asynchronous(name: str, said: str, cubin: bytes, spilled: int) -> None:
    """Refuses an asynchronous kernel whose products wait for each other, which triton does not tell.

    ptxas warns where it puts a wait behind every wgmma: C7510 (a call it cannot see through), C7512 (too few
    registers), C7514 (an accumulator that is touched on the way); such a kernel takes twice as long. Many
    spills are as bad where the loop over keys makes them; what is spilled once for each tile costs nothing
    that was measured, and the fastest kernels of head_dim 64 do it.
    """
    if found := re.search(r"\((C751[024])\)[^:]*:?\s*(.*)", said):
        raise CompileFailed(f"{name}: ptxas {found[1]}: {found[2].strip()[:200]}")
    if spilled and (count := spills_in_loops(sass(cubin))) > SPILLS_LEFT_TO_THE_CLOCK:
        raise DoesNotFit(f"{name} spills registers in its loop over keys: {count} instructions")


def _ptxas_log(ptx: str, target: Target) -> str:
    """What the ptxas that triton takes for the target says of a kernel, information and warnings.

    It takes a quarter of the whole compile, so it runs only where nothing was heard of Triton's own run.
    """
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        name = sm_arch_from_capability(target.arch)
        options = ("-v", f"--gpu-name={name}", "-o", str(path.with_suffix(".cubin")))
        return _run_tool(lambda: get_ptxas(target.arch), *options, str(path)).stderr


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?(\S+)(.*?);")


def spills_in_loops(text: str) -> int:
    """How many instructions of innermost loops with tensor-core products, in SASS, access local memory.

    A jump back under no condition ends none of them: it returns from a wait that was put behind all code.
    """
    found = [(int(at, 16), op, rest, condition) for at, condition, op, rest in _INSTRUCTION.findall(text)]
    loops = []
    for at, op, rest, condition in found:
        target = re.search(r"0x([0-9a-f]+)\s*$", rest) if condition and op.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            loops.append((int(target[1], 16), at))
    products = [at for at, op, *_ in found if "GMMA" in op or "HMMA" in op]
    loops = [(first, last) for first, last in loops if any(first <= at <= last for at in products)]
    inner = [
        (first, last)
        for first, last in loops
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops)
    ]
    spills = [at for at, op, *_ in found if op.startswith(("LDL", "STL"))]
    return sum(any(first <= at <= last for first, last in inner) for at in spills)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of local memory a thread), as the cubin itself says."""
    text = run_binary_tool("cuobjdump", cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise OSError(f"cuobjdump gave no resource usage: {text[:200]!r}")
    return int(found[1]), int(found[2])


def sass(cubin: bytes) -> str:
    """The machine code as text."""
    return run_binary_tool("cuobjdump", cubin, "-sass")


def run_binary_tool(tool: str, cubin: bytes, *options: str) -> str:
    """Runs one of the binary tools that ship with triton on a cubin and returns what it prints.

    Raises:
        OSError: it is missing, fails or hangs; also of a cubin cut short: ptxas does not notice a full disk.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run_tool(lambda: getattr(knobs.nvidia, tool), *options, file.name).stdout


def _run_tool(find: Callable[[], Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs one of triton's tools, which it looks for."""
    try:
        command = [find().path, *arguments]
    except RuntimeError as error:
        raise OSError(f"a tool of triton's cannot be used: {error}") from error
    name = Path(command[0]).name
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip()[:200]
        raise OSError(f"{name} ended with code {error.returncode}: {said}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{name} cannot be used: {error}") from error


def _read(folder: Path, key: str) -> Artifact | None:
    """A cached artifact, or None if it is absent or damaged (then it is compiled again)."""
    try:
        data = json.loads((folder / f"{key}.json").read_text())
        ptx = (folder / f"{key}.ptx").read_text()
        names = [part["name"] for part in (*data.get("before", ()), *data.get("after", ()))]
        parts = {name: (folder / f"{key}.{name}.cubin").read_bytes() for name in names}
        return Artifact.from_json(data, (folder / f"{key}.cubin").read_bytes(), ptx, parts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, key: str, artifact: Artifact) -> None:
    """Caches an artifact; the description comes last, so that a reader never sees half of one."""
    contents = {
        **{f"{part.name}.cubin": part.cubin for part in artifact.parts},
        "cubin": artifact.cubin,
        "ptx": artifact.ptx.encode(),
        "json": json.dumps(artifact.to_json()).encode(),
    }
    try:
        for suffix, content in contents.items():
            write_whole(folder / f"{key}.{suffix}", content)
    except OSError:
        pass  # a full disk or a read-only folder costs a compile at the next start, nothing else
