"""Specs, workloads, buckets, targets and records: checks, identities and JSON both ways."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec import form, masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload, length_code
from flashgen.spec.config import Config
from flashgen.spec.form import checked
from flashgen.spec.record import Measurement, Record, Status, Versions
from flashgen.spec.target import TARGETS, Target, bandwidth_class, find_target

SPEC = AttentionSpec(
    96, 64, "bf16", (masks.causal() & masks.sliding_window(1023, 0)).rule, score_mods.softcap(30.0).rule
)
WORK = Workload(SPEC, 4, 32, 8, 4096, 4096, (("left", 1023), ("right", 0), ("cap", 30.0)))


def test_growing_length_makes_few_buckets() -> None:
    codes = [length_code(n) for n in range(1, 4097)]
    assert len(set(codes)) == 13 and codes == sorted(codes)
    assert [length_code(n) for n in (0, 1, 2, 3, 4, 5, 4096, 4097)] == [0, 1, 2, 3, 3, 4, 13, 14]


def test_bucket_distance_is_in_octaves() -> None:
    near, far = replace(WORK, k_len=8192), replace(WORK, k_len=16384, batch=1)
    assert WORK.bucket().distance(replace(WORK, k_len=4000).bucket()) == 0
    assert WORK.bucket().distance(near.bucket()) == 1
    assert WORK.bucket().distance(far.bucket()) == 4
    assert WORK.bucket().distance(replace(WORK, heads=16).bucket()) == 1


def test_numeric_parameters_enter_the_bucket_by_their_log2() -> None:
    def bucket(left: float) -> object:
        return replace(WORK, params=(("left", left), *WORK.params[1:])).bucket()

    assert bucket(1023) == bucket(1024) != bucket(2048)
    assert bucket(0) != bucket(1)


def test_json_round_trips() -> None:
    record = Record(
        target=TARGETS["nvidia-h200"],
        workload=WORK,
        config=Config("attention_fwd", (("block_m", 128), ("loads", "tma"))),
        measurement=Measurement(Status.OK, 12.5, 12.0, 13.0, 5, 1e-3, 168, 0, 98304),
        kernel_hash="0123456789abcdef",
        versions=Versions("0.1.0", "3.6.0", "2.11.0", "580.1"),
        admission="tma",
        density="full",
        created_at="2026-11-29T00:00:00Z",
    )
    back = Record.from_json(json.loads(json.dumps(record.to_json())))
    assert back == record and back.created_at == record.created_at
    assert back.target.name == "nvidia-h200" and back.median_us == 12.5
    assert back.workload.spec.mask.name == SPEC.mask.name


def test_the_dtype_of_an_8_bit_specs_output_is_a_field_only_where_it_is_not_the_usual_one() -> None:
    """Records of before have no such key: they read, and are written, as they were."""
    usual, other = AttentionSpec(64, 64, "e4m3"), AttentionSpec(64, 64, "e4m3", out_dtype="fp16")
    assert usual == AttentionSpec(64, 64, "e4m3", out_dtype="bf16") != other
    assert (usual.result_dtype, other.result_dtype) == ("bf16", "fp16")
    assert "out_dtype" not in usual.to_json() and "out_dtype" not in SPEC.to_json()
    for spec in (usual, other):
        assert AttentionSpec.from_json(checked(spec.to_json(), form.SPEC, "spec")) == spec
    assert other.key == usual.key == "fwd d64 e4m3 dense mask[True]" and other.tuned_as() == usual
    assert replace(SPEC, dtype="fp16").result_dtype == "fp16" and not SPEC.quantized and usual.quantized
    with pytest.raises(InvalidArgument, match="out_dtype='fp16' of bf16 inputs is not served; allowed: bf16"):
        replace(SPEC, out_dtype="fp16")
    with pytest.raises(InvalidArgument, match=r"out_dtype='e4m3' of e4m3 inputs .* allowed: bf16, fp16"):
        replace(usual, out_dtype="e4m3")


def test_chunks_of_8_bit_head_dims_are_of_what_tensor_cores_multiply_at_a_time() -> None:
    assert AttentionSpec(80, 16, "e4m3").qk_chunks == (64, 32) and AttentionSpec(80, 16, "bf16").v_chunks == (
        16,
    )
    assert AttentionSpec(80, 16, "e4m3").v_chunks == (32,) and AttentionSpec(80, 80, "bf16").qk_chunks == (
        64,
        16,
    )


def test_key_ignores_what_moves_no_optimum() -> None:
    assert replace(SPEC, return_lse=True, positive_scale=False).key == SPEC.key
    assert replace(SPEC, return_lse=True).tuned_as() == SPEC
    keys = {
        replace(SPEC, **change).key
        for change in (
            {},
            {"head_dim": 64},
            {"dtype": "fp16"},
            {"mask": masks.causal().rule},
            {"score_mod": None},
        )
    }
    assert len(keys) == 5


@pytest.mark.parametrize(
    "change,words",
    [
        ({"head_dim": 100}, "multiples of 8 from 16 to 256"),
        ({"head_dim_v": 8}, "head_dim_v=8"),
        ({"head_dim": 264}, "head_dim=264"),
        ({"dtype": "int8"}, "allowed: fp16, bf16, fp32"),
        ({"op": "decode"}, "op='decode'"),
        ({"fp32_precision": "tf16"}, "'ieee' or 'tf32'"),
    ],
)
def test_spec_says_what_is_allowed(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        replace(SPEC, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change,words",
    [
        ({"batch": 0}, "at least 1"),
        ({"q_len": -1}, "at least 0"),
        ({"q_len": 2**31}, "q_len=2147483648 must be at least 0 and at most 2147483647"),
        ({"k_len": 10**100}, r"k_len=10{36}\.\.\. must be"),
        ({"heads": 99999999999, "kv_heads": 1}, "heads=99999999999 must be at least 1 and at most"),
        ({"batch": 10**20}, "batch=100000000000000000000 must be"),
        ({"batch": 2**27}, "batch=134217728 times heads=.* must be at most 2147483647; split the batch"),
        ({"batch": 2**20, "k_len": 2**31 - 1}, r"has tensors of \d+ elements; at most 281474976710656"),
        ({"kv_heads": 5}, "multiple of kv_heads=5"),
    ],
)
def test_workload_says_what_is_allowed(change: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        replace(WORK, **change)


def test_measurements_keep_their_reason() -> None:
    with pytest.raises(InvalidArgument, match="needs a reason"):
        Measurement(Status.CRASH)
    with pytest.raises(InvalidArgument, match="a time of at least"):
        Measurement(Status.OK)
    with pytest.raises(InvalidArgument, match="measured, model"):
        Measurement(Status.OK, 1.0, source="guess")


def test_call_facts_are_consistent() -> None:
    with pytest.raises(InvalidArgument, match="tma needs aligned"):
        CallFacts("unit", tma=True)


def test_c25_a_target_is_its_facts_not_its_label() -> None:
    h200 = find_target("nvidia-h200")
    assert replace(h200, name="NVIDIA H200 NVL") == h200
    assert find_target("nvidia-h100") != find_target("nvidia-h100-pcie") != h200
    assert len({t.key for t in TARGETS.values()}) == len(TARGETS)
    assert Target.from_json(h200.to_json()) == h200
    # As a live H200 reports it: 3,201 MHz, twice a clock, over 6,016 bits.
    assert bandwidth_class(2 * 3.201 * 6016 / 8) == h200.bandwidth
    with pytest.raises(UnknownName, match="known: nvidia-a10, "):
        find_target("h200")


def test_documents_are_for_masks_that_read_them() -> None:
    spec = replace(SPEC, mask=(masks.causal() & masks.document()).rule)
    work = replace(WORK, spec=spec, params=(("cap", 30.0),), documents=8)
    assert work.name == "b4h32kv8q4096k4096_cap30_documents8"
    assert work.bucket() == replace(work, documents=0).bucket(), "no call knows"
    assert Workload.from_json(work.to_json()) == work
    with pytest.raises(InvalidArgument, match="documents=8 is for masks that read the document of each key"):
        replace(WORK, documents=8)
    with pytest.raises(InvalidArgument, match="documents=-1 must be at least 0"):
        replace(work, documents=-1)
    assert replace(work, documents=4096).documents == 4096
    with pytest.raises(InvalidArgument, match="documents=4097 of k_len=4096 keys must be at most as many"):
        replace(work, documents=4097)
