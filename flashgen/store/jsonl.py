"""Records as lines of JSON: the form in git, in exports and between machines.

Lines may come from anywhere. They are data only: every key and type is checked against `FORM`, sizes are
limited, and expressions are parsed by `Rule.parse`, never executed. Needs the standard library alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from flashgen.errors import FlashGenError, InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.record import Record
from flashgen.spec.target import KIB

MAX_LINE = 256 * 1024
"""Characters of one line. A record takes about 1,100; a compiler's reason may be long."""
MAX_NAME = 256
MAX_EXPRESSION = 8192
MAX_ENTRIES = 64
MAX_INT = 2**62
"""Whole numbers stay below this, so that every database column holds them."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text of at most `limit` characters, each of which every database and file can hold."""

    limit: int = MAX_NAME

    def __str__(self) -> str:
        return f"a text of at most {self.limit} characters, without NUL or half a surrogate pair"


@dataclass(frozen=True, slots=True)
class Number:
    """A number; `whole` and at least `least`, or any float."""

    whole: bool = True
    least: float = 0
    optional: bool = False

    def __str__(self) -> str:
        number = f"a whole number of at least {self.least}" if self.whole else "a number"
        return f"{number} or null" if self.optional else number


@dataclass(frozen=True, slots=True)
class Each:
    """An object of any keys, whose values have one of these forms."""

    forms: tuple[Text | Number, ...]


@dataclass(frozen=True, slots=True)
class Flag:
    """A truth value."""

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Maybe:
    """null, or an object of this form."""

    form: dict[str, Any]


_RULE = {"name": Text(), "text": Text(MAX_EXPRESSION)}
_COUNT, _MAYBE_COUNT = Number(), Number(optional=True)
_FLOAT, _MAYBE_FLOAT = Number(False, -math.inf), Number(False, -math.inf, optional=True)

FORM: dict[str, Any] = {
    "target": {
        "name": Text(),
        "vendor": Text(),
        "arch": Number(least=1),
        "sm_count": Number(least=1),
        "shared_per_block": _COUNT,
        "l2_mib": _COUNT,
        "bandwidth": _COUNT,
    },
    "workload": {
        "spec": {
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
        },
        "batch": _COUNT,
        "heads": _COUNT,
        "kv_heads": _COUNT,
        "q_len": _COUNT,
        "k_len": _COUNT,
        "params": Each((_FLOAT,)),
    },
    "family": Text(),
    "config": Each((Number(), Text())),
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
        "reason": Text(MAX_LINE),
    },
    "kernel_hash": Text(),
    "versions": {"flashgen": Text(), "triton": Text(), "torch": Text(), "driver": Text()},
    "admission": Text(),
    "density": Text(),
    "created_at": Text(),
}
"""A record's keys and the form of each value. Not one may be missing, and none may be added."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file: a record, or why it is none."""

    number: int
    record: Record | None
    problem: str = ""


def format_line(record: Record) -> str:
    """One line without its end; keys in a fixed order, numbers as Python prints them (exact)."""
    return json.dumps(record.to_json(), ensure_ascii=False)


def parse_line(text: str) -> Record:
    """The inverse of `format_line`.

    Raises:
        InvalidArgument: the line is too long, no JSON, or no record; the message names the place.
    """
    if len(text) > MAX_LINE:
        raise InvalidArgument(f"a line of more than {MAX_LINE} characters is no record")
    try:
        data = json.loads(text)
        _check(data, FORM, "record")
        record = Record.from_json(data)
        check_record(record)
        return record
    except FlashGenError as error:
        raise InvalidArgument(_brief(str(error))) from error
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError, SyntaxError) as error:
        raise InvalidArgument(_brief(f"not a record: {error or type(error).__name__}")) from error


@lru_cache(maxsize=1024)
def parse_spec(text: str) -> AttentionSpec:
    """A spec from the JSON text of its `to_json`; one object for one text."""
    return AttentionSpec.from_json(json.loads(text))


def check_record(record: Record) -> None:
    """What every store asks of a record beyond its types.

    Raises:
        InvalidArgument: a record that could not be looked up, or not be read back as it is.
    """
    shared = record.target.shared_per_block
    if shared % KIB:
        raise InvalidArgument(
            f"target {record.target.key}: shared_per_block={shared} must be whole KiB, as its key shows it"
        )
    spec = record.workload.spec
    rules = [rule for rule in (spec.mask, spec.score_mod) if rule is not None]
    wanted = [name for rule in rules for name, _ in rule.params]
    given = [name for name, _ in record.workload.params]
    if given != wanted:
        raise InvalidArgument(f"workload {record.workload.name} has parameters {given}, its spec {wanted}")
    for name, value in record.workload.params:
        if not math.isfinite(value):
            raise InvalidArgument(f"workload {record.workload.name}: {name}={value} must be finite")


def read(source: Path | TextIO) -> Iterator[Line]:
    """Reads a file; blank lines are passed over. A line that is no record comes with its problem.

    Raises:
        OSError: the file cannot be opened.
    """
    if isinstance(source, Path):
        # A byte that is no UTF-8 spoils its line only; `utf-8-sig` passes over an editor's byte order mark.
        with source.open(encoding="utf-8-sig", errors="replace") as file:
            yield from read(file)
        return
    number, inside = 1, False  # `inside`: in the rest of a line that was too long
    for text in iter(lambda: source.readline(MAX_LINE + 2), ""):
        if not inside and text.strip():
            try:
                yield Line(number, parse_line(text.rstrip("\n")))
            except InvalidArgument as error:
                yield Line(number, None, str(error))
        inside = not text.endswith("\n")
        number += not inside


def plain(text: str) -> str:
    """The text with what no database or file can hold (NUL, half a surrogate pair) replaced by `?`."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def _check(value: Any, form: Any, where: str) -> None:
    match form:
        case dict():
            if type(value) is not dict:
                raise InvalidArgument(f"{where} must be an object, not {_shown(value)}")
            for odd in sorted(set(form) ^ set(value))[:1]:
                kind = "is missing" if odd in form else "is not known; was it written by a newer FlashGen?"
                raise InvalidArgument(f"{where}.{odd[:MAX_NAME]} {kind}")
            for name, each in form.items():
                _check(value[name], each, f"{where}.{name}")
        case Maybe(inner):
            if value is not None:
                _check(value, inner, where)
        case Each(forms):
            if type(value) is not dict or len(value) > MAX_ENTRIES:
                raise InvalidArgument(f"{where} must be an object of at most {MAX_ENTRIES} entries")
            for name, entry in value.items():
                if len(name) > MAX_NAME or not any(_fits(entry, each) for each in forms):
                    raise InvalidArgument(f"{where}.{name[:MAX_NAME]} must not be {_shown(entry)}")
        case _:
            if not _fits(value, form):
                raise InvalidArgument(f"{where} must not be {_shown(value)}; allowed: {form}")


def _fits(value: Any, form: Text | Number | Flag) -> bool:
    match form:
        case Text(limit):
            return type(value) is str and len(value) <= limit and plain(value) == value
        case Number(whole, least, optional):
            if value is None:
                return optional
            if type(value) is float:
                return not whole
            return type(value) is int and least <= value < MAX_INT and value > -MAX_INT
    return type(value) is bool


def _shown(value: Any) -> str:
    return _brief(repr(value), 80)


def _brief(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
