"""The contenders of one comparison: each moves the same groups in and out, and says how long that took.

All of them hold the groups in another process and are driven by one connection of this machine. A contender that is
another program runs in a process of its own environment; its wall times are taken there, its CPU time here.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from bapo.core.codec import unpack_batch
from bapo.core.types import Batch, RolloutRequest
from benchmarks.buffer.groups import GroupMaker, Size, ask_for, requests_for
from benchmarks.buffer.stack import RedisProcess, Stack, cpu_seconds

BATCH = 64
SIDE = Path(__file__).with_name("reverb_side.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One measured movement."""

    seconds: float
    cpu_s: float
    """Of all processes that take part."""


def measured(pids: Sequence[int], move: Callable[[], None]) -> Moved:
    """Wall time of `move`, and the CPU time that these processes spent meanwhile."""
    cpu = cpu_seconds(pids)
    begun = time.perf_counter()
    move()
    seconds = time.perf_counter() - begun
    return Moved(seconds=seconds, cpu_s=cpu_seconds(pids) - cpu)


class Contender(Protocol):
    """Moves the groups of one round."""

    name: str

    def push(self, size: Size, frames: Sequence[bytes], per_call: int) -> Moved:
        """All frames in, `per_call` at a time, each call acknowledged."""
        ...

    def pull(self, size: Size, number: int) -> dict[str, Moved]:
        """As many groups out, in batches of BATCH; more ways than one have more names than one."""
        ...


