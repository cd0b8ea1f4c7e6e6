"""Claims whose answer is lost on the way: what they leased does not wait for the end of its lease."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from bapo.core.errors import UnavailableError
from bapo.transport.buffer_client import BufferClient
from tests.support.buffer import new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request
from tests.support.network import Network
from tests.support.wait import wait_until

LEASE_S = 600.0


class Cable:
    """A link to a service with two requests to come, and what a client without a link sees there."""

    def __init__(self, direct: BufferClient) -> None:
        self.direct, self.network = direct, Network()
        port = urlsplit(direct.url).port
        assert port is not None
        host, port = self.network.add("cable", ("127.0.0.1", port))
        self.url = f"http://{host}:{port}"

    def lose_an_answer(self) -> None:
        """Let a claim that waits lease two requests, and lose the answer."""
        wait_until(lambda: "w" in self.direct.status().workers)
        self.network.set("cable", "frozen")
        self.direct.enqueue([make_request(prompt_id=name) for name in "ab"])
        wait_until(lambda: self.num_leased() == 2)

    def mend(self) -> None:
        """The connections that were there are lost, new ones pass."""
        self.network.set("cable", "reset")
        self.network.set("cable", "open")

    def num_leased(self) -> int:
        return self.direct.status().leased["fresh"]


@pytest.fixture
def cable(redis_url: str) -> Iterator[Cable]:
    with serving(new_store(redis_url, lease_s=LEASE_S), small_config()) as client:
        made = Cable(client)
        yield made
        made.network.close()


def claim(client: BufferClient, wait_s: float) -> list[str]:
    return [request.request_id for request in client.claim("w", limit=9, policy_version=1, wait_s=wait_s)]


def test_a_claim_whose_answer_was_lost_gets_the_same_requests_when_it_is_repeated(cable: Cable) -> None:
    answers: list[list[str]] = []
    client = BufferClient(cable.url, timeout_s=60.0, retry_s=60.0)
    worker = threading.Thread(target=lambda: answers.append(claim(client, 60.0)))
    worker.start()
    cable.lose_an_answer()
    cable.mend()
    worker.join(60.0)
    assert answers == [["g-a", "g-b"]]
    assert cable.num_leased() == 2


def test_a_claim_that_was_given_up_leaves_its_requests_to_the_next_one(cable: Cable) -> None:
    client = BufferClient(cable.url, timeout_s=60.0, retry_s=0.0)
    errors: list[BaseException] = []

    def give_up() -> None:
        with pytest.raises(UnavailableError) as caught:
            claim(client, 60.0)
        errors.append(caught.value)

    worker = threading.Thread(target=give_up)
    worker.start()
    cable.lose_an_answer()
    cable.mend()
    worker.join(60.0)
    assert len(errors) == 1
    cable.direct.enqueue([make_request(prompt_id="c")])
    assert claim(client, 0.0) == ["g-a", "g-b"]
    assert claim(client, 0.0) == ["g-c"]
