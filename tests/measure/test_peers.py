"""The opponents of benchmarks compute what FlashGen means, or say why they cannot."""

from __future__ import annotations

import pytest
import torch

from flashgen.build.inputs import make_inputs
from flashgen.build.reference import attention_reference, evaluate_rule
from flashgen.errors import Unsupported
from flashgen.measure.peers import PEERS, WINDOWS, Problem, build_peer
from flashgen.spec import masks
from flashgen.tune.suites import workloads_from_args

MASKS = [
    masks.full(),
    masks.causal(),
    masks.sliding_window(3, 2),
    masks.sliding_window(3, None),
    masks.sliding_window(None, 2),
    masks.causal() & masks.sliding_window(3, 2),
    masks.causal() & masks.sliding_window(3, None),
]


def test_every_window_is_tested() -> None:
    assert {mask.rule for mask in MASKS} == set(WINDOWS)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.describe())
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 9), (5, 9), (9, 9), (4, 4)])
def test_windows_are_the_masks(mask: masks.Mask, q_len: int, k_len: int) -> None:
    (workload,) = workloads_from_args(head_dim=16, heads=1, seq=q_len, k_len=k_len, mask=mask, batch=1)
    left, right = Problem.of(make_inputs(workload, "cpu")).window
    q_idx, k_idx = torch.arange(q_len).view(-1, 1), torch.arange(k_len)
    env = {"q_idx": q_idx, "k_idx": k_idx, "q_len": q_len, "k_len": k_len}
    keep = torch.as_tensor(evaluate_rule(mask, env)).expand(q_len, k_len)
    distance = q_idx + k_len - q_len - k_idx
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if left is not None:
        seen &= distance <= left
    if right is not None:
        seen &= -distance <= right
    assert torch.equal(keep, seen)


@pytest.mark.parametrize(
    ("mask", "q_len", "k_len"), [("full", 64, 64), ("causal", 64, 64), ("causal", 48, 80), ("causal", 1, 80)]
)
def test_torchs_flash_attention_gives_the_reference(mask: str, q_len: int, k_len: int) -> None:
    (workload,) = workloads_from_args(
        head_dim=32, heads=4, kv_heads=2, seq=q_len, k_len=k_len, mask=mask, batch=2
    )
    inputs = make_inputs(workload, "cpu")
    out = build_peer("fa2", inputs)()
    wanted, _ = attention_reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask, scale=inputs.scale)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_peer_takes_8_bit_values_in_16_bits(layout: str) -> None:
    (workload,) = workloads_from_args(head_dim=32, heads=4, kv_heads=2, seq=70, dtype="e4m3", batch=2)
    inputs = make_inputs(workload, "cpu", layout)
    widened = inputs.widened()
    assert widened.quantized is None and widened.q.dtype == torch.bfloat16
    assert widened.q.shape == inputs.q.shape and widened.widened() is widened
    q, k, v = inputs.true()
    wanted, _ = attention_reference(q, k, v, mask=inputs.mask, scale=inputs.scale)
    torch.testing.assert_close(build_peer("fa2", inputs)().float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("fa2", {"mask": "sliding_window(3, 0)"}, "no sliding window"),
        ("cudnn", {"score_mod": "softcap(30.0)"}, "no softcap"),
        ("cudnn", {"mask": "causal", "k_len": 128}, "no bottom-right causal mask"),
        ("flex", {"mask": "key_padding"}, "peers are compared on full, causal and window masks"),
        ("flex", {"sinks": "bf16"}, "peers are compared without sinks"),
        ("fa4", {}, "is not installed"),
        ("cudnn", {}, "cuDNN through torch's SDPA failed with"),
    ],
)
def test_a_peer_says_why_it_has_no_row(name: str, options: dict[str, object], reason: str) -> None:
    sizes: dict[str, object] = {"head_dim": 32, "heads": 2, "seq": 64, "batch": 1}
    (workload,) = workloads_from_args(**(sizes | options))  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=reason):
        build_peer(name, make_inputs(workload, "cpu"))


def test_the_table_has_a_title_for_each() -> None:
    assert set(PEERS) == {"cudnn", "fa2", "fa4", "flex"}
    assert len({peer.title for peer in PEERS.values()}) == 4
