"""The config of a run: keys, defaults, descriptions and constraints.

Files: TOML, layered (preset, then files from left to right, then `--section.key value`). Unknown keys are rejected.
Sizes are in groups (prompts), not responses, unless the name states otherwise.
`docs/configuration.md` is generated from the docstring below each field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from bapo.algorithms.settings import MAX_SECONDS, AlgorithmConfig, CadenceConfig, Frozen
from bapo.config.agents import AgentsConfig
from bapo.config.autoscaling import AutoscalingConfig
from bapo.config.buffer import BufferConfig, Host
from bapo.config.distillation import DistillationConfig
from bapo.config.learner import CheckpointConfig, DiagnosticsConfig, LearnerConfig, SftConfig
from bapo.config.objective import LossConfig, ShapingConfig
from bapo.config.rewards import JUDGE, OWN, RewardConfig, read_rewards, require_rising
from bapo.config.rollout import RolloutConfig, SamplingConfig
from bapo.config.tracking import TrackingConfig
from bapo.core.call_limits import MAX_RESPONSES, MAX_STEPS
from bapo.core.errors import ConfigError, did_you_mean

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""No braces or spaces: the name is part of Redis keys and of paths."""
LATEST = "latest"
"""Alias for the most recently modified run in `outputs`."""


class RunConfig(Frozen):
    """Name, location and length of the run."""

    name: str = Field("bapo", pattern=NAME_PATTERN)
    """Directory `<root>/<name>`; `auto`: the next free number after the name of the config file, demo-001, ..."""
    root: str = "outputs"
    """Folder of run directories."""
    seed: int = Field(42, ge=0, lt=1 << 63)
    """Of all randomness."""
    deterministic: bool = False
    """A seed per response: runs of one seed and commit on one machine train the same groups (docs/faq.md). Needs
    `cadence.max_steps_ahead = 0`."""
    num_steps: int = Field(100, ge=1, le=MAX_STEPS)
    """T: learner steps."""

    @model_validator(mode="after")
    def name_is_no_keyword(self) -> Self:
        """Check that commands can be given the run by its name."""
        if self.name == LATEST:
            raise ValueError(f"run.name = {LATEST!r} is taken: every command takes it for the most recent run")
        return self


SHORT_STEPS = 20
TargetGroup = Literal["all", "attention", "mlp"]


class LoraConfig(Frozen):
    """Low-rank adapters in place of all weights (docs/lora.md): y = x (W + scale B A)^T, and only A and B train."""

    rank: int = Field(16, ge=1, le=1024)
    """r: rows of A [r, inputs] and columns of B [outputs, r]."""
    alpha: float = Field(32.0, gt=0)
    """The scale is alpha / r."""
    rslora: bool = False
    """The scale is alpha / sqrt(r) (rank-stabilized LoRA, Kalajdzievski 2023)."""
    targets: TargetGroup | Annotated[list[str], Field(min_length=1)] = "all"
    """Layers of the decoder: `attention` (`q_proj`, `k_proj`, `v_proj`, `o_proj`), `mlp` (`gate_proj`, `up_proj`,
    `down_proj`), `all` of both, or a list of names; never embeddings, the head or a vision tower."""

    @field_validator("targets", mode="before")
    @classmethod
    def is_group_or_list(cls, targets: object) -> object:
        if isinstance(targets, str) and targets not in get_args(TargetGroup):
            instead = '"all"' if targets == "all-linear" else f'"all", "attention", "mlp" or a list: ["{targets}"]'
            raise ValueError(f'"{targets}" is not a group of layers; use {instead}')
        return targets

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class ModelConfig(Frozen):
    """The policy to train."""

    path: str = "models/countdown-tiny"
    """Folder in Hugging Face format, or a Hugging Face id, downloaded at the first start."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the learner's forward pass and of the engines; with `learner.device = "cuda"` the default is bfloat16."""
    freeze_vision: bool = False
    """Do not train the vision tower (docs/images.md)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters (docs/lora.md); null: all weights."""
    adapter: str | None = None
    """Folder of an adapter in PEFT's format to start from, with the settings of `lora`."""
    max_image_pixels: int | None = Field(None, ge=1)
    """Downscale larger images, keeping the aspect ratio; null: the model's own limit."""


