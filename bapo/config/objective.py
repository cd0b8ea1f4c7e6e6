"""The objective: policy loss and reward shaping.

`docs/methods.md` maps methods to these settings.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from bapo.algorithms.settings import Frozen

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_len", "group_const_len", "two_term"
]


class LossConfig(Frozen):
    """The policy loss: surrogate, importance weight, KL, entropy, and aggregation."""

    name: str = "ppo"
    """The surrogate (docs/methods.md), or your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The surrogate's own settings."""
    ratio_mode: Literal["direct", "official", "decoupled", "interpolated"] = "decoupled"
    """Center of the trust region (docs/paper.md, Algorithm 1); `interpolated`: AReaL's `decoupled` without an extra
    forward pass."""
    clip_low: float | None = Field(0.2, ge=0)
    """The ratio is clipped at 1 - clip_low (`dppo`: a difference of probabilities); null: unbounded, if the loss allows
    it."""
    clip_high: float | None = Field(0.28, ge=0)
    """At 1 + clip_high; else as clip_low."""
    dual_clip: float | None = Field(10.0, gt=1)
    """Bound of the loss for negative advantages with PPO's clip; null: off."""
    aggregation: Aggregation = "token_mean"
    """Of token losses over the global mini-batch."""
    advantage: str = "group"
    """Baseline: the group (eq. 2), a critic (`gae`), others (docs/methods.md), or your own."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """The advantage's own settings."""
    advantage_norm: Literal["pop_var", "std_ddof1", "center"] = "pop_var"
    """Of eq. 2: by population variance, by sample deviation (verl, TRL), or none (Dr. GRPO)."""
    advantage_eps: float = Field(1e-6, ge=0)
    """Smoothing of eq. 2."""
    advantage_pool: Literal["mixed", "split", "on_policy"] = "mixed"
    """Rewards of mean and deviation: all rows; fresh and others separately (RePO); the fresh ones (LUFFY's option, with
    `advantage_norm = "center"`)."""
    advantage_pass_k: int = Field(1, ge=1)
    """K: multiply an advantage by K times the share of draws of K - 1 other responses that are all incorrect: the
    gradient of pass@K. 1: off."""
    advantage_batch_norm: bool = False
    """Normalize again over all tokens of the batch (AReaL)."""
    importance_level: Literal["none", "token", "sequence", "geometric"] = "token"
    """The weight anchor / alpha per token, its product over a response, or its geometric mean."""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """Outside the bounds: truncate the weight, or mask token or response."""
    importance_cap: float | None = Field(3.0, gt=0)
    """Upper bound of the weight; null: none."""
    importance_floor: float | None = Field(None, gt=0)
    """Lower bound of `mask`."""
    importance_veto: float | None = Field(None, gt=0, lt=1)
    """Mask a response if any token has anchor / alpha below this."""
    importance_denominator: Literal["all", "kept"] = "all"
    """Of the mean with masking: all tokens (AReaL), or the kept ones (verl)."""
    kl_coef: float = Field(0.001, ge=0)
    """beta of eqs. 1 and 3."""
    kl_ref: Literal["behavior", "reference", "convex"] = "behavior"
    """alpha (eq. 3), the base model (eq. 1), or a mix of base model and pi_theta_t in which the base model's share
    falls from 1 (ReMix)."""
    kl_estimator: Literal["k1", "k2", "k3", "is_rev"] | None = None
    """Per token; null: `is_rev` for behavior, else `k3`."""
    kl_restart_step: int | None = Field(None, ge=1)
    """After this step the policy replaces the base model of the KL term, with share 1."""
    entropy_coef: float = Field(0.001, ge=0)
    """Coefficient of the mean token entropy."""

    @property
    def masks(self) -> bool:
        """Whether rows or tokens may be masked by their importance weight."""
        return self.importance_mode == "mask" or self.importance_veto is not None

    @property
    def has_own_baseline(self) -> bool:
        """Whether advantages are more than a reward against its whole group."""
        return self.advantage_batch_norm or self.advantage_pool != "mixed" or self.advantage_pass_k > 1

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs a frozen copy of the base model."""
        return self.kl_coef > 0 and self.kl_ref != "behavior"

    @field_validator("kl_ref", mode="before")
    @classmethod
    def either_spelling(cls, value: object) -> object:
        """`behaviour` is accepted."""
        return "behavior" if value == "behaviour" else value

    @model_validator(mode="after")
    def importance_makes_sense(self) -> Self:
        if self.masks and (self.ratio_mode == "direct" or self.importance_level == "none"):
            raise ValueError(
                "importance_mode = mask and importance_veto need the weight anchor / alpha, which is 1 for ratio_mode "
                "= direct and unused for importance_level = none; set ratio_mode = decoupled and importance_level "
                "= token"
            )
        if self.importance_level in ("sequence", "geometric") and self.ratio_mode == "direct":
            raise ValueError(
                f"importance_level = {self.importance_level} has no effect: with ratio_mode = direct the ratio "
                "is the full correction; set ratio_mode = decoupled"
            )
        if self.importance_denominator == "kept" and not self.masks:
            raise ValueError(
                "importance_denominator = kept, but nothing is ever masked; set importance_mode = mask, or "
                "importance_denominator = all"
            )
        if self.importance_denominator == "kept" and self.ratio_mode == "interpolated":
            raise ValueError(
                "importance_denominator = kept counts tokens before the first pass, and ratio_mode = interpolated has "
                "its anchor from that pass alone; write importance_denominator = all, or ratio_mode = decoupled"
            )
        if self.importance_floor is not None and self.importance_mode != "mask":
            raise ValueError("importance_floor requires importance_mode = mask; set that, or importance_floor = null")
        bounds = (self.importance_floor, self.importance_cap)
        if self.importance_mode == "mask" and bounds == (None, None):
            raise ValueError("importance_mode = mask has no bound; set importance_cap, importance_floor or both")
        if self.importance_floor is not None and self.importance_floor >= (self.importance_cap or float("inf")):
            raise ValueError(f"importance_floor = {bounds[0]} is not below importance_cap = {bounds[1]}; lower it")
        return self

    @model_validator(mode="after")
    def fresh_rows_have_a_deviation(self) -> Self:
        """Check that an expert's right row is not divided by the deviation 0 of rows that all failed."""
        if self.advantage_pool == "on_policy" and self.advantage_norm != "center":
            raise ValueError(
                f"advantage_pool = on_policy with advantage_norm = {self.advantage_norm} divides by the deviation of "
                "the fresh rows, which is 0 where all failed: other rows would get an advantage of up to 1/"
                "advantage_eps; set advantage_norm = center"
            )
        return self

    @model_validator(mode="after")
    def kl_can_be_estimated(self) -> Self:
        if self.kl_estimator == "is_rev" and self.kl_ref != "behavior":
            raise ValueError(
                f"kl_estimator = is_rev assumes tokens sampled by the reference, but kl_ref = {self.kl_ref} sampled "
                "none; set kl_estimator = k3, or kl_ref = behavior"
            )
        if self.kl_ref == "convex" and self.ratio_mode != "decoupled":
            raise ValueError("kl_ref = convex needs pi_theta_t; set ratio_mode = decoupled")
        if self.kl_restart_step is not None and not self.needs_reference:
            raise ValueError(
                "kl_restart_step replaces the base model of the KL term, but there is none; set kl_ref = convex or "
                "reference with kl_coef above 0, or kl_restart_step = null"
            )
        return self


class ShapingConfig(Frozen):
    """Reward shaping for advantages; stored rewards, and so filters and buffers, are not affected."""

    shift: float = 0.0
    """Added to every reward, before `scale`."""
    scale: float = Field(1.0, gt=0)
    """Factor on every reward. AReaL: (r - 0.5) 10 is shift = -0.5, scale = 10."""
    overlong_cache: int | None = Field(None, ge=1)
    """DAPO: a response within this many tokens of rollout.max_response_tokens is penalized linearly, up to
    `overlong_factor`; null: off."""
    overlong_factor: float = Field(1.0, gt=0)
    """Penalty at full length."""
    overlong_filter: bool = False
    """Exclude truncated responses from the loss and its denominators; their rewards still count."""
    length_weight: float = Field(0.0, ge=0)
    """Factor on Kimi k1.5's length reward: short correct responses gain, long incorrect ones lose."""
    length_warmup_steps: int = Field(0, ge=0)
    """First steps without it."""
