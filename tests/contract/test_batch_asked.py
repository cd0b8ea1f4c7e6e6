"""A batch is asked for in the words of our own client, which one regular expression reads, or in others, which FastAPI
reads: the answers are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import urllib3

from bapo.clients import BufferClient
from bapo.wire import pack_group
from tests.buffer_app import serving, small_config
from tests.buffer_setup import answer, new_store
from tests.factories import make_request
from tests.redis_server import RedisServer

AS_THE_CLIENT = ("?wait_s=0.000", "?wait_s=59.999", "?wait_s=0.000&frames=named")
IN_OTHER_WORDS = ("", "?wait_s=0", "?wait_s=6e1", "?frames=inline&wait_s=0.000", "?frames=named")


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[BufferClient]:
    """A service whose batch 1 is complete, and whose batch 2 lacks everything."""
    with serving(new_store("redis", redis_server.url, run="asked"), small_config()) as client:
        requests = [make_request(prompt_id=name) for name in "abcd"]
        client.enqueue(requests)
        client.push([pack_group(answer(request, "11000000")) for request in requests])
        yield client


def ask(service: BufferClient, rest: str) -> urllib3.BaseHTTPResponse:
    return urllib3.request("POST", f"{service.url}/batches/{rest}", retries=False)


@pytest.mark.parametrize("query", AS_THE_CLIENT + IN_OTHER_WORDS)
def test_a_batch_that_is_there_is_the_same_in_all_words(service: BufferClient, query: str) -> None:
    reply = ask(service, f"1{query}")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/octet-stream")
    assert reply.data == ask(service, "1").data
    assert reply.data[:4] == b"BAPO"


@pytest.mark.parametrize("query", ["?wait_s=0.000", "?wait_s=0.001&frames=named", "", "?wait_s=0"])
def test_a_batch_that_is_not_there_is_waited_for_in_all_words(service: BufferClient, query: str) -> None:
    ask(service, "1")
    reply = ask(service, f"2{query}")
    assert reply.status == 202
    assert json.loads(reply.data)["reason"].startswith("0/4 fresh groups")


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("1?wait_s=60.001", "query.wait_s"),
        ("1?wait_s=-1.000", "query.wait_s"),
        ("1?wait_s=nan", "query.wait_s"),
        ("1?wait_s=0.000&frames=all", "query.frames"),
        ("2097152?wait_s=0.000", "path.step"),
        ("x?wait_s=0.000", "path.step"),
        ("3?wait_s=0.000", "the next step is 2"),
        ("999999?wait_s=0.000", "the next step is 2"),
    ],
)
def test_what_no_words_may_ask_for_is_refused_by_name(service: BufferClient, rest: str, why: str) -> None:
    ask(service, "1")
    reply = ask(service, rest)
    assert reply.status == 422
    assert why in json.loads(reply.data)["message"]
