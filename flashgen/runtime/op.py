"""The operators as which calls stand in graphs that torch traces: `flashgen::attention_fwd` and its gradients
`flashgen::attention_bwd`, `flashgen::attention_varlen_fwd` and `flashgen::attention_varlen_bwd` of packed
sequences.

An eager call does not go through them: an operator's machinery costs 14-22 us. Both end in one function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashgen.build.dropout import Dropout
from flashgen.build.quantized import E4M3, Quantized
from flashgen.errors import InvalidArgument, Unsupported
from flashgen.runtime import torch_path
from flashgen.runtime.checks import (
    Call,
    Given,
    as_mask,
    as_scale,
    as_score_mod,
    check,
    check_dense,
    transformed,
)
from flashgen.runtime.gradients import SECOND
from flashgen.runtime.packed import as_longest, check_packed, check_packed_tensors, packed_sinks
from flashgen.spec.masks import Mask
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import ScoreMod

LIMITS = {"i32": (-(2.0**31), 2.0**31 - 1), "f32": (-(2 - 2.0**-23) * 2.0**127, (2 - 2.0**-23) * 2.0**127)}
"""The least and the largest number of each type of a rule's parameters."""

NAME, NAME_GRADIENTS = "flashgen::attention_fwd", "flashgen::attention_bwd"
NAME_PACKED, NAME_PACKED_GRADIENTS = "flashgen::attention_varlen_fwd", "flashgen::attention_varlen_bwd"

Serve = Callable[[Tensor, Tensor, Tensor, Any, Any, Any, str, bool, Given | None], Any]
ServePacked = Callable[..., Any]
ServeGradients = Callable[
    [Call, Tensor, Tensor, Tensor, Tensor | None, bool, tuple[int, ...]], Iterable[Tensor | None]
]


def define(serve: Serve, serve_gradients: ServeGradients) -> Any:
    """Registers the operator around `serve(q, k, v, mask, score_mod, scale, layout, return_lse, given)`, and
    its gradients around `serve_gradients(call, out, lse, dout, dlse, of_sinks, learned)`, which is as
    `Dispatcher.gradients`.

    Rules travel as text with their numbers and tensors beside them, so a graph can be saved and read back.
    The seed of dropout is one of the tensors, drawn by the graph itself, and None without dropout;
    `deterministic` says whether gradients have to have the same bits in every run. The second result is the
    LSE, without elements if it is not wanted; the backward pass reads it. There are gradients of q, k and v,
    the sinks and what the score rule reads; of 8-bit tensors there are none.
    """

    def attention_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        operands: Sequence[Tensor],
        mask: str,
        mask_name: str,
        score_mod: str,
        score_mod_name: str,
        values: Sequence[float],
        scale: float,
        layout: str,
        return_lse: bool,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        v_factor: float = 1.0,
        out_dtype: torch.dtype | None = None,
        sinks: Tensor | None = None,
        seed: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor]:
        _check_untransformed(NAME, "flashgen.attention")
        rules = _rules(operands, mask, mask_name, score_mod, score_mod_name, values)
        told = (q_descale, k_descale, v_descale, v_factor, out_dtype, sinks, seed, dropout_p)
        given = _given(q, *told)
        result = serve(q, k, v, *rules, scale, layout, return_lse, given)
        return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))

    def meta(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        operands: Sequence[Tensor],
        mask: str,
        mask_name: str,
        score_mod: str,
        score_mod_name: str,
        values: Sequence[float],
        scale: float,
        layout: str,
        return_lse: bool,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        v_factor: float = 1.0,
        out_dtype: torch.dtype | None = None,
        sinks: Tensor | None = None,
        seed: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor]:
        rules = _rules(operands, mask, mask_name, score_mod, score_mod_name, values)
        told = (q_descale, k_descale, v_descale, v_factor, out_dtype, sinks, seed, dropout_p)
        given = _given(q, *told)
        call = check(q, k, v, *rules, None, layout, return_lse, given)
        out = torch_path.empty_output(q, layout, v.shape[3], call.out_dtype)
        rows = call.bhsd(q).shape[:3] if return_lse else (0,)
        return out, q.new_empty(rows, dtype=torch.float32)

    def attention_bwd(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: str,
        operands: Sequence[Tensor],
        mask: str,
        mask_name: str,
        score_mod: str,
        score_mod_name: str,
        values: Sequence[float],
        scale: float,
        sinks: Tensor | None = None,
        seed: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        of_sinks: bool = False,
        learned: Sequence[int] | None = None,
    ) -> list[Tensor]:
        rules = _rules(operands, mask, mask_name, score_mod, score_mod_name, values)
        given = Given(sinks=sinks, dropout=_dropped(seed, dropout_p))
        call = check(q, k, v, *rules, scale, layout, True, given)
        call = replace(call, deterministic=deterministic)
        return _present(serve_gradients(call, out, lse, dout, dlse, of_sinks, tuple(learned or ())))

    _register_gradients(NAME_GRADIENTS, attention_bwd)
    _register_differentiable(NAME, attention_fwd, meta, NAME_GRADIENTS, "flashgen.attention")
    return torch.ops.flashgen.attention_fwd.default


