"""Options that several commands share: which workloads, and which GPU."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashgen.errors import InvalidArgument, NoGPU, StoreError
from flashgen.settings import SETTINGS
from flashgen.spec import masks, score_mods
from flashgen.spec.attention import DTYPES, MAX_INDEX, SINK_DTYPES, Workload
from flashgen.spec.form import brief
from flashgen.spec.target import TARGETS, Target, find_target
from flashgen.tune.suites import (
    SUITES,
    TOKENS,
    packed,
    suite_workloads,
    workloads_from_args,
    workloads_from_hf_config,
)

if TYPE_CHECKING:
    from flashgen.store.db import TuningDB

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_SEQ = 4096
DEFAULT_TARGET = "nvidia-h200"
"""What commands that only look work for where there is neither a GPU nor a choice."""


class FilePath(click.Path):
    """The path of every path option. An empty one, as an unset variable of a shell gives, names nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, as it is."""
        if not value:
            self.fail("an empty text names no file and no folder; give a path", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True)
class Selection:
    """The workloads a command line names: of suites, of a model, or of explicit sizes."""

    suite: tuple[str, ...] = ()
    model: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    batch: int | None = None
    seq: tuple[int, ...] = ()
    q_len: int | None = None
    k_len: int | None = None
    varlen: int | None = None
    mask: tuple[str, ...] = ()
    documents: int | None = None
    score: str | None = None
    sinks: str | None = None
    dropout: bool | None = None
    """Whether weights are dropped; None is no."""
    dtype: str | None = None
    backward: bool | None = None
    """Whether gradients are meant; None is no."""

    def __bool__(self) -> bool:
        """Whether anything was named."""
        return any(getattr(self, f.name) not in (None, ()) for f in fields(self) if f.name != "backward")

    @property
    def words(self) -> str:
        """As a command line gives it, to be repeated."""
        words = []
        for f in fields(self):
            value = getattr(self, f.name)
            for each in value if isinstance(value, tuple) else () if value is None else (value,):
                words += [_option(f.name)] if each is True else [_option(f.name), str(each)]
        return shlex.join(words)

    def _refuse(self, option: str, why: str, *allowed: str) -> None:
        names = [f.name for f in fields(self) if f.name not in (*allowed, "backward")]
        given = [_option(name) for name in names if getattr(self, name) not in (None, ())]
        if given:
            raise InvalidArgument(f"{option} {why}: leave out {', '.join(given)}, or leave out {option}")

    def _check_sizes(self) -> None:
        """Names a size as it was given: one option may set several sizes of a workload."""
        for f in fields(self):
            given = getattr(self, f.name)
            for size in given if isinstance(given, tuple) else (given,):
                if isinstance(size, int) and not 1 <= size <= MAX_INDEX:
                    raise InvalidArgument(
                        f"{_option(f.name)} {brief(str(size), 40)} must be at least 1 and at most {MAX_INDEX}"
                    )

    def workloads(self) -> tuple[Workload, ...]:
        """What was named.

        Raises:
            InvalidArgument: nothing was, two ways were mixed, or a size or name is not served.
        """
        if self.suite:
            self._refuse("--suite", "names its shapes", "suite")
            return self._meant(each for name in self.suite for each in suite_workloads(name))
        if self.model is not None:
            self._refuse("--model", "gives heads, head dim, dtype and masks", "model", "seq")
            self._check_sizes()
            return self._meant(workloads_from_hf_config(self.model, self.seq or None))
        if not self:
            raise InvalidArgument(
                "no workload was named; give --suite NAME, --model path/to/config.json, or sizes such as "
                "--head-dim 128 --heads 32 --kv-heads 8 --seq 4096 --mask causal"
            )
        return self.explicit()

    def explicit(self) -> tuple[Workload, ...]:
        """The workloads of the given sizes; what was not given has the default that `--help` names."""
        self._check_sizes()
        if self.seq and self.q_len is not None:
            raise InvalidArgument("--seq and --q-len both set the number of queries: leave out one of them")
        only_keys = DEFAULT_SEQ if self.k_len is None else self.k_len
        lengths = self.seq or (only_keys if self.q_len is None else self.q_len,)
        return self._meant(
            replace(
                workload if self.varlen is None else packed(workload, self.varlen),
                documents=self.documents or 0,
            )
            for length in lengths
            for workload in workloads_from_args(
                head_dim=128 if self.head_dim is None else self.head_dim,
                heads=32 if self.heads is None else self.heads,
                kv_heads=self.kv_heads,
                seq=length,
                k_len=self.k_len,
                mask=self.mask or "full",
                score_mod=self.score,
                sinks=self.sinks or "",
                dropout=bool(self.dropout),
                dtype=self.dtype or "bf16",
                batch=self._batch(max(length, self.k_len or 1, 1), length),
                head_dim_v=self.head_dim_v,
            )
        )

    def _meant(self, forward: Iterable[Workload]) -> tuple[Workload, ...]:
        """The workloads themselves, or their gradients; each once."""
        meant = (replace(each, spec=each.spec.backward()) if self.backward else each for each in forward)
        return tuple(dict.fromkeys(meant))

    def _batch(self, longest: int, q_len: int) -> int:
        """Sequences; of packed ones so many that they are half as long as the longest on average."""
        if self.batch is not None:
            return self.batch
        return max(1, TOKENS // longest) if self.varlen is None else -(-2 * self.varlen // q_len)


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _listed(names: Any) -> str:
    return ", ".join(names)


_WORKLOAD_OPTIONS = (
    click.option(
        "--suite",
        metavar="NAME",
        multiple=True,
        help=f"A named set of workloads: {_listed(SUITES)}; repeatable.",
    ),
    click.option(
        "--model",
        metavar="FILE",
        type=FilePath(exists=True),
        help="A Hugging Face config.json: heads, kv heads, head dim, window.",
    ),
    click.option("--head-dim", type=int, help="Elements of a query and a key.  [default: 128]"),
    click.option("--head-dim-v", type=int, help="Elements of a value.  [default: as --head-dim]"),
    click.option("--heads", type=int, help="Query heads.  [default: 32]"),
    click.option("--kv-heads", type=int, help="Key and value heads.  [default: as --heads]"),
    click.option("--batch", type=int, help="Sequences.  [default: as many as 16384 tokens hold]"),
    click.option("--seq", type=int, multiple=True, help="Queries, and keys; repeatable.  [default: 4096]"),
    click.option("--q-len", type=int, help="Queries, where they differ from the keys."),
    click.option(
        "--varlen",
        type=int,
        metavar="TOKENS",
        help="Packed sequences of so many queries together, the longest of --seq; keys in proportion.",
    ),
    click.option("--k-len", type=int, help="Keys, where they differ from the queries."),
    click.option(
        "--mask",
        metavar="MASK",
        multiple=True,
        help=f"{_listed(masks.MASKS)}, joined by &, |, ~: 'causal & sliding_window(1023, 0)'; repeatable.  "
        "[default: full]",
    ),
    click.option(
        "--documents",
        type=int,
        help="Documents of each sequence under a document mask, cut at random.  "
        "[default: lengths from a 16th to a quarter of the keys]",
    ),
    click.option("--score", metavar="RULE", help=f"{_listed(score_mods.SCORE_MODS)}: 'softcap(30.0)'."),
    click.option(
        "--sinks",
        type=click.Choice(SINK_DTYPES),
        is_flag=False,
        flag_value=SINK_DTYPES[0],
        help="A logit for each query head, one more score of its rows without a value; its dtype, "
        f"{SINK_DTYPES[0]} where none is named.  [default: none]",
    ),
    click.option(
        "--dropout",
        is_flag=True,
        default=None,
        help="Weights are dropped at random; no kernel depends on how many.",
    ),
    click.option("--dtype", type=click.Choice(list(DTYPES)), help="Of the inputs.  [default: bf16]"),
    click.option(
        "--backward",
        is_flag=True,
        default=None,
        help="The gradients of q, k and v in place of the attention itself.",
    ),
)


def workload_options(function: F) -> F:
    """Adds the options that name workloads; the command receives them as one `selection`."""
    names = [f.name for f in fields(Selection)]

    @functools.wraps(function)
    def command(**options: Any) -> Any:
        picked = {name: options.pop(name) for name in names}
        return function(selection=Selection(**picked), **options)

    for option in reversed(_WORKLOAD_OPTIONS):
        command = option(command)
    return command  # type: ignore[return-value]


def db_option(function: F) -> F:
    """Adds `--db`, which the command receives as `url`; None means the user's own database."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        SETTINGS.db_url(value)
        return value

    return click.option(
        "--db",
        "url",
        metavar="PATH|URL",
        callback=check,
        help="The record database.  [default: FLASHGEN_DB, else tuning.db in your data folder]",
    )(function)


