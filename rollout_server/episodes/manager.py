"""The episodes of claimed requests: handed to agents, recorded, ended, begun again.

    claimed request --G episodes--> waiting --open--> an agent has it --reward--> G ended: the group is delivered
                                       ^                    |
                                       +--- failed: null, an error, given back, its process restarted,
                                            silent for `agents.lease_s`; this episode alone

Every change is in the journal before anybody hears of it. A front that was restarted, or another one that claims the
request, replays the journal: agents keep their keys, and the tokens of their turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from bapo.config.agents import AgentsConfig
from bapo.core.errors import AccessError, ConflictError, ContractError, GoneError, UnavailableError
from bapo.core.types import Prompt, RolloutRequest
from rollout_server.episodes.episode import (
    Ended,
    Episode,
    Event,
    Failed,
    Opened,
    Sampled,
    is_key,
    new_key,
    pack_event,
    replayed,
    unpack_event,
)

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""Between two looks for silent agents."""
MAX_DETAIL = 300
"""Characters of the words for a failure."""
RESTARTED = "agent_restarted"
MAX_REMEMBERED = 100_000
"""Ended episodes whose reward is remembered, so that a repeated one is distinguished from another."""


def name_of(agent: str) -> str:
    """NAME of NAME@START."""
    return agent.partition("@")[0]


class Journal(Protocol):
    """Where events are durable. Its calls may take as long as the buffer is down."""

    async def read(self, request_id: str) -> list[bytes]:
        """All entries of a request, in order."""
        ...

    async def append(self, request_id: str, number: int, entries: Sequence[bytes]) -> None:
        """Store entries `number` and following.

        Raises: LeaseLostError when the request is not ours any more; UnavailableError.
        """
        ...


class _OpenedBeforeError(Exception):
    """The journal says that the episode is open."""


class _NoCallError(Exception):
    """The episode has no turn."""


class LeaseLostError(UnavailableError):
    """Another holder has the request."""


@dataclass(slots=True, kw_only=True, eq=False)
class OpenGroup:
    """A claimed request, and its episodes by index: those that an agent has or had."""

    request: RolloutRequest
    episodes: dict[int, Episode] = field(default_factory=dict)
    entries: list[bytes] = field(default_factory=list)
    """Of the journal, as far as they are known to be in it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_uncertain: bool = False
    """An append did not answer: the journal may have its event."""
    is_over: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all G episodes have a reward."""
        ended = sum(episode.reward is not None for episode in self.episodes.values())
        return ended == self.request.group_size


@dataclass(slots=True, kw_only=True, eq=False)
class Handle:
    """An episode that an agent has."""

    group: OpenGroup
    episode: Episode
    key: str
    opened: float
    """Monotonic time."""
    heard: float
    """Monotonic time of the agent's last sign of life."""
    num_calls: int = 0
    """Open calls of the model: the agent waits for us."""
    num_reserved: int = 0
    """Context tokens and limits of these calls."""
    calling: dict[str, asyncio.Event] = field(default_factory=dict)
    """Digest of an open call -> its end."""


