"""`flashgen.attention` on a GPU: values against the reference, and what only a device can get wrong."""

from __future__ import annotations

import gc
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import flashgen
from flashgen import api, masks, score_mods
from flashgen.build.device import live_target
from flashgen.build.inputs import make_inputs
from flashgen.build.reference import attention_reference
from flashgen.codegen.families import FAMILIES
from flashgen.errors import InvalidArgument
from flashgen.measure.check import Expected
from flashgen.runtime.checks import check
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.spec.attention import Workload
from flashgen.tune.plan import Plan

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}


@pytest.fixture
def fresh() -> Dispatcher:
    """The process's dispatcher, made anew."""
    api._dispatcher.cache_clear()
    return api._dispatcher()


def draw(
    batch: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    q_len: int = 200,
    k_len: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    k_len = q_len if k_len is None else k_len
    shapes = (
        (heads, q_len, head_dim),
        (kv_heads, k_len, head_dim),
        (kv_heads, k_len, head_dim_v or head_dim),
    )
    return [torch.randn(batch, *s, generator=generator, device=device, dtype=dtype) for s in shapes]


def compare(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """One call, in both layouts, against the reference on contiguous copies."""
    mask, cap = options.get("mask"), options.get("score_mod")
    mask = masks.parse_mask(mask) if isinstance(mask, str) else mask
    exact, exact_lse = attention_reference(
        q.contiguous(), k.contiguous(), v.contiguous(), mask=mask, score_mod=cap, scale=options.get("scale")
    )
    out, lse = flashgen.attention(q, k, v, **options, return_lse=True)
    limit = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.float(), exact, atol=limit, rtol=limit)
    torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(flashgen.attention(q, k, v, **options), out, atol=limit, rtol=limit)
    other = flashgen.attention(*(t.transpose(1, 2) for t in (q, k, v)), **options, layout="bshd")
    torch.testing.assert_close(other.transpose(1, 2).float(), exact, atol=limit, rtol=limit)


def runs_a_kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> bool:
    return flashgen.explain(q, k, v, **options).family in FAMILIES


KEEP = torch.rand(2, 333, generator=torch.Generator().manual_seed(1)) < 0.7
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": "causal"},
    "top left": {"mask": masks.causal("top_left")},
    "window": {"mask": masks.sliding_window(50, 7)},
    "softcap": {"mask": "causal", "score_mod": score_mods.softcap(5.0)},
    "negative scale": {"mask": "causal", "scale": -0.2},
    "scale 0": {"mask": "causal", "scale": 0.0},
    "negative scale and cap": {"score_mod": score_mods.softcap(5.0), "scale": -0.2},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_are_those_of_the_reference(rules: dict[str, Any], dtype: torch.dtype) -> None:
    for sizes in ({"k_len": 333}, {"q_len": 1, "k_len": 333}, {"q_len": 333, "k_len": 70}):
        q, k, v = draw(dtype=dtype, **sizes)
        compare(q, k, v, **rules)
        assert runs_a_kernel(q, k, v, **rules)


@pytest.mark.parametrize("keep", ["lengths", "long lengths", "keep"])
def test_padding_of_keys(keep: str) -> None:
    q, k, v = draw(k_len=333)
    operand = {
        "lengths": torch.tensor([333, 100], dtype=torch.int32),
        "long lengths": torch.tensor([0, 77]),
        "keep": KEEP,
    }[keep].cuda()
    compare(q, k, v, mask=masks.key_padding(operand))
    compare(q, k, v, mask=masks.causal() & masks.key_padding(operand))
    strided = torch.stack([operand, operand], -1)[..., 0]
    compare(q, k, v, mask=masks.key_padding(strided))


@pytest.mark.parametrize("head_dims", [(16, 16), (40, 40), (96, 64), (128, 128), (192, 128), (256, 256)])
def test_head_dims(head_dims: tuple[int, int]) -> None:
    head_dim, head_dim_v = head_dims
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = draw(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
        compare(q, k, v, mask="causal")
        assert runs_a_kernel(q, k, v, mask="causal")


def test_a_second_call_of_the_kind_is_a_hit(fresh: Dispatcher) -> None:
    for length in (200, 201, 256):
        flashgen.attention(*draw(q_len=length), mask="causal")
    assert fresh.resolves == 1


def test_c02_rows_that_see_nothing_are_zero() -> None:
    q, k, v = draw(q_len=50, k_len=20)
    out, lse = flashgen.attention(q, k, v, mask="causal", return_lse=True)
    assert not out[:, :, :30].any() and (lse[:, :, :30] == -math.inf).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, :, 30:]).all()
    for sizes in ((5, 2), (2, 5)):
        compare(*draw(q_len=sizes[0], k_len=sizes[1]), mask="causal")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c03_scores_of_minus_ten_million_are_scores(dtype: torch.dtype) -> None:
    q = torch.full((1, 2, 64, 128), 300.0, dtype=dtype, device="cuda")
    k = torch.full((1, 2, 200, 128), -300.0, dtype=dtype, device="cuda")
    v = torch.randn(1, 2, 200, 128, device="cuda").to(dtype)
    for mask in (None, "causal"):
        out, lse = flashgen.attention(q, k, v, mask=mask, scale=1.0, return_lse=True)
        average = v.float().mean(2) if mask is None else v[:, :, :137].float().mean(2)
        row = out[:, :, -1] if mask is None else out[:, :, 0]
        torch.testing.assert_close(row.float(), average, atol=5e-3, rtol=2e-2)
        assert torch.isfinite(lse).all()


