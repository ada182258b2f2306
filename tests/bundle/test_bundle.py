"""Bundles: written, verified, loaded and launched; and what damage, links and other GPUs get."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_cuda import FakeCuda, build, compiler
from made import H200, SPEC, VERSIONS, config, kernels, record, records, with_lse

from flashgen.build import device, launch
from flashgen.build.artifact import Artifact
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.bundle.load import Bundle, load_bundle, verify_bundle
from flashgen.bundle.manifest import FORMAT, BundledKernel, _digest
from flashgen.bundle.write import ANY_CALL, check_place, wanted, write_bundle
from flashgen.cli.verify import verify
from flashgen.codegen.abi import WORKSPACE, DescriptorFacts, Grid, environment_names
from flashgen.codegen.families import find_family
from flashgen.codegen.source import render
from flashgen.errors import BundleError, InvalidArgument, LaunchFailed, Unsupported
from flashgen.runtime.explain import explained
from flashgen.runtime.policy import Policy, Request, Source
from flashgen.spec.attention import CallFacts, Workload
from flashgen.spec.config import Config
from flashgen.spec.record import Measurement, Status
from flashgen.spec.target import find_target

pytestmark = pytest.mark.compile
ALIGNED = CallFacts("aligned", tma=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[BundledKernel, ...]:
    return kernels(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def whole(compiled: tuple[BundledKernel, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(records(), compiled, tmp_path_factory.mktemp("out") / "b", H200, VERSIONS)


@pytest.fixture
def bundle(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "bundle"))


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver with two H200s in the place of this machine's."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in with")
    fake = FakeCuda(build(tmp_path))
    monkeypatch.setattr(device, "driver", lambda: fake.driver)
    monkeypatch.setattr(launch, "driver", lambda: fake.driver)
    device.live_target.cache_clear()
    yield fake
    device.live_target.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise LaunchFailed("the CUDA driver cannot be opened")

    monkeypatch.setattr(device, "driver", absent)
    monkeypatch.setattr(launch, "driver", absent)
    device.live_target.cache_clear()


# Round trip


def test_a_persistent_kernel_comes_back_equal(compiled: tuple[BundledKernel, ...], tmp_path: Path) -> None:
    """Its grid, its workspace, its warps and the descriptor of its output, as a compiler would tell them."""
    family = find_family("attention_fwd_sm90")
    conf = family.find("c2x1n128s2g4p4_late_lazy_tree_lane_dynamic")
    source = render(SPEC, conf, toolchain())
    made = source.abi(ALIGNED)
    layouts = tuple(DescriptorFacts(3, 2, 9, (1, *arg.box[1:])) for arg in made.args if arg.is_descriptor)
    built = Artifact(source.name, b"\x7fELF", made, 12, 130_000, 168, 0, layouts, VERSIONS.triton, 90)
    kernel = BundledKernel(SPEC, conf, source.text, built)
    template = record("tma", 512, 5.0)
    fast = replace(template, config=conf, kernel_hash=source.hash, admission=family.admission(conf))
    loaded = load_bundle(write_bundle((fast,), [*compiled, kernel], tmp_path / "b", H200, VERSIONS))
    (entry,) = loaded.manifest.kernels_of(fast)
    back = loaded._artifacts[entry.cubin]
    assert replace(back, ptx="") == built and back.num_warps == 12
    assert back.abi.grid == Grid("persistent", 32, 4)
    assert [arg.type for arg in back.abi.args if arg.source == WORKSPACE] == ["*i32"]
    assert loaded.manifest.records == (fast,) and fast.admission == "tma_pack4"


def test_kernels_of_split_keys_come_back_equal(compiled: tuple[BundledKernel, ...], tmp_path: Path) -> None:
    """Two kernels each, with and without the LSE, which the second one has, and the buffers between them."""
    conf = find_family("attention_fwd").find("m64n32w4s2k4_tma_heads")
    made = []
    for spec in (SPEC, with_lse(SPEC)):
        source = render(spec, conf, toolchain())
        artifact = compile_kernel(source, ALIGNED, H200, tmp_path / "cache")
        made.append(BundledKernel(spec, conf, source.text, artifact))
    split = replace(record("tma", 512, 5.0), config=conf, kernel_hash=render(SPEC, conf, toolchain()).hash)
    written = write_bundle((split,), [*compiled, *made], tmp_path / "b", H200, VERSIONS)
    loaded = load_bundle(written)
    for kernel in made:
        entry = loaded.find(kernel.spec, conf, ALIGNED)
        assert entry is not None and list(entry.parts) == ["combine_splits"]
        back = loaded._artifacts[entry.cubin]
        assert replace(back, ptx="").to_json() == kernel.artifact.to_json()
        assert [part.cubin for part in back.after] == [part.cubin for part in kernel.artifact.after]
    manifest = (written / "manifest.json").read_text()
    (written / "manifest.json").write_text(manifest.replace('"splits": 4', '"splits": 8'))
    with pytest.raises(BundleError):
        load_bundle(written)


def test_a_bundle_is_readable_and_complete(whole: Path, compiled: tuple[BundledKernel, ...]) -> None:
    data = json.loads((whole / "manifest.json").read_text())
    assert data["format"] == 1
    assert data["target"] == H200.to_json()
    assert data["target_key"] == H200.key
    assert data["versions"] == VERSIONS.to_json()
    first = data["entries"][0]
    assert first["spec"] == SPEC.key
    assert first["bucket"] == "b2 h8 kv2 q512 k512"
    assert first["record"] == records()[0].to_json()
    assert len(first["kernels"]) == 2, "with and without the LSE"
    assert len(data["kernels"]) == len(compiled) == 6
    by_cubin = {kernel["cubin"]: kernel for kernel in data["kernels"]}
    assert by_cubin.keys() == {name for name in data["files"] if name.endswith(".cubin")}
    kernel = by_cubin[first["kernels"][0]]
    assert kernel["config"] == config("tma").to_json()
    assert kernel["artifact"]["abi"] == compiled[0].artifact.abi.to_json()
    assert data["files"][kernel["cubin"]]["sha256"] == kernel["artifact"]["cubin_sha256"]
    assert (whole / kernel["source"]).read_text() == compiled[0].text
    assert (whole / kernel["cubin"]).read_bytes() == compiled[0].artifact.cubin
    assert sorted(path.name for path in whole.iterdir()) == ["cubins", "kernels", "manifest.json"]


def test_verify_reports_what_a_bundle_holds(whole: Path) -> None:
    report = verify_bundle(whole)
    assert (report.ok, report.problems, report.target) == (True, (), H200.describe())
    assert (report.records, report.kernels, report.files) == (4, 6, 10)
    total = sum(f.stat().st_size for folder in ("kernels", "cubins") for f in (whole / folder).iterdir())
    assert report.bytes == total
    assert report.to_json()["ok"] is True


def test_records_and_kernels_come_back_equal(
    whole: Path, compiled: tuple[BundledKernel, ...], no_gpu: None
) -> None:
    loaded = load_bundle(whole)
    assert loaded.target == H200
    assert loaded.manifest.records == records()
    assert loaded.manifest.versions == VERSIONS
    assert [loaded._artifacts[e.cubin] for e in loaded.manifest.kernels] == [
        replace(kernel.artifact, ptx="") for kernel in compiled
    ]


def test_a_bundle_ranks_its_records(whole: Path, no_gpu: None) -> None:
    loaded = load_bundle(whole)
    by_tma, by_pointer, later_tma, later_pointer = records()
    asked = Workload(with_lse(SPEC), 2, 8, 2, 400, 512)
    # The best of each admission class first, then the exact bucket before the nearest.
    assert loaded.ranked(asked, H200)[:2] == (by_tma, by_pointer)
    assert loaded.ranked(Workload(SPEC, 2, 8, 2, 4000, 4000), H200)[:2] == (later_tma, later_pointer)
    assert loaded.ranked(asked, find_target("nvidia-h100")) == ()
    assert loaded.ranked(Workload(replace(SPEC, dtype="fp16"), 2, 8, 2, 400, 512), H200) == ()


@pytest.mark.parametrize(
    ("loads", "facts", "found"),
    [
        ("tma", ALIGNED, ALIGNED),
        ("tma", CallFacts("aligned", tma=False), None),
        ("tma", CallFacts("aligned", tma=True, wide=True), None),
        ("pointer", ALIGNED, ALIGNED),
        ("pointer", CallFacts("aligned", tma=False), ALIGNED),
        ("pointer", CallFacts("aligned", tma=True, wide=True), ANY_CALL),
        ("pointer", CallFacts("unit", tma=False), ANY_CALL),
        ("pointer", CallFacts("strided", tma=False), ANY_CALL),
        ("pointer", ANY_CALL, ANY_CALL),
    ],
)
def test_a_call_gets_the_strictest_kernel_that_serves_it(
    whole: Path, no_gpu: None, loads: str, facts: CallFacts, found: CallFacts | None
) -> None:
    entry = load_bundle(whole).find(with_lse(SPEC), config(loads), facts)
    assert (entry and entry.facts) == found
    assert entry is None or entry.spec.return_lse


def test_every_call_of_a_spec_has_a_fallback(whole: Path, no_gpu: None) -> None:
    loaded = load_bundle(whole)
    for facts in (ALIGNED, CallFacts("unit", tma=False), ANY_CALL):
        assert loaded.fallback(SPEC, facts) is not None
    assert loaded.fallback(SPEC, ANY_CALL) == config("pointer")
    assert loaded.fallback(SPEC, ALIGNED) == config("tma")
    assert loaded.fallback(SPEC, ALIGNED, lambda config: str(config["loads"] == "tma" or "")) == config(
        "pointer"
    )
    assert loaded.fallback(replace(SPEC, head_dim=128), ALIGNED) is None
    with pytest.raises(
        Unsupported, match=r"no kernel m64n32w4s2_tma_heads for unit calls .*; it has: m64n32w4s2_"
    ):
        loaded.kernel(SPEC, config("tma"), CallFacts("unit", tma=False))


def env(spec: Any = SPEC) -> tuple[Any, ...]:
    strides = (
        8 * 512 * 64,
        512 * 64,
        64,
        1,
        *(2 * 512 * 64, 512 * 64, 64, 1) * 2,
        8 * 512 * 64,
        512 * 64,
        64,
        1,
    )
    made = (4096, 8192, 12288, 16384, 0, *strides, 2, 8, 2, 4, 512, 512, 64, 64, 0.125)
    assert len(made) == len(environment_names(spec))
    return made


def test_c37_kernels_are_loaded_on_first_use_on_each_gpu(whole: Path, cuda: FakeCuda) -> None:
    loaded = load_bundle(whole)
    entry = loaded.find(SPEC, config("tma"), ALIGNED)
    assert entry is not None
    cuda.expect_kernel(loaded._artifacts[entry.cubin])
    assert cuda.get("fake_loads") == 0
    first = loaded.kernel(SPEC, config("tma"), ALIGNED, 0)
    second = loaded.kernel(SPEC, config("tma"), ALIGNED, 1)
    assert cuda.get("fake_loads") == 2
    assert loaded.kernel(SPEC, config("tma"), ALIGNED, 1) is second
    assert (cuda.get("fake_loads"), first.device_index, second.device_index) == (2, 0, 1)
    second.launch(env(), 77)
    assert cuda.config() == {
        "grid": (8 * 8 * 2, 1, 1),
        "block": (128, 1, 1),
        "shared": loaded._artifacts[entry.cubin].shared_bytes,
        "stream": 77,
        "attrs": 0,
    }
    assert cuda.launch_context() == cuda.driver.primary_context(1)


# Another GPU, or none


def test_c37_another_gpu_is_refused_with_both_named(whole: Path, cuda: FakeCuda) -> None:
    cuda.set_name("NVIDIA A100-SXM4-80GB")
    cuda.set_attributes({16: 108, 36: 1_593_000, 37: 5120, 38: 40 << 20, 75: 8, 76: 0, 97: 163 << 10})
    a100 = find_target("nvidia-a100")
    for index in (None, 0, 1):
        with pytest.raises(BundleError) as refused:
            load_bundle(whole, index)
        assert H200.describe() in str(refused.value)
        assert a100.describe() in str(refused.value)
        assert "flashgen export --target nvidia-a100" in str(refused.value)
    assert cuda.get("fake_loads") == 0


def test_a_gpu_is_checked_when_a_kernel_is_first_loaded_on_it(whole: Path, cuda: FakeCuda) -> None:
    loaded = load_bundle(whole, 0)
    device.live_target.cache_clear()
    cuda.set_attributes({16: 114})
    with pytest.raises(
        BundleError, match=r"GPU 1 is nvidia-h200 \(cuda-sm90-114sm|GPU 1 is \S+ \(cuda-sm90-114sm"
    ):
        loaded.kernel(SPEC, config("tma"), ALIGNED, 1)


def test_without_a_gpu_the_manifest_serves_and_a_launch_is_refused(whole: Path, no_gpu: None) -> None:
    loaded = load_bundle(whole)
    assert len(loaded.ranked(records()[0].workload, H200)) == 2
    with pytest.raises(LaunchFailed, match="no GPU here"):
        loaded.kernel(SPEC, config("tma"), ALIGNED)
    with pytest.raises(LaunchFailed, match="no GPU here"):
        load_bundle(whole, 0)


def test_a_pretended_target_does_not_open_a_bundle(
    whole: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.settings import Settings

    monkeypatch.setattr(device, "SETTINGS", Settings(target="nvidia-h200"))
    cuda.set_attributes({16: 114})
    with pytest.raises(BundleError, match="is for nvidia-h200"):
        load_bundle(whole)


# Damage


def manifest_of(bundle: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    return data


def rewrite(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest and makes its own hash right again, as someone with intent would."""
    data = manifest_of(bundle)
    change(data)
    data["sha256"] = _digest({k: v for k, v in data.items() if k not in ("format", "sha256")})
    (bundle / "manifest.json").write_text(json.dumps(data))


