"""The dispatcher: what a key holds, what is resolved once, and what every call still compares."""

from __future__ import annotations

import logging
import math
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dispatch_parts import LoadedKernel, Loads, Parts, Records, make, refused, tensors
from sample_records import H200, config, record, workload

import flashgen
from flashgen.build.arguments import FACTS, flatten
from flashgen.build.dropout import Dropout
from flashgen.build.quantized import E4M3
from flashgen.build.reference import attention_reference
from flashgen.codegen.abi import environment_names
from flashgen.codegen.families import find_family, serving
from flashgen.errors import (
    CompileFailed,
    DoesNotFit,
    InvalidArgument,
    LaunchFailed,
    NoTunedKernel,
    StoreError,
    Unsupported,
)
from flashgen.runtime import dispatcher as module
from flashgen.runtime.checks import Given
from flashgen.runtime.explain import Explanation, explain_workload
from flashgen.runtime.misses import read_misses
from flashgen.runtime.policy import Request, Source
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import ScoreMod
from flashgen.spec.target import Target, find_target

TMA, POINTER = config(loads="tma"), config(loads="pointer")
CAUSAL = masks.causal()


def last_env(parts: Parts) -> dict[str, object]:
    kernel = parts.loads.kernels[-1]
    names = environment_names(kernel.request.workload.spec)
    return dict(zip(names, kernel.launches[-1], strict=True))


def explain(parts: Parts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Explanation:
    call = module.check(q, k, v, CAUSAL, None, None, "bhsd", False)
    return parts.dispatcher.explain(call, q.get_device())


# A hit


def test_a_second_call_of_the_kind_resolves_and_loads_nothing() -> None:
    parts = make([record(conf=TMA)])
    for _ in range(3):
        out = parts.call(*tensors(q_len=4096, batch=1), CAUSAL)
    assert out.shape == (1, 32, 4096, 128)
    assert parts.dispatcher.resolves == parts.records.asked == 1
    assert parts.loads.launched == [TMA.name] * 3


def test_the_kernel_gets_the_calls_own_sizes_addresses_and_scale() -> None:
    parts = make()
    q, k, v = tensors(batch=3, q_len=50, k_len=70)
    parts.call(q, k, v, CAUSAL)
    q2, k2, v2 = tensors(batch=4, q_len=60, k_len=100)
    out, lse = parts.call(q2, k2, v2, CAUSAL, scale=0.5, return_lse=True)
    env = last_env(parts)
    assert (env["batch"], env["q_len"], env["k_len"], env["scale"]) == (4, 60, 100, 0.5)
    assert (env["q"], env["k"], env["v"]) == (q2.data_ptr(), k2.data_ptr(), v2.data_ptr())
    assert (env["out"], env["lse"]) == (out.data_ptr(), lse.data_ptr())
    assert lse.shape == (4, 32, 60) and lse.dtype == torch.float32 and lse.is_contiguous()


def test_c20_k_len_from_1_to_4096_makes_at_most_16_resolves() -> None:
    parts = make()
    q, k, v = tensors(batch=1, q_len=1, k_len=4096)
    for k_len in range(1, 4097):
        parts.call(q, k[:, :, :k_len], v[:, :, :k_len], CAUSAL)
    assert parts.dispatcher.resolves <= 16
    # One config for all of them; from 2,049 keys on, in two parts, since 32 rows leave the GPU idle.
    whole, in_parts = parts.loads.asked
    assert whole.replace("p1_", "p1k2_") == in_parts
    assert [len(kernel.launches) for kernel in parts.loads.kernels] == [2048, 2048]


def test_a_tensor_is_no_scale_because_reading_it_would_wait_for_the_gpu() -> None:
    with pytest.raises(InvalidArgument, match=r"scale=a tensor of torch.float32 \(\).*scale.item\(\)"):
        make().call(*tensors(), scale=torch.tensor(0.1))


@pytest.mark.parametrize(
    ("change", "resolved"),
    [
        ({}, 1),
        ({"q_len": 63}, 1),  # the same bucket
        ({"q_len": 65}, 2),
        ({"batch": 5}, 2),
        ({"heads": 16}, 2),
        ({"kv_heads": 4}, 2),
        ({"head_dim": 64}, 2),
        ({"head_dim_v": 64}, 2),
        ({"dtype": torch.float16}, 2),
    ],
)
def test_the_key_holds_buckets_of_lengths_and_everything_else_exactly(
    change: dict[str, int], resolved: int
) -> None:
    parts = make()
    parts.call(*tensors(), CAUSAL)
    parts.call(*tensors(**change), CAUSAL)  # type: ignore[arg-type]
    assert parts.dispatcher.resolves == resolved


@pytest.mark.parametrize(
    "change",
    [
        {"mask": masks.full()},
        {"mask": masks.causal("top_left")},
        {"score_mod": score_mods.softcap(20.0)},
        {"scale": -0.1},
        {"return_lse": True},
    ],
)
def test_rules_sign_of_the_scale_and_outputs_are_in_the_key(change: dict[str, object]) -> None:
    parts = make()
    parts.call(*tensors(), mask=CAUSAL)
    parts.call(*tensors(), **({"mask": CAUSAL} | change))
    assert parts.dispatcher.resolves == 2


def test_numbers_of_rules_are_in_the_key_by_their_log2_and_reach_the_kernel_exactly() -> None:
    parts = make()
    for left in (1000, 1023, 1030, 100):
        parts.call(*tensors(), masks.sliding_window(left, 0), score_mod=score_mods.softcap(30.0))
        env = last_env(parts)
        assert (env["param.left"], env["param.right"], env["param.cap"]) == (left, 0, 30.0)
    assert parts.dispatcher.resolves == 2


def test_names_and_equal_masks_made_anew_are_one_kind() -> None:
    parts = make()
    for mask in ("causal", masks.causal(), CAUSAL, CAUSAL & masks.full(), CAUSAL & masks.causal()):
        parts.call(*tensors(), mask)
    assert parts.dispatcher.resolves == 1


def test_fp32_precision_follows_torchs_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make()
    for setting, wanted in (("highest", "ieee"), ("high", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(setting)
        try:
            parts.call(*tensors(dtype=torch.float32), CAUSAL)
        finally:
            torch.set_float32_matmul_precision("highest")
        used = [kernel for kernel in parts.loads.kernels if kernel.launches][-1]
        if setting == "high":
            assert used.request.workload.spec.fp32_precision == wanted
    assert parts.dispatcher.resolves == 2
    assert [k.request.workload.spec.fp32_precision for k in parts.loads.kernels] == ["ieee", "tf32"]


def test_the_table_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PLANS", 4)
    parts = make()
    for heads in range(8, 72, 8):
        parts.call(*tensors(heads=heads), CAUSAL)
        assert len(parts.dispatcher._plans) <= 4
    assert parts.dispatcher.resolves == 8
    assert len(parts.loads.kernels) == 1, "forgetting a plan forgets no kernel"


def test_c40_fresh_masks_and_tensors_leave_nothing_behind() -> None:
    parts = make()
    q, k, v = tensors(batch=2, q_len=8)
    for step in range(2000):
        lengths = torch.tensor([8, 1 + step % 8])
        parts.call(q, k, v, masks.causal() & masks.key_padding(lengths))
        parts.call(q, k, v, masks.sliding_window(step % 7, 0))
    dispatcher = parts.dispatcher
    assert dispatcher.resolves <= 8 and len(dispatcher._numbers) <= 7 and len(dispatcher._kernels) == 2


def test_c39_optional_arguments_may_be_none_in_any_combination() -> None:
    parts = make()
    for mask in (None, "causal"):
        for score_mod in (None, [], score_mods.softcap(5.0), [score_mods.softcap(5.0)]):
            for scale in (None, 1, 0.5):
                for return_lse in (False, True):
                    result = parts.call(
                        *tensors(), mask, score_mod=score_mod, scale=scale, return_lse=return_lse
                    )
                    assert isinstance(result, tuple) == return_lse
    assert len(parts.loads.launched) == 48


def test_c41_out_strides_follow_q() -> None:
    parts = make()
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors())
    assert parts.call(q, k, v, CAUSAL).stride() == q.stride()
    fused = torch.zeros(2, 64, 3, 8, 64, dtype=torch.float16)  # (batch, seq, qkv, heads, dim)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    out = parts.call(q, k, v)
    assert out.transpose(1, 2).is_contiguous(), "the order of q's axes, without its gaps"
    assert last_env(parts)["out.stride.head"] == 64
    for head_dim_v in (64, 32, 128):
        wide = torch.zeros(2, 64, 8, head_dim_v, dtype=torch.float16).transpose(1, 2)
        out = parts.call(q, k, wide)
        assert out.shape == (2, 8, 64, head_dim_v) and out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("negated", ["q", "k", "v"])
def test_a_kernel_gets_the_values_of_a_tensor_negated_lazily(negated: str) -> None:
    parts, seen = make(), []
    given = dict(zip("qkv", tensors(1, 2, 2, 8, head_dim=64, dtype=torch.float32), strict=True))
    parts.call(*given.values())
    lazy = torch.complex(given[negated], -given[negated]).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, given[negated])

    def flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> tuple[object, ...]:
        seen.append({"q": q, "k": k, "v": v}[negated])
        return flatten(q, k, v, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "flatten", flat)
        out = parts.call(**given | {negated: lazy})
    assert not seen[-1].is_neg() and torch.equal(seen[-1], given[negated]) and out.is_contiguous()
    assert last_env(parts)[f"{negated}.stride.dim"] == 1, "the copy, whose elements lie together"


def test_a_lazily_negated_operand_is_refused() -> None:
    rule = Rule.parse("score", "score + bias[k_idx] where bias: fp32", name="bias")
    lazy = torch.complex(torch.ones(64), torch.ones(64)).conj().imag
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"bias of .* is negated lazily .*resolve_neg"):
            make().call(*tensors(), score_mod=ScoreMod(rule, (), (lazy,)))


