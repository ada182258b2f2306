"""Other implementations of attention, as opponents in benchmarks: none of them is ever used to answer a call.

Each builder gives a function of no arguments that enqueues one forward pass and returns the output, or it
raises `Unsupported` with the reason why this peer cannot compute the workload. Whatever a peer needs once
(compiling, block masks, its own order of axes) is done when it is built, outside the timing.
"""

from __future__ import annotations

import importlib.util
import inspect
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
class Packed:
    """Where packed sequences begin, as peers are told it."""

    cu_q: Tensor
    """int32 (sequences + 1), on the device of q; `cu_k` likewise."""
    cu_k: Tensor
    max_q: int
    """Queries of the longest."""
    max_k: int

    @classmethod
    def of(cls, starts: tuple[Tensor, Tensor]) -> Packed:
        """Of a call's; waits for the GPU."""
        return cls(*starts, *(int(each.diff().max()) for each in starts))

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of FlashGen's `attention_varlen`, and of FlashAttention's."""
        return {
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": self.cu_k,
            "max_seqlen_q": self.max_q,
            "max_seqlen_k": self.max_k,
        }

    def documents(self) -> tuple[Tensor, Tensor]:
        """The sequence of each query token and of each key token, int64."""
        each = torch.arange(len(self.cu_q) - 1, device=self.cu_q.device)
        return each.repeat_interleave(self.cu_q.diff()), each.repeat_interleave(self.cu_k.diff())

    def positions(self) -> tuple[Tensor, Tensor]:
        """Of each query token and of each key token among the keys of its sequence, int64: the last query
        stands where the last key does.
        """
        of_q, of_k = self.documents()
        rows = torch.arange(len(of_q), device=of_q.device) - self.cu_q[of_q]
        keys = torch.arange(len(of_k), device=of_k.device) - self.cu_k[of_k]
        return rows + (self.cu_k.diff() - self.cu_q.diff())[of_q], keys


@dataclass(frozen=True, slots=True)
class Problem:
    """A call in the words of the peers."""

    inputs: Inputs
    q: Tensor
    """(batch, heads, q_len, head_dim); k and v likewise. Packed sequences are the rows of one."""
    k: Tensor
    v: Tensor
    window: Window
    cap: float | None
    packed: Packed | None = None

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
        packed = None if inputs.packed is None else Packed.of(inputs.packed)
        q_len, k_len = (q.shape[2], k.shape[2]) if packed is None else (packed.max_q, packed.max_k)
        left, right = WINDOWS[mask.rule](*mask.values)
        # A side that reaches past the sequence is none: a single query under a causal mask sees every key.
        left = None if left is None or left >= k_len - 1 else left
        right = None if right is None or right >= q_len - 1 else right
        cap = None if score_mod is None else float(score_mod.values[0])
        return cls(inputs, q, k, v, (left, right), cap, packed)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of packed sequences as (tokens, heads, head_dim), contiguous."""
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (self.q, self.k, self.v))
        return q, k, v

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


def _varlen_attn(problem: Problem) -> Launch:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unsupported("this torch has no attention of packed sequences (varlen_attn)") from error

    if problem.cap is not None:
        raise Unsupported("torch's varlen_attn has no softcap")
    assert problem.packed is not None
    q, k, v = problem.tokens()
    of, (left, right) = problem.packed, problem.window
    options: dict[str, Any] = {
        "scale": problem.inputs.scale,
        "window_size": (-1 if left is None else left, -1 if right is None else right),
    }
    # Where the option exists fewer key heads need it; before, they were taken without a word.
    if problem.grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True

    def launch() -> Tensor:
        out = varlen_attn(q, k, v, of.cu_q, of.cu_k, of.max_q, of.max_k, **options)
        assert isinstance(out, Tensor)
        return out.transpose(0, 1)[None]

    return launch


