"""FlashGen as an attention implementation of Hugging Face transformers.

`register()` adds two functions under the name `flashgen`: one that says what a layer may see, once for each
forward pass, and the attention itself. What a model asks for is recognised where FlashGen has a mask for it
(causal, sliding window, all keys; each with padding, with a cache, or both); everything else becomes a plain
boolean mask for torch. Nothing is guessed: an argument that changes the result and is not served is an error.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from flashgen.api import attention
from flashgen.build.precision import autocasted, autocasting
from flashgen.errors import InvalidArgument
from flashgen.runtime import torch_path
from flashgen.runtime.checks import Call, as_dropout, as_sinks
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from flashgen.spec.masks import UNLIMITED, Mask
from flashgen.spec.rule import Rule
from flashgen.spec.score_mods import ScoreMod

log = logging.getLogger("flashgen")

NAME = "flashgen"
OLDEST = 5
"""The first major version of transformers that builds every mask by the functions registered here."""

_KEEP = masks.key_padding("keep")
# Joined once, here: a forward pass may be traced, and torch cannot trace the joining of masks.
_RULES: dict[tuple[str, bool], Rule] = {
    (kind, padded): (mask & _KEEP if padded else mask).rule
    for kind, mask in (
        ("full", masks.full()),
        ("causal", masks.causal()),
        ("window", masks.sliding_window(1, 1)),
    )
    for padded in (False, True)
}

IGNORED = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)
"""Keywords that models hand through and that change nothing here: what positions and packed sequences mean
for the mask was settled when the mask was made."""

UNSERVED = {
    "output_attentions": "the weights of attention are never written out",
    "position_bias": "an additive bias is not served yet",
    "sinks": "sinks that each query has of its own are not served",
    "indices": "a choice of keys for each query is not served yet",
    "block_indices": "a choice of blocks for each query is not served yet",
    "head_mask": "heads cannot be switched off",
}


@dataclass(frozen=True)
class ForwardMask:
    """What the layers of one forward pass may see; models hand it through to `attention_forward`."""

    mask: Mask
    k_len: int
    """Keys that exist: a static cache holds more, from here on not written yet."""
    q_len: int
    batch: int

    # Models look at these of a mask before they hand it on: it has the form of a prepared 4-dimensional one.

    @property
    def ndim(self) -> int:
        """4, as of a mask (batch, 1, q_len, k_len)."""
        return 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, 1, q_len, k_len)."""
        return (self.batch, 1, self.q_len, self.k_len)


def register() -> None:
    """Makes `attn_implementation="flashgen"` known to transformers; registering again changes nothing.

    Raises:
        ImportError: transformers is not installed, or older than version 5.
    """
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise ImportError(
            f"transformers {transformers.__version__} is too old, FlashGen works with {OLDEST}.0 and newer: "
            "pip install 'transformers>=5'"
        )
    _tell_from_flash_attention()
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


_ASKED = "is_flash_attention_requested"


def _tell_from_flash_attention() -> None:
    """Makes transformers see that `flashgen` is none of the flash-attention packages.

    It takes every implementation with "flash" in its name for one: models would then pass packed sequences
    without a mask, and loading would look for a package on the hub. The one function that decides so is
    replaced wherever a module has imported it; modules imported later get the replacement.
    """
    from transformers.utils import generic

    original = getattr(generic, _ASKED)
    if getattr(original, "knows_flashgen", False):
        return

    @functools.wraps(original)
    def asked(config: Any = None, requested_attention_implementation: str | None = None, **more: Any) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != NAME and bool(original(config, requested_attention_implementation, **more))

    asked.knows_flashgen = True  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        # Through the dictionary: asking a lazy module for a name would import all it could come from.
        names = getattr(module, "__dict__", {})
        if name.startswith("transformers") and names.get(_ASKED) is original:
            names[_ASKED] = asked


# The mask


def make_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    cache_position: Tensor | None = None,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | ForwardMask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **kwargs: Any,
) -> ForwardMask | Tensor:
    """What the queries of a forward pass see. transformers calls it by keywords.

    Args:
        q_length, kv_length: of the tensors that the layers will get.
        q_offset: position of the first query in the sequence; on the device for a static cache.
        kv_offset: position of the first key.
        cache_position: the positions of the queries, which older versions give instead of length and offset.
        mask_function: (batch, head, q position, k position) -> visible.
        attention_mask: (batch, positions seen so far), False for padding; or a mask made before.
        allow_is_causal_skip, allow_is_bidirectional_skip: if neither holds, the model wants a tensor.

    Returns:
        A `ForwardMask`, or a bool tensor (batch, 1, q_length, kv_length) where none can say the same.
    """
    if isinstance(attention_mask, ForwardMask):
        return attention_mask
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    if cache_position is not None:
        queries: dict[str, Any] = {"cache_position": cache_position}
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    else:
        queries = {"q_length": q_length, "q_offset": q_offset}
    found = None
    if (allow_is_causal_skip or allow_is_bidirectional_skip) and not use_vmap:
        found = _recognised(mask_function)
    if found is not None and q_length is not None:
        made = _forward_mask(*found, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask)
        if made is not None:
            return made
    tensor: Tensor = sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        **queries,
        **kwargs,
    )
    return tensor


