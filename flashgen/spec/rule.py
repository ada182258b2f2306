"""Rules: the part of a mask or score rule that is compiled into a kernel, and the values given at a call."""

from __future__ import annotations

import hashlib
import keyword
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar, TypeVar

from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec import expr as ex
from flashgen.spec.expr import Expr
from flashgen.spec.form import MAX_ENTRIES, shown
from flashgen.spec.interval import Interval

KINDS: Mapping[str, frozenset[str]] = {
    "mask": frozenset(ex.SYMBOLS) - {"score"},
    "score": frozenset(ex.SYMBOLS),
}
"""Kinds of rules, and the symbols each may use."""

PARAM_TYPES: Mapping[str, str] = {"i32": "int", "f32": "float"}
"""Types of runtime numbers."""

OPERAND_DTYPES: Mapping[str, str] = {
    "i1": "bool",
    "u8": "int",
    "i8": "int",
    "i16": "int",
    "i32": "int",
    "i64": "int",
    "fp16": "float",
    "bf16": "float",
    "fp32": "float",
}
"""Element types of operands, as Triton spells them, and what they are in an expression."""

TORCH_DTYPES: Mapping[str, str] = {
    "torch.bool": "i1",
    "torch.uint8": "u8",
    "torch.int8": "i8",
    "torch.int16": "i16",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
}
"""Operand dtypes by `str(tensor.dtype)`."""

MAX_NAME = 64
MAX_DECLARED = MAX_ENTRIES // 2
"""Parameters and operands of one rule: a workload has two rules, and is written with those of both."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_DECLARATION = re.compile(r"\s*([A-Za-z_0-9]+)\s*:\s*([A-Za-z_0-9]+)(\s+ascending)?\s*")
_WHERE = re.compile(r"\bwhere\b(?!\s*\()")  # the separator; the function of that name is always called


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a rule gathers from: element type and number of dimensions."""

    name: str
    dtype: str
    rank: int
    ascending: bool = False
    """Whether its integers never fall along the last axis, so that of a tile's rows the first one reads the
    least and the last one the greatest. Whoever gives the tensor vouches for it: kernels skip tiles by it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{' ascending' if self.ascending else ''}"


@dataclass(frozen=True)
class Rule:
    """What of a mask or a score rule is compiled in: an expression with declared parameters and operands.

    Two rules are equal if their kind and text are; the name is for people. A rule is a key of dictionaries
    on the dispatcher's fast path, so its hash is computed once.

    Raises:
        InvalidArgument: a declaration is unknown, unused, missing or reserved, or the expression's type is
            not that of the kind.
    """

    kind: str
    expr: Expr = field(compare=False)
    params: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(name, `i32` or `f32`) of the numbers given at a call, in order."""
    operands: tuple[Operand, ...] = field(default=(), compare=False)
    name: str = field(default="", compare=False)
    """A short identifier that becomes part of the kernel's name."""
    form: str = field(default="", compare=False)
    """How a person writes it, with `{}` for each parameter: `causal & sliding_window({}, {})`."""
    text: str = field(init=False)
    """The canonical text, declarations included; `Rule.parse` reads it back."""
    divisors: tuple[int, ...] = field(init=False, compare=False)
    """Which of `params` whole numbers are divided by: 0 has no quotient and no remainder."""
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("kind of rule", self.kind, KINDS)
        _check_declarations(self)
        if ex.depth(self.expr) > ex.MAX_DEPTH:
            raise InvalidArgument(ex.TOO_DEEP)
        type_, wanted = ex.result_type(self.expr, self.types), "bool" if self.kind == "mask" else "number"
        if (type_ == "bool") != (wanted == "bool"):
            raise InvalidArgument(
                f"a {self.kind} rule gives a {wanted}, but {shown(ex.to_text(self.expr))} is {type_}; "
                "a mask compares positions, a score rule returns a changed score"
            )
        declared = [f"{name}: {type_}" for name, type_ in self.params]
        declared += map(str, self.operands)
        text = ex.to_text(self.expr) + (f" where {', '.join(declared)}" if declared else "")
        if len(text) > ex.MAX_TEXT:
            raise InvalidArgument(f"a rule of {len(text)} characters; at most {ex.MAX_TEXT}: combine fewer")
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "divisors", _divisors(self))
        object.__setattr__(self, "_hash", hash((self.kind, text)))
        if not self.name:
            object.__setattr__(self, "name", _fitting_name("rule", self.text, always_digest=True))
        elif not _NAME.fullmatch(self.name) or len(self.name) > MAX_NAME:
            raise InvalidArgument(
                f"rule name {shown(self.name)} must be lower-case letters, digits and underscores, "
                f"at most {MAX_NAME}"
            )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<Rule {self.name}: {self.text}>"

    def __reduce__(self) -> tuple[Callable[..., Rule], tuple[str, ...]]:
        # Text hashes differ between processes, so a pickle must not carry the stored hash.
        return _parse, (self.kind, self.text, self.name, self.form)

    @property
    def types(self) -> dict[str, str]:
        """`bool`, `int` or `float` for each parameter and operand, as `expr.result_type` takes it."""
        types = {name: PARAM_TYPES[type_] for name, type_ in self.params}
        return types | {operand.name: OPERAND_DTYPES[operand.dtype] for operand in self.operands}

    @property
    def may_drop(self) -> bool:
        """Whether a score rule may give -inf: it says so itself, or an operand may hold it."""
        written = any(each == ex.Const(math.inf) for each in ex.walk(self.expr))
        return written or any(OPERAND_DTYPES[operand.dtype] == "float" for operand in self.operands)

    @classmethod
    def parse(cls, kind: str, text: str, *, name: str = "", form: str = "") -> Rule:
        """Reads a rule's text, which may come from anywhere.

        Args:
            kind: `mask` or `score`.
            text: an expression, and after `where` the type of each name of its own:
                `(q_pos - k_idx <= left) & (k_idx < lengths[batch]) where left: i32, lengths: i32`.
                A name that is indexed is an operand, any other a parameter. `ends: i32 ascending` declares
                integers that never fall along the operand's last axis.
            name: a short identifier; without one it is made from a digest of the text.
            form: how a person writes it, see `Rule.form`.

        Raises:
            InvalidArgument: names the offending piece.
        """
        return _parse(kind, text, name, form)

    def with_name(self, name: str, form: str = "") -> Rule:
        """The same rule under another name."""
        return replace(self, name=name, form=form)


