"""Token ids of a prompt: one rule for the engine, the agents' address and whatever counts or checks prompts.

    written by a chat template      no token is added: the ids of transformers' `apply_chat_template(tokenize=True)`
    other text                      with the special tokens that the tokenizer adds, as in vLLM's completions
    text that begins with BOS       complete: no token is added, or it would have two

An image is one token here; `VisionModel.expanded` repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bapo.core.types import Prompt
from bapo.runtime.model_files import RoundTrips, round_trips
from bapo.runtime.vision import written
from bapo.tasks.base import is_templated


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    bos_token: Any
    eos_token: Any
    eos_token_id: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """Text."""
        ...


def prompt_token_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """[P] token ids of a prompt, each image as one token."""
    text = written(prompt)
    return list(tokenizer.encode(text, add_special_tokens=not is_complete(prompt, text, tokenizer.bos_token)))


def is_complete(prompt: Prompt, text: str, begin: Any) -> bool:
    """Whether a text for this prompt, or what an agent makes of it, has all special tokens; `begin`: BOS, or None."""
    return is_templated(prompt) or bool(begin and text.startswith(str(begin)))


def round_trips_of(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> RoundTrips:
    """Encode and decode the texts of prompts, without added tokens."""

    def there_and_back(text: str) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False))

    return round_trips([written(prompt) for prompt in prompts], there_and_back)


def ended_prompts(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> str:
    """Complaint if prompts end with the end-of-sequence token, after which a model has nothing to say; else empty."""
    end = tokenizer.eos_token_id
    ended = (
        [prompt for prompt in prompts if prompt_token_ids(tokenizer, prompt)[-1:] == [end]] if end is not None else []
    )
    if not ended:
        return ""
    what = f"{len(ended)} of {len(prompts)} tested prompts end with the end-of-sequence token {tokenizer.eos_token!s}"
    if is_templated(ended[0]):
        return f"{what}: the chat template writes it and no beginning of an answer; use a template that does"
    if written(ended[0]).endswith(str(tokenizer.eos_token)):
        return f"{what}: the prompts contain it; remove it from the data"
    return (
        f"{what}, which the tokenizer adds to text; set add_eos_token = false in tokenizer_config.json, or remove it "
        "from post_processor in tokenizer.json"
    )
