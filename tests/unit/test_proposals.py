"""The scheduler with a selector that learns: which prompts it asks for, whatever happens to it on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.methods import SELECTOR
from bapo.algorithms.selectors.base import PromptPool
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError
from bapo.core.success_counts import SuccessCounts, success_counts_of
from bapo.core.types import HardPrompt, Progress, Prompt, RolloutRequest
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.buffer_client import BufferStatus
from bapo.transport.messages import ExtraRound
from services.scheduler.loop import Scheduler
from services.scheduler.plan import FreshPlan
from services.scheduler.proposals import KEEP_EVERY, Proposals, make_proposals
from tests.support.factories import make_prompt
from tests.support.methods import options_for
from tests.unit.test_scheduler import STATUS

PROMPTS = [make_prompt(prompt_id=f"p{i:03d}") for i in range(60)]
LEVEL = {prompt.prompt_id: i % 9 for i, prompt in enumerate(PROMPTS)}
"""Right responses of 8: a policy that does not change."""


def make_config(selector: str = "mopps", num_steps: int = 90, **cadence: int) -> Config:
    """B = 4, L = 3 unless told otherwise."""
    return Config.model_validate(
        {
            "run": {"num_steps": num_steps, "seed": 7},
            "algorithm": {"batch_size": 4, "selector": selector},
            "selector": options_for(SELECTOR, selector, pool_ratio=4.0, decay=0.5),
            "cadence": {"weight_sync_interval": 2, "reevaluation_interval": 2, "max_steps_ahead": 1} | cadence,
            "learner": {"minibatch_size": 2},
        }
    )


class Trained:
    """The buffer of a run whose workers answer at once and always the same, and its learner."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.current = STATUS
        self.fresh: list[RolloutRequest] = []
        self.kept: dict[int, SuccessCounts] = {}
        self.state = (0, 0, b"")
        self.most_kept = 0

    def asked(self, step: int) -> list[str]:
        return [request.prompt.prompt_id for request in self.fresh if request.step == step]

    def train(self) -> None:
        """The learner begins its next step, and its batch is assembled."""
        step = self.current.assembled_step + 1
        assert len(self.asked(step)) == 4, "the step has no prompts: a real run would stand still"
        self.kept[step] = success_counts_of(step, ((name, LEVEL[name], 8) for name in self.asked(step)))
        self.most_kept = max(self.most_kept, len(self.kept))
        self.current = replace(self.current, step=step, assembled_step=step)

    def progress(self, *, seen_step: int | None = None, wait_s: float = 0.0) -> Progress:
        return Progress(step=self.current.step, policy_version=1)

    def status(self) -> BufferStatus:
        return self.current

    def enqueue(
        self, requests: Sequence[RolloutRequest], *, cursor: int | None = None, spares: int | None = None
    ) -> int:
        assert cursor == self.current.cursor + len(requests)
        assert spares is not None
        self.fresh += requests
        self.current = replace(self.current, cursor=cursor, fresh_spares=spares)
        return len(requests)

    def success_counts(self, after: int, *, limit: int = 64) -> list[SuccessCounts]:
        steps = range(after + 1, self.current.assembled_step + 1)
        return [self.kept[step] for step in steps][:limit]

    def selector_state(self) -> tuple[int, int, bytes]:
        return self.state

    def keep_selector_state(self, round_: int, through: int, data: bytes) -> None:
        assert round_ > self.state[0]
        self.state = (round_, through, data)
        self.kept = {step: success_counts for step, success_counts in self.kept.items() if step > through}

    def hard_prompts(self) -> list[tuple[HardPrompt, Prompt]]:
        return []

    def reevaluate(self, step: int, requests: Sequence[RolloutRequest]) -> None:
        assert not requests


def proposals_of(config: Config, buffer: Trained, prompts: Sequence[Prompt] = PROMPTS) -> Proposals:
    pool = PromptPool(prompt_ids=tuple(prompt.prompt_id for prompt in prompts))
    proposals = make_proposals(config, pool, buffer)
    assert proposals is not None
    return proposals


