"""Prompts of each step by an adaptive selector: proposed in order, each from a fixed set of success counts.

    stored state of round r --restore--> selector --observe steps up to h - L, one by one--> propose(h)
                                           |  every KEEP_EVERY rounds, and after references
                                           +--> stored again, before the first request of its round is enqueued

All state is in the buffer: a restarted scheduler reads the state and the success counts after it, and proposes the
same. Only the newest rounds are cached; older ones are never needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bapo.algorithms.selectors.base import Floats, Indices, PromptPool, PromptSelector, State, pack_state, unpack_state
from bapo.algorithms.selectors.registry import learns, load_selector
from bapo.config.tree import Config
from bapo.core.errors import ContractError, DeadlineError
from bapo.core.success_counts import SuccessCounts
from bapo.core.types import Prompt, Purpose, RolloutRequest
from bapo.runtime.run_directory.embeddings import embeddings_path, read_embeddings
from bapo.runtime.run_directory.layout import RunDirectory
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
        self,
        config: Config,
        prompts: Sequence[Prompt],
        make_selector: Callable[[], PromptSelector],
        buffer: BufferClient,
    ) -> None:
        """`make_selector` creates an untrained selector."""
        self._config, self._prompts, self._buffer, self._make = config, prompts, buffer, make_selector
        self._num = min(len(prompts), (1 + config.algorithm.max_rounds) * config.algorithm.batch_size)
        self._remembered = config.cadence.lookahead + config.cadence.reevaluation_interval + 1
        self.forget()

    def forget(self) -> None:
        """Start again from the buffer's state after it was restored."""
        self._selector: PromptSelector | None = None
        self._round = self._through = self._kept = self._asked_references = 0
        self._rankings: dict[int, Indices] = {}

    @property
    def waits(self) -> bool:
        """Whether reference prompts are being sampled for the next round."""
        return self._asked_references > self._round

    @property
    def newest(self) -> int:
        """Newest proposed round; 0 before the first."""
        self._restored()
        return self._round

    def ranking(self, round_: int) -> Indices | None:
        """[min((1 + max_rounds) B, N)] prompts of a round, best first: those of its step, then replacements and those
        of further rounds of that step.

        None while its reference prompts are being sampled or success counts are missing, and for a round that is no
        longer cached.
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
            self._buffer.forget(_label(self._round))  # a scheduler may have crashed before it did
            log.info("selector resumed after step %d, round %d", self._through, self._round)
        self._selector = selector
        return selector

    def _propose_next(self) -> bool:
        selector, round_ = self._restored(), self._round + 1
        if not self._observe_through(selector, max(0, round_ - self._config.cadence.lookahead)):
            return False
        references = selector.references(round_)
        if len(references):
            success_counts = self._reference_counts(round_, references)
            if success_counts is None:
                return False
            selector.observe_references(round_, success_counts)
        self._rankings[round_] = selector.propose(round_, self._num)
        self._rankings.pop(round_ - self._remembered, None)
        self._round = round_
        if len(references) or round_ - self._kept >= KEEP_EVERY:
            self._keep(selector)
        if len(references):
            self._buffer.forget(_label(round_))
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

    def _reference_counts(self, round_: int, references: Indices) -> SuccessCounts | None:
        """Success counts of the reference prompts, once all are finished; requests them at the first call.

        Requests them again if they are missing: Redis may have restarted without its last second of writes, or from a
        snapshot, which has none.
        """
        label = _label(round_)
        if self._asked_references != round_:
            self._request_references(round_, references)
        status = self._buffer.status()
        settled = status.evaluations.get(label, 0)
        if settled >= len(references):
            return self._buffer.evaluation_success_counts(label)
        if settled + status.num_open(Purpose.EVALUATE) < len(references):
            self._request_references(round_, references)
        return None

    def _request_references(self, round_: int, references: Indices) -> None:
        self._buffer.enqueue([self._reference(round_, place, int(i)) for place, i in enumerate(references)])
        self._asked_references = round_
        log.info("round %d: requested %d reference prompts", round_, len(references))

    def _reference(self, round_: int, place: int, index: int) -> RolloutRequest:
        version = self._config.cadence.synced_version(max(1, round_ - self._config.cadence.lookahead))
        return RolloutRequest(
            request_id=f"reference-{round_:06d}-{place:04d}",
            prompt=self._prompts[index],
            group_size=self._config.algorithm.group_size,
            purpose=Purpose.EVALUATE,
            step=version,
            min_version=version,
            label=_label(round_),
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


def make_proposals(
    config: Config, prompts: Sequence[Prompt], pool: PromptPool, buffer: BufferClient
) -> Proposals | None:
    """Proposals of the configured selector; None if it is not adaptive. Raises: ConfigError for an unsuitable pool."""
    name = config.algorithm.selector
    if not learns(name):
        return None

    def make_selector() -> PromptSelector:
        return load_selector(name, config.selector, pool, seed=config.run.seed, batch_size=config.algorithm.batch_size)

    make_selector()  # so that an unsuitable pool is rejected before the run starts
    return Proposals(config, prompts, make_selector, buffer)


def _label(round_: int) -> str:
    return f"reference@{round_}"


log = logging.getLogger(__name__)

EMBEDDING_S = 3600.0
"""Maximum wait for the learner's embeddings; 100,000 prompts take a while with a large model."""
POLL_S = 0.5


def make_pool(config: Config, run: RunDirectory, task: Task, prompts: Sequence[Prompt]) -> PromptPool:
    """`prompts`: the training split, in the order of the selector's indices."""
    prompt_ids = tuple(prompt.prompt_id for prompt in prompts)

    def embed() -> NDArray[np.float32]:
        path = embeddings_path(config, run)
        _wait_for(path, EMBEDDING_S)
        return read_embeddings(path, prompt_ids)

    return PromptPool(prompt_ids=prompt_ids, levels=_levels(task, prompts), embed=embed)


def _levels(task: Task, prompts: Sequence[Prompt]) -> Floats | None:
    """[N] difficulty levels; None unless the task has them for every prompt."""
    levels = [task.level(prompt) for prompt in prompts]
    return None if None in levels else np.array(levels, dtype=np.float64)


def _wait_for(path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    if not path.exists():
        log.info("waiting for the prompt embeddings from the learner: %s", path)
    while not path.exists():
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"no prompt embeddings at {path} after {timeout_s:.0f} s: the learner computes them before its "
                "first step; or run python -m learner.model.embeddings"
            )
        time.sleep(POLL_S)
