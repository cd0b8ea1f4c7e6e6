"""The selector interface: chooses the prompts of a step from the success counts of earlier groups.

    success counts of steps 1 .. h - lookahead --observe--> state --propose(h, n)--> prompts of step h

The scheduler calls `observe` once per step, in order, and proposes for step h from exactly the success counts of the
steps up to h - lookahead, however many more it could see. So the prompts of a step are a function of (seed, h,
those success counts), and a run that was killed asks for the same ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
from msgpack.exceptions import UnpackException
from numpy.typing import NDArray

from bapo.algorithms.methods import Method
from bapo.core.errors import ConfigError, ContractError
from bapo.core.success_counts import SuccessCounts

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
State = dict[str, NDArray[np.generic]]
"""Name -> array: plain data that goes into the buffer and comes back unchanged."""


@dataclass(frozen=True, kw_only=True)
class PromptPool:
    """The N training prompts, as far as a selector may know them."""

    prompt_ids: tuple[str, ...]
    levels: Floats | None = None
    """[N] the task's own difficulty, easy is low; None: the task has no levels."""

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @cached_property
    def _index(self) -> Mapping[str, int]:
        return {prompt_id: index for index, prompt_id in enumerate(self.prompt_ids)}

    def indices(self, prompt_ids: Sequence[str]) -> Indices:
        """[len(prompt_ids)] their places. Raises: ConfigError for a prompt that the training split does not have."""
        try:
            return np.array([self._index[prompt_id] for prompt_id in prompt_ids], dtype=np.int64)
        except KeyError as error:
            raise ConfigError(
                f"the buffer has an outcome of prompt {error}, which is not in the training split: the data of "
                "this run has changed; start a new run, or restore the old data"
            ) from error


class PromptSelector(Method, ABC):
    """One rule. Deterministic: the same seed, success counts and step give the same proposal."""

    learns = True
    """The buffer keeps for it what groups gave."""
    _own: Any

    def __init__(self, own: Any, pool: PromptPool, *, seed: int, batch_size: int) -> None:
        """`own`: its Settings; `batch_size`: B. Raises: ConfigError if the pool is without what it needs."""
        self._own, self._pool, self._seed, self._batch_size = own, pool, seed, batch_size

    @abstractmethod
    def propose(self, step: int, n: int) -> Indices:
        """[min(n, N)] different prompts, best first: the first of a longer proposal are the shorter one.

        The first B become the step's requests; those after them replace requests that failed for good.
        """

    def observe(self, success_counts: SuccessCounts) -> None:
        """What the fresh groups of one more step gave. A prompt that failed for good is missing."""

    def state(self) -> State:
        """The state of the selector; by default none."""
        return {}

    def restore(self, state: State) -> None:
        """Restore a state. Raises: ConfigError if it is of another selector or pool."""


def restored(state: State, name: str, like: Floats) -> Floats:
    """A column of a state, as a copy. Raises: ConfigError when it is missing or has another shape."""
    found = state.get(name)
    if found is None or found.shape != like.shape:
        shape = None if found is None else list(found.shape)
        raise ConfigError(
            f"the selector state in the buffer is of another prompt selector or other data: {name} must be "
            f"{list(like.shape)}, got {shape}; start a new run, or restore the old selector and data"
        )
    return found.astype(np.float64)


def first_by_weight(log_weights: Floats, n: int, rng: np.random.Generator) -> Indices:
    """[min(n, N)] indices drawn without replacement with p proportional to exp(log_weights), in the order of drawing.

    The n largest of log w + Gumbel noise are such a draw (Gumbel top-k); -inf comes last, in the order of the indices.
    """
    keys = log_weights + rng.gumbel(size=len(log_weights))
    return np.argsort(-keys, kind="stable")[:n]


def pack_state(name: str, state: State) -> bytes:
    """The state of the selector `name` as msgpack: its name and its arrays, little-endian."""
    arrays = {key: _little_endian(array) for key, array in state.items()}
    rows = {key: (array.dtype.str, array.shape, array.tobytes()) for key, array in arrays.items()}
    data: bytes = msgpack.packb((name, rows))
    return data


def unpack_state(name: str, data: bytes) -> State:
    """Inverse of `pack_state`.

    Raises: ConfigError when another selector has written it; ContractError when it is damaged.
    """
    try:
        writer, rows = msgpack.unpackb(data)
        state = {
            key: np.frombuffer(blob, dtype=np.dtype(dtype)).reshape(shape) for key, (dtype, shape, blob) in rows.items()
        }
    except (TypeError, ValueError, AttributeError, UnpackException) as error:
        raise ContractError(f"the stored selector state is malformed: {error!r}") from error
    if writer != name:
        raise ConfigError(
            f"this run uses selector {writer!r}, but algorithm.selector is {name!r}; "
            f"set algorithm.selector = {writer!r}, or start a new run"
        )
    return state


def _little_endian(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
