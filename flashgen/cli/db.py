"""`flashgen db`: looks after the record database."""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashgen.cli.options import FilePath, check_kept, db_option
from flashgen.cli.output import FAILED, Commands, Table, count, emit, json_option
from flashgen.errors import InvalidArgument, StoreError
from flashgen.settings import SETTINGS
from flashgen.spec.record import Status
from flashgen.spec.target import TARGETS, find_target

if TYPE_CHECKING:
    from rich.console import Console

    from flashgen.spec.record import Record
    from flashgen.store.db import TuningDB

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=Commands)
def db() -> None:
    """Looks after the database of tuned records.

    Copies, health, what is stale.

    \b
    Examples:
      flashgen db check
      flashgen db export --best --out records.jsonl
      flashgen db import records.jsonl
    """


def database_option(function: F) -> F:
    """Adds `--db`, which the command receives as `url`: the setting where it is not given."""

    @functools.wraps(function)
    def command(url: str | None, **options: Any) -> Any:
        return function(url=SETTINGS.db_url(url), **options)

    return db_option(command)  # type: ignore[return-value]


@db.command("export")
@database_option
@click.option("--out", type=FilePath(dir_okay=False), help="Write this file instead of the output.")
@click.option(
    "--tree", type=FilePath(file_okay=False), help="Write FOLDER/<gpu>/<op>.jsonl, as records ship."
)
@click.option(
    "--best", "best_only", is_flag=True, help="Only the fastest of each workload and admission class."
)
@click.option("--target", metavar="NAME", help="Only records of a GPU: " + ", ".join(TARGETS) + ".")
@click.option(
    "--status", type=click.Choice([each.value for each in Status]), help="Only records that ended so."
)
@click.option("--family", metavar="NAME", help="Only records of a kernel family.")
@json_option
def export(
    url: str,
    out: str | None,
    tree: str | None,
    best_only: bool,
    target: str | None,
    status: str | None,
    family: str | None,
    as_json: bool,
) -> None:
    """Writes records as lines of JSON.

    Their order depends on the records alone, so that files can be compared.

    \b
    Examples:
      flashgen db export > records.jsonl
      flashgen db export --best --target nvidia-h200 --out h200.jsonl
      flashgen db export --best --tree tuning_db/records
    """
    if out and tree:
        raise InvalidArgument("--out is a file and --tree a folder: leave out one of them")
    if as_json and not (out or tree):
        raise InvalidArgument("--json reports what was written: add --out FILE or --tree FOLDER")
    from flashgen.store.transfer import export_file, export_records, export_tree

    wanted = None if target is None else find_target(target)
    with _database(url) as database:
        _check_there(database, "there are no records to export")
        records = list(database.best(wanted) if best_only else database.records(wanted))
    records = [
        record
        for record in records
        if status in (None, record.measurement.status.value) and family in (None, record.config.family)
    ]
    if tree:
        written = export_tree(records, Path(tree))
    elif out:
        written = {Path(out): export_file(records, Path(out))}
    else:
        export_records(records, sys.stdout)
        return
    files = {str(path): lines for path, lines in written.items()}

    def show(console: Console) -> None:
        for path, lines in files.items():
            console.print(f"{count(lines, 'record'):>14}  {path}")
        if not files:
            console.print("no record matches; nothing was written")

    emit({"records": len(records), "files": files}, as_json, show)


