"""Models of transformers trained with attn_implementation="flashgen" beside eager, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from training import losses, trainer_losses

from flashgen.integrations import transformers as integration

integration.register()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_the_loss_falls_as_with_eager(name: str) -> None:
    ours, eager = (losses(name, each, 8, dtype=None) for each in ("flashgen", "eager"))
    torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)
    assert ours[-1] < ours[0] - 0.3


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_a_trainers_loss_falls_as_with_eager(name: str) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    ours, eager = (trainer_losses(name, each, 8, bf16=False) for each in ("flashgen", "eager"))
    torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)
    assert len(ours) == 8 and ours[-1] < ours[0] - 0.3


def test_the_loss_under_autocast_is_that_of_eager_up_to_rounding() -> None:
    ours, eager = (losses("llama", each, 6) for each in ("flashgen", "eager"))
    torch.testing.assert_close(ours, eager, atol=5e-3, rtol=1e-3)
    assert not torch.equal(ours, eager)


@pytest.mark.parametrize("options", [{"checkpointing": False}, {"checkpointing": True}], ids=str)
def test_recomputed_layers_train_alike(options: dict[str, Any]) -> None:
    ours, plain = (losses("gemma2", "flashgen", 3, dtype=None, **each) for each in (options, {}))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_a_compiled_model_trains_in_two_graphs_whatever_the_lengths() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    lengths = (24, 40, 33, 17, 52)
    compiling = {"fullgraph": True, "backend": "aot_eager"}
    ours = losses("llama", "flashgen", 5, dtype=None, compiling=compiling, lengths=lengths)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    eager = losses("llama", "eager", 5, dtype=None, lengths=lengths)
    torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)
