"""Every error a user of FlashGen can meet, one class for each thing that can be wrong.

A message says the rule, what was given, what is allowed, and the next step.
"""

from __future__ import annotations


class FlashGenError(Exception):
    """Base of all errors raised on purpose by FlashGen."""


class InvalidArgument(FlashGenError, ValueError):
    """An argument is outside what the called function accepts; nothing was launched."""


class UnknownName(InvalidArgument):
    """A name is not in the table it should come from (mask, suite, target, family, sampler)."""

    def __init__(self, kind: str, name: object, known: object) -> None:
        listed = ", ".join(sorted(str(item) for item in known))  # type: ignore[attr-defined]
        super().__init__(f"unknown {kind} {name!r}; known: {listed}")


class Unsupported(FlashGenError, NotImplementedError):
    """No kernel family serves what was asked for; the message lists each family's reason."""


class DoesNotFit(FlashGenError):
    """A config cannot run on the target (shared memory, threads); found before any compile."""


class CompileFailed(FlashGenError):
    """The compiler refused a kernel; the message carries its reason."""


class LaunchFailed(FlashGenError):
    """The driver refused to load or to launch a kernel."""


class StoreError(FlashGenError):
    """The record database cannot be read or written; the message says what to do."""


class BundleError(FlashGenError):
    """A bundle is damaged, of another format, or made for another GPU; nothing of it was loaded."""


class NoTunedKernel(FlashGenError):
    """The miss policy is `error` and no tuned record serves the call."""
