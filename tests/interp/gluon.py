"""A stand-in for Gluon on CPU tensors: Triton's interpreter knows none of it.

A rendered file runs as Python, its partitions as threads, over torch tensors. Values mean what they mean to
the compiler; layouts mean nothing, but a function of a thread's registers gets them as wgmma deals them out.
Barriers count arrivals and bytes and have phases, copies fill and clip as TMA does. Copies and asynchronous
products are made when they are waited for, not before, and what a copy is to fill is NaN until then: who
frees a buffer too soon, waits for too few products or for a phase that nobody ends gets wrong numbers, an
error, or a deadlock, which is told. What is not seen: fences between kinds of memory access, other layouts,
integers that overflow, and anything of time.
"""

from __future__ import annotations

import ast
import random
import re
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from flashgen.build.interpret import _allocated
from flashgen.codegen.abi import AXES, GRID_RULES, WORKSPACE, Arg, environment_names, extents_of
from flashgen.codegen.source import KernelSource
from flashgen.spec.attention import CallFacts

torch.set_num_threads(1)  # partitions are threads enough: each would start others of its own to multiply
PATIENCE_S = 60.0
SLOW: dict[str, float] = {}
"""Seconds that `arrive`, `store_wait` or a `store of partition 1` take; else now and then a moment, so that
threads meet in another order each time."""
_here = threading.local()
"""Of a thread: the program it is a part of, and its products and copies that were not waited for."""


class Differ(Exception):
    """A branch on a condition that holds in some threads (`taken`) and not in others."""

    def __init__(self, taken: torch.Tensor) -> None:
        super().__init__("a branch on a condition that is not the same everywhere")
        self.taken = taken


class Value(torch.Tensor):
    """A tensor, or a number of 0 axes, whose integers are divided as Triton does: towards zero."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        if dtype is torch.uint32:  # for which torch compares nothing: the same numbers in more bits
            return super().to(torch.int64) & 0xFFFFFFFF
        return self.view(dtype) if bitcast else super().to(dtype)

    def __bool__(self) -> bool:
        held = self.ne(0)
        if not (some := torch.any(held).item()) or torch.all(held).item():
            return bool(some)
        raise Differ(held)

    def __floordiv__(self, other: Any) -> Any:
        return torch.div(self, other, rounding_mode="trunc")

    def __mod__(self, other: Any) -> Any:
        return torch.fmod(self, other)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def value(given: Any) -> Any:
    return torch.as_tensor(given).as_subclass(Value)


class Pointer:
    """Elements of a tensor's memory."""

    def __init__(self, memory: torch.Tensor, at: Any) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def into(cls, tensor: torch.Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((size,), (1,), 0), value(tensor.storage_offset()))

    def to(self, dtype: torch.dtype) -> Any:
        return value(self.memory.data_ptr())

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.memory, self.at + steps)

    def __sub__(self, steps: Any) -> Pointer:
        return Pointer(self.memory, self.at - steps)

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        at = value(self.at)
        if mask is None:
            return value(self.memory[at])
        at, mask = torch.broadcast_tensors(at, value(mask))
        found = torch.full(at.shape, other, dtype=self.memory.dtype)
        found[mask] = self.memory[at[mask]]
        return value(found)

    def store(self, given: Any, mask: Any = None) -> None:
        at, given = torch.broadcast_tensors(value(self.at), value(given).to(self.memory.dtype))
        kept = torch.ones_like(at, dtype=torch.bool) if mask is None else value(mask).broadcast_to(at.shape)
        self.memory[at[kept]] = given[kept]

    def atomic_add(self, given: Any) -> Any:
        with _ATOMIC:
            before = self.load().clone()
            self.store(before + given)
        _dawdle("atomic_add")
        return before


_ATOMIC = threading.Lock()


class Shared:
    """A view of shared memory, full of NaN or of the greatest integer at first."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view, self.dtype, self.shape = view, view.dtype, view.shape

    def index(self, at: Any) -> Shared:
        return Shared(self.view[int(at)])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.view.view([int(each) for each in shape]))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.view.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.view.permute(order))

    def load(self, layout: Any = None) -> Any:
        return value(self.view.clone())

    def store(self, given: Any) -> None:
        assert given.shape == self.view.shape and given.dtype == self.dtype
        _dawdle(f"store of partition {_here.partition}")
        self.view.copy_(given)


class Barrier:
    """An mbarrier: a phase ends with the last arrival, once all bytes are there that were announced."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0
        self.copies: list[Any] = []
        """Into shared memory, to be made by whoever waits."""

    def copy(self) -> None:
        while self.copies:
            self.bytes -= self.copies.pop()()
        self.settle()

    def settle(self) -> None:
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if not self.missing and not self.bytes:
            self.phase, self.missing = self.phase ^ 1, self.count
            _here.program.changed.notify_all()


