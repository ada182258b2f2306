"""How a kernel is called, as data: the same rows serve compile, interpreter, dispatcher, tuner and bundle.

A call is flattened once into a tuple of values, the *call environment*, in an order that depends on
the kernel's parameters and operands alone (`environment_names`). Each kernel argument names the entry
it takes, so a launcher is an index table: no kernel has launch code of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec.attention import DESCALES, AttentionSpec, CallFacts
from flashgen.spec.learned import Share, shares

TENSORS = ("q", "k", "v", "out")
GRADIENTS = ("dout", "dq", "dk", "dv")
"""The gradients of `TENSORS`: that of the output is given, the others are what `bwd` computes."""

AXES = ("batch", "head", "row", "dim")
"""Stride order in the environment, whatever the layout of the tensors."""

SIZES = ("batch", "heads", "kv_heads", "heads_per_kv", "q_len", "k_len", "head_dim", "head_dim_v")


GRID_RULES = {
    "row_tiles": ("batch", "heads", "q_len"),
    "row_tiles_of_a_sequence": ("batch", "heads", "q_len"),
    "persistent": ("batch", "heads", "q_len"),
    "key_tiles": ("batch", "kv_heads", "k_len"),
    "key_tiles_of_heads": ("batch", "heads", "k_len"),
    "key_tiles_of_a_sequence": ("batch", "heads", "k_len"),
    "heads": ("batch", "heads", "q_len"),
    "packed_row_tiles": ("sequences", "heads", "q_len"),
    "packed_key_tiles": ("sequences", "kv_heads", "k_len"),
    "packed_persistent": ("sequences", "heads", "q_len"),
}
"""Which sizes a grid's tiles cover: sequences, heads, and rows of each."""

PACKED = ("cu_q", "cu_k", "sequences")
"""What a call of packed sequences adds to the environment: where each begins among the queries and among the
keys (int32, one more than there are), and how many there are. To the rest of it the call is a single
sequence, of all tokens."""

DROPOUT = ("dropout.seed", "dropout.threshold", "dropout.factor")
"""What a call whose weights are dropped at random adds: an int64 on the GPU, the least int32 that is drawn
for a weight that is kept, and what kept weights are multiplied by."""

WORKSPACE = "workspace"
"""Beside the environment: zeroed int32 of the launch's device and stream, which a kernel leaves zeroed."""

ELEMENT_BYTES = {"i32": 4, "fp32": 4, "fp16": 2, "bf16": 2, "e4m3": 1}
"""Of the buffers that a call's kernels share."""

# What an entry of the environment, by its name, may be passed as; strides by `Abi.facts.wide`.
_POINTER, _DESCRIPTOR = r"\*[a-z]+\w+", r"tensordesc<[a-z]+\w+\[1,\d+,\d+,\d+\]>"
_PASSED_AS = {
    "|".join((*TENSORS, *GRADIENTS)): f"{_POINTER}|{_DESCRIPTOR}",
    r"lse|dlse|d?sinks|operand\.\w+|descale\.\w+": _POINTER,
    r"gradient\.\w+": _POINTER,
    r"scratch\.\w+": f"{_POINTER}|{_DESCRIPTOR}",
    r"scratch\.\w+\.extent\.\w+": "i32",
    "|".join((*SIZES, "sequences")): "i32",
    "cu_q|cu_k": r"\*i32",
    r"scale|v_factor|dropout\.factor": "fp32",
    r"dropout\.seed": r"\*i64",
    r"dropout\.threshold": "i32",
    r"param\.\w+": "i32|fp32",
    WORKSPACE: r"\*i32",
}
_STRIDE = r"[\w.]+\.stride\.\w+"
ALLOCATED = ("out", "lse", "dq", "dk", "dv", "dsinks", WORKSPACE)
"""By FlashGen: aligned whatever the call is."""
_RANGES = {
    "grid.block_m": (1, 1024),
    "grid.pack": (1, 64),
    "grid.programs": (1, 32),
    "grid.splits": (1, 1024),
    "extent.divisor": (1, 1 << 16),
    "extent.times": (0, 1 << 16),
    "extent.plus": (0, 1 << 16),
    "max_registers": (0, 255),
    "num_warps": (1, 32),
    "num_stages": (1, 64),
    "divisor": (1, 16),
    "offset": (0, 1024),
    "swizzle": (0, 3),
    "elem_size": (1, 8),
    "elem_type": (0, 15),
    "block": (1, 256),  # of a tensor map, along each axis
}