@db.command("import")
@click.argument("files", nargs=-1, required=True, type=FilePath(exists=True, dir_okay=False, allow_dash=True))
@database_option
@json_option
@click.pass_context
def import_(ctx: click.Context, files: tuple[str, ...], url: str, as_json: bool) -> None:
    """Adds the records of FILES (- is the input). Each file is added whole or not at all.

    A record that is there already is skipped. A line that is no record is reported and passed over; then the
    exit code is 1.

    \b
    Examples:
      flashgen db import records.jsonl
      ssh gpu-machine flashgen db export | flashgen db import -
    """
    from flashgen.store.transfer import import_records

    with _database(url, writes=True) as database:
        where = database.where
        reports = {name: import_records(database, sys.stdin if name == "-" else Path(name)) for name in files}

    def show(console: Console) -> None:
        for name, report in reports.items():
            console.print(
                f"{name}: {report.added} added, {report.skipped} were there already, {len(report.bad)} bad"
            )
            for line, problem in report.bad:
                console.print(f"  line {line}: {problem}")
        console.print(f"into {where}")

    emit({"database": where, "files": {n: r.to_json() for n, r in reports.items()}}, as_json, show)
    if any(report.bad for report in reports.values()):
        ctx.exit(FAILED)


@db.command("check")
@database_option
@json_option
@click.pass_context
def check(ctx: click.Context, url: str, as_json: bool) -> None:
    """Examines the database and counts records.

    Changes nothing. A record is stale when today's template renders another kernel for its config. The
    records that come with FlashGen are counted beside those of the database. Exit code 1 if the database is
    damaged, or there is none.

    \b
    Examples:
      flashgen db check
      flashgen db check --db team.db --json
    """
    from flashgen.store.shipped import ShippedRecords
    from flashgen.store.today import current_hash

    shipped = ShippedRecords(current_hash=current_hash)
    with _database(url) as database:
        problems = [*([database.notice] if database.notice else []), *database.problems()]
        try:
            version = database.version() if database.persistent else ""
            records = list(database.records())
        except StoreError as error:
            problems.append(str(error))
            version, records = "", []
        stale = [record for record in records if database.stale(record)]
        known = list(shipped.records())
        data: dict[str, Any] = {
            "database": database.where,
            "exists": database.persistent or bool(database.notice),
            "schema": version,
            "problems": problems,
            "records": len(records),
            "stale": len(stale),
            "counts": _counts(records, stale),
            "shipped": {"records": len(known), "stale": sum(map(shipped.stale, known))},
        }

    def show(console: Console) -> None:
        if not data["exists"]:
            console.print(f"{data['database']}: no database here; the first tuning makes it")
        else:
            console.print(f"{data['database']}: schema {version or 'unreadable'}")
        counts = Table("", "gpu", "spec", "status", ">records", ">stale")
        for row in data["counts"]:
            numbers = str(row["records"]), str(row["stale"])
            counts.add_row(row["gpu"] or row["target"], row["spec"], row["status"], *numbers)
        if records:
            counts.print(console)
        console.print(f"{count(len(records), 'record')}, {len(stale)} stale")
        console.print(
            f"shipped with FlashGen: {count(len(known), 'record')}, {data['shipped']['stale']} stale"
        )
        for problem in problems:
            console.print(f"problem: {problem}")
        if data["exists"] and not problems:
            console.print("healthy")

    emit(data, as_json, show)
    if problems or not data["exists"]:
        ctx.exit(FAILED)


