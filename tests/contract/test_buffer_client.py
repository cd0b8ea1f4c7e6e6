"""The client's half of the contract: the named error again, retries while they may help, deadlines with reasons."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from bapo.core.codec import pack_group, request_from_map
from bapo.core.errors import (
    AccessError,
    BapoError,
    ConfigError,
    ContractError,
    DeadlineError,
    FrameError,
    StorageError,
    UnavailableError,
)
from bapo.core.json_values import from_map, to_map
from bapo.core.types import Progress, Purpose
from bapo.transport.buffer_client import BufferClient, BufferStatus
from tests.support.buffer import STATUS
from tests.support.factories import make_group, make_prompt, make_request

Reply = tuple[int, dict[str, object]] | tuple[int, str, dict[str, str]]
"""Status and JSON, or status, text and headers."""


class Scripted:
    """An HTTP server that gives one reply after the other, the last one again and again."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies = list(replies)
        self.calls: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.calls.append(f"{self.command} {self.path}")
                status, said, *headers = outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *args: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    server = Scripted(request.param)
    yield server
    server.server.shutdown()
    server.server.server_close()


def error(name: str, message: str, *, retry: bool = False) -> dict[str, object]:
    return {"error": name, "message": message, "retry": retry}


AWAY = (503, error("UnavailableError", "Redis does not answer", retry=True))
GIVEN_UP = (503, error("UnavailableError", "20 groups in a row failed", retry=False))
DONE = (200, {"accepted": 1})


@pytest.mark.parametrize("scripted", [[AWAY, AWAY, DONE]], indirect=True)
def test_a_call_is_repeated_while_the_service_is_away(scripted: Scripted) -> None:
    assert BufferClient(scripted.url).enqueue([make_request()]) == 1
    assert scripted.calls == ["POST /requests"] * 3


@pytest.mark.parametrize("scripted", [[AWAY]], indirect=True)
def test_retries_end_with_the_services_own_message(scripted: Scripted) -> None:
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="Redis does not answer"):
        BufferClient(scripted.url, retry_s=0.4).status()
    assert time.monotonic() - started < 30
    assert len(scripted.calls) > 1


@pytest.mark.parametrize(
    ("scripted", "expected"),
    [
        ([(422, error("ContractError", "no"))], ContractError),
        ([(507, error("StorageError", "no"))], StorageError),
        ([(500, error("NobodyKnowsError", "no"))], BapoError),
        ([(400, {"detail": "not ours"})], BapoError),
        ([GIVEN_UP], UnavailableError),
    ],
    indirect=["scripted"],
)
def test_other_errors_come_back_at_once_as_their_class(scripted: Scripted, expected: type[BapoError]) -> None:
    with pytest.raises(expected):
        BufferClient(scripted.url).status()
    assert len(scripted.calls) == 1


def test_a_service_that_is_not_there_is_named(unused_url: str) -> None:
    with pytest.raises(UnavailableError, match=unused_url):
        BufferClient(unused_url, retry_s=0.0).status()


@pytest.fixture
def unused_url() -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.server_close()
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize("scripted", [[(202, {"reason": "3/4 fresh groups, worker-2 silent for 38 s"})]], indirect=True)
def test_a_batch_that_does_not_come_carries_the_reason(scripted: Scripted) -> None:
    heard: list[str] = []
    with pytest.raises(
        DeadlineError, match="batch 7 is not ready, no progress for 0 s: 3/4 fresh groups, worker-2 silent"
    ):
        BufferClient(scripted.url).batch(7, timeout_s=0.2, on_wait=heard.append)
    assert set(heard) == {"3/4 fresh groups, worker-2 silent for 38 s"}
    assert scripted.calls[0].startswith("POST /batches/7?wait_s=0.")


def not_yet(fresh: int, silent_s: int) -> Reply:
    return 202, {"reason": f"{fresh}/4 fresh groups, worker-2 silent for {silent_s} s", "counts": [6, fresh, 0, 0, 0]}


SLOW = [not_yet(0, 0), not_yet(1, 400), not_yet(2, 800), not_yet(2, 1200), not_yet(2, 1600)]


@pytest.mark.parametrize("scripted", [SLOW], indirect=True)
def test_a_batch_may_take_any_time_while_groups_arrive_and_batch_timeout_s_without_one(scripted: Scripted) -> None:
    clock, heard = [0.0], []

    def on_wait(reason: str) -> None:
        heard.append(reason)
        clock[0] += 400.0

    # Groups arrived with the answers at 400 s and 800 s. Nothing changes at 1,200 s; at 1,400 s the 600 s are over,
    # which is seen at 1,600 s, before a fifth call. That a worker is silent for longer and longer is no progress.
    client = BufferClient(scripted.url, now=lambda: clock[0])
    with pytest.raises(DeadlineError, match="2/4 fresh groups"):
        client.batch(7, timeout_s=600.0, on_wait=on_wait)
    assert (clock[0], len(heard)) == (1600.0, 4)


PUSHED: Reply = (200, {"groups": {}, "room": True, "write": None, "read": None})