def _forward_mask(
    kind: str,
    left: int,
    right: int,
    batch: int,
    q_len: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
) -> ForwardMask | None:
    """The mask of a recognised kind; None where positions do not line up as FlashGen counts them."""
    tracing = torch.compiler.is_compiling()
    if isinstance(q_offset, Tensor):
        if tracing:
            return None
        q_offset = int(q_offset)  # one wait for the device in a forward pass, as torch's own mask takes
    # FlashGen lines up the last query with the last key: then row i has position i + k_len - q_len, and it
    # must be the model's i + q_offset - kv_offset.
    k_len = q_offset + q_len - kv_offset
    if kind == "full":
        k_len = kv_length
    elif k_len > kv_length or k_len < 1 or (right and k_len != kv_length):
        return None
    keep = None
    if padding is not None:
        keep = padding[:, kv_offset : kv_offset + k_len]
        if keep.shape[1] < k_len:
            keep = F.pad(keep, (0, k_len - keep.shape[1]), value=False)
        if not tracing and not _capturing(keep) and bool(keep.all()):
            keep = None
    if kind == "window" and not tracing and left + 1 >= k_len:
        kind = "causal" if right == 0 else "full" if right + 1 >= k_len else kind
    values = (left, right) if kind == "window" else ()
    mask = Mask(_RULES[kind, keep is not None], values, () if keep is None else (keep,))
    return ForwardMask(mask, k_len, q_len, batch)


def _capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be read from the device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _recognised(mask_function: Callable[..., Any]) -> tuple[str, int, int] | None:
    """(kind, left, right) of the mask functions that transformers itself makes; None for any other."""
    # Names, not the module: torch's tracer cannot follow an import by way of the package, a lazy module.
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function:
        return "causal", 0, 0
    if mask_function is bidirectional_mask_function:
        return "full", 0, 0
    parts = _closure(mask_function, "and_masks.<locals>.and_mask", "mask_functions")
    if parts is None or len(parts) != 2 or any(not callable(part) for part in parts):
        return None
    for overlay, base, two_sided in (
        ("sliding_window_overlay", causal_mask_function, False),
        ("sliding_window_bidirectional_overlay", bidirectional_mask_function, True),
    ):
        window = _closure(parts[0], f"{overlay}.<locals>.inner_mask", "sliding_window")
        # The causal window counts the query itself, the two-sided one does not.
        if parts[1] is base and type(window) is int and 0 < window < UNLIMITED:
            return ("window", window, window) if two_sided else ("window", window - 1, 0)
    return None


def _closure(function: Callable[..., Any], name: str, variable: str) -> Any:
    """A variable that a nested function of transformers keeps; None if it is another function.

    A function made while torch traces shows nothing of itself; its mask is written out.
    """
    if torch.compiler.is_compiling() or getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    if function.__qualname__ != name or variable not in function.__code__.co_freevars:
        return None
    cells = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index(variable)].cell_contents