@pytest.mark.parametrize("mask", [None, "causal"])
def test_c04_no_keys_launch_nothing(mask: str | None) -> None:
    q, k, v = draw(4, q_len=8, k_len=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out, lse = flashgen.attention(q, k, v, mask=mask, return_lse=True)
        torch.cuda.synchronize()
    assert not out.any() and (lse == -math.inf).all()
    assert not [event.key for event in profile.key_averages() if "attention_fwd" in event.key]
    assert flashgen.attention(q[:, :, :0], *draw(4, k_len=5)[1:], mask=mask).shape == (4, 8, 0, 64)


def test_c09_offsets_beyond_2_to_the_31() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 16 GB free")
    length, heads = 99_866, 56
    fused = torch.randn(1, length, 3, heads, 128, device="cuda", dtype=torch.float16)
    assert fused.stride(1) * length > 2**31
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    out = flashgen.attention(q, k, v)
    assert runs_a_kernel(q, k, v)
    for head in (0, heads - 1):
        one = slice(head, head + 1)
        rows = q[:, one, -32:].contiguous()
        exact, _ = attention_reference(rows, k[:, one].contiguous(), v[:, one].contiguous())
        torch.testing.assert_close(out[:, one, -32:].float(), exact, atol=2e-3, rtol=2e-2)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(65_536, 1), (2, 32_769)])
def test_c11_more_than_65535_batches_times_heads(shape: tuple[int, int]) -> None:
    batch, heads = shape
    q, k, v = draw(batch, heads, heads, 1, 1, 16)
    out = flashgen.attention(q, k, v)
    assert torch.equal(out, v), "one key: its value, everywhere"