class TaskConfig(Frozen):
    """Prompts and reward."""

    name: str = "countdown"
    """`countdown`, `dataset`, `mathematics`, `reasoning_gym:NAME`, `chain`, `lookup`, `geometry`, or your own factory
    (docs/your_task.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    reward: str | tuple[RewardConfig, ...] | None = None
    """Replaces the task's: `package.module:function`, `file.py:function`, `trl:module.function`,
    `verl:file.py:compute_score`, `judge:rubric.toml`, or a list of several (docs/your_task.md)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward, mapped to [0, 1]; `[-1, 1]` for verl's DAPO."""
    check_gold: bool = True
    """Refuse a start in which gold answers get reward 0 or a row cannot be graded; false: warn."""
    grading_timeout_s: float = Field(10.0, gt=0, le=MAX_SECONDS)
    """Seconds for a group; then the reward function is killed and the group retried, never rewarded 0. In task
    `mathematics` a response that takes more than an equal share counts as incorrect."""
    grading_memory_mb: int = Field(4096, ge=64)
    """MiB of a grading process with its children (a worker has two); above it, it is killed and the group retried."""

    @field_validator("reward", mode="before")
    @classmethod
    def several_rewards_are_tables(cls, value: Any) -> Any:
        """A message about each table: pydantic's are about every type that a reward may have."""
        return read_rewards(value)

    @model_validator(mode="after")
    def reward_range_rises(self) -> Self:
        """Check that low < high, a finite distance apart."""
        require_rising("task.reward_range", self.reward_range)
        return self

    def is_judge(self, function: str) -> bool:
        """Whether a model gives this reward of `reward_functions`."""
        return self.rubric_of(function) is not None

    def rubric_of(self, function: str) -> str | None:
        """The rubric file of a reward of `reward_functions`; None: no model gives it."""
        name = str(self.options.get("reward") if function == OWN else function)
        return name.removeprefix(JUDGE) if name.startswith(JUDGE) else None

    @property
    def reward_functions(self) -> tuple[str, ...]:
        """What grades, with `task` for the task's own reward among several; empty: it grades alone."""
        if isinstance(self.reward, tuple):
            return tuple(reward.function for reward in self.reward)
        return () if self.reward is None else (self.reward,)

    @property
    def has_another_reward(self) -> bool:
        """Whether the task's own reward does not grade."""
        return self.reward is not None and OWN not in self.reward_functions


class SplitConfig(SamplingConfig):
    """How one held-out split is measured; what is null is as for all."""

    num_samples: int | None = Field(None, ge=1, le=MAX_RESPONSES)
    """Responses per prompt: 32 is avg@32."""


