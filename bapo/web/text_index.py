"""Find words in the ids and texts of a run. Pure; built by appending, so that a run that goes on costs its news alone.

A query is words with spaces between them; a document has all of them somewhere, in any case. Documents lie in large
strings, so that looking through them is the work of `str.rfind`; the newest are found first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

CHUNK_CHARS = 1 << 20
MOST_CHARS = 64 << 20
"""Of all documents; what comes later is not found. Both forms of a text are kept: 2 bytes per ASCII character."""
MOST_CANDIDATES = 20_000
"""Documents with the longest word that are looked at for the others, in one query."""
AROUND = 60
"""Characters before and behind the first hit that are shown."""
END = "\x00"
"""Between documents; never part of a query."""

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One document that was found."""

    key: Key
    snippet: str
    """Text around the longest word."""


@dataclass(slots=True)
class _Chunk:
    keys: list[Key] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    size: int = 0
    joined: tuple[str, str] | None = None
    """(as it is, in lower case), of equal length."""

    def add(self, key: Key, text: str) -> None:
        self.keys.append(key)
        self.starts.append(self.size)
        self.parts.append(text + END)
        self.size += len(text) + 1
        self.joined = None

    def texts(self) -> tuple[str, str]:
        if self.joined is None:
            whole = "".join(self.parts)
            self.parts = [whole]
            self.joined = whole, folded(whole)
        return self.joined


class TextIndex:
    """Documents by key."""

    def __init__(self) -> None:
        self._chunks = [_Chunk()]
        self._num_chars = 0
        self.is_full = False
        """Whether something was not taken because of MOST_CHARS."""

    def add(self, key: Key, text: str) -> None:
        """One document; a key may come again."""
        if self._num_chars + len(text) > MOST_CHARS:
            self.is_full = True
            return
        if self._chunks[-1].size >= CHUNK_CHARS:
            self._chunks.append(_Chunk())
        self._chunks[-1].add(key, text.replace(END, "\u2400"))
        self._num_chars += len(text)

    def find(self, query: str, limit: int) -> tuple[list[Hit], bool]:
        """(the newest documents with all words, whether these are all of them)."""
        words = sorted(folded(query.replace(END, " ")).split(), key=len, reverse=True)
        if not words:
            return [], True
        found: list[Hit] = []
        for number, hit in enumerate(self._candidates(words), start=1):
            if hit is not None:
                if len(found) == limit:
                    return found, False
                found.append(hit)
            if number == MOST_CANDIDATES:
                return found, False
        return found, True

    def _candidates(self, words: list[str]) -> Iterator[Hit | None]:
        """Documents with the first word, newest first; None for one that lacks another word."""
        for chunk in reversed(self._chunks):
            text, lower = chunk.texts()
            end = len(lower)
            while (place := lower.rfind(words[0], 0, end)) >= 0:
                index = bisect_right(chunk.starts, place) - 1
                start = chunk.starts[index]
                stop = chunk.starts[index + 1] - 1 if index + 1 < len(chunk.starts) else len(lower) - 1
                if all(lower.find(word, start, stop) >= 0 for word in words[1:]):
                    begin = max(start, lower.find(words[0], start, stop) - AROUND)
                    yield Hit(
                        key=chunk.keys[index], snippet=text[begin : min(stop, begin + 2 * AROUND + len(words[0]))]
                    )
                else:
                    yield None
                end = start


def folded(text: str) -> str:
    """In lower case, but of the same length."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)
