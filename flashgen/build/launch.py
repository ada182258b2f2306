"""Kernel: a loaded cubin with one `launch`, made from its ABI alone. Chain: several, for one call.

The tuner, the dispatcher and bundles all launch through here, by the CUDA driver and ctypes: triton is
not imported and no C compiler is used (Triton's own launcher builds C at first use).

A kernel's parameters live in one block of memory which is allocated once. A launch packs the values
that may have changed into it and passes the driver the addresses it has known since the kernel was
loaded.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from operator import itemgetter
from typing import Any

from flashgen.build.artifact import Artifact
from flashgen.build.driver import (
    CAPABILITY_MAJOR,
    CAPABILITY_MINOR,
    INVALID_VALUE,
    LOCAL_SIZE_BYTES,
    MAX_DYNAMIC_SHARED_BYTES,
    NUM_REGS,
    PREFER_SHARED,
    SM_COUNT,
    TENSOR_MAP_BYTES,
    Driver,
    driver,
)
from flashgen.build.workspace import Workspaces, scratch_memory
from flashgen.codegen.abi import (
    AXES,
    ELEMENT_BYTES,
    GRID_RULES,
    WORKSPACE,
    Arg,
    DescriptorFacts,
    Scratch,
    extents_of,
)
from flashgen.errors import InvalidArgument, LaunchFailed
from flashgen.spec.target import KIB

MAX_BLOCKS = 2**31 - 1
"""Blocks on the x axis of a grid."""

# How a value is packed, and its size as the kernel sees it. Every value has a slot of 8 bytes.
_SLOTS = {"i32": ("i4x", 4), "i64": ("q", 8), "fp32": ("f4x", 4), "fp64": ("d", 8)}
_POINTER = ("Q", 8)

_RANK = len(AXES)
_SHAPE = struct.Struct("=4i4q").pack_into  # a descriptor's extents and strides, passed beside it
_SHAPE_BYTES = 48
_TILED = struct.Struct("=4Q3Q").pack_into  # the same as cuTensorMapEncodeTiled reads them, innermost first
_SCRATCH_BYTES = 16  # two pointers: global and profiling scratch, both null
_CONFIG_BYTES = 56  # CUlaunchConfig: seven u32, padding, stream, attributes, number of attributes
_GRID_X, _STREAM = 0, 4  # in CUlaunchConfig, counted in u32 and in u64

# cuTensorMapEncodeTiled, as Triton calls it.
_INTERLEAVE_NONE, _L2_PROMOTION_128B, _FILL_ZERO = 0, 2, 0

_KEPT_GEOMETRIES = 32
_BUFFER_ALIGNMENT = 256  # of scratch buffers: more than a descriptor or a vector load needs


def parameter_sizes(artifact: Artifact) -> tuple[int, ...]:
    """Bytes of each parameter the kernel takes, in order, as Triton lays them out.

    A compiled-in argument is none. A descriptor is a tensor map, then its extents, then its strides.
    After all arguments come two pointers to scratch memory.
    """
    sizes: list[int] = []
    for arg in _passed(artifact):
        if arg.is_descriptor:
            sizes += [TENSOR_MAP_BYTES, *[4] * _RANK, *[8] * _RANK]
        else:
            sizes.append(_slot(arg)[1])
    return (*sizes, 8, 8)


def _passed(artifact: Artifact) -> list[Arg]:
    return [arg for arg in artifact.abi.args if arg.constant is None]


def _slot(arg: Arg) -> tuple[str, int]:
    if arg.type.startswith("*"):
        return _POINTER
    try:
        return _SLOTS[arg.type]
    except KeyError:
        raise LaunchFailed(
            f"argument {arg.name} has type {arg.type}, which cannot be passed; "
            f"known: pointers, {', '.join(_SLOTS)}"
        ) from None


def _picker(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes the entries at `indices`, always as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda env: tuple(env[i] for i in indices)


def _failure(driver: Driver, code: int, function: str, doing: str) -> LaunchFailed:
    """The error of a launch, with its code: what is to be done depends on it."""
    error = driver.failure(code, function, doing)
    error.code = code
    return error


class _Memory:
    """Zeroed memory whose address is a multiple of 128 and never changes."""

    def __init__(self, size: int) -> None:
        self._owner = (ctypes.c_char * (size + TENSOR_MAP_BYTES - 1))()
        start = -ctypes.addressof(self._owner) % TENSOR_MAP_BYTES
        self.address = ctypes.addressof(self._owner) + start
        self.view = memoryview(self._owner).cast("B")[start : start + size]


class _Descriptor:
    """One descriptor argument: what it describes, and where it lies in the kernel's memory."""

    def __init__(
        self,
        arg: Arg,
        facts: DescriptorFacts,
        entry: dict[str, int],
        memory: _Memory,
        map_at: int,
        shape_at: int,
    ) -> None:
        self.arg, self.facts, self._memory, self._shape_at = arg, facts, memory, shape_at
        self.pointer = entry[arg.source]
        """Where the environment has the tensor's address."""
        self.geometry = [entry[name] for name in extents_of(arg.source)]
        """Where it has the extents and strides."""
        self.geometry += [entry[f"{arg.source}.stride.{axis}"] for axis in AXES]
        self.packed_box = arg.box[2] if "sequences" in entry and not arg.source.startswith("scratch.") else 0
        """Rows of a box of a tensor whose sequences are packed; buffers of the call are laid out plainly."""
        self.offset_bytes = arg.offset * facts.elem_size
        """Of the map's first element from the tensor's: a head-dim chunk lies behind, the rows of a box of
        packed sequences before it, by a stride that is known once the map is encoded."""
        self.map = ctypes.c_void_p(memory.address + map_at)
        self._pick = _picker(self.geometry)
        self._work = work = _Memory(128)
        struct.pack_into("=4I4I", work.view, 64, *reversed(facts.block), 1, 1, 1, 1)
        self._address = ctypes.c_void_p()
        dims, strides, box, steps = (ctypes.c_void_p(work.address + at) for at in (0, 32, 64, 80))
        unsigned = ctypes.c_uint
        self._encode_args = (
            *(self.map, unsigned(facts.elem_type), unsigned(_RANK), self._address, dims, strides, box, steps),
            *(map(unsigned, (_INTERLEAVE_NONE, facts.swizzle, _L2_PROMOTION_128B, _FILL_ZERO))),
        )

    def encode(self, function: Callable[..., int], env: tuple[Any, ...]) -> int:
        """Writes the tensor map and, behind it, the extents and strides that the kernel is given."""
        batch, heads, rows, dims, stride_b, stride_h, stride_r, stride_d = self._pick(env)
        dims -= self.arg.offset  # the map begins at the chunk, and what lies past the head dim reads as zero
        _SHAPE(
            self._memory.view,
            self._shape_at,
            batch,
            heads,
            rows,
            dims,
            stride_b,
            stride_h,
            stride_r,
            stride_d,
        )
        # The stride of an axis of extent 1 is never used, and PyTorch puts anything there.
        size = self.facts.elem_size
        stride_b = stride_b * size if batch > 1 else 16
        stride_h = stride_h * size if heads > 1 else 16
        stride_r = stride_r * size if rows > 1 else 16
        if box := self.packed_box:
            # Rows along two axes, see `box_at` in partials/packed.jinja: element (outer, head, inner) is of
            # row outer + inner - box.
            batch, stride_b, rows = rows + box, stride_r, box
            self.offset_bytes = self.arg.offset * size - box * stride_r
        _TILED(self._work.view, 0, dims, rows, heads, batch, stride_r, stride_h, stride_b)
        self._address.value = env[self.pointer] + self.offset_bytes
        return function(*self._encode_args)

    def describe(self, env: tuple[Any, ...]) -> str:
        """Name, address, extents, strides and box, for messages."""
        values = self._pick(env)
        return (
            f"{self.arg.name} at {env[self.pointer] + self.offset_bytes:#x}, extents {values[:_RANK]}, "
            f"strides {values[_RANK:]} elements of {self.facts.elem_size} B, box {self.facts.block}; "
            "address and strides must be multiples of 16 B"
        )


