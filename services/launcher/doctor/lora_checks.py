"""What a run with `model.lora` trains, sends and keeps, compared with full training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.lora import adapter_shapes
from bapo.runtime.machine import learner_bytes, trained_bytes, update_bytes
from bapo.runtime.peft_config import check_peft_config
from services.launcher.doctor.checks import Check, parameters_of

LOW_LR = 1e-5
"""Adapters need about ten times the rate of full training, which is 1e-6 in most configurations (docs/lora.md)."""
MIB = 1 << 20


def lora(config: Config) -> Iterator[Check]:
    """Layers, parameters, bytes of an update and of a checkpoint, memory, and the learning rate."""
    settings, parameters = config.model.lora, parameters_of(config)
    if settings is None or parameters is None:
        return
    try:
        shapes = adapter_shapes(config.model.path, settings)
    except (ConfigError, OSError, ValueError) as error:
        yield Check(name="LoRA", status="fail", detail=str(error))
        return
    layers = {name.rpartition(".")[0] for name in shapes}
    if config.model.adapter is not None:
        try:
            check_peft_config(Path(config.model.adapter), settings)
        except ConfigError as error:
            yield Check(name="LoRA", status="fail", detail=str(error))
    trained = sum(math.prod(shape) for shape in shapes.values())
    yield Check(
        name="LoRA",
        status="ok",
        detail=(
            f"rank {settings.rank}, scale {settings.scale:g}: trains {trained / 1e6:,.2f} M parameters "
            f"({trained / parameters:.1%}) in {len(layers)} layers; {_beside_full(config, parameters)}"
        ),
    )
    if config.learner.lr < LOW_LR:
        yield Check(
            name="LoRA",
            status="warn",
            detail=(
                f"learner.lr = {config.learner.lr:g} is a rate of full training; adapters need about ten times as much "
                f"(--learner.lr {LOW_LR:g} or more)"
            ),
        )


def _beside_full(config: Config, parameters: int) -> str:
    full = config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})
    sums = {"an update": update_bytes, "a checkpoint": trained_bytes, "the learner": learner_bytes}
    said = [f"{name} {of(config, parameters) / MIB:,.1f}" for name, of in sums.items()]
    instead = [f"{of(full, parameters) / MIB:,.1f}" for of in sums.values()]
    return f"{', '.join(said)} MiB, where full training has {', '.join(instead)}"
