"""What the learner calls: batches, progress, and the state that a checkpoint joins."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from bapo.wire import pack_batch_start
from buffer_service.context import MOST_RESTORE_BYTES, Here, read_body
from buffer_service.routes.work import OCTETS
from buffer_service.schemas import CommitBody, ProgressBody, ResumeBody, Version, Wait, WaitingAnswer
from buffer_service.service import BufferService
from buffer_service.values import BatchRecord

router = APIRouter(tags=["learner"])

BINARY = {OCTETS: {"schema": {"type": "string", "format": "binary"}}}
BATCH_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": BINARY, "description": "One batch frame (`bapo/wire.py`)."},
    202: {"model": WaitingAnswer, "description": "Not there after `wait_s`, and why."},
}
SNAPSHOT: dict[str, Any] = {"requestBody": {"required": True, "content": BINARY}}


class BatchResponse(Response):
    """A batch frame, sent while its groups' frames are still being read from the store."""

    media_type = OCTETS

    def __init__(self, service: BufferService, record: BatchRecord) -> None:
        start = pack_batch_start(record.header, record.num_bytes)
        super().__init__(headers={"content-length": str(len(start) + record.num_bytes)})
        self._service, self._record, self._start = service, record, start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the next frames while the last ones are on their way."""
        reading = asyncio.ensure_future(self._read(0))
        try:
            frames = await reading  # before the status, so that a store that is away is an error and not a cut body
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._start, "more_body": True})
            first = len(frames)
            while frames:
                reading = asyncio.ensure_future(self._read(first))
                for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                frames = await reading
                first += len(frames)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            reading.cancel()

    async def _read(self, first: int) -> list[bytes]:
        return await run_in_threadpool(self._service.frames_of, self._record, first)


@router.post("/batches/{step}", response_class=Response, responses=BATCH_ANSWERS)
async def batch(
    step: Annotated[Version, "t"], here: Here, request: Request, wait_s: Annotated[Wait, Query()] = 0.0
) -> Response:
    """D_t, assembled now when nothing is missing. The same step has the same batch until a checkpoint releases it."""

    def attempt() -> BatchRecord | None:
        return here.service.batch(step)

    record = await here.groups.poll(attempt, wait_s=wait_s, is_gone=request.is_disconnected)
    if record is None:
        reason = await run_in_threadpool(here.service.why_not_yet, step)
        return JSONResponse({"reason": reason}, status_code=202)
    here.work.wake()  # prompts of groups that were too old are asked again
    return BatchResponse(here.service, record)


@router.post("/batches/{step}/commit", status_code=204)
def commit(step: Version, body: CommitBody, here: Here) -> None:
    """Batch `step` is trained; batches up to the durable checkpoint are released."""
    here.service.commit(step, body.checkpointed)


@router.get("/progress")
def progress(here: Here) -> ProgressBody:
    """Where the learner is; zeros before its first report."""
    now = here.service.progress()
    return ProgressBody(step=now.step, policy_version=now.policy_version)


@router.put("/progress", status_code=204)
def report(body: ProgressBody, here: Here) -> None:
    """Both numbers only rise: a lower one is ignored."""
    here.service.report(body.to_progress())


@router.post("/snapshot", response_class=Response, responses={200: {"content": BINARY}})
def snapshot(here: Here) -> Response:
    """Everything that a resumed run needs, as one binary with a checksum."""
    return Response(here.service.snapshot(), media_type=OCTETS)


@router.post("/restore", status_code=204, openapi_extra=SNAPSHOT)
async def restore(request: Request, here: Here) -> None:
    """Replace everything that this run has in the buffer by a snapshot."""
    body = await read_body(request, MOST_RESTORE_BYTES)
    await run_in_threadpool(here.service.restore, body)
    here.work.wake()
    here.groups.wake()


@router.post("/resume", status_code=204)
async def resume(body: ResumeBody, here: Here) -> None:
    """A learner goes on after a checkpoint: all leases return, batches after it are handed out again."""
    await run_in_threadpool(here.service.resume, body.step)
    here.work.wake()
