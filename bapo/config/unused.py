"""Settings that a user wrote and that change nothing that trains, each with the reason.

One table for what other settings leave without effect; what a part of the method ignores, it says itself
(`Method.ignores`), so that a user's own part can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

from bapo.algorithms.methods import KINDS
from bapo.config.check import at_source, is_resolved, read_layer, shown
from bapo.config.layers import Layer, dotted, flatten, merge, preset_layers, preset_names
from bapo.config.methods import part_of, value_of
from bapo.config.tree import Config

Predicate = Callable[[Config], bool]


def _only_by_age(config: Config) -> bool:
    """Whether thresholds decide nothing; a window that holds 0 or 1 lets groups into B_high that displace others."""
    algorithm = config.algorithm
    return algorithm.x3_policy == "youngest" and algorithm.c2_range[0] > 0 and algorithm.c3_range[1] < 1


def _against_the_group(config: Config) -> bool:
    """A single row of a pool has no mean to subtract."""
    return config.loss.advantage == "group" and config.loss.advantage_pool != "split"


def _divided(config: Config) -> bool:
    shaping = config.shaping
    adds_nothing = shaping.overlong_cache is None and not shaping.length_weight
    return _against_the_group(config) and config.loss.advantage_norm != "center" and adds_nothing


WITHOUT_EFFECT: tuple[tuple[str, Predicate, str], ...] = (
    ("loss.kl_estimator", lambda c: c.loss.kl_coef == 0, "loss.kl_coef is 0, so the KL is only recorded"),
    ("loss.kl_ref", lambda c: c.loss.kl_coef == 0, "loss.kl_coef is 0"),
    (
        "loss.importance_level",
        lambda c: c.loss.ratio_mode == "direct" and c.loss.importance_level == "token",
        "with loss.ratio_mode = direct the ratio is the full correction; set ratio_mode = decoupled",
    ),
    (
        "loss.importance_cap",
        lambda c: c.loss.ratio_mode == "direct",
        "with loss.ratio_mode = direct the ratio is the full correction; set ratio_mode = decoupled",
    ),
    ("loss.importance_cap", lambda c: c.loss.importance_level == "none", "loss.importance_level is none"),
    ("shaping.shift", _against_the_group, "advantages are rewards less the mean of their group"),
    ("shaping.scale", _divided, "loss.advantage_norm divides advantages by the deviation of the rewards"),
    ("shaping.overlong_factor", lambda c: c.shaping.overlong_cache is None, "shaping.overlong_cache is null"),
    ("shaping.length_warmup_steps", lambda c: c.shaping.length_weight == 0, "shaping.length_weight is 0"),
    *(
        (f"algorithm.{key}", lambda c: c.algorithm.online_filter != "gaussian", "algorithm.online_filter is another")
        for key in ("gaussian_center", "gaussian_width")
    ),
    ("algorithm.uniform_share", lambda c: c.algorithm.online_filter != "uniform", "algorithm.online_filter is another"),
    *(
        (f"algorithm.{key}", _only_by_age, "algorithm.x3_policy = youngest takes informative groups by age")
        for key in ("threshold_schedule", "c2_range", "c3_range", "drop_zero_variance_x3", "x3_exactly_half")
    ),
    ("learner.epochs_until", lambda c: c.learner.epochs == 1, "learner.epochs is 1"),
    ("learner.lr_final", lambda c: c.learner.lr_schedule == "constant", "learner.lr_schedule is constant"),
)
"""Setting, when it changes nothing that trains, and why."""

STILL_READ: dict[str, Predicate] = {
    "algorithm.max_rounds": lambda c: c.algorithm.selector != "uniform",  # which proposes for all rounds
}
"""Setting that a part ignores -> when another part reads it."""


def unused_settings(config: Config, layers: Sequence[Layer]) -> list[str]:
    """One line per setting of the user's layers that changes nothing that trains.

    Args:
        layers: of the user, without the presets beneath them.
    """
    written = {
        dotted(key): (layer.source, value)
        for layer in layers
        if not is_resolved(layer)
        for key, value in flatten(read_layer(layer)[0])
    }
    reasons = dict(_reasons(config))
    beneath = [line for layer in layers if is_resolved(layer) for line in _over_its_preset(layer)]
    return beneath + [
        at_source(source, f"{key} = {shown(value)} changes nothing that trains: {reasons[key]}")
        for key, (source, value) in written.items()
        if key in reasons and value not in (None, False)  # which ask for nothing
    ]


def _reasons(config: Config) -> Iterator[tuple[str, str]]:
    for key, has_none, why in WITHOUT_EFFECT:
        if has_none(config):
            yield key, why
    for kind in KINDS:
        if kind.is_installed:
            for key in part_of(kind, config)[0].ignores:
                if key not in STILL_READ or not STILL_READ[key](config):
                    yield key, f"{kind.key} = {value_of(config, kind.key)} does not use it"


def _over_its_preset(layer: Layer) -> Iterator[str]:
    """What a file that has every key leaves of its own `preset`, which may have been edited."""
    if (preset := layer.values.get("preset")) in preset_names():
        own = dict(flatten(layer.values))
        set_by_it = flatten(reduce(merge, preset_layers(preset), {}))
        if other := [dotted(key) for key, value in set_by_it if key != ("preset",) and own.get(key, value) != value]:
            what = f'it has every key, so that preset = "{preset}" sets none; other than there: {", ".join(other)}'
            yield at_source(layer.source, what)
