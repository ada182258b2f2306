"""Models of transformers trained with attn_implementation="flashgen" beside eager, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from training import losses, smoothed, trainer_losses

from flashgen import api
from flashgen.integrations import transformers as integration

integration.register()


@pytest.mark.parametrize("by", ["a plain loop", "transformers.Trainer"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_two_hundred_steps_give_eagers_curve_up_to_bf16_noise(name: str, by: str) -> None:
    """What noise is, eager in float32 says: under bf16 its own curve moves by so much."""
    if by == "a plain loop":
        ours, eager = (losses(name, each, 200, device="cuda") for each in ("flashgen", "eager"))
        exact = losses(name, "eager", 200, device="cuda", dtype=None)
    else:
        pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
        ours, eager = (trainer_losses(name, each, 200, device="cuda") for each in ("flashgen", "eager"))
        exact = trainer_losses(name, "eager", 200, device="cuda", bf16=False)
    torch.testing.assert_close(ours[:10], eager[:10], atol=1e-2, rtol=0.0)
    apart, noise = ((smoothed(each) - smoothed(eager)).abs().max() for each in (ours, exact))
    assert apart <= 2 * noise + 0.01
    assert smoothed(ours)[-1] < 0.2 * smoothed(ours)[0]


def test_the_steps_run_on_kernels(caplog: pytest.LogCaptureFixture) -> None:
    api._dispatcher.cache_clear()
    losses("llama", "flashgen", 4, device="cuda")
    resolved = api._dispatcher().resolves
    losses("llama", "flashgen", 4, device="cuda")
    assert api._dispatcher().resolves == resolved >= 2, "forward and backward, found once"
    assert "torch's attention runs instead" not in caplog.text


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_train_alike(reentrant: bool) -> None:
    ours, plain = (
        losses("gemma2", "flashgen", 5, device="cuda", dtype=None, checkpointing=each)
        for each in (reentrant, None)
    )
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


def test_a_compiled_model_trains_in_two_graphs_whatever_the_lengths() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    lengths = (24, 40, 33, 17, 52)
    compiling = {"fullgraph": True}
    ours = losses("llama", "flashgen", 8, device="cuda", compiling=compiling, lengths=lengths)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    eager = losses("llama", "eager", 8, device="cuda", lengths=lengths)
    torch.testing.assert_close(ours, eager, atol=2e-2, rtol=0.0)
