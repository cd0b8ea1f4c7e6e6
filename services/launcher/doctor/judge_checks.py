"""What judges that compare can measure: of held-out data nothing."""

from __future__ import annotations

from collections.abc import Iterator

from bapo.config.rewards import JUDGE, OWN
from bapo.core.errors import ConfigError
from bapo.tasks.judging import read_rubric
from services.launcher.doctor.checks import Check
from services.launcher.doctor.situation import Situation


def judges(situation: Situation) -> Iterator[Check]:
    """Comparisons within a group are won by half of its responses, whatever the model has learned."""
    config = situation.config
    names = [str(config.task.options.get("reward")) if name == OWN else name for name in config.task.reward_functions]
    if not names or not all(name.startswith(JUDGE) for name in names):
        return
    try:
        if any(read_rubric(name.removeprefix(JUDGE)).mode != "pairwise" for name in names):
            return
    except ConfigError:
        return  # `gold_answers` loads it, and says what is wrong
    chooses = [
        key
        for key, is_set in (
            ("checkpoint.keep_best", config.checkpoint.keep_best > 0),
            ("evaluation.patience", config.evaluation.patience is not None),
        )
        if is_set
    ]
    what = "a pairwise judge gives every held-out prompt a mean reward of 1/2, before and after training"
    advice = f"remove {chooses[0]}, which would choose by chance" if chooses else "measure with another reward"
    yield Check(name="judges", status="fail" if chooses else "warn", detail=f"task.reward: {what}; {advice}")
