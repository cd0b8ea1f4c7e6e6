"""A teacher without a model: an HTTP server that answers as vLLM does, and misbehaves on demand."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def score(token_id: int) -> float:
    """Its log-prob of a token, wherever it stands: -0.25 for 1, -0.5 for 2, ..."""
    return -0.25 * (token_id % 8)


@dataclass
class Teacher:
    """What the server does; may be changed while it runs."""

    faults: Iterator[int | bytes | None] = field(default_factory=lambda: itertools.repeat(None))
    """Taken in turn, one per call of /completions: a status, or the body of an answer; None: as it should be."""
    tokenize: Callable[[str], list[int]] = lambda text: [ord(letter) for letter in text]
    change: Callable[[list[dict[str, Any]]], object] = lambda choices: None
    """Applied to the choices of an answer."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    longest: int | None = 4096
    url: str = ""
    keys: set[str | None] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


def _scored(token_ids: list[int], index: int) -> dict[str, Any]:
    entries = [{str(token): {"logprob": score(token), "rank": 1, "decoded_token": "x"}} for token in token_ids]
    return {"index": index, "text": "y", "prompt_logprobs": [None, *entries[1:]]}


def _answer(state: Teacher, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    if path == "/tokenize":
        return 200, json.dumps({"tokens": state.tokenize(body["prompt"]), "count": 0}).encode()
    with state.lock:
        fault = next(state.faults)
        state.asked.append(body)
    if isinstance(fault, int):
        return fault, json.dumps({"error": {"message": "a fault", "code": fault}}).encode()
    if fault is not None:
        return 200, fault
    assert (body["max_tokens"], body["prompt_logprobs"]) == (1, 0)
    choices = [_scored(token_ids, index) for index, token_ids in enumerate(body["prompt"])]
    state.change(choices)
    return 200, json.dumps({"object": "text_completion", "choices": choices[::-1]}).encode()


@contextmanager
def serving(state: Teacher, port: int = 0) -> Iterator[Teacher]:
    """Serve on a port of this machine until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            state.keys.add(self.headers["Authorization"])
            models = [{"id": "teacher", "object": "model", "max_model_len": state.longest}]
            self._send(200, json.dumps({"object": "list", "data": models}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*_answer(state, self.path, body))

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
