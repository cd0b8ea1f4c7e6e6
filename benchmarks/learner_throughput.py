"""Learner tokens/s over a bare torch loop that does the same forward, backward and AdamW on the same packed tokens.

    OMP_NUM_THREADS=1 python -m benchmarks.learner_throughput [--rounds 7] [--out learner_throughput.json]

Ours: `Updater.run` on one batch, everything included: columns, advantages, packing, chunked log-probs
with entropies, clipped surrogate, KL, clipping, divergence check, metrics, AdamW.
Bare: micro-batches packed beforehand (not timed), the same model and packed attention, log_softmax over all logits of a
micro-batch, policy-gradient loss, backward, gradient clipping, fused AdamW. Nothing else.
`bare` multiplies matrices as PyTorch does, `bare_onednn` as ours does (`learner/model/cpu_matmul.py`): `ratio` compares
with the first, `ratio_same_kernels` with the second and is what our bookkeeping costs. `target` is for both.
They alternate within one process, so that a busy machine hits all alike. Seconds are CPU seconds of this process;
tokens are the packed tokens that go through the model, the same for all.
`decoupled_share` says what the extra pass of the default ratio mode costs (it has no counterpart in the bare loop).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bapo.config.tree import Config
from bapo.core.types import Batch, BatchEntry, Group, Origin, Prompt, Purpose, Timing
from learner.batch.columns import columns_of
from learner.batch.microbatch import MicroBatch
from learner.batch.packed_attention import NAME as PACKED
from learner.batch.packing import microbatches_of, minibatches
from learner.distributed.stopping import StopFlag
from learner.distributed.world import World
from learner.model.cpu_matmul import use_onednn
from learner.model.policy import load_policy
from learner.update.update import Updater

TARGET = 0.85
WORLD = World(rank=0, size=1, device=torch.device("cpu"))


def make_config(path: str, ratio_mode: str, num_groups: int, num_minibatches: int, budget: int) -> Config:
    """Countdown-sized: 32 groups of 8, at most 96 tokens per response."""
    return Config.model_validate(
        {
            "model": {"path": path},
            "algorithm": {"batch_size": num_groups, "group_size": 8},
            "rollout": {"max_response_tokens": 96, "max_prompt_tokens": 32},
            "loss": {"ratio_mode": ratio_mode},
            "learner": {
                "minibatch_size": -(-num_groups // num_minibatches),
                "microbatch_tokens": budget,
                "device": "cpu",
                "lr": 1e-6,
            },
        }
    )


def make_batch(
    num_groups: int, vocab_size: int, seed: int = 0, *, prompt: int = 12, shortest: int = 20, longest: int = 96
) -> Batch:
    """Prompts of 12 tokens and responses of 20 to 96, about 65 on average, as the Countdown base model writes them."""
    rng = np.random.default_rng(seed)
    groups = (_group(rng, i, vocab_size, prompt, shortest, longest) for i in range(num_groups))
    entries = tuple(BatchEntry(origin=Origin.X1, group=group) for group in groups)
    return Batch(step=20, entries=entries, r_tot=0.3, facts={}, results=())


def _group(rng: np.random.Generator, number: int, vocab_size: int, prompt: int, shortest: int, longest: int) -> Group:
    lengths = np.minimum(longest, rng.integers(shortest, shortest + longest, size=8)).astype(np.int32)
    tokens = int(lengths.sum())
    return Group(
        group_id=f"g{number}",
        prompt=Prompt(prompt_id=str(number), text="", task="countdown", answer={}),
        purpose=Purpose.FRESH,
        step=20,
        label="",
        worker_id="w",
        prompt_token_ids=rng.integers(4, vocab_size, size=prompt).astype(np.int32),
        token_ids=rng.integers(4, vocab_size, size=tokens).astype(np.int32),
        rollout_logprobs=np.full(tokens, -np.log(vocab_size), dtype=np.float32),
        lengths=lengths,
        rewards=np.array([1, 0, 0, 1, 0, 0, 1, 0], dtype=np.float32),
        outcomes=np.zeros(8, dtype=np.uint8),
        versions=np.full((8, 2), 20, dtype=np.int32),
        timing=Timing(claimed_at=0.0, sample_s=0.0, grade_s=0.0),
    )


class BareLoop:
    """The least that a trainer must do."""

    def __init__(self, config: Config, batch: Batch, *, onednn: bool) -> None:
        columns = columns_of(batch, config)
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation=PACKED).float().eval()
        if onednn:
            use_onednn(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learner.lr, fused=True)
        self.advantage_M = torch.from_numpy(np.repeat(columns.advantage_R, columns.lengths_R))
        plan = minibatches(len(batch.entries), config.learner.minibatch_size, seed=42, step=20, epoch=0)
        self.plan = [
            list(
                microbatches_of(
                    columns,
                    columns.responses_of(groups),
                    budget=config.learner.microbatch_tokens,
                    rank=0,
                    num_ranks=1,
                    device=WORLD.device,
                )
            )
            for groups in plan
        ]
        self.num_tokens = sum(micro.num_tokens for micros in self.plan for micro in micros)

    def run(self) -> None:
        """One pass over the batch."""
        for micros in self.plan:
            self.optimizer.zero_grad(set_to_none=True)
            total = sum(len(micro.target_M) for micro in micros)
            for micro in micros:
                (self._loss(micro) / total).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def _loss(self, micro: MicroBatch) -> Tensor:
        hidden = self.model.base_model(
            input_ids=micro.token_ids_N[None],
            position_ids=micro.positions_N[None],
            use_cache=False,
            packing=micro.packing,
        ).last_hidden_state[0]
        logp = self.model.lm_head(hidden[micro.predict_M]).log_softmax(-1)
        chosen = logp.gather(1, micro.target_M[:, None]).squeeze(1)
        return -(chosen * self.advantage_M[micro.slot_M]).sum()


def cpu_seconds(action: Callable[[], Any]) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    action()
    return time.process_time() - start


def measure(args: argparse.Namespace) -> Mapping[str, Any]:
    """Alternate ours and bare; medians over the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or make_model(folder)
        modes = ("direct", "decoupled")
        configs = {mode: make_config(path, mode, args.groups, args.minibatches, args.budget) for mode in modes}
        batch = make_batch(args.groups, 218)
        updaters = {
            mode: Updater(
                config=config,
                policy=load_policy(path, config, WORLD),
                world=WORLD,
                stop=StopFlag(),
                run_path=Path(folder),
            )
            for mode, config in configs.items()
        }
        bare = BareLoop(configs["direct"], batch, onednn=False)
        bare_onednn = BareLoop(configs["direct"], batch, onednn=True)
    rounds: list[dict[str, float]] = []
    for i in range(args.rounds + 1):
        seconds = {
            "bare": cpu_seconds(bare.run),
            "bare_onednn": cpu_seconds(bare_onednn.run),
            "direct": cpu_seconds(lambda: updaters["direct"].run(batch)),
            "decoupled": cpu_seconds(lambda: updaters["decoupled"].run(batch)),
        }
        if i:  # the first round warms up
            rounds.append(seconds)
    return summary(rounds, bare.num_tokens, args)


