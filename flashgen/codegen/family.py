"""Family: one kernel template, with its tunables and everything that says when it may be used."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from flashgen.codegen import arithmetic
from flashgen.codegen.abi import Arg, Grid, Part, Scratch
from flashgen.errors import DoesNotFit, InvalidArgument
from flashgen.spec.attention import AttentionSpec, CallFacts, Workload
from flashgen.spec.config import OPTIONAL, SHORT_NAMES, Config, Value
from flashgen.spec.form import shown
from flashgen.spec.rule import Rule
from flashgen.spec.target import KIB, Target

UNORDERED = "_unordered"
"""How the admission class of a config ends whose sums have no order (`Tiling.repeats`)."""

MOST_PROGRAMS = 4
"""For each multiprocessor, of a kernel that splits keys: so many tiles fill a GPU without splits."""
LEAST_BLOCKS = 8
"""Of keys, of each part in a default that splits them: about what the second kernel costs, 3 to 4 us."""

MOST_IDLE = 4
"""Times as many programs as a config of whole keys has tiles for, and parts that the default would make: from
there on the default, untuned, beats what was tuned for other sizes, by twice or more."""


def listed(mask: Rule, axis: str = "k") -> bool:
    """Whether the blocks of keys (with axis `q`, of queries) that a mask's tiles visit are listed, since no
    ranges express them.

    What knows is imported when asked: a process's first decision, mostly of other masks, is 15 ms sooner.
    """
    from flashgen.spec import tiles

    return tiles.lists(mask, axis) is not None


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes of shared memory, known before the compile only between two bounds."""

    least: int
    """`fits` refuses by this: no compiled kernel took less."""
    most: int
    """A default keeps within this: no compiled kernel took more."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a config divides the work, in the terms that launch, cost model and compiler need."""

    block_m: int
    """Query positions of a tile."""
    block_n: int
    """Keys of a block."""
    num_warps: int
    """Of a program, as the compiler is told; a warp-specialised kernel adds partitions of its own."""
    num_stages: int
    """Blocks of keys in flight."""
    descriptors: bool
    """Whether tiles are loaded by TMA."""
    pack: int = 1
    """Query heads of one key head that a tile holds: it has block_m * pack rows."""
    persistent: bool = False
    """Whether as many programs as there are multiprocessors take tile after tile, from a counter."""
    warps: int = 0
    """Of a program as it runs, where that differs from num_warps."""
    programs: int = 1
    """Programs that share a multiprocessor, as far as the family plans it."""
    max_registers: int = 0
    """Of a thread at the launch, where the compiler is told; warp-specialised programs deal them out anew."""
    splits: int = 1
    """Programs that share a tile, each with a part of its keys."""
    by_keys: bool = False
    """Whether a tile is block_n keys of a key head, and walks blocks of block_m rows."""
    repeats: bool = True
    """Whether two runs on one input give the same bits; sums that programs add to have no order."""

    @property
    def grid(self) -> Grid:
        """How many programs there are."""
        if self.by_keys:
            return Grid("key_tiles", self.block_n)
        if self.persistent:
            return Grid("persistent", self.block_m, self.pack, self.programs, self.splits)
        return Grid("row_tiles", self.block_m, self.pack, splits=self.splits)

    def grid_of(self, spec: AttentionSpec) -> Grid:
        """The same for a spec, whose sequences may be packed."""
        return replace(self.grid, rule=f"packed_{self.grid.rule}") if spec.packed else self.grid

    @property
    def rows(self) -> int:
        """Rows of a tile's matrix products."""
        return self.block_m * self.pack

    def tiles(self, workload: Workload) -> int:
        """Tiles of a call, before their keys are split."""
        packed = workload.spec.packed
        if self.by_keys:
            keys = workload.total_k if packed else workload.k_len
            of_keys = self.grid_of(workload.spec)
            return of_keys.blocks(workload.batch, workload.kv_heads, keys, multiprocessors=1)
        whole = Grid("packed_row_tiles" if packed else "row_tiles", self.block_m, self.pack)
        rows = workload.total_q if packed else workload.q_len
        return whole.blocks(workload.batch, workload.heads, rows, multiprocessors=1)


