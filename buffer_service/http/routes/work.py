"""What the scheduler, the workers and the evaluator call: requests and groups."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import JSONResponse

from bapo.core.codec import request_map
from bapo.core.types import RolloutRequest
from buffer_service.http.context import Here
from buffer_service.http.long_poll import in_thread
from buffer_service.http.permissions import refuse_training
from buffer_service.http.routes.frames import BINARY, OCTETS, stream
from buffer_service.http.schemas import (
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
    Wait,
)

router = APIRouter(tags=["work"])

FRAMES_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": BINARY, "description": "Group frames, one after the other."}
}


@router.post("/requests")
async def enqueue(body: EnqueueBody, here: Here, request: Request) -> AcceptedAnswer:
    """Ask for groups; ids that were asked for before are ignored, and so is a cursor that does not rise."""
    requests = [item.to_request() for item in body.requests]
    refuse_training(request.scope, requests)
    accepted = await in_thread(here.service.enqueue, requests, body.cursor, body.spares)
    here.work.wake()
    return AcceptedAnswer(accepted=accepted)


@router.post("/reevaluations/{step}")
async def reevaluate(step: Version, body: RoundBody, here: Here) -> AcceptedAnswer:
    """Issue the re-evaluation round of a step; the second call for the same step does nothing."""
    requests = [item.to_request() for item in body.requests]
    accepted = await in_thread(here.service.enqueue_round, step, requests)
    here.work.wake()
    here.groups.wake()  # a round without requests may be all that a batch waits for
    return AcceptedAnswer(accepted=accepted)


@router.post("/requests/claim", response_model=RequestsAnswer)
async def claim(body: ClaimBody, here: Here, request: Request) -> Response:
    """Lease requests: re-evaluations (newest round first), evaluations, fresh ones. Waits for the first one.

    A report of progress ends the wait: the worker may have taken new weights since it asked. A claim that comes again
    gets what it leased the first time, and an older one than the worker's newest gets nothing. Nor does one with a
    version that the learner cannot have published: a restore has undone it, and its groups would be refused.
    """

    def attempt() -> list[RolloutRequest] | None:
        return here.service.claim(body.worker_id, body.limit, body.policy_version, body.nonce) or None

    claimed = await here.work.poll(attempt, wait_s=body.wait_s, is_gone=request.is_disconnected)
    return JSONResponse({"requests": [request_map(item) for item in claimed or ()]})


@router.post("/requests/renew")
def renew(body: RenewBody, here: Here) -> IdsAnswer:
    """Keep leases for another `buffer.lease_s`."""
    return IdsAnswer(request_ids=here.service.store.renew(body.worker_id, body.request_ids))


@router.post("/requests/fail")
async def fail(body: FailBody, here: Here) -> OutcomeAnswer:
    """A group has no rewards: it is re-sampled, whole, up to `buffer.max_attempts` times, then dropped and counted."""
    outcome = await in_thread(here.service.fail, body.worker_id, body.request_id, body.reason, body.detail)
    here.work.wake()
    here.groups.wake()
    return OutcomeAnswer(outcome=outcome)


@router.post("/requests/release")
async def release(body: ReleaseBody, here: Here) -> ReleasedAnswer:
    """All leases of a dead worker return to their places; no attempt is counted."""
    released = await in_thread(here.service.release, body.worker_id)
    here.work.wake()
    return ReleasedAnswer(released=released)


@router.post("/groups")
async def push(body: Annotated[bytes, Body(media_type=OCTETS)], here: Here) -> PushedAnswer:
    """Store groups whose frames are in Redis already (`bapo.core.codec.pack_push`). Answers when they are in its
    append-only file; pushing again is harmless. 429 with Retry-After while fresh groups are refused: their frames
    stay.
    """
    results = await in_thread(here.service.push, body)
    here.groups.wake()
    return PushedAnswer(groups=results, room=not here.service.backpressure.why_full())


@router.get("/evaluations/{label}", response_class=Response, responses=FRAMES_ANSWER)
def collect(label: Name, here: Here) -> Response:
    """All groups of one evaluation that are done, in the order of their ids."""
    return stream(here.service.held(here.service.store.evaluated(label)))


@router.delete("/evaluations/{label}", status_code=204)
def forget(label: Name, here: Here) -> None:
    """Delete the groups and open requests of one evaluation."""
    here.service.store.forget(label)


@router.get("/room", status_code=204)
async def room(request: Request, here: Here, wait_s: Annotated[Wait, Query()] = 0.0) -> None:
    """Returns when a push of fresh groups would be taken; 429 when it is still refused after `wait_s`."""
    pressure = here.service.backpressure
    if await here.work.poll(pressure.has_room, wait_s=wait_s, is_gone=request.is_disconnected) is None:
        pressure.admit(0)
