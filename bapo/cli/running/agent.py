"""`bapo agent`: the address that agents call, or a program of the user's for one episode after the other."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bapo.cli.arguments import Run, open_run, say
from bapo.cli.running.runs import state_name
from bapo.config.load import load_resolved
from bapo.core.errors import BapoError, ConfigError, ContractError, DeadlineError, GoneError, UnavailableError
from bapo.core.text import plain
from bapo.runtime.auth.api_tokens import FixedToken, Role
from bapo.runtime.auth.token_store import set_of_run
from bapo.runtime.run_directory.layout import UNDER_WAY, RunDirectory
from bapo.tasks.base import columns_of
from bapo.transport.endpoints import agents_url
from bapo.transport.episode_client import EpisodeClient, OpenedEpisode

WAIT_S = 2.0
"""Long poll for an episode; after each the state of the run is looked at."""
RETRY_S = 10.0
"""How long a call is repeated while the address does not respond."""
POLL_S = 0.5
"""How soon Ctrl-C ends a program."""
BEATS_PER_LEASE = 3
SHOWN = 400
"""Characters of a failed program's output."""
MAX_VARIABLE_BYTES = 100_000
"""Linux starts no program with a longer one; the prompt is on standard input, too."""
UNGRADED, GONE = "ungraded", "gone"
"""Ends of an episode without a reward."""


def agent(
    run: Run,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND...]", help="Run for each episode; after --.")
    ] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Episodes to run; default: until Ctrl-C.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Episodes at a time.")] = 4,
) -> None:
    """Print the address that agents call, or run a program for each episode of a running run of agents.

    The program gets OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, the prompt as JSON on
    standard input (`messages`, `text`, `answer`), and its last message in BAPO_PROMPT. The last line that it prints is
    the reward, 0 to 1; if it prints nothing, the task's reward function grades the last reply. Any other exit code than
    0, any other last line, more than agents.timeout_s seconds, or no call of the model is ungraded: the episode begins
    again. Ends with the run, after --episodes, or at Ctrl-C; with exit code 1 if every episode was ungraded.

    Examples:

      bapo agent latest
      bapo agent outputs/mine -- python my_agent.py
      bapo agent outputs/mine --episodes 8 --parallel 8 -- node agent.js
    """
    directory = open_run(run)
    url, token_file, timeout_s = _address(directory)
    if not command:
        say(
            f"base_url  {url}/v1\n"
            f"token     {token_file} (opens episodes; each episode has a key of its own)\n"
            f'open one  curl {url}/v1/episodes -H "Authorization: Bearer $(cat {token_file})" '
            "-H 'Content-Type: application/json' -d '{\"count\": 1, \"wait_s\": 30}'\n"
            f"run yours bapo agent {directory.path} -- python my_agent.py"
        )
        return
    token = FixedToken(token_file.read_text().strip()) if token_file.exists() else None
    runner = ProgramRunner(
        EpisodeClient(url, token=token, retry_s=RETRY_S), command, timeout_s=timeout_s, is_over=lambda: _over(directory)
    )
    ends = runner.run(episodes, parallel)
    say(", ".join(f"{number} {word}" for word, number in sorted(ends.items())) or "no episode")
    if ends and set(ends) <= {UNGRADED, GONE}:
        raise typer.Exit(1)


def _over(directory: RunDirectory) -> str:
    """The state of a run that serves no agents any more; empty for one that does, or may."""
    fields = directory.read_run()
    if fields.get("status") is None or (state := state_name(directory, fields)) in UNDER_WAY:
        return ""
    return state


