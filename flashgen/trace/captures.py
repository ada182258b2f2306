"""What a callable captures: the numbers and tensors it reads from around it, and a copy that reads others.

Read at every call, so that a changed capture is seen: cells, globals, defaults, arguments of a partial, and
of objects (a method's `self`) the attributes that the code names. Two callables with equal keys do the same
with the numbers and tensors read beside it, whatever these are; where a key cannot tell (an attribute of a
class, a deque, `getattr`), the captures are not `whole`, and the callable is traced at every call (1 ms).
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument

MAX_PARTS = 1000
"""Most functions, objects and containers that one callable may reach."""

_INT = 2**31
_FLOAT = (2 - 2.0**-23) * 2.0**127
_THEIRS = frozenset({"torch", "numpy", "flashgen"}) | sys.stdlib_module_names
"""Packages whose functions and numbers stay what they are."""
_TYPE_TESTS = frozenset({"isinstance", "issubclass", "type"})
_LOOK_UPS = frozenset({"globals", "vars", "locals", "eval", "exec", "getattr", "hasattr", "dir", "type"})
"""Builtins that reach what no name in the code tells."""
# fmt: off
_OPERATORS = frozenset(
    f"__{name}__" for name in (
        "getitem", "len", "iter", "next", "contains", "bool", "int", "float", "index", "getattr", "neg",
        "abs", "invert", "enter", "exit",
        *(side + name for side in ("", "r") for name in (
            "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor",
        )),
    )
)
# fmt: on
"""Methods that Python calls without a name in the code."""


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """What a function's code reads from around it. One object for each code, so it can stand in keys."""

    code: types.CodeType
    globals: tuple[str, ...]
    attributes: frozenset[str]
    """Names of all attributes it asks for."""
    tests_types: bool
    """Whether it may ask what a number's type is, which a stand-in would answer wrongly."""
    looks_up: bool
    """Whether it may read what no name in it tells."""
    asked: dict[type, Asked] = field(default_factory=dict)
    """By the class of an object, see `_asked`."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What code asks of the objects of a class."""

    members: tuple[tuple[str, Any], ...]
    """Names of attributes; with each the function behind it if it is a method, `_MISSING` if the class has
    none of the name."""
    within: Code
    """What asks for attributes of these attributes: the code, and that of the methods."""


_codes: dict[int, Code] = {}  # by id, for a code's hash takes 1 us; `Code` keeps it from being used again
MAX_CODES = 1024


def _code(code: types.CodeType) -> Code:
    found = _codes.get(id(code))
    if found is None:
        if len(_codes) >= MAX_CODES:
            _codes.clear()
        found = _codes[id(code)] = _read_code(code)
    return found


