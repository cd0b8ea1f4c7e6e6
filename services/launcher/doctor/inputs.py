"""What a run trains on, as digests in RUN/inputs.json: a resume on something else is reported and refused.

    config.toml; files and folders in task.options; prompts of every split; files of the reward, composer, selector,
    loss, advantage and agent and what they import from their folder; files of the model, or the revision of a Hugging
    Face id; the adapter that training starts from

Files of the same size and time as before are not read again. Not covered: what a reward reads when it is called.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bapo.config.check import free_port_overrides
from bapo.config.load import dump_toml, load_resolved
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, RecordError
from bapo.runtime.file_digest import digest_of
from bapo.runtime.model_files import WANTED, folder_of, is_hub_id
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.doctor.situation import Situation

FILE = "inputs.json"
_CONFIG = "config config.toml"
"""Its key there."""
Inputs = dict[str, dict[str, Any]]
"""Key, such as "data train.jsonl" -> digest; files also have size and time."""


def inputs_of(situation: Situation, run: RunDirectory, before: Mapping[str, Mapping[str, Any]]) -> Inputs:
    """Digests of everything now.

    Args:
        before: earlier ones, whose files need not be read again if size and time are the same.
    Raises: ConfigError, OSError.
    """
    found: Inputs = {}
    for kind, path in _files(situation, run):
        # The run's own folder may be moved.
        key, stat = f"{kind} {path.name if kind == 'config' else path}", path.stat()
        fields: dict[str, Any] = {"size": stat.st_size, "time_ns": stat.st_mtime_ns}
        known = before.get(key, {})
        is_same = all(known.get(name) == value for name, value in fields.items()) and "digest" in known
        found[key] = fields | {"digest": known["digest"] if is_same else digest_of(path)}
    model = situation.config.model.path
    if is_hub_id(model) and (folder := folder_of(model)) is not None:
        found[f"model {model}"] = {"digest": folder.name}
    for split in situation.splits:
        ids = "\n".join(prompt.prompt_id for prompt in situation.task.prompts(split))
        found[f"prompts {split}"] = {"digest": hashlib.sha256(ids.encode()).hexdigest()}
    return found


def changes(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs, one phrase each; prompts only if no file explains them."""
    found = [f"{key} is new" for key in now.keys() - before.keys()]
    found += [f"{key} is gone" for key in before.keys() - now.keys()]
    found += [f"{key} has changed" for key in before.keys() & now.keys() if before[key]["digest"] != now[key]["digest"]]
    files = sorted(what for what in found if not what.startswith("prompts "))
    return files if any(what.startswith("data ") for what in files) else sorted(found)


def check_inputs(situation: Situation, run: RunDirectory, *, accepts: bool, how_to_accept: str) -> str:
    """Record the inputs at a first start; at a resume compare them, and record accepted changes in run.json.

    Args:
        how_to_accept: what the user does to continue with changes.
    Returns: a note for the user; empty if there is nothing to say.
    Raises: ConfigError for changes that are not accepted; RecordError, StorageError.
    """
    path, fields = run.path / FILE, run.read_run()
    before = _read(path)
    try:
        now = inputs_of(situation, run, before or {})
    except OSError as error:
        raise ConfigError(f"cannot read what run {run.path} trains on: {error}") from error
    note = ""
    if before is None and situation.is_resumed:
        note = "this run has no digests of its data, reward and model: from now on a resume compares them"
    elif before is not None and (changed := changes(before, now)):
        step = run.latest_checkpoint() or 0
        listed = "\n".join(f"  {what}" for what in changed)
        if not accepts:
            raise ConfigError(
                f"what run {run.path} trains on has changed since it began:\n{listed}\n"
                f"undo the changes, start a new run, or continue with {how_to_accept}"
            )
        run.update_run(accepted_changes=[*fields.get("accepted_changes", []), {"after_step": step, "what": changed}])
        note = f"accepted changes after step {step}:\n{listed}"
    with storing(path):
        replace_file(path, json.dumps(now, indent=1).encode())
    return note


def listen_on_free_ports(run: RunDirectory, config: Config) -> Config:
    """The config of a run with every port 0, written to its file. The file's digest follows: ports change no training.

    Raises: RecordError, StorageError.
    """
    ports, path = free_port_overrides(with_agents=config.agents is not None), run.path / FILE
    moved, known = load_resolved(run.config_path, ports), _read(path)
    was_recorded = known is not None and known.get(_CONFIG, {}).get("digest") == digest_of(run.config_path)
    with storing(run.config_path):
        replace_file(run.config_path, dump_toml(moved).encode())
    if known is not None and was_recorded:
        with storing(path):
            replace_file(path, json.dumps(known | {_CONFIG: {"digest": digest_of(run.config_path)}}, indent=1).encode())
    return moved


def _read(path: Path) -> Inputs | None:
    if not path.is_file():
        return None
    try:
        found: Inputs = msgspec.json.decode(path.read_bytes(), type=Inputs)
        _ = [fields["digest"] for fields in found.values()]
    except (OSError, msgspec.MsgspecError, KeyError) as error:
        raise RecordError(f"{path} is damaged: {error}; remove it to resume without comparing") from error
    return found


def _files(situation: Situation, run: RunDirectory) -> Iterator[tuple[str, Path]]:
    config = situation.config
    task, model = config.task, Path(config.model.path)
    yield "config", run.config_path
    yield from dict.fromkeys(("data", path) for path in _named_files(task.options))
    graders = (*task.reward_functions, task.options.get("reward"), task.name)
    names = [name for name in graders if name and ":" in name]
    yield from dict.fromkeys(("reward", path) for name in names for path in _code_files(name))
    parts = [config.algorithm.composer, config.algorithm.selector, config.loss.name, config.loss.advantage]
    yield from dict.fromkeys(("method", path) for name in parts if ":" in name for path in _code_files(name))
    if config.agents is not None and config.agents.rollout is not None:
        yield from (("agent", path) for path in _code_files(config.agents.rollout))
    if config.model.adapter is not None:
        yield from (("adapter", path) for path in sorted(Path(config.model.adapter).glob("adapter_*")))
    if model.is_dir():
        yield from (("model", path) for path in sorted({file for each in WANTED for file in model.glob(each)}))


def _named_files(value: Any) -> Iterator[Path]:
    """Existing files that options name, and those of folders."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _named_files(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _named_files(inner)
    elif isinstance(value, str) and len(value) < 4096 and "\n" not in value and Path(value).exists():
        path = Path(value)
        yield from [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _code_files(name: str) -> list[Path]:
    """The file of `[adapter:]file.py[:function]` or `[adapter:]module[:.]function`, and those it imports from its
    folder."""
    parts = [part for part in name.split(":") if part]
    candidates = [part for part in parts if part.endswith((".py", ".toml"))]
    candidates += [f"{part.replace('.', '/')}.py" for part in parts]
    candidates += [f"{part.rpartition('.')[0].replace('.', '/')}.py" for part in parts if "." in part]
    first = next(
        (file for each in candidates for root in ("", *sys.path) if (file := Path(root, each)).is_file()), None
    )
    found: dict[Path, None] = {}
    waiting = [] if first is None else [first]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += [path for imported in _imports(file) for path in _beside(file.parent, imported)]
    return sorted(found)


def _imports(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            yield from (node.module or "", *(f"{prefix}{alias.name}" for alias in node.names))


def _beside(folder: Path, module: str) -> Iterator[Path]:
    place = folder / module.replace(".", "/") if module else folder
    yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if module and path.is_file())
