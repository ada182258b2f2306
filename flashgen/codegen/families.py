"""The table of families: a new one is a module, a template and a row here."""

from __future__ import annotations

from flashgen.codegen.attention_bwd import ATTENTION_BWD
from flashgen.codegen.attention_bwd_sm90 import ATTENTION_BWD_SM90
from flashgen.codegen.attention_fwd import ATTENTION_FWD
from flashgen.codegen.attention_fwd_sm90 import ATTENTION_FWD_SM90
from flashgen.codegen.family import Family
from flashgen.errors import DoesNotFit, InvalidArgument, UnknownName, Unsupported
from flashgen.spec.attention import AttentionSpec, CallFacts
from flashgen.spec.config import Config
from flashgen.spec.target import Target

FAMILIES = {
    family.name: family for family in (ATTENTION_FWD_SM90, ATTENTION_FWD, ATTENTION_BWD, ATTENTION_BWD_SM90)
}
"""In the order in which their defaults are tried."""


def computing(spec: AttentionSpec) -> tuple[Family, ...]:
    """The families that compute what a spec does, in the table's order, whether or not they serve it."""
    return tuple(family for family in FAMILIES.values() if family.op == spec.op)


def find_family(name: str) -> Family:
    """The table's row of that name; `UnknownName` lists the known ones."""
    try:
        return FAMILIES[name]
    except (KeyError, TypeError):  # the second: what cannot be a key
        raise UnknownName("family", name, FAMILIES) from None


def naming(name: str) -> tuple[Family, ...]:
    """The families that have a config of that short name, in the table's order."""

    def has(family: Family) -> bool:
        try:
            return bool(family.find(name))
        except InvalidArgument:
            return False

    return tuple(filter(has, FAMILIES.values()))


def foreign(config: Config) -> str:
    """Why a config that was read is of no family here, or is none of its family's."""
    family = FAMILIES.get(config.family)
    if family is None:
        return f"family {config.family} does not exist in this version"
    return family.owns(config)


def serving(
    spec: AttentionSpec, target: Target, facts: CallFacts | None = None, heads_per_kv: int = 1
) -> tuple[Family, ...]:
    """The families that serve a spec on a target, in the table's order.

    Args:
        facts: only those whose default serves calls of this kind, too.
        heads_per_kv: query heads of each key head of such calls.

    Raises:
        Unsupported: none does; the message lists each one's reason.
    """
    reasons = {family: why_not(family, spec, target, facts, heads_per_kv) for family in computing(spec)}
    found = tuple(family for family, reason in reasons.items() if not reason)
    if not found:
        raise Unsupported("no kernel family serves this: " + "; ".join(reasons.values()))
    return found


def why_not(
    family: Family, spec: AttentionSpec, target: Target, facts: CallFacts | None = None, heads_per_kv: int = 1
) -> str:
    """Why a family does not serve a spec on a target, or none of its defaults calls of a kind; else empty."""
    if (reason := family.supports(spec, target)) or facts is None:
        return reason
    try:
        family.default(spec, target, facts, heads_per_kv)
    except DoesNotFit as error:
        return str(error)
    return ""