class EvaluationConfig(SamplingConfig):
    """Held-out evaluation. It never changes alpha (docs/paper.md, Decisions). A sampling value that is null is that of
    `rollout`, or off."""

    every: int = Field(25, ge=0)
    """Steps, rounded up to the next weight update; 0: only before and after training."""
    num_prompts: int = Field(200, ge=1)
    """Prompts per held-out split during the run, the first ones; means are the base model's plus the change on them."""
    num_prompts_final: int = Field(1000, ge=1)
    """Prompts per held-out split before and after training."""
    num_samples: int = Field(2, ge=1, le=MAX_RESPONSES)
    """Responses per prompt."""
    splits: dict[str, SplitConfig] = Field(default_factory=dict)
    """Splits measured otherwise: `[evaluation.splits.aime24]` with `num_samples`, `temperature`, `stop` and so on."""
    temperatures: list[Annotated[float, Field(gt=0)]] = Field(default_factory=lambda: [0.3])
    """Further temperatures before and after training, as `SPLIT@0.3`: a model that only became more deterministic does
    not exceed the base model at its best temperature. A split's own is measured once."""
    at_responses: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Numbers of training responses at which weights are measured as after training."""
    best_measure: str | None = None
    """Measure of the best weights: a split, or SPLIT@TEMPERATURE, then also measured during the run; null: the first
    split."""
    patience: int | None = Field(None, ge=1)
    """End the run after this many measurements of `best_measure` in a row without an improvement; null: never."""
    min_improvement: float = Field(0.0, ge=0, lt=1)
    """A higher mean reward is an improvement if it is higher by more than this (0.01: one point)."""
    port: int = Field(8703, ge=0, le=65535)
    """Health and metrics."""

    def measurements(self, splits: Sequence[str], default: float) -> dict[str, tuple[str, SplitConfig]]:
        """Name of each measurement -> its split and how it is measured: all splits, then all at each temperature but
        their own.

        Args:
            default: temperature of a split without one, `rollout.temperature`.
        """
        own = {split: self._of_split(split) for split in splits}
        return {split: (split, settings) for split, settings in own.items()} | {
            f"{split}@{temperature:g}": (split, settings.model_copy(update={"temperature": temperature}))
            for temperature in self.temperatures
            for split, settings in own.items()
            if temperature != (default if settings.temperature is None else settings.temperature)
        }

    def samples_of(self, name: str) -> int:
        """Responses per prompt of a measurement."""
        return self._of_split(name.rpartition("@")[0] or name).num_samples or self.num_samples

    def _of_split(self, split: str) -> SplitConfig:
        own = self.splits.get(split, SplitConfig())
        return own.model_copy(update={"num_samples": own.num_samples or self.num_samples, **own.over(self)})

    def require_splits(self, known: Sequence[str], default: float) -> None:
        """Raises: ConfigError for settings of a split that the task does not have. `default`: as in `measurements`."""
        for split in self.splits:
            if split not in known:
                raise ConfigError(
                    f"evaluation.splits.{split}: the task has no such held-out split{did_you_mean(split, known)}; it "
                    f"has {', '.join(known) or 'none'}"
                )
        if taken := [split for split in known if "@" in split]:
            raise ConfigError(f"held-out split {taken[0]!r}: the part after an @ is a temperature; rename the split")
        names, best = [*self.measurements(known, default)], self.best_measure
        if best is not None and best not in names:
            raise ConfigError(
                f"evaluation.best_measure = {best!r} is not measured{did_you_mean(best, names)}; the run measures "
                f"{', '.join(names) or 'nothing'}"
            )
        if self.patience is not None and not names:
            raise ConfigError("evaluation.patience: the task has no held-out split, so nothing is measured; remove it")


class SchedulerConfig(Frozen):
    """The scheduler of fresh requests and re-evaluations."""

    port: int = Field(8701, ge=0, le=65535)
    """Health and metrics."""


class SupervisionConfig(Frozen):
    """Restarts of crashed processes, and stall detection."""

    max_restarts: int = Field(5, ge=0)
    """Restarts of a crashed process within `window_s`; the next crash ends the run. 0: the first one does."""
    window_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """Seconds in which restarts count; the learner's count until its next checkpoint."""
    restart_backoff_s: float = Field(0.5, ge=0, le=MAX_SECONDS)
    """Seconds before the first restart; doubles with each further one, up to 30."""
    stall_s: float = Field(900.0, ge=0, le=MAX_SECONDS)
    """Seconds without progress after which a stall is reported with its cause; 0: never. Longer than a step and the
    start of an engine."""
    stall_ends_run: bool = False
    """A stalled run exits with code 5."""


class DashboardConfig(Frozen):
    """The web page of the run."""

    enabled: bool = True
    """Whether the launcher starts it."""
    host: Host = "127.0.0.1"
    """Address; overridden by BAPO_HOST."""
    port: int = Field(8704, ge=0, le=65535)
    """Of the page."""


class SecurityConfig(Frozen):
    """Access control. Tokens are never part of a config (docs/threat_model.md)."""

    tokens: Literal["auto", "off"] = "auto"
    """auto: processes on non-loopback addresses require tokens; off: no authentication."""
    open_redis: bool = False
    """Accept a Redis without a password on another host, which anyone in its network can change."""


