"""Those who run agents: what ends an episode, what a call may not ask, and which engine samples it."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bapo.config.agents import AgentsConfig
from bapo.core.errors import ContractError, GoneError, UnavailableError
from bapo.core.types import Prompt
from bapo.transport.episode_client import OpenedEpisode
from rollout_server.calls import Finished
from rollout_server.engines.base import Completed, Completion
from rollout_server.episodes.engine_calls import EngineCalls, ReadyWorker
from rollout_server.episodes.gate import CallError, digest_of, fields_of, is_retry, key_of
from rollout_server.episodes.parser_log import quiet_parsers
from services.agents.loop_watch import watch_loop
from services.agents.outcome import GRADE, Rollout
from services.agents.runner import AgentRunner
from tests.support.agents import sequence_of
from tests.support.factories import make_prompt


async def until(is_true: Callable[[], object]) -> None:
    """Polls: what is waited for happens in other threads."""
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Service:
    """Hands out episodes once, and notes how they end."""

    def __init__(self, num: int, lease_s: float = 60.0) -> None:
        self.waiting = [
            OpenedEpisode(
                episode_id=f"g/{i}", key=f"key-{i}", base_url="", lease_s=lease_s, purpose="fresh", prompt=make_prompt()
            )
            for i in range(num)
        ]
        self.ends: list[tuple[str, object]] = []
        self.beats: list[str] = []
        self.taken: list[int] = []

    def open(self, count: int, *, wait_s: float = 0.0) -> list[OpenedEpisode]:
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.taken.append(len(taken))
        if not taken:
            threading.Event().wait(0.01)
        return taken

    def heartbeat(self, key: str) -> None:
        self.beats.append(key)

    def reward(self, key: str, reward: float, facts: object) -> str:
        self.ends.append((key, (reward, facts) if facts else reward))
        return "ok"

    def grade(self, key: str, facts: object) -> str:
        self.ends.append((key, ("graded by the task", facts) if facts else "graded by the task"))
        return "ok"

    def ungraded(self, key: str, error: str) -> str:
        self.ends.append((key, error))
        if key == "key-gone":
            raise GoneError("ended")
        return "ungraded"

    def give_back(self, key: str, reason: str = "") -> None:
        self.ends.append((key, f"given back: {reason}"))


def runner_of(settings: AgentsConfig, rollout: Rollout, service: Any) -> AgentRunner:
    """A runner whose clients are the keys of their episodes."""
    return AgentRunner(settings, rollout, service, lambda episode: episode.key, lambda url: service)


def run(rollout: Rollout, service: Service, *, num: int, **settings: Any) -> list[tuple[str, object]]:
    """Run until `num` episodes have ended."""

    async def until_ended() -> None:
        runner = AgentRunner(
            AgentsConfig(**settings), rollout, service, lambda episode: episode.key, lambda url: service
        )  # type: ignore[arg-type, return-value]
        task = asyncio.create_task(runner.run())
        await until(lambda: len(service.ends) >= num)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(until_ended())
    return sorted(service.ends, key=str)


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [(sum([1 / 9] * 9), 1.0), (-1e-9, 0.0), (True, 1.0), (np.float32(0.5), 0.5), (np.True_, 1.0), (np.array([1]), 1.0)],
)
def test_a_number_is_a_reward_whatever_made_it_and_however_it_is_rounded(outcome: Any, reward: float) -> None:
    async def rollout(client: Any, prompt: Prompt) -> Any:
        return outcome

    assert run(rollout, Service(1), num=1) == [("key-0", reward)]


def test_a_cancellation_of_the_agents_own_is_ungraded() -> None:
    async def rollout(client: Any, prompt: Prompt) -> float:
        raise asyncio.CancelledError

    ((_, said),) = run(rollout, Service(1), num=1)
    assert "CancelledError" in str(said)


def test_the_reward_of_a_rollout_is_that_of_its_episode() -> None:
    async def rollout(client: Any, prompt: Prompt) -> float:
        return {"key-0": 0.5, "key-1": 1, "key-2": True}[client]

    assert run(rollout, Service(3), num=3) == [("key-0", 0.5), ("key-1", 1.0), ("key-2", 1.0)]


def test_a_rollout_may_leave_the_reward_to_the_task() -> None:
    async def rollout(client: Any, prompt: Prompt) -> Any:
        return GRADE

    assert run(rollout, Service(1), num=1) == [("key-0", "graded by the task")]


def test_a_rollout_may_return_facts_and_one_that_is_no_number_costs_no_episode() -> None:
    async def rollout(client: Any, prompt: Prompt) -> Any:
        facts = {"steps": 3, "is_done": True, "note": "text", "none": float("nan"), 7: 1.0}
        return {"key-0": 0.5, "key-1": GRADE}[client], facts

    known = {"steps": 3.0, "is_done": 1.0}
    assert run(rollout, Service(2), num=2) == [("key-0", (0.5, known)), ("key-1", ("graded by the task", known))]


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (None, "returned None"),
        (1.00001, "returned 1.00001, not a reward"),
        ((None, {"steps": 3}), "returned None"),
        (1.5, "returned 1.5, not a reward"),
        (float("nan"), "returned nan, not a reward"),
        ("1", "returned '1', not a reward"),
        (ValueError("no browser"), "ValueError: no browser (test_agents.py line "),
        (SystemExit("no display"), "SystemExit: no display (test_agents.py line "),
        (TimeoutError("of a page"), "TimeoutError: of a page (test_agents.py line "),
        (None, "None"),
    ],
)
def test_what_is_no_reward_is_ungraded_and_never_0(outcome: Any, message: str) -> None:
    async def rollout(client: Any, prompt: Prompt) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    ((key, said),) = run(rollout, Service(1), num=1)
    assert key == "key-0"
    assert message in str(said)


def test_an_episode_that_takes_too_long_is_ungraded() -> None:
    async def rollout(client: Any, prompt: Prompt) -> float:
        await asyncio.sleep(5)
        return 1.0

    ((_, said),) = run(rollout, Service(1), num=1, timeout_s=0.05)
    assert "agents.timeout_s = 0.05" in str(said)


def test_a_rollout_that_blocks_the_event_loop_is_named_while_it_does() -> None:
    said: list[str] = []

    async def blocks() -> None:
        watching = asyncio.create_task(watch_loop(blocked_s=0.05, say=said.append))
        await asyncio.sleep(0.1)
        threading.Event().wait(0.3)  # as a request without await
        await asyncio.sleep(0.1)
        watching.cancel()

    asyncio.run(blocks())
    (sentence,) = said
    assert sentence.startswith("test_agents.py line ")
    assert "has blocked the event loop" in sentence


def test_no_more_episodes_run_than_the_config_allows_and_the_next_follow() -> None:
    running, most = 0, 0

    async def rollout(client: Any, prompt: Prompt) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 0.0

    service = Service(7)
    assert len(run(rollout, service, num=7, episodes_per_process=3)) == 7
    assert most == 3


def test_a_rollout_that_works_without_the_model_shows_signs_of_life() -> None:
    async def rollout(client: Any, prompt: Prompt) -> float:
        await asyncio.sleep(0.2)
        return 0.0

    service = Service(1, lease_s=0.15)
    run(rollout, service, num=1)
    assert 2 <= len(service.beats) <= 4, "every third of the lease"


def test_a_runner_that_is_stopped_gives_its_episodes_back() -> None:
    started: list[str] = []

    async def rollout(client: Any, prompt: Prompt) -> float:
        started.append(prompt.prompt_id)
        await asyncio.sleep(60)
        return 1.0

    async def stopped() -> None:
        runner = runner_of(AgentsConfig(), rollout, service)
        task = asyncio.create_task(runner.run())
        await until(lambda: len(started) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    service = Service(2)
    asyncio.run(stopped())
    assert sorted(service.ends) == [("key-0", "given back: stopped"), ("key-1", "given back: stopped")]


def test_episodes_that_a_poll_brings_to_a_runner_that_stops_are_given_back() -> None:
    arrived, may_answer = threading.Event(), threading.Event()

    class Slow(Service):
        def open(self, count: int, *, wait_s: float = 0.0) -> list[OpenedEpisode]:
            arrived.set()
            may_answer.wait(5)
            return super().open(count, wait_s=wait_s)

    async def rollout(client: Any, prompt: Prompt) -> float:
        return 1.0

    async def stopped() -> None:
        task = asyncio.create_task(runner_of(AgentsConfig(), rollout, service).run())
        await until(arrived.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        may_answer.set()
        await asyncio.gather(task, return_exceptions=True)

    service = Slow(1)
    asyncio.run(stopped())
    assert service.ends == [("key-0", "given back: stopped")]


def test_episodes_that_arrive_in_the_moment_of_the_stop_are_given_back() -> None:
    may_answer = threading.Event()

    class Slow(Service):
        def open(self, count: int, *, wait_s: float = 0.0) -> list[OpenedEpisode]:
            may_answer.wait(5)
            return super().open(count, wait_s=wait_s)

    async def rollout(client: Any, prompt: Prompt) -> float:
        return 1.0

    async def stopped() -> None:
        runner = runner_of(AgentsConfig(), rollout, service)
        task = asyncio.create_task(runner.run())
        await until(lambda: runner._polling is not None)
        assert runner._polling is not None
        runner._polling.add_done_callback(lambda _: task.cancel())
        may_answer.set()
        await asyncio.gather(task, return_exceptions=True)

    service = Slow(1)
    asyncio.run(stopped())
    assert service.ends == [("key-0", "given back: stopped")]


# -- the gate


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer sk-1"}, "sk-1"),
        ({"x-api-key": "sk-2"}, "sk-2"),
        ({"authorization": "Basic abc"}, ""),
        ({}, ""),
    ],
)
def test_the_key_of_an_episode_comes_as_any_sdk_sends_it(headers: dict[str, str], key: str) -> None:
    assert key_of({"headers": [(k.encode(), v.encode()) for k, v in headers.items()]}) == key


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"n": 2}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"guided_json": {}, "min_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
    ],
)
def test_what_would_bias_training_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(CallError, match=f"^{name} = "):
        fields_of(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.2, "top_p": 0.1, "seed": 3, "presence_penalty": 1, "top_k": 5},
        {"tool_choice": "auto", "n": 1, "response_format": {"type": "text"}, "logit_bias": {}, "stop": ["\n"]},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "prompt": [1, 2]},
        {"tool_choice": {"type": "none"}, "text": {"format": {"type": "text"}}, "text2": None},
    ],
)
def test_what_has_no_effect_or_does_no_harm_is_accepted(fields: dict[str, Any]) -> None:
    assert fields_of(json.dumps(fields).encode()) == fields


def test_a_body_that_is_no_object_is_refused() -> None:
    for body, what in ((b"{", "not JSON"), (b"[1]", "not a JSON object")):
        with pytest.raises(CallError, match=what):
            fields_of(body)


def test_a_retry_is_what_the_sdk_says_and_the_same_request() -> None:
    def scope(count: str) -> dict[str, Any]:
        return {"headers": [(b"x-stainless-retry-count", count.encode())]}

    assert [is_retry(scope(count)) for count in ("0", "1", "x", "-1")] == [False, True, False, False]
    assert digest_of("/v1/messages", b"{}") == digest_of("/v1/messages", b"{}")
    assert digest_of("/v1/messages", b"{}") != digest_of("/v1/completions", b"{}")


def test_malformed_calls_of_tools_are_one_line_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[int] = []
    parser = logging.getLogger("vllm.tool_parsers.of_a_test")
    quiet_parsers(lambda: counted.append(1))
    for _ in range(3):
        try:
            json.loads("{")
        except ValueError:
            parser.exception("Error in extracting tool call from response.")
    parser.error("Detected Mistral tokenizer")
    first, other = caplog.text.splitlines()
    assert first.startswith("WARNING")
    assert "malformed call of a tool" in first
    assert "Mistral" in other
    assert len(counted) == 3


# -- calls of engines


class Worker:
    """A handle: answers when it is told to, and may die."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.num_collected = 0
        self._finished: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()

    def submit(self, completions: Sequence[Completion]) -> None:
        self.submitted += [completion.call_id for completion in completions]

    def collect(self, wait_s: float) -> list[Finished]:
        self.num_collected += 1
        try:
            found = self._finished.get(timeout=wait_s)
        except queue.Empty:
            return []
        if found is None:
            raise UnavailableError("killed")
        return [found]

    def abort(self, call_ids: Sequence[str]) -> None:
        self.aborted += call_ids

    def finish(self, call_id: str, result: Any = None) -> None:
        completed = Completed(call_id=call_id, token_ids=sequence_of([1], [1]).token_ids, sequences=())
        self._finished.put((call_id, result or completed))

    def die(self) -> None:
        self._finished.put(None)


