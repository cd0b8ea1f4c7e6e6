"""The one configuration of a run: every key, its default, its meaning and what excludes what.

Files: TOML, layered (preset, then files from left to right, then `--section.key value`). Unknown keys are refused.
Sizes are counted in groups (prompts), never in responses, unless the name says otherwise.
The docstring below each field is the manual: `docs/configuration.md` is made from it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from bapo.algorithms.autoscaling.settings import AutoscalingConfig
from bapo.algorithms.frozen import Frozen
from bapo.algorithms.registry import composer_names
from bapo.algorithms.selectors.registry import selector_names
from bapo.algorithms.selectors.settings import SelectorConfig
from bapo.algorithms.settings import AlgorithmConfig, CadenceConfig
from bapo.config.diagnostics import DiagnosticsConfig
from bapo.config.objective import CriticConfig, LossConfig, ShapingConfig, SupervisedConfig
from bapo.config.supervision import SupervisionConfig
from bapo.errors import did_you_mean

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""No braces or spaces: the name is part of Redis keys and of paths."""


def distinct_indices(indices: tuple[int, ...]) -> tuple[int, ...]:
    """Raises: ValueError."""
    if not indices or min(indices) < 0 or len(set(indices)) < len(indices):
        raise ValueError(f"{list(indices)}: write one or more different indices from 0 on, such as [0, 1], or null")
    return indices


GpuIndices = Annotated[tuple[int, ...], AfterValidator(distinct_indices)]


class RunConfig(Frozen):
    """What this run is called, where it lives and how long it lasts."""

    name: str = Field("bapo", pattern=NAME_PATTERN)
    """Name of the run; its directory is `<root>/<name>`."""
    root: str = "outputs"
    """Folder of run directories. Two runs never share a directory."""
    seed: int = Field(42, ge=0)
    """Root of every random choice: data order, filters, X3 draws, re-evaluation draws."""
    num_steps: int = Field(100, ge=1)
    """T: learner steps."""


class ModelConfig(Frozen):
    """The policy to be trained."""

    path: str = "models/countdown-tiny"
    """Folder in Hugging Face format, or a Hugging Face id, which the first start fetches into the cache."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the learner's forward pass and of the engines."""


class TaskConfig(Frozen):
    """Where prompts come from and what is right."""

    name: str = "countdown"
    """A built-in task (`countdown`, `dataset`, `reasoning_gym:NAME`), or your own factory: `package.module:factory` or
    `file.py:factory`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the task's factory."""
    reward: str | None = None
    """Your own reward; replaces the task's: `package.module:function`, `file.py:function`, or a function of another
    framework, `trl:module.function`, `verl:file.py:compute_score` (docs/bring-your-own.md)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest value of the reward; mapped to [0, 1] in a straight line. `[-1, 1]` for verl's DAPO."""
    grading_timeout_s: float = Field(10.0, gt=0)
    """Seconds. A verifier that takes longer on one group is killed; the group is retried, never rewarded 0."""

    @model_validator(mode="after")
    def reward_range_rises(self) -> Self:
        """Two different numbers, in order."""
        low, high = self.reward_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"task.reward_range must be [low, high] with low < high, got {[low, high]}")
        return self


