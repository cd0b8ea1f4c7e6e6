"""Values exchanged between services: prompts, requests, groups, batches, progress and weight updates.

Arrays are columnar: the tokens of the G responses of a group are concatenated in one int32 array, split by `lengths`.
Nothing packs, classifies or unpacks a group token by token.

Suffixes: G responses in a group, T tokens of all responses together, P tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from bapo.core.call_limits import MAX_RESPONSES
from bapo.core.errors import ContractError, Refusal
from bapo.core.json_values import require_plain
from bapo.core.reward_details import Details, require_details
from bapo.core.token_arrays import Float32s, Int32s, require_spans, require_tokens, versions_of
from bapo.core.turns import require_turns


class Purpose(StrEnum):
    """Purpose of a rollout request."""

    FRESH = "fresh"
    REEVALUATE = "reevaluate"
    EVALUATE = "evaluate"


def purpose_of(word: Any) -> Purpose:
    """Raises: ContractError that names the words that there are."""
    try:
        return Purpose(word)
    except ValueError as error:
        known = ", ".join(Purpose)
        raise ContractError(f"invalid purpose {word!r:.100}, must be one of {known}", Refusal.HEADER) from error


class Origin(StrEnum):
    """Which of the three indicators of eq. 5 put a group into a batch."""

    X1 = "x1"
    X2 = "x2"
    X3 = "x3"


class Outcome(IntEnum):
    """How a response ended. A failed rollout has no reward, so it never becomes part of a group."""

    GRADED = 0
    TRUNCATED = 1
    EXPERT = 2
    """Not sampled: a solution of the task, graded like a response. Its rollout log-probs are 0 (LUFFY: pi_phi = 1)."""


NAME = r"[A-Za-z0-9][A-Za-z0-9._@~+-]{0,127}"
"""Ids of requests, groups and workers, which are in Redis keys and arguments of scripts: no spaces, no braces."""
_END = r"$(?!\n)"
"""`$` alone also matches before a line break, and JavaScript, which reads these patterns too, has no `\\Z`."""
Name = Annotated[str, Meta(pattern=f"^{NAME}{_END}")]
Label = Annotated[str, Meta(pattern=f"^({NAME})?{_END}")]
PROMPT_ID = r"[!-~]{1,128}"
"""No spaces: ids are part of the space-separated string that compares a group with its request."""

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""Lua has doubles for numbers."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Version = Annotated[int, Meta(ge=0, lt=2**21)]
"""Versions and steps: queue scores have 21 bits for them."""


IMAGE = "<image>"
"""Placeholder of an image in a prompt's text."""
IMAGE_DIGEST = "^[0-9a-f]{64}$"
"""sha256 of an image file. It names a file, so nothing else is allowed."""
MAX_IMAGES = 64
"""Per prompt."""
ImageDigests = Annotated[
    tuple[Annotated[str, Meta(pattern=IMAGE_DIGEST, max_length=64)], ...], Meta(max_length=MAX_IMAGES)
]


