"""Records as lines of JSON: the form in git, in exports and between machines.

Lines may come from anywhere. They are data only: every key and type is checked against `form.RECORD`, sizes
are limited, and expressions are parsed by `Rule.parse`, never executed. Needs the standard library alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from flashgen.codegen.families import FAMILIES, foreign
from flashgen.codegen.family import UNORDERED
from flashgen.errors import FlashGenError, InvalidArgument
from flashgen.spec import form
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import Config
from flashgen.spec.record import Record
from flashgen.spec.target import KIB

MAX_LINE = 4 * form.MAX_REASON
"""Characters of one line: more than the longest record that a store takes. Most take about 1,100."""

NO_RECORD = (
    FlashGenError,
    ArithmeticError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    MemoryError,
    SyntaxError,
)
"""What reading a record raises where it is none: damage, or what a newer FlashGen wrote."""


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
        return foreign_record(form.checked(json.loads(text), form.RECORD, "record"))
    except NO_RECORD as error:
        raise InvalidArgument(problem_of(error)) from error


def problem_of(error: BaseException) -> str:
    """Why something is no record, in one line, from one of `NO_RECORD`."""
    told = str(error)
    if not isinstance(error, FlashGenError):
        told = f"not a record: {told or type(error).__name__}"
    return form.brief(form.plain(told))


@lru_cache(maxsize=1024)
def parse_spec(text: str) -> AttentionSpec:
    """A spec from the JSON text of its `to_json`; one object for one text."""
    return AttentionSpec.from_json(form.checked(json.loads(text), form.SPEC, "spec"))


def check_record(record: Record) -> None:
    """What every store asks of a record beyond its types.

    Raises:
        InvalidArgument: a record that could not be looked up, or not be read back as it is.
    """
    target, workload, versions = record.target, record.workload, record.versions
    of_versions = (versions.flashgen, versions.triton, versions.torch, versions.driver)
    of_kernel = (record.config.family, record.kernel_hash, record.admission)
    _check_texts((target.name, target.vendor, *of_kernel, record.density, *of_versions))
    form.checked(record.created_at, form.Text(), "created_at")
    shared = target.shared_per_block
    if shared % KIB:
        raise InvalidArgument(
            f"target {target.key}: shared_per_block={shared} must be whole KiB, as its key shows it"
        )
    spec = workload.spec
    rules = [rule for rule in (spec.mask, spec.score_mod) if rule is not None]
    wanted = [name for rule in rules for name, _ in rule.params]
    given = [name for name, _ in workload.params]
    if given != wanted:
        raise InvalidArgument(f"workload {workload.name} has parameters {given}, its spec {wanted}")
    for name, value in workload.params:
        if not math.isfinite(value):
            raise InvalidArgument(f"workload {workload.name}: {name}={value} must be finite")


_TEXTS = (
    "target",
    "vendor",
    "family",
    "kernel_hash",
    "admission",
    "density",
    "flashgen",
    "triton",
    "torch",
    "driver",
)


@lru_cache(maxsize=4096)
def _check_texts(texts: tuple[str, ...]) -> None:
    """Remembered, for records share theirs: it was a third of the time of reading one."""
    for name, text in zip(_TEXTS, texts, strict=True):
        form.checked(text, form.Text(), name)


def in_todays_class(record: Record) -> Record:
    """The record as it would be written today. Before kernels whose sums have no order had a class of their
    own, theirs was that of kernels that repeat, whose best they would hide."""
    known = _admission(record.config)
    return replace(record, admission=known) if known == record.admission + UNORDERED else record


@lru_cache(maxsize=4096)
def _admission(config: Config) -> str:
    """The class that its family gives a config; empty where no family here has it."""
    return "" if foreign(config) else FAMILIES[config.family].admission(config)


def foreign_record(data: dict[str, Any]) -> Record:
    """A record from outside, whose form is checked. What is asked besides: its config is one of its family.

    A database keeps records whose config is gone; those of a family that is not known here stay everywhere.

    Raises:
        InvalidArgument: as `check_record`, or no kernel could be rendered from the record.
    """
    record = in_todays_class(Record.from_json(data))
    check_record(record)
    family = FAMILIES.get(record.config.family)
    if family is None:
        return record
    if reason := family.owns(record.config):
        raise InvalidArgument(f"config of {record.workload.name}: {reason}")
    if record.admission != (admission := _admission(record.config)):
        raise InvalidArgument(
            f"admission={record.admission!r} of {record.config.name} must be {admission!r}; it follows from "
            "the config: correct it, or measure again with flashgen tune"
        )
    return record


def read(source: Path | TextIO) -> Iterator[Line]:
    """Reads a file; blank lines are passed over. A line that is no record comes with its problem.

    Raises:
        OSError: the file cannot be opened.
    """
    return (parsed(number, text) for number, text in texts(source))


def parsed(number: int, text: str) -> Line:
    """A line's text as a record, or with its problem."""
    try:
        return Line(number, parse_line(text))
    except InvalidArgument as error:
        return Line(number, None, str(error))


def spec_key(text: str) -> str:
    """The key of the spec in a line's text, a tenth of the work of `parse_line`; empty if there is none."""
    try:
        return parse_spec(json.dumps(json.loads(text)["workload"]["spec"])).key
    except NO_RECORD:
        return ""


def texts(source: Path | TextIO) -> Iterator[tuple[int, str]]:
    """Number and text of a file's lines, but for blank ones; of one that is too long, its beginning.

    Raises:
        OSError: the file cannot be opened.
    """
    if isinstance(source, Path):
        # A byte that is no UTF-8 spoils its line only; `utf-8-sig` passes over an editor's byte order mark.
        with source.open(encoding="utf-8-sig", errors="replace") as file:
            yield from texts(file)
        return
    number, inside = 1, False  # `inside`: in the rest of a line that was too long
    for text in iter(lambda: source.readline(MAX_LINE + 2), ""):
        if not inside and text.strip():
            yield number, text.rstrip("\n")
        inside = not text.endswith("\n")
        number += not inside
