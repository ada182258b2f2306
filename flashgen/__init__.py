"""FlashGen: tuned kernels for exact softmax attention.

Importing it imports nothing heavy; each name below is fetched from its module at first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashgen import settings

if TYPE_CHECKING:
    from inspect import Signature

    from flashgen import integrations, trace
    from flashgen.api import (
        attention,
        explain,
        explain_workload,
        export,
        flex_attention,
        load_bundle,
        sdpa,
        set_policy,
        tune,
        warmup,
    )
    from flashgen.spec import masks, score_mods

__version__ = settings.VERSION

__all__ = [
    "attention",
    "explain",
    "explain_workload",
    "export",
    "flex_attention",
    "integrations",
    "load_bundle",
    "masks",
    "score_mods",
    "sdpa",
    "set_policy",
    "trace",
    "tune",
    "warmup",
]

_MODULES = {
    "integrations": "flashgen.integrations",
    "masks": "flashgen.spec.masks",
    "score_mods": "flashgen.spec.score_mods",
    "trace": "flashgen.trace",
    "tune": "flashgen.tune",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    else:
        value = getattr(importlib.import_module("flashgen.api"), name)
    setattr(sys.modules[__name__], name, value)  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def _tune() -> Any:
    return importlib.import_module("flashgen.api").tune


class _CallableTune(ModuleType):
    # The package `flashgen.tune`, which is also the function `flashgen.tune(...)`: help() of it shows the
    # function's text and arguments.

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _tune()(*args, **named)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return _tune().__doc__

    @property
    def __signature__(self) -> Signature:
        import inspect

        return inspect.signature(_tune())


class _Root(ModuleType):
    """This package: whenever its subpackage `tune` is imported, it becomes callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tune" and type(value) is ModuleType:
            value.__class__ = _CallableTune
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root
