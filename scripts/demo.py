"""What `scripts/demo` runs: each step is a command or a few lines that a user could type.

usage: demo.py              all steps
       demo.py interpret    the step that needs a process of its own (TRITON_INTERPRET=1)
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import flashgen
from flashgen import api
from flashgen.build.device import device_count
from flashgen.build.inputs import make_inputs
from flashgen.measure.check import Expected
from flashgen.spec.attention import Workload

OFFLINE = "nvidia-h200"
SUITE = ["--suite", "ci"]
"""Tuned offline."""
SHAPES = shlex.split("--head-dim 128 --heads 32 --kv-heads 8 --seq 1024 --seq 4096 --mask causal --mask full")
"""Tuned on a GPU: prefill of Llama 3 8B, 16384 tokens."""
BUNDLE = "demo-results/demo.bundle"

VARIABLES = ("FLASHGEN_DB", "FLASHGEN_CACHE")
"""Where the demo keeps what it makes, so that nothing else is touched; scripts/demo sets both."""

summary: list[tuple[str, str, float]] = []


def step(title: str, work: Callable[[], str]) -> None:
    """Runs one step, and remembers what came of it and how long it took."""
    print(f"\n== {title}", flush=True)
    started = time.perf_counter()
    summary.append((title, work(), time.perf_counter() - started))


def command(*words: str, **environment: str) -> str:
    """Runs a command as a user would, and returns what it printed."""
    shown = [f"{name}={value}" for name, value in environment.items()] + list(words)
    print("$", shlex.join(shown), flush=True)
    program = str(Path(sys.executable).with_name(words[0]))
    done = subprocess.run(
        [program, *words[1:]], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"demo: this step failed with exit code {done.returncode}")
    return done.stdout


def workloads() -> tuple[Workload, ...]:
    """What is tuned."""
    from flashgen.cli.options import Selection

    if device_count():
        return Selection(
            head_dim=128, heads=32, kv_heads=8, seq=(1024, 4096), mask=("causal", "full")
        ).workloads()
    return api.workloads_of(SUITE[1])


def _with_its_database() -> str:
    """What is missing where a step is run by hand."""
    told = ", with the two variables that it prints first"
    return "" if all(os.environ.get(name) for name in VARIABLES) else told


# The steps


def tune_offline() -> str:
    """Compiles candidates for a GPU that is not here, and ranks them by a model."""
    command("flashgen", "tune", "--target", OFFLINE, *SUITE, "--trials", "6")
    return f"{len(workloads())} workloads for {OFFLINE}"


def tune_here() -> str:
    """Measures candidates on this machine's GPU."""
    command("flashgen", "tune", "--gpu", *SHAPES, "--budget", "45s")
    return f"{len(workloads())} workloads on this GPU"


def interpret_in_a_process() -> str:
    """Runs the winners in Triton's interpreter."""
    told = command("python", "scripts/demo.py", "interpret", TRITON_INTERPRET="1")
    return told.splitlines()[-1]


def interpret() -> str:
    """In the process that interprets: the winners of the tuning, on CPU tensors, against the reference."""
    from flashgen.build.arguments import flatten
    from flashgen.build.compile import toolchain
    from flashgen.build.interpret import interpret as run
    from flashgen.codegen.source import render
    from flashgen.spec.attention import CallFacts
    from flashgen.spec.rule import values_and_tensors

    worst = 0.0
    for workload in workloads():
        record = api.best_record(workload, OFFLINE)
        if record is None:
            sys.exit(f"demo: no record of {workload.name}: run ./scripts/demo first{_with_its_database()}")
        inputs = make_inputs(workload, "cpu")
        out = torch.full_like(inputs.q, float("nan"))
        values, tensors = values_and_tensors(inputs.mask, inputs.score_mod)
        env = flatten(inputs.q, inputs.k, inputs.v, out, None, inputs.scale, values, tensors, pointers=False)
        source = render(workload.spec, record.config, toolchain(interpret=True))
        run(source, CallFacts(), env)
        expected = Expected(inputs, workload.spec)
        verdict = expected.judge(out)
        if not verdict.ok:
            sys.exit(f"demo: {source.name} is wrong: {verdict.reason}")
        print(f"{source.name}: max error {verdict.max_error:.2g}, allowed {expected.max_limit:.2g}")
        worst = max(worst, verdict.max_error)
    return f"{len(workloads())} winners are right, max error {worst:.2g}"