def completion(call_id: str) -> Completion:
    return Completion(call_id=call_id, token_ids=[1], max_tokens=1, temperature=1.0, top_p=1.0)


def test_a_call_that_was_lost_with_its_worker_is_submitted_to_another() -> None:
    async def scenario() -> None:
        first, second = Worker(), Worker()
        ready = [ReadyWorker("w-0", 1, first)]
        calls = EngineCalls(lambda: list(ready))
        asked = asyncio.create_task(calls.generate(completion("c"), affinity="g", min_version=1, timeout_s=5))
        await until(lambda: first.submitted)
        ready[:] = [ReadyWorker("w-0.1", 1, second)]
        first.die()
        await until(lambda: second.submitted)
        second.finish("c")
        assert (await asked).call_id == "c"
        calls.close()

    asyncio.run(scenario())


def test_a_worker_that_stops_after_the_front_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        worker = Worker()
        calls = EngineCalls(lambda: [ReadyWorker("w", 1, worker)])
        asked = asyncio.create_task(calls.generate(completion("c"), affinity="g", min_version=1, timeout_s=5))
        await until(lambda: worker.submitted)
        worker.finish("c")
        await asked
        await until(lambda: worker.num_collected == 2)
        (collector,) = [thread for thread in threading.enumerate() if thread.name == "collect-w"]
        calls.close()
        worker.die()
        await asyncio.to_thread(collector.join)

    asyncio.run(scenario())
    assert caplog.text == ""


