"""`bapo doctor`: all checks of this machine and config, including slow ones."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bapo.config.tree import Config
from bapo.core.errors import BapoError, GradingError
from bapo.core.types import Prompt
from bapo.runtime.machine import installed, vllm_build
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.tasks.base import MESSAGES
from bapo.tasks.grading.pool import GraderPool
from bapo.tasks.prompt_tokens import ended_prompts, round_trips_of
from bapo.tasks.registry import load_task
from services.launcher.doctor import checks
from services.launcher.doctor.checks import Check, redis_persistence
from services.launcher.doctor.gpu_checks import Part, gpu_checks
from services.launcher.embedded_redis import redis_spec
from services.launcher.gpus.devices import probe_gpus
from services.launcher.processes import base_environment
from services.launcher.supervision.child_process import Child, end
from services.launcher.supervision.supervisor import last_words

NUM_GOLD = 50
NUM_ROUND_TRIPS = 20
REDIS_START_S = 10.0
SILENT_S = 2.0
"""Nothing stays silent for longer."""
NAME_WIDTH = 12
PACKAGES = {"torch": "learner", "transformers": "learner", "ray": "rollout server", "redis": "buffer service"}
COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


Step = tuple[str, Callable[[], Iterable[Check]]]
"""Description for the progress line, and the check."""


def run_doctor(config: Config, console: Console, *, as_json: bool, is_quiet: bool = False, part: Part = "all") -> int:
    """Run all checks and show them; 0 if none failed, else the exit code of the first failure."""
    found = list(run_steps(all_steps(config) if part == "all" else part_steps(config, part)))
    if as_json:
        rows = [{key: value for key, value in asdict(check).items() if key != "error"} for check in found]
        console.print(json.dumps(rows, indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        shown = [check for check in found if not is_quiet or check.status != "ok"]
        if shown:
            console.print(check_table(shown))
    return next((check.error.exit_code for check in found if check.status == "fail"), 0)


def run_steps(steps: Iterable[Step]) -> Iterator[Check]:
    """Results in order; a slow step is announced."""
    for what, check in steps:
        with announced(what):
            found = list(check())
        yield from found


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Show what a slow check waits for: on a terminal an animated line that disappears, elsewhere one line on stderr,
    after two seconds."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(f"checking {what}"):
            yield
        return
    late = threading.Timer(SILENT_S, lambda: console.print(f"checking {what} ...", markup=False, soft_wrap=True))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def all_steps(config: Config) -> Iterator[Step]:
    """Checks by name. A model that is not on this machine is not loaded: the Hub may be out of reach."""
    model = checks.model_files(config)
    yield "versions", lambda: [versions(config), checks.interpreter(), checks.engine(config), checks.sampling(config)]
    yield "GPUs (imports torch)", lambda: gpus(config, "all")
    yield "ports", lambda: checks.ports(config)
    yield "memory and disk", lambda: [checks.memory(config), checks.disk(config), *checks.limits_of(config)]
    yield "Redis", lambda: redis_checks(config)
    yield "trackers", lambda: checks.trackers(config)
    yield f"data of task {config.task.name}", lambda: [checks.data(config)]
    yield "the reward on gold answers", lambda: [gold(config)]
    yield f"model {config.model.path}", lambda: [model]
    if model.status == "ok":
        yield f"the tokenizer of {config.model.path}", lambda: [tokenizer(config)]


def part_steps(config: Config, part: Part) -> Iterator[Step]:
    """Checks in the container of one part, which has its own software, devices and memory limit."""
    yield f"model {config.model.path}", lambda: [checks.model_files(config)]
    yield "GPUs (imports torch)", lambda: gpus(config, part)
    if part == "learner":
        yield "memory and disk", lambda: [checks.memory_of_learner(config), checks.disk(config)]


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
    """Checks of the configured Redis, or the embedded one."""
    yield checks.redis(config)
    if config.buffer.url is None and config.buffer.redis_url is None:
        yield redis_starts(config)
    if (kept := redis_persistence(config)) is not None:
        yield kept


def versions(config: Config) -> Check:
    have, missing = [f"python {sys.version_info.major}.{sys.version_info.minor}"], []
    for package, user in PACKAGES.items():
        version = installed(package)
        have.append(f"{package} {version}") if version else missing.append(f"{package} ({user})")
    if config.rollout.engine == "vllm":
        engine = vllm_build()
        have.append(f"{engine} {installed(engine)}") if engine else missing.append("vllm (rollout server)")
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check(name="versions", status="fail", detail=f"{have[0]}: BAPO needs 3.11, 3.12 or 3.13")
    if missing:
        return Check(name="versions", status="fail", detail=f"not installed: {', '.join(missing)}; run `make setup`")
    return Check(name="versions", status="ok", detail=", ".join(have))


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


def gold(config: Config) -> Check:
    """The reward of known correct answers is 1; otherwise the model cannot learn."""
    name = "reward on gold answers"
    try:
        task = load_task(config.task.name, config.task.options, tokenizer=config.model.path, reward=config.task.reward)
        pairs = ((prompt, task.gold(prompt)) for prompt in task.prompts("train"))
        known = list(islice(((prompt, text) for prompt, text in pairs if text is not None), NUM_GOLD))
        if not known:
            return Check(name=name, status="warn", detail="the task has no gold answers: reward not tested")
        with closing(GraderPool(config.task, num_children=1)) as graders:
            found = next(gold_problems(graders, known), None)
    except BapoError as error:
        return Check(name=name, status="fail", detail=str(error))
    if found is not None:
        return Check(name=name, status="fail", detail=found)
    return Check(name=name, status="ok", detail=f"{len(known)} of {len(known)} rewarded 1")


def gold_problems(graders: GraderPool, known: Iterable[tuple[Prompt, str]]) -> Iterator[str]:
    """Gold answers whose reward is not 1."""
    for prompt, text in known:
        try:
            reward = float(graders.grade(prompt, [text]).rewards[0])
        except GradingError as error:
            yield f"gold answer {text!r}: {error}"
        else:
            if reward != 1.0:
                advice = "" if reward else "; set task.options.gold_format to the format of a correct response"
                yield f"{prompt.text!r} with its gold answer {text!r}: reward is {reward:g}, expected 1{advice}"


def tokenizer(config: Config) -> Check:
    """Prompts are unchanged by encoding and decoding: transformers may silently build a wrong tokenizer."""
    name = "tokenizer"
    try:
        from transformers import AutoTokenizer  # here: it takes seconds to import

        encoder = AutoTokenizer.from_pretrained(config.model.path, local_files_only=Path(config.model.path).is_dir())
        task = load_task(config.task.name, config.task.options, tokenizer=config.model.path, reward=config.task.reward)
        prompts = task.prompts("train")[:NUM_ROUND_TRIPS]
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
    advice = "but the tokenizer has no chat template: set task.options.message_format"
    return Check(name=name, status="warn", detail=f"{detail}; the prompts are conversations, {advice}")


def check_table(found: Sequence[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=4)
    table.add_column(min_width=NAME_WIDTH)
    table.add_column(overflow="fold")
    for check in found:
        table.add_row(Text(check.status, COLORS[check.status]), check.name, Text(check.detail))
    return table
