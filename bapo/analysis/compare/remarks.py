"""What a reader must know before any number of a comparison: what makes its runs unequal, and what is not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bapo.analysis.compare.gather import Compared
from bapo.analysis.study.fairness import must_agree
from bapo.runtime.build_info import short

NOT_RECORDED = "not recorded"
MANY = 4
"""Runs of one commit. Of more, the largest group is counted and not named."""
UNEQUAL_UPDATES = 0.05
"""Share by which the optimizer updates of two methods may differ without a remark."""


def remarks(compared: Compared) -> list[str]:
    """One sentence per thing that a reader must know."""
    lines = [f"left out: {name}" for name in compared.unfinished]
    for key, values in other_differences(compared).items():
        kinds = (
            f"{value} ({', '.join(n for n in values if values[n] == value)})"
            for value in dict.fromkeys(values.values())
        )
        lines.append(f"{key} is not the same for all: {', '.join(kinds)}")
    seeds = {method.label: method.seeds for method in compared.methods}
    if len(set(seeds.values())) > 1:
        lines.append("seeds: " + "; ".join(f"{name} {' '.join(map(str, own))}" for name, own in seeds.items()))
    return [*lines, *_unequal_updates(compared), *_different_commits(compared)]


def _unequal_updates(compared: Compared) -> list[str]:
    """Equal learner steps need not be equal optimizer updates: a batch that is not full has fewer mini-batches."""
    means: dict[str, float] = {}
    for method in compared.methods:
        known = [run.num_updates for run in method.runs if run.num_updates is not None]
        if known:
            means[method.label] = sum(known) / len(known)
    if not means or max(means.values()) <= (1 + UNEQUAL_UPDATES) * min(means.values()):
        return []
    numbers = "; ".join(f"{name} {mean:.0f}" for name, mean in means.items())
    return [f"optimizer updates differ by more than {UNEQUAL_UPDATES:.0%}, means over seeds: {numbers}"]


def _different_commits(compared: Compared) -> list[str]:
    """Which runs were made by which code, if not all by the same."""
    by_code: dict[str, list[str]] = {}
    for method in compared.methods:
        for run in method.runs:
            by_code.setdefault(code_of(run.directory.read_run()), []).append(run.name)
    if len(by_code) < 2:
        return []
    most = max(by_code.values(), key=len)
    groups = (
        f"{code} ({f'the other {len(names)}' if names is most and len(names) > MANY else ', '.join(names)})"
        for code, names in by_code.items()
    )
    return [f"made by different commits: {'; '.join(groups)}"]


def code_of(fields: Mapping[str, Any]) -> str:
    """What run.json says of the code that made a run, in words."""
    if "commit" not in fields:
        return NOT_RECORDED
    starts = [*fields.get("earlier_commits", []), fields["commit"]]
    if starts == [None]:
        return f"version {fields.get('versions', {}).get('bapo', 'unknown')}"
    return " then ".join(NOT_RECORDED if one is None else short(one) for one in starts)


def other_differences(compared: Compared) -> dict[str, dict[str, str]]:
    """Setting -> method -> value, for each setting that must agree in a study and does not between these runs."""
    values = {method.name: must_agree(method.config) for method in compared.methods}
    keys = dict.fromkeys(key for settings in values.values() for key in settings)
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        row = {name: str(settings[key][0]) if key in settings else "not set" for name, settings in values.items()}
        if len(set(row.values())) > 1:
            found[key] = row
    return found
