"""`python -m tests.full.fuzz.codec [libFuzzer flags] [CORPUS]`: coverage-guided fuzzing of everything that reads bytes.

    python -m tests.full.fuzz.codec -runs=300000 -timeout=10 -rss_limit_mb=1024 /tmp/corpus

An input's first byte chooses who reads the rest. The only exception that may come out is ContractError: libFuzzer stops
with the input at any other one, at an input that takes longer than -timeout, and beyond -rss_limit_mb.
BAPO_FUZZ_STRICT=1 allows no exception at all, which proves that a bug would be found. The instrumentation itself grows
with every input (20 MB per 10^5): BAPO_FUZZ_PLAIN=1 leaves it out, to see whether what is fuzzed grows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import atheris
import msgpack
import psutil
import pydantic

PLAIN = bool(os.environ.get("BAPO_FUZZ_PLAIN"))
INSTRUMENTED: AbstractContextManager[Any] = nullcontext()
if not PLAIN:
    INSTRUMENTED = atheris.instrument_imports(include=["bapo", "buffer_service"], enable_loader_override=False)

with INSTRUMENTED:
    from bapo.core.codec import (
        PushedGroup,
        frame_problem,
        pack_batch,
        pack_group,
        pack_push,
        read_group_header,
        unpack_batch,
        unpack_group,
        unpack_push,
    )
    from bapo.core.errors import ContractError
    from bapo.core.frames import FORMAT, KIND_GROUP, MAGIC, PREFIX, frame_digest, frame_head, open_frame, split_frames
    from bapo.core.json_values import to_map
    from buffer_service.http.schemas import ClaimBody, EnqueueBody, FailBody
    from buffer_service.ingest import incoming
    from buffer_service.snapshot import unpack_snapshot
    from tests.support.buffer import answer
    from tests.support.factories import make_batch, make_group, make_request

REPORT_EVERY = 50_000
REQUESTS = [make_request(prompt_id=f"p{i}", group_size=2) for i in range(4)]
GROUP = pack_group(answer(REQUESTS[0], "10"))
HEADER, BODY = (lambda pair: (pair[0], bytes(pair[1])))(open_frame(GROUP, KIND_GROUP))
KEYS = sorted(HEADER)
BATCH = pack_batch(make_batch(groups=[make_group(rewards="10"), make_group(rewards="01", prompt_id="q")]))
WORDS = [0, 1, -1, 2, 7, 8, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"),
         True, None, "", "p0", "fresh", "reevaluate", "g-p0", b"", b"\0" * 8, [], {}, [1.0, 2.0, 3.0]]  # fmt: skip
ALLOWED: tuple[type[Exception], ...] = () if os.environ.get("BAPO_FUZZ_STRICT") else (ContractError,)


def push(body: bytes) -> None:
    """What the service checks of a push before it asks the store."""
    for group in unpack_push(body):
        incoming(group)


def push_head_of(frame: bytes) -> None:
    """The same, of a frame that a worker announces with its digest."""
    push(pack_push([PushedGroup(bytes(frame_head(frame)), "0" * 32, frame_digest(frame))]))


def pull(frame: bytes) -> None:
    """What the learner checks of a frame: whatever has no problem can be unpacked."""
    if frame and not frame_problem(frame, len(frame), frame_digest(frame)):
        unpack_group(frame)


def group_with_fields(data: bytes) -> bytes:
    """The good group with some fields of its header changed to other plain values."""
    found = atheris.FuzzedDataProvider(data)
    header: dict[Any, Any] = dict(HEADER)
    for _ in range(found.ConsumeIntInRange(1, 3)):
        key = found.PickValueInList(KEYS)
        noise = found.ConsumeBytes(found.ConsumeIntInRange(0, 64))
        value = noise if found.ConsumeBool() else found.PickValueInList(WORDS)
        if key == "prompt" and found.ConsumeBool():
            value = {**HEADER["prompt"], found.PickValueInList(["answer", "text", "prompt_id", "x"]): value}
        header[key] = value
    body = BODY if found.ConsumeBool() else found.ConsumeBytes(256)
    try:
        packed = msgpack.packb(header)
    except (ValueError, OverflowError):
        return b""
    return PREFIX.pack(MAGIC, FORMAT, KIND_GROUP, len(packed), len(body)) + packed + body


def spliced(data: bytes, whole: bytes) -> bytes:
    """The good bytes with some overwritten in one place."""
    if len(data) < 3:
        return whole
    place = int.from_bytes(data[:2], "little") % len(whole)
    return whole[:place] + data[2:] + whole[place + len(data) - 2 :]


def bodies(data: bytes) -> None:
    """The small JSON bodies."""
    for cls in (EnqueueBody, ClaimBody, FailBody):
        try:
            cls.model_validate_json(data)
        except pydantic.ValidationError:
            continue


READERS: list[Callable[[bytes], Any]] = [
    unpack_group,
    read_group_header,
    unpack_batch,
    lambda data: [unpack_group(frame) for frame in split_frames(data)],
    push,
    lambda data: push_head_of(group_with_fields(data)),
    lambda data: push_head_of(spliced(data, GROUP)),
    lambda data: pull(group_with_fields(data)),
    lambda data: pull(spliced(data, GROUP)),
    lambda data: unpack_group(spliced(data, GROUP)),
    lambda data: unpack_batch(spliced(data, BATCH)),
    lambda data: unpack_snapshot(memoryview(data)),
    bodies,
]


class Count:
    """How many inputs so far, and how much memory: growth would show."""

    def __init__(self) -> None:
        self._number, self._began, self._process = 0, time.monotonic(), psutil.Process()

    def one(self) -> None:
        self._number += 1
        if self._number % REPORT_EVERY == 0:
            rss_mb, wall_s = self._process.memory_info().rss >> 20, time.monotonic() - self._began
            sys.stdout.write(f"inputs={self._number} rss_mb={rss_mb} seconds={wall_s:.0f}\n")
            sys.stdout.flush()


COUNT = Count()


def one_input(data: bytes) -> None:
    """What libFuzzer calls."""
    COUNT.one()
    if not data:
        return
    read = READERS[data[0] % len(READERS)]
    with suppress(*ALLOWED):
        read(data[1:])


def write_seeds(folder: Path) -> None:
    """Good inputs to start from."""
    folder.mkdir(parents=True, exist_ok=True)
    request = json.dumps({"requests": [to_map(REQUESTS[0])], "cursor": 1}).encode()
    for index in range(len(READERS)):
        for name, seed in (("group", GROUP), ("batch", BATCH), ("json", request), ("none", b"")):
            (folder / f"{index}-{name}").write_bytes(bytes([index]) + seed)


def main() -> None:
    """Fuzz until -runs or -max_total_time is reached."""
    arguments = sys.argv[1:]
    folders = [argument for argument in arguments if not argument.startswith("-")]
    if folders:
        write_seeds(Path(folders[0]))
    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
