"""Runs or a study -> methods with their runs, and what a reader must know about them before any number.

Runs that were measured differently are refused. Two runs belong to one method when their names differ only in the seed
(`bapo-s1`, `bapo-s2`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from bapo.config.check import shown
from bapo.config.layers import dotted, flatten
from bapo.config.load import load_recorded
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.types import GroupResult
from bapo.runtime.build_info import short
from bapo.runtime.run_directory.curves import BASE_VERSION, first_results
from bapo.runtime.run_directory.layout import RunDirectory
from studies.ledger import LEDGER_FILE, Ledger, ledger_of, read_ledger
from studies.plan import StudyFile, must_agree, parse_study
from studies.state import Results

Row = Mapping[str, Any]
TRAINING = ("algorithm", "cadence", "learner", "loss", "model", "rollout", "run", "shaping", "task")
"""Sections whose settings change what a run trains."""
FOLLOWING = ("preset", "run.name", "run.root", "run.seed", "task.options.seed")
"""Settings that follow from which run it is; the first seeds of two methods may differ, and the problems with them."""
MEASUREMENT = ("evaluation", "rollout.temperature", "rollout.top_p", "rollout.stop", "rollout.max_response_tokens")
"""Parts of the configuration that say how a run was measured."""
WHEN = "evaluation.at_responses"
"""Says when: differences at equal responses are at a number that both have."""


def prompt_means(row: Row) -> dict[str, float]:
    """Prompt id -> share of right responses of a measurement."""
    return {prompt: sum(rewards) / len(rewards) for prompt, rewards in row["rewards"].items()}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run and what its records say; the larger ones are read when they are asked for."""

    method: str
    seed: int
    directory: RunDirectory
    config: Config
    metrics: tuple[Row, ...]
    evaluations: tuple[Row, ...]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def num_steps(self) -> int:
        return len(self.metrics)

    @property
    def num_updates(self) -> int:
        """Optimizer updates done, all steps together."""
        return sum(int(row["num_updates"]) for row in self.metrics)

    @property
    def has_groups(self) -> bool:
        return bool(self.directory.group_steps())

    @property
    def is_archived(self) -> bool:
        """Whether an archive has its ledger instead of its group records (`benchmarks.archive`)."""
        return not self.has_groups and (self.directory.path / LEDGER_FILE).is_file()

    @cached_property
    def groups(self) -> list[tuple[int, list[GroupResult]]]:
        """(step, its results): every group that its assembly saw."""
        return list(self.directory.read_groups())

    @cached_property
    def sampled(self) -> list[tuple[int, list[GroupResult]]]:
        """(step, results), each sampled group only in the first step that read it."""
        return list(first_results(self.groups))

    @cached_property
    def ledger(self) -> Ledger:
        """From the group records, or where an archive has none from its ledger."""
        if self.is_archived:
            return read_ledger(self.directory.path / LEDGER_FILE, self.evaluations, self.metrics)
        return ledger_of(self.groups, self.evaluations, self.metrics)

    @cached_property
    def wall_s(self) -> float | None:
        """From start to end; None for a live run or one that was started more than once."""
        fields = self.directory.read_run()
        started, ended = fields.get("started_at"), fields.get("ended_at")
        if not started or not ended or not self.metrics or self.metrics[0].get("time", 0) < started:
            return None
        return float(ended) - float(started)

    def rows(self, split: str) -> list[Row]:
        return [row for row in self.evaluations if row["split"] == split]

    def before(self, split: str) -> Row | None:
        """The measurement of the base model."""
        return next((row for row in self.rows(split) if row["version"] == BASE_VERSION), None)

    def after(self, split: str) -> Row | None:
        """The last measurement, if it is not that of the base model."""
        rows = self.rows(split)
        return rows[-1] if rows and rows[-1]["version"] != BASE_VERSION else None

    def means(self, split: str, *, last: bool) -> dict[str, float]:
        """Prompt id -> share of right responses, before (version 1) or after training; empty if not measured."""
        row = self.after(split) if last else self.before(split)
        return {} if row is None else prompt_means(row)


