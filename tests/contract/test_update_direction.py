"""A real update of every preset raises a right response over a wrong one: a preset whose loss, advantage, ratio mode or
settings point the wrong way fails here. Found in the folder, so that a new preset is tested without an edit here.

The batch is hand-made: two groups of one prompt, one fresh and one reused, in which A is right and B is wrong, about as
likely for who sampled them as for the model. So log pi(A) - log pi(B) can only rise.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bapo.config.layers import preset_names
from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.core.types import Batch, BatchEntry, Group, Origin
from tests.support.factories import make_batch, make_group
from tests.support.learner import make_updater, tiny_policy, true_logprobs

PROMPT = np.array([30, 10, 20], dtype=np.int32)
RESPONSES = {
    "A": [40, 41, 42, 43],  # right
    "B": [150, 151, 152, 154],  # wrong
    "C": [60, 61, 62, 63],  # right, of an earlier step
    "D": [70, 71, 72, 73],  # wrong, of an earlier step
}
RIGHT = ("A", "C", "E")
LAG = np.array([0.05, -0.1, 0.1, -0.05], dtype=np.float32)
"""log alpha - log pi of the tokens of a response, in nats: engine and learner never agree to the last digit."""

SHAPES = {
    "repo": ("ABCD", "CD"),  # fresh rows, and stored ones with a baseline of their own
    "arpo": ("CB", "C"),  # a group that failed gets a stored success as its first row
    "luffy": ("ABE", ""),  # E is an expert's row, under the same baseline
}
"""Composer -> rows of a group, and which of them were sampled for an earlier batch."""
CASES = [
    *((name, ()) for name in preset_names()),
    ("areal", ("--loss.ratio_mode=interpolated",)),
    ("bapo", ("--loss.name=balanced_clip", "--loss.dual_clip=3.0")),
]


def small(name: str, path: Path, overrides: tuple[str, ...]) -> Config:
    """The preset, with one group per optimizer step of a size that a tiny model feels."""
    sizes = {
        "run.num_steps": 9, "model.path": path, "model.dtype": "float32", "rollout.max_prompt_tokens": 4,
        "rollout.max_response_tokens": 8, "learner.minibatch_size": 1, "learner.microbatch_tokens": 64,
        "learner.device": "cpu", "learner.lr": 1e-4, "supervised.lr": 1e-4, "learner.warmup_steps": 0,
    }  # fmt: skip
    shaping = ["--shaping.overlong_cache=2"] if load_config([name], []).shaping.overlong_cache else []
    given = [token for key, value in sizes.items() for token in (f"--{key}", str(value))]
    return load_config([name], [*given, *shaping, *overrides])


def group_of(model: PreTrainedModel, rows: str, expert: list[int], *, version: int) -> Group:
    tokens = [np.array(expert if row == "E" else RESPONSES[row], dtype=np.int32) for row in rows]
    sampled = [true_logprobs(model, PROMPT, own) + LAG for own in tokens]
    sampled = [np.zeros(4) if row == "E" else own for row, own in zip(rows, sampled, strict=True)]
    group = make_group(
        rewards=[float(row in RIGHT) for row in rows], group_id=f"{rows}@{version}", version=version,
        lengths=[4] * len(rows), experts=[place for place, row in enumerate(rows) if row == "E"],
    )  # fmt: skip
    return dataclasses.replace(
        group,
        prompt_token_ids=PROMPT,
        token_ids=np.concatenate(tokens),
        rollout_logprobs=np.concatenate(sampled).astype(np.float32),
    )


def batch_of(config: Config, model: PreTrainedModel, expert: list[int]) -> Batch:
    """Step 9: a fresh group, one that was sampled three versions ago, and for ReLIFT an expert's solution."""
    rows, earlier = SHAPES.get(config.algorithm.composer, ("AB", ""))
    fresh, old = (group_of(model, rows, expert, version=version) for version in (9, 6))
    replayed = np.array([row in earlier for row in rows])
    entries = [
        BatchEntry(origin=Origin.X1, group=fresh, replayed=replayed),
        BatchEntry(origin=Origin.X3, group=old, replayed=replayed if earlier else None),
    ]
    if config.algorithm.composer == "relift":
        entries.append(BatchEntry(origin=Origin.X3, group=group_of(model, "E", expert, version=9), kind="sft"))
    return dataclasses.replace(make_batch(groups=[fresh], step=9), entries=tuple(entries))


def most_likely(model: PreTrainedModel) -> list[int]:
    """Four tokens that an expert could have written: on unlikely ones f(p) of LUFFY hardly has a gradient."""
    ids = PROMPT.tolist()
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def log_pi(model: PreTrainedModel, tokens: list[int]) -> float:
    """Of a whole response."""
    return float(true_logprobs(model, PROMPT, np.array(tokens)).sum())


@pytest.mark.parametrize(("name", "overrides"), CASES, ids=["-".join((n, *o)).replace("--", "") for n, o in CASES])
def test_a_right_response_gains_on_a_wrong_one(
    name: str, overrides: tuple[str, ...], model_path: Path, tmp_path: Path
) -> None:
    config = small(name, model_path, overrides)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expert = most_likely(model)
    batch, policy = batch_of(config, model, expert), tiny_policy(config)
    responses = {**RESPONSES, "E": expert}
    before = {row: log_pi(model, tokens) for row, tokens in responses.items()}
    report = make_updater(config, policy, tmp_path).run(batch)
    assert len(report.minibatches) >= 2
    model.load_state_dict(policy.model.state_dict())
    gain = {row: log_pi(model, tokens) - before[row] for row, tokens in responses.items()}
    trained = SHAPES.get(config.algorithm.composer, ("AB", ""))[0]
    right, wrong = ([gain[row] for row in trained if (row in RIGHT) is kind] for kind in (True, False))
    assert min(right) > max(wrong), gain
    if config.algorithm.num_experts:
        assert gain["E"] > 0, "what an expert wrote becomes more likely, not only less unlikely than B"
