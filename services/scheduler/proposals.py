"""Prompts of each step by an adaptive selector: proposed in order, each from a fixed set of success counts.

    stored state of round r --restore--> selector --observe steps up to h - L, one by one--> propose(h)
                                           |  every KEEP_EVERY rounds
                                           +--> stored again, before the first request of its round is enqueued

All state is in the buffer: a restarted scheduler reads the state and the success counts after it, and proposes the
same. Only the newest rounds are cached; older ones are never needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from bapo.algorithms.selectors.base import Floats, Indices, PromptPool, PromptSelector, State, pack_state, unpack_state
from bapo.algorithms.selectors.registry import learns, load_selector
from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.core.types import Prompt
from bapo.tasks.base import Task
from bapo.transport.buffer_client import BufferClient

log = logging.getLogger(__name__)

KEEP_EVERY = 32
"""Rounds between two stored states; the success counts of that many steps remain in the buffer for a restart."""
ROUNDS, RANKINGS = "rounds", "rankings"
"""Names of the arrays in a stored state in addition to the selector's own."""


class Proposals:
    """Rankings of prompts, round by round; round h is that of step h."""

    def __init__(
        self, config: Config, num_prompts: int, make_selector: Callable[[], PromptSelector], buffer: BufferClient
    ) -> None:
        """`num_prompts`: N of the training split; `make_selector` creates an untrained selector."""
        self._config, self._buffer, self._make = config, buffer, make_selector
        self._num = min(num_prompts, (1 + config.algorithm.max_rounds) * config.algorithm.batch_size)
        self._remembered = config.cadence.lookahead + config.cadence.reevaluation_interval + 1
        self.forget()

    def forget(self) -> None:
        """Start again from the buffer's state after it was restored."""
        self._selector: PromptSelector | None = None
        self._round = self._through = self._kept = 0
        self._rankings: dict[int, Indices] = {}

    @property
    def newest(self) -> int:
        """Newest proposed round; 0 before the first."""
        self._restored()
        return self._round

    def ranking(self, round_: int) -> Indices | None:
        """[min((1 + max_rounds) B, N)] prompts of a round, best first: those of its step, then replacements and those
        of further rounds of that step.

        None while success counts are missing, and for a round that is no longer cached.
        """
        self._restored()
        while self._round < round_:
            if not self._propose_next():
                return None
        return self._rankings.get(round_)

    def _restored(self) -> PromptSelector:
        if self._selector is not None:
            return self._selector
        selector = self._make()
        self._round, self._through, data = self._buffer.selector_state()
        self._kept = self._round
        if self._round:
            state = unpack_state(self._config.algorithm.selector, data)
            rounds, rankings = state.pop(ROUNDS), state.pop(RANKINGS)
            self._rankings = {int(h): row.astype(np.int64) for h, row in zip(rounds, rankings, strict=True)}
            selector.restore(state)
            log.info("selector resumed after step %d, round %d", self._through, self._round)
        self._selector = selector
        return selector

    def _propose_next(self) -> bool:
        selector, round_ = self._restored(), self._round + 1
        if not self._observe_through(selector, max(0, round_ - self._config.cadence.lookahead)):
            return False
        self._rankings[round_] = selector.propose(round_, self._num)
        self._rankings.pop(round_ - self._remembered, None)
        self._round = round_
        if round_ - self._kept >= KEEP_EVERY:
            self._keep(selector)
        return True

    def _observe_through(self, selector: PromptSelector, through: int) -> bool:
        while self._through < through:
            page = self._buffer.success_counts(self._through, limit=min(64, through - self._through))
            for success_counts in page:
                if success_counts.step != self._through + 1:
                    raise ContractError(f"success counts of step {success_counts.step} follow step {self._through}")
                selector.observe(success_counts)
                self._through = success_counts.step
            if not page:
                self._require_unassembled(self._through + 1)
                return False
        return True

    def _require_unassembled(self, step: int) -> None:
        """Raises: ContractError if a step has a batch but no success counts: they would never arrive."""
        if self._buffer.status().assembled_step >= step:
            raise ContractError(
                f"the buffer has batch {step} but not its success counts, which algorithm.selector = "
                f"{self._config.algorithm.selector!r} needs: the run was started with another selector; start a "
                "new run"
            )

    def _keep(self, selector: PromptSelector) -> None:
        rounds = sorted(self._rankings)
        state: State = {
            **selector.state(),
            ROUNDS: np.array(rounds, dtype=np.int64),
            RANKINGS: np.stack([self._rankings[h] for h in rounds]),
        }
        self._buffer.keep_selector_state(self._round, self._through, pack_state(self._config.algorithm.selector, state))
        self._kept = self._round


def make_proposals(config: Config, pool: PromptPool, buffer: BufferClient) -> Proposals | None:
    """Proposals of the configured selector; None if it is not adaptive. Raises: ConfigError for an unsuitable pool."""
    name = config.algorithm.selector
    if not learns(name):
        return None

    def make_selector() -> PromptSelector:
        return load_selector(name, config.selector, pool, seed=config.run.seed, batch_size=config.algorithm.batch_size)

    make_selector()  # so that an unsuitable pool is rejected before the run starts
    return Proposals(config, len(pool), make_selector, buffer)


def make_pool(task: Task, prompts: Sequence[Prompt]) -> PromptPool:
    """`prompts`: the training split, in the order of the selector's indices."""
    return PromptPool(prompt_ids=tuple(prompt.prompt_id for prompt in prompts), levels=_levels(task, prompts))


def _levels(task: Task, prompts: Sequence[Prompt]) -> Floats | None:
    """[N] difficulty levels; None unless the task has them for every prompt."""
    levels = [task.level(prompt) for prompt in prompts]
    return None if None in levels else np.array(levels, dtype=np.float64)
