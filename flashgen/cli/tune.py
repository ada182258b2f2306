"""`flashgen tune`: find the fastest correct kernels."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli.options import Device, Selection, db_option, find_device, gpu_options, workload_options
from flashgen.cli.output import FAILED, INTERRUPTED, console, emit, json_option, table
from flashgen.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from flashgen.spec.attention import Workload
    from flashgen.tune.tuner import Progress, Summary, TuneResult


@click.command()
@workload_options
@click.option("--misses", is_flag=True, help="Tune what running models missed (FLASHGEN_ON_MISS=record).")
@gpu_options
@click.option("--budget", metavar="TIME", help="For the whole run: 90s, 10m, 1h30m.")
@click.option("--trials", type=int, help="At most so many for each workload.  [default: 64 without a budget]")
@click.option("--sampler", default="tpe", show_default=True, help="tpe, random, or grid: the whole space.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that compile.  [default: one per core]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of every random choice.")
@db_option
@json_option
@click.pass_context
def tune(
    ctx: click.Context,
    selection: Selection,
    misses: bool,
    gpu: int | None,
    target: str | None,
    budget: str | None,
    trials: int | None,
    sampler: str,
    jobs: int | None,
    seed: int,
    url: str | None,
    as_json: bool,
) -> None:
    """Finds the fastest correct kernels and stores all measurements.

    On this machine's GPU (--gpu) candidates are checked against the reference and timed. For another GPU
    (--target) they are compiled and ranked by a model, which any measurement beats. Ctrl-C keeps what was
    measured, and the same command goes on from there.

    \b
    Examples:
      flashgen tune --gpu --suite llama3-8b
      flashgen tune --gpu 1 --model path/to/config.json --budget 10m
      flashgen tune --gpu --head-dim 128 --heads 32 --kv-heads 8 --seq 4096 --mask causal --dtype bf16
      flashgen tune --target nvidia-h200 --suite ci --trials 8
    """
    from flashgen import api
    from flashgen.tune.plan import Plan, parse_budget

    plan = Plan(
        trials=trials,
        budget_s=None if budget is None else parse_budget(budget),
        sampler=sampler,
        seed=seed,
    )
    workloads = _workloads(selection, misses)
    device = find_device(gpu, target)
    _check_that_records_are_kept(url)
    with _Page(device, len(workloads)) as page:
        result = api.tune(
            workloads,
            target=device.target if device.index is None else None,
            device=device.index or 0,
            plan=plan,
            progress=page.update,
            db=url,
            jobs=jobs,
        )
    emit(result.to_json(), as_json, lambda out: _show(out, result, len(workloads)))
    if result.interrupted:
        ctx.exit(INTERRUPTED)
    if result.problem or any(summary.winner is None for summary in result.summaries) or not result.summaries:
        ctx.exit(FAILED)


def _workloads(selection: Selection, misses: bool) -> tuple[Workload, ...]:
    if not misses:
        return selection.workloads()
    from flashgen.runtime.misses import misses_path, read_misses

    if selection:
        raise InvalidArgument("--misses names the workloads: leave out the other workload options")
    found = read_misses()
    if not found:
        raise InvalidArgument(
            f"no missed shape is noted in {misses_path()}; run the model with FLASHGEN_ON_MISS=record first"
        )
    return found


def _check_that_records_are_kept(url: str | None) -> None:
    """Raises `StoreError` where a database would open, but only in memory or to read."""
    from flashgen.errors import StoreError
    from flashgen.settings import SETTINGS
    from flashgen.store.db import TuningDB

    with TuningDB(url or SETTINGS.db_url()) as db:
        if db.readonly or not db.persistent:
            raise StoreError(f"nothing that is measured would be kept: {db.notice}; give another --db PATH")


class _Page:
    """The progress bar on standard error: trial, best so far, time left."""

    def __init__(self, device: Device, workloads: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = console(stderr=True)
        how = "offline, ranked by a model" if device.index is None else f"measured on GPU {device.index}"
        self._console.print(f"tuning {workloads} workloads for {device.target.describe()}, {how}")
        self._bars: Bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._tasks: dict[tuple[int, str], TaskID] = {}

    def __enter__(self) -> _Page:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, progress: Progress) -> None:
        """Called by the tuner after each trial."""
        from flashgen.tune.plan import format_seconds

        key = (progress.index, progress.family)
        if key not in self._tasks:
            title = f"{progress.index + 1}/{progress.total} {_short(progress.workload)}"
            self._tasks[key] = self._bars.add_task(title, total=progress.limit, best="", left="")
        best = progress.best
        told = "" if best is None else f"best {best.median_us:.1f} us {best.config.name}"
        going = progress.left_s is not None and progress.trial < progress.limit
        left = f"{format_seconds(progress.left_s)} left" if going and progress.left_s is not None else ""
        task = self._tasks[key]
        self._bars.update(task, completed=progress.trial, total=progress.limit, best=told, left=left)


def _short(workload: Workload) -> str:
    """`d128 causal bf16 b4h32kv8q4096k4096`."""
    spec = workload.spec
    dims = f"d{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"d{spec.head_dim}v{spec.head_dim_v}"
    rules = [rule.name for rule in (spec.mask, spec.score_mod) if rule is not None]
    return " ".join([dims, *rules, spec.dtype_label, workload.name])


def _show(out: Console, result: TuneResult, wanted: int) -> None:
    from flashgen.tune.plan import format_seconds

    title = f"{result.target.describe()}, {format_seconds(result.seconds)}"
    columns = (">time, us", ">TFLOP/s", ">vs default", ">trials", "refused, failed", ">took")
    rows = table(title, "workload", "winner", *columns)
    for summary in result.summaries:
        rows.add_row(*_cells(summary), format_seconds(summary.seconds))
    out.print(rows)
    for summary in result.summaries:
        if summary.problem:
            out.print(f"{_short(summary.workload)}: {summary.problem}", soft_wrap=True)
    if any(s.winner is not None and s.winner.measurement.source == "model" for s in result.summaries):
        out.print("times marked ~ are a model's: they rank configs and predict nothing")
    if result.problem:
        out.print(f"ended early: {result.problem}", soft_wrap=True)
    elif result.interrupted:
        out.print("interrupted: all that was measured is stored, the same command goes on from here")
    elif len(result.summaries) < wanted:
        left = wanted - len(result.summaries)
        out.print(f"the time was up before {left} of {wanted} workloads: the same command goes on from here")


def _cells(summary: Summary) -> list[str]:
    """One row of the table, but for the time it took."""
    winner = summary.winner
    modelled = winner is not None and winner.measurement.source == "model"
    failed: dict[str, Any] = {"refused": summary.refused} if summary.refused else {}
    failed |= {status.lower(): count for status, count in summary.outcomes.items() if status != "OK"}
    resumed = f"+{summary.resumed}" if summary.resumed else ""
    return [
        _short(summary.workload),
        "none is right" if winner is None else winner.config.name,
        "-" if winner is None else f"{'~' if modelled else ''}{winner.median_us:.1f}",
        "-" if summary.tflops is None else f"{summary.tflops:.3g}",
        "-" if summary.gain is None else f"{summary.gain:.2f}x",
        f"{summary.trials}{resumed} of {summary.space}",
        ", ".join(f"{count} {what}" for what, count in failed.items()),
    ]
