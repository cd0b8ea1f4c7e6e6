"""Endpoints of the page's data API: found by name, asked one at a time.

An endpoint is a file of `bapo/web/endpoints` with

    def answer(view: RunView, *, since: int = 0, ...) -> dict[str, Any]   # keyword arguments are the query
    FOLDS = (MyFold,)          what it keeps of the steps, if anything; one object per class for all endpoints
    NEEDS_RECORDS = False      if it reads no fold: it is then asked without a lock, and may wait
    def exported(view) -> Iterable[dict[str, Any]]   # queries whose answers an exported file carries; default: {}
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import bapo.web.endpoints
from bapo.config.tree import Config
from bapo.records import RunDirectory
from bapo.web.view import Live, RunView

Answer = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One answer of the API."""

    name: str
    """As in its path: `step-groups` is the file step_groups.py."""
    answer: Callable[..., Answer]
    folds: tuple[type, ...]
    needs_records: bool
    exported: Callable[[RunView], Iterable[Mapping[str, Any]]]


@cache
def all_endpoints() -> Mapping[str, Endpoint]:
    """By name, sorted."""
    modules = sorted(module.name for module in pkgutil.iter_modules(bapo.web.endpoints.__path__))
    return {endpoint.name: endpoint for endpoint in map(_endpoint, modules)}


def _endpoint(name: str) -> Endpoint:
    module = importlib.import_module(f"{bapo.web.endpoints.__name__}.{name}")
    return Endpoint(
        name=name.replace("_", "-"),
        answer=module.answer,
        folds=getattr(module, "FOLDS", ()),
        needs_records=getattr(module, "NEEDS_RECORDS", True),
        exported=getattr(module, "exported", _without_query),
    )


def _without_query(_: RunView) -> list[dict[str, Any]]:
    return [{}]


def view_of(run: RunDirectory, config: Config, live: Live | None = None) -> RunView:
    """A view with the folds of all endpoints."""
    folds = dict.fromkeys(kind for endpoint in all_endpoints().values() for kind in endpoint.folds)
    return RunView(run=run, config=config, makers=tuple(folds), live=live)


def ask(view: RunView, endpoint: Endpoint, **query: Any) -> dict[str, Any]:
    """The answer, with what every page must know of the records that it was made from.

    Raises: ContractError for a query that means nothing, or a damaged file; UnavailableError.
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
