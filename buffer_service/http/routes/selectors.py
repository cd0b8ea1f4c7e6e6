"""Routes of the scheduler for an adaptive prompt selector: success counts, and the state that replaces old ones."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Response

from bapo.core.errors import ContractError
from bapo.core.frames import pack
from bapo.runtime.auth.api_tokens import Role
from bapo.transport.http_guard import allow
from buffer_service.http.context import Here
from buffer_service.http.routes.frames import BINARY, OCTETS
from buffer_service.http.schemas import Version
from buffer_service.state import SelectorState

log = logging.getLogger(__name__)
router = APIRouter(tags=["scheduler"])

MAX_STATE_BYTES = 256 << 20
"""For the state of a prompt selector: two numbers for each of ten million prompts."""

OUTCOMES: dict[int | str, dict[str, Any]] = {
    200: {"content": BINARY, "description": "msgpack: a list of packed success counts (`bapo/core/success_counts.py`)."}
}
STATE: dict[int | str, dict[str, Any]] = {
    200: {"content": BINARY, "description": "msgpack: {round, through, data}; round 0 before the first."}
}


@router.get("/success-counts", response_class=Response, responses=OUTCOMES)
@allow(Role.SCHEDULER)
def success_counts(
    here: Here, after: Annotated[Version, Query()] = 0, limit: Annotated[int, Query(ge=1, le=256)] = 64
) -> Response:
    """Return the success counts of the fresh groups of the steps after `after`, oldest first, up to the first gap."""
    return Response(pack(here.service.store.success_counts(after, limit)), media_type=OCTETS)


@router.get("/selector", response_class=Response, responses=STATE)
@allow(Role.SCHEDULER)
def selector(here: Here) -> Response:
    """Return the last stored state of the prompt selector."""
    return Response(pack(here.service.store.selector_state()), media_type=OCTETS)


@router.put("/selector/{round_}", status_code=204)
@allow(Role.SCHEDULER, most_bytes=MAX_STATE_BYTES, needs_length=True)
def keep(
    round_: Version,
    here: Here,
    through: Annotated[Version, Query()],
    body: Annotated[bytes, Body(media_type=OCTETS)] = b"",
) -> None:
    """Store the state used to choose the prompts of step `round_`; success counts up to `through` are deleted.

    A state of an older round is ignored.
    """
    store = here.service.store
    assembled = store.readiness(through).assembled
    if through > assembled:
        raise ContractError(
            f"the selector state includes success counts up to step {through}, but the newest batch is {assembled}"
        )
    is_kept = store.keep_selector_state(SelectorState(round=round_, through=through, data=body))
    log.debug("selector state round=%d through=%d kept=%s", round_, through, is_kept)
