"""What to tune: named suites, a model's config.json, or sizes given one by one, all as `Workload`s."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec.attention import AttentionSpec, Workload
from flashgen.spec.form import brief, shown
from flashgen.spec.masks import (
    Mask,
    causal,
    check_grids,
    document,
    full,
    grids,
    neighborhood,
    parse_mask,
    prefix_lm,
    sliding_window,
)
from flashgen.spec.score_mods import ScoreMod, alibi, parse_score_mod, softcap

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
    head_dim_v: int | None = None
    sinks: str = ""
    documents: tuple[int, ...] = (0,)
    """How many each sequence has, for a mask of documents: see `Workload.documents`."""

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
                head_dim_v=self.head_dim_v,
                sinks=self.sinks,
                documents=documents,
            )
            for mask in self.masks
            for length in sorted(set(sequences), reverse=True)
            for documents in self.documents
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


@dataclass(frozen=True, slots=True)
class FewQueries:
    """A named list of workloads with fewer queries than keys: speculative decoding, chunks of a prompt."""

    heads: tuple[Heads, ...]
    help: str
    sizes: tuple[tuple[int, int, int], ...]
    """(batch, queries, keys), the longest keys first, since what they teach serves the others."""

    def workloads(self) -> tuple[Workload, ...]:
        """All of them."""
        return tuple(
            make_workload(
                head_dim=each.head_dim,
                heads=each.heads,
                kv_heads=each.kv_heads,
                q_len=q_len,
                k_len=k_len,
                mask=mask,
                dtype=each.dtype,
                batch=batch,
            )
            for each in self.heads
            for mask in each.masks
            for batch, q_len, k_len in self.sizes
        )


@dataclass(frozen=True, slots=True)
class Various:
    """A named list of workloads that differ in more than their length."""

    rows: tuple[tuple[Heads, tuple[int, ...]], ...]
    """Heads, and the lengths of each."""
    help: str

    def workloads(self) -> tuple[Workload, ...]:
        """All of them."""
        return tuple(workload for heads, sequences in self.rows for workload in heads.workloads(sequences))


_BOTH = (causal(), full())
_DOCUMENTS = tuple(
    mask for word in ("i32", "ordered") for mask in (causal() & document(word), document(word))
)


def _masks(head_dim: int) -> tuple[tuple[Heads, tuple[int, ...]], ...]:
    """The masks and score rules that people use, at one head dim. Each head has keys of its own where no
    model is named: Gemma 2 27B has 32 heads and 16 kv heads, GPT-OSS 64 and 8.
    """
    own = 2048 // head_dim
    others = (*_DOCUMENTS, prefix_lm(), neighborhood((128, 128), (13, 13)))
    return (
        (Heads(head_dim, own, own, masks=(sliding_window(1023, 0),)), (16384, 65536)),
        (Heads(head_dim, own, own, masks=others), (16384,)),
        (Heads(head_dim, own, own, score_mod=alibi()), (16384,)),
        (Heads(head_dim, 32, 16, masks=(sliding_window(4095, 0),), score_mod=softcap(50.0)), (8192, 16384)),
        (Heads(head_dim, 64, 8, masks=(sliding_window(127, 0),), sinks="bf16"), (16384,)),
    )


SUITES: Mapping[str, Suite | FewQueries | Various] = {
    "llama3-8b": Suite(Heads(128, 32, 8, masks=_BOTH), "Llama 3 8B: head_dim 128, 32 heads, 8 kv heads"),
    "llama3-8b-e4m3": Suite(Heads(128, 32, 8, dtype="e4m3", masks=_BOTH), "Llama 3 8B with 8-bit q, k and v"),
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
    "gqa-short": FewQueries(
        (Heads(128, 32, 8, masks=_BOTH), Heads(128, 32, 1, masks=_BOTH)),
        "16 to 512 queries of 8,192 to 65,536 keys: head_dim 128, 32 heads, 8 kv heads and 1",
        sizes=(
            (1, 16, 65536),
            (1, 512, 65536),
            (1, 64, 32768),
            (4, 128, 32768),
            (1, 128, 8192),
            (4, 16, 8192),
        ),
    ),
    "masks": Various(
        _masks(64) + _masks(128),
        "head_dim 64 and 128: a window of 1024, documents by ids and in order, prefix-LM, a 2-D "
        "neighbourhood, ALiBi, Gemma 2's softcap with a window, GPT-OSS's sinks with one",
    ),
    "documents": Various(
        tuple(
            (Heads(dim, 2048 // dim, 2048 // dim, masks=_DOCUMENTS, documents=(4, 8, 16, 32)), (16384,))
            for dim in (64, 128)
        ),
        "4 to 32 documents of 16,384 tokens, by ids and in order, causal and not: to compare, for no call "
        "knows how many it has, and what `masks` tunes serves them all",
    ),
    "head-dims": Various(
        tuple(
            (Heads(dim, 16, 16, masks=_BOTH, head_dim_v=dim_v), (8192,))
            for dim, dim_v in ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 128))
        ),
        "head_dim 64 to 160 and 192 with values of 128: 16 heads, causal and full, 8,192 long",
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
    except (KeyError, TypeError):  # the second: what cannot be a key
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
    sinks: str = "",
    dropout: bool = False,
    documents: int = 0,
) -> Workload:
    """A workload whose mask and score rule carry their numbers."""
    spec = AttentionSpec(
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        dtype=dtype,
        mask=mask.rule,
        score_mod=None if score_mod is None else score_mod.rule,
        sinks=sinks,
        dropout=dropout,
    )
    bounds = [bound for bound in (mask, score_mod) if bound is not None]
    params = tuple(
        (name, value)
        for bound in bounds
        for (name, _), value in zip(bound.rule.params, bound.values, strict=True)
    )
    return Workload(spec, batch, heads, kv_heads, q_len, k_len, params, documents=documents)


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
    sinks: str = "",
    dropout: bool = False,
) -> tuple[Workload, ...]:
    """Workloads from explicit sizes: one for each combination of the arguments that are sequences.

    Args:
        kv_heads: as many as heads by default.
        seq: query length; also the key length unless `k_len` is given.
        mask, score_mod: as `spec.masks.parse_mask` and `spec.score_mods.parse_score_mod` read them.
        batch: by default 16384 / seq, at least 1.
        sinks, dropout: as of `AttentionSpec`.

    Raises:
        InvalidArgument: a size, name or dtype that is not served, or a size that is not the mask's; it is
            named.
    """
    masks = mask if isinstance(mask, (list, tuple)) else (mask,)
    parsed = [each if isinstance(each, Mask) else parse_mask(str(each)) for each in masks]
    rule = parse_score_mod(score_mod) if isinstance(score_mod, str) else score_mod
    _check_sizes("seq", _several(seq))
    _check_sizes("head_dim", _several(head_dim))
    for each, length in itertools.product(parsed, _several(seq)):
        check_grids(each.rule, each.values, length, length if k_len is None else k_len)
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
            sinks=sinks,
            dropout=dropout,
        )
        for dim, each, length in itertools.product(_several(head_dim), parsed, _several(seq))
    )


def packed(workload: Workload, tokens: int) -> Workload:
    """Its sequences packed, of so many queries together and of keys in proportion: those of a workload of one
    length for all are the longest ones.

    Raises:
        InvalidArgument: sequences of that length do not hold so many; or the mask has a grid, and not all of
            them have its length.
    """
    keys = tokens if workload.q_len == workload.k_len else -(-tokens * workload.k_len // workload.q_len)
    values = [value for _, value in workload.params]
    if grids(workload.spec.mask, values) and keys != workload.batch * workload.k_len:
        raise InvalidArgument(
            f"{workload.batch} packed sequences of at most {workload.k_len} keys have {keys} together, and "
            f"each must have all positions of its mask's grid: give {workload.q_len} tokens (--varlen) for "
            "each sequence (--batch)"
        )
    spec = replace(workload.spec, addressing="varlen")
    return replace(workload, spec=spec, total_q=tokens, total_k=keys)


def _check_sizes(name: str, sizes: Iterable[int]) -> None:
    for size in sizes:
        if size < 1:
            raise InvalidArgument(f"{name}={size} must be at least 1")


def _several(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


# Hugging Face

KEYS: Mapping[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_kv_heads",
        "n_head_kv",
        "kv_n_heads",
        "multi_query_group_num",
    ),
    "head_dim": ("head_dim", "kv_channels"),
    "head_dim_v": ("v_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
    "latent": ("kv_lora_rank",),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "longest": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "dtype": ("dtype", "torch_dtype"),
    "window": ("sliding_window",),
    "layers": ("layer_types", "layers_block_type"),
    "cap": ("attn_logit_softcapping",),
    "one_kv_head": ("multi_query",),
}
"""What is read of a config, and the keys that models name it by, the first that is there first."""

NOT_UNDERSTOOD: Mapping[str, tuple[Any, ...]] = {
    "alibi": (),
    "attention_chunk_size": (),
    "attention_type": ("original_full",),
    "attention_types": (),
    "attention_window": (),
    "attention_window_size": (),
    "attn_type": ("grouped_query_attention", "multihead_attention"),
    "attn_type_list": (),
    "block_configs": (),
    "block_types": (),
    "blocksparse_block_size": (),
    "disentangled_attention": (),
    "full_attention_interval": (),
    "global_head_dim": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "index_topk": (),
    "is_encoder_decoder": (),
    "linear_attn_config": (),
    "local_attention": (),
    "num_global_key_value_heads": (),
    "num_key_value_heads_per_layer": (),
    "position_embedding_type": ("absolute", "learned_absolute", "rope", "rotary"),
    "prefix_lm": (),
    "relative_attention": (),
    "relative_attention_num_buckets": (),
    "sliding_window_size": (-1,),
    "sparse_attention": (),
    "swa_head_dim": (),
    "swa_num_key_value_heads": (),
    "use_alibi": (),
    "use_bidirectional_attention": (),
}
"""Keys that change attention and are not understood, each with the values that do not; nor do empty ones."""

MODELS_NOT_UNDERSTOOD: Mapping[str, str] = {
    "bloom": "adds ALiBi to its scores",
    **dict.fromkeys(
        ("albert", "bert", "distilbert", "electra", "roberta", "xlm-roberta"), "is no causal model"
    ),
}
"""Values of `model_type` that change attention by themselves."""

NESTED = ("text_config", "thinker_config", "llm_config", "language_config")
"""Where a text model stands inside a multimodal one."""

_WITH_SINKS = ("gpt_oss",)
"""Models that have a logit for each head beside its scores, of the model's own dtype."""

