"""A re-evaluation round that is planned again, after a crash and from another B_bad, is neither changed nor repeated.

Scheduler and buffer service over real sockets; worker and learner do what the test says. B = 4, v = m = 2. Round 2 has
the four hard prompts of step 1. Batch 2 pushes the first of them out of B_bad, so that another plan of that round would
give its first id to another prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
import pytest

from bapo.algorithms.composers.registry import load_composer
from bapo.core.codec import pack_group
from bapo.core.errors import ContractError
from bapo.core.types import Progress, Purpose, RolloutRequest
from bapo.runtime.metrics.server import Telemetry
from services.scheduler.loop import Scheduler
from services.scheduler.plan import FreshPlan
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_prompt

WRONG, MIXED = "00000000", "11000000"
PROMPTS = [make_prompt(prompt_id=f"p{i:02d}") for i in range(16)]
CONFIG = small_config(
    run={"num_steps": 8},
    algorithm={"batch_size": 4, "max_reevaluated": 4},
    cadence={"weight_sync_interval": 2, "reevaluation_interval": 2, "max_steps_ahead": 2},
)
Plan = dict[str, str]
"""Id -> prompt of requests."""


class Peers:
    """A run whose processes the test replaces."""

    def __init__(self, redis_url: str, stack: ExitStack) -> None:
        self._redis_url, self._stack = redis_url, stack
        self.start_service()
        self.start_scheduler()

    def start_service(self) -> None:
        self.client = self._stack.enter_context(serving(new_store(self._redis_url), CONFIG))

    def start_scheduler(self) -> None:
        self.telemetry = Telemetry()
        plan, composer = FreshPlan(CONFIG, PROMPTS), load_composer(CONFIG.algorithm)
        self.scheduler = Scheduler(CONFIG, plan, composer, self.client, self.telemetry)

    def enter(self, step: int) -> None:
        """The learner starts a step, and the scheduler sees it."""
        self.client.report_progress(Progress(step=step, policy_version=max(1, step // 2 * 2)))
        self.scheduler.poll(step)

    def claim(self, worker: str) -> list[RolloutRequest]:
        """Four requests: re-evaluations, or fresh ones when none is queued."""
        return self.client.claim(worker, limit=4, policy_version=self.client.progress().policy_version)

    def train(self, step: int, rewards: Sequence[str]) -> None:
        """Four fresh groups with these rewards, and the batch of the step."""
        requests = self.claim("fast")
        assert [request.purpose for request in requests] == [Purpose.FRESH] * 4
        self.client.push([pack_group(answer(*pair)) for pair in zip(requests, rewards, strict=True)])
        self.client.batch(step, timeout_s=60)

    @property
    def hard(self) -> list[str]:
        """B_bad, oldest first."""
        return [entry.prompt_id for entry, _ in self.client.hard_prompts()]


@pytest.fixture
def peers(redis_url: str) -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(redis_url, stack)


def plan_of(requests: Sequence[RolloutRequest]) -> Plan:
    assert {request.purpose for request in requests} == {Purpose.REEVALUATE}
    return {request.request_id: request.prompt.prompt_id for request in requests}


def leased(peers: Peers) -> list[RolloutRequest]:
    """Round 2, which a slow worker holds while batch 2 changes B_bad. The newest checkpoint is that of step 1."""
    peers.enter(1)
    peers.train(1, [WRONG] * 4)
    peers.client.commit(1, checkpointed=1)
    before = peers.hard
    peers.enter(2)
    requests = peers.claim("slow")
    assert plan_of(requests) == {f"reevaluate-000002-{index:04d}": hard for index, hard in enumerate(before)}
    peers.train(2, [WRONG, MIXED, MIXED, MIXED])
    assert peers.hard[:3] == before[1:]
    return requests


@pytest.mark.parametrize(
    "replaced", [("scheduler",), ("learner", "scheduler"), ("learner", "scheduler", "service")], ids="+".join
)
def test_an_open_round_keeps_its_requests_and_none_is_counted_or_trained_twice(
    peers: Peers, replaced: tuple[str, ...]
) -> None:
    requests = leased(peers)
    if "service" in replaced:
        peers.start_service()
    if "learner" in replaced:
        peers.client.resume(1)
    peers.start_scheduler()
    peers.enter(2)
    assert 'requests_total{purpose="reevaluate"} 0.0' in peers.telemetry.exposition().decode()
    assert peers.client.status().reevaluation_rounds == {2: 4}
    peers.client.release("slow")
    again = peers.claim("other")
    assert plan_of(again) == plan_of(requests)
    peers.client.push([pack_group(answer(request, version=2)) for request in again])
    peers.enter(3)
    peers.train(3, [MIXED] * 4)
    results = [result for step in (2, 3) for result in peers.client.batch(step, timeout_s=60).results]
    answered = [result.group_id for result in results if result.purpose is Purpose.REEVALUATE]
    assert sorted(answered) == sorted(plan_of(requests))
    peers.enter(4)
    assert peers.client.status().num_open(Purpose.REEVALUATE) > 0, "the next round is issued as usual"


def test_an_issued_round_ignores_a_call_with_other_prompts_also_when_it_was_planned_elsewhere(peers: Peers) -> None:
    first, *others = leased(peers)
    peers.client.reevaluate(2, [msgspec.structs.replace(first, prompt=others[0].prompt)])
    peers.client.reevaluate(2, [])
    assert peers.client.status().reevaluation_rounds == {2: 4}


def test_a_round_that_a_restore_has_undone_is_planned_anew_and_its_groups_are_not_those_of_the_new_one(
    peers: Peers,
) -> None:
    """A Redis that has lost steps: the learner restores the snapshot of its checkpoint, and the batches differ."""
    beginning = peers.client.snapshot()
    old = leased(peers)
    peers.client.restore(beginning)
    peers.client.resume(0)
    peers.start_scheduler()
    peers.enter(1)
    peers.train(1, [MIXED, MIXED, WRONG, WRONG])
    peers.enter(2)
    assert peers.client.status().reevaluation_rounds == {2: 2}
    with pytest.raises(ContractError, match="expected prompt"):
        peers.client.push([pack_group(answer(old[0], version=2))])
    peers.client.fail("slow", old[0].request_id, reason="refused")
    assert peers.client.push([pack_group(answer(old[3], version=2))]) == {old[3].request_id: "unknown"}
    new = peers.claim("other")
    assert plan_of(new[:2]) == {f"reevaluate-000002-{i:04d}": old[2 + i].prompt.prompt_id for i in range(2)}
    assert [request.attempts for request in new[:2]] == [0, 0]
