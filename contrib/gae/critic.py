"""PPO's value function (BA-PPO, appendix A.9 of the paper): a second copy of the backbone with a linear head.

    V of all tokens with the current critic -> GAE -> advantages, whitened over the batch; returns
    value loss of a token = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), mean over tokens

V is the value of the state before a token, so it is computed at the position of that token's log-prob. Values are never
stored with a group: reused groups are evaluated again. The head is initialized to 0.

Suffixes: M response tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from contrib.gae.advantage import Gae
from learner.advantages.formulas import gae, whitened
from learner.advantages.of_batch import shaped_rewards
from learner.batch.microbatch import MicroBatch
from learner.distributed.shard_files import (
    MODEL,
    OPTIMIZER,
    StoredShards,
    joined,
    load_optimizer,
    optimizer_state,
    weights_of,
)
from learner.distributed.sharding import reshard
from learner.distributed.world import World
from learner.model.backbone import attention, freeze_vision, hidden_states
from learner.model.layers import LayerOptions
from learner.model.loading import load_module
from learner.update.hooks import Given, UpdateHook
from learner.update.step import Step, StepInputs


class Critic(nn.Module):
    """V of the state before each response token."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model`: a backbone without its output head, with packed attention."""
        super().__init__()
        self.model: PreTrainedModel = model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    @property
    def float32_parts(self) -> tuple[nn.Module, ...]:
        """Modules computed in float32: bfloat16 would keep only 8 bits of the head's weights."""
        return (self.head,)

    def forward(self, micro: MicroBatch) -> Tensor:
        """[M] float32, differentiable in the parameters."""
        hidden_MD = hidden_states(self.model, micro).index_select(0, micro.predict_M)
        values_M: Tensor = self.head(hidden_MD.float())
        return values_M.squeeze(1).clone()  # FSDP's hooks do not support views


def load_critic(config: Config, world: World) -> Critic:
    """A critic whose backbone has the weights of the base model, over all ranks. Collective.

    Raises: ConfigError.
    """
    path, dtype = config.model.path, getattr(torch, config.model.dtype)

    def read() -> Critic:
        try:
            how = attention(AutoConfig.from_pretrained(path))
            return wrapped(AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation=how))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={path}: cannot be loaded as the critic's backbone: {error}") from error

    def build() -> Critic:
        settings = AutoConfig.from_pretrained(path)
        how = attention(settings)
        return wrapped(AutoModel.from_config(settings, dtype=torch.float32, attn_implementation=how))

    def wrapped(model: PreTrainedModel) -> Critic:
        freeze_vision(model, config.model)
        return Critic(model)

    layers = LayerOptions.of(config.learner, world.device, is_worth_compiling=not config.is_short)
    return load_module(read, build, world=world, dtype=dtype, layers=layers)


class CriticTrainer(UpdateHook):
    """Computes the baseline of a step and trains the critic."""

    name = "critic"
    own: Gae.Settings

    def __init__(self, given: Given, own: Gae.Settings) -> None:
        super().__init__(given, own)
        self.critic = load_critic(self.config, self.passes.world)
        self.optimizer = torch.optim.AdamW(
            self.critic.parameters(), lr=own.critic_lr, betas=self.config.learner.betas,
            weight_decay=own.critic_weight_decay, fused=True,
        )  # fmt: skip

    def before_passes(self, step: Step) -> None:
        """Train the critic on the step's mini-batches; the advantages are those of the critic before its update.

        Raises: DivergenceError.
        """
        inputs = step.inputs
        value_M = self.passes.evaluate(self.critic, inputs, np.flatnonzero(inputs.active_R))
        advantage_M, return_M = self._estimate(inputs, value_M.cpu().numpy())
        target_M = inputs.on_device(return_M)
        losses = [self._minibatch(inputs, k, value_M, target_M) for k in range(len(inputs.plan))]
        seen_M = np.repeat(inputs.active_R, inputs.columns.lengths_R)
        step.facts["value_loss"] = sum(losses) / max(1, len(losses))
        step.facts["value_mean"] = float(value_M.cpu().numpy()[seen_M].mean()) if seen_M.any() else 0.0
        step.inputs = replace(inputs, advantage_M=inputs.on_device(advantage_M))

    def _estimate(self, inputs: StepInputs, value_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[M] whitened advantages times the weights of their entries (0 if not trained), and [M] returns."""
        columns, entries = inputs.columns, inputs.batch.entries
        reward_R = np.concatenate([shaped_rewards(entry, inputs.batch.step, self.config) for entry in entries])
        reward_M = np.zeros(len(value_M))
        reward_M[columns.starts_R[1:] - 1] = reward_R
        advantage_M, return_M = gae(
            reward_M, value_M, gamma=self.own.gamma, gae_lambda=self.own.lam, lengths=columns.lengths_R
        )
        seen_M = np.repeat(inputs.active_R, columns.lengths_R)
        advantage_M[seen_M] = whitened(advantage_M[seen_M])
        advantage_M[~seen_M] = 0.0
        factor_E = np.array([entry.weight for entry in entries])
        advantage_M *= np.repeat(factor_E[columns.group_R], columns.lengths_R)
        return advantage_M.astype(np.float32), return_M.astype(np.float32)

    def _minibatch(self, inputs: StepInputs, k: int, old_M: Tensor, target_M: Tensor) -> float:
        responses = inputs.active(k)
        weight_M = inputs.spread(inputs.token_mean(responses))

        def loss_of(micro: MicroBatch) -> Tensor:
            slot_M = micro.slot_M
            loss_M = value_loss(self.critic(micro), old_M[slot_M], target_M[slot_M], self.own.value_clip)
            return (loss_M * weight_M[slot_M]).sum()

        return self.passes.optimizer_step(
            loss_of, inputs, inputs.plan[k], responses, optimizer=self.optimizer, grad_clip=self.own.critic_grad_clip,
            where="critic",
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments."""
        reshard(self.critic)
        return joined({MODEL: weights_of(self.critic), OPTIMIZER: optimizer_state(self.critic, self.optimizer)})

    def load(self, stored: StoredShards) -> None:
        """Load from a checkpoint."""
        stored.part(MODEL).load(weights_of(self.critic))
        load_optimizer(self.critic, self.optimizer, stored.part(OPTIMIZER))


def value_loss(value_M: Tensor, old_M: Tensor, return_M: Tensor, value_clip: float) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) of each token."""
    near_M = torch.maximum(torch.minimum(value_M, old_M + value_clip), old_M - value_clip)
    return 0.5 * torch.maximum((value_M - return_M) ** 2, (near_M - return_M) ** 2)
