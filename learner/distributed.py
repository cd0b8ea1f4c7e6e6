"""One learner or many: the same code for one process and for FSDP2 over several.

Rank 0 talks to the buffer service, to the workers and to the disk; the others follow. Each rank trains its share of
every mini-batch (`batching.deal`); sums over ranks are taken where the loss needs them. With one rank in float32 every
function here is the identity and torch.distributed is not started.

    WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT (and LOCAL_RANK on several GPUs), as torchrun sets them
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # exported without __all__
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bapo.errors import BapoError, ConfigError, RankLostError, UnavailableError
from bapo.rank_environment import LISTENER
from learner.recomputation import decoder_layers

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""How long the ranks wait for each other at the start."""
ADVICE_OF_GLOO = " This is typically caused"
"""How the part of its message begins that names no cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who this process is among the learner's ranks."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Rank 0 acts for all."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. All ranks must call it."""
        return flag if self.size == 1 else bool(self.max(torch.tensor([flag], dtype=torch.uint8)))

    def share(self, data: bytes | memoryview | None) -> bytes | memoryview | None:
        """What rank 0 holds, on every rank."""
        if self.size == 1:
            return data
        size = torch.tensor([-1 if data is None else len(data)])
        dist.broadcast(size, src=0)
        if int(size) < 0:
            return None
        content = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8)
        dist.broadcast(content, src=0)
        return data if self.leads else content.numpy().tobytes()


def pick_device(name: str, environment: Mapping[str, str] = os.environ) -> torch.device:
    """learner.device as a device; on GPUs the LOCAL_RANK-th that this process sees, so that each rank has its own.

    Raises: ConfigError for cuda without CUDA, and for a rank without a GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("learner.device=cuda, but torch finds no CUDA device; write auto or cpu")
    local_rank = int(environment.get("LOCAL_RANK", environment.get("RANK", "0")))
    number = torch.cuda.device_count()
    if local_rank >= number:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ConfigError(
            f"there is no GPU for this rank: LOCAL_RANK (or RANK) is {local_rank}, and torch sees {number} "
            f"(CUDA_VISIBLE_DEVICES: {visible}). Have fewer learner.num_ranks on this machine; where each rank sees "
            "its own GPU alone, start it with LOCAL_RANK=0"
        )
    return torch.device("cuda", local_rank)


def join(num_ranks: int, device: torch.device, timeout_s: float, environment: Mapping[str, str] = os.environ) -> World:
    """Meet the other ranks; with one rank, nothing to meet.

    Args:
        timeout_s: longest that one rank may keep the others waiting, for example for a batch.
    Raises: ConfigError when the environment contradicts `learner.num_ranks`; UnavailableError when MASTER_PORT is
        taken; RankLostError when the others do not come.
    """
    size, rank = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    if size != num_ranks:
        raise ConfigError(
            f"learner.num_ranks={num_ranks} but WORLD_SIZE={size}: start {num_ranks} learner processes with RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or one with none of them, which starts its ranks itself; or "
            "change learner.num_ranks"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        timeout = timedelta(seconds=max(timeout_s, START_TIMEOUT_S))
        try:
            store = _opened_store(rank, size, timeout, environment)
            dist.init_process_group(_backend(device), store=store, rank=rank, world_size=size, timeout=timeout)
        except RuntimeError as error:
            told = lost_rank(error, rank)
            if told is None:
                raise
            raise told from error
    return World(rank=rank, size=size, device=device)


def _opened_store(rank: int, size: int, timeout: timedelta, environment: Mapping[str, str]) -> TCPStore | None:
    """Where the ranks meet, at the socket that their parent keeps open; None where torch finds the place by itself."""
    if LISTENER not in environment:
        return None
    return TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        size,
        rank == 0,
        timeout=timeout,
        master_listen_fd=int(environment[LISTENER]) if rank == 0 else None,
    )


def lost_rank(error: RuntimeError, rank: int) -> BapoError | None:
    """What to raise where torch.distributed failed for another rank's sake; None when something else is wrong."""
    reason = " ".join(str(error).partition(ADVICE_OF_GLOO)[0].split())
    if "EADDRINUSE" in reason:
        return UnavailableError(f"rank {rank}: the port where the ranks meet (MASTER_PORT) is taken: {reason}")
    is_of_meeting = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    # What ranks send that have come to different places is refused by gloo with "enforce fail": no rank is lost then.
    is_of_group = "gloo/transport" in reason and "enforce fail" not in reason
    if not is_of_meeting and not is_of_group and "ncclRemoteError" not in reason:
        return None
    return RankLostError(
        f"rank {rank} has lost another rank of the learner: that one has ended, and its log says why, or is stopped or "
        f"cut off ({reason})"
    )


