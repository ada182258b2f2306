"""Calls of packed sequences: what `attention_varlen` accepts, and the error for what it does not.

The host knows how many sequences there are, all tokens and what the caller says of the longest; where each
sequence begins is on the GPU and stays there. Those places are looked at where that costs no wait (CPU
tensors, and where torch's operations wait for them anyway), and everywhere with the setting FLASHGEN_CHECK=1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashgen.build.dropout import Dropout
from flashgen.build.quantized import E4M3
from flashgen.errors import InvalidArgument, LaunchFailed
from flashgen.runtime.checks import (
    Call,
    Sizes,
    as_mask,
    as_scale,
    as_score_mod,
    as_sinks,
    check_grids,
    check_operands,
    check_return_lse,
    check_sizes,
    check_tensors,
    shown,
)
from flashgen.spec import masks
from flashgen.spec.attention import MAX_INDEX
from flashgen.spec.masks import Mask

AXES = "(tokens, heads, head_dim)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCall(Call):
    """The arguments of one call, checked: q, k and v are (tokens, heads, head_dim)."""

    cu_q: Tensor
    """Where each sequence begins among the queries, and where the last one ends: int32 (sequences + 1)."""
    cu_k: Tensor
    max_q: int
    max_k: int

    @property
    def sizes(self) -> Sizes:
        """The batch counts the sequences, the lengths are the longest ones."""
        _, heads, head_dim = self.q.shape
        _, kv_heads, head_dim_v = self.v.shape
        return Sizes(self.cu_q.shape[0] - 1, heads, kv_heads, self.max_q, self.max_k, head_dim, head_dim_v)

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens of all sequences, of queries and of keys."""
        return self.q.shape[0], self.k.shape[0]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no output element, or no key at all."""
        return 0 in (*self.totals, self.q.shape[1])

    def bhsd(self, tensor: Tensor) -> Tensor:
        """(tokens, heads, head_dim) as a view (1, heads, tokens, head_dim)."""
        return tensor.transpose(0, 1)[None]

    def starts(self) -> tuple[list[int], list[int]]:
        """`cu_q` and `cu_k` on the host; of tensors on a GPU this waits for it.

        Raises:
            InvalidArgument: they are no such places; on the host that costs nothing to see.
            LaunchFailed: a CUDA graph is being captured, which allows no wait.
        """
        if self.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise LaunchFailed(
                "a CUDA graph is being captured and no kernel serves this call of packed sequences: torch's "
                "attention has to know on the host where they begin; make the call once before the capture, "
                "or call flashgen.warmup"
            )
        cu_q, cu_k = self.cu_q.tolist(), self.cu_k.tolist()
        _check_starts("q", cu_q, self.q.shape[0], self.max_q)
        _check_starts("k", cu_k, self.k.shape[0], self.max_k)
        return cu_q, cu_k

    def parts(self) -> list[Call]:
        """A dense call for each sequence; see `starts`."""
        cu_q, cu_k = self.starts()
        made = []
        for sequence in range(len(cu_q) - 1):
            of_q = slice(cu_q[sequence], cu_q[sequence + 1])
            of_k = slice(cu_k[sequence], cu_k[sequence + 1])
            tensors = (self.q[of_q][None], self.k[of_k][None], self.v[of_k][None])
            rules = (self.mask, self.score_mod, self.scale)
            call = Call(*tensors, *rules, "bshd", self.return_lse, sinks=self.sinks, sequence=sequence)
            made.append(replace(call, dropout=self.dropout))
        return made


def check_packed(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: Any,
    max_k: Any,
    mask: Any,
    score_mod: Any,
    scale: Any,
    return_lse: Any,
    sinks: Any = None,
    dropout: Dropout | None = None,
    values: bool = False,
) -> PackedCall:
    """Everything that can be wrong with a call; int64 places become int32.

    Args:
        dropout: as `checks.as_dropout` made it.
        values: look at places on a GPU, too, which waits for it; not while a CUDA graph is captured.

    Raises:
        InvalidArgument: names the argument, what was given and what is allowed.
    """
    check_return_lse(return_lse)
    check_packed_tensors(q, k, v)
    if q.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"q.device={q.device} has no values, or no kernels; packed sequences are computed on cuda or "
            "cpu: move all tensors there"
        )
    given_q, given_k = cu_q, cu_k
    cu_q, cu_k = (_as_starts(f"cu_seqlens_{x}", cu, q) for x, cu in (("q", cu_q), ("k", cu_k)))
    if cu_q.shape != cu_k.shape:
        raise InvalidArgument(
            f"cu_seqlens_q has {cu_q.shape[0]} entries and cu_seqlens_k {cu_k.shape[0]}: both have one "
            "more than there are sequences; one without keys, or without queries, has two equal entries"
        )
    max_q, max_k = (
        _as_enough(letter, given, cu_q.shape[0] - 1, tensor.shape[0])
        for letter, given, tensor in (("q", max_q, q), ("k", max_k, k))
    )
    call = PackedCall(
        q,
        k,
        v,
        as_mask(mask),
        as_score_mod(score_mod),
        as_scale(scale, q.shape[2]),
        "bshd",
        return_lse,
        sinks=packed_sinks(sinks, q),
        dropout=dropout,
        cu_q=cu_q,
        cu_k=cu_k,
        max_q=max_q,
        max_k=max_k,
    )
    check_operands(call)
    check_grids(call)
    on_host = q.device.type == "cpu"
    if on_host or (values and not (q.is_cuda and torch.cuda.is_current_stream_capturing())):
        # As given: an int64 of 2**32 more would become the same int32.
        starts_q, starts_k = _on_host("cu_seqlens_q", given_q), _on_host("cu_seqlens_k", given_k)
        _check_starts("q", starts_q, q.shape[0], max_q)
        _check_starts("k", starts_k, k.shape[0], max_k)
        _check_grids(call.mask, starts_q, starts_k)
    return call


def _check_grids(mask: Mask, starts_q: list[int], starts_k: list[int]) -> None:
    """Of each sequence that has keys."""
    if not masks.grids(mask.rule, mask.values):
        return
    lengths = ([end - start for start, end in pairwise(starts)] for starts in (starts_q, starts_k))
    for sequence, (q_len, k_len) in enumerate(zip(*lengths, strict=True)):
        if k_len:
            names = (f"q_len of sequence {sequence}", f"k_len of sequence {sequence}")
            masks.check_grids(mask.rule, mask.values, q_len, k_len, names)


def check_packed_tensors(q: Any, k: Any, v: Any) -> None:
    """What can be wrong with q, k and v alone; raises `InvalidArgument`."""
    check_tensors(q, k, v, 3, AXES)
    if q.dtype == E4M3:
        raise InvalidArgument(
            f"q.dtype={q.dtype} is not served packed, for kernels bring 8-bit values into another order by "
            "one length of all sequences; convert q, k and v to torch.bfloat16, multiplied by their factors"
        )
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    check_sizes((x.transpose(0, 1)[None].shape for x in (q, k, v)), f"{shapes} as {AXES}")


def packed_sinks(given: Any, q: Tensor) -> Tensor | None:
    """See `checks.as_sinks`; q is (tokens, heads, head_dim)."""
    return as_sinks(given, q[None], "bshd")


def _as_starts(name: str, given: Any, q: Tensor) -> Tensor:
    if not isinstance(given, Tensor):
        raise InvalidArgument(
            f"{name} must be an int32 tensor (sequences + 1,) on {q.device}, not {shown(given)}; "
            "give torch.tensor([0, *ends], dtype=torch.int32, device=q.device)"
        )
    if given.dtype not in (torch.int32, torch.int64) or given.dim() != 1 or given.shape[0] < 1:
        raise InvalidArgument(
            f"{name} is {shown(given)}; it must be int32 (or int64) of shape (sequences + 1,): where each "
            "sequence begins, and where the last one ends"
        )
    if given.device != q.device:
        raise InvalidArgument(f"{name}.device={given.device} must be that of q, {q.device}; move {name}")
    return given.to(torch.int32).contiguous()


def as_longest(given: Any, name: str = "max_seqlen") -> int:
    """The length of the longest sequence, or more.

    Raises:
        InvalidArgument: it is no int, or out of range, or a tensor whose value is not on the host.
    """
    if isinstance(given, Tensor) and given.device.type != "cpu":
        raise InvalidArgument(
            f"{name} is {shown(given)} on {given.device}, and reading it waits for the GPU; give an int, "
            "which may be more than the longest sequence has"
        )
    try:
        # A number of a trace's own has the type of an int, and may vary unless it is asked for its value.
        longest = given if type(given) is int else given.__index__()
    except (AttributeError, TypeError, RuntimeError, ValueError):
        raise _no_length(name, given) from None
    if isinstance(given, bool) or not 0 <= longest <= MAX_INDEX:
        raise _no_length(name, given)
    return int(longest)


def _no_length(name: str, given: object) -> InvalidArgument:
    return InvalidArgument(
        f"{name}={shown(given)} must be an int from 0 to {MAX_INDEX}: the longest sequence's length, or more"
    )


def _as_enough(letter: str, given: Any, sequences: int, tokens: int) -> int:
    name = f"max_seqlen_{letter}"
    longest = as_longest(given, name)
    if longest * sequences < tokens:
        raise InvalidArgument(
            f"{name}={longest} is too small: {sequences} sequences of so many hold {longest * sequences} "
            f"tokens, and {letter} has {tokens}; give the length of the longest, or more"
        )
    return longest


def _on_host(name: str, starts: Tensor) -> list[int]:
    try:
        found: list[int] = starts.tolist()
    except RuntimeError as error:  # of torch.vmap, which hides the values
        raise InvalidArgument(
            f"the entries of {name} cannot be read ({str(error).splitlines()[0]}); under torch.vmap all "
            "members share it: do not map over it"
        ) from None
    return found


def _check_starts(letter: str, starts: list[int], tokens: int, longest: int) -> None:
    name = f"cu_seqlens_{letter}"
    if starts[0] != 0:
        raise InvalidArgument(
            f"{name} begins with {starts[0]}; the first sequence begins at 0: give a 0 and then the running "
            "sum of the lengths"
        )
    if starts[-1] != tokens:
        raise InvalidArgument(
            f"{name} ends with {starts[-1]}, and {letter} has {tokens} tokens: the last sequence ends there; "
            f"cut {letter}, or count its rest as a sequence"
        )
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise InvalidArgument(
                f"{name} decreases from {start} to {end} at sequence {sequence}; each begins where the one "
                "before it ends, an empty one too: give a 0 and then the running sum of the lengths"
            )
        if end - start > longest:
            raise InvalidArgument(
                f"sequence {sequence} of {name} has {end - start} tokens, more than "
                f"max_seqlen_{letter}={longest}; give the length of the longest, or more"
            )
