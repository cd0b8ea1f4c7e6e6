"""`verify` and `drop` beside a loop at full speed: no false alarm, and nothing that was dropped comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bapo.core.codec import pack_group
from bapo.core.errors import ContractError
from bapo.core.types import Purpose, RolloutRequest
from bapo.transport.buffer_admin import BufferAdmin
from bapo.transport.buffer_client import BufferClient
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request

REWARDS = ("00000000", "11000000", "11100000", "11111111")
SECONDS = 6.0


def requests(step: int, purpose: Purpose, prompt_ids: list[str]) -> list[RolloutRequest]:
    return [
        make_request(prompt_id=prompt_id, request_id=f"{purpose}-{step}-{prompt_id}", purpose=purpose, step=step)
        for prompt_id in prompt_ids
    ]


def learn(client: BufferClient, is_over: Callable[[], bool]) -> int:
    """Ask, train and commit until it is over; returns the steps."""
    step = 0
    while not is_over():
        step += 1
        # One more than a batch needs, because the dropper takes some.
        client.enqueue(requests(step, Purpose.FRESH, [f"p{(5 * step + i) % 40}" for i in range(5)]))
        client.reevaluate(step, requests(step, Purpose.REEVALUATE, [e.prompt_id for e, _ in client.hard_prompts()]))
        client.batch(step, timeout_s=60)
        client.commit(step, checkpointed=max(0, step - 2))
    return step


def work(client: BufferClient, worker: str, is_over: Callable[[], bool]) -> None:
    while not is_over():
        claimed = client.claim(worker, limit=3, policy_version=1)
        frames = [
            pack_group(answer(request, REWARDS[hash(request.request_id) % 4], worker_id=worker)) for request in claimed
        ]
        client.push(frames)
        if claimed and len(claimed) < 3:
            client.release(worker)


def drop(client: BufferClient, dropped: list[str], is_over: Callable[[], bool]) -> None:
    """An entry of B_high and the oldest of B_bad, again and again; both change meanwhile."""
    admin = BufferAdmin(client.url)
    while not is_over():
        for item in [item for item in admin.held().items if "high" in item["places"]][-1:]:
            dropped += _dropped(admin.drop_group, item["group_id"])
        for entry, _ in client.hard_prompts()[:1]:
            dropped += _dropped(admin.drop_prompt, entry.prompt_id)
        time.sleep(0.02)


def _dropped(call: Callable[[str], object], name: str) -> list[str]:
    try:
        call(name)
    except ContractError:
        return []  # it left by itself
    return [name]


def test_a_buffer_at_full_speed_is_sound_whenever_it_is_looked_at(redis_url: str) -> None:
    # The weights never change, and no group is ever too old.
    config = small_config(
        algorithm={"batch_size": 4, "high_window": 3, "bad_capacity": 6},
        cadence={"weight_sync_interval": 10**6, "reevaluation_interval": 10**6},
    )
    deadline = time.monotonic() + SECONDS
    steps: list[int] = []
    dropped: list[str] = []
    with serving(new_store(redis_url), config) as client:
        admin = BufferAdmin(client.url)

        def is_over() -> bool:
            return time.monotonic() > deadline

        def is_learned() -> bool:
            return bool(steps) or time.monotonic() > deadline + 30

        threads = [
            threading.Thread(target=lambda: steps.append(learn(client, is_over))),
            threading.Thread(target=work, args=(client, "w1", is_learned)),
            threading.Thread(target=work, args=(client, "w2", is_learned)),
            threading.Thread(target=drop, args=(client, dropped, is_over)),
        ]
        for thread in threads:
            thread.start()
        looks = [admin.verify() for _ in iter(is_over, True)]
        for thread in threads:
            thread.join(60)
        assert [look.violations for look in looks if look.violations] == []
        assert admin.verify().violations == []
    assert (len(looks) > 5, steps[0] > 5, len(dropped) > 2) == (True, True, True), (len(looks), steps, len(dropped))
