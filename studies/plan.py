"""STUDY.toml -> the runs of a study, each with its whole configuration; all problems are reported at once.

[study]                     name, root, seeds, parallel ...
[common]                    settings of every run, over the preset of its method
[methods.NAME]              preset, label, seeds, may_differ
[methods.NAME.settings]     settings of this method alone, over `common`
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from bapo.algorithms.settings import Frozen
from bapo.config.check import known_keys, listening_sections, shown
from bapo.config.layers import Layer, dotted, flatten, nested, preset_names
from bapo.config.load import load_layers
from bapo.config.tree import NAME_PATTERN, Config
from bapo.core.errors import ConfigError, did_you_mean

MUST_AGREE = {
    "model": "the base model",
    "task": "the problems and the reward",
    "run.num_steps": "the number of learner steps",
    "algorithm.batch_size": "prompts per step, and with them the data order",
    "algorithm.group_size": "responses per prompt",
    "learner.minibatch_size": "groups per optimizer update",
    "learner.epochs": "passes over each batch",
    "loss.kl_coef": "the KL term",
    "loss.entropy_coef": "the entropy bonus",
    "rollout.temperature": "sampling",
    "rollout.top_p": "sampling",
    "rollout.stop": "sampling",
    "rollout.max_prompt_tokens": "sampling",
    "rollout.max_response_tokens": "sampling",
    "evaluation": "the evaluation",
}
"""Section or key -> why."""
NOT_MEASUREMENT = ("evaluation.port",)


def must_agree(config: Config) -> dict[str, tuple[object, str]]:
    """Dotted key -> (its value, what it fixes), for every setting that all methods share."""
    found: dict[str, tuple[object, str]] = {}
    for key, value in flatten(config.model_dump()):
        name = dotted(key)
        parts = (part for part in MUST_AGREE if name == part or name.startswith(f"{part}."))
        for part in parts:
            if name not in NOT_MEASUREMENT:
                found[name] = (value, MUST_AGREE[part])
    return found


def unfair_differences(configs: Mapping[str, Config], may_differ: Mapping[str, Sequence[str]]) -> list[str]:
    """One line per setting in which a method differs from the first one, though it should not.

    Args:
        configs: method -> its configuration, all at the same place of their seeds.
        may_differ: method -> settings that are excepted for it.
    """
    if not configs:
        return []
    (first, reference), *others = [(name, must_agree(config)) for name, config in configs.items()]
    problems = []
    for name, settings in others:
        for key in dict.fromkeys([*reference, *settings]):
            value, wanted = _value(settings, key), _value(reference, key)
            excepted = (*may_differ.get(name, ()), *may_differ.get(first, ()))
            if value != wanted and not any(key == part or key.startswith(f"{part}.") for part in excepted):
                why = (reference.get(key) or settings[key])[1]
                problems.append(
                    f"methods.{name}: {key} = {_shown(value)}, but {_shown(wanted)} in methods.{first}: {why} must be "
                    f'the same for all methods; change it, or set may_differ = ["{key}"] in [methods.{name}]'
                )
    return problems


def unknown_exceptions(may_differ: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """One line per excepted key that is none of those which must agree."""
    for name, keys in may_differ.items():
        for key in keys:
            if not any(key == part or key.startswith(f"{part}.") for part in MUST_AGREE):
                hint = did_you_mean(key, [*MUST_AGREE, *known_keys()])
                yield f"methods.{name}.may_differ: {key} may differ between methods anyway{hint}"


_ABSENT = object()


def _value(settings: Mapping[str, tuple[object, str]], key: str) -> object:
    return settings[key][0] if key in settings else _ABSENT


def _shown(value: object) -> str:
    return "not set" if value is _ABSENT else shown(value)


METHOD_PATTERN = r"^[a-z0-9][a-z0-9.-]{0,39}$"
"""Part of a run's name: `bapo-without-x2` with seed 3 is the run `bapo-without-x2-s3`."""
PORTS = [f"{section}.port" for section in listening_sections(with_agents=True)]
RESERVED = ("preset", "run.name", "run.root", "run.seed", *PORTS)
"""What the study sets itself, for every run."""


