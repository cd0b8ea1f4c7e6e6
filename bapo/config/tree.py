"""The one configuration of a run: every key, its default, its meaning and what excludes what.

Files: TOML, layered (preset, then files from left to right, then `--section.key value`). Unknown keys are refused.
Sizes are counted in groups (prompts), never in responses, unless the name says otherwise.
The docstring below each field is the manual: `docs/configuration.md` is made from it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from bapo.algorithms.autoscaling import AutoscalingConfig
from bapo.algorithms.composers.registry import composer_names
from bapo.algorithms.selectors.registry import selector_names
from bapo.algorithms.selectors.settings import SelectorConfig
from bapo.algorithms.settings import MOST_SECONDS, AlgorithmConfig, CadenceConfig, Frozen
from bapo.config.buffer import BufferConfig
from bapo.config.layers import preset_names
from bapo.config.learner import CheckpointConfig, DiagnosticsConfig, LearnerConfig
from bapo.config.objective import CriticConfig, LossConfig, ShapingConfig, SupervisedConfig
from bapo.config.rollout import RolloutConfig
from bapo.config.tracking import TrackingConfig
from bapo.core.call_limits import MOST_RESPONSES, MOST_STEPS
from bapo.core.errors import did_you_mean

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""No braces or spaces: the name is part of Redis keys and of paths."""


class RunConfig(Frozen):
    """What this run is called, where it lives and how long it lasts."""

    name: str = Field("bapo", pattern=NAME_PATTERN)
    """Name of the run; its directory is `<root>/<name>`."""
    root: str = "outputs"
    """Folder of run directories. Two runs never share a directory."""
    seed: int = Field(42, ge=0, lt=1 << 63)
    """Root of every random choice: data order, filters, X3 draws, re-evaluation draws."""
    num_steps: int = Field(100, ge=1, le=MOST_STEPS)
    """T: learner steps."""


class ModelConfig(Frozen):
    """The policy to be trained."""

    path: str = "models/countdown-tiny"
    """Folder in Hugging Face format, or a Hugging Face id, which the first start fetches into the cache."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the learner's forward pass and of the engines."""
    freeze_vision: bool = False
    """Train the language model of a vision-language model alone: its vision tower stays as it is (docs/images.md)."""
    max_image_pixels: int | None = Field(None, ge=1)
    """Larger images are made smaller before the model sees them, in the same proportions: fewer tokens and less memory.
    null: the model's own limit."""


class TaskConfig(Frozen):
    """Where prompts come from and what is right."""

    name: str = "countdown"
    """A built-in task (`countdown`, `dataset`, `reasoning_gym:NAME`), or your own factory: `package.module:factory` or
    `file.py:factory`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the task's factory."""
    reward: str | None = None
    """Your own reward; replaces the task's: `package.module:function`, `file.py:function`, or a function of another
    framework, `trl:module.function`, `verl:file.py:compute_score` (docs/your_task.md)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest value of the reward; mapped to [0, 1] in a straight line. `[-1, 1]` for verl's DAPO."""
    grading_timeout_s: float = Field(10.0, gt=0, le=MOST_SECONDS)
    """Seconds. A verifier that takes longer on one group is killed; the group is retried, never rewarded 0."""
    grading_memory_mb: int = Field(4096, ge=64)
    """MiB of one grading process, of which a worker has two. A verifier that takes more, with what it has started, is
    killed; the group is retried, never rewarded 0."""

    @model_validator(mode="after")
    def reward_range_rises(self) -> Self:
        """Two different numbers, in order."""
        low, high = self.reward_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"task.reward_range must be [low, high] with low < high, got {[low, high]}")
        return self