def define_packed(serve: ServePacked, serve_gradients: ServeGradients) -> Any:
    """The same of packed sequences, around `serve(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, mask, score_mod, scale, return_lse, sinks, dropout)`.

    Nothing in a graph depends on where sequences begin; how many tokens and sequences there are and how long
    they may be are sizes of the graph, which torch lets vary.
    """

    def attention_varlen_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        operands: Sequence[Tensor],
        mask: str,
        mask_name: str,
        score_mod: str,
        score_mod_name: str,
        values: Sequence[float],
        scale: float,
        return_lse: bool,
        sinks: Tensor | None = None,
        seed: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor]:
        _check_untransformed(NAME_PACKED, "flashgen.attention_varlen")
        rules = _rules(operands, mask, mask_name, score_mod, score_mod_name, values)
        places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        result = serve(q, k, v, *places, *rules, scale, return_lse, sinks, _dropped(seed, dropout_p))
        return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))

    def meta(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        operands: Sequence[Tensor],
        mask: str,
        mask_name: str,
        score_mod: str,
        score_mod_name: str,
        values: Sequence[float],
        scale: float,
        return_lse: bool,
        sinks: Tensor | None = None,
        seed: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor]:
        _rules(operands, mask, mask_name, score_mod, score_mod_name, values)
        # Not the places and the longest lengths: comparing these would tie the graph to a call's numbers.
        check_packed_tensors(q, k, v)
        packed_sinks(sinks, q)
        out = torch_path.empty_output(q, "bshd", v.shape[2])
        rows = (q.shape[1], q.shape[0]) if return_lse else (0,)
        return out, q.new_empty(rows, dtype=torch.float32)

    def attention_varlen_bwd(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        operands: Sequence[Tensor],
        mask: str,
        mask_name: str,
        score_mod: str,
        score_mod_name: str,
        values: Sequence[float],
        scale: float,
        sinks: Tensor | None = None,
        seed: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        of_sinks: bool = False,
        learned: Sequence[int] | None = None,
    ) -> list[Tensor]:
        rules = _rules(operands, mask, mask_name, score_mod, score_mod_name, values)
        places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        call = check_packed(q, k, v, *places, *rules, scale, True, sinks, _dropped(seed, dropout_p))
        call = replace(call, deterministic=deterministic)
        return _present(serve_gradients(call, out, lse, dout, dlse, of_sinks, tuple(learned or ())))

    _register_gradients(NAME_PACKED_GRADIENTS, attention_varlen_bwd)
    instead = "flashgen.attention_varlen"
    _register_differentiable(NAME_PACKED, attention_varlen_fwd, meta, NAME_PACKED_GRADIENTS, instead)
    return torch.ops.flashgen.attention_varlen_fwd.default


# What both kinds have in common


def _present(found: Iterable[Tensor | None]) -> list[Tensor]:
    return [each for each in found if each is not None]


def _before_score_mod(mask: str) -> int:
    """How many operands the mask has, behind which those of the score rule stand."""
    return len(Rule.parse("mask", mask).operands)


def _register_gradients(name: str, operator: Callable[..., list[Tensor]]) -> None:
    """Registers an operator that gives the gradients of q, k and v, then that of the sinks if it is wanted,
    then of tensors of the score rule. The first three lie in memory as their tensors do, the others without
    gaps."""
    signature = inspect.signature(operator)

    def meta(*given: Any, **named: Any) -> list[Tensor]:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        told = bound.arguments
        of_rule = told["operands"][_before_score_mod(told["mask"]) :]
        others = [told["sinks"]] if told["of_sinks"] else []
        others += [of_rule[place] for place in told["learned"] or ()]
        alike = [torch.empty_like(told[name]) for name in ("q", "k", "v")]
        return alike + [each.new_empty(each.shape) for each in others]

    def backward(*_: Any) -> None:
        raise Unsupported(SECOND)

    _register(name, operator, meta, backward)


