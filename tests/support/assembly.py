"""A service of B = 2, with a composer that is small enough to check by eye."""

from __future__ import annotations

import itertools

from bapo.algorithms.composer import AssemblyView, Composer, Decision, Rng, whole_groups
from bapo.algorithms.settings import AlgorithmConfig
from bapo.config.tree import Config
from bapo.core.types import HardPrompt, RolloutRequest
from bapo.runtime.metrics.server import Telemetry
from buffer_service.assembly import Assembler, Wait, in_step_order
from buffer_service.metrics import BufferMetrics
from buffer_service.service import BufferService
from buffer_service.state import Assembly
from buffer_service.store.redis.connection import RedisLink
from tests.support.buffer import PuttingRedisStore, answer, incoming
from tests.support.factories import make_request

RUNS = itertools.count()


def assemble(assembler: Assembler, step: int) -> Assembly | Wait | None:
    """Look at the step, and assemble it if that is possible."""
    return assembler.assemble(assembler.read_step(step))


class KeepsAll(Composer):
    """x1 = fresh groups with any reward, x2 = all re-evaluated, x3 = B_high while there is room; all wrong is hard."""

    def __init__(self) -> None:
        super().__init__(AlgorithmConfig(batch_size=2))
        self.views: list[AssemblyView] = []
        self.draws: list[float] = []

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        self.views.append(view)
        self.draws.append(rng("x3").random())
        x1 = [stat for stat in view.fresh if stat.reward_sum > 0]
        x2 = [stat for stat in view.reevaluated if stat.reward_sum > 0]
        x3 = list(view.high)[: len(view.fresh) - len(x1) - len(x2)]
        wrong = [stat for stat in view.fresh if stat.reward_sum == 0]
        left = {stat.prompt_id for stat in x2}
        new = tuple(HardPrompt(prompt_id=stat.prompt_id, birth=view.step, mu=0.0) for stat in wrong)
        return Decision(
            items=whole_groups(*((stat.group_id for stat in part) for part in (x1, x2, x3))),
            r_tot=sum(stat.mu for stat in view.fresh) / len(view.fresh),
            facts={"c2": 0.25, "c3": 0.5},
            bad=tuple(entry for entry in view.bad if entry.prompt_id not in left) + new,
            high=tuple(stat.born(view.step) for stat in x1[:1]),
            reasons={stat.group_id: "said" for stat in (*view.fresh, *view.reevaluated, *x3)},
        )

    def hard_prompts_to_ask(self, bad: object, step: int, excluded: object, rng: Rng) -> tuple[str, ...]:
        raise AssertionError("the buffer never asks")


class Setup:
    """A service of B = 2 for a run of its own, and a way to fill its store."""

    def __init__(
        self,
        redis_url: str,
        composer: KeepsAll | None = None,
        store: type[PuttingRedisStore] = PuttingRedisStore,
        **cadence: object,
    ) -> None:
        self.composer = composer or KeepsAll()
        self.config = Config.model_validate(
            {
                "algorithm": {"batch_size": 2},
                "learner": {"minibatch_size": 2},
                "cadence": {"weight_sync_interval": 2, "reevaluation_interval": 2, "max_steps_ahead": 0, **cadence},
                "buffer": {"max_failures_in_a_row": 2},
            }
        )
        run, ordered = f"run-{next(RUNS)}", in_step_order(self.config)
        self.store = store(RedisLink(redis_url), run, lease_s=60, max_attempts=9, in_step_order=ordered)
        self.metrics = BufferMetrics(Telemetry(), self.config)
        self.service = BufferService(self.store, self.composer, self.config, self.metrics)

    def add(self, *requests: RolloutRequest, rewards: str = "11000000", version: int = 1) -> None:
        self.store.enqueue(requests, cursor=None)
        assert self.store.push([incoming(answer(r, rewards, version)) for r in requests]) == ["stored"] * len(requests)

    def fill(self, *names: str, step: int = 1, rewards: str = "11000000", version: int = 1) -> None:
        for name in names:
            self.add(make_request(prompt_id=name, step=step), rewards=rewards, version=version)


def with_a_stale_group(redis_url: str) -> Setup:
    """Step 4 has dropped `g-old` as too old and has both of its groups, `g-wrong` and what was asked for instead."""
    setup = Setup(redis_url)
    for step in (1, 2, 3):
        setup.fill(f"a{step}", f"b{step}", step=step, version=step)
        setup.service.batch(step)
    setup.fill("old", step=4, version=1)
    setup.fill("wrong", step=4, version=4, rewards="00000000")
    assert setup.service.batch(4) is None
    (again,) = setup.service.claim("w", 9, 4)
    setup.store.push([incoming(answer(again, version=4))])
    return setup
