"""Other implementations of attention, as opponents in benchmarks: none of them is ever used to answer a call.

Each builder gives a function of no arguments that enqueues one forward pass and returns the output, or it
raises `Unsupported` with the reason why this peer cannot compute the workload. Whatever a peer needs once
(compiling, block masks, its own order of axes) is done when it is built, outside the timing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.build.inputs import Inputs
from flashgen.errors import Unsupported
from flashgen.spec import masks, score_mods
from flashgen.spec.rule import Rule

Launch = Callable[[], Tensor]
"""Enqueues one call; the output as (batch, heads, q_len, head_dim_v)."""

Window = tuple[int | None, int | None]
"""Keys seen before and after a query's position, bottom-right aligned; None is unlimited."""

WINDOWS: Mapping[Rule, Callable[..., Window]] = {
    masks.full().rule: lambda: (None, None),
    masks.causal().rule: lambda: (None, 0),
    masks.sliding_window(1, 1).rule: lambda left, right: (left, right),
    masks.sliding_window(1, None).rule: lambda left: (left, None),
    masks.sliding_window(None, 1).rule: lambda right: (None, right),
    (masks.causal() & masks.sliding_window(1, 1)).rule: lambda left, right: (left, 0),
    (masks.causal() & masks.sliding_window(1, None)).rule: lambda left: (left, 0),
}
"""The masks that peers know, as the window each is; the numbers are the mask's own."""

SOFTCAP = score_mods.softcap(1.0).rule


@dataclass(frozen=True, slots=True)
class Problem:
    """A call in the words of the peers."""

    inputs: Inputs
    q: Tensor
    """(batch, heads, q_len, head_dim); k and v likewise."""
    k: Tensor
    v: Tensor
    window: Window
    cap: float | None

    @classmethod
    def of(cls, inputs: Inputs) -> Problem:
        """Reads the mask and score rule; 8-bit tensors as the 16-bit ones that peers take.

        Raises:
            Unsupported: no peer knows them.
        """
        inputs = inputs.widened()
        mask, score_mod = inputs.mask, inputs.score_mod
        if inputs.sinks is not None:
            raise Unsupported("peers are compared without sinks")
        if mask.rule not in WINDOWS:
            raise Unsupported(f"peers are compared on full, causal and window masks, not {mask.describe()}")
        if score_mod is not None and score_mod.rule != SOFTCAP:
            raise Unsupported(
                f"peers are compared without a score rule or with softcap, not {score_mod.describe()}"
            )
        q, k, v = (inputs.bhsd(each) for each in (inputs.q, inputs.k, inputs.v))
        left, right = WINDOWS[mask.rule](*mask.values)
        # A side that reaches past the sequence is none: a single query under a causal mask sees every key.
        left = None if left is None or left >= k.shape[2] - 1 else left
        right = None if right is None or right >= q.shape[2] - 1 else right
        cap = None if score_mod is None else float(score_mod.values[0])
        return cls(inputs, q, k, v, (left, right), cap)

    @property
    def grouped(self) -> bool:
        """Whether key heads are shared."""
        return self.q.shape[1] != self.k.shape[1]


# PyTorch's own


def _sdpa(backend: str) -> Callable[[Problem], Launch]:
    def build(problem: Problem) -> Launch:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        if problem.cap is not None:
            raise Unsupported("torch's scaled_dot_product_attention has no softcap")
        if problem.window not in ((None, None), (None, 0)):
            raise Unsupported("torch's scaled_dot_product_attention has no sliding window")
        q, k, v = problem.q, problem.k, problem.v
        options: dict[str, Any] = {"scale": problem.inputs.scale, "enable_gqa": problem.grouped}
        if problem.window[1] == 0 and q.shape[2] == k.shape[2]:
            options["is_causal"] = True  # top-left, which is the same for equal lengths
        elif problem.window[1] == 0:
            if backend != "FLASH_ATTENTION":
                raise Unsupported(f"torch's {backend} has no bottom-right causal mask for q_len != k_len")
            options["attn_mask"] = causal_lower_right(q.shape[2], k.shape[2])
        chosen = getattr(SDPBackend, backend)

        def launch() -> Tensor:
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(q, k, v, **options)

        return launch

    return build


