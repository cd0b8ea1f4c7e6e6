"""What follows when a process has died: it is started again, or its death ends the run.

    accident (killed, crashed), fewer than `max_restarts` within `window_s`  -->  pause, start again
    verdict (exit code from 2 on), too many accidents, never was ready       -->  ChildFailedError; optional: left away
    may have followed from the end of another rank that is not there yet     -->  wait for that one, FOLLOWS_S at most

Safe, because no process holds anything that another one was promised: Redis has its append-only file, the buffer
service keeps nothing, scheduler and evaluator look up where they were, a new fleet takes the newest weights, and a
learner begins after its newest checkpoint, on the batches that the buffer retains for it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from bapo.config.tree import SupervisionConfig
from bapo.core.errors import (
    BY_NAME,
    ConfigError,
    DeadlineError,
    DivergenceError,
    RankLostError,
    StorageError,
    UnavailableError,
)
from bapo.runtime.logs import rotated_path
from services.launcher.supervision.child_process import Child, kill_descendants

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
FOLLOWS_S = 10.0
"""Seconds that the others of a team may take to say why, before the one that ended first counts as the cause."""


class ChildFailedError(Exception):
    def __init__(self, child: Child) -> None:
        super().__init__(child.name)
        self.child = child


class Supervisor:
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

    def poll(self, children: Sequence[Child]) -> bool:
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
        pause_s = min(LONGEST_PAUSE_S, self._settings.restart_backoff_s * 2 ** len(accidents))
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
            f"{child.name} ended with {code_text(child.exit_code)}; it restarts in {pause_s:.1f} s "
            f"(restart {number}, {bound}; its log: {child.spec.log_path})"
        )


def _is_verdict(child: Child) -> bool:
    """Not a verdict: a lost member of the team, a signal, or a requested end (143)."""
    code = child.exit_code
    return code is not None and 2 <= code < 128 and not _is_lost(child)


def _is_lost(child: Child) -> bool:
    return child.exit_code == RankLostError.exit_code


def _cause(child: Child, team: Sequence[Child]) -> Child:
    """The one to report: one that lost a member of the team names none, and that may have ended with 0."""
    if not _is_lost(child):
        return child
    return next((other for other in team if other.exit_code is not None and not _is_lost(other)), child)


def _team(child: Child) -> str:
    return child.spec.team or child.name


TAIL_BYTES = 64 << 10
KILLED = 128 + signal.SIGKILL

_ERROR = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (\S.*)")
"""`ConfigError: ...` as processes of a run log it, or the last line of a traceback."""
_SAYS_WHY = re.compile(r"\berror\b|\bfatal\b|cannot|refused|failed", re.IGNORECASE)

ADVICE = {
    ConfigError.exit_code: "change that setting and start again; nothing was trained with it",
    StorageError.exit_code: "fix what the message names (disk, service or reward function), then resume the run; "
    "if it needs another setting, start another run",
    DivergenceError.exit_code: "the checkpoint before it is intact; a lower learner.lr or fewer stale groups "
    "(cadence.weight_sync_interval, cadence.max_steps_ahead) usually help, in a new run",
    DeadlineError.exit_code: "see the log of the process that did not answer, then resume the run",
    RankLostError.exit_code: "see the logs of the other ranks (learner*.log), one of which ended or stopped first, "
    "then resume the run",
    KILLED: "it was killed by another process, most often by the kernel because memory ran out (see dmesg); fewer "
    "rollout.num_workers, a smaller rollout.max_groups_in_flight or learner.microbatch_tokens use less memory",
}
assert UnavailableError.exit_code == StorageError.exit_code


def explain(child: Child) -> str:
    code = child.exit_code
    lines = [f"{child.name} ended with {code_text(code)}: {last_words(child.spec.log_path)}"]
    if child.num_restarts:
        lines.append(f"It had been restarted {child.num_restarts} times before (supervision.max_restarts).")
    if code in ADVICE:
        lines.append(f"What to do: {ADVICE[code]}")
    lines.append(f"Its log: {child.spec.log_path}")
    return "\n".join(lines)


def last_words(log_path: Path) -> str:
    """The last error that a log names; else its last line that sounds like one; else its last line."""
    tail = _tail(log_path)
    if len(tail) < TAIL_BYTES and rotated_path(log_path).exists():
        tail = _tail(rotated_path(log_path)) + tail
    lines = [line.rstrip() for line in tail.splitlines() if line.strip()]
    for line in reversed(lines):
        found = _ERROR.search(line)
        if found:
            # Errors of this package are written for people; the class of any other says what it is.
            return found.group(2) if found.group(1) in BY_NAME else f"{found.group(1)}: {found.group(2)}"
    for line in reversed(lines):
        if _SAYS_WHY.search(line):
            return line.strip()
    return lines[-1].strip() if lines else "it printed nothing"


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"


def code_text(code: int | None) -> str:
    """`signal SIGKILL` or `exit code 3`."""
    if code is not None and code > 128:
        try:
            return f"signal {signal.Signals(code - 128).name}"
        except ValueError:
            return f"exit code {code}"
    return f"exit code {code}"
