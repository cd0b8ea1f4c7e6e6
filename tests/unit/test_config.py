"""Layers of settings: what wins, what is refused, and with which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.config.check import known_keys
from bapo.config.load import dump_toml, load_config, load_resolved
from bapo.config.names import NAMES
from bapo.config.tree import Config
from bapo.core.errors import ConfigError

Write = Callable[..., Path]
"""Writes a TOML file: (text, name="run.toml") -> its path."""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def problems(files: list[Path | str], overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_nothing_gives_the_defaults() -> None:
    assert load_config([], []) == Config()


def test_later_files_win_over_earlier_ones_key_by_key(write: Write) -> None:
    first = write("[learner]\nlr = 1e-3\nepochs = 2\n", "first.toml")
    second = write("[learner]\nlr = 1e-4\n", "second.toml")
    learner = load_config([first, second], []).learner
    assert (learner.lr, learner.epochs, learner.grad_clip) == (1e-4, 2, 1.0)
    assert load_config([second, first], []).learner.lr == 1e-3


def test_a_preset_lies_beneath_and_an_override_on_top(write: Write) -> None:
    run = write('preset = "bapo"\n[algorithm]\nbatch_size = 128\n')
    config = load_config([run], ["--learner.lr", "1e-4"])
    assert (config.preset, config.algorithm.batch_size, config.learner.lr) == ("bapo", 128, 1e-4)
    assert config.rollout.max_response_tokens == 8192  # of the preset


def test_the_topmost_preset_is_the_one(write: Write) -> None:
    run = write('preset = "bapo"\n')
    assert load_config([run], ["--preset", "grpo"]).algorithm.composer == "grpo"
    assert load_config([run, "grpo"], []).algorithm.composer == "grpo"
    assert load_config([run], ["--preset", "null"]) == Config()


@pytest.mark.parametrize(
    ("tokens", "key", "want"),
    [
        (["--learner.lr", "1e-4"], "learner.lr", 1e-4),
        (["--learner.lr=1e-4"], "learner.lr", 1e-4),
        (["--algorithm.use_x2", "false"], "algorithm.use_x2", False),
        (["--learner.betas", "[0.8, 0.9]"], "learner.betas", (0.8, 0.9)),
        (["--loss.dual_clip", "null"], "loss.dual_clip", None),
        (["--loss.ratio_mode", "direct"], "loss.ratio_mode", "direct"),
        (["--run.name", "2024"], "run.name", "2024"),  # a text key keeps what looks like a number
        (["--run.name", '"quoted"'], "run.name", "quoted"),
        (["--run.root", "a=b/c"], "run.root", "a=b/c"),
        (["--run.root=a=b"], "run.root", "a=b"),
        (["--task.reward", "null"], "task.reward", None),
        (["--task.options.num_train", "5"], "task.options", {"num_train": 5}),
        (["--task.options", '{path = "a", n = 2}'], "task.options", {"path": "a", "n": 2}),
        (["--task.options.a.b", "plain text"], "task.options", {"a": {"b": "plain text"}}),
        (["--task.options.a=1", "--task.options.b=2"], "task.options", {"a": 1, "b": 2}),
        (["--task.options.a=1", "--task.options={}"], "task.options", {}),  # an override replaces a table
        (["--learner.lr=1", "--learner.lr=2"], "learner.lr", 2.0),
    ],
)
def test_an_override_is_a_toml_value_or_plain_text(tokens: list[str], key: str, want: object) -> None:
    found: object = load_config([], tokens)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == want


def test_tables_of_files_are_merged_and_the_word_null_means_null(write: Write) -> None:
    first = write("[task.options]\na = 1\nb = 2\n", "first.toml")
    second = write('[task.options]\nb = "null"\n[loss]\ndual_clip = "null"\n', "second.toml")
    config = load_config([first, second], [])
    assert config.task.options == {"a": 1, "b": None}
    assert config.loss.dual_clip is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[learner]\nlrr = 1", "learner.lrr: unknown key (did you mean 'learner.lr'?)"),
        ("[lerner]\nlr = 1", "lerner: unknown key (did you mean 'learner'?)"),
        ("minibatch_size = 1", "minibatch_size: unknown key (did you mean 'learner.minibatch_size'?)"),
        ("[algorithm]\nlearning = 1", "algorithm.learning: unknown key"),
        ("learner = 3", "learner is a section; use learner.KEY"),
        ("[algorithm]\nbatch_size = true", "algorithm.batch_size = true: must be an integer"),
        ("[loss]\ndual_clip = false", "loss.dual_clip = false: must be a number or null"),
        (
            '[learner]\nlr = "fast"',
            'learner.lr = "fast": input should be a valid number, unable to parse string as a number',
        ),
        ("[learner]\nlr = 0", "learner.lr = 0: input should be greater than 0"),
        ("[learner]\nlr = inf", "learner.lr = inf: input should be a finite number"),
        (
            '[loss]\nratio_mode = "x"',
            "loss.ratio_mode = \"x\": input should be 'direct', 'official', 'decoupled' or 'interpolated'",
        ),
        ("[learner]\nbetas = [0.9]", "learner.betas = [0.9]: too few values"),
        ('[run]\nname = "a b"', 'run.name = "a b": must be at most 64 letters, digits'),
    ],
)
def test_a_mistake_is_one_line_with_the_file_the_key_and_the_way_out(write: Write, text: str, message: str) -> None:
    path = write(text)
    (line,) = problems([path], [])
    assert line.startswith(f"{path}: {message}")


def test_all_mistakes_are_told_at_once_with_the_place_of_each(write: Write) -> None:
    path = write("[learner]\nlr = -1\nepochs = 0\n")
    lines = problems([path], ["--learner.epochs", "many", "--loss.clip_low=-1"])
    assert [line.split(" = ")[0] for line in sorted(lines)] == [
        "--learner.epochs",
        "--loss.clip_low",
        f"{path}: learner.lr",
    ]


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("cadence.v", "weight_sync_interval", 3),
        ("cadence.slack", "max_steps_ahead", 3),
        ("algorithm.B", "batch_size", 3),
        ("algorithm.G", "group_size", 3),
    ],
)
def test_the_papers_letters_and_the_names_of_earlier_runs_are_accepted(
    write: Write, written: str, key: str, value: int
) -> None:
    section = written.split(".")[0]
    for config in (
        load_config([write(f"{written} = {value}\n")], ["--cadence.m", "30", "--learner.minibatch_size", "1"]),
        load_config([], [f"--{written}", str(value), "--cadence.m", "30", "--learner.minibatch_size", "1"]),
    ):
        assert getattr(getattr(config, section), key) == value
        assert config.cadence.reevaluation_interval == 30


def test_a_former_setting_is_read_where_it_has_the_value_that_it_always_has_now(write: Write) -> None:
    recorded = write(
        "[autoscaling]\nheadroom = 0.1\nwait_high = 0.1\n[diagnostics]\nquiet_steps = 20\n"
        "[algorithm]\ngaussian_share = 0.75\n"  # in every archive of docs/studies
    )
    assert load_config([recorded], []) == load_config([], [])
    (line,) = problems([write("[autoscaling]\nheadroom = 0.3\n")], [])
    assert line.endswith("autoscaling.headroom: unknown key; it is no longer a setting, and always 0.1")


def test_a_letter_beside_its_name_is_refused(write: Write) -> None:
    (line,) = problems([write("[cadence]\nv = 2\nweight_sync_interval = 2\n")], [])
    assert line.endswith("cadence.v is cadence.weight_sync_interval: remove one of them")


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("learner.learning_rate = 1e-5", "learner.lr"),
        ("num_generations = 8", "algorithm.group_size"),
        ("rollout.max_completion_length = 99", "rollout.max_response_tokens"),
        ("actor_rollout_ref.actor.optim.lr = 1e-5", "learner.lr"),
        ("actor_rollout_ref.rollout.n = 8", "algorithm.group_size"),
        ("data.train_batch_size = 8", "algorithm.batch_size"),
    ],
)
def test_a_key_of_trl_or_verl_leads_to_ours(write: Write, text: str, ours: str) -> None:
    (line,) = problems([write(text)], [])
    assert line.endswith(f"{text.split(' ')[0]}: unknown key; use {ours}")


def test_each_key_of_a_table_of_verl_leads_to_ours(write: Write) -> None:
    lines = problems([write("[actor_rollout_ref.actor]\noptim.lr = 1e-5\nclip_ratio = 0.2\n")], [])
    assert [line.rpartition("; use ")[2] for line in lines] == ["learner.lr", "loss.clip_low"]


def test_an_override_in_the_style_of_hydra_is_shown_in_ours() -> None:
    assert problems(["learner.lr=1e-5"], []) == ["learner.lr=1e-5: overrides have the form --learner.lr 1e-5"]
    assert problems(["trainer.save_freq=20"], [])[0].endswith("have the form --checkpoint.every 20")


def test_the_file_of_a_study_is_not_that_of_a_run(write: Write) -> None:
    path = write("[study]\nname = 'a'\n[methods.grpo]\npreset = 'grpo'\n")
    assert problems([path], []) == [f"{path}: this is a study, not a run; start it with: bapo study {path}"]


def test_every_name_in_the_table_is_a_key_of_ours() -> None:
    assert {row.key for row in NAMES} <= {*known_keys(), "task.options.path", "task.options.held_out"}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["learner.lr", "1"], "'learner.lr' is not an override; use --section.key value"),
        (["--learner.lr"], "--learner.lr needs a value"),
        (["--learner.lr", "--run.name", "x"], "--learner.lr needs a value"),
        (["--"], "'--' is not an override"),
        (
            ["--algorithm.num_generation", "4"],
            "--algorithm.num_generation: unknown key (did you mean TRL's 'num_generations'?",
        ),
        (["--lr", "1"], "--lr: unknown key (did you mean 'learner.lr'?)"),
        (["--preset", "bap"], "preset = 'bap': unknown preset (did you mean 'bapo'?)"),
        (["--preset", "bapp"], "preset = 'bapp': unknown preset (did you mean 'bapo'?)"),
    ],
)
def test_an_override_of_another_form_is_refused(tokens: list[str], message: str) -> None:
    (line,) = problems([], tokens)
    assert line.startswith(message)


def test_files_that_cannot_be_read_are_named(write: Write, tmp_path: Path) -> None:
    assert problems([tmp_path / "none.toml"], [])[0].startswith(f"{tmp_path / 'none.toml'}: no such file")
    assert "did you mean 'bapo-mini'?" in problems(["bapo-mni"], [])[0]
    assert "cannot be read" in problems([tmp_path], [])[0]
    broken = write("[learner\nlr = 1")
    assert "not TOML" in problems([broken], [])[0]
    assert "line 1" in problems([broken], [])[0]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("--run.name=latest", "run.name = 'latest' is taken: every command takes it for the most recent run"),
        ("--task.reward_range=[-1e308,1e308]", "a finite high - low"),
        (
            "--cadence.weight_sync_interval=5 --cadence.reevaluation_interval=7",
            "= 7 must be a multiple of .* = 5, .* set reevaluation_interval = 10",
        ),
        ("--learner.minibatch_size=300", "minibatch_size = 300 is more than .*use at most 256"),
        ("--learner.num_ranks=65", "num_ranks = 65 is more than .*use fewer ranks"),
        ("--rollout.max_response_tokens=5000", "microbatch_tokens = 4096 is less than .*use at least 5064"),
        ("--rollout.top_p=0.9", "top_p = 0.9: .*set top_p = 1.0"),
        ("--evaluation.max_response_tokens=65", "evaluation.max_response_tokens = 65 is more than .* = 64"),
        ("--evaluation.min_tokens=65", "evaluation.min_tokens = 65 is more than the 64 tokens"),
        (
            "--evaluation.min_tokens=9 --evaluation.splits.a.max_response_tokens=8",
            "evaluation.splits.a.min_tokens = 9 is more than the 8 tokens",
        ),
        ("--rollout.num_workers=9", "num_workers = 9 is more than max_workers = 8; set max_workers = 9"),
        ("--rollout.port=8700", "buffer.port and rollout.port are both 8700"),
        ("--buffer.url=http://h --buffer.redis_url=redis://h", "redis_url = redis://h would have no effect"),
        ("--algorithm.composer=gpro", "unknown composer .did you mean 'grpo'.*use one of .*bapo, .*grpo"),
        ("--algorithm.c1=0.9", "c1 = 0.9 leaves no level .*set c1 below 0.875, or use_x2 = false"),
        ("--algorithm.c2_range=[0.5,0.2]", r"c2_range = \[0.5, 0.2\]: must be low <= high"),
        ("--algorithm.c1=0.875", "set c1 below 0.875"),
        ("--algorithm.c2_range=[0.5,0.9]", "c2_range .* is above c3_range"),
        ("--algorithm.c2_range=[0.3,0.5]", "c2_range .* is above c3_range"),
        ("--algorithm.x3_exactly_half=true --algorithm.group_size=7", "x3_exactly_half = true, but .*group_size = 8"),
        (
            "--algorithm.name=remix --algorithm.replay.first_step=3 --algorithm.replay.last_step=2",
            "last_step = 2 is before first_step = 3, .* set last_step = 3 or later",
        ),
        (
            "--algorithm.threshold_schedule=fixed --algorithm.c2_range=[0,0.5] --algorithm.c3_range=[0.1,0.6]",
            "allows only zero-variance groups",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(tokens: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], tokens.split())


@pytest.mark.parametrize("token", ["--rollout.stop=</answer>", '--rollout.stop=["</answer>"]'])
def test_one_stop_text_may_be_written_without_brackets(token: str) -> None:
    assert load_config([], [token]).rollout.stop == ("</answer>",)


def test_an_empty_stop_text_would_end_every_response_and_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.stop"):
        load_config([], ['--rollout.stop=["a", ""]'])


@pytest.mark.parametrize(
    "token",
    [
        "--task.grading_timeout_s=3e6",  # poll() counts milliseconds in 31 bits: every grading would raise
        "--buffer.lease_s=0.0005",  # no millisecond: every claim would get what another worker holds
        "--buffer.lease_s=1e308",
        "--supervision.stall_s=1e308",
        "--autoscaling.window_s=1e308",
        "--algorithm.group_size=4097",  # the service would refuse the first request
        "--evaluation.num_samples=4097",
        "--rollout.max_groups_in_flight=16385",
        "--run.num_steps=2097151",
        "--run.seed=9223372036854775808",
    ],
)
def test_numbers_that_would_fail_when_they_are_used_are_refused(token: str) -> None:
    key = token.removeprefix("--").partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key} .*(less|greater) than"):
        load_config([], [token])


def test_a_free_port_may_be_asked_for_by_all() -> None:
    tokens = [f"--{section}.port=0" for section in ("buffer", "scheduler", "learner", "evaluation", "rollout")]
    assert load_config([], tokens).buffer.port == 0


def test_b_bad_has_room_for_a_batch_unless_it_is_told_otherwise() -> None:
    assert load_config([], ["--algorithm.batch_size=70"]).algorithm.capacity == 70
    assert load_config([], ["--algorithm.bad_capacity=9"]).algorithm.capacity == 9


def test_half_of_b_bad_is_reevaluated_unless_a_number_is_set() -> None:
    assert load_config(["bapo"], ["--algorithm.batch_size=64"]).algorithm.most_reevaluated == 32
    assert load_config(["bapo"], ["--algorithm.bad_capacity=9"]).algorithm.most_reevaluated == 4
    assert load_config(["bapo"], ["--algorithm.max_reevaluated=7"]).algorithm.most_reevaluated == 7


def test_a_resolved_file_is_read_without_its_preset(write: Write) -> None:
    config = load_config(["bapo-official"], ["--algorithm.bad_capacity", "null", "--loss.importance_cap", "null"])
    path = write(dump_toml(config))
    assert load_resolved(path) == config
    assert load_resolved(path).algorithm.bad_capacity is None  # the preset says 120


def test_a_resolved_file_whose_preset_was_removed_is_read_and_written(write: Write) -> None:
    config = load_resolved(write('preset = "bapo-gaussian"\n'))
    assert load_resolved(write(dump_toml(config))) == config


@given(
    lr=st.floats(1e-12, 1e3, exclude_min=True),
    name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z"),
    dual_clip=st.none() | st.floats(1.5, 1e6),
    capacity=st.none() | st.integers(1, 1000),
    options=st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.none() | st.integers(-5, 5) | st.booleans() | st.text(max_size=5).filter(lambda text: text != "null"),
        max_size=3,
    ),
)
def test_every_configuration_survives_its_resolved_file(
    tmp_path_factory: pytest.TempPathFactory, lr: float, name: str, dual_clip: float, capacity: int, options: dict
) -> None:
    config = Config.model_validate(
        {
            "run": {"name": name},
            "learner": {"lr": lr},
            "loss": {"dual_clip": dual_clip},
            "algorithm": {"bad_capacity": capacity},
            "task": {"options": options},
        }
    )
    path = tmp_path_factory.mktemp("resolved") / "config.toml"
    path.write_text(dump_toml(config), encoding="utf-8")
    assert load_resolved(path) == config


@pytest.mark.parametrize(
    "override",
    ["--shaping.overlong_cache=8", "--autoscaling.actuator=fleet", "--rollout.generation_budget=8",
     "--rollout.engine=scripted", "--loss.advantage=tempo", "--agents.max_tokens=100000"],
)  # fmt: skip
def test_agents_refuse_what_would_be_wrong_for_episodes(override: str) -> None:
    agents = ["--agents.rollout=agent.py:rollout"]
    assert load_config(["bapo"], agents).agents is not None
    (problem,) = problems(["bapo"], [*agents, override])
    assert "agents" in problem


def test_anchors_kept_of_a_group_without_its_stale_tokens_are_refused() -> None:
    masked = ["--agents.rollout=agent.py:rollout", "--rollout.stale_tokens=mask"]
    assert load_config(["bapo"], [*masked, "--loss.ratio_mode=decoupled"]).agents is not None
    (problem,) = problems(["bapo"], [*masked, "--loss.ratio_mode=official"])
    assert "set loss.ratio_mode = decoupled" in problem


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["--cadence.max_steps_ahead=1"], "max_steps_ahead = 0"),
        (["--cadence.wait_for_reevaluation=false"], "wait_for_reevaluation = true"),
        (["--rollout.generation_budget=8"], "generation_budget"),
    ],
)
def test_a_deterministic_run_refuses_what_depends_on_timing_and_names_the_setting(
    overrides: list[str], named: str
) -> None:
    alone = ["--run.deterministic=true", "--cadence.max_steps_ahead=0"]
    assert load_config(["bapo"], alone).run.deterministic
    (problem,) = problems(["bapo"], [*alone, *overrides])
    assert named in problem


@pytest.mark.parametrize(
    ("override", "value", "words"),
    [
        ("--model.lora.rnak", "8", "unknown key (did you mean 'model.lora.rank'?)"),
        ("--model.lora.lora_alpha", "8", "unknown key; use model.lora.alpha"),
        ("--peft_config.r", "8", "unknown key; use model.lora.rank"),
        ("--model.lora.targets", "all-linear", 'use "all"'),
        ("--model.lora", "8", "--model.lora is a section; use model.lora.KEY"),
        ("--evaluation.splits.chain.num_sample", "3", "did you mean 'evaluation.splits.chain.num_samples'?"),
        (
            "--learner.activation_gib",
            "-1",
            "--learner.activation_gib = -1: input should be greater than or equal to 0, or",
        ),
    ],
)
def test_a_mistake_below_an_optional_section_is_named_with_its_remedy(override: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [override, value])
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_optional_sections_are_read_as_inline_tables_by_key_and_as_null() -> None:
    config = load_config([], ["--model.lora", "{rank = 4}", "--evaluation.splits.easy", "{num_samples = 3}"])
    assert config.model.lora is not None
    assert config.model.lora.rank == 4
    assert config.evaluation.splits["easy"].num_samples == 3
    assert load_config([], ["--model.lora.rank", "4", "--model.lora", "null"]).model.lora is None
