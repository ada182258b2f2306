"""What is computed (`AttentionSpec`), at which sizes (`Workload`), and what only a call knows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec import masks
from flashgen.spec.form import brief, shown
from flashgen.spec.rule import OPERAND_DTYPES, Rule

DTYPES = {"fp16": 2, "bf16": 2, "fp32": 4, "e4m3": 1}
"""Input dtypes and their size in bytes."""

OUT_DTYPES = {"fp16": ("fp16",), "bf16": ("bf16",), "fp32": ("fp32",), "e4m3": ("bf16", "fp16")}
"""Which output dtypes inputs of each dtype may have, the default first."""

DESCALES = {"q": ("batch", "kv_head", "member"), "k": ("batch", "kv_head"), "v": ("batch", "kv_head")}
"""The tensors that 8-bit inputs come with factors for, and what a factor may differ by: the member is a query
head's place among those of its key head."""

SINK_DTYPES = ("fp32", "fp16", "bf16")
"""Of the sinks, a logit for each query head."""

_MIN_CHUNK = {"e4m3": 32}
"""What tensor cores multiply at a time along a head dim, where it is not 16: 32 bytes."""

OPS = ("fwd", "bwd")
"""The attention itself, or the gradients of q, k and v from that of its output."""
ADDRESSING = ("dense", "varlen")
"""How a call's sequences lie in memory: each in a row of its own, or packed one behind the other."""
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8
MAX_INDEX = 2**31 - 1
"""Longest sequence, and most heads of a whole batch: kernels count both in 32 bits."""
MAX_ELEMENTS = 2**48
"""Of one tensor: far more than a GPU holds, and its bytes still count in 64 bits."""
FULL = masks.full().rule