def _flex(problem: Problem) -> Launch:
    import torch._dynamo.config as dynamo
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # At its recompile limit FlexAttention goes on without its kernel, forty times slower: fail instead.
    dynamo.fail_on_recompile_limit_hit = True
    q, k, v = problem.q, problem.k, problem.v
    q_len, k_len = q.shape[2], k.shape[2]
    offset, windowed = k_len - q_len, problem.window != (None, None)
    left, right = (2**30 if side is None else side for side in problem.window)
    cap = problem.cap or 1.0

    def before(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return q_idx + offset - k_idx <= left

    def after(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return k_idx - q_idx - offset <= right

    def both(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return (q_idx + offset - k_idx <= left) & (k_idx - q_idx - offset <= right)

    def capped(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    block_mask = None
    if windowed:
        keep = before if problem.window[1] is None else after if problem.window[0] is None else both
        # Written out, the mask of a long sequence would not fit into memory.
        create = torch.compile(create_block_mask) if q_len * k_len > 2**30 else create_block_mask
        block_mask = create(keep, None, None, q_len, k_len, device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    options: dict[str, Any] = {
        "score_mod": None if problem.cap is None else capped,
        "block_mask": block_mask,
        "scale": problem.inputs.scale,
        "enable_gqa": problem.grouped,
    }
    return lambda: compiled(q, k, v, **options)


# FlashAttention-4


def _fa4(problem: Problem) -> Launch:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        raise Unsupported("FlashAttention-4 (the package flash-attn-4) is not installed")
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    q, k, v = (each.transpose(1, 2).contiguous() for each in (problem.q, problem.k, problem.v))
    left, right = problem.window
    options: dict[str, Any] = {"softmax_scale": problem.inputs.scale}
    if problem.window == (None, 0):
        options["causal"] = True  # bottom-right
    elif problem.window != (None, None):
        options["window_size"] = (left, right)
    if problem.cap is not None:
        options["softcap"] = problem.cap

    def launch() -> Tensor:
        result = flash_attn_func(q, k, v, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return launch


@dataclass(frozen=True, slots=True)
class Peer:
    """An implementation to compare with."""

    title: str
    build: Callable[[Problem], Launch]


PEERS: Mapping[str, Peer] = {
    "cudnn": Peer("cuDNN through torch's SDPA", _sdpa("CUDNN_ATTENTION")),
    "fa2": Peer("FlashAttention-2 in torch's SDPA", _sdpa("FLASH_ATTENTION")),
    "fa4": Peer("FlashAttention-4 (CuTe DSL)", _fa4),
    "flex": Peer("torch.compile(flex_attention)", _flex),
}


def build_peer(name: str, inputs: Inputs) -> Launch:
    """A peer's launch for these inputs, run once so that everything is compiled and loaded.

    Raises:
        Unsupported: it is not installed, or does not compute this; the message says which.
    """
    problem = Problem.of(inputs)
    try:
        launch = PEERS[name].build(problem)
        out = launch()
        if inputs.q.is_cuda:
            torch.cuda.synchronize(inputs.q.device)
    except Unsupported:
        raise
    except Exception as error:  # a peer fails in its own ways; none of them may end the benchmark
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f": {lines[0][:200]}" if lines else ""
        raise Unsupported(f"{PEERS[name].title} failed with {type(error).__name__}{told}") from error
    wanted = (*problem.q.shape[:3], problem.v.shape[3])
    if tuple(out.shape) != wanted:
        raise Unsupported(f"{PEERS[name].title} gave an output of shape {tuple(out.shape)}, not {wanted}")
    return launch


def versions() -> dict[str, str]:
    """Versions of what the peers come from; only of what is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "triton", "flash-attn-4"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    if cudnn:
        found["cudnn"] = str(cudnn)
    return found
