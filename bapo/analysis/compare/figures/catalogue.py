"""The paper's figures and what of them these records show: which function, and a sentence on how ours differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bapo.analysis.compare.figures import bars, lines
from bapo.analysis.compare.figures.lines import Drawn
from bapo.analysis.compare.gather import Compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One figure of the paper."""

    number: int
    title: str
    ours: str
    """What ours shows."""
    draw: Callable[[Compared], Drawn]

    @property
    def key(self) -> str:
        """Its file name."""
        return f"figure-{self.number:02d}"


def _drawing(compared: Compared) -> Drawn:
    return "it is a drawing of the framework, not of a run; ours is in docs/architecture.md"


CATALOGUE = (
    Entry(
        number=1,
        title="Prompts per accuracy group before and after the baseline",
        ours="held-out problems by right responses, base model and first method; the paper has training prompts",
        draw=bars.before_and_after,
    ),
    Entry(number=2, title="On- and off-policy frameworks", ours="", draw=_drawing),
    Entry(number=3, title="Workflow of rollout and training", ours="", draw=_drawing),
    Entry(
        number=4,
        title="Training curves of reward",
        ours="mean reward of all fresh responses, before the filter; mean of a twelfth of the steps; range over seeds",
        draw=lines.training_reward,
    ),
    Entry(
        number=5,
        title="Test curves, method by method",
        ours="mean accuracy of the held-out splits; a star is the best measurement; range over seeds",
        draw=lines.pairs,
    ),
    Entry(
        number=6,
        title="Ablations",
        ours="variants of BAPO that change one thing, by what they change: delay and period, subsets, thresholds",
        draw=lines.ablations,
    ),
    Entry(
        number=7,
        title="Accuracy bins of training prompts",
        ours="fresh groups by right responses at each prompt's first, second ... visit; red: none right",
        draw=bars.training_bins,
    ),
    Entry(
        number=8,
        title="What batches are made of",
        ours="groups of each origin per step, mean over seeds, against B",
        draw=bars.compositions,
    ),
    Entry(
        number=9,
        title="Cumulative rollouts",
        ours="responses sampled for training, fresh and re-evaluated, over steps",
        draw=lines.rollouts,
    ),
    Entry(
        number=10,
        title="Online filters",
        ours="gradient norm before clipping and mean held-out accuracy of BAPO under each online filter",
        draw=lines.filters,
    ),
    Entry(
        number=11,
        title="Training dynamics",
        ours="reward, entropy of trained tokens and tokens per fresh response",
        draw=lines.dynamics,
    ),
    Entry(
        number=12,
        title="Test curves by benchmark",
        ours="accuracy of each held-out split; measurements on fewer prompts enter by their change on the shared ones",
        draw=lines.test_curves,
    ),
    Entry(
        number=13,
        title="Accuracy bins, base model and methods",
        ours="held-out problems by right responses before and after training; the paper has training sets of two tasks",
        draw=bars.held_out_stacks,
    ),
    Entry(
        number=14,
        title="Shares of X1, X2 and X3",
        ours="figure 8 as shares of the batch",
        draw=bars.shares,
    ),
    Entry(
        number=15,
        title="Accuracy migration",
        ours="bin at first against bin at last, of up to four methods; blue better, red worse, equally strong, counts "
        "logarithmic; the base model measured twice shows how much of it is chance",
        draw=bars.migrations,
    ),
    Entry(
        number=16,
        title="Batch adaptation with a critic",
        ours="held-out accuracy of methods with a critic",
        draw=lines.with_critic,
    ),
)
