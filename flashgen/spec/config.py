"""Config: the values of a family's tunables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.errors import InvalidArgument
from flashgen.spec.form import shown

Value = int | str

# How a tunable is written in a config's short name; a text value stands for itself.
SHORT_NAMES = {
    "block_m": "m",
    "block_n": "n",
    "num_warps": "w",
    "num_stages": "s",
    "loads": "",
    "order": "",
    "consumers": "c",
    "programs": "x",
    "group": "g",
    "pack": "p",
    "rescale": "",
    "row_max": "",
    "row_sum": "",
    "schedule": "",
    "operands": "",
    "splits": "k",
    "form": "",
    "dq_by": "",
}

OPTIONAL: dict[str, Value] = {"splits": 1, "form": "split", "dq_by": "consumers"}
"""Tunables that a config leaves out where they have this value: what was named, recorded and rendered before
one existed stays as it was."""


@dataclass(frozen=True, slots=True)
class Config:
    """One point of a family's search space: (tunable, value) pairs in the family's order, without those of
    `OPTIONAL` that have the value there.
    """

    family: str
    values: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        for name, value in self.values:
            if name not in SHORT_NAMES:
                raise InvalidArgument(f"{shown(name)} is no tunable; known: {', '.join(SHORT_NAMES)}")
            if not isinstance(value, (int, str)):
                raise InvalidArgument(f"tunable {name}={shown(value)} must be an int or a text")
            if name.startswith("block_") and (
                not isinstance(value, int) or value < 16 or value & (value - 1)
            ):
                raise InvalidArgument(f"{name}={value} must be a power of two of at least 16")

    def __getitem__(self, name: str) -> Value:
        for key, value in self.values:
            if key == name:
                return value
        if name in OPTIONAL:
            return OPTIONAL[name]
        raise KeyError(f"config {self.name} of {self.family} has no tunable {name!r}")

    def number(self, name: str) -> int:
        """The value of a tunable that is a number."""
        value = self[name]
        assert isinstance(value, int), f"{name}={value!r} is not a number"
        return value

    @property
    def name(self) -> str:
        """Short and readable, unique within the family: `m128n64w4s3_tma_heads`."""
        numbers = "".join(f"{SHORT_NAMES[k]}{v}" for k, v in self.values if isinstance(v, int))
        return "_".join([numbers, *(v for _, v in self.values if isinstance(v, str))])

    def describe(self) -> str:
        """What `name` abbreviates: `block_m 128, block_n 64, num_warps 4, ...`."""
        return ", ".join(f"{name} {value}" for name, value in self.values)

    def to_json(self) -> dict[str, Value]:
        """The tunables alone, by name, as `values` has them."""
        return dict(self.values)

    @classmethod
    def from_json(cls, family: str, data: dict[str, Value]) -> Config:
        """The inverse of `to_json`; the family says whether the config is one of its own."""
        return cls(family, tuple(data.items()))


def tunables_of(configs: Iterable[Config]) -> tuple[str, ...]:
    """Names of all tunables that any of these configs writes out, in the order in which they first occur."""
    return tuple(dict.fromkeys(name for config in configs for name, _ in config.values))
