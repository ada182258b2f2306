"""attention_fwd in Triton's interpreter against the reference that evaluates the same expressions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
import torch
from kernels import ALIGNED, STRIDED, run, verdict

from flashgen.build.inputs import Inputs, make_inputs
from flashgen.build.reference import attention_reference
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.masks import MASKS, Mask
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import SCORE_MODS, ScoreMod

CAUSAL = masks.causal()
SMALL = "m32n32w4s1"


def workload(
    head_dim: int = 16,
    head_dim_v: int | None = None,
    dtype: str = "fp32",
    mask: Mask = CAUSAL,
    score_mod: ScoreMod | None = None,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    q_len: int = 40,
    k_len: int = 40,
) -> Workload:
    spec = AttentionSpec(
        head_dim,
        head_dim_v or head_dim,
        dtype,
        mask.rule,
        None if score_mod is None else score_mod.rule,
        return_lse=True,
    )
    rules = [rule for rule in (mask, score_mod) if rule is not None]
    params = tuple(p for r in rules for p in zip((n for n, _ in r.rule.params), r.values, strict=True))
    return Workload(spec, batch, heads, kv_heads, q_len, k_len, params)


def check(work: Workload, config: str, facts: CallFacts = ALIGNED, layout: str = "bhsd") -> None:
    judged = verdict(make_inputs(work, "cpu", layout), work.spec, config, facts)
    assert judged.ok, judged.reason


TABLE_MASKS = [mask for entry in MASKS.values() for mask in entry.examples()]
INT64_LENGTHS = masks.key_padding(torch.ones(2, dtype=torch.int64)).rule  # int64, as torch counts
COMBINED = [
    masks.causal() & masks.key_padding(),
    masks.causal() & Mask(INT64_LENGTHS, (), (None,)),
    masks.causal() & masks.sliding_window(9, 0),
    ~masks.causal(),
    masks.sliding_window(3, 2) | masks.key_padding(),
    masks.sliding_window(2, 2) | ~masks.sliding_window(20, 20),
    masks.causal() & ~masks.sliding_window(5, 5) | masks.sliding_window(1, 0),
    masks.full() & ~masks.full(),
]
LENGTHS = ((40, 70), (70, 40), (1, 33), (33, 1))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", TABLE_MASKS + COMBINED, ids=lambda m: m.describe())
def test_masks(mask: Mask, lengths: tuple[int, int]) -> None:
    q_len, k_len = lengths
    check(workload(mask=mask, batch=2, q_len=q_len, k_len=k_len), f"{SMALL}_pointer_heads")


def random_mask(random: Random) -> Mask:
    """A combination of two to four masks of the table, some of them inverted."""
    made = random.choice(TABLE_MASKS)
    for _ in range(random.randint(1, 3)):
        other = random.choice(TABLE_MASKS)
        other = ~other if random.random() < 0.4 else other
        made = made & other if random.random() < 0.4 else made | other
    return made


@pytest.mark.parametrize("seed", range(30))
def test_random_combinations(seed: int) -> None:
    """Unions whose ranges overlap, touch, are empty or out of order at run time."""
    random = Random(seed)
    mask = random_mask(random)
    lengths = random.choice(((40, 170), (130, 70), (65, 65), (3, 140)))
    check(workload(mask=mask, batch=2, heads=1, q_len=lengths[0], k_len=lengths[1]), f"{SMALL}_pointer_heads")


@pytest.mark.parametrize(
    "mask", [masks.full(), masks.causal(), masks.sliding_window(9, 3)], ids=lambda m: m.describe()
)
@pytest.mark.parametrize(
    "mod", [m for e in SCORE_MODS.values() for m in e.examples()], ids=lambda m: m.describe()
)
def test_score_rules(mod: ScoreMod, mask: Mask) -> None:
    check(workload(mask=mask, score_mod=mod, q_len=33, k_len=50), f"{SMALL}_tma_rows")


DIMS = (
    (16, 16),
    (24, 40),
    (64, 64),
    (72, 8 * 5),
    (96, 96),
    (104, 64),
    (128, 128),
    (192, 128),
    (256, 256),
    (248, 16),
)


@pytest.mark.parametrize("loads", ["tma", "pointer"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], loads: str) -> None:
    """Every way a head dim falls into power-of-two chunks, the last one padded or not."""
    check(workload(*dims, heads=1, q_len=20, k_len=36), f"m16n32w4s1_{loads}_heads")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    "config", [f"{m}n{n}w4s1_tma_rows" for m, n in (("m16", 64), ("m64", 32), ("m64", 128))]
)
def test_dtypes_and_tiles(dtype: str, config: str) -> None:
    check(workload(64, dtype=dtype, q_len=70, k_len=131), config)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (6, 6), (6, 2), (5, 1), (12, 4)])
@pytest.mark.parametrize("order", ["heads", "rows"])
def test_head_groups(heads: int, kv_heads: int, order: str) -> None:
    work = workload(batch=2, heads=heads, kv_heads=kv_heads, q_len=35, k_len=35)
    check(work, f"{SMALL}_tma_{order}")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_layouts(layout: str, loads: str) -> None:
    check(workload(batch=2, heads=4, kv_heads=2, q_len=33), f"{SMALL}_{loads}_heads", layout=layout)


def with_tensors(work: Workload, **tensors: torch.Tensor) -> Inputs:
    return replace(make_inputs(work, "cpu"), **tensors)


def test_c12_fused_and_transposed_tensors_equal_contiguous_ones() -> None:
    work = workload(16, mask=masks.causal(), batch=2, heads=2, kv_heads=2, q_len=33, k_len=33)
    fused = torch.randn(2, 33, 3, 2, 16)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    views, dense = (
        with_tensors(work, q=q, k=k, v=v),
        with_tensors(work, q=q.contiguous(), k=k.contiguous(), v=v.contiguous()),
    )
    for loads in ("tma", "pointer"):
        out, lse = run(views, work.spec, f"{SMALL}_{loads}_heads")
        expected, expected_lse = run(dense, work.spec, f"{SMALL}_{loads}_heads")
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_c12_inner_stride_is_not_one() -> None:
    work = workload(16, heads=2, kv_heads=2, q_len=33, k_len=33)
    q, k, v = (torch.randn(1, 2, 16, 33).transpose(2, 3) for _ in range(3))
    inputs = with_tensors(work, q=q, k=k, v=v)
    assert verdict(inputs, work.spec, f"{SMALL}_pointer_heads", STRIDED).ok


def test_c13_broadcast_keys() -> None:
    work = workload(16, batch=3, heads=2, kv_heads=2, q_len=5, k_len=40)
    k, v = (torch.randn(1, 2, 40, 16).expand(3, 2, 40, 16) for _ in range(2))
    judged = verdict(with_tensors(work, k=k, v=v), work.spec, f"{SMALL}_pointer_heads")
    assert judged.ok, judged.reason


def test_c09_wide_strides_give_the_same_bits() -> None:
    work = workload(24, 40, mask=masks.sliding_window(9, 3), q_len=33, k_len=70)
    inputs = make_inputs(work, "cpu")
    narrow = run(inputs, work.spec, f"{SMALL}_pointer_heads")
    wide = run(inputs, work.spec, f"{SMALL}_pointer_heads", CallFacts("strided", tma=False, wide=True))
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


def test_c01_row_without_a_key_is_zero() -> None:
    keep = torch.ones(1, 40, dtype=torch.bool)
    keep[0, :] = False
    work = workload(mask=masks.causal() & masks.key_padding("keep"))
    inputs = replace(make_inputs(work, "cpu"), mask=masks.causal() & masks.key_padding(keep))
    out, lse = run(inputs, work.spec, f"{SMALL}_tma_heads")
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("config", [f"{SMALL}_pointer_heads", "m16n32w4s1k4_tma_rows"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(40, 9)], ids=str)
def test_a_bias_of_minus_infinity_is_no_weight(mask: Mask, config: str) -> None:
    """Also of a whole row, and of one that sees keys in its last block alone; a cap comes before it."""
    table = torch.randn(1, 2, 40, 90, generator=torch.Generator().manual_seed(2))
    table[0, 0, 3] = table[0, 1, 20:] = -math.inf
    table[0, 0, 30:36, :85] = -math.inf
    table[table.abs() > 1.5] = -math.inf
    mod = score_mods.softcap(2.0).then(score_mods.bias(table))
    work = workload(mask=mask, score_mod=mod, q_len=40, k_len=90)
    inputs = replace(make_inputs(work, "cpu"), score_mod=mod)
    out, lse = run(inputs, work.spec, config)
    assert (out[0, 0, 3] == 0).all() and lse[0, 0, 3] == -math.inf
    assert (out[0, 1, 20:] == 0).all() and (lse[0, 1, 20:] == -math.inf).all()
    expected, expected_lse = attention_reference(inputs.q, inputs.k, inputs.v, mask=mask, score_mod=mod)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [f"{SMALL}_pointer_heads", "m16n32w4s1k4_tma_rows"])
@pytest.mark.parametrize("shape", [(2, 2, 33, 50), (1, 1, 1, 50), (2, 1, 33, 1)], ids=str)
def test_c36_a_rule_reads_within_its_tensor(shape: tuple[int, ...], config: str) -> None:
    """NaN behind each row, and behind the last one, comes into no result."""
    padded = torch.full((shape[0], shape[1], shape[2] + 40, shape[3] + 70), math.nan)
    table = padded[:, :, : shape[2], : shape[3]]
    table.normal_(generator=torch.Generator().manual_seed(4))
    mod = score_mods.bias(table)
    work = workload(mask=masks.full(), score_mod=mod, batch=2, q_len=33, k_len=50)
    inputs = replace(make_inputs(work, "cpu"), score_mod=mod)
    out, lse = run(inputs, work.spec, config)
    expected, expected_lse = attention_reference(inputs.q, inputs.k, inputs.v, score_mod=mod)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths,expected_empty", [((5, 2), 3), ((2, 5), 0)])
def test_c02_causal_is_bottom_right(lengths: tuple[int, int], expected_empty: int) -> None:
    work = workload(q_len=lengths[0], k_len=lengths[1])
    inputs = make_inputs(work, "cpu")
    out, lse = run(inputs, work.spec, f"{SMALL}_pointer_heads")
    assert (lse[0, 0] == -math.inf).sum() == expected_empty
    assert (out[0, 0, :expected_empty] == 0).all()
    judged = verdict(inputs, work.spec, f"{SMALL}_tma_heads")
    assert judged.ok, judged.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c03_scores_far_below_any_sentinel(dtype: torch.dtype) -> None:
    """Logits of -1.15e7 are ordinary numbers, not masked ones: the average of V comes out."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    work = workload(128, dtype=name, mask=masks.causal(), heads=1, q_len=33, k_len=33)
    q, k = torch.full((1, 1, 33, 128), 300.0, dtype=dtype), torch.full((1, 1, 33, 128), -300.0, dtype=dtype)
    inputs = replace(with_tensors(work, q=q, k=k), scale=1.0)
    out, lse = run(inputs, work.spec, f"{SMALL}_tma_heads")
    means = torch.cumsum(inputs.v[0, 0].float(), 0) / torch.arange(1, 34)[:, None]
    assert torch.isfinite(lse).all() and (lse < -1.1e7).all()
    torch.testing.assert_close(out[0, 0].float(), means, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mask", TABLE_MASKS, ids=lambda m: m.describe())
def test_c01_c02_c03_c09_c12_c13_of_each_mask(mask: Mask) -> None:
    """Sequences that share their keys, in views of one tensor; of the second no key is kept, and scores are
    as far below any sentinel as fp16 goes. Offsets of 64 bits give the same bits.
    """
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[1] = False
    work = workload(mask=mask & masks.key_padding("keep"), dtype="fp16", batch=2, q_len=45)
    made = make_inputs(workload(mask=mask, dtype="fp16", batch=2, q_len=45), "cpu")
    q = torch.full((2, 45, 3, 16), 300.0, dtype=torch.float16)[:, :, :2].transpose(1, 2)
    shared = torch.full((1, 40, 2, 16), -300.0, dtype=torch.float16)
    shared[:, :, 1].normal_(generator=torch.Generator().manual_seed(5))
    k, v = (shared[:, :, i : i + 1].transpose(1, 2).expand(2, 1, 40, 16) for i in (0, 1))
    inputs = replace(made, q=q, k=k, v=v, mask=made.mask & masks.key_padding(keep), scale=8.0)
    out, lse = run(inputs, work.spec, f"{SMALL}_pointer_heads", STRIDED)
    exact, exact_lse = attention_reference(q, k, v, mask=made.mask, scale=8.0)
    torch.testing.assert_close(out[0].float(), exact[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse[0], exact_lse[0], atol=2.0, rtol=1e-6)
    assert (lse[0][lse[0].isfinite()] < -1.1e7).all() and (out[0][lse[0] == -math.inf] == 0).all()
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    if mask.rule == masks.causal().rule:
        assert (lse[0] == -math.inf).sum() == 2 * 5  # of both heads, rows above the first key
    wide = run(inputs, work.spec, f"{SMALL}_pointer_heads", CallFacts("strided", tma=False, wide=True))
    assert torch.equal(out, wide[0]) and torch.equal(lse, wide[1])


def test_c16_softcap_comes_before_the_mask() -> None:
    """A cap applied after the mask would bring the future back at -cap."""
    work = workload(score_mod=score_mods.softcap(1.0), q_len=33, k_len=33)
    inputs = make_inputs(work, "cpu")
    before, _ = run(inputs, work.spec, f"{SMALL}_tma_heads")
    v = inputs.v.clone()
    v[:, :, -1] = 1e4  # only the last row sees the last key
    after, _ = run(replace(inputs, v=v), work.spec, f"{SMALL}_tma_heads")
    assert torch.equal(before[:, :, :-1], after[:, :, :-1]) and not torch.equal(
        before[:, :, -1], after[:, :, -1]
    )


def test_c18_the_cap_is_not_ignored() -> None:
    outs = []
    for cap in (5.0, 50.0):
        work = workload(16, score_mod=score_mods.softcap(cap), q_len=33, k_len=33)
        inputs = make_inputs(work, "cpu")
        outs.append(run(replace(inputs, q=inputs.q * 10), work.spec, f"{SMALL}_pointer_heads")[0])
    plain = workload(16, q_len=33, k_len=33)
    inputs = make_inputs(plain, "cpu")
    outs.append(run(replace(inputs, q=inputs.q * 10), plain.spec, f"{SMALL}_pointer_heads")[0])
    assert all((a - b).abs().max() > 1e-3 for a, b in itertools.combinations(outs, 2))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scale_that_is_not_positive(scale: float) -> None:
    work = workload(q_len=33, k_len=40)
    spec = replace(work.spec, positive_scale=False)
    judged = verdict(replace(make_inputs(work, "cpu"), scale=scale), spec, f"{SMALL}_tma_heads")
    assert judged.ok, judged.reason


def test_neighbours_memory_is_not_read_into_a_result() -> None:
    """NaN around every sequence and past the head dim changes nothing."""
    work = workload(24, heads=2, kv_heads=2, q_len=33, k_len=35, mask=masks.full())
    inputs = make_inputs(work, "cpu")
    padded = {}
    for name in ("q", "k", "v"):
        tensor = getattr(inputs, name)
        whole = torch.full((tensor.shape[0], tensor.shape[1] + 2, tensor.shape[2] + 70, 32), math.nan)
        whole[:, 1:-1, 30:-40, :24] = tensor
        padded[name] = whole[:, 1:-1, 30:-40, :24]
    for loads in ("tma", "pointer"):
        out, lse = run(replace(inputs, **padded), work.spec, f"{SMALL}_{loads}_heads")
        expected, expected_lse = attention_reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


NAMES = ("start_n", "scale", "rows", "tl", "acc", "keep", "lo", "full_hi", "heads", "row_tiles", "p")


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_may_use_the_kernels_own_names(name: str) -> None:
    """What a rule declares hides nothing of the kernel's, and the other way round."""
    window = Mask(Rule.parse("mask", f"q_pos - k_idx <= {name} where {name}: i32"), (3,))
    check(workload(mask=window, q_len=40, k_len=70), f"{SMALL}_pointer_heads")
    keep = Rule.parse("mask", f"{name}[batch, k_idx] where {name}: i1")
    check(workload(mask=Mask(keep, (), (None,)), batch=2, q_len=9, k_len=70), f"{SMALL}_tma_heads")


def test_reads_of_different_elements_stay_apart() -> None:
    text = "(k_idx < ends[batch + 2]) & (k_idx >= ends[batch * 2]) where ends: i32"
    ends = torch.tensor([4, 30, 20, 60], dtype=torch.int32)
    mask = Mask(Rule.parse("mask", text), (), (ends,))
    work = workload(mask=mask, batch=2, q_len=20, k_len=70)
    q, k, v = (torch.randn(2, heads, rows, 16) for heads, rows in ((2, 20), (1, 70), (1, 70)))
    out, _ = run(Inputs(q, k, v, mask, None, 0.25, "bhsd", "full"), work.spec, f"{SMALL}_pointer_heads")
    expected, _ = attention_reference(q, k, v, mask=mask, scale=0.25)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [1e-3, 1.0, 1e4, 1e6, 1e8])
def test_softcap_is_exact_for_any_cap(cap: float) -> None:
    """A large cap is nearly the identity: tanh near 0 must keep its digits."""
    work = workload(64, score_mod=score_mods.softcap(cap), q_len=33, k_len=50)
    inputs = make_inputs(work, "cpu")
    out, lse = run(inputs, work.spec, f"{SMALL}_tma_heads")
    expected, expected_lse = attention_reference(
        inputs.q, inputs.k, inputs.v, mask=inputs.mask, score_mod=inputs.score_mod, dtype=torch.float64
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which tells
@pytest.mark.parametrize("bad", ["q nan", "q inf", "q overflows", "k nan", "k inf"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(9, 3)], ids=str)
@pytest.mark.parametrize("mod", [None, score_mods.softcap(2.0)], ids=str)
def test_scores_that_are_nan_or_infinite_come_out_as_in_the_reference(
    bad: str, mask: Mask, mod: ScoreMod | None
) -> None:
    work = workload(mask=mask, score_mod=mod, heads=1, q_len=40, k_len=70)
    inputs = make_inputs(work, "cpu")
    q, k = inputs.q.abs() + 10, inputs.k.abs() + 10
    row = {"nan": math.nan, "inf": math.inf, "overflows": 3e38}[bad[2:]]
    (q if bad[0] == "q" else k)[0, 0, 35] = row
    inputs = replace(inputs, q=q, k=k)
    out, lse = run(inputs, work.spec, f"{SMALL}_pointer_heads")
    expected, expected_lse = attention_reference(q, k, inputs.v, mask=mask, score_mod=mod)
    assert expected_lse.isnan().any() == (mod is None or "nan" in bad)
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, equal_nan=True, atol=1e-4, rtol=1e-4)