def _check_declarations(rule: Rule) -> None:
    strange = ex.free_symbols(rule.expr) - KINDS[rule.kind]
    if strange:
        raise UnknownName(f"symbol in a {rule.kind} rule:", min(strange), KINDS[rule.kind])
    names = [name for name, _ in rule.params] + [operand.name for operand in rule.operands]
    if len(names) > MAX_DECLARED:
        raise InvalidArgument(f"a rule declares {len(names)} names; at most {MAX_DECLARED}: combine fewer")
    for name in names:
        reserved = (
            name in ex.SYMBOLS
            or name in ex.TILE_SYMBOLS
            or name in ex.FUNCTIONS
            or name == ex.INFINITY
            or keyword.iskeyword(name)
        )
        misshapen = not _NAME.fullmatch(name) or "__" in name or len(name) > MAX_NAME
        if reserved or misshapen or names.count(name) > 1:
            raise InvalidArgument(
                f"{shown(name)} cannot be declared: a name is lower-case letters, digits and single "
                "underscores, occurs once, and is no symbol, function or keyword; choose another"
            )
    for kind, used in (("parameter", ex.params(rule.expr)), ("operand", _operand_names(rule.expr))):
        declared = [name for name, _ in rule.params] if kind == "parameter" else names[len(rule.params) :]
        if set(declared) != set(used):
            odd = sorted(set(declared) ^ set(used))[0]
            state = "declared but not used" if odd in declared else "used but not declared"
            raise InvalidArgument(f"{kind} {shown(odd)} is {state} in {shown(ex.to_text(rule.expr))}")
    for name, type_ in rule.params:
        if type_ not in PARAM_TYPES:
            raise UnknownName(f"type of parameter {shown(name)}:", type_, PARAM_TYPES)
    for operand in rule.operands:
        if operand.dtype not in OPERAND_DTYPES:
            raise UnknownName(f"dtype of operand {shown(operand.name)}:", operand.dtype, OPERAND_DTYPES)
        if operand.ascending and OPERAND_DTYPES[operand.dtype] != "int":
            raise InvalidArgument(
                f"{shown(str(operand))} is no declaration: only integers are ascending, for no range of keys "
                f"is solved from others; write {operand.name}: {operand.dtype}"
            )
        for load in ex.loads(rule.expr):
            if load.operand == operand.name and len(load.indices) != operand.rank:
                raise InvalidArgument(
                    f"{shown(ex.to_text(load))} does not have {operand.rank} indices; every read of an "
                    "operand takes one index per dimension"
                )


