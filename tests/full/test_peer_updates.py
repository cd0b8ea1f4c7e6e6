"""The preset `trl-grpo` makes TRL's updates: the same responses and rewards, step by step the same gradient norm, and
the same weights at the end.

Needs TRL in an environment of its own:

    python3.11 -m venv .trl && .trl/bin/pip install -r benchmarks/peer_trl/requirements.txt
    BAPO_TRL_PYTHON=.trl/bin/python make test-full OPTIONS="tests/full/test_peer_updates.py"
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.core.types import Batch, Group
from tests.support.factories import make_batch, make_group
from tests.support.learner import make_updater, tiny_policy, true_logprobs

PYTHON = os.environ.get("BAPO_TRL_PYTHON")
MODEL = "models/countdown-tiny"
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 4, 3, 8
LR = 1e-3
REWARDS = ([1, 0, 0, 0, 0, 0, 0, 0], [0.1, 0, 0.1, 1, 0.5, 0, 0, 0.1], [1, 1, 1, 1, 1, 1, 1, 1])
"""One success, partial credit, and a group without an advantage, whose tokens still count in the mean."""


def drawn(seed: int) -> list[list[dict[str, Any]]]:
    """[steps][groups] of random tokens, responses of 1 to 20."""
    rng = np.random.default_rng(seed)
    return [
        [
            {
                "prompt": rng.integers(5, 40, rng.integers(3, 9)).tolist(),
                "completions": [rng.integers(5, 40, rng.integers(1, 21)).tolist() for _ in range(GROUP_SIZE)],
                "rewards": [float(value) for value in rng.permutation(REWARDS[group])],
            }
            for group in range(NUM_GROUPS)
        ]
        for _ in range(NUM_STEPS)
    ]


def as_group(drawn_group: dict[str, Any], number: int, step: int, model: Any) -> Group:
    """Sampled by `model`, the policy of this step."""
    prompt = np.array(drawn_group["prompt"], dtype=np.int32)
    completions = [np.array(ids, dtype=np.int32) for ids in drawn_group["completions"]]
    group = make_group(
        rewards=drawn_group["rewards"], group_id=f"{step}-{number}", step=step, version=step,
        lengths=[len(ids) for ids in completions],
    )  # fmt: skip
    sampled = [true_logprobs(model, prompt, ids) for ids in completions]
    return dataclasses.replace(
        group,
        prompt_token_ids=prompt,
        token_ids=np.concatenate(completions),
        rollout_logprobs=np.concatenate(sampled).astype(np.float32),
    )


def our_updates(
    steps: list[list[dict[str, Any]]], config: Config, tmp_path: Path
) -> tuple[list[float], list[float], Any]:
    """Rates, gradient norms and the trained model."""
    model, policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), tiny_policy(config)
    updater = make_updater(config, policy, tmp_path)
    rates, norms = [], []
    for step, groups in enumerate(steps, start=1):
        batch: Batch = make_batch(
            groups=[as_group(group, number, step, model) for number, group in enumerate(groups)], step=step
        )
        report = updater.run(batch)
        rates.append(report.lr)
        norms += [result.grad_norm for result in report.minibatches]
        model.load_state_dict(policy.model.state_dict())
    return rates, norms, model


@pytest.mark.skipif(PYTHON is None, reason="BAPO_TRL_PYTHON is not set: see the first lines of this file")
def test_trl_grpo_makes_the_updates_of_trl(tmp_path: Path) -> None:
    steps, trained = drawn(seed=1), tmp_path / "trained"
    work, found = tmp_path / "work.json", tmp_path / "found.json"
    work.write_text(json.dumps({"model": MODEL, "lr": LR, "steps": steps, "trained": str(trained)}))
    subprocess.run([str(PYTHON), "tests/support/peers/trl_updates.py", str(work), str(found)], check=True, timeout=500)
    sizes = {
        "run.num_steps": NUM_STEPS, "model.path": MODEL, "model.dtype": "float32", "algorithm.batch_size": NUM_GROUPS,
        "rollout.max_prompt_tokens": 32, "rollout.max_response_tokens": 64, "learner.device": "cpu", "learner.lr": LR,
    }  # fmt: skip
    config = load_config(["trl-grpo"], [token for key, value in sizes.items() for token in (f"--{key}", str(value))])
    rates, norms, model = our_updates(steps, config, tmp_path)
    theirs = json.loads(found.read_text())
    assert rates == pytest.approx(theirs["lr"])
    assert norms == pytest.approx(theirs["grad_norm"], rel=1e-3)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    other = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).state_dict()
    moved = sum(float((other[name] - base[name]).square().sum()) for name in base) ** 0.5
    apart = sum(float((other[name] - mine).square().sum()) for name, mine in model.state_dict().items()) ** 0.5
    assert moved > 0.1
    assert apart < 0.02 * moved
