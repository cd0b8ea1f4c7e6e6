"""Between prompts and the tokens that an engine gets and gives: prompt texts, images, and texts of responses.

    Prompt --encode_prompt--> EncodedPrompt --> Completion --engine--> token ids --decode--> text to be graded

A worker owns one, and uses it in one thread.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError
from bapo.core.token_arrays import Int32s
from bapo.core.types import Prompt
from bapo.runtime.vision import ImageReader, Patches, ReadImage, vision_model
from bapo.tasks.prompt_tokens import ended_prompts, prompt_token_ids, round_trips_of

log = logging.getLogger(__name__)


def no_image(digest: str) -> bytes:
    """For runs without images. Raises: ContractError."""
    raise ContractError(f"image {digest[:16]}... is not available: no images were passed to this engine")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedPrompt:
    """What a model reads of a prompt."""

    token_ids: list[int]
    """[P], those of images included."""
    images: tuple[tuple[str, Patches], ...] = ()
    """Digest and patches of each image, in order."""


class Tokenization:
    """A transformers tokenizer, and the limits on prompts and responses."""

    def __init__(self, tokenizer: Any, config: Config, image: ReadImage = no_image) -> None:
        """`image`: returns the image files of prompts."""
        self._tokenizer, self._rollout = tokenizer, config.rollout
        model = vision_model(config.model.path, config.model.max_image_pixels)
        self._images = None if model is None else ImageReader(model, image)
        self._excluded = frozenset(() if model is None else model.excluded)

    def check_prompts(self, prompts: Sequence[Prompt], image: ReadImage = no_image) -> None:
        """Warns of prompts that change when encoded and decoded.

        Args:
            image: returns the files of their images.
        Raises: ConfigError if most change, or one is too long, or has images that the model cannot read.
        """
        found = round_trips_of(self._tokenizer, prompts)
        if found.is_wrong:
            raise ConfigError(found.complaint)
        for complaint in (found.complaint if found.num_changed else "", ended_prompts(self._tokenizer, prompts)):
            if complaint:
                log.warning("%s", complaint)
        images = None if self._images is None else ImageReader(self._images.model, image)
        try:
            for prompt in prompts:
                self._encoded(prompt, images)
        except ContractError as error:
            raise ConfigError(str(error)) from error

    def encode_prompt(self, prompt: Prompt) -> EncodedPrompt:
        """Raises: ContractError if it has no tokens, too many, or images for a model that reads text only."""
        return self._encoded(prompt, self._images)

    def encode_response(self, text: str) -> Int32s:
        """[L] token ids of a response with this text and its end, truncated to the length limit; at least one."""
        encoded: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        token_ids = [token for token in encoded if token not in self._excluded]
        end = self._tokenizer.eos_token_id
        closed = token_ids if end is None else [*token_ids, end]
        return np.array(closed[: self._rollout.max_response_tokens], np.int32)

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Texts without special tokens."""
        return list(self._tokenizer.batch_decode(sequences, skip_special_tokens=True))

    def num_until_stop(self, token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
        """Tokens of a response until one of these texts is complete; None: it has none of them."""

        def has(num_tokens: int) -> bool:
            text = self._tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=False)
            return any(each in text for each in stop)

        return bisect_left(range(len(token_ids)), True, key=has) if has(len(token_ids)) else None

    def _encoded(self, prompt: Prompt, images: ImageReader | None) -> EncodedPrompt:
        token_ids = prompt_token_ids(self._tokenizer, prompt)
        if prompt.images and images is None:
            raise ContractError(
                f"the prompt {_shown(prompt.text)!r} has images, but the model reads text only: set model.path to a "
                "vision-language model"
            )
        patches = [] if images is None else images.of_prompt(prompt)
        if images is not None:
            token_ids = images.model.expanded(token_ids, patches)
        self._check_length(len(token_ids), prompt.text)
        return EncodedPrompt(token_ids=token_ids, images=tuple(zip(prompt.images, patches, strict=True)))

    def _check_length(self, num_tokens: int, text: str) -> None:
        longest = self._rollout.max_prompt_tokens
        if num_tokens == 0:  # vLLM's own error would kill the engine
            raise ContractError(f"the prompt {text!r} has no tokens")
        if num_tokens > longest:
            shown = _shown(text)
            message = f"the prompt {shown!r} has {num_tokens} tokens, more than rollout.max_prompt_tokens={longest}"
            raise ContractError(message)


def _shown(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
