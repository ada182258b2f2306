"""Attention in a few lines of torch: the meaning that every kernel is measured against.

`attention_reference` is the definition. `online_attention` is the recurrence that kernels use, written out
for people; it gives the same values whatever blocks the keys come in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.build.dropout import Dropout
from flashgen.build.precision import exact_product, without_autocast
from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec.learned import shares
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Bound
from flashgen.spec.score_mods import ScoreMod

CHUNK_SCORES = 2**27
"""Scores held at a time: half a gigabyte in float32, a few times over with the temporaries of a rule."""

E4M3_LIFT = 2.0**6
"""Before weights are rounded to 8 bits, kernels multiply them by this at least: small ones keep digits."""


# Rules on tensors


def _gather(table: Tensor, *indices: Tensor | int) -> Tensor:
    read = table[indices]
    if read.dtype not in (torch.float16, torch.bfloat16):
        return read
    # In float32, as in kernels. Of what learns the whole first: its gradient is summed in what is read.
    if table.requires_grad and torch.is_grad_enabled():
        return table.float()[indices]
    return read.float()


def on_device(value: Tensor | float, device: torch.device | None) -> Tensor:
    """A tensor as it is, or a number as a tensor of no dimension.

    Filled on the device: `torch.tensor` would copy from the host, which no capture of a CUDA graph allows.
    """
    # A float of no dimension keeps its digits, and takes the dtype of the tensor it meets.
    dtype = torch.float64 if isinstance(value, float) else None
    return value if isinstance(value, Tensor) else torch.full((), value, device=device, dtype=dtype)


def _on_tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` of tensors, given tensors and numbers."""

    def call(*args: Tensor | float) -> Tensor:
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
        return function(*(on_device(arg, device) for arg in args))

    return call


_NAMED = ("where", "exp", "exp2", "log", "log2", "sqrt", "tanh", "floor")
TORCH_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "[]": _gather,
    "~": _on_tensors(torch.logical_not),
    "min": _on_tensors(torch.minimum),
    "max": _on_tensors(torch.maximum),
    **{name: _on_tensors(getattr(torch, name)) for name in _NAMED},
}
"""How `expr.evaluate` computes on tensors what Python's operators do not."""


def evaluate_rule(bound: Bound, env: Mapping[str, Any]) -> Any:
    """The rule's expression with its own numbers and tensors, on tensors that broadcast.

    Args:
        env: the symbols; see `expr.SYMBOLS`.

    Raises:
        InvalidArgument: an operand has no tensor.
    """
    if any(tensor is None for tensor in bound.tensors):
        missing = ", ".join(operand.name for operand in bound.missing)
        raise InvalidArgument(f"{bound.describe()} has no tensor for {missing}; give it with bind()")
    return evaluate_in(bound, bound.rule.expr, env)


def evaluate_slope(bound: Bound, env: Mapping[str, Any]) -> Any:
    """The derivative of a score rule by the score, as `evaluate_rule` evaluates the rule."""
    return evaluate_in(bound, ex.derivative(bound.rule.expr), env)


def evaluate_in(bound: Bound, expr: ex.Expr, env: Mapping[str, Any]) -> Any:
    """Another expression with a rule's numbers and tensors, as `evaluate_rule` evaluates the rule."""
    names = [name for name, _ in bound.rule.params] + [operand.name for operand in bound.rule.operands]
    own = zip(names, (*bound.values, *bound.tensors), strict=True)
    return ex.evaluate(expr, {**env, **dict(own)}, TORCH_FUNCTIONS)


def add_where_read(into: Tensor, bound: Bound, load: ex.Load, env: Mapping[str, Any], values: Tensor) -> None:
    """Adds to each element of a tensor the values of all rows and keys for which a rule reads it.

    Args:
        into: of the shape of the operand that `load` reads.
        env: the symbols; see `evaluate_rule`.
        values: of the dtype of `into`, (batch, heads, rows, keys), or 1 along what was summed before.
    """
    read = [on_device(evaluate_in(bound, index, env), into.device) for index in load.indices]
    # First over the axes along which all read one element, so that it is added to once.
    extents = [(1, 1, 1, 1), *(index.shape for index in read)]
    shape = torch.broadcast_shapes(*extents)  # type: ignore[no-untyped-call]
    into.index_put_(tuple(index.expand(shape) for index in read), values.sum_to_size(shape), accumulate=True)


