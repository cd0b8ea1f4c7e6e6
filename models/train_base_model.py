"""Train the small base model: supervised traces of a few attempts, on problems that no run uses.

    python -m models.train_base_model --out models/countdown-tiny

Some minutes of one core. Writes a Hugging Face folder (config, generation config, safetensors, tokenizer),
`recipe.json`, `evaluation.json` and the card.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.architecture import build_model
from models.evaluate_base_model import write_report
from models.sft_data import IGNORE, Curriculum, batches, examples
from models.tokenizer import ROUND_TRIPS, build_tokenizer, check_round_trips

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All settings that determine the model."""

    num_iterations: int = 1200
    tokens_per_batch: int = 2560
    """Prompt, response and padding."""
    lr: float = 3e-3
    """Highest learning rate, of both optimizers."""
    num_warmup: int = 100
    """Iterations of linear warm-up; after it, linear decay to 0."""
    seed: int = 0
    curriculum: Curriculum | None = None
    """Of Countdown."""


def train(model: LlamaForCausalLM, recipe: Recipe, stream: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Minimize the cross-entropy of the responses. Returns: loss, tokens and times, for the card."""
    optimizers = _optimizers(model, recipe.lr)
    rate = _schedule(recipe)
    started, started_cpu = time.monotonic(), time.process_time()
    num_tokens = num_examples = 0
    recent: list[float] = []
    for iteration in range(recipe.num_iterations):
        ids_RT, targets_RT = next(stream)
        logits_RTV = model(input_ids=ids_RT, use_cache=False).logits
        loss = cross_entropy(logits_RTV.flatten(0, 1), targets_RT.flatten(), ignore_index=IGNORE)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * rate(iteration)
            optimizer.step()
            optimizer.zero_grad()
        num_examples += len(ids_RT)
        num_tokens += ids_RT.numel()
        recent = [*recent[-49:], float(loss.detach())]
        if (iteration + 1) % 50 == 0:
            left = (time.monotonic() - started) / (iteration + 1) * (recipe.num_iterations - iteration - 1)
            loss_now = sum(recent) / len(recent)
            log.info("iteration %d/%d loss=%.4f left_s=%.0f", iteration + 1, recipe.num_iterations, loss_now, left)
    return {
        "loss": round(sum(recent) / len(recent), 4),
        "examples": num_examples,
        "tokens": num_tokens,
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_s": round(time.process_time() - started_cpu, 1),
    }


def make_model(
    out: Path,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    examples: Callable[[random.Random], Iterator[tuple[str, ...]]],
    round_trips: Mapping[str, Sequence[str]] = ROUND_TRIPS,
) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train the network on these examples, and write its folder. Returns: the model, and what `train` recorded.

    Raises: ValueError if the saved tokenizer reads a text of `round_trips` as other tokens.
    """
    torch.set_num_threads(1)  # at this size a second thread does not help
    torch.manual_seed(recipe.seed)
    model = build_model(tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    log.info("%d parameters, %d tokens in the vocabulary", num_parameters, len(tokenizer))
    rng = random.Random(recipe.seed)
    took = train(model, recipe, batches(examples(rng), rng, tokenizer, recipe.tokens_per_batch))
    save(model, tokenizer, out)
    check_round_trips(out, round_trips)
    save_recipe(recipe, took, num_parameters, out)
    return model, took


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder in Hugging Face format."""
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # readable for other users, such as a container's
    tokenizer.save_pretrained(out)


def save_recipe(recipe: Recipe, took: dict[str, Any], num_parameters: int, out: Path) -> None:
    """`recipe.json`: how the model was made."""
    text = json.dumps({"num_parameters": num_parameters, "recipe": asdict(recipe), "took": took}, indent=1)
    (out / "recipe.json").write_text(f"{text}\n", encoding="utf-8")
    log.info("trained %s in %.0f s (%.0f s of CPU)", out, took["wall_s"], took["cpu_s"])


def _optimizers(model: LlamaForCausalLM, lr: float) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the layers, AdamW for embedding, head and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return (
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    )


def _schedule(recipe: Recipe) -> Callable[[int], float]:
    """Iteration -> share of the highest learning rate: linear warm-up to 1, then linear decay to 0."""

    def rate(iteration: int) -> float:
        up = (iteration + 1) / recipe.num_warmup
        down = (recipe.num_iterations - iteration) / max(1, recipe.num_iterations - recipe.num_warmup)
        return min(1.0, up, down)

    return rate


def main() -> None:
    """The command line."""
    defaults, curriculum = Recipe(), Curriculum()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--num-iterations", type=int, default=defaults.num_iterations)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of weights and examples")
    parser.add_argument("--cd3-share", type=float, default=curriculum.cd3_share, help="share of 3-number problems")
    parser.add_argument("--success", type=float, default=curriculum.success, help="probability that an attempt works")
    parser.add_argument("--max-tokens", type=int, default=curriculum.max_tokens, help="of the longest response")
    parser.add_argument("--skip-evaluation", action="store_true", help="write neither evaluation.json nor the card")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    curriculum = Curriculum(cd3_share=args.cd3_share, success=args.success, max_tokens=args.max_tokens)
    recipe = Recipe(num_iterations=args.num_iterations, seed=args.seed, curriculum=curriculum)
    make_model(args.out, recipe, build_tokenizer(), lambda rng: examples(rng, curriculum))
    if not args.skip_evaluation:
        write_report(args.out)


if __name__ == "__main__":
    main()
