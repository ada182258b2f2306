"""`flashgen show --draw`: which pairs a mask keeps, and what its tiles are to a kernel, as a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.errors import InvalidArgument
from flashgen.settings import unwritable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flashgen.codegen.family import Tiling
    from flashgen.spec.attention import Workload

MOST_PIXELS = 1024
"""Along each side; of more positions so many are drawn, at even distances."""
MOST_TILES = 2**27
"""Of which each is classified: 134 MB. A causal mask of 1,000,000 positions has 81 million, in 5 s."""
MOST_LENGTH = 2**22
"""Positions along each side: what a mask reads of each is a Python number here."""
MOST_LINES = 64
"""Along each side, between tiles: more would hide what lies between them."""
_NEED_LATEX = frozenset({"pgf"})
"""Formats that matplotlib leaves to a program which few machines have."""


class Pixel(IntEnum):
    """What a kernel does about a pair: the values of a picture's array."""

    SKIPPED = 0
    """Its tile is not visited."""
    DROPPED = 1
    """Its tile is visited, with the element mask, which drops the pair."""
    KEPT = 2
    """The same, and the mask keeps it."""
    FULL = 3
    """Its tile is visited without the element mask."""


_LOOKS = {
    Pixel.SKIPPED: ("#ececec", "skipped"),
    Pixel.DROPPED: ("#f7c98b", "partial, pairs dropped"),
    Pixel.KEPT: ("#d9700a", "partial, pairs kept"),
    Pixel.FULL: ("#2a6f97", "full"),
}
"""Colours that also differ in lightness, and words."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A mask's tiles of one head and sequence."""

    pixels: NDArray[Any]
    """uint8 (rows, keys) of `Pixel`, the first query on top; at most `MOST_PIXELS` along each side."""
    lengths: tuple[int, int]
    """Queries and keys."""
    blocks: tuple[int, int]
    """Of them in a tile."""
    skipped: int
    partial: int
    full: int

    def __str__(self) -> str:
        total = self.skipped + self.partial + self.full
        told = f"{self.skipped:,} skipped, {self.partial:,} partial, {self.full:,} full"
        return f"{total:,} tiles of {self.blocks[0]} x {self.blocks[1]}: {told}"

    def to_json(self) -> dict[str, int]:
        """The tiles."""
        return {
            "block_m": self.blocks[0],
            "block_n": self.blocks[1],
            "skipped": self.skipped,
            "partial": self.partial,
            "full": self.full,
        }


def picture(workload: Workload, tiling: Tiling) -> Picture:
    """What a kernel with such tiles visits of the first head and sequence, as `tiles.visited` says; tensors
    that the mask reads are drawn as for tuning.

    Raises:
        InvalidArgument: the sequences are packed, there are more than `MOST_TILES` or `MOST_LENGTH`, or
            nobody can know what a sensible operand would be.
    """
    import numpy as np
    import torch

    from flashgen.build.inputs import make_rules
    from flashgen.build.reference import evaluate_rule
    from flashgen.spec.tiles import visited

    if workload.spec.packed:
        raise InvalidArgument(
            "--draw shows the tiles of a call whose sequences are not packed: leave out --varlen"
        )
    lengths, blocks = (workload.q_len, workload.k_len), (tiling.block_m, tiling.block_n)
    counts = [-(-length // block) for length, block in zip(lengths, blocks, strict=True)]
    if math.prod(counts) > MOST_TILES or max(lengths) > MOST_LENGTH:
        raise InvalidArgument(
            f"--draw counts each tile, and {lengths[0]:,} queries of {lengths[1]:,} keys have "
            f"{math.prod(counts):,} of {blocks[0]} x {blocks[1]}; at most {MOST_TILES:,} are counted, and "
            f"{MOST_LENGTH:,} positions along a side: give a smaller --seq, or --q-len and --k-len"
        )
    mask, _ = make_rules(workload)
    env: dict[str, Any] = {"q_len": lengths[0], "k_len": lengths[1], "batch": 0, "head": 0, "kv_head": 0}
    numbers = {name: value for (name, _), value in zip(mask.rule.params, mask.values, strict=True)}
    tables = {each.name: table.tolist() for each, table in zip(mask.rule.operands, mask.tensors, strict=True)}
    classes = np.full(counts, Pixel.SKIPPED, dtype=np.uint8)
    for row, (partial, full) in enumerate(visited(mask.rule, env | numbers | tables, *blocks)):
        classes[row, partial] = Pixel.KEPT
        classes[row, full] = Pixel.FULL
    rows, keys = (_drawn(length) for length in lengths)
    positions = {"q_idx": torch.from_numpy(rows)[:, None], "k_idx": torch.from_numpy(keys)}
    keep = np.broadcast_to(np.asarray(evaluate_rule(mask, env | positions)), (len(rows), len(keys)))
    pixels = classes[rows // blocks[0]][:, keys // blocks[1]]
    pixels[(pixels == Pixel.KEPT) & ~keep] = Pixel.DROPPED
    found = [int((classes == each).sum()) for each in (Pixel.SKIPPED, Pixel.KEPT, Pixel.FULL)]
    return Picture(pixels, lengths, blocks, *found)


def _drawn(length: int) -> NDArray[Any]:
    """The positions that are drawn: each, or the middles of `MOST_PIXELS` equal parts."""
    import numpy as np

    pixels = min(length, MOST_PIXELS)
    return (2 * np.arange(pixels) + 1) * length // (2 * pixels)


def check(path: str) -> None:
    """Raises unless a picture could be written there.

    Raises:
        InvalidArgument: matplotlib cannot be imported, draws no such file, or nothing can be written there.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except (ImportError, ValueError) as error:  # the second: a setting of its own, as MPLBACKEND
        raise InvalidArgument(
            f"--draw needs matplotlib, which cannot be imported ({error}): pip install matplotlib; in a "
            "checkout of FlashGen pip install '.[draw]' does the same"
        ) from error
    known = FigureCanvasBase.get_supported_filetypes().keys() - _NEED_LATEX
    if why := unwritable(Path(path).absolute().parent):
        raise InvalidArgument(f"--draw {path}: {why}; give another file")
    if Path(path).suffix.removeprefix(".").lower() not in known:
        raise InvalidArgument(
            f"--draw {path}: a picture is a file of {', '.join(sorted(known))}, as mask.png"
        )


def draw(made: Picture, title: str, path: str) -> None:
    """Writes a picture, with a legend: tiles by class, and the pairs within partial ones.

    Args:
        path: a file that `check` found right; its folder is made, and a file that is there is replaced.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 9.8), dpi=150, layout="constrained")  # a pixel at least for each of the array
    axes = figure.subplots()
    colours = ListedColormap([colour for colour, _ in _LOOKS.values()])
    q_len, k_len = made.lengths
    axes.imshow(
        made.pixels,
        cmap=colours,
        vmin=min(Pixel),
        vmax=max(Pixel),
        interpolation="nearest",
        extent=(0, k_len, q_len, 0),
        aspect="equal" if max(q_len, k_len) <= 4 * min(q_len, k_len) else "auto",
    )
    if max(len(range(0, n, block)) for n, block in zip(made.lengths, made.blocks, strict=True)) <= MOST_LINES:
        axes.set_xticks(range(0, k_len, made.blocks[1]), minor=True)
        axes.set_yticks(range(0, q_len, made.blocks[0]), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.5)
        axes.tick_params(which="minor", length=0)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(f"{title}\n{made}", fontsize="medium")
    patches = [Patch(facecolor=colour, edgecolor="grey", label=words) for colour, words in _LOOKS.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