def test_c12_views_of_one_fused_tensor() -> None:
    fused = torch.randn(2, 300, 3, 8, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    compare(q, k, v, mask="causal")
    interleaved = torch.randn(2, 300, 8, 64 * 3, device="cuda", dtype=torch.bfloat16)
    compare(*(part.transpose(1, 2) for part in interleaved.split(64, -1)), mask="causal")
    odd = torch.randn(2, 8, 64, 300, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    compare(odd, k, v, mask="causal")
    compare(q, k[:, ::2], v[:, ::2], mask="causal")


def test_c13_a_broadcast_batch_and_a_real_one() -> None:
    one = draw(1)
    compare(*(t.expand(2, -1, -1, -1) for t in one), mask="causal")
    compare(*draw(2), mask="causal")
    compare(*draw(1), mask="causal")


def test_c14_unaligned_tensors_and_rows_beside_what_must_not_be_read() -> None:
    q, k, v = draw(head_dim=72)
    buffer = torch.zeros(q.numel() + 1, device="cuda", dtype=q.dtype)
    buffer[1:] = q.flatten()
    compare(buffer[1:].view(q.shape), k, v, mask="causal")
    for columns in (76, 80, 73):
        wide = torch.full((*q.shape[:3], columns), math.nan, device="cuda", dtype=q.dtype)
        wide[..., :72] = q
        compare(wide[..., :72], k, v, mask="causal")
        assert wide[..., 72:].isnan().all()


def test_c15_a_head_dim_of_256_in_float32_gets_a_config_that_fits() -> None:
    q, k, v = draw(head_dim=256, dtype=torch.float32)
    compare(q, k, v, mask="causal")
    assert runs_a_kernel(q, k, v, mask="causal")


def test_c18_the_soft_cap_is_not_ignored() -> None:
    q, k, v = (4 * t for t in draw())
    results = [flashgen.attention(q, k, v, score_mod=score_mods.softcap(cap)) for cap in (0.5, 5.0, 50.0)]
    results.append(flashgen.attention(q, k, v))
    for i, one in enumerate(results):
        assert all((one - other).abs().max() > 1e-2 for other in results[i + 1 :])


def test_c20_growing_lengths_compile_once(fresh: Dispatcher) -> None:
    q, k, v = draw(1, q_len=1, k_len=4096)

    def calls(first: int) -> tuple[int, int]:
        for k_len in range(first, 4097, 5):
            flashgen.attention(q, k[:, :, :k_len], v[:, :, :k_len], mask="causal")
        return fresh.resolves, len(fresh._kernels)

    resolves, kernels = calls(1)
    assert resolves <= 16 and kernels <= 3, "records of near lengths have few configs between them"
    assert calls(8) == (resolves, kernels), "lengths between those seen before load nothing"


def capture(call: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_c21_a_first_call_inside_a_capture(fresh: Dispatcher, caplog: pytest.LogCaptureFixture) -> None:
    for options in (
        {"mask": "causal"},
        {"mask": masks.sliding_window(31, 0)},
        {"score_mod": score_mods.softcap(9.0)},
    ):
        q, k, v = draw()
        with caplog.at_level(logging.WARNING, "flashgen"):
            graph, out = capture(lambda: flashgen.attention(q, k, v, **options))  # noqa: B023
        assert fresh.resolves == 0 and not fresh._kernels
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        mask = options.get("mask")
        exact, _ = attention_reference(
            q, k, v, mask=masks.causal() if mask == "causal" else mask, score_mod=options.get("score_mod")
        )
        torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=3e-2)
    assert "a CUDA graph is being captured" in caplog.text


def test_c21_a_kernel_that_is_loaded_is_captured_and_replays(fresh: Dispatcher) -> None:
    q, k, v = draw()
    flashgen.attention(q, k, v, mask="causal")
    resolves = fresh.resolves
    graph, out = capture(lambda: flashgen.attention(q, k, v, mask="causal"))
    longer = draw(q_len=500)
    graph2, out2 = capture(
        lambda: flashgen.attention(*longer, mask="causal")
    )  # a miss, served by what is loaded
    assert fresh.resolves == resolves
    for tensor in (q, k, v, *longer):
        tensor.normal_()
    for _ in range(3):
        graph.replay()
        graph2.replay()
    torch.cuda.synchronize()
    for found, inputs in ((out, (q, k, v)), (out2, longer)):
        exact, _ = attention_reference(*inputs, mask=masks.causal())
        torch.testing.assert_close(found.float(), exact, atol=3e-2, rtol=3e-2)


def test_warmup_makes_the_first_call_a_hit(fresh: Dispatcher) -> None:
    q, k, v = draw()
    work = check(q, k, v, "causal", None, None, "bhsd", False).workload()
    (told,) = flashgen.warmup(work)
    assert told.family in FAMILIES
    graph, out = capture(lambda: flashgen.attention(q, k, v, mask="causal"))
    assert fresh.resolves == 0
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, flashgen.attention(q, k, v, mask="causal"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_c23_tensors_on_a_gpu_that_is_not_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    compare(*draw(device="cuda:1"), mask="causal")
    compare(*draw(device="cuda:0"), mask="causal")
    assert flashgen.attention(*draw(device="cuda:1")).device.index == 1
    q, k, v = draw(device="cuda:1")
    with pytest.raises(InvalidArgument, match=r"k.device=cuda:0 must be that of q, cuda:1"):
        flashgen.attention(q, k.to("cuda:0"), v)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_on_several_devices_are_refused(device: str) -> None:
    q, k, v = draw()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=f"v.device={device} must be that of q, cuda:0"):
            flashgen.attention(q, k, v.to(device))
        flashgen.attention(q, k, v)
    with pytest.raises(InvalidArgument, match="keys of key_padding is on cpu, q on cuda:0"):
        flashgen.attention(q, k, v, mask=masks.key_padding(torch.tensor([3, 4])))


@pytest.mark.parametrize("gradient", [False, True])
def test_c35_compiled_with_lengths_that_vary(gradient: bool) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    function = lambda q, k, v: flashgen.attention(q, k, v, mask="causal")  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for length in (100, 4096, 77, 1):
        inputs = [t.requires_grad_(gradient) for t in draw(1, 4, 2, length)]
        out = compiled(*inputs)
        torch.testing.assert_close(out, function(*inputs), atol=2e-2, rtol=2e-2)
        if gradient:
            assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), inputs))
    assert counter.frame_count <= 2


def test_c22_compiled_with_cuda_graphs() -> None:
    torch._dynamo.reset()
    function = lambda q, k, v: flashgen.attention(2 * q, k, v, mask="causal") + 1  # noqa: E731
    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    for _ in range(2):
        for inputs in (draw(), draw(1, q_len=70)):
            for _ in range(3):
                out = compiled(*inputs).clone()
            torch.testing.assert_close(out, function(*inputs), atol=2e-2, rtol=2e-2)


def test_c38_the_same_bits_a_hundred_times() -> None:
    q, k, v = draw(q_len=1000)
    first = flashgen.attention(q, k, v, mask="causal")
    assert all(torch.equal(flashgen.attention(q, k, v, mask="causal"), first) for _ in range(100))


