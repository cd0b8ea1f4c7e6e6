"""The buffer's API through its client: real sockets, real frames, the same errors on both sides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
import urllib3

from bapo.core.codec import pack_group
from bapo.core.errors import ContractError, DeadlineError, UnavailableError
from bapo.core.json_values import to_map
from bapo.core.types import Origin, Progress, Purpose
from bapo.transport.buffer_admin import BufferAdmin
from bapo.transport.buffer_client import POLL_S, BufferClient
from buffer_service.http.long_poll import POLL_S as SERVICE_POLL_S
from buffer_service.store.redis.store import RedisStore
from buffer_service.store.run_image import EMPTY
from tests.support.buffer import answer
from tests.support.buffer_app import serving, serving_kind, small_config
from tests.support.factories import make_request
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[RedisStore, BufferClient]]:
    """One service for all tests of a store, because starting one takes longer than most of them."""
    config = small_config(
        buffer={"max_failures_in_a_row": 2}, cadence={"weight_sync_interval": 2, "reevaluation_interval": 2}
    )
    with serving_kind(request, config, run="api", max_attempts=9) as both:
        yield both


@pytest.fixture
def client(served: tuple[RedisStore, BufferClient]) -> BufferClient:
    """A client of a service with nothing in it."""
    store, client = served
    store.restore(EMPTY, ())
    return client


def raw(client: BufferClient, method: str, path: str, **options: object) -> urllib3.BaseHTTPResponse:
    return urllib3.request(method, client.url + path, retries=False, **options)  # type: ignore[arg-type]


def fill(client: BufferClient, *names: str, rewards: str = "11000000", step: int = 1) -> None:
    requests = [make_request(prompt_id=name, step=step) for name in names]
    client.enqueue(requests)
    client.push([pack_group(answer(request, rewards)) for request in requests])


def test_an_id_that_stands_for_two_prompts_is_refused_and_a_repeat_is_not(client: BufferClient) -> None:
    first, again = make_request(prompt_id="two", request_id="r1"), make_request(prompt_id="two", request_id="r2")
    other = msgspec.structs.replace(again, prompt=msgspec.structs.replace(again.prompt, text="another text"))
    with pytest.raises(ContractError, match="two"):
        client.enqueue([first, other])
    assert client.enqueue([first]) == 1, "nothing of a refused call was kept"
    with pytest.raises(ContractError, match="two"):
        client.enqueue([other])
    assert (client.enqueue([first]), client.enqueue([again])) == (0, 1)
    with pytest.raises(ContractError, match="r1"):
        client.enqueue([make_request(prompt_id="three", request_id="r1")])


def test_a_group_goes_from_request_to_batch_unchanged(client: BufferClient) -> None:
    requests = [make_request(prompt_id=name) for name in "abcd"]
    assert client.enqueue(requests, cursor=4) == 4
    assert client.enqueue(requests, cursor=4) == 0
    assert client.claim("w", limit=9, policy_version=1) == requests
    groups = [answer(request, rewards) for request, rewards in zip(requests, ("1" + 7 * "0", "11111111", "11000000",
                                                                            "00000000"), strict=True)]  # fmt: skip
    assert client.push([pack_group(group) for group in groups]) == {f"g-{name}": "stored" for name in "abcd"}
    batch = client.batch(1, timeout_s=60)
    assert [(entry.origin, entry.group.group_id) for entry in batch.entries] == [
        (Origin.X1, "g-a"),
        (Origin.X1, "g-c"),
    ]
    assert pack_group(batch.entries[1].group) == pack_group(groups[2])
    assert batch.r_tot == pytest.approx((1 / 8 + 1 + 2 / 8) / 4)
    assert {result.group_id: result.reason for result in batch.results} == {
        "g-a": "informative",
        "g-b": "all_correct",
        "g-c": "informative",
        "g-d": "all_incorrect",
    }
    assert (batch.facts["num_bad"], client.status().fresh_ready) == (2, 0)


def test_groups_that_a_batch_does_not_train_can_be_read_until_a_checkpoint_releases_it(client: BufferClient) -> None:
    requests = [make_request(prompt_id=name) for name in "abcd"]
    client.enqueue(requests)
    rewards = ("11000000", "11111111", "11000000", "00000000")
    groups = [answer(request, word) for request, word in zip(requests, rewards, strict=True)]
    client.push([pack_group(group) for group in groups])
    with pytest.raises(ContractError):
        client.untrained(1)
    client.batch(1, timeout_s=60)
    places = {item["group_id"]: item["places"] for item in BufferAdmin(client.url).held().items}
    assert places["g-b"] == places["g-d"] == ["not trained in 1"]
    assert [pack_group(group) for group in client.untrained(1)] == [pack_group(groups[1]), pack_group(groups[3])]
    assert raw(client, "GET", "/verify").json()["violations"] == []
    client.commit(1, checkpointed=1)
    with pytest.raises(ContractError, match="batch 1 was released at checkpoint 1; the next step is 2: resume there"):
        client.untrained(1)


def test_a_batch_that_misses_groups_says_why(client: BufferClient) -> None:
    fill(client, "a")
    client.enqueue([make_request(prompt_id="b")])
    client.claim("worker-2", limit=1, policy_version=1)
    heard: list[str] = []
    with pytest.raises(
        DeadlineError, match=r"batch 1 is not ready, no progress for 0 s: 1/4 fresh groups, 1 leased, 0 queued"
    ):
        client.batch(1, timeout_s=0.3, on_wait=heard.append)
    assert heard[0].startswith("1/4 fresh groups, 1 leased")


def test_the_answer_not_yet_has_counts_that_change_with_every_group_and_with_nothing_else(client: BufferClient) -> None:
    def counts() -> list[int]:
        return json.loads(raw(client, "POST", "/batches/1").data)["counts"]

    before = counts()
    fill(client, "a")
    one = counts()
    assert one != before
    client.enqueue([make_request(prompt_id="b"), make_request(prompt_id="c")])
    client.claim("worker-2", limit=2, policy_version=1)
    client.release("worker-2")
    assert counts() == one, "requests that come and go are no progress"
    answered = make_request(prompt_id="e", purpose=Purpose.EVALUATE, label="easy@1")
    client.enqueue([answered])
    client.push([pack_group(answer(answered))])
    assert counts() != one, "workers that measure are busy"


def test_a_waiting_learner_gets_its_batch_when_the_last_group_arrives(client: BufferClient) -> None:
    fill(client, *"abc")
    started = time.monotonic()
    threading.Timer(0.3, fill, args=(client, "d")).start()
    assert len(client.batch(1, timeout_s=60).entries) == 4
    assert 0.3 <= time.monotonic() - started < POLL_S, "the poll that was open was answered"


def test_a_waiting_worker_gets_its_request_when_it_is_asked(client: BufferClient) -> None:
    request = make_request(prompt_id="a")
    threading.Timer(0.3, client.enqueue, args=([request],)).start()
    started = time.monotonic()
    assert client.claim("w", limit=1, policy_version=1, wait_s=60) == [request]
    assert time.monotonic() - started < 30, "not at the end of its wait"
    assert client.claim("w", limit=1, policy_version=1, wait_s=0.1) == []


def test_weights_of_a_future_that_a_restore_has_undone_are_given_no_request(client: BufferClient) -> None:
    """The learner had published version 9; the buffer goes back to before step 1, and the worker does not know."""
    begin = client.snapshot()
    client.report_progress(Progress(step=9, policy_version=9))
    client.enqueue([make_request(prompt_id="a")])
    assert len(client.claim("w", limit=1, policy_version=9)) == 1
    client.restore(begin)

    client.enqueue([make_request(prompt_id="a")])
    assert client.claim("w", limit=1, policy_version=9, wait_s=0.1) == []
    reasons: list[str] = []
    with pytest.raises(DeadlineError):
        client.batch(1, timeout_s=0.1, on_wait=reasons.append)
    assert "no requests for w: it samples with policy version 9, but the learner has published 1 at most" in reasons[0]
    assert client.status().failures_in_a_row == 0
    # As soon as it has the weights of the run as it is now.
    assert len(client.claim("w", limit=1, policy_version=1)) == 1


def test_a_claim_whose_worker_has_gone_leases_nothing(client: BufferClient) -> None:
    impatient = urllib3.PoolManager(retries=False, timeout=0.2)
    body = {"worker_id": "gone", "limit": 1, "policy_version": 1, "wait_s": 30}
    with pytest.raises(urllib3.exceptions.HTTPError):
        impatient.request("POST", client.url + "/requests/claim", json=body)
    impatient.clear()
    # Each attempt of the poll is a sign of life: it has ended when there is none any more.
    wait_until(lambda: client.status().workers["gone"].silent_s > 8 * SERVICE_POLL_S)
    client.enqueue([make_request(prompt_id="a")])
    time.sleep(0.3)
    assert client.status().leased["fresh"] == 0


def test_too_many_failures_end_the_wait_at_once(client: BufferClient) -> None:
    client.enqueue([make_request(prompt_id=name) for name in "ab"])
    client.claim("w", limit=2, policy_version=1)
    client.fail("w", "g-a", reason="engine", detail="out of memory")
    client.fail("w", "g-b", reason="engine", detail="out of memory")
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"2 groups in a row failed.*engine: out of memory"):
        client.batch(1, timeout_s=60)
    assert time.monotonic() - started < POLL_S, "not at the end of a poll"


def test_a_re_evaluation_beside_the_round_of_its_step_is_refused(client: BufferClient) -> None:
    client.reevaluate(4, [make_request(request_id="of-the-round", purpose=Purpose.REEVALUATE, step=4)])
    with pytest.raises(
        ContractError, match="whose round was already issued: send the whole round with POST /reevaluations/4"
    ):
        client.enqueue([make_request(request_id="beside-it", purpose=Purpose.REEVALUATE, step=4)])
    assert client.status().reevaluation_rounds == {4: 1}


def test_who_waits_for_the_learners_next_step_hears_of_it(client: BufferClient) -> None:
    client.report_progress(Progress(step=3, policy_version=3))
    heard: list[int] = []
    waiting = threading.Thread(target=lambda: heard.append(client.progress(seen_step=3, wait_s=30.0).step))
    waiting.start()
    client.report_progress(Progress(step=4, policy_version=3))
    waiting.join(60)
    assert heard == [4]


def test_a_worker_with_new_weights_ends_its_own_open_claim_and_no_other(client: BufferClient) -> None:
    client.report_progress(Progress(step=5, policy_version=5))
    client.enqueue([make_request(prompt_id="new", min_version=5)])
    answers: dict[str, list[list[str]]] = {"w": [], "other": []}

    def claim_as_a_worker_does(name: str, versions: tuple[int, ...], wait_s: float) -> None:
        for version in versions:
            claimed = client.claim(name, limit=1, policy_version=version, wait_s=wait_s)
            answers[name].append([request.request_id for request in claimed])

    def end_and_look() -> bool:
        client.end_claim("w")
        return not worker.is_alive()

    other = threading.Thread(target=claim_as_a_worker_does, args=("other", (4,), 3.0))
    worker = threading.Thread(target=claim_as_a_worker_does, args=("w", (4, 5), 30.0))
    other.start()
    worker.start()
    wait_until(end_and_look)
    assert answers == {"w": [[], ["g-new"]], "other": []}
    other.join(60)


def test_a_snapshot_restores_the_run(client: BufferClient) -> None:
    fill(client, *"abcd")
    first = raw(client, "POST", "/batches/1").data
    fill(client, "e")
    data = client.snapshot()
    before = client.status()
    fill(client, *"fgh")
    client.batch(2, timeout_s=60)
    client.restore(data)
    assert client.snapshot() == data
    after = client.status()
    assert (after.assembled_step, after.fresh_ready, after.num_bytes) == (1, 1, before.num_bytes)
    client.resume(0)
    assert raw(client, "POST", "/batches/1").data == first
    with pytest.raises(ContractError, match="snapshot is damaged"):
        client.restore(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ContractError, match="batch 2 is not in the buffer"):
        client.resume(7)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/requests", {"requests": [{"request_id": "x"}]}),
        ("POST", "/requests", {"requests": [], "cursors": 3}),
        ("POST", "/requests/claim", {"worker_id": "a b", "limit": 1, "policy_version": 1}),
        ("POST", "/requests/claim", {"worker_id": "a{b}", "limit": 1, "policy_version": 1}),
        ("POST", "/requests/claim", {"worker_id": "w", "limit": 0, "policy_version": 1}),
        ("POST", "/requests/fail", {"worker_id": "w", "request_id": "x", "reason": "A whole sentence."}),
        ("PUT", "/progress", {"step": -1, "policy_version": 0}),
        ("POST", "/batches/-1", None),
        ("POST", "/batches/1?wait_s=3600", None),
        ("GET", "/batches?limit=100000", None),
        ("GET", "/frames/never", None),
        ("POST", "/requests", {"requests": [to_map(make_request(prompt_id="two words"))]}),
    ],
)
def test_what_breaks_the_contract_is_answered_with_422_and_a_name(
    client: BufferClient, method: str, path: str, body: object
) -> None:
    reply = raw(client, method, path, **({"json": body} if body is not None else {}))
    assert (reply.status, reply.json()["error"], reply.json()["retry"]) == (422, "ContractError", False)


def test_looking_shows_thresholds_and_compositions_in_pages(client: BufferClient) -> None:
    fill(client, "a", "b", rewards="00000000")
    fill(client, "c", rewards="10000000")
    fill(client, "d", rewards="11000000")
    client.batch(1, timeout_s=60)
    # r_tot = 3/32: c2 = 1/8 + 3/8 * 3/32 = 0.160, c3 = 1/4 + 3/8 * 3/32 = 0.285: only 2/8 lies between
    status = client.status()
    assert status.r_tot == pytest.approx(0.09375)
    assert status.facts == pytest.approx({"c2": 0.16015625, "c3": 0.28515625})
    batches = raw(client, "GET", "/batches").json()
    assert (batches["total"], batches["items"][0]["x1"], batches["items"][0]["num_bad"]) == (1, 2, 3)
    assert raw(client, "GET", "/counters").json() == {"pushed_groups:stored": 4}


def test_health_readiness_and_metrics_answer(make_store: Callable[..., RedisStore]) -> None:
    with serving(make_store(), small_config()) as client:
        fill(client, *"abcd")
        client.batch(1, timeout_s=60)
        assert raw(client, "GET", "/healthz").status == 200
        assert raw(client, "GET", "/readyz").json()["ready"] is True
        text = raw(client, "GET", "/metrics").data.decode()
    for line in (
        'bapo_buffer_ingested_groups_total{result="stored"} 4.0',
        'bapo_batch_groups{origin="x1"} 4.0',
        "bapo_batch_capacity_groups 4.0",
        'bapo_threshold_ratio{name="c2"} 0.21875',
    ):
        assert line in text


def test_the_description_covers_every_route_with_an_example_or_a_schema(client: BufferClient) -> None:
    description = raw(client, "GET", "/openapi.json").json()
    paths = description["paths"]
    assert [
        path for path, methods in paths.items() if not all(found["description"] for found in methods.values())
    ] == []
    assert "application/octet-stream" in paths["/groups"]["post"]["requestBody"]["content"]
    assert "application/octet-stream" in paths["/batches/{step}"]["post"]["responses"]["200"]["content"]
    assert description["components"]["schemas"]["EnqueueBody"]["examples"][0]["cursor"] == 1
    request = description["components"]["schemas"]["EnqueueBody"]["properties"]["requests"]["items"]
    assert request["required"] == ["request_id", "prompt", "group_size", "purpose", "step", "min_version"]
    assert request["properties"]["purpose"]["enum"] == ["evaluate", "fresh", "reevaluate"]
    assert request["properties"]["prompt"]["properties"]["answer"] == {"type": "object"}


def test_the_service_ends_at_once_with_long_polls_open(make_store: Callable[..., RedisStore]) -> None:
    claimed: list[object] = []

    def wait() -> None:
        claimed.append(BufferClient(client.url, retry_s=0.0).claim("w", limit=1, policy_version=1, wait_s=60.0))

    with serving(make_store(), small_config()) as client:
        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: "w" in client.status().workers)
        started = time.monotonic()
    waiter.join()
    assert time.monotonic() - started < 30, "not at the end of the poll"
    assert claimed == [[]]


def test_a_body_that_the_store_cuts_off_is_read_again_without_a_traceback(
    served: tuple[RedisStore, BufferClient],
    client: BufferClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = [make_request(prompt_id=name, purpose=Purpose.EVALUATE, label="easy@1") for name in "ab"]
    client.enqueue(requests)
    client.push([pack_group(answer(request)) for request in requests])
    store, read = served[0], served[0].frames
    monkeypatch.setattr("buffer_service.service.FRAMES_BYTES", 1)  # one frame per part
    asked: list[Sequence[str]] = []

    def frames(group_ids: Sequence[str]) -> list[bytes | None]:
        asked.append(group_ids)
        if len(asked) == 2:
            raise UnavailableError("Redis went away")
        return read(group_ids)

    monkeypatch.setattr(store, "frames", frames)
    assert [group.prompt.prompt_id for group in client.collect("easy@1")] == ["a", "b"]
    assert len(asked) == 4
    assert "response truncated, its reader will retry: Redis went away" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
