"""`flashgen export`: tuned kernels as a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashgen.cli.options import Selection, db_option, find_device, gpu_options, workload_options
from flashgen.cli.output import emit, json_option

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@workload_options
@gpu_options
@db_option
@click.option("--out", required=True, type=click.Path(), help="Folder to write; an older bundle is replaced.")
@json_option
def export(
    selection: Selection, gpu: int | None, target: str | None, url: str | None, out: str, as_json: bool
) -> None:
    """Packs tuned kernels into a bundle, a folder.

    A bundle runs without compiler and database, on GPUs like the one it is made for; making it needs no
    GPU. Each workload needs a tuned record: run `flashgen tune` with the same options before.

    \b
    Examples:
      flashgen export --suite llama3-8b --out llama3-8b.bundle
      flashgen export --suite ci --target nvidia-h200 --out ci.bundle
    """
    from flashgen import api
    from flashgen.bundle.load import verify_bundle

    workloads = selection.workloads()
    device = find_device(gpu, target)
    path = api.export(workloads, out, target=device.target, db=url)
    report = verify_bundle(path)

    def show(page: Console) -> None:
        held = f"{report.kernels} kernels, {report.records} records, {report.bytes / 1e6:.1f} MB"
        page.print(f"wrote {path}: {held}")
        page.print(f"for {report.target}")
        page.print(f"use it with flashgen.load_bundle({str(path)!r}); check it with: flashgen verify {path}")

    emit(report.to_json(), as_json, show)
