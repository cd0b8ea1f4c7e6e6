"""The data API of the page: a table of endpoints, which are called one at a time.

To add one: write `name(view: RunView, *, query: int = 0, ...) -> JSON values` and add it to the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.run_directory.layout import RunDirectory
from services.dashboard.group import exported_group, group
from services.dashboard.history import History
from services.dashboard.images import exported_image, image
from services.dashboard.overview import PromptVisits, StepRows, overview
from services.dashboard.prompts import PromptIndex, exported_prompt, exported_prompts, prompt, prompts
from services.dashboard.run_view import LiveBuffer, RunView
from services.dashboard.search import Texts, search

TAIL_BYTES = 64 * 1024
FOLDS = (StepRows, PromptVisits, History, PromptIndex, Texts)
"""State kept over the steps; one object per class, shared by all endpoints."""


def _without_query(_: RunView) -> list[dict[str, Any]]:
    return [{}]


def _none(_: RunView) -> list[dict[str, Any]]:
    return []


def live(view: RunView) -> dict[str, Any]:
    """`live`: {status, batches} of the buffer; null without a buffer, or while it does not respond.

    Compositions are included while there are no records of steps.
    """
    return {"live": view.live.numbers(with_batches=not view.num_steps) if view.live else None}


def files(view: RunView, *, part: str = "") -> dict[str, Any]:
    """The resolved configuration, the names of the logs, and the last lines of one.

    Args:
        part: a log of RUN/logs, without `.log`; empty: none.
    Raises: ContractError for a part that has no log.
    """
    logs = {path.stem: path for path in sorted((view.run.path / "logs").glob("*.log"))}
    if part and part not in logs:
        raise ContractError(
            f"run {view.config.run.name} has no log {part[:80]!r}; there are {', '.join(logs) or 'none'}"
        )
    return {
        "configuration": view.run.config_path.read_text(encoding="utf-8"),
        "parts": list(logs),
        "part": part,
        "tail": _tail(logs[part].read_bytes()) if part else "",
    }


def _tail(content: bytes) -> str:
    """The last whole lines."""
    cut = content[-TAIL_BYTES:]
    if len(cut) < len(content):
        cut = cut.partition(b"\n")[2]
    return cut.decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    name: str
    answer: Callable[..., Mapping[str, Any]]
    """Its keyword arguments are the query parameters."""
    roles: tuple[Role, ...] = (Role.VIEWER,)
    """Roles that may call it, in addition to operator."""
    exported: Callable[[RunView], Iterable[Mapping[str, Any]]] = _without_query
    """Queries included in an exported file."""
    needs_records: bool = True
    """False: it reads no fold, so it is called without a lock, and may block."""


ENDPOINTS = (
    Endpoint(name="live", answer=live, needs_records=False),
    Endpoint(name="overview", answer=overview),
    Endpoint(name="prompts", answer=prompts, exported=exported_prompts),
    Endpoint(name="prompt", answer=prompt, exported=exported_prompt),
    Endpoint(name="group", answer=group, exported=exported_group, roles=()),
    Endpoint(name="image", answer=image, exported=exported_image, roles=(), needs_records=False),
    Endpoint(name="files", answer=files, roles=(), needs_records=False),
    Endpoint(name="search", answer=search, exported=_none, roles=()),
)


def view_of(run: RunDirectory, config: Config, live: LiveBuffer | None = None) -> RunView:
    """A view with the folds of all endpoints."""
    return RunView(run=run, config=config, makers=FOLDS, live=live)


def ask(view: RunView, endpoint: Endpoint, **query: Any) -> dict[str, Any]:
    """The response, with the state of the records it was computed from.

    Raises: ContractError for an invalid query or a damaged file.
    """
    if not endpoint.needs_records:
        return dict(endpoint.answer(view, **query))
    with view.lock:
        view.refresh()
        known = {
            "generation": view.generation,
            "num_steps": view.num_steps,
            "is_complete": view.is_complete,
            "problem": view.problem,
        }
        return {**known, **endpoint.answer(view, **query)}
