"""Search in the ids of prompts and groups, and in recorded texts.

A query is a list of words separated by spaces; a document matches if it contains all of them, case-insensitively. Not
SQLite's FTS5: its trigram index cannot find one or two characters, such as the numbers of a Countdown task.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.runtime.run_directory.recording import RecordedStep
from services.dashboard.run_view import RunView

LIMIT = 50
TAKE_S = 0.08
"""Maximum time per response for reading token records; at least one file is read."""
END_CHARS = 10_000
"""Of a longer text than two of these only the first and the last ones are searched: an answer is at the end."""
MAX_INDEX_CHARS = 64 << 20
"""Total size; later documents are not indexed. Original and lower case are kept: 2 bytes per ASCII character."""
AROUND = 60
"""Characters shown before and after the first hit."""

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    key: Key
    snippet: str
    """Text around the longest word."""


class TextIndex:
    """Documents by key, in insertion order."""

    def __init__(self) -> None:
        self._documents: list[tuple[Key, str, str]] = []
        self._num_chars = 0
        self.is_full = False
        """Whether a document was skipped because of MAX_INDEX_CHARS."""

    def add(self, key: Key, text: str) -> None:
        """Add a document; keys may repeat."""
        if self._num_chars + len(text) > MAX_INDEX_CHARS:
            self.is_full = True
            return
        self._documents.append((key, text, text.lower()))
        self._num_chars += len(text)

    def find(self, query: str, limit: int) -> tuple[list[Hit], bool]:
        """(the newest matching documents, whether these are all matches)."""
        words = sorted(query.lower().split(), key=len, reverse=True)
        found: list[Hit] = []
        for key, text, lower in reversed(self._documents) if words else ():
            if not all(word in lower for word in words):
                continue
            if len(found) == limit:
                return found, False
            begin = max(0, lower.find(words[0]) - AROUND)
            found.append(Hit(key=key, snippet=text[begin : begin + 2 * AROUND + len(words[0])]))
        return found, True


class Texts:
    """A fold: the search index."""

    def __init__(self, config: Config) -> None:
        self.index = TextIndex()
        self.taken: set[int] = set()
        """Steps whose token records are in the index."""
        self._known: set[str] = set()
        self._prompts: set[str] = set()
        """Prompts whose text is in the index."""
        self.num_cut = 0
        """Texts of which only both ends are in the index."""

    def advance(self, step: RecordedStep) -> None:
        for result in step.results:
            for kind, name in (("prompt", result.prompt_id), ("group", result.group_id)):
                if name not in self._known:
                    self._known.add(name)
                    self.index.add((kind, name, step.step), name)

    def take(self, view: RunView, steps: list[int]) -> None:
        """Add new token records to the index, for at most TAKE_S."""
        deadline = time.monotonic() + TAKE_S
        for step in steps:
            if step in self.taken:
                continue
            for head in view.run.token_files.read_heads(step):
                # An entry of several stored groups ("a:0,2+b:1") is indexed under the first one.
                group_id, prompt_id = head["group_id"].split("+")[0].split(":")[0], head["prompt_id"]
                if prompt_id not in self._prompts:
                    self._prompts.add(prompt_id)
                    self.index.add(("prompt", prompt_id, step), self._ends(head["prompt"]))
                self.index.add(("response", group_id, step, head["row"]), self._ends(head["text"]))
            self.taken.add(step)
            if time.monotonic() > deadline:
                return

    def _ends(self, text: str) -> str:
        """The text, or both its ends in lines of their own, so that no word is found across the gap."""
        if len(text) <= 2 * END_CHARS:
            return text
        self.num_cut += 1
        return f"{text[:END_CHARS]}\n{text[-END_CHARS:]}"


def search(view: RunView, *, text: str) -> dict[str, Any]:
    """The newest prompts, groups and responses that contain all words; call again while `is_whole` is false.

    Returns: `hits`: {kind: prompt, group or response, id, step, row, snippet}; `has_all`: whether these are all;
    `taken` of `recorded` steps are indexed so far; `num_cut`: texts searched only in their first and last `end_chars`.
    """
    if len(text) > 200:
        raise ContractError(f"the search text has {len(text)} characters, more than 200")
    texts, steps = view.fold(Texts), view.run.token_files.steps()
    texts.take(view, steps)
    hits, has_all = texts.index.find(text, LIMIT)
    return {
        "text": text,
        "hits": [_hit(*hit.key, snippet=hit.snippet) for hit in hits],
        "has_all": has_all,
        "is_whole": texts.taken.issuperset(steps),
        "taken": len(texts.taken.intersection(steps)),
        "recorded": len(steps),
        "is_full": texts.index.is_full,
        "num_cut": texts.num_cut,
        "end_chars": END_CHARS,
    }


def _hit(kind: str | int, name: str | int, step: str | int, row: str | int = 0, *, snippet: str) -> dict[str, Any]:
    return {"kind": kind, "id": name, "step": step, "row": row, "snippet": snippet}
