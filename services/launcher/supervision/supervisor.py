"""Handling of dead processes: restart, or fail the run.

    retryable (killed, crashed), fewer than `max_restarts` within `window_s`  -->  backoff, restart
    fatal (exit code from 2 on), too many crashes, never was ready            -->  ChildFailedError; optional: continue
    possibly caused by another rank that has not exited yet                   -->  wait for it, at most FOLLOWS_S

Restarts are safe because no process has state that others depend on: Redis has its append-only file, the buffer
service is stateless, scheduler and evaluator read their position from the buffer, a new fleet loads the newest
weights, and a learner resumes from its latest checkpoint with the batches that the buffer retains.
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

from bapo.config.advice import lower
from bapo.config.tree import Config, SupervisionConfig
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
"""Seconds to wait for the other members of a team to report the cause, before the first to exit is blamed."""


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
        """`say`: prints a line for the user."""
        self._settings, self._say, self._now = settings, say, now
        self._accidents: defaultdict[str, list[tuple[float, int | None]]] = defaultdict(list)
        """Team or name -> time and milestone of each counted crash."""
        self._found_at: dict[int, float] = {}
        """Process id -> time when its death was noticed, for deaths possibly caused by another process."""

    def poll(self, children: Sequence[Child]) -> bool:
        """Restart retryable crashes; returns whether anything was started. Raises: ChildFailedError."""
        dead = [child for child in children if child.has_failed and child.restart_at_s is None]
        # Fatal errors first, then killed ones: a process that lost a team member is not the cause.
        for child in sorted(dead, key=lambda child: (not _is_verdict(child), not child.was_killed, _is_lost(child))):
            if child.restart_at_s is None and not self._may_follow(child, children):
                self._bury(child, children)
        due = [c for c in children if c.restart_at_s is not None and c.restart_at_s <= self._now()]
        for child in due:
            child.start_again()
        return bool(due)

    def _may_follow(self, child: Child, children: Sequence[Child]) -> bool:
        """Whether its exit may be caused by another member of its team that has not exited yet."""
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
            member.signal(signal.SIGKILL)  # including its session
            member.process.wait()
            member.restart_at_s = self._now() + pause_s
        kill_descendants(but=children)  # descendants in other sessions, such as the processes of a Ray node

    def _given_up(self, child: Child) -> str:
        return (
            f"{child.name} failed with {code_text(child.exit_code)}; the run continues without it "
            f"(log: {child.spec.log_path})"
        )

    def _line(self, child: Child, pause_s: float, number: int) -> str:
        bound = f"maximum {self._settings.max_restarts} within {self._settings.window_s:.0f} s"
        return (
            f"{child.name} failed with {code_text(child.exit_code)}; restarting in {pause_s:.1f} s "
            f"(restart {number}, {bound}; log: {child.spec.log_path})"
        )


def _is_verdict(child: Child) -> bool:
    """Whether the exit is fatal: not for a lost team member, a signal, or a requested stop (143)."""
    code = child.exit_code
    return code is not None and 2 <= code < 128 and not _is_lost(child)


def _is_lost(child: Child) -> bool:
    return child.exit_code == RankLostError.exit_code


def _cause(child: Child, team: Sequence[Child]) -> Child:
    """The process to report: one that only lost a team member is not the cause, even if that member exited with 0."""
    if not _is_lost(child):
        return child
    return next((other for other in team if other.exit_code is not None and not _is_lost(other)), child)


def _team(child: Child) -> str:
    return child.spec.team or child.name


TAIL_BYTES = 64 << 10
KILLED = 128 + signal.SIGKILL

_ERROR = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (\S.*)")
"""`ConfigError: ...` as logged by processes of a run, or the last line of a traceback."""
_SAYS_WHY = re.compile(r"\berror\b|\bfatal\b|cannot|refused|failed", re.IGNORECASE)

ADVICE = {
    ConfigError.exit_code: "change the setting and restart; nothing was trained with it",
    StorageError.exit_code: "fix the reported problem (disk, service or reward function), then resume the run; "
    "to change a setting, start a new run",
    DivergenceError.exit_code: "earlier checkpoints are intact; start a new run: {}",
    DeadlineError.exit_code: "see the log of the process that did not respond, then resume the run",
    RankLostError.exit_code: "see the logs of the other ranks (learner*.log), one of which exited or stopped first, "
    "then resume the run",
    KILLED: "it was killed by another process, usually by the kernel's OOM killer (see dmesg); to save memory, {}",
}
LOWERED = {
    DivergenceError.exit_code: ("learner.lr", "cadence.weight_sync_interval", "cadence.max_steps_ahead"),
    KILLED: ("rollout.num_workers", "rollout.max_groups_in_flight", "learner.microbatch_tokens"),
}
"""Settings that a hint may name, if they can be lowered."""
ELSE = "use a smaller model, or a larger machine"
assert UnavailableError.exit_code == StorageError.exit_code


def explain(child: Child, config: Config) -> str:
    code = child.exit_code
    lines = [f"{child.name} failed with {code_text(code)}: {last_words(child.spec.log_path)}"]
    if child.num_restarts:
        lines.append(f"It was restarted {child.num_restarts} times (supervision.max_restarts).")
    if code in ADVICE:
        is_own = code == DivergenceError.exit_code and ":" in config.loss.name
        own = f", or correct {config.loss.name}" if is_own else ""
        lines.append(f"Hint: {ADVICE[code].format(lower(config, *LOWERED.get(code, ())) or ELSE)}{own}")
    lines.append(f"Log: {child.spec.log_path}")
    return "\n".join(lines)


def last_words(log_path: Path) -> str:
    """The last error in a log; else the last line that looks like an error; else the last line."""
    tail = _tail(log_path)
    if len(tail) < TAIL_BYTES and rotated_path(log_path).exists():
        tail = _tail(rotated_path(log_path)) + tail
    lines = [line.rstrip() for line in tail.splitlines() if line.strip()]
    for line in reversed(lines):
        found = _ERROR.search(line)
        if found:
            # BAPO's messages are self-explanatory; for other errors include the class.
            return found.group(2) if found.group(1) in BY_NAME else f"{found.group(1)}: {found.group(2)}"
    for line in reversed(lines):
        if _SAYS_WHY.search(line):
            return line.strip()
    return lines[-1].strip() if lines else "no output"


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