def test_bshd_is_the_same_call_in_another_order_of_axes() -> None:
    parts = make()
    q, k, v = (t.transpose(1, 2) for t in tensors(batch=2, q_len=20, k_len=30))
    out, lse = parts.call(q, k, v, CAUSAL, layout="bshd", return_lse=True)
    env = last_env(parts)
    assert out.shape == (2, 20, 32, 128) and lse.shape == (2, 32, 20)
    assert (env["heads"], env["kv_heads"], env["q_len"], env["k_len"]) == (32, 8, 20, 30)
    assert (env["q.stride.head"], env["q.stride.row"]) == (q.stride(2), q.stride(1))


# What the key cannot promise


def bad_values() -> dict[str, dict[str, object]]:
    _, k, v = tensors()
    keep = torch.ones(4, 63, dtype=torch.bool)
    return {
        "k has batch 5, it must be q's 4": {"k": tensors(batch=5)[1]},
        "v has batch 5, it must be q's 4": {"v": tensors(batch=5)[2]},
        "v has length 63, it must be k's 64": {"v": v[:, :, :63]},
        "v has heads 4, it must be k's 8": {"v": v[:, :4]},
        "k has head_dim 64, it must be q's 128": {"k": k[..., :64], "v": v[..., :64]},
        "k.dtype=torch.float16 must be that of q": {"k": k.half()},
        "v.dtype=torch.float32 must be that of q": {"v": v.float()},
        "k has 3 dimensions": {"k": k[0]},
        "v has 5 dimensions": {"v": v[None]},
        "q has 32 heads, which must be a multiple of the 0 heads": {"k": k[:, :0], "v": v[:, :0]},
        "q has 32 heads, which must be a multiple of the 5 heads": {"k": k[:, :5], "v": v[:, :5]},
        "layout='bdsh' must be one of bhsd, bshd": {"layout": "bdsh"},
        "return_lse=a tensor of .* must be True or False": {"return_lse": torch.ones(2)},
        "scale=nan must be finite": {"scale": math.nan},
        "scale=inf must be finite": {"scale": math.inf},
        r"scale=2e\+38 must be finite, and at most": {"scale": 2e38},
        "^keys of .* has shape \\(4, 63\\); axis 1 counts k_len, which is 64": {
            "mask": masks.key_padding(keep)
        },
        "^keys of .* has shape \\(3,\\); axis 0 counts batch, which is 4": {
            "mask": masks.key_padding(torch.tensor([1, 2, 3]))
        },
        "key_padding has no tensor for keys": {"mask": masks.key_padding()},
        "mask=<function .*> must be None, a name": {"mask": lambda b, h, q, k: q >= k},
        "unknown mask 'diagonal'; known: block_sparse, ": {"mask": "diagonal"},
        "score_mod=3 must be None": {"score_mod": 3},
    }