class RolloutConfig(Frozen):
    """Sampling."""

    engine: str = "vllm"
    """A file of `rollout_server/engines`: `vllm`, or `scripted` (a test double)."""
    num_workers: int = Field(1, ge=1)
    """Engines at the start; `bapo scale rollout N` changes it during a run."""
    max_workers: int = Field(8, ge=1)
    """`bapo scale` refuses more."""
    max_response_tokens: int = Field(64, ge=1)
    """A response that reaches this length is truncated and graded as it stands."""
    max_prompt_tokens: int = Field(64, ge=1)
    """A longer prompt is refused before the run starts."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; rollout log-probs are those of the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; the importance ratios of eq. 3 need 1.0."""
    generation_budget: int | None = Field(None, ge=1)
    """Tokens that a fresh response gets from one policy version: then it waits, and goes on with the next weights, or
    when there is nothing else to sample (partial rollouts, ADR 0069). null: a response is sampled in one go."""
    max_groups_in_flight: int = Field(32, ge=1)
    """Groups that one worker samples at a time."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the engine (vLLM: engine arguments)."""
    worker_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Ray resources of one worker: `{ GPU = 1 }`, or names that `ray start --resources` gave; empty: one GPU where vLLM
    is its build for GPUs, else one CPU."""
    gpus: GpuIndices | None = None
    """GPUs of this machine that are the workers', as torch numbers what it sees; null: all that the learner leaves.
    Where it shares one with the learner, `engine_options` must have gpu_memory_utilization (docs/gpus.md)."""
    weights_cache: str | None = None
    """Where a host that cannot read the learner's weight files keeps copies; null: beside its temporary files."""
    host: str = "127.0.0.1"
    """Address that the control API listens on, unless BAPO_HOST says otherwise. Workers on other hosts fetch weights
    from there (docs/scale.md)."""
    port: int = Field(8710, ge=0, le=65535)
    """Control API of the fleet; 0 takes a free port."""
    sync_timeout_s: float = Field(120.0, gt=0)
    """A worker that has not taken new weights after this is replaced."""
    start_timeout_s: float = Field(300.0, gt=0)
    """A worker that is not ready after this fails the run."""
    drain_s: float = Field(30.0, ge=0)
    """A worker that is scaled away may finish its groups for so long; what is not finished then goes back."""

    @model_validator(mode="after")
    def workers_fit(self) -> Self:
        if self.num_workers > self.max_workers:
            raise ValueError(
                f"num_workers = {self.num_workers} is more than max_workers = {self.max_workers}; "
                f"write max_workers = {self.num_workers}, or fewer workers"
            )
        if self.top_p < 1:
            raise ValueError(
                f"top_p = {self.top_p}: the learner's log-probs are over the whole vocabulary, so the importance "
                "ratios of eq. 3 would be wrong; write top_p = 1.0"
            )
        return self


class LearnerConfig(Frozen):
    """Optimisation."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(10, ge=0)
    """Learner steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on behind the warm-up, until the last step of the run."""
    lr_final: float = Field(0.0, ge=0, le=1)
    """Share of `lr` at the last step, where it falls."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Most L2 norm of the gradient."""
    minibatch_size: int = Field(64, ge=1)
    """Groups per optimizer step; a batch is cut into near-equal mini-batches (ADR 0018)."""
    epochs: int = Field(1, ge=1)
    """Passes over one batch."""
    epochs_until: int | None = Field(None, ge=1)
    """Behind this step one pass is made (T of ReMix); null: always `epochs`."""
    reset_optimizer: bool = False
    """Forget Adam's moments at the start of every step (Kimi k1.5)."""
    microbatch_tokens: int = Field(4096, ge=64)
    """Token budget of one forward and backward pass; does not change the loss."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep each decoder layer's input alone and compute the rest again in the backward pass: less memory for a third
    more arithmetic, the same loss and gradients. auto: on CUDA, not on the CPU."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits exist at one time."""
    num_ranks: int = Field(1, ge=1)
    """Learner processes (FSDP2)."""
    num_threads: int = Field(1, ge=1)
    """CPU threads per rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    gpus: GpuIndices | None = None
    """GPUs of this machine that are the learner's, one per rank, as torch numbers what it sees; null: the first
    `num_ranks` that are not in `rollout.gpus` (docs/gpus.md)."""
    batch_timeout_s: float = Field(600.0, gt=0)
    """Seconds without any progress: learner and evaluator stop with a named reason when they wait and no group arrived
    for so long, for whatever purpose. Longer than the longest response takes."""
    port: int = Field(8702, ge=0, le=65535)
    """Health and metrics of rank 0; 0 takes a free port."""


class CheckpointConfig(Frozen):
    """What survives."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints. One joins weights, optimizer, data position, random state and buffer."""
    keep_last: int = Field(3, ge=1)
    """Older checkpoints are removed."""
    keep_batches: bool = True
    """Keep the batches behind the oldest checkpoint (RUN/batches), so that `bapo replay` can repeat a step (ADR 0085):
    as many bytes as the buffer sent for `every` x `keep_last` steps."""


