"""KernelSource: one rendered kernel, with its name, its hash and its ABI."""

from __future__ import annotations

import ast
import hashlib
import re
import secrets
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashgen.codegen import lists, splits
from flashgen.codegen.abi import (
    ALLOCATED,
    WORKSPACE,
    Abi,
    Arg,
    Part,
    Scratch,
    dropout_arguments,
    environment_names,
    sink_arguments,
    tensor_arguments,
)
from flashgen.codegen.attention_fwd_sm90 import ROWS as CONSUMER_ROWS
from flashgen.codegen.attention_fwd_sm90 import TRANSPOSED
from flashgen.codegen.chunks import chunks, described
from flashgen.codegen.environment import environment, tidy
from flashgen.codegen.expressions import render_mask, render_score, rule_arguments
from flashgen.codegen.families import FAMILIES
from flashgen.spec.attention import DESCALES, AttentionSpec, CallFacts
from flashgen.spec.config import OPTIONAL, Config


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What a kernel is rendered for: a triton version, or its interpreter."""

    triton: str
    interpret: bool = False
    """The interpreter multiplies the raw bits of bf16, so operands are brought to fp32 there."""

    @property
    def minor(self) -> tuple[int, ...]:
        """(3, 6) of 3.6.0: what templates compare; of what reads otherwise (0, 0)."""
        found = re.match(r"(\d+)\.(\d+)", self.triton)
        return tuple(map(int, found.groups())) if found else (0, 0)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Rendered text of one kernel and everything a caller must know of it."""

    spec: AttentionSpec
    config: Config
    toolchain: Toolchain
    name: str
    """The kernel's function name, which profilers and tracebacks show."""
    text: str
    hash: str
    """Of the syntax tree without comments, docstrings and the kernel's own name."""
    arguments: tuple[tuple[Arg, ...], ...]
    """Arguments of an aligned call, grouped as in the rendered signature."""
    parts: tuple[Part, ...] = ()
    """The file's other kernels, in the order they run."""
    scratch: tuple[Scratch, ...] = ()
    """Buffers of a call that its kernels share."""

    def abi(self, facts: CallFacts, part: Part | None = None) -> Abi:
        """The arguments of the main kernel, or of a part, specialised for one kind of call."""
        tiling = FAMILIES[self.config.family].tiling(self.config)
        groups = self.arguments if part is None else part.arguments
        return Abi(
            environment=environment_names(self.spec, self.scratch),
            args=tuple(_specialised(arg, self.spec, facts) for group in groups for arg in group),
            grid=tiling.grid_of(self.spec) if part is None else part.grid,
            max_registers=tiling.max_registers if part is None else 0,
            num_warps=tiling.num_warps if part is None else part.num_warps,
            num_stages=(tiling if part is None else part).num_stages,
            facts=facts,
        )


def _specialised(arg: Arg, spec: AttentionSpec, facts: CallFacts) -> Arg:
    """What the compiler may assume of an argument, and its width, for calls of this kind."""
    divisor, constant, kind = arg.divisor, arg.constant, arg.type
    if arg.source in ALLOCATED:  # by FlashGen
        divisor = 16
    elif arg.source.startswith("gradient."):  # as well, but of an operand's shape
        divisor = 16 if arg.type.startswith("*") else 1
    elif arg.source.startswith("scratch."):  # as well, and what a stride divides by is the part's to say
        divisor = 16 if arg.type.startswith("*") else divisor
    elif arg.source in ("q", "k", "v", "dout", "dlse") and not arg.is_descriptor:
        divisor = 16 if facts.access == "aligned" else 1
    elif arg.source.endswith("stride.dim"):
        constant = 1 if facts.access != "strided" else None
    elif ".stride." in arg.source and not arg.source.startswith(("operand", "descale", "sinks")):
        divisor = 16 // spec.itemsize if facts.access == "aligned" else 1
    if ".stride." in arg.source and facts.wide:
        kind = "i64"
    return Arg(arg.name, arg.source, kind, divisor, constant, arg.offset)


def _tensor_arguments(tensor: str, spec: AttentionSpec, config: Config) -> list[tuple[Arg, ...]]:
    """A tensor as pointer and strides, or as one descriptor a chunk."""
    dtype = spec.result_dtype if tensor == "OUT" else spec.dtype
    if tensor == "V" and any(buffer.name == TRANSPOSED for buffer in _scratch(config, spec)):
        keys = FAMILIES[config.family].tiling(config).block_n
        return [
            tuple(
                Arg(tensor + c.suffix, f"scratch.{TRANSPOSED}", f"tensordesc<{dtype}[1,1,{c.size},{keys}]>")
                for c in chunks(spec, tensor)
            )
        ]
    if rows := _descriptor_rows(tensor, config):
        return [described(spec, tensor, dtype, rows)]
    return [tensor_arguments(tensor, dtype, spec.packed)]