MESSAGES = "_messages"
"""The column with the conversation that a prompt was rendered from."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A prompt x and its run-wide identity u_i (eq. 4). Raises ContractError for an answer that is not a map of JSON
    values."""

    prompt_id: str
    """Stable hash of the content: the same problem has the same id in every epoch, run and split."""
    text: str
    """What the tokenizer encodes."""
    task: str
    """Name of the task that grades it."""
    answer: Mapping[str, Any]
    """What the task needs to grade: JSON values only."""
    images: ImageDigests = ()
    """sha256 of each image file, one per `<image>` in the text, in order; the files are RUN/images/<digest>."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What an agent's conversation begins with: the messages that the text was rendered from, or one with the
        text."""
        return [dict(found) for found in self.answer.get(MESSAGES) or [{"role": "user", "content": self.text}]]

    def __post_init__(self) -> None:
        if not isinstance(self.answer, Mapping):
            found = type(self.answer).__name__
            raise ContractError(
                f"prompt {self.prompt_id}: the answer must be a map, for example {{'answer': '42'}}, or {{}} if there "
                f"is none; got {found}",
                Refusal.HEADER,
            )
        require_plain(self.answer, f"prompt {self.prompt_id}: its answer")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How an evaluation samples; None: as `rollout` says, or without it. What trains is always sampled as that says."""

    temperature: Annotated[float, Meta(gt=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    min_p: Share | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    max_response_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] | None = None


SAMPLING = Sampling.__struct_fields__
"""Names of what an evaluation may sample otherwise."""


class RolloutRequest(Sampling, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request for one group.

    QUEUED --claim--> LEASED --push of the group--> DONE
       ^                |
       +--lease over, worker dead, or group failed (at most `max_attempts` times, then DROPPED)
    """

    request_id: Name
    """Deterministic, so that enqueueing is idempotent; also the group's `group_id`."""
    prompt: Prompt
    group_size: Annotated[int, Meta(ge=1, le=MAX_RESPONSES)]
    """G: how many responses."""
    purpose: Purpose
    step: Version
    """Planned learner step (evaluate: the policy version to evaluate)."""
    min_version: Version
    """Workers with an older policy do not get this request."""
    label: Label = ""
    """Which evaluation it belongs to; empty for training."""
    attempts: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """How often it was handed out before."""

    def __post_init__(self) -> None:
        purpose_of(self.purpose)

    @property
    def problem(self) -> str:
        """Why no buffer issues such a request; empty if it does."""
        if self.purpose is Purpose.EVALUATE:
            return "" if self.label else "an evaluation needs a label, by which it is collected and deleted"
        if any(getattr(self, name) is not None for name in SAMPLING):
            return "only an evaluation may be sampled otherwise than its run"
        return "" if self.group_size >= 2 else f"group_size must be at least 2, got {self.group_size}"


