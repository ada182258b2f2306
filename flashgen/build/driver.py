"""The few functions of the CUDA driver that FlashGen calls, bound with ctypes.

No compiler, no CUDA toolkit and no triton: libcuda.so.1 comes with the GPU's driver. It is opened at
the first use, so this module imports anywhere. Every return code is checked; a failure names the
error and what was attempted.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from flashgen.errors import LaunchFailed

LIBRARY = "libcuda.so.1"

# CUdevice_attribute
SM_COUNT = 16
MEMORY_CLOCK_KHZ = 36
MEMORY_BUS_BITS = 37
L2_BYTES = 38
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76
SHARED_PER_BLOCK_OPTIN = 97

# CUfunction_attribute
LOCAL_SIZE_BYTES = 3
NUM_REGS = 4
MAX_DYNAMIC_SHARED_BYTES = 8

PREFER_SHARED = 1  # CUfunc_cache
INVALID_VALUE = 1  # CUresult

TENSOR_MAP_BYTES = 128

# Each function's arguments: P a pointer or handle, i 32 bits, z a size_t. All release the GIL while they run:
# a launch blocks when the GPU's queue is full, and what it waits for may need Python.
_SIGNATURES = {
    "cuInit": "i",
    "cuDriverGetVersion": "P",
    "cuDeviceGetCount": "P",
    "cuDeviceGet": "Pi",
    "cuDeviceGetName": "Pii",
    "cuDeviceGetAttribute": "Pii",
    "cuDevicePrimaryCtxRetain": "Pi",
    "cuCtxGetCurrent": "P",
    "cuCtxPushCurrent_v2": "P",
    "cuCtxPopCurrent_v2": "P",
    "cuModuleLoadData": "PP",
    "cuModuleUnload": "P",
    "cuModuleGetFunction": "PPP",
    "cuFuncGetAttribute": "PiP",
    "cuFuncSetAttribute": "Pii",
    "cuFuncSetCacheConfig": "Pi",
    "cuLaunchKernelEx": "PPPP",
    "cuTensorMapEncodeTiled": "PiiPPPPPiiii",
    "cuTensorMapReplaceAddress": "PP",
    "cuGetErrorName": "iP",
    "cuGetErrorString": "iP",
}
# Absent from drivers older than CUDA 12.4; then the check it serves is left out.
_OPTIONAL = {"cuFuncGetParamInfo": "PzPP"}
_CTYPES = {"P": ctypes.c_void_p, "i": ctypes.c_int, "z": ctypes.c_size_t}


class Driver:
    """An opened and initialised CUDA driver.

    Args:
        library: file name or path of libcuda.

    Raises:
        LaunchFailed: the library is not there, lacks a function, or finds no GPU.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise LaunchFailed(
                f"the CUDA driver cannot be opened ({error}): is an NVIDIA driver installed?"
            ) from error
        self._functions: dict[str, Any] = {}
        for name, signature in {**_SIGNATURES, **_OPTIONAL}.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                if name in _OPTIONAL:
                    continue
                raise LaunchFailed(
                    f"the installed CUDA driver has no {name}; FlashGen needs a driver of CUDA 12.0 or newer"
                ) from None
            function.argtypes = [_CTYPES[kind] for kind in signature]
            function.restype = ctypes.c_int
            self._functions[name] = function
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        self.call("cuInit", 0, doing="initialising the CUDA driver")

    def raw(self, name: str) -> Callable[..., int]:
        """A function without conversion of arguments, for the hot path; the answer is the CUresult.

        Pass prepared ctypes objects. With `argtypes` the same call takes three times as long.
        """
        function: Callable[..., int] = self._library[name]  # an object of its own, without argtypes
        return function

    def has(self, name: str) -> bool:
        """Whether the installed driver has an optional function."""
        return name in self._functions

    def call(self, name: str, *args: Any, doing: str) -> None:
        """Calls a function and raises `LaunchFailed` unless it succeeds; `doing` says what failed."""
        code = self._functions[name](*args)
        if code:
            raise self.failure(code, name, doing)

    def try_call(self, name: str, *args: Any) -> int:
        """Calls a function and returns its CUresult."""
        code: int = self._functions[name](*args)
        return code

    def failure(self, code: int, name: str, doing: str) -> LaunchFailed:
        """The error for a CUresult, naming it."""
        label, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._functions["cuGetErrorName"](code, ctypes.byref(label))
        self._functions["cuGetErrorString"](code, ctypes.byref(text))
        label_text = (label.value or b"unknown CUDA error").decode()
        return LaunchFailed(f"{doing}: {name} gave {label_text} ({code}), {(text.value or b'').decode()}")

    def version(self) -> str:
        """The newest CUDA version the driver serves, `12.8`."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number), doing="asking for the driver's version")
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def device_count(self) -> int:
        """How many GPUs this process may use."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count), doing="counting the GPUs")
        return count.value

    def _device(self, index: int) -> int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index, doing=f"opening GPU {index}")
        return device.value

    def device_name(self, index: int) -> str:
        """The product name of a GPU."""
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self._device(index), doing=f"asking GPU {index} for its name")
        return name.value.decode()

    def device_attribute(self, index: int, attribute: int) -> int:
        """A CUdevice_attribute of a GPU."""
        value = ctypes.c_int()
        doing = f"asking GPU {index} for attribute {attribute}"
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device(index), doing=doing)
        return value.value

    def primary_context(self, index: int) -> int:
        """The context that torch and the CUDA runtime use on a GPU; created at the first call, then kept."""
        with self._lock:
            if index not in self._contexts:
                context = ctypes.c_void_p()
                device = self._device(index)
                doing = f"creating the context of GPU {index}"
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device, doing=doing)
                assert context.value is not None
                self._contexts[index] = context.value
            return self._contexts[index]

    @contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        """Makes a GPU's primary context current for the calling thread, and restores the former one."""
        context = self.primary_context(index)
        self.call("cuCtxPushCurrent_v2", context, doing=f"switching to GPU {index}")
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()), doing=f"leaving GPU {index}")

    def function_attribute(self, function: ctypes.c_void_p, attribute: int) -> int:
        """A CUfunction_attribute of a loaded kernel."""
        value = ctypes.c_int()
        doing = f"asking a kernel for attribute {attribute}"
        self.call("cuFuncGetAttribute", ctypes.byref(value), attribute, function, doing=doing)
        return value.value


@lru_cache(maxsize=1)
def driver() -> Driver:
    """The process's driver, opened at the first call; a failure is not remembered."""
    return Driver()
