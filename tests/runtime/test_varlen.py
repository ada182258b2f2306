"""attention_varlen: on the CPU, through the dispatcher, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dispatch_parts as parts
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from flashgen import api
from flashgen.api import attention, attention_varlen
from flashgen.build.arguments import FACTS, facts_code, flatten_packed
from flashgen.build.reference import packed_reference
from flashgen.codegen.abi import PACKED, environment_names
from flashgen.errors import InvalidArgument, LaunchFailed
from flashgen.errors import Unsupported as NotServed
from flashgen.runtime import torch_path
from flashgen.runtime.packed import check_packed
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import Workload
from flashgen.spec.masks import Mask

Q_LENGTHS, K_LENGTHS = (5, 0, 3, 0, 17), (9, 4, 0, 0, 11)


def starts(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=dtype)


def call(
    q_lengths: tuple[int, ...] = Q_LENGTHS,
    k_lengths: tuple[int, ...] = K_LENGTHS,
    heads: int = 4,
    kv_heads: int = 2,
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """The positional arguments."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    q, k = normal(sum(q_lengths), heads, dims[0]), normal(sum(k_lengths), kv_heads, dims[0])
    v = normal(sum(k_lengths), kv_heads, dims[1])
    return [q, k, v, starts(q_lengths), starts(k_lengths), max(q_lengths), max(k_lengths)]


DOCUMENTS = torch.arange(11).expand(5, 11) // 3
KEEP = torch.arange(5 * 11).view(5, 11) % 3 > 0
CASES: dict[str, tuple[Mask | None, Any]] = {
    "full": (None, None),
    "causal": (masks.causal(), None),
    "window and cap": (masks.causal() & masks.sliding_window(3, 0), score_mods.softcap(2.0)),
    "key padding": (masks.key_padding(torch.tensor([3, 4, 0, 0, 7])), None),
    "kept keys": (masks.causal() & masks.key_padding(KEEP), None),
    "documents": (masks.document(DOCUMENTS), None),
}


def of_sequence(mask: Mask | None, number: int, k_len: int) -> Mask | None:
    """The mask of one sequence alone, with its own rows of the operands."""
    if mask is None or not mask.tensors:
        return mask
    own = (t[number : number + 1] if t.dim() == 1 else t[number : number + 1, :k_len] for t in mask.tensors)
    return replace(mask, tensors=tuple(own))


def one_by_one(arguments: list[Any], mask: Mask | None, score_mod: Any) -> tuple[Tensor, Tensor]:
    q, k, v, cu_q, cu_k, *_ = arguments
    outs, lses = [], []
    for s in range(len(cu_q) - 1):
        of_q, of_k = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        tensors = [x[rows][None] for x, rows in ((q, of_q), (k, of_k), (v, of_k))]
        if not tensors[1].numel():
            outs.append(v.new_zeros(tensors[0].shape[1], q.shape[1], v.shape[2]))
            lses.append(torch.full((q.shape[1], tensors[0].shape[1]), -math.inf))
            continue
        own = of_sequence(mask, s, tensors[1].shape[1])
        out, lse = attention(*tensors, mask=own, score_mod=score_mod, layout="bshd", return_lse=True)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dims", [(32, 32), (40, 16)], ids=str)
def test_cpu_tensors_get_each_sequence_alone(case: str, dims: tuple[int, int]) -> None:
    mask, mod = CASES[case]
    arguments = call(dims=dims)
    out, lse = attention_varlen(*arguments, mask=mask, score_mod=mod, return_lse=True)
    expected, expected_lse = one_by_one(arguments, mask, mod)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert lse.dtype is torch.float32 and lse.shape == (4, sum(Q_LENGTHS))


def test_c05_an_empty_side_gives_zero_and_minus_infinity() -> None:
    out, lse = attention_varlen(*call(), return_lse=True)
    assert (out[5:8] == 0).all() and (lse[:, 5:8] == -math.inf).all() and lse[:, :5].isfinite().all()


@pytest.mark.parametrize("lengths", [((0, 0), (3, 4)), ((3, 4), (0, 0)), ((), ())], ids=str)
def test_calls_without_anything(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q, k, v, cu_q, cu_k, *_ = call(*(each or (0,) for each in lengths))
    cu_q, cu_k = cu_q[: len(lengths[0]) + 1], cu_k[: len(lengths[1]) + 1]
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, 4, 4, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()
    assert lse.shape == (4, q.shape[0])


SINKS = torch.tensor([2.0, -1.0, -math.inf, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, masks.causal() & masks.sliding_window(3, 0)], ids=str)
def test_sinks_are_those_of_every_sequence(mask: Mask | None, dtype: torch.dtype) -> None:
    sinks = SINKS.to(dtype)
    arguments = call()
    out, lse = attention_varlen(*arguments, mask=mask, sinks=sinks, return_lse=True)
    q, k, v, cu_q, cu_k, *_ = arguments
    wanted, wanted_lse = packed_reference(
        *(x.double() for x in (q, k, v)),
        cu_q.tolist(),
        cu_k.tolist(),
        mask=mask,
        sinks=sinks,
        dtype=torch.float64,
    )
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[:, 5:8], sinks.float()[:, None].expand(-1, 3))
    assert not torch.equal(out, attention_varlen(*arguments, mask=mask))