class StudySettings(Frozen):
    name: str = Field(pattern=NAME_PATTERN)
    """Its directory is `<root>/<name>`."""
    root: str = "outputs"
    seeds: tuple[int, ...] = Field(min_length=1)
    """Seeds of every method that names none itself."""
    seed_keys: tuple[str, ...] = ()
    """Settings besides `run.seed` that take the seed, for example task.options.seed: other training problems."""
    parallel: int | Literal["auto"] = "auto"
    """Runs at the same time; auto: as many as cores and memory carry."""


class MethodSettings(Frozen):
    preset: str
    label: str = ""
    """What tables and figures call it; empty: its name."""
    seeds: tuple[int, ...] | None = Field(None, min_length=1)
    """Instead of those of the study."""
    may_differ: tuple[str, ...] = ()
    """Settings that make the comparison unequal and are meant to: reports say so next to the method."""
    settings: dict[str, Any] = Field(default_factory=dict)


class StudyFile(Frozen):
    study: StudySettings
    common: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, MethodSettings] = Field(min_length=1)
    """The first one is what the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    method: str
    seed: int
    path: Path
    config: Config

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    path: Path
    file: StudyFile
    text: str
    runs: tuple[PlannedRun, ...]
    """Seed after seed, so that a study that is cut short has all methods at its first seeds."""


def read_study(path: str | Path, only: Sequence[str] = ()) -> Study:
    """The plan of a file.

    Args:
        only: methods to plan, instead of all.
    Raises: ConfigError with one line per problem.
    """
    text = _read(Path(path))
    file = parse_study(text, str(path))
    _refuse_unknown(only, file.methods)
    names = [name for name in file.methods if not only or name in only]
    folder = Path(file.study.root) / file.study.name
    configs: dict[tuple[str, int], Config] = {}
    alike: dict[str, Config] = {}
    problems: list[str] = []
    for name in names:
        try:
            configs |= {(name, seed): _config(file, name, seed, folder, str(path)) for seed in seeds_of(file, name)}
            # At one seed for all, so that what follows the seed is not a difference between methods.
            alike[name] = _config(file, name, file.study.seeds[0], folder, str(path))
        except ConfigError as error:
            problems += [f"{_place(text, name, str(path))}: {line}" for line in str(error).splitlines()]
    problems += [
        f"{_place(text, name, str(path))}: evaluation.patience: a study compares runs of one length; remove it"
        for name, config in alike.items()
        if config.evaluation.patience is not None
    ]
    problems += unfair_differences(alike, {name: file.methods[name].may_differ for name in names})
    if problems:
        raise ConfigError("\n".join(problems))
    return Study(path=folder, file=file, text=text, runs=tuple(_in_order(names, file, configs, folder)))


def parse_study(text: str, source: str) -> StudyFile:
    """The file's own keys; those of the configurations are checked later. Raises: ConfigError."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from error
    if "study" not in values and not {"preset", "run", "model"}.isdisjoint(values):
        raise ConfigError(f"{source}: this is a run, not a study; start it with: bapo train {source}")
    problems = [*_unknown_keys(values), *_reserved_keys(values), *_bad_names(values)]
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    try:
        file = StudyFile.model_validate(values)
    except ValidationError as error:
        lines = [f"{source}: {dotted(line['loc'])}: {line['msg']}" for line in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from error
    exceptions = {name: method.may_differ for name, method in file.methods.items()}
    problems = [*unknown_exceptions(exceptions), *_bad_numbers(file)]
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return file


def seeds_of(file: StudyFile, method: str) -> tuple[int, ...]:
    own = file.methods[method].seeds
    return file.study.seeds if own is None else own


def run_name(method: str, seed: int) -> str:
    return f"{method}-s{seed}"


def _config(file: StudyFile, name: str, seed: int, folder: Path, source: str) -> Config:
    method = file.methods[name]
    own: dict[str, Any] = {"run": {"name": run_name(name, seed), "root": str(folder / "runs"), "seed": seed}}
    with_agents = "agents" in file.common or "agents" in method.settings
    own |= {section: {"port": 0} for section in listening_sections(with_agents=with_agents)}
    layers = [
        Layer(source=f"preset {method.preset}", values={"preset": method.preset}),
        Layer(source=f"{source} [common]", values=file.common),
        Layer(source=f"{source} [methods.{name}.settings]", values=method.settings),
        Layer(source="the study", values=own),
    ]
    layers += [Layer(source=f"seed key {key}", values=nested(key.split("."), seed)) for key in file.study.seed_keys]
    return load_layers(layers)


def _in_order(
    names: Sequence[str], file: StudyFile, configs: Mapping[tuple[str, int], Config], folder: Path
) -> Iterator[PlannedRun]:
    longest = max(len(seeds_of(file, name)) for name in names)
    for place in range(longest):
        for name in names:
            if place < len(seeds_of(file, name)):
                seed = seeds_of(file, name)[place]
                path = folder / "runs" / run_name(name, seed)
                yield PlannedRun(method=name, seed=seed, path=path, config=configs[name, seed])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _unknown_keys(values: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown(values, StudyFile.model_fields, "")
    if isinstance(values.get("study"), Mapping):
        yield from _unknown(values["study"], StudySettings.model_fields, "study.")
    methods = values.get("methods")
    for name, method in methods.items() if isinstance(methods, Mapping) else ():
        if isinstance(method, Mapping):
            yield from _unknown(method, MethodSettings.model_fields, f"methods.{name}.")


def _unknown(values: Mapping[str, Any], known: Collection[str], prefix: str) -> Iterator[str]:
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known) or f"; known keys: {', '.join(known)}"
            yield f"{prefix}{key}: unknown key{hint}"


def _reserved_keys(values: Mapping[str, Any]) -> Iterator[str]:
    """A setting that the study gives to every run."""
    methods = values.get("methods")
    parts: list[tuple[str, Any]] = [("common", values.get("common"))]
    for name, method in methods.items() if isinstance(methods, Mapping) else ():
        parts.append((f"methods.{name}.settings", method.get("settings") if isinstance(method, Mapping) else None))
    for place, settings in parts:
        for key, _ in flatten(settings) if isinstance(settings, Mapping) else ():
            if dotted(key) in RESERVED:
                yield f"{place}.{dotted(key)}: the study sets it for every run; remove this line"


def _bad_names(values: Mapping[str, Any]) -> Iterator[str]:
    methods = values.get("methods")
    for name in methods if isinstance(methods, Mapping) else ():
        if not re.fullmatch(METHOD_PATTERN, name):
            yield f"methods.{name}: method names must be at most 40 lower-case letters, digits, dots and hyphens"


def _bad_numbers(file: StudyFile) -> Iterator[str]:
    if file.study.parallel != "auto" and file.study.parallel < 1:
        yield f'study.parallel = {file.study.parallel}: must be at least 1, or "auto"'
    places = {"study.seeds": file.study.seeds}
    places |= {f"methods.{name}.seeds": method.seeds for name, method in file.methods.items() if method.seeds}
    for place, seeds in places.items():
        if len(set(seeds)) < len(seeds):
            yield f"{place} = {list(seeds)}: duplicate seed"


def _refuse_unknown(only: Sequence[str], methods: Collection[str]) -> None:
    for name in only:
        if name not in methods:
            hint = did_you_mean(name, methods)
            raise ConfigError(f"--only {name}: unknown method{hint}; the study has {', '.join(methods)}")


def _place(text: str, method: str, source: str) -> str:
    """Where a method stands in the file: its `preset` line if that names none that exists, else its table."""
    lines = text.splitlines()
    starts = [
        number for number, line in enumerate(lines) if re.match(rf"\s*\[methods\.\"?{re.escape(method)}\"?\]", line)
    ]
    if not starts:
        return f"{source} [methods.{method}]"
    for number in range(starts[0] + 1, len(lines)):
        found = re.match(r"\s*preset\s*=\s*[\"']([^\"']*)[\"']", lines[number])
        if found and found[1] not in preset_names():
            return f"{source} line {number + 1} [methods.{method}]"
        if found or lines[number].lstrip().startswith("["):
            break
    return f"{source} line {starts[0] + 1} [methods.{method}]"
