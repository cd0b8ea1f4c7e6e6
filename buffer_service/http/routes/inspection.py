"""Read-only routes for operators, dashboards and the scheduler."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from bapo.core.json_values import to_map
from bapo.runtime.auth.api_tokens import Role
from bapo.transport.http_guard import allow
from buffer_service.http.context import Here
from buffer_service.http.schemas import Page

router = APIRouter(tags=["looking"])

Offset = Annotated[int, Query(ge=0, lt=1 << 31)]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.get("/status")
@allow(*Role)
def status(here: Here) -> Response:
    """Return the status of the buffer: `bapo.transport.messages.BufferStatus`."""
    return JSONResponse(to_map(here.service.inspection.status()))


@router.get("/hard-prompts")
@allow(Role.SCHEDULER)
def hard_prompts(here: Here) -> Response:
    """Return B_bad with its prompts, oldest first. The scheduler chooses re-evaluations from it."""
    return JSONResponse({"hard_prompts": here.service.inspection.hard_prompts()})


@router.get("/batches")
@allow(Role.SCHEDULER, Role.VIEWER)
def batches(here: Here, offset: Offset = 0, limit: Limit = 20) -> Page:
    """Return the compositions of the assembled batches, newest first."""
    total, items = here.service.store.compositions(offset, limit)
    return Page(total=total, offset=offset, items=[dict(line) for line in items])


@router.get("/counters")
@allow(Role.VIEWER)
def counters(here: Here) -> dict[str, int]:
    """Return event counts of the run: pushed, failed and dropped groups, by reason and pass rate (k/G)."""
    return here.service.store.counters()
