"""Differences between methods of a study at equal responses, with Holm's correction over those that are named.

    python -m benchmarks.contrasts outputs/study-controls bapo-reuse:two-passes reuse-8000:grpo-8000
    python -m benchmarks.contrasts outputs/study-controls reuse-8000:grpo-8000 --at 7680 15360 23040 30720
    python -m benchmarks.contrasts outputs/study-controls bapo-reuse:two-passes --split chain@0.3 --seeds 14 15 16

Prints a Markdown table: paired by seed and prompt, in points, with 95 % intervals over both.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from bapo.core.errors import ConfigError
from bapo.core.text import count
from studies.compare.accuracy import AtEqualResponses, at_equal_responses
from studies.compare.gather import Compared, Contrast, Method, gather, method_named
from studies.compare.tables import corrected, points

Row = tuple[Contrast, AtEqualResponses, str]
"""Its last part: p by Holm's correction over all rows."""


def at_budgets(pairs: Sequence[Contrast], split: str, budgets: Sequence[int | None] = (None,)) -> list[Row]:
    """Every pair at every budget.

    Args:
        budgets: training responses; None: the largest that both were measured at.
    Raises: ConfigError if one cannot be computed.
    """
    rows: list[tuple[Contrast, AtEqualResponses]] = []
    for budget in budgets:
        for pair in pairs:
            found = at_equal_responses(pair.method, pair.reference, split, budget)
            if isinstance(found, str):
                raise ConfigError(f"{pair.method.name} - {pair.reference.name}: {found}")
            rows.append((pair, found))
    p_values = corrected([found.difference for _, found in rows])
    return [(*row, p) for row, p in zip(rows, p_values, strict=True)]


def pair_of(compared: Compared, method: str, reference: str, seeds: Collection[int] = ()) -> Contrast:
    """Two methods by name, of these seeds or of all. Raises: ConfigError for one that is not there."""
    ours, theirs = (method_named(compared, name) for name in (method, reference))
    return Contrast(method=_only(ours, seeds), reference=_only(theirs, seeds))


def _only(method: Method, seeds: Collection[int]) -> Method:
    return replace(method, runs=tuple(run for run in method.runs if not seeds or run.seed in seeds))


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    yield "| contrast | responses | seeds | accuracy, % | difference | p |"
    yield "|---|---|---|---|---|---|"
    for pair, found, p in rows:
        yield (
            f"| {pair.method.name} - {pair.reference.name} | {count(found.budget)} | {len(found.seeds)} | "
            f"{100 * found.method:.1f} : {100 * found.reference:.1f} | {points(found.difference)} | {p} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="directory of the study")
    parser.add_argument("pairs", nargs="+", metavar="METHOD:REFERENCE")
    parser.add_argument("--split", default="chain", help="held-out split (default: %(default)s)")
    parser.add_argument("--at", nargs="+", type=int, default=[None], help="training responses (default: the most)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="only these")
    args = parser.parse_args()
    compared = gather([args.study])
    pairs = [pair_of(compared, *pair.partition(":")[::2], args.seeds) for pair in args.pairs]
    print("\n".join(markdown(at_budgets(pairs, args.split, args.at))))


if __name__ == "__main__":
    main()
