"""Gradients of what score rules read: attention_bwd in Triton's interpreter against float64 autograd."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gradients import FLOOR, exact_of_rule, given, learned_by, run
from test_attention_fwd import workload

from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.reference import gradients_reference
from flashgen.measure.check import FACTOR
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod, parse_score_mod

SMALL = "m32n32w4s1"


OWN_ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def learn(work: Workload, inputs: Inputs, config: str = f"{SMALL}_tma_rows") -> list[torch.Tensor]:
    """The gradients of all floats that the rule reads, held to float64."""
    dout, dlse = given(inputs, with_lse=True)
    learned = learned_by(inputs, work)
    run(inputs, work.spec, config, dout=dout, dlse=dlse, learned=learned)
    mod = inputs.score_mod
    names = [operand.name for operand in mod.rule.operands]
    places = [names.index(name) for name in learned.accumulators]
    found, wanted = learned.gradients(), exact_of_rule(inputs, dout, dlse)
    rules = {"mask": inputs.mask, "score_mod": mod, "scale": inputs.scale, "learned": places}
    rules["dropout"] = inputs.dropout
    given_all = (*inputs.true(), inputs.bhsd(dout), dlse)
    _, _, _, *rounded = gradients_reference(*given_all, round_to=inputs.q.dtype, **rules)
    for place, ours, theirs, alike in zip(places, found, wanted, rounded, strict=True):
        tensor = mod.tensors[place]
        assert ours.dtype == tensor.dtype and ours.shape == tensor.shape
        error, allowed = (float((each.double() - theirs).norm() / theirs.norm()) for each in (ours, alike))
        factor = FACTOR if ours.numel() > 16 else 2 * FACTOR  # of few numbers an error may be small by chance
        limit = factor * allowed + FLOOR[work.spec.dtype] + OWN_ROUNDING.get(ours.dtype, 0.0)
        assert error <= limit, f"d_{names[place]}: relative error {error:.3g} is over {limit:.3g}"
    return list(found)


LEARNING = [mod for entry in SCORE_MODS.values() for mod in entry.examples() if mod.rule.operands]
SEVERAL = [
    parse_score_mod(text)
    for text in (
        "softcap(3.0), alibi, scale(0.5)",
        'bias("bhqk"), softcap(2.0), softcap(1.0)',
        'alibi, bias("bk", "bf16"), relative("fp32", 5)',
        'bias("hq"), bias("hk"), scale(-2.0)',
    )
]


# Without a mask a kernel has both its loops; in a narrow window all blocks are masked, and most not visited.
@pytest.mark.parametrize(
    ("mod", "mask"),
    [(mod, masks.full()) for mod in LEARNING + SEVERAL]
    + [(mod, masks.sliding_window(9, 3)) for mod in SEVERAL],
    ids=lambda each: each.describe(),
)
def test_rules_of_the_table(mod: ScoreMod, mask: Mask) -> None:
    work = workload(mask=mask, score_mod=mod, batch=2, heads=4, kv_heads=2, q_len=33, k_len=50)
    learn(work, make_inputs(work, "cpu"))


OWN = {
    "of the key head": "score + table[kv_head, abs(q_idx - k_idx)] where table: fp32",
    "two reads": "score * (1 + w[head, q_idx]) + w[head, k_idx] where w: fp32",
    "two reads of pairs": "score + t[batch, head, q_idx, k_idx] * t[batch, head, k_idx, q_idx] where t: fp32",
    "a read by another": "score + t[head, ids[batch, k_idx]] where t: bf16, ids: i32",
    "pairs by others": "score + t[ids[batch, q_idx], ids[batch, k_idx]] where t: fp32, ids: i32",
    "the score left out": "t[head, q_idx] * u[k_idx] where t: fp32, u: fp16",
    "functions": "score + exp(t[head]) * sqrt(1 + u[q_idx] * u[q_idx]) / (2 + k_idx) where t: fp32, u: fp32",
    "a choice": "where(q_pos >= k_idx, score + t[head], score * t[head]) where t: fp32",
    "q_pos alone": "score * t[batch, head, max(q_pos, 0), k_idx] where t: fp32",
    "a step": "score + floor(t[head]) + t[head] where t: fp32",
}


@pytest.mark.parametrize("text", OWN.values(), ids=OWN.keys())
def test_rules_of_users(text: str) -> None:
    rule = Rule.parse("score", text)
    work = workload(score_mod=ScoreMod(rule, (), (None,) * len(rule.operands)), batch=2, heads=4, kv_heads=2,
                    q_len=40, k_len=40, mask=masks.sliding_window(20, 9))  # fmt: skip
    inputs = make_inputs(workload(batch=2, heads=4, kv_heads=2, q_len=40, k_len=40), "cpu")
    generator = torch.Generator().manual_seed(2)
    tensors = [
        torch.randint(0, 40, (2, 40), generator=generator, dtype=torch.int32)
        if operand.dtype == "i32"
        else torch.randn((2, 4, 40, 40)[: operand.rank] if operand.rank > 2 else (40,) * operand.rank,
                         generator=generator).to(DTYPES[operand.dtype])
        for operand in rule.operands
    ]  # fmt: skip
    inputs = replace(inputs, mask=masks.sliding_window(20, 9), score_mod=ScoreMod(rule, (), tuple(tensors)))
    learn(work, inputs, f"{SMALL}_pointer_heads")


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("heads,kv_heads", [(2, 2), (4, 2)])
def test_head_dims_dtypes_and_groups(head_dim: int, dtype: str, heads: int, kv_heads: int) -> None:
    mod = parse_score_mod('alibi, bias("hqk"), bias("k", "fp16")')
    work = workload(head_dim, dtype=dtype, score_mod=mod, batch=1, heads=heads, kv_heads=kv_heads,
                    q_len=40, k_len=70, mask=masks.causal())  # fmt: skip
    learn(work, make_inputs(work, "cpu"), "m32n32w4s1_pointer_rows")


def test_minus_infinity_and_rows_without_keys_give_no_nan() -> None:
    """In single pairs, a row and a column, whatever the gradients of that row's output and LSE are."""
    mod = score_mods.compose([score_mods.scale(0.5), score_mods.bias("hqk"), score_mods.alibi()])
    mask = masks.causal() & masks.key_padding("keep")
    work = workload(mask=mask, score_mod=mod, batch=2, q_len=40, k_len=40)
    inputs = make_inputs(work, "cpu")
    bias, slopes = inputs.score_mod.tensors
    bias = torch.randn(bias.shape, generator=torch.Generator().manual_seed(3))
    bias[..., 3, 2] = bias[..., 11, :] = bias[..., :, 20] = -math.inf
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[0] = keep[1, :7] = False
    inputs = replace(inputs, mask=masks.causal() & masks.key_padding(keep),
                     score_mod=ScoreMod(mod.rule, mod.values, (bias, slopes)))  # fmt: skip
    d_bias, d_slopes = learn(work, inputs)
    assert not d_bias[..., 3, 2].any() and not d_bias[..., 11, :].any() and not d_bias[..., 20].any()
    assert not d_bias[..., :7, :].any() and d_bias[..., 30, 7:20].all() and d_slopes.all()


