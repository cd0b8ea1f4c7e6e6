"""Runs a user's agents: takes episodes, calls `rollout` for each, and reports its reward.

    open --episode--> rollout(client, prompt) --float--> reward
                             |--GRADE--> the task's reward function grades the last text
                             |--None, an exception, too long--> ungraded: begun again, never a reward of 0

All episodes of a process run in one event loop: a rollout that blocks it holds up the others, and their heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from bapo.config.agents import AgentsConfig
from bapo.core.errors import BapoError, UnavailableError
from bapo.core.reward_details import MAX_DETAILS, is_fact
from bapo.core.types import SAME_REWARD
from bapo.core.user_code import place_of
from bapo.tasks.grading.answers import number_of
from bapo.transport.episode_client import EpisodeClient, OpenedEpisode
from services.agents.loop_watch import watch_loop
from services.agents.outcome import GRADE, Grade, OpenAIClient, Outcome, Rollout

log = logging.getLogger(__name__)

WAIT_S = 1.5
"""Long poll for episodes: shorter than the end of a process may take."""
PAUSE_S = 2.0
"""After a failed poll."""
GIVE_BACK_S = 1.8
"""The launcher waits for two seconds (`services.launcher.supervision.children`)."""
BEATS_PER_LEASE = 3


class AgentRunner:
    """Used in one event loop."""

    def __init__(
        self,
        settings: AgentsConfig,
        rollout: Rollout,
        service: EpisodeClient,
        make_client: Callable[[OpenedEpisode], OpenAIClient],
        make_service: Callable[[str], EpisodeClient],
    ) -> None:
        """
        Args:
            service: opens episodes.
            make_client: an `AsyncOpenAI` for an episode.
            make_service: the client of the server at a URL, which has an episode.
        """
        self._settings, self._rollout, self._service, self._make_client = settings, rollout, service, make_client
        self._make_service, self._services = make_service, dict[str, EpisodeClient]()
        self._running: dict[asyncio.Task[None], OpenedEpisode] = {}
        self._reporting: set[str] = set()
        """Keys of those that have ended, whose report is on its way."""
        self._freed = asyncio.Event()
        self._polling: asyncio.Future[list[OpenedEpisode]] | None = None
        """The open poll: what it brings is ours, also when the runner stops meanwhile."""

    async def run(self) -> None:
        """Run episodes until cancelled, which gives back those that have not ended."""
        watching = asyncio.create_task(watch_loop())
        try:
            while True:
                room = self._settings.episodes_per_process - len(self._running)
                if room < 1:
                    self._freed.clear()
                    await self._freed.wait()
                    continue
                for episode in await self._open(room):
                    task = asyncio.create_task(self._run_one(episode))
                    self._running[task] = episode
                    task.add_done_callback(self._end)
                self._polling = None  # what it brought is running
        finally:
            watching.cancel()
            await self._give_all_back()

    async def _open(self, room: int) -> list[OpenedEpisode]:
        self._polling = asyncio.ensure_future(asyncio.to_thread(self._service.open, room, wait_s=WAIT_S))
        try:
            return await asyncio.shield(self._polling)
        except UnavailableError as error:
            log.warning("no episodes: %s", error)
            await asyncio.sleep(PAUSE_S)
            return []

    def _service_of(self, episode: OpenedEpisode) -> EpisodeClient:
        url = episode.base_url.removesuffix("/v1")
        if url not in self._services:
            self._services[url] = self._make_service(url)
        return self._services[url]

    def _end(self, task: asyncio.Task[None]) -> None:
        self._reporting.discard(self._running.pop(task).key)
        self._freed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an episode ended with a bug of its runner", exc_info=error)

    async def _run_one(self, episode: OpenedEpisode) -> None:
        beating = asyncio.create_task(self._beat(episode))
        try:
            report = await self._reported(episode)
        finally:
            beating.cancel()
        self._reporting.add(episode.key)
        try:
            state = await asyncio.to_thread(report)
            log.debug("episode %s: %s", episode.episode_id, state)
        except BapoError as error:  # gone, or the service is down for longer than the client waits: begun again
            log.warning("the end of episode %s was not accepted: %s", episode.episode_id, error)

    async def _reported(self, episode: OpenedEpisode) -> Callable[[], str]:
        """Run an episode. Returns: the call that reports its end."""
        service = self._service_of(episode)
        ungraded = partial(service.ungraded, episode.key)
        client = self._make_client(episode)
        limit = asyncio.timeout(self._settings.timeout_s)
        try:
            async with limit:
                reward, facts = _without_facts(await self._rollout(client, episode.prompt))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # a user's agent raises anything, or exits
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise  # the runner's stop, and not a cancellation of the agent's own
            message = f"{type(error).__name__}: {error}{place_of(error)}"
            if limit.expired():  # and not a time limit of the agent's own
                message = f"it took longer than agents.timeout_s = {self._settings.timeout_s:g}"
            # Quoted: the launcher takes the last error of a log for the reason of a process's end.
            log.warning("episode %s is ungraded: %r", episode.episode_id, message)
            return partial(ungraded, message)
        if reward is GRADE:
            return partial(service.grade, episode.key, facts)
        if reward is None:
            return partial(ungraded, "rollout returned None")
        number = number_of(reward)
        if number is None or not -SAME_REWARD <= number <= 1 + SAME_REWARD:  # NaN fails both comparisons
            log.warning("episode %s: rollout returned %r, not a reward in [0, 1]", episode.episode_id, reward)
            return partial(ungraded, f"rollout returned {reward!r:.100}, not a reward in [0, 1]")
        return partial(service.reward, episode.key, min(max(number, 0.0), 1.0), facts)

    async def _beat(self, episode: OpenedEpisode) -> None:
        while True:
            await asyncio.sleep(episode.lease_s / BEATS_PER_LEASE)
            try:
                await asyncio.to_thread(self._service_of(episode).heartbeat, episode.key)
            except BapoError as error:
                log.debug("heartbeat of %s: %s", episode.episode_id, error)

    async def _give_all_back(self) -> None:
        """Of those that have ended the reports go out; the others begin again, without a reward."""
        calls: list[Awaitable[None]] = [self._give_back_polled()]
        for task, episode in list(self._running.items()):
            if episode.key in self._reporting:
                calls.append(task)
            else:
                task.cancel()
                calls.append(asyncio.to_thread(self._service_of(episode).give_back, episode.key, "stopped"))
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError:
            log.warning("%d episodes were not given back in time: their leases end", len(calls))

    async def _give_back_polled(self) -> None:
        """A poll in a thread cannot be cancelled."""
        if self._polling is None:
            return
        for episode in await self._polling:
            await asyncio.to_thread(self._service_of(episode).give_back, episode.key, "stopped")


def _without_facts(outcome: Outcome) -> tuple[float | Grade | None, dict[str, float]]:
    """How an episode ended, and what can be recorded of the facts that its function returned with it."""
    if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], Mapping)):
        return outcome, {}
    numbers = {name: number_of(value) for name, value in outcome[1].items()}
    facts = {name: value for name, value in numbers.items() if value is not None and is_fact(name, value)}
    facts = dict(list(facts.items())[:MAX_DETAILS])
    if left_out := outcome[1].keys() - facts.keys():
        log.warning(
            "facts %.200s are not recorded: a fact is a finite number with a name, and an episode has at most %d",
            sorted(map(repr, left_out)),
            MAX_DETAILS,
        )
    return outcome[0], facts
