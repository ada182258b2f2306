"""What Triton's interpreter does over and over, done once: it takes most of the time of these tests.

Under a profiler 29 % of it were checks for overflows that nobody reads, 15 % shapes and types of blocks, 11 %
the patching of `triton.language` at every call of a function, 5 % a table of dtypes. Without them the masks
of packed gradients take 10 s where they took 23. What is computed stays the same. Written against triton 3.6;
under another the interpreter is left as it is.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter


def _no_checks_that_nobody_reads() -> None:
    # Sums, differences and products of int32 are made again in int64 and compared, and `device_assert` drops
    # the outcome unless the options say debug, which they never do.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _patch_once_in_a_launch() -> None:
    # A launch puts its own into the place of what it finds in triton.language, and at its end takes it back;
    # each function that a kernel calls does the same again.
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_new(function: Any) -> Any:
        seen = list(function.__globals__.values())
        modules = {each.__name__ for each in (tl, tl.core) if each in seen}
        if modules <= patched:
            return None
        patched.update(modules)
        return patch(function)

    def launch_afresh(self: Any, *args: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_afresh


def _dtypes_by_name() -> None:
    # A table of 18 dtypes is built to look one up.
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        scalar = dtype.scalar
        if (found := known.get(scalar.name)) is None:
            found = known[scalar.name] = look_up(scalar)
        return found

    interpreter._get_np_dtype = remembered


def _shapes_by_their_numbers() -> None:
    # The type of a block and each tensor get their shape as a tuple of Triton's, which has a type of its own.
    # Nobody changes either.
    of_type, of_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(each if type(each) is int else each.value for each in shape))
        if key not in types:
            of_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape.values) if kind.is_block() else ()
        if key not in shapes:
            of_tensor(self, handle, kind)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[key]

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor


if triton.__version__.startswith("3.6."):
    _no_checks_that_nobody_reads()
    _patch_once_in_a_launch()
    _dtypes_by_name()
    _shapes_by_their_numbers()
