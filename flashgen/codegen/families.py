"""The table of families: a new one is a module, a template and a row here."""

from __future__ import annotations

from flashgen.codegen.attention_fwd import ATTENTION_FWD
from flashgen.codegen.attention_fwd_sm90 import ATTENTION_FWD_SM90
from flashgen.codegen.family import Family
from flashgen.errors import UnknownName, Unsupported
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import Config
from flashgen.spec.target import Target

FAMILIES = {family.name: family for family in (ATTENTION_FWD_SM90, ATTENTION_FWD)}
"""In the order in which their defaults are tried."""


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
