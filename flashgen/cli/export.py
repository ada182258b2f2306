"""`flashgen export`: tuned kernels as a bundle."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from flashgen.cli.options import (
    Device,
    FilePath,
    Selection,
    db_option,
    find_device,
    gpu_options,
    workload_options,
)
from flashgen.cli.output import count, emit, json_option
from flashgen.cli.verify import STALE
from flashgen.errors import NotTuned

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@workload_options
@gpu_options
@db_option
@click.option("--out", required=True, type=FilePath(), help="Folder to write; an older bundle is replaced.")
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
    workloads = selection.workloads()
    device = find_device(gpu, target, "pack kernels for a GPU that is elsewhere")
    from flashgen import api  # torch: after what may be misspelt
    from flashgen.bundle.load import verify_bundle

    def tell(done: int, total: int, name: str) -> None:
        click.echo(f"compiled {done}/{total}  {name}", err=True)

    try:
        path = api.export(workloads, out, target=device.target, db=url, progress=tell)
    except NotTuned as error:
        raise NotTuned(f"{error}: {_tuning(selection, device, url)}") from error
    report = verify_bundle(path)

    def show(page: Console) -> None:
        held = [
            count(report.kernels, "kernel"),
            count(report.records, "record"),
            f"{report.bytes / 1e6:.1f} MB",
        ]
        page.print(f"wrote {path}: {', '.join(held)}")
        page.print(f"for {report.target}")
        if report.stale:
            page.print(STALE.format(count(report.stale, "record")))
        page.print(f"use it with flashgen.load_bundle({str(path)!r}); check it with: flashgen verify {path}")

    emit(report.to_json(), as_json, show)


def _tuning(selection: Selection, device: Device, url: str | None) -> str:
    """The command that tunes what could not be exported."""
    where = f"--target {device.target.name}" if device.index is None else f"--gpu {device.index}"
    store = "" if url is None else " " + shlex.join(["--db", url])
    return f"flashgen tune {where} {selection.words}{store}"
