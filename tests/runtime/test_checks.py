"""Bad input: a message that names the argument, what was given and what is allowed, whatever the device."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

from flashgen.api import attention
from flashgen.errors import InvalidArgument, UnknownName
from flashgen.runtime import checks
from flashgen.spec import masks, score_mods
from flashgen.spec.rule import Rule


def tensors(**changes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {"q": (2, 4, 6, 32), "k": (2, 2, 8, 32), "v": (2, 2, 8, 32)} | changes
    return {name: torch.ones(shape) for name, shape in shapes.items()}


GOOD = tensors()

CASES: dict[str, dict[str, Any]] = {
    r"q must be a tensor \(batch, heads, seq, head_dim\), not \[1\]": {"q": [1]},
    r"k must be a tensor .*, not None": {"k": None},
    r"q has 3 dimensions, \(4, 6, 32\); layout='bhsd' takes .*: reshape q$": {"q": torch.ones(4, 6, 32)},
    r"v has 2 dimensions": {"v": torch.ones(8, 32)},
    r"q.dtype=torch.int64 is not served; allowed: torch.float16, torch.bfloat16, torch.float32": {
        "q": GOOD["q"].long()
    },
    r"k.dtype=torch.int8 is not served": {"k": GOOD["k"].to(torch.int8)},
    r"v.dtype=torch.float64 is not served": {"v": GOOD["v"].double()},
    r"k.dtype=torch.float16 must be that of q, torch.float32": {"k": GOOD["k"].half()},
    r"k.device=meta must be that of q, cpu": {"k": GOOD["k"].to("meta")},
    r"k has batch 3, it must be q's 2: q \(2, 4, 6, 32\)": tensors(k=(3, 2, 8, 32)),
    r"v has batch 1, it must be q's 2.*; cut the longer of the two, or expand an axis of one": tensors(
        v=(1, 2, 8, 32)
    ),
    r"v has heads 4, it must be k's 2": tensors(v=(2, 4, 8, 32)),
    r"v has length 7, it must be k's 8": tensors(v=(2, 2, 7, 32)),
    r"k has head_dim 64, it must be q's 32": tensors(k=(2, 2, 8, 64)),
    r"q has 4 heads, which must be a multiple of the 3 heads of k and v": tensors(
        k=(2, 3, 8, 32), v=(2, 3, 8, 32)
    ),
    r"q has 4 heads, which must be a multiple of the 0 heads": tensors(k=(2, 0, 8, 32), v=(2, 0, 8, 32)),
    r"q has head_dim 12; allowed: multiples of 8 from 16 to 256; pad": tensors(
        q=(2, 4, 6, 12), k=(2, 2, 8, 12)
    ),
    r"q has head_dim 8; allowed": tensors(q=(2, 4, 6, 8), k=(2, 2, 8, 8)),
    r"v has head_dim 264; allowed": tensors(v=(2, 2, 8, 264)),
    r"layout='sbhd' must be one of bhsd, bshd": {"layout": "sbhd"},
    r"layout=None must be one of": {"layout": None},
    r"return_lse=a tensor of torch.float32 \(2,\) must be True or False": {"return_lse": torch.ones(2)},
    r"return_lse=1 must be True or False": {"return_lse": 1},
    r"scale=nan must be finite": {"scale": math.nan},
    r"scale=-inf must be finite": {"scale": -math.inf},
    r"scale=1e\+39 must be finite, and at most 1.7e38": {"scale": 1e39},
    r"scale=-2e\+38 must be finite, and at most": {"scale": -2e38},
    r"scale=inf must be finite": {"scale": 10**400},
    r"scale='big' must be None or a finite number": {"scale": "big"},
    r"scale=True must be None or a finite number": {"scale": True},
    r"scale=array\(\[1., 1.\]\) must be None or a finite number": {"scale": numpy.ones(2)},
    r"scale=a tensor of torch.float32 \(1,\) must be None or a finite number; give its value": {
        "scale": torch.ones(1)
    },
    "unknown mask 'diagonal'; known: " + ", ".join(sorted(masks.MASKS)): {"mask": "diagonal"},
    r"mask=a tensor of torch.bool \(6, 8\) must be None, a name .*key_padding\(tensor\)": {
        "mask": torch.ones(6, 8, dtype=torch.bool)
    },
    "unknown score rule 'alibis'; known: " + ", ".join(sorted(score_mods.SCORE_MODS)): {
        "score_mod": "alibis"
    },
    r"deterministic=1 must be True, False or None": {"deterministic": 1},
    r"score_mod=\['softcap'\] must be None, a text .*, or a sequence of ScoreMods; .* makes one$": {
        "score_mod": ["softcap"]
    },
    r"key_padding has no tensor for keys; build it with one": {"mask": "key_padding"},
    r"^keys of key_padding is on meta, q on cpu": {
        "mask": masks.key_padding(torch.ones(2, dtype=torch.int32, device="meta"))
    },
    r"^keys of key_padding has shape \(1,\); axis 0 counts batch, which is 2; expand it to 2 there$": {
        "mask": masks.key_padding(torch.ones(1, dtype=torch.int32))
    },
    r"^keys of .* has shape \(2, 9\); axis 1 counts k_len, which is 8": {
        "mask": masks.key_padding(torch.ones(2, 9, dtype=torch.bool))
    },
    r"^ids of document has shape \(2, 9\); axis 1 counts k_len, which is 8; cut or pad it to 8 there$": {
        "mask": masks.document(torch.ones(2, 9, dtype=torch.int64))
    },
    r"^ids of document has shape \(1, 8\); axis 0 counts batch, which is 2": {
        "mask": masks.document(torch.ones(1, 8, dtype=torch.int64))
    },
    r"^cu_seqlens of document\(.ordered.\) has shape \(2, 2, 8\); axis 2, .* at least 9 .* call: pad": {
        "mask": masks.document("ordered").bind(torch.zeros(2, 2, 8, dtype=torch.int32))
    },
    r"^cu_seqlens of document\(.ordered.\) has shape \(2, 1, 9\); axis 1, of index 0, 1, needs at least 2": {
        "mask": masks.document("ordered").bind(torch.zeros(2, 1, 9, dtype=torch.int32))
    },
    r"^cu_seqlens of .* one row .* packed into, and batch is 2; .* document\(ids\) with ids": {
        "mask": masks.document(cu_seqlens=torch.tensor([0, 3, 8]), length=8)
    },
    r"^cu_seqlens of .* has length=7, and k_len is 8; give length=8": {
        **tensors(q=(1, 4, 6, 32), k=(1, 2, 8, 32), v=(1, 2, 8, 32)),
        "mask": masks.causal() & masks.document(cu_seqlens=torch.tensor([0, 3, 7]), length=7),
    },
    r"^ids of document & document has shape \(2, 9\); axis 1": {
        "mask": masks.document(torch.ones(2, 8, dtype=torch.int64))
        & masks.document(torch.ones(2, 9, dtype=torch.int64)),
    },
    r"^doc_ids of .* has shape \(9,\); axis 0 counts k_len": {  # a rule of one's own, that has no arguments
        "mask": masks.Mask(
            Rule.parse("mask", "doc_ids[k_idx] > 0 where doc_ids: i32"), (), (torch.ones(9).int(),)
        )
    },
    r"the grid \(3, 4\) of neighborhood has 12 positions, and k_len is 8: .*; pass 12 keys, or name the": {
        "mask": masks.neighborhood((3, 4), (3, 3))
    },
    r"the grid \(5, 2\) of neighborhood has 10 positions, and k_len is 8": {
        "mask": masks.causal() & ~masks.neighborhood((4, 2), (3, 1)) | masks.neighborhood((5, 2), (3, 1))
    },
    r"the grid \(2, 2\) of .* has 4 positions, and q_len is 6: queries are .*; pass at most 4": {
        **tensors(k=(2, 2, 4, 32), v=(2, 2, 4, 32)),
        "mask": "neighborhood((2, 2), (1, 1))",
    },
    r"prefix_lens of prefix_lm\(.i32.\) has shape \(3,\); axis 0 counts batch, which is 2": {
        "mask": masks.prefix_lm(torch.ones(3, dtype=torch.int32))
    },
    r"^block_mask of block_sparse\(.heads., 2\) has shape \(1, 3, 3, 4\); axis 1 counts heads, which is 4": {
        "mask": masks.block_sparse(torch.ones(1, 3, 3, 4, dtype=torch.bool), 2)
    },
    r"^block_mask of .* has shape \(1, 1, 2, 4\); axis 2, of index q_idx // 2, needs at least 3 elements": {
        "mask": masks.block_sparse(torch.ones(1, 1, 2, 4, dtype=torch.bool), 2)
    },
    r"^block_mask of .* has shape \(1, 1, 2, 2\); axis 3, of index k_idx // 3, needs at least 3 elements": {
        "mask": ~masks.block_sparse(torch.ones(1, 1, 2, 2, dtype=torch.bool), 3)
    },
    r"slopes of alibi has shape \(2,\); axis 0 counts heads, which is 4": {
        "score_mod": score_mods.alibi(torch.ones(2))
    },
    r"slopes of alibi is on meta, q on cpu; move one": {
        "score_mod": score_mods.alibi(torch.ones(4, device="meta"))
    },
    r"bias of .* has shape \(2, 4, 6, 7\); axis 3 counts k_len, which is 8": {
        "score_mod": score_mods.bias(torch.ones(2, 4, 6, 7))
    },
    r"bias of .* has shape \(1, 2, 1, 8\); axis 1 counts heads, which is 4": {
        "mask": "sliding_window(3, 0)",
        "score_mod": score_mods.bias(torch.ones(1, 2, 1, 8)),
    },
    r"table of .* has shape \(4, 5\); axis 1, of index min\(.*\) \+ distance, needs at least 7 elements": {
        "mask": "sliding_window(3, 0)",
        "score_mod": score_mods.relative("fp32", 3).bind(torch.ones(4, 5)),
    },
    r"bias.* has no tensor for bias; build it with one": {"score_mod": "bias"},
    r"ids of .* has shape \(8,\); axis 0, of index q_pos - 3, would be read before its beginning .*: keep": {
        "mask": masks.Mask(
            Rule.parse("mask", "ids[q_pos - 3] == k_idx where ids: i32"), (), (torch.ones(8).int(),)
        )
    },
    r"^keys of .* must be torch.int32 with 1 .*, not .*int64 \(2,\); give its .to\(torch.int32\)$": {
        "mask": masks.Mask(masks.key_padding().rule, (), (torch.ones(2, dtype=torch.int64),))
    },
    r"^keys of .* with 1 dimensions, not a tensor of torch.int32 \(2, 1\); reshape it$": {
        "mask": masks.Mask(masks.key_padding().rule, (), (torch.ones(2, 1, dtype=torch.int32),))
    },
}


@pytest.mark.parametrize("message", CASES)
@pytest.mark.parametrize("gradient", [False, True])
def test_bad_arguments_are_named(message: str, gradient: bool) -> None:
    arguments = GOOD | CASES[message]
    q = arguments["q"]
    if gradient:
        if not isinstance(q, torch.Tensor) or not q.is_floating_point():
            pytest.skip("no gradient to ask for")
        arguments["q"] = q.clone().requires_grad_()
    with pytest.raises(InvalidArgument, match=message):
        attention(**arguments)


@pytest.mark.parametrize("scale", [1e-50, -1e-50, 1e-39, -1e-39, -0.0])
def test_a_scale_too_small_for_float32_is_zero(scale: float) -> None:
    assert str(checks.as_scale(scale, 64)) == "0.0"
    q, k, v = (GOOD[name] for name in "qkv")
    zero = attention(q, k, v, scale=0)
    assert torch.equal(attention(q, k, v, scale=scale), zero)
    torch.testing.assert_close(attention(q.clone().requires_grad_(), k, v, scale=scale).detach(), zero)


def test_c18_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="window_size"):
        attention(**GOOD, window_size=5)


def test_c18_the_soft_cap_changes_the_result() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (4 * torch.randn(1, 2, 16, 32, generator=generator) for _ in range(3))
    results = [attention(q, k, v, score_mod=score_mods.softcap(cap)) for cap in (0.5, 5.0, 50.0)]
    results.append(attention(q, k, v))
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert (one - other).abs().max() > 1e-3


def test_an_unknown_name_is_its_own_kind_of_error() -> None:
    with pytest.raises(UnknownName):
        attention(**GOOD, mask="diagonal")


NOT_DENSE = {
    "torch.sparse_coo": lambda t: t.to_sparse(),
    "torch.sparse_csr": lambda t: t.to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([*t]),
    "nested, jagged": lambda t: torch.nested.nested_tensor([*t], layout=torch.jagged),
    "masked": lambda t: torch.masked.masked_tensor(t, t > 0),
    "torch._mkldnn": lambda t: t.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_tensors_without_strides_are_refused_by_name(which: str, kind: str, gradient: bool) -> None:
    given = {name: tensor.clone().requires_grad_(gradient) for name, tensor in tensors().items()}
    given[which] = NOT_DENSE[kind](given[which].detach())
    told = rf"{which} is {kind.partition(',')[0]}; only dense \(strided\) tensors"
    with pytest.raises(InvalidArgument, match=told):
        attention(**given)
    if not gradient and kind in ("nested, jagged", "masked"):
        torch._dynamo.reset()
        with pytest.raises(InvalidArgument, match=told):
            torch.compile(lambda **given: attention(**given), backend="eager")(**given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch.sparse_coo", "masked"])
def test_a_sparse_operand_is_refused_by_name(kind: str) -> None:
    keep = torch.ones(2, 8, dtype=torch.bool)
    mask = masks.key_padding(keep.to_sparse() if kind != "masked" else torch.masked.masked_tensor(keep, keep))
    with pytest.raises(InvalidArgument, match=rf"keys of key_padding.* is {kind}; only dense"):
        attention(**GOOD, mask=mask)


class Unwilling(torch.Tensor):
    """A tensor of a class that knows no operator."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Closed(torch.Tensor):
    """One that lets nobody look at it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("kind", [Unwilling, Closed])
def test_tensors_of_a_class_that_refuses_are_named(kind: type[torch.Tensor], which: str) -> None:
    given = dict(GOOD)
    given[which] = (
        torch.Tensor._make_wrapper_subclass(kind, given[which].shape)
        if kind is Unwilling
        else given[which].as_subclass(kind)
    )
    with pytest.raises(InvalidArgument, match=rf"class {kind.__name__} do not let .*; give plain tensors"):
        attention(**given)
