"""`flashgen simulate`: samplers compared over recorded measurements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from flashgen.cli.options import FilePath
from flashgen.cli.output import Table, count, emit, json_option, short_name

if TYPE_CHECKING:
    from rich.console import Console

    from flashgen.tune.simulate import Score, Simulation


@click.command()
@click.argument(
    "data", nargs=-1, required=True, type=FilePath(exists=True, dir_okay=False), metavar="DATA..."
)
@click.option(
    "--sampler",
    "samplers",
    metavar="NAME",
    multiple=True,
    help="As of `flashgen tune`; repeatable.  [default: all that run here, without grid]",
)
@click.option("--trials", type=int, help="At most so many for each workload and kernel family.")
@click.option("--share", type=float, help="In place of --trials: of the feasible space.  [default: 0.1]")
@click.option("--seeds", type=int, default=20, show_default=True, help="Runs of each sampler and workload.")
@click.option(
    "--noise", type=float, default=0.0, show_default=True, help="Of each timing, relative: 0.01 is 1 %."
)
@json_option
def simulate(
    data: tuple[str, ...],
    samplers: tuple[str, ...],
    trials: int | None,
    share: float | None,
    seeds: int,
    noise: float,
    as_json: bool,
) -> None:
    """Compares samplers over recorded measurements, without a GPU.

    DATA are files of records that hold nearly every feasible config of their workloads, as `flashgen tune
    --gpu --sampler grid` and then `flashgen db export` write them; of several records of one config the last
    counts. They answer the tuner in place of the GPU. Each run tunes one workload from an empty database;
    its winner's recorded time, without noise, is compared with the best recorded.

    \b
    Examples:
      flashgen simulate records.jsonl
      flashgen simulate records.jsonl --sampler tpe --sampler random --trials 40 --noise 0.01
    """
    from flashgen.tune.search import check_sampler

    for name in samplers:
        check_sampler(name)
    from flashgen import api  # torch: after what may be misspelt

    def tell(done: int, total: int, score: Score) -> None:
        assert score.workload is not None
        click.echo(f"simulated {done}/{total}  {score.sampler}  {short_name(score.workload)}", err=True)

    found = api.simulate(data, samplers, trials=trials, share=share, seeds=seeds, noise=noise, progress=tell)
    emit(found.to_json(), as_json, lambda out: _show(out, found))


def _show(out: Console, found: Simulation) -> None:
    spaces = Table(
        f"recorded on {found.target.describe()}",
        *("workload", ">feasible", ">recorded", "best", ">us", ">default slower by"),
    )
    for each in found.landscapes:
        spaces.add_row(
            short_name(each.workload),
            str(each.space),
            str(len(each.records)),
            each.best.name,
            f"{each.best_us:.1f}",
            _percent(each.default_slower),
        )
    spaces.print(out)
    noise = f"timings with {found.noise:.2%} noise" if found.noise else "timings without noise"
    rows = Table(
        f"winner slower than the best by (median, 95th percentile of {count(found.seeds, 'run')}), {noise}",
        *(
            "sampler",
            "workload",
            ">median",
            ">95th",
            ">worst",
            ">best found",
            "?>trials",
            "?>of space",
        ),
    )
    for score in found.scores:
        rows.add_row(
            score.sampler,
            "all" if score.workload is None else short_name(score.workload),
            *map(_percent, (score.median, score.p95, score.worst)),
            f"{score.found} of {len(score.runs)}",
            f"{score.trials:g}",
            f"{score.share:.1%}",
        )
    rows.print(out)
    for _, reason in found.left_out:
        out.print(f"left out: {reason}")


def _percent(slower: float) -> str:
    return f"{slower:.2%}" if math.isfinite(slower) else "no winner"
