"""What `attention` accepts, and the error for what it does not: argument, given, allowed, next step.

The dispatcher asks for all of this once for each kind of call (on a miss). What its key cannot promise,
that lengths, batch and devices of a call agree, is compared at every call; if that fails, `check` finds
the argument to blame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.build.arguments import LAYOUTS
from flashgen.build.dropout import Dropout, draw_seed
from flashgen.build.quantized import E4M3, Factor, Quantized
from flashgen.codegen.abi import AXES, SIZES, TENSORS
from flashgen.errors import InvalidArgument
from flashgen.spec import catalog, masks
from flashgen.spec import expr as ex
from flashgen.spec import rule as rules
from flashgen.spec.attention import (
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    MAX_INDEX,
    MIN_HEAD_DIM,
    OUT_DTYPES,
    SINK_DTYPES,
    AttentionSpec,
    Workload,
)
from flashgen.spec.masks import Mask
from flashgen.spec.rule import TORCH_DTYPES, Operand, Rule
from flashgen.spec.score_mods import ScoreMod, compose, parse_score_mod

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    E4M3: "e4m3",
}
"""Dtypes of q, k and v, and what a spec calls them."""

MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**127
"""Scales between are normal numbers of float32, also after a kernel has multiplied them by log2(e)."""

FULL = masks.full()
_AXIS_NAMES = {"bhsd": "(batch, heads, seq, head_dim)", "bshd": "(batch, seq, heads, head_dim)"}


class Given(NamedTuple):
    """What a call says of 8-bit tensors, its sinks and its dropout: what most calls leave out. Unchecked, but
    for the last."""

    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    out_dtype: Any = None
    sinks: Any = None
    dropout: Dropout | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of it that are tensors, and may want a gradient."""
        return tuple(each for each in (*self[:3], self.sinks) if isinstance(each, Tensor))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a call, whatever its layout."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    head_dim_v: int


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, checked, with names and sequences turned into rules."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    score_mod: ScoreMod | None
    scale: float
    layout: str
    return_lse: bool
    quantized: Quantized | None = None
    """Of 8-bit tensors."""
    sinks: Tensor | None = None
    """(heads,) logits."""
    dropout: Dropout | None = None
    sequence: int = 0
    """What rules take the first one of the batch for: this call may be one of packed sequences."""
    deterministic: bool = False
    """Whether its gradients have to have the same bits in every run."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Tokens of packed sequences, of queries and of keys; none where each has a row of its own."""
        return ()

    @property
    def folded_scale(self) -> float:
        """The scale with what joins it, as kernels are given it."""
        return self.scale if self.quantized is None else self.quantized.folded(self.scale)

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the output."""
        return self.q.dtype if self.quantized is None else self.quantized.out_dtype

    @property
    def sizes(self) -> Sizes:
        """Batch, heads, lengths and head dims."""
        batch, heads, q_len, head_dim = self.bhsd(self.q).shape
        _, kv_heads, k_len, head_dim_v = self.bhsd(self.v).shape
        return Sizes(batch, heads, kv_heads, q_len, k_len, head_dim, head_dim_v)

    def bhsd(self, tensor: Tensor) -> Tensor:
        """A tensor in the call's layout as a view (batch, heads, seq, head_dim); its own inverse."""
        return tensor if self.layout == "bhsd" else tensor.transpose(1, 2)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no output element, or no key."""
        sizes = self.sizes
        return 0 in (sizes.batch, sizes.heads, sizes.q_len, sizes.k_len)

    def workload(self) -> Workload:
        """What is compiled, and the sizes; only for calls that are not `empty`."""
        sizes = self.sizes
        mask_rule = self.mask.rule
        score_rule = None if self.score_mod is None else rules.apart(mask_rule, self.score_mod.rule)
        spec = AttentionSpec(
            head_dim=sizes.head_dim,
            head_dim_v=sizes.head_dim_v,
            dtype=DTYPE_NAMES[self.q.dtype],
            mask=mask_rule,
            score_mod=score_rule,
            fp32_precision=fp32_precision() if self.q.dtype == torch.float32 else "ieee",
            return_lse=self.return_lse,
            positive_scale=self.folded_scale > 0,
            out_dtype=DTYPE_NAMES[self.out_dtype],
            addressing="varlen" if self.totals else "dense",
            sinks="" if self.sinks is None else DTYPE_NAMES[self.sinks.dtype],
            dropout=self.dropout is not None,
        )
        names = [name for rule in (mask_rule, score_rule) if rule is not None for name, _ in rule.params]
        values, _ = rules.values_and_tensors(self.mask, self.score_mod)
        params = tuple(zip(names, values, strict=True))
        counts = (sizes.batch, sizes.heads, sizes.kv_heads, sizes.q_len, sizes.k_len)
        return Workload(spec, *counts, params, *self.totals)

    @property
    def learned(self) -> tuple[int, ...]:
        """Places of the score rule's tensors that need a gradient."""
        tensors = () if self.score_mod is None else self.score_mod.tensors
        return tuple(place for place, tensor in enumerate(tensors) if tensor.requires_grad)

    def gradients_workload(self, lse: bool, sinks: bool, learned: tuple[int, ...]) -> Workload:
        """Of the backward call.

        Args:
            lse: whether the LSE has a gradient.
            sinks: whether that of the sinks is wanted.
            learned: as the property; those whose gradients are wanted.
        """
        workload = self.workload()
        rule = workload.spec.score_mod
        names = () if rule is None else tuple(rule.operands[place].name for place in learned)
        return replace(workload, spec=workload.spec.backward(lse, sinks, names))


