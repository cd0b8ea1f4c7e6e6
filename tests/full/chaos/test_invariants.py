"""Every check of `tests.full.chaos.invariants` passes on a sound run, and fails on one that is wrong in one place."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.core.codec import pack_group
from bapo.core.types import Progress, Purpose, RolloutRequest
from bapo.transport.buffer_client import BufferClient
from tests.full.chaos.evidence import Evidence, read_store
from tests.full.chaos.invariants import CHECKS, violations
from tests.full.chaos.ledger import Ledger, read_ledgers
from tests.full.chaos.part import keep_ledger
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request

NUM_STEPS, NUM_PROMPTS, SIZE = 12, 14, 4
SETTINGS: dict[str, Any] = {
    "algorithm": {"batch_size": SIZE, "max_reevaluated": SIZE},
    "cadence": {"weight_sync_interval": 2, "reevaluation_interval": 2, "max_steps_ahead": 1000},
}


class Recorded(BufferClient):
    """A client with a ledger."""


def drive(client: Recorded, config: Config) -> None:
    """Scheduler, worker, evaluator and learner in one thread: some groups are left over, some requests stay leased."""
    rng = random.Random(5)

    def push(requests: list[RolloutRequest]) -> None:
        for request in requests:
            right = rng.choice((0, 0, 1, 2, 3, 4, 6, 8))
            client.push([pack_group(answer(request, "1" * right + "0" * (8 - right)))])

    num_fresh = SIZE * (NUM_STEPS + 2)
    names = [f"p{n % NUM_PROMPTS:02d}" for n in range(num_fresh)]
    client.enqueue(
        [make_request(prompt_id=name, request_id=f"fresh-{n:08d}", step=n // SIZE + 1) for n, name in enumerate(names)],
        cursor=num_fresh,
    )
    asked = [make_request(request_id=f"evaluate-{version:06d}-{n}", purpose=Purpose.EVALUATE, label=f"cd@{version}")
             for version in (1, 2, 3) for n in range(2)]  # fmt: skip
    client.enqueue(asked)
    push(client.claim("w", limit=6, policy_version=1))
    client.collect("cd@1")
    client.forget("cd@1")
    for step in range(1, NUM_STEPS + 1):
        client.report_progress(Progress(step=step, policy_version=1))
        if step % 2 == 0:
            hard = [prompt for _, prompt in client.hard_prompts()][:SIZE]
            client.reevaluate(step, [_again(step, n, prompt.prompt_id) for n, prompt in enumerate(hard)])
            push(client.claim("w", limit=len(hard), policy_version=step) if hard else [])
        push(client.claim("w", limit=SIZE, policy_version=1))
        client.batch(step, timeout_s=60)
        client.batch(step, timeout_s=60)
        client.commit(step, checkpointed=step - step % 5)
    push(client.claim("w", limit=1, policy_version=1))
    client.claim("w", limit=2, policy_version=1)


def _again(step: int, index: int, prompt_id: str) -> RolloutRequest:
    return make_request(
        prompt_id=prompt_id, request_id=f"reevaluate-{step:06d}-{index:04d}", purpose=Purpose.REEVALUATE, step=step
    )


@pytest.fixture
def sound(redis_url: str, tmp_path: Path) -> Evidence:
    """Ledgers and store of a run without a fault."""
    config = small_config(**SETTINGS)
    cls = type("Fresh", (Recorded,), {})  # wrapped once per test
    keep_ledger(Ledger(tmp_path, "all"), cls)
    with serving(new_store(redis_url, run=config.run.name), config) as client:
        drive(cls(client.url), config)
    return Evidence(config, read_ledgers(tmp_path), read_store(redis_url, config.run.name))


def test_a_sound_run_passes_and_uses_every_part_of_the_algorithm(sound: Evidence) -> None:
    assert violations(sound) == []
    trained = [origin for batch in sound.batches.values() for _, origin, _ in batch["trained"]]
    assert min(trained.count(origin) for origin in ("x1", "x2", "x3")) >= 3
    assert sound.stored.leased
    assert sound.stored.fresh
    assert sound.stored.bad


def test_a_learner_that_dies_and_goes_on_behind_its_checkpoint_is_sound(sound: Evidence) -> None:
    assert violations(a_learner_that_goes_on(sound)) == []


def evaluation_is_gone(found: Evidence) -> Evidence:
    """Nothing of cd@2, whose groups were acknowledged, is stored any more."""
    gone = {group_id for group_id in found.acknowledged if group_id.startswith("evaluate-000002-")}
    assert gone
    kept = {key: digest for key, digest in found.stored.frames.items() if key not in gone}
    return replace(found, stored=replace(found.stored, frames=kept, records=found.stored.records - gone))


def is_lost(found: Evidence) -> bool:
    """Whether acknowledged groups are missed."""
    return any("acknowledged groups are gone" in sentence for sentence in violations(found))


def test_an_evaluation_that_a_later_evaluator_has_deleted_unseen_is_not_lost(sound: Evidence) -> None:
    gone = evaluation_is_gone(sound)
    assert is_lost(gone)
    line = {"at": sound.lines[-1]["at"], "who": "evaluator", "event": "forgot", "label": "cd@2"}
    assert not is_lost(replace(gone, lines=[*gone.lines, line]))
    seen = {**line, "event": "collected", "ids": []}  # what it has looked at must have been there
    assert is_lost(replace(gone, lines=[*gone.lines, seen, line]))


Change = Callable[[Evidence], Evidence]


def with_stored(**change: Callable[[Any], Any]) -> Change:
    def apply(found: Evidence) -> Evidence:
        fields = {name: edit(getattr(found.stored, name)) for name, edit in change.items()}
        return replace(found, stored=replace(found.stored, **fields))

    return apply


def with_line(event: str, edit: Callable[[dict[str, Any]], None], *, at: int = -1) -> Change:
    """The same evidence with one line of the ledger changed."""

    def apply(found: Evidence) -> Evidence:
        lines = deepcopy(list(found.lines))
        edit([line for line in lines if line["event"] == event][at])
        return replace(found, lines=lines)

    return apply


def in_batch_of_step_5(edit: Callable[[dict[str, Any]], None]) -> Change:
    """Every fresh group of it is changed; each batch is asked for twice, and the first time counts."""

    def change(line: dict[str, Any]) -> None:
        for result in line["results"]:
            if result["purpose"] == "fresh":
                edit(result)

    return with_line("batch", change, at=8)


def without_one(values: Any) -> Any:
    return set(sorted(values)[1:])


def swap_origins(line: dict[str, Any]) -> None:
    origins = {"x1": "x3", "x3": "x1", "x2": "x1"}
    line["trained"][0][1] = origins[line["trained"][0][1]]


def repeat_first_group(found: Evidence) -> Evidence:
    """The first group that step 3 consumed is consumed again in step 4, in place of another."""
    lines = deepcopy(list(found.lines))
    for line in lines:
        if line["event"] == "batch" and line["step"] == 4:
            old = next(result for result in found.batches[3]["results"] if result["reason"] != "reused")
            line["results"][0] = deepcopy(old)
    return replace(found, lines=lines)


def first_commit_first(found: Evidence) -> Evidence:
    """Step 1 is committed at the very beginning."""
    first = found.of("commit")[0]
    return replace(found, lines=[first, *(line for line in found.lines if line is not first)])


def without_commit_of_step_5(found: Evidence) -> Evidence:
    """As if step 4 had been committed twice, and step 5 never."""
    lines = deepcopy(list(found.lines))
    for line in lines:
        if line["event"] == "commit" and line["step"] == 5:
            line["step"] = 4
    return replace(found, lines=lines)


def a_learner_that_goes_on(found: Evidence) -> Evidence:
    """Behind step 8 it dies and goes on after its checkpoint of step 6; the commit of step 10 is left to a resume."""
    lines = []
    for line in found.lines:
        if line["event"] == "commit" and line["step"] == 10:
            lines.append({**line, "event": "resume"})
            continue
        lines.append(line)
        if line["event"] == "commit" and line["step"] == 8:
            again = [
                other for other in found.lines if other["event"] in ("batch", "commit") and other["step"] in (7, 8)
            ]
            lines += [{"at": line["at"], "who": "learner", "event": "resume", "step": 6}, *again]
    return replace(found, lines=lines)


def without_a_fresh_frame(found: Evidence) -> Evidence:
    kept = {key: digest for key, digest in found.stored.frames.items() if key != min(found.stored.fresh)}
    return replace(found, stored=replace(found.stored, frames=kept))


WRONG: dict[str, Change] = {
    "no_acknowledged_group_is_lost": with_line("acknowledged", lambda line: line["results"].update(gone="stored")),
    "no_acknowledged_group_is_lost (its frame)": without_a_fresh_frame,
    "nothing_comes_from_nowhere": with_stored(frames=lambda frames: {**frames, min(frames): "other content"}),
    "nothing_comes_from_nowhere (rewards)": with_line(
        "batch", lambda line: line["results"][0].update(rewards=[0.5] * 8), at=0
    ),
    "a_batch_never_changes": with_line("batch", lambda line: line.update(digest="another"), at=6),
    "a_batch_never_changes (the wrong one)": with_line("batch", lambda line: line.update(asked=line["step"] + 1)),
    "every_group_is_consumed_once": repeat_first_group,
    "every_group_is_consumed_once (in a batch)": with_line(
        "batch", lambda line: line["trained"].append(line["trained"][0]), at=0
    ),
    "steps_follow_each_other": lambda found: replace(found, lines=[x for x in found.lines if x.get("step") != 5]),
    "steps_follow_each_other (B)": with_line("batch", lambda line: line["results"].pop(0), at=0),
    "steps_follow_each_other (a commit in another order)": with_line("commit", lambda line: line.update(step=9), at=7),
    "steps_follow_each_other (a commit before its batch)": first_commit_first,
    "steps_follow_each_other (not committed)": without_commit_of_step_5,
    "steps_follow_each_other (behind its checkpoint)": with_line("commit", lambda line: line.update(upto=7), at=5),
    "tables_equal_algorithm_1": with_line("batch", swap_origins, at=8),
    "tables_equal_algorithm_1 (r_tot)": with_line("batch", lambda line: line.update(r_tot=0.123), at=8),
    "tables_equal_algorithm_1 (B_bad)": with_stored(bad=lambda bad: bad[1:]),
    "tables_equal_algorithm_1 (B_high)": with_stored(high=lambda high: [*high, ("fresh-00000000", 12)]),
    "every_request_is_somewhere": with_stored(open=without_one, leased=lambda _: {}, holders=lambda _: {}),
    "every_request_is_somewhere (twice)": with_stored(queued=lambda queued: [*queued, queued[0]]),
    "every_request_is_somewhere (nobody asked)": with_stored(
        open=lambda ids: ids | {"foreign"}, queued=lambda queued: [*queued, "foreign"]
    ),
    "nothing_is_given_up": with_stored(counters=lambda counters: {**counters, "dropped_requests:lease_over": 1}),
    "nothing_is_given_up (unseen)": with_stored(done=lambda done: done | {"fresh-00000999"}),
    "staleness_is_bounded": in_batch_of_step_5(lambda result: result.update(version=result["version"] - 2000)),
    "staleness_is_bounded (from the future)": in_batch_of_step_5(lambda result: result.update(version=13)),
    "leases_return": with_stored(holders=lambda _: {}),
    "leases_return (never)": with_stored(leased=lambda leases: dict.fromkeys(leases, 1 << 53)),
    "nothing_leaks": with_stored(refs=lambda refs: {key: number + 1 for key, number in refs.items()}),
    "nothing_leaks (an evaluation that is over)": with_stored(refs=lambda refs: {**refs, "evaluate-000001-0": 1}),
    "nothing_leaks (of an evaluation that is under way)": with_stored(
        refs=lambda refs: {**refs, "evaluate-000009-0": 1}
    ),
    "nothing_leaks (it came while its evaluation was forgotten)": with_stored(evaluations=lambda _: {}),
    "nothing_leaks (a frame)": with_stored(frames=lambda frames: {**frames, "orphan": "content"}),
}


def test_a_commit_that_is_out_of_order_is_named(sound: Evidence) -> None:
    sentences = violations(WRONG["steps_follow_each_other (a commit in another order)"](sound))
    assert "steps_follow_each_other: step 9 was committed after step 7, with a checkpoint of step 5" in sentences
    assert violations(without_commit_of_step_5(sound))[-1] == (
        "steps_follow_each_other: later batches were asked for, but these were not committed: 5"
    )


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_one_place_is_found(sound: Evidence, name: str) -> None:
    found = {sentence.partition(":")[0] for sentence in violations(WRONG[name](sound))}
    assert name.partition(" ")[0] in found


def test_no_check_is_without_such_a_proof() -> None:
    assert {check.__name__ for check in CHECKS} == {name.partition(" ")[0] for name in WRONG}
