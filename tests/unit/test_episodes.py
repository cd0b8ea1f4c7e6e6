"""Episodes: durable before anybody hears of them, ended once, begun again alone, never given a reward by an error."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from bapo.config.tree import Config
from bapo.core.errors import ConflictError, ContractError, GoneError, LimitError, UnavailableError
from bapo.core.types import Outcome
from rollout_server.episodes.episode import Episode, Failed, Opened, pack_event, unpack_event
from rollout_server.episodes.group import rollout_of
from rollout_server.episodes.history import continuation_of
from rollout_server.episodes.manager import Handle
from rollout_server.episodes.recorder import ModelCall, Recorder
from rollout_server.episodes.routes import RewardBody
from tests.support.agents import Front, MemoryJournal, ToldEngines, ended, in_loop, turn
from tests.support.factories import make_request

REQUEST = make_request(prompt_id="a", group_size=2)


async def opened(front: Front, count: int = 2) -> list[Handle]:
    await front.episodes.adopt(REQUEST)
    return await front.episodes.open(count, 0.0)


# -- the life of an episode


@in_loop
async def test_the_last_reward_of_a_group_completes_it() -> None:
    front = Front()
    first, second = await opened(front)
    assert first.key != second.key
    assert await front.episodes.open(1, 0.0) == [], "the group has two responses"
    await front.episodes.record(first, turn(0))
    await front.episodes.record(second, turn(1))
    assert await front.episodes.reward(second.key, 0.0) == "ok"
    assert front.delivered == []
    assert await front.episodes.reward(first.key, 1.0) == "group"
    (group,) = front.delivered
    assert [group.episodes[i].reward for i in range(2)] == [1.0, 0.0]


@in_loop
async def test_a_reward_is_given_once() -> None:
    front = Front()
    handle, _ = await opened(front)
    await front.episodes.record(handle, turn(0))
    await front.episodes.reward(handle.key, 0.25)
    assert await front.episodes.reward(handle.key, 0.25) == "duplicate"
    for other in (1.0, math.nan):
        with pytest.raises(ConflictError, match=r"has the reward 0\.25"):
            await front.episodes.reward(handle.key, other)
    with pytest.raises(ConflictError, match="which null does not replace"):
        await front.episodes.ungraded(handle.key, "")
    with pytest.raises(GoneError):
        front.episodes.handle_of(handle.key)


@in_loop
async def test_an_episode_without_a_call_has_no_reward() -> None:
    front = Front()
    handle, _ = await opened(front)
    with pytest.raises(ContractError, match="without a call of the model cannot have a reward: it is ungraded"):
        await front.episodes.reward(handle.key, 0.0)
    (again,) = await front.episodes.open(1, 0.0)
    assert (again.episode.index, again.episode.attempts) == (handle.episode.index, 1)
    assert front.episodes.last_failure.startswith("no_call: ")


@in_loop
async def test_a_failed_episode_begins_again_alone_with_another_key_and_without_its_turns() -> None:
    front = Front()
    first, second = await opened(front)
    await front.episodes.record(first, turn(0))
    await front.episodes.record(second, turn(1))
    await front.episodes.fail(first, "ungraded")
    (again,) = await front.episodes.open(2, 0.0)
    assert (again.episode.index, again.episode.turns) == (0, [])
    assert again.key != first.key
    with pytest.raises(GoneError):
        front.episodes.handle_of(first.key)
    assert len(second.episode.turns) == 1


@in_loop
async def test_a_group_is_given_up_when_one_of_its_episodes_has_failed_too_often() -> None:
    front = Front(max_attempts=2)
    first, second = await opened(front)
    await front.episodes.fail(first, "ungraded")
    assert front.refused == []
    (again,) = await front.episodes.open(1, 0.0)
    await front.episodes.fail(again, "ungraded")
    assert front.refused == [("g-a", "episode_ungraded")]
    with pytest.raises(GoneError):
        front.episodes.handle_of(second.key)


@in_loop
async def test_a_silent_agent_loses_its_episode_and_one_that_waits_for_the_model_does_not() -> None:
    front = Front(lease_s=10)
    silent, busy = await opened(front)
    busy.num_calls = 1
    front.clock = 10.5
    watching = asyncio.create_task(front.episodes.watch())
    (again,) = await front.episodes.open(1, 5.0)
    watching.cancel()
    assert again.episode.index == silent.episode.index
    assert front.episodes.handle_of(busy.key) is busy
    assert "failed/silent" in front.counted


@in_loop
async def test_an_episode_that_is_given_back_is_no_attempt_of_those_that_are_limited() -> None:
    front = Front(max_attempts=1)
    handle, _ = await opened(front)
    for _ in range(3):
        await front.episodes.fail(handle, "given_back", counts=False)
        (handle,) = await front.episodes.open(1, 0.0)
    assert (front.refused, handle.episode.attempts) == ([], 0)


@in_loop
async def test_the_episodes_of_a_process_that_was_restarted_begin_again_at_once_and_lose_no_attempt() -> None:
    front = Front()
    await front.episodes.adopt(REQUEST)
    (first,) = await front.episodes.open(1, 0.0, "agents-0@a")
    (other,) = await front.episodes.open(1, 0.0, "agents-1@a")
    assert await front.episodes.open(1, 0.0, "agents-0@a") == [], "the same start has its episode still"
    (again,) = await front.episodes.open(1, 0.0, "agents-0@b")
    assert (again.episode.index, again.episode.attempts) == (first.episode.index, 0)
    with pytest.raises(GoneError):
        front.episodes.handle_of(first.key)
    assert front.episodes.handle_of(other.key) is other
    assert "failed/agent_restarted" in front.counted


@pytest.mark.parametrize("comes_first", ["the journal", "the agent"])
@in_loop
async def test_a_resumed_run_opens_the_episodes_of_its_former_processes(comes_first: str) -> None:
    before = Front()
    await before.episodes.adopt(REQUEST)
    (mine,) = await before.episodes.open(1, 0.0, "agents-0@a")
    (outside,) = await before.episodes.open(1, 0.0)
    after = Front(before.journal)
    if comes_first == "the journal":
        await after.episodes.adopt(REQUEST)
        (again,) = await after.episodes.open(1, 0.0, "agents-0@b")
    else:
        assert await after.episodes.open(1, 0.0, "agents-0@b") == []
        await after.episodes.adopt(REQUEST)
        (again,) = await after.episodes.open(1, 0.0, "agents-0@b")
    assert (again.episode.index, again.episode.attempts) == (mine.episode.index, 0)
    assert after.episodes.handle_of(outside.key).episode.index == outside.episode.index


@in_loop
async def test_a_group_that_is_given_up_says_what_failed_at_last() -> None:
    front = Front(max_attempts=1)
    handle, _ = await opened(front)
    await front.episodes.fail(handle, "ungraded", "KeyError: 'value' (agent.py line 9)")
    (detail,) = front.details
    assert detail.startswith("episode 0 failed 1 times")
    assert detail.endswith("the last time: KeyError: 'value' (agent.py line 9)")


@in_loop
async def test_an_agent_that_shows_a_sign_of_life_keeps_its_episode() -> None:
    front = Front(lease_s=10)
    handle, _ = await opened(front)
    front.clock = 9.0
    front.episodes.handle_of(handle.key)
    front.clock = 18.0
    assert handle.heard == 9.0


# -- durability


@in_loop
async def test_nothing_is_known_before_the_journal_has_it() -> None:
    front = Front()
    handle, _ = await opened(front)
    front.journal.gate.clear()
    recording = asyncio.create_task(front.episodes.record(handle, turn(0)))
    await asyncio.sleep(0.01)
    assert not recording.done()
    assert handle.episode.turns == []
    front.journal.gate.set()
    await recording
    assert unpack_event(front.journal.entries["g-a"][-1]) == turn(0)


@in_loop
async def test_another_front_continues_from_the_journal_with_the_same_keys() -> None:
    front = Front()
    first, second = await opened(front)
    await front.episodes.record(first, turn(0))
    await front.episodes.record(second, turn(1))
    await front.episodes.reward(second.key, 1.0)
    after = Front(front.journal)
    await after.episodes.adopt(REQUEST)
    same = after.episodes.handle_of(first.key)
    assert [found.token_ids.tolist() for found in same.episode.turns] == [[5, 6]]
    assert await after.episodes.open(1, 0.0) == []
    assert await after.episodes.reward(first.key, 0.0) == "group"
    assert len(after.delivered) == 1


@in_loop
async def test_a_group_whose_last_reward_was_stored_before_the_crash_is_delivered() -> None:
    front = Front()
    await ended(front, REQUEST, [1.0, 0.0])
    after = Front(front.journal)
    await after.episodes.adopt(REQUEST)
    assert [group.request for group in after.delivered] == [REQUEST]


@in_loop
async def test_a_turn_whose_acknowledgement_was_lost_is_there_once() -> None:
    front = Front()
    handle, _ = await opened(front)
    front.journal.loses_answers = 1
    with pytest.raises(UnavailableError):
        await front.episodes.record(handle, turn(0, call="one"))
    await front.episodes.record(handle, turn(0, call="two"))
    assert [found.call for found in handle.episode.turns] == ["one", "two"]
    assert len(front.journal.entries["g-a"]) == 4, "two openings, two turns"


@in_loop
async def test_an_append_that_was_not_stored_leaves_nothing() -> None:
    front = Front()
    handle, _ = await opened(front)
    front.journal.fails = 1
    with pytest.raises(UnavailableError):
        await front.episodes.record(handle, turn(0))
    assert handle.episode.turns == []
    await front.episodes.record(handle, turn(0))
    assert len(handle.episode.turns) == 1


@in_loop
async def test_a_last_reward_whose_answer_was_lost_completes_its_group_when_it_is_given_again() -> None:
    front = Front()
    first, second = await opened(front)
    for handle in (first, second):
        await front.episodes.record(handle, turn(handle.episode.index))
    await front.episodes.reward(first.key, 1.0)
    front.journal.loses_answers = 1
    with pytest.raises(UnavailableError):
        await front.episodes.reward(second.key, 0.5)
    assert front.delivered == []
    assert await front.episodes.reward(second.key, 0.5) == "duplicate"
    assert len(front.delivered) == 1


@in_loop
async def test_an_opening_whose_answer_was_lost_is_given_to_the_next_agent() -> None:
    front = Front()
    await front.episodes.adopt(REQUEST)
    front.journal.loses_answers = 1
    with pytest.raises(UnavailableError):
        await front.episodes.open(1, 0.0)
    handles = await front.episodes.open(3, 0.0)
    assert sorted(handle.episode.index for handle in handles) == [0, 1]
    assert [type(unpack_event(entry)) for entry in front.journal.entries["g-a"]] == [Opened, Opened]


@in_loop
async def test_a_failure_whose_answer_was_lost_begins_its_episode_again() -> None:
    front = Front()
    handle, _ = await opened(front)
    front.journal.loses_answers = 1
    with pytest.raises(UnavailableError):
        await front.episodes.fail(handle, "given_back")
    with pytest.raises(GoneError):
        await front.episodes.fail(handle, "given_back")
    (again,) = await front.episodes.open(2, 0.0)
    assert again.episode.index == handle.episode.index


@in_loop
async def test_a_reward_without_a_turn_is_refused_also_when_the_journal_must_be_read_again() -> None:
    front = Front()
    first, second = await opened(front)
    front.journal.loses_answers = 1
    with pytest.raises(UnavailableError):
        await front.episodes.record(first, turn(0))
    with pytest.raises(ContractError, match="without a call"):
        await front.episodes.reward(second.key, 1.0)
    assert await front.episodes.reward(first.key, 1.0) == "ok", "its turn is in the journal"


@in_loop
async def test_a_request_that_is_claimed_twice_is_offered_once() -> None:
    front = Front()
    await front.episodes.adopt(REQUEST)
    await front.episodes.adopt(REQUEST)
    assert len(await front.episodes.open(9, 0.0)) == 2


@in_loop
async def test_entries_that_redis_has_lost_are_written_again() -> None:
    front = Front()
    handle, _ = await opened(front)
    await front.episodes.record(handle, turn(0, call="one"))
    whole = list(front.journal.entries["g-a"])
    del front.journal.entries["g-a"][1:]
    with pytest.raises(UnavailableError, match="1 entries, not 3"):
        await front.episodes.record(handle, turn(0, call="two"))
    await front.episodes.record(handle, turn(0, call="two"))
    assert front.journal.entries["g-a"] == [*whole, pack_event(turn(0, call="two"))]


@in_loop
async def test_a_journal_that_is_not_ours_is_not_continued() -> None:
    front = Front()
    handle, _ = await opened(front)
    front.journal.entries["g-a"] = [pack_event(Opened(index=0, key="another"))]
    for _ in range(2):
        with pytest.raises((UnavailableError, GoneError)):
            await front.episodes.record(handle, turn(0))
    with pytest.raises(GoneError):
        front.episodes.handle_of(handle.key)


@in_loop
async def test_a_front_without_the_lease_records_nothing_and_its_keys_are_dead() -> None:
    front = Front()
    first, second = await opened(front)
    front.journal.is_lost = True
    with pytest.raises(GoneError, match="another server"):
        await front.episodes.record(first, turn(0))
    with pytest.raises(GoneError):
        front.episodes.handle_of(second.key)
    assert front.lost == ["g-a"], "a claim of it is a new one"
    front.journal.is_lost = False
    await front.episodes.adopt(REQUEST)
    assert front.episodes.handle_of(first.key).episode.turns == []


@in_loop
async def test_a_lease_that_is_lost_while_an_episode_is_opened_is_given_up() -> None:
    front = Front()
    await front.episodes.adopt(REQUEST)
    front.journal.is_lost = True
    assert await front.episodes.open(1, 0.0) == []
    assert front.lost == ["g-a"]


@in_loop
async def test_a_caller_that_hangs_up_while_its_turn_is_stored_finds_it_recorded() -> None:
    front = Front()
    handle, _ = await opened(front)
    front.journal.gate.clear()
    recording = asyncio.create_task(front.episodes.record(handle, turn(0)))
    await asyncio.sleep(0.01)
    recording.cancel()
    front.journal.gate.set()
    await asyncio.sleep(0.01)
    assert len(handle.episode.turns) == 1


def test_a_journal_that_is_not_one_of_episodes_is_refused() -> None:
    with pytest.raises(ContractError, match="malformed"):
        unpack_event(b"\x93\x01")
    event = Opened(index=3, key="k")
    assert unpack_event(pack_event(event)) == event
    with pytest.raises(ContractError, match="has not failed"):
        Episode(index=3, key="k").apply(event)
    episode = Episode(index=3, key="k")
    episode.apply(Failed(index=3, reason="x"))
    with pytest.raises(ContractError, match="nothing can follow"):
        episode.apply(turn(3))


# -- calls of the model


CONFIG = Config.model_validate(
    {
        "agents": {"max_turns": 3, "max_tokens": 60},
        "rollout": {"max_prompt_tokens": 30, "max_response_tokens": 10, "temperature": 0.9, "stop": ["|"]},
    }
)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def text_of(ids: Any) -> str:
    return "".join(map(chr, ids))


class Agent:
    """A recorder and one episode; the model answers with what it is told. Tokens are letters."""

    def __init__(self, front: Front, handle: Handle, answers: list[str]) -> None:
        self.handle = handle
        self.engines = ToldEngines(lambda _: (letters(answer := answers.pop(0)), [1] * len(answer)))
        self.recorder = Recorder(CONFIG, front.episodes, self.engines, encode=letters, decode=text_of)  # type: ignore[arg-type]

    async def call(self, text: str, **options: Any) -> str:
        fields = {"key": self.handle.key, "digest": text, "text": text, "token_ids": [9] * len(text), "max_tokens": 99}
        reply = await self.recorder.sample(ModelCall(**fields | options))
        return text_of(reply.token_ids)


async def an_agent(answers: list[str]) -> Agent:
    front = Front()
    handle, _ = await opened(front)
    return Agent(front, handle, answers)


@in_loop
async def test_a_history_that_grows_keeps_its_tokens_and_encodes_only_the_rest() -> None:
    agent = await an_agent(["ab.", "cd."])
    await agent.call("Q:")
    await agent.call("Q:ab.R:")
    first, second = agent.handle.episode.turns
    assert (first.parent, first.context_ids.tolist()) == (-2, [9, 9]), "as the server had tokenized it"
    assert (second.parent, text_of(second.context_ids)) == (0, "R:")
    assert list(agent.engines.calls[1].token_ids) == [9, 9, *letters("ab.R:")]


@in_loop
async def test_a_history_that_was_changed_forks_with_the_tokens_that_the_engine_saw() -> None:
    agent = await an_agent(["ab.", "cd.", "ef."])
    await agent.call("Q:")
    await agent.call("Q:a.R:")  # the template left something out
    await agent.call("Q:ab.S:")  # and another continuation of the first turn
    _, fork, sibling = agent.handle.episode.turns
    assert (fork.parent, fork.context_ids.tolist()) == (-2, [9] * 6)
    assert (sibling.parent, text_of(sibling.context_ids)) == (0, "S:")
    assert agent.handle.episode.num_forks == 1, "two rows"


def test_of_several_turns_that_fit_the_longest_is_continued() -> None:
    episode = Episode(index=0, key="k")
    episode.apply(turn(text="Q:ab.", context=letters("Q:"), ids=letters("ab.")))
    episode.apply(turn(text="Q:ab.R:c.", parent=0, context=letters("R:"), ids=letters("c.")))
    found = continuation_of(episode, "Q:ab.R:c.S:", [], letters)
    assert (found.parent, text_of(found.context_ids), text_of(found.token_ids)) == (1, "S:", "Q:ab.R:c.S:")


def test_a_client_that_sends_ids_continues_by_ids() -> None:
    episode = Episode(index=0, key="k")
    episode.apply(turn(context=[1, 2], ids=[5, 6]))
    found = continuation_of(episode, None, [1, 2, 5, 6, 7], letters)
    assert (found.parent, found.context_ids, found.token_ids) == (0, [7], [1, 2, 5, 6, 7])
    episode.apply(turn(parent=0, context=[7], ids=[8]))
    assert continuation_of(episode, None, [1, 2, 5, 6, 7, 8, 9], letters).parent == 1, "the longest"
    assert continuation_of(episode, None, [1, 2, 5], letters).parent == -2


@in_loop
async def test_the_runs_sampling_parameters_are_used_and_the_limits_of_all() -> None:
    agent = await an_agent(["a", "b", "c", "d"])
    await agent.call("Q", max_tokens=4)
    await agent.call("Qa", max_tokens=99, stop=("x",))
    first, second = agent.engines.calls
    assert (first.temperature, first.top_p, first.num) == (0.9, 1.0, 1)
    assert (first.stop, second.stop) == (("|",), ("|", "x"))
    assert (first.max_tokens, second.max_tokens) == (4, 10)
    await agent.call("Q" * 36)
    assert agent.engines.calls[2].max_tokens == 4, "of 40 tokens of a sequence"
    with pytest.raises(LimitError, match=r"agents\.max_turns"):
        await agent.call("Q")


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({}, Outcome.TRUNCATED),  # 10 tokens: rollout.max_response_tokens
        ({"max_tokens": 10}, Outcome.TRUNCATED),
        ({"max_tokens": 9}, Outcome.GRADED),  # the agent's own
        # vLLM, which does not know what is kept of the history, gives a call without a limit the rest of 40 tokens.
        ({"max_tokens": 3, "token_ids": [9] * 37}, Outcome.TRUNCATED),
    ],
)
@in_loop
async def test_a_reply_that_the_agent_itself_has_cut_is_no_truncated_response(
    options: dict[str, Any], outcome: Outcome
) -> None:
    front = Front()
    handle, other = await opened(front)
    agent = Agent(front, handle, ["a", "b" * options.get("max_tokens", 10)])
    await agent.call("Q")
    await agent.call("Qa!", **options)
    await front.episodes.record(other, turn(1))
    await front.episodes.reward(handle.key, 1.0)
    await front.episodes.reward(other.key, 0.0)
    (group,) = front.delivered
    rollout = rollout_of(group.request, list(group.episodes.values()), lambda many: [str(ids) for ids in many])
    assert rollout.sequences[0].outcome is outcome
    assert handle.episode.turns[1].truncated, "as the reply says"
    assert front.counted.count("cut") == (outcome is Outcome.GRADED)


@in_loop
async def test_an_episode_that_is_as_long_as_a_micro_batch_gets_no_further_token() -> None:
    agent = await an_agent(["a" * 5, "b" * 5])
    await agent.call("Q" * 30)
    await agent.call("R" * 16)
    assert agent.engines.calls[1].max_tokens == 9, "60 - 35 - 16"
    agent = await an_agent(["a" * 5])
    await agent.call("Q" * 30)
    with pytest.raises(LimitError, match="35 of 60"):
        await agent.call("R" * 25)


@in_loop
async def test_calls_at_the_same_time_share_the_limits_of_their_episode() -> None:
    front = Front()
    handle, _ = await opened(front)
    agent = Agent(front, handle, ["a"] * 9)
    front.journal.gate.clear()
    calls = [asyncio.create_task(agent.call("Q" * 20)) for _ in range(5)]
    await asyncio.sleep(0.01)
    front.journal.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, LimitError) for result in results] == [False, False, True, True, True]
    assert [call.max_tokens for call in agent.engines.calls] == [10, 10], "20 + 10 each, of 60"


@in_loop
async def test_a_retry_gets_the_recorded_reply_and_a_second_question_another() -> None:
    agent = await an_agent(["ab.", "cd."])
    assert await agent.call("Q:") == "ab."
    assert await agent.call("Q:", is_retry=True) == "ab."
    assert len(agent.handle.episode.turns) == 1
    assert await agent.call("Q:") == "cd."
    assert [found.parent for found in agent.handle.episode.turns] == [-2, -2]


@pytest.mark.parametrize("client_is_gone", [False, True])
@in_loop
async def test_a_retry_waits_for_a_first_call_that_is_being_stored(client_is_gone: bool) -> None:
    front = Front()
    handle, _ = await opened(front)
    agent = Agent(front, handle, ["ab.", "cd."])
    front.journal.gate.clear()
    first = asyncio.create_task(agent.call("Q:"))
    await asyncio.sleep(0.01)
    if client_is_gone:
        first.cancel()
        await asyncio.sleep(0.01)
    again = asyncio.create_task(agent.call("Q:", is_retry=True))
    await asyncio.sleep(0.01)
    front.journal.gate.set()
    assert await again == "ab."
    assert len(handle.episode.turns) == 1, "no reply trains that no client saw"
    await asyncio.gather(first, return_exceptions=True)


@in_loop
async def test_no_reply_without_a_record() -> None:
    front = Front()
    handle, _ = await opened(front)
    agent = Agent(front, handle, ["ab."])
    front.journal.gate.clear()
    calling = asyncio.create_task(agent.call("Q:"))
    await asyncio.sleep(0.01)
    assert agent.engines.calls
    assert not calling.done()
    front.journal.gate.set()
    assert await calling == "ab."


@pytest.mark.parametrize("facts", [{"a": math.inf}, {"": 1.0}, {"a\n": 1.0}, {"a": "1"}, {"a": 1e39}])
def test_facts_that_cannot_be_recorded_are_refused(facts: dict[str, object]) -> None:
    assert RewardBody.model_validate({"reward": 1, "facts": {"a": True, "b": -0.5}}).facts == {"a": 1.0, "b": -0.5}
    with pytest.raises(ValueError, match="facts"):
        RewardBody.model_validate({"facts": facts})


# -- the group


@in_loop
async def test_episodes_become_the_responses_of_a_group() -> None:
    front = Front()
    first, second = await opened(front)
    await front.episodes.record(first, turn(0, [5, 6], context=[1, 2, 3]))
    await front.episodes.record(first, turn(0, [7], parent=0, context=[4], version=2))
    await front.episodes.record(second, turn(1, [8], context=[1, 2]))
    await front.episodes.reward(first.key, 1.0, {"steps": 3.0})
    await front.episodes.reward(second.key, math.nan)
    group = front.delivered[0]
    rollout = rollout_of(group.request, list(group.episodes.values()), lambda many: [str(ids) for ids in many])
    assert rollout.prompt_token_ids.tolist() == [1, 2], "with which both begin"
    assert rollout.rewards is not None
    assert rollout.rewards[0] == 1.0
    assert math.isnan(rollout.rewards[1])
    assert [str(value) for value in rollout.facts["facts/steps"]] == ["3.0", "nan"]
    one, other = rollout.sequences
    assert (one.token_ids.tolist(), one.versions.tolist(), one.text) == ([5, 6, 7], [1, 1, 2], "[7]")
    assert one.turns is not None
    assert one.turns.parents_U.tolist() == [-1, 0]
    assert (one.turns.num_context_U.tolist(), one.turns.context_ids.tolist()) == ([1, 1], [3, 4])
    assert (other.token_ids.tolist(), other.outcome) == ([8], Outcome.GRADED)
    assert np.array_equal(other.turns.num_context_U, [0]) if other.turns else False


@in_loop
async def test_who_waits_for_an_episode_gets_the_first_that_comes() -> None:
    front = Front(MemoryJournal())
    waiting = asyncio.create_task(front.episodes.open(1, 5.0))
    await asyncio.sleep(0.01)
    await front.episodes.adopt(REQUEST)
    (handle,) = await waiting
    assert handle.episode.index == 0
