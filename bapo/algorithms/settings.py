"""Settings of batch composition and cadence. The whole config is in `bapo.config.tree`.

Sizes are counted in groups (prompts), never in responses.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bapo.algorithms.reward_levels import levels_within
from bapo.core.call_limits import MAX_REQUESTS, MAX_RESPONSES


class Frozen(BaseModel):
    """Immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


MAX_SECONDS = 1e6
"""Maximum of any configured time, eleven days: poll() is limited to 2^31 ms."""


class AlgorithmConfig(Frozen):
    """Batch composition: which groups train (section 3.2 of the paper)."""

    composer: str = "bapo"
    """The rule that builds batches (docs/methods.md), or your own. Only `bapo` uses X2 and B_bad."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The composer's own settings."""
    selector: str = "uniform"
    """Which prompts are sampled (docs/methods.md), or your own."""
    batch_size: int = Field(256, ge=1)
    """B: fresh groups per step, and most groups per batch (eq. 7)."""
    group_size: int = Field(8, ge=2, le=MAX_RESPONSES)
    """G: responses per prompt."""
    c1: float = Field(1 / 8, ge=0, lt=1)
    """Hard threshold: mu <= c1 enters B_bad; a re-evaluation with c1 < mu' < 1 becomes X2 (eq. 6)."""
    c2_range: tuple[float, float] = (1 / 8, 4 / 8)
    """(low, high) of c2, lower bound of the window of B_high (eq. 8)."""
    c3_range: tuple[float, float] = (2 / 8, 5 / 8)
    """(low, high) of c3, its upper bound."""
    threshold_schedule: Literal["eq8", "inverted", "official", "fixed"] = "eq8"
    """Of c2 and c3 by r_tot (docs/paper.md); `fixed`: the low ends."""
    r_tot_decay: float = Field(0.0, ge=0, lt=1)
    """Weight of the previous r_tot in a moving average; `reward_mean` of a step is its own."""
    online_filter: Literal["range", "gaussian", "uniform", "none"] = "range"
    """Which fresh groups become X1 (appendix A.3); `none`: all, as GRPO."""
    gaussian_center: float = 0.5
    """mu_f of `gaussian`."""
    gaussian_width: float = Field(0.2, gt=0)
    """sigma_f of `gaussian`."""
    uniform_share: float = Field(0.6, gt=0, le=1)
    """Share of fresh groups kept by `uniform`."""
    use_x2: bool = True
    """Re-evaluate hard prompts, which costs rollouts."""
    use_x3: bool = True
    """Reuse groups of B_high."""
    bad_capacity: int | None = Field(None, ge=1)
    """Most prompts in B_bad, first in first out; null: B."""
    high_window: int = Field(3, ge=1)
    """S: B_high has the groups of this many latest steps."""
    max_reevaluated: int | None = Field(None, ge=1, le=MAX_REQUESTS)
    """M: most prompts per re-evaluation; null: half of B_bad, as in Table 3."""
    x3_policy: Literal["window", "youngest"] = "window"
    """Groups of B_high that become X3: those of eq. 7, or informative ones, youngest first, then nearest to mu =
    1/2."""
    drop_zero_variance_x3: bool = True
    """Never reuse a zero-variance group."""
    x3_exactly_half: bool = False
    """Mini-test: X3 has mu = 1/2 instead of the window [c2, c3]."""
    max_rounds: int = Field(4, ge=1)
    """Most rounds per step of `dapo`; then it trains the informative groups so far."""
    num_experts: int = Field(0, ge=0, le=1)
    """Rows of a group that are the task's expert solution (`luffy`, `relift`)."""

    @property
    def sampled_size(self) -> int:
        """Responses of a group that a worker samples: G less an expert's row."""
        return self.group_size - self.num_experts

    @property
    def capacity(self) -> int:
        return self.bad_capacity or self.batch_size

    @property
    def most_reevaluated(self) -> int:
        return self.max_reevaluated or min(MAX_REQUESTS, max(1, self.capacity // 2))

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
    """v: steps between weight updates of the workers."""
    reevaluation_interval: int = Field(5, ge=1)
    """m: steps between re-evaluations of B_bad; a multiple of v."""
    max_steps_ahead: int = Field(1, ge=0)
    """0: the paper's schedule, which waits at each update. s >= 1: workers sample up to s steps ahead of the learner;
    fresh groups are at most weight_sync_interval - 1 + s steps old, re-evaluated ones with `wait_for_reevaluation`,
    too."""
    wait_for_reevaluation: bool = False
    """Step t waits for its re-evaluation, as in the paper; false: X2 joins the first batch after its groups arrive."""

    @property
    def max_staleness(self) -> int:
        """Maximum staleness of a fresh group."""
        return self.weight_sync_interval - 1 + self.max_steps_ahead

    def oldest_fresh(self, step: int) -> int:
        """Oldest version whose tokens are fresh enough for step t."""
        return step - self.max_staleness

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

    def is_first_after(self, version: int, every: int) -> bool:
        """Whether a version is the first published one after a multiple of `every` steps (> 0)."""
        before = self.synced_version(version - 1)
        return self.is_sync_step(version) and (version - 1) // every > (before - 1) // every

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
