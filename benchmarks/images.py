"""What images cost: bytes of a request and of a group, and responses/s of vLLM with and without reuse of images.

    python -m benchmarks.images [--groups 96] [--rounds 5] [--out images.json]       needs requirements/vision.txt

The problems are those of deploy/configs/demo-geometry.toml, sampled by models/geometry-tiny in groups of 8.

reused      as in a run: patches are computed once and the vision tower runs once per prompt
repeated    each response has an image of its own: patches and vision tower once per response

Both use one engine in this process and alternate, so that a busy machine affects them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from bapo.config.load import load_config
from bapo.core.codec import pack_group
from bapo.core.json_values import to_map
from bapo.core.types import Group, Prompt, Purpose, RolloutRequest
from bapo.runtime.vision import vision_model
from contrib.geometry.task import GeometryOptions, GeometryTask
from rollout_server.engines import vllm
from tests.support.engines import Driven

CONFIG = "deploy/configs/demo-geometry.toml"
GROUP_SIZE = 8


def requests_of(prompts: Sequence[Prompt], group_size: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            request_id=f"fresh-{index:05d}",
            prompt=prompt,
            group_size=group_size,
            purpose=Purpose.FRESH,
            step=1,
            min_version=1,
        )
        for index, prompt in enumerate(prompts)
    ]


def workloads(prompts: Sequence[Prompt], round_number: int) -> dict[str, list[RolloutRequest]]:
    """The same number of responses in two ways. New digests each round: nothing is cached from the last."""

    def own(prompt: Prompt, copy: int) -> Prompt:
        return msgspec.structs.replace(prompt, images=(f"{prompt.images[0]}-{round_number}-{copy}",))

    return {
        "reused": requests_of([own(prompt, -1) for prompt in prompts], GROUP_SIZE),
        "repeated": requests_of([own(prompt, copy) for prompt in prompts for copy in range(GROUP_SIZE)], 1),
    }


def sample(calls: Driven, requests: Sequence[RolloutRequest]) -> tuple[list[Group], float]:
    """All responses, and the seconds that they took, submission included."""
    started = time.perf_counter()
    groups = calls.finish(requests)
    return groups, time.perf_counter() - started


def sizes(task: GeometryTask, prompt: Prompt, group: Group) -> dict[str, int]:
    """Bytes of one request and one group as they travel, with and without image, and of the image itself."""
    model = vision_model("models/geometry-tiny")
    assert model is not None
    request = requests_of([prompt], GROUP_SIZE)[0]
    plain = msgspec.structs.replace(request, prompt=msgspec.structs.replace(prompt, images=()))
    return {
        "request": len(msgpack.packb(to_map(request))),
        "request_without_image": len(msgpack.packb(to_map(plain))),
        "group": len(pack_group(replace(group, prompt=prompt))),
        "group_without_image": len(pack_group(replace(group, prompt=plain.prompt))),
        "image_file": len(task.image(prompt.images[0])),
        "patches": model.patches(task.image(prompt.images[0])).pixels.nbytes,
    }


def measure(num_groups: int, rounds: int) -> dict[str, Any]:
    """Bytes, and responses/s of every round."""
    os.environ.update(vllm.ENVIRONMENT)
    task = GeometryTask(GeometryOptions(num_train=num_groups))
    prompts = task.prompts("train")
    config = load_config([CONFIG], [])
    engine = vllm.make_engine(config)
    tokenization = vllm.make_tokenization(config, lambda digest: task.image(digest.partition("-")[0]))
    calls = Driven(engine, tokenization, config)
    speeds: dict[str, list[float]] = {"reused": [], "repeated": []}
    groups: list[Group] = []
    for number in range(rounds + 1):
        for name, requests in workloads(prompts, number).items():
            found, seconds = sample(calls, requests)
            groups = groups or found
            if number:  # the first round warms up
                speeds[name].append(num_groups * GROUP_SIZE / seconds)
        print({name: round(values[-1]) for name, values in speeds.items() if values}, flush=True)
    by_id = {group.group_id: group for group in groups}
    return {
        "bytes": sizes(task, prompts[0], by_id["fresh-00000"]),
        "responses_per_s": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "reused_over_repeated": _ratio(speeds["reused"], speeds["repeated"]),
        "groups": num_groups,
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
    }


def _ratio(first: Sequence[float], second: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(first, second, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = json.dumps(measure(args.groups, args.rounds), indent=2)
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
