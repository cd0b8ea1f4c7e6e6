"""The files of a model: in a folder, or in the local Hugging Face cache, into which a Hub id is fetched once.

A model is present when its weights are: a tokenizer that was loaded by itself leaves config.json in the cache.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo.core.errors import ConfigError

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Weights in safetensors alone, configuration, tokenizer: models often come with the same weights in other formats."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(path: str) -> bool:
    """Whether `model.path` can be one. `models/tiny` looks like it; where a folder `models` is, it is a slip."""
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).is_dir() and not Path(path).parent.is_dir()


def folder_of(path: str) -> Path | None:
    """Where the files of `model.path` lie on this machine, complete or not; None: nowhere."""
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
    """All that are there, sorted."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def num_parameters(folder: Path) -> int | None:
    """Numbers in the weights, from the headers of their safetensors files; None without any, or with a damaged one."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        return sum(map(_num_in, files)) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _num_in(file: Path) -> int:
    """Eight bytes say how long the header is, which has name -> {dtype, shape, data_offsets}."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(opened.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def missing_parts(folder: Path) -> list[str]:
    """What is missing of a model, in words: its configuration, its weights, some files of them."""
    missing = [] if (folder / CONFIG).is_file() else [CONFIG]
    index = folder / INDEX
    if index.is_file():
        needed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        lacking = [name for name in needed if not (folder / name).is_file()]
        if lacking:
            missing.append(f"{lacking[0]} ({len(lacking)} of {len(needed)} files of weights)")
    elif not weight_files(folder):
        missing.append("weights")
    return missing


def fetch(model_id: str, download: Callable[[str, Iterable[str]], str] | None = None) -> Path:
    """The folder of a Hub id with all that a run needs, downloaded where it is not in the cache yet.

    Args:
        download: (id, patterns of the files) -> folder; the default shows its progress.
    Raises: ConfigError that says what is missing, and the command that brings it.
    """
    folder = folder_of(model_id)
    if folder is not None and not missing_parts(folder):
        return folder
    try:
        folder = Path((download or _snapshot)(model_id, WANTED))
    except Exception as error:  # the Hub's client raises errors of its own and those of its HTTP library
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError(f"model.path: {model_id} could not be fetched: {reason}; {how_to_fetch(model_id)}") from error
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
    """How many prompts a tokenizer changes: for some model types transformers silently builds another tokenizer.

    Compared in NFC, because a tokenizer may normalize (those of Qwen do).
    """

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
        """What changed, for people, with what to inspect."""
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
    changed = [pair for pair in pairs if _normalized(pair[0]) != _normalized(pair[1])]
    example = changed[0] if changed else ("", "")
    return RoundTrips(num_prompts=len(texts), num_changed=len(changed), example=example)


def _normalized(text: str) -> str:
    return unicodedata.normalize("NFC", text)
