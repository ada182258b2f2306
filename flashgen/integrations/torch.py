"""FlashGen as the flash attention of torch's own `scaled_dot_product_attention`: no call is changed.

`register()` adds the name `flashgen` to torch's registry; nothing else happens until somebody activates it:

    torch.nn.attention.activate_flash_attention_impl("flashgen")

From then on calls that torch gives to its flash backend are served by FlashGen, in both passes and under
torch.compile; `restore_flash_attention_impl()` ends that. Torch still chooses the backend, so float32 tensors
and calls with a mask go where they went; `flashgen.sdpa` has kernels for more of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import Library

from flashgen.api import attention
from flashgen.errors import InvalidArgument
from flashgen.spec import masks

NAME = "flashgen"

_MASKS = {False: masks.full(), True: masks.causal("top_left")}
"""By `is_causal`; torch gives causal calls of other lengths to another backend."""

Forward = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]
"""What `aten::_scaled_dot_product_flash_attention` returns: output, LSE, no places of packed sequences, the
lengths, the generator's state (seed and offset), and a mask of what was dropped."""


def register() -> None:
    """Makes `flashgen` known to `torch.nn.attention.activate_flash_attention_impl`; again changes nothing.

    Raises:
        ImportError: this torch has no registry of flash attention.
    """
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None:
        raise ImportError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl: update "
            "torch, or call flashgen.sdpa in the place of scaled_dot_product_attention"
        )
    add(NAME, register_fn=_activate)


@dataclass
class _Active:
    """Torch's handle of an active implementation."""

    library: Library | None

    def remove(self) -> None:
        """Gives the operators back to torch."""
        self.library = None


def _activate() -> _Active:
    library = Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    for name, function in (("", forward), ("_backward", backward)):
        library.impl(f"_scaled_dot_product_flash_attention{name}", function)  # type: ignore[no-untyped-call]
    return _Active(library)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Forward:
    """`aten::_scaled_dot_product_flash_attention`.

    Args:
        query: (batch, heads, q_len, head_dim), float16 or bfloat16.
        key, value: (batch, kv_heads, k_len, head_dim).

    Raises:
        InvalidArgument: dropout, its mask, or what `flashgen.attention` does not take.
    """
    _check(dropout_p, return_debug_mask)
    with torch.no_grad():  # torch's own formula is at work above
        out, lse = attention(query, key, value, mask=_MASKS[is_causal], scale=scale, return_lse=True)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_scaled_dot_product_flash_attention_backward`: the gradients of `forward`'s three tensors.

    Raises:
        InvalidArgument: as `forward`.
    """
    _check(dropout_p, False)
    rule = _MASKS[is_causal].rule
    factor = query.shape[3] ** -0.5 if scale is None else scale
    results = (query, key, value, out, logsumexp)
    told: tuple[object, ...] = ([], rule.text, rule.name, "", "", [], factor)
    dq, dk, dv = torch.ops.flashgen.attention_bwd(grad_out, None, *results, "bhsd", *told)
    return dq, dk, dv


def _check(dropout_p: float, return_debug_mask: bool) -> None:
    if dropout_p or return_debug_mask:
        raise InvalidArgument(
            f"dropout_p={dropout_p}, return_debug_mask={return_debug_mask}: FlashGen, which is active as "
            "torch's flash attention, drops no weights; use another backend "
            "(torch.nn.attention.sdpa_kernel), or torch.nn.attention.restore_flash_attention_impl()"
        )
