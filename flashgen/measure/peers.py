"""Other implementations of attention, as opponents in benchmarks: none of them is ever used to answer a call.

Each builder gives a function of no arguments that enqueues one forward pass and returns the output, or it
raises `Unsupported` with the reason why this peer cannot compute the workload. Whatever a peer needs once
(compiling, block masks, its own order of axes) is done when it is built, outside the timing.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.build.inputs import Inputs
from flashgen.errors import Unsupported
from flashgen.spec import expr as ex
from flashgen.spec import masks, score_mods
from flashgen.spec.masks import Mask
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
"""The masks that every peer knows, as the window each is; the numbers are the mask's own."""

_DOCUMENTS = tuple(masks.document(word) for word in ("i32", "i64", "ordered"))
DOCUMENTS: Mapping[Rule, Window] = {
    **{mask.rule: (None, None) for mask in _DOCUMENTS},
    **{(masks.causal() & mask).rule: (None, 0) for mask in _DOCUMENTS},
}
"""The masks of documents, and the window within each."""

SOFTCAP, ALIBI = score_mods.softcap(1.0).rule, score_mods.alibi().rule


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
    window: Window | None
    """None where the mask is no window: FlexAttention asks `inputs.mask`."""
    packed: Packed | None = None

    @classmethod
    def of(cls, inputs: Inputs) -> Problem:
        """Reads the mask; 8-bit tensors as the 16-bit ones that peers take."""
        inputs = inputs.widened()
        mask = inputs.mask
        q, k, v = (inputs.bhsd(each) for each in (inputs.q, inputs.k, inputs.v))
        packed = None if inputs.packed is None else Packed.of(inputs.packed)
        if mask.rule not in WINDOWS:
            return cls(inputs, q, k, v, None, packed)
        q_len, k_len = (q.shape[2], k.shape[2]) if packed is None else (packed.max_q, packed.max_k)
        left, right = WINDOWS[mask.rule](*mask.values)
        # A side that reaches past the sequence is none: a single query under a causal mask sees every key.
        left = None if left is None or left >= k_len - 1 else left
        right = None if right is None or right >= q_len - 1 else right
        return cls(inputs, q, k, v, (left, right), packed)

    def windowed(self) -> Problem:
        """For peers that know windows alone: documents of one row are packed sequences.

        Raises:
            Unsupported: the mask is neither.
        """
        mask = self.inputs.mask
        if self.window is not None:
            return self
        if self.packed is not None:
            raise Unsupported(
                f"packed sequences are compared on full, causal and window masks, not {mask.describe()}"
            )
        if mask.rule not in DOCUMENTS:
            raise Unsupported(f"only FlexAttention is compared on {mask.describe()}")
        ids = _document_ids(*mask.tensors)
        if self.q.shape[0] > 1 or self.q.shape[2] != self.k.shape[2] or bool((ids.diff() < 0).any()):
            raise Unsupported(
                "documents are packed sequences where they are one row of queries and keys, batch 1, and "
                "follow each other"
            )
        ends = ids.new_tensor([0]), ids[0].diff().nonzero().flatten() + 1, ids.new_tensor([ids.shape[1]])
        starts = torch.cat(ends).to(torch.int32)
        return replace(self, window=DOCUMENTS[mask.rule], packed=Packed.of((starts, starts)))

    def cap(self, title: str, known: bool = True) -> float | None:
        """Of softcap, for peers that know no other score rule.

        Args:
            title: the peer's.
            known: whether it knows even that.

        Raises:
            Unsupported: the score rule is another one.
        """
        score_mod = self.inputs.score_mod
        if score_mod is None:
            return None
        if not known or score_mod.rule != SOFTCAP:
            raise Unsupported(f"{title} has no {score_mod.describe()}")
        return float(score_mod.values[0])

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

        problem.cap("torch's scaled_dot_product_attention", known=False)
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

    problem.cap("torch's varlen_attn", known=False)
    assert problem.packed is not None and problem.window is not None
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


# FlexAttention, in the words of who writes for it


Keep = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `mask_mod`: (batch, head, q_idx, k_idx) -> whether the pair is seen."""
Change = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `score_mod`: (score, batch, head, q_idx, k_idx) -> score."""


def mask_mod(problem: Problem) -> Keep | None:
    """The mask of a problem; None where every query sees every key.

    Raises:
        Unsupported: a mask that nobody wrote down here for FlexAttention.
    """
    if problem.window is None:
        return _other_mask_mod(problem)
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