def _read_code(code: types.CodeType) -> Code:
    globals_: dict[str, None] = {}
    attributes: set[str] = set()
    nested = [code]
    for each in nested:
        nested += [const for const in each.co_consts if isinstance(const, types.CodeType)]
        for step in dis.get_instructions(each):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                globals_[step.argval] = None
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                attributes.add(step.argval)
    looks_up = not attributes.isdisjoint(("__dict__", "__class__")) or not _LOOK_UPS.isdisjoint(globals_)
    tests_types = not _TYPE_TESTS.isdisjoint(globals_)
    return Code(code, tuple(globals_), frozenset(attributes), tests_types, looks_up)


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """An object as a part of a key: equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_MISSING = object()
_NOTHING = _Same(_MISSING)


@dataclass(slots=True)
class Captures:
    """What was read of a callable."""

    key: list[Any] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    """Ints within 32 bits and finite floats, in the order they were met."""
    tensors: list[Tensor] = field(default_factory=list)
    seen: dict[Any, int] = field(default_factory=dict)
    tests_types: bool = False
    whole: bool = True
    """Whether the key tells all that was read; else what the callable means may change under an equal key."""


def captures(function: Callable[..., Any]) -> Captures:
    """Everything a callable captures.

    Of an object that is called, its own `__call__`; give a module's `forward`, for torch's call does more.

    Raises:
        InvalidArgument: it reaches more than `MAX_PARTS` things.
    """
    found = Captures()
    _walk(function, None, found)
    return found


def _walk(value: Any, owner: Code | None, found: Captures) -> None:
    kind = type(value)
    if kind is int or kind is float:
        if _is_number(value):
            found.numbers.append(value)
            found.key.append(kind)
        else:
            found.key.append((kind, value))
    elif isinstance(value, Tensor):
        found.tensors.append(value)
        found.key.append((value.dtype, value.dim()))
    elif kind in _PLAIN:
        found.key.append((kind, value))
    elif kind.__module__ == "numpy" and hasattr(value, "item") and value.ndim == 0:
        _walk(value.item(), owner, found)
    else:
        mark = _mark(value, owner)
        again = found.seen.get(mark)
        if again is not None:
            found.key.append(("again", again))
            return
        if len(found.seen) >= MAX_PARTS:
            raise InvalidArgument(
                f"the callable reaches more than {MAX_PARTS} objects; let it capture what it reads alone"
            )
        found.seen[mark] = len(found.seen)
        head, parts, owner = _parts(value, owner)
        found.key.append(head)
        if type(head) is _Same:
            found.whole = found.whole and _stays(value)
        elif owner is not None:
            found.whole = found.whole and not owner.looks_up
            if kind is types.FunctionType:
                found.tests_types = found.tests_types or owner.tests_types
        for part in parts:
            _walk(part, owner, found)


def _mark(value: Any, owner: Code | None) -> Any:
    """What is read once: a function, or any other thing as one function asks it for attributes."""
    return id(value) if type(value) is types.FunctionType else (id(value), owner)


def _is_number(value: int | float) -> bool:
    if isinstance(value, int):
        return -_INT <= value < _INT
    return math.isfinite(value) and abs(value) <= _FLOAT


_PLAIN = frozenset({bool, type(None), str, bytes, torch.dtype, torch.device, complex})


def _parts(value: Any, owner: Code | None) -> tuple[Any, Sequence[Any], Code | None]:
    """What stands for a value in a key, what it is made of, and the code that asks these for attributes."""
    kind = type(value)
    if kind is types.FunctionType:
        if value.__closure__ is None and _is_theirs(value):
            return _Same(value), (), owner
        code = _code(value.__code__)
        there = value.__globals__
        parts = [_content(cell) for cell in value.__closure__ or ()]
        parts += [there.get(name, _NOTHING) for name in code.globals]
        parts += value.__defaults__ or ()
        parts += (value.__kwdefaults__ or {}).values()
        return code, parts, code
    if kind is types.MethodType:
        return kind, (value.__func__, value.__self__), _code_of(value.__func__) or owner
    if kind is functools.partial:
        words = tuple(value.keywords)
        return (
            (kind, len(value.args), words),
            (value.func, *value.args, *value.keywords.values()),
            _code_of(value.func) or owner,
        )
    if kind in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return (kind, len(value)), value, owner
    if kind is dict and all(type(key) in _KEYS for key in value):
        return (kind, *value), tuple(value.values()), owner
    if kind is _Same or isinstance(value, type):
        return _Same(value) if kind is not _Same else value, (), owner
    if kind is types.ModuleType:
        if owner is None or _is_theirs(value):
            return _Same(value), (), owner
        there = value.__dict__
        names = tuple(name for name in owner.attributes if name in there)
        return (_Same(value), names), [there[name] for name in names], owner
    if _is_object(value):
        owner = owner or _caller(value)
        if owner is not None:
            found = _attributes(value, owner)
            return (kind, *found), list(found.values()), _asked(kind, owner).within
    return _Same(value), (), owner


_KEYS = frozenset({str, int, bool, type(None)})
_CONSTANT_KINDS = (
    range, slice, enum.Enum, type(Ellipsis), types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, torch.finfo, torch.iinfo, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)  # fmt: skip


def _stays(value: Any) -> bool:
    """Whether a value without parts means the same for ever: not a deque, an array, or a class of the user's,
    whose attributes may be set, nor a method of a dict."""
    if isinstance(value, type):
        return _is_theirs(value) or issubclass(value, enum.Enum)
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
    if isinstance(value, types.FunctionType | types.ModuleType):
        return _is_theirs(value)
    of_numpy = type(value).__module__ == "numpy" and type(value).__name__ == "ufunc"
    return of_numpy or isinstance(value, (_Same, *_CONSTANT_KINDS))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _NOTHING


def _code_of(value: Any) -> Code | None:
    return _code(value.__code__) if type(value) is types.FunctionType else _caller(value)


def _caller(value: Any) -> Code | None:
    """The code that runs when an object is called."""
    call = inspect.getattr_static(type(value), "__call__", None)
    return _code(call.__code__) if type(call) is types.FunctionType else None


def _is_object(value: Any) -> bool:
    """Whether a value is an instance of a class written in Python, whose attributes can be read.

    Not one with a `__del__`, which a copy would run too, nor of a class of numbers, strings or containers,
    which hold more than attributes.
    """
    kind = type(value)
    if kind is types.SimpleNamespace:
        return True
    if _is_theirs(kind) or hasattr(kind, "__del__") or isinstance(value, enum.Enum):
        return False
    plain = all(each in _BARE or each.__flags__ & _HEAP_TYPE for each in kind.__mro__)
    return plain and (hasattr(value, "__dict__") or hasattr(kind, "__slots__"))


_BARE = (object, types.SimpleNamespace)
_HEAP_TYPE = 1 << 9
"""Flag of classes that are written in Python."""


def _asked(kind: type, owner: Code) -> Asked:
    """Attributes that code asks of an object of a class, and those that the class's own methods ask for."""
    found = owner.asked.get(kind)
    if found is None:
        names = dict.fromkeys(sorted(owner.attributes | {"__call__"} | _operators(kind)))
        members: dict[str, Any] = {}
        for name in (rest := list(names)):
            member = inspect.getattr_static(kind, name, _MISSING)
            function = members[name] = _function_of(member) or (None if member is not _MISSING else _MISSING)
            if type(function) is types.FunctionType:
                more = sorted(_code(function.__code__).attributes - names.keys())
                rest += more
                names |= dict.fromkeys(more)
        asked = frozenset(members)
        by_class = any(isinstance(inspect.getattr_static(kind, name, None), classmethod) for name in names)
        looks_up = owner.looks_up or by_class
        same = asked == owner.attributes and looks_up == owner.looks_up
        within = owner if same else replace(owner, attributes=asked, looks_up=looks_up, asked={})
        found = owner.asked[kind] = Asked(tuple(members.items()), within)
    return found


