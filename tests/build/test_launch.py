"""Launching from the ABI alone, against a stand-in for the driver that keeps what it was passed."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_cuda import FakeCuda, build, compiler, tensor_map

from flashgen.build import launch
from flashgen.build.artifact import Artifact
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.driver import Driver
from flashgen.build.launch import Kernel, parameter_sizes
from flashgen.codegen.abi import DescriptorFacts, environment_names
from flashgen.codegen.families import find_family
from flashgen.codegen.source import Toolchain, render
from flashgen.errors import InvalidArgument, LaunchFailed
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.config import Config
from flashgen.spec.target import find_target

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler to build the stand-in with")
pytestmark = needs_compiler

STREAM = 0x7FFF_1234_5678
Q, K, V, OUT, LSE, CU = (0x7F00_0000_0000 + i * 0x1_0000_0000 for i in range(6))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def cuda(library: Path) -> FakeCuda:
    return FakeCuda(library)


def make_artifact(
    spec: AttentionSpec, loads: str, facts: CallFacts | None = None, shared_bytes: int = 100_000
) -> Artifact:
    """The real ABI of a rendered kernel around a cubin that only the stand-in takes."""
    config = find_family("attention_fwd").config(
        block_m=128, block_n=64, num_warps=8, num_stages=3, loads=loads, order="heads"
    )
    return around(spec, config, facts or CallFacts("aligned", tma=loads == "tma"), 8, shared_bytes)


def around(
    spec: AttentionSpec, config: Config, facts: CallFacts, num_warps: int, shared_bytes: int = 100_000
) -> Artifact:
    source = render(spec, config, Toolchain("3.6.0"))
    abi = source.abi(facts)
    boxes = [arg.box for arg in abi.args if arg.is_descriptor]
    return Artifact(
        name=source.name,
        cubin=b"\x7fELF",
        abi=abi,
        num_warps=num_warps,
        shared_bytes=shared_bytes,
        registers=168,
        spill_bytes=0,
        descriptors=tuple(DescriptorFacts(3, 2, 9, (1, *box[1:3], min(box[3], 64))) for box in boxes),
        triton="3.6.0",
        arch=90,
    )


def make_env(spec: AttentionSpec, **changes: float) -> tuple[float, ...]:
    """The environment of a (2, 8, 300, d) query on (2, 2, 500, d) keys; `changes` to it by name."""
    values: dict[str, float] = {"q": Q, "k": K, "v": V, "out": OUT, "lse": LSE}
    sizes = {"q": (8, 300), "k": (2, 500), "v": (2, 500), "out": (8, 300)}
    for tensor, (heads, rows) in sizes.items():
        dim = spec.head_dim_v if tensor in ("v", "out") else spec.head_dim
        strides = (heads * rows * dim, rows * dim, dim, 1)
        for axis, stride in zip(("batch", "head", "row", "dim"), strides, strict=True):
            values[f"{tensor}.stride.{axis}"] = stride
    values |= {"batch": 2, "heads": 8, "kv_heads": 2, "heads_per_kv": 4, "q_len": 300, "k_len": 500}
    values |= {"head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v, "scale": 0.125}
    values |= {"cu_q": CU, "cu_k": CU + 64, "sequences": 3}
    of = {"dout": "out", "dq": "q", "dk": "k", "dv": "v", "dlse": "lse"}
    values |= {f"d{name}": value for name, value in values.items() if f"d{name.partition('.')[0]}" in of}
    names = environment_names(spec)
    values |= {name: 1000 + i for i, name in enumerate(names) if name.startswith(("param", "operand"))}
    values |= {name.replace("_stride_", ".stride."): value for name, value in changes.items()}
    return tuple(values[name] for name in names)


CAUSAL = AttentionSpec(128, 128, "bf16", mask=masks.causal().rule, return_lse=True)


def test_every_argument_arrives_as_its_type(cuda: FakeCuda) -> None:
    padded = masks.sliding_window(100, 0) & masks.key_padding(torch.tensor([5, 6], dtype=torch.int32))
    softcap = score_mods.softcap(30.0).rule
    spec = AttentionSpec(64, 64, "fp16", mask=padded.rule, score_mod=softcap, return_lse=True)
    artifact = make_artifact(spec, "pointer")
    cuda.expect_kernel(artifact)
    env = make_env(spec)
    Kernel(artifact, on=cuda.driver).launch(env, STREAM)
    values = dict(zip(artifact.abi.environment, env, strict=True))
    codes = {"i32": "i", "i64": "q", "fp32": "f"}
    passed = [arg for arg in artifact.abi.args if arg.constant is None]
    expected = [struct.pack("=" + codes.get(arg.type, "Q"), values[arg.source]) for arg in passed]
    assert cuda.params() == [*expected, bytes(8), bytes(8)]
    assert cuda.config() == {
        "grid": (3 * 8 * 2, 1, 1),
        "block": (256, 1, 1),
        "shared": 100_000,
        "stream": STREAM,
        "attrs": 0,
    }


@pytest.mark.compile
@pytest.mark.parametrize(("loads", "dim"), [("pointer", 64), ("tma", 64), ("tma", 96)])
def test_parameters_are_those_the_compiled_kernel_declares(tmp_path: Path, loads: str, dim: int) -> None:
    config = find_family("attention_fwd").config(
        block_m=64, block_n=32, num_warps=4, num_stages=2, loads=loads, order="heads"
    )
    spec = AttentionSpec(dim, dim, "bf16", mask=masks.causal().rule, score_mod=score_mods.softcap(30.0).rule)
    source, target = render(spec, config, toolchain()), find_target("nvidia-h200")
    artifact = compile_kernel(source, CallFacts("aligned", tma=loads == "tma"), target, tmp_path)
    declared = re.findall(rf"\.param ([^,]*?) {artifact.name}_param_\d+(\[128\])?", artifact.ptx)
    width = {".u64": 8, ".u32": 4, ".f32": 4}
    sizes = [128 if array else width[kind.split()[0]] for kind, array in declared]
    assert tuple(sizes) == parameter_sizes(artifact)
    assert sizes.count(128) == len(artifact.descriptors)


def test_wide_strides_are_64_bit(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "pointer", CallFacts("strided", tma=False, wide=True))
    cuda.expect_kernel(artifact)
    env = make_env(CAUSAL, k_stride_row=2**33, v_stride_dim=7)
    Kernel(artifact, on=cuda.driver).launch(env, 0)
    passed = [arg.source for arg in artifact.abi.args]
    params = cuda.params()
    assert struct.unpack("=q", params[passed.index("k.stride.row")]) == (2**33,)
    assert struct.unpack("=q", params[passed.index("v.stride.dim")]) == (7,)


def test_a_value_beyond_its_type_is_named(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "pointer")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)
    with pytest.raises(InvalidArgument, match=r"k\.stride\.row=8589934592 does not fit .* type i32"):
        kernel.launch(make_env(CAUSAL, k_stride_row=2**33), 0)
    with pytest.raises(InvalidArgument, match=r"scale=1e\+300 does not fit"):
        kernel.launch(make_env(CAUSAL, scale=1e300), 0)
    assert cuda.get("fake_launches") == 0


def maps_of(artifact: Artifact, cuda: FakeCuda) -> dict[str, dict[str, object]]:
    """Descriptors of the last launch by argument, with the extents and strides passed beside them."""
    params, found, at = cuda.params(), {}, 0
    for arg in artifact.abi.args:
        if arg.is_descriptor:
            shape = struct.unpack("=4i", b"".join(params[at + 1 : at + 5]))
            strides = struct.unpack("=4q", b"".join(params[at + 5 : at + 9]))
            found[arg.name] = tensor_map(params[at]) | {"shape": shape, "passed_strides": strides}
            at += 9
        elif arg.constant is None:
            at += 1
    return found


def test_descriptors_describe_the_tensors(cuda: FakeCuda) -> None:
    spec = AttentionSpec(128, 64, "bf16", mask=masks.causal().rule)
    artifact = make_artifact(spec, "tma")
    cuda.expect_kernel(artifact)
    Kernel(artifact, on=cuda.driver).launch(make_env(spec), STREAM)
    found = maps_of(artifact, cuda)
    assert list(found) == ["Q", "K", "V"]
    assert found["Q"] == {
        "address": Q,
        "rank": 4,
        "type": 9,
        "swizzle": 3,
        "dims": (128, 300, 8, 2),
        "strides": (256, 300 * 256, 8 * 300 * 256),
        "box": (64, 128, 1, 1),
        "shape": (2, 8, 300, 128),
        "passed_strides": (8 * 300 * 128, 300 * 128, 128, 1),
    }
    assert (found["K"]["dims"], found["K"]["box"]) == ((128, 500, 2, 2), (64, 64, 1, 1))
    assert (found["V"]["dims"], found["V"]["strides"]) == ((64, 500, 2, 2), (128, 500 * 128, 2 * 500 * 128))


def test_chunks_of_a_head_dim_start_at_their_offset_and_end_at_the_head_dim(cuda: FakeCuda) -> None:
    spec = AttentionSpec(72, 96, "bf16")
    artifact = make_artifact(spec, "tma")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)
    kernel.launch(make_env(spec), STREAM)
    found = maps_of(artifact, cuda)
    assert [(name, m["address"], m["dims"][0]) for name, m in found.items()] == [
        ("Q_0", Q, 72),
        ("Q_64", Q + 128, 8),
        ("K_0", K, 72),
        ("K_64", K + 128, 8),
        ("V_0", V, 96),
        ("V_64", V + 128, 32),
    ]
    kernel.launch(make_env(spec, k=K + 4096), STREAM)
    assert maps_of(artifact, cuda)["K_64"]["address"] == K + 4096 + 128


def test_an_axis_of_extent_1_may_have_any_stride(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "tma")
    cuda.expect_kernel(artifact)
    env = make_env(CAUSAL, batch=1, kv_heads=1, heads_per_kv=8, k_stride_batch=7, k_stride_head=0)
    Kernel(artifact, on=cuda.driver).launch(env, 0)
    assert maps_of(artifact, cuda)["K"]["strides"] == (256, 16, 16)


PERSISTENT, PLAIN = (f"c2x1n128s2g4p4_late_lazy_tree_lane_{schedule}" for schedule in ("dynamic", "plain"))


def sm90(config: str) -> Artifact:
    """Two warpgroups that multiply, each of 16 positions of 4 heads, and one that copies."""
    found = find_family("attention_fwd_sm90").find(config)
    return around(CAUSAL, found, CallFacts(), num_warps=12)


class Workspaces:
    """Stands in for those of torch: an address for each stream, and what was asked for."""

    def __init__(self, device_index: int) -> None:
        self.device_index, self.asked = device_index, list[int]()

    def address(self, stream: int) -> int:
        self.asked.append(stream)
        return 0x7E00_0000_0000 + 64 * stream


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> dict[int, Workspaces]:
    made: dict[int, Workspaces] = {}
    monkeypatch.setattr(launch, "_workspaces", lambda index: made.setdefault(index, Workspaces(index)))
    return made


def argument(artifact: Artifact, cuda: FakeCuda, source: str) -> bytes:
    """The bytes of a plain argument of the last launch; a descriptor takes nine parameters."""
    at = 0
    for arg in artifact.abi.args:
        if arg.source == source and not arg.is_descriptor:
            return cuda.params()[at]
        at += 9 if arg.is_descriptor else arg.constant is None
    raise AssertionError(f"no argument takes {source}")


def test_a_persistent_kernel_gets_the_workspace_of_its_stream(
    cuda: FakeCuda, workspaces: dict[int, Workspaces]
) -> None:
    artifact = sm90(PERSISTENT)
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, 1, on=cuda.driver)
    for stream in (5, 6, 5):
        kernel.launch(make_env(CAUSAL), stream)
        assert struct.unpack("=Q", argument(artifact, cuda, "workspace")) == (0x7E00_0000_0000 + 64 * stream,)
        assert argument(artifact, cuda, "lse") == struct.pack("=Q", LSE)
        assert struct.unpack("=f", argument(artifact, cuda, "scale")) == (0.125,)
    assert {index: each.asked for index, each in workspaces.items()} == {1: [5, 6, 5]}
    kernel.launch(make_env(CAUSAL, q_len=0), 7)
    assert workspaces[1].asked == [5, 6, 5], "nothing is launched and nothing allocated"


def test_a_value_beyond_its_type_is_named_of_a_persistent_kernel_too(
    cuda: FakeCuda, workspaces: dict[int, Workspaces]
) -> None:
    artifact = sm90(PERSISTENT)
    cuda.expect_kernel(artifact)
    with pytest.raises(InvalidArgument, match=r"scale=1e\+300 does not fit"):
        Kernel(artifact, on=cuda.driver).launch(make_env(CAUSAL, scale=1e300), 0)


def test_no_other_kernel_has_a_workspace(cuda: FakeCuda, workspaces: dict[int, Workspaces]) -> None:
    for artifact in (sm90(PLAIN), make_artifact(CAUSAL, "tma"), make_artifact(CAUSAL, "pointer")):
        cuda.expect_kernel(artifact)
        Kernel(artifact, on=cuda.driver).launch(make_env(CAUSAL), STREAM)
        assert "workspace" not in {arg.source for arg in artifact.abi.args}
    assert workspaces == {}


def test_a_warp_specialised_kernel_runs_with_all_its_warps_and_tiles_of_packed_heads(
    cuda: FakeCuda, workspaces: dict[int, Workspaces]
) -> None:
    grids = []
    for config in (PLAIN, PERSISTENT):
        artifact = sm90(config)
        cuda.expect_kernel(artifact)
        assert artifact.abi.num_warps == 4
        Kernel(artifact, on=cuda.driver).launch(make_env(CAUSAL, q_len=1000), 0)
        assert cuda.config()["block"] == (32 * 12, 1, 1)
        grids.append(cuda.config()["grid"])
    assert grids == [(32 * 2 * 2, 1, 1), (128, 1, 1)], "fewer tiles than multiprocessors"
    Kernel(artifact, on=cuda.driver).launch(make_env(CAUSAL, q_len=1057), 0)
    assert cuda.config()["grid"] == (132, 1, 1), "34 x 2 x 2 tiles, and a program a multiprocessor"
    boxes = {name: found["box"] for name, found in maps_of(artifact, cuda).items()}
    assert boxes["Q"] == boxes["OUT"] == (64, 16, 4, 1) and boxes["K"] == boxes["V"] == (64, 128, 1, 1)


def test_descriptors_are_encoded_only_when_extents_or_strides_are_new(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "tma")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)

    def work(**changes: int) -> tuple[int, int]:
        before = cuda.get("fake_encodes"), cuda.get("fake_replaces")
        kernel.launch(make_env(CAUSAL, **changes), STREAM)
        return cuda.get("fake_encodes") - before[0], cuda.get("fake_replaces") - before[1]

    assert work() == (3, 0)
    assert work() == (0, 0)
    assert work(out=OUT + 64, scale=0.5) == (0, 0)
    assert work(k=K + 64, v=V + 64) == (0, 2)
    assert maps_of(artifact, cuda)["V"]["address"] == V + 64
    kept = maps_of(artifact, cuda)["K"]
    assert work(k_len=400) == (3, 0)
    assert work(k=K + 64, v=V + 64) == (0, 2), "kept as first encoded"
    assert maps_of(artifact, cuda)["K"] | {"address": 0} == kept | {"address": 0}
    assert work(k_len=400, k=K + 128) == (0, 1)
    assert maps_of(artifact, cuda)["K"]["address"] == K + 128


def test_c40_kept_descriptors_are_bounded(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "tma")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)
    for k_len in range(1, 200):
        kernel.launch(make_env(CAUSAL, k_len=k_len), 0)
        assert maps_of(artifact, cuda)["K"]["dims"][1] == k_len
    assert len(kernel._maps._kept) == 32


def test_c14_a_misaligned_address_is_refused_and_the_next_call_is_right(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "tma")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)
    kernel.launch(make_env(CAUSAL), 0)
    with pytest.raises(
        LaunchFailed, match=r"describing V at 0x7f020000000[2].*multiples of 16 B.*INVALID_VALUE"
    ):
        kernel.launch(make_env(CAUSAL, k=K + 16, v=V + 2), 0)
    with pytest.raises(LaunchFailed, match="describing K") as failed:
        kernel.launch(make_env(CAUSAL, k_stride_row=36), 0)
    assert failed.value.code == 1, "of this call, and no reason never to launch the kernel again"
    kernel.launch(make_env(CAUSAL, k=K + 32), 0)
    found = maps_of(artifact, cuda)
    assert {name: m["address"] for name, m in found.items()} == {"Q": Q, "K": K + 32, "V": V}
    assert cuda.get("fake_launches") == 2


def test_no_rows_means_no_launch_and_too_many_blocks_an_error(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "pointer")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)
    kernel.launch(make_env(CAUSAL, q_len=0), 0)
    with pytest.raises(InvalidArgument, match="grid of 2147483648 blocks"):
        kernel.launch(make_env(CAUSAL, q_len=128, heads=2**16, batch=2**15), 0)
    assert cuda.get("fake_launches") == 0
    kernel.launch(make_env(CAUSAL, q_len=1, heads=1, batch=65_538), 0)
    assert cuda.config()["grid"] == (65_538, 1, 1)


def test_c23_the_kernel_runs_in_its_own_context_whichever_is_current(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "tma")
    cuda.expect_kernel(artifact)
    kernels = [Kernel(artifact, index, on=cuda.driver) for index in (0, 1)]
    for current in (0, 1, -1):
        cuda.lib.fake_set_current(current)
        before = cuda.lib.fake_get_current()
        for index, kernel in enumerate(kernels):
            kernel.launch(make_env(CAUSAL, k=K + 64 * (current + 2)), STREAM)
            assert cuda.launch_context() == cuda.driver.primary_context(index)
            assert cuda.lib.fake_get_current() == before


def test_a_new_thread_has_no_context_and_may_launch(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "pointer")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)
    thread = threading.Thread(target=kernel.launch, args=(make_env(CAUSAL), 0))
    thread.start()
    thread.join()
    assert cuda.get("fake_launches") == 1


def test_threads_may_share_a_kernel(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "pointer")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)

    def work(address: int) -> None:
        cuda.lib.fake_set_current(0)
        env = make_env(CAUSAL, q=address)
        for _ in range(2000):
            kernel.launch(env, address)  # the stand-in counts launches whose pointer is not their stream

    threads = [threading.Thread(target=work, args=(Q + 4096 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (cuda.get("fake_launches"), cuda.get("fake_torn")) == (8000, 0)


def test_loading_sets_shared_memory_and_reads_registers(cuda: FakeCuda) -> None:
    array = (ctypes.c_int * 16).in_dll(cuda.lib, "fake_function_attribute")
    array[3], array[4], array[8] = 48, 168, 0
    small, large = make_artifact(CAUSAL, "pointer", shared_bytes=40_000), make_artifact(CAUSAL, "pointer")
    cuda.expect_kernel(small)
    kernel = Kernel(small, on=cuda.driver)
    assert (kernel.registers, kernel.local_bytes, array[8]) == (168, 48, 0)
    Kernel(large, on=cuda.driver)
    assert array[8] == 100_000
    kernel.unload()
    kernel.unload()
    assert (cuda.get("fake_loads"), cuda.get("fake_unloads")) == (2, 1)
    with pytest.raises(LaunchFailed, match=r"\(400\)"):
        kernel.launch(make_env(CAUSAL), 0)


def test_a_cubin_with_other_parameters_is_refused(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "pointer")
    cuda.expect(parameter_sizes(artifact)[:-1])
    with pytest.raises(LaunchFailed, match=r"but its ABI describes .* Compile the kernel again"):
        Kernel(artifact, on=cuda.driver)
    cuda.expect((*parameter_sizes(artifact), 8))
    with pytest.raises(LaunchFailed, match="takes parameters of"):
        Kernel(artifact, on=cuda.driver)
    assert (cuda.get("fake_loads"), cuda.get("fake_unloads")) == (2, 2), "what is refused is not left loaded"


def test_failures_name_the_error_and_what_was_attempted(cuda: FakeCuda) -> None:
    artifact = make_artifact(CAUSAL, "pointer")
    cuda.expect_kernel(artifact)
    with pytest.raises(
        LaunchFailed, match=r"compiled for sm_90, on GPU 0 \(NVIDIA H200, sm_90\).*INVALID_IMAGE \(200\)"
    ):
        Kernel(replace(artifact, cubin=b"not a cubin"), on=cuda.driver)
    kernel = Kernel(artifact, on=cuda.driver)
    cuda.set("fake_fail_launch", 700)
    with pytest.raises(
        LaunchFailed,
        match=r"launching attention_fwd_d128_causal_bf16_lse\w+ on GPU 0 .*ILLEGAL_ADDRESS \(700\)",
    ) as failed:
        kernel.launch(make_env(CAUSAL), 0)
    assert failed.value.code == 700


def test_an_argument_no_call_provides_is_refused() -> None:
    abi = make_artifact(CAUSAL, "pointer").abi
    shorter = tuple(name for name in abi.environment if name != "lse")
    with pytest.raises(InvalidArgument, match="LSE: source='lse' is no entry of the environment"):
        replace(abi, environment=shorter)


def test_without_a_driver_the_message_says_what_is_missing(cuda: FakeCuda) -> None:
    with pytest.raises(LaunchFailed, match="the CUDA driver cannot be opened"):
        Driver("libcuda-that-is-not-there.so.1")
    cuda.set("fake_devices", 0)
    with pytest.raises(LaunchFailed, match=r"initialising the CUDA driver: cuInit gave CUDA_ERROR_NO_DEVICE"):
        Driver(str(cuda.lib._name))


def test_descriptors_of_packed_sequences_have_two_axes_of_rows(cuda: FakeCuda) -> None:
    """Element (outer, head, inner) is of row outer + inner - box, after a move and another shape too."""
    spec = replace(CAUSAL, addressing="varlen")
    artifact = make_artifact(spec, "tma")
    cuda.expect_kernel(artifact)
    kernel = Kernel(artifact, on=cuda.driver)
    one = {"batch": 1, "q_len": 300, "k_len": 500}

    def launched(**changes: int) -> dict[str, dict[str, object]]:
        kernel.launch(make_env(spec, **one | changes), STREAM)
        return maps_of(artifact, cuda)

    maps = launched()
    assert cuda.config()["grid"] == ((300 // 128 + 3) * 8, 1, 1)
    # make_env's heads lie rows * 128 apart, and its rows 128 elements of 2 bytes.
    assert maps["Q"]["dims"] == (128, 128, 8, 300 + 128) and maps["K"]["dims"] == (128, 64, 2, 500 + 64)
    assert maps["Q"]["strides"] == (256, 300 * 256, 256) and maps["K"]["strides"] == (256, 500 * 256, 256)
    assert maps["Q"]["address"] == Q - 128 * 256 and maps["K"]["address"] == K - 64 * 256
    assert launched(v=V + 64)["V"]["address"] == V + 64 - 64 * 256, "moved"
    wide = launched(k_stride_row=256)
    assert wide["K"]["address"] == K - 64 * 512 and wide["K"]["strides"] == (512, 500 * 256, 512)
    assert launched(k=K + 64)["K"]["address"] == K + 64 - 64 * 256, "kept as first encoded, and moved"
    assert launched(k=K + 128, k_stride_row=256)["K"]["address"] == K + 128 - 64 * 512


def test_buffers_of_packed_calls_are_described_as_they_lie(cuda: FakeCuda) -> None:
    """Blocks of 64 rows of three sequences, of 300 tokens: 7; the tensors beside them end with boxes."""
    spec = replace(CAUSAL, addressing="varlen").backward()
    config = find_family("attention_bwd_sm90").find("s2g4_shared")
    artifact = around(spec, config, CallFacts(), 4)
    scratch = render(spec, config, Toolchain("3.6.0")).scratch
    cuda.expect_kernel(artifact)
    env = make_env(spec, batch=1)
    entry = {name: i for i, name in enumerate(artifact.abi.environment)}
    for i, buffer in enumerate(scratch):
        size, layout = launch._Buffer(buffer, entry).laid_out(env)
        assert size == 8 * 7 * (128, 64 * 128)[i] * 4
        env += (LSE + 4096 * i, *layout)
    Kernel(artifact, on=cuda.driver).launch(env, STREAM)
    maps = maps_of(artifact, cuda)
    assert maps["ROW_STATS"]["address"] == LSE and maps["DQ_SUMS"]["address"] == LSE + 4096
    assert maps["ROW_STATS"]["dims"] == (128, 7, 8, 1) and maps["DQ_SUMS"]["dims"] == (256, 7 * 32, 8, 1)
    assert maps["DQ_SUMS"]["strides"][:2] == (
        512,
        7 * 32 * 512,
    )  # of elements that `around` says have 2 bytes
    assert maps["DOUT"]["address"] == OUT - 64 * 256 and maps["DK"]["address"] == K - 128 * 256
    assert cuda.config()["grid"] == ((500 // 128 + 3) * 2, 1, 1)


def test_a_chunk_of_packed_sequences_begins_at_its_dims(cuda: FakeCuda) -> None:
    spec = AttentionSpec(96, 96, "bf16", addressing="varlen")
    artifact = make_artifact(spec, "tma")
    cuda.expect_kernel(artifact)
    Kernel(artifact, on=cuda.driver).launch(make_env(spec, batch=1), STREAM)
    maps = maps_of(artifact, cuda)
    assert maps["K_0"]["address"] == K - 64 * 192 and maps["K_64"]["address"] == K - 64 * 192 + 128
    assert maps["K_64"]["dims"] == (32, 64, 2, 500 + 64)
