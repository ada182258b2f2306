"""A file of three kernels for the tests of what runs them: out = 2 v + 1, by way of a scratch buffer."""

from __future__ import annotations

from flashgen.codegen.abi import Arg, Extent, Grid, Part, Scratch
from flashgen.codegen.families import find_family
from flashgen.codegen.source import KernelSource, Toolchain, kernel_hash
from flashgen.spec.attention import AttentionSpec

DIM = 16
SPEC = AttentionSpec(DIM, DIM, "fp32")
CONFIG = find_family("attention_fwd").find("m32n32w4s1_pointer_heads")
KEYS = 8  # of a program of `doubled`
_AXES = ("batch", "head", "row")


def _strides(letter: str, source: str) -> tuple[Arg, ...]:
    return tuple(Arg(f"{letter}_{axis}", f"{source}.stride.{axis}", "i32") for axis in _AXES)


_V = (Arg("V", "v", "*fp32"), *_strides("v", "v"))
_TWICE = (Arg("TWICE", "scratch.twice", "*fp32"), *_strides("t", "scratch.twice"))
_OUT = (Arg("OUT", "out", "*fp32"), *_strides("o", "out"))
_SIZES = (Arg("heads", "heads", "i32"), Arg("q_len", "q_len", "i32"))
_KEY_SIZES = (Arg("kv_heads", "kv_heads", "i32"), Arg("k_len", "k_len", "i32"))

TEXT = '''"""Twice V and one."""

import triton
import triton.language as tl


@triton.jit
def tile(base, batch, head, first, stride_b, stride_h, stride_r, ROWS: tl.constexpr):
    rows = (first + tl.arange(0, ROWS))[:, None]
    return base + batch * stride_b + head * stride_h + rows * stride_r + tl.arange(0, 16)[None, :], rows


@triton.jit
def doubled(V, v_batch, v_head, v_row, TWICE, t_batch, t_head, t_row, kv_heads, k_len):
    tiles = tl.cdiv(k_len, 8)
    place = tl.program_id(0)
    batch, head, first = place // tiles // kv_heads, place // tiles % kv_heads, place % tiles * 8
    source, rows = tile(V, batch, head, first, v_batch, v_head, v_row, 8)
    out, _ = tile(TWICE, batch, head, first, t_batch, t_head, t_row, 8)
    tl.store(out, 2 * tl.load(source, mask=rows < k_len, other=0))  # the buffer's rows fill whole tiles


@triton.jit
def incremented(OUT, o_batch, o_head, o_row, heads, q_len):
    tiles = tl.cdiv(q_len, 32)
    place = tl.program_id(0)
    batch, head, first = place // tiles // heads, place // tiles % heads, place % tiles * 32
    out, rows = tile(OUT, batch, head, first, o_batch, o_head, o_row, 32)
    tl.store(out, 1 + tl.load(out, mask=rows < q_len), mask=rows < q_len)


@triton.jit
def copied(OUT, o_batch, o_head, o_row, TWICE, t_batch, t_head, t_row, heads, q_len):
    tiles = tl.cdiv(q_len, 32)
    place = tl.program_id(0)
    batch, head, first = place // tiles // heads, place // tiles % heads, place % tiles * 32
    source, rows = tile(TWICE, batch, head, first, t_batch, t_head, t_row, 32)
    out, _ = tile(OUT, batch, head, first, o_batch, o_head, o_row, 32)
    tl.store(out, tl.load(source, mask=rows < q_len), mask=rows < q_len)
'''


def three_steps(toolchain: Toolchain) -> KernelSource:
    """The file as if a family had rendered it; q_len must be k_len, and heads kv_heads."""
    one = Extent()
    rows = Extent("k_len", KEYS, KEYS)
    twice = Scratch("twice", "fp32", (Extent("batch"), Extent("kv_heads"), rows, Extent(times=DIM)))
    flag = Scratch("flag", "i32", (one, one, one, Extent(plus=4)))
    return KernelSource(
        spec=SPEC,
        config=CONFIG,
        toolchain=toolchain,
        name="copied",
        text=TEXT,
        hash=kernel_hash(TEXT),
        arguments=(_OUT, _TWICE, _SIZES),
        parts=(
            Part("doubled", True, (_V, _TWICE, _KEY_SIZES), Grid("key_tiles", KEYS)),
            Part("incremented", False, (_OUT, _SIZES), Grid("row_tiles", 32)),
        ),
        scratch=(flag, twice),
    )