def test_c40_memory_does_not_grow_with_calls() -> None:
    def calls(count: int) -> None:
        for step in range(count):
            lengths = torch.tensor([1 + step % 200, 7], device="cuda")
            flashgen.attention(q, k, v, mask=masks.key_padding(lengths))
            flashgen.attention(q, k, v, mask=masks.sliding_window(step % 50, 0))

    q, k, v = draw()
    calls(500)
    torch.cuda.synchronize()
    gc.collect()
    device, host = torch.cuda.memory_allocated(), _resident()
    calls(5000)
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= device + 2**20 and _resident() < host + 20 * 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_c41_out_strides_follow_q() -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw(head_dim_v=64))
    assert flashgen.attention(q, k, v).stride() == q.stride()
    wide = torch.randn(2, 2, 200, 128, device="cuda", dtype=q.dtype)
    assert flashgen.attention(q, k, wide).transpose(1, 2).is_contiguous()


def test_other_streams_and_threads() -> None:
    q, k, v = draw(q_len=2000)
    exact = flashgen.attention(q, k, v, mask="causal")
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                mine = q * 1.0  # must have run before the kernel reads it
                if not torch.equal(flashgen.attention(mine, k, v, mask="causal"), exact):
                    wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_gradients_are_those_of_float64(rules: dict[str, Any]) -> None:
    inputs = draw(q_len=40, k_len=30, dtype=torch.float32)
    found = []
    for dtype, device in ((torch.float32, "cuda"), (torch.float32, "cpu")):
        own = [t.to(device, dtype).requires_grad_() for t in inputs]
        out = flashgen.attention(*own, **rules)
        assert out.grad_fn is not None
        found.append([out, *torch.autograd.grad(out.square().sum(), own)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-3)


def test_tf32_is_used_where_torch_allows_it() -> None:
    q, k, v = draw(q_len=500, head_dim=128, dtype=torch.float32)
    exact, _ = attention_reference(q, k, v)
    errors = []
    for setting in ("highest", "high"):
        torch.set_float32_matmul_precision(setting)
        try:
            errors.append((flashgen.attention(q, k, v) - exact).abs().max().item())
        finally:
            torch.set_float32_matmul_precision("highest")
    assert errors[0] < 1e-5 < errors[1] < 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"enable_gqa": True, "is_causal": True},
        {"attn_mask": KEEP[:, None, None, :300]},
        {"attn_mask": torch.zeros(2, 1, 1, 300, dtype=torch.bool)},
        {"attn_mask": torch.randn(200, 300)},
        {"attn_mask": torch.rand(200, 300) < 0.8},
    ],
)
def test_sdpa_means_what_torch_means(options: dict[str, Any]) -> None:
    q, k, v = draw(heads=8, kv_heads=2 if "enable_gqa" in options else 8, k_len=300)
    given = {n: v_.cuda() if isinstance(v_, Tensor) else v_ for n, v_ in options.items()}
    if "attn_mask" in given and given["attn_mask"].dtype != torch.bool:
        given["attn_mask"] = given["attn_mask"].to(q.dtype)
    expected = F.scaled_dot_product_attention(q, k, v, **given)
    if "attn_mask" in given and not given["attn_mask"].any():
        expected = torch.zeros_like(expected)  # torch's backends differ here
    torch.testing.assert_close(flashgen.sdpa(q, k, v, **given), expected, atol=2e-2, rtol=2e-2)


def test_what_is_tuned_is_used_exported_and_used_from_the_bundle(fresh: Dispatcher, tmp_path: Path) -> None:
    q, k, v = draw(2, 8, 2, 512, head_dim=64)
    work: Workload = check(q, k, v, "causal", None, None, "bhsd", False).workload()
    result = flashgen.tune(work, plan=Plan(trials=4, finalists=2, passes=2))
    assert not result.problem and result.summaries[0].winner is not None
    winner = result.summaries[0].winner
    told = flashgen.explain(q, k, v, mask="causal")
    assert told.runs == winner.config.name
    assert "exact bucket: measured" in str(told)
    expected = Expected(make_inputs(work, "cuda"), work.spec)
    inputs = make_inputs(work, "cuda")
    assert expected.judge(flashgen.attention(inputs.q, inputs.k, inputs.v, mask="causal")).ok
    path = flashgen.export(work, tmp_path / "bundle")
    bundle = flashgen.load_bundle(path)
    assert bundle.target == live_target()
    told = flashgen.explain(q, k, v, mask="causal")
    assert told.steps[0].source == "bundle bundle" and told.steps[0].verdict == "accepted"
    assert expected.judge(flashgen.attention(inputs.q, inputs.k, inputs.v, mask="causal")).ok
    off = torch.zeros(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    off.copy_(q)
    compare(off, k, v, mask="causal")
    api._dispatcher.cache_clear()  # the bundle is not for other tests