_ONE_KV_HEAD = ("falcon", "gpt_bigcode")
"""Models that have one where their config does not say."""

_WINDOW_IN_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")
"""Models without `layer_types` all of whose layers have the window; others alternate."""

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


class ConfigWarning(UserWarning):
    """A model's config leaves something open that had to be assumed."""


def workloads_from_hf_config(
    path: str | Path, sequences: Sequence[int] | None = None
) -> tuple[Workload, ...]:
    """Workloads of a model from its Hugging Face `config.json`: prefill at the lengths it can take.

    Heads, kv heads, head dims, dtype, the sliding window (for the layers that have one) and the soft cap of
    attention scores are read; a text model inside a multimodal one is found. Warns where no dtype is named.

    Args:
        path: the file, or the folder it lies in.
        sequences: lengths, by default those of `SEQUENCES` that the model can take.

    Raises:
        InvalidArgument: the file cannot be read, is no JSON, lacks what is needed, or has what is not
            understood; the key is named.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = _Config(path, _text_model(_read_json(path)))
    longest = config.number("longest", TOKENS)
    if sequences is None:
        lengths = [length for length in SEQUENCES if length <= longest] or [longest]
    else:
        lengths = list(sequences)
        _check_sizes("seq", lengths)
        if max(lengths, default=0) > longest:
            raise InvalidArgument(
                f"seq={max(lengths)} is more than the {longest} positions that {path} names"
            )
    return _heads_of(config).workloads(lengths)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}; give a model's config.json") from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = brief(str(error), 200)
        raise InvalidArgument(f"{path} is not JSON ({reason}); give a model's config.json") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path} holds no JSON object; give a model's config.json")
    return found


def _text_model(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model, without nulls, which mean the default; its dtype may stand outside."""
    stated: dict[str, Any] = {}
    inner: Any = config
    while inner:
        config = _stated(inner)
        stated = {key: config[key] for key in KEYS["dtype"] if key in config} or stated
        found = (config[name] for name in NESTED if isinstance(config.get(name), dict))
        inner = next(filter(None, found), None)
    part = config.get("attn_config")
    return (_stated(part) if isinstance(part, dict) else {}) | stated | config


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Config:
    """A config and where it is from, read by the names of `KEYS`."""

    path: Path
    values: dict[str, Any]

    def find(self, name: str) -> tuple[str, Any]:
        """The key that is there, and its value; the first key and None where none is."""
        keys = KEYS[name]
        return next(((key, self.values[key]) for key in keys if key in self.values), (keys[0], None))

    def number(self, name: str, default: int | None = None, zero: bool = False) -> int:
        """A positive whole number; with `zero`, 0 or false stand for the default."""
        key, value = self.find(name)
        if value is None or (zero and value in (0, False)):
            if default is None:
                names = " or ".join(KEYS[name])
                raise InvalidArgument(f"{self.path} has no {names}; it is no config.json of a language model")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, value, "must be a positive whole number")
        return value

    def flag(self, key: str) -> bool | None:
        """A truth value, None where there is none; other JSON only looks like one ("false" would be true)."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(key, value, "must be true or false")
        return value

    def refusal(self, key: str, value: Any, why: str) -> InvalidArgument:
        """The error that names a key and what it holds."""
        return InvalidArgument(f"{self.path}: {key}={shown(value)} {why}")


def _heads_of(config: _Config) -> Heads:
    _check_understood(config)
    heads = config.number("heads")
    head_dim, head_dim_v = _dims_of(config, heads)
    dtype = _dtype_of(config)
    return Heads(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        heads=heads,
        kv_heads=_kv_heads_of(config, heads),
        dtype=dtype,
        masks=_masks_of(config),
        score_mod=_cap_of(config),
        sinks=dtype if config.values.get("model_type") in _WITH_SINKS else "",
    )


def _check_understood(config: _Config) -> None:
    advice = "is not understood; give the sizes with --head-dim, --heads, --kv-heads and --mask"
    for key, harmless in NOT_UNDERSTOOD.items():
        value = config.values.get(key)
        if value and value not in harmless:
            raise config.refusal(key, value, f"changes attention and {advice}")
    model = config.values.get("model_type")
    if isinstance(model, str) and model in MODELS_NOT_UNDERSTOOD and not config.flag("is_decoder"):
        raise config.refusal("model_type", model, f"{MODELS_NOT_UNDERSTOOD[model]}, which {advice}")


def _kv_heads_of(config: _Config, heads: int) -> int:
    if config.number("nope_dim", 0, zero=True):
        return heads  # each head's keys and values are expanded from the latent
    if config.flag("multi_query_attention") is False:
        return heads  # ChatGLM names its groups even where it has none
    one = config.flag(config.find("one_kv_head")[0])
    one = config.values.get("model_type") in _ONE_KV_HEAD if one is None else one
    grouped = not one or config.flag("new_decoder_architecture")
    return config.number("kv_heads", heads) if grouped else 1


def _dims_of(config: _Config, heads: int) -> tuple[int, int]:
    """Head dims of keys and values."""
    nope, rope = (config.number(name, 0, zero=True) for name in ("nope_dim", "rope_dim"))
    if nope:
        head_dim = nope + rope
    elif config.number("latent", 0, zero=True):
        key, value = config.find("latent")
        raise config.refusal(key, value, f"needs {KEYS['nope_dim'][0]} and {KEYS['rope_dim'][0]} beside it")
    else:
        head_dim = config.number("head_dim", 0, zero=True)
    if not head_dim:
        width = config.number("width")
        if width % heads:
            raise InvalidArgument(
                f"{config.path}: {heads} heads do not divide {config.find('width')[0]} {width}; add head_dim"
            )
        head_dim = width // heads
    return head_dim, config.number("head_dim_v", head_dim, zero=True)


def _dtype_of(config: _Config) -> str:
    key, stated = config.find("dtype")
    if stated is None:
        told = f"{config.path} names no dtype: bf16 is assumed; for another, add it to the file"
        warnings.warn(f'{told}, as in "{key}": "float16"', ConfigWarning, stacklevel=5)
        return "bf16"
    dtype = _DTYPES.get(stated.removeprefix("torch.")) if isinstance(stated, str) else None
    if dtype is None:
        raise config.refusal(key, stated, f"is not served; allowed: {', '.join(_DTYPES)}")
    return dtype


def _cap_of(config: _Config) -> ScoreMod | None:
    key, cap = config.find("cap")
    if cap in (None, 0, False):
        return None
    try:
        return softcap(cap)
    except InvalidArgument as error:
        raise config.refusal(key, cap, f"is no cap: {error}") from error


def _masks_of(config: _Config) -> tuple[Mask, ...]:
    """The masks of a model's layers: `layer_types` where it says so, else its window for all layers."""
    window = 0 if config.flag("use_sliding_window") is False else config.number("window", 0, zero=True)
    # Hugging Face's window counts the query itself.
    kinds = {"full_attention": causal(), "attention": causal()}
    if window:
        kinds["sliding_attention"] = sliding_window(window - 1, 0)
    every = config.values.get("model_type") in _WINDOW_IN_EVERY_LAYER
    usual = ["sliding_attention"] * bool(window) + ["full_attention"] * (not window or not every)
    key, layers = config.find("layers")
    if layers is not None and not isinstance(layers, list):
        raise config.refusal(key, layers, f"must be a list of {', '.join(kinds)}")
    for kind in layers or ():
        if not isinstance(kind, str) or kind not in kinds:
            hint = "" if window else "; sliding_attention needs a sliding_window"
            raise config.refusal(key, kind, f"is not understood; known: {', '.join(kinds)}{hint}")
    return tuple(dict.fromkeys(kinds[kind] for kind in layers or usual))