class _TensorMaps:
    """The tensor maps of a kernel, kept in step with the calls.

    A call that describes what the last one did costs two comparisons. Other addresses alone are patched
    in (a model's layers: one shape, many tensors). Other extents or strides are encoded once and kept, the
    last 32 of them (a decoding step has a new k_len, and then all layers share it).
    """

    def __init__(
        self, driver: Driver, name: str, descriptors: list[_Descriptor], memory: _Memory, kept_bytes: int
    ) -> None:
        self._driver, self._name, self._descriptors = driver, name, descriptors
        self._memory, self._kept_bytes = memory, kept_bytes
        self._replace = driver.raw("cuTensorMapReplaceAddress")
        self._encode = driver.raw("cuTensorMapEncodeTiled")
        self._geometry_of = _picker(sorted({index for d in descriptors for index in d.geometry}))
        self._pointers_of = _picker([d.pointer for d in descriptors])
        self._maps = [d.map for d in descriptors]
        self._offsets: tuple[int, ...] = ()
        self._address = ctypes.c_void_p()
        self._kept: OrderedDict[Any, tuple[bytes, Any, tuple[int, ...]]] = OrderedDict()
        self._geometry: Any = None
        self._pointers: Any = None

    def update(self, env: tuple[Any, ...]) -> None:
        """Makes the maps in memory describe the tensors of a call."""
        geometry = self._geometry_of(env)
        if geometry != self._geometry:
            self._describe(geometry, env)
        pointers = self._pointers_of(env)
        if pointers != self._pointers:
            self._move(pointers, env)

    def _move(self, pointers: tuple[int, ...], env: tuple[Any, ...]) -> None:
        former, address, offsets = self._pointers, self._address, self._offsets
        for i, tensor_map in enumerate(self._maps):
            if pointers[i] != former[i]:
                address.value = pointers[i] + offsets[i]
                code = self._replace(tensor_map, address)
                if code:
                    raise self._failed(code, "cuTensorMapReplaceAddress", i, env)
        self._pointers = pointers

    def _describe(self, geometry: Any, env: tuple[Any, ...]) -> None:
        kept = self._kept.get(geometry)
        if kept is None:
            for i, descriptor in enumerate(self._descriptors):
                code = descriptor.encode(self._encode, env)
                if code:
                    raise self._failed(code, "cuTensorMapEncodeTiled", i, env)
            self._pointers = self._pointers_of(env)
            self._offsets = tuple(descriptor.offset_bytes for descriptor in self._descriptors)
            kept_bytes = bytes(self._memory.view[: self._kept_bytes])
            self._kept[geometry] = kept_bytes, self._pointers, self._offsets
            if len(self._kept) > _KEPT_GEOMETRIES:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(geometry)
            self._memory.view[: self._kept_bytes], self._pointers, self._offsets = kept
        self._geometry = geometry

    def _failed(self, code: int, function: str, index: int, env: tuple[Any, ...]) -> LaunchFailed:
        """The error; some maps are new and some old now, so the next call encodes or copies them all."""
        self._geometry = None
        doing = f"{self._name}: describing {self._descriptors[index].describe(env)}"
        return _failure(self._driver, code, function, doing)


