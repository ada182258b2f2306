"""Prints what pyproject.toml asks for, one requirement a line.

usage: requirements.py [--missing] [--wheels=DIR] [EXTRA ...]

With --missing only what the running interpreter lacks, needs of needs included; with --wheels only what a
folder has a wheel of. Uses nothing but pip's own copies of `packaging` and `tomli`, so it runs in a fresh
virtual environment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

INSTALLED_WHOLE = ("torch", "triton")
"""Where these are present they work, however their CUDA libraries came: their own needs are not looked at."""


def wanted(extras: list[str]) -> list[Requirement]:
    """The project's dependencies and those of its extras that apply to this machine."""
    project = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate()]


def missing(requirements: list[Requirement], seen: set[str]) -> Iterator[Requirement]:
    """Those that are absent or of a wrong version, and those their own needs lack."""
    for requirement in requirements:
        if canonical(requirement.name) in seen:
            continue
        seen.add(canonical(requirement.name))
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            yield requirement
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            yield requirement
        if requirement.name in INSTALLED_WHOLE:
            continue
        needs = (Requirement(line) for line in found.requires or [])
        extra = {"extra": ""}
        yield from missing([r for r in needs if r.marker is None or r.marker.evaluate(extra)], seen)


def has_wheel(folder: Path, name: str) -> bool:
    """Whether a folder has a wheel of a package, for whichever Python."""
    return any(canonical(path.name.split("-")[0]) == canonical(name) for path in folder.glob("*.whl"))


def canonical(name: str) -> str:
    """One spelling of a package's name."""
    return name.lower().replace("-", "_").replace(".", "_")


def main(arguments: list[str]) -> None:
    """Prints the requirements."""
    extras = [each for each in arguments if not each.startswith("--")]
    found = wanted(extras)
    wheels = [each.partition("=")[2] for each in arguments if each.startswith("--wheels=")]
    for requirement in missing(found, set()) if "--missing" in arguments else found:
        if wheels and not has_wheel(Path(wheels[0]), requirement.name):
            continue
        requirement.marker = None
        print(str(requirement).replace(" ", ""))


if __name__ == "__main__":
    main(sys.argv[1:])
