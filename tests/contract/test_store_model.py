"""The Redis store against the memory store: whatever is done to both, they answer and hold the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from bapo.errors import ContractError
from bapo.types import HardPrompt, Progress, Purpose, RolloutRequest
from buffer_service.assembly import repeated_id
from buffer_service.memory_store import MemoryStore
from buffer_service.redis_link import RedisLink
from buffer_service.redis_store import RedisStore
from buffer_service.values import Assembly, FreshGroup, Replacement, View
from tests.buffer_setup import an_assembly, answer, incoming
from tests.factories import make_request

NAMES = st.sampled_from("abcdefghij")
WORKERS = st.sampled_from(["w1", "w2"])
VERSIONS = st.integers(1, 4)
REWARDS = st.sampled_from(["00000000", "11000000", "11111111"])
RUNS = itertools.count()


class TwoStores(RuleBasedStateMachine):
    """Every rule does the same to both stores and compares what they say."""

    link: RedisLink
    in_step_order: bool

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"lease_s": 600, "max_attempts": 2, "in_step_order": self.in_step_order}
        self.memory = MemoryStore("m", **options)
        self.redis = RedisStore(self.link, f"model-{next(RUNS)}", **options)
        self.asked: dict[str, RolloutRequest] = {}

    def both(self, call: Callable[[Any], Any]) -> Any:
        outcomes = []
        for store in (self.memory, self.redis):
            try:
                outcomes.append(call(store))
            except ContractError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    @rule(names=st.lists(NAMES, max_size=4), step=VERSIONS, version=VERSIONS, cursor=st.none() | st.integers(1, 20))
    def enqueue(self, names: list[str], step: int, version: int, cursor: int | None) -> None:
        requests = [make_request(prompt_id=n, request_id=f"f-{n}", step=step, min_version=version) for n in names]
        self.both(lambda store: store.enqueue(requests, cursor=cursor))
        self.remember(requests)

    @rule(names=st.lists(NAMES, max_size=3), label=st.sampled_from(["l1", "l2"]))
    def enqueue_evaluation(self, names: list[str], label: str) -> None:
        requests = [
            make_request(prompt_id=n, request_id=f"{label}-{n}", purpose=Purpose.EVALUATE, label=label) for n in names
        ]
        self.both(lambda store: store.enqueue(requests, cursor=None))
        self.remember(requests)

    @rule(step=st.integers(1, 4), names=st.lists(NAMES, max_size=3, unique=True))
    def enqueue_round(self, step: int, names: list[str]) -> None:
        fields = {"purpose": Purpose.REEVALUATE, "step": step, "min_version": step}
        requests = [make_request(prompt_id=n, request_id=f"r{step}-{n}", **fields) for n in names]
        self.both(lambda store: store.enqueue_round(step, requests))
        self.remember(requests)

    def remember(self, requests: list[RolloutRequest]) -> None:
        for request in requests:
            self.asked.setdefault(request.request_id, request)

    @rule(worker=WORKERS, limit=st.integers(1, 4), version=VERSIONS)
    def claim(self, worker: str, limit: int, version: int) -> None:
        self.both(lambda store: store.claim(worker, limit=limit, policy_version=version))

    @rule(worker=WORKERS, which=st.integers(0, 40))
    def fail(self, worker: str, which: int) -> None:
        request_id = self.pick(which)
        self.both(lambda store: store.fail(worker, request_id, reason="engine", detail="d"))

    @rule(worker=WORKERS, which=st.integers(0, 40))
    def renew(self, worker: str, which: int) -> None:
        self.both(lambda store: store.renew(worker, [self.pick(which), self.pick(which + 1)]))

    @rule(worker=WORKERS)
    def release(self, worker: str) -> None:
        self.both(lambda store: store.release(worker))

    @rule(which=st.lists(st.integers(0, 40), min_size=1, max_size=4), version=VERSIONS, rewards=REWARDS)
    def push(self, which: list[int], version: int, rewards: str) -> None:
        requests = [self.asked.get(self.pick(index), make_request(prompt_id="never")) for index in which]
        groups = [incoming(answer(request, rewards, version)) for request in requests]
        self.both(lambda store: store.push(groups))

    def pick(self, which: int) -> str:
        return list(self.asked)[which % len(self.asked)] if self.asked else "never"

    @rule(size=st.integers(1, 3), keep=st.integers(0, 3), reuse=st.booleans())
    def assemble(self, size: int, keep: int, reuse: bool) -> None:
        view = self.both(lambda store: store.view(size))
        assembly = self.assembly(view, keep, reuse)
        assert self.both(lambda store: store.commit_assembly(assembly)) is True
        assert self.both(lambda store: store.commit_assembly(assembly)) is False

    def assembly(self, view: View, keep: int, reuse: bool) -> Assembly:
        step, before = view.assembled + 1, view.tables
        fresh = list(view.fresh)
        wrong = [group for group in fresh if sum(group.record.rewards) == 0]
        had = {entry.prompt_id for entry in before.bad}
        bad = {entry.prompt_id: entry for entry in before.bad}
        bad.update((g.record.prompt_id, HardPrompt(prompt_id=g.record.prompt_id, birth=step, mu=0.0)) for g in wrong)
        new = {g.record.prompt_id: g.request.prompt for g in wrong if g.record.prompt_id not in had}
        reused = [stat.group_id for stat in before.high[:1]] if reuse else []
        return an_assembly(
            step=step,
            fresh=[group.record.group_id for group in fresh],
            reevaluated=[record.group_id for record in view.reevaluated],
            trained=[g.record.group_id for g in fresh[:keep]] + [r.group_id for r in view.reevaluated[:1]] + reused,
            before=before,
            bad=list(bad.values())[-3:],
            high=[*(s for s in before.high if s.birth > step - 3), *(g.record.stat(birth=step) for g in fresh[:1])],
            new_prompts=[prompt for prompt_id, prompt in new.items() if prompt_id in list(bad)[-3:]],
            num_stale=len(view.stale),
        )

    @rule(number=st.integers(1, 3))
    def replace_stale(self, number: int) -> None:
        groups: tuple[FreshGroup, ...] = self.both(lambda store: store.view(number)).fresh
        again = [replace(g.request, request_id=repeated_id(g.request.request_id), min_version=3) for g in groups]
        fates = [group.record.fate(None, "stale", 1) for group in groups]
        items = [Replacement(fate=fate, request=request) for fate, request in zip(fates, again, strict=True)]
        self.both(lambda store: store.replace_stale(items))
        self.remember(again)

    @rule(behind=st.integers(0, 2), unsaved=st.integers(0, 3))
    def commit(self, behind: int, unsaved: int) -> None:
        step = max(0, self.memory.readiness(0).assembled - behind)
        self.both(lambda store: store.commit(step, max(0, step - unsaved)))

    @rule(behind=st.integers(-1, 4))
    def resume(self, behind: int) -> None:
        step = max(0, self.memory.readiness(0).assembled - behind)
        self.both(lambda store: store.resume(step))

    @rule(label=st.sampled_from(["l1", "l2"]))
    def forget(self, label: str) -> None:
        self.both(lambda store: store.evaluated(label))
        self.both(lambda store: store.forget(label))

    @rule(step=st.integers(0, 9), version=st.integers(0, 9))
    def report(self, step: int, version: int) -> None:
        self.both(lambda store: store.report(Progress(step=step, policy_version=version)))

    @rule()
    def restore(self) -> None:
        image = self.redis.image()
        frames = [(group_id, self.redis.frames([group_id])[0] or b"") for group_id in image.references]
        self.both(lambda store: store.restore(image, frames))

    @invariant()
    def both_hold_the_same(self) -> None:
        self.both(lambda store: store.image())
        held = self.both(lambda store: store.status().num_bytes)
        status = self.both(lambda store: replace(store.status(), run="", workers={}))
        self.both(lambda store: {name: w.leased for name, w in store.status().workers.items()})
        assert held == status.num_bytes
        self.both(lambda store: store.frames(sorted(self.asked)))
        self.both(lambda store: [store.readiness(step) for step in range(5)])
        self.both(lambda store: store.batch(store.readiness(0).assembled))


@pytest.mark.parametrize("in_step_order", [False, True])
def test_both_stores_answer_and_hold_the_same(redis_url: str, in_step_order: bool) -> None:
    class Machine(TwoStores):
        link = RedisLink(redis_url)

    Machine.in_step_order = in_step_order
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            print_blob=True,
        ),
    )
    Machine.link.client.close()