def symbols(
    rows: slice,
    keys: slice,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    k_len: int,
    device: torch.device,
    sequence: int = 0,
) -> dict[str, Tensor | int]:
    """The symbols of rules but `score`, to broadcast over (batch, heads, rows, keys).

    Args:
        sequence: what the first one of the batch counts as.
    """
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    return {
        "q_idx": torch.arange(rows.start, rows.stop, device=device).view(-1, 1),
        "k_idx": torch.arange(keys.start, keys.stop, device=device),
        "q_len": q_len,
        "k_len": k_len,
        "batch": torch.arange(sequence, sequence + batch, device=device).view(-1, 1, 1, 1),
        "head": head,
        "kv_head": head // (heads // kv_heads),
    }


def ruled(scores: Tensor, mask: Mask | None, score_mod: ScoreMod | None, env: Mapping[str, Any]) -> Tensor:
    """Scaled scores after the score rule and then the mask; -inf for what is not seen."""
    if score_mod is not None:
        changed = evaluate_rule(score_mod, {**env, "score": scores})
        scores = on_device(changed, scores.device).to(scores.dtype).expand_as(scores)
    if mask is None:
        return scores
    return scores.masked_fill(~on_device(evaluate_rule(mask, env), scores.device), -math.inf)


# The definition


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    round_p_to: torch.dtype | None = None,
    round_out_to: torch.dtype | None = None,
    lift: float = 1.0,
    sequence: int = 0,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact softmax attention, computed plainly, over as many query rows at a time as memory allows.

    It can be differentiated; a row that sees no key has gradients of zero.

    Args:
        q: (batch, heads, q_len, head_dim).
        k: (batch, kv_heads, k_len, head_dim); kv_heads divides heads, and each serves a group in order.
        v: (batch, kv_heads, k_len, head_dim_v).
        mask: keys that a query may see, applied after the score rule.
        score_mod: applied to scores in natural units, after the scale.
        scale: factor on the scores; 1 / sqrt(head_dim) if None.
        sinks: (heads,) logits, one more score for each row of a head: see `with_sink`.
        dtype: float32 or float64, of the computation and of both results.
        round_p_to: round where a kernel with inputs of this dtype rounds: the weights (exp2 of score minus
            row maximum) before they meet v, and the output. The normaliser sums the unrounded weights.
        round_out_to: what the output is rounded to, where that is another dtype.
        lift: weights are rounded at so many times their size; see `E4M3_LIFT`.
        sequence: what rules take the first one of the batch for.
        dropout: which weights are left out of the output, though not of the normaliser and the LSE.

    Returns:
        The output (batch, heads, q_len, head_dim_v) and the natural logarithm of the sum of exponentials
        (batch, heads, q_len). A row that sees no key has output 0 and logarithm -inf, or its sink.

    Raises:
        InvalidArgument: shapes do not go together, or an operand of a rule is missing.
    """
    problem = _Problem.of(q, k, v, mask, score_mod, scale, dtype, sequence)
    keys = slice(0, problem.k_len)
    outputs, lses = [], []
    with without_autocast(q.device.type):
        for rows in _chunks(problem):
            scores = with_sink(problem.scores(rows, keys), sinks)
            maximum = row_maximum(scores)
            weights = torch.exp2((scores - maximum) * math.log2(math.e))
            normaliser = weights.sum(-1, keepdim=True)
            weights = weights[..., : problem.k_len]
            if round_p_to is not None:
                weights = (weights * lift).to(round_p_to).to(dtype) / lift
            weights = problem.dropped(weights, dropout, rows)
            output, lse = finished(maximum, normaliser, problem.weighted_values(weights, keys))
            outputs.append(output)
            lses.append(lse)
    output = torch.cat(outputs, 2)
    rounded = round_out_to or round_p_to
    return output if rounded is None else output.to(rounded).to(dtype), torch.cat(lses, 2)


def gradients_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    out: Tensor | None = None,
    mask: Mask | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    round_to: torch.dtype | None = None,
    sequence: int = 0,
    learned: Sequence[int] = (),
    dropout: Dropout | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of `attention_reference`, written out as kernels compute them.

    With p a weight, dp = dout . v its gradient and delta = sum(p * dp) - dlse over a row, the gradient of a
    score is p * (dp - delta), times the slope of the score rule (Dao et al. 2022, FlashAttention, appendix
    B.2; the LSE's gradient by d lse / d score = p). A dropped weight's own gradient dp is 0.

    Args:
        q, k, v, mask, score_mod, scale, sinks, dtype, sequence, dropout: as for `attention_reference`.
        dout: the gradient of the output, of its shape.
        dlse: that of the LSE, (batch, heads, q_len).
        out: the output that the forward left, of which delta is taken, as kernels do; by default computed
            here.
        round_to: round where a kernel with inputs of this dtype rounds: the output, and weights and gradients
            of scores before they are multiplied, and the results.
        learned: places of the score rule's tensors whose gradients are wanted too; floats.

    Returns:
        dq, dk, dv in `dtype`, then those of the rule's tensors, not rounded. Rows that see no key have
        gradients of zero and give none.
    """
    problem = _Problem.of(q, k, v, mask, score_mod, scale, dtype, sequence)
    keys, heads = slice(0, problem.k_len), q.shape[1]

    def rounded(tensor: Tensor) -> Tensor:
        return tensor if round_to is None else tensor.to(round_to).to(dtype)

    def of_each_head(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(heads // tensor.shape[1], 1)

    def of_each_group(tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.shape[0], k.shape[1], heads // k.shape[1], *tensor.shape[2:]).sum(2)

    every_q, every_k, every_v = problem.q.flatten(1, 2), of_each_head(problem.k), of_each_head(problem.v)
    dq, dk, dv = (torch.zeros_like(each) for each in (every_q, problem.k, problem.v))
    of_rule: dict[str, Tensor] = {}
    if learned and score_mod is not None:
        of_rule = {
            score_mod.rule.operands[place].name: torch.zeros_like(score_mod.tensors[place], dtype=dtype)
            for place in learned
        }
    with without_autocast(q.device.type):
        for rows in _chunks(problem):
            env, scaled = problem.symbols(rows, keys), problem.scaled(rows, keys)
            scores = ruled(scaled, mask, score_mod, env)
            seen = with_sink(scores, sinks).logsumexp(-1, keepdim=True)
            none = seen == -math.inf
            weights = torch.exp(scores - seen.masked_fill(none, 0.0))
            given = dout[:, :, rows].to(dtype)
            brought = problem.dropped(rounded(weights), dropout, rows)
            left = rounded(exact_product(brought, every_v)) if out is None else out[:, :, rows].to(dtype)
            delta = (given * left).sum(-1, keepdim=True)
            if dlse is not None:
                delta = delta - dlse[:, :, rows, None].to(dtype)
            delta = delta.masked_fill(none, 0.0)
            of_weights = problem.dropped(exact_product(given, every_v.transpose(2, 3)), dropout, rows)
            of_scores = weights * (of_weights - delta)
            if score_mod is not None:
                for share in shares(score_mod.rule, tuple(of_rule)):
                    slope = on_device(
                        evaluate_in(score_mod, share.slope, {**env, "score": scaled}), q.device
                    ).to(dtype)
                    values = (of_scores * slope).masked_fill(scores == -math.inf, 0.0)
                    add_where_read(of_rule[share.operand], score_mod, share.load, env, values)
                slope = on_device(evaluate_slope(score_mod, {**env, "score": scaled}), q.device).to(dtype)
                of_scores = (of_scores * slope).masked_fill(scores == -math.inf, 0.0)
            of_scores = rounded(of_scores)
            dq[:, :, rows] = exact_product(of_scores, every_k) * problem.scale
            dk += of_each_group(exact_product(of_scores.transpose(2, 3), every_q[:, :, rows])) * problem.scale
            dv += of_each_group(exact_product(brought.transpose(2, 3), given))
    return rounded(dq), rounded(dk), rounded(dv), *of_rule.values()


def packed_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Sequence[int], cu_k: Sequence[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """`attention_reference` of each of several packed sequences.

    Args:
        q: (q tokens, heads, head_dim), one sequence behind the other.
        k, v: (k tokens, kv_heads, head_dim) and (..., head_dim_v).
        cu_q, cu_k: where each sequence begins among the queries, or the keys, and where the last one ends.
        options: further arguments of `attention_reference`.

    Returns:
        The output (q tokens, heads, head_dim_v), and the natural LSE (heads, q tokens).
    """
    outputs, lses = [], []
    for sequence, (of_q, of_k) in enumerate(packed_slices(cu_q, cu_k)):
        parts = (each.transpose(0, 1)[None] for each in (q[of_q], k[of_k], v[of_k]))
        out, lse = attention_reference(*parts, sequence=sequence, **options)
        outputs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outputs), torch.cat(lses, 1)


def packed_gradients_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    *,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradients_reference` of each of several packed sequences.

    Args:
        q, k, v, cu_q, cu_k: as for `packed_reference`.
        dout: (q tokens, heads, head_dim_v).
        dlse: (heads, q tokens).
        out: the output that the forward left, of the shape of dout.
        options: further arguments of `gradients_reference`.

    Returns:
        dq, dk, dv of the shapes of q, k and v.
    """
    made = []
    for sequence, (of_q, of_k) in enumerate(packed_slices(cu_q, cu_k)):
        of_lse = None if dlse is None else dlse[None, :, of_q]
        options["out"] = None if out is None else out[of_q].transpose(0, 1)[None]
        own_q, own_k, own_v, own_dout = (
            each.transpose(0, 1)[None] for each in (q[of_q], k[of_k], v[of_k], dout[of_q])
        )
        made.append(gradients_reference(own_q, own_k, own_v, own_dout, of_lse, sequence=sequence, **options))
    dq, dk, dv = (torch.cat(each, 2)[0].transpose(0, 1) for each in zip(*made, strict=True))
    return dq, dk, dv


def packed_slices(cu_q: Sequence[int], cu_k: Sequence[int]) -> list[tuple[slice, slice]]:
    """The rows of q and those of k and v, of each sequence."""
    of_q, of_k = ([slice(*ends) for ends in itertools.pairwise(each)] for each in (cu_q, cu_k))
    return list(zip(of_q, of_k, strict=True))


@dataclass(frozen=True, slots=True)
class _Problem:
    """The inputs of one attention, in the precision of the computation, with heads grouped by key head."""

    q: Tensor
    """(batch, kv_heads, group, q_len, head_dim)"""
    k: Tensor
    v: Tensor
    mask: Mask | None
    score_mod: ScoreMod | None
    scale: float
    sequence: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        score_mod: ScoreMod | None,
        scale: float | None,
        dtype: torch.dtype,
        sequence: int = 0,
    ) -> _Problem:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.dim() == k.dim() == v.dim() == 4:
            raise InvalidArgument(f"q, k and v are (batch, heads, rows, head_dim), not {shapes}")
        if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise InvalidArgument(
                f"q and k share batch and head_dim, k and v share batch, heads and rows; not {shapes}"
            )
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise InvalidArgument(f"the heads of k and v must divide those of q; not {shapes}")
        if dtype not in (torch.float32, torch.float64):
            raise InvalidArgument(f"{dtype=} must be torch.float32 or torch.float64")
        if scale is None:
            scale = 1 / math.sqrt(q.shape[3])
        batch, heads, q_len, head_dim = q.shape
        grouped = q.to(dtype).reshape(batch, k.shape[1], heads // k.shape[1], q_len, head_dim)
        return cls(grouped, k.to(dtype), v.to(dtype), mask, score_mod, scale, sequence)

    @property
    def q_len(self) -> int:
        return self.q.shape[3]

    @property
    def k_len(self) -> int:
        return self.k.shape[2]

    def scores(self, rows: slice, keys: slice) -> Tensor:
        """Scores (batch, heads, rows, keys) after scale, score rule and mask; -inf for what is not seen."""
        return ruled(self.scaled(rows, keys), self.mask, self.score_mod, self.symbols(rows, keys))

    def scaled(self, rows: slice, keys: slice) -> Tensor:
        """Scores (batch, heads, rows, keys) in natural units, before any rule."""
        batch, kv_heads, group = self.q.shape[:3]
        shape = (batch, kv_heads * group, rows.stop - rows.start, keys.stop - keys.start)
        # The group joins the rows, so that no copy of the keys is made for each head of a group.
        products = exact_product(self.q[:, :, :, rows].flatten(2, 3), self.k[:, :, keys].transpose(2, 3))
        return products.reshape(shape) * self.scale

    def symbols(self, rows: slice, keys: slice) -> dict[str, Tensor | int]:
        """The symbols of rules for some rows and keys."""
        batch, kv_heads, group = self.q.shape[:3]
        return symbols(
            rows,
            keys,
            batch=batch,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            q_len=self.q_len,
            k_len=self.k_len,
            device=self.q.device,
            sequence=self.sequence,
        )

    def dropped(self, weights: Tensor, dropout: Dropout | None, rows: slice) -> Tensor:
        """Weights of some rows and all keys, or gradients of these, after dropout if there is any."""
        return weights if dropout is None else dropout.applied(weights, rows, self.sequence)

    def weighted_values(self, weights: Tensor, keys: slice) -> Tensor:
        """weights @ v with each head's own values; (batch, heads, rows, head_dim_v)."""
        batch, heads, rows, n_keys = weights.shape
        kv_heads, head_dim_v = self.v.shape[1], self.v.shape[3]
        by_group = weights.reshape(batch, kv_heads, heads // kv_heads * rows, n_keys)
        product = exact_product(by_group, self.v[:, :, keys])
        return product.reshape(batch, heads, rows, head_dim_v)


def with_sink(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Scores (batch, heads, rows, keys) with each head's sink behind the keys: a logit that takes part in the
    softmax and has no value (Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks,
    section 3.1, where the logit is learned). The same scores if there are none.
    """
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1)


def row_maximum(scores: Tensor) -> Tensor:
    """The largest score of each row, 0 for a row of none: subtracting it leaves -inf alone, never NaN."""
    if scores.shape[-1] == 0:
        return scores.new_zeros((*scores.shape[:-1], 1))
    maximum = scores.detach().amax(-1, keepdim=True)
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def finished(maximum: Tensor, normaliser: Tensor, accumulator: Tensor) -> tuple[Tensor, Tensor]:
    """Output and natural LSE from the sums over all keys; of a row that sees none 0 and -inf, without a NaN
    in the gradient either.
    """
    # Filled, not selected by torch.where: that copies its number from the host, see `on_device`.
    seen = normaliser != 0  # not `> 0`: NaN is the sum of scores that are NaN or infinite, and must be told
    # Divide by 1 where nothing was seen: 0 / 0 would come back as NaN in the gradient, whatever is selected.
    divisor = normaliser.masked_fill(~seen, 1.0)
    lse = (maximum + torch.log(divisor)).masked_fill(~seen, -math.inf)
    return accumulator / divisor, lse.squeeze(-1)


def _chunks(problem: _Problem) -> Iterator[slice]:
    """Slices of query rows whose scores are at most `CHUNK_SCORES`, or single rows."""
    batch, kv_heads, group = problem.q.shape[:3]
    per_row = batch * kv_heads * group * problem.k_len
    step = max(1, CHUNK_SCORES // max(1, per_row))
    # One empty slice for no queries, so that there is something to concatenate.
    for start in range(0, max(1, problem.q_len), step):
        yield slice(start, min(start + step, problem.q_len))


# The recurrence


@dataclass(frozen=True, slots=True)
class OnlineState:
    """What the keys seen so far say about each row; a row that has seen none has maximum -inf."""

    maximum: Tensor
    """Largest score, (batch, heads, q_len, 1)."""
    normaliser: Tensor
    """Sum of exp(score - maximum), of the same shape."""
    accumulator: Tensor
    """Sum of exp(score - maximum) * value, (batch, heads, q_len, head_dim_v)."""


def rescaled(state: OnlineState, maximum: Tensor) -> OnlineState:
    """The same sums relative to a larger maximum: both of them, by the same factor."""
    # A row that has seen no key has sums of 0, and a maximum of -inf that must not become inf - inf.
    factor = torch.where(state.maximum == -math.inf, 0.0, torch.exp(state.maximum - maximum))
    return OnlineState(maximum, state.normaliser * factor, state.accumulator * factor)


def online_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    splits: Sequence[int],
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention by blocks of keys, keeping only a maximum, a normaliser and an accumulator for each row.

    Args:
        splits: rising positions at which a new block of keys begins; empty for one block.

    The other arguments, the results and errors are those of `attention_reference`.
    """
    problem = _Problem.of(q, k, v, mask, score_mod, scale, dtype)
    edges = [0, *splits, problem.k_len]
    if sorted(edges) != edges:
        raise InvalidArgument(f"{splits=} must rise within 0 and k_len={problem.k_len}")
    rows = (q.shape[0], q.shape[1], q.shape[2])
    zeros = q.new_zeros((*rows, 1), dtype=dtype)
    state = OnlineState(zeros - math.inf, zeros, q.new_zeros((*rows, v.shape[3]), dtype=dtype))
    with without_autocast(q.device.type):
        for start, stop in itertools.pairwise(edges):
            if start == stop:
                continue
            scores = problem.scores(slice(0, problem.q_len), slice(start, stop))
            maximum = torch.maximum(state.maximum, scores.amax(-1, keepdim=True))
            seen_none = maximum == -math.inf
            weights = torch.exp(scores - torch.where(seen_none, 0.0, maximum))
            state = rescaled(state, maximum)
            state = OnlineState(
                maximum,
                state.normaliser + weights.sum(-1, keepdim=True),
                state.accumulator + problem.weighted_values(weights, slice(start, stop)),
            )
    return finished(
        torch.where(state.maximum == -math.inf, 0.0, state.maximum), state.normaliser, state.accumulator
    )
