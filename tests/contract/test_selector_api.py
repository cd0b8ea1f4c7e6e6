"""What a prompt selector learns from, through the buffer's API: success counts of real assemblies, and kept states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bapo.core.codec import pack_group
from bapo.core.errors import ContractError
from bapo.core.success_counts import SuccessCounts
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import answer
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request

REWARDS = {"a": "11000000", "b": "00000000", "c": "11111111", "d": "10000000"}


@pytest.fixture
def client(store: RedisStore) -> Iterator[BufferClient]:
    """A client of a service whose selector learns."""
    with serving(store, small_config(algorithm={"batch_size": 4, "selector": "mopps"})) as client:
        yield client


def train(client: BufferClient, step: int) -> None:
    """One step on the four prompts."""
    requests = [make_request(prompt_id=name, request_id=f"s{step}-{name}", step=step) for name in REWARDS]
    client.enqueue(requests)
    client.push([pack_group(answer(r, REWARDS[r.prompt.prompt_id], version=step)) for r in requests])
    client.batch(step, timeout_s=5.0)


def rows(success_counts: SuccessCounts) -> dict[str, tuple[float, int]]:
    """Prompt id -> (k, G)."""
    return {
        name: (float(k), int(size))
        for name, k, size in zip(
            success_counts.prompt_ids, success_counts.reward_sums, success_counts.sizes, strict=True
        )
    }


def test_every_fresh_group_of_a_step_is_an_outcome_whatever_the_filter_keeps(client: BufferClient) -> None:
    train(client, 1)
    train(client, 2)
    (first, second) = client.success_counts(0)
    assert (first.step, second.step) == (1, 2)
    assert rows(first) == {"a": (2.0, 8), "b": (0.0, 8), "c": (8.0, 8), "d": (1.0, 8)}
    assert [page.step for page in client.success_counts(1, limit=1)] == [2]


def test_a_kept_state_comes_back_byte_by_byte_and_ends_its_outcomes(client: BufferClient) -> None:
    assert client.selector_state() == (0, 0, b"")
    train(client, 1)
    train(client, 2)
    data = bytes(range(256)) * 1000
    client.keep_selector_state(3, 1, data)
    assert client.selector_state() == (3, 1, data)
    assert [page.step for page in client.success_counts(1)] == [2]
    client.keep_selector_state(2, 2, b"of an older round")
    assert client.selector_state() == (3, 1, data)


def test_a_state_that_claims_steps_without_a_batch_is_refused(client: BufferClient) -> None:
    train(client, 1)
    with pytest.raises(ContractError):
        client.keep_selector_state(3, 2, b"")


def test_a_selector_that_learns_nothing_costs_the_buffer_nothing(store: RedisStore) -> None:
    with serving(store, small_config()) as client:
        train(client, 1)
        assert client.success_counts(0) == []
        assert store.image().success_counts == {}