def _register_differentiable(
    name: str, operator: Callable[..., Any], meta: Callable[..., Any], of_gradients: str, instead: str
) -> None:
    """Registers an operator whose gradients another gives, which is told the same by the same names.

    Args:
        of_gradients: the other's name, registered before.
        instead: the function to call where the operator has no gradient.
    """
    names = tuple(inspect.signature(operator).parameters)
    compute = getattr(torch.ops.flashgen, of_gradients.removeprefix("flashgen::")).default
    shared = {argument.name for argument in compute._schema.arguments} - {"operands"}

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        given = dict(zip(names, inputs, strict=True))
        if given["q"].dtype == E4M3:
            raise InvalidArgument(
                f"the operator {name} has no gradients of 8-bit tensors; call {instead}, which is computed "
                "by torch's own operations where they are needed"
            )
        if not given["return_lse"]:
            raise InvalidArgument(
                f"the operator {name} was called without its LSE, from which gradients are computed; call it "
                f"with return_lse=True, or call {instead}, which asks for it where it is needed"
            )
        tensors = {at: given[at] for at in names if at in shared and isinstance(given[at], Tensor)}
        ctx.save_for_backward(*output, *tensors.values(), *given["operands"])
        ctx.tensors = tuple(tensors)
        ctx.told = {at: given[at] for at in names if at in shared and at not in tensors}
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        needed = dict(zip(names, ctx.needs_input_grad, strict=False))  # nothing of what was left out
        # None, in the structure that torch wants: a list of tensors is one, also an empty list.
        found: dict[str, Any] = {
            at: [None] * len(each) if isinstance(each, list) else None for at, each in needed.items()
        }
        if dout is None and dlse is None:
            return tuple(found.values())
        out, lse, *saved = ctx.saved_tensors
        tensors = dict(zip(ctx.tensors, saved, strict=False))
        operands, first = saved[len(tensors) :], _before_score_mod(ctx.told["mask"])
        of_sinks = bool(needed.get("sinks"))
        learned = [place for place, each in enumerate(needed["operands"][first:]) if each]
        dout = torch.zeros_like(out) if dout is None else dout
        told = {**tensors, **ctx.told, "out": out, "lse": lse, "operands": operands}
        made = iter(compute(dout, dlse, **told, of_sinks=of_sinks, learned=learned))
        found |= {at: next(made) for at in ("q", "k", "v", *(("sinks",) if of_sinks else ()))}
        for place in learned:
            found["operands"][first + place] = next(made)
        return tuple(found.values())

    _register(name, operator, meta, backward, setup_context)


