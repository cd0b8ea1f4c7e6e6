"""`python -m learner.model.embeddings --config RUN/config.toml --run-dir RUN`: embed the training prompts, once.

An embedding is the mean of the base model's last hidden states over the prompt's tokens. The learner computes them
before its first step if the prompt selector needs them; run this to compute them elsewhere or in advance.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from bapo.algorithms.selectors.registry import needs_embeddings
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.runtime.process import Flags, run_process
from bapo.runtime.run_directory.embeddings import embeddings_path, write_embeddings
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.tasks.prompt_tokens import prompt_token_ids
from bapo.tasks.registry import task_of
from learner.distributed.world import pick_device

log = logging.getLogger(__name__)

PROMPTS_AT_ONCE = 64


def make_embeddings(config: Config, run: RunDirectory) -> None:
    """Write the embeddings if the selector needs them and they do not exist. Raises: ConfigError, StorageError."""
    path = embeddings_path(config, run)
    if not needs_embeddings(config.algorithm.selector) or path.exists():
        return
    if config.selector.get("embeddings") is not None:
        raise ConfigError(f"selector.embeddings = {path}: file not found; null computes them with the base model")
    prompts = task_of(config).prompts("train")
    if any(prompt.images for prompt in prompts):
        raise ConfigError(
            f"algorithm.selector = {config.algorithm.selector}: embeddings are computed from text, and prompts have "
            "images; choose another selector, or set selector.embeddings to a file of your own"
        )
    embeddings = embed(config.model.path, prompts, pick_device(config.learner.device))
    write_embeddings(path, [prompt.prompt_id for prompt in prompts], embeddings)
    log.info("embedded %d prompts in %d dimensions: %s", *embeddings.shape, path)


@torch.inference_mode()
def embed(model_path: str, prompts: Sequence[Prompt], device: torch.device) -> NDArray[np.float32]:
    """[N, D] mean last hidden state over the tokens of each prompt. Raises: ConfigError if the model does not load."""
    try:
        model: Any = AutoModel.from_pretrained(model_path, dtype=torch.float32).to(device).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model_path}: cannot embed prompts with it: {error}") from error
    encoded = [prompt_token_ids(tokenizer, prompt) for prompt in prompts]
    # Similar lengths together, to reduce padding; the result is in the order of the prompts.
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    found = np.empty((len(encoded), model.config.hidden_size), dtype=np.float32)
    for first in range(0, len(order), PROMPTS_AT_ONCE):
        chosen = order[first : first + PROMPTS_AT_ONCE]
        found[chosen] = _mean_hidden([encoded[i] for i in chosen], model, device).cpu().numpy()
    return found


def _mean_hidden(rows: Sequence[list[int]], model: Any, device: torch.device) -> torch.Tensor:
    """[len(rows), D]. Padded on the right, where causality masks it."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    hidden = model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state.float()
    weights = mask.unsqueeze(-1).float()
    mean: torch.Tensor = (hidden * weights).sum(1) / weights.sum(1)
    return mean


def main(flags: Flags) -> None:
    """Embed the prompts if necessary."""
    make_embeddings(flags.config, flags.run)


if __name__ == "__main__":
    run_process("learner.model.embeddings", main)
