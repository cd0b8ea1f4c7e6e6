"""The curves that pages and figures draw."""

from __future__ import annotations

from bapo.analysis.run_records import held_out_curves
from tests.unit.test_launcher_display import make_evaluation


def test_held_out_curves_are_one_per_split_in_order_of_steps() -> None:
    rows = [make_evaluation("a", 5, 0.5), make_evaluation("b", 1, 0.1), make_evaluation("a", 1, 0.25)]
    first, second = held_out_curves(rows)
    assert (first.name, first.steps, first.values) == ("a", [0, 4], [0.25, 0.5])
    assert (second.name, second.low, second.high) == ("b", [0.1 - 0.02], [0.1 + 0.02])


def test_a_held_out_curve_compares_the_same_prompts() -> None:
    """The base was measured on three prompts, later versions on two: .5 on those two, not 2/3."""
    base = make_evaluation("a", 1, 2 / 3, rewards={"p": [1.0, 0.0], "q": [0.0, 1.0], "r": [1.0, 1.0]})
    later = make_evaluation("a", 5, 0.75, rewards={"p": [1.0, 1.0], "q": [0.0, 1.0]})
    (curve,) = held_out_curves([base, later])
    assert (curve.values, curve.num_prompts) == ([0.5, 0.75], 2)
    assert curve.low[0] < 0.5 < curve.high[0]