_GRAD = torch._C._functorch.TransformType.Grad
_transforms: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


IS_TRANSFORMED = "forward-mode AD or a transform of torch.func is at work, which no kernel knows"


def transformed() -> bool:
    """Whether torch differentiates forward, or a transform of `torch.func` is at work: 0.1 us.

    Neither shows on the tensors (`requires_grad` is false), and a kernel would silently drop the tangents.
    """
    return forward_ad._current_level >= 0 or _transforms()


def differentiated_once() -> bool:
    """Whether one `torch.func.grad` (or vjp) is all that is at work: a `torch.autograd.Function` with
    `setup_context` serves that, and its forward gets plain tensors."""
    levels = torch._C._functorch.get_interpreter_stack() or []  # None where there is none
    return forward_ad._current_level < 0 and [each.key() for each in levels] == [_GRAD]


def fp32_precision() -> str:
    """How torch's settings let float32 inputs be multiplied on CUDA: `ieee` or `tf32`."""
    # The one reader that accepts both ways of setting it (`set_float32_matmul_precision`, `fp32_precision`).
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# Rules and scale: cheap enough for every call


def as_mask(given: object) -> Mask:
    """The mask for None, a name or a `Mask`.

    Raises:
        InvalidArgument: an unknown name, or something else.
    """
    if isinstance(given, Mask):
        return given
    if given is None:
        return FULL
    if isinstance(given, str):
        if torch.compiler.is_compiling() and (why := _no_mask(given)):
            raise InvalidArgument(why)
        return _NAMED_MASKS.get(given) or _parse_mask(given)
    raise InvalidArgument(
        f"mask={shown(given)} must be None, a name ({', '.join(masks.MASKS)}) or a Mask from "
        "flashgen.masks; pass a tensor of kept keys as flashgen.masks.key_padding(tensor)"
    )


_NAMED_MASKS = {"full": FULL, "causal": masks.causal()}
_parse_mask = catalog.remembered(maxsize=256)(masks.parse_mask)
_parse_score_mod = catalog.remembered(maxsize=256)(parse_score_mod)


# A trace reads a text while it is made, and torch would take an error there for one of its own. What traced
# code raises, it leaves to the call without a trace, which then raises the same.


@catalog.constant_in_traces
def _no_mask(text: str) -> str:
    return _why_not(masks.parse_mask, text)


@catalog.constant_in_traces
def _no_score_mod(text: str) -> str:
    return _why_not(parse_score_mod, text)


def _why_not(parse: Callable[[str], object], text: str) -> str:
    try:
        parse(text)
    except InvalidArgument as error:
        return str(error)
    return ""