def dispatch() -> str:
    """Calls `flashgen.attention` as a model would."""
    device = "cuda" if device_count() else "cpu"
    workload = workloads()[0]
    inputs = make_inputs(workload, device)
    q, k, v = inputs.q, inputs.k, inputs.v
    print(f">>> flashgen.attention(q, k, v, mask={inputs.mask.describe()!r})  # on {q.device}")
    out = flashgen.attention(q, k, v, mask=inputs.mask)
    verdict = Expected(inputs, workload.spec).judge(out)
    if not verdict.ok:
        sys.exit(f"demo: the output is wrong: {verdict.reason}")
    print(f"{tuple(out.shape)} {out.dtype}, max error {verdict.max_error:.2g} against the float32 reference")
    print(f"\n>>> print(flashgen.explain(q, k, v, mask={inputs.mask.describe()!r}))")
    explanation = flashgen.explain(q, k, v, mask=inputs.mask)
    print(explanation)
    if not device_count():
        print()
        command("flashgen", "explain", "--target", OFFLINE, *SUITE)
    return f"runs {explanation.runs}, max error {verdict.max_error:.2g}"


def export() -> str:
    """Packs the winners into a bundle and checks it."""
    if device_count():
        command("flashgen", "export", "--gpu", *SHAPES, "--out", BUNDLE)
    else:
        command("flashgen", "export", "--target", OFFLINE, *SUITE, "--out", BUNDLE)
    command("flashgen", "verify", BUNDLE)
    return f"{BUNDLE} is whole"


def load() -> str:
    """Loads the bundle; on its GPU, a call is served from it."""
    print(f">>> bundle = flashgen.load_bundle({BUNDLE!r})")
    bundle = flashgen.load_bundle(BUNDLE)
    print(bundle)
    for record in bundle.manifest.records:
        measured = record.measurement
        how = "ranked by a model" if measured.source == "model" else f"{record.median_us:.1f} us"
        print(f"  {record.workload.spec.key}  {record.workload.name}  {record.config.name}  {how}")
    told = f"{len(bundle.manifest.records)} records, {len(bundle.manifest.kernels)} kernels"
    if device_count():
        inputs = make_inputs(workloads()[0], "cuda")
        explanation = flashgen.explain(inputs.q, inputs.k, inputs.v, mask=inputs.mask)
        print(explanation)
        verdict = Expected(inputs, workloads()[0].spec).judge(
            flashgen.attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask)
        )
        if not verdict.ok:
            sys.exit(f"demo: the bundle's kernel is wrong: {verdict.reason}")
        told += f", serves with max error {verdict.max_error:.2g}"
    return told


def compare() -> str:
    """The tuned kernels against the backends of torch's own attention."""
    out = "demo-results/bench.json"
    command("flashgen", "bench", *SHAPES, "--impls", "flashgen,fa2,cudnn", "--out", out)
    return f"rows in {out}"


def main() -> None:
    """Runs the steps for this machine and sums them up."""
    if sys.argv[1:] == ["interpret"]:
        if os.environ.get("TRITON_INTERPRET") != "1":
            sys.exit("demo: this step interprets: TRITON_INTERPRET=1 python scripts/demo.py interpret")
        print(interpret())
        return
    started = time.perf_counter()
    print("Every command below can be repeated by hand after these:")
    for name in VARIABLES:
        print(f"$ export {name}={shlex.quote(os.environ.get(name, ''))}")
    print("$ source .venv/bin/activate")
    if device_count():
        step("tune on this GPU", tune_here)
    else:
        step(f"tune offline for {OFFLINE}", tune_offline)
        step("run the winners in Triton's interpreter", interpret_in_a_process)
    step("dispatch a call", dispatch)
    step("export a bundle and verify it", export)
    step("load the bundle", load)
    if device_count():
        step("compare with torch's SDPA backends", compare)
    print(f"\n== summary ({time.perf_counter() - started:.0f} s)")
    for title, told, seconds in summary:
        print(f"{title:<42}{seconds:5.0f} s   {told}")
    print("\nnow try: source .venv/bin/activate; flashgen --help")


if __name__ == "__main__":
    main()
