"""Models of transformers with attn_implementation="flashgen" beside eager, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import MODELS, batch, cache_argument, generated, logits, make_model

import flashgen

transformers = pytest.importorskip("transformers", minversion="5.0")

from flashgen.api import _dispatcher  # noqa: E402

flashgen.integrations.transformers.register()


def on_gpu(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return make_model(name, **changes).to("cuda", dtype)


def padded(side: str, length: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = batch(side, length)
    return ids.cuda(), mask.cuda()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_are_those_of_eager(name: str, side: str) -> None:
    model = on_gpu(name)
    ids, mask = padded(side, 70)
    ours, eager = (logits(model, each, ids, mask) for each in ("flashgen", "eager"))
    real = mask.bool()
    torch.testing.assert_close(ours[real], eager[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_as_close_to_float32_as_eager_is(name: str, side: str, dtype: torch.dtype) -> None:
    ids, mask = padded(side, 70)
    exact = logits(on_gpu(name), "eager", ids, mask)
    model = on_gpu(name, dtype)
    ours, eager = (logits(model, each, ids, mask).float() for each in ("flashgen", "eager"))
    real = mask.bool()
    errors = [(found - exact)[real].abs() for found in (ours, eager)]
    assert errors[0].mean() <= 1.5 * errors[1].mean() + 1e-4
    assert errors[0].max() <= 2.0 * errors[1].max() + 1e-3


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_those_of_eager(name: str, side: str, cache: str | None) -> None:
    model = on_gpu(name)
    ids, mask = padded(side)
    # Compiled decoding has a test of its own; here the kernels are called eagerly.
    options = {"cache_implementation": cache, "disable_compile": True}
    ours, eager = (generated(model, each, ids, mask, **options) for each in ("flashgen", "eager"))
    assert torch.equal(ours, eager)


def test_compiled_decoding_with_a_static_cache_gives_the_tokens_of_eager() -> None:
    """transformers compiles it with CUDA graphs: what is captured must be a kernel that is loaded."""
    torch._dynamo.reset()
    model = on_gpu("llama")
    ids, mask = padded("left")
    ours = generated(model, "flashgen", ids, mask, cache_implementation="static")
    again = generated(model, "flashgen", ids, mask, cache_implementation="static")
    eager = generated(model, "eager", ids, mask)
    assert torch.equal(ours, eager) and torch.equal(again, eager)


def test_a_model_runs_on_kernels_not_on_torch(caplog: pytest.LogCaptureFixture) -> None:
    model = on_gpu("mistral", torch.bfloat16)
    ids, mask = padded("left")
    before = _dispatcher().resolves
    logits(model, "flashgen", ids, mask)
    assert _dispatcher().resolves > before
    resolved = _dispatcher().resolves
    logits(model, "flashgen", ids, mask)
    assert _dispatcher().resolves == resolved, "a second pass is all hits"
    assert "torch's attention runs instead" not in caplog.text


def test_a_prompt_in_pieces_on_a_static_cache(side: str = "left") -> None:
    model = on_gpu("mistral")
    ids, mask = padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    eager = logits(model, "eager", ids, mask, position_ids=positions)
    model.set_attn_implementation("flashgen")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    pieces = []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 11), (11, 12), (12, 13), (13, 14)):
            found = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                use_cache=True,
                **cache_argument(model, cache),
            )
            pieces.append(found.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[real], eager[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_compiled_model_gives_its_own_logits(name: str) -> None:
    torch._dynamo.reset()
    model = on_gpu(name, attn_implementation="flashgen")
    ids, mask = padded("left")
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        ours = compiled(ids, attention_mask=mask, use_cache=False).logits
        plain = model(ids, attention_mask=mask, use_cache=False).logits
    real = mask.bool()
    torch.testing.assert_close(ours[real], plain[real], atol=1e-3, rtol=1e-3)


def test_gradients_are_those_of_eager() -> None:
    model = on_gpu("llama")
    ids, mask = padded("right")
    found = []
    for each in ("flashgen", "eager"):
        model.set_attn_implementation(each)
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-3)
