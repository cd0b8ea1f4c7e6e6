"""One rank of a learner with a vision-language model: run as a process by `test_fsdp_images.py`, as torchrun would.

    python -m tests.support.vision_rank MODEL NUM_RANKS

Prints loss and gradient norm of every mini-batch of one step. Groups with pictures and without, cut so that the ranks
have them at different times.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from bapo.core.types import Group
from bapo.runtime.vision import VisionModel, vision_model
from learner.distributed.stopping import StopFlag
from learner.distributed.world import join, leave
from learner.model.policy import load_policy
from learner.update.update import Updater
from tests.support.factories import make_batch, make_group
from tests.support.learner import CPU, learner_config
from tests.support.tiny_vision import END, IMAGE, START, Pictures, picture


def group_of(number: int, vision: VisionModel, pictures: Pictures) -> Group:
    """Every third group has no picture; responses of 3 to 9 tokens."""
    rng = np.random.default_rng(number)
    files = [picture(number, 48, 32), picture(number + 50, 32, 16)][: number % 3]
    ids = [4, *[token for _ in files for token in (START, IMAGE, END)], 9, 10]
    lengths = rng.integers(3, 10, 4).astype(np.int32)
    group = make_group(prompt_id=f"p{number}", rewards=(0.0, 1.0, 0.0, 1.0))
    return replace(
        group,
        prompt=msgspec.structs.replace(group.prompt, images=tuple(map(pictures.add, files))),
        prompt_token_ids=np.array(vision.expanded(ids, list(map(vision.patches, files))), np.int32),
        token_ids=rng.integers(4, 200, lengths.sum()).astype(np.int32),
        rollout_logprobs=np.full(lengths.sum(), -5.0, np.float32),
        lengths=lengths,
    )


def main(model: str, num_ranks: str) -> None:
    vision = vision_model(model)
    assert vision is not None
    pictures = Pictures()
    batch = make_batch(groups=[group_of(number, vision, pictures) for number in range(7)])
    config = learner_config(model, learner={"num_ranks": int(num_ranks), "microbatch_tokens": 80, "minibatch_size": 4})
    world = join(config.learner, CPU, 60.0)
    with tempfile.TemporaryDirectory() as folder:
        updater = Updater(
            config=config,
            policy=load_policy(model, config, world),
            world=world,
            stop=StopFlag(),
            run_path=Path(folder),
            images=pictures.read,
        )
        report = updater.run(batch)
    sys.stdout.write(json.dumps([[result.loss, result.grad_norm] for result in report.minibatches]) + "\n")
    leave(world, together=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
