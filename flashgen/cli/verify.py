"""`flashgen verify`: is a bundle whole?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashgen.cli.output import FAILED, emit, json_option

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("bundle", type=click.Path(exists=True))
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
            out.print(f"damaged  {problem}", style="red", soft_wrap=True)
        if report.target:
            out.print(f"for      {report.target}")
        held = f"{report.records} records, {report.kernels} kernels, {report.files} files"
        out.print(f"holds    {held}, {report.bytes / 1e6:.1f} MB")
        whole = "every hash is right" if report.ok else f"{len(report.problems)} problems: export it again"
        out.print(f"verdict  {whole}")

    emit(report.to_json(), as_json, show)
    if not report.ok:
        ctx.exit(FAILED)
