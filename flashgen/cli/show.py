"""`flashgen show`: the kernel that is generated, as source, PTX, SASS or resource use, and diffs of two."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli.options import (
    FilePath,
    Selection,
    db_option,
    find_device_to_look_at,
    gpu_options,
    workload_options,
)
from flashgen.cli.output import Table, emit, json_option
from flashgen.errors import InvalidArgument, UnknownName

if TYPE_CHECKING:
    from rich.console import Console

    from flashgen.build.artifact import Artifact
    from flashgen.codegen.source import KernelSource
    from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
    from flashgen.spec.config import Config
    from flashgen.spec.target import Target

VIEWS = ("source", "ptx", "sass", "usage")


@click.command()
@workload_options
@gpu_options
@click.option("--arch", type=int, help="A GPU of this compute capability: 80, 86, 89, 90, 100, 120.")
@click.option(
    "--config",
    "name",
    metavar="NAME",
    help="A config such as m128n64w4s2_tma_heads, or `best`, the best record, else the default; or `default`."
    "  [default: best]",
)
@click.option("--diff", nargs=2, metavar="CONFIG CONFIG", help="Compare the kernels of two configs.")
@click.option("--family", metavar="NAME", help="The kernel family, where several serve the workload.")
@click.option(
    "--access",
    type=click.Choice(["aligned", "unit", "strided"]),
    default="aligned",
    show_default=True,
    help="The tensors of the call: aligned to 16 bytes, only unit innermost stride, or any strides.",
)
@click.option("--lse", is_flag=True, help="With the log-sum-exp as a second output.")
@click.option("--source", is_flag=True, help="Rendered Triton (the default).")
@click.option("--ptx", is_flag=True, help="The compiler's PTX.")
@click.option("--sass", is_flag=True, help="The machine code.")
@click.option("--usage", is_flag=True, help="Registers, spills and shared memory.")
@click.option(
    "--draw",
    metavar="FILE",
    type=FilePath(dir_okay=False),
    help="Draw the mask and the tiles of the config, skipped, partial and full, into this file (.png, .svg); "
    "needs matplotlib.",
)
@db_option
@json_option
def show(
    selection: Selection,
    gpu: int | None,
    target: str | None,
    arch: int | None,
    name: str | None,
    diff: tuple[str, str] | None,
    family: str | None,
    access: str,
    lse: bool,
    draw: str | None,
    url: str | None,
    as_json: bool,
    **views: bool,
) -> None:
    """Shows a generated kernel. Works without a GPU.

    Of several workloads the first is shown. Which kernel that is, and why this one, stands on stderr.

    \b
    Examples:
      flashgen show --head-dim 128 --mask causal
      flashgen show --mask causal --sass --arch 80
      flashgen show --mask causal --usage --config m128n128w8s2_tma_heads --target nvidia-h200
      flashgen show --diff m128n64w4s2_tma_heads m128n64w8s3_tma_heads --usage
      flashgen show --mask 'causal & sliding_window(1023, 0)' --draw mask.png
    """
    import dataclasses

    from flashgen.spec.attention import CallFacts

    view = _only([each for each in VIEWS if views[each]] + ["draw"] * bool(draw))
    if draw is not None:
        _check_draw(draw, diff)
    if diff and name is not None:
        raise InvalidArgument("--diff names both configs: leave out --config, or leave out --diff")
    if arch is not None:
        target = _target_of_arch(arch, gpu, target)
    device = find_device_to_look_at(gpu, target).target
    workload, *others = selection.workloads() if selection else selection.explicit()
    several = f", 1 of {len(others) + 1} workloads" if others else ""
    workload = dataclasses.replace(workload, spec=dataclasses.replace(workload.spec, return_lse=lse))
    facts = CallFacts(access, tma=access == "aligned")
    names = diff or ("best" if name is None else name,)
    found = [_Shown.find(each, workload, device, facts, family, url) for each in names]
    for each in found:
        click.echo(f"showing {each.config.name}, {each.origin}", err=True)
        click.echo(f"  {each.config.describe()}", err=True)
    click.echo(f"for {workload.name} of [{workload.spec.key}]{several}", err=True)
    if draw is not None:
        _draw(found[0], workload, draw, as_json)
        return
    if diff is None:
        emit(found[0].to_json(view), as_json, lambda out: found[0].print(view, out))
        return
    lines = _diff(*(each.text(view) for each in found), *(each.config.name for each in found))
    data = {
        "view": view,
        "target": device.to_json(),
        "configs": [each.config.name for each in found],
        "diff": "\n".join(lines),
    }
    emit(data, as_json, lambda _: click.echo("\n".join(lines)))


class _Shown:
    """One kernel, compiled only when what is shown needs it."""

    def __init__(
        self, spec: AttentionSpec, config: Config, target: Target, facts: CallFacts, origin: str
    ) -> None:
        from flashgen.build.compile import toolchain
        from flashgen.codegen.source import render

        self.config, self.target, self.facts, self.origin = config, target, facts, origin
        self.source: KernelSource = render(spec, config, toolchain())

    @classmethod
    def find(
        cls,
        name: str,
        workload: Workload,
        target: Target,
        facts: CallFacts,
        family: str | None,
        url: str | None,
    ) -> _Shown:
        """The kernel of a config's name; `best` and `default` are looked up."""
        from flashgen.codegen.families import find_family, serving, why_not

        asked = name
        spec, group = workload.spec, workload.heads_per_kv
        families = serving(spec, target, facts, group)
        if family is not None:
            only = find_family(family)
            if reason := why_not(only, spec, target, facts, group):
                others = ", ".join(each.name for each in families)
                raise InvalidArgument(f"--family {family}: {reason}\nleave it out, or choose of: {others}")
            families = (only,)
        if name == "best":
            from flashgen.api import best_record

            record = best_record(workload, target, facts, db=url)
            if record is not None and (family is None or record.config.family == family):
                from flashgen.runtime.policy import whence

                chosen = f"best record, {whence(record, workload)}, {record.created_at[:10]}"
                return cls(spec, record.config, target, facts, chosen)
            name = "default"
        if name == "default":
            config = families[0].default(spec, target, facts, group, workload)
            untuned = "" if asked == name else ": no tuned record serves this"
            return cls(spec, config, target, facts, f"default config{untuned}")
        problems = []
        for each in families:
            try:
                config = each.find(name)
            except InvalidArgument as error:
                problems.append(str(error))
                continue
            if reason := each.refuses(config, spec, target, facts, group):
                raise InvalidArgument(f"{name}: {reason}; `--config default` always fits")
            return cls(spec, config, target, facts, "as asked")
        raise InvalidArgument(_of_another(name, workload, target, facts) or "; ".join(problems))

    def artifact(self) -> Artifact:
        """Compiled, or from the cache."""
        from flashgen.build.compile import compile_kernel

        return compile_kernel(self.source, self.facts, self.target)

    def usage(self) -> dict[str, Any]:
        """What the compiled kernel uses."""
        artifact = self.artifact()
        return {
            "registers": artifact.registers,
            "spill_bytes": artifact.spill_bytes,
            "shared_bytes": artifact.shared_bytes,
            "shared_available": self.target.shared_per_block,
            "threads": 32 * artifact.num_warps,
            "cubin_bytes": len(artifact.cubin),
            "arguments": [arg.name for arg in artifact.abi.args if arg.constant is None],
        }

    def text(self, view: str) -> str:
        """What is shown of it, as lines."""
        if view == "source":
            return self.source.text
        if view == "ptx":
            return self.artifact().ptx
        if view == "sass":
            from flashgen.build.compile import sass

            return sass(self.artifact().cubin)
        return "\n".join(f"{name}: {value}" for name, value in self.usage().items())

    def to_json(self, view: str) -> dict[str, Any]:
        """Everything a program needs to find the kernel again, and the view."""
        return {
            "name": self.source.name,
            "family": self.config.family,
            "config": self.config.name,
            "tunables": self.config.to_json(),
            "chosen": self.origin,
            "hash": self.source.hash,
            "target": self.target.to_json(),
            "triton": self.source.toolchain.triton,
            **({view: self.usage() if view == "usage" else self.text(view)} if view in VIEWS else {}),
        }

    def print(self, view: str, out: Console) -> None:
        """Text as it is, so that it can be piped; resource use as a table."""
        if view != "usage":
            click.echo(self.text(view).rstrip("\n"))
            return
        rows = Table(f"{self.source.name} on {self.target.describe()}", "", "")
        for name, value in self.usage().items():
            rows.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
        rows.print(out)


