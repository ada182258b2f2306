"""What became of a process."""

from __future__ import annotations

import time
from pathlib import Path


def is_gone(pid: int) -> bool:
    """Whether a process ended (a zombie that nobody waited for has)."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.1)
    return False
