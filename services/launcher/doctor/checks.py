"""What would stop a run on this machine, found before anything starts. `preflight` refuses; `bapo doctor` shows all."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from bapo.algorithms.selectors.registry import needs_embeddings
from bapo.analysis.trackers.base import refuse_unusable
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError, UnavailableError, did_you_mean
from bapo.runtime.auth.redis_password import PASSWORD_FILE, problem_of_url, refuse_open, with_password
from bapo.runtime.machine import (
    GIB,
    engine_bytes,
    learner_bytes,
    memory_gib,
    ranks_on_gpus,
    resident_bytes,
    run_bytes,
    worker_resources,
)
from bapo.runtime.model_files import (
    fetch,
    folder_of,
    how_to_fetch,
    is_hub_id,
    missing_parts,
    num_parameters,
    weight_files,
)
from bapo.runtime.vision import missing_package, vision_model
from bapo.tasks.grading.pool import GraderPool
from bapo.tasks.registry import load_task
from bapo.transport.endpoints import BUFFER
from services.launcher.embedded_redis import server_binary
from services.launcher.processes import LEARNER, LOOPBACK, configured_ports

DISK_GIB = 1.0
MIB = 1 << 20
REDIS_TIMEOUT_S = 2.0
WANTS_PASSWORD = f"it requires a password: name its file in {PASSWORD_FILE}"
OPTIMIZED = "--enable-optimizations"


Download = Callable[[str, Iterable[str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    """What was found; with what to do about it, unless it is ok."""
    error: type[BapoError] = ConfigError
    """What a failure is, for the exit code."""


def preflight(
    config: Config,
    *,
    with_learner: bool = True,
    download: Download | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Refuse to start what cannot work, and fetch a model of the Hub before anything starts.

    Args:
        download: as `bapo.runtime.model_files.fetch` has it.
        say: prints what is fetched.
    Raises: the first failure's error, with one line per failure.
    """
    found = [engine(config), *ports(config, with_learner=with_learner), redis(config), *trackers(config)]
    if is_hub_id(config.model.path):
        _refuse(found)  # before minutes of download
        if folder_of(config.model.path) is None:
            say(f"fetching {config.model.path} from the Hugging Face Hub")
        fetch(config.model.path, download)
    _refuse([*found, model_files(config), data(config), *reward(config)])


def preflight_buffer(config: Config) -> None:
    """The same for the buffer service alone: it knows neither model nor task."""
    own = f"port {config.buffer.port} ({BUFFER})"
    _refuse([*(check for check in ports(config) if check.name == own), redis(config)])


def _refuse(found: Iterable[Check]) -> None:
    failures = [check for check in found if check.status == "fail"]
    if failures:
        raise failures[0].error("\n".join(check.detail for check in failures))


ENGINES = "rollout_server.engines"
NOT_ENGINES = ("base",)


def engine(config: Config) -> Check:
    """The inference engine is a module of the rollout server, which is searched and not imported here."""
    name, known = config.rollout.engine, engine_names()
    if known and name not in known:
        hint = did_you_mean(name, known)
        detail = f"rollout.engine = {name!r}: there is no such engine{hint}; write one of {', '.join(known)}"
        return Check(name="engine", status="fail", detail=detail)
    return Check(name="engine", status="ok", detail=name)


def engine_names() -> list[str]:
    """Engines that are installed; empty where the rollout server is not."""
    try:
        found = importlib.util.find_spec(ENGINES)
    except ModuleNotFoundError:
        return []
    folders = found.submodule_search_locations if found else None
    names = [module.name for module in pkgutil.iter_modules(folders or ())]
    return sorted(name for name in names if not name.startswith("_") and name not in NOT_ENGINES)


