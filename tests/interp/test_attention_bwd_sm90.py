"""attention_bwd_sm90 on a stand-in for Gluon, against float64 autograd of the reference."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from random import Random

import gluon
import pytest
import torch
from gradients import (
    FLOOR,
    HALVED_AND_BIASED,
    Gradients,
    assert_no_weight_at_minus_infinity,
    errors,
    exact,
    given,
    with_minus_infinity,
)
from test_attention_fwd import COMBINED, TABLE_MASKS, random_mask, workload
from test_varlen import packed

from flashgen.build.compile import toolchain
from flashgen.build.inputs import Inputs, make_inputs
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import KernelSource, render
from flashgen.measure.check import FACTOR, reference
from flashgen.measure.check_gradients import gradients_of
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod

FAMILY = FAMILIES["attention_bwd_sm90"]
PLAIN, LOADED, EXCHANGED = "s2g4_shared", "s2g4_registers", "s2g4_exchanged"
THIRD, SHARED_THIRD = "s3g4_registers_third", "s2g4_shared_third"
BOTH = pytest.mark.parametrize(("dim", "config"), [(32, PLAIN), (32, THIRD), (160, EXCHANGED)])


def run(
    inputs: Inputs,
    source: KernelSource,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    dsinks: torch.Tensor | None = None,
) -> Gradients:
    """(dq, dk, dv) as (batch, heads, rows, dims), from NaN-filled buffers; out and LSE of the reference. The
    gradient of the sinks goes into `dsinks`, if that is given."""
    result, lse = reference(inputs.true(), inputs, torch.float32)
    out = inputs.bhsd(result.to(inputs.q.dtype)).contiguous()
    made = [torch.full(each.shape, math.nan, dtype=each.dtype) for each in (inputs.q, inputs.k, inputs.v)]
    env = inputs.gradient_environment(
        out, lse.contiguous(), (dout, *made), dlse, pointers=False, dsinks=dsinks
    )
    gluon.run(source, CallFacts(), env)
    dq, dk, dv = (inputs.bhsd(each) for each in made)
    return dq, dk, dv


def check(work: Workload, config: str = PLAIN, layout: str = "bhsd", with_lse: bool = False) -> None:
    """The kernels err at most twice as much as the definition that rounds where they round."""
    judge(make_inputs(work, "cpu", layout), work.spec, config, with_lse)


def judge(inputs: Inputs, spec: AttentionSpec, config: str = PLAIN, with_lse: bool = False) -> None:
    """`check` of given inputs."""
    dout, dlse = given(inputs, with_lse)
    source = render(spec.backward(with_lse), FAMILY.find(config), toolchain())
    wanted = exact(inputs, dout, dlse)
    found = run(inputs, source, dout, dlse)
    rounded = gradients_of(inputs, inputs.bhsd(dout), dlse, round_to=inputs.q.dtype)
    both = errors(found, wanted), errors(rounded, wanted)
    for name, error, allowed in zip(("dq", "dk", "dv"), *both, strict=True):
        limit = FACTOR * allowed + FLOOR[spec.dtype]
        assert error <= limit, f"{name}: relative error {error:.3g} is over {limit:.3g}"


LENGTHS = ((70, 200), (200, 70), (128, 128), (1, 1), (129, 65))


@pytest.mark.parametrize("config", [PLAIN, LOADED, THIRD])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
def test_causal_and_full(mask: Mask, lengths: tuple[int, int], config: str) -> None:
    q_len, k_len = lengths
    check(workload(64, dtype="bf16", mask=mask, q_len=q_len, k_len=k_len), config)


DIMS = ((16, 16), (32, 64), (72, 40), (96, 96), (128, 128), (128, 64))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], dtype: str) -> None:
    check(workload(*dims, dtype=dtype, heads=1, q_len=150, k_len=140), with_lse=True)


@pytest.mark.parametrize("dims", [(16, 16), (72, 40), (96, 96), (40, 112), (128, 32)], ids=str)
def test_a_third_warpgroup_computes_all_chunks_of_dq(dims: tuple[int, int]) -> None:
    check(workload(*dims, dtype="bf16", heads=1, q_len=150, k_len=140), SHARED_THIRD, with_lse=True)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.describe())
def test_causal_and_full_at_head_dim_256(mask: Mask, lengths: tuple[int, int]) -> None:
    q_len, k_len = lengths
    check(workload(256, dtype="bf16", mask=mask, heads=2, q_len=q_len, k_len=k_len), EXCHANGED)


WIDE = ((256, 256), (192, 128), (160, 160), (248, 200), (256, 40), (128, 256), (16, 256))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", WIDE, ids=str)
def test_head_dims_over_128(dims: tuple[int, int], dtype: str) -> None:
    """Of two, or as many parts of dq on their way out as fit."""
    check(workload(*dims, dtype=dtype, heads=1, q_len=150, k_len=140), EXCHANGED, with_lse=True)


@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask) -> None:
    for config in (PLAIN, THIRD):
        check(workload(16, dtype="bf16", mask=mask, batch=2, q_len=150, k_len=200), config)


@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_masks_at_head_dims_over_128(mask: Mask) -> None:
    check(workload(160, 16, dtype="bf16", mask=mask, heads=2, q_len=150, k_len=200), EXCHANGED)


@pytest.mark.parametrize("seed", range(8))
def test_random_combinations(seed: int) -> None:
    """Unions whose ranges of rows overlap, touch, are empty or out of order at run time, and lists."""
    random = Random(seed)
    mask = random_mask(random)
    q_len, k_len = random.choice(((140, 170), (130, 70), (265, 65), (140, 3)))
    for dim, config in ((16, PLAIN), (144, EXCHANGED)):
        check(workload(dim, 16, dtype="bf16", mask=mask, batch=2, heads=1, q_len=q_len, k_len=k_len), config)


def listed_of(mask: Mask, dim: int = 64, q_len: int = 300) -> tuple[Inputs, AttentionSpec]:
    """Of two sequences, 300 keys each."""
    work = workload(dim, dtype="bf16", mask=mask, batch=2, heads=4, kv_heads=2, q_len=q_len, k_len=300)
    return replace(make_inputs(work, "cpu"), mask=mask), work.spec


# Tiles that keep some blocks in part and others as a whole, of one sequence none in part; the last is ragged.
TWO = torch.tensor([[0] * 128 + [1] * 172, [0] * 40 + [1] * 100 + [2] * 160], dtype=torch.int32)


@pytest.mark.parametrize(("dim", "config"), [(64, PLAIN), (96, SHARED_THIRD), (128, PLAIN), (160, EXCHANGED)])
@pytest.mark.parametrize("q_len", [300, 170])
@pytest.mark.parametrize("causal", [False, True])
def test_lists_of_rows(causal: bool, q_len: int, dim: int, config: str) -> None:
    """Where rows are fewer than keys, the first tile of a sequence has a masked block alone."""
    mask = masks.document(TWO)
    judge(*listed_of(masks.causal() & mask if causal else mask, dim, q_len), config)


@BOTH
def test_lists_of_each_head(dim: int, config: str) -> None:
    kept = torch.rand((1, 4, 5, 5), generator=torch.Generator().manual_seed(0)) < 0.5
    kept[:, 1] = False
    judge(*listed_of(masks.block_sparse(kept, 64), dim), config)


RULES = [mod for entry in SCORE_MODS.values() for mod in entry.examples()]
RULES.append(score_mods.compose([score_mods.bias("bhqk"), score_mods.softcap(2.0), score_mods.softcap(1.0)]))


@pytest.mark.parametrize(("dim", "config"), [(16, PLAIN), (128, PLAIN), (256, EXCHANGED)])
@pytest.mark.parametrize("mod", RULES, ids=lambda m: m.describe())
def test_score_rules(mod: ScoreMod, dim: int, config: str) -> None:
    """At head_dim 128 the gradients of weights come later, at 256 weights pass from consumer to consumer."""
    window = masks.sliding_window(90, 30)
    check(workload(dim, dtype="bf16", mask=window, score_mod=mod, q_len=133, k_len=150), config)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads,kv_heads,group", [(6, 6, 4), (6, 2, 1), (5, 1, 4)])
def test_head_groups(heads: int, kv_heads: int, group: int, layout: str) -> None:
    for dims, operands in (((16, 16), "shared"), ((16, 16), "registers_third"), ((192, 128), "exchanged")):
        work = workload(*dims, dtype="bf16", batch=2, heads=heads, kv_heads=kv_heads, q_len=140, k_len=140)
        check(work, f"s3g{group}_{operands}", layout)


@BOTH
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("mask", [masks.sliding_window(70, 0), masks.causal()], ids=lambda m: m.describe())
def test_gradients_of_sinks(mask: Mask, with_lse: bool, dim: int, config: str) -> None:
    """Over more rows than one step of a sink's program has, which are no whole blocks; rows without a key
    have the sink as LSE, and a sink of -inf takes no weight and gets no gradient."""
    work = workload(dim, 16, dtype="fp16", mask=mask, batch=2, heads=4, kv_heads=2, q_len=150, k_len=140)
    inputs = replace(make_inputs(work, "cpu"), sinks=torch.tensor([3.0, -2.0, 0.5, -math.inf]))
    spec = replace(work.spec, sinks="fp32")
    dout, dlse = given(inputs, with_lse)
    if dlse is not None:
        dlse[:, 3, :10] = 0.0  # the LSE of those is -inf, and has no gradient
    *wanted, wanted_sinks = exact(inputs, dout, dlse)
    source = render(spec.backward(with_lse, sinks=True), FAMILY.find(config), toolchain())
    assert "ROWS_OF_A_SINK = tl.constexpr(4096)" in source.text
    for step in (128, 4096):
        dsinks = torch.full((4,), math.nan)
        text = source.text.replace("constexpr(4096)", f"constexpr({step})")
        found = run(inputs, replace(source, text=text), dout, dlse, dsinks)
        assert max(errors(found, tuple(wanted))) < 1e-3
        assert wanted_sinks[:3].abs().min() > 0.01
        torch.testing.assert_close(dsinks[:3].double(), wanted_sinks[:3], rtol=1e-3, atol=2e-3)
        assert dsinks[3] == 0


def test_small_weights_are_exchanged_with_all_their_digits() -> None:
    """The first key has nearly all the weight, another 2^-20, of which float16 has 4 bits, bf16 8."""
    work = workload(144, 16, dtype="bf16", mask=masks.full(), heads=1, kv_heads=1, q_len=100, k_len=70)
    inputs = make_inputs(work, "cpu")
    first = torch.arange(70)[:, None] == 0
    inputs = replace(inputs, q=inputs.q * 0.25 + 1, k=inputs.k * 0.25 + 14 / 12 * first.to(inputs.k.dtype))
    dout, _ = given(inputs)
    source = render(work.spec.backward(), FAMILY.find(EXCHANGED), toolchain())
    rounded = gradients_of(inputs, inputs.bhsd(dout), None, round_to=inputs.q.dtype)
    wanted = exact(inputs, dout)[1][:, :, 1:]
    lost, allowed = (
        float((made[1][:, :, 1:].double() - wanted).norm() / wanted.norm())
        for made in (run(inputs, source, dout), rounded)
    )
    assert lost <= 1.05 * allowed < 0.01, (lost, allowed)


def found_of(mask: Mask, q_len: int, k_len: int, dim: int, config: str) -> Gradients:
    work = workload(dim, dtype="bf16", mask=mask, q_len=q_len, k_len=k_len)
    inputs = make_inputs(work, "cpu")
    source = render(work.spec.backward(), FAMILY.find(config), toolchain())
    return run(inputs, source, given(inputs)[0])


@BOTH
def test_a_row_that_sees_no_key_has_no_gradient(dim: int, config: str) -> None:
    """The last 70 of 200 rows see keys."""
    dq, dk, dv = found_of(masks.causal(), 200, 70, dim, config)
    assert not dq[:, :, :130].any() and dq[:, :, 131:].any(-1).all()
    assert dk.isfinite().all() and dv.any(-1).all()


@pytest.mark.parametrize("dim", [16, 128])
def test_a_bias_of_minus_infinity_is_no_weight(dim: int) -> None:
    work = workload(dim, dtype="bf16", mask=masks.full(), score_mod=HALVED_AND_BIASED, q_len=70, k_len=140)
    inputs = with_minus_infinity(make_inputs(work, "cpu"))
    dout, dlse = given(inputs, with_lse=True)
    source = render(work.spec.backward(lse=True), FAMILY.find(PLAIN), toolchain())
    found = run(inputs, source, dout, dlse)
    assert max(errors(found, exact(inputs, dout, dlse))) < 1e-2
    assert_no_weight_at_minus_infinity(found)


@BOTH
def test_a_key_that_no_row_sees_has_no_gradient(dim: int, config: str) -> None:
    """The first row is at position 230 of 300, so the tile of the first 128 keys has no block to visit."""
    dq, dk, dv = found_of(masks.sliding_window(9, 0), 70, 300, dim, config)
    assert not dk[:, :, :221].any() and not dv[:, :, :221].any()
    assert dv[:, :, 221:].any(-1).all() and dq.isfinite().all()


# Packed sequences

Q_LENGTHS, K_LENGTHS = (70, 0, 5, 130, 64, 1, 0), (130, 9, 0, 200, 128, 40, 0)
"""Empty on either side and on both, of one row, whole blocks and tiles, more than one of each."""


def sequences(dim: int = 32, dim_v: int = 0, **options: object) -> tuple[Inputs, AttentionSpec]:
    options = {"dtype": "bf16", "heads": 2, "kv_heads": 1} | options
    return packed(Q_LENGTHS, K_LENGTHS, head_dim=dim, head_dim_v=dim_v or dim, **options)


@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_packed_sequences(mask: Mask) -> None:
    """A mask that would need lists is asked of each pair within its ranges."""
    judge(*sequences(mask=mask))


OF_TABLE = [masks.full(), masks.sliding_window(90, 30), masks.causal() & masks.document()]


@pytest.mark.parametrize("mask", OF_TABLE, ids=lambda m: m.describe())
def test_packed_sequences_at_head_dims_over_128(mask: Mask) -> None:
    judge(*sequences(160, 16, mask=mask), EXCHANGED)


DIMS_OF_PACKED = {(64, 64): "shared", (128, 128): "shared", (96, 40): "shared"}
DIMS_OF_PACKED |= {(64, 40): "registers_third", (80, 96): "shared_third"}
DIMS_OF_PACKED |= {(256, 256): "exchanged", (192, 128): "exchanged", (248, 16): "exchanged"}


@pytest.mark.parametrize("dims", DIMS_OF_PACKED, ids=str)
@pytest.mark.parametrize("group", [1, 4])
def test_packed_head_dims_and_groups(group: int, dims: tuple[int, int]) -> None:
    config = f"s2g{group}_{DIMS_OF_PACKED[dims]}"
    judge(*sequences(*dims, heads=6, kv_heads=3, mask=masks.causal()), config, with_lse=True)


@BOTH
def test_packed_score_rule(dim: int, config: str) -> None:
    judge(*sequences(dim, mask=masks.sliding_window(90, 30), score_mod=score_mods.bias("bhqk")), config)


def test_more_sequences_than_are_looked_for_at_once() -> None:
    random = Random(0)
    lengths = tuple(random.choice((0, 0, 1, 2, 17)) for _ in range(300))
    judge(*packed(lengths, lengths, dtype="bf16", heads=1, head_dim=16))


@pytest.mark.parametrize(("dim", "config"), [(64, PLAIN), (96, SHARED_THIRD), (128, PLAIN), (160, EXCHANGED)])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(9, 3)], ids=str)
def test_c05_a_neighbours_nan_changes_no_bit(mask: Mask, dim: int, config: str) -> None:
    """Every second sequence is made of NaN, and its gradient; dk and dv of the others keep their bits, dq,
    whose sums have no order, as many digits as these have."""
    inputs, spec = sequences(dim, mask=mask)
    dout, dlse = given(inputs, with_lse=True)
    assert dlse is not None
    source = render(spec.backward(lse=True), FAMILY.find(config), toolchain())
    clean = run(inputs, source, dout, dlse)
    ruined = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    dout, dlse = dout.clone(), dlse.clone()
    cu_q, cu_k = (each.tolist() for each in inputs.packed or ())
    own = {"q": torch.ones(cu_q[-1], dtype=torch.bool), "k": torch.ones(cu_k[-1], dtype=torch.bool)}
    for s in range(1, len(Q_LENGTHS), 2):
        of_q, of_k = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        ruined["q"][:, of_q] = dout[:, of_q] = math.nan
        dlse[:, :, of_q] = math.nan
        ruined["k"][:, of_k] = ruined["v"][:, of_k] = math.nan
        own["q"][of_q] = own["k"][of_k] = False
    dq, dk, dv = run(replace(inputs, **ruined), source, dout, dlse)
    assert own["q"].any() and not own["q"].all()
    torch.testing.assert_close(dq[:, :, own["q"]], clean[0][:, :, own["q"]], rtol=1e-2, atol=1e-6)
    for ours, theirs in zip((dk, dv), clean[1:], strict=True):
        assert torch.equal(ours[:, :, own["k"]], theirs[:, :, own["k"]])


@BOTH
def test_a_sequence_without_the_other_side_has_gradients_of_zero(dim: int, config: str) -> None:
    inputs, spec = sequences(dim, mask=masks.full())
    source = render(spec.backward(), FAMILY.find(config), toolchain())
    dq, dk, dv = run(inputs, source, given(inputs)[0])
    cu_q, cu_k = (each.tolist() for each in inputs.packed or ())
    without_keys, without_rows = slice(cu_q[2], cu_q[3]), slice(cu_k[1], cu_k[2])
    assert (dq[:, :, without_keys] == 0).all() and (dq != 0).any()
    assert (dk[:, :, without_rows] == 0).all() and (dv[:, :, without_rows] == 0).all()


@BOTH
def test_packed_gradients_of_sinks(dim: int, config: str) -> None:
    inputs, spec = sequences(dim, mask=masks.causal() & masks.sliding_window(9, 0), dtype="fp16")
    inputs = replace(inputs, sinks=torch.tensor([3.0, -2.0]))
    dout, dlse = given(inputs, with_lse=True)
    dsinks = torch.full((2,), math.nan)
    source = render(
        replace(spec, sinks="fp32").backward(lse=True, sinks=True), FAMILY.find(config), toolchain()
    )
    found = run(inputs, source, dout, dlse, dsinks)
    *wanted, wanted_sinks = exact(inputs, dout, dlse)
    assert max(errors(found, tuple(wanted))) < 1e-3
    torch.testing.assert_close(dsinks.double(), wanted_sinks, rtol=1e-3, atol=2e-3)


PACKED_MISTAKES = {
    "a place that is not needed is computed": (r"if start_n < k_len:.*", "if True:"),
    "sums are those of all tokens' blocks": (r"// BLOCK_M \+ batch\) \* BLOCK_M", "// BLOCK_M) * BLOCK_M"),
    "rows are copied from the tensor's end": (r"q_start \+ q_len, BLOCK_M", "q_start + q_len + 64, BLOCK_M"),
    "gradients of keys leave past their sequence": (
        r"(\n +outer, inner = box_at\(k_start \+ start_n, k_start \+ k_len)(, BLOCK_N\)\n.*(\n.*)?to_global)",
        r"\1 + 128\2",
    ),
}


@pytest.mark.parametrize(("dim", "config"), [(64, PLAIN), (160, EXCHANGED)])
@pytest.mark.parametrize("mistake", PACKED_MISTAKES)
def test_the_stand_in_sees_mistakes_in_packed_sequences(
    mistake: str, dim: int, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon, "PATIENCE_S", 2.0)
    inputs, spec = sequences(dim, mask=masks.full())
    source = render(spec.backward(), FAMILY.find(config), toolchain())
    text, changes = re.subn(*PACKED_MISTAKES[mistake], source.text)
    assert changes
    dout, _ = given(inputs)
    try:
        found = errors(run(inputs, replace(source, text=text), dout), exact(inputs, dout))
    except (AssertionError, RuntimeError):
        return
    assert not all(each < 1e-2 for each in found)


MISTAKES = {
    "queries are given back before they are multiplied for the last time": (
        r"(\n +dk, ds = warpgroup_mma_wait\(0[^\n]+)(\n +mbarrier.arrive\(q_empty[^\n]+)", r"\2\1", "arrive"
    ),
    "the output's gradients are used before dv is waited for": (
        r"dv, weights = warpgroup_mma_wait\(\d, ", "dv, weights = warpgroup_mma_wait(9, ", ""
    ),
    "the other half of the gradients of scores is not awaited": (
        r" +mbarrier.wait\(ds_full.index\(slot\)[^\n]+\n", "", "store of partition 1"
    ),
    "sums are overwritten before they have left": (r" +mbarrier.wait\(dq_empty[^\n]+\n", "", "store_wait"),
    "the mask at the end of the keys is forgotten": (r" & \(k_idx < k_len\)", "", ""),
    "one consumer frees a stage for both": (r"(dout_empty.index\(i\), count=)CONSUMERS", r"\g<1>1", ""),
}  # fmt: skip
"""What to replace by what in the rendered text, and which operation is slow where that is a race."""

MISTAKES_BESIDE_A_THIRD = {
    **{name: MISTAKES[name] for name in MISTAKES if "other half" not in name},
    "gradients of scores are overwritten before they were multiplied": (
        r" +mbarrier.wait\(ds_empty[^\n]+\n", "", "store of partition 2"
    ),
    "gradients of scores are multiplied before they are there": (
        r"(def consumer_of_rows[^$]+?) +mbarrier.wait\(ds_full[^\n]+\n", r"\1", "store of partition 1"
    ),
    "keys are overwritten before they have made dq": (
        r" +mbarrier.wait\(keys_read[^\n]+\n", "", "store of partition 2"
    ),
}  # fmt: skip

MISTAKES_OF_AN_EXCHANGE = {
    "queries are given back before they are multiplied for the last time": (
        r"(\n +dk_0, dk_128, ds = warpgroup_mma_wait\(0[^\n]+)(\n +mbarrier.arrive\(q_empty[^\n]+)",
        r"\2\1",
        "arrive",
    ),
    "weights are overwritten before they were taken": (
        r"( +)mbarrier.wait\(p_empty[^\n]+\n( +p_smem)", r"\2", "store of partition 1"
    ),
    "weights are taken before they are there": (
        r" +mbarrier.wait\(p_full[^\n]+\n", "", "store of partition 0"
    ),
    "gradients of scores are overwritten before they were multiplied": (
        r" +mbarrier.wait\(ds_empty[^\n]+\n", "", "store of partition 2"
    ),
    "gradients of scores are free after the first of their products": (
        r"if i == 3:\n( +mbarrier.arrive\(ds_empty)", r"if i == 0:\n\1", "store of partition 2"
    ),
    "sums are overwritten before they have left": (r" +mbarrier.wait\(dq_empty[^\n]+\n", "", "store_wait"),
    "keys are overwritten before they have made dq": (
        r" +mbarrier.wait\(keys_read[^\n]+\n", "", "store of partition 2"
    ),
    "values are overwritten before they have made gradients": (
        r"( +mbarrier.wait\(v_full, 0\)\n) +mbarrier.wait\(p_empty[^\n]+\n", r"\1", "store of partition 1",
    ),
    "the mask at the end of the keys is forgotten": (r" & \(k_idx < k_len\)", "", ""),
    "one consumer frees a stage for both": (r"(dout_empty.index\(i\), count=)CONSUMERS", r"\g<1>1", ""),
    "dv keeps the size of the lifted weights": (r"(dv_\d+) \* LOWER\)", r"\1)", ""),
}  # fmt: skip

LISTED_MISTAKES = {
    "whole blocks are read from the front": (r"place \+= 1 - 2 \* whole", "place += 1"),
    "the adder walks another list": (r"(def adder(?:.*\n)+? +listed = LISTS )", r"\1+ stride_ln "),
    "blocks kept in part are taken whole": (r"if \(whole == 0\) \| ragged", "if ragged"),
    "keys that do not exist are not masked in whole blocks": (
        r"\(whole == 0\) \| ragged",
        "whole == 0",
    ),
}


@pytest.mark.parametrize(("dim", "config"), [(64, PLAIN), (160, EXCHANGED)])
@pytest.mark.parametrize("mistake", LISTED_MISTAKES)
def test_the_stand_in_sees_mistakes_in_lists(
    mistake: str, dim: int, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon, "PATIENCE_S", 2.0)
    inputs, spec = listed_of(masks.document(TWO), dim)
    if "do not exist" in mistake:  # exp2(0 - LSE) of such a key is then infinite
        inputs = replace(inputs, q=inputs.q * 0 - 4, k=inputs.k * 0 + 4)
    source = render(spec.backward(), FAMILY.find(config), toolchain())
    text, changes = re.subn(*LISTED_MISTAKES[mistake], source.text)
    assert changes
    dout, _ = given(inputs)
    wanted = exact(inputs, dout)
    assert max(errors(run(inputs, source, dout), wanted)) < 3e-2
    try:
        found = errors(run(inputs, replace(source, text=text), dout), wanted)
    except AssertionError:
        return
    assert not all(each < 3e-2 for each in found)


@pytest.mark.parametrize(
    ("dim", "config", "mistake"),
    [
        *((dim, PLAIN, mistake) for dim in (64, 128) for mistake in MISTAKES),
        *((64, THIRD, mistake) for mistake in MISTAKES_BESIDE_A_THIRD),
        *((256, EXCHANGED, mistake) for mistake in MISTAKES_OF_AN_EXCHANGE),
    ],
    ids=str,
)
def test_the_stand_in_sees_mistakes(
    dim: int, config: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_config = {PLAIN: MISTAKES, THIRD: MISTAKES_BESIDE_A_THIRD, EXCHANGED: MISTAKES_OF_AN_EXCHANGE}
    pattern, wrong, slow = of_config[config][mistake]
    monkeypatch.setattr(gluon, "PATIENCE_S", 2.0)
    monkeypatch.setattr(gluon, "SLOW", {slow: 0.1})
    work = workload(dim, dtype="bf16", mask=masks.full(), heads=1, q_len=300, k_len=140)
    inputs = make_inputs(work, "cpu")
    if "end of the keys" in mistake:  # exp2(0 - LSE) of a key that does not exist is then infinite
        inputs = replace(inputs, q=inputs.q * 0 - 4, k=inputs.k * 0 + 4)
    source = render(work.spec.backward(), FAMILY.find(config), toolchain())
    text, changes = re.subn(pattern, wrong, source.text)
    assert changes
    dout, _ = given(inputs)
    try:
        found = errors(run(inputs, replace(source, text=text), dout), exact(inputs, dout))
    except AssertionError:
        return
    assert not all(each < 1e-2 for each in found)
