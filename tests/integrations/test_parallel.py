"""Training on two processes: DDP, FSDP2, and heads shared out over a DeviceMesh; on the CPU, by gloo."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "heads"])
def test_two_processes_have_the_gradients_of_one(way: str) -> None:
    from parallel_training import run

    run(way, "gloo")


def test_tensors_that_know_they_are_shared_out() -> None:
    from parallel_training import run_calls_of_dtensors

    run_calls_of_dtensors()