def interpreter(options: str | None = None, maps: str | None = None) -> Check:
    """How this Python was built: one without optimizations, in a library of its own, is slower at everything.

    Args:
        options: that it was configured with; None: ask it.
        maps: the files that its process has mapped; None: look.
    """
    options = options if options is not None else sysconfig.get_config_var("CONFIG_ARGS") or ""
    maps = maps if maps is not None else _mapped()
    if OPTIMIZED in options or "libpython" not in maps:
        return Check(name="python build", status="ok", detail=sys.executable)
    detail = (
        f"{sys.executable} was built without {OPTIMIZED}: services and workers take more time for everything "
        "(docs/buffer.md has figures). Use another one, as make setup PYTHON=/usr/bin/python3.11 with "
        "package python3.11-venv, or build it again, as "
        f'PYTHON_CONFIGURE_OPTS="{OPTIMIZED} --with-lto" pyenv install --force 3.11'
    )
    return Check(name="python build", status="warn", detail=detail)


def _mapped() -> str:
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return ""


def ports(config: Config, *, with_learner: bool = True) -> Iterator[Check]:
    for process, key, port in configured_ports(config):
        is_ours = not (process == LEARNER and not with_learner) and not (key == "buffer.port" and config.buffer.url)
        if port == 0 or not is_ours:
            continue
        hosts = {
            "buffer.port": config.buffer.host,
            "rollout.port": config.rollout.host,
            "dashboard.port": config.dashboard.host,
        }
        host = hosts.get(key, LOOPBACK)
        try:
            with socket.socket() as probe:
                # As the servers do: a port in TIME_WAIT is free for them.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            detail = (
                f"{key}: cannot listen on {host}:{port}: {error.strerror}; another run or program may use it. "
                f"Stop it, or use a free port with --{key} 0"
            )
            yield Check(name=f"port {port} ({process})", status="fail", detail=detail)
        else:
            yield Check(name=f"port {port} ({process})", status="ok", detail="free")


def redis(config: Config) -> Check:
    url = config.buffer.redis_url
    if config.buffer.url:
        return Check(name="redis", status="ok", detail=f"that of the buffer service at {config.buffer.url}")
    if url is None:
        try:
            return Check(name="redis", status="ok", detail=f"embedded: {server_binary()}")
        except ConfigError as error:
            return Check(name="redis", status="fail", detail=str(error))
    if problem := problem_of_url(url):
        return Check(name="redis", status="fail", detail=f"buffer.redis_url {url} {problem}")
    try:
        refuse_open(with_password(url), allowed=config.security.open_redis)
    except ConfigError as error:
        return Check(name="redis", status="fail", detail=str(error))
    reason = redis_answer(url)
    if reason is None:
        return Check(name="redis", status="ok", detail=f"{url} answers")
    detail = (
        f"buffer.redis_url: no Redis answers at {url}: {reason}; start it, or leave the setting out: the launcher then "
        "starts an embedded one"
    )
    return Check(name="redis", status="fail", detail=detail, error=UnavailableError)


def redis_answer(url: str) -> str | None:
    """None when a Redis answers at this URL, else why not (a server that wants a password does answer)."""
    found = _asked(url, "server")
    return found if isinstance(found, str) and found != WANTS_PASSWORD else None


def _asked(url: str, section: str) -> dict[str, Any] | str:
    from redis import Redis  # here: importing it takes 0.2 s, and most runs start their own
    from redis.backoff import NoBackoff
    from redis.exceptions import AuthenticationError, RedisError
    from redis.retry import Retry

    wait = {"socket_timeout": REDIS_TIMEOUT_S, "socket_connect_timeout": REDIS_TIMEOUT_S}
    try:
        with Redis.from_url(url, retry=Retry(NoBackoff(), 0), **wait) as client:
            found: dict[str, Any] = client.info(section)
            return found
    except AuthenticationError:
        return WANTS_PASSWORD
    except AttributeError:  # redis-py reads the handshake's answer before it looks whether it is one
        return "what answers there is not a Redis"
    except (RedisError, OSError, ValueError) as error:
        return str(error)