def refused(bundle: Path, *texts: str) -> None:
    """The bundle is not loaded, and both ways of asking say why, naming each of `texts`."""
    report = verify_bundle(bundle)
    assert not report.ok
    with pytest.raises(BundleError) as error:
        load_bundle(bundle)
    for text in texts:
        assert text in "\n".join(report.problems)
        assert text in str(error.value)


def a_file(bundle: Path, folder: str) -> Path:
    return sorted((bundle / folder).iterdir())[0]


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("folder", ["cubins", "kernels"])
def test_a_flipped_bit_is_found(bundle: Path, folder: str) -> None:
    path = a_file(bundle, folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(bundle, f"{name_of(path)} is damaged: sha256")


def test_a_truncated_file_and_a_grown_one_are_found(bundle: Path) -> None:
    one, two = sorted((bundle / "cubins").iterdir())[:2]
    one.write_bytes(one.read_bytes()[:-1])
    two.write_bytes(two.read_bytes() + b"\0")
    refused(bundle, f"{name_of(one)} is damaged", f"{name_of(two)} has")


def test_missing_files_are_all_named(bundle: Path) -> None:
    gone = [a_file(bundle, "cubins"), a_file(bundle, "kernels")]
    for path in gone:
        path.unlink()
    refused(bundle, *(f"{name_of(path)} cannot be read: it is missing" for path in gone))
    shutil.rmtree(bundle / "kernels")
    refused(bundle, f"{name_of(gone[1])} cannot be read: it is missing")


def test_extra_files_are_named(bundle: Path) -> None:
    (bundle / "cubins" / "other.cubin").write_bytes(b"\x7fELF")
    (bundle / "setup.py").write_text("")
    (bundle / "kernels" / "__pycache__").mkdir()
    refused(
        bundle,
        "cubins/other.cubin is not in manifest.json",
        "setup.py is no part of a bundle",
        "kernels/__pycache__ is not in manifest.json",
    )


def test_links_are_refused(bundle: Path, tmp_path: Path) -> None:
    path = a_file(bundle, "cubins")
    elsewhere = tmp_path / "elsewhere.cubin"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    refused(bundle, f"{name_of(path)} cannot be read: links are refused")


def test_a_linked_folder_is_refused(bundle: Path, tmp_path: Path) -> None:
    (bundle / "cubins").rename(tmp_path / "cubins")
    (bundle / "cubins").symlink_to(tmp_path / "cubins")
    refused(bundle, "cubins is no part of a bundle (a link)", "links are refused")


def test_a_pipe_in_the_place_of_a_file_does_not_hang(bundle: Path) -> None:
    path = a_file(bundle, "cubins")
    path.unlink()
    os.mkfifo(path)
    refused(bundle, f"{name_of(path)} is not a regular file")


def test_a_damaged_manifest_is_refused(bundle: Path) -> None:
    path = bundle / "manifest.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    refused(bundle, "manifest.json is damaged: not JSON")
    path.write_text(text.replace('"registers": 98', '"registers": 99'))
    refused(bundle, "manifest.json is damaged: its contents do not match its sha256")
    path.write_text(text, encoding="utf-16")
    refused(bundle, "manifest.json is damaged: not UTF-8")
    path.write_text("[" * 100_000)
    refused(bundle, "manifest.json is damaged: not JSON")
    path.write_text("[]")
    refused(bundle, "this is not a FlashGen bundle")
    path.write_text('{"format": 1, "x": ' + "[" * 900 + "]" * 900 + "}")
    refused(bundle, "manifest.json")
    path.unlink()
    refused(bundle, "manifest.json cannot be read: the folder has none")
    path.mkdir()
    refused(bundle, "manifest.json is not a regular file")


@pytest.mark.parametrize("number", [0, FORMAT + 1, "1", None, True, 1.0])
def test_another_format_is_refused_before_its_contents_are_looked_at(bundle: Path, number: object) -> None:
    (bundle / "manifest.json").write_text(json.dumps({"format": number, "whatever": 1}))
    refused(bundle, f"format {number!r}; this FlashGen reads format 1")


@pytest.mark.parametrize(
    "name",
    [
        "../outside.cubin",
        "/etc/passwd",
        "cubins/../../x.cubin",
        "cubins/a/b.cubin",
        "cubins/.cubin",
        "x.cubin",
    ],
)
def test_a_name_that_leaves_the_bundle_is_refused(bundle: Path, name: str) -> None:
    rewrite(bundle, lambda data: data["files"].update({name: {"sha256": "0" * 64, "bytes": 1}}))
    refused(bundle, f"manifest.json names the file {name!r}")


def test_sizes_are_checked_before_anything_is_read(bundle: Path) -> None:
    name = name_of(a_file(bundle, "cubins"))
    rewrite(bundle, lambda data: data["files"][name].update(bytes=1 << 40))
    refused(
        bundle, f"manifest.files['{name[:20]}", "allowed: a whole number of at least 1 and at most 67108864"
    )
    with (bundle / "manifest.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    refused(bundle, "manifest.json has 67108865 bytes, at most 67108864")


Change = Callable[[dict[str, Any]], object]


def entry(change: Change) -> Change:
    return lambda data: change(data["entries"][0])


def record_of(change: Change) -> Change:
    return entry(lambda found: change(found["record"]))


def kernel_of(change: Change) -> Change:
    return lambda data: change(data["kernels"][0])


def artifact(change: Change) -> Change:
    return kernel_of(lambda kernel: change(kernel["artifact"]))


def abi(change: Change) -> Change:
    return artifact(lambda found: change(found["abi"]))


def stride(of: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(arg for arg in of["args"] if arg["source"].endswith("stride.row"))
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["kernels"][0]["spec"]["mask"].update(text="__import__('os')"), "does not understand"),
        (lambda d: d["kernels"][0]["spec"].update(head_dim=1000), "head_dim=1000 is not served"),
        (lambda d: d["kernels"][0]["artifact"]["abi"]["environment"].reverse(), "in another order"),
        (lambda d: d["kernels"][0]["artifact"].update(arch=80), "is for sm_80, the bundle for nvidia-h200"),
        (
            lambda d: d["kernels"][0]["artifact"].update(descriptors=[]),
            "is described wrongly: InvalidArgument",
        ),
        (
            lambda d: d["kernels"][0]["artifact"].pop("shared_bytes"),
            "kernels[0].artifact.shared_bytes is missing",
        ),
        (
            lambda d: d["kernels"][0].update(cubin=d["kernels"][2]["cubin"]),
            "contradicts itself about cubins/",
        ),
        (
            lambda d: d.pop("entries"),
            "(InvalidArgument: manifest.entries is missing); it was written by FlashGen 0.1.0",
        ),
        (lambda d: d["target"].update(cores=1), "manifest.target.cores is not known"),
        (lambda d: d.update(files=[]), "manifest.files must be an object"),
        (
            lambda d: d["target"].update(shared_per_block="x"),
            "manifest.target.shared_per_block must not be 'x'",
        ),
        (lambda d: d["target"].update(name="\x1b[31mhi"), r"manifest.target.name must not be '\x1b[31mhi'"),
        (lambda d: d.update(target_key="another"), "manifest.target_key='another' contradicts the rest"),
        (entry(lambda e: e.update(bucket="b1")), "manifest.entries[0].bucket='b1' contradicts the rest"),
        (
            record_of(lambda r: r["target"].update(arch=80)),
            "entries[0]: record.target is nvidia-h200 (cuda-sm80",
        ),
        (
            record_of(lambda r: r["measurement"].update(status="WRONG", reason="x")),
            "entries[0]: record.measurement.status='WRONG'",
        ),
        (
            record_of(lambda r: r.update(config={})),
            "entries[0]: config of b2h8kv2q512k512: attention_fwd: block_m=",
        ),
        (record_of(lambda r: r.update(created_at=5)), "manifest.entries[0].record.created_at must not be 5"),
        (record_of(lambda r: r["workload"].update(batch=1.5)), "record.workload.batch must not be 1.5"),
        (
            kernel_of(lambda k: k["config"].update(num_stages="x")),
            "kernels[0]: config: attention_fwd: num_stages='x'",
        ),
        (kernel_of(lambda k: k["spec"].update(return_lse=[])), "kernels[0].spec.return_lse must not be []"),
        (artifact(lambda a: a.update(shared_bytes=-1)), "kernels[0].artifact.shared_bytes must not be -1"),
        (artifact(lambda a: a.update(shared_bytes=1 << 20)), "needs 1048576 B of shared memory a block"),
        (
            artifact(lambda a: a["descriptors"][0].update(swizzle=4)),
            "swizzle=4 must be a whole number from 0 to 3",
        ),
        (
            abi(lambda a: a.update(num_warps=10**9)),
            "kernels[0]: num_warps=1000000000 must be a whole number from 1",
        ),
        (abi(lambda a: a.update(num_warps=-1)), "kernels[0].artifact.abi.num_warps must not be -1"),
        (
            abi(lambda a: a.update(num_warps=8)),
            "artifact.abi.num_warps=8 contradicts the config m64n32w4s2_tma",
        ),
        (
            abi(lambda a: a["grid"].update(block_m=0)),
            "kernels[0]: grid.block_m=0 must be a whole number from 1",
        ),
        (
            abi(lambda a: a["grid"].update(block_m=16)),
            "artifact.abi.grid.block_m=16 contradicts the config m64n32",
        ),
        (
            abi(lambda a: a["grid"].update(rule="persistent")),
            "artifact.abi.grid.rule=persistent contradicts the config m64n32",
        ),
        (abi(lambda a: a["grid"].update(pack=4)), "artifact.abi.grid.pack=4 contradicts the config m64n32"),
        (abi(lambda a: a["grid"].update(pack=0)), "kernels[0]: grid.pack=0 must be a whole number from 1"),
        (artifact(lambda a: a.update(num_warps=12)), "artifact.num_warps=12 contradicts the config m64n32"),
        (artifact(lambda a: a.update(num_warps=0)), "kernels[0].artifact.num_warps must not be 0"),
        (
            abi(lambda a: a["grid"].update(rule="x")),
            "unknown grid.rule 'x'; known: heads, key_tiles, key_tiles_of_a_sequence, key_tiles_of_h",
        ),
        (abi(lambda a: a["facts"].update(wide=None)), "artifact.abi.facts.wide must not be None"),
        (abi(lambda a: a["facts"].update(wide=True)), "type='i32' cannot take"),
        (
            abi(lambda a: a["args"][0].update(source="nope")),
            "Q: source='nope' is no entry of the environment",
        ),
        (abi(lambda a: a["args"][0].update(type="i32")), "Q: type='i32' cannot take q"),
        (abi(lambda a: stride(a).update(constant=3)), "constant=3 is not what calls of this kind have"),
        (kernel_of(lambda k: k["spec"].update(return_lse=True)), "kernels[0]: its arguments do not have"),
        (abi(lambda a: stride(a).update(divisor=64)), "divisor=64 must be a whole number from 1 to 16"),
    ],
)
def test_a_manifest_that_lies_is_refused(bundle: Path, change: Change, told: str) -> None:
    rewrite(bundle, change)
    refused(bundle, told)


