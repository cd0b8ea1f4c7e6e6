"""Whether prompts survive a tokenizer: some model types make transformers build another one than the model's, silently.

A tokenizer may normalise (those of Qwen do, to NFC): the ohm sign becomes omega, the same text to a reader.
So both sides are compared in NFC, and a tokenizer is called wrong only when it changes most prompts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrips:
    """What became of some prompts."""

    num_prompts: int
    num_changed: int
    example: tuple[str, str] = ("", "")
    """The first prompt that changed, and what came back."""

    @property
    def is_wrong(self) -> bool:
        """Most prompts changed: it is another model's tokenizer."""
        return 2 * self.num_changed > self.num_prompts

    @property
    def complaint(self) -> str:
        """What changed, for people, with what to look at."""
        text, back = self.example
        changed = (
            f"the tokenizer of the model turns the prompt {text!r} into {back!r} ({self.num_changed} of "
            f"{self.num_prompts} prompts that were tried change, {self.num_changed / self.num_prompts:.0%})"
        )
        if self.is_wrong:
            return (
                f"{changed}: it is not the tokenizer that the model was trained with (tokenizer_class and model_type "
                "of its config decide which one loads)"
            )
        return f"{changed}: the model reads such prompts otherwise than they are written"


def round_trips(texts: Sequence[str], there_and_back: Callable[[str], str]) -> RoundTrips:
    """Encode and decode all texts.

    Args:
        there_and_back: encodes without what the tokenizer adds by itself, decodes with special tokens: a chat template
            writes some.
    """
    pairs = [(text, there_and_back(text)) for text in texts]
    changed = [pair for pair in pairs if _normalised(pair[0]) != _normalised(pair[1])]
    example = changed[0] if changed else ("", "")
    return RoundTrips(num_prompts=len(texts), num_changed=len(changed), example=example)


def _normalised(text: str) -> str:
    return unicodedata.normalize("NFC", text)