def _register(
    name: str,
    operator: Callable[..., Any],
    meta: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
) -> None:
    # Not by `custom_op`, which asks `inspect` where the fake stands: 900 calls to the file system, 6 ms of an
    # import on a local disk.
    schema = torch.library.infer_schema(operator, mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", operator)
    torch.library.impl(name, "meta", meta)
    torch.library.register_autograd(name, backward, setup_context=setup_context)


def _check_untransformed(name: str, instead: str) -> None:
    if transformed():
        raise InvalidArgument(
            f"the operator {name} has no forward-mode derivative and no vmap; call {instead}, which is "
            "computed by torch's own operations there"
        )


def traced(
    op: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    score_mod: Any,
    scale: Any,
    layout: str,
    return_lse: bool,
    given: Given | None = None,
    deterministic: bool = False,
) -> Any:
    """A call as the operator, in terms that torch can trace."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)  # of which some never come to the operator
    mask, score_mod = as_mask(mask), as_score_mod(score_mod)
    scale, of_quantized = as_scale(scale, q.shape[3]), ()
    if given is not None or q.dtype == E4M3:
        call = check(q, k, v, mask, score_mod, scale, layout, return_lse, given)
        if call.quantized is not None:
            scale, of_quantized = call.folded_scale, _tensors_and_factor(call.quantized)
    out, lse = op(
        q,
        k,
        v,
        *_told(mask, score_mod),
        scale,
        layout,
        return_lse,
        *of_quantized,
        **({} if given is None or given.sinks is None else {"sinks": given.sinks}),
        **({} if given is None else _seed_and_probability(given.dropout)),
        **({"deterministic": True} if deterministic else {}),
    )
    return (out, lse) if return_lse else out


def traced_packed(
    op: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    mask: Any,
    score_mod: Any,
    scale: Any,
    return_lse: bool,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    deterministic: bool = False,
) -> Any:
    """The same of packed sequences; `op` is what `define_packed` gives."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)  # of which some never come to the operator
    longest = (
        as_longest(given, name)
        for name, given in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    )
    rules = _told(as_mask(mask), as_score_mod(score_mod))
    places = (cu_seqlens_q, cu_seqlens_k, *longest)
    scale, named = as_scale(scale, q.shape[2]), _seed_and_probability(dropout)
    named |= {"deterministic": True} if deterministic else {}
    out, lse = op(q, k, v, *places, *rules, scale, return_lse, sinks, **named)
    return (out, lse) if return_lse else out


def _told(mask: Mask, score_mod: ScoreMod | None) -> tuple[Any, ...]:
    """Rules as an operator is told them: operands, each rule's text and name, values."""
    values, operands, text, name = mask.values, mask.tensors, "", ""
    if score_mod is not None:
        values, operands = values + score_mod.values, operands + score_mod.tensors
        text, name = score_mod.rule.text, score_mod.rule.name
    numbers = [float(value) for value in values]
    return list(operands), mask.rule.text, mask.rule.name, text, name, numbers


def _tensors_and_factor(quantized: Quantized) -> tuple[Any, ...]:
    """What the operator is told of 8-bit tensors; the numbers of q and k are in the scale."""
    factors = (quantized.q, quantized.k, quantized.v)
    tensors = (each if isinstance(each, Tensor) else None for each in factors)
    return (*tensors, 1.0 if isinstance(quantized.v, Tensor) else quantized.v, quantized.out_dtype)


def _given(q: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
           v_factor: float, out_dtype: torch.dtype | None, sinks: Tensor | None,
           seed: Tensor | None, dropout_p: float) -> Given | None:  # fmt: skip
    """The inverse of it."""
    dropout = _dropped(seed, dropout_p)
    if q.dtype != E4M3:
        return None if sinks is None and dropout is None else Given(sinks=sinks, dropout=dropout)
    of_v = v_factor if v_descale is None else v_descale
    return Given(q_descale, k_descale, of_v, out_dtype, sinks, dropout)


def _seed_and_probability(dropout: Dropout | None) -> dict[str, Any]:
    """What an operator is told of dropout."""
    return {} if dropout is None else {"seed": dropout.seed, "dropout_p": dropout.probability}


def _dropped(seed: Tensor | None, dropout_p: float) -> Dropout | None:
    """The inverse of it."""
    return None if seed is None else Dropout(dropout_p, seed)


def _rules(
    operands: Sequence[Tensor],
    mask: str,
    mask_name: str,
    score_mod: str,
    score_name: str,
    values: Sequence[float],
) -> tuple[Mask, ScoreMod | None]:
    """The inverse of `_told`.

    Raises:
        InvalidArgument: values or operands are too few, too many, or not of the rules' types.
    """
    mask_rule = Rule.parse("mask", mask, name=mask_name)
    rule = Rule.parse("score", score_mod, name=score_name) if score_mod else None
    rules = [mask_rule] if rule is None else [mask_rule, rule]
    params = [param for each in rules for param in each.params]
    wanted = [operand.name for each in rules for operand in each.operands]
    for what, given, names in (
        ("values", values, [name for name, _ in params]),
        ("operands", operands, wanted),
    ):
        if len(given) != len(names):
            listed = ", ".join(names) or "none"
            raise InvalidArgument(f"{what} has {len(given)} entries, the rules take {len(names)} ({listed})")
    numbers = tuple(_number(*param, value) for param, value in zip(params, values, strict=True))
    n_values, n_operands = len(mask_rule.params), len(mask_rule.operands)
    bound = Mask(mask_rule, numbers[:n_values], tuple(operands[:n_operands]))
    if rule is None:
        return bound, None
    return bound, ScoreMod(rule, numbers[n_values:], tuple(operands[n_operands:]))


def _number(name: str, type_: str, value: float) -> int | float:
    least, most = LIMITS[type_]
    if not least <= value <= most or (type_ == "i32" and value != int(value)):
        kind = "a whole number" if type_ == "i32" else "a number"
        raise InvalidArgument(f"values: {name}={value} must be {kind} from {least:.10g} to {most:.10g}")
    return int(value) if type_ == "i32" else value
