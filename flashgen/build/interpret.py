"""Runs a rendered kernel in Triton's interpreter, on CPU tensors: correctness without a GPU.

The interpreter is chosen when triton is imported, so the process must have been started with
TRITON_INTERPRET=1, and such a process compiles nothing.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from flashgen.build.compile import load_module
from flashgen.codegen.abi import AXES, ELEMENT_BYTES, GRID_RULES, Arg, Scratch, environment_names, extents_of
from flashgen.codegen.source import KernelSource, write
from flashgen.errors import FlashGenError
from flashgen.spec.attention import CallFacts

_TORCH_NAMES = {
    "i32": "int32",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
}


def interpret(source: KernelSource, facts: CallFacts, env: tuple[Any, ...]) -> None:
    """Runs every program of each of the file's kernels, one after the other, writing into the tensors.

    Args:
        source: rendered for `Toolchain(interpret=True)`.
        env: the call environment with tensors where a launch has addresses.

    Raises:
        FlashGenError: the process does not interpret.
    """
    import triton

    if not triton.knobs.runtime.interpret or not source.toolchain.interpret:
        raise FlashGenError(
            "needs a process with TRITON_INTERPRET=1 and a source for Toolchain(interpret=True)"
        )
    values = dict(zip(environment_names(source.spec), env, strict=True))
    for buffer in source.scratch:
        values |= _allocated(buffer, values)
    before = [part for part in source.parts if part.before]
    after = [part for part in source.parts if not part.before]
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        module = load_module(write(source, Path(folder)))
        for part in (*before, None, *after):
            abi = source.abi(facts, part)
            sequences, heads, rows = (values[name] for name in GRID_RULES[abi.grid.rule])
            blocks = abi.grid.blocks(sequences, heads, rows, multiprocessors=1)
            kernel = getattr(module, part.name if part else source.name)
            kernel[(blocks,)](*(_value(arg, values) for arg in abi.args))


def _allocated(buffer: Scratch, values: dict[str, Any]) -> dict[str, Any]:
    """A buffer's entries of the environment. What nobody wrote is all ones, which is NaN, or -1."""
    sequences = values.get("sequences", 0)
    shape = [extent.of(values[extent.size] if extent.size else 1, sequences) for extent in buffer.extents]
    size = math.prod(shape) * ELEMENT_BYTES[buffer.dtype]
    memory = torch.full((size,), 255, dtype=torch.uint8).view(getattr(torch, _TORCH_NAMES[buffer.dtype]))
    tensor = memory.view(shape)
    return dict(zip(buffer.names, (tensor, *tensor.stride(), *shape), strict=True))


def _value(arg: Arg, values: dict[str, Any]) -> Any:
    """What the kernel receives: the environment's entry, or a descriptor over a chunk of a tensor."""
    value = values[arg.source]
    if not arg.is_descriptor:
        return value if arg.constant is None else arg.constant
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [values[f"{arg.source}.stride.{axis}"] for axis in AXES]
    if arg.source.startswith("scratch."):
        return TensorDescriptor(value, list(value.shape), strides, list(arg.box))
    batch, heads, rows, dims = (values[name] for name in extents_of(arg.source))
    if "sequences" in values:
        return _two_row_axes(value.as_strided((rows, heads, dims), [strides[i] for i in (2, 1, 3)]), arg)
    base = value.as_strided((batch, heads, rows, dims), strides)
    chunk = base[..., arg.offset :]
    return TensorDescriptor(chunk, list(chunk.shape), list(chunk.stride()), list(arg.box))


def _two_row_axes(packed: torch.Tensor, arg: Arg) -> Any:
    """A descriptor over packed sequences, (rows, heads, dims): element (outer, head, inner) is of row
    outer + inner - box. A launch begins its map before the tensor; here a box of rows is put there.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    box = arg.box[2]
    chunk = packed[..., arg.offset :]
    rows, heads, dims = chunk.shape
    before = chunk.new_full((box, heads, dims), math.nan)
    whole = torch.cat([before, chunk, before])  # and behind: where the outer index is the last one
    row, head, dim = whole.stride()
    view = whole.as_strided((rows + box, heads, box, dims), (row, head, row, dim))
    return TensorDescriptor(view, list(view.shape), list(view.stride()), list(arg.box))
