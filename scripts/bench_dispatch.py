#!/usr/bin/env python3
"""Host time of one eager call: flashgen.attention, torch's attention, and Triton's own launcher beside them.

The problem is so small that the GPU is done before the host is, so what is timed is the host alone. Calls are
enqueued without waiting; the implementations take turns within each pass, and the median over the passes is
told.

    scripts/bench_dispatch.py [--passes 15] [--calls 200] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F  # noqa: N812

import flashgen
from flashgen.build.arguments import FACTS, facts_code, flatten
from flashgen.build.compile import compile_kernel, load_module, toolchain
from flashgen.build.device import live_target
from flashgen.build.driver import driver
from flashgen.build.launch import Kernel
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render, write
from flashgen.measure.peers import versions
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec

Launch = Callable[[], Any]
SHAPE = {"batch": 1, "heads": 8, "kv_heads": 8, "q_len": 64, "k_len": 64, "head_dim": 64, "dtype": "bf16"}


def candidates() -> dict[str, Launch]:
    """What is timed, by name; each entry enqueues one call."""
    size = (SHAPE["batch"], SHAPE["heads"], SHAPE["q_len"], SHAPE["head_dim"])
    q, k, v = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    mask = masks.causal()
    window, padding = masks.sliding_window(31, 0), masks.key_padding(torch.tensor([64], device="cuda"))
    found: dict[str, Launch] = {
        "torch.add": lambda: torch.add(q, k),
        "torch.empty_like": lambda: torch.empty_like(q),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "flashgen.attention": lambda: flashgen.attention(q, k, v, mask=mask),
        "flashgen.attention, mask by name": lambda: flashgen.attention(q, k, v, mask="causal"),
        "flashgen.attention, window": lambda: flashgen.attention(q, k, v, mask=window),
        "flashgen.attention, key padding": lambda: flashgen.attention(q, k, v, mask=padding),
        "flashgen.attention, with LSE": lambda: flashgen.attention(q, k, v, mask=mask, return_lse=True),
        "flashgen.sdpa": lambda: flashgen.sdpa(q, k, v, is_causal=True),
    }
    return found | _training(q, k, v) | _launchers(q, k, v)


def _training(*tensors: torch.Tensor) -> dict[str, Launch]:
    """Calls that need a gradient, without and with their backward pass."""
    leaves, dout = [each.clone().requires_grad_() for each in tensors], torch.randn_like(tensors[0])

    def forward(attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode(False):
            return attend(*leaves, is_causal=True)

    def both(attend: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(forward(attend), leaves, dout)

    peers = {"scaled_dot_product_attention": F.scaled_dot_product_attention, "flashgen.sdpa": flashgen.sdpa}
    return {
        f"{name}, {what}": partial(run, attend)
        for what, run in (("needs a gradient", forward), ("and gets it", both))
        for name, attend in peers.items()
    }


def _launchers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Launch]:
    """One kernel by FlashGen's launcher and by Triton's, output and arguments made before."""
    target, family = live_target(), FAMILIES["attention_fwd"]
    spec = AttentionSpec(64, 64, "bf16", masks.causal().rule)
    out, scale = torch.empty_like(q), 64**-0.5
    env = flatten(q, k, v, out, None, scale)
    stream = torch.cuda.current_stream().cuda_stream
    found: dict[str, Launch] = {
        "flatten and facts": lambda: facts_code(flatten(q, k, v, out, None, scale), 2),
    }
    for loads in ("tma", "pointer"):
        config = family.config(block_m=64, block_n=32, num_warps=4, num_stages=2, loads=loads, order="heads")
        if family.fits(config, spec, target):
            continue
        kernel = Kernel(compile_kernel(render(spec, config, toolchain()), FACTS[0], target))
        found[f"Kernel.launch, {loads}"] = lambda kernel=kernel: kernel.launch(env, stream)  # type: ignore[misc]
    source = render(spec, config, toolchain())
    folder = Path(tempfile.mkdtemp(prefix="flashgen-bench-"))
    function = getattr(load_module(write(source, folder)), source.name)
    abi = source.abi(FACTS[0])
    values = dict(zip(abi.environment, flatten(q, k, v, out, None, scale, pointers=False), strict=True))
    arguments = [values[arg.source] for arg in abi.args]
    sizes = (SHAPE[name] for name in ("batch", "heads", "q_len"))
    grid = (abi.grid.blocks(*sizes, multiprocessors=target.sm_count),)  # type: ignore[misc, arg-type]
    options = {"num_warps": abi.num_warps, "num_stages": abi.num_stages}
    found[f"triton kernel[grid], {len(arguments)} arguments"] = lambda: function[grid](*arguments, **options)
    return found


def host_us(launch: Launch, calls: int) -> float:
    """Microseconds of host time for one call, over `calls` of them enqueued back to back."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        launch()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / calls * 1e6


def measure(passes: int, calls: int) -> list[dict[str, Any]]:
    """One row for each implementation."""
    launches = candidates()
    times: dict[str, list[float]] = {name: [] for name in launches}
    with torch.inference_mode():
        for launch in launches.values():  # compiles, loads, and fills torch's allocator
            host_us(launch, 50)
        gc.collect()
        gc.disable()
        try:
            names = list(launches)
            for turn in range(passes):
                # Another one begins each pass, so that none always follows the same one.
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    times[name].append(host_us(launches[name], calls))
        finally:
            gc.enable()
    return [
        {
            "op": "dispatch",
            **SHAPE,
            "mask": "causal",
            "impl": name,
            "host_us_median": round(statistics.median(found), 2),
            "host_us_min": round(min(found), 2),
            "host_us_max": round(max(found), 2),
            "passes": passes,
        }
        for name, found in times.items()
    ]


def main() -> int:
    """Prints the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=15, help="turns of all implementations")
    parser.add_argument("--calls", type=int, default=200, help="calls of each in a turn")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_dispatch times calls on a GPU, and there is none", file=sys.stderr)
        return 1
    rows = measure(given.passes, given.calls)
    header = {
        "gpu": live_target().describe(),
        "driver": f"CUDA {driver().version()}",
        "versions": versions(),
        "command": shlex.join(["scripts/bench_dispatch.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if given.json:
        print(json.dumps({"header": header, "rows": rows}, indent=2))
        return 0
    print(f"host time of a call, us, on {header['gpu']}; {given.passes} passes of {given.calls} calls")
    print(f"{'':<40} {'median':>8} {'min':>8} {'max':>8}")
    for row in rows:
        numbers = (row[f"host_us_{name}"] for name in ("median", "min", "max"))
        print(f"{row['impl']:<40} " + " ".join(f"{number:8.1f}" for number in numbers))
    ours, theirs = (
        next(row["host_us_median"] for row in rows if row["impl"] == name)
        for name in ("flashgen.attention", "scaled_dot_product_attention")
    )
    print(f"flashgen.attention takes {ours / theirs:.2f} of torch's time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
