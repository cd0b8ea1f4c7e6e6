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
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported without __all__

from bapo.core.errors import BapoError, ConfigError, RankLostError, UnavailableError
from bapo.runtime.rank_environment import LISTENER

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""How long the ranks wait for each other at startup."""
ADVICE_OF_GLOO = " This is typically caused"
"""Start of the generic part of gloo's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the ranks of the learner."""

    rank: int
    size: int
    device: torch.device

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
        """Whether `flag` is set on any rank. Collective."""
        return flag if self.size == 1 else bool(self.max(torch.tensor([flag], dtype=torch.uint8)))

    def share(self, data: bytes | memoryview | None) -> bytes | memoryview | None:
        """Broadcast the bytes of rank 0. Collective."""
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


def join(num_ranks: int, device: torch.device, timeout_s: float, environment: Mapping[str, str] = os.environ) -> World:
    """Join the process group of all ranks; with one rank there is none.

    Args:
        timeout_s: how long one rank may keep the others waiting, for example for a batch.
    Raises: ConfigError if the environment contradicts `learner.num_ranks`; UnavailableError if MASTER_PORT is in
        use; RankLostError if the others do not join.
    """
    size, rank = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    if size != num_ranks:
        raise ConfigError(
            f"learner.num_ranks={num_ranks} but WORLD_SIZE={size}: start {num_ranks} learner processes with RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or one without these variables, which starts all ranks; or "
            "change learner.num_ranks"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        timeout = timedelta(seconds=max(timeout_s, START_TIMEOUT_S))
        try:
            store = _opened_store(rank, size, timeout, environment)
            dist.init_process_group(backend(device), store=store, rank=rank, world_size=size, timeout=timeout)
        except RuntimeError as error:
            lost = lost_rank(error, rank)
            if lost is None:
                raise
            raise lost from error
    return World(rank=rank, size=size, device=device)


def _opened_store(rank: int, size: int, timeout: timedelta, environment: Mapping[str, str]) -> TCPStore | None:
    """The rendezvous store on the socket that the parent process keeps open; None if torch opens it itself."""
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
    """The error to raise if torch.distributed failed because of another rank; None for other causes."""
    reason = " ".join(str(error).partition(ADVICE_OF_GLOO)[0].split())
    if "EADDRINUSE" in reason:
        return UnavailableError(f"rank {rank}: the rendezvous port (MASTER_PORT) is in use: {reason}")
    is_of_meeting = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    # If ranks are in different collectives, gloo fails with "enforce fail": no rank is lost then.
    is_of_group = "gloo/transport" in reason and "enforce fail" not in reason
    if not is_of_meeting and not is_of_group and "ncclRemoteError" not in reason:
        return None
    return RankLostError(
        f"rank {rank} lost another rank of the learner, which has exited (see its log), is stopped, or is "
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
    if not dist.is_initialized():
        return
    if together and world.size > 1:
        dist.barrier()
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()
