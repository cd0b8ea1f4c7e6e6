"""What to request from the workers next: pure rules over the learner's progress and past requests.

    fresh         requests numbered by the cursor 0, 1, 2, ..., in data order or by a prompt selector; those of step t
                  are enqueued v + max_steps_ahead steps before the learner needs them
    extra         further rounds of a step whose batch is short of groups, on demand of the buffer (DAPO)
    re-evaluation once per step t with t mod m == 0: hard prompts chosen by the algorithm (docs/paper.md)

Ids consist of cursor, step and index, so that a restarted scheduler repeats its requests without effect. The prompts of
a round depend on B_bad, which changes while the round is open: a round that the buffer has is not planned again.
Does not cover: prompt lengths (the worker rejects a prompt that is too long).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from bapo.algorithms.composer import Composer
from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.selectors.uniform import DataOrder
from bapo.config.tree import Config
from bapo.core.call_limits import MAX_REQUEST_BYTES, MAX_REQUESTS, in_parts_by_size
from bapo.core.errors import ConfigError
from bapo.core.json_values import to_map
from bapo.core.types import HardPrompt, Prompt, Purpose, RolloutRequest
from bapo.transport.buffer_client import BufferStatus
from bapo.transport.messages import ExtraRound
from services.scheduler.proposals import Proposals

MAX_PER_CALL = 512
"""Fresh requests per call to the buffer: a few hundred kB."""


class FreshPlan:
    """The order of fresh requests.

    Requests are numbered by the cursor. The first B of a selector's proposal for step h are the regular requests of
    step h; a spare replaces one that failed permanently. In the uniform order there is no difference: prompts follow
    the cursor.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt], proposals: Proposals | None = None) -> None:
        """
        Args:
            prompts: the training split.
            proposals: of an adaptive selector; None: the uniform order.
        Raises: ConfigError if there are fewer prompts than in one batch.
        """
        self._config = config
        self._prompts = prompts
        self._proposals = proposals
        self._batch_size = config.algorithm.batch_size
        self._schedule = load_composer(config.algorithm).fresh_schedule
        self._uniform = DataOrder(num_prompts=len(prompts), seed=config.run.seed, batch_size=self._batch_size)
        other_seed = rng_for(config.run.seed, 0, "extra_rounds").getrandbits(32)
        self._extra = DataOrder(num_prompts=len(prompts), seed=other_seed, batch_size=self._batch_size)
        if len(prompts) < self._batch_size:
            raise ConfigError(
                f"task {config.task.name!r} has {len(prompts)} training prompts, fewer than one batch of "
                f"algorithm.batch_size={self._batch_size}; add prompts, or set it to at most {len(prompts)}"
            )

    def due(self, status: BufferStatus) -> list[RolloutRequest]:
        """The requests to enqueue now, at most MAX_PER_CALL: spares first, because the next batch may wait for them.

        Stops before a step without a proposal, whose success counts are missing.
        """
        return self._due_spares(status) if self.num_spares(status) else self._due_regular(status)

    def num_spares(self, status: BufferStatus) -> int:
        """Number of spares among the due requests: all or none."""
        return min(MAX_PER_CALL, max(0, status.fresh_dropped - status.fresh_spares))

    def _due_spares(self, status: BufferStatus) -> list[RolloutRequest]:
        # Planned for the next batch: a later step could require weights that exist only after the step that waits
        # for the spare.
        step = min(self._config.run.num_steps, status.assembled_step + 1)
        chosen = [self._spare(status, number) for number in range(self.num_spares(status))]
        return [self._request(status.cursor + i, step, prompt) for i, prompt in enumerate(chosen) if prompt is not None]

    def _spare(self, status: BufferStatus, number: int) -> Prompt | None:
        if self._proposals is None:
            return self.prompt(status.cursor + number)
        regular = status.cursor - status.fresh_spares
        asked = self._schedule.step_of(regular - 1) if regular else 0
        return self._behind(self._proposals, max(1, asked, self._proposals.newest), status.fresh_spares + number)

    def _behind(self, proposals: Proposals, step: int, number: int) -> Prompt | None:
        """A prompt of a step's proposal after its regular ones, cycling if there are few."""
        ranking = proposals.ranking(step)
        if ranking is None:
            return None
        size = self._schedule.at(step)
        behind = ranking[size:] if len(ranking) > size else ranking
        return self._prompts[int(behind[number % len(behind)])]

    def _due_regular(self, status: BufferStatus) -> list[RolloutRequest]:
        asked = status.cursor - status.fresh_spares
        places = range(asked, max(asked, min(self._schedule.up_to(self.horizon(status)), asked + MAX_PER_CALL)))
        requests = []
        for place in places:
            prompt = self._regular(place, status.fresh_spares)
            if prompt is None:
                break
            requests.append(self._request(place + status.fresh_spares, self._schedule.step_of(place), prompt))
        return requests

    def horizon(self, status: BufferStatus) -> int:
        """Last step whose requests are due, so that no worker waits for a prompt.

        With an adaptive selector, excludes steps whose success counts are missing, which no worker may sample for
        yet.
        """
        begun = status.step if self._proposals is None else status.assembled_step
        return min(self._config.run.num_steps, begun + self._config.cadence.lookahead)

    def _regular(self, place: int, num_spares: int) -> Prompt | None:
        if self._proposals is None:
            return self.prompt(place + num_spares)
        step = self._schedule.step_of(place)
        ranking = self._proposals.ranking(step)
        return None if ranking is None else self._prompts[ranking[place - self._schedule.up_to(step - 1)]]

    def extra_requests(self, extra: ExtraRound) -> list[RolloutRequest]:
        """The requests of a further round: the next prompts of the step's proposal, or, in the uniform order, of a
        separate pass over the data. They depend only on the round, so that repeating them has no effect.
        """
        prompts = [self._extra_prompt(extra.step, extra.first + index) for index in range(extra.size)]
        names = [f"{extra.prefix}{index:04d}" for index in range(extra.size)]
        return [self._fresh(name, extra.step, prompt) for name, prompt in zip(names, prompts, strict=True) if prompt]

    def _extra_prompt(self, step: int, number: int) -> Prompt | None:
        if self._proposals is None:
            return self._prompts[self._extra.at(number)]
        return self._behind(self._proposals, step, number)

    def _request(self, cursor: int, step: int, prompt: Prompt) -> RolloutRequest:
        return self._fresh(f"fresh-{cursor:08d}", step, prompt)

    def _fresh(self, request_id: str, step: int, prompt: Prompt) -> RolloutRequest:
        return RolloutRequest(
            request_id=request_id,
            prompt=prompt,
            group_size=self._config.algorithm.group_size,
            purpose=Purpose.FRESH,
            step=step,
            # A response in segments becomes stale while it is sampled: start with weights that leave enough time.
            min_version=self._config.cadence.min_version(step + self._config.continuation_steps),
        )

    def prompt(self, cursor: int) -> Prompt:
        return self._prompts[self._uniform.at(cursor)]

    def prompt_ids(self, step: int) -> frozenset[str]:
        """Ids of the prompts planned for a step (uniform: exact unless groups were dropped)."""
        places = range(self._schedule.up_to(step - 1), self._schedule.up_to(step))
        if self._proposals is None:
            return frozenset(self.prompt(cursor).prompt_id for cursor in places)
        ranking = self._proposals.ranking(step)
        return frozenset(self._prompts[i].prompt_id for i in ([] if ranking is None else ranking[: len(places)]))


