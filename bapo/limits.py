"""Limits of a configuration beside what a run of its size asks for: the sums of `bapo plan-capacity`. Pure.

    rollout.sync_timeout_s     weights from one rollout server over HTTP to the host of every worker
    buffer.max_memory_mb       all groups that Redis holds before a checkpoint releases some, at full length
    learner.batch_timeout_s    a full engine's first group, when every response is as long as it may be

What one worker samples per second is not known here: `bapo.capacity.Plan` says what is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bapo.capacity import Plan, capacity
from bapo.config.buffer import MAXMEMORY_SHARE
from bapo.config.tree import Config

MB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One setting and the least that it should be; twice that leaves room."""

    key: str
    configured: float
    needed: float
    why: str

    @property
    def is_low(self) -> bool:
        """Below what the planner says."""
        return self.configured < self.needed

    @property
    def complaint(self) -> str:
        """For people."""
        return f"{self.key} = {self.configured:g} is low: {self.why} ({self.needed:,.0f}); write {2 * self.needed:.0f}"


def limits(config: Config, *, parameters: int | None, is_cluster: bool) -> Iterator[Limit]:
    """What this run would need of its limits.

    Args:
        parameters: of the model; None: not known, and its transfer is left out.
        is_cluster: workers may be on hosts that share no folder with the learner: each may be on one of its own.
    """
    plan = plan_of(config, parameters or 0)
    found = capacity(plan)
    if parameters and is_cluster:
        why = f"one update of {found.weight_file_bytes / 1e9:,.1f} GB over HTTP to {found.hosts} hosts takes so long"
        yield Limit(
            key="rollout.sync_timeout_s", configured=config.rollout.sync_timeout_s, needed=found.http_s, why=why
        )
    if config.buffer.url is None and config.buffer.redis_url is None:
        why = f"{found.resident_groups:,} groups of {plan.response_tokens:,} tokens per response fill so much"
        needed = found.redis_bytes / MB / MAXMEMORY_SHARE
        yield Limit(key="buffer.max_memory_mb", configured=config.buffer.max_memory_mb, needed=needed, why=why)
    held, needed = first_group(config, plan)
    why = f"{held} groups of full length in one engine may bring none for so long, at {plan.tokens_per_s:,.0f} tokens/s"
    yield Limit(key="learner.batch_timeout_s", configured=config.learner.batch_timeout_s, needed=needed, why=why)


def plan_of(config: Config, parameters: int) -> Plan:
    """The run as `bapo plan-capacity` sees it: one worker per host, responses of full length."""
    return Plan(
        workers=config.rollout.num_workers,
        parameters=parameters,
        weight_bytes=2 if config.model.dtype == "bfloat16" else 4,
        response_tokens=config.rollout.max_response_tokens,
        group_size=config.algorithm.group_size,
        batch_size=config.algorithm.batch_size,
        v=config.cadence.v,
        slack=config.cadence.slack,
        checkpoint_every=config.checkpoint.every,
        high_window=config.algorithm.high_window if config.algorithm.use_x3 else 0,
    )


def first_group(config: Config, plan: Plan) -> tuple[int, float]:
    """(groups that a worker samples at a time, seconds until one is done when all are as long as they may be)."""
    allowed = math.ceil(plan.batch_size * (plan.v + plan.slack) / plan.workers)
    held = min(config.rollout.max_groups_in_flight, allowed)
    tokens = held * plan.group_size * plan.response_tokens
    return held, max(plan.response_tokens / plan.decode_tokens_per_s, tokens / plan.tokens_per_s)
