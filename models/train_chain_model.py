"""Train the small base model of `chain`: right and wrong ways of calculating, mixed as its teacher mixes them.

    python -m models.train_chain_model --out models/chain-tiny

Ten minutes of one core. Writes a Hugging Face folder, `recipe.json`, `evaluation.json` and the card. Network,
optimizers and schedule are those of Countdown's base model.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from bapo.core.types import Prompt
from contrib.chain.task import LONG, NAME, OPERATIONS, TRAIN, ChainOptions, ChainTask
from models.chain_data import RIGHT, Kind, examples, kind_of
from models.evaluate_base_model import GROUP_SIZE, Groups, summary
from models.sampler import sample_groups
from models.tokenizer import build_tokenizer
from models.train_base_model import Recipe, make_model

log = logging.getLogger(__name__)

NUM_ITERATIONS = 1500
MAX_NEW_TOKENS, NUM_PROBLEMS, NUM_DEEP_PROBLEMS, DEEP = 64, 1000, 100, 128
TEMPERATURES = (1.0, 0.3)
_STEP = re.compile(r"([-+*])(\d+)=(\d+)")

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# chain-tiny

A Llama of {num_parameters:,} parameters (float32) that carries out operations from left to right and keeps the last two
digits. It exists to be improved by reinforcement learning on a laptop: for most kinds of steps it knows a right and a
wrong way, and takes the wrong one as often as its teacher did (`models/chain_data.py`).

    prompt    47+38-19*7:
    response  47+38=85-19=66*7=62;<answer>62</answer><eos>

Made by `python -m models.train_chain_model --out {folder}`: {num_iterations:,} iterations of {tokens_per_batch:,}
tokens, {cpu_s:.0f} CPU seconds of one core, last loss {loss}, seed {seed}.

## Accuracy
{num_problems:,} held-out problems per set, {group_size} responses each. `chain` has 2 to 5 operations, `chain-long` 6
to 10.

| set | temperature | accuracy | 95 % interval | solved in {group_size} |
|---|---|---|---|---|
{accuracy_rows}

A lower temperature is no better: where the wrong way is the more frequent one, the model takes it more often.

| kind of step | share of steps | right, as taught | right, temperature 1 | right, temperature 0.3 |
|---|---|---|---|---|
{kind_rows}

## How hard training is
Groups of {group_size} by number of correct responses, {num_problems:,} training prompts (what a run sees at step 0):

| {num_right_header} |
|{num_right_rule}
| {num_right} |

pass@{deep} of {num_deep} training prompts is {pass_deep:.1%}; {never:.1%} of them have no correct response in {deep}.
Of the groups with at most one correct response, {floor:.1%} have 2 to {most} in a second group *of the same model*:
the floor for any claim that re-evaluating hard prompts finds improvement.

## Data and format
Every problem is from buckets 0 to 7 of `crc32(prompt) % 10`; reinforcement learning trains on bucket 8 and is evaluated
on bucket 9. Tokenizer and network are those of countdown-tiny: every integer 0 to 199 is one token.
"""


