"""What to ask the workers next: pure rules of where the learner is and what was asked before.

    fresh         requests in data order, numbered by the cursor 0, 1, 2, ...; those of step t are ready for the workers
                  when the learner is v + slack steps before it, so that nobody waits for a prompt
    re-evaluation once per step t with t mod m == 0: the hard prompts that the algorithm chooses (spec A.3 line 6)

Ids are made of cursor, step and place, so that a scheduler that restarts asks for the same things again, once.
Does not cover: prompt lengths (the worker refuses a prompt that is too long).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from bapo.algorithms.composer import Composer
from bapo.algorithms.curriculum import epoch_order, position
from bapo.algorithms.randomness import rng_for
from bapo.config.tree import Config
from bapo.errors import ConfigError
from bapo.types import HardPrompt, Prompt, Purpose, RolloutRequest

MAX_PER_CALL = 512
"""Fresh requests in one call to the buffer: a few hundred kB."""


class FreshPlan:
    """Which fresh request comes at which cursor, and how many there should be."""

    def __init__(self, config: Config, prompts: Sequence[Prompt]) -> None:
        """`prompts`: the training split. Raises: ConfigError when it is smaller than one batch."""
        self._config = config
        self._prompts = prompts
        self._batch_size = config.algorithm.batch_size
        if len(prompts) < self._batch_size:
            raise ConfigError(
                f"task {config.task.name!r} has {len(prompts)} training prompts, fewer than one batch of "
                f"algorithm.batch_size={self._batch_size}; add prompts or write at most {len(prompts)}"
            )

    def missing(self, step: int, cursor: int, num_dropped: int) -> range:
        """Cursors to enqueue now, so that every step up to `step + v + slack` has its B requests.

        Args:
            step: where the learner is (0: it has not begun).
            cursor: fresh requests ever enqueued.
            num_dropped: those of them that will never become a group: their places are asked again.
        """
        cadence = self._config.cadence
        horizon = min(self._config.run.num_steps, step + cadence.v + cadence.slack)
        wanted = self._batch_size * horizon + num_dropped
        return range(cursor, max(cursor, min(wanted, cursor + MAX_PER_CALL)))

    def request(self, cursor: int, num_dropped: int) -> RolloutRequest:
        """The fresh request at a cursor."""
        step = max(0, cursor - num_dropped) // self._batch_size + 1
        return RolloutRequest(
            request_id=f"fresh-{cursor:08d}",
            prompt=self.prompt(cursor),
            group_size=self._config.algorithm.group_size,
            purpose=Purpose.FRESH,
            step=step,
            min_version=self._config.cadence.min_version(step),
        )

    def prompt(self, cursor: int) -> Prompt:
        """The prompt at a cursor of the data order."""
        num = len(self._prompts)
        epoch, index = position(cursor, num, self._batch_size)
        return self._prompts[_order(self._config.run.seed, epoch, num)[index]]

    def prompt_ids(self, step: int) -> frozenset[str]:
        """Ids of the prompts that the data order plans for a step (exact as long as no group was dropped)."""
        first = (step - 1) * self._batch_size
        return frozenset(self.prompt(cursor).prompt_id for cursor in range(first, first + self._batch_size))


def due_round(step: int, config: Config) -> int | None:
    """The newest step <= `step` with t mod m == 0, or None before the first or when X2 is off.

    A learner that took a step between two looks does not lose its round: it is asked late, with the same version.
    """
    newest = min(step, config.run.num_steps) // config.cadence.m * config.cadence.m
    return newest if config.algorithm.use_x2 and newest > 0 else None


def reevaluation_requests(
    step: int, hard: Sequence[tuple[HardPrompt, Prompt]], *, composer: Composer, plan: FreshPlan, config: Config
) -> list[RolloutRequest]:
    """The requests of round `step`: hard prompts are sampled again from theta_t itself (eq. 6)."""
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


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_prompts: int) -> list[int]:
    """The permutation of an epoch, made once: two epochs are in use when a batch lies near the seam."""
    return epoch_order(seed, epoch, num_prompts)
