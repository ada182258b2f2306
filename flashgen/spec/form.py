"""The form of what is read from outside: keys, types and ranges of JSON, before anything else looks at it.

A form is data and `checked` the one walk over it. Records (`RECORD`) are read by every store; a bundle's
manifest is made of the same pieces. Needs the standard library alone.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime
from numbers import Integral
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec import expr

MAX_NAME = 256
MAX_EXPRESSION = expr.MAX_TEXT
MAX_REASON = 64 * 1024
"""A compiler's reason may be long; what is longer is cut where it is stored."""
MAX_ENTRIES = 64
MAX_INT = 2**62
"""Whole numbers stay below this, so that every database column holds them."""

# Control characters but for tab and line end, what turns the direction of text, and half surrogate pairs: a
# terminal would obey them, or a database or file not hold them.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Text:
    """A text of at most `limit` characters that can be shown and stored anywhere."""

    limit: int = MAX_NAME
    lines: bool = False
    """Whether it may have tabs and line ends."""

    def __str__(self) -> str:
        return f"a text of at most {self.limit} characters without control characters or half surrogate pairs"


@dataclass(frozen=True, slots=True)
class Number:
    """A number: `whole` and in a range, or any float."""

    whole: bool = True
    least: float = 0
    most: float = MAX_INT - 1
    optional: bool = False

    def __str__(self) -> str:
        number = f"a whole number of at least {self.least}" if self.whole else "a number"
        number += f" and at most {self.most}" if self.most < MAX_INT - 1 else ""
        return f"{number} or null" if self.optional else number


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in UTC by ISO 8601, of one form: the newest record is found by comparing texts."""

    def __str__(self) -> str:
        return "a time in UTC by ISO 8601, such as 2026-11-29T12:00:00Z"


@dataclass(frozen=True, slots=True)
class Flag:
    """A truth value."""

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Maybe:
    """null, or this form."""

    form: Any


@dataclass(frozen=True, slots=True)
class Absent:
    """This form, or no such key."""

    form: Any


@dataclass(frozen=True, slots=True)
class Each:
    """An object of any keys, whose values have this form."""

    form: Any
    most: int = MAX_ENTRIES


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose entries have this form."""

    form: Any
    most: int = MAX_ENTRIES


# A dict is an object of exactly these keys, a tuple means one of several forms of a text or number.
_COUNT, _POSITIVE, _MAYBE_COUNT = Number(), Number(least=1), Number(optional=True)
_FLOAT, _MAYBE_FLOAT = Number(False, -math.inf), Number(False, -math.inf, optional=True)
_RULE = {"name": Text(), "text": Text(MAX_EXPRESSION)}

TARGET: dict[str, Any] = {
    "name": Text(),
    "vendor": Text(),
    "arch": _POSITIVE,
    "sm_count": _POSITIVE,
    "shared_per_block": _COUNT,
    "l2_mib": _COUNT,
    "bandwidth": _COUNT,
}
SPEC: dict[str, Any] = {
    "op": Text(),
    "head_dim": _COUNT,
    "head_dim_v": _COUNT,
    "dtype": Text(),
    "fp32_precision": Text(),
    "addressing": Text(),
    "return_lse": Flag(),
    "positive_scale": Flag(),
    "mask": _RULE,
    "score_mod": Maybe(_RULE),
    "out_dtype": Absent(Text()),
    "sinks": Absent(Text()),
    "learned": Absent(ListOf(Text())),
    "dropout": Absent(Flag()),
}
PARAMS = Each(_FLOAT)
CONFIG = Each((Number(), Text()))
VERSIONS: dict[str, Any] = {"flashgen": Text(), "triton": Text(), "torch": Text(), "driver": Text()}
RECORD: dict[str, Any] = {
    "target": TARGET,
    "workload": {
        "spec": SPEC,
        "batch": _COUNT,
        "heads": _COUNT,
        "kv_heads": _COUNT,
        "q_len": _COUNT,
        "k_len": _COUNT,
        "params": PARAMS,
        "total_q": Absent(_COUNT),
        "total_k": Absent(_COUNT),
        "documents": Absent(_COUNT),
    },
    "family": Text(),
    "config": CONFIG,
    "measurement": {
        "status": Text(),
        "median_us": _MAYBE_FLOAT,
        "min_us": _MAYBE_FLOAT,
        "max_us": _MAYBE_FLOAT,
        "passes": _COUNT,
        "max_error": _MAYBE_FLOAT,
        "registers": _MAYBE_COUNT,
        "spill_bytes": _MAYBE_COUNT,
        "shared_bytes": _MAYBE_COUNT,
        "source": Text(),
        "reason": Text(MAX_REASON, lines=True),
    },
    "kernel_hash": Text(),
    "versions": VERSIONS,
    "admission": Text(),
    "density": Text(),
    "created_at": Moment(),
}
"""A record's keys and the form of each value. Not one may be missing, and none may be added."""


