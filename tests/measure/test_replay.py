"""Recorded measurements in place of a GPU."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tune"))

import landscape

from flashgen.measure.replay import NoCompiler, Replay
from flashgen.measure.worker import MeasuringFailed, Trial
from flashgen.spec.attention import CallFacts
from flashgen.spec.record import Status

WORKLOAD = landscape.workload()
SPACE = landscape.space()


def test_answers_are_the_recorded_ones() -> None:
    replay = Replay(landscape.records())
    assert replay.prepare(WORKLOAD) == "full"
    for config in SPACE[::20]:
        answer = replay.measure(Trial(WORKLOAD, config, None))
        assert answer.median_us == landscape.time_us(config)
        assert (answer.status is Status.OK) == (answer.median_us is not None)
    assert replay.best_us(WORKLOAD) == landscape.best_us()
    assert replay.workloads == (WORKLOAD,)


def test_the_last_record_of_a_config_counts() -> None:
    config = SPACE[0]
    replay = Replay([landscape.record(WORKLOAD, config, time) for time in (700.0, 650.0)])
    assert replay.measure(Trial(WORKLOAD, config, None)).median_us == 650.0


def test_noise_has_the_size_asked_for_and_passes_average_it() -> None:
    config = SPACE[0]
    replay = Replay([landscape.record(WORKLOAD, config, 1000.0)], noise=0.05, seed=1)
    single = [replay.measure(Trial(WORKLOAD, config, None)).median_us or 0 for _ in range(400)]
    many = [replay.compare([Trial(WORKLOAD, config, None)], 25)[0].median_us or 0 for _ in range(400)]
    assert statistics.mean(single) == pytest.approx(1000, rel=0.01)
    assert statistics.stdev(single) == pytest.approx(50, rel=0.15)
    assert statistics.stdev(many) == pytest.approx(10, rel=0.15)
    again = Replay([landscape.record(WORKLOAD, config, 1000.0)], noise=0.05, seed=1)
    assert again.measure(Trial(WORKLOAD, config, None)).median_us == single[0]


def test_what_was_not_recorded_is_told() -> None:
    replay = Replay(landscape.records()[:5])
    answer = replay.measure(Trial(WORKLOAD, SPACE[200], None))
    assert (answer.status, answer.reason) == (Status.NO_COMPILE, "not among the recorded configs")
    with pytest.raises(MeasuringFailed, match="no records of b8h32kv8q2048k2048; there are some of: b4h32"):
        replay.prepare(landscape.workload(2048))


def test_no_compiler_renders_and_compiles_nothing() -> None:
    compiler = NoCompiler(landscape.TOOLCHAIN)
    source = compiler.source(WORKLOAD.spec, SPACE[0])
    assert source.hash == landscape.record(WORKLOAD, SPACE[0], 1.0).kernel_hash
    compiled = compiler.submit(source, CallFacts()).result(timeout=0)
    assert (compiled.artifact, compiled.failure) == (None, None)


def test_a_known_hash_needs_no_rendering() -> None:
    compiler = NoCompiler(landscape.TOOLCHAIN, hashes={(WORKLOAD.spec, SPACE[0]): "0123456789abcdef"})
    rendered, known = compiler.source(WORKLOAD.spec, SPACE[1]), compiler.source(WORKLOAD.spec, SPACE[0])
    assert (known.hash, known.text, known.config) == ("0123456789abcdef", "", SPACE[0])
    assert known.name.endswith(SPACE[0].name) and rendered.text
