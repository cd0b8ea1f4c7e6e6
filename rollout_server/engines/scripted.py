"""An engine without a model: the whole pipeline runs on it in seconds, deterministically.

Every draw depends only on (seed, prompt, purpose, clock, tokens so far), by a counter-based generator, so two runs, two
workers or a plain loop over `ScriptedPolicy` give the same groups. The clock is the policy version, or the request's
step where the result must not depend on the version that samples.

Each prompt has a fixed difficulty in [0, 1]; the skill rises with the clock, so hard prompts become solvable:

    p(correct) = clip((skill - difficulty) / spread + 1/2, 0, 1),    skill = skill_start + skill_gain * (clock - 1)

Covers: texts that the task's own verifier grades, token ids and log-probs of a learner's vocabulary, latency, crashes.
Does not cover: texts that decode from the token ids, and what ends at one; how a request is to be sampled; weights (an
update only sets the version).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
from pydantic import Field

from bapo.algorithms.settings import Frozen
from bapo.config.check import read_options
from bapo.config.tree import Config
from bapo.core.sequences import SampledSequence
from bapo.core.token_arrays import Float32s, Int32s
from bapo.core.types import Outcome, Prompt, RolloutRequest
from bapo.runtime.vision import ReadImage
from bapo.tasks.base import Task
from bapo.tasks.registry import task_of
from rollout_server.engines.base import INITIAL_VERSION, Completed, Completion, Occupancy
from rollout_server.tokenization import EncodedPrompt, Tokenization, no_image

ENVIRONMENT: Mapping[str, str] = {}
IN_PROCESS = True

WRONG_TEXT = "I do not know."
FIRST_TOKEN = 4
"""Ids below this are treated as special tokens."""
PAUSE_S = 0.005
"""Longest sleep of one step, so that the owning thread handles its other work."""


class ScriptedOptions(Frozen):
    """The `[rollout.engine_options]` table of this engine."""

    seed: int = 0
    vocab_size: int = Field(218, gt=FIRST_TOKEN)
    """Token ids are drawn below this."""
    clock: Literal["version", "step"] = "version"
    """The clock of skill and draws."""
    skill_start: float = 0.3
    skill_gain: float = 0.01
    """Increase of the skill per unit of the clock."""
    spread: float = Field(0.5, gt=0)
    """Width in difficulty over which p(correct) falls from 1 to 0."""
    truncated_share: float = Field(0.05, ge=0, le=1)
    """Share of incorrect responses that reach the length limit."""
    latency_s: float = Field(0.0, ge=0)
    """Seconds that each group takes."""
    crash_after_groups: int | None = Field(None, ge=0)
    """The engine fails after this many groups, for tests of supervision."""


class ScriptedPolicy:
    """The responses of a prompt at a clock. Pure."""

    def __init__(self, options: ScriptedOptions, task: Task, max_tokens: int) -> None:
        self._options = options
        self._task = task
        self._max_tokens = max_tokens
        self._gold: dict[str, str | None] = {}

    def probability(self, prompt_id: str, clock: int) -> float:
        """p(correct) of one response."""
        options = self._options
        skill = options.skill_start + options.skill_gain * (clock - 1)
        difficulty = float(self._generator(prompt_id, "difficulty").random())
        return min(1.0, max(0.0, (skill - difficulty) / options.spread + 0.5))

    def sample(self, request: RolloutRequest, version: int) -> list[SampledSequence]:
        """The responses that `request` gets from policy `version`."""
        options, size = self._options, request.group_size
        clock = request.step if options.clock == "step" else version
        prompt_id = request.prompt.prompt_id
        rng = self._generator(prompt_id, f"{request.purpose.value}/{clock}")
        gold = self._gold_of(request.prompt)
        right = (rng.random(size) < self.probability(prompt_id, clock)) & (gold is not None)
        truncated = ~right & (rng.random(size) < options.truncated_share)
        lengths = np.where(truncated, self._max_tokens, rng.integers(1, self._max_tokens + 1, size)).astype(np.int32)
        num_tokens, ends = int(lengths.sum()), np.cumsum(lengths)[:-1]
        token_ids = np.split(rng.integers(FIRST_TOKEN, options.vocab_size, num_tokens).astype(np.int32), ends)
        logprobs = np.split(self._logprobs(rng, num_tokens), ends)
        return [
            _sequence(token_ids[i], logprobs[i], version, bool(truncated[i]), gold if right[i] else None)
            for i in range(size)
        ]

    def continued(self, request: RolloutRequest, so_far: Int32s, version: int) -> SampledSequence:
        """The rest of a response, by the skill of `version`; it depends on the tokens so far."""
        options, prompt_id = self._options, request.prompt.prompt_id
        clock = request.step if options.clock == "step" else version
        rng = self._generator(prompt_id, f"{request.purpose.value}/{clock}/{so_far.tobytes().hex()}")
        gold = self._gold_of(request.prompt)
        right = gold is not None and rng.random() < self.probability(prompt_id, clock)
        left = self._max_tokens - len(so_far)
        truncated = not right and rng.random() < options.truncated_share
        num_tokens = left if truncated else int(rng.integers(1, left + 1))
        token_ids = rng.integers(FIRST_TOKEN, options.vocab_size, num_tokens).astype(np.int32)
        return _sequence(token_ids, self._logprobs(rng, num_tokens), version, truncated, gold if right else None)

    def _logprobs(self, rng: np.random.Generator, num_tokens: int) -> Float32s:
        """Near the uniform policy's log-prob, so that an untrained learner starts with ratios near 1."""
        uniform = -math.log(self._options.vocab_size)
        return np.asarray(uniform + 0.01 * rng.standard_normal(num_tokens), np.float32)

    def _generator(self, prompt_id: str, purpose: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self._options.seed}/{prompt_id}/{purpose}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))

    def _gold_of(self, prompt: Prompt) -> str | None:
        """The correct response, cached: a solver may be slow, and prompts repeat."""
        if prompt.prompt_id not in self._gold:
            self._gold[prompt.prompt_id] = self._task.gold(prompt)
        return self._gold[prompt.prompt_id]


