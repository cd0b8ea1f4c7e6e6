"""Checks of this machine, the model's files and the data. Which ones a start runs: `check_list.py`."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console

from bapo.config.advice import lower
from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.addresses import authority, to_bind
from bapo.core.errors import BapoError, ConfigError, UnavailableError, did_you_mean
from bapo.core.plugins import module_names
from bapo.runtime.auth.redis_password import PASSWORD_FILE, problem_of_url, refuse_open, with_password
from bapo.runtime.base_files import export_problem, vocabulary_problem
from bapo.runtime.machine import (
    GIB,
    engine_bytes,
    installed,
    learner_bytes,
    learner_gib,
    memory_gib,
    ranks_on_gpus,
    resident_bytes,
    run_bytes,
    vllm_build,
    worker_resources,
)
from bapo.runtime.model_files import (
    context_length,
    folder_of,
    how_to_fetch,
    is_hub_id,
    missing_parts,
    num_parameters,
    weight_files,
)
from bapo.runtime.rank_environment import nodes_of
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.sampling_limits import sampling_problems
from bapo.runtime.vision import missing_package, vision_model
from bapo.transport.endpoints import BUFFER
from services.launcher.doctor.attention_windows import shortest_window
from services.launcher.doctor.situation import Situation
from services.launcher.embedded_redis import server_binary
from services.launcher.processes import LEARNER, LOOPBACK, configured_ports
from services.trackers.base import refuse_unusable

DISK_GIB = 1.0
MIB = 1 << 20
REDIS_TIMEOUT_S = 2.0
WANTS_PASSWORD = f"it requires a password: set {PASSWORD_FILE} to the path of a file with the password"
OPTIMIZED = "--enable-optimizations"
SILENT_S = 2.0
"""Nothing stays silent for longer."""
PACKAGES = {"torch": "learner", "transformers": "learner", "ray": "rollout server", "redis": "buffer service"}


Download = Callable[[str, Iterable[str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    """Result, including a remedy unless it is ok."""
    error: type[BapoError] = ConfigError
    """Error class of a failure, for the exit code."""


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


def preflight_buffer(config: Config) -> None:
    """Preflight for only the buffer service, which needs neither model nor task."""
    refuse([*ports(config, only=BUFFER), redis(config)])


def refuse(found: Iterable[Check]) -> None:
    """Raises: the first failure's error, with the details of all."""
    failures = [check for check in found if check.status == "fail"]
    if failures:
        raise failures[0].error("\n".join(check.detail for check in failures))


def host(config: Config) -> Iterator[Check]:
    """Of the learner's hosts this is the first, which runs everything else, too."""
    if config.learner.num_ranks > 1 and (rank := nodes_of().rank):
        detail = (
            f"PET_NODE_RANK = {rank}: a run starts on host 0; here start the learner's ranks with `python -m learner "
            "--config RUN/config.toml --run-dir RUN`"
        )
        yield Check(name="host", status="fail", detail=detail)


def engine(config: Config) -> Check:
    """The inference engine exists: its module is found without importing the rollout server."""
    name, known = config.rollout.engine, engine_names()
    if known and name not in known:
        hint = did_you_mean(name, known)
        detail = f"rollout.engine = {name!r}: unknown engine{hint}; use one of {', '.join(known)}"
        return Check(name="engine", status="fail", detail=detail)
    return Check(name="engine", status="ok", detail=name)


def sampling(config: Config) -> Check:
    """The engine samples with every temperature and limit as it is written."""
    if problems := list(sampling_problems(config)):
        return Check(name="sampling", status="fail", detail="\n".join(problems))
    rollout = config.rollout
    temperatures = [rollout.temperature, *filter(None, [config.evaluation.temperature])]
    temperatures += config.evaluation.temperatures
    shown = ", ".join(f"{each:g}" for each in dict.fromkeys(temperatures))
    detail = f"temperatures {shown}; at most {rollout.max_response_tokens} tokens"
    return Check(name="sampling", status="ok", detail=detail)


def engine_names() -> list[str]:
    """Engines that are installed; empty where the rollout server is not."""
    return [name for name in module_names("rollout_server.engines") if name != "base"]


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


