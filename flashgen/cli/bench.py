"""`flashgen bench`: FlashGen and its peers, timed against each other."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flashgen.cli.options import FilePath, Selection, workload_options
from flashgen.cli.output import FAILED, Table, console, count, emit, json_option
from flashgen.errors import FlashGenError, InvalidArgument, NoGPU, UnknownName, Unsupported
from flashgen.settings import VERSION, unwritable

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from flashgen.build.inputs import Inputs
    from flashgen.measure.bench import Clock
    from flashgen.measure.child import Failure
    from flashgen.measure.peers import Launch
    from flashgen.runtime.explain import Explanation
    from flashgen.spec.attention import Workload

HOST_US = 1000.0
"""Launches shorter than this are timed by graph replay: FlashAttention-4's host took up to 0.25 ms a call,
which counts as its kernel's time where that is timed between two events."""
OURS = "flashgen"
WIDENED = "flashgen-16bit"
"""FlashGen on the values of 8-bit inputs in 16 bits, as its peers take them: what 8 bits gain."""
WHOLE = "flashgen-full"
"""FlashGen on as many keys for each block of queries as the mask makes it visit, without mask, score rule and
sinks: what the same tiles cost there."""
COMPARED = (OURS, "cudnn", "fa2", "fa4", "flex")
IMPLS = (*COMPARED, WIDENED, WHOLE)
SHAPE = (
    "op",
    "dtype",
    "head_dim",
    "head_dim_v",
    "mask",
    "score",
    "addressing",
    "batch",
    "heads",
    "kv_heads",
    "q_len",
    "k_len",
)
"""The columns that say what was computed."""
OTHERS = ("sinks", "density")
"""Those of calls that have any: the dtype of the sinks, and how tensors that rules read were drawn."""
TOTALS = ("total_q", "total_k")
"""Those of packed sequences besides: all their tokens; `q_len` and `k_len` are of the longest."""


