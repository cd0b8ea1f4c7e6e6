"""Small fakes for tests of the rollout server: a buffer in memory, engines and graders that misbehave on demand."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request

from bapo.config.buffer import BufferConfig
from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.codec import unpack_group, unpack_push
from bapo.core.errors import UnavailableError
from bapo.core.json_values import to_map
from bapo.core.types import Canary, Group, Prompt, RolloutRequest, WeightUpdate
from bapo.runtime.file_digest import digest_of
from bapo.tasks.grading.pool import Grades
from tests.support.wait import wait_until


class MemoryBuffer:
    """What a worker sees of the buffer service: requests are leased, groups are kept, everything is counted."""

    def __init__(self, requests: Sequence[RolloutRequest] = ()) -> None:
        self._lock = threading.Lock()
        self._queued: dict[str, RolloutRequest] = {}
        self.leased: dict[str, str] = {}
        self.groups: dict[str, Group] = {}
        self.failures: list[tuple[str, str, str]] = []
        self.lost: set[str] = set()
        self.down = False
        self._known: dict[str, RolloutRequest] = {}
        self.add(requests)

    def add(self, requests: Sequence[RolloutRequest]) -> None:
        with self._lock:
            for request in requests:
                self._known[request.request_id] = request
                self._queued[request.request_id] = request

    def claim(self, worker_id: str, *, limit: int, policy_version: int, wait_s: float = 0.0) -> list[RolloutRequest]:
        self._check_up()
        with self._lock:
            fit = [request for request in self._queued.values() if request.min_version <= policy_version][:limit]
            for request in fit:
                del self._queued[request.request_id]
                self.leased[request.request_id] = worker_id
        if not fit:
            time.sleep(min(wait_s, 0.01))
        return fit

    def end_claim(self, worker_id: str) -> None:
        self._check_up()

    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]:
        self._check_up()
        return [i for i in request_ids if self.leased.get(i) == worker_id and i not in self.lost]

    def fail(self, worker_id: str, request_id: str, *, reason: str, detail: str = "") -> None:
        self._check_up()
        with self._lock:
            self.leased.pop(request_id, None)
            self.failures.append((request_id, reason, detail))

    def release(self, worker_id: str) -> int:
        self._check_up()
        with self._lock:
            mine = [i for i, owner in self.leased.items() if owner == worker_id]
            for request_id in mine:
                del self.leased[request_id]
                self._queued[request_id] = self._known[request_id]
        return len(mine)

    def push(self, frames: Sequence[bytes]) -> dict[str, str]:
        self._check_up()
        results = {}
        with self._lock:
            for frame in frames:
                group = unpack_group(frame)
                results[group.group_id] = "duplicate" if group.group_id in self.groups else "stored"
                self.groups.setdefault(group.group_id, group)
                self.leased.pop(group.group_id, None)
        return results

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def _check_up(self) -> None:
        if self.down:
            raise UnavailableError("the buffer is down (a test says so)")


class InstantGrader:
    """Grades in the calling thread: 1.0 for a text that holds an answer."""

    def __init__(self) -> None:
        self.closed = False

    def grade(self, prompt: Prompt, texts: Sequence[str]) -> Grades:
        return Grades(rewards=np.array([float("<answer>" in text) for text in texts], np.float32))

    def expert(self, prompt: Prompt) -> str | None:
        return "<answer>by an expert</answer>"

    def close(self) -> None:
        self.closed = True


def make_config(*, engine_options: dict[str, Any] | None = None, lease_s: float = 60.0, **rollout: Any) -> Config:
    """A config for the scripted engine."""
    fields = {"engine": "scripted", "port": 0, "engine_options": engine_options or {}} | rollout
    return Config(rollout=RolloutConfig(**fields), buffer=BufferConfig(lease_s=lease_s))


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file."""


def make_update(path: Path, version: int, *, content: bytes = NO_TENSORS, digest: str | None = None) -> WeightUpdate:
    """An update whose file exists and whose digest is right unless another is given."""
    path.write_bytes(content)
    return WeightUpdate(
        version=version,
        path=str(path),
        digest=digest or digest_of(path),
        num_bytes=len(content),
        canary=Canary(token_ids=(4, 5), logprobs=(-1.0,), tolerance=1e-3),
    )


class Served:
    """An ASGI app on a free port of this machine, in a thread."""

    def __init__(self, app: Any) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def buffer_app(buffer: MemoryBuffer) -> FastAPI:
    """The part of the buffer's API that workers use, over a `MemoryBuffer`."""
    app = FastAPI()

    @app.post("/requests/claim")
    def claim(body: dict[str, Any]) -> dict[str, Any]:
        requests = buffer.claim(
            body["worker_id"], limit=body["limit"], policy_version=body["policy_version"], wait_s=body["wait_s"]
        )
        return {"requests": [to_map(request) for request in requests]}

    @app.post("/requests/claim/end", status_code=204)
    def end_claim(body: dict[str, Any]) -> None:
        buffer.end_claim(body["worker_id"])

    @app.post("/requests/renew")
    def renew(body: dict[str, Any]) -> dict[str, Any]:
        return {"request_ids": buffer.renew(body["worker_id"], body["request_ids"])}

    @app.post("/requests/fail")
    def fail(body: dict[str, Any]) -> dict[str, Any]:
        buffer.fail(body["worker_id"], body["request_id"], reason=body["reason"], detail=body["detail"])
        return {}

    @app.post("/requests/release")
    def release(body: dict[str, Any]) -> dict[str, Any]:
        return {"released": buffer.release(body["worker_id"])}

    frames: dict[str, bytes] = {}

    @app.get("/frame-access")
    def access() -> dict[str, Any]:
        return {"url": "", "write": None, "read": None}

    @app.get("/room")
    def room() -> dict[str, Any]:
        return {}

    @app.put("/frames/{name}")
    async def put_frame(name: str, request: Request) -> dict[str, Any]:
        frames[name] = await request.body()
        return {}

    @app.post("/groups")
    async def push(request: Request) -> dict[str, Any]:
        pushed = unpack_push(await request.body())
        return {"groups": buffer.push([frames.pop(group.name) for group in pushed]), "room": True}

    return app
