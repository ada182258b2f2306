"""Suites, model configs and explicit sizes."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.codegen.families import serving
from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec.masks import causal, full, sliding_window
from flashgen.spec.target import find_target
from flashgen.tune.plan import FEWEST_TRIALS, Plan, format_seconds, parse_budget
from flashgen.tune.suites import (
    MODELS_NOT_UNDERSTOOD,
    NESTED,
    NOT_UNDERSTOOD,
    SUITES,
    ConfigWarning,
    packed,
    suite_workloads,
    workloads_from_args,
    workloads_from_hf_config,
)

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16"}


def test_llama3_8b_is_what_the_goal_names() -> None:
    found = suite_workloads("llama3-8b")
    assert {(w.q_len, w.k_len, w.batch) for w in found} == {
        (s, s, 16384 // s) for s in (512, 1024, 2048, 4096, 8192, 16384)
    }
    assert {w.spec.mask for w in found} == {causal().rule, full().rule}
    assert len(found) == 12
    assert {(w.heads, w.kv_heads, w.spec.head_dim, w.spec.dtype) for w in found} == {(32, 8, 128, "bf16")}
    half = suite_workloads("llama3-8b-d64")
    assert {(w.spec.head_dim, w.spec.head_dim_v) for w in half} == {(64, 64)}
    assert len(half) == 12


def test_few_queries_of_many_keys() -> None:
    found = suite_workloads("gqa-short")
    assert len(found) == len(set(found)) == 24
    assert {(w.heads, w.kv_heads, w.spec.head_dim, w.spec.dtype) for w in found} == {
        (32, kv_heads, 128, "bf16") for kv_heads in (8, 1)
    }
    assert {w.q_len for w in found} == {16, 64, 128, 512} and {w.batch for w in found} == {1, 4}
    assert {w.k_len for w in found} == {8192, 32768, 65536}
    assert {w.spec.mask for w in found} == {causal().rule, full().rule}


def test_masks_and_score_rules_that_people_use() -> None:
    found = suite_workloads("masks")
    assert len(found) == len(set(found)) == 24
    for head_dim in (64, 128):
        told = {
            (w.spec.mask.form, w.spec.score_mod.form if w.spec.score_mod else "", w.spec.sinks, w.q_len): w
            for w in found
            if w.spec.head_dim == w.spec.head_dim_v == head_dim
        }
        assert set(told) == {
            ("sliding_window({}, {})", "", "", 65536),
            ("sliding_window({}, {})", "", "", 16384),
            ("causal & document", "", "", 16384),
            ("document", "", "", 16384),
            ('causal & document("ordered")', "", "", 16384),
            ('document("ordered")', "", "", 16384),
            ('prefix_lm("i32")', "", "", 16384),
            ("neighborhood(({}, 128), ({}, {}))", "", "", 16384),
            ("causal", "alibi", "", 16384),
            ("sliding_window({}, {})", "softcap({})", "", 16384),
            ("sliding_window({}, {})", "softcap({})", "", 8192),
            ("sliding_window({}, {})", "", "bf16", 16384),
        }
        window = (("left", 1023), ("right", 0))
        assert told["sliding_window({}, {})", "", "", 65536].params == window
        gemma = told["sliding_window({}, {})", "softcap({})", "", 8192]
        assert gemma.params == (("left", 4095), ("right", 0), ("cap", 50.0)) and gemma.batch == 2
        oss = told["sliding_window({}, {})", "", "bf16", 16384]
        assert (oss.heads, oss.kv_heads, oss.params) == (64, 8, (("left", 127), ("right", 0)))
        grid = told["neighborhood(({}, 128), ({}, {}))", "", "", 16384]
        assert grid.params == (("height", 128), ("kernel_h", 13), ("kernel_w", 13))
    assert all(w.q_len == w.k_len and w.batch * w.q_len in (16384, 65536) for w in found)


def test_documents_are_measured_by_their_number() -> None:
    found = suite_workloads("documents")
    assert len(found) == len(set(found)) == 32
    assert {(w.spec.head_dim, w.spec.mask.form, w.documents) for w in found} == set(
        itertools.product(
            (64, 128),
            ("document", "causal & document", 'document("ordered")', 'causal & document("ordered")'),
            (4, 8, 16, 32),
        )
    )
    tuned = {(w.spec.key, w.bucket()) for w in suite_workloads("masks")}
    assert {(w.spec.key, w.bucket()) for w in found} <= tuned, "what is tuned serves them"


def test_head_dims_of_several_chunks_beside_their_neighbours() -> None:
    found = suite_workloads("head-dims")
    dims = {(w.spec.head_dim, w.spec.head_dim_v) for w in found}
    assert dims == {(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 128)}
    assert {w.spec.mask for w in found} == {causal().rule, full().rule} and len(found) == 14
    assert {(w.heads, w.kv_heads, w.q_len, w.batch) for w in found} == {(16, 16, 8192, 2)}


@pytest.mark.parametrize("name", [name for name in SUITES if suite_workloads(name)[0].spec.dtype != "e4m3"])
def test_every_suite_is_served_on_every_kind_of_target(name: str) -> None:
    for target in ("nvidia-a100", "nvidia-h200", "nvidia-rtx5090"):
        for workload in suite_workloads(name):
            assert serving(workload.spec, find_target(target))
    assert SUITES[name].help


def test_windows_and_caps_carry_their_numbers() -> None:
    assert {w.params for w in suite_workloads("mistral-7b")} == {(("left", 4095), ("right", 0))}
    gemma = suite_workloads("gemma2-9b")
    assert {w.params for w in gemma} == {(("cap", 50.0),), (("left", 4095), ("right", 0), ("cap", 50.0))}
    assert {w.spec.head_dim for w in gemma} == {256}


def test_an_unknown_suite_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="unknown suite 'llama9'; known: " + ", ".join(sorted(SUITES))):
        suite_workloads("llama9")


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def test_a_models_config_gives_its_heads(tmp_path: Path) -> None:
    found = workloads_from_hf_config(written(tmp_path, LLAMA | {"max_position_embeddings": 2048}))
    assert [(w.q_len, w.batch) for w in found] == [(2048, 8), (1024, 16), (512, 32)]
    assert {(w.heads, w.kv_heads, w.spec.head_dim, w.spec.dtype) for w in found} == {(32, 8, 128, "bf16")}
    assert {w.spec.mask for w in found} == {causal().rule}
    assert workloads_from_hf_config(tmp_path) == found, "the folder of a model will do"


@pytest.mark.parametrize(
    ("changes", "masks"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [sliding_window(4095, 0)]),
        ({"model_type": "gemma2", "sliding_window": 4096}, [sliding_window(4095, 0), causal()]),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [causal()]),
        ({"model_type": "mistral", "sliding_window": None}, [causal()]),
        ({"model_type": "mistral", "sliding_window": 0}, [causal()]),
        ({"model_type": "mistral", "sliding_window": False}, [causal()]),
        (
            {"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            [causal(), sliding_window(511, 0)],
        ),
    ],
)
def test_windows_of_a_models_layers(tmp_path: Path, changes: dict[str, Any], masks: list[Any]) -> None:
    found = workloads_from_hf_config(written(tmp_path, LLAMA | changes), [512])
    assert [w.spec.mask for w in found] == [mask.rule for mask in masks]
    assert [tuple(v for _, v in w.params) for w in found] == [mask.values for mask in masks]


def test_head_dim_cap_dtype_and_nested_text_models(tmp_path: Path) -> None:
    config = LLAMA | {"head_dim": 256, "attn_logit_softcapping": 50.0, "torch_dtype": "float16"}
    (found,) = workloads_from_hf_config(written(tmp_path, {"text_config": config}), [1024])
    assert (found.spec.head_dim, found.spec.dtype, found.params) == (256, "fp16", (("cap", 50.0),))
    with pytest.warns(ConfigWarning, match=r'names no dtype: bf16 is assumed; .* as in "dtype": "float16"'):
        (gpt2,) = workloads_from_hf_config(
            written(tmp_path, {"n_head": 12, "n_embd": 768, "n_positions": 300, "head_dim": None})
        )
    assert (gpt2.heads, gpt2.kv_heads, gpt2.spec.head_dim, gpt2.q_len) == (12, 12, 64, 300)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{not json", "is not JSON .* give a model's config.json"),
        ("[1, 2]", "holds no JSON object"),
        ({"hidden_size": 4096}, "has no num_attention_heads or n_head"),
        ({"num_attention_heads": 32}, "has no hidden_size or n_embd"),
        (
            {"num_attention_heads": "32", "hidden_size": 64},
            "num_attention_heads='32' must be a positive whole",
        ),
        (LLAMA | {"num_attention_heads": 33}, "33 heads do not divide hidden_size 4096; add head_dim"),
        (LLAMA | {"torch_dtype": "int8"}, "torch_dtype='int8' is not served; allowed: float16, bf"),
        (LLAMA | {"num_key_value_heads": 5}, "heads=32 must be a multiple of kv_heads=5"),
        (LLAMA | {"head_dim": 20}, "head_dim=20 is not served; allowed: multiples of 8"),
        (LLAMA | {"torch_dtype": ["float16"]}, "torch_dtype=.*'float16'.* is not served"),
        (LLAMA | {"layer_types": 5}, "layer_types=5 must be a list of full_attention"),
        (LLAMA | {"layer_types": [["a"]]}, r"layer_types=\['a'\] is not understood; known: full_attention"),
        (LLAMA | {"layer_types": ["linear_attention"]}, "layer_types='linear_attention' is not understood"),
        (LLAMA | {"layer_types": ["sliding_attention"]}, "sliding_attention needs a sliding_window"),
        (LLAMA | {"attn_logit_softcapping": "abc"}, "attn_logit_softcapping='abc' is no cap"),
        (LLAMA | {"attn_logit_softcapping": ""}, "attn_logit_softcapping='' is no cap"),
        (LLAMA | {"attn_logit_softcapping": []}, r"attn_logit_softcapping=\[\] is no cap"),
        (LLAMA | {"attn_logit_softcapping": [1]}, r"attn_logit_softcapping=\[1\] is no cap"),
        (LLAMA | {"kv_lora_rank": 512}, "kv_lora_rank=512 needs qk_nope_head_dim and qk_rope_head_dim"),
        (LLAMA | {"max_position_embeddings": 256}, "seq=512 is more than the 256 positions"),
        (LLAMA | {"sliding_window": -1}, "sliding_window=-1 must be a positive whole number"),
        ("[" * 200_000, "is not JSON .* give a model's config.json"),
        (LLAMA | {"attn_config": {"alibi": True}}, "alibi=True changes attention and is not"),
        (
            LLAMA | {"model_type": "x" * 3000, "torch_dtype": "y" * 3000},
            r"torch_dtype='y{60,80}\.\.\. is not",
        ),
    ],
)
def test_a_bad_config_says_what_is_wrong(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        workloads_from_hf_config(written(tmp_path, config), [512])


def test_a_model_with_sinks_has_them_in_its_own_dtype(tmp_path: Path) -> None:
    gpt_oss = {"model_type": "gpt_oss", "head_dim": 64, "num_attention_heads": 64, "sliding_window": 128}
    gpt_oss |= {"layer_types": ["sliding_attention", "full_attention"] * 12, "torch_dtype": "float16"}
    found = workloads_from_hf_config(written(tmp_path, LLAMA | gpt_oss), [512])
    assert [(w.spec.sinks, w.spec.mask) for w in found] == [
        ("fp16", sliding_window(127, 0).rule),
        ("fp16", causal().rule),
    ]
    (plain,) = workloads_from_hf_config(written(tmp_path, LLAMA), [512])
    assert plain.spec.sinks == ""


def test_packed_sequences_keep_their_sinks() -> None:
    (workload,) = workloads_from_args(head_dim=64, heads=4, seq=128, batch=4, sinks="bf16")
    assert packed(workload, 256).spec == replace(workload.spec, addressing="varlen") != workload.spec


@pytest.mark.parametrize("value", ["x", "false", "", 1, 0, 1.0, [], [True], {}], ids=repr)
@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("use_sliding_window", {"sliding_window": 4096}),
        ("multi_query", {}),
        ("multi_query_attention", {}),
        ("new_decoder_architecture", {"multi_query": True}),
        ("is_decoder", {"model_type": "bert"}),
    ],
)
def test_a_flag_is_true_or_false(tmp_path: Path, key: str, others: dict[str, Any], value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"config.json: {key}=.* must be true or false"):
        workloads_from_hf_config(written(tmp_path, LLAMA | others | {key: value}), [512])


@pytest.mark.parametrize("key", NOT_UNDERSTOOD)
def test_a_key_that_is_not_understood_is_refused_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key}=128 changes attention and is not understood"):
        workloads_from_hf_config(written(tmp_path, LLAMA | {key: 128}), [512])
    for harmless in (None, 0, False, [], *NOT_UNDERSTOOD[key]):
        assert workloads_from_hf_config(written(tmp_path, LLAMA | {key: harmless}), [512])


@pytest.mark.parametrize("model", MODELS_NOT_UNDERSTOOD)
def test_a_model_that_is_not_understood_is_refused_by_name(tmp_path: Path, model: str) -> None:
    with pytest.raises(InvalidArgument, match=f"model_type='{model}' .*, which is not understood"):
        workloads_from_hf_config(written(tmp_path, LLAMA | {"model_type": model}), [512])


MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("changes", "kv_heads", "dims"),
    [
        ({"num_key_value_heads": None}, 32, (128, 128)),
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 32}, 1, (128, 128)),
        ({"model_type": "falcon", "num_key_value_heads": None}, 1, (128, 128)),
        ({"multi_query": True, "new_decoder_architecture": True}, 8, (128, 128)),
        ({"multi_query": False}, 8, (128, 128)),
        ({"num_key_value_heads": None, "multi_query_group_num": 2, "kv_channels": 64}, 2, (64, 64)),
        ({"multi_query_attention": False, "multi_query_group_num": 2}, 32, (128, 128)),
        ({"head_dim": 192, "v_head_dim": 128}, 8, (192, 128)),
        (MLA, 32, (192, 128)),
        ({**MLA, "head_dim": 64}, 32, (192, 128)),  # transformers writes the rotary part as head_dim
        (dict.fromkeys(MLA, 0), 8, (128, 128)),
        ({"head_dim": 0}, 8, (128, 128)),
    ],
)
def test_kv_heads_and_head_dims_by_every_name(
    tmp_path: Path, changes: dict[str, Any], kv_heads: int, dims: tuple[int, int]
) -> None:
    (found,) = workloads_from_hf_config(written(tmp_path, LLAMA | changes), [512])
    assert (found.kv_heads, (found.spec.head_dim, found.spec.head_dim_v)) == (kv_heads, dims)


def test_a_config_of_mpt_has_its_heads_elsewhere(tmp_path: Path) -> None:
    mpt = {"d_model": 4096, "n_heads": 32, "max_seq_len": 2048, "torch_dtype": "bfloat16"}
    part = {"kv_n_heads": 4, "alibi": False, "sliding_window_size": -1, "model_type": ""}
    found = workloads_from_hf_config(written(tmp_path, mpt | {"attn_config": part}))
    assert {(w.heads, w.kv_heads, w.spec.head_dim) for w in found} == {(32, 4, 128)}
    assert max(w.q_len for w in found) == 2048


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("inner", [{"dtype": None}, {"torch_dtype": "float32"}, {}])
def test_a_text_model_is_found_wherever_it_stands(tmp_path: Path, name: str, inner: dict[str, Any]) -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    config = {"dtype": "float16", "num_attention_heads": 4, name: {"text_config": bare | inner}}
    (found,) = workloads_from_hf_config(written(tmp_path, config), [512])
    assert (found.heads, found.spec.dtype) == (32, "fp32" if inner.get("torch_dtype") else "fp16")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert workloads_from_hf_config(tmp_path)


def test_an_absent_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"absent\.json: No such file or directory; give a model's"):
        workloads_from_hf_config(tmp_path / "absent.json")


def test_explicit_sizes() -> None:
    found = workloads_from_args(
        head_dim=128,
        heads=32,
        kv_heads=8,
        seq=[512, 4096],
        mask=["causal", "sliding_window(1023, 0)"],
        dtype="fp16",
        score_mod="softcap(30.0)",
    )
    assert [(w.q_len, w.batch, w.params) for w in found] == [
        (512, 32, (("cap", 30.0),)),
        (4096, 4, (("cap", 30.0),)),
        (512, 32, (("left", 1023), ("right", 0), ("cap", 30.0))),
        (4096, 4, (("left", 1023), ("right", 0), ("cap", 30.0))),
    ]
    (decode,) = workloads_from_args(head_dim=64, heads=8, seq=1, k_len=4096, batch=16)
    assert (decode.q_len, decode.k_len, decode.batch, decode.kv_heads) == (1, 4096, 16, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "casual"}, "unknown mask 'casual'; known: block_sparse, causal,"),
        ({"dtype": "fp8"}, "dtype='fp8' is not served"),
        ({"seq": 0}, "seq=0 must be at least 1"),
        ({"head_dim": 100}, "head_dim=100 is not served"),
        ({"kv_heads": 3}, "heads=32 must be a multiple of kv_heads=3"),
        ({"score_mod": "softcap(0)"}, "cap"),
        ({"seq": 10**23}, "q_len=100000000000000000000000 must be at least 0 and at most 2147483647"),
        ({"batch": 10**20}, "batch=100000000000000000000 must be"),
        (
            {"mask": "neighborhood((64, 64), (13, 13))"},
            r"has 4,096 positions, and k_len is 512: .*pass 4,096",
        ),
        ({"mask": "neighborhood((8, 8), (3, 3))", "k_len": 64}, "has 64 positions, and q_len is 512"),
    ],
)
def test_bad_sizes_are_named(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"head_dim": 128, "heads": 32, "seq": 512}
    with pytest.raises(InvalidArgument, match=message):
        workloads_from_args(**given | changes)


def test_packed_sequences_of_a_grid_all_have_its_length() -> None:
    (dense,) = workloads_from_args(
        head_dim=64, heads=4, seq=64, batch=4, mask="causal & neighborhood((8, 8), (3, 3))"
    )
    assert packed(dense, 256).total_k == 256
    with pytest.raises(InvalidArgument, match=r"4 packed sequences of at most 64 keys have 200 together"):
        packed(dense, 200)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400), (" 1.5 m ", 90), ("2H", 7200)],
)
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "10x", "-5m", "0", "0s", "1h30", "m", "10 minutes"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is no duration; write 90s, 10m, 1h or 1h30m"):
        parse_budget(text)


def test_durations_are_readable() -> None:
    assert [format_seconds(s) for s in (0.2, 42, 60, 601, 3900)] == ["0s", "42s", "1m00s", "10m01s", "1h05m"]
    assert parse_budget(format_seconds(601)) == 601


def test_a_plan_checks_itself() -> None:
    assert [Plan().trial_limit(space) for space in (368, 100, 5)] == [36, FEWEST_TRIALS, 5]
    assert Plan(trials=5, budget_s=60).trial_limit(368) == 5
    assert Plan(trials=np.int64(5), budget_s=np.float32(60)).trial_limit(368) == 5  # type: ignore[arg-type]
    assert Plan(budget_s=60).trial_limit(368) == Plan(sampler="grid").trial_limit(368) == 368
    for changes, message in (
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"trials": 2.5}, "trials=2.5 must be a whole number, at least 1"),
        ({"trials": math.nan}, "trials=nan must be a whole number"),
        ({"trials": "4"}, "trials='4' must be a whole number"),
        ({"finalists": True}, "finalists=True must be a whole number, at least 0"),
        ({"budget_s": 0.0}, "budget_s=0.0 must be more than 0"),
        ({"budget_s": math.nan}, "budget_s=nan must be more than 0"),
        ({"budget_s": math.inf}, "budget_s=inf must be .* and at most 31536000, a year; None is no limit"),
        ({"budget_s": "10m"}, "budget_s='10m' must be more than 0"),
        ({"budget_s": parse_budget("9" * 300)}, r"budget_s=1e\+300 must be"),
        ({"sampler": []}, r"unknown sampler \[\]; known: "),
        ({"sampler": "luck"}, "unknown sampler 'luck'"),
        ({"passes": 0}, "passes=0 must be at least 1"),
        ({"seed": None}, "seed=None must be a whole number, from 0 to 4294967295"),
        ({"seed": -1}, "seed=-1 must be from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 must be"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Plan(**changes)  # type: ignore[arg-type]
