"""The error classes of BAPO, and how they are handled.

    BapoError
      ConfigError          refuse to start                                       exit 2, nothing was touched
      ContractError        a message breaks the wire contract                    HTTP 422, never retried
        FrameError         a pushed group's frame is not where it was written    the sender writes it again, once
      AccessError          no token, a wrong one, or one without the right       HTTP 401 or 403, exit 2, never retried
      GoneError            what the caller names has ended                       HTTP 410, never retried
      ConflictError        the opposite is stored already                        HTTP 409, never retried
      LimitError           a limit of the config is reached                      HTTP 400, never retried
      StaleWeightsError    the caller's policy version is too old for the work   HTTP 409, retried after the next update
      WeightMismatchError  an engine does not hold the weights it should hold    the worker is replaced
        WeightsAbsentError a file of weights is not where it should be            the learner sends it
      UnavailableError     a peer is down or not ready yet                       HTTP 503, retried with a deadline
        OutOfMemoryError   a process had too little memory                       exit 3, the message names settings
        FullError          a peer is there and holds all that it may             HTTP 429, retried after a pause
        NotRetriedError    a peer says that trying again does not help           HTTP 503, never retried
      NodeDiedError        the Ray node of a rollout server is gone              exit 1 like a crash: it is restarted
      DeadlineError        a named wait ran past its deadline                    exit 5, names what it waited for
      RankLostError        another rank of the learner is gone or silent         exit 6, the other one is the cause
      GradingError         a verifier raised, hung or was killed                 retried whole, never rewarded 0
      DivergenceError      loss or gradient is not finite                        exit 4, the message names the batch
      StorageError         disk full or not writable                             exit 3, nothing acknowledged is lost

Instances have only `args`, so that Ray can pickle them.
"""

import difflib
import itertools
from collections.abc import Iterable
from enum import StrEnum


class BapoError(Exception):
    """Base class. Catch it to translate it or to exit, never to continue silently."""

    exit_code = 1
    http_status = 500


class ConfigError(BapoError):
    """Invalid configuration; the message contains the key and a remedy."""

    exit_code = 2
    http_status = 400


class Refusal(StrEnum):
    """Why a message was rejected; used as a metric label."""

    CONTRACT = "contract"
    """Anything else: a step that is not next, a body that is not JSON."""
    FRAME = "frame"
    """Truncated, of another kind, or with wrong lengths."""
    HEADER = "header"
    """Not msgpack, too long, nested too deeply, or with wrong keys or types."""
    SHAPE = "shape"
    """Inconsistent columns."""
    NAME = "name"
    """An invalid id."""
    REWARDS = "rewards"
    """Outside [0, 1]."""
    LOGPROBS = "logprobs"
    """Not finite, or above 0."""
    TOKEN_IDS = "token_ids"  # noqa: S105 - no password
    """Negative."""
    VERSIONS = "versions"
    """Negative, or the oldest newer than the newest."""
    FUTURE_VERSION = "future_version"
    """Newer than any published version."""
    NOT_ITS_REQUEST = "not_its_request"
    """A group with a size, step, prompt or purpose that differs from its request."""
    OTHER_CONTENT = "other_content"
    """An id that already has different content."""
    LENGTH = "length"
    """A body without or with a wrong Content-Length."""
    TOO_LARGE = "too_large"
    """A body above the size limit."""
    TOO_MANY = "too_many"
    """Too many groups or requests in one call."""
    TOO_SLOW = "too_slow"
    """A body that stalled."""
    NO_TOKEN = "no_token"  # noqa: S105
    """A call without a token."""
    WRONG_TOKEN = "wrong_token"  # noqa: S105
    """A token that is not accepted."""
    NO_RIGHT = "no_right"
    """A role without permission."""


class ContractError(BapoError):
    """Invalid bytes or fields: unknown, truncated or inconsistent."""

    http_status = 422

    def __init__(self, message: str = "", reason: Refusal = Refusal.CONTRACT) -> None:
        super().__init__(message, reason)  # both, so that pickling keeps both
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class FrameError(ContractError):
    """The frame of a pushed group is missing, or has the wrong length."""


class RecordError(ContractError):
    """Invalid content of a file in a run directory; the message contains file and row."""

    exit_code = 2


class AccessError(BapoError):
    """The caller has no permission; the message explains which token to set. Never retried."""

    exit_code = 2
    http_status = 401


class GoneError(BapoError):
    """What the caller names has ended: an episode with a reward, or one that was given to another agent."""

    http_status = 410


class ConflictError(BapoError):
    """The opposite is stored already, and stays."""

    http_status = 409


class LimitError(BapoError):
    """One of the limits that the config sets is reached; nothing was done."""

    http_status = 400


class StaleWeightsError(BapoError):
    """A policy version outside the allowed range."""

    http_status = 409


class WeightMismatchError(BapoError):
    """After an update the digest or the log-prob canary of an engine differs from the learner's."""

    http_status = 409


class WeightsAbsentError(WeightMismatchError):
    """A host cannot read a file of weights."""


class UnavailableError(BapoError):
    """A service is unavailable; retry until a deadline."""

    exit_code = 3
    http_status = 503


class OutOfMemoryError(UnavailableError):
    """Out of memory; the message suggests settings that need less.

    Not in BY_NAME: torch has a class of this name, which workers report without such suggestions.
    """


class FullError(UnavailableError):
    """The buffer is full; it accepts more once something is consumed."""

    http_status = 429
    retry_after_s = 1.0
    """Retry-After of the service, or a default."""


class NotRetriedError(UnavailableError):
    """A peer cannot answer, and trying again does not help."""


class NodeDiedError(BapoError):
    """A process of the Ray node has died: no worker can start."""


class DeadlineError(BapoError):
    """A wait timed out."""

    exit_code = 5
    http_status = 504


class RankLostError(BapoError):
    """Another rank of the learner has exited or does not respond, which is the actual cause."""

    exit_code = 6


class GradingError(BapoError):
    """A reward function failed; the group has no rewards."""


class DivergenceError(BapoError):
    """Training produced a non-finite value."""

    exit_code = 4


class StorageError(BapoError):
    """A disk write failed, or written data is lost."""

    exit_code = 3
    http_status = 507


BY_NAME: dict[str, type[BapoError]] = {
    cls.__name__: cls
    for cls in (
        BapoError,
        ConfigError,
        ContractError,
        GoneError,
        ConflictError,
        LimitError,
        FrameError,
        AccessError,
        StaleWeightsError,
        WeightMismatchError,
        WeightsAbsentError,
        UnavailableError,
        FullError,
        DeadlineError,
        GradingError,
        DivergenceError,
        StorageError,
    )
}
"""Name in JSON error responses -> class, so that clients raise the same class."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suffix of a message about an unknown name: " (did you mean 'x'?)" for the nearest known one, or ''."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    # Typos are more frequent at the end of a word: "bapp" is bapo, not ba-ppo.
    best = max(near, key=lambda name: _common_prefix(word, name), default=None)
    return f" (did you mean {best!r}?)" if best else ""


def _common_prefix(a: str, b: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
