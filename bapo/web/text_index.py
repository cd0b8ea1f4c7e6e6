"""Find words in the ids and texts of a run. Pure; built by appending, so that a run that goes on costs its news alone.

A query is words with spaces between them; a document has all of them somewhere, also inside of longer words, in any
case. The newest are found first.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_CHARS = 64 << 20
"""Of all documents; what comes later is not found."""
AROUND = 60
"""Characters before and behind the first hit that are shown."""

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One document that was found."""

    key: Key
    snippet: str
    """Text around the longest word."""


class TextIndex:
    """Documents by key."""

    def __init__(self) -> None:
        self._documents: list[tuple[Key, str, str]] = []
        """(key, text, text in lower case), oldest first."""
        self._num_chars = 0
        self.is_full = False
        """Whether something was not taken because of MOST_CHARS."""

    def add(self, key: Key, text: str) -> None:
        """One document; a key may come again."""
        if self._num_chars + len(text) > MOST_CHARS:
            self.is_full = True
            return
        lower = folded(text)
        self._documents.append((key, text, text if lower == text else lower))
        self._num_chars += len(text)

    def find(self, query: str, limit: int) -> tuple[list[Hit], bool]:
        """(the newest documents with all words, whether these are all of them)."""
        words = sorted(folded(query).split(), key=len, reverse=True)
        found: list[Hit] = []
        for key, text, lower in reversed(self._documents) if words else ():
            if words[0] in lower and all(word in lower for word in words[1:]):
                if len(found) == limit:
                    return found, False
                place = lower.find(words[0])
                found.append(Hit(key=key, snippet=text[max(0, place - AROUND) : place + len(words[0]) + AROUND]))
        return found, True


def folded(text: str) -> str:
    """In lower case, but of the same length."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)
