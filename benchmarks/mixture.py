"""What docs/studies/mixture.md asks of the records: the two contrasts with their correction, and prices.

    python -m benchmarks.mixture outputs/study-mixture

The price of an informative group is all responses of its kind of request by the informative groups among them, or by
those of hard prompts among them.
"""

from __future__ import annotations

import argparse

from bapo.core.types import Purpose
from bapo.tasks.base import TRAIN
from bapo.tasks.registry import task_of
from benchmarks.contrasts import at_budgets, markdown, pair_of
from studies.compare.gather import Measured, gather

SPLIT, METHOD, REFERENCES = "chain", "reuse-x2", ("reuse-random", "bapo-reuse")


def price_line(run: Measured) -> str:
    """Responses per informative group, of any prompt and of hard ones, fresh and re-evaluated."""
    if not run.has_groups:
        return f"{run.name}: no group records, so no prices"
    task = task_of(run.config)
    steps = {prompt.prompt_id: task.level(prompt) or 0 for prompt in task.prompts(TRAIN)}
    fewest = run.config.task.options["min_steps"]
    parts = []
    for purpose in (Purpose.FRESH, Purpose.REEVALUATE):
        groups = [result for _, results in run.sampled for result in results if result.purpose is purpose]
        responses = sum(len(result.rewards) for result in groups)
        informative = [result for result in groups if len(set(result.rewards)) > 1]
        hard = sum(steps[result.prompt_id] >= fewest for result in informative)
        if informative and hard:
            parts.append(f"{purpose.value} {responses / len(informative):.1f}, hard {responses / hard:.1f}")
    return f"{run.name}: {'; '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    compared = gather([parser.parse_args().study])
    pairs = [pair_of(compared, METHOD, name) for name in REFERENCES]
    print("\n".join(markdown(at_budgets(pairs, SPLIT))))
    for method in compared.methods:
        for run in method.runs:
            print(price_line(run))


if __name__ == "__main__":
    main()
