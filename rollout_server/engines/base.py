"""What an engine is, and how it is found by name.

An engine samples G responses to each prompt and says, for every token, with which log-prob and by which policy
version it was sampled. One thread owns it: submissions, steps and weight updates never overlap
(`rollout_server/sampler.py`), so an engine needs no locks.

A new engine is one file of this folder, `<name>.py`, with four things:

    ENVIRONMENT   variables that must be set before its process imports anything heavy
    IN_PROCESS    True: workers are threads of the fleet's process; False: Ray actors, one process each
    check         (Config) -> None: refuse what can be refused before anything is started
    make_engine   (Config) -> Engine
"""

from __future__ import annotations

import difflib
import importlib
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

import rollout_server.engines
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.token_arrays import Float32s, Int32s
from bapo.core.types import RolloutRequest

INITIAL_VERSION = 1
"""The weights of `model.path` are theta_1: an engine may sample before the learner has published anything."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledGroup:
    """G finished responses to one prompt: a `Group` before it has rewards. T tokens in all, response after response."""

    request_id: str
    prompt_token_ids: Int32s
    """[P] as the engine saw them."""
    token_ids: Int32s
    """[T], each response with its end-of-sequence token if it reached one."""
    logprobs: Float32s
    """[T] nats, under the distribution that each token was sampled from (after temperature)."""
    lengths: Int32s
    """[G] tokens per response."""
    truncated: NDArray[np.bool_]
    """[G] whether the length limit ended the response."""
    versions: Int32s
    """[G, 2] oldest and newest policy version that sampled a token of the response."""
    texts: tuple[str, ...]
    """[G] what the verifier reads: decoded without special tokens."""
    num_experts: int = 0
    """So many rows at the end are an expert's."""
    spans: Int32s | None = None
    """[S, 2] runs (tokens, version) over the T tokens; None: one version per response."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Continuation:
    """One response that stopped at a budget of tokens, to be sampled further as a group of one."""

    part_id: str
    """`request_id` of that group."""
    request: RolloutRequest
    row: int
    """Which of the G responses."""
    prompt_token_ids: Int32s
    """[P] as the engine gave them."""
    token_ids: Int32s
    """[L] what was sampled so far: at least one token, fewer than the length limit."""
    most: int
    """Tokens to sample now, at most."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full an engine is between two steps, in responses: a group is G of them."""

    running: int = 0
    """They get a token in each step."""
    waiting: int = 0
    """Submitted, and without room in the key-value cache or in the largest batch so far."""
    kv_cache_usage: float = math.nan
    """Share of the key-value cache that is taken, in [0, 1]; NaN: the engine has none."""


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
        """How full it is. Asked after every step, so it must cost next to nothing."""
        ...

    def check_prompts(self, texts: Sequence[str]) -> None:
        """Raises: ConfigError when a prompt does not survive encoding and decoding, or is too long."""
        ...

    def encode_response(self, text: str) -> Int32s:
        """[L] the tokens of a response with this text, with its end, cut at the length limit; at least one."""
        ...

    def submit(self, request: RolloutRequest, most: int | None = None) -> None:
        """Begin to sample one group. Raises: ContractError for a prompt that is too long.

        Args:
            most: tokens per response, if fewer than the length limit; a response that reaches it counts as truncated.
        """
        ...

    def resume(self, part: Continuation) -> None:
        """Go on with one response, under the weights of now.

        `step` returns a group of one: its tokens are the new ones alone, its text is that of the whole response, and it
        is truncated when it reached `part.most`.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Forget a group; unknown ids are ignored."""
        ...

    def step(self) -> list[SampledGroup]:
        """Sample one token for every response in flight; returns the groups that this finished.

        Any exception means that the engine is dead.
        """
        ...

    def load_weights(self, path: str, version: int) -> None:
        """Replace the weights in place by those of a safetensors file.

        Responses in flight go on with the new weights, over a cache that is computed again from them.
        Any exception means that the engine is dead: it may hold half of the new weights.
        """
        ...

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        """[len - 1] log-probs of all tokens but the first at temperature 1; None: this engine holds no weights."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class EngineModule(Protocol):
    """What a file of this folder offers."""

    ENVIRONMENT: Mapping[str, str]
    IN_PROCESS: bool

    def check(self, config: Config) -> None:
        """Raises: ConfigError for what cannot work. Quick, and imports nothing heavy."""
        ...

    def make_engine(self, config: Config) -> Engine:
        """Load the model and be ready to sample."""
        ...


def engine_module(name: str) -> EngineModule:
    """The file of this folder that is called `name`. Imports nothing heavy.

    Raises: ConfigError naming the known engines.
    """
    known = known_engines()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"rollout.engine: there is no engine {name!r}{hint}; known are {', '.join(known)}")
    return cast(EngineModule, _module(name))


def known_engines() -> list[str]:
    """Names of the files of this folder, sorted; one that begins with an underscore belongs to an engine."""
    # Not imported to find out what they hold: that could cost half a minute.
    names = (module.name for module in pkgutil.iter_modules(rollout_server.engines.__path__))
    return sorted(name for name in names if name != "base" and not name.startswith("_"))


def _module(name: str) -> object:
    return importlib.import_module(f"{rollout_server.engines.__name__}.{name}")
