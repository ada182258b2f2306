"""Inputs that attention finds hard, and how far an output of theirs is from exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.build.inputs import Inputs


class Errors(NamedTuple):
    """Of an output, over the root mean square of the exact one."""

    rms: float
    largest: float


def errors_of(out: Tensor, exact: Tensor) -> Errors:
    """The root mean square of the differences, and the largest one; both tensors of one shape."""
    size, difference = exact.square().mean().sqrt(), out.to(exact.dtype) - exact
    return Errors(float(difference.square().mean().sqrt() / size), float(difference.abs().max() / size))


def normal(inputs: Inputs) -> Inputs:
    """Scores of about 1."""
    return inputs


def large(inputs: Inputs) -> Inputs:
    """Scores of up to 1e4, where a bit of a rounded score is worth more than 1."""
    scores = inputs.q.float() @ inputs.k.float().mT * inputs.scale
    return replace(inputs, q=(inputs.q.float() * (1e4 / scores.abs().max())).to(inputs.q.dtype))


def rising(inputs: Inputs) -> Inputs:
    """Each key scores higher than the one before it, by 40 over the sequence: the maximum keeps moving."""
    return _steep(inputs, torch.linspace(-20, 20, inputs.k.shape[2], device=inputs.k.device))


def falling(inputs: Inputs) -> Inputs:
    """The same for a kernel that walks the keys from the last to the first."""
    return _steep(inputs, torch.linspace(20, -20, inputs.k.shape[2], device=inputs.k.device))


def _steep(inputs: Inputs, bias: Tensor) -> Inputs:
    """Adds a bias for each key to the scores, by way of the last element of the head dim."""
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., -1] = 1 / inputs.scale
    k[..., -1] = bias
    return replace(inputs, q=q, k=k)


HARD: dict[str, Callable[[Inputs], Inputs]] = {
    "normal": normal,
    "scores of 1e4": large,
    "rising maximum": rising,
    "falling maximum": falling,
}
"""By what a report calls them; for inputs (batch, heads, length, head_dim) with as many kv heads."""
