"""A model of the Hugging Face Hub without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

MODEL = "owner/name"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
REPOSITORY = Path(__file__).resolve().parents[2]


class Hub:
    """A cache folder, and a Hub that writes some files into it."""

    def __init__(self, cache: Path, *, offers: Iterable[str] = ()) -> None:
        self.snapshot = cache / "models--owner--name" / "snapshots" / "abc123"
        self.offers = list(offers)
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def put(self, *names: str) -> None:
        self.snapshot.mkdir(parents=True, exist_ok=True)
        refs = self.snapshot.parents[1] / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text("abc123")
        for name in names:
            shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
            if name == "tokenizer.json":
                shutil.copy(REPOSITORY / "models/countdown-tiny" / name, self.snapshot)
            else:
                (self.snapshot / name).write_text(json.dumps({"weight_map": shards} if "index" in name else {}))

    def download(self, model_id: str, patterns: Iterable[str]) -> str:
        self.asked.append((model_id, tuple(patterns)))
        if not self.offers:
            raise ConnectionError("the Hub cannot be reached\nand more")
        self.put(*self.offers)
        return str(self.snapshot)
