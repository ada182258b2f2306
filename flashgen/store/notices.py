"""What the store tells the user without failing: one warning for each thing, however often it is met."""

from __future__ import annotations

import warnings

_told: set[str] = set()


class StoreWarning(UserWarning):
    """Something about the stored records needs attention; calls are still answered."""


def warn_once(message: str) -> None:
    """Warns, unless this very message was given before in this process."""
    if message not in _told:
        _told.add(message)
        warnings.warn(message, StoreWarning, stacklevel=3)
