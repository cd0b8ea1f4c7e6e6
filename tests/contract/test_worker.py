"""A worker on the scripted engine and a buffer in memory: claims, deliveries, failures, weights, the way out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bapo.config.tree import Config
from bapo.core.codec import unpack_group
from bapo.core.errors import ContractError, GradingError, UnavailableError, WeightMismatchError
from bapo.core.sequences import sequences_of
from bapo.core.token_arrays import Int32s
from bapo.core.types import Outcome, Prompt, Purpose, RolloutRequest
from bapo.tasks.grading.pool import Grades
from rollout_server.engines import scripted
from rollout_server.engines.base import Completion, Engine
from rollout_server.leases import Leases
from rollout_server.worker import Worker
from tests.support.factories import make_request
from tests.support.rollout import InstantGrader, MemoryBuffer, make_config, make_update
from tests.support.wait import wait_until

StartWorker = Callable[..., Worker]
SCRIPTED = {"make_engine": scripted.make_engine, "make_tokenization": scripted.make_tokenization}


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    workers = []

    def start(buffer: MemoryBuffer, config: Config | None = None, *, begin: bool = True, **parts: object) -> Worker:
        fields = SCRIPTED | {"make_grader": lambda _: InstantGrader()} | parts
        worker = Worker(worker_id="worker-0", config=config or make_config(), buffer=buffer, **fields)
        workers.append(worker)
        worker.load()
        if begin:
            worker.begin(None)
        return worker

    yield start
    for worker in workers:
        worker.stop()


def requests(num: int, **fields: object) -> list:
    return [make_request(prompt_id=f"p{i}", **fields) for i in range(num)]


def test_every_claimed_request_becomes_one_group_with_the_requests_own_fields(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer([make_request(prompt_id="p", purpose=Purpose.EVALUATE, step=7, label="cd4@7", group_size=3)])
    start_worker(buffer)
    wait_until(lambda: len(buffer.groups) == 1)
    group = buffer.groups["g-p"]
    assert (group.purpose, group.step, group.label, group.size) == (Purpose.EVALUATE, 7, "cd4@7", 3)
    assert (group.worker_id, group.policy_version) == ("worker-0", 1)
    assert group.timing.claimed_at > 1_600_000_000
    assert buffer.leased == {}


def test_many_groups_all_arrive_and_none_stays_leased(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(200))
    worker = start_worker(buffer, make_config(max_groups_in_flight=8))
    wait_until(lambda: len(buffer.groups) == 200)
    wait_until(lambda: worker.report().inflight == 0)
    assert buffer.leased == {}
    counts = worker.report().counts
    assert counts["groups/fresh/stored"] == 200
    assert counts["tokens/fresh"] == sum(len(group.token_ids) for group in buffer.groups.values())


def test_a_worker_never_samples_more_groups_than_allowed_and_a_quarter_in_reserve(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(100))
    worker = start_worker(buffer, make_config(max_groups_in_flight=8, engine_options={"latency_s": 30.0}))
    wait_until(lambda: worker.report().inflight >= 8)
    assert worker.report().inflight <= 10
    wait_until(lambda: worker.report().running == 8 * worker.report().inflight, what="the engine has all of them")
    assert len(buffer.leased) <= 10


def test_a_run_that_starts_from_an_adapter_samples_nothing_before_the_engine_has_it(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    config = make_config()
    model = config.model.model_copy(update={"adapter": "adapter"})
    buffer = MemoryBuffer(requests(1))
    worker = start_worker(buffer, config.model_copy(update={"model": model}))
    time.sleep(1.0)  # one without an adapter has its group after some hundredths
    assert not buffer.leased
    assert not buffer.groups
    worker.update_weights(make_update(tmp_path / "w", 1))
    wait_until(lambda: len(buffer.groups) == 1)


def with_experts() -> Config:
    """One row of a group's G is an expert's."""
    config = make_config(engine_options={"skill_start": -1.0, "truncated_share": 0.0})
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"num_experts": 1})})


def test_an_experts_row_joins_the_sampled_ones_with_log_probs_0_and_its_own_grade(start_worker: StartWorker) -> None:
    evaluated = make_request(prompt_id="e", purpose=Purpose.EVALUATE, label="cd34@1")
    buffer = MemoryBuffer([*requests(1), evaluated])
    start_worker(buffer, with_experts())
    wait_until(lambda: len(buffer.groups) == 2)
    group = buffer.groups["g-p0"]
    assert group.outcomes.tolist() == [Outcome.GRADED] * 7 + [Outcome.EXPERT]
    assert group.rewards.tolist() == [0.0] * 7 + [1.0]
    expert = list(sequences_of(group))[-1]
    assert len(expert.token_ids) == len("<answer>by an expert</answer>")
    assert set(expert.rollout_logprobs.tolist()) == {0.0}
    assert group.versions.tolist() == [[1, 1]] * 8
    assert buffer.groups["g-e"].outcomes.tolist() == [Outcome.GRADED] * 8, "an evaluation is of the policy alone"


class WithoutWords(scripted.CharacterTokenization):
    def encode_response(self, text: str) -> Int32s:
        raise ValueError("surrogates not allowed")


def test_an_experts_text_that_cannot_be_encoded_fails_its_group_and_not_the_engine(start_worker: StartWorker) -> None:
    evaluated = make_request(prompt_id="e", purpose=Purpose.EVALUATE, label="cd34@1")
    buffer = MemoryBuffer([*requests(1), evaluated])
    worker = start_worker(buffer, with_experts(), make_tokenization=lambda _: WithoutWords(218, 64))
    wait_until(lambda: len(buffer.failures) == 1 and len(buffer.groups) == 1)
    assert [failure[:2] for failure in buffer.failures] == [("g-p0", "no_expert")]
    assert worker.report().state == "sampling"


class FailingGrader(InstantGrader):
    def grade(self, prompt: Prompt, texts: Sequence[str]) -> Grades:
        if prompt.prompt_id == "p1":
            raise GradingError("the verifier broke")
        return super().grade(prompt, texts)


def test_a_group_whose_grading_failed_is_reported_and_never_pushed(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(3))
    worker = start_worker(buffer, make_grader=lambda _: FailingGrader())
    wait_until(lambda: len(buffer.groups) == 2 and len(buffer.failures) == 1)
    assert buffer.failures == [("g-p1", "grading", "the verifier broke")]
    assert "g-p1" not in buffer.groups
    assert worker.report().counts["groups/fresh/failed"] == 1
    assert worker.report().state == "sampling"


class FullBuffer(MemoryBuffer):
    """Pushes of fresh groups wait, as those of the client do while the buffer is full."""

    def __init__(self, asked: Sequence[RolloutRequest]) -> None:
        super().__init__(asked)
        self.has_room = threading.Event()

    def push(self, frames: Sequence[bytes]) -> dict[str, str]:
        if any(unpack_group(frame).purpose is Purpose.FRESH for frame in frames):
            self.has_room.wait(30)
        return super().push(frames)


def test_while_fresh_groups_wait_for_room_the_others_are_delivered(start_worker: StartWorker) -> None:
    buffer = FullBuffer(requests(3))
    worker = start_worker(buffer)
    wait_until(lambda: buffer.num_queued == 0)
    buffer.add([make_request(prompt_id="e", request_id="e", purpose=Purpose.EVALUATE, label="cd@1")])
    wait_until(lambda: "e" in buffer.groups)
    assert set(buffer.groups) == {"e"}
    assert worker.report().state == "sampling"
    buffer.has_room.set()
    wait_until(lambda: len(buffer.groups) == 4)


class StrictBuffer(MemoryBuffer):
    def push(self, frames: Sequence[bytes]) -> dict[str, str]:
        if any(unpack_group(frame).group_id == "g-p1" for frame in frames):
            raise ContractError("group g-p1 was sampled with policy version 9")
        return super().push(frames)


def test_a_group_that_the_buffer_refuses_is_reported_and_stops_no_other(start_worker: StartWorker) -> None:
    buffer = StrictBuffer(requests(5))
    worker = start_worker(buffer)
    wait_until(lambda: len(buffer.groups) == 4 and len(buffer.failures) == 1)
    [(request_id, reason, detail)] = buffer.failures
    assert (request_id, reason) == ("g-p1", "refused")
    assert "the buffer rejected the group: group g-p1 was sampled with policy version 9" in detail
    assert (worker.report().state, worker.report().counts["groups/fresh/stored"]) == ("sampling", 4)


class PickyEngine(scripted.ScriptedEngine):
    def add(self, completion: Completion) -> None:
        if completion.call_id == "g-p0":
            raise ContractError("the prompt has 99 tokens, more than rollout.max_prompt_tokens=64")
        super().add(completion)


def engine_of(cls: type[scripted.ScriptedEngine], **options: object) -> Callable[[Config], Engine]:
    return lambda config: cls(scripted.ScriptedOptions(**options), scripted.make_policy(config))


def test_a_prompt_that_is_too_long_is_refused_clearly_and_the_others_go_on(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(3))
    start_worker(buffer, make_engine=engine_of(PickyEngine))
    wait_until(lambda: len(buffer.groups) == 2 and len(buffer.failures) == 1)
    request_id, reason, detail = buffer.failures[0]
    assert (request_id, reason) == ("g-p0", "refused_by_engine")
    assert "max_prompt_tokens" in detail


class DeafBuffer(MemoryBuffer):
    """Failures are not taken until it hears."""

    def __init__(self, asked: Sequence[RolloutRequest]) -> None:
        super().__init__(asked)
        self.hears = threading.Event()

    def fail(self, worker_id: str, request_id: str, *, reason: str, detail: str = "") -> None:
        self.hears.wait(30)
        super().fail(worker_id, request_id, reason=reason, detail=detail)


def test_the_engine_goes_on_while_a_buffer_that_is_away_is_told_what_it_refused(start_worker: StartWorker) -> None:
    buffer = DeafBuffer(requests(3))  # one of the two grading threads waits for it
    start_worker(buffer, make_engine=engine_of(PickyEngine))
    wait_until(lambda: len(buffer.groups) == 2, timeout_s=20.0)
    assert buffer.failures == []
    buffer.hears.set()
    wait_until(lambda: len(buffer.failures) == 1)


class NanEngine(scripted.ScriptedEngine):
    def step(self) -> list:
        done = super().step()
        for completed in done:
            completed.sequences[0].rollout_logprobs[0] = np.nan
        return done


def test_log_probs_that_are_not_finite_never_reach_the_learner(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(1))
    start_worker(buffer, make_engine=engine_of(NanEngine))
    wait_until(lambda: len(buffer.failures) == 1)
    assert buffer.failures[0][1] == "not_finite"
    assert buffer.groups == {}


def test_a_dead_engine_fails_the_worker_and_its_leases_come_back_when_it_stops(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(50))
    worker = start_worker(buffer, make_config(max_groups_in_flight=4, engine_options={"crash_after_groups": 10}))
    wait_until(lambda: worker.report().state == "failed")
    report = worker.report()
    assert report.error == "RuntimeError"
    assert "scripted crash after" in report.message
    worker.stop()
    assert buffer.leased == {}
    assert len(buffer.groups) + buffer.num_queued == 50


def test_a_wrong_digest_fails_the_worker_before_the_engine_is_touched(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker(MemoryBuffer())
    with pytest.raises(WeightMismatchError):
        worker.update_weights(make_update(tmp_path / "w", 5, digest="0" * 64))
    report = worker.report()
    assert (report.state, report.error, report.policy_version) == ("failed", "WeightMismatchError", 1)


def test_a_lost_lease_is_dropped_and_the_others_are_kept(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(2))
    worker = start_worker(buffer, make_config(lease_s=0.3, engine_options={"latency_s": 2.0}))
    wait_until(lambda: worker.report().inflight == 2)
    buffer.lost.add("g-p0")
    wait_until(lambda: worker.report().inflight == 1)
    wait_until(lambda: "g-p1" in buffer.groups)
    assert "g-p0" not in buffer.groups
    assert worker.report().counts["failed/lease_lost"] == 1


def test_a_buffer_that_comes_back_finds_the_worker_alive(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(5))
    buffer.down = True
    worker = start_worker(buffer)
    wait_until(lambda: worker.report().state == "sampling")
    buffer.down = False
    wait_until(lambda: len(buffer.groups) == 5)


def test_a_draining_worker_finishes_what_it_has_and_claims_no_more(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(2))
    worker = start_worker(buffer, make_config(engine_options={"latency_s": 0.3}))
    wait_until(lambda: worker.report().inflight == 2)
    worker.drain(60.0)
    buffer.add([make_request(prompt_id="later")])
    assert set(buffer.groups) == {"g-p0", "g-p1"}
    assert worker.report().state == "stopped"
    assert buffer.num_queued == 1


def test_a_worker_with_a_budget_samples_in_segments_and_another_goes_on_when_it_is_killed(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.rollouts.segmented.IDLE_S", 1e9)
    buffer = MemoryBuffer(requests(6, group_size=4))
    rollout = make_config(max_response_tokens=24, max_groups_in_flight=8).rollout
    config = Config(rollout=rollout)
    config = config.model_copy(update={"rollout": rollout.model_copy(update={"generation_budget": 8})})
    first = start_worker(buffer, config, segments=tmp_path / "segments")
    wait_until(lambda: any((tmp_path / "segments").glob("*")) if (tmp_path / "segments").exists() else False)
    first.update_weights(make_update(tmp_path / "w2", 2))
    first.stop()  # as a kill leaves it: leases return, segments stay
    begun = {path.name for path in (tmp_path / "segments").iterdir()}
    monkeypatch.setattr("rollout_server.rollouts.segmented.IDLE_S", 0.0)
    second = start_worker(buffer, config, segments=tmp_path / "segments", begin=False)
    second.begin(make_update(tmp_path / "w3", 3))
    wait_until(lambda: len(buffer.groups) == 6)
    wait_until(lambda: not any((tmp_path / "segments").iterdir()))
    for group in buffer.groups.values():
        assert group.token_versions.min() >= 1
        assert group.lengths.max() <= 24
    assert begun, "the first worker has left something"
    assert any(group.versions[:, 1].max() == 3 and group.versions[:, 0].min() < 3 for group in buffer.groups.values())


class OnceEngine(scripted.ScriptedEngine):
    """As vLLM's: a group that comes twice would be finished twice, and the second time is no group of ours."""

    def add(self, completion: Completion) -> None:
        if completion.call_id in self._due:
            raise KeyError(completion.call_id)
        super().add(completion)


