"""`flashgen tune`: find the fastest correct kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli.options import (
    Device,
    Selection,
    check_kept,
    db_option,
    find_device,
    gpus_options,
    workload_options,
)
from flashgen.cli.output import (
    FAILED,
    INTERRUPTED,
    Table,
    console,
    count,
    emit,
    json_option,
    short_name,
)
from flashgen.errors import InvalidArgument
from flashgen.settings import SETTINGS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from flashgen.spec.attention import Workload
    from flashgen.spec.record import Record
    from flashgen.tune.dry_run import DryRun
    from flashgen.tune.result import Progress, Summary, TuneResult


@click.command()
@workload_options
@click.option("--misses", is_flag=True, help="Tune what running models missed (FLASHGEN_ON_MISS=record).")
@gpus_options
@click.option("--budget", metavar="TIME", help="For the whole run: 90s, 10m, 1h30m.")
@click.option(
    "--trials",
    type=int,
    help="At most so many for each workload and kernel family (two serve most workloads on Hopper).  "
    "[default without a budget: a tenth of the space]",
)
@click.option(
    "--sampler",
    default="guided",
    show_default=True,
    help="guided, tpe, gp (with scipy), random, or grid: the whole space.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that compile.  [default: one per core]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of every random choice.")
@click.option("--dry-run", is_flag=True, help="Say what would be tried and how long it may take; do nothing.")
@db_option
@json_option
@click.pass_context
def tune(
    ctx: click.Context,
    selection: Selection,
    misses: bool,
    gpu: Sequence[int] | str | None,
    target: str | None,
    budget: str | None,
    trials: int | None,
    sampler: str,
    jobs: int | None,
    seed: int,
    dry_run: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Finds the fastest correct kernels and stores all measurements.

    On this machine's GPU (--gpu) candidates are checked against the reference and timed; several GPUs of one
    kind (--gpu all) share the workloads. For another GPU (--target) they are compiled and ranked by a model,
    which any measurement beats. Ctrl-C keeps what was found, and the same command goes on from there.

    \b
    Examples:
      flashgen tune --gpu --suite llama3-8b
      flashgen tune --gpu 1 --model path/to/config.json --budget 10m
      flashgen tune --gpu all --suite llama3-8b
      flashgen tune --gpu --head-dim 128 --heads 32 --kv-heads 8 --seq 4096 --mask causal --dtype bf16
      flashgen tune --target nvidia-h200 --suite ci --trials 8
      flashgen tune --target nvidia-h200 --suite ci --dry-run
    """
    from flashgen.store.db import TuningDB
    from flashgen.tune.plan import Plan, parse_budget

    plan = Plan(
        trials=trials,
        budget_s=None if budget is None else parse_budget(budget),
        sampler=sampler,
        seed=seed,
    )
    workloads = _workloads(selection, misses)
    device = find_device(gpu, target, "rank candidates by a model, for a GPU that is elsewhere")
    offline = device.target if device.index is None else None
    if dry_run:
        from flashgen import api  # torch: after what may be misspelt

        found = api.dry_run(workloads, target=offline, device=device.index, plan=plan, db=url, jobs=jobs)
        emit(found.to_json(), as_json, lambda out: _show_dry_run(out, found))
        if found.problems:
            ctx.exit(FAILED)
        return
    with TuningDB(SETTINGS.db_url(url)) as database:
        check_kept(database)
    from flashgen import api

    with _Page(device, len(workloads)) as page:
        result = api.tune(
            workloads,
            target=offline,
            device=device.gpus or None,
            plan=plan,
            progress=page.update,
            db=url,
            jobs=jobs,
        )
    data = result.to_json()
    measured: list[Record | None] = []
    if device.index is None:
        measured = [_measured(summary.workload, device, url) for summary in result.summaries]
        for row, record in zip(data["workloads"], measured, strict=True):
            row["measured"] = None if record is None else record.to_json()
    emit(data, as_json, lambda out: _show(out, result, workloads, device.index is None, measured))
    if result.interrupted:
        ctx.exit(INTERRUPTED)
    if result.problem or sum(summary.winner is not None for summary in result.summaries) < len(workloads):
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


def _measured(workload: Workload, device: Device, url: str | None) -> Record | None:
    """The measured record that serves a workload: of the user's database, or shipped."""
    from flashgen import api

    record = api.best_record(workload, device.target, db=url)
    if record is None or record.measurement.source == "model":
        return None
    return record if record.workload.bucket() == workload.bucket() else None


FIGURES = 58
"""Columns of a terminal that count, best config and time left take; workload and family get the rest."""