def cores(config: Config, *, with_learner: bool = True) -> Iterator[Check]:
    """Engines and ranks that compute on this machine's cores, compared with the cores."""
    num, rollout, learner = len(os.sched_getaffinity(0)), config.rollout, config.learner
    here = "RAY_ADDRESS" not in os.environ and rollout.engine != "scripted"
    engines = rollout.num_workers if here and "GPU" not in worker_resources(rollout) else 0
    ranks = learner.num_ranks if with_learner and not ranks_on_gpus(config) else 0
    problems = []
    if engines > num:
        problems.append(f"rollout.num_workers = {engines}: they share cores; use --rollout.num_workers {num}")
    if ranks > num:
        problems.append(f"learner.num_ranks = {ranks}: they share cores; use --learner.num_ranks {num}")
    if problems:
        yield Check(name="cores", status="warn", detail=f"{num} here; {'; '.join(problems)}")
    elif engines or ranks:
        yield Check(name="cores", status="ok", detail=f"{num}; engines {engines}, learner ranks {ranks}")


def interpreter(options: str | None = None, maps: str | None = None) -> Check:
    """How this Python was built: without optimizations and with a shared library, everything is slower.

    Args:
        options: configure options; default: of this Python.
        maps: mapped files of the process; default: of this process.
    """
    options = options if options is not None else sysconfig.get_config_var("CONFIG_ARGS") or ""
    maps = maps if maps is not None else _mapped()
    if OPTIMIZED in options or "libpython" not in maps:
        return Check(name="python build", status="ok", detail=sys.executable)
    detail = (
        f"{sys.executable} was built without {OPTIMIZED}, which slows down all services and workers "
        "(see docs/buffer.md). Use another Python, for example make setup PYTHON=/usr/bin/python3.11 with "
        "package python3.11-venv, or rebuild it, for example "
        f'PYTHON_CONFIGURE_OPTS="{OPTIMIZED} --with-lto" pyenv install --force 3.11'
    )
    return Check(name="python build", status="warn", detail=detail)


def _mapped() -> str:
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""


def ports(config: Config, *, with_learner: bool = True, only: str | None = None) -> Iterator[Check]:
    """One check for each port that is free, and one for all that are in use.

    Args:
        only: the process whose port is checked; None: all that start.
    """
    hosts = {
        "buffer.port": config.buffer.host,
        "rollout.port": config.rollout.host,
        "dashboard.port": config.dashboard.host,
    }
    taken: dict[int, str] = {}
    for process, key, port in configured_ports(config):
        is_ours = not (process == LEARNER and not with_learner) and not (key == "buffer.port" and config.buffer.url)
        if port == 0 or not is_ours or process != (only or process):
            continue
        host = hosts.get(key, LOOPBACK)
        try:
            family, address = to_bind(host, port)
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As the servers do: they can use a port in TIME_WAIT.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                taken[port] = key
                continue
            detail = f"{key}: cannot listen on {authority(host, port)}: {error.strerror}; choose another host or port"
            yield Check(name=f"port {port} ({process})", status="fail", detail=detail)
        else:
            yield Check(name=f"port {port} ({process})", status="ok", detail="free")
    if taken:
        yield Check(name="ports", status="fail", detail=_in_use(config, taken))


def _in_use(config: Config, taken: Mapping[int, str]) -> str:
    """Which ports, of which run, and what to do: one sentence for the six that a second run finds taken."""
    numbers = sorted(taken)
    starts = [port for port in numbers if port - 1 not in taken]
    ends = [port for port in numbers if port + 1 not in taken]
    ranges = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    what = f"port {ranges} ({taken[numbers[0]]}) is" if len(numbers) == 1 else f"ports {ranges} are"
    owner, advice = "another program", "stop it"
    for run in map(RunDirectory, Path(config.run.root).glob("*/")):
        with suppress(BapoError):
            if run.runs_here and _ports_of(run) & taken.keys():
                owner, advice = f"run {run.name} (pid {run.read_run()['pid']})", f"stop it with bapo stop {run.path}"
                break
    return f"{what} in use by {owner}: {advice}, or start this run on free ports with --free-ports"


def _ports_of(run: RunDirectory) -> set[int]:
    return {port for _, _, port in configured_ports(load_resolved(run.config_path))}


def redis(config: Config) -> Check:
    url = config.buffer.redis_url
    if config.buffer.url:
        return Check(name="redis", status="ok", detail=f"managed by the buffer service at {config.buffer.url}")
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
        f"buffer.redis_url: Redis at {url} does not respond: {reason}; start it, or remove the setting to use the "
        "embedded one"
    )
    return Check(name="redis", status="fail", detail=detail, error=UnavailableError)


def redis_answer(url: str) -> str | None:
    """None if Redis responds at this URL, else the reason (a server that requires a password does respond)."""
    found = _asked(url, "server")
    return found if isinstance(found, str) and found != WANTS_PASSWORD else None


