"""Our own HTTP client against servers that answer byte for byte what a test wrote."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from bapo.connection import HttpError, Pool
from tests.patience import wait_until


@contextmanager
def answering(*conversations: Sequence[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A server whose n-th connection gets the n-th conversation: one answer per request, then the end.

    Yields its URL and the requests as they came; every request must end in `!` or in its header.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    requests: list[bytes] = []

    def serve() -> None:
        for answers in conversations:
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    data = b""
                    while not data.endswith((b"!", b"\r\n\r\n")) or _lacks_body(data):
                        data += connection.recv(1 << 16)
                    requests.append(data)
                    connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    thread.join(60)
    listener.close()
    assert not thread.is_alive(), "a request or a connection is missing"


def _lacks_body(data: bytes) -> bool:
    return data.endswith(b"\r\n\r\n") and b"Content-Length: 0" not in data and b"Content-Length" in data


def pool(url: str, most_idle: int = 2) -> Pool:
    return Pool(url, connect_timeout_s=60.0, most_idle=most_idle)


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_pieces_arrive_as_one_body_behind_the_headers() -> None:
    with answering([answer(b"ok")]) as (url, requests):
        pieces = [b"ab", memoryview(b"c"), b"", b"!"]
        reply = pool(url).request("POST", "/groups?x=1", {"Content-Type": "a/b"}, pieces, timeout_s=60)
    assert (reply.status, reply.body) == (200, b"ok")
    host = url.removeprefix("http://")
    head = f"POST /groups?x=1 HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nContent-Type: a/b\r\n\r\n"
    assert requests == [head.encode() + b"abc!"]


def test_one_connection_serves_many_calls() -> None:
    with answering([answer(b"1"), answer(b"2")]) as (url, _):
        calls = pool(url)
        assert [calls.request("GET", "/", {}, (), timeout_s=60).body for _ in range(2)] == [b"1", b"2"]


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    with answering([answer(b"1")], [answer(b"2")]) as (url, _):
        calls = pool(url)
        assert calls.request("GET", "/", {}, (), timeout_s=60).body == b"1"
        wait_until(calls._idle._kept[0].has_news)  # the end that the server has sent is on its way
        assert calls.request("GET", "/", {}, (), timeout_s=60).body == b"2"


def test_what_came_behind_an_answer_is_not_the_next_one() -> None:
    """A proxy may say 408 to a connection that it gives up, just as it passes an answer on."""
    with answering([answer(b"1") + answer(b"too late", status="408 Request Timeout")], [answer(b"2")]) as (url, _):
        calls = pool(url)
        assert calls.request("GET", "/", {}, (), timeout_s=60).body == b"1"
        assert calls.request("GET", "/", {}, (), timeout_s=60).body == b"2"


def test_a_forked_child_does_not_speak_on_its_parents_connection() -> None:
    with answering([answer(b"1"), answer(b"2")], [answer(b"3")]) as (url, _):
        calls = pool(url)
        assert calls.request("GET", "/", {}, (), timeout_s=60).body == b"1"
        child = os.fork()
        if not child:
            try:
                os._exit(calls.request("GET", "/", {}, (), timeout_s=60).body != b"3")
            finally:
                os._exit(2)
        time.sleep(0.2)  # the child's question is there by now
        assert calls.request("GET", "/", {}, (), timeout_s=60).body == b"2"
        assert os.waitpid(child, 0)[1] == 0


def test_connection_close_is_obeyed() -> None:
    with answering([answer(b"1", "Connection: close")], [answer(b"2")]) as (url, _):
        calls = pool(url)
        assert calls.request("GET", "/", {}, (), timeout_s=60).body == b"1"
        assert calls.request("GET", "/", {}, (), timeout_s=60).body == b"2"


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:  2 \r\n\r\nok", b"ok"),
    ],
)
def test_bodies_are_found_in_every_form(data: bytes, body: bytes) -> None:
    with answering([data]) as (url, _):
        assert pool(url).request("GET", "/", {}, (), timeout_s=60).body == body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "cut off: 3 of 5 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "ended before the answer did"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "without a length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk of length"),
        (b"", "ended before the answer did"),
    ],
)
def test_what_is_no_answer_is_an_error(data: bytes, message: str) -> None:
    with answering([data]) as (url, _), pytest.raises(HttpError, match=message):
        pool(url).request("GET", "/", {}, (), timeout_s=60)


def test_a_refusal_in_the_middle_of_a_body_is_heard() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.sendall(answer(b"full", status="429 Too Many Requests"))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass
        connection.close()

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    reply = pool(url).request("POST", "/groups", {}, [bytes(8 << 20)], timeout_s=60)
    assert (reply.status, reply.body) == (429, b"full")
    thread.join(60)
    listener.close()


def test_silence_ends_after_the_timeout() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(TimeoutError):
        pool(url).request("GET", "/", {}, (), timeout_s=0.05)
    listener.close()


def test_nobody_there_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConnectionRefusedError):
        pool(url).request("GET", "/", {}, (), timeout_s=60)


@pytest.mark.parametrize(
    "url", ["localhost:80", "ftp://host", "http://", "unix:///tmp/x", "http://host/?a=b", "http://host/#a"]
)
def test_other_urls_are_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="is not of the form http://host:port"):
        pool(url)


def test_a_path_in_front_of_everything_is_kept() -> None:
    with answering([answer(b"ok")]) as (url, requests):
        pool(f"{url}/buffer/").request("GET", "/status", {}, (), timeout_s=60)
    assert requests[0].startswith(b"GET /buffer/status HTTP/1.1\r\n")


def test_a_url_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="has a user or a password") as refused:
        pool("https://me:secret@host")
    assert "secret" not in str(refused.value)