@dataclass(frozen=True, slots=True)
class Family:
    """A kernel template and its search space.

    `owns`, `supports`, `fits` and `admits` answer with the reason why not, or with empty text; whoever tells
    it names the config before it. Each constraint stands in one of them and nowhere else: search, dispatcher
    and tests call these.
    """

    name: str
    op: str
    template: str
    tunables: tuple[tuple[str, tuple[Value, ...]], ...]
    archs: tuple[int, int]
    """Oldest and newest compute capability that it is for."""
    dtypes: tuple[str, ...]
    tiling: Callable[[Config], Tiling]
    limits: Callable[[Config, AttentionSpec, Target], str]
    """Why a config cannot serve a spec, or does it worse than another for sure; empty where it can."""
    shared_bytes: Callable[[Config, AttentionSpec, Target], Shared]
    """Shared memory a block of the compiled kernel needs."""
    defaults: Callable[[AttentionSpec], tuple[tuple[Value, ...], ...]]
    """Configs to fall back to for a spec, best first, as values of the tunables and, where they are not those
    of `OPTIONAL`, of the options; the last ones fit everywhere."""
    dropout: bool = True
    """Whether its kernels can drop weights at random."""
    leaves: Callable[[AttentionSpec], str] = lambda spec: ""
    """What else of a spec makes it another family's, whatever the config is: why, or empty text."""
    language: str = "triton"
    """Or `gluon`."""
    options: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    """Further tunables, of those that a config leaves out (`spec.config.OPTIONAL`)."""
    split_with: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    """What a search has of other tunables where it splits keys: the best on average. Other values are worth a
    few per cent, where splits are worth a factor, and would treble a space of thousands."""
    derived: Callable[[Config, AttentionSpec], dict[str, Any]] = lambda config, spec: {}
    """What else the template reads: values that follow from config and spec."""
    signature: Callable[[Config, AttentionSpec], tuple[tuple[Arg, ...], ...]] | None = None
    """The main kernel's arguments, grouped by line, where they are not those of `fwd`."""
    parts: Callable[[Config, AttentionSpec], tuple[Part, ...]] = lambda config, spec: ()
    """The other kernels of a rendered file, in the order they run."""
    scratch: Callable[[Config, AttentionSpec], tuple[Scratch, ...]] = lambda config, spec: ()
    """Buffers of a call that the file's kernels share."""

    def config(self, **values: Value) -> Config:
        """A config of this family by tunable names; `InvalidArgument` if one is missing or unknown."""
        given = {name: OPTIONAL[name] for name, _ in self.options} | values
        for name, allowed in (*self.tunables, *self.options):
            if given.get(name) not in allowed:
                listed = ", ".join(map(str, allowed))
                raise InvalidArgument(f"{self.name}: {name}={given.get(name)!r}; allowed: {listed}")
        if extra := values.keys() - dict((*self.tunables, *self.options)).keys():
            raise InvalidArgument(f"{self.name} has no tunable {', '.join(sorted(extra))}")
        written = [name for name, _ in self.tunables]
        written += [name for name, _ in self.options if given[name] != OPTIONAL[name]]
        return Config(self.name, tuple((name, given[name]) for name in written))

    def owns(self, config: Config) -> str:
        """Why a config is none of this family; asked before anything else of one that was read."""
        try:
            owned = self.config(**config.to_json())
        except InvalidArgument as error:
            return str(error)
        if owned != config:
            listed = ", ".join(name for name, _ in self.tunables)
            return f"a config of {config.family} in another form than that of {self.name}: {listed}"
        return ""

    def find(self, name: str) -> Config:
        """The config of a short name such as `m128n64w4s2_tma_heads`.

        Raises:
            InvalidArgument: it reads otherwise, or a part of it is out of range, which is named.
        """
        numbers = "".join(
            rf"{SHORT_NAMES[each]}(?P<{each}>[1-9]\d{{0,8}})"
            for each, _ in self.tunables
            if SHORT_NAMES[each]
        )
        words = "".join(rf"_(?P<{each}>[a-z]+)" for each, _ in self.tunables if not SHORT_NAMES[each])
        for each, _ in self.options:
            if SHORT_NAMES[each]:
                numbers += rf"(?:{SHORT_NAMES[each]}(?P<{each}>[1-9]\d{{0,8}}))?"
            else:
                words += rf"(?:_(?P<{each}>[a-z]+))?"
        read = re.fullmatch(numbers + words, name)
        if read is None:
            raise InvalidArgument(f"{self.name} has no config {shown(name)}; a name reads like {self._form}")
        values: dict[str, Value] = {
            each: int(text) if SHORT_NAMES[each] else text for each, text in read.groupdict().items() if text
        }
        try:
            found = self.config(**values)
        except InvalidArgument as error:
            raise InvalidArgument(f"no config {shown(name)}: {error}") from None
        if found.name != name:
            raise InvalidArgument(f"no config {shown(name)}: it is written {found.name}")
        return found

    @property
    def _form(self) -> str:
        """How names of configs read: one of them, and what others may hold beside its parts."""
        parts = []
        for name, values in self.options:
            others = [value for value in values if value != OPTIONAL[name]]
            if short := SHORT_NAMES[name]:
                parts.append(f"{short}{others[0]} to {short}{others[-1]} ({name}) before its words")
            else:
                parts.append(f"{' or '.join(f'_{value}' for value in others)} at its end")
        example = self.all_configs()[0].name
        return f"{example}, and may have {' and '.join(parts)}" if parts else example

    def all_configs(self) -> tuple[Config, ...]:
        """The whole space, whatever fits, but for split keys: how many parts pay is for a call's sizes."""
        return _all_configs(self)

    def supports(self, spec: AttentionSpec, target: Target) -> str:
        """Why the family cannot serve a spec on a target at all."""
        if spec.op != self.op:
            return f"{self.name} computes {self.op}, not {spec.op}"
        if spec.dtype not in self.dtypes:
            return f"{self.name} serves {', '.join(self.dtypes)}, not {spec.dtype}"
        if spec.dropout and not self.dropout:
            return f"{self.name} draws no random numbers, which dropout needs"
        if reason := self.leaves(spec):
            return f"{self.name} {reason}"
        if spec.packed and spec.quantized:
            return (
                f"{self.name} brings {spec.dtype} values into another order, by one length of all sequences, "
                "and these are packed; give them in bf16 or fp16"
            )
        oldest, newest = self.archs
        if target.vendor != "cuda" or not oldest <= target.arch <= newest:
            wanted = f"sm_{oldest}" if oldest == newest else f"sm_{oldest} or newer"
            return f"{self.name} needs {wanted}, not {target.vendor} {target.arch}"
        return ""

    def fits(self, config: Config, spec: AttentionSpec, target: Target) -> str:
        """Why a config cannot run on a target; decided before anything is compiled."""
        if self.tiling(config).descriptors and not target.has_tma:
            return f"loads by descriptor, which needs sm_90 or newer, not sm_{target.arch}"
        if self.tiling(config).splits > 1 and spec.packed:
            return (
                "splits keys into parts whose buffers have one length of all sequences; these are packed: "
                "take splits=1"
            )
        if self.tiling(config).splits > 1 and listed(spec.mask):
            return "splits keys by the order of their blocks, and this mask lists them; take splits=1"
        if reason := self.limits(config, spec, target):
            return reason
        needed = self.shared_bytes(config, spec, target).least
        if needed > target.shared_per_block:
            return (
                f"needs at least {needed / KIB:.0f} KB of shared memory a block, "
                f"{target.name or target.key} has {target.shared_per_block / KIB:.0f} KB"
            )
        return ""

    def admission(self, config: Config) -> str:
        """Which calls a config can serve: `tma`, `tma_pack4` (its heads in groups of 4), or `any`; of each
        `tma_unordered` serves those alone that need not be deterministic."""
        tiling = self.tiling(config)
        packed = f"_pack{tiling.pack}" if tiling.pack > 1 else ""
        unordered = "" if tiling.repeats else UNORDERED
        return (f"tma{packed}" if tiling.descriptors else "any") + unordered

    def admits(
        self, config: Config, facts: CallFacts, heads_per_kv: int = 1, deterministic: bool = False
    ) -> str:
        """Why a call of this kind cannot be served by a config.

        Args:
            heads_per_kv: query heads of each key head.
            deterministic: whether the result has to have the same bits in every run.
        """
        tiling = self.tiling(config)
        if tiling.descriptors and not facts.tma:
            return f"loads by descriptor, which cannot express the call's {facts.access} tensors"
        if heads_per_kv % tiling.pack:
            return (
                f"packs {tiling.pack} heads of a key head into a tile, of which there are {heads_per_kv}; "
                "pack must divide these"
            )
        if deterministic and not tiling.repeats:
            return "adds to a gradient in any order, and deterministic gradients are asked for"
        return ""

    def refuses(
        self, config: Config, spec: AttentionSpec, target: Target, facts: CallFacts, heads_per_kv: int = 1
    ) -> str:
        """Why a config is no candidate for calls of a kind: it does not fit, or does not admit them."""
        return self.fits(config, spec, target) or self.admits(config, facts, heads_per_kv)

    def space(self, spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
        """Every config that fits, in a fixed order."""
        return tuple(c for c in self.all_configs() if not self.fits(c, spec, target))

    def crowds(self, config: Config, workload: Workload, target: Target) -> str:
        """Why a config that splits keys serves a call worse than one that does not: its rows fill the GPU.

        Buffers of parts grow with the rows, too; so many programs write 100 MB at most.
        """
        tiling = self.tiling(config)
        programs = tiling.tiles(workload) * tiling.splits
        if tiling.splits == 1 or programs <= MOST_PROGRAMS * target.sm_count:
            return ""
        return (
            f"splits each tile's keys among {tiling.splits} programs, which makes {programs} of them: more "
            f"than {MOST_PROGRAMS} for each of {target.sm_count} multiprocessors"
        )

    def idles(self, config: Config, workload: Workload, target: Target, facts: CallFacts) -> str:
        """Why a config of whole keys, tuned for other sizes, serves a call worse than a default that splits.

        A group of 7 heads is packed by no config, so the records of groups of 4 and 8 that split keys are not
        admitted, and the next one may be of 32 heads, which fill the GPU without splits.
        """
        tiling = self.tiling(config)
        tiles, together = tiling.tiles(workload), target.sm_count * tiling.programs
        if tiling.splits > 1 or MOST_IDLE * tiles > together:
            return ""
        try:
            default = self.default(workload.spec, target, facts, workload.heads_per_kv, workload)
        except DoesNotFit:
            return ""
        if default.number("splits") < MOST_IDLE:
            return ""
        return (
            f"splits no keys, and has {tiles} tiles here for {together} programs; the default, "
            f"{default.name}, splits them; tune these sizes for more"
        )

    def outgrows(self, workload: Workload) -> str:
        """Why a call is too long for kernels of any config: float32 no longer tells its positions apart."""
        rule, length = workload.spec.score_mod, max(workload.q_len, workload.k_len)
        if rule is None or length <= arithmetic.MOST_FLOAT:
            return ""
        if not arithmetic.takes_float_distances(rule.expr, rule.types):
            return ""
        return (
            f"takes distances between {length} positions in float32, which is exact up to "
            f"{arithmetic.MOST_FLOAT}"
        )

    def feasible(
        self,
        spec: AttentionSpec,
        target: Target,
        facts: CallFacts,
        heads_per_kv: int = 1,
        workload: Workload | None = None,
    ) -> tuple[Config, ...]:
        """Every config that fits and admits calls of a kind, in a fixed order: what a search may try.

        Of a group's heads it packs none, or as many as it can: what lies between is never the best.

        Args:
            workload: whose sizes say into how many parts keys may be split; without it they are not.
        """
        packs = {self.tiling(config).pack for config in self.all_configs()}
        most = max(pack for pack in packs if heads_per_kv % pack == 0)
        whole = (
            config
            for config in self.all_configs()
            if self.tiling(config).pack in (1, most)
            and not self.refuses(config, spec, target, facts, heads_per_kv)
        )
        if workload is None:
            return tuple(whole)
        return tuple(
            each for config in whole for each in (config, *self._splits(config, spec, workload, target))
        )

    def _splits(
        self, config: Config, spec: AttentionSpec, workload: Workload, target: Target
    ) -> Iterator[Config]:
        """The config with its keys split in each way that a search should try: into no more parts than there
        are blocks of keys, and into so many that a quarter of the multiprocessors have work."""
        if any(config[name] not in values for name, values in self.split_with):
            return
        tiling = self.tiling(config)
        for splits in self._numbers_of_splits(-(-workload.k_len // tiling.block_n)):
            split = self.config(**config.to_json(), splits=splits)
            enough = 4 * tiling.tiles(workload) * splits >= target.sm_count
            if enough and not (self.crowds(split, workload, target) or self.fits(split, spec, target)):
                yield split

    def _numbers_of_splits(self, most: int) -> list[int]:
        """Into how many parts the family can split keys, at most so many."""
        known = dict(self.options).get("splits", ())
        return [each for each in known if isinstance(each, int) and 1 < each <= most]

    def default(
        self,
        spec: AttentionSpec,
        target: Target,
        facts: CallFacts,
        heads_per_kv: int = 1,
        workload: Workload | None = None,
    ) -> Config:
        """The first default that is sure to fit and admits the call.

        Args:
            workload: a call whose rows leave more than half of the GPU idle has its keys split, where the
                family can, into the largest power of two of parts that the GPU runs at once and that leaves
                each `LEAST_BLOCKS`.

        Raises:
            DoesNotFit: none does; the message lists what was tried.
        """
        config = self._default(spec, target, facts, heads_per_kv)
        if workload is None or spec.packed or listed(spec.mask):
            return config
        # A kernel of split keys has the LSE whether the call wants it or not.
        split = self._default(replace(spec, return_lse=True), target, facts, heads_per_kv)
        tiling = self.tiling(split)
        together = target.sm_count * tiling.programs // max(tiling.tiles(workload), 1)
        most = min(together, workload.k_len // (LEAST_BLOCKS * tiling.block_n))
        # Powers of two alone: keys that grow by one at a time load few kernels.
        splits = max((each for each in self._numbers_of_splits(most) if each.bit_count() == 1), default=1)
        return config if splits == 1 else self.config(**split.to_json(), splits=splits)

    def _default(self, spec: AttentionSpec, target: Target, facts: CallFacts, heads_per_kv: int) -> Config:
        reasons = []
        names = [name for name, _ in (*self.tunables, *self.options)]
        for values in self.defaults(spec):
            config = self.config(**dict(zip(names, values, strict=False)))
            reason = self.refuses(config, spec, target, facts, heads_per_kv)
            most = self.shared_bytes(config, spec, target).most
            if not reason and most > target.shared_per_block:
                reason = f"may need {most / KIB:.0f} KB of shared memory a block"
            if not reason:
                return config
            reasons.append(f"{config.name}: {reason}")
        raise DoesNotFit(f"no default config of {self.name} fits; tried:\n  " + "\n  ".join(reasons))


@lru_cache(maxsize=64)
def _all_configs(family: Family) -> tuple[Config, ...]:
    options = [(name, values) for name, values in family.options if name != "splits"]

    def points(tunables: Iterable[tuple[str, tuple[Value, ...]]]) -> list[tuple[tuple[str, Value], ...]]:
        pairs = ([(name, value) for value in values] for name, values in tunables)
        return list(itertools.product(*pairs))

    return tuple(
        Config(family.name, (*point, *((name, value) for name, value in option if value != OPTIONAL[name])))
        for option in points(options)
        for point in points(family.tunables)
    )
