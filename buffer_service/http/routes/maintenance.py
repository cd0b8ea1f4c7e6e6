"""Routes of the operator (`bapo buffer`): list, verify and delete the contents of the buffer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from bapo.runtime.auth.api_tokens import Role
from bapo.transport.http_guard import allow
from buffer_service.http.context import Here
from buffer_service.http.long_poll import in_thread
from buffer_service.http.routes.frames import stream
from buffer_service.http.routes.inspection import Offset
from buffer_service.http.routes.work import FRAMES_ANSWER
from buffer_service.http.schemas import Body, Name, Page, PromptId, example
from buffer_service.inspection import Held
from buffer_service.store.invariants import INVARIANTS

router = APIRouter(tags=["operator"])

MAX_READ = 64
"""Groups per call."""
Many = Annotated[int, Query(ge=1, le=1_000_000)]


class Violation(Body):
    """A violated invariant."""

    invariant: str
    detail: str


class VerifyAnswer(Body):
    """The checked invariants and their violations."""

    model_config = example(
        step=12,
        groups=96,
        open_requests=128,
        invariants={"bytes": "The byte counters equal the sums of the frame sizes."},
        violations=[{"invariant": "bytes", "detail": "the frames have 900 bytes, but the counter is 800"}],
    )

    step: int
    """Newest assembled step."""
    groups: int
    open_requests: int
    invariants: dict[str, str]
    """Name -> description of each checked invariant."""
    violations: list[Violation]
    """Empty if the buffer is consistent."""


class ReadBody(Body):
    """Groups to read in one call."""

    group_ids: list[Name] = Field(max_length=MAX_READ)


class DroppedAnswer(Body):
    """The table the group was removed from: `fresh`, `reevaluated`, `evaluated` or `high`."""

    dropped_from: str


@router.get("/verify")
@allow(Role.VIEWER)
def verify(here: Here) -> VerifyAnswer:
    """Check every invariant on one consistent reading. Takes as long as reading the index of a snapshot."""
    audit, broken = here.service.maintenance.verify()
    return VerifyAnswer(
        step=audit.assembled,
        groups=len(audit.references),
        open_requests=len(audit.opened),
        invariants={name: check.__doc__ or "" for name, check in INVARIANTS.items()},
        violations=[Violation(invariant=item.invariant, detail=item.detail) for item in broken],
    )


@router.get("/groups")
def groups(here: Here, offset: Offset = 0, limit: Many = 100) -> Page:
    """List every stored group by id with its locations, from one consistent reading."""
    held = here.service.maintenance.held()
    return Page(total=len(held), offset=offset, items=[_item(item) for item in held[offset : offset + limit]])


@router.post("/groups/read", response_class=Response, responses=FRAMES_ANSWER)
def read(body: ReadBody, here: Here) -> Response:
    """Return the frames of those groups that are still stored."""
    return stream(here.service.held(body.group_ids))


@router.delete("/groups/{group_id}")
def drop_group(group_id: Name, here: Here) -> DroppedAnswer:
    """Delete a group that no batch needs. The scheduler replaces a fresh one by another prompt."""
    table = here.service.maintenance.drop_group(group_id)
    here.service.backpressure.forget()
    return DroppedAnswer(dropped_from=table)


@router.delete("/requests/{request_id}", status_code=204)
async def drop_request(request_id: Name, here: Here) -> None:
    """Cancel an open request, queued or leased. The scheduler replaces a fresh one by another prompt.

    A later push of its group is a `duplicate`.
    """
    await in_thread(here.service.maintenance.drop_request, request_id)
    here.groups.wake()  # a batch may have waited only for this request


@router.delete("/bad", status_code=204)
def drop_prompt(prompt_id: Annotated[PromptId, Query()], here: Here) -> None:
    """Remove a prompt from B_bad."""
    here.service.maintenance.drop_prompt(prompt_id)


@router.delete("/runs/{name}", status_code=204)
def drop_run(name: Name, here: Here) -> None:
    """Delete the whole state of this run. Its name is required as a confirmation."""
    here.service.maintenance.drop_run(name)
    here.service.backpressure.forget()


def _item(held: Held) -> dict[str, Any]:
    record = held.record
    return {
        "group_id": record.group_id,
        "prompt_id": record.prompt_id,
        "purpose": record.purpose.value,
        "step": record.step,
        "policy_version": record.policy_version,
        "rewards": list(record.rewards),
        "worker_id": record.worker_id,
        "num_tokens": record.num_tokens,
        "num_bytes": record.num_bytes,
        "places": list(held.places),
    }
