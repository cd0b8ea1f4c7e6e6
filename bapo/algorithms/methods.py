"""What a method's parts have in common: composer, selector, loss and advantage, each one class in one file.

    class MyComposer(Composer):
        class Settings(Composer.Settings):     # its own settings, typed: `algorithm.options`
            share: float = Field(0.5, ge=0)
            '''Fraction of B that is replayed.'''

Named by `algorithm.composer`, `algorithm.selector`, `loss.name` and `loss.advantage`: of the core, of `contrib`, or a
user's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from bapo.algorithms.settings import Frozen
from bapo.core.errors import ConfigError
from bapo.core.plugins import Kind

COMPOSER = Kind(
    what="composer",
    key="algorithm.composer",
    options="algorithm.options",
    package="bapo.algorithms.composers",
    base="bapo.algorithms.composer:Composer",
)
SELECTOR = Kind(
    what="selector",
    key="algorithm.selector",
    options="selector",
    package="bapo.algorithms.selectors",
    base="bapo.algorithms.selectors.base:PromptSelector",
)
LOSS = Kind(
    what="loss",
    key="loss.name",
    options="loss.options",
    package="learner.losses",
    base="learner.losses.base:PolicyLoss",
)
ADVANTAGE = Kind(
    what="advantage",
    key="loss.advantage",
    options="loss.advantage_options",
    package="learner.advantages",
    base="learner.advantages.base:Advantage",
)
KINDS = (COMPOSER, SELECTOR, LOSS, ADVANTAGE)


class MethodSettings(Frozen):
    """The settings of one part of a method in addition to those that all parts of its kind share: by default none."""


class Method:
    """A part of a method."""

    class Settings(MethodSettings):
        """Its own settings."""

    update_hooks: tuple[str, ...] = ()
    """What it adds to the update, each "package.module:Class" of a `learner.update.hooks.UpdateHook`: imported by the
    learner alone."""

    ignores: tuple[str, ...] = ()
    """Settings of the rest of the configuration that change nothing that trains with it, such as "loss.dual_clip": a
    start says so of those that the user wrote."""

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        """What is wrong with the rest of the configuration for it, each with a remedy.

        Args:
            config: a `bapo.config.tree.Config`.
            own: the Settings of this class.
        """
        del config, own
        yield from ()


M = TypeVar("M", bound=MethodSettings)


def own_settings(kind: Kind, settings: type[M], options: Mapping[str, Any]) -> M:
    """The settings of one part from the options of the config. Raises: ConfigError, one line per problem."""
    try:
        return settings.model_validate(options)
    except ValidationError as error:
        lines = (
            f"{'.'.join([kind.options, *map(str, found['loc'])])}: {found['msg'].removeprefix('Value error, ')}"
            for found in error.errors(include_url=False)
        )
        raise ConfigError("\n".join(lines)) from error
