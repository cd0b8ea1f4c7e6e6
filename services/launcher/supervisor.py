"""What follows when a process has died: it is started again, or its death ends the run.

    accident (killed, crashed), fewer than `max_restarts` within `window_s`  -->  pause, start again
    verdict (exit code from 2 on), too many accidents, never was ready       -->  ChildFailedError; optional: left away
    may have followed from the end of another rank that is not there yet     -->  wait for that one, FOLLOWS_S at most

Safe, because no process holds anything that another one was promised: Redis has its append-only file, the buffer
service keeps nothing, scheduler and evaluator look up where they were, a new fleet takes the newest weights, and a
learner begins behind its newest checkpoint, on the batches that the buffer retains for it.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from bapo.config.supervision import SupervisionConfig
from bapo.errors import RankLostError
from services.launcher.child import Child, kill_descendants
from services.launcher.failure import code_text

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
FOLLOWS_S = 10.0
"""For so long the others of a team may take to say why, before the one that ended first counts as the cause."""


class ChildFailedError(Exception):
    """A process ended although it should not have."""

    def __init__(self, child: Child) -> None:
        super().__init__(child.name)
        self.child = child


class Supervisor:
    """Looks after the children of one run."""

    def __init__(
        self,
        settings: SupervisionConfig,
        say: Callable[[str], None] = log.warning,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say`: one line for the user."""
        self._settings, self._say, self._now = settings, say, now
        self._accidents: defaultdict[str, list[tuple[float, int | None]]] = defaultdict(list)
        """Team, or name, -> when it died and how far it had come, for all deaths that count."""
        self._found_at: dict[int, float] = {}
        """Process id -> when its death was seen, of those that may have followed from another's."""

    def look(self, children: Sequence[Child]) -> bool:
        """Start again what has died and may be; returns whether anything was started. Raises: ChildFailedError."""
        dead = [child for child in children if child.has_failed and child.restart_at_s is None]
        # Verdicts, then killed ones: what fails because its team has lost a member is not the cause.
        for child in sorted(dead, key=lambda child: (not _is_verdict(child), not child.was_killed, _is_lost(child))):
            if child.restart_at_s is None and not self._may_follow(child, children):
                self._bury(child, children)
        due = [c for c in children if c.restart_at_s is not None and c.restart_at_s <= self._now()]
        for child in due:
            child.start_again()
        return bool(due)

    def _may_follow(self, child: Child, children: Sequence[Child]) -> bool:
        """Whether it may have ended because another one of its team is about to, which will say why."""
        if _is_verdict(child) or child.was_killed:
            return False
        others = [other for other in children if _team(other) == _team(child) and other.exit_code is None]
        found_at = self._found_at.setdefault(child.process.pid, self._now())
        return bool(others) and self._now() - found_at < FOLLOWS_S

    def _bury(self, child: Child, children: Sequence[Child]) -> None:
        name = _team(child)
        team = [other for other in children if _team(other) == name]
        milestone = child.spec.milestone() if child.spec.milestone else None
        accidents = self._accidents[name] = [
            (at, where)
            for at, where in self._accidents[name]
            if at >= self._now() - self._settings.window_s or (where is not None and where == milestone)
        ]
        if not child.may_start_again or len(accidents) >= self._settings.max_restarts:
            if child.spec.is_optional:
                child.is_given_up = True
                self._say(self._given_up(child))
                return
            raise ChildFailedError(_cause(child, team))
        pause_s = min(LONGEST_PAUSE_S, self._settings.first_pause_s * 2 ** len(accidents))
        accidents.append((self._now(), milestone))
        self._say(self._line(child, pause_s, len(accidents)))
        for member in team:
            member.signal(signal.SIGKILL)  # also what it started in its session
            member.process.wait()
            member.restart_at_s = self._now() + pause_s
        kill_descendants(but=children)  # what hid in sessions of its own, such as the processes of a Ray node

    def _given_up(self, child: Child) -> str:
        return (
            f"{child.name} ended with {code_text(child.exit_code)}; the run continues without it "
            f"(its log: {child.spec.log_path})"
        )

    def _line(self, child: Child, pause_s: float, number: int) -> str:
        bound = f"at most {self._settings.max_restarts} within {self._settings.window_s:.0f} s"
        return (
            f"{child.name} ended with {code_text(child.exit_code)}; it starts again in {pause_s:.1f} s "
            f"(restart {number}, {bound}; its log: {child.spec.log_path})"
        )


def _is_verdict(child: Child) -> bool:
    """Who only loses a member of the team says so, or ends by a signal, or as one that was asked to end (143)."""
    code = child.exit_code
    return code is not None and 2 <= code < 128 and not _is_lost(child)


def _is_lost(child: Child) -> bool:
    return child.exit_code == RankLostError.exit_code


def _cause(child: Child, team: Sequence[Child]) -> Child:
    """The one to be told of: one that lost a member of the team names none, and that may have ended with 0."""
    if not _is_lost(child):
        return child
    return next((other for other in team if other.exit_code is not None and not _is_lost(other)), child)


def _team(child: Child) -> str:
    return child.spec.team or child.name
