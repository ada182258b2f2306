"""The whole chain without a GPU: real records, rendering and ptxas; a stand-in for the CUDA driver alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from dispatch_parts import tensors
from fake_cuda import FakeCuda, build, compiler
from sample_records import H200, config, record, workload

import flashgen
from flashgen import api, masks
from flashgen.build.compile import artifact_key, compile_kernel, toolchain
from flashgen.build.inputs import contiguous_facts
from flashgen.build.launch import Kernel
from flashgen.bundle.load import verify_bundle
from flashgen.cli.tune import tune as tune_command
from flashgen.codegen.source import render
from flashgen.errors import InvalidArgument, LaunchFailed, NoGPU, StoreError, UnknownName
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.runtime.policy import Policy, Request, Source
from flashgen.settings import Settings
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.config import Config
from flashgen.spec.record import Record, Versions
from flashgen.spec.target import find_target
from flashgen.store.db import TuningDB
from flashgen.store.notices import StoreWarning
from flashgen.store.today import current_hash
from flashgen.tune.plan import Plan

pytestmark = pytest.mark.compile
SMALL = AttentionSpec(64, 64, "bf16", masks.causal().rule)
TMA, POINTER = config(64, 32, loads="tma"), config(64, 32, loads="pointer")


@pytest.mark.skipif(compiler() is None, reason="no C compiler to build the stand-in with")
def test_a_call_reaches_the_driver_with_the_kernel_of_its_record(tmp_path: Path) -> None:
    cuda = FakeCuda(build(tmp_path))

    def load(request: Request, config: Config) -> Kernel:
        source = render(request.workload.spec, config, toolchain())
        artifact = compile_kernel(source, request.facts, request.target, tmp_path / "cache")
        cuda.expect_kernel(artifact)
        return Kernel(artifact, 0, on=cuda.driver)

    work = workload(512, spec=SMALL, heads=8, kv_heads=2, batch=2)
    with TuningDB(tmp_path / "tuning.db") as db:
        db.add_many([record(10.0, conf=TMA, work=work), record(12.0, conf=POINTER, work=work)])
        policy = Policy(sources=[Source("database", lambda: db, load)], load=load)
        dispatcher = Dispatcher(policy, lambda _: H200, lambda _: 77, capturing=lambda: False)
        q, k, v = tensors(2, 8, 2, 500, 512, 64)
        for tensor, names in (
            (q, "tma"),
            (torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape), "pointer"),
        ):
            for _ in range(2):
                out = dispatcher.attention(tensor, k, v, "causal", None, None, "bhsd", False)
            assert out.shape == q.shape
            launched = cuda.config()
            assert launched["grid"] == (8 * 8 * 2, 1, 1) and launched["block"] == (128, 1, 1)
            assert launched["stream"] == 77
            descriptors = [size for size in cuda.sizes if size == 128]
            assert len(descriptors) == (3 if names == "tma" else 0)
        assert dispatcher.resolves == 2


@pytest.mark.skipif(compiler() is None, reason="no C compiler to build the stand-in with")
def test_after_tuning_the_cache_holds_the_winners_and_a_call_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, path = tmp_path / "cache", str(tmp_path / "tuning.db")
    monkeypatch.setenv("FLASHGEN_CACHE", str(cache))  # of the processes that compile
    monkeypatch.setattr("flashgen.build.compile.SETTINGS", Settings(cache=str(cache)))
    work = api.workloads_of("ci")[0]
    (summary,) = flashgen.tune(work, target="nvidia-h200", plan=Plan(trials=5, seed=3), db=path).summaries
    fastest: dict[str, Config] = {}
    with TuningDB(path) as db:
        records = sorted(db.records(), key=lambda record: record.median_us)
    for each in records:
        fastest.setdefault(each.admission, each.config)
    assert summary.winner is not None and summary.winner.config in fastest.values()
    assert 1 <= len(fastest) < len(records) == 2 * 5, "of each family"
    sources = [render(work.spec, config, toolchain()) for config in fastest.values()]
    keys = {artifact_key(source, contiguous_facts(work), H200) for source in sources}
    found = list((cache / "artifacts").iterdir())
    assert {file.stem for file in found} == keys and len(found) == 3 * len(keys)
    rendered = {file.name.rpartition("-")[0]: file for file in (cache / "kernels").glob("*.py")}
    assert rendered.keys() == {source.name for source in sources}

    def forbidden(*_: object) -> None:
        raise AssertionError("a compile")

    monkeypatch.setattr("flashgen.build.compile._compile", forbidden)
    cuda = FakeCuda(build(tmp_path))
    loaded = []

    def load(request: Request, config: Config) -> Kernel:
        source = render(request.workload.spec, config, toolchain())
        artifact = compile_kernel(source, request.facts, request.target)
        loaded.append((config, artifact))
        cuda.expect_kernel(artifact)
        return Kernel(artifact, 0, on=cuda.driver)

    with TuningDB(path, current_hash=current_hash) as db:
        policy = Policy(sources=[Source("database", lambda: db, load)], load=load)
        dispatcher = Dispatcher(policy, lambda _: H200, lambda _: 77, capturing=lambda: False)
        q, k, v = tensors(work.batch, work.heads, work.kv_heads, work.q_len, work.k_len, work.spec.head_dim)
        q, k, v = q.half(), k.half(), v.half()
        dispatcher.attention(q, k, v, "causal", None, None, "bhsd", False)
    ((config, artifact),) = loaded
    assert config == summary.winner.config
    assert str(rendered[artifact.name]) in artifact.ptx, "profilers find the source"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The suite `ci`, tuned offline for an H200."""
    path = str(tmp_path_factory.mktemp("tuned") / "tuning.db")
    result = flashgen.tune("ci", target="nvidia-h200", plan=Plan(trials=2, finalists=1), db=path)
    assert not result.problem and all(each.winner for each in result.summaries)
    return path


