"""Workspaces of streams and of captured graphs, with tensors of the CPU in place of a GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.build.workspace import WORDS, Workspaces


class Allocator:
    """`torch.zeros` on the CPU, which remembers what it was asked for and made."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.asked: list[dict[str, Any]] = []
        self.capturing = False
        self._zeros = torch.zeros

    def zeros(self, *size: int, **options: Any) -> torch.Tensor:
        self.asked.append(options)
        self.made.append(self._zeros(*size, dtype=options["dtype"]))
        return self.made[-1]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch, "zeros", made.zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def test_a_stream_keeps_its_workspace_and_shares_it_with_no_other(allocator: Allocator) -> None:
    spaces = Workspaces(3)
    first, second = spaces.address(0), spaces.address(0x7F00)
    assert [spaces.address(stream) for stream in (0, 0x7F00, 0)] == [first, second, first]
    assert [tensor.data_ptr() for tensor in allocator.made] == [first, second] and first != second
    for tensor, options in zip(allocator.made, allocator.asked, strict=True):
        assert (tensor.shape, tensor.dtype) == ((WORDS,), torch.int32) and not tensor.any()
        assert options["device"] == torch.device("cuda", 3)


def test_each_captured_launch_gets_one_that_the_graph_clears_and_nobody_keeps(allocator: Allocator) -> None:
    spaces = Workspaces(0)
    eager = spaces.address(7)
    allocator.capturing = True
    captured = [spaces.address(7), spaces.address(7), spaces.address(8)]
    assert len({eager, *captured}) == 4, "those made here are all still alive"
    allocator.capturing = False
    assert spaces.address(7) == eager
    assert spaces.address(8) not in captured
    assert len(allocator.made) == 5