def head_dim_chunks(head_dim: int, minimum: int = 16) -> tuple[int, ...]:
    """Power-of-two chunks that cover a head dim: 96 is (64, 32), 72 is (64, 16), or (64, 32) of at least 32.

    Tensor cores and descriptors want powers of two; only the last chunk is padded, to `minimum`.
    """
    chunks, rest = [], head_dim
    while rest:
        chunk = max(1 << (rest.bit_length() - 1), minimum)
        chunks.append(chunk)
        rest = max(rest - chunk, 0)
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Everything that is compiled into a kernel, and nothing else.

    Sizes, the number of heads and numeric mask parameters are runtime arguments and are not here.
    """

    head_dim: int
    """Elements of a query and a key."""
    head_dim_v: int
    dtype: str
    mask: Rule = FULL
    score_mod: Rule | None = None
    op: str = "fwd"
    fp32_precision: str = "ieee"
    """How fp32 inputs are multiplied: `ieee` or `tf32`; `ieee` for other dtypes."""
    addressing: str = "dense"
    """One of `ADDRESSING`. In `varlen` rows, keys and lengths of rules count within their sequence, and
    `batch` is the sequence."""
    return_lse: bool = False
    """Whether the LSE is a result; of `bwd`, whether its gradient is given."""
    positive_scale: bool = True
    """The fast form folds the scale into exp2 after the row maximum, which needs scale > 0."""
    out_dtype: str = ""
    """Of the output, where it is not the first that `OUT_DTYPES` allows: `result_dtype` is it in any case."""
    sinks: str = ""
    """Of the sinks, where there are any: a logit for each query head that takes weight and has no value. Of
    `bwd`, where their gradient is computed: they take part in the LSE, and nothing else depends on them."""
    learned: tuple[str, ...] = ()
    """Of `bwd`: the operands of the score rule whose gradients are wanted too."""
    dropout: bool = False
    """Whether weights are dropped at random; with which probability is a runtime argument."""

    def __post_init__(self) -> None:
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM or dim % HEAD_DIM_STEP:
                raise InvalidArgument(
                    f"{name}={dim} is not served; allowed: multiples of {HEAD_DIM_STEP} "
                    f"from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; pad the tensors to the next one"
                )
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"dtype={shown(self.dtype)} is not served; allowed: {', '.join(DTYPES)}")
        allowed = OUT_DTYPES[self.dtype]
        if self.out_dtype == allowed[0]:
            object.__setattr__(self, "out_dtype", "")  # equal specs have equal fields
        if self.result_dtype not in allowed:
            raise InvalidArgument(
                f"out_dtype={shown(self.out_dtype)} of {self.dtype} inputs is not served; "
                f"allowed: {', '.join(allowed)}"
            )
        if self.sinks not in ("", *SINK_DTYPES):
            raise InvalidArgument(
                f"sinks={shown(self.sinks)} are not served; allowed: {', '.join(SINK_DTYPES)}, or none"
            )
        if self.op not in OPS:
            raise InvalidArgument(f"op={shown(self.op)} is not served; allowed: {', '.join(OPS)}")
        if self.addressing not in ADDRESSING:
            raise InvalidArgument(
                f"addressing={shown(self.addressing)} is not served; allowed: {', '.join(ADDRESSING)}"
            )
        if self.fp32_precision not in ("ieee", "tf32"):
            raise InvalidArgument(f"fp32_precision={shown(self.fp32_precision)} must be 'ieee' or 'tf32'")
        self._check_learned()
        if self.score_mod is not None:
            names = [
                {n for n, _ in r.params} | {o.name for o in r.operands} for r in (self.mask, self.score_mod)
            ]
            if clash := names[0] & names[1]:
                raise InvalidArgument(
                    f"mask and score rule both name {', '.join(sorted(clash))}; "
                    "each parameter and operand of a kernel needs a name of its own"
                )

    def _check_learned(self) -> None:
        floats = [
            operand.name
            for operand in (self.score_mod.operands if self.score_mod is not None else ())
            if OPERAND_DTYPES[operand.dtype] == "float"
        ]
        for name in self.learned:
            if self.op != "bwd" or name not in floats:
                raise InvalidArgument(
                    f"learned={shown(name)} of op={self.op!r} has no gradient; allowed: of bwd, the floats "
                    f"that the score rule reads ({', '.join(floats) or 'none'})"
                )

    @property
    def itemsize(self) -> int:
        """Bytes of one input element."""
        return DTYPES[self.dtype]

    @property
    def result_dtype(self) -> str:
        """Of the output."""
        return self.out_dtype or OUT_DTYPES[self.dtype][0]

    @property
    def quantized(self) -> bool:
        """Whether the inputs are stored values that factors (`DESCALES`) turn into true ones."""
        return self.dtype == "e4m3"

    @property
    def packed(self) -> bool:
        """Whether sequences lie one behind the other, from places that the kernel reads."""
        return self.addressing == "varlen"

    @property
    def qk_chunks(self) -> tuple[int, ...]:
        """Chunks of the head dim of queries and keys."""
        return head_dim_chunks(self.head_dim, _MIN_CHUNK.get(self.dtype, 16))

    @property
    def v_chunks(self) -> tuple[int, ...]:
        """Chunks of the head dim of values."""
        return head_dim_chunks(self.head_dim_v, _MIN_CHUNK.get(self.dtype, 16))

    @property
    def dtype_label(self) -> str:
        """The dtype, and for fp32 how it is multiplied: `bf16`, `fp32`, `tf32`."""
        return "tf32" if self.dtype == "fp32" and self.fp32_precision == "tf32" else self.dtype

    @property
    def dims_label(self) -> str:
        """`d128`, or `d192v128` where values have another head dim."""
        return f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")

    def tuned_as(self) -> AttentionSpec:
        """The spec whose records serve this one: the LSE store, the sign of the scale, which of two 16-bit
        dtypes the output has and what a sink adds to a row's sum move no optimum, and what a score rule
        learns is too rare to be tuned for. Random numbers do move it: they take as long as the products.
        """
        if not (self.return_lse or self.out_dtype or self.sinks or self.learned) and self.positive_scale:
            return self
        return replace(self, return_lse=False, positive_scale=True, out_dtype="", sinks="", learned=())

    def backward(
        self, lse: bool = False, sinks: bool = False, learned: tuple[str, ...] = ()
    ) -> AttentionSpec:
        """The spec of this one's gradients. The sign of the scale makes no other kernel, for a weight follows
        from the LSE and no maximum is sought; and sinks are in the LSE.

        Args:
            lse: whether the LSE has a gradient, too.
            sinks: whether that of the sinks is computed.
            learned: operands of the score rule whose gradients are wanted, too.
        """
        kept = self.sinks if sinks else ""
        return replace(self, op="bwd", return_lse=lse, positive_scale=True, sinks=kept, learned=learned)

    @property
    def key(self) -> str:
        """Readable text identity of `tuned_as()`, the look-up key of records."""
        dims = (
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        )
        parts = [self.op, dims, self.dtype_label, self.addressing, f"mask[{self.mask.text}]"]
        if self.score_mod is not None:
            parts.append(f"score[{self.score_mod.text}]")
        if self.dropout:
            parts.append("dropout")
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """As in records and manifests."""
        return {
            "op": self.op,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "dtype": self.dtype,
            "fp32_precision": self.fp32_precision,
            "addressing": self.addressing,
            "return_lse": self.return_lse,
            "positive_scale": self.positive_scale,
            "mask": {"name": self.mask.name, "text": self.mask.text},
            "score_mod": None
            if self.score_mod is None
            else {"name": self.score_mod.name, "text": self.score_mod.text},
            **({"out_dtype": self.out_dtype} if self.out_dtype else {}),
            **({"sinks": self.sinks} if self.sinks else {}),
            **({"learned": list(self.learned)} if self.learned else {}),
            **({"dropout": True} if self.dropout else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AttentionSpec:
        """The inverse of `to_json`; expression text is parsed and checked, never executed."""
        fields = dict(data)
        fields["mask"] = Rule.parse("mask", data["mask"]["text"], name=data["mask"]["name"])
        fields["learned"] = tuple(data.get("learned", ()))
        if data["score_mod"] is not None:
            fields["score_mod"] = Rule.parse(
                "score", data["score_mod"]["text"], name=data["score_mod"]["name"]
            )
        return cls(**fields)


def length_code(length: int) -> int:
    """Bucket of a size: 0 for 0, else 1 + ceil(log2(length)); 1 to 4096 makes 13 codes."""
    return (length - 1).bit_length() + 1 if length else 0


def number_code(value: float) -> int:
    """Bucket of a numeric parameter: its log2, rounded, with the sign kept apart."""
    if value == 0:
        return 0
    return int(math.copysign(round(math.log2(abs(value))) + 64, value))


def _reads_documents(mask: Rule) -> bool:
    """Whether a mask reads an integer for each key of a sequence, or one that never falls along it."""
    wanted = (ex.Symbol("batch"), ex.Symbol("k_idx"))
    ascending = {operand.name for operand in mask.operands if operand.ascending}
    return any(
        load.operand in ascending or (load.indices == wanted and mask.types[load.operand] == "int")
        for load in ex.loads(mask.expr)
    )


_LEAST = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 0, "k_len": 0, "documents": 0}
"""Of a workload's sizes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A spec with sizes: what is tuned, and what a call looks up.

    Of packed sequences the batch counts them, q_len and k_len are the longest ones, and the totals are known
    too: all that a call knows without asking the GPU.
    """

    spec: AttentionSpec
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    params: tuple[tuple[str, float], ...] = ()
    """Numeric parameters of the mask and score rule, in their order (window, cap)."""
    total_q: int = 0
    """Query tokens of all packed sequences; 0 of any other call, as is `total_k`."""
    total_k: int = 0
    documents: int = 0
    """How many documents a document mask has in each sequence, where that is known: no call can tell without
    asking the GPU, so only inputs made for this workload have so many. 0 is not known."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if not least <= getattr(self, name) <= MAX_INDEX:
                given = brief(str(getattr(self, name)), 40)
                raise InvalidArgument(f"{name}={given} must be at least {least} and at most {MAX_INDEX}")
        if self.heads % self.kv_heads:
            raise InvalidArgument(
                f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}: "
                "each key head serves a whole group of query heads"
            )
        self._check_totals()
        if self.documents and not _reads_documents(self.spec.mask):
            raise InvalidArgument(
                f"documents={self.documents} is for masks that read the document of each key, and "
                f"{shown(self.spec.mask.text)} does not; leave it out, or name a mask such as document"
            )
        if self.documents > max(self.k_len, 1):
            raise InvalidArgument(
                f"documents={self.documents} of k_len={self.k_len} keys must be at most as many as these; "
                "give fewer, or a longer sequence"
            )
        rows = self.batch * self.heads
        if rows > MAX_INDEX:
            raise InvalidArgument(
                f"batch={self.batch} times heads={self.heads} must be at most {MAX_INDEX}; split the batch"
            )
        tokens = max(self.q_tokens, self.k_tokens)
        elements = self.heads * tokens * max(self.spec.head_dim, self.spec.head_dim_v)
        if elements > MAX_ELEMENTS:
            raise InvalidArgument(
                f"{self.name} has tensors of {elements} elements; at most {MAX_ELEMENTS}: split the batch"
            )

    def _check_totals(self) -> None:
        for total, longest in (("total_q", "q_len"), ("total_k", "k_len")):
            tokens, length = getattr(self, total), getattr(self, longest)
            most = min(self.batch * length, MAX_INDEX) if self.spec.packed else 0
            if not 0 <= tokens <= most:
                why = f"batch={self.batch} sequences of at most {longest}={length}"
                raise InvalidArgument(
                    f"{total}={brief(str(tokens), 40)} must be from 0 to {most}: "
                    + (why if self.spec.packed else "only addressing='varlen' has totals")
                )

    @property
    def q_tokens(self) -> int:
        """Query rows of one head, over all sequences."""
        return self.total_q if self.spec.packed else self.batch * self.q_len

    @property
    def k_tokens(self) -> int:
        """Keys of one key head, over all sequences."""
        return self.total_k if self.spec.packed else self.batch * self.k_len

    def bucket(self) -> Bucket:
        """The sizes rounded for look-up: lengths, totals and batch to powers of two, heads exact."""
        return Bucket(
            length_code(self.batch),
            self.heads,
            self.kv_heads,
            length_code(self.q_len),
            length_code(self.k_len),
            tuple(number_code(value) for _, value in self.params),
            (length_code(self.total_q), length_code(self.total_k)) if self.spec.packed else (),
        )

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no query, or no key. No kernel runs for such calls."""
        return not self.q_tokens or not self.k_tokens

    @property
    def name(self) -> str:
        """Short and readable: `b4h32kv8q4096k4096`; of packed sequences with `_of9000k9000`, the totals."""
        params = "".join(f"_{name}{value:g}" for name, value in self.params)
        totals = f"_of{self.total_q}k{self.total_k}" if self.spec.packed else ""
        documents = f"_documents{self.documents}" if self.documents else ""
        sizes = f"b{self.batch}h{self.heads}kv{self.kv_heads}q{self.q_len}k{self.k_len}"
        return f"{sizes}{totals}{params}{documents}"

    def to_json(self) -> dict[str, Any]:
        """As in records and manifests."""
        return {
            "spec": self.spec.to_json(),
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "q_len": self.q_len,
            "k_len": self.k_len,
            "params": dict(self.params),
            **({"total_q": self.total_q, "total_k": self.total_k} if self.spec.packed else {}),
            **({"documents": self.documents} if self.documents else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Workload:
        """The inverse of `to_json`."""
        fields = dict(data)
        fields["spec"] = AttentionSpec.from_json(data["spec"])
        fields["params"] = tuple(data["params"].items())
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A workload's sizes as look-up codes; `distance` orders buckets of one spec."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    params: tuple[int, ...] = field(default=())
    totals: tuple[int, ...] = field(default=())
    """Of the tokens of packed sequences, queries and keys."""

    @property
    def text(self) -> str:
        """Readable text, as in the database: upper bounds of the rounded sizes, parameters by log2."""
        sizes = [f"b{_bound(self.batch)}", f"h{self.heads}", f"kv{self.kv_heads}"]
        sizes += [f"q{_bound(self.q_len)}", f"k{_bound(self.k_len)}"]
        sizes += [f"{name}{_bound(code)}" for name, code in zip(("tq", "tk"), self.totals, strict=False)]
        return " ".join([*sizes, *(f"p{code}" for code in self.params)])

    def distance(self, other: Bucket) -> float:
        """Sum of log2 ratios over the sizes; 0 for the same bucket."""
        codes = [(self.batch, other.batch), (self.q_len, other.q_len), (self.k_len, other.k_len)]
        codes += zip(self.params + self.totals, other.params + other.totals, strict=True)
        heads = abs(math.log2(self.heads / other.heads)) + abs(math.log2(self.kv_heads / other.kv_heads))
        return heads + sum(abs(a - b) for a, b in codes)


def _bound(code: int) -> int:
    return 1 << (code - 1) if code else 0


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What only a call knows of its tensors, and a kernel was or was not compiled for.

    access:
        `aligned`: every base address and every stride but the innermost is a multiple of 16 bytes,
        the innermost stride is one element; `unit`: only the innermost stride is one;
        `strided`: nothing is promised.
    tma: descriptors can express the tensors (aligned, and no stride 0 along a real dimension).
    wide: a product of an index and a stride can pass 2^31, so strides are 64-bit.
    """

    access: str = "aligned"
    tma: bool = True
    wide: bool = False

    def __post_init__(self) -> None:
        if self.access not in ("aligned", "unit", "strided"):
            raise InvalidArgument(f"access={shown(self.access)} must be aligned, unit or strided")
        if self.tma and self.access != "aligned":
            raise InvalidArgument("tma needs aligned access")