@pytest.mark.parametrize("message", bad_values())
@pytest.mark.parametrize("seen_before", [False, True])
def test_what_does_not_agree_is_refused_before_any_launch(message: str, seen_before: bool) -> None:
    parts = make()
    q, k, v = tensors()
    good = {
        "q": q,
        "k": k,
        "v": v,
        "mask": masks.key_padding(torch.full((4,), 64)),
        "scale": None,
        "score_mod": None,
        "layout": "bhsd",
    }
    if seen_before:
        parts.call(**good)  # type: ignore[arg-type]
        parts.call(**(good | {"mask": masks.key_padding(torch.ones(4, 64, dtype=torch.bool))}))  # type: ignore[arg-type]
    launched = len(parts.loads.launched)
    with pytest.raises(InvalidArgument, match=message):
        parts.call(**(good | bad_values()[message]))  # type: ignore[arg-type]
    assert len(parts.loads.launched) == launched


# Facts of the call


def test_keys_that_are_no_grid_are_refused_before_any_launch_and_at_every_call() -> None:
    parts, grid = make(), masks.neighborhood((8, 8), (3, 3))
    parts.call(*tensors(q_len=64, k_len=64), grid)
    for mask in (grid, CAUSAL & grid):  # of the bucket of the call before, and of none
        with pytest.raises(
            InvalidArgument, match=r"\(8, 8\) of .* has 64 positions, and k_len is 60: .* 64 keys"
        ):
            parts.call(*tensors(q_len=60, k_len=60), mask)
    parts.call(*tensors(q_len=50, k_len=64), grid)
    assert len(parts.loads.launched) == 2


def test_c13_a_broadcast_batch_and_a_real_one_are_different_kinds() -> None:
    parts = make([record(10.0, conf=TMA), record(20.0, conf=POINTER)])
    q, k, v = tensors(batch=1)
    parts.call(q, k, v, CAUSAL)
    parts.call(q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), CAUSAL)
    parts.call(*tensors(batch=2), CAUSAL)
    assert parts.loads.launched == [TMA.name, TMA.name, POINTER.name]
    broadcast = parts.loads.kernels[-1]
    assert broadcast.request.facts.tma is False and broadcast.launches[0][5] == 0


def test_c14_a_misaligned_call_gets_the_best_record_that_admits_it() -> None:
    slow = config(block_m=64)
    parts = make([record(10.0, conf=TMA), record(30.0, conf=slow), record(20.0, conf=POINTER)])
    q, k, v = tensors()
    parts.call(q, k, v, CAUSAL)
    buffer = torch.zeros(q.numel() + 1, dtype=q.dtype)
    off = buffer[1:].view(q.shape)  # 2 bytes beyond an aligned address
    parts.call(off, k, v, CAUSAL)
    row = torch.zeros(4, 32, 64, 132, dtype=q.dtype)[..., :128]  # rows of 264 bytes
    parts.call(row, k, v, CAUSAL)
    assert parts.loads.launched == [TMA.name, POINTER.name, POINTER.name]
    explained = explain(parts, off, k, v)
    assert [(step.choice, step.verdict) for step in explained.steps[:2]] == [
        (TMA.name, "rejected"),
        (POINTER.name, "accepted"),
    ]
    assert "loads by descriptor" in explained.steps[0].reason


# Misses


def test_the_exact_bucket_comes_before_nearer_times_and_measured_before_modelled() -> None:
    exact, near, guessed = config(block_n=32), config(block_n=64), config(block_n=128)
    parts = make(
        [
            record(1.0, conf=near, work=workload(8192)),
            record(90.0, conf=exact, work=workload(4096)),
            record(5.0, conf=guessed, work=workload(4096), source="model"),
        ]
    )
    parts.call(*tensors(q_len=4096, batch=4, heads=32), CAUSAL)
    parts.call(*tensors(q_len=8192, batch=4), CAUSAL)
    assert parts.loads.launched == [exact.name, near.name]


def test_earlier_sources_do_not_hide_better_records_of_later_ones() -> None:
    near, shipped, modelled = config(block_n=32), config(block_n=64), config(block_n=128)
    parts = make([record(1.0, conf=near, work=workload(8192)), record(2.0, conf=modelled, source="model")])
    store = Records([record(9.0, conf=shipped)])
    parts.policy.sources.append(Source("shipped records", lambda: store, parts.loads))
    parts.call(*tensors(q_len=4096), CAUSAL)
    assert parts.loads.launched == [shipped.name]


def test_a_record_of_other_sizes_that_would_leave_the_gpu_idle_gives_way_to_a_default_that_splits() -> None:
    """28 tiles of 16,384 keys, on 132 multiprocessors; a record of these sizes knows better, and a bundle has
    no default."""
    whole = config(128, 64)
    wide = workload(4096, heads=32)
    own = replace(wide, batch=1, heads=28, kv_heads=4, q_len=16, k_len=16384)
    call = tensors(1, 28, 4, 16, 16384)
    parts = make([record(conf=whole, work=wide)])
    parts.call(*call, CAUSAL)
    assert parts.loads.launched == ["c2x1n128s2g4p1k4_late_lazy_tree_lane_dynamic"]
    assert "28 tiles here for 132 programs" in explain(parts, *call).steps[0].reason
    parts = make([record(conf=whole, work=own)])
    parts.call(*call, CAUSAL)
    assert parts.loads.launched == [whole.name]
    parts = make()
    store = Records([record(conf=whole, work=wide)])
    parts.policy.bundles.append(Source("bundle", lambda: store, parts.loads, place="bundle"))
    parts.call(*call, CAUSAL)
    assert parts.loads.launched == [whole.name]


