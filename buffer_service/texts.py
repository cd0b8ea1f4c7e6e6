"""Which groups that did not train are held for their texts, until a checkpoint releases the batch of their step. Pure.

The learner reads them beside its training and writes what the run's page shows. Frames of so many bytes are
held; beyond that it is a sample, the same whoever assembles the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from bapo.algorithms.randomness import rng_for
from bapo.config.tree import Config
from buffer_service.groups import GroupRecord

MB = 1_000_000


def keeps_texts(config: Config, step: int) -> bool:
    """Whether the texts of this step are kept."""
    every = config.diagnostics.texts
    return every > 0 and step % every == 0


def held_for_texts(step: int, untrained: Sequence[GroupRecord], config: Config) -> tuple[str, ...]:
    """Ids of the groups to hold, in their order: all that fit into `diagnostics.texts_mb`, else a uniform sample."""
    if not keeps_texts(config, step):
        return ()
    room = config.diagnostics.texts_mb * MB
    order = list(range(len(untrained)))
    if sum(record.num_bytes for record in untrained) > room:
        rng_for(config.run.seed, step, "texts").shuffle(order)
    held: set[int] = set()
    for index in order:
        if untrained[index].num_bytes <= room:
            room -= untrained[index].num_bytes
            held.add(index)
    return tuple(untrained[index].group_id for index in sorted(held))