def check_kept(database: TuningDB) -> None:
    """Asked by every command that writes to a database.

    Raises:
        StoreError: the database is open, but only in memory or to read.
    """
    if database.readonly or not database.persistent:
        why = database.notice or f"{database.where} is no file"
        raise StoreError(f"nothing would be kept: {why}; give another --db PATH")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU to work for: one of this machine, or any of the table for work without one."""

    target: Target
    gpus: tuple[int, ...] = ()
    """Indices of this machine's GPUs, which are all `target`; none when the work is offline."""

    @property
    def index(self) -> int | None:
        """Of the first GPU; None when the work is offline."""
        return self.gpus[0] if self.gpus else None


def _gpus(value: Any) -> tuple[int, ...] | str:
    """The indices in `0` or `0,2`; or `all`."""
    if value == "all":
        return "all"
    try:
        return tuple(int(each) for each in str(value).split(","))
    except ValueError:
        message = f"{value!r} names no GPU; give an index, several as 0,2, or all"
        raise click.BadParameter(message) from None


def gpu_options(function: F) -> F:
    """Adds `--gpu [INDEX]` and `--target NAME`; see `find_device`."""
    return _gpu_options(function, int, "[INDEX]", "the first or the one of that index.")


def gpus_options(function: F) -> F:
    """As `gpu_options`, of any number of GPUs of one kind."""
    return _gpu_options(function, _gpus, "[INDEX,..|all]", "the first, those of these indices, or all.")


