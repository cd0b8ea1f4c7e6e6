"""What must be the same for all methods of a study, or of runs that are compared: else a difference is no finding.

Base model, training data and its order, number of learner steps, how a batch is cut, sampling, and how it is measured.
Not here: the learning rate, the cadence, the loss: they are what methods are made of, and reports show how they differ.
Nor the number of optimizer updates, which follows from how full batches are: reports count it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bapo.config.check import known_keys, shown
from bapo.config.layers import dotted, flatten
from bapo.config.tree import Config
from bapo.core.errors import did_you_mean

MUST_AGREE = {
    "model": "the base model",
    "task": "the problems and the reward",
    "run.num_steps": "the number of learner steps",
    "algorithm.batch_size": "prompts per step, and with them the data order",
    "algorithm.group_size": "responses per prompt",
    "learner.minibatch_size": "groups per optimizer update",
    "learner.epochs": "passes over each batch",
    "rollout.temperature": "sampling",
    "rollout.top_p": "sampling",
    "rollout.max_prompt_tokens": "sampling",
    "rollout.max_response_tokens": "sampling",
    "evaluation": "how it is measured",
}
"""Section or key -> why."""
NOT_MEASUREMENT = ("evaluation.port",)


def must_agree(config: Config) -> dict[str, tuple[object, str]]:
    """Dotted key -> (its value, what it fixes), for every setting that all methods share."""
    found: dict[str, tuple[object, str]] = {}
    for key, value in flatten(config.model_dump()):
        name = dotted(key)
        parts = (part for part in MUST_AGREE if name == part or name.startswith(f"{part}."))
        for part in parts:
            if name not in NOT_MEASUREMENT:
                found[name] = (value, MUST_AGREE[part])
    return found


def unfair_differences(configs: Mapping[str, Config], may_differ: Mapping[str, Sequence[str]]) -> list[str]:
    """One line per setting in which a method differs from the first one, though it should not.

    Args:
        configs: method -> its configuration, all at the same place of their seeds.
        may_differ: method -> settings that are excepted for it.
    """
    if not configs:
        return []
    (first, reference), *others = [(name, must_agree(config)) for name, config in configs.items()]
    problems = []
    for name, settings in others:
        for key in dict.fromkeys([*reference, *settings]):
            value, wanted = _value(settings, key), _value(reference, key)
            excepted = (*may_differ.get(name, ()), *may_differ.get(first, ()))
            if value != wanted and not any(key == part or key.startswith(f"{part}.") for part in excepted):
                why = (reference.get(key) or settings[key])[1]
                problems.append(
                    f"methods.{name}: {key} = {_shown(value)}, but {_shown(wanted)} in methods.{first}: {why} must be "
                    f'the same for all; make it so, or write may_differ = ["{key}"] in [methods.{name}]'
                )
    return problems


def unknown_exceptions(may_differ: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """One line per excepted key that is none of those which must agree."""
    for name, keys in may_differ.items():
        for key in keys:
            if not any(key == part or key.startswith(f"{part}.") for part in MUST_AGREE):
                hint = did_you_mean(key, [*MUST_AGREE, *known_keys()])
                yield f"methods.{name}.may_differ: {key} need not agree between methods{hint}"


_ABSENT = object()


def _value(settings: Mapping[str, tuple[object, str]], key: str) -> object:
    return settings[key][0] if key in settings else _ABSENT


def _shown(value: object) -> str:
    return "not set" if value is _ABSENT else shown(value)
