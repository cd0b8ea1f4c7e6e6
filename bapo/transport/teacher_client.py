"""Client of a teacher: a vLLM server that says how likely its model finds tokens that another model has sampled.

    GET  TEACHER/models       the names of its models, and the longest sequence
    POST TEACHER/completions  {"prompt": [[prompt and response]...], "prompt_logprobs": 0, "max_tokens": 1}
         -> choices[i].prompt_logprobs: [null, {"token id": {"logprob": nats}}, ...], null for the first token
    POST ../tokenize          {"prompt": text} -> {"tokens": [ids]}; this one has no `/v1`

`prompt_logprobs` are those of the whole distribution at temperature 1, whatever the sampling settings are. Every answer
is checked token by token: what is not a finite log-prob of the token that was asked for becomes an error, no number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from urllib3 import PoolManager, Timeout
from urllib3.exceptions import HTTPError

from bapo.config.distillation import DistillationConfig
from bapo.core.errors import ConfigError, ContractError, UnavailableError
from bapo.core.token_arrays import MAX_LOGPROB, Float32s

CONNECT_TIMEOUT_S = 5.0
REFUSED = (400, 413, 422)
"""Statuses of a request that will never be answered: a retry does not help."""
MINUS_INFINITY = -9999.0
"""What vLLM writes instead, because JSON has no such number."""
MAX_SHOWN = 200
"""Characters of an answer in a message."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[dict[int, _Logprob] | None]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Tokens(msgspec.Struct):
    tokens: list[int]


Answer = TypeVar("Answer")


class TeacherClient:
    """One teacher. Thread-safe."""

    def __init__(self, settings: DistillationConfig) -> None:
        """Raises: ConfigError without the key."""
        self.url, self._settings, self._name = settings.teacher, settings, settings.model
        key = "" if settings.api_key_env is None else os.environ.get(settings.api_key_env, "")
        if settings.api_key_env is not None and not key:
            raise ConfigError(f"distillation.api_key_env: the environment variable {settings.api_key_env} is not set")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._pool = PoolManager(maxsize=settings.concurrency)

    def model(self) -> tuple[str, int | None]:
        """Name of the model that scores, and the longest sequence that it takes, if the server says so.

        Raises: ConfigError for a name that the server does not have; as `logprobs`.
        """
        known = {model.id: model.max_model_len for model in self._ask("GET", f"{self.url}/models", None, _Models).data}
        name = self._name or next(iter(known), "")
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(f"distillation.model: the teacher at {self.url} has no model {name!r}; it has {listed}")
        self._name = name
        return name, known[name]

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text in the tokenizer of the teacher, without special tokens around it. Raises: as `logprobs`."""
        body = {"prompt": text, "add_special_tokens": False}
        return self._ask("POST", f"{self.url.removesuffix('/v1')}/tokenize", body, _Tokens).tokens

    def logprobs(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[Float32s]:
        """[L] log-probs in nats of each response after the prompt, which has at least one token.

        Raises: UnavailableError while the teacher is away, or something else answers; ContractError for a
            request that it refuses, and for an answer that is not the log-probs of these tokens.
        """
        asked = [[*prompt, *response] for response in responses]
        body = {"model": self._name or self.model()[0], "prompt": asked, "max_tokens": 1, "prompt_logprobs": 0}
        choices = self._ask("POST", f"{self.url}/completions", body, _Completion).choices
        found = {choice.index: choice.prompt_logprobs for choice in choices}
        if sorted(found) != [*range(len(asked))] or len(choices) != len(asked):
            raise ContractError(f"the teacher at {self.url} answered {len(choices)} of {len(asked)} sequences")
        return [self._scores(found[i], token_ids, len(prompt)) for i, token_ids in enumerate(asked)]

    def _scores(self, entries: Sequence[Mapping[int, _Logprob] | None], token_ids: list[int], start: int) -> Float32s:
        where = f"the teacher at {self.url}"
        if len(entries) != len(token_ids):
            raise ContractError(f"{where} scored {len(entries)} tokens of a sequence of {len(token_ids)}")
        scores = []
        for entry, token_id in zip(entries[start:], token_ids[start:], strict=True):
            if entry is None or token_id not in entry:
                raise ContractError(f"{where} has no log-prob of token {token_id}, which was sampled")
            scores.append(entry[token_id].logprob)
        if scores and not MINUS_INFINITY < min(scores) <= max(scores) <= MAX_LOGPROB:
            raise ContractError(f"{where}: log-probs from {min(scores)} to {max(scores)}, must be in (-inf, 0]")
        return np.array(scores, np.float32)

    def _ask(self, method: str, url: str, body: Mapping[str, Any] | None, kind: type[Answer]) -> Answer:
        timeout = Timeout(connect=CONNECT_TIMEOUT_S, read=self._settings.timeout_s)
        sent = None if body is None else json.dumps(body).encode()
        try:
            reply = self._pool.request(method, url, body=sent, headers=self._headers, timeout=timeout, retries=False)
        except (OSError, HTTPError) as error:
            raise UnavailableError(f"no answer from {url}: {str(error).rpartition('): ')[2]}") from error
        shown = reply.data[:MAX_SHOWN].decode(errors="replace")
        if reply.status in REFUSED:
            raise ContractError(f"{url} refused with HTTP {reply.status}: {shown}")
        if reply.status != 200:
            raise UnavailableError(f"{url} answered with HTTP {reply.status}: {shown}")
        try:
            return msgspec.json.decode(reply.data, type=kind)
        except msgspec.DecodeError as error:
            raise UnavailableError(f"{url} did not answer as vLLM does ({error}): {shown}") from error