class Config(Frozen):
    """The config of a run."""

    preset: str | None = None
    """The preset below this file."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    selector: dict[str, Any] = Field(default_factory=dict)
    """The settings of the prompt selector, `algorithm.selector`."""
    cadence: CadenceConfig = CadenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    loss: LossConfig = LossConfig()
    learner: LearnerConfig = LearnerConfig()
    shaping: ShapingConfig = ShapingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    buffer: BufferConfig = BufferConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    agents: AgentsConfig | None = None
    distillation: DistillationConfig | None = None
    sft: SftConfig | None = None
    tracking: TrackingConfig = TrackingConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    dashboard: DashboardConfig = DashboardConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    security: SecurityConfig = SecurityConfig()

    @property
    def method(self) -> str:
        """What the run trains, as people call it: its preset, also with settings on top; else its composer; then the
        user's own parts."""
        parts = (self.algorithm.composer, self.algorithm.selector, self.loss.name, self.loss.advantage)
        own = [part for part in parts if ":" in part]
        name = self.preset or self.algorithm.composer
        return f"{name} + {', '.join(own)}" if own else name

    @model_validator(mode="after")
    def gpus_use_bfloat16(self) -> Self:
        """Set the default of `model.dtype`, which depends on another section."""
        if self.learner.device == "cuda" and "dtype" not in self.model.model_fields_set:
            model = self.model.model_copy(update={"dtype": "bfloat16"})
            object.__setattr__(self, "model", model)  # the section is frozen
        return self

    @model_validator(mode="after")
    def lora_has_what_it_needs(self) -> Self:
        """What would train, or compare with, something else than the adapter."""
        if self.model.lora is None:
            if self.model.adapter is not None:
                raise ValueError(
                    "model.adapter without model.lora: write [model.lora] with the adapter's rank, alpha and targets, "
                    "as in its adapter_config.json"
                )
            return self
        if self.loss.kl_restart_step is not None:
            raise ValueError(
                "model.lora with loss.kl_restart_step: with LoRA the reference is the model with its adapter off, and "
                "no restart can replace that; remove one of the two"
            )
        if self.model.adapter is not None and self.loss.needs_reference:
            raise ValueError(
                "model.adapter with a KL term to the reference: with LoRA the reference is the model with its adapter "
                "off, not where training starts; merge the adapter into the model first (merge_and_unload of PEFT), or "
                "remove the KL term"
            )
        if self.learner.compile is True:
            raise ValueError(
                "model.lora with learner.compile = true: compiled code may round the merged weights otherwise than the "
                "engines do; remove it"
            )
        if "quantization" in self.rollout.engine_options:
            raise ValueError("model.lora with a quantized engine: adapters are merged into plain weights; remove it")
        return self

    @model_validator(mode="after")
    def texts_to_send_are_recorded(self) -> Self:
        if self.tracking.responses_every and not (self.diagnostics.texts or self.diagnostics.token_records):
            raise ValueError(
                f"tracking.responses_every = {self.tracking.responses_every} sends texts, and none are recorded "
                "(diagnostics.texts = 0): set diagnostics.texts = 1, or responses_every = 0"
            )
        return self

    @model_validator(mode="after")
    def sizes_fit_together(self) -> Self:
        if self.groups_per_update > self.algorithm.batch_size:
            raise ValueError(
                f"learner.minibatch_size = {self.learner.minibatch_size} is more than algorithm.batch_size = "
                f"{self.algorithm.batch_size} groups; use at most {self.algorithm.batch_size}"
            )
        most = self.buffer.max_fresh_groups
        if most is not None and most < self.algorithm.batch_size:
            raise ValueError(
                f"buffer.max_fresh_groups = {most} is less than algorithm.batch_size = {self.algorithm.batch_size}: a "
                f"batch would never be complete; use at least {self.algorithm.batch_size}, or null for no limit"
            )
        if self.learner.num_ranks > self.groups_per_update:
            raise ValueError(
                f"learner.num_ranks = {self.learner.num_ranks} is more than the {self.groups_per_update} groups of an "
                "update (learner.minibatch_size, algorithm.batch_size): some ranks would never have a group; use fewer "
                "ranks"
            )
        if self.learner.num_ranks % (self.learner.shard_ranks or 1):
            raise ValueError(
                f"learner.num_ranks = {self.learner.num_ranks} is not a multiple of learner.shard_ranks = "
                f"{self.learner.shard_ranks}, the ranks of one replica"
            )
        self._evaluations_fit()
        cache = self.shaping.overlong_cache
        if cache is not None and cache > self.rollout.max_response_tokens:
            raise ValueError(
                f"shaping.overlong_cache = {cache} is more than rollout.max_response_tokens = "
                f"{self.rollout.max_response_tokens}; use at most that"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        if self.learner.microbatch_tokens < longest:
            raise ValueError(
                f"learner.microbatch_tokens = {self.learner.microbatch_tokens} is less than one sequence of "
                f"{longest} tokens (max_prompt_tokens + max_response_tokens); use at least {longest}"
            )
        return self

    def _evaluations_fit(self) -> None:
        room, evaluation = self.rollout.max_response_tokens, self.evaluation
        for split in (None, *evaluation.splits):
            name, asked = "evaluation", evaluation.over(evaluation)
            if split is not None:
                name, asked = f"evaluation.splits.{split}", evaluation.splits[split].over(evaluation)
            most = asked["max_response_tokens"] or room
            if most > room:
                raise ValueError(
                    f"{name}.max_response_tokens = {most} is more than rollout.max_response_tokens = {room}, which "
                    "engines have room for"
                )
            if (asked["min_tokens"] or 0) > most:
                raise ValueError(
                    f"{name}.min_tokens = {asked['min_tokens']} is more than the {most} tokens that a response may "
                    "have (max_response_tokens)"
                )

    @property
    def choose_by_measurement(self) -> list[str]:
        """Keys of the settings, of those given, that choose weights by held-out measurements."""
        given = {
            "checkpoint.keep_best": self.checkpoint.keep_best > 0,
            "evaluation.patience": self.evaluation.patience is not None,
        }
        return [key for key, is_set in given.items() if is_set]

    @model_validator(mode="after")
    def the_best_is_measured(self) -> Self:
        for key in self.choose_by_measurement:
            if self.evaluation.every == 0:
                raise ValueError(
                    f"{key} with evaluation.every = 0: nothing is measured during the run; set evaluation.every to the "
                    f"steps between measurements, or remove {key}"
                )
        if self.run.deterministic and self.evaluation.patience is not None:
            raise ValueError(
                "run.deterministic with evaluation.patience: the last step would depend on when a measurement arrives; "
                "remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def agents_fit(self) -> Self:
        is_masked = self.rollout.stale_tokens == "mask"
        if self.agents is None:
            if is_masked:
                raise ValueError('rollout.stale_tokens = "mask" is for episodes: use "drop", or add [agents]')
            return self
        for what, is_set in (
            ("shaping.overlong_cache", self.shaping.overlong_cache is not None),
            ("rollout.generation_budget", self.rollout.generation_budget is not None),
            ("algorithm.num_experts", self.algorithm.num_experts > 0),
            ("autoscaling, which counts the groups of a worker", self.autoscaling.actuator != "off"),
            ("run.deterministic", self.run.deterministic),
        ):
            if is_set:
                raise ValueError(f"[agents] with {what}: an episode is sampled call by call; remove one of the two")
        if is_masked and self.loss.ratio_mode == "official":
            raise ValueError(
                'rollout.stale_tokens = "mask" with loss.ratio_mode = official: the anchors that are kept for a reused '
                "group would not have its masked tokens, which train then; set loss.ratio_mode = decoupled, or "
                'stale_tokens = "drop"'
            )
        if is_masked and self.shaping.length_weight:
            raise ValueError(
                'rollout.stale_tokens = "mask" with shaping.length_weight: lengths would not have the masked tokens; '
                "remove one of the two"
            )
        if self.rollout.engine != "vllm":
            raise ValueError(
                f"[agents] with rollout.engine = {self.rollout.engine!r}: agents call vLLM's routes; set it to vllm"
            )
        if self.loss.advantage == "tempo":
            raise ValueError(
                f"[agents] with loss.advantage = {self.loss.advantage!r}, which compares the beginnings of responses: "
                "episodes differ in what their tools said; use group"
            )
        most = self.agents.max_tokens
        if most is not None and most > self.learner.microbatch_tokens:
            raise ValueError(
                f"agents.max_tokens = {most} is more than learner.microbatch_tokens = "
                f"{self.learner.microbatch_tokens}, which must hold an episode; raise that, or lower this"
            )
        return self

    @model_validator(mode="after")
    def the_teacher_can_score(self) -> Self:
        if self.distillation is None:
            return self
        if self.agents is not None:
            raise ValueError(
                "[distillation] with [agents]: the turns of an episode are not sent to a teacher; remove one of the two"
            )
        if self.algorithm.num_experts:
            raise ValueError(
                "[distillation] with algorithm.num_experts: no policy sampled an expert's tokens, so they have no "
                "log-ratio to a teacher; set algorithm.num_experts = 0"
            )
        if self.rollout.temperature != 1:
            raise ValueError(
                f"[distillation] with rollout.temperature = {self.rollout.temperature:g}: the teacher's log-probs are "
                "those of temperature 1, so the log-ratio would compare two temperatures; set it to 1.0"
            )
        return self

    @model_validator(mode="after")
    def deterministic_runs_wait(self) -> Self:
        """What arrives first must not decide what trains."""
        if not self.run.deterministic:
            return self
        cadence = self.cadence
        if cadence.max_steps_ahead > 0:
            raise ValueError(
                f"run.deterministic with cadence.max_steps_ahead = {cadence.max_steps_ahead}: which weights sample a "
                "group would depend on its timing; set cadence.max_steps_ahead = 0"
            )
        if self.algorithm.use_x2 and not cadence.wait_for_reevaluation:
            raise ValueError(
                "run.deterministic with algorithm.use_x2 and cadence.wait_for_reevaluation = false: the step of a "
                "re-evaluated group would depend on its timing; set cadence.wait_for_reevaluation = true"
            )
        if self.rollout.generation_budget is not None:
            raise ValueError(
                "run.deterministic with rollout.generation_budget: the weights of a segment would depend on its "
                "timing; remove the budget"
            )
        return self

    @model_validator(mode="after")
    def autoscaling_stays_within_the_fleet(self) -> Self:
        fleet, scaling = self.rollout.max_workers, self.autoscaling
        most = max(scaling.min_workers, scaling.max_workers or scaling.min_workers)
        if most > fleet:
            raise ValueError(
                f"autoscaling uses up to {most} workers, more than rollout.max_workers = {fleet}; "
                f"set rollout.max_workers = {most}, or lower the limit in [autoscaling]"
            )
        return self

    @property
    def is_short(self) -> bool:
        """Whether the run ends before it has won back what compiling for a GPU takes, about a minute each for engine
        and learner (docs/gpus.md)."""
        return self.run.num_steps <= SHORT_STEPS

    @property
    def groups_per_update(self) -> int:
        """Groups per optimizer step of a batch of `algorithm.batch_size`."""
        return self.learner.minibatch_size or self.algorithm.batch_size

    @property
    def continuation_steps(self) -> int:
        """Maximum additional steps for the later segments of a response with `rollout.generation_budget`."""
        rollout = self.rollout
        budget = rollout.generation_budget or rollout.max_response_tokens
        return (-(-rollout.max_response_tokens // budget) - 1) * self.cadence.weight_sync_interval

    @model_validator(mode="after")
    def segments_are_not_too_old(self) -> Self:
        if self.continuation_steps > self.cadence.max_steps_ahead:
            raise ValueError(
                f"rollout.generation_budget = {self.rollout.generation_budget} of max_response_tokens = "
                f"{self.rollout.max_response_tokens}: a response may take {self.continuation_steps} steps longer than "
                f"without a budget, but cadence.max_steps_ahead = {self.cadence.max_steps_ahead}, "
                f"so it would be stale; set cadence.max_steps_ahead = {self.continuation_steps} or more, "
                "or a larger budget"
            )
        return self

    @model_validator(mode="after")
    def ports_differ(self) -> Self:
        sections = ("buffer", "scheduler", "learner", "evaluation", "rollout", "agents")
        owner: dict[int, str] = {}
        for section in sections:
            port: int | None = getattr(getattr(self, section), "port", None)  # a section may be absent
            if port and port in owner:
                raise ValueError(
                    f"{owner[port]}.port and {section}.port are both {port}; use another port, or 0 for a free one"
                )
            owner[port or 0] = section
        return self
