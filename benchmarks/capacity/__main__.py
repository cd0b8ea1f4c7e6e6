"""Unit costs that capacity planning needs and no other benchmark gives: a claim, and the transport of weights.

    python -m benchmarks.capacity --out capacity.json

CPU seconds are those of the processes named, from the kernel; they depend less on what else the machine does than wall
time. Claims: an empty queue, one connection, no wait, so each is a whole call that finds nothing, as 1,000 waiting
workers make them. Weights: one file through the HTTP routes of the rollout server on the loopback, 32 MiB a piece.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo.peer import Peer
from bapo.telemetry import Telemetry
from bapo.weight_transport import fetch_file, send_file
from benchmarks.buffer.stack import Stack, cpu_seconds
from rollout_server.app import create_app
from rollout_server.weight_store import WeightStore

CLAIMS = 2000
FILE_BYTES = 512 << 20


def claims(folder: Path) -> dict[str, float]:
    """CPU of service and Redis per claim, and claims per second of one client."""
    with Stack(folder / "claims", aof=True) as stack:
        for _ in range(200):
            stack.client.claim("worker-0", limit=4, policy_version=1)
        before, began = cpu_seconds(stack.pids), time.monotonic()
        for _ in range(CLAIMS):
            stack.client.claim("worker-0", limit=4, policy_version=1)
        seconds = time.monotonic() - began
        cpu = cpu_seconds(stack.pids) - before
    return {"cpu_ms_per_claim": 1000 * cpu / CLAIMS, "claims_per_s": CLAIMS / seconds}


def weights(folder: Path) -> dict[str, float]:
    """MB/s and CPU per MB of sending a file to a rollout server and of fetching it, both ends in this process."""
    from tests.rollout_fakes import Served

    path = folder / "weights"
    path.write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    store = WeightStore(folder / "server", str)
    fleet: Any = SimpleNamespace()
    served = Served(create_app(fleet, Telemetry(), store=store))
    peer = Peer("the rollout server", served.url, timeout_s=60.0, retry_s=0.0)
    megabytes = FILE_BYTES / 1e6
    found = {}
    try:
        for name, move in (
            ("send", lambda: send_file(peer, path, digest)),
            ("fetch", lambda: fetch_file(peer, digest, FILE_BYTES, folder / "copy")),
        ):
            began, cpu = time.monotonic(), time.process_time()
            move()
            found[f"{name}_mb_per_s"] = megabytes / (time.monotonic() - began)
            found[f"{name}_cpu_ms_per_mb"] = 1000 * (time.process_time() - cpu) / megabytes
    finally:
        served.stop()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bapo-capacity-") as folder:
        found = claims(Path(folder)) | weights(Path(folder))
    shown = json.dumps({name: round(value, 3) for name, value in found.items()}, indent=2)
    print(shown)
    if flags.out:
        flags.out.write_text(shown + "\n")


if __name__ == "__main__":
    main()