def test_what_was_tuned_is_what_explain_says_and_export_packs(database: str, tmp_path: Path) -> None:
    work = api.workloads_of("ci")[0]
    told = flashgen.explain_workload(work, "nvidia-h200", db=database)
    best = api.best_record(work, "nvidia-h200", db=database)
    assert best is not None and best.measurement.source == "model"
    assert told.runs == best.config.name and "exact bucket: ranked by a model at" in str(told)
    assert json.loads(json.dumps(told.to_json()))["runs"] == best.config.name
    path = flashgen.export("ci", tmp_path / "bundle", target="nvidia-h200", db=database)
    report = verify_bundle(path)
    assert report.ok and report.records >= 2 and "nvidia-h200" in report.target
    assert report.kernels >= 2 * report.records


def test_a_record_of_a_config_that_no_family_has_is_not_exported(tmp_path: Path) -> None:
    work, path = workload(512, spec=SMALL, heads=7, kv_heads=7), str(tmp_path / "tuning.db")
    good = record(9.0, conf=POINTER, work=work)
    odd = [Config("attention_fwd", ()), Config("attention_fwd", (("num_stages", "x"),))]
    odd.append(Config("attention_fwd_ws", POINTER.values))
    with TuningDB(path) as db:
        db.add_many([good, *(replace(good, config=each) for each in odd)])
    assert api._winners(work, H200, path) == [good]


def test_a_workload_without_a_record_is_not_exported_silently(database: str, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"(?s)no tuned record on nvidia-a100 .*b2h4kv2q64k64 .*tune first"
    ):
        flashgen.export("ci", tmp_path / "x", target="nvidia-a100", db=database)
    assert not (tmp_path / "x").exists()