Keep = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `mask_mod`: (batch, head, q_idx, k_idx) -> whether the pair is seen."""


def mask_mod(problem: Problem) -> Keep | None:
    """The window of a problem; None where every query sees every key."""
    offset = problem.k.shape[2] - problem.q.shape[2]
    left, right = (2**30 if side is None else side for side in problem.window)

    def before(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return q_idx + offset - k_idx <= left

    def after(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return k_idx - q_idx - offset <= right

    def both(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return (q_idx + offset - k_idx <= left) & (k_idx - q_idx - offset <= right)

    if problem.window == (None, None):
        return None
    return before if problem.window[1] is None else after if problem.window[0] is None else both


def packed_mask_mod(problem: Problem) -> Keep:
    """The window of a problem of packed sequences within each, over all tokens: a document mask."""
    assert problem.packed is not None
    document_of_q, document_of_k = problem.packed.documents()
    row_at, key_at = problem.packed.positions()
    left, right = (2**30 if side is None else side for side in problem.window)

    def alone(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return document_of_q[q_idx] == document_of_k[k_idx]

    def windowed(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        distance = row_at[q_idx] - key_at[k_idx]
        return (document_of_q[q_idx] == document_of_k[k_idx]) & (distance <= left) & (-distance <= right)

    return alone if problem.window == (None, None) else windowed


def _flex(keep_of: Callable[[Problem], Keep | None]) -> Callable[[Problem], Launch]:
    def build(problem: Problem) -> Launch:
        import torch._dynamo.config as dynamo
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # At its recompile limit FlexAttention goes on without its kernel, forty times slower: fail instead.
        dynamo.fail_on_recompile_limit_hit = True
        q, k, v = (each.contiguous() for each in (problem.q, problem.k, problem.v))
        q_len, k_len = q.shape[2], k.shape[2]
        cap = problem.cap or 1.0

        def capped(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        block_mask, keep = None, keep_of(problem)
        if keep is not None:
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

    return build


# FlashAttention-4


def _fa4_interface() -> Any:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        raise Unsupported("FlashAttention-4 (the package flash-attn-4) is not installed")
    import flash_attn.cute  # type: ignore[import-not-found,unused-ignore]

    return flash_attn.cute


def _fa4_options(problem: Problem) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": problem.inputs.scale}
    if problem.window == (None, 0):
        options["causal"] = True  # bottom-right
    elif problem.window != (None, None):
        options["window_size"] = problem.window
    if problem.cap is not None:
        options["softcap"] = problem.cap
    return options


def _fa4_out(result: Any) -> Tensor:
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _fa4(problem: Problem) -> Launch:
    interface, options = _fa4_interface(), _fa4_options(problem)
    q, k, v = (each.transpose(1, 2).contiguous() for each in (problem.q, problem.k, problem.v))
    return lambda: _fa4_out(interface.flash_attn_func(q, k, v, **options)).transpose(1, 2)


def _fa4_varlen(problem: Problem) -> Launch:
    interface, options = _fa4_interface(), _fa4_options(problem)
    assert problem.packed is not None
    q, k, v = problem.tokens()
    options |= problem.packed.arguments()
    return lambda: _fa4_out(interface.flash_attn_varlen_func(q, k, v, **options)).transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class Peer:
    """An implementation to compare with."""

    title: str
    build: Callable[[Problem], Launch]
    packed: Callable[[Problem], Launch] | None
    """Of packed sequences; None where it has no such thing."""


PEERS: Mapping[str, Peer] = {
    "cudnn": Peer("cuDNN through torch's SDPA", _sdpa("CUDNN_ATTENTION"), None),
    "fa2": Peer("FlashAttention-2 in torch", _sdpa("FLASH_ATTENTION"), _varlen_attn),
    "fa4": Peer("FlashAttention-4 (CuTe DSL)", _fa4, _fa4_varlen),
    "flex": Peer("torch.compile(flex_attention)", _flex(mask_mod), _flex(packed_mask_mod)),
}


def build_peer(name: str, inputs: Inputs) -> Launch:
    """A peer's launch for these inputs, run once so that everything is compiled and loaded.

    Raises:
        Unsupported: it is not installed, or does not compute this; the message says which.
    """
    problem, peer = Problem.of(inputs), PEERS[name]
    build = peer.build if problem.packed is None else peer.packed
    if build is None:
        raise Unsupported(f"{peer.title} takes no packed sequences")
    try:
        launch = build(problem)
        out = launch()
        if inputs.q.is_cuda:
            torch.cuda.synchronize(inputs.q.device)
    except Unsupported:
        raise
    except Exception as error:  # a peer fails in its own ways; none of them may end the benchmark
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f": {lines[0][:200]}" if lines else ""
        raise Unsupported(f"{peer.title} failed with {type(error).__name__}{told}") from error
    wanted = (*problem.q.shape[:3], problem.v.shape[3])
    if tuple(out.shape) != wanted:
        raise Unsupported(f"{peer.title} gave an output of shape {tuple(out.shape)}, not {wanted}")
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