@click.command()
@workload_options
@click.option(
    "--gpu",
    type=int,
    default=0,
    is_flag=False,
    flag_value=0,
    metavar="[INDEX]",
    help="This machine's GPU, the first or the one of that index.",
)
@click.option(
    "--impls",
    default=",".join(COMPARED),
    show_default=True,
    help="What to compare, by commas; what is not installed is left out, with the reason. "
    f"{WIDENED}: ours on the values of 8-bit inputs in 16 bits, as the peers take them. "
    f"{WHOLE}: ours on full attention with as many tiles, for the speed per tile.",
)
@click.option("--passes", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds over all.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Shapes that are made ready (compiled, checked) at the same time; they are timed one by one.",
)
@click.option("--out", type=FilePath(dir_okay=False), help="Write the rows into this JSON file.")
@click.option("--merge", is_flag=True, help="Keep the rows of the file of --out, and how they were made.")
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds for one shape.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    selection: Selection,
    gpu: int,
    impls: str,
    passes: int,
    jobs: int,
    out: str | None,
    merge: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Times FlashGen against its peers on a GPU.

    One process for each shape; in it all implementations take turns, and the medians over the passes are
    compared. FlashGen runs the kernel that a call gets, so tune the shapes first. With --jobs many shapes
    compile at once (FlexAttention takes 10 s a shape), and while one is timed the others wait.

    \b
    Examples:
      flashgen bench --suite llama3-8b --out benchmarks/nvidia-h200/slice.json
      flashgen bench --head-dim 64 --seq 4096 --mask causal --impls flashgen,cudnn,fa2 --passes 5
      flashgen bench --varlen 32768 --seq 4096 --mask causal
      flashgen bench --suite masks --jobs 12 --impls flashgen,flashgen-full,fa4,flex
    """
    from flashgen.build.device import live_target
    from flashgen.store.files import replaceable

    names = _impls(impls)
    if merge and out is None:
        raise InvalidArgument("--merge keeps the rows of a file: name it with --out FILE")
    workloads = selection.workloads()
    if any(each.spec.dropout for each in workloads):
        raise InvalidArgument(
            "--dropout: each call draws anew what it drops, so no result can be compared with another's; "
            "leave it out, or measure our kernels alone with flashgen tune --dropout"
        )
    if out and (why := unwritable(Path(out).absolute().parent)):  # before minutes of measuring
        raise InvalidArgument(f"--out {out}: {why}; give another file")
    try:
        live_target(gpu)  # before anything else: is there such a GPU?
    except NoGPU as error:
        raise NoGPU(
            f"{error}\nbench measures: run it on a machine with the GPU that you want to know about"
        ) from error
    header = _header(gpu)
    earlier: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []
    if out and merge and Path(out).exists():
        before, earlier = _read(Path(out), header)
    progress = console(stderr=True)
    results = []
    timed = _timed(workloads, {"gpu": gpu, "impls": names, "passes": passes}, jobs, timeout)
    for number, workload in enumerate(workloads, 1):
        progress.print(f"{number}/{len(workloads)}  {workload.spec.key}  {workload.name}")
        results.append(_result(workload, f"{header['date']}/{number}", names, next(timed)))
        rows = _merged(before, [row for result in results for row in result.rows])
        # After each shape, so that an interrupted run keeps what it has; into a pipe or a device once.
        if out and (number == len(workloads) or replaceable(Path(out))):
            _write(Path(out), {"header": _merged_header(header, earlier, rows), "rows": rows})
    data = {
        "header": header,
        "rows": [row for result in results for row in result.rows],
        "left_out": [result.left_out for result in results],
    }
    emit(data, as_json, lambda page: _show(page, results, names))
    wrong = [result.left_out[OURS] for result in results if OURS in result.left_out]
    if OURS in names and wrong:
        click.echo(
            f"flashgen has no row for {len(wrong)} of {count(len(results), 'shape')}: {wrong[0]}", err=True
        )
        ctx.exit(FAILED)


def _impls(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in IMPLS:
            raise UnknownName("implementation", name, IMPLS)
    if not names:
        raise InvalidArgument(f"--impls {text!r} names nothing to compare; known: {', '.join(IMPLS)}")
    return names


# The shapes, in the parent


@dataclass(frozen=True, slots=True)
class Result:
    """What one shape gave."""

    workload: Workload
    rows: list[dict[str, Any]]
    left_out: dict[str, str]
    """Implementations without a row, and why."""


def _timed(
    workloads: Sequence[Workload], options: dict[str, Any], jobs: int, timeout: float
) -> Iterator[Rows | Failure]:
    """What each shape gave, in order, each in a process of its own: a peer that crashes or hangs costs its
    shape only. `jobs` of them are made ready together, and timed once all are.
    """
    from flashgen.measure.child import Child, Failure

    # Each has the cores to itself, or shares them.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if jobs > 1 else {}
    for start in range(0, len(workloads), jobs):
        shapes = workloads[start : start + jobs]
        children = [Child("flashgen.cli.bench:opponents", options, environment) for _ in shapes]
        with ThreadPoolExecutor(len(shapes)) as threads:  # a child lives as long as the thread that began it
            try:
                made_ready = threads.map(lambda child, shape: child.call(shape, timeout), children, shapes)
                for child, failed in zip(children, list(made_ready), strict=True):
                    yield failed if isinstance(failed, Failure) else child.call(None, timeout)
                    child.close()
            finally:
                for child in children:
                    child.close()


def _result(workload: Workload, run: str, impls: Sequence[str], answer: Rows | Failure) -> Result:
    """The rows of a shape with its columns, or the reason of each for having none."""
    from flashgen.measure.child import Failure

    if isinstance(answer, Failure):
        return Result(workload, [], dict.fromkeys(impls, f"{answer.status.value}: {answer.reason}"))
    rows, left_out = answer
    return Result(workload, [shape_of(workload) | row | {"run": run} for row in rows], left_out)


def shape_of(workload: Workload) -> dict[str, Any]:
    """The columns that say what was computed, numbers of rules filled in."""
    from flashgen.build.inputs import density, make_rules

    spec = workload.spec
    mask, score_mod = make_rules(workload)
    read = any(rule.operands for rule in (spec.mask, spec.score_mod) if rule is not None)
    return {
        "op": spec.op,
        "dtype": spec.dtype_label,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "mask": mask.describe(),
        "score": "" if score_mod is None else score_mod.describe(),
        "addressing": spec.addressing,
        "batch": workload.batch,
        "heads": workload.heads,
        "kv_heads": workload.kv_heads,
        "q_len": workload.q_len,
        "k_len": workload.k_len,
        **({"sinks": spec.sinks} if spec.sinks else {}),
        **({"density": density(workload)} if read else {}),
        **({name: getattr(workload, name) for name in TOTALS} if spec.packed else {}),
    }


# One shape, in the child


Rows = tuple[list[dict[str, Any]], dict[str, str]]
"""Rows without the shape's columns, and what was left out and why."""


