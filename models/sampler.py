"""Sample responses with a key-value cache, batch by batch of prompts of equal length, and grade them.

Suffixes: R responses, T tokens, V vocabulary. Does not cover: top-p, top-k, prompts of different length in a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from bapo.core.types import Prompt
from bapo.tasks.base import Task

MAX_ROWS = 512
"""Responses sampled together; more does not raise the throughput of one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedResponse:
    """One sampled response and its reward."""

    text: str
    num_tokens: int
    """The end-of-sequence token included."""
    truncated: bool
    """It had not ended after `max_new_tokens`."""
    reward: float


def sample_groups(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    max_new_tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> list[list[GradedResponse]]:
    """`group_size` graded responses to each prompt, in the order of `prompts`; temperature 0 is greedy."""
    by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        ids = tokenizer(prompt.text)["input_ids"]
        by_length[len(ids)] += [(index, ids)] * group_size
    groups: list[list[GradedResponse]] = [[] for _ in prompts]
    for rows in by_length.values():
        for start in range(0, len(rows), MAX_ROWS):
            chunk = rows[start : start + MAX_ROWS]
            prompt_ids_RT = torch.tensor([ids for _, ids in chunk])
            sampled = sample_rows(model, prompt_ids_RT, tokenizer.eos_token_id, max_new_tokens, generator, temperature)
            for (index, _), ids in zip(chunk, sampled, strict=True):
                groups[index].append(grade(tokenizer, task, prompts[index], ids))
    return groups


@torch.inference_mode()
def sample_rows(
    model: PreTrainedModel,
    ids_RT: Tensor,
    eos: int,
    max_new_tokens: int,
    generator: torch.Generator,
    temperature: float,
) -> list[list[int]]:
    """Continuations of rows of equal length, each with its end of sequence."""
    cache = DynamicCache(config=model.config)

    def logits_after(next_R: Tensor | None) -> Tensor:
        ids = ids_RT if next_R is None else next_R.unsqueeze(1)
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1].float()

    return decode(logits_after, cache, len(ids_RT), eos, max_new_tokens, generator, temperature)


def decode(
    logits_after: Callable[[Tensor | None], Tensor],
    cache: DynamicCache,
    num_rows: int,
    eos: int,
    max_new_tokens: int,
    generator: torch.Generator,
    temperature: float,
) -> list[list[int]]:
    """Continuations, each up to and including the end of sequence, or cut after `max_new_tokens`.

    Args:
        logits_after: the newest token of each row that has not ended, None before the first -> [R, V] logits.
        cache: of the model; ended rows leave it.
    """
    continuations: list[list[int]] = [[] for _ in range(num_rows)]
    alive, newest_R = torch.arange(num_rows), None
    for _ in range(max_new_tokens):
        next_R = choose(logits_after(newest_R), generator, temperature)
        for row, token in zip(alive.tolist(), next_R.tolist(), strict=True):
            continuations[row].append(token)
        going_R = next_R != eos
        if not bool(going_R.any()):
            break
        if not bool(going_R.all()):
            cache.batch_select_indices(going_R.nonzero().squeeze(1))
            alive, next_R = alive[going_R], next_R[going_R]
        newest_R = next_R
    return continuations


def choose(logits_RV: Tensor, generator: torch.Generator, temperature: float) -> Tensor:
    """The next token of each row; temperature 0 is greedy."""
    if temperature == 0.0:
        return logits_RV.argmax(-1)
    probabilities_RV = (logits_RV / temperature).softmax(-1)
    return torch.multinomial(probabilities_RV, 1, generator=generator).squeeze(1)


def grade(tokenizer: PreTrainedTokenizerFast, task: Task, prompt: Prompt, ids: list[int]) -> GradedResponse:
    """The response of these tokens."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return GradedResponse(
        text=text,
        num_tokens=len(ids),
        truncated=ids[-1] != tokenizer.eos_token_id,
        reward=task.reward(prompt, text),
    )
