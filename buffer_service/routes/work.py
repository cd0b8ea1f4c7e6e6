"""What the scheduler, the workers and the evaluator call: requests and groups."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from bapo.errors import ContractError
from bapo.messages import request_map
from bapo.types import RolloutRequest
from buffer_service.context import MOST_PUSH_BYTES, Here, read_body
from buffer_service.schemas import (
    AcceptedAnswer,
    ClaimBody,
    EnqueueBody,
    FailBody,
    IdsAnswer,
    Name,
    OutcomeAnswer,
    PushedAnswer,
    ReleaseBody,
    ReleasedAnswer,
    RenewBody,
    RequestsAnswer,
    RoundBody,
    Version,
)

router = APIRouter(tags=["work"])

OCTETS = "application/octet-stream"
FRAMES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Group frames (`bapo/wire.py`), one after the other. Content-Length is required.",
        "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}},
    }
}
FRAMES_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}, "description": "Group frames."}
}


@router.post("/requests")
async def enqueue(body: EnqueueBody, here: Here) -> AcceptedAnswer:
    """Ask for groups; ids that were asked for before are ignored, and so is a cursor that does not rise."""
    requests = [item.to_request() for item in body.requests]
    accepted = await run_in_threadpool(here.service.enqueue, requests, body.cursor)
    here.work.wake()
    return AcceptedAnswer(accepted=accepted)


@router.post("/reevaluations/{step}")
async def reevaluate(step: Version, body: RoundBody, here: Here) -> AcceptedAnswer:
    """Issue the re-evaluation round of a step; the second call for the same step does nothing."""
    requests = [item.to_request() for item in body.requests]
    accepted = await run_in_threadpool(here.service.enqueue_round, step, requests)
    here.work.wake()
    here.groups.wake()  # a round without requests may be all that a batch waits for
    return AcceptedAnswer(accepted=accepted)


@router.post("/requests/claim", response_model=RequestsAnswer)
async def claim(body: ClaimBody, here: Here, request: Request) -> Response:
    """Lease requests: re-evaluations (newest round first), evaluations, fresh ones. Waits for the first one."""

    def attempt() -> list[RolloutRequest] | None:
        return here.service.claim(body.worker_id, body.limit, body.policy_version) or None

    claimed = await here.work.poll(attempt, wait_s=body.wait_s, is_gone=request.is_disconnected)
    return JSONResponse({"requests": [request_map(item) for item in claimed or ()]})


@router.post("/requests/renew")
def renew(body: RenewBody, here: Here) -> IdsAnswer:
    """Keep leases for another `buffer.lease_s`."""
    return IdsAnswer(request_ids=here.service.renew(body.worker_id, body.request_ids))


@router.post("/requests/fail")
async def fail(body: FailBody, here: Here) -> OutcomeAnswer:
    """A group has no rewards: asked again, whole, up to `buffer.max_attempts` times, then dropped and counted."""
    outcome = await run_in_threadpool(here.service.fail, body.worker_id, body.request_id, body.reason, body.detail)
    here.work.wake()
    here.groups.wake()
    return OutcomeAnswer(outcome=outcome)


@router.post("/requests/release")
async def release(body: ReleaseBody, here: Here) -> ReleasedAnswer:
    """All leases of a dead worker return to their places; no attempt is counted."""
    released = await run_in_threadpool(here.service.release, body.worker_id)
    here.work.wake()
    return ReleasedAnswer(released=released)


@router.post("/groups", openapi_extra=FRAMES, response_model=PushedAnswer)
async def push(request: Request, here: Here) -> Response:
    """Store groups. Answers when they are in Redis; pushing again is harmless."""
    body = await read_body(request, MOST_PUSH_BYTES)
    fates = await run_in_threadpool(here.service.push, body)
    here.groups.wake()
    return JSONResponse({"groups": fates})


@router.get("/groups/{group_id}", response_class=Response, responses=FRAMES_ANSWER)
def group(group_id: Name, here: Here) -> Response:
    """The frame of one group that the buffer holds."""
    frame = here.service.frame(group_id)
    if frame is None:
        raise ContractError(f"the buffer does not hold group {group_id}")
    return Response(frame, media_type=OCTETS)


@router.get("/evaluations/{label}", response_class=Response, responses=FRAMES_ANSWER)
def collect(label: Name, here: Here) -> Response:
    """All groups of one evaluation that are done, in the order of their ids."""
    return Response(here.service.collect(label), media_type=OCTETS)


@router.delete("/evaluations/{label}", status_code=204)
def forget(label: Name, here: Here) -> None:
    """Delete the groups and open requests of one evaluation."""
    here.service.forget(label)
