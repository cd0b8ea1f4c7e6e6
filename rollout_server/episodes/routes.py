"""The routes of those who run agents: open episodes, heartbeat, reward, give back (docs/agents.md).

POST /v1/episodes {count, wait_s, agent} -> [{episode_id, key, base_url, prompt, ...}]; [] after wait_s
POST /v1/episodes/KEY/heartbeat         each call of the model is one, too
POST /v1/episodes/KEY/reward {reward}   0 to 1, true or false; without one, or without a body, the task's reward
                                        function grades the last text; null: ungraded, the episode begins again.
                                        `facts`: numbers to record
DELETE /v1/episodes/KEY                 give it back
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, ClassVar, Self

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from bapo.core.errors import BapoError, ContractError
from bapo.core.reward_details import MAX_DETAILS, is_fact
from bapo.core.types import SAME_REWARD
from bapo.runtime.auth.api_tokens import Role
from bapo.tasks.base import RESERVED
from bapo.transport.http_guard import allow, error_answer, named_error, problems_of
from rollout_server.episodes.gate import MODEL_PATHS, error_response, refusal_of
from rollout_server.episodes.manager import Episodes, Handle

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
MAX_COUNT = 256
MAX_WAIT_S = 60.0
POLL_S = 0.5
"""Between two looks whether an agent that waits is still there."""


class Body(BaseModel):
    """JSON, whatever type a client declares; nothing is an empty object."""

    model_config = ConfigDict(extra="forbid", strict=True)
    expected: ClassVar[str]

    @classmethod
    async def of(cls, request: Request) -> Self:
        """Raises: ContractError."""
        try:
            return cls.model_validate_json(await request.body() or b"{}")
        except ValidationError as error:
            raise ContractError(f"{problems_of(error.errors())}. Send {cls.expected}") from None


class OpenBody(Body):
    """How many episodes an agent takes."""

    expected = f'{{"count": 1 to {MAX_COUNT}, "wait_s": 0 to {MAX_WAIT_S:g}}}'

    count: int = Field(1, ge=1, le=MAX_COUNT)
    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    """For the first of them."""
    agent: str = Field("", max_length=200, pattern=r"^([^@]+@[^@]+)?$")
    """NAME@START of a process that is restarted under its name: those of NAME with another START begin again."""


def _number_of(reward: Any) -> Any:
    """As everywhere in Python true is 1 and false 0; a sum of parts may miss its end by a rounding."""
    if isinstance(reward, int | float) and -SAME_REWARD <= reward <= 1 + SAME_REWARD:
        return min(max(float(reward), 0.0), 1.0)
    return reward


def _as_number(fact: Any) -> Any:
    return float(fact) if isinstance(fact, bool) else fact


class RewardBody(Body):
    """The end of an episode."""

    expected = (
        '{"reward": 0 to 1, true or false}; {"reward": null, "error": "why"} for an episode that could not be graded; '
        "no body for the task's reward function"
    )

    reward: Annotated[float | None, BeforeValidator(_number_of)] = Field(math.nan, ge=0, le=1)
    """null: it could not be graded; absent: the task's reward function grades the last text."""
    error: str = ""
    """Why there is no reward."""
    facts: dict[str, Annotated[float, BeforeValidator(_as_number)]] = Field(
        default_factory=dict, max_length=MAX_DETAILS
    )
    """Further numbers of the episode, which are recorded."""

    @field_validator("facts")
    @classmethod
    def facts_can_be_recorded(cls, facts: dict[str, float]) -> dict[str, float]:
        if odd := [name for name, value in facts.items() if not is_fact(name, value)]:
            raise ValueError(
                f"{odd[0]!r:.100} cannot be recorded: a fact is a finite number, named in 1 to 64 printable characters"
            )
        return facts


def attach(app: FastAPI, episodes: Episodes, *, base_url: str, with_answers: bool) -> None:
    """Add the routes, and the answers to our errors.

    Args:
        base_url: of the model's routes, as agents reach it.
        with_answers: whether prompts are sent with the columns that the reward reads, which an environment may need.
    """
    router = APIRouter(prefix="/v1/episodes", tags=["episodes"])

    @router.post("")
    @allow(Role.AGENT)
    async def open_episodes(request: Request) -> list[dict[str, Any]]:
        """Take up to `count` episodes; waits for the first. Empty when there is none."""
        handles = await _opened(episodes, await OpenBody.of(request), request)
        return [_described(handle, base_url, episodes.lease_s, with_answers=with_answers) for handle in handles]

    @router.post("/{key}/heartbeat")
    @allow(Role.AGENT, is_open=True)
    async def heartbeat(key: str) -> dict[str, float]:
        """The agent is alive, and works without the model."""
        episodes.handle_of(key)
        return {"lease_s": episodes.lease_s}

    @router.post("/{key}/reward")
    @allow(Role.AGENT, is_open=True)
    async def reward(key: str, request: Request) -> dict[str, str]:
        """End an episode with its reward: ok, group (the last of its group), duplicate, ungraded."""
        body = await RewardBody.of(request)
        if body.reward is None or (body.error and math.isnan(body.reward)):
            await episodes.ungraded(key, body.error)
            return {"state": "ungraded"}
        return {"state": await episodes.reward(key, body.reward, body.facts)}

    @router.delete("/{key}", status_code=204)
    @allow(Role.AGENT, is_open=True)
    async def give_back(key: str, reason: Annotated[str, Query(max_length=200)] = "") -> None:
        """End the attempt without a reward: another agent begins it again."""
        await episodes.fail(episodes.handle_of(key), "given_back", reason, counts=False)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(BapoError)
    async def answer(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, BapoError):  # of vLLM's routes
            return error_response(400, str(named_error(error, request.method, request.url.path)))
        if request.url.path.startswith(router.prefix):
            return JSONResponse(**error_answer(error, lambda _: None))
        return refusal_of(error)

    app.include_router(router)
    app.add_api_route("/{path:path}", nothing, methods=list(METHODS), include_in_schema=False)


@allow(is_open=True)
async def nothing(request: Request) -> JSONResponse:
    """What nothing else answers: a refusal for want of a token would hide that the path is wrong."""
    return error_response(
        404,
        f"{request.method} {request.url.path}: nothing is served here. A client's base_url ends in /v1 (that of "
        f"Anthropic's SDK does not); agents POST to {', '.join(MODEL_PATHS)}",
    )


async def _opened(episodes: Episodes, body: OpenBody, request: Request) -> list[Handle]:
    """Episodes for an agent that is still there: one that has hung up would keep them until their leases end."""
    deadline = time.monotonic() + body.wait_s
    while not await request.is_disconnected():
        left = deadline - time.monotonic()
        handles = await episodes.open(body.count, max(0.0, min(left, POLL_S)), body.agent)
        if handles and await request.is_disconnected():
            for handle in handles:
                await episodes.fail(handle, "given_back", "its agent hung up before it had it", counts=False)
            break
        if handles or left <= POLL_S:
            return handles
    return []


def _described(handle: Handle, base_url: str, lease_s: float, *, with_answers: bool) -> dict[str, Any]:
    request = handle.group.request
    prompt = request.prompt
    return {
        "episode_id": f"{request.request_id}/{handle.episode.index}",
        "key": handle.key,
        "base_url": base_url,
        "lease_s": lease_s,
        "purpose": request.purpose.value,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "text": prompt.text,
            "task": prompt.task,
            "messages": prompt.messages,
            "answer": {name: value for name, value in prompt.answer.items() if with_answers or name in RESERVED},
        },
    }
