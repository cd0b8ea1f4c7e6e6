"""The ranks of the learner: the same code for one process and for FSDP2 over several.

Rank 0 communicates with the buffer service, the workers and the disk; the others follow. Each rank trains its share of
every mini-batch (`batch.packing.plan_passes`); the loss is summed over ranks. With one rank in float32
torch.distributed is not started.

    WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT (and LOCAL_RANK on several GPUs), as torchrun sets them
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported without __all__
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from bapo.config.learner import LearnerConfig
from bapo.core.errors import BapoError, ConfigError, RankLostError, UnavailableError
from bapo.runtime.rank_environment import LISTENER
from learner.distributed.roll_call import RollCall

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""How long the ranks wait for each other at startup."""
ADVICE_OF_GLOO = " This is typically caused"
"""Start of the generic part of gloo's message."""
LOST_BY_NCCL = ("ncclRemoteError", "ncclSystemError", "communicator was aborted", "Watchdog caught collective")
"""Of NCCL's messages, those about a connection or a peer. On a timeout NCCL's watchdog usually aborts the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the ranks of the learner."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """[replicas, ranks that shard] or [ranks]; None for one rank."""
    waits: dist.ProcessGroup | None = None
    """On the CPU, with a timeout as long as rank 0 may keep the others waiting for a batch; None for one rank."""
    roll_call: RollCall | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
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
        """Whether `flag` is set on any rank. Collective; waits for rank 0 as long as it takes."""
        if self.size == 1:
            return flag
        found = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.waits)
        return bool(found)

    def meet(self) -> None:
        """Wait for all ranks, also for rank 0 after work of its own that takes minutes. Collective."""
        self.any(False)

    def share(self, data: bytes | memoryview | None) -> bytes | memoryview | None:
        """Broadcast the bytes of rank 0. Collective; waits for rank 0 as long as it takes."""
        if self.size == 1:
            return data
        size = torch.tensor([-1 if data is None else len(data)])
        dist.broadcast(size, src=0, group=self.waits)
        if int(size) < 0:
            return None
        content = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self.waits)
        return data if self.leads else content.numpy().tobytes()


def pick_device(name: str, environment: Mapping[str, str] = os.environ) -> torch.device:
    """learner.device as a device; on GPUs the LOCAL_RANK-th visible one, so that each rank has its own.

    Raises: ConfigError for cuda without CUDA, and for a rank without a GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("learner.device=cuda, but torch finds no CUDA device; use auto or cpu")
    local_rank = int(environment.get("LOCAL_RANK", environment.get("RANK", "0")))
    number = torch.cuda.device_count()
    if local_rank >= number:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ConfigError(
            f"no GPU for this rank: LOCAL_RANK (or RANK) is {local_rank}, but torch finds {number} GPUs "
            f"(CUDA_VISIBLE_DEVICES: {visible}). Reduce learner.num_ranks on this machine; if each rank sees "
            "only its own GPU, set LOCAL_RANK=0"
        )
    return torch.device("cuda", local_rank)


def join(
    settings: LearnerConfig, device: torch.device, wait_s: float, environment: Mapping[str, str] = os.environ
) -> World:
    """Join the process group of all ranks; with one rank there is none.

    Args:
        wait_s: how long rank 0 may keep the others waiting, for example for a batch. Collectives of a pass, for which
            no rank waits for anything else, have `collective_timeout_min`.
    Raises: ConfigError if the environment contradicts `learner.num_ranks`; UnavailableError if MASTER_PORT is in
        use; RankLostError if the others do not join.
    """
    size, rank = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    num_ranks = settings.num_ranks
    if size != num_ranks:
        raise ConfigError(
            f"learner.num_ranks={num_ranks} but WORLD_SIZE={size}: start {num_ranks} learner processes with RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or one without these variables, which starts all ranks; or "
            "change learner.num_ranks"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        return World(rank=rank, size=size, device=device)
    deadline = timedelta(minutes=settings.collective_timeout_min)
    try:
        store = _opened_store(rank, size, timedelta(seconds=max(wait_s, START_TIMEOUT_S)), environment)
        dist.init_process_group(
            backend(device), store=store, rank=rank, world_size=size, timeout=deadline,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        waits = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(wait_s, START_TIMEOUT_S)))
        mesh = _mesh(device, size, settings.shard_ranks or size, deadline)
    except RuntimeError as error:
        lost = lost_rank(error, rank)
        if lost is None:
            raise
        raise lost from error
    roll_call = RollCall(store, rank, size, deadline.total_seconds())
    return World(rank=rank, size=size, device=device, mesh=mesh, waits=waits, roll_call=roll_call)


def _mesh(device: torch.device, size: int, shard_ranks: int, deadline: timedelta) -> DeviceMesh:
    """All ranks; or replicas of `shard_ranks` consecutive ranks each, as those of a node are (HSDP)."""
    if shard_ranks == size:
        return init_device_mesh(device.type, (size,))
    ranks = torch.arange(size).view(-1, shard_ranks)
    groups = [dist.new_subgroups_by_enumeration(lists.tolist(), timeout=deadline)[0] for lists in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _opened_store(rank: int, size: int, timeout: timedelta, environment: Mapping[str, str]) -> Store:
    """The rendezvous store, on the socket that the parent process keeps open, if there is one."""
    if LISTENER not in environment:
        store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
        return store
    return TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        size,
        rank == 0,
        timeout=timeout,
        master_listen_fd=int(environment[LISTENER]) if rank == 0 else None,
    )


def lost_rank(error: RuntimeError, rank: int, roll_call: RollCall | None = None) -> BapoError | None:
    """The error to raise if torch.distributed failed because of another rank; None for other causes.

    Args:
        roll_call: names the lost ranks, within seconds.
    """
    reason = " ".join(str(error).partition(ADVICE_OF_GLOO)[0].split())
    if "EADDRINUSE" in reason:
        return UnavailableError(f"rank {rank}: the rendezvous port (MASTER_PORT) is in use: {reason}")
    is_of_meeting = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    # If ranks are in different collectives, gloo fails with "enforce fail": no rank is lost then.
    is_of_group = "gloo/transport" in reason and "enforce fail" not in reason
    if not is_of_meeting and not is_of_group and not any(word in reason for word in LOST_BY_NCCL):
        return None
    absent = roll_call.absent() if roll_call is not None else []
    names = " and ".join(f"rank {lost}" for lost in absent) or "another rank"
    return RankLostError(
        f"rank {rank} lost {names} of the learner, which has exited (see its log), is stopped, or is "
        f"disconnected ({reason})"
    )


def backend(device: torch.device) -> str:
    """The torch.distributed backend."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def leave(world: World, *, together: bool) -> None:
    """Leave the process group.

    Args:
        together: all ranks have finished. They wait for each other and then exit immediately with code 0, skipping
            interpreter shutdown: a running gloo thread would abort it.
    """
    if world.roll_call is not None:
        world.roll_call.stop()
    if not dist.is_initialized():
        return
    if together and world.size > 1:
        world.meet()
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()
