"""Two and four ranks over gloo with FSDP2 against one: the same losses, weights and checkpoints by the same code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.support.methods_rank import METHODS
from tests.support.shards import stored_tensors
from tests.support.spawn_ranks import TIMEOUT_S, assert_same_numbers, run_ranks, spawn_ranks
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def one_rank(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    run = tmp_path_factory.mktemp("one")
    return run, run_ranks(model_path, run, 1, 1, 4)[0]


def test_a_checkpoint_of_two_ranks_is_resumed_by_two_ranks_and_by_one(
    model_path: Path, one_rank: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    _, want = one_rank
    run_ranks(model_path, tmp_path, 2, 1, 2)
    again = run_ranks(model_path, tmp_path, 2, 3, 4)[0]
    np.testing.assert_allclose(again, want[4:], rtol=2e-4, atol=1e-4)
    for name in ("step-000004",):
        for path in sorted((tmp_path / "checkpoints" / name).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    alone = run_ranks(model_path, tmp_path, 1, 3, 4)[0]
    np.testing.assert_allclose(alone, want[4:], rtol=2e-4, atol=1e-4)


def test_a_checkpoint_keeps_its_bits_on_another_number_of_ranks(model_path: Path, tmp_path: Path) -> None:
    run_ranks(model_path, tmp_path, 2, 1, 2)
    folder = tmp_path / "checkpoints" / "step-000002"
    first = stored_tensors(folder)
    assert {name.partition("/")[0] for name in first} == {"model", "optimizer"}
    for num_ranks, shard_ranks in ((4, 4), (4, 2), (1, 1)):
        run_ranks(model_path, tmp_path, num_ranks, 3, 2, minibatch_size=4, shard_ranks=shard_ranks)
        assert len(list((folder / "learner").iterdir())) == shard_ranks, "of replicas, the first writes"
        again = stored_tensors(folder)
        assert again.keys() == first.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_an_adapter_trains_alike_on_two_ranks_and_its_checkpoint_keeps_its_bits_on_one(
    model_path: Path, tmp_path: Path
) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    found, other = run_ranks(model_path, two, 2, 1, 2, lora=True)
    assert found == other, "every rank reports the numbers of all"
    assert_same_numbers(found, run_ranks(model_path, one, 1, 1, 2, lora=True)[0])
    for run, elsewhere in ((two, 1), (one, 2)):
        folder = run / "checkpoints" / "step-000002"
        first = stored_tensors(folder)
        assert {name.rpartition(".")[2] for name in first if name.startswith("model/")} == {"lora_A", "lora_B"}
        run_ranks(model_path, run, elsewhere, 3, 2, lora=True)
        again = stored_tensors(folder)
        assert again.keys() == first.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[list[float]]]:
    """A model with a head of its own, which is gathered for itself; and a run of one rank."""
    model, run = tmp_path_factory.mktemp("untied"), tmp_path_factory.mktemp("one")
    write_tiny_model(model, tie=False)
    return model, run, run_ranks(model, run, 1, 1, 2, minibatch_size=4)[0]


@pytest.mark.parametrize("shard_ranks", [4, 2], ids=["sharded over four", "two replicas of two"])
def test_four_ranks_give_the_losses_gradients_and_weights_of_one(
    untied: tuple[Path, Path, list[list[float]]], shard_ranks: int, tmp_path: Path
) -> None:
    model, one, want = untied
    found = run_ranks(model, tmp_path, 4, 1, 2, minibatch_size=4, shard_ranks=shard_ranks)
    assert all(rank == found[0] for rank in found), "every rank reports the numbers of all"
    assert_same_numbers(found[0], want)
    weights, checkpoint = "weights/version-000003.safetensors", "checkpoints/step-000002"
    assert len(list((tmp_path / checkpoint / "learner").iterdir())) == shard_ranks, "replicas are written once"
    for read, file in ((load_file, weights), (stored_tensors, checkpoint)):
        mine, theirs = read(tmp_path / file), read(one / file)
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            np.testing.assert_allclose(values, theirs[name], rtol=0, atol=5e-4, err_msg=name)


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_ranks_give_the_losses_of_one_for_every_method(model_path: Path, tmp_path: Path) -> None:
    [alone] = spawn_ranks("methods_rank", [str(model_path), str(tmp_path), "1"], 1)
    first, second = spawn_ranks("methods_rank", [str(model_path), str(tmp_path), "2"], 2)
    assert alone.keys() == METHODS.keys()
    assert len({tuple(numbers) for numbers in alone.values()}) == len(METHODS), "a choice that changed nothing"
    assert first == second, "every rank reports the numbers of all"
    for method, numbers in alone.items():
        np.testing.assert_allclose(first[method], numbers, rtol=1e-3, atol=1e-5, err_msg=method)
        assert max(map(abs, numbers)) > 1e-3, method