def _address(directory: RunDirectory) -> tuple[str, Path, float]:
    """URL of the address, the file of the token that opens episodes, and the longest seconds of an episode."""
    config = load_resolved(directory.config_path)
    if config.agents is None:
        raise ConfigError(f"run {directory.path} has no [agents]: its responses are not episodes (docs/agents.md)")
    if state := _over(directory):
        raise ConfigError(f"run {directory.path} serves no agents: it is {state}")
    try:
        url = config.agents.url or agents_url(config, directory, timeout_s=0.0)
    except DeadlineError as error:
        raise UnavailableError(f"run {directory.path} does not serve agents: is it running? {error}") from error
    return url, set_of_run(directory.path).path_of(Role.AGENT), config.agents.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a program ended."""

    returncode: int | None
    """None: it took too long."""
    stdout: str = ""
    stderr: str = ""


class ProgramRunner:
    """Runs a program for episodes, several at a time."""

    def __init__(
        self,
        service: EpisodeClient,
        command: list[str],
        *,
        timeout_s: float = math.inf,
        is_over: Callable[[], str] = lambda: "",
    ) -> None:
        """
        Args:
            timeout_s: after which a program is stopped, and its episode is ungraded.
            is_over: the state of a run that serves no agents any more, or "".
        """
        self._service, self._command, self._timeout_s, self._is_over = service, command, timeout_s, is_over
        self._ends: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._left: int | None = None
        self._said = ""

    def run(self, num: int | None, parallel: int) -> Counter[str]:
        """Until the given number of episodes have ended, the run ends, or Ctrl-C. Returns: how they ended."""
        self._left = num
        before = signal.signal(signal.SIGINT, lambda *_: self._stopping.set())
        try:
            with ThreadPoolExecutor(parallel) as pool:
                for future in [pool.submit(self._lane) for _ in range(parallel)]:
                    future.result()
        finally:
            signal.signal(signal.SIGINT, before)
        return self._ends

    def _lane(self) -> None:
        while not self._stopping.is_set() and self._takes():
            episodes = self._opened()
            if not episodes:
                self._give_seat_back()
            for episode in episodes:
                end = self._one(episode)
                with self._lock:
                    self._ends[end] += 1
                say(f"{plain(episode.episode_id)}: {plain(end)}")

    def _opened(self) -> list[OpenedEpisode]:
        """Empty if none waits, and after the end of the run, which stops all lanes."""
        try:
            found = self._service.open(1, wait_s=WAIT_S)
        except UnavailableError as error:
            found, words = [], plain(str(error))
        else:
            words = ""
        if not found and (state := self._is_over()):
            self._say_once(f"the run is {state}: it has no more episodes")
            self._stopping.set()
        elif words:
            self._say_once(f"waiting for the address of the agents: {words}")
        elif found:
            self._said = ""
        return found

    def _say_once(self, words: str) -> None:
        with self._lock:
            if self._said != words:
                self._said = words
                say(words)

    def _takes(self) -> bool:
        with self._lock:
            if self._left is None:
                return True
            self._left -= 1
            return self._left >= 0

    def _give_seat_back(self) -> None:
        with self._lock:
            if self._left is not None:
                self._left += 1

    def _one(self, episode: OpenedEpisode) -> str:
        done = self._finished(episode)
        try:
            if done is None:
                self._service.give_back(episode.key, "stopped")
                return "given back"
            if done.returncode is None:
                return self._ungraded(episode, f"it took longer than agents.timeout_s = {self._timeout_s:g}")
            if done.returncode != 0:
                words = last_words(done.stderr) or last_words(done.stdout)
                return self._ungraded(episode, f"exit code {done.returncode}: {words}")
            return self._report(episode, done.stdout.strip().rpartition("\n")[2].strip())
        except GoneError as error:
            say(f"{plain(episode.episode_id)}: {plain(str(error))}")
            return GONE
        except ContractError as error:  # no call of the model: the server has made it ungraded
            say(f"{plain(episode.episode_id)}: {plain(str(error))}")
            return UNGRADED
        except UnavailableError as error:
            say(f"{plain(episode.episode_id)}: its end was not reported, and its lease ends: {plain(str(error))}")
            return GONE

    def _ungraded(self, episode: OpenedEpisode, why: str) -> str:
        say(f"{plain(episode.episode_id)}: {plain(why)}")
        self._service.ungraded(episode.key, why)
        return UNGRADED

    def _report(self, episode: OpenedEpisode, line: str) -> str:
        if not line:
            self._service.grade(episode.key)
            return "graded by the task"
        reward = _reward_of(line)
        if reward is None:
            return self._ungraded(episode, f"the last line is not a reward from 0 to 1: {line[:SHOWN]}")
        self._service.reward(episode.key, reward)
        return f"reward {reward:g}"

    def _finished(self, episode: OpenedEpisode) -> Done | None:
        """The program's end, with signs of life meanwhile; None if the user stopped it."""
        process = self._started(episode)
        given: str | None = json.dumps(input_of(episode))
        began = time.monotonic()
        beat_at = began + episode.lease_s / BEATS_PER_LEASE
        while True:
            try:
                output, errors = process.communicate(given, timeout=POLL_S)
                return Done(returncode=process.returncode, stdout=output, stderr=errors)
            except subprocess.TimeoutExpired:
                given = None
            is_late = time.monotonic() - began > self._timeout_s
            if is_late or self._stopping.is_set():
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return Done(returncode=None) if is_late else None
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + episode.lease_s / BEATS_PER_LEASE
                self._beat(episode)

    def _started(self, episode: OpenedEpisode) -> subprocess.Popen[str]:
        """Raises: ConfigError."""
        origin = episode.base_url.removesuffix("/v1")
        own = {
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_KEY": episode.key,
            "ANTHROPIC_BASE_URL": origin,
            "ANTHROPIC_API_KEY": episode.key,
        }
        prompt = str(episode.prompt.messages[-1]["content"])
        if "\0" not in prompt and len(prompt.encode(errors="replace")) < MAX_VARIABLE_BYTES:
            own["BAPO_PROMPT"] = prompt
        try:
            return subprocess.Popen(
                self._command, env=os.environ | own, text=True, errors="replace", start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            self._service.give_back(episode.key, "the program did not start")
            raise ConfigError(f"{self._command[0]} cannot be started: {error.strerror}") from error

    def _beat(self, episode: OpenedEpisode) -> None:
        try:
            self._service.heartbeat(episode.key)
        except BapoError as error:
            say(f"{plain(episode.episode_id)}: {plain(str(error))}")


def input_of(episode: OpenedEpisode) -> dict[str, Any]:
    """What a program reads: the prompt as the model's tokenizer gets it, as the messages that a conversation begins
    with, its columns, and what the episode is for."""
    prompt = episode.prompt
    return {
        "text": prompt.text,
        "messages": prompt.messages,
        "answer": dict(columns_of(prompt)),
        "purpose": episode.purpose,
    }


def last_words(output: str) -> str:
    """The last line that says something, as of a traceback."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:SHOWN] if lines else ""


def _reward_of(line: str) -> float | None:
    try:
        reward = float({"True": 1, "False": 0}.get(line, line))
    except ValueError:
        return None
    return reward if 0 <= reward <= 1 else None