class EvaluationConfig(Frozen):
    """Held-out measurement. Evaluation never changes alpha (docs/paper.md, Decisions)."""

    every: int = Field(25, ge=0)
    """Steps between evaluations, rounded up to the next weight update; 0: only before and after training."""
    num_prompts: int = Field(200, ge=1)
    """Prompts per held-out split during the run."""
    num_prompts_final: int = Field(1000, ge=1)
    """Prompts per held-out split before and after training."""
    num_samples: int = Field(2, ge=1, le=MOST_RESPONSES)
    """Responses per prompt."""
    port: int = Field(8703, ge=0, le=65535)
    """Health and metrics of the evaluator; 0 takes a free port."""


class SchedulerConfig(Frozen):
    """Fresh work and re-evaluation."""

    port: int = Field(8701, ge=0, le=65535)
    """Health and metrics of the scheduler; 0 takes a free port."""


class SupervisionConfig(Frozen):
    """Processes that die, and stalled runs."""

    max_restarts: int = Field(5, ge=0)
    """A process that was killed or crashed is started again, so often within `window_s`; its next death ends the run.
    Nothing that was acknowledged is lost by that. 0: the first death ends the run."""
    window_s: float = Field(600.0, gt=0, le=MOST_SECONDS)
    """Restarts that are longer ago are forgiven; those of the learner only when it has saved a checkpoint since."""
    restart_backoff_s: float = Field(0.5, ge=0, le=MOST_SECONDS)
    """Seconds before the first restart; each further one within the window waits twice as long, up to 30 s."""
    stall_s: float = Field(900.0, ge=0, le=MOST_SECONDS)
    """When nothing has moved for this long, one message says who waits for whom; 0: never. It must be longer than a
    learner step and than the start of an engine."""
    stall_ends_run: bool = False
    """true: a run that is stalled for `stall_s` ends with exit code 5 instead of waiting."""


class DashboardConfig(Frozen):
    """The web page of the run."""

    enabled: bool = True
    """Whether the launcher starts it. A run continues without it, and `bapo view RUN` shows its records at any time."""
    host: str = "127.0.0.1"
    """Address that the page listens on, unless BAPO_HOST says otherwise."""
    port: int = Field(8704, ge=0, le=65535)
    """Port of the page; 0 takes a free port."""


class SecurityConfig(Frozen):
    """Who may call whom. Tokens themselves are never part of a configuration (docs/threat_model.md)."""

    tokens: Literal["auto", "off"] = "auto"
    """auto: a process that listens beyond the loopback starts only with tokens; off: everybody may call everything."""
    open_redis: bool = False
    """Accept a Redis on another host that has no password: anyone who reaches it can read and change everything."""


