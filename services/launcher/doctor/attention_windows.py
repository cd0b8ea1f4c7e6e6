"""The shortest attention window of a model, from its config.json: without importing transformers, which takes seconds.

A model with a window attends to the last tokens only. The learner's attention is over whole sequences, so windows must
not be shorter than a sequence. tests/unit/test_attention_windows.py compares with what transformers builds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo.runtime.model_files import CONFIG

WINDOW, CHUNK, SWITCH = "sliding_window", "attention_chunk_size", "use_sliding_window"
DEFAULTS: Mapping[str, int] = {
    "afmoe": 1024, "cohere2": 4096, "cohere2_moe": 4096, "cwm": 8192, "dots1": 4096, "exaone4": 4096,
    "exaone_moe": 4096, "gemma2": 4096, "gemma3_text": 4096, "gemma3n_text": 512, "gemma4_text": 512, "gpt_oss": 128,
    "granite_swa": 128, "granitemoe_swa": 128, "mimo_v2_flash": 128, "ministral": 4096, "mistral": 4096,
    "modernbert-decoder": 64, "moshi": 3000, "olmo3": 4096, "qwen2": 4096, "qwen2_moe": 4096, "qwen2_vl_text": 4096,
    "qwen2_5_vl_text": 4096, "qwen3": 4096, "qwen3_moe": 4096, "vaultgemma": 4096,
}  # fmt: skip
"""`sliding_window` of model types whose config.json does not say it, in tokens."""
DEFAULT_CHUNKS: Mapping[str, int] = {"llama4_text": 8192}
OFF_UNLESS_SWITCHED_ON = frozenset(
    {"qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "smollm3"}
)
"""Types with `use_sliding_window`, which is false by default."""
IGNORES_SWITCH = frozenset({"ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
"""Types that slide whenever `sliding_window` is set, in all layers, whatever else their config.json says."""
FIRST_SLIDING = "max_window_layers"
"""The layers from this one on slide."""
DEFAULT_FIRST_SLIDING: Mapping[str, int] = {
    "dots1": 62, "qwen2": 28, "qwen2_vl_text": 80, "qwen2_5_vl_text": 80, "qwen3": 28
}  # fmt: skip
HAS_NO_FIRST_SLIDING = frozenset({"qwen2_moe", "qwen3_moe", "smollm3"})
LOCAL = frozenset({"sliding_attention", "chunked_attention", "hybrid_sliding"})


def shortest_window(folder: Path) -> int | None:
    """Tokens that a layer with a window attends to; None: all layers attend to everything, or nothing is known."""
    try:
        values = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    return window_of(values) if isinstance(values, dict) else None


def window_of(values: Mapping[str, Any]) -> int | None:
    """The same of the content of a config.json."""
    text = values.get("text_config")
    # A nested config may leave its type to the outer one: that of qwen2_5_vl is qwen2_5_vl_text.
    text = {"model_type": f"{values.get('model_type')}_text", **text} if isinstance(text, dict) else values
    found = [size for size in (_window(text), _chunk(text)) if isinstance(size, int) and size > 0]
    return min(found, default=None)


def _window(text: Mapping[str, Any]) -> Any:
    kind = text.get("model_type")
    window = text.get(WINDOW, DEFAULTS.get(str(kind)))
    if window is None or kind in IGNORES_SWITCH:
        return window
    if not text.get(SWITCH, kind not in OFF_UNLESS_SWITCHED_ON) or not _has_local_layers(text):
        return None
    return window


def _chunk(text: Mapping[str, Any]) -> Any:
    """Llama 4's layers attend within chunks."""
    chunk = text.get(CHUNK, DEFAULT_CHUNKS.get(str(text.get("model_type"))))
    return chunk if _has_local_layers(text) else None


def _has_local_layers(text: Mapping[str, Any]) -> bool:
    kind, kinds = str(text.get("model_type")), text.get("layer_types")
    if isinstance(kinds, list):
        return not LOCAL.isdisjoint(map(str, kinds))
    num_layers, first = text.get("num_hidden_layers"), text.get(FIRST_SLIDING, DEFAULT_FIRST_SLIDING.get(kind))
    if isinstance(first, int) and isinstance(num_layers, int) and kind not in HAS_NO_FIRST_SLIDING:
        return first < num_layers
    return True
