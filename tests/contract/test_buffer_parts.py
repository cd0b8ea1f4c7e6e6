"""Small parts of the buffer service: its start, its settings, versions that it takes for published, failures."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator

import pytest
import urllib3

from bapo.core.codec import PushedGroup, pack_group
from bapo.core.errors import ConfigError, ContractError, UnavailableError
from bapo.core.frames import frame_digest, frame_head
from bapo.core.types import Progress
from buffer_service.__main__ import wait_for
from buffer_service.ingest import KNOWN_S, Ingest
from buffer_service.service import FailureReasons
from buffer_service.state import Health
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.requirements import refuse_other_settings
from buffer_service.store.redis.store import RedisStore
from buffer_service.store.run_image import EMPTY
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request


def test_a_redis_that_goes_away_while_the_service_starts_is_waited_for() -> None:
    """Found by chaos: it answered, was killed, and the scripts could not be loaded."""
    answers = iter([UnavailableError("loading"), UnavailableError("gone again"), None])

    def attempt() -> Health:
        error = next(answers)
        if error:
            raise error
        return Health(where="here", persistent=True, detail="")

    wait_for(attempt, timeout_s=10.0)
    assert next(answers, "none left") == "none left"
    with pytest.raises(UnavailableError):
        wait_for(lambda: (_ for _ in ()).throw(UnavailableError("never")), timeout_s=0.0)


def test_a_gateway_that_answers_in_the_place_of_redis_is_waited_out() -> None:
    """Found by a cable that was pulled: packets then went to another host, which answered in HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        link = RedisLink(f"redis://127.0.0.1:{server.getsockname()[1]}/0?protocol=2")
        with pytest.raises(UnavailableError, match="Redis protocol"):
            link.run("status", [], [])
        thread.join(60)


# -- settings of two services


RUN = {"name": "shared"}


@pytest.fixture
def link(redis_url: str) -> Iterator[RedisLink]:
    found = RedisLink(redis_url)
    yield found
    found.client.close()


def test_a_second_service_with_other_settings_is_refused_and_names_the_keys(link: RedisLink) -> None:
    refuse_other_settings(link, small_config(run=RUN))
    refuse_other_settings(link, small_config(run=RUN, buffer={"port": 8799}))  # where it listens is its own
    with pytest.raises(ConfigError) as refused:
        refuse_other_settings(
            link, small_config(run=RUN, algorithm={"batch_size": 4, "group_size": 7}, buffer={"lease_s": 7.5})
        )
    assert "algorithm.group_size = 7 instead of " in str(refused.value)
    assert "buffer.lease_s = 7.5 instead of " in str(refused.value)
    assert "batch_size" not in str(refused.value)
    refuse_other_settings(link, small_config(run={"name": "another"}, algorithm={"batch_size": 4, "group_size": 7}))


def test_a_run_that_was_dropped_may_begin_with_other_settings(link: RedisLink) -> None:
    refuse_other_settings(link, small_config(run=RUN))
    RedisStore(link, "shared", lease_s=60, max_attempts=3).restore(EMPTY, ())
    refuse_other_settings(link, small_config(run=RUN, algorithm={"batch_size": 4, "group_size": 7}))


# -- versions


def group_of(version: int) -> PushedGroup:
    frame = pack_group(answer(make_request(), version=version))
    return PushedGroup(bytes(frame_head(frame)), "0" * 32, frame_digest(frame))


def test_a_service_hears_of_a_restore_by_another_one(redis_url: str) -> None:
    """Version 7 was published, and taken; then another service restores a state before step 1."""
    store, seconds = RedisStore(RedisLink(redis_url), "run", lease_s=60, max_attempts=3), [100.0]
    before = store.image()
    ingest, group = Ingest(store, now=lambda: seconds[0]), group_of(7)
    store.report(Progress(step=7, policy_version=7))
    ingest.checked([group])
    store.restore(before, ())
    seconds[0] += KNOWN_S
    with pytest.raises(ContractError, match="version 7"):
        ingest.checked([group])


def test_versions_up_to_the_newest_are_asked_for_once_a_second(redis_url: str) -> None:
    asked: list[float] = []

    class Counting(RedisStore):
        def progress(self) -> Progress:
            asked.append(seconds[0])
            return Progress(step=7, policy_version=7)

    seconds = [100.0]
    ingest = Ingest(Counting(RedisLink(redis_url), "run", lease_s=60, max_attempts=3), now=lambda: seconds[0])
    for version, second in ((3, 100.0), (7, 100.5), (1, 100.9), (7, 101.0), (2, 101.5)):
        seconds[0] = second
        ingest.checked([group_of(version)])
    assert asked == [100.0, 101.0]


def test_a_digest_that_is_not_that_of_the_head_is_refused(redis_url: str) -> None:
    ingest = Ingest(RedisStore(RedisLink(redis_url), "run", lease_s=60, max_attempts=3))
    with pytest.raises(ContractError, match="digest"):
        ingest.checked([group_of(1)._replace(digest="0" * 32)])


# -- reasons of failures


def test_after_64_reasons_a_new_one_is_counted_as_other(redis_url: str) -> None:
    store = new_store(redis_url, max_attempts=1000)
    reasons = [f"reason_{n}" for n in range(70)]
    with serving(store, small_config()) as client:
        client.enqueue([make_request(prompt_id="a")])
        for reason in [*reasons, "reason_3", "reason_69"]:
            client.claim("w", limit=1, policy_version=1)
            client.fail("w", "g-a", reason=reason, detail="why")
        status = client.status()
        text = urllib3.request("GET", client.url + "/metrics", retries=False).data.decode()
    counted = {key.partition(":")[2]: n for key, n in store.counters().items() if key.startswith("failed_groups:")}
    assert counted == {**dict.fromkeys(reasons[:64], 1), "reason_3": 2, "other": 7}
    shown = re.findall(r'bapo_buffer_failed_groups_total\{reason="(\w+)"\}', text)
    assert set(reasons[:64]) | {"other"} <= set(shown)
    assert not set(reasons[64:]) & set(shown)
    assert status.last_failure == "other: reason_69: why"  # for people it is still there


def test_another_instance_tells_the_same_ones_apart(redis_url: str) -> None:
    store = new_store(redis_url, max_attempts=1000)
    store.enqueue([make_request(prompt_id="a")], cursor=None)
    for n in range(64):
        store.claim("w", limit=1, policy_version=1)
        store.fail("w", "g-a", reason=f"reason_{n}", detail="")
    reasons = FailureReasons(store)
    assert [reasons.bounded(word) for word in ("reason_9", "new", "reason_63", "other")] == [
        "reason_9", "other", "reason_63", "other",
    ]  # fmt: skip


def test_failures_of_nobodys_lease_use_no_word_up(redis_url: str) -> None:
    reasons = FailureReasons(new_store(redis_url))
    assert [reasons.bounded(f"made_up_{n}") for n in range(70)] == [f"made_up_{n}" for n in range(70)]
    with pytest.raises(ContractError):
        reasons.bounded("A whole sentence.")
