"""What the scheduler asks for, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest

from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.errors import DeadlineError
from bapo.core.types import HardPrompt, Progress, Prompt, Purpose, RolloutRequest
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.buffer_client import BufferStatus
from bapo.transport.messages import ExtraRound
from services.scheduler.loop import Scheduler
from services.scheduler.plan import FreshPlan, due_round, missed_rounds
from tests.support.factories import make_hard, make_prompt

PROMPTS = [make_prompt(prompt_id=f"p{i}") for i in range(10)]


def make_config(**sections: dict[str, object]) -> Config:
    """B = 4, v = 2, m = 4, max_steps_ahead = 1, T = 12, unless told otherwise."""
    tree = {
        "run": {"num_steps": 12},
        "algorithm": {"batch_size": 4},
        "cadence": {"weight_sync_interval": 2, "reevaluation_interval": 4, "max_steps_ahead": 1},
        "learner": {"minibatch_size": 2},
    }
    return Config.model_validate({name: tree.get(name, {}) | sections.get(name, {}) for name in {*tree, *sections}})


STATUS = BufferStatus(
    run="r", step=0, policy_version=0, assembled_step=0, committed_step=0, checkpointed_step=0, cursor=0,
    fresh_dropped=0, queued={}, leased={}, fresh_ready=0, reevaluated_ready=0, num_bad=0, num_high=0, r_tot=None,
    facts={}, evaluations={}, reevaluation_rounds={}, workers={}, failures_in_a_row=0, last_failure="",
    num_bytes=0, batches=[],
)  # fmt: skip


class FakeBuffer:
    """Records what was asked; its learner is wherever the test puts it."""

    def __init__(self, *, hard: Sequence[HardPrompt] = ()) -> None:
        self.steps: Iterator[int] = iter([])
        self.current = STATUS
        self.hard = [(entry, make_prompt(prompt_id=entry.prompt_id)) for entry in hard]
        self.fresh: list[RolloutRequest] = []
        self.rounds: dict[int, list[RolloutRequest]] = {}
        self.issued: list[int] = []
        self.seen: list[int | None] = []

    def progress(self, *, seen_step: int | None = None, wait_s: float = 0.0) -> Progress:
        self.seen.append(seen_step)
        return Progress(step=next(self.steps), policy_version=1)

    def status(self) -> BufferStatus:
        return replace(self.current, reevaluation_rounds={step: len(asked) for step, asked in self.rounds.items()})

    def enqueue(
        self, requests: Sequence[RolloutRequest], *, cursor: int | None = None, spares: int | None = None
    ) -> int:
        assert cursor is not None
        assert spares is not None
        self.fresh += requests
        self.current = replace(self.current, cursor=cursor, fresh_spares=spares)
        return len(requests)

    def hard_prompts(self) -> list[tuple[HardPrompt, Prompt]]:
        return self.hard

    def reevaluate(self, step: int, requests: Sequence[RolloutRequest]) -> None:
        self.issued.append(step)
        self.rounds[step] = list(requests)


def make_scheduler(config: Config, buffer: FakeBuffer) -> Scheduler:
    return Scheduler(config, FreshPlan(config, PROMPTS), load_composer(config.algorithm), buffer, Telemetry())


def due(config: Config, prompts: Sequence[Prompt] = PROMPTS, **numbers: int) -> list[RolloutRequest]:
    """What the plan of the uniform order asks for next."""
    return FreshPlan(config, prompts).due(replace(STATUS, **numbers))


class ExtraBuffer(FakeBuffer):
    """Takes the requests of further rounds, too: those have no cursor."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: list[list[RolloutRequest]] = []

    def enqueue(
        self, requests: Sequence[RolloutRequest], *, cursor: int | None = None, spares: int | None = None
    ) -> int:
        if cursor is not None:
            return super().enqueue(requests, cursor=cursor, spares=spares)
        self.extra.append(list(requests))
        return len(requests)


