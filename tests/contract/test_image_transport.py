"""Images for workers: read where the run directory is, fetched once where it is not, refused when wrong."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from PIL import Image

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError, StorageError
from bapo.core.types import Prompt, RolloutRequest
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.images import ImageFiles
from bapo.tasks.base import make_prompt
from bapo.tasks.images import Images, digest_of, keep_images
from bapo.tasks.registry import load_task
from buffer_service.http.schemas import EnqueueBody
from buffer_service.state import prompt_digest
from rollout_server.api import create_app
from rollout_server.engines import scripted
from rollout_server.images import ImageSource
from rollout_server.worker import Worker
from tests.support.factories import make_request
from tests.support.rollout import InstantGrader, MemoryBuffer, Served, make_config
from tests.support.wait import wait_until


def picture(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(buffer, format="PNG")
    return buffer.getvalue()


RED, BLUE = picture("red"), picture("blue")


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    found = ImageFiles(tmp_path / "run" / "images")
    found.write(digest_of(RED), RED)
    return found


@pytest.fixture
def server(files: ImageFiles) -> Iterator[Served]:
    fleet: Any = SimpleNamespace()
    served = Served(create_app(fleet, Telemetry(Process.ROLLOUT_SERVER), images=files))
    yield served
    served.stop()


def config_of(tmp_path: Path) -> Config:
    return Config(rollout=RolloutConfig(weights_cache=str(tmp_path / "cache")))


def request_of(*digests: str, request_id: str = "g") -> RolloutRequest:
    prompt = make_prompt("countdown", "<image>" * len(digests), {"numbers": [1], "target": 1}, images=digests)
    return msgspec.structs.replace(make_request(request_id=request_id), prompt=prompt)


def test_a_host_with_the_run_directory_reads_it(tmp_path: Path, files: ImageFiles) -> None:
    assert ImageSource(config_of(tmp_path), tmp_path / "run").read(digest_of(RED)) == RED


def test_a_host_without_it_fetches_an_image_once(tmp_path: Path, server: Served) -> None:
    source = ImageSource(config_of(tmp_path), tmp_path / "not-here", server.url)
    assert source.read(digest_of(RED)) == RED
    server.stop()
    assert source.read(digest_of(RED)) == RED


def test_an_image_that_nobody_has_is_an_error(tmp_path: Path, server: Served) -> None:
    for url in (server.url, ""):
        with pytest.raises(StorageError):
            ImageSource(config_of(tmp_path), tmp_path / "not-here", url).read(digest_of(BLUE))


def test_a_copy_that_was_changed_is_not_shown(tmp_path: Path, server: Served) -> None:
    source = ImageSource(config_of(tmp_path), tmp_path / "not-here", server.url)
    source.read(digest_of(RED))
    (copy,) = (tmp_path / "cache").rglob(digest_of(RED))
    copy.write_bytes(BLUE)
    with pytest.raises(ContractError):
        source.read(digest_of(RED))


def test_a_path_is_no_digest(tmp_path: Path, server: Served) -> None:
    with pytest.raises(ContractError):
        ImageSource(config_of(tmp_path), tmp_path / "not-here", server.url).read("..%2fconfig.toml")


def test_a_group_whose_image_is_missing_fails_alone(tmp_path: Path, files: ImageFiles) -> None:
    requests = [request_of(digest_of(BLUE), request_id="lost"), request_of(digest_of(RED), request_id="found")]
    buffer = MemoryBuffer(requests)
    worker = Worker(
        worker_id="worker-0",
        config=make_config(),
        buffer=buffer,
        make_engine=scripted.make_engine,
        make_tokenization=scripted.make_tokenization,
        make_grader=lambda _: InstantGrader(),
        images=ImageSource(config_of(tmp_path), tmp_path / "run"),
    )
    try:
        worker.load()
        worker.begin(None)
        wait_until(lambda: "found" in buffer.groups and worker.report().counts.get("failed/no_image") == 1)
        assert buffer.groups["found"].prompt.images == (digest_of(RED),)
        assert "lost" not in buffer.groups
    finally:
        worker.stop()


def test_a_request_with_images_is_another_one_than_without(tmp_path: Path) -> None:
    request = request_of(digest_of(RED))
    fields: Any = {
        "request_id": "g",
        "prompt": {
            "prompt_id": request.prompt.prompt_id,
            "text": "<image>",
            "task": "countdown",
            "answer": {"numbers": [1], "target": 1},
            "images": [digest_of(RED)],
        },
        "group_size": 8,
        "purpose": "fresh",
        "step": 1,
        "min_version": 1,
    }
    assert EnqueueBody(requests=[fields]).requests == [request]
    blue = request_of(digest_of(BLUE)).prompt
    without = Prompt(prompt_id="p", text="<image>", task="countdown", answer={"numbers": [1], "target": 1})
    assert len({prompt_digest(request.prompt), prompt_digest(blue), prompt_digest(without)}) == 3
    with pytest.raises(ValueError, match=r"matching regex .* at `\$\.prompt\.images"):
        EnqueueBody(requests=[fields | {"prompt": {**fields["prompt"], "images": ["../x"]}}])


def test_the_images_of_a_task_are_kept_and_a_task_without_them_is_refused(tmp_path: Path) -> None:
    images, kept = Images(), ImageFiles(tmp_path / "images")
    prompt = request_of(images.add(RED, "row 1")).prompt
    task: Any = SimpleNamespace(name="t", image=images.image)
    keep_images(task, [prompt], kept)
    assert kept.read(digest_of(RED)) == RED
    with pytest.raises(ConfigError, match=r"must define image\(digest\)"):
        keep_images(load_task("countdown", {}), [request_of(digest_of(BLUE)).prompt], kept)