def opponents(gpu: int, impls: list[str], passes: int) -> Callable[[Workload | None], Rows | None]:
    """What the child does on one GPU: makes a workload ready; asked again, with None, it times it."""
    import torch

    from flashgen.build.device import live_target
    from flashgen.measure.bench import CudaClock
    from flashgen.measure.roofline import floor_us

    torch.cuda.set_device(gpu)
    target = live_target(gpu)
    clock = CudaClock(gpu, target.l2_mib)
    waiting: list[tuple[Workload, Ready]] = []

    def answer(workload: Workload | None) -> Rows | None:
        if workload is not None:
            waiting.append((workload, ready(workload, f"cuda:{gpu}", impls)))
            return None
        workload, opposed = waiting.pop()
        return compared(workload, opposed, clock, passes, floor_us(workload, target))

    return answer


def compared(workload: Workload, opposed: Ready, clock: Clock, passes: int, floor_us: float) -> Rows:
    """Times the implementations of one workload, taking turns."""
    from flashgen.measure.bench import compare
    from flashgen.spec.record import Status

    launches, families, errors, left_out, visits = opposed
    timings = {}
    if launches:
        # Autograd runs a backward pass on its forward pass's stream, which no graph can capture.
        graph_below_us = 0.0 if workload.spec.op == "bwd" else HOST_US
        timings = compare(launches, clock, passes=passes, floor_us=floor_us, graph_below_us=graph_below_us)
    rows = []
    for name, timing in timings.items():
        if timing.status is not Status.OK:
            left_out[name] = f"{timing.status.value}: {timing.reason}"
            continue
        rows.append(
            {
                "impl": name,
                "family": families[name],
                "ms_median": timing.median_us / 1e3,
                "ms_min": timing.min_us / 1e3,
                "ms_max": timing.max_us / 1e3,
                "passes": timing.passes,
                **rate(visits[name].workload if name in visits else workload, timing.median_us),
                "max_error": errors[name],
                **(visits[name].columns() if name in visits else {}),
            }
        )
    times = {row["impl"]: row["ms_median"] for row in rows}
    if WHOLE in times and OURS in times:
        of_a_key = {name: times[name] / visits[name].keys for name in (OURS, WHOLE)}
        row = next(row for row in rows if row["impl"] == OURS)
        row["speed_per_tile"] = of_a_key[WHOLE] / of_a_key[OURS]
    return rows, left_out


@dataclass(frozen=True, slots=True)
class Visits:
    """Which tiles a kernel of ours visits."""

    workload: Workload
    """What it computes."""
    block_m: int
    block_n: int
    tiles: float
    """Blocks of keys for each block of queries, on average."""

    @property
    def keys(self) -> float:
        """Keys that a query meets, on average: kernels with other tiles compare by these."""
        return self.tiles * self.block_n

    def columns(self) -> dict[str, Any]:
        """Of a row."""
        return {"tile": f"{self.block_m}x{self.block_n}", "tiles": round(self.tiles, 3)}


class Ready(NamedTuple):
    """The implementations of a workload, by name."""

    launches: dict[str, Callable[[], Any]]
    families: dict[str, str]
    """The kernel family; empty for a peer."""
    errors: dict[str, float]
    """The largest error against the float32 reference."""
    left_out: dict[str, str]
    """Those that cannot run or are wrong, and why."""
    visits: dict[str, Visits]
    """Of our kernels; not where torch answers, nor of packed sequences."""


