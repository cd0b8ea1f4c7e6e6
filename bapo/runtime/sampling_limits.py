"""Sampling values that an engine samples with exactly as written, checked before anything starts.

The learner divides logits by `rollout.temperature`, and an evaluation's row says what it was sampled with, so an engine
that refuses a value, or replaces it by another, must not start with it. The numbers are those of the pinned vLLM
(`SamplingParams`); tests/full/test_vllm_contract.py compares them with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bapo.config.tree import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """What an engine accepts and does not change."""

    lowest_temperature: float
    """Below it, the engine samples at this temperature."""
    highest_temperature: float
    """Above it, the engine refuses the request."""


LIMITS = {"vllm": SamplingLimits(lowest_temperature=0.01, highest_temperature=2.0)}
"""By engine; others accept every value that the configuration accepts."""
LOGPROBS = "processed_logprobs"
"""vLLM's log-probs of the distribution that was sampled from, after temperature."""


def sampling_problems(config: Config) -> Iterator[str]:
    """Every sampling value that the engine would refuse or replace, with what to do."""
    limits = LIMITS.get(config.rollout.engine)
    if limits is None:
        return
    for key, temperature in _temperatures(config):
        if temperature > limits.highest_temperature:
            yield (
                f"{key} = {temperature:g}: {config.rollout.engine} refuses temperatures above "
                f"{limits.highest_temperature:g}; set it to at most that"
            )
        elif temperature < limits.lowest_temperature:
            yield (
                f"{key} = {temperature:g}: {config.rollout.engine} samples at {limits.lowest_temperature:g} instead, "
                f"and log-probs would be of another distribution; set it to at least {limits.lowest_temperature:g}"
            )
    yield from _option_problems(config)


def _temperatures(config: Config) -> Iterator[tuple[str, float]]:
    yield "rollout.temperature", config.rollout.temperature
    if config.evaluation.temperature is not None:
        yield "evaluation.temperature", config.evaluation.temperature
    for index, temperature in enumerate(config.evaluation.temperatures):
        yield f"evaluation.temperatures[{index}]", temperature
    for split, own in config.evaluation.splits.items():
        if own.temperature is not None:
            yield f"evaluation.splits.{split}.temperature", own.temperature


def _option_problems(config: Config) -> Iterator[str]:
    """Engine options that contradict the sampling settings: each request would be refused, or say something else."""
    rollout = config.rollout
    options: dict[str, Any] = rollout.engine_options
    longest = rollout.longest_sequence
    length = options.get("max_model_len")
    if isinstance(length, int) and 0 < length < longest:
        yield (
            f"rollout.engine_options.max_model_len = {length} is less than rollout.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest}; remove it"
        )
    mode = options.get("logprobs_mode", LOGPROBS)
    if mode != LOGPROBS:
        yield (
            f"rollout.engine_options.logprobs_mode = {mode!r}: the learner needs log-probs of the distribution that "
            "was sampled from; remove it"
        )
