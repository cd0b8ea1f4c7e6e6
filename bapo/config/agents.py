"""Episodes of agents that call an OpenAI-compatible address (docs/agents.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from bapo.algorithms.settings import MAX_SECONDS, Frozen
from bapo.core.addresses import bare_host, http_address


class AgentsConfig(Frozen):
    """Responses are episodes of an agent: any program that calls the address of the rollout server."""

    rollout: str | None = None
    """`file.py:function` or `package.module:function`: `async def rollout(client, prompt) -> float | None`, run by this
    run's processes; or an environment: `env:file.py:Class`, `tools:file.py:TOOLS`, `trl:file.py:Class`,
    `verifiers:MODULE`, `openenv:URL`, `skyrl_gym:ID` (docs/agents.md). null: only agents outside."""
    python: str | None = None
    """Interpreter for `verifiers:`, `openenv:` and `skyrl_gym:`; null: that of `bapo env install`."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Of such an environment (services/agents/standalone.py)."""
    num_processes: int = Field(1, ge=1)
    """Processes that run `rollout`."""
    episodes_per_process: int = Field(32, ge=1)
    """Episodes that one process runs at a time."""
    host: Annotated[str, AfterValidator(bare_host)] = "127.0.0.1"
    """The address that agents call."""
    port: int = Field(8720, ge=0, le=65535)
    """Its port; 0: a free one."""
    url: Annotated[str, AfterValidator(http_address)] | None = None
    """Address for agents outside, such as a proxy with TLS: `https://agents.example.org`; needs a single rollout
    server. null: host and port."""
    model_name: str = "policy"
    """Name of the policy for agents."""
    tool_call_parser: str | None = "hermes"
    """vLLM's parser of tool calls, of the model's family; null: none."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning."""
    max_turns: int = Field(64, ge=1)
    """Calls of the model in an episode; a further one is refused."""
    max_tokens: int | None = Field(None, ge=1)
    """Context and sampled tokens of an episode, with forks; null: `learner.microbatch_tokens`, its limit."""
    with_answers: bool = True
    """Send agents the columns of a prompt that its reward reads, as environments may need; agents are trusted with
    them."""
    lease_s: float = Field(120.0, gt=0, le=MAX_SECONDS)
    """Seconds without a call or report of its agent after which an episode begins again."""
    timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """Seconds after which an episode of `rollout` is ungraded, and begins again; if longer, raise
    `learner.batch_timeout_s`, too."""
    max_attempts: int = Field(3, ge=1)
    """Attempts at an episode before its group is dropped."""
