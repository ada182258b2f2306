"""The keys of a tile divided among several programs, where a call has too few rows to fill a GPU.

Each program leaves what it has of its part of the keys, each row's maximum, sum and unnormalised output, in
buffers of the call, and a second kernel brings the parts to one maximum (Dao et al. 2023, Flash-Decoding;
there by their LSE, in whose float32 the sum is lost beside a maximum of 1e7). Both families write their parts
alike, so buffers and second kernel stand here once.
"""

from __future__ import annotations

from flashgen.codegen.abi import Arg, Extent, Grid, Part, Scratch, sink_arguments, tensor_arguments
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import Config, Value

OPTIONS: tuple[tuple[str, tuple[Value, ...]], ...] = (("splits", (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)),)
"""64 programs for each tile fill 132 multiprocessors from two tiles on: one sequence, one key head. Not only
powers of two: 88 tiles (512 queries of 8 groups of 4 heads, 192 rows each) fill them twice in 3 parts."""

_OF_ROWS = ("partial_max", "partial_sum")
BUFFERS = tuple(Arg(name.upper(), f"scratch.{name}", "*fp32") for name in ("partial", *_OF_ROWS))
"""As the kernels take them: the output of each part, its maxima in log2 units, and its sums."""


def scratch(config: Config, spec: AttentionSpec) -> tuple[Scratch, ...]:
    """(batch, split, head, row) of the parts' outputs, maxima and sums, float32."""
    splits = config.number("splits")
    if splits == 1:
        return ()
    each = Extent("batch", times=splits)
    return (
        Scratch("partial", "fp32", (each, Extent("heads"), Extent("q_len"), Extent("head_dim_v"))),
        *(Scratch(name, "fp32", (each, Extent("heads"), Extent("q_len"), Extent())) for name in _OF_ROWS),
    )


def parts(config: Config, spec: AttentionSpec) -> tuple[Part, ...]:
    """The kernel that merges the parts, after the main one."""
    if config.number("splits") == 1:
        return ()
    lse = ((Arg("LSE", "lse", "*fp32"),),) if spec.return_lse else ()
    sizes = (Arg("heads", "heads", "i32"), Arg("q_len", "q_len", "i32"))
    sinks = sink_arguments(spec.sinks)
    arguments = (BUFFERS, tensor_arguments("OUT", spec.result_dtype), *lse, *sinks, sizes)
    return (Part("combine_splits", False, arguments, Grid("row_tiles", 1), num_warps=1),)
