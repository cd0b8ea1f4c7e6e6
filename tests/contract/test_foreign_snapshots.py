"""Snapshots whose checksum is right and whose content no run has left: refused, and the run is as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import urllib3

from bapo.core.codec import pack_group
from bapo.transport.buffer_client import BufferClient
from buffer_service.snapshot import DIGEST_BYTES, MAGIC, START, VERSION
from buffer_service.store.redis.store import RedisStore
from buffer_service.store.run_image import EMPTY
from tests.support.buffer import answer
from tests.support.buffer_app import serving_kind, small_config
from tests.support.factories import make_request

Index = dict[str, Any]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[RedisStore, BufferClient]]:
    with serving_kind(request, small_config(), run="foreign-snapshots") as both:
        yield both


@pytest.fixture
def client(served: tuple[RedisStore, BufferClient]) -> BufferClient:
    """A client of a buffer with batch 1, one fresh group besides, and one open request."""
    store, client = served
    store.restore(EMPTY, ())
    requests = [make_request(prompt_id=name) for name in "abcdef"]
    client.enqueue(requests)
    client.push([pack_group(answer(request)) for request in requests[:5]])
    client.batch(1, timeout_s=60)
    return client


def changed(snapshot: bytes, change: Callable[[Index], None], *, frames: bytes | None = None) -> bytes:
    """The snapshot with another index or other frames, under a checksum that is right."""
    _, _, size = START.unpack_from(snapshot)
    end = START.size + size
    index = msgpack.unpackb(snapshot[START.size : end], strict_map_key=False)
    change(index)
    packed = msgpack.packb(index)
    content = START.pack(MAGIC, VERSION, len(packed)) + packed
    content += snapshot[end:-DIGEST_BYTES] if frames is None else frames
    return content + hashlib.sha256(content).digest()


def image(**fields: Any) -> Callable[[Index], None]:
    """Some fields of the image are other values."""
    return lambda index: index["image"].update(fields)


def tables(**fields: Any) -> Callable[[Index], None]:
    return lambda index: index["image"]["tables"].update(fields)


def record(place: int, value: Any) -> Callable[[Index], None]:
    """One field of the first record is another value."""
    return lambda index: index["image"]["records"]["g-a"].__setitem__(place, value)


def hard(**fields: Any) -> Callable[[Index], None]:
    return tables(bad=[{"prompt_id": "nobody", "birth": 1, "mu": 0.0, "attempts": 0} | fields])


CASES: dict[str, Callable[[Index], None]] = {
    "no record of a group of the batch": image(records={}),
    "a record that is a number": image(records={"g-a": 7}),
    "a record of one field": image(records={"g-a": ["g-a"]}),
    "a group of the wrong size": record(9, 1),
    "a group of a negative size": record(9, -1),
    "a reward NaN": record(7, [float("nan")]),
    "a step of 2^63": tables(step=2**63),
    "a negative step": tables(step=-1),
    "a step that is true": tables(step=True),
    "a threshold NaN": tables(r_tot=float("nan")),
    "a hard prompt without its text": hard(),
    "a hard prompt that is short": tables(bad=[{"prompt_id": "a"}]),
    "a hard prompt born in step 2^21": hard(birth=1 << 21),
    "a hard prompt of mean reward NaN": hard(mu=float("nan")),
    "a batch of other bytes": lambda index: index["image"]["batches"][0].update(num_bytes=1),
    "an image that is a list": lambda index: index.update(image=[]),
    "a progress that is no number": lambda index: index["image"]["progress"].update(step="1"),
    "a progress of step 2^21": lambda index: index["image"]["progress"].update(step=1 << 21),
    "a negative cursor": image(cursor=-1),
    "a counter that is a text": image(counters={"pushed": "many"}),
    "a composition with NaN": lambda index: index["image"]["compositions"][0].update(r_tot=float("nan")),
    "a composition without its counts": lambda index: index["image"]["compositions"][0].update(x1="x"),
    "a request id with a brace": lambda index: index["image"]["open_requests"][0].update(request_id="a{b}"),
    "a request for a list": lambda index: index["image"]["open_requests"][0].update(group_size=[]),
    "a request for no response": lambda index: index["image"]["open_requests"][0].update(group_size=0),
    "a request whose answer is bytes": lambda index: index["image"]["open_requests"][0]["prompt"].update(
        answer={"a": b""}
    ),
    "success counts that are a text": image(success_counts={1: "x"}),
    "a selector of another kind": image(selector={"data": 1}),
    "frames of numbers": lambda index: index.update(frames=list(range(len(index["frames"])))),
    "a group whose frame is there twice": lambda index: index["frames"].append(index["frames"][0]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_snapshot_that_no_run_has_left_changes_nothing(client: BufferClient, case: str) -> None:
    before = bytes(client.snapshot())
    reply = urllib3.request("POST", client.url + "/restore", body=changed(before, CASES[case]), retries=False)
    assert (reply.status, reply.json()["error"]) == (422, "ContractError"), reply.data
    assert len(reply.data) < 1200
    assert bytes(client.snapshot()) == before
    assert client.status().queued["fresh"] == 1


def test_what_a_run_has_left_is_taken(client: BufferClient) -> None:
    before = bytes(client.snapshot())
    sent = changed(before, lambda index: None)
    assert urllib3.request("POST", client.url + "/restore", body=sent, retries=False).status == 204
    assert bytes(client.snapshot()) == before


def test_frames_that_are_none_are_no_snapshot(client: BufferClient) -> None:
    before = bytes(client.snapshot())
    frame = pack_group(answer(make_request(prompt_id="a")))
    noise = b"".join(b"BAPO\1\1" + bytes(8) for _ in range(4))
    for frames in (noise, 4 * frame):
        sent = changed(before, lambda index: None, frames=frames)
        assert urllib3.request("POST", client.url + "/restore", body=sent, retries=False).status == 422
    assert bytes(client.snapshot()) == before
