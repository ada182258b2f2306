"""A stand-in for the CUDA driver, compiled from `fake_cuda.c`, for tests of the launch path without a GPU.

Only the driver is replaced: everything of FlashGen runs, through real ctypes calls and real memory.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

from flashgen.build.artifact import Artifact
from flashgen.build.driver import Driver
from flashgen.build.launch import parameter_sizes

SOURCE = Path(__file__).with_name("fake_cuda.c")

# What a live H200 reports: CUdevice_attribute -> value.
H200 = {16: 132, 36: 3_201_000, 37: 6144, 38: 60 << 20, 75: 9, 76: 0, 97: 227 << 10}


def compiler() -> str | None:
    """The C compiler that can build the stand-in."""
    return shutil.which("gcc") or shutil.which("cc")


def build(folder: Path) -> Path:
    """Compiles the stand-in into `folder` and returns the library's path."""
    library = folder / "libfakecuda.so"
    command = [compiler() or "cc", "-O2", "-shared", "-fPIC", "-w", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


class FakeCuda:
    """The stand-in with its knobs, and a `Driver` opened on it."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.lib.fake_get_current.restype = ctypes.c_void_p
        self.lib.fake_reset()
        self.set_attributes(H200)
        self.set("fake_devices", 2)
        self.lib.fake_set_current(0)
        self.driver = Driver(str(library))

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.lib, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.lib, name).value = value

    def set_name(self, name: str) -> None:
        (ctypes.c_char * 64).in_dll(self.lib, "fake_name").value = name.encode()

    def set_attributes(self, values: dict[int, int]) -> None:
        array = (ctypes.c_int * 128).in_dll(self.lib, "fake_attribute")
        for attribute, value in values.items():
            array[attribute] = value

    def function_attribute(self, attribute: int) -> int:
        return int((ctypes.c_int * 16).in_dll(self.lib, "fake_function_attribute")[attribute])

    def expect(self, sizes: tuple[int, ...]) -> None:
        """Says what parameters the kernel in the 'cubin' declares."""
        array = (ctypes.c_size_t * 128).in_dll(self.lib, "fake_param_size")
        array[: len(sizes)] = sizes
        self.set("fake_param_count", len(sizes))
        self.sizes = sizes

    def expect_kernel(self, artifact: Artifact) -> None:
        self.expect(parameter_sizes(artifact))

    def params(self) -> list[bytes]:
        """The bytes of each parameter of the last launch."""
        raw = bytes((ctypes.c_ubyte * 8192).in_dll(self.lib, "fake_params"))
        out, at = [], 0
        for size in self.sizes:
            out.append(raw[at : at + size])
            at += size
        return out

    def config(self) -> dict[str, Any]:
        """The launch configuration of the last launch."""
        raw = bytes((ctypes.c_ubyte * 56).in_dll(self.lib, "fake_config"))
        words = struct.unpack_from("=7I4xQQI", raw)
        return {
            "grid": words[:3],
            "block": words[3:6],
            "shared": words[6],
            "stream": words[7],
            "attrs": words[9],
        }

    def launch_context(self) -> int:
        return ctypes.c_void_p.in_dll(self.lib, "fake_launch_context").value or 0


def tensor_map(raw: bytes) -> dict[str, Any]:
    """What the stand-in's encoder kept in a 128-byte map; innermost axis first, strides in bytes."""
    words = struct.unpack("=16Q", raw)
    return {
        "address": words[0],
        "rank": words[1] & 255,
        "type": words[1] >> 8 & 255,
        "swizzle": words[1] >> 16,
        "dims": words[2:6],
        "strides": words[6:9],
        "box": words[9:13],
    }
