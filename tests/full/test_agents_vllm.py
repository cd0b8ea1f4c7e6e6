"""Agents with unmodified SDKs against real vLLM: what is stored is what the engine saw and sampled, to 1e-4 nats."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import numpy as np
import openai
import pytest
import torch
import urllib3
from transformers import AutoModelForCausalLM

from bapo.core.errors import ConflictError, GoneError
from bapo.core.sequences import sequences_of
from bapo.core.types import Canary, Group, RolloutRequest, WeightUpdate
from bapo.runtime.file_digest import digest_of
from bapo.transport.episode_client import OpenedEpisode
from contrib.lookup.agent import TOOLS, rollout
from contrib.lookup.task import LookupOptions, LookupTask
from tests.support.agent_front import LOOKUP, Stage, agents_config, staged, wait_for_groups
from tests.support.episodes import histories_of
from tests.support.factories import make_request
from tests.support.tiny_model import perturb, reference_logprobs, save_weights

TOLERANCE = 1e-4
SIZE = 4


def requests(num: int) -> list[RolloutRequest]:
    prompts = LookupTask(LookupOptions(num_train=num)).prompts("train")
    return [make_request(request_id=f"g-{i}", group_size=SIZE, prompt=prompt) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch, staged(agents_config(lease_s=60), [], patch) as found:
        yield found


def ask(stage: Stage, num: int) -> list[OpenedEpisode]:
    """Open all episodes of `num` new requests."""
    stage.buffer.groups.clear()
    stage.buffer.add(_renamed(requests(num)))
    return stage.open(num * SIZE)


COUNTER = iter(range(1000))


def _renamed(found: list[RolloutRequest]) -> list[RolloutRequest]:
    run = next(COUNTER)
    return [msgspec.structs.replace(request, request_id=f"{run}-{request.request_id}") for request in found]


def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(LOOKUP, dtype=torch.float32).eval()


def gaps(group: Group, models: dict[int, Any]) -> list[float]:
    """|stored log-prob - that of the version's weights|, per token, over all turns of all responses."""
    found: list[float] = []
    for row, response in enumerate(sequences_of(group)):
        start = 0
        for history, sampled in histories_of(group, row):
            exact = {
                version: reference_logprobs(model, history + sampled)[len(history) - 1 :].numpy()
                for version, model in models.items()
            }
            span = slice(start, start + len(sampled))
            start += len(sampled)
            want = [exact[int(v)][i] for i, v in enumerate(response.versions[span])]
            found += np.abs(response.rollout_logprobs[span] - want).tolist()
    return found


def drive(episodes: list[OpenedEpisode], stage: Stage, between: Any = None) -> None:
    """Run the agent of `lookup`, with the client of OpenAI, in all of them."""

    async def one(client: openai.AsyncOpenAI, episode: OpenedEpisode) -> None:
        reward = await rollout(client.with_options(api_key=episode.key), episode.prompt)
        await asyncio.to_thread(stage.client.reward, episode.key, float(reward or 0.0))

    async def all_of_them() -> None:
        client = openai.AsyncOpenAI(base_url=episodes[0].base_url, api_key="-", max_retries=0)
        tasks = [asyncio.create_task(one(client, episode)) for episode in episodes]
        if between is not None:
            await asyncio.to_thread(between)
        await asyncio.gather(*tasks)

    asyncio.run(all_of_them())


def test_what_agents_sampled_is_stored_as_the_engine_saw_it_in_one_row_per_episode(stage: Stage) -> None:
    drive(ask(stage, 6), stage)
    wait_for_groups(stage, 6)
    groups, model = list(stage.buffer.groups.values()), reference()
    turns = [response.turns for group in groups for response in sequences_of(group)]
    assert all(found is not None for found in turns)
    assert max(len(found.parents_U) for found in turns if found is not None) >= 5
    assert sum(found.num_forks for found in turns if found is not None) == 0, "no history was tokenized again"
    assert max(gap for group in groups for gap in gaps(group, {1: model})) < TOLERANCE


def test_weights_replaced_in_mid_episode_are_the_versions_of_their_tokens(stage: Stage, tmp_path: Path) -> None:
    first, second = reference(), reference()
    perturb(second, seed=1)
    save_weights(second, path := tmp_path / "v2.safetensors")
    text = (4, 5, 6, 7, 8)
    update = WeightUpdate(
        version=2, path=str(path), digest=digest_of(path), num_bytes=path.stat().st_size,
        canary=Canary(token_ids=text, logprobs=tuple(reference_logprobs(second, list(text)).tolist()), tolerance=1e-3),
    )  # fmt: skip
    save_weights(first, back := tmp_path / "v3.safetensors")

    def publish() -> None:
        time.sleep(0.3)
        stage.publish(update)

    try:
        drive(ask(stage, 8), stage, between=publish)
        wait_for_groups(stage, 8)
        groups = list(stage.buffer.groups.values())
        crossing = [group for group in groups if group.spans is not None]
        assert crossing, "no episode had two versions"
        assert max(gap for group in groups for gap in gaps(group, {1: first, 2: second})) < TOLERANCE
        swapped = max(gap for group in crossing for gap in gaps(group, {1: second, 2: first}))
        assert swapped > 0.1, "versions that are mixed up would be seen"
    finally:
        canary = Canary(token_ids=text, logprobs=tuple(reference_logprobs(first, list(text)).tolist()), tolerance=1e-3)
        stage.publish(
            WeightUpdate(
                version=3, path=str(back), digest=digest_of(back), num_bytes=back.stat().st_size, canary=canary
            )
        )


