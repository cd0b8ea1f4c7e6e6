"""How fast a push through Python and Redis can be here at all: the floor, ours, Reverb and bare SETs in one run.

A target that `floor_server` misses, which checks every token and keeps no promise, is missed by any buffer of this
architecture on this machine. What lies between the floor and ours is what the promises cost.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.buffer.floor_server import send_all
from benchmarks.buffer.groups import SIZES, GroupMaker, Size, requests_for
from benchmarks.buffer.rivals import BATCH, Contender, Moved, Ours, RawRedis, Reverb, measured
from benchmarks.buffer.stack import RedisProcess, Stack

FLOOR, DURABLE_FLOOR = "floor", "floor, AOF everysec"
START_TIMEOUT_S = 30.0


class Floor:
    """`floor_server`, with a client that does as little: one socket, one call at a time."""

    def __init__(self, name: str, folder: Path, *, aof: bool) -> None:
        self.name = name
        self.redis = RedisProcess(folder, aof=aof)
        port_file = folder / "port"
        module = f"{__package__}.floor_server"
        self._server = subprocess.Popen([sys.executable, "-m", module, str(self.redis.socket), str(port_file)])
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (port_file.exists() and port_file.read_text()):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{module} did not start")
            time.sleep(0.02)
        self._socket = socket.create_connection(("127.0.0.1", int(port_file.read_text())))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        self._pids = [self._server.pid, self.redis.process.pid, psutil.Process().pid]

    def push(self, size: Size, frames: Sequence[bytes], per_call: int) -> Moved:
        """All frames in, and Redis emptied behind it."""

        def move() -> None:
            for first in range(0, len(frames), per_call):
                part = frames[first : first + per_call]
                assert set(self.call(part).values()) == {"stored"}

        moved = measured(self._pids, move)
        self.redis.client.flushall()
        return moved

    def call(self, frames: Sequence[bytes]) -> dict[str, str]:
        head = f"POST /groups HTTP/1.1\r\nHost: localhost\r\nContent-Length: {sum(map(len, frames))}\r\n\r\n"
        send_all(self._socket, [head.encode(), *frames])
        self._answers.readline()
        size = int(self._answers.readline().partition(b":")[2])
        self._answers.readline()
        groups: dict[str, str] = json.loads(self._answers.read(size))["groups"]
        return groups

    def pull(self, size: Size, number: int) -> dict[str, Moved]:
        """There is nothing to pull."""
        return {}

    def stop(self) -> None:
        """End both processes."""
        self._server.kill()
        self._server.wait()
        self.redis.stop()


def measure(folder: Path, rounds: int, reverb_python: Path, sizes: Sequence[str]) -> dict[str, Any]:
    """Per size and contender: pushes per second, and speed and CPU over Reverb's, several per call and one per request;
    medians of interleaved rounds."""
    with ExitStack() as stack:
        contenders: list[Any] = [
            Floor(FLOOR, folder / "floor", aof=False),
            Floor(DURABLE_FLOOR, folder / "durable floor", aof=True),
            RawRedis("redis-py over TCP", raw := RedisProcess(folder / "raw", aof=False, tcp=True)),
            reverb := Reverb(reverb_python, folder / "reverb"),
        ]
        for ended in (*contenders[:2], raw, reverb):
            stack.callback(ended.stop)
        for name, aof in (("ours", False), ("ours, AOF everysec", True)):
            place = folder / ("durable" if aof else "memory")
            contenders.append(Ours(name, stack.enter_context(Stack(place, aof=aof))))
        return {size.name: _one_size(size, contenders, reverb, rounds) for size in SIZES if size.name in sizes}


def _one_size(size: Size, contenders: Sequence[Contender], reverb: Reverb, rounds: int) -> dict[str, Any]:
    frames = GroupMaker(size.tokens).frames(requests_for(0, size.many, 1, BATCH))
    reverb.choose_forms(size, frames)
    results: list[dict[str, tuple[Moved, Moved]]] = []
    for index in range(rounds + 1):  # the first one warms up
        shift = index % len(contenders)
        turn = [*contenders[shift:], *contenders[:shift]]
        results.append({contender.name: _one_turn(size, contender, frames) for contender in turn})
    return {contender.name: _summary(size, contender.name, results[1:]) for contender in contenders}


def _one_turn(size: Size, contender: Contender, frames: Sequence[bytes]) -> tuple[Moved, Moved]:
    several = contender.push(size, frames, size.per_call)
    contender.pull(size, size.many)
    single = contender.push(size, frames[: size.single], 1)
    contender.pull(size, size.single)
    return several, single


def _summary(size: Size, name: str, results: Sequence[dict[str, tuple[Moved, Moved]]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for way, (movement, number) in enumerate((("push", size.many), ("single", size.single))):
        mine, reverbs = ([row[who][way] for row in results] for who in (name, Reverb.name))
        pairs = list(zip(mine, reverbs, strict=True))
        found[f"{movement}: groups/s"] = round(number / statistics.median(one.seconds for one in mine))
        found[f"{movement}: over reverb"] = _median(other.seconds / one.seconds for one, other in pairs)
        found[f"{movement}: over reverb, CPU"] = _median(one.cpu_s / other.cpu_s for one, other in pairs)
    raws = [row["redis-py over TCP"][0].seconds / row[name][0].seconds for row in results]
    found["push: over redis-py, TCP"] = _median(raws)
    return found


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)
