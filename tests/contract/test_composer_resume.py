"""A run of every composer through the service, on every store: deterministic, and the same when it is cut in the
middle by a snapshot and a restore. Composers keep nothing, so that what they remember is in the buffer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.methods import COMPOSER
from bapo.algorithms.randomness import rng_for
from bapo.config.load import dump_toml
from bapo.config.tree import Config
from bapo.core.codec import pack_batch_frames, pack_group, unpack_batch, unpack_pull
from bapo.core.types import Batch, Progress, Prompt, Purpose, RolloutRequest
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.recording import read_recording
from bapo.whatif.simulation import as_recorded, compare, what_if
from buffer_service.assembly import in_step_order
from buffer_service.metrics import BufferMetrics
from buffer_service.service import BufferService
from buffer_service.snapshot import read_snapshot
from buffer_service.store.invariants import violations
from buffer_service.store.redis.store import RedisStore
from services.scheduler.plan import FreshPlan
from tests.support.buffer import answer, new_store, push_body
from tests.support.factories import make_prompt
from tests.support.methods import options_for

PROMPTS = [make_prompt(prompt_id=f"p{i}") for i in range(9)]
EXPERTS = ("luffy", "relift")
OPTIONS: dict[str, Any] = {
    "share": 0.5, "per_prompt": 8, "num_rows": 4, "capacity": 12, "sft_items": 2, "window": 2, "last_step": 7,
}  # fmt: skip
STEPS = 8
OWN = {"x3_policy": "youngest"}
"""Our addition to `bapo`."""
RUNS = [*((name, {}) for name in COMPOSER.names()), ("bapo", OWN)]


def config_of(name: str, extra: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """B = 4, G = 4, max_steps_ahead = 0."""
    algorithm = {
        "composer": name, "batch_size": 4, "group_size": 4, "num_experts": int(name in EXPERTS), "max_rounds": 3,
        "online_filter": "range" if name in ("bapo", "dapo") else "none",
        "options": options_for(COMPOSER, name, **OPTIONS), **extra,
    }  # fmt: skip
    tree = {
        "algorithm": algorithm,
        "learner": {"minibatch_size": 2},
        "cadence": {"weight_sync_interval": 2, "reevaluation_interval": 2, "max_steps_ahead": 0},
    }
    return Config.model_validate(tree)


class Peers:
    """Scheduler and worker in one: they ask for what is missing, and answer it by the request's id alone."""

    def __init__(self, store: RedisStore, config: Config) -> None:
        self.store, self.config = store, config
        self.composer = load_composer(config.algorithm)
        self.service = BufferService(store, self.composer, config, BufferMetrics(Telemetry(), config))
        self.plan = FreshPlan(config, PROMPTS)
        self.batches: list[Batch] = []

    def step(self, step: int) -> Any:
        """What identifies the batch of a step: items, rows and tokens."""
        self.service.store.report(Progress(step=step, policy_version=step))
        if step % self.config.cadence.reevaluation_interval == 0:
            self._reevaluate(step)
        for _ in range(self.config.algorithm.max_rounds):
            status = replace(self.service.inspection.status(), step=step)
            while requests := self.plan.due(status):
                spares = status.fresh_spares + self.plan.num_spares(status)
                self.service.enqueue(requests, status.cursor + len(requests), spares)
                status = replace(self.service.inspection.status(), step=step)
            for extra in status.extra_rounds:
                self.service.enqueue(self.plan.extra_requests(extra), None, None)
            self._work(step)
            record = self.service.batch(step)
            if record is not None:
                break
        assert record is not None, self.service.waiting_for(step)[0]
        assert violations(self.store.audit(), self.config.algorithm) == []
        header, frames = unpack_pull(self.service.pulled(record))
        found = self.service.store.frames([frame.group_id for frame in frames])
        batch = unpack_batch(pack_batch_frames(header, [frame for frame in found if frame is not None]))
        self.batches.append(batch)
        rows = [
            (e.origin, e.kind, e.group.group_id, e.group.rewards.tolist(), e.replayed_rows.tolist())
            for e in batch.entries
        ]
        return rows, [
            (result.group_id, result.reason, result.item, result.rows, result.birth) for result in batch.results
        ]

    def _reevaluate(self, step: int) -> None:
        hard = self.service.store.tables().bad
        prompts = self.store.bad_prompts()
        rng = lambda purpose: rng_for(self.config.run.seed, step, purpose)  # noqa: E731
        asked = self.composer.hard_prompts_to_ask(hard, step, self.plan.prompt_ids(step), rng)
        requests = [self._request(step, index, prompts[name]) for index, name in enumerate(asked)]
        self.service.enqueue_round(step, requests)

    def _request(self, step: int, index: int, prompt: Prompt) -> RolloutRequest:
        return RolloutRequest(
            request_id=f"reevaluate-{step}-{index}", prompt=prompt,
            group_size=self.config.algorithm.group_size, purpose=Purpose.REEVALUATE, step=step,
            min_version=step,
        )  # fmt: skip

    def _work(self, step: int) -> None:
        requests = self.service.claim("w", 99, step)
        frames = [pack_group(self._answer(request, step)) for request in requests]
        if frames:
            self.service.push(push_body(self.service, frames))

    def _answer(self, request: RolloutRequest, version: int) -> Any:
        draw = random.Random(request.request_id)
        num_experts = self.config.algorithm.num_experts
        k = draw.choice([0, 0, 1, 2, 4])
        rewards = "".join("1" if i < k else "0" for i in range(request.group_size - num_experts)) + "1" * num_experts
        group = answer(request, rewards, version)
        if not num_experts:
            return group
        outcomes = group.outcomes.copy()
        outcomes[-1] = 2
        outcomes[0] = draw.choice([0, 0, 1])  # cut off at the length limit
        return replace(group, outcomes=outcomes)