def test_c15_what_cannot_fit_is_passed_over_and_every_candidate_is_named() -> None:
    small = find_target("nvidia-l40s")  # 99 KB of shared memory a block
    big = config(128, 128, 8, 4)
    work = workload(4096, spec=masked(256, "fp32"), heads=8)
    parts = make([record(conf=big, work=work, target=small)], target=small)
    q, k, v = tensors(q_len=16, heads=8, head_dim=256, dtype=torch.float32)
    parts.call(q, k, v, CAUSAL)
    steps = explain(parts, q, k, v).steps
    assert (
        steps[0].choice == big.name
        and "KB of shared memory a block, nvidia-l40s has 99 KB" in steps[0].reason
    )
    assert [(step.source, step.choice, step.verdict) for step in steps[1:3]] == [
        ("family default", "attention_fwd_sm90", "rejected"),
        ("family default", steps[2].choice, "accepted"),
    ]
    assert "serves fp16, bf16, e4m3, not fp32" in steps[1].reason
    assert parts.loads.launched == [steps[2].choice]


def masked(head_dim: int, dtype: str) -> AttentionSpec:
    return AttentionSpec(head_dim, head_dim, dtype, CAUSAL.rule)


@pytest.mark.parametrize(
    "error",
    [CompileFailed("ptxas: out of registers"), DoesNotFit("300 KB"), ImportError("No module named 'triton'")],
)
def test_a_candidate_that_does_not_load_gives_way_to_the_next_and_its_reason_is_kept(
    error: Exception,
) -> None:
    parts = make([record(10.0, conf=TMA), record(20.0, conf=POINTER)], loads=Loads({TMA.name: error}))
    for batch in (4, 1):
        parts.call(*tensors(q_len=64, batch=batch), CAUSAL)
    assert parts.loads.launched == [POINTER.name] * 2
    assert parts.loads.asked.count(TMA.name) == 1, "a failure is not tried twice"
    step = explain(parts, *tensors()).steps[0]
    assert (step.choice, step.verdict) == (TMA.name, "rejected") and str(error) in step.reason


def test_whatever_a_candidate_or_a_source_raises_is_a_step_with_a_reason() -> None:
    parts = make([record(20.0, conf=POINTER)], loads=Loads({POINTER.name: KeyError("loading")}))
    parts.policy.sources.insert(0, Source("odd", lambda: {}["opening"], parts.loads))
    parts.call(*tensors(), CAUSAL)
    steps = explain(parts, *tensors()).steps
    assert [step.reason for step in steps[:2]] == ["KeyError: 'opening'", "KeyError: 'loading'"]
    assert steps[2].verdict == "accepted"


@pytest.mark.parametrize("values", [(), TMA.values[:-1], (("num_stages", "x"),), POINTER.values[::-1]])
def test_a_record_of_a_config_that_no_family_has_gives_way_to_the_next(
    values: tuple[tuple[str, int | str], ...],
) -> None:
    foreign = replace(record(1.0), config=Config("attention_fwd", values))
    unknown = replace(record(2.0), config=replace(TMA, family="attention_fwd_ws"))
    parts = make([foreign, unknown, record(20.0, conf=POINTER)])
    parts.call(*tensors(), CAUSAL)
    assert parts.loads.launched == [POINTER.name]
    rejected = {step.choice: step.reason for step in explain(parts, *tensors()).steps[:2]}
    assert rejected.keys() == {foreign.config.name, TMA.name}
    assert "attention_fwd" in rejected[foreign.config.name]
    assert "family attention_fwd_ws does not exist" in rejected[TMA.name]


def test_a_kernel_the_driver_refuses_to_launch_gives_way_to_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = make(
        [record(10.0, conf=TMA), record(20.0, conf=POINTER)],
        loads=Loads(refusing={TMA.name: refused(701, "too many registers")}),
    )
    with caplog.at_level(logging.WARNING, "flashgen"):
        for _ in range(3):
            parts.call(*tensors(), CAUSAL)
    assert parts.loads.launched == [POINTER.name] * 3
    assert caplog.text.count("too many registers") == 1
    assert "too many registers" in explain(parts, *tensors()).steps[0].reason


def test_where_no_kernel_loads_torchs_attention_gives_the_right_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Never(Loads):
        def __call__(self, request: Request, config: Config) -> LoadedKernel:
            raise CompileFailed("no compiler here")

    parts = make(loads=Never())
    q, k, v = tensors(batch=2, heads=4, kv_heads=2, q_len=20, k_len=33, head_dim=32, dtype=torch.float32)
    with caplog.at_level(logging.WARNING, "flashgen"):
        out, lse = parts.call(q, k, v, CAUSAL, return_lse=True)
        parts.call(q, k, v, CAUSAL, return_lse=True)
    expected, expected_lse = attention_reference(q, k, v, mask=CAUSAL)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    assert caplog.text.count("no compiler here") == 1 and parts.dispatcher.resolves == 1


def test_a_broken_store_is_a_step_with_a_reason_and_calls_are_answered() -> None:
    parts = make()

    def broken() -> Records:
        raise StoreError("the database is of version 9, this is 1; update FlashGen")

    parts.policy.sources.insert(0, Source("broken", broken, parts.loads))
    parts.call(*tensors(), CAUSAL)
    assert len(parts.loads.launched) == 1
    step = explain(parts, *tensors()).steps[0]
    assert step.source == "broken" and "version 9" in step.reason


def test_a_bundle_comes_first_and_its_fallback_last_before_torch() -> None:
    bundled, tuned = config(block_n=32), config(block_n=64)
    parts = make([record(1.0, conf=tuned)])
    own = Loads()
    store = Records([record(50.0, conf=bundled, work=workload(512))])
    parts.dispatcher.add_bundle(Source("bundle x", lambda: store, own, lambda request: config(block_n=128)))
    parts.call(*tensors(q_len=4096), CAUSAL)
    assert own.launched == [bundled.name] and not parts.loads.launched
    parts.call(*tensors(q_len=64), "full")  # nothing of this spec, but a compiler
    assert parts.loads.launched and len(own.launched) == 1
    spec = replace(workload().spec, mask=masks.causal("top_left").rule)
    families = serving(spec, H200, CallFacts(), 4)
    defaults = [family.default(spec, H200, CallFacts(), 4).name for family in families]
    parts.loads.failing = {name: ImportError("no triton") for name in defaults}
    asked = len(parts.loads.asked)
    parts.call(*tensors(q_len=64), masks.causal("top_left"))  # nothing of this spec, and no compiler
    assert parts.loads.asked[asked:] == defaults and len(defaults) == 2
    assert own.launched == [bundled.name, config(block_n=128).name]


