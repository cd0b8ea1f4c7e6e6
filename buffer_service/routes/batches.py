"""What the learner calls: batches, progress, and the state that a checkpoint joins."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Scope

from bapo.named_frames import MEDIA_TYPE, pack_named
from bapo.types import Progress
from buffer_service.bodies import MOST_RESTORE_BYTES, read_body
from buffer_service.context import Here
from buffer_service.direct import direct_of, gone, in_thread_unless_gone
from buffer_service.outgoing import NOTHING, OCTETS, OutgoingResponse
from buffer_service.routes.bare import route_by
from buffer_service.schemas import CommitBody, CommittedAnswer, ProgressBody, ResumeBody, Version, Wait, WaitingAnswer
from buffer_service.threads import in_thread

router = APIRouter(tags=["learner"])

BINARY = {OCTETS: {"schema": {"type": "string", "format": "binary"}}}
BATCH_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {**BINARY, MEDIA_TYPE: BINARY[OCTETS]},
        "description": "One batch frame (`bapo/wire.py`); or where its frames lie, to who asked for `frames=named` "
        "(`bapo/named_frames.py`), if it can read them there.",
    },
    202: {"model": WaitingAnswer, "description": "Not there after `wait_s`, why, and what is there."},
}
ASKED = re.compile(rb"/batches/([0-9]{1,6})\?wait_s=([1-5]?[0-9]\.[0-9]{3})(&frames=named)?")
"""How `bapo.batch_reader` asks for a batch."""
SNAPSHOT: dict[str, Any] = {"requestBody": {"required": True, "content": BINARY}}


async def batch(
    step: Annotated[Version, "t"],
    here: Here,
    request: Request,
    wait_s: Annotated[Wait, Query()] = 0.0,
    frames: Annotated[Literal["inline", "named"], Query()] = "inline",
) -> Response:
    """D_t, assembled now when nothing is missing. The same step has the same batch until a checkpoint releases it."""
    direct = direct_of(request.scope)

    def attempt() -> Response | None:
        record = here.service.batch(step)
        if record is None:
            return None
        if frames == "named" and (named := here.service.named(record)) is not None:
            return Response(pack_named(named), media_type=MEDIA_TYPE)
        outgoing = here.service.outgoing(record)
        found = OutgoingResponse(outgoing, next(outgoing.chunks, NOTHING))
        if direct is not None:
            found.write(direct)
        return found

    response = await here.groups.poll(
        attempt, wait_s=wait_s, is_gone=gone(request), is_worth=lambda: here.service.lack.may_be_over(step)
    )
    if response is None:
        reason, counts = await in_thread(here.service.not_yet, step)
        return JSONResponse({"reason": reason, "counts": counts}, status_code=202)
    here.work.wake()  # prompts of groups that were too old are asked again
    return response


def _asked(scope: Scope) -> dict[str, Any] | None:
    found = ASKED.fullmatch(scope["path"].encode() + b"?" + scope["query_string"])
    if found is None:
        return None
    return {"step": int(found[1]), "wait_s": float(found[2]), "frames": "named" if found[3] else "inline"}


router.add_api_route(
    "/batches/{step}",
    batch,
    methods=["POST"],
    response_class=Response,
    responses=BATCH_ANSWERS,
    route_class_override=route_by(_asked),
)


@router.get("/batches/{step}/untrained", response_class=Response, responses={200: {"content": BINARY}})
def untrained(step: Version, here: Here) -> Response:
    """Frames of the groups that the assembly of a retained batch did not train, one after the other, as far as they
    are held for their texts (`diagnostics.texts_mb`)."""
    return OutgoingResponse(here.service.untrained(step))


@router.post("/batches/{step}/commit")
def commit(step: Version, body: CommitBody, here: Here) -> CommittedAnswer:
    """Batch `step` is trained; batches up to the durable checkpoint are released."""
    return CommittedAnswer(checkpoint_wanted=here.service.commit(step, body.checkpointed))


@router.get("/progress")
async def progress(
    here: Here,
    request: Request,
    seen_step: Annotated[Version | None, Query()] = None,
    wait_s: Annotated[Wait, Query()] = 0.0,
) -> ProgressBody:
    """Where the learner is; zeros before its first report. With `seen_step`: as soon as it is in another step."""

    def moved() -> Progress | None:
        now = here.service.progress()
        return None if now.step == seen_step else now

    now = await here.progress.poll(moved, wait_s=wait_s, is_gone=request.is_disconnected)
    if now is None:
        now = await in_thread(here.service.progress)
    return ProgressBody(step=now.step, policy_version=now.policy_version)


@router.put("/progress", status_code=204)
async def report(body: ProgressBody, here: Here, request: Request) -> None:
    """Both numbers only rise: a lower one is ignored."""
    await in_thread_unless_gone(request, here.service.report, body.to_progress())
    here.progress.wake()
    here.work.interrupt()  # a worker with new weights may claim more than when it asked


@router.post("/snapshot", response_class=Response, responses={200: {"content": BINARY}})
def snapshot(here: Here) -> Response:
    """Everything that a resumed run needs, as one binary with a checksum."""
    return OutgoingResponse(here.service.snapshot())


@router.post("/restore", status_code=204, openapi_extra=SNAPSHOT)
async def restore(request: Request, here: Here) -> None:
    """Replace everything that this run has in the buffer by a snapshot."""
    body = await read_body(request, MOST_RESTORE_BYTES)
    await in_thread_unless_gone(request, here.service.restore, body)
    here.work.wake()
    here.groups.wake()
    here.progress.wake()


@router.post("/resume", status_code=204)
async def resume(body: ResumeBody, here: Here, request: Request) -> None:
    """A learner goes on after a checkpoint: all leases return, batches after it are handed out again."""
    await in_thread_unless_gone(request, here.service.resume, body.step)
    here.work.wake()
    here.progress.wake()