@dataclass(frozen=True, kw_only=True)
class Method:
    name: str
    label: str
    runs: tuple[Measured, ...]
    may_differ: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Methods that may be compared; the first is the one that the others are compared with, unless others are named."""

    name: str
    methods: tuple[Method, ...]
    references: tuple[str, ...] = ()
    """Names of the methods that the others are compared with (`studies.compare.gather.against`)."""
    unfinished: tuple[str, ...] = ()
    """Runs that are left out, and why."""

    @property
    def reference(self) -> Method:
        """The method that the others are compared with, or the first of several."""
        return next((m for m in self.methods if m.name in self.references[:1]), self.methods[0])

    @property
    def others(self) -> tuple[Method, ...]:
        return tuple(method for method in self.methods if method.name != self.reference.name)

    @property
    def splits(self) -> tuple[str, ...]:
        """Held-out splits that every run measured."""
        runs = [run for method in self.methods for run in method.runs]
        first = dict.fromkeys(row["split"] for row in runs[0].evaluations)
        return tuple(split for split in first if all(run.rows(split) for run in runs))

    @property
    def own_splits(self) -> tuple[str, ...]:
        """Those at their own temperature. `SPLIT@0.3` has the same prompts, and is measured only before and after
        training: a mean over both counts prompts twice, and has no points in between."""
        return tuple(split for split in self.splits if "@" not in split)


def gather(paths: Sequence[str | Path]) -> Compared:
    """Runs, or one study, as methods.

    Raises: ConfigError when a path is not a run, a run has no finished step, or runs were measured differently.
    """
    if len(paths) == 1 and (Path(paths[0]) / "study.toml").is_file():
        return _gather_study(Path(paths[0]))
    runs = [read_run(path) for path in paths]
    names = list(dict.fromkeys(run.method for run in runs))
    methods = [Method(name=name, label=name, runs=_of(runs, name)) for name in names]
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return _checked(Compared(name=name, methods=tuple(methods)))


def read_run(path: str | Path) -> Measured:
    directory = RunDirectory.open(path)
    config = load_recorded(directory.config_path)
    if config.sft is not None:
        raise ConfigError(f"run {directory.path} is supervised fine-tuning: it has no rewards to compare")
    metrics = directory.read_metrics(whole=True)
    if not metrics:
        raise ConfigError(f"run {directory.path} has no finished step yet: nothing to compare")
    evaluations = sorted(directory.read_evaluations(whole=True), key=lambda row: int(row["version"]))
    suffix = f"-s{config.run.seed}"
    return Measured(
        method=directory.name.removesuffix(suffix),
        seed=config.run.seed,
        directory=directory,
        config=config,
        metrics=tuple(metrics),
        evaluations=tuple(evaluations),
    )


def _gather_study(folder: Path) -> Compared:
    file: StudyFile = parse_study((folder / "study.toml").read_text(encoding="utf-8"), str(folder / "study.toml"))
    states = {row["run"]: row for row in Results(folder).read()}
    runs, unfinished = [], []
    for path in sorted((folder / "runs").glob("*/config.toml")):
        method, _, seed = path.parent.name.rpartition("-s")
        if method not in file.methods or not seed.isdecimal():
            continue  # not a run of the study: `bapo eval` writes its results next to the run
        run = RunDirectory.open(path.parent)
        status = str(run.read_run().get("status", "killed"))
        if status == "finished":
            runs.append(read_run(run.path))
        else:
            reason = str(states.get(run.name, {}).get("reason", ""))
            unfinished.append(f"{run.name} ({status}{': ' + reason if reason else ''})")
    methods = [
        Method(name=name, label=settings.label or name, runs=_of(runs, name), may_differ=settings.may_differ)
        for name, settings in file.methods.items()
        if any(run.method == name for run in runs)
    ]
    if not methods:
        raise ConfigError(f"study {folder} has no finished run yet")
    return _checked(Compared(name=file.study.name, methods=tuple(methods), unfinished=tuple(unfinished)))


def _of(runs: Sequence[Measured], method: str) -> tuple[Measured, ...]:
    own = sorted((run for run in runs if run.method == method), key=lambda run: run.seed)
    for first, second in pairwise(own):
        if first.seed == second.seed:
            raise ConfigError(
                f"{first.directory.path} and {second.directory.path} are both {method} with seed {first.seed}; "
                "pass each method and seed once"
            )
    return tuple(own)


def _checked(compared: Compared) -> Compared:
    """Refuse runs whose accuracies say different things. Raises: ConfigError with one line per difference."""
    runs = [run for method in compared.methods for run in method.runs]
    problems = [line for run in runs[1:] for line in unlike(runs[0], run)]
    if problems:
        raise ConfigError("\n".join(problems))
    return _without_unmeasured(compared)


def _without_unmeasured(compared: Compared) -> Compared:
    """Without the runs that were measured before training alone, where another seed of their method was measured after
    it: they are not part of its accuracy, so not of its number of seeds and its costs either."""
    methods, left_out = [], []
    for method in compared.methods:
        measured = tuple(run for run in method.runs if any(run.after(row["split"]) for row in run.evaluations))
        if measured:
            left_out += [run for run in method.runs if run not in measured]
        methods.append(replace(method, runs=measured or method.runs))
    why = [f"{run.name} ({UNMEASURED})" for run in left_out]
    return replace(compared, methods=tuple(methods), unfinished=(*compared.unfinished, *why))


def unlike(first: Measured, other: Measured) -> list[str]:
    """One line per way in which two runs were measured differently."""
    problems = []
    ours, theirs = must_agree(first.config), must_agree(other.config)
    for key in dict.fromkeys([*ours, *theirs]):
        is_measurement = any(key == part or key.startswith(f"{part}.") for part in MEASUREMENT)
        a, b = (settings[key][0] if key in settings else None for settings in (ours, theirs))
        if is_measurement and key != WHEN and a != b:
            problems.append(_difference(first, other, f"{key} = {a}", f"{b}"))
    splits = [list(dict.fromkeys(str(row["split"]) for row in run.evaluations)) for run in (first, other)]
    if set(splits[0]) != set(splits[1]):
        problems.append(_difference(first, other, f"held-out splits {splits[0]}", f"{splits[1]}"))
    for split in set(splits[0]) & set(splits[1]):
        problems += _unlike_rows(first, other, split)
    return problems


def _unlike_rows(first: Measured, other: Measured, split: str) -> list[str]:
    """What the measurements themselves say: the same prompts, as many responses, the same sampling."""
    a, b = first.rows(split)[-1], other.rows(split)[-1]
    problems = [
        _difference(first, other, f"{key} of {split} = {a.get(key)}", f"{b.get(key)}")
        for key in ("num_samples", "sampling", "interval")
        if a.get(key) != b.get(key)
    ]
    if set(a["rewards"]) != set(b["rewards"]):
        shared = len(set(a["rewards"]) & set(b["rewards"]))
        both = f"only {shared} prompts in common"
        problems.append(
            _difference(first, other, f"{len(a['rewards'])} prompts of {split}", f"{len(b['rewards'])}, {both}")
        )
    return problems


def _difference(first: Measured, other: Measured, ours: str, theirs: str) -> str:
    return f"{first.name} was evaluated with {ours}, {other.name} with {theirs}: their accuracies are not comparable"


def changed_settings(base: Method, method: Method) -> dict[str, str]:
    """Dotted key -> value, for every setting in which a method differs from another one."""
    ours, theirs = (dict(flatten(m.config.model_dump())) for m in (base, method))
    filled = {key[:-1] for key in [*theirs, *ours]}
    keys = {dotted(key): key for key in [*theirs, *ours] if ours.get(key) != theirs.get(key) and key not in filled}
    return {name: shown(theirs.get(key)) for name, key in keys.items() if name not in FOLLOWING}


def changed_keys(base: Method, method: Method) -> set[str]:
    return set(changed_settings(base, method))


# Which methods are compared with which: references by `--against`, and BAPO with DAPO whenever both are there.

RIVALS = ("bapo", "dapo")
"""A method and the one that the paper holds against it (its figures 5 and 9)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A method against a reference: differences are method - reference."""

    method: Method
    reference: Method


def against(compared: Compared, names: Sequence[str]) -> Compared:
    """The same runs with these methods as references, the first of them for tables and figures that have one.

    Args:
        names: methods by name or label; none: the first method of all.
    Raises: ConfigError for one that is not there.
    """
    return replace(
        compared, references=tuple(dict.fromkeys(method_named(compared, name, "--against ").name for name in names))
    )


def contrasts(compared: Compared) -> tuple[Contrast, ...]:
    """Each method against each reference, a pair once; without `--against` also BAPO against DAPO."""
    by_name = {method.name: method for method in compared.methods}
    references = [by_name[name] for name in compared.references] or [compared.reference]
    found: list[Contrast] = []
    for place, reference in enumerate(references):
        done = [reference.name, *(earlier.name for earlier in references[:place])]
        found += [Contrast(method=m, reference=reference) for m in compared.methods if m.name not in done]
    if not compared.references and compared.reference.name not in RIVALS and by_name.keys() >= set(RIVALS):
        ours, theirs = (by_name[name] for name in RIVALS)
        found.append(Contrast(method=ours, reference=theirs))
    return tuple(found)


def method_named(compared: Compared, word: str, option: str = "") -> Method:
    """The method with this name or label. Raises: ConfigError that begins with `option` for one that is not there."""
    for method in compared.methods:
        if word in (method.name, method.label):
            return method
    names = [method.name for method in compared.methods]
    known = ", ".join(names)
    raise ConfigError(f"{option}{word}: unknown method{did_you_mean(word, names)}; these runs have {known}")


NOT_RECORDED = "not recorded"
UNMEASURED = "evaluated only before training"
MANY = 4
"""Runs of one commit. Of more, the largest group is counted and not named."""
UNEQUAL_UPDATES = 0.05
"""Share by which the optimizer updates of two methods may differ without a remark."""


def remarks(compared: Compared) -> list[str]:
    lines = [f"excluded: {name}" for name in compared.unfinished]
    lines += [line for method in compared.methods for line in _unlike_seeds(method)]
    for key, values in other_differences(compared).items():
        kinds = (
            f"{value} ({', '.join(n for n in values if values[n] == value)})"
            for value in dict.fromkeys(values.values())
        )
        lines.append(f"{key} differs between runs: {', '.join(kinds)}")
    seeds = {method.label: method.seeds for method in compared.methods}
    if len(set(seeds.values())) > 1:
        lines.append("seeds: " + "; ".join(f"{name} {' '.join(map(str, own))}" for name, own in seeds.items()))
    if names := [run.name for method in compared.methods for run in method.runs if run.is_archived]:
        lines.append(
            f"without group records, so that some cells are dashes and some tables missing: {', '.join(names)}"
        )
    return [*lines, *_not_after_training(compared), *_unequal_updates(compared), *_different_commits(compared)]


def _unlike_seeds(method: Method) -> Iterator[str]:
    """Runs of one name are taken for seeds of one method, whatever their settings are."""
    first, *others = method.runs
    base = Method(name=method.name, label=method.label, runs=(first,))
    for run in others:
        changed = changed_settings(base, replace(base, runs=(run,)))
        own = {key: value for key, value in changed.items() if _trains_otherwise(key)}
        if own:
            listed = ", ".join(f"{key} = {value}" for key, value in own.items())
            yield f"{run.name} is not another seed of {first.name}: {listed}"


def _trains_otherwise(key: str) -> bool:
    """Whether a setting changes what a run trains, not how it is run."""
    section, _, name = key.partition(".")
    return section in TRAINING and not name.endswith(("seed", "port", "host"))


def _not_after_training(compared: Compared) -> Iterator[str]:
    """A run that has not ended is compared by its last evaluation of each split, if there is one after the base's."""
    for run in (run for method in compared.methods for run in method.runs):
        num_steps = run.config.run.num_steps
        last = {str(row["split"]): int(row["version"]) - 1 for row in run.evaluations}
        for step in sorted({step for step in last.values() if step < num_steps}):
            own = [split for split in last if last[split] == step]
            where = "" if len(own) == len(last) else f" ({', '.join(own)})"
            when = f"last evaluated after step {step} of {num_steps}" if step else UNMEASURED
            yield f"{run.name} was {when}{where}"


