"""What every `RecordStore` must do. To hold another one to it, add a function to `STORES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sample_records as make

from flashgen.bundle.load import Bundle
from flashgen.bundle.manifest import Manifest, parse
from flashgen.codegen.families import find_family
from flashgen.spec.attention import Workload
from flashgen.spec.masks import causal, document
from flashgen.spec.record import CANDIDATES, Record, RecordStore, Status, Versions, rank
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.store.shipped import ShippedRecords
from flashgen.store.transfer import export_tree

Open = Callable[..., RecordStore]


def in_memory(folder: Path, records: Sequence[Record], today: Callable[[Record], str] | None) -> RecordStore:
    database = TuningDB("sqlite://", current_hash=today)
    database.add_many(records)
    return database


def on_disk(folder: Path, records: Sequence[Record], today: Callable[[Record], str] | None) -> RecordStore:
    with TuningDB(folder / "tuning.db") as database:
        database.add_many(records)
    return TuningDB(folder / "tuning.db", readonly=True, current_hash=today)


def shipped(folder: Path, records: Sequence[Record], today: Callable[[Record], str] | None) -> RecordStore:
    export_tree(records, folder)
    return ShippedRecords(folder, current_hash=today)


def bundle(folder: Path, records: Sequence[Record], today: Callable[[Record], str] | None) -> RecordStore:
    if any(record.measurement.status is not Status.OK for record in records):
        pytest.skip("a bundle has OK records only")
    held = tuple(record for record in records if record.target == make.H200)
    stale = tuple(record for record in held if today is not None and today(record) != record.kernel_hash)
    manifest = Manifest(make.H200, Versions("0.1.0", "3.6.0"), "2026-11-29T12:00:00Z", held, (), {}, stale)
    return Bundle(folder, parse(manifest.dumps()), {})


STORES = (in_memory, on_disk, shipped, bundle)


@pytest.fixture(params=STORES, ids=lambda each: each.__name__)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Makes a store that holds the given records; `today` says which hash a config renders to now."""

    def make_store(*records: Record, today: Callable[[Record], str] | None = None) -> RecordStore:
        return request.param(tmp_path, records, today)

    return make_store


POINTER, TMA = make.config(loads="pointer"), make.config(loads="tma")


def times(found: Sequence[Record]) -> list[float]:
    return [record.median_us for record in found]


def test_a_record_comes_back_as_it_was(store: Open) -> None:
    record = make.full()
    (found,) = store(record).ranked(record.workload, record.target)
    assert found == record
    assert found.to_json() == record.to_json()


def test_an_unknown_workload_gets_an_empty_answer(store: Open) -> None:
    opened = store(make.record())
    assert opened.ranked(make.full().workload, make.H200) == ()
    assert opened.ranked(make.workload(), find_target("nvidia-a100")) == ()


def test_the_fastest_comes_first(store: Open) -> None:
    records = [make.record(time, conf=make.config(stages=n)) for n, time in ((1, 90.0), (2, 70.0), (3, 80.0))]
    assert times(store(*records).ranked(make.workload(), make.H200)) == [70.0, 80.0, 90.0]


def test_the_exact_bucket_comes_before_nearer_times(store: Open) -> None:
    lengths = {512: 10.0, 1024: 20.0, 8192: 200.0}
    records = [make.record(time, work=make.workload(n), conf=make.config(stages=1 + i))
               for i, (n, time) in enumerate(lengths.items())]  # fmt: skip
    opened = store(*records)
    assert times(opened.ranked(make.workload(1000), make.H200)) == [20.0, 10.0, 200.0]
    assert times(opened.ranked(make.workload(8192), make.H200)) == [200.0, 20.0, 10.0]
    assert times(opened.ranked(make.workload(131072), make.H200)) == [200.0, 20.0, 10.0]


def test_times_compare_within_one_size_only(store: Open) -> None:
    # Both are in the bucket of 4096, but one computes less than a third.
    small = make.record(30.0, work=make.workload(2100), conf=make.config(stages=1))
    large = make.record(100.0, work=make.workload(4096), conf=make.config(stages=2))
    opened = store(small, large)
    assert times(opened.ranked(make.workload(4000), make.H200)) == [100.0, 30.0]
    assert times(opened.ranked(make.workload(2200), make.H200)) == [30.0, 100.0]