def model_files(config: Config) -> Check:
    """A folder must be a model's; a Hub id is in the cache, with its weights, or will be fetched."""
    name, path = "model", config.model.path
    if not Path(path).is_dir() and not is_hub_id(path):
        detail = f"model.path: there is no folder {path} (searched in {os.getcwd()}), and it is not a Hugging Face id"
        return Check(name=name, status="fail", detail=detail)
    folder = folder_of(path)
    if folder is None:
        detail = f"{path} is not in the Hugging Face cache: the first start fetches it, or {how_to_fetch(path)}"
        return Check(name=name, status="warn", detail=detail)
    if missing := " and no ".join(missing_parts(folder)):
        if is_hub_id(path):
            detail = f"{path} has no {missing} in the Hugging Face cache: the first start fetches it, or "
            return Check(name=name, status="warn", detail=detail + how_to_fetch(path))
        detail = f"model.path: {path} has no {missing}; name a folder in Hugging Face format"
        return Check(name=name, status="fail", detail=detail)
    size = sum(file.stat().st_size for file in weight_files(folder))
    where = f"{path}, cached" if is_hub_id(path) else path
    return Check(name=name, status="ok", detail=f"{where}, {size / 1e6:.1f} MB of weights")


def data(config: Config) -> Check:
    """The task loads, its training split fills a batch, and the model reads its images, if it has some."""
    try:
        task = load_task(config.task.name, config.task.options, tokenizer=config.model.path)
        num_train = len(task.prompts("train"))
        held_out = ", ".join(f"{split} {len(task.prompts(split))}" for split in task.held_out_splits)
        splits = ("train", *task.held_out_splits)
        problem = image_problem(config, shown=any(prompt.images for split in splits for prompt in task.prompts(split)))
    except BapoError as error:
        return Check(name="data", status="fail", detail=str(error))
    if num_train < config.algorithm.batch_size:
        detail = (
            f"task {config.task.name!r} has {num_train} training prompts, fewer than one batch of "
            f"algorithm.batch_size={config.algorithm.batch_size}; add prompts or write at most {num_train}"
        )
        return Check(name="data", status="fail", detail=detail)
    if problem:
        return Check(name="data", status="fail", detail=problem)
    return Check(name="data", status="ok", detail=f"{num_train} training prompts; held out: {held_out or 'none'}")


def image_problem(config: Config, *, shown: bool) -> str:
    """What is in the way of a model that reads images, or of prompts that have some (`shown`); empty: nothing.

    Raises: ConfigError for a vision-language model that is not supported.
    """
    path = config.model.path
    reads = vision_model(path) is not None
    if shown and not reads and folder_of(path) is not None:
        return (
            f"model.path: {path} reads text only, and the prompts of task {config.task.name!r} have images; name a "
            "vision-language model (docs/images.md)"
        )
    has_vllm = config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is not None
    if reads and has_vllm and (missing := missing_package()):
        return f"model.path: {path} is a vision-language model: {missing}"
    if shown and needs_embeddings(config.algorithm.selector) and config.selector.embeddings is None:
        return (
            f"algorithm.selector = {config.algorithm.selector!r} embeds the texts of prompts, and these have images; "
            "choose another one, or name your own file in selector.embeddings"
        )
    return ""


def reward(config: Config) -> Iterator[Check]:
    """A user's reward loads, in a grading process as in the run: its code is never imported here."""
    name = config.task.reward or config.task.options.get("reward")
    if name is None:
        return
    try:
        GraderPool(config.task, num_children=1).close()
    except BapoError as error:
        yield Check(name="reward", status="fail", detail=str(error))
    else:
        yield Check(name="reward", status="ok", detail=f"{name} loads")