# Attention


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ForwardMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, k_len, head_dim), not repeated.
        attention_mask: what `make_mask` made, a model's own 4-dimensional tensor, or None.
        is_causal, sliding_window: what the layer sees where there is no mask.
        s_aux: (heads,) the sinks of GPT-OSS and its kind, a logit for each query head.

    Returns:
        (batch, q_len, heads, head_dim_v), contiguous, and None for the weights.

    Raises:
        InvalidArgument: the model wants something that FlashGen does not serve; the message says what to use.
    """
    _check_keywords(kwargs)
    if autocasting():  # rotary positions leave q and k in float32, the projection v in autocast's dtype
        query, key, value = autocasted(query, key, value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    keep: Tensor | None = None
    if isinstance(attention_mask, ForwardMask):
        mask = _on(query.device, attention_mask.mask)
        if key.shape[2] != attention_mask.k_len:
            key, value = key[:, :, : attention_mask.k_len], value[:, :, : attention_mask.k_len]
    elif attention_mask is None:
        mask = _without_mask(query.shape[2], key.shape[2], causal, sliding_window)
    else:
        mask, keep = _of_tensor(attention_mask, query, key)
    if keep is None and not _served(query, value):
        keep = _as_tensor(mask, query, key)
    if keep is not None:
        out = _by_torch(query, key, value, keep, dropout, scaling, softcap, s_aux)
    else:
        score_mod = score_mods.softcap(softcap) if softcap else None
        rules: dict[str, Any] = {"mask": mask, "score_mod": score_mod, "sinks": s_aux}
        out = attention(query, key, value, **rules, scale=scaling, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None


def _check_keywords(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name in IGNORED or value is None or value is False:
            continue
        if name in UNSERVED:
            raise InvalidArgument(
                f"{name} was given: {UNSERVED[name]}; load the model with attn_implementation='eager'"
            )
        if isinstance(value, Tensor):
            raise InvalidArgument(
                f"FlashGen does not know the tensor {name} which this model gives to attention, and does "
                "not ignore it; load the model with attn_implementation='sdpa'"
            )


def _on(device: torch.device, mask: Mask) -> Mask:
    """The mask for a layer that lies on another GPU than the mask."""
    if all(tensor.device == device for tensor in mask.tensors):
        return mask
    return Mask(mask.rule, mask.values, tuple(tensor.to(device) for tensor in mask.tensors))


def _without_mask(q_len: int, k_len: int, causal: bool, window: int | None) -> Mask:
    """A layer without a mask: one that is not causal, or whose model makes none."""
    if not causal or q_len == 1:
        if window is not None and window < k_len:
            raise InvalidArgument(
                f"sliding_window={window} without a mask and without causality is not served"
            )
        return masks.full()
    if q_len != k_len:
        raise InvalidArgument(
            f"a causal layer got {q_len} queries, {k_len} keys and no mask, which says not where the queries "
            "stand; load the model with attn_implementation='sdpa'"
        )
    return masks.causal() if window is None or window >= k_len else masks.sliding_window(window - 1, 0)


def _of_tensor(tensor: Tensor, query: Tensor, key: Tensor) -> tuple[Mask, Tensor | None]:
    """A 4-dimensional mask as key padding where all queries see the same keys, else as it is."""
    if tensor.dim() != 4:
        raise InvalidArgument(
            f"attention_mask has shape {tuple(tensor.shape)}; layers get a prepared mask of 4 dimensions, "
            "which this model does not make; load it with attn_implementation='sdpa'"
        )
    if tensor.dtype != torch.bool or tensor.shape[1] != 1 or tensor.shape[2] != 1:
        return masks.full(), tensor
    keys = tensor[:, 0, 0].expand(query.shape[0], key.shape[2])
    return Mask(_RULES["full", True], (), (keys,)), None


def _served(query: Tensor, value: Tensor) -> bool:
    """Whether the head dims are such that kernels exist."""
    dims = (query.shape[3], value.shape[3])
    return all(MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM and dim % HEAD_DIM_STEP == 0 for dim in dims)


def _as_tensor(mask: Mask, query: Tensor, key: Tensor) -> Tensor:
    """The mask written out for torch, bool (batch or 1, 1, q_len, k_len)."""
    call = Call(query, key, key, mask, None, 1.0, "bhsd", False)
    return torch_path.visible(call, slice(0, query.shape[2]))


# A mask of the kind that models prepare, as an expression: True for what is seen, or added to the scores.
_KEPT = Rule.parse("mask", "keep[batch, head, q_idx, k_idx] where keep: i1", name="kept")
_ADDED = Rule.parse("score", "score + bias[batch, head, q_idx, k_idx] where bias: fp32", name="added")


def _by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """torch's attention with a mask tensor, for masks and options that no kernel takes."""
    if not softcap and sinks is None:
        if keep.dtype not in (torch.bool, query.dtype):
            keep = keep.to(query.dtype)
        return F.scaled_dot_product_attention(
            query, key, value, keep, dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    mask, mods = masks.full(), [score_mods.softcap(softcap)] if softcap else []
    shape = (*query.shape[:3], key.shape[2])
    if keep.dtype == torch.bool:
        mask = Mask(_KEPT, (), (keep.expand(shape),))
    else:
        mods.append(ScoreMod(_ADDED, (), (keep.float().expand(shape),)))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    score_mod = score_mods.compose(mods)
    sinks = as_sinks(sinks, query, "bhsd")
    dropped = as_dropout(dropout, query)
    call = Call(query, key, value, mask, score_mod, scale, "bhsd", False, sinks=sinks, dropout=dropped)
    out, _ = torch_path.attention(call)
    return out
