"""Weights dropped at random, in Triton's interpreter against the definition with what `Dropout.kept` says."""

from __future__ import annotations

import math
from dataclasses import replace

import gradients
import pytest
import torch
from kernels import ALIGNED, STRIDED, run, verdict
from test_attention_fwd import COMBINED, workload
from test_learned import learn

from flashgen.build.dropout import Dropout
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.reference import attention_reference
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import parse_score_mod

WHOLE, SPLIT = "m32n32w4s1_tma_heads", "m16n64w4s1k4_pointer_rows"
BACK = "m32n16w4s1_tma_heads"
SEED = -(2**40) - 7  # whose halves differ, and whose sign is set
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 39, "k_len": 90}


def dropping(probability: float = 0.3, **options: object) -> tuple[Inputs, Workload]:
    work = workload(**{**SIZES, **options})  # type: ignore[arg-type]
    work = replace(work, spec=replace(work.spec, dropout=True))
    return replace(make_inputs(work, "cpu"), dropout=Dropout(probability, torch.tensor([SEED]))), work


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
@pytest.mark.parametrize("mask", [masks.full(), masks.sliding_window(9, 0), COMBINED[0]], ids=str)
def test_outputs(mask: Mask, config: str) -> None:
    inputs, work = dropping(mask=mask)
    judged = verdict(inputs, work.spec, config)
    assert judged.ok, judged.reason


@pytest.mark.parametrize("facts", [ALIGNED, STRIDED])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_dtypes(dtype: str, facts: CallFacts) -> None:
    inputs, work = dropping(dtype=dtype)
    for config in (WHOLE, SPLIT):
        config = config.replace("tma", "pointer") if facts is STRIDED else config
        judged = verdict(inputs, work.spec, config, facts)
        assert judged.ok, judged.reason


def test_masks_of_documents_sinks_and_a_score_rule() -> None:
    """Blocks in an order of their own, and a sum that weights without a value are part of."""
    inputs, work = dropping(mask=masks.causal() & masks.document(), score_mod=score_mods.softcap(2.0))
    inputs = replace(inputs, sinks=torch.tensor([0.5, 2.0, -1.0, 3.0]))
    judged = verdict(inputs, replace(work.spec, sinks="fp32"), WHOLE)
    assert judged.ok, judged.reason


def test_packed_sequences_count_within_their_own() -> None:
    spec = AttentionSpec(16, 16, "fp32", masks.causal().rule, addressing="varlen", dropout=True)
    work = Workload(replace(spec, return_lse=True), 4, 4, 2, 70, 70, total_q=150, total_k=150)
    inputs = make_inputs(work, "cpu")
    for config in ("m32n32w4s1_tma_heads", "m16n64w4s1_pointer_rows"):
        judged = verdict(inputs, work.spec, config)
        assert judged.ok, judged.reason


@pytest.mark.parametrize("config", [BACK, f"{BACK}_fused", "m16n128w4s1_pointer_rows"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), COMBINED[0]], ids=str)
def test_gradients(mask: Mask, config: str) -> None:
    inputs, work = dropping(mask=mask)
    gradients.judge(inputs, work.spec, config, with_lse=True)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_gradients_of_a_score_rule(dtype: str) -> None:
    inputs, work = dropping(dtype=dtype, score_mod=score_mods.softcap(2.0), head_dim=24, head_dim_v=40)
    gradients.judge(inputs, work.spec, BACK)


def test_gradients_along_lists() -> None:
    inputs, work = dropping(mask=masks.causal() & masks.document(), q_len=90)
    gradients.judge(inputs, work.spec, BACK, with_lse=True)


@pytest.mark.parametrize("config", [BACK, f"{BACK}_fused", "m16n32w4s1_pointer_rows"])
def test_gradients_of_packed_sequences_and_their_sinks(config: str) -> None:
    """A sink's own weight is never dropped."""
    spec = AttentionSpec(16, 16, "fp32", masks.causal().rule, addressing="varlen", dropout=True)
    spec = replace(spec, return_lse=True, sinks="fp32")
    work = Workload(spec, 4, 4, 2, 70, 70, total_q=150, total_k=150)
    inputs, dsinks = make_inputs(work, "cpu"), torch.full((4,), math.nan)
    dout, dlse = gradients.given(inputs, with_lse=True)
    found = gradients.run(inputs, spec, config, dout=dout, dlse=dlse, dsinks=dsinks)
    *wanted, wanted_sinks = gradients.exact(inputs, dout, dlse)
    assert max(gradients.errors(found, tuple(wanted))) < 1e-5
    torch.testing.assert_close(dsinks.double(), wanted_sinks, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text", ['softcap(3.0), alibi, relative("fp32", 5)', 'bias("bhqk"), softcap(2.0)', 'bias("hk")']
)
def test_what_a_score_rule_learns(text: str) -> None:
    inputs, work = dropping(mask=masks.sliding_window(30, 5), score_mod=parse_score_mod(text))
    learn(work, inputs, BACK)


def test_a_probability_of_0_changes_no_weight_and_of_1_leaves_none() -> None:
    inputs, work = dropping(0.0)
    out, lse = run(inputs, work.spec, WHOLE)
    plain, plain_lse = run(replace(inputs, dropout=None), replace(work.spec, dropout=False), WHOLE)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    inputs, _ = dropping(1.0)
    for config in (WHOLE, SPLIT):
        out, lse = run(inputs, work.spec, config)
        assert not out.any()
        torch.testing.assert_close(lse, plain_lse)
    assert not any(each.any() for each in gradients.run(inputs, work.spec, BACK))


def test_every_seed_drops_others() -> None:
    inputs, work = dropping()
    outs = [
        run(replace(inputs, dropout=Dropout(0.3, torch.tensor([seed]))), work.spec, WHOLE)[0]
        for seed in (0, 1, 2**32, -(2**63))
    ]
    assert len({tuple(out.flatten().tolist()) for out in outs}) == 4


def test_the_lse_is_that_of_all_weights() -> None:
    inputs, work = dropping(0.5)
    _, lse = run(inputs, work.spec, WHOLE)
    _, exact = attention_reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask)
    torch.testing.assert_close(lse, exact, rtol=1e-5, atol=1e-5)
