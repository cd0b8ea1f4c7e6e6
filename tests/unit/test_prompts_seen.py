"""Which prompts of a run have no right response yet."""

from __future__ import annotations

from bapo.metrics.metric import Process
from bapo.telemetry import Telemetry
from bapo.types import Fate, Purpose
from learner.diagnostics.gauges import PromptsSeen


def fate(prompt: str, rewards: tuple[float, ...], purpose: Purpose = Purpose.FRESH) -> Fate:
    return Fate(
        group_id=f"{prompt}-{sum(rewards)}", prompt_id=prompt, purpose=purpose, policy_version=1, rewards=rewards,
        origin=None, reason="", birth=1,
    )  # fmt: skip


def test_a_prompt_is_rescued_once_by_the_request_that_gave_its_first_right_response() -> None:
    telemetry = Telemetry(Process.LEARNER)
    seen = PromptsSeen(telemetry)

    def value(name: str, **labels: str) -> float | None:
        return telemetry.registry.get_sample_value(name, labels)

    seen.count([fate("a", (0, 0)), fate("b", (0, 0)), fate("c", (1, 0))])
    assert value("bapo_prompts_unsolved") == 2
    seen.count([fate("a", (0, 1), Purpose.REEVALUATE), fate("b", (0, 0)), fate("c", (0, 0))])
    assert value("bapo_prompts_unsolved") == 1, "c had a right response before"
    seen.count([fate("a", (1, 1)), fate("b", (1, 0))])
    assert value("bapo_prompts_unsolved") == 0
    assert value("bapo_prompts_rescued_total", purpose="reevaluate") == 1
    assert value("bapo_prompts_rescued_total", purpose="fresh") == 1


def test_records_of_before_a_resume_are_known_but_not_counted_again() -> None:
    telemetry = Telemetry(Process.LEARNER)
    seen = PromptsSeen(telemetry)
    seen.count([fate("a", (0, 0)), fate("a", (1, 0)), fate("b", (0, 0))], is_new=False)
    assert telemetry.registry.get_sample_value("bapo_prompts_unsolved") == 1
    assert telemetry.registry.get_sample_value("bapo_prompts_rescued_total", {"purpose": "fresh"}) == 0
