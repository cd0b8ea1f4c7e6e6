"""Builders of small values for tests: keyword-only, deterministic, small enough to check by eye.

`rewards` is written as one character per response: "10010000" is G = 8 with 2 right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapo.core.types import (
    Batch,
    BatchEntry,
    Group,
    GroupResult,
    GroupStat,
    HardPrompt,
    Origin,
    Prompt,
    Purpose,
    RolloutRequest,
    Timing,
    stat_of,
)


def rewards_of(rewards: str | Sequence[float]) -> list[float]:
    """ "1001" -> [1.0, 0.0, 0.0, 1.0]; a sequence of numbers is taken as it is."""
    return [float(r) for r in rewards]


def make_prompt(*, prompt_id: str = "p", text: str = "1,2,3->6:", task: str = "countdown") -> Prompt:
    """A Countdown problem whose id says nothing about its content, so that tests can name it."""
    return Prompt(prompt_id=prompt_id, text=text, task=task, answer={"numbers": [1, 2, 3], "target": 6})


def make_request(
    *,
    prompt_id: str = "p",
    request_id: str | None = None,
    group_size: int = 8,
    purpose: Purpose = Purpose.FRESH,
    step: int = 1,
    min_version: int = 1,
    label: str = "",
    attempts: int = 0,
    prompt: Prompt | None = None,
) -> RolloutRequest:
    """A request whose id is that of the prompt unless it is given."""
    return RolloutRequest(
        request_id=request_id or f"g-{prompt_id}",
        prompt=prompt or make_prompt(prompt_id=prompt_id),
        group_size=group_size,
        purpose=purpose,
        step=step,
        min_version=min_version,
        label=label,
        attempts=attempts,
    )


def make_group(
    *,
    rewards: str | Sequence[float] = "10010000",
    prompt_id: str = "p",
    group_id: str | None = None,
    prompt: Prompt | None = None,
    purpose: Purpose = Purpose.FRESH,
    step: int = 1,
    version: int = 1,
    label: str = "",
    worker_id: str = "worker-0",
    lengths: Sequence[int] | None = None,
    num_prompt_tokens: int = 3,
    logprob: float = -0.5,
    truncated: Sequence[int] = (),
    experts: Sequence[int] = (),
) -> Group:
    """A group with one response per reward.

    Args:
        lengths: [G] tokens per response; 1, 2, 3, 1, 2, 3, ... when not given.
        logprob: of every sampled token.
        truncated: indices of the responses that reached the length limit.
        experts: indices of the responses that are a solution of the task instead of a sample.
    """
    values = rewards_of(rewards)
    sizes = list(lengths) if lengths is not None else [1 + i % 3 for i in range(len(values))]
    num_tokens = sum(sizes)
    return Group(
        group_id=group_id or f"g-{prompt_id}",
        prompt=prompt or make_prompt(prompt_id=prompt_id),
        purpose=purpose,
        step=step,
        label=label,
        worker_id=worker_id,
        prompt_token_ids=np.arange(num_prompt_tokens, dtype=np.int32),
        token_ids=np.arange(100, 100 + num_tokens, dtype=np.int32),
        rollout_logprobs=np.full(num_tokens, logprob, dtype=np.float32),
        lengths=np.array(sizes, dtype=np.int32),
        rewards=np.array(values, dtype=np.float32),
        outcomes=np.array([2 * (i in experts) + (i in truncated) for i in range(len(values))], dtype=np.uint8),
        versions=np.full((len(values), 2), version, dtype=np.int32),
        timing=Timing(claimed_at=1_700_000_000.0, sample_s=0.5, grade_s=0.25),
    )


def make_stat(
    *,
    rewards: str | Sequence[float] | None = None,
    k: int | None = None,
    size: int = 8,
    prompt_id: str = "p",
    group_id: str | None = None,
    version: int = 1,
    birth: int = 0,
    truncated: Sequence[int] = (),
    experts: Sequence[int] = (),
) -> GroupStat:
    """What a rule sees of a group; `k` right of `size`, unless `rewards` are given."""
    values = rewards_of(rewards) if rewards is not None else [float(i < (k or 0)) for i in range(size)]
    return stat_of(
        group_id=group_id or f"g-{prompt_id}",
        prompt_id=prompt_id,
        policy_version=version,
        rewards=tuple(values),
        outcomes=bytes(2 * (i in experts) + (i in truncated) for i in range(len(values))),
        birth=birth,
    )


def make_hard(*, prompt_id: str = "p", birth: int = 1, mu: float = 0.0, attempts: int = 0) -> HardPrompt:
    """One entry of B_bad."""
    return HardPrompt(prompt_id=prompt_id, birth=birth, mu=mu, attempts=attempts)


def make_result(
    *,
    group_id: str = "g-p",
    prompt_id: str = "p",
    origin: Origin | None = Origin.X1,
    reason: str = "informative",
    rewards: str | Sequence[float] = "10010000",
    version: int = 1,
    birth: int = 1,
    purpose: Purpose = Purpose.FRESH,
    num_tokens: int = 0,
) -> GroupResult:
    """What an assembly did with one group."""
    return GroupResult(
        group_id=group_id,
        prompt_id=prompt_id,
        purpose=purpose,
        policy_version=version,
        rewards=tuple(rewards_of(rewards)),
        origin=origin,
        reason=reason,
        birth=birth,
        num_tokens=num_tokens,
    )


FULL_RESULT = GroupResult(
    group_id="fresh-00000007",
    prompt_id="ab12",
    purpose=Purpose.FRESH,
    policy_version=10,
    rewards=(1.0, 0.0, 0.5),
    origin=Origin.X1,
    reason="informative",
    birth=12,
    item="fresh-00000007:2,0",
    rows=(2, 0),
    kind="sft",
    outcomes=bytes([0, 1, 2]),
    worker_id="worker-0",
    num_tokens=77,
    sample_s=0.5,
    grade_s=0.25,
    claimed_at=1_700_000_000.125,
    reward_details={"format": 0.5, "facts/length": 3.0},
)
"""No field has its default."""


def make_batch(
    *,
    groups: Sequence[Group] | None = None,
    origins: Sequence[Origin] | None = None,
    step: int = 1,
    r_tot: float = 0.25,
    c2: float = 0.25,
    c3: float = 0.5,
    num_bad: int = 0,
    num_high: int = 0,
) -> Batch:
    """A batch; one default group of X1 unless `groups` are given, and every group has its result."""
    members = [make_group()] if groups is None else list(groups)
    where = list(origins) if origins is not None else [Origin.X1] * len(members)
    pairs = list(zip(where, members, strict=True))
    results = tuple(
        make_result(
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            origin=origin,
            rewards=[float(r) for r in group.rewards],
            version=group.policy_version,
        )
        for origin, group in pairs
    )
    return Batch(
        step=step,
        entries=tuple(BatchEntry(origin=origin, group=group) for origin, group in pairs),
        r_tot=r_tot,
        facts={"c2": c2, "c3": c3, "num_bad": num_bad, "num_high": num_high},
        results=results,
    )