@pytest.mark.parametrize("read", ["t[head]", "t[k_idx]", "t[q_pos - k_idx + 40]", "t[q_pos + k_idx]"])
def test_slopes_of_dropped_pairs_do_not_count(read: str) -> None:
    """Where they are infinite, as on the diagonal here, nothing times them is no number."""
    mask = Mask(Rule.parse("mask", "q_pos > k_idx"), (), ())
    found = []
    for least in (0, 1):
        rule = Rule.parse("score", f"score + {read} / max(q_pos - k_idx, {least}) where t: fp32")
        tensor = torch.randn(80, generator=torch.Generator().manual_seed(4))
        inputs = make_inputs(workload(batch=2, q_len=40, k_len=40), "cpu")
        inputs = replace(inputs, mask=mask, score_mod=ScoreMod(rule, (), (tensor,)))
        work = workload(mask=mask, score_mod=ScoreMod(rule, (), (None,)), batch=2, q_len=40, k_len=40)
        dout, dlse = given(inputs, with_lse=True)
        learned = learned_by(inputs, work)
        run(inputs, work.spec, f"{SMALL}_pointer_heads", dout=dout, dlse=dlse, learned=learned)
        found += learned.gradients()
    assert found[0].isfinite().all() and found[0].any() and torch.equal(*found)


def test_wide_strides_give_the_same_bits() -> None:
    work = workload(
        score_mod=parse_score_mod('alibi, bias("hqk"), relative("fp32", 9)'), batch=2, q_len=40, k_len=70
    )
    inputs, found = make_inputs(work, "cpu"), []
    for facts in (CallFacts(), CallFacts("strided", tma=False, wide=True)):
        learned = learned_by(inputs, work)
        run(inputs, work.spec, f"{SMALL}_pointer_heads", facts, learned=learned)
        found.append(learned.gradients())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