def start(config: Config, buffer: Trained) -> Scheduler:
    """A scheduler that has just begun."""
    proposals = proposals_of(config, buffer)
    plan = FreshPlan(config, PROMPTS, proposals)
    return Scheduler(config, plan, load_composer(config.algorithm), buffer, Telemetry(), proposals=proposals)


def prompts_of_run(config: Config, *, restarts: Sequence[int] = (), looks: int = 1) -> list[list[str]]:
    """Prompts of each step; the scheduler dies before the steps of `restarts`, and looks so often in each step."""
    buffer = Trained(config)
    scheduler = start(config, buffer)
    scheduler.poll(0)
    for step in range(1, config.run.num_steps + 1):
        if step in restarts:
            scheduler = start(config, buffer)
        for _ in range(looks):
            scheduler.poll(buffer.current.step)
        buffer.train()
    return [buffer.asked(step) for step in range(1, config.run.num_steps + 1)]


LEARNING = ["mopps", "kimi"]


@pytest.mark.parametrize("selector", LEARNING)
def test_a_scheduler_that_dies_at_any_moment_asks_for_the_same_prompts(selector: str) -> None:
    config = make_config(selector)
    whole = prompts_of_run(config)
    assert prompts_of_run(config, restarts=[1, 2, 3, KEEP_EVERY - 1, KEEP_EVERY + 1, 40, 41, 80]) == whole
    assert prompts_of_run(config, restarts=range(1, 91)) == whole
    assert prompts_of_run(config, looks=3) == whole, "how late it looks does not matter"
    assert all(len(set(prompts)) == 4 for prompts in whole)


@pytest.mark.parametrize("selector", LEARNING)
def test_a_run_that_goes_back_to_a_snapshot_asks_for_the_same_prompts(selector: str) -> None:
    config = make_config(selector, num_steps=50)
    buffer = Trained(config)
    scheduler = start(config, buffer)
    scheduler.poll(0)
    for _ in range(34):
        buffer.train()
        scheduler.poll(buffer.current.step)
    snapshot = (buffer.current, list(buffer.fresh), dict(buffer.kept), buffer.state)
    for _ in range(6):
        buffer.train()
        scheduler.poll(buffer.current.step)
    buffer.current, buffer.fresh, buffer.kept, buffer.state = snapshot
    for _ in range(16):
        scheduler.poll(buffer.current.step)
        buffer.train()
    assert [buffer.asked(step) for step in range(1, 51)] == prompts_of_run(config)


@pytest.mark.parametrize(("v", "max_steps_ahead"), [(1, 0), (2, 0), (2, 1), (1, 3)])
def test_a_proposal_uses_every_outcome_that_is_v_plus_max_steps_ahead_steps_old_and_none_that_is_younger(
    v: int, max_steps_ahead: int
) -> None:
    config, seen = make_config(weight_sync_interval=v, max_steps_ahead=max_steps_ahead), {}
    buffer = Trained(config)
    proposals = proposals_of(config, buffer)
    plan = FreshPlan(config, PROMPTS, proposals)

    def look() -> None:
        while requests := plan.due(buffer.current):
            buffer.enqueue(requests, cursor=buffer.current.cursor + len(requests), spares=0)
            seen[proposals.newest] = proposals._through

    look()
    for _ in range(12):
        buffer.train()
        look()
    lookahead = v + max_steps_ahead
    assert seen[12] == 12 - lookahead
    assert all(through == max(0, step - lookahead) for step, through in seen.items())


def test_a_group_that_failed_for_good_is_replaced_from_the_newest_proposal_without_waiting_for_an_outcome() -> None:
    config = make_config(weight_sync_interval=1, reevaluation_interval=1, max_steps_ahead=0)
    buffer = Trained(config)
    scheduler = start(config, buffer)
    scheduler.poll(0)
    regular = list(buffer.fresh)
    assert [request.step for request in regular] == [1, 1, 1, 1]
    buffer.current = replace(buffer.current, step=1, fresh_dropped=2)
    scheduler.poll(1)
    spares = buffer.fresh[4:]
    assert [(spare.request_id, spare.step) for spare in spares] == [("fresh-00000004", 1), ("fresh-00000005", 1)]
    assert not {spare.prompt.prompt_id for spare in spares} & {request.prompt.prompt_id for request in regular}
    buffer.fresh = [*regular[:2], *spares]
    buffer.train()
    scheduler.poll(1)
    assert [request.request_id for request in buffer.fresh[4:]] == [f"fresh-{c:08d}" for c in range(6, 10)]
    assert {request.step for request in buffer.fresh[4:]} == {2}


