"""A model of the Hub is fetched once, before anything starts, and is there when its weights are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.model_files import WANTED, context_length, fetch, folder_of, is_hub_id, missing_parts, num_parameters
from services.launcher.doctor.check_list import preflight
from services.launcher.doctor.checks import model_files
from services.launcher.doctor.situation import Situation
from tests.support.hub import MODEL, TOKENIZER, Hub
from tests.support.launcher_config import make_config


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def config_of_hub_model(tmp_path: Path) -> Config:
    return make_config(tmp_path, model={"path": MODEL})


def test_a_model_is_fetched_at_the_first_start_and_not_at_the_second(cache: Path, tmp_path: Path) -> None:
    hub, config = Hub(cache, offers=["config.json", "model.safetensors", *TOKENIZER]), config_of_hub_model(tmp_path)
    before = model_files(config)
    assert (before.status, "is not in the Hugging Face cache; the first start downloads it" in before.detail) == (
        "warn",
        True,
    )
    preflight(Situation(config=config), download=hub.download)
    preflight(Situation(config=config), download=hub.download)
    assert hub.asked == [(MODEL, WANTED)]
    after = model_files(config)
    assert (after.status, after.detail) == ("ok", "owner/name, cached, 0.0 MB of weights")


def test_a_cache_with_a_configuration_and_no_weights_is_not_a_cached_model(cache: Path, tmp_path: Path) -> None:
    hub, config = Hub(cache, offers=["config.json", "model.safetensors", *TOKENIZER]), config_of_hub_model(tmp_path)
    hub.put("config.json", "tokenizer_config.json")
    check = model_files(config)
    assert (check.status, "owner/name has no weights in the Hugging Face cache" in check.detail) == ("warn", True)
    preflight(Situation(config=config), download=hub.download)
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ('{"max_position_embeddings": 300}', 300),
        ('{"text_config": {"max_position_embeddings": 300}}', 300),
        ('{"max_position_embeddings": 300, "rope_scaling": {"rope_type": "yarn", "factor": 4}}', 300),
        ('{"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 3.0}}', 300),
        ('{"max_position_embeddings": 300, "rope_parameters": {"rope_type": "default"}}', 300),
        ('{"n_positions": 300}', 300),
        ('{"max_position_embeddings": 300, "rope_scaling": {"rope_type": "dynamic"}}', None),
        ("{}", None),
    ],
)
def test_lengths_beyond_the_context_of_a_model_are_refused(tmp_path: Path, text: str, context: int | None) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert context_length(tmp_path) == context
    lengths = {"max_prompt_tokens": 100, "max_response_tokens": 201}
    check = model_files(make_config(tmp_path, model={"path": str(tmp_path)}, rollout=lengths))
    assert (check.status, "= 301, but" in check.detail) == (("fail", True) if context else ("ok", False))


def test_a_cache_that_lacks_one_of_two_files_of_weights_is_completed(cache: Path) -> None:
    hub = Hub(cache, offers=["config.json", "model-2.safetensors"])
    hub.put("config.json", "model.safetensors.index.json", "model-1.safetensors")
    assert missing_parts(hub.snapshot) == ["model-2.safetensors (1 of 2 files of weights)"]
    assert fetch(MODEL, hub.download) == hub.snapshot
    assert missing_parts(hub.snapshot) == []


def test_without_a_network_and_a_cache_the_command_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf download owner/name"):
        preflight(Situation(config=config_of_hub_model(tmp_path)), download=Hub(cache).download)


def test_a_model_without_safetensors_is_refused_after_the_download(cache: Path) -> None:
    with pytest.raises(ConfigError, match="hf download owner/name"):
        fetch(MODEL, Hub(cache, offers=["config.json"]).download)


def test_a_folder_is_no_hub_id_and_is_never_fetched(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert folder_of(str(tmp_path / "model")) == tmp_path / "model"
    assert [is_hub_id(name) for name in (str(tmp_path / "model"), "models/no-such-model", "/a/b", MODEL)] == [
        False, False, False, True,
    ]  # fmt: skip
    assert folder_of("/nowhere/model") is None


def test_parameters_are_counted_from_the_headers_of_all_files(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"c": np.zeros((2, 2), np.float32)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert num_parameters(tmp_path) == 15 + 7 + 4
    (tmp_path / "model-3.safetensors").write_bytes(b"weights that are none")
    assert num_parameters(tmp_path) is None
    assert num_parameters(tmp_path / "nowhere") is None