class Config(Frozen):
    """The whole tree."""

    preset: str | None = None
    """Which preset lies beneath this file."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    selector: SelectorConfig = SelectorConfig()
    cadence: CadenceConfig = CadenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    loss: LossConfig = LossConfig()
    learner: LearnerConfig = LearnerConfig()
    shaping: ShapingConfig = ShapingConfig()
    critic: CriticConfig = CriticConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    buffer: BufferConfig = BufferConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    dashboard: DashboardConfig = DashboardConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def composer_exists(self) -> Self:
        known = composer_names()
        if self.algorithm.name not in known:
            is_preset = self.algorithm.name in preset_names()
            hint = f'; {self.algorithm.name} is a preset: write preset = "{self.algorithm.name}"' if is_preset else ""
            raise ValueError(
                f'algorithm.name = "{self.algorithm.name}": there is no such composer'
                f"{did_you_mean(self.algorithm.name, known)}; write one of {', '.join(known)}{hint}"
            )
        return self

    @model_validator(mode="after")
    def selector_exists(self) -> Self:
        known = selector_names()
        if self.algorithm.selector not in known:
            raise ValueError(
                f'algorithm.selector = "{self.algorithm.selector}": there is no such selector'
                f"{did_you_mean(self.algorithm.selector, known)}; write one of {', '.join(known)}"
            )
        return self

    @model_validator(mode="after")
    def sizes_fit_together(self) -> Self:
        if self.learner.minibatch_size > self.algorithm.batch_size:
            raise ValueError(
                f"learner.minibatch_size = {self.learner.minibatch_size} is more than algorithm.batch_size = "
                f"{self.algorithm.batch_size} groups; write at most {self.algorithm.batch_size}"
            )
        most = self.buffer.max_fresh_groups
        if most is not None and most < self.algorithm.batch_size:
            raise ValueError(
                f"buffer.max_fresh_groups = {most} is less than algorithm.batch_size = {self.algorithm.batch_size}: a "
                f"batch would never be complete; write at least {self.algorithm.batch_size}, or null for no limit"
            )
        if self.learner.num_ranks > self.learner.minibatch_size:
            raise ValueError(
                f"learner.num_ranks = {self.learner.num_ranks} is more than learner.minibatch_size = "
                f"{self.learner.minibatch_size}: some ranks would never have a group; write fewer ranks"
            )
        cache = self.shaping.overlong_cache
        if cache is not None and cache > self.rollout.max_response_tokens:
            raise ValueError(
                f"shaping.overlong_cache = {cache} is more than rollout.max_response_tokens = "
                f"{self.rollout.max_response_tokens}; write at most that"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        if self.learner.microbatch_tokens < longest:
            raise ValueError(
                f"learner.microbatch_tokens = {self.learner.microbatch_tokens} cannot hold one sequence of "
                f"{longest} tokens (max_prompt_tokens + max_response_tokens); write at least {longest}"
            )
        return self

    @model_validator(mode="after")
    def autoscaling_stays_within_the_fleet(self) -> Self:
        fleet, scaling = self.rollout.max_workers, self.autoscaling
        most = max(scaling.min_workers, scaling.max_workers or scaling.min_workers)
        if most > fleet:
            raise ValueError(
                f"autoscaling asks for up to {most} workers, more than rollout.max_workers = {fleet}; "
                f"write rollout.max_workers = {most}, or less in [autoscaling]"
            )
        return self

    @model_validator(mode="after")
    def remix_has_one_end(self) -> Self:
        if self.algorithm.name != "remix":
            return self
        ends = {
            "algorithm.replay.last_step": self.algorithm.replay.last_step,
            "loss.kl_restart_step": self.loss.kl_restart_step,
            "learner.epochs_until": self.learner.epochs_until,
        }
        if len({end for end in ends.values() if end is not None}) > 1:
            found = ", ".join(f"{key} = {'null' if end is None else end}" for key, end in ends.items())
            raise ValueError(
                f"{found}: these are all T of ReMix, the step behind which it is plain GRPO; write the same number, or "
                "null for the parts that are not to end"
            )
        return self

    @property
    def continuation_steps(self) -> int:
        """Most steps that a response of `rollout.generation_budget` may need for its later segments."""
        rollout = self.rollout
        budget = rollout.generation_budget or rollout.max_response_tokens
        return (-(-rollout.max_response_tokens // budget) - 1) * self.cadence.weight_sync_interval

    @model_validator(mode="after")
    def segments_are_not_too_old(self) -> Self:
        if self.continuation_steps > self.cadence.max_steps_ahead:
            raise ValueError(
                f"rollout.generation_budget = {self.rollout.generation_budget} of max_response_tokens = "
                f"{self.rollout.max_response_tokens}: a response may last {self.continuation_steps} steps more than "
                f"one that is sampled in one go, but cadence.max_steps_ahead = {self.cadence.max_steps_ahead}, "
                f"so it would be too old; write cadence.max_steps_ahead = {self.continuation_steps} or more, "
                "or a larger budget"
            )
        return self

    @model_validator(mode="after")
    def ports_differ(self) -> Self:
        sections = ("buffer", "scheduler", "learner", "evaluation", "rollout")
        owner: dict[int, str] = {}
        for section in sections:
            port = getattr(self, section).port
            if port and port in owner:
                raise ValueError(
                    f"{owner[port]}.port and {section}.port are both {port}; write another one, or 0 for a free port"
                )
            owner[port] = section
        return self