def _gpu_options(function: F, kind: Callable[[Any], Any], metavar: str, which: str) -> F:
    for option in (
        click.option(
            "--target",
            metavar="NAME",
            help=f"Work offline for a GPU of this list: {_listed(TARGETS)}.",
        ),
        click.option(
            "--gpu",
            type=kind,
            is_flag=False,
            flag_value=0,
            metavar=metavar,
            help=f"This machine's GPU, {which}",
        ),
    ):
        function = option(function)
    return function


def find_device(gpu: int | Sequence[int] | str | None, target: str | None, offline: str) -> Device:
    """What `--gpu` and `--target` name, else the setting FLASHGEN_TARGET, else this machine's first GPU.

    Args:
        offline: what the command does with `--target`, for the error of a machine without a GPU.

    Raises:
        UnknownName: no such target.
        InvalidArgument: both were given, there is no GPU of an index, or those named differ.
        NoGPU: this machine has none, and no target was named.
    """
    if gpu is not None and target is not None:
        raise InvalidArgument("--gpu is a GPU of this machine, --target is offline work: leave out one")
    if target is None and gpu is None:
        target = SETTINGS.target or None
    if target is not None:
        return Device(find_target(target))
    from flashgen.build.device import alike_gpus

    try:
        found = alike_gpus(0 if gpu is None else gpu)
        return Device(next(iter(found.values())), tuple(found))
    except NoGPU as error:
        instead = " in place of --gpu" if gpu is not None else ""
        raise NoGPU(f"{error}\n{offline}: --target NAME{instead}\nknown: {_listed(TARGETS)}") from error


def find_device_to_look_at(gpu: int | None, target: str | None) -> Device:
    """As `find_device`, but where nothing is named and there is no GPU, `DEFAULT_TARGET`, which is told."""
    try:
        return find_device(gpu, target, "look at another GPU")
    except NoGPU:
        if gpu is not None:
            raise
    click.echo(f"no GPU here: this is for {DEFAULT_TARGET}; --target NAME chooses another", err=True)
    return Device(find_target(DEFAULT_TARGET))
