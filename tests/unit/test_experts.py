"""A mixture of experts: one parameter for the experts of a layer, one tensor per expert in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.checkpoint import open_checkpoint
from learner.diagnostics.utilization import model_flops
from learner.export import export_model
from learner.model.file_format import converts_singly
from learner.model.policy import empty_model
from tests.support.learner import FakeBuffer, FakeFleet, learner_config, make_test_learner, random_batch, tiny_policy
from tests.support.tiny_experts import NUM_EXPERTS, NUM_LAYERS, NUM_USED, write_tiny_experts
from tests.support.tiny_model import VOCAB_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "model"
    write_tiny_experts(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_have_the_names_of_the_models_file_whether_sharded_or_not(
    dtype: str, folder: Path, tmp_path: Path
) -> None:
    fleet = FakeFleet()
    config = learner_config(folder, model={"dtype": dtype}, run={"num_steps": 1})
    learner = make_test_learner(config, tmp_path, buffer=FakeBuffer(lambda step: random_batch(step=step)), fleet=fleet)
    learner.publisher.publish(1)
    learner.publisher.wait()
    read, published = load_file(folder / "model.safetensors"), load_file(fleet.updates[0].path)
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in published
    assert published.keys() == read.keys()
    assert all(torch.equal(published[name], read[name].to(getattr(torch, dtype))) for name in read)


def test_a_trained_model_is_exported_as_it_was_saved_before(folder: Path, tmp_path: Path) -> None:
    config = learner_config(folder, run={"num_steps": 2})
    learner = make_test_learner(
        config, tmp_path, buffer=FakeBuffer(lambda step: random_batch(step=step)), fleet=FakeFleet()
    )
    learner.run(1)
    out = tmp_path / "exported"
    export_model(open_checkpoint(tmp_path / "checkpoints", 2), config.model, out)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: tensor.shape for name, tensor in before.items()} == {name: t.shape for name, t in after.items()}
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == NUM_LAYERS * NUM_EXPERTS * 3
    assert not any(torch.equal(before[name], after[name]) for name in experts), "every expert was trained"
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in learner.policy.model.named_parameters())


def test_flops_count_the_experts_that_a_token_uses(folder: Path) -> None:
    found = model_flops(tiny_policy(learner_config(folder)))
    # q and o, k and v; the router; gate, up and down of each expert.
    layer = 2 * 64 * 64 + 2 * 32 * 64 + NUM_EXPERTS * 64 + NUM_USED * 3 * 32 * 64
    assert found.per_token == 6 * NUM_LAYERS * layer
    assert found.per_prediction == 6 * 64 * VOCAB_SIZE


def test_every_parameter_can_be_converted_alone(folder: Path) -> None:
    assert converts_singly(empty_model(str(folder)))