class _Page:
    """The progress bar on standard error: trial, best so far, time left."""

    def __init__(self, device: Device, workloads: int, terminal: Console | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = terminal or console(stderr=True)
        gpus = f"GPU{'s' * (len(device.gpus) > 1)} {', '.join(map(str, device.gpus))}"
        how = "offline, ranked by a model" if device.index is None else f"measured on {gpus}"
        self._offline = device.index is None
        self._console.print(f"tuning {count(workloads, 'workload')} for {device.target.describe()}, {how}")
        self._bars: Bars = Progress(
            TextColumn("{task.description}"),
            *([BarColumn(bar_width=24)] if self._console.width > 120 else []),
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

    @staticmethod
    def _title(progress: Progress, room: int) -> str:
        """Workload and family of a study; where there is little room, the end of the family's name, which
        tells it from the workload's other one, and the beginning of the workload's."""
        workload = f"{progress.index + 1}/{progress.total} {short_name(progress.workload)}"
        family = progress.family
        if len(workload) + 1 + len(family) > room:
            family = family.partition("_")[2] or family
            left = max(room - 1 - len(family), 8)
            workload = workload if len(workload) <= left else f"{workload[: left - 1]}…"
        return f"{workload} {family}"

    def update(self, progress: Progress) -> None:
        """Called by the tuner after each trial."""
        from flashgen.tune.plan import format_seconds

        key = (progress.index, progress.family)
        if key not in self._tasks:
            title = self._title(progress, self._console.width - FIGURES)
            self._tasks[key] = self._bars.add_task(title, total=progress.limit, best="", left="")
        best = progress.best
        time = "" if self._offline or best is None else f"{best.median_us:.1f} us "
        told = "" if best is None else f"best {time}{best.config.name}"
        going = progress.left_s is not None and progress.trial < progress.limit
        left = f"{format_seconds(progress.left_s)} left" if going and progress.left_s is not None else ""
        task = self._tasks[key]
        # Records of earlier runs count too, and may be more than this run would take.
        total = max(progress.limit, progress.trial)
        self._bars.update(task, completed=progress.trial, total=total, best=told, left=left)


def _show(
    out: Console,
    result: TuneResult,
    workloads: Sequence[Workload],
    offline: bool,
    measured: Sequence[Record | None],
) -> None:
    from flashgen.tune.plan import format_seconds

    title = f"{result.target.describe()}, {format_seconds(result.seconds)}"
    # A model's times look like measurements, so nothing but their order is shown.
    figures = ["?>score"] if offline else [">time, us", "?>vs default", "?>TFLOP/s"]
    rows = Table(title, "workload", "winner", *figures, "?>trials", "?refused, failed", "?>took")
    for summary in result.summaries:
        cells = [_number(summary.gain, ".2f")]
        if not offline:
            time = None if summary.winner is None else summary.winner.median_us
            gain = "-" if summary.gain is None else f"{summary.gain:.2f}x"
            cells = [_number(time, ".1f"), gain, _number(summary.tflops, ".3g")]
        rows.add_row(
            short_name(summary.workload),
            _winner(summary, result),
            *cells,
            *_trials(summary),
            format_seconds(summary.seconds),
        )
    reached = {summary.workload for summary in result.summaries}
    for workload in workloads:
        if replace(workload, spec=workload.spec.tuned_as()) in reached:
            continue
        rows.add_row(short_name(workload), _not_reached(result), *["-"] * (len(rows.names) - 2))
    rows.print(out)
    if offline:
        out.print("score: a model's guess of the speed over the default's; a rank, no prediction")
    out.print(
        "trials: of this run + known from earlier runs, of all configs that fit, of all kernel families"
    )
    _show_gpus(out, result)
    for summary in result.summaries:
        if summary.problem:
            out.print(f"{short_name(summary.workload)}: {summary.problem}")
    for record, summary in zip(measured, result.summaries, strict=False):
        if record is not None:
            found = f"{record.config.name}, {record.median_us:.1f} us"
            out.print(f"{short_name(summary.workload)}: calls get what was measured: {found}")
    late = len(workloads) - sum(_tried(summary) for summary in result.summaries)
    if result.problem:
        out.print(f"ended early: {result.problem}")
    elif result.interrupted:
        done = "ranked" if offline else "measured"
        out.print(f"interrupted: all that was {done} is stored, the same command goes on from here")
    elif late:
        out.print(f"the time was up before {late} of {count(len(workloads), 'workload')}: give more --budget")


def _show_dry_run(out: Console, found: DryRun) -> None:
    from flashgen.tune.plan import format_seconds

    rows = Table(
        found.target.describe(),
        *("workload", "family", ">configs", ">feasible", ">known", ">trials", "?>takes", "?tried first"),
    )
    for study in found.studies:
        names = [config.name for config in study.first]
        others = f" and {count(len(names) - 1, 'winner')}" if len(names) > 1 else ""
        rows.add_row(
            short_name(study.workload),
            study.family,
            str(study.configs),
            f"{study.feasible} ({study.feasible / study.configs:.0%})",
            str(study.known),
            str(study.trials),
            format_seconds(study.trials * found.pace.seconds),
            f"{names[0]}{others}" if names else "",
        )
    rows.print(out)
    for lines in (_refusals(found), _tried_first(found)):
        for line in lines:
            out.print(line)
    for workload, problem in found.problems:
        out.print(f"{short_name(workload)}: {problem}")
    for line in _how_long(found):
        out.print(line)
    out.print(f"{found.pace.seconds:.2g} s a trial: {found.pace.rests_on}")
    out.print("nothing was compiled, measured or written")


def _how_long(found: DryRun) -> list[str]:
    """The bound, how much of it the budget has time for, and what the strategy usually takes of that."""
    from flashgen.tune.plan import format_seconds
    from flashgen.tune.search import SAMPLERS

    bound, budget = f"at most {count(found.trials, 'trial')}", found.plan.budget_s
    if budget is None or found.in_time == found.trials:
        within = "" if budget is None else f", within the budget of {format_seconds(budget)}"
        lines = [f"{bound} in about {format_seconds(found.seconds)}{within}"]
    else:
        lines = [
            f"{bound}; the budget of {format_seconds(budget)} has time for about {found.in_time} of them"
        ]
    if found.typical is not None:
        sampler = found.plan.sampler
        each = "{} to {}".format(*SAMPLERS[sampler].typical or ())
        trials = "{} to {}".format(*found.typical)
        times = " to ".join(format_seconds(number * found.pace.seconds) for number in found.typical)
        lines.append(
            f"typically {trials} in {times}: {sampler} stops by itself, mostly after {each} a workload"
        )
    return lines


def _refusals(found: DryRun) -> list[str]:
    """A line for each reason and number of a family's configs, with the workloads unless these are all."""
    groups: dict[tuple[str, str, int], list[str]] = {}
    for study in found.studies:
        for reason, times in study.refused.items():
            groups.setdefault((study.family, reason, times), []).append(short_name(study.workload))
    studies = Counter(study.family for study in found.studies)
    return [
        f"{count(times, 'config')}{f' of {family}' if len(studies) > 1 else ''} refused: "
        f"{reason}{_of(names, studies[family])}"
        for (family, reason, times), names in groups.items()
    ]


def _tried_first(found: DryRun) -> list[str]:
    """What is tried besides the default, a line for each list of configs."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for study in found.studies:
        if names := tuple(config.name for config in study.first[1:]):
            groups.setdefault(names, []).append(short_name(study.workload))
    return [
        f"winners of other runs, tried first: {', '.join(configs)}{_of(names, len(found.studies))}"
        for configs, names in groups.items()
    ]


def _of(names: Sequence[str], everything: int) -> str:
    return "" if len(names) == everything else f" ({'; '.join(names)})"


def _show_gpus(out: Console, result: TuneResult) -> None:
    """Where there are several: their controls, and what came between."""
    if result.gpus:
        out.print("control, us: the same kernel on each GPU, at its start and at its end")
    for gpu in result.gpus:
        times = f"{_number(gpu.before_us, '.1f')}, {_number(gpu.after_us, '.1f')}"
        out.print(f"  {gpu.name}: {times} ({count(gpu.workloads, 'workload')})")
        if gpu.lost:
            out.print(f"  {gpu.name} was lost: {gpu.lost}")
    for warning in result.warnings:
        out.print(f"warning: {warning}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _tried(summary: Summary) -> bool:
    return bool(summary.trials or summary.resumed or summary.problem)


def _winner(summary: Summary, result: TuneResult) -> str:
    if summary.winner is not None:
        return summary.winner.config.name
    if summary.problem:
        return "none, see below"
    if _tried(summary):
        return "none is right"
    return _not_reached(result)


def _not_reached(result: TuneResult) -> str:
    why = "ended early" if result.problem else "interrupted" if result.interrupted else "budget"
    return f"not reached ({why})"


def _trials(summary: Summary) -> tuple[str, str]:
    """How many configs were tried, and what became of those that cannot win."""
    failed: dict[str, Any] = {"refused": summary.refused} if summary.refused else {}
    failed |= {status.lower(): times for status, times in summary.outcomes.items() if status != "OK"}
    resumed = f"+{summary.resumed}" if summary.resumed else ""
    tried = f"{summary.trials}{resumed} of {summary.space}"
    return tried, ", ".join(f"{times} {what}" for what, times in failed.items())
