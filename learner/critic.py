"""PPO's value function (BA-PPO, appendix A.9; spec B.18): a second copy of the backbone with a linear head.

    V of all tokens with the current critic -> GAE -> advantages, whitened over the batch; returns
    value loss of a token = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), mean over tokens

V stands for the state before a token, so it is read where the policy reads that token's log-prob. Values are never
stored with a group: what is reused is valued again (ADR 0061). The head begins at 0.

Suffixes: M response tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from bapo.algorithms.gae import gae, whitened
from bapo.config.tree import Config
from bapo.errors import ConfigError
from learner.advantages import entry_factor, shaped_rewards
from learner.attention import NAME as PACKED
from learner.batching import MicroBatch
from learner.distributed import World, gather, load_parameters, reshard, whole
from learner.divergence import refuse_divergence
from learner.loading import load_module
from learner.losses.aggregation import token_weights
from learner.moments import gather_optimizer, load_optimizer
from learner.passes import Passes
from learner.recomputation import recomputes
from learner.step import Step


class Critic(nn.Module):
    """V of the state before each response token."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model`: a backbone without its output head, with packed attention."""
        super().__init__()
        self.model: PreTrainedModel = model
        self.head = nn.Linear(model.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    @property
    def float32_parts(self) -> tuple[nn.Module, ...]:
        """What is not computed in bfloat16: a value would keep 8 bits of the head's weights."""
        return (self.head,)

    def forward(self, micro: MicroBatch) -> Tensor:
        """[M] float32, differentiable in the parameters."""
        output = self.model(
            input_ids=micro.token_ids_N.unsqueeze(0),
            position_ids=micro.positions_N.unsqueeze(0),
            use_cache=False,
            packing=micro.packing,
        )
        hidden_MD = output.last_hidden_state[0].index_select(0, micro.predict_M)
        values_M: Tensor = self.head(hidden_MD.float())
        return values_M.squeeze(1).clone()  # FSDP's hooks do not stand views


def load_critic(config: Config, world: World) -> Critic:
    """A critic whose backbone has the weights of the base model, over all ranks. All ranks must call it.

    Raises: ConfigError.
    """
    path, dtype = config.model.path, getattr(torch, config.model.dtype)

    def read() -> Critic:
        try:
            return Critic(AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation=PACKED))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={path}: cannot be loaded as the critic's backbone: {error}") from error

    def build() -> Critic:
        settings = AutoConfig.from_pretrained(path)
        return Critic(AutoModel.from_config(settings, dtype=torch.float32, attn_implementation=PACKED))

    recompute = recomputes(config.learner.gradient_checkpointing, world.device)
    return load_module(read, build, world=world, dtype=dtype, recompute=recompute)


class CriticTrainer:
    """The baseline of a step, and how the critic learns from it."""

    def __init__(self, *, config: Config, critic: Critic, passes: Passes, run_path: Path) -> None:
        self._config = config
        self.critic = critic
        self._passes = passes
        self._run_path = run_path
        settings = config.critic
        self.optimizer = torch.optim.AdamW(
            critic.parameters(), lr=settings.lr, betas=config.learner.betas, weight_decay=settings.weight_decay,
            fused=True,
        )  # fmt: skip

    def run(self, step: Step) -> Mapping[str, float]:
        """Give the step its advantages, then train the critic on its mini-batches. Raises: DivergenceError."""
        value_M = self._passes.evaluate(self.critic, step, np.flatnonzero(step.active_R))
        advantage_M, return_M = self._estimate(step, value_M.cpu().numpy())
        step.advantage_M = torch.from_numpy(advantage_M).to(value_M)
        target_M = torch.from_numpy(return_M).to(value_M)
        losses = [self._minibatch(step, k, value_M, target_M) for k in range(len(step.plan))]
        seen_M = np.repeat(step.active_R, step.columns.lengths_R)
        return {
            "value_loss": sum(losses) / max(1, len(losses)),
            "value_mean": float(value_M.cpu().numpy()[seen_M].mean()) if seen_M.any() else 0.0,
        }

    def _estimate(self, step: Step, value_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[M] whitened advantages times the weights of their entries, 0 where nothing is trained, and [M] returns."""
        columns, settings = step.columns, self._config.critic
        reward_R = np.concatenate([shaped_rewards(e, step.batch.step, self._config) for e in step.batch.entries])
        reward_M = np.zeros(len(value_M))
        reward_M[columns.starts_R[1:] - 1] = reward_R
        advantage_M, return_M = gae(
            reward_M, value_M, gamma=settings.gamma, gae_lambda=settings.gae_lambda, lengths=columns.lengths_R
        )
        seen_M = np.repeat(step.active_R, columns.lengths_R)
        advantage_M[seen_M] = whitened(advantage_M[seen_M])
        advantage_M[~seen_M] = 0.0
        factor_E = np.array([entry_factor(entry, self._config) for entry in step.batch.entries])
        advantage_M *= np.repeat(factor_E[columns.group_R], columns.lengths_R)
        return advantage_M.astype(np.float32), return_M.astype(np.float32)

    def _minibatch(self, step: Step, k: int, old_M: Tensor, target_M: Tensor) -> float:
        settings, world = self._config.critic, self._passes.world
        responses = step.active(k)
        weight_R = np.zeros(len(step.columns.group_R))
        weight_R[responses] = token_weights(step.columns.lengths_R[responses], "token_mean", 1)
        weight_M = torch.from_numpy(np.repeat(weight_R, step.columns.lengths_R).astype(np.float32)).to(old_M)
        total = torch.zeros(1, device=world.device)
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self._passes.microbatches(step, responses):
            slot_M = micro.slot_M
            loss_M = value_loss(self.critic(micro), old_M[slot_M], target_M[slot_M], settings.value_clip)
            loss = (loss_M * weight_M[slot_M]).sum()
            (loss * world.size).backward()  # FSDP averages gradients over ranks, but the parts add up
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.critic.parameters(), settings.grad_clip)
        found = float(world.sum(total))
        self._refuse(step, step.plan[k], found, float(whole(norm)))
        self.optimizer.step()
        return found

    def _refuse(self, step: Step, groups: Sequence[int], loss: float, norm: float) -> None:
        leads = self._passes.world.leads
        refuse_divergence(step.batch, groups, "critic", loss, norm, run_path=self._run_path, leads=leads)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold. All ranks must call it."""
        reshard(self.critic)
        return {**gather(dict(self.critic.named_parameters())), **gather_optimizer(self.critic, self.optimizer)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint holds."""
        load_parameters(self.critic, tensors)
        load_optimizer(self.critic, self.optimizer, tensors)


def value_loss(value_M: Tensor, old_M: Tensor, return_M: Tensor, value_clip: float) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) of each token."""
    near_M = torch.maximum(torch.minimum(value_M, old_M + value_clip), old_M - value_clip)
    return 0.5 * torch.maximum((value_M - return_M) ** 2, (near_M - return_M) ** 2)
