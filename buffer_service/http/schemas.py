"""The small JSON bodies of the API, checked before a use case sees them. Groups and batches are never JSON."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from bapo.core.call_limits import MOST_RENEWALS, MOST_REQUESTS, MOST_RESPONSES
from bapo.core.errors import ContractError
from bapo.core.frames import MOST_PROMPT_BYTES, require_plain
from bapo.core.text import plain
from bapo.core.types import IMAGE_DIGEST, MOST_IMAGES, Prompt, Purpose, RolloutRequest
from buffer_service.store.redis.frame_access import FrameLogin
from buffer_service.store.redis.rows import pack


def _whole_text(text: str) -> str:
    """Refuse half characters, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a character (a surrogate)") from error
    return text


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@~+-]{0,127}$")]
"""Ids that become keys or words of a script: no spaces, no braces."""
Label = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._@~+-]{0,127})?$")]
FrameName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Of a frame that no push has named yet: too long to be guessed."""
Nonce = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]{1,64}-[0-9]{1,15})?$")]
Text = Annotated[str, AfterValidator(_whole_text)]
MOST_DETAIL_CHARS = 2000
Detail = Annotated[Text, AfterValidator(lambda text: plain(text[:MOST_DETAIL_CHARS]))]
"""For log lines and terminals. Cut, not refused: a worker that reports a failure has done nothing wrong."""
PromptId = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$")]
Version = Annotated[int, Field(ge=0, lt=1 << 21)]
"""Versions and steps: a queue's score has 21 bits for them."""
Wait = Annotated[float, Field(ge=0, le=60)]
"""Seconds that a long poll may stay open."""


class Body(BaseModel):
    """A misspelt key is an error, and so is "8" or true for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


def example(**fields: Any) -> ConfigDict:
    """For /docs."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class PromptBody(Body):
    """One problem."""

    prompt_id: PromptId
    text: Text
    task: Text
    answer: dict[str, Any]
    images: list[Annotated[str, StringConstraints(pattern=IMAGE_DIGEST)]] = Field([], max_length=MOST_IMAGES)
    """sha256 of the files of its images."""

    @model_validator(mode="after")
    def can_be_stored_and_answered(self) -> Self:
        try:
            require_plain(self.answer, "its answer")
            size = len(self.text.encode()) + len(pack(self.answer))  # refuses integers beyond 64 bits, broken text
        except ContractError as error:
            raise ValueError(f"prompt {self.prompt_id}: {error}") from error
        if size > MOST_PROMPT_BYTES:
            raise ValueError(
                f"prompt {self.prompt_id} has {size} bytes of text and answer; at most {MOST_PROMPT_BYTES} are taken, "
                "because its groups repeat them"
            )
        return self


class RequestBody(Body):
    """Ask for one group."""

    model_config = example(
        request_id="fresh-00000012",
        prompt={
            "prompt_id": "9f2c41d0",
            "text": "3,5,2->13:",
            "task": "countdown",
            "answer": {"numbers": [3, 5, 2], "target": 13},
        },
        group_size=8,
        purpose="fresh",
        step=1,
        min_version=1,
    )

    request_id: Name
    """Becomes the group's id; asking twice asks once."""
    prompt: PromptBody
    group_size: int = Field(ge=1, le=MOST_RESPONSES)
    purpose: Annotated[Purpose, Field(strict=False)]  # JSON has its name
    step: Version
    min_version: Version
    """A worker whose weights are older does not get it."""
    label: Label = ""
    attempts: int = Field(0, ge=0, lt=1 << 31)

    @model_validator(mode="after")
    def only_evaluations_are_of_one_response(self) -> Self:
        if self.purpose is not Purpose.EVALUATE and self.group_size < 2:
            raise ValueError(f"request {self.request_id}: group_size {self.group_size}: one response has no advantage")
        return self

    @model_validator(mode="after")
    def evaluations_have_a_label(self) -> Self:
        if self.purpose is Purpose.EVALUATE and not self.label:
            raise ValueError(f"request {self.request_id} has no label: an evaluation is collected and forgotten by it")
        return self

    def to_request(self) -> RolloutRequest:
        """The value."""
        fields = self.model_dump(exclude={"prompt", "purpose"})
        prompt = self.prompt.model_dump() | {"images": tuple(self.prompt.images)}
        return RolloutRequest(**fields, purpose=self.purpose, prompt=Prompt(**prompt))


def _at_most(most: int, instead: str = "send them in several") -> BeforeValidator:
    """Refuse a longer list before its items are checked."""

    def counted(items: Any) -> Any:
        if isinstance(items, list) and len(items) > most:
            raise ValueError(f"{len(items)} in one call; at most {most} are taken: {instead}")
        return items

    return BeforeValidator(counted)


_AS_MANY = Field(max_length=MOST_REQUESTS)
Requests = Annotated[list[RequestBody], _AS_MANY, _at_most(MOST_REQUESTS)]
Round = Annotated[list[RequestBody], _AS_MANY, _at_most(MOST_REQUESTS, "a round is one call, ask fewer prompts again")]


