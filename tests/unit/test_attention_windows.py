"""Attention windows that are shorter than a sequence: found in config.json as transformers builds them, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from services.launcher.doctor.attention_windows import shortest_window, window_of
from services.launcher.doctor.check_list import preflight
from services.launcher.doctor.checks import model_files
from services.launcher.doctor.situation import Situation
from tests.support.launcher_config import make_config

FULL, SLIDING = "full_attention", "sliding_attention"
QWEN = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 64}


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 64),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": 64, "use_sliding_window": False}, 64),
        ({"model_type": "mistral", "sliding_window": 64, "layer_types": [FULL] * 4}, 64),
        ({"model_type": "llama", "max_position_embeddings": 64}, None),
        (QWEN, None),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 2}, 64),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 4}, None),
        (QWEN | {"use_sliding_window": True}, None),
        (QWEN | {"use_sliding_window": True, "layer_types": [FULL, SLIDING] * 2}, 64),
        (QWEN | {"use_sliding_window": False, "layer_types": [FULL, SLIDING] * 2}, None),
        (QWEN | {"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 4}, 64),
        ({"model_type": "gemma3", "text_config": {"sliding_window": 64, "layer_types": [FULL, SLIDING]}}, 64),
        ({"model_type": "gemma3", "text_config": {"sliding_window": 64, "layer_types": [FULL]}}, None),
        ({"model_type": "gemma3", "text_config": {}}, 4096),
        ({"model_type": "qwen2_5_vl", "text_config": {"sliding_window": 64, "use_sliding_window": False}}, None),
        (
            {"model_type": "llama4", "text_config": {"attention_chunk_size": 32, "layer_types": ["chunked_attention"]}},
            32,
        ),
        ({"model_type": "phi3", "sliding_window": 64}, 64),
        ({"model_type": "of_the_future", "sliding_window": 64}, 64),
    ],
)
def test_the_window_of_a_config(values: dict[str, Any], window: int | None) -> None:
    assert window_of(values) == window


TRANSFORMERS: list[dict[str, Any]] = [
    {"model_type": "mistral", "sliding_window": 64},
    {"model_type": "mistral"},
    {"model_type": "mistral", "sliding_window": 64, "use_sliding_window": False, "layer_types": [FULL] * 4},
    {"model_type": "mixtral", "sliding_window": 64, "num_local_experts": 2},
    {"model_type": "phi3", "sliding_window": 64},
    {"model_type": "starcoder2", "sliding_window": 64},
    {"model_type": "llama"},
    QWEN,
    QWEN | {"use_sliding_window": True, "max_window_layers": 2},
    QWEN | {"use_sliding_window": True},
    QWEN | {"use_sliding_window": True, "layer_types": [FULL, SLIDING] * 2},
    QWEN | {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 3},
    {"model_type": "gemma3_text", "sliding_window": 64},
    {"model_type": "gemma3_text", "sliding_window": 64, "layer_types": [FULL] * 4},
    {"model_type": "olmo3", "sliding_window": 64},
]


@pytest.mark.parametrize("values", TRANSFORMERS, ids=lambda values: f"{values['model_type']}-{len(values)}")
def test_it_is_what_the_layers_of_transformers_pass_to_the_attention(values: dict[str, Any]) -> None:
    import torch
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    seen: list[int] = []

    def attention(module: Any, query: Any, key: Any, value: Any, *_: Any, **options: Any) -> tuple[Any, None]:
        if options.get("sliding_window"):
            seen.append(options["sliding_window"])
        return query.transpose(1, 2), None

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2}  # fmt: skip
    AttentionInterface.register("recording", attention)
    settings = AutoConfig.for_model(**{**sizes, **values})
    settings._attn_implementation = "recording"
    with torch.no_grad():
        AutoModelForCausalLM.from_config(settings)(torch.tensor([[1, 2, 3]]), use_cache=False)
    assert window_of({**sizes, **values}) == min(seen, default=None)


def _with_model(tmp_path: Path, **values: Any) -> Config:
    """A configuration whose model has this config.json, with 32 and 64 tokens."""
    config = make_config(tmp_path, rollout={"port": 0, "max_prompt_tokens": 32, "max_response_tokens": 64})
    Path(config.model.path, "config.json").write_text(json.dumps(values))
    return config


def test_a_window_shorter_than_a_sequence_is_refused_with_both_numbers(tmp_path: Path) -> None:
    config = _with_model(tmp_path, model_type="mistral", sliding_window=64)
    with pytest.raises(ConfigError, match=r"window of 64 tokens.*96"):
        preflight(Situation(config=config))


@pytest.mark.parametrize(("window", "status"), [(95, "ok"), (94, "fail"), (96, "ok")])
def test_a_window_of_all_tokens_that_the_model_reads_is_no_window(tmp_path: Path, window: int, status: str) -> None:
    config = _with_model(tmp_path, model_type="mistral", sliding_window=window)
    assert model_files(config).status == status  # the last of 96 tokens is sampled and not read


def test_nothing_is_known_of_a_folder_without_a_readable_config(tmp_path: Path) -> None:
    assert shortest_window(tmp_path) is None
    (tmp_path / "config.json").write_text("[1]")
    assert shortest_window(tmp_path) is None


def test_the_learner_refuses_the_window_of_a_layer_when_it_loads_the_model(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from learner.model.backbone import attention
    from learner.model.policy import Policy, check_head

    values = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32, "sliding_window": 64}  # fmt: skip
    settings = AutoConfig.for_model("mistral", **values)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation=attention(settings)).eval()
    check_head(Policy(model), tmp_path, longest=64)
    with pytest.raises(ConfigError, match=r"64 tokens.*65"):
        check_head(Policy(model), tmp_path, longest=65)
