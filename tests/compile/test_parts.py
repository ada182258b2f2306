"""A file of several kernels: compiled into one artifact, kept and read again, and passed on as data."""

from __future__ import annotations

from pathlib import Path

import pytest
from three_steps import three_steps

from flashgen.build.artifact import Artifact
from flashgen.build.compile import compile_kernel, toolchain
from flashgen.errors import InvalidArgument
from flashgen.spec.attention import CallFacts
from flashgen.spec.target import find_target

pytestmark = pytest.mark.compile


def test_an_artifact_has_all_kernels_of_its_file(tmp_path: Path) -> None:
    source, facts, target = (
        three_steps(toolchain()),
        CallFacts("aligned", tma=False),
        find_target("nvidia-h200"),
    )
    made = compile_kernel(source, facts, target, tmp_path)
    assert [part.name for part in made.before] == ["doubled"]
    assert [part.name for part in made.after] == ["incremented"]
    assert [buffer.name for buffer in made.scratch] == ["flag", "twice"]
    assert len({made.cubin, *(part.cubin for part in made.parts)}) == 3
    again = compile_kernel(source, facts, target, tmp_path)
    assert again.to_json() == made.to_json()
    assert [part.cubin for part in again.parts] == [part.cubin for part in made.parts], "from the cache"
    cubins = {part.name: part.cubin for part in made.parts}
    assert Artifact.from_json(made.to_json(), made.cubin, parts=cubins).to_json() == made.to_json()
    with pytest.raises(InvalidArgument, match="the cubin given for kernel doubled has sha256"):
        Artifact.from_json(made.to_json(), made.cubin, parts={**cubins, "doubled": made.cubin})
    with pytest.raises(InvalidArgument, match="the cubin given for kernel incremented has sha256"):
        Artifact.from_json(made.to_json(), made.cubin, parts={"doubled": cubins["doubled"]})
