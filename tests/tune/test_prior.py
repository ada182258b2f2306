"""What a study knows before it measures anything."""

from __future__ import annotations

import math
from dataclasses import replace

import landscape
import pytest

from flashgen.spec.record import Measurement, Status
from flashgen.tune.model import expected_us
from flashgen.tune.prior import knowledge

SPACE = landscape.space()
WORK, NEAR, FAR = (landscape.workload(seq) for seq in (4096, 2048, 512))


def test_without_records_there_is_what_the_model_expects() -> None:
    known = knowledge(WORK, SPACE, landscape.TARGET, [])
    assert known.nearby == {}
    assert known.expected_us == {each: expected_us(WORK, each, landscape.TARGET) for each in SPACE}


def test_the_nearest_workload_tells_the_models_errors_and_this_one_does_not() -> None:
    stored = [landscape.record(FAR, SPACE[0], 100.0)]
    stored += [landscape.record(NEAR, each, 500.0 + at) for at, each in enumerate(SPACE[:3])]
    stored.append(landscape.record(WORK, SPACE[0], 900.0))
    slow = Measurement(Status.SLOW, 2000.0, 2000.0, 2000.0, 3, reason="clearly behind")
    stored.append(replace(landscape.record(NEAR, SPACE[3], 1.0), measurement=slow))
    stored.append(landscape.record(NEAR, SPACE[4], None))  # failed: no time to learn from
    stored.append(landscape.record(NEAR, SPACE[1], 777.0))  # measured again: this counts
    nearby = knowledge(WORK, SPACE, landscape.TARGET, stored).nearby
    measured = {SPACE[0]: 500.0, SPACE[1]: 777.0, SPACE[2]: 502.0, SPACE[3]: 2000.0}
    assert nearby.keys() == measured.keys()
    for config, time in measured.items():
        assert nearby[config] == pytest.approx(math.log(time / expected_us(NEAR, config, landscape.TARGET)))


def test_of_equally_near_workloads_the_one_with_more_records_tells() -> None:
    above = landscape.workload(8192)
    stored = [landscape.record(NEAR, SPACE[0], 500.0)]
    stored += [landscape.record(above, each, 3000.0) for each in SPACE[5:9]]
    assert set(knowledge(WORK, SPACE, landscape.TARGET, stored).nearby) == set(SPACE[5:9])
