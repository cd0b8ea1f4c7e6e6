"""Routes of the scheduler, the workers and the evaluator: requests and groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Scope

from bapo.core.errors import AccessError
from bapo.core.journal import pack_entries, unpack_entries
from bapo.core.json_values import to_map
from bapo.core.types import Purpose, RolloutRequest
from bapo.runtime.auth.api_tokens import Role
from bapo.transport.http_guard import ROLE, allow
from buffer_service.http.context import Here
from buffer_service.http.long_poll import in_thread
from buffer_service.http.routes.frames import BINARY, OCTETS, stream
from buffer_service.http.schemas import (
    AcceptedAnswer,
    ClaimBody,
    EnqueueBody,
    FailBody,
    IdsAnswer,
    JournalledAnswer,
    Name,
    OutcomeAnswer,
    PushedAnswer,
    ReleasedAnswer,
    RenewBody,
    RequestsAnswer,
    RoundBody,
    Version,
    Wait,
    WorkerBody,
)

router = APIRouter(tags=["work"])

MAX_PUSH_BYTES = 64 << 20
"""For the headers of 1,024 groups, which include their prompts."""

MAX_JOURNAL_BYTES = 64 << 20
"""One turn of 100,000 tokens has 2 MB."""

FRAMES_ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": BINARY, "description": "Concatenated group frames."}}


@router.post("/requests")
@allow(Role.SCHEDULER, Role.EVALUATOR)
async def enqueue(body: EnqueueBody, here: Here, request: Request) -> AcceptedAnswer:
    """Enqueue requests; ignores known ids, and a cursor that does not increase or skips."""
    refuse_training(request.scope, body.requests)
    accepted = await in_thread(here.service.enqueue, body.requests, body.cursor, body.spares)
    here.work.wake()
    return AcceptedAnswer(accepted=accepted)


@router.post("/reevaluations/{step}")
@allow(Role.SCHEDULER)
async def reevaluate(step: Version, body: RoundBody, here: Here) -> AcceptedAnswer:
    """Issue the re-evaluation round of a step; a second call for the same step does nothing."""
    accepted = await in_thread(here.service.enqueue_round, step, body.requests)
    here.work.wake()
    here.groups.wake()  # a batch may wait only for this round, even if it is empty
    return AcceptedAnswer(accepted=accepted)


@router.post("/requests/claim", response_model=RequestsAnswer)
@allow(Role.WORKER)
async def claim(body: ClaimBody, here: Here, request: Request) -> Response:
    """Lease requests: re-evaluations (newest round first), evaluations, fresh ones. Waits for the first one.

    A repeated claim returns the leases of the first call; a claim older than the worker's newest returns nothing. So
    does a claim with a version that the learner cannot have published (it was undone by a restore): its groups would
    be rejected.
    """

    def attempt() -> list[RolloutRequest] | None:
        return here.service.claim(body.worker_id, body.limit, body.policy_version, body.nonce) or None

    claimed = await here.work.poll(attempt, wait_s=body.wait_s, is_gone=request.is_disconnected, caller=body.worker_id)
    return JSONResponse({"requests": [to_map(item) for item in claimed or ()]})


@router.post("/requests/claim/end", status_code=204)
@allow(Role.WORKER)
async def end_claim(body: WorkerBody, here: Here) -> None:
    """End the wait of a worker's open claim: with newer weights its next claim may return more."""
    here.work.interrupt(body.worker_id)


@router.post("/requests/renew")
@allow(Role.WORKER)
def renew(body: RenewBody, here: Here) -> IdsAnswer:
    """Extend leases by `buffer.lease_s`."""
    return IdsAnswer(request_ids=here.service.store.renew(body.worker_id, body.request_ids))


