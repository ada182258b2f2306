"""`flashgen explain`: which kernel a call would get, and why every other step was passed over."""

from __future__ import annotations

import click

from flashgen.cli.options import (
    Selection,
    db_option,
    find_device_to_look_at,
    gpu_options,
    workload_options,
)
from flashgen.cli.output import emit, json_option


@click.command()
@workload_options
@gpu_options
@db_option
@click.option(
    "--access",
    type=click.Choice(["aligned", "unit", "strided"]),
    help="The tensors of the call: aligned to 16 bytes, only unit innermost stride, or any strides.  "
    "[default: freshly allocated ones]",
)
@json_option
def explain(
    selection: Selection,
    gpu: int | None,
    target: str | None,
    url: str | None,
    access: str | None,
    as_json: bool,
) -> None:
    """Shows which kernel would run for a workload, and why not another. Nothing is compiled.

    Takes the workload options of `flashgen tune`. From Python, `flashgen.explain(q, k, v, ...)` says the same
    of one call.

    \b
    Examples:
      flashgen explain --head-dim 128 --heads 32 --kv-heads 8 --seq 4096 --mask causal
      flashgen explain --suite llama3-8b --target nvidia-h200
    """
    from flashgen.spec.attention import CallFacts

    workloads = selection.workloads()
    device = find_device_to_look_at(gpu, target)
    from flashgen import api  # torch: after what may be misspelt

    facts = None if access is None else CallFacts(access, tma=access == "aligned")
    found = [api.explain_workload(w, device.target, facts=facts, db=url) for w in workloads]
    data = {"target": device.target.to_json(), "workloads": [each.to_json() for each in found]}
    emit(data, as_json, lambda out: out.print("\n\n".join(map(str, found))))
