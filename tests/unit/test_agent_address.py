"""The agents' address, with an echo in the place of vLLM's routes: who may call what, and what a refusal says."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from msgspec.structs import replace
from pydantic import BaseModel

from bapo.config.tree import Config
from bapo.core.types import MESSAGES, Prompt
from bapo.runtime.auth.api_tokens import Keyring, Role, digest
from bapo.tasks.base import TEMPLATED
from rollout_server.episodes import front as front_module
from rollout_server.episodes.caller import CALLER
from rollout_server.episodes.episode import new_key
from rollout_server.episodes.front import guard
from rollout_server.episodes.gate import MODEL_PATHS
from tests.support.agents import Front, in_loop, turn
from tests.support.factories import make_request

TOKENS = {role: f"token-of-the-{role.value}-0123" for role in (Role.AGENT, Role.LEARNER)}
REQUEST = make_request(prompt_id="a", group_size=2)
CONFIG = Config.model_validate(
    {"agents": {"model_name": "mine"}, "rollout": {"max_prompt_tokens": 30, "max_response_tokens": 10}}
)
CHAT = "/v1/chat/completions"
RENDERED = "<user>1+2</user><assistant>"


class Address:
    """The guarded routes over episodes in memory; every path of the model answers with what it got."""

    def __init__(self) -> None:
        self.front = Front()
        app = FastAPI()
        app.router.routes.clear()
        for path in MODEL_PATHS:
            app.post(path)(_parsed if path == "/v1/responses" else _echo)
        app.get("/v1/models")(_models)
        keyring = Keyring(",".join(f"{role}:{digest(token)}" for role, token in TOKENS.items()))
        guard(app, self.front.episodes, CONFIG, base_url="http://agents/v1", keyring=keyring, begin="<bos>")
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agents")

    async def open(self, prompt: Prompt = REQUEST.prompt) -> str:
        """The key of an episode with one call."""
        await self.front.episodes.adopt(replace(REQUEST, prompt=prompt))
        (found,) = await self.said("POST", "/v1/episodes", token=TOKENS[Role.AGENT], json={"count": 1})
        await self.front.episodes.record(self.front.episodes.handle_of(found["key"]), turn(0))
        return str(found["key"])

    async def call(self, method: str, path: str, token: str = "", **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await self._client.request(method, path, headers=headers | options.pop("headers", {}), **options)

    async def said(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        answer = await self.call(method, path, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def refusal(self, status: int, method: str, path: str, **options: Any) -> str:
        """The message of a refusal, which is one line."""
        said = await self.said(method, path, status, **options)
        message = said["error"]["message"] if isinstance(said["error"], dict) else said["message"]
        assert "\n" not in message
        return str(message)


async def _echo(request: Request) -> dict[str, Any]:
    return {"key": CALLER.get().key, "body": await request.json()}


class Input(BaseModel, extra="allow"):
    """A body that pydantic reads, as vLLM's."""

    input: str | list[str | dict[str, str]] = ""


async def _parsed(body: Input) -> dict[str, Any]:
    return {"key": CALLER.get().key, "body": body.model_dump(exclude_unset=True)}


async def _models() -> list[str]:
    return ["policy"]


# -- keys and tokens


@in_loop
async def test_a_key_in_the_path_is_as_good_as_one_in_a_header() -> None:
    address = Address()
    key = await address.open()
    for path in MODEL_PATHS:
        assert (await address.said("POST", f"/e/{key}{path}", json={}))["key"] == key
    assert await address.said("GET", f"/e/{key}/v1/models") == ["policy"]
    said = await address.said("POST", f"/e/{key}{CHAT}", token="a-key-that-the-sdk-insists-on", json={})
    assert said["key"] == key
    assert (await address.said("POST", CHAT, token=key, json={}))["key"] == key
    assert (await address.said("POST", CHAT, headers={"x-api-key": key}, json={}))["key"] == key


@in_loop
async def test_a_key_in_the_path_opens_no_further_episode() -> None:
    address = Address()
    key = await address.open()
    assert "token" in await address.refusal(401, "POST", f"/e/{key}/v1/episodes", json={"count": 1})


