"""The section "Theorem meter" of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bapo.report import figures, theorem
from bapo.report.data import Row
from bapo.report.markup import Rows, figure, paragraph, table

WORDS = {"x1": "X1", "x2": "X2", "x3": "X3"}
CONSTANTS = {
    "k1": "K1 (eq. 11)",
    "k2": "K2 (eq. 12, as printed)",
    "k2_on_grid": "K2 on the grid of k/G",
    "k3": "K3 (eq. 13)",
}
SHOWN_WARNINGS = 5


def theorem_meter(metrics: Sequence[Row], config: Mapping[str, Any]) -> Iterator[str]:
    """Distances, effective samples, constants, bounds and warnings; nothing when no step was measured."""
    if not theorem.is_measured(metrics):
        return
    limits = config.get("diagnostics", {})
    yield "<h2>Theorem meter</h2>"
    yield paragraph(
        "How far the policy is from the policies that sampled its batch, and what theorem 3.2 then promises. Measured "
        "on log-probs that the update has anyway; docs/theory.md says what each number means and when to worry."
    )
    yield from _curves(metrics, limits)
    yield table(
        ("subset", "age", "steps", "groups", "TV per token", "p95", "TV of a response", "most delta", "KL(alpha | pi)",
         "ESS", "least ESS", "largest ratio"),
        _distance_rows(metrics),
    )  # fmt: skip
    yield table(("constant", "least", "largest"), _constant_rows(metrics))
    yield from _bounds(metrics)
    yield from _warnings(metrics)


def _curves(metrics: Sequence[Row], limits: Mapping[str, Any]) -> Iterator[str]:
    tv, ess = theorem.curves(metrics, "tv_tok", spread="tv_tok_p95"), theorem.curves(metrics, "ess")
    words = "; ".join(f"{WORDS[c.name]} {sum(c.values) / len(c.values):.3g} on average" for c in tv)
    yield figure(
        figures.meter_figure(tv, "total variation per token", limits.get("tv_warn")),
        f"Total variation per token of the current policy and the one that sampled: {words}.",
        "current policy against the policy that sampled, mean over tokens; the band reaches to the 95 % quantile of "
        "the groups; the dashed line is diagnostics.tv_warn",
    )
    words = "; ".join(f"{WORDS[c.name]} {min(c.values):.2f} at least" for c in ess)
    yield figure(
        figures.meter_figure(ess, "effective share of responses", limits.get("ess_warn")),
        f"Effective sample size as a share of the responses: {words}.",
        "how many of the responses still count once they are reweighted to the current policy; the dashed line is "
        "diagnostics.ess_warn",
    )


def _distance_rows(metrics: Sequence[Row]) -> Rows:
    return [
        (
            WORDS[cell.origin],
            "all" if cell.age is None else str(cell.age),
            str(cell.num_steps),
            f"{cell.groups:.1f}",
            f"{cell.means['tv_tok']:.4f}",
            f"{cell.means['tv_tok_p95']:.4f}",
            f"{cell.means['tv_seq']:.3f}",
            f"{cell.most['delta_max']:.3f}",
            f"{cell.means['kl_fwd']:.4f}",
            f"{cell.means['ess']:.3f}",
            f"{cell.least_ess:.3f}",
            f"{cell.most['max_ratio']:.3g}",
        )
        for cell in theorem.cell_summaries(metrics)
    ]


def _constant_rows(metrics: Sequence[Row]) -> Rows:
    return [(CONSTANTS[k], f"{low:.4f}", f"{high:.4f}") for k, (low, high) in theorem.constants(metrics).items()]


def _bounds(metrics: Sequence[Row]) -> Iterator[str]:
    summaries = theorem.bound_summaries(metrics)
    if not summaries:
        yield paragraph("No step had a bound: the current policy was not known for any group of a last mini-batch.")
        return
    yield table(
        ("subset", "steps", "L", "K TV(theta)", "TV(theta_t)", "L - 2 K TV - 2 TV, as printed", "L - K TV - TV, tight"),
        [
            (
                WORDS[bound.origin],
                str(bound.num_steps),
                *(f"{bound.means[name]:.4f}" for name in ("gain", "penalty_theta", "penalty_current")),
                *(f"{bound.means[form]:.4f}, {bound.words(form)}" for form in ("paper", "tight")),
            )
            for bound in summaries
        ],
    )
    yield paragraph(
        "Lower bound of the improvement of the last mini-batch's prompts, means over steps. Vacuous: the estimate is "
        "not above 0 by more than its own noise, so the theorem promises no improvement of that step; it does not say "
        "that there was none."
    )


def _warnings(metrics: Sequence[Row]) -> Iterator[str]:
    found = theorem.warnings(metrics)
    if not found:
        yield paragraph("No step went beyond diagnostics.tv_warn or diagnostics.ess_warn.")
        return
    yield paragraph(f"{len(found)} of {len(metrics)} steps went beyond a limit of [diagnostics]; the latest:")
    yield table(("step", "what"), [(str(step), text) for step, text in found[-SHOWN_WARNINGS:]])
