"""Whether an engine's kernels multiply with the weights that arrived: fixed vectors through every linear layer.

    weights of an update --noted--> X W^T of each matrix as it arrives, in float32       p_new; those before: p_old
    after the update     --problem--> the same X through each layer's own kernel       y
    t = <y - p_old, p_new - p_old> / |p_new - p_old|^2        1 with the new weights, 0 with the old ones

The log-probs of a text (`canary.py`) pass through all layers in the engine's precision: in bfloat16 they differ by
hundredths of a nat, and a step of 1e-3 on every weight changes them by no more. One product is rounded once, and has
thousands of outputs, so t separates old from new weights down to steps of 1e-6, on packed kernels too.

Suffixes: X vectors, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

NUM_VECTORS, MAX_VECTORS = 4, 128
"""The fewest, and the most for a matrix with few outputs."""
NUM_PRODUCTS = 4096
"""At least, of a matrix, if `MAX_VECTORS` allow it: the deviation of t is that of one product over their root."""
ROWS_AT_ONCE = 8192
"""Outputs of a matrix per product: a whole head in float32 may not fit in memory."""
BOUND = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest |y - p_new| / |p_new| of a kernel with the new weights: all that can be said at the first update, for which
nothing is old. Rounding of y alone is 1e-3 in bfloat16."""
HALF = 0.5
"""Nearer to the old weights than to the new ones."""
SIGMAS, SIGMAS_OF_ONE = 3.0, 5.0
"""Standard deviations of t below `HALF` that all matrices together, or one of hundreds, must have to be called old.
Where a step is so small that t is noise, nothing is decided."""

Kernel = Callable[[Tensor], Tensor]
"""[X, I] -> [X, O], or more outputs, of which the last are padding."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A layer of the engine; a fused one holds several matrices, output after output."""

    names: tuple[str, ...]
    """Of its matrices, as they arrive."""
    sizes: tuple[int, ...]
    """O of each."""
    num_inputs: int
    kernel: Kernel


class KernelProbe:
    """The products of the newest weights and of those before, in one rank of an engine."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of the model."""
        self._dtype, self._device = dtype, device
        self._new: dict[str, Tensor] = {}
        self._old: dict[str, Tensor] = {}
        self.decides = False
        """Whether the last `problem` could tell the new weights from the old ones."""

    def begin(self) -> None:
        """Before an update: what has arrived until now becomes old."""
        self._old = dict(self._new)

    @property
    def names(self) -> Iterable[str]:
        """Of the matrices that have arrived."""
        return self._new

    def knows(self, names: Sequence[str], sizes: Sequence[int]) -> bool:
        """Whether these matrices have arrived, with these numbers of outputs."""
        found = [self._new[name].shape[1] for name in names if name in self._new]
        return len(found) == len(names) and found == list(sizes)

    def noted(
        self, weights: Iterable[tuple[str, Tensor]], rename: Callable[[str], str] = str
    ) -> Iterator[tuple[str, Tensor]]:
        """The same weights, on the engine's device, while their products are kept. `rename`: to the layers' names."""
        for name, tensor in weights:
            arrived = tensor.to(self._device)
            if arrived.ndim == 2 and arrived.is_floating_point():
                self._new[rename(name)] = product(arrived)
            yield name, arrived

    def problem(self, layers: Iterable[Linear]) -> str:
        """After an update: why the kernels do not have the weights that arrived; empty if they do."""
        found = [
            _gap(name, y, self._new[name], self._old.get(name, self._new[name]))
            for each in layers
            for name, y in self._measured(each).items()
        ]
        for gap in found:
            if not gap.distance <= BOUND[self._dtype]:  # also true for NaN
                return f"{gap.name} gives products that differ by {gap.distance:.2g} from those of the weights sent"
        self.decides = bool(found) and not _is_noise(found, SIGMAS)
        old = [gap.name for gap in found if _is_old([gap], SIGMAS_OF_ONE)]
        if not old and not _is_old(found, SIGMAS):
            return ""
        which = f"{old[0]} and {len(old) - 1} others have" if old else f"its {len(found)} matrices together have"
        return f"{which} the weights before"

    def _measured(self, layer: Linear) -> dict[str, Tensor]:
        """[X, O] of each matrix of a layer."""
        nums = [len(self._new[name]) for name in layer.names]
        y_XO = layer.kernel(vectors(layer.num_inputs, max(nums), self._device).to(self._dtype)).float()
        parts = y_XO[:, : sum(layer.sizes)].split(layer.sizes, dim=1)
        return {name: part[:num] for name, part, num in zip(layer.names, parts, nums, strict=True)}


@lru_cache
def signs(num_inputs: int) -> Tensor:
    """[`MAX_VECTORS`, I] of +1 and -1, exact in every dtype and the same in every process."""
    rng = torch.Generator().manual_seed(num_inputs)
    return 2.0 * torch.randint(0, 2, (MAX_VECTORS, num_inputs), generator=rng) - 1.0


def vectors(num_inputs: int, num: int, device: torch.device) -> Tensor:
    """[X, I] float32: the first `num` of them."""
    return signs(num_inputs)[:num].to(device)


def product(weight_OI: Tensor) -> Tensor:
    """[X, O] float32."""
    num_outputs, num_inputs = weight_OI.shape
    num = min(MAX_VECTORS, max(NUM_VECTORS, -(-NUM_PRODUCTS // num_outputs)))
    x_XI = vectors(num_inputs, num, weight_OI.device)
    return torch.cat([x_XI @ rows.float().T for rows in weight_OI.split(ROWS_AT_ONCE)], dim=1)


@dataclass(frozen=True, slots=True)
class _Gap:
    name: str
    distance: float
    """|y - p_new| / |p_new|."""
    along: float
    """<y - p_old, p_new - p_old> over |p_new|^2, so that all matrices count alike."""
    step: float
    """|p_new - p_old|^2 over |p_new|^2."""
    noise: float
    """Variance of `along`: that of one rounded output, which is not known to be of the old or of the new weights."""


def _gap(name: str, y_XO: Tensor, new_XO: Tensor, old_XO: Tensor) -> _Gap:
    scale = float((new_XO.double() ** 2).sum()) or 1.0
    y, new, old = (each.double() for each in (y_XO, new_XO, old_XO))
    step = float(((new - old) ** 2).sum())
    rest = min(float(((y - new) ** 2).sum()), float(((y - old) ** 2).sum())) / y.numel()
    return _Gap(
        name=name,
        distance=math.sqrt(float(((y - new) ** 2).sum()) / scale),
        along=float(((y - old) * (new - old)).sum()) / scale,
        step=step / scale,
        noise=rest * step / scale**2,
    )


def _is_old(gaps: Sequence[_Gap], sigmas: float) -> bool:
    t, deviation = _position(gaps)
    return t < HALF - sigmas * deviation


def _is_noise(gaps: Sequence[_Gap], sigmas: float) -> bool:
    """Whether t tells neither the new weights nor the old ones."""
    t, deviation = _position(gaps)
    return abs(t - HALF) < sigmas * deviation


def _position(gaps: Sequence[_Gap]) -> tuple[float, float]:
    """(t, its standard deviation) of all these together; (1, 0) where new and old weights are the same."""
    step = sum(gap.step for gap in gaps)
    if step == 0:
        return 1.0, 0.0
    return sum(gap.along for gap in gaps) / step, math.sqrt(sum(gap.noise for gap in gaps)) / step