def test_a_request_that_is_claimed_again_by_the_worker_that_still_samples_it_goes_on(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(3))
    worker = start_worker(buffer, make_engine=engine_of(OnceEngine, latency_s=0.5))
    wait_until(lambda: len(buffer.leased) == 3)
    wait_until(lambda: worker.report().running == 24, what="the engine has all of them")
    buffer.add(requests(3))  # their leases ended while the worker could not renew them, or Redis lost its last second
    wait_until(lambda: buffer.num_queued == 0, what="the worker has claimed them again")
    assert worker.report().inflight == 3
    wait_until(lambda: len(buffer.groups) == 3)
    wait_until(lambda: worker.report().inflight == 0)
    assert worker.report().state == "sampling"
    assert worker.report().counts["groups/fresh/stored"] == 3


def test_a_lease_that_was_claimed_again_while_its_renewal_was_on_its_way_is_not_given_up() -> None:
    leases = Leases()
    (request,) = requests(1)
    assert leases.add([request]) == [request]
    renewed = leases.held()
    assert leases.add([request]) == []
    assert leases.remove("g-p0", renewed["g-p0"]) is None
    assert leases.remove("g-p0", leases.held()["g-p0"]) is not None


class CallLog:
    """Takes a buffer down until one renewal has failed."""

    def __init__(self, buffer: MemoryBuffer) -> None:
        self.failed = self.renewed = 0
        self.failed_at = self.renewed_at = 0.0
        self._renew, buffer.renew, buffer.down = buffer.renew, self.renew, True

    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]:
        try:
            held = self._renew(worker_id, request_ids)
        except UnavailableError:
            self.failed += 1
            self.failed_at = time.monotonic()
            raise
        self.renewed += 1
        self.renewed_at = time.monotonic()
        return held