def test_explain_shows_every_step(database: str) -> None:
    work = api.workloads_of("ci")[0]
    told = flashgen.explain_workload(work, "nvidia-l40s", db=database)
    assert [(step.source, step.verdict) for step in told.steps] == [
        ("database", "rejected"),
        ("shipped records", "rejected"),
        ("family default", "rejected"),
        ("family default", "accepted"),
        ("torch", "not reached"),
    ]
    assert told.steps[2].reason == "attention_fwd_sm90 needs sm_90, not cuda 89"
    lines = str(told).splitlines()
    assert lines[0] == (
        "attention, batch 2, heads 4 (2 of k and v), q_len 64, k_len 64, head_dim 32, fp16, mask causal"
    )
    assert lines[1].startswith("on nvidia-l40s") and lines[1].endswith("aligned tensors")
    assert lines[-1].split() == ["torch", "not", "reached"]
    assert lines[2].startswith("runs m") and "pointer" in lines[2]  # no tensor descriptors before sm_90
    assert api.best_record(work, "nvidia-l40s", db=database) is None


def test_steps_stand_in_the_order_in_which_they_are_tried(database: str, tmp_path: Path) -> None:
    order = ["database", "shipped records", "family default", "torch"]
    tuned = flashgen.explain_workload(api.workloads_of("ci")[0], "nvidia-h200", db=database)
    assert [step.source for step in tuned.steps] == order
    assert [step.verdict for step in tuned.steps] == ["accepted", *["not reached"] * 3]
    shipped = api.workloads_of("llama3-8b")[0]
    told = flashgen.explain_workload(shipped, "nvidia-h200", db=f"sqlite:///{tmp_path / 'none.db'}")
    assert [step.source for step in told.steps] == order
    assert [step.verdict for step in told.steps] == ["rejected", "accepted", *["not reached"] * 2]


