"""The studies here are of the portable family, whose landscape is made up or was recorded (landscape.py).

What a second family adds is asked in test_families_together.py, which puts one back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.codegen.families import FAMILIES

PORTABLE = "attention_fwd"


@pytest.fixture(autouse=True)
def _one_family() -> Iterator[None]:
    table = dict(FAMILIES)
    for name in table.keys() - {PORTABLE}:
        del FAMILIES[name]
    yield
    FAMILIES.clear()
    FAMILIES.update(table)  # in its order, which defaults are tried in
