"""What each rank of the learner finds in its environment: the launcher starts ranks, a learner without it its own."""

from __future__ import annotations

import socket
from collections.abc import Mapping

WORLD_SIZE, RANK = "WORLD_SIZE", "RANK"
LISTENER = "BAPO_RANKS_LISTENER"
"""Descriptor, in rank 0, of the socket that listens at MASTER_PORT already; with torchrun or by hand there is none."""
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"

MALLOC = {
    # The learner frees and takes the same large blocks every step: keeping them is a fifth faster on CPUs.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "67108864",
}


def meeting_place() -> socket.socket:
    """Where the ranks of one learner meet, on this machine: their parent keeps it open as long as it starts any.

    A port that is only chosen here, and opened by rank 0 once torch is imported, may be taken by then, and
    more so when the ranks start again hours later.
    """
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    return listener


def rank_environments(num_ranks: int, num_threads: int, meeting: socket.socket | None = None) -> list[dict[str, str]]:
    """Variables of each rank, added to the parent's; the starter passes the `inherited` descriptors on.

    Args:
        num_threads: of torch, in each rank.
        meeting: from `meeting_place`; None: at a port that is free now.
    """
    common = {"OMP_NUM_THREADS": str(num_threads), **MALLOC}
    if num_ranks == 1:
        return [common]
    common |= {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(meeting.getsockname()[1] if meeting else free_port()),
        WORLD_SIZE: str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        # Else gloo listens at the address that the host's name has, which others may reach, and asks for no token.
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }
    if meeting:
        common[LISTENER] = str(meeting.fileno())
    return [common | {RANK: str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def inherited(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Descriptors that the process with this environment needs of its parent (`pass_fds`)."""
    return (int(environment[LISTENER]),) if LISTENER in environment and environment.get(RANK) == "0" else ()


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
