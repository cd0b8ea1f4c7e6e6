"""An adapter in the real vLLM: merged there, it gives the learner's log-probs; an old one is noticed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo.config.tree import Config
from bapo.core.errors import WeightMismatchError
from bapo.runtime.adapter_file import Adapter, base_digest, metadata_of
from learner.canary import make_canary
from learner.distributed.sharding import gather
from learner.model.file_format import file_tensors
from learner.model.lora import kept_weights
from learner.model.policy import Policy
from rollout_server.engines import vllm
from tests.full.test_vllm_probe import loads_instead
from tests.support.learner import tiny_policy
from tests.support.lora import KINDS, TOKENS, lora_config, step, write_model

CASES = [("Llama", "float32", "all"), ("Qwen2, biases, tied", "bfloat16", ["q_proj", "v_proj"])]
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}
"""Largest difference in nats."""


class Pair:
    """A learner and an engine of the same config."""

    def __init__(self, config: Config, engine: Any, folder: Path) -> None:
        self.config, self.engine, self.folder, self.version = config, engine, folder, 1
        self.policy: Policy = tiny_policy(config)

    def publish(self) -> Path:
        lora, model = self.config.model.lora, self.policy.model
        assert lora is not None
        self.version += 1
        path = self.folder / f"{self.version}.safetensors"
        tensors = file_tensors(model, gather(kept_weights(model), getattr(torch, self.config.model.dtype)))
        save_file(tensors, path, metadata=metadata_of(lora, base_digest(self.config.model.path)))
        return path

    def load(self, path: Path) -> None:
        self.engine.load_weights(str(path), self.version)

    def difference(self) -> float:
        """Largest, in nats."""
        canary = make_canary(self.policy, tuple(TOKENS), self.config.model.dtype)
        found: float = np.abs(self.engine.logprobs(TOKENS) - np.array(canary.logprobs)).max()
        return found


@pytest.fixture(scope="module", params=CASES, ids=[case[0] for case in CASES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind, dtype, targets = request.param
    folder = tmp_path_factory.mktemp("lora")
    config = lora_config(write_model(folder / "model", KINDS[kind][0]), dtype, targets=targets)
    os.environ.update(vllm.ENVIRONMENT)
    engine = vllm.make_engine(config)
    yield Pair(config, engine, folder)
    engine.close()


def test_the_engine_has_the_log_probs_of_the_learner_after_every_update(pair: Pair) -> None:
    """Also after twenty merges: none is made on top of another."""
    limit = TOLERANCE[pair.config.model.dtype]
    for number in range(20):
        pair.load(pair.publish())
        assert pair.difference() < limit
        step(pair.policy, 0.05, seed=number)
        assert number or pair.difference() > limit  # the learner is ahead now


@pytest.mark.parametrize("size", [1e-3, 1e-5])
def test_an_engine_that_keeps_the_old_adapter_is_noticed(
    pair: Pair, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(pair.policy, 0.1, seed=1)
    pair.load(pair.publish())
    lora = pair.config.model.lora
    assert lora is not None
    before = Adapter.open(str(pair.folder / f"{pair.version}.safetensors"), pair.config.model.path, lora)
    old = dict(before.tensors())
    step(pair.policy, size, seed=2)
    newer = pair.publish()
    with monkeypatch.context() as fault:
        loads_instead(fault, old, "q_proj.weight")
        with pytest.raises(WeightMismatchError):
            pair.load(newer)
    pair.load(newer)


def test_a_file_of_whole_weights_is_refused_and_the_engine_keeps_its_adapter(pair: Pair) -> None:
    pair.load(pair.publish())
    before = pair.engine.logprobs(TOKENS)
    whole = pair.folder / "whole.safetensors"
    save_file(load_file(Path(pair.config.model.path) / "model.safetensors"), whole)
    with pytest.raises(WeightMismatchError, match="not an adapter"):
        pair.load(whole)
    assert np.array_equal(pair.engine.logprobs(TOKENS), before)