def test_further_rounds_of_a_step_take_the_next_prompts_of_its_proposal() -> None:
    config = make_config()
    buffer = Trained(config)
    proposals = proposals_of(config, buffer)
    plan = FreshPlan(config, PROMPTS, proposals)
    regular = [request.prompt.prompt_id for request in plan.due(buffer.current) if request.step == 1]
    rounds = [
        [request.prompt.prompt_id for request in plan.extra_requests(ExtraRound(step=1, round=r, first=first, size=4))]
        for r, first in ((2, 0), (3, 4), (4, 8))
    ]
    ranking = proposals.ranking(1)
    assert ranking is not None
    assert [*regular, *rounds[0], *rounds[1], *rounds[2]] == [PROMPTS[i].prompt_id for i in ranking[:16]]


def test_a_step_with_fewer_fresh_groups_takes_as_many_of_its_proposal() -> None:
    """B = 4, of which half is replayed from step 3 on."""
    config = make_config("mopps")
    algorithm = config.algorithm.model_copy(update={"composer": "remix", "options": {"share": 0.5, "first_step": 3}})
    config = config.model_copy(update={"algorithm": algorithm})
    buffer = Trained(config)
    proposals = proposals_of(config, buffer)
    requests = FreshPlan(config, PROMPTS, proposals).due(buffer.current)
    asked = {h: [r.prompt.prompt_id for r in requests if r.step == h] for h in (1, 2, 3)}
    for h, size in ((1, 4), (2, 4), (3, 2)):
        ranking = proposals.ranking(h)
        assert ranking is not None
        assert asked[h] == [PROMPTS[i].prompt_id for i in ranking[:size]]


def test_another_selector_over_the_same_buffer_is_refused() -> None:
    buffer = Trained(make_config("mopps"))
    scheduler = start(buffer.config, buffer)
    scheduler.poll(0)
    for _ in range(40):
        buffer.train()
        scheduler.poll(buffer.current.step)
    with pytest.raises(ConfigError, match=r"uses selector 'mopps', but algorithm.selector is 'kimi'"):
        proposals_of(make_config("kimi"), buffer).ranking(41)


def test_a_round_whose_outcomes_do_not_exist_yet_has_no_prompts() -> None:
    buffer = Trained(make_config())
    start(buffer.config, buffer).poll(0)
    proposals = proposals_of(buffer.config, buffer)
    assert proposals.ranking(3) is not None
    assert proposals.ranking(4) is None
    buffer.train()
    assert proposals.ranking(4) is not None


def test_the_uniform_order_needs_no_proposals() -> None:
    config = make_config("uniform")
    pool = PromptPool(prompt_ids=("a", "b"))
    assert make_proposals(config, pool, Trained(config)) is None


def test_a_selector_that_is_switched_on_in_the_middle_of_a_run_is_refused() -> None:
    buffer = Trained(make_config())
    start(buffer.config, buffer).poll(0)
    buffer.train()
    buffer.kept.clear()
    buffer.success_counts = lambda after, limit=64: []  # type: ignore[method-assign]
    with pytest.raises(ContractError, match="batch 1 "):
        proposals_of(buffer.config, buffer).ranking(4)


def test_outcomes_of_prompts_that_the_data_do_not_have_are_refused() -> None:
    buffer = Trained(make_config())
    start(buffer.config, buffer).poll(0)
    buffer.train()
    with pytest.raises(ConfigError, match="training split"):
        proposals_of(buffer.config, buffer, [make_prompt(prompt_id=f"new{i}") for i in range(9)]).ranking(4)
