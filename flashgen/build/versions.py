"""Versions of what kernels are compiled and run with, found without importing or starting any of it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

KERNEL_MODULE = Path("/sys/module/nvidia/version")
"""Where Linux says the version of the NVIDIA driver; a container may not show it."""

MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"  # NVML: comes with the driver, as libcuda does


@lru_cache(maxsize=1)
def triton_version() -> str:
    """The installed triton's version."""
    from importlib.metadata import version

    return version("triton")


def driver_version() -> str:
    """Version of the NVIDIA driver, `580.159.04`; where that cannot be asked, the CUDA version it serves.

    Raises:
        LaunchFailed: there is no driver.
    """
    with suppress(OSError):
        return KERNEL_MODULE.read_text().strip()
    text = ctypes.create_string_buffer(96)
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(MANAGEMENT_LIBRARY)
        if not nvml.nvmlInit_v2():  # which looks at every GPU of the machine
            nvml.nvmlSystemGetDriverVersion(text, len(text))
            nvml.nvmlShutdown()
    if text.value:
        return text.value.decode()
    from flashgen.build.driver import driver

    return f"CUDA {driver().version()}"