def _divisors(rule: Rule) -> tuple[int, ...]:
    """See `Rule.divisors`."""
    found = set()
    for node in ex.walk(rule.expr):
        if not isinstance(node, ex.Apply) or node.op not in ("//", "%"):
            continue
        if ex.result_type(node, rule.types) != "int":
            continue
        by = node.args[1]
        if ex.constant(ex.simplify(by)) == 0:
            raise InvalidArgument(
                f"{shown(ex.to_text(node))} divides a whole number by 0, which has no value; divide by "
                "another number"
            )
        if isinstance(by, ex.Param):
            found.add(by.name)
    return tuple(i for i, (name, _) in enumerate(rule.params) if name in found)


def _operand_names(expr: Expr) -> tuple[str, ...]:
    return tuple(dict.fromkeys(load.operand for load in ex.loads(expr)))


def _fitting_name(name: str, text: str, always_digest: bool = False) -> str:
    """`name`, or one made with a digest of `text` if it is too long for a kernel's name."""
    if len(name) <= MAX_NAME and not always_digest:
        return name
    return f"{name[: MAX_NAME - 9]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@lru_cache(maxsize=1024)
def _parse(kind: str, text: str, name: str, form: str) -> Rule:
    if kind not in KINDS:
        raise UnknownName("kind of rule", kind, KINDS)
    body, *declarations = _WHERE.split(text)
    if len(declarations) > 1:
        raise InvalidArgument(
            f"{shown(text)} has more than one 'where'; list all declarations after the first"
        )
    types: dict[str, str] = {}
    ascending = set()
    for piece in declarations[0].split(",") if declarations else ():
        match = _DECLARATION.fullmatch(piece)
        if match is None:
            raise InvalidArgument(f"{shown(piece.strip())} is not a declaration; write one like left: i32")
        if match[1] in types:
            raise InvalidArgument(f"{shown(match[1])} is declared twice in {shown(text)}; declare it once")
        types[match[1]] = match[2]
        if match[3]:
            ascending.add(match[1])
    expr = ex.parse(body, symbols=KINDS[kind], params=types, operands=dict.fromkeys(types))
    ranks = {load.operand: len(load.indices) for load in ex.loads(expr)}
    params = tuple((each, type_) for each, type_ in types.items() if each not in ranks)
    operands = tuple(
        Operand(each, types[each], ranks[each], each in ascending) for each in types if each in ranks
    )
    if lone := ascending.difference(ranks):
        raise InvalidArgument(
            f"parameter {shown(min(lone))} is one number, and not ascending; only an operand is declared so"
        )
    return Rule(kind, expr, params, operands, name, form)


_MONOTONE = frozenset({"+", "-", "*", "//", "neg", "min", "max"})


def reach(index: Expr, sizes: Mapping[str, int], numbers: Mapping[str, Any]) -> tuple[int, int] | None:
    """The least and the greatest value of an operand's index in a call, or None where that is not known.

    Exact: of an index of other operations, or that reads a symbol twice, interval arithmetic would say more
    than there is.

    Args:
        sizes: batch, heads, kv_heads, q_len and k_len, none of them 0.
        numbers: the rule's, by name.
    """
    walked = list(ex.walk(index))
    read = [node.name for node in walked if isinstance(node, ex.Symbol)]
    monotone = all(node.op in _MONOTONE for node in walked if isinstance(node, ex.Apply))
    known = {"batch": "batch", "head": "heads", "kv_head": "kv_heads", "q_idx": "q_len", "k_idx": "k_len"}
    varying = {*known, "q_pos"}
    rows = len({"q_idx", "q_pos"}.intersection(read))
    if not monotone or rows > 1 or any(read.count(each) > 1 for each in varying) or ex.loads(index):
        return None
    env: dict[str, Any] = {name: Interval(0, sizes[size] - 1) for name, size in known.items()}
    env |= {"q_len": sizes["q_len"], "k_len": sizes["k_len"]}
    env["q_pos"] = Interval(sizes["k_len"] - sizes["q_len"], sizes["k_len"] - 1)
    lo, hi = ex.bounds(index, {**numbers, **env})
    return (lo, hi) if isinstance(lo, int) and isinstance(hi, int) else None


# Combining


@dataclass(frozen=True, slots=True)
class Combined:
    """A rule made of two, and what became of the parameters and operands of each."""

    rule: Rule
    """Its parameters and operands are those of the kept sides, the left one's first."""
    keeps: tuple[bool, bool]
    """Whether the left and the right rule still occur in it; `full & x` is just `x`."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(old, new) name of each parameter and operand of the right rule whose name the left one has too."""


_WORDS = {"&": "and", "|": "or"}


