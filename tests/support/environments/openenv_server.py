"""A server of OpenEnv with two steps: `python openenv_server.py PORT`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Heard(Observation):
    text: str = ""


class Steps(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Heard:
        self._state = State(step_count=0)
        self._seed = seed
        return Heard(text="a+c")

    def step(self, action: Said, timeout_s: float | None = None, **options: Any) -> Heard:
        self._state.step_count += 1
        is_last = self._state.step_count == 2
        return Heard(text="b+d", reward=0.25 + 0.125 * (self._seed or 0), done=is_last)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Steps, Said, Heard, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
