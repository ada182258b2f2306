"""Right or wrong: one judgement and one table of tolerances, for the tuner and for every test.

A kernel is compared with the reference in higher precision. How far it may be off is not guessed: it may
err at most twice as much as the reference does when it rounds where the kernel rounds. Two errors are
judged, because either alone can hide a mistake: the largest absolute difference (dominated by rows that see
few keys, whose outputs are large) and the largest relative one of any row (a long row that misses one tile
of keys is off by a few per cent of a small number).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.build.inputs import TORCH, Inputs
from flashgen.build.reference import E4M3_LIFT, attention_reference, packed_reference
from flashgen.spec import expr as ex
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Bound, Rule
from flashgen.spec.score_mods import ScoreMod

FACTOR = 2.0
"""A kernel may err this many times as much as the rounding reference."""
LSE_TOLERANCE = 1e-3
ALL_SCORES = 2**33
"""Up to so many scores every head is compared (half a second on an H200); beyond it, a part of the heads."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Floors under the limits, for what the rounding reference does not do: other orders of summation, and
    the hardware's approximate exp2."""

    absolute: float
    relative: float
    """Of the norm of a row's difference to that of the row."""
    lse: float = LSE_TOLERANCE
    sum_bits: int = 24
    """Digits that are kept of a score: its error shows in the LSE."""
    lifts: tuple[float, ...] = (1.0,)
    """At how many times their size the rounding reference rounds weights: the worst of these counts."""


TOLERANCES = {
    # Relative to a maximum that is not the last one, the largest weight is not 1, and is rounded as well.
    "bf16": Tolerance(1e-3, 1e-3, lifts=(1.0, 2**-0.25)),
    "fp16": Tolerance(1e-4, 2e-4, lifts=(1.0, 2**-0.25)),
    "fp32": Tolerance(2e-5, 2e-5),  # a tenth of what TF32 products would give
    "tf32": Tolerance(1e-3, 1e-3),
    # Tensor cores keep 14 bits of a sum of 8-bit products. Where between two powers of 2 a weight is rounded
    # depends on the row's running maximum, and its error on that by a factor of 2.
    "e4m3": Tolerance(
        2e-3, 4e-3, lse=4e-3, sum_bits=14, lifts=tuple(E4M3_LIFT * 2 ** (i / 4) for i in range(4))
    ),
}
"""By `AttentionSpec.dtype_label`."""

# A NaN that no computation gives, so that what was never written can be told from a NaN that was.
_POISON = {2: (torch.int16, 0x7FDA), 4: (torch.int32, 0x7FDA7FDA)}
_GUARD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an output is right; a reason whenever it is not."""

    max_error: float
    """Largest absolute difference from the reference; NaN where none could be taken."""
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the output is right."""
        return not self.reason


