#!/usr/bin/env python3
"""How exact FlashGen and its peers are: errors against float64, for inputs that attention finds hard.

    scripts/bench_error.py [--impls flashgen,cudnn,fa2,fa4] [--out FILE]

Each output is compared with attention of the same bf16 inputs in float64: the root mean square of the
differences, and the largest, both over the root mean square of the exact output.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import flashgen
from flashgen.build.device import live_target
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.reference import attention_reference
from flashgen.build.versions import driver_version
from flashgen.errors import FlashGenError
from flashgen.measure.exactness import HARD, errors_of
from flashgen.measure.peers import build_peer, versions
from flashgen.spec import masks
from flashgen.tune.suites import make_workload

SEQ, HEADS, BATCH = 2048, 8, 2
OURS = "flashgen"


def rows(impls: list[str]) -> list[dict[str, Any]]:
    """One for each kind of inputs, shape and implementation."""
    found = []
    for head_dim in (64, 128, 256):
        for mask in (masks.full(), masks.causal()):
            workload = make_workload(
                head_dim=head_dim,
                heads=HEADS,
                kv_heads=HEADS,
                q_len=SEQ,
                k_len=SEQ,
                mask=mask,
                dtype="bf16",
                batch=BATCH,
            )
            for kind, of in HARD.items():
                inputs = of(make_inputs(workload, "cuda"))
                exact, _ = attention_reference(
                    inputs.q, inputs.k, inputs.v, mask=mask, scale=inputs.scale, dtype=torch.float64
                )
                for impl in impls:
                    row = {"head_dim": head_dim, "mask": mask.rule.name, "inputs": kind, "impl": impl}
                    try:
                        errors = errors_of(_output(impl, inputs), exact)
                    except FlashGenError as reason:
                        print(f"{row}: {reason}", file=sys.stderr)
                        continue
                    found.append(row | {"rms": errors.rms, "max": errors.largest})
    return found


def _output(impl: str, inputs: Inputs) -> torch.Tensor:
    if impl == OURS:
        return flashgen.attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask, scale=inputs.scale)
    return build_peer(impl, inputs)()


def main() -> None:
    """Prints a line for each shape and kind of inputs: rms and largest error of each implementation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--impls", default="flashgen,cudnn,fa2,fa4")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    impls = [name.strip() for name in args.impls.split(",")]
    found = rows(impls)
    shapes = dict.fromkeys((row["head_dim"], row["mask"], row["inputs"]) for row in found)
    for shape in shapes:
        of = {r["impl"]: r for r in found if (r["head_dim"], r["mask"], r["inputs"]) == shape}
        told = [f"{impl} {row['rms']:.2e} {row['max']:.2e}" for impl, row in of.items()]
        print(f"d{shape[0]} {shape[1]}, {shape[2]}: {'; '.join(told)}")
    if args.out:
        header = {
            "gpu": live_target().name,
            "driver": driver_version(),
            "versions": versions(),
            "command": shlex.join(["scripts/bench_error.py", *sys.argv[1:]]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"header": header, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
