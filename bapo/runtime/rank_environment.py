"""Environment of the ranks of the learner, which are started by the launcher or by the learner itself."""

from __future__ import annotations

import socket
from collections.abc import Mapping

WORLD_SIZE, RANK = "WORLD_SIZE", "RANK"
LISTENER = "BAPO_RANKS_LISTENER"
"""Descriptor of the socket already listening on MASTER_PORT, for rank 0; not set by torchrun."""
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"

MALLOC = {
    # The learner frees and allocates the same large blocks every step: keeping them is 20 % faster on CPUs.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "67108864",
}


def meeting_place() -> socket.socket:
    """The rendezvous socket of the ranks on this machine, kept open by their parent.

    A port that is only chosen here, and opened by rank 0 after importing torch, may be in use by then, especially when
    ranks restart hours later.
    """
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    return listener


def rank_environments(num_ranks: int, num_threads: int, meeting: socket.socket | None = None) -> list[dict[str, str]]:
    """Variables of each rank, added to the parent's; the caller must pass the `inherited` descriptors.

    Args:
        num_threads: torch threads per rank.
        meeting: from `meeting_place`; None: use a free port.
    """
    common = {"OMP_NUM_THREADS": str(num_threads), **MALLOC}
    if num_ranks == 1:
        return [common]
    common |= {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(meeting.getsockname()[1] if meeting else free_port()),
        WORLD_SIZE: str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        # Otherwise gloo listens on the host's address without authentication.
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }
    if meeting:
        common[LISTENER] = str(meeting.fileno())
    return [common | {RANK: str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def inherited(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Descriptors that a process with this environment inherits (`pass_fds`)."""
    return (int(environment[LISTENER]),) if LISTENER in environment and environment.get(RANK) == "0" else ()


def free_port() -> int:
    """A free port of the loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
