"""`bapo doctor`: all checks of this machine and config, including slow ones."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bapo.config.tree import Config
from bapo.core.errors import BapoError
from bapo.core.types import MESSAGES
from bapo.runtime.machine import vllm_build
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.tasks.prompt_tokens import ended_prompts, round_trips_of
from bapo.tasks.tokenizer_files import TEMPLATE_FILE
from services.launcher.doctor import checks
from services.launcher.doctor.check_list import run_list
from services.launcher.doctor.checks import Check, redis_persistence
from services.launcher.doctor.gpu_checks import Part, gpu_checks
from services.launcher.doctor.situation import Situation
from services.launcher.embedded_redis import redis_spec
from services.launcher.gpus.devices import probe_gpus
from services.launcher.processes import base_environment
from services.launcher.supervision.child_process import Child, end
from services.launcher.supervision.supervisor import last_words

NUM_GOLD = 50
SECONDS = 60.0
"""Longest time of a check of all rows."""
NUM_ROUND_TRIPS = 20
REDIS_START_S = 10.0
NAME_WIDTH = 12
COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def run_doctor(config: Config, console: Console, *, as_json: bool, is_quiet: bool = False, part: Part = "all") -> int:
    """Run all checks and show them; 0 if none failed, else the exit code of the first failure."""
    found = list(everything(config) if part == "all" else of_part(config, part))
    if as_json:
        rows = [{key: value for key, value in asdict(check).items() if key != "error"} for check in found]
        console.print(json.dumps(rows, indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        shown = [check for check in found if not is_quiet or check.status != "ok"]
        if shown:
            console.print(check_table(shown))
    return next((check.error.exit_code for check in found if check.status == "fail"), 0)


def everything(config: Config) -> Iterator[Check]:
    """The list of checks, thoroughly, and those that load torch or transformers or start a Redis.

    A model that is not on this machine is not loaded: the Hub may be out of reach.
    """
    situation = Situation(config=config, num_gold=NUM_GOLD, seconds=SECONDS)
    yield checks.interpreter()
    found = list(run_list(situation))
    yield from found
    with checks.announced("GPUs (imports torch)"):
        on_gpus = list(gpus(config, "all"))
    yield from on_gpus
    with checks.announced("Redis"):
        on_redis = list(redis_checks(config))
    yield from on_redis
    failed = {check.name for check in found if check.status != "ok"}
    if "model" not in failed and not {"tokenizer", "data"} & failed:
        with checks.announced(f"the tokenizer of {config.model.path}"):
            on_tokenizer = tokenizer(situation)
        yield on_tokenizer


def of_part(config: Config, part: Part) -> Iterator[Check]:
    """Checks in the container of one part, which has its own software, devices and memory limit."""
    yield checks.model_files(config)
    yield checks.sampling(config)
    with checks.announced("GPUs (imports torch)"):
        on_gpus = list(gpus(config, part))
    yield from on_gpus
    if part == "learner":
        yield checks.memory_of_learner(config)
        yield checks.disk(config)


def gpus(config: Config, part: Part) -> Iterator[Check]:
    return gpu_checks(
        config,
        probe_gpus(),
        vllm_build=vllm_build(),
        is_cluster="RAY_ADDRESS" in os.environ,
        part=part,
        parameters=checks.parameters_of(config),
    )


def redis_checks(config: Config) -> Iterator[Check]:
    """The embedded Redis starts, or the configured one keeps what it acknowledges."""
    if config.buffer.url is None and config.buffer.redis_url is None:
        yield redis_starts(config)
    if (kept := redis_persistence(config)) is not None:
        yield kept


def redis_starts(config: Config) -> Check:
    """The embedded Redis starts and responds."""
    with tempfile.TemporaryDirectory(prefix="bapo-doctor-") as folder:
        run = RunDirectory.create(Path(folder) / "run")
        try:
            spec, _ = redis_spec(run, config.buffer, base_environment(config))
            child = Child(spec)
        except BapoError as error:
            return Check(name="redis starts", status="fail", detail=str(error))
        try:
            while child.ready_after_s is None and child.exit_code is None and child.age_s < REDIS_START_S:
                child.poll()
                time.sleep(0.01)
        finally:
            end([child], grace_s=2.0)
        if child.ready_after_s is None:
            return Check(name="redis starts", status="fail", detail=last_words(spec.log_path))
        return Check(name="redis starts", status="ok", detail=f"after {1000 * child.ready_after_s:.0f} ms")


def tokenizer(situation: Situation) -> Check:
    """Prompts are unchanged by encoding and decoding: transformers may silently build a wrong tokenizer."""
    name, config = "tokenizer", situation.config
    try:
        from transformers import AutoTokenizer  # here: it takes seconds to import

        is_local = Path(config.model.path).is_dir()
        encoder: Any = AutoTokenizer.from_pretrained(config.model.path, local_files_only=is_local)
        prompts = situation.task.prompts("train")[:NUM_ROUND_TRIPS]
    except (BapoError, ImportError, OSError, ValueError) as error:
        detail = f"cannot load the tokenizer of {config.model.path}: {str(error).splitlines()[0]}"
        return Check(name=name, status="fail", detail=detail)
    found = round_trips_of(encoder, prompts)
    if found.num_changed:
        return Check(name=name, status="fail" if found.is_wrong else "warn", detail=found.complaint)
    if ended := ended_prompts(encoder, prompts):
        return Check(name=name, status="warn", detail=ended)
    detail = f"{type(encoder).__name__}, {len(prompts)} prompts pass a round trip"
    if not any(MESSAGES in prompt.answer for prompt in prompts):
        return Check(name=name, status="ok", detail=detail)
    if encoder.chat_template or "message_format" in config.task.options:
        return Check(name=name, status="ok", detail=f"{detail}; has a chat template")
    way = f"write one to its {TEMPLATE_FILE}" if config.agents else "set task.options.message_format"
    advice = f"but the tokenizer has no chat template: {way}"
    return Check(name=name, status="warn", detail=f"{detail}; the prompts are conversations, {advice}")


def check_table(found: Sequence[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=4)
    table.add_column(min_width=NAME_WIDTH)
    table.add_column(overflow="fold")
    for check in found:
        table.add_row(Text(check.status, COLORS[check.status]), check.name, Text(check.detail))
    return table
