"""Algorithm 1 of the paper as one plain loop: no services, no composer, no wire; only counts of right responses.

Tests compare the whole pipeline with it. It shares with the code under test the scripted policy (the environment),
the data order and the convention of draws (seed, step, purpose); every rule of the algorithm is written again here,
in integers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bapo.algorithms.randomness import rng_for
from bapo.algorithms.selectors.uniform import epoch_order
from bapo.config.tree import Config
from bapo.core.types import Prompt, Purpose, RolloutRequest
from bapo.tasks.registry import task_of
from rollout_server.engines.scripted import make_policy


@dataclass(frozen=True)
class PlainBatch:
    """Prompt ids of one step, sorted: an order within a batch has no meaning."""

    x1: list[str]
    x2: list[str]
    x3: list[str]
    r_tot: float


def algorithm_1(config: Config) -> list[PlainBatch]:
    """The batches of steps 1..T under the paper's lag and order (max_steps_ahead 0, re-evaluation waited for)."""
    environment = Environment(config)
    size, group = config.algorithm.batch_size, config.algorithm.group_size
    c1, capacity = math.floor(config.algorithm.c1 * group), config.algorithm.capacity
    alpha, bad, high, batches = 1, {}, [], []
    for t in range(1, config.run.num_steps + 1):
        if t == 1 or t % config.cadence.weight_sync_interval == 0:
            alpha = t
        fresh = {p: environment.count(p, Purpose.FRESH, t, alpha) for p in environment.prompts_of(t)}
        r_tot = sum(fresh.values()) / (size * group)
        low, high_edge = window(config, r_tot)
        x1 = [p for p, k in fresh.items() if 1 <= k <= group - 1]

        asked: list[str] = []
        if t % config.cadence.reevaluation_interval == 0:
            candidates = [p for p in bad if p not in fresh]
            asked = draw(candidates, config.algorithm.most_reevaluated, rng_for(config.run.seed, t, "reevaluate"))
        again = {p: environment.count(p, Purpose.REEVALUATE, t, t) for p in asked}
        bad = {p: birth for p, birth in bad.items() if again.get(p) != group}
        improved = [p for p in asked if c1 < again[p] < group and p not in x1]
        x2 = draw(improved, size - len(x1), rng_for(config.run.seed, t, "x2"))
        bad = {p: birth for p, birth in bad.items() if p not in x2}

        reusable = [p for p, k, birth in high if t - 3 <= birth <= t - 1 and low <= k <= high_edge and p not in x1 + x2]
        x3 = draw(reusable, size - len(x1) - len(x2), rng_for(config.run.seed, t, "x3"))
        batches.append(PlainBatch(sorted(x1), sorted(x2), sorted(x3), r_tot))

        for p, k in fresh.items():
            if k <= c1:
                bad.pop(p, None)
                bad[p] = t
            if low <= k <= high_edge:
                high = [entry for entry in high if entry[0] != p] + [(p, k, t)]
        bad = dict(list(bad.items())[-capacity:])
        high = [entry for entry in high if entry[2] >= t - 2]
    return batches


def window(config: Config, r_tot: float) -> tuple[int, int]:
    """Eq. 8 as the counts k that lie inside [c2, c3]."""
    c2, c3 = (r_tot * (edge[1] - edge[0]) + edge[0] for edge in (config.algorithm.c2_range, config.algorithm.c3_range))
    group = config.algorithm.group_size
    return math.ceil(c2 * group - 1e-9), math.floor(c3 * group + 1e-9)


def draw(items: Sequence[str], most: int, rng: random.Random) -> list[str]:
    """Uniform without replacement, in the order of `items`."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in sorted(rng.sample(range(len(items)), max(0, most)))]


class Environment:
    """The scripted policy and the verifier, called directly."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._task = task_of(config)
        self._policy = make_policy(config)
        self._prompts = self._task.prompts("train")
        self._by_id: dict[str, Prompt] = {prompt.prompt_id: prompt for prompt in self._prompts}

    def prompts_of(self, step: int) -> list[str]:
        """P_t: prompt ids in data order."""
        size, num = self._config.algorithm.batch_size, len(self._prompts)
        per_epoch = num // size
        epoch, batch = divmod(step - 1, per_epoch)
        order = epoch_order(self._config.run.seed, epoch, num)
        return [self._prompts[i].prompt_id for i in order[batch * size : (batch + 1) * size]]

    def count(self, prompt_id: str, purpose: Purpose, step: int, version: int) -> int:
        """k: right responses of one group."""
        prompt = self._by_id[prompt_id]
        request = RolloutRequest(
            request_id="plain",
            prompt=prompt,
            group_size=self._config.algorithm.group_size,
            purpose=purpose,
            step=step,
            min_version=version,
        )
        responses = self._policy.sample(request, version)
        return sum(int(self._task.reward(prompt, response.text or "")) for response in responses)
