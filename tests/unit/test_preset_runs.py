"""Short real runs of presets (benchmarks/preset_runs.py): their interval by hand, and settings that load."""

from __future__ import annotations

import pytest

from bapo.config.layers import preset_names
from bapo.config.load import load_config
from benchmarks.preset_runs import OWN, SIZES, gain, held_out_gain
from tests.support.synthetic_runs import evaluation_row


def test_the_gain_is_welchs_interval_between_the_first_and_the_last_steps() -> None:
    # Two windows of five 0 and five 1, the second one higher by 1: each variance is 10 (1/2)^2 / 9, so that of the
    # difference 2 (5/18) / 10 = 1/18, with 18 degrees of freedom, of which the 97.5 % quantile is 2.100922.
    found = gain([*[0.0, 1.0] * 5, 9.0, *[1.0, 2.0] * 5], window=10)
    half = 2.100922 * (1 / 18) ** 0.5
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 1 - half, 1 + half), abs=1e-6)


def test_windows_that_share_a_step_are_refused() -> None:
    with pytest.raises(ValueError):
        gain([0.0, 1.0, 0.0], window=2)


def test_the_held_out_gain_is_paired_over_the_problems_of_all_splits() -> None:
    rows = [
        evaluation_row("cd34", 1, {"p": "00", "q": "10"}),
        evaluation_row("cd4", 1, {"r": "11", "only before": "11"}),
        evaluation_row("cd34", 2, {"p": "11", "q": "11"}),  # on the way
        evaluation_row("cd34", 3, {"p": "10", "q": "11"}),
        evaluation_row("cd4", 3, {"r": "11"}),
    ]
    # Changes 1/2, 1/2, 0: mean 1/3, sample variance 1/12, half width 1.959964 sqrt(1/36).
    found = held_out_gain(rows)
    assert (found.mean, found.high) == pytest.approx((1 / 3, 1 / 3 + 1.959964 / 6))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_fits_the_sizes_of_the_short_runs(name: str) -> None:
    settings = {**SIZES, **OWN.get(name, {}), "run.num_steps": 40}
    config = load_config([name], [f"--{key}={value}" for key, value in settings.items()])
    assert (config.algorithm.batch_size, config.learner.lr, config.rollout.max_response_tokens) == (32, 1e-4, 64)