def _check_range(name: str, value: int) -> None:
    least, most = _RANGES[name]
    if not least <= value <= most:
        raise InvalidArgument(f"{name}={value!r} must be a whole number from {least} to {most}")


@dataclass(frozen=True, slots=True)
class Extent:
    """Length of an axis, from a size of the call: ceil(size / divisor) * times + plus; of `packed` sequences
    as many tiles as `Grid` says, size // divisor + sequences, in the place of the quotient."""

    size: str = ""
    """A name of `SIZES`; empty counts 1."""
    divisor: int = 1
    times: int = 1
    plus: int = 0
    packed: bool = False

    def __post_init__(self) -> None:
        if self.size and self.size not in SIZES:
            raise UnknownName("extent.size", self.size, SIZES)
        for name in ("divisor", "times", "plus"):
            _check_range(f"extent.{name}", getattr(self, name))

    def of(self, size: int, sequences: int = 0) -> int:
        """The length, given what `size` names and, of packed sequences, how many there are."""
        tiles = size // self.divisor + sequences if self.packed else -(-size // self.divisor)
        return tiles * self.times + self.plus

    def to_json(self) -> dict[str, Any]:
        """As in a bundle's manifest, where only `packed` may be left out."""
        named = {name: getattr(self, name) for name in Extent.__slots__}
        return named if self.packed else {name: value for name, value in named.items() if name != "packed"}


@dataclass(frozen=True, slots=True)
class Scratch:
    """A buffer of one call, contiguous, not initialised: what one of its kernels leaves for a later one."""

    name: str
    dtype: str
    """A key of `ELEMENT_BYTES`."""
    extents: tuple[Extent, Extent, Extent, Extent]
    """Along `AXES`, whatever they mean to the kernels."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", self.name):
            raise InvalidArgument(f"scratch.name={self.name!r} must be a name of small letters")
        if self.dtype not in ELEMENT_BYTES:
            raise UnknownName("scratch.dtype", self.dtype, ELEMENT_BYTES)
        if len(self.extents) != len(AXES):
            raise InvalidArgument(
                f"scratch {self.name} must have {len(AXES)} extents, not {len(self.extents)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Its entries of the environment: address, strides (elements), extents."""
        at = f"scratch.{self.name}"
        return (
            at,
            *(f"{at}.stride.{axis}" for axis in AXES),
            *(f"{at}.extent.{axis}" for axis in AXES),
        )

    def to_json(self) -> dict[str, Any]:
        """As in a bundle's manifest."""
        extents = [each.to_json() for each in self.extents]
        return {"name": self.name, "dtype": self.dtype, "extents": extents}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Scratch:
        """The inverse of `to_json`."""
        batch, head, row, dim = (Extent(**each) for each in data["extents"])
        return cls(data["name"], data["dtype"], (batch, head, row, dim))


def share_names(share: Share) -> tuple[str, ...]:
    """The environment's entries of what the reads of an operand have of its gradient."""
    name = f"gradient.{share.name}"
    axes = range(len(share.load.indices)) if share.side == "pair" else ()
    return (name, *(f"{name}.stride.{axis}" for axis in axes))