def _other_mask_mod(problem: Problem) -> Keep:
    mask, k_len = problem.inputs.mask, problem.k.shape[2]
    make = MASK_MODS.get(mask.rule)
    if make is None and (near := _on_a_grid(mask, k_len)):
        return near
    if make is None:
        raise Unsupported(f"FlexAttention is not compared on {mask.describe()}; known: {', '.join(_KNOWN)}")
    if problem.q.shape[2] != k_len:
        raise Unsupported(f"FlexAttention is compared on {mask.describe()} with as many queries as keys")
    return make(*mask.tensors)


def _document_ids(table: Tensor) -> Tensor:
    """The document of each key, (batch, k_len): of those that follow one another, where it begins."""
    return table if table.dim() == 2 else table[:, 0, 1:]


def _same_document(table: Tensor) -> Keep:
    ids = _document_ids(table)
    return lambda batch, head, q_idx, k_idx: ids[batch, q_idx] == ids[batch, k_idx]


def _causal_in_document(table: Tensor) -> Keep:
    ids = _document_ids(table)
    return lambda batch, head, q_idx, k_idx: (q_idx >= k_idx) & (ids[batch, q_idx] == ids[batch, k_idx])


def _prefix(lengths: Tensor) -> Keep:
    return lambda batch, head, q_idx, k_idx: (k_idx < lengths[batch]) | (q_idx >= k_idx)


def _on_a_grid(mask: Mask, k_len: int) -> Keep | None:
    """Of a neighbourhood on a grid: its width is compiled into the rule, so it is tried and not read."""
    if mask.rule.params != _GRID.rule.params:
        return None
    height, kernel_h, kernel_w = map(int, mask.values)
    width = k_len // height
    if kernel_w > width or masks.neighborhood((height, width), (kernel_h, kernel_w)).rule != mask.rule:
        return None
    return _near((height, width), (kernel_h, kernel_w))