def _asked(url: str, section: str) -> dict[str, Any] | str:
    from redis import Redis  # imported late: takes 0.2 s, and most runs use the embedded one
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
    except AttributeError:  # redis-py does not validate the handshake's reply
        return "the server there is not Redis"
    except (RedisError, OSError, ValueError) as error:
        return str(error)


def model_files(config: Config) -> Check:
    """A folder must contain a model; a Hub id must be cached with its weights, or will be downloaded."""
    name, path = "model", config.model.path
    if not Path(path).is_dir() and not is_hub_id(path):
        detail = f"model.path: folder {path} not found (in {os.getcwd()}), and it is not a Hugging Face id"
        return Check(name=name, status="fail", detail=detail)
    folder = folder_of(path)
    if folder is None:
        detail = f"{path} is not in the Hugging Face cache; the first start downloads it, or {how_to_fetch(path)}"
        return Check(name=name, status="warn", detail=detail)
    if missing := " and no ".join(missing_parts(folder)):
        if is_hub_id(path):
            detail = f"{path} has no {missing} in the Hugging Face cache; the first start downloads it, or "
            return Check(name=name, status="warn", detail=detail + how_to_fetch(path))
        detail = f"model.path: {path} has no {missing}; use a folder in Hugging Face format"
        return Check(name=name, status="fail", detail=detail)
    longest = config.rollout.longest_sequence
    if (context := context_length(folder)) is not None and longest > context:
        detail = (
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}, but the context of {path} has "
            f"{context} tokens; set smaller ones"
        )
        return Check(name=name, status="fail", detail=detail)
    # The last token of a sequence is sampled, and never read.
    if (window := shortest_window(folder)) is not None and window < longest - 1:
        detail = (
            f"model.path: {path} has layers with an attention window of {window} tokens, and "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}; the learner attends to whole "
            f"sequences: set smaller ones, at most {window} together, or use another model"
        )
        return Check(name=name, status="fail", detail=detail)
    if problem := export_problem(path) or vocabulary_problem(folder):
        return Check(name=name, status="fail", detail=problem)
    size = sum(file.stat().st_size for file in weight_files(folder))
    where = f"{path}, cached" if is_hub_id(path) else path
    return Check(name=name, status="ok", detail=f"{where}, {size / 1e6:.1f} MB of weights")


def data(situation: Situation) -> Check:
    """The task loads, its training split fills a batch, and the model can read its images, if any."""
    config = situation.config
    try:
        task = situation.task
        config.evaluation.require_splits(task.held_out_splits, config.rollout.temperature)
        if config.checkpoint.keep_best and not task.held_out_splits:
            raise ConfigError("checkpoint.keep_best: the task has no held-out split, so nothing is measured; remove it")
        num_train = len(task.prompts("train"))
        held_out = ", ".join(f"{split} {len(task.prompts(split))}" for split in task.held_out_splits)
        shown = any(prompt.images for split in situation.splits for prompt in task.prompts(split))
        problem = image_problem(config, shown=shown)
    except BapoError as error:
        return Check(name="data", status="fail", detail=str(error))
    if num_train < config.algorithm.batch_size:
        detail = (
            f"task {config.task.name!r} has {num_train} training prompts, fewer than one batch of "
            f"algorithm.batch_size={config.algorithm.batch_size}; add prompts, or set it to at most {num_train}"
        )
        return Check(name="data", status="fail", detail=detail)
    if problem:
        return Check(name="data", status="fail", detail=problem)
    prompts = f"{num_train} training prompts"
    if situation.with_learner:
        passes = config.run.num_steps * config.algorithm.batch_size / num_train
        prompts += f", {passes:,.1f} passes in {config.run.num_steps} steps"
    return Check(name="data", status="ok", detail=f"{prompts}; held out: {held_out or 'none'}")


def image_problem(config: Config, *, shown: bool) -> str:
    """Why the model or the prompts cannot be used with images (`shown`: prompts have images); empty if they can.

    Raises: ConfigError for a vision-language model that is not supported.
    """
    path = config.model.path
    reads = vision_model(path) is not None
    if shown and not reads and folder_of(path) is not None:
        return (
            f"model.path: {path} reads text only, and the prompts of task {config.task.name!r} have images; use a "
            "vision-language model (docs/images.md)"
        )
    has_vllm = config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is not None
    if reads and has_vllm and (missing := missing_package()):
        return f"model.path: {path} is a vision-language model: {missing}"
    return ""


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


