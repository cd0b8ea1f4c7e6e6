"""Every error this system raises on purpose, and who reacts to it.

    BapoError
      ConfigError          refuse to start                                       exit 2, nothing was touched
      ContractError        a message breaks the wire contract                    HTTP 422, never retried
        FrameError         a pushed group's frame is not where it was written    the sender writes it again, once
      AccessError          no token, a wrong one, or one without the right       HTTP 401 or 403, exit 2, never retried
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

Instances carry only `args`, so that they survive pickling by Ray.
"""

import difflib
import itertools
from collections.abc import Iterable
from enum import StrEnum


class BapoError(Exception):
    """Root of the tree: catch it to translate or to end a process, never to continue silently."""

    exit_code = 1
    http_status = 500


class ConfigError(BapoError):
    """The configuration makes no sense; the message names the key and says what to write instead."""

    exit_code = 2
    http_status = 400


class Refusal(StrEnum):
    """Why a message was refused, in one word: the label under which a service counts it."""

    CONTRACT = "contract"
    """Anything that has no word of its own: a step that is not next, a body that is not JSON."""
    FRAME = "frame"
    """Cut off, of another kind, or with lengths that are not those of its bytes."""
    HEADER = "header"
    """Not msgpack, too long, too deep, or with other keys and types than it must have."""
    SHAPE = "shape"
    """Columns that contradict each other."""
    NAME = "name"
    """An id that is not a plain name."""
    REWARDS = "rewards"
    """Outside [0, 1]."""
    LOGPROBS = "logprobs"
    """Not finite, or above 0."""
    TOKEN_IDS = "token_ids"  # noqa: S105 - no password
    """Negative."""
    VERSIONS = "versions"
    """Negative, or the oldest newer than the newest."""
    FUTURE_VERSION = "future_version"
    """Newer than any that the learner can have published."""
    NOT_ITS_REQUEST = "not_its_request"
    """A group of another size, step, prompt or purpose than was asked for."""
    OTHER_CONTENT = "other_content"
    """An id that stands for something else already."""
    LENGTH = "length"
    """A body without a declared length, or of another one."""
    TOO_LARGE = "too_large"
    """A body of more bytes than are taken."""
    TOO_MANY = "too_many"
    """More groups, or requests, than one call may have."""
    TOO_SLOW = "too_slow"
    """A body that stalled."""
    NO_TOKEN = "no_token"  # noqa: S105
    """A call without a token."""
    WRONG_TOKEN = "wrong_token"  # noqa: S105
    """A token that is not accepted."""
    NO_RIGHT = "no_right"
    """A role that may not do this."""


class ContractError(BapoError):
    """Bytes or fields that no correct peer sends: unknown, truncated or contradictory."""

    http_status = 422

    def __init__(self, message: str = "", reason: Refusal = Refusal.CONTRACT) -> None:
        super().__init__(message, reason)  # both, so that pickling keeps both
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class FrameError(ContractError):
    """The frame of a pushed group is missing, or has another length than its header says."""


class RecordError(ContractError):
    """A file of a run directory holds what no run writes; the message names the file and the row."""

    exit_code = 2


class AccessError(BapoError):
    """The caller is not permitted: the message says which token to set. Never retried."""

    exit_code = 2
    http_status = 401


class StaleWeightsError(BapoError):
    """Work or a result belongs to a policy version outside the admitted range."""

    http_status = 409


class WeightMismatchError(BapoError):
    """After an update the digest or the log-prob canary of an engine differs from the learner's."""

    http_status = 409


class WeightsAbsentError(WeightMismatchError):
    """A host cannot read a file of weights."""


class UnavailableError(BapoError):
    """A peer cannot answer now; try again until a deadline."""

    exit_code = 3
    http_status = 503


class OutOfMemoryError(UnavailableError):
    """A process had too little memory, and settings that need less are named.

    Not in BY_NAME: torch has a class of this name, which a worker reports before anybody has added the settings.
    """


class FullError(UnavailableError):
    """A peer holds all that it may: it takes more as soon as something was consumed."""

    http_status = 429
    retry_after_s = 1.0
    """What the peer asked for, or a pause that suits any."""


class NotRetriedError(UnavailableError):
    """A peer cannot answer, and trying again does not help."""


class NodeDiedError(BapoError):
    """A process of Ray that the workers live below has died: no worker can start any more."""


class DeadlineError(BapoError):
    """A named wait took too long."""

    exit_code = 5
    http_status = 504


class RankLostError(BapoError):
    """Another rank of the learner has ended, or says nothing: what that one died of is the cause, never this."""

    exit_code = 6


class GradingError(BapoError):
    """A verifier failed; its group has no rewards."""


class DivergenceError(BapoError):
    """Training produced a value that is not finite."""

    exit_code = 4


class StorageError(BapoError):
    """The disk refused a write, or has lost what was written."""

    exit_code = 3
    http_status = 507


BY_NAME: dict[str, type[BapoError]] = {
    cls.__name__: cls
    for cls in (
        BapoError,
        ConfigError,
        ContractError,
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
"""How a service names an error in its JSON answer, so that a client raises the same class again."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: " (did you mean 'x'?)" for the nearest known one, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    # People mistype the end of a word more often than its beginning: "bapp" is bapo, not ba-ppo.
    best = max(near, key=lambda name: _common_prefix(word, name), default=None)
    return f" (did you mean {best!r}?)" if best else ""


def _common_prefix(a: str, b: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
