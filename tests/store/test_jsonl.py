"""Records as lines: exact, checked, and never executed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import sample_records as make

from flashgen.errors import InvalidArgument
from flashgen.spec import form
from flashgen.spec.record import Status
from flashgen.store import jsonl


@pytest.mark.parametrize("record", [make.full(), make.record(), make.record(status=Status.WRONG)])
def test_a_line_reads_back(record: Any) -> None:
    line = jsonl.format_line(record)
    assert "\n" not in line
    found = jsonl.parse_line(line)
    assert found == record
    assert jsonl.format_line(found) == line


def test_numbers_are_untouched() -> None:
    data = json.loads(jsonl.format_line(make.full()))
    assert data["measurement"]["median_us"] == 12.345678901234567
    assert data["workload"]["params"] == {"left": 1023, "right": 0, "cap": 30.5}
    assert type(data["workload"]["params"]["left"]) is int


def edited(path: str, edit: Callable[[dict[str, Any], str], object]) -> str:
    """A good line, but for one place."""
    data: Any = json.loads(jsonl.format_line(make.full()))
    *parents, last = path.split(".")
    place = data
    for name in parents:
        place = place[name]
    edit(place, last)
    return json.dumps(data)


def put(path: str, value: Any) -> str:
    return edited(path, lambda place, last: place.__setitem__(last, value))


def drop(path: str) -> str:
    return edited(path, dict.pop)


MASK = "workload.spec.mask.text"
BAD: dict[str, tuple[str, str]] = {
    "no json": ("{", "not a record: Expecting property name"),
    "a list": ("[]", "record must be an object, not []"),
    "nothing": ("null", "record must be an object"),
    "deep": ("[" * 100_000, "not a record"),
    "huge": (put("density", "x" * 300_000), "more than 262144 characters"),
    "huge number": (put("target.arch", 1).replace('"arch": 1', '"arch": ' + "9" * 5000), "not "),
    "missing": (drop("measurement.reason"), "record.measurement.reason is missing"),
    "unknown": (put("measurement.power", 1), "record.measurement.power is not known; was it written by"),
    "text for a number": (
        put("measurement.median_us", "12"),
        "record.measurement.median_us must not be '12'",
    ),
    "truth for a number": (put("workload.batch", True), "record.workload.batch must not be True"),
    "float for a count": (put("workload.batch", 1.5), "allowed: a whole number of at least 0"),
    "number for a text": (put("kernel_hash", 5), "record.kernel_hash must not be 5"),
    "long text": (put("kernel_hash", "a" * 257), "a text of at most 256 characters"),
    "nul": (put("measurement.reason", "a\0b"), "without control characters"),
    "half a pair": (put("density", "\ud800"), "or half surrogate pairs"),
    "past 64 bits": (put("workload.q_len", 2**63), "record.workload.q_len must not be"),
    "too small": (put("target.sm_count", 0), "a whole number of at least 1"),
    "odd heads": (put("workload.kv_heads", 3), "heads=28 must be a multiple of kv_heads=3"),
    "unknown status": (put("measurement.status", "FINE"), "unknown status 'FINE'; known: CRASH, NO_COMPILE"),
    "endless window": (put("workload.params.left", math.inf), "left=inf must be finite"),
    "ok without time": (put("measurement.median_us", None), "an OK measurement needs a time"),
    "faster than any kernel": (put("measurement.median_us", 1e-300), "needs a time of at least 0.1 us"),
    "shortest below 0": (put("measurement.min_us", -1), "min_us=-1 of an OK measurement must be 0 or more"),
    "shortest unknown": (put("measurement.min_us", math.nan), "min_us=nan of an OK measurement must be 0"),
    "longest below 0": (put("measurement.max_us", -1.0), "max_us=-1.0 of an OK measurement must be 0"),
    "longest endless": (put("measurement.max_us", math.inf), "max_us=inf of an OK measurement must be 0"),
    "error below 0": (put("measurement.max_error", -1), "max_error=-1 of an OK measurement must be 0"),
    "error unknown": (put("measurement.max_error", math.nan), "max_error=nan of an OK measurement must be 0"),
    "endless": (put("measurement.median_us", math.inf), "needs a time of at least 0.1 us"),
    "no config": (put("config", {}), "attention_fwd: block_m=None; allowed: 16, 32"),
    "half a config": (drop("config.loads"), "attention_fwd: loads=None; allowed: tma, pointer"),
    "another family's value": (put("config.num_stages", "x"), "num_stages='x'; allowed: 1, 2, 3, 4"),
    "no such value": (put("config.block_m", 2048), "block_m=2048; allowed: 16, 32"),
    "config in another order": (
        edited("config", lambda place, last: place.__setitem__(last, dict(sorted(place[last].items())))),
        "in another form than that of attention_fwd: block_m, block_n",
    ),
    "admission of another config": (put("admission", "any"), "_tma_heads must be 'tma'"),
    "a name a terminal obeys": (put("target.name", "\x1b[31mhi"), "target.name must not be '\\x1b[31mhi'"),
    "a key a terminal obeys": (put("measurement.\x1b[31m", 1), "measurement['\\x1b[31m'] is not known"),
    "a tunable a terminal obeys": (put("config.\x1b[31m", 1), "must not have '\\x1b[31m'"),
    "a name of two lines": (put("kernel_hash", "a\nb"), "record.kernel_hash must not be 'a\\nb'"),
    "text the other way round": (put("density", "\u202eabc"), "without control characters"),
    "a reason a terminal obeys": (put("measurement.reason", "a\x9b31m"), "without control characters"),
    "unknown dtype": (put("workload.spec.dtype", "int4"), "dtype='int4' is not served"),
    "unknown tunable": (put("config", {"speed": 11}), "'speed' is no tunable"),
    "many tunables": (put("config", {f"t{i}": 1 for i in range(65)}), "at most 64 entries"),
    "code": (put(MASK, "__import__('os').system('true')"), "__import__"),
    "deep expression": (put(MASK, "(" * 4000 + "True" + ")" * 4000), "("),
    "long expression": (put(MASK, "True & " * 4000), "at most 20000 characters"),
    "wrong parameters": (put("workload.params", {"left": 1}), "has parameters ['left'], its spec ['left', "),
    "no number": (put("workload.params.cap", float("nan")), "cap=nan must be finite"),
    "odd shared memory": (put("target.shared_per_block", 1000), "must be whole KiB"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_refused_with_the_reason(name: str) -> None:
    line, reason = BAD[name]
    with pytest.raises(InvalidArgument) as error:
        jsonl.parse_line(line)
    assert reason in str(error.value)
    assert len(str(error.value)) <= 400


def test_reading_goes_on_after_bad_lines(tmp_path: Path) -> None:
    good = jsonl.format_line(make.record())
    path = tmp_path / "records.jsonl"
    text = f"\ufeff{good}\n\nnonsense\n{'x' * 600_000}\n".encode() + b"\xff\xfe\n" + good.encode()
    path.write_bytes(text)
    lines = list(jsonl.read(path))
    assert [(line.number, line.record is not None) for line in lines] == [
        (1, True),
        (3, False),
        (4, False),
        (5, False),
        (6, True),
    ]
    assert lines[1].problem.startswith("not a record: Expecting value")
    assert lines[2].problem == "a line of more than 262144 characters is no record"
    assert [line.number for line in jsonl.read(StringIO(f"\n{good}\n"))] == [2]


def test_plain_text_is_kept_and_what_cannot_be_stored_is_marked() -> None:
    assert form.plain("ünïcode \n 注意") == "ünïcode \n 注意"
    assert form.plain("a\0b\ud800c\x1b[2J") == "a?b?c?[2J"