def environment_names(spec: AttentionSpec, scratch: tuple[Scratch, ...] = ()) -> tuple[str, ...]:
    """Names of the call environment's entries, in order.

    First the pointers `q k v out lse`, then four strides (elements) of q, k, v and out, then the
    sizes and the scale, then the numeric parameters (`param.left`), then for each operand its
    pointer (`operand.key_lengths`) and a stride per index (`operand.key_lengths.stride.0`). For 8-bit
    inputs follow a factor on v (those on q and k are in the scale), then for each of q, k and v the
    pointer to its factors, null for none, and their strides (`descale.q.stride.kv_head`). For packed
    sequences follow those of `PACKED`; where there are sinks, their pointer and stride; for dropout those of
    `DROPOUT`; for `bwd` the pointers of `GRADIENTS` and `dlse`, then four strides of each of the former, that
    of the sinks' gradient (`dsinks`, float32, one for each head) where it is computed, and for each share of
    what a score rule learns (`learned.shares`) the pointer of what is added up (`gradient.bias`), of an
    operand's whole gradient with a stride per index. A launch of several kernels adds the entries of each
    buffer that they share (`Scratch.names`).
    """
    names = [*TENSORS, "lse"]
    names += [f"{tensor}.stride.{axis}" for tensor in TENSORS for axis in AXES]
    names += [*SIZES, "scale"]
    rules = [rule for rule in (spec.mask, spec.score_mod) if rule is not None]
    names += [f"param.{name}" for rule in rules for name, _ in rule.params]
    for rule in rules:
        for operand in rule.operands:
            names.append(f"operand.{operand.name}")
            names += [f"operand.{operand.name}.stride.{axis}" for axis in range(operand.rank)]
    if spec.quantized:
        names.append("v_factor")
        for tensor, axes in DESCALES.items():
            names += [f"descale.{tensor}", *(f"descale.{tensor}.stride.{axis}" for axis in axes)]
    if spec.packed:
        names += PACKED
    if spec.sinks:
        names += ["sinks", "sinks.stride.head"]
    if spec.dropout:
        names += DROPOUT
    if spec.op == "bwd":
        names += [*GRADIENTS, "dlse"]
        names += [f"{tensor}.stride.{axis}" for tensor in GRADIENTS for axis in AXES]
        names += ["dsinks"] if spec.sinks else []
        # An operand's gradient is one tensor, however many reads add to it.
        names += dict.fromkeys(
            name for share in shares(spec.score_mod, spec.learned) for name in share_names(share)
        )
    return (*names, *(name for buffer in scratch for name in buffer.names))


_EXTENTS = {
    "q": ("batch", "heads", "q_len", "head_dim"),
    "k": ("batch", "kv_heads", "k_len", "head_dim"),
    "v": ("batch", "kv_heads", "k_len", "head_dim_v"),
    "out": ("batch", "heads", "q_len", "head_dim_v"),
    "dout": ("batch", "heads", "q_len", "head_dim_v"),
    "dk": ("batch", "kv_heads", "k_len", "head_dim"),
    "dv": ("batch", "kv_heads", "k_len", "head_dim_v"),
}


def extents_of(source: str) -> tuple[str, ...]:
    """Where the environment has the extents, in the order of `AXES`, of a tensor that a descriptor may
    describe."""
    return _EXTENTS.get(source) or tuple(f"{source}.extent.{axis}" for axis in AXES)


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel parameter."""

    name: str
    """Its name in the rendered function."""
    source: str
    """The entry of the call environment it takes; for a descriptor, the tensor it describes."""
    type: str
    """Triton's type text: `*bf16`, `i32`, `i64`, `fp32`, `tensordesc<bf16[1, 1, 64, 128]>`."""
    divisor: int = 1
    """What the compiler may assume the value (bytes for a pointer) to be a multiple of."""
    constant: int | None = None
    """Compiled in: the argument does not exist at the launch, and a call must have this value."""
    offset: int = 0
    """Descriptors only: elements of the innermost axis before this head-dim chunk."""

    @property
    def is_descriptor(self) -> bool:
        """Whether the argument is a TMA descriptor."""
        return self.type.startswith("tensordesc")

    @property
    def box(self) -> tuple[int, ...]:
        """Block shape of a descriptor: (1, 1, rows, dims)."""
        return tuple(int(n) for n in self.type[self.type.index("[") + 1 : self.type.index("]")].split(","))


