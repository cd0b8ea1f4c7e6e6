"""Measure the geometry model on held-out drawings, with its eyes open and shut, and how hard training is for it.

    python -m models.evaluate_geometry_model models/geometry-tiny

writes `evaluation.json` and the card (README.md) into the model's folder. A model that does not look does no better
on its own picture than on a blank one, or on that of another problem of the same kind.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, Qwen2_5_VLForConditionalGeneration

from bapo.core.types import Prompt
from contrib.geometry.task import BLANK, KINDS, NAME, SWAPPED, GeometryOptions, GeometryTask
from models import geometry_card
from models.evaluate_base_model import GROUP_SIZE, Groups, summary
from models.geometry_model import embed, patches_of, positions_of, prompt_ids
from models.sampler import MAX_ROWS, decode, grade

log = logging.getLogger(__name__)

CONTROLS = {"blank": BLANK, "swapped": SWAPPED}
TEMPERATURES = (1.0, 0.3)


def evaluate(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: Any, *, num_problems: int = 500, seed: int = 0
) -> dict[str, Any]:
    """Accuracy on held-out numbers by temperature, kind and pictures, and training-group accuracies."""
    options = GeometryOptions(num_held_out=num_problems, num_train=num_problems, held_out=(NAME, BLANK, SWAPPED))
    task = GeometryTask(options)
    model.eval()
    prompts = task.prompts(NAME)
    sampler = Sampler(model, tokenizer, task, seed=seed)
    report: dict[str, Any] = {"group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS, "seed": seed}
    report["num_problems"] = num_problems
    report["greedy"] = summary(sampler.groups(prompts, 1, 0.0))["accuracy"]
    for temperature in TEMPERATURES:
        groups = sampler.groups(prompts, GROUP_SIZE, temperature)
        report[f"temperature_{temperature:g}"] = _of_groups(groups)
        if temperature == 1.0:
            report["by_kind"] = _by_kind(prompts, groups)
    for name, split in CONTROLS.items():
        report[name] = _of_groups(sampler.groups(task.prompts(split), GROUP_SIZE, 1.0))
        report[name]["greedy"] = summary(sampler.groups(task.prompts(split), 1, 0.0))["accuracy"]
    report["train"] = _of_groups(sampler.groups(task.prompts("train"), GROUP_SIZE, 1.0))
    return report


MAX_NEW_TOKENS = 24
"""The longest worked answer has 18 tokens with its end."""


class Sampler:
    """Samples and grades; its random numbers go on from call to call."""

    def __init__(
        self, model: Qwen2_5_VLForConditionalGeneration, tokenizer: Any, task: GeometryTask, *, seed: int
    ) -> None:
        self._model, self._tokenizer, self._task = model, tokenizer, task
        self._generator = torch.Generator().manual_seed(seed)

    def groups(self, prompts: Sequence[Prompt], group_size: int, temperature: float) -> Groups:
        """`group_size` graded responses to each prompt, in the order of `prompts`; temperature 0 is greedy."""
        started = time.monotonic()
        shown = [_ink(self._task.image(prompt.images[0])) for prompt in prompts]
        by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            ids = prompt_ids(self._tokenizer, prompt.text)
            by_length[len(ids)] += [(index, ids)] * group_size
        groups: list[list[Any]] = [[] for _ in prompts]
        for rows in by_length.values():
            for start in range(0, len(rows), MAX_ROWS):
                chunk = rows[start : start + MAX_ROWS]
                patches_RPD = patches_of(torch.from_numpy(np.stack([shown[index] for index, _ in chunk])))
                sampled = self._sample(torch.tensor([ids for _, ids in chunk]), patches_RPD, temperature)
                for (index, _), ids in zip(chunk, sampled, strict=True):
                    groups[index].append(grade(self._tokenizer, self._task, prompts[index], ids))
        took = time.monotonic() - started
        log.info("%d x %d responses in %.1f s", len(groups), group_size, took)
        return groups

    @torch.inference_mode()
    def _sample(self, ids_RT: Tensor, patches_RPD: Tensor, temperature: float) -> list[list[int]]:
        language = self._model.model.language_model
        cache = DynamicCache(config=language.config)
        num_tokens = ids_RT.shape[1]

        def logits_after(next_R: Tensor | None) -> Tensor:
            nonlocal num_tokens
            if next_R is None:
                inputs, positions = embed(self._model, ids_RT, patches_RPD)
            else:
                num_tokens += 1
                inputs = language.embed_tokens(next_R.unsqueeze(1))
                positions = positions_of(num_tokens)[:, None, -1:].expand(3, len(next_R), 1)
            hidden = language(inputs_embeds=inputs, position_ids=positions, past_key_values=cache, use_cache=True)
            return self._model.lm_head(hidden.last_hidden_state[:, -1]).float()

        eos = self._tokenizer.eos_token_id
        return decode(logits_after, cache, len(ids_RT), eos, MAX_NEW_TOKENS, self._generator, temperature)


def _ink(png: bytes) -> Any:
    """Where a drawing is black."""
    return ~np.asarray(Image.open(io.BytesIO(png)).convert("1"))


def _of_groups(groups: Groups) -> dict[str, Any]:
    histogram = Counter(round(sum(response.reward for response in group)) for group in groups)
    counts = [histogram[k] for k in range(GROUP_SIZE + 1)]
    return summary(groups) | {
        "groups_by_num_right": counts,
        "mixed": round(sum(counts[1:-1]) / len(groups), 4),
    }


def _by_kind(prompts: Sequence[Prompt], groups: Groups) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        chosen = [group for prompt, group in zip(prompts, groups, strict=True) if prompt.answer["kind"] == kind]
        row = _of_groups(chosen)
        found[kind] = {name: row[name] for name in ("num_problems", "accuracy", "solved_at_least_once", "mixed")}
    return found


def write_report(folder: Path, *, num_problems: int = 500, seed: int = 0) -> None:
    """Evaluate the model in `folder`, and write `evaluation.json` and the card (README.md) beside it."""
    report = evaluate(
        Qwen2_5_VLForConditionalGeneration.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        num_problems=num_problems,
        seed=seed,
    )
    (folder / "evaluation.json").write_text(f"{json.dumps(report, indent=1)}\n", encoding="utf-8")
    (folder / "README.md").write_text(geometry_card.render(folder), encoding="utf-8")
    for name in ("temperature_1", *CONTROLS):
        log.info("%s: accuracy=%.3f solved=%.3f", name, *map(report[name].get, ("accuracy", "solved_at_least_once")))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model; the report is written into it")
    parser.add_argument("--num-problems", type=int, default=500, help="held-out problems, and training prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    write_report(args.model, num_problems=args.num_problems, seed=args.seed)


if __name__ == "__main__":
    main()
