"""What is dropped: Philox as published, how often, and the same whoever asks for which part."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen.build import dropout
from flashgen.build.dropout import Dropout, draw_seed, philox

WHOLE = slice(0, 256)


# The known answers that the authors publish with their code (Random123, kat_vectors), of 7 and of 10 rounds.
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "words"),
    [
        (7, (0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (2**32 - 1,) * 4, -1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            7,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
        (10, (0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_philox_is_the_published_one(
    rounds: int, counter: tuple[int, ...], key: int, words: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropout, "ROUNDS", rounds)
    found = philox([torch.tensor([word]) for word in counter], torch.tensor([key]))
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("probability", [0.0, 1e-3, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_the_probability_says(probability: float) -> None:
    """Of 2^20 draws within five standard deviations, and of each of the four words of a counter."""
    kept = Dropout(probability, torch.tensor([7])).kept(WHOLE, WHOLE, batch=4, heads=4)
    for each in (kept, *(kept[:, :, i::16, j::16] for i in (0, 8) for j in (0, 8))):
        slack = 5 * math.sqrt(probability * (1 - probability) / each.numel())
        assert abs(float(each.double().mean()) - (1 - probability)) <= slack


def test_draws_do_not_hang_together() -> None:
    """Neighbours along each axis, pairs of one counter, other seeds: nothing beyond five deviations."""
    signs = Dropout(0.5, torch.tensor([3])).kept(WHOLE, WHOLE, batch=4, heads=4).double() * 2 - 1
    other = Dropout(0.5, torch.tensor([4])).kept(WHOLE, WHOLE, batch=4, heads=4).double() * 2 - 1
    for shifted in (
        *(signs.roll(by, axis) for axis in (2, 3) for by in (1, 8, 16)),
        *(signs.roll(1, axis) for axis in (0, 1)),
        other,
    ):
        assert abs(float((signs * shifted).mean())) <= 5 / math.sqrt(signs.numel())


def test_a_part_is_a_part_of_the_whole() -> None:
    drops = Dropout(0.3, torch.tensor([-5]))
    whole = drops.kept(slice(0, 70), slice(0, 90), batch=3, heads=2)
    part = drops.kept(slice(13, 57), slice(21, 88), batch=1, heads=2, sequence=2)
    assert torch.equal(part, whole[2:, :, 13:57, 21:88])
    one = Dropout(0.3, torch.tensor([-5]), head=1, heads=2)
    assert torch.equal(one.kept(slice(0, 70), slice(0, 90), batch=3, heads=1), whole[:, 1:])


def test_threshold_and_factor() -> None:
    seed = torch.tensor([0])
    assert [Dropout(p, seed).threshold for p in (0.0, 0.5, 1.0)] == [-(2**31), 0, 2**31 - 1]
    assert [Dropout(p, seed).factor for p in (0.0, 0.5, 1.0)] == [1.0, 2.0, 0.0]


def test_the_seed_is_of_torchs_generator() -> None:
    torch.manual_seed(11)
    first = draw_seed(torch.device("cpu"))
    assert first.dtype == torch.int64 and first.shape == (1,)
    assert not torch.equal(draw_seed(torch.device("cpu")), first)
    torch.manual_seed(11)
    assert torch.equal(draw_seed(torch.device("cpu")), first)
