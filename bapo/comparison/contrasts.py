"""Which methods are compared with which: references by `--against`, and BAPO with DAPO whenever both are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bapo.comparison.gather import Compared, Method
from bapo.errors import ConfigError, did_you_mean

RIVALS = ("bapo", "dapo")
"""A method and the one that the paper holds against it (its figures 5 and 9)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A method against a reference: differences are method - reference."""

    method: Method
    reference: Method


def against(compared: Compared, names: Sequence[str]) -> Compared:
    """The same runs with these methods as references, the first of them for tables and figures that have one.

    Args:
        names: methods by name or label; none: the first method of all.
    Raises: ConfigError for one that is not there.
    """
    return replace(compared, references=tuple(dict.fromkeys(_named(compared, name).name for name in names)))


def contrasts(compared: Compared) -> tuple[Contrast, ...]:
    """Each method against each reference; without `--against` also BAPO against DAPO where both are there."""
    by_name = {method.name: method for method in compared.methods}
    references = [by_name[name] for name in compared.references] or [compared.reference]
    found = [Contrast(method=m, reference=r) for r in references for m in compared.methods if m.name != r.name]
    if not compared.references and compared.reference.name not in RIVALS and by_name.keys() >= set(RIVALS):
        ours, theirs = (by_name[name] for name in RIVALS)
        found.append(Contrast(method=ours, reference=theirs))
    return tuple(found)


def both_ways(compared: Compared) -> Iterator[Contrast]:
    """The contrasts, and those of the rivals the other way round as well: who needs how much for whose accuracy?"""
    seen = set()
    for one in contrasts(compared):
        ways = [one]
        if {one.method.name, one.reference.name} == set(RIVALS):
            ways.append(Contrast(method=one.reference, reference=one.method))
        for way in ways:
            names = (way.method.name, way.reference.name)
            if names not in seen:
                seen.add(names)
                yield way


def _named(compared: Compared, word: str) -> Method:
    for method in compared.methods:
        if word in (method.name, method.label):
            return method
    names = [method.name for method in compared.methods]
    known = ", ".join(names)
    raise ConfigError(f"--against {word}: no such method in these runs{did_you_mean(word, names)}; there are {known}")
