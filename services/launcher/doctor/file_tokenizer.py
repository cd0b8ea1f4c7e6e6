"""A model's tokenizer.json without importing transformers, which takes seconds: to count and check prompts.

Not covered: tokenizers without a tokenizer.json, and what a class of transformers changes in one (`bapo doctor` loads
the class).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

TOKENIZER, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
FILES = (TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Any of them is a tokenizer; others end in .tiktoken."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has a tokenizer in any known format."""
    return any((folder / name).is_file() for name in FILES) or any(folder.glob("*.tiktoken"))


class FileTokenizer:
    """Encodes like the tokenizer in a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises: OSError, ValueError for a missing or damaged file."""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # the library raises a bare Exception for any file that it cannot read
            raise ValueError(f"{folder / TOKENIZER}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = {**_object(folder / SPECIAL), **_object(folder / SETTINGS)}
        self.bos_token, self.eos_token = _text(named.get("bos_token")), _text(named.get("eos_token"))
        self.eos_token_id = None if self.eos_token is None else self._tokenizer.token_to_id(self.eos_token)

    @property
    def size(self) -> int:
        """Ids, with those of added tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str | None:
    """A special token as text; newer files write it as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
