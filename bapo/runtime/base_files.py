"""The base model's own files, as an export takes them: copied byte for byte, never loaded and saved.

Saving would refuse or change what the model's authors wrote: sampling values without `do_sample`, settings of other
versions, a tokenizer of a class that transformers infers wrongly. Only the data type in config.json is set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo.core.errors import ConfigError
from bapo.runtime.model_files import CONFIG, folder_of

COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "tekken.json",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
"""Generation settings, tokenizer, image preprocessing, code that config.json refers to, and license."""
NAMED_TEMPLATES = "additional_chat_templates"
DTYPES = ("dtype", "torch_dtype")
"""Names of the same setting: transformers 5 and 4."""


def copy_base_files(folder: Path, out: Path, *, dtype: str) -> None:
    """Copy everything but the weights.

    Args:
        dtype: data type of the exported weights.
    Raises: ConfigError for files that cannot be read, or a config.json that is not JSON; OSError for the copies.
    """
    (out / CONFIG).write_text(json.dumps(_with_dtype(_config(folder), dtype), indent=2) + "\n", encoding="utf-8")
    for file in _copied(folder):
        copy = out / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(_bytes(file))


def export_problem(path: str) -> str:
    """Why an export of this base model would fail; empty if nothing is known, also if it is not on this machine."""
    folder = folder_of(path)
    if folder is None or not (folder / CONFIG).is_file():
        return ""
    try:
        _config(folder)
        for file in _copied(folder):
            _bytes(file)
    except ConfigError as error:
        return str(error)
    return ""


def vocabulary_problem(folder: Path) -> str:
    """Why the tokenizer does not fit the model's embedding; empty if it does, or if its files do not say."""
    try:
        config, last = _config(folder), max(_token_ids(folder), default=-1)
    except ConfigError as error:
        return str(error)
    size = (config.get("text_config") or config).get("vocab_size") or config.get("vocab_size")
    if not isinstance(size, int) or last < size:
        return ""
    return (
        f"model.path: the tokenizer of {folder} has ids up to {last}, and the model's embedding has {size} rows "
        "(vocab_size in config.json); resize the embedding, or remove the added tokens"
    )


def _copied(folder: Path) -> list[Path]:
    """Not by glob, which leaves out a link to nothing for some patterns."""
    files = [*folder.iterdir(), *folder.glob(f"{NAMED_TEMPLATES}/*.jinja")]
    return sorted(
        file
        for file in files
        if not file.is_dir() and (file.parent != folder or any(file.match(pattern) for pattern in COPIED))
    )


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"model.path: cannot read {file} ({error.strerror}), which an export copies") from error


def _with_dtype(values: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Config with this data type, also of nested configs that have one."""
    changed = {
        key: _with_dtype(value, dtype) if key.endswith("_config") and _has_dtype(value) else value
        for key, value in values.items()
    }
    names = [name for name in DTYPES if name in values] or DTYPES[:1]
    return changed | dict.fromkeys(names, dtype)


def _has_dtype(value: Any) -> bool:
    return isinstance(value, dict) and any(name in value for name in DTYPES)


def _config(folder: Path) -> dict[str, Any]:
    return _object(folder / CONFIG)


def _token_ids(folder: Path) -> Iterator[int]:
    """Ids of all tokens, from whichever files list them."""
    tokenizer = _object(folder / "tokenizer.json")
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or _object(folder / "vocab.json")
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    yield from (token["id"] for token in tokenizer.get("added_tokens") or ())
    yield from _object(folder / "added_tokens.json").values()
    yield from map(int, _object(folder / "tokenizer_config.json").get("added_tokens_decoder") or ())


def _object(file: Path) -> dict[str, Any]:
    """Empty if there is no such file. Raises: ConfigError if it is not a JSON object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {file} is not a JSON object")
    return found
