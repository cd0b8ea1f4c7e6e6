"""The text of each token of a response, so that joined they are the response. Pure but for the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"
"""What a decoder writes for the bytes of a character whose other bytes are in later tokens."""


class Tokenizer(Protocol):
    """What is used of transformers' tokenizers."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of these tokens."""
        ...


class Pieces:
    """Cuts responses into the text of their tokens; remembers the text of each token id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token, special tokens as they are written. A character of several tokens is the last one's."""
        pieces = [self._one(token_id) for token_id in token_ids]
        if "".join(pieces) == self._text(token_ids):
            return pieces
        return self._grown(token_ids)

    def graded(self, token_ids: Sequence[int]) -> str:
        """What the verifier read: without special tokens, as the engines decode it."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _one(self, token_id: int) -> str:
        if token_id not in self._alone:
            self._alone[token_id] = self._text([token_id])
        return self._alone[token_id]

    def _grown(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text of those before it, looking back no further than the last whole character:
        so a response of n tokens costs n short decodings and not one of n tokens each."""
        pieces: list[str] = []
        begin = done = 0  # ids[begin:done] is text that is out already, and the context of what follows
        for end in range(1, len(token_ids) + 1):
            before, now = self._text(token_ids[begin:done]), self._text(token_ids[begin:end])
            if now.endswith(UNFINISHED) and end < len(token_ids):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            begin, done = done, end
        return pieces

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False) if len(token_ids) else ""
