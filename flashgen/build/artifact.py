"""Artifact: one compiled kernel with everything a launch needs to know about it.

Imports nothing but the standard library (through `codegen.abi`), so that a bundle can be read and
launched where triton, jinja2 and sqlalchemy are absent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.abi import Abi, DescriptorFacts, Scratch
from flashgen.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Artifact:
    """A cubin, how it is called, and what it uses; with it the kernels that run before and after it.

    None takes Triton's scratch memory or runs in thread-block clusters: the compile step refuses a
    kernel that would need either.
    """

    name: str
    """The kernel's entry in the cubin."""
    cubin: bytes
    abi: Abi
    num_warps: int
    """Of a block as it runs: a warp-specialised kernel has more than its ABI asked for."""
    shared_bytes: int
    """Dynamic shared memory of one block."""
    registers: int
    """Of one thread."""
    spill_bytes: int
    """Local memory of one thread that spilled registers take."""
    descriptors: tuple[DescriptorFacts, ...]
    """One for each descriptor argument of the ABI, in order."""
    triton: str
    """Version of the compiler."""
    arch: int
    """Compute capability it was compiled for: 90 is sm_90."""
    ptx: str = ""
    """To read; empty where only the cubin was kept."""
    before: tuple[Artifact, ...] = ()
    after: tuple[Artifact, ...] = ()
    scratch: tuple[Scratch, ...] = ()
    """Buffers of a call that all of these share."""

    def __post_init__(self) -> None:
        if any(part.parts for part in self.parts):
            raise InvalidArgument(f"a part of kernel {self.name} has parts of its own")
        wanted = sum(arg.is_descriptor for arg in self.abi.args)
        if len(self.descriptors) != wanted:
            raise InvalidArgument(
                f"kernel {self.name} has {wanted} descriptor arguments, "
                f"but {len(self.descriptors)} descriptor layouts were given"
            )
        if not self.cubin:
            raise InvalidArgument(f"kernel {self.name} has an empty cubin")

    @property
    def parts(self) -> tuple[Artifact, ...]:
        """The other kernels of a call, in the order they run."""
        return (*self.before, *self.after)

    @property
    def cubin_sha256(self) -> str:
        """Hex digest of the cubin."""
        return hashlib.sha256(self.cubin).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """All but the cubins, which are named by their hash, and the PTX: files beside it."""
        return {
            "name": self.name,
            "cubin_sha256": self.cubin_sha256,
            "abi": self.abi.to_json(),
            "num_warps": self.num_warps,
            "shared_bytes": self.shared_bytes,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "descriptors": [
                {
                    "swizzle": facts.swizzle,
                    "elem_size": facts.elem_size,
                    "elem_type": facts.elem_type,
                    "block": list(facts.block),
                }
                for facts in self.descriptors
            ],
            "triton": self.triton,
            "arch": self.arch,
            **({"before": [part.to_json() for part in self.before]} if self.before else {}),
            **({"after": [part.to_json() for part in self.after]} if self.after else {}),
            **({"scratch": [buffer.to_json() for buffer in self.scratch]} if self.scratch else {}),
        }

    @classmethod
    def from_json(
        cls, data: dict[str, Any], cubin: bytes, ptx: str = "", parts: Mapping[str, bytes] | None = None
    ) -> Artifact:
        """The inverse of `to_json`; `InvalidArgument` when a cubin is not the one that was described.

        Args:
            parts: the cubins of its parts, by their names.
        """
        found = hashlib.sha256(cubin).hexdigest()
        if found != data["cubin_sha256"]:
            raise InvalidArgument(
                f"the cubin given for kernel {data['name']} has sha256 {found}, "
                f"expected {data['cubin_sha256']}"
            )
        fields = {name: value for name, value in data.items() if name != "cubin_sha256"}
        fields["abi"] = Abi.from_json(data["abi"])
        for when in ("before", "after"):
            fields[when] = tuple(
                cls.from_json(part, (parts or {}).get(part["name"], b"")) for part in data.get(when, ())
            )
        fields["scratch"] = tuple(map(Scratch.from_json, data.get("scratch", ())))
        fields["descriptors"] = tuple(
            DescriptorFacts(**(facts | {"block": tuple(facts["block"])})) for facts in data["descriptors"]
        )
        return cls(cubin=cubin, ptx=ptx, **fields)
