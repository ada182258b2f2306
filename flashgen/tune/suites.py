"""What to tune: named suites, a model's config.json, or sizes given one by one, all as `Workload`s."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.masks import Mask, causal, full, parse_mask, sliding_window
from flashgen.spec.score_mods import ScoreMod, parse_score_mod, softcap

SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
"""Batch times sequence length in the suites: the batch is what is left of it."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of one model."""

    head_dim: int
    heads: int
    kv_heads: int
    dtype: str = "bf16"
    masks: tuple[Mask, ...] = (causal(),)
    score_mod: ScoreMod | None = None

    def workloads(self, sequences: Iterable[int], tokens: int = TOKENS) -> tuple[Workload, ...]:
        """Prefill at each length with each mask: longest first, since what it learns serves the others."""
        return tuple(
            make_workload(
                head_dim=self.head_dim,
                heads=self.heads,
                kv_heads=self.kv_heads,
                q_len=length,
                k_len=length,
                mask=mask,
                dtype=self.dtype,
                batch=max(1, tokens // length),
                score_mod=self.score_mod,
            )
            for mask in self.masks
            for length in sorted(set(sequences), reverse=True)
        )


@dataclass(frozen=True, slots=True)
class Suite:
    """A named list of workloads."""

    heads: Heads
    help: str
    sequences: tuple[int, ...] = SEQUENCES
    tokens: int = TOKENS

    def workloads(self) -> tuple[Workload, ...]:
        """All of them."""
        return self.heads.workloads(self.sequences, self.tokens)


_BOTH = (causal(), full())

SUITES = {
    "llama3-8b": Suite(Heads(128, 32, 8, masks=_BOTH), "Llama 3 8B: head_dim 128, 32 heads, 8 kv heads"),
    "llama3-8b-d64": Suite(Heads(64, 32, 8, masks=_BOTH), "the same with head_dim 64"),
    "mistral-7b": Suite(
        Heads(128, 32, 8, masks=(sliding_window(4095, 0),)), "Mistral 7B: a window of 4096 keys"
    ),
    "qwen2.5-7b": Suite(Heads(128, 28, 4), "Qwen2.5 7B: 28 heads, 4 kv heads"),
    "gemma2-9b": Suite(
        Heads(256, 16, 8, masks=(causal(), sliding_window(4095, 0)), score_mod=softcap(50.0)),
        "Gemma 2 9B: head_dim 256, softcap 50, every other layer with a window of 4096 keys",
        sequences=(512, 1024, 2048, 4096, 8192),
    ),
    "gpt2": Suite(
        Heads(64, 12, 12, dtype="fp16"), "GPT-2: head_dim 64, 12 heads", sequences=(256, 512, 1024)
    ),
    "ci": Suite(
        Heads(32, 4, 2, dtype="fp16", masks=_BOTH),
        "two tiny shapes, for trying things out without a GPU",
        sequences=(64,),
        tokens=128,
    ),
}


def suite_workloads(name: str) -> tuple[Workload, ...]:
    """The workloads of a named suite; `UnknownName` lists the known ones."""
    try:
        return SUITES[name].workloads()
    except KeyError:
        raise UnknownName("suite", name, SUITES) from None


def make_workload(
    *,
    head_dim: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    k_len: int,
    mask: Mask,
    dtype: str,
    batch: int,
    head_dim_v: int | None = None,
    score_mod: ScoreMod | None = None,
) -> Workload:
    """A workload whose mask and score rule carry their numbers."""
    spec = AttentionSpec(
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        dtype=dtype,
        mask=mask.rule,
        score_mod=None if score_mod is None else score_mod.rule,
    )
    bounds = [bound for bound in (mask, score_mod) if bound is not None]
    params = tuple(
        (name, value)
        for bound in bounds
        for (name, _), value in zip(bound.rule.params, bound.values, strict=True)
    )
    return Workload(spec, batch, heads, kv_heads, q_len, k_len, params)


def workloads_from_args(
    *,
    head_dim: int | Sequence[int],
    heads: int,
    kv_heads: int | None = None,
    seq: int | Sequence[int],
    k_len: int | None = None,
    mask: str | Mask | Sequence[str | Mask] = "full",
    score_mod: str | ScoreMod | None = None,
    dtype: str = "bf16",
    batch: int | None = None,
    head_dim_v: int | None = None,
) -> tuple[Workload, ...]:
    """Workloads from explicit sizes: one for each combination of the arguments that are sequences.

    Args:
        kv_heads: as many as heads by default.
        seq: query length; also the key length unless `k_len` is given.
        mask, score_mod: as `spec.masks.parse_mask` and `spec.score_mods.parse_score_mod` read them.
        batch: by default 16384 / seq, at least 1.

    Raises:
        InvalidArgument: a size, name or dtype that is not served; it is named.
    """
    masks = mask if isinstance(mask, (list, tuple)) else (mask,)
    parsed = [each if isinstance(each, Mask) else parse_mask(str(each)) for each in masks]
    rule = parse_score_mod(score_mod) if isinstance(score_mod, str) else score_mod
    for name, sizes in (("seq", seq), ("head_dim", head_dim)):
        for size in _several(sizes):
            if size < 1:
                raise InvalidArgument(f"{name}={size} must be at least 1")
    return tuple(
        make_workload(
            head_dim=dim,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            q_len=length,
            k_len=length if k_len is None else k_len,
            mask=each,
            dtype=dtype,
            batch=max(1, TOKENS // length) if batch is None else batch,
            head_dim_v=head_dim_v,
            score_mod=rule,
        )
        for dim, each, length in itertools.product(_several(head_dim), parsed, _several(seq))
    )


def _several(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


# Hugging Face

_WINDOW_IN_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")
"""Models without `layer_types` all of whose layers have the window; others alternate."""

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def workloads_from_hf_config(path: str | Path, sequences: Sequence[int] = SEQUENCES) -> tuple[Workload, ...]:
    """Workloads of a model from its Hugging Face `config.json`: prefill at the lengths it can take.

    Heads, kv heads, head dim, dtype, the sliding window (for the layers that have one) and the soft cap of
    attention scores are read; a text model inside a multimodal one is found under `text_config`.

    Raises:
        InvalidArgument: the file cannot be read, is no JSON, or lacks what is needed; the key is named.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}; give a model's config.json") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON ({error}); give a model's config.json") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = {"dtype": config.get("dtype") or config.get("torch_dtype")} | config["text_config"]
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} holds no JSON object; give a model's config.json")
    longest = _number(config, path, ("max_position_embeddings", "n_positions", "n_ctx"), TOKENS)
    lengths = [length for length in sequences if length <= longest] or [longest]
    return _heads_of(config, path).workloads(lengths)


def _heads_of(config: dict[str, Any], path: Path) -> Heads:
    heads = _number(config, path, ("num_attention_heads", "n_head", "num_heads"))
    kv_heads = _number(config, path, ("num_key_value_heads", "num_kv_heads"), heads)
    # Some files name head_dim and leave it null, which means the usual quotient.
    head_dim = _number(config, path, ("head_dim",), 0)
    if not head_dim:
        width = _number(config, path, ("hidden_size", "n_embd", "d_model"))
        if width % heads:
            raise InvalidArgument(f"{path}: {heads} heads do not divide hidden_size {width}; add head_dim")
        head_dim = width // heads
    stated = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if stated not in _DTYPES:
        raise InvalidArgument(f"{path}: dtype {stated!r} is not served; allowed: {', '.join(_DTYPES)}")
    cap = config.get("attn_logit_softcapping")
    return Heads(
        head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        dtype=_DTYPES[stated],
        masks=_masks_of(config, path),
        score_mod=softcap(float(cap)) if cap else None,
    )


def _masks_of(config: dict[str, Any], path: Path) -> tuple[Mask, ...]:
    """The masks of a model's layers: `layer_types` where it says so, else its window for all layers."""
    window = 0
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        window = _number(config, path, ("sliding_window",))
    if not window:
        return (causal(),)
    windowed = sliding_window(window - 1, 0)  # Hugging Face's window counts the query itself
    every = config.get("model_type") in _WINDOW_IN_EVERY_LAYER
    kinds = config.get("layer_types") or ["sliding_attention", *([] if every else ["full_attention"])]
    masks = [windowed if kind == "sliding_attention" else causal() for kind in kinds]
    return tuple(dict.fromkeys(masks))


def _number(config: dict[str, Any], path: Path, names: Sequence[str], default: int | None = None) -> int:
    """The first of some keys that is there and not null, as a positive whole number."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"{path}: {name}={value!r} must be a positive whole number")
        return value
    if default is None:
        raise InvalidArgument(f"{path} has no {' or '.join(names)}; it is no config.json of a language model")
    return default
