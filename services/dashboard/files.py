"""Config and log tails of a run directory."""

from __future__ import annotations

from typing import Any

from bapo.core.errors import ContractError
from services.dashboard.run_view import RunView

TAIL_BYTES = 64 * 1024


def files(view: RunView, *, part: str = "") -> dict[str, Any]:
    """The resolved config, the names of the logs, and the last lines of one.

    Args:
        part: name of a log in RUN/logs without `.log`; empty: none.
    Raises: ContractError for an unknown log.
    """
    logs = {path.stem: path for path in sorted((view.run.path / "logs").glob("*.log"))}
    if part and part not in logs:
        raise ContractError(
            f"run {view.config.run.name} has no log {part[:80]!r}; available: {', '.join(logs) or 'none'}"
        )
    return {
        "configuration": view.run.config_path.read_text(encoding="utf-8"),
        "parts": list(logs),
        "part": part,
        "tail": _tail(logs[part].read_bytes()) if part else "",
    }


def _tail(content: bytes) -> str:
    """The last complete lines."""
    cut = content[-TAIL_BYTES:]
    if len(cut) < len(content):
        cut = cut.partition(b"\n")[2]
    return cut.decode(errors="replace")
