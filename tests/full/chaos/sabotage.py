"""The product broken on purpose, so that tests can see the checks find it.

`tests.full.chaos.part` calls `commit` when BAPO_CHAOS_SABOTAGE names one of them. Each breaks one promise of the buffer
service, rarely and silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from bapo.core.codec import unpack_group
from bapo.core.types import Purpose, RolloutRequest
from buffer_service.service import BufferService
from buffer_service.state import Assembly, BatchRecord, Incoming
from tests.support.buffer import PuttingRedisStore as RedisStore

NTH = 23
"""Every so many fresh groups."""


def drop_an_acknowledged_group() -> None:
    """A group is acknowledged and then forgotten, as by a store that answers before it writes."""
    push, count = RedisStore.push, itertools.count(1)

    def forgetful(store: RedisStore, groups: Sequence[Incoming]) -> list[str]:
        results = push(store, groups)
        for group, result in zip(groups, results, strict=True):
            if result == "stored" and group.record.purpose is Purpose.FRESH and next(count) % NTH == 0:
                _forget(store, group)
        return results

    RedisStore.push = forgetful  # type: ignore[method-assign]


def change_a_batch_that_is_asked_for_again() -> None:
    """The second time, the first two groups of a batch have changed places."""
    batch, asked = BufferService.batch, set[int]()

    def fickle(service: BufferService, step: int) -> BatchRecord | None:
        record = batch(service, step)
        if record is None or len(record.group_ids) < 2:
            return record
        first, second, *others = record.group_ids
        is_again, _ = step in asked, asked.add(step)
        return replace(record, group_ids=(second, first, *others)) if is_again else record

    BufferService.batch = fickle  # type: ignore[method-assign]


def lose_hard_prompts() -> None:
    """Every fourth assembly empties B_bad."""
    commit_assembly = RedisStore.commit_assembly

    def careless(store: RedisStore, assembly: Assembly) -> bool:
        if assembly.step % 4 == 0:
            assembly = replace(assembly, after=replace(assembly.after, bad=()), new_prompts=())
        return commit_assembly(store, assembly)

    RedisStore.commit_assembly = careless  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (drop_an_acknowledged_group, change_a_batch_that_is_asked_for_again, lose_hard_prompts)
}


def commit(name: str) -> None:
    """Break this process."""
    SABOTAGES[name]()


def _forget(store: RedisStore, group: Incoming) -> None:
    """Every trace of a group; its prompt is asked again under another id, so that the run does not just wait."""
    keys, client, group_id = store._keys, store._link.client, group.record.group_id
    lost = unpack_group(client.get(keys.group(group_id)))
    for name in ("fresh", "done"):
        client.zrem(keys[name], group_id)
    for name in ("records", "refs"):
        client.hdel(keys[name], group_id)
    client.delete(keys.group(group_id))
    again = RolloutRequest(
        request_id=f"{group_id}~9", prompt=lost.prompt, group_size=lost.size, purpose=Purpose.FRESH, step=lost.step,
        min_version=lost.policy_version,
    )  # fmt: skip
    store.enqueue([again], cursor=None)
