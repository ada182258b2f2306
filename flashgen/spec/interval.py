"""Arithmetic on ranges of numbers: what an expression can be while its symbols vary within ranges.

A truth value is a number too (0 or 1), so three-valued logic is the same arithmetic: `TRUE`, `FALSE` and
`UNKNOWN` are the ranges [1, 1], [0, 0] and [0, 1]. Every function here returns a range that holds each value
the operation can give; it may be wider, never narrower. Integers stay exact Python integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

Number = int | float


class Interval(NamedTuple):
    """All numbers from `lo` to `hi`, both included; a side without a limit is an infinity."""

    lo: Number
    hi: Number


EVERYTHING = Interval(-math.inf, math.inf)
TRUE = Interval(1, 1)
FALSE = Interval(0, 0)
UNKNOWN = Interval(0, 1)


def widened(a: Interval) -> Interval:
    """`a`, opened a little at each floating-point end.

    Bounds are computed in double precision but the kernel computes in single, with functions a few units in
    the last place off, so an end that is not an integer is only known to about 20 bits.
    """
    lo = a.lo - (abs(a.lo) * 2.0**-20 + 1e-37) if isinstance(a.lo, float) and math.isfinite(a.lo) else a.lo
    hi = a.hi + (abs(a.hi) * 2.0**-20 + 1e-37) if isinstance(a.hi, float) and math.isfinite(a.hi) else a.hi
    return Interval(lo, hi)


def _spanning(ends: list[Number]) -> Interval:
    if any(end != end for end in ends):  # a NaN: inf - inf, or a value outside a function's domain
        return EVERYTHING
    return Interval(min(ends), max(ends))


def _times(x: Number, y: Number) -> Number:
    # An infinite end means "no limit", not the value infinity, so zero times it is zero.
    return 0 if x == 0 or y == 0 else x * y


def negative(a: Interval) -> Interval:
    return Interval(-a.hi, -a.lo)


def add(a: Interval, b: Interval) -> Interval:
    return _spanning([a.lo + b.lo, a.hi + b.hi])


def subtract(a: Interval, b: Interval) -> Interval:
    return _spanning([a.lo - b.hi, a.hi - b.lo])


def multiply(a: Interval, b: Interval) -> Interval:
    return _spanning([_times(x, y) for x in a for y in b])


def divide(a: Interval, b: Interval) -> Interval:
    if b.lo <= 0 <= b.hi:
        return EVERYTHING
    return _spanning([x / y for x in a for y in b])


def floor_divide(a: Interval, b: Interval) -> Interval:
    if b.lo <= 0 <= b.hi:
        return EVERYTHING
    if math.inf in (abs(a.lo), abs(a.hi), abs(b.lo), abs(b.hi)):
        quotient = divide(a, b)  # rounding down takes off less than one
        return Interval(quotient.lo - 1, quotient.hi)
    return _spanning([x // y for x in a for y in b])


def modulo(a: Interval, b: Interval) -> Interval:
    if b.lo <= 0 <= b.hi:
        return EVERYTHING
    if b.lo == b.hi and math.isfinite(a.lo) and math.isfinite(a.hi) and a.lo // b.lo == a.hi // b.lo:
        return Interval(a.lo % b.lo, a.hi % b.lo)  # no wrap-around between the two ends
    return Interval(0, b.hi) if b.lo > 0 else Interval(b.lo, 0)


def minimum(a: Interval, b: Interval) -> Interval:
    return Interval(min(a.lo, b.lo), min(a.hi, b.hi))


def maximum(a: Interval, b: Interval) -> Interval:
    return Interval(max(a.lo, b.lo), max(a.hi, b.hi))


def absolute(a: Interval) -> Interval:
    return Interval(0 if a.lo <= 0 <= a.hi else min(abs(a.lo), abs(a.hi)), max(abs(a.lo), abs(a.hi)))


def rising(function: Callable[[Number], Number]) -> Callable[[Interval], Interval]:
    """The range of a function that never falls, from its two ends; NaN at an end means it has no range."""
    return lambda a: _spanning([function(a.lo), function(a.hi)])


def truth(a: Interval) -> Interval:
    """`a` as a truth value: what is certainly 0 or certainly 1 stays, all else is unknown."""
    return FALSE if a.hi <= 0 else TRUE if a.lo >= 1 else UNKNOWN


def logical_not(a: Interval) -> Interval:
    return subtract(TRUE, truth(a))


def logical_and(a: Interval, b: Interval) -> Interval:
    return minimum(truth(a), truth(b))


def logical_or(a: Interval, b: Interval) -> Interval:
    return maximum(truth(a), truth(b))


def less(a: Interval, b: Interval) -> Interval:
    return logical_not(less_equal(b, a))


def less_equal(a: Interval, b: Interval) -> Interval:
    # A value of which nothing is known may be NaN, and then every comparison is false.
    if EVERYTHING in (a, b):
        return UNKNOWN
    return TRUE if a.hi <= b.lo else FALSE if a.lo > b.hi else UNKNOWN


def greater(a: Interval, b: Interval) -> Interval:
    return less(b, a)


def greater_equal(a: Interval, b: Interval) -> Interval:
    return less_equal(b, a)


def equal(a: Interval, b: Interval) -> Interval:
    if EVERYTHING in (a, b):
        return UNKNOWN
    if a.lo == a.hi == b.lo == b.hi:
        return TRUE
    return FALSE if a.hi < b.lo or b.hi < a.lo else UNKNOWN


def not_equal(a: Interval, b: Interval) -> Interval:
    return logical_not(equal(a, b))


def where(condition: Interval, a: Interval, b: Interval) -> Interval:
    known = truth(condition)
    if known == UNKNOWN:
        return Interval(min(a.lo, b.lo), max(a.hi, b.hi))
    return a if known == TRUE else b