def as_score_mod(given: object) -> ScoreMod | None:
    """The score rule for None, a text, a `ScoreMod` or a sequence of them, applied in that order.

    Raises:
        InvalidArgument: an unknown name, or something else.
    """
    if given is None or isinstance(given, ScoreMod):
        return given
    if isinstance(given, str):
        if torch.compiler.is_compiling() and (why := _no_score_mod(given)):
            raise InvalidArgument(why)
        return _parse_score_mod(given)
    if isinstance(given, Sequence) and all(isinstance(each, ScoreMod) for each in given):
        return compose(given)
    raise InvalidArgument(
        f"score_mod={shown(given)} must be None, a text such as 'softcap(30.0)', or a ScoreMod, or a "
        "sequence of ScoreMods; flashgen.score_mods.softcap(30.0) makes one"
    )


def as_scale(given: Any, head_dim: int) -> float:
    """The factor on the scores, as float32 holds it: 0 below `MIN_SCALE`; 1 / sqrt(head_dim) for None.

    Raises:
        InvalidArgument: it is no number, or too large. A tensor is refused: reading it waits for the GPU.
    """
    if given is None:
        return float(head_dim**-0.5) if head_dim else 1.0
    scale = _number(given)
    if scale is None:
        hint = "; give its value, scale.item()" if isinstance(given, Tensor) else ""
        raise InvalidArgument(f"scale={shown(given)} must be None or a finite number{hint}")
    if not -MAX_SCALE <= scale <= MAX_SCALE:
        raise InvalidArgument(
            f"scale={scale} must be finite, and at most 1.7e38 either way, for kernels multiply by it in "
            "float32; None means 1 / sqrt(head_dim)"
        )
    return scale if abs(scale) >= MIN_SCALE else 0.0


def _number(given: Any) -> float | None:
    """A number as a float, infinite where none holds it; None for what is no number, a tensor among these."""
    number = isinstance(given, float | int) or hasattr(given, "__float__")  # traces know of a number's type
    if isinstance(given, bool | Tensor) or not number:
        return None
    try:
        return float(given)
    except OverflowError:  # an int
        return math.inf
    except (TypeError, ValueError):  # an array of several numbers, or one that is none
        return None


# Tensors


def check(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    score_mod: Any,
    scale: Any,
    layout: Any,
    return_lse: bool,
    given: Given | None = None,
) -> Call:
    """Everything that can be wrong with a call.

    Raises:
        InvalidArgument: names the argument, what was given and what is allowed.
    """
    if layout not in LAYOUTS:
        raise InvalidArgument(f"{layout=} must be one of {', '.join(LAYOUTS)}")
    check_return_lse(return_lse)
    check_tensors(q, k, v, 4, _AXIS_NAMES[layout], f"layout={layout!r} takes ")
    call = Call(
        q, k, v, as_mask(mask), as_score_mod(score_mod), as_scale(scale, q.shape[3]), layout, return_lse
    )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as {_AXIS_NAMES[layout]}"
    check_sizes((call.bhsd(tensor).shape for tensor in (q, k, v)), shapes)
    check_operands(call)
    check_grids(call)
    if given is None and q.dtype != E4M3:
        return call
    sinks, dropout = (None, None) if given is None else (as_sinks(given.sinks, q, layout), given.dropout)
    return replace(call, quantized=as_quantized(given, q, k, layout), sinks=sinks, dropout=dropout)


def check_return_lse(given: Any) -> None:
    """Raises `InvalidArgument` unless it is True or False."""
    if not isinstance(given, bool):
        raise InvalidArgument(f"return_lse={shown(given)} must be True or False")


def check_deterministic(given: Any) -> None:
    """Raises `InvalidArgument` unless it is True or False."""
    if not isinstance(given, bool):
        raise InvalidArgument(
            f"deterministic={shown(given)} must be True, False or None, for what "
            "torch.use_deterministic_algorithms says"
        )


