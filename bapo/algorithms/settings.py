"""Settings of batch composition and cadence. The whole config is in `bapo.config.tree`.

Sizes are counted in groups (prompts), never in responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bapo.algorithms.reward_levels import levels_within
from bapo.core.call_limits import MAX_REQUESTS, MAX_RESPONSES


class Frozen(BaseModel):
    """Immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


MAX_SECONDS = 1e6
"""Maximum of any configured time, eleven days: poll() is limited to 2^31 ms."""


class ReplayConfig(Frozen):
    """Replay: what is kept, and how much of it is trained again; see docs/methods.md for the keys of each composer."""

    share: float = Field(0.0, ge=0, lt=1)
    """Fraction of B that is replayed instead of sampled: p of ReMix, 1 - sigma of DOTS."""
    first_step: int = Field(1, ge=1)
    """First step with replay; earlier steps are all fresh (DOTS fills its memory)."""
    last_step: int | None = Field(None, ge=1)
    """Last step with replay: T of ReMix, on-policy afterwards; null: no end."""
    window: int = Field(2, ge=1)
    """N of ReMix: replayed groups come from this many steps before."""
    capacity: int | None = Field(512, ge=1)
    """Maximum groups in the memory, first in first out; null: limited only per prompt."""
    per_prompt: int = Field(16, ge=1)
    """Maximum responses per prompt in the memory (RePO), or maximum correct ones (ARPO)."""
    num_rows: int = Field(8, ge=1)
    """k: stored responses that are joined to a prompt's fresh ones (RePO)."""
    strategy: Literal["highest_k", "recent_k", "random_k", "all", "max_variance_k"] = "highest_k"
    """Which stored responses are joined (RePO)."""
    keep_homogeneous: bool = False
    """Also keep zero-variance groups (DOTS)."""
    min_success: float = Field(0.1, ge=0, lt=1)
    """Reward above which a response is kept as a success (ARPO)."""
    sft_items: int | None = Field(None, ge=1)
    """Expert solutions per supervised step, which runs when this many are queued (ReLIFT); null: B."""

    @model_validator(mode="after")
    def replay_does_not_end_before_it_begins(self) -> Self:
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(
                f"replay.last_step = {self.last_step} is before replay.first_step = {self.first_step}, so no step "
                f"would replay; set last_step = {self.first_step} or later, or null"
            )
        return self


