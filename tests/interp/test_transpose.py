"""The part that brings V of 8-bit inputs into the order that their products read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen.build.compile import load_module, toolchain
from flashgen.build.quantized import E4M3
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.source import render, write
from flashgen.spec.attention import AttentionSpec


@pytest.mark.parametrize("head_dim_v", [16, 64, 80, 96, 256])
@pytest.mark.parametrize("keys", [1, 150, 256])
def test_keys_are_innermost_and_in_the_order_in_which_a_thread_holds_scores(
    head_dim_v: int, keys: int, tmp_path: Path
) -> None:
    family = FAMILIES["attention_fwd_sm90"]
    spec = AttentionSpec(64, head_dim_v, "e4m3")
    source = render(spec, family.all_configs()[0], toolchain(interpret=True))
    (buffer,), (part,) = source.scratch, source.parts
    sizes = {"batch": 2, "kv_heads": 3, "head_dim_v": head_dim_v, "k_len": keys}
    shape = [extent.of(sizes[extent.size]) for extent in buffer.extents]
    padded = shape[3]
    assert padded % 128 == 0 and 0 <= padded - keys < 128
    whole = torch.randn(2, 3, keys, head_dim_v + 16).to(E4M3)
    v = whole[..., :head_dim_v]  # rows with a gap
    v[0, 0, 0, 0] = float("nan")
    values = torch.full(shape, 0x7F, dtype=torch.uint8).view(E4M3)  # NaN wherever nothing is written
    transpose = load_module(write(source, tmp_path)).transpose_values
    blocks = part.grid.blocks(2, 3, keys, multiprocessors=1)
    transpose[(blocks,)](v, *v.stride(), values, padded, 3, keys)

    expected = torch.zeros(2, 3, head_dim_v, padded)
    for place in range(padded):
        pair, within = divmod(place % 16, 4)
        key = place // 16 * 16 + 2 * pair + within % 2 + 8 * (within // 2)
        if key < keys:
            expected[..., place] = v[:, :, key].float()
    assert torch.equal(values.float().nan_to_num(9999.0), expected.nan_to_num(9999.0))
