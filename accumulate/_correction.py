"""Making a closed window exact: the sum of its weights over the ranks, and one multiply of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._errors import AccumulateError
from ._gradients import Gradients
from ._ranks import Ranks, Sum
from ._scaling import correction
from ._tally import Tally

__all__ = ["Correction", "global_mean"]


class Correction:
    """Multiplies gradients by R / (scale * sum of weights), unless that is known to be 1 or the user scales."""

    def __init__(self, ranks: Ranks, gradients: Sequence[Gradients], guess: float | None) -> None:
        self._guess = guess
        self.mean_weight: float | Tensor | None = guess
        """The mean weight of a micro-batch in the last weighted window, over all ranks; before it, a guess or None."""
        self._ranks = ranks
        self._gradients = gradients
        self._sum: Sum | None = None

    def restore(self, mean_weight: float | Tensor | None) -> None:
        """Go on as after the window that had this mean weight."""
        self.mean_weight = self._guess if mean_weight is None else mean_weight

    def start(self, tally: Tally) -> None:
        """Begin to sum the window's weights, if they have to be known: before backward, to overlap with it."""
        if self._sum is None:
            self._sum = self._ranks.start_sum(tally.totals())

    def forget(self) -> None:
        """Drop the sum of a micro-batch that failed."""
        self._sum = None

    def agree(self, tally: Tally) -> tuple[bool, bool | None]:
        """Sum what all ranks have open, for a flush: whether there is anything, and whether its losses carry weights.

        Reads one vector on the host.
        """
        mode = (float(tally.weighted is True), float(tally.weighted is False or tally.has_means))
        sums = self._ranks.start_sum((*tally.totals(), *mode))
        _, count, weighted, unweighted = sums.result().tolist()
        if weighted and unweighted:
            raise AccumulateError(
                "some losses of this window have a weight and some have none, here or on another rank, so it has no "
                "common denominator. Pass a weight to each, on every rank; reset() drops this window."
            )
        self._sum = sums if count else None
        return bool(count), bool(weighted) if weighted or unweighted else None

    def apply(self, tally: Tally) -> None:
        """Correct the gradients of a window that has been reduced."""
        if tally.weighted is None:
            return
        if tally.is_exact:
            self._correct_unwrapped(tally)
            return
        if tally.has_means:
            raise AccumulateError(
                "a window that weight=fn counted ahead and that holds losses without a weight too was closed early by "
                "hand, so its two denominators are not what it was scaled by. Let batches() close it; reset() drops it."
            )
        self.start(tally)
        assert self._sum is not None  # just started, if it was not under way
        total, count = self._sum.result()[:2]
        self._sum = None
        for gradients in self._gradients:
            if gradients.is_wrapped or self._ranks.chosen:
                gradients.multiply(correction(self._ranks.size, tally.scale, total))
        self._correct_unwrapped(tally)
        if tally.weighted:
            previous = 1.0 if self.mean_weight is None else self.mean_weight
            # Never an infinite one: every later scale would be 0.
            self.mean_weight = torch.where((total > 0) & total.isfinite(), total / count, previous)

    def _correct_unwrapped(self, tally: Tally) -> None:
        """Models that no wrapper averages, beside others that one does: their window holds this rank's data alone."""
        alone = [g for g in self._gradients if not (g.is_wrapped or self._ranks.chosen)]
        if not alone or (tally.is_exact and self._ranks.size == 1):
            return
        if tally.is_exact and not tally.weighted and abs(tally.count_scale * tally.real - 1) < 1e-9:
            return
        if tally.has_means:
            raise AccumulateError(
                "losses with and without a weight in one window, and a model without a wrapper beside wrapped ones: "
                "its denominators are this rank's own, so no one factor fits. Give it an Accumulator of its own."
            )
        local = self._ranks.start_sum(tally.totals(), local=True).result()[0]
        for gradients in alone:
            gradients.multiply(correction(1, tally.scale, local))


def global_mean(ranks: Ranks, pairs: Sequence[tuple[Tensor, float | Tensor]]) -> Tensor:
    """The sum of each pair's first over that of its second, on all ranks together; both means added up."""
    sums = ranks.start_sum([value for pair in pairs for value in pair]).result()
    totals, weights = sums[0::2], sums[1::2]
    return torch.where(weights > 0, totals / weights, torch.zeros_like(weights)).sum().to(pairs[0][0].dtype)
