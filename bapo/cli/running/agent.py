"""`bapo agent`: the address that agents call, or a program of the user's for one episode after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import Run, open_run, say
from bapo.cli.running.runs import state_name
from bapo.config.load import load_resolved
from bapo.core.errors import BapoError, ConfigError, DeadlineError, GoneError, UnavailableError
from bapo.core.text import plain
from bapo.runtime.auth.api_tokens import FixedToken, Role
from bapo.runtime.auth.token_store import set_of_run
from bapo.runtime.run_directory.layout import UNDER_WAY, RunDirectory
from bapo.transport.endpoints import agents_url
from bapo.transport.episode_client import EpisodeClient, OpenedEpisode

WAIT_S = 30.0
"""Long poll for an episode."""
POLL_S = 0.5
"""How soon Ctrl-C ends a program."""
BEATS_PER_LEASE = 3
SHOWN = 400
"""Characters of a failed program's output."""


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
    standard input, and its text in BAPO_PROMPT. The last line that it prints is the reward, 0 to 1; if it prints
    nothing, the task's reward function grades the last reply. Any other exit code than 0, or any other last line, is
    ungraded: the episode begins again.

    Examples:

      bapo agent latest
      bapo agent outputs/mine -- python my_agent.py
      bapo agent outputs/mine --episodes 8 --parallel 8 -- node agent.js
    """
    directory = open_run(run)
    url, token_file = _address(directory)
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
    ends = ProgramRunner(EpisodeClient(url, token=token), command).run(episodes, parallel)
    say(", ".join(f"{number} {word}" for word, number in sorted(ends.items())) or "no episode")


def _address(directory: RunDirectory) -> tuple[str, Path]:
    """URL of the address, and the file of the token that opens episodes."""
    config = load_resolved(directory.config_path)
    if config.agents is None:
        raise ConfigError(f"run {directory.path} has no [agents]: its responses are not episodes (docs/agents.md)")
    fields = directory.read_run()
    if fields.get("status") is not None and (state := state_name(directory, fields)) not in UNDER_WAY:
        raise ConfigError(f"run {directory.path} serves no agents: it is {state}")
    try:
        url = config.agents.url or agents_url(config, directory, timeout_s=0.0)
    except DeadlineError as error:
        raise UnavailableError(f"run {directory.path} does not serve agents: is it running? {error}") from error
    return url, set_of_run(directory.path).path_of(Role.AGENT)


class ProgramRunner:
    """Runs a program for episodes, several at a time."""

    def __init__(self, service: EpisodeClient, command: list[str]) -> None:
        self._service, self._command = service, command
        self._ends: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._left: int | None = None

    def run(self, num: int | None, parallel: int) -> Counter[str]:
        """Until the given number of episodes have ended, or Ctrl-C. Returns: how they ended."""
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
            episodes = self._service.open(1, wait_s=WAIT_S)
            if not episodes:
                self._give_seat_back()
            for episode in episodes:
                end = self._one(episode)
                with self._lock:
                    self._ends[end] += 1
                say(f"{plain(episode.episode_id)}: {plain(end)}")

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
            if done.returncode != 0:
                words = (done.stderr or done.stdout).strip()[-SHOWN:]
                self._service.ungraded(episode.key, f"exit code {done.returncode}: {words}")
                say(f"exit code {done.returncode}: {plain(words)}")
                return "ungraded"
            return self._report(episode, done.stdout.strip().rpartition("\n")[2].strip())
        except GoneError as error:
            say(f"{plain(episode.episode_id)}: {plain(str(error))}")
            return "gone"

    def _report(self, episode: OpenedEpisode, line: str) -> str:
        if not line:
            self._service.grade(episode.key)
            return "graded by the task"
        reward = _reward_of(line)
        if reward is None:
            self._service.ungraded(episode.key, f"the last line is not a reward: {line[:SHOWN]}")
            say(f"the last line is not a reward from 0 to 1: {plain(line[:SHOWN])}")
            return "ungraded"
        self._service.reward(episode.key, reward)
        return f"reward {reward:g}"

    def _finished(self, episode: OpenedEpisode) -> subprocess.CompletedProcess[str] | None:
        """The program's end, with signs of life meanwhile; None if the user stopped it."""
        origin = episode.base_url.removesuffix("/v1")
        own = {
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_KEY": episode.key,
            "ANTHROPIC_BASE_URL": origin,
            "ANTHROPIC_API_KEY": episode.key,
            "BAPO_PROMPT": episode.prompt.text,
        }
        prompt = {"text": episode.prompt.text, "answer": dict(episode.prompt.answer), "purpose": episode.purpose}
        try:
            process = subprocess.Popen(
                self._command, env=os.environ | own, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            self._service.give_back(episode.key, "the program did not start")
            raise ConfigError(f"{self._command[0]} cannot be started: {error.strerror}") from error
        given: str | None = json.dumps(prompt)
        beat_at = time.monotonic() + episode.lease_s / BEATS_PER_LEASE
        while True:
            try:
                output, errors = process.communicate(given, timeout=POLL_S)
                return subprocess.CompletedProcess(self._command, process.returncode, output, errors)
            except subprocess.TimeoutExpired:
                given = None
            if self._stopping.is_set():
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + episode.lease_s / BEATS_PER_LEASE
                self._beat(episode)

    def _beat(self, episode: OpenedEpisode) -> None:
        try:
            self._service.heartbeat(episode.key)
        except BapoError as error:
            say(f"{plain(episode.episode_id)}: {plain(str(error))}")


def _reward_of(line: str) -> float | None:
    try:
        reward = float(line)
    except ValueError:
        return None
    return reward if 0 <= reward <= 1 else None