VALUES = (
    True,
    None,
    1.5,
    -1,
    0,
    10**30,
    "x",
    "",
    "\ud800",
    "\x1b[2J",
    [],
    [[]],
    {},
    math.nan,
    math.inf,
    1e308,
)


HARMLESS = {
    *("max_error", "max_us", "median_us", "min_us", "passes", "registers", "spill_bytes", "shared_bytes"),
    *(
        "created_at",
        "density",
        "driver",
        "flashgen",
        "kernel_hash",
        "name",
        "reason",
        "stale",
        "torch",
        "triton",
    ),
    *("positive_scale", "return_lse", "tma", "elem_type", "swizzle", "offset"),
    *("constant", "entries", "params", "score_mod", "sha256"),
}
"""Places that may say another thing: measured numbers and names, the kind of spec of a kernel or a record, a
layout's numbers, and those where a value of `VALUES` stands already."""


def edits(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place of a manifest with every value of `VALUES`; the first entry of a list stands for all."""
    items = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for name, child in items:
        yield from (((*path, name), value) for value in VALUES)
        yield from edits(child, (*path, name))


def put(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    *parents, last = path
    place: Any = data
    for name in parents:
        place = place[name]
    place[last] = value


def use(bundle: Bundle) -> None:
    """Asks a bundle for what a call asks; all that is told is fit for a terminal."""
    source = Source("bundle", lambda: bundle, no_loader, lambda _: bundle.fallback(SPEC, ANY_CALL))
    for facts in (ALIGNED, ANY_CALL):
        request = Request(records()[0].workload, facts, H200)
        decision = Policy(bundles=[source]).decide(request, loading=False)
        assert str(explained(request, decision)).replace("\n", "").isprintable()
        assert decision.config is not None


def no_loader(request: Request, config: Config) -> Any:
    raise LaunchFailed("no GPU")


def test_every_edit_of_a_manifest_is_harmless_or_refused(bundle: Path, no_gpu: None) -> None:
    whole = (bundle / "manifest.json").read_text()
    every = list(edits(manifest_of(bundle)))
    assert len(every) > 2000
    loaded = set()
    for path, value in random.Random(0).sample(every, 400):
        (bundle / "manifest.json").write_text(whole)
        rewrite(bundle, partial(put, path=path, value=value))
        if verify_bundle(bundle).ok:
            use(load_bundle(bundle))
            loaded.add(path[-1])
            continue
        with pytest.raises(BundleError) as error:
            load_bundle(bundle)
        told = str(error.value)
        assert told.replace("\n", "").isprintable(), path
        assert any(place in told for place in (str(path[0]), "cubins/", "kernels/")), (path, told)
    assert loaded <= HARMLESS


@pytest.mark.parametrize("value", [-1, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["min_us", "max_us", "max_error"])
def test_a_measurement_that_no_clock_gives_is_refused(bundle: Path, name: str, value: float) -> None:
    path = next(path for path, _ in edits(manifest_of(bundle)) if path[-1] == name)
    rewrite(bundle, partial(put, path=path, value=value))
    refused(bundle, f"{name}={value} of an OK measurement must be 0 or more, and finite")


def test_all_problems_are_listed_together(bundle: Path) -> None:
    for path in (bundle / "cubins").iterdir():
        path.write_bytes(b"x")
    report = verify_bundle(bundle)
    assert len(report.problems) == 6
    with pytest.raises(BundleError) as error:
        load_bundle(bundle)
    assert str(error.value).count("is damaged") == 6


def test_what_is_no_folder_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a folder"):
        load_bundle(tmp_path / "nothing")
    assert verify_bundle(tmp_path / "nothing").problems == (
        "manifest.json cannot be read: the folder has none: this is not a FlashGen bundle",
    )


def test_a_bundle_in_memory_does_not_change_with_its_files(bundle: Path, no_gpu: None) -> None:
    loaded: Bundle = load_bundle(bundle)
    shutil.rmtree(bundle)
    entry = loaded.find(SPEC, config("tma"), ALIGNED)
    assert entry is not None
    assert loaded._artifacts[entry.cubin].cubin[:4] == b"\x7fELF"


# Writing


def test_an_older_bundle_is_replaced_and_nothing_else(
    bundle: Path, compiled: tuple[BundledKernel, ...], tmp_path: Path
) -> None:
    rewrite(bundle, lambda data: data.update(created_at="1999"))
    write_bundle(records(), compiled, bundle, H200, VERSIONS)
    assert manifest_of(bundle)["created_at"] > "2020"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"], "no temporary folder is left"
    (tmp_path / "empty").mkdir()
    write_bundle(records(), compiled, tmp_path / "empty", H200, VERSIONS)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    for place in (home, home / "thesis.txt"):
        with pytest.raises(InvalidArgument, match="exists and is not a FlashGen bundle"):
            write_bundle(records(), compiled, place, H200, VERSIONS)
    for name in ("thesis.txt", "kernels/thesis.txt", "cubins/deep/thesis.txt"):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_text("mine")
        with pytest.raises(InvalidArgument, match="exists and is not a FlashGen bundle"):
            write_bundle(records(), compiled, bundle, H200, VERSIONS)
        assert (bundle / name).read_text() == "mine"
        (bundle / name).unlink()


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"format": 1, "target_key": ""}', "[" * 100_000])
def test_a_folder_is_no_bundle_for_its_manifest_alone(
    compiled: tuple[BundledKernel, ...], tmp_path: Path, manifest: str
) -> None:
    (tmp_path / "home" / "kernels").mkdir(parents=True)
    (tmp_path / "home" / "manifest.json").write_text(manifest)
    (tmp_path / "home" / "kernels" / "work.py").write_text("mine")
    with pytest.raises(InvalidArgument, match="exists and is not a FlashGen bundle"):
        write_bundle(records(), compiled, tmp_path / "home", H200, VERSIONS)
    assert (tmp_path / "home" / "kernels" / "work.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("x" * 300, BundleError, "File name too long"),
        ("a\0b", BundleError, "null byte"),
        (".", InvalidArgument, "out='.' has no name of its own"),
        ("..", InvalidArgument, "has no name of its own"),
    ],
)
def test_a_place_that_cannot_be_written_is_an_error(
    compiled: tuple[BundledKernel, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: type[Exception],
    told: str,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(error, match=told):
        write_bundle(records(), compiled, Path(name), H200, VERSIONS)
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]
    if error is BundleError:
        assert not verify_bundle(name).ok
        with pytest.raises(BundleError):
            load_bundle(name)


def test_a_place_where_nothing_can_be_made_is_an_error(
    compiled: tuple[BundledKernel, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
        with pytest.raises(BundleError, match=r"cannot write the bundle .*file is no folder; give another"):
            check_place(place)
        with pytest.raises(BundleError, match="is no folder"):
            write_bundle(records(), compiled, place, H200, VERSIONS)
    check_place(tmp_path / "deep" / "out")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BundleError, match="cannot be written; give another folder"):
        check_place(tmp_path / "deep" / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_c34_a_full_disk_leaves_nothing_and_keeps_the_old_bundle(
    bundle: Path, compiled: tuple[BundledKernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BundleError, match=r"cannot write the bundle .*No space left on device"):
        write_bundle(records(), compiled, bundle, H200, VERSIONS)
    monkeypatch.undo()
    assert verify_bundle(bundle).ok
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_bundle_that_cannot_be_put_in_place_leaves_the_old_one(
    bundle: Path, compiled: tuple[BundledKernel, ...], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    rename, asked = Path.rename, []

    def fails(self: Path, target: Path) -> Path:
        asked.append(self)
        if len(asked) == failing:
            raise OSError(2, "another export has moved it")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(BundleError, match="another export has moved it"):
        write_bundle(records(), compiled, bundle, H200, VERSIONS)
    assert verify_bundle(bundle).ok
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_what_cannot_be_exported_is_refused(compiled: tuple[BundledKernel, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refuses(told: str, recs: Any = None, kerns: Any = None, target: Any = H200) -> None:
        with pytest.raises(InvalidArgument, match=told):
            write_bundle(
                records() if recs is None else recs,
                compiled if kerns is None else kerns,
                out,
                target,
                VERSIONS,
            )
        assert not out.exists()

    slow = replace(record("tma", 512, 1.0), measurement=Measurement(Status.SLOW, reason="stopped early"))
    foreign = replace(record("tma", 512, 1.0), target=find_target("nvidia-h100"))
    refuses("needs at least one kernel", kerns=())
    refuses("is SLOW: stopped early; only OK ones", recs=(slow,))
    refuses("is of nvidia-h100", recs=(foreign,))
    refuses(
        "was compiled for sm_90, the bundle is for nvidia-a100", recs=(), target=find_target("nvidia-a100")
    )
    refuses("no kernel was given for b2h8kv2q512k512 with m64n32w4s2_pointer_heads", kerns=compiled[:2])
    refuses("serves unaligned calls", recs=(), kerns=compiled[:3])


def test_what_a_config_needs_follows_from_its_admission() -> None:
    assert [(spec.return_lse, facts) for spec, facts in wanted(SPEC, "tma")] == [
        (False, ALIGNED),
        (True, ALIGNED),
    ]
    assert wanted(SPEC, "tma_pack4") == wanted(SPEC, "tma")
    assert [(spec.return_lse, facts) for spec, facts in wanted(with_lse(SPEC), "any")] == [
        (False, ALIGNED),
        (False, ANY_CALL),
        (True, ALIGNED),
        (True, ANY_CALL),
    ]


def test_records_of_an_older_kernel_are_marked_and_rank_behind(
    compiled: tuple[BundledKernel, ...], tmp_path: Path, no_gpu: None
) -> None:
    by_tma, by_pointer, *_ = records()
    path = write_bundle(records(), compiled, tmp_path / "b", H200, VERSIONS, stale=[by_pointer])
    data = manifest_of(path)
    assert [entry["stale"] for entry in data["entries"]] == [False, True, False, False]
    report = verify_bundle(path)
    assert (report.ok, report.records, report.stale, report.to_json()["stale"]) == (True, 4, 1, 1)
    shown = CliRunner().invoke(verify, [str(path)])
    assert shown.exit_code == 0 and "stale    1 record measured another kernel" in shown.output
    loaded = load_bundle(path)
    assert [loaded.stale(each) for each in (by_tma, by_pointer)] == [False, True]
    assert loaded.ranked(by_tma.workload, H200) == (by_tma, by_pointer)
