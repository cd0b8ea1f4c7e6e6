"""Differences between methods of a study at equal responses, with Holm's correction over those that are named.

    python -m benchmarks.contrasts outputs/study-controls bapo-reuse:two-passes reuse-8000:grpo-8000
    python -m benchmarks.contrasts outputs/study-controls reuse-8000:grpo-8000 --at 7680 15360 23040 30720
    python -m benchmarks.contrasts outputs/study-controls bapo-reuse:two-passes --split chain@0.3 --seeds 14 15 16

Prints a Markdown table: paired by seed and prompt, in points, with 95 % intervals over both.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from bapo.core.errors import ConfigError
from bapo.core.text import count
from studies.compare.accuracy import AtEqualResponses, at_equal_responses
from studies.compare.gather import Compared, Method, gather
from studies.compare.tables import points
from studies.significance import holm


@dataclass(frozen=True, kw_only=True)
class Contrast:
    method: str
    reference: str
    found: AtEqualResponses
    p: float
    """Corrected."""


def contrasts(
    compared: Compared,
    pairs: Sequence[tuple[str, str]],
    split: str,
    *,
    budgets: Sequence[int | None] = (None,),
    seeds: Collection[int] = (),
) -> list[Contrast]:
    """Every pair at every budget, corrected over all of them.

    Args:
        budgets: training responses; None: the largest that both were measured at.
        seeds: only these; empty: all in common.
    Raises: ConfigError if one cannot be computed.
    """
    methods = {method.name: _only(method, seeds) for method in compared.methods}
    rows: list[tuple[str, str, AtEqualResponses]] = []
    for budget in budgets:
        for name, reference in pairs:
            found = at_equal_responses(methods[name], methods[reference], split, budget)
            if isinstance(found, str):
                raise ConfigError(f"{name} - {reference}: {found}")
            rows.append((name, reference, found))
    corrected = holm([found.difference.p for _, _, found in rows])
    return [
        Contrast(method=name, reference=reference, found=found, p=p)
        for (name, reference, found), p in zip(rows, corrected, strict=True)
    ]


def _only(method: Method, seeds: Collection[int]) -> Method:
    return replace(method, runs=tuple(run for run in method.runs if not seeds or run.seed in seeds))


def markdown(found: Sequence[Contrast]) -> Iterator[str]:
    yield "| contrast | responses | seeds | accuracy, % | difference | p |"
    yield "|---|---|---|---|---|---|"
    for one in found:
        accuracies = f"{100 * one.found.method:.1f} : {100 * one.found.reference:.1f}"
        yield (
            f"| {one.method} - {one.reference} | {count(one.found.budget)} | {len(one.found.seeds)} | {accuracies} | "
            f"{points(one.found.difference)} | {one.p:.2g} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="directory of the study")
    parser.add_argument("pairs", nargs="+", metavar="METHOD:REFERENCE")
    parser.add_argument("--split", default="chain", help="held-out split (default: %(default)s)")
    parser.add_argument("--at", nargs="+", type=int, default=[None], help="training responses (default: the most)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="only these")
    args = parser.parse_args()
    pairs = [(method, reference) for method, _, reference in (pair.partition(":") for pair in args.pairs)]
    found = contrasts(gather([args.study]), pairs, args.split, budgets=args.at, seeds=args.seeds)
    print("\n".join(markdown(found)))


if __name__ == "__main__":
    main()
