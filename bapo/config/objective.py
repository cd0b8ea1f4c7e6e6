"""What the learner minimizes: the policy loss, the rewards that make its advantages, the critic, and cross-entropy.

`docs/methods.md` says which method is which of these settings.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from bapo.algorithms.settings import Frozen

LossName = Literal["ppo", "gspo", "cispo", "geppo_add", "geppo_mul", "balanced_clip", "dppo", "kimi", "luffy"]
"""The files of `learner/losses` that make a loss; a contract test keeps both lists equal."""

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_len", "group_const_len", "two_term"
]

WITHOUT_WEIGHT = frozenset({"geppo_add", "geppo_mul", "kimi", "luffy"})
"""Losses that are defined without an importance weight next to their ratio."""


class LossConfig(Frozen):
    """The policy loss: a surrogate, its importance weight, KL, entropy, and how tokens become one number."""

    name: LossName = "ppo"
    """The surrogate: a file of `learner/losses` (docs/methods.md)."""
    ratio_mode: Literal["direct", "official", "decoupled"] = "decoupled"
    """Which policy the trust region is centered on (docs/paper.md, Decisions)."""
    clip_low: float | None = Field(0.2, ge=0)
    """The ratio is clipped at 1 - clip_low; null: not from below (`ppo`, `cispo`, `luffy`). For `dppo` a difference of
    probabilities. `kimi` and `balanced_clip` do not use it."""
    clip_high: float | None = Field(0.28, ge=0)
    """The ratio is clipped at 1 + clip_high; null: not from above. As clip_low otherwise."""
    dual_clip: float | None = Field(10.0, gt=1)
    """Bound of the loss for negative advantages; null switches it off. Of `ppo` and `balanced_clip` alone."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number over the global mini-batch."""
    advantage: Literal["group", "gae"] = "group"
    """Baseline: the responses to the same prompt (eq. 2), or a critic (section `critic`)."""
    advantage_norm: Literal["pop_var", "std_ddof1", "center"] = "pop_var"
    """Normalization of eq. 2: `pop_var` by the population variance, `std_ddof1` by the sample deviation (verl, TRL),
    `center` not at all (Dr. GRPO)."""
    advantage_eps: float = Field(1e-6, ge=0)
    """Smoothing of eq. 2."""
    advantage_pool: Literal["mixed", "split", "on_policy"] = "mixed"
    """Whose rewards make mean and deviation: all rows of the entry; fresh and other rows apart (RePO); or the fresh
    rows for all (LUFFY's option)."""
    advantage_batch_norm: bool = False
    """Normalize once more over all tokens of the batch (AReaL)."""
    importance_level: Literal["none", "token", "sequence", "geometric"] = "token"
    """Over what anchor / alpha is taken: each token, the product over a response, or its geometric mean."""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """Beyond the bounds: the weight is cut to them, or what it belongs to is left out."""
    importance_cap: float | None = Field(3.0, gt=0)
    """C: upper bound of the importance weight; null: none."""
    importance_floor: float | None = Field(None, gt=0)
    """Lower bound below which `mask` leaves out."""
    importance_veto: float | None = Field(None, gt=0, lt=1)
    """A response with one token of anchor / alpha below this is left out whole."""
    importance_denominator: Literal["all", "kept"] = "all"
    """What the mean is over when something is left out: all tokens (AReaL), or the kept ones (verl)."""
    x2_weight: float = Field(1.0, ge=0)
    """Factor on the advantages of X2."""
    x3_weight: float = Field(1.0, ge=0)
    """Factor on the advantages of X3."""
    x3_ess_weight: bool = False
    """Multiply the advantages of a group of X3 by its effective sample size under pi_theta_t."""
    x3_min_ess: float | None = Field(None, gt=0, le=1)
    """A group of X3 whose effective sample size is below this is left out of the step; null: none is."""
    kl_coef: float = Field(0.001, ge=0)
    """beta of eqs. 1 and 3."""
    kl_ref: Literal["behavior", "reference", "convex"] = "behavior"
    """Which policy beta anchors to: alpha (eq. 3), the frozen base model (eq. 1), or both the base model and
    pi_theta_t, with a share that falls from 1 (ReMix)."""
    kl_estimator: Literal["k1", "k2", "k3", "is_rev"] | None = None
    """Of KL(pi_theta | anchor) per token; null: `is_rev` for behavior, `k3` for the others."""
    kl_restart_step: int | None = Field(None, ge=1)
    """T of ReMix: behind this step the base model of the KL term is replaced by the policy, and the share is 1."""
    entropy_coef: float = Field(0.001, ge=0)
    """Coefficient of the mean token entropy."""
    balanced_metric: Literal["paper", "code", "gradient"] = "paper"
    """What `balanced_clip` raises its bounds for."""
    balanced_target: float = Field(0.4, gt=0)
    """The search ends when the metric has reached this."""
    balanced_low: tuple[float, float, float] = (0.6, 0.9, 0.02)
    """Lower bound of the ratio: from, to, in steps of."""
    balanced_high: tuple[float, float, float] = (1.2, 3.0, 0.05)
    """Upper bound of the ratio: from, to, in steps of."""
    luffy_gamma: float = Field(0.1, gt=0)
    """gamma of f(p) = p / (p + gamma), which shapes an expert's tokens."""
    kimi_tau: float = Field(0.1, gt=0)
    """tau of Kimi k1.5, which does not disclose it."""

    @property
    def masks(self) -> bool:
        """Whether some rows or tokens may be left out for their importance weight."""
        return self.importance_mode == "mask" or self.importance_veto is not None

    @property
    def weighs_reused(self) -> bool:
        """Whether groups of X3 are judged by how far pi_theta_t has left those that sampled them."""
        return self.x3_ess_weight or self.x3_min_ess is not None

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the base model is in the loss."""
        return self.kl_coef > 0 and self.kl_ref != "behavior"

    @field_validator("kl_ref", mode="before")
    @classmethod
    def either_spelling(cls, value: object) -> object:
        """`behaviour` is accepted."""
        return "behavior" if value == "behaviour" else value

    @model_validator(mode="after")
    def surrogate_has_what_it_needs(self) -> Self:
        if self.name in WITHOUT_WEIGHT and self.importance_level != "none":
            raise ValueError(
                f"name = {self.name} has no importance weight next to its ratio; write importance_level = none"
            )
        if self.name in ("geppo_add", "geppo_mul", "kimi") and self.ratio_mode == "direct":
            raise ValueError(
                f"name = {self.name} is centered on pi_theta_t, which ratio_mode = direct does not evaluate; "
                "write ratio_mode = decoupled"
            )
        if self.name == "dppo" and self.ratio_mode != "direct":
            raise ValueError(
                f"name = dppo compares with the rollout policy alone; write ratio_mode = direct, not {self.ratio_mode}"
            )
        if self.name in ("gspo", "geppo_add", "geppo_mul", "dppo") and None in (self.clip_low, self.clip_high):
            raise ValueError(f"name = {self.name} needs both bounds; write numbers for clip_low and clip_high")
        return self

    @model_validator(mode="after")
    def importance_makes_sense(self) -> Self:
        if self.masks and (self.ratio_mode == "direct" or self.importance_level == "none"):
            raise ValueError(
                "importance_mode = mask and importance_veto need the weight anchor / alpha, which is 1 for ratio_mode "
                "= direct and not taken for importance_level = none; write ratio_mode = decoupled and importance_level "
                "= token"
            )
        if self.importance_level in ("sequence", "geometric") and self.ratio_mode == "direct":
            raise ValueError(
                f"importance_level = {self.importance_level} would never be taken: with ratio_mode = direct the ratio "
                "is the whole correction; write ratio_mode = decoupled"
            )
        if self.importance_denominator == "kept" and not self.masks:
            raise ValueError(
                "importance_denominator = kept, but nothing is ever left out; write importance_mode = mask, or "
                "importance_denominator = all"
            )
        if self.importance_floor is not None and self.importance_mode != "mask":
            raise ValueError("importance_floor is a bound of importance_mode = mask; write that, or a null floor")
        bounds = (self.importance_floor, self.importance_cap)
        if self.importance_mode == "mask" and bounds == (None, None):
            raise ValueError("importance_mode = mask has no bound; write importance_cap, importance_floor or both")
        if self.importance_floor is not None and self.importance_floor >= (self.importance_cap or float("inf")):
            raise ValueError(f"importance_floor = {bounds[0]} is not below importance_cap = {bounds[1]}; lower it")
        return self

    @model_validator(mode="after")
    def reused_groups_can_be_weighed(self) -> Self:
        if self.weighs_reused and self.ratio_mode != "decoupled":
            raise ValueError(
                f"x3_ess_weight and x3_min_ess need pi_theta_t, which ratio_mode = {self.ratio_mode} does not evaluate "
                "for reused groups; write ratio_mode = decoupled"
            )
        if self.x3_ess_weight and self.advantage == "gae":
            raise ValueError(
                "x3_ess_weight multiplies advantages of groups, which a critic replaces; write advantage = group, or "
                "x3_min_ess alone"
            )
        return self

    @model_validator(mode="after")
    def kl_can_be_estimated(self) -> Self:
        if self.kl_estimator == "is_rev" and self.kl_ref != "behavior":
            raise ValueError(
                f"kl_estimator = is_rev assumes tokens that the anchor sampled, and kl_ref = {self.kl_ref} sampled "
                "none; write kl_estimator = k3, or kl_ref = behavior"
            )
        if self.kl_ref == "convex" and self.ratio_mode != "decoupled":
            raise ValueError("kl_ref = convex anchors to pi_theta_t as well; write ratio_mode = decoupled")
        if self.kl_restart_step is not None and not self.needs_reference:
            raise ValueError(
                "kl_restart_step replaces the base model of the KL term, but there is none; write kl_ref = convex or "
                "reference with kl_coef above 0, or kl_restart_step = null"
            )
        if self.name == "luffy" and self.kl_coef and self.kl_ref == "behavior":
            raise ValueError(
                "name = luffy trains tokens that no rollout policy sampled, so there is no KL to it; write kl_coef = 0 "
                "or kl_ref = reference"
            )
        return self

    @model_validator(mode="after")
    def one_baseline(self) -> Self:
        if self.advantage == "gae" and (self.advantage_batch_norm or self.advantage_pool != "mixed"):
            raise ValueError(
                "advantage = gae has a critic as baseline and is whitened over the batch; write advantage_batch_norm = "
                "false and advantage_pool = mixed, or advantage = group"
            )
        return self

    @model_validator(mode="after")
    def balanced_bounds_can_move(self) -> Self:
        for key, (start, stop, step) in {"low": self.balanced_low, "high": self.balanced_high}.items():
            if not 0 <= start <= stop or step <= 0:
                raise ValueError(
                    f"balanced_{key} = [{start}, {stop}, {step}]: write [from, to, step] with from <= to and step > 0"
                )
        return self


class ShapingConfig(Frozen):
    """Rewards as the advantages see them; the stored ones, and with them filters and buffers, stay as they are."""

    shift: float = 0.0
    """Added to every reward, before `scale`."""
    scale: float = Field(1.0, gt=0)
    """Factor on every reward. AReaL: (r - 0.5) 10 is shift = -0.5, scale = 10."""
    overlong_cache: int | None = Field(None, ge=1)
    """DAPO: a response that comes within this many tokens of rollout.max_response_tokens loses up to `overlong_factor`,
    linearly; null: none does."""
    overlong_factor: float = Field(1.0, gt=0)
    """Reward that a response of full length loses."""
    overlong_filter: bool = False
    """Leave truncated responses out of the loss and of its denominators; their rewards still count for their group."""
    length_weight: float = Field(0.0, ge=0)
    """Factor on Kimi k1.5's length reward: shorter is better among right responses, longer is worse among wrong."""
    length_warmup_steps: int = Field(0, ge=0)
    """Steps at the beginning without a length reward."""


class CriticConfig(Frozen):
    """PPO's value function, for loss.advantage = gae: a second copy of the backbone with a linear head."""

    lr: float = Field(1e-5, gt=0)
    """Of its own AdamW (verl's default; the paper gives none)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """lambda of generalized advantage estimation; 1: the return less the value."""
    value_clip: float = Field(0.5, gt=0)
    """How far the value may leave that of the step's beginning before the loss takes the worse of both."""
    grad_clip: float = Field(1.0, gt=0)
    """Most L2 norm of its gradient."""
    weight_decay: float = Field(0.0, ge=0)
    """Of its AdamW."""


class SupervisedConfig(Frozen):
    """Cross-entropy on the entries of kind sft that a composer emits (ReLIFT)."""

    lr: float = Field(1e-6, gt=0)
    """Of its own AdamW on the policy."""
    entropy_coef: float = Field(0.001, ge=0)
    """Coefficient of the mean token entropy."""
    grad_clip: float = Field(1.0, gt=0)
    """Most L2 norm of its gradient."""
