"""The sums of the learner's peak memory: a line through small models, a GPU, and what the page says. A minute."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config

from benchmarks import one_card
from benchmarks.learner_peak import GIB, PAGE, RANKS, SHAPES, Shape, peak_bytes, traced_bytes


def test_the_peak_is_a_straight_line_in_the_number_of_layers() -> None:
    few, more, most = (traced_bytes(SHAPES[0], layers, 8, recompute=True, tokens=8192) for layers in (2, 4, 10))
    assert few + (more - few) * 4 == pytest.approx(most, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "layers", "width", "mlp", "heads", "measured_gb"),
    [("Qwen3-1.7B", 28, 2048, 6144, 16, 34.84), ("Qwen3-4B", 36, 2560, 9728, 32, 73.8)],
)
def test_a_single_rank_needs_what_an_h200_reported(
    name: str, layers: int, width: int, mlp: int, heads: int, measured_gb: float
) -> None:
    """`torch.cuda.max_memory_allocated` after three updates of up to 8,192 tokens per response, docs/gpus.md. Since
    then the head frees the log-probs of a chunk earlier: 1,024 x 151,936 float32."""
    measured_gb -= 1024 * 151_936 * 4 / 1e9
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": mlp, "num_attention_heads": heads}
    others = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
    shape = Shape(name, Qwen3Config, {**sizes, **others, "max_position_embeddings": 32_768})
    assert peak_bytes(shape, 1) / 1e9 == pytest.approx(measured_gb, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_page_has_the_peak_of_each_model(shape: Shape) -> None:
    [row] = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith(f"| {shape.name} |")]
    found = peak_bytes(shape, RANKS[0]) / GIB
    assert float(row[2]) == pytest.approx(found, abs=0.06), "write it with `python -m benchmarks.learner_peak --write`"
    assert [float(cell) for cell in row[2:6]] == sorted((float(cell) for cell in row[2:6]), reverse=True)


def test_more_activations_are_kept_without_recomputation() -> None:
    """Qwen3-8B keeps about 50 bytes per token, layer and hidden unit, and only the layer's input with it."""
    kept = [
        traced_bytes(SHAPES[0], 4, 8, recompute=recompute, tokens=8192)
        - traced_bytes(SHAPES[0], 2, 8, recompute=recompute, tokens=8192)
        for recompute in (True, False)
    ]
    per_unit = (kept[1] - kept[0]) / 2 / (8192 * 4096)
    assert 40 < per_unit < 60


@pytest.mark.parametrize("name", ["1.7B", "8B"])
def test_the_page_has_what_fits_on_one_card(name: str) -> None:
    [row] = [line.split("|") for line in one_card.PAGE.read_text().splitlines() if line.startswith(f"| Qwen3-{name} |")]
    found = [one_card.learner_gb(name, None), one_card.learner_gb(name, one_card.LORA), one_card.worker_gb(name)]
    again = "write it with `python -m benchmarks.one_card --write`"
    assert [float(cell) for cell in row[2:5]] == pytest.approx(found, abs=0.06), again
