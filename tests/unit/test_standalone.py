"""The program for environments in a Python of their own: what it reports, and what is ungraded."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import urllib.error
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo.config.agents import AgentsConfig
from bapo.core.errors import ConfigError
from bapo.runtime.python_environments import install, python_of
from services.agents import standalone
from services.agents.rollouts import standalone_command
from services.agents.standalone import FullError, Runner, UngradedError, chat, total
from services.agents.standalone_verifiers import UngradedError as NoRewardError
from services.agents.standalone_verifiers import reward_of, with_root_reply

EPISODE = {
    "episode_id": "g/0",
    "key": "k",
    "base_url": "http://a:1/v1",
    "lease_s": 60.0,
    "prompt": {"text": "a+c", "messages": [{"role": "user", "content": "a+c"}], "answer": {"first": 0.25}},
}


class Server:
    """Answers in place of `request`: episodes once, then what a test wrote for calls of the model."""

    def __init__(self, patch: pytest.MonkeyPatch, *says: Any) -> None:
        self.ends: list[tuple[str, str, Any]] = []
        self.asked: list[list[dict[str, Any]]] = []
        self._says, self._waiting = list(says), [EPISODE]
        patch.setattr(standalone, "request", self)

    def __call__(self, method: str, url: str, body: Any, token: str | None, *, wait_s: float = 0.0) -> Any:
        if url.endswith("/v1/episodes"):
            found, self._waiting = self._waiting, []
            return found
        if url.endswith("/chat/completions"):
            assert token == "k"
            self.asked.append([dict(message) for message in body["messages"]])
            said = self._says.pop(0)
            if isinstance(said, Exception):
                raise said
            return {"choices": [{"message": {"content": said}}]}
        self.ends.append((method, url, body))
        return None

    def serve(self, run: Any, until: int = 1, **settings: Any) -> None:
        """Run until so many ends were reported."""

        async def served() -> None:
            given = {"episodes": 1, "timeout_s": 5.0} | settings
            task = asyncio.create_task(Runner("http://a:1", run, **given).serve())
            async with asyncio.timeout(5):
                while len(self.ends) < until:  # noqa: ASYNC110 - it happens in threads
                    await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(served())


def refused(code: int, text: str) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://a", code, "", Message(), io.BytesIO(text.encode()))


async def rewarded(episode: Any) -> float:
    return 0.5


async def failing(episode: Any) -> float:
    raise ConnectionError("no server")


async def too_much(episode: Any) -> float:
    return 1.5


async def slow(episode: Any) -> float:
    await asyncio.sleep(10)
    return 1.0


def test_a_reward_is_reported_to_the_server_that_has_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.serve(rewarded)
    assert server.ends == [("POST", "http://a:1/v1/episodes/k/reward", {"reward": 0.5})]


@pytest.mark.parametrize(
    ("run", "said"),
    [(failing, "ConnectionError: no server"), (too_much, "1.5 is not in [0, 1]"), (slow, "agents.timeout_s = 0.05")],
)
def test_an_error_is_ungraded_and_never_0(run: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.serve(run, timeout_s=0.05)
    ((_, _, body),) = server.ends
    assert body["reward"] is None
    assert said in body["error"]


def test_rewards_of_steps_add_up_or_the_last_counts_and_none_is_ungraded() -> None:
    assert (total([0.25, None, 0.5], "sum"), total([0.25, 0.5, None], "last")) == (0.75, 0.5)
    with pytest.raises(UngradedError, match="no reward"):
        total([None, None], "sum")


def test_a_call_that_does_not_fit_ends_the_conversation_and_another_refusal_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Server(monkeypatch, refused(400, "no room: give its reward"), refused(400, "bad"), refused(410, "gone"))
    with pytest.raises(FullError):
        chat(EPISODE, long, "policy")
    for _ in range(2):
        with pytest.raises(UngradedError, match="the call of the model failed: 4"):
            chat(EPISODE, long, "policy")


class Trace(SimpleNamespace):
    """Of verifiers: an episode that went well, unless a test says otherwise."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"ok": True, "num_turns": 2, "rewards": {"right": 1}, "reward": 1.0, "errors": []} | fields)


def test_of_verifiers_only_a_reward_of_a_model_that_was_called_counts() -> None:
    assert reward_of(Trace()) == 1.0
    for fields, said in (
        ({"ok": False, "errors": [SimpleNamespace(message="no box")]}, "no box"),
        ({"ok": False, "stop_condition": "agent_timeout"}, "agent_timeout"),
        ({"num_turns": 0}, "the model was not called"),
        ({"rewards": {}}, "no reward from the task"),
        ({"rewards": {"right": None}}, "no reward from right"),
    ):
        with pytest.raises(NoRewardError, match=said):
            reward_of(Trace(**fields))


def test_a_harness_that_sets_no_root_reply_gets_the_last_text_of_the_model() -> None:
    class Silent:
        async def launch(self, ctx: Any, trace: Any) -> str:
            return "ended"

    def launched(**fields: Any) -> Any:
        trace = SimpleNamespace(root_reply=None, last_reply="42", assistant_messages=["42"])
        vars(trace).update(fields)
        assert asyncio.run(with_root_reply(Silent)().launch(None, trace)) == "ended"
        return trace.root_reply

    assert launched() == "42"
    assert launched(root_reply="own") == "own"
    assert launched(assistant_messages=[]) is None


def test_a_step_of_skyrl_gym_may_rewrite_the_message_and_its_environment_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[bool] = []

    class Env:
        def init(self, prompt: Any) -> Any:
            return prompt, {}

        def step(self, text: str) -> Any:
            following = [{"role": "user", "content": "next"}]
            return {"observations": following, "reward": 0.25, "done": False, "postprocessed_action": text.upper()}

        def close(self) -> None:
            closed.append(True)

    gym = SimpleNamespace(make=lambda name, env_config, extras: Env(), register=lambda **fields: None)
    monkeypatch.setitem(sys.modules, "skyrl_gym", gym)  # type: ignore[arg-type]
    server = Server(monkeypatch, "a", "b", refused(400, "give its reward"))
    server.serve(standalone.skyrl_gym("x", argparse.Namespace(max_turns=9, model="policy"), {}))
    assert server.ends[0][2] == {"reward": 0.5}
    assert [message["content"] for message in server.asked[2]] == ["a+c", "A", "next", "B", "next"]
    assert closed == [True]


def test_a_package_without_its_python_is_a_mistake_of_the_config_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_ENVS", str(tmp_path))
    with pytest.raises(ConfigError, match="bapo env install verifiers"):
        standalone_command("verifiers:mine", AgentsConfig(), "http://a:1")
    with pytest.raises(ConfigError, match="did you mean 'verifiers'"):
        install("verifier")


def test_the_program_runs_with_the_settings_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_ENVS", str(tmp_path))
    python = python_of("verifiers")
    python.parent.mkdir(parents=True)
    python.touch()
    settings = AgentsConfig(max_turns=7, options={"limit": 3})
    command = standalone_command("verifiers:mine", settings, "http://a:1")
    assert command[:4] == [str(python), "-P", standalone.__file__, "verifiers:mine"]
    given = dict(zip(command[4::2], command[5::2], strict=True))
    assert (given["--url"], given["--max-turns"], json.loads(given["--options"])) == ("http://a:1", "7", {"limit": 3})
    own = standalone_command("verifiers:mine", AgentsConfig(python=sys.executable), "http://a:1")
    assert own[0] == sys.executable
