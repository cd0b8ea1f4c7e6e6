"""Processes that run agents: `async def rollout(client, prompt) -> float | None`, many episodes at a time."""
