"""An engine without a worker: requests in, groups without rewards out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from bapo.config.tree import Config
from bapo.core.types import Group, RolloutRequest, Timing
from rollout_server.engines.base import Engine
from rollout_server.rollouts.base import Rollout, completion_of
from rollout_server.tokenization import Tokenization


@dataclass
class Driven:
    """Makes calls of requests, and groups of what comes back."""

    engine: Engine
    tokenization: Tokenization
    config: Config
    open: dict[str, RolloutRequest] = field(default_factory=dict)

    def submit(self, request: RolloutRequest, **changes: Any) -> None:
        """`changes`: of the call."""
        prompt = self.tokenization.encode_prompt(request.prompt)
        call = replace(completion_of(request, prompt, self.config), **changes)
        self.engine.add(call)
        self.open[call.call_id] = msgspec.structs.replace(request, request_id=call.call_id)

    def step(self) -> list[Group]:
        """One step; returns the groups that it has ended."""
        timing = Timing(claimed_at=0, sample_s=0, grade_s=0)
        groups = []
        for done in self.engine.step():
            request, rewards = self.open.pop(done.call_id), np.zeros(len(done.sequences), np.float32)
            rollout = Rollout(request=request, prompt_token_ids=done.token_ids, sequences=done.sequences)
            groups.append(rollout.group(rewards, worker_id="", timing=timing))
        return groups

    def finish(self, requests: Iterable[RolloutRequest] = ()) -> list[Group]:
        """Everything that is in the engine, and these."""
        for request in requests:
            self.submit(request)
        groups: list[Group] = []
        for _ in range(10_000):
            if not self.open:
                return groups
            groups += self.step()
        raise AssertionError(f"{len(self.open)} calls did not finish")
