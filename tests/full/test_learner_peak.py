"""The table of the learner's peak memory: a line through small models, and what the page says. 40 s of tracing."""

from __future__ import annotations

import pytest

from benchmarks.learner_peak import GIB, PAGE, RANKS, SHAPES, Shape, peak_bytes, traced_bytes


def test_the_peak_is_a_straight_line_in_the_number_of_layers() -> None:
    few, more, most = (traced_bytes(SHAPES[0], layers, 8, recompute=True, tokens=8192) for layers in (2, 4, 10))
    assert few + (more - few) * 4 == pytest.approx(most, rel=1e-3)


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
