"""The paper's own numbers, as `--paper` shows them, against what can be recomputed from its tables (V21)."""

from __future__ import annotations

import pytest

from bapo.comparison.published import published
from bapo.config.load import load_config
from tests.vectors import vector

GAINS = vector("V21.gains_rel_pct")
SECTIONS = {"math": "math", "plan15": "planning", "plan7": "planning_7b", "vis3": "vision", "vis7": "vision_7b"}
"""Name in the vectors -> section of published.toml, in the order of the paper's tables."""


def number(section: str, method: str, what: str = "accuracy") -> float:
    return float(published()[section][method][what])


def gain(section: str, method: str = "bapo", over: str = "grpo") -> float:
    """Relative, in percent."""
    return 100 * (number(section, method) / number(section, over) - 1)


@pytest.mark.parametrize("key", ["math", "plan15", "plan7", "vis3", "vis7"])
def test_what_bapo_gains_over_grpo_on_each_task(key: str) -> None:
    assert gain(SECTIONS[key]) == pytest.approx(GAINS[key], abs=1e-5)


def test_no_mean_of_the_gains_is_the_papers_twelve_and_a_half_percent() -> None:
    gains = [gain(section) for section in SECTIONS.values()]
    small = [gains[0], gains[1], gains[3]]
    assert sum(small) / 3 == pytest.approx(GAINS["mean3"], abs=1e-5)
    assert sum(gains) / 5 == pytest.approx(GAINS["mean5"], abs=1e-5)
    points = [number(section, "bapo") - number(section, "grpo") for section in SECTIONS.values()]
    assert sum(points) / 5 == pytest.approx(GAINS["mean_abs5"], abs=1e-9)
    assert abs(GAINS["mean3"] - 12.5) > 0.5 < abs(GAINS["mean5"] - 12.5)


@pytest.mark.parametrize(
    ("key", "section", "method"),
    [
        ("woX2_plan", "planning", "bapo_without_x2"),
        ("woX2_vis", "vision", "bapo_without_x2"),
        ("woX3_plan", "planning", "bapo_without_x3"),
        ("woX3_vis", "vision", "bapo_without_x3"),
    ],
)
def test_what_the_ablations_lose(key: str, section: str, method: str) -> None:
    assert gain(section, method, "bapo") == pytest.approx(GAINS[key], abs=1e-5)


@pytest.mark.parametrize(
    ("key", "method", "over"),
    [("dapo_over_bapo", "dapo", "bapo"), ("dapo_over_grpo", "dapo", "grpo"), ("bapo_over_grpo", "bapo", "grpo")],
)
def test_ratios_of_rollouts(key: str, method: str, over: str) -> None:
    found = number("math", method, "rollouts") / number("math", over, "rollouts")
    assert found == pytest.approx(GAINS[key], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("base", "base"), ("GRPO", "grpo"), ("DAPO", "dapo"), ("MoPPS", "mopps"), ("GRPOv5", "grpo_v5"),
        ("RePO", "repo"), ("Remix", "remix"), ("BAPO", "bapo"),
    ],
)  # fmt: skip
def test_averages_are_those_of_the_rows_also_where_the_printed_one_is_not(name: str, method: str) -> None:
    recomputed, printed, apart = vector("V21.table1_avg_recomputed")[name]
    assert number("math", method) == pytest.approx(recomputed, abs=0.005)
    assert recomputed - printed == pytest.approx(apart)
    assert (abs(apart) > 0.1) == (name in {"base", "GRPOv5"}), "the two averages that the paper misprints"


@pytest.mark.parametrize("method", ["dapo", "bapo"])
@pytest.mark.parametrize(("key", "section"), [("math", "math"), ("plan", "planning"), ("vis", "vision")])
def test_ratios_of_training_time(key: str, section: str, method: str) -> None:
    found = number(section, method, "time") / number(section, "grpo", "time")
    assert found == pytest.approx(vector("V21.time_ratio_vs_grpo")[key][method], abs=1e-6)


def test_the_extra_rollouts_of_bapo_fit_table_3s_m_and_m_and_not_three_epochs() -> None:
    want, config = vector("V21.rollouts"), load_config(["bapo"], [])
    algorithm = config.algorithm
    per_step = algorithm.batch_size * algorithm.group_size
    steps = 1000 * number("math", "grpo", "rollouts") / per_step
    assert per_step == want["per_step"]
    assert steps == pytest.approx(want["steps_677k"], abs=1e-6)
    assert config.run.num_steps == want["steps_3epochs"] > steps
    assert config.run.num_steps * per_step == want["rollouts_3epochs"]
    rounds = round(steps) // config.cadence.m
    extra = 1000 * (number("math", "bapo", "rollouts") - number("math", "grpo", "rollouts"))
    assert (rounds, extra) == (want["reevals_331"], want["extra_bapo"])
    assert rounds * algorithm.max_reevaluated * algorithm.group_size == want["max_extra"] > extra
    assert extra / rounds / algorithm.group_size == pytest.approx(want["mean_prompts_per_reeval"], abs=1e-6)