# Miss policies


def test_policy_error_raises_only_where_no_record_serves() -> None:
    parts = make([record(conf=TMA, work=workload(512))], on_miss="error")
    parts.call(*tensors(q_len=4096), CAUSAL)  # the nearest record serves
    with pytest.raises(
        NoTunedKernel, match=r"(?s)b4h32kv8q64k64 .*mask\[True\].*'error'; tune it.*no record of this spec"
    ):
        parts.call(*tensors())
    parts.dispatcher.set_on_miss("default")
    parts.call(*tensors())
    assert len(parts.loads.launched) == 2


def test_policy_record_notes_each_kind_once(tmp_path: Path) -> None:
    parts = make(
        [record(conf=TMA, work=workload(64))], on_miss="record", misses=tmp_path / "x" / "misses.jsonl"
    )
    for q_len in (64, 128, 130, 128):
        parts.call(*tensors(q_len=q_len), CAUSAL)
    noted = read_misses(tmp_path / "x" / "misses.jsonl")
    assert [w.q_len for w in noted] == [128, 130]
    assert {w.spec.key for w in noted} == {record().workload.spec.key}


def test_c34_misses_that_cannot_be_written_cost_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    parts = make(on_miss="record", misses=tmp_path / "file" / "misses.jsonl")
    with caplog.at_level(logging.WARNING, "flashgen"):
        for q_len in (64, 128, 256):
            parts.call(*tensors(q_len=q_len), CAUSAL)
    assert caplog.text.count("missed shapes are not noted") == 1 and len(parts.loads.launched) == 3


def test_policy_tune_tunes_a_kind_once_and_then_uses_the_record() -> None:
    tuned: list[Workload] = []

    def tune(work: Workload, device: int) -> None:
        tuned.append(work)
        parts.records.all.append(record(conf=POINTER, work=work))

    parts = make(on_miss="tune", tune=tune)
    for _ in range(2):
        parts.call(*tensors(q_len=100), CAUSAL)
    assert [w.q_len for w in tuned] == [100] and parts.loads.launched == [POINTER.name] * 2
    parts.dispatcher.forget()
    parts.call(*tensors(q_len=120), CAUSAL)
    assert len(tuned) == 1


def test_tuning_that_fails_is_told_and_the_call_answered(caplog: pytest.LogCaptureFixture) -> None:
    def tune(work: Workload, device: int) -> None:
        raise StoreError("disk full")

    parts = make(on_miss="tune", tune=tune)
    with caplog.at_level(logging.WARNING, "flashgen"):
        parts.call(*tensors(), CAUSAL)
    assert "disk full" in caplog.text and len(parts.loads.launched) == 1


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"on_miss='never'.*default, tune, record, error"):
        make().dispatcher.set_on_miss("never")
    with pytest.raises(InvalidArgument, match="can tune"):
        make(on_miss="tune")


# Graph capture


def test_c21_a_first_call_inside_a_capture_loads_and_remembers_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def tune(work: Workload, device: int) -> None:
        raise AssertionError("tuned inside a capture")

    parts = make([record(conf=TMA)], on_miss="tune", tune=tune)
    parts.capturing[0] = True
    q, k, v = tensors(batch=1, heads=4, kv_heads=2, q_len=16, head_dim=32, dtype=torch.float32)
    with caplog.at_level(logging.WARNING, "flashgen"):
        for _ in range(3):
            out = parts.call(q, k, v, CAUSAL)
    torch.testing.assert_close(out, attention_reference(q, k, v, mask=CAUSAL)[0], atol=1e-5, rtol=1e-5)
    assert parts.loads.asked == [] and parts.records.asked == 0 and parts.dispatcher.resolves == 0
    assert caplog.text.count("a CUDA graph is being captured") == 1
    parts.capturing[0] = False
    parts.dispatcher.set_on_miss("default")
    parts.call(q, k, v, CAUSAL)
    assert len(parts.loads.launched) == 1, "after the capture the call is resolved as any other"


def test_c21_inside_a_capture_a_loaded_kernel_of_the_spec_serves_other_sizes() -> None:
    parts = make([record(conf=TMA)])
    parts.call(*tensors(q_len=64), CAUSAL)
    parts.capturing[0] = True
    parts.call(*tensors(q_len=64), CAUSAL)  # a hit
    parts.call(*tensors(q_len=4096, batch=1), CAUSAL)  # a miss
    assert parts.loads.launched == [TMA.name] * 3 and parts.loads.asked == [TMA.name]


