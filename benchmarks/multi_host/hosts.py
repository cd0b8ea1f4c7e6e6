"""Hosts on one machine: network namespaces at a switch, each with mounts and process ids of its own. Needs root.

    host 1 --cable-- switch (a bridge in a namespace of its own: no firewall rule of the machine reaches it)
    host 2 --cable--   |
    host 3 --cable-----+

What a host has of its own: its address, its loopback, /dev/shm, /tmp/ray, its processes, and folders that it is told
to see elsewhere. Everything else of the disk is shared.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

NETWORK = "10.231.78"
SETTLE = """
set -e
mount --make-rprivate /
mkdir -p /tmp/ray
mount -t tmpfs -o size=2g tmpfs /tmp/ray
mount -t tmpfs -o size=1g tmpfs /dev/shm
for pair in $BAPO_BINDS; do mount --bind "${pair%%=*}" "${pair##*=}"; done
exec "$@"
"""


class HostsError(RuntimeError):
    """This machine has no namespaces for us."""


def ip(*words: str) -> None:
    """Run `ip`. Raises: HostsError with its complaint."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise HostsError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """`with Hosts(3) as hosts`: afterwards nothing of them is left."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._name = f"bapo{os.getpid() % 100_000}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Raises: HostsError without root, or where namespaces are not allowed."""
        switch = f"{self._name}s"
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "br0", "type", "bridge")
            ip("-n", switch, "addr", "add", f"{NETWORK}.1/24", "dev", "br0")
            ip("-n", switch, "link", "set", "br0", "up")
            for i in range(1, self.number + 1):
                self._plug(switch, i)
        except HostsError:
            self.close()
            raise
        return self

    def _plug(self, switch: str, i: int) -> None:
        host = f"{self._name}h{i}"
        ip("netns", "add", host)
        ip("-n", switch, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", host)
        ip("-n", switch, "link", "set", f"v{i}", "master", "br0", "up")
        ip("-n", host, "addr", "add", f"{address(i)}/24", "dev", "eth0")
        ip("-n", host, "link", "set", "eth0", "up")
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "route", "add", "default", "via", f"{NETWORK}.1")

    def start(
        self,
        i: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        binds: Mapping[Path, Path] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command on host `i`; when it is killed, all that it has started dies with it.

        Args:
            binds: folder that it sees -> at this path instead of what everybody sees there.
        """
        pairs = " ".join(f"{inside}={at}" for inside, at in (binds or {}).items())
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # Killed with us, too, when nothing of ours runs any more.
        whole = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "ip",
            "netns",
            "exec",
            f"{self._name}h{i}",
            *isolated,
            "bash",
            "-c",
            SETTLE,
            "host",
            *command,
        ]
        file: IO[bytes]
        with log.open("ab") as file:
            process = subprocess.Popen(
                whole, env={**env, "BAPO_BINDS": pairs}, stdout=file, stderr=file, start_new_session=True
            )
        self._processes.append(process)
        return process

    def namespace(self, i: int) -> Path:
        """The network of host `i`, for setns(2)."""
        return Path("/run/netns") / f"{self._name}h{i}"

    def cut(self, i: int) -> None:
        """Pull the cable of host `i`, at the switch."""
        ip("-n", f"{self._name}s", "link", "set", f"v{i}", "down")

    def heal(self, i: int) -> None:
        """Plug it in again."""
        ip("-n", f"{self._name}s", "link", "set", f"v{i}", "up")

    def close(self) -> None:
        """End every host."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for suffix in [*(f"h{i}" for i in range(1, self.number + 1)), "s"]:
            subprocess.run(["ip", "netns", "del", self._name + suffix], capture_output=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def address(i: int) -> str:
    """Of host `i`."""
    return f"{NETWORK}.{10 + i}"
