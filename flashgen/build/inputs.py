"""Inputs for checking and timing: random normal tensors, and invented operands for the masks that need some.

Zeros or a mask without padding would be timed differently from real data (a matrix product of zeros draws
less power and runs at higher clocks), so the tuner measures on these and the record says how they were made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen.build.arguments import call_facts, flatten, flatten_gradients, flatten_packed
from flashgen.build.dropout import Dropout
from flashgen.build.quantized import E4M3, Quantized, quantize
from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.rule import OPERAND_DTYPES, TORCH_DTYPES, Operand, Rule, reach, values_and_tensors
from flashgen.spec.score_mods import ScoreMod, alibi_slopes

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "e4m3": E4M3}
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}
"""Axes of (batch, heads, seq, head_dim) in each layout."""

DROPPED = 0.1
"""The probability that weights are dropped with: no kernel is faster or slower by it."""

_OPERAND_TORCH = {
    ours: getattr(torch, theirs.removeprefix("torch.")) for theirs, ours in TORCH_DTYPES.items()
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's arguments: q (batch, heads, q_len, head_dim), k and v likewise with kv_heads and k_len, in the
    order of axes of `layout`; the scale is 1 / sqrt(head_dim). Packed sequences are the rows of one, in the
    layout `bshd`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Mask
    score_mod: ScoreMod | None
    scale: float
    layout: str
    density: str
    """How the operands came about, as in `Record.density`."""
    quantized: Quantized | None = None
    """What 8-bit q, k and v stand for."""
    packed: tuple[torch.Tensor, torch.Tensor] | None = None
    """Where packed sequences begin among the queries and among the keys: int32 (sequences + 1)."""
    sinks: torch.Tensor | None = None
    """(heads,) logits."""
    dropout: Dropout | None = None

    def bhsd(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout as a (batch, heads, seq, head_dim) view."""
        return tensor.permute(LAYOUTS[self.layout])

    def true(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as (batch, heads, seq, head_dim); 8-bit ones as they are meant, in float32."""
        q, k, v = (self.bhsd(each) for each in (self.q, self.k, self.v))
        return (q, k, v) if self.quantized is None else self.quantized.true(q, k, v)

    def widened(self) -> Inputs:
        """With the values that 8-bit q, k and v stand for in the dtype of the output; others as they are."""
        if self.quantized is None:
            return self
        dtype = self.quantized.out_dtype
        # An exchange of two axes is its own inverse.
        q, k, v = (self.bhsd(each.to(dtype)).contiguous() for each in self.true())
        return replace(self, q=q, k=k, v=v, quantized=None)

    def environment(
        self, out: torch.Tensor, lse: torch.Tensor | None, pointers: bool = True
    ) -> tuple[Any, ...]:
        """The call environment of a launch into `out` and `lse`, see `arguments.flatten`."""
        values, tensors = values_and_tensors(self.mask, self.score_mod)
        if self.packed is not None:
            q, k, v, rows = (each[0] for each in (self.q, self.k, self.v, out))
            cu_q, cu_k = self.packed
            env = flatten_packed(q, k, v, rows, lse, cu_q, cu_k, self.scale, values, tensors, pointers)
            return env + self._optional(pointers)
        scale = self.scale if self.quantized is None else self.quantized.folded(self.scale)
        env = flatten(self.q, self.k, self.v, out, lse, scale, values, tensors, self.layout, pointers)
        if self.quantized is not None:
            heads, kv_heads = self.bhsd(self.q).shape[1], self.bhsd(self.k).shape[1]
            env += self.quantized.entries(kv_heads, heads // kv_heads, pointers)
        return env + self._optional(pointers)

    def _optional(self, pointers: bool) -> tuple[Any, ...]:
        """The entries of what most calls leave out."""
        entries: tuple[Any, ...] = ()
        if self.sinks is not None:
            entries = (self.sinks.data_ptr() if pointers else self.sinks, *self.sinks.stride())
        return entries if self.dropout is None else entries + self.dropout.entries(pointers)

    def gradient_environment(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        dlse: torch.Tensor | None = None,
        pointers: bool = True,
        dsinks: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        """The call environment of `bwd`, from what the forward call gave.

        Args:
            gradients: dout, and where dq, dk and dv go; see `arguments.flatten_gradients`.
            dsinks: where the gradient of the sinks goes, if it is computed: (heads,), float32.
        """
        inputs = self if dsinks is not None else replace(self, sinks=None)
        if self.packed is not None:
            gradients = tuple(each[0] for each in gradients)  # type: ignore[assignment]  # of four
        entries = flatten_gradients(*gradients, dlse, self.layout, pointers)
        env = (*inputs.environment(out, lse, pointers), *entries)
        return env if dsinks is None else (*env, dsinks.data_ptr() if pointers else dsinks)


def make_inputs(
    workload: Workload, device: torch.device | str, layout: str = "bhsd", seed: int = 0
) -> Inputs:
    """Random inputs of a workload: the same for the same seed and kind of device.

    8-bit ones are normal numbers that fill the range of each sequence's head. Packed sequences, always in the
    layout `bshd`, have lengths as `packed_lengths` draws them.

    Raises:
        InvalidArgument: the layout is unknown, a parameter of the rules has no value in `workload.params`,
            or nobody can know what a sensible operand of the mask would be.
    """
    if layout not in LAYOUTS:
        raise InvalidArgument(f"{layout=} must be one of {', '.join(LAYOUTS)}")
    spec = workload.spec
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    packed = None
    if spec.packed:
        layout = "bshd"
        packed = tuple(starts(lengths).to(device) for lengths in packed_lengths(workload, seed))
    dtype = torch.float32 if spec.quantized else TORCH[spec.dtype]
    mask, score_mod = make_rules(workload, device, seed)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=dtype, device=device)
        for shape in _shapes(workload, layout)[:3]
    )
    quantized = None
    if spec.quantized:
        # An exchange of two axes is its own inverse.
        made = [quantize(each.permute(LAYOUTS[layout])) for each in (q, k, v)]
        q, k, v = (stored.permute(LAYOUTS[layout]).contiguous() for stored, _ in made)
        quantized = Quantized(made[0][1], made[1][1], made[2][1], TORCH[spec.result_dtype])
    return Inputs(
        q=q,
        k=k,
        v=v,
        mask=mask,
        score_mod=score_mod,
        scale=spec.head_dim**-0.5,
        layout=layout,
        density=density(workload),
        quantized=quantized,
        packed=packed,  # type: ignore[arg-type]  # a pair
        sinks=_sinks(workload, device, seed),
        dropout=Dropout(DROPPED, torch.tensor([seed], device=device)) if spec.dropout else None,
    )


def packed_lengths(workload: Workload, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """How many queries and keys each packed sequence has, int64 (sequences): the same for the same seed.

    One is as long as the longest, the others lie evenly around the mean that the totals leave for them, in
    any order; the sequence with more queries has more keys. Where the sizes agree, so do the lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    q_lengths = _drawn(workload.batch, workload.q_len, workload.total_q, generator)
    k_lengths = q_lengths
    if (workload.q_len, workload.total_q) != (workload.k_len, workload.total_k):
        k_lengths = _drawn(workload.batch, workload.k_len, workload.total_k, generator)
    order = torch.randperm(workload.batch, generator=generator)
    return q_lengths.sort().values[order], k_lengths.sort().values[order]


def _drawn(count: int, longest: int, total: int, generator: torch.Generator) -> torch.Tensor:
    first = min(longest, total)
    rest, others = total - first, count - 1
    mean = rest / max(others, 1)
    width = min(mean, longest - mean)
    lengths = mean + width * (2 * torch.rand(others, generator=generator, dtype=torch.float64) - 1)
    lengths = lengths.round().long().clamp(0, longest)
    while missing := rest - int(lengths.sum()):  # or too many: evenly from all that have room
        room = longest - lengths if missing > 0 else lengths
        share = max(1, abs(missing) // int((room > 0).sum()))
        given = room.clamp(max=share)
        given = torch.where(given.cumsum(0) <= abs(missing), given, 0)
        lengths += given if missing > 0 else -given
    return torch.cat([torch.tensor([first]), lengths])


def starts(lengths: torch.Tensor) -> torch.Tensor:
    """Where each sequence of some lengths begins when they are packed, and where the last one ends: int32."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def _sinks(workload: Workload, device: torch.device, seed: int) -> torch.Tensor | None:
    """As large as the sum of a row's exponentials: they take about half of its weight."""
    if not workload.spec.sinks:
        return None
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(workload.heads, generator=generator) + math.log(workload.k_len or 1)
    return drawn.to(TORCH[workload.spec.sinks]).to(device)


def make_rules(
    workload: Workload, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Mask, ScoreMod | None]:
    """The mask and score rule of a workload with its numbers and invented operands, equal on every device."""
    spec, device = workload.spec, torch.device(device)
    rules = [rule for rule in (spec.mask, spec.score_mod) if rule is not None]
    values = [value for _, value in workload.params]
    wanted = [name for rule in rules for name, _ in rule.params]
    if len(values) != len(wanted):
        raise InvalidArgument(
            f"workload.params={workload.params} must give a number for each of: {', '.join(wanted) or 'none'}"
        )
    split = len(spec.mask.params)
    generator = torch.Generator().manual_seed(seed)
    mask = Mask(spec.mask, tuple(values[:split]), _operands(spec.mask, workload, device, generator))
    if spec.score_mod is None:
        return mask, None
    drawn = _operands(spec.score_mod, workload, device, generator)
    return mask, ScoreMod(spec.score_mod, tuple(values[split:]), drawn)


def density(workload: Workload) -> str:
    """How `make_inputs` invents the operands of a workload's rules; `full` when they have none."""
    rules = [rule for rule in (workload.spec.mask, workload.spec.score_mod) if rule is not None]
    kinds = {_invention(rule, operand).told for rule in rules for operand in rule.operands}
    if workload.documents:
        kinds.discard(_DOCUMENTS.told)
        kinds.add(f"{workload.documents} documents, cut at places drawn evenly")
    if workload.spec.packed:
        kinds.add("packed lengths uniform around their mean, one the longest")
    return ", ".join(sorted(kinds)) or "full"


def contiguous_facts(workload: Workload) -> CallFacts:
    """The facts of a call with freshly allocated tensors of these sizes; nothing is allocated for it."""
    spec = workload.spec
    layout = "bshd" if spec.packed else "bhsd"
    dtypes = (*(spec.dtype,) * 3, spec.result_dtype)
    q, k, v, out = (
        torch.empty(shape, dtype=TORCH[dtype], device="meta")
        for shape, dtype in zip(_shapes(workload, layout), dtypes, strict=True)
    )
    return call_facts(q, k, v, out, layout)


def _shapes(workload: Workload, layout: str) -> list[list[int]]:
    """Of q, k, v and the output, in a layout; packed sequences are the rows of one, in `bshd`."""
    spec, batch, q_len, k_len = workload.spec, workload.batch, workload.q_len, workload.k_len
    if spec.packed:
        batch, q_len, k_len = 1, workload.total_q, workload.total_k
    shapes = (
        (batch, workload.heads, q_len, spec.head_dim),
        (batch, workload.kv_heads, k_len, spec.head_dim),
        (batch, workload.kv_heads, k_len, spec.head_dim_v),
        (batch, workload.heads, q_len, spec.head_dim_v),
    )
    return [[shape[axis] for axis in LAYOUTS[layout]] for shape in shapes]


# Operands


_Shape = tuple[int, ...]


def _lengths(workload: Workload, shape: _Shape, generator: torch.Generator) -> torch.Tensor:
    least = (workload.k_len + 1) // 2
    return torch.randint(least, workload.k_len + 1, shape, generator=generator)


def _right_padding(workload: Workload, shape: _Shape, generator: torch.Generator) -> torch.Tensor:
    kept = _lengths(workload, (workload.batch,), generator)
    return torch.arange(workload.k_len) < kept[:, None]


def _documents(workload: Workload, shape: _Shape, generator: torch.Generator) -> torch.Tensor:
    """Numbered from 0 in each sequence: as many as the workload says, between places drawn evenly, or else of
    drawn lengths, the last one cut off at the sequence's end.
    """
    keys = torch.arange(workload.k_len).expand(workload.batch, -1).contiguous()
    if workload.documents:
        count = (workload.batch, workload.documents - 1)
        cuts = torch.randint(0, workload.k_len + 1, count, generator=generator)
        return torch.searchsorted(cuts.sort().values, keys, right=True)
    least = -(-workload.k_len // 16)
    most = max(least, workload.k_len // 4)
    lengths = torch.randint(least, most + 1, (workload.batch, 16), generator=generator)
    return torch.searchsorted(lengths.cumsum(1), keys, right=True)


def _document_ends(workload: Workload, shape: _Shape, generator: torch.Generator) -> torch.Tensor:
    """Of the same documents, as `masks.document` has them of those that follow one another."""
    ids = _documents(workload, shape, generator)
    ends = [torch.searchsorted(ids, ids, right=last) for last in (False, True)]
    return torch.nn.functional.pad(torch.stack(ends, 1), (1, 0))


def _blocks(workload: Workload, shape: _Shape, generator: torch.Generator) -> torch.Tensor:
    """Those on the diagonal, and of the others a quarter."""
    rows, keys = (torch.arange(extent) for extent in shape[-2:])
    return (torch.rand(shape, generator=generator) < 0.25) | (rows[:, None] * shape[-1] // shape[-2] == keys)


def _slopes(workload: Workload, shape: _Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(alibi_slopes(*shape))


def _normal(workload: Workload, shape: _Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


@dataclass(frozen=True, slots=True)
class _Invention:
    draw: Callable[[Workload, _Shape, torch.Generator], torch.Tensor]
    """Of any dtype; it is brought to the operand's."""
    told: str


_INTEGERS = ("i32", "i64")
_DOCUMENTS = _Invention(_documents, "documents of lengths uniform in [k/16, k/4]")
_DOCUMENT_ENDS = _Invention(_document_ends, _DOCUMENTS.told)
_BLOCKS = _Invention(_blocks, "a quarter of the blocks and the diagonal")
_NORMAL = _Invention(_normal, "normal numbers")
_INVENTIONS: Mapping[tuple[tuple[str, ...], str], _Invention] = {
    **{(("batch",), dtype): _Invention(_lengths, "lengths uniform in [k/2, k]") for dtype in _INTEGERS},
    **{(("batch", index), dtype): _DOCUMENTS for index in ("max(q_pos, 0)", "k_idx") for dtype in _INTEGERS},
    **{(("batch", side, "max(q_pos + 1, 0)"), "i32"): _DOCUMENT_ENDS for side in ("0", "1")},
    (("batch", "k_idx"), "i1"): _Invention(_right_padding, "right padding, lengths uniform in [k/2, k]"),
    **{
        ((batch, head, "q_idx // n", "k_idx // n"), "i1"): _BLOCKS
        for batch in ("0", "batch")
        for head in ("0", "head")
    },
    (("head",), "fp32"): _Invention(_slopes, "slopes of ALiBi"),
}
"""What a sensible operand is, by the symbols that index it and its dtype. Other floats are normal numbers."""


def _invention(rule: Rule, operand: Operand) -> _Invention:
    loads = [load for load in ex.loads(rule.expr) if load.operand == operand.name]
    written = {tuple(ex.to_text(index) for index in load.indices) for load in loads}
    symbols = {tuple(re.sub(r"// \d+$", "// n", index) for index in each) for each in written}
    found = [_INVENTIONS[each, operand.dtype] for each in symbols if (each, operand.dtype) in _INVENTIONS]
    if not found and OPERAND_DTYPES[operand.dtype] == "float":
        return _NORMAL
    if len(found) != len(symbols) or len(set(found)) != 1:
        known = "; ".join(f"{dtype} [{', '.join(index)}]" for index, dtype in _INVENTIONS)
        raise InvalidArgument(
            f"no values can be invented for operand {operand.name} ({operand.dtype}) of {rule.text!r}; "
            f"known kinds: {known}. Tune the mask without it"
        )
    return found[0]


def _shape(rule: Rule, operand: Operand, workload: Workload) -> _Shape:
    """As long as the rule reads along each axis."""
    sizes = {name: getattr(workload, name) for name in ("batch", "heads", "kv_heads", "q_len", "k_len")}
    load = next(load for load in ex.loads(rule.expr) if load.operand == operand.name)
    reaches = [reach(index, sizes, dict(workload.params)) for index in load.indices]
    if None in reaches:
        raise InvalidArgument(
            f"no values can be invented for operand {operand.name} of {rule.text!r}, for nobody can know its "
            "size. Tune the rule without it"
        )
    return tuple(each[1] + 1 for each in reaches if each is not None)


def _operands(
    rule: Rule, workload: Workload, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    drawn = (
        _invention(rule, operand).draw(workload, _shape(rule, operand, workload), generator)
        for operand in rule.operands
    )
    return tuple(
        each.to(_OPERAND_TORCH[operand.dtype]).to(device)
        for each, operand in zip(drawn, rule.operands, strict=True)
    )