class ScriptedEngine:
    """An `Engine` over a `ScriptedPolicy`. The context of its calls is their `RolloutRequest`."""

    def __init__(self, options: ScriptedOptions, policy: ScriptedPolicy) -> None:
        self._options = options
        self._policy = policy
        self._version = INITIAL_VERSION
        self._due: dict[str, tuple[float, Completed]] = {}
        self._num_finished = 0

    @property
    def policy_version(self) -> int:
        """Version of the last update."""
        return self._version

    @property
    def occupancy(self) -> Occupancy:
        """All responses run concurrently, and there is no cache."""
        return Occupancy(running=sum(len(completed.sequences) for _, completed in self._due.values()))

    def add(self, completion: Completion) -> None:
        """Draw the responses with the current version; they finish after the latency."""
        request = cast(RolloutRequest, completion.context)
        token_ids = np.array(completion.token_ids, np.int32)
        so_far = token_ids[len(request.prompt.text) :]
        if len(so_far):
            sequences = [self._policy.continued(request, so_far, self._version)]
        else:
            sequences = self._policy.sample(request, self._version)
        completed = Completed(
            call_id=completion.call_id,
            token_ids=token_ids,
            sequences=tuple(sequence.first(completion.max_tokens) for sequence in sequences),
        )
        self._due[completion.call_id] = (time.monotonic() + self._options.latency_s, completed)

    def abort(self, call_id: str) -> None:
        """Stop sampling a call."""
        self._due.pop(call_id, None)

    def step(self) -> list[Completed]:
        """The calls whose latency has passed; sleeps briefly when there are none."""
        crash_at = self._options.crash_after_groups
        if crash_at is not None and self._num_finished >= crash_at:
            raise RuntimeError(f"scripted crash after {self._num_finished} groups (engine_options.crash_after_groups)")
        now = time.monotonic()
        ready = [completed for due_at, completed in self._due.values() if due_at <= now]
        if not ready and self._due:
            first = min(due_at for due_at, _ in self._due.values())
            time.sleep(min(PAUSE_S, max(0.0, first - now)))
        for completed in ready:
            del self._due[completed.call_id]
        self._num_finished += len(ready)
        return ready

    def load_weights(self, path: str, version: int) -> bool:
        """Set the version; the file is not read."""
        self._version = version
        return True

    def join_transfer(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """Declines: there are no weights."""
        raise NotImplementedError("the scripted engine has no weights")

    def receive_weights(self, update_info: Mapping[str, Any], version: int) -> bool:
        """Never called: it declines."""
        raise NotImplementedError("the scripted engine has no weights")

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        """None: there are no weights."""
        return None

    def close(self) -> None:
        """Drop all groups."""
        self._due.clear()


class CharacterTokenization(Tokenization):
    """One id per character, for every prompt; images are ignored."""

    def __init__(self, vocab_size: int, max_response_tokens: int) -> None:
        self._num_ids, self._max_tokens = vocab_size - FIRST_TOKEN, max_response_tokens

    def check_prompts(self, prompts: Sequence[Prompt], image: ReadImage = no_image) -> None:
        """Accepts every prompt."""

    def encode_prompt(self, prompt: Prompt) -> EncodedPrompt:
        """[P] ids, one per character."""
        return EncodedPrompt(token_ids=self._ids(prompt.text).tolist())

    def encode_response(self, text: str) -> Int32s:
        """[L] ids, up to the length limit."""
        return self._ids(text or " ")[: self._max_tokens]

    def num_until_stop(self, token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
        """None: tokens have no texts."""
        return None

    def _ids(self, text: str) -> Int32s:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        return (FIRST_TOKEN + codes % self._num_ids).astype(np.int32)


def _sequence(
    token_ids: Int32s, logprobs: Float32s, version: int, truncated: bool, right_text: str | None
) -> SampledSequence:
    return SampledSequence(
        token_ids=token_ids,
        rollout_logprobs=logprobs,
        versions=np.full(len(token_ids), version, np.int32),
        outcome=Outcome.TRUNCATED if truncated else Outcome.GRADED,
        text=right_text or WRONG_TEXT,
    )


def check(config: Config) -> None:
    """Raises: ConfigError for an unknown or impossible option."""
    _options(config)


def make_policy(config: Config) -> ScriptedPolicy:
    """The policy of a run, for engines and for plain loops that must agree with them. Raises: ConfigError."""
    task = task_of(config)
    return ScriptedPolicy(_options(config), task, config.rollout.max_response_tokens)


def make_engine(config: Config, worker_id: str = "") -> ScriptedEngine:
    """The engine of a run, the same for every worker. Raises: ConfigError for an unknown or impossible option."""
    return ScriptedEngine(_options(config), make_policy(config))


def make_tokenization(config: Config, image: ReadImage = no_image) -> CharacterTokenization:
    """Without the model's tokenizer."""
    return CharacterTokenization(_options(config).vocab_size, config.rollout.max_response_tokens)


def _options(config: Config) -> ScriptedOptions:
    return read_options(ScriptedOptions, config.rollout.engine_options, ("rollout", "engine_options"))
