"""What a run of a given size asks of the network, the buffer services, Redis and the weight updates. Pure sums.

Symbols: W workers, r response tokens per second of one worker and d of one response, G responses of L tokens per group,
B groups per step, v steps per weight update, P parameters.

    groups/s            W r / (G L)                      what workers make
    step                B G L / (W r) seconds            when the learner keeps up
    in flight           groups/s x L / d                 that workers hold (Little); at most B (v + slack)
    group               G L 8 + 700 bytes                int32 id and float32 log-prob per token, header, rewards
    in and out          groups/s x group bytes           pushed once, pulled once with its batch (reused ones again)
    one file            P x bytes per weight             to every host that does not share the learner's folder

Unit costs are measured (docs/buffer_performance.md, docs/scale.md) and scale with bytes and calls; they are those of
two shared CPU cores, so a real machine is likely to be better. What workers sample per second is yours to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES_PER_TOKEN = 8
GROUP_OVERHEAD_BYTES = 700
"""Frames of 295 and 7,600 tokens per response had 19.5 and 487 kB: their tokens are 18.9 and 486.4 of these."""
INDEX_BYTES = 504
"""Of Redis per resident group, beside its frame."""
REDIS_SHARE = 0.35
"""Of a claim's CPU: as for the smallest call that was measured apart, 175 of 330 + 175 us for one push of 20 kB."""
MOST_LOAD = 0.5
"""Share of what a part can do at most that it should be asked for: queues grow beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured on two shared cores."""

    push_call_s: float = 0.602e-3
    """One group per request, AOF everysec, wall: 0.673 ms at 19.5 kB and 2.392 ms at 487 kB lie on this line."""
    push_byte_s: float = 3.677e-9
    pull_byte_s: float = 0.698e-9
    """2,941 groups of 487 kB per second."""
    claim_s: float = 1.0e-3
    """CPU of service and Redis for one claim."""
    redis_byte_s: float = 0.46e-9
    """CPU of Redis per byte pushed: 231 us for a group of 500 kB."""
    transport_bytes_per_s: float = 83e6
    """Weights over HTTP from one rollout server, both ends in one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run to be planned."""

    workers: int = 1000
    tokens_per_s: float = 1500.0
    """Response tokens per second of one worker. Not measured here."""
    decode_tokens_per_s: float = 40.0
    """Response tokens per second of one response. Not measured here."""
    parameters: float = 70e9
    weight_bytes: int = 2
    response_tokens: int = 32_768
    group_size: int = 8
    batch_size: int = 256
    v: int = 5
    slack: int = 1
    checkpoint_every: int = 10
    high_window: int = 3
    high_share: float = 1.0
    """Share of fresh groups that enter B_high: at most."""
    polls_per_s: float = 2.0
    """Claims of a worker that finds nothing: a long poll lasts half a second."""
    workers_per_host: int = 1
    host_bytes_per_s: float = 12.5e9
    """Of a host's network: 100 Gbit/s."""

    def __post_init__(self) -> None:
        for name in (
            "workers",
            "tokens_per_s",
            "decode_tokens_per_s",
            "response_tokens",
            "group_size",
            "batch_size",
            "v",
            "workers_per_host",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One demand beside what there is for it."""

    name: str
    demand: str
    load: float
    """Share of what one of it can do; above 1: it cannot."""
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The sums."""

    groups_per_s: float
    step_s: float
    group_s: float
    """How long a group is in an engine."""
    in_flight_needed: float
    in_flight_allowed: int
    group_bytes: float
    in_bytes_per_s: float
    resident_groups: int
    redis_bytes: float
    calls_per_s: float
    """Claims and pushes."""
    service_load: float
    """Of one buffer service."""
    replicas: int
    redis_load: float
    weight_file_bytes: float
    sync_period_s: float
    hosts: int
    http_s: float
    """One update by HTTP from one rollout server to every host, at the measured speed."""
    line_s: float
    """The same at the speed of its network."""
    relay_s: float
    """If every host that has the file sends it on: hosts that have it double."""
    shared_s: float
    """If every host reads it from a file system at the speed of its own network."""
    lines: tuple[Line, ...]

    @property
    def bottleneck(self) -> Line:
        """What is asked for most, relative to what one of it can do."""
        return max(self.lines, key=lambda line: line.load)


def capacity(plan: Plan, costs: Costs | None = None) -> Capacity:
    """All sums of one plan."""
    costs = costs or Costs()
    tokens_of_group = plan.group_size * plan.response_tokens
    groups_per_s = plan.workers * plan.tokens_per_s / tokens_of_group
    step_s = plan.batch_size / groups_per_s
    group_s = plan.response_tokens / plan.decode_tokens_per_s
    needed, allowed = groups_per_s * group_s, plan.batch_size * (plan.v + plan.slack)
    group_bytes = tokens_of_group * BYTES_PER_TOKEN + GROUP_OVERHEAD_BYTES
    in_bytes = groups_per_s * group_bytes
    # Waiting and on their way, in B_high, and in batches that wait for the next checkpoint.
    resident = round(
        plan.batch_size * (plan.v + plan.slack + plan.high_window * plan.high_share + plan.checkpoint_every)
    )
    redis_bytes = resident * (group_bytes + INDEX_BYTES)
    calls = plan.workers * plan.polls_per_s + groups_per_s
    service_load = (
        plan.workers * plan.polls_per_s * costs.claim_s
        + groups_per_s * (costs.push_call_s + group_bytes * costs.push_byte_s)
        + in_bytes * costs.pull_byte_s
    )
    redis_load = in_bytes * costs.redis_byte_s + calls * REDIS_SHARE * costs.claim_s
    file_bytes = plan.parameters * plan.weight_bytes
    hosts = math.ceil(plan.workers / plan.workers_per_host)
    period_s = plan.v * step_s
    http_s = hosts * file_bytes / costs.transport_bytes_per_s
    line_s = hosts * file_bytes / plan.host_bytes_per_s
    shared_s = file_bytes / plan.host_bytes_per_s
    relay_s = math.ceil(math.log2(hosts + 1)) * shared_s
    return Capacity(
        groups_per_s=groups_per_s, step_s=step_s, group_s=group_s, in_flight_needed=needed,
        in_flight_allowed=allowed, group_bytes=group_bytes, in_bytes_per_s=in_bytes,
        resident_groups=resident, redis_bytes=redis_bytes, calls_per_s=calls, service_load=service_load,
        replicas=max(1, math.ceil(service_load / MOST_LOAD)), redis_load=redis_load, weight_file_bytes=file_bytes,
        sync_period_s=period_s, hosts=hosts, http_s=http_s, line_s=line_s, relay_s=relay_s, shared_s=shared_s,
        lines=(
            Line(name="groups in flight", demand=f"{needed:,.0f} of the {allowed:,} that staleness allows",
                 load=needed / allowed, remedy="a larger slack or B, or fewer and faster workers"),
            Line(name="weights, HTTP from one rollout server, as measured", demand=f"{http_s:,.0f} s per update",
                 load=http_s / period_s, remedy="share the folder, or several rollout servers"),
            Line(name="weights, one sender at its line's speed", demand=f"{line_s:,.0f} s per update",
                 load=line_s / period_s, remedy="relays, or a file system that hosts share"),
            Line(name="weights, relays", demand=f"{relay_s:,.1f} s per update", load=relay_s / period_s,
                 remedy="a larger v, or weights in fewer bits"),
            Line(name="weights, shared file system", demand=f"{shared_s:,.1f} s per update", load=shared_s / period_s,
                 remedy="a larger v, or weights in fewer bits"),
            Line(name="buffer service", demand=f"{calls:,.0f} calls/s, {in_bytes / 1e6:,.1f} MB/s",
                 load=service_load, remedy="replicas (buffer.url)"),
            Line(name="Redis, CPU", demand=f"{in_bytes / 1e6:,.1f} MB/s", load=redis_load,
                 remedy="several runs have several Redis; one run has one (ADR 0044)"),
            Line(name="learner's network, one batch per step", demand=f"{in_bytes / 1e6:,.1f} MB/s",
                 load=in_bytes / plan.host_bytes_per_s, remedy="-"),
        ),
    )  # fmt: skip
