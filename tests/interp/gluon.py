"""A stand-in for Gluon on CPU tensors: Triton's interpreter knows none of it.

A rendered file runs as Python, its partitions as threads, over torch tensors. Values mean what they mean to
the compiler; layouts mean nothing. Barriers count arrivals and bytes and have phases, copies fill and clip as
TMA does, and an asynchronous product is made when it is waited for, not before: who frees a buffer too soon,
waits for too few products or for a phase that nobody ends gets wrong numbers, an error, or a deadlock, which
is told. What is not seen: fences between kinds of memory access, registers, and anything of time.
"""

from __future__ import annotations

import ast
import random
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from flashgen.build.interpret import _allocated
from flashgen.build.launch import _extents
from flashgen.codegen.abi import AXES, GRID_RULES, Arg, environment_names
from flashgen.codegen.source import KernelSource
from flashgen.spec.attention import CallFacts

PATIENCE_S = 60.0
SLOW: dict[str, float] = {}
"""Seconds that `arrive`, `store_wait` or a `store of partition 1` take; else now and then a moment, so that
threads meet in another order each time."""
_here = threading.local()
"""Of a thread: the program it is a part of, and its products and copies that were not waited for."""


class Value(torch.Tensor):
    """A tensor, or a number of 0 axes, whose integers are divided as Triton does: towards zero."""

    def __floordiv__(self, other: Any) -> Any:
        return torch.div(self, other, rounding_mode="trunc")

    def __mod__(self, other: Any) -> Any:
        return torch.fmod(self, other)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other


def value(given: Any) -> Any:
    return torch.as_tensor(given).as_subclass(Value)


class Pointer:
    """Elements of a tensor's memory."""

    def __init__(self, memory: torch.Tensor, at: Any) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((size,), (1,), 0), value(tensor.storage_offset()))

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.memory, self.at + steps)

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        at = value(self.at)
        if mask is None:
            return value(self.memory[at])
        at, mask = torch.broadcast_tensors(at, value(mask))
        found = self.memory[torch.where(mask, at, 0)]
        return value(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)))

    def store(self, given: Any, mask: Any = None) -> None:
        at, given = torch.broadcast_tensors(value(self.at), value(given).to(self.memory.dtype))
        kept = torch.ones_like(at, dtype=torch.bool) if mask is None else value(mask).broadcast_to(at.shape)
        self.memory[at[kept]] = given[kept]


class Shared:
    """A view of shared memory, full of NaN at first."""

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
        self.error: BaseException | None = None

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

        threads = [
            threading.Thread(target=partition, args=(index, *each)) for index, each in enumerate(partitions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


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


class Copying:
    """`tma`."""

    @staticmethod
    def async_copy_global_to_shared(
        source: Descriptor, at: list[Any], barrier: Barrier, tile: Shared
    ) -> None:
        assert tuple(tile.shape) == source.box
        inside, there = source.parts(at)
        tile.view.zero_()
        tile.view[there] = source.tensor[inside]
        with _here.program.changed:
            barrier.bytes -= tile.view.numel() * tile.view.element_size()
            barrier.settle()

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
    return Shared(torch.full([int(each) for each in shape], torch.nan, dtype=dtype))


def _specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    assert len(partitions) == len(warps) + 1 == len(registers) + 1
    _here.program.run(partitions)


def _assembly(text: str, constraints: str, arguments: list[Any], **_: Any) -> Any:
    """The one instruction that rules are written in."""
    assert text.startswith("rcp.approx")
    return 1.0 / arguments[0]


def _language() -> Any:
    def pairwise(function: Any) -> Any:
        return lambda a, b: value(function(value(a), value(b)))

    names = ("zeros", "full", "exp2", "exp", "log", "log2", "sqrt", "abs", "floor", "reshape", "zeros_like")
    named = {name: getattr(torch, name) for name in names}
    return SimpleNamespace(
        **named
        | {
            "zeros": lambda shape, dtype, layout=None: value(torch.zeros(shape, dtype=dtype)),
            "full": lambda shape, x, dtype, layout=None: value(torch.full(shape, x, dtype=dtype)),
            "arange": lambda start, end, layout=None: value(torch.arange(start, end)),
            "permute": lambda x, order: x.permute(order),
            "minimum": pairwise(torch.minimum),
            "maximum": pairwise(torch.maximum),
            "cdiv": lambda a, b: (value(a) + (b - 1)) // b,
            "where": lambda keep, a, b: value(torch.where(keep, a, b)),
            "sum": lambda x, axis: x.sum(axis),
            "convert_layout": lambda x, layout: x,
            "inline_asm_elementwise": _assembly,
            "load": Pointer.load,
            "store": Pointer.store,
            "program_id": lambda axis: value(_here.program.index),
            "num_programs": lambda axis: value(_here.program.programs),
            "static_range": range,
            "constexpr": lambda x: x,
            "allocate_shared_memory": _allocate,
            "warp_specialize": _specialize,
            "NVMMADistributedLayout": Layout,
            "SliceLayout": Layout,
            "DotOperandLayout": Layout,
            "NVMMASharedLayout": SimpleNamespace(get_default_for=Layout),
            "int32": torch.int32,
            "int64": torch.int64,
            "float32": torch.float32,
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
        return Pointer.to(given) if isinstance(given, torch.Tensor) else value(given)
    shape = [values[name] for name in _extents(arg.source)]
    strides = [values[f"{arg.source}.stride.{axis}"] for axis in AXES]
    return Descriptor(given.as_strided(shape, strides)[..., arg.offset :], arg.box)


def run(source: KernelSource, facts: CallFacts, env: tuple[Any, ...]) -> None:
    """Runs every program of each of the file's kernels, one after the other, writing into the tensors."""
    values = dict(zip(environment_names(source.spec), env, strict=True))
    for buffer in source.scratch:
        values |= _allocated(buffer, values)
    names = loaded(source.text)
    before = [part for part in source.parts if part.before]
    after = [part for part in source.parts if not part.before]
    for part in (*before, None, *after):
        abi = source.abi(facts, part)
        blocks = abi.grid.blocks(*(values[name] for name in GRID_RULES[abi.grid.rule]), multiprocessors=1)
        arguments = [_passed(arg, values) for arg in abi.args]
        for index in range(blocks):
            _here.program = Program(index, blocks)
            names[part.name if part else source.name](*arguments)
