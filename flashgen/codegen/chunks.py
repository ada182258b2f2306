"""Head dims in power-of-two chunks, as templates name them, and tensors as descriptors of such chunks."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.abi import Arg, letter_of
from flashgen.spec.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class Chunk:
    """A power-of-two piece of a head dim, as the template names it."""

    tensor: str
    """Argument the chunk is loaded from or stored to: Q, K, V, OUT, or the gradient of one: DQ."""
    name: str
    """Variable that holds the tile."""
    dims: str
    """Variable that holds the chunk's indices along the head dim."""
    suffix: str
    offset: int
    size: int
    limit: int
    """The head dim: indices from here on do not exist."""

    @property
    def letter(self) -> str:
        """As in the strides: `stride_qm` is q's."""
        return letter_of(self.tensor)

    @property
    def padded(self) -> bool:
        """Whether the chunk reaches past the head dim."""
        return self.offset + self.size > self.limit


def chunks(spec: AttentionSpec, tensor: str) -> tuple[Chunk, ...]:
    """The chunks of Q, K, V, OUT or a gradient; one has no suffix, several carry their offset: `k_64`."""
    of_v = tensor.removeprefix("D") in ("V", "OUT")
    head_dim = spec.head_dim_v if of_v else spec.head_dim
    axis = "dims_v" if of_v and spec.head_dim_v != spec.head_dim else "dims"
    sizes = spec.v_chunks if of_v else spec.qk_chunks
    made, offset = [], 0
    for size in sizes:
        suffix = f"_{offset}" if len(sizes) > 1 else ""
        name = ("acc" if tensor == "OUT" else tensor.lower()) + suffix
        made.append(Chunk(tensor, name, axis + suffix, suffix, offset, size, head_dim))
        offset += size
    return tuple(made)


def described(spec: AttentionSpec, tensor: str, dtype: str, rows: str) -> tuple[Arg, ...]:
    """A tensor as one descriptor a chunk.

    Args:
        rows: heads and rows of one copy, as `1,64`.
    """
    return tuple(
        Arg(tensor + c.suffix, tensor.lower(), f"tensordesc<{dtype}[1,{rows},{c.size}]>", offset=c.offset)
        for c in chunks(spec, tensor)
    )