@pytest.mark.parametrize(("name", "extra"), RUNS)
def test_a_run_that_is_restored_in_the_middle_has_the_batches_of_one_that_is_not(
    name: str, extra: dict[str, Any], make_store: Callable[..., RedisStore]
) -> None:
    config = config_of(name, extra)
    whole = Peers(make_store(run="whole", in_step_order=in_step_order(config)), config)
    expected = [whole.step(step) for step in range(1, STEPS + 1)]
    first = Peers(make_store(run="first", in_step_order=in_step_order(config)), config)
    found = [first.step(step) for step in range(1, 5)]
    snapshot = b"".join([piece for pieces in read_snapshot(first.service.store) for piece in pieces])
    found_without = [first.step(5)]
    second = Peers(make_store(run="second", in_step_order=in_step_order(config)), config)
    second.service.restore(snapshot)
    second.service.resume(4)
    found += [second.step(step) for step in range(5, STEPS + 1)]
    assert found == expected
    assert found_without == expected[4:5]


@pytest.mark.parametrize(("name", "extra"), RUNS)
def test_the_records_of_a_run_give_its_batches_again(
    redis_url: str, name: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(name, extra)
    peers = Peers(new_store(redis_url, in_step_order=in_step_order(config)), config)
    directory = RunDirectory.create(tmp_path / "run", dump_toml(config))
    for step in range(1, STEPS + 1):
        peers.step(step)
        batch = peers.batches[-1]
        directory.write_groups(step, batch.results)
        directory.append_metrics({"step": step, "reward_mean": batch.r_tot, **batch.facts})
    recording = read_recording(directory)
    assert compare(recording, as_recorded(recording)).sentence == "reproduces the recorded batches: 8 of 8 steps"
    simulated = what_if(recording, config, within=10)
    assert [step.decision for step in simulated] == [step.decision for step in as_recorded(recording)]


def test_every_way_of_training_is_reached_in_these_runs(make_store: Callable[..., RedisStore]) -> None:
    reached = set()
    for number, (name, extra) in enumerate(RUNS):
        config = config_of(name, extra)
        peers = Peers(make_store(run=f"{name}-{number}", in_step_order=in_step_order(config)), config)
        for step in range(1, STEPS + 1):
            reached |= {(name, reason) for _, reason, *_ in peers.step(step)[1]}
        rounds = [line["rounds"] for line in peers.service.store.compositions(0, STEPS)[1]]
        assert (max(rounds) > 1) is (name == "dapo")
    want = {("dapo", "surplus"), ("repo", "replayed"), ("arpo", "replayed"), ("relift", "supervised")}
    assert reached >= want | {("remix", "reused"), ("bapo", "reused"), ("bapo", "youngest")}


def test_a_step_that_is_filled_by_groups_sampled_ahead_still_has_its_round_asked_for(
    make_store: Callable[..., RedisStore],
) -> None:
    config = config_of("dapo")
    config = config.model_copy(update={"cadence": config.cadence.model_copy(update={"max_steps_ahead": 1})})
    peers = Peers(make_store(in_step_order=False), config)
    requests = peers.plan.due(peers.service.inspection.status())[:8]
    assert [request.step for request in requests] == [1] * 4 + [2] * 4
    peers.service.enqueue(requests, 8, 0)
    peers.service.claim("w", 9, 1)
    rewards = ["0000"] * 4 + ["1000"] * 4
    groups = [answer(request, found) for request, found in zip(requests, rewards, strict=True)]
    peers.service.push(push_body(peers.service, [pack_group(group) for group in groups]))
    assert peers.service.batch(1) is None
    batch = peers.service.batch(1)
    assert batch is not None
    assert batch.group_ids == tuple(request.request_id for request in requests[4:])
    (extra_round,) = peers.service.inspection.status().extra_rounds
    extra = peers.plan.extra_requests(extra_round)
    assert peers.service.enqueue(extra, None, None) == 4, "they take the place of what was used ahead"
    peers.service.claim("w", 9, 1)
    peers.service.push(push_body(peers.service, [pack_group(answer(request, "1000")) for request in extra]))
    assert peers.service.batch(2) is not None
    assert peers.service.inspection.status().extra_rounds == ()


def test_a_demand_survives_a_snapshot_and_is_asked_once(make_store: Callable[..., RedisStore]) -> None:
    config = config_of("dapo")
    peers = Peers(make_store(in_step_order=True), config)
    requests = peers.plan.due(peers.service.inspection.status())[:4]
    peers.service.enqueue(requests, 4, None)
    peers.service.store.report(Progress(step=1, policy_version=1))
    peers.service.claim("w", 9, 1)
    peers.service.push(push_body(peers.service, [pack_group(answer(request, "0000")) for request in requests]))
    assert peers.service.batch(1) is None
    assert peers.service.batch(1) is None, "it is not asked again before the round is there"
    status = peers.service.inspection.status()
    assert status.demand == "round 2 of 3: 0/4 informative groups"
    assert "round 2 of 3: 0/4 informative groups; its groups are not requested yet" in peers.service.waiting_for(1)[0]
    (extra_round,) = status.extra_rounds
    peers.service.restore(b"".join(piece for pieces in read_snapshot(peers.service.store) for piece in pieces))
    assert peers.service.inspection.status().extra_rounds == status.extra_rounds
    extra = peers.plan.extra_requests(extra_round)
    assert [request.step for request in extra] == [1] * 4
    assert (peers.service.enqueue(extra, None, None), peers.service.enqueue(extra, None, None)) == (4, 0)
    peers.service.claim("w", 9, 1)
    peers.service.push(push_body(peers.service, [pack_group(answer(request, "1000")) for request in extra]))
    batch = peers.service.batch(1)
    assert batch is not None
    assert batch.group_ids == tuple(request.request_id for request in extra)
    after = peers.service.store.tables()
    assert (after.demand, after.num_extra, after.extra_rounds) == (None, 4, ())