def test_measured_comes_before_modelled(store: Open) -> None:
    modelled = make.record(10.0, source="model", conf=make.config(stages=1))
    measured = make.record(90.0, conf=make.config(stages=2))
    assert times(store(modelled, measured).ranked(make.workload(), make.H200)) == [90.0, 10.0]


def test_a_measurement_replaces_the_model_of_the_same_kernel(store: Open) -> None:
    modelled = make.record(10.0, source="model", created_at="2026-11-30T00:00:00Z")
    measured = make.record(90.0)
    assert times(store(measured, modelled).ranked(make.workload(), make.H200)) == [90.0]


def test_todays_kernels_come_before_stale_ones(store: Open) -> None:
    stale = make.record(50.0, conf=make.config(stages=1), hash="0000000000000000")
    today = make.record(60.0, conf=make.config(stages=2), hash="1111111111111111")
    opened = store(stale, today, today=lambda record: "1111111111111111")
    assert times(opened.ranked(make.workload(), make.H200)) == [60.0, 50.0]


def test_stale_records_are_still_hints(store: Open) -> None:
    stale = make.record(50.0, hash="0000000000000000")
    assert times(store(stale, today=lambda record: "1").ranked(make.workload(), make.H200)) == [50.0]


def test_todays_kernel_is_found_behind_many_faster_stale_ones(store: Open) -> None:
    blocks = [(m, n, w, s) for m in (16, 32, 64) for n in (32, 64) for w in (4, 8) for s in (1, 2, 3, 4)]
    old = [make.record(10.0 + i, conf=make.config(*b), hash="0") for i, b in enumerate(blocks)]
    new = make.record(99.0, conf=make.config(128), hash="1", created_at="2026-12-01T00:00:00Z")
    found = store(new, *old, today=lambda record: "1").ranked(make.workload(), make.H200)
    assert times(found)[:2] == [99.0, 10.0]


def test_each_admission_class_is_served_first(store: Open) -> None:
    records = [make.record(50.0 + i, conf=make.config(loads="tma", stages=1 + i)) for i in range(3)]
    records.append(make.record(500.0, conf=POINTER))
    found = store(*records).ranked(make.workload(), make.H200)
    assert times(found) == [50.0, 500.0, 51.0, 52.0]
    assert [record.admission for record in found] == ["tma", "any", "tma", "tma"]


def test_an_admission_class_of_another_bucket_is_served_too(store: Open) -> None:
    blocks = [(m, n, w, s) for m in (16, 32, 64, 128) for n in (32, 64) for w in (4, 8) for s in (1, 2, 3, 4)]
    near = [make.record(50.0 + i, conf=make.config(*b, loads="tma")) for i, b in enumerate(blocks)]
    far = make.record(7.0, conf=POINTER, work=make.workload(512))
    found = store(far, *near).ranked(make.workload(), make.H200)
    assert times(found)[:3] == [50.0, 7.0, 51.0]
    assert len(found) == CANDIDATES


def test_records_from_before_a_class_was_told_apart_hide_none_of_the_other(store: Open) -> None:
    """Kernels whose sums have no order were once of the class of those that repeat; a deterministic call then
    found none of the latter behind four of the former."""
    portable, hopper = find_family("attention_bwd"), find_family("attention_bwd_sm90")
    work = make.workload(spec=make.CAUSAL.backward())
    loose = [
        replace(make.record(10.0 + stages, work=work), config=hopper.find(name), admission="tma")
        for stages in (2, 3)
        for name in (f"s{stages}g1_shared", f"s{stages}g4_shared", f"s{stages}g16_shared")
    ]
    split = replace(
        make.record(50.0, work=work), config=portable.find("m64n64w4s2_tma_heads"), admission="tma"
    )
    found = store(*loose, split).ranked(work, make.H200)
    assert [(each.median_us, each.admission) for each in found[:2]] == [
        (12.0, "tma_unordered"),
        (50.0, "tma"),
    ]