def _of_another(name: str, workload: Workload, target: Target, facts: CallFacts) -> str:
    """Of which other families' configs a name is one, and how these are shown; empty if of none."""
    from flashgen.codegen.families import naming, why_not

    lines = []
    for family in naming(name):
        if family.op != workload.spec.op:
            step = "add --backward" if family.op == "bwd" else "leave out --backward"
            told = f"which computes {family.op}, not {workload.spec.op}: {step}"
        elif reason := why_not(family, workload.spec, target, facts, workload.heads_per_kv):
            told = f"which does not serve this: {reason}"
        else:
            told = f"which is not the family asked for: leave out --family, or --family {family.name}"
        lines.append(f"{name} is a config of {family.name}, {told}")
    return "\n".join(lines)


def _check_draw(path: str, diff: tuple[str, str] | None) -> None:
    from flashgen.cli import draw

    if diff:
        raise InvalidArgument("--draw shows the tiles of one config: leave out --diff, or leave out --draw")
    draw.check(path)


def _draw(shown: _Shown, workload: Workload, path: str, as_json: bool) -> None:
    """Writes the picture of a config's tiles and says what is on it."""
    from flashgen.build.inputs import make_rules
    from flashgen.cli import draw
    from flashgen.codegen.families import find_family

    config = shown.config
    made = draw.picture(workload, find_family(config.family).tiling(config))
    mask, _ = make_rules(workload)
    draw.draw(made, f"{mask.describe()}\n{workload.name}, {config.name}", path)
    data = shown.to_json("draw") | {"draw": {"file": path, **made.to_json()}}
    emit(data, as_json, lambda out: out.print(f"drew {path}: {made}"))


def _only(views: list[str]) -> str:
    """The one view that was asked for."""
    if len(views) > 1:
        listed = ", ".join(f"--{each}" for each in views)
        raise InvalidArgument(f"{listed} are different views of a kernel: leave out all but one")
    return views[0] if views else VIEWS[0]


def _target_of_arch(arch: int, gpu: int | None, target: str | None) -> str:
    """The first target of the table with that compute capability, which is told."""
    from flashgen.spec.target import TARGETS

    if gpu is not None or target is not None:
        raise InvalidArgument("--arch chooses a GPU: leave it out, or leave out --gpu and --target")
    found = [name for name, row in TARGETS.items() if row.arch == arch]
    if not found:
        raise UnknownName("arch", arch, {row.arch for row in TARGETS.values()})
    first, *others = found
    also = f"; --target chooses another of sm_{arch}: {', '.join(others)}" if others else ""
    click.echo(f"this is for {first}{also}", err=True)
    return first


def _diff(first: str, second: str, first_name: str, second_name: str) -> list[str]:
    return list(
        difflib.unified_diff(first.splitlines(), second.splitlines(), first_name, second_name, lineterm="")
    )