def check_tensors(q: Any, k: Any, v: Any, dims: int, axes: str, takes: str = "it must be ") -> None:
    """Raises `InvalidArgument` unless q, k and v are dense tensors of so many axes, one dtype and one device.

    Args:
        axes, takes: how a message names the axes, and what stands before that.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name} must be a tensor {axes}, not {shown(tensor)}")
        check_dense(name, tensor)
        if tensor.dim() != dims:
            raise InvalidArgument(
                f"{name} has {tensor.dim()} dimensions, {tuple(tensor.shape)}; {takes}{axes}: reshape {name}"
            )
        if tensor.dtype not in DTYPE_NAMES:
            allowed = ", ".join(map(str, DTYPE_NAMES))
            raise InvalidArgument(
                f"{name}.dtype={tensor.dtype} is not served; allowed: {allowed}; convert {name}"
            )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InvalidArgument(
                f"{name}.dtype={tensor.dtype} must be that of q, {q.dtype}; convert one of them"
            )
        if tensor.device != q.device:
            raise InvalidArgument(
                f"{name}.device={tensor.device} must be that of q, {q.device}; move one of them"
            )


def as_sinks(given: Any, q: Tensor, layout: str) -> Tensor | None:
    """A call's sinks: a logit for each query head.

    Raises:
        InvalidArgument: they are no such tensor.
    """
    if given is None:
        return None
    heads = q.shape[1] if layout == "bhsd" else q.shape[2]
    if not isinstance(given, Tensor) or DTYPE_NAMES.get(given.dtype) not in SINK_DTYPES:
        raise InvalidArgument(
            f"sinks={shown(given)} must be None or a float32, float16 or bfloat16 tensor (heads,), a logit "
            "for each query head; convert it"
        )
    check_dense("sinks", given)
    if tuple(given.shape) != (heads,):
        raise InvalidArgument(f"sinks has shape {tuple(given.shape)}; q has {heads} heads, so ({heads},)")
    if given.device != q.device:
        raise InvalidArgument(f"sinks is on {given.device}, q on {q.device}; move one")
    return _as_held(given)


def _as_held(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its values as they are: that of a lazily negated one holds them negated."""
    if not torch.compiler.is_compiling() and tensor.is_neg():  # the operator resolves it
        return tensor.resolve_neg()
    return tensor


def as_dropout(given: Any, q: Any, draw: bool = True) -> Dropout | None:
    """What a call with this `dropout_p` drops, by a seed drawn from the generator of q's device; None for 0.

    Args:
        draw: with False the seed is 0, for a call that is not made.

    Raises:
        InvalidArgument: it is no probability. A tensor is refused: reading it waits for the GPU.
    """
    if not isinstance(given, float | int) or isinstance(given, bool) or not 0 <= given <= 1:
        hint = "; give its value, dropout_p.item()" if isinstance(given, Tensor) else ""
        raise InvalidArgument(
            f"dropout_p={shown(given)} must be a number from 0 to 1, the probability that a weight is "
            f"dropped{hint}"
        )
    if given == 0 or not isinstance(q, Tensor):  # the second is told of q
        return None
    seed = draw_seed(q.device) if draw else torch.zeros(1, dtype=torch.int64, device=q.device)
    return Dropout(float(given), seed)


def as_quantized(given: Given | None, q: Tensor, k: Tensor, layout: str) -> Quantized | None:
    """What a call says of its 8-bit tensors; None where they are of another dtype.

    Args:
        given: None where nothing was said: the factors are 1, the output is bfloat16.
        q, k: whose shapes agree.

    Raises:
        InvalidArgument: a factor or the dtype of the output is not what the tensors can have.
    """
    factors, out_dtype = (given or Given())[:3], None if given is None else given.out_dtype
    allowed = [dtype for dtype, name in DTYPE_NAMES.items() if name in OUT_DTYPES[DTYPE_NAMES[q.dtype]]]
    if out_dtype is not None and out_dtype not in allowed:
        raise InvalidArgument(
            f"out_dtype={shown(out_dtype)} of {q.dtype} tensors is not served; "
            f"allowed: {', '.join(map(str, allowed))}"
        )
    if q.dtype != E4M3:
        for name, factor in zip(Given._fields, factors, strict=False):
            if factor is not None:
                raise InvalidArgument(
                    f"{name} is given, but q is {q.dtype}: only 8-bit tensors ({E4M3}) have factors; "
                    "multiply the tensor, or quantise it"
                )
        return None
    heads, kv_heads = (x.shape[1] if layout == "bhsd" else x.shape[2] for x in (q, k))
    counts = ((heads, kv_heads), (kv_heads,), (kv_heads,))
    q_factor, k_factor, v_factor = (
        _as_factor(name, factor, q, count)
        for name, factor, count in zip(Given._fields, factors, counts, strict=False)
    )
    return Quantized(q_factor, k_factor, v_factor, out_dtype or torch.bfloat16)


