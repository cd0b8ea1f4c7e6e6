"""The control API of the fleet: routes. The client is `bapo/transport/rollout_client.py`.

Blocking work runs in threads (`def`, not `async def`), so /healthz answers during an update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

import bapo
from bapo.core.errors import BapoError, ConfigError, Refusal, UnavailableError
from bapo.core.types import WeightTransfer, WeightUpdate
from bapo.runtime.auth.api_tokens import Keyring, Role
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.images import ImageFiles
from bapo.transport.bodies import Message
from bapo.transport.http_guard import HttpGuard, allow, error_answer, named_error
from bapo.transport.rollout_client import PIECE_BYTES, AgentsStatus
from rollout_server.fleet.fleet import Fleet
from rollout_server.weights.relay import WeightRelay


class Scale(BaseModel):
    """The target number of workers."""

    model_config = ConfigDict(strict=True)

    num: int = Field(description="1 to rollout.max_workers")


Update = Annotated[WeightUpdate, Body(), Message()]
Transfer = Annotated[WeightTransfer, Body(), Message()]


def create_app(
    fleet: Fleet,
    telemetry: Telemetry,
    keyring: Keyring | None = None,
    *,
    scale: Callable[[int], None] | None = None,
    store: WeightRelay | None = None,
    images: ImageFiles | None = None,
    refusal: Callable[[], str] = lambda: "",
    agents: Callable[[], AgentsStatus | None] = lambda: None,
) -> FastAPI:
    """The API of one fleet. Without a keyring no token is needed.

    Args:
        scale: sets the number of workers; None: `Fleet.scale`.
        store, images: weights and images for hosts that cannot read the run directory; None: without these routes.
        refusal: why the number of workers cannot be changed manually; empty if it can.
        agents: their episodes; None for a run without.
    """
    app = FastAPI(title="BAPO rollout server", version=bapo.__version__, summary="Workers that sample groups.")

    @app.get("/workers")
    @allow(Role.VIEWER, Role.LEARNER)
    def workers() -> dict[str, Any]:
        """List all workers, the target number, and the episodes of agents."""
        found = agents()
        return {
            "workers": [asdict(status) for status in fleet.statuses()],
            "num_wanted": fleet.num_wanted,
            "agents": asdict(found) if found is not None else None,
        }

    @app.put("/workers", status_code=202)
    def set_workers(body: Scale) -> dict[str, int]:
        """Change the number of workers; removed ones finish their groups first."""
        if reason := refusal():
            raise ConfigError(reason)
        (scale or fleet.scale)(body.num)
        return {"num_wanted": fleet.num_wanted}

    @app.post("/weights")
    @allow(Role.LEARNER)
    def update_weights(body: Update, rollback: bool = False) -> dict[str, Any]:
        """Publish weights; returns once every worker samples with them or is being restarted."""
        update = replace(body, url="")  # which this server alone says
        return {"seconds": fleet.update_weights(update, rollback=rollback)}

    @app.post("/weights/transfer")
    @allow(Role.LEARNER)
    def transfer_weights(body: Transfer) -> dict[str, Any]:
        """Receive weights from the learner's GPU; returns once these workers have them or are being restarted."""
        return {"seconds": fleet.transfer_weights(body)}

    _add_weight_files(app, store)
    _add_images(app, images)
    _add_health(app, fleet, telemetry)
    app.state.refused = partial(_count, telemetry)
    for kind in (BapoError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(HttpGuard, routes=app.routes, keyring=keyring, refused=app.state.refused)
    return app


def _add_weight_files(app: FastAPI, store: WeightRelay | None) -> None:
    if store is None:
        return

    @app.put("/weights/files/{digest}")
    @allow(Role.LEARNER, most_bytes=PIECE_BYTES, needs_length=True)
    async def receive(digest: str, offset: int, size: int, request: Request) -> dict[str, int]:
        """Receive a chunk of a weight file from the learner."""
        data = await request.body()
        return {"num_bytes": await run_in_threadpool(store.receive, digest, offset, size, data)}

    @app.get("/weights/files/{digest}", response_class=Response)
    @allow(Role.WORKER)
    def read(digest: str, offset: int, length: int) -> Response:
        """Return a chunk of a weight file for a worker's host."""
        return Response(store.read(digest, offset, length), media_type="application/octet-stream")


def _add_images(app: FastAPI, images: ImageFiles | None) -> None:
    if images is None:
        return

    @app.get("/images/{digest}", response_class=Response)
    @allow(Role.WORKER)
    def image(digest: str) -> Response:
        """Return an image of a prompt for a worker's host."""
        return Response(images.read(digest), media_type="application/octet-stream")


def _add_health(app: FastAPI, fleet: Fleet, telemetry: Telemetry) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """The process is alive."""
        return {"alive": True}

    @app.get("/readyz")
    def readyz() -> dict[str, bool]:
        """At least one worker samples."""
        reason = fleet.readiness()
        if reason:
            raise UnavailableError(reason)
        return {"ready": True}

    @app.get("/metrics", response_class=Response)
    @allow(Role.VIEWER)
    def metrics() -> Response:
        """Prometheus text format."""
        return Response(telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)


def _count(telemetry: Telemetry, reason: Refusal) -> None:
    telemetry.counter("bapo_refused_requests_total").labels(reason=reason.value).inc()


async def _answer_error(request: Request, error: Exception) -> Response:
    named = named_error(error, request.method, request.url.path)
    return JSONResponse(**error_answer(named, request.app.state.refused))
