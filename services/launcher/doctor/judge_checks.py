"""What judges that compare can measure: of held-out data nothing."""

from __future__ import annotations

from collections.abc import Iterator

from bapo.core.errors import ConfigError
from bapo.tasks.judging import read_rubric
from services.launcher.doctor.checks import Check
from services.launcher.doctor.situation import Situation


def judges(situation: Situation) -> Iterator[Check]:
    """Comparisons within a group are won by half of its responses, whatever the model has learned."""
    config = situation.config
    rubrics = [config.task.rubric_of(function) for function in config.task.reward_functions]
    try:
        if not rubrics or any(path is None or read_rubric(path).mode != "pairwise" for path in rubrics):
            return
    except ConfigError:
        return  # `gold_answers` loads it, and says what is wrong
    chooses = config.choose_by_measurement
    what = "a pairwise judge gives every held-out prompt a mean reward of 1/2, before and after training"
    advice = f"remove {chooses[0]}, which would choose by chance" if chooses else "measure with another reward"
    yield Check(name="judges", status="fail" if chooses else "warn", detail=f"task.reward: {what}; {advice}")