class EnqueueBody(Body):
    """Requests, how many fresh ones were ever enqueued, these included, and how many of those are spares."""

    requests: Requests
    cursor: int | None = Field(None, ge=0, lt=1 << 53)
    spares: int | None = Field(None, ge=0, lt=1 << 53)


class RoundBody(Body):
    """The requests of one re-evaluation round; none is allowed."""

    requests: Round


class ClaimBody(Body):
    """What a worker can take."""

    model_config = example(worker_id="worker-0", nonce="f3a9c1-17", limit=4, policy_version=5, wait_s=10.0)

    worker_id: Name
    nonce: Nonce = ""
    """A word of the worker's own making, a hyphen, and a number that rises with each of its claims. The same nonce
    again is the same claim again: it gets the leases that it had. Without one every call is a claim of its own."""
    limit: int = Field(ge=1, le=4096)
    policy_version: Version
    wait_s: Wait = 0.0


class RenewBody(Body):
    """Leases that a worker still works on."""

    worker_id: Name
    request_ids: Annotated[list[Name], Field(max_length=MOST_RENEWALS), _at_most(MOST_RENEWALS)]


class FailBody(Body):
    """A group that could not be sampled or graded."""

    model_config = example(
        worker_id="worker-0", request_id="fresh-00000012", reason="verifier_timeout", detail="killed after 10 s"
    )

    worker_id: Name
    request_id: Name
    reason: str
    """One bounded word: it becomes a metric label."""
    detail: Detail = ""


class ReleaseBody(Body):
    """A worker that is dead."""

    worker_id: Name


class CommitBody(Body):
    """The newest durable checkpoint."""

    checkpointed: Version


class ProgressBody(Body):
    """Where the learner is."""

    model_config = example(step=7, policy_version=5)

    step: Version
    policy_version: Version


class ResumeBody(Body):
    """The checkpoint after which the learner resumes."""

    step: Version


# -- answers


class RequestsAnswer(Body):
    """Leased requests."""

    requests: list[RequestBody]


class AcceptedAnswer(Body):
    """How many requests were new."""

    accepted: int


class IdsAnswer(Body):
    """Ids that are still leased to the worker."""

    request_ids: list[str]


class OutcomeAnswer(Body):
    """`requeued`, `dropped`, or `not_leased` when the worker does not hold it."""

    outcome: str


class CommittedAnswer(Body):
    """Whether a checkpoint is wanted now: batches that wait for one are filling Redis."""

    checkpoint_wanted: bool


class ReleasedAnswer(Body):
    """How many leases returned."""

    released: int


class PushedAnswer(Body):
    """Group id -> `stored`, `duplicate`, `stale` or `unknown`."""

    model_config = example(groups={"fresh-00000012": "stored"}, room=True)

    groups: dict[str, str]
    room: bool
    """Whether more fresh groups would be taken now."""


class AccessAnswer(Body):
    """How frames may go to and from Redis itself; null: through `/frames/{name}`."""

    url: str = ""
    write: FrameLogin | None = None
    read: FrameLogin | None = None


class SuspectsBody(Body):
    """Groups of a batch whose frames are not what was announced, as their reader found."""

    group_ids: Annotated[list[Name], Field(max_length=MOST_REQUESTS)]


class BadFramesAnswer(Body):
    """Group id -> what is wrong with its frame, of those that the service finds bad, too."""

    bad: dict[str, str]


class WaitingAnswer(Body):
    """Why the batch is not there yet."""

    model_config = example(
        reason="96/256 fresh groups, 2 leased, 158 queued; worker-2 silent for 38 s", counts=[11, 96, 0, 0, 200]
    )

    reason: str
    counts: list[int]
    """They change when anything got done: newest assembled step, fresh groups and re-evaluated ones that are ready,
    requests of re-evaluation rounds that are open, settled requests of evaluations."""


class ErrorAnswer(Body):
    """An error of the tree in `bapo/core/errors.py`."""

    model_config = example(error="ContractError", message="batch 9 is asked for, but the next step is 7", retry=False)

    error: str
    """Name of the class."""
    message: str
    retry: bool
    """Whether trying again may help."""


class Page(Body):
    """Part of a list."""

    total: int
    offset: int
    items: list[dict[str, Any]]


class TablePage(Page):
    """Part of B_bad or B_high, oldest first."""

    model_config = example(
        total=1,
        offset=0,
        step=12,
        items=[{"prompt_id": "9f2c41d0", "mu": 0.125, "birth": 9, "age": 3, "attempts": 1}],
    )

    step: int
    """Newest assembled step: ages are measured from it."""


class ThresholdsAnswer(Body):
    """Thresholds of the newest batch (eq. 8); null before the first."""

    model_config = example(step=12, r_tot=0.4, c1=0.125, c2=0.275, c3=0.4)

    step: int
    r_tot: float | None
    c1: float
    c2: float | None
    c3: float | None