def test_a_further_round_is_asked_once_for_its_own_step_and_again_when_nothing_is_on_its_way() -> None:
    buffer = ExtraBuffer()
    rounds = (ExtraRound(step=3, round=2, first=0, size=4), ExtraRound(step=3, round=3, first=4, size=4))
    buffer.current = replace(STATUS, step=3, assembled_step=2, queued={"fresh": 4}, extra_rounds=rounds[:1])
    scheduler = make_scheduler(make_config(), buffer)
    scheduler.poll(3)
    scheduler.poll(3)
    ids = [[request.request_id for request in asked] for asked in buffer.extra]
    assert ids == [[f"extra-000003-02-{index:04d}" for index in range(4)]]
    assert {(request.step, request.min_version) for request in buffer.extra[0]} == {(3, 2)}
    buffer.current = replace(buffer.current, extra_rounds=rounds)
    scheduler.poll(3)
    assert buffer.extra[1][0].request_id == "extra-000003-03-0000"
    prompts = [request.prompt.prompt_id for asked in buffer.extra for request in asked]
    assert len(set(prompts)) == 8, "the second round goes on where the first ended"
    buffer.current = replace(buffer.current, queued={})
    scheduler.poll(3)
    assert buffer.extra[2:] == buffer.extra[:2]


def test_a_step_that_replays_is_asked_fewer_fresh_groups() -> None:
    config = make_config(algorithm={"composer": "remix", "options": {"share": 0.5, "last_step": 2}})
    steps = [request.step for request in due(config, step=1)]
    assert steps == [1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("numbers", "want"),
    [
        ({"step": 0, "cursor": 0}, range(12)),  # before step 1: v + max_steps_ahead = 3 steps of 4
        ({"step": 1, "cursor": 12}, range(12, 16)),  # step 1 begun: up to step 4
        ({"step": 1, "cursor": 16}, range(0)),  # nothing is missing
        ({"step": 1, "cursor": 16, "fresh_dropped": 3}, range(16, 19)),  # three groups failed for good: as many more
        ({"step": 1, "cursor": 19, "fresh_dropped": 3, "fresh_spares": 3}, range(0)),
        ({"step": 2, "cursor": 16, "fresh_dropped": 3}, range(16, 19)),  # spares go first
        ({"step": 2, "cursor": 19, "fresh_dropped": 3, "fresh_spares": 3}, range(19, 23)),
        ({"step": 1, "cursor": 20}, range(0)),  # ahead of the plan: never a negative range
        ({"step": 11, "cursor": 40}, range(40, 48)),  # not beyond T = 12
        ({"step": 12, "cursor": 48, "fresh_dropped": 2}, range(48, 50)),
    ],
)
def test_fresh_requests_reach_v_plus_max_steps_ahead_steps_ahead_and_replace_what_was_dropped(
    numbers: dict[str, int], want: range
) -> None:
    assert [request.request_id for request in due(make_config(), **numbers)] == [f"fresh-{c:08d}" for c in want]


@pytest.mark.parametrize(
    ("cursor", "spares", "step", "min_version"),
    [
        (0, 0, 1, 1),
        (3, 0, 1, 1),
        (4, 0, 2, 1),  # max_steps_ahead 1: planned for step 2, synced version of step 1
        (8, 0, 3, 2),  # planned for step 3: alpha of step 2
        (12, 0, 4, 2),
        (16, 0, 5, 4),
        (16, 4, 4, 2),  # four before it replaced others: it fills a place of step 4
    ],
)
def test_a_fresh_request_carries_its_step_and_the_oldest_weights_admitted(
    cursor: int, spares: int, step: int, min_version: int
) -> None:
    (request, *_) = due(make_config(), step=5, cursor=cursor, fresh_spares=spares, fresh_dropped=spares)
    assert (request.request_id, request.step, request.min_version) == (f"fresh-{cursor:08d}", step, min_version)
    assert (request.purpose, request.group_size) == (Purpose.FRESH, 8)


@pytest.mark.parametrize(("step", "due"), [(0, None), (3, None), (4, 4), (5, 4), (8, 8), (13, 12)])
def test_a_round_is_due_every_m_steps_and_a_missed_one_is_caught_up(step: int, due: int | None) -> None:
    assert due_round(step, make_config()) == due


def test_a_round_asks_the_hard_prompts_from_the_weights_of_its_step() -> None:
    config = make_config()
    planned = FreshPlan(config, PROMPTS).prompt_ids(4)
    fresh_anyway = next(iter(planned))
    buffer = FakeBuffer(
        hard=[
            make_hard(prompt_id="old", birth=1),
            make_hard(prompt_id=fresh_anyway, birth=2),
            make_hard(prompt_id="newborn", birth=4),
        ]
    )
    scheduler = make_scheduler(config, buffer)
    scheduler.poll(4)
    assert list(buffer.rounds) == [4]
    (request,) = buffer.rounds[4]
    assert (request.request_id, request.prompt.prompt_id) == ("reevaluate-000004-0000", "old")
    assert (request.purpose, request.step, request.min_version) == (Purpose.REEVALUATE, 4, 4)