@lru_cache(maxsize=4096)
def join(op: str, left: Rule, right: Rule) -> Combined:
    """The mask that keeps what both (`&`) or either (`|`) of two masks keep."""
    if ex.Const in (type(left.expr), type(right.expr)):
        expr = ex.make(op, left.expr, right.expr)
        return Combined(left, (True, False)) if expr == left.expr else Combined(right, (False, True))
    if left == right and not left.params and not left.operands:
        return Combined(left, (True, False))
    form = left.form and right.form and f"{_grouped(left.form, op)} {op} {_grouped(right.form, op)}"
    name = f"{left.name}_{_WORDS[op]}_{right.name}"
    return _merge(left, right, lambda renamed: chained(op, left.expr, renamed), name, form)


def chained(op: str, left: Expr, right: Expr) -> Expr:
    """`left op right`, grouped to the left throughout: equal masks get equal text, without parentheses."""
    if isinstance(right, ex.Apply) and right.op == op:
        return ex.make(op, chained(op, left, right.args[0]), right.args[1])
    return ex.make(op, left, right)


@lru_cache(maxsize=4096)
def compose(first: Rule, then: Rule) -> Combined:
    """The score rule that applies `first`, then `then` to its result."""
    if "score" not in ex.free_symbols(then.expr):
        return Combined(then, (False, True))
    form = first.form and then.form and f"{first.form}, {then.form}"
    score: Mapping[Expr, Expr] = {ex.Symbol("score"): first.expr}
    name = f"{first.name}_then_{then.name}"
    return _merge(first, then, lambda renamed: ex.substitute(renamed, score), name, form)


@lru_cache(maxsize=4096)
def invert(rule: Rule) -> Rule:
    """The mask that keeps what `rule` drops."""
    if isinstance(rule.expr, ex.Apply) and rule.expr.op == "~":
        name, form = rule.name.removeprefix("not_"), rule.form.removeprefix("~")
        form = form[1:-1] if form.startswith("(") else form
    else:
        name = _fitting_name(f"not_{rule.name}", rule.text)
        form = rule.form and f"~{_grouped(rule.form, '~')}"
    return replace(rule, expr=ex.make("~", rule.expr), name=name, form=form)


@lru_cache(maxsize=4096)
def apart(left: Rule, right: Rule) -> Rule:
    """The right rule under names of its own: a kernel of both has each parameter and operand once."""
    renamed = _renamed(left, right)
    if not renamed:
        return right
    params, operands = _declared(right, renamed)
    return replace(right, expr=ex.rename(right.expr, renamed), params=params, operands=operands)


def _merge(left: Rule, right: Rule, build: Callable[[Expr], Expr], name: str, form: str) -> Combined:
    renamed = _renamed(left, right)
    params, operands = _declared(right, renamed)
    expr = build(ex.rename(right.expr, renamed))
    rule = Rule(left.kind, expr, left.params + params, left.operands + operands, form=form)
    rule = replace(rule, name=_fitting_name(name, rule.text))
    return Combined(rule, (True, True), tuple(renamed.items()))


def _renamed(left: Rule, right: Rule) -> dict[str, str]:
    """A new name for each of the right rule's that the left one has too."""
    taken = set(left.types) | set(right.types)
    renamed: dict[str, str] = {}
    for old in right.types:
        if old in left.types:
            base = re.sub(r"_\d+$", "", old)
            new = next(each for each in (f"{base}_{i}" for i in count(1)) if each not in taken)
            taken.add(new)
            renamed[old] = new
    return renamed


def _declared(
    rule: Rule, renamed: Mapping[str, str]
) -> tuple[tuple[tuple[str, str], ...], tuple[Operand, ...]]:
    """Its parameters and operands under other names."""
    params = tuple((renamed.get(each, each), type_) for each, type_ in rule.params)
    return params, tuple(
        replace(operand, name=renamed.get(operand.name, operand.name)) for operand in rule.operands
    )


def _grouped(form: str, op: str) -> str:
    """`form` in parentheses if it would otherwise come apart as an operand of `op`."""
    outer = form
    while (inner := re.sub(r"\([^()]*\)", "", outer)) != outer:
        outer = inner
    order = ("|", "&", "~")
    loose = [each for each in order if f" {each} " in outer and order.index(each) < order.index(op)]
    return f"({form})" if loose else form


# Values