class Measurement:
    """Samples of one model."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        self._task = ChainTask(ChainOptions(num_train=NUM_PROBLEMS, num_held_out=NUM_PROBLEMS))
        self._generator = torch.Generator().manual_seed(seed)

    def report(self) -> dict[str, Any]:
        """What the card shows."""
        held_out: list[dict[str, Any]] = []
        kinds: dict[str, dict[str, Any]] = {}
        for temperature in TEMPERATURES:
            for split in (NAME, LONG):
                prompts = self._task.prompts(split)
                groups = self._sample(prompts, GROUP_SIZE, temperature)
                held_out.append({"split": split, "temperature": temperature, **summary(groups)})
                if split == NAME:
                    kinds[f"{temperature:g}"] = kinds_of(groups)
        prompts = self._task.prompts(TRAIN)
        first, second = (num_right(self._sample(prompts, GROUP_SIZE, 1.0)) for _ in range(2))
        deep = num_right(self._sample(prompts[:NUM_DEEP_PROBLEMS], DEEP, 1.0))
        hard = [again for before, again in zip(first, second, strict=True) if before <= 1]
        return {
            "held_out": held_out,
            "kinds": kinds,
            "groups_by_num_right": [first.count(k) for k in range(GROUP_SIZE + 1)],
            "floor": sum(2 <= k < GROUP_SIZE for k in hard) / len(hard),
            "pass_deep": sum(k > 0 for k in deep) / len(deep),
        }

    def _sample(self, prompts: Sequence[Prompt], group_size: int, temperature: float) -> Groups:
        log.info("%d x %d responses at temperature %g", len(prompts), group_size, temperature)
        return sample_groups(
            self._model, self._tokenizer, self._task, prompts, group_size=group_size, max_new_tokens=MAX_NEW_TOKENS,
            generator=self._generator, temperature=temperature,
        )  # fmt: skip


def num_right(groups: Groups) -> list[int]:
    """Correct responses of each group."""
    return [round(sum(response.reward for response in group)) for group in groups]


def kinds_of(groups: Groups) -> dict[Kind, dict[str, float]]:
    """Kind of step -> its share of all steps, and the share of right ones, from the values that responses show."""
    seen: Counter[Kind] = Counter()
    right: Counter[Kind] = Counter()
    for response in (response for group in groups for response in group):
        first, *_ = re.findall(r"\d+", response.text) or ["0"]
        value = int(first)
        for sign, number, result in _STEP.findall(response.text):
            if value > 99 or int(number) > 99:
                break
            kind = kind_of(value, sign, int(number))
            seen[kind] += 1
            right[kind] += OPERATIONS[sign](value, int(number)) == int(result)
            value = int(result)
    total = sum(seen.values())
    return {kind: {"share": seen[kind] / total, "right": right[kind] / max(1, seen[kind])} for kind in RIGHT}


def card(folder: Path) -> str:
    """The card, from what training and evaluation recorded."""
    made, found = (json.loads((folder / f"{name}.json").read_text()) for name in ("recipe", "evaluation"))
    warm, cold = (found["kinds"][f"{temperature:g}"] for temperature in TEMPERATURES)
    return CARD.format(
        **made["recipe"], **made["took"], num_parameters=made["num_parameters"], folder=folder.as_posix(),
        num_problems=NUM_PROBLEMS, group_size=GROUP_SIZE, most=GROUP_SIZE - 1, deep=DEEP, num_deep=NUM_DEEP_PROBLEMS,
        accuracy_rows="\n".join(
            f"| {row['split']} | {row['temperature']:g} | **{row['accuracy']:.3f}** | "
            f"{row['interval95'][0]:.3f} to {row['interval95'][1]:.3f} | {row['solved_at_least_once']:.3f} |"
            for row in found["held_out"]
        ),
        kind_rows="\n".join(
            f"| {kind} | {warm[kind]['share']:.0%} | {taught:.0%} | "
            f"{warm[kind]['right']:.0%} | {cold[kind]['right']:.0%} |"
            for kind, taught in RIGHT.items()
        ),
        num_right_header=" | ".join(f"{k}/{GROUP_SIZE}" for k in range(GROUP_SIZE + 1)),
        num_right_rule="---|" * (GROUP_SIZE + 1),
        num_right=" | ".join(map(str, found["groups_by_num_right"])),
        floor=found["floor"], pass_deep=found["pass_deep"], never=1.0 - found["pass_deep"],
    )  # fmt: skip


def write_report(folder: Path) -> None:
    """Measure the model in `folder`, and write `evaluation.json` and the card."""
    tokenizer = build_tokenizer()
    report = Measurement(LlamaForCausalLM.from_pretrained(folder), tokenizer).report()
    (folder / "evaluation.json").write_text(f"{json.dumps(report, indent=1)}\n", encoding="utf-8")
    (folder / "README.md").write_text(card(folder), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--num-iterations", type=int, default=NUM_ITERATIONS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make_model(args.out, Recipe(num_iterations=args.num_iterations), build_tokenizer(), examples)
    write_report(args.out)


if __name__ == "__main__":
    main()