def test_a_round_without_hard_prompts_is_issued_too() -> None:
    """A step that waits for its re-evaluation must learn that nothing comes."""
    buffer = FakeBuffer()
    make_scheduler(make_config(), buffer).poll(4)
    assert buffer.rounds == {4: []}


def test_the_loop_feeds_each_step_once_and_ends_behind_the_last() -> None:
    config, buffer = make_config(), FakeBuffer()
    buffer.steps = iter([0, 0, 1, 5, 12, 13])
    make_scheduler(config, buffer).run()
    assert [request.request_id for request in buffer.fresh] == [f"fresh-{cursor:08d}" for cursor in range(48)]
    assert list(buffer.rounds) == [4, 12]
    assert buffer.seen == [None, 0, 0, 1, 5, 12], "it waits for the learner to leave the step it has seen"


def test_dropped_groups_are_asked_again_although_the_learner_waits_in_its_step() -> None:
    config, buffer = make_config(), FakeBuffer()

    def steps() -> Iterator[int]:
        yield 1
        buffer.current = replace(buffer.current, fresh_dropped=2)
        yield 1  # the wait for another step is over, and there is none
        yield 13

    buffer.steps = steps()
    make_scheduler(config, buffer).run()
    assert len(buffer.fresh) == 16 + 2


def test_a_restarted_scheduler_goes_on_at_the_cursor_of_the_buffer() -> None:
    buffer = FakeBuffer()
    buffer.current = replace(STATUS, cursor=14)
    make_scheduler(make_config(), buffer).poll(1)
    assert [request.request_id for request in buffer.fresh] == ["fresh-00000014", "fresh-00000015"]


@pytest.mark.parametrize(("is_restored", "issued"), [(False, [4, 8]), (True, [4, 8, 4, 8])])
def test_a_learner_that_has_gone_back_gets_again_only_the_rounds_that_a_restore_has_undone(
    is_restored: bool, issued: list[int]
) -> None:
    buffer = FakeBuffer(hard=[make_hard(prompt_id="p1")])

    def steps() -> Iterator[int]:
        yield from (4, 8)
        buffer.hard = [(make_hard(prompt_id="p2"), make_prompt(prompt_id="p2"))]
        if is_restored:
            buffer.rounds.clear()
        yield from (3, 4, 8, 13)

    buffer.steps = steps()
    make_scheduler(make_config(), buffer).run()
    assert buffer.issued == issued
    prompts = {request.prompt.prompt_id for requests in buffer.rounds.values() for request in requests}
    assert prompts == {"p2" if is_restored else "p1"}


@pytest.mark.parametrize(
    ("issued", "due", "missed"),
    [
        ((), 4, []),
        ((), 12, [4, 8]),
        ((4,), 12, [8]),
        ((4, 8), 12, []),
        ((4, 12), 8, []),  # the learner has gone back to step 8, whose round was missed before
        ((6,), 12, [8]),  # of a run with another m
    ],
)
def test_missed_rounds_are_those_after_the_newest_one_that_was_issued(
    issued: tuple[int, ...], due: int, missed: list[int]
) -> None:
    assert list(missed_rounds(due, issued, make_config())) == missed


def test_rounds_that_the_learner_has_passed_are_reported_while_there_are_hard_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_scheduler(make_config(), FakeBuffer()).poll(12)
    assert not caplog.records
    scheduler = make_scheduler(make_config(), FakeBuffer(hard=[make_hard()]))
    for step in (8, 12):
        scheduler.poll(step)
    make_scheduler(make_config(), FakeBuffer(hard=[make_hard()])).poll(12)
    found = [message.partition(":")[2].partition(":")[0] for message in caplog.messages]
    assert found == [" no re-evaluation at step 4", " no re-evaluation at steps 4 to 8"]


def test_a_round_that_the_buffer_has_lost_is_issued_again() -> None:
    buffer = FakeBuffer(hard=[make_hard(prompt_id="p1")])
    scheduler = make_scheduler(make_config(), buffer)
    scheduler.poll(4)
    scheduler.poll(5)
    assert buffer.issued == [4]
    buffer.rounds.clear()  # Redis came back without its last second
    scheduler.poll(5)
    scheduler.poll(5)
    assert buffer.issued == [4, 4]
    assert [request.prompt.prompt_id for request in buffer.rounds[4]] == ["p1"]


