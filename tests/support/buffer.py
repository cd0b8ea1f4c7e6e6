"""Builders for tests of the buffer: groups on their way in, and assemblies written by hand."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from bapo.core.codec import PushedGroup, pack_group, pack_push, read_group_header
from bapo.core.frames import frame_digest, frame_head
from bapo.core.types import Group, GroupStat, HardPrompt, Origin, Prompt, RolloutRequest, stat_of
from bapo.transport.messages import BufferStatus, WorkerLeases
from buffer_service.service import BufferService
from buffer_service.state import Assembly, BatchRecord, Incoming, Tables, View, record_of
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.store import RedisStore
from tests.support.factories import make_group, make_request


class Pushed(Incoming, frozen=True, kw_only=True):
    """A group on its way, with its frame, which stores of tests write themselves."""

    frame: bytes


class PuttingRedisStore(RedisStore):
    """Writes the frames of a push before it."""

    def push(self, groups: Sequence[Incoming]) -> list[str]:
        put_frames(self, groups)
        return super().push(groups)


def put_frames(store: RedisStore, groups: Sequence[Incoming]) -> None:
    """What a worker does before it pushes."""
    for group in groups:
        if isinstance(group, Pushed):
            store.put_frame(group.frame_name, group.frame)


def new_store(
    redis_url: str,
    *,
    run: str = "test",
    lease_s: float = 60.0,
    max_attempts: int = 3,
    in_step_order: bool = False,
) -> RedisStore:
    """An empty store."""
    link = RedisLink(redis_url)
    return PuttingRedisStore(link, run, lease_s=lease_s, max_attempts=max_attempts, in_step_order=in_step_order)


def incoming(group: Group) -> Pushed:
    """What the service hands to the store for a pushed group."""
    frame = pack_group(group)
    record = record_of(read_group_header(frame), len(frame), frame_digest(frame))
    return Pushed(record=record, frame_name=secrets.token_hex(16), frame=frame)


def push_body(service: BufferService, frames: Sequence[bytes]) -> bytes:
    """Write frames, and make the body of the push that names them."""
    names = [secrets.token_hex(16) for _ in frames]
    for name, frame in zip(names, frames, strict=True):
        service.store.put_frame(name, frame)
    pairs = zip(frames, names, strict=True)
    return pack_push([PushedGroup(bytes(frame_head(frame)), name, frame_digest(frame)) for frame, name in pairs])


def answer(request: RolloutRequest, rewards: str = "10010000", version: int = 1, worker_id: str = "w") -> Group:
    """The group that a worker makes of a request."""
    return make_group(
        rewards=rewards,
        prompt=request.prompt,
        group_id=request.request_id,
        purpose=request.purpose,
        step=request.step,
        label=request.label,
        version=version,
        worker_id=worker_id,
    )


def stored(
    store: RedisStore, names: Sequence[str], *, rewards: str = "10010000", step: int = 1
) -> list[RolloutRequest]:
    """Ask for one fresh group per name, and push it."""
    requests = [make_request(prompt_id=name, step=step) for name in names]
    store.enqueue(requests, cursor=None)
    results = store.push([incoming(answer(request, rewards)) for request in requests])
    assert results == ["stored"] * len(names)
    return requests


def view_of(store: RedisStore, num_fresh: int) -> View:
    """What an assembly with so many fresh groups would read now."""
    return store.read_step(1, num_fresh).view()


def stat(group_id: str, *, birth: int = 1, prompt_id: str | None = None) -> GroupStat:
    """An entry of B_high; its prompt is named as the group, unless it is given."""
    return stat_of(
        group_id=group_id,
        prompt_id=group_id.removeprefix("g-") if prompt_id is None else prompt_id,
        policy_version=1,
        rewards=(1.0, 1.0, *[0.0] * 6),
        outcomes=bytes([0, 0, 1, *[0] * 5]),
        birth=birth,
    )


def hard(prompt_id: str, *, birth: int = 1, attempts: int = 0) -> HardPrompt:
    """An entry of B_bad."""
    return HardPrompt(prompt_id=prompt_id, birth=birth, mu=0.0, attempts=attempts)


def an_assembly(
    *,
    step: int = 1,
    fresh: Sequence[str] = (),
    reevaluated: Sequence[str] = (),
    trained: Sequence[str] = (),
    before: Tables | None = None,
    bad: Sequence[HardPrompt] = (),
    high: Sequence[GroupStat] = (),
    new_prompts: Sequence[Prompt] = (),
    num_stale: int = 0,
    fresh_bytes: int = 0,
    success_counts: bytes = b"",
    untrained: Sequence[str] = (),
    stale: Sequence[str] = (),
    num_bytes: int = 0,
) -> Assembly:
    """An assembly that trains `trained`, of so many bytes, as x1 and leaves the given tables."""
    header = {
        "step": step,
        "origins": [Origin.X1.value] * len(trained),
        "r_tot": 0.25,
        "facts": {"c2": 0.2, "c3": 0.3, "num_bad": len(bad), "num_high": len(high)},
        "results": [],
    }
    return Assembly(
        step=step,
        fresh=tuple(fresh),
        reevaluated=tuple(reevaluated),
        before=before or Tables(step=step - 1),
        after=Tables(step=step, r_tot=0.25, facts={"c2": 0.2, "c3": 0.3}, bad=tuple(bad), high=tuple(high)),
        new_prompts=tuple(new_prompts),
        batch=BatchRecord(
            step=step, group_ids=tuple(trained), header=header, num_bytes=num_bytes, untrained=tuple(untrained)
        ),
        composition={"step": step, "x1": len(trained), "x2": 0, "x3": 0, "batch_size": 4},
        num_stale=num_stale,
        fresh_bytes=fresh_bytes,
        stale=tuple(stale),
        success_counts=success_counts,
    )


STATUS = BufferStatus(
    run="run",
    step=3,
    policy_version=2,
    assembled_step=3,
    committed_step=2,
    checkpointed_step=0,
    cursor=12,
    fresh_dropped=1,
    fresh_spares=1,
    queued={"fresh": 2},
    leased={"fresh": 1},
    fresh_ready=4,
    reevaluated_ready=0,
    num_bad=2,
    num_high=1,
    r_tot=0.5,
    facts={"c2": 0.3},
    evaluations={"held_out@1": 7},
    reevaluation_rounds={2: 1},
    workers={"w": WorkerLeases(leased=1, silent_s=0.5)},
    failures_in_a_row=0,
    last_failure="",
    num_bytes=100,
    batches=[{"step": 3, "x1": 2}],
)
"""A status with something in every field."""
