"""What judges said, by the content of the question, and what it cost: one SQLite file for all graders of a machine.

replies   digest -> reply                               a question is paid once, also over restarts
calls     when, model, outcome, tokens                  the ledger (`bapo reward judged`)
turns     address -> earliest time of the next call     the rate limit of all processes together
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bapo.core.errors import ConfigError

LOCK_S = 60.0
"""How long a call waits for another process's write."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (digest TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls
    (began REAL, seconds REAL, model TEXT, outcome TEXT, prompt INTEGER, completion INTEGER);
CREATE TABLE IF NOT EXISTS turns (address TEXT PRIMARY KEY, next REAL NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Calls of one model with one outcome."""

    model: str
    outcome: str
    """ok; no verdict: a reply without one; HTTP 429 and its kind; malformed; or the class of an error."""
    calls: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class JudgeStore:
    """Thread-safe; several processes may use one file."""

    def __init__(
        self, path: Path, *, now: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Raises: ConfigError if the file cannot be used."""
        self._lock, self._now, self._sleep = threading.Lock(), now, sleep
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(path, timeout=LOCK_S, check_same_thread=False, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"judge: cannot use the store {path}: {error}; set `store` in the rubric") from error

    def reply_of(self, digest: str) -> str | None:
        """The reply to a question, if it is known."""
        with self._lock:
            row = self._base.execute("SELECT reply FROM replies WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, digest: str, reply: str) -> None:
        """Remember a reply; the first one stays."""
        with self._lock:
            self._base.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (digest, reply))

    def write_down(self, model: str, outcome: str, began: float, *, prompt_tokens: int, completion_tokens: int) -> None:
        """One call."""
        row = (began, self._now() - began, model, outcome, prompt_tokens, completion_tokens)
        with self._lock:
            self._base.execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?)", row)

    def wait_for_turn(self, address: str, per_minute: float | None) -> None:
        """Wait until another call to this address is within the rate."""
        if per_minute is None:
            return
        with self._lock:
            now = self._now()
            (after,) = self._base.execute(
                "INSERT INTO turns VALUES (?, ?) ON CONFLICT DO UPDATE SET next = max(next, ?) + ? RETURNING next",
                (address, now + 60.0 / per_minute, now, 60.0 / per_minute),
            ).fetchone()
        self._sleep(max(0.0, after - 60.0 / per_minute - now))

    def spent(self) -> list[Spent]:
        """All calls, by model and outcome."""
        with self._lock:
            rows = self._base.execute(
                "SELECT model, outcome, count(*), sum(prompt), sum(completion), sum(seconds) FROM calls "
                "GROUP BY model, outcome ORDER BY model, outcome"
            ).fetchall()
        names = ("model", "outcome", "calls", "prompt_tokens", "completion_tokens", "seconds")
        return [Spent(**dict(zip(names, row, strict=True))) for row in rows]
