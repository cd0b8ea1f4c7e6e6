"""A model of the Hub is fetched once, before anything starts, and is there when its weights are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from services.launcher.doctor.checks import preflight
from tests.unit.test_launcher_checks import make_config

MODEL = "owner/name"


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
            (self.snapshot / name).write_text(json.dumps({"weight_map": shards} if "index" in name else {}))

    def download(self, model_id: str, patterns: Iterable[str]) -> str:
        self.asked.append((model_id, tuple(patterns)))
        if not self.offers:
            raise ConnectionError("the Hub cannot be reached\nand more")
        self.put(*self.offers)
        return str(self.snapshot)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_nothing_is_fetched_while_something_else_is_wrong(cache: Path, tmp_path: Path) -> None:
    hub = Hub(cache, offers=["config.json", "model.safetensors"])
    config = make_config(tmp_path, model={"path": MODEL}, buffer={"port": 0, "redis_url": "redis://127.0.0.1:1/0"})
    with pytest.raises(Exception, match="no Redis answers"):
        preflight(config, download=hub.download)
    assert hub.asked == []