def letter_of(tensor: str) -> str:
    """What a tensor's strides are named by: `stride_qm` is of Q's rows, `stride_dqm` of those of DQ."""
    return tensor[0].lower() if tensor.lower() in TENSORS else f"d{tensor[1].lower()}"


def tensor_arguments(tensor: str, dtype: str, packed: bool = False) -> tuple[Arg, ...]:
    """Q, K, V, OUT or a gradient as pointer and strides; packed sequences have none between them."""
    source, letter, row = tensor.lower(), letter_of(tensor), "n" if tensor[-1] in "KV" else "m"
    short = [each for each in zip(("b", "h", row, "d"), AXES, strict=True) if not (packed and each[0] == "b")]
    strides = (Arg(f"stride_{letter}{axis}", f"{source}.stride.{name}", "i32") for axis, name in short)
    return (Arg(tensor, source, f"*{dtype}"), *strides)


def sink_arguments(dtype: str) -> tuple[tuple[Arg, ...], ...]:
    """The sinks, as the kernel takes them that has a row's whole sum; a line of the signature, or none."""
    if not dtype:
        return ()
    return ((Arg("SINKS", "sinks", f"*{dtype}"), Arg("stride_sink", "sinks.stride.head", "i32")),)


def dropout_arguments(spec: AttentionSpec) -> tuple[tuple[Arg, ...], ...]:
    """What a kernel takes that drops weights at random; a line of the signature, or none."""
    if not spec.dropout:
        return ()
    types = {"SEED": "*i64", "threshold": "i32", "keep_factor": "fp32"}
    return (tuple(Arg(name, each, types[name]) for name, each in zip(types, DROPOUT, strict=True)),)