def memory_of_learner(config: Config) -> Check:
    """The memory limit of this container compared with what the learner's host needs at the least."""
    parameters = parameters_of(config)
    needed, limit = learner_gib(config, parameters or 0), memory_limit() / GIB
    detail = f"limit {limit:.1f} GiB, the learner needs about {needed:.1f}; {_weights_in_words(config, parameters)}"
    return Check(name="memory", status="ok" if limit >= needed else "fail", detail=detail)


def memory_limit(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of memory that this container or machine may use."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = cgroup.read_text().strip()
    except OSError:  # not a container, or cgroup v1
        return total
    return min(int(limit), total) if limit.isdigit() else total


def memory(config: Config) -> Check:
    """Free memory compared with an estimate from the model's parameters."""
    parameters = parameters_of(config)
    needed = memory_gib(config, parameters or 0)
    free = psutil.virtual_memory().available / GIB
    status: Literal["ok", "warn"] = "ok" if free >= needed else "warn"
    cure = lower(config, "rollout.num_workers") or "use a smaller model, or a machine with more memory"
    advice = "" if status == "ok" else f"; {cure}"
    parts = _weights_in_words(config, parameters)
    return Check(
        name="memory", status=status, detail=f"{free:.1f} GiB free, about {needed:.1f} needed{advice}; {parts}"
    )


def parameters_of(config: Config) -> int | None:
    """Number of parameters, from the model files; None if they are not available."""
    folder = folder_of(config.model.path)
    return None if folder is None else num_parameters(folder)


def _weights_in_words(config: Config, parameters: int | None) -> str:
    if parameters is None:
        return "excluding the model, whose size is unknown until it is downloaded"
    learner, engine = learner_bytes(config, parameters) / GIB, engine_bytes(config, parameters) / GIB
    on_gpus = ["learner"] if ranks_on_gpus(config) else []
    on_gpus += ["engines"] if "GPU" in worker_resources(config.rollout) else []
    where = f", of which {' and '.join(on_gpus)} in GPU memory" if on_gpus else ""
    return (
        f"{parameters / 1e6:,.1f} M parameters: learner {learner:,.2f} GiB (weights, gradients, moments, plus "
        f"activations), each engine {engine:,.2f} GiB{where}"
    )


def limits_of(config: Config) -> Iterator[Check]:
    """Redis' memory compared with the size of the run's groups."""
    if config.buffer.url or config.buffer.redis_url:
        return
    held, given = resident_bytes(config) / MIB, config.buffer.maxmemory / MIB
    if given >= held:
        yield Check(name="limit", status="ok", detail=f"groups of full length use {held:,.0f} of {given:,.0f} MB")
        return
    detail = (
        f"buffer.max_memory_mb = {config.buffer.max_memory_mb} is low: groups retained by Redis until a checkpoint "
        f"use {held:,.0f} MB at full length; set it to {2 * held:.0f}"
    )
    yield Check(name="limit", status="warn", detail=detail)


def disk(config: Config) -> Check:
    folder = Path(config.run.root).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GIB
    if not os.access(folder, os.W_OK):
        return Check(name="disk", status="fail", detail=f"run.root: {folder} is not writable; choose another folder")
    weights = run_bytes(config, parameters_of(config) or 0) / GIB
    status: Literal["ok", "warn"] = "ok" if free >= DISK_GIB + weights else "warn"
    number = config.checkpoint.keep_last + config.checkpoint.keep_best
    kept = f"{number} checkpoints and one being written need about {weights:,.2f}"
    fewer = lower(config, "checkpoint.keep_last", "checkpoint.keep_best")
    cure = " or ".join([*filter(None, [fewer]), "use another run.root"])
    advice = "" if status == "ok" else f"; {cure}"
    return Check(name="disk", status=status, detail=f"{free:.1f} GiB free in {folder}; {kept}{advice}")


def redis_persistence(config: Config) -> Check | None:
    """Whether a running Redis has an append-only file; None if there is none."""
    name, url = "redis persistence", config.buffer.redis_url
    if url is None or config.buffer.url:
        return None
    try:
        found = _asked(with_password(url), "persistence")
    except ConfigError as error:
        found = str(error)
    if isinstance(found, str):
        return Check(name=name, status="warn", detail=f"unknown: {found}")
    if found.get("aof_enabled"):
        return Check(name=name, status="ok", detail="append-only file")
    detail = "no append-only file: acknowledged groups are lost if this Redis crashes. Set `appendonly yes` there"
    return Check(name=name, status="warn", detail=detail)
