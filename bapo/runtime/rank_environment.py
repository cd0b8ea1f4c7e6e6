"""Environment of the ranks of the learner, which are started by the launcher or by the learner itself.

On several hosts each starts its own ranks. They meet at host 0, as those of `torchrun --nnodes 2 --node-rank 1` do.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bapo.core.errors import ConfigError

WORLD_SIZE, RANK = "WORLD_SIZE", "RANK"
LISTENER = "BAPO_RANKS_LISTENER"
"""Descriptor of the socket already listening on MASTER_PORT, for rank 0; not set by torchrun."""
DEFAULT_PORT = 29500
"""Of torchrun."""
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"

MALLOC = {
    # The learner frees and allocates the same large blocks every step: keeping them is 20 % faster on CPUs.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "67108864",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The hosts of the learner, and this one among them."""

    number: int = 1
    rank: int = 0
    address: str = LOOPBACK
    """Of the first host, where rank 0 serves the rendezvous store."""
    port: int = DEFAULT_PORT

    def ranks_here(self, num_ranks: int) -> range:
        """Ranks of this host. Raises: ConfigError."""
        here, rest = divmod(num_ranks, self.number)
        if rest:
            raise ConfigError(
                f"learner.num_ranks = {num_ranks} on PET_NNODES = {self.number} hosts: set a multiple, every host has "
                "the same number of ranks"
            )
        return range(self.rank * here, (self.rank + 1) * here)


ONE_HOST = Nodes()


def nodes_of(environment: Mapping[str, str] = os.environ) -> Nodes:
    """From the variables of torchrun's flags --nnodes, --node-rank, --master-addr and --master-port.

    Raises: ConfigError.
    """
    number = environment.get("PET_NNODES", "1")
    if number == "1":
        return ONE_HOST
    rank, address = environment.get("PET_NODE_RANK", ""), environment.get("PET_MASTER_ADDR", "")
    if address.startswith("["):  # as in a URL; torch takes it without brackets
        address = address.strip("[]")
    port = environment.get("PET_MASTER_PORT", str(DEFAULT_PORT))
    if not (number.isdigit() and rank.isdigit() and int(rank) < int(number) and address and port.isdigit()):
        raise ConfigError(
            f"PET_NNODES = {number!r}, PET_NODE_RANK = {rank!r}, PET_MASTER_ADDR = {address!r}, PET_MASTER_PORT = "
            f"{port!r}: set the number of hosts, the number of this one from 0, and the address of host 0"
        )
    return Nodes(number=int(number), rank=int(rank), address=address, port=int(port))


def meeting_place() -> socket.socket:
    """The rendezvous socket of the ranks on this machine, kept open by their parent.

    A port that is only chosen here, and opened by rank 0 after importing torch, may be in use by then, especially when
    ranks restart hours later.
    """
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    return listener


def rank_environments(
    num_ranks: int, num_threads: int, meeting: socket.socket | None = None, nodes: Nodes = ONE_HOST
) -> list[dict[str, str]]:
    """Variables of each rank of this host, added to the parent's; the caller must pass the `inherited` descriptors.

    Args:
        num_ranks: on all hosts.
        num_threads: torch threads per rank.
        meeting: from `meeting_place`; None: use a free port, or `nodes.port` on several hosts.
    Raises: ConfigError.
    """
    common = {"OMP_NUM_THREADS": str(num_threads), **MALLOC}
    if num_ranks == 1:
        return [common]
    ranks = nodes.ranks_here(num_ranks)
    common |= {WORLD_SIZE: str(num_ranks), "LOCAL_WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": nodes.address}
    if nodes.number > 1:
        common["MASTER_PORT"] = str(nodes.port)
    else:
        common["MASTER_PORT"] = str(meeting.getsockname()[1] if meeting else free_port())
        # Otherwise gloo listens on the host's address without authentication.
        common["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
        if meeting:
            common[LISTENER] = str(meeting.fileno())
    return [common | {RANK: str(rank), "LOCAL_RANK": str(i)} for i, rank in enumerate(ranks)]


def inherited(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Descriptors that a process with this environment inherits (`pass_fds`)."""
    return (int(environment[LISTENER]),) if LISTENER in environment and environment.get(RANK) == "0" else ()


def free_port() -> int:
    """A free port of the loopback, for a server that starts later.

    Below the ports of outgoing connections, one of which could take it before the server does.
    """
    below = range(10_000, _first_outgoing_port())
    for port in [*random.SystemRandom().sample(below, k=min(len(below), 100)), 0]:
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    raise
                continue
            return int(probe.getsockname()[1])
    raise OSError(errno.EADDRINUSE, f"no port of {LOOPBACK} is free")


def _first_outgoing_port() -> int:
    """0 where the system does not say (not Linux)."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 0
