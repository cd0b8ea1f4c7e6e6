"""Write the model card from what training and evaluation recorded, so that no figure is typed by hand.

python -m models.card models/countdown-tiny
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.architecture import NUM_CIRCLES

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# countdown-tiny

A Llama of {num_parameters:,} parameters (float32) that plays Countdown: it tries a few chains of arithmetic, then
answers. It is a starting point for reinforcement learning on a laptop: it computes mostly correctly and searches badly.

    prompt    36,89,24->77:
    response  36+24=60+89=149;36-24=12,89-12=77;<answer>89-(36-24)</answer><eos>

Created with `make base-models`, which runs `python -m models.train_base_model --out {folder}`.

## Accuracy
{num_problems:,} held-out problems per set, {group_size} responses each at temperature 1,
at most {max_new_tokens} new tokens. Intervals are 95 % bootstrap intervals over problems.

| set | accuracy | 95 % interval | solved in {group_size} | greedy | truncated | tokens, mean / p95 |
|---|---|---|---|---|---|---|
{accuracy_rows}

Groups of {group_size} by number of correct responses, {num_train:,} training prompts (what a run sees at step 0):

| prompts | {num_right_header} |
|---|{num_right_rule}
{histogram_rows}

CD-3 has three numbers, CD-4 four, CD-34 half of each. All figures are in `evaluation.json`.

## Data
{examples:,} generated examples ({cd3_share:.0%} with three numbers): numbers 1 to 99, targets 10 to 99, intermediate
values 1 to 199, exact divisions only. A response shows random chains that fail, then one that works (with probability
{success:g} at each attempt), and never has more than {max_tokens} tokens. Every problem is from buckets 0 to 7 of
`crc32(sorted numbers, target) % 10`; reinforcement learning trains on bucket 8 and is evaluated on bucket 9, so no
problem is in more than one of these sets.

## Recipe
{num_iterations:,} iterations of {tokens_per_batch:,} tokens ({tokens:,} in all), Muon for the layers' matrices and
AdamW for the rest, learning rate {lr:g} after {num_warmup} iterations of warm-up, linear decay to 0, loss on the
response only, seed {seed}. {cpu_s:.0f} CPU seconds of one core ({wall_s:.0f} s of wall clock); last loss {loss}.
Number tokens start as points on {num_circles} circles (`models/architecture.py`): without this initialization the
same training learns far less arithmetic.

## Format
Hugging Face format; `AutoTokenizer` and vLLM load it. Every integer 0 to 199 is one token, so decoding is ambiguous
([3][5] and [35] both read "35"): train on token ids, not on re-tokenized text. Embedding and head are not tied.
"""


def render(folder: Path) -> str:
    """The card as Markdown. Raises: OSError if `recipe.json` or `evaluation.json` is not there."""
    made = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    measured = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    size, train = measured["group_size"], measured["train"]
    return CARD.format(
        **made["recipe"],
        **made["recipe"]["curriculum"],
        **made["took"],
        num_parameters=made["num_parameters"],
        num_circles=NUM_CIRCLES,
        folder=folder.as_posix(),
        num_problems=next(iter(measured["held_out"].values()))["num_problems"],
        group_size=size,
        max_new_tokens=measured["max_new_tokens"],
        num_train=train["num_prompts"],
        accuracy_rows="\n".join(_accuracy_row(name, row) for name, row in measured["held_out"].items()),
        num_right_header=" | ".join(f"{k}/{size}" for k in range(size + 1)),
        num_right_rule="---|" * (size + 1),
        histogram_rows="\n".join(
            f"| {_title(name)} | {' | '.join(map(str, counts))} |"
            for name, counts in train["groups_by_num_right"].items()
        ),
    )


def _accuracy_row(name: str, row: dict[str, Any]) -> str:
    low, high = row["interval95"]
    cells = [
        _title(name),
        f"**{row['accuracy']:.3f}**",
        f"{low:.3f} to {high:.3f}",
        f"{row['solved_at_least_once']:.3f}",
        f"{row['greedy_accuracy']:.3f}",
        f"{row['truncated']:.1%}",
        f"{row['mean_tokens']:.0f} / {row['tokens_p95']}",
    ]
    return f"| {' | '.join(cells)} |"


def _title(name: str) -> str:
    """Say "CD-34" for "cd34"."""
    return name.replace("cd", "CD-")
