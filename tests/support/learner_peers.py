"""The buffer service and the rollout server as a learner process sees them over HTTP: batches on demand, notes kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from bapo.core.codec import PulledFrame, batch_header, pack_group, pack_pull
from bapo.core.frames import frame_digest
from bapo.core.types import Batch


class Peers:
    """What arrived, in order, and what to answer."""

    def __init__(self, make: Callable[[int], Batch]) -> None:
        self.make = make
        self.withheld: set[int] = set()
        """Steps whose batch does not come."""
        self.calls: list[str] = []
        self.weights: list[dict[str, Any]] = []
        self.asked = threading.Event()
        """A withheld batch was asked for twice, so its learner has been told once what it waits for."""
        self.hold_s = 0.2
        """How long a question for a batch that does not come stays open, from the second one on."""
        self.released = threading.Event()
        self.url = ""
        self._frames: dict[str, bytes] = {}
        """Group id -> frame, of the batches that were answered."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        route, _, query = path.partition("?")
        self.calls.append(f"{method} {route}")
        parts = route.strip("/").split("/")
        if parts[0] == "weights":
            self.weights.append({**json.loads(body), "rollback": "rollback=true" in query})
            return 200, json.dumps({"seconds": {"worker-0": 0.01}}).encode()
        if parts[0] == "snapshot":
            return 200, b"snapshot"
        if parts[0] == "batches" and len(parts) == 2:
            if int(parts[1]) in self.withheld:
                if self.calls.count(self.calls[-1]) > 1:
                    self.asked.set()
                    self.released.wait(self.hold_s)
                return 202, json.dumps({"reason": "3/4 groups, 1 leased"}).encode()
            return 200, self._pull(self.make(int(parts[1])))
        if parts[0] == "frame-access":
            return 200, b'{"url": "", "write": null, "read": null}'
        if parts[0] == "frames":
            return 200, self._frames[unquote(parts[1])]
        return 200, b'{"checkpoint_wanted": false}'

    def _pull(self, batch: Batch) -> bytes:
        frames = {entry.group.group_id: pack_group(entry.group) for entry in batch.entries}
        self._frames |= frames
        return pack_pull(
            batch_header(batch), [PulledFrame(name, len(frame), frame_digest(frame)) for name, frame in frames.items()]
        )


@contextmanager
def serve(peers: Peers) -> Iterator[Peers]:
    """Both services at one address, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            status, answer = peers.answer(self.command, self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # a learner that was ended does not listen
                self.wfile.write(answer)

        do_GET = do_POST = do_PUT = respond

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    peers.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield peers
    finally:
        peers.released.set()
        server.shutdown()
        server.server_close()
