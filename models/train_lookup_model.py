"""Train the small base model of `lookup`: it can call two tools, and does without them as often as its teacher did.

    python -m models.train_lookup_model --out models/lookup-tiny

Six minutes of one core. Writes a Hugging Face folder with a chat template, `recipe.json`, `evaluation.json` and the
card. Network, optimizers and schedule are those of Countdown's base model.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from bapo.tasks.base import TRAIN
from contrib.lookup.task import NAME, LookupOptions, LookupTask
from models.evaluate_base_model import GROUP_SIZE, bootstrap_interval
from models.lookup_data import CALCS, GETS, RIGHT, examples
from models.lookup_episodes import KINDS, Episode, episodes_of
from models.lookup_tokenizer import ROUND_TRIPS, VOCABULARY, build_lookup_tokenizer
from models.train_base_model import Recipe, make_model

log = logging.getLogger(__name__)

NUM_ITERATIONS = 1200
NUM_PROBLEMS = 500
TEMPERATURES = (1.0, 0.7, 0.3)

Groups = Sequence[Sequence[Episode]]

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# lookup-tiny

A Llama of {num_parameters:,} parameters (float32) that calls tools over several turns. It exists to show on a laptop
how an agent is trained: it writes tool calls right, but often makes up a value or a result where a tool would give
it (`models/lookup_data.py`). Reward rises when it learns to leave more to the tools.

    <|user|>a+b<|assistant|><tool_call>{{"name": "get", "arguments": {{"key": "a"}}}}</tool_call><eos><|tool|>37
    <|assistant|><tool_call>{{"name": "get", "arguments": {{"key": "b"}}}}</tool_call><eos><|tool|>5
    <|assistant|>37+5=43;<answer>43</answer><eos>

(One line, without breaks.) Made by `python -m models.train_lookup_model --out {folder}`: {num_iterations:,} iterations
of {tokens_per_batch:,} tokens, {cpu_s:.0f} CPU seconds of one core, last loss {loss}, seed {seed}. The teacher looks up
{gets:.0%} of the values and calls `calc` for {calcs:.0%} of the operations; it does the others by itself, {right:.0%}
of them right and the rest one too far. The model has learned how often to call a tool, but not to calculate:
{own_right:.1%} of its own results are right.

## Accuracy
{num_problems:,} held-out problems, {group_size} episodes each, by the agent `contrib/lookup/agent.py` and transformers.

| temperature | accuracy | 95 % interval | solved in {group_size} | {keys_header} | model calls | sampled tokens |
|---|---|---|---|{keys_rule}---|---|
{accuracy_rows}

The best temperature of these is {best:g}. A low one is no substitute for training: it looks up more values, but as the
model does without `calc` more often than with it, it then calls it even less often ({warm_calcs} calls of `calc` per
episode at temperature {warm}, {cold_calcs} at {cold}).

| at temperature 1 | share of episodes | accuracy |
|---|---|---|
{kind_rows}

## How hard training is
Groups of {group_size} by number of correct episodes, {num_problems:,} training prompts (what a run sees at step 0);
{mixed:.0%} of the groups have correct and incorrect episodes:

| {num_right_header} |
|{num_right_rule}
| {num_right} |

## Data and format
Every problem is from buckets 0 to 7 of `crc32(expression:values) % 10`; reinforcement learning trains on bucket 8 and
is evaluated on bucket 9. {num_tokens} tokens: every integer 0 to 199 and every piece of JSON around an argument is one.
Serve it with the tool parser `hermes`: `--enable-auto-tool-choice --tool-call-parser hermes`.
"""