class Expected:
    """What a kernel should give for some inputs, and the limits that follow; made once for all configs.

    Args:
        inputs: the call.
        spec: for the dtype and how it is multiplied.
        all_scores: beyond so many scores, only a part of the (batch, head) pairs is computed: the first and
            the last, the edges of groups, and at least one of each key head while the limit allows.
    """

    def __init__(self, inputs: Inputs, spec: AttentionSpec, all_scores: int = ALL_SCORES) -> None:
        self._label = spec.dtype_label
        q, k, v = inputs.true()
        exact_in = torch.float64 if spec.dtype == "fp32" else torch.float32
        rounded_in = [_truncated_to_tf32(each) if self._label == "tf32" else each for each in (q, k, v)]
        rounding = TORCH[spec.dtype], TORCH[spec.result_dtype]
        batch, heads, q_len, _ = q.shape
        floor = TOLERANCES[self._label]
        lifts = floor.lifts
        scores = batch * heads * q_len * k.shape[2]
        if scores <= all_scores:
            self.pairs: tuple[tuple[int, int], ...] | None = None
            exact, lse = reference((q, k, v), inputs, exact_in, None)
            rounded = [reference(rounded_in, inputs, torch.float32, rounding, lift) for lift in lifts]
        else:
            self.pairs = some_pairs(batch, heads, k.shape[1], max(4, all_scores // (q_len * k.shape[2])))
            each = [
                [
                    reference((q, k, v), inputs, exact_in, None, pair=pair),
                    *(reference(rounded_in, inputs, torch.float32, rounding, lift, pair) for lift in lifts),
                ]
                for pair in self.pairs
            ]
            (exact, lse), *rounded = [
                (torch.cat([out for out, _ in of]), torch.cat([lse for _, lse in of]))
                for of in zip(*each, strict=True)
            ]
        self.out, self.lse = exact.float() if exact_in is torch.float32 else exact, lse
        errors = [self._errors(out) for out, _ in rounded]
        absolute, relative = (max(each) for each in zip(*errors, strict=True))
        self.max_limit = FACTOR * absolute + floor.absolute
        self.row_limit = FACTOR * relative + floor.relative
        rounded_lse = max(_lse_error(each, self.lse) for _, each in rounded)
        largest = torch.where(self.lse.isfinite(), self.lse, 0.0).abs().amax() if self.lse.numel() else 0.0
        self.lse_limit = max(floor.lse, FACTOR * rounded_lse, FACTOR * float(largest) * 2.0**-floor.sum_bits)

    def _errors(self, out: Tensor) -> tuple[float, float]:
        """(largest absolute difference, largest relative one of a row) of a selected output."""
        if out.numel() == 0:
            return 0.0, 0.0
        difference = (out.to(self.out.dtype) - self.out).abs_()
        largest = float(difference.amax())
        row = torch.linalg.vector_norm(difference, dim=-1)
        norm = torch.linalg.vector_norm(self.out, dim=-1)
        # A row that sees no key is 0: any difference there is one of its own size.
        return largest, float((row / torch.where(norm > 0, norm, 1.0)).amax())

    def judge(self, out: Tensor, lse: Tensor | None = None) -> Verdict:
        """Compares an output (batch, heads, q_len, head_dim_v) and, if given, its LSE (batch, heads, q_len).

        The whole output is looked at for what is unwritten or not finite, the compared heads for errors.
        """
        for name, tensor in (("out", out), ("lse", lse)):
            if tensor is not None and (found := flaw(name, tensor)):
                return Verdict(math.nan, found)
        selected = out if self.pairs is None else _picked(out, self.pairs)
        largest, relative = self._errors(selected)
        if largest > self.max_limit:
            place = self._place((selected.to(self.out.dtype) - self.out).abs_().amax(-1))
            return Verdict(largest, f"max error {largest:.3g} is over {self.max_limit:.3g}, at {place}")
        if relative > self.row_limit:
            reason = f"relative error {relative:.3g} of a row is over {self.row_limit:.3g}"
            row = torch.linalg.vector_norm(selected.to(self.out.dtype) - self.out, dim=-1)
            norm = torch.linalg.vector_norm(self.out, dim=-1)
            return Verdict(largest, f"{reason}, at {self._place(row / torch.where(norm > 0, norm, 1.0))}")
        if lse is not None:
            chosen = lse if self.pairs is None else _picked(lse, self.pairs)
            if not torch.equal(chosen == -math.inf, self.lse == -math.inf):
                return Verdict(largest, "the LSE is -inf in other rows than those that see no key")
            off = _lse_error(chosen, self.lse)
            if not off <= self.lse_limit:
                return Verdict(largest, f"LSE error {off:.3g} is over {self.lse_limit:.3g}")
        return Verdict(largest)

    def _place(self, errors: Tensor) -> str:
        """Batch, head and row of the largest of (batch, heads, rows)."""
        index = int(errors.argmax())
        rows, heads = errors.shape[-1], errors.shape[-2]
        pair = divmod(index // rows, heads) if self.pairs is None else self.pairs[index // rows]
        return f"batch {pair[0]}, head {pair[1]}, row {index % rows}"


def some_pairs(batch: int, heads: int, kv_heads: int, most: int) -> tuple[tuple[int, int], ...]:
    """At most `most` (batch, head) pairs: first, last, both sides of a group's edge, then each key head."""
    group = heads // kv_heads
    wanted = [(0, 0), (batch - 1, heads - 1), (0, min(group, heads - 1)), (batch - 1, group - 1)]
    wanted += [(g % batch, g * group + g % group) for g in range(kv_heads)]
    wanted += [(b, h) for h in range(heads) for b in range(batch)]
    return tuple(list(dict.fromkeys(wanted))[:most])


def reference(
    qkv: Any,
    inputs: Inputs,
    dtype: torch.dtype,
    rounding: tuple[torch.dtype, torch.dtype] | None = None,
    lift: float = 1.0,
    pair: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, q_len, head_dim_v) and LSE of inputs, each packed sequence by itself.

    Args:
        qkv: in the place of the inputs' own, (batch, heads, rows, dims).
        dtype, lift: as for `attention_reference`, and `rounding` is its two dtypes of weights and the output.
        pair: batch and head, where one alone is wanted.
    """
    q, k, v = qkv
    mask, score_mod, sinks, dropout = inputs.mask, inputs.score_mod, inputs.sinks, inputs.dropout
    sequence = 0
    if pair is not None:
        batch, head = pair
        kv_head = head // (q.shape[1] // k.shape[1])
        dropout = None if dropout is None else replace(dropout, head=head, heads=q.shape[1])
        q, k, v = q[batch, head], k[batch, kv_head], v[batch, kv_head]
        q, k, v = (each[None, None] for each in (q, k, v))
        symbols = {"head": head, "kv_head": kv_head}
        if inputs.packed is None:
            symbols["batch"] = sequence = batch
        mask = Mask(*_fixed(mask, symbols))
        score_mod = None if score_mod is None else ScoreMod(*_fixed(score_mod, symbols))
        sinks = None if sinks is None else sinks[head : head + 1]
    p, out = rounding or (None, None)
    options: dict[str, Any] = {
        "mask": mask,
        "score_mod": score_mod,
        "scale": inputs.scale,
        "sinks": sinks,
        "dtype": dtype,
        "round_p_to": p,
        "round_out_to": out,
        "lift": lift,
        "dropout": dropout,
    }
    if inputs.packed is None:
        return attention_reference(q, k, v, sequence=sequence, **options)
    starts = (each.tolist() for each in inputs.packed)
    packed, lse = packed_reference(*(each[0].transpose(0, 1) for each in (q, k, v)), *starts, **options)
    return packed.transpose(0, 1)[None], lse[None]


def _fixed(bound: Bound, symbols: dict[str, int]) -> tuple[Rule, tuple[Any, ...], tuple[Any, ...]]:
    """Rule, values and tensors with numbers for some symbols, and without what then no longer occurs."""
    rule = bound.rule
    expr = ex.substitute(rule.expr, {ex.Symbol(name): ex.number(value) for name, value in symbols.items()})
    read = {*ex.params(expr), *(load.operand for load in ex.loads(expr))}
    values = [(p, value) for p, value in zip(rule.params, bound.values, strict=True) if p[0] in read]
    tensors = [(o, tensor) for o, tensor in zip(rule.operands, bound.tensors, strict=True) if o.name in read]
    fixed = Rule(rule.kind, expr, tuple(p for p, _ in values), tuple(o for o, _ in tensors))
    return fixed, tuple(value for _, value in values), tuple(tensor for _, tensor in tensors)


def _picked(tensor: Tensor, pairs: tuple[tuple[int, int], ...]) -> Tensor:
    """The pairs of (batch, heads, ...), as (pairs, 1, ...)."""
    batches, heads = (torch.tensor(each, device=tensor.device) for each in zip(*pairs, strict=True))
    return tensor[batches, heads].unsqueeze(1)


def _truncated_to_tf32(tensor: Tensor) -> Tensor:
    """float32 with the 13 low bits dropped, as tensor cores read it."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _lse_error(lse: Tensor, exact: Tensor) -> float:
    seen = exact != -math.inf
    if not bool(seen.any()):
        return 0.0
    return float((lse.to(exact.dtype)[seen] - exact[seen]).abs().amax())


def flaw(name: str, tensor: Tensor) -> str:
    """What is wrong with a result whatever it should be: parts unwritten, NaN or infinite."""
    unwritten = int((_bits(tensor) == _POISON[tensor.element_size()][1]).sum())
    if unwritten:
        return f"{unwritten} of {tensor.numel()} elements of {name} were never written, or only added to"
    finite = torch.isfinite(tensor) | (tensor == -math.inf) if name == "lse" else torch.isfinite(tensor)
    odd = tensor.numel() - int(finite.sum())
    return f"{odd} of {tensor.numel()} elements of {name} are NaN or infinite" if odd else ""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_POISON[tensor.element_size()][0])


# Buffers


class Poisoned:
    """A result buffer of the given shape, poisoned, between two poisoned guard zones.

    Every trial writes into a freshly poisoned one: what a kernel leaves out, adds to or writes beside shows.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        guard = _GUARD_BYTES // dtype.itemsize
        count = math.prod(shape)
        self._whole = torch.empty(count + 2 * guard, dtype=dtype, device=device)
        self._zones = self._whole[:guard], self._whole[guard + count :]
        self.tensor = self._whole[guard : guard + count].view(shape)

    def poison(self) -> None:
        """Makes all of it unwritten again."""
        _bits(self._whole).fill_(_POISON[self._whole.element_size()][1])

    @property
    def bits(self) -> Tensor:
        """The buffer as integers, for comparison bit by bit."""
        return _bits(self.tensor)

    def overrun(self) -> bool:
        """Whether something wrote into the guard zones."""
        pattern = _POISON[self._whole.element_size()][1]
        return any(bool((_bits(zone) != pattern).any()) for zone in self._zones)


def fingerprint(tensors: list[Tensor]) -> int:
    """A number that changes when a bit of the tensors does; they are contiguous."""
    total = 0
    for tensor in tensors:
        if tensor.element_size() == 1:
            total += int(tensor.view(torch.uint8).sum(dtype=torch.int64))
        elif tensor.element_size() in _POISON:
            total += int(_bits(tensor).sum(dtype=torch.int64))
    return total


Run = Callable[..., None]
"""Computes into the buffers of a rig, as `AnyRig.buffers` gives them."""


class MemoryDamage(Exception):
    """A kernel changed memory that is not its own; the process that ran it starts afresh."""


class AnyRig(ABC):
    """Everything the trials of one workload share: inputs, what to expect, and result buffers.

    Args:
        sources: what a launch must leave as it is.
        results: shape and dtype of each result; None for one that is not wanted.
    """

    def __init__(
        self,
        inputs: Inputs,
        sources: Sequence[Tensor],
        results: Sequence[tuple[tuple[int, ...], torch.dtype] | None],
    ) -> None:
        self.inputs = inputs
        self._sources = list(sources)
        self._print = fingerprint(self._sources)
        self._results = [
            [None if each is None else Poisoned(*each, inputs.q.device) for each in results] for _ in range(2)
        ]

    @abstractmethod
    def environment(self, *buffers: Tensor | None) -> tuple[Any, ...]:
        """The call environment of a launch into such buffers."""

    @abstractmethod
    def judge(self, side: int = 0) -> Verdict:
        """Whether one of the two results is right."""

    def buffers(self, side: int = 0) -> tuple[Tensor | None, ...]:
        """Where one of the two results goes, in order; None for what is not wanted."""
        return tuple(None if each is None else each.tensor for each in self._results[side])

    def examine(self, run: Run) -> tuple[Verdict, bool]:
        """Runs a kernel twice into poisoned buffers and judges it.

        Returns:
            The verdict, on both where they differ, and whether the two runs gave the same bits.

        Raises:
            MemoryDamage: the inputs changed, and cannot be used again.
        """
        pairs = [each for each in zip(*self._results, strict=True) if each[0] is not None]
        poisoned = [each for pair in pairs for each in pair if each is not None]
        for each in poisoned:
            each.poison()
        for side in range(2):
            run(*self.buffers(side))
        if fingerprint(self._sources) != self._print:
            raise MemoryDamage("the kernel wrote outside its output: the inputs changed")
        if any(each.overrun() for each in poisoned):
            return Verdict(math.nan, "the kernel wrote outside its output: a guard zone changed"), True
        same = all(torch.equal(a.bits, b.bits) for a, b in pairs if a is not None and b is not None)
        verdict = self.judge()
        return (verdict if same or not verdict.ok else self.judge(1)), same


class Rig(AnyRig):
    """Of `fwd`: the buffers are out, in the inputs' layout, and the LSE or None."""

    def __init__(self, inputs: Inputs, spec: AttentionSpec, all_scores: int = ALL_SCORES) -> None:
        self.expected = Expected(inputs, spec, all_scores)
        batch, heads, q_len, _ = inputs.bhsd(inputs.q).shape
        out = ((*inputs.q.shape[:3], inputs.v.shape[3]), TORCH[spec.result_dtype])
        lse = ((batch, heads, q_len), torch.float32) if spec.return_lse else None
        super().__init__(inputs, (inputs.q, inputs.k, inputs.v), (out, lse))

    def environment(self, *buffers: Tensor | None) -> tuple[Any, ...]:
        """See `AnyRig`."""
        out, lse = buffers
        assert out is not None
        return self.inputs.environment(out, lse)

    def judge(self, side: int = 0) -> Verdict:
        """See `AnyRig`."""
        out, lse = self.buffers(side)
        assert out is not None
        return self.expected.judge(self.inputs.bhsd(out), lse)
