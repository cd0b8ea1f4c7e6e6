"""What spares memory: recomputed activations, bfloat16 by FSDP, and ranks that hold no more than their part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.shards import stored_tensors
from tests.support.spawn_ranks import spawn_ranks
from tests.support.tiny_model import write_tiny_model

REFERENCE = {"ratio_mode": "official", "kl_ref": "reference", "kl_coef": 0.01}
RECOMPUTED = {"gradient_checkpointing": True}
NUM_PARAMETERS = {True: 20, False: 21}
"""Of the tiny model: 2 layers of 9, embeddings, last norm, and a head where it is not tied."""


CHECKPOINT, WEIGHTS = "checkpoints/step-000003", "weights/version-000004.safetensors"


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def train(model_path: Path, run: Path, num_ranks: int, /, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Three steps; what each rank found."""
    return spawn_ranks("memory_rank", [str(model_path), str(run), str(num_ranks), json.dumps(sections)], num_ranks)


@pytest.fixture(scope="module")
def plain(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two ranks in float32."""
    run = tmp_path_factory.mktemp("plain")
    return run, train(model_path, run, 2, loss=REFERENCE)


def test_two_ranks_that_recompute_activations_train_the_same_bits(
    model_path: Path, plain: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run, want = plain
    found = train(model_path, tmp_path, 2, loss=REFERENCE, learner=RECOMPUTED)
    assert len(want[0]["losses"]) == 9
    assert [rank["losses"] for rank in found] == [rank["losses"] for rank in want]
    assert_same_bits(load_file(tmp_path / WEIGHTS), load_file(run / WEIGHTS))
    assert_same_bits(stored_tensors(tmp_path / CHECKPOINT), stored_tensors(run / CHECKPOINT))


@pytest.mark.parametrize("tie", [True, False])
def test_a_rank_that_follows_reads_no_model_and_holds_one_whole_tensor_at_a_time(tie: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", tie=tie)
    leader, follower = (rank["held"] for rank in train(tmp_path / "model", tmp_path / "run", 2, loss=REFERENCE))
    assert (leader["reads"], follower["reads"]) == (2, 0), "the policy and pi_ref"
    assert follower["gathered"] == leader["gathered"] == 3 * NUM_PARAMETERS[tie], "to publish three versions"
    assert (follower["most_gathered"], follower["most_scattered"]) == (1, 1)
    assert leader["most_gathered"] == 1, "it is copied before the next one"


def test_two_ranks_publish_weights_with_the_names_of_the_model(
    model_path: Path, plain: tuple[Path, list[dict[str, Any]]]
) -> None:
    run, _ = plain
    first, read = load_file(run / "weights" / "version-000002.safetensors"), load_file(model_path / "model.safetensors")
    assert first.keys() == read.keys()
    assert any(not torch.equal(first[name], read[name]) for name in read), "one step was made"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bfloat16_gathers_layers_in_it_and_keeps_weights_and_gradients_in_float32(
    num_ranks: int, model_path: Path, plain: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    found = train(model_path, tmp_path, num_ranks, model={"dtype": "bfloat16"}, loss=REFERENCE, learner=RECOMPUTED)
    for rank in found:
        assert rank["dtypes"] == {
            "kept": ["float32"], "weights": ["bfloat16"], "inputs": ["bfloat16"], "gradients": ["float32"],
            "reference": ["bfloat16"],
        }  # fmt: skip
    # The first losses are of the same weights. Those of the first step's other mini-batches differ with them.
    want, losses = plain[1][0]["losses"], found[0]["losses"]
    assert losses[0] == pytest.approx(want[0], rel=0.05, abs=0.02)
    assert [norm for _, norm in losses[:3]] == pytest.approx([norm for _, norm in want[:3]], rel=0.25)
    # What is kept and saved is no rounded copy.
    saved = stored_tensors(tmp_path / CHECKPOINT, "model")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    engines = load_file(tmp_path / "weights" / "version-000004.safetensors")
    assert all(torch.equal(engines[name], tensor.bfloat16()) for name, tensor in saved.items())


def test_a_model_that_rank_0_refuses_ends_every_rank_with_the_reason(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    found = train(tmp_path / "model", tmp_path / "run", 2)
    assert found[0] == found[1]
    assert "cannot be loaded as a causal LM" in found[0]["refused"]


def test_the_critic_is_spread_as_the_policy_is(model_path: Path, tmp_path: Path) -> None:
    gae = {"advantage": "gae", "ratio_mode": "direct"}
    exact = train(model_path, tmp_path / "exact", 2, loss=gae)[0]["losses"]
    rough = train(model_path, tmp_path / "rough", 2, loss=gae, model={"dtype": "bfloat16"})[0]["losses"]
    assert rough[0] == pytest.approx(exact[0], rel=0.1, abs=0.05)
    critics = [stored_tensors(tmp_path / run / CHECKPOINT, "critic") for run in ("exact", "rough")]
    assert critics[0].keys() == critics[1].keys()
    assert {tensor.dtype for name, tensor in critics[1].items() if not name.endswith("num_updates")} == {torch.float32}
