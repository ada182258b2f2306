"""What torch's own settings do to arithmetic: autocast, and how float32 is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_KEPT = (torch.float64, torch.float8_e4m3fn)
autocasting: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device: all that a call asks while it is off, in 0.1 us."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast rounds the inputs of attention to on this kind of device; None where it is off."""
    if not autocasting() or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocasted(*given: Any) -> tuple[Any, ...]:
    """Tensors as autocast hands them to torch's attention; float64, 8 bits (which mean nothing without their
    factors), and what is no float tensor, as it is.
    """
    return tuple(map(_autocasted, given))


def _autocasted(given: Any) -> Any:
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.dtype in _KEPT:
        return given
    dtype = autocast_dtype(given.device.type)
    return given if dtype is None else given.to(dtype)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """For arithmetic that chooses its own precision."""
    if autocast_dtype(device_type) is None:
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product in the inputs' own precision, whatever the process allows for float32.

    That setting is the process's, and other threads multiply too, so it is only read: where it would round
    the inputs, they are multiplied in float64.
    """
    backends: Any = torch.backends
    setting = (backends.cuda if a.is_cuda else backends.mkldnn).matmul.fp32_precision
    if a.dtype != torch.float32 or setting in ("none", "ieee"):
        return a @ b
    return (a.double() @ b.double()).to(a.dtype)
