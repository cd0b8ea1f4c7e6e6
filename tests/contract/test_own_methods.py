"""A composer, a selector and a loss of a user's own, in a folder of theirs: the examples of CONTRIBUTING."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bapo.algorithms.composer import AssemblyView, Decision
from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.selectors.base import PromptPool
from bapo.algorithms.selectors.registry import load_selector
from bapo.config.load import diff, dump_toml, load_config, load_recorded, load_resolved
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from learner.losses.base import load_loss
from tests.support.factories import make_stat
from tests.support.learner import learner_config, make_updater, random_batch, tiny_policy

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
SELECTOR = """
import numpy as np
from pydantic import Field
from bapo.algorithms.selectors.base import PromptSelector

class Last(PromptSelector):
    learns = False
    class Settings(PromptSelector.Settings):
        skip: int = Field(0, ge=0)
        '''Prompts at the end that are left to the end.'''
    @classmethod
    def check(cls, config, own):
        if own.skip > config.algorithm.batch_size:
            yield f"selector.skip = {own.skip} is more than a batch; use at most {config.algorithm.batch_size}"
    def propose(self, step, n):
        return np.roll(np.arange(len(self._pool))[::-1], -self._own.skip)[:n]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files in the working directory, and the overrides that name them."""
    loss, composer = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:2]
    for name, code in (("reinforce", loss), ("half", composer), ("last", SELECTOR)):
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return [
        "--loss.name=reinforce.py:Reinforce", "--loss.options.cap=4", "--algorithm.composer=half.py:Half",
        "--algorithm.selector=last.py:Last", "--selector.skip=1",
    ]  # fmt: skip


def test_their_settings_are_read_completed_and_kept(mine: list[str], tmp_path: Path) -> None:
    config = load_config(["grpo"], mine)
    assert (config.loss.options, config.algorithm.options) == ({"cap": 4.0}, {"share": 0.5})
    assert config.selector == {"skip": 1}
    assert config.method == "grpo + half.py:Half, last.py:Last, reinforce.py:Reinforce"
    assert "loss.options.cap: (not set) -> 4.0" in diff(load_config(["grpo"], []), config)
    (tmp_path / "config.toml").write_text(dump_toml(config))
    for name in ("reinforce", "half", "last"):
        (tmp_path / f"{name}.py").unlink()
    assert load_resolved(tmp_path / "config.toml") == config, "who needs none of them reads none"


def test_they_do_their_work(mine: list[str], model_path: Path, tmp_path: Path) -> None:
    config = load_config(["grpo"], mine)
    fresh = tuple(make_stat(k=k, prompt_id=f"p{k}") for k in range(9))
    view = AssemblyView(step=1, fresh=fresh, reevaluated=(), bad=(), high=(), previous_r_tot=None)
    algorithm = config.algorithm.model_copy(update={"batch_size": 4})
    decision = load_composer(algorithm).compose(view, lambda purpose: rng_for(0, 1, purpose))
    assert isinstance(decision, Decision)
    assert (set(decision.x1), decision.facts) == ({"g-p4", "g-p3"}, {"half_most": 2})
    pool = PromptPool(prompt_ids=("a", "b", "c"))
    selector = load_selector(config.algorithm.selector, config.selector, pool, seed=0, batch_size=2)
    assert selector.propose(1, 2).tolist() == [1, 0]
    small = learner_config(model_path, loss=config.loss.model_dump())
    report = make_updater(small, tiny_policy(small), tmp_path).run(random_batch())
    assert all(result.grad_norm > 0 for result in report.minibatches)
    assert type(load_loss(config.loss)).__name__ == "Reinforce"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--loss.options.cap=0", r"--loss.options.cap = 0: input should be greater than 0"),
        ("--loss.options.cab=1", r"--loss.options.cab: unknown key \(did you mean 'loss.options.cap'\?\)"),
        ("--loss.options.cap=true", r"loss.options.cap = true: must be a number"),
        ("--algorithm.options.share=2", "algorithm.options.share = 2: input should be less than or equal to 1"),
        ("--selector.skip=999", "selector.skip = 999 is more than a batch; use at most 256"),
        ("--loss.name=reinforce.py:Reinforced", "has no 'Reinforced' .did you mean 'Reinforce'"),
        ("--loss.name=other.py:X", "file other.py not found"),
        ("--loss.name=half.py:Half", r"must be a class that derives from PolicyLoss .* and defines surrogate"),
    ],
)
def test_what_is_wrong_with_them_is_said_before_anything_starts(mine: list[str], override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["grpo"], [*mine, override])


def test_former_keys_are_read_and_those_of_another_method_have_no_effect() -> None:
    config = load_config(["remix"], ["--algorithm.replay.share=0.5", "--algorithm.pilot_size=2", "--loss.kimi_tau=0.2"])
    assert (config.algorithm.options["share"], config.loss.options) == (0.5, {})
    assert load_config([], ["--algorithm.name=dapo"]).algorithm.composer == "dapo"
    assert load_config(["kimi"], ["--loss.kimi_tau=0.2"]).loss.options == {"tau": 0.2}
    assert load_config(["kimi"], ["--loss.name=ppo"]).loss.options == {}
    assert load_config(["ppo"], ["--critic.lr=0.5"]).loss.advantage_options["critic_lr"] == 0.5
    assert load_config(["grpo"], ["--critic.lr=0.5", "--supervised.lr=0.5"]) == load_config(["grpo"], [])


@pytest.mark.parametrize(
    ("name", "override", "who"),
    [
        ("grpo", "--selector.curriculum_steps=4", "kimi"),
        ("grpo", "--loss.options.tau=0.3", "kimi"),
        ("bapo", "--algorithm.options.sft_items=2", "relift"),
    ],
)
def test_a_setting_of_a_method_that_is_not_chosen_is_refused(name: str, override: str, who: str) -> None:
    with pytest.raises(ConfigError, match=rf"has no such setting; {who} has"):
        load_config([name], [override])


def test_settings_of_a_method_that_is_gone_are_refused_where_they_are_written_and_read_from_records(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"has no such setting; no method has it any more"):
        load_config(["grpo"], ["--selector.reference_prompts=4"])
    config, recorded = load_config(["grpo"], []), tmp_path / "config.toml"
    assert load_config(["grpo"], ["--loss.tree_lambda=0.5"]) == config
    recorded.write_text(dump_toml(config).replace("[selector]\n", "[selector]\nreference_prompts = 256\n"))
    assert "reference_prompts" in recorded.read_text()
    assert load_resolved(recorded) == config


def test_a_run_of_a_method_that_is_gone_can_be_compared_and_not_continued(tmp_path: Path) -> None:
    recorded = tmp_path / "config.toml"
    text = dump_toml(load_config(["grpo"], [])).replace('selector = "uniform"', 'selector = "learnability"')
    recorded.write_text(text.replace("[loss]\n", '[loss]\nx3_baseline = "current"\n'))
    assert load_recorded(recorded).algorithm.selector == "learnability"
    with pytest.raises(ConfigError, match=r"loss\.x3_baseline"):
        load_resolved(recorded)
    recorded.write_text(text)
    with pytest.raises(ConfigError, match="learnability"):
        load_resolved(recorded)
    revisit = dump_toml(load_config(["bapo"], ["--algorithm.composer", "revisit"]))
    recorded.write_text(revisit.replace("[algorithm.options]\n", "[algorithm.options]\nhead_start = true\n"))
    assert load_recorded(recorded).algorithm.options["min_age"] == 10


def test_settings_of_a_method_that_a_later_layer_replaces_have_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "grpo"\n[algorithm]\nselector = "mopps"\n[selector]\npool_ratio = 3\n')
    assert load_config([str(file)], ["--algorithm.selector=uniform"]).selector == {}


def test_reading_the_settings_of_shipped_losses_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("")  # vLLM brings one
    code = "import sys; from bapo.config.load import load_config; load_config(['kimi'], [])"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", f"{code}; assert not {{'torch', 'torchvision'}} & set(sys.modules)"]
    subprocess.run(command, check=True, env=environment)


def test_a_config_without_a_file_has_the_defaults() -> None:
    assert (Config().loss.options, Config().algorithm.options, Config().selector) == ({}, {}, {})
