"""Train the small vision-language model: it learns to read characters, then to answer in worked steps.

    python -m models.train_geometry_model --out models/geometry-tiny

Some minutes of one core. Writes a Hugging Face folder (config, generation config, safetensors, tokenizer,
preprocessor), `recipe.json`, `evaluation.json` and the card.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from models.evaluate_geometry_model import write_report
from models.geometry_data import IGNORE, NO_LABEL, NOTHING, batches, exercises
from models.geometry_model import build_model, build_tokenizer, embed, save, see

log = logging.getLogger(__name__)

WEIGHT_OF_NOTHING = 0.3
"""Of an empty patch or place in the loss of the exercises: most are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All settings that determine the model."""

    num_reading_iterations: int = 700
    """Of exercises, for the vision tower alone."""
    num_iterations: int = 1000
    """Of examples, for the whole model."""
    reading_rows: int = 64
    """Pictures per iteration of the exercises, and of the examples."""
    answering_rows: int = 32
    lr: float = 3e-3
    """Highest learning rate of both parts and of both optimizers."""
    num_warmup: int = 50
    """Iterations of linear warm-up of either part; after it, linear decay to 0."""
    seed: int = 0


class Optimizers:
    """Muon for the matrices of the layers, AdamW for embeddings, heads and norms; warm-up, then decay to 0."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], recipe: Recipe, num_iterations: int) -> None:
        parameters = list(named)
        matrices = [p for name, p in parameters if _is_matrix(name, p)]
        rest = [p for name, p in parameters if not _is_matrix(name, p)]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._recipe = recipe
        self._num = num_iterations
        self._done = 0

    def step(self, loss: Tensor) -> None:
        loss.backward()
        up = (self._done + 1) / self._recipe.num_warmup
        down = (self._num - self._done) / max(1, self._num - self._recipe.num_warmup)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._recipe.lr * min(1.0, up, down)
            optimizer.step()
            optimizer.zero_grad()
        self._done += 1


def _is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.ndim == 2 and ("blocks" in name or "layers" in name or "merger" in name)


def learn_to_read(model: Qwen2_5_VLForConditionalGeneration, recipe: Recipe) -> dict[str, Any]:
    """Train the vision tower, by two heads that are thrown away: characters by patch, then labels by merged token."""
    visual = model.model.visual
    heads = torch.nn.ModuleDict(
        {
            "characters": torch.nn.Linear(visual.patch_embed.embed_dim, NOTHING + 1),
            "labels": torch.nn.Linear(visual.config.out_hidden_size, NO_LABEL + 1),
        }
    )
    named = [*visual.named_parameters(), *heads.named_parameters()]
    optimizers = Optimizers(named, recipe, recipe.num_reading_iterations)
    read: dict[str, list[float]] = {"characters": [], "labels": []}

    def losses() -> Iterator[Tensor]:
        for exercise in exercises(random.Random(recipe.seed), recipe.reading_rows):
            hidden_RPH = see(model, exercise.patches_RPD)
            merged = visual.merger(hidden_RPH)
            loss = torch.zeros(())
            for name, states, classes in (
                ("characters", hidden_RPH.flatten(0, 1), exercise.characters_RP.flatten()),
                ("labels", merged, exercise.labels_RQ.flatten()),
            ):
                scores = heads[name](states)
                nothing = scores.shape[1] - 1
                weights = torch.ones(nothing + 1)
                weights[nothing] = WEIGHT_OF_NOTHING
                loss = loss + cross_entropy(scores, classes, weight=weights, ignore_index=IGNORE)
                something = (classes != nothing) & (classes != IGNORE)
                read[name].append(float((scores.argmax(-1) == classes)[something].float().mean()))
            if len(read["labels"]) % 50 == 0:
                log.info("read: %s", {name: round(sum(values[-20:]) / 20, 3) for name, values in read.items()})
            yield loss

    took = _train("reading", losses(), optimizers, recipe.num_reading_iterations)
    return took | {f"{name}_read": round(sum(values[-20:]) / 20, 4) for name, values in read.items()}


def learn_to_answer(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> dict[str, Any]:
    """Minimize the cross-entropy of the responses."""
    optimizers = Optimizers(model.named_parameters(), recipe, recipe.num_iterations)
    stream = batches(random.Random(recipe.seed), tokenizer, recipe.answering_rows)

    def losses() -> Iterator[Tensor]:
        for ids_RT, patches_RPD, targets_RT in stream:
            embeddings, positions = embed(model, ids_RT, patches_RPD)
            hidden = model.model.language_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
            trained = targets_RT != IGNORE
            yield cross_entropy(model.lm_head(hidden.last_hidden_state[trained]), targets_RT[trained])

    return _train("answering", losses(), optimizers, recipe.num_iterations)


def _train(what: str, losses: Iterator[Tensor], optimizers: Optimizers, num_iterations: int) -> dict[str, Any]:
    """Returns: loss and times, for the card."""
    started, started_cpu = time.monotonic(), time.process_time()
    recent: list[float] = []
    for iteration in range(1, num_iterations + 1):
        loss = next(losses)
        optimizers.step(loss)
        recent = [*recent[-49:], float(loss.detach())]
        if iteration % 50 == 0:
            left = (time.monotonic() - started) / iteration * (num_iterations - iteration)
            loss_now = sum(recent) / len(recent)
            log.info("%s: iteration %d/%d loss=%.4f left_s=%.0f", what, iteration, num_iterations, loss_now, left)
    return {
        "loss": round(sum(recent) / len(recent), 4),
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_s": round(time.process_time() - started_cpu, 1),
    }


def main() -> None:
    """The command line."""
    defaults = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--num-reading-iterations", type=int, default=defaults.num_reading_iterations)
    parser.add_argument("--num-iterations", type=int, default=defaults.num_iterations, help="of worked answers")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of weights and examples")
    parser.add_argument("--skip-evaluation", action="store_true", help="write neither evaluation.json nor the card")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # at this size a second thread does not help
    recipe = Recipe(
        num_reading_iterations=args.num_reading_iterations, num_iterations=args.num_iterations, seed=args.seed
    )
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=recipe.seed)
    num_parameters = sum(p.numel() for p in model.parameters())
    in_vision = sum(p.numel() for p in model.model.visual.parameters())
    log.info("%d parameters, %d of them for vision; %d tokens", num_parameters, in_vision, len(tokenizer))
    took = {"reading": learn_to_read(model, recipe), "answering": learn_to_answer(model, tokenizer, recipe)}
    save(model, tokenizer, args.out)
    made = {"num_parameters": num_parameters, "in_vision": in_vision, "recipe": asdict(recipe), "took": took}
    (args.out / "recipe.json").write_text(f"{json.dumps(made, indent=1)}\n", encoding="utf-8")
    log.info("trained %s: %s", args.out, took)
    if not args.skip_evaluation:
        write_report(args.out)


if __name__ == "__main__":
    main()
