"""A training loop as people write it, of small models on a task that they learn in some hundred steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tiny_models import SIZES, make_model
from torch import Tensor


def batches(steps: int, lengths: tuple[int, ...], rows: int = 8) -> Iterator[dict[str, Tensor]]:
    """Sequences that count up by steps of their own, padded on the right; each batch of the next length."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        length = lengths[step % len(lengths)]
        start, by = (torch.randint(1, high, (rows, 1), generator=generator) for high in (60, 6))
        ids = 1 + (start + by * torch.arange(length)).remainder(SIZES["vocab_size"] - 1)
        real = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
        mask = (torch.arange(length) < real).long()
        yield {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def losses(
    name: str,
    attention: str,
    steps: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = torch.bfloat16,
    checkpointing: bool | None = None,
    compiling: dict[str, Any] | None = None,
    lengths: tuple[int, ...] = (24, 40),
) -> Tensor:
    """The loss of each step.

    Args:
        name: a row of `tiny_models.MODELS`.
        attention: eager, or what is compared with it.
        dtype: of autocast; None for float32 throughout.
        checkpointing: recompute layers in the backward pass, whether reentrantly.
        compiling: arguments of torch.compile.
    """
    model = make_model(name, attn_implementation=attention).to(device).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    forward = model if compiling is None else torch.compile(model, **compiling)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    found = []
    for batch in batches(steps, lengths):
        given = {key: each.to(device) for key, each in batch.items()}
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = forward(**given, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).cpu()


def trainer_losses(
    name: str, attention: str, steps: int, *, device: str = "cpu", bf16: bool = True
) -> Tensor:
    """As `losses`, by `transformers.Trainer`, which needs accelerate; all batches are of one length."""
    rows = [
        {key: each[row] for key, each in batch.items()}
        for batch in batches(steps, (24,))
        for row in range(len(batch["labels"]))
    ]
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            bf16=bf16,
            use_cpu=device == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = make_model(name, attn_implementation=attention)
        trainer = transformers.Trainer(
            model, options, train_dataset=rows, data_collator=transformers.default_data_collator
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return torch.tensor([each["loss"] for each in trainer.state.log_history if "loss" in each])


def smoothed(curve: Tensor, over: int = 20) -> Tensor:
    """Means of so many steps."""
    return curve.unfold(0, over, over).mean(1)