def trackers(config: Config) -> Iterator[Check]:
    """Packages of `tracking.to` are installed, and W&B has a login."""
    if not config.tracking.to:
        return
    try:
        refuse_unusable(config.tracking.to, config.tracking)
    except ConfigError as error:
        yield Check(name="trackers", status="fail", detail=f"tracking.to: {error}")
    else:
        yield Check(name="trackers", status="ok", detail=f"{', '.join(config.tracking.to)}: installed")


def memory(config: Config) -> Check:
    """What is free, next to a sum by the parameters of the model."""
    parameters = parameters_of(config)
    needed = memory_gib(config, parameters or 0)
    free = psutil.virtual_memory().available / GIB
    status: Literal["ok", "warn"] = "ok" if free >= needed else "warn"
    advice = "" if status == "ok" else "; fewer rollout.num_workers need less"
    parts = _weights_in_words(config, parameters)
    return Check(
        name="memory", status=status, detail=f"{free:.1f} GiB free, about {needed:.1f} needed{advice}; {parts}"
    )


def parameters_of(config: Config) -> int | None:
    """Of the model, from its files; None when they are not here."""
    folder = folder_of(config.model.path)
    return None if folder is None else num_parameters(folder)


def _weights_in_words(config: Config, parameters: int | None) -> str:
    if parameters is None:
        return "without the model, whose size is unknown until it is downloaded"
    learner, engine = learner_bytes(config, parameters) / GIB, engine_bytes(config, parameters) / GIB
    on_gpus = ["learner"] if ranks_on_gpus(config) else []
    on_gpus += ["engines"] if "GPU" in worker_resources(config.rollout) else []
    where = f", of which {' and '.join(on_gpus)} in the memory of GPUs" if on_gpus else ""
    return (
        f"{parameters / 1e6:,.1f} M parameters: learner {learner:,.2f} GiB (weights, gradients, moments; activations "
        f"come on top), each engine {engine:,.2f} GiB{where}"
    )


def limits_of(config: Config) -> Iterator[Check]:
    """Redis' memory next to what the run's groups fill."""
    if config.buffer.url or config.buffer.redis_url:
        return
    held, given = resident_bytes(config) / MIB, config.buffer.maxmemory / MIB
    if given >= held:
        yield Check(name="limit", status="ok", detail=f"groups of full length fill {held:,.0f} of {given:,.0f} MB")
        return
    detail = (
        f"buffer.max_memory_mb = {config.buffer.max_memory_mb} is low: all groups that Redis holds before a checkpoint "
        f"fill {held:,.0f} MB at full length; write {2 * held:.0f}"
    )
    yield Check(name="limit", status="warn", detail=detail)


def disk(config: Config) -> Check:
    folder = Path(config.run.root).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GIB
    if not os.access(folder, os.W_OK):
        return Check(name="disk", status="fail", detail=f"run.root: {folder} is not writable; choose another")
    weights = run_bytes(config, parameters_of(config) or 0) / GIB
    status: Literal["ok", "warn"] = "ok" if free >= DISK_GIB + weights else "warn"
    kept = f"{config.checkpoint.keep_last} checkpoints and one that is being written take about {weights:,.2f}"
    advice = "" if status == "ok" else "; a smaller checkpoint.keep_last, or another run.root"
    return Check(name="disk", status=status, detail=f"{free:.1f} GiB free in {folder}; {kept}{advice}")


def redis_persistence(config: Config) -> Check | None:
    """Whether a Redis that runs already writes an append-only file; None when there is none to ask."""
    name, url = "redis persistence", config.buffer.redis_url
    if url is None or config.buffer.url:
        return None
    try:
        found = _asked(with_password(url), "persistence")
    except ConfigError as error:
        found = str(error)
    if isinstance(found, str):
        return Check(name=name, status="warn", detail=f"could not be asked: {found}")
    if found.get("aof_enabled"):
        return Check(name=name, status="ok", detail="append-only file")
    detail = "no append-only file: when this Redis dies, acknowledged groups are lost. Set `appendonly yes` there"
    return Check(name=name, status="warn", detail=detail)
