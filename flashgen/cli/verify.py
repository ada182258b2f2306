"""`flashgen verify`: is a bundle whole?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashgen.cli.options import FilePath
from flashgen.cli.output import FAILED, count, emit, json_option

if TYPE_CHECKING:
    from rich.console import Console


STALE = (
    "{} measured another kernel than the bundle has, for the templates have changed since: their "
    "times are hints. Run flashgen db revalidate on such a GPU, then export again"
)


@click.command()
@click.argument("bundle", type=FilePath(exists=True))
@json_option
@click.pass_context
def verify(ctx: click.Context, bundle: str, as_json: bool) -> None:
    """Compares every file of a BUNDLE with its manifest.

    Needs no GPU, and loads nothing. Exit code 1 if a file is damaged, missing or not of the bundle.

    \b
    Examples:
      flashgen verify llama3-8b.bundle
      flashgen verify llama3-8b.bundle --json
    """
    from flashgen.bundle.load import verify_bundle

    report = verify_bundle(bundle)

    def show(out: Console) -> None:
        for problem in report.problems:
            out.print(f"damaged  {problem}", style="red")
        if report.target:
            out.print(f"for      {report.target}")
        held = (
            count(report.records, "record"),
            count(report.kernels, "kernel"),
            count(report.files, "file"),
            f"{report.bytes / 1e6:.1f} MB",
        )
        out.print(f"holds    {', '.join(held)}")
        if report.stale:
            out.print(f"stale    {STALE.format(count(report.stale, 'record'))}")
        damage = f"{count(len(report.problems), 'problem')}: export it again"
        out.print(f"verdict  {'every hash is right' if report.ok else damage}")

    emit(report.to_json(), as_json, show)
    if not report.ok:
        ctx.exit(FAILED)