@db.command("revalidate")
@database_option
@click.option("--gpu", type=int, default=0, show_default=True, metavar="INDEX", help="The GPU to measure on.")
@click.option(
    "--fastest",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="How many stale records of each workload and admission class; the slower ones could hardly win.",
)
@json_option
@click.pass_context
def revalidate(ctx: click.Context, url: str, gpu: int, fastest: int, as_json: bool) -> None:
    """Measures stale records again.

    With today's kernels, on the GPU the records are of. Old records are kept, as hints. Without that GPU
    nothing is measured: the stale records are listed, and the exit code is 1, as where there is no database.

    \b
    Examples:
      flashgen db revalidate
      flashgen db revalidate --fastest 16 --json
    """
    from flashgen.build.device import device_count, live_target
    from flashgen.store.revalidate import find_stale
    from flashgen.store.revalidate import revalidate as measure_again
    from flashgen.store.today import current_hash

    target = live_target(gpu) if device_count() else None
    renewed: list[tuple[Record, Record]] = []
    with _database(url) as database:  # to read: one that is not there is not made
        _check_there(database, "there are no records to measure again")
        stale = find_stale(database, current_hash, fastest=fastest)
    here = tuple(record for record in stale.renewable if record.target == target)
    elsewhere = [record for record in stale.renewable if record.target != target]
    if here:
        from flashgen.api import remeasurer

        with _database(url, writes=True) as database, remeasurer(gpu, here) as remeasure:
            for old, new in measure_again(database, here, remeasure):
                renewed.append((old, new))
                if not as_json:
                    click.echo(f"{_line(old)} -> {_outcome(new)}")
    data = {
        "gpu": target and target.describe(),
        "renewed": [{"record": old.to_json(), "result": new.measurement.to_json()} for old, new in renewed],
        "left": [record.to_json() for record in elsewhere],
        "gone": [record.to_json() for record in stale.gone],
    }

    def show(console: Console) -> None:
        if target is None and elsewhere:
            console.print(
                "no GPU here: nothing was measured; run this on a machine with the GPU the records are of"
            )
        for record in elsewhere:
            console.print(f"stale   {_line(record)}  on {record.target.describe()}")
        for record in stale.gone:
            console.print(f"gone    {_line(record)}  the config no longer exists")
        console.print(f"{len(renewed)} measured again, {len(elsewhere)} stale, {len(stale.gone)} gone")

    emit(data, as_json, show)
    if elsewhere and not renewed:
        ctx.exit(FAILED)


@db.command("upgrade")
@database_option
@json_option
def upgrade(url: str, as_json: bool) -> None:
    """Brings the database to today's schema, or makes it.

    Opening a database for writing does the same; a copy of an older SQLite file is kept beside it.

    \b
    Examples:
      flashgen db upgrade
      flashgen db upgrade --db postgresql://user@host/flashgen
    """
    with _database(url, writes=True) as database:
        data = {"database": database.where, "schema": database.version(), "notice": database.notice}

    def show(console: Console) -> None:
        console.print(f"{data['database']}: schema {data['schema']}")

    emit(data, as_json, show)


@contextmanager
def _database(url: str, writes: bool = False) -> Iterator[TuningDB]:
    """The database, to read unless the command `writes`; its warnings are plain lines on the error output."""
    from flashgen.store.db import TuningDB
    from flashgen.store.notices import StoreWarning
    from flashgen.store.today import current_hash

    def tell(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, StoreWarning):
            click.echo(f"warning: {message}", err=True)
        else:
            usual(message, category, *place, **more)

    usual = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always", StoreWarning)
        warnings.showwarning = tell
        with TuningDB(url, readonly=not writes, current_hash=current_hash) as database:
            if writes:
                check_kept(database)
            yield database


def _check_there(database: TuningDB, lacking: str) -> None:
    """Asked by commands that have nothing to do without a database.

    Args:
        lacking: what such a command has nothing of, in words.

    Raises:
        StoreError: there is none, or none that can be read.
    """
    if not database.persistent:
        why = database.notice or f"{database.where} does not exist"
        raise StoreError(f"{lacking}: {why}; the first tuning makes the database")


def _counts(records: list[Record], stale: list[Record]) -> list[dict[str, Any]]:
    def key(record: Record) -> tuple[str, str, str]:
        return (record.target.key, record.workload.spec.key, record.measurement.status.value)

    old = Counter(map(key, stale))
    names = {record.target.key: record.target.name for record in records}
    return [
        {
            "gpu": names[target],
            "target": target,
            "spec": spec,
            "status": status,
            "records": number,
            "stale": old[target, spec, status],
        }
        for (target, spec, status), number in sorted(Counter(map(key, records)).items())
    ]


def _line(record: Record) -> str:
    return f"{record.workload.spec.key} {record.workload.name} {record.config.name} {record.median_us:.1f} us"


def _outcome(record: Record) -> str:
    measured = record.measurement
    return (
        f"{record.median_us:.1f} us"
        if measured.status is Status.OK
        else f"{measured.status.value}: {measured.reason}"
    )
