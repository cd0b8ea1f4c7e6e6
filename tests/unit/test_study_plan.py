"""STUDY.toml: what it means, what is refused before anything starts, and what must be the same for all methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from bapo.config.layers import flatten
from bapo.config.load import dump_toml
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory
from studies.plan import Study, parse_study, read_study
from studies.state import State, changed, inspect_run


def study_values(**study: Any) -> dict[str, Any]:
    return {
        "study": {"name": "mine", "seeds": [1, 2], **study},
        "common": {"run": {"num_steps": 3}, "algorithm": {"batch_size": 8}, "learner": {"minibatch_size": 4}},
        "methods": {"plain": {"preset": "grpo"}, "ours": {"preset": "bapo"}},
    }


def write(folder: Path, values: dict[str, Any]) -> Path:
    values["study"].setdefault("root", str(folder / "outputs"))
    folder.mkdir(exist_ok=True)
    path = folder / "STUDY.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def plan(folder: Path, values: dict[str, Any] | None = None, only: tuple[str, ...] = ()) -> Study:
    return read_study(write(folder, values or study_values()), only)


def refusal(folder: Path, values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(folder, values)
    return str(caught.value)


def test_runs_come_seed_after_seed_so_that_a_short_study_has_all_methods(tmp_path: Path) -> None:
    study = plan(tmp_path)
    assert [run.name for run in study.runs] == ["plain-s1", "ours-s1", "plain-s2", "ours-s2"]
    assert [run.config.run.seed for run in study.runs] == [1, 1, 2, 2]
    assert study.runs[0].path == tmp_path / "outputs" / "mine" / "runs" / "plain-s1"


def test_settings_lie_over_common_and_common_over_the_preset(tmp_path: Path) -> None:
    values = study_values()
    values["common"]["loss"] = {"clip_high": 0.3}
    values["methods"]["ours"]["settings"] = {"loss": {"clip_high": 0.4}}
    plain, ours = (run.config for run in plan(tmp_path, values).runs[:2])
    assert (plain.loss.clip_high, ours.loss.clip_high) == (0.3, 0.4)
    assert (plain.loss.clip_low, plain.algorithm.composer, ours.algorithm.composer) == (0.2, "grpo", "bapo")


def test_runs_of_a_study_take_free_ports_for_they_are_concurrent(tmp_path: Path) -> None:
    values = study_values()
    values["common"]["agents"] = {"rollout": "agent.py:rollout"}
    config = plan(tmp_path, values).runs[0].config.model_dump()
    ports = {name: section["port"] for name, section in config.items() if "port" in (section or ())}
    assert {"dashboard", "agents"} <= set(ports)
    assert plan(tmp_path).runs[0].config.agents is None
    assert set(ports.values()) == {0}


def test_only_plans_the_named_methods_and_hints_at_a_misspelt_one(tmp_path: Path) -> None:
    assert [run.name for run in plan(tmp_path, only=("ours",)).runs] == ["ours-s1", "ours-s2"]
    with pytest.raises(ConfigError, match="--only our"):
        plan(tmp_path, only=("our",))


def test_a_preset_that_does_not_exist_is_an_error_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "STUDY.toml"
    path.write_text(
        f'[study]\nname = "s"\nroot = "{tmp_path}"\nseeds = [1]\n\n'
        '[methods.first]\nlabel = "1"\npreset = "bapoo"\n\n[methods.second]\npreset = "grpo"\n'
    )
    with pytest.raises(ConfigError) as caught:
        read_study(path)
    assert str(caught.value) == (
        f"{path} line 8 [methods.first]: preset = 'bapoo': unknown preset (did you mean 'bapo'?); "
        "start with grpo, dapo, bapo-v1 or bapo; `bapo config presets` lists all"
    )
    assert [run.name for run in read_study(path, ["second"]).runs] == ["second-s1"]


@pytest.mark.parametrize(
    ("section", "key", "value", "wanted"),
    [
        ("run", "num_steps", 4, "run.num_steps = 4, but 3 in methods.plain: the number of learner steps"),
        (
            "model",
            "path",
            "other",
            'model.path = "other", but "models/countdown-tiny" in methods.plain: the base model',
        ),
        ("evaluation", "num_samples", 9, "evaluation.num_samples = 9, but 2 in methods.plain: the evaluation"),
        ("learner", "epochs", 2, "learner.epochs = 2, but 1 in methods.plain: passes over each batch"),
        ("task", "options", {"num_train": 9}, "task.options.num_train = 9, but not set in methods.plain"),
    ],
)
def test_methods_that_are_not_comparable_are_refused_with_the_setting(
    tmp_path: Path, section: str, key: str, value: Any, wanted: str
) -> None:
    values = study_values()
    values["methods"]["ours"]["settings"] = {section: {key: value}}
    assert f"methods.ours: {wanted}" in refusal(tmp_path, values)
    name = "task.options" if section == "task" else f"{section}.{key}"
    values["methods"]["ours"]["may_differ"] = [name]
    assert len(plan(tmp_path, values).runs) == 4


CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("study-*.toml")), ids=lambda path: path.stem)
def test_a_shipped_study_is_fair(path: Path) -> None:
    methods = parse_study(path.read_text(), path.name).methods
    runs = read_study(path).runs
    # Two seeds choose settings, and are no result.
    assert len(runs) >= (2 if path.stem == "study-tuning" else 3) * len(methods)
    alike = [run for run in runs if "run.num_steps" not in methods[run.method].may_differ]
    assert len({run.config.run.num_steps for run in alike}) == 1


def test_the_arms_of_the_mixture_differ_in_who_is_sampled_a_second_time() -> None:
    study = read_study(CONFIGS / "study-mixture.toml")
    configs = {run.method: run.config for run in study.runs if run.seed == 41}
    x2, control = (dict(flatten(configs[name].model_dump())) for name in ("reuse-x2", "reuse-random"))
    assert {key: (x2[key], control[key]) for key in x2 if x2[key] != control[key] and key[0] != "run"} == {
        ("algorithm", "options", "which"): ("hard", "any")
    }
    assert all(config.evaluation.at_responses == [30720] for config in configs.values())
    used = {
        run.seed
        for path in CONFIGS.glob("study-*.toml")
        if path.stem != "study-mixture"
        for run in read_study(path).runs
    }
    assert not used & {run.seed for run in study.runs}


def test_a_second_pass_one_step_later_is_compared_with_one_at_once() -> None:
    study = read_study(CONFIGS / "study-controls.toml")
    later, at_once = (
        dict(flatten(next(run.config for run in study.runs if run.method == name).model_dump()))
        for name in ("bapo-reuse", "two-passes")
    )
    assert {key: (later[key], at_once[key]) for key in later if later[key] != at_once[key] and key[0] != "run"} == {
        ("algorithm", "use_x3"): (True, False),
        ("learner", "epochs"): (1, 2),
    }


def test_ppo_and_ba_ppo_differ_in_the_batch_alone() -> None:
    study = read_study(CONFIGS / "study-ppo.toml")
    ppo, ba_ppo = (next(run.config for run in study.runs if run.method == name) for name in ("ppo", "ba-ppo"))
    own = {"preset", "run", "algorithm", "cadence"}
    assert ppo.model_dump(exclude=own) == ba_ppo.model_dump(exclude=own)
    assert (ppo.algorithm.composer, ba_ppo.algorithm.composer) == ("grpo", "bapo")
    assert (ppo.algorithm.batch_size, ppo.algorithm.group_size) == (32, 8)


# -- what there is already


def make(study: Study, index: int, status: str | None, *, checkpoint: int | None = None) -> RunDirectory:
    run = RunDirectory.create(study.runs[index].path, dump_toml(study.runs[index].config))
    if status:
        run.update_run(status=status)
    if checkpoint:
        run.checkpoint_dir(checkpoint).mkdir()
        (run.checkpoint_dir(checkpoint) / "state.json").write_text("{}")
    return run


@pytest.mark.parametrize(
    ("status", "checkpoint", "state", "words"),
    [
        ("finished", 3, State.FINISHED, "plain-s1: finished, kept"),
        ("failed", 2, State.RESUME, "plain-s1: resumed from its checkpoint after step 2 (it was failed)"),
        ("running", 2, State.RESUME, "plain-s1: resumed from its checkpoint after step 2 (it was killed)"),
        ("interrupted", None, State.RESTART, "plain-s1: restarted at step 1, it had no checkpoint yet (it was inter"),
        (None, None, State.RESTART, "plain-s1: restarted at step 1, it had no checkpoint yet"),
    ],
)
def test_a_run_on_disk_is_kept_continued_or_started_anew_and_says_so(
    tmp_path: Path, status: str | None, checkpoint: int | None, state: State, words: str
) -> None:
    study = plan(tmp_path)
    make(study, 0, status, checkpoint=checkpoint)
    found = inspect_run(study.runs[0])
    assert (found.state, str(found).startswith(words)) == (state, True), str(found)


def test_a_run_that_was_never_begun_is_new(tmp_path: Path) -> None:
    study = plan(tmp_path)
    assert inspect_run(study.runs[0]).state is State.NEW
    study.runs[0].path.mkdir(parents=True)  # killed between the folder and its configuration
    assert inspect_run(study.runs[0]).state is State.NEW


def test_runs_made_with_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    make(plan(tmp_path), 1, "finished")
    values = study_values()
    values["methods"]["ours"]["settings"] = {"learner": {"lr": 0.25}}
    study = plan(tmp_path, values)
    with pytest.raises(ConfigError, match=r"ours-s1 .*learner\.lr: 1e-06 -> 0\.25"):
        changed(study.runs)