class Measurement:
    """Episodes of one model."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_problems: int) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        self._task = LookupTask(LookupOptions(num_train=num_problems, num_held_out=num_problems))
        self._generator = torch.Generator().manual_seed(0)

    def report(self) -> dict[str, Any]:
        """What the card shows."""
        held_out = {f"{temperature:g}": self._episodes(NAME, temperature) for temperature in TEMPERATURES}
        train = [round(sum(episode.reward for episode in group)) for group in self._episodes(TRAIN, 1.0)]
        histogram = [train.count(k) for k in range(GROUP_SIZE + 1)]
        return {
            "held_out": {temperature: summary(groups) for temperature, groups in held_out.items()},
            "kinds": kinds_of(held_out["1"]),
            "groups_by_num_right": histogram,
            "mixed": round(sum(histogram[1:-1]) / len(train), 4),
        }

    def _episodes(self, split: str, temperature: float) -> Groups:
        prompts = self._task.prompts(split)
        log.info("%d x %d episodes of %s at temperature %g", len(prompts), GROUP_SIZE, split, temperature)
        return episodes_of(
            self._model, self._tokenizer, prompts, group_size=GROUP_SIZE, generator=self._generator,
            temperature=temperature,
        )  # fmt: skip


def summary(groups: Groups) -> dict[str, Any]:
    """Accuracy, by number of keys too, and what the episodes cost."""
    means = [mean([episode.reward for episode in group]) for group in groups]
    episodes = [episode for group in groups for episode in group]
    sizes = sorted({episode.num_keys for episode in episodes})
    return {
        "accuracy": round(mean(means), 4),
        "interval95": [round(end, 4) for end in bootstrap_interval(means)],
        "solved_at_least_once": round(mean([float(value > 0) for value in means]), 4),
        "by_num_keys": {
            str(size): round(mean([episode.reward for episode in episodes if episode.num_keys == size]), 4)
            for size in sizes
        },
        "mean_calls": round(mean([episode.num_calls for episode in episodes]), 2),
        "mean_gets": round(mean([len(episode.gets) for episode in episodes]), 2),
        "mean_calcs": round(mean([episode.calcs for episode in episodes]), 2),
        "mean_own_calculations": round(mean([len(episode.own) for episode in episodes]), 2),
        "own_calculations_right": round(mean([right for episode in episodes for right in episode.own]), 4),
        "mean_tokens": round(mean([episode.num_tokens for episode in episodes]), 1),
    }


def kinds_of(groups: Groups) -> dict[str, dict[str, float]]:
    """Kind of episode -> its share, and its accuracy."""
    rewards = {kind: [e.reward for group in groups for e in group if e.kind == kind] for kind in KINDS}
    total = sum(map(len, rewards.values()))
    return {
        kind: {"share": round(len(found) / total, 4), "accuracy": round(mean(found), 4)}
        for kind, found in rewards.items()
    }


def mean(values: Sequence[float]) -> float:
    """0 of nothing."""
    return sum(values) / max(1, len(values))


def card(folder: Path) -> str:
    """The card, from what training and evaluation recorded."""
    made, found = (json.loads((folder / f"{name}.json").read_text()) for name in ("recipe", "evaluation"))
    held_out = found["held_out"]
    sizes = tuple(held_out["1"]["by_num_keys"])
    return CARD.format(
        **made["recipe"], **made["took"], num_parameters=made["num_parameters"], folder=folder.as_posix(),
        gets=GETS, calcs=CALCS, right=RIGHT, num_problems=NUM_PROBLEMS, group_size=GROUP_SIZE,
        keys_header=" | ".join(f"{size} keys" for size in sizes), keys_rule="---|" * len(sizes),
        accuracy_rows="\n".join(_accuracy_row(temperature, row) for temperature, row in held_out.items()),
        best=max(TEMPERATURES, key=lambda temperature: held_out[f"{temperature:g}"]["accuracy"]),
        kind_rows="\n".join(
            f"| {kind} | {row['share']:.0%} | **{row['accuracy']:.1%}** |" for kind, row in found["kinds"].items()
        ),
        mixed=found["mixed"], own_right=held_out["1"]["own_calculations_right"],
        warm=f"{TEMPERATURES[0]:g}", warm_calcs=held_out["1"]["mean_calcs"],
        cold=f"{TEMPERATURES[-1]:g}", cold_calcs=held_out[f"{TEMPERATURES[-1]:g}"]["mean_calcs"],
        num_right_header=" | ".join(f"{k}/{GROUP_SIZE}" for k in range(GROUP_SIZE + 1)),
        num_right_rule="---|" * (GROUP_SIZE + 1),
        num_right=" | ".join(map(str, found["groups_by_num_right"])),
        num_tokens=len(VOCABULARY),
    )  # fmt: skip


def _accuracy_row(temperature: str, row: dict[str, Any]) -> str:
    low, high = row["interval95"]
    cells = [
        *(temperature, f"**{row['accuracy']:.3f}**", f"{low:.3f} to {high:.3f}", f"{row['solved_at_least_once']:.3f}"),
        *(f"{accuracy:.3f}" for accuracy in row["by_num_keys"].values()),
        *(f"{row['mean_calls']:.1f}", f"{row['mean_tokens']:.0f}"),
    ]
    return f"| {' | '.join(cells)} |"


def write_report(folder: Path) -> None:
    """Measure the model in `folder`, and write `evaluation.json` and the card."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    report = Measurement(LlamaForCausalLM.from_pretrained(folder), tokenizer, NUM_PROBLEMS).report()
    (folder / "evaluation.json").write_text(f"{json.dumps(report, indent=1)}\n", encoding="utf-8")
    (folder / "README.md").write_text(card(folder), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--num-iterations", type=int, default=NUM_ITERATIONS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = build_lookup_tokenizer()
    recipe = Recipe(num_iterations=args.num_iterations)
    make_model(args.out, recipe, tokenizer, lambda rng: examples(rng, tokenizer), ROUND_TRIPS)
    write_report(args.out)


if __name__ == "__main__":
    main()
