"""Scheduler, buffer service and workers in one process, over real sockets: prompts that are chosen by what was learnt.

The learner of these tests trains nothing: it takes its batches, commits them, saves, and goes back to what it saved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.methods import SELECTOR
from bapo.algorithms.selectors.base import PromptPool
from bapo.config.tree import Config
from bapo.core.codec import pack_group
from bapo.core.errors import BapoError, ContractError
from bapo.core.types import Progress, Purpose, RolloutRequest
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis.store import RedisStore
from services.scheduler.loop import Scheduler
from services.scheduler.plan import FreshPlan
from services.scheduler.proposals import make_proposals
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import serving
from tests.support.factories import make_prompt
from tests.support.methods import options_for

PROMPTS = [make_prompt(prompt_id=f"p{i:02d}") for i in range(40)]
RIGHT = {prompt.prompt_id: i % 9 for i, prompt in enumerate(PROMPTS)}
NUM_STEPS = 40
"""More than a selector's state is kept after."""


def make_config(selector: str, v: int = 1) -> Config:
    return Config.model_validate(
        {
            "run": {"num_steps": NUM_STEPS, "seed": 11},
            "algorithm": {"batch_size": 4, "selector": selector, "use_x2": False, "use_x3": False},
            "selector": options_for(SELECTOR, selector, pool_ratio=4.0),
            "cadence": {"weight_sync_interval": v, "reevaluation_interval": v, "max_steps_ahead": 0},
            "learner": {"minibatch_size": 4},
        }
    )


def a_store(redis_url: str, **options: Any) -> RedisStore:
    """As the service makes one without sampling ahead."""
    return new_store(redis_url, in_step_order=True, **options)


@dataclass
class Answers:
    """A worker whose policy does not change; it answers nothing while it holds back, and loses what it is told to."""

    client: BufferClient
    lost: frozenset[str] = frozenset()
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.is_set():
            version = self.client.progress().policy_version
            claimed = self.client.claim("w", limit=8, policy_version=version, wait_s=0.05)
            groups = [self._answer(request, version) for request in claimed]
            if not (frames := [pack_group(group) for group in groups if group is not None]):
                continue
            try:
                self.client.push(frames)
            except ContractError:
                self.client.release("w")  # the learner has gone back meanwhile: these weights are ahead of it

    def _answer(self, request: RolloutRequest, version: int) -> object:
        if request.request_id in self.lost:
            self.client.fail("w", request.request_id, reason="engine")
            return None
        k = RIGHT[request.prompt.prompt_id]
        return answer(request, "1" * k + "0" * (8 - k), version=version)


class ScheduledError(BapoError):
    """The scheduler was killed."""


class Mortal(BufferClient):
    """A scheduler's client, until it is killed: between any two calls."""

    killed = False

    def enqueue(self, requests: Sequence[RolloutRequest], **numbers: int | None) -> int:  # type: ignore[override]
        if self.killed:
            raise ScheduledError
        return super().enqueue(requests, **numbers)

    def progress(self, *, seen_step: int | None = None, wait_s: float = 0.0) -> Progress:
        if self.killed:
            raise ScheduledError
        return super().progress(seen_step=seen_step, wait_s=min(wait_s, 0.05))


@contextmanager
def scheduling(config: Config, url: str) -> Iterator[None]:
    """A scheduler in a thread; the end of the block is its death."""
    client = Mortal(url, timeout_s=10.0)
    pool = PromptPool(prompt_ids=tuple(prompt.prompt_id for prompt in PROMPTS))
    proposals = make_proposals(config, pool, client)
    plan = FreshPlan(config, PROMPTS, proposals)
    scheduler = Scheduler(config, plan, load_composer(config.algorithm), client, Telemetry(), proposals=proposals)

    def run() -> None:
        try:
            scheduler.run()
        except ScheduledError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    client.killed = True
    thread.join(10.0)
    assert not thread.is_alive()


class Run:
    """One run from step to step."""

    def __init__(self, config: Config, client: BufferClient) -> None:
        self.config, self.client = config, client
        self.prompts: dict[int, list[str]] = {}

    def steps(self, first: int, last: int) -> None:
        """The learner's part of the steps."""
        for step in range(first, last + 1):
            self.client.report_progress(Progress(step=step, policy_version=step))
            batch = self.client.batch(step, timeout_s=20.0)
            results = [result for result in batch.results if result.purpose is Purpose.FRESH]
            self.prompts[step] = [result.prompt_id for result in results]
            self.client.commit(step, checkpointed=0)


@contextmanager
def running(config: Config, store: RedisStore, *, lost: frozenset[str] = frozenset()) -> Iterator[Run]:
    """Service and worker; the scheduler is the test's."""
    with serving(store, config) as client:
        worker = Answers(BufferClient(client.url, timeout_s=10.0), lost)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        try:
            yield Run(config, client)
        finally:
            worker.ended.set()
            thread.join(10.0)


def whole_run(redis_url: str, config: Config) -> dict[int, list[str]]:
    with running(config, a_store(redis_url, run="whole")) as run, scheduling(config, run.client.url):
        run.steps(1, NUM_STEPS)
    return run.prompts


def test_a_scheduler_that_is_killed_at_several_steps_asks_for_the_same_prompts(redis_url: str) -> None:
    """By one selector; several against a buffer in memory: test_proposals.py."""
    config = make_config("kimi")
    with running(config, a_store(redis_url)) as run:
        for first, last in ((1, 3), (4, 4), (5, 34), (35, 36), (37, NUM_STEPS)):
            with scheduling(config, run.client.url):
                run.steps(first, last)
    assert run.prompts == whole_run(redis_url, config)


def test_a_learner_that_goes_back_to_its_checkpoint_gets_the_same_prompts(redis_url: str) -> None:
    """With and without a snapshot: from step 36 back to 34, and from step 38 back to the snapshot of step 35."""
    config = make_config("mopps")
    with running(config, a_store(redis_url)) as run, scheduling(config, run.client.url):
        run.steps(1, 36)
        run.client.resume(34)
        run.steps(35, 35)
        snapshot = run.client.snapshot()
        run.steps(36, 38)
        run.client.restore(snapshot)
        run.client.resume(35)
        run.steps(36, NUM_STEPS)
    assert run.prompts == whole_run(redis_url, config)


def test_further_rounds_of_dapo_ask_for_proposed_prompts_and_are_learnt_from_as_well(redis_url: str) -> None:
    """Two of nine prompts give no signal, so that rounds lack groups before MoPPS knows which."""
    config = make_config("mopps")
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"composer": "dapo"})})
    with running(config, a_store(redis_url)) as run, scheduling(config, run.client.url):
        run.steps(1, 12)
        success_counts = run.client.success_counts(0)
    assert any(len(prompts) > 4 for prompts in run.prompts.values())
    assert [list(page.prompt_ids) for page in success_counts] == [run.prompts[step] for step in range(1, 13)]
