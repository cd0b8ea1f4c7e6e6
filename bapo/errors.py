"""Every error this system raises on purpose, and who reacts to it.

    BapoError
      ConfigError          refuse to start                                       exit 2, nothing was touched
      ContractError        a message breaks the wire contract                    HTTP 422, never retried
      StaleWeightsError    the caller's policy version is too old for the work   HTTP 409, retried after the next update
      WeightMismatchError  an engine does not hold the weights it should hold    the worker is replaced
      UnavailableError     a peer is down, full or not ready yet                 HTTP 503, retried with a deadline
      DeadlineError        a named wait ran past its deadline                    exit 5, says who waits for whom
      GradingError         a verifier raised, hung or was killed                 retried whole, never rewarded 0
      DivergenceError      loss or gradient is not finite                        exit 4, the message names the batch
      StorageError         disk full or not writable                             exit 3, nothing acknowledged is lost

Instances carry only `args`, so that they survive pickling by Ray.
"""

import difflib
from collections.abc import Iterable


class BapoError(Exception):
    """Root of the tree: catch it to translate or to end a process, never to go on silently."""

    exit_code = 1
    http_status = 500


class ConfigError(BapoError):
    """The configuration makes no sense; the message names the key and says what to write instead."""

    exit_code = 2
    http_status = 400


class ContractError(BapoError):
    """Bytes or fields that no correct peer sends: unknown, truncated or contradictory."""

    http_status = 422


class StaleWeightsError(BapoError):
    """Work or a result belongs to a policy version outside the admitted range."""

    http_status = 409


class WeightMismatchError(BapoError):
    """After an update the digest or the log-prob canary of an engine differs from the learner's."""

    http_status = 409


class UnavailableError(BapoError):
    """A peer cannot answer now; try again until a deadline."""

    exit_code = 3
    http_status = 503


class DeadlineError(BapoError):
    """A named wait took too long."""

    exit_code = 5
    http_status = 504


class GradingError(BapoError):
    """A verifier failed; its group has no rewards."""


class DivergenceError(BapoError):
    """Training produced a value that is not finite."""

    exit_code = 4


class StorageError(BapoError):
    """The disk refused a write."""

    exit_code = 3
    http_status = 507


BY_NAME: dict[str, type[BapoError]] = {
    cls.__name__: cls
    for cls in (
        BapoError,
        ConfigError,
        ContractError,
        StaleWeightsError,
        WeightMismatchError,
        UnavailableError,
        DeadlineError,
        GradingError,
        DivergenceError,
        StorageError,
    )
}
"""How a service names an error in its JSON answer, so that a client raises the same class again."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: " (did you mean 'x'?)" for the nearest known one, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
