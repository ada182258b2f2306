"""The GPUs of this machine as `Target`s, read from the driver: nothing is tuned for a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from flashgen.build.driver import (
    CAPABILITY_MAJOR,
    CAPABILITY_MINOR,
    L2_BYTES,
    MEMORY_BUS_BITS,
    MEMORY_CLOCK_KHZ,
    SHARED_PER_BLOCK_OPTIN,
    SM_COUNT,
    Driver,
    driver,
)
from flashgen.errors import InvalidArgument, LaunchFailed, NoGPU
from flashgen.settings import SETTINGS
from flashgen.spec.target import TARGETS, Target, bandwidth_class, find_target

MIB = 1 << 20


def device_count() -> int:
    """How many GPUs this process may use; 0 where there is no driver."""
    try:
        return driver().device_count()
    except LaunchFailed:
        return 0


def current_target(index: int = 0) -> Target:
    """The target to tune and dispatch for: `FLASHGEN_TARGET` if set, else the live GPU `index`.

    Raises:
        NoGPU: there is none, and nothing is pretended.
        UnknownName: `FLASHGEN_TARGET` names no target.
    """
    return find_target(SETTINGS.target) if SETTINGS.target else live_target(index)


@lru_cache(maxsize=64)
def live_target(index: int = 0) -> Target:
    """The GPU `index`, as torch counts them, whatever the settings pretend.

    Raises:
        NoGPU: there is none.
        InvalidArgument: there is none of that index.
    """
    try:
        on = driver()
    except LaunchFailed as error:
        raise NoGPU(f"no GPU here: {error}") from error
    count = on.device_count()
    if not 0 <= index < count:
        raise InvalidArgument(f"GPU {index} does not exist; this process sees {count}, counted from 0")
    return read_target(on, index)


def alike_gpus(which: int | str | Sequence[int]) -> dict[int, Target]:
    """The GPUs that `which` names, by index: one, several, or `all`. They have the same facts.

    Raises:
        NoGPU: there is none.
        InvalidArgument: there is none of an index, one is named twice, or their facts differ.
    """
    if isinstance(which, str) and which != "all":
        raise InvalidArgument(f"device={which!r} names no GPU; give an index, several as (0, 2), or 'all'")
    every = range(max(device_count(), 1))  # where there is none, asking for the first says so
    indices = every if isinstance(which, str) else [which] if isinstance(which, int) else list(which)
    if not indices or len(set(indices)) < len(indices):
        raise InvalidArgument(f"device={tuple(indices)} must name at least one GPU, and each of them once")
    found = {index: live_target(index) for index in indices}
    kinds: dict[Target, list[int]] = {}
    for index, target in found.items():
        kinds.setdefault(target, []).append(index)
    if len(kinds) > 1:
        held = "; ".join(
            f"GPU {', '.join(map(str, members))} is {kind.describe()}" for kind, members in kinds.items()
        )
        instead = " or ".join(f"--gpu {','.join(map(str, members))}" for members in kinds.values())
        raise InvalidArgument(f"one run needs GPUs of one kind, these differ: {held}; use {instead}")
    return found


def read_target(on: Driver, index: int) -> Target:
    """The facts of one GPU as the driver reports them, under the table's name when a row has the same."""
    major, minor = on.device_attribute(index, CAPABILITY_MAJOR), on.device_attribute(index, CAPABILITY_MINOR)
    arch, sm_count = 10 * major + minor, on.device_attribute(index, SM_COUNT)
    clock_khz = on.device_attribute(index, MEMORY_CLOCK_KHZ)
    bus_bits = on.device_attribute(index, MEMORY_BUS_BITS)
    product = on.device_name(index)
    found = Target(
        arch=arch,
        sm_count=sm_count,
        shared_per_block=on.device_attribute(index, SHARED_PER_BLOCK_OPTIN),
        l2_mib=on.device_attribute(index, L2_BYTES) // MIB,
        bandwidth=_bandwidth(clock_khz, bus_bits, arch, sm_count),
        name=re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-"),
    )
    return next((row for row in TARGETS.values() if row == found), found)


def _bandwidth(clock_khz: int, bus_bits: int, arch: int, sm_count: int) -> int:
    """The bandwidth class: two transfers a clock.

    Some virtual GPUs report no clock. Then the most similar known card's class stands in, as a class that
    is off costs nothing but shared records.
    """
    if clock_khz and bus_bits:
        return bandwidth_class(2 * clock_khz * 1e3 * bus_bits / 8 / 1e9)
    alike = min(TARGETS.values(), key=lambda row: (abs(row.arch - arch), abs(row.sm_count - sm_count)))
    return alike.bandwidth
