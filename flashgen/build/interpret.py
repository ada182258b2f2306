"""Runs a rendered kernel in Triton's interpreter, on CPU tensors: correctness without a GPU.

The interpreter is chosen when triton is imported, so the process must have been started with
TRITON_INTERPRET=1, and such a process compiles nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from flashgen.build.compile import load_module
from flashgen.codegen.abi import Abi, Arg
from flashgen.codegen.source import KernelSource, write
from flashgen.errors import FlashGenError
from flashgen.spec.attention import CallFacts


def interpret(source: KernelSource, facts: CallFacts, env: tuple[Any, ...]) -> None:
    """Runs every program of the grid, one after the other, writing into the environment's tensors.

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
    abi = source.abi(facts)
    values = dict(zip(abi.environment, env, strict=True))
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        kernel = getattr(load_module(write(source, Path(folder))), source.name)
        blocks = abi.grid.blocks(values["batch"], values["heads"], values["q_len"], multiprocessors=1)
        kernel[(blocks,)](*(_value(arg, abi, values) for arg in abi.args))


def _value(arg: Arg, abi: Abi, values: dict[str, Any]) -> Any:
    """What the kernel receives: the environment's entry, or a descriptor over a chunk of a tensor."""
    value = values[arg.source]
    if not arg.is_descriptor:
        return value if arg.constant is None else arg.constant
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [values[f"{arg.source}.stride.{axis}"] for axis in ("batch", "head", "row", "dim")]
    heads = values["heads" if arg.source == "q" else "kv_heads"]
    rows = values["q_len" if arg.source == "q" else "k_len"]
    dims = values["head_dim_v" if arg.source == "v" else "head_dim"]
    base = value.as_strided((values["batch"], heads, rows, dims), strides)
    chunk = base[..., arg.offset :]
    return TensorDescriptor(chunk, list(chunk.shape), list(chunk.stride()), list(arg.box))
