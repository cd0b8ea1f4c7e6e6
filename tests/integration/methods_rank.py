"""One rank that trains two steps with every loss and every part of its own: run as a process by `test_fsdp.py`.

    python -m tests.integration.methods_rank MODEL RUN NUM_RANKS

Prints one JSON line: method -> losses and gradient norms of its mini-batches, and what the step recorded besides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bapo.config.tree import Config
from learner.critic import load_critic
from learner.distributed import World, join, leave
from learner.losses.registry import loss_names
from learner.policy import load_policy
from tests.learner_setup import (
    CPU,
    learner_config,
    loss_settings,
    make_updater,
    random_batch,
    with_experts,
    with_supervised,
)

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    **{name: {"loss": loss_settings(name)} for name in loss_names()},
    "critic": {"loss": {"advantage": "gae", "ratio_mode": "direct"}, "critic": {"lr": 1e-3}},
    "reincarnation": {
        "loss": {"name": "geppo_add", "importance_level": "none", "kl_ref": "convex", "kl_coef": 0.1,
                 "kl_restart_step": 1},
    },
    "supervised": {"supervised": {"lr": 1e-3}},
    "reused": {"loss": {"x3_min_ess": 0.3, "x3_ess_weight": True}},
    "kept": {"loss": {"importance_mode": "mask", "importance_cap": 2.0, "importance_denominator": "kept"}},
}  # fmt: skip


def main(model: str, run: str, num_ranks: str) -> None:
    learner = {"num_ranks": int(num_ranks), "lr": 1e-4, "microbatch_tokens": 80}
    found = {}
    world = join(int(num_ranks), CPU, 60.0)
    for method, sections in METHODS.items():
        config = learner_config(model, **{**sections, "learner": learner})
        found[method] = numbers_of(config, world, Path(run))
    sys.stdout.write(json.dumps(found) + "\n")
    leave(world, together=True)


def numbers_of(config: Config, world: World, run: Path) -> list[float]:
    """Two steps: the second begins with weights, moments and critic that the first has made."""
    path = config.model.path
    policy = load_policy(path, config, world)
    reference = load_policy(path, config, world, frozen=True) if config.loss.needs_reference else None
    critic = load_critic(config, world) if config.loss.advantage == "gae" else None
    updater = make_updater(config, policy, run, reference, critic, world)
    numbers = []
    for step in (1, 2):
        batch = with_experts(random_batch(num_groups=7, step=step))
        report = updater.run(with_supervised(batch, 2) if config.supervised.lr == 1e-3 else batch)
        numbers += [value for result in report.minibatches for value in (result.loss, result.grad_norm, result.kl)]
        numbers += report.facts.values()
    return numbers


if __name__ == "__main__":
    main(*sys.argv[1:])