def _as_factor(name: str, factor: Any, q: Tensor, heads: tuple[int, ...]) -> Factor:
    if factor is None:
        return 1.0
    if not isinstance(factor, Tensor):
        number = _number(factor)
        if number is None:
            raise InvalidArgument(f"{name}={shown(factor)} must be None, a number or a float32 tensor")
        if not 0 <= number <= MAX_SCALE:
            raise InvalidArgument(
                f"{name}={number} must be from 0 to 1.7e38: true value = stored value * {name}"
            )
        return number
    check_dense(name, factor)
    if factor.dtype != torch.float32 or factor.device != q.device:
        raise InvalidArgument(
            f"{name} is {factor.dtype} on {factor.device}; it must be torch.float32 on {q.device}, as q is: "
            "convert it"
        )
    batch, shape = q.shape[0], tuple(factor.shape)
    by_head = bool(shape) and any(shape[-1] == count for count in heads)
    if not (shape in ((), (1,)) or (by_head and shape[:-1] in ((), (batch,)))):
        shapes = [each for count in heads for each in ((count,), (batch, count))]
        listed = ", ".join(dict.fromkeys(map(str, [(), (1,), *shapes])))
        raise InvalidArgument(
            f"{name} has shape {shape}; allowed: {listed}: of the tensor, each head, or each sequence's heads"
        )
    return _as_held(factor)


def check_dense(name: str, tensor: Tensor) -> None:
    """A sparse, packed or nested tensor has no strides, and some have no shape; a masked one has two of each.

    Raises:
        InvalidArgument: it is one of these.
    """
    masked = isinstance(tensor, torch.masked.MaskedTensor)
    if masked or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "masked" if masked else "nested" if tensor.is_nested else str(tensor.layout)
        raise InvalidArgument(f"{name} is {kind}; only dense (strided) tensors are served: make it one")


def check_sizes(shapes: Iterable[Sequence[int]], given: str) -> None:
    """Raises `InvalidArgument` unless the shapes of q, k and v go together and are served.

    Args:
        shapes: each (batch, heads, length, head_dim).
        given: the shapes as the caller knows them.
    """
    q, k, v = shapes
    agreements = (
        ("k", "batch", "q's", k[0], q[0]),
        ("v", "batch", "q's", v[0], q[0]),
        ("v", "heads", "k's", v[1], k[1]),
        ("v", "length", "k's", v[2], k[2]),
        ("k", "head_dim", "q's", k[3], q[3]),
    )
    for name, what, whose, is_, wanted in agreements:
        if is_ != wanted:
            raise InvalidArgument(
                f"{name} has {what} {is_}, it must be {whose} {wanted}: {given}; cut the longer of "
                "the two, or expand an axis of one element"
            )
    if k[1] == 0 or q[1] % k[1]:
        raise InvalidArgument(
            f"q has {q[1]} heads, which must be a multiple of the {k[1]} heads of k and v: each key head "
            f"serves a whole group of query heads: {given}"
        )
    for name, dim in (("q", q[3]), ("v", v[3])):
        if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM or dim % HEAD_DIM_STEP:
            raise InvalidArgument(
                f"{name} has head_dim {dim}; allowed: multiples of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to "
                f"{MAX_HEAD_DIM}; pad q and k (or v) with zeros to the next one, and keep the scale"
            )


# Operands of rules. Their shapes are no part of the dispatcher's key, so it compares them at every call.

SIZES_AT = len(TENSORS) + 1 + len(TENSORS) * len(AXES)
"""Where the sizes begin in a call environment: behind the pointers and the strides."""
NUMBERS_AT = SIZES_AT + len(SIZES) + 1
"""Where the numbers of the rules begin: behind the sizes and the scale."""

