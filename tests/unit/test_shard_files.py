"""Shards written by one number of ranks are read by another. The ranks take turns in one process, over a fake group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bapo.core.errors import ConfigError
from learner.distributed.shard_files import ShardWriter, StoredShards, _split
from learner.distributed.world import World
from tests.support.learner import ALONE, CPU

WHOLE = {
    "even": torch.arange(24.0).reshape(12, 2),
    "uneven": torch.arange(7.0),
    "short": torch.tensor([[5.0, 6.0]]),
    "whole": torch.tensor([3]),
}
SHARDED = ("even", "uneven", "short")


@contextmanager
def rank_of(rank: int, size: int, replicas: int = 1) -> Iterator[dict[str, Tensor]]:
    """The tensors of a rank; those of the model sharded over size / replicas ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (replicas, size // replicas))
        layout = [Replicate(), Shard(0)]
        spread = {name: distribute_tensor(WHOLE[name].clone(), mesh, layout, src_data_rank=None) for name in SHARDED}
        yield {**spread, "whole": WHOLE["whole"].clone()}
    finally:
        dist.destroy_process_group()


def write(folder: Path, size: int, *, replicas: int = 1, background: bool = False) -> list[int]:
    """Returns: number of files of each rank."""
    folder.mkdir()
    files = []
    for rank in range(size):
        with rank_of(rank, size, replicas) as tensors:
            writer = ShardWriter(World(rank=rank, size=size, device=CPU), background=background)
            writer.start(tensors, folder)
            assert writer.wait() is None
            files.append(writer.num_files)
    return files


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("writers", [1, 2, 3])
def test_any_number_of_ranks_reads_the_bits_that_another_wrote(writers: int, background: bool, tmp_path: Path) -> None:
    folder = tmp_path / "learner"
    assert write(folder, writers, background=background) == [1] * writers
    assert len(list(folder.iterdir())) == writers
    [alone] = StoredShards.open(folder).whole()
    assert alone.keys() == WHOLE.keys()
    assert all(torch.equal(tensor, WHOLE[name]) for name, tensor in alone.items())
    for size in (2, 4):
        for rank in range(size):
            with rank_of(rank, size) as tensors:
                want = {
                    name: tensor.to_local().clone() for name, tensor in tensors.items() if isinstance(tensor, DTensor)
                }
                for tensor in tensors.values():
                    tensor.zero_()
                StoredShards.open(folder).load(tensors)
                for name in SHARDED:
                    assert torch.equal(tensors[name].to_local(), want[name])  # type: ignore[attr-defined]
                assert torch.equal(tensors["whole"], WHOLE["whole"])


def test_replicas_are_written_once(tmp_path: Path) -> None:
    assert write(tmp_path / "learner", 4, replicas=2) == [1, 1, 0, 0]
    [alone] = StoredShards.open(tmp_path / "learner").whole()
    assert all(torch.equal(tensor, WHOLE[name]) for name, tensor in alone.items())


def test_the_next_checkpoint_has_the_values_of_its_own_start(tmp_path: Path) -> None:
    """The copy in host memory is kept from one checkpoint to the next."""
    writer, weight = ShardWriter(ALONE, background=True), torch.zeros(3)
    for value in (1.0, 2.0):
        folder = tmp_path / str(value) / "learner"
        folder.mkdir(parents=True)
        weight.fill_(value)
        writer.start({"weight": weight}, folder)
        weight.fill_(-1.0)
        assert writer.wait() is None
        [found] = StoredShards.open(folder).whole()
        assert found["weight"].tolist() == [value] * 3


def test_tensors_in_several_files_are_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("learner.distributed.shard_files.FILE_BYTES", 50)
    assert write(tmp_path / "learner", 2) == [2, 2]
    found = {
        name: tensor for piece in StoredShards.open(tmp_path / "learner").whole() for name, tensor in piece.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in WHOLE.items())


def test_nothing_is_pickled(tmp_path: Path) -> None:
    write(tmp_path / "learner", 2)
    names = {path.name for path in (tmp_path / "learner").iterdir()}
    assert names == {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}


def test_a_file_holds_what_fits_and_a_large_tensor_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.distributed.shard_files.FILE_BYTES", 100)
    sizes = {"a": 10, "b": 15, "c": 40, "d": 5}  # of 4 bytes: 40 + 60, 160, 20
    assert _split({name: torch.zeros(size) for name, size in sizes.items()}) == {"a": 1, "b": 1, "c": 2, "d": 3}


def test_a_model_of_another_shape_or_with_another_tensor_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(ALONE, background=False)
    (tmp_path / "learner").mkdir()
    writer.start({"model/a": torch.zeros(3)}, tmp_path / "learner")
    stored = StoredShards.open(tmp_path / "learner").part("model")
    for other in ({"a": torch.zeros(4)}, {"a": torch.zeros(3), "b": torch.zeros(1)}):
        with pytest.raises(ConfigError):
            stored.load(other)
