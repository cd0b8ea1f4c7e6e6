"""Tensors of a checkpoint on disk: torch.distributed.checkpoint in safetensors files, each rank its own shards.

    shard-00002-model-00001-of-00003.safetensors        first of three files of rank 1

Each rank plans, writes and reads alone (`no_dist`). So a thread can write while the ranks train, because it calls no
collective; and ranks exchange no plans, which torch would pickle. The header of a file has the offsets of its shards,
so any number of ranks can load them, each only its part. Nothing here is pickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.files import to_disk
from learner.distributed.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")
MODEL, OPTIMIZER = "model", "optimizer"
"""Names of the parts of a trained model."""
UPDATES = "num_updates"
"""Name of the tensor with the number of optimizer steps, stored together with the moments."""
FILE_BYTES = 1 << 30
"""Size of a file. Without a copy in host memory, tensors of a GPU are copied file by file."""
FILE_MODE = 0o644
"""safetensors creates files that only their owner can read; workers may run as another user."""
FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class ShardWriter:
    """Writes the shards of one rank, in the background if asked to."""

    def __init__(self, world: World, *, background: bool) -> None:
        """`background`: copy the tensors to host memory and write the copy in a thread."""
        self._world = world
        self._background = background
        on_gpu = world.device.type == "cuda"
        # Kept, because a copy into new memory takes several times as long.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self._done: Future[Any] | None = None
        self.num_files = 0
        """Number of files of this rank."""

    def start(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Start writing; the tensors may change once this returns.

        Args:
            tensors: the same on every rank; sharded ones as DTensor, whole ones are written by rank 0.
            folder: exists. Its parent is made durable, too.
        """
        mine = {name: tensor for name, tensor in tensors.items() if self._writes(tensor)}
        files = _split(mine)
        self.num_files = max(files.values(), default=0)
        writer = _RankWriter(folder, self._world.rank, files)
        options: dict[str, Any] = {
            "storage_writer": writer, "planner": DefaultSavePlanner(**FLAT), "no_dist": True, "use_collectives": False,
        }  # fmt: skip
        if self._background:
            done = async_save(mine, async_stager=self._stager, **options)
            assert isinstance(done, Future), "the copy is complete on return"
            self._done = done
        else:
            self._done = Future()
            try:
                self._done.set_result(save(mine, **options))
            except (OSError, SafetensorError) as error:
                self._done.set_exception(error)

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._done is None or self._done.done()

    def wait(self) -> BaseException | None:
        """Wait until the files are on the disk. Returns: the error that prevented it."""
        done, self._done = self._done, None
        return None if done is None else done.exception()

    def _writes(self, tensor: Tensor) -> bool:
        """Whether this rank is the one that writes its shard; replicas are written once."""
        if not isinstance(tensor, DTensor):
            return self._world.leads
        coordinate = tensor.device_mesh.get_coordinate() or ()
        replicas = (at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
        return not any(replicas)


class _RankWriter(HuggingFaceStorageWriter):
    """Writes the files of one rank, in the format of `HuggingFaceStorageReader`."""

    def __init__(self, folder: Path, rank: int, files: Mapping[str, int]) -> None:
        """`files`: number of the file of each tensor (`_split`)."""
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder
        self._rank = rank
        self._files = files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write the planned shards.

        In place of torch's method, which serializes a file into memory with the GIL held, so that training would stall.
        `save_file` releases it.
        """
        num_files = max(self._files.values(), default=0)
        for number in range(1, num_files + 1):
            tensors: dict[str, Tensor] = {}
            offsets: dict[str, dict[str, list[int]]] = {}
            for item in (item for item in plan.items if self._files[item.index.fqn] == number):
                name, tensor = item.index.fqn, planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                assert item.tensor_data is not None
                tensors[name] = tensor.cpu().contiguous()
                offsets[name] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
            path = self._folder / f"shard-{self._rank + 1:05d}-model-{number:05d}-of-{num_files:05d}.safetensors"
            save_file(tensors, path, metadata={CUSTOM_METADATA_KEY: json.dumps(offsets), "format": "pt"})
            path.chmod(FILE_MODE)
            to_disk(path)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the other files of the checkpoint durable, too: in this thread, so that the learner need not wait."""
        if self._rank == 0:
            for path in self._folder.parent.iterdir():
                to_disk(path)


def _split(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Name -> number of its file, from 1."""
    files, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if size and size + local.nbytes > FILE_BYTES:
            number, size = number + 1, 0
        files[name] = number
        size += local.nbytes
    return files


@dataclass(frozen=True, slots=True)
class StoredShards:
    """The tensors in a folder of shard files whose names begin with a prefix."""

    folder: Path
    prefix: str
    stored: Mapping[str, TensorStorageMetadata]
    """Shapes and dtypes by name, without the prefix."""

    @classmethod
    def open(cls, folder: Path) -> StoredShards:
        """All tensors, by the headers of the files. Raises: OSError, ValueError, SafetensorError for damaged files."""
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        return cls(folder, "", {name: kind for name, kind in found.items() if isinstance(kind, TensorStorageMetadata)})

    def part(self, name: str) -> StoredShards:
        """The tensors below `name/`."""
        prefix = f"{name}/"
        stored = {key.removeprefix(prefix): kind for key, kind in self.stored.items() if key.startswith(prefix)}
        return StoredShards(self.folder, self.prefix + prefix, stored)

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place; of a sharded one only the local shard is read.

        Raises: ConfigError if one is missing or has another shape.
        """
        other = [name for name, tensor in tensors.items() if name not in self or self.stored[name].size != tensor.shape]
        if other:
            raise ConfigError(f"{self.folder} does not fit the model: {other[0]} is missing or has another shape")
        load(
            {self.prefix + name: tensor for name, tensor in tensors.items()},
            storage_reader=HuggingFaceStorageReader(str(self.folder)),
            planner=DefaultLoadPlanner(**FLAT),
            no_dist=True,
        )

    def whole(self, max_bytes: int = FILE_BYTES) -> Iterator[dict[str, Tensor]]:
        """All tensors, whole and on the CPU, in pieces of about this size."""
        piece: dict[str, Tensor] = {}
        for name, kind in self.stored.items():
            tensor = torch.empty(kind.size, dtype=kind.properties.dtype)
            if piece and tensor.nbytes + sum(other.nbytes for other in piece.values()) > max_bytes:
                self.load(piece)
                yield piece
                piece = {}
            piece[name] = tensor
        self.load(piece)
        yield piece


def joined(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all parts, named `part/name`; `StoredShards.part` undoes it."""
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once; they must be sharded (`reshard`)."""
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {name: tensor.detach() for name, tensor in {**dict(module.named_parameters()), **buffers}.items()}


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments by parameter name, sharded like the parameters, and the number of updates; empty before the
    first."""
    states = {name: optimizer.state.get(parameter) for name, parameter in module.named_parameters()}
    moments = {f"{moment}/{name}": state[moment] for name, state in states.items() if state for moment in MOMENTS}
    return {**moments, UPDATES: torch.tensor([num_updates(optimizer)])} if moments else {}


def load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, stored: StoredShards) -> None:
    """Load the result of `optimizer_state`. Raises: ConfigError if the model differs."""
    if not stored.stored:
        return
    updates = torch.zeros(1, dtype=torch.int64)
    moments: dict[str, Tensor] = {UPDATES: updates}
    for name, parameter in module.named_parameters():
        if f"{MOMENTS[0]}/{name}" in stored:  # else it never had a gradient
            state = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **state}
            moments |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
    unknown = sorted(stored.stored.keys() - moments.keys())
    if unknown:
        raise ConfigError(f"{stored.folder} contains {unknown[0]} of a parameter that the model does not have")
    stored.load(moments)
    for state in optimizer.state.values():
        state["step"].fill_(float(updates))


def num_updates(optimizer: torch.optim.Optimizer) -> int:
    """Optimizer steps so far."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)
