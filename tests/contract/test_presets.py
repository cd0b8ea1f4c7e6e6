"""What every preset promises: found in the folder, so that a new file is tested without an edit here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from bapo.algorithms.composers.registry import load_composer
from bapo.config.check import is_section
from bapo.config.layers import Key, dotted, flatten, preset_names
from bapo.config.load import dump_toml, load_config, load_resolved
from bapo.config.preset_list import PRESET_GROUPS, about_preset
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from learner.checkpoint import complete_steps
from learner.losses.base import load_loss
from tests.support.learner import FakeBuffer, FakeFleet, FakeRecords, make_test_learner, random_batch, with_experts


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_names_a_composer_and_a_loss_and_says_where_it_comes_from(name: str) -> None:
    config = load_config([name], [])
    load_composer(config.algorithm)
    load_loss(config.loss)
    assert config.preset == name
    assert len(about_preset(name)) > 40


@pytest.mark.parametrize("name", preset_names())
def test_the_learner_of_a_preset_trains_publishes_and_saves(name: str, model_path: Path, tmp_path: Path) -> None:
    sizes = {
        "run.num_steps": 2, "model.path": model_path, "model.dtype": "float32", "algorithm.batch_size": 8,
        "algorithm.group_size": 4, "rollout.max_prompt_tokens": 12, "rollout.max_response_tokens": 24,
        "learner.minibatch_size": 4, "learner.microbatch_tokens": 128, "learner.device": "cpu", "learner.lr": 1e-4,
        "learner.warmup_steps": 0, "shaping.overlong_cache": 8,
    }  # fmt: skip
    config = load_config([name], [token for key, value in sizes.items() for token in (f"--{key}", str(value))])
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)  # its log-probs are alpha's
    fleet, buffer = FakeFleet(), FakeBuffer(lambda step: with_experts(random_batch(model, step=step)))
    learner = make_test_learner(config, tmp_path, buffer=buffer, fleet=fleet)
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    learner.run(1)
    assert isinstance(learner.records, FakeRecords)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in learner.records.rows)
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    assert fleet.updates[-1].version == 3
    assert complete_steps(tmp_path / "checkpoints") == [2]


@pytest.mark.parametrize("name", preset_names())
def test_a_null_over_a_preset_survives_the_resolved_file(name: str, tmp_path: Path) -> None:
    defaults, path = dict(flatten(Config().model_dump())), tmp_path / "config.toml"
    for key, value in flatten(load_config([name], []).model_dump()):
        if value in (None, defaults.get(key)) or (key not in NULLABLE and "options" not in key):
            continue
        try:
            config = load_config([name], [f"--{dotted(key)}=null"])
        except ConfigError:  # with the other settings of the preset
            continue
        path.write_text(dump_toml(config))
        assert load_config([path], []) == config, key  # bapo train RUN/config.toml
        assert load_resolved(path) == config, key


def nullable_keys(section: type[BaseModel], at: Key = ()) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        if NoneType in get_args(field.annotation):
            yield (*at, name)
        elif is_section(field.annotation):
            yield from nullable_keys(field.annotation, (*at, name))


NULLABLE = set(nullable_keys(Config)) - {("preset",)}


def test_every_preset_is_in_one_group() -> None:
    assert sorted(name for names in PRESET_GROUPS.values() for name in names) == list(preset_names())
