"""Targets read from a driver."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda, build, compiler

from flashgen.build import device, driver, versions
from flashgen.build.device import alike_gpus, current_target, device_count, live_target, read_target
from flashgen.errors import InvalidArgument, NoGPU, UnknownName
from flashgen.settings import Settings
from flashgen.spec.target import TARGETS, Target, bandwidth_class

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler to build the stand-in with")

CARDS = {
    # product name, what its driver reports: SMs, memory clock (kHz), bus (bits), L2, capability, shared
    "nvidia-h200": ("NVIDIA H200", 132, 3_201_000, 6144, 60 << 20, (9, 0), 227),
    "nvidia-h100": ("NVIDIA H100 80GB HBM3", 132, 2_619_000, 5120, 50 << 20, (9, 0), 227),
    "nvidia-a100": ("NVIDIA A100-SXM4-80GB", 108, 1_593_000, 5120, 40 << 20, (8, 0), 163),
    "nvidia-rtx4090": ("NVIDIA GeForce RTX 4090", 128, 10_501_000, 384, 72 << 20, (8, 9), 99),
}


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(build(tmp_path))


def report(cuda: FakeCuda, row: tuple) -> Target:
    name, sms, clock, bus, l2, (major, minor), shared_kib = row
    cuda.set_name(name)
    cuda.set_attributes({16: sms, 36: clock, 37: bus, 38: l2, 75: major, 76: minor, 97: shared_kib << 10})
    return read_target(cuda.driver, 0)


@needs_compiler
@pytest.mark.parametrize("name", CARDS)
def test_a_known_card_is_its_row(cuda: FakeCuda, name: str) -> None:
    found = report(cuda, CARDS[name])
    assert found == TARGETS[name]
    assert (found.name, found.key) == (name, TARGETS[name].key)


@needs_compiler
def test_an_unknown_card_has_its_own_facts_and_name(cuda: FakeCuda) -> None:
    found = report(cuda, ("NVIDIA GeForce RTX 4070 Ti", 60, 10_501_000, 192, 48 << 20, (8, 9), 99))
    assert found == Target(89, 60, 99 << 10, 48, bandwidth_class(504))
    assert found.name == "nvidia-geforce-rtx-4070-ti"


@needs_compiler
def test_c25_the_same_silicon_under_another_label_is_the_same_target(cuda: FakeCuda) -> None:
    _, *facts = CARDS["nvidia-h200"]
    assert report(cuda, ("NVIDIA H200 NVL (rebranded)", *facts)).key == TARGETS["nvidia-h200"].key


@needs_compiler
def test_a_card_that_reports_no_clock_takes_the_class_of_the_nearest(cuda: FakeCuda) -> None:
    found = report(cuda, ("GRID H200-141C", 132, 0, 0, 60 << 20, (9, 0), 227))
    assert found.bandwidth in {row.bandwidth for row in TARGETS.values() if row.arch == 90}


@needs_compiler
def test_live_targets_come_from_the_driver_and_are_kept(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "driver", lambda: cuda.driver)
    live_target.cache_clear()
    try:
        assert current_target(1) == TARGETS["nvidia-h200"]
        assert current_target(1) is current_target(1)
        with pytest.raises(InvalidArgument, match="GPU 2 does not exist; this process sees 2"):
            live_target(2)
        monkeypatch.setattr(device, "SETTINGS", Settings(target="nvidia-a100"))
        assert current_target().name == "nvidia-a100"
        assert live_target(0).name == "nvidia-h200", "what a bundle is compared with is never pretended"
        monkeypatch.setattr(device, "SETTINGS", Settings(target="nvidia-a1000"))
        with pytest.raises(UnknownName, match=r"known: .*nvidia-a100"):
            current_target()
    finally:
        live_target.cache_clear()


NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.159.04", size); return 0; }
"""


@needs_compiler
def test_the_drivers_version_is_nvidias_and_else_the_cuda_version(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tmp_path, "nvml.c").write_text(NVML)
    library = str(tmp_path / "libnvidia-ml.so")
    subprocess.run([compiler() or "cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    module = tmp_path / "version"
    monkeypatch.setattr(versions, "KERNEL_MODULE", module)
    monkeypatch.setattr(versions, "MANAGEMENT_LIBRARY", library)
    assert versions.driver_version() == "580.159.04"
    module.write_text("570.86.15\n")
    assert versions.driver_version() == "570.86.15"
    module.unlink()
    monkeypatch.setattr(versions, "MANAGEMENT_LIBRARY", "libnvidia-ml-that-is-not-there.so.1")
    monkeypatch.setattr(driver, "driver", lambda: cuda.driver)
    assert versions.driver_version() == f"CUDA {cuda.driver.version()}"


def test_without_a_gpu_the_message_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "driver", lambda: driver.Driver("libcuda-that-is-not-there.so.1"))
    live_target.cache_clear()
    assert device_count() == 0
    with pytest.raises(
        NoGPU, match=r"no GPU here: .*libcuda-that-is-not-there.*is an NVIDIA driver installed"
    ):
        current_target()


A100, H100 = TARGETS["nvidia-a100"], TARGETS["nvidia-h100"]


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs: two H100, of which one is called otherwise, an A100, and another H100."""
    cards = [H100, replace(H100, name="nvidia-h100-rebranded"), A100, H100]

    def live(index: int = 0) -> Target:
        if not 0 <= index < len(cards):
            raise InvalidArgument(f"GPU {index} does not exist")
        return cards[index]

    monkeypatch.setattr(device, "device_count", lambda: len(cards))
    monkeypatch.setattr(device, "live_target", live)


@pytest.mark.parametrize("which", [0, (0,), (1, 0), [3, 1, 0]])
def test_gpus_of_one_kind_are_those_that_were_named(mixed: None, which: Any) -> None:
    found = alike_gpus(which)
    assert list(found) == ([which] if isinstance(which, int) else list(which))
    assert set(found.values()) == {H100}


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("all", r"one kind, these differ: GPU 0, 1, 3 is nvidia-h100 .*; GPU 2 is nvidia-a100 .*; "),
        ("all", r"; use --gpu 0,1,3 or --gpu 2$"),
        ((1, 2), r"use --gpu 1 or --gpu 2$"),
        ((0, 4), "GPU 4 does not exist"),
        ((), "must name at least one GPU"),
        ((0, 0), "each of them once"),
        ("0,1", r"device='0,1' names no GPU; give an index, several as \(0, 2\), or 'all'"),
    ],
)
def test_gpus_that_cannot_share_a_run_are_refused(mixed: None, which: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        alike_gpus(which)


def test_all_of_no_gpus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(index: int = 0) -> Target:
        raise NoGPU("no GPU here")

    monkeypatch.setattr(device, "device_count", lambda: 0)
    monkeypatch.setattr(device, "live_target", none)
    with pytest.raises(NoGPU):
        alike_gpus("all")