def test_the_newest_measurement_of_a_kernel_counts(store: Open) -> None:
    lucky = make.record(80.0, conf=POINTER, created_at="2026-11-29T12:00:00Z")
    again = make.record(100.0, conf=POINTER, created_at="2026-11-29T12:05:00Z")
    other = make.record(95.0, conf=make.config(stages=3), created_at="2026-11-29T12:01:00Z")
    assert times(store(lucky, again, other).ranked(make.workload(), make.H200)) == [95.0, 100.0]
    assert times(store(again, other, lucky).ranked(make.workload(), make.H200)) == [95.0, 100.0]


@pytest.mark.parametrize("status", [each for each in Status if each is not Status.OK])
def test_only_ok_is_ever_an_answer(store: Open, status: Status) -> None:
    assert store(make.record(status=status)).ranked(make.workload(), make.H200) == ()


def test_a_failure_refuses_that_kernel_under_that_triton_only(store: Open) -> None:
    later = "2026-11-30T00:00:00Z"
    records = (
        make.record(50.0, conf=POINTER),
        make.record(status=Status.CRASH, conf=POINTER, created_at=later),
        make.record(60.0, conf=TMA, hash="a"),
        make.record(status=Status.CRASH, conf=TMA, hash="b", created_at=later),  # of another template
        make.record(70.0, conf=make.config(stages=1), triton="3.6.0"),
        make.record(status=Status.CRASH, conf=make.config(stages=1), triton="3.9.0", created_at=later),
    )
    assert times(store(*records).ranked(make.workload(), make.H200)) == [60.0, 70.0]


def test_a_crash_says_nothing_of_other_sizes_and_a_wrong_result_does(store: Open) -> None:
    crashed, wrong = make.config(stages=1), make.config(stages=2)
    records = (
        make.record(50.0, conf=crashed),
        make.record(status=Status.CRASH, conf=crashed, work=make.workload(512)),
        make.record(40.0, conf=wrong),
        make.record(status=Status.WRONG, conf=wrong, work=make.workload(512)),
    )
    assert times(store(*records).ranked(make.workload(), make.H200)) == [50.0]


def test_a_repeated_check_clears_a_wrong_result(store: Open) -> None:
    records = (
        make.record(status=Status.WRONG, conf=POINTER),
        make.record(40.0, conf=POINTER, created_at="2026-12-01T00:00:00Z"),
    )
    assert times(store(*records).ranked(make.workload(), make.H200)) == [40.0]


def test_a_stale_record_is_no_hint_where_todays_kernel_failed(store: Open) -> None:
    conf = {n: make.config(stages=n) for n in (1, 2, 3, 4)}
    old = [make.record(10.0 * n, conf=conf[n], hash="old") for n in conf]
    later = "2026-12-01T00:00:00Z"
    new = (
        make.record(status=Status.WRONG, conf=conf[1], hash="new", work=make.workload(512), created_at=later),
        make.record(status=Status.CRASH, conf=conf[2], hash="new", created_at=later),
        make.record(status=Status.CRASH, conf=conf[3], hash="new", work=make.workload(512), created_at=later),
        make.record(status=Status.CRASH, conf=conf[4], hash="other", created_at=later),
    )
    found = store(*old, *new, today=lambda record: "new").ranked(make.workload(), make.H200)
    assert times(found) == [30.0, 40.0]


def test_a_stale_record_of_a_config_measured_today_adds_nothing(store: Open) -> None:
    old, new = make.record(50.0, hash="old"), make.record(60.0, hash="new")
    assert times(store(old, new, today=lambda record: "new").ranked(make.workload(), make.H200)) == [60.0]


def test_a_config_stands_in_the_answer_once(store: Open) -> None:
    records = [make.record(10.0 * n, work=make.workload(n)) for n in (512, 1024, 2048)]
    assert times(store(*records).ranked(make.workload(1024), make.H200)) == [10240.0]


