"""What kernels write into beside their output: workspaces, and the buffers that a call's kernels share.

A workspace is a few zeroed bytes of a GPU for each stream, which every kernel that uses them leaves zeroed.

A persistent kernel's programs take tiles from a counter. Kernels of one stream run one after another and may
share it; kernels of different streams may not. A launch that a CUDA graph captures gets one of its own, which
the graph clears: it may be replayed on any stream, beside anything.
"""

from __future__ import annotations

import torch

WORDS = 4
"""int32 each: the next tile, the programs that have ended, and two to spare."""


class Workspaces:
    """Those of one GPU, by stream."""

    def __init__(self, device_index: int) -> None:
        self._device = torch.device("cuda", device_index)
        self._held: dict[int, torch.Tensor] = {}

    def address(self, stream: int) -> int:
        """Where the workspace of a launch on a stream is; the stream is torch's current one.

        In a graph's memory pool it is given back at once: what takes its place is written after the kernel.
        """
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(WORDS, dtype=torch.int32, device=self._device).data_ptr()
        held = self._held.get(stream)
        if held is None:  # the first of several threads that come here at once is the one that stays
            made = torch.zeros(WORDS, dtype=torch.int32, device=self._device)
            held = self._held.setdefault(stream, made)
        return held.data_ptr()


def scratch_memory(device_index: int, size: int) -> torch.Tensor:
    """So many bytes of a GPU, of torch's allocator and for its current stream, as they are.

    While a CUDA graph is captured they come from the graph's own pool.
    """
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device_index))