def test_sinks_get_a_gradient() -> None:
    arguments, sinks = call(), SINKS.clone()
    sinks[2] = 0.0
    arguments[Q].requires_grad_()
    needing = sinks.requires_grad_()

    def loss(logits: Tensor) -> Tensor:
        return attention_varlen(*arguments, mask="causal", sinks=logits).square().sum()

    (found,) = torch.autograd.grad(loss(needing), [needing])
    for head in range(4):
        step = torch.zeros(4)
        step[head] = 1e-2
        with torch.no_grad():
            slope = (loss(sinks + step) - loss(sinks - step)) / 2e-2
        torch.testing.assert_close(found[head], slope, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"sinks has shape \(3,\); q has 4 heads, so \(4,\)"),
        (torch.zeros(4, dtype=torch.float64), "sinks=a tensor of torch.float64"),
        (1.0, "sinks=1.0 must be None or a float32"),
        (torch.zeros(4, device="meta"), "sinks is on meta, q on cpu"),
    ],
)
def test_sinks_that_are_refused(sinks: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        attention_varlen(*GOOD, sinks=sinks)
    with pytest.raises(InvalidArgument, match=message):
        dispatched(parts.make(), GOOD, sinks=sinks)


def test_int64_places_and_lengths_that_are_no_int() -> None:
    arguments = call()
    expected = attention_varlen(*arguments)
    wide = [*arguments[:3], arguments[3].long(), arguments[4].long(), torch.tensor(17), 4000]
    assert torch.equal(attention_varlen(*wide), expected)
    with torch.no_grad():
        assert torch.equal(attention_varlen(torch.nn.Parameter(wide[Q]), *wide[1:]), expected)


@pytest.mark.parametrize("case", CASES)
def test_c05_gradients_flow_within_a_sequence_alone(case: str) -> None:
    mask, mod = CASES[case]
    arguments = call()
    ours = [x.clone().requires_grad_() for x in arguments[:3]]
    theirs = [x.clone().requires_grad_() for x in arguments[:3]]
    out = attention_varlen(*ours, *arguments[3:], mask=mask, score_mod=mod)
    expected, _ = one_by_one([*theirs, *arguments[3:]], mask, mod)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((out * weight).sum(), ours)
    wanted = torch.autograd.grad((expected * weight).sum(), theirs)
    for ours_, theirs_ in zip(found, wanted, strict=True):
        assert ours_.isfinite().all()
        torch.testing.assert_close(ours_, theirs_, atol=1e-5, rtol=1e-5)
    assert (found[1][9:13] == 0).all(), "keys of a sequence without queries"


def test_c41_the_output_has_the_order_of_q() -> None:
    q, *rest = call(dims=(32, 16))
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    for grad in (False, True):
        out = attention_varlen(turned.clone().requires_grad_(grad), *rest)
        assert out.stride() == torch.empty(4, len(q), 16).transpose(0, 1).stride()


# What is refused

GOOD = call()
Q, K, V, CU_Q, CU_K, MAX_Q, MAX_K = range(7)


def changed(**named: Any) -> Callable[[], list[Any]]:
    places = {"q": Q, "k": K, "v": V, "cu_q": CU_Q, "cu_k": CU_K, "max_q": MAX_Q, "max_k": MAX_K}
    return lambda: [named.get(name, GOOD[at]) for name, at in places.items()]


REFUSED: dict[str, Callable[[], list[Any]]] = {
    r"q has 4 dimensions, .*; it must be \(tokens, heads, head_dim\)": changed(q=GOOD[Q][None]),
    r"k must be a tensor \(tokens, heads, head_dim\), not None": changed(k=None),
    r"k.dtype=torch.float16 must be that of q": changed(k=GOOD[K].half()),
    r"q.dtype=torch.float8_e4m3fn is not served packed, .*; convert .* multiplied by their factors": changed(
        **{name: GOOD[at].to(torch.float8_e4m3fn) for name, at in (("q", Q), ("k", K), ("v", V))}
    ),
    r"v has length 23, it must be k's 24: q \(25, 4, 32\)": changed(v=GOOD[V][:-1]),
    r"q has 4 heads, which must be a multiple of the 3 heads": changed(
        k=GOOD[K].repeat(1, 2, 1)[:, :3], v=GOOD[V].repeat(1, 2, 1)[:, :3]
    ),
    r"k has head_dim 16, it must be q's 32": changed(k=GOOD[K][..., :16]),
    r"cu_seqlens_q must be an int32 tensor \(sequences \+ 1,\) on cpu, not \[0, 25\]": changed(cu_q=[0, 25]),
    r"cu_seqlens_k is a tensor of torch.float32 \(6,\); it must be int32 \(or int64\)": changed(
        cu_k=GOOD[CU_K].float()
    ),
    r"cu_seqlens_q is a tensor of torch.int32 \(1, 6\)": changed(cu_q=GOOD[CU_Q][None]),
    r"cu_seqlens_q is a tensor of torch.int32 \(0,\)": changed(cu_q=GOOD[CU_Q][:0]),
    r"cu_seqlens_k.device=meta must be that of q, cpu; move": changed(cu_k=GOOD[CU_K].to("meta")),
    r"cu_seqlens_q has 6 entries and cu_seqlens_k 5": changed(cu_k=GOOD[CU_K][:5]),
    r"cu_seqlens_q begins with 1; the first sequence begins at 0: give a 0 and then the running sum": changed(
        cu_q=torch.tensor([1, 5, 5, 8, 8, 25], dtype=torch.int32)
    ),
    r"cu_seqlens_k decreases from 13 to 12 at sequence 2; each begins .*: give a 0 and": changed(
        cu_k=torch.tensor([0, 9, 13, 12, 13, 24], dtype=torch.int32)
    ),
    r"cu_seqlens_q ends with 24, and q has 25 tokens": changed(
        cu_q=torch.tensor([0, 5, 5, 8, 8, 24], dtype=torch.int32)
    ),
    r"cu_seqlens_q ends with 4294967321, and q has 25 tokens": changed(
        cu_q=torch.tensor([0, 5, 5, 8, 8, 2**32 + 25])
    ),
    r"q.device=meta has no values, or no kernels; packed sequences are computed on cuda or cpu": (
        lambda: [x.to("meta") if isinstance(x, Tensor) else x for x in GOOD]
    ),
    r"sequence 4 of cu_seqlens_q has 17 tokens, more than max_seqlen_q=16; give the length of": changed(
        max_q=16
    ),
    r"max_seqlen_k=4 is too small: 5 sequences of so many hold 20 tokens, and k has 24": changed(max_k=4),
    r"max_seqlen_q=-1 must be an int from 0 to 2147483647: the longest sequence's length": changed(max_q=-1),
    r"max_seqlen_q=True must be an int": changed(max_q=True),
    r"max_seqlen_k=17.0 must be an int": changed(max_k=17.0),
    r"max_seqlen_k=None must be an int": changed(max_k=None),
    r"max_seqlen_q is a tensor of torch.int64 \(\) on meta, and reading it waits for the GPU; give an int": (
        changed(max_q=torch.tensor(17, device="meta"))
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        attention_varlen(*REFUSED[message]())


def test_rules_are_checked_by_the_sizes_of_sequences() -> None:
    with pytest.raises(InvalidArgument, match=r"keys .* shape \(4,\); axis 0 counts batch, which is 5"):
        attention_varlen(*GOOD, mask=masks.key_padding(torch.ones(4, dtype=torch.int64)))
    with pytest.raises(
        InvalidArgument, match=r"axis 1 counts k_len, which is 11: .* filled up to the longest"
    ):
        attention_varlen(*GOOD, mask=masks.key_padding(torch.ones(5, 24, dtype=torch.bool)))
    with pytest.raises(InvalidArgument, match="return_lse=1 must be True or False"):
        attention_varlen(*GOOD, return_lse=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="scale=nan"):
        attention_varlen(*GOOD, scale=math.nan)


# Through the dispatcher


def of_grids(*lengths: int, longest: int = 12) -> list[Any]:
    """A call whose sequences have as many queries as keys."""
    return [*call(lengths, lengths)[:5], longest, longest]


@pytest.mark.parametrize("lengths,longest", [((12, 12), 12), ((12, 0, 12), 40), ((0, 0), 12)], ids=str)
def test_sequences_that_have_all_positions_of_a_grid_or_none(lengths: tuple[int, ...], longest: int) -> None:
    mask = masks.neighborhood((3, 4), (3, 3))
    arguments = of_grids(*lengths, longest=longest)
    found = attention_varlen(*arguments, mask=mask)
    exact, _ = one_by_one(arguments, mask, None)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
    dispatched(parts.make(), arguments, mask)


@pytest.mark.parametrize("lengths", [(12, 8), (6, 6), (12, 12, 11)], ids=str)
def test_sequences_of_other_lengths_than_a_grid_has_are_refused(lengths: tuple[int, ...]) -> None:
    mask = masks.causal() & masks.neighborhood((3, 4), (3, 3))
    with pytest.raises(InvalidArgument, match=r"grid \(3, 4\) of neighborhood has 12 positions"):
        attention_varlen(*of_grids(*lengths), mask=mask)
    if sum(lengths) % 12:  # else only a host can tell
        with pytest.raises(
            InvalidArgument, match=r"have \d+ together: .*pass 12 keys of each sequence, or none"
        ):
            dispatched(parts.make(), of_grids(*lengths), mask)


def test_a_longest_length_below_that_of_a_grid_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"these 2 packed sequences of at most 8 keys have 12 together"):
        dispatched(parts.make(), of_grids(6, 6, longest=8), masks.neighborhood((3, 4), (3, 3)))
    with pytest.raises(InvalidArgument, match=r"and k_len of sequence 1 is 6: "):
        attention_varlen(*of_grids(12, 6, 6), mask=masks.neighborhood((3, 4), (3, 3)))


def dispatched(made: parts.Parts, arguments: list[Any], mask: Any = None, **named: Any) -> Any:
    options = {"score_mod": None, "scale": None, "return_lse": False, "sinks": None} | named
    return made.dispatcher.attention_varlen(*arguments, mask, *options.values())


def test_a_head_dim_of_0_is_refused_like_any_other() -> None:
    with pytest.raises(InvalidArgument, match="head_dim"):
        dispatched(parts.make(), call(dims=(0, 0), dtype=torch.bfloat16))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_call_launches_a_kernel_with_its_environment(case: str, return_lse: bool) -> None:
    mask, mod = CASES[case]
    made = parts.make()
    arguments = call(dtype=torch.bfloat16)
    dispatched(made, arguments, mask, score_mod=mod, return_lse=return_lse)
    (kernel,) = made.loads.kernels
    spec = kernel.request.workload.spec
    assert spec.addressing == "varlen" and kernel.config.family in ("attention_fwd", "attention_fwd_sm90")
    (env,) = kernel.launches
    values = dict(zip(environment_names(spec), env, strict=True))
    assert [values[name] for name in PACKED] == [arguments[CU_Q].data_ptr(), arguments[CU_K].data_ptr(), 5]
    assert (values["batch"], values["q_len"], values["k_len"]) == (1, 25, 24)
    assert (values["q.stride.row"], values["q.stride.head"], values["k.stride.row"]) == (128, 32, 64)
    assert (values["lse"] != 0) == return_lse
    work = kernel.request.workload
    assert (work.batch, work.q_len, work.k_len, work.total_q, work.total_k) == (5, 17, 11, 25, 24)


def test_a_call_with_sinks_has_a_kernel_of_its_own() -> None:
    made = parts.make()
    arguments = call(dtype=torch.bfloat16)
    dispatched(made, arguments)
    dispatched(made, arguments, sinks=SINKS)
    dispatched(made, arguments, sinks=SINKS.bfloat16())
    assert [kernel.request.workload.spec.sinks for kernel in made.loads.kernels] == ["", "fp32", "bf16"]
    (env,) = made.loads.kernels[1].launches
    values = dict(zip(environment_names(made.loads.kernels[1].request.workload.spec), env, strict=True))
    assert (values["sinks"], values["sinks.stride.head"]) == (SINKS.data_ptr(), 1)


def test_one_plan_serves_all_lengths_of_a_bucket() -> None:
    made = parts.make()
    for lengths in ((5, 0, 3, 0, 17), (8, 1, 2, 1, 13), (17, 2, 2, 2, 2)):
        dispatched(made, [*call(lengths, dtype=torch.float16)[:5], 17, 11])
    assert made.dispatcher.resolves == 1 and len(made.loads.kernels[0].launches) == 3
    dispatched(made, call((5, 0, 3, 0, 17, 0, 0, 0, 0), (9, 4, 0, 0, 11, 0, 0, 0, 0), dtype=torch.float16))
    dispatched(made, [*call(dtype=torch.float16)[:5], 40, 11])
    assert made.dispatcher.resolves == 3


def test_c20_a_longest_length_that_is_a_tensor_is_one_kind_of_call() -> None:
    """Made anew for each call, on the host; of one on a GPU the value is never read."""
    made = parts.make()
    for longest in (17, torch.tensor(17), torch.tensor(17), torch.tensor([17])[0], np.int64(17)):
        dispatched(made, [*call(dtype=torch.float16)[:5], longest, torch.tensor(11)])
    assert made.dispatcher.resolves == 1 and len(made.loads.kernels[0].launches) == 5


def test_a_dense_call_and_a_packed_one_have_plans_of_their_own() -> None:
    made = parts.make()
    dispatched(made, call(dtype=torch.bfloat16))
    made.call(*parts.tensors(5, 4, 2, 17, 11, 32))
    assert [kernel.request.workload.spec.addressing for kernel in made.loads.kernels] == ["varlen", "dense"]


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("mask", [masks.causal(), masks.sliding_window(100, 3)], ids=str)
def test_warmup_has_the_key_that_calls_have(mask: Mask, sinks: Tensor | None) -> None:
    made = parts.make()
    arguments = call(dtype=torch.bfloat16, dims=(64, 32))
    checked = check_packed(*arguments, mask, None, None, True, sinks)
    out = torch_path.empty_output(arguments[Q], "bshd", 32)
    env = flatten_packed(*arguments[:3], out, out, *arguments[3:5], 1.0, mask.values)
    made.dispatcher.warm(checked.workload(), FACTS[facts_code(env, 2)], -1)
    before = made.dispatcher.resolves
    dispatched(made, arguments, mask, return_lse=True, sinks=sinks)
    assert made.dispatcher.resolves == before and made.loads.launched


def test_wrong_arguments_raise_on_every_call_not_on_a_miss_alone() -> None:
    made = parts.make()
    good = call(dtype=torch.bfloat16)
    dispatched(made, good)
    for at, bad in ((V, good[V][:-1]), (CU_K, good[CU_K][:4]), (MAX_Q, 2), (MAX_K, None), (CU_Q, None)):
        with pytest.raises(InvalidArgument):
            dispatched(made, [*good[:at], bad, *good[at + 1 :]])
    assert len(made.loads.kernels[0].launches) == 1


def test_places_are_looked_at_where_the_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(
        "flashgen.runtime.packed._check_starts", lambda *arguments: looked.append(arguments[2])
    )
    made = parts.make()
    arguments = call(dtype=torch.bfloat16)
    dispatched(made, arguments)
    dispatched(made, arguments)
    seen = len(looked)  # on a CPU the miss has looked; the hit has not
    assert seen == 2
    made.dispatcher._check_values = True
    dispatched(made, arguments)
    assert looked[seen:] == [25, 24]


WRONG_PLACES = {
    "begins with 2; the first sequence begins at 0": [2, 5, 5, 8, 8, 25],
    "decreases from 8 to 5 at sequence 2": [0, 5, 8, 5, 8, 25],
    "ends with 24, and q has 25 tokens": [0, 5, 5, 8, 8, 24],
    "sequence 4 of cu_seqlens_q has 20 tokens, more than max_seqlen_q=17": [0, 5, 5, 5, 5, 25],
}


@pytest.mark.parametrize("message", WRONG_PLACES)
def test_wrong_places_are_told_where_the_setting_says_so(message: str) -> None:
    made = parts.make()
    arguments = call(dtype=torch.bfloat16)
    dispatched(made, arguments)  # a hit from here on, which would not look
    arguments[CU_Q] = torch.tensor(WRONG_PLACES[message], dtype=torch.int32)
    made.dispatcher._check_values = True
    with pytest.raises(InvalidArgument, match=message):
        dispatched(made, arguments)
    assert len(made.loads.kernels[0].launches) == 1


@pytest.mark.parametrize("message", WRONG_PLACES)
def test_wrong_places_are_told_where_torch_has_to_know_them(message: str) -> None:
    checked = check_packed(*call(), None, None, None, False)
    wrong = replace(checked, cu_q=torch.tensor(WRONG_PLACES[message], dtype=torch.int32))
    with pytest.raises(InvalidArgument, match=message):
        torch_path.attention(wrong)


def test_where_a_kernel_cannot_run_torch_computes_each_sequence() -> None:
    loads = parts.Loads()
    made = parts.make(loads=loads)
    arguments = call(dtype=torch.bfloat16)
    dispatched(made, arguments)
    loads.kernels[0].failure = parts.refused(1, "no")
    out, lse = dispatched(made, arguments, return_lse=True)
    del out, lse
    out = dispatched(made, arguments)
    expected, _ = one_by_one([x.float() if at < 3 else x for at, x in enumerate(arguments)], None, None)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def test_c21_in_a_capture_without_a_kernel_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = check_packed(*call(), None, None, None, False)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchFailed, match=r"a CUDA graph is being captured .*flashgen\.warmup"):
        checked.starts()


def test_a_workload_of_packed_sequences_checks_itself() -> None:
    spec = replace(check_packed(*call(), None, None, None, False).workload().spec)
    assert Workload(spec, 5, 4, 2, 17, 11, (), 25, 24).name == "b5h4kv2q17k11_of25k24"
    assert Workload(spec, 5, 4, 2, 17, 11, (), 25, 24).bucket().text == "b8 h4 kv2 q32 k16 tq32 tk32"
    with pytest.raises(InvalidArgument, match=r"total_q=86 must be from 0 to 85: batch=5 sequences"):
        Workload(spec, 5, 4, 2, 17, 11, (), 86, 24)
    with pytest.raises(InvalidArgument, match="only addressing='varlen' has totals"):
        Workload(replace(spec, addressing="dense"), 5, 4, 2, 17, 11, (), 25, 24)
    with pytest.raises(InvalidArgument, match="addressing='paged' is not served; allowed: dense, varlen"):
        replace(spec, addressing="paged")


def test_it_is_a_name_of_the_package() -> None:
    import flashgen

    assert flashgen.attention_varlen is api.attention_varlen


def test_explain_tells_of_packed_sequences() -> None:
    q, k, v, cu_q, cu_k, max_q, max_k = call()
    named = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    told = str(api.explain(q, k, v, mask="causal", sinks=SINKS, **named))
    assert "packed sequences 5" in told and "q_len 17 at most, 25 together" in told and "reference" in told
    needing = str(api.explain(q.clone().requires_grad_(), k, v, **named))
    assert "runs torch, one sequence after the other" in needing
    with pytest.raises(InvalidArgument, match="a call has only one kind"):
        api.explain(q, k, v, layout="bshd", **named)
    with pytest.raises(InvalidArgument, match="cu_seqlens_k must be an int32 tensor"):
        api.explain(q, k, v, cu_seqlens_q=cu_q)


def test_the_dispatcher_explains_without_a_launch() -> None:
    made = parts.make()
    checked = check_packed(*call(dtype=torch.bfloat16), masks.causal(), None, None, False)
    told = made.dispatcher.explain(checked, 0)
    assert told.family == "attention_fwd_sm90" and not made.loads.launched


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 3)


