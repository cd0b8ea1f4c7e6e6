"""What each rank of the learner finds in its environment: the launcher starts ranks, a learner without it its own."""

from __future__ import annotations

import socket

WORLD_SIZE, RANK = "WORLD_SIZE", "RANK"
LOOPBACK = "127.0.0.1"

MALLOC = {
    # The learner frees and takes the same large blocks every step: keeping them is a fifth faster on CPUs.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "67108864",
}


def rank_environments(num_ranks: int, num_threads: int) -> list[dict[str, str]]:
    """By rank, beside what the parent has. They meet on this machine, at a port that is free now; one alone does not.

    Args:
        num_threads: of torch, in each rank.
    """
    common = {"OMP_NUM_THREADS": str(num_threads), **MALLOC}
    if num_ranks == 1:
        return [common]
    common |= {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        WORLD_SIZE: str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    return [common | {RANK: str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
