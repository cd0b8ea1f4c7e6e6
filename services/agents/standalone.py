"""Episodes of environments that need a Python of their own: verifiers, OpenEnv, skyrl-gym.

    PYTHON standalone.py verifiers:MODULE --url http://127.0.0.1:8720 [--max-turns 64] [--options JSON]
    PYTHON standalone.py verifiers:MODULE --export tasks.jsonl

With standalone_verifiers.py it can be copied to any host. It imports the standard library and the one package, speaks
HTTP to the agents' address, and is what the processes of `agents.rollout` become for these prefixes. The token of role
`agent` is that of BAPO_TOKEN_FILE or BAPO_TOKEN.

    verifiers:MODULE    a taskset (an installed module, or file.py). Its tasks are the prompts: `--export` writes a row
                        for each, whose column `key` finds the task again. Options: {"taskset": {...}, "limit": 1000,
                        "harness": {"id": "bash", ...}}; without a harness the taskset's, else a chat with its tools
    openenv:URL         a server. Options: {"action": "message", "observation": "text", "reset": ["seed"],
                        "reward": "sum" or "last"}: the field that has the model's text, that which it reads, and the
                        columns that reset gets
    skyrl_gym:ID        an environment by its id, or module:Class. Options: {"env_config": {...}, "reward": ...}; the
                        row's columns are its `extras`

An episode without a reply of the model, with an error of its environment, or without a reward is ungraded, never 0.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import io
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("agents")

Episode = dict[str, Any]
Message = dict[str, Any]
Run = Callable[[Episode], Awaitable[float]]

WAIT_S = 1.5
"""Long poll for episodes."""
RETRY_S = 120.0
"""How long a call is repeated while the server restarts."""
CALL_TIMEOUT_S = 1800.0
GIVE_BACK_S = 1.8
ROUNDING = 1e-6
"""By which a sum of rewards may miss 0 or 1."""
AWAY = (408, 425, 429, 500, 502, 503, 504)
LIMITS = ("give its reward", "maximum context length", "maximum model length")
"""In the refusals of a call that does not fit any more."""


class UngradedError(Exception):
    """The episode has no reward."""


class FullError(Exception):
    """A limit of turns or tokens: the conversation ends."""


# -- HTTP


def request(method: str, url: str, body: Any, token: str | None, *, wait_s: float = 60.0) -> Any:
    """JSON of an answer, repeated while the server is away. Raises: HTTPError; OSError."""
    deadline = time.monotonic() + RETRY_S
    for count in itertools.count():
        headers = {"content-type": "application/json", "x-stainless-retry-count": str(count)}
        if token:
            headers["authorization"] = f"Bearer {token}"
        sent = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)  # noqa: S310 - http
        try:
            with urllib.request.urlopen(sent, timeout=wait_s) as answer:  # noqa: S310
                data = answer.read()
                return json.loads(data) if data else None
        except urllib.error.HTTPError as error:
            if error.code not in AWAY or time.monotonic() > deadline:
                raise
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(min(2.0, 0.1 * 2**count))
    raise AssertionError


def own_token() -> str | None:
    """The token of this process, read again for each call: it may be replaced."""
    if path := os.environ.get("BAPO_TOKEN_FILE"):
        return Path(path).read_text().strip()
    return os.environ.get("BAPO_TOKEN")


def episode_url(episode: Episode, path: str) -> str:
    """Of the server that has the episode."""
    return f"{episode['base_url'].removesuffix('/v1')}/v1/episodes/{episode['key']}{path}"


def chat(episode: Episode, messages: list[Message], model: str) -> str:
    """The model's next text, which becomes part of the messages. Raises: FullError at a limit."""
    body = {"model": model, "messages": messages}
    try:
        found = request("POST", f"{episode['base_url']}/chat/completions", body, episode["key"], wait_s=CALL_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        if error.code == 400 and len(messages) > 1 and any(phrase in said for phrase in LIMITS):
            raise FullError(said) from error
        raise UngradedError(f"the call of the model failed: {error.code} {said:.300}") from error
    text: str = found["choices"][0]["message"]["content"] or ""
    messages.append({"role": "assistant", "content": text})
    return text


# -- episodes


class Runner:
    """Takes episodes, and reports how they end."""

    def __init__(self, url: str, run: Run, *, episodes: int, timeout_s: float, agent: str = "") -> None:
        self._url, self._run, self._most, self._timeout_s, self._agent = url, run, episodes, timeout_s, agent
        self._running: dict[asyncio.Task[None], Episode] = {}
        self._reporting: set[str] = set()
        """Keys of those that have ended."""

    async def serve(self) -> None:
        """Run episodes until cancelled, which gives back those that have not ended."""
        try:
            while True:
                room = self._most - len(self._running)
                if room < 1:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                body = {"count": room, "wait_s": WAIT_S, "agent": self._agent}
                for episode in await in_thread(request, "POST", f"{self._url}/v1/episodes", body, own_token()):
                    task = asyncio.create_task(self._one(episode))
                    self._running[task] = episode
                    task.add_done_callback(self._running.pop)
        finally:
            # Of those that have ended the reports go out; the others begin again.
            ends = [
                task if episode["key"] in self._reporting else self._end(episode, "DELETE", "", None)
                for task, episode in self._running.items()
            ]
            await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), GIVE_BACK_S)

    async def _one(self, episode: Episode) -> None:
        beating = asyncio.create_task(self._beat(episode))
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                reward = await self._run(episode)
            if not -ROUNDING <= reward <= 1 + ROUNDING:
                raise UngradedError(f"the reward {reward} is not in [0, 1]")  # noqa: TRY301
            body: Message = {"reward": min(max(reward, 0.0), 1.0)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a foreign environment raises anything
            message = f"{type(error).__name__}: {error}"
            if limit.expired():
                message = f"it took longer than agents.timeout_s = {self._timeout_s:g}"
            log.warning("episode %s is ungraded: %r", episode["episode_id"], message)
            body = {"reward": None, "error": message[:1000]}
        finally:
            beating.cancel()
        self._reporting.add(episode["key"])
        await self._end(episode, "POST", "/reward", body)
        self._reporting.discard(episode["key"])

    async def _end(self, episode: Episode, method: str, path: str, body: Any) -> None:
        try:
            await in_thread(request, method, episode_url(episode, path), body, None)
        except OSError as error:  # gone, or away for longer than we wait: it begins again
            log.warning("the end of episode %s was not accepted: %s", episode["episode_id"], error)

    async def _beat(self, episode: Episode) -> None:
        while True:
            await asyncio.sleep(episode["lease_s"] / 3)
            try:
                await in_thread(request, "POST", episode_url(episode, "/heartbeat"), {}, None)
            except OSError as error:
                log.debug("heartbeat of %s: %s", episode["episode_id"], error)


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """In a daemon thread of its own: one that hangs holds up neither the others nor the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.cancelled():
            setter(value)

    def work() -> None:
        try:
            found = function(*args)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            loop.call_soon_threadsafe(settle, future.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, future.set_result, found)

    threading.Thread(target=work, daemon=True).start()
    return await future


def total(rewards: list[float | None], how: str) -> float:
    """The reward of an episode from those of its steps. Raises: UngradedError without one."""
    given = [float(reward) for reward in rewards if reward is not None]
    if not given:
        raise UngradedError("the environment gave no reward")
    return given[-1] if how == "last" else sum(given)


# -- skyrl-gym


def skyrl_gym(name: str, flags: argparse.Namespace, options: dict[str, Any]) -> Run:
    """Environments of skyrl-gym: init, step, close."""
    gym: Any = importlib.import_module("skyrl_gym")
    if ":" in name:
        gym.register(id=name, entry_point=name)
    how, env_config = options.get("reward", "sum"), options.get("env_config", {})

    def run(episode: Episode) -> float:
        prompt = episode["prompt"]
        opening = prompt["messages"]
        env = gym.make(name, env_config=env_config, extras=dict(prompt["answer"]))
        rewards: list[float | None] = []
        try:
            messages, _ = env.init([dict(message) for message in opening])
            messages = [dict(message) for message in messages]
            for _ in range(flags.max_turns):
                step = env.step(chat(episode, messages, flags.model))
                rewards.append(step["reward"])
                if step.get("postprocessed_action") is not None:
                    messages[-1]["content"] = step["postprocessed_action"]
                if step["done"]:
                    break
                messages += step["observations"]
        except FullError as error:
            log.debug("a conversation ends at a limit: %s", error)
        finally:
            env.close()
        return total(rewards, how)

    return lambda episode: in_thread(run, episode)


# -- OpenEnv


def openenv(name: str, flags: argparse.Namespace, options: dict[str, Any]) -> Run:
    """A server of OpenEnv: reset and step over its socket, one session an episode."""
    core: Any = importlib.import_module("openenv.core")
    how, action, field = options.get("reward", "sum"), options.get("action", "message"), options.get("observation")

    def shown(observation: Any) -> str:
        if field is not None:
            return str(observation[field])
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation)

    def run(episode: Episode) -> float:
        prompt = episode["prompt"]
        messages = [dict(message) for message in prompt["messages"]]
        columns = {column: prompt["answer"][column] for column in options.get("reset", ())}
        rewards: list[float | None] = []
        with core.GenericEnvClient(base_url=name).sync() as env:
            opening = env.reset(**columns)
            if opening.observation:
                messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n{shown(opening.observation)}"}
            try:
                for _ in range(flags.max_turns):
                    result = env.step({action: chat(episode, messages, flags.model)})
                    rewards.append(result.reward)
                    if result.done:
                        break
                    messages.append({"role": "user", "content": shown(result.observation)})
            except FullError as error:
                log.debug("a conversation ends at a limit: %s", error)
        return total(rewards, how)

    return lambda episode: in_thread(run, episode)


# -- verifiers


def verifiers(name: str, flags: argparse.Namespace, options: dict[str, Any]) -> Run:
    """Tasks of verifiers, run by its agents."""
    run: Run = neighbour("standalone_verifiers").make_run(name, flags, options)
    return run


def neighbour(module: str) -> Any:
    """A module next to this file, whose folder is not searched: a package may have modules of the same names."""
    spec = importlib.util.spec_from_file_location(f"bapo_{module}", Path(__file__).with_name(f"{module}.py"))
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


# -- the process


KINDS: dict[str, Callable[[str, argparse.Namespace, dict[str, Any]], Run]] = {
    "openenv": openenv,
    "skyrl_gym": skyrl_gym,
    "verifiers": verifiers,
}


async def main(flags: argparse.Namespace, kind: str, name: str, options: dict[str, Any]) -> None:
    """Run episodes until SIGTERM."""
    run = KINDS[kind](name, flags, options)
    if flags.check:
        return
    runner = Runner(flags.url.rstrip("/"), run, episodes=flags.episodes, timeout_s=flags.timeout_s, agent=flags.agent)
    task = asyncio.ensure_future(runner.serve())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except (asyncio.CancelledError, TimeoutError):  # what was not given back in time has a lease that ends
        log.info("stopped")


def importable(kind: str, name: str) -> str:
    """The module of a file, which is found from now on, also by processes that a package starts; any other name as it
    is."""
    folders = [os.getcwd()]
    if kind == "verifiers" and name.endswith(".py"):
        folders.append(str(Path(name).resolve().parent))
        name = Path(name).stem
    sys.path += folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *folders])
    return name


def print_any_text() -> None:
    """As ours, which cannot be imported here: a letter that the encoding does not have is printed as `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    print_any_text()
    parser = argparse.ArgumentParser(description="Run episodes of a foreign environment.")
    parser.add_argument("name", help="verifiers:MODULE, openenv:URL or skyrl_gym:ID")
    parser.add_argument("--url", default="http://127.0.0.1:8720", help="the agents' address, without /v1")
    parser.add_argument("--agent", default="", help="NAME@START of this process, if a restarted one has its NAME")
    parser.add_argument("--episodes", type=int, default=32, help="at a time")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of an episode")
    parser.add_argument("--max-turns", type=int, default=64, help="calls of the model in an episode")
    parser.add_argument("--model", default="policy", help="name of the policy")
    parser.add_argument("--options", default="{}", help="of the environment, as JSON")
    parser.add_argument("--check", action="store_true", help="load the environment, and end")
    parser.add_argument("--export", metavar="FILE", help="write the tasks of verifiers as a data set, and end")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpx2", "aiohttp.access", "verifiers"):  # a line per call
        logging.getLogger(chatty).setLevel(logging.WARNING)
    prefix, _, rest = given.name.partition(":")
    if prefix not in KINDS or not rest:
        parser.error(f"{given.name!r} is none of {', '.join(f'{kind}:...' for kind in KINDS)}")
    rest, settings = importable(prefix, rest), json.loads(given.options)
    if given.export:
        neighbour("standalone_verifiers").export_tasks(rest, given.export, settings)
    else:
        asyncio.run(main(given, prefix, rest, settings))
        logging.shutdown()
        os._exit(0)  # without waiting for environments that hang
