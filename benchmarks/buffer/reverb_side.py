"""Reverb's half of the comparison; runs in Reverb's own environment and imports nothing of ours.

    python reverb_side.py server PORT_FILE FOLDER      a server process: one FIFO table, each item handed out once
    python reverb_side.py client PORT                  reads commands as JSON lines, answers with JSON lines

Groups are opaque strings, one scalar `tf.string` per item: Reverb does not compress those, and refuses ragged columns.
There are several ways to write and to read them; the caller tries all and takes the fastest. Not among them is
TrajectoryDataset: it waits out its timeout at the end of a finite stream, and lost items that were in flight then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import reverb

TABLE = "groups"


def serve(port_file: str, folder: str) -> None:
    """Until stdin closes."""
    table = reverb.Table(
        name=TABLE,
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=1_000_000,
        max_times_sampled=1,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    checkpointer = reverb.checkpointers.DefaultCheckpointer(path=folder)
    server = reverb.Server([table], checkpointer=checkpointer)
    Path(port_file).with_suffix(".tmp").write_text(str(server.port))
    Path(port_file).with_suffix(".tmp").rename(port_file)
    sys.stdin.read()
    server.stop()


class Side:
    """One client."""

    def __init__(self, port: int) -> None:
        self._address = f"localhost:{port}"
        self._client = reverb.Client(self._address)
        self._frames: list[np.ndarray] = []

    def load(self, path: str, sizes: list[int]) -> dict:
        data, first = Path(path).read_bytes(), 0
        self._frames = []
        for size in sizes:
            self._frames.append(np.array(data[first : first + size], dtype=object))
            first += size
        return {}

    def push(self, form: str, per_call: int) -> dict:
        frames = self._frames
        latencies = []
        started = time.perf_counter()
        if form == "insert":
            for frame in frames:
                begun = time.perf_counter()
                self._client.insert(frame, {TABLE: 1.0})
                latencies.append(time.perf_counter() - begun)
        elif form == "writer":
            with self._client.writer(max_sequence_length=1) as writer:
                for first in range(0, len(frames), per_call):
                    begun = time.perf_counter()
                    for frame in frames[first : first + per_call]:
                        writer.append(frame)
                        writer.create_item(TABLE, num_timesteps=1, priority=1.0)
                    writer.flush()
                    latencies.append(time.perf_counter() - begun)
        else:
            with self._client.trajectory_writer(num_keep_alive_refs=1) as writer:
                for first in range(0, len(frames), per_call):
                    begun = time.perf_counter()
                    for frame in frames[first : first + per_call]:
                        writer.append(frame)
                        writer.create_item(TABLE, priority=1.0, trajectory=writer.history[-1])
                    writer.flush()
                    latencies.append(time.perf_counter() - begun)
        return {"seconds": time.perf_counter() - started, "latencies": latencies}

    def pull(self, form: str, number: int, batch: int) -> dict:
        started = time.perf_counter()
        found = num_bytes = 0
        if form == "sample":
            for _ in range(number // batch):
                for item in self._client.sample(TABLE, num_samples=batch, emit_timesteps=False):
                    num_bytes += len(_one(item.data))
                    found += 1
        else:  # one stream for all of them
            for item in self._client.sample(TABLE, num_samples=number, emit_timesteps=False):
                num_bytes += len(_one(item.data))
                found += 1
        return {"seconds": time.perf_counter() - started, "groups": found, "bytes": num_bytes}

    def clear(self) -> dict:
        self._client.reset(TABLE)
        return {}


def _one(data: object) -> bytes:
    array = np.asarray(data[0] if isinstance(data, list | tuple) else data)
    return array.item() if array.ndim == 0 else array.reshape(-1)[0]


def answer(port: int) -> None:
    """Commands until stdin closes."""
    side = Side(port)
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(side, command.pop("do"))(**command)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(sys.argv[2], sys.argv[3])
    else:
        answer(int(sys.argv[2]))