def leave(world: World, *, together: bool) -> None:
    """End the meeting.

    Args:
        together: all ranks have come to the end. They wait for each other and then end at once, with exit code 0 and
            without unloading anything: a thread of gloo that still runs would abort a process that unloads it.
    """
    if not dist.is_initialized():
        return
    if together and world.size > 1:
        dist.barrier()
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()


def is_spread(world: World, dtype: torch.dtype) -> bool:
    """Whether FSDP holds the parameters: over several ranks, and where the forward pass is not in their own float32."""
    return world.size > 1 or dtype != torch.float32


def shard(module: nn.Module, world: World, dtype: torch.dtype = torch.float32) -> None:
    """Spread the parameters over the ranks: FSDP2, one unit per decoder layer and one for the rest.

    Gradients come back averaged over ranks, so the loss of each rank is multiplied by `world.size`.

    Args:
        module: with a transformers model as `.model`, and maybe `float32_parts`: modules that compute in float32.
        dtype: of the forward and backward pass. Parameters are gathered in it, layer by layer; what is kept of them,
            and gradients when they are added over ranks and seen by the optimizer, stay float32.
    """
    if not is_spread(world, dtype):
        return
    _meet_alone(world)
    mesh = init_device_mesh(world.device.type, (world.size,))
    layers = decoder_layers(module)
    if not layers:
        log.warning("no decoder layers found in %s: FSDP gathers the whole model at once", type(module.model).__name__)
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in getattr(module, "float32_parts", ()):
            fully_shard(part, mesh=mesh)
    for unit in (*layers, module):
        fully_shard(unit, mesh=mesh, mp_policy=precision)


def _meet_alone(world: World) -> None:
    """FSDP asks for a process group also where there is nobody to meet."""
    if dist.is_initialized():
        return
    dist.init_process_group(_backend(world.device), store=HashStore(), rank=0, world_size=1)
    atexit.register(_part)


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def reshard(module: nn.Module) -> None:
    """Let the parameters be what every rank keeps: after a pass without gradients, FSDP's root still has whole ones,
    in the dtype of the pass."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over ranks, detached; every rank must ask."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Whole, on the CPU, on rank 0; the other ranks help and keep nothing. All ranks must call it.

    Args:
        dtype: of the result, where a tensor is of floating point; that of the tensor when not given.
    """
    keeps = not dist.is_initialized() or dist.get_rank() == 0
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if keeps:
            found[name] = full.to("cpu", dtype if full.is_floating_point() else None).contiguous()
        del full  # before the next one is made
    return found


def scatter_like(value: Tensor | None, model: Tensor) -> Tensor:
    """`value` of rank 0, spread like `model`. All ranks must call it; the others give nothing."""
    assert isinstance(model, DTensor)
    if value is None:
        value = torch.empty(model.shape, dtype=model.dtype, device=model.device)
    return distribute_tensor(value.to(model.device, model.dtype), model.device_mesh, model.placements)


def broadcast(tensor: Tensor) -> None:
    """Rank 0's values into the same tensor of every rank."""
    dist.broadcast(tensor, src=0)


def spread_like(value: Tensor, model: Tensor) -> Tensor:
    """`value`, whole on every rank, spread like `model`."""
    value = value.to(model.device, model.dtype)
    if not isinstance(model, DTensor):
        return value
    # Every rank cuts its own part out of its own copy: nothing travels.
    return distribute_tensor(value, model.device_mesh, model.placements, src_data_rank=None)


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the parameters of `source`, which is spread in the same way. All ranks must call it."""
    reshard(source)
    reshard(target)
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(theirs)


@torch.no_grad()
def load_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give `module`, which has not computed anything yet, these whole parameters by their names."""
    for name, parameter in module.named_parameters():
        parameter.copy_(spread_like(tensors[name], parameter))