class Episodes:
    """Used in one event loop."""

    def __init__(
        self,
        settings: AgentsConfig,
        journal: Journal,
        *,
        deliver: Callable[[OpenGroup], None],
        refuse: Callable[[RolloutRequest, str, str], None],
        lost: Callable[[RolloutRequest], object] = lambda _: None,
        count: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            deliver: called with a complete group.
            refuse: called with a request that cannot be completed, a reason and details.
            lost: called with a request whose lease is found to be lost, so that a later claim of it is a new one.
            count: called with the name of each event: opened, turn, fork, cut, ended, failed/<reason>.
        """
        self._settings, self._journal = settings, journal
        self._deliver, self._refuse, self._lost = deliver, refuse, lost
        self._count, self.now = count, now
        self._groups: dict[str, OpenGroup] = {}
        self._waiting: deque[tuple[OpenGroup, int]] = deque()
        self._changed = asyncio.Condition()
        self._handles: dict[str, Handle] = {}
        self._rewards: OrderedDict[str, float] = OrderedDict()
        self._starts: dict[str, str] = {}
        """NAME -> newest NAME@START of those who have opened episodes."""
        self.num_failed: Counter[str] = Counter()
        """Failed attempts by reason."""
        self.last_failure = ""

    @property
    def lease_s(self) -> float:
        """How long an agent may be silent."""
        return self._settings.lease_s

    @property
    def num_open(self) -> int:
        """Episodes that agents have."""
        return len(self._handles)

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest open episode was opened; 0 without one."""
        opened = min((handle.opened for handle in self._handles.values()), default=None)
        return 0.0 if opened is None else self.now() - opened

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for an agent."""
        return len(self._waiting)

    async def adopt(self, request: RolloutRequest) -> None:
        """Offer the episodes of a claimed request, and continue those in its journal. Raises: UnavailableError."""
        if request.request_id in self._groups:
            return
        entries = await self._journal.read(request.request_id)
        group = OpenGroup(request=request, entries=entries)
        try:
            group.episodes = replayed([unpack_event(entry) for entry in entries])
        except ContractError as error:
            self._refuse(request, "bad_journal", str(error))
            return
        if request.request_id in self._groups:  # a second claim was faster
            return
        self._groups[request.request_id] = group
        for index in range(request.group_size):
            episode = group.episodes.get(index)
            if episode is None or episode.has_failed:
                self._waiting.append((group, index))
            elif episode.is_open:  # its agent may be alive
                self._take(group, episode)
            elif episode.reward is not None:
                self._remember(episode.key, episode.reward)
        if group.is_complete:
            self._finish(group)
        await self._fail_left()
        await self._notify()

    def lose(self, request_id: str) -> None:
        """Another holder has the request: its keys are dead here."""
        if (group := self._groups.get(request_id)) is not None:
            self._close(group)

    async def open(self, count: int, wait_s: float, agent: str = "") -> list[Handle]:
        """Up to `count` episodes for an agent; waits for the first.

        Args:
            agent: NAME@START of a process; those that NAME opened with another START begin again, because it has died.
        Raises: UnavailableError.
        """
        if agent and self._starts.get(name_of(agent)) != agent:
            self._starts[name_of(agent)] = agent
            await self._fail_left()
        deadline, found = self.now() + wait_s, list[Handle]()
        while len(found) < count:
            group, index = await self._next(0.0 if found else deadline - self.now())
            if group is None:
                break
            try:
                found.append(await self._open(group, index, agent))
            except LeaseLostError:
                self._drop(group)
            except BaseException as error:
                self._waiting.appendleft((group, index))
                if found and isinstance(error, UnavailableError):
                    return found  # what is open has been given to this agent
                raise
        return found

    def handle_of(self, key: str) -> Handle:
        """The episode of a key, whose agent has just shown a sign of life.

        Raises: GoneError for one that has ended; AccessError for what is not the key of an episode.
        """
        handle = self._handles.get(key)
        if handle is None and not is_key(key):
            raise AccessError("no episode has this key: POST /v1/episodes opens one and gives its key")
        if handle is None:
            raise GoneError(
                "this episode has ended, its agent was silent for too long, or it is of another run: open another one"
            )
        handle.heard = self.now()
        return handle

    async def record(self, handle: Handle, turn: Sampled) -> None:
        """Make a turn durable. Raises: GoneError; UnavailableError: nothing was recorded, or a retry finds it."""
        await self._append(handle, turn)
        self._count("turn")
        if turn.parent < 0 and len(handle.episode.turns) > 1:
            self._count("fork")
        if turn.cut_by_agent:
            self._count("cut")

    async def reward(self, key: str, reward: float, facts: Mapping[str, float] | None = None) -> str:
        """End an episode. `reward`: in [0, 1], or NaN for the task's reward function. Returns: ok, group, duplicate.

        Raises: ConflictError; GoneError; UnavailableError; ContractError for an episode without a turn.
        """
        if (known := self._given_before(key, reward)) is not None:
            return known
        handle = self.handle_of(key)

        def check() -> None:
            if not handle.episode.turns:
                raise _NoCallError

        try:
            await self._append(handle, Ended(index=handle.episode.index, reward=reward, facts=dict(facts or {})), check)
        except _NoCallError:
            problem = "an episode without a call of the model cannot have a reward"
            await self.fail(handle, "no_call", problem)
            raise ContractError(f"{problem}: it is ungraded, and begins again") from None
        except GoneError:
            if (known := self._given_before(key, reward)) is not None:  # by a call whose answer was lost
                return known
            raise
        return "group" if handle.group.is_complete else "ok"

    async def ungraded(self, key: str, detail: str) -> None:
        """End an attempt that could not be graded. Raises: ConflictError for one with a reward; GoneError."""
        self._given_before(key, None)
        try:
            await self.fail(self.handle_of(key), "ungraded", detail)
        except GoneError:
            self._given_before(key, None)  # meanwhile
            raise

    def _given_before(self, key: str, reward: float | None) -> str | None:
        """Raises: ConflictError."""
        if (given := self._rewards.get(key)) is None:
            return None
        if given == reward or (reward is not None and math.isnan(given) and math.isnan(reward)):
            return "duplicate"
        raise ConflictError(f"this episode has the reward {_shown(given)}, which {_shown(reward)} does not replace")

    async def fail(self, handle: Handle, reason: str, detail: str = "", *, counts: bool = True) -> None:
        """End an attempt without a reward; the episode begins again, a limited number of times.

        Args:
            counts: whether it is one of these.
        """
        index, request_id = handle.episode.index, handle.group.request.request_id
        level = logging.WARNING if counts else logging.INFO
        # Quoted: the launcher takes the last error of a log for the reason of a process's end.
        log.log(level, "episode %d of %s failed reason=%s: %r", index, request_id, reason, detail)
        failed = Failed(index=index, reason=reason[:200], detail=detail[:MAX_DETAIL], counts=counts)
        await self._append(handle, failed)
        await self._notify()

    async def _fail_left(self) -> None:
        """Fail the episodes of processes that have been started again. It does not count: others than these may have
        ended the process, and `supervision.max_restarts` limits how often."""
        for handle in list(self._handles.values()):
            agent = handle.episode.agent
            if agent and self._starts.get(name_of(agent), agent) != agent:
                with suppress(GoneError):  # two requests may be adopted at a time
                    try:
                        await self.fail(handle, RESTARTED, f"{name_of(agent)} was started again", counts=False)
                    except UnavailableError as error:  # it falls silent
                        log.warning("an episode of %s could not be ended yet: %s", agent, error)

    def prompt_of(self, key: str) -> Prompt:
        """What the episode of a key is about. Raises: as `handle_of`, for a key without an open episode."""
        return self.handle_of(key).group.request.prompt

    async def watch(self) -> None:
        """Fail the episodes of silent agents, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            for handle in list(self._handles.values()):
                if handle.num_calls == 0 and self.now() - handle.heard > self._settings.lease_s:
                    try:
                        await self.fail(handle, "silent", f"no call or heartbeat for {self._settings.lease_s:g} s")
                    except (GoneError, UnavailableError) as error:
                        log.warning("a silent episode could not be ended yet: %s", error)

    async def _next(self, wait_s: float) -> tuple[OpenGroup | None, int]:
        async with self._changed:
            try:
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._changed.wait_for(lambda: len(self._waiting) > 0)
            except TimeoutError:
                return None, 0
            return self._waiting.popleft()

    async def _open(self, group: OpenGroup, index: int, agent: str) -> Handle:
        def check() -> None:
            episode = group.episodes.get(index)
            if episode is not None and not episode.has_failed:
                raise _OpenedBeforeError

        try:
            await self._store(group, Opened(index=index, key=(key := new_key()), agent=agent), check)
        except _OpenedBeforeError:  # by a call that did not hear of it, so that no agent has its key
            key = group.episodes[index].key
        return self._handles[key]

    def _take(self, group: OpenGroup, episode: Episode) -> None:
        now = self.now()
        self._handles[episode.key] = Handle(group=group, episode=episode, key=episode.key, opened=now, heard=now)

    async def _append(self, handle: Handle, event: Event, check: Callable[[], None] = lambda: None) -> None:
        """Durable first, then known. Once begun it ends, whether or not its caller waits."""

        def check_both() -> None:
            self._require_open(handle)
            check()

        try:
            await asyncio.shield(self._store(handle.group, event, check_both))
        except LeaseLostError:
            self._drop(handle.group)
            raise GoneError("this episode was given to another server, which begins it again") from None

    def _require_open(self, handle: Handle) -> None:
        if self._handles.get(handle.key) is not handle or not handle.episode.is_open:
            raise GoneError("this episode has ended")

    async def _store(self, group: OpenGroup, event: Event, check: Callable[[], None] = lambda: None) -> None:
        request_id = group.request.request_id
        async with group.lock:
            if group.is_uncertain:
                await self._catch_up(group)
            check()
            if group.is_over:
                raise LeaseLostError(f"request {request_id} is not ours any more")
            entry = pack_event(event)
            try:
                await self._journal.append(request_id, len(group.entries), [entry])
            except BaseException:
                group.is_uncertain = True
                raise
            self._apply(group, entry, event)

    async def _catch_up(self, group: OpenGroup) -> None:
        """An append may have been stored although it failed; and Redis may have lost the newest entries."""
        request_id, known = group.request.request_id, group.entries
        found = await self._journal.read(request_id)
        if found != known[: len(found)] and known != found[: len(known)]:
            raise LeaseLostError(f"the journal of request {request_id} is another one")
        if missing := known[len(found) :]:
            await self._journal.append(request_id, len(found), missing)
        for entry in found[len(known) :]:
            self._apply(group, entry, unpack_event(entry))
        group.is_uncertain = False

    def _apply(self, group: OpenGroup, entry: bytes, event: Event) -> None:
        """What follows from an event, also from one that only the journal knew."""
        if (episode := group.episodes.get(event.index)) is not None:
            episode.apply(event)
        elif isinstance(event, Opened):
            episode = group.episodes[event.index] = Episode(index=event.index, key=event.key, agent=event.agent)
        else:
            raise ContractError(f"episode {event.index} begins with {type(event).__name__}")
        group.entries.append(entry)
        if isinstance(event, Opened):
            self._count("opened")
            self._take(group, episode)
        elif isinstance(event, Ended):
            self._end(group, episode, event.reward)
        elif isinstance(event, Failed):
            self._begin_again(group, episode, event)

    def _end(self, group: OpenGroup, episode: Episode, reward: float) -> None:
        self._count("ended")
        self._remember(episode.key, reward)
        self._handles.pop(episode.key, None)
        if group.is_complete:
            self._finish(group)

    def _begin_again(self, group: OpenGroup, episode: Episode, failed: Failed) -> None:
        self._count(f"failed/{failed.reason}")
        if failed.counts:
            self.num_failed[failed.reason] += 1
            self.last_failure = f"{failed.reason}: {failed.detail}" if failed.detail else failed.reason
        self._handles.pop(episode.key, None)
        if failed.counts and episode.attempts >= self._settings.max_attempts:
            self._close(group)
            why = f"; the last time: {failed.detail}" if failed.detail else ""
            detail = f"episode {episode.index} failed {episode.attempts} times (agents.max_attempts){why}"
            self._refuse(group.request, f"episode_{failed.reason}", detail)
        else:
            self._waiting.appendleft((group, episode.index))

    def _finish(self, group: OpenGroup) -> None:
        self._close(group)
        self._deliver(group)

    def _drop(self, group: OpenGroup) -> None:
        """Its lease is lost."""
        if not group.is_over:
            self._close(group)
            self._lost(group.request)

    def _close(self, group: OpenGroup) -> None:
        group.is_over = True
        self._groups.pop(group.request.request_id, None)
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not group)
        for key in [key for key, handle in self._handles.items() if handle.group is group]:
            del self._handles[key]

    def _remember(self, key: str, reward: float) -> None:
        self._rewards[key] = reward
        if len(self._rewards) > MAX_REMEMBERED:
            self._rewards.popitem(last=False)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _shown(reward: float | None) -> str:
    if reward is None:
        return "null"
    return "of the task" if math.isnan(reward) else f"{reward:g}"