def test_calls_of_one_group_meet_one_worker_that_is_new_enough() -> None:
    async def scenario() -> None:
        workers = [Worker(), Worker()]
        calls = EngineCalls(lambda: [ReadyWorker(f"w-{i}", 1 + i, worker) for i, worker in enumerate(workers)])

        async def asked(call_id: str, affinity: str, version: int) -> int:
            task = asyncio.create_task(
                calls.generate(completion(call_id), affinity=affinity, min_version=version, timeout_s=5)
            )
            await until(lambda: any(call_id in worker.submitted for worker in workers))
            index = next(i for i, worker in enumerate(workers) if call_id in worker.submitted)
            workers[index].finish(call_id)
            await task
            return index

        chosen = [await asked(f"a{i}", "group-a", 1) for i in range(3)]
        assert len(set(chosen)) == 1
        assert {await asked(f"{name}", name, 1) for name in "abcdefgh"} == {0, 1}
        assert {await asked(f"v{name}", name, 2) for name in "abcdefgh"} == {1}
        calls.close()

    asyncio.run(scenario())


def test_a_refused_call_raises_and_one_that_is_cancelled_is_aborted() -> None:
    async def scenario() -> None:
        worker = Worker()
        calls = EngineCalls(lambda: [ReadyWorker("w", 1, worker)])
        refused = asyncio.create_task(calls.generate(completion("r"), affinity="g", min_version=1, timeout_s=5))
        await until(lambda: worker.submitted)
        worker.finish("r", ContractError("vLLM refuses it"))
        with pytest.raises(ContractError):
            await refused
        cancelled = asyncio.create_task(calls.generate(completion("c"), affinity="g", min_version=1, timeout_s=5))
        await until(lambda: len(worker.submitted) == 2)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert worker.aborted == ["c"]
        calls.close()

    asyncio.run(scenario())


def test_without_a_worker_a_call_waits_and_then_says_so() -> None:
    async def scenario() -> None:
        calls = EngineCalls(lambda: [ReadyWorker("w", 1, Worker())])
        with pytest.raises(UnavailableError, match="no worker with version 2"):
            await calls.generate(completion("c"), affinity="g", min_version=2, timeout_s=0.05)

    asyncio.run(scenario())
