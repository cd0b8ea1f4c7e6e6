"""The canary of a weight update: a short text, and the learner's log-probs of its tokens.

The text is a prompt of the task with its gold answer: of ordinary text, unlike of random tokens, log-probs are small
numbers that bfloat16 represents well, so that small differences between weights show.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from bapo.algorithms.randomness import rng_for
from bapo.config.tree import Config
from bapo.core.errors import BapoError
from bapo.core.types import Canary
from bapo.tasks.prompt_tokens import prompt_token_ids
from bapo.tasks.registry import task_of
from learner.distributed.sharding import reshard
from learner.model.lora import adapted_layers, adapter_off
from learner.model.policy import Policy, sequence_microbatch

log = logging.getLogger(__name__)

NUM_TOKENS = 64
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.5}
"""Largest root mean square difference in nats between an engine and the learner with the same weights; workers derive
tighter limits from what they measure. Engines were within 1e-4 in float32; in bfloat16 0.02 to 0.3 is usual."""


def canary_tokens(config: Config, known: Sequence[int]) -> tuple[int, ...]:
    """The token sequence for comparing engines with the learner; fixed for the run.

    Args:
        known: tokens that can be sampled.
    """
    rollout = config.rollout
    most = min(NUM_TOKENS, rollout.max_prompt_tokens + rollout.max_response_tokens - 1)
    try:
        tokens = _of_the_task(config, frozenset(known))[-most:]
    except (BapoError, OSError, ValueError) as error:
        log.warning("weight updates are checked with random tokens: the task or its tokenizer did not load: %s", error)
        tokens = []
    if len(tokens) < min(most, NUM_TOKENS // 4):
        rng = rng_for(config.run.seed, 0, "canary")
        tokens = [known[rng.randrange(len(known))] for _ in range(most)]
    return tuple(tokens)


def _of_the_task(config: Config, known: frozenset[int]) -> list[int]:
    """Raises: BapoError, OSError, ValueError."""
    task = task_of(config)
    tokenizer: Any = AutoTokenizer.from_pretrained(config.model.path)
    encoded: list[int] = []
    for prompt in task.prompts("train")[:1]:
        encoded += prompt_token_ids(tokenizer, prompt)
        encoded += tokenizer.encode(task.gold(prompt) or "", add_special_tokens=False)
    return [token for token in encoded if token in known]


@torch.no_grad()
def make_canary(policy: Policy, token_ids: tuple[int, ...], dtype: str) -> Canary:
    """The learner's log-probs of the canary tokens at temperature 1, with LoRA also without the adapter. Collective."""
    micro = sequence_microbatch(token_ids, policy.device)
    logprobs, _ = policy(micro, temperature=1.0, with_entropy=False)
    base: list[float] = []
    if adapted_layers(policy.model):
        with adapter_off(policy.model):
            base = policy(micro, temperature=1.0, with_entropy=False)[0].tolist()
    reshard(policy)
    return Canary(
        token_ids=token_ids,
        logprobs=tuple(logprobs.tolist()),
        tolerance=TOLERANCE[dtype],
        base_logprobs=tuple(base),
    )