def test_an_unaligned_call_is_explained_as_such(database: str) -> None:
    work = api.workloads_of("ci")[0]
    told = flashgen.explain_workload(work, "nvidia-h200", facts=CallFacts("unit", tma=False), db=database)
    assert "unit tensors" in told.where and "tma" not in told.runs


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("llama9", UnknownName),
        ("", UnknownName),
        ("missing.json", InvalidArgument),
        (Path("gone"), InvalidArgument),
        (None, InvalidArgument),
        (5, InvalidArgument),
        (["llama3-8b"], InvalidArgument),
    ],
)
def test_workloads_that_are_not_there(what: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        api.workloads_of(what)


@pytest.mark.parametrize("jobs", [0, -3, 1.5, "2"])
@pytest.mark.parametrize("function", [api.tune, api.dry_run])
def test_a_number_of_processes_that_is_none(function: Any, jobs: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=rf"jobs={jobs!r} must be .*at least 1"):
        function("ci", target="nvidia-h200", jobs=jobs, db=str(tmp_path / "tuning.db"))
    assert list(tmp_path.iterdir()) == []


def test_workloads_of_a_models_config(tmp_path: Path) -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "sliding_window": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for what in (tmp_path, str(tmp_path / "config.json")):
        found = api.workloads_of(what)
        assert {(w.heads, w.kv_heads, w.spec.head_dim) for w in found} == {(8, 2, 64)}
        assert dict(found[0].params) == {"left": 255, "right": 0}
    assert api.workloads_of(found[0]) == (found[0],) and api.workloads_of(found) == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_what_needs_one_says_so(tmp_path: Path) -> None:
    for ask in (
        lambda: flashgen.tune("ci"),
        lambda: flashgen.explain_workload(workload()),
        lambda: flashgen.export("ci", tmp_path / "bundle"),
    ):
        with pytest.raises(NoGPU, match=r"(?s)no GPU here.*\ntarget=NAME works without one.*nvidia-h200"):
            ask()
    instead = (
        r"no GPU here[^\n]*\nwarmup loads .* run it where the calls run; explain_workload.*; known: .*h200"
    )
    with pytest.raises(NoGPU, match=instead):  # it takes no target
        flashgen.warmup("ci")


def test_what_is_not_as_it_was_measured_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload(512, spec=SMALL, heads=7, kv_heads=7)
    todays = current_hash(record(conf=POINTER, work=work))
    assert todays is not None
    triton = toolchain().triton
    monkeypatch.setattr(api, "_versions_here", lambda: Versions("0.1.0", triton, driver="570.1"))

    def reason(found: Record) -> str:
        path = str(tmp_path / f"{found.median_us}.db")
        with TuningDB(path) as db:
            db.add(found)
        step = api.explain_workload(work, H200, db=path).steps[0]
        assert step.verdict == "accepted"
        return step.reason

    stale = "stale, another kernel was measured (flashgen db revalidate)"
    driver = "made with driver 580.65, here it is 570.1"
    as_it_was = record(1.0, conf=POINTER, work=work, hash=todays, triton=triton)
    assert reason(as_it_was).endswith(f"; {driver}") and stale not in reason(as_it_was)
    assert reason(record(2.0, conf=POINTER, work=work, hash="0", triton=triton)).endswith(
        f"; {stale}; {driver}"
    )
    newer = reason(record(3.0, conf=POINTER, work=work, hash=todays, triton="9.9.9"))
    assert newer.endswith(f"; made with triton 9.9.9, here it is {triton}; {driver}")
    same = replace(as_it_was, versions=replace(as_it_was.versions, driver="570.1"), density="real")
    assert "made with" not in reason(replace(same, measurement=record(4.0).measurement))
    api._forget()


def test_c27_a_stale_record_is_exported_with_a_mark(tmp_path: Path) -> None:
    work, path = workload(512, spec=SMALL, heads=7, kv_heads=7), str(tmp_path / "tuning.db")
    todays = current_hash(record(conf=POINTER, work=work))
    assert todays is not None
    with TuningDB(path) as db:
        db.add_many(
            [
                record(5.0, conf=TMA, work=work, hash="0" * 16),
                record(7.0, conf=POINTER, work=work, hash=todays),
            ]
        )
    out = api.export(work, tmp_path / "bundle", target=H200, db=path)
    report = verify_bundle(out)
    assert (report.ok, report.records, report.stale) == (True, 2, 1)
    entries = json.loads((out / "manifest.json").read_text())["entries"]
    assert {entry["record"]["config"]["loads"]: entry["stale"] for entry in entries} == {
        "tma": True,
        "pointer": False,
    }
    api._forget()


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    """The process's, made anew."""
    api._dispatcher.cache_clear()
    yield api._dispatcher()
    api._dispatcher.cache_clear()


def test_a_bundle_that_is_loaded_again_replaces_itself_alone(
    database: str, tmp_path: Path, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a" / "b", tmp_path / "c" / "b"]
    work = api.workloads_of("ci")[0]
    for path in paths:
        flashgen.export(work, path, target="nvidia-h200", db=database)
    monkeypatch.chdir(tmp_path / "a")
    bundles = [flashgen.load_bundle(path) for path in (*paths, "b")]
    assert [source.open() for source in dispatcher._policy.bundles] == [bundles[2], bundles[1]]
    assert {source.label for source in dispatcher._policy.bundles} == {"bundle b"}
    best = bundles[2].manifest.records[0]
    assert dispatcher._policy.bundles[0].marks(best) == ()


# What is asked for, and what a setting says


def test_a_gpu_that_is_named_is_measured_on_whatever_the_settings_pretend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, tuple[int, ...]]] = []

    @contextmanager
    def bench(target: object, devices: tuple[int, ...], jobs: int | None) -> Iterator[None]:
        asked.append((target, devices))
        raise LaunchFailed("asked enough")
        yield

    monkeypatch.setattr(api, "_bench", bench)
    monkeypatch.setattr("flashgen.build.device.live_target", lambda index=0: H200)
    monkeypatch.setattr("flashgen.build.device.device_count", lambda: 3)
    monkeypatch.setattr(api, "SETTINGS", Settings(target="nvidia-h100", db=str(tmp_path / "x.db")))
    h100 = find_target("nvidia-h100")
    ways: list[tuple[Callable[[], object], tuple[object, tuple[int, ...]]]] = [
        (lambda: flashgen.tune("ci", device=0), (None, (0,))),
        (lambda: flashgen.tune("ci", device=1), (None, (1,))),
        (lambda: flashgen.tune("ci", device=(0, 2)), (None, (0, 2))),
        (lambda: flashgen.tune("ci", device="all"), (None, (0, 1, 2))),
        (lambda: flashgen.tune("ci"), (h100, ())),
        (lambda: flashgen.tune("ci", target=H200), (H200, ())),
        (lambda: api._tune_one(workload(), 1), (h100, ())),  # calls are dispatched for the pretended GPU too
    ]
    for way, wanted in ways:
        with pytest.raises(LaunchFailed, match="asked enough"):
            way()
        assert asked[-1] == wanted
    monkeypatch.setattr(api, "SETTINGS", Settings(db=str(tmp_path / "x.db")))
    for way, wanted in (
        (lambda: flashgen.tune("ci"), (None, (0,))),
        (lambda: api._tune_one(workload(), 1), (None, (1,))),
    ):
        with pytest.raises(LaunchFailed, match="asked enough"):
            way()
        assert asked[-1] == wanted
    with pytest.raises(
        InvalidArgument, match=r"target='nvidia-h200' is offline work, device=0 .*leave out one"
    ):
        flashgen.tune("ci", target="nvidia-h200", device=0)


