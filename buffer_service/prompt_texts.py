"""A prompt id means one prompt: two prompts under one id would share a record, a pass rate and a place in the buffer.

What a grader is given may differ: columns of a row that do not change the prompt are not part of its id
(`bapo.tasks.base.make_prompt`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import xxhash

from bapo.core.errors import ContractError
from bapo.core.types import Prompt, RolloutRequest

REMEMBERED = 1 << 17
"""Prompts; 100 bytes each. The oldest are forgotten first."""
SHOWN = 60
"""Characters of a text in a message."""
ADVICE = "give each prompt an id of its own, such as a hash of its content"

Stored = Callable[[Sequence[str]], Iterable[RolloutRequest | None]]


class PromptTexts:
    """The prompts that this process was given, by digest, and those of requests that are stored."""

    def __init__(self, stored: Stored) -> None:
        """`stored`: returns the requests of these ids that the store still has, None for others."""
        self._stored = stored
        self._digests: dict[str, int] = {}
        self._lock = threading.Lock()

    def require_same(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises: ContractError for an id, of a request or a prompt, that stood for another prompt before."""
        given: dict[str, Prompt] = {}
        for request in requests:
            _require_equal(given.setdefault(request.prompt.prompt_id, request.prompt), request.prompt)
        for request, known in zip(requests, self._stored([each.request_id for each in requests]), strict=True):
            if known is not None:
                _require_equal(known.prompt, request.prompt, f"request {request.request_id}: ")
        digests = {prompt_id: _digest(prompt) for prompt_id, prompt in given.items()}
        with self._lock:
            for prompt_id, digest in digests.items():
                if self._digests.get(prompt_id, digest) != digest:
                    raise ContractError(
                        f"prompt {prompt_id} was enqueued before with another text, task or images than "
                        f"{_short(given[prompt_id].text)}; {ADVICE}"
                    )
            self._remember(digests)

    def forget(self) -> None:
        """Something was deleted or replaced by hand: what was enqueued before may be enqueued otherwise."""
        with self._lock:
            self._digests.clear()

    def _remember(self, digests: dict[str, int]) -> None:
        for prompt_id in digests:
            self._digests.pop(prompt_id, None)
        self._digests |= digests
        for prompt_id in list(self._digests)[: max(0, len(self._digests) - REMEMBERED)]:
            del self._digests[prompt_id]


def _require_equal(known: Prompt, prompt: Prompt, where: str = "") -> None:
    if known.prompt_id != prompt.prompt_id:
        raise ContractError(
            f"{where}it was enqueued with prompt {known.prompt_id}, and again with prompt {prompt.prompt_id}; "
            "give each request an id of its own"
        )
    for name in ("text", "task", "images"):
        before, now = getattr(known, name), getattr(prompt, name)
        if before != now:
            raise ContractError(
                f"{where}prompt {prompt.prompt_id} has two different values of `{name}`: "
                f"{_short(before)} and {_short(now)}; {ADVICE}"
            )


def _digest(prompt: Prompt) -> int:
    return xxhash.xxh3_64_intdigest(repr((prompt.text, prompt.task, prompt.images)).encode("utf-8", "surrogatepass"))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
