"""The learning rate of each step."""

import pytest

from bapo.config.learner import LearnerConfig
from learner.update.update import lr_at


def _rates(num_steps: int, **settings: object) -> list[float]:
    config = LearnerConfig.model_validate({"lr": 1.0, "warmup_steps": 2, "minibatch_size": 1, **settings})
    return [round(lr_at(config, step, num_steps), 3) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_schedule": "linear"}, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"lr_schedule": "linear", "lr_final": 0.2}, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "cosine"}, [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]),  # (1 + cos(pi/4)) / 2 = 0.854
        ({"warmup_steps": 0, "lr_schedule": "linear"}, [0.833, 0.667, 0.5, 0.333, 0.167, 0.0]),
        ({"warmup_steps": 9, "lr_schedule": "cosine"}, [0.111, 0.222, 0.333, 0.444, 0.556, 0.667]),
    ],
)
def test_it_rises_to_the_peak_and_falls_as_the_schedule_says(settings: dict[str, object], want: list[float]) -> None:
    assert _rates(6, **settings) == want


def test_steps_behind_the_last_one_keep_its_rate() -> None:
    config = LearnerConfig.model_validate({"lr": 1.0, "warmup_steps": 0, "lr_schedule": "linear", "lr_final": 0.1})
    assert lr_at(config, 50, 6) == pytest.approx(0.1)
