"""Power loss: the append-only file ends anywhere, at a command or inside of one, and is loaded by a real server.

Every script is one transaction in the file, so what is loaded is exactly what the store held after some call: never
half of a push, an assembly or a commit. Each loaded state is compared with the model's, table by table.
"""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from bapo.core.errors import UnavailableError
from bapo.core.types import HardPrompt, Progress, Purpose
from buffer_service.assembly import repeated_id
from buffer_service.state import Replacement, View
from buffer_service.store.redis.connection import RedisLink
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import an_assembly, answer, incoming, view_of
from tests.support.factories import make_request
from tests.support.redis_server import RedisServer
from tests.support.store_model import Model
from tests.support.store_tables import Held, held_by_model, held_by_redis

OPTIONS: dict[str, Any] = {"lease_s": 600, "max_attempts": 2, "in_step_order": False}
NUM_CALLS = 120
NUM_CUTS = 60
SEED = 20


@dataclass
class Written:
    """A run whose calls are all in the file: where each ends, and what the store held then."""

    folder: Path
    ends: list[int] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


def the_file(folder: Path) -> Path:
    (found,) = (folder / "appendonlydir").glob("*.incr.aof")
    return found


class Driver:
    """Random calls, the same ones to the store and to the model."""

    def __init__(self, store: RedisStore, rng: random.Random, run: Written) -> None:
        self.store, self.model, self.rng, self.run = store, Model(**OPTIONS), rng, run
        self.number = 0
        self.note()

    def note(self) -> None:
        """Where the file ends now, and what the store must hold."""
        self.run.ends.append(the_file(self.run.folder).stat().st_size)
        self.run.held.append(held_by_model(self.model))

    def both(self, name: str, *args: Any, **kwargs: Any) -> Any:
        expected = getattr(self.model, name)(*args, **kwargs)
        assert getattr(self.store, name)(*args, **kwargs) == expected
        self.note()
        return expected

    def view(self) -> View:
        seen = view_of(self.store, 2)
        assert seen == view_of(self.model, 2)
        return seen

    def step(self) -> None:
        """One call that changes something, most of the time."""
        calls = [self.ask, self.ask, self.claim, self.claim_and_push, self.claim_and_push, self.fail, self.release,
                 self.assemble, self.assemble, self.replace, self.commit, self.ask_again, self.report]  # fmt: skip
        self.rng.choice(calls)()

    def ask(self) -> None:
        self.number += 3
        names = [f"p{i}" for i in range(self.number, self.number + 3)]
        step = self.model.tables.step + 1
        self.both("enqueue", [make_request(prompt_id=name, step=step) for name in names], cursor=self.number)

    def ask_again(self) -> None:
        step = self.model.tables.step + 1
        fields: dict[str, Any] = {"purpose": Purpose.REEVALUATE, "step": step}
        asked = [make_request(prompt_id=name, request_id=f"r{step}-{name}", **fields) for name in "ab"]
        self.both("enqueue_round", step, asked)

    def claim(self) -> list[Any]:
        return list(self.both("claim", "w", limit=3, policy_version=1, with_fresh=True))

    def claim_and_push(self) -> None:
        if not (claimed := self.claim()):
            return self.ask()
        rewards = self.rng.choice(["00000000", "11000000"])
        self.both("push", [incoming(answer(request, rewards)) for request in claimed])
        return None

    def fail(self) -> None:
        held = [asked.request.request_id for asked in self.model.line if asked.holder]
        self.both("fail", "w", self.rng.choice(held or ["never"]), reason="engine", detail="x")

    def release(self) -> None:
        self.both("release", "w")

    def report(self) -> None:
        self.both("report", Progress(step=self.model.tables.step, policy_version=1))

    def assemble(self) -> None:
        view = self.view()
        step, before, fresh = view.tables.step + 1, view.tables, view.fresh
        wrong = [record for record in fresh if not sum(record.rewards)]
        bad = {e.prompt_id: e for e in before.bad} | {
            r.prompt_id: HardPrompt(prompt_id=r.prompt_id, birth=step, mu=0.0) for r in wrong
        }
        stay = dict(list(bad.items())[-3:])
        requests = self.both("fresh_requests", [record.group_id for record in wrong])
        assembly = an_assembly(
            step=step,
            fresh=[record.group_id for record in fresh],
            reevaluated=[record.group_id for record in view.reevaluated],
            trained=[record.group_id for record in fresh[:1]] + [stat.group_id for stat in before.high[:1]],
            before=before,
            bad=list(stay.values()),
            high=[*before.high[-2:], *(record.stat(birth=step) for record in fresh[-1:])],
            new_prompts=[request.prompt for request in requests if request.prompt.prompt_id in stay],
            num_stale=len(view.stale),
            fresh_bytes=sum(record.num_bytes for record in fresh),
        )
        self.both("commit_assembly", assembly)

    def replace(self) -> None:
        items = [
            Replacement(
                result=record.result(None, "stale", 1),
                request=make_request(
                    prompt_id=record.prompt_id, request_id=repeated_id(record.group_id), step=record.step
                ),
            )
            for record in self.view().fresh
        ]
        self.both("replace_stale", items)

    def commit(self) -> None:
        step = self.model.tables.step
        self.both("commit", step, max(0, step - self.rng.randint(0, 2)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A run of NUM_CALLS calls in an append-only file that is written through at every call."""
    folder = tmp_path_factory.mktemp("aof")
    server = RedisServer(folder, aof=True, options=("--appendfsync", "always")).start()
    run = Written(folder)
    try:
        driver = Driver(RedisStore(RedisLink(server.url), "run", **OPTIONS), random.Random(SEED), run)
        for _ in range(NUM_CALLS):
            driver.step()
    finally:
        server.kill()
    return run


def command_ends(data: bytes) -> list[int]:
    """Offsets behind each command of the file: `*n` and n times `$size`, each behind a line end."""
    ends, position = [0], 0
    while position < len(data):
        line = data.index(b"\r\n", position)
        number, position = int(data[position + 1 : line]), line + 2
        for _ in range(number):
            line = data.index(b"\r\n", position)
            position = line + 2 + int(data[position + 1 : line]) + 2
        ends.append(position)
    return ends


def cut(run: Written, size: int, folder: Path) -> RedisServer:
    """A server on a copy of the file that ends after so many bytes."""
    shutil.copytree(run.folder / "appendonlydir", folder / "appendonlydir")
    file = the_file(folder)
    file.write_bytes(file.read_bytes()[:size])
    return RedisServer(folder, aof=True, options=("--aof-load-truncated", "yes")).start()


def cuts_of(run: Written, rng: random.Random) -> list[int]:
    """Ends of calls, ends of commands inside of them, and places inside of commands."""
    ends = command_ends(the_file(run.folder).read_bytes())
    assert ends[-1] == run.ends[-1]
    third = NUM_CUTS // 3
    inside = [rng.randrange(first + 1, last) for first, last in itertools.pairwise(ends)]
    return sorted({*rng.sample(run.ends, third), *rng.sample(ends, third), *rng.sample(inside, third)})


def test_whatever_the_file_still_holds_is_the_state_after_some_call(written: Written, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    seen = set()
    for number, size in enumerate(cuts_of(written, rng)):
        server = cut(written, size, _made(tmp_path / str(number)))
        try:
            link = RedisLink(server.url)
            # A call whose script changed nothing, or only told the time, may end where the next one does.
            call = max(index for index, end in enumerate(written.ends) if end <= size)
            held = held_by_redis(link, "run", on_their_way=True)
            assert _without_time(held) == _without_time(written.held[call]), f"cut at {size}, after call {call}"
            seen.add(call)
            _goes_on(RedisStore(link, "run", **OPTIONS))
        finally:
            server.kill()
    assert len(seen) > NUM_CUTS // 3


def _goes_on(store: RedisStore) -> None:
    """A learner that resumes from the newest checkpoint, and a new worker, find all that they need."""
    status = store.status()
    for step in range(status.checkpointed_step + 1, status.assembled_step + 1):
        batch = store.batch(step)
        assert batch is not None
        assert None not in store.frames(batch.group_ids)
    store.resume(status.checkpointed_step)
    assert sum(store.status().leased.values()) == 0
    request = make_request(prompt_id="new", request_id="new")
    store.enqueue([request], cursor=None)
    assert store.push([incoming(answer(request))]) == ["stored"]
    assert store.image().references["new"] == 1


def test_a_restore_that_power_loss_cut_off_is_all_or_refused(written: Written, tmp_path: Path) -> None:
    server = cut(written, written.ends[-1], _made(tmp_path / "whole"))
    store = RedisStore(RedisLink(server.url), "run", **OPTIONS)
    image = store.image()
    frames = [(group_id, store.frames([group_id])[0] or b"") for group_id in image.references]
    with redis.Redis.from_url(server.url) as raw:
        raw.config_set("appendfsync", "always")
    first = the_file(server.folder).stat().st_size
    before = held_by_redis(RedisLink(server.url), "run")
    store.restore(image, frames)
    after = held_by_redis(RedisLink(server.url), "run")
    server.kill()
    data = the_file(server.folder).read_bytes()
    ends = [end for end in command_ends(data) if end >= first]
    run = Written(server.folder)
    words = []
    for number, size in enumerate([*ends[:3], *ends[len(ends) // 2 :: len(ends) // 8], ends[-1] - 5, ends[-1]]):
        again = cut(run, size, _made(tmp_path / str(number)))
        try:
            link = RedisLink(again.url)
            held = held_by_redis(link, "run") if _answers(RedisStore(link, "run", **OPTIONS)) else None
            assert held in (None, before, after)
            words.append("refused" if held is None else "after" if held == after else "before")
        finally:
            again.kill()
    assert words[0] == "before"
    assert words[-1] == "after"
    assert "refused" in words


def _answers(store: RedisStore) -> bool:
    """False when it says that a restore was cut off; anything else is raised."""
    try:
        store.status()
    except UnavailableError as error:
        if "a restore of the buffer is in progress or was interrupted" in str(error):
            return False
        raise
    return True


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _without_time(held: Held) -> Held:
    return {name: value for name, value in held.items() if name != "heard"}
