"""What the operator calls (`bapo buffer`): what there is, whether it fits together, and taking something out."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

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
"""Groups of one call."""
Many = Annotated[int, Query(ge=1, le=1_000_000)]


class Violation(Body):
    """Something that does not fit together."""

    invariant: str
    detail: str


class VerifyAnswer(Body):
    """What was checked, and what is broken."""

    model_config = example(
        step=12,
        groups=96,
        open_requests=128,
        invariants={"bytes": "The counts of bytes are the sums of the frames' sizes."},
        violations=[{"invariant": "bytes", "detail": "the frames have 900 bytes, but 800 are counted"}],
    )

    step: int
    """Newest assembled step."""
    groups: int
    open_requests: int
    invariants: dict[str, str]
    """Name -> what it promises, of all that were checked."""
    violations: list[Violation]
    """Empty in a sound buffer."""


class ReadBody(Body):
    """Groups to be read at once."""

    group_ids: list[Name] = Field(max_length=MAX_READ)


class DroppedAnswer(Body):
    """The table that the group was in: `fresh`, `reevaluated`, `evaluated` or `high`."""

    dropped_from: str


@router.get("/verify")
def verify(here: Here) -> VerifyAnswer:
    """Check every invariant over the facts of one moment. Takes as long as the index of a snapshot."""
    audit, broken = here.service.maintenance.verify()
    return VerifyAnswer(
        step=audit.assembled,
        groups=len(audit.references),
        open_requests=len(audit.opened),
        invariants={name: check.__doc__ or "" for name, check in INVARIANTS.items()},
        violations=[Violation(invariant=item.invariant, detail=item.detail) for item in broken],
    )


@router.get("/groups")
def groups(here: Here, offset: Offset = 0, limit: Many = 100, group_id: Name | None = None) -> Page:
    """Every group that the buffer holds, in the order of their ids, and where it is: all from one moment."""
    held = [item for item in here.service.maintenance.held() if group_id in (None, item.record.group_id)]
    return Page(total=len(held), offset=offset, items=[_item(item) for item in held[offset : offset + limit]])


@router.post("/groups/read", response_class=Response, responses=FRAMES_ANSWER)
def read(body: ReadBody, here: Here) -> Response:
    """The frames of those of the groups that are still held."""
    return stream(here.service.held(body.group_ids))


@router.delete("/groups/{group_id}")
def drop_group(group_id: Name, here: Here) -> DroppedAnswer:
    """Delete a group that no batch needs. The scheduler replaces a fresh one, with another prompt."""
    table = here.service.maintenance.drop_group(group_id)
    here.service.backpressure.forget()
    return DroppedAnswer(dropped_from=table)


@router.delete("/requests/{request_id}", status_code=204)
async def drop_request(request_id: Name, here: Here) -> None:
    """Withdraw an open request, queued or leased. The scheduler replaces a fresh one, with another prompt.

    A push of its group is a `duplicate` from then on.
    """
    await in_thread(here.service.maintenance.drop_request, request_id)
    here.groups.wake()  # it may be all that a batch waited for


@router.delete("/bad", status_code=204)
def drop_prompt(prompt_id: Annotated[PromptId, Query()], here: Here) -> None:
    """Take a prompt out of B_bad."""
    here.service.maintenance.drop_prompt(prompt_id)


@router.delete("/runs/{name}", status_code=204)
def drop_run(name: Name, here: Here) -> None:
    """Delete everything that this run has in the buffer. Its name is asked for, so that no slip deletes a run."""
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
