"""How far two gradients are apart, what of that is rounding, and which sum of gradients would be right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .subject import Grads, Run, Subject

__all__ = [
    "Rounding",
    "combined",
    "distance",
    "equations",
    "errors",
    "mean_weights",
    "ratio",
    "scaled",
    "scales",
    "size",
]

_SHARE = 1e-2
"""A gradient smaller than this share of the whole is measured against the share: zeros would be all rounding."""
_EXACT = 1e-9
"""Below this nothing but float64's rounding is left."""
_LIMITS = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Above these nothing can be rounding; float64's is that of a model with some float32 inside."""
_LOW = 0.1
_SAMPLES = 256
"""Entries of each gradient, the largest, that are compared where a sum of many gradients is searched."""


def size(grads: Grads) -> float:
    """The Euclidean norm over all parameters."""
    return math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))


def errors(grads: Grads, expected: Grads) -> dict[str, float]:
    """The relative error of each parameter's gradient; a gradient that is missing counts as zeros."""
    floor = _SHARE * size(expected)
    found = {}
    for name in sorted({*grads, *expected}):
        zeros = torch.zeros(())
        reference = expected.get(name, zeros)
        difference = float((grads.get(name, zeros) - reference).norm())
        error = difference / max(float(reference.norm()), floor) if difference else 0.0
        found[name] = error if math.isfinite(error) else math.inf
    return found


def distance(grads: Grads, expected: Grads) -> float:
    """The relative error over all parameters."""
    missed = {name: grads.get(name, torch.zeros(())) - grad for name, grad in expected.items()}
    return size(missed) / size(expected)


def ratio(grads: Grads, expected: Grads) -> float:
    """The factor that makes ``expected`` most like ``grads``, by least squares over all parameters."""
    products = sum(float((grads[name] * grad).sum()) for name, grad in expected.items() if name in grads)
    return products / size(expected) ** 2


def scaled(grads: Grads, factor: float) -> Grads:
    """The gradients times a factor."""
    return {name: grad * factor for name, grad in grads.items()}


def combined(runs: Sequence[Run]) -> Grads:
    """What accumulation makes of these micro-batches: the mean by weight, where each weight is 1 if none was given."""
    weights = [1.0 if run.weight is None else run.weight for run in runs]
    total: Grads = {}
    for run, weight in zip(runs, weights, strict=True):
        for name, grad in run.grads.items() if weight else ():
            total[name] = total.get(name, torch.zeros(())) + grad * weight / sum(weights)
    return total


class Rounding:
    """Tells rounding from error.

    Between what is clearly one or the other, the whole batch with its rows in reverse order decides: that changes every
    sum as micro-batches do, and nothing else.
    """

    def __init__(self, subject: Subject, whole: Grads) -> None:
        self.limit = _LIMITS.get(subject.dtype, _LOW)
        self._subject = subject
        self._whole = whole

    def same(self, grads: Grads, expected: Grads) -> bool:
        """Whether two gradients differ by no more than rounding."""
        worst = max(errors(grads, expected).values(), default=0.0)
        return worst <= _EXACT or (worst <= self.limit and worst <= 30 * self._noise)

    def parallel(self, grads: Grads, expected: Grads) -> bool:
        """Whether two gradients differ by no more than a factor."""
        return self.same(grads, scaled(expected, ratio(grads, expected)))

    @cached_property
    def _noise(self) -> float:
        reversed_rows = tuple(tensor.flip(0) for tensor in self._subject.batch)
        return max(errors(self._subject.run(reversed_rows).grads, self._whole).values())


def equations(whole: Grads) -> int:
    """How many entries of the whole batch's gradient say something where a sum of many gradients is searched."""
    return sum(min(_SAMPLES, int(grad.count_nonzero())) for grad in whole.values())


def _columns(runs: Sequence[Run], whole: Grads) -> tuple[Tensor, Tensor]:
    """The largest entries of the whole batch's gradient, as a vector, and the same entries of each micro-batch's."""
    largest = {name: grad.flatten().abs().topk(min(_SAMPLES, grad.numel())).indices for name, grad in whole.items()}

    def sample(grads: Grads, weight: float | None) -> Tensor:
        zeros = {name: torch.zeros(len(places), dtype=torch.float64) for name, places in largest.items()}
        given = {} if weight == 0 else grads
        return torch.cat([given[n].flatten()[at] if n in given else zeros[n] for n, at in largest.items()])

    target = sample(whole, None)
    return torch.stack([sample(run.grads, run.weight) for run in runs], dim=1), target


def mean_weights(runs: Sequence[Run], whole: Grads, limit: float) -> list[float] | None:
    """Weights that sum to 1 and make the mean of the micro-batches' gradients the whole batch's; None if none do."""
    columns, target = _columns(runs, whole)
    one = target.norm()  # the row that says "they sum to 1", as large as the others
    columns = torch.cat([columns, one.expand(1, len(runs))])
    found = _solve(columns, torch.cat([target, one.reshape(1)]), limit)
    return found if found and min(found) > -0.01 else None


def scales(runs: Sequence[Run], whole: Grads, limit: float) -> list[float] | None:
    """Factors that make the sum of the micro-batches' gradients that of the whole batch; None if there are none."""
    return _solve(*_columns(runs, whole), limit)


def _solve(columns: Tensor, target: Tensor, limit: float) -> list[float] | None:
    if not bool(columns.isfinite().all()):
        return None
    found = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution
    missed = float((columns @ found - target[:, None]).norm() / target.norm())
    result: list[float] = found.flatten().tolist()
    return result if missed <= limit else None
