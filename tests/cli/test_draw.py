"""`flashgen show --draw`: what is on the picture against every pair, and that it is written."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from flashgen.build.inputs import make_rules
from flashgen.build.reference import evaluate_rule
from flashgen.cli import draw
from flashgen.cli.draw import MOST_PIXELS, Pixel, picture
from flashgen.cli.main import main
from flashgen.cli.output import USAGE
from flashgen.codegen.family import Tiling
from flashgen.errors import InvalidArgument
from flashgen.spec.attention import Workload
from flashgen.tune.suites import packed, workloads_from_args

BLOCK_M, BLOCK_N = 16, 32
TILING = Tiling(BLOCK_M, BLOCK_N, num_warps=4, num_stages=2, descriptors=False)


def workload(mask: str, q_len: int, k_len: int) -> Workload:
    (made,) = workloads_from_args(
        head_dim=64, heads=4, kv_heads=2, seq=q_len, k_len=k_len, mask=mask, batch=2
    )
    return made


def kept(given: Workload) -> np.ndarray:
    """Which pairs of the first head and sequence the mask keeps: bool (q_len, k_len)."""
    mask, _ = make_rules(given)
    env = {"q_len": given.q_len, "k_len": given.k_len, "batch": 0, "head": 0, "kv_head": 0}
    env |= {"q_idx": torch.arange(given.q_len)[:, None], "k_idx": torch.arange(given.k_len)}
    return torch.as_tensor(evaluate_rule(mask, env)).expand(given.q_len, given.k_len).numpy()


@pytest.mark.parametrize(("q_len", "k_len"), [(256, 256), (200, 200), (40, 256)])
@pytest.mark.parametrize(
    "mask",
    [
        "full",
        "causal",
        "causal & sliding_window(63, 0)",
        "~sliding_window(40, 20)",
        "prefix_lm",
        "document",
        "causal & document",
        "causal & sliding_window(90, 0) & document",
        "causal & document('ordered')",
        "block_sparse('heads', 32) & causal",
    ],
)
def test_tiles_and_pairs_are_those_of_the_mask(mask: str, q_len: int, k_len: int) -> None:
    given = workload(mask, q_len, k_len)
    made, keep = picture(given, TILING), kept(given)
    assert made.pixels.shape == (q_len, k_len) and made.blocks == (BLOCK_M, BLOCK_N)
    counted = dict.fromkeys(Pixel, 0)
    for row in range(0, q_len, BLOCK_M):
        for key in range(0, k_len, BLOCK_N):
            tile = (slice(row, row + BLOCK_M), slice(key, key + BLOCK_N))
            pairs, pixels = keep[tile], made.pixels[tile]
            if not pairs.any():
                wanted = np.full(pairs.shape, Pixel.SKIPPED)
            elif pairs.all() and key + BLOCK_N <= k_len:  # a tile past the last key needs the mask
                wanted = np.full(pairs.shape, Pixel.FULL)
            else:
                wanted = np.where(pairs, Pixel.KEPT, Pixel.DROPPED)
            counted[Pixel(wanted.max())] += 1
            assert np.array_equal(pixels, wanted), f"rows from {row}, keys from {key}"
    assert (made.skipped, made.partial, made.full) == tuple(
        counted[each] for each in (Pixel.SKIPPED, Pixel.KEPT, Pixel.FULL)
    )


def test_of_long_sequences_some_pairs_are_drawn_and_all_tiles_counted() -> None:
    given = workload("causal", 4096, 4096)
    made = picture(given, Tiling(128, 64, num_warps=4, num_stages=2, descriptors=False))
    assert made.pixels.shape == (MOST_PIXELS, MOST_PIXELS)
    assert (made.partial, made.full) == (2 * 32, sum(2 * row for row in range(32)))
    assert made.skipped + made.partial + made.full == 32 * 64
    positions = 4 * np.arange(MOST_PIXELS) + 2
    seen = np.isin(made.pixels, (Pixel.KEPT, Pixel.FULL))
    assert np.array_equal(seen, kept(given)[positions][:, positions])
    assert str(made) == "2,048 tiles of 128 x 64: 992 skipped, 64 partial, 992 full"


def test_packed_sequences_are_not_drawn() -> None:
    with pytest.raises(InvalidArgument, match="not packed: leave out --varlen"):
        picture(packed(workload("causal", 64, 64), 128), TILING)


def show(*words: object) -> Result:
    given = ["show", "--target", "nvidia-h200", "--head-dim", "64", "--mask", "causal & document"]
    return CliRunner().invoke(main, [*given, "--seq", "512", *map(str, words)], prog_name="flashgen")


def test_a_picture_has_all_classes_and_a_legend(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    colors = pytest.importorskip("matplotlib.colors")
    path = tmp_path / "mask.png"
    done = show("--config", "m64n32w4s2_pointer_heads", "--draw", path)
    assert done.exit_code == 0, done.output
    assert f"drew {path}: 128 tiles of 64 x 32: " in done.stdout
    pixels = (255 * image.imread(path)[..., :3]).round().astype(int)
    assert min(pixels.shape[:2]) > MOST_PIXELS
    of_legend = pixels[-pixels.shape[0] // 20 :]
    for colour, _ in draw._LOOKS.values():
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert wanted == (255 * np.array(colors.to_rgb(colour))).round().astype(int).tolist()
        for part in (pixels, of_legend):
            assert (part == wanted).all(-1).sum() > 100, colour
    drawn = json.loads(show("--draw", tmp_path / "mask.svg", "--json").stdout)
    assert drawn["draw"]["file"] == str(tmp_path / "mask.svg") and drawn["draw"]["block_m"] == 64
    assert "<svg" in (tmp_path / "mask.svg").read_text() and "source" not in drawn


def test_what_cannot_be_drawn_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mask.png"
    for words, told in (
        (["--draw", path, "--usage"], "--usage, --draw are different views of a kernel"),
        (["--draw", path, "--diff", "a", "b"], "--draw shows the tiles of one config: leave out --diff"),
    ):
        done = show(*words)
        assert done.exit_code == USAGE and told in done.stderr
    if importlib.util.find_spec("matplotlib") is not None:
        (tmp_path / "file").touch()
        for name, told in (
            ("mask.xyz", "a picture is a file of "),
            ("mask.pgf", "a picture is a file of "),
            ("mask", "a picture is a file of "),
            ("file/mask.png", "file is no folder; give another file"),
        ):
            done = show("--draw", tmp_path / name)
            assert done.exit_code == USAGE and told in done.stderr, name
            assert "showing" not in done.stderr, "known before anything is looked up"
    for broken in ("", "raise ImportError('no module of numpy fits')"):
        with monkeypatch.context() as patch:
            if broken:
                (tmp_path / "matplotlib.py").write_text(broken)
                patch.syspath_prepend(tmp_path)
            for name in [each for each in sys.modules if each.split(".")[0] == "matplotlib"]:
                patch.delitem(sys.modules, name)
            if not broken:
                patch.setitem(sys.modules, "matplotlib", None)
            done = show("--draw", path)
        assert done.exit_code == USAGE and "--draw needs matplotlib, which cannot be imported" in done.stderr
        assert "pip install matplotlib" in done.stderr and not path.exists()


@pytest.mark.parametrize(("q_len", "k_len"), [(2**24, 2**24), (1, 2**31 - 1), (2**31 - 1, 1)])
def test_lengths_without_an_end_are_refused_before_anything_is_made(q_len: int, k_len: int) -> None:
    with pytest.raises(InvalidArgument, match=f"--draw counts each tile, and {q_len:,} queries of {k_len:,}"):
        picture(workload("document", q_len, k_len), TILING)


def test_the_folder_of_a_picture_is_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "mask.png"
    done = show("--draw", path)
    assert done.exit_code == 0 and path.stat().st_size > 1000, done.output