def test_the_best_of_thousands(store: Open) -> None:
    # An exhaustive tuning: two spaces of 48 configs at 6 lengths. The database does not read them all.
    blocks = [(m, n, w, s) for m in (16, 32, 128) for n in (32, 64) for w in (4, 8) for s in (1, 2, 3, 4)]
    configs = [make.config(*block, loads=loads) for block in blocks for loads in ("tma", "pointer")]
    records = [
        make.record(20.0 * (j + 1) + (i * 7) % 96 / 10, work=make.workload(512 << j), conf=conf)
        for j in range(6)
        for i, conf in enumerate(configs)
    ]
    opened = store(*records)
    for wanted in (make.workload(4096), make.workload(3000, 9000), make.workload(1, 100, batch=64)):
        assert opened.ranked(wanted, make.H200) == rank(records, wanted)
    exact = opened.ranked(make.workload(4096), make.H200)
    assert len(exact) == CANDIDATES
    assert {record.workload.q_len for record in exact} == {4096}
    assert min(times(exact)) == times(exact)[0] == 80.0


def test_c25_records_of_another_gpu_are_no_answer(store: Open) -> None:
    # The two H100 differ in multiprocessors, the H200 from the H100 in memory.
    pcie = make.record(50.0, target=find_target("nvidia-h100-pcie"))
    sxm = make.record(60.0, target=find_target("nvidia-h100"))
    assert store(pcie, sxm).ranked(make.workload(), make.H200) == ()


def test_c25_one_gpu_under_two_names_is_one_gpu(store: Open) -> None:
    relabelled = replace(make.H200, name="nvidia-h200-nvl-oem")
    opened = store(make.record(50.0, target=relabelled))
    (found,) = opened.ranked(make.workload(), make.H200)
    assert (found.median_us, found.target.name) == (50.0, "nvidia-h200-nvl-oem")


def test_c26_a_config_of_another_family_is_another_kernel(store: Open) -> None:
    # Two templates that share tile names: the slower record of one says nothing of the other.
    first = make.record(50.0)
    second = replace(
        make.record(60.0, created_at="2026-12-01T00:00:00Z"),
        config=replace(make.config(), family="attention_fwd_ws"),
    )
    for records in ((first, second), (second, first)):
        found = store(*records).ranked(make.workload(), make.H200)
        assert [(r.config.family, r.median_us) for r in found] == [
            ("attention_fwd", 50.0),
            ("attention_fwd_ws", 60.0),
        ]


def test_times_of_more_documents_do_not_win_for_fewer(store: Open) -> None:
    """A call does not know how many documents it has: what was tuned without saying serves it, else what was
    tuned with the fewest, whose work is the most.
    """
    spec = replace(make.CAUSAL, mask=(causal() & document()).rule)

    def work(documents: int) -> Workload:
        return replace(make.workload(4096, spec=spec), documents=documents)

    records = [
        make.record(time, work=work(documents), conf=make.config(stages=1 + i))
        for i, (documents, time) in enumerate(((4, 90.0), (32, 20.0)))
    ]
    assert times(store(*records).ranked(work(0), make.H200)) == [90.0, 20.0]
    (found, *_) = store(*records).ranked(work(32), make.H200)
    assert found.workload == work(32) and found == records[1]
    plain = make.record(99.0, work=work(0), conf=make.config(stages=3))
    assert times(store(*records, plain).ranked(work(0), make.H200)) == [99.0, 90.0, 20.0]
    assert Workload.from_json(work(4).to_json()) == work(4) and "documents" not in work(0).to_json()


@pytest.mark.parametrize("many", [False, True])
def test_records_of_packed_sequences_are_found_by_their_totals_too(store: Open, many: bool) -> None:
    """Also among so many that a store does not read them all."""
    spec = replace(make.CAUSAL, addressing="varlen")

    def work(total: int) -> Workload:
        return replace(make.workload(8192, batch=32, spec=spec), total_q=total, total_k=total)

    totals = (8192, 32768, 262144)
    records = [
        make.record(
            10.0 * (1 + i) + number, work=work(total), conf=make.config(stages=1 + i), hash=f"{number:016x}"
        )
        for i, total in enumerate(totals)
        for number in range(200 if many else 1)
    ]
    opened = store(*records)
    for total, best in ((8000, 8192), (30000, 32768), (262144, 262144), (4096, 8192)):
        found = opened.ranked(work(total), make.H200)
        assert found[0].workload == work(best)
    dense = replace(make.workload(8192, batch=32), spec=make.CAUSAL)
    assert opened.ranked(dense, make.H200) == (), "a dense kernel is another"
    assert Workload.from_json(work(30000).to_json()) == work(30000)
