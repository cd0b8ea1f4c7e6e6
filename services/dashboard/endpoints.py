"""The data API of the page: its endpoints in one table, asked one at a time.

To add one: write `name(view: RunView, *, query: int = 0, ...) -> JSON values` next to the others, and its line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bapo.analysis.whatif.history import History
from bapo.config.tree import Config
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.run_directory.layout import RunDirectory
from services.dashboard.files import files
from services.dashboard.group import exported_group, group
from services.dashboard.images import exported_image, image
from services.dashboard.overview import PromptVisits, StepRows, overview
from services.dashboard.prompts import PromptIndex, exported_prompt, exported_prompts, prompt, prompts
from services.dashboard.run_view import LiveBuffer, RunView
from services.dashboard.search import Texts, search

FOLDS = (StepRows, PromptVisits, History, PromptIndex, Texts)
"""What is kept of the steps; one object per class for all endpoints."""


def _without_query(_: RunView) -> list[dict[str, Any]]:
    return [{}]


def _none(_: RunView) -> list[dict[str, Any]]:
    return []


def live(view: RunView) -> dict[str, Any]:
    """`live`: {status, batches} of the buffer; null where only a run directory is shown, or while it does not answer.

    Compositions are asked for while there are no records of steps to show in their place.
    """
    return {"live": view.live.numbers(with_batches=not view.num_steps) if view.live else None}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    name: str
    answer: Callable[..., Mapping[str, Any]]
    """Its keyword arguments are the query."""
    roles: tuple[Role, ...] = (Role.VIEWER,)
    """Who may ask, besides the operator."""
    exported: Callable[[RunView], Iterable[Mapping[str, Any]]] = _without_query
    """Queries whose answers an exported file carries."""
    needs_records: bool = True
    """False: it reads no fold, so it is asked without a lock, and may wait."""


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
    """The answer, with what every page must know of the records that it was made from.

    Raises: ContractError for a query that means nothing, or a damaged file.
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