_SIZE_OF = {
    "batch": "batch",
    "head": "heads",
    "kv_head": "kv_heads",
    "q_idx": "q_len",
    "k_idx": "k_len",
    "max(q_pos, 0)": "k_len",
}
_OPERAND_DTYPES = {
    ours: getattr(torch, theirs.removeprefix("torch.")) for theirs, ours in TORCH_DTYPES.items()
}


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """An axis that an expression indexes, such as `q_idx // 128`: how far follows from a call's numbers."""

    indices: tuple[ex.Expr, ...]
    params: tuple[str, ...]
    """Of the rule."""
    first: int
    """Where the call environment has the first of their values."""

    def least(self, env: Sequence[Any]) -> int:
        """The shortest axis that can be read so; 0 where that is not known."""
        values = tuple(env[self.first : self.first + len(self.params)])
        return _least(self, tuple(env[SIZES_AT : SIZES_AT + len(SIZES)]), values)


@lru_cache(maxsize=4096)
def _least(axis: Reached, sizes: tuple[Any, ...], values: tuple[Any, ...]) -> int:
    if not all(isinstance(size, int) and size for size in sizes):
        return 0  # a trace's own sizes, or a call without a query or key
    named, numbers = dict(zip(SIZES, sizes, strict=True)), dict(zip(axis.params, values, strict=True))
    reaches = [reach for each in axis.indices if (reach := rules.reach(each, named, numbers)) is not None]
    return max((hi + 1 if lo >= 0 else MAX_INDEX for lo, hi in reaches), default=0)


_OF_PACKED = (
    ": what rules read of packed sequences has a row for each of them, filled up to the longest "
    "(max_seqlen), and positions count within the sequence"
)

OperandAxes = tuple[str, torch.dtype, tuple[tuple[int, ...] | Reached, ...]]
"""An operand's name, dtype, and for each axis the entries of the call environment with the sizes it counts:
those of the plain symbols, or positions, that index it. The extent is the largest of them. An axis that
anything else indexes is at least as long as that reaches."""


def operand_axes(mask: Rule, score_mod: ScoreMod | None) -> tuple[OperandAxes, ...]:
    """The operands of a call's rules, in order."""
    axes = _operand_axes(mask.kind, mask.text, 0)
    if score_mod is None:
        return axes
    return axes + _operand_axes(score_mod.rule.kind, score_mod.rule.text, len(mask.params))


# By text: a trace takes the result for a constant, and no memory of ours for something to watch.
@catalog.remembered(maxsize=1024)
def _operand_axes(kind: str, text: str, before: int) -> tuple[OperandAxes, ...]:
    """Those of one rule, with so many numbers of another before its own in the call environment."""
    rule = Rule.parse(kind, text)
    return tuple(
        (
            each.name,
            _OPERAND_DTYPES[each.dtype],
            tuple(_counted(rule, each, i, before) for i in range(each.rank)),
        )
        for each in rule.operands
    )


def _counted(rule: Rule, operand: Operand, axis: int, before: int) -> tuple[int, ...] | Reached:
    found = [load for load in ex.loads(rule.expr) if load.operand == operand.name]
    indices = [ex.to_text(load.indices[axis]) for load in found]
    if not all(index in _SIZE_OF for index in indices):
        params = tuple(name for name, _ in rule.params)
        return Reached(tuple(load.indices[axis] for load in found), params, NUMBERS_AT + before)
    names = {_SIZE_OF[index] for index in indices}
    return tuple(sorted(SIZES_AT + SIZES.index(name) for name in names))


