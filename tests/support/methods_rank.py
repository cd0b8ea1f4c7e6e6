"""One rank that trains two steps with the loss and the rewards of every preset: run as a process by `test_fsdp.py`.

    python -m tests.support.methods_rank MODEL RUN NUM_RANKS

Prints one JSON line: method -> losses, gradient norms and KL of its mini-batches, and what the step recorded besides.
The ranks join once for all methods.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bapo.algorithms.methods import COMPOSER
from bapo.config.layers import preset_names
from bapo.config.learner import LearnerConfig
from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.core.types import Batch
from learner.distributed.world import World, join, leave
from learner.model.policy import load_policy
from tests.support.learner import (
    CPU,
    learner_config,
    make_updater,
    random_batch,
    with_experts,
    with_strangers,
    with_supervised,
    with_truncated,
)

Sections = dict[str, dict[str, Any]]

NEARER: Sections = {
    "loss": {"kl_restart_step": 1, "importance_veto": 0.2},
    "shaping": {"overlong_cache": 8, "length_warmup_steps": 1},
}
"""What replaces a preset's own steps, tokens and bound where it has them, so that two steps of 24 tokens reach them."""

IN_NO_PRESET: dict[str, tuple[str, Sections]] = {
    "two_term": ("repo", {"loss": {"aggregation": "two_term"}}),
    "on_policy": ("luffy", {"loss": {"advantage_pool": "on_policy"}}),
    "overlong_filter": ("dapo", {"shaping": {"overlong_filter": True, "overlong_factor": 0.5}}),
    "uncapped": ("tis-sequence", {"loss": {"importance_cap": None}}),
    "balanced_code": ("balanced-clip", {"loss": {"options": {"metric": "code", "target": 1.0}}}),
    "balanced_gradient": ("balanced-clip", {"loss": {"options": {"metric": "gradient"}}}),
    "bapo_balanced": ("bapo", {"loss": {"name": "balanced_clip", "dual_clip": 3.0}}),
    "k1": ("bapo", {"loss": {"kl_estimator": "k1", "kl_coef": 0.1}}),
    "k3": ("bapo", {"loss": {"kl_estimator": "k3", "kl_coef": 0.1}}),
    "is_rev": ("bapo", {"loss": {"kl_estimator": "is_rev", "kl_coef": 0.1}}),
}
"""Name -> a preset, and the choices of its sections that no preset makes."""


def sections_of(preset: str) -> Sections:
    """The loss of a preset, the rewards that it sees, and a composer that adds to the update."""
    config = load_config([preset], [])
    found = {"loss": config.loss.model_dump(), "shaping": config.shaping.model_dump()}
    if COMPOSER.find(config.algorithm.composer).update_hooks:
        found["algorithm"] = config.algorithm.model_dump(include={"composer", "options"})
    for section, nearer in NEARER.items():
        found[section] |= {key: value for key, value in nearer.items() if found[section][key]}
    return found


def all_methods() -> dict[str, Sections]:
    """Every pair of loss and rewards that a preset has, once, under the first name that has it; then the rest."""
    found: dict[str, Sections] = {}
    for name in preset_names():
        if (sections := sections_of(name)) not in found.values():
            found[name] = sections
    for name, (preset, changes) in IN_NO_PRESET.items():
        found[name] = {key: fields | changes.get(key, {}) for key, fields in sections_of(preset).items()}
    return found


METHODS = all_methods()


def main(model_path: str, run: str, num_ranks: str) -> None:
    learner = {"num_ranks": int(num_ranks), "lr": 1e-4, "microbatch_tokens": 100}
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)  # its log-probs are alpha's
    batches = {with_sft: [mixed_batch(model, step, with_sft=with_sft) for step in (1, 2)] for with_sft in (False, True)}
    found = {}
    world = join(LearnerConfig(num_ranks=int(num_ranks)), CPU, 60.0)
    for method, sections in METHODS.items():
        config = learner_config(model_path, **sections, learner=learner)
        found[method] = numbers_of(config, world, Path(run), batches)
    sys.stdout.write(json.dumps(found) + "\n")
    leave(world, together=True)


def mixed_batch(model: PreTrainedModel, step: int, *, with_sft: bool) -> Batch:
    """Two mini-batches of three: all origins, rows of experts, replayed and truncated ones, perhaps an entry of kind
    sft."""
    batch = with_truncated(with_experts(with_strangers(random_batch(model, num_groups=6, step=step), 0, 4)))
    return with_supervised(batch, 1) if with_sft else batch


def numbers_of(config: Config, world: World, run: Path, batches: dict[bool, list[Batch]]) -> list[float]:
    """Two steps: the second begins with weights, moments and critic that the first has made."""
    path = config.model.path
    policy = load_policy(path, config, world)
    updater = make_updater(config, policy, run, world)
    numbers = []
    for batch in batches[any(hook.trains_sft for hook in updater.hooks)]:
        report = updater.run(batch)
        numbers += [value for result in report.minibatches for value in (result.loss, result.grad_norm, result.kl)]
        numbers += report.facts.values()
    return numbers


if __name__ == "__main__":
    main(*sys.argv[1:])
