"""Small randomly initialised models, alike on every machine, and batches with padding on either side."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 6

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral, wide window": ("Mistral", {"sliding_window": 64}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {"sliding_window": WINDOW, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}
"""Gemma 2 has every other layer windowed, and caps its scores; GPT-OSS has it too, and sinks. It takes
both experts of each layer: a choice of one would turn rounding into another model."""


def make_model(name: str, **changes: Any) -> Any:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):  # drawn near 0: these take a tenth of a row's weight, or most
                parameter.copy_(torch.linspace(0.0, 4.0, parameter.numel()))
    return model


def batch(side: str, length: int = 14) -> tuple[Tensor, Tensor]:
    """Token ids (3, length) and their mask; the first sequence is whole."""
    ids = torch.randint(1, SIZES["vocab_size"], (3, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padding in ((1, 4), (2, length - 3)):
        if side == "left":
            mask[row, :padding] = 0
        elif side == "right":
            mask[row, -padding:] = 0
    return ids * mask, mask


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """A KV cache under the name that this version of transformers gives it; a wrong name is ignored there."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}


def logits(model: Any, attention: str, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    model.set_attn_implementation(attention)
    with torch.no_grad():
        found: Tensor = model(ids, attention_mask=mask, **options).logits
    return found


def generated(model: Any, attention: str, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    model.set_attn_implementation(attention)
    found: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **options)
    return found