def checked(value: Any, form: Any, where: str) -> Any:
    """The value itself, if it has the form.

    Raises:
        InvalidArgument: it has not; the message names the place.
    """
    match form:
        case dict():
            if type(value) is not dict:
                raise InvalidArgument(f"{where} must be an object, not {shown(value)}")
            needed = {name for name, each in form.items() if not isinstance(each, Absent)}
            for odd in sorted((needed - value.keys()) | (value.keys() - form.keys()))[:1]:
                kind = "is missing" if odd in form else "is not known; was it written by a newer FlashGen?"
                raise InvalidArgument(f"{where}{_key(odd)} {kind}")
            for name, each in value.items():
                checked(each, form[name], f"{where}.{name}")
        case Absent(inner):
            checked(value, inner, where)
        case Maybe(inner):
            if value is not None:
                checked(value, inner, where)
        case Each(inner, most):
            if type(value) is not dict or len(value) > most:
                raise InvalidArgument(f"{where} must be an object of at most {most} entries")
            for name, each in value.items():
                if not _fits(name, Text()):
                    raise InvalidArgument(f"{where} must not have {shown(name)}; a key is {Text()}")
                checked(each, inner, where + _key(name))
        case ListOf(inner, most):
            if type(value) is not list or len(value) > most:
                raise InvalidArgument(f"{where} must be a list of at most {most} entries")
            for number, each in enumerate(value):
                checked(each, inner, f"{where}[{number}]")
        case _:
            forms = form if isinstance(form, tuple) else (form,)
            if not any(_fits(value, each) for each in forms):
                allowed = ", or ".join(map(str, forms))
                raise InvalidArgument(f"{where} must not be {shown(value)}; allowed: {allowed}")
    return value


def plain(text: str) -> str:
    """The text with what no `Text` may hold replaced by `?`."""
    return _UNPRINTABLE.sub("?", text)


def shown(value: Any) -> str:
    """Any value for a message: short, and on one line."""
    return brief(repr(value), 80)


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises unless an argument is a whole number in a range, whatever counts it: numpy's integers do.

    Raises:
        InvalidArgument: it is none, or out of range; the message says what is allowed.
    """
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidArgument(f"{name}={shown(value)} must be a whole number, {allowed}")
    if int(value) < least or (most is not None and int(value) > most):
        raise InvalidArgument(f"{name}={shown(value)} must be {allowed}")


def brief(text: str, limit: int = 400) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _key(name: str) -> str:
    """A key as it continues the path to a value."""
    return f".{name[:MAX_NAME]}" if name.isidentifier() else f"[{shown(name)}]"


def _is_moment(value: Any) -> bool:
    if type(value) is not str or not _MOMENT.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value[:19])
    except ValueError:
        return False
    return True


def _fits(value: Any, form: Text | Number | Moment | Flag) -> bool:
    match form:
        case Moment():
            return _is_moment(value)
        case Text(limit, lines):
            if type(value) is not str or len(value) > limit or _UNPRINTABLE.search(value):
                return False
            return lines or not ("\n" in value or "\t" in value)
        case Number(whole, least, most, optional):
            if value is None:
                return optional
            if type(value) is float:
                return not whole
            return type(value) is int and least <= value <= most and value > -MAX_INT
    return type(value) is bool
