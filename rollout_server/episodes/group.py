"""The episodes of a request as responses of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bapo.core.reward_details import FACTS, Details, joined_details
from bapo.core.sequences import SampledSequence
from bapo.core.token_arrays import Int32s
from bapo.core.turns import FROM_NOTHING, FROM_PROMPT, Turns, common_start
from bapo.core.types import Outcome, RolloutRequest
from rollout_server.episodes.episode import Episode
from rollout_server.rollouts.base import Rollout


def rollout_of(
    request: RolloutRequest, episodes: Sequence[Episode], decode: Callable[[Sequence[Sequence[int]]], list[str]]
) -> Rollout:
    """The rollout of G ended episodes. Deterministic: whoever makes it from one journal makes the same.

    Args:
        decode: texts of token ids, without special tokens.
    """
    ordered = sorted(episodes, key=lambda episode: episode.index)
    roots = [turn.context_ids for episode in ordered for turn in episode.turns if turn.parent == FROM_NOTHING]
    prompt = common_start(roots)  # packed once for all responses of the group
    texts = decode([episode.turns[-1].token_ids.tolist() for episode in ordered])
    rewards = [episode.reward for episode in ordered]
    return Rollout(
        request=request,
        prompt_token_ids=prompt,
        sequences=tuple(_sequence(episode, prompt, text) for episode, text in zip(ordered, texts, strict=True)),
        rewards=tuple(float("nan") if reward is None else reward for reward in rewards),
        facts=joined_details([(_facts(episode), 1) for episode in ordered]),
    )


def _facts(episode: Episode) -> Details:
    return {f"{FACTS}{name}": np.array([value], np.float32) for name, value in episode.facts.items()}


def _sequence(episode: Episode, prompt: Int32s, text: str) -> SampledSequence:
    turns = episode.turns
    root = FROM_PROMPT if len(prompt) else FROM_NOTHING
    context = [turn.context_ids[len(prompt) :] if turn.parent == FROM_NOTHING else turn.context_ids for turn in turns]
    return SampledSequence(
        token_ids=np.concatenate([turn.token_ids for turn in turns]),
        rollout_logprobs=np.concatenate([turn.logprobs for turn in turns]),
        versions=np.concatenate([turn.versions for turn in turns]),
        outcome=Outcome.TRUNCATED if turns[-1].truncated else Outcome.GRADED,
        text=text,
        turns=Turns(
            parents_U=np.array([root if turn.parent == FROM_NOTHING else turn.parent for turn in turns], np.int32),
            num_context_U=np.array([len(ids) for ids in context], np.int32),
            num_sampled_U=np.array([len(turn.token_ids) for turn in turns], np.int32),
            context_ids=np.concatenate(context).astype(np.int32),
        ),
    )