@in_loop
async def test_what_is_not_the_key_of_an_episode_is_told_what_it_is() -> None:
    address = Address()
    await address.open()
    assert "no key: send the key of an episode" in await address.refusal(401, "POST", CHAT, json={})
    assert "no episode has this key" in await address.refusal(401, "POST", CHAT, token="sk-proj-1", json={})
    agents = await address.refusal(401, "POST", CHAT, token=TOKENS[Role.AGENT], json={})
    assert agents == "this is the agents' token: open an episode and use its key (POST /v1/episodes gives one)"
    assert "a token of role learner" in await address.refusal(401, "POST", CHAT, token=TOKENS[Role.LEARNER], json={})
    assert "no episode has this key" in await address.refusal(401, "POST", "/v1/episodes/sk-1/reward", json={})


@in_loop
async def test_an_episode_that_has_ended_is_gone_and_so_is_one_of_before_a_restart() -> None:
    address = Address()
    key = await address.open()
    assert await address.said("POST", f"/v1/episodes/{key}/reward", json={"reward": 1.0}) == {"state": "ok"}
    for ended in (key, new_key()):
        assert "has ended" in await address.refusal(410, "POST", CHAT, token=ended, json={})
        assert "has ended" in await address.refusal(410, "POST", f"/v1/episodes/{ended}/heartbeat")


@in_loop
async def test_a_wrong_path_is_named_with_and_without_a_key() -> None:
    address = Address()
    key = await address.open()
    for path in ("/v1/embeddings", "/chat/completions", f"/e/{key}/chat/completions"):
        said = await address.refusal(404, "POST", path, token=key, json={})
        assert "base_url ends in /v1" in said
        assert CHAT in said
    await address.refusal(404, "GET", CHAT, token=key)
    await address.refusal(404, "POST", "/v1/embeddings", json={})


# -- rewards


@pytest.mark.parametrize(
    ("sent", "reward"),
    [
        ({}, math.nan),
        ({"content": b"", "headers": {"content-type": "application/json"}}, math.nan),
        ({"json": {}}, math.nan),
        ({"json": {"reward": 1}}, 1.0),
        ({"json": {"reward": True}}, 1.0),
        ({"json": {"reward": False}}, 0.0),
        # curl -d, without a header
        ({"content": b'{"reward": 0.5}', "headers": {"content-type": "application/x-www-form-urlencoded"}}, 0.5),
    ],
)
@in_loop
async def test_a_reward_is_read_as_it_is_sent(sent: dict[str, Any], reward: float) -> None:
    address = Address()
    key = await address.open()
    episode = address.front.episodes.handle_of(key).episode
    assert await address.said("POST", f"/v1/episodes/{key}/reward", **sent) == {"state": "ok"}
    assert episode.reward == pytest.approx(reward, nan_ok=True)


@in_loop
async def test_null_is_ungraded_and_replaces_no_reward() -> None:
    address = Address()
    key = await address.open()
    path = f"/v1/episodes/{key}/reward"
    await address.said("POST", path, json={"reward": 1.0})
    assert "reward 1, which null does not replace" in await address.refusal(409, "POST", path, json={"reward": None})
    assert "reward 1, which 0 does not replace" in await address.refusal(409, "POST", path, json={"reward": False})
    address = Address()
    path = f"/v1/episodes/{await address.open()}/reward"
    assert await address.said("POST", path, json={"reward": None, "error": "no browser"}) == {"state": "ungraded"}


@pytest.mark.parametrize(
    "body", [b'{"reward": 2}', b'{"reward": "1"}', b'{"reward": NaN}', b'{"rewrd": 1}', b"{", b"[]"]
)
@in_loop
async def test_a_body_that_is_no_reward_is_told_what_would_be_one(body: bytes) -> None:
    address = Address()
    said = await address.refusal(422, "POST", f"/v1/episodes/{await address.open()}/reward", content=body)
    assert 'Send {"reward": 0 to 1, true or false}' in said


@in_loop
async def test_an_opening_needs_no_body_and_a_wrong_one_is_named() -> None:
    address = Address()
    await address.front.episodes.adopt(REQUEST)
    token = TOKENS[Role.AGENT]
    said = await address.refusal(422, "POST", "/v1/episodes", token=token, json={"count": 300, "wait": 1})
    assert said == (
        "count: Input should be less than or equal to 256; wait: Extra inputs are not permitted. "
        'Send {"count": 1 to 256, "wait_s": 0 to 60}'
    )
    assert len(await address.said("POST", "/v1/episodes", token=token)) == 1