def ready(workload: Workload, device: str, impls: Sequence[str]) -> Ready:
    """Builds and checks each implementation."""
    from flashgen.build.inputs import make_inputs
    from flashgen.measure.check import Expected
    from flashgen.measure.peers import build_peer

    inputs = make_inputs(workload, device)
    if workload.spec.op == "bwd":
        return _ready_backward(workload, inputs, impls)
    expected = Expected(inputs, workload.spec)
    made = Ready({}, {}, {}, {}, {})
    for name in impls:
        judge = expected
        try:
            if name == WHOLE:
                whole = _whole(workload, inputs)
                given = make_inputs(whole, device)
                judge = Expected(given, whole.spec)
                launch, made.families[name], visits = _ours(whole, given)
            elif name in (OURS, WIDENED):
                given = inputs if name == OURS else _widened(inputs)
                launch, made.families[name], visits = _ours(workload, given)
            else:
                launch, made.families[name], visits = build_peer(name, inputs), "", None
        except FlashGenError as error:
            made.left_out[name] = str(error)
            continue
        verdict = judge.judge(launch())
        made.errors[name] = verdict.max_error
        if not verdict.ok:
            made.left_out[name] = f"wrong: {verdict.reason}"
            continue
        made.launches[name] = launch
        if visits is not None:
            made.visits[name] = visits
    return made


def _ready_backward(workload: Workload, inputs: Inputs, impls: Sequence[str]) -> Ready:
    """Backward passes alone: each implementation's own forward pass has been before."""
    from flashgen.measure.check_gradients import GradientRig
    from flashgen.measure.peers import build_backward

    rig = GradientRig(inputs, workload.spec, own_forward=True)
    dout, made = inputs.bhsd(rig.dout), Ready({}, {}, {}, {}, {})
    launch: Callable[[], Any]
    for name in impls:
        try:
            if name in (WHOLE, WIDENED):
                raise Unsupported(f"{name} is for the attention itself, and these are gradients")
            if name == OURS:
                launch, made.families[name] = _our_backward(inputs, dout)
            else:
                launch, made.families[name] = build_backward(name, inputs, dout), ""
        except FlashGenError as error:
            made.left_out[name] = str(error)
            continue
        # Others round the gradients of k and v for each query head before they add those of a group.
        of_a_kernel = made.families[name] not in ("", "torch")
        verdict = rig.expected.judge(launch(), slack=1.0 if of_a_kernel else 2.0)
        made.errors[name] = verdict.max_error
        if verdict.ok:
            made.launches[name] = launch
        else:
            made.left_out[name] = f"wrong: {verdict.reason}"
    return made


def _our_backward(inputs: Inputs, dout: Tensor) -> tuple[Callable[[], Any], str]:
    """The backward pass of a user's call, and the family of its kernels; `torch` where none serves."""
    import torch

    from flashgen.measure.peers import backward_of, needing

    inputs = needing(inputs)
    with torch.enable_grad():
        forward, told = _our_call(inputs)
    return backward_of(forward, inputs, dout), told.gradients or "torch"


def _widened(inputs: Inputs) -> Inputs:
    if inputs.quantized is None:
        raise Unsupported(f"{WIDENED} is for 8-bit inputs, and these are wider: it would be {OURS} again")
    return inputs.widened()


def _whole(workload: Workload, inputs: Inputs) -> Workload:
    """Full attention of the same queries, of as many keys as our kernel visits under the mask.

    Raises:
        Unsupported: this is full attention, or no kernel of ours answers whose tiles could be counted.
    """
    from flashgen.spec.attention import FULL

    plain = replace(workload.spec, mask=FULL, score_mod=None, sinks="")
    if plain == workload.spec:
        raise Unsupported(f"{WHOLE} is for masks, score rules and sinks: here it would be {OURS} again")
    _, family, visits = _ours(workload, inputs)
    if visits is None:
        raise Unsupported(
            f"{WHOLE} counts the tiles of a kernel of ours for dense calls; here {family} answers"
        )
    keys = max(round(visits.tiles), 1) * visits.block_n
    return replace(workload, spec=plain, k_len=keys, params=(), documents=0)


