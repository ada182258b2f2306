"""Which records are stale: today's template renders another kernel for their config."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.spec.record import Record

KernelHash = Callable[[Record], str | None]
"""Gives the hash of the kernel that a record's config renders to now, or None if none is rendered."""


def current_hash(record: Record) -> str | None:
    """The `KernelHash` of this installation; None where the family, or the config in it, no longer exists.

    Renders for the triton version of the record, so that only a change of a template counts: another
    triton version makes a record no hint.
    """
    from flashgen.codegen.families import foreign
    from flashgen.codegen.source import Toolchain, render

    if foreign(record.config):
        return None
    try:
        return render(record.workload.spec, record.config, Toolchain(record.versions.triton)).hash
    except Exception:  # a rule or a version that the templates do not know
        return None


class Staleness:
    """Remembers the answer for each kernel: rendering one takes 1 ms, and many records share one."""

    def __init__(self, kernel_hash: KernelHash | None) -> None:
        """Without a function nothing is stale."""
        self._kernel_hash = kernel_hash
        self._known: dict[tuple[object, ...], str | None] = {}

    def __call__(self, record: Record) -> bool:
        if self._kernel_hash is None:
            return False
        key = (record.workload.spec, record.config, record.versions.triton)
        if key not in self._known:
            self._known[key] = self._kernel_hash(record)
        return self._known[key] != record.kernel_hash