# -- what a client asks for


@in_loop
async def test_whatever_model_a_client_names_is_the_policy() -> None:
    address = Address()
    key = await address.open()
    for body in ({"model": "gpt-4o", "stop": ["x"]}, {"stop": ["x"]}):
        said = await address.said("POST", CHAT, token=key, json=body)
        assert said["body"] == {"model": "mine", "stop": ["x"]}


@in_loop
async def test_a_limit_above_the_longest_call_is_that_of_the_longest_call() -> None:
    address = Address()
    key = await address.open()
    for path, name in (
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ):
        for asked, served in ((4096, 40), (40, 40), (7, 7), (None, None), ("x", "x")):
            said = await address.said("POST", path, token=key, json={name: asked})
            assert said["body"][name] == served, "30 of the prompt and 10 of the response"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": RENDERED}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": f"Solve: {RENDERED}"}]}]}),
        ("/v1/messages", {"messages": [], "system": RENDERED}),
        ("/v1/responses", {"input": RENDERED}),
    ],
)
@in_loop
async def test_a_rendered_prompt_is_not_rendered_again(path: str, fields: dict[str, Any]) -> None:
    address = Address()
    messages = [{"role": "user", "content": "1+2"}]
    key = await address.open(Prompt(prompt_id="a", text=RENDERED, task="lookup", answer={MESSAGES: messages}))
    assert "begin with the prompt's messages" in await address.refusal(400, "POST", path, token=key, json=fields)
    await address.said("POST", CHAT, token=key, json={"messages": messages})
    await address.said("POST", "/v1/completions", token=key, json={"prompt": RENDERED})


@pytest.mark.parametrize(
    ("is_templated", "sent", "added"),
    [
        (True, {"prompt": RENDERED}, False),
        (True, {"prompt": f"{RENDERED}get a<eos><tool>37<assistant>"}, False),
        (True, {"prompt": RENDERED, "add_special_tokens": True}, True),
        (False, {"prompt": "<bos>1+2"}, False),
        (False, {"prompt": "1+2"}, None),
        (True, {"prompt": [4, 5]}, None),
    ],
)
@in_loop
async def test_a_text_with_its_special_tokens_gets_no_further_ones(
    is_templated: bool, sent: dict[str, Any], added: bool | None
) -> None:
    address = Address()
    key = await address.open(Prompt(prompt_id="a", text=RENDERED, task="lookup", answer={TEMPLATED: is_templated}))
    said = await address.said("POST", "/v1/completions", token=key, json=sent)
    assert said["body"].get("add_special_tokens") is added
    said = await address.said("POST", CHAT, token=key, json={"messages": []})
    assert "add_special_tokens" not in said["body"], "vLLM adds none to a conversation"


@in_loop
async def test_the_text_of_a_prompt_without_a_template_is_a_message() -> None:
    address = Address()
    key = await address.open()
    await address.said("POST", CHAT, token=key, json={"messages": [{"role": "user", "content": REQUEST.prompt.text}]})


@in_loop
async def test_messages_without_tools_show_a_call_of_a_tool_as_the_text_that_it_is() -> None:
    address = Address()
    key = await address.open()
    tools = [{"name": "f"}]
    none, with_tools = [
        (await address.said("POST", "/v1/messages", token=key, json=body))["body"] for body in ({}, {"tools": tools})
    ]
    assert none["tool_choice"] == {"type": "none"}
    assert "tool_choice" not in with_tools


@in_loop
async def test_what_vllm_cannot_read_is_named_in_one_line() -> None:
    address = Address()
    key = await address.open()
    said = await address.refusal(400, "POST", "/v1/responses", token=key, json={"input": [3]})
    assert said == (
        "POST /v1/responses: body.input: Input should be a valid string; "
        "body.input.0: Input should be a valid string or a valid dictionary"
    )


@in_loop
async def test_a_body_that_grows_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "MAX_BODY_BYTES", 100)
    address = Address()
    key = await address.open()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 10

    assert "than 100 bytes" in await address.refusal(413, "POST", CHAT, token=key, content=chunks())