def _ours(workload: Workload, inputs: Inputs) -> tuple[Launch, str, Visits | None]:
    """FlashGen as a user calls it, the family of the kernel that answers, `torch` where none does, and the
    tiles that it visits.
    """
    launch, told = _our_call(inputs)
    visits = _visits(workload, told) if inputs.packed is None else None
    return launch, told.family, visits


def _our_call(inputs: Inputs) -> tuple[Launch, Explanation]:
    """The call that a user makes, and what it runs."""
    from flashgen import api
    from flashgen.measure.peers import Packed

    q, k, v = inputs.q, inputs.k, inputs.v
    rules: dict[str, Any] = {
        "mask": inputs.mask,
        "score_mod": inputs.score_mod,
        "sinks": inputs.sinks,
        "scale": inputs.scale,
    }
    if inputs.packed is not None:
        q, k, v = q[0], k[0], v[0]
        places = Packed.of(inputs.packed).arguments()
        told = api.explain(q, k, v, **places, **rules)
        return lambda: inputs.bhsd(api.attention_varlen(q, k, v, **places, **rules)[None]), told
    options: dict[str, Any] = {
        **rules,
        "layout": inputs.layout,
        **({} if inputs.quantized is None else inputs.quantized.arguments()),
    }
    told = api.explain(q, k, v, **options)
    return lambda: inputs.bhsd(api.attention(q, k, v, **options)), told


def _visits(workload: Workload, told: Explanation) -> Visits | None:
    from flashgen.codegen.families import FAMILIES
    from flashgen.measure import roofline

    family = FAMILIES.get(told.family)
    if family is None:
        return None
    tiling = family.tiling(family.find(told.runs))
    tiles = roofline.tiles(workload, tiling.block_m, tiling.block_n)
    return Visits(workload, tiling.block_m, tiling.block_n, tiles)


def rate(workload: Workload, median_us: float) -> dict[str, float]:
    """`tflops`, counting the pairs that the mask leaves; for decoding `tbps`, of keys and values read."""
    from flashgen.measure import roofline

    spec = workload.spec
    if spec.op != "decode" and workload.q_len > 1:
        return {"tflops": roofline.flops(workload) / median_us / 1e6}
    seen = roofline.visible(workload).keys * workload.k_len * workload.batch * workload.kv_heads
    return {"tbps": seen * (spec.head_dim + spec.head_dim_v) * spec.itemsize / median_us / 1e6}


# The file


