"""The engine interface, and how an engine is found by name.

Tokens in, tokens out: an engine continues token sequences, and returns the log-prob and the policy version of every
token. It knows neither prompts' texts nor groups. One thread owns it (`rollout_server/sampler.py`): calls, steps and
weight updates never overlap, so it needs no locks.

A new engine is one file of this folder, `<name>.py`, that defines:

    ENVIRONMENT         variables that must be set before its process imports anything heavy
    IN_PROCESS          True: workers are threads of the fleet's process; False: Ray actors, one process each
    check               (Config) -> None: reject an invalid configuration before anything is started
    make_engine         (Config, worker id) -> Engine
    make_tokenization   (Config, function: digest -> image file) -> Tokenization, called after `make_engine`
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.plugins import module_names, plugin
from bapo.core.sequences import SampledSequence
from bapo.core.token_arrays import Float32s, Int32s
from bapo.runtime.vision import Patches, ReadImage
from rollout_server.tokenization import Tokenization

INITIAL_VERSION = 1
"""The weights of `model.path` are theta_1: an engine may sample before the first weight update."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A call: token ids to be continued, `num` times."""

    call_id: str
    """Unique among the calls in the engine."""
    token_ids: Sequence[int]
    """[P] at least one: a prompt, and what of a response was sampled before."""
    num: int = 1
    max_tokens: int
    """Limit per continuation; one that reaches it is truncated."""
    temperature: float
    top_p: float
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """As in `bapo.core.types.Sampling`."""
    seed: int | None = None
    """Of the call; None: of the engine."""
    images: tuple[tuple[str, Patches], ...] = ()
    """Digest and patches of each image among the tokens, in order."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation; their tokens are the last of it."""
    context: object = None
    """What it is sampled for: opaque. An engine without a model draws from it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completed:
    """The result of a call."""

    call_id: str
    token_ids: Int32s
    """[P] those of the call, as the engine saw them."""
    sequences: tuple[SampledSequence, ...]
    """The `num` continuations: new tokens only."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Load of an engine between two steps, in responses."""

    running: int = 0
    """Responses that get a token in each step."""
    waiting: int = 0
    """Responses that wait for room in the KV cache or in the batch."""
    kv_cache_usage: float = math.nan
    """Share of the KV cache in use, in [0, 1]; NaN: no cache."""


def seed_of(seed: int, name: str) -> int:
    """The seed of a worker's engine, by its id: with one seed, all workers and their replacements would draw the same
    numbers. With `run.deterministic`, the seed of a call."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4])


class Engine(Protocol):
    """Samples tokens. Created, called and closed by one thread."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        ...

    @property
    def occupancy(self) -> Occupancy:
        """The current load. Called after every step, so it must be cheap."""
        ...

    def add(self, completion: Completion) -> None:
        """Begin a call. Raises: ContractError for one that the engine cannot sample; the others are as they were."""
        ...

    def abort(self, call_id: str) -> None:
        """Stop sampling a call; unknown ids are ignored."""
        ...

    def step(self) -> list[Completed]:
        """Sample one token for every response in flight; returns the finished calls.

        After an exception the engine is unusable.
        """
        ...

    def load_weights(self, path: str, version: int) -> bool:
        """Replace the weights in place by those of a safetensors file.

        Responses in flight continue with the new weights; their KV cache is that of `rollout.kv_cache_at_update`.
        After an exception the engine is unusable: it may contain part of the new weights.

        Returns: whether it could verify that it multiplies by the new weights and not by those before; a smaller step
            than its roundings is not decided.
        """
        ...

    def join_transfer(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """Join the learner's communicator; any exception declines, and leaves the weights as they are.

        Args:
            backend, init_info: of vLLM's weight transfer engine.
        """
        ...

    def receive_weights(self, update_info: Mapping[str, Any], version: int) -> bool:
        """As `load_weights`, with weights that the learner sends."""
        ...

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        """[len - 1] log-probs of all tokens but the first at temperature 1; None: the engine has no weights.

        Does not wait for responses in flight, which get their next tokens meanwhile.
        """
        ...

    def close(self) -> None:
        """Free all resources."""
        ...


class EngineModule(Protocol):
    """The interface of an engine file."""

    ENVIRONMENT: Mapping[str, str]
    IN_PROCESS: bool

    def check(self, config: Config) -> None:
        """Raises: ConfigError for an invalid configuration. Fast, and imports nothing heavy."""
        ...

    def make_engine(self, config: Config, worker_id: str = ...) -> Engine:
        """Load the model. `worker_id`: seeds the sampling."""
        ...

    def make_tokenization(self, config: Config, image: ReadImage = ...) -> Tokenization:
        """The model's tokenizer. `image`: returns image files of prompts."""
        ...


def engine_module(name: str) -> EngineModule:
    """The engine file with this name. Imports nothing heavy.

    Raises: ConfigError listing the known engines.
    """
    known = known_engines()
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"rollout.engine: there is no engine {name!r}{hint}; known are {', '.join(known)}")
    return cast(EngineModule, plugin(__package__, name))


def known_engines() -> list[str]:
    """Names of the engine files, sorted; files that begin with an underscore belong to an engine."""
    # Without importing them, which may take half a minute.
    return [name for name in module_names(__package__) if name != "base"]
