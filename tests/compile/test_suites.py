"""What the suites of masks, score rules and head dims tune compiles for the GPU that they are measured on."""

from __future__ import annotations

import pytest

from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.inputs import contiguous_facts
from flashgen.codegen.families import serving
from flashgen.codegen.source import render
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.target import find_target
from flashgen.tune.suites import suite_workloads

pytestmark = pytest.mark.compile

H200 = find_target("nvidia-h200")


def distinct(suite: str, *head_dims: int) -> list[Workload]:
    """A workload of each spec."""
    found: dict[AttentionSpec, Workload] = {}
    for workload in suite_workloads(suite):
        if workload.spec.head_dim in head_dims:
            found.setdefault(workload.spec, workload)
    return list(found.values())


@pytest.mark.parametrize(
    "workload",
    [*distinct("masks", 64), *distinct("head-dims", 80, 96, 112, 160, 192)],
    ids=lambda workload: f"{workload.spec.dims_label}-{workload.spec.mask.name}-{workload.spec.sinks}",
)
def test_the_default_that_a_call_gets_compiles_without_spills(workload: Workload) -> None:
    facts = contiguous_facts(workload)
    family = serving(workload.spec, H200, facts, workload.heads_per_kv)[0]
    assert family.name == "attention_fwd_sm90"
    config = family.default(workload.spec, H200, facts, workload.heads_per_kv, workload)
    artifact = compile_kernel(render(workload.spec, config, toolchain()), facts, H200)
    assert artifact.spill_bytes == 0