class Timing(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Wall-clock timing of one group, in seconds."""

    claimed_at: Seconds
    """Unix time of the claim."""
    sample_s: Seconds
    grade_s: Seconds


_NO_NUMBERS = "OSUmMc"
"""Kinds of numpy: objects, bytes, texts, times, complex numbers."""
_FLAT = ("prompt_token_ids", "token_ids", "lengths")
"""The other columns are compared with the shapes of these."""
PER_TOKEN = {"token_ids": "<i4", "rollout_logprobs": "<f4"}
"""Columns with one value per sampled token, and their types in the body of a frame, in this order."""
PER_RESPONSE = ("lengths", "rewards", "outcomes", "versions")
_COLUMNS = ("prompt_token_ids", *PER_TOKEN, *PER_RESPONSE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """G responses to one prompt: one entry of the buffer (eq. 4).

    Example: 8 responses with 4 right has mu == 0.5; it is in X1, and in B_high while c2 <= 0.5 <= c3.
    Raises ContractError when the columns contradict each other or hold what no policy can give.
    """

    group_id: str
    prompt: Prompt
    purpose: Purpose
    step: int
    """`step` of the request."""
    label: str
    worker_id: str
    prompt_token_ids: Int32s
    """[P] as the engine saw them: never re-tokenised."""
    token_ids: Int32s
    """[T] sampled tokens, response after response."""
    rollout_logprobs: Float32s
    """[T] log alpha(y_t | .) in nats, under the distribution that each token was sampled from."""
    lengths: Int32s
    """[G] tokens per response; sums to T."""
    rewards: Float32s
    """[G] in [0, 1]."""
    outcomes: NDArray[np.uint8]
    """[G] values of Outcome."""
    versions: Int32s
    """[G, 2] oldest and newest policy version that sampled a token of the response."""
    timing: Timing
    spans: Int32s | None = None
    """[S, 2] runs (tokens, policy version) over the T tokens; None: no response was sampled by more than one version,
    or its worker did not say which token by which."""
    turns: Int32s | None = None
    """[U, 4] (response, parent, context tokens, sampled tokens) of each turn (`bapo.core.turns`); None: every response
    is one turn after the prompt."""
    context_ids: Int32s | None = None
    """[C] context tokens of the turns, turn after turn; None without turns."""
    reward_details: Details = field(default_factory=dict)
    """[G] each: components of the rewards, and facts of the responses."""
    teacher_logprobs: Float32s | None = None
    """[T] log pi_T(y_t | .) of the teacher of a distillation, in nats, at temperature 1; None without one."""

    def __post_init__(self) -> None:
        self._require_columns()
        size, tokens = len(self.lengths), len(self.token_ids)
        shapes = {"rewards": (size,), "outcomes": (size,), "versions": (size, 2), **dict.fromkeys(PER_TOKEN, (tokens,))}
        for name, shape in shapes.items():
            if (found := getattr(self, name).shape) != shape:
                raise ContractError(
                    f"group {self.group_id}: {name} must be {list(shape)}, got {list(found)}", Refusal.SHAPE
                )
        if size == 0 or int(self.lengths.min()) < 1 or int(self.lengths.sum()) != tokens:
            raise ContractError(f"group {self.group_id}: {self._wrong_lengths()}", Refusal.SHAPE)
        if not bool(np.all((self.rewards >= 0.0) & (self.rewards <= 1.0))):
            message = f"group {self.group_id}: rewards must be in [0, 1] (theorem 3.2), got {self.rewards}"
            raise ContractError(message, Refusal.REWARDS)
        # Here, so that a broken engine fails one group on its worker instead of a batch in the learner.
        require_tokens(self.group_id, self.token_ids, self.rollout_logprobs)
        require_tokens(self.group_id, self.prompt_token_ids, self.rollout_logprobs[:0])
        if self.spans is not None:
            require_spans(self.group_id, self.spans, self.lengths, self.versions)
        self._require_turns()
        require_details(self.group_id, self.reward_details, size)
        if (taught := self.teacher_logprobs) is not None:
            if taught.shape != (tokens,):
                message = f"group {self.group_id}: teacher_logprobs must be {[tokens]}, got {list(taught.shape)}"
                raise ContractError(message, Refusal.SHAPE)
            require_tokens(self.group_id, self.token_ids[:0], taught, of="teacher")

    def _require_turns(self) -> None:
        if (self.turns is None) != (self.context_ids is None):
            raise ContractError(f"group {self.group_id}: turns and their context belong together", Refusal.SHAPE)
        if self.turns is not None and self.context_ids is not None:
            require_tokens(self.group_id, self.context_ids, self.rollout_logprobs[:0])
            has_prompt = len(self.prompt_token_ids) > 0
            lengths = self.lengths.tolist()
            require_turns(self.group_id, self.turns, len(self.context_ids), lengths, has_prompt=has_prompt)

    def _require_columns(self) -> None:
        for name in _COLUMNS:
            if not isinstance(column := getattr(self, name), np.ndarray):
                message = f"group {self.group_id}: {name} must be a numpy array, got {type(column).__name__}"
                raise ContractError(message, Refusal.SHAPE)
            if column.dtype.kind in _NO_NUMBERS:
                message = f"group {self.group_id}: {name} must be numbers, got {column.dtype}"
                raise ContractError(message, Refusal.SHAPE)
        for name in _FLAT:
            if getattr(self, name).ndim != 1:
                message = f"group {self.group_id}: {name} must have one dimension, got {getattr(self, name).ndim}"
                raise ContractError(message, Refusal.SHAPE)

    def _wrong_lengths(self) -> str:
        if len(empty := np.flatnonzero(self.lengths < 1)):
            return (
                f"response {empty[0]} has length {self.lengths[empty[0]]}: each needs at least one token "
                "(end-of-sequence)"
            )
        return f"lengths {self.lengths} do not add up to {len(self.token_ids)} tokens"

    @property
    def size(self) -> int:
        """G."""
        return len(self.lengths)

    @property
    def policy_version(self) -> int:
        """Oldest version that sampled any token: what staleness is measured against."""
        return int(self.versions[:, 0].min())

    @property
    def token_versions(self) -> Int32s:
        """[T] policy version that sampled each token; the oldest of its response where only that is known."""
        return np.repeat(self.versions[:, 0], self.lengths) if self.spans is None else versions_of(self.spans)

    @property
    def mu(self) -> float:
        """Group mean reward mu_{alpha,r}(x)."""
        return float(self.rewards.mean(dtype=np.float64))


SAME_REWARD = 1e-6
"""Two rewards that are no farther apart are one: far below any credit, above the rounding of a sum in float32."""


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether no reward differs from another: no response is better, and none has an advantage. At least one."""
    return max(rewards) - min(rewards) <= SAME_REWARD


PASS_REWARD = 1 - SAME_REWARD
"""A response is correct, and passes, from this reward on: the maximum, 1 (`bapo.core.correctness`)."""


def num_correct(rewards: Iterable[float]) -> int:
    """Responses with a reward of 1: partial credit is not counted, and not added up."""
    return sum(reward >= PASS_REWARD for reward in rewards)


class GroupStat(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a group that composers use, without its tokens."""

    group_id: str
    prompt_id: str
    policy_version: Version
    size: Count
    """G: sampled responses; an expert's are not among them."""
    reward_sum: Annotated[float, Meta(ge=0)]
    """k: sum of the rewards of the sampled responses (number of correct ones for rewards in {0, 1})."""
    homogeneous: bool
    """All G rewards are equal (`are_equal`): zero advantage."""
    birth: Version = 0
    """Step whose assembly saw the group first; 0 before that."""
    rewards: tuple[Share, ...] = ()
    """Of every row, an expert's too."""
    outcomes: bytes = b""
    """Values of `Outcome`, one byte per row."""

    @property
    def mu(self) -> float:
        return self.reward_sum / self.size

    def born(self, step: int) -> GroupStat:
        """The same group, first seen by the assembly of `step`."""
        return msgspec.structs.replace(self, birth=step)

    @property
    def sampled_rows(self) -> tuple[int, ...]:
        """Rows that the policy sampled."""
        return tuple(row for row, outcome in enumerate(self.outcomes) if outcome != Outcome.EXPERT)

    @property
    def expert_rows(self) -> tuple[int, ...]:
        """Rows that are an expert's."""
        return tuple(row for row, outcome in enumerate(self.outcomes) if outcome == Outcome.EXPERT)


_EXPERT = bytes((Outcome.EXPERT,))


def stat_of(
    *,
    group_id: str,
    prompt_id: str,
    policy_version: int,
    rewards: tuple[float, ...],
    outcomes: bytes,
    birth: int = 0,
) -> GroupStat:
    """What a rule sees of a group with these rows."""
    sampled: Sequence[float] = rewards
    if _EXPERT in outcomes:
        sampled = [reward for reward, outcome in zip(rewards, outcomes, strict=True) if outcome != Outcome.EXPERT]
    return GroupStat(
        group_id=group_id,
        prompt_id=prompt_id,
        policy_version=policy_version,
        size=len(sampled),
        reward_sum=float(sum(sampled)),
        homogeneous=are_equal(sampled),
        birth=birth,
        rewards=rewards,
        outcomes=outcomes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HardPrompt:
    """An entry of B_bad. Only the prompt is reused, so no responses are stored."""

    prompt_id: str
    birth: Version
    """Step whose assembly inserted it."""
    mu: Share
    """Mean reward of the group that put it here, or of the newest re-evaluation that left it here."""
    attempts: Count = 0
    """Number of re-evaluations so far, all without success."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchEntry:
    """Rows that share one advantage baseline, and why they are in the batch: a stored group, or rows of several
    stored groups of one prompt."""

    origin: Origin
    group: Group
    kind: Literal["rl", "sft"] = "rl"
    """sft: trained by cross-entropy, without advantages (ReLIFT)."""
    weight: float = 1.0
    """Factor on its advantages, not on its KL and entropy; of kind sft, on its loss."""
    replayed: NDArray[np.bool_] | None = None
    """[G] rows that were sampled for an earlier batch; None: all rows of X3, none of X1 and X2."""

    @property
    def replayed_rows(self) -> NDArray[np.bool_]:
        """[G] `replayed`, with the None read."""
        return np.full(self.group.size, self.origin is Origin.X3) if self.replayed is None else self.replayed

    @property
    def expert_rows(self) -> NDArray[np.bool_]:
        """[G] rows that no policy sampled."""
        rows: NDArray[np.bool_] = self.group.outcomes == Outcome.EXPERT
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """Outcome of one group in an assembly: one row of the run's group records.

    This is its only definition: its msgpack map (`bapo.core.codec`) and its parquet columns
    (`bapo.runtime.run_directory.layout`) are derived from these fields, and its bounds are checked on reading.
    """

    group_id: str
    prompt_id: str
    purpose: Purpose
    policy_version: Version
    rewards: Annotated[tuple[Share, ...], Meta(min_length=1)]
    origin: Origin | None
    """None: not trained in this step."""
    reason: str
    """The deciding rule, a value of `bapo.algorithms.composer.Reason`."""
    birth: Version
    item: str = ""
    """Item of the batch that its rows are part of; empty: the group is the item, or did not train."""
    rows: tuple[Count, ...] | None = None
    """Which rows train; None: all of them, or none when the group did not train."""
    kind: Literal["rl", "sft"] = "rl"
    outcomes: bytes = b""
    """Values of `Outcome`, one byte per row; empty: every row was graded."""
    worker_id: str = ""
    num_tokens: Count = 0
    """Of the responses that a worker sampled."""
    sample_s: Seconds = 0.0
    grade_s: Seconds = 0.0
    claimed_at: Seconds = 0.0
    reward_details: Mapping[str, float] = field(default_factory=dict)
    """Means over the responses that a worker sampled (`bapo.core.reward_details`)."""


def num_sampled(result: GroupResult) -> int:
    """Responses that a worker sampled: an expert's solution is none of them."""
    return len(result.rewards) - result.outcomes.count(Outcome.EXPERT)


def sampled_rewards(result: GroupResult) -> list[float]:
    """Rewards of the responses that a worker sampled; at least one."""
    outcomes = result.outcomes or bytes(len(result.rewards))
    return [reward for reward, outcome in zip(result.rewards, outcomes, strict=True) if outcome != Outcome.EXPERT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """D_t = X1 + X2 + X3, at most B groups (eqs. 5-7). The same step always has the same batch."""

    step: int
    entries: tuple[BatchEntry, ...]
    r_tot: float
    """Mean reward of all fresh responses of this step, before the filter."""
    facts: Mapping[str, float]
    """What the composer reports of the step, such as its window c2 and c3; and num_bad and num_high: |B_bad| and
    |B_high| after this step's inserts."""
    results: tuple[GroupResult, ...]
    """Every group read by this assembly, trained or not."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of the learner. The values never decrease."""

    step: Version
    """Step that the learner has started."""
    policy_version: Version
    """Last published version (version t = weights at the start of step t)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A token sequence and the learner's log-probs for it, to detect engines with wrong weights."""

    token_ids: tuple[Count, ...]
    logprobs: tuple[float, ...]
    """One per token except the first, in nats."""
    tolerance: Annotated[float, Meta(ge=0)]
    """Largest root mean square difference of an engine with the same weights, in nats."""
    base_logprobs: tuple[float, ...] = ()
    """With LoRA those of the model without its adapter, to detect engines that do not have it; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The weights of one policy version, as a safetensors file that every worker can read."""

    version: Version
    path: str
    digest: str
    """Of the file, hex (`bapo.runtime.file_digest`)."""
    num_bytes: Count
    canary: Canary
    url: str = ""
    """URL of the rollout server, for hosts that cannot read `path`; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransfer:
    """The weights of one policy version, sent from the learner's GPU to a weight transfer engine of vLLM.

    The file of this version follows as a `WeightUpdate` with the same canary.
    """

    version: Version
    canary: Canary
    backend: Literal["nccl", "ipc"]
    """vLLM's weight transfer engine."""
    workers: Mapping[str, Annotated[int, Meta(ge=1)]]
    """Receiving workers: id -> first rank of the engine in the learner's communicator, where the learner is rank 0."""
    init_info: Mapping[str, Any]
    """Joins the communicator; vLLM's argument without `rank_offset`. A worker that has these joins no second time."""
    update_info: Mapping[str, Any]
    """Names, dtypes and shapes of the tensors; vLLM's argument."""