class BufferConfig(Frozen):
    """The buffer service and its Redis."""

    host: str = "127.0.0.1"
    """Address that the service listens on, unless BAPO_HOST says otherwise."""
    port: int = Field(8700, ge=0, le=65535)
    """Port of the API; 0 takes a free port."""
    url: str | None = None
    """A buffer service that is already running, or several replicas of it with commas between their URLs; null: the
    launcher starts one."""
    redis_url: str | None = None
    """A Redis that is already running, without its password (BAPO_REDIS_PASSWORD_FILE has that); null: the launcher
    starts an embedded one."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """Durability of the embedded Redis: everysec may lose about the last second at power loss, always loses nothing."""
    max_memory_mb: int = Field(2048, ge=16)
    """Memory limit of the embedded Redis; pushes are refused with 503 beyond it, nothing is evicted."""
    direct: bool = True
    """A learner on the machine of a Redis with a unix socket (the embedded one) may read the frames of its batches
    there, as a Redis user that can do nothing else; false: all batches go through the service."""
    max_fresh_groups: int | None = Field(None, ge=1)
    """Fresh groups that may wait for the learner: beyond it, while the next batch is complete, workers get no fresh
    requests and their pushes wait (429). At least algorithm.batch_size; null: as many as were asked for."""
    max_fresh_mb: int | None = Field(None, ge=1)
    """The same limit in MB of their frames; null: none but max_memory_mb."""
    lease_s: float = Field(120.0, gt=0)
    """A claimed request returns to the queue after this, unless its worker renews it."""
    max_attempts: int = Field(3, ge=1)
    """A group that fails this often is dropped and counted."""
    max_failures_in_a_row: int = Field(20, ge=1)
    """So many failed groups without one success stop the run with the last reason."""

    @model_validator(mode="after")
    def url_holds_no_password(self) -> Self:
        if self.redis_url and (urlsplit(self.redis_url).password or "password=" in self.redis_url):
            raise ValueError(
                "redis_url holds a password, and a configuration is copied, printed and committed; write it without, "
                "and name a file with the password in BAPO_REDIS_PASSWORD_FILE"
            )
        return self

    @model_validator(mode="after")
    def redis_has_one_owner(self) -> Self:
        if self.url and self.redis_url:
            raise ValueError(
                f"url = {self.url} is a service that is already running with a Redis of its own, so "
                f"redis_url = {self.redis_url} would never be used; remove one of them"
            )
        return self


class EvaluationConfig(Frozen):
    """Held-out measurement. Evaluation never changes alpha (ADR 0028)."""

    every: int = Field(25, ge=0)
    """Steps between evaluations, rounded up to the next weight update; 0: only before and after training."""
    num_prompts: int = Field(200, ge=1)
    """Prompts per held-out split during the run."""
    num_prompts_final: int = Field(1000, ge=1)
    """Prompts per held-out split before and after training."""
    num_samples: int = Field(2, ge=1)
    """Responses per prompt."""
    port: int = Field(8703, ge=0, le=65535)
    """Health and metrics of the evaluator; 0 takes a free port."""


class SchedulerConfig(Frozen):
    """Fresh work and re-evaluation."""

    port: int = Field(8701, ge=0, le=65535)
    """Health and metrics of the scheduler; 0 takes a free port."""


class SecurityConfig(Frozen):
    """Who may call whom. Tokens themselves are never part of a configuration (docs/threat_model.md)."""

    tokens: Literal["auto", "off"] = "auto"
    """auto: a process that listens beyond the loopback starts only with tokens; off: everybody may call everything."""
    open_redis: bool = False
    """Accept a Redis on another host that has no password: whoever reaches it reads and changes everything."""


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
    scheduler: SchedulerConfig = SchedulerConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def composer_exists(self) -> Self:
        known = composer_names()
        if self.algorithm.name not in known:
            raise ValueError(
                f'algorithm.name = "{self.algorithm.name}": there is no such composer'
                f"{did_you_mean(self.algorithm.name, known)}; write one of {', '.join(known)}"
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
        return (-(-rollout.max_response_tokens // budget) - 1) * self.cadence.v

    @model_validator(mode="after")
    def segments_are_not_too_old(self) -> Self:
        if self.continuation_steps > self.cadence.slack:
            raise ValueError(
                f"rollout.generation_budget = {self.rollout.generation_budget} of max_response_tokens = "
                f"{self.rollout.max_response_tokens}: a response may last {self.continuation_steps} steps more than "
                f"one that is sampled in one go, but cadence.slack = {self.cadence.slack}, so it would be too old; "
                f"write cadence.slack = {self.continuation_steps} or more, or a larger budget"
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
