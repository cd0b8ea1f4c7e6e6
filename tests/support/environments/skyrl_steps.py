"""An environment of skyrl-gym with two steps."""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Steps(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.first = extras["first"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        if self.turns == 1:
            following = [{"role": "user", "content": "b+d"}]
            return BaseTextEnvStepOutput(observations=following, reward=self.first, done=False, metadata={})
        return BaseTextEnvStepOutput(observations=[], reward=0.5, done=True, metadata={})