@dataclass(frozen=True, slots=True)
class Grid:
    """Launch grid: `row_tiles` is ceil(q_len / block_m) x (heads / pack) x batch programs, all on x.

    x holds 2^31 - 1 blocks where y and z hold 65,535, so batch x heads has no limit of its own. `persistent`
    is as many at most as the GPU has multiprocessors; `row_tiles_of_a_sequence` is the same for all heads
    together; `key_tiles` counts key heads and keys instead, `key_tiles_of_heads` heads and keys; `heads` is a
    program for each head, whatever it covers of the rest.

    Of packed sequences the host knows no single length. Sequence s, which begins at row c(s), has the tiles
    from c(s) // block_m + s on: as many as it needs or one more, whatever the lengths are, since c(s+1) //
    block_m - c(s) // block_m + 1 is at least ceil of its rows / block_m. So there are q_len // block_m +
    sequences of them for each head, where a tile for each block_m rows of the longest, times all sequences,
    would be many times as many for lengths that differ much; and a program finds its sequence by comparing,
    without a sum over lengths.
    """

    rule: str
    block_m: int
    pack: int = 1
    """Heads of one key head that a tile holds."""
    programs: int = 1
    """Of each multiprocessor, where the grid is persistent."""
    splits: int = 1
    """Programs that share a tile, each with a part of its keys."""

    def blocks(self, batch: int, heads: int, rows: int, multiprocessors: int) -> int:
        """Number of programs on x; heads and rows are the sizes that the rule covers."""
        if self.rule == "heads":
            return heads
        each = 1 if self.rule.endswith("_of_a_sequence") else heads // self.pack
        if self.rule.startswith("packed"):
            of_a_head = rows // self.block_m + batch
        else:
            of_a_head = -(-rows // self.block_m) * batch
        tiles = of_a_head * each * self.splits
        return tiles if not self.rule.endswith("persistent") else min(tiles, multiprocessors * self.programs)


@dataclass(frozen=True, slots=True)
class Abi:
    """Arguments in order, grid and launch options of one kernel for one kind of call."""

    environment: tuple[str, ...]
    args: tuple[Arg, ...]
    grid: Grid
    num_warps: int
    num_stages: int
    facts: CallFacts
    """The kind of call this was specialised for."""
    max_registers: int = 0
    """Of a thread at the launch; 0 leaves it to the compiler."""

    def __post_init__(self) -> None:
        if self.grid.rule not in GRID_RULES:
            raise UnknownName("grid.rule", self.grid.rule, GRID_RULES)
        _check_range("grid.block_m", self.grid.block_m)
        _check_range("grid.pack", self.grid.pack)
        _check_range("grid.programs", self.grid.programs)
        _check_range("grid.splits", self.grid.splits)
        _check_range("max_registers", self.max_registers)
        _check_range("num_warps", self.num_warps)
        _check_range("num_stages", self.num_stages)
        for arg in self.args:
            if arg.source not in (*self.environment, WORKSPACE):
                raise InvalidArgument(f"{arg.name}: source={arg.source!r} is no entry of the environment")
            self._check(arg)

    def _check(self, arg: Arg) -> None:
        """An argument is what its source is, and assumes nothing that calls of this kind do not keep."""
        is_stride = re.fullmatch(_STRIDE, arg.source)
        found = (types for names, types in _PASSED_AS.items() if re.fullmatch(names, arg.source))
        types = ("i64" if self.facts.wide else "i32") if is_stride else next(found, "")
        if not re.fullmatch(types, arg.type):
            raise InvalidArgument(f"{arg.name}: type={arg.type!r} cannot take {arg.source}; allowed: {types}")
        _check_range("divisor", arg.divisor)
        allocated = arg.source in ALLOCATED or arg.source.startswith(("scratch.", "gradient."))
        if arg.divisor > 1 and self.facts.access != "aligned" and not allocated:
            raise InvalidArgument(f"{arg.name}: divisor={arg.divisor} needs aligned calls")
        unit = arg.source.endswith(".stride.dim") and self.facts.access != "strided"
        if arg.constant is not None and not (unit and arg.constant == 1):
            raise InvalidArgument(f"{arg.name}: constant={arg.constant} is not what calls of this kind have")
        _check_range("offset", arg.offset)
        if arg.offset and not arg.is_descriptor:
            raise InvalidArgument(f"{arg.name}: offset={arg.offset} is of a descriptor alone")

    def to_json(self) -> dict[str, Any]:
        """As in a bundle's manifest."""
        return {
            "environment": list(self.environment),
            "args": [{name: getattr(arg, name) for name in Arg.__slots__} for arg in self.args],
            "grid": {name: getattr(self.grid, name) for name in Grid.__slots__},
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "max_registers": self.max_registers,
            "facts": {"access": self.facts.access, "tma": self.facts.tma, "wide": self.facts.wide},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Abi:
        """The inverse of `to_json`."""
        return cls(
            environment=tuple(data["environment"]),
            args=tuple(Arg(**arg) for arg in data["args"]),
            grid=Grid(**data["grid"]),
            num_warps=data["num_warps"],
            num_stages=data["num_stages"],
            max_registers=data["max_registers"],
            facts=CallFacts(**data["facts"]),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Another kernel of a rendered file, which runs before or after the main one on the call's stream."""

    name: str
    """Of its function."""
    before: bool
    arguments: tuple[tuple[Arg, ...], ...]
    """Of an aligned call, grouped as in the rendered signature."""
    grid: Grid
    num_warps: int = 4
    num_stages: int = 1

    @property
    def signature(self) -> list[str]:
        """Lines of parameters."""
        return [", ".join(arg.name for arg in group) for group in self.arguments]


@dataclass(frozen=True, slots=True)
class DescriptorFacts:
    """How the compiler laid a descriptor argument's tile out in shared memory (CUtensorMap terms)."""

    swizzle: int
    """CUtensorMapSwizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes."""
    elem_size: int
    """Bytes of one element."""
    elem_type: int
    """CUtensorMapDataType, the driver's numbering."""
    block: tuple[int, ...]
    """Box of one copy, outermost first; narrower than the argument's box where a swizzle spans less."""

    def __post_init__(self) -> None:
        for name in ("swizzle", "elem_size", "elem_type"):
            _check_range(name, getattr(self, name))
        if len(self.block) != len(AXES):
            raise InvalidArgument(f"block={self.block!r} must have {len(AXES)} axes")
        for extent in self.block:
            _check_range("block", extent)
