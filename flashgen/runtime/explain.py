"""What would run for a call, and why everything else would not: `flashgen explain`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flashgen.runtime import torch_path
from flashgen.runtime.checks import DTYPE_NAMES, Call, Sizes
from flashgen.runtime.policy import TORCH, Decision, Policy, Request, Step
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.masks import Mask
from flashgen.spec.score_mods import ScoreMod
from flashgen.spec.target import Target


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would run for a call, and why everything else would not. `str()` of it is for people."""

    subject: str
    """The call in words."""
    where: str
    """The GPU, or the device."""
    runs: str
    """The config's name, or what else."""
    steps: tuple[Step, ...]
    family: str = TORCH
    """The family of the kernel, or `torch`."""
    gradients: str = ""
    """The family of the kernels of gradients, or `torch`, where a call needs any and a kernel serves it."""

    @classmethod
    def of_torch(cls, subject: str, where: str, runs: str, why: str) -> Explanation:
        """A call that is decided before any kernel is looked for."""
        return cls(subject, where, runs, (Step(TORCH, runs, "accepted", why),))

    @classmethod
    def of_nothing(cls, subject: str, where: str) -> Explanation:
        """A call without keys, or without an output element: its result is filled in."""
        return cls(subject, where, "nothing: no key or no output", ())

    def with_gradients(self, of: Explanation) -> Explanation:
        """The same with what the backward call runs, and its steps behind these."""
        steps = (replace(step, source=f"gradients: {step.source}") for step in of.steps)
        runs = f"{self.runs}, and for its gradients {of.runs}"
        return replace(self, runs=runs, steps=(*self.steps, *steps), gradients=of.family)

    def __repr__(self) -> str:
        return f"<Explanation: runs {self.runs} on {self.where}; print it for the steps>"

    def __str__(self) -> str:
        marks = {"accepted": "+", "rejected": "-", "not reached": " "}
        wide = max((len(step.source) for step in self.steps), default=0)
        lines = [self.subject, f"on {self.where}", f"runs {self.runs}", ""]
        for step in self.steps:
            reached = step.verdict != "not reached"
            told = ": ".join(part for part in (step.choice, step.reason) if part) if reached else step.verdict
            first, *rest = told.splitlines() or [""]
            lines.append(f"  {marks[step.verdict]} {step.source:<{wide}}  {first}")
            lines += [" " * (wide + 6) + line.strip() for line in rest]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "subject": self.subject,
            "where": self.where,
            "runs": self.runs,
            "family": self.family,
            **({"gradients": self.gradients} if self.gradients else {}),
            "steps": [step.to_json() for step in self.steps],
        }


def explained(request: Request, decision: Decision, subject: str = "", otherwise: str = TORCH) -> Explanation:
    """A decision in words.

    Args:
        subject: the call, if there is one.
        otherwise: what runs where no kernel serves.
    """
    workload, target = request.workload, request.target
    return Explanation(
        subject or describe_workload(workload),
        f"{target.describe()}, {describe_facts(request.facts, target)}",
        decision.config.name if decision.config else otherwise,
        decision.steps,
        decision.config.family if decision.config else TORCH,
    )


def explain_workload(policy: Policy, workload: Workload, target: Target, facts: CallFacts) -> Explanation:
    """What a workload would run on a target, judged without a GPU: nothing is compiled or loaded."""
    if workload.empty:
        return Explanation.of_nothing(describe_workload(workload), target.describe())
    request = Request(workload, facts, target)
    return explained(request, policy.decide(request, loading=False))


def describe_facts(facts: CallFacts, target: Target) -> str:
    """In words: `aligned tensors, tma`; where a GPU has no descriptors, nothing is said of them."""
    words = (("tma", facts.tma and target.has_tma), ("64-bit offsets", facts.wide))
    extras = [word for word, holds in words if holds]
    return ", ".join([f"{facts.access} tensors", *extras])


def describe_call(call: Call) -> str:
    """One line: sizes, dtype and rules."""
    sizes = call.sizes
    dims = (sizes.head_dim, sizes.head_dim_v)
    dtype = DTYPE_NAMES[call.q.dtype] + (
        "" if call.quantized is None else f" to {DTYPE_NAMES[call.out_dtype]}"
    )
    extras = {"sinks": call.sinks is not None, "dropout": call.dropout is not None}
    return _sentence(sizes, dims, dtype, call.mask, call.score_mod, call.totals, extras)


def describe_workload(workload: Workload) -> str:
    """The same of a call of a workload."""
    spec, values = workload.spec, tuple(value for _, value in workload.params)
    split = len(spec.mask.params)
    mask = Mask(spec.mask, values[:split], (None,) * len(spec.mask.operands))
    score_mod = None
    if spec.score_mod is not None:
        score_mod = ScoreMod(spec.score_mod, values[split:], (None,) * len(spec.score_mod.operands))
    dtype = spec.dtype_label + (f" to {spec.result_dtype}" if spec.quantized else "")
    totals = (workload.total_q, workload.total_k) if spec.packed else ()
    dims, extras = (spec.head_dim, spec.head_dim_v), {"sinks": bool(spec.sinks), "dropout": spec.dropout}
    sentence = _sentence(workload, dims, dtype, mask, score_mod, totals, extras)
    return {"fwd": "", "bwd": "gradients of "}[spec.op] + sentence


def _sentence(
    sizes: Sizes | Workload,
    dims: tuple[int, int],
    dtype: str,
    mask: Mask,
    score_mod: ScoreMod | None,
    totals: tuple[int, ...],
    extras: dict[str, bool],
) -> str:
    of_q, of_k = (f" at most, {total} together" for total in totals) if totals else ("", "")
    told = [
        f"{'packed sequences' if totals else 'batch'} {sizes.batch}",
        f"heads {sizes.heads} ({sizes.kv_heads} of k and v)",
        f"q_len {sizes.q_len}{of_q}",
        f"k_len {sizes.k_len}{of_k}",
        f"head_dim {dims[0]}" + (f" ({dims[1]} of v)" if dims[0] != dims[1] else ""),
        dtype,
        f"mask {mask.describe()}",
    ]
    if score_mod is not None:
        told.append(f"score rule {score_mod.describe()}")
    told += [name for name, there in extras.items() if there]
    return "attention, " + ", ".join(told)


def explain_without_kernel(call: Call, why: str, runs: str = "") -> Explanation:
    """For calls that no dispatcher sees: on the CPU, where it is also told how to ask of a GPU, or with a
    gradient."""
    if not call.q.is_cuda:
        why = (
            f"{why}; what a GPU runs say `flashgen explain --target NAME` and "
            "flashgen.explain_workload(workload, target=NAME)"
        )
    runs = runs or torch_path.describe(call)
    return Explanation.of_torch(describe_call(call), str(call.q.device), runs, why)
