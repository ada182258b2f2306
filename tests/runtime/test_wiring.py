"""The whole chain without a GPU: real records, rendering and ptxas; a stand-in for the CUDA driver alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dispatch_parts import tensors
from fake_cuda import FakeCuda, build, compiler
from sample_records import H200, config, record, workload

import flashgen
from flashgen import api, masks
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.launch import Kernel
from flashgen.bundle.load import verify_bundle
from flashgen.codegen.source import render
from flashgen.errors import InvalidArgument, LaunchFailed, UnknownName
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.runtime.policy import Policy, Request, Source
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.config import Config
from flashgen.store.db import TuningDB
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
    assert told.runs == best.config.name and "exact bucket: modelled" in str(told)
    assert json.loads(json.dumps(told.to_json()))["runs"] == best.config.name
    path = flashgen.export("ci", tmp_path / "bundle", target="nvidia-h200", db=database)
    report = verify_bundle(path)
    assert report.ok and report.records >= 2 and "nvidia-h200" in report.target
    assert report.kernels >= 2 * report.records


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
        ("family default", "accepted"),
        ("torch", "not reached"),
    ]
    lines = str(told).splitlines()
    assert lines[0].startswith("b2h4kv2q64k64 of [fwd d32 fp16") and lines[1].startswith("on nvidia-l40s")
    assert lines[2].startswith("runs m") and "pointer" in lines[2]  # no tensor descriptors before sm_90
    assert api.best_record(work, "nvidia-l40s", db=database) is None


def test_an_unaligned_call_is_explained_as_such(database: str) -> None:
    work = api.workloads_of("ci")[0]
    told = flashgen.explain_workload(work, "nvidia-h200", facts=CallFacts("unit", tma=False), db=database)
    assert "unit tensors" in told.where and "tma" not in told.runs


@pytest.mark.parametrize(
    ("what", "error"),
    [("llama9", UnknownName), ("missing.json", InvalidArgument), (Path("gone"), InvalidArgument)],
)
def test_workloads_that_are_not_there(what: str | Path, error: type[Exception]) -> None:
    with pytest.raises(error):
        api.workloads_of(what)


def test_workloads_of_a_models_config(tmp_path: Path) -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "sliding_window": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for what in (tmp_path, str(tmp_path / "config.json")):
        found = api.workloads_of(what)
        assert {(w.heads, w.kv_heads, w.spec.head_dim) for w in found} == {(8, 2, 64)}
        assert dict(found[0].params) == {"left": 255, "right": 0}
    assert api.workloads_of(found[0]) == (found[0],) and api.workloads_of(found) == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_what_needs_one_says_so() -> None:
    for ask in (
        lambda: flashgen.warmup("ci"),
        lambda: flashgen.tune("ci"),
        lambda: flashgen.explain_workload(workload()),
    ):
        with pytest.raises(LaunchFailed, match=r"(?s)no GPU here.*--target NAME"):
            ask()