def _near(grid: tuple[int, int], kernel: tuple[int, int]) -> Keep:
    (height, width), (kernel_h, kernel_w) = grid, kernel

    def keep(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        top = (q_idx // width - kernel_h // 2).clamp(0, height - kernel_h)
        left = (q_idx % width - kernel_w // 2).clamp(0, width - kernel_w)
        down, across = k_idx // width - top, k_idx % width - left
        return (down >= 0) & (down < kernel_h) & (across >= 0) & (across < kernel_w)

    return keep


_GRID = masks.neighborhood((1, 1), (1, 1))
MASK_MODS: Mapping[Rule, Callable[..., Keep]] = {
    **{mask.rule: _same_document for mask in _DOCUMENTS},
    **{(masks.causal() & mask).rule: _causal_in_document for mask in _DOCUMENTS},
    **{masks.prefix_lm(dtype).rule: _prefix for dtype in ("i32", "i64")},
}
"""Masks that are no windows, of as many queries as keys, by their tensors."""
_KNOWN = ("full", "causal", "windows", "document", "causal & document", "prefix_lm", "neighborhood of a grid")


def score_mod(problem: Problem) -> Change | None:
    """The score rule of a problem.

    Raises:
        Unsupported: one that nobody wrote down here for FlexAttention.
    """
    rule, offset = problem.inputs.score_mod, problem.k.shape[2] - problem.q.shape[2]
    if rule is None or rule.rule == SOFTCAP:
        cap = problem.cap("FlexAttention")
        return None if cap is None else lambda score, batch, head, q_idx, k_idx: cap * torch.tanh(score / cap)
    if rule.rule != ALIBI or problem.packed is not None:
        raise Unsupported(f"FlexAttention is not compared with {rule.describe()}; known: softcap, alibi")
    (slopes,) = rule.tensors
    return lambda score, batch, head, q_idx, k_idx: score - slopes[head] * (q_idx + offset - k_idx).abs()


def packed_mask_mod(problem: Problem) -> Keep:
    """The window of a problem of packed sequences within each, over all tokens: a document mask.

    Raises:
        Unsupported: the mask is no window.
    """
    window = problem.windowed().window
    assert problem.packed is not None and window is not None
    document_of_q, document_of_k = problem.packed.documents()
    row_at, key_at = problem.packed.positions()
    left, right = (2**30 if side is None else side for side in window)

    def alone(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return document_of_q[q_idx] == document_of_k[k_idx]

    def windowed(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        distance = row_at[q_idx] - key_at[k_idx]
        return (document_of_q[q_idx] == document_of_k[k_idx]) & (distance <= left) & (-distance <= right)

    return alone if window == (None, None) else windowed


def _flex(keep_of: Callable[[Problem], Keep | None]) -> Callable[[Problem], Launch]:
    def build(problem: Problem) -> Launch:
        import torch._dynamo.config as dynamo
        import torch._functorch.config as functorch
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        # At its recompile limit FlexAttention goes on without its kernel, forty times slower: fail instead.
        dynamo.fail_on_recompile_limit_hit = True
        functorch.donated_buffer = False  # a backward pass is timed many times, and would give inputs away
        q, k, v = (each.contiguous() for each in (problem.q, problem.k, problem.v))
        q_len, k_len = q.shape[2], k.shape[2]
        inputs, block_mask, keep = problem.inputs, None, keep_of(problem)
        if keep is not None:
            # Written out, the mask of a long sequence would not fit into memory.
            create = torch.compile(create_block_mask) if q_len * k_len > 2**30 else create_block_mask
            differs = inputs.packed is None and "batch" in ex.free_symbols(inputs.mask.rule.expr)
            batch = q.shape[0] if differs else None
            block_mask = create(keep, batch, None, q_len, k_len, device=q.device)
        options: dict[str, Any] = {
            "score_mod": score_mod(problem),
            "block_mask": block_mask,
            "scale": inputs.scale,
            "enable_gqa": problem.grouped,
        }
        sinks = inputs.sinks

        def with_sinks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            # The keys' share of a row's weight, of which the sink has the rest and no value.
            assert sinks is not None
            out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
            share = torch.sigmoid(aux.lse - sinks.float()[:, None])
            left: Tensor = (out * share[..., None]).to(out.dtype)
            return left

        attend: Any = flex_attention if sinks is None else with_sinks
        compiled: Callable[..., Tensor] = torch.compile(attend, dynamic=False, fullgraph=True)
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
    cap = problem.cap("FlashAttention-4")
    if cap is not None:
        options["softcap"] = cap
    if problem.inputs.sinks is not None:
        options["learnable_sink"] = problem.inputs.sinks
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
    any_mask: bool = False
    """Whether it is asked for masks that are no windows as they are."""
    sinks: bool = False
    """Whether it knows sinks."""


PEERS: Mapping[str, Peer] = {
    "cudnn": Peer("cuDNN through torch's SDPA", _sdpa("CUDNN_ATTENTION"), None),
    "fa2": Peer("FlashAttention-2 in torch", _sdpa("FLASH_ATTENTION"), _varlen_attn),
    "fa4": Peer("FlashAttention-4 (CuTe DSL)", _fa4, _fa4_varlen, sinks=True),
    "flex": Peer(
        "torch.compile(flex_attention)", _flex(mask_mod), _flex(packed_mask_mod), any_mask=True, sinks=True
    ),
}


def build_peer(name: str, inputs: Inputs) -> Launch:
    """A peer's launch for these inputs, run once so that everything is compiled and loaded.

    Raises:
        Unsupported: it is not installed, or does not compute this; the message says which.
    """
    problem, peer = Problem.of(inputs), PEERS[name]
    if not peer.any_mask:
        problem = problem.windowed()
    if inputs.sinks is not None and not peer.sinks:
        raise Unsupported(f"{peer.title} has no sinks")
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
        raise _failed(peer, error) from error
    wanted = (*problem.q.shape[:3], problem.v.shape[3])
    if tuple(out.shape) != wanted:
        raise Unsupported(f"{peer.title} gave an output of shape {tuple(out.shape)}, not {wanted}")
    return launch


Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v, (batch, heads, rows, dims)."""


def needing(inputs: Inputs) -> Inputs:
    """The same with q, k and v that need gradients."""
    q, k, v = (each.detach().requires_grad_() for each in (inputs.q, inputs.k, inputs.v))
    return replace(inputs, q=q, k=k, v=v)


def backward_of(forward: Launch, inputs: Inputs, dout: Tensor) -> Callable[[], Gradients]:
    """A function that enqueues the backward pass alone.

    Args:
        forward: from `inputs` that are `needing`; called once, here.
        dout: the gradient of its output, (batch, heads, q_len, head_dim_v).
    """
    with torch.enable_grad():
        out = forward()

    def launch() -> Gradients:
        given = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), dout, retain_graph=True)
        dq, dk, dv = (inputs.bhsd(each) for each in given)
        return dq, dk, dv

    return launch


def build_backward(name: str, inputs: Inputs, dout: Tensor) -> Callable[[], Gradients]:
    """A peer's backward pass, run once; errors as `build_peer`'s."""
    inputs = needing(inputs)
    launch = backward_of(build_peer(name, inputs), inputs, dout)
    try:
        launch()
    except Exception as error:
        raise _failed(PEERS[name], error) from error
    return launch


def _failed(peer: Peer, error: Exception) -> Unsupported:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = f": {lines[0][:200]}" if lines else ""
    return Unsupported(f"{peer.title} failed with {type(error).__name__}{told}")


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