def _unequal_updates(compared: Compared) -> list[str]:
    """Equal learner steps need not be equal optimizer updates: a batch that is not full has fewer mini-batches."""
    means = {m.label: sum(run.num_updates for run in m.runs) / len(m.runs) for m in compared.methods}
    if max(means.values()) <= (1 + UNEQUAL_UPDATES) * min(means.values()):
        return []
    numbers = "; ".join(f"{name} {mean:.0f}" for name, mean in means.items())
    return [f"optimizer updates differ by more than {UNEQUAL_UPDATES:.0%}, means over seeds: {numbers}"]


def _different_commits(compared: Compared) -> list[str]:
    by_code: dict[str, list[str]] = {}
    for method in compared.methods:
        for run in method.runs:
            by_code.setdefault(code_of(run.directory.read_run()), []).append(run.name)
    if len(by_code) < 2:
        return []
    most = max(by_code.values(), key=len)
    groups = (
        f"{code} ({f'the other {len(names)}' if names is most and len(names) > MANY else ', '.join(names)})"
        for code, names in by_code.items()
    )
    return [f"different commits: {'; '.join(groups)}"]


def code_of(fields: Mapping[str, Any]) -> str:
    """What run.json says of the code that made a run, in words."""
    if "commit" not in fields:
        return NOT_RECORDED
    starts = [*fields.get("earlier_commits", []), fields["commit"]]
    if starts == [None]:
        return f"version {fields.get('versions', {}).get('bapo', 'unknown')}"
    return " then ".join(NOT_RECORDED if one is None else short(one) for one in starts)


def other_differences(compared: Compared) -> dict[str, dict[str, str]]:
    """Setting -> method -> value, for each setting that must agree in a study and does not between these runs."""
    values = {method.name: must_agree(method.config) for method in compared.methods}
    keys = dict.fromkeys(key for settings in values.values() for key in settings)
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        row = {name: str(settings[key][0]) if key in settings else "not set" for name, settings in values.items()}
        if len(set(row.values())) > 1:
            found[key] = row
    return found
