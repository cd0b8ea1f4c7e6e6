"""Routes of the learner: batches, progress, and the buffer state of a checkpoint."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import JSONResponse

from bapo.core.errors import UnavailableError
from bapo.core.types import Progress
from bapo.runtime.auth.api_tokens import Role
from bapo.transport.http_guard import allow
from buffer_service.http.context import Here
from buffer_service.http.long_poll import in_thread
from buffer_service.http.routes.frames import BINARY, OCTETS, stream
from buffer_service.http.schemas import (
    BadFramesAnswer,
    CommitBody,
    CommittedAnswer,
    Position,
    ResumeBody,
    SuspectsBody,
    Version,
    Wait,
    WaitingAnswer,
)
from buffer_service.snapshot import read_snapshot

router = APIRouter(tags=["learner"])

MAX_RESTORE_BYTES = 16 << 30

GONE_S = 0.005
"""Within this time the event loop notices a connection that was closed right after the request."""
BATCH_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": BINARY, "description": "A batch without its frames (`bapo.core.codec.unpack_pull`)."},
    202: {"model": WaitingAnswer, "description": "Not ready after `wait_s`: the reason, and the current counts."},
}


@router.post("/batches/{step}", response_class=Response, responses=BATCH_ANSWERS)
@allow(Role.LEARNER)
async def batch(
    step: Annotated[Version, "t"], here: Here, request: Request, wait_s: Annotated[Wait, Query()] = 0.0
) -> Response:
    """Return batch D_t, assembling it if possible. A step keeps its batch until a checkpoint releases it."""

    def attempt() -> bytes | None:
        record = here.service.batch(step)
        return None if record is None else here.service.pulled(record)

    found = await here.groups.poll(
        attempt,
        wait_s=wait_s,
        is_gone=request.is_disconnected,
        is_worth=lambda: here.service.shortfall.may_be_over(step),
    )
    if found is None:
        reason, counts = await in_thread(here.service.waiting_for, step)
        return JSONResponse({"reason": reason, "counts": counts}, status_code=202)
    here.work.wake()  # prompts of stale groups are re-sampled
    return Response(found, media_type=OCTETS)


@router.post("/batches/{step}/bad-frames")
@allow(Role.LEARNER)
def bad_frames(step: Version, body: SuspectsBody, here: Here) -> BadFramesAnswer:
    """Re-read suspected frames of a retained batch. Corrupt frames are returned, logged with their worker, counted and
    removed from B_high; the batch is trained without them."""
    return BadFramesAnswer(bad=here.service.bad_frames(step, body.group_ids))


@router.get("/batches/{step}/untrained", response_class=Response, responses={200: {"content": BINARY}})
@allow(Role.LEARNER)
def untrained(step: Version, here: Here) -> Response:
    """Return the concatenated frames of the groups that the assembly of a retained batch did not train, as far as
    they are retained for their texts (`diagnostics.texts_mb`)."""
    return stream(here.service.untrained(step))


async def refuse_gone(request: Request) -> None:
    """Reject a restore or resume whose caller has disconnected: after a stall it may arrive late, when the caller has
    already succeeded through another instance. Raises: UnavailableError."""
    await asyncio.sleep(GONE_S)
    if await request.is_disconnected():
        raise UnavailableError(f"{request.method} {request.url.path} arrived too late: the caller has disconnected")


@router.post("/batches/{step}/commit")
@allow(Role.LEARNER)
def commit(step: Version, body: CommitBody, here: Here) -> CommittedAnswer:
    """Mark batch `step` as trained; batches up to the durable checkpoint are released."""
    return CommittedAnswer(checkpoint_wanted=here.service.commit(step, body.checkpointed))


@router.get("/progress")
@allow(*Role)
async def progress(
    here: Here,
    request: Request,
    seen_step: Annotated[Version | None, Query()] = None,
    wait_s: Annotated[Wait, Query()] = 0.0,
) -> Position:
    """Return the learner's progress; zeros before its first report. With `seen_step`, wait until its step differs."""

    def moved() -> Progress | None:
        now = here.service.store.progress()
        return None if now.step == seen_step else now

    now = await here.progress.poll(moved, wait_s=wait_s, is_gone=request.is_disconnected)
    return await in_thread(here.service.store.progress) if now is None else now


@router.put("/progress", status_code=204)
@allow(Role.LEARNER)
async def report(body: Annotated[Position, Body()], here: Here, request: Request) -> None:
    """Report the learner's progress. Values never decrease: a lower one is ignored."""
    await refuse_gone(request)
    await in_thread(here.service.store.report, body)
    here.progress.wake()
    here.work.wake()  # a worker may already have the weights that are reported now


@router.post("/snapshot", response_class=Response, responses={200: {"content": BINARY}})
@allow(Role.LEARNER)
def snapshot(here: Here) -> Response:
    """Return everything that a resumed run needs, as one binary with a checksum."""
    return stream(read_snapshot(here.service.store))


@router.post("/restore", status_code=204)
@allow(Role.LEARNER, most_bytes=MAX_RESTORE_BYTES, needs_length=True)
async def restore(body: Annotated[bytes, Body(media_type=OCTETS)], request: Request, here: Here) -> None:
    """Replace the state of this run by a snapshot."""
    await refuse_gone(request)
    await in_thread(here.service.restore, body)
    here.work.wake()
    here.groups.wake()
    here.progress.wake()


@router.post("/resume", status_code=204)
@allow(Role.LEARNER)
async def resume(body: ResumeBody, here: Here, request: Request) -> None:
    """Resume after a checkpoint: all leases are released, batches after it are served again."""
    await refuse_gone(request)
    await in_thread(here.service.resume, body.step)
    here.work.wake()
    here.progress.wake()
