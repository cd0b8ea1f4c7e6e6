"""Why a process ended, in one message: who, exit code, the line of its log that says why, what to do now."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from bapo.errors import (
    ConfigError,
    DeadlineError,
    DivergenceError,
    RankLostError,
    StorageError,
    UnavailableError,
)
from services.launcher.child import Child

TAIL_BYTES = 64 << 10
KILLED = 128 + signal.SIGKILL

_ERROR = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (\S.*)")
"""`ConfigError: ...` as our processes log it, or the last line of a traceback."""
_SAYS_WHY = re.compile(r"\berror\b|\bfatal\b|cannot|refused|failed", re.IGNORECASE)

ADVICE = {
    ConfigError.exit_code: "change that setting and start again; nothing was trained with it",
    StorageError.exit_code: "mend what is named (disk, service or verifier), then continue the run; "
    "if it needs another setting, start another run",
    DivergenceError.exit_code: "the checkpoint before it is intact; a lower learner.lr or fewer stale groups "
    "(cadence.v, cadence.slack) usually help, in a new run",
    DeadlineError.exit_code: "see the log of the process that was waited for, then continue the run",
    RankLostError.exit_code: "see the logs of the other ranks (learner*.log), one of which ended or stopped first, "
    "then continue the run",
    KILLED: "it was killed from outside, most often by the kernel, out of memory (see `dmesg`); fewer "
    "rollout.num_workers, a smaller rollout.max_groups_in_flight or learner.microbatch_tokens need less",
}
assert UnavailableError.exit_code == StorageError.exit_code


def explain(child: Child) -> str:
    """The message about a child that ended although it should not have."""
    code = child.exit_code
    lines = [f"{child.name} ended with {code_text(code)}: {last_words(child.spec.log_path)}"]
    if child.num_restarts:
        lines.append(f"It had been started again {child.num_restarts} times before (supervision.max_restarts).")
    if code in ADVICE:
        lines.append(f"What to do: {ADVICE[code]}")
    lines.append(f"Its log: {child.spec.log_path}")
    return "\n".join(lines)


def last_words(log_path: Path) -> str:
    """The last error that a log names; else its last line that sounds like one; else its last line."""
    lines = [line.rstrip() for line in _tail(log_path).splitlines() if line.strip()]
    for line in reversed(lines):
        found = _ERROR.search(line)
        if found:
            return f"{found.group(1)}: {found.group(2)}"
    for line in reversed(lines):
        if _SAYS_WHY.search(line):
            return line.strip()
    return lines[-1].strip() if lines else "it wrote nothing"


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
