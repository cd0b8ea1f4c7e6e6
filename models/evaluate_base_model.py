"""Measure a base model on the held-out problems, and how hard the training problems are for it.

    python -m models.evaluate_base_model models/countdown-tiny

writes `evaluation.json` and the card (README.md) into the model's folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from bapo.tasks.countdown import CountdownOptions, CountdownTask
from models import card
from models.sampler import GradedResponse, sample_groups

log = logging.getLogger(__name__)

GROUP_SIZE = 8
NUM_RESAMPLES = 2000
"""Bootstrap resamples: the ends of a 95 % interval then vary by about 0.001."""

_SHOWN = ("accuracy", "interval95", "truncated")

Groups = Sequence[Sequence[GradedResponse]]


def evaluate(
    model: LlamaForCausalLM, tokenizer: Any, *, max_new_tokens: int, num_problems: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Accuracy at temperature 1 on CD-3, CD-34 and CD-4, greedy accuracy, lengths, and training-group accuracies."""
    options = CountdownOptions(num_held_out=num_problems, num_train=num_problems, held_out=("cd3", "cd34", "cd4"))
    task = CountdownTask(options)
    report: dict[str, Any] = {
        "temperature": 1.0,
        "group_size": GROUP_SIZE,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "held_out": {},
    }
    generator = torch.Generator().manual_seed(seed)
    model.eval()

    def sample(split: str, group_size: int, temperature: float = 1.0) -> Groups:
        started = time.monotonic()
        groups = sample_groups(
            model,
            tokenizer,
            task,
            task.prompts(split),
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            generator=generator,
            temperature=temperature,
        )
        log.info("%s: %d x %d responses in %.1f s", split, len(groups), group_size, time.monotonic() - started)
        return groups

    for split in task.held_out_splits:
        greedy = summary(sample(split, 1, temperature=0.0))["accuracy"]
        report["held_out"][split] = summary(sample(split, GROUP_SIZE)) | {"greedy_accuracy": greedy}
    report["train"] = train_report(task, sample("train", GROUP_SIZE))
    return report


def summary(groups: Groups) -> dict[str, Any]:
    """Mean reward over all responses, its 95 % bootstrap interval over problems, and what the responses look like."""
    means = [sum(response.reward for response in group) / len(group) for group in groups]
    responses = [response for group in groups for response in group]
    lengths = sorted(response.num_tokens for response in responses)
    return {
        "num_problems": len(groups),
        "accuracy": round(sum(means) / len(means), 4),
        "interval95": [round(end, 4) for end in bootstrap_interval(means)],
        "solved_at_least_once": round(sum(mean > 0 for mean in means) / len(means), 4),
        "truncated": round(sum(response.truncated for response in responses) / len(responses), 4),
        "mean_tokens": round(sum(lengths) / len(lengths), 1),
        "tokens_p95": lengths[int(0.95 * (len(lengths) - 1))],
    }


def train_report(task: CountdownTask, groups: Groups) -> dict[str, Any]:
    """How many training groups of 8 have 0..8 right responses, for all and by count of numbers."""
    prompts = task.prompts("train")
    histograms: Mapping[str, Counter[int]] = {"all": Counter(), "cd3": Counter(), "cd4": Counter()}
    for prompt, group in zip(prompts, groups, strict=True):
        num_right = round(sum(response.reward for response in group))
        histograms["all"][num_right] += 1
        histograms[f"cd{len(prompt.answer['numbers'])}"][num_right] += 1
    return {
        "num_prompts": len(prompts),
        "groups_by_num_right": {name: [h[k] for k in range(GROUP_SIZE + 1)] for name, h in histograms.items()},
    }


def bootstrap_interval(means: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the mean over resampled problems: the responses to one problem are not independent."""
    rng = random.Random(seed)
    size = len(means)
    resampled = sorted(sum(rng.choices(means, k=size)) / size for _ in range(NUM_RESAMPLES))
    return resampled[int(0.025 * NUM_RESAMPLES)], resampled[int(0.975 * NUM_RESAMPLES) - 1]


def write_report(folder: Path, *, max_new_tokens: int = 64, num_problems: int = 1000, seed: int = 0) -> None:
    """Evaluate the model in `folder`, and write `evaluation.json` and the card (README.md) beside it."""
    report = evaluate(
        LlamaForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        max_new_tokens=max_new_tokens,
        num_problems=num_problems,
        seed=seed,
    )
    (folder / "evaluation.json").write_text(f"{json.dumps(report, indent=1)}\n", encoding="utf-8")
    (folder / "README.md").write_text(card.render(folder), encoding="utf-8")
    for split, row in report["held_out"].items():
        log.info("%s accuracy=%.3f interval95=%s truncated=%.3f", split, *map(row.get, _SHOWN))
    log.info("training groups by number right: %s", report["train"]["groups_by_num_right"]["all"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model; the report is written into it")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-problems", type=int, default=1000, help="per held-out split, and training prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    write_report(args.model, max_new_tokens=args.max_new_tokens, num_problems=args.num_problems, seed=args.seed)


if __name__ == "__main__":
    main()
