"""The engine interface, and how an engine is found by name.

An engine samples G responses to each prompt, and returns the log-prob and the policy version of every token. One thread
owns it (`rollout_server/sampler.py`): submissions, steps and weight updates never overlap, so it needs no locks.

A new engine is one file of this folder, `<name>.py`, that defines:

    ENVIRONMENT   variables that must be set before its process imports anything heavy
    IN_PROCESS    True: workers are threads of the fleet's process; False: Ray actors, one process each
    check         (Config) -> None: reject an invalid configuration before anything is started
    make_engine   (Config, function: digest -> image file, worker id) -> Engine
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError, did_you_mean
from bapo.core.plugins import module_names, plugin
from bapo.core.token_arrays import Float32s, Int32s
from bapo.core.types import Prompt, RolloutRequest
from bapo.runtime.vision import ReadImage

INITIAL_VERSION = 1
"""The weights of `model.path` are theta_1: an engine may sample before the first weight update."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledGroup:
    """G finished responses to one prompt: a `Group` before it has rewards. T tokens in all, response after response."""

    request_id: str
    prompt_token_ids: Int32s
    """[P] as the engine saw them."""
    token_ids: Int32s
    """[T], including end-of-sequence tokens."""
    logprobs: Float32s
    """[T] nats, under the distribution that each token was sampled from (after temperature)."""
    lengths: Int32s
    """[G] tokens per response."""
    truncated: NDArray[np.bool_]
    """[G] whether the length limit ended the response."""
    versions: Int32s
    """[G, 2] oldest and newest policy version that sampled a token of the response."""
    texts: tuple[str, ...]
    """[G] decoded without special tokens, for the verifier."""
    num_experts: int = 0
    """Number of expert rows, at the end."""
    spans: Int32s | None = None
    """[S, 2] runs (tokens, version) over the T tokens; None: one version per response."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Continuation:
    """A response that stopped at its token budget, to be continued as a group of one."""

    part_id: str
    """`request_id` of that group."""
    request: RolloutRequest
    row: int
    """Index of the response in its group."""
    prompt_token_ids: Int32s
    """[P] as the engine gave them."""
    token_ids: Int32s
    """[L] sampled so far: at least one token, fewer than the length limit."""
    most: int
    """Most tokens to sample now."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Load of an engine between two steps, in responses."""

    running: int = 0
    """Responses that get a token in each step."""
    waiting: int = 0
    """Responses that wait for room in the KV cache or in the batch."""
    kv_cache_usage: float = math.nan
    """Share of the KV cache in use, in [0, 1]; NaN: no cache."""


def no_image(digest: str) -> bytes:
    """For engines without images. Raises: ContractError."""
    raise ContractError(f"image {digest[:16]}... is not available: no images were passed to this engine")


class Engine(Protocol):
    """Samples groups. Created, called and closed by one thread."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        ...

    @property
    def num_sampling(self) -> int:
        """Groups submitted and not finished."""
        ...

    @property
    def occupancy(self) -> Occupancy:
        """The current load. Called after every step, so it must be cheap."""
        ...

    def check_prompts(self, prompts: Sequence[Prompt], image: ReadImage) -> None:
        """Raises: ConfigError if a prompt changes when encoded and decoded, is too long, or has images that the model
        cannot read.

        Args:
            image: returns the files of their images.
        """
        ...

    def encode_response(self, text: str) -> Int32s:
        """[L] token ids of a response with this text and its end, truncated to the length limit; at least one."""
        ...

    def submit(self, request: RolloutRequest, most: int | None = None) -> None:
        """Start to sample one group. Raises: ContractError for a request that the engine cannot sample, which leaves
        the other groups as they were.

        Args:
            most: tokens per response, if fewer than the length limit; a response that reaches it counts as truncated.
        """
        ...

    def resume(self, part: Continuation) -> None:
        """Continue one response with the current weights.

        `step` returns a group of one with only the new tokens and the text of the whole response; it is truncated when
        it reached `part.most`.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop sampling a group; unknown ids are ignored."""
        ...

    def step(self) -> list[SampledGroup]:
        """Sample one token for every response in flight; returns the finished groups.

        After an exception the engine is unusable.
        """
        ...

    def load_weights(self, path: str, version: int) -> None:
        """Replace the weights in place by those of a safetensors file.

        Responses in flight continue with the new weights; their KV cache is that of `rollout.kv_cache_at_update`.
        After an exception the engine is unusable: it may contain part of the new weights.
        """
        ...

    def join_transfer(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """Join the learner's communicator; any exception declines, and leaves the weights as they are.

        Args:
            backend, init_info: of vLLM's weight transfer engine.
        """
        ...

    def receive_weights(self, update_info: Mapping[str, Any], version: int) -> None:
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

    def make_engine(self, config: Config, image: ReadImage = ..., worker_id: str = ...) -> Engine:
        """Load the model. `image`: returns image files of submitted prompts; `worker_id`: seeds the sampling."""
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