def _scratch(config: Config, spec: AttentionSpec) -> tuple[Scratch, ...]:
    return FAMILIES[config.family].scratch(config, spec)


def _descriptor_rows(tensor: str, config: Config) -> str:
    """Heads and rows of one copy of a tensor, as `1,64`; empty where it is accessed by pointer."""
    family = FAMILIES[config.family]
    tiling = family.tiling(config)
    if not tiling.descriptors or (tensor == "OUT" and family.language == "triton"):
        return ""
    if tensor in ("K", "V"):
        return f"1,{tiling.block_n}"
    if family.language == "triton":
        return f"1,{tiling.block_m}"
    return f"{tiling.pack},{CONSUMER_ROWS // tiling.pack}"  # of one warpgroup


def _arguments(spec: AttentionSpec, config: Config) -> tuple[tuple[Arg, ...], ...]:
    """The kernel's arguments in order, grouped by line of the signature."""
    family = FAMILIES[config.family]
    if family.signature is not None:
        return family.signature(config, spec)
    tiling = family.tiling(config)
    whole = tiling.splits == 1  # else output and LSE are another kernel's
    tensors = ("Q", "K", "V", "OUT") if whole else ("Q", "K", "V")
    groups = [g for tensor in tensors for g in _tensor_arguments(tensor, spec, config)]
    if not whole:
        groups.append(splits.BUFFERS)
    elif spec.return_lse:
        groups.append((Arg("LSE", "lse", "*fp32"),))
    if whole:
        groups += sink_arguments(spec.sinks)
    if tiling.persistent:
        groups.append((Arg("WORKSPACE", WORKSPACE, "*i32"),))
    sizes = [Arg(name, name, "i32") for name in ("heads", "heads_per_kv")]
    if spec.packed:
        groups.append((Arg("CU_Q", "cu_q", "*i32"), Arg("CU_K", "cu_k", "*i32")))
        sizes.insert(0, Arg("sequences", "sequences", "i32"))
        sizes.append(Arg("q_tokens", "q_len", "i32"))
    else:
        if family.language == "gluon":
            sizes.insert(0, Arg("batches", "batch", "i32"))
        sizes += [Arg(name, name, "i32") for name in ("q_len", "k_len")]
    sizes.append(Arg("scale", "scale", "fp32"))
    if spec.quantized:  # the kernel's own scale is this one with the factors of a tile
        sizes[-1:] = [Arg("score_scale", "scale", "fp32"), Arg("v_factor", "v_factor", "fp32")]
    groups.append(tuple(sizes))
    groups += dropout_arguments(spec)
    if listed := lists.arguments(spec):
        groups.append(listed)
    if spec.quantized:
        groups += map(_descale_arguments, DESCALES)
    for rule in (spec.mask, spec.score_mod):
        groups += rule_arguments(rule) if rule is not None else ()
    return tuple(groups)


def _descale_arguments(tensor: str) -> tuple[Arg, ...]:
    """A tensor's factors and their strides."""
    names = {axis: f"stride_{tensor}s{axis[0]}" for axis in DESCALES[tensor]}
    strides = (Arg(name, f"descale.{tensor}.stride.{axis}", "i32") for axis, name in names.items())
    return (Arg(f"{tensor.upper()}_SCALE", f"descale.{tensor}", "*fp32"), *strides)


def _of_rules(group: tuple[Arg, ...]) -> bool:
    """Whether a line of the signature belongs to the mask or the score rule."""
    return group[0].source.startswith(("param.", "operand."))


def _of_descales(group: tuple[Arg, ...]) -> bool:
    """Whether a line of the signature is a tensor's factors."""
    return group[0].source.startswith("descale.")


def kernel_name(spec: AttentionSpec, config: Config) -> str:
    """`attention_fwd_d128_causal_softcap_bf16_m128n64w8s3_tma_heads`: what it is, as an identifier."""
    rules = [rule.name for rule in (spec.mask, spec.score_mod) if rule is not None]
    extras = [f"to_{spec.out_dtype}"] if spec.out_dtype else []
    extras += [{"fwd": "lse", "bwd": "dlse"}[spec.op]] if spec.return_lse else []
    extras += [{"fwd": "sinks", "bwd": "dsinks"}[spec.op]] if spec.sinks else []
    extras += [f"d_{operand}" for operand in spec.learned]
    extras += ["dropout"] if spec.dropout else []
    packed = ["varlen"] if spec.packed else []
    return "_".join([config.family, *packed, spec.dims_label, *rules, spec.dtype_label, *extras, config.name])


