"""ReLIFT (docs/methods.md): reinforcement on what is within reach, supervised steps on what is not.

    fresh group --sampled rows--------------------------------------------> item of kind rl
         '--none right, all alike, ended--> queue (newest first) --N wait--> N items of kind sft: the expert rows

The queue is B_high: its groups hold the expert's row, which never trains by the surrogate. N is `sft_items`,
else B; the newest N train in one step, the others stay. A response counts as well formatted when it ended by itself
instead of reaching the length limit: the buffer knows no texts.
Does not use: c1, c2, c3, X2; the online filter applies to the fresh groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from bapo.algorithms.composer import OF_BAPO, AssemblyView, Composer, Decision, Reason, Rng
from bapo.algorithms.composers.fresh_only import r_tot_of, unused
from bapo.algorithms.filters import Groups, filtered_fresh
from bapo.algorithms.reward_levels import is_all_correct, is_informative
from bapo.core.batch_items import Item, Part
from bapo.core.types import GroupStat, Origin, Outcome
from contrib.luffy.composer import without_experts
from contrib.replay_memory import newest, once_per_prompt, with_fresh


class Relift(Composer):
    """The composer `relift`."""

    takes_experts = True
    ignores = (*OF_BAPO, "algorithm.max_rounds", "loss.advantage_pool")
    update_hooks = ("contrib.relift.supervised:Supervised",)

    class Settings(Composer.Settings):
        """Of its queue, and of the steps on what leaves it."""

        sft_items: int | None = Field(None, ge=1)
        """Expert solutions per supervised step, which runs when this many are queued; null: B."""
        capacity: int | None = Field(None, ge=1)
        """Maximum groups in the queue, first in first out; null: one per prompt."""
        sft_lr: float = Field(1e-6, gt=0)
        """Learning rate of the separate AdamW of supervised steps."""
        sft_entropy_coef: float = Field(0.001, ge=0)
        """Coefficient of their mean token entropy."""
        sft_grad_clip: float = Field(1.0, gt=0)
        """Maximum L2 norm of their gradient."""

    _own: Settings

    @classmethod
    def check(cls, config: Any, own: Settings) -> Iterator[str]:
        yield from without_experts(config)
        size = config.algorithm.batch_size
        if (own.sft_items or 0) > size:
            yield (
                f"algorithm.options.sft_items = {own.sft_items} is more than algorithm.batch_size = {size}, the "
                f"maximum per step; use at most {size}"
            )
        number = own.sft_items or size
        if own.capacity is not None and own.capacity < number:
            yield (
                f"algorithm.options.capacity = {own.capacity} is less than the {number} expert solutions that a "
                f"supervised step waits for; use at least {number}, null, or a smaller algorithm.options.sft_items"
            )

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t, and the queue after it."""
        x1, reasons = filtered_fresh(self._settings, view.fresh, rng("online_filter"))
        failed = [stat for stat in view.fresh if is_out_of_reach(stat)]
        queue = once_per_prompt(with_fresh(view.high, failed, view.step))
        supervised, queue = self._taken(queue)
        items = [
            *(Item(origin=Origin.X1, parts=(Part(group_id=stat.group_id, rows=stat.sampled_rows),)) for stat in x1),
            *(
                Item(origin=Origin.X3, parts=(Part(group_id=stat.group_id, rows=stat.expert_rows),), kind="sft")
                for stat in supervised
            ),
        ]
        return Decision(
            items=tuple(items),
            r_tot=r_tot_of(self._settings, view),
            high=newest(queue, self._own.capacity),
            reasons={**unused(view), **reasons, **{stat.group_id: Reason.SUPERVISED for stat in supervised}},
        )

    def _taken(self, queue: Groups) -> tuple[Groups, Groups]:
        """(the newest N, the rest) when that many wait, else (none, all)."""
        number = self._own.sft_items or self._settings.batch_size
        if len(queue) < number:
            return (), queue
        return queue[len(queue) - number :], queue[: len(queue) - number]


def is_out_of_reach(stat: GroupStat) -> bool:
    """No sampled response is right or better than another, none is truncated, and there is an expert solution."""
    ended = all(stat.outcomes[row] != Outcome.TRUNCATED for row in stat.sampled_rows)
    return not is_informative(stat) and not is_all_correct(stat) and ended and bool(stat.expert_rows)
