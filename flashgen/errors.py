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
        told = repr(name)
        told = told if len(told) <= 80 else f"{told[:77]}..."
        super().__init__(f"unknown {kind} {told}; known: {listed}")


class NotTuned(InvalidArgument):
    """What was asked for needs tuned records, and a workload has none."""


class Unsupported(FlashGenError, NotImplementedError):
    """No kernel family serves what was asked for; the message lists each family's reason."""


class DoesNotFit(FlashGenError):
    """A config cannot run on the target (shared memory, threads); found before any compile."""


class CompileFailed(FlashGenError):
    """The compiler refused a kernel; the message carries its reason."""


class CompilerUnavailable(FlashGenError, OSError):
    """The machine failed the compiler (disk, memory, a missing tool), which says nothing of the kernel."""

    def __str__(self) -> str:
        return str(self.strerror)


class LaunchFailed(FlashGenError):
    """The driver refused to load or to launch a kernel."""

    code = 0
    """The driver's CUresult, where a launch failed by one."""


class NoGPU(LaunchFailed):
    """This machine has no GPU that can be used."""


class StoreError(FlashGenError):
    """The record database cannot be read or written; the message says what to do."""


class BundleError(FlashGenError):
    """A bundle is damaged, of another format, or made for another GPU; nothing of it was loaded."""


class NoTunedKernel(FlashGenError):
    """The miss policy is `error` and no tuned record serves the call."""