def kernel_hash(text: str) -> str:
    """16 hex digits over the syntax tree; a comment, a docstring or the kernel's name changes nothing."""
    tree = ast.parse(text)
    for node in (tree, *tree.body):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    kernel = [node for node in tree.body if isinstance(node, ast.FunctionDef)][-1]
    kernel.name = "kernel"
    return hashlib.sha256(_tree_text(tree).encode()).hexdigest()[:16]


def _tree_text(node: object) -> str:
    """A syntax tree as text without its empty fields, which other versions of Python have more of."""
    if isinstance(node, list):
        return f"[{','.join(map(_tree_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(f'{name}={_tree_text(value)}' for name, value in fields)})"


def _title(spec: AttentionSpec) -> str:
    """Lines of the file's docstring: what the kernel computes."""
    packed = "packed sequences, " if spec.packed else ""
    what = {"fwd": "forward", "bwd": "backward"}[spec.op]
    lines = [f"Attention {what}, {packed}head_dim {spec.head_dim}, {spec.dtype_label}."]
    if spec.head_dim_v != spec.head_dim:
        lines[0] = lines[0][:-1] + f", values of {spec.head_dim_v}."
    lines.append(f"Mask {spec.mask.name}: {spec.mask.text}")
    if spec.score_mod is not None:
        lines.append(f"Score rule {spec.score_mod.name}: {spec.score_mod.text}")
    if spec.sinks:
        with_what = {"fwd": "a sink for each head", "bwd": "the gradient of each head's sink"}[spec.op]
        lines.append(f"With {with_what}: a logit that takes weight and has no value.")
    if spec.dropout:
        lines.append("Weights are dropped at random.")
    return "\n".join(part for line in lines for part in textwrap.wrap(line, 100, break_on_hyphens=False))


@lru_cache(maxsize=4096)
def render(spec: AttentionSpec, config: Config, toolchain: Toolchain) -> KernelSource:
    """Renders one kernel. Pure: equal arguments give equal text; about 1 ms, then cached."""
    family = FAMILIES[config.family]
    arguments = _arguments(spec, config)
    parts, scratch = family.parts(config, spec), _scratch(config, spec)
    mask = render_mask(spec.mask, may_list=lists.used(spec), apart=spec.op == "bwd")
    score = render_score(spec, apart=family.language == "gluon")
    name = kernel_name(spec, config)
    text = tidy(
        environment()
        .get_template(family.template)
        .render(
            name=name,
            title=_title(spec),
            spec=spec,
            config=OPTIONAL | dict(config.values),
            toolchain=toolchain,
            signature=[", ".join(arg.name for arg in group) for group in arguments],
            parts={part.name: part for part in parts},
            list_arguments=", ".join(arg.name for arg in lists.arguments(spec)),
            lists_by_head=lists.by_head(spec.mask),
            descale_arguments=[
                ", ".join(arg.name for arg in group) for group in arguments if _of_descales(group)
            ],
            rule_arguments=[", ".join(arg.name for arg in group) for group in arguments if _of_rules(group)],
            q_chunks=chunks(spec, "Q"),
            k_chunks=chunks(spec, "K"),
            v_chunks=chunks(spec, "V"),
            out_chunks=chunks(spec, "OUT"),
            mask=mask,
            score=score,
            helpers={*mask.helpers, *score.helpers},
            **family.derived(config, spec),
            precision=f', input_precision="{spec.fp32_precision}"' if spec.dtype == "fp32" else "",
        )
    )
    return KernelSource(spec, config, toolchain, name, text, kernel_hash(text), arguments, parts, scratch)


def write(source: KernelSource, folder: Path) -> Path:
    """Writes the source as `<name>-<hash>.py` in `folder`, unless it is there, and returns its path."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:12]
    path = folder / f"{source.name}-{digest}.py"
    if path.exists() and path.read_text() == source.text:
        return path
    write_whole(path, source.text.encode())
    return path


def write_whole(path: Path, content: bytes, mode: int | None = None) -> None:
    """Writes a file: complete or absent, whoever else writes it at the same time, and nothing beside it.

    Args:
        mode: its permissions, by default those of any new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