def test_callables_mean_what_named_rules_do() -> None:
    """Positions count within their sequence, also for what a callable captures."""
    lengths = (5, 0, 17, 9)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q, k, v = torch.randn(3, sum(lengths), 4, 32)
    bias = torch.randn(max(lengths), max(lengths))

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[q_idx, kv_idx]

    sizes = (cu, cu, max(lengths), max(lengths))
    out = attention_varlen(q, k, v, *sizes, mask=near)
    named = attention_varlen(q, k, v, *sizes, mask=masks.causal() & masks.sliding_window(3, None))
    torch.testing.assert_close(out, named)
    out = attention_varlen(q, k, v, *sizes, mask="causal", score_mod=biased)
    for first, last in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        alone = [each[None, first:last] for each in (q, k, v)]
        wanted = attention(*alone, mask="causal", score_mod=biased, layout="bshd")
        torch.testing.assert_close(out[first:last], wanted[0])
    with pytest.raises(InvalidArgument, match="cannot be traced"):
        attention_varlen(q, k, v, *sizes, mask=lambda b, h, q_idx, kv_idx: q_idx if q_idx else kv_idx)


def test_lengths_of_any_kind_cut_what_a_callable_reads() -> None:
    table = torch.randn(40, generator=torch.Generator().manual_seed(0))

    def function(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx]

    expected = attention_varlen(*GOOD, score_mod=function)
    for kind in (np.int64, torch.tensor):
        given = [*GOOD[:MAX_Q], kind(GOOD[MAX_Q]), kind(GOOD[MAX_K])]
        assert torch.equal(attention_varlen(*given, score_mod=function), expected)
    with pytest.raises(InvalidArgument, match="max_seqlen_k=-3 must be an int from 0"):
        attention_varlen(*GOOD[:MAX_K], -3, score_mod=function)