def first_call(requests: Sequence[RolloutRequest]) -> Sequence[RolloutRequest]:
    """The longest prefix that fits in one call: MAX_REQUESTS, and MAX_REQUEST_BYTES unless the first has more."""
    sent = (json.dumps(to_map(request)).encode() for request in requests)
    return requests[: len(next(in_parts_by_size(sent, MAX_REQUESTS, MAX_REQUEST_BYTES, len)))]


def due_round(step: int, config: Config) -> int | None:
    """The newest step <= `step` with t mod m == 0, or None before the first or if X2 is off.

    If the learner advances a step between two polls, the round is issued late, with the same version.
    """
    newest = (
        min(step, config.run.num_steps) // config.cadence.reevaluation_interval * config.cadence.reevaluation_interval
    )
    return newest if config.algorithm.use_x2 and newest > 0 else None


def missed_rounds(due: int, issued: Iterable[int], config: Config) -> range:
    """Steps before round `due`, and after the newest round issued before it, whose round was never issued: the learner
    has passed them. They are not made up for, because workers have newer weights.
    """
    interval = config.cadence.reevaluation_interval
    newest = max((step for step in issued if step < due), default=0)
    return range((newest // interval + 1) * interval, due, interval)


def reevaluation_requests(
    step: int,
    hard: Sequence[tuple[HardPrompt, Prompt]],
    *,
    composer: Composer,
    plan: FreshPlan,
    config: Config,
) -> list[RolloutRequest]:
    """The requests of round `step`: hard prompts are re-evaluated with theta_t (eq. 6)."""
    prompts = {entry.prompt_id: prompt for entry, prompt in hard}
    chosen = composer.hard_prompts_to_ask(
        [entry for entry, _ in hard],
        step,
        plan.prompt_ids(step),
        lambda purpose: rng_for(config.run.seed, step, purpose),
    )
    return [
        RolloutRequest(
            request_id=f"reevaluate-{step:06d}-{index:04d}",
            prompt=prompts[prompt_id],
            group_size=config.algorithm.group_size,
            purpose=Purpose.REEVALUATE,
            step=step,
            min_version=step,
        )
        for index, prompt_id in enumerate(chosen)
    ]