def _header(gpu: int) -> dict[str, Any]:
    """Where and how the rows were made."""
    from flashgen.build.driver import driver
    from flashgen.build.versions import driver_version
    from flashgen.measure.peers import versions

    return {
        "gpu": driver().device_name(gpu),
        "driver": driver_version(),
        "versions": {
            "flashgen": VERSION,
            "python": platform.python_version(),
            **versions(),
        },
        "command": shlex.join(["flashgen", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


_OF_A_RUN = ("date", "command", "driver", "versions")


def _read(path: Path, header: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a file to merge with, whose GPU must be ours, and how its runs were made."""
    if not path.is_file():
        raise InvalidArgument(f"{path} is no regular file, which --merge could read; leave --merge out")
    try:
        data = json.loads(path.read_text())
        rows, theirs = list(data["rows"]), data["header"]
        list(map(identity, rows))
        list(map(_date, rows))
        runs = [{name: each[name] for name in _OF_A_RUN} for each in theirs.get("runs", [theirs])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f"{path} cannot be merged with: it is no benchmark file ({type(error).__name__}: {error}); "
            "name another with --out, or leave --merge out to replace it"
        ) from error
    if theirs["gpu"] != header["gpu"]:
        raise InvalidArgument(
            f"{path} was measured on {theirs['gpu']}, this is {header['gpu']}; name another file with --out"
        )
    return rows, runs


def _date(row: Mapping[str, Any]) -> str:
    """When the run of a row began, which is its header's date."""
    date: str = row["run"].rpartition("/")[0]
    return date


def _merged_header(
    header: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The header of a new run, and where rows of earlier ones are left, how each of the runs was made."""
    new = {name: header[name] for name in _OF_A_RUN}
    dates = set(map(_date, rows))
    unknown = dates - {each["date"] for each in [*earlier, new]}  # of a file that was put together by hand
    kept = [each for each in earlier if each["date"] in dates or unknown]
    if not kept:
        return dict(header)
    runs = [*kept, new]
    return {**header, "command": "; ".join(each["command"] for each in runs), "runs": runs}


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What was computed."""
    return (*(row[name] for name in SHAPE), *(row.get(name) for name in (*OTHERS, *TOTALS)))


def _merged(before: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows but those of older runs that a new run of the same shape repeats whole.

    Ratios hold within a run only, so an older run stays as long as it compares what newer ones do not.
    """
    repeated: dict[tuple[Any, ...], set[str]] = {}
    for row in new:
        repeated.setdefault(identity(row), set()).add(row["impl"])
    runs: dict[tuple[Any, ...], set[str]] = {}
    for row in before:
        runs.setdefault((identity(row), row["run"]), set()).add(row["impl"])
    kept = [
        row for row in before if not runs[identity(row), row["run"]] <= repeated.get(identity(row), set())
    ]
    return kept + new


def _write(path: Path, data: dict[str, Any]) -> None:
    """One row a line, so that diffs can be read; complete or not at all, see `write_file`."""
    from flashgen.store.files import write_file

    header = json.dumps(data["header"], indent=2).replace("\n", "\n  ")
    rows = ",\n".join("    " + json.dumps(row) for row in data["rows"])
    write_file(path, f'{{\n  "header": {header},\n  "rows": [\n{rows}\n  ]\n}}\n')


# The page


def _show(page: Console, results: Sequence[Result], names: Sequence[str]) -> None:
    comparison(results, names).print(page)
    reasons: dict[tuple[str, str], int] = {}
    for result in results:
        for name, reason in result.left_out.items():
            reasons[name, reason] = reasons.get((name, reason), 0) + 1
    for (name, reason), times in reasons.items():
        page.print(f"{name} has no row for {times} of {count(len(results), 'shape')}: {reason}")


def comparison(results: Sequence[Result], names: Sequence[str]) -> Table:
    """A row for each shape: rates, and how many times faster FlashGen is than each peer."""
    peers = [
        name for name in names if name not in (OURS, WHOLE) and any(_row(each, name) for each in results)
    ]
    ours = OURS in names
    ratios = [f">vs {name}" for name in peers] if ours else []
    if whole := ours and any("speed_per_tile" in row for result in results for row in result.rows):
        ratios.append(">per tile")
    title = "TFLOP/s (decoding: TB/s of K and V), and FlashGen's speed over each peer's"
    rates = [f">{OURS}", *(f"?>{name}" for name in peers)] if ours else [f">{name}" for name in peers]
    made = Table(title, "workload", "sizes", *rates, *ratios)
    for result in results:
        mine = _row(result, OURS)
        cells = [_rate(row) for row in ([mine] if ours else []) + [_row(result, name) for name in peers]]
        if ours:
            cells += [_ratio(mine, _row(result, name)) for name in peers]
        if whole:
            share = (mine or {}).get("speed_per_tile")
            cells.append("-" if share is None else f"{share:.2f}")
        made.add_row(result.workload.spec.key, result.workload.name, *cells)
    return made


def _row(result: Result, name: str) -> dict[str, Any] | None:
    return next((row for row in result.rows if row["impl"] == name), None)


def _rate(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['tflops']:.0f}" if "tflops" in row else f"{row['tbps']:.2f}"


def _ratio(mine: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
    return "-" if mine is None or theirs is None else f"{theirs['ms_median'] / mine['ms_median']:.2f}"
