"""JSON bodies of the API, validated before a use case sees them. Groups and batches are never JSON."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from bapo.core.call_limits import MAX_RENEWALS, MAX_REQUESTS
from bapo.core.codec import request_from_map, require_carried
from bapo.core.text import plain
from bapo.core.types import NAME, PROMPT_ID, Progress, RolloutRequest
from bapo.transport.bodies import Message
from buffer_service.store.redis.frame_access import FrameLogin


def _whole_text(text: str) -> str:
    """Reject lone surrogates, which JSON can encode and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("contains a lone surrogate") from error
    return text


Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
FrameName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Name of a frame that no push has referenced yet: too long to guess."""
Nonce = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]{1,64}-[0-9]{1,15})?$")]
Text = Annotated[str, AfterValidator(_whole_text)]
MAX_DETAIL_CHARS = 2000
Detail = Annotated[Text, AfterValidator(lambda text: plain(text[:MAX_DETAIL_CHARS]))]
"""For log lines and terminals. Truncated, not rejected: a failure report should never fail itself."""
PromptId = Annotated[str, StringConstraints(pattern=f"^{PROMPT_ID}$")]
Version = Annotated[int, Field(ge=0, lt=1 << 21)]
"""Versions and steps: queue scores have 21 bits for them."""
Wait = Annotated[float, Field(ge=0, le=60)]
"""Seconds that a long poll may stay open."""


class Body(BaseModel):
    """Unknown keys are errors, and so is "8" or true in place of a number."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


def example(**fields: Any) -> ConfigDict:
    """Model config with an example for /docs."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


def _asked(values: Any) -> RolloutRequest:
    request = request_from_map(values)
    require_carried(request.prompt)
    return request


Request = Annotated[RolloutRequest, Message(_asked)]
Position = Annotated[Progress, Message()]


def _at_most(most: int, instead: str = "split them into several calls") -> BeforeValidator:
    """Reject a longer list before its items are validated."""

    def counted(items: Any) -> Any:
        if isinstance(items, list) and len(items) > most:
            raise ValueError(f"{len(items)} in one call, the maximum is {most}: {instead}")
        return items

    return BeforeValidator(counted)


_AS_MANY = Field(max_length=MAX_REQUESTS)
Requests = Annotated[list[Request], _AS_MANY, _at_most(MAX_REQUESTS)]
Round = Annotated[list[Request], _AS_MANY, _at_most(MAX_REQUESTS, "a round is one call, re-evaluate fewer prompts")]


class EnqueueBody(Body):
    """Requests, the total number of fresh requests so far including these, and how many of those are spares."""

    model_config = example(
        requests=[
            {
                "request_id": "fresh-00000012",
                "prompt": {
                    "prompt_id": "9f2c41d0",
                    "text": "3,5,2->13:",
                    "task": "countdown",
                    "answer": {"numbers": [3, 5, 2], "target": 13},
                },
                "group_size": 8,
                "purpose": "fresh",
                "step": 1,
                "min_version": 1,
            }
        ],
        cursor=1,
    )

    requests: Requests
    """The id of a request is also that of its group; enqueueing it again has no effect, and is refused with another
    prompt. Workers with weights older than `min_version` do not get it. `temperature`, `top_p` and
    `max_response_tokens` say how an evaluation samples; null: as the workers' configuration says."""
    cursor: int | None = Field(None, ge=0, lt=1 << 53)
    spares: int | None = Field(None, ge=0, lt=1 << 53)


class RoundBody(Body):
    """The requests of one re-evaluation round; may be empty."""

    requests: Round


class ClaimBody(Body):
    """Claim of a worker."""

    model_config = example(worker_id="worker-0", nonce="f3a9c1-17", limit=4, policy_version=5, wait_s=10.0)

    worker_id: Name
    nonce: Nonce = ""
    """`<client>-<number>` with a number that increases with each claim. A repeated nonce is a retry and returns the
    same leases. Without a nonce every call is a new claim."""
    limit: int = Field(ge=1, le=4096)
    policy_version: Version
    wait_s: Wait = 0.0


class RenewBody(Body):
    """Leases to extend."""

    worker_id: Name
    request_ids: Annotated[list[Name], Field(max_length=MAX_RENEWALS), _at_most(MAX_RENEWALS)]


class FailBody(Body):
    """Report of a group that could not be sampled or graded."""

    model_config = example(
        worker_id="worker-0", request_id="fresh-00000012", reason="verifier_timeout", detail="killed after 10 s"
    )

    worker_id: Name
    request_id: Name
    reason: str
    """One lower-case word: it becomes a metric label."""
    detail: Detail = ""


class WorkerBody(Body):
    """The worker that a call concerns."""

    worker_id: Name


class CommitBody(Body):
    """The newest durable checkpoint."""

    checkpointed: Version


class ResumeBody(Body):
    """The checkpoint to resume after."""

    step: Version


# -- answers


class RequestsAnswer(Body):
    """Leased requests."""

    requests: list[Request]


class AcceptedAnswer(Body):
    """Number of new requests."""

    accepted: int


class IdsAnswer(Body):
    """Ids still leased to the worker."""

    request_ids: list[str]


class OutcomeAnswer(Body):
    """`requeued`, `dropped`, or `not_leased` if the worker has no lease for it."""

    outcome: str


class CommittedAnswer(Body):
    """Whether a checkpoint is requested now, because retained batches are filling Redis."""

    checkpoint_wanted: bool


class JournalledAnswer(Body):
    """What came of an append to a journal."""

    result: str
    """ok, not_held, or gap: the entries do not follow."""
    num_entries: int
    """Of the journal."""


class ReleasedAnswer(Body):
    """Number of released leases."""

    released: int


class PushedAnswer(Body):
    """Group id -> `stored`, `duplicate`, `stale` or `unknown`."""

    model_config = example(groups={"fresh-00000012": "stored"}, room=True)

    groups: dict[str, str]
    room: bool
    """Whether more fresh groups would be accepted now."""


class AccessAnswer(Body):
    """Credentials for direct frame transfer with Redis; null: use `/frames/{name}`."""

    url: str = ""
    write: FrameLogin | None = None
    read: FrameLogin | None = None


class SuspectsBody(Body):
    """Groups of a batch whose frames the reader found to be corrupt."""

    group_ids: Annotated[list[Name], Field(max_length=MAX_REQUESTS)]


class BadFramesAnswer(Body):
    """Group id -> problem of its frame, for the groups that the service confirms as corrupt."""

    bad: dict[str, str]


class WaitingAnswer(Body):
    """Why the batch is not ready yet."""

    model_config = example(
        reason="96/256 fresh groups, 2 leased, 158 queued; worker-2 silent for 38 s", counts=[11, 96, 0, 0, 200]
    )

    reason: str
    counts: list[int]
    """Progress counters: newest assembled step, ready fresh groups, ready re-evaluated groups, open requests of
    re-evaluation rounds, finished requests of evaluations."""


class ErrorAnswer(Body):
    """An error from `bapo/core/errors.py`."""

    model_config = example(error="ContractError", message="batch 9 requested, but the next step is 7", retry=False)

    error: str
    """Name of the error class."""
    message: str
    retry: bool
    """Whether a retry may succeed."""


class Page(Body):
    """One page of a list."""

    total: int
    offset: int
    items: list[dict[str, Any]]
