"""The store against a small independent model: whatever is done to both, they answer and hold exactly the same.

After every rule all queues, tables, references, frames and counts are compared, not only answers.
BAPO_MODEL_EXAMPLES=2000 makes it run for some minutes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.errors import ContractError
from bapo.core.types import HardPrompt, Progress, Purpose, RolloutRequest
from bapo.transport.messages import ExtraRound
from buffer_service.assembly import repeated_id
from buffer_service.state import Assembly, Demand, GroupRecord, Replacement, SelectorState, View
from buffer_service.store.invariants import violations
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.run_image import Image
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import an_assembly, answer, incoming, view_of
from tests.support.factories import make_request
from tests.support.store_clock import ShiftedClock
from tests.support.store_model import Model
from tests.support.store_tables import held_by_model, held_by_redis

EXAMPLES = int(os.environ.get("BAPO_MODEL_EXAMPLES", "0"))
"""0: the same few ones at every run."""
FEW = 50
STEPS = 50
PHASES = [Phase.generate] if os.environ.get("BAPO_MODEL_SHRINK") == "0" else [Phase.generate, Phase.shrink]
LEASE_S = 600
NAMES = st.sampled_from("abcdefgh")
WORKERS = st.sampled_from(["w1", "w2"])
VERSIONS = st.integers(1, 4)
REWARDS = st.sampled_from(["00000000", "11000000", "11111111"])
WHICH = st.integers(0, 40)
AHEAD = st.sampled_from([1, 1, 0, 0, -1, -8])
"""Number of a claim, less that of the worker's newest; across a power of ten numbers and words are sorted otherwise."""
LABELS = st.sampled_from(["l1", "l2"])
SECONDS = st.sampled_from([1, 200, 300, LEASE_S - 30, LEASE_S, 3600])
"""Redis' own clock goes on meanwhile, by less than 30 s, however busy the machine is."""
RUNS = itertools.count()


def _outcome(call: Callable[[Any], Any], store: Any) -> tuple[Any, str]:
    """(answer, '') or (None, why it was refused)."""
    try:
        return call(store), ""
    except ContractError as error:
        return None, str(error)


