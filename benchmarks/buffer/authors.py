"""Item 8: what one more group costs in the paper's own in-process buffer at its capacity, and in ours.

Their class is taken out of their source as it is (`OffPolicyGroupBuffer` of verl/trainer/ppo/ray_trainer.py in the
repository waunx/BAPO_ICLR), because the module around it needs all of verl; nothing of it is part of this repository.
A group is what their trainer makes of it: one call of add_score and one of add_sample per response. It is measured in
the state in which it settles; every number of right responses is as likely as any other, or none is right.
"""

from __future__ import annotations

import ast
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Union

import numpy as np

from benchmarks.buffer.groups import GROUP_SIZE, GroupMaker, ask_for, requests_for
from benchmarks.buffer.rivals import BATCH
from benchmarks.buffer.stack import Stack, cpu_seconds

CAPACITY = 1024
PER_ROUND = 27
MAX_IN_WINDOW = 8
"""What it keeps of them when it is full; the rest are hard, because everything else is evicted first."""
RATIO_TARGET = 300.0
CLASSES = ("OffPolicyDataSample", "OffPolicyGroupBuffer")
OURS_PER_ROUND = 1024


def measure(folder: Path, rounds: int, source: Path) -> dict[str, Any]:
    """Medians of interleaved rounds, microseconds per group."""
    names = _load(source)
    mixed, hard = _filled(names), _filled(names)
    with Stack(folder / "ours", aof=False) as stack:
        steps = _Steps(stack)
        rows = [
            {"authors_us": _insert(mixed, None), "authors_hard_only_us": _insert(hard, 0), **steps.insert()}
            for _ in range(rounds + 1)
        ]
    medians = {key: round(statistics.median(row[key] for row in rows[1:]), 2) for key in rows[0]}
    found: dict[str, Any] = {"capacity": CAPACITY, **medians}
    for theirs in ("authors_us", "authors_hard_only_us"):
        for ours in ("store_us", "whole_us"):
            found[f"{theirs} / {ours}"] = round(statistics.median(row[theirs] / row[ours] for row in rows[1:]))
    ratio = found["authors_us / store_us"]
    return found | {"at_least": RATIO_TARGET, "met": ratio >= RATIO_TARGET}


def _load(source: Path) -> dict[str, Any]:
    tree = ast.parse(source.read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in CLASSES]
    names: dict[str, Any] = {
        "time": time, "np": np, "random": random, "defaultdict": defaultdict,
        "Union": Union, "List": list, "Optional": Union,
    }  # fmt: skip
    body = [ast.parse("from __future__ import annotations").body[0], *wanted]
    exec(compile(ast.Module(body=body, type_ignores=[]), str(source), "exec"), names)
    return names


class _Theirs:
    def __init__(self, names: dict[str, Any]) -> None:
        self.buffer = names["OffPolicyGroupBuffer"](max_total_uids=CAPACITY)
        self._sample = names["OffPolicyDataSample"]
        self._next = 0
        self._rng = random.Random(0)

    def insert(self, right: int | None = None) -> None:
        """One group with so many right responses, or any number of them."""
        uid, self._next = f"uid-{self._next}", self._next + 1
        right = self._rng.randint(0, GROUP_SIZE) if right is None else right
        scores = [1.0] * right + [0.0] * (GROUP_SIZE - right)
        self.buffer.add_score(uid, scores, True)
        for score in scores:
            self.buffer.add_sample(uid, self._sample(uid, score, True, {}), step=1)


def _filled(names: dict[str, Any]) -> _Theirs:
    theirs = _Theirs(names)
    for index in range(CAPACITY):
        theirs.insert(4 if index < MAX_IN_WINDOW else index % 2)
    return theirs


def _insert(theirs: _Theirs, right: int | None) -> float:
    begun = time.perf_counter()
    for _ in range(PER_ROUND):
        theirs.insert(right)
    return 1e6 * (time.perf_counter() - begun) / PER_ROUND


class _Steps:
    """Rounds of pushes of 16 groups of 20 kB, and the batches that take them away again."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self._pushed, self._step = stack, 0, 0
        self._maker = GroupMaker(295)

    def insert(self) -> dict[str, float]:
        requests = requests_for(self._pushed, OURS_PER_ROUND, self._step + 1, BATCH)
        self._pushed += OURS_PER_ROUND
        ask_for(self._stack.client, requests)
        frames = self._maker.frames(requests)
        redis = [self._stack.redis.process.pid]
        cpu, begun = cpu_seconds(redis), time.perf_counter()
        for first in range(0, len(frames), 16):
            self._stack.client.push(frames[first : first + 16])
        seconds, cpu_s = time.perf_counter() - begun, cpu_seconds(redis) - cpu
        for _ in range(OURS_PER_ROUND // BATCH):
            self._step += 1
            self._stack.client.batch_frame(self._step, timeout_s=30)
            self._stack.client.commit(self._step, checkpointed=self._step)
        return {"store_us": 1e6 * cpu_s / OURS_PER_ROUND, "whole_us": 1e6 * seconds / OURS_PER_ROUND}