@pytest.mark.parametrize(
    "lengths",
    [((), ()), ((0, 0), (3, 2)), ((3, 2), (0, 0)), ((5, 0), (0, 5))],
    ids=["none", "q", "k", "pairs"],
)
def test_gradients_of_calls_without_a_pair_are_zero(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q, k, v, *rest = call(*((length or (0,)) for length in lengths))
    if not lengths[0]:
        rest = [torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0, 0]
    leaves = [each.requires_grad_() for each in (q, k, v)]
    out, lse = attention_varlen(*leaves, *rest, mask="causal", return_lse=True)
    assert out.shape == (*q.shape[:2], v.shape[2]) and lse.shape == (q.shape[1], q.shape[0])
    assert not out.any() and bool((lse == -math.inf).all())
    for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_vmap_shares_the_places() -> None:
    q, rest = GOOD[Q], GOOD[K:]
    found = torch.vmap(lambda one: attention_varlen(one, *rest))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(found[1], attention_varlen(2 * q, *rest))
    places = torch.stack([GOOD[CU_Q]] * 2)
    with pytest.raises(InvalidArgument, match=r"cu_seqlens_q cannot be read .* do not map over it"):
        torch.vmap(lambda cu: attention_varlen(*GOOD[:CU_Q], cu, *GOOD[CU_K:]))(places)


# As an operator


def compiled_and_eager(function: Callable[..., Any], arguments: list[Any], **options: Any) -> None:
    """Both give the same, also in the order of axes."""
    ours, eager = torch.compile(function, fullgraph=True, **options)(*arguments), function(*arguments)
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
        assert one.stride() == other.stride() and one.dtype == other.dtype


@pytest.mark.parametrize("dims", [(32, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_call_is_traced_without_a_graph_break(case: str, dims: tuple[int, int]) -> None:
    torch._dynamo.reset()
    mask, mod = CASES[case]

    def function(*given: Any) -> Any:
        return attention_varlen(*given, mask=mask, score_mod=mod, return_lse=True)

    compiled_and_eager(function, call(dims=dims), backend="aot_eager")
    # The sinks, read anew: a graph that had kept them would not change with them.
    sinks = SINKS.clone()
    compiled = torch.compile(
        lambda *given: attention_varlen(*given, mask=mask, sinks=sinks), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        assert torch.equal(compiled(*call()), attention_varlen(*call(), mask=mask, sinks=sinks))
        sinks += 1.0
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else x for x in call()[:5]]
    compiled_and_eager(function, [*turned, 17, 11], backend="aot_eager")
    assert torch.equal(torch.compile(attention_varlen, fullgraph=True)(*call()), attention_varlen(*call()))


def test_c35_tokens_sequences_and_longest_lengths_vary_within_two_graphs() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_varlen, fullgraph=True, backend=counter, dynamic=True)
    for lengths in ((5, 0, 3, 7), (900, 0, 70), (2,), (3, 1, 4, 1, 5, 9), (0, 0, 0, 6, 0)):
        arguments = call(lengths, tuple(length + 2 for length in lengths))
        torch.testing.assert_close(compiled(*arguments), attention_varlen(*arguments))
    assert counter.frame_count <= 2


def test_a_graph_follows_the_places() -> None:
    """The same sizes, other sequences: nothing of a trace's own places is in its graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_varlen, fullgraph=True, backend=counter)
    for lengths in ((5, 0, 3, 0, 17), (17, 3, 0, 5, 0), (1, 1, 6, 0, 17)):
        arguments = [*call(lengths, (9, 4, 0, 0, 11))[:5], 17, 11]
        assert torch.equal(compiled(*arguments), attention_varlen(*arguments))
    assert counter.frame_count == 1


def test_callables_and_autocast_in_a_trace() -> None:
    torch._dynamo.reset()

    def function(*given: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return attention_varlen(*given, mask=near, score_mod="softcap(2.0)", return_lse=True)

    compiled_and_eager(function, call(), backend="aot_eager")
    assert function(*call())[0].dtype == torch.bfloat16


def test_wrong_places_are_told_in_a_graph_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    with pytest.raises(InvalidArgument, match="cu_seqlens_q ends with 24, and q has 25 tokens"):
        compiled(*changed(cu_q=torch.tensor([0, 5, 5, 8, 8, 24], dtype=torch.int32))())
    with pytest.raises(InvalidArgument, match="max_seqlen_k=4 is too small"):
        compiled(*changed(max_k=4)())


SLOPES, TABLE = torch.linspace(0.1, 1, 4), torch.linspace(-1, 1, 4 * 9).view(4, 9)
LEARNED: dict[str, tuple[list[Tensor], Callable[..., dict[str, Any]]]] = {
    "nothing": ([], lambda: {"mask": masks.causal()}),
    "sinks": ([SINKS.clamp_min(-3)], lambda sinks: {"mask": masks.sliding_window(3, 0), "sinks": sinks}),
    "slopes": ([SLOPES], lambda slopes: {"mask": masks.causal(), "score_mod": score_mods.alibi(slopes)}),
    "sinks and table": (
        [SINKS.clamp_min(-3), TABLE],
        lambda sinks, table: {"sinks": sinks, "score_mod": score_mods.relative(table)},
    ),
}


def gradients_of(out: Tensor, lse: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of rows without a key the LSE has none."""
    loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sigmoid().sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", LEARNED)
def test_c35_gradients_are_one_operator_in_two_graphs_for_all_lengths(
    kind: str, dynamic: bool | None
) -> None:
    torch._dynamo.reset()
    learned, rules = LEARNED[kind]
    learned = [each.clone().requires_grad_() for each in learned]
    counter = CompileCounterWithBackend("aot_eager")

    def function(*given: Any) -> Any:
        return attention_varlen(*given[:7], **rules(*given[7:]), return_lse=True)

    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    shapes = (
        (Q_LENGTHS, K_LENGTHS),
        ((9, 30), (9, 41)),
        ((2, 3, 4), (0, 9, 5)),
        ((7, 7, 7, 1), (12, 7, 8, 1)),
    )
    for q_lengths, k_lengths in shapes:
        given = call(q_lengths, k_lengths, dims=(32, 16))
        own = [each.double().requires_grad_() for each in given[:3]]
        for each in given[:3]:
            each.requires_grad_()
        ours, eager = compiled(*given, *learned), function(*given, *learned)
        places = (each.tolist() for each in given[3:5])
        exact = packed_reference(*own, *places, **rules(*learned), dtype=torch.float64)
        results = [
            (*each, *gradients_of(*each, [*tensors, *learned]))
            for each, tensors in ((ours, given[:3]), (eager, given[:3]), (exact, own))
        ]
        for one, same, other in zip(*results, strict=True):
            torch.testing.assert_close(one, same, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-4)
    assert counter.frame_count <= 2


def test_a_graph_of_gradients_follows_the_places() -> None:
    """Forward and backward: the same sizes, other sequences, another longest one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_varlen, fullgraph=True, backend=counter)
    for lengths in ((5, 0, 3, 0, 17), (17, 3, 0, 5, 0), (1, 1, 6, 0, 17)):
        arguments: list[Any] = [*call(lengths, (9, 4, 0, 0, 11))[:5], 17, 11]
        arguments[K].requires_grad_()
        found, wanted = (
            torch.autograd.grad(function(*arguments).square().sum(), arguments[K])[0]
            for function in (compiled, attention_varlen)
        )
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", [False, True], ids=["torch says no", "torch says yes"])
def test_a_graph_says_whether_gradients_are_deterministic(
    mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    told: list[bool] = []
    computed = torch_path.gradients
    monkeypatch.setattr(
        torch_path, "gradients", lambda call, *rest: told.append(call.deterministic) or computed(call, *rest)
    )
    arguments = call()
    arguments[Q].requires_grad_()
    torch.use_deterministic_algorithms(mode)
    try:
        compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
        compiled(*arguments).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [mode]


def test_a_transform_leaves_the_graph() -> None:
    torch._dynamo.reset()
    q, *rest = call()
    gradient = torch.func.grad(lambda q: attention_varlen(q, *rest).square().sum())
    with pytest.raises(Unsupported, match=r"a transform of torch\.func is in no graph"):
        torch.compile(gradient, fullgraph=True, backend="eager")(q)


def operator_arguments() -> list[tuple[Any, ...]]:
    key_lengths, cap = torch.tensor([3, 4, 0, 0, 7]), score_mods.softcap(2.0).rule
    padding, rule = (masks.causal() & masks.key_padding(key_lengths)).rule, masks.sliding_window(3, 0).rule
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in call()[:3]]
    return [
        (*call(), [key_lengths], padding.text, padding.name, "", "", [], 0.2, True),
        (*call(dims=(32, 16)), [], rule.text, "w", cap.text, cap.name, [3.0, 0.0, 2.0], 0.2, False),
        (*turned, *call()[3:], [], "True", "full", "", "", [], 0.2, True),
        (*call(), [], "True", "full", "", "", [], 0.2, True, SINKS),
        (*call((0, 0), (3, 4)), [], "True", "full", "", "", [], 0.2, True),
    ]


@pytest.mark.parametrize("arguments", operator_arguments())
def test_the_operators_fake_says_what_the_real_one_gives(arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(torch.ops.flashgen.attention_varlen_fwd.default, arguments)


@pytest.mark.parametrize("arguments", operator_arguments())
def test_the_operators_gradients_are_what_their_fakes_say(arguments: tuple[Any, ...]) -> None:
    """With sinks, whose gradient is wanted with that of the LSE."""
    arguments = (*arguments[:14], True)
    leaves = [each.detach().requires_grad_() for each in (*arguments[:3], SINKS)]
    opcheck = torch.library.opcheck
    opcheck(torch.ops.flashgen.attention_varlen_fwd.default, (*leaves[:3], *arguments[3:], leaves[3]))
    q, k, v, *told, _ = arguments
    with torch.no_grad():
        out, lse = torch.ops.flashgen.attention_varlen_fwd.default(*arguments, SINKS)
        given = (q, k, v, out, lse, *told, SINKS)
        for dlse, wanted in ((None, {}), (torch.rand_like(lse), {"of_sinks": True})):
            call = (torch.rand_like(out), dlse, *given)
            opcheck(torch.ops.flashgen.attention_varlen_bwd.default, call, wanted)


def test_the_operators_take_dropout_and_what_is_learned() -> None:
    slopes, rule, dropout = (
        torch.rand(4),
        score_mods.alibi().rule,
        {"seed": torch.tensor([5]), "dropout_p": 0.3},
    )
    q, k, v, *places = call()
    told = (*places, [slopes], "True", "full", rule.text, "alibi", [], 0.2)
    leaves = [each.clone().requires_grad_() for each in (q, k, v, slopes)]
    given = (*leaves[:3], *places, [leaves[3]], *told[5:], True)
    torch.library.opcheck(torch.ops.flashgen.attention_varlen_fwd.default, given, dropout)
    out, lse = torch.ops.flashgen.attention_varlen_fwd.default(q, k, v, *told, True, **dropout)
    call_ = (torch.rand_like(out), None, q, k, v, out, lse, *told)
    torch.library.opcheck(torch.ops.flashgen.attention_varlen_bwd.default, call_, {**dropout, "learned": [0]})


def test_fake_tensors_are_understood() -> None:
    with FakeTensorMode():
        q, k, v, three = (torch.empty(100, heads, 64, device="cuda") for heads in (8, 2, 2, 3))
        cu = torch.empty(7, dtype=torch.int32, device="cuda")
        out, lse = attention_varlen(q, k, v, cu, cu, 40, 40, mask="causal", return_lse=True)
        assert out.shape == (100, 8, 64) and lse.shape == (8, 100) and lse.dtype is torch.float32
        assert out.device.type == lse.device.type == "cuda"
        with pytest.raises(InvalidArgument, match="q has 8 heads, which must be a multiple of the 3"):
            attention_varlen(q, three, three, cu, cu, 40, 40)
        q, k, sinks = torch.empty(100, 8, 64, requires_grad=True), torch.empty(100, 2, 64), torch.empty(8)
        out = attention_varlen(q, k, k, cu.cpu(), cu.cpu(), 40, 40, sinks=sinks.requires_grad_())
        dq, dsinks = torch.autograd.grad(out.sum(), (q, sinks))
        assert dq.shape == q.shape and dsinks.shape == (8,)


class Unwilling(Tensor):
    """A tensor of a class that knows no operator."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


@pytest.mark.parametrize("which", [Q, K, V])
def test_tensors_of_a_class_that_refuses_are_named(which: int) -> None:
    given = list(GOOD)
    given[which] = Tensor._make_wrapper_subclass(Unwilling, given[which].shape)
    with pytest.raises(InvalidArgument, match=r"class Unwilling do not let .*; give plain tensors"):
        attention_varlen(*given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_jit_trace_holds_the_operator_and_not_one_calls_places() -> None:
    def function(*tensors: Tensor) -> Tensor:
        return attention_varlen(*tensors, 17, 17, mask="causal")  # type: ignore[arg-type, no-any-return]

    traced = torch.jit.trace(function, tuple(call()[:5]))
    assert "flashgen::attention_varlen_fwd" in str(traced.graph)
    other = call((1, 17, 6), (9, 4, 13))[:5]
    assert torch.equal(traced(*other), function(*other))


def test_it_can_stand_in_an_exported_program() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
            out: Tensor = attention_varlen(q, k, v, cu_q, cu_k, 40, 40, mask="causal")
            return out

    rows, keys, ends = (torch.export.Dim(name, min=2, max=4096) for name in ("rows", "keys", "ends"))
    sizes = ({0: rows}, {0: keys}, {0: keys}, {0: ends}, {0: ends})
    program = torch.export.export(Layer(), tuple(call()[:5]), dynamic_shapes=sizes)
    assert "flashgen.attention_varlen_fwd" in program.graph_module.code
    for arguments in (call()[:5], call((33, 4), (40, 9))[:5]):
        torch.testing.assert_close(program.module()(*arguments), Layer()(*arguments))


def test_the_operator_has_no_derivative_to_lose() -> None:
    def operator(q: Tensor, return_lse: bool = False) -> Tensor:
        operator = torch.ops.flashgen.attention_varlen_fwd
        out, _ = operator(q, *call()[1:], [], "True", "full", "", "", [], 0.2, return_lse)
        return out  # type: ignore[no-any-return]

    with pytest.raises(InvalidArgument, match=r"without its LSE, .*, or call flashgen\.attention_varlen"):
        operator(call()[Q].requires_grad_())
    q = call()[Q].requires_grad_()
    (dq,) = torch.autograd.grad(operator(q, True).square().sum(), q, create_graph=True)
    with pytest.raises(NotServed, match=r"second derivative of attention is not served"):
        dq.sum().backward()
    with pytest.raises(InvalidArgument, match=r"no forward-mode derivative .* flashgen\.attention_varlen"):
        torch.func.jvp(operator, (call()[Q],), (call()[Q],))