def test_a_run_that_stands_still_is_told_measured_and_ended_if_so_configured() -> None:
    config = make_config(supervision={"stall_s": 60.0, "stall_ends_run": True})
    buffer, telemetry, clock = FakeBuffer(), Telemetry(), [0.0]
    buffer.current = replace(STATUS, step=3, policy_version=2, assembled_step=2, cursor=48)
    scheduler = Scheduler(
        config, FreshPlan(config, PROMPTS), load_composer(config.algorithm), buffer, telemetry, now=lambda: clock[0]
    )
    scheduler.poll(3)
    clock[0] = 59.0
    scheduler.poll(3)
    assert b"bapo_stalled_seconds 59.0" in telemetry.exposition()
    clock[0] = 60.0
    with pytest.raises(DeadlineError, match="batch 3"):
        scheduler.poll(3)


def test_a_response_in_segments_begins_with_weights_that_leave_it_the_time() -> None:
    rollout = {"max_response_tokens": 60, "generation_budget": 20}
    cadence = {"weight_sync_interval": 1, "reevaluation_interval": 1, "max_steps_ahead": 3}
    whole, parts = (FreshPlan(make_config(cadence=cadence, rollout=r), PROMPTS) for r in ({}, rollout))
    found = [[request.min_version for request in plan.due(STATUS)] for plan in (whole, parts)]
    # Steps 1 to 4 of four prompts: max_steps_ahead = 3 lets step 4 begin with version 1; two more
    # segments take two of these three.
    assert found == [[1] * 16, [1] * 8 + [2] * 4 + [3] * 4]
    with pytest.raises(ValueError, match=r"cadence\.max_steps_ahead = 2"):
        make_config(
            cadence={"weight_sync_interval": 1, "reevaluation_interval": 1, "max_steps_ahead": 1}, rollout=rollout
        )


def long_prompts(num: int) -> list[Prompt]:
    """Each with an answer of 700,000 bytes: 23 of them, and no more, make less than 16 MiB of JSON."""
    return [
        msgspec.structs.replace(make_prompt(prompt_id=f"p{i}"), answer={"tests": "x" * 700_000}) for i in range(num)
    ]


def test_fresh_requests_with_long_rows_are_asked_for_in_calls_that_the_service_takes() -> None:
    config, buffer = make_config(algorithm={"batch_size": 20}), CallsOfBuffer()
    buffer.current = replace(STATUS, step=1)
    plan = FreshPlan(config, long_prompts(40))
    scheduler = Scheduler(config, plan, load_composer(config.algorithm), buffer, Telemetry())
    scheduler.poll(1)
    asked = 20 * (1 + config.cadence.lookahead)
    assert len(buffer.fresh) == buffer.current.cursor == asked
    assert [request.request_id for request in buffer.fresh] == [f"fresh-{i:08d}" for i in range(asked)]
    assert max(buffer.calls) == 23


def test_a_round_of_hard_prompts_with_long_rows_is_cut_to_what_one_call_takes(caplog: pytest.LogCaptureFixture) -> None:
    buffer = FakeBuffer()
    prompts = long_prompts(40)
    buffer.hard = [(make_hard(prompt_id=f"hard-{prompt.prompt_id}"), prompt) for prompt in prompts]
    config = make_config(algorithm={"batch_size": 4, "max_reevaluated": 40})
    make_scheduler(config, buffer).poll(config.cadence.reevaluation_interval)
    assert [len(requests) for requests in buffer.rounds.values()] == [23]
    assert "23 of 40 hard prompts are re-evaluated" in caplog.text


class CallsOfBuffer(FakeBuffer):
    """Counts the requests of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def enqueue(
        self, requests: Sequence[RolloutRequest], *, cursor: int | None = None, spares: int | None = None
    ) -> int:
        self.calls.append(len(requests))
        return super().enqueue(requests, cursor=cursor, spares=spares)


def test_one_call_carries_a_bounded_number_of_requests() -> None:
    config = make_config(algorithm={"batch_size": 400}, learner={"minibatch_size": 8})
    prompts = [make_prompt(prompt_id=f"p{i}") for i in range(400)]
    assert len(due(config, prompts)) == 512
    assert len(due(config, prompts, cursor=1200, fresh_dropped=600)) == 512
