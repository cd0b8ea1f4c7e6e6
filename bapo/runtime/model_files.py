"""The files of a model: in a folder, or in the local Hugging Face cache, into which a Hub id is downloaded.

A model counts as present if its weights are: loading only a tokenizer leaves config.json in the cache.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo.core.errors import ConfigError

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Only safetensors weights, config and tokenizer: many models include the same weights in other formats."""
UNKNOWN = "<unk>"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Ends of the names of a table of token embeddings."""
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
KEEPS_CONTEXT = ("default", "mrope", "llama3", "longrope", "su", "yarn")
"""Kinds of RoPE whose config.json states the whole context; others extend it by their factor, except in Gemma 3."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(path: str) -> bool:
    """Whether `model.path` looks like a Hub id. `models/tiny` is not one if there is a folder `models`."""
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).is_dir() and not Path(path).parent.is_dir()


def folder_of(path: str) -> Path | None:
    """Local folder of `model.path`, complete or not; None: not found."""
    if Path(path).is_dir():
        return Path(path)
    if not _HUB_ID.fullmatch(path):
        return None
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        found = hub.try_to_load_from_cache(path, CONFIG)
    except hub.errors.HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def weight_files(folder: Path) -> list[Path]:
    """Existing weight files, sorted."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def num_parameters(folder: Path) -> int | None:
    """Number of parameters, from the headers of the safetensors files; None if they are missing or damaged."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        return sum(map(_num_in, files)) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _num_in(file: Path) -> int:
    return sum(
        math.prod(tensor["shape"]) for name, tensor in safetensors_header(file).items() if name != "__metadata__"
    )


def safetensors_header(file: Path) -> dict[str, Any]:
    """name -> {dtype, shape, data_offsets}; its length is in the first eight bytes. Raises: OSError, ValueError."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, Any] = json.loads(opened.read(length))
    return header


def embedding_rows(folder: Path) -> int | None:
    """Number of token ids that the model has embeddings for; None: not found."""
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            for name, tensor in safetensors_header(file).items():
                if name.endswith(EMBEDDINGS):
                    return int(tensor["shape"][0])
    try:
        values = json.loads((folder / CONFIG).read_text())
        found = values.get("text_config", values).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def context_length(folder: Path) -> int | None:
    """Most tokens of a prompt and its response together, as vLLM derives it; None: not stated."""
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = values.get("text_config", values)
    length = next((text[key] for key in CONTEXT_KEYS if isinstance(text.get(key), int)), None)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if length is None or kind in KEEPS_CONTEXT or "gemma3" in str(values.get("model_type")):
        return length
    factor = scaling.get("factor")
    return int(length * factor) if isinstance(factor, int | float) else None


def missing_parts(folder: Path) -> list[str]:
    """Descriptions of the missing parts of a model: config, weights, or some weight files."""
    missing = [] if (folder / CONFIG).is_file() else [CONFIG]
    index = folder / INDEX
    if index.is_file():
        needed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        lacking = [name for name in needed if not (folder / name).is_file()]
        if lacking:
            missing.append(f"{lacking[0]} ({len(lacking)} of {len(needed)} files of weights)")
    elif not weight_files(folder):
        missing.append("weights")
    return missing


def fetch(model_id: str, download: Callable[[str, Iterable[str]], str] | None = None) -> Path:
    """The local folder of a Hub id, downloaded if it is not in the cache.

    Args:
        download: (id, file patterns) -> folder; the default shows its progress.
    Raises: ConfigError with what is missing, and the command to get it.
    """
    folder = folder_of(model_id)
    if folder is not None and not missing_parts(folder):
        return folder
    try:
        folder = Path((download or _snapshot)(model_id, WANTED))
    except Exception as error:  # the Hub's client raises its own errors and those of its HTTP library
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError(f"model.path: cannot download {model_id}: {reason}; {how_to_fetch(model_id)}") from error
    if missing := missing_parts(folder):
        raise ConfigError(
            f"model.path: {model_id} has no {' and no '.join(missing)} in {folder}; {how_to_fetch(model_id)}"
        )
    return folder


def how_to_fetch(model_id: str) -> str:
    """How to bring a model to a machine by hand."""
    return (
        f"on a machine with network access: hf download {model_id} (safetensors only; HF_HOME sets the cache folder, "
        "HF_TOKEN opens gated models), or set model.path to a folder"
    )


def _snapshot(model_id: str, patterns: Iterable[str]) -> str:
    hub: Any = importlib.import_module("huggingface_hub")
    return str(hub.snapshot_download(model_id, allow_patterns=list(patterns)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrips:
    """Result of a tokenizer round trip: for some model types transformers silently builds a wrong tokenizer.

    Compared in NFC, because tokenizers may normalize (Qwen's do).
    """

    num_prompts: int
    num_changed: int
    example: tuple[str, str] = ("", "")
    """The first changed prompt, and its decoded form."""

    @property
    def is_wrong(self) -> bool:
        """Most prompts changed: it is the wrong tokenizer."""
        return 2 * self.num_changed > self.num_prompts

    @property
    def complaint(self) -> str:
        """Human-readable description with a hint."""
        text, back = self.example
        changed = (
            f"the tokenizer of the model changes the prompt {text!r} to {back!r} ({self.num_changed} of "
            f"{self.num_prompts} tested prompts change, {self.num_changed / self.num_prompts:.0%})"
        )
        if self.is_wrong and UNKNOWN in back:
            return (
                f"{changed}: its vocabulary has no tokens for this text; use another model, or data that it can encode"
            )
        if self.is_wrong:
            return (
                f"{changed}: it is not the tokenizer that the model was trained with (check tokenizer_class and "
                "model_type in its config)"
            )
        return f"{changed}: the model sees such prompts in a different form"


def round_trips(texts: Sequence[str], there_and_back: Callable[[str], str]) -> RoundTrips:
    """Encode and decode all texts.

    Args:
        there_and_back: encodes without added special tokens, and decodes with special tokens, which a chat template may
            contain.
    """
    pairs = [(text, there_and_back(text)) for text in texts]
    changed = [pair for pair in pairs if _normalized(pair[0]) != _normalized(pair[1])]
    example = changed[0] if changed else ("", "")
    return RoundTrips(num_prompts=len(texts), num_changed=len(changed), example=example)


def _normalized(text: str) -> str:
    return unicodedata.normalize("NFC", text)
