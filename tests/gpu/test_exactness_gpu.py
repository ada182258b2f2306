"""How much a maximum that may lag costs: errors beside those of attention that rounds with exact maxima."""

from __future__ import annotations

import pytest
import torch
from checked import DEVICE, Call, skip_unless_served

from flashgen.build.inputs import make_inputs
from flashgen.build.reference import attention_reference
from flashgen.measure.exactness import HARD, errors_of
from flashgen.spec import masks
from flashgen.spec.masks import Mask
from flashgen.tune.suites import make_workload

FAMILY = "attention_fwd_sm90"
CONFIGS = {
    64: ("c1x3n64s3g16p1_late_lazy_chain_lane_dynamic", "c3x1n64s4g4p1_late_lazy_optimistic_lane_dynamic"),
    128: ("c2x1n128s2g4p1_late_lazy_tree_lane_dynamic", "c3x1n64s3g4p1_early_lazy_optimistic_lane_dynamic"),
    256: ("c2x1n64s2g16p1_late_lazy_chain_lane_dynamic", "c2x1n64s2g16p1_early_lazy_optimistic_lane_dynamic"),
}
WORSE = 1.05


@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
@pytest.mark.parametrize("head_dim", CONFIGS)
def test_maxima_that_lag_cost_a_twentieth_at_most(head_dim: int, mask: Mask) -> None:
    work = make_workload(
        head_dim=head_dim, heads=8, kv_heads=8, q_len=2048, k_len=2048, mask=mask, dtype="bf16", batch=2
    )
    skip_unless_served(FAMILY, work.spec)
    for kind, of in HARD.items():
        inputs = of(make_inputs(work, DEVICE))
        told = {"mask": mask, "scale": inputs.scale}
        exact, _ = attention_reference(inputs.q, inputs.k, inputs.v, dtype=torch.float64, **told)
        rounded, _ = attention_reference(inputs.q, inputs.k, inputs.v, round_p_to=inputs.q.dtype, **told)
        allowed = WORSE * errors_of(rounded, exact).rms
        for config in CONFIGS[head_dim]:
            out = torch.empty_like(inputs.q)
            Call(inputs, work.spec, out, None, config, FAMILY)()
            assert errors_of(out, exact).rms <= allowed, (kind, config)
