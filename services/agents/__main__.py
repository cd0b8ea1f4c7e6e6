"""`python -m services.agents --config RUN/config.toml --run-dir RUN [--url URL] [--name NAME]`: runs `agents.rollout`.

Each process runs `agents.episodes_per_process` episodes at a time; more processes, also on other hosts, run more.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import uuid

from openai import AsyncOpenAI

from bapo.config.agents import AgentsConfig
from bapo.core.errors import ConfigError
from bapo.runtime.process import Flags, run_process
from bapo.transport.endpoints import agents_url
from bapo.transport.episode_client import EpisodeClient, OpenedEpisode
from services.agents.outcome import Rollout
from services.agents.rollouts import load_rollout, standalone_command, standalone_of
from services.agents.runner import AgentRunner

START_TIMEOUT_S = 600.0
"""For the rollout server to announce the address."""
MAX_RETRIES = 8
"""Of a call of the model, with growing pauses: a minute in which the server may restart."""
CALL_TIMEOUT_S = 1800.0


def main(flags: Flags) -> None:
    """Run episodes until SIGTERM. Raises: ConfigError."""
    settings = flags.config.agents
    if settings is None or settings.rollout is None:
        raise ConfigError(
            "agents.rollout is not set: there is nothing to run; agents outside call the address themselves"
        )
    is_foreign = standalone_of(settings.rollout) is not None
    if is_foreign:
        standalone_command(settings.rollout, settings, "")  # a missing interpreter is reported at once
    else:
        rollout = load_rollout(settings.rollout, settings)
    url = flags.extra.url or agents_url(flags.config, flags.run, timeout_s=START_TIMEOUT_S)
    if is_foreign:
        command = standalone_command(settings.rollout, settings, url, agent=_agent(flags.extra.name))
        os.execv(command[0], command)  # noqa: S606 - supervised as this process is; its token is in the environment

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # one line per call
    asyncio.run(_run(settings, rollout, EpisodeClient(url, agent=_agent(flags.extra.name)), url))


def _agent(name: str | None) -> str:
    """NAME@START."""
    return f"{name}@{uuid.uuid4().hex}" if name else ""


async def _run(settings: AgentsConfig, rollout: Rollout, service: EpisodeClient, url: str) -> None:
    # One client, whose copies share its connections: a new one takes 20 ms.
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=MAX_RETRIES, timeout=CALL_TIMEOUT_S)

    def make_client(episode: OpenedEpisode) -> AsyncOpenAI:
        # Its own address: of several rollout servers behind `url`, the one that has the episode.
        return client.with_options(base_url=episode.base_url, api_key=episode.key)

    runner = AgentRunner(settings, rollout, service, make_client, EpisodeClient)
    task = asyncio.ensure_future(runner.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="address of the agents (default: from the config and RUN/ports)")
    parser.add_argument("--name", help="of this process, if a restarted one has the same")


if __name__ == "__main__":
    run_process("services.agents", main, add_flags=_add_flags)