def test_the_command_names_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def tune(what: object, **given: object) -> None:
        asked.append(given)
        raise LaunchFailed("asked enough")

    monkeypatch.setattr(api, "tune", tune)
    monkeypatch.setattr("flashgen.build.device.live_target", lambda index=0: H200)
    monkeypatch.setattr("flashgen.build.device.device_count", lambda: 3)
    for arguments, wanted in (
        (["--gpu"], (None, (0,))),
        (["--gpu", "1"], (None, (1,))),
        (["--gpu", "0,2"], (None, (0, 2))),
        (["--gpu", "all"], (None, (0, 1, 2))),
        (["--target", H200.name], (H200, None)),
    ):
        CliRunner().invoke(tune_command, [*arguments, "--suite", "ci", "--db", str(tmp_path / "x.db")])
        assert (asked[-1]["target"], asked[-1]["device"]) == wanted


def test_databases_are_closed_when_they_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api._forget()
    closed: list[str] = []
    close = TuningDB.close
    monkeypatch.setattr(TuningDB, "close", lambda self: (closed.append(str(self.where)), close(self))[0])
    paths = [str(tmp_path / f"{i}.db") for i in range(6)]
    first = api._database(paths[0])
    assert api._database(paths[0]) is first
    for path in paths[1:]:
        api._database(path)
    assert closed == paths[:2], "few are open at a time"
    api._forget()
    assert sorted(closed) == paths
    assert api._database(paths[0]) is not first
    api._forget()


@pytest.mark.parametrize("content", ["notes of mine\n" * 50, "x"])
def test_calls_are_answered_where_the_database_is_none(tmp_path: Path, content: str) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(content)
    work = workload(512, spec=SMALL)
    with pytest.warns(StoreWarning, match=r"notes.txt is no database: .* Its records are not used") as told:
        for _ in range(2):
            answer = api.explain_workload(work, H200, db=str(notes))
    assert len(told) == 1
    assert answer.family == "attention_fwd"
    assert answer.steps[0].verdict == "rejected"
    assert answer.steps[0].reason.startswith(f"StoreError: {notes} is no database")
    with pytest.raises(StoreError, match="is no database"):
        api.tune(work, target=H200, db=str(notes), plan=Plan(trials=1))
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("notes.txt", content)]