def test_every_endpoint_and_a_stream_are_recorded_alike(stage: Stage) -> None:
    first, second, third, fourth = ask(stage, 1)
    question: Any = [{"role": "user", "content": first.prompt.text}]
    client = openai.OpenAI(base_url=first.base_url, api_key=first.key, max_retries=0)
    whole = client.chat.completions.create(model="policy", messages=question, tools=TOOLS)  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason in ("tool_calls", "stop")
    with client.with_options(api_key=second.key).chat.completions.stream(
        model="policy", messages=question, tools=TOOLS
    ) as stream:
        streamed = stream.get_final_completion()
    message = streamed.choices[0].message
    assert message.tool_calls or message.content
    client.with_options(api_key=third.key).responses.create(
        model="gpt-4o", input=first.prompt.text, max_output_tokens=4096
    )
    claude = anthropic.Anthropic(base_url=f"{stage.url}/e/{fourth.key}", api_key="-", max_retries=0)
    said = claude.messages.create(model="claude", max_tokens=4096, messages=question)
    assert said.model == "policy"
    assert said.content[0].type == "text"
    assert said.content[0].text, "also where the model calls a tool that it was not given"
    for episode in (first, second, third, fourth):
        assert stage.client.reward(episode.key, 0.5) in ("ok", "group")
    wait_for_groups(stage, 1)
    (group,) = stage.buffer.groups.values()
    assert max(gaps(group, {3: reference(), 1: reference()})) < TOLERANCE


def test_a_retry_is_answered_with_the_record_and_the_same_question_again_is_a_new_sample(stage: Stage) -> None:
    episode, *others = ask(stage, 1)
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0)

    def call(**headers: str) -> str:
        return (
            client.completions.create(model="policy", prompt=episode.prompt.text, extra_headers=headers).choices[0].text
        )

    text = call()
    assert call(**{"x-stainless-retry-count": "1"}) == text
    call()
    for one in (episode, *others):
        if one is not episode:
            openai.OpenAI(base_url=one.base_url, api_key=one.key).completions.create(model="policy", prompt="a")
        stage.client.reward(one.key, 0.0)
    wait_for_groups(stage, 1)
    (group,) = stage.buffer.groups.values()
    assert [len(histories_of(group, row)) for row in range(SIZE)] == [2, 1, 1, 1]


def test_errors_are_those_that_sdks_do_not_retry(stage: Stage) -> None:
    episode, *others = ask(stage, 1)
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.key)
    question: Any = [{"role": "user", "content": episode.prompt.text}]
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model="policy", messages=question, tools=TOOLS, tool_choice="required")  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="policy", messages=question, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match="n = 2"):
        client.chat.completions.create(model="policy", messages=question, n=2)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="policy", prompt="a+b" * 300)
    full = openai.OpenAI(base_url=others[0].base_url, api_key=others[0].key)
    for _ in range(80):
        try:
            full.chat.completions.create(model="policy", messages=question, max_tokens=4)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"  # noqa: PT017 - when it comes depends on the lengths
            break
    else:
        raise AssertionError("an episode has no limit")
    assert urllib3.request("POST", f"{episode.base_url}/completions", json={"prompt": "a"}).status == 401
    for path in ("chat/completions/batch", "messages/count_tokens", "responses/x/cancel"):
        assert urllib3.request("POST", f"{episode.base_url}/{path}", json={"model": "policy"}).status == 404
    strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    client.chat.completions.create(model="policy", messages=question, tools=strict, parallel_tool_calls=False)
    client.completions.create(model="policy", prompt="a", temperature=0.0, top_p=0.1, seed=1, extra_body={"top_k": 1})
    stage.client.reward(episode.key, 1.0)
    with pytest.raises(ConflictError):
        stage.client.reward(episode.key, 0.0)
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model="policy", prompt="a")
    assert error.value.status_code == 410
    with pytest.raises(GoneError):
        stage.client.heartbeat(episode.key)
    for other in others:
        stage.client.give_back(other.key)
    assert [found.prompt.text for found in stage.open(3)] == [episode.prompt.text] * 3, "the others begin again"


def _call_for_ever(base_url: str, key: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=key)
    while True:
        client.completions.create(model="policy", prompt="a+b", max_tokens=90)


def test_clients_that_are_killed_in_mid_call_do_no_harm(stage: Stage) -> None:
    episodes = ask(stage, 1)
    spawn = multiprocessing.get_context("spawn")
    for episode in episodes[:3]:
        process = spawn.Process(target=_call_for_ever, args=(episode.base_url, episode.key), daemon=True)
        process.start()
        journal_of = list(stage.buffer.leased)[-1]
        before = len(stage.buffer.read_journal(journal_of))
        deadline = time.monotonic() + 60
        while len(stage.buffer.read_journal(journal_of)) == before and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    client = openai.OpenAI(base_url=episodes[3].base_url, api_key=episodes[3].key)
    assert client.completions.create(model="policy", prompt="a+b").choices[0].text
    assert urllib3.request("GET", f"{stage.url}/v1/models").status == 200
