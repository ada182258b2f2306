"""A file of several kernels, run one after another, with buffers of the call between them."""

from __future__ import annotations

import pytest
import torch
from kernels import STRIDED
from three_steps import DIM, three_steps

from flashgen.build.arguments import flatten
from flashgen.build.compile import toolchain
from flashgen.build.interpret import interpret


@pytest.mark.parametrize("rows", [1, 40])
def test_each_kernel_sees_what_the_one_before_it_left(rows: int) -> None:
    q, k, v = torch.randn(3, 2, 3, rows, DIM)
    out = torch.full_like(q, float("nan"))
    interpret(
        three_steps(toolchain(interpret=True)), STRIDED, flatten(q, k, v, out, None, 1.0, pointers=False)
    )
    assert torch.equal(out, 2 * v + 1)
