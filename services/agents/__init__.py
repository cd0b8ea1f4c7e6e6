"""Processes that run agents: `async def rollout(client, prompt) -> float | GRADE | None`, many episodes at a time.

runner.py      episodes --> rollout --> rewards
rollouts.py    what `agents.rollout` names: a function, or an environment by way of adapters/
standalone.py  environments that need a Python of their own, for `agents.python`
"""

from services.agents.outcome import GRADE

__all__ = ["GRADE"]