@router.post("/requests/fail")
@allow(Role.WORKER)
async def fail(body: FailBody, here: Here) -> OutcomeAnswer:
    """Report a failed group: it is re-sampled up to `buffer.max_attempts` times, then dropped and counted."""
    outcome = await in_thread(here.service.fail, body.worker_id, body.request_id, body.reason, body.detail)
    here.work.wake()
    here.groups.wake()
    return OutcomeAnswer(outcome=outcome)


@router.post("/requests/release")
@allow(Role.WORKER)
async def release(body: WorkerBody, here: Here) -> ReleasedAnswer:
    """Return all leases of a dead worker to the queue, without counting an attempt."""
    released = await in_thread(here.service.release, body.worker_id)
    here.work.wake()
    return ReleasedAnswer(released=released)


@router.post("/requests/{request_id}/journal")
@allow(Role.WORKER, most_bytes=MAX_JOURNAL_BYTES)
async def append_journal(
    request_id: Name,
    worker_id: Annotated[Name, Query()],
    first: Annotated[int, Query(ge=0)],
    body: Annotated[bytes, Body(media_type=OCTETS)],
    here: Here,
) -> JournalledAnswer:
    """Store the entries (a msgpack array of bytes) `first` and following of a leased request's journal. Idempotent;
    returns once they are in Redis' append-only file."""
    entries = unpack_entries(body)
    answer = await in_thread(here.service.store.append_journal, worker_id, request_id, first, entries)
    return JournalledAnswer(result=answer.result, num_entries=answer.num_entries)


@router.get("/requests/{request_id}/journal", response_class=Response, responses={200: {"content": BINARY}})
@allow(Role.WORKER)
def read_journal(request_id: Name, here: Here) -> Response:
    """Return the entries of a request's journal as a msgpack array of bytes."""
    return Response(pack_entries(here.service.store.read_journal(request_id)), media_type=OCTETS)


@router.post("/groups")
@allow(Role.WORKER, most_bytes=MAX_PUSH_BYTES, needs_length=True)
async def push(body: Annotated[bytes, Body(media_type=OCTETS)], here: Here) -> PushedAnswer:
    """Store groups whose frames are already in Redis (`bapo.core.codec.pack_push`). Idempotent; returns once they are
    in Redis' append-only file. 429 with Retry-After while fresh groups are rejected: their frames remain for the
    retry.
    """
    results = await in_thread(here.service.push, body)
    here.groups.wake()
    return PushedAnswer(groups=results, room=not here.service.backpressure.full_reason())


@router.get("/evaluations/{label}", response_class=Response, responses=FRAMES_ANSWER)
@allow(Role.EVALUATOR)
def collect(label: Name, here: Here) -> Response:
    """Return all finished groups of one evaluation, by id."""
    return stream(here.service.held(here.service.store.evaluated(label)))


@router.delete("/evaluations/{label}", status_code=204)
@allow(Role.EVALUATOR)
def forget(label: Name, here: Here) -> None:
    """Delete the groups and open requests of one evaluation."""
    here.service.store.forget(label)


@router.get("/room", status_code=204)
@allow(Role.WORKER)
async def room(request: Request, here: Here, wait_s: Annotated[Wait, Query()] = 0.0) -> None:
    """Wait until a push of fresh groups would be accepted; 429 if it is still rejected after `wait_s`."""
    pressure = here.service.backpressure
    if await here.work.poll(pressure.has_room, wait_s=wait_s, is_gone=request.is_disconnected) is None:
        pressure.admit(0)


class RightError(AccessError):
    """The role may call the route, but not with this content."""

    http_status = 403


def refuse_training(scope: Scope, requests: Iterable[RolloutRequest]) -> None:
    """Reject training requests from an evaluator. Raises: RightError."""
    if scope.get(ROLE) is not Role.EVALUATOR:
        return
    for request in requests:
        if request.purpose is not Purpose.EVALUATE:
            raise RightError(
                f"request {request.request_id} is {request.purpose}: evaluators may only request evaluations; use the "
                "scheduler or operator token"
            )