@cache
def _workspaces(device_index: int) -> Workspaces:
    """The one set of workspaces of a GPU in this process."""
    return Workspaces(device_index)


class Kernel:
    """A kernel loaded on one GPU.

    Args:
        artifact: the compiled kernel.
        device_index: the GPU, as torch and the CUDA runtime count them.
        on: the driver to use; the process's own by default.

    Attributes:
        registers: of one thread, as the driver says.
        local_bytes: local memory of one thread: spills and local arrays.

    Raises:
        LaunchFailed: the driver refused the cubin, or the cubin takes other parameters than its ABI says.

    The module stays loaded until `unload`: a captured CUDA graph may hold the kernel longer than anyone
    holds this object.
    """

    __slots__ = (
        "_args",
        "_args_at",
        "_batch",
        "_blocks",
        "_config_address",
        "_context",
        "_current",
        "_current_ref",
        "_driver",
        "_function",
        "_get_current",
        "_grid_x",
        "_heads",
        "_kernel_launch",
        "_launch_args",
        "_lock",
        "_maps",
        "_memory",
        "_module",
        "_multiprocessors",
        "_pack",
        "_params_address",
        "_rows",
        "_stream",
        "_workspace",
        "artifact",
        "device_index",
        "local_bytes",
        "registers",
    )

    def __init__(self, artifact: Artifact, device_index: int = 0, *, on: Driver | None = None) -> None:
        self.artifact = artifact
        self.device_index = device_index
        self._driver = on or driver()
        self._lock = threading.Lock()
        self._prepare_call()
        self._load()

    # Loading

    def _load(self) -> None:
        """Loads the module and finds the kernel in it."""
        call, name = self._driver.call, self.artifact.name
        self._context = self._driver.primary_context(self.device_index)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._launch_args = (self._config_address, self._function, self._params_address, None)
        module, function = ctypes.byref(self._module), ctypes.byref(self._function)
        with self._driver.on_device(self.device_index):
            call("cuModuleLoadData", module, self.artifact.cubin, doing=self._loading())
            try:
                doing = f"finding {name} in its cubin"
                call("cuModuleGetFunction", function, self._module, name.encode(), doing=doing)
                self._examine(self._function)
            except LaunchFailed:
                self._driver.try_call("cuModuleUnload", self._module)
                raise

    def _examine(self, function: ctypes.c_void_p) -> None:
        """Checks the kernel's parameters, lets it have its shared memory, and reads what it uses."""
        shared = self.artifact.shared_bytes
        self._check_parameters(function)
        if shared > 48 * KIB:
            doing = f"{self.artifact.name}: asking for {shared} B of shared memory a block"
            self._driver.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, shared, doing=doing)
            self._driver.call("cuFuncSetCacheConfig", function, PREFER_SHARED, doing=doing)
        self.registers = self._driver.function_attribute(function, NUM_REGS)
        self.local_bytes = self._driver.function_attribute(function, LOCAL_SIZE_BYTES)

    def _loading(self) -> str:
        index, arch = self.device_index, self.artifact.arch
        major, minor = (self._driver.device_attribute(index, a) for a in (CAPABILITY_MAJOR, CAPABILITY_MINOR))
        return (
            f"loading {self.artifact.name}, compiled for sm_{arch}, "
            f"on GPU {index} ({self._driver.device_name(index)}, sm_{major}{minor})"
        )

    def _check_parameters(self, function: ctypes.c_void_p) -> None:
        """Compares the cubin's own parameter list with the ABI: a mismatch would pass garbage."""
        if not self._driver.has("cuFuncGetParamInfo"):
            return
        expected = parameter_sizes(self.artifact)
        found: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        for index in range(len(expected) + 1):
            where = ctypes.byref(offset), ctypes.byref(size)
            code = self._driver.try_call("cuFuncGetParamInfo", function, index, *where)
            if code == INVALID_VALUE:
                break
            if code:
                raise self._driver.failure(
                    code, "cuFuncGetParamInfo", f"reading {self.artifact.name}'s parameters"
                )
            found.append(size.value)
        if tuple(found) != expected:
            raise LaunchFailed(
                f"{self.artifact.name} takes parameters of {found} B, but its ABI describes "
                f"{list(expected)} B: triton {self.artifact.triton} passes arguments in another way. "
                "Compile the kernel again with a supported triton"
            )

    def unload(self) -> None:
        """Unloads the module. Nothing may run it any more, no captured CUDA graph either."""
        with self._lock, self._driver.on_device(self.device_index):
            if self._module.value is not None:
                doing = f"unloading {self.artifact.name}"
                module, self._module.value = self._module.value, None
                self._function.value = None  # a launch from here on is refused by the driver
                self._driver.call("cuModuleUnload", module, doing=doing)

    # Calling

    def _prepare_call(self) -> None:
        """Lays out the kernel's memory and looks up where each value comes from.

        In order: tensor maps, their extents and strides, a slot for every other argument, scratch
        pointers, the launch configuration, and the table of the parameters' addresses.
        """
        artifact = self.artifact
        entry = {name: i for i, name in enumerate((*artifact.abi.environment, WORKSPACE))}
        passed = _passed(artifact)
        described = [arg for arg in passed if arg.is_descriptor]
        plain = [arg for arg in passed if not arg.is_descriptor]
        shapes_at = TENSOR_MAP_BYTES * len(described)
        self._args_at = shapes_at + _SHAPE_BYTES * len(described)
        scratch_at = self._args_at + 8 * len(plain)
        config_at = -(-(scratch_at + _SCRATCH_BYTES) // 16) * 16
        params_at = -(-(config_at + _CONFIG_BYTES) // 16) * 16
        self._memory = memory = _Memory(params_at + 8 * len(parameter_sizes(artifact)))

        descriptors: list[_Descriptor] = []
        params: list[int] = []
        for arg in passed:
            if arg.is_descriptor:
                i = len(descriptors)
                map_at, shape_at = TENSOR_MAP_BYTES * i, shapes_at + _SHAPE_BYTES * i
                facts = artifact.descriptors[i]
                descriptors.append(_Descriptor(arg, facts, entry, memory, map_at, shape_at))
                params.append(map_at)
                params += [shape_at + 4 * axis for axis in range(_RANK)]
                params += [shape_at + 4 * _RANK + 8 * axis for axis in range(_RANK)]
            else:
                params.append(self._args_at + 8 * plain.index(arg))
        params += [scratch_at, scratch_at + 8]
        addresses = [memory.address + at for at in params]
        struct.pack_into(f"={len(addresses)}Q", memory.view, params_at, *addresses)
        threads = 32 * artifact.num_warps
        struct.pack_into("=7I", memory.view, config_at, 0, 1, 1, threads, 1, 1, artifact.shared_bytes)

        config = memory.view[config_at : config_at + _CONFIG_BYTES]
        self._grid_x, self._stream = config.cast("I"), config.cast("Q")
        self._pack = struct.Struct("=" + "".join(_slot(arg)[0] for arg in plain)).pack_into
        self._args = _picker([entry[arg.source] for arg in plain])
        self._maps = (
            _TensorMaps(self._driver, artifact.name, descriptors, memory, self._args_at)
            if descriptors
            else None
        )
        takes_workspace = any(arg.source == WORKSPACE for arg in passed)
        self._workspace = _workspaces(self.device_index).address if takes_workspace else None
        self._blocks = artifact.abi.grid.blocks
        self._multiprocessors = self._driver.device_attribute(self.device_index, SM_COUNT)
        sizes = GRID_RULES[artifact.abi.grid.rule]
        self._batch, self._heads, self._rows = (entry[name] for name in sizes)
        self._kernel_launch = self._driver.raw("cuLaunchKernelEx")
        self._get_current = self._driver.raw("cuCtxGetCurrent")
        self._current = ctypes.c_void_p()
        self._current_ref = ctypes.byref(self._current)
        self._config_address = ctypes.c_void_p(memory.address + config_at)
        self._params_address = ctypes.c_void_p(memory.address + params_at)

    def launch(self, env: tuple[Any, ...], stream: int) -> None:
        """Enqueues the kernel; does not wait, allocate or synchronise, and works inside a graph capture.

        Args:
            env: the call environment in the order of `artifact.abi.environment`, with addresses on this
                kernel's GPU. The values must keep what the ABI's facts promise: the dispatcher sees to it.
            stream: handle of a CUDA stream of this kernel's GPU; 0 is its default stream.

        Raises:
            InvalidArgument: a value does not fit its argument, or the grid no GPU; nothing was launched.
            LaunchFailed: the driver refused; `code` says how.

        Safe to call from several threads. The GPU need not be the current one.
        """
        blocks = self._blocks(env[self._batch], env[self._heads], env[self._rows], self._multiprocessors)
        if not 0 < blocks <= MAX_BLOCKS:
            if blocks == 0:
                return
            raise InvalidArgument(
                f"{self.artifact.name}: a grid of {blocks} blocks; a GPU takes {MAX_BLOCKS}"
            )
        if self._workspace is not None:
            env = (*env, self._workspace(stream))
        with self._lock:
            try:
                self._pack(self._memory.view, self._args_at, *self._args(env))
            except (struct.error, OverflowError) as error:
                raise self._misfit(env, error) from error
            self._grid_x[_GRID_X] = blocks
            self._stream[_STREAM] = stream
            self._get_current(self._current_ref)
            if self._current.value == self._context:
                if self._maps is not None:
                    self._maps.update(env)
                code = self._kernel_launch(*self._launch_args)
            else:
                # Another GPU is current, or none (a new thread): 0.2 us to notice, and rare.
                with self._driver.on_device(self.device_index):
                    if self._maps is not None:
                        self._maps.update(env)
                    code = self._kernel_launch(*self._launch_args)
        if code:
            raise _failure(self._driver, code, "cuLaunchKernelEx", self._launching(blocks))

    def _launching(self, blocks: int) -> str:
        artifact = self.artifact
        return (
            f"launching {artifact.name} on GPU {self.device_index} with {blocks} blocks of "
            f"{32 * artifact.num_warps} threads and {artifact.shared_bytes} B of shared memory"
        )

    def _misfit(self, env: tuple[Any, ...], error: Exception) -> InvalidArgument:
        """Which value did not fit."""
        values = dict(zip((*self.artifact.abi.environment, WORKSPACE), env, strict=False))
        for arg in _passed(self.artifact):
            if arg.is_descriptor:
                continue
            try:
                struct.pack("=" + _slot(arg)[0], values[arg.source])
            except (struct.error, OverflowError):
                return InvalidArgument(
                    f"{self.artifact.name}: {arg.source}={values[arg.source]!r} does not fit its argument "
                    f"{arg.name} of type {arg.type}; a call with such strides needs a kernel for wide offsets"
                )
        return InvalidArgument(f"{self.artifact.name}: {error}")


class Chain:
    """The kernels of one call, launched one after another on its stream, and the buffers that they share.

    Args:
        artifact: the main kernel with its parts.
        device_index: the GPU, as torch and the CUDA runtime count them.
        on: the driver to use; the process's own by default.
    """

    def __init__(self, artifact: Artifact, device_index: int = 0, *, on: Driver | None = None) -> None:
        self.artifact = artifact
        self.main = Kernel(artifact, device_index, on=on)
        self._before = [Kernel(part, device_index, on=on) for part in artifact.before]
        self._after = [Kernel(part, device_index, on=on) for part in artifact.after]
        self._kernels = (*self._before, self.main, *self._after)
        entry = {name: i for i, name in enumerate(artifact.abi.environment)}
        self._buffers = [_Buffer(buffer, entry) for buffer in artifact.scratch]
        self._given = len(entry) - sum(len(buffer.names) for buffer in artifact.scratch)
        self._allocate = partial(scratch_memory, device_index)

    @property
    def registers(self) -> int:
        """Of the main kernel; see `Kernel`."""
        return self.main.registers

    @property
    def local_bytes(self) -> int:
        """Of the main kernel; see `Kernel`."""
        return self.main.local_bytes

    def launch(self, env: tuple[Any, ...], stream: int) -> None:
        """Enqueues all kernels; see `Kernel.launch`. The stream is torch's current one.

        The buffers go back to torch's allocator as soon as the kernels are enqueued: what takes their place
        on this stream is written after them.
        """
        sized = [buffer.laid_out(env) for buffer in self._buffers]
        memory = self._allocate(sum(size for size, _ in sized))
        address, given = memory.data_ptr(), env[: self._given]
        for size, layout in sized:
            given += (address, *layout)
            address += size
        for kernel in self._kernels:
            kernel.launch(given, stream)

    def unload(self) -> None:
        """Unloads all modules; see `Kernel.unload`."""
        for kernel in self._kernels:
            kernel.unload()


class _Buffer:
    """A scratch buffer: from a call's sizes to its bytes, strides and extents."""

    def __init__(self, buffer: Scratch, entry: dict[str, int]) -> None:
        self._axes = [(entry[each.size] if each.size else None, each) for each in buffer.extents]
        self._element = ELEMENT_BYTES[buffer.dtype]
        self._sequences = entry["sequences"] if any(each.packed for each in buffer.extents) else None

    def laid_out(self, env: tuple[Any, ...]) -> tuple[int, tuple[int, ...]]:
        """Bytes, a multiple of `_BUFFER_ALIGNMENT`, then four strides and four extents."""
        sequences = 0 if self._sequences is None else env[self._sequences]
        batch, heads, rows, dims = (
            each.of(1 if at is None else env[at], sequences) for at, each in self._axes
        )
        size = batch * heads * rows * dims * self._element
        strides = (heads * rows * dims, rows * dims, dims, 1)
        return -(-size // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT, (*strides, batch, heads, rows, dims)


def load_kernel(artifact: Artifact, device_index: int = 0, *, on: Driver | None = None) -> Kernel | Chain:
    """What serves the calls of an artifact on a GPU; arguments and errors as for `Kernel`."""
    return (Chain if artifact.parts else Kernel)(artifact, device_index, on=on)