class Barriers(list):
    index = list.__getitem__


class Program:
    """What the partitions of a program share."""

    def __init__(self, index: int, programs: int) -> None:
        self.index, self.programs = index, programs
        self.changed = threading.Condition()
        self.copying = 0
        self.error: BaseException | None = None

    def launch(self, kernel: Any, arguments: list[Any]) -> None:
        """Runs it as this program: in a thread of its own, others may run beside it."""
        try:
            _here.program, _here.partition = self, 0
            kernel(*arguments)
        except BaseException as error:
            self.error = self.error or error

    def run(self, partitions: list[tuple[Any, tuple[Any, ...]]]) -> None:
        def partition(index: int, function: Any, arguments: tuple[Any, ...]) -> None:
            _here.program, _here.partition = self, index
            _here.pending, _here.leaving = deque(), deque()
            try:
                function(*arguments)
                waiting = (*_here.pending, *_here.leaving)
                assert not waiting, f"{function.__name__} ends with {len(waiting)} not waited for"
            except BaseException as error:
                self.error = self.error or error
                with self.changed:
                    self.changed.notify_all()

        side_by_side(partition, [(index, *each) for index, each in enumerate(partitions)])
        assert self.error or not self.copying, "tiles are copied that nobody waits for"


def side_by_side(function: Any, calls: list[tuple[Any, ...]]) -> None:
    """Each call in a thread of its own, until all have ended; a single one in this."""
    if len(calls) == 1:
        function(*calls[0])
        return
    threads = [threading.Thread(target=function, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Barring:
    """`mbarrier`."""

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = int(count)

    @staticmethod
    def expect(barrier: Barrier, count: int) -> None:
        with _here.program.changed:
            barrier.bytes += int(count)
            barrier.missing -= 1
            barrier.settle()

    @staticmethod
    def arrive(barrier: Barrier, count: int = 1) -> None:
        with _here.program.changed:
            barrier.missing -= count
            barrier.settle()
        _dawdle("arrive")

    @staticmethod
    def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
        _dawdle("wait")
        program = _here.program
        until = time.monotonic() + PATIENCE_S
        with program.changed:
            while pred and barrier.phase == int(phase):
                if barrier.copies:
                    barrier.copy()
                    continue
                if program.error is not None:
                    raise RuntimeError("another partition failed") from program.error
                assert time.monotonic() < until, f"nobody ends phase {int(phase)}"
                program.changed.wait(1.0)


BARRING = SimpleNamespace(
    MBarrierLayout=lambda: "barrier",
    **{name: getattr(Barring, name) for name in ("init", "expect", "arrive", "wait")},
)


def _dawdle(operation: str) -> None:
    if seconds := SLOW.get(operation, 1e-4 if random.random() < 0.1 else 0.0):
        time.sleep(seconds)


class Descriptor:
    """(batch, head, row, dim) of a tensor; boxes read zeros past its end, and write nothing there."""

    def __init__(self, tensor: torch.Tensor, box: tuple[int, ...]) -> None:
        self.tensor, self.box, self.dtype, self.layout = tensor, box, tensor.dtype, None

    def parts(self, at: list[Any]) -> tuple[Any, Any]:
        """The box in the tensor, and the same in a tile, as far as it exists."""
        starts = [int(each) for each in at]
        assert all(start >= 0 for start in starts)
        counts = [
            max(0, min(each, length - start))
            for start, each, length in zip(starts, self.box, self.tensor.shape, strict=True)
        ]
        inside = tuple(slice(start, start + count) for start, count in zip(starts, counts, strict=True))
        return inside, tuple(slice(0, count) for count in counts)


class PackedRows(Descriptor):
    """Of packed sequences: box (outer, head, inner, dim) begins at row outer + inner - rows of a box, and has
    as many rows less as inner is."""

    def parts(self, at: list[Any]) -> tuple[Any, Any]:
        outer, head, inner, dim = (int(each) for each in at)
        members, rows = self.box[1:3]
        start, count = outer + inner - rows, rows - inner
        length = self.tensor.shape[2]
        assert 0 <= start < start + count <= length, f"a box of rows {start} to {start + count} of {length}"
        inside, there = super().parts([0, head, start, dim])
        assert there[1] == slice(0, members)
        return (*inside[:2], slice(start, start + count), inside[3]), (*there[:2], slice(0, count), there[3])


class Copying:
    """`tma`."""

    @staticmethod
    def async_copy_global_to_shared(
        source: Descriptor, at: list[Any], barrier: Barrier, tile: Shared
    ) -> None:
        """The tile is NaN from here on, until somebody waits for the barrier."""
        assert tuple(tile.shape) == source.box
        inside, there = source.parts(at)
        tile.view.copy_(torch.tensor(torch.nan))

        def copied() -> int:
            tile.view.zero_()
            tile.view[there] = source.tensor[inside]
            _here.program.copying -= 1
            return tile.view.numel() * tile.view.element_size()

        with _here.program.changed:
            barrier.copies.append(copied)
            _here.program.copying += 1
            _here.program.changed.notify_all()

    @staticmethod
    def async_copy_shared_to_global(target: Descriptor, at: list[Any], tile: Shared) -> None:
        assert tuple(tile.shape) == target.box
        inside, there = target.parts(at)
        _here.leaving.append(lambda: target.tensor[inside].copy_(tile.view[there]))

    @staticmethod
    def add(target: Descriptor, at: list[Any], tile: Shared) -> None:
        assert tuple(tile.shape) == target.box
        inside, there = target.parts(at)
        _here.leaving.append(lambda: target.tensor[inside].add_(tile.view[there]))

    @staticmethod
    def store_wait(pending: int) -> None:
        _dawdle("store_wait")
        while len(_here.leaving) > pending:
            _here.leaving.popleft()()


class Product:
    """a @ b + c, which is made when it is waited for."""

    def __init__(self, a: Any, b: Any, c: Any) -> None:
        self.operands, self.result = (a, b, c), None

    def make(self) -> None:
        a, b, c = (
            each.load() if isinstance(each, Shared) else each.result if isinstance(each, Product) else each
            for each in self.operands
        )
        product = a.float() @ b.float()
        self.result = value(product if c is None else product + c)


def warpgroup_mma(a: Any, b: Shared, c: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async and a.dtype == b.dtype
    _here.pending.append(Product(a, b, c if use_acc else None))
    return _here.pending[-1]


def warpgroup_mma_wait(pending: int, deps: list[Any]) -> Any:
    while len(_here.pending) > pending:
        _here.pending.popleft().make()
    made = [each.result if isinstance(each, Product) else each for each in deps]
    assert all(each is not None for each in made), "a product is used before it was waited for"
    return tuple(made) if len(made) > 1 else made[0]


class Layout:
    def __init__(self, *_: Any) -> None:
        self.value = self


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if layout == "barrier":
        return Barrier() if shape == [1] else Barriers(Barrier() for _ in range(shape[0]))
    unwritten = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    return Shared(torch.full([int(each) for each in shape], unwritten).to(dtype))


def _specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    assert len(partitions) == len(warps) + 1 == len(registers) + 1
    _here.program.run(partitions)


def _registers(tile: Any, pack: int) -> Any:
    """(64, columns) as (pack, threads), `pack` registers of a thread at a time, as wgmma leaves sums.

    Of every 8 columns a thread has two neighbouring ones of a row, and of the row 8 below. Its next registers
    count as those of another thread; neighbours in a warp stay so.
    """
    parts = tile.reshape(4, 2, 8, -1, 4, 2)  # warps, halves, rows; eights, lanes of a row, neighbours
    return parts.permute(3, 1, 5, 0, 2, 4).reshape(-1, pack, 128).transpose(0, 1).reshape(pack, -1)


def _tile(registers: Any, pack: int) -> Any:
    """And back."""
    parts = registers.reshape(pack, -1, 128).transpose(0, 1).reshape(-1, 2, 2, 4, 8, 4)
    return parts.permute(3, 1, 4, 0, 5, 2).reshape(64, -1)


def _map_elementwise(function: Any, *tiles: Any, pack: int) -> tuple[Any, ...]:
    """What a thread's function makes of as many of its registers of each tile."""
    same = torch.broadcast_tensors(*(value(each) for each in tiles))
    made = _of_threads(function, [register for each in same for register in _registers(each, pack).unbind(0)])
    return tuple(_tile(torch.stack(made[i : i + pack]), pack) for i in range(0, len(made), pack))


def _of_threads(function: Any, registers: list[Any]) -> list[Any]:
    """For all threads at once; where they part at a branch, for those of either side apart."""
    try:
        return [value(each).broadcast_to(registers[0].shape) for each in function(*registers)]
    except Differ as differ:
        taken = differ.taken
    there, elsewhere = (_of_threads(function, [each[side] for each in registers]) for side in (taken, ~taken))
    made = [torch.empty(taken.shape, dtype=each.dtype) for each in there]
    for whole, *sides in zip(made, there, elsewhere, strict=True):
        whole[taken], whole[~taken] = sides
    return [value(each) for each in made]


def _of_warps(x: Any) -> Any:
    assert x.dim() == 1 and x.numel() % 32 == 0, "not all threads of a warp come here"
    return x.reshape(-1, 32)


def _word(low: Any, high: Any, dtype: torch.dtype) -> Any:
    """Two numbers as halves of a word; a NaN as the hardware writes it, whose sign is positive."""
    pair = torch.stack([low, high], -1).to(dtype)
    halves = {1: torch.int8, 2: torch.int16}[dtype.itemsize]
    words = {1: torch.int16, 2: torch.int32}[dtype.itemsize]
    bits = torch.where(pair.float().isnan(), torch.iinfo(halves).max, pair.view(halves)).to(halves)
    return value(bits.contiguous().view(words)[..., 0])


def _larger_halves(a: Any, b: Any, dtype: torch.dtype) -> Any:
    pairs = [each.contiguous()[..., None].view(dtype) for each in (a, b)]
    return _word(*torch.maximum(*pairs).unbind(-1), dtype)


_HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
INSTRUCTIONS = {
    "mov.b32": lambda x: x if not isinstance(x, tuple) else torch.stack(x, -1).view(torch.int32)[..., 0],
    "rcp.approx.ftz.f32": lambda x: 1.0 / x,
    "max.f32": torch.fmax,
    "setp.ne.b32": lambda a, b: a != b,
    "selp.b32": lambda a, b, keep: torch.where(keep, a, b),
    "vote.sync.any.pred": lambda x, _: _of_warps(x).any(1, keepdim=True).expand(-1, 32).reshape(-1),
    "shfl.sync.bfly.b32": lambda x, by, *_: _of_warps(x)[:, torch.arange(32) ^ by].reshape(-1),
    **{f"cvt.rn.{name}.f32": lambda a, b, t=each: _word(b, a, t) for name, each in _HALVES.items()},
    **{f"max.NaN.{name}": lambda a, b, t=each: _larger_halves(a, b, t) for name, each in _HALVES.items()},
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: _word(
        b.clamp(-448, 448), a.clamp(-448, 448), torch.float8_e4m3fn
    ),
}
"""By their names, over a register of all threads that come to one."""


def _assembly(text: str, constraints: str, arguments: list[Any], **_: Any) -> Any:
    """PTX of those instructions, line by line."""
    known: dict[str, Any] = {f"${i}": value(each) for i, each in enumerate(arguments, 1)}

    def operand(name: str) -> Any:
        if name.startswith("{"):
            return tuple(known[part.strip()] for part in name[1:-1].split(","))
        return known[name] if name in known else int(name, 0)

    for line in text.strip("{} \n").split(";"):
        instruction, _, operands = line.strip().partition(" ")
        if instruction and instruction != ".reg":
            to, *given = re.split(r", *(?![^{]*})", operands)
            known[to] = value(INSTRUCTIONS[instruction](*(operand(each) for each in given)))
    return known["$0"]


def _extreme(of: Any, worst: float) -> Any:
    """`max` or `min` along an axis: NaN only where there is nothing else."""

    def reduced(x: Any, axis: int) -> Any:
        if not x.dtype.is_floating_point:
            return value(of(x, axis))
        nothing = x.isnan()
        found = of(torch.where(nothing, worst, x), axis)
        return value(torch.where(nothing.all(axis), torch.nan, found))

    return reduced


def _language() -> Any:
    def pairwise(function: Any) -> Any:
        return lambda a, b: value(function(value(a), value(b)))

    names = ("exp2", "exp", "log", "log2", "sqrt", "abs", "floor", "reshape", "zeros_like", "permute")
    types = ("int8", "int16", "int32", "uint32", "int64", "float16", "bfloat16", "float32")
    layouts = ("Blocked", "NVMMADistributed", "Slice", "DotOperand", "SwizzledShared")
    named = {name: getattr(torch, name) for name in (*names, *types)}
    named |= {f"{name}Layout": Layout for name in layouts}
    return SimpleNamespace(
        **named
        | {
            "zeros": lambda shape, dtype, layout=None: value(torch.zeros(shape, dtype=dtype)),
            "full": lambda shape, x, dtype, layout=None: value(x).to(dtype).expand(shape).clone(),
            "full_like": lambda like, x: value(torch.full_like(like, x)),
            "to_tensor": value,
            "arange": lambda start, end, layout=None: value(torch.arange(start, end)),
            "range": lambda *ends, **_: range(*ends),
            "expand_dims": torch.unsqueeze,
            "broadcast": torch.broadcast_tensors,
            "join": lambda a, b: torch.stack([a, b], -1),
            "split": lambda x: x.unbind(-1),
            "minimum": pairwise(torch.fmin),  # of a number and NaN both give the number
            "maximum": pairwise(torch.fmax),
            "min": _extreme(torch.amin, torch.inf),
            "max": _extreme(torch.amax, -torch.inf),
            "cumsum": torch.cumsum,
            "cdiv": lambda a, b: (value(a) + (b - 1)) // b,
            "where": lambda keep, a, b: value(torch.where(value(keep), a, b)),
            "sum": lambda x, axis: x.sum(axis),
            "convert_layout": lambda x, layout: x,
            "inline_asm_elementwise": _assembly,
            "map_elementwise": _map_elementwise,
            "load": Pointer.load,
            "store": Pointer.store,
            "atomic_add": Pointer.atomic_add,
            "program_id": lambda axis: value(_here.program.index),
            "num_programs": lambda axis: value(_here.program.programs),
            "static_range": range,
            "constexpr": lambda x: x,
            "allocate_shared_memory": _allocate,
            "warp_specialize": _specialize,
            "NVMMASharedLayout": SimpleNamespace(get_default_for=Layout),
            "float8e4nv": torch.float8_e4m3fn,
        }
    )


def loaded(text: str) -> dict[str, Any]:
    """A rendered file with these names in the place of what it imports."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    language, jit = _language(), SimpleNamespace(jit=lambda function: function)
    names = {
        "gl": language,
        "tl": language,
        "gluon": jit,
        "triton": jit,
        "builtin": lambda function: function,
    }
    names |= {"tma": Copying, "mbarrier": BARRING, "fence_async_shared": lambda: None}
    names |= {"warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait}
    exec(compile(tree, "rendered", "exec"), names)
    names["tma_add"] = Copying.add
    return names


def _passed(arg: Arg, values: dict[str, Any]) -> Any:
    given = values[arg.source]
    if not arg.is_descriptor:
        given = given if given is not None or arg.type[0] != "*" else torch.empty(0)  # a null pointer
        return Pointer.into(given) if isinstance(given, torch.Tensor) else value(given)
    shape = [values[name] for name in extents_of(arg.source)]
    strides = [values[f"{arg.source}.stride.{axis}"] for axis in AXES]
    kind = PackedRows if "sequences" in values and not arg.source.startswith("scratch.") else Descriptor
    return kind(given.as_strided(shape, strides)[..., arg.offset :], arg.box)


def run(source: KernelSource, facts: CallFacts, env: tuple[Any, ...], multiprocessors: int = 2) -> None:
    """Runs every program of each of the file's kernels, writing into the tensors.

    Those of a persistent grid run side by side, others one after the other.
    """
    values = dict(zip(environment_names(source.spec), env, strict=True))
    for buffer in source.scratch:
        values |= _allocated(buffer, values)
    values[WORKSPACE] = torch.zeros(2, dtype=torch.int32)
    names = loaded(source.text)
    before = [part for part in source.parts if part.before]
    after = [part for part in source.parts if not part.before]
    for part in (*before, None, *after):
        abi = source.abi(facts, part)
        blocks = abi.grid.blocks(*(values[name] for name in GRID_RULES[abi.grid.rule]), multiprocessors)
        kernel = names[part.name if part else source.name]
        arguments = [_passed(arg, values) for arg in abi.args]
        programs = [Program(index, blocks) for index in range(blocks)]
        at_once = blocks if abi.grid.rule.endswith("persistent") else 1
        for first in range(0, blocks, at_once):
            of_them = programs[first : first + at_once]
            side_by_side(Program.launch, [(program, kernel, arguments) for program in of_them])
            for program in of_them:
                if program.error is not None:
                    raise program.error
    assert not values[WORKSPACE].any(), "the workspace is not left zeroed"
