"""A worker or a learner as a process of its own that knows both replicas of the buffer, and its ledger.

    python tests/support/replica_peers.py worker URL,URL LEDGER NAME
    python tests/support/replica_peers.py learner URL,URL LEDGER NUM_STEPS

A ledger holds one JSON line per thing that the buffer has answered, written behind the answer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bapo.core.codec import pack_group
from bapo.transport.buffer_client import BufferClient
from tests.support.buffer import answer


def worker(buffer: BufferClient, ledger: Path, name: str) -> None:
    """Answer requests until the end."""
    while True:
        for request in buffer.claim(name, limit=2, policy_version=1, wait_s=0.2):
            results = buffer.push([pack_group(answer(request, "11000000", worker_id=name))])
            note(ledger, results)


def learner(buffer: BufferClient, ledger: Path, num_steps: str) -> None:
    """Train so many steps, with a checkpoint every fifth."""
    for step in range(1, int(num_steps) + 1):
        began = time.monotonic()
        batch = buffer.batch(step, timeout_s=60)
        buffer.commit(step, checkpointed=step - step % 5)
        fresh = [result.group_id for result in batch.results if result.birth == step]
        note(ledger, {"step": step, "fresh": fresh, "waited_s": time.monotonic() - began})


def note(ledger: Path, line: Any) -> None:
    """One line, at once."""
    with ledger.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    role, urls, path, argument = sys.argv[1:]
    {"worker": worker, "learner": learner}[role](BufferClient(urls, timeout_s=5.0), Path(path), argument)
