"""A file of several kernels on a GPU: their order, the buffers between them, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from three_steps import DIM, SPEC, three_steps

from flashgen.build.arguments import flatten
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.build.device import live_target
from flashgen.build.launch import Chain, load_kernel
from flashgen.spec.attention import CallFacts

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    facts = CallFacts("aligned", tma=False)
    artifact = compile_kernel(
        three_steps(toolchain()), facts, live_target(), tmp_path_factory.mktemp("cache")
    )
    loaded = load_kernel(artifact)
    assert isinstance(loaded, Chain)
    return loaded


def call(chain: Chain, v: torch.Tensor, out: torch.Tensor) -> None:
    assert v.shape[3] == SPEC.head_dim == DIM
    env = flatten(v, v, v, out, None, 1.0)
    chain.launch(env, torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("rows", [1, 40, 4097])
def test_each_kernel_sees_what_the_one_before_it_left(chain: Chain, rows: int) -> None:
    for _ in range(3):
        v = torch.randn(2, 3, rows, DIM, device="cuda")
        out = torch.full_like(v, float("nan"))
        call(chain, v, out)
        assert torch.equal(out, 2 * v + 1)


def test_two_captured_graphs_replay_beside_each_other(chain: Chain) -> None:
    v = [torch.randn(2, 3, 2000, DIM, device="cuda") for _ in range(2)]
    out = [torch.empty_like(each) for each in v]
    graphs, streams = [torch.cuda.CUDAGraph() for _ in v], [torch.cuda.Stream() for _ in v]
    for i, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            call(chain, v[i], out[i])
    for _ in range(20):
        for each in out:
            each.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for i in range(2):
            assert torch.equal(out[i], 2 * v[i] + 1)
