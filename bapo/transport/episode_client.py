"""Client of those who run agents: open episodes, heartbeat, reward (the routes are in `rollout_server/episodes`).

client = EpisodeClient("http://127.0.0.1:8720")
for episode in client.open(8, wait_s=30):
    agent = OpenAI(base_url=episode.base_url, api_key=episode.key)
    ...
    client.reward(episode.key, 1.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bapo.core.errors import ContractError
from bapo.core.types import Prompt
from bapo.runtime.auth.api_tokens import Token
from bapo.transport.service_client import ServiceClient, quoted

TIMEOUT_S = 60.0
RETRY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEpisode:
    """An episode that is ours to run."""

    episode_id: str
    """For logs: request id and index of the response."""
    key: str
    """API key of its agent."""
    base_url: str
    """Of the agent's client."""
    lease_s: float
    """Seconds that it may be silent."""
    purpose: str
    """fresh, reevaluate or evaluate."""
    prompt: Prompt
    """Its `answer` has the columns that the reward reads, unless `agents.with_answers` is false."""


class EpisodeClient:
    """Thread-safe."""

    def __init__(
        self, url: str, *, token: str | Token | None = None, retry_s: float = RETRY_S, agent: str = ""
    ) -> None:
        """
        Args:
            url: of the agents' address, without `/v1`.
            token: of role `agent`; None: from BAPO_TOKEN_FILE or BAPO_TOKEN, if set.
            retry_s: how long calls are repeated while it does not respond.
            agent: NAME@START of this process, if another one takes its NAME when it has died: the episodes that it had
                then begin again at once, not when their leases end.
        """
        self._agent = agent
        self._service = ServiceClient("the agents' address", url, timeout_s=TIMEOUT_S, retry_s=retry_s, token=token)

    def open(self, count: int, *, wait_s: float = 0.0) -> list[OpenedEpisode]:
        """Take up to `count` episodes; waits for the first one. Raises: UnavailableError."""
        body = {"count": count, "wait_s": wait_s, "agent": self._agent}
        return [_opened(found) for found in self._service.call("POST", "/v1/episodes", body=body, wait_s=wait_s).json()]

    def heartbeat(self, key: str) -> None:
        """The agent is alive. Raises: GoneError."""
        self._service.call("POST", f"/v1/episodes/{quoted(key)}/heartbeat", body={})

    def reward(self, key: str, reward: float, facts: Mapping[str, float] | None = None) -> str:
        """End an episode with its reward in [0, 1]. Returns: ok; group, if it completed one; duplicate.

        Args:
            facts: further numbers of the episode, which are recorded.
        Raises: GoneError; ConflictError for another reward than before; ContractError.
        """
        return self._end(key, {"reward": reward} | ({"facts": dict(facts)} if facts else {}))

    def grade(self, key: str, facts: Mapping[str, float] | None = None) -> str:
        """End an episode whose last text is graded by the task's reward function. Returns, raises: as `reward`."""
        return self._end(key, {"facts": dict(facts)} if facts else {})

    def ungraded(self, key: str, error: str) -> str:
        """End an attempt without a reward: it begins again, a limited number of times. Raises: GoneError."""
        return self._end(key, {"reward": None, "error": error[:1000]})

    def give_back(self, key: str, reason: str = "") -> None:
        """Let another agent run it. Raises: GoneError."""
        self._service.call("DELETE", f"/v1/episodes/{quoted(key)}", query={"reason": reason[:200]})

    def _end(self, key: str, body: Mapping[str, Any]) -> str:
        return str(self._service.call("POST", f"/v1/episodes/{quoted(key)}/reward", body=body).json()["state"])


def _opened(fields: Mapping[str, Any]) -> OpenedEpisode:
    try:
        prompt = fields["prompt"]
        return OpenedEpisode(
            **{name: fields[name] for name in ("episode_id", "key", "base_url", "lease_s", "purpose")},
            prompt=Prompt(
                prompt_id=prompt["prompt_id"],
                text=prompt["text"],
                task=prompt["task"],
                answer=prompt["answer"],
            ),
        )
    except (KeyError, TypeError) as error:
        raise ContractError(f"an episode is malformed: {fields!r:.200}") from error