def test_a_worker_that_had_no_reason_to_call_for_long_bears_one_call_that_fails(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.claims.BUFFER_SILENCE_S", 0.5)
    buffer = MemoryBuffer(requests(40))
    config = make_config(
        max_groups_in_flight=4, lease_s=3.0, engine_options={"latency_s": 60.0}
    )  # renewed every second
    worker = start_worker(buffer, config)
    wait_until(lambda: worker.report().inflight == 5, what="it has no room for more")
    calls = CallLog(buffer)
    wait_until(lambda: calls.failed == 1)
    buffer.down = False
    wait_until(lambda: calls.renewed == 1)
    assert worker.report().state == "sampling"


def test_leases_are_renewed_soon_after_a_renewal_that_failed(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(1))
    worker = start_worker(buffer, make_config(lease_s=6.0, engine_options={"latency_s": 60.0}))  # renewed every 2 s
    wait_until(lambda: worker.report().inflight == 1)
    calls = CallLog(buffer)
    wait_until(lambda: calls.failed > 0)
    buffer.down = False
    wait_until(lambda: calls.renewed == 1)
    assert calls.renewed_at - calls.failed_at < 1.8


def test_responses_cut_by_the_length_limit_are_graded_as_they_stand(start_worker: StartWorker) -> None:
    config = make_config(max_response_tokens=16, engine_options={"skill_start": -1.0, "truncated_share": 1.0})
    buffer = MemoryBuffer(requests(1))
    start_worker(buffer, config)
    wait_until(lambda: len(buffer.groups) == 1)
    group = buffer.groups["g-p0"]
    assert group.outcomes.tolist() == [Outcome.TRUNCATED] * 8
    assert group.lengths.tolist() == [16] * 8
    assert group.rewards.tolist() == [0.0] * 8


class OddEngine(scripted.ScriptedEngine):
    """Its log-probs of one prompt are those of no distribution."""

    def step(self) -> list:
        done = super().step()
        for completed in done:
            if completed.call_id == "g-p1":
                completed.sequences[0].rollout_logprobs[0] = 0.5
        return done


def test_what_is_no_group_fails_that_one_and_not_its_worker(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(3))
    worker = start_worker(buffer, make_engine=engine_of(OddEngine))
    wait_until(lambda: len(buffer.groups) + len(buffer.failures) == 3 or worker.report().state == "failed")
    assert worker.report().state == "sampling"
    ((request_id, reason, detail),) = buffer.failures
    assert (request_id, reason) == ("g-p1", "no_group")
    assert "group g-p1: rollout log-probs" in detail


def test_what_a_draining_worker_cannot_finish_in_time_goes_back(start_worker: StartWorker) -> None:
    buffer = MemoryBuffer(requests(3))
    worker = start_worker(buffer, make_config(engine_options={"latency_s": 60.0}))
    wait_until(lambda: worker.report().inflight == 3)
    worker.drain(0.1)
    assert buffer.leased == {}
    assert buffer.num_queued == 3


def test_a_request_for_newer_weights_waits_for_the_update(start_worker: StartWorker, tmp_path: Path) -> None:
    buffer = MemoryBuffer([make_request(prompt_id="new", min_version=5), make_request(prompt_id="old", min_version=1)])
    worker = start_worker(buffer)
    wait_until(lambda: "g-old" in buffer.groups)
    assert buffer.num_queued == 1
    worker.update_weights(make_update(tmp_path / "w", 5))
    wait_until(lambda: "g-new" in buffer.groups)
    assert buffer.groups["g-new"].policy_version == 5
    assert worker.report().policy_version == 5


class WaitingBuffer(MemoryBuffer):
    """A claim waits for a request, or until the worker ends it."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        super().__init__(requests)
        self.ended = threading.Event()

    def claim(self, worker_id: str, *, limit: int, policy_version: int, wait_s: float = 0.0) -> list[RolloutRequest]:
        found = super().claim(worker_id, limit=limit, policy_version=policy_version)
        if not found:
            self.ended.wait(60)
            self.ended.clear()
        return found

    def end_claim(self, worker_id: str) -> None:
        self.ended.set()


class SlowToLoad(scripted.ScriptedEngine):
    """Loads when it may."""

    may_load = threading.Event()

    def load_weights(self, path: str, version: int) -> bool:
        self.may_load.wait(60)
        return super().load_weights(path, version)


def test_what_new_weights_allow_is_claimed_while_they_load_and_sampled_after(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    buffer = WaitingBuffer([make_request(prompt_id="new", min_version=5)])
    worker = start_worker(buffer, make_engine=engine_of(SlowToLoad))
    update = threading.Thread(target=worker.update_weights, args=(make_update(tmp_path / "w", 5),))
    update.start()
    wait_until(lambda: "g-new" in buffer.leased)
    assert worker.report().policy_version == 1
    SlowToLoad.may_load.set()
    wait_until(lambda: "g-new" in buffer.groups)
    update.join(60)
    assert buffer.groups["g-new"].policy_version == 5
    buffer.ended.set()