@pytest.mark.parametrize("scripted", [[PUSHED]], indirect=True)
def test_pushes_are_cut_into_parts_that_the_service_takes(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.transport.buffer_client.MAX_GROUPS", 2)
    client = BufferClient(scripted.url)
    client.push([pack_group(make_group(group_id=f"g{i}")) for i in range(5)])
    assert scripted.calls.count("POST /groups") == 3
    assert sum(call.startswith("PUT /frames/") for call in scripted.calls) == 5
    assert client.push([]) == {}
    for wrong in ([b""], [make_group()], pack_group(make_group())):
        with pytest.raises(ContractError):
            client.push(wrong)


MISSING: Reply = (422, {"error": "FrameError", "message": "the frame has 0 bytes", "retry": False})


@pytest.mark.parametrize("scripted", [[PUSHED, PUSHED, PUSHED, MISSING, PUSHED]], indirect=True)
def test_a_frame_that_is_gone_is_written_again_once(scripted: Scripted) -> None:
    client = BufferClient(scripted.url)
    client.push([pack_group(make_group())])
    kinds = [call.rpartition("/")[0] if "frames" in call else call.partition("?")[0] for call in scripted.calls]
    assert kinds == ["GET /room", "GET /frame-access", "PUT /frames", "POST /groups", "PUT /frames", "POST /groups"]
    scripted.replies = [PUSHED, MISSING, PUSHED, MISSING]
    with pytest.raises(FrameError):
        client.push([pack_group(make_group())])


@pytest.mark.parametrize("scripted", [[(200, {"accepted": 2, "request_ids": ["a"]})]], indirect=True)
def test_long_lists_travel_in_calls_that_the_service_takes(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.transport.buffer_client.MAX_REQUESTS", 2)
    monkeypatch.setattr("bapo.transport.buffer_client.MAX_RENEWALS", 3)
    client, requests = BufferClient(scripted.url), [make_request(prompt_id=name) for name in "abcde"]
    assert client.enqueue(requests) == 6  # three calls, and two are new in each
    assert client.enqueue(requests, cursor=5) == 2  # a cursor is raised once, for all of them
    assert client.renew("w", ["a"] * 4) == ["a", "a"]
    assert (client.enqueue([]), client.renew("w", [])) == (2, ["a"])  # one call each: the service may have a word on it
    expected = ["POST /requests"] * 4 + ["POST /requests/renew"] * 2 + ["POST /requests", "POST /requests/renew"]
    assert scripted.calls == expected
    # A request has about 300 bytes, a long one more than 2,000.
    monkeypatch.setattr("bapo.transport.buffer_client.MAX_REQUEST_BYTES", 650)
    long = msgspec.structs.replace(make_prompt(prompt_id="f"), answer={"tests": "x" * 2000})
    client.enqueue([*requests, msgspec.structs.replace(requests[0], prompt=long), *requests[:2]])
    assert scripted.calls[8:] == ["POST /requests"] * 5  # ab, cd, e, f alone, ab


def test_requests_and_status_survive_their_way_through_json() -> None:
    request = make_request(purpose=Purpose.EVALUATE, step=3, min_version=2, label="held_out@2", attempts=1)
    assert request_from_map(json.loads(json.dumps(to_map(request)))) == request
    assert from_map(json.loads(json.dumps(to_map(STATUS))), BufferStatus, "status") == STATUS
    assert from_map({**to_map(STATUS), "added_later": 1}, BufferStatus, "status") == STATUS


def test_a_malformed_status_is_a_contract_error() -> None:
    values = to_map(replace(STATUS, workers={}))
    for key in ("workers", "step"):
        with pytest.raises(ContractError):
            from_map({name: value for name, value in values.items() if name != key}, BufferStatus, "status")


MOVED: Reply = (301, "<html>", {"Location": "https://elsewhere/x", "Content-Type": "text/html"})
SIGN_IN: Reply = (200, "<html>Sign in", {"Content-Type": "text/html; charset=utf-8"})
BUSY_PROXY: Reply = (429, "<html>slow down", {"Content-Type": "text/html"})
CALLS: dict[str, Callable[[BufferClient], object]] = {
    "report_progress": lambda client: client.report_progress(Progress(step=1, policy_version=1)),
    "restore": lambda client: client.restore(b"snapshot"),
    "resume": lambda client: client.resume(1),
    "fail": lambda client: client.fail("w", "r", reason="engine"),
    "snapshot": lambda client: client.snapshot(),
}
"""Whose answers nobody looks into: their status said that all is well."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("scripted", [[MOVED]], indirect=True)
def test_a_redirect_is_no_success(scripted: Scripted, call: str) -> None:
    with pytest.raises(ConfigError, match="https://elsewhere/x"):
        CALLS[call](BufferClient(scripted.url))
    assert len(scripted.calls) == 1


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("scripted", [[SIGN_IN]], indirect=True)
def test_a_page_for_people_is_no_success(scripted: Scripted, call: str) -> None:
    with pytest.raises(UnavailableError):
        CALLS[call](BufferClient(scripted.url, retry_s=0.0))


@pytest.mark.parametrize("scripted", [[SIGN_IN, BUSY_PROXY, (302, "", {"Location": "/away"}), DONE]], indirect=True)
def test_what_a_proxy_says_for_a_while_is_waited_for(scripted: Scripted) -> None:
    assert BufferClient(scripted.url).enqueue([make_request()]) == 1
    assert scripted.calls == ["POST /requests"] * 4


@pytest.mark.parametrize("token", ["short", "t\u20acken" * 4, "two words are no token"])
def test_what_can_be_no_token_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(AccessError) as refused:
        BufferClient("http://127.0.0.1:1", token=token)
    assert token not in str(refused.value)