Self = TypeVar("Self", bound="Bound")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bound:
    """A rule with what a call gives it: base of `Mask` and `ScoreMod`.

    Made for every call, so it only compares lengths and looks for divisors of 0; whoever makes the values
    checks them otherwise.
    """

    KIND: ClassVar[str]

    rule: Rule
    values: tuple[int | float, ...] = ()
    """A number for each of `rule.params`."""
    tensors: tuple[Any, ...] = ()
    """A tensor for each of `rule.operands`, or None where it is still to be given (`bind`)."""

    def __post_init__(self) -> None:
        rule = self.rule
        if rule.kind != self.KIND:
            raise InvalidArgument(
                f"{shown(rule.text)} is a {rule.kind} rule; a {self.KIND} rule is needed here"
            )
        if len(self.values) != len(rule.params) or len(self.tensors) != len(rule.operands):
            raise InvalidArgument(
                f"{shown(rule.text)} takes {len(rule.params)} values and {len(rule.operands)} tensors, "
                f"but has {len(self.values)} and {len(self.tensors)}"
            )
        for at in rule.divisors:
            if self.values[at] == 0:
                raise InvalidArgument(
                    f"{rule.params[at][0]}=0 divides whole numbers in {shown(rule.text)}, which has no "
                    "value; give another number"
                )

    def __eq__(self, other: object) -> bool:
        # Tensors are compared by identity: comparing elements would read device memory.
        return (
            type(other) is type(self)
            and self.rule == other.rule
            and self.values == other.values
            and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
        )

    def __hash__(self) -> int:
        return hash((self.rule, self.values))

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    @property
    def missing(self) -> tuple[Operand, ...]:
        """The operands that have no tensor yet."""
        return tuple(
            operand
            for operand, tensor in zip(self.rule.operands, self.tensors, strict=True)
            if tensor is None
        )

    def bind(self: Self, *tensors: Any) -> Self:
        """The same rule and values with these operand tensors, in the order of `rule.operands`.

        Raises:
            InvalidArgument: the number of tensors, a dtype or a number of dimensions differs from the rule's.
        """
        operands = self.rule.operands
        if len(tensors) != len(operands):
            names = ", ".join(operand.name for operand in operands) or "none"
            raise InvalidArgument(
                f"{self.describe()} takes {len(operands)} tensors ({names}), not {len(tensors)}"
            )
        for operand, tensor in zip(operands, tensors, strict=True):
            if operand_dtype(tensor) != operand.dtype or len(tensor.shape) != operand.rank:
                raise InvalidArgument(
                    f"{operand.name} of {self.describe()} is {operand.dtype} with {operand.rank} dimensions, "
                    f"not {told_operand(tensor)}; build the rule from this tensor instead"
                )
        return type(self)(self.rule, self.values, tensors)

    def describe(self) -> str:
        """How a person writes it: `causal & sliding_window(1023, 0)`."""
        if self.rule.form:
            return self.rule.form.format(*self.values)
        given = ", ".join(
            f"{name}={value}" for (name, _), value in zip(self.rule.params, self.values, strict=True)
        )
        return ex.to_text(self.rule.expr) + (f" with {given}" if given else "")


def combine(combined: Combined, left: Self, right: Self) -> Self:
    """Two bound rules as one: the values and tensors of the kept sides, in order."""
    left_kept, right_kept = combined.keeps
    if not left_kept:
        return type(right)(combined.rule, right.values, right.tensors)
    if not right_kept:
        return type(left)(combined.rule, left.values, left.tensors)
    return type(left)(combined.rule, left.values + right.values, left.tensors + right.tensors)


def values_and_tensors(*rules: Bound | None) -> tuple[tuple[int | float, ...], tuple[Any, ...]]:
    """Of a call's rules, in the order that a launch takes them: the mask's, then the score rule's."""
    there = [bound for bound in rules if bound is not None]
    values = tuple(value for bound in there for value in bound.values)
    return values, tuple(tensor for bound in there for tensor in bound.tensors)


def operand_dtype(tensor: Any) -> str:
    """The dtype of a tensor as `Operand` spells it; empty for no tensor, or one that no rule reads.

    Raises:
        InvalidArgument: a nested tensor, which has no shape.
    """
    if getattr(tensor, "is_nested", False):
        raise InvalidArgument(
            "an operand is a dense tensor, not a nested one; pad it, as with torch.nested.to_padded_tensor"
        )
    return TORCH_DTYPES.get(str(getattr(tensor, "dtype", "")), "")


def told_operand(given: Any) -> str:
    """What was given in the place of an operand, for messages: a tensor by its dtype and shape."""
    if not hasattr(given, "dtype") or not hasattr(given, "shape"):
        return shown(given)
    return f"{given.dtype} of shape {tuple(given.shape)}"
