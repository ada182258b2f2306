"""Target: the facts about a GPU that tuning depends on. Needs no driver; `build.device` reads a live one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flashgen.errors import UnknownName

KIB = 1024
REGISTERS = 65536
"""Of a multiprocessor, 4 bytes each; the same from sm_80 to sm_120."""


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU as the tuner sees it.

    Two cards with equal facts share their records whatever they are called: `name` is information
    and takes no part in comparison. `bandwidth` is a class, quarter powers of two of GB/s, so that
    a driver's rounding of clocks does not split one card into two.
    """

    arch: int
    """Compute capability as a number: 90 is sm_90."""
    sm_count: int
    shared_per_block: int
    """Bytes of shared memory one block can opt into."""
    l2_mib: int
    bandwidth: int
    """Class of the memory bandwidth, see `bandwidth_class`."""
    vendor: str = "cuda"
    name: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """The facts as text: the identity of the target in the database and in bundles."""
        return (
            f"{self.vendor}-sm{self.arch}-{self.sm_count}sm-{self.shared_per_block // KIB}k"
            f"-l2.{self.l2_mib}m-bw{self.bandwidth}"
        )

    @property
    def has_tma(self) -> bool:
        """Whether tensor descriptors are hardware here (Hopper and newer)."""
        return self.arch >= 90

    def describe(self) -> str:
        """Name and facts, for messages."""
        return f"{self.name or 'unnamed GPU'} ({self.key})"

    def to_json(self) -> dict[str, int | str]:
        """All facts and the name."""
        return {
            "name": self.name,
            "vendor": self.vendor,
            "arch": self.arch,
            "sm_count": self.sm_count,
            "shared_per_block": self.shared_per_block,
            "l2_mib": self.l2_mib,
            "bandwidth": self.bandwidth,
        }

    @classmethod
    def from_json(cls, data: dict[str, int | str]) -> Target:
        """The inverse of `to_json`."""
        return cls(**data)  # type: ignore[arg-type]


def bandwidth_class(gb_per_s: float) -> int:
    """The nearest quarter power of two: 4,800 GB/s is 49, 3,350 GB/s is 47."""
    return round(4 * math.log2(max(gb_per_s, 1.0)))


def _row(name: str, arch: int, sm_count: int, shared_kib: int, l2_mib: int, gb_per_s: float) -> Target:
    return Target(arch, sm_count, shared_kib * KIB, l2_mib, bandwidth_class(gb_per_s), name=name)


# Facts from the vendor's data sheets; the H200 row as a live card reports them (L2 of 60 MiB).
TARGETS = {
    t.name: t
    for t in (
        _row("nvidia-a100", 80, 108, 163, 40, 2039),
        _row("nvidia-a10", 86, 72, 99, 6, 600),
        _row("nvidia-rtx3090", 86, 82, 99, 6, 936),
        _row("nvidia-l40s", 89, 142, 99, 96, 864),
        _row("nvidia-rtx4090", 89, 128, 99, 72, 1008),
        _row("nvidia-h100-pcie", 90, 114, 227, 50, 2039),
        _row("nvidia-h100", 90, 132, 227, 50, 3350),
        _row("nvidia-h200", 90, 132, 227, 60, 4800),
        _row("nvidia-b200", 100, 148, 227, 126, 8000),
        _row("nvidia-rtx5090", 120, 170, 99, 96, 1792),
    )
}


def find_target(name: str) -> Target:
    """The table's row of that name; `UnknownName` lists the known ones."""
    try:
        return TARGETS[name]
    except (KeyError, TypeError):  # the second: what cannot be a key
        raise UnknownName("target", name, TARGETS) from None