class AlgorithmConfig(Frozen):
    """Batch composition: which groups train (section 3.2 of the paper)."""

    name: str = "bapo"
    """Composer: a file of `bapo/algorithms/composers`. Only `bapo` uses X2 and B_bad."""
    selector: str = "uniform"
    """Which prompts are sampled: a file of `bapo/algorithms/selectors` (`uniform`, `mopps`, `kimi`, and `dots`, a
    variant with a predictor that is trained online)."""
    batch_size: int = Field(256, ge=1)
    """B: fresh groups per step, and maximum groups per batch (eq. 7)."""
    group_size: int = Field(8, ge=2, le=MAX_RESPONSES)
    """G: responses per prompt."""
    c1: float = Field(1 / 8, ge=0, lt=1)
    """Hard threshold: a group with mu <= c1 enters B_bad; a re-evaluation with c1 < mu' < 1 becomes X2 (eq. 6)."""
    c2_range: tuple[float, float] = (1 / 8, 4 / 8)
    """(low, high) of c2, the lower bound of the window of B_high (eq. 8)."""
    c3_range: tuple[float, float] = (2 / 8, 5 / 8)
    """(low, high) of c3, the upper bound of the window of B_high (eq. 8)."""
    threshold_schedule: Literal["eq8", "inverted", "official", "fixed"] = "eq8"
    """Schedule of c2 and c3 by r_tot. `fixed` uses the low ends."""
    r_tot_decay: float = Field(0.0, ge=0, lt=1)
    """Weight of the previous r_tot in a moving average; 0: only the mean of this step."""
    online_filter: Literal["range", "gaussian", "gaussian_quota", "uniform", "none"] = "range"
    """Which fresh groups become X1 (appendix A.3). `none` keeps all: the GRPO baseline."""
    gaussian_center: float = 0.5
    """mu_f of the Gaussian filter."""
    gaussian_width: float = Field(0.2, gt=0)
    """sigma_f of the Gaussian filter."""
    gaussian_share: float = Field(0.75, gt=0, le=1)
    """Target fraction of fresh groups kept by `gaussian_quota`."""
    uniform_share: float = Field(0.6, gt=0, le=1)
    """Fraction of fresh groups kept by `uniform`."""
    use_x2: bool = True
    """Re-evaluate hard prompts (false: ablation without X2 and without extra rollouts)."""
    use_x3: bool = True
    """Reuse groups of B_high (false: ablation without X3)."""
    bad_capacity: int | None = Field(None, ge=1)
    """|B_bad|: maximum hard prompts, first in first out; null: B, one batch."""
    high_window: int = Field(3, ge=1)
    """S: B_high contains groups of this many latest steps."""
    max_reevaluated: int | None = Field(None, ge=1, le=MAX_REQUESTS)
    """M: maximum hard prompts per re-evaluation round; null: half of B_bad, as 128 of 256 in Table 3."""
    x3_policy: Literal["window", "youngest"] = "window"
    """Which groups of the latest S steps become X3: those of eq. 7, or any informative ones, the youngest first, then
    those nearest to mu = 1/2."""
    drop_zero_variance_x3: bool = True
    """Never reuse a zero-variance group."""
    x3_exactly_half: bool = False
    """Mini-test: X3 uses only groups with mu == 1/2, instead of the window [c2, c3]."""
    max_rounds: int = Field(4, ge=1)
    """Maximum generation rounds per step of `dapo`, after which it trains the informative groups so far."""
    pilot_size: int | None = Field(None, ge=1)
    """n: responses of a fresh group of `pilot_commit`, which samples the other G - n only where they are expected to be
    informative; null: fresh groups have all G."""
    pilot_prior: float = Field(2.0, gt=0)
    """s: strength, in responses, of `pilot_commit`'s prior of the pass rate, whose mean is r_tot."""
    num_experts: int = Field(0, ge=0, le=1)
    """Rows of a group that are the task's expert solution instead of sampled: 1 for `luffy` and `relift`."""
    replay: ReplayConfig = ReplayConfig()
    """Replay settings of composers."""

    @property
    def reuses_by_window(self) -> bool:
        """Whether c2 <= mu <= c3 decides what is reused; if not, c2 and c3 are recorded but decide nothing."""
        return self.name == "bapo" and self.use_x3 and self.x3_policy == "window"

    @property
    def retries_by_c1(self) -> bool:
        """Whether mu <= c1 decides which prompts are sampled again."""
        return self.name == "bapo" and self.use_x2

    @property
    def capacity(self) -> int:
        return self.bad_capacity or self.batch_size

    @property
    def most_reevaluated(self) -> int:
        return self.max_reevaluated or min(MAX_REQUESTS, max(1, self.capacity // 2))

    @property
    def fresh_size(self) -> int:
        """Responses of a fresh request."""
        return self.pilot_size or self.group_size

    @property
    def reevaluated_size(self) -> int:
        """Responses of a re-evaluation: G, or what a pilot leaves of it."""
        return self.group_size - (self.pilot_size or 0)

    @property
    def num_sampled(self) -> int:
        """Responses of a training group that the policy samples."""
        return self.group_size - self.num_experts

    @property
    def fresh_schedule(self) -> FreshSchedule:
        """Fresh groups of each step: B, less those in whose place stored ones train."""
        replay = self.replay
        mixed = self.batch_size - round(replay.share * self.batch_size)
        phases = [(1, self.batch_size), (replay.first_step, mixed)][replay.first_step == 1 :]
        if replay.last_step is not None:
            phases.append((replay.last_step + 1, self.batch_size))
        return FreshSchedule(phases=tuple(phases))

    def num_replayed(self, step: int) -> int:
        """Stored groups that take the place of fresh ones in this step."""
        return self.batch_size - self.fresh_schedule.at(step)

    @model_validator(mode="after")
    def fresh_groups_are_left(self) -> Self:
        if round(self.replay.share * self.batch_size) >= self.batch_size:
            raise ValueError(
                f"replay.share = {self.replay.share} of batch_size = {self.batch_size} leaves no fresh group; use a "
                "smaller share"
            )
        return self

    @model_validator(mode="after")
    def pilots_are_completed(self) -> Self:
        if (self.name == "pilot_commit") != (self.pilot_size is not None):
            raise ValueError(
                f"name = {self.name!r} with pilot_size = {self.pilot_size}: pilots are responses of `pilot_commit`; "
                'set both, or neither (preset = "pilot-commit")'
            )
        if self.pilot_size is not None and (self.pilot_size >= self.group_size or not self.use_x2):
            raise ValueError(
                f"pilot_size = {self.pilot_size} with group_size = {self.group_size} and use_x2 = {self.use_x2}: the "
                "other responses are sampled in re-evaluation rounds; use a smaller pilot_size and use_x2 = true"
            )
        return self

    @model_validator(mode="after")
    def windows_are_ordered(self) -> Self:
        for key, (low, high) in {"c2_range": self.c2_range, "c3_range": self.c3_range}.items():
            if not 0 <= low <= high <= 1:
                raise ValueError(f"{key} = [{low}, {high}]: must be low <= high, both in [0, 1]")
        if self.c2_range[0] > self.c3_range[0] or self.c2_range[1] > self.c3_range[1]:
            raise ValueError(
                f"c2_range = {list(self.c2_range)} is above c3_range = {list(self.c3_range)}, so the window [c2, c3] "
                "would be empty; use a c2_range with ends that are not above those of c3_range"
            )
        return self

    @model_validator(mode="after")
    def each_subset_can_have_members(self) -> Self:
        if self.x3_exactly_half and self.group_size % 2:
            raise ValueError(
                f"x3_exactly_half = true, but no group of group_size = {self.group_size} has a pass rate of 1/2; "
                f"set group_size = {self.group_size + 1}, or x3_exactly_half = false"
            )
        highest = (self.group_size - 1) / self.group_size
        if self.use_x2 and self.c1 >= highest:
            raise ValueError(
                f"c1 = {self.c1} leaves no level with c1 < mu' < 1 at group_size = {self.group_size}, so X2 would "
                f"always be empty; set c1 below {highest}, or use_x2 = false"
            )
        return self

    @model_validator(mode="after")
    def fixed_window_has_variance(self) -> Self:
        if self.threshold_schedule != "fixed" or self.x3_exactly_half or not self.use_x3:
            return self
        c2, c3 = self.c2_range[0], self.c3_range[0]
        levels = set(levels_within(c2, c3, self.group_size))
        if self.drop_zero_variance_x3 and levels and levels <= {0, self.group_size}:
            raise ValueError(
                f"threshold_schedule = fixed with c2 = {c2} and c3 = {c3} allows only zero-variance groups, "
                "which drop_zero_variance_x3 drops; widen c2_range and c3_range, or set use_x3 = false"
            )
        return self


class CadenceConfig(Frozen):
    """Intervals of weight updates and re-evaluations."""

    weight_sync_interval: int = Field(5, ge=1)
    """v: steps between weight updates of the workers (Algorithm 1, lines 3 to 5)."""
    reevaluation_interval: int = Field(5, ge=1)
    """m: steps between re-evaluations of B_bad (Algorithm 1, lines 13 to 15); a multiple of v."""
    max_steps_ahead: int = Field(1, ge=0)
    """0: exactly the paper's schedule, with a wait at each update. s >= 1: workers sample up to s steps ahead, so that
    sampling and training overlap; staleness of fresh groups is then at most weight_sync_interval - 1 + s, of
    re-evaluated ones only if batches wait for them."""
    wait_for_reevaluation: bool = False
    """true: step t waits for the re-evaluation of step t (the paper's order).
    false: X2 joins the first batch that is assembled after its groups arrive."""

    @property
    def max_staleness(self) -> int:
        """Maximum staleness of a fresh group."""
        return self.weight_sync_interval - 1 + self.max_steps_ahead

    @property
    def lookahead(self) -> int:
        """L: the requests of step h are enqueued this many steps before it."""
        return self.weight_sync_interval + self.max_steps_ahead

    def is_sync_step(self, step: int) -> bool:
        """Whether alpha <- theta_t at the start of step t (docs/paper.md, Algorithm 1 line 3)."""
        return step == 1 or step % self.weight_sync_interval == 0

    def synced_version(self, step: int) -> int:
        """alpha.version during step t under the paper's schedule: 1, 1, ..., v, v, ..., 2v, ..."""
        return max(1, step // self.weight_sync_interval * self.weight_sync_interval)

    def min_version(self, step: int) -> int:
        """Oldest version that may sample a fresh group planned for step t."""
        return self.synced_version(max(1, step - self.max_steps_ahead))

    @model_validator(mode="after")
    def reevaluation_meets_fresh_weights(self) -> Self:
        if self.reevaluation_interval % self.weight_sync_interval:
            interval = self.weight_sync_interval
            above = -(-self.reevaluation_interval // interval) * interval
            raise ValueError(
                f"reevaluation_interval = {self.reevaluation_interval} must be a multiple of weight_sync_interval = "
                f"{self.weight_sync_interval}, because X2 is sampled from pi_theta_t (docs/paper.md, Decisions); "
                f"set reevaluation_interval = {above}"
            )
        return self


NEVER = 1 << 62
"""A step that no run reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshSchedule:
    """A number of groups per step that changes at some steps.

    Example: phases ((1, 154), (101, 256)): ReMix with B = 256, p = 0.4 and T = 100.
    """

    phases: tuple[tuple[int, int], ...]
    """(first step, groups per step), the first of them from step 1."""

    def at(self, step: int) -> int:
        """Fresh groups of this step."""
        return next((number for first, number in reversed(self.phases) if step >= first), self.phases[0][1])

    def up_to(self, step: int) -> int:
        """Fresh groups of all steps up to this one."""
        return sum(number * max(0, min(step + 1, end) - first) for first, end, number in self._spans())

    def step_of(self, place: int) -> int:
        """Step of the fresh group at this place, from 0."""
        for first, end, number in self._spans():
            if place < number * (end - first):
                return first + place // number
            place -= number * (end - first)
        raise ValueError(f"no run has this many fresh groups: {place}")

    @property
    def most(self) -> int:
        """Fresh groups of the largest step."""
        return max(number for _, number in self.phases)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(first step, step after the last, groups per step) of each phase."""
        ends = [*(first for first, _ in self.phases[1:]), NEVER]
        for (first, number), end in zip(self.phases, ends, strict=True):
            yield first, end, number
