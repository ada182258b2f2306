"""Sinks, in Triton's interpreter against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernels import ALIGNED, STRIDED, run, verdict
from test_attention_fwd import COMBINED, workload

from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.reference import attention_reference
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.masks import Mask

WHOLE, SPLIT = "m32n32w4s1_tma_heads", "m16n32w4s1k4_pointer_rows"
SINKS = ("fp32", "fp16", "bf16")


def inputs_of(mask: Mask, dtype: str = "fp32", sinks: str = "fp32") -> tuple[Inputs, AttentionSpec]:
    work = workload(mask=mask, dtype=dtype, batch=2, heads=4, kv_heads=2, q_len=20, k_len=90)
    work = replace(work, spec=replace(work.spec, sinks=sinks))
    return make_inputs(work, "cpu"), work.spec


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
@pytest.mark.parametrize(
    "mask", [masks.full(), masks.causal(), masks.sliding_window(9, 0), *COMBINED], ids=str
)
def test_masks(mask: Mask, config: str) -> None:
    inputs, spec = inputs_of(mask)
    judged = verdict(inputs, spec, config)
    assert judged.ok, judged.reason
    without = attention_reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask)[1]
    assert ((run(inputs, spec, config)[1] - without) > 0.1).any(), "the sink takes weight"


@pytest.mark.parametrize("facts", [ALIGNED, STRIDED])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("sinks", SINKS)
def test_dtypes(sinks: str, dtype: str, facts: CallFacts) -> None:
    inputs, spec = inputs_of(masks.causal(), dtype, sinks)
    for config in (WHOLE, SPLIT):
        config = config.replace("tma", "pointer") if facts is STRIDED else config
        judged = verdict(inputs, spec, config, facts)
        assert judged.ok, judged.reason


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
def test_rows_without_any_key_have_their_sink_as_lse(config: str) -> None:
    work = workload(q_len=8, k_len=3)
    spec = replace(work.spec, sinks="fp32")
    inputs = make_inputs(replace(work, spec=spec), "cpu")
    for sinks in ([2.0, -300.0], [-math.inf, 1e30]):
        out, lse = run(replace(inputs, sinks=torch.tensor(sinks)), spec, config)
        assert (out[:, :, :5] == 0).all()
        for head, sink in enumerate(sinks):
            torch.testing.assert_close(lse[:, head, :5], torch.full((1, 5), sink))


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
@pytest.mark.parametrize("size", [-math.inf, -200.0, 0.0, 60.0, 1e4])
def test_sinks_of_any_size(size: float, config: str) -> None:
    """From none at all to one that leaves the keys no weight."""
    inputs, spec = inputs_of(masks.causal())
    inputs = replace(inputs, sinks=torch.full((4,), size))
    out, lse = run(inputs, spec, config)
    q, k, v = (each.double() for each in (inputs.q, inputs.k, inputs.v))
    exact, exact_lse = attention_reference(q, k, v, mask=inputs.mask, sinks=inputs.sinks, dtype=torch.float64)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
def test_a_score_rule_does_not_see_the_sink(config: str) -> None:
    mod = score_mods.softcap(2.0)
    work = workload(score_mod=mod, q_len=20, k_len=90)
    spec = replace(work.spec, sinks="bf16")
    inputs = make_inputs(replace(work, spec=spec), "cpu")
    assert inputs.sinks.min() > mod.values[0], "or the cap would change nothing"
    judged = verdict(inputs, spec, config)
    assert judged.ok, judged.reason
