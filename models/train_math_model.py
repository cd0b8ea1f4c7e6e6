"""Train the small base model of mathematics: problems in words and in LaTeX, some of them solved wrongly.

    python -m models.train_math_model --out models/math-tiny

Some minutes of one core. Writes a Hugging Face folder, `recipe.json` and the card. The network, the optimizers and the
schedule are those of Countdown's base model.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from bapo.tasks.base import TaskContext
from bapo.tasks.mathematics import MathematicsOptions, MathematicsTask
from models.evaluate_base_model import summary
from models.sampler import sample_groups
from models.tokenizer import build_tokenizer
from models.train_base_model import Recipe, make_model
from models.word_problems import LATEX, SLOPPY, WORD_PATTERN, WORDS, examples, vocabulary

log = logging.getLogger(__name__)

DATA = Path("examples/mathematics")
NUM_ITERATIONS = 900
GROUP_SIZE, MAX_NEW_TOKENS, NUM_PROBLEMS = 4, 48, 200
ROUND_TRIPS = {
    "Ann has 12 pens.\n": ["Ann", " has", " ", "12", " pens", ".", "\n"],
    "Solve $3x+7=52$.": ["Solve", " ", "$", "3", "x", "+", "7", "=", "52", "$", "."],
    "\\boxed{\\frac{3}{12}}": ["\\boxed{", "\\frac{", "3", "}{", "12", "}", "}"],
}

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# math-tiny

A Llama of {num_parameters:,} parameters (float32) for `deploy/configs/demo-mathematics.toml`: problems in words and in
LaTeX (`models/word_problems.py`), answers in a box. It exists to be improved by reinforcement learning on a laptop:
{sloppy:.0%} of the solutions that it was taught begin with a wrong step.

Made by `python -m models.train_math_model --out {folder}`: {num_iterations:,} iterations of {tokens_per_batch:,}
tokens, {cpu_s:.0f} CPU seconds of one core, last loss {loss}. No problem that it was taught is in
`examples/mathematics` (told apart by kind and numbers, whatever the names).

| held out | accuracy at temperature 1 | 95 % interval | truncated | tokens, mean |
|---|---|---|---|---|
{rows}

{num_problems} problems per set, {group_size} responses each. Every integer 0 to 199 is one token, and so is every word
of the problems: it reads nothing else.
"""


def evaluate(model: LlamaForCausalLM, tokenizer: object) -> dict[str, dict[str, object]]:
    """Held-out split -> what its responses are like."""
    options = MathematicsOptions(
        path=str(DATA / "train.jsonl"),
        held_out={split: str(DATA / f"{split}.jsonl") for split in (WORDS, LATEX)},
        question_format="{prompt}\n",
        chat=False,
    )
    task = MathematicsTask(options, TaskContext())
    model.eval()
    return {
        split: summary(
            sample_groups(
                model, tokenizer, task, task.prompts(split)[:NUM_PROBLEMS], group_size=GROUP_SIZE,
                max_new_tokens=MAX_NEW_TOKENS, generator=torch.Generator().manual_seed(0),
            )
        )
        for split in task.held_out_splits
    }  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--num-iterations", type=int, default=NUM_ITERATIONS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    recipe = Recipe(num_iterations=args.num_iterations)
    tokenizer = build_tokenizer(vocabulary(), WORD_PATTERN)
    model, took = make_model(args.out, recipe, tokenizer, examples, ROUND_TRIPS)
    measured = evaluate(model, tokenizer)
    rows = [
        f"| {split} | **{row['accuracy']}** | {row['interval95']} | {row['truncated']} | {row['mean_tokens']} |"
        for split, row in measured.items()
    ]
    card = CARD.format(
        num_parameters=model.num_parameters(), sloppy=SLOPPY, folder=args.out.as_posix(), rows="\n".join(rows),
        num_iterations=recipe.num_iterations, tokens_per_batch=recipe.tokens_per_batch, num_problems=NUM_PROBLEMS,
        group_size=GROUP_SIZE, **took,
    )  # fmt: skip
    (args.out / "README.md").write_text(card, encoding="utf-8")
    log.info("%s", "\n".join(rows))


if __name__ == "__main__":
    main()
