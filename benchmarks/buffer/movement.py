"""Items 1 to 4: pull and push against Reverb and raw Redis, wall time and CPU, in interleaved rounds of one run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.buffer.groups import SIZES, GroupMaker, Size, requests_for
from benchmarks.buffer.rivals import BATCH, Contender, Moved, Ours, RawRedis, Reverb
from benchmarks.buffer.stack import RedisProcess, Stack

OURS, DURABLE, HTTP, REVERB = "ours", "ours, AOF everysec", "ours, frames by HTTP", "reverb"
RAW, RAW_UNIX = "redis-py over TCP", "redis-py over a unix socket"
Round = dict[str, dict[str, Moved]]
"""Contender -> movement -> what it took."""

PULL_TARGETS = {"20K": 3.0, "100K": 2.0, "500K": 1.1}
PUSH_TARGETS = {"20K": 0.9, "100K": 0.8, "500K": 0.6}


def measure(
    folder: Path, rounds: int, reverb_python: Path | None, sizes: Sequence[str], profile: bool
) -> dict[str, Any]:
    """Medians per size, and the ratios that the targets name."""
    with ExitStack() as stack:
        spied = folder / "service.stacks" if profile else None
        contenders: list[Any] = [
            Ours(OURS, stack.enter_context(Stack(folder / "memory", aof=False, profile=spied))),
            Ours(DURABLE, stack.enter_context(Stack(folder / "durable", aof=True))),
            Ours(HTTP, stack.enter_context(Stack(folder / "http", aof=False, direct=False))),
        ]
        for name in (RAW, RAW_UNIX):
            server = RedisProcess(folder / name, aof=False, tcp=name == RAW)
            stack.callback(server.stop)
            contenders.append(RawRedis(name, server))
        if reverb_python is not None:
            reverb = Reverb(reverb_python, folder / "reverb")
            stack.callback(reverb.stop)
            contenders.append(reverb)
        return {size.name: _one_size(size, contenders, rounds) for size in SIZES if size.name in sizes}


def _one_size(size: Size, contenders: Sequence[Any], rounds: int) -> dict[str, Any]:
    frames = GroupMaker(size.tokens).frames(requests_for(0, size.many, 1, BATCH))
    forms = {}
    for contender in contenders:
        if isinstance(contender, Reverb):
            forms = contender.choose_forms(size, frames)
    results: list[Round] = []
    for index in range(rounds + 1):  # the first one warms up
        # Who comes first has the quieter caches, or the noisier neighbour: everybody is first in turn.
        shift = index % len(contenders)
        results.append({c.name: _one_round(size, c, frames) for c in [*contenders[shift:], *contenders[:shift]]})
    mega = sum(map(len, frames)) / 1e6
    return _summary(size, results[1:], mega) | {"frame_bytes": len(frames[0]), "reverb_forms": forms}


def _one_round(size: Size, contender: Contender, frames: Sequence[bytes]) -> dict[str, Moved]:
    moved = {"push": contender.push(size, frames, size.per_call)}
    moved |= contender.pull(size, size.many)
    moved["single"] = contender.push(size, frames[: size.single], 1)
    contender.pull(size, size.single)
    if isinstance(contender, Reverb):
        moved["single, open stream"] = contender.push_stream(size, frames[: size.single])
        moved["pull, one call per batch"] = contender.pull_calls(size, frames)
    return moved


def _summary(size: Size, rounds: Sequence[Round], mega: float) -> dict[str, Any]:
    """Medians of the rounds; ratios are medians of the ratios within a round."""
    counts = {"single": size.single, "single, open stream": size.single}
    medians: dict[str, dict[str, Any]] = {}
    for name, movements in rounds[0].items():
        medians[name] = {}
        for movement in movements:
            number = counts.get(movement, size.many)
            seconds = statistics.median(r[name][movement].seconds for r in rounds)
            cpu_s = statistics.median(r[name][movement].cpu_s for r in rounds)
            medians[name][movement] = {
                "groups_per_s": round(number / seconds),
                "mb_per_s": round(mega * number / size.many / seconds, 1),
                "cpu_ms_per_mb": round(1000 * cpu_s / (mega * number / size.many), 3),
            }
    return {"medians": medians, "ratios": ratios(rounds), "targets": _targets(size.name, ratios(rounds))}


def ratios(rounds: Sequence[Round]) -> dict[str, float]:
    """Speeds of ours over the rivals' (more is better), and CPU of ours over theirs (less is better)."""
    found: dict[str, float] = {}
    for ours in (OURS, DURABLE, HTTP):
        for rival in (REVERB, RAW, RAW_UNIX):
            if rival not in rounds[0] or ours not in rounds[0]:
                continue
            for movement in ("push", "single", "pull"):
                mine = [r[ours][movement] for r in rounds]
                theirs = [r[rival][movement] for r in rounds]
                pairs = list(zip(mine, theirs, strict=True))
                key = f"{movement}: {ours} / {rival}"
                found[key] = _median(b.seconds / a.seconds for a, b in pairs)
                found[f"{key}, CPU"] = _median(a.cpu_s / b.cpu_s for a, b in pairs)
            if rival == REVERB:
                for mine, theirs in (("single", "single, open stream"), ("pull", "pull, one call per batch")):
                    found[f"{mine}: {ours} / {rival}'s {theirs}"] = _median(
                        r[rival][theirs].seconds / r[ours][mine].seconds for r in rounds
                    )
            key = f"pull and commit: {ours} / {rival}"
            found[key] = _median(
                r[rival]["pull"].seconds / (r[ours]["pull"].seconds + r[ours]["commit"].seconds) for r in rounds
            )
    return found


def _targets(size: str, found: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    wanted = [(f"pull: {OURS} / {REVERB}", PULL_TARGETS[size]), (f"push: {OURS} / {REVERB}", PUSH_TARGETS[size])]
    return {
        key: {"found": found[key], "at_least": target, "met": found[key] >= target}
        for key, target in wanted
        if key in found
    }


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)