def check_operands(call: Call) -> None:
    """Raises `InvalidArgument` where a rule of a call has no tensor to read, or another one than it reads."""
    for bound in (call.mask, call.score_mod):
        if bound is None or not bound.tensors:
            continue
        known = call.sizes
        env = (0,) * SIZES_AT + tuple(getattr(known, each, 1) for each in SIZES) + (0.0, *bound.values)
        wanted = _operand_axes(bound.rule.kind, bound.rule.text, 0)
        for (operand, dtype, axes), tensor in zip(wanted, bound.tensors, strict=True):
            name = _argument(bound.rule, operand)
            if tensor is None:
                raise InvalidArgument(f"{bound.describe()} has no tensor for {name}; build it with one")
            check_dense(f"{name} of {bound.describe()}", tensor)
            if tensor.device != call.q.device:
                raise InvalidArgument(
                    f"{name} of {bound.describe()} is on {tensor.device}, q on {call.q.device}; move one"
                )
            if not torch.compiler.is_compiling() and tensor.is_neg():  # the operator resolves it
                raise InvalidArgument(
                    f"{name} of {bound.describe()} is negated lazily (the imaginary part of a conjugate); "
                    "give its resolve_neg()"
                )
            shape = tensor.shape
            if tensor.dtype != dtype or len(shape) != len(axes):
                step = f"give its .to({dtype})" if len(shape) == len(axes) else "reshape it"
                raise InvalidArgument(
                    f"{name} of {bound.describe()} must be {dtype} with {len(axes)} dimensions, "
                    f"not {shown(tensor)}; {step}"
                )
            if name == "cu_seqlens" and shape[0] == 1:
                _check_one_row(f"{name} of {bound.describe()}", shape[2] - 1, known)
            for axis, entries in enumerate(axes):
                if isinstance(entries, Reached):
                    _check_reach(f"{name} of {bound.describe()}", tensor, axis, entries, env)
                    continue
                counts = {SIZES[entry - SIZES_AT] for entry in entries}
                sizes = {each: getattr(known, each) for each in sorted(counts)}
                if sizes and shape[axis] != max(sizes.values()):
                    told = " and ".join(f"{each}, which is {size}" for each, size in sizes.items())
                    step = "expand" if shape[axis] == 1 else "cut or pad"
                    raise InvalidArgument(
                        f"{name} of {bound.describe()} has shape {tuple(shape)}; axis {axis} counts "
                        f"{told}{_OF_PACKED if call.totals else ''}; {step} it to {max(sizes.values())} there"
                    )


def _argument(rule: Rule, operand: str) -> str:
    """What a person gave an operand as: named rules have arguments, and a form that shows them."""
    base = operand.rstrip("0123456789").removesuffix("_")  # as `rule.join` renames the second of a name
    return masks.GIVEN_AS.get(base, base) if rule.form else operand


def _check_one_row(told: str, length: int, sizes: Sizes) -> None:
    """Of the documents of one packed row; a trace leaves it to the call itself."""
    if torch.compiler.is_compiling():
        return
    if sizes.batch != 1:
        raise InvalidArgument(
            f"{told} is of one row that documents are packed into, and batch is {sizes.batch}; make it "
            "one row, or give document(ids) with ids (batch, k_len)"
        )
    if length < sizes.k_len:
        raise InvalidArgument(
            f"{told} has length={length}, and k_len is {sizes.k_len}; give length={sizes.k_len}, that of k"
        )


def check_grids(call: Call) -> None:
    """Raises `InvalidArgument` where the keys of a call's sequences are not the positions of its mask's grid;
    a trace leaves it to the call itself."""
    if torch.compiler.is_compiling():
        return
    sizes, of_mask = call.sizes, (call.mask.rule, call.mask.values)
    if call.totals:
        masks.check_packed_grids(*of_mask, sizes.batch, sizes.k_len, call.totals[1])
    else:
        masks.check_grids(*of_mask, sizes.q_len, sizes.k_len)


def _check_reach(told: str, tensor: Tensor, axis: int, reached: Reached, env: tuple[Any, ...]) -> None:
    """Of an axis that no plain symbol indexes; a trace leaves it to the call itself."""
    if torch.compiler.is_compiling() or tensor.shape[axis] >= (least := reached.least(env)):
        return
    index = ", ".join(dict.fromkeys(map(ex.to_text, reached.indices)))
    needs, step = f"needs at least {least} elements", "pad it, or build a longer one"
    if least == MAX_INDEX:
        needs, step = "would be read before its beginning", "keep the index at 0 or more, as by max(index, 0)"
    raise InvalidArgument(
        f"{told} has shape {tuple(tensor.shape)}; axis {axis}, of index {index}, {needs} in this call: {step}"
    )


def shown(value: object) -> str:
    """A value for a message: short, and of a tensor dtype and shape alone."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