class TwoBuffers(RuleBasedStateMachine):
    """Every rule does the same to the model and to the store."""

    link: RedisLink
    in_step_order: bool

    def __init__(self) -> None:
        super().__init__()
        self.run_name = f"model-{next(RUNS)}"
        self.clock = ShiftedClock(self.link, self.run_name)
        options: dict[str, Any] = {"lease_s": LEASE_S, "max_attempts": 2, "in_step_order": self.in_step_order}
        self.model = Model(**options)
        self.redis = RedisStore(self.link, self.run_name, **options)
        self.asked: dict[str, RolloutRequest] = {}
        self.claims: dict[str, int] = {}
        self.saved: tuple[Image, list[tuple[str, bytes]]] | None = None

    def both(self, call: Callable[[Any], Any]) -> Any:
        self.model.now = self.clock.seconds
        expected, refused = _outcome(call, self.model)
        said, error = _outcome(call, self.redis)
        assert (said, bool(error)) == (expected, bool(refused))
        return expected

    def remember(self, requests: list[RolloutRequest]) -> None:
        for request in requests:
            self.asked.setdefault(request.request_id, request)

    def pick(self, which: int) -> str:
        return list(self.asked)[which % len(self.asked)] if self.asked else "never"

    # -- requests

    @rule(
        names=st.lists(NAMES, max_size=4),
        step=VERSIONS,
        version=VERSIONS,
        cursor=st.none() | st.integers(0, 9),
        spares=st.none() | st.integers(0, 3),
        label=st.just("") | LABELS,
    )
    def enqueue(
        self, names: list[str], step: int, version: int, cursor: int | None, spares: int | None, label: str
    ) -> None:
        fields: dict[str, Any] = {"step": step, "min_version": version, "label": label}
        requests = [make_request(prompt_id=n, request_id=f"f-{n}", **fields) for n in names]
        self.both(lambda store: store.enqueue(requests, cursor=cursor, spares=spares))
        self.remember(requests)

    @rule(names=st.lists(NAMES, max_size=3), label=LABELS, version=VERSIONS)
    def enqueue_evaluation(self, names: list[str], label: str, version: int) -> None:
        fields: dict[str, Any] = {"purpose": Purpose.EVALUATE, "label": label, "min_version": version}
        requests = [make_request(prompt_id=n, request_id=f"{label}-{n}", **fields) for n in names]
        self.both(lambda store: store.enqueue(requests, cursor=None))
        self.remember(requests)

    @rule(step=VERSIONS, names=st.lists(NAMES, max_size=3))
    def enqueue_round(self, step: int, names: list[str]) -> None:
        fields: dict[str, Any] = {"purpose": Purpose.REEVALUATE, "step": step, "min_version": step}
        requests = [make_request(prompt_id=n, request_id=f"r{step}-{n}", **fields) for n in names]
        self.both(lambda store: store.enqueue_round(step, requests))
        self.remember(requests)

    @rule(step=VERSIONS, names=st.lists(NAMES, min_size=1, max_size=3))
    def enqueue_beside_the_round(self, step: int, names: list[str]) -> None:
        """Re-evaluations by themselves, before the round of their step or after it."""
        fields: dict[str, Any] = {"purpose": Purpose.REEVALUATE, "step": step, "min_version": step}
        requests = [make_request(prompt_id=n, request_id=f"r{step}-{n}", **fields) for n in names]
        self.both(lambda store: store.enqueue(requests, cursor=None))
        self.remember(requests)

    @rule(worker=WORKERS, limit=st.integers(0, 4), version=VERSIONS, with_fresh=st.sampled_from([True, True, False]))
    def claim(self, worker: str, limit: int, version: int, with_fresh: bool) -> None:
        self.both(lambda s: s.claim(worker, limit=limit, policy_version=version, with_fresh=with_fresh))

    @rule(worker=WORKERS, limit=st.integers(0, 4), version=VERSIONS, with_fresh=st.booleans(), ahead=AHEAD)
    def claim_by_nonce(self, worker: str, limit: int, version: int, with_fresh: bool, ahead: int) -> None:
        """A new claim (`ahead` = 1), the last one again (0), or an older one that comes late."""
        number = max(1, self.claims.get(worker, 0) + ahead)
        self.claims[worker] = max(number, self.claims.get(worker, 0))
        fields: dict[str, Any] = {"limit": limit, "policy_version": version, "with_fresh": with_fresh}
        self.both(lambda store: store.claim(worker, nonce=f"client-{number}", **fields))

    @rule(worker=WORKERS, limit=st.integers(1, 4), number=st.integers(1, 12))
    def claim_by_another_client(self, worker: str, limit: int, number: int) -> None:
        self.both(lambda s: s.claim(worker, limit=limit, policy_version=4, with_fresh=True, nonce=f"other-{number}"))

    @rule(worker=WORKERS, which=WHICH, detail=st.sampled_from(["", "d", "x" * 600]))
    def fail(self, worker: str, which: int, detail: str) -> None:
        request_id = self.pick(which)
        self.both(lambda store: store.fail(worker, request_id, reason="engine", detail=detail))

    @rule(which=WHICH)
    def fail_what_is_leased(self, which: int) -> None:
        held = [asked for asked in self.model.line if asked.holder]
        if held:
            asked = held[which % len(held)]
            worker, request_id = asked.holder, asked.request.request_id
            self.both(lambda store: store.fail(worker, request_id, reason="verifier", detail="hung"))

    @rule(worker=WORKERS, which=st.lists(WHICH, max_size=4))
    def renew(self, worker: str, which: list[int]) -> None:
        request_ids = [self.pick(index) for index in which]
        self.both(lambda store: store.renew(worker, request_ids))

    @rule(worker=WORKERS)
    def release(self, worker: str) -> None:
        self.both(lambda store: store.release(worker))

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: int) -> None:
        self.clock.move(seconds)

    # -- groups

    @rule(which=st.lists(WHICH, min_size=1, max_size=5), version=VERSIONS, rewards=REWARDS, worker=WORKERS)
    def push(self, which: list[int], version: int, rewards: str, worker: str) -> None:
        requests = [self.asked.get(self.pick(index), make_request(prompt_id="never")) for index in which]
        groups = [incoming(answer(request, rewards, version, worker)) for request in requests]
        self.both(lambda store: store.push(groups))

    @rule(which=WHICH, rewards=REWARDS, limit=st.integers(1, 4))
    def claim_and_push(self, which: int, rewards: str, limit: int) -> None:
        claimed = self.both(lambda store: store.claim("w1", limit=limit, policy_version=4, with_fresh=True))
        groups = [incoming(answer(request, rewards, 4)) for request in claimed]
        self.both(lambda store: store.push(groups) if groups else [])

    @rule(which=WHICH, change=st.sampled_from([{"step": 9}, {"label": "l3"}, {"group_size": 4}]))
    def push_what_was_not_asked(self, which: int, change: dict[str, Any]) -> None:
        request = self.asked.get(self.pick(which), make_request(prompt_id="never"))
        wrong = msgspec.structs.replace(request, **change)
        groups = [incoming(answer(r, "1" * r.group_size, 4)) for r in (request, wrong)]
        if request in [asked.request for asked in self.model.line]:
            self.both(lambda store: store.push(groups))

    @rule(label=LABELS)
    def forget(self, label: str) -> None:
        self.both(lambda store: store.evaluated(label))
        self.both(lambda store: store.forget(label))

    @rule(number=st.integers(1, 3), behind=st.integers(0, 3), resumed=st.integers(-1, 3))
    def train_and_start_again(self, number: int, behind: int, resumed: int) -> None:
        """A learner trains, checkpoints some steps late, dies, and goes on after a checkpoint, or tries to."""
        for _ in range(number):
            step = self.model.tables.step + 1
            assembly = self.assembly(self.both(lambda store: view_of(store, 1)), 1, True)
            self.both(lambda store, a=assembly: store.commit_assembly(a))
            self.both(lambda store, s=step: store.commit(s, max(0, s - behind)))
        self.both(lambda store: store.report(Progress(step=step + 1, policy_version=step)))
        self.both(lambda store: store.resume(max(0, step - resumed)))

    # -- by hand

    @rule(which=st.integers(0, 40))
    def drop_group(self, which: int) -> None:
        self.both(lambda store: store.drop_group(self.pick(which)))

    @rule(which=WHICH)
    def drop_request(self, which: int) -> None:
        self.both(lambda store: store.drop_request(self.pick(which)))

    @rule(num_bad=st.integers(0, 1), num_high=st.integers(0, 1), is_newest=st.booleans())
    def edit_tables(self, num_bad: int, num_high: int, is_newest: bool) -> None:
        before = self.model.tables if is_newest else replace(self.model.tables, edits=self.model.tables.edits + 1)
        after = replace(before, bad=before.bad[num_bad:], high=before.high[num_high:])
        assert self.both(lambda store: store.edit_tables(before, after)) is is_newest

    @rule(size=st.integers(1, 3), is_newest=st.booleans())
    def demand_a_round(self, size: int, is_newest: bool) -> None:
        newest = self.model.tables
        before = newest if is_newest else replace(newest, edits=newest.edits + 1)
        rounds = 2 if before.demand is None else before.demand.rounds + 1
        demand = Demand(before.step + 1, rounds=rounds, most=9, found=0, wanted=size, num_fresh=rounds * size)
        extra = ExtraRound(step=before.step + 1, round=rounds, first=before.num_extra, size=size)
        after = replace(
            before,
            demand=demand,
            num_extra=before.num_extra + size,
            extra_rounds=(*before.extra_rounds, extra),
        )
        assert self.both(lambda store: store.edit_tables(before, after)) is is_newest

    # -- assembly

    @rule(size=st.integers(1, 3), keep=st.integers(0, 3), reuse=st.booleans(), hold=st.booleans())
    def assemble(self, size: int, keep: int, reuse: bool, hold: bool) -> None:
        assembly = self.assembly(self.both(lambda store: view_of(store, size)), keep, reuse)
        if hold:
            unused = [i for i in (*assembly.fresh, *assembly.stale) if i not in assembly.batch.group_ids]
            assembly = replace(assembly, batch=replace(assembly.batch, untrained=tuple(unused)))
        assert self.both(lambda store: store.commit_assembly(assembly)) is True
        assert self.both(lambda store: store.commit_assembly(assembly)) is False

    @rule(wrong=st.sampled_from(["early", "late", "fresh", "reevaluated", "edited"]), which=WHICH)
    def break_a_fence(self, wrong: str, which: int) -> None:
        view = self.both(lambda store: view_of(store, 3))
        good = self.assembly(view, 3, False)
        unknown = (*good.fresh, self.pick(which)) if wrong == "fresh" else good.fresh
        again = (*good.reevaluated, self.pick(which)) if wrong == "reevaluated" else good.reevaluated
        there = {group_id for group_id, _ in self.model.fresh} | {*self.model.reevaluated}
        if wrong in ("fresh", "reevaluated") and self.pick(which) in there:
            return
        step = good.step + {"early": -1, "late": 1}.get(wrong, 0)
        before = replace(good.before, edits=good.before.edits + (wrong == "edited"))
        broken = replace(good, step=step, fresh=unknown, reevaluated=again, before=before)
        assert self.both(lambda store: store.commit_assembly(broken)) is False

    def assembly(self, view: View, keep: int, reuse: bool) -> Assembly:
        step, before = view.tables.step + 1, view.tables
        fresh = list(view.fresh)
        wrong = [record for record in fresh if sum(record.rewards) == 0]
        bad = {entry.prompt_id: entry for entry in before.bad}
        bad.update((r.prompt_id, HardPrompt(prompt_id=r.prompt_id, birth=step, mu=0.0)) for r in wrong)
        stay = dict(list(bad.items())[-3:])
        had = {entry.prompt_id for entry in before.bad}
        new = self.requests_of(r for r in wrong if r.prompt_id in stay.keys() - had)
        reused = [stat.group_id for stat in before.high[:1]] if reuse else []
        return an_assembly(
            step=step,
            fresh=[record.group_id for record in fresh],
            reevaluated=[record.group_id for record in view.reevaluated],
            trained=[r.group_id for r in fresh[:keep]] + [r.group_id for r in view.reevaluated[:1]] + reused,
            before=before,
            bad=list(stay.values()),
            high=[*(s for s in before.high if s.birth > step - 3), *(r.stat(birth=step) for r in fresh[:1])],
            new_prompts=list({request.prompt.prompt_id: request.prompt for request in new}.values()),
            num_stale=len(view.stale),
            stale=list(self.model.held_stale),
            fresh_bytes=sum(record.num_bytes for record in fresh),
            success_counts=b"" if step % 5 == 4 else b"success counts of step %d" % step,
        )

    def requests_of(self, records: Iterable[GroupRecord]) -> list[RolloutRequest]:
        """What these fresh groups answer."""
        group_ids = [record.group_id for record in records]
        return [request for request in self.both(lambda store: store.fresh_requests(group_ids)) if request is not None]

    @rule(round_=st.integers(0, 6), behind=st.integers(-1, 3))
    def keep_selector_state(self, round_: int, behind: int) -> None:
        state = SelectorState(round=round_, through=max(0, self.model.tables.step - behind), data=b"state %d" % round_)
        self.both(lambda store: store.keep_selector_state(state))

    @rule(
        number=st.integers(1, 3), version=VERSIONS, twice=st.booleans(), reverse=st.booleans(), hold=st.booleans(),
        taken=st.none() | WHICH,
    )  # fmt: skip
    def replace_stale(
        self, number: int, version: int, twice: bool, reverse: bool, hold: bool, taken: int | None
    ) -> None:
        """`taken`: the first of them is to get an id that somebody else has, or had."""
        records = self.both(lambda store: view_of(store, number)).fresh[:: -1 if reverse else 1]
        requests = self.requests_of(records)
        again = [
            msgspec.structs.replace(r, request_id=repeated_id(r.request_id), min_version=version) for r in requests
        ]
        if again and taken is not None and self.pick(taken) not in [r.request_id for r in requests]:
            again[0] = msgspec.structs.replace(again[0], request_id=self.pick(taken))
        results = [record.result(None, "stale", 1) for record in records]
        items = [Replacement(result=result, request=request) for result, request in zip(results, again, strict=True)]
        for _ in range(1 + twice):
            self.both(lambda store: store.replace_stale(items, hold=hold))
        self.remember(again)

    @rule(behind=st.integers(0, 2), unsaved=st.integers(0, 3))
    def commit(self, behind: int, unsaved: int) -> None:
        step = max(0, self.model.tables.step - behind)
        self.both(lambda store: store.commit(step, max(0, step - unsaved)))

    @rule(behind=st.integers(-1, 4))
    def resume(self, behind: int) -> None:
        step = max(0, self.model.tables.step - behind)
        self.both(lambda store: store.resume(step))

    @rule(number=st.sampled_from([1, 3, 21]), every=st.integers(1, 3))
    def train(self, number: int, every: int) -> None:
        """So many steps with a fresh group each: windows and memories that last for many steps come to their ends."""
        for _ in range(number):
            step = self.model.tables.step + 1
            request = make_request(prompt_id="t", request_id=f"t-{step}", step=step)
            group = incoming(answer(request, "11000000"))
            self.both(lambda store, r=request: store.enqueue([r], cursor=None))
            self.both(lambda store, g=group: store.push([g]))
            assembly = self.assembly(self.both(lambda store: view_of(store, 1)), 1, True)
            self.both(lambda store, a=assembly: store.commit_assembly(a))
            self.both(lambda store, s=step: store.commit(s, s - s % every))
            self.remember([request])

    # -- looking, and the whole state

    @rule(step=st.integers(0, 9), version=st.integers(0, 9))
    def report(self, step: int, version: int) -> None:
        self.both(lambda store: store.report(Progress(step=step, policy_version=version)))

    @rule()
    def save(self) -> None:
        image = self.redis.image()
        self.saved = image, [(group_id, self.redis.frames([group_id])[0] or b"") for group_id in image.references]

    @rule(seldom=st.booleans())
    def restore(self, seldom: bool) -> None:
        if seldom:
            return  # or else runs would never come far
        if self.saved is None:
            self.save()
        assert self.saved is not None
        image, frames = self.saved
        self.redis.restore(image, iter(frames))
        self.model = self.model.restored(image, frames)

    @rule(size=st.integers(0, 4))
    def look(self, size: int) -> None:
        assert self.redis.image() == self.model.image()
        self.both(lambda store: view_of(store, size))
        ready = self.both(lambda store: [store.readiness(step) for step in range(5)])
        assert self.both(lambda store: [store.read_step(step, 1).ready for step in range(5)]) == ready
        self.both(lambda store: [store.success_counts(after, size) for after in range(self.model.tables.step + 1)])
        self.both(lambda store: store.selector_state())
        self.both(lambda store: [store.batch(step) for step in range(self.model.tables.step + 2)])
        ids = [*self.asked, "never"]
        found = [self.model.records.get(i) for i in ids]
        assert self.redis.records(ids) == found
        assert self.redis.frames(ids) == [self.model.frames.get(i) for i in ids]
        page = (len(self.model.compositions), self.model.compositions[::-1][size : size + 2])
        assert self.redis.compositions(size, 2) == page
        assert self.redis.progress() == self.model.progress
        assert (self.redis.tables(), self.redis.bad_prompts()) == (self.model.tables, self.model.bad_prompts)
        assert self.redis.counters() == self.model.counters

    @rule()
    def status(self) -> None:
        self.model.now = self.clock.seconds
        self.model.expire()
        status = self.redis.status()
        assert {worker: leases.leased for worker, leases in status.workers.items()} == self.model.workers()
        for worker, leases in status.workers.items():
            silent_s = self.clock.seconds - self.model.heard[worker]
            assert silent_s <= leases.silent_s < silent_s + 30
        counts = held_by_model(self.model)
        assert status.queued == {purpose: len(ids) for purpose, ids in counts["queued"].items()}
        assert sum(status.leased.values()) == len(counts["leased"])
        assert (status.fresh_ready, status.reevaluated_ready) == (len(counts["fresh"]), len(counts["reevaluated"]))
        assert (status.num_bad, status.num_high) == (len(self.model.tables.bad), len(self.model.tables.high))
        tables = self.model.tables
        wanted = (tables.demand.sentence if tables.demand else "", tables.extra_rounds)
        assert (status.demand, status.extra_rounds) == wanted
        assert status.evaluations == {label: len(ids) for label, ids in counts["evaluated"].items()}
        assert (status.num_bytes, status.reevaluation_rounds) == (counts["bytes"], counts["rounds"])
        assert status.batches == self.model.compositions[-8:]
        numbers = {key: number for key, number in counts["numbers"].items() if key != "table_edits"}
        assert {key: getattr(status, STATUS_NAME.get(key, key)) for key in numbers} == numbers
        assert status.last_failure == self.model.last_failure

    @invariant()
    def all_hold_the_same(self) -> None:
        expected = held_by_model(self.model)
        assert held_by_redis(self.link, self.run_name) == expected

    @invariant()
    def everything_fits_together(self) -> None:
        broken = violations(self.redis.audit(), AlgorithmConfig(bad_capacity=3))
        # Assemblies written by hand say nothing of bytes, and may keep a prompt twice in B_high.
        assert [b for b in broken if b.invariant != "high" and "bytes, but the batch records 0" not in b.detail] == []


STATUS_NAME = {"assembled": "assembled_step", "committed": "committed_step", "checkpointed": "checkpointed_step"}


@pytest.mark.parametrize("in_step_order", [False, True])
def test_the_store_answers_and_holds_what_the_model_says(redis_url: str, in_step_order: bool) -> None:
    class Machine(TwoBuffers):
        link = RedisLink(redis_url)

    Machine.in_step_order = in_step_order
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES or FEW,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=PHASES,
            derandomize=not EXAMPLES,
            report_multiple_bugs=False,
            print_blob=True,
        ),
    )
    Machine.link.client.close()
