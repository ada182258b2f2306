"""Families: one kernel template each, with its tunables and everything that says when it may be used."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from flashgen.errors import DoesNotFit, InvalidArgument, UnknownName, Unsupported
from flashgen.spec.attention import AttentionSpec, CallFacts, head_dim_chunks
from flashgen.spec.config import SHORT_NAMES, Config, Value
from flashgen.spec.form import shown
from flashgen.spec.target import KIB, Target


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes of shared memory, known before the compile only between two bounds."""

    least: int
    """`fits` refuses by this: no compiled kernel took less."""
    most: int
    """A default keeps within this: no compiled kernel took more."""


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
    min_arch: int
    dtypes: tuple[str, ...]
    shared_bytes: Callable[[Config, AttentionSpec, Target], Shared]
    """Shared memory a block of the compiled kernel needs."""
    defaults: Callable[[AttentionSpec], tuple[tuple[Value, ...], ...]]
    """Configs to fall back to for a spec, best first; the last ones fit everywhere."""

    def config(self, **values: Value) -> Config:
        """A config of this family by tunable names; `InvalidArgument` if one is missing or unknown."""
        for name, allowed in self.tunables:
            if values.get(name) not in allowed:
                listed = ", ".join(map(str, allowed))
                raise InvalidArgument(f"{self.name}: {name}={values.get(name)!r}; allowed: {listed}")
        if extra := values.keys() - dict(self.tunables).keys():
            raise InvalidArgument(f"{self.name} has no tunable {', '.join(sorted(extra))}")
        return Config(self.name, tuple((name, values[name]) for name, _ in self.tunables))

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
        read = re.fullmatch(numbers + words, name)
        if read is None:
            example = self.all_configs()[0].name
            raise InvalidArgument(f"{self.name} has no config {shown(name)}; a name reads like {example}")
        values = {each: int(text) if SHORT_NAMES[each] else text for each, text in read.groupdict().items()}
        try:
            return self.config(**values)
        except InvalidArgument as error:
            raise InvalidArgument(f"no config {shown(name)}: {error}") from None

    def all_configs(self) -> tuple[Config, ...]:
        """The whole space, whatever fits."""
        return _all_configs(self.name, self.tunables)

    def supports(self, spec: AttentionSpec, target: Target) -> str:
        """Why the family cannot serve a spec on a target at all."""
        if spec.op != self.op:
            return f"{self.name} computes {self.op}, not {spec.op}"
        if spec.dtype not in self.dtypes:
            return f"{self.name} serves {', '.join(self.dtypes)}, not {spec.dtype}"
        if target.vendor != "cuda" or target.arch < self.min_arch:
            return f"{self.name} needs sm_{self.min_arch} or newer, not {target.vendor} {target.arch}"
        return ""

    def fits(self, config: Config, spec: AttentionSpec, target: Target) -> str:
        """Why a config cannot run on a target; decided before anything is compiled."""
        if config["loads"] == "tma" and not target.has_tma:
            return f"loads by descriptor, which needs sm_90 or newer, not sm_{target.arch}"
        needed = self.shared_bytes(config, spec, target).least
        if needed > target.shared_per_block:
            return (
                f"needs at least {needed / KIB:.0f} KB of shared memory a block, "
                f"{target.name or target.key} has {target.shared_per_block / KIB:.0f} KB"
            )
        return ""

    def admission(self, config: Config) -> str:
        """Which calls a config can serve: `tma` or `any`."""
        return "tma" if config["loads"] == "tma" else "any"

    def admits(self, config: Config, facts: CallFacts) -> str:
        """Why a call of this kind cannot be served by a config."""
        if config["loads"] == "tma" and not facts.tma:
            return f"loads by descriptor, which cannot express the call's {facts.access} tensors"
        return ""

    def refuses(self, config: Config, spec: AttentionSpec, target: Target, facts: CallFacts) -> str:
        """Why a config is no candidate for calls of a kind: it does not fit, or does not admit them."""
        return self.fits(config, spec, target) or self.admits(config, facts)

    def space(self, spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
        """Every config that fits, in a fixed order."""
        return tuple(c for c in self.all_configs() if not self.fits(c, spec, target))

    def feasible(self, spec: AttentionSpec, target: Target, facts: CallFacts) -> tuple[Config, ...]:
        """Every config that fits and admits calls of a kind, in a fixed order: what a search may try."""
        return tuple(c for c in self.all_configs() if not self.refuses(c, spec, target, facts))

    def default(self, spec: AttentionSpec, target: Target, facts: CallFacts) -> Config:
        """The first default that is sure to fit and admits the call.

        Raises:
            DoesNotFit: none does; the message lists what was tried.
        """
        reasons = []
        for values in self.defaults(spec):
            config = self.config(**dict(zip(dict(self.tunables), values, strict=True)))
            reason = self.refuses(config, spec, target, facts)
            most = self.shared_bytes(config, spec, target).most
            if not reason and most > target.shared_per_block:
                reason = f"may need {most / KIB:.0f} KB of shared memory a block"
            if not reason:
                return config
            reasons.append(f"{config.name}: {reason}")
        raise DoesNotFit(f"no default config of {self.name} fits; tried:\n  " + "\n  ".join(reasons))


@lru_cache(maxsize=64)
def _all_configs(family: str, tunables: tuple[tuple[str, tuple[Value, ...]], ...]) -> tuple[Config, ...]:
    names = [name for name, _ in tunables]
    return tuple(
        Config(family, tuple(zip(names, values, strict=True)))
        for values in itertools.product(*(allowed for _, allowed in tunables))
    )


def _attention_fwd_shared(config: Config, spec: AttentionSpec, target: Target) -> Shared:
    """Bounds that hold over 480 recorded compiles (tests/data/compiled_configs.jsonl).

    A loop of one stage holds a chunk of K or V at a time. A pipelined one holds `stages - 1` of K and V, and
    with Hopper's asynchronous products (16-bit or TF32, tiles of 64 rows), which read all operands from
    shared memory, `stages` of both and Q. What comes on top at most: Q, all stages, and P changing layout.
    """
    stages, block_m, block_n = (config.number(n) for n in ("num_stages", "block_m", "block_n"))
    qk, v = head_dim_chunks(spec.head_dim), head_dim_chunks(spec.head_dim_v)
    tile_q, tile_kv = block_m * sum(qk) * spec.itemsize, block_n * (sum(qk) + sum(v)) * spec.itemsize
    most = tile_q + stages * tile_kv + block_m * block_n * spec.itemsize + KIB
    if stages == 1:
        return Shared(block_n * max(*qk, *v) * spec.itemsize, most)
    if target.arch == 90 and block_m >= 64 and spec.dtype_label != "fp32":
        return Shared(tile_q + stages * tile_kv, most)
    return Shared((stages - 1) * tile_kv, most)


# (largest head dim, block_m, block_n, num_warps, num_stages), best first: 16-bit and TF32 as measured on one
# H200 (benchmarks/nvidia-h200), and where less shared memory is, smaller tiles. fp32 multiplies on plain
# FMA units, fully unrolled: larger tiles than these spill kilobytes and take a minute to compile.
_DEFAULT_TILES = (
    (64, 64, 128, 4, 2),
    (128, 128, 64, 4, 2),
    (256, 128, 64, 8, 2),
    (256, 64, 64, 4, 2),
    (256, 64, 32, 4, 2),
    (256, 32, 32, 4, 1),
    (256, 16, 32, 4, 1),
)
_DEFAULT_TILES_FP32 = ((128, 32, 64, 8, 2), (256, 16, 32, 8, 2), (256, 16, 32, 8, 1))


def _attention_fwd_defaults(spec: AttentionSpec) -> tuple[tuple[Value, ...], ...]:
    fp32 = spec.dtype_label == "fp32"
    head_dim = max(spec.head_dim, spec.head_dim_v)
    return tuple(
        (*tile, loads, "heads")
        for limit, *tile in (_DEFAULT_TILES_FP32 if fp32 else _DEFAULT_TILES)
        for loads in (("pointer",) if fp32 else ("tma", "pointer"))
        if head_dim <= limit
    )


FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="attention_fwd",
            op="fwd",
            template="attention_fwd.py.jinja",
            tunables=(
                ("block_m", (16, 32, 64, 128)),
                ("block_n", (32, 64, 128)),
                ("num_warps", (4, 8)),
                ("num_stages", (1, 2, 3, 4)),
                ("loads", ("tma", "pointer")),
                ("order", ("heads", "rows")),
            ),
            min_arch=80,
            dtypes=("fp16", "bf16", "fp32"),
            shared_bytes=_attention_fwd_shared,
            defaults=_attention_fwd_defaults,
        ),
    )
}


def find_family(name: str) -> Family:
    """The table's row of that name; `UnknownName` lists the known ones."""
    try:
        return FAMILIES[name]
    except (KeyError, TypeError):  # the second: what cannot be a key
        raise UnknownName("family", name, FAMILIES) from None


def foreign(config: Config) -> str:
    """Why a config that was read is of no family here, or is none of its family's."""
    family = FAMILIES.get(config.family)
    if family is None:
        return f"family {config.family} does not exist in this version"
    return family.owns(config)


def serving(spec: AttentionSpec, target: Target) -> tuple[Family, ...]:
    """The families that serve a spec on a target; `Unsupported` lists each one's reason if none does."""
    reasons = {family: family.supports(spec, target) for family in FAMILIES.values()}
    found = tuple(family for family, reason in reasons.items() if not reason)
    if not found:
        raise Unsupported("no kernel family serves this: " + "; ".join(reasons.values()))
    return found