def test_warming_loads_the_kernel_that_the_call_then_hits() -> None:
    parts = make([record(conf=TMA, work=workload(4096))])
    told = parts.dispatcher.warm(workload(4096), FACTS[0], -1)  # CPU tensors: device index -1
    assert told.runs == TMA.name and parts.loads.asked == [TMA.name]
    resolves = parts.dispatcher.resolves
    parts.call(*tensors(q_len=4096), CAUSAL)
    assert parts.dispatcher.resolves == resolves and parts.loads.launched == [TMA.name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_warmed_key_is_the_calls_own_key(dtype: torch.dtype) -> None:
    parts = make()
    mask, cap = masks.sliding_window(15, 0), score_mods.softcap(20.0)
    q, k, v = tensors(
        batch=3, heads=8, kv_heads=2, q_len=5, k_len=70, head_dim=32, head_dim_v=64, dtype=dtype
    )
    call = module.check(q, k, v, mask, cap, -0.5, "bhsd", True)
    parts.dispatcher.warm(call.workload(), FACTS[0], -1)
    parts.call(q, k, v, mask, score_mod=cap, scale=-0.5, return_lse=True)
    assert parts.dispatcher.resolves == 0 and len(parts.loads.launched) == 1


def eight_bits(**sizes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (each.to(E4M3) for each in tensors(q_len=64, **sizes))
    return q, k, v


def test_a_kernel_of_8_bit_tensors_gets_their_factors() -> None:
    parts, factor = make(), torch.rand(4, 8)
    q, k, v = eight_bits()
    given = Given(2.0, factor, 0.5, torch.float16)
    out, lse = parts.call(q, k, v, CAUSAL, scale=0.25, return_lse=True, given=given)
    assert (out.dtype, out.shape, lse.dtype) == (torch.float16, q.shape, torch.float32)
    env = last_env(parts)
    assert (env["scale"], env["v_factor"]) == (0.5, 0.5)
    assert (env["descale.q"], env["descale.k"], env["descale.v"]) == (0, factor.data_ptr(), 0)
    assert (env["descale.k.stride.batch"], env["descale.k.stride.kv_head"]) == (8, 1)
    spec = parts.loads.kernels[-1].request.workload.spec
    assert (spec.dtype, spec.out_dtype, spec.positive_scale) == ("e4m3", "fp16", True)
    assert parts.call(q, k, v, CAUSAL).dtype == torch.bfloat16, "nothing given: factors of 1"
    assert last_env(parts)["scale"] == 128**-0.5


def test_factors_are_no_kind_of_their_own_but_the_outputs_dtype_is() -> None:
    parts = make()
    q, k, v = eight_bits()
    for given in (None, Given(2.0), Given(torch.ones(32)), Given(None, torch.ones(4, 8), torch.ones(()))):
        parts.call(q, k, v, CAUSAL, given=given)
    assert parts.dispatcher.resolves == 1 and len(parts.loads.launched) == 4
    parts.call(q, k, v, CAUSAL, given=Given(out_dtype=torch.bfloat16))
    assert parts.dispatcher.resolves == 1
    parts.call(q, k, v, CAUSAL, given=Given(out_dtype=torch.float16))
    assert parts.dispatcher.resolves == 2
    parts.call(q, k, v, CAUSAL, given=Given(q_descale=0.0))
    assert parts.dispatcher.resolves == 3, "a scale of 0 has a kernel made for it"


def test_a_warmed_key_is_that_of_8_bit_calls_too() -> None:
    parts = make()
    q, k, v = eight_bits()
    given = Given(out_dtype=torch.float16)
    call = module.check(q, k, v, CAUSAL, None, None, "bhsd", True, given)
    parts.dispatcher.warm(call.workload(), FACTS[0], -1)
    parts.call(q, k, v, CAUSAL, return_lse=True, given=given)
    assert parts.dispatcher.resolves == 0 and len(parts.loads.launched) == 1


@pytest.mark.parametrize("return_lse", [False, True])
def test_8_bit_tensors_that_no_kernel_serves_get_torchs_attention(return_lse: bool) -> None:
    parts = make(target=find_target("nvidia-a100"))
    q, k, v = eight_bits(batch=1)
    given = Given(0.5, torch.rand(8) + 0.5, torch.rand(1, 8), torch.float16)
    got = parts.call(q, k, v, CAUSAL, return_lse=return_lse, given=given)
    assert parts.loads.launched == []
    out, lse = got if return_lse else (got, None)
    call = module.check(q, k, v, CAUSAL, None, None, "bhsd", True, given)
    assert call.quantized is not None
    exact, exact_lse = attention_reference(*call.quantized.true(q, k, v), mask=CAUSAL)
    assert out.dtype == torch.float16
    # Written out in float32, or with inputs and weights of bfloat16.
    tolerance = 2e-3 if return_lse else 2e-2
    torch.testing.assert_close(out.float(), exact, atol=tolerance, rtol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse, exact_lse, atol=1e-4, rtol=1e-4)


# Nothing to compute


@pytest.mark.parametrize("sizes", [(64, 0), (0, 64)])
def test_an_empty_workload_is_explained_and_warmed_as_its_call_is_served(sizes: tuple[int, int]) -> None:
    parts = make([record(conf=TMA)])
    empty = replace(workload(64), q_len=sizes[0], k_len=sizes[1])
    asked = explain_workload(parts.policy, empty, H200, CallFacts(tma=False))
    q, k, v = tensors(q_len=sizes[0], k_len=sizes[1])
    told = {asked.runs, explain(parts, q, k, v).runs, flashgen.explain(q, k, v).runs}
    assert told == {"nothing: no key or no output"} and asked.steps == ()
    facts = FACTS.index(CallFacts(tma=False))
    assert parts.dispatcher.warm(empty, FACTS[facts], -1).runs in told
    resolves = parts.dispatcher.resolves
    assert not parts.call(q, k, v, CAUSAL).any()
    assert parts.dispatcher.resolves == resolves and parts.loads.asked == []


@pytest.mark.parametrize(
    "sizes", [{"k_len": 0}, {"q_len": 0, "k_len": 5}, {"batch": 0}, {"q_len": 0, "k_len": 0}, {"heads": 0}]
)
@pytest.mark.parametrize("mask", [None, "causal"])
def test_c04_empty_sizes_launch_nothing(sizes: dict[str, int], mask: str | None) -> None:
    parts = make()
    q, k, v = tensors(**({"q_len": 4, "head_dim_v": 64} | sizes))  # type: ignore[arg-type]
    out, lse = parts.call(q, k, v, mask, return_lse=True)
    assert out.shape == (*q.shape[:3], 64) and torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full(q.shape[:3], -math.inf))
    assert parts.loads.asked == []


@pytest.mark.parametrize("scale", [0, 0.0, -0.125, -3, 1e-50, -1e-40])
def test_a_scale_that_is_not_positive_gets_a_kernel_made_for_it(scale: float) -> None:
    parts = make()
    parts.call(*tensors(), CAUSAL, scale=scale)
    assert parts.loads.kernels[-1].request.workload.spec.positive_scale is False
    assert last_env(parts)["scale"] == (scale if abs(scale) > 1e-38 else 0.0)


def test_threads_resolve_a_kind_once() -> None:
    parts = make([record(conf=TMA)])
    barrier = threading.Barrier(8)
    q, k, v = tensors(batch=1, q_len=8)

    def run() -> None:
        barrier.wait()
        for _ in range(20):
            parts.call(q, k, v, CAUSAL)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parts.dispatcher.resolves == 1 and parts.loads.asked == [TMA.name]
    assert len(parts.loads.launched) == 160


@pytest.mark.parametrize(
    "failure",
    [
        refused(1, "describing K at 0x7f0000000002: INVALID_VALUE"),
        refused(2, "out of memory"),
        refused(0, "no code"),
        InvalidArgument("m128: a grid of 2147483648 blocks; a GPU takes 2147483647"),
    ],
    ids=str,
)
def test_a_call_that_cannot_be_launched_runs_in_torch_and_the_kernel_stays(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    parts = make([record(10.0, conf=TMA), record(20.0, conf=POINTER)])
    q, k, v = tensors(batch=1, heads=4, kv_heads=2, q_len=16, head_dim=32, dtype=torch.float32)
    parts.call(q, k, v, CAUSAL)
    (kernel,) = parts.loads.kernels
    kernel.failure = failure
    with caplog.at_level(logging.WARNING, "flashgen"):
        for _ in range(2):
            out = parts.call(q, k, v, CAUSAL)
    torch.testing.assert_close(out, attention_reference(q, k, v, mask=CAUSAL)[0], atol=1e-5, rtol=1e-5)
    assert caplog.text.count(str(failure)) == 1 and "torch's attention runs instead" in caplog.text
    kernel.failure = None
    parts.call(q, k, v, CAUSAL)
    assert len(kernel.launches) == 2, "what one call was refused for bans no kernel"


@pytest.mark.parametrize("code", [700, 716, 719, 999])
def test_an_error_that_an_earlier_kernel_left_is_raised_and_bans_none(code: int) -> None:
    parts = make([record(10.0, conf=TMA)])
    parts.call(*tensors(), CAUSAL)
    (kernel,) = parts.loads.kernels
    kernel.failure = refused(code, "cuLaunchKernelEx gave CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(LaunchFailed, match=r"ILLEGAL_ADDRESS.*not necessarily FlashGen's.*start it again"):
        parts.call(*tensors(), CAUSAL)
    assert explain(parts, *tensors()).steps[0].verdict == "accepted"


def test_a_kernel_is_banned_where_it_came_from_and_nowhere_else() -> None:
    bundled = Loads(refusing={TMA.name: refused(701, "out of resources")})
    parts = make([record(10.0, conf=TMA)])
    store = Records([record(50.0, conf=TMA)])
    parts.dispatcher.add_bundle(Source("bundle x", lambda: store, bundled))
    parts.call(*tensors(), CAUSAL)
    assert parts.loads.launched == [TMA.name] and bundled.launched == []


# Bundles


def test_two_bundles_of_one_name_have_kernels_of_their_own() -> None:
    parts, loaded = make(), [Loads(), Loads(), Loads()]
    store = Records([record(50.0, conf=TMA)])
    for place, load in zip(("/a/b", "/c/b", "/a/b"), loaded, strict=True):
        parts.dispatcher.add_bundle(Source("bundle b", lambda: store, load, place=place))
        parts.call(*tensors(), CAUSAL)
        assert load.launched == [TMA.name], "the bundle that was loaded last serves"
    assert [source.place for source in parts.policy.bundles] == ["/a/b", "/c/b"]
    assert [source.load for source in parts.policy.bundles] == [loaded[2], loaded[1]]
    assert {known[-1] for known in parts.dispatcher._kernels} == {loaded[1], loaded[2]}


def test_a_failure_of_a_bundle_is_forgotten_when_its_folder_is_loaded_again() -> None:
    broken, mended = Loads({TMA.name: LaunchFailed("invalid image")}), Loads()
    parts, store = make(), Records([record(50.0, conf=TMA)])
    for load in (broken, mended):
        parts.dispatcher.add_bundle(Source("bundle b", lambda: store, load, place="/a/b"))
        parts.call(*tensors(), CAUSAL)
    assert mended.launched == [TMA.name]


# Tuning while calls go on


def test_while_a_kind_is_tuned_other_threads_are_served() -> None:
    started, finish = threading.Event(), threading.Event()

    def tune(work: Workload, device: int) -> None:
        if started.is_set():
            return  # of the other kind
        started.set()
        assert finish.wait(30)
        parts.records.all.append(record(conf=POINTER, work=work))

    parts = make([record(conf=TMA, work=workload(512))], on_miss="tune", tune=tune)
    q, k, v = tensors(q_len=100)
    first = threading.Thread(target=parts.call, args=(q, k, v, CAUSAL))
    first.start()
    try:
        assert started.wait(30)
        others = [
            threading.Thread(target=parts.call, args=(q, k, v, CAUSAL)),  # the same kind: not tuned yet
            threading.Thread(target=parts.call, args=(*tensors(heads=16), CAUSAL)),  # another miss
        ]
        for thread in others:
            thread.start()
            thread.join(10)
        assert not any(thread.is_alive() for thread in others)
        assert parts.loads.launched == [TMA.name] * 2, "what was known before the tuning"
    finally:
        finish.set()
        first.join(30)
    assert parts.loads.launched == [TMA.name] * 2 + [POINTER.name]
    parts.call(q, k, v, CAUSAL)
    assert parts.loads.launched == [TMA.name] * 2 + [POINTER.name] * 2, "after it nobody keeps the old one"


def test_warming_tunes_too() -> None:
    def tune(work: Workload, device: int) -> None:
        parts.records.all.append(record(conf=POINTER, work=work))

    parts = make(on_miss="tune", tune=tune)
    assert parts.dispatcher.warm(workload(64), FACTS[0], -1).runs == POINTER.name


# Gradients


def test_whether_gradients_have_a_kernel_is_asked_once_for_each_kind_of_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[AttentionSpec] = []

    def asking(spec: AttentionSpec, target: Target) -> None:
        asked.append(spec)
        if spec.head_dim == 192:
            raise Unsupported("not of 192")

    monkeypatch.setattr(module, "serving", asking)
    without = make().dispatcher.without_gradients
    dropout, cu = Dropout(0.5, torch.tensor([1])), torch.tensor([0, 64], dtype=torch.int32)
    q, k, v = tensors(1, 8)
    plain = (CAUSAL, None, None, "bhsd", False)
    packed = [each[0].transpose(0, 1) for each in (q, k, v)]
    calls = [
        module.check(q, k, v, *plain),
        module.check(q, k, v, masks.full(), *plain[1:]),
        module.check(q, k, v, CAUSAL, score_mods.softcap(5.0), *plain[2:]),
        module.check(q, k, v, *plain, Given(dropout=dropout)),
        module.check(*(each.half() for each in (q, k, v)), *plain),
        module.check(*(each.float() for each in (q, k, v)), *plain),
        module.check(q, k, v[..., :64], *plain),
        module.check(*tensors(1, 8, head_dim=192, head_dim_v=128), *plain),
        module.check_packed(*packed, cu, cu, 64, 64, CAUSAL, None, None, False),
    ]
    # Of one kind with the first: other sizes, a score rule's other number, sinks, a scale of another sign.
    alike = [
        module.check(*tensors(2, 4, 2, q_len=7), *plain),
        module.check(q, k, v, CAUSAL, score_mods.softcap(7.0), *plain[2:]),
        module.check(q, k, v, CAUSAL, None, -1.0, *plain[3:], Given(sinks=torch.zeros(8))),
    ]
    for call in (*calls, *alike, *calls):
        assert without(call) == ("not of 192" if call.q.shape[-1] == 192 else "")
    assert asked == [call.workload().spec.backward() for call in calls] and len(set(asked)) == len(calls)
    torch.set_float32_matmul_precision("high")
    try:
        assert without(calls[5]) == "" and asked[-1].fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(module, "MAX_PLANS", 1)
    for call in (calls[0], calls[1], calls[0]):
        without(call)
    count = len(asked)
    assert without(calls[0]) == "" and len(asked) == count


def test_kernels_that_add_in_any_order_serve_no_deterministic_gradients() -> None:
    """Nor inside a capture, where any loaded kernel of the spec would do."""
    hopper = find_family("attention_bwd_sm90").find("s2g4_shared")
    q, k, v = tensors()
    loose = module.check(q, k, v, CAUSAL, None, None, "bhsd", True)
    exact = replace(loose, deterministic=True)
    tuned = record(work=loose.gradients_workload(False, False, ()))
    parts = make([replace(tuned, config=hopper, admission="tma_unordered")])
    lse = torch.zeros(q.shape[:3])

    def gradients(call: module.Call) -> None:
        parts.dispatcher.gradients(call, q, lse, q, None)

    gradients(loose)
    assert parts.loads.launched == [hopper.name]
    parts.capturing[0] = True
    longer = [torch.cat([each, each], 2) for each in (q, k, v)]
    parts.dispatcher.gradients(
        replace(exact, q=longer[0], k=longer[1], v=longer[2]), longer[0], lse, longer[0], None
    )
    assert parts.loads.launched == [hopper.name], "torch's, as no other kernel is loaded"
    parts.capturing[0] = False
    gradients(exact)
    gradients(loose)
    assert [kernel.config.family for kernel in parts.loads.kernels] == ["attention_bwd_sm90", "attention_bwd"]
    assert [len(kernel.launches) for kernel in parts.loads.kernels] == [2, 1]
    told = str(parts.dispatcher.explain(exact, q.get_device(), gradients=True))
    assert re.search(rf"{hopper.name}.*{UNORDERED}", told)


UNORDERED = "adds to a gradient in any order, and deterministic gradients are asked for"


def test_deterministic_gradients_have_the_best_kernel_of_those_that_repeat() -> None:
    """However many of the others are faster, in this family and beside it."""
    portable, hopper = find_family("attention_bwd"), find_family("attention_bwd_sm90")
    fused = [portable.find(f"m64n64w{w}s{s}_tma_heads_fused") for w in (4, 8) for s in (1, 2, 3)]
    others = [hopper.find(f"s2g{group}_shared") for group in (1, 4, 16)]
    split = [portable.find(f"m64n64w4s{s}_tma_heads") for s in (3, 1)]
    q, k, v = tensors()
    loose = module.check(q, k, v, CAUSAL, None, None, "bhsd", True)
    work = loose.gradients_workload(False, False, ())
    parts = make(
        [
            replace(
                record(10.0 + i, work=work), config=each, admission=find_family(each.family).admission(each)
            )
            for i, each in enumerate((*fused, *others, *split))
        ]
    )
    lse = torch.zeros(q.shape[:3])
    for call, wanted in ((loose, fused[0]), (replace(loose, deterministic=True), split[0])):
        parts.dispatcher.gradients(call, q, lse, q, None)
        assert parts.loads.launched[-1] == wanted.name
    told = parts.dispatcher.explain(replace(loose, deterministic=True), q.get_device(), gradients=True)
    steps = [step for step in told.steps if step.choice == fused[0].name]
    assert [(step.verdict, step.reason) for step in steps] == [("rejected", UNORDERED)]


# Devices


def test_c23_each_device_is_served_for_what_it_is() -> None:
    l40s = find_target("nvidia-l40s")
    parts = make([record(10.0, conf=TMA), record(10.0, conf=POINTER, target=l40s)])
    parts.dispatcher._target_of = {-1: H200, 1: l40s}.__getitem__
    call = module.check(*tensors(), CAUSAL, None, None, "bhsd", False)
    for device, target, conf in ((-1, H200, TMA), (1, l40s, POINTER)):
        plan = parts.dispatcher._resolve((device,), call, 0, device)
        assert isinstance(plan.kernel, LoadedKernel) and plan.kernel.config == conf
        request = plan.kernel.request
        assert (request.target, request.device) == (target, device)
        told = parts.dispatcher.warm(workload(64), FACTS[0], device)
        assert told.runs == conf.name and target.name in told.where
        assert parts.dispatcher.explain(call, device).runs == conf.name