def _operators(kind: type) -> set[str]:
    """Names of `_OPERATORS` that a class defines in Python."""
    return {name for name in _OPERATORS if _function_of(inspect.getattr_static(kind, name, None)) is not None}


def _function_of(member: Any) -> types.FunctionType | None:
    """The function behind a member of a class."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, staticmethod | classmethod):
        member = member.__func__
    return member if type(member) is types.FunctionType and not _is_theirs(member) else None


def _is_theirs(value: Any) -> bool:
    """Whether a function, class or module is of a package whose code stays what it is."""
    name = value.__name__ if type(value) is types.ModuleType else value.__module__
    return (name or "").partition(".")[0] in _THEIRS


_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def _attributes(value: Any, owner: Code) -> dict[str, Any]:
    """The attributes of an object that code asks for; a method or property by its function."""
    own, kind = getattr(value, "__dict__", {}), type(value)
    tables = [own, *(own[name] for name in _MODULE_TABLES if name in own)]
    found = {}
    for name, member in _asked(kind, owner).members:
        for table in tables:
            if name in table:
                found[name] = table[name]
                break
        else:
            if member is not None:
                if member is not _MISSING:
                    found[name] = member
            elif type(plain := inspect.getattr_static(kind, name)) is types.MemberDescriptorType:
                found[name] = getattr(value, name, _NOTHING)  # of `__slots__`
            elif not hasattr(type(plain), "__get__"):
                found[name] = plain
    return found


# Paths


Path: TypeAlias = tuple[tuple[str, Any], ...]
"""Steps from a callable to what it captures: `cell` (index), `global`, `attribute` (name), `item` (key)."""


@dataclass(slots=True)
class Paths:
    """Where everything stands that a callable captures; numbers and tensors in the order of `Captures`."""

    numbers: tuple[Path, ...] = ()
    tensors: tuple[Path, ...] = ()
    functions: tuple[Path, ...] = ()
    constants: tuple[tuple[Path, Any], ...] = ()
    """With their values."""


def paths(function: Callable[..., Any]) -> Paths | None:
    """How all that a callable captures is reached; None where no steps lead to some of it."""
    found = Paths()
    return found if _follow(function, None, (), found, set()) else None


def _follow(value: Any, owner: Code | None, path: Path, found: Paths, seen: set[Any]) -> bool:
    kind = type(value)
    if (kind is int or kind is float) and _is_number(value):
        found.numbers += (path,)
    elif isinstance(value, Tensor):
        found.tensors += (path,)
    elif kind in _PLAIN or kind is int or kind is float:
        found.constants += ((path, value),)
    elif (mark := _mark(value, owner)) not in seen:
        seen.add(mark)
        head, parts, owner = _parts(value, owner)
        if isinstance(head, _Same):
            return _stays(value)
        steps = _steps(value, head, len(parts))
        if steps is None:
            return False
        if kind is types.FunctionType and path:
            found.functions += (path,)
        for part, step in zip(parts, steps, strict=True):
            if part is not _NOTHING and not _follow(part, owner, (*path, step), found, seen):
                return False
    return True


def _steps(value: Any, head: Any, count: int) -> list[tuple[str, Any]] | None:
    """The steps to the parts of a value; None where torch could not take them."""
    if type(value) is types.FunctionType:
        steps: list[tuple[str, Any]] = [("cell", i) for i in range(len(value.__closure__ or ()))]
        steps += [("global", name) for name in head.globals]
        return steps if len(steps) == count else None  # no defaults
    if type(value) in (tuple, list, dict):
        return [("item", key) for key in (value if type(value) is dict else range(count))]
    return None


# Copies


@dataclass(slots=True)
class Twins:
    """Makes a copy of a callable that reads other numbers and tensors in the place of those it captures."""

    number: Callable[[str, int | float], Any]
    """(what the callable calls it, the number) -> what it is to read; called in the order of `Captures`."""
    tensor: Callable[[str, Tensor], Any]
    builtins: Mapping[str, Any] = field(default_factory=dict)
    """What the copied functions read in the place of Python's own of these names."""
    made: dict[Any, Any] = field(default_factory=dict)
    whole: bool = True
    """Whether the copy read no more than `Captures` tell: a function that is handed an object may ask it for
    what the code that names the object does not."""

    def of(self, value: Any, name: str = "value", owner: Code | None = None) -> Any:
        """The copy of a value that is called `name`."""
        kind = type(value)
        if kind is int or kind is float:
            return self.number(name, value) if _is_number(value) else value
        if isinstance(value, Tensor):
            return self.tensor(name, value)
        if kind in _PLAIN:
            return value
        if kind.__module__ == "numpy" and hasattr(value, "item") and value.ndim == 0:
            return self.of(value.item(), name, owner)
        mark = _mark(value, owner)
        if mark not in self.made:
            self.made[mark] = value  # for what has no parts
            head, parts, owner = _parts(value, owner)
            if not isinstance(head, _Same):
                self._build(value, mark, head, parts, owner, name)
        return self.made[mark]

    def _build(
        self, value: Any, mark: Any, head: Any, parts: Sequence[Any], owner: Code | None, name: str
    ) -> None:
        kind, made = type(value), self.made
        if kind is types.FunctionType:
            self._function(value, mark, parts, owner)
        elif kind is types.MethodType:
            function, bound = (self.of(part, name, owner) for part in parts)
            made[mark] = types.MethodType(function, bound)
        elif kind is functools.partial:
            words = ("function", *(f"{name}_{i}" for i in range(len(value.args))), *value.keywords)
            function, *args = (self.of(part, word, owner) for part, word in zip(parts, words, strict=True))
            named = dict(zip(value.keywords, args[len(value.args) :], strict=True))
            made[mark] = functools.partial(function, *args[: len(value.args)], **named)
        elif kind is list:
            made[mark] = [self.of(part, f"{name}_{i}", owner) for i, part in enumerate(parts)]
        elif isinstance(value, tuple):
            words = getattr(value, "_fields", tuple(f"{name}_{i}" for i in range(len(parts))))
            copied = [self.of(part, word, owner) for part, word in zip(parts, words, strict=True)]
            made[mark] = tuple(copied) if kind is tuple else kind(*copied)
        elif kind is dict:
            made[mark] = {
                key: self.of(part, f"{name}_{key}", owner) for key, part in zip(value, parts, strict=True)
            }
        elif kind is types.ModuleType:
            assert owner is not None
            there = made[mark] = _twin_class(types.SimpleNamespace, value, head[1], self)()
            for each, part in zip(head[1], parts, strict=True):
                setattr(there, each, self.of(part, each, owner))
        else:
            self._object(value, mark, dict(zip(head[1:], parts, strict=True)), owner)

    def _function(
        self, value: types.FunctionType, mark: Any, parts: Sequence[Any], code: Code | None
    ) -> None:
        assert code is not None
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        there = dict(value.__globals__)
        copied = types.FunctionType(value.__code__, there, value.__name__, None, cells)
        self.made[mark] = copied
        arguments = inspect.getfullargspec(value)
        defaults = arguments.args[len(arguments.args) - len(value.__defaults__ or ()) :]
        words = (*value.__code__.co_freevars, *code.globals, *defaults, *(value.__kwdefaults__ or {}))
        rest = iter([self.of(part, word, code) for part, word in zip(parts, words, strict=True)])
        for cell in cells:
            if (content := next(rest)) is not _NOTHING:
                cell.cell_contents = content
        there.update({name: own for name in code.globals if (own := self.builtins.get(name))})
        there.update({name: part for name in code.globals if (part := next(rest)) is not _NOTHING})
        copied.__defaults__ = tuple(next(rest) for _ in defaults) or None
        copied.__kwdefaults__ = {word: next(rest) for word in value.__kwdefaults__ or {}} or None

    def _object(self, value: Any, mark: Any, found: dict[str, Any], owner: Code | None) -> None:
        """An object of the same class with the attributes that are asked for, and no others."""
        kind = type(value)
        members = {
            name: member
            for name, part in found.items()
            if _function_of(member := inspect.getattr_static(kind, name, None)) is part
        }
        base = types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object
        copied: Any = base.__new__(_twin_class(kind, value, found, self))
        self.made[mark] = copied
        for name, part in found.items():
            other = self.of(part, name, owner)
            member = members.get(name)
            if member is None:
                if other is not _NOTHING:
                    object.__setattr__(copied, name, other)  # also where the class refuses it (frozen)
            else:  # property, staticmethod and classmethod are called with the function they wrap
                wrapped = other if type(member) is types.FunctionType else type(member)(other)
                setattr(type(copied), name, wrapped)


class _Twin:
    """First base of the class of a copied object, so that no registry of the user's learns of that class."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def _twin_class(kind: type, original: Any, copied: Collection[str], twins: Twins) -> type:
    """A class like `kind`: attributes that were not copied are those of the original, and are noted."""

    own: Any = kind.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if name == "__dict__":
            twins.whole = False
            return original.__dict__ | own(self, name)
        if name in copied or (name.startswith("__") and type(original) is not types.ModuleType):
            return own(self, name)
        twins.whole = False
        return getattr(original, name)

    return type(kind.__name__, (_Twin, kind), {"__getattribute__": __getattribute__, "__slots__": ()})
