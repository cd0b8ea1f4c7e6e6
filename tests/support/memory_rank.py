"""One rank that trains three steps and says what it held: run as a process by `test_learner_memory.py`.

    python -m tests.support.memory_rank MODEL RUN NUM_RANKS SECTIONS

SECTIONS: JSON that overrides sections of the configuration. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bapo.core.errors import ConfigError
from bapo.core.types import Batch
from learner.distributed import sharding
from learner.distributed.world import join, leave
from learner.loop import Learner
from learner.model import loading
from learner.update.reference import Reference
from tests.support.learner import CPU, FakeBuffer, FakeFleet, learner_config, make_test_learner, random_batch


def batch_of(step: int) -> Batch:
    """7 groups: three mini-batches of 3, 2 and 2, so that one rank is sometimes idle."""
    return random_batch(num_groups=7, step=step)


class Held:
    """Whole tensors that came out of gathering or went into scattering, and how many of them there were at once."""

    def __init__(self) -> None:
        self.most = 0
        self.total = 0
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def note(self, tensor: torch.Tensor) -> None:
        self._alive = [ref for ref in self._alive if ref() is not None]
        self._alive.append(weakref.ref(tensor))
        self.total += 1
        self.most = max(self.most, len(self._alive))

    def noting(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`make`, whose results are noted."""

        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            self.note(made)
            return made

        return noted


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Counts whole tensors, and models that were read from files."""
    gathered, scattered, found = Held(), Held(), {"reads": 0}
    read, whole, distribute = AutoModelForCausalLM.from_pretrained, sharding.whole, sharding.distribute_tensor

    def noted_read(*args: Any, **kwargs: Any) -> Any:
        found["reads"] += 1
        return read(*args, **kwargs)

    def noted_distribute(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scattered.note(tensor)
        return distribute(tensor, *args, **kwargs)

    AutoModelForCausalLM.from_pretrained = noted_read
    sharding.whole, sharding.distribute_tensor = gathered.noting(whole), noted_distribute
    yield found
    AutoModelForCausalLM.from_pretrained = read
    sharding.whole, sharding.distribute_tensor = whole, distribute
    found |= {"gathered": gathered.total, "most_gathered": gathered.most, "most_scattered": scattered.most}


def dtypes_of(learner: Learner) -> dict[str, Any]:
    """Filled while it trains: dtypes of what is kept, of a layer's weights and inputs in a pass, and of gradients."""
    policy, optimizer, reference = learner.policy, learner.updater.optimizer, learner.updater.parts.get("reference")
    found = {"kept": names(policy.parameters()), "weights": set(), "inputs": set(), "gradients": set()}
    found["reference"] = names(reference.model.parameters()) if isinstance(reference, Reference) else set()

    def note_layer(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found["weights"] |= names(layer.parameters())
        found["inputs"] |= names(inputs[:1])

    for layer in policy.model.base_model.layers:
        layer.register_forward_pre_hook(note_layer)
    optimizer.register_step_pre_hook(
        lambda *_: found["gradients"].update(names(p.grad for p in policy.parameters() if p.grad is not None))
    )
    return found


def names(tensors: Any) -> set[str]:
    """Dtypes without `torch.`."""
    return {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}


def main(model: str, run: str, num_ranks: str, sections: str) -> None:
    overrides: dict[str, dict[str, Any]] = json.loads(sections)
    learner_section = {"num_ranks": int(num_ranks), "microbatch_tokens": 80, **overrides.pop("learner", {})}
    config = learner_config(model, run={"num_steps": 3}, learner=learner_section, **overrides)
    world = join(config.learner, CPU, 60.0)
    assert loading.scatter_like is sharding.scatter_like
    losses: list[list[float]] = []
    try:
        with watched() as held:
            learner = make_test_learner(config, Path(run), buffer=FakeBuffer(batch_of), fleet=FakeFleet(), world=world)
            dtypes = dtypes_of(learner)
            run_update = learner.updater.run

            def noted(batch: Batch) -> Any:
                report = run_update(batch)
                losses.extend([result.loss, result.grad_norm] for result in report.minibatches)
                return report

            learner.updater.run = noted  # type: ignore[method-assign]
            learner.run(1)
    except ConfigError as error:
        sys.stdout.write(json.dumps({"refused": str(error)}) + "\n")
        leave(world, together=True)
        return
    sorted_dtypes = {name: sorted(values) for name, values in dtypes.items()}
    sys.stdout.write(json.dumps({"losses": losses, "held": held, "dtypes": sorted_dtypes}) + "\n")
    leave(world, together=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