class Ours:
    """The buffer service over HTTP, with the client library."""

    def __init__(self, name: str, stack: Stack) -> None:
        self.name, self._stack = name, stack
        self._pids = [*stack.pids, psutil.Process().pid]
        self._step = 1
        self._next = 0
        self._makers: dict[str, GroupMaker] = {}

    def push(self, size: Size, frames: Sequence[bytes], per_call: int) -> Moved:
        """The frames are its own: each of them answers a request, which is asked for before the clock runs."""
        own = self._own_frames(size, len(frames))
        client = self._stack.client

        def move() -> None:
            for first in range(0, len(own), per_call):
                results = client.push(own[first : first + per_call])
                assert set(results.values()) == {"stored"}

        return measured(self._pids, move)

    def _own_frames(self, size: Size, number: int) -> list[bytes]:
        requests: list[RolloutRequest] = requests_for(self._next, number, self._step, BATCH)
        self._next += number
        ask_for(self._stack.client, requests)
        maker = self._makers.setdefault(size.name, GroupMaker(size.tokens))
        return maker.frames(requests)

    def pull(self, size: Size, number: int) -> dict[str, Moved]:
        """`pull`: the batch's bytes, as others hand them out. `commit`: its release. `open`: bytes to typed groups."""
        parts: dict[str, list[Moved]] = {"pull": [], "commit": [], "open": []}
        client = self._stack.client
        for _ in range(number // BATCH):
            step, self._step = self._step, self._step + 1
            bodies: list[Any] = []
            batches: list[Batch] = []
            parts["pull"].append(
                measured(self._pids, lambda s=step, b=bodies: b.append(client.batch_frame(s, timeout_s=30)))
            )
            parts["open"].append(measured(self._pids, lambda b=bodies, into=batches: into.append(unpack_batch(b[0]))))
            parts["commit"].append(measured(self._pids, lambda s=step: client.commit(s, checkpointed=s)))
            assert len(batches[0].entries) == BATCH
        return {
            name: Moved(seconds=sum(m.seconds for m in moves), cpu_s=sum(m.cpu_s for m in moves))
            for name, moves in parts.items()
        }


class RawRedis:
    """Pipelined redis-py on a Redis of its own: what no service in front of Redis can exceed."""

    def __init__(self, name: str, server: RedisProcess) -> None:
        self.name, self._server = name, server
        self._pids = [server.process.pid, psutil.Process().pid]

    def push(self, size: Size, frames: Sequence[bytes], per_call: int) -> Moved:
        """SET, pipelined."""
        client = self._server.client

        def move() -> None:
            for first in range(0, len(frames), per_call):
                pipe = client.pipeline(transaction=False)
                for index, frame in enumerate(frames[first : first + per_call], first):
                    pipe.set(f"g{index}", frame)
                pipe.execute()

        return measured(self._pids, move)

    def pull(self, size: Size, number: int) -> dict[str, Moved]:
        """GET, pipelined as the pushes were."""
        client = self._server.client

        def move() -> None:
            for first in range(0, number, size.per_call):
                pipe = client.pipeline(transaction=False)
                for index in range(first, first + size.per_call):
                    pipe.get(f"g{index}")
                assert all(pipe.execute())

        moved = measured(self._pids, move)
        client.flushall()
        return {"pull": moved}


class Reverb:
    """DeepMind Reverb: a server and a client process; opaque strings, the faster of its ways for every size."""

    name = "reverb"
    PUSH_FORMS = ("writer", "trajectory_writer")
    PULL_FORMS = ("sample", "stream")

    def __init__(self, python: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        port_file = folder / "port"
        log = (folder / "log").open("wb")
        command = [str(python), str(SIDE)]
        arguments = ["server", str(port_file), str(folder / "checkpoints")]
        self._server = subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stderr=log)
        while not port_file.exists():
            if self._server.poll() is not None:
                raise RuntimeError(f"Reverb did not start: see {folder / 'log'}")
            time.sleep(0.05)
        self._client = subprocess.Popen(
            [*command, "client", port_file.read_text()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        self._pids = [self._server.pid, self._client.pid]
        self._best: dict[tuple[str, str], str] = {}

    def ask(self, **command: Any) -> Any:
        """One command of `reverb_side`."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps(command) + "\n")
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        if not line:
            raise RuntimeError(f"Reverb's client ended: see {self._folder / 'log'}")
        return json.loads(line)

    def choose_forms(self, size: Size, frames: Sequence[bytes]) -> dict[str, str]:
        """Try every way twice, and keep the one that is faster the second time."""
        part = frames[: 4 * BATCH]
        pushes: dict[str, float] = {}
        for form in [*self.PUSH_FORMS, *self.PUSH_FORMS]:
            self._load(part)
            pushes[form] = self.ask(do="push", form=form, per_call=size.per_call)["seconds"]
            self.ask(do="clear")
        chosen = {"push": min(pushes, key=pushes.__getitem__)}
        pulls: dict[str, float] = {}
        for form in [*self.PULL_FORMS, *self.PULL_FORMS]:
            self._load(part)
            self.ask(do="push", form=chosen["push"], per_call=size.per_call)
            pulls[form] = self.ask(do="pull", form=form, number=len(part), batch=BATCH)["seconds"]
        chosen["pull"] = min(pulls, key=pulls.__getitem__)
        self._best.update({(size.name, kind): form for kind, form in chosen.items()})
        return chosen

    def push(self, size: Size, frames: Sequence[bytes], per_call: int) -> Moved:
        """Several per call: the faster writer, flushed after each. One per call: `insert`, which is a call."""
        self._load(frames)
        form = "insert" if per_call == 1 else self._best[size.name, "push"]
        return self._measured(do="push", form=form, per_call=per_call)

    def push_stream(self, size: Size, frames: Sequence[bytes]) -> Moved:
        """One per flush of a writer that stays open: no call each, and what no HTTP client can do."""
        self._load(frames)
        moved = self._measured(do="push", form="trajectory_writer", per_call=1)
        self.ask(do="clear")
        return moved

    def pull(self, size: Size, number: int) -> dict[str, Moved]:
        """The faster reader."""
        return {"pull": self._pulled(self._best[size.name, "pull"], number)}

    def pull_calls(self, size: Size, frames: Sequence[bytes]) -> Moved:
        """One call of `sample` per batch, whichever is faster."""
        self._load(frames)
        self.ask(do="push", form=self._best[size.name, "push"], per_call=size.per_call)
        return self._pulled("sample", len(frames))

    def _pulled(self, form: str, number: int) -> Moved:
        cpu = cpu_seconds(self._pids)
        reply = self.ask(do="pull", form=form, number=number, batch=BATCH)
        assert reply["groups"] == number, f"Reverb handed out {reply['groups']} of {number} groups"
        return Moved(seconds=reply["seconds"], cpu_s=cpu_seconds(self._pids) - cpu)

    def _load(self, frames: Sequence[bytes]) -> None:
        path = self._folder / "frames"
        path.write_bytes(b"".join(frames))
        self.ask(do="load", path=str(path), sizes=[len(frame) for frame in frames])

    def _measured(self, **command: Any) -> Moved:
        cpu = cpu_seconds(self._pids)
        reply = self.ask(**command)
        return Moved(seconds=reply["seconds"], cpu_s=cpu_seconds(self._pids) - cpu)

    def stop(self) -> None:
        """End both processes."""
        for process in (self._client, self._server):
            process.kill()
            process.wait()
