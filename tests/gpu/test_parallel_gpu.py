"""Training on two GPUs: DDP, FSDP2, and heads shared out over a DeviceMesh."""

from __future__ import annotations

import pytest
import torch
from parallel_training import PROCESSES, run

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two GPUs")


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "heads"])
def test_two_gpus_have_the_gradients_of_one(way: str) -> None:
    run(way, "nccl")