def summary(rounds: list[dict[str, float]], num_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians and the ratio of each round."""
    middle = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    ratios = {name: [row[name] / row["direct"] for row in rounds] for name in ("bare", "bare_onednn")}
    medians = {name: round(statistics.median(values), 4) for name, values in ratios.items()}
    return {
        "groups": args.groups,
        "minibatches": args.minibatches,
        "microbatch_tokens": args.budget,
        "packed_tokens": num_tokens,
        "rounds": len(rounds),
        "tokens_per_cpu_s": {name: round(num_tokens / seconds) for name, seconds in middle.items()},
        "ratio": medians["bare"],
        "ratio_same_kernels": medians["bare_onednn"],
        "ratio_min_max": [round(min(ratios["bare"]), 4), round(max(ratios["bare"]), 4)],
        "ratio_same_kernels_min_max": [round(min(ratios["bare_onednn"]), 4), round(max(ratios["bare_onednn"]), 4)],
        "decoupled_share": round(middle["direct"] / middle["decoupled"], 4),
        "target": TARGET,
        "reached": min(medians.values()) >= TARGET,
    }


def make_model(folder: str) -> str:
    """The size of the shipped model: 0.6 M parameters, random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=218,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model with 218 tokens; default: a random one of the shipped size")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--budget", type=int, default=4096, help="packed tokens per micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = json.dumps(measure(args), indent=2)
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
