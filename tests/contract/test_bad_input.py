"""Bad input, case by case: each is a 4xx with a reason, counted under one word, and nothing of it is stored."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import urllib3

from bapo.core.codec import pack_group
from bapo.core.errors import ContractError
from bapo.core.frames import KIND_GROUP, PREFIX, frame_start, open_frame
from bapo.core.json_values import MAX_DEPTH, to_map
from bapo.core.types import Group, Progress, Purpose
from bapo.transport.buffer_admin import BufferAdmin
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis.store import RedisStore
from buffer_service.store.run_image import EMPTY
from tests.support.buffer import answer
from tests.support.buffer_app import serving_kind, small_config
from tests.support.factories import make_group, make_request
from tests.support.raw_push import OCTETS, raw_push, row_of

REQUEST = make_request(prompt_id="p")
"""Eight responses, step 1, any weights from version 1 on."""
GOOD = answer(REQUEST)
FRAME = pack_group(GOOD)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[RedisStore, BufferClient]]:
    with serving_kind(request, small_config(), run="bad-input") as both:
        yield both


@pytest.fixture
def client(served: tuple[RedisStore, BufferClient]) -> BufferClient:
    """A client of a buffer that was asked for one group."""
    store, client = served
    store.restore(EMPTY, ())
    client.enqueue([REQUEST])
    return client


def raw(client: BufferClient, method: str, path: str, **options: Any) -> urllib3.BaseHTTPResponse:
    return urllib3.request(method, client.url + path, retries=False, timeout=60.0, **options)


def refusals(client: BufferClient) -> dict[str, float]:
    text = raw(client, "GET", "/metrics").data.decode()
    return {
        reason: float(number)
        for reason, number in re.findall(r'bapo_refused_requests_total{reason="(\w+)"} (\S+)', text)
    }


def with_header(**fields: Any) -> bytes:
    """The good frame with another header, and the lengths that belong to it."""
    header, body = open_frame(FRAME, KIND_GROUP)
    return frame_start(KIND_GROUP, {**header, **fields}, len(body)) + bytes(body)


def with_packed(packed: bytes) -> bytes:
    return PREFIX.pack(b"BAPO", 1, KIND_GROUP, len(packed), 0) + packed


def with_tail(value: float) -> bytes:
    """The last log-prob is another one."""
    return FRAME[:-4] + struct.pack("<f", value)


def with_ids(value: int) -> bytes:
    """The first token id of the prompt is another one."""
    header, body = open_frame(FRAME, KIND_GROUP)
    start = frame_start(KIND_GROUP, header, len(body))
    return start + struct.pack("<i", value) + bytes(body)[4:]


def column(dtype: str, *values: float) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return dict(value)


PROMPT = {"prompt_id": "p", "text": "t", "task": "countdown"}
CASES = {
    "reward above 1": (with_header(rewards=column("<f4", *[0.0] * 7, 1.5)), "rewards"),
    "negative version": (with_header(versions=column("<i4", *[1] * 14, -1, 1)), "versions"),
    "future version": (pack_group(answer(REQUEST, version=2)), "future_version"),
    "one response too few": (pack_group(answer(REQUEST, "1001000")), "not_its_request"),
    "another step": (pack_group(answer(make_request(prompt_id="p", step=2))), "not_its_request"),
    "another prompt": (pack_group(answer(make_request(prompt_id="q", request_id="g-p"))), "not_its_request"),
    "another purpose": (
        pack_group(answer(make_request(prompt_id="p", purpose=Purpose.EVALUATE, label="x"))),
        "not_its_request",
    ),
    "prompt id with a blank": (with_header(prompt={**PROMPT, "prompt_id": "p x", "answer": {}}), "name"),
    "label with a blank": (with_header(label="a b"), "name"),
    "worker id with a brace": (with_header(worker="w{x}"), "name"),
    "group id of 200 letters": (with_header(id="x" * 200), "name"),
    "ragged outcomes": (with_header(outcomes=b"\0" * 9), "shape"),
    "lengths that overflow": (with_header(lengths=column("<i4", *[2**31 - 1] * 8)), "shape"),
    "an answer of 33 levels": (with_header(prompt={**PROMPT, "answer": nested(MAX_DEPTH + 1)}), "header"),
    "an answer with NaN": (with_header(prompt={**PROMPT, "answer": {"x": float("nan")}}), "header"),
    "header of 2000 levels": (with_packed(b"\x91" * 2000), "header"),
    "header with a map of 4e9 entries": (with_packed(b"\xdf\xff\xff\xff\xff"), "header"),
    "header with a text of 4e9 bytes": (with_packed(b"\xdb\xff\xff\xff\xff"), "header"),
    "header with an extension type": (with_packed(msgpack.packb(msgpack.ExtType(1, b"x"))), "header"),
    "header of 2 MiB": (with_packed(b"\xdd\x00\x20\x00\x00" + b"\x80" * (1 << 21)), "header"),
    "cut in its body": (FRAME[:-1], "frame"),
    "length of 4 GB": (PREFIX.pack(b"BAPO", 1, 1, 16, 2**32 - 1) + b"\0" * 16, "header"),
    "header length of 4 GB": (PREFIX.pack(b"BAPO", 1, 1, 2**32 - 1, 0) + b"\0" * 16, "frame"),
    "nothing": (b"", "frame"),
    "another text under the prompt's id": (
        pack_group(replace(GOOD, prompt=msgspec.structs.replace(GOOD.prompt, text="1,2,3->7:"))),
        "not_its_request",
    ),
    "another answer under the prompt's id": (
        pack_group(replace(GOOD, prompt=msgspec.structs.replace(GOOD.prompt, answer={"target": 7}))),
        "not_its_request",
    ),
}
BAD_FRAMES = {
    "log-prob NaN": (with_tail(float("nan")), "logprobs"),
    "log-prob infinite": (with_tail(float("-inf")), "logprobs"),
    "log-prob above 0": (with_tail(0.5), "logprobs"),
    "negative token id": (with_ids(-1), "token_ids"),
}
"""What is right in its head, and stored; whoever reads it finds it out."""


@pytest.mark.parametrize("case", CASES)
def test_a_bad_group_is_refused_counted_and_not_stored(client: BufferClient, case: str) -> None:
    frame, reason = CASES[case]
    before, counters = refusals(client).get(reason, 0.0), raw(client, "GET", "/counters").json()
    good = make_request(prompt_id="good")
    client.enqueue([good])
    for sent in ([frame], [pack_group(answer(good)), frame]):  # alone, and behind a good one
        reply = raw_push(client.url, sent)
        assert (reply.status, reply.json()["retry"]) == (422, False)
        assert reply.json()["error"] == ("FrameError" if case == "cut in its body" else "ContractError")
        assert len(reply.data) < 1200
    assert refusals(client)[reason] == before + 2
    now = client.status()
    assert (now.fresh_ready, now.num_bytes, now.queued["fresh"]) == (0, 0, 2)
    found = raw(client, "GET", "/counters").json()
    assert found == counters | ({"bad_frames:w": 2} if case == "cut in its body" else {})
    assert client.push([FRAME]) == {"g-p": "stored"}  # and the service is as it was


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_a_bad_frame_reaches_no_batch_is_named_with_its_worker_and_stalls_nothing(
    client: BufferClient, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    frame, problem = BAD_FRAMES[case]
    good = [make_request(prompt_id=name) for name in "abc"]
    client.enqueue(good)
    assert raw_push(client.url, [frame, *(pack_group(answer(request)) for request in good)]).status == 200
    batch = client.batch(1, timeout_s=60)
    assert [entry.group.group_id for entry in batch.entries] == ["g-a", "g-b", "g-c"]
    (result,) = (result for result in batch.results if result.group_id == "g-p")
    assert (result.origin, result.reason, result.worker_id) == (None, "bad_frame", "w")
    again = client.batch(1, timeout_s=60)
    assert [pack_group(entry.group) for entry in again.entries] == [pack_group(e.group) for e in batch.entries]
    assert raw(client, "GET", "/counters").json()["bad_frames:w"] == 1
    assert f"group g-p of worker w has a corrupt frame ({problem})" in caplog.text
    client.restore(client.snapshot())  # which holds the frame as it is
    assert len(client.batch(1, timeout_s=60).entries) == 3


def test_one_frame_under_two_groups_is_refused(client: BufferClient) -> None:
    rows = [row_of(FRAME, "f" * 32), row_of(pack_group(answer(make_request(prompt_id="q"))), "f" * 32)]
    reply = raw(client, "POST", "/groups", body=msgpack.packb(rows), headers=OCTETS)
    assert (reply.status, reply.json()["message"]) == (422, "two groups of this push reference the same frame")


def test_two_contents_under_one_id_are_refused_together(client: BufferClient) -> None:
    reply = raw_push(client.url, [FRAME, pack_group(answer(REQUEST, "11111111"))])
    assert (reply.status, "with different content" in reply.json()["message"]) == (422, True)
    assert client.status().fresh_ready == 0


def test_the_newest_published_version_is_taken_before_it_is_reported(client: BufferClient) -> None:
    client.enqueue([make_request(prompt_id=name) for name in "abcd"])
    groups = [answer(make_request(prompt_id=name)) for name in "abcd"]
    client.push([pack_group(group) for group in groups])
    client.batch(1, timeout_s=60)
    later = make_request(prompt_id="e", step=2)
    client.enqueue([later])
    # theta_2 is published behind batch 1, and some worker has it before the learner says so
    assert client.push([pack_group(answer(later, version=2))]) == {"g-e": "stored"}
    client.report_progress(Progress(step=7, policy_version=7))  # a learner that counts its versions otherwise
    client.enqueue([make_request(prompt_id="f", step=7)])
    with pytest.raises(ContractError, match="policy version 8, but the learner has published 7 at most"):
        client.push([pack_group(answer(make_request(prompt_id="f", step=7), version=8))])
    assert client.push([pack_group(answer(make_request(prompt_id="f", step=7), version=7))]) == {"g-f": "stored"}


def test_the_same_group_twice_is_no_contradiction(client: BufferClient) -> None:
    assert client.push([FRAME, FRAME]) == {"g-p": "duplicate"}
    assert client.status().fresh_ready == 1
    assert client.push([FRAME]) == {"g-p": "duplicate"}


def test_another_workers_answer_is_a_duplicate_and_the_first_one_stays(client: BufferClient) -> None:
    client.push([FRAME])
    assert client.push([pack_group(answer(REQUEST, "11111111", worker_id="other"))]) == {"g-p": "duplicate"}
    assert raw(client, "GET", "/frames/g-p").data == FRAME


@pytest.mark.parametrize(
    "other",
    [answer(REQUEST, "11111111"), replace(GOOD, token_ids=GOOD.token_ids + 1)],
    ids=["other rewards", "other tokens of the same lengths"],
)
def test_one_lease_has_one_answer(client: BufferClient, other: Group) -> None:
    good = make_request(prompt_id="good")
    client.enqueue([good])
    client.push([FRAME])
    counters = raw(client, "GET", "/counters").json()
    for frames in ([pack_group(other)], [pack_group(answer(good)), pack_group(other)]):
        with pytest.raises(ContractError, match="g-p is already stored with different content, from the same lease"):
            client.push(frames)
    assert raw(client, "GET", "/frames/g-p").data == FRAME
    assert refusals(client)["other_content"] >= 2
    assert client.status().fresh_ready == 1  # the good one of the second push is not stored either
    assert raw(client, "GET", "/counters").json() == counters
    assert client.push([pack_group(answer(good)), FRAME]) == {"g-good": "stored", "g-p": "duplicate"}


def test_a_group_that_is_held_no_more_is_not_compared(client: BufferClient) -> None:
    """What is known of it is that it was there: its late second answer is dropped, whatever it is."""
    client.push([FRAME])
    raw(client, "DELETE", "/groups/g-p")
    assert client.push([pack_group(answer(REQUEST, "11111111"))]) == {"g-p": "duplicate"}


def test_a_push_of_too_many_groups_is_refused(client: BufferClient) -> None:
    requests = [make_request(prompt_id=f"p{i}") for i in range(1025)]
    client.enqueue(requests)
    frames, before = [pack_group(answer(request)) for request in requests], refusals(client).get("too_many", 0.0)
    reply = raw_push(client.url, frames)
    assert (reply.status, reply.json()["message"]) == (
        422,
        "1025 groups in one push, must be 1 to 1024: split them into several pushes",
    )
    assert (refusals(client)["too_many"], client.status().fresh_ready) == (before + 1, 0)
    assert set(client.push(frames).values()) == {"stored"}  # the client sends them in two parts
    assert client.status().fresh_ready == 1025


@pytest.mark.parametrize(
    ("path", "key", "most", "item"),
    [
        ("/requests", "requests", 4096, {}),
        ("/reevaluations/4", "requests", 4096, {}),
        ("/requests/renew", "request_ids", 4096, "a"),
    ],
)
def test_a_list_that_is_too_long_is_refused_and_says_by_how_much(
    client: BufferClient, path: str, key: str, most: int, item: Any
) -> None:
    reply = raw(client, "POST", path, json={key: [item] * (most + 1), "worker_id": "w"})
    assert reply.status == 422
    assert f"body.{key}: {most + 1} in one call, the maximum is {most}" in reply.json()["message"]


def request_json(**changes: Any) -> dict[str, Any]:
    fields = to_map(make_request(prompt_id="new"))
    return {**fields, **changes}


def prompt_json(**changes: Any) -> dict[str, Any]:
    return request_json(prompt={"prompt_id": "new", "text": "t", "task": "x", "answer": {}, **changes})


JSON_CASES = {
    "answer NaN": prompt_json(answer={"x": float("nan")}),
    "answer infinite": prompt_json(answer={"x": [1.0, float("inf")]}),
    "answer of 33 levels": prompt_json(answer=nested(MAX_DEPTH + 1)),
    "answer of 10^5 levels": '{"requests": ' + "[" * 100_000,
    "answer beyond 64 bits": prompt_json(answer={"x": 2**64}),
    "answer of 5000 digits": json.dumps(prompt_json(answer={"x": 7})).replace("7", "7" * 5000),
    "half a character in an answer": prompt_json(answer={"x": "\ud800"}),
    "half a character in a text": prompt_json(text="\ud800"),
    "negative step": request_json(step=-1),
    "step beyond 21 bits": request_json(step=1 << 21),
    "negative min_version": request_json(min_version=-1),
    "group of none": request_json(group_size=0),
    "group of one": request_json(group_size=1),
    "a number as text": request_json(group_size="8"),
    "true for a number": request_json(step=True),
    "a number with a fraction": request_json(group_size=8.0),
    "group of a million": request_json(group_size=10**6),
    "id with a line break": request_json(request_id="a\nb"),
    "prompt id of 200 letters": prompt_json(prompt_id="x" * 200),
    "unknown purpose": request_json(purpose="train"),
    "not JSON": "{",
    "not UTF-8": b'{"requests": ["\xff"]}',
    "a list": "[]",
    "nothing": "",
}


@pytest.mark.parametrize("case", JSON_CASES)
def test_a_bad_request_is_refused_counted_and_not_stored(client: BufferClient, case: str) -> None:
    found = JSON_CASES[case]
    before = sum(refusals(client).values())
    body = json.dumps({"requests": [found]}) if isinstance(found, dict) else found
    reply = raw(client, "POST", "/requests", body=body, headers={"Content-Type": "application/json"})
    assert (reply.status in (400, 422), reply.json()["error"]) == (True, "ContractError"), reply.data
    assert sum(refusals(client).values()) == before + 1
    assert client.status().queued["fresh"] == 1


def test_numbers_that_redis_cannot_hold_are_refused(client: BufferClient) -> None:
    """Found by the fuzzer: each was a 500, or a number that had lost its last digits."""
    for path in ("/batches", "/groups"):
        assert raw(client, "GET", f"{path}?offset={10**23}").status == 422
    assert raw(client, "POST", "/requests", json={"requests": [], "cursor": 1 << 53}).status == 422
    assert raw(client, "POST", "/requests", json={"requests": [request_json(attempts=1 << 31)]}).status == 422


def test_details_of_a_failure_need_not_be_pretty_but_must_be_text(client: BufferClient) -> None:
    body = {"worker_id": "w", "request_id": "g-p", "reason": "x"}
    for detail, status in (("\ud800", 422), ("\0\u202e" * 1000, 200)):
        sent = json.dumps({**body, "detail": detail})
        headers = {"Content-Type": "application/json"}
        assert raw(client, "POST", "/requests/fail", body=sent, headers=headers).status == status


def test_token_ids_that_do_not_fit_are_refused_where_they_are_packed() -> None:
    wide = make_group(rewards="10", lengths=[2, 3])
    object.__setattr__(wide, "token_ids", wide.token_ids.astype(np.int64) + 2**31)
    with pytest.raises(ContractError, match="do not fit into int32"):
        pack_group(wide)


def test_a_prompt_that_no_group_could_repeat_is_refused_when_it_is_asked_for(client: BufferClient) -> None:
    """A group's header, which holds the prompt, has room for 1 MiB: whoever claimed it could never push."""
    long = msgspec.structs.replace(
        REQUEST, request_id="long", prompt=msgspec.structs.replace(REQUEST.prompt, text="x" * 1_000_000)
    )
    with pytest.raises(ContractError, match=r"prompt 'p' has 1000\d+ bytes with .* more than 917504"):
        client.enqueue([make_request(request_id="beside-it"), long])
    text = "\u6570" * 300_000  # three bytes each
    other = make_request(prompt_id="other").prompt
    fits = msgspec.structs.replace(
        REQUEST, request_id="fits", group_size=4096, prompt=msgspec.structs.replace(other, text=text)
    )
    assert client.enqueue([fits]) == 1
    assert client.claim("w", limit=9, policy_version=1)[-1] == fits
    assert client.push([pack_group(answer(fits, "1" * 4096))]) == {"fits": "stored"}


def test_an_evaluation_without_a_label_is_refused(client: BufferClient) -> None:
    """Nobody could collect or forget it."""
    nameless = make_request(request_id="nameless", purpose=Purpose.EVALUATE)
    with pytest.raises(ContractError, match="request nameless: an evaluation needs a label"):
        client.enqueue([nameless])
    assert client.status().evaluations == {}


@pytest.mark.parametrize("name", ["cd@1?x=1", "cd@1#x", "cd@1/x", "cd@1 HTTP/1.1\r\nX: y", "\u6570", ""])
def test_a_name_never_ends_the_path_that_it_is_in(client: BufferClient, name: str) -> None:
    asked = make_request(request_id="e", purpose=Purpose.EVALUATE, label="cd@1")
    client.enqueue([asked])
    client.claim("w", limit=9, policy_version=1)
    client.push([pack_group(answer(asked))])
    admin = BufferAdmin(client.url)
    wrongly: list[Callable[[str], object]] = [client.forget, client.collect]
    for call in [*wrongly, admin.drop_group, admin.drop_request, admin.drop_run]:
        with pytest.raises(ContractError):
            call(name)
    assert [group.group_id for group in client.collect("cd@1")] == ["e"]
